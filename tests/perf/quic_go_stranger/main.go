// A browser that knows nothing of Culvert, on quic-go. Run by hand, against the port of an agent:
//
//	go run . HOST:PORT           fetches a megabyte over HTTP/3, moves to another port, fetches it again, closes
//	go run . -silence HOST:PORT  connects until it gives up; not one datagram may come
//
// The site behind the decoy is tests/namespace/strangers/decoy_site.py. Its certificate is not verified. In tests/namespace/strangers, with the Python of
// target/interop-venv:
//
//	python -m hypercorn --workers 0 --quic-bind 127.0.0.1:8443 --bind 127.0.0.1:8444 --certfile cert.pem --keyfile key.pem decoy_site:app
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

const (
	name     = "site.example"
	size     = 1 << 20
	giveUp   = 2 * time.Second
	patience = 30 * time.Second
)

// A socket that counts what it hears. It is no *net.UDPConn, which quic-go would read in ways of its own.
type ear struct {
	net.PacketConn
	heard atomic.Int64
}

func (e *ear) ReadFrom(buffer []byte) (int, net.Addr, error) {
	length, from, err := e.PacketConn.ReadFrom(buffer)
	e.heard.Add(int64(length))
	return length, from, err
}

func socket() *net.UDPConn {
	conn, err := net.ListenUDP("udp", nil)
	check(err)
	return conn
}

func main() {
	silence := flag.Bool("silence", false, "expect nothing")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "which HOST:PORT?")
		os.Exit(2)
	}
	server, err := net.ResolveUDPAddr("udp", flag.Arg(0))
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if *silence {
		expectNothing(ctx, server)
	} else {
		visit(ctx, server)
	}
}

func tlsConfig() *tls.Config {
	return &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}
}

func expectNothing(ctx context.Context, server *net.UDPAddr) {
	ear := &ear{PacketConn: socket()}
	transport := &quic.Transport{Conn: ear}
	_, err := transport.Dial(ctx, server, tlsConfig(), &quic.Config{HandshakeIdleTimeout: giveUp})
	var idle *quic.IdleTimeoutError
	var slow *quic.HandshakeTimeoutError
	if !errors.As(err, &idle) && !errors.As(err, &slow) {
		fail("it did not time out: %v", err)
	}
	if heard := ear.heard.Load(); heard != 0 {
		fail("%d bytes came", heard)
	}
	fmt.Println("silence")
}

func visit(ctx context.Context, server *net.UDPAddr) {
	first := &quic.Transport{Conn: socket()}
	// Little credit, so that the rest of an answer cannot come before the client has moved.
	config := &quic.Config{
		InitialStreamReceiveWindow: 1 << 16, MaxStreamReceiveWindow: 1 << 16,
		InitialConnectionReceiveWindow: 1 << 16, MaxConnectionReceiveWindow: 1 << 16,
	}
	conn, err := first.Dial(ctx, server, tlsConfig(), config)
	check(err)
	browser := (&http3.Transport{}).NewClientConn(conn)
	body := get(ctx, browser)
	half := make([]byte, 1<<15)
	_, err = io.ReadFull(body, half)
	check(err)

	path, err := conn.AddPath(&quic.Transport{Conn: socket()})
	check(err)
	check(path.Probe(ctx))
	check(path.Switch())
	compare(half, body)
	compare(nil, get(ctx, browser))
	check(conn.CloseWithError(0x100, ""))
	fmt.Println("fetched")
}

func get(ctx context.Context, browser *http3.ClientConn) io.ReadCloser {
	url := fmt.Sprintf("https://%s/%d", name, size)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	check(err)
	answer, err := browser.RoundTrip(request)
	check(err)
	if answer.StatusCode != http.StatusOK {
		fail("status %d", answer.StatusCode)
	}
	return answer.Body
}

// Reads the rest of an answer, and compares the whole with what the site has.
func compare(start []byte, rest io.ReadCloser) {
	body, err := io.ReadAll(rest)
	check(err)
	body = append(start, body...)
	if len(body) != size {
		fail("%d bytes", len(body))
	}
	for place, value := range body {
		if value != byte(place%251) {
			fail("byte %d is not the site's", place)
		}
	}
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(1)
}

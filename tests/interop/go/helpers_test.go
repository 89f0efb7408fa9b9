package culvert_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"io"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"culvert.example/culvert"
)

// patience is the deadline of everything that a test waits for.
const patience = 20 * time.Second

func newKey(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	key, err := culvert.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// logger shows what happens when CULVERT_GO_LOG is set.
func logger() *slog.Logger {
	if os.Getenv("CULVERT_GO_LOG") == "" {
		return nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}

// echo is a UDP and TCP server that sends back what it gets.
type echo struct {
	address   string
	datagrams atomic.Int64
}

func newEcho(t testing.TB) *echo {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := tcp.Addr().String()
	udp, err := net.ListenPacket("udp", address)
	// A port that is free for TCP may be another test's for UDP.
	for attempt := 0; err != nil && attempt < 20; attempt++ {
		tcp.Close()
		if tcp, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		address = tcp.Addr().String()
		udp, err = net.ListenPacket("udp", address)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = udp.(*net.UDPConn).SetReadBuffer(4 << 20)
	t.Cleanup(func() { tcp.Close(); udp.Close() })
	e := &echo{address: address}
	go func() {
		buffer := make([]byte, 65536)
		for {
			n, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			e.datagrams.Add(1)
			_, _ = udp.WriteTo(buffer[:n], from)
		}
	}()
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				conn.Close()
			}()
		}
	}()
	return e
}

// services are those of a test's agent: echo over both protocols, and the same with pieces.
func (e *echo) services() []culvert.Service {
	udp, tcp := culvert.Forward("udp", e.address), culvert.Forward("tcp", e.address)
	return []culvert.Service{
		{Name: "echo", UDP: udp, TCP: tcp},
		{Name: "large", UDP: udp, Fragment: true},
		{Name: "brief", UDP: udp, Idle: 300 * time.Millisecond},
	}
}

func listen(t testing.TB, config culvert.Config) *culvert.Listener {
	t.Helper()
	l, err := culvert.Listen("127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func dial(t testing.TB, link culvert.Link, config culvert.Config) *culvert.Peer {
	t.Helper()
	p, err := culvert.Dial(within(t), link, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func openFlow(t testing.TB, p *culvert.Peer, service string) *culvert.Flow {
	t.Helper()
	flow, err := p.OpenFlow(service)
	if err != nil {
		t.Fatal(err)
	}
	return flow
}

// exchange sends datagrams until one of them is echoed.
func exchange(t testing.TB, conn net.Conn, datagram []byte) {
	t.Helper()
	buffer := make([]byte, 65536)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if _, err := conn.Write(datagram); err != nil {
			// Between two connections, or two lanes.
			time.Sleep(10 * time.Millisecond)
			continue
		}
		_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		for {
			n, err := conn.Read(buffer)
			if err != nil {
				break
			}
			if bytes.Equal(buffer[:n], datagram) {
				return
			}
		}
	}
	t.Fatalf("no echo of %d bytes", len(datagram))
}

// converse has count datagrams of size bytes echoed, each of them; one that is lost is sent again.
func converse(t testing.TB, conn net.Conn, count, size int) {
	t.Helper()
	for range count {
		exchange(t, conn, random(size))
	}
}

func random(size int) []byte {
	b := make([]byte, size)
	_, _ = rand.Read(b)
	return b
}

// stream sends bytes through a forward to the echo and ends its direction; it compares what comes back.
func stream(t testing.TB, p *culvert.Peer, size int) {
	t.Helper()
	s, err := p.OpenStream(within(t), "echo")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	sent := random(size)
	go func() {
		_, _ = s.Write(sent)
		_ = s.CloseWrite()
	}()
	_ = s.SetReadDeadline(time.Now().Add(patience))
	got, err := io.ReadAll(s)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes came back of %d, or others", len(got), len(sent))
	}
}

func eventually(t testing.TB, what string, ready func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ready(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

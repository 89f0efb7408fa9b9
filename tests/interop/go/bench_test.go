package culvert_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert"
)

// Benchmarks against a release of the agent:
//
//	CULVERT=../../../target/release/culvert go test -run - -bench . -benchtime 3s -count 5 .

// newSink takes TCP connections and throws away what they bring; its UDP port is never read, so that counting costs nothing.
func newSink(b *testing.B) string {
	b.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	udp, err := net.ListenPacket("udp", tcp.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, struct{ io.Reader }{conn})
				conn.Close()
			}()
		}
	}()
	return tcp.Addr().String()
}

// toAgent is a peer that dialled an agent whose service "echo" is a sink.
func toAgent(b *testing.B, lanes int) (*agent, *culvert.Peer) {
	b.Helper()
	key := newKey(b)
	a := newAgent(b, &echo{address: newSink(b)}, culvert.PublicOf(key))
	return a, dial(b, a.link(), culvert.Config{Key: key, Lanes: lanes, Logger: logger()})
}

var deliveredLine = regexp.MustCompile(`(?m)^culvert_peer_datagrams_delivered_total\{[^}]*\} (\d+)`)

// delivered is how many datagrams the agent passed on.
func (a *agent) delivered() (count uint64) {
	a.t.Helper()
	answer, err := http.Get("http://" + a.metrics + "/metrics")
	if err != nil {
		a.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	for _, line := range deliveredLine.FindAllSubmatch(text, -1) {
		one, err := strconv.ParseUint(string(line[1]), 10, 64)
		if err != nil {
			a.t.Fatal(err)
		}
		count += one
	}
	return count
}

// Datagrams of 1150 bytes, sent as fast as a flow takes them, and those that the agent delivered.
func BenchmarkDatagramsToTheAgent(b *testing.B) {
	const size = 1150
	a, p := toAgent(b, 2)
	flow := openFlow(b, p, "echo")
	datagram := make([]byte, size)
	eventually(b, "the lanes carry datagrams", func() bool {
		_, _ = flow.Write(datagram)
		return len(p.Stats().Lanes) == 2 && a.delivered() > 0
	})
	before := a.delivered()
	for b.Loop() {
		if _, err := flow.Write(datagram); err != nil {
			b.Fatal(err)
		}
	}
	took := b.Elapsed()
	time.Sleep(300 * time.Millisecond)
	count := a.delivered() - before
	b.ReportMetric(float64(count)*size*8/took.Seconds()/1e9, "Gbit/s-delivered")
	b.ReportMetric(100*(1-float64(count)/float64(b.N)), "%-lost")
}

const writeSize = 64 << 10

// writes sends b.N pieces and waits until the far end has closed.
func writes(b *testing.B, stream io.Writer, finish func()) {
	b.Helper()
	piece := make([]byte, writeSize)
	b.SetBytes(writeSize)
	for b.Loop() {
		if _, err := stream.Write(piece); err != nil {
			b.Fatal(err)
		}
	}
	finish()
	b.ReportMetric(float64(b.N)*writeSize*8/b.Elapsed().Seconds()/1e9, "Gbit/s")
}

// One TCP forward to the agent.
func BenchmarkForwardToTheAgent(b *testing.B) {
	_, p := toAgent(b, 2)
	stream, err := p.OpenStream(within(b), "echo")
	if err != nil {
		b.Fatal(err)
	}
	writes(b, stream, func() { _ = stream.CloseWrite(); _, _ = io.Copy(io.Discard, stream) })
}

// One stream from quic-go to quic-go, to a far end that throws it away: what a forward is compared with.
func BenchmarkPlainQUIC(b *testing.B) {
	key := newKey(b)
	template := x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		b.Fatal(err)
	}
	server := &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		NextProtos:   []string{"plain"},
	}
	listener, err := quic.ListenAddr("127.0.0.1:0", server, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { listener.Close() })
	go func() {
		conn, err := listener.Accept(context.Background())
		if err != nil {
			return
		}
		stream, err := conn.AcceptStream(context.Background())
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, struct{ io.Reader }{stream})
		stream.Close()
	}()
	client := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"plain"}}
	conn, err := quic.DialAddr(within(b), listener.Addr().String(), client, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.CloseWithError(0, "") })
	stream, err := conn.OpenStreamSync(within(b))
	if err != nil {
		b.Fatal(err)
	}
	writes(b, stream, func() { stream.Close(); _, _ = io.Copy(io.Discard, stream) })
}

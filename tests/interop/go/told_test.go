package culvert

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/wire"
)

// What a peer says of streams beside them: StreamAbort and StreamCredit, by a dialler that says what a test wants.

const testPatience = 15 * time.Second

// told is a raw dialler whose hello was answered, and the service behind the listener.
type told struct {
	*raw
	service *net.TCPListener
	epoch   uint64
}

func newTold(t *testing.T) *told {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	r := rawDial(t, Service{Name: "service", TCP: Forward("tcp", listener.Addr().String())})
	r.agent.Services = []Service{{Name: "ours", TCP: Forward("tcp", "127.0.0.1:1")}}
	r.send(r.hello())
	if h := answerTo[*wire.Hello](r); h.Features&(wire.FeatureStreamAbort|wire.FeatureStreamCredit) == 0 {
		t.Fatalf("features %b", h.Features)
	}
	return &told{raw: r, service: listener.(*net.TCPListener)}
}

// open opens a stream to the service and sends bytes after the header, which has one.
func (r *told) open(sent []byte) *quic.Stream {
	r.t.Helper()
	stream, err := r.conn.OpenStream()
	if err != nil {
		r.t.Fatal(err)
	}
	_, _ = stream.Write(append(wire.StreamOpen{}.AppendFramed(nil), sent...))
	_ = stream.SetReadDeadline(time.Now().Add(testPatience))
	return stream
}

func (r *told) accept() *net.TCPConn {
	r.t.Helper()
	_ = r.service.SetDeadline(time.Now().Add(testPatience))
	conn, err := r.service.AcceptTCP()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(testPatience))
	return conn
}

// heard waits until the listener has acted on all messages: it refuses a lane of that index.
func (r *told) heard() {
	r.t.Helper()
	r.epoch++
	r.send(&wire.LaneOpen{Lane: wire.MaxLane, Epoch: r.epoch, ConnectionID: make([]byte, 8)})
	answerTo[*wire.LaneRefuse](r.raw)
}

// answer reads the StreamAnswer.
func (r *told) answer(stream *quic.Stream) {
	r.t.Helper()
	frame, err := wire.ReadFrame(stream, wire.MaxStreamHeader)
	if err != nil {
		r.t.Fatal(err)
	}
	if answer, err := wire.ParseStreamAnswer(frame); err != nil || answer.Status != wire.StatusOK {
		r.t.Fatalf("%+v, %v", answer, err)
	}
}

func (r *told) abort(stream, bytes uint64) {
	r.send(&wire.StreamAbort{Streams: []uint64{stream}, Bytes: []uint64{bytes}})
}

// resetAfter checks that the service's connection gives these bytes and then a reset, and that the stream is reset.
func (r *told) resetAfter(conn net.Conn, stream *quic.Stream, sent []byte) {
	r.t.Helper()
	got, err := io.ReadAll(conn)
	if !errors.Is(err, syscall.ECONNRESET) || !bytes.Equal(got, sent) {
		r.t.Fatalf("%d bytes of %d, then %v", len(got), len(sent), err)
	}
	var reset *quic.StreamError
	if _, err := io.Copy(io.Discard, stream); !errors.As(err, &reset) || reset.ErrorCode != resetCode || !reset.Remote {
		r.t.Fatalf("the stream of a reset connection: %v", err)
	}
}

// echoes checks that the session and its forwards go on.
func (r *told) echoes() {
	r.t.Helper()
	stream := r.open([]byte("question"))
	conn := r.accept()
	got := make([]byte, 8)
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != "question" {
		r.t.Fatalf("%q, %v", got, err)
	}
	_, _ = conn.Write([]byte("answer"))
	r.answer(stream)
	if _, err := io.ReadFull(stream, got[:6]); err != nil || string(got[:6]) != "answer" {
		r.t.Fatalf("%q, %v", got[:6], err)
	}
	conn.Close()
	_ = stream.Close()
}

func TestAnAbortBeforeItsStreamWaitsForIt(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	sent := bytes.Repeat([]byte("x"), 100_000)
	r.abort(4, 1+uint64(len(sent)))
	r.heard()
	stream := r.open(sent)
	r.resetAfter(r.accept(), stream, sent)
	r.echoes()
}

func TestAnAbortAboutAStreamThatIsNotThereIsIgnored(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	r.echoes() // stream 4
	for _, stream := range []uint64{0, 1, 2, 3, 4, 1 << 20, 1<<62 - 4, 1 << 62, math.MaxUint64} {
		r.abort(stream, 0)
		r.send(&wire.StreamCredit{Streams: []uint64{stream}, Limits: []uint64{0}})
	}
	r.send(&wire.StreamAbort{}, &wire.StreamCredit{})
	r.heard()
	r.echoes()
}

func TestOnlyTheFirstAbortOfAStreamCounts(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	stream := r.open(nil)
	conn := r.accept()
	r.abort(4, 1+10)
	r.abort(4, 1)
	r.send(&wire.StreamAbort{Streams: []uint64{4, 4}, Bytes: []uint64{0, 1 << 40}})
	r.heard()
	_, _ = stream.Write([]byte("0123456789"))
	r.resetAfter(conn, stream, []byte("0123456789"))
	r.abort(4, 5)
	r.echoes()
}

func TestAnAbortAfterFewerBytesThanCameResetsAtOnce(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	stream := r.open([]byte("0123456789"))
	conn := r.accept()
	got := make([]byte, 10)
	if _, err := io.ReadFull(conn, got); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	r.abort(4, 3)
	r.resetAfter(conn, stream, nil)
	if took := time.Since(began); took >= lastBytes {
		t.Fatalf("it took %v", took)
	}
	r.echoes()
}

func TestAnAbortAfterMoreBytesThanComeResetsInTime(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	stream := r.open([]byte("0123456789"))
	conn := r.accept()
	began := time.Now()
	r.abort(4, 1+20)
	r.resetAfter(conn, stream, []byte("0123456789"))
	if took := time.Since(began); took < lastBytes*9/10 {
		t.Fatalf("it took %v", took)
	}
	r.echoes()
}

func TestAServiceThatDoesNotReadDelaysAnAbortByTwoSecondsOnly(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	stream := r.open(nil)
	conn := r.accept()
	_ = stream.SetWriteDeadline(time.Now().Add(time.Second))
	n, _ := stream.Write(make([]byte, 64<<20))
	began := time.Now()
	r.abort(4, uint64(1+n))
	for askTCP(conn, state) != tcpClose {
		if time.Since(began) > testPatience {
			t.Fatal("the service's connection stays")
		}
		time.Sleep(drainEvery)
	}
	if took := time.Since(began); took < lastBytes*9/10 {
		t.Fatalf("it took %v", took)
	}
	if _, err := io.Copy(io.Discard, conn); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	r.echoes()
}

// write has a service write so many bytes.
func write(conn net.Conn, count int) {
	go func() { _, _ = conn.Write(make([]byte, count)) }()
}

// comes checks that so many bytes come on a stream, and no more.
func comes(t *testing.T, stream *quic.Stream, want int) {
	t.Helper()
	_ = stream.SetReadDeadline(time.Now().Add(testPatience))
	if n, err := io.ReadFull(stream, make([]byte, want)); err != nil {
		t.Fatalf("%d bytes of %d: %v", n, want, err)
	}
	_ = stream.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	if n, err := stream.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("more than %d bytes, %v", want, err)
	}
}

func TestLimitsOfStreamsAreKeptTo(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	const all = 1 << 20
	// The answer has 3 bytes.
	const whole = 3 + all
	before := r.open(nil)
	write(r.accept(), all)
	comes(t, before, whole)
	limit := func(stream, limit uint64) {
		r.send(&wire.StreamCredit{Initial: 1000, Streams: []uint64{stream}, Limits: []uint64{limit}})
	}
	// A limit of a stream that is to come.
	limit(12, 70_000)
	r.heard()
	second, third := r.open(nil), r.open(nil)
	for range 2 {
		write(r.accept(), all)
	}
	comes(t, second, 1000)
	comes(t, third, 70_000)
	limit(8, 100_000)
	comes(t, second, 99_000)
	// The last limit counts, be it smaller than what was sent.
	limit(8, 5)
	limit(12, 70_001)
	comes(t, second, 0)
	comes(t, third, 1)
	limit(8, 100_001)
	comes(t, second, 1)
	limit(8, math.MaxUint64)
	comes(t, second, whole-100_001)
	comes(t, third, 0)
	r.send(&wire.StreamCredit{})
	r.heard()
	last := r.open(nil)
	write(r.accept(), all)
	comes(t, last, whole)
	comes(t, third, 0)
}

func TestAStreamOfOursKeepsToItsLimitAndReadsUpToAReset(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	r.send(&wire.StreamCredit{Initial: 100})
	r.heard()
	ctx, cancel := context.WithTimeout(context.Background(), testPatience)
	defer cancel()
	peer, err := r.listener.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan *quic.Stream, 1)
	go func() {
		stream, err := r.conn.AcceptStream(ctx)
		if err == nil {
			_, _ = stream.Write(append(wire.StreamAnswer{Status: wire.StatusOK}.AppendFramed(nil), "last words"...))
			accepted <- stream
		}
	}()
	ours, err := peer.OpenStream(ctx, "ours")
	if err != nil {
		t.Fatal(err)
	}
	theirs := <-accepted
	_ = ours.SetWriteDeadline(time.Now().Add(time.Second))
	// The header has one byte.
	if n, err := ours.Write(make([]byte, 1000)); n != 99 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%d bytes, %v", n, err)
	}
	_ = ours.SetWriteDeadline(time.Time{})
	done := make(chan error, 1)
	go func() {
		_, err := ours.Write(make([]byte, 901))
		done <- err
	}()
	id := uint64(theirs.StreamID())
	r.send(&wire.StreamCredit{Initial: 100, Streams: []uint64{id}, Limits: []uint64{1001}})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := ours.Write(make([]byte, 1))
		done <- err
	}()
	_ = ours.SetReadDeadline(time.Now().Add(time.Second))
	got := make([]byte, 100)
	if n, err := io.ReadFull(ours, got); string(got[:n]) != "last words" || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%q, %v", got[:n], err)
	}
	_ = ours.SetReadDeadline(time.Time{})
	theirs.CancelRead(resetCode)
	var reset *quic.StreamError
	if err := <-done; !errors.As(err, &reset) {
		t.Fatalf("a write that waited when the peer stopped the stream: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { r.abort(id, 3+10) })
	began := time.Now()
	if n, err := ours.Read(got); n != 0 || !errors.As(err, &reset) || time.Since(began) >= lastBytes {
		t.Fatalf("%d bytes, %v after %v", n, err, time.Since(began))
	}
}

func TestManyResetsAreToldInFewMessages(t *testing.T) {
	t.Parallel()
	r := newTold(t)
	const count = 900
	var conns []*net.TCPConn
	for range count {
		r.open([]byte("x"))
		conns = append(conns, r.accept())
	}
	began := time.Now()
	for _, conn := range conns {
		_ = conn.SetLinger(0)
		conn.Close()
	}
	told, messages := make(map[uint64]bool), 0
	for len(told) < count {
		m := answerTo[*wire.StreamAbort](r.raw)
		messages++
		for i, stream := range m.Streams {
			if told[stream] || m.Bytes[i] != 3 {
				t.Fatalf("stream %d: %d bytes, before: %v", stream, m.Bytes[i], told[stream])
			}
			told[stream] = true
		}
	}
	if most := 1 + int(time.Since(began)/tellEvery); messages > most {
		t.Fatalf("%d messages, and %d are allowed in this time", messages, most)
	}
}

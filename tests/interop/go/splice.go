package culvert

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"

	"culvert.example/culvert/internal/wire"
)

const (
	// lastBytes is how long a forward may stand still while what came before a reset is passed on.
	lastBytes = 2 * time.Second
	// lookEvery is how often a write that waits asks whether there was a reset, drainEvery how often the kernel is asked
	// whether it has sent everything.
	lookEvery  = 250 * time.Millisecond
	drainEvery = 10 * time.Millisecond
	// tcpClose is the state of a TCP connection after a reset, or after both ends were sent (include/net/tcp_states.h).
	tcpClose = 7
)

var errStill = errors.New("nothing moves after a reset")

// forward is a stream and the connection at our end of it.
type forward struct {
	stream *Stream
	conn   net.Conn

	mu sync.Mutex
	// broken is since when our connection is known to have been reset.
	broken time.Time
	// shut says that we have ended our direction of the connection, failed that both sides were reset at once, stopped
	// that the peer takes nothing more.
	shut, failed, stopped bool
}

// Splice passes bytes between a forward and a connection until both directions have ended, and closes both. The end of
// one direction is passed on by itself. A reset of either resets the other, after what came before it.
func Splice(stream *Stream, conn net.Conn) {
	f := &forward{stream: stream, conn: conn}
	var both sync.WaitGroup
	both.Go(f.up)
	both.Go(f.down)
	both.Wait()
	defer stream.session.told.end(stream)
	switch {
	case f.failed:
	case !f.broken.IsZero():
		f.conn.Close()
		stream.tellAbort()
		// The peer stops the stream when it has delivered everything, unless we had ended it.
		<-stream.Context().Done()
		if isStopped(context.Cause(stream.Context())) {
			stream.CancelWrite(resetCode)
		}
	case f.stopped || !stream.abortedSince().IsZero():
		drain(conn)
		f.fail()
	default:
		conn.Close()
	}
}

// up passes bytes from the connection to the stream.
func (f *forward) up() {
	// Reading does not notice that the peer stops the stream.
	wake := context.AfterFunc(f.stream.Context(), func() { _ = f.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer wake()
	buffer := make([]byte, copyBuffer)
	for {
		n, err := f.conn.Read(buffer)
		if n > 0 {
			if err := persist(f.stream, buffer[:n], f.lookBack); isStopped(err) {
				f.stop()
				return
			} else if err != nil {
				f.fail()
				return
			}
		}
		switch {
		case err == nil:
		case f.stream.Context().Err() != nil:
			if isStopped(context.Cause(f.stream.Context())) {
				f.stop()
			} else {
				f.fail()
			}
			return
		case err == io.EOF && f.brokenSince().IsZero():
			if err := f.stream.CloseWrite(); err != nil {
				f.stop()
			}
			return
		default:
			f.hasBroken()
			return
		}
	}
}

// down passes bytes from the stream to the connection.
func (f *forward) down() {
	buffer := make([]byte, copyBuffer)
	for {
		n, err := f.stream.Read(buffer)
		if n > 0 {
			if err := persist(f.conn, buffer[:n], f.stream.lookBack); err == errStill {
				f.fail()
				return
			} else if err != nil {
				f.hasBroken()
				return
			}
		}
		switch {
		case err == nil:
		case err == io.EOF:
			f.mu.Lock()
			f.shut = true
			f.mu.Unlock()
			// What a connection that has ended says to this, reading from it says, too.
			_ = closeWrite(f.conn)
			return
		case !f.stream.abortedSince().IsZero() || f.isBroken():
			return
		default:
			f.fail()
			return
		}
	}
}

// isStopped says whether writing to a stream ends because the peer, or we for it, have stopped it.
func isStopped(err error) bool {
	var stopped *quic.StreamError
	return errors.As(err, &stopped)
}

func (f *forward) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopped = true
}

// fail resets both sides at once.
func (f *forward) fail() {
	f.mu.Lock()
	f.failed = true
	f.mu.Unlock()
	f.stream.Reset()
	if tcp, ok := f.conn.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	f.conn.Close()
}

// hasBroken notes that our connection was reset. What it had received is passed on, if the peer can be told where it ends.
func (f *forward) hasBroken() {
	if f.stream.session.hello.Features&wire.FeatureStreamAbort == 0 {
		f.fail()
		return
	}
	f.mu.Lock()
	if f.broken.IsZero() {
		f.broken = time.Now()
	}
	f.mu.Unlock()
	f.stream.CancelRead(resetCode)
}

func (f *forward) isBroken() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.broken.IsZero()
}

// brokenSince is since when our connection is known to have been reset, zero if it was not. The kernel tells of a reset
// once, in whichever direction asks first; the other one sees an end as of a connection that was closed.
func (f *forward) brokenSince() time.Time {
	f.mu.Lock()
	isNew := f.broken.IsZero() && !f.shut && askTCP(f.conn, state) == tcpClose
	f.mu.Unlock()
	if isNew {
		f.hasBroken()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken
}

// lookBack is brokenSince for what is written to the stream.
func (f *forward) lookBack() (time.Time, error) { return f.brokenSince(), nil }

// lookBack is abortedSince for what is written to the connection, and an error if the peer has reset the stream.
func (s *Stream) lookBack() (time.Time, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.Stream.SetReadDeadline(time.Unix(1, 0))
	defer s.readUntil()
	if _, err := s.Peek(make([]byte, 1)); isStopped(err) {
		return s.heard, err
	}
	return s.heard, nil
}

// persist writes all of b. lookBack says since when the other side of the forward is known to have been reset, zero if it
// was not: from then on nothing may stand still for longer than lastBytes. Its error ends the forward at once.
func persist(to interface {
	io.Writer
	SetWriteDeadline(time.Time) error
}, b []byte, lookBack func() (time.Time, error)) error {
	moved := time.Now()
	for {
		_ = to.SetWriteDeadline(time.Now().Add(lookEvery))
		n, err := to.Write(b)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if b = b[n:]; n > 0 {
			moved = time.Now()
		}
		since, err := lookBack()
		if err != nil || !since.IsZero() && min(time.Since(since), time.Since(moved)) >= lastBytes {
			return errStill
		}
	}
}

// drain waits until the kernel has sent what it holds of a connection, which a reset would discard.
func drain(conn net.Conn) {
	left, until := askTCP(conn, unsent), time.Now().Add(lastBytes)
	for left > 0 && time.Now().Before(until) {
		time.Sleep(drainEvery)
		before := left
		if left = askTCP(conn, unsent); left < before {
			until = time.Now().Add(lastBytes)
		}
	}
}

func closeWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return conn.Close()
}

// askTCP asks the kernel about a TCP connection; of another one it says 0.
func askTCP(conn net.Conn, ask func(fd int) (int, error)) (answer int) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return 0
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0
	}
	// A connection that is closed has nothing to say.
	_ = raw.Control(func(fd uintptr) { answer, err = ask(int(fd)) })
	if err != nil {
		return 0
	}
	return answer
}

// state is the state of a TCP connection.
func state(fd int) (int, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return 0, err
	}
	return int(info.State), nil
}

// unsent is how many bytes the kernel holds that the other end has not acknowledged.
func unsent(fd int) (int, error) { return unix.IoctlGetInt(fd, unix.SIOCOUTQ) }

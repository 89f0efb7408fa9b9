package culvert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/wire"
)

const (
	// resetCode is that of RESET_STREAM and STOP_SENDING for a TCP connection that was reset.
	resetCode    = 1
	answerLimit  = 15 * time.Second
	copyBuffer   = 64 << 10
	headerMargin = 8
)

// Stream is one TCP forward: a [net.Conn] of bytes, each direction of which ends by itself.
type Stream struct {
	*quic.Stream
	peer *Peer
	name string
}

// OpenStream opens a TCP forward to one of the peer's services, and waits for the service to accept.
func (p *Peer) OpenStream(ctx context.Context, service string) (*Stream, error) {
	p.mu.Lock()
	s, err := p.service(service, func(s *wire.Service) bool { return s.TCP })
	session := p.session
	p.mu.Unlock()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	stream, err := session.conn.OpenStreamSync(ctx)
	if err != nil {
		return nil, err
	}
	end := context.AfterFunc(ctx, func() { reset(stream) })
	defer end()
	if _, err := stream.Write(wire.StreamOpen{Service: s.Number}.AppendFramed(nil)); err != nil {
		return nil, err
	}
	frame, err := wire.ReadFrame(stream, wire.MaxStreamHeader)
	var answer wire.StreamAnswer
	if err == nil {
		answer, err = wire.ParseStreamAnswer(frame)
	}
	if err != nil {
		reset(stream)
		return nil, fmt.Errorf("the answer to a TCP forward: %w", err)
	}
	if answer.Status != wire.StatusOK {
		reset(stream)
		return nil, fmt.Errorf("%w: %s", ErrRefused, status(answer.Status))
	}
	return &Stream{Stream: stream, peer: p, name: service}, nil
}

func status(status uint32) string {
	switch status {
	case wire.StatusUnknownService:
		return "no such service for TCP"
	case wire.StatusNotAllowed:
		return "not allowed"
	case wire.StatusUpstreamRefused:
		return "the service refused the connection"
	case wire.StatusUpstreamTimeout:
		return "the service did not accept in time"
	case wire.StatusLimitReached:
		return "a limit is reached"
	case wire.StatusTooManyFiles:
		return "the other end has no file descriptor left"
	case wire.StatusNoRoute:
		return "the other end has no route to the service"
	case wire.StatusNoResources:
		return "the other end has no port or no memory left"
	default:
		return fmt.Sprintf("for a reason unknown to this version (status %d)", status)
	}
}

func reset(stream *quic.Stream) {
	stream.CancelRead(resetCode)
	stream.CancelWrite(resetCode)
}

// CloseWrite ends our direction; the other one goes on.
func (s *Stream) CloseWrite() error { return s.Stream.Close() }

// Close ends both directions: ours in order, the other one by a reset if it has not ended.
func (s *Stream) Close() error {
	s.CancelRead(resetCode)
	return s.Stream.Close()
}

// Reset ends both directions at once, as a reset of a TCP connection does.
func (s *Stream) Reset() { reset(s.Stream) }

// LocalAddr is our key.
func (s *Stream) LocalAddr() net.Addr { return addr{s.peer.agent.public.String()} }

// RemoteAddr is the peer's service.
func (s *Stream) RemoteAddr() net.Addr { return addr{s.peer.key.String() + "/" + s.name} }

var _ net.Conn = (*Stream)(nil)

// serveStream answers a TCP forward that the peer opened.
func (s *session) serveStream(stream *quic.Stream) {
	_ = stream.SetReadDeadline(time.Now().Add(answerLimit))
	frame, err := wire.ReadFrame(stream, wire.MaxStreamHeader)
	var open wire.StreamOpen
	if err == nil {
		open, err = wire.ParseStreamOpen(frame)
	}
	if err != nil {
		reset(stream)
		return
	}
	_ = stream.SetReadDeadline(time.Time{})
	conn, refused := s.upstream(open)
	answer := wire.StreamAnswer{Status: wire.StatusOK}
	if conn == nil {
		answer.Status = refused
	}
	if _, err := stream.Write(answer.AppendFramed(make([]byte, 0, headerMargin))); err != nil || conn == nil {
		stream.CancelRead(resetCode)
		if conn != nil {
			conn.Close()
		}
		_ = stream.Close()
		return
	}
	Splice(&Stream{Stream: stream, peer: s.peer}, conn)
}

// upstream connects to the service that a forward is for, or returns the status of a refusal.
func (s *session) upstream(open wire.StreamOpen) (net.Conn, uint32) {
	services := s.peer.agent.Services
	if int(open.Service) >= len(services) || services[open.Service].TCP == nil {
		return nil, wire.StatusUnknownService
	}
	if s.streams.Add(1) > int64(s.peer.agent.MaxStreams) {
		s.streams.Add(-1)
		return nil, wire.StatusLimitReached
	}
	ctx, cancel := context.WithTimeout(s.peer.ctx, upstreamLimit)
	defer cancel()
	conn, err := services[open.Service].TCP(ctx)
	if err == nil {
		return &counted{Conn: conn, done: sync.OnceFunc(func() { s.streams.Add(-1) })}, 0
	}
	s.streams.Add(-1)
	return nil, refusalStatus(err)
}

// refusalStatus is the status for a connection to a service that failed: what this host lacks is not called the service's.
func refusalStatus(err error) uint32 {
	is := func(numbers ...syscall.Errno) bool {
		return slices.ContainsFunc(numbers, func(number syscall.Errno) bool { return errors.Is(err, number) })
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded) || is(syscall.ETIMEDOUT):
		return wire.StatusUpstreamTimeout
	case is(syscall.EMFILE, syscall.ENFILE):
		return wire.StatusTooManyFiles
	case is(syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN, syscall.EACCES, syscall.EPERM):
		return wire.StatusNoRoute
	case is(syscall.EADDRNOTAVAIL, syscall.EADDRINUSE, syscall.EAGAIN, syscall.ENOBUFS, syscall.ENOMEM):
		return wire.StatusNoResources
	default:
		return wire.StatusUpstreamRefused
	}
}

// counted is a connection that a limit counts until it is closed.
type counted struct {
	net.Conn
	done func()
}

func (c *counted) Close() error {
	c.done()
	return c.Conn.Close()
}

// CloseWrite ends the direction of a TCP connection.
func (c *counted) CloseWrite() error { return closeWrite(c.Conn) }

// SetLinger is that of a TCP connection.
func (c *counted) SetLinger(seconds int) error {
	if tcp, ok := c.Conn.(interface{ SetLinger(int) error }); ok {
		return tcp.SetLinger(seconds)
	}
	return nil
}

func closeWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return conn.Close()
}

// Splice passes bytes between a forward and a connection until both directions have ended. The end of one direction is
// passed on by itself; a reset of either resets the other. It closes both.
func Splice(stream *Stream, conn net.Conn) {
	var up, down error
	var both sync.WaitGroup
	both.Go(func() {
		if _, up = io.CopyBuffer(writerOnly{stream}, readerOnly{conn}, make([]byte, copyBuffer)); up == nil {
			up = stream.CloseWrite()
		}
		if up != nil {
			abort(stream, conn)
		}
	})
	both.Go(func() {
		if _, down = io.CopyBuffer(writerOnly{conn}, readerOnly{stream}, make([]byte, copyBuffer)); down == nil {
			if down = closeWrite(conn); errors.Is(down, syscall.ENOTCONN) {
				down = nil
			}
		}
		if down != nil {
			abort(stream, conn)
		}
	})
	both.Wait()
	conn.Close()
}

// abort resets both ends of a forward.
func abort(stream *Stream, conn net.Conn) {
	stream.Reset()
	if tcp, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

// readerOnly and writerOnly hide ReadFrom and WriteTo, which would copy with smaller buffers.
type readerOnly struct{ io.Reader }
type writerOnly struct{ io.Writer }

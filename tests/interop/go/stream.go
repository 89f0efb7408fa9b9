package culvert

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/wire"
)

const (
	// resetCode is that of RESET_STREAM and STOP_SENDING for a TCP connection that was reset.
	resetCode   = 1
	answerLimit = 15 * time.Second
	copyBuffer  = 64 << 10
)

// Stream is one TCP forward: a [net.Conn] of bytes, each direction of which ends by itself.
type Stream struct {
	*quic.Stream
	session *session
	name    string

	mu sync.Mutex
	// sent and received count the bytes of the stream, header and answer included.
	sent, received uint64
	said           said
	// heard is when we were told of a reset at the other end, until when it counts although bytes are missing.
	heard, until    time.Time
	readBy, writeBy time.Time
	// raised is closed when a write that waits for a limit is to look again; nil: none waits.
	raised chan struct{}
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
	opened, err := session.conn.OpenStreamSync(ctx)
	if err != nil {
		return nil, err
	}
	stream := session.told.begin(session, opened, service)
	end := context.AfterFunc(ctx, stream.Reset)
	defer end()
	if err := stream.writeHeader(wire.StreamOpen{Service: s.Number}.AppendFramed(nil)); err != nil {
		stream.Reset()
		return nil, err
	}
	frame, err := wire.ReadFrame(stream, wire.MaxStreamHeader)
	var answer wire.StreamAnswer
	if err == nil {
		answer, err = wire.ParseStreamAnswer(frame)
	}
	if err != nil {
		stream.Reset()
		return nil, fmt.Errorf("the answer to a TCP forward: %w", err)
	}
	if answer.Status != wire.StatusOK {
		stream.Reset()
		return nil, fmt.Errorf("%w: %s", ErrRefused, status(answer.Status))
	}
	return stream, nil
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

// Read reads what the other end sends. A reset there ends it with a [quic.StreamError], after what came before the reset.
func (s *Stream) Read(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.until = time.Now().Add(lastBytes)
	for {
		left := uint64(len(b))
		if s.said.aborted {
			left = min(left, s.said.abort-min(s.said.abort, s.received))
			if left == 0 || !time.Now().Before(s.until) {
				return 0, &quic.StreamError{StreamID: s.StreamID(), ErrorCode: resetCode, Remote: true}
			}
		}
		s.readUntil()
		s.mu.Unlock()
		n, err := s.Stream.Read(b[:left])
		s.mu.Lock()
		s.received += uint64(n)
		due := !s.readBy.IsZero() && !time.Now().Before(s.readBy)
		if n > 0 || due || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
}

// readUntil sets how long a read may wait. mu is held.
func (s *Stream) readUntil() {
	by := s.readBy
	if s.said.aborted && (by.IsZero() || s.until.Before(by)) {
		by = s.until
	}
	_ = s.Stream.SetReadDeadline(by)
}

// Write sends bytes, as far and as soon as the other end allows.
func (s *Stream) Write(b []byte) (written int, err error) {
	for {
		room, raised, by := s.room()
		if raised != nil && len(b) > 0 {
			if err := s.wait(raised, by); err != nil {
				return written, err
			}
			continue
		}
		// No more at once, so that a limit that is lowered meanwhile is not exceeded by much.
		n, err := s.Stream.Write(b[:min(uint64(len(b)), room, copyBuffer)])
		s.mu.Lock()
		s.sent += uint64(n)
		s.mu.Unlock()
		written, b = written+n, b[n:]
		if err != nil || len(b) == 0 {
			return written, err
		}
	}
}

// room is how much may be sent; if that is nothing, what to wait for, and until when.
func (s *Stream) room() (uint64, chan struct{}, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.said.limited {
		return math.MaxUint64, nil, s.writeBy
	}
	if s.sent < s.said.limit {
		return s.said.limit - s.sent, nil, s.writeBy
	}
	if s.raised == nil {
		s.raised = make(chan struct{})
	}
	return 0, s.raised, s.writeBy
}

func (s *Stream) wait(raised chan struct{}, by time.Time) error {
	var due <-chan time.Time
	if !by.IsZero() {
		timer := time.NewTimer(time.Until(by))
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-raised:
		return nil
	case <-due:
		return os.ErrDeadlineExceeded
	case <-s.Context().Done():
		// It knows how it ended.
		if _, err := s.Stream.Write(nil); err != nil {
			return err
		}
		return context.Cause(s.Context())
	}
}

// look has a write that waits look again. mu is held.
func (s *Stream) look() {
	if s.raised != nil {
		close(s.raised)
		s.raised = nil
	}
}

// writeHeader writes what comes before the bytes of the TCP connection, for which there is always room.
func (s *Stream) writeHeader(b []byte) error {
	n, err := s.Stream.Write(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent += uint64(n)
	return err
}

// SetDeadline, SetReadDeadline and SetWriteDeadline are those of a [net.Conn].
func (s *Stream) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

func (s *Stream) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readBy = t
	s.readUntil()
	return nil
}

func (s *Stream) SetWriteDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writeBy = t
	s.look()
	return s.Stream.SetWriteDeadline(t)
}

// CloseWrite ends our direction; the other one goes on.
func (s *Stream) CloseWrite() error {
	s.mu.Lock()
	// In StreamAbort the end counts as a byte.
	s.sent++
	s.mu.Unlock()
	return s.Stream.Close()
}

// Close ends both directions: ours in order, the other one by a reset if it has not ended.
func (s *Stream) Close() error {
	s.session.told.end(s)
	s.CancelRead(resetCode)
	return s.Stream.Close()
}

// Reset ends both directions at once; what was not delivered yet is lost.
func (s *Stream) Reset() {
	s.session.told.end(s)
	s.CancelRead(resetCode)
	s.CancelWrite(resetCode)
}

// LocalAddr is our key.
func (s *Stream) LocalAddr() net.Addr { return addr{s.session.agent.public.String()} }

// RemoteAddr is the peer's service.
func (s *Stream) RemoteAddr() net.Addr { return addr{s.session.peer.key.String() + "/" + s.name} }

var _ net.Conn = (*Stream)(nil)

// serveStream answers a TCP forward that the peer opened.
func (s *session) serveStream(stream *Stream) {
	_ = stream.SetReadDeadline(time.Now().Add(answerLimit))
	frame, err := wire.ReadFrame(stream, wire.MaxStreamHeader)
	var open wire.StreamOpen
	if err == nil {
		open, err = wire.ParseStreamOpen(frame)
	}
	if err != nil {
		stream.Reset()
		return
	}
	_ = stream.SetReadDeadline(time.Time{})
	conn, refused := s.upstream(open)
	if conn == nil {
		_ = stream.writeHeader(wire.StreamAnswer{Status: refused}.AppendFramed(nil))
		_ = stream.Close()
		return
	}
	defer s.streams.Add(-1)
	// If the opener has stopped the stream already, what it had sent is still for the service.
	_ = stream.writeHeader(wire.StreamAnswer{Status: wire.StatusOK}.AppendFramed(nil))
	Splice(stream, conn)
}

// upstream connects to the service that a forward is for and counts the forward, or returns the status of a refusal.
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
		return conn, 0
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

package culvert

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"culvert.example/culvert/internal/lane"
	"culvert.example/culvert/internal/underlay"
	"culvert.example/culvert/internal/wire"
)

const (
	// flowQueue bounds the datagrams that a flow has received and nobody has read.
	flowQueue = 512
	// heldDatagrams wait for the confirmation of a flow if they do not fit beside the opening.
	heldDatagrams = 16
	upstreamLimit = 10 * time.Second
	// queueOverhead is what a datagram costs in a queue besides its bytes.
	queueOverhead = 64
	// smallBuffer holds every datagram that fits into a packet.
	smallBuffer = 2048
)

// Flow is one UDP session with a service: a [net.Conn] whose reads and writes are datagrams.
type Flow struct {
	peer    *Peer
	number  uint64
	service uint64
	name    string
	idle    time.Duration
	opener  bool
	pieces  bool

	// confirmed: both ends know the flow.
	confirmed atomic.Bool
	by        atomic.Pointer[carrier] // by which the latest datagram came
	last      atomic.Int64            // of traffic, in nanoseconds of the monotonic clock
	queue     chan []byte
	deadline  *underlay.Deadline
	done      chan struct{}

	mu       sync.Mutex
	err      error
	held     [][]byte
	datagram uint64 // number of the next one in pieces
}

// began is the origin of Flow.last.
var began = time.Now()

func newFlow(p *Peer, number, service uint64, idle time.Duration) *Flow {
	f := &Flow{
		peer: p, number: number, service: service, idle: idle,
		queue: make(chan []byte, flowQueue), deadline: underlay.NewDeadline(), done: make(chan struct{}),
	}
	f.touch()
	return f
}

func (f *Flow) touch() { f.last.Store(int64(time.Since(began))) }

func (f *Flow) silent() time.Duration { return time.Since(began) - time.Duration(f.last.Load()) }

// arrived notes a payload of the flow.
func (f *Flow) arrived(c carrier) {
	if by := f.by.Load(); by == nil || *by != c {
		f.by.Store(&c)
	}
	f.touch()
	if f.opener && !f.confirmed.Load() {
		f.confirmed.Store(true)
		f.mu.Lock()
		held := f.held
		f.held = nil
		f.mu.Unlock()
		for _, datagram := range held {
			_ = f.known(c, datagram)
		}
	}
}

// deliver queues a copy of a datagram.
func (f *Flow) deliver(body []byte) {
	size := int64(len(body)) + queueOverhead
	if f.peer.queued.Add(size) > queueBytes {
		f.peer.queued.Add(-size)
		f.peer.counts.overflow.Add(1)
		return
	}
	select {
	case f.queue <- append(make([]byte, 0, len(body)), body...):
		f.peer.counts.received.Add(1)
	default:
		f.peer.queued.Add(-size)
		f.peer.counts.overflow.Add(1)
	}
}

// Read reads one datagram; what does not fit into b is lost.
func (f *Flow) Read(b []byte) (int, error) {
	datagram, err := f.next()
	return copy(b, datagram), err
}

// next waits for a datagram.
func (f *Flow) next() (datagram []byte, err error) {
	select {
	case datagram = <-f.queue:
	default:
		select {
		case datagram = <-f.queue:
		case <-f.done:
			f.mu.Lock()
			defer f.mu.Unlock()
			return nil, f.err
		case <-f.deadline.Passed():
			return nil, os.ErrDeadlineExceeded
		}
	}
	f.peer.queued.Add(-int64(len(datagram)) - queueOverhead)
	return datagram, nil
}

// Write sends one datagram. It returns no error for one that is lost on the way.
func (f *Flow) Write(b []byte) (int, error) {
	select {
	case <-f.done:
		f.mu.Lock()
		defer f.mu.Unlock()
		return 0, f.err
	default:
	}
	c := f.carrier()
	if c == nil {
		f.peer.counts.notConnected.Add(1)
		return 0, ErrNotConnected
	}
	if !f.peer.maySend(len(b)) {
		f.peer.counts.overRate.Add(1)
		return len(b), nil
	}
	f.touch()
	var err error
	if f.opener && !f.confirmed.Load() {
		err = f.open(c, b)
	} else {
		err = f.known(c, b)
	}
	switch {
	case err == nil:
		f.peer.counts.sent.Add(1)
		return len(b), nil
	case isTooLarge(err):
		f.peer.counts.tooLarge.Add(1)
		return 0, ErrTooLarge
	default:
		f.peer.counts.notConnected.Add(1)
		return 0, err
	}
}

// open sends a datagram with the opening of the flow, or the opening alone while the datagram waits.
func (f *Flow) open(c carrier, b []byte) error {
	header := make([]byte, 0, 24)
	payload := wire.Payload{Context: wire.ContextOpenData, Flow: f.number, Service: f.service}
	err := c.Send(payload.AppendHeader(header), b)
	if !isTooLarge(err) {
		return err
	}
	if !f.mayCut() && len(f.knownHeader(header))+len(b) > c.Room() || len(b) > wire.MaxDatagram {
		return err
	}
	f.mu.Lock()
	if len(f.held) < heldDatagrams {
		f.held = append(f.held, append([]byte(nil), b...))
	}
	f.mu.Unlock()
	payload.Context = wire.ContextOpen
	return c.Send(payload.AppendHeader(header), nil)
}

func (f *Flow) knownHeader(b []byte) []byte {
	payload := wire.Payload{Context: wire.ContextKnown, Flow: f.number}
	return payload.AppendHeader(b)
}

// known sends a datagram of a flow that both ends know.
func (f *Flow) known(c carrier, b []byte) error {
	var space [16]byte
	err := c.Send(f.knownHeader(space[:0]), b)
	if isTooLarge(err) && f.mayCut() && len(b) <= wire.MaxDatagram {
		return f.cut(c, b)
	}
	return err
}

func (f *Flow) mayCut() bool {
	f.peer.mu.Lock()
	defer f.peer.mu.Unlock()
	return f.pieces && f.peer.features&wire.FeaturePieces != 0
}

// cut sends a datagram in pieces.
func (f *Flow) cut(c carrier, b []byte) error {
	f.mu.Lock()
	number := f.datagram
	f.datagram = (f.datagram + 1) % (1 << 30)
	f.mu.Unlock()
	payload := wire.Payload{Context: wire.ContextPiece, Flow: f.number, Datagram: number, Total: uint64(len(b))}
	// The header of the last piece is the longest.
	payload.Offset = payload.Total
	each := max(c.Room()-len(payload.AppendHeader(nil)), wire.MinPiece)
	for at := 0; at < len(b); at += each {
		payload.Offset = uint64(at)
		if err := c.Send(payload.AppendHeader(nil), b[at:min(at+each, len(b))]); err != nil {
			return err
		}
	}
	return nil
}

func isTooLarge(err error) bool {
	return errors.Is(err, lane.ErrTooLarge) || errors.Is(err, ErrTooLarge)
}

// carrier is by what the flow's datagrams are sent: its opener chooses, the acceptor follows.
func (f *Flow) carrier() carrier {
	session := f.peer.current()
	if session == nil {
		return nil
	}
	if by := f.by.Load(); by != nil && session.carries(*by) {
		return *by
	}
	chosen := session.choose(f.number >> 1)
	if chosen != nil {
		f.by.Store(&chosen)
	}
	return chosen
}

// Close forgets the flow and tells the peer.
func (f *Flow) Close() error {
	f.end(net.ErrClosed, true)
	return nil
}

// end ends the flow with what reads and writes return from now on.
func (f *Flow) end(err error, tell bool) {
	f.mu.Lock()
	if f.err != nil {
		f.mu.Unlock()
		return
	}
	f.err = err
	close(f.done)
	f.mu.Unlock()
	if tell {
		if c := f.carrier(); c != nil {
			f.peer.answer(c, wire.Payload{Context: wire.ContextClosed, Flow: f.number})
		}
	}
	f.peer.forget(f)
	for {
		select {
		case datagram := <-f.queue:
			f.peer.queued.Add(-int64(len(datagram)) - queueOverhead)
		default:
			return
		}
	}
}

// serve connects an accepted flow with its upstream, until either ends.
func (f *Flow) serve(upstream Upstream, c carrier) {
	ctx, cancel := context.WithTimeout(f.peer.ctx, upstreamLimit)
	conn, err := upstream(ctx)
	cancel()
	if err != nil {
		f.peer.log("the upstream of a UDP service cannot be opened", "service", f.name, "error", err)
		f.peer.answer(c, wire.Payload{Context: wire.ContextRefused, Flow: f.number, Reason: wire.RefusedUpstream})
		f.end(err, false)
		return
	}
	f.confirmed.Store(true)
	f.peer.answer(c, wire.Payload{Context: wire.ContextConfirmed, Flow: f.number})
	go func() {
		defer conn.Close()
		for {
			datagram, err := f.next()
			if err != nil {
				return
			}
			// A service that refuses a datagram (ICMP) may take the next.
			_, _ = conn.Write(datagram)
		}
	}()
	size := smallBuffer
	if f.pieces {
		size = wire.MaxDatagram + 1
	}
	buffer := make([]byte, size)
	for {
		n, err := conn.Read(buffer)
		if errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) {
			f.end(ErrFlowClosed, true)
			return
		}
		if err != nil {
			continue
		}
		if n == len(buffer) {
			// The kernel has cut it off.
			f.peer.counts.tooLarge.Add(1)
			continue
		}
		if _, err := f.Write(buffer[:n]); errors.Is(err, net.ErrClosed) || errors.Is(err, ErrFlowClosed) {
			conn.Close()
			return
		}
	}
}

// LocalAddr is our key.
func (f *Flow) LocalAddr() net.Addr { return addr{f.peer.agent.public.String()} }

// RemoteAddr is the peer's service.
func (f *Flow) RemoteAddr() net.Addr { return addr{f.peer.key.String() + "/" + f.name} }

// SetDeadline is [Flow.SetReadDeadline]: writes do not block.
func (f *Flow) SetDeadline(t time.Time) error { return f.SetReadDeadline(t) }

// SetReadDeadline ends reads at a time.
func (f *Flow) SetReadDeadline(t time.Time) error {
	f.deadline.Set(t)
	return nil
}

// SetWriteDeadline does nothing: writes do not block.
func (f *Flow) SetWriteDeadline(time.Time) error { return nil }

// addr names an end of a flow or a stream.
type addr struct{ name string }

func (addr) Network() string  { return "culvert" }
func (a addr) String() string { return a.name }

var _ net.Conn = (*Flow)(nil)

package culvert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.example/culvert/internal/pieces"
	"culvert.example/culvert/internal/wire"
)

// Errors of flows and streams.
var (
	ErrNotConnected = errors.New("there is no connection to the peer")
	ErrNoService    = errors.New("the peer offers no such service")
	ErrTooLarge     = errors.New("the datagram fits into no packet, and its service takes no pieces")
	ErrRefused      = errors.New("the peer refused")
	// ErrTemporary is in the chain of those refusals that another attempt may not meet.
	ErrTemporary  = errors.New("for now")
	ErrFlowClosed = errors.New("the flow has ended at the peer")
)

const (
	// An agent opens 2,000 flows a second, 5,000 at once; we take as many.
	openingsPerSecond = 2000
	openingsAtOnce    = 5000
	sweepEvery        = 250 * time.Millisecond
	// queueBytes bounds what the flows of a peer have received and nobody has read.
	queueBytes = 32 << 20
	// What a peer does must not fill the log.
	linesPerSecond = 1
	linesAtOnce    = 20
)

// carrier sends payloads to a peer: a lane, or the DATAGRAM frames of a connection.
type carrier interface {
	// Send returns an error of [isTooLarge] for a payload that fits into no packet.
	Send(header, body []byte) error
	Room() int
}

// Peer is an agent at the other end, with its flows. It outlives its connections.
type Peer struct {
	agent *agent
	key   PublicKey
	// zeroFirst says that our flows have even numbers.
	parity uint64
	stop   context.CancelFunc
	ctx    context.Context

	mu       sync.Mutex
	session  *session
	changed  chan struct{} // closed when session or services change
	instance []byte
	features uint64
	services []wire.Service
	flows    map[uint64]*Flow
	incoming int
	nextFlow uint64
	assembly pieces.Assembler
	openings bucket
	unknowns bucket
	rebind   func(local string) error
	rate     *bucket // in bytes; nil: no limit
	lines    bucket  // of the log

	queued atomic.Int64
	counts counts
}

// counts are a peer's counters, one of each name in [PeerStats].
type counts struct {
	sent, received, noTUN, malformed, unknown, unknownFlow, overflow, refused, tooLarge, notConnected, overRate atomic.Uint64
}

// PeerStats counts what became of a peer's datagrams.
type PeerStats struct {
	Sent, Delivered uint64
	// Received and dropped: IP packets, payloads that do not parse, contexts of later versions, flows that we do not
	// know, queues that are full, openings beyond a limit.
	NoTUN, Malformed, UnknownContext, UnknownFlow, QueueFull, Refused uint64
	// Not sent: too large for a packet, while there was no connection, or above what the peer wants to receive.
	TooLarge, NotConnected, OverRate uint64
	Incomplete                       uint64
	Lanes                            []LaneStats
	Flows                            int
}

func newPeer(ctx context.Context, a *agent, key PublicKey) *Peer {
	p := &Peer{
		agent: a, key: key, flows: make(map[uint64]*Flow), changed: make(chan struct{}),
		openings: newBucket(openingsPerSecond, openingsAtOnce),
		unknowns: newBucket(openingsPerSecond, openingsAtOnce),
		lines:    newBucket(linesPerSecond, linesAtOnce),
	}
	if slices.Compare(a.public[:], key[:]) > 0 {
		p.parity = 1
	}
	p.ctx, p.stop = context.WithCancel(ctx)
	go p.sweep()
	return p
}

// Key returns the peer's public key.
func (p *Peer) Key() PublicKey { return p.key }

// Services returns the names of what the peer offers now.
func (p *Peer) Services() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var names []string
	for _, s := range p.services {
		names = append(names, s.Name)
	}
	return names
}

// Connected waits until there is a connection to the peer.
func (p *Peer) Connected(ctx context.Context) error {
	return p.wait(ctx, func() bool { return p.session != nil })
}

// LanesUp waits until so many lanes carry payloads.
func (p *Peer) LanesUp(ctx context.Context, count int) error {
	return p.wait(ctx, func() bool { return p.session != nil && p.session.lanesUp() >= count })
}

func (p *Peer) wait(ctx context.Context, ready func() bool) error {
	for {
		p.mu.Lock()
		ok, changed := ready(), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrNotConnected, ctx.Err())
		case <-p.ctx.Done():
			return ErrNotConnected
		}
	}
}

// log writes a line about the peer, unless there were many.
func (p *Peer) log(message string, attributes ...any) {
	p.mu.Lock()
	ok := p.lines.take(1)
	p.mu.Unlock()
	if ok {
		p.agent.log.Info(message, append([]any{"peer", p.key}, attributes...)...)
	}
}

// notify wakes who waits. mu is held.
func (p *Peer) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Close ends the peer's connection and its flows.
func (p *Peer) Close() error {
	p.stop()
	p.mu.Lock()
	session := p.session
	flows := p.allFlows()
	p.mu.Unlock()
	for _, flow := range flows {
		flow.end(ErrFlowClosed, true)
	}
	if session != nil {
		session.close(wire.CloseShutdown, "closed")
	}
	return nil
}

// Rebind sends from another local address from now on; empty is any. Only for peers that we dialled.
func (p *Peer) Rebind(local string) error {
	p.mu.Lock()
	rebind := p.rebind
	p.mu.Unlock()
	if rebind == nil {
		return ErrNotConnected
	}
	return rebind(local)
}

// Stats returns the peer's counters.
func (p *Peer) Stats() PeerStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &p.counts
	s := PeerStats{
		Sent: c.sent.Load(), Delivered: c.received.Load(), NoTUN: c.noTUN.Load(), Malformed: c.malformed.Load() + p.assembly.Malformed,
		UnknownContext: c.unknown.Load(), UnknownFlow: c.unknownFlow.Load(), QueueFull: c.overflow.Load(),
		Refused: c.refused.Load(), TooLarge: c.tooLarge.Load(), NotConnected: c.notConnected.Load(), OverRate: c.overRate.Load(),
		Incomplete: p.assembly.Incomplete, Flows: len(p.flows),
	}
	if p.session != nil {
		s.Lanes = p.session.laneStats()
	}
	return s
}

// attach makes s the peer's session; it returns the one before.
func (p *Peer) attach(s *session) (before *session) {
	p.mu.Lock()
	var ended []*Flow
	if !slices.Equal(p.instance, s.hello.Instance) {
		// Another process: it knows nothing of our flows, and the ones that it opened are gone.
		for _, flow := range p.flows {
			if flow.opener {
				flow.confirmed.Store(false)
			} else {
				ended = append(ended, flow)
			}
		}
	}
	before, p.session = p.session, s
	p.rate = nil
	p.instance, p.features, p.services = s.hello.Instance, s.hello.Features, s.hello.Services
	p.notify()
	p.mu.Unlock()
	for _, flow := range ended {
		flow.end(ErrFlowClosed, false)
	}
	return before
}

// detach forgets a session that has ended.
func (p *Peer) detach(s *session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == s {
		p.session = nil
		p.notify()
	}
}

func (p *Peer) current() *session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.session
}

// service finds what the peer offers under a name. mu is held.
func (p *Peer) service(name string, fits func(*wire.Service) bool) (*wire.Service, error) {
	if p.session == nil {
		return nil, ErrNotConnected
	}
	for i := range p.services {
		if s := &p.services[i]; s.Name == name && fits(s) {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w: %q", ErrNoService, name)
}

// OpenFlow opens a UDP flow to one of the peer's services. Nothing is sent before the first Write.
func (p *Peer) OpenFlow(service string) (*Flow, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := p.service(service, func(s *wire.Service) bool { return s.UDP })
	if err != nil {
		return nil, err
	}
	flow := newFlow(p, p.nextFlow<<1|p.parity, uint64(s.Number), min(idleOf(s.IdleMS), longestIdle))
	flow.opener, flow.pieces, flow.name = true, s.Fragment, service
	p.nextFlow++
	p.flows[flow.number] = flow
	return flow, nil
}

// payload acts on the data of a DATAGRAM frame that came by c.
func (p *Peer) payload(c carrier, data []byte) {
	payload, err := wire.ParsePayload(data)
	if err != nil {
		if errors.Is(err, wire.ErrUnknownContext) {
			p.counts.unknown.Add(1)
		} else {
			p.counts.malformed.Add(1)
		}
		return
	}
	switch payload.Context {
	case wire.ContextIP, wire.ContextPartialIP:
		p.counts.noTUN.Add(1)
	case wire.ContextOpen, wire.ContextOpenData:
		p.opening(c, &payload)
	case wire.ContextPiece:
		p.piece(c, &payload)
	case wire.ContextReport, wire.ContextNumbered, wire.ContextRepair, wire.ContextAsk, wire.ContextCopied:
		// Our hello asks for none of them.
		p.counts.unknown.Add(1)
	default:
		p.known(c, &payload)
	}
}

// find returns a flow by its number.
func (p *Peer) find(number uint64) *Flow {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.flows[number]
}

// known acts on a payload of a flow that exists.
func (p *Peer) known(c carrier, payload *wire.Payload) {
	flow := p.find(payload.Flow)
	if flow == nil {
		if payload.Context == wire.ContextKnown {
			p.unknownFlow(c, payload.Flow)
		}
		return
	}
	switch payload.Context {
	case wire.ContextKnown:
		flow.arrived(c)
		flow.deliver(payload.Body)
	case wire.ContextConfirmed:
		flow.arrived(c)
	case wire.ContextRefused:
		if flow.opener {
			flow.end(refusal(payload.Reason), false)
		}
	case wire.ContextUnknown:
		if flow.opener {
			flow.confirmed.Store(false)
		} else {
			flow.end(ErrFlowClosed, false)
		}
	case wire.ContextClosed:
		flow.end(ErrFlowClosed, false)
	}
}

func refusal(reason uint64) error {
	switch reason {
	case wire.RefusedService:
		return fmt.Errorf("%w: no such service for UDP", ErrRefused)
	case wire.RefusedAllowed:
		return fmt.Errorf("%w: not allowed", ErrRefused)
	case wire.RefusedLimit:
		return fmt.Errorf("%w %w: a limit is reached", ErrRefused, ErrTemporary)
	case wire.RefusedUpstream:
		return fmt.Errorf("%w %w: the upstream's socket could not be opened", ErrRefused, ErrTemporary)
	default:
		return fmt.Errorf("%w: reason %d", ErrRefused, reason)
	}
}

// unknownFlow tells the peer that we do not know a flow, as often as it may open some.
func (p *Peer) unknownFlow(c carrier, number uint64) {
	p.counts.unknownFlow.Add(1)
	p.mu.Lock()
	ok := p.unknowns.take(1)
	p.mu.Unlock()
	if ok {
		p.answer(c, wire.Payload{Context: wire.ContextUnknown, Flow: number})
	}
}

func (p *Peer) answer(c carrier, payload wire.Payload) {
	// What answers a lost payload is lost with it: the peer asks again.
	_ = c.Send(payload.AppendHeader(make([]byte, 0, 24)), nil)
}

// piece puts a datagram together.
func (p *Peer) piece(c carrier, payload *wire.Payload) {
	flow := p.find(payload.Flow)
	if flow == nil {
		if payload.Offset == 0 {
			p.unknownFlow(c, payload.Flow)
		}
		return
	}
	flow.arrived(c)
	p.mu.Lock()
	whole, verdict := p.assembly.Add(payload, time.Now())
	p.mu.Unlock()
	if verdict == pieces.Complete {
		flow.deliver(whole)
	}
}

// opening makes the flow that a peer opens, unless it is there.
func (p *Peer) opening(c carrier, payload *wire.Payload) {
	if payload.Flow&1 == p.parity {
		p.counts.malformed.Add(1)
		return
	}
	p.mu.Lock()
	flow, reason := p.flows[payload.Flow], uint64(0)
	made := flow == nil
	if made {
		if !p.openings.take(1) {
			p.mu.Unlock()
			p.counts.refused.Add(1)
			return
		}
		flow, reason = p.accept(payload)
	}
	p.mu.Unlock()
	if reason != 0 {
		p.counts.refused.Add(1)
		p.answer(c, wire.Payload{Context: wire.ContextRefused, Flow: payload.Flow, Reason: reason})
		return
	}
	flow.arrived(c)
	if payload.Context == wire.ContextOpenData {
		flow.deliver(payload.Body)
	}
	switch {
	case made:
		go flow.serve(p.agent.Services[payload.Service].UDP, c)
	case flow.confirmed.Load():
		p.answer(c, wire.Payload{Context: wire.ContextConfirmed, Flow: payload.Flow})
	}
}

// accept makes a flow, or gives the reason for a refusal. mu is held.
func (p *Peer) accept(payload *wire.Payload) (*Flow, uint64) {
	switch {
	case payload.Service >= uint64(len(p.agent.Services)) || p.agent.Services[payload.Service].UDP == nil:
		return nil, wire.RefusedService
	case p.incoming >= p.agent.MaxFlows:
		return nil, wire.RefusedLimit
	}
	s := &p.agent.Services[payload.Service]
	flow := newFlow(p, payload.Flow, payload.Service, idleOf(uint32(s.Idle.Milliseconds())))
	flow.pieces, flow.name = s.Fragment, s.Name
	p.flows[flow.number] = flow
	p.incoming++
	return flow, 0
}

// forget removes a flow that has ended.
func (p *Peer) forget(flow *Flow) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.flows[flow.number] == flow {
		delete(p.flows, flow.number)
		if !flow.opener {
			p.incoming--
		}
	}
}

// allFlows is a copy of the flows. mu is held.
func (p *Peer) allFlows() []*Flow {
	flows := make([]*Flow, 0, len(p.flows))
	for _, flow := range p.flows {
		flows = append(flows, flow)
	}
	return flows
}

// sweep ends flows that nobody uses any more.
func (p *Peer) sweep() {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-p.ctx.Done():
			return
		}
		p.mu.Lock()
		p.assembly.Expire(time.Now())
		flows := p.allFlows()
		p.mu.Unlock()
		for _, flow := range flows {
			if flow.silent() > flow.idle {
				flow.end(ErrFlowClosed, true)
			}
		}
	}
}

const (
	// A limit below 64 kbit/s counts as that.
	leastRate = 64_000
	// rateBurst is how much of a second may leave at once, but rateLeast bytes at least.
	rateBurst = 0.02
	rateLeast = 16 << 10
	// outerBytes are around a datagram: IP, UDP, the packet and the frame.
	outerBytes = 64
)

// limit keeps to what the peer wants to receive, in datagrams; 0: no limit.
func (p *Peer) limit(bitsPerSecond uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rate = nil; bitsPerSecond > 0 {
		bytes := float64(max(bitsPerSecond, leastRate)) / 8
		b := newBucket(bytes, max(bytes*rateBurst, rateLeast))
		p.rate = &b
	}
}

// maySend says whether a datagram of so many bytes keeps to the limit.
func (p *Peer) maySend(bytes int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rate == nil || p.rate.take(float64(bytes+outerBytes))
}

// bucket is a token bucket.
type bucket struct {
	rate, most, level float64
	at                time.Time
}

func newBucket(rate, most float64) bucket {
	return bucket{rate: rate, most: most, level: most, at: time.Now()}
}

func (b *bucket) take(count float64) bool {
	now := time.Now()
	b.level = min(b.most, b.level+b.rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.level < count {
		return false
	}
	b.level -= count
	return true
}

package lane

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.example/culvert/internal/underlay"
	"culvert.example/culvert/internal/wire"
)

// Errors of sending.
var (
	ErrDown     = errors.New("the lane is down")
	ErrTooLarge = errors.New("the datagram fits into no packet")
)

const (
	// MaxSize is the largest packet that we send: what IPv6 carries over Ethernet.
	MaxSize = 1452
	// batchBytes and batchPackets bound what one GSO message carries.
	batchBytes   = 64000
	batchPackets = 64
	// drain is how long a replaced lane still opens packets.
	drain = 3 * time.Second
	// deadAfter is the least time without a packet after which a lane counts as dead.
	deadAfter = 500 * time.Millisecond
	// wearNumerator of 8 parts of a limit are used before a lane is to be replaced.
	wearNumerator = 7
	lastNumber    = 1<<32 - 1
)

// Handler learns what happens on a lane. Its methods must return soon; they may send on the lane.
type Handler interface {
	// Datagram takes the data of a DATAGRAM frame, which is valid until it returns.
	Datagram(l *Lane, data []byte)
	// Up says that the other end's address was validated: the lane carries payloads.
	Up(l *Lane)
	// Moved says that the other end receives the lane from another address.
	Moved(l *Lane)
	// Failed says that the lane is to be closed for a cause: wire.CauseDead, CauseViolation or CauseWornOut.
	Failed(l *Lane, cause uint32)
}

// Config is what a lane is made of.
type Config struct {
	Index         uint32
	Epoch         uint64
	Suite         Suite
	SendSecret    []byte
	ReceiveSecret []byte
	Local, Remote underlay.ConnectionID
	Socket        *underlay.Socket
	// To is the listener's address; invalid at the listener, which answers to where the dialler sends from.
	To netip.AddrPort
	// MaxPacket is the most that the other end takes.
	MaxPacket int
	// UpdateAfter is after how many packets a key is updated; 0: half of what it may seal, 4,194,304 at most.
	UpdateAfter uint64
	// KeepAlive is the silence after which a PING is sent; 0: none is.
	KeepAlive time.Duration
	Handler   Handler
}

// Stats are counters of a lane.
type Stats struct {
	SentPackets, ReceivedPackets uint64
	SentBytes, ReceivedBytes     uint64
	Acked, Lost                  uint64
	RefusedKey, RefusedOld       uint64
	KeyUpdates, PeerKeyUpdates   uint64
	Moves                        uint64
	RTT                          time.Duration
	PacketSize                   int
}

// Lane is one opening of a lane.
type Lane struct {
	Index  uint32
	Epoch  uint64
	config Config

	// Guards the next two. May be held when mu is taken, not the reverse.
	reading sync.Mutex
	opener  *Opener
	frames  Frames

	mu         sync.Mutex
	sealer     *Sealer
	acks       acks
	sent       sent
	paths      paths
	mtu        mtu
	state      state
	began      time.Time
	out        batch
	lastHeard  time.Time
	lastSent   time.Time // of the last packet that is to be acknowledged
	pings      int       // without an answer
	peerPhase  uint64    // key updates that the other end made
	ourPhase   uint64
	forgetKey  time.Time
	challenged [8]byte
	drainUntil time.Time
	wornAt     time.Time
	stats      Stats

	carrying atomic.Bool // state is up
	spare    chan []byte // the buffer that is not in use; who writes has it
	flush    chan struct{}
	wake     chan struct{}
	done     chan struct{}
}

type state uint8

const (
	opening state = iota
	up
	draining // replaced, or failed: it still opens and acknowledges
	closed
)

// New makes a lane that receives at once. A dialler's sends its first challenge when Start is called.
func New(config Config) *Lane {
	now := time.Now()
	l := &Lane{
		Index:     config.Index,
		Epoch:     config.Epoch,
		config:    config,
		opener:    NewOpener(config.Suite, config.ReceiveSecret),
		sealer:    NewSealer(config.Suite, config.SendSecret, config.Remote),
		mtu:       newMTU(min(max(config.MaxPacket, minPacket), MaxSize)),
		began:     now,
		lastHeard: now,
		lastSent:  now,
		spare:     make(chan []byte, 1),
		flush:     make(chan struct{}, 1),
		wake:      make(chan struct{}, 1),
		done:      make(chan struct{}),
	}
	if l.config.UpdateAfter == 0 {
		l.config.UpdateAfter = min(config.Suite.confidentiality/2, 1<<22)
	}
	l.out.bytes = make([]byte, 0, batchBytes+MaxSize)
	l.spare <- make([]byte, 0, batchBytes+MaxSize)
	config.Socket.Route(config.Local, l)
	return l
}

// Start begins the lane's timers and, at the dialler, the validation of the path.
func (l *Lane) Start() {
	if l.config.To.IsValid() {
		l.mu.Lock()
		l.paths.current.addr = l.config.To
		// We dialled this address: nobody has us send there.
		l.paths.current.received = 1 << 20
		l.paths.current.ask(time.Now())
		l.mu.Unlock()
	}
	go l.flusher()
	go l.timers()
}

// Close forgets the lane.
func (l *Lane) Close() {
	l.config.Socket.Unroute(l.config.Local)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != closed {
		l.become(closed)
		close(l.done)
	}
}

// Replace has the lane open and acknowledge packets for a while, and send no payloads any more.
func (l *Lane) Replace() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != closed {
		l.become(draining)
		l.drainUntil = time.Now().Add(drain)
		wakeUp(l.wake)
	}
}

// IsUp says whether the lane carries payloads.
func (l *Lane) IsUp() bool { return l.carrying.Load() }

// Ended says whether the lane opens no packets any more.
func (l *Lane) Ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == closed
}

// become changes the state.
func (l *Lane) become(s state) {
	l.state = s
	l.carrying.Store(s == up)
}

// Stats returns the lane's counters.
func (l *Lane) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Acked, s.Lost, s.RTT, s.PacketSize = l.sent.Acked, l.sent.Lost, l.sent.rtt, l.mtu.size
	return s
}

// Room is the largest payload, header included, that fits into a packet now.
func (l *Lane) Room() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.room()
}

func (l *Lane) room() int {
	// The frame's type and a length of two bytes.
	return l.mtu.size - headerLen - tagLen - 3
}

// Send sends a payload, which may share a packet with others and leaves within a moment.
func (l *Lane) Send(header, body []byte) error {
	l.mu.Lock()
	if l.state != up {
		l.mu.Unlock()
		return ErrDown
	}
	if len(header)+len(body) > l.room() {
		l.mu.Unlock()
		return ErrTooLarge
	}
	need := datagramLen(len(header) + len(body))
	if l.out.open > 0 && l.out.open+need+tagLen > l.mtu.size {
		l.seal(recordSent)
	}
	for l.out.full() {
		l.mu.Unlock()
		l.write()
		l.mu.Lock()
		if l.state != up {
			l.mu.Unlock()
			return ErrDown
		}
	}
	l.start()
	before := len(l.out.bytes)
	l.out.bytes = AppendDatagram(l.out.bytes, header, body)
	l.out.open += len(l.out.bytes) - before
	l.mu.Unlock()
	wakeUp(l.flush)
	return nil
}

// Ping sends a PING, which the other end acknowledges at once.
func (l *Lane) Ping() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == up || l.state == opening && l.paths.current.addr.IsValid() {
		l.single([]byte{framePing}, 0, recordSent, &l.paths.current)
	}
}

// batch is what waits to be sent: packets of one size, the last one perhaps shorter, and one that is not sealed yet.
type batch struct {
	bytes []byte
	size  int // of the first packet
	count int
	short bool // the last packet is shorter than size: none may follow
	open  int  // bytes of the packet that is not sealed, at the end
}

func (b *batch) full() bool {
	return b.open == 0 && (b.short || b.count == batchPackets || len(b.bytes)+MaxSize > batchBytes)
}

// start begins a packet, unless one is begun.
func (l *Lane) start() {
	if l.out.open == 0 {
		before := len(l.out.bytes)
		l.out.bytes = l.sealer.Start(l.out.bytes)
		l.out.open = len(l.out.bytes) - before
		if now := time.Now(); l.acks.isDue(now) {
			before = len(l.out.bytes)
			l.out.bytes = l.acks.frame(l.out.bytes, now)
			l.out.open += len(l.out.bytes) - before
		}
	}
}

// seal ends the packet that is begun. One that is larger than those before it ends the batch before itself.
func (l *Lane) seal(state recordState) {
	at := len(l.out.bytes) - l.out.open
	packet := l.out.bytes[at:]
	size := len(packet) + tagLen
	l.record(size, state)
	packet = l.sealer.Seal(packet)
	l.out.open = 0
	switch {
	case l.out.count == 0:
		l.out.size = size
	case size > l.out.size:
		// Rare: the batch before it leaves first, and this packet is the start of the next.
		moved := append([]byte(nil), packet...)
		l.out.bytes = l.out.bytes[:at]
		l.writeNow()
		l.out.bytes = append(l.out.bytes[:0], moved...)
		l.out.size, l.out.count, l.out.short = size, 1, false
		return
	case size < l.out.size:
		l.out.short = true
	}
	l.out.bytes = l.out.bytes[:at+size]
	l.out.count++
}

// record notes the packet that is sealed next.
func (l *Lane) record(size int, state recordState) {
	now := time.Now()
	l.update()
	l.sent.add(l.sealer.Next, now.Sub(l.began), size, state)
	l.stats.SentPackets++
	l.stats.SentBytes += uint64(size)
	if state != recordNone {
		if l.sent.outstanding == 1 {
			wakeUp(l.wake)
		}
		l.lastSent = now
	}
}

// update begins a key update if the present key has sealed enough, and the other end has the key.
func (l *Lane) update() {
	if l.sealer.sealed >= l.config.UpdateAfter && l.ourPhase == l.peerPhase &&
		l.sent.hasAcked && l.sent.largest >= l.sealer.phaseStart {
		l.sealer.Update()
		l.ourPhase++
		l.stats.KeyUpdates++
	}
}

// take returns what is to be sent, and goes on with the buffer spare.
func (l *Lane) take(spare []byte) (packets []byte, size int, to netip.AddrPort) {
	if l.out.open > 0 {
		l.seal(recordSent)
	}
	packets, size, to = l.out.bytes, l.out.size, l.paths.current.addr
	l.out = batch{bytes: spare}
	return packets, size, to
}

// writeNow sends the sealed packets while mu is held.
func (l *Lane) writeNow() {
	_ = l.config.Socket.WriteLane(l.out.bytes, l.out.size, l.paths.current.addr)
	l.out.count = 0
}

// write sends what waits. One caller at a time has the spare buffer; the others wait for it.
func (l *Lane) write() {
	spare := <-l.spare
	l.mu.Lock()
	packets, size, to := l.take(spare)
	l.mu.Unlock()
	if len(packets) > 0 {
		// A lost packet is a lost packet, whoever lost it.
		_ = l.config.Socket.WriteLane(packets, size, to)
	}
	l.spare <- packets[:0]
}

// flusher sends what Send has left behind.
func (l *Lane) flusher() {
	for {
		select {
		case <-l.flush:
		case <-l.done:
			return
		}
		for l.waiting() {
			l.write()
		}
	}
}

func (l *Lane) waiting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return (l.out.open > 0 || l.out.count > 0) && l.state != closed
}

// single seals one packet of frames, padded to size, and sends it to a path at once.
func (l *Lane) single(frames []byte, size int, state recordState, to *path) {
	if l.out.open > 0 {
		// Numbers are given in the order of sealing; the packet that is begun goes first.
		l.seal(recordSent)
	}
	packet := append(l.sealer.Start(make([]byte, 0, MaxSize+tagLen)), frames...)
	for len(packet)+tagLen < size {
		packet = append(packet, framePadding)
	}
	l.record(len(packet)+tagLen, state)
	packet = l.sealer.Seal(packet)
	to.sent += len(packet)
	_ = l.config.Socket.WriteLane(packet, len(packet), to.addr)
}

// ReceivePacket opens a packet and acts on it.
func (l *Lane) ReceivePacket(packet []byte, from netip.AddrPort) {
	l.reading.Lock()
	defer l.reading.Unlock()
	size := len(packet)
	opened, err := l.opener.Open(packet)
	if err == nil {
		err = l.frames.Parse(opened.Frames)
	}
	var violation Violation
	if err != nil && !errors.As(err, &violation) {
		l.refused(err)
		return
	}
	events := events{violation: err != nil}
	if err == nil {
		l.received(opened, size, from, &events)
	}
	if events.violation {
		l.config.Handler.Failed(l, wire.CauseViolation)
		return
	}
	if events.up {
		l.config.Handler.Up(l)
	}
	if events.moved {
		l.config.Handler.Moved(l)
	}
	for _, datagram := range l.frames.Datagrams {
		l.config.Handler.Datagram(l, datagram)
	}
}

// events are what the handler learns of a packet, besides its datagrams.
type events struct{ violation, up, moved bool }

func (l *Lane) refused(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch err {
	case ErrOld:
		l.stats.RefusedOld++
	case ErrOpen:
		l.stats.RefusedKey++
	}
}

// received acts on a packet that authenticated and parses, all but its datagrams.
func (l *Lane) received(opened Opened, size int, from netip.AddrPort, events *events) {
	now := time.Now()
	f := &l.frames
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == closed {
		f.Datagrams = f.Datagrams[:0]
		return
	}
	for _, ack := range f.ACKs {
		if f.Ranges[ack.Start].Last >= l.sent.next {
			events.violation = true
			return
		}
	}
	l.stats.ReceivedPackets++
	l.stats.ReceivedBytes += uint64(size)
	l.lastHeard = now
	before := l.paths.current.addr
	l.paths.heard(from, size, opened.Newest, now)
	if opened.Updated {
		l.peerUpdated(now)
	}
	for _, ack := range f.ACKs {
		l.acked(f.Ranges[ack.Start:ack.End], ack.Delay, now)
	}
	l.acks.add(opened.Number, now, f.Eliciting, f.Ping || len(f.Challenges) > 0, l.sent.ackDelay())
	if f.Eliciting && l.acks.unsent == 1 {
		wakeUp(l.wake)
	}
	for _, data := range f.Responses {
		if l.paths.answered(data) && l.state == opening {
			l.become(up)
			events.up = true
			l.mtu.next = now
		}
	}
	l.answer(f.Challenges, from, size, now, events)
	if l.paths.current.addr != before && before.IsValid() {
		l.stats.Moves++
	}
	l.ask(now)
}

// peerUpdated notes the first packet of a new key phase of the other end, and follows it.
func (l *Lane) peerUpdated(now time.Time) {
	l.peerPhase++
	l.stats.PeerKeyUpdates++
	l.forgetKey = now.Add(3 * l.sent.pto())
	if l.peerPhase > l.ourPhase {
		if l.out.open > 0 {
			l.seal(recordSent)
		}
		l.sealer.Update()
		l.ourPhase++
	}
}

func (l *Lane) acked(ranges []Range, delay uint64, now time.Time) {
	var out outcome
	l.sent.onACK(ranges, time.Duration(min(delay, 1<<20))*8*time.Microsecond, now.Sub(l.began), &out)
	if out.acked > 0 {
		l.pings = 0
	}
	if out.probe > 0 {
		l.mtu.arrived(out.probe, now)
	}
	if out.lostLarge {
		l.mtu.lostLarge(now)
		wakeUp(l.wake)
	}
}

// answer answers challenges to where they came from.
func (l *Lane) answer(challenges [][8]byte, from netip.AddrPort, size int, now time.Time, events *events) {
	if l.state == draining {
		return
	}
	for _, data := range challenges {
		if data != l.challenged {
			// The first one belongs to the opening.
			events.moved = events.moved || l.challenged != [8]byte{}
			l.challenged = data
		}
		to := &l.paths.current
		if from != to.addr {
			if to = l.paths.candidate; to == nil || to.addr != from {
				to = &path{addr: from, received: size}
			}
		}
		if length := min(max(size, MinPacket), minPacket); to.room() >= length {
			frames := appendPath(nil, frameResponse, data)
			if l.acks.now || l.acks.isDue(now) {
				frames = l.acks.frame(frames, now)
			}
			l.single(frames, length, recordSent, to)
		}
	}
}

// ask sends the challenges that are due.
func (l *Lane) ask(now time.Time) {
	if l.state == draining {
		return
	}
	for _, path := range l.paths.due(now, l.sent.pto()) {
		if path != nil {
			l.single(appendPath(nil, frameChallenge, path.challenge), min(minPacket, path.room()), recordSent, path)
		}
	}
}

// EndBatch sends the acknowledgements that cannot wait.
func (l *Lane) EndBatch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.acks.now && l.state != closed {
		l.sendACK(time.Now())
	}
}

func (l *Lane) sendACK(now time.Time) {
	current := &l.paths.current
	if frame := l.acks.frame(nil, now); len(frame) > 0 && current.addr.IsValid() && current.room() > len(frame)+MinPacket {
		l.single(frame, 0, recordNone, current)
	}
}

// timers does what is due at a time.
func (l *Lane) timers() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.wake:
		case <-l.done:
			return
		}
		now := time.Now()
		cause, deadline := l.tick(now)
		if cause != 0 {
			l.config.Handler.Failed(l, cause)
		}
		timer.Reset(max(deadline.Sub(now), 200*time.Microsecond))
	}
}

// tick returns the cause for which the lane failed, or 0, and when it is to be called again.
func (l *Lane) tick(now time.Time) (cause uint32, deadline time.Time) {
	l.reading.Lock()
	failures, integrity := l.opener.Failures, l.config.Suite.integrity
	l.mu.Lock()
	if !l.forgetKey.IsZero() && !now.Before(l.forgetKey) {
		l.opener.ForgetPrevious()
		l.forgetKey = time.Time{}
	}
	l.reading.Unlock()
	defer l.mu.Unlock()
	deadline = now.Add(time.Second)
	if l.state == closed {
		return 0, deadline
	}
	if l.acks.isDue(now) {
		l.sendACK(now)
	}
	if l.state == draining {
		if now.After(l.drainUntil) {
			l.config.Socket.Unroute(l.config.Local)
			l.become(closed)
			close(l.done)
		}
		return 0, earlier(deadline, l.acks.due)
	}
	pto := l.sent.pto()
	moved := l.paths.current.addr
	if !l.paths.tick(now, pto) {
		return l.fail(wire.CauseDead), deadline
	}
	if l.paths.current.addr != moved {
		l.stats.Moves++
	}
	l.ask(now)
	worn := func(used, limit uint64) bool { return used >= limit/8*wearNumerator }
	if worn(failures, integrity) || worn(l.sealer.sealed, l.config.Suite.confidentiality) || l.sealer.Next > lastNumber {
		// It goes on until it is replaced.
		if now.Sub(l.wornAt) > drain {
			l.wornAt = now
			cause = wire.CauseWornOut
		}
	}
	if l.state == up {
		if l.outstandingTooLong(now, pto) {
			return l.fail(wire.CauseDead), deadline
		}
		l.probe(now, pto)
		deadline = earlier(deadline, l.mtu.deadline(pto))
	}
	deadline = earlier(deadline, l.pto(now, pto))
	deadline = earlier(deadline, l.paths.deadline())
	return cause, earlier(deadline, l.acks.due)
}

func (l *Lane) fail(cause uint32) uint32 {
	l.become(draining)
	l.drainUntil = time.Now().Add(drain)
	return cause
}

// outstandingTooLong says whether the other end should have been heard of.
func (l *Lane) outstandingTooLong(now time.Time, pto time.Duration) bool {
	if l.sent.outstanding == 0 {
		return false
	}
	since := l.lastHeard
	if at, ok := l.sent.oldest(); ok && l.began.Add(at).After(since) {
		since = l.began.Add(at)
	}
	return now.Sub(since) > max(3*pto, deadAfter)
}

// probe sends a probe of the path's MTU, if one is due.
func (l *Lane) probe(now time.Time, pto time.Duration) {
	if size := l.mtu.want(now, pto); size > 0 {
		l.single([]byte{framePing}, size, recordProbe, &l.paths.current)
	}
}

// pto sends a PING when packets wait for their acknowledgement for too long, or nothing came for the keepalive
// interval; it returns when to look again.
func (l *Lane) pto(now time.Time, pto time.Duration) time.Time {
	var deadline time.Time
	ping := false
	if l.sent.outstanding > 0 {
		at := l.lastSent.Add(pto << min(l.pings, 4))
		if ping = !now.Before(at); ping {
			l.pings++
		} else {
			deadline = at
		}
	}
	if l.config.KeepAlive > 0 && l.state == up {
		at := l.lastHeard.Add(l.config.KeepAlive)
		if ping = ping || !now.Before(at) && now.Sub(l.lastSent) >= l.config.KeepAlive; !ping && now.Before(at) {
			deadline = earlier(deadline, at)
		}
	}
	if ping && l.paths.current.room() >= MinPacket+1 {
		l.single([]byte{framePing}, 0, recordSent, &l.paths.current)
		deadline = earlier(deadline, now.Add(pto<<min(l.pings, 4)))
	}
	return deadline
}

// oldest returns when the oldest packet that waits for its acknowledgement was sent.
func (s *sent) oldest() (time.Duration, bool) {
	for ; s.low < s.next; s.low++ {
		if r := &s.ring[s.low%ringLen]; r.state != recordNone {
			return r.at, true
		}
	}
	return 0, false
}

func wakeUp(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

var _ underlay.Receiver = (*Lane)(nil)

// Secrets returns the secrets of the dialler's and of the listener's packets of one opening.
func Secrets(suite Suite, index uint32, epoch uint64, export func(label string, context []byte, length int) ([]byte, error)) (dialler, listener []byte, err error) {
	dialler, err1 := export(ExporterLabel, ExporterContext(uint16(index), false, epoch), suite.SecretLen())
	listener, err2 := export(ExporterLabel, ExporterContext(uint16(index), true, epoch), suite.SecretLen())
	return slices.Clone(dialler), slices.Clone(listener), errors.Join(err1, err2)
}

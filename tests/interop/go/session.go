package culvert

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/lane"
	"culvert.example/culvert/internal/underlay"
	"culvert.example/culvert/internal/wire"
)

const (
	helloLimit = 10 * time.Second
	writeLimit = 5 * time.Second
	// What an end may send in control messages, in units.
	unitsPerSecond = 1000
	unitsAtOnce    = 2000
	// laneAnswer is how long a dialler waits for LaneAccept.
	laneAnswer = 3 * time.Second
	// youngest is the age below which a listener does not replace a lane.
	youngest = 250 * time.Millisecond
	// mostLanes bounds the lanes that a listener holds for a peer, replaced ones included.
	mostLanes = 64
	// dialKeepAlive keeps a dialled connection and its lanes alive, and dialIdle notices the end of an agent that has
	// no lanes.
	dialKeepAlive = 2 * time.Second
	dialIdle      = 8 * time.Second
	listenIdle    = 30 * time.Second
	herePadding   = 1000
)

// session is one control connection to a peer, after both hellos, with its lanes.
type session struct {
	agent   *agent
	peer    *Peer
	conn    *quic.Conn
	control *quic.Stream
	dials   bool
	hello   *wire.Hello
	suite   lane.Suite
	keys    *presharedKeys
	// sockets are those of lanes by index: all the same at a listener.
	sockets func(index uint32) (*underlay.Socket, error)
	to      netip.AddrPort
	order   uint64

	plain   *plainCarrier // standard mode
	streams atomic.Int64
	told    *streamsTold
	writing sync.Mutex
	here    atomic.Int64
	// suspect gets a value when no lane is alive.
	suspect chan struct{}

	mu      sync.Mutex
	ended   bool
	use     *presharedUse // the preshared key of lanes that are opened from now on
	epoch   uint64
	count   uint32 // how many lanes the dialler opens
	lanes   [wire.MaxLanes]*laneSlot
	all     map[*lane.Lane]bool
	highest uint32
}

// laneSlot is what a session knows about one index.
type laneSlot struct {
	current *lane.Lane    // carries payloads, or did last
	next    *lane.Lane    // is being validated
	epoch   uint64        // the latest
	asked   time.Time     // a LaneOpen that was not answered
	askedBy *presharedUse // the key of that
	key     *presharedUse // that of the lane
	id      underlay.ConnectionID
	opened  time.Time
}

// plainCarrier sends payloads in the connection's own DATAGRAM frames.
type plainCarrier struct {
	conn *quic.Conn
	room atomic.Int64
}

// firstRoom fits into every packet of a QUIC connection.
const firstRoom = 1130

func (c *plainCarrier) Room() int { return int(c.room.Load()) }

func (c *plainCarrier) Send(header, body []byte) error {
	err := c.conn.SendDatagram(append(slices.Clone(header), body...))
	var tooLarge *quic.DatagramTooLargeError
	if errors.As(err, &tooLarge) {
		c.room.Store(tooLarge.MaxDatagramPayloadSize)
		return ErrTooLarge
	}
	return err
}

// newSession is for a connection on which both hellos are known.
func newSession(a *agent, conn *quic.Conn, control *quic.Stream, keys *presharedKeys, hello *wire.Hello) (*session, error) {
	suite, err := lane.NewSuite(conn.ConnectionState().TLS.CipherSuite)
	if err != nil {
		return nil, err
	}
	use, err := keys.agree(hello.PresharedKeys)
	if err != nil {
		return nil, err
	}
	if use != nil && (a.Lanes < 0 || hello.MaxLanes == 0) {
		return nil, fmt.Errorf("%w: a preshared key would protect nothing without lanes", errPreshared)
	}
	dials := keys.dials
	s := &session{
		agent: a, conn: conn, control: control, dials: dials, hello: hello, suite: suite, keys: keys, use: use,
		suspect: make(chan struct{}, 1), all: make(map[*lane.Lane]bool), told: newStreamsTold(dials, a.MaxStreams+1),
	}
	if a.Lanes < 0 || hello.MaxLanes == 0 {
		s.plain = &plainCarrier{conn: conn}
		s.plain.room.Store(firstRoom)
	} else if dials {
		most := max(hello.Workers, a.hello(nil, nil).Workers)
		s.count = min(most, defaultLanes, hello.MaxLanes, uint32(a.Lanes))
	}
	return s, nil
}

// run serves the session until its connection ends. The peer is set.
func (s *session) run() {
	ctx := s.conn.Context()
	go s.acceptStreams(ctx)
	if s.plain != nil {
		go s.receiveDatagrams(ctx)
	}
	if s.count > 0 {
		go s.keepLanes(ctx)
	}
	err := s.messages()
	code, text := uint64(wire.CloseViolation), "protocol violation"
	switch {
	case errors.Is(err, errFlood):
		code, text = wire.CloseLimit, "too many control messages"
	case errors.Is(err, errPreshared):
		code, text = wire.ClosePresharedKey, "no preshared key in common"
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	s.peer.log("the connection ended", "error", err)
	s.close(code, text)
}

// close ends the connection, and the lanes with it.
func (s *session) close(code uint64, text string) {
	s.peer.detach(s)
	_ = s.conn.CloseWithError(quic.ApplicationErrorCode(code), text)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for l := range s.all {
		l.Close()
	}
}

// send writes a control message.
func (s *session) send(message wire.Message) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	_ = s.control.SetWriteDeadline(time.Now().Add(writeLimit))
	_, err := s.control.Write(wire.AppendFramed(nil, message))
	return err
}

var errFlood = errors.New("too many control messages")

// messages reads the control stream.
func (s *session) messages() error {
	budget := newBucket(unitsPerSecond, unitsAtOnce)
	for {
		frame, err := wire.ReadFrame(s.control, wire.MaxEnvelope)
		if err != nil {
			return err
		}
		message, err := wire.ParseEnvelope(frame)
		if err != nil && !errors.Is(err, wire.ErrUnknownKind) {
			return err
		}
		if !budget.take(wire.Cost(len(frame), message)) {
			return errFlood
		}
		if message != nil {
			if err := s.message(message); err != nil {
				return err
			}
		}
	}
}

var errOrder = errors.New("a message out of order")

func (s *session) message(message wire.Message) error {
	switch m := message.(type) {
	case *wire.LaneOpen:
		if s.dials || s.plain != nil {
			return errOrder
		}
		return s.openedByPeer(m)
	case *wire.LaneAccept:
		if !s.dials {
			return errOrder
		}
		return s.accepted(m)
	case *wire.LaneRefuse:
		if !s.dials {
			return errOrder
		}
		s.peer.log("the peer refused a lane", "lane", m.Lane, "reason", m.Reason)
		s.mu.Lock()
		defer s.mu.Unlock()
		if slot := s.lanes[m.Lane]; slot != nil && slot.epoch == m.Epoch && s.dials {
			// keepLanes asks again.
			slot.asked = time.Now()
		}
	case *wire.LaneClose:
		s.closedByPeer(m)
	case *wire.ServicesChanged:
		s.peer.mu.Lock()
		defer s.peer.mu.Unlock()
		s.peer.services = m.Services
		s.peer.notify()
	case *wire.ReceiveRate:
		s.peer.limit(m.BitsPerSecond)
	case *wire.PresharedKeys:
		use, err := s.keys.agree(m.Proofs)
		if err != nil {
			return err
		}
		// keepLanes opens lanes again that have another key.
		s.mu.Lock()
		defer s.mu.Unlock()
		s.use = use
	case *wire.StreamAbort:
		s.told.aborted(m)
	case *wire.StreamCredit:
		s.told.limited(m)
	case *wire.ReportsWanted, *wire.PacketRepair, *wire.LineState:
		// Our hello says that we can do none of these.
	case *wire.Here:
		// That it was acknowledged is all that it is for.
	case *wire.StreamsWanted:
		if !s.dials {
			return errOrder
		}
		// We know no stream connections, and our hello says so.
	case *wire.Hello, *wire.Join, *wire.Joined, *wire.Release:
		return errOrder
	}
	return nil
}

// acceptStreams serves the TCP forwards that the peer opens.
func (s *session) acceptStreams(ctx context.Context) {
	for {
		stream, err := s.conn.AcceptStream(ctx)
		if err != nil {
			return
		}
		go s.serveStream(s.told.begin(s, stream, ""))
	}
}

func (s *session) receiveDatagrams(ctx context.Context) {
	for {
		data, err := s.conn.ReceiveDatagram(ctx)
		if err != nil {
			return
		}
		s.peer.payload(s.plain, data)
	}
}

// carries says whether a carrier is one of this session that works.
func (s *session) carries(c carrier) bool {
	switch c := c.(type) {
	case *plainCarrier:
		return c == s.plain
	case *lane.Lane:
		return c.IsUp()
	}
	return false
}

// choose returns the carrier of the number-th flow; nil if there is none.
func (s *session) choose(number uint64) carrier {
	if s.plain != nil {
		return s.plain
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	count := uint64(max(s.count, s.highest+1))
	for _, index := range []uint64{number % count, 0} {
		if slot := s.lanes[index]; slot != nil && slot.current != nil && slot.current.IsUp() {
			return slot.current
		}
	}
	for _, slot := range s.lanes[:count] {
		if slot != nil && slot.current != nil && slot.current.IsUp() {
			return slot.current
		}
	}
	return nil
}

func (s *session) lanesUp() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.countUp()
}

func (s *session) countUp() (count int) {
	for _, slot := range s.lanes {
		if slot != nil && slot.current != nil && slot.current.IsUp() {
			count++
		}
	}
	return count
}

// LaneStats are the counters of a lane, from its present opening on.
type LaneStats struct {
	Index uint32
	Epoch uint64
	Up    bool

	SentPackets, ReceivedPackets uint64
	SentBytes, ReceivedBytes     uint64
	// Of the packets sent that are to be acknowledged. Late are those of Lost that were acknowledged after all.
	Acked, Lost, Late uint64
	// Received and dropped: packets that did not authenticate, and copies.
	RefusedKey, RefusedOld uint64
	// KeyUpdates are ours, those that we followed included.
	KeyUpdates, PeerKeyUpdates uint64
	// Moves counts changes of the other end's address.
	Moves uint64
	RTT   time.Duration
	// PacketSize is the largest packet that the path carries, as far as it is known.
	PacketSize int
}

func (s *session) laneStats() []LaneStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	var stats []LaneStats
	for _, slot := range s.lanes {
		if slot != nil && slot.current != nil {
			l := slot.current
			c := l.Stats()
			stats = append(stats, LaneStats{
				Index: l.Index, Epoch: l.Epoch, Up: l.IsUp(),
				SentPackets: c.SentPackets, ReceivedPackets: c.ReceivedPackets, SentBytes: c.SentBytes, ReceivedBytes: c.ReceivedBytes,
				Acked: c.Acked, Lost: c.Lost, Late: c.Late, RefusedKey: c.RefusedKey, RefusedOld: c.RefusedOld,
				KeyUpdates: c.KeyUpdates, PeerKeyUpdates: c.PeerKeyUpdates, Moves: c.Moves, RTT: c.RTT, PacketSize: c.PacketSize,
			})
		}
	}
	return stats
}

// newLaneID makes a connection ID. Those of lanes are odd in their first byte, those of connections even.
func newLaneID() (id underlay.ConnectionID) {
	if _, err := rand.Read(id[:]); err != nil {
		panic(err) // crypto/rand never fails on Linux
	}
	id[0] |= 1
	return id
}

// keepLanes opens the dialler's lanes, and opens again those that were not answered or have ended.
func (s *session) keepLanes(ctx context.Context) {
	ticker := time.NewTicker(youngest)
	defer ticker.Stop()
	for {
		now := time.Now()
		for index := range s.count {
			if message := s.due(index, now); message != nil {
				if err := s.send(message); err != nil {
					return
				}
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// due returns the LaneOpen that is to be sent for an index, or nil.
func (s *session) due(index uint32, now time.Time) *wire.LaneOpen {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.lanes[index]
	if slot == nil {
		slot = &laneSlot{}
		s.lanes[index] = slot
	}
	switch {
	case s.ended, slot.next != nil, !slot.asked.IsZero() && now.Sub(slot.asked) < laneAnswer:
		return nil
	case slot.current != nil && slot.current.IsUp() && slot.asked.IsZero() && (slot.key.is(s.use) || now.Sub(slot.opened) < youngest):
		return nil
	}
	s.epoch++
	slot.epoch, slot.asked, slot.askedBy, slot.id = s.epoch, now, s.use, newLaneID()
	open := &wire.LaneOpen{Lane: index, Epoch: slot.epoch, ConnectionID: slices.Clone(slot.id[:])}
	if s.use != nil {
		open.PresharedKey = s.use.named
	}
	return open
}

// reopen has keepLanes open an index again, while its lane works on.
func (s *session) reopen(index uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot := s.lanes[index]; slot != nil && slot.next == nil && slot.asked.IsZero() {
		slot.asked = time.Now().Add(-laneAnswer)
	}
}

// make makes a lane. mu is held.
func (s *session) make(index uint32, epoch uint64, local, remote underlay.ConnectionID, socket *underlay.Socket, use *presharedUse) (*lane.Lane, error) {
	state := s.conn.ConnectionState().TLS
	ours, theirs, err := lane.Secrets(s.suite, index, epoch, state.ExportKeyingMaterial)
	if err != nil {
		return nil, err
	}
	if use != nil {
		ours, theirs = s.suite.Mix(use.key[:], ours), s.suite.Mix(use.key[:], theirs)
	}
	config := lane.Config{
		Index: index, Epoch: epoch, Suite: s.suite, SendSecret: ours, ReceiveSecret: theirs,
		Local: local, Remote: remote, Socket: socket, MaxPacket: int(s.hello.MaxPacket),
		UpdateAfter: s.agent.KeyUpdateAfter, Handler: s,
	}
	if s.dials {
		config.To, config.KeepAlive = s.to, dialKeepAlive
	} else {
		config.SendSecret, config.ReceiveSecret = theirs, ours
	}
	l := lane.New(config)
	s.all[l] = true
	return l, nil
}

// accepted makes the lane that the listener has granted.
func (s *session) accepted(m *wire.LaneAccept) error {
	socket, err := s.sockets(m.Lane)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.lanes[m.Lane]
	if slot == nil || slot.epoch != m.Epoch || slot.asked.IsZero() || s.ended {
		return nil
	}
	l, err := s.make(m.Lane, m.Epoch, slot.id, underlay.ConnectionID(m.ConnectionID), socket, slot.askedBy)
	if err != nil {
		return err
	}
	slot.asked, slot.next, slot.opened, slot.key = time.Time{}, l, time.Now(), slot.askedBy
	l.Start()
	return nil
}

// openedByPeer is a listener's answer to LaneOpen.
func (s *session) openedByPeer(m *wire.LaneOpen) error {
	socket, err := s.sockets(m.Lane)
	if err != nil {
		return err
	}
	s.mu.Lock()
	slot := s.lanes[m.Lane]
	if slot == nil {
		slot = &laneSlot{}
		s.lanes[m.Lane] = slot
	}
	now := time.Now()
	s.expire()
	reason := uint32(0)
	use, known := s.keys.ofLane(m.PresharedKey)
	switch {
	case m.Epoch <= slot.epoch:
		reason = wire.RefusalEpochReused
	case int(m.Lane) >= s.agent.Lanes, len(s.all) >= mostLanes, !slot.opened.IsZero() && now.Sub(slot.opened) < youngest:
		reason = wire.RefusalTooMany
	case !known:
		reason = wire.RefusalPresharedKey
	}
	if reason != 0 || s.ended {
		s.mu.Unlock()
		return s.send(&wire.LaneRefuse{Lane: m.Lane, Epoch: m.Epoch, Reason: reason})
	}
	id := newLaneID()
	l, err := s.make(m.Lane, m.Epoch, id, underlay.ConnectionID(m.ConnectionID), socket, use)
	if err != nil {
		s.mu.Unlock()
		return err
	}
	if slot.next != nil {
		slot.next.Replace()
	}
	slot.epoch, slot.next, slot.opened = m.Epoch, l, now
	s.highest = max(s.highest, m.Lane)
	s.mu.Unlock()
	l.Start()
	return s.send(&wire.LaneAccept{LaneOpen: wire.LaneOpen{Lane: m.Lane, Epoch: m.Epoch, ConnectionID: id[:]}})
}

// expire forgets lanes that have ended. mu is held.
func (s *session) expire() {
	for l := range s.all {
		if l.Ended() {
			delete(s.all, l)
		}
	}
}

// closedByPeer acts on LaneClose.
func (s *session) closedByPeer(m *wire.LaneClose) {
	s.mu.Lock()
	slot := s.lanes[m.Lane]
	if slot == nil || slot.epoch != m.Epoch {
		s.mu.Unlock()
		return
	}
	if m.Reason != wire.CauseWornOut {
		for _, l := range []*lane.Lane{slot.current, slot.next} {
			if l != nil && l.Epoch == m.Epoch {
				l.Replace()
			}
		}
		slot.next = nil
	}
	s.mu.Unlock()
	if s.dials && m.Reason != wire.CauseDone {
		s.reopen(m.Lane)
	}
}

// Datagram is for lane.Handler, as the methods below.
func (s *session) Datagram(l *lane.Lane, data []byte) { s.peer.payload(l, data) }

// Up makes a lane the one of its index; the one before goes on receiving for a while.
func (s *session) Up(l *lane.Lane) {
	s.mu.Lock()
	slot := s.lanes[l.Index]
	if slot.next == l {
		if slot.current != nil {
			slot.current.Replace()
		}
		slot.current, slot.next = l, nil
	}
	s.expire()
	s.mu.Unlock()
	s.peer.mu.Lock()
	defer s.peer.mu.Unlock()
	s.peer.notify()
}

// Moved shows the listener our new address on every lane.
func (s *session) Moved(*lane.Lane) {
	now, last := int64(time.Since(began)), s.here.Load()
	if !s.dials || now-last < int64(youngest) || !s.here.CompareAndSwap(last, now) {
		return
	}
	go func() {
		_ = s.send(&wire.Here{Padding: make([]byte, herePadding)})
		s.mu.Lock()
		defer s.mu.Unlock()
		for l := range s.all {
			l.Ping()
		}
	}()
}

// Failed replaces a lane, or has the other end do it.
func (s *session) Failed(l *lane.Lane, cause uint32) {
	s.peer.log("a lane is to be closed", "lane", l.Index, "epoch", l.Epoch, "cause", cause)
	go func() {
		if cause != wire.CauseWornOut {
			l.Replace()
		}
		if cause == wire.CauseViolation || !s.dials {
			_ = s.send(&wire.LaneClose{LaneRefuse: wire.LaneRefuse{Lane: l.Index, Epoch: l.Epoch, Reason: cause}})
		}
		s.mu.Lock()
		if slot := s.lanes[l.Index]; slot.next == l {
			slot.next = nil
		}
		alive := s.countUp()
		s.mu.Unlock()
		if !s.dials {
			return
		}
		s.reopen(l.Index)
		if alive == 0 {
			select {
			case s.suspect <- struct{}{}:
			default:
			}
		}
	}()
}

// readHello reads the first message of a control stream.
func readHello(control *quic.Stream) (*wire.Hello, error) {
	_ = control.SetReadDeadline(time.Now().Add(helloLimit))
	defer func() { _ = control.SetReadDeadline(time.Time{}) }()
	for {
		frame, err := wire.ReadFrame(control, wire.MaxEnvelope)
		if err != nil {
			return nil, err
		}
		message, err := wire.ParseEnvelope(frame)
		if errors.Is(err, wire.ErrUnknownKind) {
			continue
		}
		if err != nil {
			return nil, err
		}
		hello, ok := message.(*wire.Hello)
		if !ok {
			return nil, fmt.Errorf("%w: the first one is no Hello", errOrder)
		}
		return hello, nil
	}
}

// closeCode is the code with which a connection is closed because of err.
func closeCode(err error) quic.ApplicationErrorCode {
	switch {
	case errors.Is(err, wire.ErrVersion):
		return wire.CloseVersion
	case errors.Is(err, errPreshared):
		return wire.ClosePresharedKey
	}
	return wire.CloseViolation
}

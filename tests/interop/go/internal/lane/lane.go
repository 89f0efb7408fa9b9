// Package lane has the lanes of a session: QUIC short-header packets with keys, numbers and acknowledgements of their
// own, which carry payloads in DATAGRAM frames.
//
// [Lane] is the whole, in four files: its life (lane.go), what it sends (send.go), what it does with a packet
// (receive.go) and when nothing comes (timers.go). The parts are usable, and tested, alone: keys.go protects packets,
// frames.go reads their content, window.go refuses repeated numbers, acks.go remembers what to acknowledge, sent.go what
// was acknowledged and lost, reordering.go how long a missing packet may be merely late, path.go the addresses and the
// MTU of the path.
package lane

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"culvert.example/culvert/internal/underlay"
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
	// benefitOfDoubt is given to a lane that seems to be dead.
	benefitOfDoubt = 100 * time.Millisecond
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
	Acked, Lost, Late            uint64 // Late: of those lost, acknowledged after all
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
	doubt      time.Time // since when the lane seems to be dead
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
	s.Acked, s.Lost, s.Late = l.sent.Acked, l.sent.Lost, l.sent.Late
	s.RTT, s.PacketSize = l.sent.rtt.smoothed, l.mtu.size
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

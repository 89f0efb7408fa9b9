package wire

import (
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"unicode"

	"culvert.example/culvert/internal/label"
)

// Limits of messages.
const (
	MaxEnvelope     = 65536
	MaxStreamHeader = 1024
	MaxLane         = 63
	MaxLanes        = 64
	MaxServices     = 256
	MaxWorkers      = 256
	MinPacket       = 1200
	MaxPacket       = 65527
	Version         = 1
	// MaxPresharedKeys is how many preshared keys an end may have for the other.
	MaxPresharedKeys = 2
	// ProofLen is the length of the proof of one.
	ProofLen = 16
	// MaxStreams is how many streams a message about them names.
	MaxStreams = 256
)

// Feature bits of [Hello].
const (
	FeaturePartialChecksums  = 1 << 0
	FeatureIP                = 1 << 1
	FeaturePieces            = 1 << 2
	FeatureStreamConnections = 1 << 3
	FeaturePresharedKeys     = 1 << 6
	FeatureStreamAbort       = 1 << 9
	FeatureStreamCredit      = 1 << 10
)

// Close codes: application error codes of CONNECTION_CLOSE.
const (
	CloseShutdown      = 0
	CloseViolation     = 1
	CloseVersion       = 2
	CloseReplaced      = 3
	CloseKeyRemoved    = 4
	CloseInternal      = 5
	CloseIdle          = 6
	CloseLimit         = 7
	CloseSelf          = 8
	CloseUnknownJoined = 9
	ClosePresharedKey  = 10
	CloseTooNarrow     = 11
)

// Why a listener refuses a lane.
const (
	RefusalEpochReused  = 1
	RefusalTooMany      = 2
	RefusalShuttingDown = 3
	RefusalPresharedKey = 4
)

// Why an end closes a lane.
const (
	CauseDead      = 1
	CauseViolation = 2
	CauseReplaced  = 3
	CauseDone      = 4
	CauseWornOut   = 5
)

// Means of repair; with RepairOff a message's other fields mean nothing.
const (
	RepairOff        = 0
	RepairRetransmit = 1
	RepairFEC        = 2
	RepairAuto       = 3
)

// Limits of the terms of repair.
const (
	MinRepairDeadlineMS = 5
	MaxRepairDeadlineMS = 2_000
	MaxRepairPPM        = 2_000_000
)

// Statuses of a [StreamAnswer].
const (
	StatusOK              = 1
	StatusUnknownService  = 2
	StatusNotAllowed      = 3
	StatusUpstreamRefused = 4
	StatusUpstreamTimeout = 5
	StatusLimitReached    = 6
	StatusTooManyFiles    = 7
	StatusNoRoute         = 8
	StatusNoResources     = 9
)

// PossessionMessage is what a dialler signs to prove that it holds its key: exported are the 32 bytes of its
// connection's TLS exporter.
func PossessionMessage(exported []byte) []byte {
	return append([]byte("culvert possession 1"), exported...)
}

// KeyProof proves a preshared key on the connection whose TLS exporter gives these 32 bytes.
func KeyProof(key, exported []byte, byListener bool) []byte {
	sender := "\x00"
	if byListener {
		sender = "\x01"
	}
	extracted := label.Must(hkdf.Extract(sha256.New, exported, key))
	return label.Must(hkdf.Expand(sha256.New, extracted, "culvert psk proof 1"+sender, ProofLen))
}

// ErrUnknownKind says that an Envelope has a kind of a later version: it is ignored.
var ErrUnknownKind = errors.New("unknown kind of message")

// A Message is what an Envelope contains: a pointer to one of the structs below.
type Message interface {
	number() int
	append([]byte) []byte
	set(field) error
	check() error
}

// Hello is the first message of each end.
type Hello struct {
	Version    uint32
	Instance   []byte
	Software   string
	Workers    uint32
	MaxLanes   uint32
	MaxPacket  uint32
	Services   []Service
	Features   uint64
	Possession []byte
	// PresharedKeys are proofs, that of the preferred key first.
	PresharedKeys [][]byte
}

// Service is one service that the sender of a hello offers.
type Service struct {
	Number   uint32
	Name     string
	UDP, TCP bool
	IdleMS   uint32
	Fragment bool
}

// LaneOpen asks for a lane.
type LaneOpen struct {
	Lane         uint32
	Epoch        uint64
	ConnectionID []byte
	// PresharedKey is the dialler's proof of the key that the lane uses; empty: none.
	PresharedKey []byte
	// Line is the line of the dialler that the lane is on; nil: it has one only.
	Line *Line
}

// Line describes a line; lane i is on line i / Lanes.
type Line struct {
	Lanes           uint32
	Rate            uint64
	Weight          uint32
	Metered, Backup bool
}

// LineState says what its sender hears of a line, and, from the dialler, what the line carries from now on: nil is as before, and
// Lanes means nothing.
type LineState struct {
	Line    uint32
	Unheard bool
	Terms   *Line
}

// MaxLines and MaxWeight bound what a Line may say.
const (
	MaxLines  = 8
	MaxWeight = 256
)

// LaneAccept grants a lane. It has neither PresharedKey nor Line.
type LaneAccept struct{ LaneOpen }

// LaneRefuse refuses a lane; Reason is a Refusal… constant, or one of a later version.
type LaneRefuse struct {
	Lane   uint32
	Epoch  uint64
	Reason uint32
}

// LaneClose ends a lane; Reason is a Cause… constant, or one of a later version.
type LaneClose struct{ LaneRefuse }

// ServicesChanged replaces all services of the sender.
type ServicesChanged struct{ Services []Service }

// Here makes its receiver acknowledge, and so notice where its sender is.
type Here struct{ Padding []byte }

// Join makes a connection part of a session.
type Join struct {
	Instance   []byte
	Session    []byte
	Number     uint32
	Possession []byte
}

// Joined answers [Join].
type Joined struct{}

// StreamsWanted asks the dialler for stream connections.
type StreamsWanted struct{}

// Release asks the listener to close a stream connection.
type Release struct{}

// ReceiveRate is the most that its sender wants to receive; 0 is no limit.
type ReceiveRate struct{ BitsPerSecond uint64 }

// ReportsWanted says whether its sender wants reports about its packets on lanes.
type ReportsWanted struct{ Wanted bool }

// PacketRepair says how its sender repairs the IP packets that it sends.
type PacketRepair struct {
	// Mode is a Repair… constant; those of later versions count as RepairAuto.
	Mode           uint32
	DeadlineMS     uint32
	MaxOverheadPPM uint32
	Hold           bool
	// PathDeadline says that the deadline follows the path's round trip; DeadlineMS is for ends that do not know it.
	PathDeadline bool
}

// PresharedKeys replaces the proofs of the sender's hello.
type PresharedKeys struct{ Proofs [][]byte }

// StreamAbort says after how many bytes of each of these streams its TCP connection was reset.
type StreamAbort struct{ Streams, Bytes []uint64 }

// StreamCredit says how far the other end may send on each of these streams, and on those that begin from now on (0: no
// limit).
type StreamCredit struct {
	Initial         uint64
	Streams, Limits []uint64
}

// StreamOpen starts a TCP forward.
type StreamOpen struct {
	Service uint32
	// Client is who connected, if that is told.
	Client ClientAddresses
}

// ClientAddresses are those of a client and of what it connected to, of one family; both are invalid if they are not told.
type ClientAddresses struct{ Source, Destination netip.AddrPort }

// StreamAnswer answers it; Status is a Status… constant, or one of a later version.
type StreamAnswer struct{ Status uint32 }

func newMessage(number int) Message {
	switch number {
	case 1:
		return &Hello{}
	case 2:
		return &LaneOpen{}
	case 3:
		return &LaneAccept{}
	case 4:
		return &LaneRefuse{}
	case 5:
		return &LaneClose{}
	case 6:
		return &ServicesChanged{}
	case 7:
		return &Here{}
	case 8:
		return &Join{}
	case 9:
		return &Joined{}
	case 10:
		return &StreamsWanted{}
	case 11:
		return &Release{}
	case 12:
		return &ReceiveRate{}
	case 13:
		return &ReportsWanted{}
	case 14:
		return &PacketRepair{}
	case 15:
		return &PresharedKeys{}
	case 18:
		return &StreamAbort{}
	case 19:
		return &StreamCredit{}
	case 20:
		return &LineState{}
	default:
		return nil
	}
}

// Name returns the name of a message's kind in culvert.proto.
func Name(message Message) string {
	return [...]string{
		1: "hello", "lane_open", "lane_accept", "lane_refuse", "lane_close", "services_changed", "here", "join", "joined",
		"streams_wanted", "release", "receive_rate", "reports_wanted", "packet_repair", "preshared_keys",
		18: "stream_abort", "stream_credit", "line_state",
	}[message.number()]
}

func (*Hello) number() int           { return 1 }
func (*LaneOpen) number() int        { return 2 }
func (*LaneAccept) number() int      { return 3 }
func (*LaneRefuse) number() int      { return 4 }
func (*LaneClose) number() int       { return 5 }
func (*ServicesChanged) number() int { return 6 }
func (*Here) number() int            { return 7 }
func (*Join) number() int            { return 8 }
func (*Joined) number() int          { return 9 }
func (*StreamsWanted) number() int   { return 10 }
func (*Release) number() int         { return 11 }
func (*ReceiveRate) number() int     { return 12 }
func (*ReportsWanted) number() int   { return 13 }
func (*PacketRepair) number() int    { return 14 }
func (*PresharedKeys) number() int   { return 15 }
func (*StreamAbort) number() int     { return 18 }
func (*StreamCredit) number() int    { return 19 }
func (*LineState) number() int       { return 20 }

// ParseEnvelope reads one Envelope, without the length before it. A message of an unknown kind is [ErrUnknownKind];
// every other error is a protocol violation. Byte fields of the message are slices of b.
func ParseEnvelope(b []byte) (Message, error) {
	if len(b) == 0 {
		return nil, errors.New("an Envelope of 0 bytes")
	}
	var message Message
	err := eachField(b, func(f field) error {
		made := newMessage(f.number)
		if made == nil {
			return nil
		}
		if f.kind != typeBytes {
			return errProtobuf
		}
		// Protobuf merges a repeated inner message into the one before; the last kind of a oneof wins.
		if message == nil || message.number() != f.number {
			message = made
		}
		return eachField(f.bytes, message.set)
	})
	if err != nil {
		return nil, err
	}
	if message == nil {
		return nil, ErrUnknownKind
	}
	if err := message.check(); err != nil {
		return nil, err
	}
	return message, nil
}

// AppendEnvelope appends the Envelope of message, without a length.
func AppendEnvelope(b []byte, message Message) []byte {
	return appendMessage(b, message.number(), message.append(nil))
}

// AppendFramed appends the Envelope of message with its length, as it travels on a control stream.
func AppendFramed(b []byte, message Message) []byte {
	envelope := AppendEnvelope(nil, message)
	return append(AppendVarint(b, uint64(len(envelope))), envelope...)
}

// ReadFrame reads a length and as many bytes. A length above limit is an error.
func ReadFrame(r io.Reader, limit int) ([]byte, error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return nil, err
	}
	n := 1 << (head[0] >> 6)
	if _, err := io.ReadFull(r, head[1:n]); err != nil {
		return nil, err
	}
	length, _ := Varint(head[:n])
	if length > uint64(limit) {
		return nil, fmt.Errorf("%w: %d bytes, the most is %d", ErrTooLong, length, limit)
	}
	b := make([]byte, length)
	_, err := io.ReadFull(r, b)
	return b, err
}

// ErrTooLong says that a length exceeds its limit.
var ErrTooLong = errors.New("a message is too long")

// Cost is what a message of so many bytes costs its sender, in units.
func Cost(length int, message Message) float64 {
	units := float64(1 + length/256)
	switch m := message.(type) {
	case *ServicesChanged, *PacketRepair, *ReportsWanted, *PresharedKeys, *LineState:
		units += 15
	case *StreamAbort:
		units += float64(len(m.Streams) / 16)
	case *StreamCredit:
		units = float64(length+1) / 512
	}
	return units
}

// ParseStreamOpen reads a StreamOpen without its length.
func ParseStreamOpen(b []byte) (StreamOpen, error) {
	var open StreamOpen
	err := eachField(b, func(f field) error {
		switch f.number {
		case 1:
			return integerInto(f, &open.Service)
		case 2:
			return clientInto(f, &open.Client)
		}
		return nil
	})
	return open, err
}

func clientInto(f field, into *ClientAddresses) error {
	if f.kind != typeBytes {
		return errProtobuf
	}
	var ips [2][]byte
	var ports [2]uint32
	err := eachField(f.bytes, func(f field) error {
		switch f.number {
		case 1:
			return f.bytesInto(&ips[0])
		case 2:
			return integerInto(f, &ports[0])
		case 3:
			return f.bytesInto(&ips[1])
		case 4:
			return integerInto(f, &ports[1])
		}
		return nil
	})
	if err != nil {
		return err
	}
	var both [2]netip.AddrPort
	for i, bytes := range ips {
		ip, ok := netip.AddrFromSlice(bytes)
		if !ok || ports[i] > math.MaxUint16 {
			return errors.New("no address of a client")
		}
		both[i] = netip.AddrPortFrom(ip.Unmap(), uint16(ports[i]))
	}
	if both[0].Addr().Is4() != both[1].Addr().Is4() {
		return errors.New("a client's addresses are of two families")
	}
	*into = ClientAddresses{Source: both[0], Destination: both[1]}
	return nil
}

// ParseStreamAnswer reads a StreamAnswer without its length.
func ParseStreamAnswer(b []byte) (StreamAnswer, error) {
	var answer StreamAnswer
	err := eachField(b, func(f field) error {
		if f.number == 1 {
			return integerInto(f, &answer.Status)
		}
		return nil
	})
	return answer, err
}

// AppendFramed appends the header with its length.
func (s StreamOpen) AppendFramed(b []byte) []byte {
	body := appendInteger(nil, 1, uint64(s.Service))
	if s.Client.Source.IsValid() {
		var inner []byte
		for i, at := range []netip.AddrPort{s.Client.Source, s.Client.Destination} {
			inner = appendBytes(inner, 2*i+1, at.Addr().AsSlice())
			inner = appendInteger(inner, 2*i+2, uint64(at.Port()))
		}
		body = appendMessage(body, 2, inner)
	}
	return appendMessageBody(b, body)
}

// AppendFramed appends the header with its length.
func (s StreamAnswer) AppendFramed(b []byte) []byte {
	return appendMessageBody(b, appendInteger(nil, 1, uint64(s.Status)))
}

func appendMessageBody(b, body []byte) []byte {
	return append(AppendVarint(b, uint64(len(body))), body...)
}

func (h *Hello) set(f field) error {
	switch f.number {
	case 1:
		return integerInto(f, &h.Version)
	case 2:
		return f.bytesInto(&h.Instance)
	case 3:
		return f.stringInto(&h.Software)
	case 4:
		return integerInto(f, &h.Workers)
	case 5:
		return integerInto(f, &h.MaxLanes)
	case 6:
		return integerInto(f, &h.MaxPacket)
	case 7:
		return appendService(f, &h.Services)
	case 8:
		return integerInto(f, &h.Features)
	case 9:
		return f.bytesInto(&h.Possession)
	case 10:
		return appendProof(f, &h.PresharedKeys)
	}
	return nil
}

func (h *Hello) append(b []byte) []byte {
	b = appendInteger(b, 1, uint64(h.Version))
	b = appendBytes(b, 2, h.Instance)
	b = appendBytes(b, 3, h.Software)
	b = appendInteger(b, 4, uint64(h.Workers))
	b = appendInteger(b, 5, uint64(h.MaxLanes))
	b = appendInteger(b, 6, uint64(h.MaxPacket))
	b = appendServices(b, 7, h.Services)
	b = appendInteger(b, 8, h.Features)
	b = appendBytes(b, 9, h.Possession)
	return appendProofs(b, 10, h.PresharedKeys)
}

func appendProof(f field, into *[][]byte) error {
	if len(*into) > MaxPresharedKeys {
		return errors.New("too many preshared keys")
	}
	var proof []byte
	err := f.bytesInto(&proof)
	*into = append(*into, proof)
	return err
}

func appendProofs(b []byte, number int, proofs [][]byte) []byte {
	for _, proof := range proofs {
		b = appendBytes(b, number, proof)
	}
	return b
}

func checkProofs(proofs [][]byte) error {
	if len(proofs) > MaxPresharedKeys {
		return fmt.Errorf("%d preshared keys", len(proofs))
	}
	for _, proof := range proofs {
		if len(proof) != ProofLen {
			return fmt.Errorf("the proof of a preshared key has %d bytes", len(proof))
		}
	}
	return nil
}

// ErrVersion says that the hello is of another protocol version: close code 2.
var ErrVersion = errors.New("another protocol version")

func (h *Hello) check() error {
	switch {
	case h.Version != Version:
		return fmt.Errorf("%w: %d", ErrVersion, h.Version)
	case len(h.Instance) != 16:
		return errors.New("the instance of a hello does not have 16 bytes")
	case len(h.Software) > 64 || hasControl(h.Software):
		return errors.New("the software of a hello is too long, or has control characters")
	case h.Workers < 1 || h.Workers > MaxWorkers:
		return fmt.Errorf("a hello with %d workers", h.Workers)
	case h.MaxLanes > MaxLanes:
		return fmt.Errorf("a hello with %d lanes", h.MaxLanes)
	case h.MaxPacket < MinPacket || h.MaxPacket > MaxPacket:
		return fmt.Errorf("a hello with packets of %d bytes", h.MaxPacket)
	case len(h.Possession) != 0 && len(h.Possession) != 64:
		return errors.New("the possession of a hello does not have 64 bytes")
	}
	if err := checkProofs(h.PresharedKeys); err != nil {
		return err
	}
	return checkServices(h.Services)
}

func hasControl(s string) bool {
	for _, r := range s {
		if unicode.IsControl(r) {
			return true
		}
	}
	return false
}

func checkServices(services []Service) error {
	if len(services) > MaxServices {
		return fmt.Errorf("%d services", len(services))
	}
	numbers, names := make(map[uint32]bool, len(services)), make(map[string]bool, len(services))
	for _, s := range services {
		if len(s.Name) < 1 || len(s.Name) > 64 || hasControl(s.Name) {
			return fmt.Errorf("the name of service %d", s.Number)
		}
		if numbers[s.Number] || names[s.Name] {
			return fmt.Errorf("service %d is there twice", s.Number)
		}
		numbers[s.Number], names[s.Name] = true, true
	}
	return nil
}

func appendService(f field, into *[]Service) error {
	if f.kind != typeBytes {
		return errProtobuf
	}
	if len(*into) > MaxServices {
		return errors.New("too many services")
	}
	var s Service
	err := eachField(f.bytes, func(f field) error {
		switch f.number {
		case 1:
			return integerInto(f, &s.Number)
		case 2:
			return f.stringInto(&s.Name)
		case 3:
			return f.boolInto(&s.UDP)
		case 4:
			return f.boolInto(&s.TCP)
		case 5:
			return integerInto(f, &s.IdleMS)
		case 6:
			return f.boolInto(&s.Fragment)
		}
		return nil
	})
	*into = append(*into, s)
	return err
}

func appendServices(b []byte, number int, services []Service) []byte {
	for _, s := range services {
		var inner []byte
		inner = appendInteger(inner, 1, uint64(s.Number))
		inner = appendBytes(inner, 2, s.Name)
		inner = appendBool(inner, 3, s.UDP)
		inner = appendBool(inner, 4, s.TCP)
		inner = appendInteger(inner, 5, uint64(s.IdleMS))
		inner = appendBool(inner, 6, s.Fragment)
		b = appendMessage(b, number, inner)
	}
	return b
}

func (l *LaneOpen) set(f field) error {
	switch f.number {
	case 1:
		return integerInto(f, &l.Lane)
	case 2:
		return integerInto(f, &l.Epoch)
	case 3:
		return f.bytesInto(&l.ConnectionID)
	case 4:
		return f.bytesInto(&l.PresharedKey)
	case 5:
		return lineInto(f, &l.Line)
	}
	return nil
}

// lineInto merges a Line with what was read of it before.
func lineInto(f field, into **Line) error {
	if f.kind != typeBytes {
		return errProtobuf
	}
	if *into == nil {
		*into = new(Line)
	}
	line := *into
	return eachField(f.bytes, func(f field) error {
		switch f.number {
		case 1:
			return integerInto(f, &line.Lanes)
		case 2:
			return integerInto(f, &line.Rate)
		case 3:
			return integerInto(f, &line.Weight)
		case 4:
			return f.boolInto(&line.Metered)
		case 5:
			return f.boolInto(&line.Backup)
		}
		return nil
	})
}

func (l *Line) append(b []byte, number int, lanes uint32) []byte {
	var inner []byte
	inner = appendInteger(inner, 1, uint64(lanes))
	inner = appendInteger(inner, 2, l.Rate)
	if l.Weight > 1 {
		inner = appendInteger(inner, 3, uint64(l.Weight))
	}
	inner = appendBool(inner, 4, l.Metered)
	inner = appendBool(inner, 5, l.Backup)
	return appendMessage(b, number, inner)
}

func (s *LineState) set(f field) error {
	switch f.number {
	case 1:
		return integerInto(f, &s.Line)
	case 2:
		return f.boolInto(&s.Unheard)
	case 3:
		return lineInto(f, &s.Terms)
	}
	return nil
}

func (s *LineState) append(b []byte) []byte {
	b = appendBool(appendInteger(b, 1, uint64(s.Line)), 2, s.Unheard)
	if s.Terms == nil {
		return b
	}
	return s.Terms.append(b, 3, 0)
}

func (s *LineState) check() error {
	if s.Line >= MaxLines || s.Terms != nil && s.Terms.Weight > MaxWeight {
		return errors.New("a line out of range")
	}
	return nil
}

// set is that of LaneOpen without its last fields, which are not checked either.
func (l *LaneAccept) set(f field) error {
	if f.number >= 4 {
		return nil
	}
	return l.LaneOpen.set(f)
}

func (l *LaneOpen) append(b []byte) []byte {
	b = appendInteger(b, 1, uint64(l.Lane))
	b = appendInteger(b, 2, l.Epoch)
	b = appendBytes(b, 3, l.ConnectionID)
	b = appendBytes(b, 4, l.PresharedKey)
	if l.Line == nil {
		return b
	}
	return l.Line.append(b, 5, l.Line.Lanes)
}

func (l *LaneOpen) check() error {
	if len(l.ConnectionID) != 8 {
		return errors.New("connection_id does not have 8 bytes")
	}
	if len(l.PresharedKey) != 0 && len(l.PresharedKey) != ProofLen {
		return errors.New("preshared_key does not have 16 bytes")
	}
	if err := checkLane(l.Lane); err != nil || l.Line == nil {
		return err
	}
	if l.Line.Lanes < 1 || l.Line.Lanes > MaxLane+1 || l.Line.Weight > MaxWeight {
		return errors.New("a line out of range")
	}
	if number := l.Lane / l.Line.Lanes; number >= MaxLines {
		return fmt.Errorf("line %d", number)
	}
	return nil
}

func checkLane(lane uint32) error {
	if lane > MaxLane {
		return fmt.Errorf("lane %d", lane)
	}
	return nil
}

func (l *LaneRefuse) set(f field) error {
	switch f.number {
	case 1:
		return integerInto(f, &l.Lane)
	case 2:
		return integerInto(f, &l.Epoch)
	case 3:
		return integerInto(f, &l.Reason)
	}
	return nil
}

func (l *LaneRefuse) append(b []byte) []byte {
	b = appendInteger(b, 1, uint64(l.Lane))
	b = appendInteger(b, 2, l.Epoch)
	return appendInteger(b, 3, uint64(l.Reason))
}

func (l *LaneRefuse) check() error { return checkLane(l.Lane) }

func (s *ServicesChanged) set(f field) error {
	if f.number == 1 {
		return appendService(f, &s.Services)
	}
	return nil
}

func (s *ServicesChanged) append(b []byte) []byte { return appendServices(b, 1, s.Services) }
func (s *ServicesChanged) check() error           { return checkServices(s.Services) }

func (h *Here) set(f field) error {
	if f.number == 1 {
		return f.bytesInto(&h.Padding)
	}
	return nil
}

func (h *Here) append(b []byte) []byte { return appendBytes(b, 1, h.Padding) }
func (h *Here) check() error           { return nil }

func (j *Join) set(f field) error {
	switch f.number {
	case 1:
		return f.bytesInto(&j.Instance)
	case 2:
		return f.bytesInto(&j.Session)
	case 3:
		return integerInto(f, &j.Number)
	case 4:
		return f.bytesInto(&j.Possession)
	}
	return nil
}

func (j *Join) append(b []byte) []byte {
	b = appendBytes(b, 1, j.Instance)
	b = appendBytes(b, 2, j.Session)
	b = appendInteger(b, 3, uint64(j.Number))
	return appendBytes(b, 4, j.Possession)
}

func (j *Join) check() error {
	if len(j.Instance) != 16 || len(j.Session) != 16 || len(j.Possession) != 0 && len(j.Possession) != 64 || j.Number < 1 || j.Number > 7 {
		return errors.New("a Join with a field out of its limits")
	}
	return nil
}

func (*Joined) set(field) error               { return nil }
func (*Joined) append(b []byte) []byte        { return b }
func (*Joined) check() error                  { return nil }
func (*StreamsWanted) set(field) error        { return nil }
func (*StreamsWanted) append(b []byte) []byte { return b }
func (*StreamsWanted) check() error           { return nil }
func (*Release) set(field) error              { return nil }
func (*Release) append(b []byte) []byte       { return b }
func (*Release) check() error                 { return nil }

func (r *ReceiveRate) set(f field) error {
	if f.number == 1 {
		return integerInto(f, &r.BitsPerSecond)
	}
	return nil
}

func (p *PresharedKeys) set(f field) error {
	if f.number == 1 {
		return appendProof(f, &p.Proofs)
	}
	return nil
}

func (p *PresharedKeys) append(b []byte) []byte { return appendProofs(b, 1, p.Proofs) }
func (p *PresharedKeys) check() error           { return checkProofs(p.Proofs) }

func (r *ReceiveRate) append(b []byte) []byte { return appendInteger(b, 1, r.BitsPerSecond) }
func (r *ReceiveRate) check() error           { return nil }

func (r *ReportsWanted) set(f field) error {
	if f.number == 1 {
		return f.boolInto(&r.Wanted)
	}
	return nil
}

func (r *ReportsWanted) append(b []byte) []byte { return appendBool(b, 1, r.Wanted) }
func (r *ReportsWanted) check() error           { return nil }

func (p *PacketRepair) set(f field) error {
	switch f.number {
	case 1:
		return integerInto(f, &p.Mode)
	case 2:
		return integerInto(f, &p.DeadlineMS)
	case 3:
		return integerInto(f, &p.MaxOverheadPPM)
	case 4:
		return f.boolInto(&p.Hold)
	case 5:
		return f.boolInto(&p.PathDeadline)
	}
	return nil
}

func (p *PacketRepair) append(b []byte) []byte {
	if p.Mode == RepairOff {
		return b
	}
	b = appendInteger(b, 1, uint64(p.Mode))
	b = appendInteger(b, 2, uint64(p.DeadlineMS))
	b = appendInteger(b, 3, uint64(p.MaxOverheadPPM))
	b = appendBool(b, 4, p.Hold)
	return appendBool(b, 5, p.PathDeadline)
}

func (p *PacketRepair) check() error {
	switch {
	case p.Mode == RepairOff:
		return nil
	case p.DeadlineMS < MinRepairDeadlineMS || p.DeadlineMS > MaxRepairDeadlineMS:
		return fmt.Errorf("packets are to be repaired within %d ms", p.DeadlineMS)
	case p.MaxOverheadPPM > MaxRepairPPM:
		return fmt.Errorf("%d millionths of repair", p.MaxOverheadPPM)
	}
	p.Mode = min(p.Mode, RepairAuto)
	return nil
}

func (a *StreamAbort) set(f field) error {
	switch f.number {
	case 1:
		return f.integersInto(&a.Streams)
	case 2:
		return f.integersInto(&a.Bytes)
	}
	return nil
}

func (a *StreamAbort) append(b []byte) []byte {
	return appendIntegers(appendIntegers(b, 1, a.Streams), 2, a.Bytes)
}

func (a *StreamAbort) check() error { return checkStreams(a.Streams, a.Bytes) }

func (c *StreamCredit) set(f field) error {
	switch f.number {
	case 1:
		return integerInto(f, &c.Initial)
	case 2:
		return f.integersInto(&c.Streams)
	case 3:
		return f.integersInto(&c.Limits)
	}
	return nil
}

func (c *StreamCredit) append(b []byte) []byte {
	return appendIntegers(appendIntegers(appendInteger(b, 1, c.Initial), 2, c.Streams), 3, c.Limits)
}

func (c *StreamCredit) check() error { return checkStreams(c.Streams, c.Limits) }

func checkStreams(streams, offsets []uint64) error {
	if len(streams) != len(offsets) || len(streams) > MaxStreams {
		return fmt.Errorf("a message with %d streams and %d numbers of bytes", len(streams), len(offsets))
	}
	return nil
}

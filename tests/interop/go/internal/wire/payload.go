package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
)

// The payload contexts: the first integer of a DATAGRAM frame's data.
const (
	ContextIP             = 0  // an IP packet with complete checksums
	ContextPartialIP      = 1  // an IP packet with a partial TCP or UDP checksum
	ContextKnown          = 2  // a datagram of a flow that both ends know
	ContextOpenData       = 3  // a datagram that opens its flow
	ContextOpen           = 4  // opens a flow without a datagram
	ContextConfirmed      = 5  // the sender knows the flow that the receiver opened
	ContextRefused        = 6  // the sender does not take the flow
	ContextUnknown        = 7  // a datagram came for a flow that the sender does not know
	ContextClosed         = 8  // the sender has forgotten the flow
	ContextPiece          = 10 // a piece of a datagram
	ContextReport         = 11 // what arrived on a lane
	ContextNumbered       = 12 // a payload that is repaired if it is lost; its Body is another payload
	ContextRepair         = 13 // a repair symbol
	ContextAsk            = 14 // asks for missing payloads; its Body are requests
	ContextOpenDataClient = 15 // as context 3, and says whose flow it is
	ContextOpenClient     = 16 // as context 4, likewise
	ContextCopied         = 17 // a payload that travels on two lines; its Body is another payload
)

// Reasons of a refusal.
const (
	RefusedService  = 1 // no such service, or not for UDP
	RefusedAllowed  = 2 // not allowed
	RefusedLimit    = 3 // a limit is reached; temporary
	RefusedUpstream = 4 // the upstream's socket could not be opened; temporary
)

// Limits of pieces.
const (
	MaxDatagram = 65507 // the longest UDP datagram
	MinPiece    = 1024  // the least length of every piece but the last
	maxPieceID  = 1 << 30
	maxService  = 1<<32 - 1
)

// Sizes of what is repaired.
const (
	RequestBytes = 7       // one request for missing payloads
	maxStream    = 1 << 14 // streams of numbers are below
)

// ErrUnknownContext says that a payload has a reserved context, or one of a later version.
var ErrUnknownContext = errors.New("unknown payload context")

// ErrMalformed says that a payload does not parse.
var ErrMalformed = errors.New("malformed payload")

// Payload is the data of a DATAGRAM frame. Fields that its context does not have are zero.
type Payload struct {
	Context  uint64
	Flow     uint64
	Service  uint64 // contexts 3, 4, 15 and 16
	Client   []byte // contexts 15 and 16: a slice of the parsed bytes, of the family and the addresses
	Reason   uint64 // context 6
	Datagram uint64 // context 10, as the next two
	Total    uint64
	Offset   uint64
	Highest  uint64 // context 11, as the next four
	Time     uint64
	Packets  uint64
	Bytes    uint64
	Marked   uint64
	Stream   uint64  // contexts 12 to 14
	Number   uint32  // contexts 12 and 17
	Distance uint16  // context 12
	Series   uint32  // context 17
	Symbol   [8]byte // context 13: its Repair FEC Payload ID (RFC 8681, section 4.1.3)
	Body     []byte  // a slice of the parsed bytes; contexts 0 to 3, 10 and 12 to 14 and 17
}

// fields returns the fields of p's context in their order, and whether a body follows.
func (p *Payload) fields() (fields [5]*uint64, count int, body bool, ok bool) {
	switch p.Context {
	case ContextIP, ContextPartialIP, ContextCopied:
		return fields, 0, true, true
	case ContextKnown:
		return [5]*uint64{&p.Flow}, 1, true, true
	case ContextOpenData, ContextOpenDataClient:
		return [5]*uint64{&p.Flow, &p.Service}, 2, true, true
	case ContextOpen, ContextOpenClient:
		return [5]*uint64{&p.Flow, &p.Service}, 2, false, true
	case ContextConfirmed, ContextUnknown, ContextClosed:
		return [5]*uint64{&p.Flow}, 1, false, true
	case ContextRefused:
		return [5]*uint64{&p.Flow, &p.Reason}, 2, false, true
	case ContextPiece:
		return [5]*uint64{&p.Flow, &p.Datagram, &p.Total, &p.Offset}, 4, true, true
	case ContextReport:
		return [5]*uint64{&p.Highest, &p.Time, &p.Packets, &p.Bytes, &p.Marked}, 5, false, true
	case ContextNumbered, ContextRepair, ContextAsk:
		return [5]*uint64{&p.Stream}, 1, true, true
	default:
		return fields, 0, false, false
	}
}

// ParsePayload reads the data of a DATAGRAM frame. Body is a slice of b.
func ParsePayload(b []byte) (Payload, error) {
	context, n := Varint(b)
	if n == 0 {
		return Payload{}, ErrMalformed
	}
	b = b[n:]
	// The way of nearly all datagrams.
	if context == ContextKnown {
		flow, n := Varint(b)
		if n == 0 {
			return Payload{}, ErrMalformed
		}
		return Payload{Context: ContextKnown, Flow: flow, Body: b[n:]}, nil
	}
	p := Payload{Context: context}
	fields, count, body, ok := p.fields()
	if !ok {
		return Payload{}, ErrUnknownContext
	}
	for _, field := range fields[:count] {
		value, n := Varint(b)
		if n == 0 {
			return Payload{}, ErrMalformed
		}
		*field, b = value, b[n:]
	}
	if context == ContextOpenDataClient || context == ContextOpenClient {
		length := clientLength(b)
		if length == 0 {
			return Payload{}, ErrMalformed
		}
		p.Client, b = b[:length], b[length:]
	}
	if !body && len(b) > 0 || p.Service > maxService || p.Stream >= maxStream {
		return Payload{}, ErrMalformed
	}
	if context == ContextPiece && (p.Datagram >= maxPieceID || p.Total > MaxDatagram || p.Offset >= p.Total) {
		return Payload{}, ErrMalformed
	}
	switch context {
	case ContextNumbered:
		if len(b) < 6 {
			return Payload{}, ErrMalformed
		}
		p.Number, p.Distance = binary.BigEndian.Uint32(b), binary.BigEndian.Uint16(b[4:])
		b = b[6:]
	case ContextRepair:
		if len(b) < len(p.Symbol) {
			return Payload{}, ErrMalformed
		}
		b = b[copy(p.Symbol[:], b):]
	case ContextCopied:
		if len(b) < 8 {
			return Payload{}, ErrMalformed
		}
		p.Series, p.Number = binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])
		b = b[8:]
	case ContextAsk:
		if len(b) == 0 || len(b)%RequestBytes != 0 {
			return Payload{}, ErrMalformed
		}
	}
	if body {
		p.Body = b
	}
	return p, nil
}

// clientLength returns the length of a client's addresses at the beginning of b: 4 or 6 for the family, source and
// destination, and their ports. It is 0 if they do not parse.
func clientLength(b []byte) int {
	switch {
	case len(b) >= 13 && b[0] == 4:
		return 13
	case len(b) >= 37 && b[0] == 6 && !(isMapped(b[1:17]) && isMapped(b[17:33])):
		return 37
	}
	return 0
}

// isMapped says whether an IPv6 address is one of IPv4 (RFC 4291, section 2.5.5.2).
func isMapped(ip []byte) bool {
	return bytes.Equal(ip[:12], []byte{10: 0xff, 11: 0xff})
}

// CheckPiece says whether a piece has a length and an end that its datagram allows.
func (p *Payload) CheckPiece() error {
	length := uint64(len(p.Body))
	if length == 0 || p.Offset+length > p.Total || length < MinPiece && p.Offset+length != p.Total {
		return ErrMalformed
	}
	return nil
}

// AppendHeader appends the context and the fields of p.
func (p *Payload) AppendHeader(b []byte) []byte {
	b = AppendVarint(b, p.Context)
	fields, count, _, _ := p.fields()
	for _, field := range fields[:count] {
		b = AppendVarint(b, *field)
	}
	switch p.Context {
	case ContextNumbered:
		b = binary.BigEndian.AppendUint32(b, p.Number)
		b = binary.BigEndian.AppendUint16(b, p.Distance)
	case ContextRepair:
		b = append(b, p.Symbol[:]...)
	case ContextOpenDataClient, ContextOpenClient:
		b = append(b, p.Client...)
	case ContextCopied:
		b = binary.BigEndian.AppendUint32(b, p.Series)
		b = binary.BigEndian.AppendUint32(b, p.Number)
	}
	return b
}

// Append appends p as the data of a DATAGRAM frame.
func (p *Payload) Append(b []byte) []byte {
	return append(p.AppendHeader(b), p.Body...)
}

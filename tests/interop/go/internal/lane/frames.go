package lane

import (
	"encoding/binary"

	"culvert.example/culvert/internal/wire"
)

// The frames of lanes.
const (
	framePadding      = 0x00
	framePing         = 0x01
	frameACK          = 0x02
	frameACKECN       = 0x03
	frameChallenge    = 0x1a
	frameResponse     = 0x1b
	frameDatagram     = 0x30
	frameDatagramLong = 0x31
)

// Range is a run of packet numbers, both ends included.
type Range struct{ First, Last uint64 }

// ACK is one ACK frame; its ranges are Frames.Ranges[Start:End], from the highest down.
type ACK struct {
	Delay      uint64
	Start, End int
}

// Frames is the content of a packet, in slices that are used again for the next one.
type Frames struct {
	Ping       bool
	Eliciting  bool
	ACKs       []ACK
	Ranges     []Range
	Challenges [][8]byte
	Responses  [][8]byte
	Datagrams  [][]byte
}

// Parse reads all frames of a packet; datagrams are slices of b. An error is a [Violation].
func (f *Frames) Parse(b []byte) error {
	*f = Frames{
		ACKs: f.ACKs[:0], Ranges: f.Ranges[:0],
		Challenges: f.Challenges[:0], Responses: f.Responses[:0], Datagrams: f.Datagrams[:0],
	}
	if len(b) == 0 {
		return Violation("a packet without frames")
	}
	for len(b) > 0 {
		kind := b[0]
		b = b[1:]
		switch kind {
		case framePadding:
			continue
		case framePing:
			f.Ping = true
		case frameACK, frameACKECN:
			rest, ok := f.ack(b, kind == frameACKECN)
			if !ok {
				return Violation("an ACK that is cut short or goes below 0")
			}
			b = rest
			continue
		case frameChallenge, frameResponse:
			if len(b) < 8 {
				return Violation("a path frame that is cut short")
			}
			if kind == frameChallenge {
				f.Challenges = append(f.Challenges, [8]byte(b))
			} else {
				f.Responses = append(f.Responses, [8]byte(b))
			}
			b = b[8:]
		case frameDatagram:
			f.Datagrams, b = append(f.Datagrams, b), nil
		case frameDatagramLong:
			length, n := wire.Varint(b)
			if n == 0 || length > uint64(len(b)-n) {
				return Violation("a DATAGRAM that is cut short")
			}
			f.Datagrams, b = append(f.Datagrams, b[n:n+int(length)]), b[n+int(length):]
		default:
			return Violation("a frame of an unknown type, or a type in a longer form")
		}
		f.Eliciting = true
	}
	return nil
}

func (f *Frames) ack(b []byte, ecn bool) (rest []byte, ok bool) {
	var fields [4]uint64
	for i := range fields {
		v, n := wire.Varint(b)
		if n == 0 {
			return nil, false
		}
		fields[i], b = v, b[n:]
	}
	largest, delay, count, first := fields[0], fields[1], fields[2], fields[3]
	if first > largest {
		return nil, false
	}
	ack := ACK{Delay: delay, Start: len(f.Ranges)}
	low := largest - first
	f.Ranges = append(f.Ranges, Range{low, largest})
	for ; count > 0; count-- {
		gap, n := wire.Varint(b)
		if n == 0 {
			return nil, false
		}
		length, m := wire.Varint(b[n:])
		if m == 0 || gap+2 > low || length > low-gap-2 {
			return nil, false
		}
		b = b[n+m:]
		high := low - gap - 2
		low = high - length
		f.Ranges = append(f.Ranges, Range{low, high})
	}
	if ecn {
		for range 3 {
			_, n := wire.Varint(b)
			if n == 0 {
				return nil, false
			}
			b = b[n:]
		}
	}
	ack.End = len(f.Ranges)
	f.ACKs = append(f.ACKs, ack)
	return b, true
}

// AppendACK appends an ACK frame of ranges, from the highest down; delay is in units of 8 microseconds.
func AppendACK(b []byte, ranges []Range, delay uint64) []byte {
	b = append(b, frameACK)
	b = wire.AppendVarint(b, ranges[0].Last)
	b = wire.AppendVarint(b, delay)
	b = wire.AppendVarint(b, uint64(len(ranges)-1))
	b = wire.AppendVarint(b, ranges[0].Last-ranges[0].First)
	for i, r := range ranges[1:] {
		b = wire.AppendVarint(b, ranges[i].First-r.Last-2)
		b = wire.AppendVarint(b, r.Last-r.First)
	}
	return b
}

// AppendDatagram appends a DATAGRAM frame with length.
func AppendDatagram(b []byte, header, body []byte) []byte {
	b = append(b, frameDatagramLong)
	b = wire.AppendVarint(b, uint64(len(header)+len(body)))
	return append(append(b, header...), body...)
}

// datagramLen is the length of such a frame.
func datagramLen(payload int) int { return 1 + wire.VarintLen(uint64(payload)) + payload }

// appendPath appends a PATH_CHALLENGE or a PATH_RESPONSE.
func appendPath(b []byte, kind byte, data [8]byte) []byte {
	return binary.BigEndian.AppendUint64(append(b, kind), binary.BigEndian.Uint64(data[:]))
}

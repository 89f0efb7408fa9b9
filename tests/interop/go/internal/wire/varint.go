// Package wire has the messages and payloads that two agents exchange, as bytes: QUIC's variable-length integers, the
// control messages of docs/culvert.proto, and the payload contexts of docs/wire-format.md.
//
// Parsers never panic, keep slices of their input instead of copies where that is said, and allocate in proportion to
// the input at most.
package wire

import (
	"encoding/binary"
	"errors"
)

// MaxVarint is the largest variable-length integer.
const MaxVarint = 1<<62 - 1

// ErrTruncated says that the bytes end within a field.
var ErrTruncated = errors.New("the bytes end within a field")

// AppendVarint appends v in its shortest form (RFC 9000 section 16). It panics if v is above [MaxVarint].
func AppendVarint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<6:
		return append(b, byte(v))
	case v < 1<<14:
		return binary.BigEndian.AppendUint16(b, uint16(v)|0x4000)
	case v < 1<<30:
		return binary.BigEndian.AppendUint32(b, uint32(v)|0x8000_0000)
	case v <= MaxVarint:
		return binary.BigEndian.AppendUint64(b, v|0xc000_0000_0000_0000)
	default:
		panic("wire: integer of more than 62 bits")
	}
}

// VarintLen returns the length of v's shortest form.
func VarintLen(v uint64) int {
	switch {
	case v < 1<<6:
		return 1
	case v < 1<<14:
		return 2
	case v < 1<<30:
		return 4
	default:
		return 8
	}
}

// Varint reads an integer of any form from the start of b and returns its length; 0 if b is too short.
func Varint(b []byte) (v uint64, n int) {
	if len(b) == 0 {
		return 0, 0
	}
	switch n = 1 << (b[0] >> 6); {
	case len(b) < n:
		return 0, 0
	case n == 1:
		return uint64(b[0] & 0x3f), 1
	case n == 2:
		return uint64(binary.BigEndian.Uint16(b) & 0x3fff), 2
	case n == 4:
		return uint64(binary.BigEndian.Uint32(b) & 0x3fff_ffff), 4
	default:
		return binary.BigEndian.Uint64(b) & MaxVarint, 8
	}
}

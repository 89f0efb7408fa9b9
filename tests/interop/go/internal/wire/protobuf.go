package wire

import (
	"encoding/binary"
	"errors"
	"unicode/utf8"
)

// Protobuf's wire types.
const (
	typeVarint = 0
	type64     = 1
	typeBytes  = 2
	typeGroup  = 3
	typeEnd    = 4
	type32     = 5
)

var errProtobuf = errors.New("not a protobuf message")

// field is one field of a protobuf message: an integer, or bytes.
type field struct {
	number  int
	kind    byte
	integer uint64
	bytes   []byte
}

// integerInto stores the field's integer.
func integerInto[T ~uint32 | ~uint64](f field, into *T) error {
	if f.kind != typeVarint {
		return errProtobuf
	}
	*into = T(f.integer)
	return nil
}

func (f field) boolInto(into *bool) error {
	if f.kind != typeVarint {
		return errProtobuf
	}
	*into = f.integer != 0
	return nil
}

// integersInto appends the field's integer, or the integers that it packs.
func (f field) integersInto(into *[]uint64) error {
	if f.kind == typeVarint {
		*into = append(*into, f.integer)
		return nil
	}
	if f.kind != typeBytes {
		return errProtobuf
	}
	for b := f.bytes; len(b) > 0; {
		v, n := binary.Uvarint(b)
		if n <= 0 {
			return errProtobuf
		}
		*into, b = append(*into, v), b[n:]
	}
	return nil
}

func (f field) bytesInto(into *[]byte) error {
	if f.kind != typeBytes {
		return errProtobuf
	}
	*into = f.bytes
	return nil
}

func (f field) stringInto(into *string) error {
	if f.kind != typeBytes || !utf8.Valid(f.bytes) {
		return errProtobuf
	}
	*into = string(f.bytes)
	return nil
}

// eachField calls do for each field of a message. A group, which no message of ours has, is a field without content.
func eachField(b []byte, do func(field) error) error {
	for len(b) > 0 {
		f, rest, err := nextField(b, 0)
		if err != nil {
			return err
		}
		if err := do(f); err != nil {
			return err
		}
		b = rest
	}
	return nil
}

// maxGroups bounds the nesting of groups.
const maxGroups = 100

func nextField(b []byte, depth int) (field, []byte, error) {
	tag, n := binary.Uvarint(b)
	if n <= 0 || tag>>3 == 0 || tag > 1<<32-1 {
		return field{}, nil, errProtobuf
	}
	f, b := field{number: int(tag >> 3), kind: byte(tag & 7)}, b[n:]
	switch f.kind {
	case typeVarint:
		f.integer, n = binary.Uvarint(b)
		if n <= 0 {
			return field{}, nil, errProtobuf
		}
		return f, b[n:], nil
	case type64, type32:
		size := 8
		if f.kind == type32 {
			size = 4
		}
		if len(b) < size {
			return field{}, nil, errProtobuf
		}
		return f, b[size:], nil
	case typeBytes:
		length, n := binary.Uvarint(b)
		if n <= 0 || length > uint64(len(b)-n) {
			return field{}, nil, errProtobuf
		}
		b = b[n:]
		f.bytes = b[:length]
		return f, b[length:], nil
	case typeGroup:
		if depth == maxGroups {
			return field{}, nil, errProtobuf
		}
		for {
			inner, rest, err := nextField(b, depth+1)
			if err != nil {
				return field{}, nil, err
			}
			b = rest
			if inner.kind == typeEnd {
				if inner.number != f.number {
					return field{}, nil, errProtobuf
				}
				return f, b, nil
			}
		}
	case typeEnd:
		if depth == 0 {
			return field{}, nil, errProtobuf
		}
		return f, b, nil
	default:
		return field{}, nil, errProtobuf
	}
}

func appendTag(b []byte, number int, kind byte) []byte {
	return binary.AppendUvarint(b, uint64(number)<<3|uint64(kind))
}

// appendInteger appends an integer, unless it is the default.
func appendInteger(b []byte, number int, v uint64) []byte {
	if v == 0 {
		return b
	}
	return binary.AppendUvarint(appendTag(b, number, typeVarint), v)
}

// appendIntegers appends integers, packed, unless there are none.
func appendIntegers(b []byte, number int, all []uint64) []byte {
	var packed []byte
	for _, v := range all {
		packed = binary.AppendUvarint(packed, v)
	}
	return appendBytes(b, number, packed)
}

func appendBool(b []byte, number int, v bool) []byte {
	if !v {
		return b
	}
	return appendInteger(b, number, 1)
}

// appendBytes appends bytes or a string, unless they are the default.
func appendBytes[T ~[]byte | ~string](b []byte, number int, v T) []byte {
	if len(v) == 0 {
		return b
	}
	return appendMessage(b, number, v)
}

// appendMessage appends the field even if it is empty, as an inner message is.
func appendMessage[T ~[]byte | ~string](b []byte, number int, v T) []byte {
	b = binary.AppendUvarint(appendTag(b, number, typeBytes), uint64(len(v)))
	return append(b, v...)
}

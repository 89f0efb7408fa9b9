// Package label derives keys as TLS 1.3 and QUIC do.
package label

import (
	"crypto/hkdf"
	"encoding/binary"
	"hash"
)

// Expand is HKDF-Expand-Label of TLS 1.3 (RFC 8446 section 7.1) with an empty context.
func Expand(h func() hash.Hash, secret []byte, label string, length int) []byte {
	info := binary.BigEndian.AppendUint16(nil, uint16(length))
	info = append(info, byte(len("tls13 ")+len(label)))
	info = append(append(info, "tls13 "+label...), 0)
	return Must(hkdf.Expand(h, secret, string(info), length))
}

// Must is for calls that only fail for keys of a wrong length.
func Must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

package knock

import (
	"crypto/ed25519"
	"io"
	"slices"

	"culvert.example/culvert/internal/wire"
)

// What no dialler makes, for the cases of tests/virtual/conformance.

// SealPayloadForTest makes a knock with any payload.
func SealPayloadForTest(random io.Reader, key ed25519.PrivateKey, listener PublicKey, dcid []byte, seconds uint64, payload []byte) ([]byte, error) {
	return sealPayload(random, key, listener, dcid, seconds, payload)
}

// MACForTest gives a changed knock the mac1 that fits it.
func MACForTest(listener PublicKey, dcid, token []byte, seconds uint64) []byte {
	return append(slices.Clone(token[:noiseLen]), mac(listener, dcid, token[:noiseLen], seconds/epochSeconds)...)
}

// InitialForTest makes an Initial packet of any frames.
func InitialForTest(dcid, scid, token []byte, number uint32, numberLen int, frames []byte) []byte {
	packet := append([]byte{0, 0, 0, 0, version1}, byte(len(dcid)))
	packet = append(append(packet, dcid...), byte(len(scid)))
	packet = append(append(packet, scid...), 0)
	p := Initial{DCID: dcid, SCID: scid, packet: packet}
	o := Opened{Number: number, numberLen: numberLen, first: 0xc0 | byte(numberLen-1), Frames: frames}
	return ClientKeys(dcid).Reseal(p, o, token, wire.MaxPacket)
}

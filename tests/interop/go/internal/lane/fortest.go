package lane

// What no agent sends, for the cases of tests/virtual/conformance.

// SealForTest makes a packet as [Sealer] never does: with a number of 1 to 4 bytes, and with more bits in the first
// byte.
func SealForTest(suite Suite, secret []byte, id [8]byte, number uint64, length int, bits byte, frames []byte) []byte {
	packet := append([]byte{0x40 | bits | byte(length-1)}, id[:]...)
	for i := range length {
		packet = append(packet, byte(number>>(8*(length-1-i))))
	}
	key := suite.packetKey(secret)
	packet = key.aead.Seal(packet, key.forNumber(number), frames, packet)
	mask := suite.headerKey(secret).maskOf(packet[sampleAt : sampleAt+16])
	packet[0] ^= mask[0] & 0x1f
	for i := range length {
		packet[numberAt+i] ^= mask[1+i]
	}
	return packet
}

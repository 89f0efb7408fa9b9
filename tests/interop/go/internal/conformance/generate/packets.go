package main

import (
	"bytes"
	"crypto/tls"
	"fmt"

	"culvert.example/culvert/internal/conformance"
	"culvert.example/culvert/internal/label"
	"culvert.example/culvert/internal/lane"
)

const (
	laneID    = "0102030405060708"
	violation = "violation"
	refused   = "refused"
)

// suites are those of TLS 1.3, with secrets that count up.
var suites = []uint16{tls.TLS_AES_128_GCM_SHA256, tls.TLS_AES_256_GCM_SHA384, tls.TLS_CHACHA20_POLY1305_SHA256}

func secret(suite uint16) []byte {
	s, err := lane.NewSuite(suite)
	if err != nil {
		panic(err)
	}
	b := make([]byte, s.SecretLen())
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

func sealer(suite uint16) *lane.Sealer {
	s, err := lane.NewSuite(suite)
	if err != nil {
		panic(err)
	}
	return lane.NewSealer(s, secret(suite), [8]byte(conformance.Bytes(laneID)))
}

// sealed is a packet with a number and frames.
func sealed(s *lane.Sealer, number uint64, frames string) string {
	s.Next = number
	packet := append(s.Start(make([]byte, 0, 2048)), conformance.Bytes(x(frames))...)
	return h(s.Seal(packet))
}

func setup(suite uint16, more fields) fields {
	input := fields{"suite": fmt.Sprintf("%04x", suite), "secret": h(secret(suite)), "id": laneID}
	for key, value := range more {
		input[key] = value
	}
	return input
}

const aes128 = tls.TLS_AES_128_GCM_SHA256

// frames are the contents of packets with number 0, at a receiver that has sent packets 0 to 9, or more where ACKs name
// many ranges of them.
func frames() cases {
	var out cases
	sent := 10
	add := func(name, content, verdict string, output fields) {
		out = append(out, conformance.Case{
			Name: name, Kind: "frames", Input: setup(aes128, fields{"sent": fmt.Sprint(sent), "frames": x(content), "packet": sealed(sealer(aes128), 0, content)}),
			Verdict: verdict, Output: output,
		})
	}
	ok := func(name, content string, output fields) { add(name, content, accept, output) }
	bad := func(name, content string) { add(name, content, violation, nil) }
	ok("PADDING", n(0, 20), nil)
	ok("one PADDING", "00", nil)
	ok("PING", "01", nil)
	ok("DATAGRAM to the end", "30 0202 776f726c6421", fields{"datagrams": "0202776f726c6421"})
	ok("DATAGRAM with length", "31 08 030201 68656c6c6f", fields{"datagrams": "03020168656c6c6f"})
	ok("the example of the document: two DATAGRAMs", "31 08 030201 68656c6c6f 30 0202 776f726c6421", fields{"datagrams": "03020168656c6c6f 0202776f726c6421"})
	ok("DATAGRAM and PADDING", "31 03 020261 0000", fields{"datagrams": "020261"})
	ok("DATAGRAM with a length in a longer form", "31 4003 020261", fields{"datagrams": "020261"})
	ok("DATAGRAMs of all places", "01 31 01 61 00 31 02 6262 30 63", fields{"datagrams": "61 6262 63"})
	ok("PATH_CHALLENGE", "1a 0011223344556677"+n(0, 100), fields{"challenge": "0011223344556677"})
	ok("PATH_RESPONSE", "1b 0011223344556677", fields{"response": "0011223344556677"})
	ok("PATH_CHALLENGE, PATH_RESPONSE and ACK", "1a 0011223344556677 1b 8899aabbccddeeff 02 09 00 00 09", fields{"challenge": "0011223344556677", "response": "8899aabbccddeeff"})
	ok("ACK of packet 0", "02 00 00 00 00", nil)
	ok("ACK of all", "02 09 00 00 09", nil)
	ok("ACK with a delay", "02 09 4400 00 00", nil)
	ok("ACK of 9, 7, and 3 to 5", "02 09 00 02 00 00 00 00 02", nil)
	ok("ACK of 9, and 0 to 7", "02 09 00 01 00 00 07", nil)
	ok("ACK with ECN counts", "03 09 00 00 09 01 02 03", nil)
	ok("ACK with fields in longer forms", "02 4009 4000 4000 4009", nil)
	ok("two ACKs", "02 04 00 00 04 02 09 00 00 09", nil)
	bad("no frame", "")
	bad("ACK of a packet that was never sent", "02 0a 00 00 00")
	bad("ACK whose first range goes below 0", "02 05 00 00 06")
	bad("ACK with a gap below 0", "02 05 00 01 04 00 00")
	bad("ACK with a range below 0", "02 09 00 01 00 00 08")
	bad("ACK that is cut short", "02 09 00 00")
	bad("ACK with a range that is cut short", "02 09 00 01 00 00")
	bad("ACK with fewer ranges than it says", "02 09 00 4100 00 00 00")
	bad("ACK with ECN counts that are cut short", "03 09 00 00 09 01 02")
	bad("PATH_CHALLENGE that is cut short", "1a 00112233445566")
	bad("PATH_RESPONSE that is cut short", "1b 00112233445566")
	bad("DATAGRAM longer than the packet", "31 04 020261")
	bad("DATAGRAM without its length", "31")
	bad("DATAGRAM whose length is cut short", "31 40")
	for _, other := range []struct{ name, bytes string }{
		{"RESET_STREAM", "04 00 00 00"}, {"CRYPTO", "06 00 01 61"}, {"NEW_TOKEN", "07 01 61"}, {"STREAM", "0a 00 01 61"}, {"MAX_DATA", "10 00"},
		{"NEW_CONNECTION_ID", "18 00 00 01 61" + n(0, 16)}, {"CONNECTION_CLOSE", "1c 00 00 00"}, {"HANDSHAKE_DONE", "1e"}, {"an unknown type", "2f"},
		{"a type of two bytes", "4040"}, {"PING in a longer form", "4001"}, {"DATAGRAM in a longer form", "4030 61"},
	} {
		bad(other.name, other.bytes)
	}
	bad("a violation behind a DATAGRAM", "31 01 61 2f")
	sent = 600
	ok("ACK of 256 ranges", h(lane.AppendACK(nil, alternate(598, 256), 0)), nil)
	ok("ACK of 300 ranges", h(lane.AppendACK(nil, alternate(598, 300), 0)), nil)
	ok("ACK of 256 ranges, down to 0", "02 41fe 00 40ff 00"+n(0, 2*255), nil)
	bad("ACK of 257 ranges, the lowest below 0", "02 41fe 00 4100 00"+n(0, 2*256))
	bad("ACK of 256 ranges, the highest never sent", h(lane.AppendACK(nil, alternate(600, 256), 0)))
	return out
}

// alternate are so many ranges of every other number, from the highest down.
func alternate(highest uint64, count int) []lane.Range {
	ranges := make([]lane.Range, count)
	for i := range ranges {
		number := highest - 2*uint64(i)
		ranges[i] = lane.Range{First: number, Last: number}
	}
	return ranges
}

// packets are the protection of packets, their numbers and keys.
func packets() cases {
	var out cases
	for _, suite := range suites {
		name := tls.CipherSuiteName(suite)
		content := "31 08 030201 68656c6c6f 30 0202 776f726c6421"
		seal := func(name string, number uint64) {
			out = append(out, conformance.Case{
				Name: name, Kind: "seal", Input: setup(suite, fields{"number": fmt.Sprint(number), "frames": x(content)}),
				Verdict: accept, Output: fields{"packet": sealed(sealer(suite), number, content)},
			})
		}
		seal(name+": packet 0", 0)
		seal(name+": packet 300", 300)
		out = append(out, sequences(suite, name)...)
	}
	return out
}

func sequences(suite uint16, name string) cases {
	var out cases
	add := func(title string, steps ...conformance.Step) {
		out = append(out, conformance.Case{Name: name + ": " + title, Kind: "open", Input: setup(suite, nil), Steps: steps})
	}
	s := sealer(suite)
	packet := func(number uint64) string { return sealed(s, number, "30 61") }
	opens := func(number uint64, bytes string) conformance.Step {
		return conformance.Step{Bytes: bytes, Verdict: accept, Output: fields{"number": fmt.Sprint(number)}}
	}
	fails := func(verdict, bytes string) conformance.Step { return conformance.Step{Bytes: bytes, Verdict: verdict} }
	add("in order, and repeated", opens(0, packet(0)), opens(1, packet(1)), fails(refused, packet(0)), fails(refused, packet(1)))
	if suite != aes128 {
		add("damaged", fails(refused, flipped(packet(0), 20)), opens(0, packet(0)))
		return out
	}
	add("out of order", opens(5, packet(5)), opens(3, packet(3)), fails(refused, packet(5)), opens(4, packet(4)), fails(refused, packet(3)))
	// Each 400 numbers late, and each twice: what overtaking and copies make of a path.
	var scrambled []conformance.Step
	for number := uint64(400); number < 412; number++ {
		scrambled = append(scrambled, opens(number, packet(number)), opens(number-400, packet(number-400)),
			fails(refused, packet(number)), fails(refused, packet(number-400)))
	}
	add("overtaken by 400, and each twice", scrambled...)
	add("a gap as wide as the window", opens(16383, packet(16383)), opens(0, packet(0)), fails(refused, packet(0)))
	add("a gap wider than the window", opens(16384, packet(16384)), fails(refused, packet(0)), opens(1, packet(1)))
	add("numbers far apart", opens(0, packet(0)), opens(1<<20, packet(1<<20)), opens(1<<20+1<<30, packet(1<<20+1<<30)), fails(refused, packet(1<<20)))
	add("each part damaged", fails(refused, flipped(packet(0), 0)), fails(refused, flipped(packet(0), 1)), fails(refused, flipped(packet(0), 9)),
		fails(refused, flipped(packet(0), 13)), fails(refused, flipped(packet(0), 29)), opens(0, packet(0)))
	add("another connection ID", fails(refused, sealed(lane.NewSealer(label.Must(lane.NewSuite(suite)), secret(suite), [8]byte{9}), 0, "30 61")))
	add("another secret", fails(refused, sealed(lane.NewSealer(label.Must(lane.NewSuite(suite)), bytes.Repeat([]byte{7}, 32), [8]byte(conformance.Bytes(laneID))), 0, "30 61")))
	short := packet(0)
	add("too short", fails(refused, short[:56]), fails(refused, short[:2]), fails(refused, ""), opens(0, short))
	add("the shortest packet", opens(0, sealed(s, 0, "01")))
	add("a long header", fails(refused, flipped(packet(0), -1)), opens(0, packet(0)))
	for length := 1; length <= 3; length++ {
		add(fmt.Sprintf("a packet number of %d bytes", length), opens(0, packet(0)), opens(1, numbered(suite, 1, length, 0)), opens(2, numbered(suite, 2, length, 0)))
	}
	add("a packet number of 1 byte after 300", opens(300, packet(300)), opens(310, numbered(suite, 310, 1, 0)))
	add("reserved bits", fails(violation, numbered(suite, 0, 4, 0x08)))
	add("the other reserved bit", fails(violation, numbered(suite, 0, 4, 0x10)))
	add("the spin bit", opens(0, numbered(suite, 0, 4, 0x20)))
	updated := sealer(suite)
	updated.Update()
	again := sealer(suite)
	again.Update()
	again.Update()
	next := func(number uint64) string { return sealed(updated, number, "30 61") }
	add("a key update", opens(0, packet(0)), opens(1, next(1)), opens(2, next(2)))
	add("a key update, and packets of before", opens(0, packet(0)), opens(3, next(3)), opens(1, packet(1)), opens(2, packet(2)), opens(4, next(4)), fails(refused, packet(1)))
	add("a key update with reordering in the new phase", opens(0, packet(0)), opens(3, next(3)), opens(2, next(2)), opens(1, packet(1)))
	add("the key before, for a number after the update", opens(0, packet(0)), opens(1, next(1)), fails(refused, packet(2)), opens(3, next(3)))
	add("a key two phases on", opens(0, packet(0)), fails(refused, sealed(again, 1, "30 61")), opens(2, packet(2)))
	add("the key phase bit flipped", opens(0, packet(0)), fails(refused, flipped(packet(1), -2)), opens(1, packet(1)))
	return out
}

// flipped is a packet with one bit changed: the lowest of byte at, or the form bit (-1), or the key phase (-2), which
// header protection only covers.
func flipped(packet string, at int) string {
	b := conformance.Bytes(packet)
	switch at {
	case -1:
		b[0] ^= 0x80
	case -2:
		b[0] ^= 0x04
	default:
		b[at] ^= 1
	}
	return h(b)
}

// numbered is a packet whose number has so many bytes, with more bits in its first byte.
func numbered(suite uint16, number uint64, length int, bits byte) string {
	return h(lane.SealForTest(label.Must(lane.NewSuite(suite)), secret(suite), [8]byte(conformance.Bytes(laneID)), number, length, bits, conformance.Bytes("30616161")))
}

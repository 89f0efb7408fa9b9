package main

import (
	"fmt"

	"culvert.example/culvert/internal/conformance"
)

const (
	malformed = "malformed"
	unknown   = "unknown"
)

func payloads() cases {
	var out cases
	add := func(name, bytes, verdict string, output fields) {
		out = append(out, conformance.Case{Name: name, Kind: "payload", Input: fields{"bytes": x(bytes)}, Verdict: verdict, Output: output})
	}
	// A payload that is accepted: its header, the same in the shortest form, and what follows.
	longer := func(name, header, shortest, body string) {
		add(name, x(header, body), accept, fields{"header": x(shortest), "body": x(body)})
	}
	ok := func(name, header, body string) { longer(name, header, header, body) }
	ok("an IP packet", "00", "45000021000040004011 26b8 0a0900010a090002 12340035000d 9584 68656c6c6f")
	ok("an IP packet with a partial checksum", "01", "45000021000040004011 26b8 0a0900010a090002 12340035000d 1433 68656c6c6f")
	ok("an IP packet of no byte, for the reader of the packet", "00", "")
	ok("a datagram of flow 300", "02 412c", "68656c6c6f")
	ok("an empty datagram", "02 02", "")
	ok("a datagram of the last flow", "02 ffffffffffffffff", "61")
	ok("a datagram that opens flow 2 to service 1", "03 02 01", "68656c6c6f")
	ok("an empty datagram that opens its flow", "03 00 00", "")
	ok("an opening to the last service", "03 02 c0000000ffffffff", "61")
	ok("an opening without a datagram", "04 02 01", "")
	ok("confirmed", "05 02", "")
	for reason := 1; reason <= 4; reason++ {
		ok(fmt.Sprintf("refused, reason %d", reason), "06 02 "+fmt.Sprintf("%02x", reason), "")
	}
	ok("unknown", "07 02", "")
	ok("closed", "08 412c", "")
	ok("a piece, from byte 1234 of 3000", "0a 02 07 4bb8 44d2", n(0x61, 1024))
	ok("a piece with the largest fields", "0a ffffffffffffffff bfffffff 8000ffe3 8000ffe2", "61")
	ok("a report", "0b 80011170 804c4b40 8001113e 85f5e100 03", "")
	ok("a report about nothing", "0b 00 00 00 00 00", "")
	ok("a report with the largest fields", "0b"+n(0xff, 40), "")
	ok("a numbered payload", "0c 03 0000012c 0002", "020268656c6c6f")
	ok("a numbered payload of the last stream, the last number and the farthest distance", "0c 7fff ffffffff ffff", "04 02 01")
	ok("a numbered payload with nothing in it, for the reader of what is in it", "0c 00 00000000 0000", "")
	ok("a repair symbol", "0d 04 0001f00100000000", "00de00004a4a5471")
	ok("a repair symbol of no byte, for the decoder", "0d 00 abcdf04000000100", "")
	ok("a request for 300 and 301, for the second and last time", "0e 03", "0000012c000281")
	ok("two requests", "0e 00", "0000012c000200ffffffffffff7f")
	v6 := "20010db8000000000000000000000009 20010db8000000000000000000000001 1234 0035"
	mapped := "00000000000000000000ffffc0000209"
	ok("a datagram that opens flow 2 to service 1 for a client", "0f 02 01 04 c0000209 c6336402 1234 0035", "68656c6c6f")
	ok("the same over IPv6", "0f 02 01 06 "+v6, "68656c6c6f")
	ok("a client in the form of IPv6 beside an address of IPv6", "0f 02 01 06 "+mapped+v6[:32]+"1234 0035", "")
	ok("an opening without a datagram for a client", "10 02 01 04 c0000209 c6336402 1234 0035", "")
	ok("a payload that travels on two lines", "11 0a0b0c0d 0000012c", "0202 68656c6c6f")
	ok("a payload that travels on two lines, the last number of the last series", "11 ffffffff ffffffff", "00 45")
	ok("a payload that travels on two lines with nothing in it, for the reader of what is in it", "11 00000000 00000000", "")
	longer("a report in longer forms", "0b 4001 4002 4003 4004 4005", "0b 0102030405", "")
	longer("a stream in a longer form", "0c 4003 0000012c 0002", "0c 03 0000012c 0002", "00")
	longer("a context in a longer form", "4002 02", "02 02", "61")
	longer("fields in a longer form", "05 4002", "05 02", "")
	add("refused, a reason of a later version", "06 02 4100", accept, fields{"context": "6"})
	// Payloads that have no output, by name and bytes.
	none := func(verdict string, payloads [][2]string) {
		for _, payload := range payloads {
			add(payload[0], payload[1], verdict, nil)
		}
	}
	none(unknown, [][2]string{
		{"the reserved context 9", "09 01 02"}, {"context 63", "3f"}, {"context 1000", "43e8 aa"},
		{"the largest context", "ffffffffffffffff"},
	})
	none(malformed, [][2]string{
		{"no byte", ""}, {"a context that is cut short", "40"},
		{"a datagram without a flow", "02"}, {"a flow that is cut short", "02 41"},
		{"an opening without a service", "03 02"}, {"a service that is cut short", "03 02 80"},
		{"a service above 32 bits", "03 02 c000000100000000 61"}, {"an opening without a datagram, to a service above 32 bits", "04 02 c000000100000000"},
		{"an opening without a datagram, with bytes", "04 02 01 61"}, {"an opening without a datagram, without a service", "04 02"},
		{"confirmed, with a byte", "05 02 00"}, {"confirmed, without a flow", "05"},
		{"refused, without a reason", "06 02"}, {"refused, with a byte", "06 02 01 00"},
		{"unknown, with a byte", "07 02 61"}, {"unknown, without a flow", "07"},
		{"closed, with a byte", "08 02 61"}, {"closed, without a flow", "08"},
		{"a piece without an offset", "0a 02 07 4bb8"}, {"a piece whose offset is cut short", "0a 02 07 4bb8 44"},
		{"a piece of datagram 2^30", "0a 02 c000000040000000 4bb8 00 61"},
		{"a piece of nothing", "0a 02 07 00 00 61"}, {"a piece of more than a datagram", "0a 02 07 8000ffe4 00 61"},
		{"a piece that begins at the end", "0a 02 07 4bb8 4bb8 61"},
		{"a report without the marked", "0b 01 02 03 04"}, {"a report with a byte", "0b 01 02 03 04 05 00"}, {"a report of nothing", "0b"},
		{"a numbered payload without a stream", "0c"}, {"a numbered payload whose distance is cut short", "0c 03 0000012c 00"},
		{"a numbered payload of stream 2^14", "0c 80004000 0000012c 0002 00"},
		{"a repair symbol whose header is cut short", "0d 03 abcdf040000001"}, {"a repair symbol of stream 2^14", "0d 80004000 abcdf04000000100"},
		{"no request", "0e 03"}, {"a request that is cut short", "0e 03 0000012c0002"}, {"a request and a half", "0e 03 0000012c000281 0000012c"},
		{"an opening for a client without the client", "0f 02 01"}, {"an opening for a client of no family", "0f 02 01 05 c0000209 c6336402 1234 0035"},
		{"an opening for a client that is cut short", "10 02 01 06 " + v6[:61]}, {"an opening without a datagram, for a client, with a byte", "10 02 01 04 c0000209 c6336402 1234 0035 00"},
		{"a client of IPv4 in the form of IPv6", "0f 02 01 06 " + mapped + mapped + "1234 0035"},
		{"a request of stream 2^14", "0e 80004000 0000012c000281"},
		{"a payload that travels on two lines without a number", "11 0a0b0c0d"}, {"a payload that travels on two lines whose number is cut short", "11 0a0b0c0d 000001"},
	})
	return out
}

func piecesOf() cases {
	var out cases
	add := func(name string, steps ...conformance.Step) {
		out = append(out, conformance.Case{Name: name, Kind: "pieces", Steps: steps})
	}
	piece := func(datagram, total, offset, length int, fill byte) string {
		return x("0a02", quic(datagram), quic(total), quic(offset), n(fill, length))
	}
	waits := func(bytes string) conformance.Step { return conformance.Step{Bytes: bytes, Verdict: "none"} }
	bad := func(bytes string) conformance.Step { return conformance.Step{Bytes: bytes, Verdict: malformed} }
	whole := func(bytes, datagram string) conformance.Step {
		return conformance.Step{Bytes: bytes, Verdict: "complete", Output: fields{"datagram": datagram}}
	}
	add("the example of the document", waits(piece(7, 2500, 0, 1200, 'a')), waits(piece(7, 2500, 1200, 1200, 'a')), whole(piece(7, 2500, 2400, 100, 'a'), n('a', 2500)))
	add("the last piece first", waits(piece(7, 2500, 2400, 100, 'c')), waits(piece(7, 2500, 0, 1200, 'a')), whole(piece(7, 2500, 1200, 1200, 'b'), n('a', 1200)+n('b', 1200)+n('c', 100)))
	add("a datagram of one piece", whole(piece(7, 3, 0, 3, 'a'), n('a', 3)))
	add("two datagrams at a time", waits(piece(1, 1025, 0, 1024, 'a')), waits(piece(2, 1026, 0, 1024, 'b')), whole(piece(1, 1025, 1024, 1, 'c'), n('a', 1024)+"63"), whole(piece(2, 1026, 1024, 2, 'd'), n('b', 1024)+"6464"))
	add("a repeated piece is ignored", waits(piece(7, 1100, 0, 1024, 'a')), waits(piece(7, 1100, 0, 1024, 'a')), whole(piece(7, 1100, 1024, 76, 'b'), n('a', 1024)+n('b', 76)))
	add("pieces that overlap", waits(piece(7, 3000, 0, 1200, 'a')), bad(piece(7, 3000, 1100, 1200, 'a')), waits(piece(7, 3000, 1200, 1800, 'a')))
	add("a piece within another", waits(piece(7, 3000, 0, 1500, 'a')), bad(piece(7, 3000, 100, 1024, 'a')), waits(piece(7, 3000, 1500, 1500, 'a')))
	add("a piece around another", waits(piece(7, 5000, 1500, 1024, 'a')), bad(piece(7, 5000, 1000, 2000, 'a')))
	add("another length at the same place", waits(piece(7, 5000, 0, 1024, 'a')), bad(piece(7, 5000, 0, 1025, 'a')))
	add("another total", waits(piece(7, 3000, 0, 1500, 'a')), bad(piece(7, 3001, 1500, 1501, 'a')), waits(piece(7, 3000, 1500, 1500, 'a')))
	add("a short piece that is not the last", bad(piece(7, 3000, 0, 1023, 'a')), waits(piece(7, 3000, 0, 1500, 'a')), waits(piece(7, 3000, 1500, 1500, 'a')))
	add("the shortest piece that is not the last", waits(piece(7, 1025, 0, 1024, 'a')), whole(piece(7, 1025, 1024, 1, 'a'), n('a', 1025)))
	add("a piece beyond the end", bad(piece(7, 1500, 1000, 501, 'a')), waits(piece(7, 1500, 0, 1500, 'a')))
	add("a piece of no byte", bad(piece(7, 1500, 1400, 0, 'a')))
	add("a piece of a datagram that was delivered", whole(piece(7, 1500, 0, 1500, 'a'), n('a', 1500)), waits(piece(7, 1500, 0, 1500, 'a')))
	return out
}

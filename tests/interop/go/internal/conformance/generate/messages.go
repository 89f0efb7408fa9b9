package main

import (
	"fmt"
	"strings"

	"culvert.example/culvert/internal/conformance"
)

const (
	instance = "000102030405060708090a0b0c0d0e0f"
	accept   = "accept"
	ignore   = "ignore"
	close1   = "close 1"
	close2   = "close 2"
)

func varints() cases {
	var out cases
	add := func(name, bytes, verdict string, value uint64, shortest string) {
		c := conformance.Case{Name: name, Kind: "varint", Input: fields{"bytes": x(bytes)}, Verdict: verdict}
		if verdict == accept {
			c.Output = fields{"value": fmt.Sprint(value), "shortest": x(shortest)}
		}
		out = append(out, c)
	}
	add("zero", "00", accept, 0, "00")
	add("the largest of one byte", "3f", accept, 63, "3f")
	add("the least of two bytes", "4040", accept, 64, "4040")
	add("RFC 9000, two bytes", "7bbd", accept, 15293, "7bbd")
	add("RFC 9000, four bytes", "9d7f3e7d", accept, 494878333, "9d7f3e7d")
	add("RFC 9000, eight bytes", "c2197c5eff14e88c", accept, 151288809941952652, "c2197c5eff14e88c")
	add("the largest", "ffffffffffffffff", accept, 1<<62-1, "ffffffffffffffff")
	add("a longer form than necessary", "4025", accept, 37, "25")
	add("zero in eight bytes", "c000000000000000", accept, 0, "00")
	add("no byte", "", "truncated", 0, "")
	add("half of two bytes", "40", "truncated", 0, "")
	add("seven of eight bytes", "c0000000000000", "truncated", 0, "")
	return out
}

// hello is the smallest hello of the document, without its Envelope.
func hello(more ...string) string {
	return x(append([]string{num(1, 1), str(2, instance), num(4, 1), num(6, 1200)}, more...)...)
}

func service(number uint64, name string, more ...string) string {
	inner := text(2, name)
	if number > 0 {
		inner = num(1, number) + inner
	}
	return str(7, x(append([]string{inner}, more...)...))
}

func messages() cases {
	var out cases
	// A message that is accepted has the kind `kind`, and is written as `again`, or as it came.
	add := func(name, envelope, verdict, kind, again string) {
		c := conformance.Case{Name: name, Kind: "envelope", Input: fields{"bytes": x(envelope)}, Verdict: verdict}
		if verdict == accept {
			c.Output = fields{"kind": kind}
			switch again {
			case "same":
				c.Output["bytes"] = framed(x(envelope))
			case "":
			default:
				c.Output["bytes"] = framed(again)
			}
		}
		out = append(out, c)
	}
	ok := func(name, envelope, kind string) { add(name, envelope, accept, kind, "same") }
	bad := func(name, envelope string) { add(name, envelope, close1, "", "") }

	ok("the smallest hello", str(1, hello()), "hello")
	ok("a hello with everything", str(1, x(num(1, 1), str(2, instance), text(3, "culvert/0.1.0"), num(4, 256), num(5, 64), num(6, 65527),
		service(0, "dns", num(3, 1), num(5, 10000)), service(41, "web", num(4, 1), num(5, 60000)), service(4294967295, "both", num(3, 1), num(4, 1), num(5, 1), num(6, 1)),
		num(8, 127), str(9, n(0xab, 64)), str(10, n(1, 16)), str(10, n(2, 16)))), "hello")
	ok("a hello with feature bits of later versions", str(1, hello(num(8, 1<<63|1<<20))), "hello")
	add("a hello with an unknown field", str(1, hello(str(1000, "c0ffee"))), accept, "hello", str(1, hello()))
	add("a hello with an unknown group", str(1, hello(uvarint(100<<3|3), num(1, 5), uvarint(100<<3|4))), accept, "hello", str(1, hello()))
	add("a hello with unknown fixed-size fields", str(1, hello(uvarint(100<<3|1), n(1, 8), uvarint(101<<3|5), n(2, 4))), accept, "hello", str(1, hello()))
	add("fields in another order", str(1, x(num(6, 1200), num(4, 1), str(2, instance), num(1, 1))), accept, "hello", str(1, hello()))
	add("a field that is repeated: the last one counts", str(1, hello(num(4, 2))), accept, "hello", str(1, x(num(1, 1), str(2, instance), num(4, 2), num(6, 1200))))
	add("a hello in two parts, which protobuf merges", str(1, x(num(1, 1), str(2, instance)))+str(1, x(num(4, 1), num(6, 1200))), accept, "hello", str(1, hello()))
	add("defaults that are written", str(1, hello(num(5, 0), str(3, ""), num(8, 0))), accept, "hello", str(1, hello()))
	add("an integer in a longer form", str(1, x("0881 00", str(2, instance), num(4, 1), num(6, 1200))), accept, "hello", str(1, hello()))

	add("version 2", str(1, x(num(1, 2), str(2, instance), num(4, 1), num(6, 1200))), close2, "", "")
	add("version 2, with fields that this version does not allow", str(1, num(1, 2)), close2, "", "")
	add("no version", str(1, x(str(2, instance), num(4, 1), num(6, 1200))), close2, "", "")
	part := func(name string, parts ...string) {
		bad(name, str(1, x(append([]string{num(1, 1)}, parts...)...)))
	}
	id, workers, packet := str(2, instance), num(4, 1), num(6, 1200)
	part("no instance", workers, packet)
	part("an instance of 15 bytes", str(2, n(1, 15)), workers, packet)
	part("an instance of 17 bytes", str(2, n(1, 17)), workers, packet)
	part("no workers", id, packet)
	part("257 workers", id, num(4, 257), packet)
	part("65 lanes", id, workers, num(5, 65), packet)
	part("packets of 1199 bytes", id, workers, num(6, 1199))
	part("packets of 65528 bytes", id, workers, num(6, 65528))
	part("no size of packets", id, workers)
	ok("software of 64 bytes", str(1, x(num(1, 1), id, text(3, string(make64('s'))), workers, packet)), "hello")
	part("software of 65 bytes", id, text(3, string(make64('s'))+"s"), workers, packet)
	part("software with a line feed", id, text(3, "a\nb"), workers, packet)
	part("software with a control character of two bytes", id, str(3, "c285"), workers, packet)
	part("software that is not UTF-8", id, str(3, "ff"), workers, packet)
	ok("software with other letters than ASCII", str(1, x(num(1, 1), id, text(3, "Düker"), workers, packet)), "hello")
	part("a possession of 63 bytes", id, workers, packet, str(9, n(1, 63)))
	part("a possession of 65 bytes", id, workers, packet, str(9, n(1, 65)))
	part("a proof of a preshared key of 15 bytes", id, workers, packet, str(10, n(1, 15)))
	part("a proof of a preshared key of 0 bytes", id, workers, packet, str(10, ""))
	part("three proofs of preshared keys", id, workers, packet, str(10, n(1, 16)), str(10, n(2, 16)), str(10, n(3, 16)))
	part("a name of 0 bytes", id, workers, packet, service(1, ""))
	part("a service without a name", id, workers, packet, str(7, num(1, 1)))
	ok("a name of 64 bytes", str(1, hello(service(1, string(make64('n')), num(5, 1)))), "hello")
	part("a name of 65 bytes", id, workers, packet, service(1, string(make64('n'))+"n"))
	part("a name with DEL", id, workers, packet, service(1, "a\x7f"))
	part("a name that is not UTF-8", id, workers, packet, str(7, str(2, "c3")))
	part("two services of one number", id, workers, packet, service(3, "a"), service(3, "b"))
	part("two services of one name", id, workers, packet, service(3, "a"), service(4, "a"))
	many := func(count int) string {
		all := ""
		for i := range count {
			all += service(uint64(i), fmt.Sprintf("s%d", i), num(5, 1))
		}
		return all
	}
	ok("256 services", str(1, hello(many(256))), "hello")
	part("257 services", id, workers, packet, many(257))
	part("workers as bytes", id, str(4, "01"), packet)
	part("an instance as an integer", num(2, 7), workers, packet)
	part("an instance that is cut short", workers, packet, "1210 0001")
	part("an unknown field that is cut short", id, workers, packet, uvarint(1000<<3|2), "05 01")
	part("field number 0", id, workers, packet, "0001")
	part("wire type 7", id, workers, packet, uvarint(1000<<3|7), "01")
	part("an end of a group that did not begin", id, workers, packet, uvarint(100<<3|4))
	part("a group that does not end", id, workers, packet, uvarint(100<<3|3), num(1, 5))
	part("an integer of eleven bytes", id, workers, packet, uvarint(1000<<3), n(0x80, 10), "01")

	lane := func(lane, epoch uint64, id string) string {
		inner := ""
		if lane > 0 {
			inner += num(1, lane)
		}
		if epoch > 0 {
			inner += num(2, epoch)
		}
		return x(inner, str(3, id))
	}
	for _, kind := range []uint64{2, 3} {
		name := map[uint64]string{2: "lane_open", 3: "lane_accept"}[kind]
		ok(name+" of the document", str(kind, lane(0, 1, "0102030405060708")), name)
		ok(name+": the last lane and the last epoch", str(kind, lane(63, 1<<64-1, "ffffffffffffffff")), name)
		bad(name+": lane 64", str(kind, lane(64, 1, "0102030405060708")))
		bad(name+": a connection ID of 7 bytes", str(kind, lane(0, 1, "01020304050607")))
		bad(name+": a connection ID of 9 bytes", str(kind, lane(0, 1, "010203040506070809")))
		bad(name+": no connection ID", str(kind, num(2, 1)))
	}
	ok("lane_open with a preshared key", str(2, x(lane(0, 1, "0102030405060708"), str(4, n(7, 16)))), "lane_open")
	bad("lane_open with a proof of 17 bytes", str(2, x(lane(0, 1, "0102030405060708"), str(4, n(7, 17)))))
	add("lane_accept with the field of a preshared key, which it does not have", str(3, x(lane(0, 1, "0102030405060708"), str(4, n(7, 17)))), accept, "lane_accept", str(3, lane(0, 1, "0102030405060708")))
	opened := func(index uint64, line ...string) string {
		return str(2, x(lane(index, 4, "0102030405060708"), str(5, x(line...))))
	}
	ok("lane_open on a line, of the document", opened(3, num(1, 2), num(2, 20_000_000), num(4, 1)), "lane_open")
	ok("lane_open on a line with a weight, a backup", opened(0, num(1, 64), num(3, 256), num(5, 1)), "lane_open")
	ok("lane_open on the last line", opened(63, num(1, 8), num(2, 1<<64-1)), "lane_open")
	add("lane_open on a line whose weight is the default", opened(3, num(1, 2), num(3, 1)), accept, "lane_open", opened(3, num(1, 2)))
	add("lane_open on a line that says more", opened(3, num(1, 2), num(9, 7)), accept, "lane_open", opened(3, num(1, 2)))
	add("lane_open with a line in two parts", str(2, x(lane(3, 4, "0102030405060708"), str(5, num(1, 2)), str(5, num(4, 1)))), accept, "lane_open", opened(3, num(1, 2), num(4, 1)))
	bad("lane_open on a line without lanes", opened(0, num(2, 5)))
	bad("lane_open on a line that says nothing", opened(0))
	bad("lane_open on a line with 65 lanes", opened(0, num(1, 65)))
	bad("lane_open on a ninth line", opened(8, num(1, 1)))
	bad("lane_open on a line with a weight of 257", opened(0, num(1, 1), num(3, 257)))
	bad("lane_open with a line that is an integer", str(2, x(lane(0, 1, "0102030405060708"), num(5, 1))))
	add("lane_accept with the field of a line, which it does not have", str(3, x(lane(0, 1, "0102030405060708"), str(5, num(1, 65)))), accept, "lane_accept", str(3, lane(0, 1, "0102030405060708")))
	stated := func(line ...string) string { return str(20, x(line...)) }
	ok("line_state of the first line, of which nothing is held against it", stated(), "line_state")
	ok("line_state of a line that is not heard, of the document", stated(num(1, 1), num(2, 1)), "line_state")
	ok("line_state of the last line with other terms", stated(num(1, 7), str(3, x(num(2, 20_000_000), num(4, 1)))), "line_state")
	ok("line_state with terms that say nothing", stated(num(1, 1), str(3, "")), "line_state")
	add("line_state with terms and a number of lanes, which means nothing", stated(num(1, 1), str(3, x(num(1, 65), num(5, 1)))), accept, "line_state", stated(num(1, 1), str(3, num(5, 1))))
	bad("line_state of a ninth line", stated(num(1, 8)))
	bad("line_state with a weight of 257", stated(num(1, 1), str(3, num(3, 257))))
	bad("line_state with terms that are an integer", stated(num(3, 1)))
	for _, kind := range []uint64{4, 5} {
		name, most := "lane_refuse", uint64(4)
		if kind == 5 {
			name, most = "lane_close", 5
		}
		for reason := range most {
			ok(fmt.Sprintf("%s: reason %d", name, reason+1), str(kind, x(num(1, 7), num(2, 9), num(3, reason+1))), name)
		}
		ok(name+": no reason", str(kind, x(num(1, 7), num(2, 9))), name)
		add(name+": a reason of a later version", str(kind, x(num(2, 9), num(3, 99))), accept, name, "")
		bad(name+": lane 64", str(kind, x(num(1, 64), num(2, 9), num(3, 1))))
	}
	ok("services_changed to none", str(6, ""), "services_changed")
	ok("services_changed", str(6, x(str(1, x(num(1, 5), text(2, "dns"), num(3, 1), num(5, 9))))), "services_changed")
	bad("services_changed with one number twice", str(6, x(str(1, x(num(1, 5), text(2, "a"))), str(1, x(num(1, 5), text(2, "b"))))))
	ok("here", str(7, str(1, n(0, 1000))), "here")
	add("here without padding", str(7, ""), accept, "here", "")
	join := func(instance, session string, number uint64, possession string) string {
		return str(8, x(str(1, instance), str(2, session), num(3, number), str(9-5, possession)))
	}
	ok("join", join(instance, n(5, 16), 7, n(6, 64)), "join")
	bad("join with number 0", join(instance, n(5, 16), 0, n(6, 64)))
	bad("join with number 8", join(instance, n(5, 16), 8, n(6, 64)))
	bad("join with an instance of 8 bytes", join(n(1, 8), n(5, 16), 1, n(6, 64)))
	bad("join with a session of 17 bytes", join(instance, n(5, 17), 1, n(6, 64)))
	bad("join with a possession of 32 bytes", join(instance, n(5, 16), 1, n(6, 32)))
	ok("joined", str(9, ""), "joined")
	ok("streams_wanted", str(10, ""), "streams_wanted")
	ok("release", str(11, ""), "release")
	ok("receive_rate", str(12, num(1, 1_000_000_000)), "receive_rate")
	ok("receive_rate without a limit", str(12, ""), "receive_rate")

	ok("reports_wanted", str(13, num(1, 1)), "reports_wanted")
	ok("reports_wanted no more", str(13, ""), "reports_wanted")
	add("reports_wanted with another number than 1", str(13, num(1, 2)), accept, "reports_wanted", str(13, num(1, 1)))
	bad("reports_wanted as bytes", str(13, str(1, "01")))
	// Mode, deadline in milliseconds, most overhead in millionths.
	repair := func(mode, deadline, overhead uint64, more ...string) string {
		return str(14, x(append([]string{num(1, mode), num(2, deadline), num(3, overhead)}, more...)...))
	}
	hold := num(4, 1)
	for mode, name := range []string{"retransmit", "fec", "auto"} {
		ok("packet_repair: "+name, repair(uint64(mode+1), 200, 300_000), "packet_repair")
	}
	ok("packet_repair in order, within the shortest time", repair(3, 5, 300_000, hold), "packet_repair")
	ok("packet_repair within the longest time, with the most overhead", repair(3, 2_000, 2_000_000, hold), "packet_repair")
	ok("packet_repair with a deadline that follows the path", repair(3, 200, 300_000, num(5, 1)), "packet_repair")
	ok("packet_repair without overhead", str(14, x(num(1, 1), num(2, 200))), "packet_repair")
	ok("packet_repair: off", str(14, ""), "packet_repair")
	add("packet_repair: off, whatever else it says", repair(0, 1, 2_000_001, hold), accept, "packet_repair", str(14, ""))
	add("packet_repair: a mode of a later version counts as auto", repair(99, 200, 300_000), accept, "packet_repair", repair(3, 200, 300_000))
	bad("packet_repair within 4 ms", repair(3, 4, 300_000))
	bad("packet_repair within 2001 ms", repair(3, 2_001, 300_000))
	bad("packet_repair without a deadline", str(14, num(1, 3)))
	bad("packet_repair with 2,000,001 millionths", repair(3, 200, 2_000_001))

	ok("preshared_keys", str(15, x(str(1, n(1, 16)), str(1, n(2, 16)))), "preshared_keys")
	ok("preshared_keys without any", str(15, ""), "preshared_keys")
	bad("preshared_keys with a proof of 15 bytes", str(15, str(1, n(1, 15))))
	bad("preshared_keys with three proofs", str(15, x(str(1, n(1, 16)), str(1, n(2, 16)), str(1, n(3, 16)))))

	// The fields of the streams and of their bytes, and a field before them.
	for _, about := range []struct {
		kind, streams uint64
		name, before  string
	}{{18, 1, "stream_abort", ""}, {19, 2, "stream_credit", num(1, 65536)}} {
		one := func(name, inner string) { ok(about.name+name, str(about.kind, about.before+x(inner)), about.name) }
		reads := func(name, inner, again string) {
			add(about.name+name, str(about.kind, about.before+x(inner)), accept, about.name, str(about.kind, about.before+x(again)))
		}
		breaks := func(name, inner string) { bad(about.name+name, str(about.kind, about.before+x(inner))) }
		lists := func(streams, bytes string) string { return str(about.streams, streams) + str(about.streams+1, bytes) }
		both := lists("00 04 808001", "03 00 ffffffffffffffffff01")
		one("", both)
		one(" of 256 streams", lists(n(5, 256), n(6, 256)))
		reads(" that is not packed", num(about.streams, 0)+num(about.streams+1, 3)+num(about.streams, 4)+num(about.streams+1, 0)+
			num(about.streams, 16384)+num(about.streams+1, 1<<64-1), both)
		reads(" that is packed in part", str(about.streams, "00 04")+num(about.streams, 16384)+num(about.streams+1, 3)+
			str(about.streams+1, "00 ffffffffffffffffff01"), both)
		reads(" with lists of nothing", lists("", ""), "")
		reads(" with one stream twice", lists("04 04", "09 07"), lists("04 04", "09 07"))
		reads(" with a stream that QUIC has no number for", lists("ffffffffffffffffff01", "01"), lists("ffffffffffffffffff01", "01"))
		reads(" with fields of a later version", both+num(9, 1)+str(10, "aa"), both)
		add(about.name+" in two parts, which protobuf merges",
			str(about.kind, about.before+x(lists("00", "03")))+str(about.kind, x(lists("04 808001", "00 ffffffffffffffffff01"))),
			accept, about.name, str(about.kind, about.before+both))
		add(about.name+" with unequal lists, in two parts that make them equal",
			str(about.kind, about.before+str(about.streams, "04"))+str(about.kind, str(about.streams+1, "09")),
			accept, about.name, str(about.kind, about.before+lists("04", "09")))
		add(about.name+" of 257 streams, before another kind", str(about.kind, about.before+x(lists(n(5, 257), n(6, 257))))+str(9, ""),
			accept, "joined", str(9, ""))
		breaks(" of 257 streams", lists(n(5, 257), n(6, 257)))
		breaks(" of 257 streams, some of them packed", lists(n(5, 256), n(6, 256))+num(about.streams, 5)+num(about.streams+1, 6))
		breaks(" with more streams than numbers of bytes", lists("00 04", "03"))
		breaks(" with fewer streams than numbers of bytes", lists("00", "03 04"))
		breaks(" with streams only", str(about.streams, "00"))
		breaks(" with numbers of bytes only", str(about.streams+1, "00"))
		breaks(" whose streams have 8 bytes each", uvarint(about.streams<<3|1)+n(0, 8)+str(about.streams+1, "00"))
		breaks(" whose numbers of bytes have 4 bytes each", str(about.streams, "00")+uvarint((about.streams+1)<<3|5)+n(0, 4))
		breaks(" whose streams are a group", uvarint(about.streams<<3|3)+uvarint(about.streams<<3|4))
		breaks(" whose packed list is cut short", lists("00 84", "03 04"))
		breaks(" with an integer of eleven bytes in a packed list", lists(n(0x80, 10)+"01", "03"))
		breaks(" with an integer beyond 64 bits in a packed list", lists("ffffffffffffffffff02", "03"))
		bad(about.name+" that is an integer", num(about.kind, 1))
	}
	ok("stream_abort of nothing", str(18, ""), "stream_abort")
	ok("stream_credit without limits", str(19, ""), "stream_credit")
	ok("stream_credit for streams that begin", str(19, num(1, 1<<64-1)), "stream_credit")
	add("stream_credit with an initial limit of 0, written", str(19, num(1, 0)), accept, "stream_credit", str(19, ""))
	bad("stream_credit whose initial limit is packed", str(19, str(1, "01")))

	bad("no byte at all", "")
	add("a kind of a later version", str(1000, "0801"), ignore, "", "")
	add("a field of a later version that is no message", num(1000, 1), ignore, "", "")
	add("a known kind beside an unknown one", str(1000, "0801")+str(9, ""), accept, "joined", str(9, ""))
	add("two kinds: the last one counts", str(10, "")+str(9, ""), accept, "joined", str(9, ""))
	bad("a kind with another wire type", num(9, 1))
	bad("an Envelope that is cut short", "0a19 0801")
	bad("an Envelope whose length is cut short", "0a")
	return out
}

// make64 is 64 times the same letter.
func make64(letter byte) []byte {
	b := make([]byte, 64)
	for i := range b {
		b[i] = letter
	}
	return b
}

// streams are the lengths on control streams, and the headers of TCP forwards.
func streams() cases {
	var out cases
	add := func(name, limit, bytes, verdict, messages string) {
		c := conformance.Case{Name: name, Kind: "framing", Input: fields{"bytes": x(bytes), "limit": limit}, Verdict: verdict}
		if messages != "" {
			c.Output = fields{"messages": messages}
		}
		out = append(out, c)
	}
	add("one message", "65536", "03 010203", accept, "010203")
	add("two messages", "65536", "01 aa 02 bbcc", accept, "aa bbcc")
	add("a length in a longer form", "65536", "4001 aa", accept, "aa")
	add("a message that is cut short", "65536", "01 aa 02 bb", "incomplete", "aa")
	add("a length that is cut short", "65536", "80 0000", "incomplete", "")
	add("the longest message, announced", "65536", "80010000", "incomplete", "")
	add("a message that is too long", "65536", "80010001", close1, "")
	add("the longest header of a forward, announced", "1024", "4400", "incomplete", "")
	add("a header of a forward that is too long", "1024", "4401", close1, "")
	header := func(kind, name, bytes, verdict, field, value string, again string) {
		c := conformance.Case{Name: name, Kind: kind, Input: fields{"bytes": x(bytes)}, Verdict: verdict}
		if verdict == accept {
			c.Output = fields{field: value}
			if again != "" {
				c.Output["bytes"] = x(again)
			}
		}
		out = append(out, c)
	}
	header("stream_open", "StreamOpen of service 1", "0801", accept, "service", "1", "02 0801")
	header("stream_open", "StreamOpen of service 0", "", accept, "service", "0", "00")
	header("stream_open", "StreamOpen of the last service", "08ffffffff0f", accept, "service", "4294967295", "06 08ffffffff0f")
	header("stream_open", "StreamOpen with an unknown field", "0801 1a03aabbcc", accept, "service", "1", "02 0801")
	v4 := "0a04c0000201 10b424 1a04c6336402 20bb03"
	v6 := "0a10" + "20010db8" + strings.Repeat("00", 11) + "01" + "10b424 1a10" + "20010db8" + strings.Repeat("00", 11) + "02" + "20bb03"
	mapped := "0a10" + strings.Repeat("00", 10) + "ffffc0000201 10b424 1a10" + strings.Repeat("00", 10) + "ffffc6336402 20bb03"
	client := func(name, fields, verdict, again string) {
		bytes := "0801 12" + uvarint(uint64(len(x(fields))/2)) + fields
		header("stream_open", "StreamOpen with "+name, bytes, verdict, "service", "1", again)
	}
	client("a client of IPv4", v4, accept, "16 0801 1212"+v4)
	client("a client of IPv6", v6, accept, "2e 0801 122a"+v6)
	client("a client of IPv4 in the form of IPv6", mapped, accept, "16 0801 1212"+v4)
	client("a client with an unknown field", v4+"2801", accept, "16 0801 1212"+v4)
	client("an empty client", "", "malformed", "")
	client("a client of two families", "0a04c0000201 10b424 1a10"+"20010db8"+strings.Repeat("00", 11)+"02", "malformed", "")
	client("a client whose address has 5 bytes", "0a05c000020101 1a04c6336402", "malformed", "")
	client("a client whose port has 17 bits", "0a04c0000201 10808004 1a04c6336402", "malformed", "")
	client("a client without its own address", "1a04c6336402 20bb03", "malformed", "")
	header("stream_open", "StreamOpen with the client as a number", "0801 1001", "malformed", "", "", "")
	header("stream_open", "StreamOpen with the service as bytes", "0a0101", "malformed", "", "", "")
	header("stream_open", "StreamOpen that is cut short", "08", "malformed", "", "", "")
	for status := range 9 {
		header("stream_answer", fmt.Sprintf("StreamAnswer %d", status+1), "08"+uvarint(uint64(status+1)), accept, "status", fmt.Sprint(status+1), "02 08"+uvarint(uint64(status+1)))
	}
	header("stream_answer", "StreamAnswer without a status", "", accept, "status", "0", "00")
	header("stream_answer", "StreamAnswer with a status of a later version", "0863", accept, "status", "other", "")
	header("stream_answer", "StreamAnswer that is cut short", "0880", "malformed", "", "", "")
	return out
}

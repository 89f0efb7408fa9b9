package main

import (
	"bytes"
	"crypto/ed25519"
	"fmt"
	"slices"
	"strings"

	"culvert.example/culvert"
	"culvert.example/culvert/internal/conformance"
	"culvert.example/culvert/internal/knock"
	"culvert.example/culvert/internal/label"
)

const (
	seconds  = 1_700_000_000
	helloHex = "6e6f74206120436c69656e7448656c6c6f" // "not a ClientHello"
	dcid     = "0102030405060708"
)

func seeded(value byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{value}, 32))
}

func token(dialler, listener, ephemeral byte, dcid string, at uint64, hello string) string {
	random := bytes.NewReader(bytes.Repeat([]byte{ephemeral}, 32))
	return h(label.Must(knock.Seal(random, seeded(dialler), knock.Public(seeded(listener)), conformance.Bytes(dcid), at, knock.HelloHash(conformance.Bytes(hello)))))
}

func knocks() cases {
	var out cases
	for i, made := range []struct {
		dialler, listener, ephemeral byte
		dcid                         string
		at                           uint64
		hello                        string
	}{
		{1, 2, 3, dcid, seconds, helloHex},
		{4, 5, 6, n(0xff, 8), 0, ""},
		{7, 8, 9, n(0x11, 20), 1<<40 - 1, n('h', 300)},
		{10, 11, 12, n(0, 9), seconds + 255, "01000000"},
	} {
		out = append(out, conformance.Case{
			Name: fmt.Sprintf("a knock is sealed, %d", i+1), Kind: "knock_seal", Verdict: accept,
			Input: fields{
				"dialler_seed": n(made.dialler, 32), "listener_key": h(keyOf(made.listener)), "ephemeral": n(made.ephemeral, 32),
				"dcid": made.dcid, "seconds": fmt.Sprint(made.at), "hello": made.hello,
			},
			Output: fields{"token": token(made.dialler, made.listener, made.ephemeral, made.dcid, made.at, made.hello)},
		})
	}
	good := token(1, 2, 3, dcid, seconds, helloHex)
	open := func(name, verdict string, change fields) {
		input := fields{
			"listener_seed": n(2, 32), "dcid": dcid, "token": good, "now": fmt.Sprint(seconds), "window": "90", "hello": helloHex,
		}
		for key, value := range change {
			input[key] = value
		}
		c := conformance.Case{Name: name, Kind: "knock_open", Input: input, Verdict: verdict}
		if verdict == accept {
			c.Output = fields{"dialler_key": h(keyOf(1)), "seconds": fmt.Sprint(seconds)}
			if key := change["_dialler"]; key != "" {
				delete(input, "_dialler")
				c.Output["dialler_key"] = key
			}
		}
		out = append(out, c)
	}
	open("the knock of the document", accept, nil)
	open("a clock 90 s ahead", accept, fields{"now": fmt.Sprint(seconds - 90)})
	open("a clock 90 s behind", accept, fields{"now": fmt.Sprint(seconds + 90)})
	open("a clock 91 s ahead", "clock", fields{"now": fmt.Sprint(seconds + 9), "token": token(1, 2, 3, dcid, seconds+100, helloHex)})
	open("a clock 91 s ahead, at the start of an epoch", "mac", fields{"now": fmt.Sprint(seconds - 91)})
	open("a clock 91 s behind", "clock", fields{"now": fmt.Sprint(seconds + 91)})
	open("a knock of an hour ago", "mac", fields{"now": fmt.Sprint(seconds + 3600)})
	open("a wider window", accept, fields{"now": fmt.Sprint(seconds + 600), "window": "600"})
	open("for another listener", "mac", fields{"listener_seed": n(3, 32)})
	open("under another destination", "mac", fields{"dcid": "0102030405060709"})
	open("under a longer destination", "mac", fields{"dcid": dcid + "00"})
	open("with another ClientHello", "hello", fields{"hello": helloHex + "00"})
	open("one byte short", "length", fields{"token": good[:len(good)-2]})
	open("one byte long", "length", fields{"token": good + "00"})
	open("of no byte", "length", fields{"token": ""})
	for _, at := range []int{0, 31, 32, 79, 80, 119, 120, 135} {
		open(fmt.Sprintf("byte %d damaged", at), "mac", fields{"token": flipped(good, at)})
	}
	for value, name := range []string{"all zeros", "all ones"} {
		open(name, "mac", fields{"token": n(byte(value*255), knock.Len)})
	}
	// With a mac1 of their own, as only somebody who knows the listener's key can make it.
	for _, at := range []int{0, 32, 80} {
		open(fmt.Sprintf("byte %d damaged, under a right mac1", at), "sealed", fields{"token": remade(good, at)})
	}
	hello := knock.HelloHash(conformance.Bytes(helloHex))
	open("a payload of version 2", "sealed", fields{"token": h(label.Must(knock.SealPayloadForTest(bytes.NewReader(bytes.Repeat([]byte{3}, 32)), seeded(1), knock.Public(seeded(2)), conformance.Bytes(dcid), seconds, conformance.Bytes("0200000000000000"+n(0, 16)))))})
	// A flag, which a listener may act on once it has opened the knock.
	open("a fallback to X25519", accept, fields{"token": h(label.Must(knock.SealPayloadForTest(bytes.NewReader(bytes.Repeat([]byte{3}, 32)), seeded(1), knock.Public(seeded(2)), conformance.Bytes(dcid), seconds, conformance.Bytes(fmt.Sprintf("010%d00%010x", 2|keyOf(1)[31]>>7, seconds)+h(hello[:])))))})
	// The sign of a dialler's key is a flag: find a key of each.
	for _, sign := range []byte{0, 0x80} {
		for value := byte(20); ; value++ {
			if keyOf(value)[31]&0x80 == sign {
				open(fmt.Sprintf("a dialler whose key has the sign %#02x", sign), accept, fields{"token": token(value, 2, 3, dcid, seconds, helloHex), "_dialler": h(keyOf(value))})
				break
			}
		}
	}
	return out
}

func keyOf(value byte) []byte {
	key := knock.Public(seeded(value))
	return key[:]
}

// remade is a knock with a bit changed, under a mac1 that fits.
func remade(token string, at int) string {
	b := conformance.Bytes(flipped(token, at))
	return h(knock.MACForTest(knock.Public(seeded(2)), conformance.Bytes(dcid), b, seconds))
}

// initials are the first packets of diallers.
func initials() cases {
	var out cases
	add := func(name, datagram, verdict string, output fields) {
		out = append(out, conformance.Case{Name: name, Kind: "initial", Input: fields{"datagram": datagram}, Verdict: verdict, Output: output})
	}
	hello := "01000064"
	for i := range 100 {
		hello += fmt.Sprintf("%02x", i)
	}
	hash := knock.HelloHash(conformance.Bytes(hello))
	crypto := func(from, to int) string {
		return x("06", quic(from), quic(to-from), hello[2*from:2*to])
	}
	type packet struct {
		dcid, scid, token, frames string
		number                    uint32
		numberLen                 int
	}
	build := func(p packet) string {
		if p.numberLen == 0 {
			p.numberLen = 4
		}
		return h(knock.InitialForTest(conformance.Bytes(p.dcid), conformance.Bytes(p.scid), conformance.Bytes(p.token), p.number, p.numberLen, conformance.Bytes(p.frames)))
	}
	whole := crypto(0, 104)
	padding := n(0, 900)
	ok := func(name string, p packet) {
		add(name, build(p), accept, fields{"dcid": p.dcid, "scid": p.scid, "token": p.token, "hello_hash": h(hash[:])})
	}
	plain := packet{dcid: dcid, scid: "aabbccdd", frames: whole + padding}
	with := func(change func(*packet)) packet {
		p := plain
		change(&p)
		return p
	}
	ok("a ClientHello in one frame", plain)
	ok("with a token", with(func(p *packet) { p.token = token(1, 2, 3, dcid, seconds, hello) }))
	ok("a destination of 20 bytes", with(func(p *packet) { p.dcid = n(7, 20) }))
	ok("no source", with(func(p *packet) { p.scid = "" }))
	ok("padding first", with(func(p *packet) { p.frames = padding + whole }))
	ok("two frames, the later one first, as quic-go scrambles", with(func(p *packet) { p.frames = crypto(60, 104) + "01" + crypto(0, 60) + padding }))
	ok("frames that repeat bytes", with(func(p *packet) { p.frames = crypto(0, 60) + crypto(50, 104) + crypto(0, 10) + padding }))
	ok("packet number 7 in one byte", with(func(p *packet) { p.number, p.numberLen = 7, 1 }))
	ok("a coalesced packet behind it", plain)
	last := &out[len(out)-1]
	last.Input["datagram"] += x("e0 00000001 00 00 00")
	bad := func(name, verdict string, p packet) { add(name, build(p), verdict, nil) }
	bad("a ClientHello with a gap", "incomplete", with(func(p *packet) { p.frames = crypto(0, 50) + crypto(60, 104) + padding }))
	bad("a ClientHello without its start", "incomplete", with(func(p *packet) { p.frames = crypto(4, 104) + padding }))
	bad("a ClientHello without its end", "incomplete", with(func(p *packet) { p.frames = crypto(0, 103) + padding }))
	bad("no CRYPTO frame", "incomplete", with(func(p *packet) { p.frames = "01" + padding }))
	bad("another handshake message", malformed, with(func(p *packet) { p.frames = x("06 00 05 02000001 07") + padding }))
	bad("a STREAM frame", malformed, with(func(p *packet) { p.frames = whole + x("0a 00 01 61") }))
	bad("a CRYPTO frame that is cut short", malformed, with(func(p *packet) { p.frames = x("06 00 4400 01") + n(1, 40) }))
	// A ClientHello in two datagrams, as the hybrid key exchange needs.
	pair := func(name, verdict string, first, second packet) {
		add(name, build(first), verdict, nil)
		last := &out[len(out)-1]
		last.Input["second"] = build(second)
		if verdict == accept {
			last.Output = fields{"dcid": first.dcid, "scid": first.scid, "token": first.token, "hello_hash": h(hash[:])}
		}
	}
	half := func(frames string, number uint32) packet {
		return with(func(p *packet) { p.frames, p.number = frames+padding, number })
	}
	first, second := half(crypto(0, 60), 0), half(crypto(60, 104), 1)
	pair("a ClientHello in two datagrams", accept, first, second)
	pair("the second datagram first", accept, second, first)
	pair("two datagrams that repeat bytes", accept, first, half(crypto(20, 104), 2))
	pair("two datagrams with scrambled frames", accept, half(crypto(80, 104)+crypto(0, 30), 0), half(crypto(30, 80), 1))
	pair("the first datagram twice", "incomplete", first, first)
	pair("the second datagram twice", "incomplete", second, second)
	pair("two datagrams with a gap between them", "incomplete", first, half(crypto(61, 104), 1))
	pair("halves of two ClientHellos", malformed, half(crypto(0, 70), 0), half(strings.Replace(crypto(60, 104), "4041", "4141", 1), 1))
	pair("more than the ClientHello in the second datagram", malformed, first, half(crypto(60, 104)+x("06", quic(104), "01 00"), 1))
	good := build(plain)
	add("damaged", flipped(good, 500), "sealed", nil)
	add("under another destination", flipped(good, 6), "sealed", nil)
	for _, header := range []struct{ name, bytes string }{
		{"no byte", ""}, {"a short header", "40" + n(1, 60)}, {"version 2", "d0 6b3343cf" + good[10:]}, {"version negotiation", "c0 00000000" + good[10:]},
		{"a Handshake packet", "e0" + good[2:]}, {"0-RTT", "d0" + good[2:]}, {"Retry", "f0" + good[2:]},
		{"a destination of 21 bytes", "c0 00000001 15" + n(1, 60)}, {"a token longer than the packet", "c0 00000001 08" + dcid + "00 4400 00"},
		{"a length beyond the datagram", good[:60]}, {"too short for a sample", "c0 00000001 08" + dcid + "00 00 13" + n(1, 19)},
		{"cut short in its destination", "c0 00000001 08 0102"},
	} {
		add(header.name, x(header.bytes), "not an Initial", nil)
	}
	return out
}

// names are keys, links and proofs of possession.
func names() cases {
	var out cases
	key := culvert.PublicKey(keyOf(1)).String()
	add := func(kind, name, text, verdict string, output fields) {
		out = append(out, conformance.Case{Name: name, Kind: kind, Input: fields{"text": text}, Verdict: verdict, Output: output})
	}
	add("public_key", "a public key", key, accept, fields{"key": h(keyOf(1))})
	add("public_key", "a key that is too short", key[:42], malformed, nil)
	add("public_key", "a key that is too long", key+"A", malformed, nil)
	add("public_key", "padding", key+"=", malformed, nil)
	add("public_key", "the other alphabet", "+/"+key[2:], malformed, nil)
	add("public_key", "bits behind the end", key[:42]+"d", malformed, nil)
	add("public_key", "no character", "", malformed, nil)
	for i := range byte(3) {
		exported := n(0xe0+i, 32)
		message := append([]byte("culvert possession 1"), conformance.Bytes(exported)...)
		out = append(out, conformance.Case{
			Name: fmt.Sprintf("possession, %d", i+1), Kind: "possession", Verdict: accept,
			Input:  fields{"seed": n(i+1, 32), "exported": exported},
			Output: fields{"signature": h(ed25519.Sign(seeded(i+1), message))},
		})
	}
	shared := ""
	for i := range byte(32) {
		shared += n(i, 1)
	}
	// The examples of the document.
	for sender, proof := range map[string]string{"dialler": "ada86af9344f2b709480a614ff652158", "listener": "39f4f55d085d1f6f18960cb1083422a5"} {
		out = append(out, conformance.Case{
			Name: "the proof of a preshared key, by the " + sender, Kind: "preshared_proof", Verdict: accept,
			Input: fields{"key": shared, "exported": n(0xa5, 32), "sender": sender}, Output: fields{"proof": proof},
		})
	}
	sha256, sha384 := "d0ed1f3ff1bd03d2945ee0aaad2a4bad4608f0ec4472f758b1bf507e13dac9c9",
		"a41f4ed3e642949bfa6b863d6becda215b535aec32baa1372f9e1271a131edd13299d9190746675b5e1a85bf8bcbbe97"
	for suite, secret := range map[string]string{"1301": sha256, "1302": sha384, "1303": sha256} {
		out = append(out, conformance.Case{
			Name: "a preshared key in the secret of a lane, suite " + suite, Kind: "preshared_lane", Verdict: accept,
			Input: fields{"key": shared, "suite": suite, "exported": n(0x5a, len(secret)/2)}, Output: fields{"secret": secret},
		})
	}
	slices.SortFunc(out[len(out)-5:], func(a, b conformance.Case) int { return strings.Compare(a.Name, b.Name) })
	for i := range byte(3) {
		x := knock.Public(seeded(i + 1)).X25519()
		out = append(out, conformance.Case{
			Name: fmt.Sprintf("the X25519 form of a key, %d", i+1), Kind: "x25519", Verdict: accept,
			Input: fields{"key": h(keyOf(i + 1))}, Output: fields{"x25519": h(x[:])},
		})
	}
	return out
}

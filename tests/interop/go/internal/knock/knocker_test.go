package knock

import (
	"bytes"
	"crypto/rand"
	"net/netip"
	"testing"
	"time"
)

// helloOf is a message of type 1 with so many bytes.
func helloOf(length int) []byte {
	b := bytes.Repeat([]byte{7}, 4+length)
	b[0], b[1], b[2], b[3] = 1, 0, byte(length>>8), byte(length)
	return b
}

// cryptoFrame is bytes from to to of a stream.
func cryptoFrame(stream []byte, from, to int) []byte {
	b := []byte{6, byte(from>>8) | 0x40, byte(from), byte((to-from)>>8) | 0x40, byte(to - from)}
	return append(b, stream[from:to]...)
}

func newKnocker() *Knocker {
	return &Knocker{
		Key: seed(1), Listener: Public(seed(2)), Random: bytes.NewReader(bytes.Repeat([]byte{3}, 320)),
		Now: func() time.Time { return time.Unix(exampleSeconds, 0) },
	}
}

// padded are frames that fill a packet of about 1280 bytes.
func padded(frames ...[]byte) []byte {
	b := bytes.Join(frames, nil)
	return append(b, make([]byte, max(0, 1230-len(b)))...)
}

// A ClientHello that quic-go scrambles over two packets is held until it is whole, and both packets have one knock.
func TestAKnockerHoldsPacketsUntilTheClientHelloIsWhole(t *testing.T) {
	hello := helloOf(1500)
	scid := []byte{9, 9, 9, 9}
	first := InitialForTest(exampleDCID, scid, nil, 0, 2, padded(cryptoFrame(hello, 700, 1504), cryptoFrame(hello, 0, 300)))
	second := InitialForTest(exampleDCID, scid, nil, 1, 2, padded(cryptoFrame(hello, 300, 700)))
	k := newKnocker()
	if out := k.Outgoing(first); out == nil || len(out) != 0 {
		t.Fatalf("%d datagrams left before the ClientHello was whole", len(out))
	}
	out := k.Outgoing(second)
	if len(out) != 2 {
		t.Fatalf("%d datagrams", len(out))
	}
	var whole Assembler
	var tokens [][]byte
	for _, datagram := range out {
		p, err := ParseInitial(datagram)
		if err != nil {
			t.Fatal(err)
		}
		opened, err := ClientKeys(exampleDCID).Open(p)
		if err != nil {
			t.Fatal(err)
		}
		frames, err := CryptoFrames(opened.Frames)
		if err != nil {
			t.Fatal(err)
		}
		for _, frame := range frames {
			whole.Add(frame)
		}
		tokens = append(tokens, bytes.Clone(p.Token))
	}
	if got, err := whole.Hello(); err != nil || !bytes.Equal(got, hello) {
		t.Fatalf("another ClientHello: %v", err)
	}
	if !bytes.Equal(tokens[0], tokens[1]) {
		t.Fatal("two knocks")
	}
	opened, err := Open(seed(2), exampleDCID, tokens[0], exampleSeconds, 90)
	if err != nil || opened.CheckHello(hello) != nil {
		t.Fatalf("the knock: %v", err)
	}
	// A later packet, to the connection ID that the listener chose, has the same knock, under the keys of the first one.
	keys := ClientKeys(exampleDCID)
	later, _ := ParseInitial(InitialForTest(exampleDCID, scid, nil, 2, 2, padded([]byte{1})))
	content, err := keys.Open(later)
	if err != nil {
		t.Fatal(err)
	}
	later.DCID = []byte{5, 5, 5, 5, 5, 5, 5, 5}
	out = k.Outgoing(keys.Reseal(later, content, nil, 1300))
	if p, err := ParseInitial(out[0]); err != nil || !bytes.Equal(p.Token, tokens[0]) || !bytes.Equal(p.DCID, later.DCID) {
		t.Fatalf("%v", err)
	}
}

func TestPaddingGivesWayToTheKnock(t *testing.T) {
	// A ClientHello may end with zeros, which are no PADDING; quic-go puts that first.
	hello := helloOf(200)
	copy(hello[190:], make([]byte, 14))
	frame := cryptoFrame(hello, 0, 204)
	var out [][]byte
	for _, frames := range [][]byte{padded(frame), append(make([]byte, 1000), frame...), append(append(make([]byte, 60), frame...), make([]byte, 900)...)} {
		datagram := InitialForTest(exampleDCID, nil, nil, 0, 2, frames)
		out = newKnocker().Outgoing(datagram)
		if len(out) != 1 || len(out[0]) != len(datagram) {
			t.Fatalf("%d bytes became %d", len(datagram), len(out[0]))
		}
		p, err := ParseInitial(out[0])
		if err != nil {
			t.Fatal(err)
		}
		if got, err := p.ClientHello(); err != nil || !bytes.Equal(got, hello) {
			t.Fatalf("another ClientHello: %v", err)
		}
	}
	full := helloOf(1196)
	datagram := InitialForTest(exampleDCID, nil, nil, 0, 2, cryptoFrame(full, 0, 1200))
	if out = newKnocker().Outgoing(datagram); len(out) != 1 || len(out[0]) != len(datagram)+Len+1 {
		t.Fatal("without padding the datagram grows")
	}
}

func TestOtherPacketsPassAsTheyAre(t *testing.T) {
	k := newKnocker()
	retried := InitialForTest(exampleDCID, nil, bytes.Repeat([]byte{1}, 236), 0, 2, padded(cryptoFrame(helloOf(200), 0, 204)))
	for _, datagram := range [][]byte{nil, {0x40, 1, 2}, append([]byte{0xe0, 0, 0, 0, 1}, make([]byte, 100)...), retried} {
		if out := k.Outgoing(datagram); out != nil {
			t.Fatalf("%x was changed", datagram[:min(8, len(datagram))])
		}
	}
}

func TestAGateLetsAKnockInOnce(t *testing.T) {
	now := time.Unix(exampleSeconds, 0)
	g := &Gate{
		Key: seed(2), Allowed: func(k PublicKey) bool { return k == Public(seed(1)) }, Window: 90 * time.Second,
		Now: func() time.Time { return now },
	}
	datagram := InitialForTest(exampleDCID, []byte{1}, nil, 0, 2, padded(cryptoFrame(helloOf(200), 0, 204)))
	knocking := newKnocker().Outgoing(datagram)[0]
	from, other := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.1:2")
	if g.Incoming(datagram, from) != nil {
		t.Fatal("let in without a knock")
	}
	for _, what := range []string{"a knock", "its retransmission"} {
		if g.Incoming(knocking, from) == nil {
			t.Fatal(what + " is refused")
		}
	}
	if g.Incoming(knocking, other) != nil {
		t.Fatal("a copy from another address is let in")
	}
	g.End(g.Connection(from))
	if g.Incoming(knocking, from) != nil {
		t.Fatal("a copy after the connection is let in")
	}
	if g.Refused() != 3 {
		t.Fatalf("%d refusals", g.Refused())
	}
	stranger := Knocker{Key: seed(7), Listener: Public(seed(2)), Random: bytes.NewReader(make([]byte, 32)), Now: g.Now}
	if g.Incoming(stranger.Outgoing(datagram)[0], other) != nil {
		t.Fatal("a key that is not allowed is let in")
	}
}

// The datagrams of a ClientHello in two packets pass together, in either order, and once.
func TestAGateHoldsOneHalfUntilTheOtherComes(t *testing.T) {
	dialler, listener := seed(1), seed(2)
	hello := helloOf(1500)
	hash := HelloHash(hello)
	at := time.Unix(exampleSeconds, 0)
	from := netip.MustParseAddrPort("192.0.2.1:1")
	other := netip.MustParseAddrPort("192.0.2.2:1")
	for order, first := range []int{0, 1} {
		now := at
		g := &Gate{Key: listener, Allowed: func(PublicKey) bool { return true }, Window: 90 * time.Second, Now: func() time.Time { return now }}
		knock, err := Seal(rand.Reader, dialler, Public(listener), exampleDCID, exampleSeconds, hash)
		if err != nil {
			t.Fatal(err)
		}
		halves := [][]byte{
			InitialForTest(exampleDCID, []byte{9}, knock, 0, 2, padded(cryptoFrame(hello, 0, 900))),
			InitialForTest(exampleDCID, []byte{9}, knock, 1, 2, padded(cryptoFrame(hello, 900, 1504))),
		}
		one, two := halves[first], halves[1-first]
		for range 2 {
			if g.Incoming(one, from) != nil {
				t.Fatalf("order %d: half a ClientHello passed", order)
			}
		}
		if g.Incoming(two, other) != nil {
			t.Fatalf("order %d: the other half passed from elsewhere", order)
		}
		if passed := g.Incoming(two, from); len(passed) != 2 || !bytes.Equal(passed[0], one) || !bytes.Equal(passed[1], two) {
			t.Fatalf("order %d: %d datagrams passed", order, len(passed))
		}
		// Too late: the knock is used up.
		g.admitted = nil
		if g.Incoming(one, from) != nil {
			t.Fatal("half a ClientHello passed")
		}
		now = now.Add(patience)
		if g.Incoming(two, from) != nil || g.Incoming(one, from) != nil || g.partial != 0 {
			t.Fatal("a half passed that was too late")
		}
	}
}

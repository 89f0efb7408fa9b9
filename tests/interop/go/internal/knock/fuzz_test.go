package knock

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"culvert.example/culvert/internal/conformance"
)

func seedsOf(f *testing.F, kind string, add func(*conformance.Case)) {
	f.Helper()
	all, err := conformance.Load("../../../../virtual/conformance")
	if err != nil {
		f.Fatal(err)
	}
	for _, c := range all {
		if c.Kind == kind {
			add(&c)
		}
	}
}

// FuzzInitial gives datagrams to the reader of Initial packets, to a knocker and to a gate. What a knocker sends shows
// the ClientHello that it was given, and a gate lets nothing in without a knock.
func FuzzInitial(f *testing.F) {
	seedsOf(f, "initial", func(c *conformance.Case) { f.Add(c.Bytes("datagram")) })
	from := netip.MustParseAddrPort("192.0.2.1:4433")
	now := func() time.Time { return time.Unix(exampleSeconds, 0) }
	f.Fuzz(func(t *testing.T, datagram []byte) {
		p, err := ParseInitial(datagram)
		if err != nil {
			return
		}
		hello, err := p.ClientHello()
		knocker := Knocker{Key: seed(1), Listener: Public(seed(2)), Random: bytes.NewReader(make([]byte, 64)), Now: now}
		out := knocker.Outgoing(datagram)
		gate := Gate{Key: seed(2), Allowed: func(k PublicKey) bool { return k == Public(seed(1)) }, Window: time.Minute, Now: now}
		if gate.Incoming(datagram, from) != nil {
			t.Fatal("it was let in without a knock")
		}
		if err != nil || len(p.Token) > 0 {
			return
		}
		if len(out) != 1 {
			t.Fatalf("a whole ClientHello became %d datagrams", len(out))
		}
		sent, err := ParseInitial(out[0])
		if err != nil || len(sent.Token) != Len {
			t.Fatalf("no knock: %v", err)
		}
		if again, err := sent.ClientHello(); err != nil || !bytes.Equal(again, hello) {
			t.Fatalf("another ClientHello: %v", err)
		}
		if large := len(out[0]) >= 1200; (gate.Incoming(out[0], from) != nil) != large {
			t.Fatalf("a knock in %d bytes", len(out[0]))
		}
	})
}

// FuzzOpen checks that a token opens only if it is one that was sealed.
func FuzzOpen(f *testing.F) {
	known := make(map[string]bool)
	seedsOf(f, "knock_open", func(c *conformance.Case) {
		if c.Verdict == "accept" || c.Verdict == "hello" || c.Verdict == "clock" {
			known[string(c.Bytes("token"))] = true
		}
		f.Add(c.Bytes("token"))
	})
	f.Fuzz(func(t *testing.T, token []byte) {
		if _, err := Open(seed(2), exampleDCID, token, exampleSeconds, 90); err == nil && !known[string(token)] {
			t.Fatal("a forged knock opened")
		}
	})
}

package lane

import (
	"bytes"
	"testing"

	"culvert.example/culvert/internal/conformance"
)

func cases(f *testing.F) []conformance.Case {
	f.Helper()
	all, err := conformance.Load("../../../../virtual/conformance")
	if err != nil {
		f.Fatal(err)
	}
	return all
}

// FuzzFrames checks that frames which parse lie within their packet, and that ranges of ACKs descend.
func FuzzFrames(f *testing.F) {
	for _, c := range cases(f) {
		if c.Kind == "frames" {
			f.Add(c.Bytes("frames"))
		}
	}
	var frames Frames
	f.Fuzz(func(t *testing.T, b []byte) {
		if frames.Parse(b) != nil {
			return
		}
		total := 0
		for _, datagram := range frames.Datagrams {
			total += len(datagram)
		}
		if total > len(b) {
			t.Fatalf("%d bytes of datagrams in %d", total, len(b))
		}
		for _, ack := range frames.ACKs {
			for i, r := range frames.Ranges[ack.Start:ack.End] {
				if r.First > r.Last || i > 0 && r.Last+1 >= frames.Ranges[ack.Start+i-1].First {
					t.Fatalf("%v", frames.Ranges[ack.Start:ack.End])
				}
			}
			// They are the same when they are written again.
			written := AppendACK(nil, frames.Ranges[ack.Start:ack.End], ack.Delay)
			var again Frames
			if err := again.Parse(written); err != nil || len(again.Ranges) != ack.End-ack.Start {
				t.Fatalf("%x: %v", written, err)
			}
		}
	})
}

// FuzzOpen checks that no packet but one of the other end opens, whatever its bytes are.
func FuzzOpen(f *testing.F) {
	suite, err := NewSuite(0x1301)
	if err != nil {
		f.Fatal(err)
	}
	secret := make([]byte, suite.SecretLen())
	for i := range secret {
		secret[i] = byte(i)
	}
	known := make(map[string]bool)
	for _, c := range cases(f) {
		for _, step := range c.Steps {
			if c.Kind == "open" && c.Input["suite"] == "1301" {
				packet := conformance.Bytes(step.Bytes)
				known[string(packet)] = true
				f.Add(packet)
			}
		}
		if c.Kind == "frames" {
			packet := c.Bytes("packet")
			known[string(packet)] = true
			f.Add(packet)
		}
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		opener := NewOpener(suite, secret)
		opened, err := opener.Open(bytes.Clone(packet))
		if err != nil {
			return
		}
		if !known[string(packet)] {
			t.Fatalf("a forged packet opened: number %d", opened.Number)
		}
		if _, err := opener.Open(bytes.Clone(packet)); err == nil {
			t.Fatal("it opened twice")
		}
	})
}

package pieces

import (
	"testing"
	"time"

	"culvert.example/culvert/internal/conformance"
	"culvert.example/culvert/internal/wire"
)

// FuzzAdd gives payloads, each behind its length in two bytes, to an assembler: it stays within its bounds, and a
// datagram that is complete has the length that was said.
func FuzzAdd(f *testing.F) {
	all, err := conformance.Load("../../../../virtual/conformance")
	if err != nil {
		f.Fatal(err)
	}
	for _, c := range all {
		var input []byte
		for _, step := range c.Steps {
			if c.Kind == "pieces" {
				b := conformance.Bytes(step.Bytes)
				input = append(append(input, byte(len(b)>>8), byte(len(b))), b...)
			}
		}
		f.Add(input)
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		var a Assembler
		now := time.Unix(0, 0)
		for len(input) >= 2 {
			length := min(int(input[0])<<8|int(input[1]), len(input)-2)
			payload := input[2 : 2+length]
			input = input[2+length:]
			p, err := wire.ParsePayload(payload)
			if err != nil || p.Context != wire.ContextPiece {
				now = now.Add(time.Duration(length) * time.Millisecond)
				continue
			}
			if whole, verdict := a.Add(&p, now); verdict == Complete && uint64(len(whole)) != p.Total {
				t.Fatalf("%d bytes of %d", len(whole), p.Total)
			}
			if a.bytes > MaxBytes || len(a.order) > MaxDatagrams || len(a.order) != len(a.datagrams) {
				t.Fatalf("%d bytes, %d datagrams, %d names", a.bytes, len(a.order), len(a.datagrams))
			}
		}
		a.Expire(now.Add(time.Hour))
		if a.bytes != 0 || len(a.datagrams) != 0 {
			t.Fatalf("%d bytes and %d names are left", a.bytes, len(a.datagrams))
		}
	})
}

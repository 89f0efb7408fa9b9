package wire_test

import (
	"bytes"
	"testing"

	"culvert.example/culvert/internal/conformance"
	"culvert.example/culvert/internal/wire"
)

// seeds adds a field of the conformance cases of a kind: the corpus that both implementations share.
func seeds(f *testing.F, kind, field string) {
	f.Helper()
	cases, err := conformance.Load("../../../../virtual/conformance")
	if err != nil {
		f.Fatal(err)
	}
	for _, c := range cases {
		if c.Kind == kind {
			f.Add(c.Bytes(field))
		}
	}
}

// FuzzEnvelope checks that a message that is accepted is the same after it was written and read again.
func FuzzEnvelope(f *testing.F) {
	seeds(f, "envelope", "bytes")
	f.Fuzz(func(t *testing.T, b []byte) {
		message, err := wire.ParseEnvelope(b)
		if err != nil {
			return
		}
		once := wire.AppendEnvelope(nil, message)
		again, err := wire.ParseEnvelope(once)
		if err != nil {
			t.Fatalf("%x: %v", once, err)
		}
		if twice := wire.AppendEnvelope(nil, again); !bytes.Equal(once, twice) {
			t.Fatalf("%x, then %x", once, twice)
		}
	})
}

// FuzzPayload checks that a payload that parses is the same after it was written and read again, and no longer than it
// came.
func FuzzPayload(f *testing.F) {
	seeds(f, "payload", "bytes")
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := wire.ParsePayload(b)
		if err != nil {
			return
		}
		written := p.Append(nil)
		if len(written) > len(b) {
			t.Fatalf("%d bytes became %d", len(b), len(written))
		}
		again, err := wire.ParsePayload(written)
		if err != nil || !bytes.Equal(again.Append(nil), written) {
			t.Fatalf("%+v, then %+v: %v", p, again, err)
		}
	})
}

// FuzzStream checks that frames of a stream are within their limit.
func FuzzStream(f *testing.F) {
	seeds(f, "framing", "bytes")
	seeds(f, "stream_open", "bytes")
	seeds(f, "stream_answer", "bytes")
	f.Fuzz(func(t *testing.T, b []byte) {
		for r := bytes.NewReader(b); ; {
			frame, err := wire.ReadFrame(r, wire.MaxStreamHeader)
			if err != nil {
				break
			}
			if len(frame) > wire.MaxStreamHeader {
				t.Fatalf("%d bytes", len(frame))
			}
			_, _ = wire.ParseStreamOpen(frame)
		}
		if open, err := wire.ParseStreamOpen(b); err == nil {
			if again, err := wire.ParseStreamOpen(open.AppendFramed(nil)[1:]); err != nil || again != open {
				t.Fatalf("%+v, then %+v: %v", open, again, err)
			}
		}
		if answer, err := wire.ParseStreamAnswer(b); err == nil {
			if again, err := wire.ParseStreamAnswer(answer.AppendFramed(nil)[1:]); err != nil || again != answer {
				t.Fatalf("%+v, then %+v: %v", answer, again, err)
			}
		}
	})
}

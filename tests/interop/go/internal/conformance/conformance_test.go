package conformance_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"culvert.example/culvert"
	"culvert.example/culvert/internal/conformance"
	"culvert.example/culvert/internal/knock"
	"culvert.example/culvert/internal/lane"
	"culvert.example/culvert/internal/pieces"
	"culvert.example/culvert/internal/wire"
)

const folder = "../../../../virtual/conformance"

// result is what this implementation makes of a case.
type result struct {
	verdict string
	output  map[string]string
}

func accept(output map[string]string) result { return result{"accept", output} }

var kinds = map[string]func(*conformance.Case) result{
	"varint": varint, "envelope": envelope, "framing": framing, "stream_open": streamOpen, "stream_answer": streamAnswer,
	"payload": payload, "frames": frames, "seal": seal, "knock_seal": knockSeal, "knock_open": knockOpen,
	"initial": initial, "public_key": publicKey, "possession": possession, "x25519": x25519,
	"preshared_proof": presharedProof, "preshared_lane": presharedLane,
}

// leastCases is how many cases there are at least, so that a missing file is noticed.
const leastCases = 350

func TestCases(t *testing.T) {
	cases, err := conformance.Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	if len(cases) < leastCases {
		t.Fatalf("%d cases", len(cases))
	}
	names := make(map[string]bool)
	for _, c := range cases {
		name := c.Kind + ": " + c.Name
		if names[name] {
			t.Errorf("%s is there twice", name)
		}
		names[name] = true
		t.Run(name, func(t *testing.T) {
			if len(c.Steps) > 0 {
				steps(t, &c)
				return
			}
			run := kinds[c.Kind]
			if run == nil {
				t.Fatalf("unknown kind %q", c.Kind)
			}
			compare(t, run(&c), c.Verdict, c.Output)
		})
	}
}

// TestTheCasesAreThoseOfTheGenerator compares the files with what the generator writes.
func TestTheCasesAreThoseOfTheGenerator(t *testing.T) {
	fresh := t.TempDir()
	if out, err := exec.Command("go", "run", "./generate", fresh).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, from := range []string{fresh, folder} {
		files, _ := filepath.Glob(filepath.Join(from, "*.json"))
		for _, file := range files {
			ours, _ := os.ReadFile(filepath.Join(folder, filepath.Base(file)))
			made, _ := os.ReadFile(filepath.Join(fresh, filepath.Base(file)))
			if !bytes.Equal(ours, made) {
				t.Errorf("%s is not what the generator writes (remedy: go run ./internal/conformance/generate ../../conformance)", filepath.Base(file))
			}
		}
	}
}

func compare(t *testing.T, got result, verdict string, output map[string]string) {
	t.Helper()
	if got.verdict != verdict {
		t.Fatalf("verdict %q, not %q", got.verdict, verdict)
	}
	for field, want := range output {
		if got.output[field] != want {
			t.Errorf("%s is %s, not %s", field, got.output[field], want)
		}
	}
}

func number(c *conformance.Case, field string) uint64 {
	v, err := strconv.ParseUint(c.Input[field], 10, 64)
	if err != nil {
		panic(err)
	}
	return v
}

func varint(c *conformance.Case) result {
	v, n := wire.Varint(c.Bytes("bytes"))
	if n == 0 {
		return result{verdict: "truncated"}
	}
	return accept(map[string]string{"value": fmt.Sprint(v), "shortest": hex.EncodeToString(wire.AppendVarint(nil, v))})
}

func envelope(c *conformance.Case) result {
	message, err := wire.ParseEnvelope(c.Bytes("bytes"))
	switch {
	case errors.Is(err, wire.ErrUnknownKind):
		return result{verdict: "ignore"}
	case errors.Is(err, wire.ErrVersion):
		return result{verdict: "close 2"}
	case err != nil:
		return result{verdict: "close 1"}
	}
	return accept(map[string]string{"kind": wire.Name(message), "bytes": hex.EncodeToString(wire.AppendFramed(nil, message))})
}

func framing(c *conformance.Case) result {
	r := bytes.NewReader(c.Bytes("bytes"))
	var messages []string
	for {
		frame, err := wire.ReadFrame(r, int(number(c, "limit")))
		output := map[string]string{"messages": strings.Join(messages, " ")}
		switch {
		case err == nil:
			messages = append(messages, hex.EncodeToString(frame))
		case errors.Is(err, wire.ErrTooLong):
			return result{"close 1", output}
		case errors.Is(err, io.EOF) && frame == nil:
			return accept(output)
		default:
			return result{"incomplete", output}
		}
	}
}

func streamOpen(c *conformance.Case) result {
	open, err := wire.ParseStreamOpen(c.Bytes("bytes"))
	if err != nil {
		return result{verdict: "malformed"}
	}
	return accept(map[string]string{"service": fmt.Sprint(open.Service), "bytes": hex.EncodeToString(open.AppendFramed(nil))})
}

func streamAnswer(c *conformance.Case) result {
	answer, err := wire.ParseStreamAnswer(c.Bytes("bytes"))
	if err != nil {
		return result{verdict: "malformed"}
	}
	status := fmt.Sprint(answer.Status)
	if answer.Status > wire.StatusNoResources {
		status = "other"
	}
	return accept(map[string]string{"status": status, "bytes": hex.EncodeToString(answer.AppendFramed(nil))})
}

func payload(c *conformance.Case) result {
	p, err := wire.ParsePayload(c.Bytes("bytes"))
	switch {
	case errors.Is(err, wire.ErrUnknownContext):
		return result{verdict: "unknown"}
	case err != nil:
		return result{verdict: "malformed"}
	}
	return accept(map[string]string{
		"context": fmt.Sprint(p.Context), "header": hex.EncodeToString(p.AppendHeader(nil)), "body": hex.EncodeToString(p.Body),
	})
}

func suiteOf(c *conformance.Case) lane.Suite {
	id, err := strconv.ParseUint(c.Input["suite"], 16, 16)
	if err != nil {
		panic(err)
	}
	suite, err := lane.NewSuite(uint16(id))
	if err != nil {
		panic(err)
	}
	return suite
}

func openPacket(o *lane.Opener, id, packet []byte) (lane.Opened, string) {
	// What a socket does: packets of another connection ID are not the lane's.
	if len(packet) < 9 || !bytes.Equal(packet[1:9], id) {
		return lane.Opened{}, "refused"
	}
	opened, err := o.Open(packet)
	var violation lane.Violation
	switch {
	case errors.As(err, &violation):
		return opened, "violation"
	case err != nil:
		return opened, "refused"
	}
	return opened, "accept"
}

func frames(c *conformance.Case) result {
	opener := lane.NewOpener(suiteOf(c), c.Bytes("secret"))
	opened, verdict := openPacket(opener, c.Bytes("id"), c.Bytes("packet"))
	if verdict != "accept" {
		return result{verdict: verdict}
	}
	if !bytes.Equal(opened.Frames, c.Bytes("frames")) {
		return result{verdict: "other frames"}
	}
	var f lane.Frames
	if f.Parse(opened.Frames) != nil {
		return result{verdict: "violation"}
	}
	for _, ack := range f.ACKs {
		if f.Ranges[ack.Start].Last >= number(c, "sent") {
			return result{verdict: "violation"}
		}
	}
	output := make(map[string]string)
	var datagrams []string
	for _, d := range f.Datagrams {
		datagrams = append(datagrams, hex.EncodeToString(d))
	}
	output["datagrams"] = strings.Join(datagrams, " ")
	for _, data := range f.Challenges {
		output["challenge"] = hex.EncodeToString(data[:])
	}
	for _, data := range f.Responses {
		output["response"] = hex.EncodeToString(data[:])
	}
	return accept(output)
}

func seal(c *conformance.Case) result {
	s := lane.NewSealer(suiteOf(c), c.Bytes("secret"), [8]byte(c.Bytes("id")))
	s.Next = number(c, "number")
	packet := append(s.Start(make([]byte, 0, 2048)), c.Bytes("frames")...)
	return accept(map[string]string{"packet": hex.EncodeToString(s.Seal(packet))})
}

// steps runs the cases of several packets or pieces.
func steps(t *testing.T, c *conformance.Case) {
	var step func(b []byte) result
	switch c.Kind {
	case "open":
		opener := lane.NewOpener(suiteOf(c), c.Bytes("secret"))
		step = func(b []byte) result {
			opened, verdict := openPacket(opener, c.Bytes("id"), b)
			return result{verdict, map[string]string{"number": fmt.Sprint(opened.Number)}}
		}
	case "pieces":
		var assembler pieces.Assembler
		now := time.Unix(0, 0)
		step = func(b []byte) result {
			p, err := wire.ParsePayload(b)
			if err != nil {
				return result{verdict: "malformed"}
			}
			whole, verdict := assembler.Add(&p, now)
			switch verdict {
			case pieces.Complete:
				return result{"complete", map[string]string{"datagram": hex.EncodeToString(whole)}}
			case pieces.Malformed:
				return result{verdict: "malformed"}
			default:
				return result{verdict: "none"}
			}
		}
	default:
		t.Fatalf("unknown kind %q", c.Kind)
	}
	for i, s := range c.Steps {
		t.Logf("step %d", i)
		compare(t, step(conformance.Bytes(s.Bytes)), s.Verdict, s.Output)
	}
}

func knockSeal(c *conformance.Case) result {
	key := ed25519.NewKeyFromSeed(c.Bytes("dialler_seed"))
	token, err := knock.Seal(bytes.NewReader(c.Bytes("ephemeral")), key, knock.PublicKey(c.Bytes("listener_key")),
		c.Bytes("dcid"), number(c, "seconds"), knock.HelloHash(c.Bytes("hello")))
	if err != nil {
		return result{verdict: err.Error()}
	}
	return accept(map[string]string{"token": hex.EncodeToString(token)})
}

func knockOpen(c *conformance.Case) result {
	key := ed25519.NewKeyFromSeed(c.Bytes("listener_seed"))
	opened, err := knock.Open(key, c.Bytes("dcid"), c.Bytes("token"), number(c, "now"), number(c, "window"))
	if err == nil {
		err = opened.CheckHello(c.Bytes("hello"))
	}
	for verdict, is := range map[string]error{
		"length": knock.ErrLength, "mac": knock.ErrMAC, "sealed": knock.ErrSealed, "clock": knock.ErrClock, "hello": knock.ErrHello,
	} {
		if errors.Is(err, is) {
			return result{verdict: verdict}
		}
	}
	if err != nil {
		return result{verdict: err.Error()}
	}
	return accept(map[string]string{"dialler_key": hex.EncodeToString(opened.Dialler[:]), "seconds": fmt.Sprint(opened.Seconds)})
}

func initial(c *conformance.Case) result {
	p, err := knock.ParseInitial(c.Bytes("datagram"))
	if err != nil {
		return result{verdict: "not an Initial"}
	}
	packets := []knock.Initial{p}
	if c.Input["second"] != "" {
		second, err := knock.ParseInitial(c.Bytes("second"))
		if err != nil {
			return result{verdict: "not an Initial"}
		}
		packets = append(packets, second)
	}
	hello, err := knock.HelloOf(packets...)
	switch {
	case errors.Is(err, knock.ErrIncomplete):
		return result{verdict: "incomplete"}
	case errors.Is(err, knock.ErrMalformed):
		return result{verdict: "malformed"}
	case err != nil:
		return result{verdict: "sealed"}
	}
	hash := knock.HelloHash(hello)
	return accept(map[string]string{
		"dcid": hex.EncodeToString(p.DCID), "scid": hex.EncodeToString(p.SCID), "token": hex.EncodeToString(p.Token),
		"hello_hash": hex.EncodeToString(hash[:]),
	})
}

func publicKey(c *conformance.Case) result {
	key, err := culvert.ParsePublicKey(c.Input["text"])
	if err != nil {
		return result{verdict: "malformed"}
	}
	return accept(map[string]string{"key": hex.EncodeToString(key[:])})
}

func possession(c *conformance.Case) result {
	message := wire.PossessionMessage(c.Bytes("exported"))
	return accept(map[string]string{"signature": hex.EncodeToString(ed25519.Sign(ed25519.NewKeyFromSeed(c.Bytes("seed")), message))})
}

func presharedProof(c *conformance.Case) result {
	proof := wire.KeyProof(c.Bytes("key"), c.Bytes("exported"), c.Input["sender"] == "listener")
	return accept(map[string]string{"proof": hex.EncodeToString(proof)})
}

func presharedLane(c *conformance.Case) result {
	secret := suiteOf(c).Mix(c.Bytes("key"), c.Bytes("exported"))
	return accept(map[string]string{"secret": hex.EncodeToString(secret)})
}

func x25519(c *conformance.Case) result {
	x := knock.PublicKey(c.Bytes("key")).X25519()
	return accept(map[string]string{"x25519": hex.EncodeToString(x[:])})
}

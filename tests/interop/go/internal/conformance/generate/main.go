// Generate writes the cases of tests/virtual/conformance from the tables of this folder:
//
//	go run ./internal/conformance/generate ../../virtual/conformance
//
// Verdicts, and all bytes of messages, payloads and frames, are written by hand from docs/wire-format.md. Where bytes
// must be sealed, this program seals them; that the other implementation opens them is the test.
package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"culvert.example/culvert/internal/conformance"
)

type (
	fields = map[string]string
	cases  = []conformance.Case
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate FOLDER")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func write(folder string) error {
	for name, make := range map[string]func() cases{
		"varints": varints, "messages": messages, "streams": streams, "payloads": payloads, "pieces": piecesOf,
		"frames": frames, "packets": packets, "knocks": knocks, "initials": initials, "names": names,
	} {
		var text bytes.Buffer
		encoder := json.NewEncoder(&text)
		encoder.SetIndent("", "  ")
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(make()); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(folder, name+".json"), text.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// x joins hexadecimal texts, in which spaces are for the reader.
func x(parts ...string) string {
	joined := strings.ReplaceAll(strings.Join(parts, ""), " ", "")
	if _, err := hex.DecodeString(joined); err != nil {
		panic(fmt.Sprintf("%q: %v", joined, err))
	}
	return joined
}

// n repeats a byte.
func n(value byte, count int) string {
	return hex.EncodeToString(bytes.Repeat([]byte{value}, count))
}

func h(b []byte) string { return hex.EncodeToString(b) }

// uvarint is protobuf's integer.
func uvarint(v uint64) string {
	var b []byte
	for ; v >= 0x80; v >>= 7 {
		b = append(b, byte(v)|0x80)
	}
	return h(append(b, byte(v)))
}

// num and str are fields of protobuf.
func num(number, value uint64) string { return uvarint(number<<3) + uvarint(value) }

func str(number uint64, content string) string {
	return uvarint(number<<3|2) + uvarint(uint64(len(x(content))/2)) + x(content)
}

// text is a string field.
func text(number uint64, content string) string { return str(number, h([]byte(content))) }

// quic is QUIC's shortest integer.
func quic(v int) string {
	switch {
	case v < 1<<6:
		return fmt.Sprintf("%02x", v)
	case v < 1<<14:
		return fmt.Sprintf("%04x", v|0x4000)
	default:
		return fmt.Sprintf("%08x", uint32(v)|0x8000_0000)
	}
}

// framed puts the length in front, as on a control stream.
func framed(envelope string) string { return quic(len(envelope)/2) + envelope }

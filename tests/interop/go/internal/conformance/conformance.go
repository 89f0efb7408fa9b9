// Package conformance reads the cases of tests/virtual/conformance: bytes in, verdict and bytes out, which every implementation
// of the wire format must agree with.
package conformance

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
)

// Case is one case. Which fields of input and output it has depends on its kind; tests/virtual/conformance/README.md lists
// them. Bytes are hexadecimal, numbers decimal.
type Case struct {
	Name    string            `json:"name"`
	Kind    string            `json:"kind"`
	Input   map[string]string `json:"input,omitempty"`
	Steps   []Step            `json:"steps,omitempty"`
	Verdict string            `json:"verdict,omitempty"`
	Output  map[string]string `json:"output,omitempty"`
}

// Step is one of several packets or payloads that come after each other.
type Step struct {
	Bytes   string            `json:"bytes"`
	Verdict string            `json:"verdict"`
	Output  map[string]string `json:"output,omitempty"`
}

// Bytes returns a field of the input as bytes.
func (c *Case) Bytes(field string) []byte { return Bytes(c.Input[field]) }

// Bytes reads hexadecimal; it panics on other text, which a generated file does not have.
func Bytes(text string) []byte {
	b, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return b
}

// Load reads all cases of a folder.
func Load(folder string) ([]Case, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.json"))
	if err != nil {
		return nil, err
	}
	var all []Case
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var cases []Case
		if err := json.Unmarshal(text, &cases); err != nil {
			return nil, err
		}
		all = append(all, cases...)
	}
	return all, nil
}

package wire

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The table of docs/wire-format.md and the constants have the same close codes.
func TestCloseCodesAreThoseOfTheDocument(t *testing.T) {
	text, err := os.ReadFile("../../../../../docs/wire-format.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "### Close codes")
	section, _, _ = strings.Cut(section, "\n## ")
	var documented []int
	for _, cell := range regexp.MustCompile(`\| (\d+) \|`).FindAllStringSubmatch(section, -1) {
		code, err := strconv.Atoi(cell[1])
		if err != nil {
			t.Fatal(err)
		}
		documented = append(documented, code)
	}
	slices.Sort(documented)
	known := []int{
		CloseShutdown, CloseViolation, CloseVersion, CloseReplaced, CloseKeyRemoved, CloseInternal, CloseIdle, CloseLimit, CloseSelf,
		CloseUnknownJoined, ClosePresharedKey, CloseTooNarrow,
	}
	if !slices.Equal(documented, known) {
		t.Errorf("documented: %v, known: %v", documented, known)
	}
}

package knock

import (
	"bytes"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"testing"
)

func seed(b byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{b}, 32))
}

// The example of docs/wire-format.md section 9.
const (
	exampleX25519 = "1b1b58dd50ea14b60da17b790cd02754d970c9bab864ebb3c0f3016fe51d3f57"
	exampleKnock  = "a6cb08444a99e86b99dc49e7b1862ed872cc5279fbb0e38629b8fe5252969e8d" +
		"88734cc0e7e748a25fdb329d754abbc985259d5727d9540f4270d5d07bda4286" +
		"05574850494e94bc886a2c50b9dff6a0f0d2e78740f00aff4251c3445aaf4c0f" +
		"2b74ff197cd798c1e9e64f8b5edca2a1d13820f1db33c3d5be4565ae05e86278" +
		"016633f4a958c61c"
	exampleSeconds = 1_700_000_000
)

var exampleDCID = []byte{1, 2, 3, 4, 5, 6, 7, 8}

func TestTheExampleOfTheDocument(t *testing.T) {
	dialler, listener := seed(1), seed(2)
	x := Public(dialler).X25519()
	if got := hex.EncodeToString(x[:]); got != exampleX25519 {
		t.Fatalf("X25519 form: %s", got)
	}
	hash := HelloHash([]byte("not a ClientHello"))
	random := bytes.NewReader(bytes.Repeat([]byte{3}, 32))
	sealed, err := Seal(random, dialler, Public(listener), exampleDCID, exampleSeconds, hash)
	if err != nil {
		t.Fatal(err)
	}
	if got := hex.EncodeToString(sealed); got != exampleKnock {
		t.Fatalf("knock: %s", got)
	}
	opened, err := Open(listener, exampleDCID, sealed, exampleSeconds+90, 90)
	if err != nil {
		t.Fatal(err)
	}
	if opened.Dialler != Public(dialler) || opened.Hello != hash || opened.Seconds != exampleSeconds {
		t.Fatalf("%+v", opened)
	}
}

func TestAKnockIsForOneKeyOneIDAndOneTime(t *testing.T) {
	sealed, _ := hex.DecodeString(exampleKnock)
	other := []byte{1, 2, 3, 4, 5, 6, 7, 9}
	cases := []struct {
		key    byte
		dcid   []byte
		now    uint64
		change int
		want   error
	}{
		{3, exampleDCID, exampleSeconds, -1, ErrMAC},
		{2, other, exampleSeconds, -1, ErrMAC},
		{2, exampleDCID, exampleSeconds + 91, -1, ErrClock},
		{2, exampleDCID, exampleSeconds + 1000, -1, ErrMAC},
		{2, exampleDCID, exampleSeconds, 40, ErrMAC},
		{2, exampleDCID, exampleSeconds, 130, ErrMAC},
	}
	for _, c := range cases {
		token := bytes.Clone(sealed)
		if c.change >= 0 {
			token[c.change] ^= 1
		}
		if _, err := Open(seed(c.key), c.dcid, token, c.now, 90); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

package culvert_test

import (
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"culvert.example/culvert"
)

func newPresharedKey(t testing.TB) (key culvert.PresharedKey) {
	t.Helper()
	if _, err := rand.Read(key[:]); err != nil {
		t.Fatal(err)
	}
	return key
}

// with is the configuration of an end that shares these keys with everybody.
func with(c *culvert.Config, keys ...culvert.PresharedKey) {
	c.PresharedKeys = func(culvert.PublicKey) []culvert.PresharedKey { return keys }
}

func TestPresharedKeysOfBothEnds(t *testing.T) {
	t.Parallel()
	older, newer := newPresharedKey(t), newPresharedKey(t)
	for name, c := range map[string][2][]culvert.PresharedKey{
		"the same":                   {{newer}, {newer}},
		"a rotation, dialler first":  {{newer, older}, {older}},
		"a rotation, listener first": {{older}, {newer, older}},
		"orders that differ":         {{newer, older}, {older, newer}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, 2, func(dialler, listener *culvert.Config) {
				with(dialler, c[0]...)
				with(listener, c[1]...)
			})
			for _, from := range []*culvert.Peer{p.dialled, p.accepted} {
				converse(t, openFlow(t, from, "echo"), 100, 1000)
			}
		})
	}
}

func TestWithoutAPresharedKeyInCommonNobodyConnects(t *testing.T) {
	t.Parallel()
	one, other := newPresharedKey(t), newPresharedKey(t)
	for name, c := range map[string]struct {
		lanes int
		keys  [2][]culvert.PresharedKey
	}{
		"the dialler's only":  {2, [2][]culvert.PresharedKey{{one}, nil}},
		"the listener's only": {2, [2][]culvert.PresharedKey{nil, {one}}},
		"different ones":      {2, [2][]culvert.PresharedKey{{one}, {other}}},
		"no lanes":            {-1, [2][]culvert.PresharedKey{{one}, {one}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			key := newKey(t)
			offers := culvert.Config{Key: newKey(t), Lanes: c.lanes, Authorize: func(culvert.PublicKey) bool { return true }}
			dials := culvert.Config{Key: key, Lanes: c.lanes}
			with(&offers, c.keys[1]...)
			with(&dials, c.keys[0]...)
			l := listen(t, offers)
			if peer, err := culvert.Dial(within(t), l.Link(), dials); err == nil {
				peer.Close()
				t.Fatal("connected")
			}
		})
	}
}

// write makes a file of the agent's folder with a key.
func (a *agent) write(name string, key culvert.PresharedKey) {
	a.t.Helper()
	text := base64.RawURLEncoding.EncodeToString(key[:]) + "\n"
	if err := os.WriteFile(a.file(name), []byte(text), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// reload has the agent follow another line of its [[peer]].
func (a *agent) reload(ofPeer string) {
	a.t.Helper()
	text, err := os.ReadFile(a.file("agent.toml"))
	if err == nil {
		changed := strings.Replace(string(text), a.ofPeer, ofPeer, 1)
		err = os.WriteFile(a.file("agent.toml"), []byte(changed), 0o600)
	}
	if err == nil {
		var out []byte
		if out, err = exec.Command(a.program, "reload", "--config", a.file("agent.toml")).CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	}
	if err != nil {
		a.t.Fatal(err)
	}
	a.ofPeer = ofPeer
}

func TestPresharedKeyOfAnAgentAndItsRotation(t *testing.T) {
	t.Parallel()
	for _, dials := range []bool{true, false} {
		name := map[bool]string{true: "we dial", false: "the agent dials"}[dials]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, key, a := newEcho(t), newKey(t), prepareAgent(t)
			older, newer := newPresharedKey(t), newPresharedKey(t)
			a.write("older.psk", older)
			a.write("newer.psk", newer)
			a.ofPeer = `preshared_key_file = "older.psk"`
			config := culvert.Config{Key: key, Services: e.services(), Lanes: 2, Logger: logger()}
			with(&config, newer, older)
			var peer *culvert.Peer
			if dials {
				a.run(e, culvert.PublicOf(key), "")
				peer = dial(t, a.link(), config)
			} else {
				config.Authorize = func(k culvert.PublicKey) bool { return k == a.key }
				l := listen(t, config)
				a.run(e, culvert.PublicOf(key), l.Address().String())
				var err error
				if peer, err = l.Accept(within(t)); err != nil {
					t.Fatal(err)
				}
			}
			if err := peer.LanesUp(within(t), 1); err != nil {
				t.Fatal(err)
			}
			flow := openFlow(t, peer, "echo")
			converse(t, flow, 100, 1000)
			newest := func() (epoch uint64) {
				for _, l := range peer.Stats().Lanes {
					epoch = max(epoch, l.Epoch)
				}
				return epoch
			}
			before := newest()
			a.reload(`preshared_key_file = ["newer.psk", "older.psk"]`)
			eventually(t, "the lanes are opened again", func() bool { return newest() > before })
			converse(t, flow, 100, 1000)
			a.reload(`preshared_key_file = "newer.psk"`)
			converse(t, flow, 100, 1000)
			if !strings.Contains(a.status(), `"preshared_key_in_use":1`) {
				t.Fatalf("the agent's status: %s", a.status())
			}
		})
	}
}

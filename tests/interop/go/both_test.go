package culvert_test

import (
	"errors"
	"fmt"
	"net"
	"testing"

	"culvert.example/culvert"
)

// Both ends are this package.

// pair is a dialler of a listener that offers an echo.
type pair struct {
	listener *culvert.Listener
	dialled  *culvert.Peer
	accepted *culvert.Peer
	echo     *echo
}

func newPair(t *testing.T, lanes int, change func(dialler, listener *culvert.Config)) *pair {
	t.Helper()
	e := newEcho(t)
	key := newKey(t)
	offers := culvert.Config{
		Key: newKey(t), Services: e.services(), Lanes: lanes, Logger: logger(),
		Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
	}
	dials := culvert.Config{Key: key, Services: e.services(), Lanes: lanes, Logger: logger()}
	if change != nil {
		change(&dials, &offers)
	}
	l := listen(t, offers)
	p := &pair{listener: l, dialled: dial(t, l.Link(), dials), echo: e}
	var err error
	if p.accepted, err = l.Accept(within(t)); err != nil {
		t.Fatal(err)
	}
	return p
}

// modes are with lanes and without.
var modes = map[string]int{"lanes": 2, "standard": -1}

func TestFlowsAndStreamsBothWays(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, lanes, nil)
			for _, from := range []*culvert.Peer{p.dialled, p.accepted} {
				flow := openFlow(t, from, "echo")
				exchange(t, flow, []byte("first"))
				converse(t, flow, 200, 1100)
				stream(t, from, 1<<20)
			}
		})
	}
}

func TestDatagramsInPieces(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, lanes, nil)
			flow := openFlow(t, p.dialled, "large")
			exchange(t, flow, random(20000))
			converse(t, flow, 20, 9000)
			converse(t, flow, 2, 65507)
			small := openFlow(t, p.dialled, "echo")
			exchange(t, small, []byte("x"))
			if _, err := small.Write(random(9000)); !errors.Is(err, culvert.ErrTooLarge) {
				t.Fatalf("9000 bytes to a service without pieces: %v", err)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	p := newPair(t, 1, nil)
	if _, err := p.dialled.OpenFlow("none"); !errors.Is(err, culvert.ErrNoService) {
		t.Fatal(err)
	}
	if _, err := p.dialled.OpenStream(within(t), "large"); !errors.Is(err, culvert.ErrNoService) {
		t.Fatal(err)
	}
}

func TestOtherAddressFamilies(t *testing.T) {
	t.Parallel()
	for address, reach := range map[string]string{"[::1]:0": "[::1]", ":0": "127.0.0.1", "[::]:0": "[::1]"} {
		t.Run(address+" from "+reach, func(t *testing.T) {
			t.Parallel()
			if conn, err := net.ListenPacket("udp6", "[::1]:0"); err != nil {
				t.Skipf("needs the address ::1: %v", err)
			} else {
				conn.Close()
			}
			e, key := newEcho(t), newKey(t)
			l, err := culvert.Listen(address, culvert.Config{
				Key: newKey(t), Services: e.services(), Lanes: 2, Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			link := culvert.Link{Address: fmt.Sprintf("%s:%d", reach, l.Address().Port()), Key: l.Link().Key}
			p := dial(t, link, culvert.Config{Key: key, Lanes: 2, Logger: logger()})
			flow := openFlow(t, p, "echo")
			exchange(t, flow, []byte("first"))
			converse(t, flow, 50, 1000)
			stream(t, p, 200_000)
		})
	}
}

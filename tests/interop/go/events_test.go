package culvert_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"culvert.example/culvert"
	"culvert.example/culvert/internal/knock"
)

// What happens to sessions: key updates, other addresses, restarts, replays. Each row is run with the agent as the
// other end, and with this package at both.

// updateAfter has a lane update its keys several times within a test.
const updateAfter = 150

func updated(p *culvert.Peer) (ours, theirs uint64) {
	for _, l := range p.Stats().Lanes {
		ours, theirs = ours+l.KeyUpdates, theirs+l.PeerKeyUpdates
	}
	return ours, theirs
}

func refusedForKeys(p *culvert.Peer) (count uint64) {
	for _, l := range p.Stats().Lanes {
		count += l.RefusedKey
	}
	return count
}

func checkUpdates(t *testing.T, p *culvert.Peer) {
	t.Helper()
	flow := openFlow(t, p, "echo")
	exchange(t, flow, []byte("first"))
	eventually(t, "three key updates, each of which the other end follows", func() bool {
		converse(t, flow, 50, 500)
		ours, theirs := updated(p)
		return ours >= 3 && theirs >= 3
	})
	if count := refusedForKeys(p); count != 0 {
		t.Fatalf("%d packets were refused for their key", count)
	}
}

func TestKeyUpdates(t *testing.T) {
	t.Parallel()
	set := func(c *culvert.Config) { c.KeyUpdateAfter = updateAfter }
	t.Run("Go to Go", func(t *testing.T) {
		t.Parallel()
		p := newPair(t, 1, func(d, _ *culvert.Config) { set(d) })
		checkUpdates(t, p.dialled)
	})
	t.Run("Go to the agent", func(t *testing.T) {
		t.Parallel()
		_, p := dialled(t, 1, set)
		checkUpdates(t, p)
	})
	t.Run("the agent to Go", func(t *testing.T) {
		t.Parallel()
		_, _, p := accepted(t, 1, set)
		checkUpdates(t, p)
	})
}

// epochs tells whether lanes were opened again.
func epochs(p *culvert.Peer) (epochs uint64) {
	for _, l := range p.Stats().Lanes {
		epochs += l.Epoch
	}
	return epochs
}

func moves(p *culvert.Peer) (count uint64) {
	for _, l := range p.Stats().Lanes {
		count += l.Moves
	}
	return count
}

// roam moves the dialler behind the hop and checks that the flow and a forward go on, on the same lanes if sameLanes. A
// listener that has something to say and hears nothing from the dialler's new address has its lanes opened again.
func roam(t *testing.T, h *hop, p *culvert.Peer, sameLanes bool) {
	t.Helper()
	flow := openFlow(t, p, "echo")
	exchange(t, flow, []byte("first"))
	if sameLanes {
		if err := p.LanesUp(within(t), 2); err != nil {
			t.Fatal(err)
		}
	}
	// A machine that is too busy has lanes opened again although their path is well: one round of several is enough.
	same := 0
	for round := 0; round < 2 || sameLanes && same == 0 && round < 6; round++ {
		before := epochs(p)
		h.forget()
		exchange(t, flow, random(300))
		stream(t, p, 100_000)
		converse(t, flow, 50, 1000)
		if epochs(p) == before {
			same++
		}
	}
	if sameLanes && same == 0 {
		t.Fatal("lanes are opened again after each change")
	}
}

func TestTheDiallersAddressChanges(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run("Go to Go, "+name, func(t *testing.T) {
			t.Parallel()
			e, key := newEcho(t), newKey(t)
			l := listen(t, culvert.Config{
				Key: newKey(t), Services: e.services(), Lanes: lanes, Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
			})
			h := newHop(t, l.Address().String())
			link := culvert.Link{Address: h.address(), Key: l.Link().Key}
			p := dial(t, link, culvert.Config{Key: key, Lanes: lanes, Logger: logger()})
			roam(t, h, p, lanes > 0)
			accepted, err := l.Accept(within(t))
			if err != nil {
				t.Fatal(err)
			}
			if lanes > 0 && moves(accepted) == 0 {
				t.Fatal("no lane has moved")
			}
		})
		t.Run("Go to the agent, "+name, func(t *testing.T) {
			t.Parallel()
			e, key := newEcho(t), newKey(t)
			a := newAgent(t, e, culvert.PublicOf(key))
			h := newHop(t, a.underlay)
			p := dial(t, culvert.Link{Address: h.address(), Key: a.key}, culvert.Config{Key: key, Lanes: lanes, Logger: logger()})
			roam(t, h, p, lanes > 0)
		})
		t.Run("the agent to Go, "+name, func(t *testing.T) {
			t.Parallel()
			e, key := newEcho(t), newKey(t)
			a := prepareAgent(t)
			l := listen(t, culvert.Config{
				Key: key, Services: e.services(), Lanes: lanes, Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == a.key },
			})
			h := newHop(t, l.Address().String())
			a.run(e, culvert.PublicOf(key), h.address())
			p, err := l.Accept(within(t))
			if err != nil {
				t.Fatal(err)
			}
			roam(t, h, p, false)
		})
	}
}

func TestRebind(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, p := dialled(t, lanes, nil)
			flow := openFlow(t, p, "echo")
			exchange(t, flow, []byte("first"))
			for range 2 {
				if err := p.Rebind("127.0.0.1:0"); err != nil {
					t.Fatal(err)
				}
				exchange(t, flow, random(300))
				stream(t, p, 100_000)
			}
		})
	}
}

func TestTheListenerRestarts(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run("the agent, "+name, func(t *testing.T) {
			t.Parallel()
			a, p := dialled(t, lanes, nil)
			flow := openFlow(t, p, "echo")
			exchange(t, flow, []byte("first"))
			a.kill()
			a.start()
			exchange(t, flow, []byte("after the restart"))
			eventually(t, "forwards work", func() bool {
				s, err := p.OpenStream(within(t), "echo")
				if err == nil {
					s.Close()
				}
				return err == nil
			})
			stream(t, p, 100_000)
		})
		t.Run("Go, "+name, func(t *testing.T) {
			t.Parallel()
			e, key := newEcho(t), newKey(t)
			a := prepareAgent(t)
			config := culvert.Config{
				Key: key, Services: e.services(), Lanes: lanes, Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == a.key },
			}
			l := listen(t, config)
			address := l.Address().String()
			a.run(e, culvert.PublicOf(key), address)
			client := a.client("udp")
			exchange(t, client, []byte("first"))
			l.Close()
			again, err := culvert.Listen(address, config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { again.Close() })
			exchange(t, client, []byte("after the restart"))
		})
	}
}

// client is an application that uses the peer's echo through a local port.
func client(t *testing.T, p *culvert.Peer) net.Conn {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	local, err := culvert.ForwardPorts(ctx, p, "127.0.0.1:0", "echo")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("udp", local.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func TestGoRestartsAtBothEnds(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e, key := newEcho(t), newKey(t)
			config := culvert.Config{
				Key: newKey(t), Services: e.services(), Lanes: lanes, Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
			}
			l := listen(t, config)
			link, address := l.Link(), l.Address().String()
			dials := culvert.Config{Key: key, Services: e.services(), Lanes: lanes, Logger: logger()}
			p := dial(t, link, dials)
			accepted, err := l.Accept(within(t))
			if err != nil {
				t.Fatal(err)
			}
			// An end that shuts down closes its flows: what goes on is a local port, whose client opens another.
			theirs := client(t, accepted)
			exchange(t, theirs, []byte("first"))
			// The dialler is replaced by another process: the flow of the listener goes on.
			p.Close()
			p = dial(t, link, dials)
			exchange(t, theirs, []byte("after the dialler's restart"))
			ours := client(t, p)
			exchange(t, ours, []byte("ours"))
			l.Close()
			again, err := culvert.Listen(address, config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { again.Close() })
			exchange(t, ours, []byte("after the listener's restart"))
		})
	}
}

func TestTheDiallerRestarts(t *testing.T) {
	t.Parallel()
	t.Run("the agent", func(t *testing.T) {
		t.Parallel()
		a, _, p := accepted(t, 2, nil)
		flow := openFlow(t, p, "echo")
		exchange(t, flow, []byte("first"))
		a.kill()
		a.start()
		exchange(t, flow, []byte("after the restart"))
		exchange(t, a.client("udp"), []byte("from the new process"))
	})
	t.Run("Go", func(t *testing.T) {
		t.Parallel()
		e, key := newEcho(t), newKey(t)
		a := newAgent(t, e, culvert.PublicOf(key))
		client := a.client("udp")
		for range 2 {
			p, err := culvert.Dial(within(t), a.link(), culvert.Config{Key: key, Services: e.services(), Logger: logger()})
			if err != nil {
				t.Fatal(err)
			}
			exchange(t, openFlow(t, p, "echo"), []byte("ours"))
			exchange(t, client, []byte("theirs"))
			p.Close()
		}
	})
}

// replay sends recorded datagrams from another socket, and returns whether anything came back within a second.
func replay(t *testing.T, to string, datagrams [][]byte) bool {
	t.Helper()
	conn, err := net.Dial("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, datagram := range datagrams {
		if _, err := conn.Write(datagram); err != nil {
			t.Fatal(err)
		}
	}
	_ = conn.SetReadDeadline(time.Now().Add(time.Second))
	_, err = conn.Read(make([]byte, 2048))
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

func TestAReplayedKnockIsRefused(t *testing.T) {
	t.Parallel()
	t.Run("Go's, by the agent", func(t *testing.T) {
		t.Parallel()
		e, key := newEcho(t), newKey(t)
		a := newAgent(t, e, culvert.PublicOf(key))
		h := newHop(t, a.underlay)
		p := dial(t, culvert.Link{Address: h.address(), Key: a.key}, culvert.Config{Key: key, Logger: logger()})
		if replay(t, a.underlay, h.recorded()) {
			t.Fatal("it was answered while the connection lives")
		}
		p.Close()
		if replay(t, a.underlay, h.recorded()) {
			t.Fatal("it was answered after the connection")
		}
	})
	t.Run("Go's, by Go", func(t *testing.T) {
		t.Parallel()
		e, key := newEcho(t), newKey(t)
		l := listen(t, culvert.Config{
			Key: newKey(t), Services: e.services(), Logger: logger(),
			Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
		})
		to := l.Address().String()
		h := newHop(t, to)
		p := dial(t, culvert.Link{Address: h.address(), Key: l.Link().Key}, culvert.Config{Key: key, Logger: logger()})
		if replay(t, to, h.recorded()) {
			t.Fatal("it was answered while the connection lives")
		}
		p.Close()
		if replay(t, to, h.recorded()) {
			t.Fatal("it was answered after the connection")
		}
	})
	t.Run("the agent's, by Go", func(t *testing.T) {
		t.Parallel()
		e, key := newEcho(t), newKey(t)
		a := prepareAgent(t)
		l := listen(t, culvert.Config{
			Key: key, Services: e.services(), Logger: logger(),
			Authorize: func(k culvert.PublicKey) bool { return k == a.key },
		})
		h := newHop(t, l.Address().String())
		a.run(e, culvert.PublicOf(key), h.address())
		if _, err := l.Accept(within(t)); err != nil {
			t.Fatal(err)
		}
		to := l.Address().String()
		if replay(t, to, h.recorded()) {
			t.Fatal("it was answered while the connection lives")
		}
		a.kill()
		h.forget()
		if replay(t, to, h.recorded()) {
			t.Fatal("it was answered after the connection")
		}
	})
}

func TestStrangersGetNoAnswer(t *testing.T) {
	t.Parallel()
	e, key := newEcho(t), newKey(t)
	l := listen(t, culvert.Config{
		Key: newKey(t), Services: e.services(), Logger: logger(),
		Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
	})
	to := l.Address().String()
	version := append([]byte{0xc0, 0x6b, 0x33, 0x43, 0xcf, 8}, random(1194)...)
	plain := append([]byte{0xc0, 0, 0, 0, 1, 8}, random(1194)...)
	short := append([]byte{0x40}, random(60)...)
	zeroRTT := append([]byte{0xd0, 0, 0, 0, 1, 8}, random(1194)...)
	handshake := append([]byte{0xe0, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0x44, 0}, random(1100)...)
	if replay(t, to, [][]byte{version, plain, short, zeroRTT, handshake, {}, {0xff}}) {
		t.Fatal("an answer to a stranger")
	}
	// One who knows the key of the listener, and is not admitted.
	_, err := culvert.Dial(within(t), l.Link(), culvert.Config{Key: newKey(t), Logger: logger()})
	if err == nil {
		t.Fatal("a stranger was admitted")
	}
	if l.Refused() == 0 {
		t.Fatal("nothing was counted")
	}
}

// TestARetryIsFollowed has strangers who know the agent's key spend the budget of our address: then the agent asks us
// for a proof of it.
func TestARetryIsFollowed(t *testing.T) {
	t.Parallel()
	e, key := newEcho(t), newKey(t)
	a := newAgent(t, e, culvert.PublicOf(key))
	h := newHop(t, a.underlay)
	strangers, err := net.Dial("udp", a.underlay)
	if err != nil {
		t.Fatal(err)
	}
	defer strangers.Close()
	for range 20 {
		flood(t, strangers, a.key)
		p := dial(t, culvert.Link{Address: h.address(), Key: a.key}, culvert.Config{Key: key, Lanes: -1, Logger: logger()})
		exchange(t, openFlow(t, p, "echo"), []byte("hello"))
		p.Close()
		for _, datagram := range h.recorded() {
			if initial, err := knock.ParseInitial(datagram); err == nil && len(initial.Token) == 236 {
				return
			}
		}
		h.forgetRecorded()
	}
	t.Fatal("the agent sends no Retry")
}

// flood sends knocks of a key that is not admitted: about two seconds of what an agent opens for one address.
func flood(t *testing.T, to net.Conn, listener culvert.PublicKey) {
	t.Helper()
	hello := append([]byte{6, 0, 0x40, 104, 1, 0, 0, 100}, random(100)...)
	frames := append(hello, make([]byte, 1200)...)
	knocker := knock.Knocker{Key: newKey(t), Listener: knock.PublicKey(listener), Random: rand.Reader, Now: time.Now}
	for range 400 {
		for _, datagram := range knocker.Outgoing(knock.InitialForTest(random(8), random(8), nil, 0, 2, frames)) {
			_, _ = to.Write(datagram)
		}
	}
}

func TestALossyPathCostsWhatItLoses(t *testing.T) {
	t.Parallel()
	e, key := newEcho(t), newKey(t)
	a := newAgent(t, e, culvert.PublicOf(key))
	h := newHop(t, a.underlay)
	p := dial(t, culvert.Link{Address: h.address(), Key: a.key}, culvert.Config{Key: key, Lanes: 1, Logger: logger()})
	exchange(t, openFlow(t, p, "echo"), []byte("first"))
	h.loseOneOf(20)
	// On a machine that is too busy more is lost: one attempt of several is enough.
	var err error
	for range 4 {
		if err = lossy(t, p); err == nil {
			break
		}
		t.Log(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	stream(t, p, 200_000)
}

// lossy sends datagrams to the echo over a path that loses one of twenty each way, and checks what was lost.
func lossy(t *testing.T, p *culvert.Peer) error {
	const count = 1000
	lost := func() (sum uint64) {
		for _, l := range p.Stats().Lanes {
			sum += l.Lost
		}
		return sum
	}
	flow := openFlow(t, p, "echo")
	defer flow.Close()
	epoch, before := epochs(p), lost()
	received := make(chan int)
	go func() {
		n, buffer := 0, make([]byte, 2048)
		for {
			if _, err := flow.Read(buffer); err != nil {
				received <- n
				return
			}
			n++
		}
	}()
	for range count {
		// One that cannot be sent is a lost one.
		_, _ = flow.Write(random(1000))
		time.Sleep(200 * time.Microsecond)
	}
	time.Sleep(time.Second)
	_ = flow.SetReadDeadline(time.Now())
	if got := <-received; got < count*8/10 || got > count*97/100 {
		return fmt.Errorf("%d of %d datagrams came back", got, count)
	}
	if sum := lost() - before; sum < count/40 || sum > count/10 {
		return fmt.Errorf("%d packets are known to be lost", sum)
	}
	if after := epochs(p); after != epoch {
		return fmt.Errorf("the lane was opened again: epochs %d, then %d", epoch, after)
	}
	return nil
}

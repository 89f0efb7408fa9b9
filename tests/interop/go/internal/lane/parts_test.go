package lane

import (
	"encoding/hex"
	"net/netip"
	"slices"
	"testing"
	"time"
)

func TestTheWindowOpensEachNumberOnce(t *testing.T) {
	var w Window
	add := func(number uint64) bool {
		fresh := w.Fresh(number)
		if fresh {
			w.Add(number)
		}
		return fresh
	}
	for _, step := range []struct {
		number uint64
		fresh  bool
	}{
		{0, true}, {0, false}, {5, true}, {3, true}, {3, false}, {16389, true}, {5, false}, {4, false}, {6, true},
		{1 << 20, true}, {1<<20 - 16383, true}, {1<<20 - 16384, false}, {1 << 40, true}, {1<<40 - 1, true}, {1 << 20, false},
	} {
		if got := add(step.number); got != step.fresh {
			t.Fatalf("%d: %v", step.number, got)
		}
	}
}

func TestTheSecretsContextOfTheDocument(t *testing.T) {
	if got := hex.EncodeToString(ExporterContext(3, false, 7)); got != "0003000000000000000007" {
		t.Fatal(got)
	}
}

func TestRangesToAcknowledge(t *testing.T) {
	var a acks
	for _, number := range []uint64{0, 1, 5, 3, 2, 9, 4, 7} {
		a.insert(number)
	}
	if want := []Range{{9, 9}, {7, 7}, {0, 5}}; !slices.Equal(a.ranges, want) {
		t.Fatalf("%v", a.ranges)
	}
	for number := uint64(100); number < 1000; number += 2 {
		a.insert(number)
	}
	if len(a.ranges) != maxRanges || a.ranges[0].Last != 998 {
		t.Fatalf("%d ranges: %v", len(a.ranges), a.ranges[0])
	}
	// One that is older than all that are kept is forgotten.
	a.insert(50)
	if len(a.ranges) != maxRanges {
		t.Fatal(len(a.ranges))
	}
}

func TestPacketsAreLostByThreeNewerOnesOrByTime(t *testing.T) {
	var s sent
	var out outcome
	at := func(ms int) time.Duration { return time.Duration(ms) * time.Millisecond }
	for number := range uint64(10) {
		s.add(number, at(int(number)), 1000, recordSent)
	}
	s.onACK([]Range{{2, 3}}, 0, at(20), &out)
	if s.Lost != 1 || s.outstanding != 7 {
		t.Fatalf("lost %d, outstanding %d: number 0 only is three below 3", s.Lost, s.outstanding)
	}
	// Number 1 is lost by time: 9/8 of the round trip.
	s.onACK([]Range{{4, 4}}, 0, at(60), &out)
	if s.Lost != 2 || s.low != 5 {
		t.Fatalf("lost %d, low %d", s.Lost, s.low)
	}
	s.onACK([]Range{{0, 9}}, 0, at(61), &out)
	if s.outstanding != 0 || s.Acked != 10 || s.Lost != 2 || s.Late != 2 {
		t.Fatalf("outstanding %d, acked %d, lost %d, late %d", s.outstanding, s.Acked, s.Lost, s.Late)
	}
}

func TestMorePacketsThanTheRingHolds(t *testing.T) {
	var s sent
	for number := range uint64(ringLen + 5) {
		s.add(number, 0, 1200, recordSent)
	}
	if s.Lost != 5 || s.outstanding != ringLen || s.low != 5 {
		t.Fatalf("lost %d, outstanding %d, low %d", s.Lost, s.outstanding, s.low)
	}
}

var (
	home  = netip.MustParseAddrPort("192.0.2.1:1000")
	away  = netip.MustParseAddrPort("192.0.2.1:2000")
	epoch = time.Unix(1_700_000_000, 0)
)

const roundTrip = 50 * time.Millisecond

// validated are paths whose present address is home.
func validated(t *testing.T) *paths {
	t.Helper()
	p := &paths{}
	p.heard(home, 1200, true, epoch)
	if !p.answered(p.current.challenge) {
		t.Fatal("the first answer does not validate")
	}
	return p
}

// pass asks what is due for a while; answers says from which address challenges are answered.
func pass(p *paths, from time.Time, answers func(netip.AddrPort) bool) time.Time {
	for end := from.Add(2 * giveUp); from.Before(end); from = from.Add(time.Millisecond) {
		for _, path := range p.due(from, roundTrip) {
			if path != nil && answers(path.addr) {
				p.answered(path.challenge)
			}
		}
		p.tick(from, roundTrip)
	}
	return from
}

func TestALaneMovesToAnAddressThatAnswersAlone(t *testing.T) {
	p := validated(t)
	p.heard(away, 1200, true, epoch)
	pass(p, epoch, func(a netip.AddrPort) bool { return a == away })
	if p.current.addr != away || !p.current.validated {
		t.Fatalf("%v", p.current.addr)
	}
	// The address before is asked alone.
	later := epoch.Add(time.Minute)
	p.heard(home, 1200, true, later)
	if p.current.asking {
		t.Fatal("the present address is asked")
	}
	pass(p, later, func(a netip.AddrPort) bool { return a == home })
	if p.current.addr != home {
		t.Fatalf("%v", p.current.addr)
	}
}

func TestALaneStaysWhereThePresentAddressAnswers(t *testing.T) {
	p := validated(t)
	p.heard(away, 1200, true, epoch)
	pass(p, epoch, func(netip.AddrPort) bool { return true })
	if p.current.addr != home || p.candidate != nil {
		t.Fatalf("%v, %v", p.current.addr, p.candidate)
	}
	// A copy of an older packet moves nothing, and neither does an address that never answers.
	p.heard(away, 1200, false, epoch)
	if p.candidate != nil {
		t.Fatal("an old packet made a candidate")
	}
	p.heard(away, 1200, true, epoch)
	pass(p, epoch, func(netip.AddrPort) bool { return false })
	if p.current.addr != home || p.candidate != nil {
		t.Fatalf("%v, %v", p.current.addr, p.candidate)
	}
}

func TestAnAddressThatIsNotValidatedGetsThreeTimesItsBytes(t *testing.T) {
	p := &path{addr: away, received: 400}
	if p.room() != 1200 {
		t.Fatal(p.room())
	}
	p.sent = 1200
	if p.room() != 0 {
		t.Fatal(p.room())
	}
}

// search runs an MTU search over a path that carries so many bytes.
func search(m *mtu, carries int, now time.Time) time.Time {
	for range 10_000 {
		if size := m.want(now, roundTrip); size > 0 && size <= carries {
			m.arrived(size, now)
		}
		now = now.Add(10 * time.Millisecond)
	}
	return now
}

func TestTheMTUIsFoundAndLostAgain(t *testing.T) {
	for _, carries := range []int{1200, 1280, 1400, 1452, 9000} {
		m := newMTU(MaxSize)
		now := search(&m, carries, epoch)
		if best := min(carries, MaxSize); m.size > best || m.size < best-probeStep {
			t.Fatalf("%d of %d", m.size, carries)
		}
		m.lostLarge(now)
		search(&m, 1250, now)
		if m.size > 1250 {
			t.Fatalf("%d of 1250, after %d", m.size, carries)
		}
	}
}

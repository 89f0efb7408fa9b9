package lane

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func at(ms int) time.Duration { return time.Duration(ms) * time.Millisecond }

// eighty is a round trip of 80 ms: steps of 20.
func eighty() *rtt {
	var r rtt
	r.sample(at(80), 0)
	return &r
}

func TestTheWindowWidensOnceInARoundTripAtMostToTwiceItself(t *testing.T) {
	var r reordering
	rtt := eighty()
	if r.seen() || r.lossDelay(rtt) != at(90) {
		t.Fatalf("%+v: %v", r, r.lossDelay(rtt))
	}
	for _, step := range []struct {
		number, next uint64
		age, window  time.Duration
	}{
		{5, 10, at(81), at(20)},
		{9, 12, at(125), at(20)}, // it was sent before the window was widened
		{10, 20, at(1000), at(40)},
		{20, 30, at(125), at(60)},
		{30, 40, at(1000), at(80)},
		{40, 50, at(1000), at(80)}, // no more than a round trip
	} {
		r.spurious(step.number, step.age, step.next, rtt)
		if got := r.window(rtt); got != step.window {
			t.Fatalf("after %d: %v", step.number, got)
		}
	}
	if r.lossDelay(rtt) != at(160) {
		t.Fatal(r.lossDelay(rtt))
	}
}

func TestTheWindowShrinksToWhatSixteenRecoveriesNeeded(t *testing.T) {
	var r reordering
	rtt := eighty()
	for number := range uint64(3) {
		r.spurious(number, at(145), number+1, rtt)
	}
	next := uint64(100)
	for _, step := range []struct{ late, window time.Duration }{
		{at(125), at(60)}, {0, at(20)}, {at(30), at(20)}, {0, 0},
	} {
		if step.late > 0 {
			r.late(step.late, rtt)
		}
		for range persistence {
			// Two losses of a round trip are one recovery.
			r.lost(next-1, next)
			r.lost(next-1, next)
			next += 10
		}
		if got := r.window(rtt); got != step.window {
			t.Fatalf("%v, not %v", got, step.window)
		}
	}
}

// arrival is a packet that comes late, or not at all.
type arrival struct {
	number uint64
	at     time.Duration
}

// scramble sends count packets, one each gap, over a path on which each needs 40 ms and up to jitter more or less, and
// which loses one of lose; the ACKs of the other end come back after 40 ms. It returns what the sender knows in the end,
// and how many were lost.
func scramble(count uint64, gap, jitter time.Duration, lose uint64) (s *sent, lost uint64) {
	random := rand.New(rand.NewPCG(1, 2))
	var arrivals []arrival
	for number := range count {
		if lose > 0 && random.Uint64N(lose) == 0 {
			lost++
			continue
		}
		late := time.Duration(random.Int64N(2*int64(jitter)+1)) - jitter
		arrivals = append(arrivals, arrival{number, time.Duration(number)*gap + at(40) + late})
	}
	slices.SortStableFunc(arrivals, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })

	s = &sent{}
	var (
		a       acks
		pending []ack
		frames  Frames
		out     outcome
	)
	hear := func(until time.Duration) {
		for len(pending) > 0 && pending[0].at <= until {
			for s.next < count && time.Duration(s.next)*gap <= pending[0].at {
				s.add(s.next, time.Duration(s.next)*gap, 1200, recordSent)
			}
			if err := frames.Parse(pending[0].frame); err != nil {
				panic(err)
			}
			s.onACK(frames.Ranges, 0, pending[0].at, &out)
			pending = pending[1:]
		}
	}
	for _, arrival := range arrivals {
		now := epoch.Add(arrival.at)
		hear(arrival.at)
		a.add(arrival.number, now, true, false, minAckDelay)
		if a.isDue(now) {
			pending = append(pending, ack{arrival.at + at(40), a.frame(nil, now, minPacket-MinPacket)})
		}
	}
	hear(1 << 62)
	return s, lost
}

// ack is an ACK frame on its way.
type ack struct {
	at    time.Duration
	frame []byte
}

func TestPacketsThatOvertakeEachOtherAreNotLost(t *testing.T) {
	const count = 200_000
	for _, path := range []struct {
		name   string
		gap    time.Duration
		jitter time.Duration
		lose   uint64
	}{
		{"in order", 60 * time.Microsecond, 0, 0},
		{"in order, 1 % lost", 60 * time.Microsecond, 0, 100},
		{"50 Mbit/s, 10 ms", 240 * time.Microsecond, at(10), 0},
		{"200 Mbit/s, 1 ms", 60 * time.Microsecond, at(1), 0},
		{"200 Mbit/s, 10 ms", 60 * time.Microsecond, at(10), 0},
		{"200 Mbit/s, 10 ms, 1 % lost", 60 * time.Microsecond, at(10), 100},
	} {
		s, lost := scramble(count, path.gap, path.jitter, path.lose)
		known := s.Lost - s.Late
		t.Logf("%s: %d lost, known %d; %d declared lost, %d of them late", path.name, lost, known, s.Lost, s.Late)
		// The end of the run has no later packets: a few losses stay unknown.
		if known > lost+count/1000 || known+lost/50+1 < lost {
			t.Errorf("%s: %d packets were lost, and %d are called so", path.name, lost, known)
		}
		if path.jitter == 0 && s.Late > 0 {
			t.Errorf("%s: %d late packets where nothing is late", path.name, s.Late)
		}
		if s.Late > count/50 {
			t.Errorf("%s: %d packets were called lost and came", path.name, s.Late)
		}
	}
}

func TestAnACKNamesMoreThan32RangesOnlyWhileItHasNewsOfThem(t *testing.T) {
	var a acks
	now := epoch
	for number := uint64(0); number < 400; number += 2 {
		a.add(number, now, true, false, minAckDelay)
	}
	ranges := func() int {
		var f Frames
		if err := f.Parse(a.frame(nil, now, minPacket)); err != nil {
			t.Fatal(err)
		}
		return len(f.Ranges)
	}
	// Each packet is named in four ACKs at least, and in seven at most.
	for range repeats {
		if got := ranges(); got != 200 {
			t.Fatal(got)
		}
	}
	for range repeats {
		ranges()
	}
	if got := ranges(); got != alwaysNamed {
		t.Fatalf("%d ranges of losses long ago", got)
	}
	// A late packet brings its range back, and those above it.
	a.add(399, now, true, false, minAckDelay)
	a.add(301, now, true, false, minAckDelay)
	if got := ranges(); got != alwaysNamed+1 {
		t.Fatal(got)
	}
}

func TestAnACKIsNeverLongerThanItsRoom(t *testing.T) {
	for room := range 700 {
		var a acks
		for number := uint64(0); number < 1<<20; number += 1 << 11 {
			a.add(number, epoch, true, false, minAckDelay)
		}
		frame := a.frame(nil, epoch, room)
		if len(frame) > room {
			t.Fatalf("%d bytes of %d", len(frame), room)
		}
		if len(frame) == 0 && (room > 20 || !a.now) {
			t.Fatalf("none in %d bytes, due: %v", room, a.now)
		}
	}
}

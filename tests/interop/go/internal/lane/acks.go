package lane

import (
	"time"

	"culvert.example/culvert/internal/wire"
)

const (
	maxAckDelay = 25 * time.Millisecond
	minAckDelay = time.Millisecond
	// ackEvery is how many packets are acknowledged together, unless the delay is over before.
	ackEvery = 64
	// maxRanges are kept; every ACK names alwaysNamed of them, and those below as far as it has something new to tell.
	maxRanges   = 256
	alwaysNamed = 32
	// repeats is how many ACKs name a packet at least, whatever becomes of the others.
	repeats = 4
)

// acks is what we have to acknowledge.
type acks struct {
	// From the highest down.
	ranges []Range
	// largestAt is when the highest number came.
	largestAt time.Time
	unsent    int
	due       time.Time // zero: nothing to acknowledge
	now       bool
	fresh     fresh
}

// fresh are the numbers that few ACKs have named yet: the lowest since count was 0, and in the repeats ACKs before.
type fresh struct {
	lowest, before uint64
	count          int
}

// add notes a packet; soon says that the answer must not wait.
func (a *acks) add(number uint64, now time.Time, eliciting, soon bool, delay time.Duration) {
	if len(a.ranges) == 0 || number > a.ranges[0].Last {
		a.largestAt = now
	} else {
		a.fresh.lowest = min(a.fresh.lowest, number)
	}
	a.insert(number)
	if !eliciting {
		return
	}
	a.unsent++
	if a.due.IsZero() {
		a.due = now.Add(delay)
	}
	if soon || a.unsent >= ackEvery {
		a.now = true
	}
}

func (a *acks) insert(number uint64) {
	for i := range a.ranges {
		r := &a.ranges[i]
		switch {
		case number > r.Last+1:
			a.ranges = append(a.ranges, Range{})
			copy(a.ranges[i+1:], a.ranges[i:])
			a.ranges[i] = Range{number, number}
			a.ranges = a.ranges[:min(len(a.ranges), maxRanges)]
			return
		case number == r.Last+1:
			r.Last = number
			return
		case number >= r.First:
			return
		case number+1 == r.First:
			r.First = number
			if i+1 < len(a.ranges) && a.ranges[i+1].Last+1 == number {
				r.First = a.ranges[i+1].First
				a.ranges = append(a.ranges[:i+1], a.ranges[i+2:]...)
			}
			return
		}
	}
	if len(a.ranges) < maxRanges {
		a.ranges = append(a.ranges, Range{number, number})
	}
}

// isDue says whether an ACK must go out now.
func (a *acks) isDue(now time.Time) bool {
	return a.now || !a.due.IsZero() && !now.Before(a.due)
}

// frame appends the ACK frame, of no more than room bytes, and takes the packets as acknowledged. The lowest ranges are
// left out if they do not fit; if not even the highest does, nothing is appended and the ACK stays due.
func (a *acks) frame(b []byte, now time.Time, room int) []byte {
	fits := a.fitting(now, room)
	if fits == 0 {
		return b
	}
	a.settle()
	if a.fresh.count++; a.fresh.count == repeats {
		a.fresh = fresh{lowest: a.ranges[0].Last + 1, before: a.fresh.lowest}
	}
	return AppendACK(b, a.ranges[:fits], a.delay(now))
}

func (a *acks) settle() { a.unsent, a.due, a.now = 0, time.Time{}, false }

// delay is how long the highest number has waited, in units of 8 microseconds.
func (a *acks) delay(now time.Time) uint64 {
	return uint64(max(now.Sub(a.largestAt), 0).Microseconds()) >> 3
}

// fitsWhole says whether an ACK frame of all there is to tell takes no more than room bytes.
func (a *acks) fitsWhole(now time.Time, room int) bool { return a.fitting(now, room) == len(a.ranges) }

// fitting is how many ranges, from the highest down, an ACK frame of room bytes names.
func (a *acks) fitting(now time.Time, room int) int {
	a.forget()
	if len(a.ranges) == 0 {
		return 0
	}
	room -= 1 + wire.VarintLen(a.ranges[0].Last) + wire.VarintLen(a.delay(now)) +
		wire.VarintLen(uint64(len(a.ranges)-1)) + wire.VarintLen(a.ranges[0].Last-a.ranges[0].First)
	for i, r := range a.ranges {
		if i > 0 {
			room -= wire.VarintLen(a.ranges[i-1].First-r.Last-2) + wire.VarintLen(r.Last-r.First)
		}
		if room < 0 {
			return i
		}
	}
	return len(a.ranges)
}

// forget drops the ranges that enough ACKs have named.
func (a *acks) forget() {
	floor := min(a.fresh.lowest, a.fresh.before)
	for n := len(a.ranges); n > alwaysNamed && a.ranges[n-1].Last < floor; n-- {
		a.ranges = a.ranges[:n-1]
	}
}

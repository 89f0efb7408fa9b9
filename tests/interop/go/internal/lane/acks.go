package lane

import "time"

const (
	maxAckDelay = 25 * time.Millisecond
	minAckDelay = time.Millisecond
	// ackEvery is how many packets are acknowledged together, unless the delay is over before.
	ackEvery  = 64
	maxRanges = 32
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
}

// add notes a packet; soon says that the answer must not wait.
func (a *acks) add(number uint64, now time.Time, eliciting, soon bool, delay time.Duration) {
	if len(a.ranges) == 0 || number > a.ranges[0].Last {
		a.largestAt = now
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

// frame appends the ACK frame and takes the packets as acknowledged.
func (a *acks) frame(b []byte, now time.Time) []byte {
	a.unsent, a.due, a.now = 0, time.Time{}, false
	if len(a.ranges) == 0 {
		return b
	}
	return AppendACK(b, a.ranges, uint64(max(now.Sub(a.largestAt), 0).Microseconds())>>3)
}

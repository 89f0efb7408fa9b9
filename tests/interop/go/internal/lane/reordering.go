package lane

import "time"

const (
	// stepsPerRTT are the parts of the least round trip in which the window is measured (RFC 8985 section 6.2, step 4).
	stepsPerRTT = 4
	// persistence is for how many recoveries a window stays as it is (RFC 8985 section 6.2, RACK.reo_wnd_persist).
	persistence = 16
	mostSteps   = 1 << 16
)

// reordering is how long, beyond a round trip, a missing packet may be merely late. The first packet that was declared
// lost and is acknowledged after all opens the window; later ones widen it as far as they needed, at most to twice itself
// and once in a round trip. After 16 recoveries in which nothing needed its last steps it shrinks, to the half at most.
type reordering struct {
	steps      int // 0: nothing was reordered, and losses are found by count
	needed     int // the most that a late packet needed in the present recoveries
	recoveries int
	// The loss of a packet with this number, or a higher one, begins a recovery.
	recoveredAt uint64
	// Packets below were sent before the window was last widened: what they tell is known.
	widenedAt uint64
}

func (r *reordering) seen() bool { return r.steps > 0 }

func (r *reordering) window(rtt *rtt) time.Duration {
	return min(rtt.least/stepsPerRTT*time.Duration(r.steps), rtt.smoothed)
}

// lossDelay is the age from which a packet is lost that was sent before an acknowledged one.
func (r *reordering) lossDelay(rtt *rtt) time.Duration {
	return max(rtt.longest()*9/8, rtt.longest()+r.window(rtt), granularity)
}

// late notes a packet that was acknowledged at this age, three numbers or more after a later one had been.
func (r *reordering) late(age time.Duration, rtt *rtt) {
	r.needed = max(r.needed, stepsFor(age, rtt))
}

// spurious notes a packet that was acknowledged although it had been declared lost; next is the next number to be sent.
func (r *reordering) spurious(number uint64, age time.Duration, next uint64, rtt *rtt) {
	r.late(age, rtt)
	if number >= r.widenedAt && (r.steps == 0 || r.window(rtt) < rtt.smoothed) {
		r.steps = min(max(stepsFor(age, rtt), r.steps+1), max(2*r.steps, 1))
		r.needed, r.recoveries, r.widenedAt = 0, 0, next
	}
}

// lost notes a packet that was declared lost.
func (r *reordering) lost(number, next uint64) {
	if r.steps == 0 || number < r.recoveredAt {
		return
	}
	r.recoveredAt = next
	if r.recoveries++; r.recoveries == persistence {
		r.steps = max(r.steps/2, min(r.needed, r.steps))
		r.needed, r.recoveries = 0, 0
	}
}

// stepsFor are the steps of a window in which a packet that is acknowledged at this age is not lost: one at least.
func stepsFor(age time.Duration, rtt *rtt) int {
	step := rtt.least / stepsPerRTT
	if step == 0 {
		return 1
	}
	return int(min(max(age-rtt.longest(), 0)/step, mostSteps)) + 1
}

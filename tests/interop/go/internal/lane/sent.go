package lane

import "time"

const (
	// ringLen is how many packets may be under way; the oldest is given up for a newer one.
	ringLen = 1 << 15
	// packetThreshold is the distance from which a packet is lost by count, where packets keep their order.
	packetThreshold = 3
	initialRTT      = 100 * time.Millisecond
	granularity     = time.Millisecond
	// maxMissing bounds how many lost packets may still turn out to be late, and missingFor for how long.
	maxMissing = 1024
	missingFor = 3 * time.Second
)

// record is a packet that was sent.
type record struct {
	at    time.Duration // since the lane began
	size  uint16
	state recordState
}

type recordState uint8

const (
	recordNone recordState = iota // acknowledged, lost, or not to be acknowledged
	recordSent
	recordProbe // of the path's MTU: its loss means nothing else
)

// missing is a packet that was declared lost.
type missing struct {
	number uint64
	record record
}

// rtt is the round trip as RFC 9002 section 5 estimates it; all are 0 before the first sample.
type rtt struct{ smoothed, variance, least, newest time.Duration }

// sent is what we know about our own packets.
type sent struct {
	ring [ringLen]record
	// Every packet below low is settled; next is the number of the next packet.
	low, next   uint64
	outstanding int
	hasAcked    bool
	largest     uint64 // the highest acknowledged number
	// Lost packets, in the order of their numbers.
	missing    []missing
	reordering reordering
	rtt        rtt

	// Lost are those declared lost, Late those of them that were acknowledged after all.
	Acked, Lost, Late uint64
}

// outcome is what an ACK told.
type outcome struct {
	acked      int
	probe      int // size of a probe that arrived
	lostProbe  int
	lostLarge  bool // a packet above 1200 bytes was lost
	newLargest bool
}

func (r *rtt) longest() time.Duration { return max(r.smoothed, r.newest) }

func (s *sent) pto() time.Duration {
	if s.rtt.smoothed == 0 {
		return 3*initialRTT + maxAckDelay
	}
	return s.rtt.smoothed + max(4*s.rtt.variance, granularity) + maxAckDelay
}

func (s *sent) ackDelay() time.Duration {
	if s.rtt.smoothed == 0 {
		return maxAckDelay
	}
	return min(max(s.rtt.smoothed/4, minAckDelay), maxAckDelay)
}

func (s *sent) add(number uint64, at time.Duration, size int, state recordState) {
	s.next = number + 1
	if s.next-s.low > ringLen {
		if old := &s.ring[s.low%ringLen]; old.state != recordNone {
			s.settle(old)
			s.Lost++
		}
		s.low++
	}
	s.ring[number%ringLen] = record{at, uint16(size), state}
	if state != recordNone {
		s.outstanding++
	}
}

func (s *sent) settle(r *record) {
	r.state = recordNone
	s.outstanding--
}

// onACK applies an ACK frame of packets that were sent.
func (s *sent) onACK(ranges []Range, delay time.Duration, now time.Duration, out *outcome) {
	largest, before := ranges[0].Last, s.largest
	var sample, late time.Duration // late: the age of the oldest packet that counting would have declared lost
	for _, r := range ranges {
		for number := max(r.First, s.low); number <= r.Last; number++ {
			record := &s.ring[number%ringLen]
			if record.state == recordNone {
				continue
			}
			age := now - record.at
			if number == largest {
				sample = age
			}
			if s.hasAcked && number+packetThreshold <= before {
				late = max(late, age)
			}
			s.arrived(record, out)
			s.settle(record)
			s.Acked++
			out.acked++
		}
	}
	s.cameLate(ranges, now, out)
	if late > 0 {
		s.reordering.late(late, &s.rtt)
	}
	if !s.hasAcked || largest > before {
		s.hasAcked, s.largest, out.newLargest = true, largest, true
		if sample > 0 {
			s.rtt.sample(sample, delay)
		}
	}
	s.detect(now, out)
}

func (s *sent) arrived(r *record, out *outcome) {
	if r.state == recordProbe {
		out.probe = max(out.probe, int(r.size))
	}
}

// cameLate finds those of the missing packets that an ACK names, and gives up those that were lost long ago.
func (s *sent) cameLate(ranges []Range, now time.Duration, out *outcome) {
	if len(s.missing) == 0 {
		return
	}
	kept := s.missing[:0]
	at := len(ranges) - 1 // ranges descend, and missing packets ascend
	for _, m := range s.missing {
		for at >= 0 && ranges[at].Last < m.number {
			at--
		}
		switch {
		case at >= 0 && ranges[at].First <= m.number:
			s.arrived(&m.record, out)
			out.acked++
			if m.record.state == recordSent {
				s.Late++
				s.Acked++
				s.reordering.spurious(m.number, now-m.record.at, s.next, &s.rtt)
			}
		case now-m.record.at < missingFor:
			kept = append(kept, m)
		}
	}
	s.missing = kept
}

func (r *rtt) sample(newest, delay time.Duration) {
	newest = max(newest, time.Microsecond)
	r.newest = newest
	if r.smoothed == 0 {
		r.smoothed, r.variance, r.least = newest, newest/2, newest
		return
	}
	r.least = min(r.least, newest)
	if delay = min(delay, maxAckDelay); newest >= r.least+delay {
		newest -= delay
	}
	r.variance = (3*r.variance + (r.smoothed - newest).Abs()) / 4
	r.smoothed = (7*r.smoothed + newest) / 8
}

// detect declares packets lost: by count or time while packets keep their order (RFC 9002 section 6.1), else by time
// alone (RFC 8985 section 6.2).
func (s *sent) detect(now time.Duration, out *outcome) {
	if !s.hasAcked {
		return
	}
	delay, counts := s.reordering.lossDelay(&s.rtt), !s.reordering.seen()
	for number := s.low; number < s.next; number++ {
		record := &s.ring[number%ringLen]
		if record.state == recordNone {
			if number == s.low {
				s.low++
			}
			continue
		}
		byCount := counts && number+packetThreshold <= s.largest
		if number >= s.largest || !byCount && now-record.at < delay {
			break
		}
		s.lose(number, record, out)
		if number == s.low {
			s.low++
		}
	}
}

func (s *sent) lose(number uint64, record *record, out *outcome) {
	if len(s.missing) == maxMissing {
		s.missing = append(s.missing[:0], s.missing[maxMissing/2:]...)
	}
	s.missing = append(s.missing, missing{number, *record})
	if record.state == recordProbe {
		out.lostProbe = int(record.size)
	} else {
		out.lostLarge = out.lostLarge || record.size > minPacket
		s.Lost++
		s.reordering.lost(number, s.next)
	}
	s.settle(record)
}

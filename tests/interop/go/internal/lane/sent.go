package lane

import "time"

const (
	// ringLen is how many packets may be under way; the oldest is given up for a newer one.
	ringLen         = 1 << 15
	packetThreshold = 3
	initialRTT      = 100 * time.Millisecond
	granularity     = time.Millisecond
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

// sent is what we know about our own packets.
type sent struct {
	ring [ringLen]record
	// Every packet below low is settled; next is the number of the next packet.
	low, next   uint64
	outstanding int
	hasAcked    bool
	largest     uint64 // the highest acknowledged number

	rtt, variance, least time.Duration // rtt is 0 before the first sample

	Acked, Lost uint64
}

// outcome is what an ACK told.
type outcome struct {
	acked      int
	probe      int // size of a probe that arrived
	lostProbe  int
	lostLarge  bool // a packet above 1200 bytes was lost
	newLargest bool
}

func (s *sent) pto() time.Duration {
	if s.rtt == 0 {
		return 3*initialRTT + maxAckDelay
	}
	return s.rtt + max(4*s.variance, granularity) + maxAckDelay
}

func (s *sent) ackDelay() time.Duration {
	if s.rtt == 0 {
		return maxAckDelay
	}
	return min(max(s.rtt/4, minAckDelay), maxAckDelay)
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
	largest := ranges[0].Last
	if !s.hasAcked || largest > s.largest {
		s.hasAcked, s.largest, out.newLargest = true, largest, true
	}
	for _, r := range ranges {
		for number := max(r.First, s.low); number <= r.Last; number++ {
			record := &s.ring[number%ringLen]
			if record.state == recordNone {
				continue
			}
			if number == largest {
				s.sample(now-record.at, delay)
			}
			if record.state == recordProbe {
				out.probe = max(out.probe, int(record.size))
			}
			s.settle(record)
			s.Acked++
			out.acked++
		}
	}
	s.detect(now, out)
}

func (s *sent) sample(latest, delay time.Duration) {
	latest = max(latest, time.Microsecond)
	if s.rtt == 0 {
		s.rtt, s.variance, s.least = latest, latest/2, latest
		return
	}
	s.least = min(s.least, latest)
	if delay = min(delay, maxAckDelay); latest >= s.least+delay {
		latest -= delay
	}
	s.variance = (3*s.variance + (s.rtt - latest).Abs()) / 4
	s.rtt = (7*s.rtt + latest) / 8
}

// detect declares packets lost (RFC 9002 section 6.1).
func (s *sent) detect(now time.Duration, out *outcome) {
	if !s.hasAcked {
		return
	}
	old := max(s.rtt*9/8, granularity)
	for number := s.low; number < s.next; number++ {
		record := &s.ring[number%ringLen]
		if record.state == recordNone {
			if number == s.low {
				s.low++
			}
			continue
		}
		if number >= s.largest || number+packetThreshold > s.largest && now-record.at < old {
			break
		}
		if record.state == recordProbe {
			out.lostProbe = int(record.size)
		} else {
			out.lostLarge = out.lostLarge || record.size > minPacket
			s.Lost++
		}
		s.settle(record)
		if number == s.low {
			s.low++
		}
	}
}

package lane

import (
	"crypto/rand"
	"net/netip"
	"time"
)

const (
	minPacket = 1200
	// askEvery is how long a challenge waits for its answer before it is repeated.
	askEvery = 250 * time.Millisecond
	// giveUp is when an address that never answered is given up.
	giveUp = 3 * time.Second
	// asksOfPresent is how often the present address is asked before the lane moves away.
	asksOfPresent = 3
	amplification = 3
)

// path is one address of the other end.
type path struct {
	addr      netip.AddrPort
	validated bool
	challenge [8]byte
	asking    bool
	asked     int
	since     time.Time // of the first question of this round
	next      time.Time
	// Bytes from there and to there, before it is validated.
	received, sent int
}

// ask begins a round of challenges.
func (p *path) ask(now time.Time) {
	p.asking, p.asked, p.since, p.next = true, 0, now, now
	if _, err := rand.Read(p.challenge[:]); err != nil {
		panic(err) // crypto/rand never fails on Linux
	}
}

// room is how many bytes may go there now.
func (p *path) room() int {
	if p.validated {
		return 1 << 16
	}
	return amplification*p.received - p.sent
}

// paths are the present address of the other end and one to which it may have moved.
type paths struct {
	current   path
	candidate *path
	// returning says that the candidate is the address before the present one.
	returning bool
	previous  netip.AddrPort
}

// heard notes an authentic packet of size bytes.
func (p *paths) heard(from netip.AddrPort, size int, newest bool, now time.Time) {
	switch {
	case from == p.current.addr:
		p.current.received += size
		return
	case !p.current.addr.IsValid():
		p.current = path{addr: from, received: size}
		p.current.ask(now)
		return
	case p.candidate != nil && p.candidate.addr == from:
		p.candidate.received += size
		return
	case !newest:
		return
	}
	p.candidate = &path{addr: from, received: size}
	p.candidate.ask(now)
	if p.returning = from == p.previous; !p.returning {
		p.current.ask(now)
	}
}

// answered notes a PATH_RESPONSE; true if the present address was validated just now.
func (p *paths) answered(data [8]byte) bool {
	if p.current.asking && data == p.current.challenge {
		p.current.asking = false
		first := !p.current.validated
		p.current.validated = true
		if !p.returning {
			p.candidate = nil
		}
		return first
	}
	if c := p.candidate; c != nil && c.asking && data == c.challenge {
		c.asking, c.validated = false, true
		if p.returning {
			p.move()
		}
	}
	return false
}

func (p *paths) move() {
	p.previous, p.current, p.candidate, p.returning = p.current.addr, *p.candidate, nil, false
}

// tick moves, or gives up, what is due. False: the present address never answered.
func (p *paths) tick(now time.Time, pto time.Duration) bool {
	current := &p.current
	if c := p.candidate; c != nil {
		patience := min(pto*3/2, time.Second)
		switch {
		case c.validated && current.asking && current.asked >= asksOfPresent && now.Sub(current.since) >= patience:
			p.move()
		case now.Sub(c.since) >= giveUp:
			p.candidate, p.returning = nil, false
		}
	}
	if current.asking && now.Sub(current.since) >= giveUp {
		if !current.validated {
			return false
		}
		current.asking = false
	}
	return true
}

// due returns the paths to be asked now.
func (p *paths) due(now time.Time, pto time.Duration) (due [2]*path) {
	for i, each := range []*path{&p.current, p.candidate} {
		if each == nil || !each.asking || !each.addr.IsValid() || now.Before(each.next) || each.room() < minPacket/4 {
			continue
		}
		wait := askEvery
		if p.candidate != nil {
			wait = min(wait, max(pto/2, granularity))
		}
		each.asked++
		each.next = now.Add(wait)
		due[i] = each
	}
	return due
}

// deadline is when due or tick have something to do; zero if never.
func (p *paths) deadline() time.Time {
	var at time.Time
	for _, each := range []*path{&p.current, p.candidate} {
		if each != nil && each.asking && each.addr.IsValid() {
			at = earlier(at, each.next)
		}
	}
	if p.candidate != nil {
		at = earlier(at, p.candidate.since.Add(giveUp))
	}
	return at
}

// earlier treats zero as never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// mtu looks for the largest packet that the path carries (RFC 8899).
type mtu struct {
	size         int // in use
	upper, limit int // the least that failed, less one; the most that is allowed
	probe        int // under way, or 0
	at           time.Time
	failures     int
	next         time.Time
	suspect      bool // packets above 1200 bytes were lost: the size in use is probed
}

const (
	probeTries   = 3
	probeStep    = 16
	probeAgain   = 10 * time.Minute
	probeSpacing = 20 * time.Millisecond
)

func newMTU(limit int) mtu { return mtu{size: minPacket, upper: limit, limit: limit} }

// want returns the size of a probe to send now, or 0.
func (m *mtu) want(now time.Time, pto time.Duration) int {
	if m.probe != 0 {
		if now.Sub(m.at) < 2*pto {
			return 0
		}
		m.failed(now)
	}
	if now.Before(m.next) {
		return 0
	}
	switch {
	case m.suspect:
		m.probe = m.size
	case m.size >= m.limit:
		m.next = now.Add(probeAgain)
		return 0
	case m.upper-m.size < probeStep:
		m.upper, m.next = m.limit, now.Add(probeAgain)
		return 0
	case m.upper == m.limit:
		m.probe = m.limit
	default:
		m.probe = (m.size + m.upper + 1) / 2
	}
	m.at = now
	return m.probe
}

func (m *mtu) failed(now time.Time) {
	probe := m.probe
	m.probe, m.next = 0, now.Add(probeSpacing)
	if m.failures++; m.failures < probeTries {
		return
	}
	m.failures = 0
	if m.suspect {
		m.suspect, m.size, m.upper = false, minPacket, max(probe-1, minPacket)
		return
	}
	m.upper = probe - 1
}

func (m *mtu) arrived(size int, now time.Time) {
	if size == m.probe {
		m.probe, m.failures, m.next = 0, 0, now
	}
	m.suspect = false
	m.size = max(m.size, size)
}

func (m *mtu) lostLarge(now time.Time) {
	if m.size > minPacket && !m.suspect {
		m.suspect, m.failures, m.next = true, 0, now
		if m.probe != 0 {
			m.probe = 0
		}
	}
}

func (m *mtu) deadline(pto time.Duration) time.Time {
	if m.probe != 0 {
		return m.at.Add(2 * pto)
	}
	return m.next
}

package lane

import (
	"time"

	"culvert.example/culvert/internal/wire"
)

// timers does what is due at a time.
func (l *Lane) timers() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.wake:
		case <-l.done:
			return
		}
		now := time.Now()
		cause, deadline := l.tick(now)
		if cause != 0 {
			l.config.Handler.Failed(l, cause)
		}
		timer.Reset(max(deadline.Sub(now), 200*time.Microsecond))
	}
}

// tick returns the cause for which the lane failed, or 0, and when it is to be called again.
func (l *Lane) tick(now time.Time) (cause uint32, deadline time.Time) {
	l.reading.Lock()
	failures, integrity := l.opener.Failures, l.config.Suite.integrity
	l.mu.Lock()
	if !l.forgetKey.IsZero() && !now.Before(l.forgetKey) {
		l.opener.ForgetPrevious()
		l.forgetKey = time.Time{}
	}
	l.reading.Unlock()
	defer l.mu.Unlock()
	deadline = now.Add(time.Second)
	if l.state == closed {
		return 0, deadline
	}
	if l.acks.isDue(now) {
		l.sendACK(now)
	}
	if l.state == draining {
		if now.After(l.drainUntil) {
			l.config.Socket.Unroute(l.config.Local)
			l.become(closed)
			close(l.done)
		}
		return 0, earlier(deadline, l.acks.due)
	}
	pto := l.sent.pto()
	moved := l.paths.current.addr
	if !l.paths.tick(now, pto) {
		return l.fail(wire.CauseDead), deadline
	}
	if l.paths.current.addr != moved {
		l.stats.Moves++
	}
	l.ask(now)
	worn := func(used, limit uint64) bool { return used >= limit/8*wearNumerator }
	if worn(failures, integrity) || worn(l.sealer.sealed, l.config.Suite.confidentiality) || l.sealer.Next > lastNumber {
		// It goes on until it is replaced.
		if now.Sub(l.wornAt) > drain {
			l.wornAt = now
			cause = wire.CauseWornOut
		}
	}
	if l.state == up {
		switch {
		case !l.outstandingTooLong(now, pto):
			l.doubt = time.Time{}
		case l.doubt.IsZero():
			// This process may have stood still: what has come meanwhile is read first.
			l.doubt = now
			deadline = now.Add(benefitOfDoubt)
		case now.Sub(l.doubt) >= benefitOfDoubt:
			return l.fail(wire.CauseDead), deadline
		}
		l.probe(now, pto)
		deadline = earlier(deadline, l.mtu.deadline(pto))
	}
	deadline = earlier(deadline, l.pto(now, pto))
	deadline = earlier(deadline, l.paths.deadline())
	return cause, earlier(deadline, l.acks.due)
}

func (l *Lane) fail(cause uint32) uint32 {
	l.become(draining)
	l.drainUntil = time.Now().Add(drain)
	return cause
}

// outstandingTooLong says whether the other end should have been heard of.
func (l *Lane) outstandingTooLong(now time.Time, pto time.Duration) bool {
	if l.sent.outstanding == 0 {
		return false
	}
	since := l.lastHeard
	if at, ok := l.sent.oldest(); ok && l.began.Add(at).After(since) {
		since = l.began.Add(at)
	}
	return now.Sub(since) > max(3*pto, deadAfter)
}

// probe sends a probe of the path's MTU, if one is due.
func (l *Lane) probe(now time.Time, pto time.Duration) {
	if size := l.mtu.want(now, pto); size > 0 {
		l.single([]byte{framePing}, size, recordProbe, &l.paths.current)
	}
}

// pto sends a PING when packets wait for their acknowledgement for too long, or nothing came for the keepalive
// interval; it returns when to look again.
func (l *Lane) pto(now time.Time, pto time.Duration) time.Time {
	var deadline time.Time
	ping := false
	if l.sent.outstanding > 0 {
		at := l.lastSent.Add(pto << min(l.pings, 4))
		if ping = !now.Before(at); ping {
			l.pings++
		} else {
			deadline = at
		}
	}
	if l.config.KeepAlive > 0 && l.state == up {
		at := l.lastHeard.Add(l.config.KeepAlive)
		if ping = ping || !now.Before(at) && now.Sub(l.lastSent) >= l.config.KeepAlive; !ping && now.Before(at) {
			deadline = earlier(deadline, at)
		}
	}
	if ping && l.paths.current.room() >= MinPacket+1 {
		l.single([]byte{framePing}, 0, recordSent, &l.paths.current)
		deadline = earlier(deadline, now.Add(pto<<min(l.pings, 4)))
	}
	return deadline
}

// oldest returns when the oldest packet that waits for its acknowledgement was sent.
func (s *sent) oldest() (time.Duration, bool) {
	for ; s.low < s.next; s.low++ {
		if r := &s.ring[s.low%ringLen]; r.state != recordNone {
			return r.at, true
		}
	}
	return 0, false
}

package lane

import (
	"errors"
	"net/netip"
	"time"

	"culvert.example/culvert/internal/wire"
)

// ReceivePacket opens a packet and acts on it.
func (l *Lane) ReceivePacket(packet []byte, from netip.AddrPort) {
	l.reading.Lock()
	defer l.reading.Unlock()
	size := len(packet)
	opened, err := l.opener.Open(packet)
	if err == nil {
		err = l.frames.Parse(opened.Frames)
	}
	var violation Violation
	if err != nil && !errors.As(err, &violation) {
		l.refused(err)
		return
	}
	events := events{violation: err != nil}
	if err == nil {
		l.received(opened, size, from, &events)
	}
	if events.violation {
		l.config.Handler.Failed(l, wire.CauseViolation)
		return
	}
	if events.up {
		l.config.Handler.Up(l)
	}
	if events.moved {
		l.config.Handler.Moved(l)
	}
	for _, datagram := range l.frames.Datagrams {
		l.config.Handler.Datagram(l, datagram)
	}
}

// events are what the handler learns of a packet, besides its datagrams.
type events struct{ violation, up, moved bool }

func (l *Lane) refused(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch err {
	case ErrOld:
		l.stats.RefusedOld++
	case ErrOpen:
		l.stats.RefusedKey++
	}
}

// received acts on a packet that authenticated and parses, all but its datagrams.
func (l *Lane) received(opened Opened, size int, from netip.AddrPort, events *events) {
	now := time.Now()
	f := &l.frames
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == closed {
		f.Datagrams = f.Datagrams[:0]
		return
	}
	for _, ack := range f.ACKs {
		if f.Ranges[ack.Start].Last >= l.sent.next {
			events.violation = true
			return
		}
	}
	l.stats.ReceivedPackets++
	l.stats.ReceivedBytes += uint64(size)
	l.lastHeard = now
	before := l.paths.current.addr
	l.paths.heard(from, size, opened.Newest, now)
	if opened.Updated {
		l.peerUpdated(now)
	}
	for _, ack := range f.ACKs {
		l.acked(f.Ranges[ack.Start:ack.End], ack.Delay, now)
	}
	l.acks.add(opened.Number, now, f.Eliciting, f.Ping || len(f.Challenges) > 0, l.sent.ackDelay())
	if f.Eliciting && l.acks.unsent == 1 {
		wakeUp(l.wake)
	}
	for _, data := range f.Responses {
		if l.paths.answered(data) && l.state == opening {
			l.become(up)
			events.up = true
			l.mtu.next = now
		}
	}
	l.answer(f.Challenges, from, size, now, events)
	if l.paths.current.addr != before && before.IsValid() {
		l.stats.Moves++
	}
	l.ask(now)
}

// peerUpdated notes the first packet of a new key phase of the other end, and follows it.
func (l *Lane) peerUpdated(now time.Time) {
	l.peerPhase++
	l.stats.PeerKeyUpdates++
	l.forgetKey = now.Add(3 * l.sent.pto())
	if l.peerPhase > l.ourPhase {
		if l.out.open > 0 {
			l.seal(recordSent)
		}
		l.sealer.Update()
		l.ourPhase++
	}
}

func (l *Lane) acked(ranges []Range, delay uint64, now time.Time) {
	var out outcome
	l.sent.onACK(ranges, time.Duration(min(delay, 1<<20))*8*time.Microsecond, now.Sub(l.began), &out)
	if out.acked > 0 {
		l.pings = 0
	}
	if out.probe > 0 {
		l.mtu.arrived(out.probe, now)
	}
	if out.lostLarge {
		l.mtu.lostLarge(now)
		wakeUp(l.wake)
	}
}

// answer answers challenges to where they came from.
func (l *Lane) answer(challenges [][8]byte, from netip.AddrPort, size int, now time.Time, events *events) {
	if l.state == draining {
		return
	}
	for _, data := range challenges {
		if data != l.challenged {
			// The first one belongs to the opening.
			events.moved = events.moved || l.challenged != [8]byte{}
			l.challenged = data
		}
		to := &l.paths.current
		if from != to.addr {
			if to = l.paths.candidate; to == nil || to.addr != from {
				to = &path{addr: from, received: size}
			}
		}
		if length := min(max(size, MinPacket), minPacket); to.room() >= length {
			frames := appendPath(nil, frameResponse, data)
			if l.acks.now || l.acks.isDue(now) {
				frames = l.acks.frame(frames, now, length-MinPacket-len(frames))
			}
			l.single(frames, length, recordSent, to)
		}
	}
}

// ask sends the challenges that are due.
func (l *Lane) ask(now time.Time) {
	if l.state == draining {
		return
	}
	for _, path := range l.paths.due(now, l.sent.pto()) {
		if path != nil {
			l.single(appendPath(nil, frameChallenge, path.challenge), min(minPacket, path.room()), recordSent, path)
		}
	}
}

// EndBatch sends the acknowledgements that cannot wait.
func (l *Lane) EndBatch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.acks.now && l.state != closed {
		l.sendACK(time.Now())
	}
}

func (l *Lane) sendACK(now time.Time) {
	current := &l.paths.current
	room := min(l.mtu.size, current.room()) - MinPacket
	if frame := l.acks.frame(nil, now, room); len(frame) > 0 && current.addr.IsValid() {
		l.single(frame, 0, recordNone, current)
	}
	// One that cannot leave now is not tried at once again.
	l.acks.settle()
}

package lane

import (
	"net/netip"
	"time"
)

// Send sends a payload, which may share a packet with others and leaves within a moment.
func (l *Lane) Send(header, body []byte) error {
	l.mu.Lock()
	if l.state != up {
		l.mu.Unlock()
		return ErrDown
	}
	if len(header)+len(body) > l.room() {
		l.mu.Unlock()
		return ErrTooLarge
	}
	need := datagramLen(len(header) + len(body))
	if l.out.open > 0 && l.out.open+need+tagLen > l.mtu.size {
		l.seal(recordSent)
	}
	for l.out.full() {
		l.mu.Unlock()
		l.write()
		l.mu.Lock()
		if l.state != up {
			l.mu.Unlock()
			return ErrDown
		}
	}
	l.start(need)
	before := len(l.out.bytes)
	l.out.bytes = AppendDatagram(l.out.bytes, header, body)
	l.out.open += len(l.out.bytes) - before
	l.mu.Unlock()
	wakeUp(l.flush)
	return nil
}

// Ping sends a PING, which the other end acknowledges at once.
func (l *Lane) Ping() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == up || l.state == opening && l.paths.current.addr.IsValid() {
		l.single([]byte{framePing}, 0, recordSent, &l.paths.current)
	}
}

// batch is what waits to be sent: packets of one size, the last one perhaps shorter, and one that is not sealed yet.
type batch struct {
	bytes []byte
	size  int // of the first packet
	count int
	short bool // the last packet is shorter than size: none may follow
	open  int  // bytes of the packet that is not sealed, at the end
}

func (b *batch) full() bool {
	return b.open == 0 && (b.short || b.count == batchPackets || len(b.bytes)+MaxSize > batchBytes)
}

// start begins a packet for a frame of so many bytes, unless one is begun. An ACK for which it has no room leaves alone.
func (l *Lane) start(need int) {
	if l.out.open == 0 {
		before := len(l.out.bytes)
		l.out.bytes = l.sealer.Start(l.out.bytes)
		l.out.open = len(l.out.bytes) - before
		room := l.mtu.size - l.out.open - tagLen - need
		if now := time.Now(); l.acks.isDue(now) && l.acks.fitsWhole(now, room) {
			before = len(l.out.bytes)
			l.out.bytes = l.acks.frame(l.out.bytes, now, room)
			l.out.open += len(l.out.bytes) - before
		}
	}
}

// seal ends the packet that is begun. One that is larger than those before it ends the batch before itself.
func (l *Lane) seal(state recordState) {
	at := len(l.out.bytes) - l.out.open
	packet := l.out.bytes[at:]
	size := len(packet) + tagLen
	l.record(size, state)
	packet = l.sealer.Seal(packet)
	l.out.open = 0
	switch {
	case l.out.count == 0:
		l.out.size = size
	case size > l.out.size:
		// Rare: the batch before it leaves first, and this packet is the start of the next.
		moved := append([]byte(nil), packet...)
		l.out.bytes = l.out.bytes[:at]
		l.writeNow()
		l.out.bytes = append(l.out.bytes[:0], moved...)
		l.out.size, l.out.count, l.out.short = size, 1, false
		return
	case size < l.out.size:
		l.out.short = true
	}
	l.out.bytes = l.out.bytes[:at+size]
	l.out.count++
}

// record notes the packet that is sealed next.
func (l *Lane) record(size int, state recordState) {
	now := time.Now()
	l.update()
	l.sent.add(l.sealer.Next, now.Sub(l.began), size, state)
	l.stats.SentPackets++
	l.stats.SentBytes += uint64(size)
	if state != recordNone {
		if l.sent.outstanding == 1 {
			wakeUp(l.wake)
		}
		l.lastSent = now
	}
}

// update begins a key update if the present key has sealed enough, and the other end has the key.
func (l *Lane) update() {
	if l.sealer.sealed >= l.config.UpdateAfter && l.ourPhase == l.peerPhase &&
		l.sent.hasAcked && l.sent.largest >= l.sealer.phaseStart {
		l.sealer.Update()
		l.ourPhase++
		l.stats.KeyUpdates++
	}
}

// take returns what is to be sent, and goes on with the buffer spare.
func (l *Lane) take(spare []byte) (packets []byte, size int, to netip.AddrPort) {
	if l.out.open > 0 {
		l.seal(recordSent)
	}
	packets, size, to = l.out.bytes, l.out.size, l.paths.current.addr
	l.out = batch{bytes: spare}
	return packets, size, to
}

// writeNow sends the sealed packets while mu is held.
func (l *Lane) writeNow() {
	_ = l.config.Socket.WriteLane(l.out.bytes, l.out.size, l.paths.current.addr)
	l.out.count = 0
}

// write sends what waits. One caller at a time has the spare buffer; the others wait for it.
func (l *Lane) write() {
	spare := <-l.spare
	l.mu.Lock()
	packets, size, to := l.take(spare)
	l.mu.Unlock()
	if len(packets) > 0 {
		// A lost packet is a lost packet, whoever lost it.
		_ = l.config.Socket.WriteLane(packets, size, to)
	}
	l.spare <- packets[:0]
}

// flusher sends what Send has left behind.
func (l *Lane) flusher() {
	for {
		select {
		case <-l.flush:
		case <-l.done:
			return
		}
		for l.waiting() {
			l.write()
		}
	}
}

func (l *Lane) waiting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return (l.out.open > 0 || l.out.count > 0) && l.state != closed
}

// single seals one packet of frames, padded to size, and sends it to a path at once.
func (l *Lane) single(frames []byte, size int, state recordState, to *path) {
	if l.out.open > 0 {
		// Numbers are given in the order of sealing; the packet that is begun goes first.
		l.seal(recordSent)
	}
	packet := append(l.sealer.Start(make([]byte, 0, MaxSize+tagLen)), frames...)
	for len(packet)+tagLen < size {
		packet = append(packet, framePadding)
	}
	l.record(len(packet)+tagLen, state)
	packet = l.sealer.Seal(packet)
	to.sent += len(packet)
	_ = l.config.Socket.WriteLane(packet, len(packet), to.addr)
}

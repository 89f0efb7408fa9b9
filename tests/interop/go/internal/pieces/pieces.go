// Package pieces puts datagrams together that travel in pieces, within bounds of memory and time.
package pieces

import (
	"slices"
	"time"

	"culvert.example/culvert/internal/wire"
)

const (
	// MaxBytes bounds what the incomplete datagrams of one peer occupy.
	MaxBytes = 4 << 20
	// MaxDatagrams bounds their number.
	MaxDatagrams = 256
	// Patience is how long a datagram may be incomplete.
	Patience = time.Second
	overhead = 512
)

// Verdict says what became of a piece.
type Verdict int

// What became of a piece.
const (
	Waiting   Verdict = iota // its datagram is not complete
	Complete                 // it completed its datagram
	Repeated                 // it was there before
	Malformed                // its datagram is dropped
	Ignored                  // it belongs to a datagram that was dropped, or delivered
)

type name struct{ flow, datagram uint64 }

type span struct{ from, to uint64 }

type datagram struct {
	name  name
	began time.Time
	bytes []byte // nil once the datagram is delivered or dropped
	spans []span // sorted
	have  uint64
}

// Assembler has the incomplete datagrams of one peer.
type Assembler struct {
	datagrams map[name]*datagram
	order     []*datagram // by began
	bytes     int
	// Incomplete and Malformed count datagrams that were dropped.
	Incomplete, Malformed uint64
}

// Add takes a piece that was parsed, and returns the datagram if that completes it.
func (a *Assembler) Add(p *wire.Payload, now time.Time) ([]byte, Verdict) {
	a.Expire(now)
	key := name{p.Flow, p.Datagram}
	d := a.datagrams[key]
	malformed := p.CheckPiece() != nil
	if d == nil {
		d = a.begin(key, int(p.Total), now)
	}
	if d.bytes == nil {
		return nil, Ignored
	}
	piece := span{p.Offset, p.Offset + uint64(len(p.Body))}
	at, found := slices.BinarySearchFunc(d.spans, piece.from, func(s span, from uint64) int { return int(int64(s.from) - int64(from)) })
	switch {
	case malformed || uint64(len(d.bytes)) != p.Total:
	case found && d.spans[at] == piece:
		return nil, Repeated
	case found, at > 0 && d.spans[at-1].to > piece.from, at < len(d.spans) && d.spans[at].from < piece.to:
	default:
		d.spans = slices.Insert(d.spans, at, piece)
		copy(d.bytes[piece.from:], p.Body)
		if d.have += uint64(len(p.Body)); d.have < p.Total {
			return nil, Waiting
		}
		whole := d.bytes
		a.release(d)
		return whole, Complete
	}
	a.release(d)
	a.Malformed++
	return nil, Malformed
}

func (a *Assembler) begin(key name, total int, now time.Time) *datagram {
	for len(a.order) > 0 && (len(a.order) >= MaxDatagrams || a.bytes+total+overhead > MaxBytes) {
		a.drop()
	}
	if a.datagrams == nil {
		a.datagrams = make(map[name]*datagram)
	}
	d := &datagram{name: key, began: now, bytes: make([]byte, total)}
	a.datagrams[key] = d
	a.order = append(a.order, d)
	a.bytes += total + overhead
	return d
}

// release gives the bytes of a datagram back; its name stays, so that late pieces of it are known.
func (a *Assembler) release(d *datagram) {
	a.bytes -= len(d.bytes)
	d.bytes, d.spans = nil, nil
}

// drop forgets the oldest datagram.
func (a *Assembler) drop() {
	d := a.order[0]
	a.order[0] = nil
	a.order = a.order[1:]
	delete(a.datagrams, d.name)
	if d.bytes != nil {
		a.Incomplete++
		a.release(d)
	}
	a.bytes -= overhead
}

// Expire drops what has been incomplete for too long.
func (a *Assembler) Expire(now time.Time) {
	for len(a.order) > 0 && now.Sub(a.order[0].began) > Patience {
		a.drop()
	}
}

package knock

import (
	"crypto/ed25519"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// maxAdmitted bounds the knocks that a gate remembers.
	maxAdmitted = 4096
	// handshake is for how long Initial packets of an admitted connection pass.
	handshake = 10 * time.Second
	// patience is for how long the other datagram of a ClientHello is waited for, and maxPartial bounds the ClientHellos
	// that wait; maxTries bounds the datagrams that are tried with one.
	patience   = 3 * time.Second
	maxPartial = 256
	maxTries   = 8
	// maxIssued bounds the connection IDs that are recognised in later Initial packets.
	maxIssued = 4096
)

// Gate decides which datagrams with long headers a listener's QUIC stack sees: all others are answered with silence.
type Gate struct {
	Key     ed25519.PrivateKey
	Allowed func(PublicKey) bool
	// Window is by how much a dialler's clock may differ.
	Window time.Duration
	Now    func() time.Time

	mu       sync.Mutex
	admitted map[[macLen]byte]*Admission
	partial  int // how many of them are not whole
	byAddr   map[netip.AddrPort]*Admission
	// issued are the latest connection IDs of the QUIC stack, in a ring.
	issued map[string]bool
	order  []string
	at     int
	refuse uint64
}

// Admission is a knock that was let in.
type Admission struct {
	Dialler PublicKey
	from    netip.AddrPort
	dcid    []byte
	at      time.Time
	ended   bool

	// While the ClientHello is not whole: what came of it, and what the knock says about it.
	held  []byte
	knock Knock
	tries int
}

// Issued notes a connection ID that the QUIC stack gave out.
func (g *Gate) Issued(id []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.issued == nil {
		g.issued, g.order = make(map[string]bool), make([]string, maxIssued)
	}
	delete(g.issued, g.order[g.at])
	g.order[g.at] = string(id)
	g.issued[string(id)] = true
	g.at = (g.at + 1) % maxIssued
}

// Refused returns how many datagrams were not let through.
func (g *Gate) Refused() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refuse
}

// Incoming returns what may pass when a datagram with a long header has come: nothing, the datagram, or both datagrams of
// a ClientHello.
func (g *Gate) Incoming(datagram []byte, from netip.AddrPort) [][]byte {
	// A Handshake packet of an unknown connection is dropped by the QUIC stack, without an answer.
	if len(datagram) > 5 && datagram[0]&0xf0 == 0xe0 && [4]byte(datagram[1:5]) == [4]byte{0, 0, 0, version1} {
		return [][]byte{datagram}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if p, err := ParseInitial(datagram); err == nil && len(p.Token) == Len {
		if passed, ok := g.knocked(p, datagram, from); ok {
			return passed
		}
	}
	g.refuse++
	return nil
}

// knocked says what passes, and whether the datagram was of any use.
func (g *Gate) knocked(p Initial, datagram []byte, from netip.AddrPort) ([][]byte, bool) {
	now := g.Now()
	name := [macLen]byte(p.Token[noiseLen:])
	if known := g.admitted[name]; known != nil {
		ours := slices.Equal(p.DCID, known.dcid) || g.issued[string(p.DCID)]
		if !ours || from != known.from || known.ended || now.Sub(known.at) >= handshake {
			return nil, false
		}
		if known.held != nil {
			return g.another(known, p, datagram, now)
		}
		return [][]byte{datagram}, true
	}
	// A datagram of less than 1200 bytes begins no connection (RFC 9000 section 14.1).
	if len(p.packet)+len(p.Coalesced) < 1200 {
		return nil, false
	}
	window := uint64(g.Window / time.Second)
	knock, err := Open(g.Key, p.DCID, p.Token, uint64(now.Unix()), window)
	// We take the hybrid key exchange, so nobody has to fall back.
	if err != nil || !g.Allowed(knock.Dialler) || knock.Fallback {
		return nil, false
	}
	admission := &Admission{Dialler: knock.Dialler, from: from, dcid: slices.Clone(p.DCID), at: now, knock: knock}
	hello, err := HelloOf(p)
	switch {
	case errors.Is(err, ErrIncomplete) && g.partials(now) < maxPartial && g.room(now):
		admission.held = slices.Clone(datagram)
		g.partial++
		g.admitted[name] = admission
		return nil, true
	case err != nil || knock.CheckHello(hello) != nil || !g.room(now):
		return nil, false
	}
	g.admitted[name], g.byAddr[from] = admission, admission
	return [][]byte{datagram}, true
}

// another takes a further datagram of a ClientHello that is not whole.
func (g *Gate) another(a *Admission, p Initial, datagram []byte, now time.Time) ([][]byte, bool) {
	if now.Sub(a.at) >= patience {
		g.give(a)
		return nil, false
	}
	first, err := ParseInitial(a.held)
	if a.tries++; err != nil || a.tries > maxTries || !slices.Equal(p.DCID, a.dcid) {
		return nil, false
	}
	hello, err := HelloOf(first, p)
	if err != nil || a.knock.CheckHello(hello) != nil {
		return nil, errors.Is(err, ErrIncomplete)
	}
	held := a.held
	a.held = nil
	g.partial--
	g.byAddr[a.from] = a
	return [][]byte{held, datagram}, true
}

// give gives up a ClientHello that is not whole: its knock stays used.
func (g *Gate) give(a *Admission) {
	a.held, a.ended = nil, true
	g.partial--
}

// partials returns how many ClientHellos are not whole, and gives up those whose time is over if there are too many.
func (g *Gate) partials(now time.Time) int {
	if g.partial >= maxPartial {
		for _, a := range g.admitted {
			if a.held != nil && now.Sub(a.at) >= patience {
				g.give(a)
			}
		}
	}
	return g.partial
}

// room forgets knocks whose time has passed, and says whether one more may be remembered.
func (g *Gate) room(now time.Time) bool {
	if g.admitted == nil {
		g.admitted, g.byAddr = make(map[[macLen]byte]*Admission), make(map[netip.AddrPort]*Admission)
	}
	if len(g.admitted) < maxAdmitted {
		return true
	}
	// Their mac1 is refused from then on.
	keep := 2*g.Window + 2*epochSeconds*time.Second
	for name, admission := range g.admitted {
		if now.Sub(admission.at) > keep {
			if admission.held != nil {
				g.give(admission)
			}
			delete(g.admitted, name)
			if g.byAddr[admission.from] == admission {
				delete(g.byAddr, admission.from)
			}
		}
	}
	return len(g.admitted) < maxAdmitted
}

// Connection returns the admission of the connection that begins at an address; nil if there is none.
func (g *Gate) Connection(from netip.AddrPort) *Admission {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.byAddr[from]
}

// End says that the connection of an admission has ended: its knock opens nothing any more.
func (g *Gate) End(a *Admission) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a.ended = true
}

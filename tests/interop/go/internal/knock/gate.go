package knock

import (
	"crypto/ed25519"
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

// Incoming says whether a datagram with a long header may pass.
func (g *Gate) Incoming(datagram []byte, from netip.AddrPort) bool {
	// A Handshake packet of an unknown connection is dropped by the QUIC stack, without an answer.
	if len(datagram) > 5 && datagram[0]&0xf0 == 0xe0 && [4]byte(datagram[1:5]) == [4]byte{0, 0, 0, version1} {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if p, err := ParseInitial(datagram); err == nil && len(p.Token) == Len && g.knocked(p, from) {
		return true
	}
	g.refuse++
	return false
}

func (g *Gate) knocked(p Initial, from netip.AddrPort) bool {
	now := g.Now()
	name := [macLen]byte(p.Token[noiseLen:])
	if known := g.admitted[name]; known != nil {
		ours := slices.Equal(p.DCID, known.dcid) || g.issued[string(p.DCID)]
		return ours && from == known.from && !known.ended && now.Sub(known.at) < handshake
	}
	// A datagram of less than 1200 bytes begins no connection (RFC 9000 section 14.1).
	if len(p.packet)+len(p.Coalesced) < 1200 {
		return false
	}
	window := uint64(g.Window / time.Second)
	knock, err := Open(g.Key, p.DCID, p.Token, uint64(now.Unix()), window)
	if err != nil || !g.Allowed(knock.Dialler) {
		return false
	}
	hello, err := p.ClientHello()
	if err != nil || knock.CheckHello(hello) != nil || !g.room(now) {
		return false
	}
	admission := &Admission{Dialler: knock.Dialler, from: from, dcid: slices.Clone(p.DCID), at: now}
	g.admitted[name], g.byAddr[from] = admission, admission
	return true
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

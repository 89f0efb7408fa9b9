package culvert

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"time"

	"culvert.example/culvert/internal/wire"
)

// Config says who an agent is and what it offers.
type Config struct {
	// Key is the identity.
	Key ed25519.PrivateKey
	// Services are offered to every peer.
	Services []Service
	// Authorize says which keys a [Listener] admits; nil: none. [Dial] does not ask it. The listener remembers every key
	// that connected until it is closed.
	Authorize func(PublicKey) bool
	// PresharedKeys returns the keys that we share with a peer, the preferred one first, at most two; nil: none with
	// anyone. It is asked at each connection. A peer with a key needs lanes.
	PresharedKeys func(PublicKey) []PresharedKey
	// Lanes is the most lanes that a peer gets: 0 is 8, and below 0 there are none (standard mode).
	Lanes int
	// MaxFlows is the most UDP flows that a peer may open at a time; 0 is 4,096.
	MaxFlows int
	// MaxStreams is the most TCP forwards that a peer may open at a time; 0 is 1,024.
	MaxStreams int
	// KeyUpdateAfter is after how many packets a lane updates its keys; 0 is half of what a key may seal.
	KeyUpdateAfter uint64
	// ClockWindow is by how much the clocks of a dialler and a [Listener] may differ; 0 is 90 s.
	ClockWindow time.Duration
	// Local is the address from which [Dial] sends, host:port; empty is any.
	Local string
	// Software is what the other end's status shows; empty is "culvert-go".
	Software string
	// Logger gets what happens to connections; nil: nothing is logged.
	Logger *slog.Logger
}

// Upstream opens a connection behind a service, once for each UDP flow or TCP forward.
type Upstream func(ctx context.Context) (net.Conn, error)

// Service is what peers can reach under a name. A nil upstream means that the service is not for that protocol.
type Service struct {
	Name     string
	UDP, TCP Upstream
	// Idle is the silence after which a UDP flow is forgotten; 0 is 60 s.
	Idle time.Duration
	// Fragment has datagrams travel in pieces that fit into no packet.
	Fragment bool
}

// Forward returns an upstream at an address, such as Forward("udp", "127.0.0.1:53").
func Forward(network, address string) Upstream {
	return func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address)
	}
}

const (
	defaultIdle    = time.Minute
	longestIdle    = time.Hour
	defaultLanes   = 8
	defaultFlows   = 4096
	defaultStreams = 1024
	defaultWindow  = 90 * time.Second
	maxPacket      = wire.MaxPacket
)

// agent is what all sessions of a Dial or a Listener share.
type agent struct {
	Config
	public   PublicKey
	instance [16]byte
	log      *slog.Logger
}

func newAgent(c Config) (*agent, error) {
	if len(c.Key) != ed25519.PrivateKeySize {
		return nil, errors.New("Config.Key is missing (remedy: GenerateKey or LoadKey)")
	}
	if c.MaxFlows == 0 {
		c.MaxFlows = defaultFlows
	}
	if c.MaxStreams == 0 {
		c.MaxStreams = defaultStreams
	}
	if c.ClockWindow == 0 {
		c.ClockWindow = defaultWindow
	}
	if c.Software == "" {
		c.Software = "culvert-go"
	}
	if c.Lanes == 0 {
		c.Lanes = defaultLanes
	}
	a := &agent{Config: c, public: PublicOf(c.Key), log: c.Logger}
	if a.log == nil {
		a.log = slog.New(slog.DiscardHandler)
	}
	if _, err := rand.Read(a.instance[:]); err != nil {
		return nil, err
	}
	// The bounds of a hello are ours as well.
	if _, err := wire.ParseEnvelope(wire.AppendEnvelope(nil, a.hello(nil, nil))); err != nil {
		return nil, fmt.Errorf("Config: %w", err)
	}
	return a, nil
}

// hello is the first message of a session.
func (a *agent) hello(possession []byte, preshared [][]byte) *wire.Hello {
	h := &wire.Hello{
		Version:    wire.Version,
		Instance:   a.instance[:],
		Software:   a.Software,
		Workers:    uint32(min(runtime.GOMAXPROCS(0), wire.MaxWorkers)),
		MaxLanes:   uint32(min(max(a.Lanes, 0), wire.MaxLanes)),
		MaxPacket:  maxPacket,
		Features:   wire.FeaturePieces | wire.FeaturePresharedKeys | wire.FeatureStreamAbort | wire.FeatureStreamCredit,
		Possession: possession,

		PresharedKeys: preshared,
	}
	for number, s := range a.Services {
		h.Services = append(h.Services, wire.Service{
			Number: uint32(number), Name: s.Name, UDP: s.UDP != nil, TCP: s.TCP != nil,
			IdleMS: uint32(s.Idle.Milliseconds()), Fragment: s.Fragment,
		})
	}
	return h
}

// sharedWith are the keys that we share with a peer.
func (a *agent) sharedWith(peer PublicKey) []PresharedKey {
	if a.PresharedKeys == nil {
		return nil
	}
	return a.PresharedKeys(peer)
}

// idleOf is how long a UDP flow of a service may be silent.
func idleOf(ms uint32) time.Duration {
	if ms == 0 {
		return defaultIdle
	}
	return time.Duration(ms) * time.Millisecond
}

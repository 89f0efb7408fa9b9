package culvert

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/knock"
	"culvert.example/culvert/internal/underlay"
	"culvert.example/culvert/internal/wire"
)

// raw is a dialler that says what a test wants.
type raw struct {
	t        *testing.T
	agent    *agent
	listener *Listener
	conn     *quic.Conn
	control  *quic.Stream
}

// rawDial connects to a listener of the test that admits it and offers services. The hello is not sent.
func rawDial(t *testing.T, services ...Service) *raw {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, own, _ := ed25519.GenerateKey(rand.Reader)
	l, err := Listen("127.0.0.1:0", Config{
		Key: own, Lanes: 2, Services: services, Authorize: func(k PublicKey) bool { return k == PublicOf(key) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	a, err := newAgent(Config{Key: key, Lanes: 2})
	if err != nil {
		t.Fatal(err)
	}
	knocker := &knock.Knocker{Key: key, Listener: knock.PublicKey(PublicOf(own)), Random: rand.Reader, Now: time.Now}
	socket, err := underlay.Open(netip.MustParseAddrPort("127.0.0.1:0"), underlay.Hooks{Outgoing: knocker.Outgoing})
	if err != nil {
		t.Fatal(err)
	}
	transport := &quic.Transport{Conn: socket, ConnectionIDGenerator: connIDs{}}
	t.Cleanup(func() { transport.Close(); socket.Close() })
	config, err := tlsConfig(key, func(PublicKey) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r := &raw{t: t, agent: a, listener: l}
	if r.conn, err = transport.Dial(ctx, net.UDPAddrFromAddrPort(l.Address()), config, quicConfig(a, true)); err != nil {
		t.Fatal(err)
	}
	if r.control, err = r.conn.OpenStreamSync(ctx); err != nil {
		t.Fatal(err)
	}
	return r
}

// hello is the hello that an agent would say.
func (r *raw) hello() *wire.Hello {
	signed, err := possession(r.conn.ConnectionState().TLS)
	if err != nil {
		r.t.Fatal(err)
	}
	return r.agent.hello(ed25519.Sign(r.agent.Key, signed), nil)
}

func (r *raw) send(messages ...wire.Message) {
	for _, message := range messages {
		// The listener may have closed the connection already.
		_, _ = r.control.Write(wire.AppendFramed(nil, message))
	}
}

// closed waits for the listener to close the connection, and returns the code.
func (r *raw) closed() uint64 {
	r.t.Helper()
	select {
	case <-r.conn.Context().Done():
	case <-time.After(15 * time.Second):
		r.t.Fatal("the connection stays")
	}
	var closed *quic.ApplicationError
	if !errors.As(context.Cause(r.conn.Context()), &closed) {
		r.t.Fatal(context.Cause(r.conn.Context()))
	}
	return uint64(closed.ErrorCode)
}

func TestWhatBreaksTheProtocolClosesTheConnection(t *testing.T) {
	t.Parallel()
	id := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	cases := []struct {
		name string
		code uint64
		do   func(*raw)
	}{
		{"another version", wire.CloseVersion, func(r *raw) {
			h := r.hello()
			h.Version = 2
			r.send(h)
		}},
		{"no proof of possession", wire.CloseViolation, func(r *raw) {
			h := r.hello()
			h.Possession = nil
			r.send(h)
		}},
		{"a wrong proof", wire.CloseViolation, func(r *raw) {
			h := r.hello()
			h.Possession[0] ^= 1
			r.send(h)
		}},
		{"a first message that is no hello", wire.CloseViolation, func(r *raw) { r.send(&wire.Here{}) }},
		{"two hellos", wire.CloseViolation, func(r *raw) { r.send(r.hello(), r.hello()) }},
		{"an answer that only a listener gives", wire.CloseViolation, func(r *raw) {
			r.send(r.hello(), &wire.LaneAccept{LaneOpen: wire.LaneOpen{Epoch: 1, ConnectionID: id}})
		}},
		{"a wish that only a listener has", wire.CloseViolation, func(r *raw) { r.send(r.hello(), &wire.StreamsWanted{}) }},
		{"a message of stream connections", wire.CloseViolation, func(r *raw) { r.send(r.hello(), &wire.Release{}) }},
		{"a lane in standard mode", wire.CloseViolation, func(r *raw) {
			h := r.hello()
			h.MaxLanes = 0
			r.send(h, &wire.LaneOpen{Epoch: 1, ConnectionID: id})
		}},
		{"what does not parse", wire.CloseViolation, func(r *raw) {
			r.send(r.hello())
			_, _ = r.control.Write([]byte{1, 0xff})
		}},
		{"a message that is too long", wire.CloseViolation, func(r *raw) {
			r.send(r.hello())
			_, _ = r.control.Write([]byte{0x80, 1, 0, 1})
		}},
		{"too many messages", wire.CloseLimit, func(r *raw) {
			r.send(r.hello())
			for range 3 * unitsAtOnce {
				r.send(&wire.Here{})
			}
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := rawDial(t)
			c.do(r)
			if code := r.closed(); code != c.code {
				t.Fatalf("closed with %d, not %d", code, c.code)
			}
		})
	}
}

// answerTo reads messages until one fits.
func answerTo[M wire.Message](r *raw) M {
	r.t.Helper()
	_ = r.control.SetReadDeadline(time.Now().Add(15 * time.Second))
	for {
		frame, err := wire.ReadFrame(r.control, wire.MaxEnvelope)
		if err != nil {
			r.t.Fatal(err)
		}
		message, err := wire.ParseEnvelope(frame)
		if err != nil {
			r.t.Fatal(err)
		}
		if m, ok := message.(M); ok {
			return m
		}
	}
}

func TestALaneIsRefusedForItsEpochAndItsIndex(t *testing.T) {
	t.Parallel()
	r := rawDial(t)
	id := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	r.send(r.hello(), &wire.LaneOpen{Lane: 1, Epoch: 5, ConnectionID: id})
	if m := answerTo[*wire.LaneAccept](r); m.Lane != 1 || m.Epoch != 5 {
		t.Fatalf("%+v", m)
	}
	for _, refused := range []struct {
		lane   uint32
		epoch  uint64
		reason uint32
	}{
		{1, 5, wire.RefusalEpochReused}, {1, 4, wire.RefusalEpochReused}, {7, 1, wire.RefusalTooMany},
	} {
		r.send(&wire.LaneOpen{Lane: refused.lane, Epoch: refused.epoch, ConnectionID: id})
		if m := answerTo[*wire.LaneRefuse](r); m.Lane != refused.lane || m.Epoch != refused.epoch || m.Reason != refused.reason {
			t.Fatalf("%+v: %+v", refused, m)
		}
	}
	time.Sleep(youngest)
	r.send(&wire.LaneOpen{Lane: 1, Epoch: 7, ConnectionID: id})
	if m := answerTo[*wire.LaneAccept](r); m.Epoch != 7 {
		t.Fatalf("%+v", m)
	}
}

func TestAPeersLimitHoldsForDatagrams(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := newPeer(ctx, &agent{}, PublicKey{})
	allowed := func() (bytes int) {
		for range 1000 {
			if p.maySend(1000) {
				bytes += 1000
			}
		}
		return bytes
	}
	if got := allowed(); got != 1_000_000 {
		t.Fatalf("%d bytes without a limit", got)
	}
	p.limit(1) // counts as 64 kbit/s
	if got := allowed(); got == 0 || got > rateLeast+10_000 {
		t.Fatalf("%d bytes at 64 kbit/s", got)
	}
	p.limit(0)
	if got := allowed(); got != 1_000_000 {
		t.Fatalf("%d bytes after the limit", got)
	}
}

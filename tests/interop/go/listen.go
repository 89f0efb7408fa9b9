package culvert

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/knock"
	"culvert.example/culvert/internal/underlay"
	"culvert.example/culvert/internal/wire"
)

// Listener waits for diallers. It answers only those who knock with a key that Config.Authorize admits.
type Listener struct {
	agent     *agent
	socket    *underlay.Socket
	transport *quic.Transport
	listener  *quic.Listener
	gate      *knock.Gate
	ctx       context.Context
	stop      context.CancelFunc
	accepted  chan *Peer

	mu    sync.Mutex
	peers map[PublicKey]*Peer
	// conns counts the connections of each key, unfinished ones too.
	conns map[PublicKey]int
	order uint64
}

// connsOfKey bounds them: a session, its successor, and attempts that were not answered in time.
const connsOfKey = 8

// arrival is what the first packet of a connection told.
type arrival struct {
	admission *knock.Admission
	order     uint64
}

type arrivalKey struct{}

// Listen listens on a UDP address, host:port. On a host with several addresses, name one: packets of lanes leave from
// the address that the kernel chooses.
func Listen(address string, config Config) (*Listener, error) {
	a, err := newAgent(config)
	if err != nil {
		return nil, err
	}
	if a.Authorize == nil {
		a.Authorize = func(PublicKey) bool { return false }
	}
	resolved, err := net.ResolveUDPAddr("udp", address)
	if err != nil {
		return nil, err
	}
	l := &Listener{agent: a, accepted: make(chan *Peer), peers: make(map[PublicKey]*Peer), conns: make(map[PublicKey]int)}
	l.gate = &knock.Gate{
		Key: a.Key, Window: a.ClockWindow, Now: time.Now,
		Allowed: func(key knock.PublicKey) bool { return a.Authorize(PublicKey(key)) },
	}
	local := netip.AddrPortFrom(resolved.AddrPort().Addr().Unmap(), uint16(resolved.Port))
	if l.socket, err = underlay.Open(local, underlay.Hooks{Incoming: l.gate.Incoming}); err != nil {
		return nil, err
	}
	l.transport = &quic.Transport{
		Conn: l.socket, ConnectionIDGenerator: connIDs{l.gate.Issued},
		DisableVersionNegotiationPackets: true, ConnContext: l.begin,
	}
	tlsConfig, err := tlsConfig(a.Key, a.Authorize)
	if err == nil {
		l.listener, err = l.transport.Listen(tlsConfig, quicConfig(a, false))
	}
	if err != nil {
		l.socket.Close()
		return nil, err
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	go l.serve()
	return l, nil
}

// begin notes which knock a connection begins with.
func (l *Listener) begin(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	from, ok := info.RemoteAddr.(*net.UDPAddr)
	if !ok {
		return nil, net.ErrClosed
	}
	admission := l.gate.Connection(netip.AddrPortFrom(from.AddrPort().Addr().Unmap(), uint16(from.Port)))
	if admission == nil {
		return nil, net.ErrClosed
	}
	key := PublicKey(admission.Dialler)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[key] >= connsOfKey {
		return nil, fmt.Errorf("%v has %d connections", key, connsOfKey)
	}
	l.conns[key]++
	l.order++
	a := &arrival{admission, l.order}
	context.AfterFunc(ctx, func() { l.ended(admission) })
	return context.WithValue(ctx, arrivalKey{}, a), nil
}

// ended notes the end of a connection.
func (l *Listener) ended(admission *knock.Admission) {
	l.gate.End(admission)
	key := PublicKey(admission.Dialler)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[key]--; l.conns[key] == 0 {
		delete(l.conns, key)
	}
}

// Address returns where the listener listens.
func (l *Listener) Address() netip.AddrPort { return l.socket.Local() }

// Link returns the link to the listener, for those who reach it at its own address.
func (l *Listener) Link() Link { return Link{Address: l.Address().String(), Key: l.agent.public} }

// Refused returns how many datagrams with long headers were answered with silence.
func (l *Listener) Refused() uint64 { return l.gate.Refused() }

// Accept returns the next peer that connects for the first time.
func (l *Listener) Accept(ctx context.Context) (*Peer, error) {
	select {
	case p := <-l.accepted:
		return p, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close ends the listener and its peers.
func (l *Listener) Close() error {
	l.stop()
	l.mu.Lock()
	peers := make([]*Peer, 0, len(l.peers))
	for _, p := range l.peers {
		peers = append(peers, p)
	}
	l.mu.Unlock()
	for _, p := range peers {
		p.Close()
	}
	_ = l.listener.Close()
	_ = l.transport.Close()
	return l.socket.Close()
}

func (l *Listener) serve() {
	for {
		conn, err := l.listener.Accept(l.ctx)
		if err != nil {
			return
		}
		go func() {
			if err := l.connection(conn); err != nil {
				l.agent.log.Info("a connection was refused", "from", conn.RemoteAddr(), "error", err)
				_ = conn.CloseWithError(closeCode(err), "refused")
			}
		}()
	}
}

// connection exchanges hellos with a dialler and serves its session.
func (l *Listener) connection(conn *quic.Conn) error {
	state := conn.ConnectionState().TLS
	key, err := peerKey(state)
	if err != nil {
		return err
	}
	arrival, ok := conn.Context().Value(arrivalKey{}).(*arrival)
	if !ok || PublicKey(arrival.admission.Dialler) != key {
		return fmt.Errorf("%v used a knock of another key", key)
	}
	ctx, cancel := context.WithTimeout(conn.Context(), helloLimit)
	defer cancel()
	control, err := conn.AcceptStream(ctx)
	if err != nil {
		return err
	}
	hello, err := readHello(control)
	if err != nil {
		return err
	}
	signed, err := possession(state)
	if err != nil {
		return err
	}
	if !ed25519.Verify(key[:], signed, hello.Possession) {
		return fmt.Errorf("%v did not prove that it holds its key", key)
	}
	keys, err := newPresharedKeys(state, l.agent.sharedWith(key), false)
	if err != nil {
		return err
	}
	s, err := newSession(l.agent, conn, control, keys, hello)
	if err != nil {
		return err
	}
	s.order = arrival.order
	s.sockets = func(uint32) (*underlay.Socket, error) { return l.socket, nil }
	peer, fresh := l.peer(key)
	s.peer = peer
	if before := peer.current(); before != nil && before.order > s.order && slices.Equal(before.hello.Instance, hello.Instance) {
		// The same process dialled again before this hello came.
		_ = conn.CloseWithError(wire.CloseReplaced, "replaced")
		return nil
	}
	if err := s.send(l.agent.hello(nil, keys.shown())); err != nil {
		return err
	}
	if before := peer.attach(s); before != nil {
		before.close(wire.CloseReplaced, "replaced")
	}
	peer.log("connected", "from", conn.RemoteAddr(), "software", hello.Software)
	if fresh {
		go func() {
			select {
			case l.accepted <- peer:
			case <-l.ctx.Done():
			}
		}()
	}
	s.run()
	return nil
}

func (l *Listener) peer(key PublicKey) (p *Peer, fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.peers[key]; p != nil {
		return p, false
	}
	p = newPeer(l.ctx, l.agent, key)
	l.peers[key] = p
	return p, true
}

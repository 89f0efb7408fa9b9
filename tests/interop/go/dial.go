package culvert

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
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

const (
	dialLimit    = 5 * time.Second
	firstBackoff = 100 * time.Millisecond
	mostBackoff  = 5 * time.Second
	lanesLimit   = 2 * time.Second
	// attemptEvery is when the next attempt begins beside those that were not answered.
	attemptEvery   = time.Second
	attemptsAtOnce = 4
)

// Dial connects to the agent at link, and keeps connected until the [Peer] is closed. ctx bounds the first connection
// only. It returns when payloads can be sent.
func Dial(ctx context.Context, link Link, config Config) (*Peer, error) {
	a, err := newAgent(config)
	if err != nil {
		return nil, err
	}
	if a.public == link.Key {
		return nil, errors.New("the link is to ourselves (remedy: another key at one end)")
	}
	p := newPeer(context.Background(), a, link.Key)
	d := &dialler{agent: a, peer: p, link: link}
	p.rebind = d.rebind
	first, err := d.dial(ctx)
	if err != nil {
		p.Close()
		return nil, err
	}
	go d.keep(first)
	if first.plain == nil {
		ctx, cancel := context.WithTimeout(ctx, lanesLimit)
		defer cancel()
		if err := p.LanesUp(ctx, 1); err != nil {
			p.Close()
			return nil, fmt.Errorf("no lane came up: %w", err)
		}
	}
	return p, nil
}

// dialler keeps one peer connected.
type dialler struct {
	agent *agent
	peer  *Peer
	link  Link

	mu    sync.Mutex
	local string // in place of Config.Local, after a Rebind
	lines []*line
}

// line is one connection's sockets: the control connection's is that of lane 0 too.
type line struct {
	transport *quic.Transport
	mu        sync.Mutex
	sockets   map[uint32]*underlay.Socket
	local     netip.AddrPort
	closed    bool
}

func (l *line) socket(index uint32) (*underlay.Socket, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, net.ErrClosed
	}
	if s := l.sockets[index]; s != nil {
		return s, nil
	}
	s, err := underlay.Open(netip.AddrPortFrom(l.local.Addr(), 0), underlay.Hooks{})
	if err == nil {
		l.sockets[index] = s
	}
	return s, err
}

func (l *line) close() {
	_ = l.transport.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, s := range l.sockets {
		s.Close()
	}
}

// localFor returns the address to send from: Config.Local, or any of the remote address's family.
func localFor(local string, remote netip.AddrPort) (netip.AddrPort, error) {
	if local != "" {
		resolved, err := net.ResolveUDPAddr("udp", local)
		if err != nil {
			return netip.AddrPort{}, err
		}
		return netip.AddrPortFrom(resolved.AddrPort().Addr().Unmap(), uint16(resolved.Port)), nil
	}
	if remote.Addr().Is4() {
		return netip.AddrPortFrom(netip.IPv4Unspecified(), 0), nil
	}
	return netip.AddrPortFrom(netip.IPv6Unspecified(), 0), nil
}

// connIDs makes the connection IDs of QUIC connections.
type connIDs struct{ issued func([]byte) }

func (connIDs) ConnectionIDLen() int { return len(underlay.ConnectionID{}) }

func (c connIDs) GenerateConnectionID() (quic.ConnectionID, error) {
	id := newLaneID()
	id[0] &^= 1
	if c.issued != nil {
		c.issued(id[:])
	}
	return quic.ConnectionIDFromBytes(id[:]), nil
}

func quicConfig(a *agent, dials bool) *quic.Config {
	c := &quic.Config{
		Versions:              []quic.Version{quic.Version1},
		HandshakeIdleTimeout:  dialLimit,
		MaxIdleTimeout:        listenIdle,
		MaxIncomingStreams:    int64(a.MaxStreams) + 1,
		MaxIncomingUniStreams: -1,
		EnableDatagrams:       true,
	}
	if dials {
		c.MaxIdleTimeout, c.KeepAlivePeriod = dialIdle, dialKeepAlive
	}
	return c
}

// dial makes a connection. It begins with another knock every second: a listener that has just started refuses those of
// its first second, in silence.
func (d *dialler) dial(ctx context.Context) (*session, error) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	type result struct {
		line *line
		conn *quic.Conn
		to   netip.AddrPort
		err  error
	}
	results := make(chan result)
	attempt := func() {
		l, to, err := d.line()
		var conn *quic.Conn
		if err == nil {
			conn, err = d.handshake(ctx, l, to)
		}
		select {
		case results <- result{l, conn, to, err}:
		case <-ctx.Done():
			if conn != nil {
				_ = conn.CloseWithError(wire.CloseReplaced, "another attempt was first")
			}
			if l != nil {
				l.close()
			}
		}
	}
	ticker := time.NewTicker(attemptEvery)
	defer ticker.Stop()
	go attempt()
	running := 1
	for {
		select {
		case r := <-results:
			if running--; r.err == nil {
				r.err = d.begin(ctx, r.line, r.conn, r.to)
			}
			if r.err == nil {
				return d.peer.current(), nil
			}
			if r.line != nil {
				r.line.close()
			}
			if running == 0 {
				return nil, fmt.Errorf("no connection to %v: %w", d.link.Address, r.err)
			}
		case <-ticker.C:
			if running++; running <= attemptsAtOnce {
				go attempt()
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("no answer from %v: %w (remedy: the agent must be up, know our key, and have the key of the link; its log says why it refuses)", d.link.Address, ctx.Err())
		}
	}
}

// line opens the first socket of a connection.
func (d *dialler) line() (*line, netip.AddrPort, error) {
	resolved, err := net.ResolveUDPAddr("udp", d.link.Address)
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	to := netip.AddrPortFrom(resolved.AddrPort().Addr().Unmap(), uint16(resolved.Port))
	d.mu.Lock()
	local := d.local
	d.mu.Unlock()
	if local == "" {
		local = d.agent.Local
	}
	from, err := localFor(local, to)
	if err != nil {
		return nil, to, err
	}
	knocker := &knock.Knocker{Key: d.agent.Key, Listener: knock.PublicKey(d.link.Key), Random: rand.Reader, Now: time.Now}
	socket, err := underlay.Open(from, underlay.Hooks{Outgoing: knocker.Outgoing})
	if err != nil {
		return nil, to, err
	}
	return &line{
		transport: &quic.Transport{Conn: socket, ConnectionIDGenerator: connIDs{}},
		sockets:   map[uint32]*underlay.Socket{0: socket},
		local:     from,
	}, to, nil
}

func (d *dialler) handshake(ctx context.Context, l *line, to netip.AddrPort) (*quic.Conn, error) {
	tlsConfig, err := tlsConfig(d.agent.Key, func(key PublicKey) bool { return key == d.link.Key })
	if err != nil {
		return nil, err
	}
	return l.transport.Dial(ctx, net.UDPAddrFromAddrPort(to), tlsConfig, quicConfig(d.agent, true))
}

// begin exchanges hellos and makes the connection the peer's session.
func (d *dialler) begin(ctx context.Context, l *line, conn *quic.Conn, to netip.AddrPort) error {
	s, err := d.hello(ctx, conn)
	if err != nil {
		_ = conn.CloseWithError(closeCode(err), "no hello")
		return err
	}
	d.mu.Lock()
	d.lines = append(d.lines, l)
	d.mu.Unlock()
	context.AfterFunc(conn.Context(), func() {
		d.mu.Lock()
		d.lines = slices.DeleteFunc(d.lines, func(each *line) bool { return each == l })
		d.mu.Unlock()
		l.close()
	})
	s.peer, s.sockets, s.to = d.peer, l.socket, to
	if before := d.peer.attach(s); before != nil {
		before.close(wire.CloseReplaced, "replaced")
	}
	d.peer.log("connected", "address", to, "software", s.hello.Software)
	go s.run()
	return nil
}

func (d *dialler) hello(ctx context.Context, conn *quic.Conn) (*session, error) {
	control, err := conn.OpenStreamSync(ctx)
	if err != nil {
		return nil, err
	}
	state := conn.ConnectionState().TLS
	signed, err := possession(state)
	if err != nil {
		return nil, err
	}
	keys, err := newPresharedKeys(state, d.agent.sharedWith(d.link.Key), true)
	if err != nil {
		return nil, err
	}
	hello := d.agent.hello(ed25519.Sign(d.agent.Key, signed), keys.shown())
	if _, err := control.Write(wire.AppendFramed(nil, hello)); err != nil {
		return nil, err
	}
	theirs, err := readHello(control)
	if err != nil {
		return nil, err
	}
	return newSession(d.agent, conn, control, keys, theirs)
}

// keep connects again when the connection ends, and beside it when it seems to be dead.
func (d *dialler) keep(s *session) {
	backoff := firstBackoff
	for {
		select {
		case <-s.conn.Context().Done():
		case <-s.suspect:
		case <-d.peer.ctx.Done():
			s.close(wire.CloseShutdown, "closed")
			return
		}
		next, err := d.dial(d.peer.ctx)
		if err == nil {
			s, backoff = next, firstBackoff
			continue
		}
		if d.peer.ctx.Err() != nil {
			return
		}
		d.peer.log("cannot connect", "error", err)
		if s.conn.Context().Err() == nil && s.lanesUp() > 0 {
			continue // It was a short outage.
		}
		select {
		case <-time.After(backoff):
		case <-d.peer.ctx.Done():
			return
		}
		backoff = min(2*backoff, mostBackoff)
		if s.conn.Context().Err() == nil {
			// Nothing else tells that it is still without a lane.
			select {
			case s.suspect <- struct{}{}:
			default:
			}
		}
	}
}

// rebind moves every socket.
func (d *dialler) rebind(local string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.local = local
	for _, l := range d.lines {
		if err := l.rebind(local); err != nil {
			return err
		}
	}
	return nil
}

func (l *line) rebind(local string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	from, err := localFor(local, l.local)
	if err != nil {
		return err
	}
	l.local = from
	var errs error
	for index, socket := range l.sockets {
		address := from
		if index != 0 {
			address = netip.AddrPortFrom(from.Addr(), 0)
		}
		errs = errors.Join(errs, socket.Replace(address))
	}
	return errs
}

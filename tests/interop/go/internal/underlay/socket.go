// Package underlay has the UDP sockets that carry QUIC: one socket serves a quic-go transport and any number of lanes,
// which are told apart by the connection ID of a packet.
package underlay

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
)

const (
	// bufferLen holds what the kernel joins of one source (UDP_GRO).
	bufferLen = 64 << 10
	batchLen  = 8
	// waiting bounds the packets that wait for quic-go.
	waiting = 1024
	// socketBuffer is asked of the kernel, which grants up to net.core.rmem_max.
	socketBuffer = 4 << 20
)

// ConnectionID is that of a lane.
type ConnectionID [8]byte

// A Receiver takes the packets with one connection ID. It must be done with packet when it returns, and may change it.
type Receiver interface {
	ReceivePacket(packet []byte, from netip.AddrPort)
	// EndBatch says that no more packets were there to read.
	EndBatch()
}

// Hooks see the packets of the QUIC connections of a socket, not those of lanes.
type Hooks struct {
	// Outgoing returns the datagrams to send in place of one with a long header; nil: that one.
	Outgoing func(datagram []byte) [][]byte
	// Incoming returns what quic-go may see when a datagram with a long header has come: nothing, or it and those from the
	// same source that were held back for it.
	Incoming func(datagram []byte, from netip.AddrPort) [][]byte
}

// Socket is a UDP socket, and the net.PacketConn that quic-go gets. It can be replaced by another one underneath.
type Socket struct {
	hooks  Hooks
	conn   atomic.Pointer[net.UDPConn]
	routes atomic.Pointer[map[ConnectionID]Receiver]
	// Guards changes of routes and conn.
	mu     sync.Mutex
	queue  chan queued
	closed chan struct{}
	once   sync.Once
	// Packets that were dropped because quic-go did not read in time.
	overflow atomic.Uint64
	noGSO    atomic.Bool
	deadline *Deadline
}

type queued struct {
	data []byte
	oob  []byte
	from *net.UDPAddr
}

// Open opens a socket on local.
func Open(local netip.AddrPort, hooks Hooks) (*Socket, error) {
	conn, err := listen(local)
	if err != nil {
		return nil, err
	}
	s := &Socket{
		hooks:  hooks,
		queue:  make(chan queued, waiting),
		closed: make(chan struct{}),

		deadline: NewDeadline(),
	}
	s.routes.Store(&map[ConnectionID]Receiver{})
	s.conn.Store(conn)
	go s.read(conn)
	return s, nil
}

func listen(local netip.AddrPort) (*net.UDPConn, error) {
	network := "udp"
	if local.Addr().Is4() {
		network = "udp4"
	}
	conn, err := net.ListenUDP(network, net.UDPAddrFromAddrPort(local))
	if err != nil {
		return nil, fmt.Errorf("%w (remedy: another address, or end what uses it)", err)
	}
	if err := setOptions(conn); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// Replace sends and receives through a new socket on local from now on, and closes the old one.
func (s *Socket) Replace(local netip.AddrPort) error {
	conn, err := listen(local)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		conn.Close()
		return net.ErrClosed
	default:
	}
	old := s.conn.Swap(conn)
	go s.read(conn)
	return old.Close()
}

// Route gives the packets with this connection ID to receiver.
func (s *Socket) Route(id ConnectionID, receiver Receiver) { s.change(id, receiver) }

// Unroute forgets a connection ID.
func (s *Socket) Unroute(id ConnectionID) { s.change(id, nil) }

func (s *Socket) change(id ConnectionID, receiver Receiver) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := *s.routes.Load()
	routes := make(map[ConnectionID]Receiver, len(old)+1)
	for key, value := range old {
		routes[key] = value
	}
	delete(routes, id)
	if receiver != nil {
		routes[id] = receiver
	}
	s.routes.Store(&routes)
}

// read receives until conn is closed.
func (s *Socket) read(conn *net.UDPConn) {
	batch := ipv4.NewPacketConn(conn)
	messages := make([]ipv4.Message, batchLen)
	for i := range messages {
		messages[i].Buffers = [][]byte{make([]byte, bufferLen)}
		messages[i].OOB = make([]byte, 128)
	}
	var touched []Receiver
	for {
		n, err := batch.ReadBatch(messages, 0)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// An ICMP error of an earlier packet, for instance.
			continue
		}
		routes := *s.routes.Load()
		for i := range messages[:n] {
			touched = s.message(&messages[i], routes, touched)
		}
		for _, receiver := range touched {
			receiver.EndBatch()
		}
		clear(touched)
		touched = touched[:0]
	}
}

// message passes on the packets of one message, and returns touched with the receivers that got some.
func (s *Socket) message(m *ipv4.Message, routes map[ConnectionID]Receiver, touched []Receiver) []Receiver {
	from, ok := m.Addr.(*net.UDPAddr)
	if !ok {
		return touched
	}
	data, oob := m.Buffers[0][:m.N], m.OOB[:m.NN]
	segment := segmentSize(oob, len(data))
	source := netip.AddrPortFrom(from.AddrPort().Addr().Unmap(), uint16(from.Port))
	for len(data) > 0 {
		packet := data[:min(segment, len(data))]
		data = data[len(packet):]
		if len(packet) > 9 && packet[0]&0x80 == 0 {
			if receiver := routes[ConnectionID(packet[1:9])]; receiver != nil {
				receiver.ReceivePacket(packet, source)
				if len(touched) == 0 || touched[len(touched)-1] != receiver {
					touched = append(touched, receiver)
				}
				continue
			}
		}
		passed := [][]byte{packet}
		if s.hooks.Incoming != nil && (len(packet) <= 9 || packet[0]&0x80 != 0) {
			passed = s.hooks.Incoming(packet, source)
		}
		for _, packet := range passed {
			copied := queued{append([]byte(nil), packet...), append([]byte(nil), oob...), from}
			select {
			case s.queue <- copied:
			default:
				s.overflow.Add(1)
			}
		}
	}
	return touched
}

// Overflow returns how many packets quic-go did not read in time.
func (s *Socket) Overflow() uint64 { return s.overflow.Load() }

// ReadBatch gives quic-go its packets.
func (s *Socket) ReadBatch(messages []ipv4.Message, _ int) (int, error) {
	select {
	case first := <-s.queue:
		first.into(&messages[0])
	case <-s.closed:
		return 0, net.ErrClosed
	case <-s.deadline.Passed():
		return 0, os.ErrDeadlineExceeded
	}
	for i := 1; i < len(messages); i++ {
		select {
		case next := <-s.queue:
			next.into(&messages[i])
		default:
			return i, nil
		}
	}
	return len(messages), nil
}

func (q queued) into(m *ipv4.Message) {
	m.N = copy(m.Buffers[0], q.data)
	m.NN = copy(m.OOB, withoutSegmentSize(q.oob))
	m.Addr = q.from
}

// WriteMsgUDP sends for quic-go. Datagrams with a long header pass the hook.
func (s *Socket) WriteMsgUDP(b, oob []byte, to *net.UDPAddr) (int, int, error) {
	conn := s.conn.Load()
	if s.hooks.Outgoing == nil || len(b) == 0 || b[0]&0x80 == 0 {
		n, oobn, err := conn.WriteMsgUDP(b, oob, to)
		return n, oobn, s.replaced(conn, err)
	}
	segment, plain := segmentSize(oob, len(b)), withoutSegmentSize(oob)
	for rest := b; len(rest) > 0; {
		datagram := rest[:min(segment, len(rest))]
		rest = rest[len(datagram):]
		datagrams := s.hooks.Outgoing(datagram)
		if datagrams == nil {
			datagrams = [][]byte{datagram}
		}
		for _, each := range datagrams {
			if _, _, err := conn.WriteMsgUDP(each, plain, to); s.replaced(conn, err) != nil {
				return 0, 0, err
			}
		}
	}
	return len(b), len(oob), nil
}

// replaced forgives an error of a socket that is no longer ours: the packet is lost, as on any path.
func (s *Socket) replaced(conn *net.UDPConn, err error) error {
	if err != nil && s.conn.Load() != conn {
		return nil
	}
	return err
}

// WriteLane sends packets of size bytes each, the last one perhaps shorter, as one message where the kernel can.
func (s *Socket) WriteLane(packets []byte, size int, to netip.AddrPort) error {
	conn := s.conn.Load()
	if len(packets) > size && !s.noGSO.Load() {
		_, _, err := conn.WriteMsgUDPAddrPort(packets, segmentMessage(size), to)
		if err == nil || !isGSOError(err) {
			return s.replaced(conn, err)
		}
		s.noGSO.Store(true)
	}
	for len(packets) > 0 {
		n := min(size, len(packets))
		if _, err := conn.WriteToUDPAddrPort(packets[:n], to); err != nil {
			return s.replaced(conn, err)
		}
		packets = packets[n:]
	}
	return nil
}

// Close closes the socket.
func (s *Socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.once.Do(func() { close(s.closed) })
	return s.conn.Load().Close()
}

// LocalAddr is the address of the present socket.
func (s *Socket) LocalAddr() net.Addr { return s.conn.Load().LocalAddr() }

// Local is the same.
func (s *Socket) Local() netip.AddrPort { return s.conn.Load().LocalAddr().(*net.UDPAddr).AddrPort() }

// ReadFrom is for net.PacketConn. quic-go reads with [Socket.ReadBatch] instead.
func (s *Socket) ReadFrom(b []byte) (int, net.Addr, error) {
	messages := []ipv4.Message{{Buffers: [][]byte{b}}}
	if _, err := s.ReadBatch(messages, 0); err != nil {
		return 0, nil, err
	}
	return messages[0].N, messages[0].Addr, nil
}

// ReadMsgUDP is for quic-go's interface, which has it beside ReadBatch.
func (s *Socket) ReadMsgUDP(b, _ []byte) (n, oobn, flags int, addr *net.UDPAddr, err error) {
	n, from, err := s.ReadFrom(b)
	if err != nil {
		return 0, 0, 0, nil, err
	}
	return n, 0, 0, from.(*net.UDPAddr), nil
}

// WriteTo is for net.PacketConn.
func (s *Socket) WriteTo(b []byte, to net.Addr) (int, error) {
	addr, ok := to.(*net.UDPAddr)
	if !ok {
		return 0, fmt.Errorf("not a UDP address: %v", to)
	}
	n, _, err := s.WriteMsgUDP(b, nil, addr)
	return n, err
}

// SyscallConn gives quic-go the socket, for its options.
func (s *Socket) SyscallConn() (syscall.RawConn, error) { return s.conn.Load().SyscallConn() }

// SetReadBuffer does nothing: the buffers are set when a socket is opened.
func (s *Socket) SetReadBuffer(int) error { return nil }

// SetWriteBuffer does nothing, as SetReadBuffer.
func (s *Socket) SetWriteBuffer(int) error { return nil }

// SetDeadline is that of reading.
func (s *Socket) SetDeadline(t time.Time) error { return s.SetReadDeadline(t) }

// SetReadDeadline ends a ReadBatch.
func (s *Socket) SetReadDeadline(t time.Time) error {
	s.deadline.Set(t)
	return nil
}

// SetWriteDeadline does nothing: a UDP socket hardly blocks.
func (s *Socket) SetWriteDeadline(time.Time) error { return nil }

package culvert

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// maxClients bounds the clients of one local port; further ones are dropped until flows end.
const maxClients = 4096

// ForwardPorts has a local UDP and TCP port lead to a service of the peer, until ctx ends: each client of the UDP port
// has a flow, each TCP connection a stream. It returns the address, which matters for port 0. A protocol that the
// service is not for is left out, as the peer's services are now.
func ForwardPorts(ctx context.Context, p *Peer, address, service string) (netip.AddrPort, error) {
	p.mu.Lock()
	udp, tcp := false, false
	for _, s := range p.services {
		if s.Name == service {
			udp, tcp = s.UDP, s.TCP
		}
	}
	p.mu.Unlock()
	if !udp && !tcp {
		return netip.AddrPort{}, ErrNoService
	}
	var local netip.AddrPort
	if tcp {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return local, err
		}
		local = listener.Addr().(*net.TCPAddr).AddrPort()
		address = local.String()
		context.AfterFunc(ctx, func() { listener.Close() })
		go forwardTCP(ctx, p, listener, service)
	}
	if udp {
		conn, err := net.ListenPacket("udp", address)
		if err != nil {
			return local, err
		}
		socket := conn.(*net.UDPConn)
		// Best effort: the kernel grants what it likes.
		_ = socket.SetReadBuffer(4 << 20)
		local = socket.LocalAddr().(*net.UDPAddr).AddrPort()
		context.AfterFunc(ctx, func() { socket.Close() })
		go forwardUDP(p, socket, service)
	}
	return local, nil
}

func forwardTCP(ctx context.Context, p *Peer, listener net.Listener, service string) {
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		go func() {
			stream, err := p.OpenStream(ctx, service)
			if err != nil {
				p.log("no TCP forward", "service", service, "error", err)
				_ = conn.(*net.TCPConn).SetLinger(0)
				conn.Close()
				return
			}
			Splice(stream, conn)
		}()
	}
}

func forwardUDP(p *Peer, socket *net.UDPConn, service string) {
	var mu sync.Mutex
	clients := make(map[netip.AddrPort]*Flow)
	buffer := make([]byte, 65536)
	for {
		n, from, err := socket.ReadFromUDPAddrPort(buffer)
		if errors.Is(err, net.ErrClosed) {
			mu.Lock()
			defer mu.Unlock()
			for _, flow := range clients {
				go flow.Close()
			}
			return
		}
		if err != nil {
			continue
		}
		mu.Lock()
		flow := clients[from]
		if flow == nil && len(clients) < maxClients {
			if flow, err = p.OpenFlow(service); err == nil {
				clients[from] = flow
				go func() {
					err := answers(flow, socket, from)
					if errors.Is(err, ErrRefused) && !errors.Is(err, ErrTemporary) {
						// Its datagrams are dropped meanwhile.
						select {
						case <-time.After(flow.idle):
						case <-p.ctx.Done():
						}
					}
					mu.Lock()
					defer mu.Unlock()
					delete(clients, from)
				}()
			}
		}
		mu.Unlock()
		if flow != nil {
			// What the flow cannot send is lost, and counted there.
			_, _ = flow.Write(buffer[:n])
		}
	}
}

// answers passes a flow's datagrams to its client until the flow ends, and says why it did.
func answers(flow *Flow, socket *net.UDPConn, client netip.AddrPort) error {
	for {
		datagram, err := flow.next()
		if err != nil {
			return err
		}
		_, _ = socket.WriteToUDPAddrPort(datagram, client)
	}
}

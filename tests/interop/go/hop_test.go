package culvert_test

import (
	"net"
	"sync"
	"testing"
)

// hop relays UDP between clients and a server, as a NAT does: each client has a port of its own at the hop, and
// another one after forget. It remembers the first datagrams of clients.
type hop struct {
	t       testing.TB
	front   *net.UDPConn
	server  *net.UDPAddr
	mu      sync.Mutex
	backs   map[string]*net.UDPConn
	first   [][]byte
	closing bool
	// lose is how many datagrams one is lost of, each way; 0: none is.
	lose, counted int
	// copies is how many more of each datagram arrive, each way.
	copies int
}

const remembered = 32

func newHop(t testing.TB, server string) *hop {
	t.Helper()
	address, err := net.ResolveUDPAddr("udp", server)
	if err != nil {
		t.Fatal(err)
	}
	front, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	h := &hop{t: t, front: front, server: address, backs: make(map[string]*net.UDPConn)}
	t.Cleanup(func() {
		front.Close()
		h.mu.Lock()
		h.closing = true
		h.mu.Unlock()
		h.forget()
	})
	go h.run()
	return h
}

func (h *hop) address() string { return h.front.LocalAddr().String() }

func (h *hop) run() {
	buffer := make([]byte, 65536)
	for {
		n, from, err := h.front.ReadFromUDP(buffer)
		if err != nil {
			return
		}
		h.mu.Lock()
		if len(h.first) < remembered {
			h.first = append(h.first, append([]byte(nil), buffer[:n]...))
		}
		back := h.backs[from.String()]
		if back == nil && !h.closing {
			if back, err = net.DialUDP("udp4", nil, h.server); err == nil {
				h.backs[from.String()] = back
				go h.answers(back, from)
			}
		}
		h.mu.Unlock()
		for range h.arriving() {
			if back != nil {
				_, _ = back.Write(buffer[:n])
			}
		}
	}
}

// arriving is how many of the next datagram arrive.
func (h *hop) arriving() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counted++
	if h.lose > 0 && h.counted%h.lose == 0 {
		return 0
	}
	return 1 + h.copies
}

// loseOneOf loses one of so many datagrams from now on.
func (h *hop) loseOneOf(count int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lose = count
}

// copy has so many more of each datagram arrive from now on.
func (h *hop) copy(count int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.copies = count
}

func (h *hop) answers(back *net.UDPConn, client *net.UDPAddr) {
	buffer := make([]byte, 65536)
	for {
		n, err := back.Read(buffer)
		if err != nil {
			return
		}
		for range h.arriving() {
			_, _ = h.front.WriteToUDP(buffer[:n], client)
		}
	}
}

// forget gives every client another port.
func (h *hop) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, back := range h.backs {
		back.Close()
	}
	clear(h.backs)
}

// recorded are the first datagrams that clients sent.
func (h *hop) recorded() [][]byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([][]byte(nil), h.first...)
}

func (h *hop) forgetRecorded() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.first = nil
}

package knock

import (
	"crypto/ed25519"
	"io"
	"sync"
	"time"
)

// Knocker puts knocks into the Initial packets of a client. It holds the first ones until they have the whole
// ClientHello.
type Knocker struct {
	Key      ed25519.PrivateKey
	Listener PublicKey
	Random   io.Reader
	Now      func() time.Time

	mu    sync.Mutex
	conns map[string]*knocking
}

// maxConns bounds the connections of one knocker; those before are forgotten.
const maxConns = 16

// knocking is one connection, known by the connection ID that the client chose for itself.
type knocking struct {
	dcid  []byte
	keys  *Keys
	hello Assembler
	held  []heldPacket
	token []byte
}

type heldPacket struct {
	initial Initial
	opened  Opened
}

// Outgoing returns what to send in place of a datagram of the client: none while the ClientHello is not whole, nil for
// the datagram as it is.
func (k *Knocker) Outgoing(datagram []byte) [][]byte {
	p, err := ParseInitial(datagram)
	// After a Retry, the token is the listener's, and has the knock in it.
	if err != nil || len(p.Token) > 0 {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	conn := k.conn(p)
	opened, err := conn.keys.Open(p)
	if err != nil {
		return nil
	}
	if conn.token == nil {
		frames, err := CryptoFrames(opened.Frames)
		if err != nil {
			return nil
		}
		for _, frame := range frames {
			conn.hello.Add(frame)
		}
		hello, err := conn.hello.Hello()
		if err != nil {
			// quic-go uses the datagram's bytes again.
			copied, _ := ParseInitial(append([]byte(nil), datagram...))
			conn.held = append(conn.held, heldPacket{copied, opened})
			return [][]byte{}
		}
		conn.token, err = Seal(k.Random, k.Key, k.Listener, conn.dcid, uint64(k.Now().Unix()), HelloHash(hello))
		if err != nil {
			return [][]byte{}
		}
	}
	var out [][]byte
	for _, held := range append(conn.held, heldPacket{p, opened}) {
		packet := conn.keys.Reseal(held.initial, held.opened, conn.token, len(held.initial.packet))
		out = append(out, append(packet, held.initial.Coalesced...))
	}
	conn.held = nil
	return out
}

func (k *Knocker) conn(p Initial) *knocking {
	conn := k.conns[string(p.SCID)]
	if conn == nil {
		if k.conns == nil || len(k.conns) >= maxConns {
			k.conns = make(map[string]*knocking)
		}
		conn = &knocking{dcid: append([]byte(nil), p.DCID...), keys: ClientKeys(p.DCID)}
		k.conns[string(p.SCID)] = conn
	}
	return conn
}

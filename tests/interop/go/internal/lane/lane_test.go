package lane

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"culvert.example/culvert/internal/underlay"
)

// end is one end of a lane in a test.
type end struct {
	lane     *Lane
	received atomic.Uint64
	bytes    atomic.Uint64
	wrong    atomic.Uint64
	up       chan struct{}
	failed   chan uint32
}

func (e *end) Datagram(_ *Lane, data []byte) {
	number := binary.BigEndian.Uint32(data)
	if !bytes.Equal(data[4:], bytes.Repeat([]byte{byte(number)}, len(data)-4)) {
		e.wrong.Add(1)
	}
	e.received.Add(1)
	e.bytes.Add(uint64(len(data)))
}

func (e *end) Up(*Lane)                     { close(e.up) }
func (*end) Moved(*Lane)                    {}
func (e *end) Failed(_ *Lane, cause uint32) { e.failed <- cause }

// pairOf is a lane between two sockets of loopback.
func pairOf(t testing.TB, id uint16, updateAfter uint64) (dialler, listener *end) {
	t.Helper()
	suite, err := NewSuite(id)
	if err != nil {
		t.Fatal(err)
	}
	secrets := [2][]byte{bytes.Repeat([]byte{1}, suite.SecretLen()), bytes.Repeat([]byte{2}, suite.SecretLen())}
	ids := [2]underlay.ConnectionID{{1}, {3}}
	var ends [2]*end
	var sockets [2]*underlay.Socket
	for i := range ends {
		if sockets[i], err = underlay.Open(netip.MustParseAddrPort("127.0.0.1:0"), underlay.Hooks{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sockets[i].Close() })
	}
	for i := range ends {
		ends[i] = &end{up: make(chan struct{}), failed: make(chan uint32, 8)}
		config := Config{
			Epoch: 1, Suite: suite, SendSecret: secrets[i], ReceiveSecret: secrets[1-i], Local: ids[i], Remote: ids[1-i],
			Socket: sockets[i], MaxPacket: 65527, UpdateAfter: updateAfter, Handler: ends[i],
		}
		if i == 0 {
			config.To = sockets[1].Local()
		}
		ends[i].lane = New(config)
		t.Cleanup(ends[i].lane.Close)
	}
	ends[1].lane.Start()
	ends[0].lane.Start()
	for _, e := range ends {
		select {
		case <-e.up:
		case <-time.After(10 * time.Second):
			t.Fatal("the lane is not up")
		}
	}
	return ends[0], ends[1]
}

func datagram(number uint32, size int) []byte {
	b := bytes.Repeat([]byte{byte(number)}, size)
	binary.BigEndian.PutUint32(b, number)
	return b
}

func TestLanesCarryDatagramsOfEachSuite(t *testing.T) {
	for _, id := range []uint16{tls.TLS_AES_128_GCM_SHA256, tls.TLS_AES_256_GCM_SHA384, tls.TLS_CHACHA20_POLY1305_SHA256} {
		t.Run(tls.CipherSuiteName(id), func(t *testing.T) {
			t.Parallel()
			dialler, listener := pairOf(t, id, 500)
			const count = 5000
			for number := range uint32(count) {
				size := 4 + int(number)%1100
				if err := dialler.lane.Send(nil, datagram(number, size)); err != nil {
					t.Fatal(err)
				}
				if number%100 == 0 {
					time.Sleep(time.Millisecond)
				}
			}
			settled := func() bool {
				s := dialler.lane.Stats()
				return listener.received.Load() == count && s.Acked+s.Lost >= s.SentPackets-s.Lost-2
			}
			for wait := time.Now(); !settled() && time.Since(wait) < 10*time.Second; {
				time.Sleep(10 * time.Millisecond)
			}
			s, r := dialler.lane.Stats(), listener.lane.Stats()
			if listener.received.Load() != count || listener.wrong.Load() != 0 || r.RefusedKey != 0 {
				t.Fatalf("received %d, wrong %d: %+v, %+v", listener.received.Load(), listener.wrong.Load(), s, r)
			}
			if s.KeyUpdates == 0 || r.PeerKeyUpdates != s.KeyUpdates {
				t.Fatalf("key updates: %d, followed %d", s.KeyUpdates, r.PeerKeyUpdates)
			}
			if s.SentPackets >= count {
				t.Fatalf("%d packets for %d datagrams: none shares one", s.SentPackets, count)
			}
		})
	}
}

func TestALaneWithoutAnAnswerFails(t *testing.T) {
	t.Parallel()
	dialler, listener := pairOf(t, tls.TLS_AES_128_GCM_SHA256, 0)
	listener.lane.Close()
	if err := dialler.lane.Send(nil, datagram(1, 100)); err != nil {
		t.Fatal(err)
	}
	select {
	case cause := <-dialler.failed:
		if fmt.Sprint(cause) != "1" || dialler.lane.IsUp() {
			t.Fatalf("cause %d", cause)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("nobody noticed")
	}
	if err := dialler.lane.Send(nil, datagram(2, 100)); err != ErrDown {
		t.Fatal(err)
	}
}

func TestADatagramThatFitsIntoNoPacket(t *testing.T) {
	t.Parallel()
	dialler, _ := pairOf(t, tls.TLS_AES_128_GCM_SHA256, 0)
	if err := dialler.lane.Send(nil, make([]byte, 1500)); err != ErrTooLarge {
		t.Fatal(err)
	}
	if room := dialler.lane.Room(); room < 1168 {
		t.Fatalf("room for %d bytes", room)
	}
}

// BenchmarkLane sends datagrams of 1150 bytes over loopback, both ends in this process; "received" is what arrived.
func BenchmarkLane(b *testing.B) {
	dialler, listener := pairOf(b, tls.TLS_AES_128_GCM_SHA256, 0)
	payload := datagram(1, 1150)
	b.SetBytes(int64(len(payload)))
	for b.Loop() {
		if err := dialler.lane.Send(nil, payload); err != nil {
			b.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond)
	b.ReportMetric(float64(listener.received.Load())/float64(b.N), "received/op")
}

func BenchmarkSealAndOpen(b *testing.B) {
	suite, err := NewSuite(tls.TLS_AES_128_GCM_SHA256)
	if err != nil {
		b.Fatal(err)
	}
	secret := bytes.Repeat([]byte{1}, suite.SecretLen())
	sealer, opener := NewSealer(suite, secret, [8]byte{1}), NewOpener(suite, secret)
	payload, buffer := datagram(1, 1150), make([]byte, 0, MaxSize)
	var frames Frames
	b.SetBytes(int64(len(payload)))
	for b.Loop() {
		packet := sealer.Seal(AppendDatagram(sealer.Start(buffer), nil, payload))
		opened, err := opener.Open(packet)
		if err == nil {
			err = frames.Parse(opened.Frames)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

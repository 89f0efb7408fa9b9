package culvert_test

import (
	"testing"
	"time"

	"culvert.example/culvert"
)

func TestCopiesOfPacketsAreDroppedAndChangeNothing(t *testing.T) {
	t.Parallel()
	for _, lanes := range []int{1, -1} {
		e, key := newEcho(t), newKey(t)
		a := newAgent(t, e, culvert.PublicOf(key))
		h := newHop(t, a.underlay)
		h.copy(2)
		p := dial(t, culvert.Link{Address: h.address(), Key: a.key}, culvert.Config{Key: key, Lanes: lanes, Logger: logger()})
		flow := openFlow(t, p, "echo")
		exchange(t, flow, []byte("first"))
		epoch := epochs(p)
		received := make(chan map[string]int)
		go func() {
			times, buffer := make(map[string]int), make([]byte, 2048)
			for {
				n, err := flow.Read(buffer)
				if err != nil {
					received <- times
					return
				}
				times[string(buffer[:n])]++
			}
		}()
		_ = flow.SetReadDeadline(time.Now().Add(time.Second))
		for range 200 {
			_, _ = flow.Write(random(1000))
			time.Sleep(time.Millisecond)
		}
		times := <-received
		for datagram, count := range times {
			if count > 1 {
				t.Fatalf("lanes %d: %d echoes of %x", lanes, count, datagram[:8])
			}
		}
		if len(times) < 100 {
			t.Fatalf("lanes %d: echoes of %d datagrams", lanes, len(times))
		}
		stream(t, p, 200_000)
		if after := epochs(p); after != epoch {
			t.Fatalf("lanes were opened again: epochs %d, then %d", epoch, after)
		}
		for _, l := range p.Stats().Lanes {
			if l.RefusedOld == 0 || l.RefusedKey > 0 {
				t.Fatalf("refused: %d copies, %d for their key", l.RefusedOld, l.RefusedKey)
			}
		}
	}
}

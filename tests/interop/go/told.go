package culvert

import (
	"sync"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.example/culvert/internal/wire"
)

// tellEvery keeps thousands of resets at once within what the peer takes in messages.
const tellEvery = 25 * time.Millisecond

// streamsTold is what the ends of a connection say of its streams beside them: after how many bytes one was reset
// (StreamAbort), and how far one may be sent (StreamCredit).
type streamsTold struct {
	mu   sync.Mutex
	open map[quic.StreamID]*Stream
	// early is what the peer has said of streams that it may open and that we have not accepted.
	early map[quic.StreamID]said
	// next is the first stream that the peer opens and we have not accepted, most how many may follow.
	next, most quic.StreamID
	// initial is how far a stream that begins may be sent; 0: without limit.
	initial uint64
	// aborts are to be told to the peer; telling says that they are.
	aborts  wire.StreamAbort
	telling bool
}

// said is what the peer has said of a stream.
type said struct {
	aborted, limited bool
	// abort is after how many bytes its TCP connection was reset, limit how far it may be sent.
	abort, limit uint64
}

// streamStep is between the numbers of two streams of one kind (RFC 9000 §2.1).
const streamStep = 4

func newStreamsTold(dials bool, most int) *streamsTold {
	t := &streamsTold{
		open: make(map[quic.StreamID]*Stream), early: make(map[quic.StreamID]said), most: quic.StreamID(most),
		next: streamStep, // the dialler's first one is the control stream
	}
	if dials {
		t.next = 1
	}
	return t
}

// begin makes a stream that was opened or accepted, with what was said of it.
func (t *streamsTold) begin(s *session, stream *quic.Stream, name string) *Stream {
	id := stream.StreamID()
	made := &Stream{Stream: stream, session: s, name: name}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.initial > 0 {
		made.said.limited, made.said.limit = true, t.initial
	}
	if id%streamStep == t.next%streamStep {
		t.next = max(t.next, id+streamStep)
		made.hear(t.early[id])
		delete(t.early, id)
	}
	t.open[id] = made
	return made
}

// end forgets a stream.
func (t *streamsTold) end(s *Stream) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, s.StreamID())
}

// aborted takes a StreamAbort.
func (t *streamsTold) aborted(m *wire.StreamAbort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, id := range m.Streams {
		t.hear(id, said{aborted: true, abort: m.Bytes[i]})
	}
}

// limited takes a StreamCredit.
func (t *streamsTold) limited(m *wire.StreamCredit) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.initial = m.Initial
	for i, id := range m.Streams {
		t.hear(id, said{limited: true, limit: m.Limits[i]})
	}
}

// hear tells a stream what was said of it, or keeps that for one that is to come. Others have ended. mu is held.
func (t *streamsTold) hear(number uint64, news said) {
	if number >= 1<<62 {
		return
	}
	id := quic.StreamID(number)
	if s := t.open[id]; s != nil {
		s.hear(news)
	} else if id%streamStep == t.next%streamStep && id >= t.next && (id-t.next)/streamStep < t.most {
		t.early[id] = t.early[id].with(news)
	}
}

// with is what was said before and news. The first reset and the last limit count.
func (s said) with(news said) said {
	if news.aborted && !s.aborted {
		s.aborted, s.abort = true, news.abort
	}
	if news.limited {
		s.limited, s.limit = true, news.limit
	}
	return s
}

// hear takes what the peer says of the stream.
func (s *Stream) hear(news said) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := news.aborted && !s.said.aborted
	s.said = s.said.with(news)
	s.look()
	if !first {
		return
	}
	// The peer takes nothing more.
	s.CancelWrite(resetCode)
	s.heard = time.Now()
	s.until = s.heard.Add(lastBytes)
	if s.received >= s.said.abort {
		s.until = s.heard
	}
	s.readUntil()
}

// abortedSince is since when we know of a reset at the other end, zero if there was none.
func (s *Stream) abortedSince() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heard
}

// tellAbort tells the peer that our TCP connection was reset after what was sent.
func (s *Stream) tellAbort() {
	t := s.session.told
	t.mu.Lock()
	defer t.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	t.aborts.Streams = append(t.aborts.Streams, uint64(s.StreamID()))
	t.aborts.Bytes = append(t.aborts.Bytes, s.sent)
	if !t.telling {
		t.telling = true
		go t.tell(s.session)
	}
}

// tell sends what is to be told, many streams in a message.
func (t *streamsTold) tell(s *session) {
	for {
		t.mu.Lock()
		all := t.aborts
		n := min(len(all.Streams), wire.MaxStreams)
		t.aborts = wire.StreamAbort{Streams: all.Streams[n:], Bytes: all.Bytes[n:]}
		t.telling = n > 0
		t.mu.Unlock()
		if n == 0 || s.send(&wire.StreamAbort{Streams: all.Streams[:n], Bytes: all.Bytes[:n]}) != nil {
			return
		}
		time.Sleep(tellEvery)
	}
}

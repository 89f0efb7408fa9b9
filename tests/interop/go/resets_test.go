package culvert_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"culvert.example/culvert"
)

// How forwards end by a reset, with the agent as either end and with this package at both.

// forwarding is a local port that leads to a service.
type forwarding struct {
	t       *testing.T
	port    string
	service *net.TCPListener
	agent   *agent // nil if both ends are this package
}

// eachForwarding runs a test with each pair of ends.
func eachForwarding(t *testing.T, test func(*forwarding)) {
	for name, begin := range map[string]func(*forwarding, *echo){
		"Go to Go": func(f *forwarding, e *echo) {
			key := newKey(f.t)
			l := listen(f.t, culvert.Config{
				Key: newKey(f.t), Services: e.services(), Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == culvert.PublicOf(key) },
			})
			f.enter(dial(f.t, l.Link(), culvert.Config{Key: key, Logger: logger()}))
		},
		"Go to the agent": func(f *forwarding, e *echo) {
			key := newKey(f.t)
			f.agent = newAgent(f.t, e, culvert.PublicOf(key))
			f.enter(dial(f.t, f.agent.link(), culvert.Config{Key: key, Logger: logger()}))
		},
		"the agent to Go": func(f *forwarding, e *echo) {
			key := newKey(f.t)
			f.agent = prepareAgent(f.t)
			l := listen(f.t, culvert.Config{
				Key: key, Services: e.services(), Logger: logger(),
				Authorize: func(k culvert.PublicKey) bool { return k == f.agent.key },
			})
			f.agent.run(e, culvert.PublicOf(key), l.Address().String())
			if _, err := l.Accept(within(f.t)); err != nil {
				f.t.Fatal(err)
			}
			f.port = f.agent.ingress
			// It refuses its clients until our hello has come.
			eventually(f.t, "the agent's port leads to the service", func() bool {
				client, err := net.Dial("tcp", f.port)
				if err != nil {
					return false
				}
				defer client.Close()
				_ = f.service.SetDeadline(time.Now().Add(time.Second))
				service, err := f.service.Accept()
				if err == nil {
					service.Close()
				}
				return err == nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { listener.Close() })
			f := &forwarding{t: t, service: listener.(*net.TCPListener)}
			begin(f, &echo{address: listener.Addr().String()})
			test(f)
			f.nothingIsLeft()
		})
	}
}

// enter opens a local port for the peer's service.
func (f *forwarding) enter(p *culvert.Peer) {
	port, err := culvert.ForwardPorts(f.t.Context(), p, "127.0.0.1:0", "echo")
	if err != nil {
		f.t.Fatal(err)
	}
	f.port = port.String()
}

// open returns the two programs' connections of a new forward, the one that is to be reset first.
func (f *forwarding) open(serviceResets bool) (from, to *net.TCPConn) {
	f.t.Helper()
	client, err := net.Dial("tcp", f.port)
	if err != nil {
		f.t.Fatal(err)
	}
	_ = f.service.SetDeadline(time.Now().Add(patience))
	service, err := f.service.AcceptTCP()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { client.Close(); service.Close() })
	for _, conn := range []net.Conn{client, service} {
		_ = conn.SetDeadline(time.Now().Add(patience))
	}
	// A service that resets before the end beside it has noticed that it accepts has refused, as it has to a client of its own.
	_, _ = client.Write([]byte("x"))
	if _, err := io.ReadFull(service, make([]byte, 1)); err != nil {
		f.t.Fatal(err)
	}
	if serviceResets {
		return service, client.(*net.TCPConn)
	}
	return client.(*net.TCPConn), service
}

// abort resets a connection, once its kernel has sent what was written.
func (f *forwarding) abort(conn *net.TCPConn) {
	f.t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		f.t.Fatal(err)
	}
	eventually(f.t, "the kernel has sent everything", func() bool {
		unsent := 1
		_ = raw.Control(func(fd uintptr) { unsent, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
		return err == nil && unsent == 0
	})
	_ = conn.SetLinger(0)
	conn.Close()
}

// nothingIsLeft checks that the agent has no forward any more.
func (f *forwarding) nothingIsLeft() {
	if f.agent == nil {
		return
	}
	streams := regexp.MustCompile(`(?m)^culvert_tcp_streams(\{[^}]*\})? (\S+)$`)
	eventually(f.t, "no forward is left at the agent", func() bool {
		answer, err := http.Get(fmt.Sprintf("http://%s/metrics", f.agent.metrics))
		if err != nil {
			f.t.Fatal(err)
		}
		defer answer.Body.Close()
		text, _ := io.ReadAll(answer.Body)
		found := streams.FindAllStringSubmatch(string(text), -1)
		for _, line := range found {
			if line[2] != "0" {
				return false
			}
		}
		return len(found) > 0
	})
}

func TestWhatCameBeforeAResetIsDeliveredBeforeIt(t *testing.T) {
	t.Parallel()
	eachForwarding(t, func(f *forwarding) {
		for _, size := range []int{0, 1, 5_000, 300_000} {
			for _, serviceResets := range []bool{false, true} {
				from, to := f.open(serviceResets)
				sent := random(size)
				go func() {
					_, _ = from.Write(sent)
					f.abort(from)
				}()
				// A reader that is slow at first.
				time.Sleep(100 * time.Millisecond)
				got, err := io.ReadAll(to)
				if !errors.Is(err, syscall.ECONNRESET) || !bytes.Equal(got, sent) {
					f.t.Fatalf("%d bytes of %d, then %v (the service resets: %v)", len(got), size, err, serviceResets)
				}
			}
		}
	})
}

func TestAnAnswerThatAResetFollowsIsWhole(t *testing.T) {
	t.Parallel()
	eachForwarding(t, func(f *forwarding) {
		for range 20 {
			service, client := f.open(true)
			go func() {
				// More than the service reads, as an upload that it refuses.
				_, _ = client.Write(make([]byte, 200_000))
			}()
			buffer, answer := make([]byte, 1000), random(60_000)
			if _, err := io.ReadFull(service, buffer); err != nil {
				f.t.Fatal(err)
			}
			_, _ = service.Write(answer)
			f.abort(service)
			got, err := io.ReadAll(client)
			if !errors.Is(err, syscall.ECONNRESET) || !bytes.Equal(got, answer) {
				f.t.Fatalf("%d bytes of %d, then %v", len(got), len(answer), err)
			}
		}
	})
}

func TestAResetEndsAForwardInEachStateOfItsHalves(t *testing.T) {
	t.Parallel()
	eachForwarding(t, func(f *forwarding) {
		for state := range 6 {
			from, to := f.open(state&1 != 0)
			what := "idle"
			switch state / 2 {
			case 1:
				what = "after its own end"
				_ = from.CloseWrite()
				if _, err := io.ReadAll(to); err != nil {
					f.t.Fatal(err)
				}
			case 2:
				what = "after the other end"
				_ = to.CloseWrite()
				if _, err := io.ReadAll(from); err != nil {
					f.t.Fatal(err)
				}
			}
			f.abort(from)
			eventually(f.t, "the other program's writes fail, "+what, func() bool {
				_, err := to.Write([]byte("x"))
				// After its own end, a program learns of the reset by reading.
				if state/2 == 2 {
					_, err = to.Read(make([]byte, 1))
				}
				return err != nil
			})
		}
	})
}

func TestAResetEndsAForwardOfWhichBothDirectionsAreFull(t *testing.T) {
	t.Parallel()
	eachForwarding(t, func(f *forwarding) {
		for _, serviceResets := range []bool{false, true} {
			from, to := f.open(serviceResets)
			done := make(chan error, 1)
			for _, conn := range []*net.TCPConn{from, to} {
				_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
				go func() {
					_, err := conn.Write(make([]byte, 256<<20))
					done <- err
				}()
			}
			for range 2 {
				if err := <-done; err == nil || !strings.Contains(err.Error(), "timeout") {
					f.t.Fatal(err)
				}
			}
			_ = from.SetLinger(0)
			from.Close()
			_ = to.SetWriteDeadline(time.Now().Add(patience))
			if _, err := to.Write(make([]byte, 256<<20)); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
				f.t.Fatalf("%v (the service resets: %v)", err, serviceResets)
			}
		}
	})
}

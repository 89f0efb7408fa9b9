package culvert_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.example/culvert"
)

// agent is the daemon, as a process with a folder of its own.
type agent struct {
	t        testing.TB
	program  string
	folder   string
	key      culvert.PublicKey
	underlay string // where it listens, or dials
	ingress  string // its UDP and TCP port for the peer's service "echo"
	metrics  string
	ofPeer   string // more lines of its [[peer]]
	process  *exec.Cmd
}

// agentProgram is the daemon's binary: CULVERT, or what cargo built.
func agentProgram(t testing.TB) string {
	t.Helper()
	program := os.Getenv("CULVERT")
	if program == "" {
		program = filepath.Join("..", "..", "..", "target", "debug", "culvert")
	}
	if _, err := os.Stat(program); err != nil {
		if os.Getenv("CULVERT") != "" || os.Getenv("CI") != "" {
			t.Fatalf("no agent to test against: %v (remedy: cargo build -p culvert)", err)
		}
		t.Skipf("needs an agent: %v (remedy: cargo build -p culvert)", err)
	}
	return program
}

// freeAddress is an address of loopback that is free over UDP and TCP.
func freeAddress(t testing.TB) string {
	t.Helper()
	for range 100 {
		tcp, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		address := tcp.Addr().String()
		udp, err := net.ListenPacket("udp", address)
		tcp.Close()
		if err == nil {
			udp.Close()
			return address
		}
	}
	t.Fatal("no free port")
	return ""
}

// newAgent starts an agent that listens, with a peer of the key.
func newAgent(t testing.TB, e *echo, peer culvert.PublicKey) *agent {
	t.Helper()
	a := prepareAgent(t)
	a.run(e, peer, "")
	return a
}

// prepareAgent makes the key of an agent.
func prepareAgent(t testing.TB) *agent {
	t.Helper()
	a := &agent{t: t, program: agentProgram(t), folder: t.TempDir(), ingress: freeAddress(t), metrics: freeAddress(t)}
	out, err := exec.Command(a.program, "keygen", "--out", filepath.Join(a.folder, "identity.key")).Output()
	if err != nil {
		t.Fatal(err)
	}
	if a.key, err = culvert.ParsePublicKey(strings.TrimSpace(string(out))); err != nil {
		t.Fatal(err)
	}
	return a
}

// run starts the agent with a peer of the key; endpoint is where it dials that peer, or empty: it listens.
func (a *agent) run(e *echo, peer culvert.PublicKey, endpoint string) {
	t := a.t
	t.Helper()
	a.underlay = endpoint
	listen, endpoints := "", ""
	if endpoint == "" {
		a.underlay = freeAddress(t)
		listen = fmt.Sprintf("listen = [%q]\n", a.underlay)
	} else {
		// A dialler that has nothing to say tells of its new address with the next keepalive, which is due after 20 s by default.
		endpoints = fmt.Sprintf("endpoints = [%q]\nkeepalive = \"1s\"\n", endpoint)
	}
	text := fmt.Sprintf(`identity.key_file = "identity.key"
identity.state_dir = "state"
control.socket = "control"
metrics.listen = %q
log.level = "debug"
[transport]
%s
[[service]]
name = "echo"
upstream = %q
[[service]]
name = "large"
upstream = %q
oversize = "fragment"
[[service]]
name = "forbidden"
upstream = %q
[[peer]]
name = "go"
public_key = %q
services = ["echo", "large"]
%s%s
[[udp]]
listen = %q
peer = "go"
service = "echo"
[[tcp]]
listen = %q
peer = "go"
service = "echo"
`, a.metrics, listen, e.address, e.address, e.address, peer, endpoints, a.ofPeer, a.ingress, a.ingress)
	if err := os.WriteFile(a.file("agent.toml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		status := ""
		if t.Failed() && a.process != nil {
			status = a.status()
		}
		a.kill()
		if t.Failed() {
			log, _ := os.ReadFile(a.file("log"))
			t.Logf("its status: %s", status)
			t.Logf("the agent's log:\n%s", log)
		}
	})
	a.start()
}

func (a *agent) file(name string) string { return filepath.Join(a.folder, name) }

func (a *agent) link() culvert.Link { return culvert.Link{Address: a.underlay, Key: a.key} }

func (a *agent) start() {
	a.t.Helper()
	log, err := os.OpenFile(a.file("log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		a.t.Fatal(err)
	}
	defer log.Close()
	a.process = exec.Command(a.program, "run", "--config", a.file("agent.toml"))
	a.process.Stdout, a.process.Stderr = log, log
	// The test may be killed by its time limit: the agent must not stay.
	a.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := a.process.Start(); err != nil {
		a.t.Fatal(err)
	}
	eventually(a.t, "the agent is ready", func() bool {
		conn, err := net.DialTimeout("tcp", a.metrics, time.Second)
		if err != nil {
			return false
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		_, _ = fmt.Fprintf(conn, "GET /healthz HTTP/1.0\r\n\r\n")
		answer := make([]byte, 64)
		n, _ := conn.Read(answer)
		return strings.Contains(string(answer[:n]), " 200 ")
	})
}

func (a *agent) kill() {
	if a.process != nil {
		_ = a.process.Process.Kill()
		_ = a.process.Wait()
		a.process = nil
	}
}

// status is what `culvert status --json` prints.
func (a *agent) status() string {
	out, err := exec.Command(a.program, "status", "--json", "--config", a.file("agent.toml")).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		a.t.Fatal(err)
	}
	return string(out)
}

// dialled is an agent that listens, with a peer of this package that dials it.
func dialled(t *testing.T, lanes int, change func(*culvert.Config)) (*agent, *culvert.Peer) {
	t.Helper()
	key, e := newKey(t), newEcho(t)
	a := newAgent(t, e, culvert.PublicOf(key))
	config := culvert.Config{Key: key, Services: e.services(), Lanes: lanes, Logger: logger()}
	if change != nil {
		change(&config)
	}
	return a, dial(t, a.link(), config)
}

// accepted is an agent that dials a listener of this package.
func accepted(t *testing.T, lanes int, change func(*culvert.Config)) (*agent, *culvert.Listener, *culvert.Peer) {
	t.Helper()
	key, e := newKey(t), newEcho(t)
	a := prepareAgent(t)
	config := culvert.Config{
		Key: key, Services: e.services(), Lanes: lanes, Logger: logger(),
		Authorize: func(k culvert.PublicKey) bool { return k == a.key },
	}
	if change != nil {
		change(&config)
	}
	l := listen(t, config)
	a.run(e, culvert.PublicOf(key), l.Address().String())
	p, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return a, l, p
}

// client is an application beside the agent, which uses the peer's echo.
func (a *agent) client(network string) net.Conn {
	a.t.Helper()
	conn, err := net.Dial(network, a.ingress)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { conn.Close() })
	return conn
}

// bothWays has flows and forwards of either end echoed.
func bothWays(t *testing.T, a *agent, p *culvert.Peer) {
	t.Helper()
	flow := openFlow(t, p, "echo")
	exchange(t, flow, []byte("first"))
	converse(t, flow, 100, 1100)
	stream(t, p, 1<<20)
	theirs := a.client("udp")
	exchange(t, theirs, []byte("first"))
	converse(t, theirs, 100, 1100)
	tcp := a.client("tcp")
	sent := random(1 << 20)
	go func() { _, _ = tcp.Write(sent) }()
	_ = tcp.SetReadDeadline(time.Now().Add(patience))
	got := make([]byte, len(sent))
	for at := 0; at < len(got); {
		n, err := tcp.Read(got[at:])
		if err != nil {
			t.Fatal(err)
		}
		at += n
	}
	if string(got) != string(sent) {
		t.Fatal("other bytes came back")
	}
}

func TestGoDialsTheAgent(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, p := dialled(t, lanes, nil)
			bothWays(t, a, p)
			if status := a.status(); !strings.Contains(status, `"key_exchange":"x25519mlkem768"`) {
				t.Fatalf("the session has not the hybrid key exchange: %s", status)
			}
			if lanes > 0 && len(p.Stats().Lanes) == 0 {
				t.Fatal("no lane was used")
			}
		})
	}
}

func TestTheAgentDialsGo(t *testing.T) {
	t.Parallel()
	for name, lanes := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, _, p := accepted(t, lanes, nil)
			bothWays(t, a, p)
			if status := a.status(); !strings.Contains(status, `"key_exchange":"x25519mlkem768"`) {
				t.Fatalf("the session has not the hybrid key exchange: %s", status)
			}
			if lanes > 0 && len(p.Stats().Lanes) == 0 {
				t.Fatal("no lane was used")
			}
		})
	}
}

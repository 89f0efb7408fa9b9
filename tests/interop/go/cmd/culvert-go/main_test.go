package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const patience = 30 * time.Second

// TestMain runs the command itself in the processes that the test starts.
func TestMain(m *testing.M) {
	if os.Getenv("CULVERT_GO_COMMAND") == "" {
		os.Exit(m.Run())
	}
	main()
}

// command is culvert-go in a process.
func command(ctx context.Context, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), "CULVERT_GO_COMMAND=1")
	c.Stderr = os.Stderr
	return c
}

// background starts a command and returns its first line.
func background(t *testing.T, ctx context.Context, args ...string) string {
	t.Helper()
	c := command(ctx, args...)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

func TestTheCommandsReachAnEcho(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	folder := t.TempDir()
	keys := map[string]string{}
	for _, name := range []string{"listener", "dialler"} {
		out, err := command(ctx, "keygen", filepath.Join(folder, name)).Output()
		if err != nil {
			t.Fatal(err)
		}
		keys[name] = strings.TrimSpace(string(out))
	}
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { echo.Close() })
	go func() {
		for {
			conn, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				conn.Close()
			}()
		}
	}()
	udp, err := net.ListenPacket("udp", echo.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { udp.Close() })
	go func() {
		buffer := make([]byte, 2048)
		for {
			n, from, err := udp.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(buffer[:n], from)
		}
	}()

	link := background(t, ctx, "listen", "-key", filepath.Join(folder, "listener"), "-peer", keys["dialler"], "127.0.0.1:0", "echo="+echo.Addr().String())
	key := filepath.Join(folder, "dialler")
	say := func(args ...string) (string, error) {
		c := command(ctx, append(args, "-key", key, link, "echo")...)
		c.Stdin = strings.NewReader("hello\n")
		out, err := c.Output()
		return string(out), err
	}
	if out, err := say("dial"); err != nil || out != "hello\n" {
		t.Fatalf("%q, %v", out, err)
	}
	// A datagram may be lost, and its answer may be late.
	for out := ""; out != "hello\n"; {
		if out, err = say("dial", "-udp"); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"bench"}, {"bench", "-stream", "2"}} {
		out, err := command(ctx, append(args, "-key", key, "-seconds", "0.3", link, "echo")...).Output()
		if err != nil || !strings.Contains(string(out), "received") {
			t.Fatalf("%v: %q, %v", args, out, err)
		}
	}
	// Last, because one key has one session at a time.
	local, _, _ := strings.Cut(background(t, ctx, "forward", "-key", key, link, "0=echo"), " ")
	conn, err := net.Dial("tcp", local)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("through the port\n")); err != nil {
		t.Fatal(err)
	}
	if got, err := bufio.NewReader(conn).ReadString('\n'); err != nil || got != "through the port\n" {
		t.Fatalf("%q, %v", got, err)
	}
}

func TestWrongUsageSaysWhatIsRight(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct{ args, want string }{
		{"", "usage:"}, {"fly", "usage:"}, {"keygen", "usage: culvert-go keygen FILE"}, {"dial", "an argument is missing"},
		{"dial nonsense echo", "is not a link (remedy:"}, {"listen -key /nonexistent 127.0.0.1:0", "no such file"},
		{"dial culvert://127.0.0.1:1/short echo", "is not a public key (remedy:"},
	} {
		if err := run(ctx, strings.Fields(c.args)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v", c.args, err)
		}
	}
}

package culvert

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"culvert.example/culvert/internal/wire"
)

func TestARefusalNamesWhoseFaultItIs(t *testing.T) {
	for _, c := range []struct {
		err    error
		status uint32
	}{
		{syscall.ECONNREFUSED, wire.StatusUpstreamRefused},
		{syscall.ECONNRESET, wire.StatusUpstreamRefused},
		{syscall.ETIMEDOUT, wire.StatusUpstreamTimeout},
		{syscall.EMFILE, wire.StatusTooManyFiles},
		{syscall.ENFILE, wire.StatusTooManyFiles},
		{syscall.ENETUNREACH, wire.StatusNoRoute},
		{syscall.EHOSTUNREACH, wire.StatusNoRoute},
		{syscall.EPERM, wire.StatusNoRoute},
		{syscall.EADDRNOTAVAIL, wire.StatusNoResources},
		{syscall.ENOBUFS, wire.StatusNoResources},
	} {
		dial := &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", c.err)}
		if got := refusalStatus(dial); got != c.status {
			t.Errorf("%v: status %d, not %d", c.err, got, c.status)
		}
	}
	if got := refusalStatus(fmt.Errorf("dial: %w", context.DeadlineExceeded)); got != wire.StatusUpstreamTimeout {
		t.Errorf("the deadline: status %d", got)
	}
}

func TestARefusalOfALaterVersionIsNamedAsSuch(t *testing.T) {
	if text := status(99); !strings.Contains(text, "unknown to this version") || !strings.Contains(text, "99") {
		t.Error(text)
	}
	for known := uint32(wire.StatusUnknownService); known <= wire.StatusNoResources; known++ {
		if text := status(known); strings.Contains(text, "unknown") {
			t.Errorf("status %d: %s", known, text)
		}
	}
}

package underlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// setOptions sets what quic-go sets once on the first socket only, and what lanes need.
func setOptions(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var errV4, errV6 error
	err = raw.Control(func(fd uintptr) {
		set := func(level, option, value int) error { return unix.SetsockoptInt(int(fd), level, option, value) }
		// Do not fragment, and report ECN.
		errV4 = errors.Join(set(unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE), set(unix.IPPROTO_IP, unix.IP_RECVTOS, 1))
		errV6 = errors.Join(set(unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE), set(unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1))
		// Where the kernel has no GRO, packets come one by one; and it grants what buffer it likes.
		_ = set(unix.IPPROTO_UDP, unix.UDP_GRO, 1)
		for _, force := range []int{unix.SO_RCVBUF, unix.SO_RCVBUFFORCE, unix.SO_SNDBUF, unix.SO_SNDBUFFORCE} {
			_ = set(unix.SOL_SOCKET, force, socketBuffer)
		}
	})
	if err != nil {
		return err
	}
	if errV4 != nil && errV6 != nil {
		return fmt.Errorf("options of the UDP socket: %w", errV4)
	}
	return nil
}

// eachControl calls do for each control message, with the message as a whole and its data.
func eachControl(oob []byte, do func(level, kind int32, whole, data []byte)) {
	for len(oob) >= unix.SizeofCmsghdr {
		header, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return
		}
		do(header.Level, header.Type, oob[:len(oob)-len(rest)], data)
		oob = rest
	}
}

// segmentSize returns the size of each packet that a message has, whole if the message is one packet.
func segmentSize(oob []byte, whole int) int {
	eachControl(oob, func(level, kind int32, _, data []byte) {
		if level != unix.IPPROTO_UDP {
			return
		}
		switch {
		case kind == unix.UDP_GRO && len(data) >= 4:
			whole = int(binary.NativeEndian.Uint32(data))
		case kind == unix.UDP_SEGMENT && len(data) >= 2:
			whole = int(binary.NativeEndian.Uint16(data))
		}
	})
	return max(whole, 1)
}

// withoutSegmentSize returns the other control messages.
func withoutSegmentSize(oob []byte) []byte {
	var out []byte
	eachControl(oob, func(level, _ int32, whole, _ []byte) {
		if level != unix.IPPROTO_UDP {
			out = append(out, whole...)
		}
	})
	return out
}

// segmentMessage asks the kernel to cut a message into packets of size bytes.
func segmentMessage(size int) []byte {
	b := make([]byte, unix.CmsgSpace(2))
	// A cmsghdr: its length in the machine's word, level and type.
	if unix.SizeofCmsghdr == 16 {
		binary.NativeEndian.PutUint64(b, uint64(unix.CmsgLen(2)))
	} else {
		binary.NativeEndian.PutUint32(b, uint32(unix.CmsgLen(2)))
	}
	at := unix.SizeofCmsghdr - 8
	binary.NativeEndian.PutUint32(b[at:], unix.IPPROTO_UDP)
	binary.NativeEndian.PutUint32(b[at+4:], unix.UDP_SEGMENT)
	binary.NativeEndian.PutUint16(b[unix.SizeofCmsghdr:], uint16(size))
	return b
}

// isGSOError says whether the kernel or the device cannot cut packets.
func isGSOError(err error) bool {
	return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EINVAL)
}

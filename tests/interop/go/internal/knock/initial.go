package knock

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"slices"

	"culvert.example/culvert/internal/label"
	"culvert.example/culvert/internal/wire"
)

// ErrNotInitial says that a datagram does not begin with an Initial packet of QUIC version 1 that opens.
var ErrNotInitial = errors.New("not an Initial packet of QUIC version 1")

// Why an Initial packet that opens shows no ClientHello.
var (
	ErrIncomplete = errors.New("the ClientHello is not whole")
	ErrMalformed  = errors.New("not the first packet of a handshake")
)

// MaxHello bounds a ClientHello that is put together from several packets.
const MaxHello = 16 << 10

// Initial is the first packet of a datagram, a QUIC version 1 Initial.
type Initial struct {
	DCID, SCID []byte
	Token      []byte

	packet    []byte // up to its end, without what is coalesced behind it
	numberAt  int
	Coalesced []byte // what follows the packet in the datagram
}

// IsInitial says whether a datagram begins with the long header of an Initial packet of version 1.
func IsInitial(b []byte) bool {
	return len(b) > 5 && b[0]&0xf0 == 0xc0 && binary.BigEndian.Uint32(b[1:]) == version1
}

// ParseInitial reads the header of the Initial packet at the start of a datagram. Its fields are slices of b.
func ParseInitial(b []byte) (Initial, error) {
	if !IsInitial(b) {
		return Initial{}, ErrNotInitial
	}
	var p Initial
	rest := b[5:]
	for _, id := range []*[]byte{&p.DCID, &p.SCID} {
		if len(rest) == 0 || rest[0] > 20 || len(rest) < 1+int(rest[0]) {
			return Initial{}, ErrNotInitial
		}
		*id, rest = rest[1:1+rest[0]], rest[1+rest[0]:]
	}
	length, n := wire.Varint(rest)
	if n == 0 || length > uint64(len(rest)-n) {
		return Initial{}, ErrNotInitial
	}
	p.Token, rest = rest[n:n+int(length)], rest[n+int(length):]
	length, n = wire.Varint(rest)
	// A sample of 16 bytes is 4 bytes behind the start of the packet number.
	if n == 0 || length > uint64(len(rest)-n) || length < 20 {
		return Initial{}, ErrNotInitial
	}
	p.numberAt = len(b) - len(rest) + n
	end := p.numberAt + int(length)
	p.packet, p.Coalesced = b[:end], b[end:]
	return p, nil
}

// Keys protect the Initial packets of a client (RFC 9001 section 5.2).
type Keys struct {
	aead   cipher.AEAD
	iv     []byte
	header cipher.Block
}

var initialSalt = []byte{
	0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17,
	0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad, 0xcc, 0xbb, 0x7f, 0x0a,
}

// ClientKeys derives the keys from the first destination connection ID of the client.
func ClientKeys(dcid []byte) *Keys {
	secret := label.Must(hkdf.Extract(sha256.New, dcid, initialSalt))
	secret = expand(secret, "client in", 32)
	aead := label.Must(cipher.NewGCM(label.Must(aes.NewCipher(expand(secret, "quic key", 16)))))
	return &Keys{
		aead:   aead,
		iv:     expand(secret, "quic iv", 12),
		header: label.Must(aes.NewCipher(expand(secret, "quic hp", 16))),
	}
}

func expand(secret []byte, name string, length int) []byte {
	return label.Expand(sha256.New, secret, name, length)
}

func (k *Keys) nonce(number uint64) []byte {
	nonce := slices.Clone(k.iv)
	for i := range 8 {
		nonce[11-i] ^= byte(number >> (8 * i))
	}
	return nonce
}

// Opened is the protected part of an Initial packet.
type Opened struct {
	Number    uint32
	numberLen int
	first     byte
	Frames    []byte
}

// Open removes the protection of p into new bytes. Packet numbers are taken as they are: a client's Initial packets are
// few.
func (k *Keys) Open(p Initial) (Opened, error) {
	var mask [16]byte
	k.header.Encrypt(mask[:], p.packet[p.numberAt+4:p.numberAt+20])
	packet := slices.Clone(p.packet)
	packet[0] ^= mask[0] & 0x0f
	o := Opened{first: packet[0], numberLen: int(packet[0]&3) + 1}
	for i := range o.numberLen {
		packet[p.numberAt+i] ^= mask[1+i]
		o.Number = o.Number<<8 | uint32(packet[p.numberAt+i])
	}
	at := p.numberAt + o.numberLen
	var err error
	o.Frames, err = k.aead.Open(packet[at:at], k.nonce(uint64(o.Number)), packet[at:], packet[:at])
	if err != nil || o.first&0x0c != 0 {
		return Opened{}, ErrNotInitial
	}
	return o, nil
}

// Reseal makes the packet anew with token, in room bytes if leaving out PADDING allows that, in more if not.
func (k *Keys) Reseal(p Initial, o Opened, token []byte, room int) []byte {
	header := append([]byte{o.first}, p.packet[1:5]...)
	header = append(append(header, byte(len(p.DCID))), p.DCID...)
	header = append(append(header, byte(len(p.SCID))), p.SCID...)
	header = append(wire.AppendVarint(header, uint64(len(token))), token...)
	// The length takes two bytes.
	overhead := len(header) + 2 + o.numberLen + k.aead.Overhead()
	frames := withoutPadding(o.Frames, overhead+len(o.Frames)-room)
	length := o.numberLen + len(frames) + k.aead.Overhead()
	header = binary.BigEndian.AppendUint16(header, uint16(length)|0x4000)
	numberAt := len(header)
	for i := range o.numberLen {
		header = append(header, byte(o.Number>>(8*(o.numberLen-1-i))))
	}
	packet := k.aead.Seal(header, k.nonce(uint64(o.Number)), frames, header)
	var mask [16]byte
	k.header.Encrypt(mask[:], packet[numberAt+4:numberAt+20])
	packet[0] ^= mask[0] & 0x0f
	for i := range o.numberLen {
		packet[numberAt+i] ^= mask[1+i]
	}
	return packet
}

// ClientHello opens the packet and returns the ClientHello in it.
func (p Initial) ClientHello() ([]byte, error) { return HelloOf(p) }

// HelloOf opens packets, whatever their order, and returns the ClientHello in them.
func HelloOf(packets ...Initial) ([]byte, error) {
	var hello Assembler
	for _, p := range packets {
		opened, err := ClientKeys(p.DCID).Open(p)
		if err != nil {
			return nil, err
		}
		frames, err := CryptoFrames(opened.Frames)
		if err != nil {
			return nil, err
		}
		for _, frame := range frames {
			if !hello.Add(frame) {
				return nil, ErrMalformed
			}
		}
	}
	return hello.Hello()
}

// Crypto is one CRYPTO frame.
type Crypto struct {
	Offset uint64
	Data   []byte
}

// CryptoFrames returns the CRYPTO frames of an Initial packet's frames.
func CryptoFrames(frames []byte) ([]Crypto, error) {
	var out []Crypto
	err := eachFrame(frames, func(_ byte, _ []byte, crypto *Crypto) {
		if crypto != nil {
			out = append(out, *crypto)
		}
	})
	return out, err
}

// withoutPadding leaves so many bytes of PADDING out, wherever they are, or all that there are; four bytes at least stay.
func withoutPadding(frames []byte, surplus int) []byte {
	const least = 4
	out := make([]byte, 0, len(frames))
	err := eachFrame(frames, func(kind byte, whole []byte, _ *Crypto) {
		if kind == 0 && surplus > 0 && len(frames)-surplus >= least {
			surplus--
			return
		}
		out = append(out, whole...)
	})
	if err != nil || len(out) < least {
		return frames
	}
	return out
}

// eachFrame calls do for each frame that a client's Initial packets may have, with all of its bytes; crypto is nil unless
// it is a CRYPTO frame.
func eachFrame(frames []byte, do func(kind byte, whole []byte, crypto *Crypto)) error {
	varint := func() (v uint64, ok bool) {
		v, n := wire.Varint(frames)
		frames = frames[n:]
		return v, n > 0
	}
	for len(frames) > 0 {
		start := frames
		kind := frames[0]
		frames = frames[1:]
		var crypto *Crypto
		switch kind {
		case 0, 1: // PADDING, PING
		case 2, 3: // ACK
			if !skipACK(varint, kind == 3) {
				return ErrMalformed
			}
		case 6:
			offset, ok1 := varint()
			length, ok2 := varint()
			if !ok1 || !ok2 || length > uint64(len(frames)) {
				return ErrMalformed
			}
			crypto = &Crypto{offset, frames[:length]}
			frames = frames[length:]
		case 0x1c: // CONNECTION_CLOSE, and whatever follows
			do(kind, start, nil)
			return nil
		default:
			return ErrMalformed
		}
		do(kind, start[:len(start)-len(frames)], crypto)
	}
	return nil
}

func skipACK(varint func() (uint64, bool), ecn bool) bool {
	_, ok1 := varint()
	_, ok2 := varint()
	ranges, ok3 := varint()
	if !ok1 || !ok2 || !ok3 {
		return false
	}
	count := 1 + 2*ranges
	if ecn {
		count += 3
	}
	for ; count > 0; count-- {
		if _, ok := varint(); !ok {
			return false
		}
	}
	return true
}

// Assembler puts a ClientHello together from CRYPTO frames that come in any order.
type Assembler struct {
	bytes []byte
	have  []bool
}

// Add takes one frame; false if it lies outside of any ClientHello that we take, or contradicts another.
func (a *Assembler) Add(frame Crypto) bool {
	end := frame.Offset + uint64(len(frame.Data))
	if frame.Offset > MaxHello || end > MaxHello {
		return false
	}
	if grow := int(end) - len(a.bytes); grow > 0 {
		a.bytes = append(a.bytes, make([]byte, grow)...)
		a.have = append(a.have, make([]bool, grow)...)
	}
	for i, b := range frame.Data {
		at := frame.Offset + uint64(i)
		if a.have[at] && a.bytes[at] != b {
			return false
		}
		a.bytes[at], a.have[at] = b, true
	}
	return true
}

// Hello returns the whole ClientHello, from its type byte on: [ErrIncomplete] while bytes are missing.
func (a *Assembler) Hello() ([]byte, error) {
	const clientHello = 1
	if len(a.bytes) > 0 && a.have[0] && a.bytes[0] != clientHello {
		return nil, ErrMalformed
	}
	if len(a.bytes) < 4 || slices.Contains(a.have[:4], false) {
		return nil, ErrIncomplete
	}
	length := 4 + int(a.bytes[1])<<16 + int(a.bytes[2])<<8 + int(a.bytes[3])
	switch {
	case length < len(a.bytes):
		return nil, ErrMalformed
	case length > len(a.bytes) || slices.Contains(a.have, false):
		return nil, ErrIncomplete
	}
	return a.bytes, nil
}

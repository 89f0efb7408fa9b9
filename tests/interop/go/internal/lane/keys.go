package lane

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"

	"golang.org/x/crypto/chacha20"
	"golang.org/x/crypto/chacha20poly1305"

	"culvert.example/culvert/internal/label"
)

const (
	// headerLen is the length of the header that we write: first byte, connection ID, packet number.
	headerLen = 1 + 8 + 4
	numberAt  = 9
	tagLen    = 16
	// MinPacket is the length of the shortest packet that is not ignored.
	MinPacket = headerLen + tagLen
	sampleAt  = numberAt + 4
)

// Why a packet is dropped.
var (
	ErrShort = errors.New("the packet is too short")
	ErrOpen  = errors.New("the packet does not authenticate")
	ErrOld   = errors.New("the packet number was opened before, or is too old")
)

// A Violation is an authentic packet that breaks the protocol: the lane must be closed.
type Violation string

func (v Violation) Error() string { return string(v) }

// Suite is the AEAD, the header protection and the hash of a TLS cipher suite.
type Suite struct {
	hash   func() hash.Hash
	keyLen int
	chacha bool
	// confidentiality is how many packets a key may seal (RFC 9001 section 6.6).
	confidentiality uint64
	// integrity is how many packets may fail to authenticate.
	integrity uint64
}

// NewSuite returns the suite with TLS's number id.
func NewSuite(id uint16) (Suite, error) {
	switch id {
	case tls.TLS_AES_128_GCM_SHA256:
		return Suite{sha256.New, 16, false, 1 << 23, 1 << 52}, nil
	case tls.TLS_AES_256_GCM_SHA384:
		return Suite{sha512.New384, 32, false, 1 << 23, 1 << 52}, nil
	case tls.TLS_CHACHA20_POLY1305_SHA256:
		return Suite{sha256.New, 32, true, 1 << 62, 1 << 36}, nil
	default:
		return Suite{}, fmt.Errorf("TLS suite %#x is not one of TLS 1.3 for QUIC", id)
	}
}

// SecretLen is the length of a lane's secrets.
func (s Suite) SecretLen() int { return s.hash().Size() }

// ExporterLabel is the label of the secrets of lanes.
const ExporterLabel = "EXPORTER culvert lane"

// ExporterContext is the context of the secret of one direction of one opening of a lane.
func ExporterContext(index uint16, byListener bool, epoch uint64) []byte {
	b := binary.BigEndian.AppendUint16(nil, index)
	if byListener {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	return binary.BigEndian.AppendUint64(b, epoch)
}

// Mix mixes a preshared key into the exported secret of one direction of a lane.
func (s Suite) Mix(key, exported []byte) []byte {
	extracted := label.Must(hkdf.Extract(s.hash, exported, key))
	return label.Must(hkdf.Expand(s.hash, extracted, "culvert psk lane 1", len(exported)))
}

func (s Suite) expand(secret []byte, name string, length int) []byte {
	return label.Expand(s.hash, secret, name, length)
}

// packetKey is the AEAD of one key phase of one direction.
type packetKey struct {
	aead   cipher.AEAD
	iv     [12]byte
	secret []byte
	nonce  [12]byte
}

func (s Suite) packetKey(secret []byte) *packetKey {
	key := s.expand(secret, "quic key", s.keyLen)
	k := &packetKey{secret: secret, iv: [12]byte(s.expand(secret, "quic iv", 12))}
	if s.chacha {
		k.aead = label.Must(chacha20poly1305.New(key))
	} else {
		k.aead = label.Must(cipher.NewGCM(label.Must(aes.NewCipher(key))))
	}
	return k
}

// next returns the key of the phase after k's.
func (s Suite) next(k *packetKey) *packetKey {
	return s.packetKey(s.expand(k.secret, "quic ku", len(k.secret)))
}

// forNumber returns the nonce of a packet, valid until the next call.
func (k *packetKey) forNumber(number uint64) []byte {
	k.nonce = k.iv
	binary.BigEndian.PutUint64(k.nonce[4:], binary.BigEndian.Uint64(k.iv[4:])^number)
	return k.nonce[:]
}

// headerKey masks the header; it stays through all key phases.
type headerKey struct {
	block cipher.Block
	key   []byte
	mask  [16]byte
}

func (s Suite) headerKey(secret []byte) *headerKey {
	key := s.expand(secret, "quic hp", s.keyLen)
	if s.chacha {
		return &headerKey{key: key}
	}
	return &headerKey{block: label.Must(aes.NewCipher(key))}
}

// maskOf returns the mask for a sample of 16 bytes, valid until the next call.
func (h *headerKey) maskOf(sample []byte) []byte {
	if h.block != nil {
		h.block.Encrypt(h.mask[:], sample)
		return h.mask[:5]
	}
	stream := label.Must(chacha20.NewUnauthenticatedCipher(h.key, sample[4:16]))
	stream.SetCounter(binary.LittleEndian.Uint32(sample))
	clear(h.mask[:5])
	stream.XORKeyStream(h.mask[:5], h.mask[:5])
	return h.mask[:5]
}

// Sealer protects the packets of one direction of a lane.
type Sealer struct {
	suite  Suite
	id     [8]byte
	key    *packetKey
	header *headerKey
	// Next is the number of the next packet.
	Next  uint64
	phase byte
	// sealed counts the packets of the present key.
	sealed uint64
	// phaseStart is the first number of the present key.
	phaseStart uint64
}

// NewSealer begins with packet number 0 and key phase 0. id is the connection ID of the receiver.
func NewSealer(suite Suite, secret []byte, id [8]byte) *Sealer {
	return &Sealer{suite: suite, id: id, key: suite.packetKey(secret), header: suite.headerKey(secret)}
}

// Start appends a header to b, behind which the packet's frames are appended.
func (s *Sealer) Start(b []byte) []byte {
	return append(append(append(b, 0), s.id[:]...), 0, 0, 0, 0)
}

// Seal protects packet, which is what Start and the appended frames made, and returns it with its tag. The capacity of
// packet must have room for that.
func (s *Sealer) Seal(packet []byte) []byte {
	number := s.Next
	s.Next++
	s.sealed++
	packet[0] = 0x43 | s.phase<<2
	binary.BigEndian.PutUint32(packet[numberAt:], uint32(number))
	header := packet[:headerLen]
	packet = s.key.aead.Seal(header, s.key.forNumber(number), packet[headerLen:], header)
	mask := s.header.maskOf(packet[sampleAt : sampleAt+16])
	packet[0] ^= mask[0] & 0x1f
	for i := range 4 {
		packet[numberAt+i] ^= mask[1+i]
	}
	return packet
}

// Update goes to the next key phase.
func (s *Sealer) Update() {
	s.key, s.phase, s.sealed, s.phaseStart = s.suite.next(s.key), s.phase^1, 0, s.Next
}

// Opener removes the protection of packets of one direction, and refuses repeated ones.
type Opener struct {
	suite  Suite
	header *headerKey
	// The keys of the present phase, the one after, and the one before, which is nil after a while.
	key, next, previous *packetKey
	phase               byte
	// phaseStart is the lowest number seen with the present key.
	phaseStart uint64
	window     Window
	// Failures counts packets that did not authenticate.
	Failures uint64
}

// NewOpener begins with key phase 0.
func NewOpener(suite Suite, secret []byte) *Opener {
	o := &Opener{suite: suite, header: suite.headerKey(secret), key: suite.packetKey(secret)}
	o.next = suite.next(o.key)
	return o
}

// Opened is the content of a packet.
type Opened struct {
	Number uint64
	Phase  byte
	Frames []byte
	// Newest says that no packet with a higher number came before, Updated that it is the first of a new key phase.
	Newest, Updated bool
}

// Open removes the protection in place. A packet with reserved bits is a [Violation].
func (o *Opener) Open(packet []byte) (Opened, error) {
	if len(packet) < MinPacket || packet[0]&0xc0 != 0x40 {
		return Opened{}, ErrShort
	}
	mask := o.header.maskOf(packet[sampleAt : sampleAt+16])
	packet[0] ^= mask[0] & 0x1f
	length := int(packet[0]&3) + 1
	var truncated uint64
	for i := range length {
		packet[numberAt+i] ^= mask[1+i]
		truncated = truncated<<8 | uint64(packet[numberAt+i])
	}
	out := Opened{
		Number: expandNumber(truncated, length, o.window.Next()),
		Phase:  packet[0] >> 2 & 1,
	}
	if !o.window.Fresh(out.Number) {
		return Opened{}, ErrOld
	}
	key := o.key
	if out.Phase != o.phase {
		if key = o.next; out.Number < o.phaseStart {
			key = o.previous
		}
	}
	if key == nil {
		o.Failures++
		return Opened{}, ErrOpen
	}
	at := numberAt + length
	var err error
	out.Frames, err = key.aead.Open(packet[at:at], key.forNumber(out.Number), packet[at:], packet[:at])
	if err != nil {
		o.Failures++
		return Opened{}, ErrOpen
	}
	out.Newest = o.window.Add(out.Number)
	switch key {
	case o.next:
		o.previous, o.key, o.next = o.key, o.next, o.suite.next(o.next)
		o.phase, o.phaseStart, out.Updated = out.Phase, out.Number, true
	case o.key:
		o.phaseStart = min(o.phaseStart, out.Number)
	}
	if packet[0]&0x18 != 0 {
		return out, Violation("reserved bits")
	}
	return out, nil
}

// ForgetPrevious drops the key of the phase before.
func (o *Opener) ForgetPrevious() { o.previous = nil }

// expandNumber finds the whole packet number nearest to next (RFC 9000 appendix A.3).
func expandNumber(truncated uint64, length int, next uint64) uint64 {
	span := uint64(1) << (8 * length)
	half := span / 2
	candidate := next&^(span-1) | truncated
	switch {
	case candidate+half <= next && candidate < 1<<62-span:
		return candidate + span
	case candidate > next+half && candidate >= span:
		return candidate - span
	default:
		return candidate
	}
}

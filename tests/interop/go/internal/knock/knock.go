// Package knock makes and opens knocks: the proof in the token of a dialler's Initial packets that it knows the
// listener's public key. It also reads and rewrites those packets.
package knock

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"slices"

	"github.com/flynn/noise"
	"golang.org/x/crypto/blake2s"
)

const (
	// Len is the length of a knock.
	Len = 136

	noiseLen   = 32 + 32 + 16 + payloadLen + 16
	payloadLen = 24
	macLen     = 16
	hashLen    = 16
	// epochSeconds is how long a mac1 is valid, but for the clock window.
	epochSeconds = 256

	version1     = 1
	signFlag     = 1
	fallbackFlag = 2
	prologue     = "culvert knock 1"
	macLabel     = "culvert knock mac1"
	maskLabel    = "culvert knock mask"
	payloadVer   = 1
)

// Why a knock is refused.
var (
	ErrLength = errors.New("not the length of a knock")
	ErrMAC    = errors.New("the knock is for another key or another time")
	ErrSealed = errors.New("the knock does not open")
	ErrClock  = errors.New("the dialler's clock differs by more than the window")
	ErrHello  = errors.New("the knock is for another ClientHello")
)

var suite = noise.NewCipherSuite(noise.DH25519, noise.CipherChaChaPoly, noise.HashBLAKE2s)

// PublicKey is an Ed25519 public key.
type PublicKey [32]byte

// p25519 is the prime of the field, 2^255 - 19.
var p25519 = new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 255), big.NewInt(19))

// X25519 returns the birationally equivalent key for X25519 (RFC 7748 section 4.1): u = (1 + y) / (1 - y).
func (k PublicKey) X25519() [32]byte {
	one := big.NewInt(1)
	y := fieldElement(k[:])
	numerator, denominator := new(big.Int).Add(one, y), new(big.Int).Sub(one, y)
	return fieldBytes(divide(numerator, denominator))
}

// fromX25519 returns the Ed25519 key whose X25519 form is u: y = (u - 1) / (u + 1), and the sign of x.
func fromX25519(u []byte, sign bool) PublicKey {
	one := big.NewInt(1)
	v := fieldElement(u)
	numerator, denominator := new(big.Int).Sub(v, one), new(big.Int).Add(v, one)
	key := fieldBytes(divide(numerator, denominator))
	if sign {
		key[31] |= 0x80
	}
	return key
}

// fieldElement reads a little-endian number without its highest bit.
func fieldElement(b []byte) *big.Int {
	b = slices.Clone(b)
	b[31] &= 0x7f
	slices.Reverse(b)
	return new(big.Int).SetBytes(b)
}

func fieldBytes(v *big.Int) (b [32]byte) {
	v.FillBytes(b[:])
	slices.Reverse(b[:])
	return b
}

// divide returns numerator / denominator in the field; 0 if the denominator is 0.
func divide(numerator, denominator *big.Int) *big.Int {
	denominator.Mod(denominator, p25519)
	if denominator.Sign() == 0 {
		return denominator
	}
	denominator.ModInverse(denominator, p25519)
	return numerator.Mul(numerator, denominator).Mod(numerator, p25519)
}

// x25519Key returns the X25519 form of an identity key: the first half of SHA-512 of the seed (RFC 8032 section 5.1.5).
func x25519Key(key ed25519.PrivateKey) noise.DHKey {
	sum := sha512.Sum512(key.Seed())
	public := Public(key).X25519()
	return noise.DHKey{Private: sum[:32], Public: public[:]}
}

// Public returns the public key of key.
func Public(key ed25519.PrivateKey) PublicKey {
	return PublicKey(key.Public().(ed25519.PublicKey))
}

// HelloHash returns what a knock says about the whole ClientHello, a handshake message with its type and length.
func HelloHash(hello []byte) (hash [hashLen]byte) {
	sum := sha256.Sum256(hello)
	copy(hash[:], sum[:])
	return hash
}

// head returns what mask and mac1 cover besides the knock: QUIC version, length and DCID.
func head(dcid []byte) []byte {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 5+20), version1)
	return append(append(b, byte(len(dcid))), dcid...)
}

func labelled(label string, listener PublicKey) [32]byte {
	return blake2s.Sum256(append([]byte(label), listener[:]...))
}

func mask(listener PublicKey, dcid []byte) []byte {
	key := labelled(maskLabel, listener)
	h, err := blake2s.New256(key[:])
	if err != nil {
		panic(err) // a key of 32 bytes is valid
	}
	h.Write(head(dcid))
	return h.Sum(nil)
}

func mac(listener PublicKey, dcid, noiseMessage []byte, epoch uint64) []byte {
	key := labelled(macLabel, listener)
	h, err := blake2s.New128(key[:])
	if err != nil {
		panic(err) // a key of 32 bytes is valid
	}
	h.Write(head(dcid))
	h.Write(noiseMessage)
	h.Write(binary.BigEndian.AppendUint64(nil, epoch))
	return h.Sum(nil)
}

func noiseConfig(listener PublicKey, dcid []byte) noise.Config {
	p := append([]byte(prologue), head(dcid)...)
	return noise.Config{
		CipherSuite: suite,
		Pattern:     noise.HandshakeX,
		Prologue:    append(p, listener[:]...),
	}
}

// Seal makes the knock of a connection. random gives the ephemeral key's 32 bytes.
func Seal(random io.Reader, key ed25519.PrivateKey, listener PublicKey, dcid []byte, seconds uint64, hello [hashLen]byte) ([]byte, error) {
	payload := make([]byte, 8, payloadLen)
	payload[0] = payloadVer
	public := Public(key)
	if public[31]&0x80 != 0 {
		payload[1] = signFlag
	}
	// The five bytes of seconds follow the reserved byte.
	for i := range 5 {
		payload[3+i] = byte(seconds >> (8 * (4 - i)))
	}
	return sealPayload(random, key, listener, dcid, seconds, append(payload, hello[:]...))
}

func sealPayload(random io.Reader, key ed25519.PrivateKey, listener PublicKey, dcid []byte, seconds uint64, payload []byte) ([]byte, error) {
	config := noiseConfig(listener, dcid)
	config.Random, config.Initiator = random, true
	config.StaticKeypair = x25519Key(key)
	peer := listener.X25519()
	config.PeerStatic = peer[:]
	state, err := noise.NewHandshakeState(config)
	if err != nil {
		return nil, fmt.Errorf("the knock: %w", err)
	}
	token, _, _, err := state.WriteMessage(nil, payload)
	if err != nil {
		return nil, fmt.Errorf("the knock: %w", err)
	}
	subtle.XORBytes(token[:32], token[:32], mask(listener, dcid))
	return append(token, mac(listener, dcid, token, seconds/epochSeconds)...), nil
}

// Knock is what an opened knock says.
type Knock struct {
	Dialler PublicKey
	Seconds uint64
	Hello   [hashLen]byte
	// Fallback says that the dialler could do better than the X25519 that it offers.
	Fallback bool
}

// Open checks the knock in a token: its mac1, which costs a hash, then all else. It does not check the ClientHello; see
// [Knock.CheckHello]. now and window are in seconds.
func Open(key ed25519.PrivateKey, dcid, token []byte, now, window uint64) (Knock, error) {
	if len(token) != Len {
		return Knock{}, ErrLength
	}
	listener := Public(key)
	if !macFits(listener, dcid, token, now, window) {
		return Knock{}, ErrMAC
	}
	message := slices.Clone(token[:noiseLen])
	subtle.XORBytes(message[:32], message[:32], mask(listener, dcid))
	config := noiseConfig(listener, dcid)
	config.StaticKeypair = x25519Key(key)
	state, err := noise.NewHandshakeState(config)
	if err != nil {
		return Knock{}, fmt.Errorf("the knock: %w", err)
	}
	payload, _, _, err := state.ReadMessage(nil, message)
	if err != nil || len(payload) != payloadLen || payload[0] != payloadVer {
		return Knock{}, ErrSealed
	}
	var seconds uint64
	for _, b := range payload[3:8] {
		seconds = seconds<<8 | uint64(b)
	}
	if max(seconds, now)-min(seconds, now) > window {
		return Knock{}, ErrClock
	}
	return Knock{
		Dialler: fromX25519(state.PeerStatic(), payload[1]&signFlag != 0),
		Seconds: seconds,
		Hello:   [hashLen]byte(payload[8:]),

		Fallback: payload[1]&fallbackFlag != 0,
	}, nil
}

func macFits(listener PublicKey, dcid, token []byte, now, window uint64) bool {
	first, last := (now-min(window, now))/epochSeconds, (now+window)/epochSeconds
	for epoch := first; epoch <= last; epoch++ {
		if subtle.ConstantTimeCompare(mac(listener, dcid, token[:noiseLen], epoch), token[noiseLen:]) == 1 {
			return true
		}
	}
	return false
}

// CheckHello says whether the knock is for this ClientHello.
func (k Knock) CheckHello(hello []byte) error {
	hash := HelloHash(hello)
	if subtle.ConstantTimeCompare(hash[:], k.Hello[:]) != 1 {
		return ErrHello
	}
	return nil
}

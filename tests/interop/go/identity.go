package culvert

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"os"

	"culvert.example/culvert/internal/knock"
)

// PublicKey is the Ed25519 key that names an agent.
type PublicKey knock.PublicKey

// String returns the key's text form: 43 characters of base64url.
func (k PublicKey) String() string { return base64.RawURLEncoding.EncodeToString(k[:]) }

// ParsePublicKey reads that form.
func ParsePublicKey(text string) (PublicKey, error) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != len(PublicKey{}) {
		return PublicKey{}, fmt.Errorf("%q is not a public key (remedy: 43 characters, as `culvert pubkey` prints them)", text)
	}
	return PublicKey(b), nil
}

// PublicOf returns the public key of a private key.
func PublicOf(key ed25519.PrivateKey) PublicKey { return PublicKey(knock.Public(key)) }

// Link says where an agent listens, and which key it has.
type Link struct {
	Address string // host:port
	Key     PublicKey
}

// ParseLink reads culvert://host:port/<public key>.
func ParseLink(text string) (Link, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "culvert" || u.Hostname() == "" || u.Port() == "" || len(u.Path) < 2 || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return Link{}, fmt.Errorf("%q is not a link (remedy: culvert://host:port/<public key>, as `culvert link` prints it)", text)
	}
	key, err := ParsePublicKey(u.Path[1:])
	return Link{Address: u.Host, Key: key}, err
}

// String returns the form that [ParseLink] reads.
func (l Link) String() string { return "culvert://" + l.Address + "/" + l.Key.String() }

// GenerateKey makes a new identity.
func GenerateKey() (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return key, err
}

// LoadKey reads a private key: PKCS#8 in PEM, as `culvert keygen` writes it.
func LoadKey(path string) (ed25519.PrivateKey, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, fmt.Errorf("%s is not a private key in PEM (remedy: `culvert keygen` makes one)", path)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	key, ok := parsed.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s is not an Ed25519 key (remedy: `culvert keygen` makes one)", path)
	}
	return key, nil
}

// SaveKey writes a private key to a new file that only its owner can read.
func SaveKey(path string, key ed25519.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = pem.Encode(file, &pem.Block{Type: "PRIVATE KEY", Bytes: der})
	return errors.Join(err, file.Close())
}

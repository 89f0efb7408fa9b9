package culvert

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"time"

	"culvert.example/culvert/internal/wire"
)

const (
	alpn = "culvert/1"

	possessionLabel = "EXPORTER-culvert-possession"
)

// tlsConfig pins the other end's key with allowed.
func tlsConfig(key ed25519.PrivateKey, allowed func(PublicKey) bool) (*tls.Config, error) {
	// Nothing of it is looked at but the key; the time is for libraries that do.
	template := x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Unix(0, 0),
		NotAfter:     time.Date(4096, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("the certificate: %w", err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		MinVersion:   tls.VersionTLS13,
		NextProtos:   []string{alpn},
		// Two datagrams of ClientHello; with X25519 alone for agents that are configured so.
		CurvePreferences:       []tls.CurveID{tls.X25519MLKEM768, tls.X25519},
		SessionTicketsDisabled: true,
		ClientAuth:             tls.RequireAnyClientCert,
		// There is no authority: VerifyConnection compares the key.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			key, err := peerKey(state)
			if err == nil && !allowed(key) {
				err = fmt.Errorf("the other end has the key %v, which is not allowed", key)
			}
			return err
		},
	}, nil
}

// peerKey is the identity of the other end.
func peerKey(state tls.ConnectionState) (PublicKey, error) {
	if len(state.PeerCertificates) == 0 {
		return PublicKey{}, errors.New("the other end sent no certificate")
	}
	key, ok := state.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok || len(key) != ed25519.PublicKeySize {
		return PublicKey{}, errors.New("the other end's certificate is not of an Ed25519 key")
	}
	return PublicKey(key), nil
}

// possession returns what a dialler signs in its hello.
func possession(state tls.ConnectionState) ([]byte, error) {
	exported, err := state.ExportKeyingMaterial(possessionLabel, nil, 32)
	return wire.PossessionMessage(exported), err
}

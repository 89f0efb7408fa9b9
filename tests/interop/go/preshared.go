package culvert

import (
	"crypto/subtle"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"

	"culvert.example/culvert/internal/wire"
)

// PresharedKey is a key that two agents share beside their public keys: their lanes need it, too.
type PresharedKey [32]byte

// LoadPresharedKey reads a key as `culvert genpsk` writes it.
func LoadPresharedKey(path string) (PresharedKey, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return PresharedKey{}, err
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(strings.TrimSpace(string(text)))
	if err != nil || len(b) != len(PresharedKey{}) {
		return PresharedKey{}, fmt.Errorf("%s is not a preshared key (remedy: `culvert genpsk` makes one)", path)
	}
	return PresharedKey(b), nil
}

const presharedLabel = "EXPORTER culvert psk"

// errPreshared says that the ends have no preshared key in common.
var errPreshared = errors.New("no preshared key in common (remedy: the same file at both ends)")

// proofs are what one end of a connection shows of its keys.
func proofs(state tls.ConnectionState, keys []PresharedKey, byListener bool) ([][]byte, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	if len(keys) > wire.MaxPresharedKeys {
		return nil, fmt.Errorf("%d preshared keys, the most is %d", len(keys), wire.MaxPresharedKeys)
	}
	exported, err := state.ExportKeyingMaterial(presharedLabel, nil, 32)
	if err != nil {
		return nil, err
	}
	var all [][]byte
	for _, key := range keys {
		all = append(all, wire.KeyProof(key[:], exported, byListener))
	}
	return all, nil
}

// presharedKeys are those of one session.
type presharedKeys struct {
	own []PresharedKey
	// As the two ends show them.
	dialler, listener [][]byte
	expected          [][]byte
	dials             bool
}

// presharedUse is the key that both ends have, and the dialler's proof of it.
type presharedUse struct {
	key   PresharedKey
	named []byte
}

func newPresharedKeys(state tls.ConnectionState, own []PresharedKey, dials bool) (*presharedKeys, error) {
	p := &presharedKeys{own: own, dials: dials}
	var err error
	if p.dialler, err = proofs(state, own, false); err == nil {
		p.listener, err = proofs(state, own, true)
	}
	p.expected = p.listener
	if !dials {
		p.expected = p.dialler
	}
	return p, err
}

// shown is what we show.
func (p *presharedKeys) shown() [][]byte {
	if p.dials {
		return p.dialler
	}
	return p.listener
}

// place finds the key that a proof is of; -1 if we do not have it.
func place(expected [][]byte, proof []byte) int {
	for i, each := range expected {
		if subtle.ConstantTimeCompare(each, proof) == 1 {
			return i
		}
	}
	return -1
}

// agree returns the first key of the dialler that the listener has, too; nil if neither end has any.
func (p *presharedKeys) agree(theirs [][]byte) (*presharedUse, error) {
	if len(p.own) == 0 && len(theirs) == 0 {
		return nil, nil
	}
	if p.dials {
		for i := range p.own {
			if place(theirs, p.expected[i]) >= 0 {
				return p.use(i), nil
			}
		}
	} else {
		for _, proof := range theirs {
			if i := place(p.expected, proof); i >= 0 {
				return p.use(i), nil
			}
		}
	}
	return nil, errPreshared
}

func (p *presharedKeys) use(i int) *presharedUse {
	return &presharedUse{key: p.own[i], named: p.dialler[i]}
}

// ofLane returns the key that a dialler names for a lane; false: it is to be refused.
func (p *presharedKeys) ofLane(named []byte) (*presharedUse, bool) {
	if len(named) == 0 {
		return nil, len(p.own) == 0
	}
	if i := place(p.expected, named); i >= 0 {
		return p.use(i), true
	}
	return nil, false
}

// is says whether both are the same key, or none.
func (u *presharedUse) is(other *presharedUse) bool {
	return u == nil && other == nil || u != nil && other != nil && u.key == other.key
}

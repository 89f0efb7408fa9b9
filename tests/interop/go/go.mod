module culvert.example/culvert

go 1.26.0

require (
	// why: the pattern X of a knock; Noise is not in the standard library
	github.com/flynn/noise v1.1.0
	// why: QUIC, for control connections and their streams
	github.com/quic-go/quic-go v0.65.0
	// why: BLAKE2s of knocks; ChaCha20-Poly1305 and its header protection on lanes
	golang.org/x/crypto v0.54.0
	// why: recvmmsg, in the types that quic-go wants
	golang.org/x/net v0.56.0
	// why: the numbers of GSO, GRO and socket options
	golang.org/x/sys v0.47.0
)

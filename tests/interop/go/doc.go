// Package culvert is a second implementation of Culvert's wire format: it dials agents and listens for them, opens UDP
// flows and TCP forwards to their services, and offers services of its own.
//
//	key, _ := culvert.LoadKey("identity.key")
//	link, _ := culvert.ParseLink("culvert://192.0.2.2:4433/bYSIEhy5…")
//	peer, err := culvert.Dial(ctx, link, culvert.Config{Key: key})
//	if err != nil { … }
//	defer peer.Close()
//
//	flow, _ := peer.OpenFlow("dns")          // a net.Conn of datagrams
//	stream, _ := peer.OpenStream(ctx, "web") // a net.Conn of bytes
//
// A [Peer] outlives its connections: if one breaks, or either end's address changes, or the agent restarts, [Dial]
// connects again, and flows go on. Streams end with their connection.
//
// Datagrams travel on lanes: packets with keys and acknowledgements of their own beside the QUIC connection, without
// retransmission and without congestion control. With Config.Lanes below 0, or a peer that has none, they travel in
// DATAGRAM frames of the connection itself.
//
// A [Listener] answers nobody who does not hold its public key, and nobody whom [Config.Authorize] does not admit.
//
// # Limits
//
// The package carries UDP flows and TCP forwards, no IP packets; it knows no stream connections, so all forwards to a
// peer share one QUIC connection. What a peer wants to receive at most holds for its datagrams, not for forwards. It
// keeps to the limits that a peer sets for streams and sets none: readers that stop hold what QUIC's windows allow. The
// package does not decide between two connections that both ends dialled at the same time. It needs Linux.
package culvert

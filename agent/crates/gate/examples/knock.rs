//! A gate before a QUIC endpoint: it admits a client that knows the server's public key and may connect, once. All others meet
//! silence, as if nobody listened.
//!
//! `cargo run --example knock -p culvert-gate`

use std::{
    error::Error,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    clock::{Clock as _, SystemClock},
    ids::PeerId,
};
use culvert_gate::{
    Arrival, Gate, GateParts, GateStats, Own, Verdict,
    admission::{Admits, Allowlist, Room},
    budget::Budget,
    client::{Knock, arm},
    identity::{Identity, PublicKey},
    knock::ServerKey,
    replay_log::MemoryReplayLog,
    table::SingleUse,
    tls::{KeyExchange, SERVER_NAME, TlsIdentity, client_crypto, initial_crypto},
};
use quinn_proto::{ClientConfig, ConnectionId, Endpoint, EndpointConfig};
use rand::{SeedableRng as _, rngs::StdRng};
use wire::cid::ConnectionIds;
use zeroize::Zeroizing;

/// The one client that may connect, by the X25519 key that follows from its identity.
struct Friend([u8; 32]);

impl Allowlist for Friend {
    fn admits(&self, agreement: &[u8; 32], _now: Instant) -> Admits {
        if *agreement == self.0 { Admits::Peer(PeerId(0)) } else { Admits::Nobody }
    }
}

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() -> Result<(), Box<dyn Error>> {
    let (server, friend, other) = (Identity::generate()?, Identity::generate()?, Identity::generate()?);
    let key = server.public_key();
    let mut gate = gate_of(&server, *friend.agreement_key().public())?;

    let knocking = first_packet(&friend, &key, true)?;
    let cases = [
        ("random bytes", rand::random::<[u8; 1200]>().to_vec(), "class"),
        ("a client that does not knock", first_packet(&friend, &key, false)?, "token"),
        (
            "a client that knows another server's key",
            first_packet(&friend, &other.public_key(), true)?,
            "mac",
        ),
        ("a client that knows our key, and is no friend", first_packet(&other, &key, true)?, "key"),
        ("the friend", knocking.clone(), "admitted"),
        ("somebody who repeats what the friend sent", knocking, "used"),
    ];
    for (number, (who, datagram, expected)) in (1..).zip(cases) {
        let source = SocketAddr::from((Ipv4Addr::new(192, 0, 2, number), 4433));
        let arrival = Arrival { source, validated: false, listening: true, room: Room::Free };
        let before = gate.stats;
        let verdict = gate.check(&datagram, arrival, SystemClock.now());
        let admitted = matches!(verdict, Verdict::Admit(_));
        let step = ended_at(&before, &gate.stats).ok_or("every datagram is counted")?;
        println!("{who}: {} (step \"{step}\")", if admitted { "goes on to QUIC" } else { "no answer" });
        assert!(admitted || verdict == Verdict::Unauthenticated);
        assert_eq!((step, admitted), (expected, expected == "admitted"));
    }
    Ok(())
}

/// The step of the gate at which the datagram between two counts ended.
fn ended_at(before: &GateStats, after: &GateStats) -> Option<&'static str> {
    after.ended.iter().find(|(step, count)| **count != before.ended[*step]).map(|(step, _)| step.label())
}

/// The gate of a server that admits the holder of `friend`.
fn gate_of(server: &Identity, friend: [u8; 32]) -> Result<Gate, Box<dyn Error>> {
    let (own, now) = (Own::new(server), SystemClock.now());
    Ok(Gate::new(GateParts {
        ids: ConnectionIds::new(own.issued.clone(), rand::random(), 0, 1),
        own,
        allowlist: Arc::new(Friend(friend)),
        refusals: Arc::default(),
        required: true,
        key_exchange: KeyExchange::Hybrid,
        window: Duration::from_secs(90),
        // The server is new: nobody has knocked before this process started.
        table: SingleUse::restore(
            Box::<MemoryReplayLog>::default(),
            1,
            Vec::new(),
            0,
            now,
            SystemClock.unix_seconds(),
        ),
        budget: Budget::new(1, now),
        clock: Arc::new(SystemClock),
        crypto: initial_crypto(&TlsIdentity::from_pkcs8(&server.pkcs8_der())?)?,
        rng: StdRng::from_seed(rand::random()),
    }))
}

/// The first packet of a QUIC client that expects `server`; its token is a knock if it `knocks`.
fn first_packet(client: &Identity, server: &PublicKey, knocks: bool) -> Result<Vec<u8>, Box<dyn Error>> {
    let tls =
        client_crypto(&TlsIdentity::from_pkcs8(&client.pkcs8_der())?, KeyExchange::X25519, &[server.0])?;
    let config = if knocks {
        let knock = Knock {
            own: Arc::new(client.agreement_key()),
            server: Arc::new(ServerKey::new(server).ok_or("not a public key")?),
            unix_seconds: SystemClock.unix_seconds(),
            ephemeral: Zeroizing::new(rand::random()),
            fallback: false,
        };
        arm(tls, knock, Arc::new(|| ConnectionId::new(&rand::random::<[u8; 8]>())))
    } else {
        ClientConfig::new(tls)
    };
    let mut endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, true, None);
    let (to, now) = (SocketAddr::from((Ipv4Addr::LOCALHOST, 4433)), SystemClock.now());
    let (_, mut connection) = endpoint.connect(now, config, to, SERVER_NAME)?;
    let mut datagram = Vec::new();
    assert!(connection.poll_transmit(now, 1, &mut datagram).is_some(), "a client speaks first");
    Ok(datagram)
}

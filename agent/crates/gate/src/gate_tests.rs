//! The gate as a whole, before the first packets of real clients.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use quinn_proto::{ConnectionId, Endpoint, EndpointConfig};
use rand::{SeedableRng as _, rngs::StdRng};
use wire::{
    cid::ConnectionIds,
    clock::{Clock as _, ManualClock},
    ids::PeerId,
};
use zeroize::Zeroizing;

use crate::{
    Arrival, Gate, GateParts, Own, Step, Verdict,
    admission::{Admits, Allowlist, Room},
    budget::Budget,
    client::{Knock, arm},
    replay_log::MemoryReplayLog,
    table::SingleUse,
    testing::{SECONDS, client_identity, client_tls, server_identity, server_key, server_tls},
    tls::{KeyExchange, SERVER_NAME},
};

struct Anyone;

impl Allowlist for Anyone {
    fn admits(&self, _agreement: &[u8; 32]) -> Admits {
        Admits::Peer(PeerId(0))
    }
}

pub(crate) fn gate(clock: &Arc<ManualClock>) -> Gate {
    let (own, now) = (Own::new(&server_identity()), clock.now());
    Gate::new(GateParts {
        ids: ConnectionIds::new(own.issued.clone(), [1; 32], 0, 1),
        own,
        allowlist: Arc::new(Anyone),
        refusals: Arc::default(),
        required: true,
        key_exchange: KeyExchange::Hybrid,
        window: Duration::from_secs(90),
        table: SingleUse::restore(Box::<MemoryReplayLog>::default(), 1, Vec::new(), 0, now, 0),
        budget: Budget::new(1, now),
        clock: Arc::clone(clock) as _,
        crypto: server_tls(),
        rng: StdRng::from_seed([2; 32]),
    })
}

/// The first datagrams of a client that knocks, to `dcid`.
pub(crate) fn first_flight(
    clock: &ManualClock,
    dcid: Vec<u8>,
    key_exchange: KeyExchange,
    fallback: bool,
) -> Vec<Vec<u8>> {
    let knock = Knock {
        own: Arc::new(client_identity().agreement_key()),
        server: Arc::new(server_key()),
        unix_seconds: clock.unix_seconds(),
        // No two knocks may be the same.
        ephemeral: Zeroizing::new([3 ^ *dcid.last().unwrap_or(&0); 32]),
        fallback,
    };
    let config = arm(client_tls(key_exchange), knock, Arc::new(move || ConnectionId::new(&dcid)));
    let mut endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), None, true, None);
    let to = SocketAddr::from(([192, 0, 2, 2], 4433));
    let (_, mut connection) = endpoint.connect(clock.now(), config, to, SERVER_NAME).unwrap();
    let mut datagrams = Vec::new();
    loop {
        let mut datagram = Vec::new();
        if connection.poll_transmit(clock.now(), 1, &mut datagram).is_none() {
            return datagrams;
        }
        datagrams.push(datagram);
    }
}

#[test]
fn a_first_packet_may_go_to_a_connection_id_of_any_length_that_quic_allows() {
    let clock = Arc::new(ManualClock::new(Duration::from_secs(SECONDS)));
    let source = SocketAddr::from(([192, 0, 2, 1], 4433));
    let arrival = Arrival { source, listening: true, room: Room::Free };
    for length in [0, 7, 8, 9, 20] {
        let (mut gate, dcid) = (gate(&clock), vec![0xd0; length]);
        let flight = first_flight(&clock, dcid.clone(), KeyExchange::X25519, false);
        assert_eq!(flight.len(), 1);
        let verdict = gate.check(&flight[0], arrival, clock.now());
        if length < 8 {
            assert_eq!(verdict, Verdict::Unauthenticated, "{length}");
            assert_eq!(gate.stats.ended[Step::Knock as usize], 1, "{length}");
            continue;
        }
        let Verdict::Admit(admission) = verdict else { panic!("{length}: {verdict:?}") };
        assert_eq!(admission.dcid[..], dcid[..], "{length}");
    }
}

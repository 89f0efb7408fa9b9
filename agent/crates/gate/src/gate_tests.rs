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
    Arrival, Gate, GateParts, Own, OwnKey, Step, Verdict,
    admission::{Admits, Allowlist, Room},
    budget::Budget,
    client::{Knock, arm},
    identity::Identity,
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
    gate_of(&server_identity(), clock)
}

fn gate_of(identity: &Identity, clock: &Arc<ManualClock>) -> Gate {
    let (own, now) = (Own::new(identity), clock.now());
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

#[test]
fn a_knock_to_the_previous_key_is_admitted_as_such_and_one_to_a_key_before_that_is_not() {
    let clock = Arc::new(ManualClock::new(Duration::from_secs(SECONDS)));
    let source = SocketAddr::from(([192, 0, 2, 1], 4433));
    let arrival = Arrival { source, listening: true, room: Room::Free };
    let flight = first_flight(&clock, vec![0xd0; 8], KeyExchange::X25519, false);
    let identity = |seed: u8| Identity::from_seed(Zeroizing::new([seed; 32])).unwrap();
    for (identity, expected) in [
        (server_identity(), Some(OwnKey::Current)),
        (identity(8).with_previous(server_identity()), Some(OwnKey::Previous)),
        (server_identity().with_previous(identity(8)), Some(OwnKey::Current)),
        (identity(8).with_previous(identity(9)), None),
    ] {
        let mut gate = gate_of(&identity, &clock);
        assert_eq!(gate.screen(&flight[0], clock.now()), expected.is_some());
        let admitted = match gate.check(&flight[0], arrival, clock.now()) {
            Verdict::Admit(admission) => Some(admission.own),
            Verdict::Unauthenticated => None,
            other @ (Verdict::Pass | Verdict::Retry | Verdict::Taken) => panic!("{other:?}"),
        };
        assert_eq!(admitted, expected);
        // Under load the Retry token is for the same key.
        let mut gate = gate_of(&identity, &clock);
        let busy = Arrival { room: Room::Busy, ..arrival };
        if gate.check(&flight[0], busy, clock.now()) == Verdict::Retry {
            let packet = gate.retry_packet();
            // RFC 9000 §17.2.5: first byte, version, no destination, our connection ID of 8 bytes, the token, a tag of 16 bytes.
            let scid = 6 + usize::from(packet[5]);
            let (dcid, token) = (&packet[scid + 1..scid + 9], &packet[scid + 9..packet.len() - 16]);
            let epochs = crate::knock::epochs(SECONDS, Duration::from_secs(90));
            assert_eq!(Own::new(&identity).proven(dcid, token, epochs), expected);
        } else {
            assert_eq!(expected, None);
        }
    }
}

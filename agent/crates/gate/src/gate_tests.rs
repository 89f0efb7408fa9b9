//! The gate as a whole, before the first packets of real clients.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    clock::{Clock as _, ManualClock},
    ids::PeerId,
};
use bytes::BytesMut;
use quinn_proto::{Connection, ConnectionId, DatagramEvent, Endpoint, EndpointConfig};
use rand::{SeedableRng as _, rngs::StdRng};
use wire::cid::ConnectionIds;
use zeroize::Zeroizing;

use crate::{
    Arrival, Gate, GateParts, Own, OwnKey, Step, Verdict,
    admission::{Admits, Allowlist, Room},
    budget::{Budget, Take},
    client::{Knock, arm},
    identity::Identity,
    knock::{EPOCH_SECONDS, KNOCK_BYTES},
    properties::two_datagrams,
    refusals::Why,
    replay_log::{MemoryReplayLog, Record, ReplayLog},
    table::SingleUse,
    testing::{SECONDS, client_identity, client_tls, server_identity, server_key, server_tls},
    tls::{KeyExchange, SERVER_NAME},
};

struct Anyone;

impl Allowlist for Anyone {
    fn admits(&self, _agreement: &[u8; 32], _now: Instant) -> Admits {
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

/// A client that knocks, and the addresses that its gate sees.
struct Client {
    endpoint: Endpoint,
    connection: Connection,
    server: SocketAddr,
}

impl Client {
    fn new(clock: &ManualClock, dcid: Vec<u8>, key_exchange: KeyExchange, fallback: bool) -> Self {
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
        let server = SocketAddr::from(([192, 0, 2, 2], 4433));
        let (_, connection) = endpoint.connect(clock.now(), config, server, SERVER_NAME).unwrap();
        Self { endpoint, connection, server }
    }

    fn transmit(&mut self, clock: &ManualClock) -> Vec<Vec<u8>> {
        let mut datagrams = Vec::new();
        loop {
            let mut datagram = Vec::new();
            if self.connection.poll_transmit(clock.now(), 1, &mut datagram).is_none() {
                return datagrams;
            }
            datagrams.push(datagram);
        }
    }

    /// What it sends after it got `retry`.
    fn answer(&mut self, clock: &ManualClock, retry: &[u8]) -> Vec<Vec<u8>> {
        let event = self.endpoint.handle(
            clock.now(),
            self.server,
            None,
            None,
            BytesMut::from(retry),
            &mut Vec::new(),
        );
        let Some(DatagramEvent::ConnectionEvent(_, event)) = event else {
            panic!("no packet of the connection")
        };
        self.connection.handle_event(event);
        self.transmit(clock)
    }
}

/// The first datagrams of a client that knocks, to `dcid`.
pub(crate) fn first_flight(
    clock: &ManualClock,
    dcid: Vec<u8>,
    key_exchange: KeyExchange,
    fallback: bool,
) -> Vec<Vec<u8>> {
    Client::new(clock, dcid, key_exchange, fallback).transmit(clock)
}

fn start() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Duration::from_secs(SECONDS)))
}

/// From a client on the Internet, to a port on which we listen.
fn arrival(room: Room) -> Arrival {
    Arrival { source: SocketAddr::from(([192, 0, 2, 1], 4433)), validated: false, listening: true, room }
}

/// The one datagram of another client each time, by `number`.
fn hello(clock: &ManualClock, number: u8) -> Vec<u8> {
    let dcid = vec![0xd0, 0, 0, 0, 0, 0, 0, number];
    let [datagram] = first_flight(clock, dcid, KeyExchange::X25519, false).try_into().expect("one datagram");
    datagram
}

fn is_admitted(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Admit(_))
}

impl Gate {
    fn ended_at(&self, step: Step) -> u64 {
        self.stats.ended[step]
    }

    fn whys(&self) -> Vec<Why> {
        self.parts.refusals.latest().into_iter().map(|(refusal, _)| refusal.why).collect()
    }
}

/// A datagram of 1,200 bytes with a long header that begins with `first`, to `dcid`, with `token` if it is an Initial.
fn long(first: u8, dcid: &[u8], token: &[u8]) -> Vec<u8> {
    let mut packet = vec![first, 0, 0, 0, 1, 8];
    packet.extend(dcid);
    packet.push(0);
    if first >> 4 & 3 == 0 {
        packet.extend((token.len() as u16 | 0x4000).to_be_bytes());
        packet.extend(token);
        packet.extend([0x40, 100]);
    }
    packet.resize(1_200, 0);
    packet
}

const INITIAL: u8 = 0xc0;
const ZERO_RTT: u8 = 0xd0;
const HANDSHAKE: u8 = 0xe0;
const RETRY: u8 = 0xf0;

#[test]
fn what_has_secrets_is_shown_without_them() {
    let clock = start();
    let gate = gate(&clock);
    let shown = format!("{gate:?}");
    assert!(shown.starts_with("Gate { stats: GateStats {") && shown.ends_with(", .. }"), "{shown}");
    assert_eq!(format!("{:?} {:?}", gate.parts.own, gate.parts.own.retry), "Own RetryKey");
    let key = server_identity().public_key();
    assert_eq!(format!("{:?}", crate::testing::knock()), format!("Knock(ServerKey({key}), {SECONDS} s)"));
}

#[test]
fn what_names_a_connection_of_ours_passes_and_a_foreign_name_does_not() {
    let clock = start();
    let mut gate = gate(&clock);
    let ours = gate.parts.ids.next_id().0;
    let mut foreign = ours;
    foreign[7] ^= 1;
    for listening in [true, false] {
        for (dcid, is_ours) in [(ours, true), (foreign, false)] {
            let short = [&[0x40][..], &dcid, &[0; 30]].concat();
            for packet in [short, long(HANDSHAKE, &dcid, &[]), long(RETRY, &dcid, &[])] {
                let verdict = gate.check(&packet, Arrival { listening, ..arrival(Room::Free) }, clock.now());
                assert_eq!(verdict == Verdict::Pass, is_ours, "{:#x}", packet[0]);
                assert_eq!(gate.screen(&packet, clock.now()), is_ours, "{:#x}", packet[0]);
            }
            let packet = long(ZERO_RTT, &dcid, &[]);
            assert_eq!(gate.check(&packet, arrival(Room::Free), clock.now()), Verdict::Unauthenticated);
            assert!(!gate.screen(&packet, clock.now()), "no agent sends 0-RTT");
        }
    }
    // Those that passed a screening are counted where they are checked.
    assert_eq!((gate.ended_at(Step::Passed), gate.ended_at(Step::Class)), (6, 12 + 8));
}

#[test]
fn a_screening_passes_what_may_be_authenticated() {
    let clock = start();
    let (good, short_dcid) = (hello(&clock, 1), [0xd0; 8]);
    let mut forged = good.clone();
    // The last byte of mac1: the token lies behind the connection IDs, its length in two bytes.
    let scid_bytes = usize::from(good[14]);
    forged[15 + scid_bytes + 2 + KNOCK_BYTES - 1] ^= 1;
    let ours = gate(&clock).parts.ids.next_id().0;
    for (datagram, expected) in [
        (good, None),
        (long(INITIAL, &ours, &[]), None),
        (long(INITIAL, &short_dcid, &[]), Some(Step::Token)),
        (long(INITIAL, &short_dcid, &[7; KNOCK_BYTES - 1]), Some(Step::Token)),
        // Cut, it would still be whole for its header.
        (long(INITIAL, &ours, &[7; KNOCK_BYTES])[..1_199].to_vec(), Some(Step::Token)),
        (long(INITIAL, &ours, &[7; KNOCK_BYTES]), None),
        (forged, Some(Step::Mac)),
    ] {
        let mut gate = gate(&clock);
        assert_eq!(gate.screen(&datagram, clock.now()), expected.is_none(), "{expected:?}");
        assert_eq!(gate.stats.ended.total(), u64::from(expected.is_some()));
        if let Some(step) = expected {
            assert_eq!(gate.ended_at(step), 1, "{step:?}");
        }
        gate.parts.required = false;
        assert!(gate.screen(&datagram, clock.now()), "no knock is asked for");
    }
}

#[test]
fn a_datagram_of_another_exit_is_known_by_each_kind_of_header() {
    let clock = start();
    let mut gate = gate(&clock);
    let of = |gate: &Gate, server| gate.parts.ids.clone().with_server_id(Some(server)).next_id().0;
    let (other, own) = (of(&gate, 2), of(&gate, 1));
    gate.parts.ids = gate.parts.ids.clone().with_server_id(Some(1));
    for (dcid, is_other) in [(other, true), (own, false), ([2; 8], false)] {
        let short = [&[0x40][..], &dcid, &[0; 30]].concat();
        for packet in [short, long(INITIAL, &dcid, &[]), long(HANDSHAKE, &dcid, &[]), long(RETRY, &dcid, &[])]
        {
            assert_eq!(gate.is_for_other_exit(&packet), is_other, "{:#x} to {dcid:?}", packet[0]);
        }
        assert!(!gate.is_for_other_exit(&long(ZERO_RTT, &dcid, &[])) && !gate.is_for_other_exit(&[]));
    }
    assert_eq!(gate.ended_at(Step::OtherExit), 4);
}

#[test]
fn an_initial_needs_a_token_unless_it_answers_our_own_dialling() {
    let clock = start();
    let now = clock.now();
    let mut gate = gate(&clock);
    let ours = gate.parts.ids.next_id().0;
    let dialling = Arrival { listening: false, ..arrival(Room::Free) };
    assert_eq!(gate.check(&long(INITIAL, &ours, &[]), dialling, now), Verdict::Pass);
    let known = hello(&clock, 1);
    let one_more = long(INITIAL, &ours, &[7; KNOCK_BYTES + 1]);
    for (datagram, arrival, step) in [
        (&long(INITIAL, &[7; 8], &[]), dialling, Step::Class),
        (&known, dialling, Step::Class),
        (&long(INITIAL, &[7; 8], &[]), arrival(Room::Free), Step::Token),
        (&one_more, arrival(Room::Free), Step::Token),
        (&known[..1_199].to_vec(), arrival(Room::Free), Step::Class),
        (&long(INITIAL, &ours, &[7; KNOCK_BYTES])[..1_199].to_vec(), arrival(Room::Free), Step::Token),
        (&long(INITIAL, &ours, &[7; KNOCK_BYTES]), arrival(Room::Free), Step::Mac),
    ] {
        let before = gate.ended_at(step);
        assert_eq!(gate.check(datagram, arrival, now), Verdict::Unauthenticated, "{step:?}");
        assert_eq!(gate.ended_at(step), before + 1, "{step:?}");
    }
    // Without the requirement all that comes to a listening port is for quinn-proto.
    gate.parts.required = false;
    assert_eq!(gate.check(&long(INITIAL, &[7; 8], &[]), arrival(Room::Free), now), Verdict::Pass);
    assert_eq!(gate.check(&long(INITIAL, &[7; 8], &[]), dialling, now), Verdict::Unauthenticated);
}

#[test]
fn a_busy_gate_asks_for_the_address_and_admits_who_answers() {
    let clock = start();
    let mut gate = gate(&clock);
    let mut client = Client::new(&clock, vec![7; 8], KeyExchange::X25519, false);
    let [first] = client.transmit(&clock).try_into().expect("one datagram");
    assert_eq!(gate.check(&first, arrival(Room::Busy), clock.now()), Verdict::Retry);
    assert_eq!(gate.remembered(), 0, "nothing is kept of a client that has proved nothing");
    let retry = gate.retry_packet().to_vec();
    let [answer] = client.answer(&clock, &retry).try_into().expect("one datagram");
    assert!(gate.screen(&answer, clock.now()));
    let elsewhere = Arrival { source: SocketAddr::from(([192, 0, 2, 1], 4434)), ..arrival(Room::Busy) };
    assert_eq!(gate.check(&answer, elsewhere, clock.now()), Verdict::Unauthenticated);
    assert_eq!(
        (gate.ended_at(Step::RetryToken), gate.whys()),
        (1, vec![]),
        "whoever sees a token can send it"
    );
    let Verdict::Admit(admission) = gate.check(&answer, arrival(Room::Busy), clock.now()) else { panic!() };
    assert_eq!(admission.dcid[..], [7; 8]);
    assert_eq!(gate.remembered(), 2, "the token and the knock in it");
    assert_eq!(gate.check(&answer, arrival(Room::Busy), clock.now()), Verdict::Pass);
    assert_eq!(gate.check(&first, arrival(Room::Free), clock.now()), Verdict::Unauthenticated);
    assert_eq!(gate.ended_at(Step::Used), 1, "the knock is used up with the token");
}

#[test]
fn a_client_does_not_answer_a_retry_whose_tag_is_wrong() {
    let clock = start();
    let mut gate = gate(&clock);
    let mut client = Client::new(&clock, vec![7; 8], KeyExchange::X25519, false);
    let [first] = client.transmit(&clock).try_into().expect("one datagram");
    assert_eq!(gate.check(&first, arrival(Room::Busy), clock.now()), Verdict::Retry);
    let mut forged = gate.retry_packet().to_vec();
    *forged.last_mut().unwrap() ^= 1;
    assert!(client.answer(&clock, &forged).is_empty());
}

#[test]
fn a_knock_serves_once_whichever_token_it_comes_in() {
    let clock = start();
    let mut gate = gate(&clock);
    let mut client = Client::new(&clock, vec![7; 8], KeyExchange::X25519, false);
    let [first] = client.transmit(&clock).try_into().expect("one datagram");
    assert_eq!(gate.check(&first, arrival(Room::Busy), clock.now()), Verdict::Retry);
    let retry = gate.retry_packet().to_vec();
    let [answer] = client.answer(&clock, &retry).try_into().expect("one datagram");
    clock.advance(Duration::from_secs(1));
    assert!(is_admitted(gate.check(&first, arrival(Room::Free), clock.now())));
    assert_eq!(gate.check(&answer, arrival(Room::Free), clock.now()), Verdict::Unauthenticated);
    assert_eq!(gate.whys(), [Why::Repeated]);
}

#[test]
fn a_client_that_cannot_be_asked_for_its_address_is_asked_nothing() {
    // quinn-proto compares scopes, which no token of ours carries.
    let link_local = SocketAddrV6::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 4433, 0, 2);
    let clock = start();
    let mut gate = gate(&clock);
    let arrival = Arrival { source: link_local.into(), ..arrival(Room::Busy) };
    assert!(is_admitted(gate.check(&hello(&clock, 1), arrival, clock.now())));
    while gate.parts.budget.take(arrival.source.ip(), false, clock.now()) == Take::Granted {}
    assert_eq!(gate.check(&hello(&clock, 2), arrival, clock.now()), Verdict::Unauthenticated);
    assert_eq!((gate.ended_at(Step::Budget), gate.whys()), (1, vec![]));
}

#[test]
fn what_forged_sources_use_up_the_client_of_a_stream_does_not_miss() {
    // The form that a stream's source has: it can be asked for nothing.
    let stream = SocketAddrV6::new(Ipv4Addr::new(192, 0, 2, 9).to_ipv6_mapped(), 4433, 7, 0);
    let clock = start();
    let mut gate = gate(&clock);
    gate.exhaust_budget(clock.now());
    let arrival = Arrival { source: stream.into(), validated: true, ..arrival(Room::Free) };
    assert!(is_admitted(gate.check(&hello(&clock, 1), arrival, clock.now())));
    let forged = Arrival { validated: false, ..arrival };
    assert_eq!(gate.check(&hello(&clock, 2), forged, clock.now()), Verdict::Unauthenticated);
    assert_eq!(gate.ended_at(Step::Budget), 1);
}

#[test]
fn the_end_of_an_attempt_costs_nothing_and_is_not_answered() {
    let clock = start();
    let mut gate = gate(&clock);
    let left = |gate: &mut Gate| {
        let source = arrival(Room::Free).source.ip();
        (0..10_000).filter(|_| gate.parts.budget.take(source, false, clock.now()) == Take::Granted).count()
    };
    for (number, room) in (0..).zip([Room::Free, Room::Busy, Room::Full]) {
        let mut client = Client::new(&clock, vec![number; 8], KeyExchange::X25519, false);
        assert_eq!(client.transmit(&clock).len(), 1, "lost");
        client.connection.close(clock.now(), 3_u32.into(), bytes::Bytes::new());
        let [close] = client.transmit(&clock).try_into().expect("one datagram");
        for _ in 0..10 {
            assert_eq!(gate.check(&close, arrival(room), clock.now()), Verdict::Unauthenticated, "{room:?}");
        }
    }
    assert_eq!((gate.ended_at(Step::Abandoned), gate.whys()), (30, vec![]));
    assert_eq!(left(&mut gate), left(&mut self::gate(&clock)));
}

#[test]
fn unknown_keys_have_half_of_the_handshakes_and_known_ones_are_never_turned_away() {
    struct Admitting(Admits);
    impl Allowlist for Admitting {
        fn admits(&self, _agreement: &[u8; 32], _now: Instant) -> Admits {
            self.0
        }
    }
    let clock = start();
    let key = client_identity().public_key();
    for (admits, room, expected) in [
        (Admits::Anyone, Room::Free, None),
        (Admits::Anyone, Room::Busy, Some(Why::Busy)),
        (Admits::Anyone, Room::Full, Some(Why::Busy)),
        (Admits::Peer(PeerId(0)), Room::Busy, None),
        (Admits::Peer(PeerId(0)), Room::Full, None),
        (Admits::Nobody, Room::Free, Some(Why::Key(Some(key)))),
    ] {
        let mut gate = gate(&clock);
        gate.parts.allowlist = Arc::new(Admitting(admits));
        let mut client = Client::new(&clock, vec![7; 8], KeyExchange::X25519, false);
        let [mut datagram] = client.transmit(&clock).try_into().expect("one datagram");
        if room != Room::Free {
            assert_eq!(gate.check(&datagram, arrival(room), clock.now()), Verdict::Retry);
            let retry = gate.retry_packet().to_vec();
            [datagram] = client.answer(&clock, &retry).try_into().expect("one datagram");
        }
        let verdict = gate.check(&datagram, arrival(room), clock.now());
        assert_eq!(is_admitted(verdict), expected.is_none(), "{admits:?} {room:?}");
        assert_eq!(gate.whys(), Vec::from_iter(expected), "{admits:?} {room:?}");
    }
}

#[test]
fn the_window_is_exact_and_a_new_one_counts_at_once() {
    // Within one epoch, so that mac1 does not decide.
    let epoch = SECONDS.next_multiple_of(EPOCH_SECONDS);
    let clock = Arc::new(ManualClock::new(Duration::from_secs(epoch)));
    let mut gate = gate(&clock);
    let datagrams: Vec<Vec<u8>> = (0..5).map(|number| hello(&clock, number)).collect();
    clock.advance(Duration::from_secs(90));
    assert!(is_admitted(gate.check(&datagrams[0], arrival(Room::Free), clock.now())));
    clock.advance(Duration::from_secs(1));
    assert!(!is_admitted(gate.check(&datagrams[1], arrival(Room::Free), clock.now())));
    assert_eq!(gate.whys(), [Why::Clock { ahead: -91 }]);
    gate.set_window(Duration::from_secs(91));
    assert!(is_admitted(gate.check(&datagrams[2], arrival(Room::Free), clock.now())));
    clock.advance(Duration::from_secs(EPOCH_SECONDS - 91));
    assert!(!is_admitted(gate.check(&datagrams[3], arrival(Room::Free), clock.now())));
    assert_eq!(gate.ended_at(Step::Clock), 2);
    gate.set_window(Duration::ZERO);
    assert!(!is_admitted(gate.check(&datagrams[4], arrival(Room::Free), clock.now())));
    assert_eq!(gate.ended_at(Step::Mac), 1, "of an epoch before all that the window reaches");
}

#[test]
fn a_process_that_knows_nothing_of_its_predecessor_refuses_older_knocks() {
    let clock = start();
    let mut gate = gate(&clock);
    gate.parts.table =
        SingleUse::restore(Box::<MemoryReplayLog>::default(), 1, Vec::new(), SECONDS, clock.now(), SECONDS);
    assert!(!is_admitted(gate.check(&hello(&clock, 1), arrival(Room::Free), clock.now())));
    assert_eq!((gate.ended_at(Step::Clock), gate.whys()), (1, vec![Why::BeforeStart]));
    clock.advance(Duration::from_secs(1));
    assert!(is_admitted(gate.check(&hello(&clock, 2), arrival(Room::Free), clock.now())));
}

#[test]
fn a_used_knock_is_forgotten_when_no_window_could_make_it_good_again() {
    let clock = start();
    let mut gate = gate(&clock);
    assert!(is_admitted(gate.check(&hello(&clock, 1), arrival(Room::Free), clock.now())));
    // To the end of the last epoch that the window reaches, and ten minutes more.
    let end = ((SECONDS + 90) / EPOCH_SECONDS + 1) * EPOCH_SECONDS + 600;
    clock.advance(Duration::from_secs(end - SECONDS));
    gate.expire(clock.now());
    assert_eq!(gate.remembered(), 1);
    clock.advance(Duration::from_secs(1));
    gate.expire(clock.now());
    assert_eq!(gate.remembered(), 0);
}

#[test]
fn what_was_refused_is_refused_again_at_no_charge() {
    let clock = start();
    let mut gate = gate(&clock);
    gate.set_window(Duration::ZERO);
    let datagram = hello(&clock, 1);
    clock.advance(Duration::from_secs(1));
    let left = |gate: &mut Gate| {
        let source = arrival(Room::Free).source.ip();
        (0..10_000).filter(|_| gate.parts.budget.take(source, false, clock.now()) == Take::Granted).count()
    };
    for _ in 0..10 {
        assert_eq!(gate.check(&datagram, arrival(Room::Free), clock.now()), Verdict::Unauthenticated);
    }
    assert_eq!(gate.parts.refusals.latest()[0].1, 1, "opened once");
    assert_eq!(left(&mut gate), left(&mut self::gate(&clock)) - 1);
}

#[test]
fn a_replay_log_that_fails_is_reported_once() {
    struct Full;
    impl ReplayLog for Full {
        fn append(&mut self, _record: Record) -> std::io::Result<()> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn rewrite(&mut self, _records: &mut dyn Iterator<Item = Record>) -> std::io::Result<()> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn distrust(&mut self) {}
    }
    let clock = start();
    let mut gate = gate(&clock);
    gate.parts.table = SingleUse::new(Box::new(Full), 1, clock.now(), 0);
    assert!(gate.take_replay_log_error().is_none());
    assert!(is_admitted(gate.check(&hello(&clock, 1), arrival(Room::Free), clock.now())));
    let error = gate.take_replay_log_error().map(|error| error.kind());
    assert_eq!(error, Some(std::io::ErrorKind::StorageFull));
    assert!(gate.take_replay_log_error().is_none());
}

#[test]
fn the_parts_of_a_hello_do_not_wait_for_ever() {
    let clock = start();
    let mut gate = gate(&clock);
    for number in 1..=3 {
        let [first, _] = two_datagrams(&clock, number);
        assert_eq!(gate.check(&first, arrival(Room::Free), clock.now()), Verdict::Taken);
    }
    assert_eq!(gate.partials(), 3);
    clock.advance(Duration::from_secs(3));
    gate.expire(clock.now());
    assert_eq!((gate.partials(), gate.stats.partials_expired), (0, 3));
}

#[test]
fn a_first_packet_may_go_to_a_connection_id_of_any_length_that_quic_allows() {
    let clock = Arc::new(ManualClock::new(Duration::from_secs(SECONDS)));
    let source = SocketAddr::from(([192, 0, 2, 1], 4433));
    let arrival = Arrival { source, validated: false, listening: true, room: Room::Free };
    for length in [0, 7, 8, 9, 20] {
        let (mut gate, dcid) = (gate(&clock), vec![0xd0; length]);
        let flight = first_flight(&clock, dcid.clone(), KeyExchange::X25519, false);
        assert_eq!(flight.len(), 1);
        let verdict = gate.check(&flight[0], arrival, clock.now());
        if length < 8 {
            assert_eq!(verdict, Verdict::Unauthenticated, "{length}");
            assert_eq!(gate.stats.ended[Step::Knock], 1, "{length}");
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
    let arrival = Arrival { source, validated: false, listening: true, room: Room::Free };
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
            other @ (Verdict::Pass | Verdict::Named | Verdict::Retry | Verdict::Taken) => panic!("{other:?}"),
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

//! ClientHellos in two datagrams before the gate: in every order, from everywhere, and never more than their share.

use std::{cell::Cell, sync::Arc};

use base::clock::{Clock as _, ManualClock};
use proptest::prelude::*;
use quinn_proto::ConnectionId;

use super::*;
use crate::{
    Arrival, Gate, OwnKey, Step, Verdict,
    admission::Room,
    budget::PEER_PACE,
    gate_tests::{first_flight, gate},
    knock::{EPOCH_SECONDS, MAC_BYTES},
    properties::two_datagrams,
    refusals::Why,
    testing::SECONDS,
    tls::KeyExchange,
};

/// A gate, its clock, and counts of what it was asked for.
struct Scene {
    clock: Arc<ManualClock>,
    gate: Gate,
    flights: Cell<u8>,
}

impl Scene {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::new(Duration::from_secs(SECONDS)));
        let gate = gate(&clock);
        Self { clock, gate, flights: Cell::new(0) }
    }

    /// The two datagrams of another attempt.
    fn flight(&self) -> [Vec<u8>; 2] {
        self.flights.set(self.flights.get() + 1);
        let dcid = vec![0xd0, 0, 0, 0, 0, 0, 0, self.flights.get()];
        first_flight(&self.clock, dcid, KeyExchange::Hybrid, false).try_into().expect("two datagrams")
    }

    fn check(&mut self, datagram: &[u8]) -> Verdict {
        self.check_from(1, datagram)
    }

    fn check_from(&mut self, host: u8, datagram: &[u8]) -> Verdict {
        let source = SocketAddr::from(([192, 0, 2, host], 4433));
        let arrival = Arrival { source, validated: false, listening: true, room: Room::Free };
        self.gate.check(datagram, arrival, self.clock.now())
    }

    fn ended(&self, step: Step) -> u64 {
        self.gate.stats.ended[step]
    }
}

fn is_admitted(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Admit(_))
}

#[test]
fn both_orders_lead_in_once_and_hand_over_what_came_first() {
    for order in [[0, 1], [1, 0]] {
        let mut scene = Scene::new();
        let flight = scene.flight();
        let [one, other] = order.map(|index| flight[index].clone());
        assert_eq!(scene.check(&one), Verdict::Taken);
        assert_eq!((scene.gate.partials(), scene.gate.remembered()), (1, 1));
        let Verdict::Admit(admission) = scene.check(&other) else { panic!("{order:?}") };
        assert_eq!(admission.dcid, ConnectionId::new(&[0xd0, 0, 0, 0, 0, 0, 0, 1]));
        assert_eq!(scene.gate.take_earlier(), [one.clone().into_boxed_slice()]);
        assert_eq!((scene.gate.partials(), scene.gate.remembered()), (0, 1));
        // While the handshake lasts, repetitions are quinn-proto's.
        assert_eq!([scene.check(&one), scene.check(&other)], [Verdict::Pass; 2]);
        scene.gate.handshake_ended(&admission);
        assert_eq!([scene.check(&one), scene.check(&other)], [Verdict::Unauthenticated; 2]);
        assert_eq!(scene.ended(Step::Used), 2);
    }
}

#[test]
fn a_lost_half_may_be_repeated_until_three_seconds_are_over() {
    for (after, admitted) in [(2_999, true), (3_000, false)] {
        let mut scene = Scene::new();
        let [first, second] = scene.flight();
        assert_eq!(scene.check(&first), Verdict::Taken);
        scene.clock.advance(Duration::from_millis(1_000));
        assert_eq!(scene.check(&first), Verdict::Taken, "the client repeats it");
        scene.clock.advance(Duration::from_millis(after - 1_000));
        scene.gate.expire(scene.clock.now());
        assert_eq!(is_admitted(scene.check(&second)), admitted, "{after} ms");
        assert_eq!(scene.gate.stats.partials_expired, u64::from(!admitted));
        if !admitted {
            // Its knock stays used: neither half leads anywhere again.
            assert_eq!([scene.check(&first), scene.check(&second)], [Verdict::Unauthenticated; 2]);
            assert_eq!(scene.gate.partials(), 0);
        }
    }
}

#[test]
fn a_half_from_another_address_is_a_strangers() {
    let mut scene = Scene::new();
    let [first, second] = scene.flight();
    assert_eq!(scene.check(&first), Verdict::Taken);
    assert_eq!(scene.check_from(2, &second), Verdict::Unauthenticated);
    assert_eq!(scene.check_from(2, &first), Verdict::Unauthenticated);
    assert_eq!(scene.ended(Step::Used), 2);
    assert!(is_admitted(scene.check(&second)), "and the client does not notice");
}

#[test]
fn halves_of_two_hellos_make_none() {
    let mut scene = Scene::new();
    // Of one length: those of real clients are not.
    let [ours, other] = [1, 2].map(|number| two_datagrams(&scene.clock, number));
    assert_eq!(scene.check(&ours[0]), Verdict::Taken);
    assert_eq!(scene.check(&other[1]), Verdict::Taken, "two attempts, each with a half");
    assert_eq!(scene.gate.partials(), 2);

    // The other attempt's second half under our token: whoever saw both can seal it.
    let forged = under_token_of(&ours[1], &other[1]);
    assert_eq!(scene.check(&forged), Verdict::Unauthenticated);
    assert_eq!(scene.ended(Step::Hello), 1);
    // To another destination it would be another connection.
    let mut elsewhere = ours[1].clone();
    elsewhere[6] ^= 1;
    assert_eq!(scene.check(&elsewhere), Verdict::Unauthenticated);
    assert_eq!(scene.ended(Step::Hello), 2);
    assert!(is_admitted(scene.check(&ours[1])));
    assert!(is_admitted(scene.check(&other[0])));
}

/// A packet with the header of `header`, token included, and the CRYPTO data of `content`.
fn under_token_of(header: &[u8], content: &[u8]) -> Vec<u8> {
    use bytes::BytesMut;
    let crypto = crate::testing::server_tls();
    let parts = |datagram: &[u8]| {
        let Class::Initial(initial) = classify(datagram) else { panic!("no Initial") };
        (ConnectionId::new(initial.dcid), initial.packet_number_at)
    };
    let open = |datagram: &[u8]| {
        let (dcid, at) = parts(datagram);
        let keys = crypto.initial_keys(1, &dcid).unwrap();
        let mut packet = BytesMut::from(datagram);
        keys.header.remote.decrypt(at, &mut packet);
        let number_bytes = usize::from(packet[0] & 3) + 1;
        let header = packet.split_to(at + number_bytes);
        let number = header[at..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        keys.packet.remote.decrypt(number, &header, &mut packet).unwrap();
        (header, packet, number)
    };
    let ((mut packet, _, number), (_, payload, _)) = (open(header), open(content));
    let (dcid, at) = parts(header);
    let header_bytes = packet.len();
    let room = header.len() - header_bytes - 16;
    packet.extend_from_slice(&payload[..room.min(payload.len())]);
    packet.resize(header.len(), 0);
    let keys = crypto.initial_keys(1, &dcid).unwrap();
    keys.packet.remote.encrypt(number, &mut packet, header_bytes);
    keys.header.remote.encrypt(at, &mut packet);
    packet.to_vec()
}

#[test]
fn a_proof_costs_one_unit_and_gets_one_retry() {
    let mut scene = Scene::new();
    let now = scene.clock.now();
    let budget = |scene: &mut Scene| {
        let mut left = 0;
        let source = std::net::IpAddr::from([192, 0, 2, 1]);
        while scene.gate.parts.budget.take(source, false, now) == crate::budget::Take::Granted {
            left += 1;
        }
        left
    };
    let whole = budget(&mut Scene::new());
    // A known peer has a share of its own: so one attempt more than it holds shows the price.
    for _ in 0..=PEER_PACE.at_once {
        let [first, second] = scene.flight();
        assert_eq!(scene.check(&first), Verdict::Taken);
        assert!(is_admitted(scene.check(&second)));
    }
    assert_eq!(budget(&mut scene), whole - 1);

    let [first, second] = scene.flight();
    assert_eq!(scene.check(&first), Verdict::Retry);
    assert_eq!(scene.check(&second), Verdict::Taken);
    assert_eq!((scene.ended(Step::Retry), scene.gate.partials()), (1, 0));
    // An unanswered client repeats both: it is asked again, once.
    scene.clock.advance(Duration::from_secs(1));
    scene.gate.exhaust_budget(scene.clock.now());
    assert_eq!([scene.check(&second), scene.check(&first)], [Verdict::Retry, Verdict::Taken]);
}

#[test]
fn what_is_refused_is_refused_in_both_halves_at_the_price_of_one() {
    let mut scene = Scene::new();
    let [first, second] = scene.flight();
    // The clocks differ by more than the window, and by less than mac1 holds.
    let to_next_epoch = EPOCH_SECONDS - SECONDS % EPOCH_SECONDS;
    scene.clock.advance(Duration::from_secs(100.min(to_next_epoch + 80)));
    assert_eq!([scene.check(&first), scene.check(&second)], [Verdict::Unauthenticated; 2]);
    assert_eq!(scene.ended(Step::Clock), 2);
    assert_eq!(scene.gate.parts.refusals.latest().len(), 1);
    assert_eq!(scene.gate.parts.refusals.latest()[0].1, 1, "opened once");
    assert_eq!((scene.gate.partials(), scene.gate.remembered()), (0, 0));
}

#[test]
fn a_fallback_is_refused_where_both_ends_can_do_better() {
    for (allowed, admitted) in
        [(KeyExchange::Hybrid, false), (KeyExchange::HybridRequired, false), (KeyExchange::X25519, true)]
    {
        let mut scene = Scene::new();
        scene.gate.set_key_exchange(allowed);
        let flight = first_flight(&scene.clock, vec![7; 8], KeyExchange::X25519, true);
        assert_eq!(is_admitted(scene.check(&flight[0])), admitted, "{allowed:?}");
        if !admitted {
            assert_eq!(scene.ended(Step::KeyExchange), 1);
            assert_eq!(scene.gate.parts.refusals.latest(), [], "one alone says nothing");
        }
    }
}

#[test]
fn x25519_alone_is_refused_where_the_hybrid_is_required() {
    for (allowed, admitted) in
        [(KeyExchange::Hybrid, true), (KeyExchange::HybridRequired, false), (KeyExchange::X25519, true)]
    {
        let mut scene = Scene::new();
        scene.gate.set_key_exchange(allowed);
        let flight = first_flight(&scene.clock, vec![7; 8], KeyExchange::X25519, false);
        assert_eq!(is_admitted(scene.check(&flight[0])), admitted, "{allowed:?}");
        if !admitted {
            assert_eq!(scene.gate.parts.refusals.latest()[0].0.why, Why::OnlyX25519);
        }
    }
}

#[test]
fn a_key_has_eight_and_the_oldest_gives_way() {
    let mut scene = Scene::new();
    let flights: Vec<_> = (0..=MOST_PER_KEY).map(|_| scene.flight()).collect();
    for [first, _] in &flights {
        scene.clock.advance(Duration::from_millis(100));
        assert_eq!(scene.check(first), Verdict::Taken);
    }
    assert_eq!(scene.gate.partials(), MOST_PER_KEY);
    assert_eq!(scene.check(&flights[0][1]), Verdict::Unauthenticated, "its knock stays used");
    assert!(flights[1..].iter().all(|[_, second]| is_admitted(scene.check(second))));
}

#[test]
fn room_is_bounded_and_half_of_it_is_for_known_keys() {
    let mut partials = Partials::new(255);
    let now = ManualClock::default().now();
    let partial = |number: u8| {
        let admission = Admission {
            own: OwnKey::Current,
            dcid: ConnectionId::new(&[number; 8]),
            tag: [number; MAC_BYTES],
            agreement: [number; 32],
            known: true,
        };
        Partial::new(admission, [0; HELLO_HASH_BYTES], now, &[0; 1200]).unwrap()
    };
    for number in 0..16 {
        assert_eq!(partials.has_room(false), number < 8);
        assert!(partials.has_room(true));
        assert_eq!(partials.insert(partial(number)), None);
    }
    assert!(!partials.has_room(true));
    let admission = partial(0).admission;
    let long = vec![0; MOST_DATAGRAM_BYTES + 1];
    assert!(Partial::new(admission, [0; HELLO_HASH_BYTES], now, &long).is_none());
    let gone: Vec<_> = std::iter::from_fn(|| partials.expire(now + PATIENCE)).collect();
    assert_eq!(gone, (0..16).map(|number| [number; MAC_BYTES]).collect::<Vec<_>>());
    assert!(partials.queue.is_empty() && partials.len() == 0);
}

/// A ClientHello in datagrams of its own making: how each continues it, without a gate.
struct Pieces {
    crypto: Arc<dyn crypto::ServerConfig>,
    hello: Vec<u8>,
}

impl Pieces {
    fn new() -> Self {
        let hello = [1, 0, 0, 100].into_iter().chain(0..100).collect();
        Self { crypto: crate::testing::server_tls(), hello }
    }

    /// The Initial packet to `dcid` with this part of the ClientHello.
    fn datagram(&self, dcid: [u8; 8], part: std::ops::Range<usize>) -> Vec<u8> {
        let two_bytes = |value: usize| (value as u16 | 0x4000).to_be_bytes();
        let frame = [&[6][..], &two_bytes(part.start), &two_bytes(part.len()), &self.hello[part]].concat();
        crate::properties::initial_packet(&*self.crypto, &dcid, 0, &frame)
    }

    fn begin(&self, first: &[u8]) -> Partial {
        let admission = Admission {
            dcid: ConnectionId::new(&[7; 8]),
            tag: [0; MAC_BYTES],
            agreement: [0; 32],
            own: OwnKey::Current,
            known: true,
        };
        Partial::new(admission, hello_hash(&self.hello), ManualClock::default().now(), first).unwrap()
    }
}

#[test]
fn three_datagrams_make_a_hello_and_four_do_not() {
    let pieces = Pieces::new();
    let [one, two, three] = [0..20, 20..30, 30..104].map(|part| pieces.datagram([7; 8], part));
    let mut partial = pieces.begin(&one);
    assert_eq!(partial.add(&*pieces.crypto, &two), Progress::Waiting);
    assert_eq!(partial.add(&*pieces.crypto, &two), Progress::Waiting, "repeated");
    assert_eq!(partial.add(&*pieces.crypto, &three), Progress::Whole);
    assert_eq!(partial.datagrams, [one.clone().into_boxed_slice(), two.clone().into_boxed_slice()]);

    let [three, four] = [30..50, 50..104].map(|part| pieces.datagram([7; 8], part));
    let mut partial = pieces.begin(&one);
    for datagram in [two, three, four] {
        assert_eq!(partial.add(&*pieces.crypto, &datagram), Progress::Waiting);
    }
    assert_eq!(partial.datagrams.len(), MOST_DATAGRAMS - 1);
}

#[test]
fn a_datagram_that_is_too_long_is_not_kept() {
    let pieces = Pieces::new();
    for (length, kept) in [(MOST_DATAGRAM_BYTES, true), (MOST_DATAGRAM_BYTES + 1, false)] {
        let mut partial = pieces.begin(&pieces.datagram([7; 8], 0..20));
        // What follows its Initial packet is not looked at.
        let mut second = pieces.datagram([7; 8], 20..30);
        second.resize(length, 0);
        assert_eq!(partial.add(&*pieces.crypto, &second), Progress::Waiting);
        let progress = partial.add(&*pieces.crypto, &pieces.datagram([7; 8], 30..104));
        assert_eq!(progress, if kept { Progress::Whole } else { Progress::Waiting }, "{length}");
    }
}

#[test]
fn the_rest_of_a_hello_to_another_destination_is_no_part_of_it() {
    let pieces = Pieces::new();
    let mut partial = pieces.begin(&pieces.datagram([7; 8], 0..50));
    let elsewhere = pieces.datagram([8; 8], 50..104);
    assert_eq!(partial.add(&*pieces.crypto, &elsewhere), Progress::Bad(HelloError::Malformed));
    assert_eq!(partial.add(&*pieces.crypto, &[0; 1200]), Progress::Bad(HelloError::Malformed));
    assert_eq!(partial.add(&*pieces.crypto, &pieces.datagram([7; 8], 50..104)), Progress::Whole);
}

#[test]
fn garbage_under_a_token_costs_a_bounded_number_of_tries() {
    let mut scene = Scene::new();
    let [first, second] = scene.flight();
    assert_eq!(scene.check(&first), Verdict::Taken);
    let mut garbage = second.clone();
    *garbage.last_mut().unwrap() ^= 1;
    for _ in 0..MOST_TRIES {
        assert_eq!(scene.check(&garbage), Verdict::Unauthenticated);
    }
    assert_eq!(scene.check(&garbage), Verdict::Taken, "not looked at");
    assert_eq!(scene.check(&second), Verdict::Taken, "this attempt is lost; the client begins another one");
    scene.clock.advance(PATIENCE);
    scene.gate.expire(scene.clock.now());
    assert_eq!(scene.gate.partials(), 0);
}

#[test]
fn a_decision_holds_for_half_a_second_for_one_proof_from_one_source() {
    let clock = ManualClock::default();
    let mut decided = Decided::new();
    let source = |port| SocketAddr::from(([192, 0, 2, 1], port));
    let (tag, same_place) = ([7; MAC_BYTES], [&[7][..], &[8; MAC_BYTES - 1]].concat().try_into().unwrap());
    decided.insert(tag, source(1), "refused", clock.now());
    assert_eq!(decided.get(&tag, source(1), clock.now()), Some("refused"));
    assert_eq!(decided.get(&tag, source(2), clock.now()), None);
    assert_eq!(decided.get(&same_place, source(1), clock.now()), None);
    clock.advance(MOMENT - Duration::from_nanos(1));
    assert_eq!(decided.get(&tag, source(1), clock.now()), Some("refused"));
    clock.advance(Duration::from_nanos(1));
    assert_eq!(decided.get(&tag, source(1), clock.now()), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_schedule_admits_each_hello_once(script in prop::collection::vec(any::<u8>(), 0..120)) {
        crate::properties::gate_parts(&script);
    }

    /// The same where nothing is damaged and little time passes.
    #[test]
    fn any_quick_schedule_admits_each_hello_once(
        script in prop::collection::vec((0_u8..16, 0_u8..20), 0..40),
    ) {
        let script: Vec<u8> = script.into_iter().flat_map(|(what, wait)| [what, wait, 0]).collect();
        crate::properties::gate_parts(&script);
    }
}

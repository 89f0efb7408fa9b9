//! Tests of the sender's end of a stream, in virtual time.

use base::clock::{Clock as _, ManualClock};
use wire::repair_terms::Deadline;

use super::*;

#[test]
fn the_shortest_round_trip_is_that_of_the_last_minutes() {
    let clock = ManualClock::default();
    let mut shortest = Shortest::new(clock.now());
    let mut sample = |rtt_ms, seconds| {
        clock.advance(Duration::from_secs(seconds));
        shortest.sample(Duration::from_millis(rtt_ms), clock.now()).as_millis()
    };
    assert_eq!([sample(40, 1), sample(90, 30), sample(90, 30), sample(90, 30)], [40; 4]);
    assert_eq!([sample(90, 29), sample(90, 60)], [40, 90]);
}

#[test]
fn payloads_get_numbers_until_the_path_is_known_and_while_it_loses_some() {
    let (clock, memory) = (ManualClock::default(), Arc::default());
    let terms = Terms { mode: Mode::Retransmit, ..Terms::OFF };
    let mut sender = Sender::new(StreamNumber(3), terms, &memory).expect("there is no limit");
    let mut counts = PathCounts { rtt: Duration::from_millis(40), ..PathCounts::default() };
    let mut run = |sender: &mut Sender, lost| {
        clock.advance(Duration::from_millis(100));
        (counts.acked, counts.lost, counts.runs) =
            (counts.acked + 1_000 - lost, counts.lost + lost, counts.runs + lost);
        sender.begin(&terms, 10, || Some(counts), clock.now())
    };
    assert!((0..2).all(|_| run(&mut sender, 0)), "nothing is known of the path");
    assert!((0..20).any(|_| !run(&mut sender, 0)), "it has carried 2,000 packets");
    assert!(run(&mut sender, 1) && (0..50).all(|_| run(&mut sender, 1)), "it loses some");
    let mut frame = [12, 3, 0, 0, 0, 0, 0, 0, 2, 2, 0x68];
    for (number, distance) in [(0, 0), (1, 1), (2, 1)] {
        sender.number(&mut frame, 7, clock.now());
        assert_eq!(frame, [12, 3, 0, 0, 0, number, 0, distance, 2, 2, 0x68]);
    }
    sender.number(&mut frame, 8, clock.now());
    assert_eq!(frame[2..8], [0, 0, 0, 3, 0, 0], "the first of its flow");
    let mut answers = Vec::new();
    let ask = Ask { first: 1, count: 2, attempt: 0, last: false };
    sender.answer(&ask, |header, frame| answers.push([header, frame].concat()));
    assert_eq!(answers[0], [12, 3, 0, 0, 0, 1, 0, 1, 2, 2, 0x68]);
    assert!((0..200).any(|_| !run(&mut sender, 0)), "and none any more when nothing is lost");
    clock.advance(Duration::from_secs(4));
    assert!(run(&mut sender, 0), "again after a pause");
    assert!((0..20).any(|_| !run(&mut sender, 0)));
}

#[test]
fn the_first_answers_need_no_credit_and_those_without_a_use_get_none() {
    // 64 KiB, and 30 % of 100 payloads.
    for (mode, answered) in [(Mode::Auto, 96), (Mode::Retransmit, 96), (Mode::Fec, 0)] {
        let (clock, terms) = (ManualClock::default(), Terms { mode, ..Terms::OFF });
        let mut sender = Sender::new(StreamNumber(3), terms, &Arc::default()).expect("there is no limit");
        assert_eq!(sender.begin(&terms, 100, || None, clock.now()), mode != Mode::Fec);
        let mut frame = vec![0; 8 + 1_000];
        (0..100).for_each(|_| sender.number(&mut frame, 7, clock.now()));
        let mut answers = 0;
        sender.answer(&Ask { first: 0, count: 100, attempt: 0, last: false }, |_, _| answers += 1);
        assert_eq!(answers, answered, "{mode:?}");
    }
}

/// A stream that is held in order, on a path with a round trip of 40 ms.
struct Held {
    clock: ManualClock,
    terms: Terms,
    sender: Sender,
    counts: PathCounts,
}

impl Held {
    fn new() -> Self {
        let terms = Terms { mode: Mode::Auto, order: Order::Hold, ..Terms::OFF };
        let mut sender = Sender::new(StreamNumber(0), terms, &Arc::default()).expect("there is no limit");
        sender.on_lane = true;
        let counts = PathCounts { rtt: Duration::from_millis(40), ..PathCounts::default() };
        Self { clock: ManualClock::default(), terms, sender, counts }
    }

    /// Ten payloads while the path carries this number of packets and loses some of them; whether they get numbers.
    fn run(&mut self, packets: u64, lost: u64) -> bool {
        self.clock.advance(Duration::from_millis(100));
        self.counts.acked += packets - lost;
        (self.counts.lost, self.counts.runs) = (self.counts.lost + lost, self.counts.runs + lost);
        self.sender.begin(&self.terms, 10, || Some(self.counts), self.clock.now())
    }

    /// Numbers this IP packet; returns the distance.
    fn number(&mut self, packet: &[u8]) -> u16 {
        let mut frame = [&[12, 0, 0, 0, 0, 0, 0, 0, 0], packet].concat();
        self.sender.number(&mut frame, 7, self.clock.now());
        u16::from_be_bytes([frame[6], frame[7]])
    }
}

/// An IPv4 packet with a TCP header that has these flags, and this payload.
fn segment(flags: u8, payload: usize) -> Vec<u8> {
    let mut packet = vec![0; 40 + payload];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(40 + payload as u16).to_be_bytes());
    (packet[9], packet[32], packet[33]) = (TCP, 5 << 4, flags);
    packet
}

#[test]
fn held_payloads_have_numbers_until_the_path_is_known_to_be_clean() {
    let mut held = Held::new();
    assert!(held.run(0, 0), "the first ones have numbers");
    assert!((0..30).all(|_| held.run(200, 0)));
    assert!((0..500).any(|_| !held.run(200, 0)), "and later ones none");
    assert!(held.run(200, 1) || held.run(200, 0), "until something is lost");
    assert!((0..50).all(|_| held.run(200, 0)));
}

#[test]
fn held_payloads_keep_their_numbers_on_a_path_that_changes_the_order() {
    let mut held = Held::new();
    held.counts.reordered = 1;
    assert!((0..1_000).all(|_| held.run(200, 0)));
}

#[test]
fn held_payloads_have_numbers_whatever_repairs_them_and_before_anything_is_known_of_the_path() {
    let modes = [Mode::Off, Mode::Retransmit, Mode::Fec, Mode::Auto];
    for (mode, on_lane) in modes.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut held = Held::new();
        held.terms.mode = mode;
        held.sender.on_lane = on_lane;
        let first = held.sender.begin(&held.terms, 10, || None, held.clock.now());
        assert_eq!(first, mode != Mode::Off, "{mode:?}");
        // The path is looked at every 100 ms, and not often enough for a short deadline.
        held.terms.deadline = Deadline::Fixed(Duration::from_millis(5));
        for _ in 0..90 {
            assert_eq!(held.run(200, 0), mode != Mode::Off, "{mode:?}, {on_lane}");
            held.clock.advance(Duration::from_millis(95));
            let counts = held.counts;
            let again = held.sender.begin(&held.terms, 10, || Some(counts), held.clock.now());
            assert_eq!(again, mode != Mode::Off, "{mode:?}, {on_lane}");
        }
        assert!((0..500).any(|_| !held.run(200, 0)), "none on a clean path");
    }
}

#[test]
fn after_a_silence_the_last_payload_is_repeated_on_a_path_that_loses_some() {
    let mut held = Held::new();
    held.run(0, 0);
    held.number(&segment(0, 100));
    let repeated = |held: &mut Held, milliseconds| {
        held.clock.advance(Duration::from_millis(milliseconds));
        let mut frames = Vec::new();
        held.sender.repeat(held.clock.now(), |header, frame| frames.push([header, frame].concat()));
        frames
    };
    assert_eq!(repeated(&mut held, 50), Vec::<Vec<u8>>::new(), "nothing was lost yet");
    (0..20).for_each(|_| _ = held.run(100, 2));
    held.number(&segment(0, 100));
    assert_eq!(held.sender.next_repeat(), Some(held.clock.now() + Duration::from_millis(10)));
    assert_eq!(repeated(&mut held, 9), Vec::<Vec<u8>>::new());
    let frames = repeated(&mut held, 1);
    let expected = [&[12, 0, 0, 0, 0, 1, 0, 1, 0], &*segment(0, 100)].concat();
    assert_eq!(frames, [expected]);
    assert_eq!(repeated(&mut held, 10), Vec::<Vec<u8>>::new(), "once");
}

#[test]
fn acknowledgements_wait_for_nothing_and_nothing_waits_for_them() {
    const ACK: u8 = 0x10;
    const SYN: u8 = 0x02;
    let mut held = Held::new();
    held.run(0, 0);
    let packets = [segment(ACK, 9), segment(ACK, 0), segment(ACK, 0), segment(ACK, 9), segment(ACK | SYN, 0)];
    assert_eq!(packets.map(|packet| held.number(&packet)), [0, 0, 0, 3, 1]);
}

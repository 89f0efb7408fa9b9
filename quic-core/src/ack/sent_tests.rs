use std::ops::RangeInclusive;

use super::*;
use crate::{
    frame::{Frame, Frames, ack},
    mtu::Fate as MtuFate,
};

pub(super) const BYTES: u16 = 1200;

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs some instant to start from; only differences matter"
)]
fn start() -> Instant {
    Instant::now()
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A window, its RTT, and a clock.
pub(super) struct Sender {
    pub(super) window: SentWindow,
    pub(super) rtt: Rtt,
    pub(super) now: Instant,
}

impl Sender {
    pub(super) fn new() -> Self {
        Self { window: SentWindow::new(), rtt: Rtt::new(Some(ms(100))), now: start() }
    }

    pub(super) fn send(&mut self, packets: u64) {
        for _ in 0..packets {
            self.window.record(self.window.next, BYTES, true, self.now);
        }
    }

    pub(super) fn ack(&mut self, ranges: &[RangeInclusive<u64>]) -> AckOutcome {
        let mut buf = [0; 1200];
        let len = ack::write(&mut buf, ranges.iter().cloned(), Duration::ZERO).unwrap();
        let Some(Ok(Frame::Ack(ack))) = Frames::new(&buf[..len]).next() else { panic!("an ACK was written") };
        self.window.on_ack(&ack, self.now, &mut self.rtt, None)
    }
}

pub(super) fn packets(packets: u64) -> Volume {
    Volume { packets, bytes: packets * u64::from(BYTES) }
}

#[test]
fn an_ack_in_order_settles_all() {
    let mut sender = Sender::new();
    sender.send(10);
    assert_eq!(sender.window.in_flight, packets(10));
    sender.now += ms(40);
    assert_eq!(sender.ack(&[0..=9]), AckOutcome { acked: packets(10), ..AckOutcome::default() });
    assert_eq!(sender.window.in_flight, packets(0));
    assert_eq!((sender.rtt.latest(), sender.window.oldest), (Some(ms(40)), 10));
    assert_eq!((sender.window.loss_time, sender.window.probe_time(&sender.rtt)), (None, None));
    assert_eq!(sender.ack(&[0..=9]), AckOutcome::default(), "old news");
}

#[test]
fn the_delivery_rate_is_what_each_round_trip_got_through() {
    let mut sender = Sender::new();
    assert_eq!(sender.window.delivery_rate(), None);
    // 10 packets in the first round trip of 40 ms, from their sending on.
    sender.send(10);
    sender.now += ms(20);
    sender.send(20);
    sender.now += ms(20);
    sender.ack(&[0..=9]);
    assert_eq!(sender.window.delivery_rate(), Some(10 * 1200 * 1000 / 40));
    // 20 packets and 5 more until the first of those that were sent after that ACK is acknowledged.
    sender.send(5);
    sender.now += ms(20);
    sender.ack(&[0..=29]);
    assert_eq!(sender.window.delivery_rate(), Some(10 * 1200 * 1000 / 40), "the round is not over");
    sender.now += ms(20);
    sender.ack(&[0..=34]);
    assert_eq!(sender.window.delivery_rate(), Some(25 * 1200 * 1000 / 40));
    // An hour of silence belongs to no round.
    sender.now += ms(3_600_000);
    sender.send(4);
    sender.now += ms(40);
    sender.ack(&[0..=38]);
    assert_eq!(sender.window.delivery_rate(), Some(4 * 1200 * 1000 / 40));
}

#[test]
fn loss_by_count_then_by_time_and_the_late_ack() {
    let mut sender = Sender::new();
    sender.send(10);
    sender.now += ms(40);
    // 0 to 6 are three or more below 9; 7 and 8 are not.
    let outcome = sender.ack(&[9..=9]);
    assert_eq!(outcome, AckOutcome { acked: packets(1), lost: packets(7), ..AckOutcome::default() });
    assert_eq!(sender.window.loss_time, Some(sender.now + ms(5)), "9/8 of 40 ms after sending");
    assert_eq!(sender.window.probe_time(&sender.rtt), None, "time loss comes first");

    sender.now += ms(5);
    assert_eq!(sender.window.detect_losses(sender.now, &sender.rtt, None), packets(2));
    assert_eq!((sender.window.loss_time, sender.window.in_flight), (None, packets(0)));

    let outcome = sender.ack(&[9..=9, 3..=7]);
    assert_eq!(outcome, AckOutcome { acked: packets(5), lost: packets(0), spuriously_lost: 5, reordered: 5 });
    assert_eq!(sender.ack(&[9..=9, 3..=7]), AckOutcome::default(), "old news");
}

#[test]
fn what_is_acknowledged_after_later_packets_has_changed_its_place() {
    let mut sender = Sender::new();
    sender.send(3);
    sender.now += ms(40);
    assert_eq!(sender.ack(&[2..=2]).reordered, 0, "the others may be lost");
    assert_eq!(sender.ack(&[1..=2]).reordered, 1);
    sender.send(2);
    sender.now += ms(40);
    assert_eq!(sender.ack(&[4..=4]).lost, packets(1));
    assert_eq!(sender.ack(&[0..=4]).reordered, 2, "one that had been declared lost is among them");
}

#[test]
fn once_a_loss_was_spurious_packets_are_lost_by_time_and_a_window_alone() {
    let mut sender = Sender::new();
    sender.send(10);
    sender.now += ms(40);
    assert_eq!(sender.ack(&[5..=9, 0..=0]).lost, packets(4));
    assert_eq!(sender.window.reordering_window(&sender.rtt), None);
    assert_eq!(sender.ack(&[3..=9, 0..=0]).spuriously_lost, 2);
    assert_eq!(sender.window.reordering_window(&sender.rtt), Some(ms(10)), "a quarter of the least RTT");

    let sent = sender.now;
    sender.send(100);
    sender.now += ms(40);
    assert_eq!(sender.ack(&[50..=109]).lost, packets(0));
    assert_eq!(sender.window.loss_time, Some(sent + ms(50)));
    assert_eq!(sender.window.in_flight, packets(40));
    sender.now += ms(9);
    assert_eq!(sender.ack(&[30..=109]).acked, packets(20));
    sender.now += ms(1);
    assert_eq!(sender.window.detect_losses(sender.now, &sender.rtt, None), packets(20));
    assert_eq!((sender.window.loss_time, sender.window.in_flight), (None, packets(0)));
}

/// A peer that acknowledges sparsely makes no ACK look at more than a few packets: what it skips is looked at once.
#[test]
fn the_search_for_losses_goes_on_where_it_ended() {
    let mut sender = Sender::new();
    sender.send(4);
    sender.now += ms(40);
    sender.ack(&[3..=3]);
    sender.ack(&[0..=3]);
    assert!(sender.window.reordering.is_seen());
    for number in 4..10_000 {
        sender.send(1);
        sender.now += Duration::from_micros(10);
        if number % 2 == 1 && number > 4000 {
            sender.ack(&[number - 4000..=number - 4000]);
            let window = &sender.window;
            let in_flight = &window.ring.as_ref().unwrap().in_flight;
            assert_eq!(in_flight.first_in(window.oldest..window.next), Some(window.judged));
        }
    }
    assert!(sender.window.judged > 4000, "{:?}", sender.window.judged);
}

#[test]
fn probes_back_off_until_something_is_acknowledged() {
    let mut sender = Sender::new();
    let pto = sender.rtt.pto();
    let probe = |sender: &mut Sender| {
        sender.send(1);
        sender.window.probe_sent(sender.now);
        (sender.window.probe_time(&sender.rtt).unwrap() - sender.now).as_nanos() / pto.as_nanos()
    };
    let backoff: Vec<_> = (0..8).map(|_| probe(&mut sender)).collect();
    assert_eq!(backoff, [2, 4, 8, 16, 32, 64, 64, 64]);
    assert_eq!(sender.window.probes, 8);
    sender.ack(&[7..=7]);
    assert_eq!(sender.window.probes, 0);
}

#[test]
fn a_sender_that_never_pauses_probes_all_the_same() {
    let mut sender = Sender::new();
    let pto = sender.rtt.pto();
    let mut probes = Vec::new();
    let begin = sender.now;
    for _ in 0..3000 {
        sender.send(1);
        if sender.window.probe_time(&sender.rtt).unwrap() <= sender.now {
            sender.window.probe_sent(sender.now);
            probes.push((sender.now - begin).as_nanos() / pto.as_nanos());
        }
        sender.now += ms(1);
    }
    assert_eq!(probes, [2, 6], "{pto:?} apart, then twice that");
    // While acknowledgements come there is no need to.
    for number in 2000..3000 {
        sender.send(1);
        sender.ack(&[0..=number]);
        assert!(sender.window.probe_time(&sender.rtt).unwrap() > sender.now);
        sender.now += ms(20);
    }
}

#[test]
fn a_full_window_forgets_the_oldest() {
    let mut sender = Sender::new();
    sender.send(CAPACITY);
    assert_eq!(sender.window.record(CAPACITY, BYTES, true, sender.now), Evicted::InFlight);
    assert_eq!(sender.window.in_flight, packets(CAPACITY));
    let outcome = sender.ack(&[0..=CAPACITY]);
    assert_eq!(outcome.acked, packets(CAPACITY), "packet 0 is forgotten");
    assert_eq!(sender.window.record(CAPACITY + 1, BYTES, true, sender.now), Evicted::None);
}

/// How many packets the window has memory for.
fn remembered(sender: &Sender) -> u64 {
    sender.window.ring.as_ref().map_or(0, |ring| ring.records.capacity())
}

#[test]
fn the_window_grows_with_what_is_unacknowledged_and_keeps_all_of_it() {
    let mut sender = Sender::new();
    let mut sizes = Vec::new();
    for number in 0..CAPACITY {
        // Of each hundred packets one is never acknowledged, and one asks for nothing.
        sender.window.record(number, BYTES + (number % 7) as u16, number % 100 != 0, sender.now);
        sizes.push(remembered(&sender));
    }
    sizes.dedup();
    assert_eq!(sizes, [64, 256, 1024, 4096, CAPACITY]);
    let bytes = |numbers: &mut dyn Iterator<Item = u64>| {
        let mut volume = Volume::default();
        for number in numbers.filter(|number| number % 100 != 0) {
            volume.add(BYTES + (number % 7) as u16);
        }
        volume
    };
    assert_eq!(sender.window.in_flight, bytes(&mut (0..CAPACITY)));
    let missing = 50..=50;
    let outcome = sender.ack(&[51..=CAPACITY - 1, 0..=49]);
    assert_eq!(outcome.acked, bytes(&mut (0..50).chain(51..CAPACITY)));
    assert_eq!(outcome.lost, bytes(&mut missing.clone()));
    assert_eq!(sender.ack(&[missing]).spuriously_lost, 1);
}

#[test]
fn a_lane_that_waits_for_each_answer_or_only_answers_needs_the_smallest_window() {
    let mut sender = Sender::new();
    for number in 0..10_000 {
        sender.window.record(number, BYTES, number % 2 == 0, sender.now);
        sender.now += ms(1);
        sender.ack(&[number..=number]);
    }
    assert_eq!(remembered(&sender), SMALLEST);
    let mut answers = Sender::new();
    for number in 0..10_000 {
        answers.window.record(number, 40, false, answers.now);
    }
    assert_eq!(remembered(&answers), SMALLEST);
}

#[test]
fn what_is_lost_for_good_does_not_make_a_quiet_lane_grow() {
    let mut sender = Sender::new();
    for number in 0..10_000 {
        sender.send(1);
        sender.now += ms(100);
        if number % 10 != 5 {
            sender.ack(&[number..=number]);
        }
    }
    assert_eq!(remembered(&sender), SMALLEST);
}

#[test]
fn memory_of_a_burst_is_given_back_after_a_rest_and_not_before() {
    let mut sender = Sender::new();
    sender.send(1000);
    sender.ack(&[0..=999]);
    sender.now += REST - ms(1);
    sender.send(1);
    assert_eq!(remembered(&sender), 1024, "the traffic goes on");
    sender.now += REST;
    sender.send(1);
    assert_eq!(remembered(&sender), 1024, "one is in flight");
    sender.ack(&[1000..=1001]);
    sender.now += REST;
    sender.window.record(1002, 40, false, sender.now);
    assert_eq!(remembered(&sender), SMALLEST, "an answer is enough");
    sender.send(1);
    assert_eq!(sender.ack(&[1002..=1003]).acked, packets(1));
}

#[test]
fn a_slot_keeps_nothing_of_the_packet_before() {
    let mut sender = Sender::new();
    sender.send(100);
    sender.now += ms(1000);
    assert_eq!(sender.ack(&[50..=50]).lost, packets(48));
    assert_eq!(sender.window.in_flight, packets(51));
    for number in 100..CAPACITY + 100 {
        sender.window.record(number, BYTES, false, sender.now);
    }
    assert_eq!(sender.window.in_flight, packets(0));
    assert_eq!(sender.ack(&[0..=CAPACITY + 99]), AckOutcome::default());
}

#[test]
fn the_time_of_a_packet_is_known_as_long_as_it_has_a_record() {
    let mut sender = Sender::new();
    assert_eq!(sender.window.sent_at(0, sender.now), None);
    let begin = sender.now;
    for number in 0..200 {
        sender.send(1);
        sender.now += ms(1);
        // Acknowledged at once, so that the window stays small.
        sender.ack(&[number..=number]);
    }
    let at = |number| begin + ms(number);
    assert_eq!(sender.window.sent_at(199, sender.now), Some(at(199)));
    assert_eq!(sender.window.sent_at(136, sender.now), Some(at(136)), "the oldest of 64");
    assert_eq!(sender.window.sent_at(135, sender.now), None, "its record is another packet's");
    assert_eq!(sender.window.sent_at(200, sender.now), None, "not sent yet");
    // The window grows: what was settled by then has no record.
    sender.send(80);
    assert_eq!(sender.window.sent_at(199, sender.now), None);
    assert_eq!(sender.window.sent_at(210, sender.now), Some(sender.now));
}

#[test]
fn a_packet_that_asks_for_no_ack_is_never_in_flight_but_gives_a_sample() {
    let mut sender = Sender::new();
    sender.send(1);
    sender.now += ms(30);
    sender.window.record(1, 40, false, sender.now);
    assert_eq!(sender.window.in_flight, packets(1));
    sender.now += ms(20);
    assert_eq!(sender.ack(&[0..=1]).acked, packets(1));
    assert_eq!(sender.rtt.latest(), Some(ms(20)));
}

#[test]
fn an_ack_of_old_news_is_no_sign_of_life() {
    let mut sender = Sender::new();
    sender.send(2);
    sender.ack(&[0..=0]);
    sender.now += ms(500);
    sender.window.probe_sent(sender.now);
    let probe_time = sender.window.probe_time(&sender.rtt);
    sender.now += ms(100);
    assert_eq!(sender.ack(&[0..=0]), AckOutcome::default());
    assert_eq!((sender.window.probes, sender.window.probe_time(&sender.rtt)), (1, probe_time));
}

/// RFC 9002 §5.1: the largest acknowledged packet is new, and one of those newly acknowledged asked for an ACK.
#[test]
fn only_an_ack_that_names_a_new_largest_and_acknowledges_something_gives_a_sample() {
    let mut sender = Sender::new();
    sender.window.record(0, BYTES, false, sender.now);
    sender.now += ms(70);
    sender.ack(&[0..=0]);
    assert_eq!((sender.rtt.latest(), sender.window.largest_acked), (None, Some(0)), "nothing asked for it");
    sender.send(3);
    sender.now += ms(40);
    sender.ack(&[3..=3]);
    assert_eq!(sender.rtt.latest(), Some(ms(40)));
    sender.now += ms(4);
    assert_eq!(sender.ack(&[1..=3]).acked, packets(2));
    assert_eq!(sender.rtt.latest(), Some(ms(40)), "the largest was known");
}

#[test]
fn an_mtu_probe_that_a_full_window_forgot_is_lost_once_later_packets_arrived() {
    let mut sender = Sender::new();
    sender.send(1);
    sender.window.mtu_probe_sent();
    sender.send(CAPACITY);
    assert_eq!(sender.ack(&[2..=2]).lost, packets(0));
    assert_eq!(sender.window.take_mtu_fate(), None, "by as few as two packets it may be late");
    sender.ack(&[3..=3]);
    assert_eq!(sender.window.take_mtu_fate(), Some((BYTES, MtuFate::Lost)));
    assert_eq!(sender.window.take_mtu_fate(), None);
}

#[test]
fn an_mtu_probe_has_a_fate_of_its_own_until_it_is_forgotten() {
    for forgotten in [false, true] {
        let mut sender = Sender::new();
        sender.send(1);
        sender.window.mtu_probe_sent();
        if forgotten {
            sender.window.forget_mtu_probes();
        }
        sender.send(4);
        let outcome = sender.ack(&[4..=4]);
        let lost = if forgotten { 2 } else { 1 };
        assert_eq!(outcome.lost, packets(lost), "packet 1, and the probe if it is one no more");
        assert_eq!(sender.window.take_mtu_fate(), (!forgotten).then_some((BYTES, MtuFate::Lost)));
        assert_eq!((sender.window.take_largest_lost(), sender.window.take_largest_lost()), (BYTES, 0));
    }
    let mut sender = Sender::new();
    sender.send(1);
    sender.window.mtu_probe_sent();
    sender.ack(&[0..=0]);
    sender.window.forget_mtu_probes();
    assert_eq!(sender.window.take_mtu_fate(), None, "a fate that was not asked for is forgotten, too");
}

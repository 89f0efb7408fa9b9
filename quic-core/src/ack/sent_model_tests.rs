use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use proptest::prelude::*;

use super::tests::{BYTES, Sender, packets};
use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    InFlight,
    Lost,
    Settled,
}

#[derive(Debug, Clone)]
enum Step {
    Send {
        packets: u64,
        ack_eliciting: bool,
    },
    Wait(Duration),
    /// Which of the last 64 numbers the ACK names.
    Ack(u64),
    LossTimeout,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u64..40, prop::bool::weighted(0.8))
            .prop_map(|(packets, ack_eliciting)| Step::Send { packets, ack_eliciting }),
        2 => (0_u64..50_000).prop_map(|us| Step::Wait(Duration::from_micros(us))),
        4 => prop_oneof![any::<u64>(), any::<u64>().prop_map(|bits| !(1 << (bits % 64)))].prop_map(Step::Ack),
        1 => Just(Step::LossTimeout),
    ]
}

/// Every packet with the time it was sent and its fate, all looked at each time: RFC 9002 by the letter, and with the window of RFC
/// 8985 after the first spurious loss.
struct Model {
    packets: BTreeMap<u64, (Instant, Fate)>,
    largest_acked: Option<u64>,
    reordering: Reordering,
    loss_time: Option<Instant>,
}

impl Model {
    /// The packets acknowledged, those of them that had been lost, and those that came after later ones.
    fn ack(&mut self, ranges: &[RangeInclusive<u64>], next: u64, now: Instant, rtt: &Rtt) -> [u64; 3] {
        let (mut acked, mut spurious, mut reordered) = (0, 0, 0);
        for number in ranges.iter().cloned().flatten() {
            let Some((sent, fate)) = self.packets.get_mut(&number) else { continue };
            let age = now - *sent;
            reordered += u64::from(*fate != Fate::Settled && Some(number) < self.largest_acked);
            match std::mem::replace(fate, Fate::Settled) {
                Fate::Settled => continue,
                Fate::InFlight if Some(number + 3) <= self.largest_acked => {
                    self.reordering.came_late(age, rtt)
                }
                Fate::InFlight => {}
                Fate::Lost => {
                    self.reordering.was_spurious(number, age, next, rtt);
                    spurious += 1;
                }
            }
            acked += 1;
        }
        self.largest_acked = self.largest_acked.max(ranges.first().map(|range| *range.end()));
        [acked, spurious, reordered]
    }

    fn detect_losses(&mut self, next: u64, now: Instant, rtt: &Rtt) -> u64 {
        let Some(largest) = self.largest_acked else { return 0 };
        let (counts, loss_delay) = (!self.reordering.is_seen(), self.reordering.loss_delay(rtt));
        let loss_delay = Duration::from_micros(loss_delay.as_micros() as u64);
        let mut lost = 0;
        self.loss_time = None;
        for (number, (sent, fate)) in self.packets.range_mut(..largest) {
            let is_lost = counts && number + 3 <= largest || now - *sent >= loss_delay;
            if *fate == Fate::InFlight && is_lost {
                *fate = Fate::Lost;
                lost += 1;
                self.reordering.was_lost(*number, next);
            } else if *fate == Fate::InFlight && self.loss_time.is_none() {
                self.loss_time = Some(*sent + loss_delay);
            }
        }
        lost
    }

    fn count(&self, fate: Fate) -> u64 {
        self.packets.values().filter(|(_, of_packet)| *of_packet == fate).count() as u64
    }
}

proptest! {
    #[test]
    fn agrees_with_a_model(steps in prop::collection::vec(step(), 1..60)) {
        let mut sender = Sender::new();
        let mut model = Model { packets: BTreeMap::new(), largest_acked: None, reordering: Reordering::new(), loss_time: None };
        for step in steps {
            match step {
                Step::Send { packets, ack_eliciting } => for _ in 0..packets {
                    let number = sender.window.next;
                    sender.window.record(number, BYTES, ack_eliciting, sender.now);
                    let fate = if ack_eliciting { Fate::InFlight } else { Fate::Settled };
                    model.packets.insert(number, (sender.now, fate));
                },
                Step::Wait(time) => sender.now += time,
                Step::Ack(bits) => {
                    let next = sender.window.next;
                    let ranges: Vec<_> = (0..64.min(next))
                        .filter(|below| bits >> below & 1 == 1)
                        .map(|below| next - 1 - below)
                        .fold(Vec::new(), |mut ranges: Vec<RangeInclusive<u64>>, number| {
                            match ranges.last_mut() {
                                Some(range) if *range.start() == number + 1 => *range = number..=*range.end(),
                                _ => ranges.push(number..=number),
                            }
                            ranges
                        });
                    if ranges.is_empty() {
                        continue;
                    }
                    let [acked, spuriously_lost, reordered] = model.ack(&ranges, next, sender.now, &sender.rtt);
                    let outcome = sender.ack(&ranges);
                    let lost = packets(model.detect_losses(next, sender.now, &sender.rtt));
                    let expected = AckOutcome { acked: packets(acked), lost, spuriously_lost, reordered };
                    prop_assert_eq!(outcome, expected);
                }
                Step::LossTimeout => {
                    let lost = model.detect_losses(sender.window.next, sender.now, &sender.rtt);
                    prop_assert_eq!(sender.window.detect_losses(sender.now, &sender.rtt, None), packets(lost));
                }
            }
            prop_assert_eq!(
                sender.window.reordering_window(&sender.rtt),
                model.reordering.is_seen().then(|| model.reordering.window(&sender.rtt)),
            );
            prop_assert_eq!(sender.window.loss_time, model.loss_time);
            prop_assert_eq!(sender.window.in_flight, packets(model.count(Fate::InFlight)));
            let first_unsettled = model.packets.iter().find(|(_, (_, fate))| *fate != Fate::Settled);
            prop_assert!(first_unsettled.is_none_or(|(number, _)| sender.window.oldest <= *number));
        }
    }
}

//! Packets that overtake each other: each takes 40 ms and a uniform time of its own, in both directions.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use quic_core::{
    AckProfile, Suite,
    record::{Event, Recorder},
};

use crate::{
    net::{Net, Path, ms},
    support::pair,
};

/// Bytes of the packets that a rate is made of.
const BYTES: u64 = 1400;

#[derive(Debug)]
struct Seen {
    dropped: u64,
    /// Declared lost, and not acknowledged since.
    lost: u64,
    spurious: u64,
    /// The greatest part of a second's packets that were lost, in thousandths, as an operator reads it.
    shown: u64,
    /// From sending to being declared lost, for those that were, from the shortest to the longest.
    detection: Vec<Duration>,
    window: Option<Duration>,
    /// Bytes of ACKs, in thousandths of the bytes that they acknowledge.
    acks: u64,
}

fn run(megabits: u64, jitter_ms: u64, lost_percent: u64, ack: AckProfile, seed: u64) -> Seen {
    let path =
        Path { delay: ms(40 - jitter_ms), jitter: ms(2 * jitter_ms), lost_percent, duplicated_percent: 0 };
    let mut net = Net::new(pair(Suite::Aes128Gcm, ack), path, seed);
    let begin = net.now;
    net.lanes[0].record(Some(Box::new(Recorder::new(100_000, begin))));
    let pause = Duration::from_nanos(BYTES * 8 * 1000 / megabits);
    let mut lost = BTreeMap::new();
    let (mut sent_at, mut shown, mut before) = (Vec::<Instant>::new(), 0, [0; 3]);
    let mut note = |net: &mut Net, sent_at: &[Instant]| {
        let Some(recorder) = net.lanes[0].recorder_mut() else { return };
        for record in recorder.records() {
            let at = begin + Duration::from_micros(record.micros.into());
            match record.event {
                Event::Lost { number, .. } => _ = lost.insert(number, at - sent_at[number as usize]),
                Event::SpuriouslyLost { number } => _ = lost.remove(&number),
                Event::Sent { .. }
                | Event::Received { .. }
                | Event::Frame(_)
                | Event::Metrics(_)
                | Event::KeyUpdate { .. }
                | Event::Mtu { .. } => {}
            }
        }
        assert_eq!(recorder.lost(), 0);
        recorder.clear();
    };
    let mut next = begin;
    while net.now < begin + ms(2000) {
        sent_at.resize(net.lanes[0].view().next_packet as usize + 1, net.now);
        net.send(0, sent_at.len() as u64);
        next += pause;
        net.run(next - net.now);
        if sent_at.len() % 1000 == 0 {
            note(&mut net, &sent_at);
        }
        let stats = net.lanes[0].stats();
        if stats.sealed_packets - before[0] >= 1_000_000 / (pause.as_micros() as u64) {
            let now = [stats.sealed_packets, stats.lost_packets, stats.spuriously_lost_packets];
            let [sent, lost, late] = [0, 1, 2].map(|at| now[at] - before[at]);
            shown = shown.max(1000 * lost.saturating_sub(late) / sent);
            before = now;
        }
    }
    net.run(ms(1000));
    sent_at.resize(net.lanes[0].view().next_packet as usize, net.now);
    note(&mut net, &sent_at);
    net.assert_idle();
    let (stats, answers) = (*net.lanes[0].stats(), net.lanes[1].stats());
    let mut detection: Vec<_> = lost.into_values().collect();
    detection.sort();
    Seen {
        dropped: net.dropped[0],
        lost: stats.lost_packets - stats.spuriously_lost_packets,
        spurious: stats.spuriously_lost_packets,
        shown,
        detection,
        window: net.lanes[0].reordering_window(),
        acks: 1000 * answers.sealed_bytes / (stats.acked_packets * BYTES),
    }
}

#[test]
fn what_is_overtaken_is_not_shown_as_lost_and_what_is_lost_is() {
    for (megabits, jitter) in [(50, 1), (50, 5), (50, 10), (200, 1), (200, 5), (200, 10)] {
        for (ack, lost_percent) in
            [(AckProfile::Throughput, 0), (AckProfile::Throughput, 1), (AckProfile::Latency, jitter % 2)]
        {
            let seen = run(megabits, jitter, lost_percent, ack, 7);
            let case = format!("{megabits} Mbit/s, ±{jitter} ms, {lost_percent} % lost, {ack:?}: {seen:?}");
            // The last ACK may be lost, which nothing repeats.
            assert!(seen.lost.abs_diff(seen.dropped) <= lost_percent, "{case}");
            assert!(lost_percent > 0 || seen.shown <= 1, "{case}");
            assert!(seen.shown <= 15 && seen.acks <= 20, "{case}");
            assert!(seen.spurious > 0 && seen.window.is_some_and(|window| window < ms(80)), "{case}");
            // A round trip of 80 ms and what an ACK is held back, then the window.
            assert!(seen.detection.iter().all(|time| *time < ms(80 + 25 + 80)), "{case}");
        }
    }
}

#[test]
fn where_packets_keep_their_order_losses_are_found_by_count() {
    for (megabits, lost_percent) in [(50, 1), (50, 10), (200, 1)] {
        let seen = run(megabits, 0, lost_percent, AckProfile::Latency, 7);
        assert_eq!((seen.lost, seen.spurious, seen.window), (seen.dropped, 0, None), "{seen:?}");
        // Three packets later; an ACK may be lost, too.
        let median = seen.detection[seen.detection.len() / 2];
        assert!(median < ms(80) + Duration::from_micros(4 * BYTES * 8 / megabits), "{seen:?}");
    }
}

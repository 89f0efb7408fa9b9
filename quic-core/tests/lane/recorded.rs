//! What a recorder says of a lane is what the lane counted and what the network did.

use std::collections::BTreeSet;
use std::time::Duration;

use quic_core::{
    AckProfile, Suite,
    record::{Event, LossRule, Purpose, Recorder, SeenFrame},
};

use crate::{
    net::{Net, Path, ms},
    support::pair_with_key_limits,
};

#[test]
fn records_agree_with_the_counters_under_loss_reordering_and_key_updates() {
    let lossy = Path { delay: ms(20), jitter: ms(4), lost_percent: 4, duplicated_percent: 2 };
    for seed in 1..5 {
        println!("seed {seed}");
        let lanes = pair_with_key_limits(Suite::Aes128Gcm, AckProfile::Throughput, [Some(1000), None]);
        let mut net = Net::new(lanes, lossy, seed);
        for lane in &mut net.lanes {
            lane.record(Some(Box::new(Recorder::new(100_000, net.now))));
        }
        net.lanes[0].start_mtu_search(1452, 1200);
        for id in 0..3000 {
            net.send(0, id);
            net.run(Duration::from_micros(200));
        }
        net.run(ms(3000));
        for lane in &mut net.lanes {
            let stats = *lane.stats();
            let smoothed = lane.rtt().smoothed();
            let recorder = lane.record(None).unwrap();
            let events = || recorder.records().iter().map(|record| record.event);
            let count = |is: fn(&Event) -> bool| events().filter(is).count() as u64;
            assert_eq!(recorder.lost(), 0);
            assert!(recorder.records().is_sorted_by_key(|record| record.micros));

            let sent = events().filter_map(|event| {
                let Event::Sent { number, bytes, .. } = event else { return None };
                Some((number, u64::from(bytes)))
            });
            assert!(sent.clone().map(|(number, _)| number).eq(0..stats.sealed_packets), "contiguous");
            assert_eq!(sent.map(|(_, bytes)| bytes).sum::<u64>(), stats.sealed_bytes);
            let received: BTreeSet<u64> = events()
                .filter_map(|event| {
                    let Event::Received { number, .. } = event else { return None };
                    Some(number)
                })
                .collect();
            assert_eq!(received.len() as u64, stats.opened_packets, "each once");

            let lost = |probes: bool| {
                events()
                    .filter(|event| matches!(event, Event::Lost { mtu_probe, .. } if *mtu_probe == probes))
                    .count() as u64
            };
            assert_eq!((lost(false), lost(true)), (stats.lost_packets, stats.mtu_probes_lost));
            assert_eq!(
                count(|event| matches!(event, Event::SpuriouslyLost { .. })),
                stats.spuriously_lost_packets
            );
            assert_eq!(count(|event| matches!(event, Event::KeyUpdate { .. })), stats.key_phase());
            let sent_for = |why| {
                let fits = |event: &Event| matches!(event, Event::Sent { purpose, .. } if *purpose == why);
                events().filter(fits).count() as u64
            };
            assert_eq!(
                (sent_for(Purpose::Probe), sent_for(Purpose::MtuProbe)),
                (stats.probes_sent, stats.mtu_probes_sent)
            );
            let acks = count(|event| matches!(event, Event::Frame(SeenFrame::Ack { .. })));
            assert_eq!(acks, stats.ack_frames_sent + stats.ack_frames_received);
            let datagrams = count(|event| matches!(event, Event::Frame(SeenFrame::Datagram { .. })));
            // The network's packets are sealed without being counted as datagrams.
            assert!(datagrams >= stats.datagrams_received);
            let mut last = events().filter_map(|event| {
                let Event::Metrics(metrics) = event else { return None };
                Some(metrics)
            });
            if let Some(last) = last.next_back() {
                assert_eq!(u128::from(last.smoothed_rtt), smoothed.as_micros());
                assert_eq!((last.packets_in_flight, last.bytes_in_flight), (0, 0));
                // Each of its parts is in whole microseconds.
                assert!(last.pto().abs_diff(lane.rtt().pto()) < Duration::from_micros(5));
            }
        }
        let sender = net.lanes[0].stats();
        assert!(
            sender.lost_packets > 50 && sender.key_phase() > 2 && sender.mtu_probes_sent > 0,
            "{sender:?}"
        );
    }
}

#[test]
fn a_loss_is_told_with_the_rule_that_found_it() {
    let path = Path { delay: ms(20), jitter: ms(0), lost_percent: 0, duplicated_percent: 0 };
    let lanes = pair_with_key_limits(Suite::Aes128Gcm, AckProfile::Latency, [None, None]);
    let mut net = Net::new(lanes, path, 1);
    net.lanes[0].record(Some(Box::new(Recorder::new(1000, net.now))));
    let lose = |net: &mut Net, id, after| {
        net.path.lost_percent = 100;
        net.send(0, id);
        net.path.lost_percent = 0;
        for more in 0..after {
            net.send(0, 1000 + id * 10 + more);
        }
        net.run(ms(500));
    };
    lose(&mut net, 0, 4);
    lose(&mut net, 1, 2);
    let recorder = net.lanes[0].record(None).unwrap();
    let rules: Vec<LossRule> = recorder
        .records()
        .iter()
        .filter_map(|record| {
            let Event::Lost { rule, .. } = record.event else { return None };
            Some(rule)
        })
        .collect();
    assert_eq!(rules, [LossRule::Count, LossRule::Time]);
}

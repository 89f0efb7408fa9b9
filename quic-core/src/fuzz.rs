//! Properties of any input: the targets in `fuzz/` check them, and the tests replay the corpora through them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::{
    AckProfile, Lane, LaneConfig, Suite, TRANSMIT_CAPACITY,
    ack::{Asks, Evicted, ReceivedPackets, Rtt, SentWindow},
    crypto::SendKeys,
    frame::{Contents, Frame, Frames, ack},
    packet::{ConnectionId, HEADER_LEN, TAG_LEN},
    seal::Sealer,
};

const CIDS: [ConnectionId; 2] = [ConnectionId([0x11; 8]), ConnectionId([0x22; 8])];
const SECRETS: [[u8; 32]; 2] = [[0xaa; 32], [0xbb; 32]];

/// Takes `input` as the frames of an authenticated payload, after one byte that says how many packets were sent.
///
/// A valid frame is read the same way a second time, acknowledges only what was sent, and can be written again.
pub fn frames(input: &[u8]) {
    let Some((&sent, payload)) = input.split_first() else { return };
    let sent = u64::from(sent) << 8;
    let Ok(contents) = Contents::validate(payload, sent) else { return };
    let mut datagrams = 0;
    for frame in Frames::new(payload) {
        match frame.expect("all frames are valid") {
            Frame::Datagram(datagram) => {
                assert!(datagram.len() < payload.len(), "a frame has a type beside its payload");
                datagrams += 1;
            }
            Frame::Ack(frame) => {
                let ranges: Vec<_> = frame.ranges().collect();
                assert_eq!(ranges.first().map(|range| *range.end()), Some(frame.largest));
                assert!(frame.largest < sent);
                assert!(ranges.iter().all(|range| range.start() <= range.end()));
                assert!(ranges.windows(2).all(|pair| pair[1].end() + 1 < *pair[0].start()), "{ranges:?}");

                let mut buf = vec![0; 32 + 16 * ranges.len()];
                let len =
                    ack::write(&mut buf, ranges.iter().cloned(), frame.delay.min(Duration::from_secs(1)));
                let again = Frames::new(&buf[..len.expect("two varints have 16 bytes")]).next();
                let Some(Ok(Frame::Ack(again))) = again else { panic!("{again:?} is not the ACK written") };
                assert_eq!(again.ranges().collect::<Vec<_>>(), ranges);
            }
            Frame::Padding | Frame::Ping | Frame::PathChallenge(_) | Frame::PathResponse(_) => {}
        }
    }
    assert_eq!(contents.datagrams, datagrams);
}

/// Takes `input` as a script of what reaches a lane: datagrams of unauthenticated senders, packets of an authenticated
/// end that sends what it likes, duplicates, key updates, and time.
///
/// No packet that is refused counts as opened, datagrams lie where they are said to lie, and every packet that the lane sent is
/// acknowledged, lost, forgotten or in flight.
pub fn packet_open(input: &[u8]) {
    let config = LaneConfig {
        suite: Suite::Aes128Gcm,
        send_secret: &SECRETS[0],
        receive_secret: &SECRETS[1],
        remote_cid: CIDS[1],
        local_cid: CIDS[0],
        ack: AckProfile::Latency,
        key_limit: Some(8),
        initial_rtt: None,
    };
    let mut lane = Lane::new(&config).expect("the secrets have the right length");
    lane.start_mtu_search(8972, 1300);
    let keys = SendKeys::new(config.suite, &SECRETS[1], None).expect("the secret has the right length");
    let mut other = Sealer::new(keys, CIDS[0]);
    let (mut now, mut sent, mut packet) = (start(), 0, Vec::new());
    let mut script = Script(input);
    while let Some((step, bytes)) = script.step() {
        match step % 8 {
            0 => packet = bytes.to_vec(),
            1 => packet = [&[0x40 | step >> 4], &CIDS[0].0[..], bytes].concat(),
            2 => {
                packet = [&[0; HEADER_LEN], bytes, &[0; TAG_LEN]].concat();
                if other.seal(&mut packet).is_err() {
                    continue;
                }
            }
            // Once more: the packet before, or the bytes that an earlier open left there.
            3 => {}
            4 => {
                other.update_keys();
                continue;
            }
            5 => {
                now += Duration::from_millis(bytes.len() as u64 * 10);
                lane.handle_timeout(now);
                continue;
            }
            6 => {
                sent += u64::from(lane.seal(&mut [0x01; HEADER_LEN + 1 + TAG_LEN], true, now).is_ok());
                continue;
            }
            _ => {
                let pings = lane.in_flight().packets;
                let mut packet = vec![0; lane.transmit_capacity(now)];
                if let Ok(Some(_len)) = lane.poll_transmit(&mut packet, now) {
                    sent += lane.in_flight().packets - pings;
                }
                continue;
            }
        }
        let opened_before = lane.stats().opened_packets;
        let mut opened_now = 0;
        let mut copy = packet.clone();
        if let Ok(opened) = lane.open(&mut copy, now) {
            opened_now = 1;
            let datagrams: Vec<_> =
                opened.datagrams().map(|datagram| (datagram.range, datagram.payload.to_vec())).collect();
            for (range, payload) in datagrams {
                assert_eq!(copy[range], payload);
            }
        }
        let stats = lane.stats();
        assert_eq!(stats.opened_packets, opened_before + opened_now);
        let settled = stats.acked_packets + stats.lost_packets - stats.spuriously_lost_packets;
        let settled = settled + stats.mtu_probes_lost;
        assert_eq!(settled + stats.window_overflows + lane.in_flight().packets, sent);
        assert!((1200..=8972).contains(&lane.max_packet()));
    }
}

/// Takes `input` as a script of a sender and a receiver: packets sent, arriving in any order, ACKs, and time.
///
/// An ACK names only what arrived, the highest of it included; the sender ends with every packet accounted for.
pub fn ack_ranges(input: &[u8]) {
    let (mut sent, mut rtt) = (SentWindow::new(), Rtt::new(None));
    let mut received = ReceivedPackets::new(AckProfile::Throughput);
    let (mut now, mut arrived, mut settled) = (start(), BTreeSet::new(), 0);
    let mut script = Script(input);
    while let Some((step, bytes)) = script.step() {
        match step % 4 {
            0 => (0..=bytes.len()).for_each(|_| match sent.record(sent.next, 1200, true, now) {
                Evicted::None => {}
                Evicted::InFlight => settled += 1,
            }),
            1 => {
                for &back in bytes {
                    let Some(number) = sent.next.checked_sub(1 + u64::from(back)) else { continue };
                    received.record(number, Asks::Ack, now, &rtt);
                    arrived.insert(number);
                }
            }
            2 => {
                let mut buf = [0; TRANSMIT_CAPACITY];
                let Some(len) = received.write_ack(&mut buf, now) else { continue };
                let Some(Ok(Frame::Ack(ack))) = Frames::new(&buf[..len]).next() else {
                    panic!("an ACK was written")
                };
                assert_eq!(Some(&ack.largest), arrived.last());
                assert!(ack.ranges().flatten().all(|number| arrived.contains(&number)));
                let outcome = sent.on_ack(&ack, now, &mut rtt, None);
                settled += outcome.acked.packets + outcome.lost.packets - outcome.spuriously_lost;
            }
            _ => {
                now += Duration::from_millis(bytes.len() as u64 * 10);
                settled += sent.detect_losses(now, &rtt, None).packets;
            }
        }
        assert_eq!(settled + sent.in_flight.packets, sent.next);
        assert_eq!(sent.in_flight.bytes, 1200 * sent.in_flight.packets);
    }
}

/// Steps, each a byte that says what to do, a length, and so many bytes.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn step(&mut self) -> Option<(u8, &'a [u8])> {
        let (&[step, len], rest) = self.0.split_first_chunk()?;
        let (bytes, rest) = rest.split_at(rest.len().min(len.into()));
        self.0 = rest;
        Some((step, bytes))
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a script needs some instant to start from; only differences matter"
)]
fn start() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    include!("../../fuzz/replay.rs");

    #[test]
    fn the_corpus_of_packets() {
        replay("packet_open", 50, super::packet_open);
    }

    #[test]
    fn the_corpus_of_frames() {
        replay("frames", 50, super::frames);
    }

    #[test]
    fn the_corpus_of_acks() {
        replay("ack_ranges", 50, super::ack_ranges);
    }
}

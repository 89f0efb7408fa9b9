//! Sealing, opening, acknowledging and updating keys allocate nothing once a lane has sent its first packet.

use std::time::{Duration, Instant};

use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TAG_LEN, TRANSMIT_CAPACITY,
    frame::datagram, record::Recorder,
};

const PACKET_LEN: usize = OVERHEAD + 1 + 1150;
/// Packets that an end handles in one turn.
const BATCH: usize = 64;

struct Pair {
    lanes: [Lane; 2],
    packets: [[u8; PACKET_LEN]; BATCH],
    now: Instant,
}

impl Pair {
    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from; only differences matter"
    )]
    fn new(suite: Suite, ack: AckProfile) -> Self {
        let secrets = [vec![1; suite.secret_len()], vec![2; suite.secret_len()]];
        let cids = [ConnectionId([1; 8]), ConnectionId([2; 8])];
        let lanes = [0, 1].map(|end| {
            let config = LaneConfig {
                suite,
                send_secret: &secrets[end],
                receive_secret: &secrets[1 - end],
                remote_cid: cids[1 - end],
                local_cid: cids[end],
                ack,
                key_limit: Some(20 * BATCH as u64),
                initial_rtt: Some(Duration::from_millis(1)),
            };
            Lane::new(&config).unwrap()
        });
        Self { lanes, packets: [[0; PACKET_LEN]; BATCH], now: Instant::now() }
    }

    /// One end sends a batch, of which each 17th packet is lost, one comes late and one twice; the other acknowledges.
    fn turn(&mut self, from: usize) {
        for packet in &mut self.packets {
            let frame = &mut packet[HEADER_LEN..PACKET_LEN - TAG_LEN];
            let header_len = datagram::write_header_to_end(frame).unwrap();
            frame[header_len..].fill(7);
            self.lanes[from].seal(packet, true, self.now).unwrap();
        }
        self.now += Duration::from_millis(1);
        self.packets.swap(20, 30);
        let mut duplicate = self.packets[40];
        for (at, packet) in self.packets.iter_mut().enumerate() {
            if at % 17 != 0 {
                let opened = self.lanes[1 - from].open(packet, self.now).unwrap();
                assert_eq!(opened.datagrams().next().unwrap().payload.len(), 1150);
            }
        }
        self.lanes[1 - from].open(&mut duplicate, self.now).unwrap_err();
        self.settle();
    }

    /// Both ends send what they have to say by themselves, until nothing is in flight.
    fn settle(&mut self) {
        let mut packet = [0; TRANSMIT_CAPACITY];
        loop {
            for end in [0, 1] {
                while let Some(len) = self.lanes[end].poll_transmit(&mut packet, self.now).unwrap() {
                    self.lanes[1 - end].open(&mut packet[..len], self.now).unwrap();
                }
            }
            let timers = self.lanes.iter().filter_map(Lane::poll_timeout);
            let Some((at, _timer)) = timers.min_by_key(|(at, _timer)| *at) else {
                break;
            };
            self.now = at;
            self.lanes.iter_mut().for_each(|lane| lane.handle_timeout(at));
        }
    }
}

#[test]
fn the_packet_path_allocates_nothing_after_the_first_packets() {
    let _profiler = dhat::Profiler::builder().testing().build();
    for suite in [Suite::Aes128Gcm, Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
        for ack in [AckProfile::Throughput, AckProfile::Latency] {
            let mut pair = Pair::new(suite, ack);
            // One end is looked at; its recorder fills up and drops, and is emptied now and then.
            pair.lanes[0].record(Some(Box::new(Recorder::new(1000, pair.now))));
            // The sent windows grow to what this traffic needs: what is lost is remembered for three seconds.
            let begin = pair.now;
            while pair.now < begin + Duration::from_secs(4) {
                [0, 1].into_iter().for_each(|end| pair.turn(end));
            }
            pair.lanes[0].recorder_mut().into_iter().for_each(Recorder::clear);

            let before = dhat::HeapStats::get();
            for turn in 0..200 {
                pair.turn(turn % 2);
                if let Some(recorder) = pair.lanes[0].recorder_mut().filter(|_recorder| turn % 20 == 19) {
                    assert!(recorder.lost() > 0 && recorder.records().len() > 900);
                    recorder.clear();
                }
            }
            let after = dhat::HeapStats::get();
            assert!(before.total_blocks > 0, "the profiler sees the sent windows");
            assert_eq!(after.total_blocks, before.total_blocks, "{suite:?} {ack:?}");

            let stats = pair.lanes[0].stats();
            assert!(stats.key_phase() >= 4 && stats.lost_packets > 0 && stats.duplicates > 0, "{stats:?}");
        }
    }
}

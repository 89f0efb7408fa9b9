//! How soon the dialler of a session notices that its exit is gone: a real lane, whose packets are answered until then.

use std::time::{Duration, Instant};

use base::clock::{Clock as _, ManualClock};
use engine::control::liveness::silence_limit;
use quic_core::{AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, Suite, TAG_LEN, TRANSMIT_CAPACITY};

/// Packets that are answered before the exit is gone; the estimate of the round trip has settled by then.
const ANSWERED: u32 = 40;

/// Length of a packet with one PING frame.
const PACKET: usize = HEADER_LEN + 4 + TAG_LEN;

/// The time from the end of an exit until its peer's session is suspect, if the peer sends a packet every `interval` and the exit
/// ends `phase` after one of them.
pub(crate) fn noticed_after(interval: Duration, phase: Duration, round_trip: Duration) -> Duration {
    let start = ManualClock::default().now();
    let mut path = Path::new(round_trip / 2);
    for packet in 0..ANSWERED {
        path.run(start + interval * packet);
        path.send(start + interval * packet);
    }
    let end = start + interval * (ANSWERED - 1) + phase;
    path.run(end);
    path.is_cut = true;
    for packet in ANSWERED.. {
        let at = start + interval * packet;
        path.run(at);
        if let Some(suspect) = path.suspect {
            return suspect.saturating_duration_since(end);
        }
        path.send(at);
    }
    unreachable!("a lane without answers becomes silent")
}

/// The lane of a peer and that of its exit.
struct Path {
    near: Lane,
    far: Lane,
    one_way: Duration,
    /// Packets under way: when they arrive, whether at the exit, and their bytes. The delay is constant, so they stay in order.
    under_way: Vec<(Instant, bool, Vec<u8>)>,
    /// Whether the exit is gone.
    is_cut: bool,
    /// When the session was found silent.
    suspect: Option<Instant>,
}

impl Path {
    fn new(one_way: Duration) -> Self {
        let secrets = [[1; 32], [2; 32]];
        let cids = [ConnectionId([1; 8]), ConnectionId([2; 8])];
        let lane = |own: usize| {
            let config = LaneConfig {
                suite: Suite::Aes128Gcm,
                send_secret: &secrets[own],
                receive_secret: &secrets[1 - own],
                remote_cid: cids[1 - own],
                local_cid: cids[own],
                ack: AckProfile::Throughput,
                key_limit: None,
                initial_rtt: Some(one_way * 2),
            };
            Lane::new(&config).expect("the secrets have the suite's length")
        };
        Self { near: lane(0), far: lane(1), one_way, under_way: Vec::new(), is_cut: false, suspect: None }
    }

    /// The peer sends a packet that asks for an acknowledgement.
    fn send(&mut self, now: Instant) {
        let mut packet = vec![1; PACKET];
        self.near.seal(&mut packet, true, now).expect("the keys are fresh");
        self.under_way.push((now + self.one_way, true, packet));
    }

    /// Lets everything happen that is due before `until`.
    fn run(&mut self, until: Instant) {
        loop {
            let arrival = self.under_way.first().map(|(at, ..)| *at);
            let near = self.near.poll_timeout().map(|(at, _)| at);
            let far = self.far.poll_timeout().map(|(at, _)| at).filter(|_| !self.is_cut);
            let Some(now) = [arrival, near, far].into_iter().flatten().min().filter(|at| *at <= until) else {
                return;
            };
            if arrival == Some(now) {
                let (_, at_exit, mut packet) = self.under_way.remove(0);
                let lane = if at_exit { &mut self.far } else { &mut self.near };
                if !at_exit || !self.is_cut {
                    lane.open(&mut packet, now).expect("it was sealed for this lane");
                }
            } else if near == Some(now) {
                self.near.handle_timeout(now);
                self.look(now);
            } else {
                self.far.handle_timeout(now);
            }
            self.transmit(now);
        }
    }

    /// As the host of a lane looks at its silence whenever one of its timers was due.
    fn look(&mut self, now: Instant) {
        let Some(since) = self.near.silent_since() else { return };
        let (silence, limit) = (now.saturating_duration_since(since), silence_limit(self.near.rtt()));
        if silence >= limit {
            self.suspect.get_or_insert(now);
        } else if silence >= limit / 2 {
            self.near.request_ping();
        }
    }

    /// Sends the packets that the lanes themselves want sent.
    fn transmit(&mut self, now: Instant) {
        let mut buffer = [0; TRANSMIT_CAPACITY];
        for (lane, to_exit) in [(&mut self.near, true), (&mut self.far, false)] {
            if !to_exit && self.is_cut {
                continue;
            }
            while let Ok(Some(len)) = lane.poll_transmit(&mut buffer, now) {
                self.under_way.push((now + self.one_way, to_exit, buffer[..len].to_vec()));
            }
        }
    }
}

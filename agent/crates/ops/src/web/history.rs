//! The last ten minutes of each peer, and of all together: rates and loss, in samples of five seconds.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use engine::brief::PeerBrief;
use serde::Serialize;

pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// The number of samples that are kept: ten minutes.
pub const SAMPLES: usize = 120;

/// The number of peers whose samples are kept, the first ones of the list: 6 MiB of them.
pub const MOST_SERIES: usize = 4_096;

/// The number of characters of a trend, each for [`POINT`] samples: as wide as a column of a table.
const TREND: usize = 40;

/// The number of samples in one character of a trend.
const POINT: usize = SAMPLES / TREND;

/// What passed between two samples; NaN where that is not known.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Payload bytes per second towards the peer.
    up: f32,
    /// Payload bytes per second from the peer.
    down: f32,
    /// The share of the lane packets sent that was lost.
    lost: f32,
}

const UNKNOWN: Sample = Sample { up: f32::NAN, down: f32::NAN, lost: f32::NAN };

/// The counts from which a sample is made.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    up_bytes: u64,
    down_bytes: u64,
    sent_packets: u64,
    lost_packets: u64,
}

#[derive(Debug)]
struct Series {
    /// Sample `n` is at index `n % SAMPLES`.
    samples: Box<[Sample; SAMPLES]>,
    before: Option<Counts>,
    /// The number of the last sample, so that a series whose peer is gone is found.
    last: u64,
}

/// The samples of all peers, in bounded memory.
#[derive(Debug, Default)]
pub(super) struct History {
    /// The number of samples taken since the start.
    taken: u64,
    sampled: Option<Instant>,
    all: Series,
    peers: BTreeMap<Arc<str>, Series>,
}

/// Samples for a graph, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HistoryAnswer {
    pub interval_seconds: u64,
    /// The number of samples taken until now: what to ask for next time.
    pub taken: u64,
    /// Payload bytes per second towards the peers; null where nothing is known.
    pub up: Vec<Option<u64>>,
    /// Payload bytes per second from the peers.
    pub down: Vec<Option<u64>>,
    /// The share of the lane packets sent that was lost; null where none was sent.
    pub loss: Vec<Option<f64>>,
}

impl Default for Series {
    fn default() -> Self {
        Self { samples: Box::new([UNKNOWN; SAMPLES]), before: None, last: 0 }
    }
}

impl Counts {
    fn of(peer: &PeerBrief) -> Self {
        let PeerBrief { up_bytes, down_bytes, sent_packets, lost_packets, .. } = *peer;
        Self { up_bytes, down_bytes, sent_packets, lost_packets }
    }

    fn add(&mut self, other: Self) {
        self.up_bytes += other.up_bytes;
        self.down_bytes += other.down_bytes;
        self.sent_packets += other.sent_packets;
        self.lost_packets += other.lost_packets;
    }

    /// What passed in `seconds`; unknown if a count has fallen, because other peers were counted before.
    fn since(self, before: Self, seconds: f32) -> Option<Sample> {
        let up = self.up_bytes.checked_sub(before.up_bytes)?;
        let down = self.down_bytes.checked_sub(before.down_bytes)?;
        let sent = self.sent_packets.checked_sub(before.sent_packets)?;
        // Packets that were sent before may be found lost now, or not to be lost after all.
        let lost = self.lost_packets.saturating_sub(before.lost_packets);
        let lost = if sent == 0 { f32::NAN } else { (lost as f32 / sent as f32).min(1.0) };
        Some(Sample { up: up as f32 / seconds, down: down as f32 / seconds, lost })
    }
}

impl Series {
    fn push(&mut self, number: u64, counts: Counts, seconds: Option<f32>) {
        let known = self.before.zip(seconds);
        let sample = known.and_then(|(before, seconds)| counts.since(before, seconds)).unwrap_or(UNKNOWN);
        self.samples[slot(number)] = sample;
        (self.before, self.last) = (Some(counts), number);
    }
}

fn slot(number: u64) -> usize {
    (number % SAMPLES as u64) as usize
}

impl History {
    pub(super) fn sample(&mut self, peers: &[PeerBrief], now: Instant) {
        let elapsed = self.sampled.map(|before| now.saturating_duration_since(before).as_secs_f32());
        let seconds = elapsed.filter(|seconds| *seconds > 0.0);
        self.sampled = Some(now);
        let number = self.taken;
        self.taken += 1;
        let mut all = Counts::default();
        for peer in peers {
            let counts = Counts::of(peer);
            all.add(counts);
            if let Some(series) = self.peers.get_mut(&peer.name) {
                series.push(number, counts, seconds);
            } else if self.peers.len() < MOST_SERIES {
                self.peers.entry(Arc::clone(&peer.name)).or_default().push(number, counts, seconds);
            }
        }
        self.all.push(number, all, seconds);
        self.peers.retain(|_, series| series.last == number);
    }

    pub(super) fn answer(&self, peer: Option<&str>, after: u64) -> Option<HistoryAnswer> {
        let series = match peer {
            Some(name) => self.peers.get(name)?,
            None => &self.all,
        };
        // A page that was shown by another run of the agent asks for samples to come.
        let after = if after > self.taken { 0 } else { after };
        let first = after.max(self.taken.saturating_sub(SAMPLES as u64));
        let mut answer = HistoryAnswer {
            interval_seconds: SAMPLE_INTERVAL.as_secs(),
            taken: self.taken,
            ..HistoryAnswer::default()
        };
        for number in first..self.taken {
            let Sample { up, down, lost } = series.samples[slot(number)];
            answer.up.push(known(up).map(|rate| rate as u64));
            answer.down.push(known(down).map(|rate| rate as u64));
            answer.loss.push(known(lost).map(|share| rounded(f64::from(share))));
        }
        Some(answer)
    }

    /// The last ten minutes of a peer, both ways together, as one digit of base 36 for each 15 s: `z` is the most that there
    /// was. Empty without a history, and while nothing has passed.
    pub(super) fn trend(&self, peer: &str) -> String {
        let Some(series) = self.peers.get(peer) else { return String::new() };
        // Whole points only, so that a trend moves by one digit at a time.
        let end = self.taken - self.taken % POINT as u64;
        let start = end.saturating_sub(SAMPLES as u64);
        let rate = |number: u64| {
            let Sample { up, down, .. } = series.samples[slot(number)];
            known(up).unwrap_or(0.0) + known(down).unwrap_or(0.0)
        };
        let points: Vec<f32> = (start..end)
            .step_by(POINT)
            .map(|first| (first..first + POINT as u64).map(rate).fold(0.0, f32::max))
            .collect();
        let most = points.iter().copied().fold(0.0, f32::max);
        if most <= 0.0 {
            return String::new();
        }
        let digit = |point: &f32| char::from_digit((point / most * 35.0).ceil() as u32, 36);
        points.iter().filter_map(digit).collect()
    }

    /// The memory of the samples, in bytes.
    pub(super) fn bytes(&self) -> usize {
        (self.peers.len() + 1) * (size_of::<[Sample; SAMPLES]>() + size_of::<Series>())
    }
}

fn known(value: f32) -> Option<f32> {
    (!value.is_nan()).then_some(value)
}

/// A share with four decimals: a hundredth of a percent.
pub(super) fn rounded(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

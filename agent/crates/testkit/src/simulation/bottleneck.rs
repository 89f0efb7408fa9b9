//! One direction of a path with a bottleneck: a pure model without I/O, clock or threads.
//!
//! ```text
//!  enqueue ─▶ loss `before` ─▶ byte queue ─▶ transmission ─▶ loss `after` ─▶ propagation ─▶ pop
//!                              (tail drop,    at `rate_bits`   corruption,    for `delay`
//!                               CE marks)                      duplication    and its jitter
//! ```
//!
//! The simulator carries datagrams through it in virtual time, and the relay of `culvert-tests` carries the packets of a kernel
//! through it in real time. Packets leave in the order in which they came, but for [`Jitter`], with which each has a delay of its own.

use std::{
    collections::{BTreeMap, VecDeque},
    f64::consts::TAU,
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

/// The ECN bits of a packet that met congestion (RFC 3168 §5).
const CE: u8 = 0b11;

/// Sets the generator of the loss behind the queue apart from that of the loss before it.
const AFTER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Sets the generator of jitter, duplication and corruption apart from those of losses.
const DISTURBANCE: u64 = 0xd1b5_4a32_d192_ed03;

/// Loss in bursts: a Markov chain with a good and a bad state, one step per packet (Gilbert and Elliott).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gilbert {
    /// The probability of a step from good to bad, in millionths.
    pub to_bad_ppm: u32,
    /// The probability of a step from bad to good, in millionths; the mean stay in the bad state is its inverse, in packets.
    pub to_good_ppm: u32,
    /// Packets lost in the good state, in millionths.
    pub good_loss_ppm: u32,
    /// Packets lost in the bad state, in millionths.
    pub bad_loss_ppm: u32,
}

impl Gilbert {
    /// Bursts of `packets` on average, in which everything is lost, so that `loss_ppm` is lost overall.
    #[must_use]
    pub fn bursts(packets: u32, loss_ppm: u32) -> Self {
        let to_good_ppm = 1_000_000 / packets.max(1);
        let (lost, kept) = (u64::from(loss_ppm), u64::from(1_000_000_u32.saturating_sub(loss_ppm)));
        let to_bad_ppm = u64::from(to_good_ppm) * lost / kept.max(1);
        let to_bad_ppm = u32::try_from(to_bad_ppm).unwrap_or(u32::MAX);
        Self { to_bad_ppm, to_good_ppm, good_loss_ppm: 0, bad_loss_ppm: 1_000_000 }
    }
}

/// Loss at one place of a path. A packet that survives the bursts meets the random loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Packets lost independently of each other, in millionths.
    pub random_ppm: u32,
    /// The parameters of loss in bursts; `None` for no bursts.
    pub bursts: Option<Gilbert>,
}

/// The deviation of each packet's delay from the path's. A packet overtakes others that deviate by more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jitter {
    /// Every packet takes as long, and none overtakes another.
    #[default]
    None,
    /// Up to this much more or less, each deviation as likely.
    Uniform(Duration),
    /// A normal distribution with this standard deviation.
    Normal(Duration),
}

/// What a link does to packets beside losing and delaying them, in millionths of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disturbance {
    /// Packets that arrive twice, each time with a delay of its own.
    pub duplicated_ppm: u32,
    /// Packets of which a bit changes on the way: [`Packet::damage`].
    pub corrupted_ppm: u32,
}

/// The rate, queue, delay, losses and ECN marking of a [`Bottleneck`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// IP packets are sent at this rate, in bits per second; `None` sends them at once.
    pub rate_bits: Option<u64>,
    /// A packet that would make more bytes wait is dropped. The packet in transmission does not wait.
    pub queue_bytes: usize,
    /// The one-way propagation delay of each packet.
    pub delay: Duration,
    pub jitter: Jitter,
    pub disturbance: Disturbance,
    /// Loss before the queue, of packets that take no share of the rate.
    pub before: Loss,
    /// Loss behind the queue, of packets that took their share of the rate.
    pub after: Loss,
    /// An ECT packet that finds more bytes waiting is marked CE.
    pub ecn_bytes: Option<usize>,
}

impl Parameters {
    /// No rate, no delay, no loss.
    pub const OPEN: Self = Self {
        rate_bits: None,
        queue_bytes: usize::MAX,
        delay: Duration::ZERO,
        jitter: Jitter::None,
        disturbance: Disturbance { duplicated_ppm: 0, corrupted_ppm: 0 },
        before: Loss { random_ppm: 0, bursts: None },
        after: Loss { random_ppm: 0, bursts: None },
        ecn_bytes: None,
    };
}

/// Bytes that `rate_bits` carries in `time`: the size of a queue that is given as a time.
#[must_use]
pub fn bytes_at(rate_bits: u64, time: Duration) -> usize {
    let bytes = u128::from(rate_bits) * time.as_nanos() / 8_000_000_000;
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// An IP packet on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<T> {
    /// The length of the packet in bytes, IP header included.
    pub bytes: usize,
    /// TOS or traffic class byte; its ECN bits become CE where the packet is marked.
    pub tos: u8,
    /// The content that the caller attaches to the packet.
    pub content: T,
    /// From this number the receiver picks the bit that has changed on the way; `None` for an intact packet.
    pub damage: Option<u32>,
}

impl<T> Packet<T> {
    /// An intact packet.
    pub fn new(bytes: usize, tos: u8, content: T) -> Self {
        Self { bytes, tos, content, damage: None }
    }
}

/// Changes the bit of `bytes` that [`Packet::damage`] picks.
pub fn flip(bytes: &mut [u8], damage: u32) {
    if let Some(bit) = (damage as usize).checked_rem(8 * bytes.len()) {
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Packets by their fate. Packets that came, or were duplicated, are passed, lost, dropped, or still [held](Bottleneck::held).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that arrived at the bottleneck, lost ones included.
    pub came: u64,
    /// Bytes of the packets that arrived at the bottleneck, IP headers included.
    pub came_bytes: u64,
    /// Packets handed to the far side.
    pub passed: u64,
    /// Bytes of the packets handed to the far side, IP headers included.
    pub passed_bytes: u64,
    /// Packets lost independently of each other.
    pub lost_random: u64,
    /// Packets lost in bursts, before or behind the queue.
    pub lost_burst: u64,
    /// Packets that found the queue full.
    pub tail_dropped: u64,
    /// Second copies of packets.
    pub duplicated: u64,
    /// Packets that were damaged, their copies included.
    pub corrupted: u64,
    /// Packets that arrived after one that came later.
    pub overtaken: u64,
    /// ECT packets marked CE because more than [`Parameters::ecn_bytes`] waited.
    pub marked: u64,
    /// Packets among the passed ones that the far side did not take, which no parameter asks for.
    pub refused: u64,
    /// The most bytes that ever waited.
    pub most_queued_bytes: usize,
}

impl Counts {
    /// Packets lost by `before` and `after`.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost_random + self.lost_burst
    }
}

/// A source of losses at one place.
#[derive(Debug)]
struct Losses {
    loss: Loss,
    is_bad: bool,
    rng: StdRng,
}

impl Losses {
    fn new(loss: Loss, seed: u64) -> Self {
        Self { loss, is_bad: false, rng: StdRng::seed_from_u64(seed) }
    }

    /// Draws for the next packet; true if it goes on.
    fn spare(&mut self, counts: &mut Counts) -> bool {
        if self.is_in_burst() {
            counts.lost_burst += 1;
            return false;
        }
        let is_lost = self.happens(self.loss.random_ppm);
        counts.lost_random += u64::from(is_lost);
        !is_lost
    }

    fn is_in_burst(&mut self) -> bool {
        let Some(gilbert) = self.loss.bursts else { return false };
        let turn_ppm = if self.is_bad { gilbert.to_good_ppm } else { gilbert.to_bad_ppm };
        self.is_bad ^= self.happens(turn_ppm);
        self.happens(if self.is_bad { gilbert.bad_loss_ppm } else { gilbert.good_loss_ppm })
    }

    fn happens(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.rng.random_range(0..1_000_000) < ppm
    }
}

/// A packet with the time at which its present stage ends.
#[derive(Debug)]
struct Timed<T> {
    ends: Instant,
    packet: Packet<T>,
}

/// One direction of a path with a bottleneck.
#[derive(Debug)]
pub struct Bottleneck<T> {
    parameters: Parameters,
    before: Losses,
    after: Losses,
    queue: VecDeque<Packet<T>>,
    queued_bytes: usize,
    sending: Option<Timed<T>>,
    /// What transmissions so far took beyond whole nanoseconds, in nanoseconds times the rate.
    remainder: u128,
    disturbed: StdRng,
    /// By the time of arrival, and by the order in which they left the bottleneck.
    propagating: BTreeMap<(Instant, u64), Packet<T>>,
    /// Packets that left the bottleneck so far.
    left: u64,
    /// The place of the newest packet that was handed over, in the order in which they left.
    newest: u64,
    last_arrival: Option<Instant>,
    /// What became of the packets so far; the owner counts those that the receiver refused.
    pub counts: Counts,
}

impl<T: Clone> Bottleneck<T> {
    /// An empty one; losses come from `seed`.
    #[must_use]
    pub fn new(parameters: Parameters, seed: u64) -> Self {
        Self {
            parameters,
            before: Losses::new(parameters.before, seed),
            after: Losses::new(parameters.after, seed ^ AFTER),
            queue: VecDeque::new(),
            queued_bytes: 0,
            sending: None,
            remainder: 0,
            disturbed: StdRng::seed_from_u64(seed ^ DISTURBANCE),
            propagating: BTreeMap::new(),
            left: 0,
            newest: 0,
            last_arrival: None,
            counts: Counts::default(),
        }
    }

    /// Changes the parameters; what waits or is under way stays, and the packet in transmission ends as it began.
    pub fn set(&mut self, now: Instant, parameters: Parameters) {
        self.advance(now);
        self.parameters = parameters;
        self.before.loss = parameters.before;
        self.after.loss = parameters.after;
        self.remainder = 0;
    }

    /// Takes a packet; false if it was lost or dropped at once.
    pub fn enqueue(&mut self, now: Instant, mut packet: Packet<T>) -> bool {
        self.advance(now);
        self.counts.came += 1;
        self.counts.came_bytes += packet.bytes as u64;
        if !self.before.spare(&mut self.counts) {
            return false;
        }
        let is_waiting = self.sending.is_some();
        if is_waiting && self.queued_bytes.saturating_add(packet.bytes) > self.parameters.queue_bytes {
            self.counts.tail_dropped += 1;
            return false;
        }
        let is_congested = self.parameters.ecn_bytes.is_some_and(|bytes| self.queued_bytes > bytes);
        if is_congested && packet.tos & CE != 0 {
            packet.tos |= CE;
            self.counts.marked += 1;
        }
        if is_waiting {
            self.queued_bytes += packet.bytes;
            self.counts.most_queued_bytes = self.counts.most_queued_bytes.max(self.queued_bytes);
            self.queue.push_back(packet);
        } else {
            self.send(now, packet);
            self.advance(now);
        }
        true
    }

    /// When [`Bottleneck::pop`] may next have a packet.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let arrival = self.propagating.first_key_value().map(|(&(at, _), _)| at);
        let sending = self.sending.as_ref();
        match self.parameters.jitter {
            Jitter::None => arrival.or_else(|| sending.map(|timed| self.arrival(timed.ends))),
            // What is in transmission may overtake what has left: its delay is drawn then.
            Jitter::Uniform(_) | Jitter::Normal(_) => {
                arrival.into_iter().chain(sending.map(|timed| timed.ends)).min()
            }
        }
    }

    /// The next packet that has arrived at the far side by `now`.
    pub fn pop(&mut self, now: Instant) -> Option<Packet<T>> {
        self.advance(now);
        let arrived = self.propagating.first_entry().filter(|first| first.key().0 <= now)?;
        let ((_, place), packet) = arrived.remove_entry();
        self.counts.overtaken += u64::from(place < self.newest);
        self.newest = self.newest.max(place);
        self.counts.passed += 1;
        self.counts.passed_bytes += packet.bytes as u64;
        Some(packet)
    }

    /// The bytes that wait now.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Packets inside: waiting, in transmission, propagating.
    #[must_use]
    pub fn held(&self) -> usize {
        self.queue.len() + usize::from(self.sending.is_some()) + self.propagating.len()
    }

    /// Ends the transmissions that end by `now`: [`Bottleneck::next`] is exact then.
    pub fn advance(&mut self, now: Instant) {
        while let Some(Timed { ends, packet }) = self.sending.take_if(|sending| sending.ends <= now) {
            if self.after.spare(&mut self.counts) {
                self.leave(ends, packet);
            }
            if let Some(next) = self.queue.pop_front() {
                self.queued_bytes -= next.bytes;
                self.send(ends, next);
            }
        }
    }

    /// Has a packet propagate whose transmission ended at `sent`.
    fn leave(&mut self, sent: Instant, mut packet: Packet<T>) {
        let Disturbance { duplicated_ppm, corrupted_ppm } = self.parameters.disturbance;
        if corrupted_ppm > 0 && self.disturbed.random_range(0..1_000_000) < corrupted_ppm {
            packet.damage = Some(self.disturbed.random());
            self.counts.corrupted += 1;
        }
        if duplicated_ppm > 0 && self.disturbed.random_range(0..1_000_000) < duplicated_ppm {
            self.counts.duplicated += 1;
            self.counts.corrupted += u64::from(packet.damage.is_some());
            self.propagate(sent, packet.clone());
        }
        self.propagate(sent, packet);
    }

    fn propagate(&mut self, sent: Instant, packet: Packet<T>) {
        let arrival = match self.deviation() {
            None => self.arrival(sent),
            Some(deviation) => {
                let delay = self.parameters.delay.as_secs_f64() + deviation;
                sent + Duration::from_secs_f64(delay.max(0.0))
            }
        };
        self.last_arrival = Some(arrival);
        self.left += 1;
        self.propagating.insert((arrival, self.left), packet);
    }

    /// Draws by how many seconds the delay of the next packet deviates; `None` without jitter.
    fn deviation(&mut self) -> Option<f64> {
        match self.parameters.jitter {
            Jitter::None => None,
            Jitter::Uniform(most) => Some(most.as_secs_f64() * (2.0 * self.disturbed.random::<f64>() - 1.0)),
            Jitter::Normal(deviation) => {
                // Box and Muller, from two uniform numbers of which the first is not 0.
                let [first, second] = [1.0 - self.disturbed.random::<f64>(), self.disturbed.random()];
                Some(deviation.as_secs_f64() * (-2.0 * first.ln()).sqrt() * (TAU * second).cos())
            }
        }
    }

    fn send(&mut self, begins: Instant, packet: Packet<T>) {
        let ends = match self.parameters.rate_bits {
            None => begins,
            Some(rate) => {
                let (rate, bits) = (u128::from(rate.max(1)), packet.bytes as u128 * 8);
                let needed = bits * 1_000_000_000 + self.remainder;
                self.remainder = needed % rate;
                begins + Duration::from_nanos(u64::try_from(needed / rate).unwrap_or(u64::MAX))
            }
        };
        self.sending = Some(Timed { ends, packet });
    }

    /// When a packet arrives whose transmission ends at `sent`: not before an earlier one, even if the delay has shrunk.
    fn arrival(&self, sent: Instant) -> Instant {
        let arrival = sent + self.parameters.delay;
        self.last_arrival.map_or(arrival, |last| last.max(arrival))
    }
}

#[cfg(test)]
#[path = "bottleneck_tests.rs"]
mod tests;

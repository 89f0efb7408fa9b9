//! When to dial a peer, and where.
//!
//! ```text
//!   round    begins every second while datagrams wait, and for the first few, else ever more rarely; takes the next endpoint
//!            lookup ──► first address ── 250 ms ──► first address of the other family
//!                └─ no answer for half a second: what the lookup before said, else the next endpoint
//!   attempt  lives beside the others, at most four; the first that becomes the session ends those without a
//!            complete handshake, and the far end the rest: it keeps the one begun last
//! ```
//!
//! A listener may be too old for a ClientHello in two datagrams, which the hybrid key exchange needs, and does not answer one. So
//! after two rounds without an answer some attempts with it have another beside them, with X25519 alone and marked as a fallback: a
//! newer listener refuses those. What succeeded last is tried from the first round of the next time.
//!
//! Each round looks its endpoint up anew, so a name that moved is found; each takes addresses that the rounds before have
//! not, so a dead one is left behind. After a success the order begins anew with the first endpoint.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    time::{Duration, Instant},
};

use gate::identity::Endpoint;
use net::Token;
use quinn_proto::ConnectionHandle;
use rand::{Rng, RngExt};

/// Attempts that may be unanswered at once.
const MAX_ATTEMPTS: usize = 4;

/// Fallbacks beside them: one for each address family.
const MAX_FALLBACKS: usize = 2;

/// The interval between rounds of dialling while traffic waits.
const BUSY_INTERVAL: Duration = Duration::from_secs(1);

/// Rounds after which the interval begins to grow without traffic: some 3 s, within which a peer that was restarted is back. One that
/// comes back to a thousand diallers cannot answer each of them at once.
const STEADY_ROUNDS: usize = 4;

/// The longest interval between rounds of dialling without traffic.
pub const IDLE_INTERVAL: Duration = Duration::from_secs(15);

/// After so many rounds without an answer, attempts have fallbacks beside them.
const SILENT_ROUNDS: usize = 2;

/// Then every fourth round has them: a newer listener, which has just been restarted perhaps, opens and refuses each of them.
const ROUNDS_BETWEEN: usize = 4;

/// An address is dialled by X25519 alone so long after the better attempt, which is ahead of it on every path that carries both.
const FALLBACK_DELAY: Duration = Duration::from_millis(250);

/// An address of the other family is dialled so long after the first (RFC 8305 §8: the connection attempt delay).
const FAMILY_DELAY: Duration = Duration::from_millis(250);

/// A lookup that takes longer than this is not waited for; its answer is used when it comes. Healthy resolvers answer within tens
/// of milliseconds from their cache, and otherwise within some hundred.
const LOOKUP_PATIENCE: Duration = Duration::from_millis(500);

/// A lookup that has not been answered after this long never will be: the C library gives up after 10 to 30 s.
const LOOKUP_LIMIT: Duration = Duration::from_secs(30);

/// The next step to reach a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Look up this endpoint, then report the token: [`Dialler::looks_up`].
    LookUp(Endpoint),
    Dial(SocketAddr),
    /// Dial this address again, by X25519 alone.
    FallBack(SocketAddr),
}

#[derive(Debug, Default)]
pub struct Dialler {
    targets: Vec<Target>,
    /// The number of rounds since the last success; it chooses the endpoint.
    turn: usize,
    /// The number of endpoints in a row that had no address to dial.
    skipped: usize,
    interval: Duration,
    /// The earliest time of the next round; none if there is nothing to dial.
    next: Option<Instant>,
    /// The time at which the last round began.
    last: Option<Instant>,
    current: Round,
    /// When another address of this round's target is dialled.
    second: Option<Instant>,
    /// The addresses of this round that are dialled again by X25519 alone, and when.
    fallbacks: VecDeque<(Instant, SocketAddr)>,
    /// Whether the last session began with a fallback.
    fell_back: bool,
    /// Whether the configuration allows it.
    may_fall_back: bool,
    /// Until when the lookup of this round's target is waited for.
    patience: Option<Instant>,
    attempts: Vec<Attempt>,
    /// The lines on which each address is dialled; 0 counts as one.
    lines: usize,
    /// The tokens of lookups that nobody waits for any more.
    abandoned: Vec<Token>,
}

/// An attempt that is unanswered.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    handle: ConnectionHandle,
    fallback: bool,
}

/// The round of a dialler that is under way.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    /// The index of the round's target among the targets.
    target: usize,
    /// The number of addresses of the target that were dialled in the round.
    dialled: usize,
}

/// An endpoint and its known addresses.
#[derive(Debug)]
struct Target {
    endpoint: Endpoint,
    /// The addresses from the last lookup that succeeded, the families in turn.
    known: Vec<SocketAddr>,
    /// The number of addresses taken so far, which chooses the next one.
    cursor: usize,
    /// The lookup that is under way.
    lookup: Option<(Token, Instant)>,
}

impl Target {
    fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, known: Vec::new(), cursor: 0, lookup: None }
    }

    fn is_looked_up_as(&self, token: Token) -> bool {
        self.lookup.is_some_and(|(other, _)| other == token)
    }

    fn next_address(&self) -> Option<SocketAddr> {
        self.known.get(self.cursor % self.known.len().max(1)).copied()
    }

    /// Takes in the addresses from a lookup; true if they are others than before.
    fn learn(&mut self, addresses: &[SocketAddr]) -> bool {
        let same = addresses.len() == self.known.len()
            && addresses.iter().all(|address| self.known.contains(address));
        if !same {
            self.known = interleaved(addresses);
            self.cursor = 0;
        }
        !same
    }
}

impl Dialler {
    /// A dialler that starts at once, or never if there are no endpoints.
    #[must_use]
    pub fn new(endpoints: Vec<Endpoint>, now: Instant) -> Self {
        let next = (!endpoints.is_empty()).then_some(now);
        Self {
            targets: endpoints.into_iter().map(Target::new).collect(),
            interval: BUSY_INTERVAL,
            next,
            ..Self::default()
        }
    }

    /// When [`Dialler::step`] may have something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let next = self.next?;
        let fallback = self.fallbacks.front().map(|(at, _)| *at);
        [self.second, self.patience, fallback].into_iter().flatten().chain([next]).min()
    }

    /// Whether the last session began with a fallback.
    #[must_use]
    pub fn fell_back(&self) -> bool {
        self.fell_back
    }

    /// The endpoint that is looked up under `token`.
    #[must_use]
    pub fn looked_up(&self, token: Token) -> Option<&Endpoint> {
        let mut targets = self.targets.iter();
        targets.find(|target| target.is_looked_up_as(token)).map(|target| &target.endpoint)
    }

    /// Whether a lookup is under way.
    #[must_use]
    pub fn is_resolving(&self) -> bool {
        self.targets.iter().any(|target| target.lookup.is_some())
    }

    /// Whether this is the first round since the peer was lost, and no attempt of it is under way.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.turn <= 1 && self.attempts.is_empty()
    }

    /// Whether attempts have gone unanswered for a whole round.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        self.turn > 1 && !self.attempts.is_empty()
    }

    /// Whether another round has its time.
    #[must_use]
    pub fn is_scheduled(&self) -> bool {
        self.next.is_some()
    }

    /// The next step that is due; to be called until there is none. Without waiting traffic, intervals grow to `slowest`. Falls back
    /// only if it `may_fall_back`.
    pub fn step(
        &mut self,
        traffic_waits: bool,
        slowest: Duration,
        may_fall_back: bool,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Option<Step> {
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        self.may_fall_back = may_fall_back;
        if !may_fall_back {
            self.fallbacks.clear();
        }
        self.next?;
        if due(self.second) {
            self.second = None;
            return self.another_address(now).map(Step::Dial);
        }
        if let Some(&(_, address)) = self.fallbacks.front().filter(|(at, _)| *at <= now) {
            self.fallbacks.pop_front();
            return Some(Step::FallBack(address));
        }
        if due(self.patience) {
            self.patience = None;
            if let Some(address) = self.first_address(self.current.target, now) {
                return Some(Step::Dial(address));
            }
        }
        while due(self.next) {
            self.begin_round(traffic_waits, slowest, now, rng);
            let index = self.current.target;
            let target = self.targets.get_mut(index)?;
            if target.lookup.is_none() {
                self.patience = Some(now + LOOKUP_PATIENCE);
                return Some(Step::LookUp(target.endpoint.clone()));
            }
            if let Some(address) = self.first_address(index, now) {
                return Some(Step::Dial(address));
            }
        }
        None
    }

    fn begin_round(&mut self, traffic_waits: bool, slowest: Duration, now: Instant, rng: &mut impl Rng) {
        if traffic_waits {
            self.interval = BUSY_INTERVAL;
        }
        self.next = Some(now + jittered(self.interval, rng));
        if self.skipped == 0 && self.turn + 1 >= STEADY_ROUNDS {
            self.interval = (self.interval * 2).min(slowest.clamp(BUSY_INTERVAL, IDLE_INTERVAL));
        }
        self.last = Some(now);
        (self.second, self.patience) = (None, None);
        self.fallbacks.clear();
        self.current = Round { target: self.turn % self.targets.len().max(1), dialled: 0 };
        self.turn += 1;
        for target in &mut self.targets {
            let abandoned = target.lookup.take_if(|(_, since)| *since + LOOKUP_LIMIT <= now);
            self.abandoned.extend(abandoned.map(|(token, _)| token));
        }
    }

    /// This round's endpoint has no address to dial: the next one has its turn, unless all have had theirs.
    fn pass(&mut self, now: Instant) {
        self.skipped += 1;
        if self.skipped < self.targets.len() {
            self.next = Some(now);
        } else {
            self.skipped = 0;
        }
    }

    /// The next address of a target, which becomes the round's; one of the other family follows soon. Without an address the next
    /// endpoint has its turn.
    fn first_address(&mut self, index: usize, now: Instant) -> Option<SocketAddr> {
        let target = self.targets.get_mut(index)?;
        let Some(address) = target.next_address() else {
            self.pass(now);
            return None;
        };
        target.cursor += 1;
        let other = target.next_address().is_some_and(|next| next.is_ipv4() != address.is_ipv4());
        self.second = other.then_some(now + FAMILY_DELAY);
        self.current = Round { target: index, dialled: 1 };
        self.dial_again_by_x25519(address, now);
        Some(address)
    }

    /// Plans the fallback beside an attempt, if it is time for one.
    fn dial_again_by_x25519(&mut self, address: SocketAddr, now: Instant) {
        let rounds = self.turn.saturating_sub(SILENT_ROUNDS + 1);
        let due = self.turn > SILENT_ROUNDS && rounds.is_multiple_of(ROUNDS_BETWEEN);
        if self.may_fall_back && (self.fell_back || due) {
            self.fallbacks.push_back((now + FALLBACK_DELAY, address));
        }
    }

    fn another_address(&mut self, now: Instant) -> Option<SocketAddr> {
        let target = self.targets.get_mut(self.current.target)?;
        let address = target.next_address()?;
        target.cursor += 1;
        self.current.dialled += 1;
        self.dial_again_by_x25519(address, now);
        Some(address)
    }

    /// The step asked for a lookup, which runs under this token.
    pub fn looks_up(&mut self, token: Token, now: Instant) {
        match self.targets.get_mut(self.current.target) {
            Some(target) => target.lookup = Some((token, now)),
            None => self.abandoned.push(token),
        }
    }

    /// A lookup was answered; without addresses, it failed. Returns the address to dial now, if there is one.
    ///
    /// The answer to a lookup that was no longer waited for is dialled as well, if the addresses have changed.
    pub fn answered(&mut self, token: Token, addresses: &[SocketAddr], now: Instant) -> Option<SocketAddr> {
        let index = self.targets.iter().position(|target| target.is_looked_up_as(token))?;
        let target = &mut self.targets[index];
        target.lookup = None;
        let moved = !addresses.is_empty() && target.learn(addresses);
        let waited = self.current.target == index && self.patience.take().is_some();
        self.next?;
        if waited || moved { self.first_address(index, now) } else { None }
    }

    /// No attempt could be made at the address of the last step: the next address has its turn now.
    pub fn failed(&mut self, now: Instant) {
        let known = self.targets.get(self.current.target).map_or(0, |target| target.known.len());
        if self.current.dialled < known {
            self.second = Some(now);
        } else if self.attempts.is_empty() {
            self.pass(now);
        }
    }

    /// Traffic waits: the next round begins at most a second after the last one.
    pub fn dial_soon(&mut self, now: Instant) {
        let soon = self.last.map_or(now, |last| (last + BUSY_INTERVAL).max(now));
        if let Some(next) = self.next.as_mut().filter(|next| **next > soon) {
            *next = soon;
        }
    }

    /// Changes the endpoints; `wanted` is true if there is no connection. Returns the attempts to end, if there is nothing to dial
    /// any more.
    pub fn set_endpoints(
        &mut self,
        endpoints: Vec<Endpoint>,
        wanted: bool,
        now: Instant,
    ) -> Vec<ConnectionHandle> {
        if self.targets.iter().map(|target| &target.endpoint).eq(&endpoints) {
            return Vec::new();
        }
        self.forget_lookups();
        self.targets = endpoints.into_iter().map(Target::new).collect();
        self.begin_anew();
        if self.targets.is_empty() {
            return self.stop();
        }
        if wanted {
            self.next = Some(now);
        }
        Vec::new()
    }

    /// The tokens of lookups that nobody waits for any more.
    pub fn take_abandoned(&mut self) -> Vec<Token> {
        std::mem::take(&mut self.abandoned)
    }

    pub fn forget_lookups(&mut self) {
        let lookups = self.targets.iter_mut().filter_map(|target| target.lookup.take());
        self.abandoned.extend(lookups.map(|(token, _)| token));
    }

    /// An attempt has started; returns the oldest one of its kind if it is to make room for it.
    pub fn started(&mut self, handle: ConnectionHandle, fallback: bool) -> Option<ConnectionHandle> {
        self.skipped = 0;
        let same = |attempt: &Attempt| attempt.fallback == fallback;
        let most = if fallback { MAX_FALLBACKS } else { MAX_ATTEMPTS } * self.lines.max(1);
        let full = self.attempts.iter().filter(|attempt| same(attempt)).count() >= most;
        let oldest = self.attempts.iter().position(same).filter(|_| full);
        let surplus = oldest.map(|oldest| self.attempts.remove(oldest).handle);
        self.attempts.push(Attempt { handle, fallback });
        surplus
    }

    /// Each address is dialled on so many lines at once.
    pub fn set_lines(&mut self, lines: usize) {
        self.lines = lines;
    }

    /// An attempt has become the session.
    pub fn succeeded(&mut self, handle: ConnectionHandle) {
        if let Some(attempt) = self.attempts.iter().find(|attempt| attempt.handle == handle) {
            self.fell_back = attempt.fallback;
        }
    }

    /// An attempt ended; returns whether it was one of ours.
    pub fn ended(&mut self, handle: ConnectionHandle) -> bool {
        let before = self.attempts.len();
        self.attempts.retain(|attempt| attempt.handle != handle);
        self.attempts.len() < before
    }

    /// Stops dialling, because there is a connection. Returns the attempts that are under way.
    pub fn stop(&mut self) -> Vec<ConnectionHandle> {
        self.next = None;
        self.begin_anew();
        self.attempts.drain(..).map(|attempt| attempt.handle).collect()
    }

    /// The connection was lost: dials again after `delay` or, without one, after a random moment, so that not both ends dial at once.
    pub fn restart(&mut self, delay: Option<Duration>, now: Instant, rng: &mut impl Rng) {
        if !self.targets.is_empty() {
            self.begin_anew();
            self.next = Some(now + delay.unwrap_or_else(|| jittered(BUSY_INTERVAL, rng)));
        }
    }

    /// Dials beside a connection, from `at` on: first the endpoint after the one to which the address `here` belongs.
    pub fn restart_elsewhere(&mut self, here: Option<SocketAddr>, at: Instant) {
        if self.targets.is_empty() {
            return;
        }
        self.begin_anew();
        let leads_here = |target: &Target| here.is_some_and(|here| target.known.contains(&here));
        self.turn = self.targets.iter().position(leads_here).map_or(0, |index| index + 1);
        self.next = Some(at);
    }

    fn begin_anew(&mut self) {
        (self.interval, self.turn, self.skipped) = (BUSY_INTERVAL, 0, 0);
        (self.second, self.patience, self.last) = (None, None, None);
        self.fallbacks.clear();
        for target in &mut self.targets {
            target.cursor = 0;
        }
    }
}

/// The families in turn, each in its order, beginning with that of the first (RFC 8305 §4).
fn interleaved(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let first_is_v4 = addresses.first().is_some_and(SocketAddr::is_ipv4);
    let of = |v4: bool| addresses.iter().filter(move |address| address.is_ipv4() == v4).copied();
    let (mut one, mut other) = (of(first_is_v4), of(!first_is_v4));
    let mut mixed = Vec::with_capacity(addresses.len());
    while mixed.len() < addresses.len() {
        mixed.extend(one.next());
        mixed.extend(other.next());
    }
    mixed
}

/// Between half and all of `interval`.
fn jittered(interval: Duration, rng: &mut impl Rng) -> Duration {
    interval.mul_f64(rng.random_range(0.5..1.0))
}

#[cfg(test)]
mod tests;

//! Why handshakes of those who know our public key are refused: for the log, `status` and metrics of this end. The other
//! end is told nothing.

use std::{
    collections::VecDeque,
    mem::{Discriminant, discriminant},
    net::{IpAddr, SocketAddr},
    sync::Mutex,
    time::{Duration, Instant},
};

use base::{
    panics::{Held, lock},
    throttle::Throttle,
};

use crate::{Step, identity::PublicKey, initial::HelloError, knock::KnockError, retry::RetryError};

/// The number of refusals that are remembered.
const REMEMBERED: usize = 16;

/// A fallback is worth a word only if another follows, so long after it and before the other: a client that got no answer for two
/// seconds tries one, as it does while this agent starts, drains or has not been told of its key; one whose better handshakes never
/// get here tries one each four rounds.
const FALLBACK_REPEATS: std::ops::Range<Duration> = Duration::from_secs(3)..Duration::from_secs(120);

/// The seconds for which a client sends one knock again, at most: of one clock, the distance differs by so much.
const SENT_AGAIN: u64 = 20;

/// Between two lines about refusals in the log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The reason why a handshake was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// A Retry token that does not hold.
    #[error("its Retry token does not hold: {0}")]
    RetryToken(RetryError),
    /// A destination connection ID that QUIC does not allow in a first packet: shorter than eight bytes.
    #[error("its connection ID has fewer than eight bytes")]
    ConnectionId,
    /// The knock within a Retry token was used.
    #[error("its knock was used before")]
    Repeated,
    /// More is not spent on such a source.
    #[error("too many handshakes from there")]
    Budget,
    /// The knock does not open: it is damaged, or meant for another key.
    #[error("its knock does not open: {0}")]
    Knock(KnockError),
    /// The client's clock is ahead of ours by this much.
    #[error("its clock is {} s {} ours", ahead.unsigned_abs(), if *ahead < 0 { "behind" } else { "ahead of" })]
    Clock {
        /// Seconds; negative if it is behind.
        ahead: i64,
    },
    /// The knock is older than this process, which does not know the knocks that were used before it started.
    #[error("its knock is older than this process")]
    BeforeStart,
    /// The client's key is not on the allowlist; `None` if the whole key is not known.
    #[error("its key {}is not on the allowlist", .0.map(|key| format!("{key} ")).unwrap_or_default())]
    Key(Option<PublicKey>),
    /// The ClientHello of the packet cannot be read.
    #[error("its ClientHello cannot be read: {0}")]
    Hello(HelloError),
    /// The knock is about another ClientHello.
    #[error("its knock is about another ClientHello")]
    OtherHello,
    /// The client falls back to X25519 alone, though both ends can do better.
    #[error(
        "it falls back to X25519 alone: its ClientHellos in two datagrams do not get here, or one does not"
    )]
    Fallback,
    /// The client offers X25519 alone, and the hybrid key exchange is required.
    #[error("it offers X25519 alone, and transport.key_exchange is \"hybrid-required\"")]
    OnlyX25519,
    /// Too many ClientHellos wait for their other datagram.
    #[error("too many ClientHellos are incomplete")]
    Partials,
    /// No further token can be remembered.
    #[error("no more knocks can be remembered")]
    Full,
    /// As many handshakes are under way as the limit allows.
    #[error("too many handshakes are under way")]
    Busy,
    /// The client is a known peer that broke the protocol, and has to wait.
    #[error("it broke the protocol a moment ago, and has to wait")]
    Paused,
    /// TLS: a certificate of another key than the one that knocked, or of none.
    #[error("its certificate is not of the key that knocked")]
    Certificate,
    /// The client did not prove that it holds its key.
    #[error("it did not prove that it holds its key")]
    Possession,
    /// As many peers of open mode are connected as the limit allows.
    #[error("there are as many peers of open mode as there may be")]
    OpenPeers,
}

impl Why {
    /// The step of the gate that refused the handshake.
    #[must_use]
    pub fn step(&self) -> Step {
        match self {
            Self::RetryToken(_) => Step::RetryToken,
            Self::ConnectionId | Self::Knock(_) => Step::Knock,
            Self::Repeated => Step::Used,
            Self::Budget => Step::Budget,
            Self::Clock { .. } | Self::BeforeStart => Step::Clock,
            Self::Key(_) | Self::Certificate | Self::Possession | Self::OpenPeers => Step::Key,
            Self::Busy | Self::Paused => Step::Budget,
            Self::Hello(HelloError::Abandoned) => Step::Abandoned,
            Self::Hello(_) | Self::OtherHello => Step::Hello,
            Self::Fallback | Self::OnlyX25519 => Step::KeyExchange,
            Self::Full | Self::Partials => Step::Full,
        }
    }

    /// Whether it is the same condition, as an operator sees it.
    fn is_same_condition(&self, other: &Self) -> bool {
        match (self, other) {
            // A packet is sent again with the knock that it has, which ages meanwhile.
            (Self::Clock { ahead }, Self::Clock { ahead: before }) => ahead.abs_diff(*before) <= SENT_AGAIN,
            _ => self == other,
        }
    }

    /// Whether it was found after the work of opening the knock was granted.
    pub(super) fn is_budgeted(&self) -> bool {
        match self {
            Self::RetryToken(_) | Self::ConnectionId | Self::Budget | Self::Hello(HelloError::Abandoned) => {
                false
            }
            Self::Repeated
            | Self::Knock(_)
            | Self::Clock { .. }
            | Self::BeforeStart
            | Self::Key(_)
            | Self::Hello(_)
            | Self::OtherHello
            | Self::Fallback
            | Self::OnlyX25519
            | Self::Partials
            | Self::Full
            | Self::Busy
            | Self::Paused
            | Self::Certificate
            | Self::Possession
            | Self::OpenPeers => true,
        }
    }

    /// The key that is not allowed, as far as it is known.
    #[must_use]
    pub fn key(&self) -> Option<PublicKey> {
        if let Self::Key(key) = self { *key } else { None }
    }

    /// The steps that an operator can take.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Clock { .. } => {
                "set the clocks of both hosts, e.g. by NTP; access.clock_window is how far they may differ"
            }
            Self::BeforeStart => {
                "none needed: the client knocks anew every second; or set its clock, if it goes on"
            }
            Self::Key(_) => "if it is a peer of yours: culvert peer add NAME KEY",
            Self::Budget => "many handshakes at once: a restart of many peers, or someone who knows the link",
            Self::Knock(_) | Self::ConnectionId | Self::Hello(_) | Self::OtherHello | Self::RetryToken(_) => {
                "is the client of another version, or is something between altering packets?"
            }
            Self::Fallback => {
                "none needed, if it connects now; else something on the way drops datagrams that are more than one of a handshake: \
                 transport.key_exchange = \"x25519\" at the client does without"
            }
            Self::OnlyX25519 => {
                "another key_exchange than \"x25519\" or a newer version at the client, or \"hybrid\" here"
            }
            Self::Partials => "many handshakes at once of which a datagram was lost: is the path overloaded?",
            Self::Repeated => "none needed, unless it goes on: someone repeats packets",
            Self::Busy => "many handshakes at once; limits.handshakes is how many may be under way",
            Self::Certificate => {
                "the client presents a certificate of another key than it knocked with; is it damaged, or hostile?"
            }
            Self::Paused => "see what runs there: the log said why its connection was closed",
            Self::OpenPeers => "raise limits.open_peers, if they are welcome",
            Self::Full => "more handshakes within a quarter of an hour than can be remembered",
            Self::Possession => "the client does not prove that it holds its key; is it of another version?",
        }
    }
}

/// A refused handshake, and those for the same reason from the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// When, the last time; unix seconds.
    pub at: u64,
    /// From where; the address need not be true.
    pub source: SocketAddr,
    /// The reason why it was refused.
    pub why: Why,
}

/// The latest refusals of all workers. Only what was made with our public key gets here, within a budget, so it may lock.
#[derive(Debug)]
pub struct Refusals {
    inside: Mutex<Inside>,
}

/// Packets that were refused at a ceiling, by ceiling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtCeilings {
    /// Too many handshakes were under way.
    pub handshakes: u64,
    /// Too many peers of open mode were connected.
    pub open_peers: u64,
    /// Too many used knocks were remembered.
    pub used_tokens: u64,
}

impl AtCeilings {
    fn count(&mut self, why: Why) {
        match why {
            Why::OpenPeers => self.open_peers += 1,
            Why::Full => self.used_tokens += 1,
            Why::Busy | Why::Partials => self.handshakes += 1,
            Why::RetryToken(_)
            | Why::ConnectionId
            | Why::Repeated
            | Why::Budget
            | Why::Knock(_)
            | Why::Clock { .. }
            | Why::BeforeStart
            | Why::Key(_)
            | Why::Hello(_)
            | Why::OtherHello
            | Why::Fallback
            | Why::OnlyX25519
            | Why::Paused
            | Why::Certificate
            | Why::Possession => {}
        }
    }
}

#[derive(Debug)]
struct Inside {
    /// Each with the packets refused for the same reason. A client repeats its first one, and dials anew every second.
    latest: VecDeque<(Refusal, u64)>,
    /// A throttle for each kind of reason, so that none hides another.
    logs: Vec<(Discriminant<Why>, Throttle)>,
    at_ceilings: AtCeilings,
    /// The first fallbacks of addresses, which may be the last.
    fallbacks: VecDeque<(IpAddr, Instant)>,
    /// The last time that an address was refused because its key is not on the allowlist.
    unknown_keys: VecDeque<(IpAddr, Instant)>,
    drains: bool,
}

impl Inside {
    /// Whether a refusal says nothing yet: a fallback that is the first for long, or that follows from something else.
    fn holds_back(&mut self, refusal: &Refusal, now: Instant) -> bool {
        let from = refusal.source.ip();
        match refusal.why {
            Why::Fallback => {}
            Why::Key(_) => {
                note(&mut self.unknown_keys, from, now);
                return false;
            }
            Why::RetryToken(_)
            | Why::ConnectionId
            | Why::Repeated
            | Why::Budget
            | Why::Knock(_)
            | Why::Clock { .. }
            | Why::BeforeStart
            | Why::Hello(_)
            | Why::OtherHello
            | Why::OnlyX25519
            | Why::Partials
            | Why::Full
            | Why::Busy
            | Why::Paused
            | Why::Certificate
            | Why::Possession
            | Why::OpenPeers => return false,
        }
        let since = |list: &VecDeque<(IpAddr, Instant)>| {
            let found = list.iter().find(|(ip, _)| *ip == from);
            found.map(|(_, at)| now.saturating_duration_since(*at))
        };
        let was_unknown = since(&self.unknown_keys).is_some_and(|since| since < FALLBACK_REPEATS.end);
        if self.drains || was_unknown {
            return true;
        }
        match since(&self.fallbacks) {
            Some(since) if FALLBACK_REPEATS.contains(&since) => false,
            Some(since) if since < FALLBACK_REPEATS.start => true,
            Some(_) | None => {
                note(&mut self.fallbacks, from, now);
                true
            }
        }
    }
}

/// Notes `now` for an address, in a list that keeps the latest.
fn note(list: &mut VecDeque<(IpAddr, Instant)>, from: IpAddr, now: Instant) {
    list.retain(|(ip, _)| *ip != from);
    if list.len() == REMEMBERED {
        list.pop_front();
    }
    list.push_back((from, now));
}

impl Default for Refusals {
    fn default() -> Self {
        let latest = VecDeque::with_capacity(REMEMBERED);
        Self {
            inside: Mutex::new(Inside {
                latest,
                logs: Vec::new(),
                at_ceilings: AtCeilings::default(),
                fallbacks: VecDeque::new(),
                unknown_keys: VecDeque::new(),
                drains: false,
            }),
        }
    }
}

impl Refusals {
    /// Notes a refusal, and says so in the log unless that was just done.
    pub fn note(&self, refusal: Refusal, now: Instant) {
        // That of a client over TCP has the form of IPv6.
        let source = match refusal.source.ip().to_canonical() {
            ip @ IpAddr::V4(_) => SocketAddr::new(ip, refusal.source.port()),
            IpAddr::V6(_) => refusal.source,
        };
        let refusal = Refusal { source, ..refusal };
        let mut inside = self.lock();
        if inside.holds_back(&refusal, now) {
            return;
        }
        let same = |(known, _): &(Refusal, u64)| {
            known.source.ip() == refusal.source.ip() && known.why.is_same_condition(&refusal.why)
        };
        let before = inside.latest.iter().position(same);
        let before = before.and_then(|index| inside.latest.remove(index)).map_or(0, |(_, count)| count);
        if inside.latest.len() == REMEMBERED {
            inside.latest.pop_front();
        }
        inside.latest.push_back((refusal, before + 1));
        inside.at_ceilings.count(refusal.why);
        let kind = discriminant(&refusal.why);
        let index = inside.logs.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            inside.logs.push((kind, Throttle::new(LOG_INTERVAL)));
            inside.logs.len() - 1
        });
        let suppressed = inside.logs[index].1.allow(now);
        drop(inside);
        if let Some(suppressed) = suppressed {
            let Refusal { source, why, .. } = refusal;
            let suppressed = base::throttle::counted(suppressed);
            tracing::warn!(%source, suppressed, "handshake refused: {why} (remedy: {})", why.remedy());
        }
    }

    /// This agent drains: clients that it does not answer any more fall back.
    pub fn drain(&self) {
        self.lock().drains = true;
    }

    /// The latest ones, oldest first, and how many packets each stands for.
    #[must_use]
    pub fn latest(&self) -> Vec<(Refusal, u64)> {
        self.lock().latest.iter().copied().collect()
    }

    /// Packets refused at ceilings so far.
    #[must_use]
    pub fn at_ceilings(&self) -> AtCeilings {
        self.lock().at_ceilings
    }

    fn lock(&self) -> Held<'_, Inside> {
        lock(&self.inside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};

    #[test]
    fn what_repeats_is_counted_and_the_latest_stay() {
        let (refusals, now) = (Refusals::default(), ManualClock::default().now());
        let refusal =
            |at, last, port, why| Refusal { at, source: SocketAddr::from(([192, 0, 2, last], port)), why };
        for second in 0..10 {
            refusals.note(refusal(second, 1, 1000 + second as u16, Why::Budget), now);
            refusals.note(refusal(second, 2, 5, Why::Clock { ahead: 100 + second as i64 % 2 }), now);
        }
        let expected =
            [(refusal(9, 1, 1009, Why::Budget), 10), (refusal(9, 2, 5, Why::Clock { ahead: 101 }), 10)];
        assert_eq!(refusals.latest(), expected);
        for last in 10..40 {
            refusals.note(refusal(20, last, 1, Why::Full), now);
        }
        assert_eq!(refusals.latest().len(), REMEMBERED);
        assert_eq!(refusals.latest().last(), Some(&(refusal(20, 39, 1, Why::Full), 1)));
    }

    /// Each reason, and the ceiling at which it is counted: handshakes, peers of open mode, used tokens.
    const REASONS: [(Why, [u64; 3]); 19] = [
        (Why::RetryToken(RetryError::Age), [0; 3]),
        (Why::ConnectionId, [0; 3]),
        (Why::Repeated, [0; 3]),
        (Why::Budget, [0; 3]),
        (Why::Knock(KnockError::Noise), [0; 3]),
        (Why::Clock { ahead: 100 }, [0; 3]),
        (Why::BeforeStart, [0; 3]),
        (Why::Key(None), [0; 3]),
        (Why::Hello(HelloError::Nothing), [0; 3]),
        (Why::OtherHello, [0; 3]),
        (Why::Fallback, [0; 3]),
        (Why::OnlyX25519, [0; 3]),
        (Why::Partials, [1, 0, 0]),
        (Why::Full, [0, 0, 1]),
        (Why::Busy, [1, 0, 0]),
        (Why::Paused, [0; 3]),
        (Why::Certificate, [0; 3]),
        (Why::Possession, [0; 3]),
        (Why::OpenPeers, [0, 1, 0]),
    ];

    #[test]
    fn each_reason_is_its_own_has_a_remedy_and_is_counted_at_its_ceiling() {
        let now = ManualClock::default().now();
        let source = SocketAddr::from(([192, 0, 2, 1], 1));
        for (why, ceiling) in REASONS {
            let refusals = Refusals::default();
            // Only what follows the first fallback counts.
            let now = now + FALLBACK_REPEATS.start;
            refusals.lock().fallbacks.push_back((source.ip(), now - FALLBACK_REPEATS.start));
            for times in 1..=2 {
                refusals.note(Refusal { at: 0, source, why }, now);
                let AtCeilings { handshakes, open_peers, used_tokens } = refusals.at_ceilings();
                assert_eq!([handshakes, open_peers, used_tokens], ceiling.map(|each| each * times), "{why}");
            }
            assert_eq!(refusals.lock().logs.len(), 1, "{why}");
            assert!(why.remedy().contains(' '), "{why}: {}", why.remedy());
            let same = REASONS.iter().filter(|(other, _)| why.is_same_condition(other)).count();
            assert_eq!(same, 1, "{why}");
        }
        let [near, far] = [100, 101].map(|ahead| Why::Clock { ahead: ahead + SENT_AGAIN as i64 });
        assert!(near.is_same_condition(&Why::Clock { ahead: 100 }), "a knock that is sent again ages");
        assert!(!far.is_same_condition(&Why::Clock { ahead: 100 }));
    }

    #[test]
    fn no_reason_hides_another_in_the_log() {
        let (refusals, now) = (Refusals::default(), ManualClock::default().now());
        for (round, (why, _)) in REASONS.into_iter().chain(REASONS).enumerate() {
            // A fallback says nothing beside a key that is not allowed, and nothing at first.
            let last = if why == Why::Fallback { 2 } else { 1 };
            let now = now + FALLBACK_REPEATS.start * u32::from(round >= REASONS.len());
            refusals.note(Refusal { at: 0, source: SocketAddr::from(([192, 0, 2, last], 1)), why }, now);
        }
        let kinds: Vec<_> = refusals.lock().logs.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds.len(), REASONS.len());
        assert!(REASONS.iter().all(|(why, _)| kinds.contains(&discriminant(why))));
    }

    #[test]
    fn a_fallback_is_told_when_it_repeats_but_not_beside_a_refused_key_or_in_a_drain() {
        let (refusals, begin) = (Refusals::default(), ManualClock::default().now());
        let told = |last: u8, why, seconds: u64| {
            let source = SocketAddr::from(([192, 0, 2, last], 1));
            refusals.note(Refusal { at: 0, source, why }, begin + Duration::from_secs(seconds));
            let is_it = |(refusal, _): &(Refusal, u64)| refusal.why == why && refusal.source == source;
            refusals.latest().iter().any(is_it)
        };
        assert!(!told(1, Why::Fallback, 0) && !told(1, Why::Fallback, 2), "the packets of one attempt");
        assert!(!told(2, Why::Fallback, 200) && !told(1, Why::Fallback, 300), "long after the first");
        assert!(told(1, Why::Fallback, 304));
        assert!(told(3, Why::Key(None), 300));
        assert!(!told(3, Why::Fallback, 301) && !told(3, Why::Fallback, 306), "its key was added meanwhile");
        refusals.drain();
        assert!(!told(4, Why::Fallback, 310) && !told(4, Why::Fallback, 316));
    }

    #[test]
    fn only_a_key_that_is_not_allowed_is_named() {
        let key = PublicKey([7; 32]);
        assert_eq!(Why::Key(Some(key)).key(), Some(key));
        assert!(REASONS.iter().all(|(why, _)| why.key().is_none()));
    }
}

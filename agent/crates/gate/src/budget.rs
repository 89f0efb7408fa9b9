//! How many Diffie-Hellman operations a worker spends on knocks, in total and for one source (pure).
//!
//! Only those who know our public key come so far; whoever has it can make knocks that cost us 83 µs each, from
//! addresses that are not his. So there are two classes with budgets of their own: what a spoofed flood uses up, a
//! client that has shown with a Retry token, or as the client of a stream, that its address is its own does not miss.
//!
//! A source's share is for those who have not proved anything. A knock that opens under the key of a known peer proves that key,
//! whatever becomes of the handshake, and is charged to a share of that peer's own: however many peers are behind one address, they
//! come back as fast as the class allows.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    time::{Duration, Instant},
};

use base::{
    hash::IssuedMap,
    ids::PeerId,
    token_bucket::{Allowance, Bucket, Pace, Rate},
};

/// Knocks that one core opens in a second: 83 µs each for X25519 and AEAD, measured on an AMD EPYC virtual machine.
pub const OPENS_PER_SECOND_AND_CORE: u32 = 12_000;

/// All workers together spend at most a quarter of a core.
pub const MOST_OPENS_PER_SECOND: u32 = OPENS_PER_SECOND_AND_CORE / 4;

/// The least number of knocks that each worker opens per second, however many workers there are: 0.4 % of its core.
pub const LEAST_OPENS_PER_SECOND: u32 = 50;

/// The part of a class that one source prefix may have. Thirty-two prefixes can then use up a class: few enough for
/// an office behind one address, whose hundred agents come back within seconds, and more than one machine has.
const PREFIX_PART: u32 = 32;

/// The least number of knocks per second that a prefix may have, however small its part.
const LEAST_PREFIX_OPENS_PER_SECOND: u32 = 10;

/// The time that a class that was idle may spend at once: an eighth of a second's worth, so that the packets of a worker never
/// wait for more than 16 ms of one class's knocks (1,500 a second, one worker).
const BURST: Duration = Duration::from_millis(125);

/// The time that a prefix that was idle may spend at once, at its own rate. A prefix that was silent for as long is as good as
/// new and can be forgotten.
const PREFIX_BURST: Duration = Duration::from_secs(2);

/// Prefixes of a class in each of the two generations that are remembered.
const MOST_PREFIXES: usize = 4096;

/// The decision whether a knock may be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// The knock may be opened; the operation has been charged.
    Granted,
    /// The class or prefix has used up the budget for addresses that are not validated. Answer with a Retry.
    Retry,
    /// The same for validated addresses: it is dropped, and the client's next attempt tries again.
    Refused,
}

/// The share of a known peer. At once: its dialler has four attempts and two fallbacks under way, repeats each, and closes all but
/// one when that is answered. A second: a new attempt, its fallback, and what they repeat.
pub(crate) const PEER_PACE: Pace = Pace { per_second: 4, at_once: 12 };

/// The budget of one worker for opening knocks.
pub struct Budget {
    /// The origin of the buckets' nanoseconds.
    epoch: Instant,
    unvalidated: Class,
    validated: Class,
    /// What is left of each peer's share; one entry for each slot of the roster.
    peers: IssuedMap<PeerId, Allowance>,
}

impl Budget {
    /// The share of one of `workers` workers, all of it unspent.
    #[must_use]
    pub fn new(workers: u8, now: Instant) -> Self {
        let share = (MOST_OPENS_PER_SECOND / u32::from(workers.max(1))).max(LEAST_OPENS_PER_SECOND);
        Self {
            epoch: now,
            unvalidated: Class::new(share / 2),
            validated: Class::new(share / 2),
            peers: IssuedMap::default(),
        }
    }

    /// Takes one operation for a knock from `source`, whose address was `validated` by a Retry token or not.
    pub fn take(&mut self, source: IpAddr, validated: bool, now: Instant) -> Take {
        // It lasts 584 years.
        let now = now.saturating_duration_since(self.epoch).as_nanos() as u64;
        let (class, otherwise) = if validated {
            (&mut self.validated, Take::Refused)
        } else {
            (&mut self.unvalidated, Take::Retry)
        };
        if class.take(Prefix::of(source), now) { Take::Granted } else { otherwise }
    }

    /// The knock from `source` that was granted last is of a known `peer`, whether it lets the peer in or not: it is charged to the
    /// peer, and to its source only if the peer has used its share up.
    pub fn charge_to_peer(&mut self, peer: PeerId, source: IpAddr, validated: bool, now: Instant) {
        let share = self.peers.entry(peer).or_insert_with(|| Allowance::new(PEER_PACE, now));
        if share.take(1, now) {
            self.give_back(source, validated);
        }
    }

    fn give_back(&mut self, source: IpAddr, validated: bool) {
        let class = if validated { &mut self.validated } else { &mut self.unvalidated };
        class.give_back(Prefix::of(source));
    }
}

/// What one party is: the smallest block that costs something to have.
///
/// One IPv4 address. A /56 of IPv6, which is what a subscriber usually gets (RFC 6177 and RIPE-690 speak of /48 and
/// /56); per /64 he would have 256 budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Prefix(u64);

impl Prefix {
    const IPV6: u64 = 1 << 63;
    const IPV6_BITS: u32 = 56;

    fn of(source: IpAddr) -> Self {
        match source.to_canonical() {
            IpAddr::V4(address) => Self(u64::from(address.to_bits())),
            IpAddr::V6(address) => {
                let bits = address.to_bits() >> (Ipv6Addr::BITS - Self::IPV6_BITS);
                Self(Self::IPV6 | bits as u64)
            }
        }
    }
}

/// The budget of validated or of other addresses.
///
/// Prefixes are remembered in two generations. An operation of a prefix moves it to the newer one; every
/// [`PREFIX_BURST`] the older one is forgotten and the newer one takes its place. A prefix that is forgotten has thus
/// been idle for long enough that its bucket is full, as that of a prefix never heard of. Since only granted
/// operations make entries, the class's own rate keeps a generation below [`MOST_PREFIXES`], and a flood of prefixes
/// cannot make us forget one that has spent its share.
struct Class {
    rate: Rate,
    bucket: Bucket,
    prefix_rate: Rate,
    /// Both maps keep the standard hasher, keyed at random: whoever floods us chooses the addresses.
    newer: HashMap<Prefix, Bucket>,
    older: HashMap<Prefix, Bucket>,
    turned_at: u64,
}

impl Class {
    fn new(per_second: u32) -> Self {
        let prefix_per_second = (per_second / PREFIX_PART).max(LEAST_PREFIX_OPENS_PER_SECOND);
        let rate = Rate::new(per_second, BURST);
        // Neither map grows later: a generation lasts as long as a prefix's burst.
        let prefixes = per_second as usize * PREFIX_BURST.as_secs() as usize + rate.most_at_once() + 1;
        let prefixes = prefixes.min(MOST_PREFIXES);
        Self {
            rate,
            bucket: Bucket::FULL,
            prefix_rate: Rate::new(prefix_per_second, PREFIX_BURST),
            newer: HashMap::with_capacity(prefixes),
            older: HashMap::with_capacity(prefixes),
            turned_at: 0,
        }
    }

    fn take(&mut self, prefix: Prefix, now: u64) -> bool {
        let Some(class_after) = self.bucket.after(&self.rate, now) else { return false };
        let period = PREFIX_BURST.as_nanos() as u64;
        if now.saturating_sub(self.turned_at) >= period || self.newer.len() >= MOST_PREFIXES {
            std::mem::swap(&mut self.newer, &mut self.older);
            self.newer.clear();
            self.turned_at = now;
        }
        let known = self.newer.get(&prefix).or_else(|| self.older.get(&prefix));
        let bucket = known.copied().unwrap_or(Bucket::FULL);
        let Some(prefix_after) = bucket.after(&self.prefix_rate, now) else { return false };
        self.newer.insert(prefix, prefix_after);
        self.bucket = class_after;
        true
    }

    /// Undoes what the last [`Class::take`] did to this prefix.
    fn give_back(&mut self, prefix: Prefix) {
        if let Some(bucket) = self.newer.get_mut(&prefix) {
            *bucket = bucket.with_one_back(&self.prefix_rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;
    use base::clock::{Clock, ManualClock};

    fn v4(number: u32) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + number))
    }

    /// How many of `tries` knocks from `source` are granted at once.
    fn granted(budget: &mut Budget, source: IpAddr, validated: bool, tries: u32, now: Instant) -> u32 {
        (0..tries).map(|_| u32::from(budget.take(source, validated, now) == Take::Granted)).sum()
    }

    #[test]
    fn all_workers_together_spend_a_quarter_of_a_core() {
        for workers in 1..=60u8 {
            let clock = ManualClock::default();
            let mut budget = Budget::new(workers, clock.now());
            let mut spent = 0;
            // A million sources of both classes, for ten seconds.
            for turn in 0..10_000u32 {
                clock.advance(Duration::from_millis(1));
                for number in 0..4 {
                    spent += granted(&mut budget, v4(turn * 4 + number), number % 2 == 0, 1, clock.now());
                }
            }
            let all = spent * u32::from(workers) / 10;
            let least = LEAST_OPENS_PER_SECOND * u32::from(workers);
            let most = MOST_OPENS_PER_SECOND.max(least);
            assert!(all <= most + most / 20, "{workers} workers: {all} a second");
            assert!(all >= most.min(4000) - most / 10, "{workers} workers: {all} a second");
        }
    }

    #[test]
    fn many_workers_still_get_a_little_each() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(255, clock.now());
        let mut spent = 0;
        for number in 0..10_000 {
            clock.advance(Duration::from_millis(1));
            spent += granted(&mut budget, v4(number), true, 1, clock.now());
        }
        assert!((10 * 25..=10 * 25 + 4).contains(&spent), "{spent}");
    }

    #[test]
    fn one_source_gets_its_part_and_no_more() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(1, clock.now());
        let rate = 1500 / PREFIX_PART;
        assert_eq!(granted(&mut budget, v4(1), false, 1000, clock.now()), 2 * rate);
        assert_eq!(budget.take(v4(1), false, clock.now()), Take::Retry);
        clock.advance(Duration::from_secs(1));
        assert_eq!(granted(&mut budget, v4(1), false, 1000, clock.now()), rate);
        assert_eq!(budget.take(v4(2), false, clock.now()), Take::Granted);
    }

    #[test]
    fn peers_behind_one_address_come_back_as_fast_as_all_together() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(1, clock.now());
        let mut waiting: Vec<PeerId> = (0..1000).map(PeerId).collect();
        // An unauthenticated sender that knows our public key is behind the same address, and others are elsewhere.
        for millisecond in 0..3000 {
            waiting.retain(|peer| {
                // As the gate asks: without a token first, and if that is not granted with one.
                let came = [false, true]
                    .into_iter()
                    .find(|validated| budget.take(v4(1), *validated, clock.now()) == Take::Granted);
                if let Some(validated) = came {
                    budget.charge_to_peer(*peer, v4(1), validated, clock.now());
                }
                came.is_none()
            });
            if millisecond % 50 == 0 {
                let of_another = granted(&mut budget, v4(1), false, 1, clock.now());
                assert!(of_another <= 1);
            }
            clock.advance(Duration::from_millis(1));
            if waiting.is_empty() {
                assert!(millisecond < 1000, "{millisecond} ms");
                break;
            }
        }
        assert!(waiting.is_empty(), "{} of 1,000 still wait after 3 s", waiting.len());
    }

    #[test]
    fn attempts_that_peers_repeat_and_give_up_leave_their_sources_share_to_others() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(1, clock.now());
        // As after a restart of the hub: each has six attempts under way, and gives five of them up.
        for peer in 0..100 {
            for _ in 0..11 {
                clock.advance(Duration::from_millis(1));
                assert_eq!(budget.take(v4(1), false, clock.now()), Take::Granted);
                budget.charge_to_peer(PeerId(peer), v4(1), false, clock.now());
            }
        }
        let rate = 1500 / PREFIX_PART;
        assert_eq!(granted(&mut budget, v4(1), false, 1000, clock.now()), 2 * rate);
    }

    #[test]
    fn a_peer_has_a_share_of_its_own_and_unauthenticated_senders_have_none() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(1, clock.now());
        let rate = 1500 / PREFIX_PART;
        let come = |budget: &mut Budget, now| {
            let mut came = 0;
            while budget.take(v4(1), false, now) == Take::Granted {
                budget.charge_to_peer(PeerId(7), v4(1), false, now);
                came += 1;
            }
            came
        };
        assert_eq!(
            come(&mut budget, clock.now()),
            2 * rate + PEER_PACE.at_once,
            "its own beside its source's"
        );
        clock.advance(Duration::from_secs(1));
        assert_eq!(come(&mut budget, clock.now()), rate + PEER_PACE.per_second);
        assert_eq!(budget.take(v4(2), false, clock.now()), Take::Granted, "others have theirs");
    }

    #[test]
    fn a_spoofed_flood_takes_nothing_from_validated_addresses() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(2, clock.now());
        for number in 0..100_000 {
            budget.take(v4(number), false, clock.now());
        }
        assert_eq!(budget.take(v4(1), false, clock.now()), Take::Retry);
        assert_eq!(budget.take(v4(1), true, clock.now()), Take::Granted);
        for number in 0..100_000 {
            budget.take(v4(number), true, clock.now());
        }
        assert_eq!(budget.take(v4(1), true, clock.now()), Take::Refused);
    }

    #[test]
    fn a_subscriber_is_one_address_or_one_56() {
        let prefix = |text: &str| Prefix::of(text.parse().unwrap());
        assert_eq!(prefix("2001:db8:1:200::1"), prefix("2001:db8:1:2ff:ffff::9"));
        assert_ne!(prefix("2001:db8:1:200::1"), prefix("2001:db8:1:300::1"));
        assert_ne!(prefix("192.0.2.1"), prefix("192.0.2.2"));
        assert_eq!(prefix("192.0.2.1"), prefix("::ffff:192.0.2.1"));
        assert_ne!(prefix("0.0.0.1"), prefix("::1"));
        assert_ne!(prefix("0.0.0.1"), prefix("0:0:0:100::1"));
    }

    #[test]
    fn what_is_remembered_is_bounded_and_its_memory_stays() {
        let clock = ManualClock::default();
        let mut budget = Budget::new(1, clock.now());
        let capacity = budget.unvalidated.newer.capacity();
        for number in 0..2_000_000 {
            if number % 20 == 0 {
                clock.advance(Duration::from_micros(700));
            }
            budget.take(v4(number), false, clock.now());
            let class = &budget.unvalidated;
            assert!(class.newer.len() < MOST_PREFIXES);
            assert!(class.newer.capacity() == capacity && class.older.capacity() == capacity);
        }
    }

    /// The same budget with a memory without bounds.
    struct Model {
        buckets: HashMap<Prefix, Bucket>,
        total: Bucket,
    }

    impl Model {
        fn take(&mut self, class: &Class, prefix: Prefix, now: u64) -> bool {
            let bucket = self.buckets.get(&prefix).copied().unwrap_or(Bucket::FULL);
            let total = self.total.after(&class.rate, now);
            let own = bucket.after(&class.prefix_rate, now);
            if let (Some(total), Some(own)) = (total, own) {
                self.total = total;
                self.buckets.insert(prefix, own);
            }
            total.is_some() && own.is_some()
        }
    }

    proptest! {
        /// Forgetting a prefix never gives it more than it would have had.
        #[test]
        fn forgetting_changes_no_answer(
            workers in 1..100u8,
            steps in prop::collection::vec((0..400u64, 0..40u32, 1..200u32, 0..3000u32), 1..200),
        ) {
            let clock = ManualClock::default();
            let mut budget = Budget::new(workers, clock.now());
            let mut model = Model { buckets: HashMap::new(), total: Bucket::FULL };
            for (milliseconds, number, tries, flood) in steps {
                clock.advance(Duration::from_millis(milliseconds));
                let now = clock.elapsed().as_nanos() as u64;
                let sources = (0..tries).map(|_| v4(number)).chain((1000..1000 + flood).map(v4));
                for source in sources {
                    let expected = model.take(&budget.unvalidated, Prefix::of(source), now);
                    let take = budget.take(source, false, clock.now());
                    prop_assert_eq!(take == Take::Granted, expected);
                }
            }
        }
    }
}

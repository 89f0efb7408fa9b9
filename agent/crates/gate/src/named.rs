//! Initials without a knock: which of them name us, so that a web server answers them (pure).
//!
//! The name is in the ClientHello (SNI, RFC 6066 §3), which fills two datagrams for browsers, with the name in either or cut between
//! them. What has come of one is kept for a second, in places that are allocated once; the oldest gives way. Opening Initials has a
//! budget, beyond which they are treated as if nobody were named.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use base::token_bucket::{Allowance, Pace};
use quinn_proto::crypto;
use rand::RngExt as _;

use crate::{
    Gate, OwnKey,
    classify::{Initial, MAX_CID_BYTES},
    initial::{client_hello, server_name},
    knock::{KNOCK_BYTES, MAC_BYTES},
    retry::{self, Carried, RETRY_TOKEN_BYTES, RetryError},
};

/// ClientHellos of unauthenticated senders that are not whole, at all workers together. A place has 3 KiB.
const MOST_PLACES: usize = 1024;

/// How long the rest of one is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Datagrams that are kept of one: two carry it, and a third may repeat what was cut elsewhere.
const KEPT: usize = 2;

/// The longest datagram that is kept, in bytes: more than a path of 1500 carries.
const MOST_DATAGRAM_BYTES: usize = 1536;

/// Datagrams that a worker opens in a second: 5 % of a core, at 4 µs each.
const OPENINGS: Pace = Pace { per_second: 12_500, at_once: 1_250 };

/// What a datagram of an unauthenticated sender is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// It completes a ClientHello that names us; what came of that before is here.
    Ours(Vec<Box<[u8]>>),
    /// More of its ClientHello is to come.
    Waits,
    /// Its ClientHello has another name, or none, or cannot be read; the datagrams that came before are here.
    Other(Vec<Box<[u8]>>),
    /// The budget is used up.
    Unread,
}

/// Who sent it, and to which connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    source: SocketAddr,
    dcid: [u8; MAX_CID_BYTES],
    dcid_bytes: u8,
}

struct Place {
    /// `None`: it is free.
    key: Option<Key>,
    since: Instant,
    lengths: [u16; KEPT],
    bytes: Box<[[u8; MOST_DATAGRAM_BYTES]; KEPT]>,
}

/// The names under which we are a web server, and what unauthenticated senders have sent of their ClientHellos.
pub(crate) struct Strangers {
    names: Vec<String>,
    budget: Allowance,
    /// Places in the order in which they were taken, beginning with `next`, which is the oldest.
    places: Vec<Place>,
    next: usize,
    by_key: HashMap<Key, usize>,
    /// How many places each source has, by its /24 or /56.
    by_prefix: HashMap<IpAddr, usize>,
}

impl Strangers {
    /// Places for one of `workers` workers; `names` are in lowercase.
    pub(crate) fn new(names: Vec<String>, workers: u8, now: Instant) -> Self {
        let place = || Place {
            key: None,
            since: now,
            lengths: [0; KEPT],
            bytes: Box::new([[0; MOST_DATAGRAM_BYTES]; KEPT]),
        };
        let count = MOST_PLACES.div_ceil(usize::from(workers.max(1)));
        Self {
            names,
            budget: Allowance::new(OPENINGS, now),
            places: std::iter::repeat_with(place).take(count).collect(),
            next: 0,
            by_key: HashMap::with_capacity(count),
            by_prefix: HashMap::with_capacity(count),
        }
    }

    pub(crate) fn set_names(&mut self, names: Vec<String>) {
        self.names = names;
    }

    /// Takes what one datagram costs; false if nothing more may be spent.
    pub(crate) fn spend(&mut self, now: Instant) -> bool {
        self.budget.take(1, now)
    }

    /// How many ClientHellos are not whole.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Reads `datagram`, an Initial to `dcid`, with what came before of its ClientHello.
    pub(crate) fn look(
        &mut self,
        crypto: &dyn crypto::ServerConfig,
        datagram: &[u8],
        dcid: &[u8],
        source: SocketAddr,
        now: Instant,
    ) -> Look {
        let mut key = Key { source, dcid: [0; MAX_CID_BYTES], dcid_bytes: dcid.len() as u8 };
        let Some(place) = key.dcid.get_mut(..dcid.len()) else { return Look::Other(Vec::new()) };
        place.copy_from_slice(dcid);
        let place = self.by_key.get(&key).copied();
        let kept = place.map(|place| &self.places[place]);
        let kept = kept.filter(|kept| now.saturating_duration_since(kept.since) < PATIENCE);
        let mut all: Vec<&[u8]> = kept.into_iter().flat_map(Place::datagrams).collect();
        if all.contains(&datagram) {
            return Look::Waits;
        }
        all.push(datagram);
        if !self.budget.take(all.len() as u32, now) {
            return Look::Unread;
        }
        let hello = client_hello(crypto, &all);
        let earlier = || all[..all.len() - 1].iter().map(|earlier| Box::from(*earlier)).collect();
        match hello {
            Ok(Some(hello)) => {
                let name = server_name(&hello);
                let ours =
                    name.is_some_and(|name| self.names.iter().any(|own| name.eq_ignore_ascii_case(own)));
                let look = if ours { Look::Ours(earlier()) } else { Look::Other(earlier()) };
                self.forget(&key);
                look
            }
            Ok(None) if all.len() <= KEPT && datagram.len() <= MOST_DATAGRAM_BYTES => {
                let is_known = all.len() > 1;
                self.keep(key, datagram, is_known, now);
                Look::Waits
            }
            Ok(None) => Look::Waits,
            Err(_) => {
                let look = Look::Other(earlier());
                self.forget(&key);
                look
            }
        }
    }

    fn keep(&mut self, key: Key, datagram: &[u8], is_known: bool, now: Instant) {
        if let Some(place) = self.by_key.get(&key).filter(|_| is_known) {
            self.places[*place].add(datagram);
            return;
        }
        self.forget(&key);
        let prefix = prefix(key.source.ip());
        let mut index = self.next;
        if self.by_prefix.get(&prefix).is_some_and(|count| *count >= self.places.len() / 8) {
            // The oldest of the same source gives way, wherever it is.
            let count = self.places.len();
            let oldest = (0..count).map(|behind| (self.next + behind) % count).find_map(|place| {
                self.places[place].key.filter(|key| self::prefix(key.source.ip()) == prefix)
            });
            if let Some(oldest) = oldest.and_then(|oldest| self.by_key.get(&oldest)) {
                index = *oldest;
            }
        }
        if index == self.next {
            self.next = (index + 1) % self.places.len();
        }
        if let Some(oldest) = self.places[index].key {
            self.forget(&oldest);
        }
        let place = &mut self.places[index];
        (place.key, place.since, place.lengths) = (Some(key), now, [0; KEPT]);
        place.add(datagram);
        self.by_key.insert(key, index);
        *self.by_prefix.entry(prefix).or_default() += 1;
    }

    fn forget(&mut self, key: &Key) {
        let Some(place) = self.by_key.remove(key) else { return };
        self.places[place].key = None;
        let prefix = prefix(key.source.ip());
        if let Some(count) = self.by_prefix.get_mut(&prefix) {
            *count -= 1;
            if *count == 0 {
                self.by_prefix.remove(&prefix);
            }
        }
    }
}

impl Place {
    fn add(&mut self, datagram: &[u8]) {
        for (length, bytes) in self.lengths.iter_mut().zip(self.bytes.iter_mut()) {
            if *length == 0
                && let Some(bytes) = bytes.get_mut(..datagram.len())
            {
                bytes.copy_from_slice(datagram);
                *length = datagram.len() as u16;
                return;
            }
        }
    }

    fn datagrams(&self) -> impl Iterator<Item = &[u8]> {
        let used = self.lengths.iter().zip(self.bytes.iter()).filter(|(length, _)| **length > 0);
        used.map(|(length, bytes)| &bytes[..usize::from(*length)])
    }
}

/// What a Retry carries in place of a knock.
const NO_KNOCK: [u8; KNOCK_BYTES] = [0; KNOCK_BYTES];

// Who names us answers a Retry with a token of the form of peers', whose mac1 holds for no key: it proves an address and no knowledge.
impl Gate {
    /// Whether the token of `initial` is that of a Retry to who named us, and `source` may use it; `None`: we have made no such token.
    pub(super) fn retried_name(
        &self,
        initial: &Initial<'_>,
        source: SocketAddr,
    ) -> Option<Result<(), RetryError>> {
        if initial.token.len() != RETRY_TOKEN_BYTES {
            return None;
        }
        let unix_seconds = self.parts.clock.unix_seconds();
        match self.parts.own.retry.open(source, initial.dcid, initial.token, unix_seconds) {
            Err(RetryError::Sealed | RetryError::Length) => None,
            Ok(carried) => Some(if carried.knock == NO_KNOCK { Ok(()) } else { Err(RetryError::Sealed) }),
            Err(error) => Some(Err(error)),
        }
    }

    /// Writes the Retry that sends who named us to another connection ID.
    pub(super) fn retry_name(&mut self, initial: &Initial<'_>, source: SocketAddr) {
        let (dcid, nonce) = (self.parts.ids.next_id().0, self.parts.rng.random());
        let carried = Carried::new(initial.dcid, &NO_KNOCK);
        let unix_seconds = self.parts.clock.unix_seconds();
        let server = self.parts.own.server_of(OwnKey::Current);
        let mut token = self.parts.own.retry.token(server, source, carried, unix_seconds, &dcid, nonce);
        let mac1: [u8; MAC_BYTES] = self.parts.rng.random();
        token[RETRY_TOKEN_BYTES - MAC_BYTES..].copy_from_slice(&mac1);
        let packet = retry::packet(
            &*self.parts.crypto,
            initial.scid,
            initial.dcid,
            &dcid,
            &token,
            &mut self.retry_packet,
        );
        self.retry_len = packet.len();
    }
}

/// The /24 or /56 of an address.
fn prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() & !0xff).into()),
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() >> 72 << 72).into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::clock::{Clock, ManualClock};

    use super::*;
    use crate::{
        Arrival, Step, Verdict,
        admission::Room,
        gate_tests::gate,
        properties::{initial_packet, initial_with_token},
        testing::server_tls,
    };

    fn source(last: u8) -> SocketAddr {
        SocketAddr::from(([198, 51, 100, last], 4433))
    }

    /// A ClientHello of `bytes` bytes that names `name`.
    fn hello(name: &str, bytes: usize) -> Vec<u8> {
        let with_length = |content: &[u8]| [&(content.len() as u16).to_be_bytes()[..], content].concat();
        let entry = [&[0][..], &with_length(name.as_bytes())].concat();
        let sni = [&[0, 0][..], &with_length(&with_length(&entry))].concat();
        let mut body = [&[3, 3][..], &[7; 32], &[0], &with_length(&[0x13, 1]), &[1, 0]].concat();
        let fill = bytes.saturating_sub(4 + body.len() + 2 + 4 + sni.len());
        let padding = [&[0, 21][..], &with_length(&vec![0; fill])].concat();
        body.extend(with_length(&[padding, sni].concat()));
        [&[1, 0][..], &with_length(&body)].concat()
    }

    /// The CRYPTO frame with these bytes of `hello`.
    fn piece(hello: &[u8], from: usize, to: usize) -> Vec<u8> {
        let two_bytes = |value: usize| (value as u16 | 0x4000).to_be_bytes();
        [&[6][..], &two_bytes(from), &two_bytes(to - from), &hello[from..to]].concat()
    }

    fn datagram(dcid: &[u8; 8], frames: &[u8]) -> Vec<u8> {
        initial_packet(&*server_tls(), dcid, 0, frames)
    }

    fn strangers(now: Instant) -> Strangers {
        Strangers::new(vec!["gw.example.net".to_owned()], 1, now)
    }

    #[test]
    fn a_name_in_one_datagram() {
        let now = ManualClock::default().now();
        let mut strangers = strangers(now);
        let mut look = |name: &str, from| {
            let hello = hello(name, 300);
            let datagram = datagram(&[9; 8], &piece(&hello, 0, hello.len()));
            strangers.look(&*server_tls(), &datagram, &[9; 8], source(from), now)
        };
        assert_eq!(look("gw.example.net", 1), Look::Ours(Vec::new()));
        assert_eq!(look("GW.Example.NET", 1), Look::Ours(Vec::new()));
        assert_eq!(look("example.net", 1), Look::Other(Vec::new()));
        assert_eq!(look("", 1), Look::Other(Vec::new()));
        assert_eq!(strangers.len(), 0);
    }

    #[test]
    fn a_name_cut_between_two_datagrams_in_either_order() {
        let now = ManualClock::default().now();
        let mut strangers = strangers(now);
        let dcid = [5; 8];
        for (name, ours) in [("gw.example.net", true), ("gw.example.org", false)] {
            let hello = hello(name, 1_900);
            let cut = hello.len() - 7;
            let halves = [
                datagram(&dcid, &[piece(&hello, 0, 500), piece(&hello, 1_200, cut)].concat()),
                datagram(&dcid, &[piece(&hello, cut, hello.len()), piece(&hello, 500, 1_200)].concat()),
            ];
            for [first, second] in [[0, 1], [1, 0]] {
                let mut look = |half: usize, from| {
                    strangers.look(&*server_tls(), &halves[half], &dcid, source(from), now)
                };
                assert_eq!(look(first, 1), Look::Waits);
                assert_eq!(look(first, 1), Look::Waits, "a repetition");
                assert_eq!(look(second, 2), Look::Waits, "of somebody else");
                let earlier = vec![halves[first].clone().into_boxed_slice()];
                assert_eq!(look(second, 1), if ours { Look::Ours(earlier) } else { Look::Other(earlier) });
                assert_eq!(strangers.len(), 1, "what nobody completes");
                strangers.forget(&strangers.places.iter().find_map(|place| place.key).unwrap());
            }
        }
    }

    #[test]
    fn half_of_a_name_is_kept_for_a_second() {
        let clock = ManualClock::default();
        let mut strangers = strangers(clock.now());
        let hello = hello("gw.example.net", 1_900);
        let halves =
            [(0, 1_000), (1_000, hello.len())].map(|(from, to)| datagram(&[5; 8], &piece(&hello, from, to)));
        let mut look =
            |half: usize, now| strangers.look(&*server_tls(), &halves[half], &[5; 8], source(1), now);
        assert_eq!(look(0, clock.now()), Look::Waits);
        clock.advance(PATIENCE);
        assert_eq!(look(1, clock.now()), Look::Waits, "it begins anew");
        clock.advance(PATIENCE / 2);
        assert!(matches!(look(0, clock.now()), Look::Ours(earlier) if earlier.len() == 1));
    }

    #[test]
    fn places_are_bounded_for_all_and_for_a_prefix() {
        let clock = ManualClock::default();
        let mut strangers = strangers(clock.now());
        let hello = hello("gw.example.net", 1_900);
        let half = |number: u64| {
            let dcid = number.to_be_bytes();
            (datagram(&dcid, &piece(&hello, 0, 1_000)), dcid)
        };
        let from = |strangers: &mut Strangers, number, source| {
            clock.advance(Duration::from_micros(100));
            let (datagram, dcid) = half(number);
            assert_eq!(strangers.look(&*server_tls(), &datagram, &dcid, source, clock.now()), Look::Waits);
        };
        let other = SocketAddr::from(([10, 9, 8, 7], 1));
        from(&mut strangers, 9_999, other);
        for number in 0..3_000 {
            from(&mut strangers, number, source(number as u8));
            assert!(strangers.len() <= MOST_PLACES / 8 + 1);
        }
        assert_eq!((strangers.len(), strangers.by_prefix.len()), (MOST_PLACES / 8 + 1, 2));
        assert!(
            strangers.by_key.keys().any(|key| key.source == other),
            "one prefix takes no place of others"
        );
        for number in 0..3_000_u64 {
            let elsewhere = SocketAddr::from(([10, (number >> 8) as u8, number as u8, 1], 1));
            from(&mut strangers, 1_000 + number, elsewhere);
        }
        assert_eq!(strangers.len(), MOST_PLACES);
        assert_eq!(strangers.by_prefix.values().sum::<usize>(), MOST_PLACES);
        assert!(strangers.by_key.keys().all(|key| key.source.ip() != source(1).ip()), "the oldest have gone");
    }

    #[test]
    fn the_gate_asks_for_names_only_where_there_are_some() {
        let clock = Arc::new(ManualClock::default());
        let now = clock.now();
        let mut gate = gate(&clock);
        let arrival =
            |listening| Arrival { source: source(1), validated: false, listening, room: Room::Free };
        let whole = |name: &str| {
            let hello = hello(name, 1_180);
            datagram(&[9; 8], &piece(&hello, 0, hello.len()))
        };
        let (ours, other) = (whole("gw.example.net"), whole("gw.example.org"));
        assert_eq!(gate.check(&ours, arrival(true), now), Verdict::Unauthenticated);
        assert!(!gate.screen(&ours, now));
        gate.set_names(&["GW.example.net".to_owned()], now);
        assert_eq!(gate.check(&ours, arrival(true), now), Verdict::Named);
        assert_eq!(gate.check(&other, arrival(true), now), Verdict::Unauthenticated);
        assert_eq!(gate.check(&ours, arrival(false), now), Verdict::Unauthenticated, "where we dial");
        assert_eq!(gate.check(&ours[..1_199], arrival(true), now), Verdict::Unauthenticated);
        assert!(gate.screen(&ours, now) && gate.screen(&other, now), "the owner reads the name");
        let long = hello("gw.example.org", 2_400);
        let halves =
            [(0, 1_180), (1_180, long.len())].map(|(from, to)| datagram(&[5; 8], &piece(&long, from, to)));
        assert_eq!(gate.check(&halves[0], arrival(true), now), Verdict::Taken);
        assert_eq!(gate.check(&halves[1], arrival(true), now), Verdict::Unauthenticated);
        assert_eq!(gate.take_earlier(), [halves[0].clone().into_boxed_slice()], "a decoy gets both");
        let ended = |step| gate.stats.ended[step];
        assert_eq!([Step::Named, Step::NamePart, Step::NameBudget, Step::Token].map(ended), [1, 1, 0, 4]);
        gate.set_names(&[], now);
        assert_eq!(gate.check(&ours, arrival(true), now), Verdict::Unauthenticated);
    }

    #[test]
    fn who_names_us_has_to_prove_its_address_while_many_do() {
        let clock = Arc::new(ManualClock::default());
        let now = clock.now();
        let mut gate = gate(&clock);
        gate.set_names(&["gw.example.net".to_owned()], now);
        let arrival =
            |number| Arrival { source: source(number), validated: false, listening: true, room: Room::Free };
        let hello = |name: &str| hello(name, 1_180);
        let with = |dcid: &[u8], token: &[u8], name| {
            let hello = hello(name);
            let dcid = dcid.try_into().unwrap();
            initial_with_token(&*server_tls(), dcid, 0, token, &piece(&hello, 0, hello.len()))
        };
        let first = with(&[9; 8], &[], "gw.example.net");
        assert_eq!(gate.check(&first, arrival(1), now), Verdict::Named, "a few do not");
        gate.names_prove = true;
        let other = with(&[9; 8], &[], "gw.example.org");
        assert_eq!(gate.check(&other, arrival(1), now), Verdict::Unauthenticated, "no byte to another name");
        assert_eq!(gate.check(&first, arrival(1), now), Verdict::Retry);
        // Behind the flags, the version and an empty connection ID: the new one, the token, the tag.
        let packet = gate.retry_packet().to_vec();
        let (new, rest) = packet[7..].split_at(8);
        let token = &rest[..rest.len() - 16];
        assert_eq!(token.len(), RETRY_TOKEN_BYTES);
        let again = with(new, token, "gw.example.net");
        assert_eq!(gate.check(&again, arrival(2), now), Verdict::Taken, "from another address");
        assert_eq!(gate.check(&again, arrival(1), now), Verdict::Named);
        assert_eq!(
            gate.check(&with(new, token, "gw.example.org"), arrival(1), now),
            Verdict::Unauthenticated
        );
        let chosen = gate.parts.ids.next_id().0;
        let rest_of_it = with(&chosen, token, "gw.example.org");
        assert_eq!(gate.check(&rest_of_it, arrival(1), now), Verdict::Pass, "to the ID that we have chosen");
        let mut damaged = token.to_vec();
        damaged[20] ^= 1;
        assert_eq!(gate.check(&with(new, &damaged, "gw.example.net"), arrival(1), now), Verdict::Retry);
        clock.advance(Duration::from_secs(17));
        assert_eq!(gate.check(&again, arrival(1), clock.now()), Verdict::Taken, "it is too old");
        let ended = |step| gate.stats.ended[step];
        assert_eq!([Step::Named, Step::NameRetry, Step::RetryToken].map(ended), [2, 2, 2]);
    }

    #[test]
    fn opening_has_a_budget() {
        let now = ManualClock::default().now();
        let mut strangers = strangers(now);
        let hello = hello("example.net", 300);
        let datagram = datagram(&[9; 8], &piece(&hello, 0, hello.len()));
        let mut opened = 0;
        while strangers.look(&*server_tls(), &datagram, &[9; 8], source(1), now) != Look::Unread {
            opened += 1;
        }
        assert_eq!(opened, OPENINGS.at_once);
        assert!(!strangers.spend(now) && strangers.spend(now + Duration::from_millis(1)));
    }
}

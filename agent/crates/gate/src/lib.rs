//! The gate: what stands before QUIC. A datagram that does not prove knowledge of our public key never reaches
//! quinn-proto, and draws no byte.
//!
//! | question | file |
//! |---|---|
//! | in which order is a datagram checked | this one: [`Gate::check`] |
//! | what kind of packet is it | `classify.rs` |
//! | how does a client prove that it knows our key, and who it is | `knock.rs` |
//! | was this proof used before | `table.rs` |
//! | how much is spent on whose proofs | `budget.rs` |
//! | is the proof about this very ClientHello | `initial.rs` |
//! | what becomes of a ClientHello of which a datagram is missing | `partial.rs` |
//! | which clients without a knock name us, for the web server | `named.rs`; its certificate is in `web.rs` |
//! | what is asked of clients under load | `retry.rs` |
//! | which datagrams go to the decoy and back | `decoy.rs`; their counts are in `decoy_stats.rs` |
//! | why were they refused, for those who may know | `refusals.rs` |
//! | which preshared key do two ends share, and how does it enter lanes | `preshared.rs` |
//! | what is kept of a user's password | `password.rs`; of one that a person has chosen: `chosen_password.rs` |
//! | whose certificate is it, of a user | `client_key.rs` |
//!
//! Every datagram that no lane and no other worker wants comes here, on listening and on dialling sockets:
//!
//! ```text
//!   short header, Handshake, Retry ── to a connection ID of ours? ───────────────────────► QUIC
//!   Initial ─┬─ without a token, to a connection ID of ours: our own dialling's answer ──► QUIC
//!            └─ with one, on a listening port:
//!                 1  ≥ 1200 bytes, a token of the right length
//!                 2  used before? by the same source, still shaking hands ───────────────► QUIC
//!                    while its ClientHello is not whole ─► 7
//!                 3  mac1: knows our public key, lately  0.4 µs; most datagrams end here
//!                 4  not the end of an attempt           3 µs
//!                 5  budget; over it, or half full, a Retry first
//!                 6  X25519 and AEAD: who it is         83 µs; full: known peers only
//!                    clock, allowlist, key exchange
//!                 7  the same ClientHello?               3 µs ──────────────────────────► QUIC, once
//!                    not whole: kept for the rest of it, 3 s
//!                 ends at 1 or 3, and there are http.names:
//!                 8  does its ClientHello name us?       4 µs each, 5 % of a core ──────► HTTP/3
//!                    not whole: kept for the rest of it, 1 s
//!   anything else: unauthenticated
//! ```
//!
//! An unauthenticated datagram causes no allocation and takes no lock, but for step 8, whose budget bounds that.

#![warn(missing_docs)]
#![warn(clippy::missing_errors_doc)]

#[cfg(any(test, feature = "fuzzing"))]
use std::net::IpAddr;
use std::{
    io,
    net::SocketAddr,
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use base::{clock::Clock, counts::Counts};
use quinn_proto::{ConnectionId, crypto::ServerConfig as CryptoConfig};
use rand::{RngExt, rngs::StdRng};
use wire::cid::ConnectionIds;

pub mod admission;
pub mod budget;
pub mod carrier;
mod certificate;
pub mod chosen_password;
pub mod classify;
pub mod client;
pub mod client_key;
pub mod decoy;
pub mod decoy_stats;
#[cfg(test)]
mod gate_tests;
pub mod hybrid;
pub mod identity;
pub mod initial;
pub mod knock;
mod named;
pub mod numbers;
mod own;
pub mod partial;
pub mod password;
pub mod preshared;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
pub mod refusals;
pub mod replay_log;
pub mod retry;
mod session;
pub mod suite;
mod system;
pub mod table;
#[cfg(test)]
pub(crate) mod testing;
pub mod tls;
#[cfg(test)]
mod tls_pair;
pub mod web;

pub use self::own::{Own, OwnKey};
use self::{
    admission::{Admission, Admits, Allowlist, Room},
    budget::{Budget, Take},
    classify::{Class, Initial, MAX_CID_BYTES, MIN_FIRST_DCID_BYTES, classify},
    initial::{HelloError, client_hello, offers_hybrid},
    knock::{EPOCH_SECONDS, KNOCK_BYTES, KnockError, Opened, epochs, hello_hash},
    named::{Look, Strangers},
    partial::{Decided, Partial, Partials, Progress},
    refusals::{Refusal, Refusals, Why},
    retry::{Carried, MAX_RETRY_BYTES, RETRY_TOKEN_BYTES, RetryError, RetryKey},
    table::{InsertError, SingleUse, Tag, Used},
};
use crate::{
    knock::MAX_CLOCK_WINDOW,
    tls::{KeyExchange, MIN_PACKET},
};

/// What the gate says to do with a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The datagram belongs to a connection, or may belong to one: quinn-proto decides.
    Pass,
    /// The datagram completes the ClientHello of a handshake that may begin; what came of it before comes first:
    /// [`Gate::take_earlier`].
    Admit(Admission),
    /// The datagram completes the ClientHello of an unauthenticated sender who names us: HTTP/3 may begin. What came of it before comes
    /// first: [`Gate::take_earlier`].
    Named,
    /// The client must prove its address first: [`Gate::retry_packet`] has the answer.
    Retry,
    /// The datagram is authenticated, and all that there is to do about it was done: it is kept until the rest of its ClientHello
    /// comes, or shares the fate of a part that came before.
    Taken,
    /// The sender is not authenticated, or is treated as if it were not: it gets no answer, or the decoy's. A sender
    /// whose proof holds and that is refused may be repeating what a peer once sent, and must not be able to tell. Of its
    /// ClientHello there may be an earlier datagram: [`Gate::take_earlier`].
    Unauthenticated,
}

/// Counts of datagrams by the step at which they ended; monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateStats {
    /// The datagrams that ended at each step.
    pub ended: Counts<Step>,
    /// Incomplete ClientHellos whose rest did not come in time.
    pub partials_expired: u64,
}

base::labelled! {
    /// The step of the gate at which a datagram ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Step {
        /// The datagram was passed on to a connection.
        Passed => "passed",
        /// Admitted as the first datagram of a handshake.
        Admitted => "admitted",
        /// The datagram was answered with a Retry.
        Retry => "retry",
        /// A part of a ClientHello: kept for the rest, or of no use beside what was kept or answered.
        Part => "part",
        /// Of a kind that no agent sends: another version, 0-RTT, a connection ID that is not ours, too short …
        Class => "class",
        /// A token of another length than ours, or none.
        Token => "token",
        /// The token was used for another handshake before.
        Used => "used",
        /// A token that was not made with our public key.
        Mac => "mac",
        /// A Retry token that is not ours, too old, or of another address.
        RetryToken => "retry_token",
        /// More than is spent on such a source.
        Budget => "budget",
        /// A knock that does not open.
        Knock => "knock",
        /// The time of the knock is outside the window.
        Clock => "clock",
        /// A key that may not connect.
        Key => "key",
        /// A knock about another ClientHello, or none that can be read.
        Hello => "hello",
        /// The client offers, or falls back to, a key exchange that we do not allow it.
        KeyExchange => "key_exchange",
        /// The table of used tokens is full.
        Full => "full",
        /// The end of an attempt that did not start here.
        Abandoned => "abandoned",
        /// Of a connection of another exit of the fleet.
        OtherExit => "other_exit",
        /// The ClientHello of an unauthenticated sender who names us.
        Named => "named",
        /// A part of the ClientHello of an unauthenticated sender: kept for the rest.
        NamePart => "name_part",
        /// Answered with a Retry, because its sender names us and many handshakes of such are open.
        NameRetry => "name_retry",
        /// Not read, because the budget for reading the names of unauthenticated senders is used up.
        NameBudget => "name_budget",
    }
}

/// The gate of one worker: checks each datagram that no lane wants.
pub struct Gate {
    parts: GateParts,
    /// The epochs in which mac1 holds, and since when they are known.
    epochs: (RangeInclusive<u64>, Option<Instant>),
    retry_packet: [u8; MAX_RETRY_BYTES],
    retry_len: usize,
    partials: Partials,
    decided: Decided<(Verdict, Step)>,
    /// The datagrams that came before the one that was decided last.
    earlier: Vec<Box<[u8]>>,
    /// Unauthenticated senders who may name us; `None`: we have no names.
    strangers: Option<Strangers>,
    /// Whether those who name us have to prove their address first.
    pub names_prove: bool,
    /// The counts of this gate so far.
    pub stats: GateStats,
}

/// The parts that a gate is made of.
pub struct GateParts {
    /// The keys of this agent's identity.
    pub own: Arc<Own>,
    /// The check and the maker of our connection IDs.
    pub ids: ConnectionIds,
    /// The list of keys that may connect.
    pub allowlist: Arc<dyn Allowlist>,
    /// The list that refusals are added to.
    pub refusals: Arc<Refusals>,
    /// Whether a client must knock before its handshake.
    pub required: bool,
    /// The key exchanges that we allow.
    pub key_exchange: KeyExchange,
    /// The difference that is allowed between a knock's time and ours; whole seconds.
    pub window: Duration,
    /// The knocks that were used, those of earlier processes included.
    pub table: SingleUse,
    /// The budget for opening knocks, by source.
    pub budget: Budget,
    /// The wall clock, against which knocks are checked.
    pub clock: Arc<dyn Clock + Send + Sync>,
    /// Any server configuration: for the keys of Initial packets, which follow from the connection ID, and for the tag of a Retry.
    pub crypto: Arc<dyn CryptoConfig>,
    /// For the connection IDs of Retry packets.
    pub rng: StdRng,
}

/// The circumstances in which a datagram arrived.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The address that the datagram came from.
    pub source: SocketAddr,
    /// Whether the source has shown that it receives what is sent to it, as the client of a stream has.
    pub validated: bool,
    /// Whether it came to a port on which we listen.
    pub listening: bool,
    /// Whether one more handshake may begin.
    pub room: Room,
}

impl Gate {
    /// Makes the gate of one worker from its parts.
    #[must_use]
    pub fn new(parts: GateParts) -> Self {
        Self {
            partials: Partials::new(parts.ids.workers()),
            parts,
            epochs: (0..=0, None),
            retry_packet: [0; MAX_RETRY_BYTES],
            retry_len: 0,
            decided: Decided::new(),
            earlier: Vec::new(),
            strangers: None,
            names_prove: false,
            stats: GateStats::default(),
        }
    }

    /// Decides about a datagram that no lane wants.
    pub fn check(&mut self, datagram: &[u8], arrival: Arrival, now: Instant) -> Verdict {
        let (verdict, step) = self.decide(datagram, arrival, now);
        self.stats.ended[step] += 1;
        verdict
    }

    /// Whether a datagram that another worker is to check may be authenticated. Needs no state of that worker, so any worker may
    /// ask.
    pub fn screen(&mut self, datagram: &[u8], now: Instant) -> bool {
        let (ours, step) = match classify(datagram) {
            Class::Short { cid } => (self.parts.ids.issued().is_ours(cid), Step::Class),
            Class::Handshake { dcid } | Class::Retry { dcid } => (self.is_ours(dcid), Step::Class),
            Class::Initial(initial) => match self
                .screen_initial(datagram, &initial, now)
                .or_else(|step| self.screen_stranger(datagram, step, now))
            {
                Ok(()) => return true,
                Err(step) => (false, step),
            },
            Class::ZeroRtt { .. } | Class::Other => (false, Step::Class),
        };
        if !ours {
            self.stats.ended[step] += 1;
        }
        ours
    }

    /// Whether a datagram belongs to another exit of the fleet: it is counted, and nobody gets it. It may be a peer's, so a decoy
    /// must not see it either.
    pub fn is_for_other_exit(&mut self, datagram: &[u8]) -> bool {
        let other = |id: &[u8; 8]| self.parts.ids.is_of_other_exit(id);
        let found = match classify(datagram) {
            Class::Short { cid } => other(cid),
            Class::Initial(Initial { dcid, .. }) | Class::Handshake { dcid } | Class::Retry { dcid } => {
                dcid.try_into().is_ok_and(other)
            }
            Class::ZeroRtt { .. } | Class::Other => false,
        };
        self.stats.ended[Step::OtherExit] += u64::from(found);
        found
    }

    fn screen_initial(&mut self, datagram: &[u8], initial: &Initial<'_>, now: Instant) -> Result<(), Step> {
        if !self.parts.required || (initial.token.is_empty() && self.is_ours(initial.dcid)) {
            return Ok(());
        }
        let known_length = [KNOCK_BYTES, RETRY_TOKEN_BYTES].contains(&initial.token.len());
        if !known_length || datagram.len() < usize::from(MIN_PACKET) {
            return Err(Step::Token);
        }
        // A client's second flight goes to a connection ID of ours, for which its token was not made.
        let proven = self.is_ours(initial.dcid) || self.proven(initial, now).is_some();
        proven.then_some(()).ok_or(Step::Mac)
    }

    /// Whether an Initial without a proof, which another worker is to read, may go there: it may name us, and the budget has room.
    fn screen_stranger(&mut self, datagram: &[u8], step: Step, now: Instant) -> Result<(), Step> {
        let strangers =
            self.strangers.as_mut().filter(|_| datagram.len() >= usize::from(MIN_PACKET)).ok_or(step)?;
        if strangers.spend(now) { Ok(()) } else { Err(Step::NameBudget) }
    }

    /// The Retry packet that [`Verdict::Retry`] is about.
    #[must_use]
    pub fn retry_packet(&self) -> &[u8] {
        &self.retry_packet[..self.retry_len]
    }

    /// The datagrams that came before the one that [`Verdict::Admit`] is about, and belong to the same ClientHello.
    #[must_use]
    pub fn take_earlier(&mut self) -> Vec<Box<[u8]>> {
        std::mem::take(&mut self.earlier)
    }

    /// A handshake that was admitted has ended, either way: nothing more comes with its token.
    pub fn handshake_ended(&mut self, admission: &Admission) {
        self.parts.table.done(&admission.tag);
    }

    /// Forgets tokens whose time is over: no knock could be accepted any more under them.
    pub fn expire(&mut self, now: Instant) {
        self.expire_partials(now);
        self.parts.table.expire(now, self.parts.clock.unix_seconds());
    }

    /// Gives up ClientHellos whose rest has not come in time. Their knocks stay used.
    fn expire_partials(&mut self, now: Instant) {
        while let Some(tag) = self.partials.expire(now) {
            self.stats.partials_expired += 1;
            self.parts.table.done(&tag);
        }
    }

    /// Why the table could not be written to its replay log, once.
    pub fn take_replay_log_error(&mut self) -> Option<io::Error> {
        self.parts.table.take_replay_log_error()
    }

    /// Spends what may be spent on clients that have not proved their address.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn exhaust_budget(&mut self, now: Instant) {
        while self.parts.budget.take(IpAddr::from([0, 0, 0, 0]), false, now) == Take::Granted {}
        for last in 1..=u8::MAX {
            while self.parts.budget.take(IpAddr::from([203, 0, 113, last]), false, now) == Take::Granted {}
        }
    }

    /// The number of ClientHellos of which a datagram is missing.
    #[must_use]
    pub fn partials(&self) -> usize {
        self.partials.len()
    }

    /// The number of used tokens that it remembers.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.parts.table.len()
    }

    fn decide(&mut self, datagram: &[u8], arrival: Arrival, now: Instant) -> (Verdict, Step) {
        match classify(datagram) {
            Class::Short { cid } if self.parts.ids.issued().is_ours(cid) => (Verdict::Pass, Step::Passed),
            Class::Handshake { dcid } | Class::Retry { dcid } if self.is_ours(dcid) => {
                (Verdict::Pass, Step::Passed)
            }
            Class::Initial(initial) => self.initial(datagram, &initial, arrival, now),
            Class::Short { .. }
            | Class::Handshake { .. }
            | Class::Retry { .. }
            | Class::ZeroRtt { .. }
            | Class::Other => (Verdict::Unauthenticated, Step::Class),
        }
    }

    fn is_ours(&self, dcid: &[u8]) -> bool {
        dcid.try_into().is_ok_and(|dcid| self.parts.ids.issued().is_ours(dcid))
    }

    fn initial(
        &mut self,
        datagram: &[u8],
        initial: &Initial<'_>,
        arrival: Arrival,
        now: Instant,
    ) -> (Verdict, Step) {
        let ours = self.is_ours(initial.dcid);
        if ours && initial.token.is_empty() {
            return (Verdict::Pass, Step::Passed);
        }
        if !arrival.listening {
            return (Verdict::Unauthenticated, Step::Class);
        }
        let decided = if self.parts.required {
            self.knocking(datagram, initial, arrival, now)
        } else {
            (Verdict::Pass, Step::Passed)
        };
        let (Verdict::Pass | Verdict::Unauthenticated, Step::Passed | Step::Token | Step::Mac) = decided
        else {
            return decided;
        };
        // A datagram of a handshake under way passes by its token.
        if self.parts.required && decided.1 == Step::Passed {
            return decided;
        }
        if ours && self.retried_name(initial, arrival.source) == Some(Err(RetryError::Destination)) {
            // The rest of a handshake, to the connection ID that we have chosen in it.
            return (Verdict::Pass, Step::Passed);
        }
        self.named(datagram, initial, arrival.source, now).unwrap_or(decided)
    }

    /// An Initial that proves nothing, if it names us, or may. What came before of the same ClientHello is in `earlier`.
    fn named(
        &mut self,
        datagram: &[u8],
        initial: &Initial<'_>,
        source: SocketAddr,
        now: Instant,
    ) -> Option<(Verdict, Step)> {
        let strangers = self.strangers.as_mut()?;
        if datagram.len() < usize::from(MIN_PACKET) || initial.dcid.len() < MIN_FIRST_DCID_BYTES {
            return None;
        }
        match strangers.look(&*self.parts.crypto, datagram, initial.dcid, source, now) {
            Look::Ours(earlier) => match self.retried_name(initial, source) {
                // quinn-proto would answer such a token with a close.
                Some(Err(_)) => Some((Verdict::Taken, Step::RetryToken)),
                None if self.names_prove && RetryKey::serves(&source) => {
                    self.retry_name(initial, source);
                    Some((Verdict::Retry, Step::NameRetry))
                }
                None | Some(Ok(())) => {
                    self.earlier = earlier;
                    Some((Verdict::Named, Step::Named))
                }
            },
            Look::Waits => Some((Verdict::Taken, Step::NamePart)),
            Look::Other(earlier) => {
                self.earlier = earlier;
                None
            }
            Look::Unread => {
                let today = if self.parts.required { Verdict::Unauthenticated } else { Verdict::Pass };
                Some((today, Step::NameBudget))
            }
        }
    }

    /// An Initial on a listening port where a knock is required.
    fn knocking(
        &mut self,
        datagram: &[u8],
        initial: &Initial<'_>,
        arrival: Arrival,
        now: Instant,
    ) -> (Verdict, Step) {
        let Some(tag) = initial.token.last_chunk::<16>().copied() else {
            return (Verdict::Unauthenticated, Step::Token);
        };
        let retried = initial.token.len() == RETRY_TOKEN_BYTES;
        if datagram.len() < usize::from(MIN_PACKET) || !(retried || initial.token.len() == KNOCK_BYTES) {
            return (Verdict::Unauthenticated, Step::Token);
        }
        if self.parts.table.get(&tag).is_some() {
            return self.used_before(datagram, &tag, arrival.source, now);
        }
        let Some(own) = self.proven(initial, now) else {
            return (Verdict::Unauthenticated, Step::Mac);
        };
        if let Some(decided) = self.decided.get(&tag, arrival.source, now) {
            return decided;
        }
        match self.knock(datagram, initial, arrival, Token { own, retried, tag }, now) {
            Ok(Knocked::Admitted(admission)) => (Verdict::Admit(admission), Step::Admitted),
            Ok(Knocked::Began) => (Verdict::Taken, Step::Part),
            Ok(Knocked::Retry) => {
                self.decided.insert(tag, arrival.source, (Verdict::Taken, Step::Part), now);
                (Verdict::Retry, Step::Retry)
            }
            Err(why) => {
                let decision = (Verdict::Unauthenticated, why.step());
                // Before a budget was asked anyone with the link could fill the log and the list: that is only counted.
                if why.is_budgeted() {
                    self.decided.insert(tag, arrival.source, decision, now);
                    let refusal =
                        Refusal { at: self.parts.clock.unix_seconds(), source: arrival.source, why };
                    self.parts.refusals.note(refusal, now);
                }
                decision
            }
        }
    }

    /// A datagram whose proof has been used: of a handshake under way, of a ClientHello that is not whole, or a repetition.
    fn used_before(
        &mut self,
        datagram: &[u8],
        tag: &Tag,
        source: SocketAddr,
        now: Instant,
    ) -> (Verdict, Step) {
        self.expire_partials(now);
        if !self.parts.table.get(tag).is_some_and(|used| used.passes(source)) {
            return (Verdict::Unauthenticated, Step::Used);
        }
        if !self.partials.contains(tag) {
            return (Verdict::Pass, Step::Passed);
        }
        match self.partials.add(tag, &*self.parts.crypto, datagram) {
            (Progress::Whole, Some(whole)) => {
                let admission = whole.admission;
                self.earlier = whole.datagrams;
                (Verdict::Admit(admission), Step::Admitted)
            }
            (Progress::Whole | Progress::Waiting, _) => (Verdict::Taken, Step::Part),
            (Progress::Other, _) => (Verdict::Unauthenticated, Step::Hello),
            (Progress::Bad(error), _) => (Verdict::Unauthenticated, Why::Hello(error).step()),
        }
    }

    /// The operator wants those who name one of `names` to meet a web server; with no names nobody does.
    pub fn set_names(&mut self, names: &[String], now: Instant) {
        let names: Vec<String> = names.iter().map(|name| name.to_ascii_lowercase()).collect();
        match &mut self.strangers {
            _ if names.is_empty() => self.strangers = None,
            Some(strangers) => strangers.set_names(names),
            None => self.strangers = Some(Strangers::new(names, self.parts.ids.workers(), now)),
        }
    }

    /// The operator allows these key exchanges.
    pub fn set_key_exchange(&mut self, key_exchange: KeyExchange) {
        self.parts.key_exchange = key_exchange;
    }

    /// The operator allows clocks to differ by `window`.
    pub fn set_window(&mut self, window: Duration) {
        self.parts.window = window;
        self.epochs.1 = None;
    }

    /// The key of ours for which mac1 holds. The wall clock is read once per `now`, which is once per turn: each read costs 25 ns.
    fn proven(&mut self, initial: &Initial<'_>, now: Instant) -> Option<OwnKey> {
        if self.epochs.1 != Some(now) {
            self.epochs = (epochs(self.parts.clock.unix_seconds(), self.parts.window), Some(now));
        }
        self.parts.own.proven(initial.dcid, initial.token, self.epochs.0.clone())
    }

    /// The rest of the way, of someone who knows our public key.
    fn knock(
        &mut self,
        datagram: &[u8],
        initial: &Initial<'_>,
        arrival: Arrival,
        token: Token,
        now: Instant,
    ) -> Result<Knocked, Why> {
        let Arrival { source, room, validated, .. } = arrival;
        let Token { own, retried, tag } = token;
        let validated = validated || retried;
        let unix_seconds = self.parts.clock.unix_seconds();
        let (knock, original) = if retried {
            let carried = self
                .parts
                .own
                .retry
                .open(source, initial.dcid, initial.token, unix_seconds)
                .map_err(Why::RetryToken)?;
            (carried.knock, carried.original_dcid)
        } else {
            // RFC 9000 §7.2. Longer ones are as good: a listener steers by the first byte.
            if !(MIN_FIRST_DCID_BYTES..=MAX_CID_BYTES).contains(&initial.dcid.len()) {
                return Err(Why::ConnectionId);
            }
            let knock: [u8; KNOCK_BYTES] =
                initial.token.try_into().map_err(|_| Why::Knock(KnockError::Length))?;
            (knock, ConnectionId::new(initial.dcid))
        };
        // A dialler that has been answered closes its other attempts, and closes them again at each answer: a Retry would lead to
        // one more close, and so on, as fast as the path carries them.
        if client_hello(&*self.parts.crypto, &[datagram]) == Err(HelloError::Abandoned) {
            return Err(Why::Hello(HelloError::Abandoned));
        }
        let busy = room != Room::Free && !retried && RetryKey::serves(&source);
        match if busy { Take::Retry } else { self.parts.budget.take(source.ip(), validated, now) } {
            Take::Granted => {}
            Take::Retry if RetryKey::serves(&source) => {
                self.make_retry(initial, own, &knock, source, unix_seconds);
                return Ok(Knocked::Retry);
            }
            Take::Retry | Take::Refused => return Err(Why::Budget),
        }
        // From here on a refusal is noted, so nothing before the budget may be. The knock within a Retry token has a name of its own in the table.
        let inner = tag_of(&knock);
        if retried && self.parts.table.get(&inner).is_some() {
            return Err(Why::Repeated);
        }
        let opened = self.parts.own.open(own, &original, &knock).map_err(Why::Knock)?;
        self.is_fresh(&opened, now, unix_seconds)?;
        let peer = match self.parts.allowlist.admits(&opened.client, now) {
            Admits::Peer(id) => Some(id),
            Admits::Paused(id) => {
                self.parts.budget.charge_to_peer(id, source.ip(), validated, now);
                return Err(Why::Paused);
            }
            Admits::Anyone if room == Room::Free => None,
            // Keys of open-mode peers cost nothing to make, so half of the handshakes are reserved for known peers.
            Admits::Anyone => return Err(Why::Busy),
            Admits::Nobody => return Err(Why::Key(opened.key())),
        };
        if let Some(peer) = peer {
            self.parts.budget.charge_to_peer(peer, source.ip(), validated, now);
        }
        if opened.fallback && self.parts.key_exchange != KeyExchange::X25519 {
            return Err(Why::Fallback);
        }
        let known = peer.is_some();
        let admission = Admission { dcid: original, tag, agreement: opened.client, own, known };
        let begun = self.begins(datagram, &opened, admission, now)?;
        // No mac1 that holds now is of a later epoch, and none holds longer after the end of its epoch, whatever the window
        // is after a restart.
        let end = self.epochs.0.end().saturating_add(1).saturating_mul(EPOCH_SECONDS);
        let used = Used::new(source, end.saturating_add(MAX_CLOCK_WINDOW.as_secs()));
        if retried {
            // Neither the Retry token nor the knock in it is good for anything else.
            self.remember(inner, used, now, unix_seconds)?;
            self.parts.table.done(&inner);
        }
        self.remember(tag, used, now, unix_seconds)?;
        let Some(begun) = begun else { return Ok(Knocked::Admitted(admission)) };
        if let Some(surplus) = self.partials.insert(begun) {
            self.parts.table.done(&surplus);
        }
        Ok(Knocked::Began)
    }

    /// Checks the ClientHello in the first datagram of a knock that is good; returns what is to be kept if it is not whole.
    fn begins(
        &self,
        datagram: &[u8],
        opened: &Opened,
        admission: Admission,
        now: Instant,
    ) -> Result<Option<Partial>, Why> {
        let Some(hello) = client_hello(&*self.parts.crypto, &[datagram]).map_err(Why::Hello)? else {
            if !self.partials.has_room(admission.known) {
                return Err(Why::Partials);
            }
            let partial = Partial::new(admission, opened.hello_hash, now, datagram);
            return partial.map(Some).ok_or(Why::Hello(HelloError::Long));
        };
        if hello_hash(&hello) != opened.hello_hash {
            return Err(Why::OtherHello);
        }
        // What offers the hybrid is longer than a datagram of 1200 bytes. TLS would refuse this one too, without a word to the
        // operator.
        if self.parts.key_exchange == KeyExchange::HybridRequired && !offers_hybrid(&hello) {
            return Err(Why::OnlyX25519);
        }
        Ok(None)
    }

    fn remember(&mut self, tag: [u8; 16], used: Used, now: Instant, unix_seconds: u64) -> Result<(), Why> {
        self.parts.table.insert(tag, used, now, unix_seconds).map_err(|error| match error {
            InsertError::Full => Why::Full,
            InsertError::Used => Why::Repeated,
        })
    }

    fn is_fresh(&self, opened: &Opened, now: Instant, unix_seconds: u64) -> Result<(), Why> {
        let ahead =
            i64::try_from(opened.unix_seconds).unwrap_or(i64::MAX).saturating_sub_unsigned(unix_seconds);
        if ahead.unsigned_abs() > self.parts.window.as_secs() {
            return Err(Why::Clock { ahead });
        }
        if !self.parts.table.remembers(opened.unix_seconds, self.parts.window, now) {
            return Err(Why::BeforeStart);
        }
        Ok(())
    }

    fn make_retry(
        &mut self,
        initial: &Initial<'_>,
        own: OwnKey,
        knock: &[u8; KNOCK_BYTES],
        source: SocketAddr,
        unix_seconds: u64,
    ) {
        let (dcid, nonce) = (self.parts.ids.next_id().0, self.parts.rng.random());
        let carried = Carried::new(initial.dcid, knock);
        // It proves the same key again, and carries the knock to that.
        let server = self.parts.own.server_of(own);
        let token = self.parts.own.retry.token(server, source, carried, unix_seconds, &dcid, nonce);
        let Initial { scid, dcid: original, .. } = *initial;
        let packet =
            retry::packet(&*self.parts.crypto, scid, original, &dcid, &token, &mut self.retry_packet);
        self.retry_len = packet.len();
    }
}

/// The name of a knock in the table of used tokens.
fn tag_of(knock: &[u8; KNOCK_BYTES]) -> Tag {
    *knock.last_chunk().expect("a knock is longer than its mac1")
}

/// A token for which mac1 holds.
struct Token {
    own: OwnKey,
    /// Whether it is one of our Retry tokens.
    retried: bool,
    tag: Tag,
}

/// The outcome of checking a knock that was not refused.
enum Knocked {
    Admitted(Admission),
    /// More of its ClientHello is to come.
    Began,
    Retry,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("stats", &self.stats).finish_non_exhaustive()
    }
}

//! What the workers of one agent share: a mailbox for each, the session of each peer, and counts of all workers together.
//!
//! ```text
//!   worker a ── WorkerMessage ─► mailbox of b   control plane: never dropped, delivered in order
//!   worker a ── HandOff ───────► ring of b      packet path: batches of datagrams; a full ring drops them and counts the drop
//! ```
//!
//! If both ends have at least as many lanes as workers, no datagram crosses workers in the steady state: a lane, its flows and
//! their sockets belong to one worker.

mod backlogs;
mod contest;
mod mailbox;
mod message;
mod user_records;

pub(crate) use backlogs::Backlogs;
pub(crate) use contest::{Contender, Contested};
pub(crate) use mailbox::Seen;
pub(crate) use message::{
    Connected, LaneEvent, LaneLoss, LaneName, LanePort, LaneRequest, LaneSecrets, LineEvent, NewConfig,
    StreamRequest, ToOwner, WorkerMessage,
};

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use base::{
    ids::{PeerId, SessionId, SessionRef},
    panics::lock,
};
use config::{self, Config};
use dataplane::{
    forward::learned::LearnedRoutes,
    hand_off::{HandOff, Kind},
    lines::{LineLoads, MOST_LINES},
    records::Recorder,
    relay::{AgentTotals, FlowRegistry},
    upstreams::Upstreams,
};
use net::{Ready, Token, ports::Ports};
use rate::{RateAccount, RateAccounts};
use users::Users;
use wire::messages::CloseReason;

use crate::{
    capture::{Capture, Taps},
    control::{connections::PeerForwards, windows::StreamMemory},
    hub::{
        contest::Contest,
        mailbox::{Mailbox, Party, Size},
    },
    origin::PeerOrigin,
    quota::QuotaBook,
    uplinks::UplinkBook,
};

/// Mailboxes, peers and totals that the workers of an agent share.
pub struct Hub {
    mailboxes: Vec<Mailbox<WorkerMessage, HandOff>>,
    /// Indexed by [`PeerId`]. The registry replaces the list while workers read it.
    peers: ArcSwap<Vec<Arc<Shared>>>,
    /// Totals of the flows and queues of all peers.
    pub(crate) totals: Arc<AgentTotals>,
    /// Count and window memory of the TCP forwards of all peers.
    pub(crate) streams: Arc<StreamMemory>,
    /// The `[[tcp]]` ports at which connections wait to be accepted.
    pub(crate) backlogs: Backlogs,
    /// Where our services are.
    pub upstreams: Arc<Upstreams>,
    next_session: AtomicU64,
    next_forward: AtomicU64,
    /// Number of workers that have shut down and send no more hand-off batches.
    stopped: AtomicU8,
    /// Captures of control connections that operators have asked for.
    taps: Taps,
    /// Who may go through the web server.
    pub users: Arc<Users>,
    /// What peers with a quota have carried.
    pub quotas: Arc<QuotaBook>,
    /// What each line of this host has carried.
    pub uplinks: Arc<UplinkBook>,
    /// The instant from which the hub counts milliseconds.
    pub(crate) base: Instant,
}

/// One peer's share of the hub.
struct Shared {
    session: Mutex<Option<Arc<Connected>>>,
    /// When the peer was last heard on a lane, in milliseconds since the base; 0 for never.
    heard: AtomicU64,
    /// The same for each of several lines.
    lines_heard: [AtomicU64; MOST_LINES as usize],
    /// Lanes of the peer at all workers, draining lanes included.
    lanes: AtomicUsize,
    flows: Arc<FlowRegistry>,
    forwards: Arc<PeerForwards>,
    /// What limits what is sent to the peer, at all workers together.
    rates: Arc<RateAccounts>,
    /// What each line to the peer carries, once there are several.
    line_loads: OnceLock<Arc<LineLoads>>,
    /// Whether two agents use the peer's key.
    contest: Mutex<Contest>,
}

impl Shared {
    fn new(flows: &Arc<AgentTotals>, workers: u8) -> Arc<Self> {
        Arc::new(Self {
            forwards: Arc::new(PeerForwards::new(workers)),
            session: Mutex::new(None),
            heard: AtomicU64::new(0),
            lines_heard: std::array::from_fn(|_| AtomicU64::new(0)),
            lanes: AtomicUsize::new(0),
            flows: FlowRegistry::of_agent(flows),
            rates: Arc::default(),
            line_loads: OnceLock::new(),
            contest: Mutex::default(),
        })
    }
}

impl Hub {
    /// Makes the hub of `workers` workers and `peers` peers; the hub counts time from `now`.
    #[must_use]
    pub fn new(workers: u8, peers: usize, now: Instant) -> Arc<Self> {
        let totals = Arc::default();
        let shared = (0..peers).map(|_| Shared::new(&totals, workers)).collect();
        Arc::new(Self {
            mailboxes: (0..workers.max(1)).map(|_| Mailbox::default()).collect(),
            peers: ArcSwap::from_pointee(shared),
            totals,
            streams: Arc::default(),
            backlogs: Backlogs::default(),
            upstreams: Arc::default(),
            next_session: AtomicU64::new(1),
            next_forward: AtomicU64::new(1),
            stopped: AtomicU8::new(0),
            taps: Taps::default(),
            users: Arc::default(),
            quotas: Arc::default(),
            uplinks: Arc::default(),
            base: now,
        })
    }

    /// Has the ends of flows, forwards and users' sessions recorded. To be called before there are workers; only the first recorder counts.
    pub fn record_ends(&self, recorder: Recorder) {
        user_records::record(&self.users, &recorder);
        // A second one ends here, and so does its queue.
        let _second = self.totals.recorder.set(recorder).is_err();
    }

    /// A number that no TCP forward of the agent has had.
    pub(crate) fn next_forward(&self) -> u64 {
        self.next_forward.fetch_add(1, Ordering::Relaxed)
    }

    /// The number of workers that share this hub.
    #[must_use]
    pub fn workers(&self) -> u8 {
        u8::try_from(self.mailboxes.len()).unwrap_or(u8::MAX)
    }

    /// Reads what the workers share about `peer`; `None` if the hub does not know the peer.
    fn with<T>(&self, peer: PeerId, read: impl FnOnce(&Shared) -> T) -> Option<T> {
        self.peers.load().get(peer.0 as usize).map(|shared| read(shared))
    }

    /// Sets the ready queue and the token by which the mailbox of `worker` wakes it.
    pub(crate) fn join(&self, worker: u8, ready: Ready, token: Token) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(worker)) {
            mailbox.join(ready, token);
        }
    }

    /// Puts `message` into the mailbox of `worker` and wakes the worker.
    pub(crate) fn send(&self, worker: u8, message: WorkerMessage) {
        if let Some(mailbox) = self.mailboxes.get(usize::from(worker)) {
            mailbox.post(message);
        }
    }

    /// Tells `worker` that a session is suspect, for tests.
    #[cfg(feature = "inspection")]
    pub fn send_suspicion(&self, worker: u8, of: SessionRef, suspicion: dataplane::peer::Suspicion) {
        self.send(worker, WorkerMessage::Suspect { of, suspicion, holds: true });
    }

    /// Sends a message to every worker except `from`.
    pub(crate) fn send_to_others(&self, from: u8, message: impl Fn() -> WorkerMessage) {
        for worker in (0..self.workers()).filter(|worker| *worker != from) {
            self.send(worker, message());
        }
    }

    /// Announces a new peer to all workers, in a slot that none of them uses. Only the registry calls this, for one change at a time.
    pub(crate) fn add_peer(&self, id: PeerId, peer: &Arc<config::Peer>, origin: PeerOrigin) {
        let mut peers = Vec::clone(&self.peers.load());
        let shared = Shared::new(&self.totals, self.workers());
        match peers.get_mut(id.0 as usize) {
            Some(slot) => *slot = shared,
            None => peers.push(shared),
        }
        self.peers.store(Arc::new(peers));
        Mailbox::post_all(&self.mailboxes, || WorkerMessage::PeerAdded {
            id,
            peer: Arc::clone(peer),
            origin,
        });
    }

    /// Has all workers end everything of a peer. Only the registry calls this.
    pub(crate) fn remove_peer(&self, id: PeerId) {
        Mailbox::post_all(&self.mailboxes, || WorkerMessage::PeerRemoved { id });
    }

    /// Gives all workers the changed settings of a peer. Only the registry calls this.
    pub(crate) fn change_peer(&self, id: PeerId, peer: &Arc<config::Peer>) {
        Mailbox::post_all(&self.mailboxes, || WorkerMessage::PeerChanged { id, peer: Arc::clone(peer) });
    }

    /// Gives all workers the table that the kernel's routes make.
    pub fn learn_routes(&self, learned: &Arc<LearnedRoutes>) {
        Mailbox::post_all(&self.mailboxes, || WorkerMessage::RoutesLearned(Arc::clone(learned)));
    }

    /// Has all workers run `config`, each with its share of the newly bound ports.
    pub(crate) fn configure(&self, config: &Arc<Config>, shares: Vec<Ports>) {
        let mut shares = shares.into_iter();
        Mailbox::post_all(&self.mailboxes, || {
            let ports = shares.next().unwrap_or_default();
            WorkerMessage::Configured(Box::new(NewConfig { config: Arc::clone(config), ports }))
        });
    }

    /// Announces a capture of a lane to all workers: the worker that hosts the lane starts or ends it.
    pub fn capture(&self, capture: &Arc<Capture>) {
        Mailbox::post_all(&self.mailboxes, || WorkerMessage::Capture(Arc::clone(capture)));
    }

    /// Captures of control connections that operators have asked for.
    pub fn taps(&self) -> &Taps {
        &self.taps
    }

    /// Whether this end dialled the session with a peer; `None` if there is no session.
    pub fn dialled(&self, peer: PeerId) -> Option<bool> {
        self.record(peer).map(|record| record.dialled)
    }

    /// Ends the session with a peer, if there is one.
    pub fn end_session(&self, peer: PeerId, reason: CloseReason) {
        if let Some(record) = self.record(peer) {
            self.send(record.owner, record.to_owner(ToOwner::End(reason)));
        }
    }

    fn record(&self, peer: PeerId) -> Option<Arc<Connected>> {
        self.with(peer, |shared| lock(&shared.session).clone())?
    }

    /// Takes the messages that wait for `worker`, oldest first, and returns which hand-off batches it may take now.
    pub(crate) fn take(&self, worker: u8) -> (VecDeque<WorkerMessage>, Seen) {
        self.mailboxes.get(usize::from(worker)).map(Mailbox::take).unwrap_or_default()
    }

    /// Takes a hand-off batch of `worker` that was `seen`, in turns by peers, of which those that are `spent` have none.
    pub(crate) fn next_hand_off(
        &self,
        worker: u8,
        seen: Seen,
        spent: impl Fn(PeerId) -> bool,
    ) -> Option<HandOff> {
        self.mailboxes.get(usize::from(worker))?.next(seen, |party| party.has_turn(&spent))
    }

    /// Whether a hand-off batch that was `seen` waits for `worker`, but for those of peers that are `spent`, and of unauthenticated senders.
    pub(crate) fn has_seen(&self, worker: u8, seen: Seen, spent: impl Fn(PeerId) -> bool) -> bool {
        let mailbox = self.mailboxes.get(usize::from(worker));
        mailbox.is_some_and(|mailbox| {
            mailbox.has_seen(seen, |party| party != Party::Unauthenticated && party.has_turn(&spent))
        })
    }

    /// Whether hand-off batches wait for `worker`.
    pub(crate) fn has_hand_offs(&self, worker: u8) -> bool {
        self.mailboxes.get(usize::from(worker)).is_some_and(Mailbox::has_hand_offs)
    }

    /// The number of messages that wait for `worker`, and the bytes of the hand-off batches in its ring.
    #[cfg(feature = "inspection")]
    pub(crate) fn waiting(&self, worker: u8) -> (usize, usize) {
        self.mailboxes.get(usize::from(worker)).map(Mailbox::waiting).unwrap_or_default()
    }

    /// Puts a hand-off batch into the ring of `worker`, or returns the batch if there is no room.
    pub fn hand(&self, worker: u8, hand_off: HandOff) -> Result<(), HandOff> {
        let Some(mailbox) = self.mailboxes.get(usize::from(worker)) else { return Err(hand_off) };
        let size = Size { bytes: hand_off.ring_bytes(), datagrams: hand_off.datagrams() };
        let party = party(&hand_off);
        mailbox.hand(hand_off, size, party)
    }

    /// Returns an identifier that no other session of this process has.
    pub(crate) fn name_session(&self) -> SessionId {
        SessionId(self.next_session.fetch_add(1, Ordering::Relaxed))
    }

    /// Sets the limit on sockets for flows that peers open; 0 if the limit is not known.
    pub fn set_sockets(&self, most: usize) {
        self.totals.set_sockets(most);
    }

    /// The flow registry of a peer, or an empty one if the hub does not know the peer.
    pub(crate) fn flows(&self, peer: PeerId) -> Arc<FlowRegistry> {
        self.with(peer, |shared| Arc::clone(&shared.flows)).unwrap_or_default()
    }

    /// The counts of a peer's TCP forwards and stream connections at all workers.
    pub(crate) fn forwards(&self, peer: PeerId) -> Arc<PeerForwards> {
        let forwards = self.with(peer, |shared| Arc::clone(&shared.forwards));
        forwards.unwrap_or_else(|| Arc::new(PeerForwards::new(self.workers())))
    }

    /// The sending rate that a peer's streams at all workers share.
    pub(crate) fn rate(&self, peer: PeerId) -> Arc<RateAccount> {
        Arc::clone(self.rates(peer).whole())
    }

    /// What each line to a peer carries, by all workers.
    pub(crate) fn line_loads(&self, peer: PeerId) -> Arc<LineLoads> {
        let made = || Arc::new(LineLoads::new(self.base));
        self.with(peer, |shared| Arc::clone(shared.line_loads.get_or_init(made))).unwrap_or_else(made)
    }

    /// The accounts of a peer's rate, and of that of each line.
    pub(crate) fn rates(&self, peer: PeerId) -> Arc<RateAccounts> {
        self.with(peer, |shared| Arc::clone(&shared.rates)).unwrap_or_default()
    }

    /// Makes a connection its peer's session and tells all other workers, unless `stays` decides that the existing session stays.
    ///
    /// Returns the record of the session that was replaced, if there was one.
    pub(crate) fn establish(
        &self,
        connected: &Arc<Connected>,
        stays: impl FnOnce(&Connected) -> bool,
    ) -> Result<Option<Arc<Connected>>, Stays> {
        let peers = self.peers.load();
        let shared = peers.get(connected.peer.0 as usize).ok_or(Stays)?;
        let mut session = lock(&shared.session);
        if session.as_deref().is_some_and(stays) {
            return Err(Stays);
        }
        let old = session.replace(Arc::clone(connected));
        // Under the lock, so that all workers hear of sessions in one order.
        if let Some(old) = old.as_ref().filter(|old| old.owner != connected.owner) {
            self.send(old.owner, old.to_owner(ToOwner::End(CloseReason::Replaced)));
        }
        self.send_to_others(connected.owner, || WorkerMessage::Connected(Arc::clone(connected)));
        Ok(old)
    }

    /// Notes that the process `new` took the place of `old`, both of them with the key of `peer`; returns the contest if that shows one.
    pub(crate) fn note_replaced(
        &self,
        peer: PeerId,
        old: Contender,
        new: Contender,
        now: Instant,
    ) -> Option<Contested> {
        self.with(peer, |shared| lock(&shared.contest).note(old, new, now))?
    }

    /// The two agents that use the key of `peer`, if there are two.
    pub(crate) fn contested(&self, peer: PeerId, now: Instant) -> Option<Contested> {
        self.with(peer, |shared| lock(&shared.contest).current(now))?
    }

    /// Whether `session` is still its peer's session: a message about an older one may be read late.
    pub(crate) fn is_current(&self, peer: PeerId, session: SessionId) -> bool {
        self.record(peer).is_some_and(|record| record.session == session)
    }

    /// Ends a session of worker `owner` and tells all other workers.
    pub(crate) fn end(&self, of: SessionRef, owner: u8) {
        let peers = self.peers.load();
        let Some(shared) = peers.get(of.peer.0 as usize) else { return };
        // Under the lock, as in [`Hub::establish`].
        let mut record = lock(&shared.session);
        record.take_if(|record| record.session == of.session);
        self.send_to_others(owner, || WorkerMessage::Disconnected { of });
    }

    /// Notes that a worker has shut down and sends no more hand-off batches.
    pub(crate) fn stopped(&self) {
        self.stopped.fetch_add(1, Ordering::AcqRel);
        for mailbox in &self.mailboxes {
            mailbox.wake();
        }
    }

    /// Whether all workers have shut down.
    pub(crate) fn all_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire) >= self.workers()
    }

    /// Counts one more lane of a peer at some worker.
    pub(crate) fn lane_hosted(&self, peer: PeerId) {
        self.with(peer, |shared| shared.lanes.fetch_add(1, Ordering::Relaxed));
    }

    /// Counts one lane less of a peer at some worker.
    pub(crate) fn lane_gone(&self, peer: PeerId) {
        self.with(peer, |shared| shared.lanes.fetch_sub(1, Ordering::Relaxed));
    }

    /// Lanes of a peer at all workers, draining lanes of ended sessions included.
    pub(crate) fn lanes(&self, peer: PeerId) -> usize {
        self.with(peer, |shared| shared.lanes.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// Notes that a peer was heard at `now`.
    pub(crate) fn note_heard(&self, peer: PeerId, now: Instant) {
        let millis = self.millis(now);
        self.with(peer, |shared| {
            note(&shared.heard, millis);
        });
    }

    /// Notes that a peer was heard at `now` on one of several lines.
    pub(crate) fn note_line_heard(&self, peer: PeerId, line: u8, now: Instant) {
        let millis = self.millis(now);
        self.with(peer, |shared| {
            if let Some(heard) = shared.lines_heard.get(usize::from(line)) {
                note(heard, millis);
            }
        });
    }

    /// How long a peer has not been heard on a line; `None` if it has never been heard there.
    pub(crate) fn line_silence(&self, peer: PeerId, line: u8, now: Instant) -> Option<Duration> {
        let heard = self.with(peer, |shared| {
            shared.lines_heard.get(usize::from(line)).map(|heard| heard.load(Ordering::Relaxed))
        });
        heard.flatten().filter(|heard| *heard > 0).map(|heard| self.since_millis(heard, now))
    }

    /// How long a peer has not been heard on any lane; `None` if it has never been heard.
    pub(crate) fn silence(&self, peer: PeerId, now: Instant) -> Option<Duration> {
        let heard = self.with(peer, |shared| shared.heard.load(Ordering::Relaxed))?;
        (heard > 0).then(|| self.since_millis(heard, now))
    }

    fn since_millis(&self, millis: u64, now: Instant) -> Duration {
        Duration::from_millis(self.millis(now).saturating_sub(millis))
    }

    /// Milliseconds since the base, never 0.
    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.base).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX - 1) + 1
    }
}

/// When a peer was heard is noted at most once in this time, because a store costs the other workers a cache miss.
pub(crate) const HEARD_RESOLUTION: Duration = Duration::from_millis(20);

/// Notes that a peer was heard at this time, unless that was noted a moment ago.
fn note(heard: &AtomicU64, millis: u64) {
    let resolution = u64::try_from(HEARD_RESOLUTION.as_millis()).unwrap_or(0);
    if heard.load(Ordering::Relaxed) + resolution <= millis {
        heard.store(millis, Ordering::Relaxed);
    }
}

/// Error of [`Hub::establish`]: the peer's existing session stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stays;

/// The party whose share of a ring `hand_off` counts against.
fn party(hand_off: &HandOff) -> Party {
    match hand_off.kind {
        Kind::Packets { .. } => Party::Unknown,
        Kind::Unauthenticated { .. } => Party::Unauthenticated,
        Kind::Frames { peer, .. } => Party::Peer(peer),
        Kind::Payloads { peer, .. } | Kind::Returned { peer } => Party::To(peer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::{Clock, ManualClock};
    use gate::OwnKey;
    use wire::messages::{Features, Hello};

    fn connected(hub: &Hub, owner: u8, instance: u8) -> Arc<Connected> {
        let hello = Hello {
            instance: [instance; 16],
            software: "test".to_owned(),
            workers: 1,
            max_lanes: 64,
            max_datagram_packet: 1452,
            services: Vec::new(),
            features: Features::default(),
            possession: None,
            preshared_keys: Vec::new(),
        };
        let (session, since) = (hub.name_session(), hub.base);
        let (peer, key) = (PeerId(0), [1; 32]);
        Arc::new(Connected {
            peer,
            session,
            owner,
            dialled: true,
            key,
            own: OwnKey::Current,
            name: [instance; 16],
            software: "".into(),
            hello,
            wanted: 1,
            lines: None,
            begun: since,
            since,
            remote: None,
        })
    }

    #[test]
    fn what_was_said_of_a_replaced_session_is_not_current_when_it_is_read() {
        let hub = Hub::new(3, 1, ManualClock::default().now());
        let first = connected(&hub, 0, 7);
        assert!(hub.establish(&first, |_| false).unwrap().is_none());
        // Worker 1 has not read of it when it has a session of its own.
        let second = connected(&hub, 1, 8);
        let replaced = hub.establish(&second, |_| false).unwrap().unwrap();
        assert_eq!((replaced.owner, replaced.session), (0, first.session));
        let (mut told, _) = hub.take(1);
        let [WorkerMessage::Connected(told)] = told.make_contiguous() else { panic!("{told:?}") };
        assert!(!hub.is_current(told.peer, told.session));
        let (to_first, _) = hub.take(0);
        assert!(matches!(to_first[0], WorkerMessage::ToOwner { of, .. } if of.session == first.session));
        assert!(
            matches!(&to_first[1], WorkerMessage::Connected(connected) if connected.session == second.session)
        );
        // The end of the first comes late, and does not end the second.
        hub.end(SessionRef { peer: PeerId(0), session: first.session }, 0);
        assert!(hub.is_current(PeerId(0), second.session));
        assert!(hub.establish(&connected(&hub, 2, 9), |_| true).is_err());
    }

    #[test]
    fn workers_have_stopped_when_each_has() {
        let hub = Hub::new(2, 0, ManualClock::default().now());
        hub.stopped();
        assert!(!hub.all_stopped());
        hub.stopped();
        assert!(hub.all_stopped());
    }
}

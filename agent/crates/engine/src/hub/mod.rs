//! Between the workers of one agent: messages about sessions and lanes, and the hand-over of what came to the wrong one.
//!
//! ```text
//!   worker a ── Message ─► mailbox of b     control plane: never dropped, order kept
//!   worker a ── HandOff ──► ring of b        packet path: a batch each, bounded; what finds it full is dropped, counted
//! ```
//!
//! With at least as many lanes as workers at both ends, neither is used in the steady state: a lane, its flows and their
//! sockets live at one worker.

mod crowds;
mod mailbox;
mod message;

pub(crate) use crowds::Crowds;
pub(crate) use message::{
    Connected, LaneLoss, LaneName, LanePort, LaneRequest, LaneSecrets, NewConfig, StreamRequest,
    WorkerMessage,
};

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use config::{self, Config};
use dataplane::{
    hand_off::{HandOff, Kind},
    relay::{AgentTotals, FlowRegistry},
};
use net::{Ready, Token, ports::Ports};
use wire::{
    ids::{PeerId, SessionId},
    messages::CloseReason,
    panics::lock,
};

use crate::{
    capture::{Capture, Taps},
    control::{congestion::pacing::RateAccount, connections::PeerForwards, windows::StreamMemory},
    hub::mailbox::{Mailbox, Party},
    origin::PeerOrigin,
};

/// Which connection is a peer's session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) owner: u8,
    pub(crate) session: SessionId,
    pub(crate) dialled: bool,
    pub(crate) key: [u8; 32],
    pub(crate) instance: [u8; 16],
    pub(crate) begun: Instant,
    pub(crate) since: Instant,
}

/// What the workers of an agent share.
pub struct Hub {
    boxes: Vec<Mailbox<WorkerMessage, HandOff>>,
    /// By [`PeerId`]; they come and go while workers read.
    peers: ArcSwap<Vec<Arc<Shared>>>,
    /// Flows of all peers, and what waits for them.
    flows: Arc<AgentTotals>,
    /// TCP forwards of all peers, and their memory.
    streams: Arc<StreamMemory>,
    /// The ports at which TCP connections wait.
    crowds: Crowds,
    next_session: AtomicU64,
    /// Workers that have shut down and hand nothing over any more.
    stopped: AtomicU8,
    /// Which control connections an operator wants to look at.
    taps: Taps,
    /// The instant from which the hub counts milliseconds.
    base: Instant,
}

struct Shared {
    session: Mutex<Option<Record>>,
    /// When the peer was last heard on a lane, in milliseconds since the base; 0 for never.
    heard: AtomicU64,
    /// Lanes that workers keep, those that drain included.
    lanes: AtomicUsize,
    flows: Arc<FlowRegistry>,
    forwards: Arc<PeerForwards>,
    /// What its streams may be sent, at all workers together.
    rate: Arc<RateAccount>,
}

impl Shared {
    fn new(flows: &Arc<AgentTotals>, workers: u8) -> Arc<Self> {
        Arc::new(Self {
            forwards: Arc::new(PeerForwards::new(workers)),
            session: Mutex::new(None),
            heard: AtomicU64::new(0),
            lanes: AtomicUsize::new(0),
            flows: FlowRegistry::of_agent(flows),
            rate: Arc::default(),
        })
    }
}

impl Hub {
    /// The exchange of `workers` workers, for `peers` peers.
    #[must_use]
    pub fn new(workers: u8, peers: usize, now: Instant) -> Arc<Self> {
        let flows = Arc::default();
        let shared = (0..peers).map(|_| Shared::new(&flows, workers)).collect();
        Arc::new(Self {
            boxes: (0..workers.max(1)).map(|_| Mailbox::default()).collect(),
            peers: ArcSwap::from_pointee(shared),
            flows,
            streams: Arc::default(),
            crowds: Crowds::default(),
            next_session: AtomicU64::new(1),
            stopped: AtomicU8::new(0),
            taps: Taps::default(),
            base: now,
        })
    }

    /// The number of workers that share this hub.
    #[must_use]
    pub fn workers(&self) -> u8 {
        u8::try_from(self.boxes.len()).unwrap_or(u8::MAX)
    }

    /// TCP forwards of all peers, and their memory.
    pub(crate) fn streams(&self) -> &Arc<StreamMemory> {
        &self.streams
    }

    /// The ports at which TCP connections wait.
    pub(crate) fn crowds(&self) -> &Crowds {
        &self.crowds
    }

    /// Sets the ready queue and the token by which the mailbox of `worker` wakes it.
    pub(crate) fn join(&self, worker: u8, ready: Ready, token: Token) {
        if let Some(mailbox) = self.boxes.get(usize::from(worker)) {
            mailbox.join(ready, token);
        }
    }

    /// Puts a message into the mailbox of `worker` and wakes it.
    pub(crate) fn post(&self, worker: u8, message: WorkerMessage) {
        if let Some(mailbox) = self.boxes.get(usize::from(worker)) {
            mailbox.post(message);
        }
    }

    /// Tells `worker` that `doubt` stands against a session.
    #[cfg(feature = "inspection")]
    pub fn post_doubt(&self, worker: u8, of: wire::ids::SessionRef, doubt: dataplane::peer::Doubt) {
        let (peer, session) = (of.peer, of.session);
        self.post(worker, WorkerMessage::Doubt { peer, session, doubt, holds: true });
    }

    /// Gives every worker but `from` a message.
    pub(crate) fn post_others(&self, from: u8, message: impl Fn() -> WorkerMessage) {
        for worker in (0..self.workers()).filter(|worker| *worker != from) {
            self.post(worker, message());
        }
    }

    /// All workers are to know a peer, under a place that none of them uses. Only the registry says so, one change at a time.
    pub(crate) fn add_peer(&self, id: PeerId, peer: &Arc<config::Peer>, origin: PeerOrigin) {
        let mut peers = Vec::clone(&self.peers.load());
        let shared = Shared::new(&self.flows, self.workers());
        match peers.get_mut(id.0 as usize) {
            Some(place) => *place = shared,
            None => peers.push(shared),
        }
        self.peers.store(Arc::new(peers));
        Mailbox::post_all(&self.boxes, || WorkerMessage::PeerAdded { id, peer: Arc::clone(peer), origin });
    }

    /// All workers are to end what a peer has. Only the registry says so.
    pub(crate) fn remove_peer(&self, id: PeerId) {
        Mailbox::post_all(&self.boxes, || WorkerMessage::PeerRemoved { id });
    }

    /// All workers are to know a peer as `peer`. Only the registry says so.
    pub(crate) fn change_peer(&self, id: PeerId, peer: &Arc<config::Peer>) {
        Mailbox::post_all(&self.boxes, || WorkerMessage::PeerChanged { id, peer: Arc::clone(peer) });
    }

    /// All workers are to run `config`, each with its share of the ports that open with it.
    pub(crate) fn configure(&self, config: &Arc<Config>, shares: Vec<Ports>) {
        let mut shares = shares.into_iter();
        Mailbox::post_all(&self.boxes, || {
            let ports = shares.next().unwrap_or_default();
            WorkerMessage::Configured(Box::new(NewConfig { config: Arc::clone(config), ports }))
        });
    }

    /// All workers are to look whether a capture of a lane is theirs, or over.
    pub fn capture(&self, capture: &Arc<Capture>) {
        Mailbox::post_all(&self.boxes, || WorkerMessage::Capture(Arc::clone(capture)));
    }

    /// The captures of control connections that operators want to look at.
    pub fn taps(&self) -> &Taps {
        &self.taps
    }

    /// Whether this end dialled the session with a peer; `None` if there is no session.
    pub fn dialled(&self, peer: PeerId) -> Option<bool> {
        self.record(peer).map(|record| record.dialled)
    }

    /// Ends the session with a peer, if there is one.
    pub fn end_session(&self, peer: PeerId, reason: CloseReason) {
        if let Some(Record { owner, session, .. }) = self.record(peer) {
            self.post(owner, WorkerMessage::EndSession { peer, session, reason });
        }
    }

    fn record(&self, peer: PeerId) -> Option<Record> {
        *lock(&self.peers.load().get(peer.0 as usize)?.session)
    }

    /// The messages that wait for `worker`, oldest first; the hand-off batches go to `hand_offs`, once those that it held are taken in.
    pub(crate) fn take(&self, worker: u8, hand_offs: &mut VecDeque<HandOff>) -> VecDeque<WorkerMessage> {
        self.boxes.get(usize::from(worker)).map(|mailbox| mailbox.take(hand_offs)).unwrap_or_default()
    }

    /// Hands a hand-off batch to `worker`; gives it back if there is no room.
    pub fn hand(&self, worker: u8, hand_off: HandOff) -> Result<(), HandOff> {
        let Some(mailbox) = self.boxes.get(usize::from(worker)) else { return Err(hand_off) };
        let (bytes, party) = (hand_off.ring_bytes(), party(&hand_off));
        mailbox.hand(hand_off, bytes, party)
    }

    /// A name for a new session.
    pub(crate) fn name_session(&self) -> SessionId {
        SessionId(self.next_session.fetch_add(1, Ordering::Relaxed))
    }

    /// The process may have `most` sockets for flows that peers open; 0 if that is not known.
    pub fn set_sockets(&self, most: usize) {
        self.flows.set_sockets(most);
    }

    /// The flow registry of a peer, or an empty one if the hub does not know the peer.
    pub(crate) fn flows(&self, peer: PeerId) -> Arc<FlowRegistry> {
        self.peers.load().get(peer.0 as usize).map(|shared| Arc::clone(&shared.flows)).unwrap_or_default()
    }

    /// The TCP forwards of a peer.
    pub(crate) fn forwards(&self, peer: PeerId) -> Arc<PeerForwards> {
        let peers = self.peers.load();
        let shared = peers.get(peer.0 as usize).map(|shared| Arc::clone(&shared.forwards));
        shared.unwrap_or_else(|| Arc::new(PeerForwards::new(self.workers())))
    }

    /// What the streams of a peer may be sent.
    pub(crate) fn rate(&self, peer: PeerId) -> Arc<RateAccount> {
        self.peers.load().get(peer.0 as usize).map(|shared| Arc::clone(&shared.rate)).unwrap_or_default()
    }

    /// Makes a connection its peer's session, unless the one that there is `stays`; all other workers are told.
    ///
    /// Returns the record of the session that it replaces, or gives up with `Err`.
    pub(crate) fn establish(
        &self,
        connected: &Arc<Connected>,
        stays: impl FnOnce(&Record) -> bool,
    ) -> Result<Option<Record>, Stays> {
        let peers = self.peers.load();
        let shared = peers.get(connected.peer.0 as usize).ok_or(Stays)?;
        let mut session = lock(&shared.session);
        if session.as_ref().is_some_and(stays) {
            return Err(Stays);
        }
        let old = session.replace(Record {
            owner: connected.owner,
            session: connected.session,
            dialled: connected.dialled,
            key: connected.key,
            instance: connected.hello.instance,
            begun: connected.begun,
            since: connected.since,
        });
        // Under the lock, so that all workers hear of sessions in one order.
        if let Some(old) = old.filter(|old| old.owner != connected.owner) {
            let reason = CloseReason::Replaced;
            self.post(
                old.owner,
                WorkerMessage::EndSession { peer: connected.peer, session: old.session, reason },
            );
        }
        self.post_others(connected.owner, || WorkerMessage::Connected(Arc::clone(connected)));
        Ok(old)
    }

    /// Whether `session` is still its peer's: what was said of an older one may be read late.
    pub(crate) fn is_current(&self, peer: PeerId, session: SessionId) -> bool {
        let peers = self.peers.load();
        let shared = peers.get(peer.0 as usize);
        shared.is_some_and(|shared| lock(&shared.session).is_some_and(|record| record.session == session))
    }

    /// A session has ended at worker `owner`; all other workers are told.
    pub(crate) fn end(&self, peer: PeerId, session: SessionId, owner: u8) {
        let peers = self.peers.load();
        let Some(shared) = peers.get(peer.0 as usize) else { return };
        let mut record = lock(&shared.session);
        if record.as_ref().is_some_and(|record| record.session == session) {
            *record = None;
        }
        self.post_others(owner, || WorkerMessage::Disconnected { peer, session });
    }

    /// A worker has shut down: it hands nothing over any more.
    pub(crate) fn stopped(&self) {
        self.stopped.fetch_add(1, Ordering::AcqRel);
        for mailbox in &self.boxes {
            mailbox.wake();
        }
    }

    /// Whether all workers have shut down.
    pub(crate) fn all_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire) >= self.workers()
    }

    /// A worker keeps one more lane of a peer.
    pub(crate) fn lane_kept(&self, peer: PeerId) {
        if let Some(shared) = self.peers.load().get(peer.0 as usize) {
            shared.lanes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A worker keeps one lane less of a peer.
    pub(crate) fn lane_gone(&self, peer: PeerId) {
        if let Some(shared) = self.peers.load().get(peer.0 as usize) {
            shared.lanes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Lanes of a peer at all workers, those of ended sessions included while they drain.
    pub(crate) fn lanes(&self, peer: PeerId) -> usize {
        self.peers.load().get(peer.0 as usize).map_or(0, |shared| shared.lanes.load(Ordering::Relaxed))
    }

    /// Notes that a peer was heard at `now`.
    pub(crate) fn note_heard(&self, peer: PeerId, now: Instant) {
        /// Notes closer together than this say nothing new; each costs the other workers a cache miss.
        const RESOLUTION_MILLIS: u64 = 20;
        let peers = self.peers.load();
        let Some(shared) = peers.get(peer.0 as usize) else { return };
        let millis = self.millis(now);
        if shared.heard.load(Ordering::Relaxed) + RESOLUTION_MILLIS <= millis {
            shared.heard.store(millis, Ordering::Relaxed);
        }
    }

    /// How long a peer has not been heard on any lane; `None` if it never was.
    pub(crate) fn silence(&self, peer: PeerId, now: Instant) -> Option<Duration> {
        let heard = self.peers.load().get(peer.0 as usize)?.heard.load(Ordering::Relaxed);
        (heard > 0).then(|| Duration::from_millis(self.millis(now).saturating_sub(heard)))
    }

    /// Milliseconds since the base, never 0.
    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.base).as_millis();
        u64::try_from(since).unwrap_or(u64::MAX - 1) + 1
    }
}

/// The session that there is stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stays;

/// Whose part of a ring `hand_off` takes.
fn party(hand_off: &HandOff) -> Party {
    match hand_off.kind {
        Kind::Packets { .. } => Party::Unknown,
        Kind::Strangers { .. } => Party::Strangers,
        Kind::Frames { peer, .. } | Kind::Payloads { peer, .. } | Kind::Returned { peer } => {
            Party::Peer(peer)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::{
        clock::{Clock, ManualClock},
        messages::{Features, Hello},
    };

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
        };
        let (session, since) = (hub.name_session(), hub.base);
        let (peer, key) = (PeerId(0), [1; 32]);
        Arc::new(Connected {
            peer,
            session,
            owner,
            dialled: true,
            key,
            name: [instance; 16],
            hello,
            wanted: 1,
            begun: since,
            since,
        })
    }

    #[test]
    fn what_was_said_of_a_replaced_session_is_not_current_when_it_is_read() {
        let hub = Hub::new(3, 1, ManualClock::default().now());
        let first = connected(&hub, 0, 7);
        assert_eq!(hub.establish(&first, |_| false), Ok(None));
        // Worker 1 has not read of it when it has a session of its own.
        let second = connected(&hub, 1, 8);
        let replaced = hub.establish(&second, |_| false).unwrap().unwrap();
        assert_eq!((replaced.owner, replaced.session), (0, first.session));
        let mut told = hub.take(1, &mut VecDeque::new());
        let [WorkerMessage::Connected(told)] = told.make_contiguous() else { panic!("{told:?}") };
        assert!(!hub.is_current(told.peer, told.session));
        let to_first = hub.take(0, &mut VecDeque::new());
        assert!(matches!(to_first[0], WorkerMessage::EndSession { session, .. } if session == first.session));
        assert!(
            matches!(&to_first[1], WorkerMessage::Connected(connected) if connected.session == second.session)
        );
        // The end of the first comes late, and does not end the second.
        hub.end(PeerId(0), first.session, 0);
        assert!(hub.is_current(PeerId(0), second.session));
        assert_eq!(hub.establish(&connected(&hub, 2, 9), |_| true), Err(Stays));
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

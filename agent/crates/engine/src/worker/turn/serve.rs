//! Ready sources, and the batches that they give.

use std::{
    io,
    time::{Duration, Instant},
};

use base::ids::LaneRef;
use dataplane::{
    datapath::{
        downlink::{Came, Downlink, Position, Received},
        segments::{Segments, Sending},
        shares,
        work::{FRAMES_PER_UNIT, HANDED_PER_TURN, PER_TURN},
    },
    forward::{Local, tcp::Cause},
    hand_off::{HandOff, Kind},
    lanes::UnderlayId,
    sockets::Source,
};
use net as sockets;
use net::{ReceiveBatch, Token, UdpRole, batch::Meta};

use crate::{
    hub::LaneLoss,
    worker::{
        context::{
            Context,
            sources::{Class, Party, Served},
            work::Rest,
        },
        outside::WorkerDownlink,
        streams::TcpForwards,
        turn::Worker,
    },
};

/// Limit on hand-off batches accepted in one turn, so that the worker's own sockets get their share.
const HAND_OFFS_PER_TURN: usize = 64;

impl Worker {
    /// Accepts hand-off batches of other workers, before this worker's own sockets are served.
    pub(crate) fn accept_hand_offs(&mut self, now: Instant) {
        let (worker, seen) = (self.cx.id.index, self.data.handed);
        self.data.notes.work.begin_share(HANDED_PER_TURN);
        for _ in 0..HAND_OFFS_PER_TURN {
            let notes = &self.data.notes;
            if notes.work.is_over() {
                break;
            }
            let next = self.cx.hub.next_hand_off(worker, seen, |peer| notes.shares.has_spent_half(peer));
            let Some(hand_off) = next else { break };
            self.cx.stats.unpublished = true;
            self.cx.stats.totals.handed_in[hand_off.kind.content()] += hand_off.datagrams();
            if self.cx.drop_if_outdated(&hand_off) {
                continue;
            }
            let waited =
                hand_off.handed.map_or(Duration::ZERO, |handed| now.saturating_duration_since(handed));
            match hand_off.kind {
                Kind::Packets { port } => {
                    let Some(underlay) = self.cx.sockets.ports.get(port).copied() else { continue };
                    let received = Received { underlay, port: Some(port) };
                    self.take_batches(&hand_off, waited, |worker| {
                        worker.downlink(now, |downlink, batch| downlink.whole_batch(batch, received));
                    });
                }
                Kind::Unauthenticated { port } => self.data.unauthenticated.accept(&hand_off, port),
                Kind::Frames { peer, lane } => {
                    let mut cost = 0;
                    self.take_batches(&hand_off, waited, |worker| {
                        worker.downlink(now, |downlink, batch| {
                            cost += downlink.frames(batch, LaneRef { peer, lane }, Came::FromWorker);
                        });
                    });
                    self.data.notes.shares.charge_handed(peer, cost);
                }
                Kind::Returned { peer } => {
                    if let Some(mut uplink) = self.data.uplink(&mut self.cx, peer, now) {
                        for (piece, data) in hand_off.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            uplink.take_back(waited + piece.meta.age, piece.counted_header(), run);
                        }
                    }
                    self.cx.watch_queue(peer, now);
                }
                Kind::Payloads { peer, lane } => {
                    if let Some(mut uplink) = self.data.uplink(&mut self.cx, peer, now) {
                        for (piece, data) in hand_off.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            let age = waited + piece.meta.age;
                            let sending = Sending { tos: piece.tos, age, repair: piece.repair };
                            uplink.take_over(lane, piece.counted_header(), run, sending);
                        }
                    }
                    self.cx.report_too_large(peer, now);
                    self.data.look_at_queue(&mut self.cx, peer, now);
                }
            }
        }
        let shares = &mut self.data.notes.shares;
        let left = self.cx.hub.has_seen(worker, seen, |peer| shares.has_spent_half(peer));
        shares.handed(left, now);
    }

    /// Copies the pieces of a hand-off batch, which has `waited`, into the receive batch, and runs `pass` over each full one.
    fn take_batches(&mut self, hand_off: &HandOff, waited: Duration, mut pass: impl FnMut(&mut Self)) {
        self.data.batch.clear();
        for (piece, data) in hand_off.pieces() {
            if self.data.batch.len() == self.data.batch.slots() {
                pass(self);
                self.data.batch.clear();
            }
            let meta = Meta { age: piece.meta.age + waited, ..piece.meta };
            self.data.batch.push(meta, data);
        }
        if !self.data.batch.is_empty() {
            pass(self);
        }
    }

    /// Serves ready sources, one class after the other, as many times as sources of the class were ready at its start: a source that
    /// has more may be served again in place of one whose share is used up. Returns how often a source may have had more.
    pub(crate) fn serve_sources(&mut self, now: Instant) -> usize {
        let mut batches = 0;
        for class in Class::ALL {
            self.data.notes.work.begin_share(PER_TURN);
            let mut left = self.cx.sources.budget(class);
            for _ in 0..self.cx.sources.count(class) {
                if left <= 0 || class == Class::Underlay && self.data.notes.work.is_over() {
                    self.cx.stats.totals.turns_full += 1;
                    break;
                }
                let Some(token) = self.cx.sources.next(class) else { break };
                let served = self.service(token, now);
                self.settle_effects(now);
                // A socket that is empty now has given a batch, too.
                batches += usize::from(served.more || class == Class::Underlay && served.units > 0);
                // A socket that has nothing costs a system call, too.
                left -= i64::from(served.units.max(1));
                self.cx.sources.served(token, served);
            }
        }
        batches
    }

    /// Serves a ready source once; returns how much it read, and whether it may have more.
    fn service(&mut self, token: Token, now: Instant) -> Served {
        let Self { cx, data, sessions, tcp, tunnel, decoy, .. } = self;
        cx.stats.unpublished = true;
        data.batch.clear();
        let more = match cx.sockets.factory.source(token) {
            Some(Source::Underlay(id)) => {
                let served = self.service_underlay(id, now);
                self.take_plain(now);
                return served;
            }
            Some(Source::Local(id)) => data.service_local(cx, id, now),
            Some(Source::Tun) => return tunnel.service_tun(cx, data, now),
            Some(Source::Listener(port)) => tcp.accept_tcp(cx, sessions, port, now),
            Some(Source::Tcp(id)) => {
                let before = tcp.tcp_bytes(id);
                tcp.pump(cx, sessions, id, Cause::Tcp, now);
                let bytes = tcp.tcp_bytes(id).saturating_sub(before);
                // A connection that has more marks itself.
                return Served { more: false, units: sockets::batch::units(0, bytes) };
            }
            Some(Source::Proxied(index)) => {
                tcp.read_proxy(cx, sessions, index, now);
                false
            }
            Some(Source::Resolve(peer)) => {
                sessions.resolved(cx, peer, token, now);
                false
            }
            Some(Source::Name) => {
                cx.name_resolved(token, now);
                false
            }
            Some(Source::Decoy(id)) => {
                decoy.mark(id);
                false
            }
            // Commands are read in every turn; a source without an entry has been closed meanwhile.
            Some(Source::Inbox) | None => false,
        };
        Served { more, units: data.batch.units() }
    }

    /// Handles a batch from a socket that carries QUIC, or the rest of a batch that an earlier turn left.
    fn service_underlay(&mut self, id: UnderlayId, now: Instant) -> Served {
        let before = (self.data.notes.work.done, self.data.notes.shares.dropped);
        let more = match self.data.rests.take_of(id) {
            Some(rest) => {
                let fresh = std::mem::replace(&mut self.data.batch, rest.batch);
                self.data.rests.keep(fresh);
                // What stands behind it in the kernel waits as long.
                self.data.notes.shares.received(rest.received.port, now - rest.since, true, now);
                self.take_batch(rest.received, rest.from, rest.since, now);
                // The datagrams of the rest were counted when the batch was received.
                self.data.batch.clear();
                true
            }
            // Without room for another rest, no batch is received that might leave one.
            None if self.data.rests.is_full() => true,
            None => self.receive_underlay(id, now),
        };
        let work = self.data.notes.work.done - before.0;
        // Datagrams that were dropped unopened cost less.
        let units = u64::from(self.data.batch.units())
            .saturating_sub(shares::saved(self.data.notes.shares.dropped - before.1));
        Served { more, units: u32::try_from(units.max(work / FRAMES_PER_UNIT)).unwrap_or(u32::MAX) }
    }

    /// Handles the received batch as far as the turn's share of work allows, and keeps the rest for the next turn; returns whether
    /// there is one.
    fn take_batch(&mut self, received: Received, from: Position, since: Instant, now: Instant) -> bool {
        let mut left = None;
        self.downlink(now, |downlink, batch| left = downlink.batch(batch, received, from));
        let Some(from) = left else { return false };
        let batch = std::mem::replace(&mut self.data.batch, self.data.rests.fresh());
        self.data.rests.push(Rest { batch, received, since, from });
        true
    }

    /// Receives a batch and handles it; returns whether there may be more.
    fn receive_underlay(&mut self, id: UnderlayId, now: Instant) -> bool {
        if self.cx.sockets.underlays.unblock(id, &mut self.cx.sockets.lanes, now) {
            self.data.unblocked(&mut self.cx, &mut self.sessions.control, id, now);
        }
        let Some(underlay) = self.cx.sockets.underlays.get_mut(id) else { return false };
        let role = underlay.role;
        let port = match role {
            UdpRole::QuicListen => self.cx.sockets.ports.iter().position(|port| *port == id),
            UdpRole::QuicDial | UdpRole::Ingress | UdpRole::Upstream | UdpRole::Decoy => None,
        };
        let outcome = underlay.socket.receive(&mut self.data.batch);
        if underlay.socket.take_moved() {
            self.sessions.way_changed(&mut self.cx, id, now);
        }
        let is_full = self.data.batch.is_full();
        match outcome {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.data.notes.shares.received(port, Duration::ZERO, false, now);
                return false;
            }
            // An ICMP error about an earlier packet; datagrams may wait behind it. Liveness checks find out whether it matters.
            Err(error) => {
                self.cx.stats.totals.refusals[role] += 1;
                self.sessions.report_unreachable(&mut self.cx, id, &error, now);
                return true;
            }
        }
        let last = self.data.batch.last;
        let waited = if self.data.batch.is_empty() { Duration::ZERO } else { self.data.batch.meta(0).age };
        let received = Received { underlay: id, port };
        let left = self.take_batch(received, Position::default(), now, now);
        // Joined datagrams are many: a batch that is not full may hold more than a turn takes.
        self.data.notes.shares.received(port, waited, is_full || left, now);
        left || !last
    }

    /// Runs `pass` over the received batch, then delivers the payloads and handles the notes that the pass has left.
    pub(crate) fn downlink(
        &mut self,
        now: Instant,
        pass: impl FnOnce(&mut WorkerDownlink<'_>, &mut ReceiveBatch),
    ) {
        self.pass(now, pass);
        self.take_released(now);
    }

    pub(crate) fn pass(
        &mut self,
        now: Instant,
        pass: impl FnOnce(&mut WorkerDownlink<'_>, &mut ReceiveBatch),
    ) {
        let mut downlink = Downlink {
            peers: &mut self.cx.peers,
            outside: self.sessions.gateway(&mut self.data.unauthenticated, self.cx.id),
            lanes: &mut self.cx.sockets.lanes,
            underlays: &mut self.cx.sockets.underlays,
            locals: &mut self.cx.sockets.locals,
            tun: self.tunnel.side_mut(),
            factory: &mut self.cx.sockets.factory,
            rng: &mut self.cx.rng,
            config: &self.cx.config,
            notes: &mut self.data.notes,
            outgoing: &mut self.data.outgoing,
            worker: self.cx.id,
            now,
        };
        pass(&mut downlink, &mut self.data.batch);
        self.cx.sockets.locals.flush(&self.data.batch);
        self.data.batch.forget_joined();
        if let Some(tun) = self.tunnel.side_mut() {
            tun.flush(&self.data.batch);
        }
        self.cx.sockets.factory.close_now(&mut self.cx.sockets.locals);
        self.cx.renew_upstreams(now);
        self.take_notes(now);
    }

    /// Handles the notes that a pass over a batch of the underlay has left.
    fn take_notes(&mut self, now: Instant) {
        while let Some((peer, flow)) = self.data.notes.new_flows.pop() {
            self.cx.watch_flow(peer, flow, now);
        }
        while let Some(lane) = self.data.notes.lanes_up.pop() {
            self.host.lane_up(&mut self.cx, lane, now);
            self.settle_effects(now);
        }
        while let Some((lane, data)) = self.data.notes.challenged.pop() {
            self.cx.lane_challenged(lane, data, now);
            self.settle_effects(now);
        }
        while let Some((lane, error)) = self.data.notes.violations.pop() {
            self.host.end_lane(&mut self.cx, lane, LaneLoss::Ended(Some(error)), now);
            self.settle_effects(now);
        }
        while let Some(peer) = self.data.notes.incomplete.pop() {
            self.cx.watch_queue(peer, now);
        }
        if let Some(spoofed) = self.data.notes.spoofed.take() {
            self.tunnel.warn_of_source(&mut self.cx, spoofed, now);
        }
    }
}

impl Context {
    /// Queues a source that may have something to read.
    pub(crate) fn add_source(&mut self, tcp: &TcpForwards, token: Token) {
        let of_peer = |peer| (Class::Local, Party::Peer(peer));
        let (class, party) = match self.sockets.factory.source(token) {
            Some(Source::Underlay(_)) => (Class::Underlay, Party::Source(token)),
            Some(Source::Local(id)) => match self.sockets.locals.get(id).map(|socket| socket.local) {
                Some(Local::Ingress { peer, .. } | Local::Upstream { peer, .. }) => of_peer(peer),
                None => return,
            },
            Some(Source::Tcp(id)) => match tcp.peer_of(id) {
                Some(peer) => of_peer(peer),
                None => return,
            },
            Some(Source::Tun) => (Class::Device, Party::Source(token)),
            Some(
                Source::Listener(_)
                | Source::Proxied(_)
                | Source::Resolve(_)
                | Source::Name
                | Source::Decoy(_)
                | Source::Inbox,
            ) => (Class::Other, Party::Source(token)),
            // The source has been closed meanwhile.
            None => return,
        };
        self.sources.add(token, class, party);
    }
}

//! From the TUN device to the peers, in packet order: [`IpUplink::batch`], [`IpUplink::packet`], [`IpUplink::for_peer`],
//! [`IpUplink::carry`], then [`Uplink::packets`] and [`Uplink::seal_packets`].

use std::time::{Duration, Instant};

use base::ids::{LaneRef, PeerId};
use ip::{
    cut::Cut,
    ecn,
    fragment::Fragments,
    mss,
    view::IpView,
    vnet::{Gso, VnetHeader},
};
use net::ReceiveBatch;
use wire::{
    context::{Context, Header},
    messages::Features,
};

use crate::{
    budget::Room,
    datapath::{
        segments::{CountedHeader, Segments, Sending},
        uplink::{NextHop, Uplink},
    },
    forward::{
        multicast::is_group,
        tun::{Answer, TunDrop, TunSide},
    },
    hand_off::Outgoing,
    lanes::{Lanes, Payloads, Underlays},
    lines::{Place, on_line},
    peer::PeerTable,
    records::Way,
    relay::{DropReason, Held, PacketClass, QueueClass, Stripes},
};

/// The parts of a worker that the uplink from the TUN device uses.
pub struct IpUplink<'a, P> {
    pub peers: &'a mut P,
    pub tun: &'a mut TunSide,
    pub lanes: &'a mut Lanes,
    pub underlays: &'a mut Underlays,
    /// The hand-off batches for other workers, which host a packet's lane.
    pub outgoing: &'a mut Outgoing,
    pub now: Instant,
}

impl<P: PeerTable> IpUplink<'_, P> {
    /// Takes the packets that were just read from the device; `sent_to` is called with each peer that some were for.
    pub fn batch(&mut self, batch: &mut ReceiveBatch, mut sent_to: impl FnMut(PeerId)) {
        for slot in 0..batch.len() {
            let Some(vnet) = self.tun.headers.get(slot).copied() else { return };
            let (_, packet) = batch.buffer_mut(slot);
            self.packet(packet, &vnet, &mut sent_to);
        }
    }

    /// Takes a packet or super-packet.
    fn packet(&mut self, packet: &mut [u8], vnet: &VnetHeader, sent_to: &mut impl FnMut(PeerId)) {
        let viewed = match vnet.gso {
            Gso::None => IpView::parse(packet),
            Gso::Tcp4 | Gso::Tcp6 | Gso::Udp => IpView::super_packet(packet),
        };
        let Ok(view) = viewed else { return self.drop(TunDrop::Malformed, 1) };
        if let Some(outcome) = self.tun.users.to_user(packet, &view, vnet) {
            self.tun.totals.received += outcome.packets;
            if let Some(mtu) = outcome.too_big {
                self.tun.answer(packet, &view, Answer::TooBig(mtu), self.now);
            }
            return;
        }
        match self.tun.routes.elected(&view) {
            Ok(peer) => {
                if let Some(peer) = self.for_peer(packet, &view, vnet, peer) {
                    sent_to(peer);
                }
            }
            Err(_) if self.tun.multicast.is_some() && is_group(view.destination) => {
                self.copies(packet, &view, vnet, sent_to);
            }
            Err(reason) => {
                self.drop(reason, 1);
                if reason == TunDrop::NoNextHop {
                    self.tun.unreachable = Some(view.destination);
                }
                self.tun.answer(packet, &view, Answer::Unreachable, self.now);
            }
        }
    }

    /// Copies a packet of the host to each peer that takes its link-local multicast.
    fn copies(&mut self, packet: &[u8], view: &IpView, vnet: &VnetHeader, sent_to: &mut impl FnMut(PeerId)) {
        let Some(mut multicast) = self.tun.multicast.take() else { return };
        match multicast.admit(view, vnet, self.now) {
            Ok(()) => {
                let before = self.tun.totals.received;
                let mut copy = std::mem::take(&mut multicast.copy);
                for peer in multicast.receivers() {
                    copy.clear();
                    copy.extend_from_slice(packet);
                    if let Some(peer) = self.for_peer(&mut copy, view, vnet, peer) {
                        sent_to(peer);
                    }
                }
                multicast.copy = copy;
                self.tun.totals.multicast_copies += self.tun.totals.received - before;
            }
            Err((reason, copies)) => self.drop(reason, copies),
        }
        self.tun.multicast = Some(multicast);
    }

    /// Takes a packet or super-packet for `peer`; returns the peer if something was sent or queued.
    #[inline]
    fn for_peer(
        &mut self,
        packet: &mut [u8],
        view: &IpView,
        vnet: &VnetHeader,
        peer: PeerId,
    ) -> Option<PeerId> {
        let room = self.peers.data(peer)?.room(self.tun.most_mtu, self.now);
        if let Some(Room { fits, may_fit }) = room {
            if mss::clamp(packet, view, may_fit, vnet.needs_checksum) {
                self.tun.totals.mss_clamped += 1;
            }
            if self.fragments(packet, view, vnet, peer, fits) {
                return Some(peer);
            }
        }
        self.carry(packet, view, vnet, peer, room.map(|room| room.may_fit))
    }

    /// Cuts IPv4 packets that are too large, if their sender allows that, and takes the fragments; false if nothing was done.
    #[inline]
    fn fragments(
        &mut self,
        packet: &mut [u8],
        view: &IpView,
        vnet: &VnetHeader,
        peer: PeerId,
        mtu: u16,
    ) -> bool {
        if view.dont_fragment || view.len <= usize::from(mtu) {
            return false;
        }
        // A checksum cannot be completed in a fragment: it is in another one.
        let Ok(cut) = Cut::new(vnet, packet, view, false) else { return false };
        if cut.largest() <= usize::from(mtu) {
            return false;
        }
        let mut whole = std::mem::take(&mut self.tun.whole);
        for index in 0..cut.count() {
            whole.clear();
            cut.append(index, &mut whole);
            self.fragment(&mut whole, peer, mtu);
        }
        self.tun.whole = whole;
        true
    }

    /// Takes one packet, in fragments if it is too large.
    fn fragment(&mut self, packet: &mut [u8], peer: PeerId, mtu: u16) {
        let Ok(view) = IpView::parse(packet) else { return self.drop(TunDrop::Malformed, 1) };
        let Some(fragments) = Fragments::new(packet, &view, mtu) else {
            self.carry(packet, &view, &VnetHeader::default(), peer, Some(mtu));
            return;
        };
        let mut fragment = std::mem::take(&mut self.tun.fragment);
        for index in 0..fragments.count() {
            fragments.write(index, &mut fragment);
            if let Ok(view) = IpView::parse(&fragment) {
                self.carry(&mut fragment, &view, &VnetHeader::default(), peer, Some(mtu));
            }
        }
        self.tun.fragment = fragment;
    }

    /// Takes a packet, or several in one, for `peer`, who may be sent IP packets of `most` bytes if that is known.
    fn carry(
        &mut self,
        packet: &mut [u8],
        view: &IpView,
        vnet: &VnetHeader,
        peer: PeerId,
        most: Option<u16>,
    ) -> Option<PeerId> {
        let state = self.peers.data_mut(peer)?;
        let completes = state.link.as_ref().is_some_and(|link| link.has(Features::PARTIAL_CHECKSUM));
        // The sizes come first, because the cut borrows the packet, which an answer needs.
        let Ok(cut) = Cut::new(vnet, packet, view, completes) else {
            self.drop(TunDrop::Malformed, 1);
            return None;
        };
        let (count, bytes) = (cut.count() as u64, cut.bytes() as u64);
        self.tun.totals.received += count;
        state.relay.uplink.receive(count, bytes);
        state.relay.stats.tun_uplink.packets += count;
        state.relay.stats.tun_uplink.bytes += bytes;
        let refused = if !state.is_live() {
            Some(DropReason::PeerRemoved)
        } else if state.relay.held == Held::Stopped {
            Some(DropReason::Quota)
        } else if state.link.as_ref().is_some_and(|link| !link.has(Features::PACKETS)) {
            Some(DropReason::NoTun)
        } else if most.is_some_and(|mtu| cut.largest() > usize::from(mtu)) {
            Some(DropReason::TooLarge)
        } else {
            None
        };
        if let Some(reason) = refused {
            state.relay.uplink.drop(reason, count);
            let answer = match (reason, most) {
                (DropReason::TooLarge, Some(mtu)) => Answer::TooBig(mtu),
                _ => Answer::Unreachable,
            };
            self.tun.answer(packet, view, answer, self.now);
            return None;
        }
        if let Some(records) = &mut self.tun.records {
            records.add(&state.config.name, view, Way::ToPeer, count, bytes, self.now);
        }
        let (mapped, cut) = match &state.map {
            None => (*view, cut),
            Some(map) => {
                // A single packet has the checksum that the cut has left: a partial one, or the complete one.
                let single = VnetHeader { needs_checksum: cut.is_partial(), ..*vnet };
                let vnet = if vnet.gso == Gso::None { &single } else { vnet };
                let view = map.to_peer(packet, view, vnet.needs_checksum);
                let Ok(cut) = Cut::new(vnet, packet, &view, completes) else {
                    state.relay.uplink.drop(DropReason::Malformed, count);
                    return None;
                };
                (view, cut)
            }
        };
        let class = PacketClass {
            turn: Stripes::turn(mapped.flow_hash()),
            partial: cut.is_partial(),
            tos: state.config.dscp.outer(view.traffic_class) | ecn::encapsulate(view.traffic_class),
            lane: None,
            ahead: goes_ahead(view.traffic_class),
            repair: state.repair_of_packets(view.traffic_class),
            copied: state.copies_packets(view.traffic_class),
        };
        let mut uplink = state.uplink(self.lanes, self.underlays, self.outgoing, self.now);
        let lane = uplink.packets(&cut, class);
        if let Some(count_of_lane) = self.tun.totals.by_lane.get_mut(usize::from(lane)) {
            *count_of_lane += count;
        }
        Some(peer)
    }

    fn drop(&mut self, reason: TunDrop, count: u64) {
        self.tun.totals.received += count;
        self.tun.totals.dropped[reason] += count;
    }
}

impl Uplink<'_> {
    /// Sends IP packets, or queues them; they are in the account already. Returns the lane that their hash gives them.
    fn packets(&mut self, cut: &Cut<'_>, class: PacketClass) -> u8 {
        let sending = Sending { tos: class.tos, age: Duration::ZERO, repair: class.repair_class() };
        let (header, lane) = (context(class), self.stripe(class.bucket()));
        let (line, class_of_queue) = (self.line_of_lane(lane), QueueClass::Packets(class));
        let at_once =
            self.relay.sends_at_once(line, class_of_queue) && !self.holds_back(cut.largest(), &sending);
        let twice = if at_once && class.copied { self.cut_twice(header, cut, lane, &sending) } else { 0 };
        let sent = if twice > 0 {
            twice
        } else if at_once {
            let payloads = Payloads::cut(header.as_slice(), cut, class.tos);
            self.seal_packets(lane, payloads, &sending, |outgoing, worker, place| {
                outgoing.packets(worker, place, header, cut, sending);
            })
        } else {
            0
        };
        if twice == 0 {
            self.relay.copies.alone += if class.copied { sent as u64 } else { 0 };
            self.count_load(lane, cut.bytes() * sent / cut.count().max(1));
        }
        if sent < cut.count() {
            let mut rest = Vec::new();
            for index in sent..cut.count() {
                cut.append(index, &mut rest);
            }
            let segment = cut.header().len() + cut.segment();
            self.relay.enqueue(line, class_of_queue, &rest, segment, self.now, self.now);
        }
        lane
    }

    /// Takes over IP packets of one flow from another worker, for lane `lane`, which this worker hosts; they are in the account
    /// already. Packets that find no room wait here.
    pub(super) fn take_over_packets(
        &mut self,
        lane: u8,
        header: Header,
        partial: bool,
        run: Segments<'_>,
        sending: &Sending,
    ) {
        let payloads = Payloads::new(header.as_slice(), run.data, run.segment, sending.tos);
        // The way never leads to another worker: the caller has checked that. Under a rate they have had their turn there.
        let line = self.line_of_lane(lane);
        let first = self.relay.queue_of(line).is_empty() || self.relay.share_of(line).is_limited();
        let sent = if first { self.seal_packets(lane, payloads, sending, |_, _, _| {}) } else { 0 };
        if sent < run.count() {
            let rest = run.skip(sent);
            // They were read by another worker of this agent.
            let view = IpView::parse(rest.first()).ok();
            let turn = view.map_or(0, |view| Stripes::turn(view.flow_hash()));
            let ahead = view.is_some_and(|view| goes_ahead(view.traffic_class));
            let (tos, repair) = (sending.tos, sending.repair.map(|class| class.terms));
            let class = PacketClass { turn, partial, tos, lane: Some(lane), ahead, repair, copied: false };
            let (class, arrived) = (QueueClass::Packets(class), sending.arrived(self.now));
            self.relay.enqueue(line, class, rest.data, rest.segment, arrived, self.now);
        }
    }

    /// Sends IP packets that waited, and have been at this host for `age`; returns how many were dealt with.
    pub(super) fn waiting_packets(&mut self, class: PacketClass, run: Segments<'_>, age: Duration) -> usize {
        let sending = Sending { tos: class.tos, age, repair: class.repair_class() };
        if self.holds_back(run.first().len(), &sending) {
            return 0;
        }
        let header = context(class);
        let given = class
            .lane
            .filter(|lane| self.link.as_deref().is_some_and(|link| link.pool.is_up(self.lanes, *lane)));
        let lane = given.unwrap_or_else(|| self.stripe(class.bucket()));
        if class.copied {
            let unrepaired = Sending { repair: None, ..sending };
            let sent = self.send_twice(header, run, lane, &unrepaired);
            if sent > 0 {
                return sent;
            }
        }
        let payloads = Payloads::new(header.as_slice(), run.data, run.segment, class.tos);
        let sent = self.seal_packets(lane, payloads, &sending, |outgoing, worker, place| {
            outgoing.payloads(worker, place, CountedHeader::of(header, run.count()), run, sending);
        });
        self.relay.copies.alone += if class.copied { sent as u64 } else { 0 };
        if class.lane.is_none() {
            // Those of another worker were counted there.
            self.count_load(lane, run.data.len().min(sent.saturating_mul(run.segment)));
        }
        sent
    }

    /// Puts IP packets into packets of lane `lane`, or of another one if that is down; `hand_over` gives them to its host if that is
    /// another worker. Returns the number of packets that were dealt with; the rest found no lane or no room.
    fn seal_packets(
        &mut self,
        lane: u8,
        payloads: Payloads<'_>,
        sending: &Sending,
        hand_over: impl FnOnce(&mut Outgoing, u8, LaneRef),
    ) -> usize {
        let Some(hop) = self.next_hop(lane) else { return 0 };
        if let NextHop::Worker { worker, lane } = hop {
            hand_over(self.outgoing, worker, LaneRef { peer: self.peer, lane });
            self.relay.uplink.handed_over += payloads.count() as u64;
            return payloads.count();
        }
        let (done, _) = self.send_all(hop, payloads, sending, |uplink, _, _| {
            uplink.relay.uplink.drop(DropReason::TooLarge, 1);
            1
        });
        done
    }

    /// Whether an IP packet of `bytes` bytes is to wait until it is known that it does not fit.
    fn holds_back(&self, bytes: usize, sending: &Sending) -> bool {
        let is_repaired = sending.repair.is_some();
        self.link.as_deref().is_some_and(|link| link.budget.holds_back(bytes, is_repaired, self.now))
    }

    /// The lane for packets of a bucket.
    pub(super) fn stripe(&mut self, bucket: u8) -> u8 {
        let Some(link) = self.link.as_deref() else { return 0 };
        let (lanes, pool, now) = (&*self.lanes, &link.pool, self.now);
        if pool.lines.is_some() {
            let place = Place { bucket, index: bucket };
            return on_line(pool.lines.as_ref(), &mut self.relay.lines, place, now);
        }
        let stripes = self.relay.stripes.get_or_insert_with(|| Box::new(Stripes::new(now)));
        stripes.lane(bucket, pool.wanted, |index| pool.is_up(lanes, index), now)
    }
}

/// Whether packets of this traffic class go ahead of others while there is a rate: network control (CS6) and telephony (EF), as
/// RFC 4594 §2 names them. Queues bound how much of the rate they take.
fn goes_ahead(traffic_class: u8) -> bool {
    matches!(traffic_class >> 2, 46 | 48)
}

/// The encoded context that precedes IP packets.
fn context(class: PacketClass) -> Header {
    Context::Packet { partial: class.partial, payload_at: 0 }.encode()
}

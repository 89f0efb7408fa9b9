//! Payloads that travel on two lines (`peer.redundant`): once in the account, twice on the way, delivered once.
//!
//! ```text
//!  uplink.rs: seal ─────────────┐              ┌─ the lane of the bucket, or of the flow
//!  ip_uplink.rs: packets ───────┴─► send_twice ┤
//!                                              └─ the same place on another line: not in the account
//!
//!  downlink.rs: context 17 ──► copied_frame: the first ──► frame, ip; another one is counted and dropped
//! ```

use base::ids::LaneRef;
use ip::cut::Cut;
use net::ReceiveBatch;
use wire::{
    context::{Context, Header, PayloadKind},
    messages::Features,
};

use crate::{
    datapath::{
        downlink::{Downlink, Outside},
        repair::FrameAt,
        segments::{CountedHeader, Segments, Sending},
        uplink::{FRAME_OVERHEAD, NextHop, PACKET_OVERHEAD, Uplink, bucket_of, not_sent},
    },
    lanes::{Frame, PushError},
    lines::{Arrival, Place, on_line},
    peer::{PeerData, PeerTable},
    relay::{DatagramRelay, DropReason, FlowId, Origin, Standing},
};

impl PeerData {
    /// Whether IP packets with this traffic class that we send to the peer are to travel on two lines.
    #[inline]
    #[must_use]
    pub fn copies_packets(&self, traffic_class: u8) -> bool {
        self.config.redundant.dscp.contains(traffic_class >> 2)
    }
}

impl DatagramRelay {
    /// Whether datagrams of this origin are to travel on two lines.
    fn is_redundant(&self, origin: &Origin) -> bool {
        let redundant = &self.redundant;
        match *origin {
            Origin::Ingress { ingress, .. } => {
                self.services.name_of(ingress).is_some_and(|name| redundant.has(name))
            }
            Origin::Upstream { service, .. } => redundant.own.contains(&service),
        }
    }
}

impl Uplink<'_> {
    /// Sends datagrams of a flow on two lines, if it is one that does; returns how many were dealt with. The rest goes on as others do.
    pub(super) fn seal_twice(&mut self, id: FlowId, run: Segments<'_>, sending: &Sending) -> Option<usize> {
        if self.relay.redundant.services.is_empty() || self.link.is_none() {
            return None;
        }
        let flow = self.relay.flows.get(id)?;
        let (standing, origin, number) = (flow.standing, flow.origin, flow.number);
        if !self.relay.is_redundant(&origin) || standing == Standing::Refused || self.relay.awaiting.holds(id)
        {
            return None;
        }
        let service = self.service_of(&origin)?;
        let client = if standing == Standing::Opening { self.client_of(id, &origin) } else { None };
        let header = flow.header(service, client);
        let index =
            flow.prefers(|index| self.link.as_deref().is_some_and(|link| link.pool.is_up(self.lanes, index)));
        let lines = self.link.as_deref().and_then(|link| link.pool.lines.as_ref());
        let place = Place { bucket: bucket_of(number), index };
        let index = on_line(lines, &mut self.relay.lines, place, self.now);
        let sent = self.send_twice(header, run, index, sending);
        if sent > 0
            && let Some(hop) = self.next_hop(index)
        {
            self.note_move(id, hop);
        }
        Some(sent)
    }

    /// Sends IP packets on lane `index` and copies of them on another line, as [`Uplink::send_twice`] does.
    pub(super) fn cut_twice(&mut self, header: Header, cut: &Cut<'_>, index: u8, sending: &Sending) -> usize {
        let sending = Sending { repair: None, ..*sending };
        if cut.header().is_empty() {
            let run = Segments { data: cut.payload(), segment: cut.segment() };
            return self.send_twice(header, run, index, &sending);
        }
        let mut whole = Vec::new();
        for index in 0..cut.count() {
            cut.append(index, &mut whole);
        }
        let run = Segments { data: &whole, segment: cut.header().len() + cut.segment() };
        self.send_twice(header, run, index, &sending)
    }

    /// Sends datagrams on lane `index` and copies of them on another line. Returns how many were dealt with: none if there is no
    /// second line, if the peer would take a copy for another payload, or if they fit into no packet with a number.
    pub(super) fn send_twice(
        &mut self,
        header: Header,
        run: Segments<'_>,
        index: u8,
        sending: &Sending,
    ) -> usize {
        let (count, metered) = (run.count(), self.relay.redundant.metered);
        let able = self.link.as_deref().filter(|link| link.has(Features::COPIES));
        let lines = able.and_then(|link| link.pool.lines.as_ref());
        let second = lines.and_then(|lines| lines.second_lane(index, metered));
        let Some(second) = second else { return 0 };
        let mut left = run;
        for done in 0..count {
            let header = self.relay.flows.registry.copies.header(&header);
            let sent =
                header.is_some_and(|header| self.send_both(header, left.first(), [index, second], sending));
            if !sent {
                return done;
            }
            left = left.skip(1);
        }
        count
    }

    /// Sends a payload on each of two lanes, of which the first that takes it is counted; false if neither does.
    fn send_both(&mut self, header: Header, payload: &[u8], lanes: [u8; 2], sending: &Sending) -> bool {
        let mut sent = 0;
        for index in lanes {
            let counted = sent == 0;
            if self.send_one(header, payload, index, counted, sending) {
                self.count_load(index, payload.len());
                sent += 1;
            }
        }
        let copies = &mut self.relay.copies;
        copies.numbered += u64::from(sent > 0);
        copies.alone += u64::from(sent == 1);
        copies.sent += u64::from(sent == 2);
        copies.sent_bytes += if sent == 2 { payload.len() as u64 } else { 0 };
        sent > 0
    }

    /// Sends a payload on lane `index`; true if that took it.
    fn send_one(
        &mut self,
        header: Header,
        payload: &[u8],
        index: u8,
        counted: bool,
        sending: &Sending,
    ) -> bool {
        match self.next_hop(index) {
            Some(NextHop::Worker { worker, lane }) => {
                // The other worker could only drop what does not fit; here it goes on without a number, or in pieces.
                let budget = self.link.as_deref().map_or(0, |link| link.budget.bytes());
                if header.as_slice().len() + payload.len() + FRAME_OVERHEAD + PACKET_OVERHEAD > budget {
                    return false;
                }
                let lane = LaneRef { peer: self.peer, lane };
                let header = CountedHeader { header, counted: u32::from(counted) };
                let run = Segments { data: payload, segment: payload.len() };
                self.outgoing.payloads(worker, lane, header, run, *sending);
                self.relay.uplink.handed_over += u64::from(counted);
                true
            }
            Some(hop @ NextHop::Lane(_)) => self.push_copy(hop, header, payload, counted, sending).is_ok(),
            Some(NextHop::Plain) | None => false,
        }
    }

    fn push_copy(
        &mut self,
        hop: NextHop,
        header: Header,
        payload: &[u8],
        counted: bool,
        sending: &Sending,
    ) -> Result<(), PushError> {
        let frame = Frame { header: header.as_slice(), payload, counted, tos: sending.tos };
        self.push(hop, frame, sending)?;
        if counted {
            self.note_sent(1, payload.len(), sending);
        }
        Ok(())
    }

    /// Takes over a payload that travels twice, or its copy, from another worker.
    pub(super) fn take_over_copy(
        &mut self,
        hop: NextHop,
        header: Header,
        payload: &[u8],
        counted: bool,
        sending: &Sending,
    ) {
        if let Err(error) = self.push_copy(hop, header, payload, counted, sending) {
            self.relay.uplink.drop(not_sent(error), counted.into());
        }
    }
}

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Takes a payload that travels on two lines: the first of both is delivered. One that is `late` is dropped, and the other one may
    /// still come in time.
    pub(super) fn copied_frame(
        &mut self,
        batch: &mut ReceiveBatch,
        frame: FrameAt,
        lane: LaneRef,
        late: bool,
    ) {
        let FrameAt { slot, range } = frame;
        let peer = lane.peer;
        let data = &batch.buffer(slot)[range.clone()];
        let Some(Context::Copied { series, number, payload_at }) = Context::decode(data) else {
            return self.refuse(peer, Some(data.len()), DropReason::Malformed);
        };
        let inner = range.start + payload_at..range.end;
        let bytes = inner.len();
        let context = Context::decode(&batch.buffer(slot)[inner.clone()]);
        let Some(Context::Packet { .. } | Context::Flow { .. } | Context::Open { .. }) = context else {
            return self.refuse(peer, Some(bytes), DropReason::Malformed);
        };
        let Some(state) = self.peers.data_mut(peer) else { return };
        let copies = &state.relay.flows.registry.copies;
        let arrival = if late { copies.look(series, number) } else { copies.take(series, number) };
        if arrival != Arrival::First {
            return state.relay.copies.came(arrival);
        }
        if late {
            self.expired(&batch.buffer(slot)[inner], peer);
            return;
        }
        state.relay.copies.came(arrival);
        match PayloadKind::of(&batch.buffer(slot)[inner.clone()]) {
            PayloadKind::Packet { partial, .. } => {
                self.ip(batch, slot, inner.start + 1..inner.end, partial, peer);
            }
            PayloadKind::Report(_) | PayloadKind::Repair | PayloadKind::Copied | PayloadKind::Other => {
                self.frame(batch, slot, inner, lane);
            }
        }
    }
}

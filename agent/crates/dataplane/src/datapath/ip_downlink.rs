//! From the peers to the TUN device: [`Downlink::ip`], after [`Downlink::packet`](crate::datapath::downlink) has opened the QUIC packet.

use std::ops::Range;

use crate::{records::Way, relay::DropReason};
use base::ids::PeerId;
use ip::{
    ecn::{self, Decapsulated},
    map::Hidden,
    mss,
    packets::Packet,
    view::IpView,
};
use net::ReceiveBatch;

use crate::{
    datapath::{
        downlink::{Downlink, Outside, Spoofed},
        work,
    },
    forward::multicast::is_group,
    peer::PeerTable,
};

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Takes an IP packet of `peer`, which lies at `range` of the buffer in `slot`; it is listed for the device or dropped.
    pub(super) fn ip(
        &mut self,
        batch: &mut ReceiveBatch,
        slot: usize,
        range: Range<usize>,
        partial: bool,
        peer: PeerId,
    ) {
        let Some(state) = self.peers.data_mut(peer) else { return };
        let bytes = range.len() as u64;
        state.relay.downlink.receive(1, bytes);
        state.relay.stats.tun_downlink.packets += 1;
        state.relay.stats.tun_downlink.bytes += bytes;
        if !state.is_live() {
            // The packet was under way when the peer was removed.
            state.relay.downlink.drop(DropReason::PeerRemoved, 1);
            return;
        }
        let Some(tun) = self.tun.as_deref_mut() else {
            state.relay.downlink.drop(DropReason::NoTun, 1);
            return;
        };
        if let Some(map) = &state.map {
            let (_, buffer) = batch.buffer_mut(slot);
            let packet = &mut buffer[range.clone()];
            // What cannot be read is dropped below.
            if let Ok(view) = IpView::parse(packet)
                && let Err(Hidden) = map.from_peer(packet, &view, partial)
            {
                state.relay.downlink.drop(DropReason::Spoofed, 1);
                let multicast = is_group(view.destination);
                self.notes.spoofed.get_or_insert(Spoofed { peer, source: view.source, multicast });
                return;
            }
        }
        let outer = batch.meta(slot).ecn;
        // Nothing changes if the outer packet has no ECN mark, or the same one as the inner packet.
        let same_ecn = outer == 0 || inner_class(&batch.buffer(slot)[range.clone()]) & 0b11 == outer;
        let packet = Packet { slot, range, partial, owner: peer.0 };
        if same_ecn && tun.push_continued(batch, &packet) {
            state.relay.stats.downlink_bytes += bytes;
            if let Some(records) = &mut tun.records {
                records.add_continued(bytes, self.now);
            }
            return;
        }
        let Ok(view) = IpView::parse(&batch.buffer(slot)[packet.range.clone()]) else {
            state.relay.downlink.drop(DropReason::Malformed, 1);
            return;
        };
        // A checksum that cannot be completed would be delivered wrong.
        if partial && view.checksum().is_none() {
            state.relay.downlink.drop(DropReason::Malformed, 1);
            return;
        }
        let may_send = tun.routes.may_send(&view, peer) && !tun.users.has(view.source);
        if !may_send && !tun.passes_error(&batch.buffer(slot)[packet.range.clone()], &view, peer, self.now) {
            state.relay.downlink.drop(DropReason::Spoofed, 1);
            let multicast = is_group(view.destination);
            self.notes.spoofed.get_or_insert(Spoofed { peer, source: view.source, multicast });
            return;
        }
        let range = packet.range.start..packet.range.start + view.len;
        let most = state.room(tun.most_mtu, self.now).map(|room| room.may_fit);
        let (_, buffer) = batch.buffer_mut(slot);
        let inner = &mut buffer[range.clone()];
        if !same_ecn {
            // It has no mark of ours: that would be inside, too.
            self.notes.marked += u64::from(outer == ecn::CE && view.traffic_class & 0b11 != ecn::CE);
            match ecn::decapsulate(view.traffic_class & 0b11, outer) {
                Decapsulated::Keep => {}
                Decapsulated::Mark(bits) => ecn::set_ecn(inner, bits),
                Decapsulated::Drop => {
                    state.relay.downlink.drop(DropReason::NotEcnCapable, 1);
                    return;
                }
            }
        }
        if let Some(mtu) = most
            && mss::clamp(inner, &view, mtu, partial)
        {
            tun.totals.mss_clamped += 1;
        }
        state.relay.stats.downlink_bytes += view.len as u64;
        if let Some(records) = &mut tun.records {
            let (peer, bytes) = (&state.config.name, view.len as u64);
            records.add(peer, &view, Way::FromPeer, 1, bytes, self.now);
        }
        self.notes.work.charge(work::DELIVERY);
        tun.push(batch, Packet { range, ..packet }, &view);
    }
}

/// The traffic class of an IP packet whose headers have not been checked; any value if it is no IP packet.
#[inline]
fn inner_class(packet: &[u8]) -> u8 {
    match packet {
        [first, second, ..] if first >> 4 == 6 => first << 4 | second >> 4,
        [_, second, ..] => *second,
        [_] | [] => 0,
    }
}

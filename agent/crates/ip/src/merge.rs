//! Joins packets that came from a peer into super-packets for the TUN device: one write for many packets of a flow.
//!
//! ```text
//!   a flow's packets    | header | payload |   | header | payload |   | header | payload |
//!                            |         |                      |                      |
//!                         checked, lengths and checksums      |                      |
//!                         made those of the whole             |                      |
//!                            v         v                      v                      v
//!   what is written     | header | payload ················ payload ················ payload |
//! ```
//!
//! Cut again by the kernel, a super-packet gives the packets that went in, but for the identification of IPv4 packets that
//! may not be fragmented, where it means nothing (RFC 6864 §4.1). Of packets inside of a tunnel (`tunnels.rs`), the flow is the
//! inner one, and the outer headers come before its own.

use crate::{
    checksum,
    packets::{Buffers, MOST_PIECES, Packet, PacketDelivery, TunOffload},
    tunnels::{Outer, is_tunnel_port},
    view::{ChecksumAt, Fragment, IPV4_HEADER, IPV6_HEADER, IpView, TCP, UDP},
    vnet::{Gso, VnetHeader},
};

/// Flows that are joined at a time: beyond this, one of them begins anew.
const FLOWS: usize = 8;

/// Packets of UDP in one: `UDP_MAX_SEGMENTS` before Linux 6.9.
const MOST_DATAGRAMS: usize = 64;

/// Bytes of the longest IP packet.
const MOST_PACKET: usize = 65_535;

/// Bytes of the longest header that is joined: IPv6 without extension headers and the longest TCP header.
const MOST_HEADER: usize = IPV6_HEADER + 60;

const UDP_HEADER: usize = 8;

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;
const ACK: u8 = 0x10;
const PSH: u8 = 0x08;

/// Joins consecutive packets of a flow within one received batch.
#[derive(Debug)]
pub struct Merger {
    flows: [Flow; FLOWS],
    /// What stands before the packets of those flows that are inside of a tunnel.
    outers: [Outer; FLOWS],
    /// The index of the flow whose packet came last.
    last: usize,
    /// The index of the flow that is replaced next.
    next: usize,
}

impl Default for Merger {
    fn default() -> Self {
        Self { flows: [Flow::NONE; FLOWS], outers: [Outer::NONE; FLOWS], last: 0, next: 0 }
    }
}

impl Merger {
    /// Forgets all flows: with each new batch, and after each delivery.
    pub fn clear(&mut self) {
        for flow in &mut self.flows {
            flow.open = false;
        }
    }

    /// Lists `packet`, which lies in `batch`, for writing.
    ///
    /// What follows the packet's own length is cut off. Without `offload.tcp` a partial checksum is completed in `batch`.
    ///
    /// # Panics
    /// When there is no such buffer or range.
    pub fn push(
        &mut self,
        list: &mut PacketDelivery,
        batch: &mut impl Buffers,
        packet: Packet,
        view: &IpView,
        offload: TunOffload,
    ) {
        let Packet { slot, range, partial, owner } = packet;
        let range = range.start..range.end.min(range.start + view.len);
        let checksum = view.checksum();
        let mut vnet = VnetHeader::default();
        if let Some(ChecksumAt { start, offset }) = checksum.filter(|_| partial) {
            if !offload.tcp {
                checksum::complete(&mut batch.bytes_mut(slot)[range.clone()], start, offset);
            } else {
                vnet.needs_checksum = true;
                // They are within the packet, whose length has 16 bits.
                (vnet.checksum_start, vnet.checksum_offset) = (start as u16, offset as u16);
            }
        }
        let mergeable = checksum.is_some() && offload.tcp && (view.protocol == TCP || offload.udp);
        let packet = Packet { slot, range, partial, owner };
        let known = self.flows.iter().position(|flow| flow.open && flow.is_of(view));
        if let Some(known) = known {
            self.last = known;
            if mergeable && self.join(known, list, batch, &packet) {
                return;
            }
            self.flows[known].open = false;
        } else if view.ports.is_none() {
            // Perhaps a fragment of a flow's datagram: nothing that follows may overtake it.
            for flow in &mut self.flows {
                flow.open &= !flow.is_between(view);
            }
        }
        let message = list.begin(vnet, owner, &[]);
        list.add(message, packet.slot, packet.range.clone());
        if mergeable {
            let bytes = &batch.bytes(slot)[packet.range.clone()];
            let may_hold_others = is_tunnel_port(view) && !partial && offload.tunnels.joins(view.is_ipv6());
            if may_hold_others && let Some((outer, flow)) = begin_inside(bytes, view, &packet, message) {
                self.last = self.room(known);
                (self.flows[self.last], self.outers[self.last]) = (flow, outer);
            } else if let Some(flow) = Flow::begin(bytes, view, packet, message) {
                self.last = self.room(known);
                self.flows[self.last] = flow;
            }
        }
    }

    /// Tries to join `packet`, which lies in `batch`, to an open flow of the same owner, without a view. Returns true if it continues
    /// one, and then it has that flow's addresses. Otherwise nothing has changed, and the caller pushes it.
    ///
    /// # Panics
    /// When there is no such buffer or range.
    #[inline]
    pub fn try_join(&mut self, list: &mut PacketDelivery, batch: &impl Buffers, packet: &Packet) -> bool {
        let last = self.last;
        if self.join(last, list, batch, packet) {
            return true;
        }
        for index in (0..FLOWS).filter(|index| *index != last) {
            if self.join(index, list, batch, packet) {
                self.last = index;
                return true;
            }
        }
        false
    }

    /// Joins `packet` to the message of the flow with this index; see [`Flow::join`].
    #[inline]
    fn join(
        &mut self,
        index: usize,
        list: &mut PacketDelivery,
        batch: &impl Buffers,
        packet: &Packet,
    ) -> bool {
        let flow = &mut self.flows[index];
        if flow.inside {
            return join_inside(flow, &mut self.outers[index], list, batch, packet);
        }
        flow.join(list, batch, packet)
    }

    /// The index that a new flow gets: that of `known`, of a closed flow, or the next one in turn.
    fn room(&mut self, known: Option<usize>) -> usize {
        let free = known.or_else(|| self.flows.iter().position(|flow| !flow.open));
        free.unwrap_or_else(|| {
            self.next = (self.next + 1) % FLOWS;
            self.next
        })
    }
}

/// The last message of a flow, to which packets may still be joined.
#[derive(Clone, Debug)]
struct Flow {
    open: bool,
    /// Whether the packets are inside of a tunnel. All but `view` is then of the inner packets, and indices are from the start of
    /// the inner IP header.
    inside: bool,
    message: usize,
    owner: u32,
    partial: bool,
    view: Option<IpView>,
    /// The headers of the first packet. Every other packet has the same bits where `same_bits` is 1.
    template: [u8; MOST_HEADER],
    same_bits: &'static [u8; MOST_HEADER],
    /// The ports, as they stand in the packet.
    ports: [u8; 4],
    /// Bytes of the IP header and of both headers.
    ip: usize,
    header: usize,
    tcp: bool,
    /// The first packet, until its complete checksum has been verified.
    unverified: Option<(usize, usize, usize)>,
    packets: usize,
    /// Bytes of L4 payload: of each packet but the last, and of all together.
    segment: usize,
    payload: usize,
    next_sequence: u32,
    id: u16,
    /// Sums: of the IPv4 header but for length, identification and checksum; of the pseudo-header but for the length.
    ip_sum: u16,
    pseudo_sum: u16,
}

impl Flow {
    const NONE: Self = Self {
        open: false,
        inside: false,
        message: 0,
        owner: 0,
        partial: false,
        view: None,
        template: [0; MOST_HEADER],
        same_bits: &UDP4,
        ports: [0; 4],
        ip: 0,
        header: 0,
        tcp: false,
        unverified: None,
        packets: 0,
        segment: 0,
        payload: 0,
        next_sequence: 0,
        id: 0,
        ip_sum: 0,
        pseudo_sum: 0,
    };

    /// A flow that begins with `bytes`, if others can be joined to them. They are listed as message `message`.
    fn begin(bytes: &[u8], view: &IpView, packet: Packet, message: usize) -> Option<Self> {
        let (ip, tcp) = (view.transport_at, view.protocol == TCP);
        let (plain, same_bits) = match (view.is_ipv6(), tcp) {
            (false, true) => (IPV4_HEADER, &TCP4),
            (false, false) => (IPV4_HEADER, &UDP4),
            (true, true) => (IPV6_HEADER, &TCP6),
            (true, false) => (IPV6_HEADER, &UDP6),
        };
        let transport = bytes.get(ip..)?;
        let header = ip + if tcp { usize::from(transport.get(12)? >> 4) * 4 } else { UDP_HEADER };
        let is_plain = ip == plain && view.fragment == Fragment::No && bytes.len() == view.len;
        // All that is looked at later lies within the headers: TCP's have no less than 20 bytes (RFC 9293 §3.1).
        if tcp && header < ip + TCP_HEADER {
            return None;
        }
        // The reserved bits of TCP are 0, and every flag but ACK.
        if !is_plain || tcp && (transport[12] & 0x0f != 0 || transport.get(13)? != &ACK) {
            return None;
        }
        let segment = bytes.len().checked_sub(header).filter(|bytes| *bytes > 0)?;
        let mut flow = Self {
            open: true,
            message,
            owner: packet.owner,
            partial: packet.partial,
            view: Some(*view),
            same_bits,
            ports: *transport.first_chunk()?,
            ip,
            header,
            tcp,
            unverified: (!packet.partial).then_some((packet.slot, packet.range.start, packet.range.end)),
            packets: 1,
            segment,
            payload: segment,
            pseudo_sum: checksum::pseudo_header(view.source, view.destination, view.protocol),
            ..Self::NONE
        };
        flow.template.get_mut(..header)?.copy_from_slice(bytes.get(..header)?);
        if !view.is_ipv6() {
            let parts = [&bytes[..2], &bytes[6..10], &bytes[12..20]];
            let sum: u64 = parts.into_iter().map(|part| u64::from(checksum::sum(part))).sum();
            (flow.ip_sum, flow.id) = (checksum::fold(sum), word(bytes, 4));
        }
        if tcp {
            flow.next_sequence = sequence(bytes, ip).wrapping_add(segment as u32);
        }
        flow.says_right(bytes).then_some(flow)
    }

    /// Whether `view` is of this flow.
    fn is_of(&self, view: &IpView) -> bool {
        self.is_between(view)
            && self.view.is_some_and(|own| own.protocol == view.protocol && own.ports == view.ports)
    }

    /// Whether `view` is of the same two addresses.
    fn is_between(&self, view: &IpView) -> bool {
        self.view.is_some_and(|own| own.source == view.source && own.destination == view.destination)
    }

    /// Joins `packet` to the flow's message. False, and it is not listed, if the kernel would not cut it off again as it is.
    #[inline]
    fn join(&mut self, list: &mut PacketDelivery, batch: &impl Buffers, packet: &Packet) -> bool {
        let bytes = &batch.bytes(packet.slot)[packet.range.clone()];
        if packet.partial != self.partial || !self.is_next(batch, bytes, packet.owner, 0) {
            return false;
        }
        if self.packets == 1 {
            list.set_header(self.message, &self.template[..self.header]);
        }
        list.add(self.message, packet.slot, packet.range.start + self.header..packet.range.end);
        let pushed = self.advance(bytes);
        let (message, own) = list.parts_mut(self.message);
        self.complete_header(own, pushed);
        if self.packets == 2 {
            message.vnet = self.vnet();
        }
        true
    }

    /// Whether the kernel would cut off `bytes`, which `owner` sent, again as they are, behind what the flow has. `outer` bytes of
    /// headers precede both.
    #[inline]
    fn is_next(&mut self, batch: &impl Buffers, bytes: &[u8], owner: u32, outer: usize) -> bool {
        let ip = self.ip;
        if !self.open
            || bytes.len() <= self.header
            || bytes[ip..ip + 4] != self.ports
            || owner != self.owner
            || !self.has_same_header(bytes)
        {
            return false;
        }
        let payload = bytes.len() - self.header;
        let most = if self.tcp { MOST_PIECES } else { MOST_DATAGRAMS };
        payload <= self.segment
            && outer + self.header + self.payload + payload <= MOST_PACKET
            && self.packets < most
            && (!self.tcp || sequence(bytes, ip) == self.next_sequence)
            && self.says_right(bytes)
            && self.is_next_id(bytes)
            && self.is_verified(batch, bytes)
    }

    /// Counts a packet that was joined; returns whether it has PSH.
    #[inline]
    fn advance(&mut self, bytes: &[u8]) -> bool {
        let payload = bytes.len() - self.header;
        self.packets += 1;
        self.payload += payload;
        self.id = word(bytes, 4);
        let pushed = self.tcp && bytes[self.ip + 13] & PSH != 0;
        // A packet's payload has less than 64 KiB.
        self.next_sequence = self.next_sequence.wrapping_add(payload as u32);
        self.open = payload == self.segment && !pushed;
        pushed
    }

    /// Whether all that must not differ from the first packet's headers does not.
    #[inline]
    fn has_same_header(&self, bytes: &[u8]) -> bool {
        let (own, own_end) = self.template[..self.header].as_chunks::<8>();
        let (theirs, their_end) = bytes[..self.header].as_chunks::<8>();
        let (same_bits, same_bits_end) = self.same_bits[..self.header].as_chunks::<8>();
        let mut differs = 0;
        for ((own, theirs), same_bits) in own.iter().zip(theirs).zip(same_bits) {
            let other = u64::from_ne_bytes(*own) ^ u64::from_ne_bytes(*theirs);
            differs |= other & u64::from_ne_bytes(*same_bits);
        }
        // Headers are whole words of 4 bytes: there is one more, or none.
        for ((own, theirs), same_bits) in own_end.iter().zip(their_end).zip(same_bits_end) {
            differs |= u64::from((own ^ theirs) & same_bits);
        }
        differs == 0
    }

    /// Whether the lengths within the headers, the IPv4 header's checksum and a partial checksum are right.
    #[inline]
    fn says_right(&self, bytes: &[u8]) -> bool {
        let ip = self.ip;
        // It is no longer than its length field says, which has 16 bits.
        let (total, length) = (bytes.len() as u16, (bytes.len() - ip) as u16);
        let is_right = match ip {
            IPV4_HEADER => {
                let sum = u64::from(self.ip_sum) + u64::from(total) + u64::from(word(bytes, 4));
                word(bytes, 2) == total && word(bytes, 10) == !checksum::fold(sum)
            }
            _ => word(bytes, 4) == length,
        };
        let field = word(bytes, ip + if self.tcp { 16 } else { 6 });
        is_right
            && (self.tcp || word(bytes, ip + 4) == length && field != 0)
            && (!self.partial || field == checksum::fold(u64::from(self.pseudo_sum) + u64::from(length)))
    }

    /// Whether the IPv4 identification is the next one, or means nothing and stays.
    #[inline]
    fn is_next_id(&self, bytes: &[u8]) -> bool {
        let id = word(bytes, 4);
        let may_stay = bytes[6] & 0x40 != 0;
        self.ip != IPV4_HEADER || id == self.id.wrapping_add(1) || may_stay && id == self.id
    }

    /// Whether the checksums of the packet and of the first one are complete and right, or both partial.
    #[inline]
    fn is_verified(&mut self, batch: &impl Buffers, bytes: &[u8]) -> bool {
        if self.partial {
            return true;
        }
        if let Some((slot, start, end)) = self.unverified {
            if !self.is_complete(&batch.bytes(slot)[start..end]) {
                return false;
            }
            self.unverified = None;
        }
        self.is_complete(bytes)
    }

    fn is_complete(&self, bytes: &[u8]) -> bool {
        let covered = &bytes[self.ip..];
        let sum = u64::from(checksum::sum(covered)) + u64::from(self.pseudo_sum) + covered.len() as u64;
        checksum::fold(sum) == 0xffff
    }

    /// Makes `own`, the message's own header, that of all its packets.
    #[inline]
    fn complete_header(&self, own: &mut [u8], pushed: bool) {
        let ip = self.ip;
        // `is_next` keeps them below 64 KiB.
        let total = (self.header + self.payload) as u16;
        let length = total - ip as u16;
        let mut put = |at: usize, word: u16| own[at..at + 2].copy_from_slice(&word.to_be_bytes());
        if ip == IPV4_HEADER {
            let id = word(&self.template, 4);
            put(2, total);
            put(10, !checksum::fold(u64::from(self.ip_sum) + u64::from(total) + u64::from(id)));
        } else {
            put(4, length);
        }
        let partial = checksum::fold(u64::from(self.pseudo_sum) + u64::from(length));
        put(ip + self.checksum_offset(), partial);
        if !self.tcp {
            put(ip + 4, length);
        }
        if pushed {
            own[ip + 13] |= PSH;
        }
    }

    /// What the kernel is told of several packets.
    fn vnet(&self) -> VnetHeader {
        VnetHeader {
            needs_checksum: true,
            gso: match (self.tcp, self.ip) {
                (false, _) => Gso::Udp,
                (true, IPV4_HEADER) => Gso::Tcp4,
                (true, _) => Gso::Tcp6,
            },
            gso_ecn: false,
            header_len: self.header as u16,
            gso_size: self.segment as u16,
            checksum_start: self.ip as u16,
            checksum_offset: self.checksum_offset() as u16,
            tunnel: None,
        }
    }

    /// The distance of the checksum from the L4 header.
    fn checksum_offset(&self) -> usize {
        if self.tcp { 16 } else { 6 }
    }
}

/// A flow that begins with what is inside of `bytes`, whose outer headers are `view`, if others can be joined to it.
fn begin_inside(bytes: &[u8], view: &IpView, packet: &Packet, message: usize) -> Option<(Outer, Flow)> {
    let (outer, inner_view) = Outer::begin(bytes, view)?;
    let start = packet.range.start + outer.len();
    let inner = Packet { range: start..packet.range.end, ..packet.clone() };
    let flow = Flow::begin(bytes.get(outer.len()..)?, &inner_view, inner, message)?;
    // Whether other packets are of the flow is asked with a view of their outer headers.
    Some((outer, Flow { inside: true, view: Some(*view), ..flow }))
}

/// [`Flow::join`] for packets inside of a tunnel.
fn join_inside(
    flow: &mut Flow,
    outer: &mut Outer,
    list: &mut PacketDelivery,
    batch: &impl Buffers,
    packet: &Packet,
) -> bool {
    let bytes = &batch.bytes(packet.slot)[packet.range.clone()];
    let Some((before, inner)) = bytes.split_at_checked(outer.len()) else { return false };
    // Its outer checksum follows from the inner one, and is looked at with that.
    let first = flow.unverified;
    if !flow.open
        || packet.partial
        || !outer.goes_on(before, bytes.len())
        || !flow.is_next(batch, inner, packet.owner, outer.len())
    {
        return false;
    }
    let inner_sum = |inner: &[u8]| {
        let covered = (inner.len() - flow.ip) as u64;
        let network = u64::from(checksum::sum(&inner[..flow.ip]));
        network + u64::from(!checksum::fold(u64::from(flow.pseudo_sum) + covered))
    };
    let is_right = |all: &[u8]| {
        let (before, inner) = all.split_at(outer.len());
        outer.has_right_checksum(before, all.len(), inner_sum(inner))
    };
    let first_is_right =
        first.is_none_or(|(slot, start, end)| is_right(&batch.bytes(slot)[start - outer.len()..end]));
    if !first_is_right {
        flow.open = false;
        return false;
    }
    if !is_right(bytes) {
        return false;
    }
    let header = outer.len() + flow.header;
    if flow.packets == 1 {
        let mut own = [0; Outer::MOST + MOST_HEADER];
        own[..outer.len()].copy_from_slice(outer.template());
        own[outer.len()..header].copy_from_slice(&flow.template[..flow.header]);
        list.set_header(flow.message, &own[..header]);
    }
    list.add(flow.message, packet.slot, packet.range.start + header..packet.range.end);
    let pushed = flow.advance(inner);
    outer.advance(before);
    let (message, own) = list.parts_mut(flow.message);
    let (before, inner) = own.split_at_mut(outer.len());
    flow.complete_header(inner, pushed);
    outer.complete(before, header + flow.payload);
    if flow.packets == 2 {
        let within = flow.vnet();
        // A header is far below 64 KiB.
        let before = outer.len() as u16;
        message.vnet = VnetHeader {
            header_len: header as u16,
            checksum_start: before + within.checksum_start,
            tunnel: Some(outer.vnet()),
            ..within
        };
    }
    true
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
fn sequence(bytes: &[u8], ip: usize) -> u32 {
    u32::from(word(bytes, ip + 4)) << 16 | u32::from(word(bytes, ip + 6))
}

const TCP4: [u8; MOST_HEADER] = same_bits(IPV4_HEADER, TCP);
const UDP4: [u8; MOST_HEADER] = same_bits(IPV4_HEADER, UDP);
const TCP6: [u8; MOST_HEADER] = same_bits(IPV6_HEADER, TCP);
const UDP6: [u8; MOST_HEADER] = same_bits(IPV6_HEADER, UDP);

/// A mask of the header bits that all packets of a message have in common.
const fn same_bits(ip: usize, protocol: u8) -> [u8; MOST_HEADER] {
    let same_bits = [0xff; MOST_HEADER];
    let same_bits = if ip == IPV4_HEADER {
        // The total length, the identification and the checksum may differ.
        without(without(same_bits, 2, 6), 10, 12)
    } else {
        without(same_bits, 4, 6)
    };
    if protocol == UDP {
        return without(same_bits, ip + 4, ip + 8);
    }
    // The sequence number, the checksum, and PSH.
    let mut same_bits = without(without(same_bits, ip + 4, ip + 8), ip + 16, ip + 18);
    same_bits[ip + 13] = !PSH;
    same_bits
}

const fn without(mut same_bits: [u8; MOST_HEADER], mut from: usize, to: usize) -> [u8; MOST_HEADER] {
    while from < to {
        same_bits[from] = 0;
        from += 1;
    }
    same_bits
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;

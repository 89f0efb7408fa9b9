//! Properties of any packets: what the fuzz targets and the property tests check.

use std::collections::BTreeMap;

use crate::{
    checksum,
    cut::{Cut, MOST_HEADER},
    ecn,
    fragment::Fragments,
    icmp,
    merge::Merger,
    model::{self, Recipe, TunnelRecipe},
    mss,
    packets::{MOST_PIECES, Packet, PacketDelivery, TunOffload, TunnelOffload},
    tunnels::Outer,
    view::{ChecksumAt, IpView, TCP, UDP},
    vnet::{Gso, TUNNEL_VNET_HEADER_BYTES, VNET_HEADER_BYTES, VnetHeader},
};

/// Takes `input` as an IP packet.
///
/// What its view says lies within it; both directions and the packet alone have the same flow; what is changed in it leaves
/// its checksums as right as they were; and what is answered can be read, and gets no answer.
pub fn ip_view(input: &[u8]) {
    let super_packet = IpView::super_packet(input);
    assert!(super_packet.is_err() || super_packet.is_ok_and(|view| view.len == input.len()));
    let Ok(view) = IpView::parse(input) else { return };
    assert!(view.transport_at <= view.len && view.len <= input.len());
    let packet = &input[..view.len];
    assert_eq!((IpView::parse(packet), IpView::super_packet(packet)), (Ok(view), Ok(view)));
    assert!(IpView::parse(&packet[..view.len - 1]).is_err());
    let ports = view.ports.map(|(source, destination)| (destination, source));
    let reverse = IpView { source: view.destination, destination: view.source, ports, ..view };
    assert_eq!(view.flow_hash(), reverse.flow_hash());

    let mut out = [0; icmp::MOST_ANSWER];
    for answer in [icmp::too_big(packet, &view, 1280, &mut out), icmp::unreachable(packet, &view, &mut out)] {
        let Some(len) = answer else { continue };
        let bytes = &out[..len];
        let read = IpView::parse(bytes).expect("an IP packet");
        assert_eq!((read.len, read.source, read.destination), (len, view.destination, view.source));
        assert!(packet.starts_with(&bytes[read.transport_at + 8..]));
        assert_eq!(icmp::unreachable(bytes, &read, &mut [0; icmp::MOST_ANSWER]), None);
    }

    let sums = |packet: &[u8]| {
        let header = if view.is_ipv6() { 0 } else { model::sum(&packet[..20], 0) % 0xffff };
        (header, model::sum(&packet[view.transport_at..], 0) % 0xffff)
    };
    let mut changed = packet.to_vec();
    if mss::clamp(&mut changed, &view, 1280, false) {
        assert_eq!(sums(&changed), sums(packet));
        assert!(!mss::clamp(&mut changed, &view, 1280, false), "it is low enough now");
    }
    for mark in 0..4 {
        let mut changed = packet.to_vec();
        ecn::set_ecn(&mut changed, mark);
        assert_eq!(sums(&changed), sums(packet));
        let traffic_class = view.traffic_class & !3 | mark;
        assert_eq!(IpView::parse(&changed), Ok(IpView { traffic_class, ..view }));
    }
}

/// Takes `input` as an MTU and an IP packet that may be larger.
///
/// No fragment is larger; each is an IP packet of the same two addresses with a right header checksum; and their data, put
/// together by their offsets, is the packet's.
pub fn ip_fragments(input: &[u8]) {
    let Some((mtu, packet)) = input.split_first_chunk() else { return };
    let mtu = u16::from_be_bytes(*mtu);
    let Ok(view) = IpView::parse(packet) else { return };
    let Some(fragments) = Fragments::new(packet, &view, mtu) else { return };
    let flags_and_offset = |bytes: &[u8]| u16::from_be_bytes([bytes[6], bytes[7]]);
    let header = usize::from(packet[0] & 0x0f) * 4;
    let (mut data, mut fragment) = (Vec::new(), Vec::new());
    let count = fragments.count();
    assert!(view.len > usize::from(mtu) && count > 1);
    for index in 0..count {
        fragments.write(index, &mut fragment);
        assert!(fragment.len() <= usize::from(mtu));
        assert_eq!(model::sum(&fragment[..header], 0) % 0xffff, 0, "the header's checksum");
        // An offset beyond 65,535 bytes is one that the packet itself had.
        let read = IpView::parse(&fragment).expect("an IP packet");
        assert_eq!(
            (read.len, read.source, read.destination),
            (fragment.len(), view.source, view.destination)
        );
        let offset =
            usize::from(flags_and_offset(&fragment).wrapping_sub(flags_and_offset(packet)) & 0x1fff) * 8;
        assert_eq!(offset, data.len());
        assert_eq!(
            flags_and_offset(&fragment) & 0x2000 != 0,
            flags_and_offset(packet) & 0x2000 != 0 || index + 1 < count
        );
        assert_eq!(flags_and_offset(&fragment) & 0xc000, flags_and_offset(packet) & 0xc000);
        data.extend_from_slice(&fragment[header..]);
    }
    assert_eq!(data, &packet[header..view.len]);
}

/// Takes `input` as what is read from a TUN device, the virtio header before the packet.
///
/// It is refused, or cut as the kernel would cut it, with partial checksums and with complete ones.
pub fn ip_cut(input: &[u8]) {
    let Some((header, packet)) = input.split_first_chunk::<VNET_HEADER_BYTES>() else { return };
    cut_as_the_kernel(header, packet);
}

/// Takes `input` as what is read from a TUN device with super-packets of tunnels: as [`ip_cut`].
pub fn ip_tunnel_cut(input: &[u8]) {
    let Some((header, packet)) = input.split_first_chunk::<TUNNEL_VNET_HEADER_BYTES>() else { return };
    cut_as_the_kernel(header, packet);
}

fn cut_as_the_kernel(header: &[u8], packet: &[u8]) {
    let Some(vnet) = VnetHeader::decode(header) else { return };
    let view = match vnet.gso {
        Gso::None => IpView::parse(packet),
        Gso::Tcp4 | Gso::Tcp6 | Gso::Udp => IpView::super_packet(packet),
    };
    let Ok(view) = view else { return };
    for completes in [false, true] {
        let mut copy = packet.to_vec();
        let Ok(cut) = Cut::new(&vnet, &mut copy, &view, completes) else { continue };
        same_as_model(&cut, &vnet, &packet[..view.len], &view);
        assert!(completes || !cut.is_partial());
    }
}

fn same_as_model(cut: &Cut<'_>, vnet: &VnetHeader, original: &[u8], view: &IpView) {
    let expected = model::packets(vnet, original, view.transport_at);
    let written: Vec<Vec<u8>> = (0..cut.count())
        .map(|index| {
            let mut packet = vec![0; cut.largest()];
            let len = cut.write(index, &mut packet);
            packet.truncate(len);
            let read = IpView::parse(&packet).expect("an IP packet");
            assert_eq!((read.len, read.source, read.destination), (len, view.source, view.destination));
            if vnet.gso != Gso::None {
                assert_eq!(read.flow_hash(), view.flow_hash());
            }
            if cut.is_partial() {
                let ChecksumAt { start, offset } = view.checksum().expect("only such stay partial");
                model::complete(&mut packet, start, offset);
            }
            packet
        })
        .collect();
    assert_eq!(written, expected);
    assert_eq!(cut.largest(), expected.iter().map(Vec::len).max().expect("at least one"));
    assert_eq!(cut.bytes(), expected.iter().map(Vec::len).sum::<usize>());
    assert!(cut.header().len() <= MOST_HEADER && cut.header().is_empty() == (vnet.gso == Gso::None));
    assert!(cut.segment() * (cut.count() - 1) <= cut.payload().len());
}

/// Takes `input` as the recipes of packets that come from peers, 8 bytes each behind one that says how they come.
///
/// What is written, cut as the kernel would cut it, is the packets that came, each flow's in their order.
pub fn ip_merge(input: &[u8]) {
    let Some((&how, recipes)) = input.split_first() else { return };
    let offload = TunOffload { tcp: how & 1 == 0, udp: how & 2 == 0, tunnels: TunnelOffload::default() };
    let mut stream = Stream::default();
    let arrivals: Vec<Arrival> =
        recipes.as_chunks::<8>().0.iter().take(512).map(|bytes| stream.arrival(bytes)).collect();
    merged(how, &arrivals, offload);
}

/// Takes `input` as the recipes of packets inside of tunnels that come from peers, 10 bytes each behind one that says how they come: as
/// [`ip_merge`].
pub fn ip_tunnel_merge(input: &[u8]) {
    let Some((&how, recipes)) = input.split_first() else { return };
    let tunnels = TunnelOffload { cut: true, join_ipv4: how & 1 == 0, join_ipv6: how & 2 == 0 };
    let offload = TunOffload { tcp: true, udp: true, tunnels };
    let mut stream = Stream::default();
    let arrivals: Vec<Arrival> =
        recipes.as_chunks::<10>().0.iter().take(512).map(|bytes| stream.arrival_inside(bytes)).collect();
    merged(how, &arrivals, offload);
}

fn merged(how: u8, arrivals: &[Arrival], offload: TunOffload) {
    let (mut batch, packets) = fill(arrivals, 1 + usize::from(how >> 4));
    let (mut list, mut merger) = (PacketDelivery::default(), Merger::default());
    for (arrival, packet) in arrivals.iter().zip(packets) {
        if arrival.tries_join && merger.try_join(&mut list, &batch, &packet) {
            continue;
        }
        let view = arrival.view();
        merger.push(&mut list, &mut batch, packet, &view, offload);
    }
    let written = written(&list, &batch, offload);
    let came: Vec<(u32, Vec<u8>)> =
        arrivals.iter().map(|arrival| (arrival.owner, arrival.completed())).collect();
    assert_eq!(by_flow(&written), by_flow(&came));
}

/// A packet as it comes from a peer.
struct Arrival {
    packet: Vec<u8>,
    partial: bool,
    owner: u32,
    tries_join: bool,
}

impl Arrival {
    fn view(&self) -> IpView {
        IpView::parse(&self.packet).expect("we made it")
    }

    fn completed(&self) -> Vec<u8> {
        let mut packet = self.packet.clone();
        if let Some(ChecksumAt { start, offset }) = self.view().checksum().filter(|_| self.partial) {
            model::complete(&mut packet, start, offset);
        }
        packet
    }
}

/// The flows from which arrivals come.
#[derive(Default)]
struct Stream {
    sequence: [u32; 8],
    id: [u16; 8],
    outer_id: [u16; 8],
}

impl Stream {
    fn arrival(&mut self, bytes: &[u8; 8]) -> Arrival {
        let [how, size, step, flags, id, special, options, fill] = *bytes;
        let flow = usize::from(how & 7);
        let protocol = if flow & 1 == 0 { TCP } else { UDP };
        let ipv6 = flow & 2 != 0;
        self.sequence[flow] = self.sequence[flow].wrapping_add(u32::from(step).saturating_sub(200));
        self.id[flow] =
            self.id[flow].wrapping_add(u16::from(id & 0x1f).saturating_sub(20) + 1 - u16::from(id >> 7));
        let payload = match size & 0x0f {
            0..=11 => 8 + usize::from(size >> 6) * 700,
            12 | 13 => 5,
            14 => 13,
            _ => 0,
        };
        let flags = match flags & 0x1f {
            0..=25 => 0x10,
            26..=28 => 0x18,
            29 => 0x11,
            30 => 0x90,
            _ => flags,
        };
        let recipe = Recipe {
            ipv6,
            protocol,
            flow: 1 + (flow >> 2) as u8,
            sequence: self.sequence[flow],
            flags,
            id: self.id[flow],
            dont_fragment: id & 0x40 == 0,
            traffic_class: u8::from(special == 1),
            ip_options: if special == 2 { 8 } else { 0 },
            tcp_options: if options < 240 { 12 } else { usize::from(options & 3) * 4 },
            window: u8::from(special == 3),
            payload,
            fill,
        };
        self.sequence[flow] = self.sequence[flow].wrapping_add(payload as u32);
        let partial = how & 0x20 != 0;
        let mut packet = if partial { recipe.partial() } else { recipe.complete() };
        let start = recipe.transport_at();
        match special {
            4 => packet[start + if protocol == TCP { 16 } else { 6 }] ^= 0x5a,
            5 if !ipv6 => packet[10] ^= 0x11,
            // No checksum, a wrong length, a fragment, an upper layer without ports.
            6 if protocol == UDP && !partial => packet[start + 6..start + 8].fill(0),
            7 if protocol == UDP => packet[start + 5] ^= 1,
            8 if !ipv6 => packet[6] |= 0x20,
            9 => packet[if ipv6 { 6 } else { 9 }] = 50,
            10 => packet[if ipv6 { 7 } else { 8 }] ^= 1,
            _ => {}
        }
        let owner = u32::from(how >> 6 == 3);
        Arrival { packet, partial, owner, tries_join: how & 0x10 == 0 }
    }

    /// A packet of [`Stream::arrival`], which the first 8 bytes are of, inside of a tunnel.
    fn arrival_inside(&mut self, bytes: &[u8; 10]) -> Arrival {
        let [inner @ .., kind, special] = bytes;
        let inner_bytes: &[u8; 8] = inner.first_chunk().expect("8 of 10");
        let inner = self.arrival(inner_bytes);
        let flow = inner_bytes[0] & 7;
        let outer = &mut self.outer_id[usize::from(flow)];
        *outer = outer.wrapping_add(if *special == 1 { 2 } else { 1 });
        let recipe = TunnelRecipe {
            geneve: kind & 1 != 0,
            ipv6: kind & 2 != 0,
            summed: kind & 4 != 0,
            flow: 1 + flow,
            id: *outer,
            dont_fragment: kind & 8 != 0,
            options: if kind & 0x30 == 0 { 4 * usize::from(kind >> 6) } else { 0 },
            vlan: kind & 0x30 == 0x10,
        };
        let mut packet = recipe.packet(&inner.packet);
        let start = recipe.transport_at();
        match special {
            // Another checksum, or one where there was none; another length; another port.
            2 => packet[start + 6] ^= 0x5a,
            3 => packet[start + 5] ^= 1,
            4 => packet[start + 3] ^= 1,
            // Of the tunnel's header: flags, identifier, reserved bits.
            5 => packet[start + 8] ^= 0x40,
            6 => packet[start + 9] ^= 0x80,
            7 => packet[start + 14] ^= 1,
            8 => packet[start + 15] ^= 1,
            // Another Ethernet type, address, or padding behind the packet inside.
            9 => packet[recipe.network_at() - 1] ^= 0x21,
            10 => packet[recipe.network_at() - 7] ^= 1,
            11 => packet = recipe.packet(&[&inner.packet[..], &[0; 6]].concat()),
            // Another time to live and ECN mark, a fragment; an IPv4 checksum that is wrong.
            12 => packet[if recipe.ipv6 { 7 } else { 8 }] ^= 1,
            13 => packet[1] ^= 0x03,
            14 if !recipe.ipv6 => packet[6] |= 0x20,
            _ => {}
        }
        Arrival { packet, partial: false, ..inner }
    }
}

/// The packets in `slots` buffers, with gaps between them, and where each lies.
fn fill(arrivals: &[Arrival], slots: usize) -> (Vec<Vec<u8>>, Vec<Packet>) {
    let mut buffers = vec![Vec::new(); slots];
    let per_slot = arrivals.len().div_ceil(slots).max(1);
    let packets = arrivals
        .iter()
        .enumerate()
        .map(|(index, arrival)| {
            let buffer: &mut Vec<u8> = &mut buffers[index / per_slot];
            buffer.extend([0xee; 3]);
            let start = buffer.len();
            buffer.extend(&arrival.packet);
            let Arrival { partial, owner, .. } = *arrival;
            Packet { slot: index / per_slot, range: start..buffer.len(), partial, owner }
        })
        .collect();
    (buffers, packets)
}

/// The packets that the kernel makes of `list`, each with its owner.
pub fn written(list: &PacketDelivery, batch: &Vec<Vec<u8>>, offload: TunOffload) -> Vec<(u32, Vec<u8>)> {
    let mut packets = Vec::new();
    for message in list.messages() {
        let mut bytes = list.header(message).to_vec();
        bytes.extend(list.pieces(message, batch).flatten());
        let vnet = &message.vnet;
        assert_eq!(message.bytes, bytes.len());
        assert!(message.pieces <= MOST_PIECES && message.bytes <= 65_535);
        let view = IpView::parse(&bytes).expect("a packet");
        assert_eq!(view.len, bytes.len());
        let inner_at = vnet.tunnel.map_or(0, |tunnel| usize::from(tunnel.network_at));
        let inner = &bytes[inner_at..];
        let inner_view = IpView::parse(inner).expect("a packet inside");
        let start = usize::from(vnet.checksum_start);
        assert!(!vnet.needs_checksum || start == inner_at + inner_view.transport_at);
        match vnet.gso {
            Gso::None => assert_eq!((list.header(message).len(), message.packets), (0, 1)),
            Gso::Tcp4 | Gso::Tcp6 => assert!(offload.tcp && message.packets > 1),
            Gso::Udp => assert!(offload.udp && (2..=64).contains(&message.packets)),
        }
        assert!(offload.tcp || *vnet == VnetHeader::default());
        if let Some(tunnel) = vnet.tunnel {
            assert!(offload.tunnels.joins(tunnel.ipv6) && tunnel.ipv6 == view.is_ipv6());
            assert_eq!(usize::from(tunnel.transport_at), view.transport_at);
            let partial = if tunnel.checksum { pseudo_sum(&view) } else { 0 };
            assert_eq!(bytes[view.transport_at + 6..][..2], partial.to_be_bytes());
        }
        if vnet.gso != Gso::None {
            assert_eq!(list.header(message).len(), usize::from(vnet.header_len));
            let field = &bytes[start + usize::from(vnet.checksum_offset)..][..2];
            assert_eq!(field, pseudo_sum(&inner_view).to_be_bytes());
            assert!(inner_view.is_ipv6() || model::sum(&inner[..20], 0) == 0xffff);
            assert!(view.is_ipv6() || model::sum(&bytes[..20], 0) == 0xffff);
        }
        let cut = model::packets(vnet, &bytes, view.transport_at);
        assert_eq!(cut.len(), usize::from(message.packets));
        packets.extend(cut.into_iter().map(|packet| (message.owner, packet)));
    }
    packets
}

/// The sum of the pseudo-header of a packet.
fn pseudo_sum(view: &IpView) -> u16 {
    let length = (view.len - view.transport_at) as u64;
    let sum = checksum::pseudo_header(view.source, view.destination, view.protocol);
    checksum::fold(u64::from(sum) + length)
}

/// Packets by the flow that they are of.
type Flows = BTreeMap<String, Vec<(u32, Vec<u8>)>>;

/// The packets of each flow with all those of its addresses that show no flow, in order.
///
/// The identification of those that may not be fragmented is left out, inside of a tunnel, too.
fn by_flow(packets: &[(u32, Vec<u8>)]) -> Flows {
    let key = |packet: &[u8]| {
        let view = IpView::parse(packet).expect("a packet");
        (format!("{} {}", view.source, view.destination), view)
    };
    let mut flows = Flows::new();
    for (_, packet) in packets {
        let (addresses, view) = key(packet);
        flows.entry(format!("{addresses} {} {:?}", view.protocol, view.ports)).or_default();
    }
    for (owner, packet) in packets {
        let (addresses, view) = key(packet);
        let mut packet = packet.clone();
        let inside = Outer::begin(&packet, &view);
        leave_out_id(&mut packet, &view);
        if let Some((outer, inner_view)) = inside {
            leave_out_id(&mut packet[outer.len()..], &inner_view);
        }
        let own = format!("{addresses} {} {:?}", view.protocol, view.ports);
        for (name, flow) in &mut flows {
            if *name == own || view.ports.is_none() && name.starts_with(&format!("{addresses} ")) {
                flow.push((*owner, packet.clone()));
            }
        }
    }
    flows
}

fn leave_out_id(packet: &mut [u8], view: &IpView) {
    if view.dont_fragment && !view.is_ipv6() {
        let id = [packet[4], packet[5]];
        packet[4..6].fill(0);
        let right = !model::sum(&packet[10..12], 0);
        let without = model::sum(&(!u16::from_be_bytes(id)).to_be_bytes(), right) % 0xffff;
        packet[10..12].copy_from_slice(&without.to_be_bytes());
    }
}

//! A pair with TUN devices, of which a test is the kernel; the packets that it gives, and what becomes of them.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use dataplane::relay::Stripes;
use ip::{
    model::{self, Recipe},
    packets::TunOffload,
    view::{ICMP, ICMPV6, IpView},
    vnet::{Gso, VnetHeader},
};

use crate::{ENTRY, EXIT, Pair};

/// What fits into a packet of 1472 bytes, which is the most.
pub(super) const MOST_MTU: u16 = 1472 - 31;

/// A pair with a TUN device at either end. Behind the entry is where [`Recipe`] has its packets come from, behind the exit
/// where they go.
pub(super) struct Tunnel {
    pub(super) pair: Pair,
}

/// The `[tun]` of either end.
pub(super) const ENTRY_TUN: &str = "[tun]\naddress = [\"10.9.0.254/24\", \"fd00::7e/121\"]";
pub(super) const EXIT_TUN: &str = "[tun]\naddress = [\"10.9.1.254/24\", \"fd00::fe/121\"]";

/// What is behind either end.
pub(super) const BEHIND_ENTRY: &str = "allowed_ips = [\"10.9.0.0/24\", \"fd00::/121\"]";
pub(super) const BEHIND_EXIT: &str = "allowed_ips = [\"10.9.1.0/24\", \"fd00::80/121\"]";

impl Tunnel {
    /// With these workers; `entry` is what else the entry says of the exit.
    pub(super) fn new(seed: u64, workers: (u8, u8), entry: &str) -> Self {
        Self::with_ends(seed, workers, (entry, ENTRY_TUN), ("", EXIT_TUN))
    }

    /// What each end says of the other, and its `[tun]`.
    pub(super) fn with_ends(
        seed: u64,
        workers: (u8, u8),
        (entry, entry_tun): (&str, &str),
        (exit, exit_tun): (&str, &str),
    ) -> Self {
        let entry = format!("{BEHIND_EXIT}\n{entry}\n{entry_tun}");
        let exit = format!("{BEHIND_ENTRY}\n{exit}\n{exit_tun}");
        Self { pair: Pair::with_workers(seed, workers, &entry, &exit) }
    }

    /// Its lanes are up, and both ends know how much their packets hold.
    pub(super) fn settled(mut self, lanes: usize) -> Self {
        self.pair.wait_for_lanes(lanes);
        let (entry, exit) = (self.pair.entry, self.pair.exit);
        self.pair.world.run_till(Duration::from_secs(5), |world| {
            [entry, exit].iter().all(|place| world.peer(*place).inner_mtu == Some(MOST_MTU))
        });
        self
    }

    /// Both agents are new processes, on devices with this offload.
    pub(super) fn with_offload(mut self, entry: TunOffload, exit: TunOffload) -> Self {
        self.pair.world.offload = exit;
        let (place, toml) = (self.pair.exit, self.pair.exit_toml.clone());
        self.pair.world.restart(place, &toml, &self.pair.exit_key, &[EXIT], 31);
        self.pair.world.offload = entry;
        let (place, toml) = (self.pair.entry, self.pair.entry_toml.clone());
        self.pair.world.restart(place, &toml, &self.pair.entry_key, &[ENTRY], 32);
        self
    }

    /// The entry's ports that large datagrams were sent from or to since the network was last tapped.
    pub(super) fn ports(&mut self) -> Vec<u16> {
        let tapped = self.pair.world.tapped();
        let large = tapped.iter().filter(|sent| sent.payload.len() > 600 && sent.payload[0] & 0x80 == 0);
        let mut ports: Vec<u16> = large
            .map(|sent| if sent.from.ip() == ENTRY { sent.from.port() } else { sent.to.port() })
            .collect();
        ports.sort_unstable();
        ports.dedup();
        ports
    }

    pub(super) fn ends(&self) -> [usize; 2] {
        [self.pair.entry, self.pair.exit]
    }

    pub(super) fn run(&mut self, milliseconds: u64) {
        self.pair.world.run(Duration::from_millis(milliseconds));
    }

    /// The kernel of an agent gives it a packet.
    pub(super) fn push(&mut self, place: usize, queue: u8, given: &Given) {
        assert!(self.pair.world.agent(place).tun().push(queue, given.vnet, &given.bytes));
    }

    /// What was written since this was last asked, as the kernel cuts it: with complete checksums.
    pub(super) fn written(&mut self, place: usize) -> Vec<Vec<u8>> {
        let written = self.pair.world.agent(place).tun().take_written();
        written.iter().flat_map(|written| cut(&written.vnet, &written.packet)).collect()
    }

    pub(super) fn metric(&mut self, place: usize, series: &str) -> u64 {
        self.pair.world.metric(place, series)
    }

    /// How many packets were dropped for `reason`, on their way to the peer or from it.
    pub(super) fn dropped(&mut self, place: usize, direction: &str, reason: &str) -> u64 {
        let labels = format!("{{direction=\"{direction}\",reason=\"{reason}\"}}");
        self.metric(place, &format!("culvert_datagrams_dropped_total{labels}"))
    }

    /// How many packets of the device went to no peer.
    pub(super) fn unrouted(&mut self, place: usize, reason: &str) -> u64 {
        self.metric(place, &format!("culvert_tun_dropped_packets_total{{reason=\"{reason}\"}}"))
    }

    /// By lane, how many packets of the device had its hash.
    pub(super) fn by_lane(&mut self, place: usize) -> Vec<u64> {
        let mut by_lane = Vec::new();
        for worker in &self.pair.world.agent(place).workers {
            let of_worker = &worker.tun().unwrap().totals.by_lane;
            by_lane.resize(of_worker.len(), 0);
            by_lane.iter_mut().zip(of_worker).for_each(|(sum, count)| *sum += count);
        }
        by_lane
    }

    /// The worker that an agent's control connection is at, and of how many.
    pub(super) fn owner(&mut self, place: usize) -> (u8, u8) {
        let workers = &self.pair.world.agent(place).workers;
        let owner = workers.iter().position(|worker| worker.peers()[0].session.is_some()).unwrap();
        (owner as u8, workers.len() as u8)
    }

    /// Every peer's accounts balance, and every packet that was read or written is in one of them, or has its reason. `read`:
    /// how many the kernels of entry and exit gave.
    pub(super) fn assert_balanced(&mut self, read: [u64; 2]) {
        for (place, read) in self.ends().into_iter().zip(read) {
            assert_books(&mut self.pair.world, place, read);
        }
    }
}

/// See [`Tunnel::assert_balanced`].
pub(super) fn assert_books(world: &mut crate::World, place: usize, read: u64) {
    let peers = world.peers(place);
    for peer in &peers {
        assert!(peer.uplink.balances && peer.downlink.balances, "{peer:?}");
    }
    let (mut received, mut dropped, mut delivered, mut uplink, mut downlink) = (0, 0, 0, 0, 0);
    for worker in &world.agent(place).workers {
        let totals = &worker.tun().unwrap().totals;
        received += totals.received;
        dropped += totals.dropped.total();
        delivered += totals.delivered;
        for peer in worker.peers().iter() {
            uplink += peer.data.relay.stats.tun_uplink.packets;
            downlink += peer.data.relay.stats.tun_downlink.packets;
        }
    }
    assert_eq!((received, received), (read, uplink + dropped), "read = given to peers + dropped");
    let accounts = peers.iter().map(|peer| peer.downlink.account);
    assert_eq!(delivered, accounts.clone().map(|account| account.delivered).sum::<u64>());
    assert_eq!(
        downlink,
        accounts.map(|account| account.received).sum::<u64>(),
        "there are no other payloads"
    );
}

/// A packet or super-packet as a kernel gives it to us.
pub(super) struct Given {
    pub(super) vnet: VnetHeader,
    pub(super) bytes: Vec<u8>,
}

/// How a kernel gives packets.
#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// With a complete checksum.
    Complete,
    /// With that of the pseudo-header.
    Partial,
    /// Several in one, with so many bytes of payload each.
    Super(u16),
}

impl Given {
    /// A packet whose payload has `recipe.payload` bytes, of all packets if it is a super-packet.
    pub(super) fn new(recipe: &Recipe, how: How) -> Self {
        match how {
            How::Complete => Self { vnet: VnetHeader::default(), bytes: recipe.complete() },
            How::Partial => {
                let (vnet, bytes) = recipe.super_packet(0);
                Self { vnet: VnetHeader { gso: Gso::None, header_len: 0, ..vnet }, bytes }
            }
            How::Super(segment) => {
                let (vnet, bytes) = recipe.super_packet(segment);
                Self { vnet, bytes }
            }
        }
    }

    /// The same the other way: what the exit's kernel gives.
    pub(super) fn back(mut self) -> Self {
        reverse(&mut self.bytes);
        self
    }

    /// The packets that it is, with complete checksums.
    pub(super) fn packets(&self) -> Vec<Vec<u8>> {
        cut(&self.vnet, &self.bytes)
    }

    pub(super) fn bucket(&self) -> u8 {
        Stripes::bucket(IpView::super_packet(&self.bytes).unwrap().flow_hash())
    }
}

/// The packets of what a kernel gave or was given.
pub(super) fn cut(vnet: &VnetHeader, bytes: &[u8]) -> Vec<Vec<u8>> {
    model::packets(vnet, bytes, IpView::super_packet(bytes).unwrap().transport_at)
}

/// Swaps addresses and ports, over which no sum changes.
fn reverse(packet: &mut [u8]) {
    let view = IpView::super_packet(packet).unwrap();
    let (addresses, length) = if view.is_ipv6() { (8, 16) } else { (12, 4) };
    let (source, destination) = packet[addresses..].split_at_mut(length);
    source.swap_with_slice(&mut destination[..length]);
    if view.ports.is_some() {
        let (source, destination) = packet[view.transport_at..].split_at_mut(2);
        source.swap_with_slice(&mut destination[..2]);
    }
}

/// Addresses, protocol and ports.
type Key = (IpAddr, IpAddr, u8, Option<(u16, u16)>);

/// Each flow's packets, in order.
pub(super) fn by_flow(packets: Vec<Vec<u8>>) -> BTreeMap<Key, Vec<Vec<u8>>> {
    let mut flows = BTreeMap::<Key, Vec<Vec<u8>>>::new();
    for packet in packets {
        let view = IpView::parse(&packet).unwrap();
        let key = (view.source, view.destination, view.protocol, view.ports);
        flows.entry(key).or_default().push(packet);
    }
    flows
}

/// Sender, receiver, type and code, the 32 bits after the checksum, and what is quoted.
pub(super) type IcmpError = (IpAddr, IpAddr, [u8; 2], u32, Vec<u8>);

/// The ICMP errors among these packets.
pub(super) fn icmp_errors(packets: &[Vec<u8>]) -> Vec<IcmpError> {
    let error = |packet: &Vec<u8>| {
        let view = IpView::parse(packet).unwrap();
        let message = packet[view.transport_at..].to_vec();
        let rest = u32::from_be_bytes(message[4..8].try_into().unwrap());
        let is_icmp = [ICMP, ICMPV6].contains(&view.protocol);
        is_icmp
            .then(|| (view.source, view.destination, [message[0], message[1]], rest, message[8..].to_vec()))
    };
    packets.iter().filter_map(error).collect()
}

/// Writes `bytes` into an IPv4 packet and sets its header's checksum; that of what is in it is not right any more.
pub(super) fn altered(mut packet: Vec<u8>, at: usize, bytes: &[u8]) -> Given {
    packet[at..at + bytes.len()].copy_from_slice(bytes);
    if packet[0] >> 4 == 4 {
        packet[10..12].fill(0);
        let checksum = !model::sum(&packet[..20], 0);
        packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    }
    Given { vnet: VnetHeader::default(), bytes: packet }
}

/// The fragments of an IP packet, with at most `bytes` of its payload each.
pub(super) fn fragments(packet: &[u8], bytes: usize) -> Vec<Vec<u8>> {
    let view = IpView::parse(packet).unwrap();
    let (header, payload) = packet.split_at(view.transport_at);
    let chunks = payload.chunks(bytes).zip((0u16..).step_by(bytes / 8));
    let last = payload.len().div_ceil(bytes) as u16 - 1;
    let fragment = |(chunk, offset): (&[u8], u16)| {
        let more = u16::from(usize::from(offset) < usize::from(last) * bytes / 8);
        let mut header = header.to_vec();
        if view.is_ipv6() {
            header[6] = 44;
            header.extend([view.protocol, 0]);
            header.extend((offset << 3 | more).to_be_bytes());
            header.extend([0, 0, 0, 77]);
            let length = (8 + chunk.len()) as u16;
            header[4..6].copy_from_slice(&length.to_be_bytes());
        } else {
            let length = (header.len() + chunk.len()) as u16;
            header[2..4].copy_from_slice(&length.to_be_bytes());
            header[6..8].copy_from_slice(&(offset | more << 13).to_be_bytes());
            header[10..12].fill(0);
            let checksum = !model::sum(&header, 0);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        [&header, chunk].concat()
    };
    chunks.map(fragment).collect()
}

//! The TUN device and its routes.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::status::{Counts, Word};

/// An inner prefix and the peers that hold it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteStatus {
    pub prefix: String,
    /// The peers, the best first; none: the next hop of the kernel's route is nobody's address.
    pub peers: Vec<RoutePeerStatus>,
}

/// A peer that holds a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutePeerStatus {
    pub name: Arc<str>,
    /// "carries", "waits": it is ready, "late", or "away": what it does for the prefix.
    pub state: Word,
    pub priority: u16,
    /// The share among peers of the same priority.
    pub weight: u16,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TunStatus {
    pub name: Box<str>,
    /// Whether it is up; `None` if the kernel does not know it any more.
    pub up: Option<bool>,
    pub mtu: Option<u32>,
    /// Its addresses, with the link-local ones that are made of our keys.
    pub addresses: Vec<String>,
    /// TCP super-packets and partial checksums, both ways.
    pub tcp_offload: bool,
    /// True if UDP super-packets are exchanged with the device in both directions.
    pub udp_offload: bool,
    /// Whether packets inside of VXLAN and Geneve tunnels are read from the device as super-packets.
    pub tunnels_cut: bool,
    /// Whether those over IPv4 are written to it as super-packets: tried at the start.
    pub tunnels_joined_ipv4: bool,
    /// Whether those over IPv6 are.
    pub tunnels_joined_ipv6: bool,
    /// The counts of what is read from the device.
    pub uplink: TunDirection,
    /// The counts of what is written to the device.
    pub downlink: TunDirection,
    /// Copies of link-local multicast that were made for peers.
    pub multicast_copies: u64,
    /// Packets read that went to no peer, by reason; none that is 0.
    pub dropped: Counts,
    /// What these reasons mean, by their label.
    pub meanings: BTreeMap<Word, Word>,
    /// ICMP messages to senders whose packets could not be carried, by kind; none that is 0.
    pub answers: Counts,
}

/// One direction of the TUN device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TunDirection {
    /// The number of packets, each super-packet counted as the packets cut from it.
    pub packets: u64,
    /// The number of bytes, with the headers of each super-packet counted once.
    pub bytes: u64,
    pub super_packets: u64,
    /// Of those, super-packets of packets inside of VXLAN and Geneve tunnels.
    pub tunnel_super_packets: u64,
    /// The number of reads or writes that failed.
    pub errors: u64,
    /// Packets that the kernel dropped at the device.
    pub kernel_drops: Option<u64>,
    /// Packets in the last second; `None` before it was looked at.
    pub packets_per_second: Option<f64>,
    /// Bytes in the last second; `None` before the device was looked at.
    pub bytes_per_second: Option<f64>,
}

impl TunStatus {
    /// Adds the queue of another worker.
    pub fn add(&mut self, other: &Self) {
        self.tcp_offload |= other.tcp_offload;
        self.udp_offload |= other.udp_offload;
        self.tunnels_cut |= other.tunnels_cut;
        self.tunnels_joined_ipv4 |= other.tunnels_joined_ipv4;
        self.tunnels_joined_ipv6 |= other.tunnels_joined_ipv6;
        self.uplink.add(&other.uplink);
        self.downlink.add(&other.downlink);
        self.multicast_copies += other.multicast_copies;
        for (sums, counts) in [(&mut self.dropped, &other.dropped), (&mut self.answers, &other.answers)] {
            counts.iter().for_each(|(word, count)| *sums.entry(word.clone()).or_default() += count);
        }
    }
}

impl TunDirection {
    fn add(&mut self, other: &Self) {
        add!(self, other; packets, bytes, super_packets, tunnel_super_packets, errors);
        for (sum, rate) in [
            (&mut self.packets_per_second, other.packets_per_second),
            (&mut self.bytes_per_second, other.bytes_per_second),
        ] {
            *sum = rate.map(|rate| rate + sum.unwrap_or(0.0)).or(*sum);
        }
    }
}

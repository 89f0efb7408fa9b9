//! Packets inside of VXLAN and Geneve tunnels through the device: the kernel cuts what we join, and we cut what the kernel hands over.

use std::{io::Write, net::SocketAddr, process::Command, time::Duration};

use culvert_tests::{
    needs::{self, Need},
    process::{run, text},
    random::Random,
};
use ip::{
    cut::Cut,
    merge::Merger,
    packets::{Packet, PacketDelivery, TunnelOffload},
    view::IpView,
};
use net::{ReceiveBatch, SendOutcome, batch::Meta, tun::TunDevice};

use crate::{
    Space, config,
    device::{Queue, in_runtime, socket},
    open,
    packets::{self, Checksum},
    tun,
};

/// Bytes of payload of each packet but the last, and of that.
const SEGMENT: usize = 1_000;
const LAST: usize = 333;
const PACKETS: usize = 5;

/// What packets are inside of what.
#[derive(Clone, Copy, Debug)]
struct Form {
    geneve: bool,
    ipv6: bool,
    inner_ipv6: bool,
    tcp: bool,
    summed: bool,
}

impl Form {
    fn all() -> impl Iterator<Item = Self> {
        (0..32_u8).map(|bits| {
            let [geneve, ipv6, inner_ipv6, tcp, summed] = [0, 1, 2, 3, 4].map(|bit| bits >> bit & 1 != 0);
            Self { geneve, ipv6, inner_ipv6, tcp, summed }
        })
    }

    /// Packets of one flow, with all checksums that they are to have.
    fn packets(self, random: &mut Random) -> Vec<Vec<u8>> {
        let inner: [SocketAddr; 2] =
            if self.inner_ipv6 { ["[fd77::2]:7", "[fd77::1]:8"] } else { ["10.77.0.2:7", "10.77.0.1:8"] }
                .map(socket);
        (0..PACKETS)
            .map(|index| {
                let payload = random.bytes(if index + 1 == PACKETS { LAST } else { SEGMENT });
                let sequence = 1 + (index * SEGMENT) as u32;
                let (inner, _) = if self.tcp {
                    packets::tcp(inner[0], inner[1], sequence, &payload, Checksum::Complete)
                } else {
                    packets::udp(inner[0], inner[1], &payload, Checksum::Complete)
                };
                self.around(&inner)
            })
            .collect()
    }

    fn around(self, inner: &[u8]) -> Vec<u8> {
        let (from, to) =
            if self.ipv6 { ("[fd09::2]:4000", "[fd08::2]") } else { ("10.9.0.2:4000", "10.8.0.2") };
        let to = format!("{to}:{}", if self.geneve { 6081 } else { 4789 });
        let mut within = if self.geneve {
            // With an option of 4 bytes.
            vec![2, 0, 0x65, 0x58, 0, 0, 7, 0, 1, 1, 1, 1, 0, 0, 0, 0]
        } else {
            vec![8, 0, 0, 0, 0, 0, 7, 0]
        };
        within.extend([2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
        if self.geneve {
            // And a VLAN.
            within.extend([0x81, 0, 0, 5]);
        }
        within.extend(if inner[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] });
        within.extend(inner);
        let (mut packet, headers) = packets::udp(socket(from), socket(&to), &within, Checksum::Complete);
        if !self.summed {
            packet[headers - 2..headers].fill(0);
        }
        packet
    }

    /// The index of the inner packet.
    fn inner_at(self) -> usize {
        let outer = if self.ipv6 { 48 } else { 28 };
        outer + if self.geneve { 16 + 18 } else { 8 + 14 }
    }

    /// Checks every checksum and length of a packet, and leaves out what a router and a cut may change: TTL and identification.
    fn checked(self, mut packet: Vec<u8>) -> Vec<u8> {
        let transport_at = if self.ipv6 { 40 } else { 20 };
        let is_summed = packet[transport_at + 6..transport_at + 8] != [0, 0];
        assert_eq!(is_summed, self.summed, "{self:?}");
        packets::payload(&packet, self.summed);
        packets::payload(&packet[self.inner_at()..], true);
        let leave_out = |packet: &mut [u8]| {
            if packet[0] >> 4 == 4 {
                packet[4..6].fill(0);
                packet[8] = 0;
                packet[10..12].fill(0);
            } else {
                packet[7] = 0;
            }
        };
        let at = self.inner_at();
        leave_out(&mut packet);
        leave_out(&mut packet[at..]);
        packet
    }

    /// Whether it is one of ours; the kernel says things of its own, too.
    fn is_of(self, packet: &[u8]) -> bool {
        let (version, protocol) = if self.ipv6 { (6, packet[6]) } else { (4, packet[9]) };
        packet[0] >> 4 == version && protocol == 17 && packet.len() > self.inner_at()
    }
}

/// Joins packets as those of a peer, and writes them; returns how many there are in each message.
fn write_joined(queue: &mut Queue, singles: &[Vec<u8>]) -> Vec<u16> {
    let (mut batch, mut list, mut merger) =
        (ReceiveBatch::new(16, 2_048), PacketDelivery::default(), Merger::default());
    for (slot, single) in singles.iter().enumerate() {
        assert!(batch.push(Meta::EMPTY, single));
        let packet = Packet { slot, range: 0..single.len(), partial: false, owner: 1 };
        if !merger.try_join(&mut list, &batch, &packet) {
            let view = IpView::parse(single).unwrap();
            merger.push(&mut list, &mut batch, packet, &view, queue.queue.offload());
        }
    }
    let mut counts = Vec::new();
    queue.queue.deliver(&batch, &mut list, &mut |message, outcome| {
        assert_eq!(outcome, SendOutcome::Sent);
        counts.push(message.packets);
    });
    counts
}

/// Two devices of a namespace that forwards between them, and writes and reads packets there: the second has offload or none.
fn forwarding(test: &str, second_offload: bool, run: impl AsyncFn(&mut Queue, &mut Queue) + Send + Sync) {
    let Some(space) = Space::new(test) else { return };
    space.set("net/ipv4/ip_forward", "1");
    space.set("net/ipv6/conf/all/forwarding", "1");
    space.place().enter(|| {
        in_runtime(async {
            let config = config("");
            let (_first, ports) = open(&config, &tun("culvert7", "10.9.0.1/24 fd09::1/64"), 1).unwrap();
            let mut written = Queue::new(ports.into_iter().next().unwrap());
            let mut other = tun("culvert8", "10.8.0.1/24 fd08::1/64");
            other.offload = second_offload;
            let (_second, ports) = open(&config, &other, 1).unwrap();
            let mut read = Queue::new(ports.into_iter().next().unwrap());
            let tunnels = written.queue.offload().tunnels;
            if !tunnels.cut {
                needs::skipped(test, "super-packets of tunnels, of Linux 6.17");
                return;
            }
            assert_eq!(tunnels, TunnelOffload::ALL, "the trial at the start");
            run(&mut written, &mut read).await;
        });
    });
}

#[test]
fn the_kernel_cuts_what_we_join_into_what_went_in() {
    let mut random = Random::new(22);
    let seed = random.seed;
    let forms: Vec<(Form, Vec<Vec<u8>>)> =
        Form::all().map(|form| (form, form.packets(&mut random))).collect();
    forwarding("packets inside of tunnels into a TUN device", false, async |written, read| {
        for (form, singles) in &forms {
            assert_eq!(write_joined(written, singles), [PACKETS as u16], "{form:?}, seed {seed}");
            let mut arrived = Vec::new();
            while arrived.len() < PACKETS {
                let packets = read.read().await.into_iter().map(|(_, packet)| packet);
                arrived.extend(packets.filter(|packet| form.is_of(packet)));
            }
            for (packet, single) in arrived.into_iter().zip(singles) {
                let same = form.checked(packet) == form.checked(single.clone());
                assert!(same, "{form:?}, seed {seed}");
            }
        }
        let stats = written.queue.stats();
        assert_eq!((stats.write_tunnel, stats.write_super, stats.write_errors), (32, 32, 0), "{stats:?}");
    });
}

#[test]
fn we_cut_what_the_kernel_hands_over_into_what_went_in() {
    let test = "packets inside of tunnels from a TUN device";
    if !needs::met(test, &[Need::Tool("tcpdump", "tcpdump")]) {
        return;
    }
    let mut random = Random::new(23);
    let seed = random.seed;
    let forms: Vec<(Form, Vec<Vec<u8>>)> =
        Form::all().map(|form| (form, form.packets(&mut random))).collect();
    forwarding(test, true, async |written, read| {
        let mut all = Vec::new();
        for (form, singles) in &forms {
            assert_eq!(write_joined(written, singles), [PACKETS as u16]);
            let (vnet, mut packet) = loop {
                let found = read.read().await.into_iter().find(|(_, packet)| form.is_of(packet));
                if let Some(found) = found {
                    break found;
                }
            };
            let tunnel = vnet.tunnel.expect("it is handed over whole");
            assert_eq!((tunnel.ipv6, tunnel.checksum), (form.ipv6, form.summed), "{form:?}");
            assert_eq!((usize::from(tunnel.network_at), vnet.gso_size), (form.inner_at(), SEGMENT as u16));
            let view = IpView::super_packet(&packet).unwrap();
            let cut = Cut::new(&vnet, &mut packet, &view, true).unwrap();
            assert_eq!(cut.count(), PACKETS, "{form:?}");
            for (index, single) in singles.iter().enumerate() {
                let mut packet = Vec::new();
                cut.append(index, &mut packet);
                let same = form.checked(packet.clone()) == form.checked(single.clone());
                assert!(same, "{form:?}, seed {seed}");
                all.push(packet);
            }
        }
        assert_eq!(read.queue.stats().read_tunnel, 32);
        says_right(&all);
    });
}

/// Has `tcpdump` look at packets, as another parser: it finds every inner packet, and nothing wrong.
fn says_right(packets: &[Vec<u8>]) {
    /// Packets of IPv4 and IPv6 without a header of the link.
    const LINKTYPE_RAW: u32 = 101;
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let mut recording = words(&[0xa1b2_c3d4, 0x0004_0002, 0, 0, 65_535, LINKTYPE_RAW]);
    for packet in packets {
        let len = packet.len() as u32;
        recording.extend(words(&[0, 0, len, len]));
        recording.extend(packet);
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&recording).unwrap();
    let mut command = Command::new(needs::tool("tcpdump").unwrap());
    let output = run(command.args(["-nvv", "-r"]).arg(file.path()), Duration::from_secs(20));
    // It takes a missing checksum over IPv6, which tunnels may have (RFC 6935), for a wrong one.
    let said = text(&output.stdout).replace("[bad udp cksum 0x0000 ->", "[no cksum]");
    for wrong in ["incorrect", "bad udp cksum", "bad cksum", "truncated", "malformed"] {
        assert!(!said.contains(wrong), "{wrong}: {said}");
    }
    let count = |text: &str| said.matches(text).count();
    let half = packets.len() / 2;
    assert_eq!((count("VXLAN, flags [I]"), count("Geneve, Flags [none]")), (half, half), "{said}");
    // Half of the inner packets are TCP. UDP: inner ones, and the outer ones with a checksum.
    assert_eq!(count("(correct)"), half, "{said}");
    assert_eq!(count("[udp sum ok]"), half + half, "{said}");
    assert_eq!(count("[no cksum]"), half, "{said}");
}

#[test]
fn the_trial_leaves_nothing_behind_and_says_where_a_firewall_keeps_it_from_us() {
    let test = "the trial of packets inside of tunnels";
    let Some(space) = Space::new(test) else { return };
    if !needs::met(test, &[Need::Tool("nft", "nftables")]) {
        return;
    }
    let tried = || {
        space.place().enter(|| {
            let mut device = TunDevice::open("culvert7", 2, true).unwrap();
            device.join_tunnels(net::tunnels::probe);
            device.offload.tunnels
        })
    };
    let links = space.ip("-o link");
    let before = tried();
    if !before.cut {
        return needs::skipped(test, "super-packets of tunnels, of Linux 6.17");
    }
    assert_eq!(before, TunnelOffload::ALL);
    crate::until(&space, "-o link", |said| said == links);
    for show in ["-4 address", "-4 route show table all", "-6 route show table all"] {
        assert!(!space.ip(show).contains("probe"), "{show}");
    }
    let nft = |words: &str| space.place().tell(&["nft", words]);
    nft("add table ip t; add chain ip t in { type filter hook input priority 0; policy drop; }");
    let without = TunnelOffload { join_ipv4: false, ..TunnelOffload::ALL };
    assert_eq!(tried(), without, "nothing comes in over IPv4");
    nft("add rule ip t in ct state established accept");
    assert_eq!(tried(), TunnelOffload::ALL, "it is an answer");
    space.set("net/ipv6/conf/default/disable_ipv6", "1");
    assert_eq!(tried(), TunnelOffload { join_ipv6: false, ..TunnelOffload::ALL });
}

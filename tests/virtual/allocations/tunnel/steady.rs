//! Packets that cross the tunnel in both directions make neither end allocate.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::Path,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use base::clock::{Clock, ManualClock};
use config::Config;
use engine::{
    health::Health,
    hub::Hub,
    metrics::Value,
    registry::PeerRegistry,
    worker::{Publisher, Setup, Snapshots, Worker},
};
use gate::{Own, identity::Identity, replay_log::MemoryReplayLog, table::SingleUse, tls::TlsIdentity};
use ip::{
    checksum,
    view::{TCP, UDP},
    vnet::{Gso, VnetHeader},
};
use net::Ready;
use zeroize::Zeroizing;

use super::cable::{Device, Wire, WireNet};

const ENTRY: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const EXIT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

/// Bytes of L4 payload in each packet of a super-packet, and how many packets that is.
const SEGMENT: usize = 1_300;
const SEGMENTS: usize = 45;

/// The only worker of an agent.
fn agent(
    identity: &Identity,
    (wire, host): (&Rc<Wire>, IpAddr),
    toml: &str,
    clock: &ManualClock,
    tun: &Rc<Device>,
) -> (Worker, Arc<Snapshots>) {
    let toml = format!("identity = {{ key_file = \"none\" }}\n{toml}");
    let config = Arc::new(Config::parse(&toml, Path::new(".")).unwrap());
    let (snapshots, now) = (Arc::<Snapshots>::default(), clock.now());
    let (ready, log) = (Ready::default(), Box::new(MemoryReplayLog::default()));
    let seed = if host == ENTRY { 1 } else { 2 };
    let setup = Setup {
        identity: Arc::new(TlsIdentity::from_pkcs8(&identity.pkcs8_der()).unwrap()),
        own: Own::new(identity),
        registry: PeerRegistry::new(&config, identity.public_key()),
        refusals: Arc::default(),
        knocks: SingleUse::restore(log, 1, Vec::new(), 0, now, clock.unix_seconds()),
        clock: Arc::new(clock.clone()),
        net: Box::new(WireNet::new(wire, host, &ready, tun)),
        ready,
        instance: [seed; 16],
        seed: [seed; 32],
        worker: 0,
        hub: Hub::new(1, config.peers.len(), now),
        metrics: Publisher::new(0, Arc::new(Health::new(1, now)), Arc::clone(&snapshots)),
        config: Arc::clone(&config),
        site: None,
        tunnels: None,
        tun: Some(Arc::default()),
    };
    (Worker::new(setup, now).unwrap(), snapshots)
}

/// A super-packet between 10.9.0.`from` and 10.9.0.`to`, or one packet if `gso_size` is 0.
fn packet(from: u8, to: u8, protocol: u8, payload: usize, gso_size: usize) -> (VnetHeader, Vec<u8>) {
    let header = if protocol == TCP { 20 } else { 8 };
    let length = 20 + header + payload;
    let mut packet = vec![7; length];
    let [high, low] = u16::try_from(length).unwrap().to_be_bytes();
    packet[..12].copy_from_slice(&[0x45, 0, high, low, 0, 1, 0x40, 0, 64, protocol, 0, 0]);
    packet[12..20].copy_from_slice(&[10, 9, 0, from, 10, 9, 0, to]);
    let right = !checksum::sum(&packet[..20]);
    packet[10..12].copy_from_slice(&right.to_be_bytes());
    let [source, destination] = [from, to].map(|last| IpAddr::V4(Ipv4Addr::new(10, 9, 0, last)));
    let pseudo = checksum::pseudo_header(source, destination, protocol);
    let behind = u16::try_from(header + payload).unwrap();
    let partial = checksum::fold(u64::from(pseudo) + u64::from(behind));
    let checksum_offset = if protocol == TCP { 16 } else { 6 };
    if protocol == TCP {
        packet[32..34].copy_from_slice(&[0x50, 0x10]);
    } else {
        packet[24..26].copy_from_slice(&behind.to_be_bytes());
    }
    packet[20 + checksum_offset..22 + checksum_offset].copy_from_slice(&partial.to_be_bytes());
    let gso = match (gso_size, protocol) {
        (0, _) => Gso::None,
        (_, TCP) => Gso::Tcp4,
        (..) => Gso::Udp,
    };
    let vnet = VnetHeader {
        needs_checksum: true,
        gso,
        gso_ecn: false,
        header_len: (20 + header) as u16,
        gso_size: gso_size as u16,
        checksum_start: 20,
        checksum_offset: checksum_offset as u16,
        tunnel: None,
    };
    (vnet, packet)
}

/// Super-packets of both kinds, and packets of both kinds beside them.
fn packets(from: u8, to: u8) -> Vec<(VnetHeader, Vec<u8>)> {
    let many = SEGMENT * SEGMENTS;
    let kinds = [(TCP, many, SEGMENT), (UDP, many, SEGMENT), (TCP, 0, 0), (UDP, 900, 0), (UDP, 30, 0)];
    let packet = |(protocol, payload, size)| packet(from, to, protocol, payload, size);
    kinds.iter().cycle().take(20).copied().map(packet).collect()
}

#[test]
fn packets_both_ways_make_neither_end_allocate() {
    const ROUNDS: u64 = 50;
    let _profiler = dhat::Profiler::builder().testing().build();
    let [entry_key, exit_key] = [1, 2].map(|seed| Identity::from_seed(Zeroizing::new([seed; 32])).unwrap());
    let clock = ManualClock::new(Duration::from_secs(1_780_000_000));
    let wire = Rc::<Wire>::default();
    let devices = [Device::new(packets(1, 2)), Device::new(packets(2, 1))];
    let exit_toml = format!(
        "transport = {{ listen = [\"{EXIT}:4433\"] }}\n[[peer]]\nname = \"entry\"\npublic_key = \"{}\"\n\
         allowed_ips = [\"10.9.0.1\"]\n[tun]\naddress = [\"10.9.0.2/32\"]",
        entry_key.public_key()
    );
    let entry_toml = format!(
        "[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{EXIT}:4433\"]\nallowed_ips = [\"10.9.0.2\"]\n\
         [tun]\naddress = [\"10.9.0.1/32\"]",
        exit_key.public_key()
    );
    let (exit, _) = agent(&exit_key, (&wire, EXIT), &exit_toml, &clock, &devices[1]);
    let (entry, snapshots) = agent(&entry_key, (&wire, ENTRY), &entry_toml, &clock, &devices[0]);
    let mut workers = [entry, exit];
    let mut settle = || while workers.iter_mut().any(|worker| worker.turn(clock.now()).busy) {};
    // Until the path has been measured, and every buffer has grown.
    for _ in 0..4_000 {
        clock.advance(Duration::from_millis(1));
        settle();
    }
    let mut round = || {
        devices.iter().for_each(|device| device.give());
        clock.advance(Duration::from_micros(20));
        settle();
    };
    (0..ROUNDS).for_each(|_| round());
    let before = devices.clone().map(|device| device.written.get());
    let allocated = dhat::HeapStats::get().total_blocks;
    assert!(allocated > 0, "the profiler sees what came before");
    (0..ROUNDS).for_each(|_| round());
    let allocated = dhat::HeapStats::get().total_blocks - allocated;
    for (device, before) in devices.iter().zip(before) {
        let (calls, super_packets, bytes) = device.written.get();
        let written = (calls - before.0, super_packets - before.1, bytes - before.2);
        assert!(
            written.1 >= 8 * ROUNDS && written.2 >= 8 * ROUNDS * (SEGMENTS * SEGMENT) as u64,
            "{written:?}"
        );
    }
    assert_eq!(allocated, 0, "for {} packets", 2 * ROUNDS * (8 * SEGMENTS as u64 + 12));
    assert_eq!(snapshots.value("culvert_peer_connected{peer=\"exit\"}"), Some(Value::Count(1)));
}

//! Free ports, and which ports a process has.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

/// Below the range from which the kernel takes ports for outgoing sockets, so that none is taken meanwhile.
const FIRST: u32 = 10_000;
const COUNT: u32 = 22_000;

/// A port that is free for UDP and TCP, on both families; never the same one twice.
///
/// # Panics
/// When none is free.
#[must_use]
pub fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..COUNT {
        // Test processes that run at the same time start at distant places.
        let place = process::id().wrapping_mul(7919).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(FIRST + place % COUNT).expect("below 2^16");
        if is_free(port) {
            return port;
        }
    }
    panic!("no port is free");
}

fn is_free(port: u16) -> bool {
    let v4 = (Ipv4Addr::UNSPECIFIED, port);
    // Where there is no IPv6, nothing listens there either.
    let v6_taken = |error: std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    UdpSocket::bind(v4).is_ok()
        && TcpListener::bind(v4).is_ok()
        && !UdpSocket::bind((Ipv6Addr::LOCALHOST, port)).is_err_and(v6_taken)
        && !TcpListener::bind((Ipv6Addr::LOCALHOST, port)).is_err_and(v6_taken)
}

/// The local ports of the UDP sockets of a process, ascending. Its network is seen from its own namespace.
///
/// # Panics
/// When /proc does not say.
#[must_use]
pub fn udp_ports_of(pid: u32) -> Vec<u16> {
    let folder = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is ours and lives");
    let inodes: Vec<String> = folder
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|target| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let mut ports = Vec::new();
    for table in ["udp", "udp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (Some(local), Some(inode)) = (columns.get(1), columns.get(9)) else { continue };
            if inodes.iter().any(|ours| ours == inode) {
                let port = local.rsplit(':').next().and_then(|hex| u16::from_str_radix(hex, 16).ok());
                ports.push(port.expect("the kernel writes ports in hexadecimal"));
            }
        }
    }
    ports.sort_unstable();
    ports.dedup();
    ports
}

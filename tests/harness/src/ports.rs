//! Free ports, and which ports a process has.

use std::{
    collections::HashSet,
    fs,
    net::{Ipv4Addr, SocketAddr},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

/// Below the range from which the kernel takes ports for outgoing sockets, so that none is taken meanwhile.
const FIRST: u32 = 10_000;
const COUNT: u32 = 22_000;

/// A free port on the loopback address.
#[must_use]
pub fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, free()).into()
}

/// A port that no socket of this thread's network namespace has, UDP or TCP, on either family; never the same one twice.
///
/// The kernel's tables are read instead of trying to bind: a child process that is being started keeps a copy of the trial's socket until
/// it runs its program, and the port would be taken for as long.
///
/// # Panics
/// When none is free.
#[must_use]
pub fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let taken: HashSet<u16> = ["udp", "udp6", "tcp", "tcp6"]
        .iter()
        .flat_map(|table| sockets(&format!("/proc/thread-self/net/{table}")))
        .map(|socket| socket.port)
        .collect();
    for _ in 0..COUNT {
        // Test processes that run at the same time start at distant places.
        let place = process::id().wrapping_mul(7919).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(FIRST + place % COUNT).expect("below 2^16");
        if !taken.contains(&port) {
            return port;
        }
    }
    panic!("no port is free");
}

/// A socket in one of the kernel's tables.
struct Socket {
    port: u16,
    inode: String,
}

/// The sockets of a table such as `/proc/net/udp`; none where there is no such table (no IPv6).
fn sockets(table: &str) -> Vec<Socket> {
    let text = fs::read_to_string(table).unwrap_or_default();
    let socket = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (local, inode) = (columns.get(1)?, columns.get(9)?);
        let port = local.rsplit(':').next().and_then(|hex| u16::from_str_radix(hex, 16).ok());
        Some(Socket {
            port: port.expect("the kernel writes ports in hexadecimal"),
            inode: (*inode).to_owned(),
        })
    };
    text.lines().skip(1).filter_map(socket).collect()
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
    let mut ports: Vec<u16> = ["udp", "udp6"]
        .iter()
        .flat_map(|table| sockets(&format!("/proc/{pid}/net/{table}")))
        .filter(|socket| inodes.contains(&socket.inode))
        .map(|socket| socket.port)
        .collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

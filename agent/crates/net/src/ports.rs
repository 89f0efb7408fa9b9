//! The listening sockets of all workers: bound by one thread before the workers start, then handed to each its own.
//!
//! ```text
//!  UDP, one worker       one socket; a second daemon meets AddrInUse
//!  UDP, W workers        a group of W, numbered by the kernel in the order of their binds = the workers' order
//!      QUIC listens      steered by the connection ID (`steering.rs`)
//!      ingress           the kernel's hash of the 4-tuple
//!  TCP                   one listener, a duplicate per worker: whoever accepts first has the connection
//! ```
//!
//! A group's sockets live as long as their workers and are never closed singly: the kernel fills the gap with the last
//! socket, so a socket that is opened anew would take another worker's position.

use std::{
    fmt, fs, io,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    os::fd::AsFd,
    sync::Once,
};

use socket2::{Domain, Protocol, Socket, Type};
use thiserror::Error;

use crate::{UdpOptions, UdpRole, steering, sys, udp, wildcard_for};

/// The ports that all workers listen on.
#[derive(Clone, Debug, Default)]
pub struct PortPlan {
    /// UDP, of the roles [`UdpRole::QuicListen`] and [`UdpRole::Ingress`].
    pub udp: Vec<UdpOptions>,
    /// The addresses that TCP listeners are bound to.
    pub tcp: Vec<SocketAddr>,
}

/// One worker's share of the bound sockets; nothing watches them yet. The default has none.
#[derive(Debug, Default)]
pub struct Ports {
    sockets: Vec<(SocketKind, SocketAddr, Socket)>,
}

/// The kind of a socket that is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SocketKind {
    Udp(UdpRole),
    Tcp,
}

/// An entry of a [`PortPlan`], by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// The index of an entry of [`PortPlan::udp`].
    Udp(usize),
    /// The index of an entry of [`PortPlan::tcp`].
    Tcp(usize),
}

impl fmt::Display for PortKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Udp(_) => "UDP",
            Self::Tcp(_) => "TCP",
        })
    }
}

/// A port that could not be opened: `AddrInUse` when anybody listens there, or another error of the kernel.
#[derive(Debug, Error)]
#[error("cannot listen on {address} ({what})")]
pub struct PortError {
    /// The entry of the plan that failed.
    pub what: PortKind,
    /// The address at which it was to be bound.
    pub address: SocketAddr,
    /// The error of the kernel that says why.
    #[source]
    pub error: io::Error,
}

/// Binds everything that is `wanted`: a share for each of `workers`, in their order.
///
/// # Errors
/// The first port that could not be opened; all that were are closed again.
pub fn open(wanted: &PortPlan, workers: u8) -> Result<Vec<Ports>, PortError> {
    let failed = |what, address| move |error| PortError { what, address, error };
    let mut shares: Vec<Ports> = (0..workers).map(|_| Ports::default()).collect();
    for (index, options) in wanted.udp.iter().enumerate() {
        let group = udp_group(options, workers).map_err(failed(PortKind::Udp(index), options.bind))?;
        for (share, socket) in shares.iter_mut().zip(group) {
            share.sockets.push((SocketKind::Udp(options.role), options.bind, socket));
        }
    }
    for (index, address) in wanted.tcp.iter().enumerate() {
        let clones = tcp_clones(*address, workers).map_err(failed(PortKind::Tcp(index), *address))?;
        for (share, socket) in shares.iter_mut().zip(clones) {
            share.sockets.push((SocketKind::Tcp, *address, socket));
        }
    }
    Ok(shares)
}

/// A TCP socket that listens at `address`, for a thread beside the workers; it does not block.
///
/// # Errors
/// The kernel's.
pub fn listen_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    tcp_listening(address).map(Into::into)
}

/// Whether packets may carry `SO_MARK`.
///
/// # Errors
/// `PermissionDenied` without `CAP_NET_ADMIN`.
pub fn probe_mark(mark: u32) -> io::Result<()> {
    Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?.set_mark(mark)
}

/// Whether `address` is one of this host: the kernel sends from it what goes there, or lists it as anycast. Nothing is sent to find out.
///
/// If the kernel cannot be asked, it is taken for one: callers refuse what is this host's, and a lack of descriptors must not open that.
#[must_use]
pub fn is_own(address: SocketAddr) -> bool {
    let anycast = || match address.ip() {
        IpAddr::V4(_) => Ok(String::new()),
        IpAddr::V6(_) => fs::read_to_string("/proc/net/anycast6"),
    };
    is_own_by(address.ip(), source_towards(address), anycast)
}

/// [`is_own`], of an address to which the kernel sends from `source`, with the text of `/proc/net/anycast6`.
fn is_own_by(
    address: IpAddr,
    source: io::Result<IpAddr>,
    anycast: impl FnOnce() -> io::Result<String>,
) -> bool {
    let has_no_such_family = |error: &io::Error| error.raw_os_error() == Some(libc::EAFNOSUPPORT);
    match source {
        Ok(source) if source == address => true,
        Ok(_) => match anycast() {
            Ok(text) => lists_anycast(&text, address),
            // A kernel without IPv6, or without anycast.
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        },
        Err(error) => {
            use io::ErrorKind::{AddrNotAvailable, HostUnreachable, NetworkUnreachable};
            let has_no_way = [AddrNotAvailable, HostUnreachable, NetworkUnreachable].contains(&error.kind());
            !(has_no_way || has_no_such_family(&error))
        }
    }
}

/// Whether a line of `/proc/net/anycast6` is about `address`: interface index, interface, address in hexadecimal, users.
fn lists_anycast(text: &str, address: IpAddr) -> bool {
    let IpAddr::V6(address) = address else { return false };
    let listed = text.lines().filter_map(|line| line.split_whitespace().nth(2));
    let mut listed = listed.filter_map(|hex| u128::from_str_radix(hex, 16).ok());
    listed.any(|one| one == address.to_bits())
}

/// The address of this host from which the kernel sends to `address`. Nothing is sent to find out.
///
/// # Errors
/// The kernel's; e.g. `NetworkUnreachable` without a route.
pub fn source_towards(address: SocketAddr) -> io::Result<IpAddr> {
    let socket = UdpSocket::bind(wildcard_for(address))?;
    socket.connect(address)?;
    Ok(socket.local_addr()?.ip())
}

impl Ports {
    /// Takes over what another share has.
    pub(super) fn extend(&mut self, more: Self) {
        self.sockets.extend(more.sockets);
    }

    /// The first socket of this kind that was to be bound to this address; each is given once.
    pub(super) fn take(&mut self, kind: SocketKind, address: SocketAddr) -> Option<Socket> {
        let index = self.sockets.iter().position(|(of, at, _)| (*of, *at) == (kind, address))?;
        Some(self.sockets.remove(index).2)
    }

    /// The address at which the socket `index` is bound.
    #[cfg(test)]
    pub(super) fn udp_address(&self, index: usize) -> SocketAddr {
        let local = self.sockets[index].2.local_addr().ok().and_then(|address| address.as_socket());
        local.expect("a bound socket has an Internet address")
    }
}

/// A socket per worker, in their order.
///
/// The first one binds without `SO_REUSEPORT`, so it also is the probe that finds a second daemon, and it sets the
/// option before the others bind: nobody can come in between. With port 0 it chooses the port for all.
fn udp_group(options: &UdpOptions, workers: u8) -> io::Result<Vec<Socket>> {
    let first = udp::configured(options)?;
    first.bind(&options.bind.into())?;
    if workers <= 1 {
        return Ok(vec![first]);
    }
    first.set_reuse_port(true)?;
    let bound = first.local_addr()?;
    let mut group = vec![first];
    for _ in 1..workers {
        let socket = udp::configured(options)?;
        socket.set_reuse_port(true)?;
        socket.bind(&bound)?;
        group.push(socket);
    }
    match options.role {
        UdpRole::QuicListen => steer(&group[0], workers),
        UdpRole::Ingress | UdpRole::QuicDial | UdpRole::Upstream | UdpRole::Decoy => {}
    }
    Ok(group)
}

/// Steers the group of `member` by connection ID, and warns once per process when the kernel does not.
fn steer(member: &Socket, workers: u8) {
    if let Err(error) = sys::attach_steering(member.as_fd(), &steering::steering_program(workers)) {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!(
                %error,
                "the kernel does not steer datagrams to their workers, so they are handed over between threads \
                 (remedy: allow SO_ATTACH_REUSEPORT_CBPF (seccomp profile, Linux 4.5), or set transport.workers = 1)"
            );
        });
    }
}

/// One listener, duplicated for each worker.
fn tcp_clones(address: SocketAddr, workers: u8) -> io::Result<Vec<Socket>> {
    let listener = tcp_listening(address)?;
    let mut clones = (1..workers).map(|_| listener.try_clone()).collect::<io::Result<Vec<_>>>()?;
    clones.push(listener);
    Ok(clones)
}

/// Connections that wait to be accepted; the kernel caps it at `net.core.somaxconn` (4,096 by default).
const LISTEN_BACKLOG: i32 = 4_096;

/// A TCP socket for the family of `address` that does not block.
pub(super) fn tcp_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    Ok(socket)
}

/// A socket that listens at `address`.
pub(super) fn tcp_listening(address: SocketAddr) -> io::Result<Socket> {
    let socket = tcp_socket(address)?;
    // Lets a restarted daemon bind while connections of the old one are in TIME_WAIT; not beside a live listener.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(LISTEN_BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_ours_unless_the_kernel_says_otherwise() {
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let own = |address: &str, source: Result<&str, i32>, anycast: Result<&str, i32>| {
            let source = source.map(ip).map_err(io::Error::from_raw_os_error);
            is_own_by(ip(address), source, || {
                anycast.map(str::to_owned).map_err(io::Error::from_raw_os_error)
            })
        };
        assert!(own("192.0.2.1", Ok("192.0.2.1"), Ok("")));
        assert!(!own("192.0.2.9", Ok("192.0.2.1"), Ok("")));
        // Without a route nothing gets there.
        for error in [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT] {
            assert!(!own("2001:db8::1", Err(error), Ok("")), "{error}");
        }
        for error in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EPERM, libc::ENOBUFS] {
            assert!(own("192.0.2.1", Err(error), Ok("")), "{error}");
        }
        // As the kernel writes it for the subnet-router anycast address (RFC 4291 §2.6.1) of an interface that forwards.
        let listed = "2    eth0            20010db8000000010000000000000000     1\n";
        assert!(own("2001:db8:0:1::", Ok("2001:db8:0:1::5"), Ok(listed)));
        assert!(!own("2001:db8:0:1::1", Ok("2001:db8:0:1::5"), Ok(listed)));
        assert!(!own("2001:db8:0:1::", Ok("2001:db8:0:1::5"), Err(libc::ENOENT)));
        assert!(own("2001:db8:0:1::", Ok("2001:db8:0:1::5"), Err(libc::EMFILE)));
    }

    #[test]
    fn loopback_is_ours() {
        assert!(is_own("127.0.0.1:9".parse().unwrap()));
    }
}

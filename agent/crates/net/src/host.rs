//! Finds out what this host can do for an agent without changing it: on short-lived sockets of our own, on loopback.
//!
//! For `culvert doctor`. Nothing here is on the packet path.

use std::{
    fs::File,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    os::fd::AsFd,
    path::Path,
    sync::Arc,
    time::Duration,
};

use nix::{
    sys::resource::{Resource, getrlimit},
    unistd::{AccessFlags, access},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::{ports, steering, sys, tun::DRIVER, wildcard_for};

/// The system's clock, as the kernel judges it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockState {
    /// Whether a program (NTP, PTP) keeps it right.
    pub synchronised: bool,
    /// By how much it may be off at most.
    pub most_error: Duration,
}

/// The state of the system's clock.
///
/// # Errors
/// The kernel's, e.g. `PermissionDenied` where a sandbox forbids to ask.
pub fn clock() -> io::Result<ClockState> {
    let (synchronised, most_error) = sys::clock_state()?;
    Ok(ClockState { synchronised, most_error })
}

/// Datagrams of the message that is tried, and their size in bytes.
const SEGMENTS: usize = 4;
const SEGMENT_BYTES: usize = 100;

/// Sends one message of [`SEGMENTS`] datagrams over loopback; returns the bytes of the first buffer that comes out.
fn first_buffer(joined: bool) -> io::Result<usize> {
    let [near, far] = [(); 2].map(|()| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)));
    let (near, far) = (near?, far?);
    if joined {
        sys::set_gro(far.as_fd())?;
    }
    near.connect(far.local_addr()?)?;
    sys::set_segment(near.as_fd(), SEGMENT_BYTES as libc::c_int)?;
    near.send(&[0; SEGMENTS * SEGMENT_BYTES])?;
    // Loopback delivers within the call that sends; a firewall that drops it would leave us waiting.
    far.set_read_timeout(Some(Duration::from_millis(500)))?;
    far.recv(&mut [0; 2 * SEGMENTS * SEGMENT_BYTES])
}

/// Whether the kernel cuts a message into datagrams (`UDP_SEGMENT`, Linux 4.18).
///
/// # Errors
/// Why that cannot be tried: `AddrNotAvailable` without loopback, `WouldBlock` where a firewall drops what is sent over it.
pub fn cuts_segments() -> io::Result<bool> {
    known(first_buffer(false)).map(|bytes| bytes == Some(SEGMENT_BYTES))
}

/// Whether the kernel hands over datagrams of one sender joined (`UDP_GRO`, Linux 5.0).
///
/// # Errors
/// As [`cuts_segments`], which it needs.
pub fn joins_segments() -> io::Result<bool> {
    known(first_buffer(true)).map(|bytes| bytes == Some(SEGMENTS * SEGMENT_BYTES))
}

/// Whether a socket takes the option `UDP_GRO`, whatever loopback does with it.
#[must_use]
pub fn takes_gro() -> bool {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
    socket
        .is_ok_and(|socket| sys::set_gro(socket.as_fd()).is_ok() && sys::gro(socket.as_fd()).unwrap_or(false))
}

/// Whether the kernel lets a program choose among the sockets of a port (`SO_ATTACH_REUSEPORT_CBPF`, Linux 4.5).
///
/// # Errors
/// Why that cannot be tried: `AddrNotAvailable` without loopback, for example.
pub fn steers() -> io::Result<bool> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_port(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    known(sys::attach_steering(socket.as_fd(), &steering::steering_program(2))).map(|done| done.is_some())
}

/// Whether the kernel stamps datagrams with the time at which they came (`SO_TIMESTAMPNS`).
///
/// # Errors
/// As [`steers`].
pub fn stamps() -> io::Result<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    known(sys::set_timestamps(socket.as_fd(), true)).map(|done| done.is_some())
}

/// `None` for what the kernel says of an option that it does not know, or that a sandbox keeps from us.
fn known<T>(tried: io::Result<T>) -> io::Result<Option<T>> {
    match tried {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EINVAL | libc::EPERM | libc::EIO) => Ok(None),
            _ => Err(error),
        },
    }
}

/// The socket buffers that the kernel grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Bytes of the receive buffer, before the kernel doubles it.
    pub receive: u64,
    /// Bytes of the send buffer, before the kernel doubles it.
    pub send: u64,
    /// Whether `net.core.rmem_max` and `wmem_max` do not bind this user (`SO_RCVBUFFORCE`, CAP_NET_ADMIN).
    pub forced: bool,
}

/// Asks for socket buffers of `bytes`, as the agent does.
///
/// # Errors
/// The kernel's, when the process is out of descriptors (EMFILE) or may open no socket.
pub fn buffers(bytes: u64) -> io::Result<Buffers> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    let asked = i32::try_from(bytes).unwrap_or(i32::MAX).min(i32::MAX / 2);
    let forced = sys::force_receive_buffer(socket.as_fd(), asked).is_ok()
        && sys::force_send_buffer(socket.as_fd(), asked).is_ok();
    if !forced {
        socket.set_recv_buffer_size(asked.unsigned_abs() as usize)?;
        socket.set_send_buffer_size(asked.unsigned_abs() as usize)?;
    }
    let [receive, send] =
        [socket.recv_buffer_size()?, socket.send_buffer_size()?].map(|bytes| bytes as u64 / 2);
    Ok(Buffers { receive, send, forced })
}

/// Opens a UDP port as the agent does, and closes it.
///
/// # Errors
/// The kernel's: `AddrInUse`, `PermissionDenied`, `AddrNotAvailable`.
pub fn try_udp(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())
}

/// Opens a TCP port as the agent does, and closes it.
///
/// # Errors
/// The kernel's: `AddrInUse`, `PermissionDenied`, `AddrNotAvailable`.
pub fn try_tcp(address: SocketAddr) -> io::Result<()> {
    ports::tcp_listening(address).map(drop)
}

/// The way to an address, as the kernel would choose it now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The local address that packets leave from.
    pub source: IpAddr,
    /// The largest IP packet that the kernel sends that way, in bytes: the interface's, the route's, or what ICMP has said.
    pub mtu: u32,
}

/// The way that packets with the mark `mark` (0: none) take to `address`. Nothing is sent.
///
/// # Errors
/// The kernel's, e.g. `NetworkUnreachable`.
pub fn way(address: SocketAddr, mark: u32) -> io::Result<Route> {
    way_over(address, &Over { mark, ..Over::default() })
}

/// What decides about the way of packets besides their destination.
#[derive(Clone, Debug, Default)]
pub struct Over {
    /// SO_MARK; 0: none.
    pub mark: u32,
    /// The interface that packets leave by, whatever the routing table prefers.
    pub interface: Option<Arc<str>>,
    /// The address that packets come from.
    pub source: Option<IpAddr>,
}

/// The way that packets take to `address` over one line of this host. Nothing is sent.
///
/// # Errors
/// The kernel's, e.g. ENODEV if there is no such interface, `AddrNotAvailable` if this host does not have the source, or if it is of another family.
pub fn way_over(address: SocketAddr, over: &Over) -> io::Result<Route> {
    let Over { mark, interface, source } = over;
    let bind = match source {
        Some(source) if source.is_ipv4() != address.is_ipv4() => {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        Some(source) => SocketAddr::new(*source, 0),
        None => wildcard_for(address),
    };
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if let Some(interface) = interface {
        socket.bind_device(Some(interface.as_bytes()))?;
    }
    let mark = *mark;
    if mark != 0
        && let Err(error) = socket.set_mark(mark)
    {
        tracing::debug!(%error, "the way of packets without a mark is looked at");
    }
    socket.bind(&bind.into())?;
    socket.connect(&address.into())?;
    let local = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::Unsupported)?;
    Ok(Route { source: local.ip(), mtu: sys::path_mtu(socket.as_fd(), address.is_ipv6())? })
}

/// The features that devices of the kernel's TUN driver may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunFeatures {
    /// A header that describes super-packets and partial checksums (`IFF_VNET_HDR`).
    pub vnet_header: bool,
    /// A queue for each worker (`IFF_MULTI_QUEUE`).
    pub several_queues: bool,
}

/// Opens the TUN driver, and asks it what its devices may have; makes none.
///
/// # Errors
/// The kernel's: `NotFound`, `PermissionDenied`, ENODEV where there is no driver.
pub fn tun_features() -> io::Result<TunFeatures> {
    let driver = File::options().read(true).write(true).open(DRIVER)?;
    let flags = sys::tun_features(driver.as_fd())?;
    let has = |flag: libc::c_int| flags & flag != 0;
    Ok(TunFeatures { vnet_header: has(libc::IFF_VNET_HDR), several_queues: has(libc::IFF_MULTI_QUEUE) })
}

/// Whether an interface joins what it receives (GRO); needs no privilege.
///
/// # Errors
/// The kernel's: there is no such interface, or its driver does not say.
pub fn interface_joins(interface: &str) -> io::Result<bool> {
    /// `ETHTOOL_GGRO` of linux/ethtool.h, which asks whether a driver joins packets.
    const GET_GRO: u32 = 0x2b;
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    sys::ethtool_value(socket.as_fd(), interface, GET_GRO).map(|value| value != 0)
}

/// The index of the interface with this name.
///
/// # Errors
/// `ENODEV` if this host has none.
pub fn interface_index(name: &str) -> io::Result<u32> {
    sys::interface_index(name)
}

/// Whether this process may write to a file, or make files in a folder.
#[must_use]
pub fn may_write(path: &Path) -> bool {
    access(path, AccessFlags::W_OK).is_ok()
}

/// The hard limit on open files of this process.
///
/// # Errors
/// The kernel's, where a sandbox forbids to ask.
pub fn most_descriptors() -> io::Result<u64> {
    Ok(getrlimit(Resource::RLIMIT_NOFILE)?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_agent_uses_on_this_host_is_found_to_work() {
        // The tests of `udp.rs` and `ports.rs` rely on the same options of the same kernel.
        assert!(cuts_segments().unwrap() && joins_segments().unwrap());
        assert!(steers().unwrap() && stamps().unwrap());
    }

    #[test]
    fn an_option_that_the_kernel_does_not_know_is_told_from_a_failure() {
        let of = |errno| known::<()>(Err(io::Error::from_raw_os_error(errno)));
        assert!(matches!(of(libc::ENOPROTOOPT), Ok(None)));
        assert!(of(libc::ENETUNREACH).is_err());
    }

    #[test]
    fn buffers_are_given_in_full_or_up_to_a_limit() {
        let little = buffers(64 << 10).unwrap();
        assert_eq!((little.receive, little.send), (64 << 10, 64 << 10));
        let much = buffers(1 << 30).unwrap();
        assert_eq!(much.receive == (1 << 30) - 1 || much.receive == 1 << 30, much.forced, "{much:?}");
    }

    #[test]
    fn a_taken_port_is_found_taken_and_a_free_one_is_left_free() {
        let taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = taken.local_addr().unwrap();
        assert_eq!(try_udp(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(try_tcp(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        for _ in 0..2 {
            try_udp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            try_tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        }
    }

    #[test]
    fn the_way_to_ourselves_leads_over_loopback() {
        let way = way((Ipv4Addr::LOCALHOST, 9).into(), 0).unwrap();
        // Loopback's own MTU is 65,536, one more than an IPv4 packet may have.
        assert_eq!((way.source, way.mtu), (Ipv4Addr::LOCALHOST.into(), 65_535));
    }

    #[test]
    fn a_folder_of_ours_is_writable_and_one_that_is_missing_is_not() {
        let folder = tempfile::tempdir().unwrap();
        assert!(may_write(folder.path()));
        assert!(!may_write(&folder.path().join("missing")));
    }

    #[test]
    fn the_clock_and_the_limit_are_known() {
        assert!(clock().unwrap().most_error < Duration::from_secs(60), "the kernel stops at 16 s");
        assert!(most_descriptors().unwrap() >= 256);
        assert!(interface_joins("no such one").is_err());
    }
}

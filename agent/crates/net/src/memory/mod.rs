//! The network in memory, for tests and the simulator: no system calls, no clock, one thread.
//!
//! | question | file |
//! |---|---|
//! | hosts, addresses, names, who hears a datagram, the hook that loses it | this one |
//! | a socket's queue, GRO, refusals | `udp.rs` |
//! | connections: pipes with bounded buffers | `tcp.rs` |
//! | a TUN device, of which a test is the kernel | `tun.rs` |
//! | several workers on one host: which of their sockets hears a datagram | `group.rs` (pure) |
//!
//! A [`MemoryFabric`] connects hosts; [`MemoryFabric::host`] gives a [`MemoryNet`] for each. Datagrams arrive at once
//! and in order. A simulator that wants delay or reordering takes them in its hook ([`Verdict::Drop`]) and hands them
//! over later with [`MemoryFabric::inject`].

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    rc::Rc,
};

use slab::Slab;

use self::{
    tcp::{Backlog, Listener, Stream},
    udp::{Endpoint, MemoryUdp},
};
use crate::{
    Net, Path, Ready, TcpListener, TcpStream, Token, TunQueue, UdpOptions, UdpSocket, Ways,
    batch::MAX_MESSAGE_BYTES, literal, ports::SocketKind,
};

mod group;
mod tcp;
mod tun;
mod udp;

pub use tun::{MemoryTun, Written};

/// The largest datagram over Ethernet, as which a device counts unless it is said.
const ETHERNET_DATAGRAM_BYTES: usize = 1472;

/// Ports that a bind to port 0 takes from: the dynamic range of RFC 6335 §6.
const FIRST_DYNAMIC_PORT: u16 = 49_152;

/// The distance between the first dynamic ports of two hosts.
const PORTS_BETWEEN_HOSTS: u16 = 1_009;

/// A datagram between two sockets of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The address of the sending socket.
    pub from: SocketAddr,
    /// The address of the receiving socket.
    pub to: SocketAddr,
    /// The TOS or traffic class byte: DSCP and, in the low two bits, ECN.
    pub tos: u8,
    /// The payload of the datagram, without its UDP header.
    pub payload: &'a [u8],
}

/// The decision of the network about a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The network delivers the datagram once.
    Deliver,
    /// The network drops the datagram, and its sender does not learn of it.
    Drop,
    /// The network delivers the datagram twice.
    Duplicate,
}

/// What the sockets of a fabric were asked for, as a kernel would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// System calls, each message of a call that sends several as one.
    pub calls: u64,
    /// Datagrams that were sent or received.
    pub datagrams: u64,
    /// Bytes of the payloads of those datagrams.
    pub bytes: u64,
}

impl Calls {
    /// The calls that were made after those in `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            calls: self.calls - before.calls,
            datagrams: self.datagrams - before.datagrams,
            bytes: self.bytes - before.bytes,
        }
    }
}

type Hook = Box<dyn FnMut(&Datagram<'_>) -> Verdict>;

/// A network of hosts; clones share it.
#[derive(Clone, Default)]
pub struct MemoryFabric {
    state: Rc<RefCell<State>>,
}

impl MemoryFabric {
    /// Adds a host with these addresses, and 127.0.0.0/8 and ::1 to itself. Its sources report to `ready`.
    #[must_use]
    pub fn host(&self, addresses: &[IpAddr], ready: Ready) -> MemoryNet {
        let id = self.add_host(addresses, 1);
        self.net(id, 0, ready)
    }

    /// Adds one host with several workers, whose sources report to one of `readies` each, in the workers' order.
    ///
    /// Their sockets of the roles `QuicListen` and `Ingress` that are bound to one address form a group, at most one
    /// socket of each worker: a datagram goes to the worker that its connection ID names, or to one that a hash of
    /// source and destination chooses. Listeners for TCP at one address share what waits to be accepted.
    /// The n-th bind of each worker to port 0 of one address and role gets the same port.
    #[must_use]
    pub fn worker_hosts(&self, addresses: &[IpAddr], readies: &[Ready]) -> Vec<MemoryNet> {
        let id = self.add_host(addresses, u8::try_from(readies.len()).unwrap_or(u8::MAX));
        (0..u8::MAX).zip(readies).map(|(index, ready)| self.net(id, index, ready.clone())).collect()
    }

    fn add_host(&self, addresses: &[IpAddr], workers: u8) -> HostId {
        let mut state = self.state.borrow_mut();
        // A host that takes over the address of another goes on elsewhere in the range, as a kernel's random choice does:
        // else what is under way to the other's sockets would find its own.
        let hosts = u16::try_from(state.hosts.len()).unwrap_or(u16::MAX);
        let first = hosts.wrapping_mul(PORTS_BETWEEN_HOSTS) % (u16::MAX - FIRST_DYNAMIC_PORT);
        state.hosts.push(Host {
            addresses: addresses.to_vec(),
            next_port: FIRST_DYNAMIC_PORT + first,
            workers,
            given: HashMap::new(),
        });
        HostId(state.hosts.len() - 1)
    }

    fn net(&self, host: HostId, index: u8, ready: Ready) -> MemoryNet {
        MemoryNet {
            fabric: self.clone(),
            worker: WorkerId { host, index },
            ready,
            answers: HashMap::new(),
            binds: HashMap::new(),
            tun: None,
        }
    }

    /// What its sockets were asked for so far, all together.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.state.borrow().calls
    }

    /// Counts a call at a TCP socket.
    fn count_call(&self) {
        self.state.borrow_mut().calls.calls += 1;
    }

    /// Counts bytes that a TCP socket took or gave.
    fn count_bytes(&self, bytes: usize) {
        self.state.borrow_mut().calls.bytes += bytes as u64;
    }

    /// Counts a message of several datagrams that was sent.
    fn count_sent(&self, datagrams: u64, bytes: u64) {
        let counted = &mut self.state.borrow_mut().calls;
        counted.calls += 1;
        counted.datagrams += datagrams;
        counted.bytes += bytes;
    }

    /// Lets every host resolve `name` to `addresses`.
    pub fn add_name(&self, name: &str, addresses: &[IpAddr]) {
        self.state.borrow_mut().names.insert(name.to_owned(), addresses.to_vec());
    }

    /// Lookups of `name` are not answered from now on, or are again.
    pub fn hang_name(&self, name: &str, hangs: bool) {
        let mut state = self.state.borrow_mut();
        state.hanging.retain(|other| other != name);
        if hangs {
            state.hanging.push(name.to_owned());
        }
    }

    /// The host that has `address` has these from now on; of each family the first is what new sockets send from.
    pub fn set_addresses(&self, address: IpAddr, addresses: &[IpAddr]) {
        let mut state = self.state.borrow_mut();
        if let Some(HostId(host)) = state.owner_of(address) {
            state.hosts[host].addresses = addresses.to_vec();
        }
    }

    /// Asks `hook` about every datagram that is sent from now on, one by one. It may use the fabric.
    pub fn set_hook(&self, hook: impl FnMut(&Datagram<'_>) -> Verdict + 'static) {
        self.state.borrow_mut().hook = Some(Box::new(hook));
    }

    /// Whether `receive` joins consecutive datagrams of equal size, as `UDP_GRO` does. It does at first.
    pub fn set_gro(&self, gro: bool) {
        self.state.borrow_mut().no_gro = !gro;
    }

    /// Whether a listening port's group is steered by connection ID, as at first. Otherwise it is hashed, as by a kernel that
    /// takes no program.
    pub fn set_steering(&self, steering: bool) {
        self.state.borrow_mut().no_steering = !steering;
    }

    /// Datagrams from `from` to `to` with a payload of more than `bytes` vanish on their way, before the hook is asked.
    pub fn set_mtu(&self, from: IpAddr, to: IpAddr, bytes: usize) {
        self.state.borrow_mut().mtus.insert((from, to), bytes);
    }

    /// The sockets of `from` refuse datagrams with a payload of more than `bytes`, which is what the host says of its device.
    pub fn set_device_mtu(&self, from: IpAddr, bytes: usize) {
        self.state.borrow_mut().device_mtus.insert(from, bytes);
    }

    /// The sockets of `from` refuse every datagram with the error number `errno` from now on, as those of a host whose own firewall
    /// forbids them do; none with `None`.
    pub fn set_send_error(&self, from: IpAddr, errno: Option<i32>) {
        let mut state = self.state.borrow_mut();
        match errno {
            Some(errno) => state.send_errors.insert(from, errno),
            None => state.send_errors.remove(&from),
        };
    }

    /// Lets a datagram arrive without asking the hook. False when nobody hears it, or the socket's queue is full.
    /// Loopback addresses are private to their host, so such a datagram reaches nobody.
    pub fn inject(&self, datagram: &Datagram<'_>) -> bool {
        let mut state = self.state.borrow_mut();
        let Some(host) = state.owner_of(datagram.to.ip()) else { return false };
        state.arrive(host, datagram) == Arrival::Queued
    }

    /// Sends a datagram of the socket `id`.
    fn send(&self, id: usize, path: &Path, payload: &[u8]) -> io::Result<()> {
        let too_large = || io::Error::from_raw_os_error(libc::EMSGSIZE);
        if payload.len() > MAX_MESSAGE_BYTES {
            return Err(too_large());
        }
        let (host, from) = self.state.borrow().source(id, path)?;
        let within = |mtu: Option<&usize>| mtu.is_none_or(|mtu| payload.len() <= *mtu);
        if let Some(errno) = self.state.borrow().send_errors.get(&from.ip()) {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        if !within(self.state.borrow().device_mtus.get(&from.ip())) {
            return Err(too_large());
        }
        if !within(self.state.borrow().mtus.get(&(from.ip(), path.destination.ip()))) {
            return Ok(());
        }
        let datagram = Datagram { from, to: path.destination, tos: path.tos, payload };
        let copies = match self.ask_hook(&datagram) {
            Verdict::Deliver => 1,
            Verdict::Drop => 0,
            Verdict::Duplicate => 2,
        };
        let mut state = self.state.borrow_mut();
        for _ in 0..copies {
            match state.arrive(host, &datagram) {
                Arrival::Queued | Arrival::Full => {}
                Arrival::NobodyListens => state.udp[id].refuse(),
            }
        }
        Ok(())
    }

    /// The hook is taken out of the fabric while it runs, so that it may use the fabric.
    fn ask_hook(&self, datagram: &Datagram<'_>) -> Verdict {
        let Some(mut hook) = self.state.borrow_mut().hook.take() else { return Verdict::Deliver };
        let verdict = hook(datagram);
        self.state.borrow_mut().hook.get_or_insert(hook);
        verdict
    }
}

impl fmt::Debug for MemoryFabric {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MemoryFabric").finish_non_exhaustive()
    }
}

/// The network of a host, or of one of its workers.
#[derive(Debug)]
pub struct MemoryNet {
    fabric: MemoryFabric,
    worker: WorkerId,
    ready: Ready,
    answers: HashMap<Token, io::Result<Vec<SocketAddr>>>,
    /// The number of times that port 0 of an address was asked for.
    binds: HashMap<(SocketKind, IpAddr), usize>,
    /// Until the worker asks for its queue.
    tun: Option<MemoryTun>,
}

impl MemoryNet {
    /// Gives the host a TUN device, of which this worker has the queue with its own index.
    pub fn set_tun(&mut self, tun: &MemoryTun) {
        self.tun = Some(tun.clone());
    }

    /// `address`, or with port 0 the one of its ports that the other workers got for the same bind.
    fn wanted(&self, kind: SocketKind, address: SocketAddr) -> SocketAddr {
        if address.port() != 0 || !kind.is_shared() {
            return address;
        }
        let nth = self.binds.get(&(kind, address.ip())).copied().unwrap_or(0);
        let state = self.fabric.state.borrow();
        let given = state.hosts[self.worker.host.0].given.get(&(kind, address.ip()));
        let port = given.and_then(|ports| ports.get(nth)).copied();
        SocketAddr::new(address.ip(), port.unwrap_or(0))
    }

    /// Notes that `asked` was bound as `local`.
    fn bound(&mut self, kind: SocketKind, asked: SocketAddr, wanted: SocketAddr, local: SocketAddr) {
        if asked.port() != 0 || !kind.is_shared() {
            return;
        }
        *self.binds.entry((kind, asked.ip())).or_default() += 1;
        if wanted.port() == 0 {
            let mut state = self.fabric.state.borrow_mut();
            state.hosts[self.worker.host.0].given.entry((kind, asked.ip())).or_default().push(local.port());
        }
    }
}

impl Net for MemoryNet {
    fn ways(&self) -> Ways {
        let (fabric, host) = (self.fabric.clone(), self.worker.host);
        Rc::new(move |to| {
            let state = fabric.state.borrow();
            let from = state.source_for(host, to.ip())?;
            let usual = if to.ip().is_loopback() { MAX_MESSAGE_BYTES } else { ETHERNET_DATAGRAM_BYTES };
            Some(state.device_mtus.get(&from).copied().unwrap_or(usual))
        })
    }

    fn udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<Box<dyn UdpSocket>> {
        let kind = SocketKind::Udp(options.role);
        let wanted = self.wanted(kind, options.bind);
        let WorkerId { host, index } = self.worker;
        let mut state = self.fabric.state.borrow_mut();
        let mut local = state.bindable(host, wanted, |state, local| {
            state.ports.get(&(host, local.port())).is_some_and(|sockets| {
                sockets.iter().map(|id| &state.udp[*id]).any(|other| {
                    let beside = kind.is_shared()
                        && (other.role, other.local) == (options.role, local)
                        && other.worker.index != index;
                    !beside && overlap(other.local.ip(), local.ip())
                })
            })
        })?;
        if let Some(remote) = options.connect {
            state.route(host, remote.ip()).ok_or(io::ErrorKind::NetworkUnreachable)?;
            if local.ip().is_unspecified() {
                let source = state.source_for(host, remote.ip());
                local.set_ip(source.ok_or(io::ErrorKind::NetworkUnreachable)?);
            }
        }
        let id =
            state.udp.insert(Endpoint::new(self.worker, local, options, Waiter::new(&self.ready, token)));
        state.ports.entry((host, local.port())).or_default().push(id);
        drop(state);
        self.bound(kind, options.bind, wanted, local);
        Ok(Box::new(MemoryUdp::new(self.fabric.clone(), id, local, options.connect)))
    }

    fn tcp_listen(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpListener>> {
        let wanted = self.wanted(SocketKind::Tcp, address);
        let WorkerId { host, index } = self.worker;
        let mut state = self.fabric.state.borrow_mut();
        let local = state.bindable(host, wanted, |state, local| {
            state.listeners.iter().any(|((other_host, other), backlog)| {
                let beside = *other == local && !backlog.borrow().has_listener(index);
                *other_host == host
                    && other.port() == local.port()
                    && !beside
                    && overlap(other.ip(), local.ip())
            })
        })?;
        let backlog = Rc::clone(state.listeners.entry((host, local)).or_default());
        drop(state);
        self.bound(SocketKind::Tcp, address, wanted, local);
        let fabric = self.fabric.clone();
        Ok(Box::new(Listener::new(fabric, self.worker, local, backlog, &self.ready, token)))
    }

    fn tcp_connect(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpStream>> {
        let mut state = self.fabric.state.borrow_mut();
        let unreachable = io::ErrorKind::NetworkUnreachable;
        let host = self.worker.host;
        let remote_host = state.route(host, address.ip()).ok_or(unreachable)?;
        let source = state.source_for(host, address.ip()).ok_or(unreachable)?;
        let port = state.hosts[host.0].take_port();
        let wildcard = crate::wildcard_for(address).ip();
        let backlog = [address.ip(), wildcard]
            .into_iter()
            .find_map(|ip| state.listeners.get(&(remote_host, SocketAddr::new(ip, address.port()))))
            .map(Rc::clone);
        drop(state);
        let stream = match backlog {
            Some(backlog) => {
                Stream::connect(&self.fabric, &backlog, SocketAddr::new(source, port), &self.ready, token)
            }
            None => None,
        };
        self.ready.mark(token);
        Ok(Box::new(stream.unwrap_or_else(|| Stream::refused(&self.fabric))))
    }

    fn resolve(&mut self, host: &str, port: u16, token: Token) {
        if self.fabric.state.borrow().hanging.iter().any(|name| name == host) {
            return;
        }
        let state = self.fabric.state.borrow();
        let known = literal(host).map(|ip| vec![ip]).or_else(|| state.names.get(host).cloned());
        let addresses = known.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        let answer = addresses.map(|ips| ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect());
        self.answers.insert(token, answer);
        self.ready.mark(token);
    }

    fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        self.answers.remove(&token)
    }

    fn tun(&mut self, token: Token) -> io::Result<Option<Box<dyn TunQueue>>> {
        Ok(self.tun.take().and_then(|tun| tun.open(self.worker.index, &self.ready, token)))
    }
}

/// The party that waits for something, if there is one.
#[derive(Debug, Default)]
struct Waiter {
    owner: Option<(Ready, Token)>,
    armed: bool,
}

impl Waiter {
    fn new(ready: &Ready, token: Token) -> Self {
        Self { owner: Some((ready.clone(), token)), armed: true }
    }

    fn wake(&mut self) {
        if let Some((ready, token)) = &self.owner
            && std::mem::take(&mut self.armed)
        {
            ready.mark(*token);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HostId(usize);

/// A worker of a host, by its index among the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WorkerId {
    host: HostId,
    index: u8,
}

struct Host {
    addresses: Vec<IpAddr>,
    next_port: u16,
    workers: u8,
    /// The ports that binds to port 0 were given: the n-th bind of each worker to one address gets the same one.
    given: HashMap<(SocketKind, IpAddr), Vec<u16>>,
}

impl Host {
    fn owns(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || self.addresses.contains(&ip)
    }

    fn take_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(FIRST_DYNAMIC_PORT);
        port
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Queued,
    Full,
    NobodyListens,
}

#[derive(Default)]
struct State {
    hosts: Vec<Host>,
    names: BTreeMap<String, Vec<IpAddr>>,
    /// Names whose lookups are not answered.
    hanging: Vec<String>,
    udp: Slab<Endpoint>,
    /// The UDP sockets of each port.
    ports: BTreeMap<(HostId, u16), Vec<usize>>,
    listeners: BTreeMap<(HostId, SocketAddr), Rc<RefCell<Backlog>>>,
    hook: Option<Hook>,
    mtus: HashMap<(IpAddr, IpAddr), usize>,
    device_mtus: HashMap<IpAddr, usize>,
    send_errors: HashMap<IpAddr, i32>,
    no_gro: bool,
    no_steering: bool,
    calls: Calls,
}

impl State {
    fn owner_of(&self, ip: IpAddr) -> Option<HostId> {
        // A host that was added later takes the address over, as a machine does that replaces another.
        self.hosts.iter().rposition(|host| host.addresses.contains(&ip)).map(HostId)
    }

    /// The host that `ip` is, seen from `from`.
    fn route(&self, from: HostId, ip: IpAddr) -> Option<HostId> {
        if ip.is_loopback() { Some(from) } else { self.owner_of(ip) }
    }

    /// The address that `host` sends from when nothing else is said.
    fn source_for(&self, host: HostId, destination: IpAddr) -> Option<IpAddr> {
        if destination.is_loopback() {
            return Some(match destination {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        let mut addresses = self.hosts[host.0].addresses.iter();
        addresses.find(|ip| ip.is_ipv4() == destination.is_ipv4()).copied()
    }

    /// The host that hears a datagram of socket `id`, and the address that it comes from.
    fn source(&self, id: usize, path: &Path) -> io::Result<(HostId, SocketAddr)> {
        let no_way = || io::Error::from_raw_os_error(libc::ENETUNREACH);
        let socket = &self.udp[id];
        let from = socket.worker.host;
        let host = self.route(from, path.destination.ip()).ok_or_else(no_way)?;
        let source = match path.source {
            Some(source) if self.hosts[from.0].owns(source) => Some(source),
            Some(_) => None,
            None if socket.local.ip().is_unspecified() => self.source_for(from, path.destination.ip()),
            None => Some(socket.local.ip()).filter(|ip| self.hosts[from.0].owns(*ip)),
        };
        let source = source.ok_or_else(no_way)?;
        Ok((host, SocketAddr::new(source, socket.local.port())))
    }

    /// Queues a datagram at the socket of `host` that hears it: a connected one before a bound one before a wildcard,
    /// and within a group the chosen worker's, or while that has none any other's.
    fn arrive(&mut self, host: HostId, datagram: &Datagram<'_>) -> Arrival {
        let (workers, steered) = (self.hosts[host.0].workers, !self.no_steering);
        let best = self.ports.get(&(host, datagram.to.port())).and_then(|sockets| {
            let scored = sockets.iter().filter_map(|id| {
                let socket = &self.udp[*id];
                let score = socket.hears(datagram)?;
                let index = group::worker_for(socket.role, steered, datagram, workers);
                let chosen = index == socket.worker.index;
                Some((score, chosen, *id))
            });
            scored.max()
        });
        match best {
            Some((.., id)) => self.udp[id].enqueue(datagram),
            None => Arrival::NobodyListens,
        }
    }

    /// `address` with a port, if `host` has it and it is not `taken`.
    fn bindable(
        &mut self,
        host: HostId,
        address: SocketAddr,
        taken: impl Fn(&Self, SocketAddr) -> bool,
    ) -> io::Result<SocketAddr> {
        if !address.ip().is_unspecified() && !self.hosts[host.0].owns(address.ip()) {
            return Err(io::ErrorKind::AddrNotAvailable.into());
        }
        if address.port() != 0 {
            return if taken(self, address) { Err(io::ErrorKind::AddrInUse.into()) } else { Ok(address) };
        }
        for _ in FIRST_DYNAMIC_PORT..=u16::MAX {
            let candidate = SocketAddr::new(address.ip(), self.hosts[host.0].take_port());
            if !taken(self, candidate) {
                return Ok(candidate);
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }
}

/// Whether sockets bound to these addresses, on one port, are in each other's way.
fn overlap(one: IpAddr, other: IpAddr) -> bool {
    one == other || (one.is_ipv4() == other.is_ipv4() && (one.is_unspecified() || other.is_unspecified()))
}

//! Opens and closes the sockets of a worker, and gives out the tokens that they report with.

use std::{io, net::SocketAddr, sync::Arc, time::Instant};

use base::{
    ids::{LocalId, PeerId},
    pages::Pages,
};
use config::{Config, Forward, Uplink, Upstream};
use gate::decoy::DecoyId;
use net::{
    Net, TcpListener, TcpStream, Token, TunQueue, UdpOptions, UdpRole, UdpSocket, Ways,
    aliased::Aliased,
    ports::{PortPlan, Ports},
    stats::Booked as SocketBooked,
    wildcard_for,
};

use crate::{
    forward::{Local, Locals, tcp::TcpId},
    lanes::{UnderlayId, Underlays},
    relay::{FlowId, Origin},
    socket_stats::{self, BytesOfLines, SocketStats, count_line},
    upstreams::{Place, Upstreams},
};

/// The source of events that a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A socket that carries QUIC to and from peers.
    Underlay(UnderlayId),
    /// A local UDP socket, which faces clients or a service.
    Local(LocalId),
    /// The worker's queue of the TUN device.
    Tun,
    /// A local TCP port: its index in the configuration's `[[tcp]]` list.
    Listener(usize),
    /// The TCP connection of a TCP forward.
    Tcp(TcpId),
    /// A connection whose PROXY header has not come: its index among those.
    Proxied(u32),
    /// The lookup of a peer's endpoint.
    Resolve(PeerId),
    /// The lookup of a service's name.
    Name,
    /// An unauthenticated sender's socket to the decoy.
    Decoy(DecoyId),
    /// The worker's inbox for commands and its mailbox at the hub, which share a token.
    Inbox,
}

/// Buffers of an unauthenticated sender's socket to the decoy: about 50 full datagrams, within the default limit of Linux.
const DECOY_BUFFER_BYTES: usize = 128 * 1024;

/// Opens and closes the sockets of a worker.
pub struct SocketFactory {
    net: Box<dyn Net>,
    ways: Ways,
    tokens: Pages<Source>,
    udp: UdpDefaults,
    /// The lines of this host, if it has several.
    uplinks: Vec<Uplink>,
    /// What the sockets on each line have carried.
    pub line_bytes: BytesOfLines,
    /// Sockets to close when nothing refers to their buffers any more.
    closing: Vec<LocalId>,
    /// Where services are.
    pub upstreams: Arc<Upstreams>,
    /// The counts of all sockets, those that are closed included.
    pub stats: SocketStats,
    /// Sockets and connections that it opened.
    pub opened: u64,
}

/// The options that all UDP sockets of a worker share.
#[derive(Clone, Copy, Debug)]
struct UdpDefaults {
    buffer_bytes: usize,
    mark: u32,
    gso: bool,
}

impl UdpDefaults {
    fn new(config: &Config) -> Self {
        Self {
            buffer_bytes: config.socket_buffer_bytes(),
            mark: config.transport.mark,
            gso: config.transport.gso,
        }
    }

    fn options(&self, bind: SocketAddr, connect: Option<SocketAddr>, role: UdpRole) -> UdpOptions {
        let Self { buffer_bytes, gso, mark } = *self;
        let mark = match role {
            UdpRole::QuicListen | UdpRole::QuicDial => mark,
            UdpRole::Ingress | UdpRole::Upstream | UdpRole::Decoy => 0,
        };
        UdpOptions { bind, connect, role, buffer_bytes, interface: None, mark, gso }
    }
}

/// The ports of a configuration that all workers open together: `transport.listen`, then `[[udp]]`; `[[tcp]]`.
#[must_use]
pub fn port_plan(config: &Config) -> PortPlan {
    let defaults = UdpDefaults::new(config);
    let options = |role| move |bind: SocketAddr| defaults.options(bind, None, role);
    let listen = config.transport.listen.iter().copied().map(options(UdpRole::QuicListen));
    let ingress = config.udp.iter().filter(|forward| forward.open).map(|forward| forward.listen);
    PortPlan {
        udp: listen.chain(ingress.map(options(UdpRole::Ingress))).collect(),
        tcp: config.tcp.iter().filter(|forward| forward.open).map(|forward| forward.listen).collect(),
    }
}

/// The ports of `config` with these indices in `[[udp]]` and in `[[tcp]]`, which open while the agent runs.
#[must_use]
pub fn more_ports(config: &Config, udp: &[usize], tcp: &[usize]) -> PortPlan {
    let defaults = UdpDefaults::new(config);
    let listen = |forwards: &[Forward], indices: &[usize]| -> Vec<SocketAddr> {
        indices.iter().filter_map(|index| forwards.get(*index)).map(|forward| forward.listen).collect()
    };
    let udp = listen(&config.udp, udp).into_iter();
    PortPlan {
        udp: udp.map(|bind| defaults.options(bind, None, UdpRole::Ingress)).collect(),
        tcp: listen(&config.tcp, tcp),
    }
}

impl SocketFactory {
    /// Gives memory back if there were many more sockets once.
    pub fn shrink(&mut self) {
        self.tokens.shrink();
    }

    /// A factory over `net`, with the socket options of `config`.
    #[must_use]
    pub fn new(net: Box<dyn Net>, config: &Config) -> Self {
        let udp = UdpDefaults::new(config);
        Self {
            ways: net.ways(),
            net,
            tokens: Pages::default(),
            udp,
            uplinks: config.transport.uplinks.clone(),
            line_bytes: BytesOfLines::default(),
            closing: Vec::new(),
            upstreams: Arc::default(),
            stats: SocketStats::default(),
            opened: 0,
        }
    }

    /// The same factory, which finds services as all workers do.
    #[must_use]
    pub fn with_upstreams(self, upstreams: &Arc<Upstreams>) -> Self {
        Self { upstreams: Arc::clone(upstreams), ..self }
    }

    /// What is known of the interfaces on the ways to peers.
    #[must_use]
    pub fn ways(&self) -> &Ways {
        &self.ways
    }

    /// Why no stream could be opened to a peer last, and when; `None` since one was.
    #[must_use]
    pub fn carrier_failure(&self, peer: &str) -> Option<(Instant, Arc<str>)> {
        self.net.carrier_failure(peer)
    }

    /// Takes ports that were bound for this worker, for [`SocketFactory::ingress`] and [`SocketFactory::tcp_listen`].
    pub fn adopt(&mut self, ports: Ports) {
        self.net.adopt(ports);
    }

    /// The source that a token stands for; `None` if that has been closed meanwhile.
    #[must_use]
    pub fn source(&self, token: Token) -> Option<Source> {
        self.tokens.get(token.0 as usize).copied()
    }

    /// Gives a token to a source that has no socket.
    pub fn token(&mut self, source: Source) -> Token {
        // Tokens are bounded by the limits on flows, streams and peers, far below 2^32.
        Token(u32::try_from(self.tokens.insert(source)).unwrap_or(u32::MAX))
    }

    /// Has a token in use stand for another source.
    pub fn turn(&mut self, token: Token, source: Source) {
        if let Some(place) = self.tokens.get_mut(token.0 as usize) {
            *place = source;
        }
    }

    /// The number of tokens in use.
    #[must_use]
    pub fn sources(&self) -> usize {
        self.tokens.len()
    }

    /// Takes a token back, after which it may stand for another source.
    pub fn release(&mut self, token: Token) {
        self.tokens.remove(token.0 as usize);
    }

    /// This worker's queue of the TUN device, if the agent has one.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tun(&mut self) -> io::Result<Option<(Box<dyn TunQueue>, Token)>> {
        let (queue, token) = self.with_token(Source::Tun, |net, token| net.tun(token))?;
        if queue.is_none() {
            self.release(token);
        }
        Ok(queue.map(|queue| (queue, token)))
    }

    /// Listens for peers.
    ///
    /// # Errors
    /// The kernel's.
    pub fn listen(&mut self, underlays: &mut Underlays, address: SocketAddr) -> io::Result<UnderlayId> {
        let options = self.udp.options(address, None, UdpRole::QuicListen);
        self.underlay(underlays, &options)
    }

    /// The lines of this host, by their numbers; none if it has only one.
    #[must_use]
    pub fn uplinks(&self) -> &[Uplink] {
        &self.uplinks
    }

    /// Follows what a reload has changed of the lines.
    pub fn follow_uplinks(&mut self, uplinks: &[Uplink]) {
        self.uplinks = uplinks.to_vec();
    }

    /// A socket for one dialled connection or lane, on this line if the host has several.
    ///
    /// # Errors
    /// The kernel's, e.g. `ENODEV` while the line's interface is not there; `AddrNotAvailable` if the line's source is of another family.
    pub fn dial(
        &mut self,
        underlays: &mut Underlays,
        remote: SocketAddr,
        line: Option<u8>,
    ) -> io::Result<UnderlayId> {
        let options = self.dialling(remote, line)?;
        let id = self.underlay(underlays, &options)?;
        if let Some(underlay) = underlays.get_mut(id) {
            underlay.line = line;
        }
        Ok(id)
    }

    /// A socket for a connection that was dialled at `remote` and goes on at `to`, another port of the same agent.
    ///
    /// # Errors
    /// Those of [`SocketFactory::dial`].
    pub fn dial_as(
        &mut self,
        underlays: &mut Underlays,
        remote: SocketAddr,
        to: SocketAddr,
        line: Option<u8>,
    ) -> io::Result<UnderlayId> {
        if remote == to {
            return self.dial(underlays, remote, line);
        }
        let options = self.dialling(to, line)?;
        let id = underlays.vacant();
        let (socket, token) = self.socket(&options, Source::Underlay(id))?;
        let id = underlays.insert(Box::new(Aliased::new(socket, remote, to)), options.role, token);
        if let Some(underlay) = underlays.get_mut(id) {
            underlay.line = line;
        }
        Ok(id)
    }

    /// The options of a socket that sends to `remote` alone.
    fn dialling(&self, remote: SocketAddr, line: Option<u8>) -> io::Result<UdpOptions> {
        let options = self.udp.options(wildcard_for(remote), Some(remote), UdpRole::QuicDial);
        let Some(uplink) = line.and_then(|line| self.uplinks.get(usize::from(line))) else {
            return Ok(options);
        };
        let bind = match uplink.source {
            Some(source) if source.is_ipv4() != remote.is_ipv4() => {
                return Err(io::ErrorKind::AddrNotAvailable.into());
            }
            Some(source) => SocketAddr::new(source, 0),
            None => options.bind,
        };
        let mark = if uplink.mark == 0 { options.mark } else { uplink.mark };
        Ok(UdpOptions { bind, interface: uplink.interface.clone(), mark, ..options })
    }

    /// Opens a fresh socket in place of a dialled one if packets to `remote` leave from another address than it has, and says
    /// from which to which.
    ///
    /// # Errors
    /// The kernel's, e.g. `NetworkUnreachable`; the old socket stays.
    pub fn redial(
        &mut self,
        underlays: &mut Underlays,
        id: UnderlayId,
        remote: SocketAddr,
    ) -> io::Result<Option<(SocketAddr, SocketAddr)>> {
        let Some(underlay) = underlays.get(id).filter(|underlay| underlay.role == UdpRole::QuicDial) else {
            return Ok(None);
        };
        let from = underlay.socket.local_addr();
        let options = self.dialling(remote, underlay.line)?;
        let Some((socket, token)) = self.renewed(&options, Source::Underlay(id), from)? else {
            return Ok(None);
        };
        let to = socket.local_addr();
        self.put_in_place(underlays, id, socket, token);
        Ok(Some((from, to)))
    }

    /// Opens a fresh socket on another line in place of a dialled one. False if it was not dialled.
    ///
    /// # Errors
    /// Those of [`SocketFactory::dial`]; the old socket stays.
    pub fn change_line(
        &mut self,
        underlays: &mut Underlays,
        id: UnderlayId,
        remote: SocketAddr,
        line: u8,
    ) -> io::Result<bool> {
        if underlays.get(id).is_none_or(|underlay| underlay.role != UdpRole::QuicDial) {
            return Ok(false);
        }
        let options = self.dialling(remote, Some(line))?;
        let (socket, token) = self.socket(&options, Source::Underlay(id))?;
        self.put_in_place(underlays, id, socket, token);
        if let Some(underlay) = underlays.get_mut(id) {
            underlay.line = Some(line);
        }
        Ok(true)
    }

    /// Puts a fresh socket in the place of an old one.
    fn put_in_place(
        &mut self,
        underlays: &mut Underlays,
        id: UnderlayId,
        socket: Box<dyn UdpSocket>,
        token: Token,
    ) {
        let line = underlays.get(id).and_then(|underlay| underlay.line);
        if let Some((old, token, mut booked)) = underlays.replace(id, socket, token) {
            count_line(&mut self.line_bytes, line, &*old, &booked);
            self.stats.book(UdpRole::QuicDial, &*old, &mut booked, true);
            self.release(token);
        }
    }

    /// Closes a socket of the underlay.
    pub fn close_underlay(&mut self, underlays: &mut Underlays, id: UnderlayId) {
        if let Some(mut underlay) = underlays.remove(id) {
            count_line(&mut self.line_bytes, underlay.line, &*underlay.socket, &underlay.booked);
            self.stats.book(underlay.role, &*underlay.socket, &mut underlay.booked, true);
            self.release(underlay.token);
        }
    }

    /// A local port for clients.
    ///
    /// # Errors
    /// The kernel's.
    pub fn ingress(&mut self, locals: &mut Locals, address: SocketAddr, local: Local) -> io::Result<LocalId> {
        let options = self.udp.options(address, None, UdpRole::Ingress);
        self.local(locals, &options, local)
    }

    /// A socket to a service for one flow, which [`Locals::set_flow`] is to name.
    ///
    /// # Errors
    /// The kernel's, e.g. `EAGAIN` when a source address has no port left (28,232 by default); `HostUnreachable` while no address of
    /// the service is known.
    pub fn open_upstream(
        &mut self,
        locals: &mut Locals,
        peer: PeerId,
        upstream: &Upstream,
    ) -> io::Result<LocalId> {
        let upstream = self.udp_upstream(upstream)?;
        let options = self.udp.options(wildcard_for(upstream), Some(upstream), UdpRole::Upstream);
        self.local(locals, &options, Local::Upstream { peer, flow: FlowId(u32::MAX) })
    }

    /// Opens a fresh socket to a service in place of `id`, if packets there leave from another address than it has.
    ///
    /// # Errors
    /// The kernel's; the old socket stays.
    pub fn renew_upstream(
        &mut self,
        locals: &mut Locals,
        id: LocalId,
        upstream: &Upstream,
    ) -> io::Result<bool> {
        let upstream = self.udp_upstream(upstream)?;
        let Some(old) = locals.get_mut(id) else { return Ok(false) };
        let options = self.udp.options(wildcard_for(upstream), Some(upstream), UdpRole::Upstream);
        let from = old.socket.local_addr();
        let Some((fresh, token)) = self.renewed(&options, Source::Local(id), from)? else {
            return Ok(false);
        };
        self.stats.book(UdpRole::Upstream, &*old.socket, &mut old.booked, true);
        old.booked = SocketBooked::default();
        old.socket = fresh;
        let token = std::mem::replace(&mut old.token, token);
        self.release(token);
        Ok(true)
    }

    /// Where the datagrams of a service go.
    fn udp_upstream(&self, upstream: &Upstream) -> io::Result<SocketAddr> {
        self.upstreams.udp(upstream).ok_or_else(|| self.upstreams.unknown(upstream))
    }

    /// A socket to the decoy for one unauthenticated sender, with its token, which must be released with it.
    ///
    /// # Errors
    /// The kernel's, e.g. `EMFILE` when the process has no descriptor left.
    pub fn open_decoy(&mut self, decoy: SocketAddr, id: DecoyId) -> io::Result<(Box<dyn UdpSocket>, Token)> {
        let options = self.udp.options(wildcard_for(decoy), Some(decoy), UdpRole::Decoy);
        let options = UdpOptions { buffer_bytes: DECOY_BUFFER_BYTES, ..options };
        self.socket(&options, Source::Decoy(id))
    }

    /// Closes a local socket at the end of the batch.
    pub fn close_later(&mut self, id: LocalId) {
        self.closing.push(id);
    }

    /// Closes the socket of a flow that has ended at the end of the batch, if it had one of its own.
    pub fn close_flow_later(&mut self, origin: Origin) {
        if let Origin::Upstream { socket, .. } = origin {
            self.close_later(socket);
        }
    }

    /// Closes what [`SocketFactory::close_later`] noted. Nothing may wait for delivery on it.
    pub fn close_now(&mut self, locals: &mut Locals) {
        while let Some(id) = self.closing.pop() {
            if let Some(mut socket) = locals.remove(id) {
                self.stats.book(socket_stats::role(&socket.local), &*socket.socket, &mut socket.booked, true);
                self.release(socket.token);
            }
        }
    }

    /// Listens for TCP connections to the forward `index` of the configuration's `[[tcp]]` list.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tcp_listen(
        &mut self,
        address: SocketAddr,
        index: usize,
    ) -> io::Result<(Box<dyn TcpListener>, Token)> {
        self.with_token(Source::Listener(index), |net, token| net.tcp_listen(address, token))
    }

    /// Starts a connection to a service; its token must be released with it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tcp_connect(&mut self, place: &Place, id: TcpId) -> io::Result<(Box<dyn TcpStream>, Token)> {
        self.opened += 1;
        self.with_token(Source::Tcp(id), |net, token| match place {
            Place::Address(address) => net.tcp_connect(*address, token),
            Place::Unix(path) => net.unix_connect(path, token),
        })
    }

    /// Starts to look up a peer's endpoint.
    pub fn resolve(&mut self, host: &str, port: u16, token: Token) {
        self.net.resolve(host, port, token);
    }

    /// Returns the answer to [`SocketFactory::resolve`], once there is one.
    pub fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>> {
        self.net.resolved(token)
    }

    fn underlay(&mut self, underlays: &mut Underlays, options: &UdpOptions) -> io::Result<UnderlayId> {
        let (id, role) = (underlays.vacant(), options.role);
        let (socket, token) = self.socket(options, Source::Underlay(id))?;
        Ok(underlays.insert(socket, role, token))
    }

    fn local(&mut self, locals: &mut Locals, options: &UdpOptions, local: Local) -> io::Result<LocalId> {
        let id = locals.vacant();
        let (socket, token) = self.socket(options, Source::Local(id))?;
        Ok(locals.insert(socket, local, token))
    }

    /// A fresh socket for `source`, unless it has the same address as the old one, `from`.
    fn renewed(
        &mut self,
        options: &UdpOptions,
        source: Source,
        from: SocketAddr,
    ) -> io::Result<Option<(Box<dyn UdpSocket>, Token)>> {
        let (socket, token) = self.socket(options, source)?;
        if socket.local_addr().ip() != from.ip() {
            return Ok(Some((socket, token)));
        }
        drop(socket);
        self.release(token);
        Ok(None)
    }

    fn socket(&mut self, options: &UdpOptions, source: Source) -> io::Result<(Box<dyn UdpSocket>, Token)> {
        self.opened += 1;
        self.with_token(source, |net, token| net.udp(options, token))
    }

    /// Opens something under a token for `source`, which is released again on an error.
    fn with_token<T>(
        &mut self,
        source: Source,
        open: impl FnOnce(&mut dyn Net, Token) -> io::Result<T>,
    ) -> io::Result<(T, Token)> {
        let token = self.token(source);
        let opened = open(&mut *self.net, token).inspect_err(|_| self.release(token))?;
        Ok((opened, token))
    }
}

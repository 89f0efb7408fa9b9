//! Opening what a user asks for: names are looked up here, off the packet path, and addresses are checked after that.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    time::Duration,
};

use config::{
    Target as Upstreams,
    leads_back::{self, OwnListeners},
};
use net::{ports, process};
use tokio::{
    net::{TcpSocket, TcpStream, UdpSocket},
    time::timeout,
};

use crate::{
    Access, Grant, Reachable,
    account::Refusal,
    policy::Transport,
    target::{Host, Target},
};

/// How long one address may take to accept a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Addresses of a name that are tried.
const MOST_ADDRESSES: usize = 4;

/// What was opened for a user, and for what.
pub struct Open<S> {
    /// The socket.
    pub socket: S,
    /// Where it leads.
    pub address: SocketAddr,
}

impl Grant {
    /// Opens a TCP connection to what a user asks for.
    ///
    /// # Errors
    ///
    /// Why not; it is not counted yet.
    pub async fn open_tcp(&self, target: &Target) -> Result<Open<TcpStream>, Refusal> {
        let mut refusal = Refusal::Unreachable;
        for address in self.addresses(target, Transport::Tcp).await? {
            match timeout(CONNECT_WITHIN, connect(address)).await {
                Ok(Ok(socket)) => {
                    // What a client sends at once is to arrive at once.
                    let _best_effort = socket.set_nodelay(true);
                    return Ok(Open { socket, address });
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    refusal = Refusal::Refused
                }
                Ok(Err(_)) => refusal = Refusal::Unreachable,
                Err(_) => refusal = Refusal::Timeout,
            }
        }
        Err(refusal)
    }

    /// Opens a UDP socket that leads to what a user asks for, and takes datagrams from there alone.
    ///
    /// # Errors
    ///
    /// As those of [`Grant::open_tcp`].
    pub async fn open_udp(&self, target: &Target) -> Result<Open<UdpSocket>, Refusal> {
        let open = async |address: SocketAddr| {
            let own: IpAddr =
                if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            let socket = UdpSocket::bind((own, 0)).await?;
            process::leaves_descriptors(socket.as_fd())?;
            socket.connect(address).await?;
            io::Result::Ok(socket)
        };
        for address in self.addresses(target, Transport::Udp).await? {
            if let Ok(socket) = open(address).await {
                return Ok(Open { socket, address });
            }
        }
        Err(Refusal::Unreachable)
    }

    /// Ready when what was opened for `target`, which leads to `address`, has to end: the user is removed, shut out or has expired, has
    /// another password, or may not reach it any more. `unix_seconds` reads the clock.
    pub async fn over(
        &self,
        target: &Target,
        transport: Transport,
        address: SocketAddr,
        unix_seconds: impl Fn() -> u64,
    ) {
        let mut access = self.access.clone();
        loop {
            let left = {
                let current = access.borrow_and_update();
                let now = unix_seconds();
                let may_go_on = !current.is_over(now)
                    && current.takes(&self.proof)
                    && current.still_leads_to(target, transport, address);
                if !may_go_on {
                    return;
                }
                // Clocks are set: the time is looked at once a minute.
                current.expires.map(|at| Duration::from_secs((at - now).min(60)))
            };
            let changed = match left {
                Some(left) => timeout(left, access.changed()).await.unwrap_or(Ok(())),
                None => access.changed().await,
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// The addresses to try for `target`, each of which the user may reach.
    async fn addresses(&self, target: &Target, transport: Transport) -> Result<Vec<SocketAddr>, Refusal> {
        // Nothing is held while a name is looked up.
        let access = std::sync::Arc::clone(&self.access.borrow());
        let found = match &target.host {
            Host::Address(address) => vec![*address],
            Host::Name(name) if access.has_service(name) => {
                let service = access.service(name, transport).ok_or(Refusal::Service)?;
                return self.service_addresses(service, &access.own, transport).await;
            }
            // Who may reach no network has no use for an answer.
            Host::Name(_) if access.networks.is_empty() => return Err(Refusal::Network),
            Host::Name(name) => self.look_up(name, target.port).await?,
        };
        let (mut refusal, mut allowed) = (Refusal::Resolve, Vec::new());
        for address in found {
            let with_port = SocketAddr::new(address, target.port);
            let is_own = access.is_own(transport, with_port);
            match access.policy.may_reach(&access.networks, transport, address, target.port, is_own) {
                Ok(()) => allowed.push(with_port),
                Err(reason) => refusal = reason,
            }
        }
        allowed.truncate(MOST_ADDRESSES);
        if allowed.is_empty() { Err(refusal) } else { Ok(allowed) }
    }

    pub(crate) async fn look_up(&self, name: &str, port: u16) -> Result<Vec<IpAddr>, Refusal> {
        self.together.lookups.look_up(&self.account.lookups, name, port).await
    }

    /// The addresses of a service to try. A name is followed where it may be for peers, and not to `own`.
    async fn service_addresses(
        &self,
        service: &Reachable,
        own: &OwnListeners,
        transport: Transport,
    ) -> Result<Vec<SocketAddr>, Refusal> {
        let (mut refusal, mut found) = (Refusal::Unreachable, Vec::new());
        for upstream in service.upstream.targets() {
            match upstream {
                Upstreams::Address(address) => found.push(*address),
                Upstreams::Name(name) => match self.look_up(&name.host, name.port).await {
                    Ok(addresses) => {
                        let addresses = addresses.into_iter();
                        let addresses =
                            addresses.map(|address| SocketAddr::new(address.to_canonical(), name.port));
                        found.extend(addresses.filter(|address| {
                            let is_followed = leads_back::not_followed(&name.host, address.ip()).is_none();
                            is_followed && !leads_back(own, transport, *address)
                        }));
                    }
                    Err(reason) => refusal = reason,
                },
                // Peers' forwards alone lead there.
                Upstreams::Unix(_) => {}
            }
        }
        found.truncate(MOST_ADDRESSES);
        if found.is_empty() { Err(refusal) } else { Ok(found) }
    }
}

/// Connects to `address`, unless peers and operators need the last descriptors.
async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    process::leaves_descriptors(socket.as_fd())?;
    socket.connect(address).await
}

/// Whether what is opened to `address` arrives at the agent itself.
fn leads_back(own: &OwnListeners, transport: Transport, address: SocketAddr) -> bool {
    let address = SocketAddr::new(address.ip().to_canonical(), address.port());
    let listener = match transport {
        Transport::Tcp => own.tcp_at(address),
        Transport::Udp => own.udp_at(address),
    };
    listener.is_some()
}

impl Access {
    /// Whether an address is one of this host, or the agent listens there: one at which every address of a loopback prefix arrives.
    fn is_own(&self, transport: Transport, address: SocketAddr) -> bool {
        leads_back(&self.own, transport, address) || ports::is_own(address)
    }

    /// Whether `name` is that of a service; one with a dot is a name like any other.
    fn has_service(&self, name: &str) -> bool {
        !name.contains('.') && self.names.iter().any(|service| service.eq_ignore_ascii_case(name))
    }

    fn service(&self, name: &str, transport: Transport) -> Option<&Reachable> {
        let service = self.services.iter().find(|service| service.name.eq_ignore_ascii_case(name))?;
        let serves = match transport {
            Transport::Tcp => service.tcp,
            Transport::Udp => service.udp,
        };
        serves.then_some(service)
    }

    /// Whether what leads to `address` may go on: what was looked up is not looked up again.
    fn still_leads_to(&self, target: &Target, transport: Transport, address: SocketAddr) -> bool {
        match &target.host {
            Host::Name(name) if self.has_service(name) => {
                self.service(name, transport).is_some_and(|service| service.may_be_at(address))
            }
            Host::Name(_) | Host::Address(_) => {
                let is_own = self.is_own(transport, address);
                self.policy.may_reach(&self.networks, transport, address.ip(), address.port(), is_own).is_ok()
            }
        }
    }
}

impl Reachable {
    /// Whether what leads to `address` may go on: a name is not looked up again.
    fn may_be_at(&self, address: SocketAddr) -> bool {
        self.upstream.targets().any(|upstream| match upstream {
            Upstreams::Address(one) => *one == address,
            Upstreams::Name(name) => name.port == address.port(),
            Upstreams::Unix(_) => false,
        })
    }
}

//! What the options mean together, completed by what the host knows. Nothing here asks the host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use gate::identity::{EndpointError, ShareLink, ShareLinkError};
use ip::routes::is_default_like;
use ipnet::IpNet;

use super::{
    host::Facts,
    options::{Init, Pair, Role},
};
use crate::cli::reach::DEFAULT_CONFIG;

/// What the configuration will say; texts are checked with the whole of it.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) role: Role,
    /// The addresses at which the exit listens.
    pub(super) listen: Vec<String>,
    /// Where entries find it, as "host:port".
    pub(super) advertise: Option<String>,
    /// The number of the exit in its fleet.
    pub(super) server_id: Option<u8>,
    /// The link of the exit that an entry dials.
    pub(super) peer: Option<ShareLink>,
    /// The file with the preshared key of both ends.
    pub(super) preshared_key_file: Option<String>,
    /// The `allowed_ips` of the exit that an entry dials.
    pub(super) allowed_ips: Vec<String>,
    /// The networks behind this host.
    pub(super) networks: Vec<IpNet>,
    pub(super) services: Vec<Pair>,
    pub(super) udp: Vec<Pair>,
    pub(super) tcp: Vec<Pair>,
    pub(super) tun: Vec<String>,
    /// Whether a prefix needs routes of their own, for which the tunnel's own packets are marked.
    pub(super) mark: bool,
    /// Whether state and control socket are beside the configuration: it is not the host's own agent.
    pub(super) apart: bool,
    /// The notes that the operator should read.
    pub(super) notes: Vec<String>,
}

/// Which options do not go together.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlanError {
    #[error("an entry dials an exit (remedy: --peer LINK, as culvert init or culvert link prints it there)")]
    NoPeer,
    #[error(
        "an entry carries something (remedy: --tun for IP packets, or --udp or --tcp for a service of the exit)"
    )]
    NothingToCarry,
    #[error(
        "an exit offers something (remedy: --tun for IP packets, or --service NAME=ADDR for a UDP or TCP service)"
    )]
    NothingToOffer,
    #[error("{option} is of an {role} (remedy: leave it out, or add it to the configuration afterwards)")]
    OtherRole { option: &'static str, role: &'static str },
    #[error("{0} is for IP packets (remedy: add --tun)")]
    NoTunnel(&'static str),
    #[error("--network {0} is no prefix (remedy: write one as in 10.2.0.0/16)")]
    NotANetwork(String),
    #[error("--network {0} is a default route (remedy: the network itself, as in 10.2.0.0/16)")]
    DefaultNetwork(IpNet),
    #[error("--network {network} meets {other}, which is not behind this host alone (remedy: {remedy})")]
    NotBehind { network: IpNet, other: IpNet, remedy: &'static str },
    #[error("--peer is no link: {0} (remedy: copy what culvert init or culvert link prints at the exit)")]
    Link(ShareLinkError),
    #[error("--advertise: {0} (remedy: write host:port, as in gw.example.net:4433)")]
    Advertise(EndpointError),
    #[error("port 0 changes with each start, so that nobody finds this host (remedy: --listen with a port)")]
    AnyPort,
    #[error("--tun {address}: its prefix has no address for the other end (remedy: {})", room(*address, *role))]
    NoRoom { address: IpNet, role: Role },
    #[error("this host has no route to the Internet that shows its address (remedy: --advertise HOST:PORT)")]
    NoAddress,
}

/// The port of an exit; free in IANA's registry, and below the ports that Linux gives to clients.
const PORT: u16 = 4433;

impl Plan {
    /// Checks that `options` go together, and fills in what they leave out.
    pub(super) fn new(options: &Init, facts: &Facts) -> Result<Self, PlanError> {
        let role = options.role;
        let allowed = |unused: bool, option, role| match unused {
            true => Ok(()),
            false => Err(PlanError::OtherRole { option, role }),
        };
        let mut plan = Self {
            role,
            listen: Vec::new(),
            advertise: None,
            server_id: options.server_id,
            peer: None,
            preshared_key_file: options.preshared_key_file.clone(),
            allowed_ips: Vec::new(),
            networks: networks(options)?,
            services: options.services.clone(),
            udp: options.udp.clone(),
            tcp: options.tcp.clone(),
            tun: tunnel(role, &options.tun),
            mark: false,
            apart: options.config.as_os_str() != DEFAULT_CONFIG,
            notes: Vec::new(),
        };
        if plan.tun.is_empty() && !plan.networks.is_empty() {
            return Err(PlanError::NoTunnel("--network"));
        }
        plan.networks_are_ours(&options.allowed_ips)?;
        // What cannot be read is reported with the configuration.
        let mut addresses = plan.tun.iter().filter_map(|text| text.parse::<IpNet>().ok());
        let alone = addresses.find(|address| neighbour(*address).is_none());
        let led = role == Role::Entry && !options.allowed_ips.is_empty();
        if let Some(address) = alone.filter(|_| !led) {
            return Err(PlanError::NoRoom { address, role });
        }
        match role {
            Role::Exit => {
                allowed(options.peer.is_none(), "--peer", "entry")?;
                allowed(options.preshared_key_file.is_none(), "--preshared-key-file", "entry")?;
                allowed(options.udp.is_empty(), "--udp", "entry")?;
                allowed(options.tcp.is_empty(), "--tcp", "entry")?;
                allowed(options.allowed_ips.is_empty(), "--allowed-ip", "entry")?;
                if plan.tun.is_empty() && plan.services.is_empty() {
                    return Err(PlanError::NothingToOffer);
                }
                plan.listen = listen(&options.listen, facts);
                plan.find_address(options.advertise.as_deref(), facts)?;
            }
            Role::Entry => {
                allowed(options.services.is_empty(), "--service", "exit")?;
                allowed(options.listen.is_empty(), "--listen", "exit")?;
                allowed(options.advertise.is_none(), "--advertise", "exit")?;
                allowed(options.server_id.is_none(), "--server-id", "exit")?;
                let link = options.peer.as_deref().ok_or(PlanError::NoPeer)?;
                plan.peer = Some(link.parse().map_err(PlanError::Link)?);
                match (plan.tun.is_empty(), options.allowed_ips.is_empty()) {
                    (true, false) => return Err(PlanError::NoTunnel("--allowed-ip")),
                    (true, true) if plan.udp.is_empty() && plan.tcp.is_empty() => {
                        return Err(PlanError::NothingToCarry);
                    }
                    (true, true) => {}
                    (false, _) => plan.lead(&options.allowed_ips),
                }
            }
        }
        Ok(plan)
    }

    /// Checks that the networks behind this host are neither in the tunnel nor behind the exit.
    fn networks_are_ours(&self, allowed_ips: &[String]) -> Result<(), PlanError> {
        // What cannot be read is reported with the configuration.
        let read = |text: &String| text.parse::<IpNet>().ok().map(|net| net.trunc());
        let link = self.tun.iter().filter_map(read).map(|net| (net, "another --tun, at both ends"));
        let theirs = allowed_ips.iter().filter_map(read).filter(|net| !is_default_like(net));
        let theirs = theirs.map(|net| (net, "leave one of the two out"));
        for (other, remedy) in link.chain(theirs) {
            let meets = |network: &&IpNet| network.contains(&other) || other.contains(*network);
            if let Some(network) = self.networks.iter().find(meets) {
                return Err(PlanError::NotBehind { network: *network, other, remedy });
            }
        }
        Ok(())
    }

    /// Leads the link of the tunnel, and what the operator says is behind it, to the exit.
    fn lead(&mut self, more: &[String]) {
        // An address that cannot be read is reported with the configuration.
        let links = self.tun.iter().filter_map(|text| text.parse::<IpNet>().ok());
        let links = links.filter(|net| net.prefix_len() < net.max_prefix_len());
        self.allowed_ips = links.map(|net| net.trunc().to_string()).chain(more.iter().cloned()).collect();
        let default_like = |text: &String| text.parse::<IpNet>().is_ok_and(|net| is_default_like(&net));
        self.mark = self.allowed_ips.iter().any(default_like);
    }

    /// Decides which address of the exit the link names.
    fn find_address(&mut self, advertise: Option<&str>, facts: &Facts) -> Result<(), PlanError> {
        if let Some(text) = advertise {
            let endpoint: gate::identity::Endpoint = text.parse().map_err(PlanError::Advertise)?;
            self.advertise = Some(endpoint.to_string());
            return Ok(());
        }
        // Addresses that cannot be read are reported with the configuration.
        let listen: Vec<SocketAddr> = self.listen.iter().filter_map(|text| text.parse().ok()).collect();
        if listen.len() < self.listen.len() {
            return Ok(());
        }
        if listen.iter().any(|address| address.port() == 0) {
            return Err(PlanError::AnyPort);
        }
        if let Some(address) = listen.iter().find(|address| !address.ip().is_unspecified()) {
            self.advertise = Some(address.to_string());
            return Ok(());
        }
        let at = |address: &IpAddr| {
            let listening = listen.iter().find(|listening| listening.is_ipv4() == address.is_ipv4());
            listening.map(|listening| SocketAddr::new(*address, listening.port()))
        };
        let mut candidates: Vec<SocketAddr> = facts.outer.iter().filter_map(at).collect();
        // Those that everybody can dial first; the sort keeps IPv4 before IPv6.
        candidates.sort_by_key(|address| !is_public(address.ip()));
        let first = candidates.first().ok_or(PlanError::NoAddress)?;
        if !is_public(first.ip()) {
            self.notes.push(format!(
                "{} is an address of a private network: if entries come from elsewhere, set transport.advertise to where they \
                 find this host, and culvert link prints its link again",
                first.ip()
            ));
        }
        self.advertise = Some(first.to_string());
        Ok(())
    }
}

/// What gives the other end an address.
fn room(address: IpNet, role: Role) -> String {
    let length = if address.addr().is_ipv4() { 24 } else { 64 };
    let whole = format!("--tun {}/{length}", address.addr());
    match role {
        Role::Exit => whole,
        Role::Entry => format!("{whole}, or --allowed-ip with the exit's address as well"),
    }
}

/// An address for the other end of the link of `address`: the next one, else the first.
pub(in crate::cli) fn neighbour(address: IpNet) -> Option<IpNet> {
    let after = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.to_bits().checked_add(1).map(|bits| IpAddr::from(Ipv4Addr::from(bits))),
        IpAddr::V6(v6) => v6.to_bits().checked_add(1).map(|bits| IpAddr::from(Ipv6Addr::from(bits))),
    };
    // A link of two addresses has neither a network nor a broadcast address (RFC 3021, RFC 6164).
    let pair = address.prefix_len() + 1 == address.max_prefix_len();
    let usable = |other: &IpAddr| {
        let broadcast = other.is_ipv4() && *other == address.broadcast() && !pair;
        address.contains(other) && *other != address.addr() && !broadcast
    };
    let first = if pair { Some(address.network()) } else { after(address.network()) };
    let mut candidates = [after(address.addr()), first].into_iter().flatten();
    candidates.find(usable).and_then(|other| IpNet::new(other, address.prefix_len()).ok())
}

fn listen(options: &[String], facts: &Facts) -> Vec<String> {
    match options {
        [] if facts.ipv6 => vec![format!("0.0.0.0:{PORT}"), format!("[::]:{PORT}")],
        [] => vec![format!("0.0.0.0:{PORT}")],
        [_, ..] => options.to_vec(),
    }
}

/// The networks behind this host, as prefixes without host bits.
fn networks(options: &Init) -> Result<Vec<IpNet>, PlanError> {
    let network = |text: &String| match text.parse::<IpNet>() {
        Ok(net) if is_default_like(&net) => Err(PlanError::DefaultNetwork(net)),
        Ok(net) => Ok(net.trunc()),
        Err(_) => Err(PlanError::NotANetwork(text.clone())),
    };
    options.networks.iter().map(network).collect()
}

fn tunnel(role: Role, options: &[String]) -> Vec<String> {
    let default = match role {
        Role::Exit => "10.9.0.1/24",
        Role::Entry => "10.9.0.2/24",
    };
    let given = options.iter().filter(|text| !text.is_empty()).cloned();
    let missing = options.iter().any(String::is_empty).then(|| default.to_owned());
    missing.into_iter().chain(given).collect()
}

/// Whether hosts of other networks can dial it; RFC 1918, 6598, 3927, 4193 and 4291 say which they cannot.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let shared = v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64;
            !(v4.is_private() || v4.is_link_local() || v4.is_loopback() || shared)
        }
        IpAddr::V6(v6) => !(v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_loopback()),
    }
}

//! What follows from a file of WireGuard, on this host.

use std::{
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use ip::routes::is_default_like;
use ipnet::IpNet;

use super::file::{self, WireGuard};
use crate::cli::reach::DEFAULT_CONFIG;

/// The port of a host that listened at one of the kernel's choice: that of WireGuard's documents.
const USUAL_PORT: u16 = 51_820;

/// The configuration of this host, what an operator should know, and what the peers are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) listen: Vec<String>,
    /// Where the peers find this host, if it listens.
    pub(super) advertise: Option<String>,
    mark: Option<u32>,
    pub(super) addresses: Vec<IpNet>,
    mtu: Option<u16>,
    sets_routes: bool,
    /// Whether state and control socket are beside the configuration: it is not the host's own agent.
    apart: bool,
    pub(super) peers: Vec<Peer>,
    pub(super) notes: Vec<String>,
}

/// A peer of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub(super) name: String,
    /// Where it listens, if this host dials it.
    pub(super) dialled_at: Option<String>,
    /// Its own addresses in the tunnel, each with the prefix of its link.
    pub(super) addresses: Vec<IpNet>,
    /// The networks behind it.
    pub(super) networks: Vec<IpNet>,
    /// All that is led to it from here.
    pub(super) allowed_ips: Vec<IpNet>,
    /// The file of the preshared key here, and the key.
    pub(super) preshared: Option<(PathBuf, String)>,
}

impl Plan {
    /// The plan for a configuration at `out`; `None`: where a package has it.
    pub(super) fn new(file: &WireGuard, out: Option<&Path>) -> Self {
        let config = out.unwrap_or_else(|| Path::new(DEFAULT_CONFIG));
        let folder = std::path::absolute(config).unwrap_or_else(|_| config.to_owned());
        let folder = folder.parent().unwrap_or_else(|| Path::new("/")).to_owned();
        let undialled = file.peers.iter().any(|peer| peer.endpoint.is_none());
        let listens = file.listen_port.is_some() || undialled || file.peers.is_empty();
        let port = file.listen_port.unwrap_or(USUAL_PORT);
        let mut peers: Vec<Peer> = Vec::new();
        for peer in &file.peers {
            let name = free_name(peer, &peers);
            let preshared = peer.preshared_key.clone().map(|key| (folder.join(format!("{name}.psk")), key));
            let dialled_at = peer.endpoint.clone().filter(|_| !listens);
            peers.push(Peer { dialled_at, preshared, ..of_peer(peer, name, &file.addresses) });
        }
        let needs_mark = peers.iter().flat_map(|peer| &peer.allowed_ips).any(is_default_like);
        let listen = [format!("0.0.0.0:{port}"), format!("[::]:{port}")];
        let mut plan = Self {
            listen: if listens { listen.into() } else { Vec::new() },
            advertise: None,
            mark: file.mark.or_else(|| needs_mark.then_some(USUAL_PORT.into())),
            addresses: file.addresses.clone(),
            mtu: file.mtu,
            sets_routes: file.table.as_deref() != Some("off"),
            apart: out.is_some_and(|out| out.as_os_str() != DEFAULT_CONFIG),
            peers,
            notes: Vec::new(),
        };
        plan.notes = notes(file, &plan);
        plan
    }

    /// The files of the preshared keys here, with what is in them.
    pub(super) fn preshared_files(&self) -> Vec<(PathBuf, String)> {
        self.peers.iter().filter_map(|peer| peer.preshared.clone()).collect()
    }

    /// The configuration as a file.
    pub(super) fn to_toml(&self, source: &str) -> String {
        let list = |texts: &[String]| {
            let quoted: Vec<String> =
                texts.iter().map(|text| toml::Value::from(&**text).to_string()).collect();
            format!("[{}]", quoted.join(", "))
        };
        let mut text = format!(
            "# From {} by culvert import wg; yours to change. All keys: man culvert.toml.\n\
             # Peers are added with culvert peer add, which the daemon keeps in its state folder.\n\n\
             [identity]\n# Our private key. Relative paths start at the folder of this file.\nkey_file = \"identity.key\"\n",
            source.escape_debug()
        );
        if self.apart {
            text += "state_dir = \"state\"\n";
        }
        // Writing to a String cannot fail.
        text += "\n[transport]\n";
        if self.listen.is_empty() {
            text += "# No ListenPort: the kernel chooses one, and this agent dials its peers.\nlisten = [\"0.0.0.0:0\"]\n";
        } else {
            writeln!(
                text,
                "# ListenPort. Open the port in the firewall: UDP.\nlisten = {}",
                list(&self.listen)
            )
            .ok();
        }
        if let Some(advertise) = &self.advertise {
            let quoted = toml::Value::from(&**advertise);
            writeln!(
                text,
                "# What culvert link prints: where the peers find this host.\nadvertise = {quoted}"
            )
            .ok();
        }
        if let Some(mark) = self.mark {
            writeln!(text, "# FwMark, or for a default route into the tunnel.\nmark = {mark}").ok();
        }
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        writeln!(text, "\n[tun]\n# Address.\naddress = {}", list(&addresses)).ok();
        if let Some(mtu) = self.mtu {
            writeln!(text, "# MTU was {mtu}. The agent finds what the path carries; a number only limits it.\n# mtu = {mtu}").ok();
        }
        if !self.sets_routes {
            text += "# Table = off.\nroutes = false\n";
        }
        if self.apart {
            text += "\n[control]\n# Where culvert peer, status and reload reach the daemon.\nsocket = \"culvert.sock\"\n";
        }
        text
    }
}

/// The name of a peer that none of the others has.
fn free_name(peer: &file::Peer, others: &[Peer]) -> String {
    let address = peer.allowed_ips.first().map(|net| net.addr().to_string().replace(':', "-"));
    let name = peer.name.clone().or_else(|| address.map(|address| format!("peer-{address}")));
    let name = name.unwrap_or_else(|| "peer".to_owned());
    let taken = |name: &String| others.iter().any(|other| other.name == *name);
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(name)
}

/// Tells the addresses of a peer from the networks behind it. `ours` are those of this host.
fn of_peer(peer: &file::Peer, name: String, ours: &[IpNet]) -> Peer {
    let single = |net: &&IpNet| net.prefix_len() == net.max_prefix_len();
    let link_of = |address: IpAddr| ours.iter().find(|link| link.contains(&address));
    let (mut addresses, mut networks) = (Vec::<IpNet>::new(), Vec::new());
    let in_link = peer.allowed_ips.iter().filter(single).any(|net| link_of(net.addr()).is_some());
    for net in &peer.allowed_ips {
        let link = link_of(net.addr());
        let first = addresses.iter().all(|known| known.addr().is_ipv4() != net.addr().is_ipv4());
        if single(&net) && first && (link.is_some() || !in_link) {
            let length = match link {
                Some(link) => link.prefix_len(),
                None => net.max_prefix_len(),
            };
            addresses.extend(IpNet::new(net.addr(), length).ok());
        } else if !is_default_like(net) && !ours.iter().any(|link| link.trunc() == *net) {
            networks.push(*net);
        }
    }
    Peer {
        name,
        dialled_at: None,
        addresses,
        networks,
        allowed_ips: peer.allowed_ips.clone(),
        preshared: None,
    }
}

/// What does not carry over, or is decided otherwise.
fn notes(file: &WireGuard, plan: &Plan) -> Vec<String> {
    let mut notes = vec![
        "keys do not carry over (WireGuard's are X25519, Culvert's Ed25519): each host makes one of its own"
            .to_owned(),
        "both use the same port and prefixes: wg-quick down it before the agent starts".to_owned(),
    ];
    if !plan.listen.is_empty() {
        let dialled: Vec<&str> = file
            .peers
            .iter()
            .zip(&plan.peers)
            .filter(|(peer, _)| peer.endpoint.is_some())
            .map(|(_, peer)| &*peer.name)
            .collect();
        if file.listen_port.is_none() {
            notes.push(format!(
                "no ListenPort, and a peer without Endpoint: one of the two has to listen; it is this host, at port {USUAL_PORT}"
            ));
        }
        if !dialled.is_empty() {
            notes.push(format!(
                "one end listens and the other dials: this host listens for {}, though Endpoint is known; where it cannot be \
                 reached, set its link as peer there the other way round",
                dialled.join(", ")
            ));
        }
    }
    if !file.dns.is_empty() {
        notes.push(format!(
            "DNS = {}: not set by culvert; a script of tun.up may, as with resolvectl dns culvert0 {}",
            file.dns.join(", "),
            file.dns.join(" ")
        ));
    }
    match file.table.as_deref() {
        None | Some("auto" | "off") => {}
        Some(table) => notes.push(format!(
            "Table = {table}: there is no choice of a table; tun.routes = false, and routes of your own (docs/operations.md)"
        )),
    }
    for (key, command) in &file.hooks {
        let hook = if key.to_ascii_lowercase().ends_with("up") { "up" } else { "down" };
        let words = ["/bin/sh", "-c", command].map(|word| toml::Value::from(word).to_string()).join(", ");
        notes.push(format!(
            "{key}: tun.{hook} = [{words}], with %i written as culvert0; in the service it is not root (docs/operations.md, \"Hooks\")"
        ));
    }
    if file.saves {
        notes.push(
            "SaveConfig: culvert peer add, set and remove keep what they do in the state file".to_owned(),
        );
    }
    if file.peers.iter().any(|peer| peer.keepalive) {
        notes.push("PersistentKeepalive: keepalive is on by default".to_owned());
    }
    for (line, key) in &file.unknown {
        notes.push(format!("line {line}: {key} is not a key that is known here, and was left out"));
    }
    let default = |peer: &&Peer| peer.allowed_ips.iter().any(is_default_like);
    for peer in plan.peers.iter().filter(default) {
        notes.push(format!(
            "all traffic goes to {}: it has to forward and translate (docs/operations.md, \"All traffic through a peer\")",
            peer.name
        ));
    }
    if plan.peers.iter().any(|peer| peer.dialled_at.is_none()) {
        notes.push(
            "networks behind this host, or behind other peers, that a peer is to reach: --allowed-ip in its culvert init, as AllowedIPs \
             has them there"
                .to_owned(),
        );
    }
    notes
}

/// The host and the port of an address to listen at, for an endpoint.
pub(super) fn port_of(endpoint: &str) -> Option<u16> {
    let port = endpoint.rsplit_once(':').map(|(_, port)| port)?;
    port.parse().ok().or_else(|| endpoint.parse::<SocketAddr>().ok().map(|address| address.port()))
}

//! What is typed at the hosts of the peers, and here. Commands stand on lines of their own, after four spaces.

use std::{fmt::Write as _, path::Path};

use gate::identity::{PublicKey, ShareLink};
use ipnet::IpNet;

use super::plan::{Peer, Plan, port_of};
use crate::cli::{
    init::beside::{neighbour, shell_word},
    reach::DEFAULT_CONFIG,
};

/// What the commands name of this host.
pub(super) struct Names<'a> {
    /// Its key; `None` before it has one.
    pub(super) key: Option<PublicKey>,
    /// Its configuration; `None`: it was not written.
    pub(super) config: Option<&'a Path>,
    /// Its name, as a peer may be called.
    pub(super) host: String,
}

/// The file of the preshared key at the host of a peer.
const THEIR_PSK: &str = "/etc/culvert/hub.psk";

/// The notes, and the commands for each peer.
pub(super) fn commands(plan: &Plan, names: &Names<'_>) -> String {
    let mut text = String::new();
    for note in &plan.notes {
        // Writing to a String cannot fail.
        writeln!(text, "note: {note}").ok();
    }
    let config = names.config.filter(|config| config.as_os_str() != DEFAULT_CONFIG);
    let option = config
        .map_or_else(String::new, |config| format!(" --config {}", shell_word(&config.to_string_lossy())));
    if names.config.is_none() {
        text += "\nLINK and KEY of this host, once there is a key (--out FILE writes one, and completes the commands):\n    \
                 culvert link\n    culvert pubkey /etc/culvert/identity.key\n";
    }
    writeln!(text, "\nHere:\n    culvert run --config {}", run_config(names)).ok();
    for peer in &plan.peers {
        let lines = match &peer.dialled_at {
            None => of_dialler(plan, peer, names, &option),
            Some(endpoint) => of_listener(plan, peer, endpoint, names, &option),
        };
        writeln!(text, "\n{}:", peer.name).ok();
        text += &lines;
    }
    text
}

fn run_config(names: &Names<'_>) -> String {
    shell_word(&names.config.unwrap_or_else(|| Path::new(DEFAULT_CONFIG)).to_string_lossy())
}

fn list(option: &str, values: &[IpNet]) -> String {
    values.iter().map(|value| format!(" --{option} {value}")).collect()
}

/// A peer that dials this host.
fn of_dialler(plan: &Plan, peer: &Peer, names: &Names<'_>, option: &str) -> String {
    let link = names
        .key
        .zip(plan.advertise.as_ref())
        .and_then(|(key, advertise)| Some(ShareLink { endpoint: advertise.parse().ok()?, key }.to_string()));
    let link = link.unwrap_or_else(|| "LINK".to_owned());
    let mut init = format!("culvert init --role entry --peer {link}{}", tunnel(&peer.addresses));
    // A link of one address leads nowhere by itself.
    let ours: Vec<IpNet> = plan.addresses.iter().map(|net| IpNet::from(net.addr())).collect();
    let led = if peer.addresses.iter().any(is_alone) { &ours[..] } else { &[] };
    init += &list("allowed-ip", led);
    init += &list("network", &behind(peer, [&peer.addresses, led]));
    let mut text = String::new();
    let mut steps = vec![("on its host, which prints its key", init)];
    if let Some((file, _)) = &peer.preshared {
        text = copy(file);
        if let Some((_, init)) = steps.last_mut() {
            *init += &format!(" --preshared-key-file {THEIR_PSK}");
        }
    }
    steps.push(("there, unless a service manager does it", format!("culvert run --config {DEFAULT_CONFIG}")));
    steps.push(("here, with that key", add(peer, "KEY", option)));
    for (place, command) in steps {
        writeln!(text, "  {place}:\n    {command}").ok();
    }
    text
}

/// A peer that this host dials.
fn of_listener(plan: &Plan, peer: &Peer, endpoint: &str, names: &Names<'_>, option: &str) -> String {
    // The first address of the link is what a server usually has.
    let first = plan.addresses.iter().filter_map(|own| neighbour(*own));
    let addresses: Vec<IpNet> = match &peer.addresses[..] {
        [] => first.collect(),
        own => own.iter().copied().map(with_room).collect(),
    };
    let port = port_of(endpoint).unwrap_or(4433);
    let any = if endpoint.starts_with('[') { "[::]" } else { "0.0.0.0" };
    let init = format!(
        "culvert init --role exit{} --listen {} --advertise {}{}",
        tunnel(&addresses),
        shell_word(&format!("{any}:{port}")),
        shell_word(endpoint),
        list("network", &behind(peer, [&addresses, &[]]))
    );
    let key = names.key.map_or_else(|| "KEY".to_owned(), |key| key.to_string());
    let ours: Vec<IpNet> = plan.addresses.iter().map(|net| IpNet::from(net.addr())).collect();
    let mut let_in = format!("culvert peer add {} {key}{}", names.host, list("allowed-ip", &ours));
    let mut text = String::new();
    if let Some((file, _)) = &peer.preshared {
        text = copy(file);
        let_in += &format!(" --preshared-key-file {THEIR_PSK}");
    }
    for (place, command) in [
        ("on its host, which prints its link", init),
        ("there", let_in),
        ("here, with that link", add(peer, "LINK", option)),
    ] {
        writeln!(text, "  {place}:\n    {command}").ok();
    }
    text
}

fn tunnel(addresses: &[IpNet]) -> String {
    if addresses.is_empty() {
        return " --tun ADDRESS/LENGTH".to_owned();
    }
    list("tun", addresses)
}

fn is_alone(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

/// The address of an exit, whose prefix has to have room for its entries.
fn with_room(address: IpNet) -> IpNet {
    let length = if address.addr().is_ipv4() { 24 } else { 64 };
    let widened = is_alone(&address).then(|| IpNet::new(address.addr(), length));
    widened.and_then(Result::ok).unwrap_or(address)
}

/// The networks of a peer that its `culvert init` takes as networks behind it: those that meet nothing of the tunnel. The others are led
/// to it nevertheless.
fn behind(peer: &Peer, tunnel: [&[IpNet]; 2]) -> Vec<IpNet> {
    let meets = |network: &IpNet| {
        let mut others = tunnel.into_iter().flatten();
        others.any(|other| network.contains(&other.trunc()) || other.contains(network))
    };
    peer.networks.iter().filter(|network| !meets(network)).copied().collect()
}

fn copy(file: &Path) -> String {
    format!("  its preshared key: {} goes to its host as {THEIR_PSK}, by a safe way\n", file.display())
}

/// What lets the peer in here.
fn add(peer: &Peer, what: &str, option: &str) -> String {
    let psk = peer.preshared.as_ref().map_or_else(String::new, |(file, _)| {
        format!(" --preshared-key-file {}", shell_word(&file.to_string_lossy()))
    });
    format!("culvert peer add {} {what}{}{psk}{option}", peer.name, list("allowed-ip", &peer.allowed_ips))
}

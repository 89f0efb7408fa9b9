//! What the operator types next, on both hosts. Commands stand on lines of their own, after four spaces.

use std::{collections::BTreeSet, fmt::Write as _, net::SocketAddr, path::Path};

use anyhow::Context as _;
use config::{Config, Protocol, Service, Target, Upstream};
use gate::identity::{PublicKey, ShareLink};
use ipnet::IpNet;

use super::{
    host::Facts,
    now,
    options::Role,
    plan::{Plan, neighbour},
};
use crate::cli::reach::DEFAULT_CONFIG;

/// What the next steps depend on.
pub(super) struct Steps<'a> {
    pub(super) plan: &'a Plan,
    pub(super) config: &'a Config,
    pub(super) key: PublicKey,
    pub(super) file: &'a Path,
    pub(super) facts: &'a Facts,
    /// Whether the service is started now.
    pub(super) now: bool,
}

impl Steps<'_> {
    /// What to tell the operator.
    ///
    /// # Errors
    /// An exit's configuration says no address, which a plan that was checked always does.
    pub(super) fn text(&self) -> anyhow::Result<String> {
        match self.plan.role {
            Role::Exit => self.of_exit(),
            Role::Entry => Ok(self.of_entry()),
        }
    }

    fn of_exit(&self) -> anyhow::Result<String> {
        let transport = &self.config.transport;
        let endpoint = transport.advertise.clone().context("this exit has no address to advertise")?;
        let link = ShareLink { endpoint, key: self.key };
        let mut text = format!("\nIts link, for entries:\n    {link}\n\nNext:\n");
        let mut number = 1;
        // An exit for users alone has nothing for entries.
        if !self.tunnel().is_empty() || self.granted().next().is_some() {
            step(&mut text, 1, "on the entry, which prints its public key", &self.entry(&link));
            let mut add = "culvert peer add NAME KEY".to_owned();
            let first = self.tunnel().iter().filter_map(|address| neighbour(*address));
            add += &first.map(|next| format!(" --allowed-ip {}", next.addr())).collect::<String>();
            add += &self.granted().map(|service| format!(" --service {}", service.name)).collect::<String>();
            step(&mut text, 2, "here, as the entry prints it", &format!("{add}{}", self.with_config()));
            number = 3;
        }
        self.start(&mut text, &mut number);
        self.forwarding(&mut text, number);
        text += &self.ports();
        Ok(text.trim_end().to_owned())
    }

    /// The command for an entry that has all of it.
    fn entry(&self, link: &ShareLink) -> String {
        let mut entry = format!("culvert init --role entry --peer {link}");
        for (index, address) in self.tunnel().iter().enumerate() {
            // The plan refuses an exit's address without one.
            entry += &match neighbour(*address) {
                _ if index == 0 && self.plan.tun == ["10.9.0.1/24"] => " --tun".to_owned(),
                Some(next) => format!(" --tun {next}"),
                None => String::new(),
            };
        }
        entry += &self.behind();
        let mut used = BTreeSet::new();
        for service in self.granted() {
            let options = [("udp", Protocol::Tcp), ("tcp", Protocol::Udp)];
            let options = options.into_iter().filter(|(_, other)| service.protocol != *other);
            let options: Vec<&str> = options.map(|(option, _)| option).collect();
            let port = free_port(local_port(&service.upstream), |port| {
                !options.iter().any(|option| used.contains(&(*option, port)))
            });
            for option in options {
                used.insert((option, port));
                entry += &format!(" --{option} 127.0.0.1:{port}={}", service.name);
            }
        }
        // Who has a service here is taken to have one there.
        if self.now && self.facts.no_service.is_none() {
            entry += " --now";
        }
        entry
    }

    fn of_entry(&self) -> String {
        let mut text = format!("\nIts public key:\n    {}\n\nNext:\n", self.key);
        let mut add = format!("culvert peer add {} {}", self.facts.name, self.key);
        for address in self.tunnel() {
            add += &format!(" --allowed-ip {}", address.addr());
        }
        add += &self.behind();
        let mut services: Vec<&str> =
            self.plan.udp.iter().chain(&self.plan.tcp).map(|pair| pair.right.as_str()).collect();
        services.sort_unstable();
        services.dedup();
        add += &services.iter().map(|name| format!(" --service {name}")).collect::<String>();
        let place = "on the exit, so that it lets this host in; with --config FILE if its culvert init had that option";
        step(&mut text, 1, place, &add);
        let mut number = 2;
        self.start(&mut text, &mut number);
        number += self.forwarding(&mut text, number);
        // The first address of the link is what an exit usually has.
        let exit = self.tunnel().iter().find_map(|own| {
            neighbour(own.trunc()).map(|first| first.addr()).filter(|first| *first != own.addr())
        });
        if let Some(exit) = exit {
            step(&mut text, number, "to see that it works", &format!("ping {exit}"));
        }
        text.trim_end().to_owned()
    }

    /// The services that an entry may use; others are for users.
    fn granted(&self) -> impl Iterator<Item = &Service> {
        self.config.services.iter().filter(|service| !service.is_any())
    }

    fn tunnel(&self) -> &[IpNet] {
        self.config.tun.as_ref().map_or(&[], |tun| &tun.addresses)
    }

    /// Says how the agent is started, unless that is done now.
    fn start(&self, text: &mut String, number: &mut u8) {
        let service = self.facts.no_service.is_none();
        if service && self.now {
            return;
        }
        let run = || format!("culvert run --config {}", shell_word(&self.file.to_string_lossy()));
        let command = if service { now::COMMAND.to_owned() } else { run() };
        step(text, *number, "here", &command);
        *number += 1;
    }

    /// The options by which the other end leads the networks behind this host here.
    fn behind(&self) -> String {
        self.plan.networks.iter().map(|network| format!(" --allowed-ip {network}")).collect()
    }

    /// The option that names the configuration, where commands would not find it.
    fn with_config(&self) -> String {
        if self.file.as_os_str() == DEFAULT_CONFIG {
            return String::new();
        }
        format!(" --config {}", shell_word(&self.file.to_string_lossy()))
    }

    /// Says how this host forwards to the networks behind it, and returns how many steps that took.
    fn forwarding(&self, text: &mut String, number: u8) -> u8 {
        let of = |ipv6: bool| self.plan.networks.iter().any(|network| network.addr().is_ipv6() == ipv6);
        let mut set = Vec::new();
        set.extend(of(false).then_some("net.ipv4.ip_forward=1"));
        set.extend(of(true).then_some("net.ipv6.conf.all.forwarding=1"));
        if !set.is_empty() {
            let place = "here, so that packets pass between the tunnel and the networks behind this host; to keep it, the same in \
                         /etc/sysctl.d/60-culvert.conf";
            step(text, number, place, &format!("sysctl -w {}", set.join(" ")));
            return 1;
        }
        if !self.tunnel().is_empty() && self.plan.role == Role::Exit {
            *text += "Entries that are to reach each other through this host need, here:\n    sysctl -w net.ipv4.ip_forward=1 \
                      net.ipv4.conf.all.send_redirects=0\n";
        }
        if !self.tunnel().is_empty() {
            *text += "Networks behind this host: --network PREFIX prints what they need.\n";
        }
        0
    }

    /// The ports that a firewall lets in.
    fn ports(&self) -> String {
        let mut ports: Vec<u16> = self.config.transport.listen.iter().map(SocketAddr::port).collect();
        ports.sort_unstable();
        ports.dedup();
        let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
        format!("Open in the firewall of this host: UDP port {}.\n", ports.join(", "))
    }
}

fn step(text: &mut String, number: u8, place: &str, command: &str) {
    // Writing to a String cannot fail.
    writeln!(text, "{number}. {place}:\n    {command}").ok();
}

/// Below it only root may listen.
const FREE: u16 = 1024;

/// The first port from `wanted` on for which `is_free` is true.
fn free_port(wanted: u16, is_free: impl Fn(u16) -> bool) -> u16 {
    (wanted..=u16::MAX).chain(FREE..wanted).find(|port| is_free(*port)).unwrap_or(wanted)
}

/// A port for the entry's side of a service: the service's own where everybody may open it.
fn local_port(upstream: &Upstream) -> u16 {
    let port = upstream.targets().find_map(|target| match target {
        Target::Address(address) => Some(address.port()),
        Target::Name(name) => Some(name.port),
        Target::Unix(_) => None,
    });
    let port = port.unwrap_or(FREE);
    if port < FREE { port + 10_000 } else { port }
}

/// A word that a shell takes as it is.
pub(in crate::cli) fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

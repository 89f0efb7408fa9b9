//! What the operator types next, on both hosts. Commands stand on lines of their own, after four spaces.

use std::{fmt::Write as _, net::SocketAddr, path::Path};

use anyhow::Context as _;
use config::Config;
use gate::identity::{PublicKey, ShareLink};
use ipnet::IpNet;

use super::{
    host::Facts,
    options::{Pair, Role},
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
        let mut entry = format!("culvert init --role entry --peer {link}");
        for (index, address) in self.tunnel().iter().enumerate() {
            // The plan refuses an exit's address without one.
            entry += &match neighbour(*address) {
                _ if index == 0 && self.plan.tun == ["10.9.0.1/24"] => " --tun".to_owned(),
                Some(next) => format!(" --tun {next}"),
                None => String::new(),
            };
        }
        for Pair { left: name, right: upstream } in &self.plan.services {
            entry += &format!(" --udp 127.0.0.1:{}={name}", local_port(upstream));
        }
        step(&mut text, 1, "on the entry, which prints its public key", &entry);
        let mut add = "culvert peer add NAME KEY".to_owned();
        let first = self.tunnel().iter().filter_map(|address| neighbour(*address));
        add += &first.map(|next| format!(" --allowed-ip {}", next.addr())).collect::<String>();
        add += &self.plan.services.iter().map(|pair| format!(" --service {}", pair.left)).collect::<String>();
        step(&mut text, 2, "here, as the entry prints it", &format!("{add}{}", self.with_config()));
        step(&mut text, 3, "here", &self.start());
        text += self.forwarding();
        Ok(text.trim_end().to_owned())
    }

    fn of_entry(&self) -> String {
        let mut text = format!("\nIts public key:\n    {}\n\nNext:\n", self.key);
        let mut add = format!("culvert peer add {} {}", self.facts.name, self.key);
        for address in self.tunnel() {
            add += &format!(" --allowed-ip {}", address.addr());
        }
        let mut services: Vec<&str> =
            self.plan.udp.iter().chain(&self.plan.tcp).map(|pair| pair.right.as_str()).collect();
        services.sort_unstable();
        services.dedup();
        add += &services.iter().map(|name| format!(" --service {name}")).collect::<String>();
        let place = "on the exit, so that it lets this host in; with --config FILE if its culvert init had that option";
        step(&mut text, 1, place, &add);
        step(&mut text, 2, "here", &self.start());
        // The first address of the link is what an exit usually has.
        let exit = self.tunnel().iter().find_map(|own| {
            neighbour(own.trunc()).map(|first| first.addr()).filter(|first| *first != own.addr())
        });
        if let Some(exit) = exit {
            step(&mut text, 3, "to see that it works", &format!("ping {exit}"));
        }
        text += self.forwarding();
        text.trim_end().to_owned()
    }

    fn tunnel(&self) -> &[IpNet] {
        self.config.tun.as_ref().map_or(&[], |tun| &tun.addresses)
    }

    /// Returns the command that starts the agent.
    fn start(&self) -> String {
        if self.facts.service {
            return "systemctl enable --now culvert".to_owned();
        }
        format!("culvert run --config {}", shell_word(&self.file.to_string_lossy()))
    }

    /// The option that names the configuration, where commands would not find it.
    fn with_config(&self) -> String {
        if self.file.as_os_str() == DEFAULT_CONFIG {
            return String::new();
        }
        format!(" --config {}", shell_word(&self.file.to_string_lossy()))
    }

    fn forwarding(&self) -> &'static str {
        if self.tunnel().is_empty() {
            return "";
        }
        "Hosts behind this one need forwarding as well: docs/operations.md.\n"
    }
}

fn step(text: &mut String, number: u8, place: &str, command: &str) {
    // Writing to a String cannot fail.
    writeln!(text, "{number}. {place}:\n    {command}").ok();
}

/// A port for the entry's side of a service: the service's own where everybody may open it.
fn local_port(upstream: &str) -> u16 {
    /// Below it only root may listen.
    const FREE: u16 = 1024;
    let port = upstream.parse().map_or(0, |address: SocketAddr| address.port());
    if port < FREE { port + 10_000 } else { port }
}

/// A word that a shell takes as it is.
fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

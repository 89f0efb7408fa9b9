//! `culvert check`

use std::path::PathBuf;

use clap::Args;
use config::Config;

use super::{Failure, check_lines, reach::DEFAULT_CONFIG};
use crate::{
    doctor::{facts::LineEnd, line_end},
    out,
};

/// Validate a configuration file and the identity that it names, without starting anything
#[derive(Debug, Args)]
pub(super) struct Check {
    /// The configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
}

impl Check {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let (config, identity) = Config::load(&self.config)?;
        let (file, key) = (self.config.display(), identity.public_key());
        out::say(&format_args!("{file}: valid: {key} with {}", summary(&config)))?;
        for note in &config.notes {
            out::say(&format_args!("{}: note: {note}", note.place(&self.config)))?;
        }
        if let Some(tun) = &config.tun
            && crate::doctor::ipv6_is_disabled()
            && crate::doctor::routes_ipv6(&config, tun)
        {
            out::say(&format_args!(
                "{file}: note: IPv6 is disabled on this host: the IPv6 prefixes of allowed_ips get no routes, and IPv4 goes on \
                 (remedy: {})",
                crate::doctor::ENABLE_IPV6
            ))?;
        }
        let is_missing = |uplink: &config::Uplink| line_end(uplink).is_ok_and(|end| end == LineEnd::Missing);
        for note in check_lines::notes(&config.transport.uplinks, is_missing) {
            out::say(&format_args!("{file}: note: {note}"))?;
        }
        let rejected = &config.directory.rejected;
        if rejected.is_empty() {
            return Ok(());
        }
        for problem in rejected {
            out::complain(&format_args!("{}: {problem}", problem.place(&self.config)));
        }
        let files = config.directory.rejected_files().len();
        Err(Failure::Input(format!(
            "{files} of the files in identity.peers_dir are wrong: the agent leaves them out"
        )))
    }
}

fn summary(config: &Config) -> String {
    let parts = [
        (config.transport.listen.len(), "listen address", "listen addresses"),
        (config.peers.len(), "peer", "peers"),
        (config.udp.len(), "UDP forward", "UDP forwards"),
        (config.tcp.len(), "TCP forward", "TCP forwards"),
        (config.services.len(), "service", "services"),
    ];
    let parts = parts.map(|(count, one, many)| format!("{count} {}", if count == 1 { one } else { many }));
    let tunnel = config.tun.as_ref().map_or_else(String::new, |tun| format!(", tunnel {}", tun.name));
    parts.join(", ") + &tunnel
}

//! The limit on open files, and what it is enough for.

use std::io;

use config::Config;
use net::process;

/// Each flow and TCP connection of a peer, each lane that we open, and each unauthenticated sender at the decoy needs a descriptor: asks
/// for as many as the hard limit allows, and warns if that is less than the peers that are known may use. Returns how many there are.
pub fn raise_descriptor_limit(config: &Config) -> Option<u64> {
    let known = config.descriptors();
    let failed = |error: &io::Error| tracing::warn!(%error, "cannot raise the limit on open files (remedy: LimitNOFILE= in the unit)");
    let granted = process::raise_descriptor_limit(known).inspect_err(failed).ok()?;
    if granted < known {
        tracing::warn!(
            granted,
            wanted = known,
            "the limit on open files is below what [limits] allows (remedy: a higher `ulimit -n`, LimitNOFILE= in the unit, or a lower limits.flows)"
        );
    }
    Some(granted)
}

/// For how many flows to services there are sockets, of `granted` descriptors and of the host's ports: half of the descriptors at the least,
/// if other things may need more than that.
pub fn sockets_for_flows(config: &Config, granted: u64) -> usize {
    let others = config.descriptors() - config.limits.flows as u64;
    let descriptors = usize::try_from(granted.saturating_sub(others).max(granted / 2)).unwrap_or(usize::MAX);
    process::ephemeral_ports().map_or(descriptors, |ports| ports.min(descriptors))
}

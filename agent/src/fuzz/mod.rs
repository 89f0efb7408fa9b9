//! What the targets in `fuzz/` run, and what the tests replay their corpora through: properties of any input.
//!
//! | which input | file |
//! |---|---|
//! | the configuration | this one |
//! | control messages and payloads | `properties.rs` of `wire` |
//! | links, datagrams and Initials before the gate, what strangers send, used knocks | `properties.rs` of `gate` |
//! | lines of the control socket, key files, files of the host | `operator.rs` |
//! | IP packets | `properties.rs` of `ip` |
//! | datagrams in pieces | `relay/properties.rs` |
//! | the state file, reloads, datagrams of bench | `config/state_properties.rs`, `config/reload_rules.rs`, `bench/datagram.rs` |

use std::path::Path;

use crate::config::{Config, ConfigProblems};

mod operator;

pub use self::operator::{host_text, key_file, socket_answer, socket_request};
pub use crate::relay::properties::reassembly;
pub use gate::{
    journal::properties::knock_journal,
    properties::{
        certificate, classify, decoy_flows, gate_initial, knock_open, retry_token, server_hello, share_link,
    },
};
pub use ip::properties::{ip_cut, ip_fragments, ip_merge, ip_view};
pub use wire::properties::{control_messages, payload_context};

/// Takes `input` as a state file, see `config/state_properties.rs`.
pub fn state_text(input: &[u8]) {
    crate::config::state::properties::state_text(input);
}

/// Takes `input` as two configurations, see `config/reload_rules.rs`.
pub fn reload_files(input: &[u8]) {
    crate::config::reload_rules::reload_files(input);
}

/// Takes `input` as a datagram of a run of bench, see `bench/datagram.rs`.
pub fn bench_datagram(input: &[u8]) {
    crate::bench::bench_datagram(input);
}

/// Takes `input` as a configuration file.
///
/// It is accepted, or every problem has words and a remedy, and a line within the file.
pub fn config_text(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Config::parse(&text, Path::new("/etc/culvert")) {
        Ok(config) => {
            assert!(config.udp.iter().chain(&config.tcp).all(|forward| forward.peer < config.peers.len()));
            let services = config.peers.iter().flat_map(|peer| &peer.services);
            assert!(services.into_iter().all(|place| *place < config.services.len()));
        }
        Err(problems) => well_said(&problems, &text),
    }
}

/// There are problems, and each has words, a remedy, and a line within the text, if it is about a line.
pub(crate) fn well_said(problems: &ConfigProblems, text: &str) {
    assert!(!problems.problems.is_empty() && !problems.to_string().is_empty());
    let lines = 1 + text.bytes().filter(|byte| *byte == b'\n').count();
    for problem in &problems.problems {
        assert!(!problem.problem.is_empty() && !problem.remedy.is_empty(), "{problem:?}");
        assert!(problem.line.is_none_or(|line| (1..=lines).contains(&line)), "{problem:?}");
    }
}

#[cfg(test)]
mod tests;

//! What the targets in `fuzz/` run, and what the tests replay their corpora through: properties of any input.
//!
//! | which input | file |
//! |---|---|
//! | the configuration, the state file, reloads | `config/src/properties.rs`, `config/src/state_properties.rs`, `config/src/reload_rules.rs` |
//! | control messages, payloads, PROXY headers | `wire/src/properties.rs` |
//! | links, datagrams and Initials before the gate, what unauthenticated senders send, used knocks | `gate/src/properties.rs` |
//! | lines of the control socket, key files, files of the host | `operator.rs` |
//! | what HTTP/3 clients send | `http/src/connection/properties.rs` |
//! | IP packets | `ip/src/properties.rs`, `ip/src/map_properties.rs` |
//! | datagrams in pieces | `dataplane/src/relay/properties.rs` |
//! | repair of lost datagrams | `repair/src/properties.rs` |
//! | datagrams of bench | `lab/src/bench/datagram.rs` |

mod operator;

pub use self::operator::{host_text, key_file, socket_answer, socket_request};
pub use config::{properties::config_text, reload_rules::reload_files, state::properties::state_text};
pub use dataplane::relay::properties::reassembly;
pub use gate::{
    properties::{
        certificate, classify, decoy_flows, gate_initial, gate_parts, knock_open, retry_token, server_hello,
        share_link,
    },
    replay_log::properties::knock_journal,
};
pub use h3::{
    addresses::ip_capsules,
    connection::properties::{http_capsules, http_connection, http_fields},
};
pub use ip::map::properties::ip_map;
pub use ip::properties::{ip_cut, ip_fragments, ip_merge, ip_tunnel_cut, ip_tunnel_merge, ip_view};
pub use lab::bench::bench_datagram;
pub use repair::properties::{repair_path, repair_peer};
pub use users::properties::user_request;
pub use wire::properties::{control_messages, payload_context, proxy_header};

#[cfg(test)]
mod tests;

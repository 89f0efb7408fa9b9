//! What the configuration says, and how reloading it went.

use std::time::Duration;

use base::counts::Counts;
use config::Limits;
use engine::metrics::Samples;

base::labelled! {
    /// How a reload ended: the label `outcome`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Reload {
        /// What could be changed was changed, if anything was different.
        Done => "done",
        /// The configuration was wrong; the old one runs.
        Refused => "refused",
        /// The configuration was right and could not be put into effect, such as a port that is taken; the old one runs.
        Failed => "failed",
    }
}

/// The configuration that runs, and the reloads until now.
#[derive(Clone, Debug, Default)]
pub(super) struct Configured {
    pub(super) reloads: Counts<Reload>,
    pub(super) peer_files: PeerFiles,
    pub(super) now: Option<Now>,
}

/// The number of files of the directory of peers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PeerFiles {
    pub(super) used: u64,
    pub(super) rejected: u64,
}

/// The configuration that runs, as far as metrics tell of it.
#[derive(Clone, Debug)]
pub(super) struct Now {
    pub(super) limits: Limits,
    /// When it was read, by the wall clock.
    pub(super) since: Duration,
    /// Whether the last reload succeeded; `true` before the first one.
    pub(super) successful: bool,
}

impl Configured {
    /// Shows what runs, once something does.
    pub(super) fn each(&self, show: impl FnOnce(&Now)) {
        self.now.as_ref().map(show);
    }
}

impl Now {
    pub(super) fn show_limits(&self, out: &mut Samples) {
        out.each(counted(&self.limits));
    }
}

/// The limits on what grows, by their keys. `receive_buffer` and `receive_rate` are sizes of their own kind: they are shown
/// with the sockets.
fn counted(limits: &Limits) -> [(&'static str, u64); 13] {
    let Limits {
        flows_per_peer,
        flows,
        tcp_streams_per_peer,
        tcp_streams,
        stream_bytes,
        pending_open_packets,
        receive_buffer: _,
        receive_rate: _,
        reassembly_bytes,
        queue_bytes,
        repair_bytes,
        peers,
        open_peers,
        decoy_flows,
        handshakes,
    } = *limits;
    [
        ("flows_per_peer", flows_per_peer as u64),
        ("flows", flows as u64),
        ("tcp_streams_per_peer", u64::from(tcp_streams_per_peer)),
        ("tcp_streams", tcp_streams as u64),
        ("stream_bytes", stream_bytes as u64),
        ("pending_open_packets", pending_open_packets as u64),
        ("reassembly_bytes", reassembly_bytes as u64),
        ("queue_bytes", queue_bytes as u64),
        ("repair_bytes", repair_bytes as u64),
        ("peers", peers as u64),
        ("open_peers", open_peers as u64),
        ("decoy_flows", decoy_flows as u64),
        ("handshakes", handshakes as u64),
    ]
}

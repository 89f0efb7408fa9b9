//! What the configuration says, and how reloading it went.

use std::time::Duration;

use config::Limits;

use crate::metrics::Metrics;

/// How a reload ended: the label `outcome`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reload {
    /// What could be changed was changed, if anything was different.
    Done,
    /// The configuration was wrong; the old one runs.
    Refused,
    /// The configuration was right and could not be put into effect, such as a port that is taken; the old one runs.
    Failed,
}

impl Reload {
    /// All, in the order of their declaration.
    pub const ALL: [Self; 3] = [Self::Done, Self::Refused, Self::Failed];

    /// The value of the label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

impl Metrics {
    /// A configuration with these limits runs from now on. To be called at the start, and after each reload that is
    /// [`Reload::Done`]; `unix_time` is the wall clock's.
    pub fn configured(&self, limits: &Limits, unix_time: Duration) {
        for (key, limit) in counted(limits) {
            self.families().limit.with_label_values(&[key]).set(i64::try_from(limit).unwrap_or(i64::MAX));
        }
        self.families().reload_successful.with_label_values(NO_LABELS).set(1);
        self.families().reload_time.with_label_values(NO_LABELS).set(unix_time.as_secs_f64());
    }

    /// Counts a reload.
    pub fn reloaded(&self, outcome: Reload) {
        self.families().reloads.with_label_values(&[outcome.label()]).inc();
        let successful = i64::from(outcome == Reload::Done);
        self.families().reload_successful.with_label_values(NO_LABELS).set(successful);
    }

    /// Shows the reloads of each outcome, none yet.
    pub(super) fn bind_reloads(&self) {
        for outcome in Reload::ALL {
            self.families().reloads.with_label_values(&[outcome.label()]);
        }
    }
}

const NO_LABELS: &[&str] = &[];

/// The limits on what grows, by their keys. `receive_buffer` and `receive_rate` are sizes of their own kind: they are shown
/// with the sockets.
fn counted(limits: &Limits) -> [(&'static str, u64); 12] {
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
        ("peers", peers as u64),
        ("open_peers", open_peers as u64),
        ("decoy_flows", decoy_flows as u64),
        ("handshakes", handshakes as u64),
    ]
}

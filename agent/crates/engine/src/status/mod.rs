//! The status of peers, lanes, flows, sockets and the device: workers fill it, `culvert status --json` prints it.
//!
//! `docs/status.md` describes the JSON, which only ever gains members.
//!
//! | what | file |
//! |---|---|
//! | a peer, its connection, traffic and account | `peer.rs` |
//! | the limit on what is sent to it | `rate.rs`; what it may use in a month: `quota.rs` |
//! | what is repaired between us | `repair.rs` |
//! | lanes | `lane.rs`; the lines that they are on: `line.rs` |
//! | what reasons of drops and steps of the gate mean | `meanings.rs` |
//! | flows, connections of TCP forwards, sockets | `flow.rs` |
//! | TCP forwards | `forward.rs` |
//! | the TUN device and its routes | `tun.rs`; who talks to whom there: `talkers.rs` |
//! | what carries a peer's packets, UDP or TCP | `way.rs` |

use std::{borrow::Cow, collections::BTreeMap};

use base::counts::Labelled;

mod flow;
mod forward;
mod lane;
mod line;
pub mod meanings;
mod peer;
mod quota;
mod rate;
mod repair;
mod talkers;
mod tun;
mod way;

pub use self::flow::{FlowStatus, SocketStatus, StreamConnectionStatus};
pub(crate) use self::forward::ServicePlace;
pub use self::forward::{ForwardId, ForwardStatus, NoForwardId, TcpServiceStatus, TcpStatus};
pub(crate) use self::lane::add_lane;
pub use self::lane::{LaneDetails, LanePackets, LaneRates, LaneStatus, OwnedLanes};
pub use self::line::{LineState, LineStatus};
pub use self::peer::{
    Accounting, ContestedStatus, LastError, PeerFigures, PeerRates, PeerState, PeerStatus, QueueStatus,
    SendError, StreamsStatus,
};
pub use self::quota::QuotaStatus;
pub use self::rate::{AutoRateStatus, RateFrom, RateStatus};
pub use self::repair::{RepairState, RepairStatus};
pub use self::talkers::{MOST_TALKERS, TalkerStatus};
pub use self::tun::{RoutePeerStatus, RouteStatus, TunDirection, TunStatus};
pub use self::way::{CarrierError, WayStatus};

/// One of a closed set of words.
pub type Word = Cow<'static, str>;

/// A map of counts by reason or kind.
pub type Counts = BTreeMap<Word, u64>;

/// The counts that are not 0, by the labels in their order.
pub(crate) fn not_zero<K: Labelled>(counts: &base::counts::Counts<K>) -> Counts {
    let counts = counts.by_label().filter(|(_, count)| *count > 0);
    counts.map(|(label, count)| (label.into(), count)).collect()
}

/// Adds `one` to `sum` by `add`; each of the two may be missing.
pub(crate) fn add_some<T: Clone>(sum: &mut Option<T>, one: Option<&T>, add: fn(&mut T, &T)) {
    match (sum, one) {
        (Some(sum), Some(one)) => add(sum, one),
        (sum @ None, one) => *sum = one.cloned(),
        (Some(_), None) => {}
    }
}

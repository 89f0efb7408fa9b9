//! An operator's request for details to all workers, and their answers; `turn/inspect.rs` makes these.

use std::{net::IpAddr, sync::Arc, time::Duration};

use base::{counts::PerKind, ids::PeerId};
use net::UdpRole;

use crate::{
    status::{
        FlowStatus, LaneStatus, RouteStatus, SocketStatus, StreamConnectionStatus, TalkerStatus, TunStatus,
    },
    worker::report::{
        answers::Answers,
        inbox::{Command, Inbox},
    },
};

/// Limit on the flows in one worker's answer.
pub const MOST_FLOWS: usize = 50;

/// The selection of an inspection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// Only the lanes of this peer, and its most recent flows. `None`: the lanes of all peers, and no flows.
    pub peer: Option<Arc<str>>,
    /// Only the lane with this index, with its details.
    pub lane: Option<u8>,
    /// Which inner prefixes; `None`: none of them.
    pub routes: Option<AskedRoutes>,
    /// Whether it is asked who talks to whom inside.
    pub talkers: bool,
    /// Whether what was last published is recent enough: publishing visits all peers, and who asks all day should not cause that.
    pub as_published: bool,
}

/// The inner prefixes that an operator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedRoutes {
    All,
    /// The longest one with this address.
    To(IpAddr),
}

/// A request to all workers, and their answers.
#[derive(Debug)]
pub struct Inspection {
    pub(crate) asks: Asks,
    views: Answers<WorkerView>,
}

/// What one worker reports to an operator: its lanes, stream connections and flows.
#[derive(Clone, Debug, Default)]
pub struct WorkerView {
    /// The lanes with their peers, in no particular order.
    pub lanes: Vec<(PeerId, LaneStatus)>,
    /// The number of lanes beyond the limit.
    pub lanes_left_out: usize,
    /// The number of flows by peer and by the index of their lane.
    pub lane_flows: Vec<(PeerId, Vec<u64>)>,
    /// The stream connections with their peers.
    pub stream_connections: Vec<(PeerId, StreamConnectionStatus)>,
    /// The most recent flows of the selected peer, the latest first, at most [`MOST_FLOWS`].
    pub flows: Vec<FlowStatus>,
    pub sockets: PerKind<UdpRole, SocketStatus>,
    /// Prefixes of the TUN device, at the first worker, if they were asked for.
    pub routes: Vec<RouteStatus>,
    /// The pairs of addresses that have carried most, if they were asked for.
    pub talkers: Vec<TalkerStatus>,
    /// The worker's queue of the TUN device, without the values that only the kernel knows.
    pub tun: Option<TunStatus>,
}

impl Inspection {
    /// Sends a request to the workers behind `inboxes`. A worker with a full inbox does not answer.
    #[must_use]
    pub fn ask(asks: Asks, inboxes: &[Arc<Inbox>]) -> Arc<Self> {
        let views = Answers::expected(inboxes.iter().map(|_| true));
        let inspection = Arc::new(Self { asks, views });
        for inbox in inboxes {
            // The operator learns which workers have not answered in time, whatever the reason.
            let _asked = inbox.put(Command::Inspect(Arc::clone(&inspection)));
        }
        inspection
    }

    /// Waits until all workers have answered, at most `within`. Returns `None` for each worker that has not.
    #[must_use]
    pub fn wait(&self, within: Duration) -> Vec<Option<WorkerView>> {
        self.views.wait(within)
    }

    pub(crate) fn answer(&self, worker: u8, view: WorkerView) {
        self.views.set(worker, view);
    }
}

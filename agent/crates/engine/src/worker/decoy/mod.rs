//! The decoy side of a worker: `serve.rs` forwards unauthenticated senders' datagrams, `decoys.rs` has the flows.

use std::time::Instant;

use config::Config;
use gate::decoy::DecoyId;

use crate::worker::{
    context::{Context, Sockets},
    decoy::decoys::Decoys,
    local::DataPlane,
};

mod decoys;
mod serve;

/// The decoy side of a worker.
#[derive(Default)]
pub(crate) struct Decoy {
    /// Flows of unauthenticated senders to the decoy, at the worker that has them.
    flows: Option<Decoys>,
}

impl Decoy {
    pub(crate) fn new(worker: u8, config: &Config, now: Instant) -> Self {
        Self { flows: Decoys::of_worker(worker, config, now) }
    }

    /// Notes that the socket of a flow may have something to read.
    pub(crate) fn mark(&mut self, id: DecoyId) {
        if let Some(decoys) = &mut self.flows {
            decoys.mark(id);
        }
    }

    /// Whether sockets may have more to read.
    pub(crate) fn is_busy(&self) -> bool {
        self.flows.as_ref().is_some_and(Decoys::is_busy)
    }

    pub(crate) fn open_flows(&self) -> usize {
        self.flows.as_ref().map_or(0, |decoys| decoys.flows.len())
    }

    /// The number of flows, and the largest size of any other table.
    #[cfg(feature = "inspection")]
    pub(crate) fn sizes(&self) -> Option<(usize, usize)> {
        self.flows.as_ref().map(Decoys::sizes)
    }

    /// Adds what the sockets have counted to the statistics, as [`Sockets::read_sockets`] does.
    pub(crate) fn read_sockets(&mut self, sockets: &mut Sockets, drops: bool) {
        if let Some(decoys) = &mut self.flows {
            decoys.read_sockets(&mut sockets.factory.stats, drops);
        }
    }

    /// Opens or closes the flows to the decoy after a change of `access.decoy` or its limit.
    pub(crate) fn follow_decoy(&mut self, cx: &mut Context, data: &mut DataPlane, now: Instant) {
        data.unauthenticated.has_decoy = cx.config.access.decoy.is_some();
        let same = match &self.flows {
            Some(decoys) => decoys.follows(&cx.config),
            None => cx.config.access.decoy.is_none(),
        };
        if !same {
            if let Some(mut decoys) = self.flows.take() {
                decoys.close_all(&mut cx.sockets.factory, &mut data.unauthenticated.stats);
            }
            self.flows = Decoys::of_worker(cx.id.index, &cx.config, now);
        }
    }
}

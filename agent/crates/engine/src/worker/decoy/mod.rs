//! The decoy side of a worker: `serve.rs` forwards unauthenticated senders' datagrams, `decoys.rs` has the flows.

use std::time::Instant;

use crate::worker::{
    context::{Context, Sockets},
    decoy::decoys::Decoys,
    local::DataPlane,
};

pub(crate) mod decoys;
pub(crate) mod serve;

/// The decoy side of a worker.
#[derive(Default)]
pub(crate) struct Decoy {
    /// Flows of unauthenticated senders to the decoy, at the worker that has them.
    pub(crate) flows: Option<Decoys>,
}

impl Decoy {
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

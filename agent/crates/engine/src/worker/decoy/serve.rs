//! Forwards datagrams of unauthenticated senders to the decoy, byte for byte, and the decoy's replies back.
//!
//! ```text
//!   any worker                             worker 0, which has all flows
//!   sender ─► Unauthenticated::push ─┬─► serve_unauthenticated ─► a connected socket per sender ─► decoy
//!                   (a batch)        └─ hand-off ─┘                        │
//!   sender ◄── the listening socket, from the address that the sender used ◄── serve_decoys
//! ```
//!
//! The connection ID that the decoy chose determines which worker receives a datagram. Therefore one worker has all flows: otherwise
//! the decoy would see one sender at several ports. The gate decides for each datagram, never for an address. Once the buffers have
//! grown, no memory is allocated for a datagram.
//!
//! Sockets with replies wait in a queue of their own behind the worker's other sources. In one turn they get at most one batch more
//! than all other sources together, however many senders there are.

use std::{io, time::Instant};

use gate::decoy::{DecoyDrop, DecoyId, Sender};
use net::{Path, UdpRole};

use crate::worker::{
    context::{Context, timer::Timer},
    decoy::{
        Decoy,
        decoys::{Decoys, EXPIRY_STEP, OWNER},
    },
    local::DataPlane,
};

/// Limit on batches of replies in one turn, 1 MB, which bounds how long peers' datagrams wait for them.
const MOST_BATCHES: usize = 8;

impl Decoy {
    /// Forwards the datagrams of unauthenticated senders in this turn: to the decoy, or to the worker that has the flows.
    pub(crate) fn serve_unauthenticated(&mut self, cx: &mut Context, data: &mut DataPlane, now: Instant) {
        if data.unauthenticated.waiting.is_empty() {
            return;
        }
        cx.stats.unpublished = true;
        let mut waiting = std::mem::take(&mut data.unauthenticated.waiting);
        if cx.stopping {
            data.unauthenticated.stats.drop(DecoyDrop::Stopping, waiting.len() as u64);
        } else if cx.id.index != OWNER {
            for (port, meta, datagram) in waiting.iter() {
                data.outgoing.unauthenticated(OWNER, port, meta, datagram);
            }
        } else if let Some(decoys) = &mut self.flows {
            let stats = &mut data.unauthenticated.stats;
            for (port, meta, datagram) in waiting.iter() {
                let sender = Sender { source: meta.source, port, local: meta.local };
                decoys.forward(sender, meta.ecn, datagram, &mut cx.sockets.factory, stats, now);
            }
            decoys.flush(stats);
            if let Some(at) = decoys.flows.deadline() {
                cx.timers.arm(Timer::Decoys, at);
            }
        } else {
            // Another worker has not read yet that the decoy was removed.
            data.unauthenticated.stats.drop(DecoyDrop::NoDecoy, waiting.len() as u64);
        }
        waiting.clear();
        data.unauthenticated.waiting = waiting;
    }

    /// Forwards the decoy's replies: at most one batch more than the `others` of the worker's other sources in this turn.
    pub(crate) fn serve_decoys(
        &mut self,
        cx: &mut Context,
        data: &mut DataPlane,
        others: usize,
        now: Instant,
    ) {
        for _ in 0..MOST_BATCHES.min(others + 1) {
            let Some(id) = self.flows.as_mut().and_then(Decoys::next) else { return };
            if self.service_decoy(cx, data, id, now)
                && let Some(decoys) = &mut self.flows
            {
                decoys.mark(id);
            }
        }
    }

    /// Forwards a batch of replies to one sender; returns whether there may be more.
    fn service_decoy(&mut self, cx: &mut Context, data: &mut DataPlane, id: DecoyId, now: Instant) -> bool {
        let Some(decoys) = &mut self.flows else { return false };
        let Some(Some(socket)) = decoys.sockets.get_mut(id.0 as usize) else { return false };
        let stats = &mut data.unauthenticated.stats;
        match socket.socket.receive(&mut data.batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // An ICMP error about an earlier datagram; replies may wait behind it.
                cx.stats.totals.refusals[UdpRole::Decoy] += 1;
                stats.drop(DecoyDrop::Refused, 1);
                decoys.report_refusal(&error, now);
                return true;
            }
        }
        decoys.touch(id);
        for slot in 0..data.batch.len() {
            let meta = *data.batch.meta(slot);
            for range in meta.segments() {
                let answer = &data.batch.buffer(slot)[range];
                stats.from_decoy.count(answer.len());
                let Sender { source, port, local } = match decoys.flows.answer(id, answer) {
                    Ok(sender) => sender,
                    Err(reason) => {
                        stats.drop(reason, 1);
                        continue;
                    }
                };
                let path = Path { destination: source, source: local, tos: meta.ecn };
                let sent = cx.sockets.ports.get(port).is_some_and(|underlay| {
                    cx.sockets.underlays.answer(&mut cx.sockets.lanes, *underlay, &path, answer, now)
                });
                if !sent {
                    stats.drop(DecoyDrop::ToSender, 1);
                }
            }
        }
        true
    }

    /// Ends flows that have been idle for too long.
    pub(crate) fn expire_flows(&mut self, cx: &mut Context, now: Instant) {
        let Some(decoys) = &mut self.flows else { return };
        while let Some(id) = decoys.flows.expire(now) {
            decoys.close(id, &mut cx.sockets.factory);
            cx.stats.unpublished = true;
        }
        if let Some(at) = decoys.flows.deadline() {
            // A little later, so that flows that end at almost the same time end together.
            cx.timers.arm(Timer::Decoys, at + EXPIRY_STEP);
        }
    }
}

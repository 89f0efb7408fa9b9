//! Strangers' datagrams to the decoy, byte for byte, and its answers back.
//!
//! ```text
//!   any worker                        worker 0, which has all flows
//!   stranger ─► Strangers::push ─┬─► serve_strangers ─► a connected socket of its own ─► decoy
//!                  (a batch)     └─ hand-over ─┘                     │
//!   stranger ◄── the listening socket, the address it used ◄── serve_decoys
//! ```
//!
//! Which worker a datagram comes to depends on the connection ID that the decoy chose, so one worker has all flows: else the
//! decoy would see a stranger come from several ports. What is a stranger's is decided for each datagram, never for an
//! address. Nothing is allocated per datagram once the buffers have grown.
//!
//! Sockets with answers wait in a queue of their own, behind the worker's other sources: however many strangers there are, they
//! have at most as many batches of a turn as all other sources together, and one.

use std::{io, time::Instant};

use dataplane::socket_stats::role_place;
use gate::decoy::{DecoyDrop, DecoyId, Sender};
use net::{Path, UdpRole};

use crate::worker::{
    context::Context,
    decoys::{Decoys, EXPIRY_STEP, OWNER},
    parts::{DataPlane, Decoy, LaneHost},
    timer::Timer,
};

/// Batches of the decoy's answers in one turn, so that peers' datagrams never wait for more: eight buffers, 1 MB.
const MOST_BATCHES: usize = 8;

impl Decoy {
    /// Sends on what strangers sent in this turn: to the decoy, or to the worker that has the flows.
    pub(super) fn serve_strangers(&mut self, cx: &mut Context, data: &mut DataPlane, now: Instant) {
        if data.strangers.waiting.is_empty() {
            return;
        }
        cx.stats.unpublished = true;
        let mut waiting = std::mem::take(&mut data.strangers.waiting);
        if cx.stopping {
            data.strangers.stats.drop(DecoyDrop::Stopping, waiting.len() as u64);
        } else if cx.id.index != OWNER {
            for (port, meta, datagram) in waiting.iter() {
                data.outgoing.stranger(OWNER, port, meta, datagram);
            }
        } else if let Some(decoys) = &mut self.flows {
            let stats = &mut data.strangers.stats;
            for (port, meta, datagram) in waiting.iter() {
                let stranger = Sender { source: meta.source, port, local: meta.local };
                decoys.forward(stranger, meta.ecn, datagram, &mut cx.sockets.factory, stats, now);
            }
            decoys.flush(stats);
            if let Some(at) = decoys.flows.deadline() {
                cx.timers.arm(Timer::Decoys, at);
            }
        } else {
            // Another worker has not heard yet that there is no decoy any more.
            data.strangers.stats.drop(DecoyDrop::NoDecoy, waiting.len() as u64);
        }
        waiting.clear();
        data.strangers.waiting = waiting;
    }

    /// Sends the decoy's answers on: at most one batch more than the `others` that the worker's other sources had in this turn.
    pub(super) fn serve_decoys(
        &mut self,
        cx: &mut Context,
        data: &mut DataPlane,
        host: &mut LaneHost,
        others: usize,
        now: Instant,
    ) {
        for _ in 0..MOST_BATCHES.min(others + 1) {
            let Some(id) = self.flows.as_mut().and_then(Decoys::next) else { return };
            if self.service_decoy(cx, data, host, id, now)
                && let Some(decoys) = &mut self.flows
            {
                decoys.mark(id);
            }
        }
    }

    /// A batch of the decoy's answers to one stranger; true if there may be more.
    fn service_decoy(
        &mut self,
        cx: &mut Context,
        data: &mut DataPlane,
        host: &mut LaneHost,
        id: DecoyId,
        now: Instant,
    ) -> bool {
        let Some(decoys) = &mut self.flows else { return false };
        let Some(Some(socket)) = decoys.sockets.get_mut(id.0 as usize) else { return false };
        let stats = &mut data.strangers.stats;
        match socket.socket.receive(&mut data.batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // ICMP's, about a datagram that was sent before; more may wait behind it.
                cx.stats.totals.refusals[role_place(UdpRole::Decoy)] += 1;
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
                    Ok(stranger) => stranger,
                    Err(reason) => {
                        stats.drop(reason, 1);
                        continue;
                    }
                };
                let path = Path { destination: source, source: local, tos: meta.ecn };
                let sent = cx.sockets.ports.get(port).is_some_and(|underlay| {
                    cx.sockets.underlays.answer(&mut host.lanes, *underlay, &path, answer, now)
                });
                if !sent {
                    stats.drop(DecoyDrop::ToSender, 1);
                }
            }
        }
        true
    }

    /// Forgets strangers that have been silent for too long.
    pub(super) fn end_silent_strangers(&mut self, cx: &mut Context, now: Instant) {
        let Some(decoys) = &mut self.flows else { return };
        while let Some(id) = decoys.flows.expire(now) {
            decoys.close(id, &mut cx.sockets.factory);
            cx.stats.unpublished = true;
        }
        if let Some(at) = decoys.flows.deadline() {
            // What ends one of two flows that are a moment apart ends both.
            cx.timers.arm(Timer::Decoys, at + EXPIRY_STEP);
        }
    }
}

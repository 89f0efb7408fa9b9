//! TCP forwards for an operator: a list of them, and the end of one.
//!
//! ```text
//!   control thread:  ForwardList::ask ──► inboxes ──► Worker::tell_forwards, in its next turn ──► ForwardList::take, and again
//! ```

use std::{collections::BinaryHeap, sync::Arc, time::Instant};

use dataplane::forward::tcp::TcpId;
use quinn_proto::ConnectionHandle;

use crate::{
    status::{ForwardId, ForwardStatus},
    worker::{
        context::{Context, timer},
        report::{
            forwards_request::{ForwardRows, ForwardsPortion, MOST_FORWARDS},
            stats::TcpEnd,
        },
        session::Sessions,
        streams::{OpenForward, TcpForwards, sight::Sight},
    },
};

/// Limit on the places of the table that are looked at in a turn: one takes some 10 ns.
const MOST_LOOKED_AT: usize = 8_192;

/// Limit on the rows that are made in a turn: one takes less than a microsecond.
const MOST_ROWS: usize = 512;

impl TcpForwards {
    /// The forwards of the peer in the table's places from `from` on, as many as a turn has time for.
    pub(crate) fn rows(
        &self,
        cx: &Context,
        sessions: &Sessions,
        portion: &ForwardsPortion,
        from: usize,
        now: Instant,
    ) -> ForwardRows {
        let named = cx.peers.iter().find(|peer| peer.data.is_live() && *peer.name() == portion.peer);
        let Some(peer) = named.map(|peer| peer.data.id) else { return ForwardRows::default() };
        let end = (from + MOST_LOOKED_AT).min(self.open.end());
        let row = |open: &OpenForward| cx.forward_row(open, sessions.instance(), now);
        let mut places = (from..end).filter_map(|place| Some((place, self.open.get(place)?)));
        let mut of_peer = places.by_ref().filter(|(_, open)| open.peer == peer);
        let (rows, reached) = if portion.whole {
            let mut reached = end;
            let mut rows = Vec::new();
            for (place, open) in of_peer.by_ref() {
                rows.push(row(open));
                if rows.len() >= MOST_ROWS {
                    reached = place + 1;
                    break;
                }
            }
            (rows, reached)
        } else {
            // The top of the heap is the one to leave out next: that which has waited for the shortest time, then the youngest.
            let mut most = BinaryHeap::with_capacity(MOST_FORWARDS + 1);
            for (place, open) in of_peer {
                let since = open.sight.stalled(now).map_or(now, |(since, _)| since);
                most.push((since, open.sight.number, place));
                if most.len() > MOST_FORWARDS {
                    most.pop();
                }
            }
            (most.into_iter().filter_map(|(_, _, place)| self.open.get(place)).map(row).collect(), end)
        };
        ForwardRows { rows, next: (reached < self.open.end()).then_some(reached) }
    }

    /// Resets both sides of the forward that `id` names; returns whether it is here.
    pub(crate) fn end_named(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: ForwardId,
        now: Instant,
    ) -> bool {
        if !id.is_of(sessions.instance()) {
            return false;
        }
        let named = self.open.iter().find(|(_, opened)| opened.sight.number == id.number);
        let Some(place) = named.map(|(place, _)| place) else { return false };
        let Some(opened) = self.open.get_mut(place) else { return false };
        let OpenForward { key, peer, forward, sight } = opened;
        let (peer, service) = (cx.peers.get(*peer), sight.service);
        let service = peer.zip(service).and_then(|(peer, place)| peer.forwards.carried.at(place));
        let age = now.saturating_duration_since(sight.since);
        tracing::info!(
            %id, peer = peer.map(|peer| &**peer.name()), service = service.map(|counts| &*counts.service),
            client = sight.client.map(tracing::field::display), ?age, "an operator ended a TCP forward"
        );
        if let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) {
            forward.reset(quinn);
        }
        forward.abort();
        sight.end = Some(TcpEnd::Operator);
        self.remove_tcp(cx, sessions, TcpId(timer::index_u32(place)));
        true
    }
}

impl Context {
    fn forward_row(&self, open: &OpenForward, instance: &[u8; 16], now: Instant) -> ForwardStatus {
        let OpenForward { peer, forward, sight, .. } = open;
        let Sight { number, client, since, service, .. } = *sight;
        let counts =
            self.peers.get(*peer).zip(service).and_then(|(peer, place)| peer.forwards.carried.at(place));
        let upstream = || {
            let literal = || self.config.services.get(forward.service()? as usize)?.upstream.address();
            forward.tcp().and_then(|tcp| tcp.far_end()).or_else(literal)
        };
        let (uplink_bytes, downlink_bytes) = forward.bytes();
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        let stalled = sight.stalled(now);
        ForwardStatus {
            id: ForwardId::new(instance, number).to_string(),
            service: counts.map(|counts| Arc::clone(&counts.service)).unwrap_or_default(),
            opened_by: if client.is_some() { "here" } else { "peer" }.into(),
            local_address: client.or_else(upstream),
            state: forward.state().into(),
            age_seconds: seconds(since),
            uplink_bytes,
            downlink_bytes,
            stalled_seconds: stalled.map(|(since, _)| seconds(since)),
            stopped: stalled.map(|(_, [to_peer, to_tcp])| {
                match (to_peer, to_tcp) {
                    (true, true) => "both",
                    (true, false) => "peer",
                    (false, _) => "here",
                }
                .into()
            }),
            worker: self.id.index,
        }
    }
}

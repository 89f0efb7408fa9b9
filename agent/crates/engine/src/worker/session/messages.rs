//! Control messages of connected peers.

use std::time::Instant;

use dataplane::peer::Suspicion;
use quinn_proto::{ConnectionHandle, Side};
use wire::messages::Message;

use crate::{
    hub::WorkerMessage,
    worker::{context::Context, session::Sessions},
};

/// The lowest limit of a peer that counts, in bytes a second: the least that the configuration allows.
const LEAST_GRANTED: u64 = 8_000;

impl Sessions {
    /// Handles a message on the control connection of a session.
    pub(crate) fn session_message(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        message: Message,
        now: Instant,
    ) {
        let Some(mut conn) = self.conn_on(cx, handle) else { return };
        let (of, side) = (conn.of(), conn.control.side());
        match message {
            Message::LaneOpen(offer) if side == Side::Server => {
                if conn.line_fits(&offer) {
                    conn.lane_asked(&offer, now);
                } else {
                    self.out_of_order(cx, handle, now);
                }
            }
            Message::LaneAccept(offer) if side == Side::Client => conn.lane_accepted(&offer, now),
            Message::LaneRefuse(end) if side == Side::Client => conn.lane_refused(&end, now),
            Message::LaneClose(end) => conn.lane_closed(&end, now),
            // quinn-proto has noted the source address.
            Message::Here => {}
            Message::ReceiveRate { bits_per_second } => {
                let granted = Some(bits_per_second / 8).filter(|rate| *rate > 0);
                cx.hub.rates(of.peer).set_granted(granted.map(|rate| rate.max(LEAST_GRANTED)), now);
                self.control.rate_changed(of.peer);
            }
            Message::ReportsWanted { wanted } => {
                conn.cx.broadcast(|| WorkerMessage::ReportsWanted { of, wanted });
            }
            Message::PacketRepair(terms) => conn.cx.broadcast(|| WorkerMessage::PacketRepair { of, terms }),
            Message::PresharedKeys(proofs) => {
                if let Err(why) = conn.keys_shown(proofs, now) {
                    self.refuse_for_key(cx, handle, of.peer, why, now);
                }
            }
            Message::Leave if side == Side::Client => {
                conn.session.leaving = true;
                conn.suspect(Suspicion::Leaving, true);
            }
            Message::LineState(state) => {
                if !conn.line_stated(&state, now) {
                    self.out_of_order(cx, handle, now);
                }
            }
            Message::StreamsWanted if side == Side::Client => self.peer_wants_streams(cx, of.peer, now),
            Message::ServicesChanged(services) => {
                if conn.session.services != services {
                    conn.session.services.clone_from(&services);
                    conn.cx.broadcast(|| WorkerMessage::Services { of, services: services.clone() });
                }
            }
            Message::Hello(_)
            | Message::LaneOpen(_)
            | Message::LaneAccept(_)
            | Message::LaneRefuse(_)
            | Message::Join(_)
            | Message::Joined
            | Message::StreamsWanted
            | Message::Release
            | Message::StreamAbort(_)
            | Message::StreamCredit { .. }
            | Message::Leave => self.out_of_order(cx, handle, now),
        }
    }
}

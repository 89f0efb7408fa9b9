//! Reports about lanes, which an automatic rate needs: who asks for them, and who sends them.
//!
//! ```text
//!   peer.rate = "auto"                                        the peer
//!   session owner ── ReportsWanted (control message) ───────► session owner ── every worker: lanes begin to note arrivals
//!   lane host     ◄── Report, on the lane that it is about ── lane host, every 25 ms under load
//!      └──► RateAccount: the law, shared by all workers
//! ```

use std::time::Instant;

use base::ids::SessionRef;
use dataplane::lanes::{LaneId, REPORT_PACKET};

use crate::worker::context::{Context, Sockets};

impl Context {
    /// Begins or ends to note what arrives on the lanes of a session: the peer wants reports, or no longer does.
    pub(crate) fn reports_wanted(&mut self, of: SessionRef, wanted: bool, now: Instant) {
        let base = self.hub.base;
        let Some(link) = self.peers.link_named(of) else { return };
        link.reports = wanted;
        for lane in link.pool.lanes().chain(link.pool.replaced()) {
            if let Some(slot) = self.sockets.lanes.get_mut(lane) {
                slot.set_reports(wanted.then_some(base), now);
            }
        }
    }

    /// Sends the report about a lane that is due.
    pub(crate) fn send_report(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.sockets.lanes.get_mut(id) else { return };
        let Some(report) = slot.due_report(now) else { return };
        let (peer, underlay) = (slot.peer, slot.underlay);
        let Some(path) = slot.path() else { return };
        let Sockets { lanes, underlays, .. } = &mut self.sockets;
        let is_sent = underlays.packet(lanes, underlay, &path, REPORT_PACKET, now, |lanes, tail| {
            lanes.get_mut(id)?.seal_report(&report, tail, now)
        });
        if is_sent && let Some(peer) = self.peers.get_mut(peer) {
            peer.data.relay.stats.reports.sent += 1;
        }
    }
}

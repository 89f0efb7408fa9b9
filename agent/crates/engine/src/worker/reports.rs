//! Reports about lanes, which an automatic rate needs: who asks for them, and who sends them.
//!
//! ```text
//!   peer.rate = "auto"                                        the peer
//!   session owner ── ReportsWanted (control message) ───────► session owner ── every worker: lanes begin to note arrivals
//!   lane host     ◄── Report, on the lane that it is about ── lane host, every 25 ms under load
//!      └──► RateAccount: the law, shared by all workers
//! ```

use std::time::Instant;

use base::ids::{PeerId, SessionRef};
use config::Rate;
use dataplane::lanes::{LaneId, REPORT_PACKET};
use wire::messages::{Features, Message};

use crate::worker::{
    context::Context,
    parts::{LaneHost, Sessions},
};

impl Sessions {
    /// Tells a connected peer whether this end wants reports about its lanes. Warns if it does and there are none to be had.
    pub(super) fn ask_for_reports(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let account = cx.hub.rate(id);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let (Some(session), Some(link)) = (&mut peer.session, &peer.data.link) else { return };
        let is_able = !link.is_standard() && session.hello.features.contains(Features::REPORTS);
        account.set_measurable(is_able, now);
        let wanted = peer.data.config.rate == Some(Rate::Auto);
        if is_able && wanted != session.wants_reports {
            self.control.send(session.handle, &Message::ReportsWanted { wanted });
            session.wants_reports = wanted;
        }
        if wanted && !is_able {
            let why = if link.is_standard() {
                "the session has no lanes"
            } else {
                "the peer's version reports nothing"
            };
            throttled!(
                warn, peer.throttles.unmeasured.allow(now),
                { peer = &**peer.name(), why, rate_max = peer.data.config.rate_max },
                "peer.rate = \"auto\" cannot be measured; only peer.rate_max limits what is sent (remedy: lanes and this version at \
                 both ends, or a number as peer.rate)"
            );
        }
    }
}

impl LaneHost {
    /// Begins or ends to note what arrives on the lanes of a session: the peer wants reports, or no longer does.
    pub(super) fn reports_wanted(&mut self, cx: &mut Context, of: SessionRef, wanted: bool, now: Instant) {
        let base = cx.hub.base;
        let Some(link) = cx.peers.link_named(of.peer, of.session) else { return };
        link.reports = wanted;
        for lane in link.pool.lanes().chain(link.pool.replaced()) {
            if let Some(slot) = self.lanes.get_mut(lane) {
                slot.set_reports(wanted.then_some(base), now);
            }
        }
    }

    /// Sends the report about a lane that is due.
    pub(super) fn send_report(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        let Some(report) = slot.due_report(now) else { return };
        let (peer, underlay) = (slot.peer, slot.underlay);
        let Some(path) = slot.path() else { return };
        let underlays = &mut cx.sockets.underlays;
        let is_sent =
            underlays.packet(&mut self.lanes, underlay, &path, REPORT_PACKET, now, |lanes, tail| {
                lanes.get_mut(id)?.seal_report(&report, tail, now)
            });
        if is_sent && let Some(peer) = cx.peers.get_mut(peer) {
            peer.data.relay.stats.reports.sent += 1;
        }
    }
}

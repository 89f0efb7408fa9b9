//! What is published of the lines to a peer: which of them carry payloads, and why others do not.

use std::time::Instant;

use dataplane::{
    lines::{Cause, CopyCounts, LineView, MOST_LINES, Standing},
    relay::{DatagramRelay, LineQueue},
};

use crate::{
    peer::Peer,
    status::{LineState, LineStatus, Word},
    worker::{context::Context, report::lines::LineSums},
};

impl Context {
    /// The lines to a peer; none where neither end has several. The owner of the session says which of them carry payloads.
    pub(crate) fn lines_of(&self, peer: &Peer, sums: &LineSums, now: Instant) -> Vec<LineStatus> {
        let (uplinks, link) = (self.sockets.factory.uplinks(), peer.data.link.as_ref());
        // Of a session that the peer has dialled the lines are its own, and standard mode has none.
        let dials =
            link.map_or(!peer.data.config.endpoints.is_empty(), |link| link.dialled && !link.is_standard());
        let pool = link.and_then(|link| link.pool.lines.as_ref());
        let views = pool.map_or(&[][..], |pool| pool.views());
        let named = if dials { uplinks.len() } else { 0 };
        let count = sums.count().max(views.len()).max(named).min(MOST_LINES.into());
        let session = peer.session.as_ref();
        let line = |number: u8| {
            let place = usize::from(number);
            // Where the peer dials us, the numbers are its own.
            let name = uplinks.get(place).filter(|_| dials).map(|uplink| uplink.name.to_string());
            let mut status = sums.status(number, &name.unwrap_or_else(|| number.to_string()));
            if let Some((view, session)) = views.get(place).zip(session) {
                let watch = &session.line_watch;
                (status.backup, status.metered) = (view.terms.backup, view.terms.metered);
                (status.state, status.cause) = state_of(view, views, watch.cause(number));
                status.suspicions = watch.suspicions(number);
            }
            if let Some(line) = peer.data.relay.line_queues.get(place) {
                add_rate(&mut status, line, now);
            }
            status
        };
        (0..MOST_LINES).take(count).map(line).collect()
    }
}

/// Adds the rate of a line, and what waits for it at this worker.
fn add_rate(status: &mut LineStatus, line: &LineQueue, now: Instant) {
    let (account, queue) = (&line.share.account, &line.queue);
    let measured = account.auto_view(now).and_then(|view| view.measured);
    status.rate_bits_per_second = account.rate().map(|rate| rate.saturating_mul(8));
    status.capacity_bits_per_second = account.capacity().map(|capacity| capacity.saturating_mul(8));
    status.path_queue_seconds = measured.map(|measured| measured.figures.queue_delay.as_secs_f64());
    (status.queued, status.queued_bytes) = (queue.datagrams(), queue.bytes());
    status.delay_p99_seconds = queue.delays(now).map(|delays| delays.p99.as_secs_f64());
}

/// What travels on two lines between us and a peer, as this worker knows it.
pub(crate) fn copies_of(relay: &DatagramRelay) -> Option<CopyCounts> {
    let copies = relay.copies;
    (!relay.redundant.is_off() || copies != CopyCounts::default()).then_some(copies)
}

/// What a line does, beside the others, and why it does no more; `against` is what there is against it.
fn state_of(view: &LineView, views: &[LineView], against: Option<Cause>) -> (LineState, Option<Word>) {
    let against = against.map(|cause| cause.label().into());
    let Some(rank) = view.rank() else { return (LineState::Down, against) };
    let best = views.iter().filter_map(LineView::rank).min();
    match view.standing {
        Standing::Suspect => (LineState::Suspect, against),
        Standing::Well | Standing::Held if best == Some(rank) => (LineState::InUse, None),
        Standing::Held => (LineState::Held, None),
        Standing::Well if view.terms.backup => (LineState::Standby, Some("backup".into())),
        Standing::Well => (LineState::Standby, Some("metered".into())),
    }
}

#[cfg(test)]
mod tests {
    use dataplane::lines::LineTerms;

    use super::*;

    fn view(metered: bool, backup: bool, standing: Standing, up: bool) -> LineView {
        let terms = LineTerms { rate: None, weight: 1, metered, backup };
        LineView { terms, measured: None, standing, up }
    }

    #[test]
    fn a_line_is_in_use_unless_another_comes_before_it() {
        use Standing::{Held, Suspect, Well};
        let states = |views: &[LineView]| {
            let state = |view| {
                let (state, cause) = state_of(view, views, Some(Cause::Silent));
                LineStatus { state, cause, ..LineStatus::default() }.in_words()
            };
            views.iter().map(state).collect::<Vec<_>>()
        };
        let dsl = view(false, false, Well, true);
        assert_eq!(states(&[dsl, dsl]), ["in use", "in use"]);
        let (lte, backup) = (view(true, false, Well, true), view(true, true, Well, true));
        assert_eq!(states(&[dsl, lte, backup]), ["in use", "standby (metered)", "standby (backup)"]);
        let gone = view(false, false, Well, false);
        assert_eq!(states(&[gone, lte, backup]), ["down (silent)", "in use", "standby (backup)"]);
        assert_eq!(states(&[view(false, false, Suspect, true), lte]), ["suspect (silent)", "in use"]);
        assert_eq!(states(&[view(false, false, Held, true), lte]), ["held", "in use"]);
        assert_eq!(states(&[view(false, false, Held, true), gone]), ["in use", "down (silent)"]);
    }
}

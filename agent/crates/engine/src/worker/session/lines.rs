//! The lines of a session, at the worker that owns it: which of them are suspect, and what the other end is told.
//!
//! ```text
//!   lane host: nothing heard for a probe timeout ──┐                    ┌──► all workers: their tables leave the line
//!   kernel: no route, no address                 ──┼──► LineWatch ──────┼──► connections of QUIC leave it (`routes.rs`)
//!   other end: LineState, unheard                ──┘                    └──► other end: LineState, unheard
//! ```

use std::time::{Duration, Instant};

use dataplane::{
    lanes::OpeningId,
    lines::{Cause, MOST_LINES, Standing},
};
use wire::{
    line::LineState,
    messages::{Features, Message},
};

use crate::{
    hub::{HEARD_RESOLUTION, LineEvent},
    worker::{context::timer::Timer, lanes::host::TELL_INTERVAL, session::Conn},
};

/// How often a peer is pinged on all lines while none is heard: traffic flows again within a second after one is back, with the round
/// trips that this takes.
pub(super) const SEEK_INTERVAL: Duration = Duration::from_millis(450);

impl Conn<'_> {
    /// Handles a lane on which nothing was heard for `silence`, a probe timeout or more, while packets were outstanding. Its line is
    /// suspect if another line was heard meanwhile.
    ///
    /// The other lines may be idle, so they are pinged if none was heard, and the lane's host looks again.
    pub(super) fn lane_is_quiet(&mut self, of: OpeningId, silence: Duration, now: Instant) {
        let openings = &self.session.openings;
        let Some(lines) = openings.lines.as_ref().filter(|_| openings.is_up(of.index, of.epoch)) else {
            return;
        };
        let (line, up) = (lines.of_lane(of.index), openings.mask());
        if self.session.line_watch.standing(line) == Standing::Suspect {
            return;
        }
        if self.is_line_heard(line, silence.saturating_sub(HEARD_RESOLUTION), now) {
            // On another lane.
            return;
        }
        let is_other = |other: &u8| *other != line && lines.is_up(*other, up);
        let mut others = (0..MOST_LINES).filter(is_other).peekable();
        if others.peek().is_none() {
            return;
        }
        if others.any(|other| self.is_line_heard(other, silence, now)) {
            self.suspect_line(line, Cause::Silent, now);
        } else if self.session.lines_asked.is_none_or(|at| now.saturating_duration_since(at) >= TELL_INTERVAL)
        {
            self.session.lines_asked = Some(now);
            self.ask_for_life();
        }
    }

    /// Whether a line was heard less than `within` ago, on any lane and by any worker.
    fn is_line_heard(&self, line: u8, within: Duration, now: Instant) -> bool {
        self.cx.hub.line_silence(self.data.id, line, now).is_some_and(|silence| silence < within)
    }

    /// Handles what a worker says of a line.
    pub(super) fn line_event(&mut self, line: u8, event: LineEvent, now: Instant) {
        match event {
            LineEvent::Unreachable => self.suspect_line(line, Cause::Link, now),
            LineEvent::Heard(at) => self.line_is_heard(line, at, now),
        }
    }

    /// Suspects a line, and has everything leave it.
    pub(super) fn suspect_line(&mut self, line: u8, cause: Cause, now: Instant) {
        let is_known = self.session.openings.lines.as_ref().is_some_and(|lines| lines.terms(line).is_some());
        if is_known && self.session.line_watch.suspect(line, cause, now) {
            throttled!(
                warn, self.throttles.line.allow(now), { peer = self.name(), line, uplink = self.line_name(line), cause = cause.label() },
                "a line to the peer is suspect; what it carries goes over others, if there are any (remedy: the line's modem, cable or \
                 provider)"
            );
        }
        self.settle_line(line, now);
    }

    /// Notes that something arrived on a line at the time `at`.
    pub(super) fn line_is_heard(&mut self, line: u8, at: Instant, now: Instant) {
        if self.session.line_watch.heard(line, at) {
            self.note_return(line, now);
        }
        self.settle_line(line, now);
    }

    /// Notes that the line of a lane works, because the lane came up.
    pub(super) fn line_of_lane_is_heard(&mut self, of: OpeningId, now: Instant) {
        let openings = &self.session.openings;
        let lines = openings.lines.as_ref().filter(|_| openings.is_up(of.index, of.epoch));
        if let Some(line) = lines.map(|lines| lines.of_lane(of.index)) {
            self.line_is_heard(line, now, now);
        }
    }

    /// Suspects the line of a lane that is dead after `silence`, unless another lane of the line was heard meanwhile: then only the
    /// lane's port or path is dead.
    pub(super) fn line_of_lane_is_dead(&mut self, of: OpeningId, silence: Duration, now: Instant) {
        let line = self.session.openings.lines.as_ref().map(|lines| lines.of_lane(of.index));
        if let Some(line) = line
            && !self.is_line_heard(line, silence.saturating_sub(HEARD_RESOLUTION), now)
        {
            self.suspect_line(line, Cause::Silent, now);
        }
    }

    /// Handles what the peer says of a line. False if there is no such line, or it is not the peer's to say.
    pub(super) fn line_stated(&mut self, state: &LineState, now: Instant) -> bool {
        let LineState { line, unheard, terms } = *state;
        let openings = &mut self.session.openings;
        let is_known = openings.lines.as_ref().is_some_and(|lines| lines.terms(line).is_some());
        let may_say = terms.is_none() || !self.session.agreed.dialled;
        if !is_known || !may_say {
            return false;
        }
        if let Some(terms) = terms
            && openings.change_line(line, terms)
        {
            self.broadcast_lanes();
        }
        if unheard {
            self.suspect_line(line, Cause::Unheard, now);
        } else {
            if self.session.line_watch.heard_there(line, now) {
                self.note_return(line, now);
            }
            self.settle_line(line, now);
        }
        true
    }

    /// Follows what a reload has changed of this host's lines, and tells the peer.
    pub(crate) fn offer_lines(&mut self) {
        if !self.session.agreed.dialled {
            return;
        }
        let mut any = false;
        for (line, uplink) in (0..MOST_LINES).zip(&self.cx.config.transport.uplinks) {
            let terms = uplink.terms();
            if self.session.openings.change_line(line, terms) {
                any = true;
                let bit = 1_u8 << line;
                let unheard = self.session.lines_unheard & bit != 0;
                if self.session.agreed.hello.features.contains(Features::LINES) {
                    self.control.send(&Message::LineState(LineState { line, unheard, terms: Some(terms) }));
                }
            }
        }
        if any {
            self.broadcast_lanes();
        }
    }

    /// Ends the holds of lines that have been well for long enough, and pings a peer that is not heard on any line.
    pub(crate) fn lines_timeout(&mut self, now: Instant) {
        if self.session.line_watch.on_timeout(now) {
            (0..MOST_LINES).for_each(|line| self.settle_line(line, now));
        }
        let is_sought = self.link().is_some_and(|link| link.suspicions.unresponsive);
        if is_sought {
            self.ask_for_life();
        }
        self.arm_lines(is_sought.then(|| now + SEEK_INTERVAL));
    }

    /// Applies the standing of a line, and tells the peer whether this end hears it, if either has changed.
    fn settle_line(&mut self, line: u8, now: Instant) {
        let (standing, unheard) =
            (self.session.line_watch.standing(line), self.session.line_watch.is_unheard(line));
        if self.session.openings.set_standing(line, standing) {
            self.broadcast_lanes();
            if standing == Standing::Suspect {
                // Lanes of the line that are idle show that they are dead, and those of other lines that they are not.
                self.session.lines_asked = Some(now);
                self.ask_for_life();
            }
            self.arm_lines(None);
        }
        let bit = 1_u8 << (line % MOST_LINES);
        let told = self.session.lines_unheard & bit != 0;
        if told != unheard && self.session.agreed.hello.features.contains(Features::LINES) {
            self.session.lines_unheard ^= bit;
            self.control.send(&Message::LineState(LineState { line, unheard, terms: None }));
        }
    }

    fn arm_lines(&mut self, seek: Option<Instant>) {
        if let Some(at) = self.session.line_watch.deadline().into_iter().chain(seek).min() {
            self.cx.timers.arm(Timer::Lines(self.data.id), at);
        }
    }

    fn note_return(&mut self, line: u8, now: Instant) {
        throttled!(
            info, self.throttles.line_returned.allow(now), { peer = self.name(), line, uplink = self.line_name(line) },
            "a line to the peer works again; it is spared for a while"
        );
    }

    /// The name of a line of this host; `None` at the listener, whose lines are the peer's.
    fn line_name(&self, line: u8) -> Option<&str> {
        let uplinks = &self.cx.config.transport.uplinks;
        uplinks.get(usize::from(line)).filter(|_| self.session.agreed.dialled).map(|uplink| &*uplink.name)
    }
}

//! The lanes of this worker that an operator looks at: armed, emptied at the end of each turn, and let be.

use std::{sync::Arc, time::Instant};

use dataplane::lanes::{LaneId, LaneSlot, LaneState};
use quic_core::record::Recorder;

use crate::{
    capture::{Began, Capture, Note, Phase, RECORDER_RECORDS, Subject},
    worker::{
        context::Context,
        parts::{Armed, LaneHost, Sockets},
    },
};

impl LaneHost {
    /// An operator wants to look at a lane; or it is over, which the end of this turn sees to.
    pub(super) fn capture(&mut self, cx: &Context, sockets: &Sockets, capture: Arc<Capture>, now: Instant) {
        let known = self.captures.armed.iter().any(|armed| Arc::ptr_eq(&armed.capture, &capture));
        if known || capture.is_over(now) {
            return;
        }
        let Subject::Lane(index) = capture.subject else { return };
        let link = cx.peers.get(capture.peer).and_then(|peer| peer.data.link.as_ref());
        let lane = link.and_then(|link| link.pool.get(index));
        self.captures.armed.push(Armed { capture, lane: None });
        if let Some(lane) = lane {
            self.arm(sockets, self.captures.armed.len() - 1, lane, now);
        }
    }

    /// A lane was opened: an operator may be waiting for it.
    pub(super) fn capture_lane(&mut self, sockets: &Sockets, id: LaneId, now: Instant) {
        if self.captures.armed.is_empty() {
            return;
        }
        let Some(slot) = self.lanes.get(id) else { return };
        let (peer, subject) = (slot.peer, Subject::Lane(slot.index));
        let wanted = |armed: &Armed| armed.capture.peer == peer && armed.capture.subject == subject;
        if let Some(place) = self.captures.armed.iter().position(wanted) {
            self.arm(sockets, place, id, now);
        }
    }

    /// The path of a lane has been validated.
    pub(super) fn note_path(&mut self, sockets: &Sockets, id: LaneId, now: Instant) {
        let Some(place) = self.capture_of(id) else { return };
        if let Some(began) = self.began(sockets, id) {
            self.note(place, Note::Began(began), now);
        }
    }

    /// The state of a lane is another one.
    pub(super) fn note_phase(&mut self, id: LaneId, phase: Phase, now: Instant) {
        if let Some(place) = self.capture_of(id) {
            self.note(place, Note::Phase(phase), now);
        }
    }

    /// A lane is about to be gone.
    pub(super) fn end_capture_of(&mut self, id: LaneId, now: Instant) {
        if let Some(place) = self.capture_of(id) {
            self.note(place, Note::Phase(Phase::Ended), now);
            self.disarm(place);
        }
    }

    /// At the end of a turn: what was recorded goes where the control thread takes it; what is over is let be.
    pub(super) fn see_to_captures(&mut self, now: Instant) {
        for place in (0..self.captures.armed.len()).rev() {
            self.empty(place);
            let capture = &self.captures.armed[place].capture;
            if capture.is_over(now) {
                if capture.is_abandoned(now) {
                    capture.feed.abandon();
                }
                self.disarm(place);
                self.captures.armed.swap_remove(place);
            }
        }
    }

    fn capture_of(&self, id: LaneId) -> Option<usize> {
        self.captures.armed.iter().position(|armed| armed.lane == Some(id))
    }

    /// Records a lane from now on, in place of the one before.
    fn arm(&mut self, sockets: &Sockets, place: usize, id: LaneId, now: Instant) {
        self.disarm(place);
        let (Some(slot), Some(armed)) = (self.lanes.get_mut(id), self.captures.armed.get_mut(place)) else {
            return;
        };
        slot.core.record(Some(Box::new(Recorder::new(RECORDER_RECORDS, armed.capture.since))));
        armed.lane = Some(id);
        armed.capture.begin();
        let phase = phase_of(slot);
        self.note_path(sockets, id, now);
        self.note_phase(id, phase, now);
    }

    fn disarm(&mut self, place: usize) {
        self.empty(place);
        let Some(armed) = self.captures.armed.get_mut(place) else { return };
        let Some(id) = armed.lane.take() else { return };
        if let Some(slot) = self.lanes.get_mut(id) {
            slot.core.record(None);
        }
        armed.capture.lane_done();
    }

    fn empty(&mut self, place: usize) {
        let Some(Armed { capture, lane: Some(id) }) = self.captures.armed.get(place) else { return };
        if let Some(recorder) = self.lanes.get_mut(*id).and_then(|slot| slot.core.recorder_mut()) {
            capture.feed.append(recorder);
        }
    }

    /// Notes what happened after all that was recorded so far.
    fn note(&mut self, place: usize, note: Note, now: Instant) {
        self.empty(place);
        if let Some(Armed { capture, .. }) = self.captures.armed.get(place) {
            let micros = now.saturating_duration_since(capture.since).as_micros();
            capture.feed.note(u32::try_from(micros).unwrap_or(u32::MAX), note);
        }
    }

    fn began(&self, sockets: &Sockets, id: LaneId) -> Option<Box<Began>> {
        let slot = self.lanes.get(id)?;
        Some(Box::new(Began {
            local: sockets.underlays.get(slot.underlay)?.socket.local_addr(),
            remote: slot.path().map(|path| path.destination),
            local_cid: slot.local_cid,
            epoch: slot.epoch,
        }))
    }
}

fn phase_of(slot: &LaneSlot) -> Phase {
    match slot.state {
        LaneState::Validating => Phase::Validating,
        LaneState::Up => Phase::Up,
        LaneState::Draining { .. } => Phase::Draining,
    }
}

//! Captures of this worker's lanes for an operator: started, emptied at the end of each turn, and ended.

use std::{sync::Arc, time::Instant};

use dataplane::lanes::{LaneId, LaneSlot, LaneState};
use quic_core::record::Recorder;

use crate::{
    capture::{Began, Capture, Note, Phase, RECORDER_RECORDS, Subject},
    worker::{
        context::Context,
        lanes::{Armed, LaneHost},
    },
};

impl LaneHost {
    /// Starts an operator's capture of a lane of this worker. A capture that is over is left to [`LaneHost::drain_captures`].
    pub(crate) fn capture(&mut self, cx: &mut Context, capture: Arc<Capture>, now: Instant) {
        let known = self.captures.iter().any(|armed| Arc::ptr_eq(&armed.capture, &capture));
        if known || capture.is_over(now) {
            return;
        }
        let Subject::Lane(index) = capture.subject else { return };
        let link = cx.peers.get(capture.peer).and_then(|peer| peer.data.link.as_ref());
        let lane = link.and_then(|link| link.pool.get(index));
        self.captures.push(Armed { capture, lane: None });
        if let Some(lane) = lane {
            self.arm(cx, self.captures.len() - 1, lane, now);
        }
    }

    /// Starts the capture that waits for a lane, if there is one, when the lane has been opened.
    pub(crate) fn capture_lane(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        if self.captures.is_empty() {
            return;
        }
        let Some(slot) = cx.sockets.lanes.get(id) else { return };
        let (peer, subject) = (slot.peer, Subject::Lane(slot.index));
        let wanted = |armed: &Armed| armed.capture.peer == peer && armed.capture.subject == subject;
        if let Some(index) = self.captures.iter().position(wanted) {
            self.arm(cx, index, id, now);
        }
    }

    /// Records the addresses of a lane whose path has been validated.
    pub(crate) fn note_path(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        let Some(index) = self.capture_of(id) else { return };
        let Some(slot) = cx.sockets.lanes.get(id) else { return };
        let Some(underlay) = cx.sockets.underlays.get(slot.underlay) else { return };
        let began = Began {
            local: underlay.socket.local_addr(),
            remote: slot.path().map(|path| path.destination),
            local_cid: slot.local_cid,
            epoch: slot.epoch,
        };
        self.note(cx, index, Note::Began(Box::new(began)), now);
    }

    /// Records that the state of a lane has changed.
    pub(crate) fn note_phase(&mut self, cx: &mut Context, id: LaneId, phase: Phase, now: Instant) {
        if let Some(index) = self.capture_of(id) {
            self.note(cx, index, Note::Phase(phase), now);
        }
    }

    /// Ends the capture of a lane that is about to be removed.
    pub(crate) fn end_capture_of(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        if let Some(index) = self.capture_of(id) {
            self.note(cx, index, Note::Phase(Phase::Ended), now);
            self.disarm(cx, index);
        }
    }

    /// At the end of a turn: moves the recorded packets to where the control thread reads them, and ends captures that are over.
    pub(crate) fn drain_captures(&mut self, cx: &mut Context, now: Instant) {
        for index in (0..self.captures.len()).rev() {
            self.empty(cx, index);
            let capture = &self.captures[index].capture;
            if capture.is_over(now) {
                if capture.is_abandoned(now) {
                    capture.feed.abandon();
                }
                self.disarm(cx, index);
                self.captures.swap_remove(index);
            }
        }
    }

    fn capture_of(&self, id: LaneId) -> Option<usize> {
        self.captures.iter().position(|armed| armed.lane == Some(id))
    }

    /// Starts to record a lane, in index of the one that the capture recorded before.
    fn arm(&mut self, cx: &mut Context, index: usize, id: LaneId, now: Instant) {
        self.disarm(cx, index);
        let (Some(slot), Some(armed)) = (cx.sockets.lanes.get_mut(id), self.captures.get_mut(index)) else {
            return;
        };
        slot.core.record(Some(Box::new(Recorder::new(RECORDER_RECORDS, armed.capture.since))));
        armed.lane = Some(id);
        armed.capture.begin();
        let phase = phase_of(slot);
        self.note_path(cx, id, now);
        self.note_phase(cx, id, phase, now);
    }

    fn disarm(&mut self, cx: &mut Context, index: usize) {
        self.empty(cx, index);
        let Some(armed) = self.captures.get_mut(index) else { return };
        let Some(id) = armed.lane.take() else { return };
        if let Some(slot) = cx.sockets.lanes.get_mut(id) {
            slot.core.record(None);
        }
        armed.capture.lane_done();
    }

    fn empty(&mut self, cx: &mut Context, index: usize) {
        let Some(Armed { capture, lane: Some(id) }) = self.captures.get(index) else { return };
        if let Some(recorder) = cx.sockets.lanes.get_mut(*id).and_then(|slot| slot.core.recorder_mut()) {
            capture.feed.append(recorder);
        }
    }

    /// Adds a note behind everything recorded so far.
    fn note(&mut self, cx: &mut Context, index: usize, note: Note, now: Instant) {
        self.empty(cx, index);
        if let Some(Armed { capture, .. }) = self.captures.get(index) {
            let micros = now.saturating_duration_since(capture.since).as_micros();
            capture.feed.note(u32::try_from(micros).unwrap_or(u32::MAX), note);
        }
    }
}

fn phase_of(slot: &LaneSlot) -> Phase {
    match slot.state {
        LaneState::Validating => Phase::Validating,
        LaneState::Up => Phase::Up,
        LaneState::Draining { .. } => Phase::Draining,
    }
}

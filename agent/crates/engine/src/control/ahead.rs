//! The DATAGRAM frames of a peer that quinn-proto holds in standard mode, and the fate of each (pure).
//!
//! quinn-proto reports how many frames it has sent in packets, and how much memory the others take. It drops frames silently: those
//! that are too long for a path whose MTU has fallen, and all that it holds when the connection ends. So this list mirrors the
//! frames that it holds, and the dropped ones follow from the memory: quinn-proto sends the oldest first, and drops by length.

use std::collections::VecDeque;

use bytes::Bytes;
use quinn_proto::Connection;

use crate::control::transport::DATAGRAM_BUFFER_BYTES;

/// The memory that quinn-proto counts for a frame beside its data, in bytes.
const OVERHEAD_BYTES: usize = size_of::<Bytes>();

/// The frames of one connection that quinn-proto holds, oldest first.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    frames: VecDeque<Queued>,
    /// The memory that the frames take, in bytes.
    bytes: usize,
    /// The count of sent frames as of the last look.
    sent: u64,
    /// The count of received frames as of the last look.
    received: u64,
    /// The frames that the worker has taken since.
    pub(super) taken: u64,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    len: usize,
    /// Whether it carries a datagram, which the peer's account settles.
    counted: bool,
}

/// quinn-proto's counts of DATAGRAM frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    /// The number of frames that it has sent in packets so far.
    sent: u64,
    /// The memory of the frames that it holds, in bytes.
    bytes: usize,
}

impl Told {
    /// Reads the present counts from `quinn`.
    pub(super) fn by(quinn: &mut Connection) -> Self {
        let room = quinn.datagrams().send_buffer_space() + OVERHEAD_BYTES;
        Self { sent: quinn.stats().frame_tx.datagram, bytes: DATAGRAM_BUFFER_BYTES.saturating_sub(room) }
    }
}

/// The fate of frames that carry datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fates {
    /// The number of frames that were sent in packets.
    pub(super) sent: u64,
    /// The number of frames that were too long for the path.
    pub(super) too_large: u64,
}

impl Ahead {
    /// Notes that quinn-proto took a frame of `len` bytes.
    pub(super) fn push(&mut self, len: usize, counted: bool) {
        self.bytes += len + OVERHEAD_BYTES;
        self.frames.push_back(Queued { len, counted });
    }

    /// The number of the `received` frames for which quinn-proto had no room: it holds none now, and those that were taken came first.
    pub(super) fn lost(&mut self, received: u64) -> u64 {
        let taken = std::mem::take(&mut self.taken);
        received.saturating_sub(std::mem::replace(&mut self.received, received) + taken)
    }

    /// True if quinn-proto holds no frame.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The fate of frames since the last call. To be called whenever quinn-proto may have sent some: it drops frames before it
    /// sends the others.
    pub(super) fn settle(&mut self, told: Told) -> Fates {
        let mut fates = Fates::default();
        let newly = usize::try_from(told.sent - self.sent).unwrap_or(usize::MAX);
        self.sent = told.sent;
        if self.left_after(newly, usize::MAX) != told.bytes {
            let mut lengths: Vec<usize> = self.frames.iter().map(|frame| frame.len).collect();
            lengths.sort_unstable();
            lengths.dedup();
            // The longest are gone, and as few lengths as explain what is left.
            let most = lengths.iter().rev().map(|len| len.saturating_sub(1));
            let most = most.into_iter().find(|most| self.left_after(newly, *most) == told.bytes);
            debug_assert!(most.is_some(), "{self:?} {told:?}");
            let most = most.unwrap_or(usize::MAX);
            let gone = self.frames.iter().filter(|frame| frame.counted && frame.len > most);
            fates.too_large = gone.count() as u64;
            self.frames.retain(|frame| frame.len <= most);
        }
        let newly = newly.min(self.frames.len());
        fates.sent = self.frames.drain(..newly).map(|frame| u64::from(frame.counted)).sum();
        self.bytes = self.frames.iter().map(|frame| frame.len + OVERHEAD_BYTES).sum();
        fates
    }

    /// The memory in bytes that would be left if frames longer than `most` were dropped and the `newly` oldest of the others sent.
    fn left_after(&self, newly: usize, most: usize) -> usize {
        let cost = |frame: &Queued| frame.len + OVERHEAD_BYTES;
        if most == usize::MAX {
            return self.bytes - self.frames.iter().take(newly).map(cost).sum::<usize>();
        }
        self.frames.iter().filter(|frame| frame.len <= most).skip(newly).map(cost).sum()
    }

    /// Ends the list with its connection; returns the number of frames with datagrams that quinn-proto will not send.
    pub(super) fn end(&mut self) -> u64 {
        self.bytes = 0;
        self.frames.drain(..).map(|frame| u64::from(frame.counted)).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What quinn-proto does with frames: their lengths, and whether they carry datagrams.
    #[derive(Default)]
    struct Model {
        frames: VecDeque<(usize, bool)>,
        sent: u64,
    }

    impl Model {
        fn told(&self) -> Told {
            let bytes = self.frames.iter().map(|(len, _)| len + OVERHEAD_BYTES).sum();
            Told { sent: self.sent, bytes }
        }

        fn drop_oversized(&mut self, most: usize) -> u64 {
            let gone = self.frames.iter().filter(|(len, counted)| *len > most && *counted).count();
            self.frames.retain(|(len, _)| *len <= most);
            gone as u64
        }

        fn send(&mut self, most: usize) -> u64 {
            let now = most.min(self.frames.len());
            self.sent += now as u64;
            self.frames.drain(..now).map(|(_, counted)| u64::from(counted)).sum()
        }
    }

    proptest! {
        /// Whatever is pushed, dropped and sent: each frame has the fate that it had there.
        #[test]
        fn every_frame_has_one_fate(
            steps in prop::collection::vec(
                (prop::collection::vec((0..1500_usize, any::<bool>()), 0..8), prop::option::of(1..1500_usize), 0..8_usize),
                1..50,
            ),
        ) {
            let (mut ahead, mut model, mut pushed) = (Ahead::default(), Model::default(), 0);
            let (mut sum, mut last) = (Fates::default(), 0);
            for (frames, most, send) in steps {
                for (len, counted) in frames {
                    ahead.push(len, counted);
                    model.frames.push_back((len, counted));
                    pushed += u64::from(counted);
                }
                let too_large = most.map_or(0, |most| model.drop_oversized(most));
                let sent = model.send(send);
                let fates = ahead.settle(model.told());
                prop_assert_eq!(fates, Fates { sent, too_large });
                sum.sent += fates.sent;
                sum.too_large += fates.too_large;
                last = model.frames.iter().map(|(_, counted)| u64::from(*counted)).sum();
            }
            prop_assert_eq!(ahead.end(), last);
            prop_assert_eq!(sum.sent + sum.too_large + last, pushed);
            prop_assert!(ahead.is_empty());
        }
    }

    #[test]
    fn frames_that_were_taken_in_several_turns_are_not_counted_as_lost() {
        let mut ahead = Ahead::default();
        ahead.taken += 300;
        ahead.taken += 200;
        assert_eq!(ahead.lost(510), 10);
        ahead.taken += 40;
        assert_eq!(ahead.lost(550), 0);
    }
}

//! What a pass over received datagrams cost, counted and not timed: frames, and what frames ask for.
//!
//! Datagrams are what a turn is shared out by. But one of 1,400 bytes holds 700 frames, or the openings of 170 flows, and costs 1,000 times
//! as much as another. So frames are counted as they are taken, and a turn takes no more of them than [`PER_TURN`].

/// What the frames may cost that a worker takes in one turn from its sockets, as much again from other workers, and from peers in
/// standard mode; in frames, and of each the last packet, hand-off batch or batch beyond that. A frame takes 0.05 to 0.3 µs: 1 to 5 ms. A full batch of GRO
/// buffers, 1,500 packets with eleven small datagrams each, is taken whole.
pub const PER_TURN: u64 = 16_384;

/// As many frames count for as much as one datagram does where a turn is shared out between sockets.
pub const FRAMES_PER_UNIT: u64 = 16;

/// At this no flow is opened any more in the turn, whoever asks: what is handed over by another worker is taken a hand-off batch at a time, which
/// may hold the openings of thousands.
const SPENT: u64 = 4 * PER_TURN;

/// What a turn takes at the very most, in frames: [`SPENT`], and the frames of a hand-off batch beyond that, two bytes each.
pub const MOST_PER_TURN: u64 = SPENT + 64 * 1024 / 2;

/// What the opening of a flow costs beside its frame: a socket, bound, connected and watched, takes 8 to 16 µs.
pub(super) const OPENING: u64 = 63;

/// What the end of a flow costs beside its frame: the socket is closed.
pub(super) const CLOSING: u64 = 15;

/// What an answer to a frame costs beside it: a frame that is sealed, and sent.
pub(super) const ANSWER: u64 = 7;

/// What a worker took in a turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// The cost of the work done so far, in frames.
    done: u64,
    /// What it was when the share began that is being used.
    share: u64,
    frames: u64,
}

impl Work {
    /// Counts frames that are about to be taken.
    #[inline]
    pub(super) fn frames(&mut self, frames: usize) {
        self.frames += frames as u64;
        self.done += frames as u64;
    }

    /// Counts what a frame asked for.
    pub(super) fn charge(&mut self, frames: u64) {
        self.done += frames;
    }

    /// What it cost so far, in frames.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done
    }

    /// The number of frames taken so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.frames
    }

    /// Whether no flow is opened any more in this turn.
    pub(super) fn is_spent(&self) -> bool {
        self.done >= SPENT
    }

    /// Another share begins: what came from elsewhere leaves it as it is.
    pub fn begin_share(&mut self) {
        self.share = self.done;
    }

    /// Whether the share is used up.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.done - self.share >= PER_TURN
    }
}

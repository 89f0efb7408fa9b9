//! The cost of a pass over received datagrams, counted and not timed: frames, and the work that frames ask for.
//!
//! A turn is shared out by datagrams. But a datagram of 1,400 bytes may hold 700 frames, or the openings of 170 flows, and costs 1,000
//! times as much as another. So frames are counted as they are taken, and a turn takes no more of them than [`PER_TURN`].

/// The cost of the frames that a worker takes in one turn from its sockets, in frames; as much again from peers in standard mode, and
/// [`HANDED_PER_TURN`] from other workers. Each may exceed it by the last packet, hand-off batch or batch. A frame takes 0.05 to 0.3 µs:
/// 1 to 5 ms in all. A full batch of GRO buffers, 1,500 packets with eleven small datagrams each, is taken completely.
pub const PER_TURN: u64 = 16_384;

/// The same for frames from other workers. What is left waits in the ring, where its peer takes turns with others; packets in a socket
/// cannot, so they come soon again.
pub const HANDED_PER_TURN: u64 = PER_TURN / 4;

/// The number of frames that count as one datagram where a turn is shared out between sockets.
pub const FRAMES_PER_UNIT: u64 = 16;

/// The cost at which no flow is opened any more in the turn: a hand-off batch from another worker, which is taken as a whole, may hold
/// thousands of openings.
const SPENT: u64 = 4 * PER_TURN;

/// The upper bound of a turn's cost, in frames: [`SPENT`], and the frames of a hand-off batch beyond that, two bytes each, with what they
/// ask for.
pub const MOST_PER_TURN: u64 = SPENT + (1 + DELIVERY) * 64 * 1024 / 2;

/// The cost of opening a flow beside its frame: a socket, bound, connected and watched, takes 8 to 16 µs.
pub(super) const OPENING: u64 = 63;

/// The cost of ending a flow beside its frame: the socket is closed.
pub(super) const CLOSING: u64 = 15;

/// The cost of a payload that is listed for its socket beside its frame, unless it continues the run of the one before: with its frame
/// it counts as one datagram, as it takes a system call, 0.9 to 4 µs (measured with 38 payloads for as many sockets in each packet).
pub(super) const DELIVERY: u64 = FRAMES_PER_UNIT - 1;

/// The cost of a payload that waited for others and is delivered: a frame and its delivery, charged when it is due.
pub(super) const RELEASE: u64 = 1 + DELIVERY;

/// Payloads that waited and are delivered for one frame at most; the others go on in the next turns.
const RELEASED_PER_FRAME: u64 = 32;

/// The cost of all payloads that waited and are delivered for the frames of one turn, in frames. A frame may ask for 500 times what it
/// costs itself, so everybody's packets would wait for a turn's share of these.
const RELEASED_PER_TURN: u64 = PER_TURN / 4;

/// The cost of a payload that is kept until others have come, beside its frame: 0.4 µs.
pub(super) const KEPT: u64 = 2;

/// The cost of what is due for repair in one turn beside what its frames ask for, of all peers together, in frames: payloads that waited
/// and are delivered, and requests for others.
pub const DUE_PER_TURN: u64 = PER_TURN / 4;

/// The cost of a packet of a control connection beside what is in it: quinn-proto takes 3 to 8 µs for each.
pub(super) const CONTROL_PACKET: u64 = FRAMES_PER_UNIT;

/// The cost of an answer to a frame: a frame that is sealed, and sent.
pub(super) const ANSWER: u64 = 7;

/// The work that a worker did in a turn.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// The cost of the work done so far, in frames.
    pub done: u64,
    /// The cost at which the present share is used up.
    end: u64,
    /// The cost when the packet or batch in hand began.
    packet: u64,
    /// The number of frames taken so far.
    pub taken: u64,
    /// The part of [`RELEASED_PER_TURN`] that is used.
    released: u64,
    /// The part of [`DUE_PER_TURN`] that peers in standard mode have used, in frames.
    pub due: u64,
}

impl Default for Work {
    fn default() -> Self {
        Self { done: 0, end: PER_TURN, packet: 0, taken: 0, released: 0, due: 0 }
    }
}

impl Work {
    /// Counts the frames of a packet or a batch, which are about to be taken.
    #[inline]
    pub(super) fn frames(&mut self, frames: usize) {
        self.packet = self.done;
        self.taken += frames as u64;
        self.done += frames as u64;
    }

    /// Counts the work that a frame asked for.
    pub(super) fn charge(&mut self, frames: u64) {
        self.done += frames;
    }

    /// Counts payloads that waited and are delivered for a frame.
    pub(super) fn release(&mut self, payloads: usize) {
        self.released += payloads as u64 * RELEASE;
        self.done += payloads as u64 * RELEASE;
    }

    /// Whether no flow is opened any more in this turn.
    pub(super) fn is_spent(&self) -> bool {
        self.done >= SPENT
    }

    /// How many payloads that waited the frame in hand may have delivered, if its peer had `left` of its allowance before the packet.
    pub(super) fn releases(&self, left: Option<u64>) -> usize {
        if self.is_over() {
            return 0;
        }
        let of_turn = RELEASED_PER_TURN.saturating_sub(self.released);
        let of_peer = left.unwrap_or(u64::MAX).saturating_sub(self.done - self.packet);
        usize::try_from((of_turn.min(of_peer) / RELEASE).min(RELEASED_PER_FRAME)).unwrap_or(0)
    }

    /// Takes back what was charged for `frames` before: their own work is counted as it is done.
    pub(super) fn prepaid(&mut self, before: u64, frames: u64) {
        self.done = self.done.saturating_sub(frames).max(before);
    }

    /// Begins another share of the turn, which work from other sources leaves untouched.
    pub fn begin_share(&mut self, most: u64) {
        self.end = self.done + most;
    }

    /// Whether the share is used up.
    #[inline]
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.done >= self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_a_turn_release_a_part_of_it_and_no_more_than_their_peer_may_ask_for() {
        let mut work = Work::default();
        let mut released = 0;
        for _ in 0..1_000 {
            work.frames(1);
            let most = work.releases(None);
            work.release(most);
            released += most as u64;
        }
        assert_eq!(released, RELEASED_PER_TURN / RELEASE);
        let mut work = Work::default();
        work.frames(38);
        let of_packet: usize = (0..38)
            .map(|_| {
                let most = work.releases(Some(600));
                work.release(most);
                most
            })
            .sum();
        assert_eq!(of_packet as u64, (600 - 38) / RELEASE, "what is left, and not that much for each frame");
        work.frames(1);
        assert_eq!(work.releases(Some(0)), 0);
    }
}

//! Clients and services that have vanished: their forwards are reset.
//!
//! The kernel's keepalive ends a connection on which nothing waits. While bytes wait it is silent, and `TCP_USER_TIMEOUT` would also
//! end a client that has stopped reading and answers (Linux 5.11). So a connection to which a forward has passed bytes is *watched*,
//! until the kernel has delivered all of them: probes of a closed window, and repetitions, that get no answer for as long as
//! keepalive would wait end it.
//!
//! ```text
//!   served ──► watched ── nothing waits ─────────────────────────────► idle: the kernel's keepalive
//!                 │ every few seconds: TCP_INFO
//!                 └────── unanswered probes at each look, for the limit ──► vanished: reset, counted
//! ```

use std::time::{Duration, Instant};

use dataplane::forward::tcp::TcpId;
use net::{Keepalive, TcpStream, Unanswered};
use quinn_proto::ConnectionHandle;

use crate::worker::{
    context::{Context, timer::Timer},
    report::stats::TcpEnd,
    session::Sessions,
    streams::{OpenForward, TcpForwards},
};

/// The interval of looks at the connections that are due.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// Limit on connections about which the kernel is asked in one turn, at a microsecond each.
const LOOKS_PER_TURN: usize = 64;

/// The number of watched connections for which memory is kept.
const SPARE: usize = 64;

/// The keepalives of a worker's forwards, and the connections that are watched.
#[derive(Default)]
pub(crate) struct Keepalives {
    /// By [`TcpId`].
    of: Vec<Slot>,
    watched: Vec<Watched>,
    /// How many of the watched connections, from the first on, are still to be looked at in this round.
    left: usize,
    /// Whether the timer of the next look is armed.
    armed: bool,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// None: nobody asks, or there is no such forward.
    keepalive: Option<Keepalive>,
    /// Its place among the watched connections, counted from 1; 0 if it is not watched.
    place: u32,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    id: TcpId,
    /// When the kernel was last asked, or the connection was first watched.
    looked: Instant,
    /// Since when every look has found probes without an answer.
    in_vain: Option<Instant>,
}

/// The result of a look at a watched connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    /// Nothing waits any more.
    Delivered,
    Waits,
    Vanished,
}

impl Watched {
    /// Takes in what the kernel says of the connection.
    fn look(&mut self, seen: Unanswered, limit: Duration, now: Instant) -> Finding {
        self.looked = now;
        if !seen.waits {
            return Finding::Delivered;
        }
        if seen.probes == 0 {
            self.in_vain = None;
            return Finding::Waits;
        }
        let silent = |since: &Instant| seen.silence >= now.saturating_duration_since(*since);
        // Whoever has sent an ACK meanwhile is there: the probe of this look is another one.
        let since = *self.in_vain.filter(silent).get_or_insert(now);
        self.in_vain = Some(since);
        if now.saturating_duration_since(since) >= limit { Finding::Vanished } else { Finding::Waits }
    }
}

/// The time between two looks at a connection: several within the limit.
fn pause(keepalive: Keepalive) -> Duration {
    (keepalive.interval() / 2).max(TICK)
}

impl Keepalives {
    /// Begins a keepalive on the connection of a forward that is about to begin; `after` none: without one.
    pub(crate) fn begin(&mut self, id: TcpId, tcp: &dyn TcpStream, after: Option<Duration>) {
        let keepalive = after.and_then(Keepalive::after);
        if let Some(keepalive) = keepalive
            && let Err(error) = tcp.keep_alive(keepalive)
        {
            tracing::debug!(%error, "no TCP keepalive on a connection");
        }
        let place = id.0 as usize;
        if self.of.len() <= place {
            self.of.resize(place + 1, Slot::default());
        }
        self.of[place].keepalive = keepalive;
    }

    /// Watches the connection of a forward that was served; returns whether the timer is to be armed.
    #[must_use]
    pub(crate) fn served(&mut self, id: TcpId, now: Instant) -> bool {
        let Some(slot) = self.of.get_mut(id.0 as usize) else { return false };
        if slot.keepalive.is_none() || slot.place > 0 {
            return false;
        }
        self.watched.push(Watched { id, looked: now, in_vain: None });
        slot.place = u32::try_from(self.watched.len()).unwrap_or(u32::MAX);
        !std::mem::replace(&mut self.armed, true)
    }

    /// Forgets a forward that has ended.
    pub(crate) fn forget(&mut self, id: TcpId) {
        if let Some(slot) = self.of.get_mut(id.0 as usize) {
            let place = std::mem::take(slot).place;
            self.unwatch(place);
        }
    }

    fn unwatch(&mut self, place: u32) {
        let Some(index) = (place as usize).checked_sub(1).filter(|index| *index < self.watched.len()) else {
            return;
        };
        self.watched.swap_remove(index);
        if let Some(moved) = self.watched.get(index)
            && let Some(slot) = self.of.get_mut(moved.id.0 as usize)
        {
            slot.place = place;
        }
        self.left = self.left.min(self.watched.len());
    }

    /// The next connection of this round that is due.
    fn next_due(&mut self, now: Instant) -> Option<(TcpId, Keepalive)> {
        while let Some(index) = self.left.checked_sub(1) {
            self.left = index;
            let Some(Watched { id, looked, .. }) = self.watched.get(index).copied() else { continue };
            if let Some(keepalive) = self.of.get(id.0 as usize).and_then(|slot| slot.keepalive)
                && now.saturating_duration_since(looked) >= pause(keepalive)
            {
                return Some((id, keepalive));
            }
        }
        None
    }

    /// Takes in what the kernel says of a watched connection.
    fn look(&mut self, id: TcpId, seen: Unanswered, limit: Duration, now: Instant) -> Finding {
        let place = self.of.get(id.0 as usize).map_or(0, |slot| slot.place);
        let watched = (place as usize).checked_sub(1).and_then(|index| self.watched.get_mut(index));
        let finding = watched.map_or(Finding::Delivered, |watched| watched.look(seen, limit, now));
        if finding == Finding::Delivered {
            if let Some(slot) = self.of.get_mut(id.0 as usize) {
                slot.place = 0;
            }
            self.unwatch(place);
        }
        finding
    }

    /// When the timer is to fire next.
    fn next_tick(&mut self, now: Instant) -> Option<Instant> {
        self.armed = !self.watched.is_empty();
        if self.watched.capacity() > SPARE.max(4 * self.watched.len()) {
            // Thousands were opened at once, and are idle now.
            self.watched.shrink_to(SPARE.max(2 * self.watched.len()));
        }
        // The rest of a round follows in the next turn.
        self.armed.then(|| if self.left > 0 { now } else { now + TICK })
    }
}

impl TcpForwards {
    /// Looks at the watched connections that are due, and resets the forwards of those that have vanished.
    pub(crate) fn look_at_watched(&mut self, cx: &mut Context, sessions: &mut Sessions, now: Instant) {
        if self.keepalives.left == 0 {
            self.keepalives.left = self.keepalives.watched.len();
        }
        for _ in 0..LOOKS_PER_TURN {
            let Some((id, keepalive)) = self.keepalives.next_due(now) else { break };
            let Some(OpenForward { forward, .. }) = self.open.get(id.0 as usize) else { continue };
            // A connection attempt has a limit of its own.
            let tcp = forward.tcp().filter(|_| forward.open_by().is_none());
            let seen = tcp.and_then(|tcp| tcp.unanswered().ok()).unwrap_or_default();
            if self.keepalives.look(id, seen, keepalive.limit(), now) == Finding::Vanished {
                self.end_vanished(cx, sessions, id);
            }
        }
        if let Some(at) = self.keepalives.next_tick(now) {
            cx.timers.arm(Timer::Keepalive, at);
        }
    }

    /// Resets both sides of a forward whose client or service has vanished.
    fn end_vanished(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId) {
        let Some(opened) = self.open.get_mut(id.0 as usize) else { return };
        cx.note_vanished(opened);
        let OpenForward { key, forward, .. } = opened;
        if let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) {
            forward.reset(quinn);
        }
        forward.abort();
        self.remove_tcp(cx, sessions, id);
    }
}

impl Context {
    /// Notes that the client or the service of a forward has vanished: why it ends.
    pub(super) fn note_vanished(&self, opened: &mut OpenForward) {
        let OpenForward { peer, forward, sight, .. } = opened;
        let end = if forward.service().is_some() { TcpEnd::ServiceVanished } else { TcpEnd::ClientVanished };
        sight.end = Some(end);
        let (outward, inward) = forward.bytes();
        tracing::debug!(
            peer = self.peers.name(*peer),
            end = end.label(),
            service = forward.service(),
            outward,
            inward,
            "TCP forward reset: its end here does not answer"
        );
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks every 5 s with a limit of 90 s: the probes without an answer, and the seconds since the last ACK, of each.
    fn findings(looks: impl IntoIterator<Item = (u32, u32)>) -> Vec<Finding> {
        let mut now = ManualClock::default().now();
        let mut watched = Watched { id: TcpId(0), looked: now, in_vain: None };
        let look = |(probes, silence)| {
            now += 5 * SECOND;
            let seen = Unanswered { waits: true, probes, silence: silence * SECOND };
            watched.look(seen, 90 * SECOND, now)
        };
        looks.into_iter().map(look).collect()
    }

    #[test]
    fn probes_without_an_answer_for_the_limit_end_it() {
        let looks = (0..20).map(|look| (1 + look / 4, 3 + 5 * look));
        let found = findings(looks);
        assert_eq!(
            found.iter().position(|found| *found == Finding::Vanished),
            Some(18),
            "90 s after the first"
        );
    }

    #[test]
    fn a_reader_that_has_stopped_and_answers_is_never_ended() {
        // Probes come every two minutes at last, so the time since the last ACK grows beyond the limit.
        let idle = (0..2000_u32).map(|look| (0, 5 * (look % 24)));
        assert!(findings(idle).iter().all(|found| *found == Finding::Waits));
        // Each look meets a probe that is on its way.
        let unlucky = (0..2000).map(|_| (1, 4));
        assert!(findings(unlucky).iter().all(|found| *found == Finding::Waits));
        // Repetitions to a reader whose buffer is full count up although it answers each.
        let refused = (0..200).map(|look| (look, 4));
        assert!(findings(refused).iter().all(|found| *found == Finding::Waits));
    }

    #[test]
    fn an_answer_begins_the_limit_anew() {
        let silence = |look: u32| if look < 15 { 5 * look + 3 } else { 5 * (look - 15) };
        let found = findings((0..40).map(|look| (1, silence(look))));
        assert_eq!(found.iter().position(|found| *found == Finding::Vanished), Some(15 + 18));
    }

    #[test]
    fn what_is_watched_is_found_again_whoever_ends_before() {
        let now = ManualClock::default().now();
        let mut keepalives = Keepalives::default();
        let keepalive = Keepalive::after(60 * SECOND);
        keepalives.of = vec![Slot { keepalive, place: 0 }; 6];
        keepalives.of[5].keepalive = None;
        let armed: Vec<bool> = (0..6).map(|id| keepalives.served(TcpId(id), now)).collect();
        assert_eq!(armed, [true, false, false, false, false, false]);
        assert!(
            !keepalives.served(TcpId(1), now) && keepalives.watched.len() == 5,
            "once, and only with a keepalive"
        );
        keepalives.forget(TcpId(0));
        keepalives.forget(TcpId(3));
        keepalives.left = keepalives.watched.len();
        assert_eq!(keepalives.next_due(now + 4 * SECOND), None);
        keepalives.left = 3;
        let later = now + 5 * SECOND;
        let found: Vec<u32> = std::iter::from_fn(|| {
            let (id, _) = keepalives.next_due(later)?;
            keepalives.look(id, Unanswered::default(), SECOND, later);
            Some(id.0)
        })
        .collect();
        let mut sorted = found;
        sorted.sort_unstable();
        assert_eq!(sorted, [1, 2, 4]);
        assert!(keepalives.watched.is_empty() && keepalives.next_tick(later).is_none());
        assert!(keepalives.of.iter().all(|slot| slot.place == 0));
        assert!(keepalives.served(TcpId(2), later), "the timer is armed again");
    }
}

//! The line of each bucket.
//!
//! ```text
//!   idle for 1 s, or new   ──► of the best lines the one with the most room
//!   busy                   ──► stays, until its line is suspect or down, or a better one has been well for long enough
//! ```
//!
//! The best lines are those of the best standing; among these, those that cost nothing and are no backup.

use std::time::{Duration, Instant};

use wire::line::{LineTerms, MOST_LINES};

use crate::lines::{LineLoads, Standing};

/// The number of buckets, as in [`crate::relay::Stripes`].
const BUCKETS: usize = 256;

/// A bucket that was silent for this long has no packets under way on any path, and whoever sends again begins anew.
pub(super) const IDLE: Duration = Duration::from_secs(1);

/// A busy bucket that leaves a worse line for a better one waits for a pause of this length, as one that changes lanes does: what is under
/// way is not overtaken on lines of like delay.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// The part of a line's rate below which its room is that of a line that is full: a twentieth.
const FULL_PART: u128 = 20;

/// A bucket that is on no line.
const NO_LINE: u8 = u8::MAX;

/// A line, as the table sees it.
#[derive(Clone, Copy, Debug)]
pub struct LineView {
    pub terms: LineTerms,
    /// What the line carries, as it was measured, in bits a second; `None` before that.
    pub measured: Option<u64>,
    pub standing: Standing,
    /// Whether any lane of it is up.
    pub up: bool,
}

/// How a line compares with others: the least is the best.
pub type Rank = (Standing, bool, bool);

impl LineView {
    /// The rank of a line that is up.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        self.up.then_some((self.standing, self.terms.backup, self.terms.metered))
    }

    /// Bits a second that it carries, as far as that is known.
    fn capacity(&self) -> Option<u64> {
        self.measured.or(self.terms.rate)
    }
}

/// The lines of the buckets of one peer at one worker.
#[derive(Debug)]
pub struct LineTable {
    origin: Instant,
    on: [u8; BUCKETS],
    /// When each bucket last had a packet, in milliseconds.
    last: [u32; BUCKETS],
    /// When each bucket was last given a line, likewise.
    placed: [u32; BUCKETS],
    /// Times that a bucket went to another line.
    pub moved: u64,
}

/// What the table expects of a line.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    line: u8,
    capacity: Option<u64>,
    weight: u128,
    /// Bytes within the last second.
    used: u64,
    /// Buckets on it that had a packet within the last second.
    active: u128,
    /// Of these, those that were placed within the last second: what they will take is not counted yet.
    young: u128,
}

impl LineTable {
    /// Buckets that are on no line yet.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { origin: now, on: [NO_LINE; BUCKETS], last: [0; BUCKETS], placed: [0; BUCKETS], moved: 0 }
    }

    /// The line for the packets of `bucket` that come now: an index into `lines`, of which [`MOST_LINES`] count. Without a line that is
    /// up, it is the one that the bucket was on, or the first.
    #[cfg(test)]
    pub fn line(&mut self, bucket: u8, lines: &[LineView], loads: &LineLoads, now: Instant) -> u8 {
        self.stay(bucket, lines, now).unwrap_or_else(|| self.choose(bucket, lines, loads, now))
    }

    /// The line for the packets of `bucket` that come now, if they stay on the line that the bucket is on, or no line is up.
    #[inline]
    pub fn stay(&mut self, bucket: u8, lines: &[LineView], now: Instant) -> Option<u8> {
        let (index, at) = (usize::from(bucket), self.millis(now));
        let on = self.on[index];
        let silent = Duration::from_millis(at.wrapping_sub(self.last[index]).into());
        self.last[index] = at;
        let best = lines.iter().take(MOST_LINES.into()).filter_map(LineView::rank).min();
        let Some(best) = best else { return Some(if on == NO_LINE { 0 } else { on }) };
        (on != NO_LINE && stays(lines, on, best, silent)).then_some(on)
    }

    /// Gives `bucket` the best of the lines; it is not to [`stay`](Self::stay).
    pub fn choose(&mut self, bucket: u8, lines: &[LineView], loads: &LineLoads, now: Instant) -> u8 {
        let (index, at) = (usize::from(bucket), self.millis(now));
        let on = self.on[index];
        let best = lines.iter().take(MOST_LINES.into()).filter_map(LineView::rank).min();
        let Some(best) = best else { return if on == NO_LINE { 0 } else { on } };
        let line = self.best_line(lines, best, on, loads, now);
        if line != on {
            self.moved += u64::from(on != NO_LINE);
            self.on[index] = line;
        }
        self.placed[index] = at;
        line
    }

    /// The line that a bucket is on; `None` before its first packet.
    #[must_use]
    pub fn of(&self, bucket: u8) -> Option<u8> {
        Some(self.on[usize::from(bucket)]).filter(|line| *line != NO_LINE)
    }

    /// The line of the rank `best` for a bucket that was on the line `on`.
    fn best_line(&self, lines: &[LineView], best: Rank, on: u8, loads: &LineLoads, now: Instant) -> u8 {
        let numbered = (0..MOST_LINES).zip(lines);
        let of_rank = numbered.filter(|(_, view)| view.rank() == Some(best));
        let candidates: Vec<Candidate> =
            of_rank.map(|(line, view)| self.candidate(line, view, loads, now)).collect();
        let all_known = candidates.iter().all(|one| one.capacity.is_some());
        // On a tie the bucket stays where it was.
        let least = |score: &dyn Fn(&Candidate) -> u128| {
            candidates.iter().min_by_key(|one| (score(one), u128::MAX - one.weight, one.line != on))
        };
        let mean = {
            let (used, active) = candidates
                .iter()
                .fold((0, 0), |(used, active), one| (used + u128::from(one.used), active + one.active));
            (used / u128::max(active, 1)).max(1)
        };
        let chosen = if all_known && candidates.iter().any(|one| one.room() > 0) {
            least(&|one| u128::MAX - one.room())
        } else if all_known {
            least(&|one| u128::MAX - one.fair_part())
        } else {
            least(&|one| (u128::from(one.used) + one.young * mean) * WEIGHT_SCALE / one.weight)
        };
        chosen.map_or(0, |one| one.line)
    }

    fn candidate(&self, line: u8, view: &LineView, loads: &LineLoads, now: Instant) -> Candidate {
        let at = self.millis(now);
        let is_recent = |then: u32| u128::from(at.wrapping_sub(then)) < IDLE.as_millis();
        let (mut active, mut young) = (0, 0);
        for bucket in 0..BUCKETS {
            if self.on[bucket] == line && is_recent(self.last[bucket]) {
                active += 1;
                young += u128::from(is_recent(self.placed[bucket]));
            }
        }
        Candidate {
            line,
            capacity: view.capacity(),
            weight: view.terms.weight.max(1).into(),
            used: loads.last_second(line, now),
            active,
            young,
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "times are compared modulo 2^32")]
    fn millis(&self, now: Instant) -> u32 {
        // After 49 days the difference of two times wraps, and reads as a pause at worst.
        now.saturating_duration_since(self.origin).as_millis() as u32
    }
}

/// Keeps a division by a weight exact enough.
const WEIGHT_SCALE: u128 = 1 << 16;

impl Candidate {
    /// Bits a second that nothing uses, in equal parts for those that have just come and for one more; 0 if the line is as good as full.
    fn room(&self) -> u128 {
        let capacity = u128::from(self.capacity.unwrap_or(0));
        let left = capacity.saturating_sub(u128::from(self.used) * 8);
        if left < capacity / FULL_PART { 0 } else { left / (1 + self.young) }
    }

    /// The part of the line that one more bucket would have if all had the same.
    fn fair_part(&self) -> u128 {
        u128::from(self.capacity.unwrap_or(0)) / (1 + self.active)
    }
}

/// Whether a bucket that was silent for so long stays on the line `on` beside lines of the rank `best`.
fn stays(lines: &[LineView], on: u8, best: Rank, silent: Duration) -> bool {
    let Some(view) = lines.get(usize::from(on)) else { return false };
    let Some(rank) = view.rank() else { return false };
    if silent >= IDLE {
        return false;
    }
    let (standing, _, metered) = best;
    if rank == best || standing == Standing::Suspect {
        return true;
    }
    let must_leave = view.standing == Standing::Suspect;
    let costs = view.terms.metered && !metered;
    !must_leave && !costs && silent < PAUSE
}

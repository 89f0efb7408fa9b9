//! The lanes of a session over its lines.

use std::{array, sync::Arc, time::Instant};

use rate::RateAccounts;
use wire::line::{LaneLine, LineTerms, MOST_LINES};

use crate::lines::{LineLoads, LineTable, LineView, Standing};

/// The lines of a session, as both ends know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lines {
    /// The number of lanes of each line; lane `i` is on line `i / lanes`.
    lanes: u8,
    /// What is known of each line, once a lane on it was opened.
    terms: [Option<LineTerms>; MOST_LINES as usize],
    /// How well each line is.
    standings: [Standing; MOST_LINES as usize],
}

impl Lines {
    /// Lines with so many lanes each, of which nothing is known yet.
    #[must_use]
    pub fn new(lanes: u8) -> Self {
        let (terms, standings) = ([None; MOST_LINES as usize], [Standing::Well; MOST_LINES as usize]);
        Self { lanes: lanes.max(1), terms, standings }
    }

    /// The lines with these terms, in the order of their numbers.
    #[must_use]
    pub fn with(lanes: u8, terms: impl IntoIterator<Item = LineTerms>) -> Self {
        let mut terms = terms.into_iter();
        Self { terms: array::from_fn(|_| terms.next()), ..Self::new(lanes) }
    }

    /// Takes over what the opening of lane `index` says of its line. False if it has another number of lanes than the openings before.
    #[must_use]
    pub fn learn(&mut self, index: u8, line: &LaneLine) -> bool {
        let place = self.terms.get_mut(usize::from(line.number(index)));
        let Some(terms) = place.filter(|_| line.lanes == self.lanes) else { return false };
        *terms = Some(line.terms);
        true
    }

    /// Takes over what the peer says of a line without opening a lane. Returns whether that is new; never of a line on which no lane
    /// was opened.
    #[must_use]
    pub fn change(&mut self, line: u8, terms: LineTerms) -> bool {
        let known = self.terms.get_mut(usize::from(line)).and_then(Option::as_mut);
        known.is_some_and(|known| std::mem::replace(known, terms) != terms)
    }

    /// What is known of a line.
    #[must_use]
    pub fn terms(&self, line: u8) -> Option<LineTerms> {
        self.terms.get(usize::from(line)).copied().flatten()
    }

    /// Notes how well a line is. Returns whether that is new.
    pub fn set_standing(&mut self, line: u8, standing: Standing) -> bool {
        let place = self.standings.get_mut(usize::from(line));
        place.is_some_and(|place| std::mem::replace(place, standing) != standing)
    }

    /// How well a line is.
    #[must_use]
    pub fn standing(&self, line: u8) -> Standing {
        self.standings.get(usize::from(line)).copied().unwrap_or_default()
    }

    /// Whether any lane of a line is among those that are up.
    #[must_use]
    pub fn is_up(&self, line: u8, up: u64) -> bool {
        up & self.mask(line) != 0
    }

    /// The lanes of the best lines that are up, while these lanes are: those that carry payloads, one bit each.
    #[must_use]
    pub fn carrying(&self, up: u64) -> u64 {
        let views = self.views(up);
        let best = views.iter().filter_map(LineView::rank).min();
        let of_best = (0..MOST_LINES).zip(&views).filter(|(_, view)| best.is_some() && view.rank() == best);
        of_best.fold(0, |mask, (line, _)| mask | self.mask(line))
    }

    /// The number of the line that lane `index` is on.
    #[must_use]
    pub fn of_lane(&self, index: u8) -> u8 {
        index / self.lanes
    }

    /// What the opening of lane `index` says of its line.
    #[must_use]
    pub fn offer(&self, index: u8) -> Option<LaneLine> {
        let terms = self.terms.get(usize::from(self.of_lane(index))).copied().flatten()?;
        Some(LaneLine { lanes: self.lanes, terms })
    }

    /// The lanes of a line, one bit each.
    fn mask(&self, line: u8) -> u64 {
        let lanes = u64::MAX >> (u64::BITS - u32::from(self.lanes.min(64)));
        lanes.checked_shl(u32::from(line) * u32::from(self.lanes)).unwrap_or(0)
    }

    /// The lines as the table sees them, while these lanes are up.
    fn views(&self, up: u64) -> Vec<LineView> {
        let known = self.terms.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let view = |(line, terms): (u8, &Option<LineTerms>)| LineView {
            terms: terms.unwrap_or(LineTerms { rate: None, weight: 1, metered: false, backup: false }),
            measured: None,
            standing: self.standing(line),
            up: terms.is_some() && up & self.mask(line) != 0,
        };
        (0..MOST_LINES).zip(&self.terms).take(known).map(view).collect()
    }
}

/// The lines of a session at a worker: [`Lines`], and which of them are up.
#[derive(Debug)]
pub struct LinePool {
    lines: Arc<Lines>,
    views: Vec<LineView>,
    /// The lanes that are up, one bit each.
    up: u64,
}

impl LinePool {
    #[must_use]
    pub fn new(lines: Arc<Lines>, up: u64) -> Self {
        Self { views: lines.views(up), lines, up }
    }

    /// The lines by their numbers, as this worker sees them.
    #[must_use]
    pub fn views(&self) -> &[LineView] {
        &self.views
    }

    /// How well a line is.
    #[must_use]
    pub fn standing(&self, line: u8) -> Standing {
        self.lines.standing(line)
    }

    /// The best line that is up and not suspect, if it is better than `line`: where what `line` carries belongs.
    #[must_use]
    pub fn better_than(&self, line: u8) -> Option<u8> {
        let ranked = (0..MOST_LINES).zip(&self.views).filter_map(|(line, view)| Some((view.rank()?, line)));
        let (rank, best) = ranked.min().filter(|(rank, _)| rank.0 != Standing::Suspect)?;
        let on = self.views.get(usize::from(line))?;
        (LineView { up: true, ..*on }.rank()? > rank).then_some(best)
    }

    /// The number of the line that lane `index` is on.
    #[inline]
    #[must_use]
    pub fn of_lane(&self, index: u8) -> u8 {
        self.lines.of_lane(index)
    }

    /// Whether what waits for a line is to go elsewhere: it is suspect or down, and another one is neither.
    #[must_use]
    pub fn is_left(&self, line: u8) -> bool {
        let carries = |view: &LineView| view.up && view.standing != Standing::Suspect;
        !self.views.get(usize::from(line)).is_some_and(carries) && self.views.iter().any(carries)
    }

    /// The lane for what would be on lane `index` if there were one line: the lane with the same place on the line that carries the bucket,
    /// or another one of that line.
    #[inline]
    fn lane(&self, traffic: &mut LineTraffic, place: Place, now: Instant) -> u8 {
        let (LineTraffic { table, loads, rates }, Place { bucket, index }) = (traffic, place);
        let line = table.stay(bucket, &self.views, now).unwrap_or_else(|| {
            let measured = |(line, view): (u8, &LineView)| LineView {
                measured: rates.line(line).capacity().map(|bytes| bytes.saturating_mul(8)),
                ..*view
            };
            let views: Vec<LineView> = (0..MOST_LINES).zip(&self.views).map(measured).collect();
            table.choose(bucket, &views, loads, now)
        });
        self.lane_on(line, index)
    }

    /// Whether lane `index` needs no keepalives of its own: it is not the first of its line, and that costs something, or is for
    /// emergencies, and another line comes before it.
    ///
    /// A NAT may then forget its port, and gives it another one with the first packet that the dialler sends again.
    #[must_use]
    pub fn rests(&self, index: u8) -> bool {
        let line = self.lines.of_lane(index);
        let spared = |view: &&LineView| view.terms.metered || view.terms.backup;
        !index.is_multiple_of(self.lines.lanes)
            && self.views.get(usize::from(line)).filter(spared).is_some()
            && self.better_than(line).is_some()
    }

    /// The lane for copies of what goes on lane `index`: on the best other line that is up and not suspect. On a metered one only if
    /// those may be.
    #[must_use]
    pub fn second_lane(&self, index: u8, metered: bool) -> Option<u8> {
        let on = self.lines.of_lane(index);
        let others = (0..MOST_LINES).zip(&self.views).filter(|(line, view)| {
            *line != on && (metered || !view.terms.metered) && view.standing != Standing::Suspect
        });
        let (_, line) = others.filter_map(|(line, view)| Some((view.rank()?, line))).min()?;
        Some(self.lane_on(line, index))
    }

    /// The lane of a line at the place that lane `index` has on its own, or another one of the line if that is down.
    #[inline]
    fn lane_on(&self, line: u8, index: u8) -> u8 {
        let lanes = self.lines.lanes;
        let preferred = line.saturating_mul(lanes).saturating_add(index % lanes);
        let of_line = self.up & self.lines.mask(line);
        if of_line == 0 || of_line & 1_u64.checked_shl(preferred.into()).unwrap_or(0) != 0 {
            return preferred;
        }
        u8::try_from(of_line.trailing_zeros()).unwrap_or(preferred)
    }
}

/// What is about to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub bucket: u8,
    /// The lane that it would be on if there were one line.
    pub index: u8,
}

/// The lane of `place`: on the line that carries its bucket if the session has several, else the one that it names.
#[inline]
pub fn on_line(
    lines: Option<&LinePool>,
    traffic: &mut Option<Box<LineTraffic>>,
    place: Place,
    now: Instant,
) -> u8 {
    let Some(lines) = lines else { return place.index };
    match traffic {
        Some(traffic) => lines.lane(traffic, place, now),
        None => place.index % lines.lines.lanes,
    }
}

/// Counts bytes that leave on lane `index`, or are handed to its host, for the load of its line. What waits is counted when it leaves,
/// so that each byte counts once.
#[inline]
pub fn count_on_line(
    lines: Option<&LinePool>,
    traffic: Option<&LineTraffic>,
    index: u8,
    bytes: usize,
    now: Instant,
) {
    if let (Some(lines), Some(traffic)) = (lines, traffic)
        && bytes > 0
    {
        traffic.loads.add(lines.lines.of_lane(index), bytes as u64, now);
    }
}

/// What a worker sends to a peer with several lines: which buckets are on which line, and how much each line carries by all workers.
#[derive(Debug)]
pub struct LineTraffic {
    pub table: LineTable,
    loads: Arc<LineLoads>,
    /// What the lines were measured to carry.
    rates: Arc<RateAccounts>,
}

impl LineTraffic {
    #[must_use]
    pub fn new(loads: Arc<LineLoads>, rates: Arc<RateAccounts>, now: Instant) -> Self {
        Self { table: LineTable::new(now), loads, rates }
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn a_choice_of_a_lane_loads_no_line_and_what_leaves_does() {
        let now = ManualClock::default().now();
        let terms = LineTerms { rate: None, weight: 1, metered: false, backup: false };
        let pool = LinePool::new(Arc::new(Lines::with(2, [terms; 2])), 0b1111);
        let mut traffic =
            Some(Box::new(LineTraffic::new(Arc::new(LineLoads::new(now)), Arc::default(), now)));
        count_on_line(Some(&pool), None, 0, 100, now);
        let place = Place { bucket: 7, index: 1 };
        let lane = on_line(Some(&pool), &mut traffic, place, now);
        assert_eq!(on_line(Some(&pool), &mut traffic, place, now), lane, "as it waits");
        let loads = |traffic: &Option<Box<LineTraffic>>| {
            let traffic = traffic.as_ref().expect("a lane was chosen");
            [0, 1].map(|line| traffic.loads.last_second(line, now))
        };
        assert_eq!(loads(&traffic), [0, 0]);
        count_on_line(Some(&pool), traffic.as_deref(), lane, 1_200, now);
        let mut counted = [0, 0];
        counted[usize::from(lane / 2)] = 1_200;
        assert_eq!(loads(&traffic), counted);
    }
}

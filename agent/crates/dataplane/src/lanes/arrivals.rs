//! What arrives on a lane, for the reports that the far end wants, and the far end's reports (`docs/wire-format.md` §5).

use std::time::{Duration, Instant};

use base::token_bucket::{Allowance, Pace};
use quic_core::{HEADER_LEN, LaneStats, PacketNumber, TAG_LEN, frame::datagram};
use rate::auto::Sample;
use wire::{context, report::Report};

use crate::lanes::{LaneSlot, LaneState};

/// The least time between two reports about a lane.
const INTERVAL: Duration = Duration::from_millis(25);

/// Bytes that have to arrive for a report after [`INTERVAL`], so that reports take a fifteenth of the rate of what they report on at
/// most.
const LEAST_BYTES: u64 = 1_200;

/// When fewer bytes are reported.
const SPARSE_INTERVAL: Duration = Duration::from_millis(250);

/// Reports of the far end that are taken about a lane: one comes in 25 ms, but several may come at once.
const TAKEN: Pace = Pace { per_second: 100, at_once: 10 };

/// Room for a packet with a report.
pub const REPORT_PACKET: usize = HEADER_LEN + 1 + 1 + Report::MOST_BYTES + TAG_LEN;

/// Reports about a lane, in both directions.
#[derive(Debug)]
pub(super) struct Reports {
    /// `None` while the far end wants none.
    arrivals: Option<Box<Arrivals>>,
    /// How many of the far end's are taken.
    taken: Allowance,
}

impl Reports {
    pub(super) fn new(now: Instant) -> Self {
        Self { arrivals: None, taken: Allowance::new(TAKEN, now) }
    }

    /// When the next report to the far end is due; `None` if there is nothing to report on.
    #[inline]
    pub(super) fn due(&self, stats: &LaneStats) -> Option<Instant> {
        self.arrivals.as_deref()?.due(stats)
    }
}

/// Arrivals on one lane, while the far end wants reports.
#[derive(Debug)]
struct Arrivals {
    /// The zero of the clock of all reports of this agent.
    base: Instant,
    /// The highest number, and when it arrived.
    highest: Option<(u64, Instant)>,
    marked: u64,
    /// The far end's own reports: they are nothing to report on.
    reports: u64,
    reported: Reported,
}

#[derive(Clone, Copy, Debug)]
struct Reported {
    at: Instant,
    /// DATAGRAM frames that had arrived, without reports.
    datagrams: u64,
    bytes: u64,
}

impl Arrivals {
    /// Begins with what arrives from `now` on; `stats` is the lane's.
    fn new(base: Instant, stats: &LaneStats, now: Instant) -> Self {
        let reported = Reported { at: now, datagrams: stats.datagrams_received, bytes: stats.opened_bytes };
        Self { base, highest: None, marked: 0, reports: 0, reported }
    }

    #[inline]
    fn note(&mut self, number: u64, at: Instant) {
        if self.highest.is_none_or(|(highest, _)| number > highest) {
            self.highest = Some((number, at));
        }
    }

    #[inline]
    fn due(&self, stats: &LaneStats) -> Option<Instant> {
        let has_more = stats.datagrams_received.saturating_sub(self.reports) > self.reported.datagrams;
        let bytes = stats.opened_bytes - self.reported.bytes;
        has_more.then(|| self.reported.at + if bytes >= LEAST_BYTES { INTERVAL } else { SPARSE_INTERVAL })
    }

    /// The report that is due by `now`; `headers` are those of each packet, in bytes.
    fn take(&mut self, stats: &LaneStats, headers: u64, now: Instant) -> Option<Report> {
        self.due(stats).filter(|at| *at <= now)?;
        let (highest, at) = self.highest?;
        let datagrams = stats.datagrams_received.saturating_sub(self.reports);
        self.reported = Reported { at: now, datagrams, bytes: stats.opened_bytes };
        Some(Report {
            highest,
            arrived_micros: u64::try_from(at.saturating_duration_since(self.base).as_micros()).ok()?,
            packets: stats.opened_packets,
            bytes: stats.opened_bytes + stats.opened_packets * headers,
            marked: self.marked,
        })
    }
}

impl LaneSlot {
    /// Begins to collect what the far end wants to know about arrivals, by a clock whose zero is `base`; `None` ends it.
    pub fn set_reports(&mut self, base: Option<Instant>, now: Instant) {
        if base.is_some() != self.reports.arrivals.is_some() {
            self.reports.arrivals = base.map(|base| Box::new(Arrivals::new(base, self.core.stats(), now)));
        }
    }

    /// Notes that packet `number` arrived, `age` before `now`.
    #[inline]
    pub(crate) fn note_arrival(&mut self, number: PacketNumber, now: Instant, age: Duration) {
        if let Some(arrivals) = self.reports.arrivals.as_deref_mut() {
            arrivals.note(number.0, now.checked_sub(age).unwrap_or(now));
        }
    }

    /// Notes packets that the path has marked.
    pub(crate) fn note_marked(&mut self, packets: u64) {
        if let Some(arrivals) = self.reports.arrivals.as_deref_mut() {
            arrivals.marked += packets;
        }
    }

    /// The report to the far end that is due.
    pub fn due_report(&mut self, now: Instant) -> Option<Report> {
        let headers = self.paths.outer_headers();
        let arrivals = self.reports.arrivals.as_deref_mut().filter(|_| self.state == LaneState::Up)?;
        arrivals.take(self.core.stats(), headers, now)
    }

    /// Seals a report at the front of `packet`, which has [`REPORT_PACKET`] bytes: the length.
    pub fn seal_report(&mut self, report: &Report, packet: &mut [u8], now: Instant) -> Option<usize> {
        let frame = packet.get_mut(HEADER_LEN..)?;
        let start = datagram::write_header_to_end(frame)?;
        *frame.get_mut(start)? = context::REPORT;
        let len = HEADER_LEN + start + 1 + report.encode(frame.get_mut(start + 1..)?)? + TAG_LEN;
        self.core.seal(packet.get_mut(..len)?, true, now).ok()?;
        self.core.count_datagrams_sent(1);
        Some(len)
    }

    /// Takes a report of the far end; `None` if it came too early, if the lane is about to end, or if it names packets that were not
    /// sent or are long forgotten.
    pub(crate) fn take_report(&mut self, report: &Report, now: Instant) -> Option<Sample> {
        if let Some(arrivals) = self.reports.arrivals.as_deref_mut() {
            arrivals.reports += 1;
        }
        if !self.is_up() || !self.reports.taken.take(1, now) || report.packets > report.highest + 1 {
            return None;
        }
        let rtt = self.core.rtt();
        Some(Sample {
            lane: self.index,
            epoch: u64::from_be_bytes(self.local_cid.0).wrapping_add(self.paths.changes()),
            sent_at: self.core.sent_at(report.highest, now)?,
            arrived_micros: report.arrived_micros,
            packets_sent: report.highest + 1,
            packets: report.packets,
            bytes: report.bytes,
            marked: report.marked,
            smoothed_rtt: rtt.smoothed(),
            min_rtt: rtt.min().unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn reports_come_under_load_only_and_never_too_often() {
        let start = ManualClock::default().now();
        let ms = |ms| start + Duration::from_millis(ms);
        let mut stats = LaneStats { opened_packets: 5, opened_bytes: 500, ..LaneStats::default() };
        let mut arrivals = Arrivals::new(start, &stats, start);
        // Acknowledgements.
        stats.opened_packets += 100;
        stats.opened_bytes += 3_000;
        arrivals.note(104, ms(1));
        assert_eq!(arrivals.due(&stats), None);
        // A small datagram, then enough.
        let before = stats.opened_bytes;
        arrivals.reported.bytes = before;
        stats = LaneStats { datagrams_received: 1, opened_bytes: before + 100, opened_packets: 106, ..stats };
        arrivals.note(106, ms(2));
        arrivals.note(105, ms(3));
        assert_eq!(arrivals.due(&stats), Some(ms(250)));
        stats.opened_bytes += 1_200;
        assert_eq!(arrivals.due(&stats), Some(ms(25)));
        assert_eq!(arrivals.take(&stats, 28, ms(24)), None);
        arrivals.marked += 2;
        let report = arrivals.take(&stats, 28, ms(26)).unwrap();
        let bytes = stats.opened_bytes + 106 * 28;
        assert_eq!(report, Report { highest: 106, arrived_micros: 2_000, packets: 106, bytes, marked: 2 });
        assert_eq!(arrivals.due(&stats), None, "nothing new");
        // What the far end reports is no load.
        stats.datagrams_received += 3;
        stats.opened_bytes += 3_000;
        arrivals.reports += 3;
        assert_eq!(arrivals.due(&stats), None);
        stats.datagrams_received += 1;
        assert_eq!(arrivals.due(&stats), Some(ms(51)));
    }
}

//! Reports of the far end: the queue on the path, the rate of delivery and what the path loses, over all lanes of a peer.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use super::skew::{Floor, Skew};

/// One report of the far end about one lane.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The lane's index in the peer's pool; from [`CONNECTIONS`] on the number of a connection whose packets the far end acknowledged.
    pub lane: u8,
    /// Changes when the lane is opened anew or its path moves; totals and one-way delays of two epochs are not compared.
    pub epoch: u64,
    /// When the packet with the highest number left.
    pub sent_at: Instant,
    /// When that packet arrived, in microseconds of the far end's clock, whose offset and rate are its own. Of a connection: when it was
    /// acknowledged, by our clock.
    pub arrived_micros: u64,
    /// Packets that left on the lane up to and including that one: its number and one.
    pub packets_sent: u64,
    /// Packets that arrived on the lane.
    pub packets: u64,
    /// Bytes of IP packets that arrived on the lane.
    pub bytes: u64,
    /// Packets that arrived marked CE and that we did not mark ourselves.
    pub marked: u64,
    pub smoothed_rtt: Duration,
    pub min_rtt: Duration,
}

/// The index of the first connection among lanes. Its queue delay is that of a round trip, which contains the way back and the wait for
/// an acknowledgement, so that it counts only while no lane is reported on.
pub const CONNECTIONS: u8 = 64;

/// Totals over all lanes of a peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) packets_sent: f64,
    pub(super) packets: f64,
    pub(super) bytes: f64,
    pub(super) marked: f64,
}

impl Totals {
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            packets_sent: self.packets_sent - before.packets_sent,
            packets: self.packets - before.packets,
            bytes: self.bytes - before.bytes,
            marked: self.marked - before.marked,
        }
    }

    pub(super) fn lost(self) -> f64 {
        (self.packets_sent - self.packets).max(0.0)
    }
}

/// The reports of 5 ms, of whichever lanes. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// The time of arrival, by the far end's clock.
    pub(super) arrived: f64,
    /// When the newest packet of the record left.
    pub(super) sent: f64,
    /// How long the packets waited in queues on the path: the mean over the lanes, by their bytes.
    pub(super) queue: f64,
    weight: f64,
    pub(super) totals: Totals,
}

#[derive(Debug)]
struct Lane {
    epoch: u64,
    arrived_micros: u64,
    totals: Totals,
    floor: Floor,
    /// The floor was seen while the path's queue was known to be empty.
    is_settled: bool,
    /// The last two queue delays, the newest first.
    recent: [f64; 2],
    /// What the reports say of arrivals, the newest last.
    arrivals: VecDeque<Arrival>,
}

#[derive(Clone, Copy, Debug)]
struct Arrival {
    at: f64,
    sent: f64,
    /// Bytes that had arrived until then.
    bytes: f64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivery {
    /// Bytes a second.
    pub(super) rate: f64,
    /// Seconds by which the queue grew for each second of sending; negative: it fell.
    pub(super) growth: f64,
}

/// Reports of a lane that are kept: 0.6 s of them.
const ARRIVALS: usize = 24;

/// A lane that was not reported on for so many seconds carries nothing.
const STALE: f64 = 0.25;

impl Lane {
    fn delivery(&self, since: f64) -> Option<Delivery> {
        let newest = self.arrivals.back()?;
        let first = self.arrivals.partition_point(|arrival| arrival.at < since);
        let oldest = self.arrivals.get(first.min(self.arrivals.len().checked_sub(2)?))?;
        let (arriving, sending) = (newest.at - oldest.at, newest.sent - oldest.sent);
        (arriving > 0.0 && sending > 0.0).then(|| Delivery {
            rate: (newest.bytes - oldest.bytes) / arriving,
            growth: arriving / sending - 1.0,
        })
    }
}

/// What the far end reported about one peer's lanes.
#[derive(Debug)]
pub(super) struct Reports {
    start: Instant,
    /// The first arrival by the far end's clock, and by ours, with the time at which its packet left.
    clocks: [Option<(u64, f64)>; 2],
    /// When a lane was last reported on.
    lane_reported: f64,
    /// The last report was about a connection.
    was_connection: bool,
    lanes: Vec<Option<Lane>>,
    records: VecDeque<Record>,
    totals: Totals,
    pub(super) skew: Skew,
    skew_lane: u8,
    /// How much one-way delays differ from report to report, in seconds.
    pub(super) noise: f64,
    pub(super) smoothed_rtt: f64,
    /// The smoothed round trip's part above the shortest, of the last lane that reported, in seconds.
    pub(super) rtt_excess: f64,
    reported: f64,
}

/// Width of a record in seconds, and how many are kept: at 25 ms a lane, 1.28 s with five lanes or more.
const STEP: f64 = 0.005;
const LENGTH: usize = 256;

/// Delays that vary by more are not noise, but queues of others.
const MOST_NOISE: f64 = 0.006;

/// Seconds without a report after which floors begin anew: 10 ms is what clocks may have drifted by then.
const FORGET: f64 = 20.0;

/// One-way delays that differ by more mean that a clock was set.
const CLOCK_SET: f64 = 10.0;

/// A lane that was not known, and whose one-way delay is shorter by more seconds than that of the newest record, was reported on by a
/// process that began later: its clock has another zero.
const CLOCK_ANEW: f64 = 1.0;

impl Reports {
    pub(super) fn new(start: Instant) -> Self {
        Self {
            start,
            clocks: [None; 2],
            lane_reported: f64::NEG_INFINITY,
            was_connection: false,
            lanes: Vec::new(),
            records: VecDeque::with_capacity(LENGTH),
            totals: Totals::default(),
            skew: Skew::default(),
            skew_lane: 0,
            noise: 0.0,
            smoothed_rtt: 0.1,
            rtt_excess: 0.0,
            reported: 0.0,
        }
    }

    /// Takes a report; `is_drained`: no packet that left as late as that one found a queue of ours; `is_steady`: the queue does
    /// not change on our account.
    pub(super) fn push(&mut self, sample: &Sample, is_drained: bool, is_steady: bool, now: f64) {
        if now - self.reported > FORGET {
            self.forget();
        }
        self.reported = now;
        let sent = sample.sent_at.saturating_duration_since(self.start).as_secs_f64();
        let is_connection = sample.lane >= CONNECTIONS;
        let arrived = self.arrival(sample, sent, now);
        self.was_connection = is_connection;
        if !is_connection {
            self.lane_reported = now;
        }
        let delay = arrived - sent;
        let totals = Totals {
            packets_sent: sample.packets_sent as f64,
            packets: sample.packets as f64,
            bytes: sample.bytes as f64,
            marked: sample.marked as f64,
        };
        let skew = self.skew.estimate;
        let index = usize::from(sample.lane);
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, || None);
        }
        let is_known = self.is_known(sample);
        if !is_known {
            if sample.lane == self.skew_lane {
                self.skew.restart();
            }
            self.lanes[index] = Some(Lane {
                epoch: sample.epoch,
                arrived_micros: sample.arrived_micros,
                totals,
                floor: Floor::new(arrived, delay),
                is_settled: false,
                recent: [0.0; 2],
                arrivals: VecDeque::with_capacity(ARRIVALS),
            });
        }
        let any_settled = self.lanes.iter().flatten().any(|lane| lane.is_settled);
        let Some(lane) = self.lanes[index].as_mut() else { return };
        let queue = lane.floor.excess(arrived, delay, skew);
        if queue > CLOCK_SET {
            lane.floor = Floor::new(arrived, delay);
            lane.is_settled = false;
        }
        if is_drained {
            lane.is_settled = true;
            if let Some((at, least)) = lane.floor.turn(arrived, delay)
                && sample.lane == self.skew_lane
            {
                self.skew.push(at, least);
            }
        }
        if is_steady {
            let bend = (queue - 2.0 * lane.recent[0] + lane.recent[1]).abs() / 2.0;
            self.noise = (self.noise + (bend - self.noise) / 16.0).min(MOST_NOISE);
        }
        lane.recent = [queue, lane.recent[0]];
        let more = totals.since(lane.totals);
        lane.totals = totals;
        lane.arrived_micros = sample.arrived_micros;
        if lane.arrivals.len() == ARRIVALS {
            lane.arrivals.pop_front();
        }
        lane.arrivals.push_back(Arrival { at: arrived, sent, bytes: totals.bytes });
        let is_outdone = is_connection && now - self.lane_reported < STALE;
        let counts = (lane.is_settled || !any_settled) && !is_outdone;
        self.smoothed_rtt += (sample.smoothed_rtt.as_secs_f64() - self.smoothed_rtt)
            / if self.records.is_empty() { 1.0 } else { 4.0 };
        self.rtt_excess = sample.smoothed_rtt.saturating_sub(sample.min_rtt).as_secs_f64();
        self.add(arrived, sent, counts.then_some(queue), more);
    }

    /// Whether a report continues those before it about its lane.
    fn is_known(&self, sample: &Sample) -> bool {
        self.lanes.get(usize::from(sample.lane)).and_then(Option::as_ref).is_some_and(|lane| {
            lane.epoch == sample.epoch
                && sample.arrived_micros >= lane.arrived_micros
                && sample.packets as f64 >= lane.totals.packets
                && sample.packets_sent as f64 >= lane.totals.packets_sent
        })
    }

    /// When the packet of a report that left at `sent` arrived, in seconds of the clock that it was reported by.
    ///
    /// That clock has no common zero with that of the records before if it is another process's, and drifts away from it in
    /// weeks if one is a connection's. It is set anew then: records are in the order of their arrival.
    fn arrival(&mut self, sample: &Sample, sent: f64, now: f64) -> f64 {
        let is_connection = sample.lane >= CONNECTIONS;
        let by = |(first, offset): (u64, f64)| {
            offset + sample.arrived_micros.wrapping_sub(first).cast_signed() as f64 * 1e-6
        };
        let arrived =
            by(*self.clocks[usize::from(is_connection)].get_or_insert((sample.arrived_micros, sent)));
        let Some(newest) = self.newest().copied() else { return arrived };
        let change = (arrived - sent) - (newest.arrived - newest.sent);
        if is_connection {
            if self.was_connection || change.abs() <= CLOCK_ANEW {
                return arrived;
            }
            let arrived = newest.arrived + (sent - newest.sent).max(0.0);
            self.clocks[1] = Some((sample.arrived_micros, arrived));
            self.lanes.truncate(CONNECTIONS.into());
            return arrived;
        }
        let is_other = !self.is_known(sample) || now - self.lane_reported > FORGET;
        if is_other && !(-CLOCK_ANEW..=CLOCK_SET).contains(&change) {
            self.forget();
            self.clocks[0] = Some((sample.arrived_micros, sent));
            return sent;
        }
        arrived
    }

    fn add(&mut self, arrived: f64, sent: f64, queue: Option<f64>, more: Totals) {
        self.totals.packets_sent += more.packets_sent;
        self.totals.packets += more.packets;
        self.totals.bytes += more.bytes;
        self.totals.marked += more.marked;
        let weight = queue.map_or(0.0, |_| more.bytes.max(1.0));
        let totals = self.totals;
        match self.records.back_mut() {
            Some(last) if arrived - last.arrived < STEP => {
                if let Some(queue) = queue {
                    last.queue = (last.queue * last.weight + queue * weight) / (last.weight + weight);
                    last.weight += weight;
                }
                last.sent = last.sent.max(sent);
                last.totals = totals;
            }
            last => {
                let queue = queue.or_else(|| last.map(|last| last.queue)).unwrap_or(0.0);
                if self.records.len() == LENGTH {
                    self.records.pop_front();
                }
                self.records.push_back(Record { arrived, sent, queue, weight, totals });
            }
        }
    }

    pub(super) fn newest(&self) -> Option<&Record> {
        self.records.back()
    }

    /// Records, the newest first, whose packets left at `since` or later.
    pub(super) fn back_to(&self, since: f64) -> impl Iterator<Item = &Record> {
        self.records.iter().rev().take_while(move |record| record.sent >= since)
    }

    /// The least queue delay of `reports` records and `span` seconds, of packets that left at `since` or later; `None` while
    /// there are fewer.
    pub(super) fn least_queue(&self, since: f64, reports: usize, span: f64) -> Option<f64> {
        let newest = self.newest()?.arrived;
        let (mut least, mut count) = (f64::MAX, 0);
        for record in self.back_to(since) {
            least = least.min(record.queue);
            count += 1;
            if count >= reports && newest - record.arrived >= span {
                return Some(least);
            }
        }
        None
    }

    /// What arrived in the last `span` seconds, over all lanes.
    pub(super) fn delivery(&self, span: f64) -> Option<Delivery> {
        let newest = self.newest()?.arrived;
        let lanes = self.lanes.iter().flatten();
        let fresh = lanes.filter(|lane| lane.arrivals.back().is_some_and(|last| newest - last.at < STALE));
        let mut all = Delivery::default();
        for delivery in fresh.filter_map(|lane| lane.delivery(newest - span)) {
            all.rate += delivery.rate;
            all.growth += delivery.growth * delivery.rate;
        }
        (all.rate > 0.0).then(|| Delivery { growth: all.growth / all.rate, ..all })
    }

    /// Seconds for which packets have been finding a queue longer than `least`, without a break.
    pub(super) fn busy_span(&self, least: f64) -> f64 {
        let Some(newest) = self.newest() else { return 0.0 };
        let busy = self.records.iter().rev().take_while(|record| record.queue > least).last();
        busy.map_or(0.0, |oldest| newest.arrived - oldest.arrived)
    }

    /// Totals of packets that left at `since` or later, as far as they were reported.
    pub(super) fn totals_since(&self, since: f64) -> Totals {
        let oldest = self.back_to(since).last();
        oldest.map_or_else(Totals::default, |oldest| self.totals.since(oldest.totals))
    }

    /// The median of the queue delays that are remembered, in seconds.
    pub(super) fn median_queue(&self) -> f64 {
        let mut queues: Vec<f64> = self.records.iter().map(|record| record.queue).collect();
        let middle = queues.len() / 2;
        if queues.is_empty() { 0.0 } else { *queues.select_nth_unstable_by(middle, f64::total_cmp).1 }
    }

    /// Takes a queue of `delay` for the path's own delay: the path became longer, or a clock was set.
    pub(super) fn raise_floors(&mut self, delay: f64) {
        for lane in self.lanes.iter_mut().flatten() {
            lane.floor.raise(delay);
        }
        for record in &mut self.records {
            record.queue = (record.queue - delay).max(0.0);
        }
        self.skew.restart();
    }

    /// Begins every lane and every clock anew, after a silence in which clocks drifted by an unknown amount, or with another far
    /// end.
    fn forget(&mut self) {
        self.clocks = [None; 2];
        self.lanes.clear();
        self.records.clear();
        self.skew.restart();
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock as _, ManualClock};

    use super::*;

    /// A report about `lane`, 25 ms after the one before, by a clock that gains `gain` on ours.
    fn sample(lane: u8, start: Instant, tick: u32, gain: f64) -> Sample {
        let sent = f64::from(tick) * 0.025;
        Sample {
            lane,
            epoch: 0,
            sent_at: start + Duration::from_secs_f64(sent),
            arrived_micros: ((sent + 0.01) * (1.0 + gain) * 1e6) as u64,
            packets_sent: u64::from(tick),
            packets: u64::from(tick),
            bytes: u64::from(tick) * 1_500,
            marked: 0,
            smoothed_rtt: Duration::from_millis(20),
            min_rtt: Duration::from_millis(20),
        }
    }

    /// Whether the newest records are apart at each end of ten minutes, after reports about a connection, then about a lane whose
    /// clock gains `gain`, then about both, and about one of them.
    fn are_apart(gain: f64, ends_with_lane: bool) -> bool {
        const TICKS: u32 = 24_000;
        let start = ManualClock::default().now();
        let mut reports = Reports::new(start);
        for tick in 1..TICKS {
            let is_connection = match TICKS - tick {
                0..20 => !ends_with_lane,
                20..60 => tick % 2 == 0,
                _ => tick < 4,
            };
            let sample = if is_connection {
                sample(CONNECTIONS, start, tick, 0.0)
            } else {
                sample(0, start, tick, gain)
            };
            reports.push(&sample, true, true, f64::from(tick) * 0.025 + 0.02);
        }
        reports.least_queue(f64::from(TICKS) * 0.025 - 0.4, 8, 0.15).is_some()
    }

    #[test]
    fn a_clock_that_has_drifted_away_from_ours_blinds_nothing() {
        for gain in [-0.05, -0.005, 0.0, 0.005, 0.05] {
            for ends_with_lane in [true, false] {
                assert!(are_apart(gain, ends_with_lane), "{gain}, the lane at last: {ends_with_lane}");
            }
        }
    }
}

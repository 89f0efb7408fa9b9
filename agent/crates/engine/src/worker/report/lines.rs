//! Sums over the lanes of each line of a peer, for what is published.

use dataplane::lanes::LaneSlot;
use quic_core::LaneStats;

use crate::status::{LineStatus, add_lane};

/// The sums over the lanes of each line of a peer at one worker, by the numbers of the lines; made with the first lane on a line.
#[derive(Clone, Debug, Default)]
pub(crate) struct LineSums(Vec<LineSum>);

/// The sum over the lanes of a line.
#[derive(Clone, Debug, Default)]
struct LineSum {
    stats: LaneStats,
    lanes_up: u32,
    rtt_seconds: Option<f64>,
    packet_bytes: Option<usize>,
    sent_per_second: f64,
    received_per_second: f64,
}

impl LineSums {
    fn of(&mut self, line: u8) -> &mut LineSum {
        let place = usize::from(line);
        if self.0.len() <= place {
            self.0.resize_with(place + 1, LineSum::default);
        }
        &mut self.0[place]
    }

    /// Adds the counts of a lane that has ended, or of several.
    pub(crate) fn retire(&mut self, line: u8, stats: &LaneStats) {
        add_lane(&mut self.of(line).stats, stats);
    }

    /// Adds a lane that there is.
    pub(crate) fn add(&mut self, slot: &LaneSlot) {
        let Some(line) = slot.line else { return };
        let sum = self.of(line);
        add_lane(&mut sum.stats, slot.core.stats());
        if !slot.is_up() {
            return;
        }
        let rtt = slot.core.rtt();
        sum.lanes_up += 1;
        sum.rtt_seconds = sum.rtt_seconds.or_else(|| rtt.latest().map(|_| rtt.smoothed().as_secs_f64()));
        let budget = slot.size.budget();
        sum.packet_bytes = Some(sum.packet_bytes.map_or(budget, |bytes| bytes.min(budget)));
        if let Some(last) = slot.meter.growth() {
            sum.sent_per_second += last.per_second(|it| it.sent_bytes);
            sum.received_per_second += last.per_second(|it| it.received_bytes);
        }
    }

    /// The number of lines of which something is known.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The sums of a line as an operator is shown them.
    pub(crate) fn status(&self, number: u8, name: &str) -> LineStatus {
        let LineSum { stats, lanes_up, rtt_seconds, packet_bytes, sent_per_second, received_per_second } =
            self.0.get(usize::from(number)).cloned().unwrap_or_default();
        LineStatus {
            number,
            name: name.into(),
            lanes_up,
            rtt_seconds,
            packet_bytes,
            sent_bytes_per_second: sent_per_second,
            received_bytes_per_second: received_per_second,
            sent_packets: stats.sealed_packets,
            sent_bytes: stats.sealed_bytes,
            received_packets: stats.opened_packets,
            received_bytes: stats.opened_bytes,
            lost_packets: stats.missing_packets(),
            ..LineStatus::default()
        }
    }
}

//! The results of a run, as a table and as JSON.

use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::bench::{
    datagram::Direction,
    probe::RoundTrip,
    search::{Search, Step},
    sender::Sent,
    tally::Counts,
};

/// The results of one direction of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct OneWay {
    pub(super) sent: Sent,
    pub(super) counts: Counts,
    pub(super) corrupt: u64,
    pub(super) kernel_drops: u64,
    /// From the sender's call to the receiver's; none where they have no clock in common.
    pub(super) one_way: Option<Histogram<u64>>,
    /// The time that the receiver took for what it counted, not less than the sender sent.
    pub(super) seconds: f64,
}

/// The results of a whole run.
#[derive(Clone, Debug)]
pub(super) struct Results {
    pub(super) mode: &'static str,
    pub(super) direction: Direction,
    pub(super) size: u16,
    pub(super) flows: u32,
    pub(super) burst: u16,
    pub(super) offered_bps: Option<u64>,
    pub(super) up: Option<OneWay>,
    pub(super) down: Option<OneWay>,
    pub(super) round_trip: Option<RoundTrip>,
    /// CPU time of this process while it counted.
    pub(super) cpu_seconds: f64,
    /// The time for which the senders counted.
    pub(super) seconds: f64,
}

impl Results {
    fn ways(&self) -> impl Iterator<Item = (&'static str, &OneWay)> {
        [("up", &self.up), ("down", &self.down)]
            .into_iter()
            .filter_map(|(name, way)| way.as_ref().map(|way| (name, way)))
    }

    /// Whether a direction received no datagram at all.
    pub(super) fn received_nothing(&self) -> bool {
        self.ways().any(|(_, way)| way.counts.distinct == 0)
    }

    fn bits(&self, datagrams: u64) -> f64 {
        datagrams as f64 * f64::from(self.size) * 8.0
    }

    fn sent_bps(&self, way: &OneWay) -> f64 {
        self.bits(way.sent.datagrams) / self.seconds
    }

    fn received_bps(&self, way: &OneWay) -> f64 {
        self.bits(way.counts.distinct) / way.seconds
    }

    /// The sums of both directions, as one.
    fn total(&self) -> OneWay {
        let both = self.ways().map(|(_, way)| way.clone());
        both.reduce(OneWay::plus).unwrap_or_default()
    }

    /// The step that a search learns from.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rates far below 2^63")]
    pub(super) fn outcome(&self) -> Step {
        let total = self.total();
        Step {
            offered_bps: self.offered_bps,
            sent_bps: self.sent_bps(&total) as u64,
            received_bps: self.received_bps(&total) as u64,
            loss: self.ways().map(|(_, way)| way.loss()).fold(0.0, f64::max),
        }
    }

    /// One line about a step of a search.
    pub(super) fn line(&self, search: &Search) -> String {
        let step = self.outcome();
        format!(
            "step {:>2}   {} bytes   offered {:>12}   sent {:>12}   received {:>12}   lost {:.3} %",
            search.steps + 1,
            self.size,
            step.offered_bps.map_or_else(|| "max".to_owned(), |rate| rate_text(rate as f64)),
            rate_text(step.sent_bps as f64),
            rate_text(step.received_bps as f64),
            step.loss * 100.0,
        )
    }

    /// The results as a table for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::from(
            "direction  size  flows       offered          sent      received  datagrams/s      lost  \
             reordered  duplicates  corrupt\n",
        );
        let offered = self.offered_bps.map_or_else(|| "max".to_owned(), |rate| rate_text(rate as f64));
        let mut add = |line: String| {
            text.push_str(&line);
            text.push('\n');
        };
        for (name, way) in self.ways() {
            add(format!(
                "{name:<9}{:>6}{:>7}{offered:>14}{:>14}{:>14}{:>13.0}{:>8.3} %{:>11}{:>12}{:>9}",
                self.size,
                self.flows,
                rate_text(self.sent_bps(way)),
                rate_text(self.received_bps(way)),
                way.counts.distinct as f64 / way.seconds,
                way.loss() * 100.0,
                way.counts.reordered,
                way.counts.duplicates,
                way.corrupt,
            ));
        }
        for (name, way) in self.ways() {
            if let Some(times) = way.one_way.as_ref().filter(|times| !times.is_empty()) {
                add(format!("one-way {name:<6}{}", times_text(times)));
            }
        }
        if let Some(probe) = self.round_trip.as_ref().filter(|probe| !probe.times.is_empty()) {
            let lost = probe.sent.saturating_sub(probe.returned);
            add(format!("round trip    {}   {lost} of {} probes lost", times_text(&probe.times), probe.sent));
        }
        for (name, way) in self.ways() {
            let OneWay { sent, kernel_drops, .. } = way;
            let mut line = format!(
                "{name:<9} sender blocked {} times, {} errors, receiver's kernel dropped {kernel_drops} buffers",
                sent.blocked, sent.errors
            );
            if let Some(why) = sent.failure {
                // Writing to a String does not fail.
                let _written = write!(line, " (last error: {why:?})").is_ok();
            }
            add(line);
        }
        add(format!("CPU       {:.2} s of this process in {:.2} s", self.cpu_seconds, self.seconds));
        text
    }

    /// One object with the keys that `docs/bench.md` describes.
    pub(super) fn json(&self) -> Value {
        let mut object = self.way_json(self.direction.label(), &self.total());
        if self.direction == Direction::Both {
            for (name, way) in self.ways() {
                object[name] = self.way_json(name, way);
            }
        }
        object
    }

    fn way_json(&self, direction: &str, way: &OneWay) -> Value {
        let round_trip = self.round_trip.as_ref();
        let latency = match (&way.one_way, round_trip) {
            (Some(times), _) => times_json("one-way", times),
            (None, Some(probe)) => times_json("round-trip", &probe.times),
            (None, None) => Value::Null,
        };
        let round_trip = round_trip.map_or(Value::Null, |probe| {
            let mut object = times_json("round-trip", &probe.times);
            object["sent"] = probe.sent.into();
            object["lost"] = probe.sent.saturating_sub(probe.returned).into();
            object
        });
        let lost = way.sent.datagrams.saturating_sub(way.counts.distinct);
        json!({
            "mode": self.mode,
            "direction": direction,
            "size": self.size,
            "flows": self.flows,
            "burst": self.burst,
            "offered_bps": self.offered_bps,
            "sent_datagrams": way.sent.datagrams,
            "sent_bps": self.sent_bps(way),
            "received_datagrams": way.counts.distinct,
            "received_bps": self.received_bps(way),
            "received_pps": way.counts.distinct as f64 / way.seconds,
            "lost": lost,
            "loss": way.loss(),
            "reordered": way.counts.reordered,
            "duplicates": way.counts.duplicates,
            "corrupt": way.corrupt,
            "latency_us": latency,
            "round_trip_us": round_trip,
            "sender_blocked": way.sent.blocked,
            "sender_errors": way.sent.errors,
            "receiver_kernel_drops": way.kernel_drops,
            "cpu_seconds": self.cpu_seconds,
            "seconds": self.seconds,
        })
    }
}

impl OneWay {
    fn plus(mut self, other: Self) -> Self {
        self.sent.add(&other.sent);
        self.counts.add(&other.counts);
        self.corrupt += other.corrupt;
        self.kernel_drops += other.kernel_drops;
        self.seconds = self.seconds.max(other.seconds);
        if let (Some(all), Some(one)) = (&mut self.one_way, &other.one_way) {
            // Equal bounds: nothing can be out of range.
            let added = all.add(one).is_ok();
            debug_assert!(added, "all histograms have the same bounds");
        }
        self
    }

    /// The share that was lost; nothing sent is nothing lost.
    fn loss(&self) -> f64 {
        let sent = self.sent.datagrams;
        sent.saturating_sub(self.counts.distinct) as f64 / sent.max(1) as f64
    }
}

/// The quantiles that are shown, by their names.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)];

fn times_json(kind: &str, times: &Histogram<u64>) -> Value {
    let microseconds = |nanoseconds: u64| match times.is_empty() {
        true => Value::Null,
        false => json!(nanoseconds as f64 / 1e3),
    };
    let mut object = json!({
        "kind": kind,
        "samples": times.len(),
        "min": microseconds(times.min()),
        "max": microseconds(times.max()),
    });
    for (name, quantile) in QUANTILES {
        object[name] = microseconds(times.value_at_quantile(quantile));
    }
    object
}

fn times_text(times: &Histogram<u64>) -> String {
    let microseconds = |nanoseconds: u64| nanoseconds as f64 / 1e3;
    let mut text = format!("min {:.1}", microseconds(times.min()));
    for (name, quantile) in QUANTILES {
        let value = microseconds(times.value_at_quantile(quantile));
        // Writing to a String does not fail.
        let _written = write!(text, "   {name} {value:.1}").is_ok();
    }
    format!("{text}   max {:.1} µs", microseconds(times.max()))
}

/// A rate in bits per second, with its unit.
pub(super) fn rate_text(bits_per_second: f64) -> String {
    match bits_per_second {
        rate if rate >= 1e9 => format!("{:.3} Gbit/s", rate / 1e9),
        rate if rate >= 1e6 => format!("{:.2} Mbit/s", rate / 1e6),
        rate => format!("{:.2} kbit/s", rate / 1e3),
    }
}

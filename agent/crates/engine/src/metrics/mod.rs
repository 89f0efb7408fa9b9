//! The Prometheus registry and the handles through which the agent counts.
//!
//! | question | file |
//! |---|---|
//! | which metrics exist, with which labels? | `families.rs`: one line each |
//! | how does a worker's plain integer become a metric? | [`Published`], [`Level`], [`Counters`] here |
//! | and its counts by size or age? | `histogram.rs` |
//! | what about the process itself? | `process.rs` |
//! | and the configuration: its limits, its reloads? | `configured.rs` |
//! | and panics? | `panics.rs` |
//!
//! ```text
//! worker: u64 += 1 per packet ──▶ handle.publish(total) per tick ──▶ shared atomic ──▶ /metrics
//! ```
//!
//! Handles are bound once, to label values that the caller gives; several workers may bind the same values and add up.
//! `docs/metrics.md` lists every family, and a test compares it with the registry.

mod configured;
mod families;
mod histogram;
mod panics;
mod process;

use prometheus::{
    GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    core::{Collector, MetricVec, MetricVecBuilder},
    proto::MetricType,
};
use wire::fault::{self, Fault};

pub use configured::Reload;
pub use families::{
    ControlMetrics, DecoyMetrics, Families, LaneDirectionMetrics, LaneIndexMetrics, PeerDirectionMetrics,
    PeerMetrics, SocketMetrics, TcpDirectionMetrics, TunDirectionMetrics, WorkerMetrics,
};
use histogram::{AGES, SIZES};
pub use histogram::{Buckets, Histogram, HistogramVec, PublishedHistogram};
#[cfg(any(test, feature = "fuzzing"))]
pub use process::host_text;

/// Why the registry could not be made: two families of one name, or a name that Prometheus does not allow.
#[derive(Debug, thiserror::Error)]
#[error("cannot register the metrics")]
pub struct MetricsError(#[from] prometheus::Error);

/// What a family is: the column "type" of `docs/metrics.md`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FamilyInfo {
    /// The full name.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// The label names, in order.
    pub labels: Vec<String>,
    /// One sentence.
    pub help: String,
}

/// The registry, and the families from which handles are bound.
pub struct Metrics {
    registry: Registry,
    families: Families,
    info: Vec<FamilyInfo>,
}

impl Metrics {
    /// Registers every family; `version` becomes the label of `culvert_build_info`.
    pub fn new(version: &str) -> Result<Self, MetricsError> {
        let mut registrar = Registrar { registry: Registry::new(), info: Vec::new() };
        let families = Families::register(&mut registrar)?;
        registrar.collector(process::ProcessCollector::new()?)?;
        registrar.collector(panics::PanicCollector::new()?)?;
        families.build_info.with_label_values(&[version]).set(1);
        let metrics = Self { registry: registrar.registry, families, info: registrar.info };
        metrics.bind_reloads();
        Ok(metrics)
    }

    /// The families, to bind handles from.
    pub fn families(&self) -> &Families {
        &self.families
    }

    /// Every family that exists, also those without a value yet, in no particular order.
    pub fn info(&self) -> &[FamilyInfo] {
        &self.info
    }

    /// All values in Prometheus' text format, version 0.0.4.
    pub fn render(&self) -> Result<String, MetricsError> {
        fault::point(Fault::Render);
        Ok(TextEncoder::new().encode_to_string(&self.registry.gather())?)
    }
}

/// Counts of one source, published as deltas into a counter that other sources may share.
#[derive(Debug)]
pub struct Published {
    counter: IntCounter,
    last: u64,
}

impl Published {
    /// Brings the counter up to `total`, this source's count so far.
    ///
    /// A total below the last one means that what was counted was made anew, and counts from zero again.
    pub fn publish(&mut self, total: u64) {
        let delta = total.checked_sub(self.last).unwrap_or(total);
        if delta > 0 {
            self.counter.inc_by(delta);
        }
        self.last = total;
    }

    /// Counts one event directly, for what is too rare to be worth a total of its own.
    pub fn count(&mut self) {
        self.publish(self.last + 1);
    }
}

impl From<IntCounter> for Published {
    fn from(counter: IntCounter) -> Self {
        Self { counter, last: 0 }
    }
}

/// One source's share of a gauge that is the sum over all sources; it is taken back on drop.
#[derive(Debug)]
pub struct Level {
    gauge: IntGauge,
    last: i64,
}

impl Level {
    /// Sets this source's share.
    pub fn set(&mut self, value: u64) {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        if value != self.last {
            self.gauge.add(value - self.last);
            self.last = value;
        }
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        self.gauge.sub(self.last);
    }
}

impl From<IntGauge> for Level {
    fn from(gauge: IntGauge) -> Self {
        Self { gauge, last: 0 }
    }
}

/// Handles of one family for every value of one closed enum, in the enum's order.
#[derive(Debug)]
pub struct Labelled<H>(Vec<H>);

/// Counters by reason, kind or outcome.
pub type Counters = Labelled<Published>;

/// Gauges by state.
pub type Levels = Labelled<Level>;

impl<H> Labelled<H> {
    /// Binds `family` once per value: `fixed` are the values of its first labels, `values` those of the last.
    pub fn bind<B>(family: &MetricVec<B>, fixed: &[&str], values: &[&'static str]) -> Self
    where
        B: MetricVecBuilder,
        H: From<B::M>,
    {
        let bound = |value: &&'static str| H::from(family.with_label_values(&[fixed, &[value]].concat()));
        Self(values.iter().map(bound).collect())
    }
}

impl Labelled<Published> {
    /// Brings every counter up to its total, in the order of the values given to [`bind`](Labelled::bind).
    pub fn publish(&mut self, totals: &[u64]) {
        debug_assert_eq!(totals.len(), self.0.len(), "one total per label value");
        for (counter, total) in self.0.iter_mut().zip(totals) {
            counter.publish(*total);
        }
    }

    /// Counts one event under the value at `index`.
    pub fn count(&mut self, index: usize) {
        self.0[index].count();
    }
}

impl Labelled<Level> {
    /// Sets every gauge's share, in the order of the values given to [`bind`](Labelled::bind).
    pub fn set(&mut self, values: &[u64]) {
        debug_assert_eq!(values.len(), self.0.len(), "one value per label value");
        for (level, value) in self.0.iter_mut().zip(values) {
            level.set(*value);
        }
    }
}

/// Collects the families while they are registered.
struct Registrar {
    registry: Registry,
    info: Vec<FamilyInfo>,
}

impl Registrar {
    fn counter(&mut self, name: &str, labels: &[&str], help: &str) -> Result<IntCounterVec, MetricsError> {
        let family = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.register("counter", family)
    }

    fn level(&mut self, name: &str, labels: &[&str], help: &str) -> Result<IntGaugeVec, MetricsError> {
        let family = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.register("gauge", family)
    }

    fn gauge(&mut self, name: &str, labels: &[&str], help: &str) -> Result<GaugeVec, MetricsError> {
        let family = GaugeVec::new(Opts::new(name, help), labels)?;
        self.register("gauge", family)
    }

    fn sizes(&mut self, name: &str, labels: &[&str], help: &str) -> Result<HistogramVec, MetricsError> {
        self.histogram(SIZES, name, labels, help)
    }

    fn ages(&mut self, name: &str, labels: &[&str], help: &str) -> Result<HistogramVec, MetricsError> {
        self.histogram(AGES, name, labels, help)
    }

    fn histogram(
        &mut self,
        buckets: Buckets,
        name: &str,
        labels: &[&str],
        help: &str,
    ) -> Result<HistogramVec, MetricsError> {
        let labels = labels.iter().map(ToString::to_string).collect();
        let opts = Opts::new(name, help).variable_labels(labels);
        let family = HistogramVec::create(MetricType::HISTOGRAM, buckets, opts)?;
        self.register("histogram", family)
    }

    fn register<C: Collector + Clone + 'static>(
        &mut self,
        kind: &'static str,
        family: C,
    ) -> Result<C, MetricsError> {
        self.describe(&family, |_| kind);
        self.registry.register(Box::new(family.clone()))?;
        Ok(family)
    }

    /// Registers what is read at each scrape.
    fn collector(&mut self, collector: impl Collector + 'static) -> Result<(), MetricsError> {
        self.describe(&collector, process::kind_of);
        self.registry.register(Box::new(collector))?;
        Ok(())
    }

    fn describe(&mut self, collector: &impl Collector, kind: impl Fn(&str) -> &'static str) {
        self.info.extend(collector.desc().into_iter().map(|desc| FamilyInfo {
            name: desc.fq_name.clone(),
            kind: kind(&desc.fq_name),
            labels: desc.variable_labels.clone(),
            help: desc.help.clone(),
        }));
    }
}

#[cfg(test)]
mod tests;

//! Histograms that are brought up to totals, as counters are: `prometheus` has only such as observe one value at a time.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use net::stats::{AGE_BOUNDS_NANOS, SIZE_BOUNDS};
use prometheus::{
    Opts,
    core::{Metric, MetricVec, MetricVecBuilder},
    proto,
};

/// What a family's buckets count.
#[derive(Clone, Copy, Debug)]
pub struct Buckets {
    /// The upper bounds, in parts of the unit.
    bounds: &'static [u64],
    /// Parts that make one unit.
    parts: f64,
}

/// Calls and messages by their datagrams.
pub(super) const SIZES: Buckets = Buckets { bounds: &SIZE_BOUNDS, parts: 1.0 };

/// Ages in seconds, counted in nanoseconds.
pub(super) const AGES: Buckets = Buckets { bounds: &AGE_BOUNDS_NANOS, parts: 1e9 };

impl Buckets {
    #[expect(
        clippy::cast_precision_loss,
        reason = "2^53 ns are 104 days of waiting, and then the next digit is lost"
    )]
    fn units(self, parts: u64) -> f64 {
        parts as f64 / self.parts
    }
}

/// A family of histograms.
pub type HistogramVec = MetricVec<Buckets>;

impl MetricVecBuilder for Buckets {
    type M = Histogram;
    type P = Opts;

    fn build<V: AsRef<str>>(&self, opts: &Opts, values: &[V]) -> prometheus::Result<Histogram> {
        let mut labels: Vec<_> = opts
            .variable_labels
            .iter()
            .zip(values)
            .map(|(name, value)| {
                let mut label = proto::LabelPair::default();
                label.set_name(name.clone());
                label.set_value(value.as_ref().to_owned());
                label
            })
            .collect();
        labels.sort_by(|one, other| one.name().cmp(other.name()));
        let counts = (0..=self.bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Ok(Histogram(Arc::new(Shared { buckets: *self, labels, counts, sum: AtomicU64::new(0) })))
    }
}

/// One histogram; clones share it.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    buckets: Buckets,
    labels: Vec<proto::LabelPair>,
    /// One per bound, and one for what is above the last.
    counts: Box<[AtomicU64]>,
    /// In parts of the unit.
    sum: AtomicU64,
}

impl Metric for Histogram {
    fn metric(&self) -> proto::Metric {
        let shared = &*self.0;
        let mut cumulative = 0;
        let mut shown = Vec::with_capacity(shared.buckets.bounds.len());
        let mut counts = shared.counts.iter().map(|count| count.load(Ordering::Relaxed));
        for (bound, count) in shared.buckets.bounds.iter().zip(&mut counts) {
            cumulative += count;
            let mut bucket = proto::Bucket::default();
            bucket.set_upper_bound(shared.buckets.units(*bound));
            bucket.set_cumulative_count(cumulative);
            shown.push(bucket);
        }
        let mut histogram = proto::Histogram::default();
        histogram.set_bucket(shown);
        histogram.set_sample_count(cumulative + counts.sum::<u64>());
        histogram.set_sample_sum(shared.buckets.units(shared.sum.load(Ordering::Relaxed)));
        let mut metric = proto::Metric::from_label(shared.labels.clone());
        metric.set_histogram(histogram);
        metric
    }
}

/// Counts of one source, published as differences into a histogram that other sources may share.
#[derive(Debug)]
pub struct PublishedHistogram {
    histogram: Histogram,
    counts: Box<[u64]>,
    sum: u64,
}

impl PublishedHistogram {
    /// Brings the histogram up to this source's totals: the count of each bucket, the last one above all bounds, and
    /// the sum of what was counted in parts of the unit. Totals below the last ones count from zero again.
    pub fn publish(&mut self, counts: &[u64], sum: u64) {
        let shared = &*self.histogram.0;
        debug_assert_eq!(counts.len(), shared.counts.len(), "one total per bucket");
        let difference = |total: u64, last: u64| total.checked_sub(last).unwrap_or(total);
        for ((shown, last), total) in shared.counts.iter().zip(&mut self.counts).zip(counts) {
            shown.fetch_add(difference(*total, *last), Ordering::Relaxed);
            *last = *total;
        }
        shared.sum.fetch_add(difference(sum, self.sum), Ordering::Relaxed);
        self.sum = sum;
    }
}

impl From<Histogram> for PublishedHistogram {
    fn from(histogram: Histogram) -> Self {
        let counts = vec![0; histogram.0.counts.len()].into();
        Self { histogram, counts, sum: 0 }
    }
}

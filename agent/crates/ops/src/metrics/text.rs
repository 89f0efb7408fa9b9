//! A family as `prometheus` knows it, which writes the text.
//!
//! One at a time: a `Registry`, which gathers all families first, takes twice the memory for a thousand peers. So there is no
//! `Collector` either.

use engine::metrics::{Buckets, FamilyInfo, Kind, Samples, Value};
use prometheus::{
    TextEncoder,
    proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType},
};

/// Appends a family; nothing if it has no series.
///
/// Every value is a `f64` on the way: counts above 2^53 are rounded.
pub(super) fn append(text: &mut String, info: &FamilyInfo, samples: Samples) {
    if !samples.is_empty() {
        // It fails for a family without name or series only, and where the text cannot be written to.
        TextEncoder::new().encode_utf8(&[family(info, samples)], text).ok();
    }
}

fn family(info: &FamilyInfo, samples: Samples) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(info.name.to_owned());
    family.set_help(info.help.to_owned());
    family.set_field_type(match info.kind {
        Kind::Counter => MetricType::COUNTER,
        Kind::Gauge => MetricType::GAUGE,
        Kind::Histogram => MetricType::HISTOGRAM,
    });
    family.set_metric(samples.into_iter().map(|(labels, value)| metric(info, labels, value)).collect());
    family
}

fn metric(info: &FamilyInfo, values: Vec<String>, value: Value) -> Metric {
    let mut labels: Vec<_> = info.labels.iter().zip(values).map(|(name, value)| label(name, value)).collect();
    labels.sort_unstable_by(|one, other| one.name().cmp(other.name()));
    let mut metric = Metric::from_label(labels);
    match value {
        Value::Count(count) => set(&mut metric, info.kind, count as f64),
        Value::Number(number) => set(&mut metric, info.kind, number),
        Value::Buckets(buckets) => metric.set_histogram(histogram(&buckets)),
    }
    metric
}

fn label(name: &str, value: String) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value);
    pair
}

fn set(metric: &mut Metric, kind: Kind, value: f64) {
    if kind == Kind::Counter {
        let mut counter = Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
    } else {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    }
}

/// The encoder adds the bucket without a bound.
fn histogram(buckets: &Buckets) -> Histogram {
    let mut count = 0;
    let cumulative = buckets.bounds.iter().zip(&buckets.counts).map(|(bound, one)| {
        count += one;
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(buckets.units(*bound));
        bucket.set_cumulative_count(count);
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(cumulative.collect());
    histogram.set_sample_count(buckets.counts.iter().sum());
    histogram.set_sample_sum(buckets.units(buckets.sum));
    histogram
}

//! Metrics: families, and samples with the values of their labels.
//!
//! `worker/report/families.rs` has the families of the workers, one line each; `ops::metrics` adds its own and has `prometheus` write the text.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc, time::Duration};

use net::stats::{AGE_BOUNDS_NANOS, SIZE_BOUNDS};

/// Description of a family, as `/metrics` and `docs/metrics.md` show it.
#[derive(Clone, Copy, Debug)]
pub struct FamilyInfo {
    /// The full name of the family.
    pub name: &'static str,
    /// The type of the family's values.
    pub kind: Kind,
    /// The names of its labels, in the order in which [`Samples`] has their values.
    pub labels: &'static [&'static str],
    /// The description of the family, in one sentence.
    pub help: &'static str,
}

base::labelled! {
    /// The type of a metric family, by its name in Prometheus' text format.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        /// A counter only grows, from 0 at the start of the process.
        Counter => "counter",
        /// A gauge is a value of the moment: it rises and falls.
        Gauge => "gauge",
        /// A histogram counts observations by size or age.
        Histogram => "histogram",
    }
}

impl FamilyInfo {
    /// Name and labels of a series with these values, as Prometheus writes them: labels in the order of their names.
    #[must_use]
    pub fn series(&self, values: &[String]) -> String {
        let mut labels: Vec<_> = self.labels.iter().copied().zip(values).collect();
        labels.sort_unstable();
        let mut series = self.name.to_owned();
        for (index, (name, value)) in labels.iter().enumerate() {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            // Writing to a String cannot fail.
            write!(series, "{}{name}=\"{value}\"", if index == 0 { '{' } else { ',' }).ok();
        }
        if !labels.is_empty() {
            series.push('}');
        }
        series
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number, of a counter or a gauge.
    Count(u64),
    /// A number that need not be whole.
    Number(f64),
    Buckets(Buckets),
}

macro_rules! values {
    ($($from:ty, $it:ident => $value:expr;)*) => { $(impl From<$from> for Value {
        fn from($it: $from) -> Self {
            $value
        }
    })* };
}

values! {
    u64, count => Self::Count(count);
    u32, count => Self::Count(count.into());
    usize, count => Self::Count(count as u64);
    f64, number => Self::Number(number);
    Duration, time => Self::Number(time.as_secs_f64());
    Buckets, buckets => Self::Buckets(buckets);
}

/// The buckets of a histogram count observations by size or age.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    /// The upper bounds, in parts of the unit.
    pub bounds: &'static [u64],
    /// The number of parts that make one unit.
    pub parts: f64,
    /// One count for each bound, and one for what is above the last.
    pub counts: Vec<u64>,
    /// The sum of what was counted, in parts of the unit.
    pub sum: u64,
}

impl Buckets {
    /// The value of `parts` parts, in units.
    #[must_use]
    pub fn units(&self, parts: u64) -> f64 {
        parts as f64 / self.parts
    }

    /// Calls or messages by their datagrams.
    pub(crate) fn sizes(counts: &[u64], datagrams: u64) -> Self {
        Self { bounds: &SIZE_BOUNDS, parts: 1.0, counts: counts.to_vec(), sum: datagrams }
    }

    /// Buffers by their age, shown in seconds.
    pub(crate) fn ages(counts: &[u64], sum_nanos: u64) -> Self {
        Self { bounds: &AGE_BOUNDS_NANOS, parts: 1e9, counts: counts.to_vec(), sum: sum_nanos }
    }
}

/// The series of one family: a value for each combination of labels.
#[derive(Clone, Debug, Default)]
pub struct Samples(BTreeMap<Vec<String>, Value>);

impl Samples {
    /// Sets the series with these labels to 1: what they say is all there is.
    pub fn ones<const N: usize>(&mut self, rows: &[[Arc<str>; N]]) {
        for row in rows {
            self.add(&row.each_ref().map(|label| &**label), 1_u64);
        }
    }

    /// Adds a value to the series with these labels, which begins with it if there is none.
    pub fn add(&mut self, labels: &[&str], value: impl Into<Value>) {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        let value = value.into();
        let Some(sum) = self.0.get_mut(&labels) else {
            self.0.insert(labels, value);
            return;
        };
        match (sum, value) {
            (Value::Count(sum), Value::Count(one)) => *sum += one,
            (Value::Buckets(sum), Value::Buckets(one)) => {
                sum.counts.iter_mut().zip(one.counts).for_each(|(sum, one)| *sum += one);
                sum.sum += one.sum;
            }
            (sum, value) => *sum = value,
        }
    }

    /// Adds a value for each of a closed set of labels.
    pub fn each<'a>(&mut self, values: impl IntoIterator<Item = (&'a str, u64)>) {
        for (label, value) in values {
            self.add(&[label], value);
        }
    }

    /// Adds a value for each of a closed set of labels, after the label `first`.
    pub fn each_of<'a>(&mut self, first: &str, values: impl IntoIterator<Item = (&'a str, u64)>) {
        for (label, value) in values {
            self.add(&[first, label], value);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The series, by the values of their labels.
    pub fn iter(&self) -> impl Iterator<Item = (&[String], &Value)> {
        self.0.iter().map(|(labels, value)| (&labels[..], value))
    }
}

impl IntoIterator for Samples {
    type Item = (Vec<String>, Value);
    type IntoIter = std::collections::btree_map::IntoIter<Vec<String>, Value>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

//! An agent's HTTP pages, and its metrics as Prometheus' own parser reads them.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{ChildStdin, ChildStdout, Stdio},
};

use serde_json::Value;

use crate::{needs, place::Place, process::Running};

/// Fetches pages where the agent runs.
#[derive(Debug)]
pub struct Fetcher {
    // Declared first, so that its pipes close before the process is killed.
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    process: Running,
}

/// A page.
#[derive(Debug)]
pub struct Page {
    /// The HTTP status.
    pub status: u64,
    /// The header `Content-Type`.
    pub content_type: String,
    /// The text.
    pub body: String,
    families: Vec<Value>,
}

/// Prometheus' view of an agent at one moment.
#[derive(Clone, Debug)]
pub struct Samples {
    samples: Vec<Sample>,
    /// The type of each family, by its name without `_total`.
    pub types: BTreeMap<String, String>,
}

/// A value of one time series.
#[derive(Clone, Debug)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// What an agent says became of the datagrams of one peer in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Entered the agent.
    pub received: u64,
    /// Left it.
    pub delivered: u64,
    /// Are in it.
    pub queued: u64,
    /// Were dropped.
    pub dropped: u64,
}

impl Account {
    /// The accounting invariant.
    #[must_use]
    pub fn balances(&self) -> bool {
        self.received == self.delivered + self.queued + self.dropped
    }
}

impl Fetcher {
    /// Starts one at `place`.
    ///
    /// # Panics
    /// When Python or its parser is missing; the test must have asked [`needs::met`].
    #[must_use]
    pub fn new(place: &Place) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/harness/src/scrape.py");
        let mut command = place.command(needs::python().expect("a Python with prometheus_client"));
        command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Running::start("scrape.py", &mut command);
        let stdin = process.child().stdin.take().expect("asked for");
        let stdout = BufReader::new(process.child().stdout.take().expect("asked for"));
        Self { stdin, stdout, process }
    }

    /// Fetches a page; an error in words when the server does not answer.
    ///
    /// # Errors
    /// What the client said.
    ///
    /// # Panics
    /// When the parser refused the page; it has written why to standard error.
    pub fn get(&mut self, server: SocketAddr, path: &str) -> Result<Page, String> {
        let mut line = String::new();
        let asked =
            writeln!(self.stdin, "http://{server}{path}").and_then(|()| self.stdout.read_line(&mut line));
        if !asked.as_ref().is_ok_and(|length| *length > 0) {
            let ended = self.process.ended();
            panic!("the parser refused {path} of {server}: {asked:?}, {ended:?}");
        }
        let mut answer: Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("scrape.py wrote no JSON: {error}: {line}"));
        if let Some(error) = answer["error"].as_str() {
            return Err(error.to_owned());
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(Page {
            status: answer["status"].as_u64().unwrap_or_default(),
            content_type: text(&answer["content_type"]),
            body: text(&answer["body"]),
            families: answer["families"].as_array_mut().map(std::mem::take).unwrap_or_default(),
        })
    }
}

impl Page {
    /// Its metrics.
    ///
    /// # Panics
    /// When it is no page of metrics.
    #[must_use]
    pub fn samples(&self) -> Samples {
        assert!(!self.families.is_empty(), "no metrics: {} {}", self.status, self.body);
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let sample = |sample: &Value| Sample {
            name: text(&sample[0]),
            labels: sample[1]
                .as_object()
                .expect("labels")
                .iter()
                .map(|(k, v)| (k.clone(), text(v)))
                .collect(),
            value: sample[2].as_f64().expect("a number"),
        };
        let samples = self.families.iter().flat_map(|family| family["samples"].as_array().expect("a list"));
        Samples {
            samples: samples.map(sample).collect(),
            types: self
                .families
                .iter()
                .map(|family| (text(&family["name"]), text(&family["type"])))
                .collect(),
        }
    }
}

impl Samples {
    /// The sum of the series of `name` that have all of `labels`; 0 if there are none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let fits = |sample: &&Sample| {
            sample.name == name
                && labels.iter().all(|(k, v)| sample.labels.get(*k).is_some_and(|have| have == v))
        };
        self.samples.iter().filter(fits).map(|sample| sample.value).sum()
    }

    /// The same as a count.
    ///
    /// # Panics
    /// When it is none.
    #[must_use]
    #[track_caller]
    pub fn count(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let sum = self.sum(name, labels);
        assert!(sum >= 0.0 && sum.fract() == 0.0 && sum < 9e15, "{name} is {sum}");
        sum as u64
    }

    /// Whether there is a series of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.samples.iter().any(|sample| sample.name == name)
    }

    /// The values that a label has among the series of `name` that are not 0, with the sum of each.
    #[must_use]
    pub fn by_label(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for sample in self.samples.iter().filter(|sample| sample.name == name && sample.value != 0.0) {
            *sums.entry(sample.labels.get(label).cloned().unwrap_or_default()).or_default() += sample.value;
        }
        sums
    }

    /// The account of a peer in `direction`: `uplink` or `downlink`.
    #[must_use]
    #[track_caller]
    pub fn account(&self, peer: &str, direction: &str) -> Account {
        let labels = [("peer", peer), ("direction", direction)];
        let count = |what: &str| self.count(&format!("culvert_peer_datagrams_{what}"), &labels);
        Account {
            received: count("received_total"),
            delivered: count("delivered_total"),
            queued: count("queued"),
            dropped: count("dropped_total"),
        }
    }

    /// Datagrams dropped for `reason`, in both directions.
    #[must_use]
    #[track_caller]
    pub fn dropped(&self, reason: &str) -> u64 {
        self.count("culvert_datagrams_dropped_total", &[("reason", reason)])
    }
}

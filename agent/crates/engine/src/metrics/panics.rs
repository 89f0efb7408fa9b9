//! The panics that parts of the daemon survived, read from where they are counted at each scrape.

use prometheus::{
    core::{Collector, Desc},
    proto,
};
use wire::panics::{self, Part};

use crate::metrics::process::labelled_counters;

const NAME: &str = "culvert_panics_total";
const HELP: &str =
    "Panics that ended one request, lookup or reload, and not the agent. Each is a defect of culvert.";
const LABEL: &str = "part";

/// Has a value for each part, also before its first panic.
pub(super) struct PanicCollector {
    desc: Desc,
}

impl PanicCollector {
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let desc = Desc::new(NAME.to_owned(), HELP.to_owned(), vec![LABEL.to_owned()], Default::default())?;
        Ok(Self { desc })
    }
}

impl Collector for PanicCollector {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    #[expect(clippy::cast_precision_loss, reason = "Prometheus counts in f64")]
    fn collect(&self) -> Vec<proto::MetricFamily> {
        let counts = Part::ALL.into_iter().zip(panics::counts());
        let values = counts.map(|(part, count)| (part.label().to_owned(), count as f64));
        vec![labelled_counters((NAME, LABEL, HELP), values)]
    }
}

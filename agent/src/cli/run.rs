//! `culvert run`

use std::path::PathBuf;

use base::panics;
use clap::Args;
use config::Config;
use net::process;
use ops::log;

use super::{Failure, reach::DEFAULT_CONFIG};
use crate::run::{self, Signals};

/// Run the daemon until SIGTERM or SIGINT; SIGHUP reloads its configuration
#[derive(Debug, Args)]
pub(super) struct Run {
    /// The configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
}

impl Run {
    pub(super) fn execute(self) -> Result<(), Failure> {
        // Before anything else: until then a signal would end us without a word.
        let mut signals = Signals::catch()?;
        // Before there is a key in it.
        let hidden = process::hide_memory();
        let file = self.config.clone();
        let Some(loaded) = signals.during("culvert-load", move || Config::load(&file))? else {
            return Ok(());
        };
        let (config, identity) = loaded?;
        log::init(config.log).map_err(anyhow::Error::from)?;
        panics::install();
        if let Err(error) = hidden {
            tracing::warn!(%error, "this process's memory, keys included, may reach a core file or a debugger (remedy: allow prctl and setrlimit)");
        }
        for note in &config.notes {
            tracing::warn!("{}: {note}", note.place(&self.config));
        }
        for problem in &config.directory.rejected {
            tracing::warn!("{}: {problem}: the file was left out", problem.place(&self.config));
        }
        run::run(signals, config, identity).map_err(|error| {
            // Into the log, whatever its form, since that is where the operator of a service looks.
            tracing::error!("{error:#}");
            Failure::Logged
        })
    }
}

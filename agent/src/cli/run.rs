//! `culvert run`

use std::path::PathBuf;

use clap::Args;

use super::Failure;
use crate::{config::Config, daemon, log};

/// Run the daemon until SIGTERM or SIGINT
#[derive(Debug, Args)]
pub(super) struct Run {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

impl Run {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let (config, identity) = Config::load(&self.config)?;
        log::init(config.log).map_err(anyhow::Error::from)?;
        for note in &config.notes {
            tracing::warn!("{}: {note}", note.place(&self.config));
        }
        Ok(daemon::run(config, &identity)?)
    }
}

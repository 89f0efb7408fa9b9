//! `culvert genpsk`

use std::path::PathBuf;

use clap::Args;
use gate::preshared::{PresharedKey, PresharedKeyError};

use super::Failure;

/// Write a new preshared key, for both ends of a connection
#[derive(Debug, Args)]
pub(super) struct Genpsk {
    /// The new file; an existing one is never overwritten
    #[arg(long, value_name = "FILE", default_value = "peer.psk")]
    out: PathBuf,
}

impl Genpsk {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let with_remedy = |error: PresharedKeyError| {
            let remedy = error.remedy();
            anyhow::anyhow!("{error} (remedy: {remedy})")
        };
        let key = PresharedKey::generate().map_err(with_remedy)?;
        Ok(key.write_new(&self.out).map_err(with_remedy)?)
    }
}

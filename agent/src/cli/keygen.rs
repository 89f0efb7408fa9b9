//! `culvert keygen`

use std::path::PathBuf;

use clap::Args;
use gate::identity::{Identity, IdentityError};

use super::Failure;
use crate::out;

/// Write a new private key and print its public key
#[derive(Debug, Args)]
pub(super) struct Keygen {
    /// The new file; an existing one is never overwritten
    #[arg(long, value_name = "FILE", default_value = "identity.key")]
    out: PathBuf,
}

impl Keygen {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let identity = Identity::generate().map_err(with_remedy)?;
        identity.write_new(&self.out).map_err(with_remedy)?;
        Ok(out::say(&identity.public_key())?)
    }
}

/// The error as the operator reads it.
pub(super) fn with_remedy(error: IdentityError) -> anyhow::Error {
    let remedy = error.remedy();
    anyhow::anyhow!("{error} (remedy: {remedy})")
}

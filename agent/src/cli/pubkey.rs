//! `culvert pubkey`

use std::path::PathBuf;

use clap::Args;
use gate::identity::Identity;

use super::{Failure, keygen::with_remedy};
use crate::out;

/// Print the public key of a private key file
#[derive(Debug, Args)]
pub(super) struct Pubkey {
    /// The private key, as culvert keygen wrote it
    file: PathBuf,
}

impl Pubkey {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let identity = Identity::load(&self.file).map_err(with_remedy)?;
        Ok(out::say(&identity.public_key())?)
    }
}

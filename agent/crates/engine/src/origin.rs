//! How a peer came to be known.

use serde::{Deserialize, Serialize};

base::labelled! {
    /// How a peer came to be known.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum PeerOrigin {
        #[default]
        Config => "config",
        /// It was added while an agent ran, and is in the state file.
        State => "state",
        /// It came by itself, in open mode.
        Open => "open",
    }
}

impl From<config::PeerOrigin> for PeerOrigin {
    fn from(origin: config::PeerOrigin) -> Self {
        match origin {
            config::PeerOrigin::Config => Self::Config,
            config::PeerOrigin::State => Self::State,
        }
    }
}

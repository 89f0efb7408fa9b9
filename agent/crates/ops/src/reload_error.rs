//! Why a reload changed nothing.

use config::LoadError;
use engine::{registry::RegistryError, tunnel::TunnelError, worker::remedy};

use crate::{admin_server::AdminListenFailed, web_server::ListenFailed};

/// The reason why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The agent was not started from a file.
    #[error("this agent was not started from a file: there is nothing to read again")]
    NoFile,
    /// The file, the state file or the key is wrong.
    #[error(transparent)]
    Config(#[from] LoadError),
    /// A new inner address of a peer belongs to another peer.
    #[error(transparent)]
    Route(#[from] TunnelError),
    /// A port could not be opened.
    #[error("cannot listen on {} ({what}): {error}{}", .address, remedy(.error))]
    Port {
        address: std::net::SocketAddr,
        /// The configuration key it comes from.
        what: &'static str,
        error: std::io::Error,
    },
    /// A port of the web server could not be opened.
    #[error(transparent)]
    WebServer(#[from] ListenFailed),
    /// The port of the admin server could not be opened.
    #[error(transparent)]
    AdminServer(#[from] AdminListenFailed),
    /// A peer that runs is in the way.
    #[error("a peer is in the way, see culvert peer list: {0}")]
    PeerRegistry(#[from] RegistryError),
}

impl ReloadError {
    /// Whether the file is wrong, and not the daemon's surroundings.
    #[must_use]
    pub fn is_bad_input(&self) -> bool {
        match self {
            Self::Config(_) | Self::PeerRegistry(_) => true,
            Self::NoFile | Self::Route(_) | Self::Port { .. } | Self::WebServer(_) | Self::AdminServer(_) => {
                false
            }
        }
    }
}

//! `culvert peer export`

use clap::Args;
use config::Config;
use ops::control_socket::{
    peer_changes::exported,
    protocol::{Answer, Request},
};

use super::super::{
    Failure,
    reach::{Reach, Reached, unexpected},
};
use crate::out;

/// Print the [[peer]] of a peer, or of all, as a configuration file has it
///
/// Every key that is not at its default is printed; paths are absolute. Into the configuration with it, then culvert reload:
/// the session goes on, and the reload takes the peer out of the state file.
#[derive(Debug, Args)]
pub(super) struct Export {
    /// Which peer; without it: all of both files
    name: Option<String>,
    #[command(flatten)]
    reach: Reach,
}

impl Export {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let text = match self.reach.ask(&Request::PeerExport { name: self.name.clone() })? {
            Reached::Answer(Answer::Exported { text }) => text,
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                let (config, _) = Config::load(&offline.file)?;
                let name = self.name.as_deref();
                let wanted = |peer: &&config::Peer| name.is_none_or(|name| *peer.name == *name);
                let peers: Vec<&config::Peer> = config.peers.iter().filter(wanted).collect();
                exported(&config, name, &peers).map_err(Failure::Input)?
            }
        };
        Ok(out::say(&text.trim_end())?)
    }
}

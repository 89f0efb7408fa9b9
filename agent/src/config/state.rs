//! The state file `<state_dir>/peers.toml`: the peers that `culvert peer` has added.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{Peer, checks::Checks, file, peers::Around, problem::Report};

/// Its name in `identity.state_dir`.
pub const FILE_NAME: &str = "peers.toml";

/// The text of the state file at `path`; `None` if there is none.
///
/// # Errors
/// It exists and cannot be read.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl Checks {
    /// Checks the state file and appends its peers; returns what is wrong with it and the names that it calls removed.
    pub(super) fn state(
        &mut self,
        text: String,
        path: PathBuf,
        around: Around<'_>,
        peers: &mut Vec<Peer>,
    ) -> (Report, Vec<String>) {
        let mut report = Report::new(text.clone(), Some(path));
        let state = file::read::<file::State>(&text, &file::state_schema(), &mut report).unwrap_or_default();
        // What is found until the end of this function is found in the state file.
        let config_report = std::mem::replace(&mut self.report, report);
        self.peers(state.peer, around, peers);
        let removed = self.list("removed", state.removed).into_iter().map(|(_, name)| name.value).collect();
        (std::mem::replace(&mut self.report, config_report), removed)
    }
}

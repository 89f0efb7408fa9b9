//! Writing the state file, from the daemon.

use config::state::{Edit, StateError};

/// Writes what `edit` says; what a crash of the host may undo is told in the log.
///
/// # Errors
/// As those of [`Edit::commit`].
pub(crate) fn commit(edit: Edit) -> Result<(), StateError> {
    if let Some(problem) = edit.commit()? {
        tracing::warn!("{problem}");
    }
    Ok(())
}

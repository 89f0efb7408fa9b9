//! `--now`: the service is enabled and started, where the host has one.

use std::process::Command;

use anyhow::{Context as _, bail};

/// What enables and starts the service, as the operator would type it.
pub(super) const COMMAND: &str = "systemctl enable --now culvert";

/// Enables and starts the service; what systemctl says about it reaches the terminal.
///
/// # Errors
/// The command cannot be run, or it fails.
pub(super) fn start() -> anyhow::Result<()> {
    run(COMMAND)
}

fn run(command: &str) -> anyhow::Result<()> {
    let mut words = command.split(' ');
    let status = Command::new(words.next().unwrap_or_default()).args(words).status();
    let status = status.with_context(|| format!("--now: {command} cannot be run; the files are written"))?;
    if !status.success() {
        bail!("--now: {command}: {status}; the files are written (remedy: journalctl -u culvert)");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_fails_or_is_missing_is_told() {
        run("true enable").unwrap();
        let told = |command| format!("{:#}", run(command).unwrap_err());
        assert!(told("false enable").contains("exit status: 1; the files are written"), "{}", told("false"));
        assert!(told("/nowhere/systemctl enable").contains("cannot be run; the files are written"));
    }
}

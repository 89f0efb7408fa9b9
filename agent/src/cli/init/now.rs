//! `--now`: the service is enabled and started, where the host has one.

use std::{path::Path, process::Command};

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

/// What to do where systemd does not start the service.
pub(super) fn instead() -> &'static str {
    instead_of(Path::new("/etc/init.d/culvert"))
}

fn instead_of(script: &Path) -> &'static str {
    if script.exists() {
        "/etc/init.d/culvert start; at each boot: rc-update add culvert with OpenRC, /etc/init.d/culvert enable with OpenWrt"
    } else {
        "type the line that begins with culvert run, or have what starts this host's services run it"
    }
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
    fn without_systemd_the_script_or_the_command_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("culvert");
        assert!(instead_of(&script).contains("culvert run"));
        std::fs::write(&script, "").unwrap();
        assert!(instead_of(&script).contains("rc-update add culvert"));
    }

    #[test]
    fn a_command_that_fails_or_is_missing_is_told() {
        run("true enable").unwrap();
        let told = |command| format!("{:#}", run(command).unwrap_err());
        assert!(told("false enable").contains("exit status: 1; the files are written"), "{}", told("false"));
        assert!(told("/nowhere/systemctl enable").contains("cannot be run; the files are written"));
    }
}

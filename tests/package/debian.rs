//! A clean Debian: what debootstrap makes, kept under `target/` and only ever read.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use culvert_tests::{
    needs,
    process::{run, text},
};

use crate::{MACHINE, target};

/// Downloads and unpacks about a hundred packages.
const DEBOOTSTRAP_LIMIT: Duration = Duration::from_secs(600);

/// Where a minimal Debian with systemd is, of this host's release; where it cannot be made, `test` is listed as skipped and
/// shall return.
#[track_caller]
pub(crate) fn clean(test: &str) -> Option<&'static Path> {
    static ROOT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if !needs::met(test, MACHINE) {
        return None;
    }
    match ROOT.get_or_init(make) {
        Ok(root) => Some(root),
        Err(why) => {
            needs::missing(test, &format!("a clean Debian: {why}"));
            None
        }
    }
}

fn make() -> Result<PathBuf, String> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let suite = release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    let suite = suite.filter(|_| release.contains("ID=debian")).ok_or("this host is no Debian")?;
    let root = target().join(format!("debian-{suite}"));
    // The other groups of tests are processes of their own, and so is a second run.
    let lock = fs::File::create(root.with_extension("lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    if root.exists() {
        return Ok(root);
    }
    let unready = root.with_extension("unready");
    finished(Command::new("rm").args(["-rf", "--one-file-system"]).arg(&unready))?;
    let mut debootstrap = Command::new(needs::tool("debootstrap").ok_or("no debootstrap")?);
    debootstrap.args(["--variant=minbase", "--include=systemd", suite]).arg(&unready).arg(mirror());
    finished(&mut debootstrap)?;
    // Last, so that what was interrupted is begun again.
    fs::rename(&unready, &root).map_err(|error| error.to_string())?;
    Ok(root)
}

/// Debian's mirror of this host, from apt's own lists.
fn mirror() -> String {
    let folder = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten();
    let mut files: Vec<PathBuf> = folder.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    files.push("/etc/apt/sources.list".into());
    let text: String = files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect();
    let named = text
        .split_whitespace()
        .find(|word| word.starts_with("http") && word.trim_end_matches('/').ends_with("/debian"));
    named.unwrap_or("http://deb.debian.org/debian").to_owned()
}

fn finished(command: &mut Command) -> Result<(), String> {
    let output = run(command, DEBOOTSTRAP_LIMIT);
    if output.status.success() {
        return Ok(());
    }
    let said = text(&output.stdout) + &text(&output.stderr);
    let last: Vec<&str> = said.lines().rev().take(5).collect();
    Err(format!("{command:?}: {last:?}"))
}

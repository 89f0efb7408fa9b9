//! A virtual environment of Python under `target/`, with the QUIC stack of other people in it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use crate::{
    needs,
    process::{run, text},
};

/// What is installed: aioquic and hypercorn.
const REQUIREMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/requirements.txt");

/// Downloads and unpacks a few wheels.
const INSTALL_LIMIT: Duration = Duration::from_secs(300);

/// A Python that has aioquic and hypercorn; where it cannot be had, `test` is listed as skipped and shall return.
///
/// # Panics
/// Instead of skipping, for root and in CI.
#[must_use]
#[track_caller]
pub fn python(test: &str) -> Option<&'static Path> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let make = || {
        let test = env::current_exe().map_err(|error| error.to_string())?;
        // target/<profile>/deps/<test>
        let target = test.ancestors().nth(3).ok_or("not in cargo's layout")?;
        install(&target.join("interop-venv"))
    };
    match PYTHON.get_or_init(make) {
        Ok(python) => Some(python),
        Err(why) => {
            needs::missing(test, &format!("aioquic in a Python venv (apt-get install python3-venv): {why}"));
            None
        }
    }
}

/// Makes the virtual environment, unless it is there with the same requirements; returns its Python.
fn install(venv: &Path) -> Result<PathBuf, String> {
    let wanted = fs::read(REQUIREMENTS).map_err(|error| error.to_string())?;
    // Written last, so that an installation that was interrupted is begun again.
    let (installed, python) = (venv.join("installed.txt"), venv.join("bin/python"));
    let is_there = || fs::read(&installed).is_ok_and(|have| have == wanted) && python.exists();
    if is_there() {
        return Ok(python);
    }
    // Two groups of tests need it, and each is a process.
    let lock = fs::File::create(venv.with_extension("lock")).map_err(|error| error.to_string())?;
    lock.lock().map_err(|error| error.to_string())?;
    if is_there() {
        return Ok(python);
    }
    // The first in `PATH`, or Debian's if that one cannot make environments.
    let first = needs::tool("python3").ok_or("no python3")?;
    let make = |python: &Path| finished(Command::new(python).args(["-m", "venv", "--clear"]).arg(venv));
    make(&first).or_else(|_| make(Path::new("/usr/bin/python3")))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]);
    finished(pip.arg(REQUIREMENTS))?;
    fs::write(&installed, &wanted).map_err(|error| error.to_string())?;
    Ok(python)
}

/// Runs an installer; an error is what it said.
fn finished(command: &mut Command) -> Result<(), String> {
    let output = run(command, INSTALL_LIMIT);
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}{}", text(&output.stdout), text(&output.stderr)))
}

//! A client in another language, on another QUIC and TLS: Python and aioquic, in a virtual environment under `target/`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
    time::Duration,
};

use culvert_tests::{
    needs,
    process::{run, text},
};

use crate::case::Case;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop");

/// Downloads and unpacks a few wheels.
const INSTALL_LIMIT: Duration = Duration::from_secs(300);

/// The client's own limit is shorter.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);

/// A Python that has aioquic.
fn python() -> Result<&'static Path, &'static str> {
    static PYTHON: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let python = PYTHON.get_or_init(|| {
        // target/<profile>/deps/<test>
        let test = env::current_exe().unwrap();
        install(&test.ancestors().nth(3).unwrap().join("interop-venv"))
    });
    python.as_deref().map_err(String::as_str)
}

/// Makes the virtual environment, unless it is there with the same requirements; returns its Python.
fn install(venv: &Path) -> Result<PathBuf, String> {
    let requirements = Path::new(FOLDER).join("requirements.txt");
    let wanted = fs::read(&requirements).map_err(|error| error.to_string())?;
    // Written last, so that an installation that was interrupted is begun again.
    let (installed, python) = (venv.join("installed.txt"), venv.join("bin/python"));
    if fs::read(&installed).is_ok_and(|have| have == wanted) && python.exists() {
        return Ok(python);
    }
    // The first in `PATH`, or Debian's if that one cannot make environments.
    let first = needs::tool("python3").ok_or("no python3")?;
    let make = |python: &Path| finished(Command::new(python).args(["-m", "venv", "--clear"]).arg(venv));
    make(&first).or_else(|_| make(Path::new("/usr/bin/python3")))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]);
    finished(pip.arg(&requirements))?;
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

fn client(python: &Path, args: &[&str]) -> Output {
    run(Command::new(python).arg(Path::new(FOLDER).join("aioquic_client.py")).args(args), CLIENT_LIMIT)
}

#[test]
fn a_client_in_python_has_its_datagrams_echoed() {
    const COUNT: u64 = 200;
    let test = "aioquic";
    if !needs::met(test, needs::AGENTS) {
        return;
    }
    let python = match python() {
        Ok(python) => python,
        Err(why) => {
            needs::missing(test, &format!("aioquic in a Python venv (apt-get install python3-venv): {why}"));
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    let file = file.to_str().unwrap();
    let key = client(python, &["keygen", file]);
    assert!(key.status.success(), "{}", text(&key.stderr));
    let case = Case::dialled(text(&key.stdout).trim());

    let port = case.underlay.port().to_string();
    let echo = |agent: &str| client(python, &["echo", file, &port, agent, "echo", &COUNT.to_string()]);
    let output = echo(case.agent.key());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "ok\n");
    // The opening, which may have been sent more than once, and the rest.
    case.agent.wait_for("every datagram is counted", |samples| {
        let accounts = ["uplink", "downlink"].map(|direction| samples.account("foreign", direction));
        let fits = accounts.iter().all(|account| {
            account.balances() && account.delivered > COUNT && account.queued + account.dropped == 0
        });
        let flows = samples.count("culvert_flows", &[]);
        if fits && flows == 0 { Ok(()) } else { Err(format!("{accounts:?}, {flows} flows")) }
    });

    // The client knows whom it talks to.
    let output = echo(text(&key.stdout).trim());
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("the agent has another key"), "{}", text(&output.stderr));
}

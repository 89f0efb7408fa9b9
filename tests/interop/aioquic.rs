//! A client in another language, on another QUIC and TLS: Python and aioquic, in a virtual environment under `target/`.

use std::{
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use culvert_tests::{
    needs,
    process::{run, text},
    venv,
};

use crate::case::Case;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop");

/// The client's own limit is shorter.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);

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
    let Some(python) = venv::python(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    let file = file.to_str().unwrap();
    let key = client(python, &["keygen", file]);
    assert!(key.status.success(), "{}", text(&key.stderr));
    let case = Case::dialled(text(&key.stdout).trim());

    let port = case.underlay.port().to_string();
    let echo = |agent: &str| client(python, &["echo", file, &port, agent, "large", &COUNT.to_string()]);
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

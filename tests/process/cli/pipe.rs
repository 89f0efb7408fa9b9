//! Output of which a reader wants only the beginning, or nothing: the command ends as it would have, without a word about it.

use std::{
    io::pipe,
    process::{Command, Stdio},
};

use culvert_tests::{
    agent::{binary, culvert},
    process::text,
};

/// The exit code and what was said on standard error, when nobody reads standard output.
fn unread(args: &[&str]) -> (Option<i32>, String) {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let output = Command::new(binary())
        .args(args)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .unwrap();
    (output.status.code(), text(&output.stderr))
}

#[test]
fn a_reader_that_went_away_is_a_quiet_end() {
    let folder = tempfile::tempdir().unwrap();
    let [config, pages] = ["agent.toml", "man"].map(|name| folder.path().join(name));
    let [config, pages] = [&config, &pages].map(|path| path.to_str().unwrap());
    let init = ["init", "--role", "exit", "--tun", "--advertise", "192.0.2.1:1", "--config", config];
    // Nothing is left out because nobody reads what was done.
    assert_eq!(unread(&init).0, Some(0));
    assert_eq!(unread(&["manual", "--out", pages]), (Some(0), String::new()));
    assert!(std::fs::read_dir(pages).unwrap().count() > 10);
    for args in [
        &["completions", "bash"][..],
        &["check", "--config", config],
        &["peer", "list", "--json", "--config", config],
    ] {
        assert_eq!(unread(args), (Some(0), String::new()), "{args:?}");
    }
}

#[test]
fn a_doctor_whom_nobody_reads_keeps_the_exit_code_of_its_findings() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("agent.toml");
    std::fs::write(&config, "x = 1\n").unwrap();
    for more in [&[][..], &["--json"]] {
        let args = [&["doctor", "--offline", "--config", config.to_str().unwrap()], more].concat();
        assert_eq!(culvert(&args).status.code(), Some(2));
        assert_eq!(unread(&args), (Some(2), String::new()));
    }
}

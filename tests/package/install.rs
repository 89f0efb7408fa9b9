//! `deploy/install`: from a checkout into a folder, and into a system that runs.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    place::Cable,
    process::{run, text},
};

use crate::{BUILD, MACHINE, built, machine::Machine, repository};

const LIMIT: Duration = Duration::from_secs(60);

/// Runs it for the system in `root`.
fn installation(root: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(repository("deploy/install"));
    run(command.env("DESTDIR", root).args(arguments), LIMIT)
}

/// Every file under `root`, in order.
fn paths(root: &Path) -> Vec<PathBuf> {
    let mut find = Command::new("find");
    let output = run(find.arg(root).args(["-type", "f", "-printf", "%P\n"]), LIMIT);
    let mut paths: Vec<PathBuf> = text(&output.stdout).lines().map(PathBuf::from).collect();
    paths.sort();
    paths
}

#[test]
fn a_checkout_is_installed_twice_and_taken_away_by_one_command() {
    if !needs::met("the installation from a checkout", BUILD) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let program = ["--binary", binary().to_str().unwrap(), "--prefix", "/opt/culvert"];
    let installed = installation(root, &program);
    assert!(installed.status.success(), "{}", text(&installed.stderr));
    assert!(text(&installed.stdout).contains("systemctl start culvert"));
    let first = paths(root);
    for path in [
        "opt/culvert/bin/culvert",
        "opt/culvert/share/man/man1/culvert.1",
        "opt/culvert/share/bash-completion/completions/culvert",
        "opt/culvert/share/doc/culvert/examples/agent.example.toml",
        "usr/local/lib/systemd/system/culvert.service",
        "usr/local/lib/sysusers.d/culvert.conf",
    ] {
        assert!(first.iter().any(|each| each == Path::new(path)), "{path}: {first:#?}");
    }
    assert_eq!(fs::metadata(root.join("etc/culvert")).unwrap().permissions().mode() & 0o777, 0o750);
    fs::write(root.join("etc/culvert/agent.toml"), "of the operator").unwrap();
    assert!(installation(root, &program).status.success());
    assert_eq!(fs::read_to_string(root.join("etc/culvert/agent.toml")).unwrap(), "of the operator");
    assert_eq!(paths(root).len(), first.len() + 1);
    assert!(installation(root, &["--prefix", "/opt/culvert", "--uninstall"]).status.success());
    assert_eq!(paths(root), [Path::new("etc/culvert/agent.toml")]);

    for (wrong, words) in [
        (&["--what"][..], "remedy: --prefix"),
        (&["--binary"], "needs a path"),
        (&["--binary", "/nonexistent"], "is no program"),
    ] {
        let refused = installation(root, wrong);
        assert!(!refused.status.success() && text(&refused.stderr).contains(words), "{wrong:?}: {refused:?}");
    }
}

#[test]
fn it_compiles_with_a_compiler_that_is_new_enough_and_says_what_to_install_otherwise() {
    const REMEDIES: [&str; 2] = ["https://rustup.rs", "rustc-web"];
    if !needs::met("a compiler", BUILD) {
        return;
    }
    let (root, tools) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let stub = |name: &str, script: &str| {
        let file = tools.path().join(name);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    };
    let install = |path: &str| {
        let mut command = Command::new(repository("deploy/install"));
        // Nor is there a compiler in the home, where rustup puts one.
        command.env("PATH", path).env("DESTDIR", root.path()).env("HOME", root.path());
        command.env("CARGO_TARGET_DIR", tools.path());
        run(&mut command, LIMIT)
    };
    let alone = tools.path().join("alone");
    fs::create_dir(&alone).unwrap();
    for name in
        ["bash", "sh", "sed", "dirname", "mkdir", "realpath", "stat", "getent", "cut", "env", "runuser"]
    {
        std::os::unix::fs::symlink(needs::tool(name).unwrap(), alone.join(name)).unwrap();
    }
    let refused = install(alone.to_str().unwrap());
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && REMEDIES.iter().all(|words| said.contains(words)), "{said}");

    let path = format!("{}:{}", tools.path().display(), std::env::var("PATH").unwrap());
    let compile = "[ \"$*\" = 'build --release --locked --package culvert' ] || exit 1\n\
                   mkdir -p \"$CARGO_TARGET_DIR/release\" && cp PROGRAM \"$CARGO_TARGET_DIR/release/culvert\"";
    stub("cargo", &compile.replace("PROGRAM", binary().to_str().unwrap()));
    stub("rustc", "echo 'rustc 1.63.0 (4b91a6ea7 2022-08-08)'");
    let refused = install(&path);
    let said = text(&refused.stderr);
    assert!(
        said.contains("Rust 1.63.0 is older") && REMEDIES.iter().all(|words| said.contains(words)),
        "{said}"
    );
    assert!(!refused.status.success() && !root.path().join("usr").exists());
    stub("rustc", "echo 'rustc 1.96.0 (ac68faa20 2026-05-25)'");
    let installed = install(&path);
    assert!(installed.status.success(), "{}", text(&installed.stderr));
    assert!(root.path().join("usr/local/bin/culvert").exists());
}

#[test]
fn on_a_system_that_runs_it_brings_a_service_that_an_upgrade_restarts() {
    const TEST: &str = "the installation on a system that runs";
    if !needs::met(TEST, &[BUILD, MACHINE, &[Need::Tun]].concat()) {
        return;
    }
    if !Path::new("/lib/systemd/systemd").exists() {
        needs::missing(TEST, "systemd (apt-get install systemd)");
        return;
    }
    // An overlay over this host's own system, which has what the script calls.
    let cable = Cable::new();
    let machine = Machine::with_systemd(Path::new("/"), &cable.places()[0]);
    built::copy_to(&machine.path("/root/checkout"));
    fs::copy(binary(), machine.path("/root/program")).unwrap();
    let install = || machine.tell(&["/root/checkout/deploy/install", "--binary", "/root/program"]);

    install();
    assert_eq!(machine.tell(&["systemctl", "is-enabled", "culvert"]).trim(), "enabled");
    assert_eq!(machine.tell(&["stat", "--format=%a %U %G", "/etc/culvert"]).trim(), "750 root culvert");
    let advertise = format!("{}:443", Cable::FIRST[0]);
    let init = ["/usr/local/bin/culvert", "init", "--role", "exit", "--tun", "--advertise", &advertise];
    machine.tell(&init);
    machine.tell(&["systemctl", "start", "culvert"]);
    let first = machine.property("MainPID");
    let config = fs::read(machine.path("/etc/culvert/agent.toml")).unwrap();
    install();
    assert_eq!(machine.property("ActiveState"), "active", "{}", machine.journal());
    assert_ne!(machine.property("MainPID"), first, "the new program does not run");
    assert_eq!(fs::read(machine.path("/etc/culvert/agent.toml")).unwrap(), config);
    machine.tell(&["/root/checkout/deploy/install", "--uninstall"]);
    assert_eq!(machine.property("LoadState"), "not-found");
    assert!(!machine.path("/usr/local/bin/culvert").exists());
    assert!(machine.path("/etc/culvert/identity.key").exists());
}

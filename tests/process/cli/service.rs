//! `culvert run` as a service: what the service manager is told, signals, what the process keeps to itself.

use std::{
    fs::{self, File},
    io,
    net::{Ipv4Addr, TcpStream, UdpSocket},
    os::unix::{
        fs::{MetadataExt, chown},
        net::UnixDatagram,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use culvert_tests::{
    agent::{SHUTDOWN_LIMIT, binary},
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::Place,
    ports,
    process::Running,
};
use tempfile::TempDir;

use crate::run::configuration;

const NEEDS: &[Need] = &[Need::Tool("setpriv", "util-linux")];

/// A daemon and its service manager, which is this test.
struct Unit {
    daemon: Running,
    manager: UnixDatagram,
    file: PathBuf,
    folder: TempDir,
}

impl Unit {
    /// Starts a daemon with `more` in its configuration, and these variables in its environment.
    fn start(more: &str, environment: &[(&str, &str)]) -> Self {
        let (folder, file) = configuration(more);
        let manager = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        manager.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut command = Place::Host.command(binary());
        command.args(["run", "--config"]).arg(&file);
        command.env("NOTIFY_SOCKET", folder.path().join("notify")).envs(environment.iter().copied());
        let log = File::create(folder.path().join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Self { daemon: Running::start("the daemon", &mut command), manager, file, folder }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// The next datagram.
    #[track_caller]
    fn told(&self) -> String {
        let mut datagram = [0; 512];
        match self.manager.recv(&mut datagram) {
            Ok(length) => String::from_utf8(datagram[..length].to_vec()).unwrap(),
            Err(error) => panic!("nothing is told: {error}: {}", self.log()),
        }
    }

    /// The next datagram that begins with `state`; no other comes before, except for signs of life and new lines of
    /// status.
    #[track_caller]
    fn told_of(&self, state: &str) -> String {
        loop {
            let told = self.told();
            if told.starts_with(state) {
                return told;
            }
            let between = told == "WATCHDOG=1" || told.starts_with("STATUS=");
            assert!(between, "{told:?} instead of {state}: {}", self.log());
        }
    }

    /// Waits until it catches SIGHUP, which is long before it is ready.
    fn catches_signals(&mut self) {
        let status = format!("/proc/{}/status", self.daemon.pid());
        clock::until("signals are caught", PATIENCE, || {
            let text = fs::read_to_string(&status).map_err(|error| error.to_string())?;
            let caught = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).ok_or("no SigCgt")?;
            let caught = u64::from_str_radix(caught.trim(), 16).unwrap();
            // SIGHUP is signal 1.
            if caught & 1 == 1 { Ok(()) } else { Err(format!("{caught:x}")) }
        });
    }
}

#[test]
fn the_manager_is_told_of_start_reload_life_and_end() {
    if !needs::met("a service", NEEDS) {
        return;
    }
    let [quic, metrics] = [ports::free(), ports::free()];
    let more =
        format!("transport.listen = [\"127.0.0.1:{quic}\"]\nmetrics.listen = \"127.0.0.1:{metrics}\"\n");
    let mut unit = Unit::start(&more, &[("WATCHDOG_USEC", "1000000")]);
    let ready = unit.told_of("READY=1\n");
    assert!(ready.ends_with("STATUS=0 of 1 peers connected, 0 flows"), "{ready:?}");
    let taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, quic)).unwrap_err();
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse, "ready means that the ports are open");
    TcpStream::connect((Ipv4Addr::LOCALHOST, metrics)).unwrap();
    for _ in 0..2 {
        clock::until("a sign of life", PATIENCE, || {
            let told = unit.told();
            if told == "WATCHDOG=1" { Ok(()) } else { Err(told) }
        });
    }
    for _ in 0..2 {
        unit.daemon.signal("HUP");
        let reloading = unit.told_of("RELOADING=1\n");
        assert!(
            reloading.contains("\nMONOTONIC_USEC="),
            "in one datagram, or systemd ignores it: {reloading}"
        );
        unit.told_of("READY=1\nSTATUS=0 of 1 peers connected, 0 flows; ");
    }
    assert!(unit.daemon.ended().is_none());
    unit.daemon.terminate();
    unit.told_of("STOPPING=1\n");
    assert_eq!(unit.daemon.wait(SHUTDOWN_LIMIT).code(), Some(0), "{}", unit.log());
    assert!(unit.log().trim_end().ends_with("stopped"), "{}", unit.log());
}

#[test]
fn the_sign_of_life_is_not_given_for_another_process() {
    if !needs::met("a service", NEEDS) {
        return;
    }
    let mut unit = Unit::start("", &[("WATCHDOG_USEC", "100000"), ("WATCHDOG_PID", "1")]);
    let mut told = vec![unit.told()];
    // A reload is a while after the first look at the workers.
    unit.daemon.signal("HUP");
    while told.iter().filter(|told| told.starts_with("READY=1\n")).count() < 2 {
        told.push(unit.told());
    }
    unit.daemon.signal("INT");
    while !told.last().is_some_and(|told| told.starts_with("STOPPING=1\n")) {
        told.push(unit.told());
    }
    assert!(!told.iter().any(|told| told.contains("WATCHDOG")), "{told:?}");
    assert_eq!(unit.daemon.wait(SHUTDOWN_LIMIT).code(), Some(0), "{}", unit.log());
}

#[test]
fn a_signal_before_it_is_ready_waits() {
    if !needs::met("a service", NEEDS) {
        return;
    }
    let mut unit = Unit::start("", &[]);
    unit.catches_signals();
    unit.daemon.signal("HUP");
    unit.told_of("READY=1\n");
    unit.told_of("RELOADING=1\n");
    unit.told_of("READY=1\n");
    unit.daemon.terminate();
    unit.told_of("STOPPING=1\n");
    assert_eq!(unit.daemon.wait(SHUTDOWN_LIMIT).code(), Some(0), "{}", unit.log());
}

#[test]
fn a_reload_of_a_broken_file_changes_nothing_and_is_in_the_log() {
    if !needs::met("a service", NEEDS) {
        return;
    }
    let mut unit = Unit::start("", &[]);
    unit.told_of("READY=1\n");
    fs::write(&unit.file, "identity.key_file = 7\nnonsense = true\n").unwrap();
    unit.daemon.signal("HUP");
    unit.told_of("RELOADING=1\n");
    let ready = unit.told_of("READY=1\n");
    assert!(ready.contains("the last reload failed"), "{ready:?}");
    let log = unit.log();
    let problem = log.lines().find(|line| line.contains("ERROR") && line.contains("cannot reload: "));
    assert!(problem.is_some(), "{log}");
    assert!(
        log.lines().any(|line| line.contains("nothing was changed") && line.contains("remedy: ")),
        "{log}"
    );
    assert!(unit.daemon.ended().is_none(), "{log}");
    unit.daemon.terminate();
    assert_eq!(unit.daemon.wait(SHUTDOWN_LIMIT).code(), Some(0), "{log}");
}

#[test]
fn no_core_file_and_no_debugger_sees_the_memory_of_a_daemon_that_is_not_root() {
    if !needs::met("a service of another user", &[Need::Root, Need::Tool("setpriv", "util-linux")]) {
        return;
    }
    const NOBODY: Option<u32> = Some(65_534);
    let metrics = ports::free();
    let (folder, file) = configuration(&format!("metrics.listen = \"127.0.0.1:{metrics}\"\n"));
    // Where the program was built may be out of that user's reach.
    let program = folder.path().join("culvert");
    fs::copy(binary(), &program).unwrap();
    for path in [folder.path(), &folder.path().join("identity.key"), &file, &program] {
        chown(path, NOBODY, NOBODY).unwrap();
    }
    let log = folder.path().join("log");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]);
    command.args(["--bounding-set=-all", "--pdeathsig", "KILL", "--"]).arg(&program);
    command.args(["run", "--config"]).arg(&file);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
    let mut daemon = Running::start("the daemon", &mut command);
    clock::until("the daemon is ready", PATIENCE, || {
        let log = fs::read_to_string(&log).unwrap();
        assert!(daemon.ended().is_none(), "{log}");
        if log.contains(": ready ") { Ok(()) } else { Err(log) }
    });
    let of = |file: &str| Path::new("/proc").join(daemon.pid().to_string()).join(file);
    let limits = fs::read_to_string(of("limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().filter(|word| *word == "0").count(), 2, "{core}");
    // What is not dumpable belongs to root in /proc (proc_pid(5)), and no other user may attach to it.
    assert_eq!(fs::metadata(of("mem")).unwrap().uid(), 0);
    let peek = |command: &mut Command| {
        let read = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--", "cat"];
        command.args(read).arg(of("environ")).output().unwrap()
    };
    assert!(!peek(&mut Command::new("setpriv")).status.success(), "another process of that user reads it");
    // Its own metrics still work.
    let page = fetch(metrics);
    for name in ["cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds", "threads"] {
        let sample = page.lines().find_map(|line| line.strip_prefix(&format!("culvert_process_{name} ")));
        let value: f64 = sample.unwrap_or_else(|| panic!("no {name}: {page}")).parse().unwrap();
        assert!(value > 0.0 || name == "cpu_seconds_total", "{name} is {value}");
    }
    daemon.terminate();
    assert_eq!(daemon.wait(SHUTDOWN_LIMIT).code(), Some(0));
}

/// The page `/metrics` at this port.
fn fetch(port: u16) -> String {
    use std::io::{Read, Write};

    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

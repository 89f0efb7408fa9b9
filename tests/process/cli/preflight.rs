//! `culvert doctor` on files and ports that the test has spoiled: what it finds, and its exit code. Sends nothing.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    time::Duration,
};

use culvert_tests::{
    agent::{binary, culvert, keygen},
    needs,
    place::Cable,
    ports,
    process::{run, text},
};
use serde_json::Value;
use tempfile::TempDir;

/// A folder with a key and a configuration in which the clock does not matter, and which asks for little.
struct Case {
    folder: TempDir,
    listen: SocketAddr,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        keygen(&folder.path().join("identity.key"));
        Self { folder, listen: (Ipv4Addr::LOCALHOST, ports::free()).into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes the configuration, with `more` at its end.
    fn file(&self, more: &str) -> PathBuf {
        let text = format!(
            "identity = {{ key_file = \"identity.key\", state_dir = \"state\" }}\ncontrol.socket = \"control\"\n\
             transport = {{ listen = [\"{}\"], workers = 1 }}\naccess.knock = \"off\"\n{more}",
            self.listen
        );
        let file = self.path("agent.toml");
        fs::write(&file, text).unwrap();
        file
    }
}

/// Little enough for every host; a line of TOML.
const LITTLE: &str =
    "limits = { flows = 10, tcp_streams_per_peer = 10, tcp_streams = 10, receive_buffer = \"64KiB\" }\n";

/// Runs the doctor: the exit code and the report.
#[track_caller]
fn examine(command: &mut Command, file: &str, more: &[&str]) -> (Option<i32>, Value) {
    let output = run(
        command.args(["doctor", "--offline", "--json", "--config", file]).args(more),
        Duration::from_secs(60),
    );
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr))))
}

/// The findings of a check.
fn of<'r>(report: &'r Value, check: &str) -> Vec<&'r Value> {
    let findings = report["findings"].as_array().unwrap();
    findings.iter().filter(|finding| finding["check"] == check).collect()
}

/// The one finding of a check, which has this severity.
#[track_caller]
fn only<'r>(report: &'r Value, check: &str, severity: &str) -> &'r Value {
    let found = of(report, check);
    let [finding] = found[..] else { panic!("{check}: {report:#}") };
    assert_eq!(finding["severity"], severity, "{finding:#}");
    finding
}

#[test]
fn a_key_that_everybody_can_read_is_an_error_with_its_remedy() {
    let case = Case::new();
    let (key, file) = (case.path("identity.key"), case.file(LITTLE));
    let file = file.to_str().unwrap();
    let (_, report) = examine(&mut Command::new(binary()), file, &[]);
    only(&report, "key-file", "ok");
    fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    let (code, report) = examine(&mut Command::new(binary()), file, &[]);
    let finding = only(&report, "key-file", "error");
    assert_eq!(finding["remedy"], format!("chmod o= {}", key.display()), "{finding:#}");
    assert_eq!((code, &report["severity"]), (Some(2), &"error".into()), "{report:#}");
    // The remedy is a command that works.
    let remedy = finding["remedy"].as_str().unwrap().to_owned();
    assert!(run(Command::new("sh").args(["-c", &remedy]), Duration::from_secs(10)).status.success());
    let (_, report) = examine(&mut Command::new(binary()), file, &[]);
    only(&report, "key-file", "ok");
}

#[test]
fn a_missing_folder_is_found_and_its_remedy_makes_it() {
    let case = Case::new();
    let file = case.file(LITTLE);
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("\"control\"", "\"run/control\"")).unwrap();
    let file = file.to_str().unwrap();
    let (code, report) = examine(&mut Command::new(binary()), file, &[]);
    let remedy = only(&report, "control-folder", "error")["remedy"].as_str().unwrap();
    // The package's user gets it, where there is one.
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let packaged = needs::is_root() && users.lines().any(|line| line.starts_with("culvert:"));
    let whose = if packaged { "-o culvert -g culvert " } else { "" };
    assert_eq!(
        (code, remedy),
        (Some(2), &*format!("install -d -m 0700 {whose}{}", case.path("run").display()))
    );
    assert!(run(Command::new("sh").args(["-c", remedy]), Duration::from_secs(10)).status.success());
    let (_, report) = examine(&mut Command::new(binary()), file, &[]);
    only(&report, "control-folder", "ok");
}

#[test]
fn a_taken_port_is_found_for_each_protocol() {
    let case = Case::new();
    let metrics = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let more = format!("{LITTLE}metrics.listen = \"{}\"\n", metrics.local_addr().unwrap());
    let file = case.file(&more);
    let file = file.to_str().unwrap();
    let severities = || -> (Option<i32>, Vec<Value>) {
        let (code, report) = examine(&mut Command::new(binary()), file, &[]);
        (code, of(&report, "ports").iter().map(|finding| finding["severity"].clone()).collect())
    };
    assert_eq!(severities(), (Some(2), vec!["ok".into(), "error".into()]));
    drop(metrics);
    let _taken = UdpSocket::bind(case.listen).unwrap();
    assert_eq!(severities(), (Some(2), vec!["error".into(), "ok".into()]));
}

#[test]
fn a_buffer_beyond_the_kernels_limit_is_found_unless_it_does_not_bind() {
    let limit = fs::read_to_string("/proc/sys/net/core/rmem_max").unwrap();
    let more = limit.trim().parse::<u64>().unwrap() * 2;
    if more > 1 << 30 {
        return needs::missing("a small buffer", "a net.core.rmem_max of 512 MiB at most");
    }
    let case = Case::new();
    let file = case.file(&LITTLE.replace("64KiB", &format!("{more}B")));
    let file = file.to_str().unwrap();
    // Root without CAP_NET_ADMIN is bound; another user is anyway.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"]).arg(binary());
    let mut bound = if needs::is_root() { command } else { Command::new(binary()) };
    let (code, report) = examine(&mut bound, file, &[]);
    let remedy = only(&report, "receive-buffer", "warning")["remedy"].as_str().unwrap();
    assert!(remedy.starts_with(&format!("sysctl -w net.core.rmem_max={more} ")), "{remedy}");
    assert!(code > Some(0), "{report:#}");
    if needs::is_root() {
        let (_, report) = examine(&mut Command::new(binary()), file, &[]);
        only(&report, "receive-buffer", "ok");
    }
}

#[test]
fn a_host_on_which_all_is_well_ends_with_0() {
    let needed =
        &[needs::Need::Root, needs::Need::Tool("ip", "iproute2"), needs::Need::Tool("setpriv", "util-linux")];
    if !needs::met("a host on which all is well", needed) {
        return;
    }
    let (case, cable) = (Case::new(), Cable::new());
    let file = case.file(LITTLE);
    let (code, report) = examine(&mut cable.places()[0].command(binary()), file.to_str().unwrap(), &[]);
    assert_eq!(code, Some(0), "{report:#}");
    for check in ["key-file", "state-folder", "udp-segmentation", "ports", "open-files"] {
        only(&report, check, "ok");
    }
}

#[test]
fn a_wrong_configuration_is_shown_by_key_and_the_rest_is_looked_at() {
    let case = Case::new();
    let file = case.file("metrics.listen = \"somewhere\"\n");
    let (code, report) = examine(&mut Command::new(binary()), file.to_str().unwrap(), &[]);
    let finding = only(&report, "configuration", "error");
    assert_eq!((code, finding["value"].as_str()), (Some(2), Some("metrics.listen")), "{finding:#}");
    assert!(!of(&report, "receive-buffer").is_empty());
    let missing = case.path("missing.toml");
    let (code, report) = examine(&mut Command::new(binary()), missing.to_str().unwrap(), &[]);
    only(&report, "configuration", "error");
    assert_eq!(code, Some(2));
}

#[test]
fn the_text_ends_with_what_is_to_be_done() {
    let case = Case::new();
    let _taken = UdpSocket::bind(case.listen).unwrap();
    let file = case.file(LITTLE);
    let output = culvert(&["doctor", "--offline", "--config", file.to_str().unwrap()]);
    let (shown, error) =
        (text(&output.stdout), format!("\nerror: ports: transport.listen {} UDP: taken\n", case.listen));
    assert!(shown.contains(&error) && shown.contains("\n  remedy: stop it: ss -lunp"), "{shown}");
    assert_eq!(output.status.code(), Some(2));
    assert!(shown.lines().last().is_some_and(|line| line.starts_with("1 error, ")), "{shown}");
}

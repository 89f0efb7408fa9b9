//! `culvert run` when the machine does not give it what the configuration asks for.

use std::{
    fs::File,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::Stdio,
};

use culvert_tests::{
    agent::{SHUTDOWN_LIMIT, binary, culvert, keygen},
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::Place,
    ports,
    process::{Running, text},
};
use tempfile::TempDir;

/// Writes a key and a configuration with `more` in it.
pub(crate) fn configuration(more: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    keygen(&folder.path().join("identity.key"));
    let config = format!(
        "identity = {{ key_file = \"identity.key\", state_dir = \"state\" }}\ncontrol.socket = \"\"\n{more}\n\
         [[peer]]\nname = \"exit\"\npublic_key = \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE\"\n\
         endpoints = [\"127.0.0.1:9\"]\n"
    );
    let file = folder.path().join("culvert.toml");
    std::fs::write(&file, config).unwrap();
    (folder, file)
}

/// Runs an agent with `more` in its configuration, which must end at once because a port is taken.
#[track_caller]
fn fails_for_port(port: u16, more: &str) {
    let (_folder, file) = configuration(more);
    let output = culvert(&["run", "--config", Path::to_str(&file).unwrap()]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let told = |line: &str| {
        [&format!("127.0.0.1:{port}"), "in use", "remedy: "].iter().all(|words| line.contains(*words))
    };
    assert!(stderr.lines().any(told), "the cause or the remedy is missing: {stderr}");
}

#[test]
fn a_taken_quic_port_is_named() {
    let port = ports::free();
    let _taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    fails_for_port(port, &format!("transport.listen = [\"127.0.0.1:{port}\"]"));
}

#[test]
fn a_taken_ingress_port_is_named() {
    let port = ports::free();
    let _taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    fails_for_port(
        port,
        &format!("[[udp]]\nlisten = \"127.0.0.1:{port}\"\npeer = \"exit\"\nservice = \"x\""),
    );
}

#[test]
fn a_taken_tcp_port_is_named() {
    let port = ports::free();
    let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    fails_for_port(
        port,
        &format!("[[tcp]]\nlisten = \"127.0.0.1:{port}\"\npeer = \"exit\"\nservice = \"x\""),
    );
}

#[test]
fn a_taken_metrics_port_is_named() {
    let port = ports::free();
    let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    fails_for_port(port, &format!("metrics.listen = \"127.0.0.1:{port}\""));
}

#[test]
fn a_fifo_in_the_place_of_a_file_keeps_no_daemon_from_its_work() {
    let (folder, file) = configuration("");
    let fifo = folder.path().join("fifo.toml");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let fifo = fifo.to_str().unwrap();
    for args in [&["run", "--config", fifo][..], &["check", "--config", fifo]] {
        let output = culvert(args);
        let stderr = text(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{stderr}");
        assert!(stderr.contains("a FIFO") && stderr.contains("remedy"), "{stderr}");
    }
    // What others write beside the configuration.
    let config = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, config.replace("state_dir", "peers_dir = \".\", state_dir")).unwrap();
    let output = culvert(&["check", "--config", file.to_str().unwrap()]);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(said.contains("fifo.toml: cannot be read: it is a FIFO"), "{said}");
}

#[test]
fn a_second_daemon_does_not_join_the_ports_of_the_first() {
    if !needs::met("two daemons", &[Need::Tool("setpriv", "util-linux")]) {
        return;
    }
    // With several workers each port is a group of sockets, which any process of the same user could join.
    for [first, second] in [[3, 3], [3, 1], [1, 3]] {
        let [quic, ingress] = [ports::free(), ports::free()];
        let listen =
            |workers| format!("transport.workers = {workers}\ntransport.listen = [\"127.0.0.1:{quic}\"]");
        let forward = |workers| {
            let forward =
                format!("[[udp]]\nlisten = \"127.0.0.1:{ingress}\"\npeer = \"exit\"\nservice = \"x\"");
            format!("transport.workers = {workers}\n{forward}")
        };
        let both = format!("{}\n{}", listen(first), forward(first).split_once('\n').unwrap().1);
        let (folder, file) = configuration(&both);
        let log = folder.path().join("log");
        let mut command = Place::Host.command(binary());
        command.args(["run", "--config"]).arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let mut daemon = Running::start("the first daemon", &mut command);
        clock::until("the first daemon is ready", PATIENCE, || {
            let log = std::fs::read_to_string(&log).unwrap();
            assert!(daemon.ended().is_none(), "{log}");
            if log.contains(": ready ") { Ok(()) } else { Err(log) }
        });
        fails_for_port(quic, &listen(second));
        fails_for_port(ingress, &forward(second));
        assert!(daemon.ended().is_none(), "the first daemon goes on");
        daemon.terminate();
        assert_eq!(daemon.wait(SHUTDOWN_LIMIT).code(), Some(0));
        // Nothing else held the ports.
        UdpSocket::bind((Ipv4Addr::LOCALHOST, quic)).unwrap();
    }
}

//! `culvert run` when the machine does not give it what the configuration asks for.

use std::{
    net::{Ipv4Addr, TcpListener, UdpSocket},
    path::Path,
};

use culvert_tests::{
    agent::{culvert, keygen},
    ports,
    process::text,
};

/// Runs an agent with `more` in its configuration, which must end at once because a port is taken.
#[track_caller]
fn fails_for_port(port: u16, more: &str) {
    let folder = tempfile::tempdir().unwrap();
    keygen(&folder.path().join("identity.key"));
    let config = format!(
        "identity.key_file = \"identity.key\"\n{more}\n\
         [[peer]]\nname = \"exit\"\npublic_key = \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE\"\n\
         endpoints = [\"127.0.0.1:9\"]\n"
    );
    let file = folder.path().join("culvert.toml");
    std::fs::write(&file, config).unwrap();
    let output = culvert(&["run", "--config", Path::to_str(&file).unwrap()]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let told = |line: &str| line.contains(&format!("127.0.0.1:{port}")) && line.contains("in use");
    assert!(stderr.lines().any(told), "the cause is missing: {stderr}");
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

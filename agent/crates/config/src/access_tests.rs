use std::{net::UdpSocket, time::Duration};

use gate::knock::MAX_CLOCK_WINDOW;

use super::*;
use crate::tests::*;

#[test]
fn access_and_control_arrive() {
    let text = format!(
        "identity.state_dir = \"state\"\n{BASE}[access]\nmode = \"open\"\nservices = [\"dns\"]\nclock_window = \"20s\"\n\
         decoy = \"192.0.2.1:4433\"\n[control]\nsocket = \"culvert.sock\"\n"
    );
    let config = parse(&text).unwrap();
    let access = Access {
        mode: AccessMode::Open,
        services: vec![0],
        clock_window: Duration::from_secs(20),
        knock: Knock::Required,
        decoy: Some("192.0.2.1:4433".parse().unwrap()),
    };
    assert_eq!(config.access, access);
    assert_eq!(config.control.as_deref(), Some(Path::new("/etc/culvert/culvert.sock")));
    assert_eq!(config.state_dir, Path::new("/etc/culvert/state"));
    assert_eq!(parse(&format!("{BASE}[control]\nsocket = \"\"\n")).unwrap().control, None);
    let off = parse(&format!("{BASE}[access]\nknock = \"off\"\n")).unwrap();
    assert_eq!(off.access, Access { knock: Knock::Off, ..defaults::ACCESS });
}

#[test]
fn access_is_checked() {
    expect("[access]\nmode = \"closed\"\n", 10, "access.mode", "\"allowlist\" or \"open\"");
    expect("[access]\nknock = false\n", 10, "access.knock", "a text in quotes");
    expect("[access]\nservices = [\"web\"]\n", 10, "access.services[0]", "no [[service]] is named \"web\"");
    expect("[access]\nclock_window = \"19s\"\n", 10, "access.clock_window", "repeats one proof for 15 s");
    expect("[access]\nclock_window = \"601s\"\n", 10, "access.clock_window", "too long");
    let longest = parse(&format!("{BASE}[access]\nclock_window = \"10m\"\n")).unwrap();
    assert_eq!(longest.access.clock_window, MAX_CLOCK_WINDOW);
    let anyone = "[access]\nmode = \"open\"\nknock = \"off\"\n";
    expect(anyone, 11, "access.knock", "every QUIC client that finds the port would be let in");
    expect("[control]\nsocket = 1\n", 10, "control.socket", "is an integer");
    let long = format!("[control]\nsocket = \"/{}\"\n", "x".repeat(103));
    expect(&long, 10, "control.socket", "at most 103 bytes");
    expect("[limits]\npeers = 0\n", 10, "limits.peers", "out of range");
    let two = format!("[[peer]]\nname = \"b\"\npublic_key = \"{KEY_2}\"\n[limits]\npeers = 1\n");
    expect(&two, 13, "limits.peers", "there are 2 peers, and 1 are allowed");
}

#[test]
fn a_decoy_is_another_server_and_something_reaches_it() {
    let decoy = |address: &str| format!("[access]\ndecoy = \"{address}\"\n");
    expect(&decoy("127.0.0.1:0"), 10, "access.decoy", "cannot be sent to");
    expect(&decoy("0.0.0.0:8443"), 10, "access.decoy", "cannot be sent to");
    expect(&decoy("www.example:443"), 10, "access.decoy", "is a host name");
    expect(&decoy("127.0.0.1:4433"), 10, "access.decoy", "is our own transport.listen[0] (127.0.0.1:4433)");
    expect(
        &(decoy("127.0.0.1:1") + "knock = \"off\"\n"),
        10,
        "access.decoy",
        "every sender may start a handshake",
    );
    let wildcard = BASE.replace("127.0.0.1:4433", "0.0.0.0:4433");
    let own = only_problem(&format!("{wildcard}{}", decoy("127.0.0.1:4433")));
    assert!(own.to_string().contains("is our own"), "{own}");
    // The same port of another host, and of the other address family.
    for other in ["192.0.2.1:4433", "[::1]:4433"] {
        assert_eq!(parse(&format!("{wildcard}{}", decoy(other))).unwrap().access.decoy, other.parse().ok());
    }
    // An address of this host, wherever it has one besides loopback.
    let route = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    if let Ok(host) = route {
        let own = only_problem(&format!("{wildcard}{}", decoy(&format!("{}:4433", host.ip()))));
        assert!(own.to_string().contains("is our own transport.listen[0] (0.0.0.0:4433)"), "{own}");
    }
    let dials = BASE.replace("transport.listen = [\"127.0.0.1:4433\"]", "");
    let silent = only_problem(&format!("{dials}endpoints = [\"a:1\"]\n{}", decoy("127.0.0.1:1")));
    assert!(silent.to_string().contains("does not listen"), "{silent}");
}

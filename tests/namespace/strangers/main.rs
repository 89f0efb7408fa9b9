//! QUIC clients of other people, which know nothing of Culvert, at an agent's port: without a decoy they meet silence;
//! with one, a real site, complete with data, a change of their port, and a close.
//!
//! | question | file |
//! |---|---|
//! | what an agent does to strangers | this one |
//! | a client on quinn | `browser.rs` |
//! | a client on aioquic | `aioquic_stranger.py` |
//! | the site: hypercorn, a server for HTTP/3 | `site.rs`, `decoy_site.py` |
//!
//! `tests/perf/quic_go_stranger` is one more client, to be run by hand.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod browser;
mod site;

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    needs::{self, Need},
    place::{Cable, Place},
    ports,
    process::{run, text},
    tap::Tap,
    venv,
};
use quinn::ConnectionError;

use browser::Browser;
use site::{Certificate, FOLDER, Site};

/// Bytes of an answer: about a thousand packets.
const BYTES: usize = 1 << 20;

/// The clients' own limit is shorter.
const CLIENT_LIMIT: Duration = Duration::from_secs(60);

/// Runs the client on aioquic, which must say `outcome`.
#[track_caller]
fn aioquic(python: &Path, place: &Place, verb: &str, target: SocketAddr, more: &[&str], outcome: &str) {
    let mut command = place.command(python);
    command.arg(Path::new(FOLDER).join("aioquic_stranger.py"));
    command.args([verb, &target.ip().to_string(), &target.port().to_string()]).args(more);
    let output = run(&mut command, CLIENT_LIMIT);
    assert_eq!(text(&output.stdout).trim(), outcome, "{}", text(&output.stderr));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Both clients visit the site at `target`.
#[track_caller]
fn visit(python: &Path, place: &Place, target: SocketAddr, certificate: &Certificate) {
    let size = BYTES.to_string();
    for _ in 0..2 {
        Browser::new(place, &certificate.der).visit(target, BYTES);
        aioquic(python, place, "get", target, &[&certificate.file(), &size], "fetched");
    }
}

/// An agent at `place` that listens on the second end of a cable, with two workers.
#[track_caller]
fn agent(place: &Place, access: &str) -> (Agent, SocketAddr) {
    let listen = SocketAddr::new(Cable::SECOND[0].parse().unwrap(), ports::free());
    let mut agent = Agent::new("agent", place);
    agent.configure(&format!("[transport]\nlisten = [\"{listen}\"]\nworkers = 2\n{access}"));
    agent.start();
    (agent, listen)
}

/// Without an agent: what the clients do is what they do with any server.
#[test]
fn the_clients_and_the_site_of_these_tests_get_on_with_each_other() {
    let test = "strangers";
    if !needs::met(test, &[Need::Tool("setpriv", "util-linux")]) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let certificate = Certificate::new();
    let site = Site::start(python, &Place::Host, &certificate);
    visit(python, &Place::Host, site.address, &certificate);
}

#[test]
fn strangers_on_other_quic_stacks_meet_silence() {
    let test = "strangers in silence";
    if !needs::met(test, needs::NETNS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let (certificate, cable) = (Certificate::new(), Cable::new());
    let [here, there] = cable.places();
    let (_agent, listen) = agent(&there, "");
    let tap = Tap::new(&here);
    let why = Browser::new(&here, &certificate.der).knock(listen);
    assert!(matches!(why, ConnectionError::TimedOut), "{why}");
    aioquic(python, &here, "silence", listen, &[&certificate.file()], "silence");
    let host: IpAddr = listen.ip();
    let packets = tap.take(&[host]);
    assert!(packets.is_empty(), "{} packets, first {:02x?}", packets.len(), packets[0]);
}

#[test]
fn strangers_on_other_quic_stacks_meet_the_site_behind_the_decoy() {
    let test = "strangers at the decoy";
    if !needs::met(test, needs::NETNS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let (certificate, cable) = (Certificate::new(), Cable::new());
    let [here, there] = cable.places();
    let site = Site::start(python, &there, &certificate);
    let (_agent, listen) = agent(&there, &format!("[access]\ndecoy = \"{}\"\n", site.address));
    visit(python, &here, listen, &certificate);
}

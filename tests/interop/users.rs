//! Users of the web server, by a client of HTTP/3 that is not ours: CONNECT and CONNECT-UDP, with good credentials and without.

use std::{path::Path, process::Command, time::Duration};

use culvert_tests::{
    agent::Agent,
    clock, needs,
    pair::Plan,
    process::{run, text},
    tcp_echo::TcpEcho,
    upstream::Echo,
    venv,
};

use crate::web::{NAME, WebSite, http_section};

/// The client's own limit is shorter.
const CLIENT_LIMIT: Duration = Duration::from_secs(120);

/// Runs the client, which must succeed; what it says.
#[track_caller]
fn client(python: &Path, verb: &str, port: u16, more: &[&str]) -> String {
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/interop/users_client.py"));
    let output = run(command.args([verb, &port.to_string()]).args(more), CLIENT_LIMIT);
    assert!(output.status.success(), "{verb} {more:?}: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

/// Adds a user by the command; its credentials.
fn add(agent: &Agent, name: &str, more: &[&str]) -> String {
    let said = agent.ask(&[&["user", "add", name, "--json"], more].concat());
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["done"], &said["running"]), (&"added".into(), &true.into()));
    format!("{name}:{}", said["password"].as_str().unwrap())
}

#[test]
fn a_user_reaches_what_it_may_and_nobody_else_does() {
    let test = "users";
    if !needs::met(test, needs::AGENTS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let (folder, tcp, udp) = (tempfile::tempdir().unwrap(), TcpEcho::new(), Echo::new());
    let (http, ca) = http_section(folder.path(), None);
    let services = format!(
        "[[service]]\nname = \"web\"\nupstream = \"{}\"\nprotocol = \"tcp\"\n\
         [[service]]\nname = \"here\"\nupstream = \"any\"\nallow = [\"127.0.0.1/32\"]\n{http}",
        tcp.address
    );
    let pair = Plan::default().service("echo", udp.address, "").exit(&services).start();
    let (exit, port) = (&pair.exit, pair.underlay.port());
    let good = add(exit, "anna", &["--service", "web", "--service", "echo", "--network", "127.0.0.0/8"]);
    let ask = |verb: &str, credentials: &str, more: &[&str]| {
        client(python, verb, port, &[&[ca.as_str(), NAME, credentials], more].concat())
    };

    let figures = || -> serde_json::Value {
        let status: serde_json::Value = serde_json::from_str(&exit.ask(&["status", "--json"])).unwrap();
        status["status"]["users"][0].clone()
    };

    // TCP: both directions, half-close, and what breaks off.
    assert_eq!(ask("connect", &good, &["web:80", "1000000"]), "200 1000000");
    assert_eq!(tcp.end(), "end");
    assert_eq!(ask("connect", &good, &[&tcp.address.to_string(), "5"]), "200 5");
    assert_eq!(tcp.end(), "end");
    assert_eq!(ask("reset", &good, &["web:80"]), "reset 0x10c");
    assert_eq!(tcp.end(), "reset");
    assert_eq!(ask("broken", &good, &["web:80"]), "reset 0x10f");
    assert_eq!(tcp.end(), "reset it");
    for (target, status) in [
        ("nothing:1", "502 0"),
        ("127.0.0.2:80", "403 0"),
        ("192.0.2.1:80", "403 0"),
        ("127.0.0.1:1", "502 0"),
    ] {
        assert_eq!(ask("connect", &good, &[target, "1"]), status, "{target}");
    }
    // A rate, which is in effect at once: a megabyte each way at a megabyte a second.
    assert!(exit.ask(&["user", "set", "anna", "--rate", "8Mbit"]).contains("anna"));
    let began = clock::now();
    assert_eq!(ask("connect", &good, &["web:80", "1000000"]), "200 1000000");
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(900), "{took:?}");
    assert_eq!(tcp.end(), "end");
    assert!(exit.ask(&["user", "set", "anna", "--rate", "none"]).contains("anna"));
    // UDP: by a service's name and by an address, in frames and in capsules.
    assert_eq!(ask("udp", &good, &["echo", "7", "100"]), "200 100");
    let echo_port = udp.address.port().to_string();
    assert_eq!(ask("udp", &good, &["127.0.0.1", &echo_port, "3"]), "200 3");
    assert_eq!(ask("udp", &good, &["web", "80", "3"]), "403 0");

    let user = figures();
    assert_eq!((&user["name"], &user["sessions"]), (&"anna".into(), &0.into()), "{user}");
    // One more came with a request that was refused, and counts if it was there before the refusal.
    let ended = user["dropped_from_user"]["ended"].as_u64().unwrap_or(0);
    assert!(ended <= 1, "{user}");
    assert_eq!(user["datagrams"]["from_user"], 2 + 100 + 2 + 3 + ended, "{user}");
    assert_eq!(user["datagrams"]["to_target"], 2 + 100 + 2 + 3, "{user}");
    assert_eq!(user["datagrams"]["to_user"], 2 + 100 + 2 + 3, "{user}");
    assert_eq!(
        user["refused"],
        serde_json::json!({ "address": 1, "network": 1, "refused": 1, "resolve": 1, "service": 1 })
    );

    // libcurl: HTTP/1.1 inside HTTP/3, and HTTP/3 inside HTTP/3 to this very agent.
    let page = WebSite::new();
    let url = format!("http://{}/page", page.address);
    assert_eq!(ask("curl", &good, &[&url, "1"]), "200 GET /page HTTP/1.1 with 0 bytes");
    assert_eq!(ask("curl", &good, &[&format!("https://localhost:{port}/"), "3"]), "404");

    // Without good credentials all is as if there were none.
    let none = ask("answers", "-", &[]);
    assert!(none.matches("b'405'").count() == 8 && none.matches("b'404'").count() == 2, "{none}");
    for wrong in ["anna:wrong", "ben:wrong", "anna:", ":", &format!("{good}x")] {
        assert_eq!(ask("answers", wrong, &[]), none, "{wrong}");
    }

    // What is broken leaves nothing behind, and every datagram has its count.
    assert_eq!(ask("hostile", &good, &["echo", "7", "400"]), "200");
    exit.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    let user = figures();
    let count = |counts: &str, label: &str| user[counts][label].as_u64().unwrap_or(0);
    let dropped = |counts: &str| -> u64 {
        user[counts].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum()
    };
    assert_eq!(
        count("datagrams", "from_user"),
        count("datagrams", "to_target") + dropped("dropped_from_user"),
        "{user}"
    );
    assert_eq!(
        count("datagrams", "from_target"),
        count("datagrams", "to_user") + dropped("dropped_to_user"),
        "{user}"
    );
    assert!(count("dropped_from_user", "unknown_context") >= 40, "{user}");
    assert!(count("dropped_from_user", "unknown_capsule") >= 100, "{user}");

    // Changes are in effect at once.
    assert!(exit.ask(&["user", "set", "anna", "--disable"]).contains("anna"));
    assert_eq!(ask("answers", &good, &[]), none);
    assert!(exit.ask(&["user", "set", "anna", "--enable", "--service", "-web"]).contains("anna"));
    assert_eq!(ask("connect", &good, &["web:80", "5"]), "403 0");
    let said = exit.ask(&["user", "set", "anna", "--new-password", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(ask("answers", &good, &[]), none);
    let new = format!("anna:{}", said["password"].as_str().unwrap());
    assert_eq!(ask("udp", &new, &["echo", "7", "1"]), "200 1");
    assert!(exit.ask(&["user", "list"]).contains("127.0.0.0/8"));
    assert!(exit.ask(&["user", "remove", "anna"]).contains("anna"));
    assert!(!exit.ask(&["user", "list"]).contains("anna"));
}

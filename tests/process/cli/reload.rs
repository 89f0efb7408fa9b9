//! `culvert reload`: what it asks, what it shows, and its exit codes. Another process in the daemon's place answers.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixListener,
    process::Output,
    thread,
};

use culvert_tests::{
    agent::{culvert, keygen},
    process::text,
};
use serde_json::{Value, json};

/// Runs `culvert reload`, whose request gets `answer`; returns the request too.
fn asked(answer: &Value, args: &[&str]) -> (Value, Output) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    let listener = UnixListener::bind(&path).unwrap();
    let line = format!("{answer}\n");
    thread::scope(|scope| {
        let daemon = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut request).unwrap();
            stream.write_all(line.as_bytes()).unwrap();
            serde_json::from_str(&request).unwrap()
        });
        let output = culvert(&[&["reload", "--socket", path.to_str().unwrap()], args].concat());
        (daemon.join().unwrap(), output)
    })
}

fn reloaded() -> Value {
    json!({
        "version": 1,
        "answer": "reloaded",
        "changes": [
            { "what": "transport.workers", "kind": "changed", "from": "0", "to": "2", "effect": "restart" },
            { "what": "peer \"exit\": lanes", "kind": "changed", "from": "0", "to": "4", "effect": "next-connection" },
            { "what": "service \"dns\"", "kind": "removed", "from": "127.0.0.1:53", "effect": "now" },
            { "what": "udp \"127.0.0.1:5301\"", "kind": "added", "to": "service \"ntp\" of peer \"exit\"", "effect": "now" },
        ],
        "notes": ["/etc/culvert/agent.toml:3: there is no peer"],
    })
}

#[test]
fn the_difference_is_shown_by_when_it_is_in_effect() {
    let (request, output) = asked(&reloaded(), &[]);
    assert_eq!(request, json!({ "version": 1, "request": "reload" }));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stdout),
        "In effect now:\n  - service \"dns\": 127.0.0.1:53\n  + udp \"127.0.0.1:5301\": service \"ntp\" of peer \"exit\"\n\
         In effect with the next connection with the peer:\n  ~ peer \"exit\": lanes: 0 -> 4\n\
         Not in effect before a restart (systemctl restart culvert):\n  ~ transport.workers: 0 -> 2\n\
         note: /etc/culvert/agent.toml:3: there is no peer\n"
    );

    let (request, output) = asked(&reloaded(), &["--dry-run"]);
    assert_eq!(request, json!({ "version": 1, "request": "reload", "dry_run": true }));
    assert!(text(&output.stdout).starts_with("A reload would put into effect:\n  - service"), "{output:?}");

    let nothing = json!({ "version": 1, "answer": "reloaded", "changes": [], "notes": [] });
    let (_, output) = asked(&nothing, &[]);
    assert_eq!(text(&output.stdout), "nothing has changed\n");
}

#[test]
fn json_has_what_the_daemon_said() {
    let (_, output) = asked(&reloaded(), &["--json", "--dry-run"]);
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let answer = reloaded();
    assert_eq!(
        shown,
        json!({ "version": 1, "dry_run": true, "changes": answer["changes"], "notes": answer["notes"] })
    );
}

#[test]
fn a_wrong_configuration_ends_with_2_and_each_problem_on_a_line() {
    let problems = "/etc/culvert/agent.toml:4: limits.flows: 0 is out of range (remedy: write 1 to 10000000)\n\
                    /etc/culvert/agent.toml:9: peer[0].lane: unknown key (remedy: did you mean lanes?)";
    let refused =
        |bad_input| json!({ "version": 1, "answer": "refused", "bad_input": bad_input, "error": problems });
    let (_, output) = asked(&refused(true), &[]);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    let (_, as_json) = asked(&refused(true), &["--json"]);
    assert_eq!((as_json.status.code(), text(&as_json.stdout).as_str()), (Some(2), ""));
    assert_eq!(as_json.stderr, output.stderr, "for people, in both cases");
    let stderr = text(&output.stderr);
    let rest = stderr.strip_prefix(problems).unwrap_or_else(|| panic!("{stderr}"));
    assert!(rest.starts_with("\nculvert: nothing has changed: ") && rest.contains("(remedy: "), "{stderr}");

    let (_, output) = asked(&refused(false), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("culvert: /etc/culvert/agent.toml:4"), "{output:?}");
}

#[test]
fn without_a_daemon_it_ends_with_1_and_with_2_if_the_file_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    keygen(&folder.path().join("identity.key"));
    let file = folder.path().join("agent.toml");
    let config = "identity.key_file = \"identity.key\"\nidentity.state_dir = \"\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
                  control.socket = \"control\"\n";
    let ended = |config: &str| {
        fs::write(&file, config).unwrap();
        let output = culvert(&["reload", "--config", file.to_str().unwrap()]);
        (output.status.code(), text(&output.stderr))
    };
    let (code, stderr) = ended(config);
    assert!(
        code == Some(1) && stderr.contains("no daemon answers at") && stderr.contains("(remedy: "),
        "{stderr}"
    );
    // What the file says of the socket may be wrong too.
    let (code, stderr) = ended(&config.replace("control.socket", "control.sockets"));
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("culvert: no daemon answers at ") && stderr.contains("--socket"), "{stderr}");
    assert!(
        stderr.contains("agent.toml:4: control.sockets: unknown key (remedy: did you mean socket?)"),
        "{stderr}"
    );

    let nowhere = culvert(&["reload", "--socket", "/nonexistent/control"]);
    assert_eq!(nowhere.status.code(), Some(1), "{}", text(&nowhere.stderr));
}

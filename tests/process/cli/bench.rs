//! `culvert bench`: that its figures add up, and that it says why when there are none.

use culvert_tests::{agent::culvert, ports, process::text};
use serde_json::Value;

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

/// Runs it and reads the object that it prints. It runs again if it has sent nothing, as on a machine that stands still for all of a
/// short run.
#[track_caller]
fn bench(arguments: &[&str]) -> Value {
    for _ in 0..ATTEMPTS {
        let output = culvert(&[&["bench"], arguments, &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let printed = serde_json::from_slice(&output.stdout).unwrap();
        if !sent_nothing(&printed) {
            return printed;
        }
    }
    panic!("{arguments:?}: in each of {ATTEMPTS} attempts a run sent nothing");
}

/// Whether this has a run that has sent nothing.
fn sent_nothing(printed: &Value) -> bool {
    match printed {
        Value::Object(members) => {
            members.iter().any(|(key, value)| key == "sent_datagrams" && *value == 0 || sent_nothing(value))
        }
        Value::Array(values) => values.iter().any(sent_nothing),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

#[track_caller]
fn count(run: &Value, key: &str) -> u64 {
    run[key].as_u64().unwrap_or_else(|| panic!("{key} is no count: {run:#}"))
}

#[track_caller]
fn number(run: &Value, key: &str) -> f64 {
    run[key].as_f64().unwrap_or_else(|| panic!("{key} is no number: {run:#}"))
}

/// Checks what must hold on any machine, however busy.
#[track_caller]
fn adds_up(run: &Value) {
    let [sent, received, lost] = ["sent_datagrams", "received_datagrams", "lost"].map(|key| count(run, key));
    assert!(received > 0, "{run:#}");
    assert_eq!(sent, received + lost, "{run:#}");
    let loss = lost as f64 / sent as f64;
    assert!((number(run, "loss") - loss).abs() < 1e-9, "{run:#}");
    assert_eq!((count(run, "corrupt"), count(run, "duplicates")), (0, 0), "{run:#}");
    let bits = (sent * count(run, "size") * 8) as f64;
    assert!((number(run, "sent_bps") * number(run, "seconds") - bits).abs() < 1.0, "{run:#}");
    assert!(number(run, "received_bps") <= number(run, "sent_bps") + 1.0, "{run:#}");
    for key in ["sender_blocked", "sender_errors", "receiver_kernel_drops", "reordered"] {
        count(run, key);
    }
    assert!(number(run, "cpu_seconds") >= 0.0 && number(run, "received_pps") > 0.0, "{run:#}");
}

/// Checks that there are times and that they are in order.
#[track_caller]
fn times(latency: &Value, kind: &str, samples: u64) {
    assert_eq!(latency["kind"], kind, "{latency:#}");
    assert_eq!(count(latency, "samples"), samples, "{latency:#}");
    let values = ["min", "p50", "p90", "p99", "p999", "max"].map(|key| number(latency, key));
    assert!(values.is_sorted() && values[0] > 0.0, "{latency:#}");
}

#[test]
fn what_was_sent_directly_was_received_or_lost() {
    let run = bench(&["--direct", "--seconds", "1", "--warmup", "0.1", "--rate", "50M"]);
    adds_up(&run);
    assert_eq!((&run["mode"], &run["direction"]), (&"direct".into(), &"up".into()));
    assert_eq!((count(&run, "size"), count(&run, "flows")), (1150, 1));
    assert_eq!(count(&run, "offered_bps"), 50_000_000);
    times(&run["latency_us"], "one-way", count(&run, "received_datagrams"));
    let probe = &run["round_trip_us"];
    times(probe, "round-trip", count(probe, "sent") - count(probe, "lost"));
}

#[test]
fn both_directions_are_counted_apart() {
    let run = bench(&[
        "--direct",
        "--direction",
        "both",
        "--flows",
        "2",
        "--threads",
        "2",
        "--seconds",
        "0.5",
        "--warmup",
        "0.1",
        "--rate",
        "20M",
        "--size",
        "64",
        "--gso",
        "off",
    ]);
    adds_up(&run);
    for direction in ["up", "down"] {
        adds_up(&run[direction]);
        assert_eq!(run[direction]["direction"], direction);
    }
    for key in ["sent_datagrams", "received_datagrams", "lost"] {
        assert_eq!(count(&run, key), count(&run["up"], key) + count(&run["down"], key), "{key}: {run:#}");
    }
}

#[test]
fn sizes_run_one_after_the_other_and_a_search_shows_its_steps() {
    let short = ["--direct", "--seconds", "0.1", "--warmup", "0", "--rate", "10M", "--probe", "off"];
    let runs = bench(&[&short[..], &["--size", "64,1150", "--direction", "down"]].concat());
    let runs = runs["runs"].as_array().unwrap();
    assert_eq!(runs.iter().map(|run| count(run, "size")).collect::<Vec<_>>(), [64, 1150]);
    runs.iter().for_each(adds_up);

    // Every loss is allowed: the ceiling is the answer.
    let found = bench(&[&short[..], &["--search", "--loss", "100"]].concat());
    adds_up(&found["best"]);
    assert_eq!(found["steps"].as_array().unwrap().len(), 1, "{found:#}");
}

#[test]
fn without_an_agent_it_says_what_to_look_at() {
    let [to, sink] = [ports::free(), ports::free()].map(|port| format!("127.0.0.1:{port}"));
    let output = culvert(&["bench", "--to", &to, "--sink", &sink, "--seconds", "0.1"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("is the agent running") && stderr.contains(&to), "{stderr}");
}

#[test]
fn a_taken_address_and_a_wrong_size_are_named() {
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = culvert(&["bench", "--to", "127.0.0.1:9", "--sink", &address]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains(&address) && stderr.contains("in use"), "{stderr}");

    let output = culvert(&["bench", "--direct", "--size", "63"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("64..=65507"), "{}", text(&output.stderr));
}

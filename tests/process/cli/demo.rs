//! `culvert demo`.

use culvert_tests::{agent::culvert, process::text};
use serde_json::Value;

#[test]
fn the_demo_accounts_for_every_datagram() {
    let output = culvert(&["demo", "--seconds", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["accounted"], true, "{summary:#}");
    let count = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value} is no count: {summary:#}"));
    let (sent, echoed) = (count(&summary["sent"]), count(&summary["echoed"]));
    assert!(echoed > 0 && echoed <= sent, "{summary:#}");
    // Its own word is not enough: the figures must say the same.
    let accounts = summary["accounts"].as_array().unwrap();
    assert_eq!(accounts.len(), 4, "{summary:#}");
    let mut dropped_in_all = 0;
    for account in accounts {
        let dropped: u64 = account["dropped"].as_object().unwrap().values().map(count).sum();
        let [received, delivered, queued] =
            ["received", "delivered", "queued"].map(|key| count(&account[key]));
        assert_eq!(received, delivered + queued + dropped, "{account:#}");
        dropped_in_all += dropped;
    }
    let explained =
        dropped_in_all + count(&summary["kernel_drops_buffers"]) + count(&summary["echo_refused"]);
    assert!(echoed == sent || explained > 0, "{summary:#}");
    // No machine carries a datagram through six sockets and back within a microsecond.
    let median = summary["rtt_seconds"]["p50"].as_f64().unwrap();
    assert!((1e-6..10.0).contains(&median), "a median of {median} s: {summary:#}");
}

#[test]
fn the_demo_prints_a_table_for_people() {
    let output = culvert(&["demo", "--seconds", "1", "--rate", "10M"]);
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{stdout}{}", text(&output.stderr));
    for word in ["received", "delivered", "dropped"] {
        assert!(stdout.contains(word), "no {word} in: {stdout}");
    }
}

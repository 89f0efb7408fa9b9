//! What `[records]` has of users' requests, and that it adds up to their counters.

use std::fs;

use culvert_tests::clock::{self, PATIENCE};
use serde_json::Value;

use crate::users::{Users, VERSIONS};

fn records(users: &Users) -> Vec<Value> {
    let text = fs::read_to_string(users.bed.agent.folder().join("records.json")).unwrap();
    // The last line may not be complete.
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn each_request_of_a_user_is_recorded_and_the_sums_are_the_users_counters() {
    let Some(mut users) = Users::new("users' records", "") else { return };
    assert_eq!(users.bed.agent.terminate().code(), Some(0));
    let config = users.bed.agent.config();
    let text = fs::read_to_string(&config).unwrap() + "[records]\nfile = \"records.json\"\n";
    fs::write(&config, text).unwrap();
    users.bed.agent.start();
    for version in VERSIONS {
        assert_eq!(users.good("connect", version, &["web:80", "100000"]), "200 100000");
        assert_eq!(users.tcp.end(), "end");
        assert_eq!(users.good("reset", version, &["web:80"]), "reset");
        assert_eq!(users.tcp.end(), "reset");
        // What is refused has no record.
        assert_eq!(users.good("connect", version, &["nothing:1", "1"]), "502 0");
        let came = users.good("udp", version, &["echo", "7", "20"]);
        assert!(came.ends_with(" 20"), "{came}");
    }
    let held = users.running(&["hold", "1", "web:80", "1"]);
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 1);
    users.bed.agent.ask(&["user", "set", "anna", "--disable"]);
    clock::until("seven lines", PATIENCE, || {
        let count = records(&users).len();
        if count == 7 { Ok(()) } else { Err(format!("{count} lines")) }
    });
    drop(held);
    // One that is open at the stop is written, too.
    users.bed.agent.ask(&["user", "set", "anna", "--enable"]);
    let held = users.running(&["hold", "2", "web:80", "1"]);
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 1);
    let figures = users.figures();
    assert_eq!(users.bed.agent.terminate().code(), Some(0));
    drop(held);
    let found = records(&users);
    let ends: Vec<_> = found.iter().map(|it| format!("{} {}", it["kind"], it["reason"])).collect();
    let count = |kind: &str, reason: &str| {
        let wanted = format!("\"{kind}\" \"{reason}\"");
        ends.iter().filter(|end| **end == wanted).count()
    };
    let counts =
        [("connect", "finished"), ("connect", "reset"), ("connect", "revoked"), ("connect", "shutdown")];
    assert_eq!(counts.map(|(kind, reason)| count(kind, reason)), [2, 2, 1, 1], "{ends:?}");
    let datagrams: Vec<_> = found.iter().filter(|record| record["kind"] == "connect_udp").collect();
    assert_eq!(datagrams.len(), 2, "{ends:?}");
    for record in datagrams {
        assert_eq!([&record["target"], &record["destination"]], ["echo:7", &*users.udp.address.to_string()]);
        assert_eq!([&record["uplink_packets"], &record["downlink_packets"]], [20, 20]);
    }
    assert!(found.iter().all(|record| record["user"] == "anna" && record.get("peer").is_none()));
    assert!(found.iter().all(|record| record["source"].as_str().unwrap().starts_with("127.0.0.1:")));
    let sum = |member: &str| -> u64 { found.iter().map(|record| record[member].as_u64().unwrap()).sum() };
    let counted = |place: &str| figures["bytes"][place].as_u64().unwrap();
    assert_eq!((sum("downlink_bytes"), sum("uplink_bytes")), (counted("to_target"), counted("to_user")));
    assert!(counted("to_target") > 200_000, "{figures}");
}

//! `culvert demo`.

use culvert_tests::{agent::culvert, process::text};
use serde_json::Value;

#[test]
fn the_demo_accounts_for_every_datagram() {
    let output = culvert(&["demo", "--seconds", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["accounting_holds"], true, "{summary:#}");
}

//! The registry against `docs/metrics.md`, and what handles do to values.

use std::time::Duration;

use config::{Limits, defaults};
use dataplane::relay::Direction;
use wire::panics::{self, Panicked, Part};

use super::*;

const DOC: &str = include_str!("../../../../../docs/metrics.md");

fn metrics() -> Metrics {
    Metrics::new("1.2.3").unwrap()
}

fn shows(metrics: &Metrics, line: &str) -> bool {
    metrics.render().unwrap().lines().any(|shown| shown == line)
}

/// The table's row of a family.
fn row(family: &FamilyInfo) -> String {
    let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
    format!("| `{}` | {} | {} | {} |", family.name, family.kind, labels.join(", "), family.help)
}

#[test]
fn the_document_lists_the_registry_and_nothing_else() {
    let mut registered: Vec<_> = metrics().info().iter().map(row).collect();
    registered.sort();
    let table = DOC.split("\n## ").next().unwrap();
    let documented: Vec<_> = table.lines().filter(|line| line.starts_with("| `culvert_")).collect();
    let missing: Vec<_> = registered.iter().filter(|row| !documented.contains(&row.as_str())).collect();
    let stale: Vec<_> = documented.iter().filter(|row| !registered.iter().any(|r| r == *row)).collect();
    assert!(missing.is_empty() && stale.is_empty(), "missing: {missing:#?}\nstale: {stale:#?}");
    assert_eq!(documented.len(), registered.len(), "a row stands twice");
}

#[test]
fn names_follow_the_conventions() {
    for family in metrics().info() {
        assert!(family.name.starts_with("culvert_"), "{}", family.name);
        assert_eq!(family.name.ends_with("_total"), family.kind == "counter", "{}", family.name);
        assert!(family.help.ends_with('.') && !family.help.contains('|'), "{}", family.help);
    }
}

#[test]
fn totals_are_published_as_differences() {
    let metrics = metrics();
    let (mut one, mut two) = (WorkerMetrics::bind(&metrics), WorkerMetrics::bind(&metrics));
    one.flows_moved.publish(5);
    one.flows_moved.publish(5);
    two.flows_moved.publish(2);
    one.flows_moved.publish(6);
    assert!(shows(&metrics, "culvert_flows_moved_total 8"));
    // Made anew: 3 is three more, not three fewer.
    one.flows_moved.publish(3);
    assert!(shows(&metrics, "culvert_flows_moved_total 11"));
    two.flows_moved.count();
    assert!(shows(&metrics, "culvert_flows_moved_total 12"));
}

#[test]
fn levels_add_up_over_workers_and_end_with_them() {
    let metrics = metrics();
    let (mut one, mut two) = (WorkerMetrics::bind(&metrics), WorkerMetrics::bind(&metrics));
    one.connections.set(5);
    two.connections.set(2);
    one.connections.set(3);
    assert!(shows(&metrics, "culvert_connections 5"));
    drop(one);
    assert!(shows(&metrics, "culvert_connections 2"));
}

#[test]
fn a_bound_handle_shows_zero_and_a_forgotten_one_nothing() {
    let metrics = metrics();
    let _bound = PeerDirectionMetrics::bind(&metrics, "exit", Direction::Uplink.label());
    let line = "culvert_peer_datagrams_received_total{direction=\"uplink\",peer=\"exit\"} 0";
    assert!(shows(&metrics, line), "{}", metrics.render().unwrap());
    PeerDirectionMetrics::forget(&metrics, "exit", Direction::Uplink.label());
    PeerDirectionMetrics::forget(&metrics, "never bound", Direction::Downlink.label());
    assert!(!metrics.render().unwrap().contains("exit"));
}

#[test]
fn reasons_are_given_by_the_caller() {
    let metrics = metrics();
    let family = &metrics.families().datagrams_dropped;
    let mut drops = Counters::bind(family, &[Direction::Downlink.label()], &["expired", "quota"]);
    drops.publish(&[0, 7]);
    drops.count(0);
    assert!(shows(&metrics, "culvert_datagrams_dropped_total{direction=\"downlink\",reason=\"expired\"} 1"));
    assert!(shows(&metrics, "culvert_datagrams_dropped_total{direction=\"downlink\",reason=\"quota\"} 7"));
    let mut lanes = Levels::bind(&metrics.families().lanes, &[], &["open", "dead"]);
    lanes.set(&[3, 1]);
    assert!(shows(&metrics, "culvert_lanes{state=\"open\"} 3"));
}

#[test]
fn histograms_of_several_workers_add_up() {
    let metrics = metrics();
    let (mut one, mut two) =
        (SocketMetrics::bind(&metrics, "ingress"), SocketMetrics::bind(&metrics, "ingress"));
    one.socket_receive_batch.publish(&[1, 0, 2, 0, 0, 0, 1], 45);
    one.socket_receive_batch.publish(&[2, 0, 2, 0, 0, 0, 1], 46);
    two.socket_receive_batch.publish(&[1, 1, 0, 0, 0, 0, 0], 3);
    one.socket_receive_age.publish(&[0, 3, 0, 0, 0, 0, 0, 1], 2_000_500_000);
    for line in [
        "_receive_batch_datagrams_bucket{socket=\"ingress\",le=\"1\"} 3",
        "_receive_batch_datagrams_bucket{socket=\"ingress\",le=\"2\"} 4",
        "_receive_batch_datagrams_bucket{socket=\"ingress\",le=\"32\"} 6",
        "_receive_batch_datagrams_bucket{socket=\"ingress\",le=\"+Inf\"} 7",
        "_receive_batch_datagrams_sum{socket=\"ingress\"} 49",
        "_receive_batch_datagrams_count{socket=\"ingress\"} 7",
        "_receive_age_seconds_bucket{socket=\"ingress\",le=\"0.0001\"} 0",
        "_receive_age_seconds_bucket{socket=\"ingress\",le=\"0.0003\"} 3",
        "_receive_age_seconds_bucket{socket=\"ingress\",le=\"0.1\"} 3",
        "_receive_age_seconds_sum{socket=\"ingress\"} 2.0005",
        "_receive_age_seconds_count{socket=\"ingress\"} 4",
    ] {
        let line = format!("culvert_socket{line}");
        assert!(shows(&metrics, &line), "{line} in {}", metrics.render().unwrap());
    }
    // Made anew: one more call.
    one.socket_receive_batch.publish(&[1, 0, 0, 0, 0, 0, 0], 1);
    assert!(shows(&metrics, "culvert_socket_receive_batch_datagrams_count{socket=\"ingress\"} 8"));
}

#[test]
fn the_version_and_the_process_are_shown() {
    let metrics = metrics();
    assert!(shows(&metrics, "culvert_build_info{version=\"1.2.3\"} 1"));
    for family in process::PROCESS_FAMILIES {
        let shown = metrics.render().unwrap();
        assert!(shown.contains(&format!("# TYPE {} {}\n", family.name, family.kind_name())));
        assert!(shown.contains(&format!("\n{} ", family.name)), "{} has no value", family.name);
    }
}

#[test]
fn a_panic_of_a_part_is_shown() {
    let metrics = metrics();
    let shown = |part: Part| {
        let before = format!("culvert_panics_total{{part=\"{}\"}} ", part.label());
        let shown = metrics.render().unwrap();
        let count = shown.lines().find_map(|line| line.strip_prefix(&before)).expect("also before the first");
        count.parse::<u64>().unwrap()
    };
    for part in Part::ALL {
        let before = shown(part);
        assert_eq!(panics::isolate(part, || panic!("on purpose")), Err::<(), _>(Panicked));
        // Other tests panic on purpose as well.
        assert!(shown(part) > before, "{part:?}");
    }
}

#[test]
fn reloads_are_counted_and_limits_are_shown() {
    let metrics = metrics();
    for outcome in Reload::ALL {
        assert!(shows(&metrics, &format!("culvert_reloads_total{{outcome=\"{}\"}} 0", outcome.label())));
    }
    let limits = Limits { flows: 7, ..defaults::LIMITS };
    metrics.configured(&limits, Duration::from_millis(1_700_000_000_500));
    assert!(shows(&metrics, "culvert_limit{limit=\"flows\"} 7"));
    assert!(shows(&metrics, "culvert_limit{limit=\"handshakes\"} 256"));
    assert!(shows(&metrics, "culvert_config_last_reload_successful 1"));
    assert!(shows(&metrics, "culvert_config_last_reload_success_timestamp_seconds 1700000000.5"));
    metrics.reloaded(Reload::Refused);
    assert!(shows(&metrics, "culvert_config_last_reload_successful 0"));
    assert!(shows(&metrics, "culvert_reloads_total{outcome=\"refused\"} 1"));
    metrics.reloaded(Reload::Done);
    assert!(shows(&metrics, "culvert_config_last_reload_successful 1"));
}

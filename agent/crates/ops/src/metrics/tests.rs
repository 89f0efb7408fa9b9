//! The families against `docs/metrics.md`, and the text.

use std::time::Duration;

use base::{
    clock::{Clock, SystemClock},
    panics::{Panicked, Part},
};
use config::{Limits, defaults};
use engine::metrics::Buckets;

use super::*;

const DOC: &str = include_str!("../../../../../docs/metrics.md");

fn metrics() -> Metrics {
    of_workers(Arc::default())
}

fn of_workers(snapshots: Arc<Snapshots>) -> Metrics {
    Metrics::new(
        "1.2.3",
        Some("0123456789ab 2026-11-27"),
        2,
        snapshots,
        Arc::new(Health::new(2, SystemClock.now())),
    )
}

fn shows(metrics: &Metrics, line: &str) -> bool {
    metrics.render().lines().any(|shown| shown == line)
}

/// The table's row of a family.
fn row(family: &FamilyInfo) -> String {
    let labels: Vec<_> = family.labels.iter().map(|label| format!("`{label}`")).collect();
    format!("| `{}` | {} | {} | {} |", family.name, family.kind.label(), labels.join(", "), family.help)
}

#[test]
fn the_document_lists_the_registry_and_nothing_else() {
    let mut registered: Vec<_> = Metrics::info().map(row).collect();
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
    for family in Metrics::info() {
        assert!(family.name.starts_with("culvert_"), "{}", family.name);
        assert_eq!(family.name.ends_with("_total"), family.kind == Counter, "{}", family.name);
        assert!(family.help.ends_with('.') && !family.help.contains('|'), "{}", family.help);
    }
}

#[test]
fn histograms_are_cumulative_and_have_the_unit_of_their_name() {
    let family = FamilyInfo { name: "ages", kind: Kind::Histogram, labels: &["socket"], help: "Ages." };
    let mut samples = Samples::default();
    let buckets = |counts: &[u64], sum| Buckets {
        bounds: &[100_000, 300_000],
        parts: 1e9,
        counts: counts.to_vec(),
        sum,
    };
    samples.add(&["ingress"], buckets(&[0, 2, 1], 2_000_000_000));
    samples.add(&["ingress"], buckets(&[0, 1, 0], 500_000));
    let mut text = String::new();
    text::append(&mut text, &family, samples);
    let expected = "# HELP ages Ages.\n# TYPE ages histogram\n\
        ages_bucket{socket=\"ingress\",le=\"0.0001\"} 0\n\
        ages_bucket{socket=\"ingress\",le=\"0.0003\"} 3\n\
        ages_bucket{socket=\"ingress\",le=\"+Inf\"} 4\n\
        ages_sum{socket=\"ingress\"} 2.0005\n\
        ages_count{socket=\"ingress\"} 4\n";
    assert_eq!(text, expected);
}

#[test]
fn labels_stand_in_the_order_of_their_names_and_are_escaped() {
    let family = FamilyInfo { name: "a", kind: Gauge, labels: &["peer", "direction"], help: "One \\ line." };
    let mut samples = Samples::default();
    samples.add(&["a\"b\\c\nd", "uplink"], f64::INFINITY);
    samples.add(&["x", "uplink"], 0.5);
    samples.add(&["x", "downlink"], (1_u64 << 53) + 1);
    let mut text = String::new();
    text::append(&mut text, &family, samples);
    let expected = "# HELP a One \\\\ line.\n# TYPE a gauge\n\
        a{direction=\"uplink\",peer=\"a\\\"b\\\\c\\nd\"} inf\n\
        a{direction=\"downlink\",peer=\"x\"} 9007199254740992\n\
        a{direction=\"uplink\",peer=\"x\"} 0.5\n";
    assert_eq!(text, expected);
    text.clear();
    text::append(&mut text, &family, Samples::default());
    assert_eq!(text, "", "what has no value is not shown");
}

#[test]
fn the_version_and_the_process_are_shown() {
    let metrics = metrics();
    assert!(shows(&metrics, "culvert_build_info{commit=\"0123456789ab 2026-11-27\",version=\"1.2.3\"} 1"));
    let shown = metrics.render();
    let of_process =
        |family: &&FamilyInfo| family.name.starts_with("culvert_process_") && family.labels.is_empty();
    assert_eq!(Metrics::info().filter(of_process).count(), 6);
    for family in Metrics::info().filter(of_process) {
        assert!(shown.contains(&format!("# TYPE {} {}\n", family.name, family.kind.label())));
        assert!(shown.contains(&format!("\n{} ", family.name)), "{} has no value", family.name);
    }
}

#[test]
fn a_panic_of_a_part_is_shown() {
    let metrics = metrics();
    let shown = |part: Part| {
        let before = format!("culvert_panics_total{{part=\"{}\"}} ", part.label());
        let shown = metrics.render();
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

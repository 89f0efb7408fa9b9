//! What a whole agent shows to Prometheus, against `docs/metrics.md`.
#![expect(clippy::unwrap_used, reason = "what is not as a test expects ends it")]

use std::{fmt::Write, net::IpAddr, sync::Arc, time::Duration};

use base::clock::{Clock, SystemClock};
use config::defaults;
use engine::{
    health::Health,
    metrics::{FamilyInfo, Samples, Value},
    worker::Snapshots,
};
use gate::identity::Identity;
use ops::metrics::Metrics;
use testkit::simulation::World;

const DOC: &str = include_str!("../../../../docs/metrics.md");

/// What an agent with this many peers and two workers shows at its start.
fn shown_with(peers: usize) -> String {
    agent_with(peers).1
}

/// What its workers have published, and what it shows of that.
fn agent_with(peers: usize) -> (Arc<Snapshots>, String) {
    let mut toml = "identity.key_file = \"x\"\ntransport.listen = [\"192.0.2.1:4433\"]\n".to_owned();
    for place in 0..peers {
        let key = Identity::generate().unwrap().public_key();
        writeln!(toml, "[[peer]]\nname = \"peer-{place}\"\npublic_key = \"{key}\"").unwrap();
    }
    let mut world = World::new(1);
    world.workers = 2;
    let agent =
        world.start(&toml, &Identity::generate().unwrap(), &["192.0.2.1".parse::<IpAddr>().unwrap()], 1);
    assert_eq!(world.peers(agent).len(), peers);
    let snapshots = Arc::clone(&world.agent(agent).snapshots);
    let health = Arc::new(Health::new(2, SystemClock.now()));
    let metrics = Metrics::new("1.2.3", None, 2, Arc::clone(&snapshots), health);
    metrics.configured(&defaults::LIMITS, Duration::ZERO);
    (snapshots, metrics.render())
}

/// A family in Prometheus' text format, version 0.0.4, written from the format's description.
fn by_hand(info: &FamilyInfo, samples: &Samples) -> String {
    let shown = |number: f64| if number == f64::INFINITY { "+Inf".to_owned() } else { number.to_string() };
    let series = |suffix: &str, values: &[String], le: Option<String>| {
        let mut labels: Vec<_> =
            info.labels.iter().zip(values).map(|(name, value)| (*name, value.clone())).collect();
        labels.sort_unstable();
        labels.extend(le.map(|bound| ("le", bound)));
        let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<_> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        format!("{}{suffix}{labels}", info.name)
    };
    let mut lines = Vec::new();
    if samples.iter().next().is_some() {
        let help = info.help.replace('\\', "\\\\").replace('\n', "\\n");
        lines.push(format!("# HELP {} {help}", info.name));
        lines.push(format!("# TYPE {} {}", info.name, info.kind.label()));
    }
    for (labels, value) in samples.iter() {
        match value {
            Value::Count(count) => lines.push(format!("{} {count}", series("", labels, None))),
            Value::Number(number) => lines.push(format!("{} {}", series("", labels, None), shown(*number))),
            Value::Buckets(buckets) => {
                let mut count = 0;
                let bounds = buckets.bounds.iter().map(|bound| buckets.units(*bound)).chain([f64::INFINITY]);
                for (bound, one) in bounds.zip(&buckets.counts) {
                    count += one;
                    lines.push(format!("{} {count}", series("_bucket", labels, Some(shown(bound)))));
                }
                lines.push(format!("{} {}", series("_sum", labels, None), shown(buckets.units(buckets.sum))));
                lines.push(format!("{} {count}", series("_count", labels, None)));
            }
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_text_is_what_the_format_asks_for() {
    let (snapshots, shown) = agent_with(3);
    let families = snapshots.series("");
    let by_hand: Vec<_> = families.iter().map(|(info, samples)| by_hand(info, samples)).collect();
    assert!(by_hand.iter().filter(|text| !text.is_empty()).count() > 150);
    for text in &by_hand {
        assert!(shown.contains(text), "not shown so:\n{text}");
    }
    let of_daemon = |line: &&str| {
        let name = line.trim_start_matches("# HELP ").trim_start_matches("# TYPE ");
        let name: String =
            name.chars().take_while(|char| char.is_ascii_alphanumeric() || *char == '_').collect();
        !families.iter().any(|(info, _)| {
            name.strip_prefix(info.name).is_some_and(|rest| ["", "_bucket", "_sum", "_count"].contains(&rest))
        })
    };
    let lines = by_hand.iter().map(|text| text.lines().count()).sum::<usize>();
    assert_eq!(shown.lines().count() - shown.lines().filter(of_daemon).count(), lines);
    let names: Vec<_> = shown.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    assert!(names.is_sorted(), "{names:?}");
}

/// Its series, without those of the process.
fn series(peers: usize) -> usize {
    shown_with(peers)
        .lines()
        .filter(|line| !line.starts_with('#') && !line.starts_with("culvert_process_"))
        .count()
}

#[test]
fn a_thousand_peers_stay_far_below_a_hundred_thousand_series() {
    let (none, thousand) = (series(0), series(1000));
    let each = (thousand - none) / 1000;
    assert_eq!(none + 1000 * each, thousand, "what is not a peer's does not grow with them");
    assert!(each < 80, "{each} series for each peer");
    assert!(thousand < 100_000, "{thousand} series");
    let said = format!("{each} series for each peer");
    assert!(DOC.contains(&said), "docs/metrics.md is to say: {said}, and {none} for all others");
    let said = format!("some {} others", none.next_multiple_of(50));
    assert!(DOC.contains(&said), "docs/metrics.md is to say: {said}");
}

#[test]
fn the_document_explains_every_value_of_a_label() {
    /// Labels with values of our own choice.
    const CHOSEN: [&str; 8] = ["reason", "outcome", "step", "kind", "state", "origin", "initiator", "limit"];
    let shown = shown_with(1);
    let mut explained = 0;
    for line in shown.lines().filter(|line| !line.starts_with('#')) {
        let labels = line.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        for pair in labels.into_iter().flat_map(|(labels, _)| labels.split(',')) {
            let (label, value) = pair.split_once('=').unwrap();
            if CHOSEN.contains(&label) {
                let value = value.trim_matches('"');
                assert!(DOC.contains(&format!("`{value}`")), "docs/metrics.md does not explain {line}");
                explained += 1;
            }
        }
    }
    assert!(explained > 150, "{explained} were found");
}

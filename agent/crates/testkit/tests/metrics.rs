//! What a whole agent shows to Prometheus, against `docs/metrics.md`.
#![expect(clippy::unwrap_used, reason = "what is not as a test expects ends it")]

use std::{fmt::Write, net::IpAddr, sync::Arc, time::Duration};

use base::clock::{Clock, SystemClock};
use config::defaults;
use engine::health::Health;
use gate::identity::Identity;
use ops::metrics::Metrics;
use testkit::simulation::World;

const DOC: &str = include_str!("../../../../docs/metrics.md");

/// What an agent with this many peers and two workers shows at its start.
fn shown_with(peers: usize) -> String {
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
    let metrics = Metrics::new(
        "1.2.3",
        2,
        Arc::clone(&world.agent(agent).snapshots),
        Arc::new(Health::new(2, SystemClock.now())),
    );
    metrics.configured(&defaults::LIMITS, Duration::ZERO);
    metrics.render()
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

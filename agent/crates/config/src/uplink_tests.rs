//! `[[transport.uplink]]`: what arrives, what is refused, and what a reload makes of it.

use std::fmt::Write as _;

use super::*;
use crate::{
    reload::{self, Effect, Kind},
    tests::*,
};
use wire::line::LineTerms;

/// A line with these keys, each on one line of the file, the first of which is 10.
fn line(name: &str, keys: &[&str]) -> String {
    let mut text = format!("[[transport.uplink]]\nname = \"{name}\"\n");
    for key in keys {
        writeln!(text, "{key}").unwrap();
    }
    text
}

fn parsed(text: &str) -> Config {
    parse(&format!("{BASE}endpoints = [\"gw.example.net:4433\"]\n{text}")).unwrap()
}

#[test]
fn lines_arrive() {
    let dsl = line("dsl", &["interface = \"eth0\"", "rate = \"50Mbit\"", "mark = 7"]);
    let lte = line(
        "lte",
        &["source = \"2001:db8::7\"", "rate = \"20Mbit\"", "cost = \"metered\"", "backup = true"],
    );
    let config = parsed(&(dsl + &lte));
    let [dsl, lte] = &config.transport.uplinks[..] else { panic!("{:?}", config.transport.uplinks) };
    assert_eq!((&*dsl.name, dsl.interface.as_deref(), dsl.source, dsl.mark), ("dsl", Some("eth0"), None, 7));
    assert_eq!((dsl.cost, dsl.way()), (Cost::Flat, "interface eth0".to_owned()));
    assert_eq!(
        (lte.source, lte.way()),
        (Some("2001:db8::7".parse().unwrap()), "source 2001:db8::7".to_owned())
    );
    let terms = LineTerms { rate: Some(50_000_000), weight: 1, metered: false, backup: false };
    assert_eq!(dsl.terms(), terms);
    assert_eq!(lte.terms(), LineTerms { rate: Some(20_000_000), metered: true, backup: true, ..terms });
    assert!(config.notes.is_empty(), "{:?}", config.notes);
    let weighed = parsed(&line("dsl", &["interface = \"eth0\"", "weight = 3"]));
    assert_eq!(weighed.transport.uplinks[0].terms(), LineTerms { rate: None, weight: 3, ..terms });
    assert_eq!(parsed("").transport.uplinks, []);
}

#[test]
fn a_line_says_what_it_is() {
    let one = |keys: &[&str]| line("dsl", keys);
    expect(&one(&[]), 9, "transport.uplink[0]", "which line this is");
    expect("[[transport.uplink]]\ninterface = \"eth0\"\n", 9, "transport.uplink[0].name", "is missing");
    let both = one(&["interface = \"eth0\"", "source = \"192.0.2.7\""]);
    expect(&both, 12, "transport.uplink[0].source", "remove one");
    for name in ["", "sixteen-letters-", "a b", "a/b", "."] {
        let words = "is not the name of an interface";
        expect(&one(&[&format!("interface = \"{name}\"")]), 11, "transport.uplink[0].interface", words);
    }
    for (source, words) in [
        ("192.0.2.7:4433", "is not an address"),
        ("eth0", "is not an address"),
        ("0.0.0.0", "no address to send from"),
        ("::", "no address to send from"),
        ("224.0.0.1", "no address to send from"),
    ] {
        expect(&one(&[&format!("source = \"{source}\"")]), 11, "transport.uplink[0].source", words);
    }
    let eth = "interface = \"eth0\"";
    expect(&one(&[eth, "rate = \"50\""]), 12, "transport.uplink[0].rate", "is not a rate");
    expect(&one(&[eth, "weight = 0"]), 12, "transport.uplink[0].weight", "out of range");
    expect(&one(&[eth, "cost = \"free\""]), 12, "transport.uplink[0].cost", "\"flat\" or \"metered\"");
    expect(&one(&[eth, "weight = 1", "rate = \"50Mbit\""]), 12, "transport.uplink[0].weight", "remove one");
    expect(&one(&[eth, "fwmark = 1"]), 12, "transport.uplink[0].fwmark", "did you mean mark?");
}

#[test]
fn lines_are_told_apart_and_compared() {
    let lines = |second: &str, keys: &[&str]| line("dsl", &["interface = \"eth0\""]) + &line(second, keys);
    let eth = "interface = \"eth0\"";
    expect(
        &lines("dsl", &["interface = \"eth1\""]),
        13,
        "transport.uplink[1].name",
        "is taken by an earlier line",
    );
    expect(&lines("lte", &[eth]), 12, "transport.uplink[1]", "has the interface eth0, too");
    assert!(
        parse(&format!("{BASE}{}", lines("lte", &[eth, "mark = 9"]))).is_ok(),
        "rules may tell them apart"
    );
    let mixed =
        line("dsl", &[eth, "rate = \"50Mbit\""]) + &line("lte", &["interface = \"wwan0\"", "weight = 2"]);
    expect(&mixed, 16, "transport.uplink[1].weight", "a rate for every line");
    let spare =
        line("dsl", &[eth, "backup = true"]) + &line("lte", &["interface = \"wwan0\"", "backup = true"]);
    expect(&spare, 9, "transport.uplink[0]", "every line is a backup");
    let nine: String =
        (0..9).map(|n| line(&format!("l{n}"), &[&format!("interface = \"eth{n}\"")])).collect();
    expect(&nine, 33, "transport.uplink[8]", "more than 8 lines");
    expect("[transport.uplink]\nname = \"dsl\"\n", 9, "transport.uplink", "[[uplink]]");
    let inside = line("dsl", &["interface = \"culvert0\""]) + "[tun]\naddress = [\"10.9.0.1/24\"]\n";
    expect(&inside, 2, "transport", "leads into the tunnel itself");
}

#[test]
fn lines_on_which_nobody_is_dialled_are_noted() {
    let config = parse(&format!("{BASE}{}", line("dsl", &["interface = \"eth0\""]))).unwrap();
    let notes: Vec<String> = config.notes.iter().map(ToString::to_string).collect();
    assert!(notes.iter().any(|note| note.contains("nobody is dialled on them")), "{notes:?}");
}

#[test]
fn what_lines_carry_and_cost_follows_a_reload_and_lines_wait_for_a_restart() {
    let on = |interface: &str, weight: u8| {
        line("dsl", &[&format!("interface = \"{interface}\""), &format!("weight = {weight}")])
    };
    let dsl = |weight| on("eth0", weight);
    let lte = line("lte", &["interface = \"wwan0\""]);
    let running = parsed(&dsl(1));
    for (fresh, what, kind) in [
        (
            on("eth1", 1),
            "transport.uplink \"dsl\": interface",
            Kind::Changed("eth0".to_owned(), "eth1".to_owned()),
        ),
        (dsl(1) + &lte, "transport.uplink \"lte\"", Kind::Added("interface wwan0".to_owned())),
        (String::new(), "transport.uplink \"dsl\"", Kind::Removed("interface eth0".to_owned())),
    ] {
        let plan = reload::plan(&running, parsed(&fresh));
        let [change] = &plan.changes[..] else { panic!("{:?}", plan.changes) };
        assert_eq!((&*change.what, &change.kind, change.effect), (what, &kind, Effect::Restart));
        assert_eq!(plan.config, None, "what runs goes on");
    }
    let plan = reload::plan(&running, parsed(&(on("eth1", 2) + &lte)));
    let effects: Vec<Effect> = plan.changes.iter().map(|change| change.effect).collect();
    assert_eq!(effects, [Effect::Restart, Effect::Now, Effect::Restart], "{:?}", plan.changes);
    let lines = plan.config.map(|config| config.transport.uplinks).unwrap_or_default();
    let [dsl] = &lines[..] else { panic!("{lines:?}") };
    assert_eq!((dsl.interface.as_deref(), dsl.weight), (Some("eth0"), Some(2)));
}

#[test]
fn another_order_of_lines_waits_for_a_restart() {
    let [dsl, lte, sat] =
        ["dsl", "lte", "sat"].map(|name| line(name, &[&format!("interface = \"{name}0\"")]));
    let plan = reload::plan(&parsed(&format!("{dsl}{lte}{sat}")), parsed(&format!("{sat}{dsl}{lte}")));
    let [change] = &plan.changes[..] else { panic!("{:?}", plan.changes) };
    let kind = Kind::Changed("dsl, lte, sat".to_owned(), "sat, dsl, lte".to_owned());
    assert_eq!(
        (&*change.what, &change.kind, change.effect),
        ("transport.uplink: order", &kind, Effect::Restart)
    );
    assert_eq!(plan.config, None, "what runs goes on");
    let plan = reload::plan(&parsed(&format!("{dsl}{lte}")), parsed(&format!("{sat}{dsl}{lte}")));
    assert!(plan.changes.iter().all(|change| change.what != "transport.uplink: order"), "{:?}", plan.changes);
}

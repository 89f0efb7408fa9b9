use std::path::Path;

use super::*;
use crate::{
    reload::{Change, Effect, Kind, Plan},
    reload_rules::holds,
};

pub(super) const KEYS: [&str; 3] = [
    "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA",
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE",
    "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0",
];

/// An agent with two peers, two services and ports; each test changes something of it.
fn base() -> String {
    let [exit, branch, _] = KEYS;
    format!(
        "identity = {{ key_file = \"id.key\", state_dir = \"state\" }}\n\
         transport = {{ listen = [\"127.0.0.1:4433\"] }}\n\
         tun = {{ address = [\"10.9.0.1/24\"] }}\n\
         metrics = {{ listen = \"127.0.0.1:9464\" }}\n\
         [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
         [[service]]\nname = \"ntp\"\nupstream = \"127.0.0.1:123\"\n\
         [[peer]]\nname = \"exit\"\npublic_key = \"{exit}\"\nservices = [\"ntp\"]\n\
         [[peer]]\nname = \"branch\"\npublic_key = \"{branch}\"\nservices = [\"dns\", \"ntp\"]\n\
         [[udp]]\nlisten = \"127.0.0.1:5300\"\npeer = \"exit\"\nservice = \"dns\"\n\
         [[udp]]\nlisten = \"127.0.0.1:5301\"\npeer = \"branch\"\nservice = \"echo\"\n\
         [[tcp]]\nlisten = \"127.0.0.1:5300\"\npeer = \"exit\"\nservice = \"dns\"\n"
    )
}

#[track_caller]
pub(super) fn parse(text: &str) -> Config {
    Config::parse(text, Path::new("/etc/culvert")).unwrap_or_else(|problems| panic!("{problems}\n{text}"))
}

/// `text` without the table that has this line.
#[track_caller]
fn without(text: &str, line: &str) -> String {
    let mut found = false;
    let tables = text.split("[[").filter(|table| {
        let has = table.lines().any(|own| own == line);
        found |= has;
        !has
    });
    let left = tables.collect::<Vec<_>>().join("[[");
    assert!(found, "{line:?} is not in the configuration");
    left
}

#[track_caller]
pub(super) fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from:?} is not in the configuration");
    text.replacen(from, to, 1)
}

/// The plan, after checking what holds of every plan, and what runs then.
#[track_caller]
pub(super) fn planned(running: &Config, text: &str) -> (Plan, Config) {
    let plan = reload::plan(running, parse(text));
    let after = plan.config.clone().unwrap_or_else(|| running.clone());
    holds(running, &plan, &after, parse(text));
    (plan, after)
}

/// The lines of the difference, as an operator reads them.
pub(super) fn lines(plan: &Plan) -> Vec<String> {
    let line = |Change { what, kind, effect }: &Change| {
        let kind = match kind {
            Kind::Added(new) => format!("+ {what}: {new}"),
            Kind::Removed(old) => format!("- {what}: {old}"),
            Kind::Changed(old, new) => format!("{what}: {old} → {new}"),
        };
        match effect {
            Effect::Now => kind,
            Effect::NextConnection => format!("{kind} (next connection)"),
            Effect::Restart => format!("{kind} (restart)"),
        }
    };
    plan.changes.iter().map(line).collect()
}

#[test]
fn the_same_file_changes_nothing() {
    let (plan, _) = planned(&parse(&base()), &base());
    assert_eq!(plan, Plan::default());
}

#[test]
fn peers_of_the_state_file_come_go_and_move_as_those_of_the_configuration_do() {
    let running = parse(&base());
    let mut late = running.peers[1].clone();
    (late.name, late.origin) = ("late".into(), PeerOrigin::State);
    let live =
        |more: &[&Peer]| -> Vec<Peer> { running.peers.iter().chain(more.iter().copied()).cloned().collect() };
    let with = |peer: &Peer| Config { peers: live(&[peer]), ..running.clone() };
    let beside = |live: &[Peer], fresh: Config| reload::plan_beside(&running, live, fresh, true);

    // It was added while the agent ran, and the file has it: nothing is different.
    let known = beside(&live(&[&late]), with(&late));
    assert_eq!((known.changes, known.changed, known.added), Default::default());
    let added = beside(&live(&[]), with(&late));
    assert_eq!((&added.added, added.changes.len()), (&vec![late.clone()], 1));
    let removed = beside(&live(&[&late]), running.clone());
    assert_eq!((removed.removed, removed.changes.len()), (vec![Arc::clone(&late.name)], 1));
    assert!(removed.config.is_some(), "it is followed, although the file is as it was read before");
    let changed = Peer { priority: Some(7), ..late.clone() };
    let edited = beside(&live(&[&late]), with(&changed));
    assert_eq!(lines(&edited), ["+ peer \"late\": priority: 7"]);
    assert_eq!(edited.changed, vec![changed.clone()]);
    let moved = Peer { origin: PeerOrigin::Config, ..late.clone() };
    for (from, to, line) in [
        (&late, &moved, "peer \"late\": file: the state file → the configuration"),
        (&moved, &late, "peer \"late\": file: the configuration → the state file"),
    ] {
        let plan = beside(&live(&[from]), with(to));
        assert_eq!((lines(&plan), &plan.changed), (vec![line.to_owned()], &vec![to.clone()]));
        assert_eq!((plan.removed, plan.added), Default::default());
    }

    // A file that is not there says nothing of the peers that run.
    let missing = reload::plan_beside(&running, &live(&[&late]), running.clone(), false);
    assert_eq!((missing.removed, missing.changes), Default::default());

    // The file of another folder says nothing of the peers that run.
    let elsewhere = Config { state_dir: "/elsewhere".into(), ..with(&changed) };
    let waits = beside(&live(&[]), elsewhere);
    assert_eq!((waits.removed, waits.changed, waits.added), Default::default());
    assert_eq!(waits.changes.len(), 1, "identity.state_dir");
    let elsewhere = Config { state_dir: "/elsewhere".into(), ..running.clone() };
    assert_eq!(beside(&live(&[&late]), elsewhere).removed, Vec::<Arc<str>>::new());
}

#[test]
fn a_change_of_one_peer_leaves_everything_else_as_it_runs() {
    let running = parse(&base());
    let (old, mut new) = (&running.peers[1], running.peers[1].clone());
    assert_eq!(reload::plan_peer(&running, old, old.clone()), Plan::default());
    (new.priority, new.lanes) = (Some(7), old.lanes + 1);
    let plan = reload::plan_peer(&running, old, new.clone());
    assert_eq!(plan.changed, [new.clone()]);
    assert_eq!(plan.changes.len(), 2, "{:?}", plan.changes);
    let config = plan.config.unwrap();
    assert_eq!(config.peers[1], new);
    assert_eq!(Config { peers: running.peers.clone(), ..config }, running);
    // One that was added since is in no list of the configuration.
    let late = Peer { name: "late".into(), ..new };
    let plan = reload::plan_peer(&running, &late, Peer { weight: Some(2), ..late.clone() });
    assert_eq!((plan.config, plan.changed.len()), (Some(running), 1));
}

#[test]
fn a_service_keeps_its_number_when_others_come_and_go() {
    let text = without(&base(), "name = \"dns\"");
    let text = replaced(&text, "\"dns\", \"ntp\"", "\"ntp\"");
    let (plan, after) = planned(&parse(&base()), &text);
    assert_eq!(
        lines(&plan),
        ["peer \"branch\": services: [\"dns\", \"ntp\"] → [\"ntp\"]", "- service \"dns\": 127.0.0.1:53"]
    );
    assert_eq!((after.services[0].udp, after.services[0].tcp), (false, false));
    assert_eq!((&after.peers[0].services, &after.peers[1].services), (&vec![1], &vec![1]));
    assert_eq!(plan.changed, [after.peers[1].clone()]);

    // One that is new comes last, and one that returns takes its old place.
    let text = format!("{text}[[service]]\nname = \"web\"\nupstream = \"127.0.0.1:80\"\n");
    let text = replaced(&text, "services = [\"ntp\"]", "services = [\"web\", \"ntp\"]");
    let (plan, after) = planned(&after, &text);
    assert_eq!(
        lines(&plan),
        ["peer \"exit\": services: [\"ntp\"] → [\"web\", \"ntp\"]", "+ service \"web\": 127.0.0.1:80"]
    );
    assert_eq!(after.peers[0].services, [2, 1]);
    let text =
        format!("{text}[[service]]\nname = \"dns\"\nupstream = \"127.0.0.2:53\"\nprotocol = \"udp\"\n");
    let (plan, after) = planned(&after, &text);
    assert_eq!(lines(&plan), ["+ service \"dns\": 127.0.0.2:53"]);
    assert_eq!((after.services[0].udp, after.services[0].tcp), (true, false));
    assert_eq!((after.services.len(), &*after.services[0].name), (3, "dns"));
}

#[test]
fn what_is_different_about_a_service_is_in_effect_now() {
    let text = replaced(
        &base(),
        "127.0.0.1:53\"",
        "127.0.0.2:53\"\nidle = \"1m 30s\"\nburst = 8\nprotocol = \"tcp\"",
    );
    let (plan, after) = planned(&parse(&base()), &text);
    assert_eq!(
        lines(&plan),
        [
            "service \"dns\": upstream: 127.0.0.1:53 → 127.0.0.2:53",
            "service \"dns\": idle: 1m → 1m 30s",
            "service \"dns\": burst: 128 → 8",
            "service \"dns\": protocol: both → tcp"
        ]
    );
    assert_eq!(after, Config { notes: after.notes.clone(), ..parse(&text) });
}

/// A hello names 256 services, and a number is not given twice.
#[test]
fn services_beyond_the_last_number_wait_for_a_restart() {
    let services = |names: std::ops::Range<usize>| -> String {
        names.map(|n| format!("[[service]]\nname = \"s{n}\"\nupstream = \"127.0.0.1:{}\"\n", n + 1)).collect()
    };
    let running = parse(&(base() + &services(0..252)));
    let text = replaced(&base(), "services = [\"ntp\"]", "services = [\"s252\", \"s254\", \"ntp\"]");
    let (plan, after) = planned(&running, &(text + &services(250..256)));
    assert_eq!(lines(&plan).len(), 1 + 250 + 4);
    assert_eq!(
        lines(&plan)[251..],
        [
            "+ service \"s252\": 127.0.0.1:253",
            "+ service \"s253\": 127.0.0.1:254",
            "+ service \"s254\": 127.0.0.1:255 (restart)",
            "+ service \"s255\": 127.0.0.1:256 (restart)"
        ]
    );
    assert_eq!(after.services.len(), 256);
    assert_eq!(after.peers[0].services, [254, 1]);
}

#[test]
fn forwards_keep_their_places_and_closed_ones_open_again() {
    let running = parse(&base());
    let text = replaced(
        &without(&base(), "listen = \"127.0.0.1:5301\""),
        "listen = \"127.0.0.1:5300\"\npeer = \"exit\"",
        "listen = \"127.0.0.1:5300\"\npeer = \"branch\"",
    );
    let text = format!("{text}[[udp]]\nlisten = \"127.0.0.1:5302\"\npeer = \"exit\"\nservice = \"ntp\"\n");
    let (plan, after) = planned(&running, &text);
    assert_eq!(
        lines(&plan),
        [
            "- udp \"127.0.0.1:5301\": service \"echo\" of peer \"branch\"",
            "udp \"127.0.0.1:5300\": peer: exit → branch",
            "+ udp \"127.0.0.1:5302\": service \"ntp\" of peer \"exit\""
        ]
    );
    assert_eq!((plan.udp_opened, plan.tcp_opened), (vec![2], Vec::new()));
    assert!(!after.forwards_to("nobody") && after.udp[0].peer == 1);

    let (plan, after) = planned(&after, &base());
    assert_eq!(
        lines(&plan),
        [
            "- udp \"127.0.0.1:5302\": service \"ntp\" of peer \"exit\"",
            "udp \"127.0.0.1:5300\": peer: branch → exit",
            "+ udp \"127.0.0.1:5301\": service \"echo\" of peer \"branch\""
        ]
    );
    assert_eq!((plan.udp_opened, after.udp.len()), (vec![1], 3));
}

#[test]
fn ports_that_the_kernel_chooses_are_told_apart_by_where_they_lead() {
    let port = |service: &str| {
        format!("[[udp]]\nlisten = \"127.0.0.1:0\"\npeer = \"exit\"\nservice = \"{service}\"\n")
    };
    let running = parse(&(base() + &port("a") + &port("b") + &port("c")));
    let (plan, after) = planned(&running, &(base() + &port("c") + &port("b")));
    assert_eq!(lines(&plan), ["- udp \"127.0.0.1:0\": service \"a\" of peer \"exit\""]);
    assert_eq!(
        after.udp.iter().map(|forward| forward.open).collect::<Vec<_>>(),
        [true, true, false, true, true]
    );
    // What leads elsewhere now takes an open one before it takes a closed one.
    let (plan, after) = planned(&after, &(base() + &port("d") + &port("c")));
    assert_eq!(lines(&plan), ["udp \"127.0.0.1:0\": service: b → d"]);
    let (plan, _) = planned(&after, &(base() + &port("d") + &port("c") + &port("e")));
    assert_eq!(
        (lines(&plan), plan.udp_opened),
        (vec!["+ udp \"127.0.0.1:0\": service \"e\" of peer \"exit\"".to_owned()], vec![2])
    );
}

/// Our own listeners stay until the restart that moves them.
#[test]
fn a_port_that_is_ours_until_a_restart_waits_for_it() {
    let text = replaced(&base(), "127.0.0.1:4433", "127.0.0.1:4434");
    let text = replaced(&text, "127.0.0.1:9464", "127.0.0.1:9465")
        + "[[udp]]\nlisten = \"0.0.0.0:4433\"\npeer = \"exit\"\nservice = \"dns\"\n";
    let (plan, after) = planned(&parse(&base()), &text);
    assert_eq!(
        lines(&plan),
        [
            "transport.listen: [\"127.0.0.1:4433\"] → [\"127.0.0.1:4434\"] (restart)",
            "+ udp \"0.0.0.0:4433\": service \"dns\" of peer \"exit\" (restart)",
            "metrics.listen: 127.0.0.1:9464 → 127.0.0.1:9465"
        ]
    );
    assert_eq!((plan.config.is_some(), after.udp.len()), (true, 2));
}

/// Two sockets of overlapping addresses cannot be open at a time.
#[test]
fn a_port_that_overlaps_the_one_it_follows_waits_for_a_restart() {
    let text =
        replaced(&base(), "[[udp]]\nlisten = \"127.0.0.1:5300\"", "[[udp]]\nlisten = \"0.0.0.0:5300\"");
    let (plan, after) = planned(&parse(&base()), &text);
    assert_eq!(
        lines(&plan),
        [
            "- udp \"127.0.0.1:5300\": service \"dns\" of peer \"exit\" (restart)",
            "+ udp \"0.0.0.0:5300\": service \"dns\" of peer \"exit\" (restart)"
        ]
    );
    assert_eq!((plan.config, &after.udp), (None, &parse(&base()).udp));

    // Without its peer it goes at once, and what follows it finds the address free the next time.
    let [exit, branch, _] = KEYS;
    let text = without(&text, "listen = \"127.0.0.1:5301\"").replace("\"exit\"", "\"gate\"");
    let text = text.replace(branch, "swap").replace(exit, branch).replace("swap", exit);
    let plan = reload::plan(&after, parse(&text));
    let ports: Vec<String> = lines(&plan).into_iter().filter(|line| line.contains("udp")).collect();
    assert_eq!(
        ports,
        [
            "- udp \"127.0.0.1:5300\": service \"dns\" of peer \"exit\"",
            "- udp \"127.0.0.1:5301\": service \"echo\" of peer \"branch\"",
            "+ udp \"0.0.0.0:5300\": service \"dns\" of peer \"gate\" (restart)"
        ]
    );
    let (plan, _) = planned(&plan.config.unwrap(), &text);
    assert_eq!(plan.udp_opened, [2]);
}

#[test]
fn peers_are_sorted_by_what_happened_to_them() {
    let [exit, _, third] = KEYS;
    let text = without(&without(&base(), "name = \"branch\""), "listen = \"127.0.0.1:5301\"");
    let text = replaced(
        &text,
        exit,
        &format!(
            "{exit}\"\nendpoints = [\"exit.example:1\", \"[2001:db8::1]:2\"]\nlanes = 4\nkeepalive = \"0s\"\nqueue = {{ bytes = \"1MiB\", time = \"1s\" }}\nallowed_ips = [\"10.9.0.2\"]\ndscp = 46\ncongestion = \"rate\"\nrate = \"1.5Mbit\"\nprofile = \"latency"
        ),
    );
    let text = format!(
        "{text}[[peer]]\nname = \"new\"\npublic_key = \"{third}\"\nendpoints = [\"new.example:1\"]\n"
    );
    let (plan, after) = planned(&parse(&base()), &text);
    assert_eq!(
        lines(&plan),
        [
            format!("- peer \"branch\": {}, which dials us", KEYS[1]),
            "+ peer \"exit\": endpoints: [\"exit.example:1\", \"[2001:db8::1]:2\"]".to_owned(),
            "peer \"exit\": lanes: 0 → 4 (next connection)".to_owned(),
            "peer \"exit\": profile: throughput → latency (next connection)".to_owned(),
            "peer \"exit\": keepalive: 20s → 0s".to_owned(),
            "peer \"exit\": allowed_ips: [] → [\"10.9.0.2/32\"]".to_owned(),
            "peer \"exit\": dscp: copy → 46".to_owned(),
            "peer \"exit\": congestion: bbr → rate (next connection)".to_owned(),
            "+ peer \"exit\": rate: 1500kbit".to_owned(),
            "peer \"exit\": queue.bytes: 4MiB → 1MiB".to_owned(),
            "peer \"exit\": queue.time: 100ms → 1s".to_owned(),
            format!("+ peer \"new\": {third} at new.example:1"),
            "- udp \"127.0.0.1:5301\": service \"echo\" of peer \"branch\"".to_owned(),
        ]
    );
    assert_eq!(plan.removed, ["branch".into()]);
    assert_eq!((plan.changed, plan.added), (vec![after.peers[0].clone()], vec![after.peers[1].clone()]));
    assert_eq!(
        after.peers,
        parse(&text)
            .peers
            .iter()
            .cloned()
            .map(|peer| Peer { services: peer.services.clone(), ..peer })
            .collect::<Vec<_>>()
    );
}

#[test]
fn another_key_under_a_name_is_a_change_of_that_peer() {
    let (plan, _) = planned(&parse(&base()), &replaced(&base(), KEYS[0], KEYS[2]));
    let [old, _, new] = KEYS;
    assert_eq!(lines(&plan), [format!("peer \"exit\": public_key: [\"{old}\"] → [\"{new}\"]")]);
    assert_eq!((plan.changed.len(), plan.removed.len(), plan.added.len()), (1, 0, 0));
}

/// `text` with a state file beside it.
fn with_state(text: &str, state: &str) -> Config {
    let read = |_: &Path| Ok(Some(state.to_owned()));
    Draft::read(text, Path::new("/etc/culvert"), read).finish(None).unwrap()
}

#[test]
fn peers_of_the_state_file_are_mentioned_only_when_something_is_different() {
    let state = format!("[[peer]]\nname = \"added\"\npublic_key = \"{}\"\nservices = [\"ntp\"]\n", KEYS[2]);
    let running = with_state(&base(), &state);
    // Its place among the services is another one in the new file.
    let text = without(&base(), "name = \"dns\"");
    let text = replaced(&text, "\"dns\", \"ntp\"", "\"ntp\"");
    let plan = reload::plan(&running, with_state(&text, &state));
    assert!(plan.changes.iter().all(|change| !change.what.contains("added")), "{:?}", plan.changes);
    let after = plan.config.unwrap();
    assert_eq!(after.peers[2], running.peers[2]);

    // One that is no longer in the file is removed, and one that is there again is added.
    let gone = reload::plan(&running, parse(&base()));
    let after = gone.config.unwrap();
    assert_eq!((after.peers.len(), gone.changes.len(), &gone.removed), (2, 1, &vec!["added".into()]));
    let back = reload::plan(&after, with_state(&base(), &state));
    assert_eq!(
        (back.config.as_ref(), back.changes.len(), &back.added[..]),
        (Some(&running), 1, &running.peers[2..])
    );
}

#[test]
fn the_port_of_a_peer_that_was_removed_closes_and_opens_again_with_it() {
    let state = format!("[[peer]]\nname = \"added\"\npublic_key = \"{}\"\n", KEYS[2]);
    let text = base() + "[[udp]]\nlisten = \"127.0.0.1:5305\"\npeer = \"added\"\nservice = \"x\"\n";
    let removed = "removed = [\"added\"]\n";
    let running = with_state(&text, &state);
    let plan = reload::plan(&running, with_state(&text, removed));
    assert_eq!(lines(&plan)[1..], ["- udp \"127.0.0.1:5305\": service \"x\" of peer \"added\""]);
    assert_eq!(plan.removed, ["added".into()]);
    let after = plan.config.unwrap();
    assert!(!after.udp[2].open && after.closed == ["added"] && after.forwards_to("added"));
    assert!(
        after.notes.iter().any(|note| note.problem.contains("this port stays closed")),
        "{:?}",
        after.notes
    );
    let plan = reload::plan(&after, with_state(&text, &state));
    assert_eq!((lines(&plan).len(), plan.udp_opened), (2, vec![2]));
    assert_eq!(plan.config, Some(running));

    // So does one that was closed at the start.
    let started = with_state(&text, removed);
    let plan = reload::plan(&started, with_state(&text, &state));
    assert_eq!((plan.udp_opened, plan.config.unwrap().udp.len()), (vec![2], 3));
}

/// What was checked beside a value that waits for a restart waits with it.
#[test]
fn what_would_be_wrong_beside_an_old_value_waits_for_the_restart() {
    let text = replaced(&base(), "listen = [\"127.0.0.1:4433\"]", "listen = [\"127.0.0.1:4433\"], mark = 7");
    let routed = format!("{}\"\nallowed_ips = [\"0.0.0.0/0\"]\nflow_quota = 1\ndrop = \"newest", KEYS[0]);
    let text = replaced(&text, KEYS[0], &routed);
    let new =
        format!("[[peer]]\nname = \"new\"\npublic_key = \"{}\"\nallowed_ips = [\"10.9.0.3\"]\n", KEYS[2]);
    let (plan, after) = planned(&parse(&base()), &(text + &new));
    assert_eq!(
        lines(&plan),
        [
            "transport.mark: 0 → 7 (restart)".to_owned(),
            "peer \"exit\": drop: oldest → newest".to_owned(),
            "peer \"exit\": flow_quota: 0.5 → 1".to_owned(),
            "peer \"exit\": allowed_ips: [] → [\"0.0.0.0/0\"] (restart)".to_owned(),
            format!("+ peer \"new\": {}, which dials us", KEYS[2]),
            "peer \"new\": allowed_ips: [] → [\"10.9.0.3/32\"] (restart)".to_owned(),
        ]
    );
    assert!(
        plan.changed.iter().chain(&plan.added).chain(&after.peers).all(|peer| peer.allowed_ips.is_empty())
    );

    // Open mode without a knock would let every QUIC client in.
    let off = base() + "[access]\nknock = \"off\"\n";
    let open = base() + "[access]\nmode = \"open\"\ndecoy = \"127.0.0.1:8443\"\n";
    let (plan, after) = planned(&parse(&off), &open);
    assert_eq!(
        lines(&plan),
        [
            "access.mode: allowlist → open (restart)",
            "access.knock: off → required (restart)",
            "+ access.decoy: 127.0.0.1:8443 (restart)"
        ]
    );
    assert_eq!((plan.config, after.access.mode), (None, AccessMode::Allowlist));
    let (plan, _) = planned(&parse(&open), &off);
    assert_eq!(
        lines(&plan),
        [
            "access.mode: open → allowlist",
            "access.knock: required → off (restart)",
            "- access.decoy: 127.0.0.1:8443"
        ]
    );

    // A decoy where we still listen would be ourselves.
    let moved =
        replaced(&base(), "127.0.0.1:4433", "127.0.0.1:4434") + "[access]\ndecoy = \"127.0.0.1:4433\"\n";
    let (plan, after) = planned(&parse(&base()), &moved);
    assert_eq!((lines(&plan).len(), after.access.decoy, plan.config), (2, None, None));
}

#[test]
fn a_tunnel_that_comes_or_goes_waits_with_what_is_routed_into_it() {
    let text = replaced(
        &base(),
        KEYS[0],
        &format!("{}\"\nallowed_ips = [\"10.9.0.2", KEYS[0])
            .replace("10.9.0.2", "10.9.0.2\"]\ndrop = \"oldest"),
    );
    let no_tunnel = replaced(&base(), "tun = { address = [\"10.9.0.1/24\"] }\n", "");
    let (plan, after) = planned(&parse(&no_tunnel), &text);
    assert_eq!(
        lines(&plan),
        [
            "peer \"exit\": allowed_ips: [] → [\"10.9.0.2/32\"] (restart)",
            "+ tun: culvert0 with [\"10.9.0.1/24\"] (restart)"
        ]
    );
    assert_eq!((plan.config, after.tun), (None, None));
    let (plan, after) = planned(&parse(&text), &no_tunnel);
    assert_eq!(lines(&plan).last().unwrap(), "- tun: culvert0 with [\"10.9.0.1/24\"] (restart)");
    assert!(plan.config.is_none() && after.tun.is_some());
}

#[test]
fn the_order_of_tables_is_no_change_that_is_shown() {
    let parts: Vec<String> = base().split("[[").map(str::to_owned).collect();
    let swapped =
        [&parts[..3], &[parts[4].clone(), parts[3].clone(), parts[6].clone(), parts[5].clone()], &parts[7..]]
            .concat();
    let (plan, after) = planned(&parse(&base()), &swapped.join("[["));
    assert_eq!((plan.changes, &*after.peers[0].name, after.udp[0].peer), (Vec::new(), "branch", 1));
}

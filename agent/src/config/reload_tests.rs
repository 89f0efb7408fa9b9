use std::path::Path;

use super::*;

const KEYS: [&str; 3] = [
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
fn parse(text: &str) -> Config {
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
fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from:?} is not in the configuration");
    text.replacen(from, to, 1)
}

/// The plan, after checking what holds of every plan, and what runs then.
#[track_caller]
fn planned(running: &Config, text: &str) -> (Plan, Config) {
    let plan = plan(running, parse(text));
    let after = plan.config.clone().unwrap_or_else(|| running.clone());
    holds(running, &plan, &after, text);
    (plan, after)
}

/// Places stay, indices are valid, and to do the same again changes nothing.
#[track_caller]
fn holds(running: &Config, plan: &Plan, after: &Config, text: &str) {
    let again = super::plan(after, after.clone());
    assert_eq!(again, Plan::default(), "a configuration held against itself");
    let again = super::plan(after, parse(text));
    assert_eq!(again.config, None);
    assert!(again.changes.iter().all(|change| change.effect == Effect::Restart), "{again:?}");
    let restarts = |plan: &Plan| plan.changes.iter().filter(|c| c.effect == Effect::Restart).count();
    assert_eq!(restarts(&again), restarts(plan));
    assert_eq!(
        (again.udp_opened, again.tcp_opened, again.removed, again.changed, again.added),
        Default::default()
    );

    assert!(after.services.len() >= running.services.len());
    for (old, new) in running.services.iter().zip(&after.services) {
        assert_eq!(old.name, new.name);
    }
    let granted = after.peers.iter().flat_map(|peer| &peer.services).chain(&after.access.services);
    for place in granted {
        assert!(after.services[*place].is_served());
    }
    for (old, new, opened) in
        [(&running.udp, &after.udp, &plan.udp_opened), (&running.tcp, &after.tcp, &plan.tcp_opened)]
    {
        assert!(new.len() >= old.len());
        for (old, new) in old.iter().zip(new) {
            assert_eq!(old.listen, new.listen);
        }
        for (place, forward) in new.iter().enumerate() {
            assert_eq!(forward.open, forward.peer < after.peers.len());
            assert_eq!(forward.open || forward.peer == Forward::NOBODY, true);
            let was_open = old.get(place).is_some_and(|old| old.open);
            assert_eq!(opened.contains(&place), forward.open && !was_open);
        }
    }
}

/// The lines of the difference, as an operator reads them.
fn lines(plan: &Plan) -> Vec<String> {
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

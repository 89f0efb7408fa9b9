//! What holds of every reload: the tests and the fuzz target check it.

use std::path::Path;

use crate::{
    Config, Forward,
    reload::{self, Change, Effect, Kind, Plan},
};

/// Takes `input` as two configuration files with a zero byte between them, of which the second is reloaded.
///
/// Places stay, and doing the same again changes nothing; what is said to have changed has changed.
pub fn reload_files(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let Some((before, after)) = text.split_once('\0') else { return };
    let parse = |text| Config::parse(text, Path::new("/etc/culvert"));
    let (Ok(running), Ok(fresh)) = (parse(before), parse(after)) else { return };
    let plan = reload::plan(&running, fresh.clone());
    let then = plan.config.clone().unwrap_or_else(|| running.clone());
    holds(&running, &plan, &then, fresh);
    for Change { what, kind, effect: _ } in &plan.changes {
        assert!(!what.is_empty());
        assert!(!matches!(kind, Kind::Changed(old, new) if old == new), "{what}");
    }
}

/// Places stay, indices are valid, and to do the same again changes nothing.
#[track_caller]
pub(super) fn holds(running: &Config, plan: &Plan, after: &Config, fresh: Config) {
    let again = reload::plan(after, after.clone());
    assert_eq!(again, Plan::default(), "a configuration held against itself");
    let again = reload::plan(after, fresh);
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
            assert!(forward.open || forward.peer == Forward::NOBODY);
            let was_open = old.get(place).is_some_and(|old| old.open);
            assert_eq!(opened.contains(&place), forward.open && !was_open);
        }
    }
}

//! Three exits behind one address, balanced by the ruleset that is shipped.

use std::time::Duration;

use culvert_tests::{
    clock::{self, PATIENCE},
    fleet::{COUNT, Fleet, Flow, INTERVAL},
    needs::{self, Need},
};

use crate::possible;

/// Without an answer, for a flow that stays where it is.
const MOST_GAP: Duration = Duration::from_millis(400);

/// Without an answer, for a flow whose exit dies. What `culvert fleet` promises is half a second until the exit is out of its maps;
/// the rest is for a machine with other work.
const LIMIT: Duration = Duration::from_secs(2);

/// Between two datagrams of a flow: the machine stood still, and agents may have taken each other for gone.
const STANDSTILL: Duration = Duration::from_millis(200);

/// Flows, and what went on beside them.
#[derive(Debug)]
struct Seen {
    flows: Vec<Flow>,
    /// The exits that `culvert fleet` called dead meanwhile.
    dead: Vec<u8>,
}

impl Seen {
    fn of(fleet: &mut Fleet, time: Duration, meanwhile: impl FnOnce(&mut Fleet)) -> Self {
        let deaths = |fleet: &Fleet| (1..=COUNT).map(|number| fleet.deaths(number)).collect::<Vec<_>>();
        let before = deaths(fleet);
        let flows = fleet.flows(time, meanwhile);
        let counts = deaths(fleet).into_iter().zip(before);
        let dead = (1..=COUNT).zip(counts).filter(|(_, (after, before))| after > before);
        Self { flows, dead: dead.map(|(number, _)| number).collect() }
    }

    /// Whether there is a reason outside of the fleet for a flow to leave one of `exits`.
    fn is_excused(&self, exits: &[u8]) -> bool {
        self.flows.iter().any(|flow| flow.pause > STANDSTILL)
            || exits.iter().any(|exit| self.dead.contains(exit))
    }

    /// Checks that a flow was at one exit and no other, and says if it had a pause there.
    #[track_caller]
    fn was_at(&self, flow: &Flow, exit: u8) -> Result<(), String> {
        let stayed = flow.exits == [exit];
        assert!(stayed || self.is_excused(&[exit]), "a flow left {exit}: {self:?}");
        if stayed && flow.gap < MOST_GAP { Ok(()) } else { Err(format!("{self:?}")) }
    }

    /// The same for all flows, wherever each was.
    #[track_caller]
    fn stayed(&self) -> Result<(), String> {
        for flow in &self.flows {
            self.was_at(flow, flow.exits.first().copied().unwrap_or_default())?;
            if flow.answered * 100 < flow.sent * 98 {
                return Err(format!("{self:?}"));
            }
        }
        Ok(())
    }

    /// Checks that no flows but those that were at `victim` have gone to another exit, and says if one of these took too long.
    #[track_caller]
    fn left(&self, victim: u8, before: &[Flow]) -> Result<(), String> {
        for (flow, before) in self.flows.iter().zip(before) {
            let exit = before.exits.last().copied().unwrap_or_default();
            if exit != victim {
                self.was_at(flow, exit)?;
            } else if flow.gap >= LIMIT || flow.exits.len() != 2 || flow.exits[1] == victim {
                return Err(format!("{self:?}"));
            }
        }
        Ok(())
    }
}

#[test]
fn flows_keep_their_exit_whatever_the_balancer_forgets_and_leave_a_dead_one_within_two_seconds() {
    /// Nobody is dead that is silent for a moment.
    const SELDOM: Duration = Duration::from_secs(2);
    if !possible("a fleet") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    clock::in_attempts(|| {
        let mut fleet = Fleet::start(2, SELDOM);
        let before = Seen::of(&mut fleet, Duration::from_secs(2), |fleet| fleet.forget_connections());
        before.stayed()?;
        assert_eq!(fleet.tracked(), "", "the ruleset keeps no state");

        let added = Seen::of(&mut fleet, Duration::from_secs(3), |fleet| {
            fleet.exits[2].start();
            clock::until("new peers go to the third exit, too", PATIENCE, || match fleet.takers() {
                takers if takers.len() == 3 => Ok(()),
                takers => Err(format!("{takers:?}")),
            });
        });
        added.stayed()?;
        let place = |seen: &Seen| seen.flows.iter().map(|flow| flow.exits[0]).collect::<Vec<_>>();
        if place(&added) != place(&before) {
            return Err(format!("{before:?} {added:?}"));
        }

        fleet.watch(INTERVAL);
        let victim = added.flows[0].exits[0];
        let killed = Seen::of(&mut fleet, Duration::from_secs(6), |fleet| {
            fleet.exits[usize::from(victim) - 1].kill();
        });
        killed.left(victim, &added.flows)
    });
}

#[test]
fn an_exit_that_dies_without_a_sign_leaves_the_maps_and_its_peers_are_served_by_another() {
    if !possible("a silent exit") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    for means in [Means::Unplugged, Means::Stopped] {
        clock::in_attempts(|| {
            let mut fleet = Fleet::start(3, INTERVAL);
            let before = fleet.flows(Duration::from_secs(1), |_| ());
            let victim = before[0].exits[before[0].exits.len() - 1];
            let mut time = Duration::ZERO;
            let seen = Seen::of(&mut fleet, Duration::from_secs(5), |fleet| {
                let begun = clock::now();
                means.begin(fleet, victim);
                clock::until("the exit is in no map", PATIENCE, || {
                    let (alive, takers) = (fleet.alive(), fleet.takers());
                    let gone = !alive.contains(&victim) && !takers.contains(&victim);
                    if gone { Ok(()) } else { Err(format!("{alive:?} {takers:?}")) }
                });
                time = begun.elapsed();
            });
            println!("{means:?}: out of the maps after {time:?}: {seen:?}");
            let left = seen.left(victim, &before);
            clock::until("the others are where they were", PATIENCE, || match fleet.alive() {
                alive if alive.len() == 2 && !alive.contains(&victim) => Ok(()),
                alive => Err(format!("{alive:?}")),
            });
            means.end(&mut fleet, victim);
            clock::until("the exit is there again", PATIENCE, || {
                let (alive, takers) = (fleet.alive(), fleet.takers());
                if alive.len() + takers.len() == 6 { Ok(()) } else { Err(format!("{alive:?} {takers:?}")) }
            });
            if time < LIMIT { left } else { Err(format!("in the maps for {time:?}")) }
        });
    }
}

/// How an exit dies so that nothing answers, not even to refuse.
#[derive(Clone, Copy, Debug)]
enum Means {
    Unplugged,
    /// Its kernel still accepts connections.
    Stopped,
}

impl Means {
    fn begin(self, fleet: &mut Fleet, number: u8) {
        match self {
            Self::Unplugged => fleet.plug(number, false),
            Self::Stopped => fleet.exits[usize::from(number) - 1].process().signal("STOP"),
        }
    }

    fn end(self, fleet: &mut Fleet, number: u8) {
        match self {
            Self::Unplugged => fleet.plug(number, true),
            Self::Stopped => fleet.exits[usize::from(number) - 1].process().signal("CONT"),
        }
    }
}

#[test]
fn a_drained_exit_hands_its_peers_over_and_no_packet_is_lost() {
    /// Nobody is dead that is silent for a moment, and the peers hear soon that the exit takes no new ones.
    const UNHURRIED: Duration = Duration::from_millis(500);
    if !possible("a drained exit") || !needs::met("a fleet", &[Need::Tool("conntrack", "conntrack")]) {
        return;
    }
    clock::in_attempts(|| {
        let mut fleet = Fleet::start(3, UNHURRIED);
        let before = fleet.flows(Duration::from_secs(1), |_| ());
        let drained = before[0].exits[0];
        let during = Seen::of(&mut fleet, Duration::from_secs(4), |fleet| {
            // Fails unless all have left.
            let said = fleet.exits[usize::from(drained) - 1].ask(&["drain", "--within", "20"]);
            assert_eq!(said, "all peers have left");
        });
        for (flow, before) in during.flows.iter().zip(&before) {
            let stayed = flow.exits == before.exits;
            let well = flow.answered == flow.sent && stayed == (before.exits != [drained]);
            assert!(well || during.is_excused(&before.exits), "{during:?}");
            if !well {
                return Err(format!("{during:?}"));
            }
        }
        let page = fleet.exits[usize::from(drained) - 1].get("/readyz").unwrap();
        assert_eq!((page.status, &*page.body), (503, "draining\n"));
        Ok(())
    });
}

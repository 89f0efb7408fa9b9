//! Which exits of a fleet get packets, and the commands for nft that say so (pure).
//!
//! ```text
//!              ready            not ready            no answer, refused
//!   exit ──► alive, takes ──► alive, takes none ──► dead
//!                                  └── no answer twice in a row ──┘
//! ```

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// How many slots the sources of new connections are hashed to; `culvert-fleet.nft` has the same number.
const SLOTS: u16 = 256;

/// How many questions in a row an exit may leave unanswered and still be alive: one answer may be late or lost.
const MISSES: u8 = 1;

/// An exit of the fleet, as the operator names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Exit {
    /// The exit's `transport.server_id`, which no other exit has.
    pub(super) id: u8,
    pub(super) v4: Option<Ipv4Addr>,
    pub(super) v6: Option<Ipv6Addr>,
    /// The address at which the exit answers `/readyz`.
    pub(super) admin: SocketAddr,
}

/// The answer of an exit to the question whether it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Ready,
    /// It serves those that it has: it drains, or starts.
    NotReady,
    /// No answer came within the time that it has.
    Silent,
    /// Its host refuses the connection: no agent runs there.
    Refused,
}

/// What is known of an exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// Whether packets for its connections go to it.
    pub(super) alive: bool,
    /// Whether new connections go to it.
    pub(super) takes: bool,
    /// Questions in a row that it has not answered.
    missed: u8,
}

impl State {
    pub(super) fn after(self, answer: Answer) -> Self {
        let missed = match answer {
            Answer::Silent => self.missed.saturating_add(1),
            Answer::Ready | Answer::NotReady | Answer::Refused => 0,
        };
        let alive = match answer {
            Answer::Ready | Answer::NotReady => true,
            Answer::Silent => self.alive && missed <= MISSES,
            Answer::Refused => false,
        };
        Self { alive, takes: answer == Answer::Ready, missed }
    }

    pub(super) fn label(self) -> &'static str {
        match (self.alive, self.takes) {
            (_, true) => "takes new peers",
            (true, false) => "takes no new peers",
            (false, false) => "is dead",
        }
    }
}

/// The commands that fill the sets and maps of `table`, in one transaction. If no exit takes new peers, those that are alive get
/// them: one that starts is better than none.
pub(super) fn commands(table: &str, exits: &[(Exit, State)]) -> String {
    let mut text = String::new();
    for family in [4, 6] {
        let address = |exit: &Exit| match family {
            4 => exit.v4.map(IpAddr::from),
            _ => exit.v6.map(IpAddr::from),
        };
        let with = |wanted: fn(&State) -> bool| -> Vec<(u8, IpAddr)> {
            let exits = exits.iter().filter(|(_, state)| wanted(state));
            exits.filter_map(|(exit, _)| Some((exit.id, address(exit)?))).collect()
        };
        let alive = with(|state| state.alive);
        let takers = with(|state| state.takes);
        let takers = if takers.is_empty() { &alive } else { &takers };
        let own = with(|_| true).into_iter().map(|(_, address)| address.to_string());
        fill(&mut text, table, "set", &format!("own{family}"), own);
        let exits = alive.iter().map(|(id, address)| format!("{id} : {address}"));
        fill(&mut text, table, "map", &format!("exits{family}"), exits);
        let slots = (0..SLOTS).filter_map(|slot| Some(format!("{slot} : {}", holder(slot, takers)?)));
        fill(&mut text, table, "map", &format!("slots{family}"), slots);
    }
    text
}

fn fill(text: &mut String, table: &str, kind: &str, name: &str, elements: impl Iterator<Item = String>) {
    let elements: Vec<String> = elements.collect();
    writeln!(text, "flush {kind} inet {table} {name}").ok();
    if !elements.is_empty() {
        writeln!(text, "add element inet {table} {name} {{ {} }}", elements.join(", ")).ok();
    }
}

/// The exit that has a slot, by rendezvous hashing: an exit that comes or goes moves only the slots that it gets or had.
fn holder(slot: u16, exits: &[(u8, IpAddr)]) -> Option<IpAddr> {
    exits.iter().max_by_key(|(id, _)| weight(slot, *id)).map(|(_, address)| *address)
}

/// A number for slot and exit that looks random: the finalizer of SplitMix64.
fn weight(slot: u16, id: u8) -> u64 {
    let mut bits = (u64::from(slot) << 8 | u64::from(id)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exits(states: &[State]) -> Vec<(Exit, State)> {
        let exit = |(id, state): (u8, &State)| {
            let v4 = Ipv4Addr::new(192, 0, 2, 10 + id);
            (Exit { id, v4: Some(v4), v6: None, admin: (v4, 9464).into() }, *state)
        };
        (1..).zip(states).map(exit).collect()
    }

    const TAKES: State = State { alive: true, takes: true, missed: 0 };
    const DRAINS: State = State { alive: true, takes: false, missed: 0 };
    const DEAD: State = State { alive: false, takes: false, missed: 0 };

    /// The lines for a map that are elements.
    fn elements(commands: &str, map: &str) -> Vec<String> {
        let start = format!("add element inet fleet {map} {{ ");
        let line = commands.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(Vec::new(), |line| line.trim_end_matches(" }").split(", ").map(str::to_owned).collect())
    }

    #[test]
    fn one_answer_may_be_missing_and_a_refusal_counts_at_once() {
        let state = State::default().after(Answer::Ready);
        assert_eq!(state, TAKES);
        let state = state.after(Answer::Silent);
        assert_eq!((state.alive, state.takes), (true, false), "nobody new, for now");
        assert_eq!(state.after(Answer::Ready), TAKES);
        assert_eq!(state.after(Answer::NotReady), DRAINS);
        assert!(!state.after(Answer::Silent).alive);
        assert_eq!(TAKES.after(Answer::Refused), DEAD);
        assert!(!State::default().after(Answer::Silent).alive, "what was never seen is not there");
    }

    #[test]
    fn packets_go_to_the_living_and_new_peers_to_those_that_take_them() {
        let commands = commands("fleet", &exits(&[TAKES, DRAINS, DEAD]));
        assert_eq!(elements(&commands, "own4"), ["192.0.2.11", "192.0.2.12", "192.0.2.13"]);
        assert_eq!(elements(&commands, "exits4"), ["1 : 192.0.2.11", "2 : 192.0.2.12"]);
        let slots = elements(&commands, "slots4");
        assert_eq!(slots.len(), 256);
        assert!(slots.iter().all(|slot| slot.ends_with(" : 192.0.2.11")), "{slots:?}");
        assert!(commands.contains("flush map inet fleet slots6\n"), "what has no IPv6 leaves nothing there");
        assert!(elements(&commands, "slots6").is_empty());
    }

    #[test]
    fn new_peers_go_to_a_living_exit_if_none_takes_them() {
        let commands = commands("fleet", &exits(&[DRAINS, DEAD]));
        assert!(elements(&commands, "slots4").iter().all(|slot| slot.ends_with(".11")));
    }

    #[test]
    fn an_exit_that_goes_moves_only_its_own_slots_and_each_has_a_fair_share() {
        let before = elements(&commands("fleet", &exits(&[TAKES, TAKES, TAKES])), "slots4");
        let after = elements(&commands("fleet", &exits(&[TAKES, DEAD, TAKES])), "slots4");
        for (before, after) in before.iter().zip(&after) {
            assert!(before == after || before.ends_with(".12"), "{before} became {after}");
        }
        for exit in [".11", ".12", ".13"] {
            let share = before.iter().filter(|slot| slot.ends_with(exit)).count();
            assert!((60..=110).contains(&share), "{share} of 256");
        }
    }
}

//! What must hold of one run of a script, and of two of them.

use std::time::Duration;

use super::{CLIENT, End, Outcome, Run, Script, Seen, Step};

/// A difference between a forward and a direct connection that must be.
#[derive(Clone, Copy)]
pub struct Difference {
    /// Its name in `docs/reliability.md`.
    pub name: &'static str,
    /// Why it must be.
    pub reason: &'static str,
    applies: fn(&Script, End, End) -> bool,
}

/// All of them; the first value is what the direct connection gives, the second what the forward gives.
pub const DIFFERENCES: &[Difference] = &[
    Difference {
        name: "accepted before the service is reached",
        reason: "the entry accepts the client before the exit knows whether the service does: a refused connect is a reset \
                 after the connect",
        applies: |script, direct, forward| {
            !script.has_service && (direct, forward) == (End::Refused, End::Reset)
        },
    },
    Difference {
        name: "a host that has vanished",
        reason: "the agent beside it misses it; no kernel can be made to report at the other end that it missed a host that \
                 was not its own neighbour: ETIMEDOUT is ECONNRESET",
        applies: |script, direct, forward| {
            script.vanishes() && (direct, forward) == (End::TimedOut, End::Reset)
        },
    },
];

/// The name of the one difference that is about no end: the urgent byte itself is not carried.
pub const URGENT: &str = "urgent data";

/// What is wrong with a run, whatever the connection was.
#[must_use]
pub fn faults(script: &Script, run: &Run) -> Vec<String> {
    let mut faults = Vec::new();
    for (side, seen) in run.iter().enumerate() {
        let (name, other) = (name(side), &run[1 - side]);
        let Seen { received, .. } = *seen;
        if let Some(place) = seen.garbled {
            faults.push(format!("the {name} read something else than was sent, from byte {place}"));
        }
        if received > other.sent {
            faults.push(format!("the {name} read {received} of {} bytes", other.sent));
        }
        let hung = seen.outcomes.iter().position(|outcome| *outcome == Outcome::Hung);
        if let Some(place) = hung {
            faults.push(format!("the {name} hung in step {}: {}", place + 1, script.steps[side][place]));
        }
        if !seen.has_read_all || hung.is_some() {
            continue;
        }
        // Who does not reset the connection ends it with a FIN, behind all that it has written.
        let least = match other.acknowledged {
            None => other.sent,
            Some(_) if seen.first_end == Some(End::Eof) => other.sent,
            Some(_) if script.stops_reading[side] => 0,
            Some(acknowledged) => acknowledged,
        };
        if script.has_service && received < least {
            let sent = other.sent;
            faults.push(format!("the {name} read {received} of {sent} bytes, and {least} had to arrive"));
        }
    }
    faults
}

/// In what a run differs from one over a direct connection, except for what must differ.
#[must_use]
pub fn differences(script: &Script, direct: &Run, forward: &Run) -> Vec<String> {
    let mut differences = Vec::new();
    let must_be =
        |direct, forward| DIFFERENCES.iter().any(|difference| (difference.applies)(script, direct, forward));
    for (side, (direct, forward)) in direct.iter().zip(forward).enumerate() {
        let name = name(side);
        if direct.unconnected != forward.unconnected {
            let first = forward.outcomes.first();
            let met = match first {
                Some(Outcome::Ended(end)) => Some(*end),
                _ => None,
            };
            let is_known = match (direct.unconnected, forward.unconnected.or(met)) {
                (Some(direct), Some(forward)) => must_be(direct, forward),
                _ => false,
            };
            if !is_known {
                differences.push(format!(
                    "the {name}'s connect: {:?}, here {:?} and then {first:?}",
                    direct.unconnected, forward.unconnected
                ));
            }
            continue;
        }
        for (place, step) in script.steps[side].iter().enumerate() {
            let (direct, forward) = (direct.outcomes.get(place), forward.outcomes.get(place));
            let is_known = match (direct, forward) {
                (Some(Outcome::Ended(direct)), Some(Outcome::Ended(forward))) => must_be(*direct, *forward),
                (Some(Outcome::Urgent(true)), Some(Outcome::Urgent(false))) => *step == Step::TakeUrgent,
                _ => false,
            };
            if direct != forward && !is_known {
                let text = |outcome: Option<&Outcome>| {
                    outcome.map_or_else(|| "nothing".to_owned(), |outcome| format!("{outcome:?}"))
                };
                differences.push(format!(
                    "the {name}'s step {}, {step}: {}, here {}",
                    place + 1,
                    text(direct),
                    text(forward)
                ));
            }
        }
    }
    differences
}

/// By how much an end came too late, beside a direct connection.
#[must_use]
pub fn lateness(script: &Script, direct: &Run, forward: &Run) -> Option<Duration> {
    let late = direct
        .iter()
        .zip(forward)
        .filter_map(|(direct, forward)| forward.slowest.checked_sub(direct.slowest + script.patience));
    late.max()
}

fn name(side: usize) -> &'static str {
    if side == CLIENT { "client" } else { "service" }
}

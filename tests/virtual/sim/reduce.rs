//! A failing schedule, made small: events are left out and amounts halved for as long as the same promise is broken.

use wire::repair_terms::Mode;

use super::schedule::{Event, PLENTY, Schedule, What};

/// How often a schedule is tried again while it is reduced.
const MOST_TRIALS: usize = 300;

/// The smallest schedule that was found for which `fails` holds, as it does for `schedule`.
pub(crate) fn reduce(schedule: &Schedule, mut fails: impl FnMut(&Schedule) -> bool) -> Schedule {
    let mut best = schedule.clone();
    let mut trials = 0;
    let mut better = |candidate: Schedule, best: &mut Schedule| {
        trials += 1;
        let better = trials <= MOST_TRIALS && candidate != *best && fails(&candidate);
        if better {
            *best = candidate;
        }
        better
    };
    // Many events at once first, then fewer.
    let mut size = best.events.len().div_ceil(2);
    while size > 0 {
        let mut start = 0;
        while start < best.events.len() {
            let mut candidate = best.clone();
            candidate.events.drain(start..(start + size).min(best.events.len()));
            if !better(candidate, &mut best) {
                start += size;
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
    for candidate in simpler_setups(&best) {
        let mut merged = best.clone();
        candidate(&mut merged);
        better(merged, &mut best);
    }
    for place in 0..best.events.len() {
        loop {
            let mut candidate = best.clone();
            halve(&mut candidate.events[place]);
            if !better(candidate, &mut best) {
                break;
            }
        }
    }
    best
}

type Simplify = fn(&mut Schedule);

fn simpler_setups(schedule: &Schedule) -> Vec<Simplify> {
    let mut simpler: Vec<Simplify> = vec![
        |schedule| schedule.setup.workers = [1; 3],
        |schedule| schedule.setup.lanes = 1,
        |schedule| schedule.setup.packets = 4096,
        |schedule| schedule.setup.kilobytes = 4096,
        |schedule| schedule.setup.is_mutual = false,
        |schedule| schedule.setup.is_eager = false,
        |schedule| schedule.setup.drops_newest = false,
        |schedule| schedule.setup.quota = 100,
        |schedule| schedule.setup.flows_per_peer = PLENTY,
        |schedule| schedule.setup.repair = Mode::Off,
        |schedule| schedule.setup.holds = false,
        |schedule| schedule.setup.rate = 0,
        |schedule| schedule.setup.is_standard = false,
    ];
    let needs_tun = |event: &Event| matches!(event.what, What::Packets { .. });
    if !schedule.events.iter().any(needs_tun) {
        simpler.push(|schedule| schedule.setup.has_tun = false);
    }
    if !schedule.events.iter().any(|event| event.what.names(1)) {
        simpler.push(|schedule| schedule.setup.entries = 1);
    }
    simpler
}

fn halve(event: &mut Event) {
    match &mut event.what {
        What::Datagrams { count, .. } | What::Packets { count, .. } => *count /= 2,
        What::Connection { bytes, .. } => *bytes /= 2,
        What::Path { jitter_ms, loss, duplicates, corrupted, .. } => {
            // A loss of everything is a partition, which is simpler than a part of it.
            let rates = [(jitter_ms, 0), (loss, 1_000), (duplicates, 0), (corrupted, 0)];
            rates.into_iter().filter(|(rate, kept)| **rate != *kept).for_each(|(rate, _)| *rate /= 2);
        }
        What::Clear
        | What::Rebind { .. }
        | What::Kill { .. }
        | What::Stop { .. }
        | What::Start { .. }
        | What::Reload { .. } => {}
    }
}

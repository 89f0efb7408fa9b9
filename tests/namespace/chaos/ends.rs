//! An agent ends or is killed and comes back; the one that is dialled moves to another address, or to another family.

use std::{ops::Range, thread, time::Duration};

use culvert_tests::{
    clock::{self, PATIENCE},
    impairment::Path,
    ledger::Ledger,
    stage::{End, Ending, Entrance, Stage},
};

use super::possible;

/// Waits until nothing is missing on any line but what was sent within one of its `windows`: what was sent last may be on its way.
#[track_caller]
fn wait_for_gaps_within(stage: &Stage, windows: &[Vec<Range<u64>>]) {
    clock::until("what is missing was sent while an agent was away", PATIENCE, || {
        for (place, line) in stage.streams().lines().iter().enumerate() {
            let allowed: Vec<&Range<u64>> = windows.iter().map(|window| &window[place]).collect();
            let outside = line.gaps().into_iter().find(|(first, last)| {
                !allowed.iter().any(|window| window.start <= *first && last < &window.end)
            });
            if let Some((first, last)) = outside {
                return Err(format!(
                    "{}: {first} to {last} are missing, outside of {allowed:?}",
                    line.name()
                ));
            }
        }
        Ok(())
    });
}

/// While an agent is away datagrams are lost; before and after none is.
#[test]
fn traffic_goes_on_after_either_agent_was_stopped_or_killed() {
    if !possible("agents that end") {
        return;
    }
    let mut stage = Stage::start(Entrance::Address, Path::default());
    stage.wait_for_lanes(2);
    let descriptors = stage.descriptors();
    let mut windows = Vec::new();
    for (end, ending, away) in [
        (End::Listener, Ending::Killed, Duration::ZERO),
        (End::Dialler, Ending::Killed, Duration::ZERO),
        (End::Listener, Ending::Asked, Duration::from_secs(2)),
        (End::Dialler, Ending::Asked, Duration::from_secs(2)),
    ] {
        let what = format!("{end:?} {ending:?}");
        let newest = stage.newest();
        let started = stage.restart(end, ending, away);
        stage.streams().wait_for_answers_since(started, &what);
        windows.push(newest.into_iter().zip(stage.sent()).map(|(newest, sent)| newest + 1..sent).collect());
        // What was sent on a lane of the session before is not counted by the new agent.
        stage.wait_for_lanes(2);
        thread::sleep(Duration::from_millis(500));
        // A new agent counts from zero: what is sent from now on is accounted for again, and none of it is lost.
        let books = Ledger::open(&stage);
        thread::sleep(Duration::from_millis(300));
        drop(books.close(&stage, &what));
    }
    stage.streams().pause();
    wait_for_gaps_within(&stage, &windows);
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}

#[test]
fn traffic_follows_the_name_of_the_peer_to_another_address_and_to_another_family() {
    if !possible("a name that moves") {
        return;
    }
    let mut stage = Stage::start(Entrance::Name, Path::default());
    stage.wait_for_lanes(2);
    let descriptors = stage.descriptors();
    let mut books = Ledger::new();
    for (place, what) in [(1, "another address"), (2, "IPv6"), (0, "IPv4 again")] {
        stage.move_listener(place);
        stage.streams().wait_for_answers(what);
        books = books.close(&stage, what);
        assert!(stage.relays()[place].fates().passed > 0);
    }
    // The name has both families, and nothing passes over the one in use.
    stage.name(&[0, 2]);
    stage.open_only(2);
    stage.streams().wait_for_answers("IPv4 died");
    let closed = books.close(&stage, "IPv4 died");
    books.has_lost(&closed);
    stage.wait_for_lanes(2);
    stage.wait_for_descriptors(descriptors);
    stage.end();
}

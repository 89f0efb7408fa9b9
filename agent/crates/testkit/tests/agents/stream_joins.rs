//! Stream connections that somebody asks for who should not, or not yet: early, late, of another process, forged, replayed.

use base::clock::Clock;
use wire::messages::{CloseReason, Join, Message};

use crate::{
    flood::{GateFlood, dial},
    malicious::MaliciousPeer,
};

/// A flood whose malicious peer has said hello, as a peer with four workers, and a second connection of the same key.
struct Joining {
    flood: GateFlood,
    second: MaliciousPeer,
}

impl Joining {
    fn new(seed: u64, hello: &Message) -> Self {
        let mut joining = Self::before_hello(seed);
        joining.flood.malicious.say(hello);
        joining.run(50);
        joining
    }

    fn before_hello(seed: u64) -> Self {
        let mut flood = GateFlood::with_workers(seed, 2, "", None);
        let second = dial(&flood.pair, &mut flood.host, &flood.identity, 1, None);
        let mut joining = Self { flood, second };
        joining.run(50);
        assert!(joining.second.connected);
        joining
    }

    fn run(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds {
            self.flood.run(1);
            self.second.poll(self.flood.pair.world.clock.now());
        }
    }

    /// The second connection says this.
    fn say(&mut self, join: Join) {
        self.second.say(&Message::Join(join));
        self.run(50);
    }

    fn is_joined(&self) -> bool {
        self.second.messages.contains(&Message::Joined)
    }

    fn rogues_connections(&mut self) -> usize {
        let workers = &self.flood.pair.world.agent(self.flood.pair.exit).workers;
        workers.iter().map(|worker| worker.peers()[1].streams.all.len()).sum()
    }
}

#[test]
fn a_join_of_the_session_that_there_is_comes_up() {
    let mut joining = Joining::new(3000, &MaliciousPeer::hello_with_streams(4));
    let name = joining.flood.malicious.session_name();
    joining.say(joining.second.join(name, 3));
    assert!(joining.is_joined() && joining.second.lost.is_none());
    assert_eq!(joining.rogues_connections(), 1);
    // It is no session: the one that there is stays.
    assert!(joining.flood.malicious.lost.is_none());
    joining.second.say(&MaliciousPeer::hello());
    joining.run(50);
    assert_eq!(joining.second.closed(), Some(CloseReason::ProtocolViolation));
    assert_eq!(joining.rogues_connections(), 0);
    assert!(joining.flood.malicious.lost.is_none());
    joining.flood.assert_innocent_is_unharmed();
}

#[test]
fn a_join_that_comes_before_its_session_waits_for_it() {
    let mut joining = Joining::before_hello(3010);
    let name = joining.flood.malicious.session_name();
    joining.say(joining.second.join(name, 1));
    assert!(!joining.is_joined() && joining.second.lost.is_none());
    joining.flood.malicious.say(&MaliciousPeer::hello_with_streams(4));
    joining.run(50);
    assert!(joining.is_joined() && joining.second.lost.is_none());
    joining.flood.assert_innocent_is_unharmed();
}

#[test]
fn a_join_whose_session_never_comes_is_closed_after_two_seconds() {
    let mut joining = Joining::before_hello(3020);
    let name = joining.flood.malicious.session_name();
    joining.say(joining.second.join(name, 1));
    joining.run(1900);
    assert!(joining.second.lost.is_none());
    joining.run(200);
    assert_eq!(joining.second.closed(), Some(CloseReason::NoSession));
    joining.flood.assert_innocent_is_unharmed();
}

#[test]
fn a_join_of_another_session_or_process_is_closed() {
    let wrong: [fn(&mut Join); 2] = [|join| join.session = [7; 16], |join| join.instance = [0x77; 16]];
    for (change, seed) in wrong.into_iter().zip(3030..) {
        let mut joining = Joining::new(seed, &MaliciousPeer::hello_with_streams(4));
        let mut join = joining.second.join(joining.flood.malicious.session_name(), 1);
        change(&mut join);
        joining.say(join);
        joining.run(2100);
        assert_eq!(joining.second.closed(), Some(CloseReason::NoSession));
        assert!(!joining.is_joined());
        joining.flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_join_of_the_session_of_another_peer_is_closed_and_takes_nothing_from_it() {
    let mut joining = Joining::new(3035, &MaliciousPeer::hello_with_streams(4));
    let workers = &joining.flood.pair.world.agent(joining.flood.pair.exit).workers;
    let innocent = &workers[0].peers()[0].data;
    let (name, instance) = (innocent.link.as_ref().unwrap().name, innocent.instance.unwrap());
    joining.say(Join { instance, ..joining.second.join(name, 1) });
    assert!(!joining.is_joined());
    joining.run(2100);
    assert_eq!(joining.second.closed(), Some(CloseReason::NoSession));
    let workers = &joining.flood.pair.world.agent(joining.flood.pair.exit).workers;
    let is_empty = |place: usize| workers.iter().all(|worker| worker.peers()[place].streams.all.is_empty());
    assert!(is_empty(0) && is_empty(1));
    joining.flood.assert_innocent_is_unharmed();
}

#[test]
fn a_join_without_its_proof_or_with_one_of_another_connection_is_a_violation() {
    for (replayed, seed) in [(false, 3040), (true, 3041)] {
        let mut joining = Joining::new(seed, &MaliciousPeer::hello_with_streams(4));
        let name = joining.flood.malicious.session_name();
        let mut join = joining.second.join(name, 1);
        join.possession = replayed.then(|| joining.flood.malicious.join(name, 1).possession.unwrap());
        joining.say(join);
        assert_eq!(joining.second.closed(), Some(CloseReason::ProtocolViolation));
        joining.flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_peer_that_does_not_know_stream_connections_has_none() {
    let mut joining = Joining::new(3050, &MaliciousPeer::hello());
    let name = joining.flood.malicious.session_name();
    joining.say(joining.second.join(name, 1));
    assert_eq!(joining.second.closed(), Some(CloseReason::NoSession));
    joining.flood.assert_innocent_is_unharmed();
}

#[test]
fn a_second_join_of_a_number_takes_the_place_of_the_first() {
    let mut joining = Joining::new(3060, &MaliciousPeer::hello_with_streams(4));
    let name = joining.flood.malicious.session_name();
    joining.say(joining.second.join(name, 2));
    let mut third = dial(&joining.flood.pair, &mut joining.flood.host, &joining.flood.identity, 2, None);
    let play = |joining: &mut Joining, third: &mut MaliciousPeer| {
        for _ in 0..50 {
            joining.run(1);
            third.poll(joining.flood.pair.world.clock.now());
        }
    };
    play(&mut joining, &mut third);
    third.say(&Message::Join(third.join(name, 2)));
    play(&mut joining, &mut third);
    assert!(third.messages.contains(&Message::Joined));
    // Where the kernel steers both to one worker it is the same place; else each worker has one.
    let count = joining.rogues_connections();
    assert_eq!(joining.second.lost.is_some(), count == 1, "{count}");
    joining.flood.assert_innocent_is_unharmed();
}

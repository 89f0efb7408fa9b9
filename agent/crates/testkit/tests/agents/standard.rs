//! Standard mode: what quinn-proto does not take waits, not for too long, and holds nothing up; what it drops is counted.

use std::{net::SocketAddr, time::Duration};

use base::{
    clock::Clock,
    ids::{LaneRef, PeerId},
};
use dataplane::{
    datapath::segments::{CountedHeader, Segments, Sending},
    relay::DropReason,
};
use engine::status::PeerStatus;
use wire::context::Context;

use crate::{
    flood::{ECHO, GateFlood, ROGUE},
    malicious::MaliciousPeer,
    number_of, numbered,
};

const MS: Duration = Duration::from_millis(1);

/// A peer without lanes that nothing reaches any more.
struct Stalled {
    flood: GateFlood,
    /// The service sends there what is for it.
    flow: SocketAddr,
}

impl Stalled {
    fn new(seed: u64) -> Self {
        let mut flood = GateFlood::new(seed, "");
        flood.malicious.say(&MaliciousPeer::hello_with_lanes(0));
        flood.run(50);
        let opening = [&flood.open(0, ECHO)[..], b"opens"].concat();
        flood.malicious.send_plain(&opening);
        let mut stalled = Self { flood, flow: SocketAddr::new(ROGUE, 0) };
        stalled.run(30);
        stalled.flow = stalled.flood.pair.echo.receive()[0].0;
        stalled.set_blocked(true);
        stalled
    }

    fn set_blocked(&mut self, blocked: bool) {
        let mut weather = self.flood.pair.world.weather.borrow_mut();
        weather.block = Box::new(move |_, to| blocked && to.ip() == ROGUE);
    }

    /// Lets time pass in which the service says nothing by itself.
    fn run(&mut self, milliseconds: u32) {
        for _ in 0..milliseconds {
            self.flood.pair.world.run(MS);
            self.flood.malicious.poll(self.flood.pair.world.clock.now());
        }
    }

    /// The service sends datagrams with these numbers.
    fn answer(&mut self, numbers: std::ops::Range<u32>) {
        for number in numbers {
            self.flood.pair.echo.send(self.flow, &numbered(number));
        }
    }

    /// The numbers of those that the peer got since this was last asked.
    fn came(&mut self) -> Vec<u32> {
        let data = std::mem::take(&mut self.flood.malicious.data);
        let payloads = data.iter().filter_map(|data| Some(&data[Context::decode(data)?.payload_at()?..]));
        payloads.map(number_of).collect()
    }

    /// The peer as the exit sees it, and how many of its datagrams expired.
    fn peer(&mut self) -> (PeerStatus, u64) {
        let exit = self.flood.pair.exit;
        let peer = self.flood.pair.world.peers(exit).swap_remove(1);
        assert!(peer.uplink.balances, "{peer:?}");
        let expired = peer.uplink.account.dropped[DropReason::Expired];
        assert_eq!(peer.uplink.account.dropped_total(), expired, "for no other reason");
        (peer, expired)
    }

    /// Datagrams that wait for room before quinn-proto, in the relay's queue.
    fn in_queue(&self) -> usize {
        self.flood.pair.world.books(self.flood.pair.exit)[0].peers[1].waiting[0].0
    }
}

#[test]
fn what_quinn_does_not_take_in_time_expires_and_is_not_sent_late() {
    let mut stalled = Stalled::new(1410);
    stalled.answer(0..300);
    // From the service it is 5 ms.
    stalled.run(104);
    let (peer, expired) = stalled.peer();
    let all = peer.uplink.account.delivered + peer.uplink.queued;
    assert_eq!((all, expired, stalled.in_queue()), (300, 0, 0));
    stalled.run(56);
    let (peer, waiting) = stalled.peer();
    let (sent, held) = (peer.uplink.account.delivered, peer.uplink.queued);
    assert_eq!(sent + held + waiting, 300);
    let taken = sent + held;
    assert!(taken >= 64 * 1024 / 602 && waiting >= 100, "{held} in quinn-proto, {waiting} waited before it");

    stalled.set_blocked(false);
    stalled.run(1500);
    stalled.answer(300..310);
    stalled.run(100);
    let came = stalled.came();
    assert!(came.is_sorted() && came.ends_with(&Vec::from_iter(300..310)), "{came:?}");
    assert!(came.iter().all(|number| u64::from(*number) < taken || *number >= 300), "{came:?}");
    let (peer, expired) = stalled.peer();
    assert_eq!((peer.uplink.account.delivered, peer.uplink.queued, expired), (taken + 10, 0, waiting));
}

#[test]
fn what_waits_behind_what_expires_takes_its_place() {
    let mut stalled = Stalled::new(1411);
    // As much as may wait before quinn-proto, and more, which waits in the queue; that does not become empty.
    for part in 0..20 {
        stalled.answer(100 * part..100 * part + 100);
        stalled.run(1);
    }
    stalled.run(5);
    assert!(stalled.in_queue() >= 200, "{} wait in the queue", stalled.in_queue());
    for number in 2000..2300 {
        stalled.answer(number..number + 1);
        stalled.run(1);
    }
    stalled.set_blocked(false);
    for number in 2300..4300 {
        stalled.answer(number..number + 1);
        stalled.run(1);
    }
    stalled.run(200);
    let came = stalled.came();
    assert!(came.is_sorted() && came.ends_with(&Vec::from_iter(3300..4300)), "{came:?}");
    assert_eq!(stalled.peer().0.uplink.queued, 0);
}

#[test]
fn pieces_for_a_peer_without_lanes_have_the_age_of_their_datagram() {
    let mut stalled = Stalled::new(1412);
    stalled.answer(0..300);
    stalled.run(160);
    let (before, expired) = stalled.peer();
    // quinn-proto has no room.
    let held = before.uplink.queued;

    let number = stalled.flood.malicious.flow(0);
    let cutting = Context::Piece { number, datagram: 0, total: 3000, offset: 0, payload_at: 0 };
    let exit = stalled.flood.pair.exit;
    let account = &mut stalled.flood.pair.world.agent(exit).workers[0].peers_mut()[1].data.relay.uplink;
    account.receive(1, 3000);
    account.handed_over += 1;
    stalled.flood.pair.hand_over(exit, 30 * MS, |outgoing| {
        let lane = LaneRef { peer: PeerId(1), lane: 0 };
        let header = CountedHeader { header: cutting.encode(), counted: 1 };
        let datagram = Segments { data: &[1; 3000], segment: 3000 };
        outgoing.payloads(0, lane, header, datagram, Sending { tos: 0, age: 60 * MS, repair: None });
    });
    stalled.run(5);
    let (peer, still) = stalled.peer();
    assert_eq!((peer.uplink.queued, still), (held + 1, expired), "it waits, and is 95 ms old");
    stalled.run(60);
    let (peer, after) = stalled.peer();
    assert_eq!((peer.uplink.queued, after), (held, expired + 1));
}

/// A peer without lanes that sends what it likes.
fn standard(seed: u64) -> GateFlood {
    let mut flood = GateFlood::new(seed, "");
    flood.malicious.say(&MaliciousPeer::hello_with_lanes(0));
    flood.run(50);
    let opening = [&flood.open(0, ECHO)[..], b"opens"].concat();
    flood.malicious.send_plain(&opening);
    flood.run(50);
    flood
}

/// Sends so many datagrams of the first flow, as fast as the connection lets them go.
fn flooding(flood: &mut GateFlood, datagrams: usize) {
    let number = flood.malicious.flow(0);
    let header = Context::Flow { number, payload_at: 0 }.encode();
    let data = [header.as_slice(), &[7; 1000]].concat();
    for _ in 0..datagrams.div_ceil(200) {
        for _ in 0..200 {
            flood.malicious.send_plain(&data);
        }
        flood.pair.world.run(MS);
        flood.malicious.poll(flood.pair.world.clock.now());
    }
    for _ in 0..3000 {
        flood.pair.world.run(MS);
        flood.malicious.poll(flood.pair.world.clock.now());
    }
}

const FRAMES_CAME: &str = "culvert_control_datagram_frames_total{direction=\"downlink\"}";
const FRAMES_SENT: &str = "culvert_control_datagram_frames_total{direction=\"uplink\"}";

#[test]
fn every_frame_that_comes_to_a_slow_agent_is_received_or_dropped() {
    let mut flood = standard(1413);
    let exit = flood.pair.exit;
    flood.pair.world.slow_down(exit, 40 * MS);
    flooding(&mut flood, 8000);
    let came = flood.metric(FRAMES_CAME);
    let downlink = flood.pair.world.peers(exit).swap_remove(1).downlink;
    assert!(came > 900, "{came} frames came");
    assert_eq!(downlink.account.received, came, "{downlink:?}");
    assert!(downlink.balances && downlink.queued == 0, "{downlink:?}");
}

#[test]
fn frames_for_which_quinn_has_no_room_are_counted() {
    let mut flood = GateFlood::new(1414, "");
    // Nobody takes them before the hello.
    flooding(&mut flood, 2000);
    flood.malicious.say(&MaliciousPeer::hello_with_lanes(0));
    flood.run(100);
    let came = flood.metric(FRAMES_CAME);
    let exit = flood.pair.exit;
    let downlink = flood.pair.world.peers(exit).swap_remove(1).downlink;
    assert_eq!(downlink.account.received, came, "{downlink:?}");
    let overflow = downlink.account.dropped[DropReason::PlainOverflow];
    let unknown = downlink.account.dropped[DropReason::UnknownFlow];
    assert_eq!((overflow + unknown, overflow > 0, unknown > 900), (came, true, true), "{downlink:?}");
    assert_eq!(flood.dropped("plain_overflow"), overflow);
}

#[test]
fn frames_that_quinn_holds_when_the_connection_ends_are_dropped() {
    let mut stalled = Stalled::new(1415);
    stalled.answer(0..300);
    stalled.run(160);
    let (peer, expired) = stalled.peer();
    let taken = peer.uplink.account.delivered + peer.uplink.queued;
    assert_eq!(taken + expired, 300);
    // Until both ends have given it up for idle.
    stalled.run(65_000);
    let exit = stalled.flood.pair.exit;
    let peer = stalled.flood.pair.world.peers(exit).swap_remove(1);
    assert!(!peer.connected() && peer.uplink.balances, "{peer:?}");
    let account = peer.uplink.account;
    let closed = account.dropped[DropReason::LaneClosed];
    assert_eq!((account.delivered + closed, peer.uplink.queued), (taken, 0), "{account:?}");
    assert!(closed > 50, "{closed} were never sent");
    // One more said that the flow was opened.
    assert_eq!(stalled.flood.metric(FRAMES_SENT), account.delivered + 1);
}

//! Peers that ask for more than a worker takes, beside one that asks for little: through the same socket, on lanes and in standard mode.

use std::{net::SocketAddr, time::Duration};

use base::{
    clock::Clock,
    ids::{LaneRef, PeerId},
};
use net::batch::Meta;
use wire::context::Context;

use crate::{
    EXIT, INGRESS,
    flood::{ECHO, GateFlood, ROGUE},
    malicious::MaliciousPeer,
    number_of, numbered,
};

/// Between two turns of an exit that is slow.
const TURN: Duration = Duration::from_millis(4);

const PATH_CHALLENGE: u8 = 0x1a;

impl GateFlood {
    /// Milliseconds in which the malicious peer sends what `send` sends, and the innocent a datagram each: how many of the innocent's are echoed.
    fn beside(&mut self, milliseconds: u32, mut send: impl FnMut(&mut Self, u32)) -> usize {
        let mut client = self.pair.client(9_300);
        client.send(INGRESS, &numbered(0));
        self.run(50);
        drop(client.receive());
        let mut echoed = 0;
        for number in 0..milliseconds {
            client.send(INGRESS, &numbered(number));
            send(self, number);
            self.run(1);
            echoed +=
                client.receive().iter().filter(|(_, payload)| number_of(payload) <= milliseconds).count();
        }
        self.run(100);
        echoed + client.receive().len()
    }

    fn slow_exit(&mut self) {
        let exit = self.pair.exit;
        self.pair.world.slow_down(exit, TURN);
    }

    /// The malicious peer is in standard mode.
    fn plain(seed: u64) -> Self {
        let mut flood = Self::new(seed, "");
        flood.malicious.say(&MaliciousPeer::hello_with_lanes(0));
        flood.run(100);
        flood
    }

    fn assert_no_turn_was_too_long(&mut self) {
        let exit = self.pair.exit;
        assert_eq!(self.pair.world.excess(exit), None);
    }
}

#[test]
fn openings_without_end_on_lanes_leave_the_datagrams_of_another_without_loss() {
    let mut flood = GateFlood::with_lane(2_401, "");
    flood.slow_exit();
    let mut flow = 0;
    let flooding = |flood: &mut GateFlood, _| {
        for _ in 0..16 {
            let mut frames = Vec::new();
            for _ in 0..120 {
                let number = flood.malicious.flow(flow);
                flow += 1;
                let opening = Context::OpenEmpty { number, service: ECHO, client: None }.encode();
                frames.extend([0x31, opening.as_slice().len() as u8]);
                frames.extend(opening.as_slice());
            }
            flood.malicious.send_frame(&frames, flood.pair.world.clock.now());
        }
    };
    assert_eq!(flood.beside(500, flooding), 500);
    assert!(flood.metric("culvert_limit_reached_total{limit=\"flow_rate\"}") > 100_000);
    flood.assert_no_turn_was_too_long();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn openings_and_ends_without_end_in_standard_mode_harm_nobody_else() {
    let mut flood = GateFlood::plain(2_402);
    let mut flow = 0;
    let flooding = |flood: &mut GateFlood, _| {
        for _ in 0..100 {
            let number = flood.malicious.flow(flow);
            flow += 1;
            for context in
                [Context::OpenEmpty { number, service: ECHO, client: None }, Context::Closed(number)]
            {
                let content = context.encode().as_slice().to_vec();
                flood.malicious.send_plain(&content);
            }
        }
    };
    assert_eq!(flood.beside(500, flooding), 500);
    assert_eq!(flood.malicious.closed(), None);
    flood.run(200);
    assert!(flood.pair.world.peers(flood.pair.exit)[1].flows < 100, "its flows are closed");
    flood.assert_no_turn_was_too_long();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn work_without_end_in_standard_mode_leaves_the_datagrams_of_another_without_loss() {
    let mut flood = GateFlood::plain(2_405);
    for flow in 0..64 {
        let opening = flood.open(flow, ECHO);
        flood.malicious.send_plain(&opening);
    }
    flood.run(50);
    flood.slow_exit();
    // Payloads for as many sockets as there are flows: each is a delivery of its own.
    let flooding = |flood: &mut GateFlood, round: u32| {
        for place in 0..1_200 {
            let number = flood.malicious.flow(u64::from(round + place) % 64);
            let payload = [Context::Flow { number, payload_at: 0 }.encode().as_slice(), &[0]].concat();
            flood.malicious.send_plain(&payload);
        }
    };
    assert_eq!(flood.beside(500, flooding), 500);
    assert!(flood.metric("culvert_refused_datagrams_total{reason=\"unopened\"}") > 0);
    flood.assert_no_turn_was_too_long();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn what_another_worker_hands_over_of_one_peer_holds_up_nothing_of_the_others() {
    let mut flood = GateFlood::plain(2_406);
    for flow in 0..64 {
        let opening = flood.open(flow, ECHO);
        flood.malicious.send_plain(&opening);
    }
    flood.run(50);
    flood.slow_exit();
    let (entry, exit) = (flood.pair.entry, flood.pair.exit);
    let mut client = flood.pair.client(9_300);
    client.send(INGRESS, &numbered(1_000));
    flood.run(50);
    drop(client.receive());
    let of_client =
        flood.pair.world.agent(entry).workers[0].peers()[0].data.relay.flows.iter().next().unwrap().2.number;
    let frame = |number, payload: &[u8]| {
        [Context::Flow { number, payload_at: 0 }.encode().as_slice(), payload].concat()
    };
    let (mut echoed, mut late) = (0, [0; 2]);
    for round in 0..500 {
        let beside_rogue = usize::from(round >= 100);
        let most = 2_000 * beside_rogue as u64;
        let of_rogue: Vec<_> = (0..most).map(|place| frame(flood.malicious.flow(place % 64), &[0])).collect();
        flood.pair.hand_over(exit, Duration::ZERO, |outgoing| {
            // As a worker that has the lanes of both.
            for frame in &of_rogue {
                outgoing.frame(0, LaneRef { peer: PeerId(1), lane: 0 }, Some(1), Meta::EMPTY, frame);
            }
            let frame = frame(of_client, &numbered(round));
            let payload = Some(numbered(round).len());
            outgoing.frame(0, LaneRef { peer: PeerId(0), lane: 0 }, payload, Meta::EMPTY, &frame);
        });
        flood.run(1);
        for (_, payload) in client.receive() {
            echoed += 1;
            late[beside_rogue] = late[beside_rogue].max(round - number_of(&payload));
        }
    }
    flood.run(100);
    assert_eq!(echoed + client.receive().len(), 500);
    assert!(
        late[1] <= late[0] + 4,
        "an answer came after {late:?} ms: beside the rogue a turn later at most"
    );
    assert!(flood.dropped("hand_over_full") > 100_000, "the rogue's do not fit");
    flood.assert_no_turn_was_too_long();
}

#[test]
fn first_pieces_without_end_in_standard_mode_are_bounded_and_harm_nobody_else() {
    let mut flood = GateFlood::plain(2_403);
    let opening = flood.open(0, ECHO);
    flood.malicious.send_plain(&opening);
    flood.run(50);
    let number = flood.malicious.flow(0);
    let flooding = |flood: &mut GateFlood, datagram: u32| {
        let piece = Context::Piece { number, datagram, total: 60_000, offset: 0, payload_at: 0 };
        let content = [piece.encode().as_slice(), &[0; 1_024]].concat();
        flood.malicious.send_plain(&content);
    };
    assert_eq!(flood.beside(500, flooding), 500);
    flood.assert_no_turn_was_too_long();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn challenges_from_many_ports_move_no_lane_and_are_answered_within_limits() {
    let mut flood = GateFlood::with_lane(2_404, "");
    let exit = SocketAddr::new(EXIT, 4433);
    let mut ports =
        Vec::from_iter((0..64).map(|port| flood.host.udp(SocketAddr::new(ROGUE, 41_000 + port), None)));
    let mut sent = vec![0; ports.len()];
    let flooding = |flood: &mut GateFlood, round: u32| {
        for (place, port) in ports.iter_mut().enumerate() {
            let mut challenge = vec![PATH_CHALLENGE];
            challenge.extend(u64::from(round).to_be_bytes());
            let packet = flood.malicious.seal(&challenge, flood.pair.world.clock.now());
            sent[place] += packet.len();
            port.send(exit, &packet);
        }
    };
    assert_eq!(flood.beside(300, flooding), 300);
    for (port, sent) in ports.iter_mut().zip(sent) {
        let got: usize = port.receive().iter().map(|(_, packet)| packet.len()).sum();
        assert!(got <= 3 * sent, "{got} bytes for {sent}");
    }
    flood.assert_no_turn_was_too_long();
    flood.assert_innocent_is_unharmed();
}

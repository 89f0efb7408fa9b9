//! A peer that holds an allowed key and asks for as much work as its bytes can ask for. No turn does more than any turn may, whatever it
//! sends; what it holds of it is bounded and given back; and an innocent peer's datagram comes out a few turns later.

use std::{cell::Cell, time::Duration};

use base::clock::Clock;
use dataplane::datapath::work::{MOST_PER_TURN, PER_TURN};
use engine::{
    control::{MOST_WAITING_BYTES, driver::UNITS_PER_TURN},
    worker::TurnWork,
};
use gate::identity::Identity;
use wire::{
    context::{Context, FlowNumber},
    messages::{CloseReason, Hello, Message, Service, StreamOpen},
};

use crate::{
    INGRESS,
    flood::{ECHO, GateFlood, Log, ROGUE, dial, peer_table},
    malicious::MaliciousPeer,
    numbered,
};

/// A message of a kind that nobody knows: field 100 of the envelope, empty.
const UNKNOWN: [u8; 4] = [3, 0xa2, 0x06, 0];

/// The openings that a packet of 1,150 bytes holds, at the most.
const OPENINGS_OF_A_PACKET: u64 = 230;

/// A frame of a DATAGRAM with its length (RFC 9221 §4).
const DATAGRAM_WITH_LENGTH: u8 = 0x31;

fn service(name: &str) -> Service {
    let idle = Duration::from_secs(60);
    Service {
        number: 0,
        name: name.to_owned(),
        udp: true,
        tcp: false,
        idle,
        fragment: false,
        repair: None,
        client: false,
    }
}

impl GateFlood {
    fn work(&mut self) -> TurnWork {
        self.pair.world.agent(self.pair.exit).most_work()
    }

    /// No turn of the exit did more than any may, and what its events took is given back.
    fn assert_bounded(&mut self) {
        let exit = self.pair.exit;
        assert_eq!(self.pair.world.excess(exit), None);
        let worker = &self.pair.world.agent(exit).workers[0];
        assert!(worker.events_capacity() <= 256, "{} events are kept", worker.events_capacity());
    }

    /// Packets of the malicious peer's lane that hold these contents of DATAGRAM frames, as many in each as fit.
    pub(super) fn packets(&mut self, contents: impl Iterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
        let now = self.pair.world.clock.now();
        let (mut packets, mut frames) = (Vec::new(), Vec::new());
        for content in contents {
            if frames.len() + content.len() + 2 > 1_150 {
                // PADDING: packets of one length are joined when they come.
                frames.resize(1_150, 0);
                packets.push(self.malicious.seal(&std::mem::take(&mut frames), now));
            }
            frames.extend([DATAGRAM_WITH_LENGTH, u8::try_from(content.len()).unwrap()]);
            frames.extend(content);
        }
        frames.resize(1_150, 0);
        packets.push(self.malicious.seal(&frames, now));
        packets
    }

    fn message(&self, flow: u64, message: impl Fn(FlowNumber) -> Context) -> Vec<u8> {
        message(self.malicious.flow(flow)).encode().as_slice().to_vec()
    }

    pub(super) fn openings(&self, flows: std::ops::Range<u64>) -> Vec<Vec<u8>> {
        flows
            .map(|flow| {
                self.message(flow, |number| Context::OpenEmpty { number, service: ECHO, client: None })
            })
            .collect()
    }

    /// The malicious peer's packets come to the exit at once, and right behind them a datagram of the innocent's: after how many turns of the exit it is
    /// with the service, and what has come there then.
    fn turns_behind(&mut self, packets: &[Vec<u8>]) -> (u32, Vec<Vec<u8>>) {
        const TURN: Duration = Duration::from_micros(500);
        let exit = self.pair.exit;
        // All of it in one batch.
        self.pair.world.fabric.set_gro(true);
        let mut client = self.pair.client(9_100);
        client.send(INGRESS, &numbered(1));
        self.run(50);
        self.pair.world.run(Duration::from_millis(1));
        drop(self.pair.echo.receive());
        let delivered = |flood: &Self| flood.pair.world.books(exit)[0].peers[0].downlink.account.delivered;
        let before = delivered(self);
        self.malicious.send_packets(packets);
        client.send(INGRESS, &numbered(2));
        // All of it is there when the first turn begins.
        self.pair.world.slow_down(exit, Duration::from_millis(20));
        self.pair.world.run(Duration::from_millis(20));
        self.pair.world.slow_down(exit, TURN);
        let mut turns = 0;
        while delivered(self) == before {
            turns += 1;
            assert!(turns < 10_000, "it is never delivered");
            self.pair.world.run(TURN);
        }
        self.pair.world.run(Duration::from_millis(20));
        let arrived = self.pair.echo.receive().into_iter().map(|(_, payload)| payload);
        (turns, arrived.collect())
    }
}

#[test]
fn messages_behind_a_gap_are_bounded_and_then_the_connection_ends() {
    let mut flood = GateFlood::greedy(2_300, "");
    flood.malicious.write(&UNKNOWN.repeat(2_000_000));
    let first = Cell::new(true);
    flood.pair.world.weather.borrow_mut().block =
        Box::new(move |from, _| from.ip() == ROGUE && first.replace(false));
    flood.run(3_000);
    assert_eq!(flood.malicious.closed(), Some(CloseReason::LimitReached));
    // The window of the connection lets few of them wait behind the gap; the others are taken as far as the rate goes.
    assert!(flood.message_errors("unknown_kind") <= 2_200);
    assert_eq!(flood.metric("culvert_limit_reached_total{limit=\"control_messages\"}"), 1);
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_gap_that_closes_in_time_costs_nothing() {
    let mut flood = GateFlood::greedy(2_301, "");
    // As much as may wait, less what its pieces are reckoned to take.
    flood.malicious.write(&UNKNOWN.repeat(1_000));
    let first = Cell::new(true);
    flood.pair.world.weather.borrow_mut().block =
        Box::new(move |from, _| from.ip() == ROGUE && first.replace(false));
    flood.run(3_000);
    assert_eq!(flood.malicious.closed(), None);
    assert_eq!(flood.message_errors("unknown_kind"), 1_000);
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn messages_that_wait_are_shown_and_those_of_all_peers_together_are_bounded() {
    const SHOWN: &str = "culvert_control_message_bytes{direction=\"downlink\"}";
    const REACHED: &str = "culvert_limit_reached_total{limit=\"control_bytes\"}";
    let mut flood = GateFlood::greedy(2_312, "[limits]\nstream_bytes = \"8MiB\"");
    // A message of 60,000 bytes, of a kind that nobody knows; the last of them are missing.
    let message = [&[0x80, 0, 0xea, 0x60, 0xa2, 0x06, 0xdb, 0xd4, 0x03][..], &[0; 59_995]].concat();
    flood.malicious.write(&message[..50_004]);
    flood.run(1_000);
    assert_eq!(flood.metric(SHOWN), 50_004);
    flood.malicious.write(&message[50_004..]);
    flood.run(1_000);
    assert_eq!((flood.metric(SHOWN), flood.message_errors("unknown_kind")), (0, 1));
    assert_eq!((flood.metric(REACHED), flood.malicious.closed()), (0, None));
    // Others have taken all; as much as one message is still this connection's own.
    flood.pair.world.agent(flood.pair.exit).workers[0].hold_messages(512 << 10);
    flood.malicious.write(&message);
    flood.run(1_000);
    assert_eq!((flood.message_errors("unknown_kind"), flood.malicious.closed()), (2, None));
    let first = Cell::new(true);
    flood.pair.world.weather.borrow_mut().block =
        Box::new(move |from, _| from.ip() == ROGUE && first.replace(false));
    let log = Log::default();
    log.record(|| {
        flood.malicious.write(&UNKNOWN.repeat(30_000));
        flood.run(3_000);
    });
    assert_eq!(flood.malicious.closed(), Some(CloseReason::LimitReached));
    assert_eq!((flood.metric(SHOWN), flood.metric(REACHED)), (0, 1));
    assert_eq!(log.text().matches("fill a sixteenth of limits.stream_bytes").count(), 1, "{}", log.text());
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn messages_without_end_are_taken_in_portions_until_they_are_too_many() {
    let mut flood = GateFlood::greedy(2_302, "");
    flood.run(3_000);
    flood.work();
    flood.malicious.write(&UNKNOWN.repeat(MOST_WAITING_BYTES / 8));
    flood.run(200);
    assert_eq!(flood.malicious.closed(), Some(CloseReason::LimitReached));
    let taken = flood.message_errors("unknown_kind");
    assert!((2_000..2_200).contains(&taken), "{taken} messages were taken");
    let work = flood.work();
    assert_eq!(work.message_units, u64::from(UNITS_PER_TURN), "{work:?}");
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn as_many_messages_as_a_peer_may_send_are_all_taken() {
    let mut flood = GateFlood::with_lane(2_303, "");
    flood.run(2_000);
    for _ in 0..40 {
        flood.malicious.write(&UNKNOWN.repeat(90));
        flood.run(100);
    }
    assert_eq!(flood.malicious.closed(), None);
    assert_eq!(flood.message_errors("unknown_kind"), 3_600);
    flood.assert_bounded();
}

#[test]
fn an_empty_message_closes_the_connection() {
    let mut flood = GateFlood::with_lane(2_304, "");
    flood.malicious.write(&[0]);
    flood.assert_closed(CloseReason::ProtocolViolation);
    assert_eq!(flood.message_errors("empty"), 1);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn services_to_and_fro_look_at_no_flow_of_the_peers_own() {
    let mut flood = GateFlood::with_lane(2_305, "");
    let mut flow = 0;
    while flow < 14_000 {
        let openings = flood.openings(flow..flow + 4);
        let packets = flood.packets(openings.into_iter());
        flood.malicious.send_packets(&packets);
        flow += 4;
        flood.run(1);
    }
    flood.run(50);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 14_000);
    let of_all: u64 = flood.pair.world.peers(flood.pair.exit).iter().map(|peer| peer.flows as u64).sum();
    assert_eq!(flood.metric("culvert_flow_sockets"), of_all);
    flood.work();
    let mut both = Vec::new();
    Message::ServicesChanged(vec![]).encode(&mut both);
    Message::ServicesChanged(vec![service("x")]).encode(&mut both);
    flood.malicious.write(&both.repeat(2_000));
    flood.run(100);
    let work = flood.work();
    assert_eq!(flood.malicious.closed(), Some(CloseReason::LimitReached));
    // The end of its session has its flows looked at, once.
    assert!(work.walked <= 2 * 14_100, "{work:?}");
    assert!(work.message_units < u64::from(UNITS_PER_TURN) + 16, "{work:?}");
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn openings_at_once_are_opened_within_the_rate_and_a_turn_takes_its_share_of_them() {
    let mut flood = GateFlood::with_lane(2_306, "");
    flood.run(3_000);
    let openings = flood.openings(0..16_384);
    let packets = flood.packets(openings.into_iter());
    flood.work();
    let (turns, _) = flood.turns_behind(&packets);
    let work = flood.work();
    // 5,000 openings at 64 frames each, and as many frames again as there are.
    let all = 5_000 * 64 + 16_384;
    assert!(u64::from(turns) <= 2 * (all / PER_TURN), "{turns} turns, {work:?}");
    assert!(work.opened <= PER_TURN / 64 + OPENINGS_OF_A_PACKET, "{work:?}");
    assert!(work.work <= PER_TURN + OPENINGS_OF_A_PACKET * 64, "{work:?}");
    flood.run(100);
    let flows = flood.pair.world.peers(flood.pair.exit)[1].flows;
    assert!((5_000..5_400).contains(&flows), "{flows} flows");
    assert!(flood.metric("culvert_limit_reached_total{limit=\"flow_rate\"}") > 11_000);
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn openings_with_datagrams_beyond_the_rate_are_dropped_for_that_reason_and_asked_again() {
    let mut flood = GateFlood::with_lane(2_307, "");
    flood.run(3_000);
    let openings: Vec<Vec<u8>> =
        (0..6_000).map(|flow| [&flood.open(flow, ECHO)[..], b"x"].concat()).collect();
    let packets = flood.packets(openings.into_iter());
    flood.malicious.send_packets(&packets);
    flood.run(200);
    let dropped = flood.dropped("flow_rate");
    assert!((900..=1_000).contains(&dropped), "{dropped} dropped");
    assert_eq!(flood.malicious.closed(), None);
    let last = [&flood.open(5_999, ECHO)[..], b"once more"].concat();
    flood.send(&last);
    flood.run(50);
    assert!(flood.malicious.data.iter().any(|data| data.ends_with(b"once more")), "it is opened now");
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn flows_that_are_opened_and_closed_again_and_again_are_charged_for_both() {
    let mut flood = GateFlood::with_lane(2_308, "");
    flood.run(3_000);
    let mut contents = Vec::new();
    for round in 0..40 {
        let flows = round * 100..round * 100 + 100;
        contents.extend(flood.openings(flows.clone()));
        contents.extend(flows.map(|flow| flood.message(flow, Context::Closed)));
    }
    let packets = flood.packets(contents.into_iter());
    flood.work();
    let (turns, _) = flood.turns_behind(&packets);
    let work = flood.work();
    let all = 4_000 * (64 + 16);
    assert!(u64::from(turns) <= 2 * (all / PER_TURN), "{turns} turns, {work:?}");
    assert!(work.work <= PER_TURN + OPENINGS_OF_A_PACKET * 64, "{work:?}");
    flood.run(100);
    assert_eq!(flood.pair.world.peers(flood.pair.exit)[1].flows, 0);
    assert_eq!(flood.pair.world.agent(flood.pair.exit).local_sockets(), 1, "the innocent's alone is left");
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_batch_of_small_frames_is_taken_in_more_turns_than_one_and_in_order() {
    let mut flood = GateFlood::with_lane(2_309, "");
    let opening = [&flood.open(0, ECHO)[..], b"opens"].concat();
    flood.send(&opening);
    flood.run(50);
    flood.malicious.data.clear();
    let header = flood.message(0, |number| Context::Flow { number, payload_at: 0 });
    let contents: Vec<Vec<u8>> = (0..40_000_u32).map(|n| [&header[..], &n.to_be_bytes()].concat()).collect();
    let packets = flood.packets(contents.into_iter());
    flood.work();
    let (turns, arrived) = flood.turns_behind(&packets);
    assert!((1..=4).contains(&turns), "{turns} turns");
    let numbers = arrived.iter().filter(|payload| payload.len() == 4);
    assert!(numbers.is_sorted(), "nothing overtakes what was laid aside");
    let work = flood.work();
    assert!(work.frames <= PER_TURN + 600, "{work:?}");
    assert!(work.work < MOST_PER_TURN);
    let account = flood.pair.world.peers(flood.pair.exit)[1].downlink;
    assert_eq!(account.account.received - 1, 40_000 - flood.malicious.drops(), "{account:?}");
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn streams_beyond_a_turns_share_and_beyond_the_rate_wait_where_they_are() {
    let mut flood = GateFlood::with_lane(2_310, "[limits]\ntcp_streams_per_peer = 3000");
    let mut listener = flood.pair.services.tcp_listen(crate::UPSTREAM);
    let mut header = Vec::new();
    StreamOpen { service: 0, client: None }.encode(&mut header);
    flood.work();
    let (mut opened, mut reset) = (Vec::new(), 0);
    // As many as it may have at a time, each given up at once and followed by another.
    for _ in 0..1_000 {
        while let Some(stream) = flood.malicious.open_stream(&header) {
            opened.push(stream);
        }
        flood.run(1);
        for stream in opened.drain(..) {
            flood.malicious.reset_stream(stream);
            reset += 1;
        }
        let token = flood.pair.services.token();
        while listener.accept(token).is_ok() {}
    }
    let work = flood.work();
    assert!(reset > 0 && work.opened <= 64, "{reset} streams, {work:?}");
    let taken = flood.metric("culvert_tcp_streams_opened_total");
    assert!(taken <= 3_000 + 2_000 + 100, "{taken} of {reset} streams were taken in a second");
    assert_eq!(flood.malicious.closed(), None);
    flood.assert_bounded();
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_peer_that_connects_again_and_again_writes_a_line_of_each_kind() {
    let identity = Identity::generate().unwrap();
    let forward =
        |n| format!("[[udp]]\nlisten = \"0.0.0.0:{}\"\npeer = \"rogue\"\nservice = \"s{n}\"\n", 6_000 + n);
    let forwards: String = (0..20).map(forward).collect();
    let exit_extra = format!("{}\n{forwards}", peer_table("rogue", &identity));
    let mut pair = crate::Pair::with_workers(2_311, (1, 1), "", &exit_extra);
    pair.wait_for_lanes(1);
    let mut host = pair.world.host(&[ROGUE]);
    let log = Log::default();
    let mut sessions = 0;
    log.record(|| {
        for place in 0..50_u16 {
            let mut malicious = dial(&pair, &mut host, &identity, place, None);
            let offered = if place % 2 == 0 { vec![] } else { vec![service("other")] };
            if let Message::Hello(hello) = MaliciousPeer::hello() {
                malicious.say(&Message::Hello(Hello { services: offered, ..hello }));
            }
            for _ in 0..100 {
                pair.run_served(Duration::from_millis(1));
                malicious.poll(pair.world.clock.now());
            }
            sessions += u32::from(malicious.connected);
        }
    });
    let text = log.text();
    assert!(sessions >= 45, "{sessions} sessions");
    let missing = text.lines().filter(|line| line.contains("does not offer"));
    assert_eq!(missing.clone().count(), 1, "{text}");
    assert!(
        missing.clone().all(|line| line.contains("missing=20") && line.contains("s0 (udp 0.0.0.0:6000)"))
    );
    let connected = text.lines().filter(|line| line.contains(" connected")).count();
    assert!(connected <= 6, "one a second: {text}");
    let others = text.lines().filter(|line| !line.contains("does not offer") && !line.contains(" connected"));
    let mut kinds: Vec<&str> =
        others.filter_map(|line| line.split_once(": ").map(|(_, said)| said)).collect();
    let lines = kinds.len();
    kinds.sort_unstable();
    kinds.dedup_by_key(|said| said.split('=').next().map(str::to_owned));
    assert_eq!(kinds.len(), lines, "{text}");
}

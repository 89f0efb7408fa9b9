//! A peer that holds an allowed key and asks for as much work as its bytes can ask for. No turn does more than any turn may, whatever it
//! sends; what it holds of it is bounded and given back; and an innocent peer's datagram comes out a few turns later.

use std::{cell::Cell, time::Duration};

use gate::identity::Identity;
use wire::{
    clock::Clock,
    context::{Context, FlowNumber},
    messages::{CloseReason, Hello, Message, Service, StreamOpen},
};

use crate::{
    control::{MOST_WAITING_BYTES, driver::UNITS_PER_TURN},
    datapath::work::{MOST_PER_TURN, PER_TURN},
    worker::{
        TurnWork,
        tests::{
            INGRESS, numbered,
            rogue::Rogue,
            siege::{ECHO, Log, ROGUE, Siege, dial, peer_table},
        },
    },
};

/// A message of a kind that nobody knows: field 15 of the envelope, empty.
const UNKNOWN: [u8; 3] = [2, 0x7a, 0];

/// The openings that a packet of 1,150 bytes holds, at the most.
const OPENINGS_OF_A_PACKET: u64 = 230;

/// A frame of a DATAGRAM with its length (RFC 9221 §4).
const DATAGRAM_WITH_LENGTH: u8 = 0x31;

fn service(name: &str) -> Service {
    let idle = Duration::from_secs(60);
    Service { number: 0, name: name.to_owned(), udp: true, tcp: false, idle, fragment: false }
}

impl Siege {
    fn work(&mut self) -> TurnWork {
        self.pair.world.agent(self.pair.exit).most_work()
    }

    /// No turn of the exit did more than any may, and what its events took is given back.
    fn assert_bounded(&mut self) {
        let exit = self.pair.exit;
        assert_eq!(self.pair.world.excess(exit), None);
        let worker = &self.pair.world.agent(exit).workers[0];
        assert!(
            worker.sessions.events.capacity() <= 256,
            "{} events are kept",
            worker.sessions.events.capacity()
        );
    }

    /// Packets of the rogue's lane that hold these contents of DATAGRAM frames, as many in each as fit.
    fn packets(&mut self, contents: impl Iterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
        let now = self.pair.world.clock.now();
        let (mut packets, mut frames) = (Vec::new(), Vec::new());
        for content in contents {
            if frames.len() + content.len() + 2 > 1_150 {
                // PADDING: packets of one length are joined when they come.
                frames.resize(1_150, 0);
                packets.push(self.rogue.seal(&std::mem::take(&mut frames), now));
            }
            frames.extend([DATAGRAM_WITH_LENGTH, u8::try_from(content.len()).unwrap()]);
            frames.extend(content);
        }
        frames.resize(1_150, 0);
        packets.push(self.rogue.seal(&frames, now));
        packets
    }

    fn message(&self, flow: u64, message: impl Fn(FlowNumber) -> Context) -> Vec<u8> {
        message(self.rogue.flow(flow)).encode().as_slice().to_vec()
    }

    fn openings(&self, flows: std::ops::Range<u64>) -> Vec<Vec<u8>> {
        flows.map(|flow| self.message(flow, |number| Context::OpenEmpty { number, service: ECHO })).collect()
    }

    /// The rogue's packets come to the exit at once, and right behind them a datagram of the innocent's: after how many turns of the exit it is
    /// with the service, and what has come there then.
    fn turns_behind(&mut self, packets: &[Vec<u8>]) -> (u32, Vec<Vec<u8>>) {
        const TURN: Duration = Duration::from_micros(500);
        let exit = self.pair.exit;
        // All of it in one batch.
        self.pair.world.set_gro(true);
        let mut client = self.pair.client(9_100);
        client.send(INGRESS, &numbered(1));
        self.run(50);
        self.pair.world.run(Duration::from_millis(1));
        drop(self.pair.echo.receive());
        let delivered = |siege: &Self| siege.pair.world.books(exit)[0].peers[0].downlink.account.delivered;
        let before = delivered(self);
        self.rogue.send_packets(packets);
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
    let mut siege = Siege::greedy(2_300, "");
    siege.rogue.write(&UNKNOWN.repeat(2_000_000));
    let first = Cell::new(true);
    siege.pair.world.weather.borrow_mut().block =
        Box::new(move |from, _| from.ip() == ROGUE && first.replace(false));
    siege.run(3_000);
    assert_eq!(siege.rogue.closed(), Some(CloseReason::LimitReached));
    // The window of the connection lets few of them wait behind the gap; the others are taken as far as the rate goes.
    assert!(siege.message_errors("unknown_kind") <= 2_200);
    assert_eq!(siege.metric("culvert_limit_reached_total{limit=\"control_messages\"}"), 1);
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn a_gap_that_closes_in_time_costs_nothing() {
    let mut siege = Siege::greedy(2_301, "");
    // As much as may wait, less what its pieces are reckoned to take.
    siege.rogue.write(&UNKNOWN.repeat(1_000));
    let first = Cell::new(true);
    siege.pair.world.weather.borrow_mut().block =
        Box::new(move |from, _| from.ip() == ROGUE && first.replace(false));
    siege.run(3_000);
    assert_eq!(siege.rogue.closed(), None);
    assert_eq!(siege.message_errors("unknown_kind"), 1_000);
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn messages_without_end_are_taken_in_portions_until_they_are_too_many() {
    let mut siege = Siege::greedy(2_302, "");
    siege.run(3_000);
    siege.work();
    siege.rogue.write(&UNKNOWN.repeat(MOST_WAITING_BYTES / 6));
    siege.run(200);
    assert_eq!(siege.rogue.closed(), Some(CloseReason::LimitReached));
    let taken = siege.message_errors("unknown_kind");
    assert!((2_000..2_200).contains(&taken), "{taken} messages were taken");
    let work = siege.work();
    assert_eq!(work.message_units, u64::from(UNITS_PER_TURN), "{work:?}");
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn as_many_messages_as_a_peer_may_send_are_all_taken() {
    let mut siege = Siege::with_lane(2_303, "");
    siege.run(2_000);
    for _ in 0..40 {
        siege.rogue.write(&UNKNOWN.repeat(90));
        siege.run(100);
    }
    assert_eq!(siege.rogue.closed(), None);
    assert_eq!(siege.message_errors("unknown_kind"), 3_600);
    siege.assert_bounded();
}

#[test]
fn an_empty_message_closes_the_connection() {
    let mut siege = Siege::with_lane(2_304, "");
    siege.rogue.write(&[0]);
    siege.assert_closed(CloseReason::ProtocolViolation);
    assert_eq!(siege.message_errors("empty"), 1);
    siege.assert_innocent_is_unharmed();
}

#[test]
fn services_to_and_fro_look_at_no_flow_of_the_peers_own() {
    let mut siege = Siege::with_lane(2_305, "");
    let mut flow = 0;
    while flow < 14_000 {
        let openings = siege.openings(flow..flow + 4);
        let packets = siege.packets(openings.into_iter());
        siege.rogue.send_packets(&packets);
        flow += 4;
        siege.run(1);
    }
    siege.run(50);
    assert_eq!(siege.pair.world.peers(siege.pair.exit)[1].flows, 14_000);
    siege.work();
    let mut both = Vec::new();
    Message::ServicesChanged(vec![]).encode(&mut both);
    Message::ServicesChanged(vec![service("x")]).encode(&mut both);
    siege.rogue.write(&both.repeat(2_000));
    siege.run(100);
    let work = siege.work();
    assert_eq!(siege.rogue.closed(), Some(CloseReason::LimitReached));
    // The end of its session has its flows looked at, once.
    assert!(work.walked <= 2 * 14_100, "{work:?}");
    assert!(work.message_units < u64::from(UNITS_PER_TURN) + 16, "{work:?}");
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn openings_at_once_are_opened_within_the_rate_and_a_turn_takes_its_share_of_them() {
    let mut siege = Siege::with_lane(2_306, "");
    siege.run(3_000);
    let openings = siege.openings(0..16_384);
    let packets = siege.packets(openings.into_iter());
    siege.work();
    let (turns, _) = siege.turns_behind(&packets);
    let work = siege.work();
    // 5,000 openings at 64 frames each, and as many frames again as there are.
    let all = 5_000 * 64 + 16_384;
    assert!(u64::from(turns) <= 2 * (all / PER_TURN), "{turns} turns, {work:?}");
    assert!(work.opened <= PER_TURN / 64 + OPENINGS_OF_A_PACKET, "{work:?}");
    assert!(work.work <= PER_TURN + OPENINGS_OF_A_PACKET * 64, "{work:?}");
    siege.run(100);
    let flows = siege.pair.world.peers(siege.pair.exit)[1].flows;
    assert!((5_000..5_400).contains(&flows), "{flows} flows");
    assert!(siege.metric("culvert_limit_reached_total{limit=\"flow_rate\"}") > 11_000);
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn openings_with_datagrams_beyond_the_rate_are_dropped_for_that_reason_and_asked_again() {
    let mut siege = Siege::with_lane(2_307, "");
    siege.run(3_000);
    let openings: Vec<Vec<u8>> =
        (0..6_000).map(|flow| [&siege.open(flow, ECHO)[..], b"x"].concat()).collect();
    let packets = siege.packets(openings.into_iter());
    siege.rogue.send_packets(&packets);
    siege.run(200);
    let dropped = siege.dropped("flow_rate");
    assert!((900..=1_000).contains(&dropped), "{dropped} dropped");
    assert_eq!(siege.rogue.closed(), None);
    let last = [&siege.open(5_999, ECHO)[..], b"once more"].concat();
    siege.send(&last);
    siege.run(50);
    assert!(siege.rogue.data.iter().any(|data| data.ends_with(b"once more")), "it is opened now");
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn flows_that_are_opened_and_closed_again_and_again_are_charged_for_both() {
    let mut siege = Siege::with_lane(2_308, "");
    siege.run(3_000);
    let mut contents = Vec::new();
    for round in 0..40 {
        let flows = round * 100..round * 100 + 100;
        contents.extend(siege.openings(flows.clone()));
        contents.extend(flows.map(|flow| siege.message(flow, Context::Closed)));
    }
    let packets = siege.packets(contents.into_iter());
    siege.work();
    let (turns, _) = siege.turns_behind(&packets);
    let work = siege.work();
    let all = 4_000 * (64 + 16);
    assert!(u64::from(turns) <= 2 * (all / PER_TURN), "{turns} turns, {work:?}");
    assert!(work.work <= PER_TURN + OPENINGS_OF_A_PACKET * 64, "{work:?}");
    siege.run(100);
    assert_eq!(siege.pair.world.peers(siege.pair.exit)[1].flows, 0);
    assert_eq!(siege.pair.world.agent(siege.pair.exit).local_sockets(), 1, "the innocent's alone is left");
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn a_batch_of_small_frames_is_taken_in_more_turns_than_one_and_in_order() {
    let mut siege = Siege::with_lane(2_309, "");
    let opening = [&siege.open(0, ECHO)[..], b"opens"].concat();
    siege.send(&opening);
    siege.run(50);
    siege.rogue.data.clear();
    let header = siege.message(0, |number| Context::Flow { number, payload_at: 0 });
    let contents: Vec<Vec<u8>> = (0..40_000_u32).map(|n| [&header[..], &n.to_be_bytes()].concat()).collect();
    let packets = siege.packets(contents.into_iter());
    siege.work();
    let (turns, arrived) = siege.turns_behind(&packets);
    assert!((1..=4).contains(&turns), "{turns} turns");
    let numbers = arrived.iter().filter(|payload| payload.len() == 4);
    assert!(numbers.is_sorted(), "nothing overtakes what was laid aside");
    let work = siege.work();
    assert!(work.frames <= PER_TURN + 600, "{work:?}");
    assert!(work.work < MOST_PER_TURN);
    let account = siege.pair.world.peers(siege.pair.exit)[1].downlink;
    assert_eq!(account.account.received - 1, 40_000 - siege.rogue.drops(), "{account:?}");
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn streams_beyond_a_turns_share_and_beyond_the_rate_wait_where_they_are() {
    let mut siege = Siege::with_lane(2_310, "[limits]\ntcp_streams_per_peer = 3000");
    let mut listener = siege.pair.services.tcp_listen(crate::worker::tests::UPSTREAM);
    let mut header = Vec::new();
    StreamOpen { service: 0 }.encode(&mut header);
    siege.work();
    let (mut opened, mut reset) = (Vec::new(), 0);
    // As many as it may have at a time, each given up at once and followed by another.
    for _ in 0..1_000 {
        while let Some(stream) = siege.rogue.open_stream(&header) {
            opened.push(stream);
        }
        siege.run(1);
        for stream in opened.drain(..) {
            siege.rogue.reset_stream(stream);
            reset += 1;
        }
        let token = siege.pair.services.token();
        while listener.accept(token).is_ok() {}
    }
    let work = siege.work();
    assert!(reset > 0 && work.opened <= 64, "{reset} streams, {work:?}");
    let taken = siege.metric("culvert_tcp_streams_opened_total");
    assert!(taken <= 3_000 + 2_000 + 100, "{taken} of {reset} streams were taken in a second");
    assert_eq!(siege.rogue.closed(), None);
    siege.assert_bounded();
    siege.assert_innocent_is_unharmed();
}

#[test]
fn a_peer_that_connects_again_and_again_writes_a_line_of_each_kind() {
    let identity = Identity::generate().unwrap();
    let forward =
        |n| format!("[[udp]]\nlisten = \"0.0.0.0:{}\"\npeer = \"rogue\"\nservice = \"s{n}\"\n", 6_000 + n);
    let forwards: String = (0..20).map(forward).collect();
    let exit_extra = format!("{}\n{forwards}", peer_table("rogue", &identity));
    let mut pair = crate::worker::tests::Pair::with_workers(2_311, (1, 1), "", &exit_extra);
    pair.wait_for_lanes(1);
    let mut host = pair.world.host(&[ROGUE]);
    let log = Log::default();
    let mut sessions = 0;
    log.record(|| {
        for place in 0..50_u16 {
            let mut rogue = dial(&pair, &mut host, &identity, place, None);
            let offered = if place % 2 == 0 { vec![] } else { vec![service("other")] };
            if let Message::Hello(hello) = Rogue::hello() {
                rogue.say(&Message::Hello(Hello { services: offered, ..hello }));
            }
            for _ in 0..100 {
                pair.run_served(Duration::from_millis(1));
                rogue.poll(pair.world.clock.now());
            }
            sessions += u32::from(rogue.connected);
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

//! A peer whose numbers, repair symbols and requests are made to do harm: memory, answers and the work for others stay bounded.

use std::{cell::RefCell, net::SocketAddr, time::Duration};

use ip::model::Recipe;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use repair::Ask;
use wire::{
    context::{Context, ServiceNumber},
    messages::{Features, Message},
    repair_terms::{Deadline, Mode, Order, StreamNumber, StreamOf, Terms},
};

use testkit::simulation::cost::MOST_TURN;

use crate::{
    INGRESS,
    flood::{ECHO, GateFlood, ROGUE},
    harness::Udp,
    number_of, numbered,
};

/// An innocent peer's flow beside the malicious one's, none of whose datagrams may be lost.
pub(super) struct Beside {
    client: Udp,
    sent: u32,
    came: Vec<u32>,
}

impl Beside {
    pub(super) fn new(flood: &mut GateFlood) -> Self {
        Self { client: flood.pair.client(9001), sent: 0, came: Vec::new() }
    }

    pub(super) fn send(&mut self) {
        self.client.send(INGRESS, &numbered(self.sent));
        self.sent += 1;
    }

    pub(super) fn receive(&mut self) {
        self.came.extend(self.client.receive().iter().map(|(_, bytes)| number_of(bytes)));
    }

    pub(super) fn assert_whole(mut self, flood: &mut GateFlood) {
        flood.run(100);
        self.receive();
        let missing: Vec<u32> = (0..self.sent).filter(|number| !self.came.contains(number)).collect();
        assert!(missing.is_empty() && self.came.len() == self.sent as usize, "{missing:?} did not come back");
    }
}

fn flood(seed: u64, standard: bool, repair: &str) -> GateFlood {
    println!("seed {seed}, standard mode {standard}");
    let mut flood = GateFlood::new(seed, "[limits]\nrepair_bytes = \"4MiB\"");
    flood.pair.repair(repair);
    flood.say_hello(standard, Features::REPAIR);
    flood
}

fn send(flood: &mut GateFlood, standard: bool, data: &[u8]) {
    match standard {
        true => flood.malicious.send_plain(data),
        false => flood.send(data),
    }
}

/// Frames of the malicious peer in the stream of the exit's first service.
pub(super) fn numbered_frame(number: u32, distance: u16, frame: &[u8]) -> Vec<u8> {
    let stream = StreamNumber::of(StreamOf::ReceiversService(0)).unwrap();
    let header = Context::Numbered { stream, number, distance, payload_at: 0 }.encode();
    [header.as_slice(), frame].concat()
}

/// A number that is near the last one, anywhere, or about to wrap.
fn number(rng: &mut StdRng, last: &mut u32) -> u32 {
    *last = match rng.random_range(0..8) {
        0 => rng.random(),
        1 => u32::MAX - rng.random_range(0..4),
        2 => last.wrapping_add(1 << 31).wrapping_sub(rng.random_range(0..2)),
        3 => last.wrapping_add(rng.random_range(0..2_000)),
        4 => last.wrapping_sub(rng.random_range(0..200)),
        5 => *last,
        6 | 7 => last.wrapping_add(1),
        _ => unreachable!("below eight"),
    };
    *last
}

/// A frame about repair in a stream that may be any; what it says is drawn.
fn lie(rng: &mut StdRng, last: &mut u32, frame: &[u8]) -> Vec<u8> {
    let stream =
        StreamNumber([2, 2, 2, 0, 1, rng.random_range(0..StreamNumber::END)][rng.random_range(0..6)]);
    let number = number(rng, last);
    match rng.random_range(0..4) {
        0 | 1 => {
            let distance = [0, 1, rng.random()][rng.random_range(0..3)];
            let header = Context::Numbered { stream, number, distance, payload_at: 0 }.encode();
            let inner = &frame[..rng.random_range(0..=frame.len())];
            [header.as_slice(), if rng.random() { frame } else { inner }].concat()
        }
        2 => {
            let window = [0, 1, 2, 64, 128, 129, rng.random_range(0..4096)][rng.random_range(0..7)];
            let [k0, k1] = rng.random::<u16>().to_be_bytes();
            let [w0, w1] = (rng.random_range(0..16_u16) << 12 | window).to_be_bytes();
            let [f0, f1, f2, f3] = number.wrapping_sub(rng.random_range(0..200)).to_be_bytes();
            let header = [k0, k1, w0, w1, f0, f1, f2, f3];
            let header = Context::Repair { stream, header, payload_at: 0 }.encode();
            let len = [0, 1, 2, 3, 8, 900, rng.random_range(0..1_000)][rng.random_range(0..7)];
            let symbol: Vec<u8> = (0..len).map(|_| rng.random()).collect();
            [header.as_slice(), &symbol].concat()
        }
        _ => {
            let stream = StreamNumber(rng.random_range(0..3));
            asking(rng, stream, number)
        }
    }
}

/// Requests for everything about a number, some of them cut off.
pub(super) fn asking(rng: &mut StdRng, stream: StreamNumber, about: u32) -> Vec<u8> {
    let mut data = Context::Ask { stream, payload_at: 0 }.encode().as_slice().to_vec();
    for _ in 0..rng.random_range(1..20) {
        let count = [1, 255, 256, 257, u16::MAX][rng.random_range(0..5)];
        let first = u64::from(about.wrapping_sub(rng.random_range(0..512)));
        let ask = Ask { first, count, attempt: rng.random_range(0..128), last: rng.random() };
        data.extend(ask.encode());
    }
    data.truncate(data.len() - rng.random_range(0..3));
    data
}

#[test]
fn numbers_symbols_and_requests_at_random_harm_nobody_else() {
    for (standard, order, seed) in
        [(false, "hold", 9701), (false, "asap", 9702), (true, "hold", 9703), (true, "asap", 9704)]
    {
        let repair = format!("{{ mode = \"auto\", order = \"{order}\", deadline = \"400ms\" }}");
        let mut flood = flood(seed, standard, &repair);
        let (mut rng, mut last) = (StdRng::seed_from_u64(seed), 0);
        let mut beside = Beside::new(&mut flood);
        let frame = [&flood.open(0, ECHO)[..], &[7; 900]].concat();
        let mut most = 0;
        for round in 0..1_500 {
            for _ in 0..rng.random_range(0..12) {
                let data = lie(&mut rng, &mut last, &frame);
                send(&mut flood, standard, &data);
            }
            if round % 10 == 0 {
                beside.send();
                most = most.max(flood.metric("culvert_repair_bytes"));
            }
            flood.run(1);
            beside.receive();
            flood.malicious.data.clear();
        }
        println!("{most} bytes at most");
        // The innocent one keeps its payloads for a while, too.
        let most_kept = (1 << 20) + (256 << 10);
        assert!(most > 0 && most <= most_kept, "a quarter of the limit for one peer: {most}");
        assert_eq!(flood.malicious.closed(), None);
        beside.assert_whole(&mut flood);
        flood.assert_innocent_is_unharmed();
        // What waited is given up in time, and its memory with it.
        flood.run(1_500);
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn requests_again_and_again_get_no_more_than_their_share() {
    for (standard, seed) in [(false, 9711), (true, 9712)] {
        let mut flood =
            flood(seed, standard, "{ mode = \"retransmit\", deadline = \"500ms\", max_overhead = 0.3 }");
        // One packet in 20 to the malicious peer is lost, so that the exit numbers its payloads.
        let losses = RefCell::new(StdRng::seed_from_u64(seed + 1));
        flood.pair.world.weather.borrow_mut().block = Box::new(move |_, to: SocketAddr| {
            to.ip() == ROGUE && losses.borrow_mut().random_range(0..20) == 0
        });
        let mut rng = StdRng::seed_from_u64(seed);
        let mut beside = Beside::new(&mut flood);
        let frame = [&flood.open(0, ECHO)[..], &[7; 600]].concat();
        let stream = StreamNumber::of(StreamOf::SendersService(0)).unwrap();
        let (mut highest, mut payloads) = (None, 0);
        for round in 0..12_000 {
            if round % 2 == 0 || !standard {
                send(&mut flood, standard, &frame);
            }
            if round % 10 == 0 {
                beside.send();
            }
            flood.run(1);
            beside.receive();
            for data in std::mem::take(&mut flood.malicious.data) {
                if let Some(Context::Numbered { number, .. }) = Context::decode(&data) {
                    payloads += 1;
                    highest = highest.max(Some(number));
                }
            }
            if let Some(highest) = highest {
                for _ in 0..if standard { 1 } else { 5 } {
                    let ask = asking(&mut rng, stream, highest);
                    send(&mut flood, standard, &ask);
                }
            }
        }
        let exit = flood.pair.exit;
        let status = flood.pair.world.peers(exit).swap_remove(1).repair.unwrap();
        let lost = flood.metric("culvert_lane_packets_lost_total{peer=\"rogue\"}");
        println!("{lost} packets were lost on the lane, {payloads} numbered payloads came; {status:?}");
        assert!(status.numbered > 1_000 && status.retransmitted > 100 && status.unanswered > 1_000);
        // Its share of the payloads' bytes, what it has saved up, and the rest of one answer.
        let (answers, all) = (status.retransmitted * 600, status.payload_bytes);
        assert!(answers <= all * 3 / 10 + (128 << 10) + 3 * 700, "{status:?}");
        beside.assert_whole(&mut flood);
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_peer_that_lies_about_numbers_harms_itself_only() {
    let mut flood = GateFlood::with_lane(96, "[limits]\nrepair_bytes = \"4MiB\"");
    flood.pair.repair("{ mode = \"auto\", order = \"hold\", deadline = \"2s\" }");
    let frame = [&flood.open(0, ServiceNumber(0))[..], &[7; 900]].concat();
    let mut number = 1_u32;
    for round in 0..600_u32 {
        for step in 0..4 {
            // Numbers that leap, distances that point anywhere, symbols that fit nothing, requests for everything.
            number = number.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let number = if round % 2 == 0 { number } else { 4 * round + step };
            flood.send(&numbered_frame(number, (round * step) as u16, &frame));
            let header = number.to_be_bytes();
            let header = [header[0], header[1], 0xf0, header[2], 0, 0, header[3], header[0]];
            let repair = Context::Repair { stream: StreamNumber(2), header, payload_at: 0 }.encode();
            flood.send(&[repair.as_slice(), &[header[0]; 700]].concat());
            let ask = Context::Ask { stream: StreamNumber((step % 3) as u16), payload_at: 0 }.encode();
            flood.send(&[ask.as_slice(), &[0xff; 70]].concat());
            flood.send(&numbered_frame(number, 0, &numbered_frame(number, 0, &frame)));
            flood.send(&[12, 2, 0]);
        }
        flood.run(1);
        assert!(flood.metric("culvert_repair_bytes") <= 1 << 20, "a quarter of the limit");
    }
    flood.assert_innocent_is_unharmed();
}

/// Datagrams for 40 flows in turn. Numbered ones wait for a number that never comes, and are given up together.
fn held_frames(flood: &GateFlood, numbered: bool, count: u32) -> Vec<Vec<u8>> {
    const FLOWS: u64 = 40;
    let frame = |index: u32| {
        let number = flood.malicious.flow(u64::from(index) % FLOWS);
        [Context::Flow { number, payload_at: 0 }.encode().as_slice(), &index.to_be_bytes()].concat()
    };
    // Number 0 is missing, and each waits for the one before.
    (1..=count)
        .map(|index| if numbered { numbered_frame(index, 1, &frame(index)) } else { frame(index) })
        .collect()
}

#[test]
fn payloads_that_are_given_up_together_are_delivered_over_several_turns() {
    const COUNT: u32 = 20_000;
    for (standard, seed) in [(false, 9721), (true, 9722)] {
        let mut longest = Vec::new();
        for is_numbered in [false, true] {
            let mut flood = GateFlood::new(seed, "[limits]\nrepair_bytes = \"64MiB\"");
            flood.pair.repair("{ mode = \"retransmit\", order = \"hold\", deadline = \"400ms\" }");
            flood.say_hello(standard, Features::REPAIR);
            for flow in 0..40 {
                let opening = [&flood.open(flow, ECHO)[..], b"opens"].concat();
                send(&mut flood, standard, &opening);
                flood.run(2);
            }
            flood.run(50);
            let exit = flood.pair.exit;
            let mut beside = Beside::new(&mut flood);
            flood.pair.world.agent(exit).longest_turn();
            let delivered =
                |flood: &mut GateFlood| flood.pair.world.peers(exit)[1].downlink.account.delivered;
            let before = delivered(&mut flood);
            for frames in held_frames(&flood, is_numbered, COUNT).chunks(200) {
                frames.iter().for_each(|frame| send(&mut flood, standard, frame));
                beside.send();
                flood.run(1);
                beside.receive();
            }
            if is_numbered {
                assert_eq!(delivered(&mut flood), before, "they wait");
                // Each turn takes its time, in which the service reads.
                flood.pair.world.slow_down(exit, Duration::from_millis(1));
            }
            for _ in 0..1_500 {
                beside.send();
                flood.run(1);
                beside.receive();
            }
            let taken = delivered(&mut flood) - before;
            assert!(taken * 10 >= u64::from(COUNT) * 9, "{taken} delivered");
            longest.push(flood.pair.world.agent(exit).longest_turn());
            assert_eq!(flood.pair.world.excess(exit), None);
            let kept = flood.metric("culvert_repair_bytes");
            assert!(kept < 400 << 10, "what waited is given back: {kept} bytes");
            beside.assert_whole(&mut flood);
            flood.assert_innocent_is_unharmed();
        }
        println!("longest turns, plain and held: {longest:?}");
        assert!(longest[1] <= longest[0].max(MOST_TURN), "{longest:?}");
    }
}

/// Packets of the malicious peer's inner address, of 40 flows in turn.
fn held_packets(numbered: bool, count: u32) -> Vec<Vec<u8>> {
    let stream = StreamNumber::of(StreamOf::Packets).unwrap();
    let frame = |index: u32| {
        let [.., high, low] = index.to_be_bytes();
        let recipe =
            Recipe { flow: low % 40, id: u16::from_be_bytes([high, low]), payload: 8, ..Recipe::UDP };
        [&[0], &*recipe.complete()].concat()
    };
    (1..=count)
        .map(|number| {
            let header = Context::Numbered { stream, number, distance: 1, payload_at: 0 }.encode();
            if numbered { [header.as_slice(), &frame(number)].concat() } else { frame(number) }
        })
        .collect()
}

#[test]
fn ip_packets_that_are_given_up_together_are_written_over_several_turns() {
    const COUNT: u32 = 20_000;
    for (standard, seed) in [(false, 9723), (true, 9724)] {
        let mut longest = Vec::new();
        for is_numbered in [false, true] {
            let device = "allowed_ips = [\"10.9.0.0/24\"]\n[limits]\nrepair_bytes = \"64MiB\"\n[tun]\naddress = [\"10.9.1.254/24\"]";
            let mut flood = GateFlood::new(seed, device);
            flood.say_hello(standard, Features::REPAIR.and(Features::PACKETS));
            let deadline = Deadline::Fixed(Duration::from_millis(400));
            let terms = Terms { mode: Mode::Retransmit, deadline, order: Order::Hold, ..Terms::OFF };
            flood.malicious.say(&Message::PacketRepair(Some(terms)));
            flood.run(50);
            let exit = flood.pair.exit;
            let mut beside = Beside::new(&mut flood);
            flood.pair.world.agent(exit).longest_turn();
            let mut written = 0;
            let mut take = |flood: &mut GateFlood| {
                written += flood.pair.world.agent(exit).tun().take_written().len();
                written
            };
            for packets in held_packets(is_numbered, COUNT).chunks(200) {
                packets.iter().for_each(|packet| send(&mut flood, standard, packet));
                beside.send();
                flood.run(1);
                beside.receive();
            }
            let before = take(&mut flood);
            if is_numbered {
                assert_eq!(before, 0, "they wait");
                flood.pair.world.slow_down(exit, Duration::from_millis(1));
            }
            for _ in 0..1_500 {
                beside.send();
                flood.run(1);
                beside.receive();
            }
            let written = take(&mut flood);
            assert!(written * 10 >= COUNT as usize * 9, "{written} written");
            longest.push(flood.pair.world.agent(exit).longest_turn());
            assert_eq!(flood.pair.world.excess(exit), None);
            let kept = flood.metric("culvert_repair_bytes");
            assert!(kept < 400 << 10, "what waited is given back: {kept} bytes");
            beside.assert_whole(&mut flood);
            flood.assert_innocent_is_unharmed();
        }
        println!("longest turns, plain and held: {longest:?}");
        assert!(longest[1] <= longest[0].max(MOST_TURN), "{longest:?}");
    }
}

#[test]
fn a_peer_that_claims_to_have_lost_what_it_never_sent_is_asked_for_little() {
    for (standard, seed) in [(false, 9731), (true, 9732)] {
        let mut flood = GateFlood::new(seed, "");
        flood.pair.repair("{ mode = \"retransmit\", deadline = \"2s\" }");
        flood.say_hello(standard, Features::REPAIR);
        let opening = [&flood.open(0, ECHO)[..], b"opens"].concat();
        send(&mut flood, standard, &opening);
        flood.run(50);
        let number = flood.malicious.flow(0);
        let frame = [Context::Flow { number, payload_at: 0 }.encode().as_slice(), b"x"].concat();
        flood.malicious.data.clear();
        let (frames, gap) = (500, 300);
        for index in 1..=frames {
            send(&mut flood, standard, &numbered_frame(index * gap, 0, &frame));
            if index % 50 == 0 {
                flood.run(1);
            }
        }
        flood.run(3_000);
        let asks: Vec<_> = flood.malicious.data.iter().filter(|data| matches!(data[..], [14, ..])).collect();
        let asked: u64 = asks
            .iter()
            .flat_map(|data| data[2..].as_chunks::<7>().0)
            .map(|ask| u64::from(Ask::decode(*ask, 0).count))
            .sum();
        println!("{} frames of requests for {asked} numbers", asks.len());
        // Each request leaves twice.
        assert!(asked > 0 && asked <= 2 * u64::from(2 * frames + 256), "{asked}");
        assert!(asks.len() <= 100, "{}", asks.len());
        flood.assert_innocent_is_unharmed();
    }
}

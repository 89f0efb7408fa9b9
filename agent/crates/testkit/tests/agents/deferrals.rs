//! Schedules that aim at what is deferred: payloads that wait for others, deadlines, requests and their retries, releases over turns.
//!
//! A malicious peer acts just before, at and just after the moments at which something is due for it, and between them reloads,
//! outages, ends of flows and of its session come to pass. Whatever the order: no turn is beyond its bound, an innocent peer loses
//! nothing, and memory comes back.
//!
//! `CULVERT_DEFERRALS=500` runs so many schedules, and `CULVERT_TEST_SEED=17` that one.

use std::{cell::Cell, env, net::SocketAddr, rc::Rc};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use wire::{
    context::Context,
    messages::Features,
    repair_terms::{StreamNumber, StreamOf},
};

use crate::{
    flood::{ECHO, GateFlood, ROGUE, dial},
    repair_hostile::{Beside, asking, numbered_frame},
};

/// The deadline of repair at the exit.
const DEADLINE: u64 = 200;

/// Flows of the malicious peer.
const FLOWS: u64 = 40;

#[derive(Clone, Copy, Debug)]
enum Act {
    /// Leaves a number out, and sends so many that wait for it.
    Hold(u32),
    /// Sends a number that was left out.
    Fill,
    /// Claims to have lost numbers.
    Leap(u32),
    /// Asks for payloads again and again.
    Ask(u32),
    /// Symbols that fit nothing.
    Symbols(u32),
    /// Ends flows, the first of which have payloads that wait.
    End(u64),
    Open,
    /// Nothing passes to it or from it.
    Cut(bool),
    /// The exit repairs in another way.
    Reload,
    /// The session ends, and another begins.
    Leave,
    Wait(u64),
}

fn act(rng: &mut StdRng, since_hold: u64) -> Act {
    match rng.random_range(0..24) {
        0..=4 => Act::Hold([1, 31, 32, 33, 500, 3_000][rng.random_range(0..6)]),
        5..=7 => Act::Fill,
        8 => Act::Leap(rng.random_range(1..2_000)),
        9 => Act::Ask(rng.random_range(1..50)),
        10 => Act::Symbols(rng.random_range(1..100)),
        11 | 12 => Act::End(rng.random_range(1..=FLOWS)),
        13 => Act::Open,
        14 => Act::Cut(rng.random()),
        15 => Act::Reload,
        16 => Act::Leave,
        // To the deadline of what was held last, and about it.
        17..=20 => Act::Wait((DEADLINE + rng.random_range(0..3)).saturating_sub(since_hold + 1)),
        21 => Act::Wait(0),
        _ => Act::Wait(rng.random_range(1..20)),
    }
}

struct Schedule {
    flood: GateFlood,
    beside: Beside,
    rng: StdRng,
    standard: bool,
    is_cut: Rc<Cell<bool>>,
    /// The number that follows those of the present session.
    next: u32,
    left_out: Vec<u32>,
    /// Milliseconds since payloads were last held back.
    since_hold: u64,
    /// The port of the malicious peer.
    place: u16,
}

impl Schedule {
    fn new(seed: u64, standard: bool) -> Self {
        let mut flood = GateFlood::new(seed, "[limits]\nrepair_bytes = \"16MiB\"");
        let order = ["asap", "hold"][usize::from(seed.is_multiple_of(4))];
        flood.pair.repair(&repair(order));
        let is_cut = Rc::new(Cell::new(false));
        let cut = Rc::clone(&is_cut);
        flood.pair.world.weather.borrow_mut().block = Box::new(move |from: SocketAddr, to: SocketAddr| {
            cut.get() && (from.ip() == ROGUE || to.ip() == ROGUE)
        });
        let beside = Beside::new(&mut flood);
        let rng = StdRng::seed_from_u64(seed);
        let mut schedule = Self {
            flood,
            beside,
            rng,
            standard,
            is_cut,
            next: 0,
            left_out: Vec::new(),
            since_hold: 0,
            place: 0,
        };
        schedule.begin();
        schedule
    }

    fn begin(&mut self) {
        self.flood.say_hello(self.standard, Features::REPAIR);
        (self.next, self.left_out) = (0, Vec::new());
        self.open();
        self.run(20);
    }

    fn open(&mut self) {
        for flow in 0..FLOWS {
            let opening = [&self.flood.open(flow, ECHO)[..], b"opens"].concat();
            self.send(&opening);
        }
    }

    fn send(&mut self, data: &[u8]) {
        match self.standard {
            true => self.flood.malicious.send_plain(data),
            false => self.flood.send(data),
        }
    }

    fn send_number(&mut self, number: u32, distance: u16) {
        let flow = self.flood.malicious.flow(u64::from(number) % FLOWS);
        let frame =
            [Context::Flow { number: flow, payload_at: 0 }.encode().as_slice(), &number.to_be_bytes()]
                .concat();
        self.send(&numbered_frame(number, distance, &frame));
    }

    fn run(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds {
            self.beside.send();
            self.flood.run(1);
            self.beside.receive();
            self.since_hold += 1;
        }
    }

    fn carry_out(&mut self, act: Act) {
        match act {
            Act::Hold(count) => {
                self.left_out.push(self.next);
                for number in self.next + 1..=self.next + count {
                    self.send_number(number, 1);
                    if number.is_multiple_of(250) {
                        self.run(1);
                    }
                }
                self.next += count + 1;
                self.since_hold = 0;
            }
            Act::Fill => {
                if let Some(number) = self.left_out.pop() {
                    self.send_number(number, 0);
                }
            }
            Act::Leap(by) => {
                self.next += by;
                self.send_number(self.next, 0);
                self.next += 1;
            }
            Act::Ask(count) => {
                let stream = StreamNumber::of(StreamOf::SendersService(0)).unwrap();
                for _ in 0..count {
                    let ask = asking(&mut self.rng, stream, self.next);
                    self.send(&ask);
                }
            }
            Act::Symbols(count) => {
                for _ in 0..count {
                    let [a, b, c, d] = self.next.saturating_sub(self.rng.random_range(0..200)).to_be_bytes();
                    let header = [self.rng.random(), self.rng.random(), 0xf0, 128, a, b, c, d];
                    let stream = StreamNumber::of(StreamOf::ReceiversService(0)).unwrap();
                    let repair = Context::Repair { stream, header, payload_at: 0 }.encode();
                    self.send(&[repair.as_slice(), &[7; 40]].concat());
                }
            }
            Act::End(count) => {
                for flow in 0..count {
                    let closed = Context::Closed(self.flood.malicious.flow(flow)).encode();
                    self.send(closed.as_slice());
                }
            }
            Act::Open => self.open(),
            Act::Cut(is_cut) => self.is_cut.set(is_cut),
            Act::Reload => {
                let order = ["asap", "hold"][self.rng.random_range(0..2)];
                self.flood.pair.repair_anew(&repair(order));
            }
            Act::Leave => {
                self.is_cut.set(false);
                self.place += 1;
                let GateFlood { pair, malicious, host, identity, .. } = &mut self.flood;
                *malicious = dial(pair, host, identity, self.place, None);
                self.run(60);
                if self.flood.malicious.connected {
                    self.begin();
                }
            }
            Act::Wait(milliseconds) => self.run(milliseconds),
        }
    }
}

fn repair(order: &str) -> String {
    format!("{{ mode = \"auto\", order = \"{order}\", deadline = \"{DEADLINE}ms\" }}")
}

fn run(seed: u64, standard: bool) {
    println!("CULVERT_TEST_SEED={seed}, standard mode {standard}");
    let mut schedule = Schedule::new(seed, standard);
    for _ in 0..60 {
        let act = act(&mut schedule.rng, schedule.since_hold);
        schedule.carry_out(act);
    }
    schedule.is_cut.set(false);
    schedule.run(2 * DEADLINE + 100);
    let Schedule { mut flood, beside, .. } = schedule;
    let exit = flood.pair.exit;
    assert_eq!(flood.pair.world.excess(exit), None, "seed {seed}");
    beside.assert_whole(&mut flood);
    flood.assert_innocent_is_unharmed();
    // What waited is given up in time, and its memory with it; the innocent's payloads are kept for a while.
    flood.run(1_500);
    let kept = flood.metric("culvert_repair_bytes");
    assert!(kept <= 1 << 20, "seed {seed}: {kept} bytes are kept");
}

#[test]
fn whatever_is_deferred_is_bounded_and_harms_nobody_else() {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seeds = match number("CULVERT_TEST_SEED") {
        Some(seed) => vec![seed],
        None => (1..=number("CULVERT_DEFERRALS").unwrap_or(16)).collect(),
    };
    for seed in seeds {
        run(seed, seed.is_multiple_of(2));
    }
}

//! Schedules: what happens in a simulation, drawn from a seed, and as text.

use std::{fmt, str::FromStr};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use wire::repair_terms::Mode;

use super::text::{Fields, Malformed, write_fields};

/// The place of the exit among the agents; the entries are 0 and 1.
pub(crate) const EXIT: u8 = 2;

/// A ceiling on flows that no schedule reaches.
pub(crate) const PLENTY: u32 = 25_000;

/// The least of `limits.repair_bytes`.
const LEAST_REPAIR_BYTES: usize = 1 << 20;

/// Everything that happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub(crate) setup: Setup,
    /// In the order of their times.
    pub(crate) events: Vec<Event>,
}

/// The agents, and how they are configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setup {
    /// Of the network and of every agent.
    pub(crate) seed: u64,
    /// 1 or 2.
    pub(crate) entries: u8,
    /// Of the entries, and of the exit.
    pub(crate) workers: [u8; 3],
    pub(crate) lanes: u8,
    pub(crate) keepalive_seconds: u8,
    /// Bounds of the queues.
    pub(crate) packets: u32,
    pub(crate) kilobytes: u32,
    pub(crate) queue_ms: u32,
    /// In percent.
    pub(crate) quota: u8,
    pub(crate) drops_newest: bool,
    /// The exit dials the entries, too.
    pub(crate) is_mutual: bool,
    pub(crate) has_tun: bool,
    /// Traffic goes on at once when the network is well again, and not when everybody had time to reconnect.
    pub(crate) is_eager: bool,
    /// The ceiling on the flows of a peer.
    pub(crate) flows_per_peer: u32,
    /// How lost payloads are repaired.
    pub(crate) repair: Mode,
    /// Payloads that are repaired are held in order.
    pub(crate) holds: bool,
    pub(crate) deadline_ms: u16,
    /// The rate to each peer in Mbit/s; 0: no limit.
    pub(crate) rate: u8,
    /// Nobody has lanes.
    pub(crate) is_standard: bool,
}

/// Something that happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Milliseconds from the start.
    pub(crate) at: u32,
    pub(crate) what: What,
}

/// A service of the exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// Answers each datagram.
    Echo,
    /// Answers none.
    Sink,
}

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A client sends `count` datagrams of `least..=most` bytes to an entry, one every `every_us`.
    Datagrams { client: u16, entry: u8, service: Service, least: u16, most: u16, every_us: u32, count: u16 },
    /// A client connects to an entry and sends `bytes`, which come back.
    Connection { entry: u8, bytes: u32 },
    /// A host behind `from` sends packets to one behind `to`, the exit being one of them.
    Packets { from: u8, to: u8, flow: u8, most: u16, every_us: u32, count: u16 },
    /// From now on the network does this to datagrams of `from` to `to`; a loss of 1000 ‰ is a partition.
    Path {
        from: u8,
        to: u8,
        delay_ms: u32,
        jitter_ms: u32,
        loss: u32,
        duplicates: u32,
        corrupted: u32,
        bytes: u16,
    },
    /// All paths are well again.
    Clear,
    /// The addresses change from which an agent dials: other ports, or another host too.
    Rebind { agent: u8, host: u8 },
    /// `kill -9`.
    Kill { agent: u8 },
    /// Is asked to stop.
    Stop { agent: u8 },
    /// Starts again if it is not running, with its state directory or without.
    Start { agent: u8, is_lost: bool },
    /// Follows another configuration.
    Reload { agent: u8, variant: u8 },
}

impl Schedule {
    /// The schedule of a seed.
    pub(crate) fn of_seed(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let setup = Setup::draw(seed, &mut rng);
        let length = rng.random_range(1_500..6_000);
        let mut events = Vec::new();
        for _ in 0..rng.random_range(2..8) {
            let at = rng.random_range(0..length);
            events.push(Event { at, what: traffic(&setup, &mut rng) });
        }
        // Some schedules have no trouble at all, or of one kind only.
        let kinds = [0..0, 0..4, 4..5, 5..8, 8..10, 0..10][rng.random_range(0..6)].clone();
        if !kinds.is_empty() {
            for _ in 0..rng.random_range(1..10) {
                let at = rng.random_range(0..length);
                trouble(&setup, rng.random_range(kinds.clone()), at, &mut rng, &mut events);
            }
        }
        events.sort_by_key(|event| event.at);
        Self { setup, events }
    }

    /// How long its events take, at least, in milliseconds.
    pub(crate) fn length(&self) -> u32 {
        self.events.iter().map(|event| event.at + event.what.lasts()).max().unwrap_or(0)
    }
}

impl What {
    /// Whether it is about this agent.
    pub(crate) fn names(&self, place: u8) -> bool {
        match self {
            Self::Datagrams { entry, .. } | Self::Connection { entry, .. } => *entry == place,
            Self::Packets { from, to, .. } | Self::Path { from, to, .. } => [*from, *to].contains(&place),
            Self::Clear => false,
            Self::Rebind { agent, .. }
            | Self::Kill { agent }
            | Self::Stop { agent }
            | Self::Start { agent, .. }
            | Self::Reload { agent, .. } => *agent == place,
        }
    }

    fn lasts(&self) -> u32 {
        match self {
            Self::Datagrams { every_us, count, .. } | Self::Packets { every_us, count, .. } => {
                u32::try_from(u64::from(*every_us) * u64::from(*count) / 1000).unwrap_or(u32::MAX)
            }
            Self::Connection { .. } => 100,
            Self::Path { .. }
            | Self::Clear
            | Self::Rebind { .. }
            | Self::Kill { .. }
            | Self::Stop { .. }
            | Self::Start { .. }
            | Self::Reload { .. } => 0,
        }
    }
}

impl Setup {
    fn draw(seed: u64, rng: &mut StdRng) -> Self {
        /// Repair has draws of its own, so that the others are those of the seeds before it.
        const REPAIR: u64 = 0x5e9a_1200_0000_0000;
        let mut of_repair = StdRng::seed_from_u64(seed ^ REPAIR);
        let modes = [Mode::Off, Mode::Off, Mode::Off, Mode::Retransmit, Mode::Fec, Mode::Auto];
        Self {
            repair: modes[of_repair.random_range(0..modes.len())],
            holds: of_repair.random(),
            deadline_ms: [20, 100, 400][of_repair.random_range(0..3)],
            rate: [0, 0, 0, 2, 20][of_repair.random_range(0..5)],
            is_standard: of_repair.random_bool(0.2),
            seed,
            entries: if rng.random_bool(0.25) { 2 } else { 1 },
            workers: [0; 3].map(|_| [1, 1, 2, 3][rng.random_range(0..4)]),
            lanes: [0, 0, 1, 2, 3, 4][rng.random_range(0..6)],
            keepalive_seconds: [1, 2, 5, 20][rng.random_range(0..4)],
            packets: [1, 8, 64, 4096][rng.random_range(0..4)],
            kilobytes: [64, 64, 4096][rng.random_range(0..3)],
            queue_ms: [20, 100, 1000][rng.random_range(0..3)],
            quota: [10, 50, 100][rng.random_range(0..3)],
            drops_newest: rng.random(),
            is_mutual: rng.random_bool(0.25),
            has_tun: rng.random_bool(0.3),
            is_eager: rng.random(),
            flows_per_peer: [PLENTY, PLENTY, PLENTY, rng.random_range(3..=10)][rng.random_range(0..4)],
        }
    }

    /// Whether datagrams come in the order of their flow whatever the path does: while there is memory for repair.
    pub(crate) fn keeps_order(&self) -> bool {
        self.holds && self.repair != Mode::Off && self.repair_bytes() > LEAST_REPAIR_BYTES
    }

    /// The memory for repair, a quarter of it for each peer; as small as may be where queues are, too.
    pub(crate) fn repair_bytes(&self) -> usize {
        if self.kilobytes == 64 { LEAST_REPAIR_BYTES } else { 64 * LEAST_REPAIR_BYTES }
    }

    /// The agents that take part.
    pub(crate) fn agents(&self) -> impl Iterator<Item = u8> + use<> {
        (0..self.entries).chain([EXIT])
    }
}

fn traffic(setup: &Setup, rng: &mut StdRng) -> What {
    let entry = rng.random_range(0..setup.entries);
    let every_us = [0, 50, 1_000, 5_000, 30_000, 250_000][rng.random_range(0..6)];
    let count = match every_us {
        0..=50 => rng.random_range(1..80),
        51..=30_000 => rng.random_range(1..60),
        30_001.. => rng.random_range(1..12),
    };
    let most = [30, 200, 1_150, 1_400][rng.random_range(0..4)];
    match rng.random_range(0..10) {
        0 => What::Connection { entry, bytes: [0, 1, 5_000, 60_000][rng.random_range(0..4)] },
        1..4 if setup.has_tun => {
            let (from, to) = if rng.random() { (entry, EXIT) } else { (EXIT, entry) };
            What::Packets { from, to, flow: rng.random_range(1..20), most, every_us, count }
        }
        _ => What::Datagrams {
            client: rng.random_range(0..30),
            entry,
            service: if rng.random_bool(0.75) { Service::Echo } else { Service::Sink },
            least: if rng.random() { 20 } else { most },
            most,
            every_us,
            count,
        },
    }
}

/// Something that agents have to survive, and its end.
fn trouble(setup: &Setup, kind: u32, at: u32, rng: &mut StdRng, events: &mut Vec<Event>) {
    let entry = rng.random_range(0..setup.entries);
    let agent = if rng.random() { entry } else { EXIT };
    let (from, to) = if rng.random() { (entry, EXIT) } else { (EXIT, entry) };
    let later = at + [10, 300, 1_000, 3_000][rng.random_range(0..4)];
    let mut push = |at, what| events.push(Event { at, what });
    match kind {
        0..3 => {
            let mut draw = |choices: [u32; 4]| choices[rng.random_range(0..4)];
            let what = What::Path {
                from,
                to,
                delay_ms: draw([1, 5, 20, 100]),
                jitter_ms: draw([0, 0, 3, 30]),
                loss: draw([0, 10, 100, 400]),
                duplicates: draw([0, 0, 20, 200]),
                corrupted: draw([0, 0, 20, 200]),
                bytes: [1_500, 1_500, 1_400, 1_252][rng.random_range(0..4)],
            };
            push(at, what);
        }
        3 => push(later, What::Clear),
        4 => {
            let cut = |from, to| What::Path {
                from,
                to,
                delay_ms: 5,
                jitter_ms: 0,
                loss: 1_000,
                duplicates: 0,
                corrupted: 0,
                bytes: 1_500,
            };
            push(at, cut(from, to));
            if rng.random() {
                push(at, cut(to, from));
            }
            push(later, What::Clear);
        }
        5 | 6 => {
            push(at, if rng.random_bool(0.7) { What::Kill { agent } } else { What::Stop { agent } });
            push(later, What::Start { agent, is_lost: rng.random_bool(0.3) });
        }
        7 => {
            // Both ends, in any order.
            push(at, What::Kill { agent: entry });
            push(at + rng.random_range(0..50), What::Kill { agent: EXIT });
            push(later, What::Start { agent, is_lost: rng.random_bool(0.3) });
            let other = if agent == EXIT { entry } else { EXIT };
            push(
                later + rng.random_range(0..2_000),
                What::Start { agent: other, is_lost: rng.random_bool(0.3) },
            );
        }
        8 => push(at, What::Rebind { agent, host: rng.random_range(0..3) }),
        _ => {
            push(at, What::Reload { agent, variant: rng.random_range(1..4) });
            if rng.random() {
                push(later, What::Reload { agent, variant: 0 });
            }
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { seed, entries, workers, lanes, keepalive_seconds, packets, kilobytes, .. } = &self.setup;
        let Setup { queue_ms, quota, drops_newest, is_mutual, has_tun, is_eager, flows_per_peer, .. } =
            &self.setup;
        let Setup { repair, holds, deadline_ms, rate, is_standard, .. } = &self.setup;
        let repair = repair.label();
        write!(f, "setup seed={seed} entries={entries} ")?;
        write!(f, "workers0={} workers1={} workers2={} ", workers[0], workers[1], workers[2])?;
        write_fields!(f, lanes, keepalive_seconds, packets, kilobytes, queue_ms, quota);
        write_fields!(f, drops_newest, is_mutual, has_tun, is_eager, flows_per_peer);
        write_fields!(f, repair, holds, deadline_ms, rate, is_standard);
        writeln!(f)?;
        for Event { at, what } in &self.events {
            writeln!(f, "{at} {what}")?;
        }
        Ok(())
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Datagrams { client, entry, service, least, most, every_us, count } => {
                let service = match service {
                    Service::Echo => "echo",
                    Service::Sink => "sink",
                };
                write!(f, "datagrams ")?;
                write_fields!(f, client, entry, service, least, most, every_us, count);
            }
            Self::Connection { entry, bytes } => {
                write!(f, "connection ")?;
                write_fields!(f, entry, bytes);
            }
            Self::Packets { from, to, flow, most, every_us, count } => {
                write!(f, "packets ")?;
                write_fields!(f, from, to, flow, most, every_us, count);
            }
            Self::Path { from, to, delay_ms, jitter_ms, loss, duplicates, corrupted, bytes } => {
                write!(f, "path ")?;
                write_fields!(f, from, to, delay_ms, jitter_ms, loss, duplicates, corrupted, bytes);
            }
            Self::Clear => write!(f, "clear")?,
            Self::Rebind { agent, host } => write!(f, "rebind agent={agent} host={host}")?,
            Self::Kill { agent } => write!(f, "kill agent={agent}")?,
            Self::Stop { agent } => write!(f, "stop agent={agent}")?,
            Self::Start { agent, is_lost } => write!(f, "start agent={agent} is_lost={is_lost}")?,
            Self::Reload { agent, variant } => write!(f, "reload agent={agent} variant={variant}")?,
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = Malformed;

    /// Reads what [`fmt::Display`] writes; lines that begin with `#` are comments.
    fn from_str(text: &str) -> Result<Self, Malformed> {
        let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        let line = lines.next().ok_or(Malformed::Empty)?;
        let (_, f) = Fields::of(line)?;
        let mode: String = f.get("repair")?;
        let mut modes = [Mode::Off, Mode::Retransmit, Mode::Fec, Mode::Auto].into_iter();
        let mode = modes.find(|known| known.label() == mode);
        let setup = Setup {
            seed: f.get("seed")?,
            entries: f.get("entries")?,
            workers: [f.get("workers0")?, f.get("workers1")?, f.get("workers2")?],
            lanes: f.get("lanes")?,
            keepalive_seconds: f.get("keepalive_seconds")?,
            packets: f.get("packets")?,
            kilobytes: f.get("kilobytes")?,
            queue_ms: f.get("queue_ms")?,
            quota: f.get("quota")?,
            drops_newest: f.get("drops_newest")?,
            is_mutual: f.get("is_mutual")?,
            has_tun: f.get("has_tun")?,
            is_eager: f.get("is_eager")?,
            flows_per_peer: f.get("flows_per_peer")?,
            repair: mode.ok_or_else(|| Malformed::Field(line.to_owned(), "repair"))?,
            holds: f.get("holds")?,
            deadline_ms: f.get("deadline_ms")?,
            rate: f.get("rate")?,
            is_standard: f.get("is_standard")?,
        };
        let events: Result<Vec<Event>, Malformed> = lines.map(Event::read).collect();
        Ok(Self { setup, events: events? })
    }
}

impl Event {
    fn read(line: &str) -> Result<Self, Malformed> {
        let (at, rest) = line.split_once(' ').ok_or_else(|| Malformed::Line(line.to_owned()))?;
        let at = at.parse().map_err(|_| Malformed::Line(line.to_owned()))?;
        let (name, f) = Fields::of(rest)?;
        let what = match name {
            "datagrams" => What::Datagrams {
                client: f.get("client")?,
                entry: f.get("entry")?,
                service: if f.get::<String>("service")? == "echo" { Service::Echo } else { Service::Sink },
                least: f.get("least")?,
                most: f.get("most")?,
                every_us: f.get("every_us")?,
                count: f.get("count")?,
            },
            "connection" => What::Connection { entry: f.get("entry")?, bytes: f.get("bytes")? },
            "packets" => What::Packets {
                from: f.get("from")?,
                to: f.get("to")?,
                flow: f.get("flow")?,
                most: f.get("most")?,
                every_us: f.get("every_us")?,
                count: f.get("count")?,
            },
            "path" => What::Path {
                from: f.get("from")?,
                to: f.get("to")?,
                delay_ms: f.get("delay_ms")?,
                jitter_ms: f.get("jitter_ms")?,
                loss: f.get("loss")?,
                duplicates: f.get("duplicates")?,
                corrupted: f.get("corrupted")?,
                bytes: f.get("bytes")?,
            },
            "clear" => What::Clear,
            "rebind" => What::Rebind { agent: f.get("agent")?, host: f.get("host")? },
            "kill" => What::Kill { agent: f.get("agent")? },
            "stop" => What::Stop { agent: f.get("agent")? },
            "start" => What::Start { agent: f.get("agent")?, is_lost: f.get("is_lost")? },
            "reload" => What::Reload { agent: f.get("agent")?, variant: f.get("variant")? },
            _ => return Err(Malformed::Line(line.to_owned())),
        };
        Ok(Self { at, what })
    }
}

//! Sends the packets, most of them from a port of their own, and notes what comes back to which.

use std::{
    collections::BTreeMap,
    io,
    rc::Rc,
    time::{Duration, Instant},
};

use base::clock::Clock;
use net::{Net, Path, ReceiveBatch, SendBatch, SendFailure, Token, UdpSocket};

use crate::{
    bench::{
        party::{Party, Turn},
        sender::refused,
        shell,
    },
    probe::{
        Class, Options, Probe,
        report::{Answer, Report, Row},
    },
};

/// Datagrams that leave together: what one GSO message of the mixture carries.
const BURST: usize = 16;

/// Between two bursts: 2,000 datagrams or 12 Mbit a second, which home uplinks and receive buffers take.
const BURST_INTERVAL: Duration = Duration::from_millis(8);

/// Bytes of a port's buffers; an answer is noted, not kept.
const BUFFER_BYTES: usize = 64 << 10;

/// Receive calls per port and turn, so that a flood of answers does not hold the rest up.
const CALLS_PER_TURN: usize = 16;

/// Sockets that `probes` are sent from.
pub(super) fn ports(probes: &[Probe]) -> usize {
    assign(probes).last().map_or(0, |last| last + 1)
}

/// The port of each probe: its own, or that of its class.
fn assign(probes: &[Probe]) -> Vec<usize> {
    let (mut shared, mut next) = (BTreeMap::new(), 0);
    let mut new = || {
        next += 1;
        next - 1
    };
    let port = |probe: &Probe| {
        if probe.class.shares_a_port() { *shared.entry(probe.class).or_insert_with(&mut new) } else { new() }
    };
    probes.iter().map(port).collect()
}

/// A socket, and the first probe that is sent from it.
struct Port {
    socket: Box<dyn UdpSocket>,
    probe: usize,
}

/// The phase that the runner is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The probe with this index in the list is sent at that time.
    Sending {
        next: usize,
        due: Instant,
    },
    /// All probes of the round are sent, and answers are waited for.
    Waiting {
        until: Instant,
    },
    Ended,
}

/// ```text
/// Sending (round 1) ──► Waiting ──► Sending (round 2, what has two) ──► Waiting ──► Ended
/// ```
pub(super) struct Runner {
    clock: Rc<dyn Clock>,
    options: Options,
    probes: Vec<Probe>,
    /// The index of the port that each probe is sent from.
    port_of: Vec<usize>,
    ports: Vec<Port>,
    round: u8,
    phase: Phase,
    outgoing: SendBatch,
    /// The port that `outgoing` leaves by, while the kernel has no room for it.
    blocked: Option<usize>,
    received: ReceiveBatch,
    rows: BTreeMap<Class, Row>,
}

impl Runner {
    /// Opens the sockets that the probes need.
    pub(super) fn new(
        net: &mut dyn Net,
        clock: Rc<dyn Clock>,
        options: Options,
        probes: Vec<Probe>,
    ) -> anyhow::Result<Self> {
        let port_of = assign(&probes);
        let mut ports: Vec<Port> = Vec::new();
        for (probe, port) in port_of.iter().enumerate() {
            if *port == ports.len() {
                let token = Token(u32::try_from(*port)?);
                let socket = shell::connected(net, options.target, BUFFER_BYTES, true, token)?;
                ports.push(Port { socket, probe });
            }
        }
        let rows = Class::ALL.map(|class| (class, Row::new(class))).into();
        let phase = Phase::Sending { next: 0, due: clock.now() };
        Ok(Self {
            clock,
            options,
            probes,
            port_of,
            ports,
            round: 1,
            phase,
            outgoing: SendBatch::new(BURST * 2_048),
            blocked: None,
            received: ReceiveBatch::default(),
            rows,
        })
    }

    /// The report on what came back so far.
    pub(super) fn finish(self) -> Report {
        let Options { target, seed, wait } = self.options;
        Report { target, seed, wait, rows: self.rows.into_values().collect() }
    }

    /// Sends one burst of probes of this round, from index `next` on, and returns the index after them.
    fn burst(&mut self, mut next: usize) -> usize {
        let mut count = 0;
        while let Some(probe) = self.probes.get(next)
            && count < BURST
        {
            if probe.rounds >= self.round {
                let (port, bytes) = (self.port_of[next], &probe.bytes);
                let path = Path { destination: self.options.target, source: None, tos: 0 };
                let Some(room) = self.outgoing.tail(bytes.len()) else { break };
                room.copy_from_slice(bytes);
                // Only a mixture's neighbours are joined into one message: each has the number of its port.
                self.outgoing.commit(&path, u32::try_from(port).unwrap_or(u32::MAX), bytes.len(), 1);
                count += 1;
                let leaves_with_it = self.probes.get(next + 1).is_some_and(|following| {
                    following.class.shares_a_port() && self.port_of[next + 1] == port && count < BURST
                });
                if !leaves_with_it && !self.flush(port) {
                    return next + 1;
                }
            }
            next += 1;
        }
        next
    }

    /// Gives the batch to the kernel; false if it has no room.
    fn flush(&mut self, port: usize) -> bool {
        let Self { outgoing, ports, rows, probes, .. } = self;
        let Port { socket, probe } = &mut ports[port];
        let Some(row) = rows.get_mut(&probes[*probe].class) else { return true };
        socket.send(outgoing, &mut |message, outcome| {
            let (failed, why) = refused(outcome, message.segments);
            row.sent += u64::from(message.segments - failed);
            row.unsent += u64::from(failed);
            row.refused += u64::from(why == Some(SendFailure::Refused));
        });
        self.blocked = (!self.outgoing.is_empty()).then_some(port);
        self.blocked.is_none()
    }

    /// Notes what came to a port.
    fn receive(&mut self, port: usize) {
        let Some(Port { socket, probe }) = self.ports.get_mut(port) else { return };
        let probe = &self.probes[*probe];
        let Some(row) = self.rows.get_mut(&probe.class) else { return };
        for _ in 0..CALLS_PER_TURN {
            match socket.receive(&mut self.received) {
                Ok(()) => {
                    for index in 0..self.received.len() {
                        let (meta, buffer) = (self.received.meta(index), self.received.buffer(index));
                        for segment in meta.segments() {
                            let to = if probe.class.shares_a_port() { "one of many" } else { &probe.detail };
                            row.answer(|| Answer::new(to, &buffer[segment.clone()]), segment.len());
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // An ICMP error, for a datagram from this port.
                Err(_) => row.refused += 1,
            }
        }
    }
}

impl Party for Runner {
    fn turn(&mut self, ready: &[Token]) -> Turn {
        for token in ready {
            self.receive(token.0 as usize);
        }
        let now = self.clock.now();
        if let Some(port) = self.blocked
            && !self.flush(port)
        {
            return Turn::At(now + BURST_INTERVAL);
        }
        match self.phase {
            Phase::Sending { next, due } if due > now => {
                debug_assert!(next < self.probes.len());
                Turn::At(due)
            }
            Phase::Sending { next, .. } => {
                let next = self.burst(next);
                let due = now + BURST_INTERVAL;
                let until = now + self.options.wait;
                let ended = next >= self.probes.len();
                self.phase = if ended { Phase::Waiting { until } } else { Phase::Sending { next, due } };
                Turn::At(if ended { until } else { due })
            }
            Phase::Waiting { until } if until > now => Turn::At(until),
            Phase::Waiting { .. } => {
                self.round += 1;
                let again = self.probes.iter().any(|probe| probe.rounds >= self.round);
                self.phase = if again { Phase::Sending { next: 0, due: now } } else { Phase::Ended };
                if again { Turn::At(now) } else { Turn::Ended }
            }
            Phase::Ended => Turn::Ended,
        }
    }
}

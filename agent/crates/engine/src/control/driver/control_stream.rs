//! The control stream of a connection: messages that wait to be sent, and those that have come.

use std::sync::Arc;

use dataplane::relay::Direction;
use quinn_proto::{Connection, Dir, Side, StreamId};
use wire::messages::{Hello, Message, Service};

use crate::control::{
    inward::{Inward, Pulled, TooMuch},
    streams_told::StreamsTold,
    windows::StreamMemory,
};

/// The cost of the messages that are taken from a connection in one turn, in the units of `inward.rs`, about 0.1 ms; the last
/// message may exceed it. An honest peer needs more only for the openings of many lanes, which then take two turns.
pub const UNITS_PER_TURN: u32 = 64;

/// The limit on control messages that wait for the far end to read them, in bytes: every lane opened several times over.
const MAX_OUTGOING: usize = 64 * 1024;

/// With fewer bytes of control messages that wait to be written, messages about streams are added to them.
const LITTLE_OUTGOING: usize = 16 * 1024;

#[derive(Debug)]
pub(super) struct ControlStream {
    id: Option<StreamId>,
    inward: Inward,
    portion: Portion,
    outgoing: Vec<u8>,
    /// Our services, as the far end was last told.
    told: Vec<Service>,
}

/// The cost of the messages that may still be taken in a turn, in units.
#[derive(Clone, Copy, Debug, Default)]
struct Portion {
    turn: u64,
    left: u32,
}

impl ControlStream {
    pub(super) fn new(memory: &Arc<StreamMemory>) -> Self {
        Self {
            id: None,
            inward: Inward::new(memory),
            portion: Portion::default(),
            outgoing: Vec::new(),
            told: Vec::new(),
        }
    }

    pub(super) fn is(&self, stream: StreamId) -> bool {
        self.id == Some(stream)
    }

    /// Whether the far end was last told of these services of ours.
    pub(super) fn has_told(&self, services: &[Service]) -> bool {
        self.told == services
    }

    /// The bytes of messages that wait: until the far end reads them (uplink), until they are complete and handled (downlink).
    pub(super) fn waiting_bytes(&self, direction: Direction) -> usize {
        match direction {
            Direction::Uplink => self.outgoing.len(),
            Direction::Downlink => self.inward.held_bytes(),
        }
    }

    /// Queues a message; the dialler's first opens the stream. Returns false if too much waits: the far end asks and does not read the
    /// answers.
    pub(super) fn queue(&mut self, quinn: &mut Connection, message: &Message) -> bool {
        if self.id.is_none() && quinn.side() == Side::Client {
            self.id = quinn.streams().open(Dir::Bi);
        }
        message.encode(&mut self.outgoing);
        if let Message::Hello(Hello { services, .. }) | Message::ServicesChanged(services) = message {
            self.told.clone_from(services);
        }
        self.outgoing.len() <= MAX_OUTGOING
    }

    /// Writes as much of the queued messages as the stream takes, and what is to be told of streams.
    pub(super) fn write(&mut self, quinn: &mut Connection, streams: &mut StreamsTold) {
        while self.outgoing.len() < LITTLE_OUTGOING
            && let Some(message) = streams.next()
        {
            message.encode(&mut self.outgoing);
        }
        let Some(id) = self.id.filter(|_| !self.outgoing.is_empty()) else { return };
        let mut stream = quinn.send_stream(id);
        while !self.outgoing.is_empty() {
            match stream.write(&self.outgoing) {
                Ok(written) => drop(self.outgoing.drain(..written)),
                Err(_) => return,
            }
        }
    }

    /// Accepts the stream, which is the first of a dialler; returns whether it has just come.
    pub(super) fn accept(&mut self, quinn: &mut Connection) -> bool {
        let is_awaited = self.id.is_none() && quinn.side() == Side::Server;
        if is_awaited {
            self.id = quinn.streams().accept(Dir::Bi);
        }
        is_awaited
    }

    /// Takes the data that has come; `flooded` is told when more waits than may.
    pub(super) fn read(&mut self, quinn: &mut Connection, mut flooded: impl FnMut(TooMuch)) {
        let Some(id) = self.id else { return };
        let mut stream = quinn.recv_stream(id);
        let Ok(mut chunks) = stream.read(false) else { return };
        while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
            if let Err(excess) = self.inward.add(chunk.offset, chunk.bytes) {
                flooded(excess);
            }
        }
        // Flow control updates are sent anyway: the connection is being polled.
        let _transmit = chunks.finalize();
    }

    /// The next message, if it is here and `turn` has units left for it.
    pub(super) fn pull(&mut self, turn: u64) -> Option<Pulled> {
        if self.portion.turn != turn {
            self.portion = Portion { turn, left: UNITS_PER_TURN };
        }
        if self.portion.left == 0 {
            return None;
        }
        let pulled = self.inward.pull()?;
        self.portion.left = self.portion.left.saturating_sub(pulled.units);
        Some(pulled)
    }

    /// Whether messages, or parts of some, are left to be taken.
    pub(super) fn has_more(&self) -> bool {
        self.inward.has_more()
    }
}

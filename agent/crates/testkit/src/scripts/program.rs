//! A program that does the steps of a script on a connection that does not block.

use std::{
    io::{self, ErrorKind},
    sync::OnceLock,
    time::{Duration, Instant},
};

use super::{End, Outcome, Script, Seen, Step};

/// The connection of a [`Program`].
pub trait Socket {
    /// Reads; `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or what ended the connection.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes a part.
    ///
    /// # Errors
    /// `WouldBlock`, or what ended the connection.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;

    /// Sends a FIN.
    ///
    /// # Errors
    /// The kernel's.
    fn shutdown_write(&mut self) -> io::Result<()>;

    /// Sends an urgent byte.
    ///
    /// # Errors
    /// `WouldBlock`, or what ended the connection.
    fn write_urgent(&mut self, byte: u8) -> io::Result<()>;

    /// Whether there is an urgent byte, which is taken.
    fn take_urgent(&mut self) -> bool;

    /// Whether at least `bytes` bytes wait to be read; `None` if the connection does not say.
    fn has_waiting(&mut self, bytes: usize) -> Option<bool>;

    /// Whether the other's FIN or a reset has come; `None` if the connection does not say.
    fn has_ended(&mut self) -> Option<bool>;

    /// Bytes that were written, and are not acknowledged by the other end's kernel.
    fn unacknowledged(&mut self) -> u64;

    fn close(&mut self);

    /// Closes it with a reset.
    fn abort(&mut self);

    /// No packet leaves or reaches it from now on.
    fn vanish(&mut self);
}

/// How long nothing may happen until a program gives up: far above what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(12);

/// How often a program looks in vain until it gives up: one that did not run for so long has not waited.
const LOOKS: u32 = 8;

/// The time in which something arrives for certain on a connection that does not say when it has, in virtual time: within a
/// second over a forward, and on a stopped one after two more.
const CERTAIN: Duration = Duration::from_secs(4);

/// The time between two bytes of [`Step::WriteToEnd`].
const BYTE_INTERVAL: Duration = Duration::from_millis(5);

/// Bytes that a flood sends at most: more than all buffers on the way can hold.
const FLOOD: u64 = 64 << 20;

/// Bytes that are written or read in one call.
const CHUNK: usize = 64 << 10;

/// The bytes of all streams, again and again; a prime, so that it fits no buffer.
const PERIOD: usize = 65_521;

/// What a program waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    pub read: bool,
    pub write: bool,
    /// That the other's FIN or a reset comes.
    pub end: bool,
    /// That time passes, and then this.
    pub at: Option<Instant>,
}

/// A program on its way through its steps.
pub struct Program<'a> {
    steps: &'a [Step],
    /// The index of the present step.
    place: usize,
    /// The state of the present step, once it has begun.
    current: Option<Current>,
    outgoing: Bytes,
    incoming: Bytes,
    /// How often it was at a [`Step::Meet`].
    meets: u32,
    /// When it last did something that ends the connection or a direction.
    acted: Option<Instant>,
    wants: Wants,
    buffer: Vec<u8>,
    seen: Seen,
}

/// What a program needs to know of the other one.
#[derive(Clone, Copy, Debug)]
pub struct Other {
    meets: u32,
    acted: Option<Instant>,
}

struct Current {
    begun: Instant,
    /// When the step last moved a byte.
    moved: Instant,
    written: u64,
    read: u64,
    /// How often it has looked in vain since.
    looks: u32,
}

/// The bytes of one direction.
struct Bytes {
    start: u64,
    offset: u64,
}

enum Attempt {
    /// Something was moved; the step goes on.
    Moved,
    Waits,
    Over(Outcome),
}

impl Bytes {
    fn new(seed: u64, side: usize) -> Self {
        Self { start: seed.wrapping_mul(40_503).wrapping_add(32_749 * side as u64), offset: 0 }
    }

    /// The next `len` bytes, at most [`CHUNK`].
    fn next(&self, len: usize) -> &'static [u8] {
        static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
        let table = TABLE.get_or_init(|| {
            let byte = |place: usize| (place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0];
            (0..PERIOD + CHUNK).map(|place| byte(place % PERIOD)).collect()
        });
        let place = ((self.start % PERIOD as u64 + self.offset) % PERIOD as u64) as usize;
        &table[place..place + len]
    }
}

impl<'a> Program<'a> {
    /// The program at a `side` of `script`.
    #[must_use]
    pub fn new(script: &'a Script, side: usize) -> Self {
        Self {
            steps: &script.steps[side],
            place: 0,
            current: None,
            outgoing: Bytes::new(script.seed, side),
            incoming: Bytes::new(script.seed, 1 - side),
            meets: 0,
            acted: None,
            wants: Wants::default(),
            buffer: vec![0; CHUNK],
            seen: Seen::default(),
        }
    }

    /// Whether it has done all its steps.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.place >= self.steps.len()
    }

    /// What the other program needs to know.
    #[must_use]
    pub fn as_other(&self) -> Other {
        let meets = if self.is_over() { u32::MAX } else { self.meets };
        Other { meets, acted: self.acted }
    }

    /// What it waits for, after [`Self::advance`] did nothing.
    #[must_use]
    pub fn wants(&self) -> Wants {
        self.wants
    }

    /// What it saw.
    #[must_use]
    pub fn into_seen(self) -> Seen {
        self.seen
    }

    /// Does what can be done now; whether that was anything.
    pub fn advance(&mut self, socket: &mut dyn Socket, other: Other, now: Instant) -> bool {
        let mut moved = false;
        while let Some(step) = self.steps.get(self.place).copied() {
            let mut current = self.current.take().unwrap_or_else(|| self.begin(step, now));
            self.wants = Wants::default();
            match self.attempt(step, &mut current, socket, other, now) {
                Attempt::Moved => {
                    current.moved = now;
                    current.looks = 0;
                    self.current = Some(current);
                    return true;
                }
                Attempt::Waits => {
                    let since = current.begun.max(current.moved).max(other.acted.unwrap_or(current.begun));
                    current.looks += 1;
                    let is_over = now.saturating_duration_since(since) > PATIENCE && current.looks >= LOOKS;
                    if step != Step::Meet && is_over {
                        self.seen.outcomes.push(Outcome::Hung);
                        self.place = self.steps.len();
                        socket.close();
                        return true;
                    }
                    self.current = Some(current);
                    return moved;
                }
                Attempt::Over(outcome) => {
                    if let Outcome::Ended(end) = outcome {
                        self.seen.first_end.get_or_insert(end);
                        let since =
                            current.begun.max(current.moved).max(other.acted.unwrap_or(current.begun));
                        let slow = now.saturating_duration_since(since);
                        self.seen.slowest = self.seen.slowest.max(slow);
                    }
                    self.seen.outcomes.push(outcome);
                    self.place += 1;
                    moved = true;
                }
            }
        }
        moved
    }

    fn begin(&mut self, step: Step, now: Instant) -> Current {
        if step == Step::Meet {
            self.meets += 1;
        }
        Current { begun: now, moved: now, written: 0, read: 0, looks: 0 }
    }

    fn attempt(
        &mut self,
        step: Step,
        current: &mut Current,
        socket: &mut dyn Socket,
        other: Other,
        now: Instant,
    ) -> Attempt {
        match step {
            Step::Write(bytes) => self.exchange(current, socket, bytes, 0),
            Step::Read(bytes) => self.exchange(current, socket, 0, bytes),
            Step::Exchange { write, read } => self.exchange(current, socket, write, read),
            Step::ReadToEnd => self.exchange(current, socket, 0, u64::MAX),
            Step::Flood => self.exchange(current, socket, FLOOD, 0),
            Step::Duplex => self.exchange(current, socket, u64::MAX, u64::MAX),
            Step::FloodFor { time, most } => {
                self.wants.at = Some(current.begun + time);
                if now >= current.begun + time {
                    return Attempt::Over(Outcome::Done);
                }
                self.exchange(current, socket, most, 0)
            }
            Step::WriteToEnd => {
                let due = current.begun + BYTE_INTERVAL * u32::try_from(current.written).unwrap_or(u32::MAX);
                if now < due {
                    self.wants.at = Some(due);
                    return Attempt::Waits;
                }
                match socket.write(self.outgoing.next(1)) {
                    Ok(_) => {
                        self.outgoing.offset += 1;
                        self.seen.sent += 1;
                        current.written += 1;
                        // It is no progress: the end was to come by itself.
                        self.wants.at = Some(due + BYTE_INTERVAL);
                        Attempt::Waits
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.wants.write = true;
                        Attempt::Waits
                    }
                    Err(error) => Attempt::Over(Outcome::Ended(error.into())),
                }
            }
            Step::Urgent => match socket.write_urgent(!0) {
                Ok(()) => Attempt::Over(Outcome::Done),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.wants.write = true;
                    Attempt::Waits
                }
                Err(error) => Attempt::Over(Outcome::Ended(error.into())),
            },
            Step::TakeUrgent => Attempt::Over(Outcome::Urgent(socket.take_urgent())),
            Step::Await(bytes) => {
                let is_there = socket.has_waiting(usize::try_from(bytes).unwrap_or(usize::MAX));
                self.until(is_there, current, now)
            }
            Step::AwaitEnd => {
                self.wants.end = true;
                let is_there = socket.has_ended();
                let attempt = self.until(is_there, current, now);
                if is_there == Some(true) {
                    let since = current.begun.max(other.acted.unwrap_or(current.begun));
                    self.seen.slowest = self.seen.slowest.max(now.saturating_duration_since(since));
                }
                attempt
            }
            Step::Pause(time) => self.pause(current.begun + time, now),
            Step::Meet if other.meets >= self.meets => Attempt::Over(Outcome::Done),
            Step::Meet => Attempt::Waits,
            Step::HalfClose => {
                self.acted = Some(now);
                match socket.shutdown_write() {
                    Ok(()) => Attempt::Over(Outcome::Done),
                    Err(error) => Attempt::Over(Outcome::Ended(error.into())),
                }
            }
            Step::Close => {
                if socket.has_waiting(1) != Some(false) {
                    self.note_acknowledged(socket);
                }
                socket.close();
                self.acted = Some(now);
                Attempt::Over(Outcome::Done)
            }
            Step::Abort => {
                self.note_acknowledged(socket);
                socket.abort();
                self.acted = Some(now);
                Attempt::Over(Outcome::Done)
            }
            Step::Vanish => {
                self.note_acknowledged(socket);
                socket.vanish();
                self.acted = Some(now);
                Attempt::Over(Outcome::Done)
            }
        }
    }

    fn note_acknowledged(&mut self, socket: &mut dyn Socket) {
        let waiting = if self.seen.sent > 0 { socket.unacknowledged() } else { 0 };
        self.seen.acknowledged = Some(self.seen.sent.saturating_sub(waiting));
    }

    fn pause(&mut self, until: Instant, now: Instant) -> Attempt {
        self.wants.at = Some(until);
        if now >= until { Attempt::Over(Outcome::Done) } else { Attempt::Waits }
    }

    /// Waits for what the connection says, or else for so long that it is certain.
    fn until(&mut self, is_there: Option<bool>, current: &Current, now: Instant) -> Attempt {
        match is_there {
            Some(true) => Attempt::Over(Outcome::Done),
            Some(false) => {
                self.wants.at = Some(now + Duration::from_millis(2));
                Attempt::Waits
            }
            None => self.pause(current.begun + CERTAIN, now),
        }
    }

    /// Writes and reads until so many bytes were written and read.
    fn exchange(&mut self, current: &mut Current, socket: &mut dyn Socket, write: u64, read: u64) -> Attempt {
        let mut moved = false;
        let left = read - current.read;
        if left > 0 {
            let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            match socket.read(&mut self.buffer[..most]) {
                Ok(0) => {
                    self.seen.has_read_all = true;
                    return Attempt::Over(Outcome::Ended(End::Eof));
                }
                Ok(len) => {
                    self.take(len);
                    current.read += len as u64;
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wants.read = true,
                Err(error) => {
                    self.seen.has_read_all = true;
                    return Attempt::Over(Outcome::Ended(error.into()));
                }
            }
        }
        let left = write - current.written;
        if left > 0 {
            let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            match socket.write(self.outgoing.next(most)) {
                Ok(len) => {
                    self.outgoing.offset += len as u64;
                    self.seen.sent += len as u64;
                    current.written += len as u64;
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wants.write = true,
                Err(error) => return Attempt::Over(Outcome::Ended(error.into())),
            }
        }
        if current.read == read && current.written == write {
            Attempt::Over(Outcome::Done)
        } else if moved {
            Attempt::Moved
        } else {
            Attempt::Waits
        }
    }

    fn take(&mut self, len: usize) {
        let (got, expected) = (&self.buffer[..len], self.incoming.next(len));
        if got != expected {
            let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected).unwrap_or(0);
            self.seen.garbled.get_or_insert(self.seen.received + wrong as u64);
        }
        self.incoming.offset += len as u64;
        self.seen.received += len as u64;
    }
}

//! Scripts of two programs at the ends of a TCP connection: what they do is drawn from a seed, and what they see over one
//! connection is compared with what they see over another.
//!
//! | question | file |
//! |---|---|
//! | what programs can do, and what they see | this one |
//! | which scripts there are | `generate.rs` |
//! | how a program does its steps | `program.rs` |
//! | what must hold of one run, and of two | `judge.rs` |
//! | programs on the kernel's sockets | `kernel.rs` |
//! | programs on connections of [`net`], in virtual time | `virtual_time.rs` |
//!
//! Over the kernel's TCP alone, every script gives the same outcomes each time it is run. Therefore a program ends its
//! connection only when it is certain what lies unread at it, and what depends on buffers and timing (how much of a flood was
//! taken, where a reset cut off) is not an outcome: [`judge::faults`] has bounds for it.

use std::{
    env, fmt,
    io::{self, ErrorKind},
    time::Duration,
};

pub mod generate;
pub mod judge;
pub mod kernel;
mod program;
pub mod virtual_time;

pub use program::{Other, Program, Socket, Wants};

/// The client's place in arrays of two.
pub const CLIENT: usize = 0;

/// The service's place in arrays of two.
pub const SERVICE: usize = 1;

/// The seeds to run: 1 to `count`, or what the environment says. `CULVERT_FORWARD_SCRIPTS` is another count or `first..last`, and
/// `CULVERT_TEST_SEED` the only seed: run once, or as often as that count.
///
/// # Panics
/// When the environment says something else than numbers.
#[must_use]
pub fn seeds(count: u64) -> Vec<u64> {
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let scripts = env::var("CULVERT_FORWARD_SCRIPTS").ok();
    if let Ok(seed) = env::var("CULVERT_TEST_SEED") {
        let times = scripts.map_or(1, |text| number(&text));
        return (0..times).map(|_| number(&seed)).collect();
    }
    match scripts.as_deref().map(|text| text.split_once("..").ok_or(text)) {
        Some(Ok((first, last))) => (number(first)..=number(last)).collect(),
        Some(Err(text)) => (1..=number(text)).collect(),
        None => (1..=count).collect(),
    }
}

/// What a program does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Write(u64),
    Read(u64),
    /// Writes and reads at the same time.
    Exchange {
        write: u64,
        read: u64,
    },
    /// Sends a byte with `MSG_OOB`; it is none of those that [`Step::Read`] counts.
    Urgent,
    /// Asks for such a byte.
    TakeUrgent,
    /// Waits until so many bytes can be read, and reads none.
    Await(u64),
    Pause(Duration),
    /// Waits until the other program is at its [`Step::Meet`], too. The programs meet without the connection.
    Meet,
    /// Writes no more (a FIN).
    HalfClose,
    /// Waits until the other's end or a reset is there, and reads nothing.
    AwaitEnd,
    /// Reads whatever comes, to the end.
    ReadToEnd,
    /// Writes a byte now and then until that fails.
    WriteToEnd,
    /// Writes as much as is taken until that fails, and reads nothing.
    Flood,
    /// Writes as much as is taken within a time.
    FloodFor {
        time: Duration,
        /// Bytes that are enough.
        most: u64,
    },
    /// Writes as much as is taken, and reads whatever comes, until either fails.
    Duplex,
    /// Closes the connection. The kernel does the same when a process ends or is killed: it sends a FIN after all that was
    /// written, or a reset if something is unread.
    Close,
    /// Closes the connection with a reset (`SO_LINGER` 0).
    Abort,
    /// From now on its host is gone: no packet leaves or reaches it.
    Vanish,
}

/// Two programs, and what may be expected of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    pub seed: u64,
    /// How it ends, in a few words.
    pub ending: &'static str,
    /// The client's steps, then the service's.
    pub steps: [Vec<Step>; 2],
    pub has_service: bool,
    /// `SO_RCVBUF` of the client and of the service, if not the kernel's choice.
    pub receive_buffers: [Option<usize>; 2],
    /// Whether the program has stopped reading when its connection is reset. A forward then need not deliver all that it has.
    pub stops_reading: [bool; 2],
    /// How much time may pass until an end is seen, from what caused it or from the last byte before it.
    pub patience: Duration,
}

/// How a connection ended for a program, or one of its directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Read: the end of the stream.
    Eof,
    /// ECONNRESET.
    Reset,
    /// EPIPE.
    BrokenPipe,
    /// ETIMEDOUT.
    TimedOut,
    /// ECONNREFUSED.
    Refused,
    Other(ErrorKind),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        #[expect(clippy::wildcard_enum_match_arm, reason = "not our enum, and not exhaustive")]
        match error.kind() {
            ErrorKind::ConnectionReset => Self::Reset,
            ErrorKind::BrokenPipe => Self::BrokenPipe,
            ErrorKind::TimedOut => Self::TimedOut,
            ErrorKind::ConnectionRefused => Self::Refused,
            other => Self::Other(other),
        }
    }
}

/// What came of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The connection, or the direction that the step is about, ended before or with it.
    Ended(End),
    /// Whether there was an urgent byte.
    Urgent(bool),
    /// Nothing more happened; the program has given up.
    Hung,
}

/// What a program saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Why it could not connect.
    pub unconnected: Option<End>,
    /// One for each step that it came to.
    pub outcomes: Vec<Outcome>,
    /// Bytes that its kernel took.
    pub sent: u64,
    pub received: u64,
    /// Where what it read is not what the other one wrote.
    pub garbled: Option<u64>,
    /// Bytes of its own that the other end's kernel had acknowledged when this program reset the connection, or vanished.
    pub acknowledged: Option<u64>,
    /// The first end or error that it met.
    pub first_end: Option<End>,
    /// Whether it then read on until there was nothing more.
    pub has_read_all: bool,
    /// The longest time until an end was seen, from what caused it or from the last byte before it.
    pub slowest: Duration,
}

/// What both programs of a script saw: the client, then the service.
pub type Run = [Seen; 2];

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write(bytes) => write!(f, "write {bytes}"),
            Self::Read(bytes) => write!(f, "read {bytes}"),
            Self::Exchange { write, read } => write!(f, "write {write} and read {read}"),
            Self::Urgent => f.write_str("urgent byte"),
            Self::TakeUrgent => f.write_str("take urgent byte"),
            Self::Await(bytes) => write!(f, "await {bytes}"),
            Self::Pause(time) => write!(f, "pause {time:?}"),
            Self::Meet => f.write_str("meet"),
            Self::HalfClose => f.write_str("half-close"),
            Self::AwaitEnd => f.write_str("await end"),
            Self::ReadToEnd => f.write_str("read to end"),
            Self::WriteToEnd => f.write_str("write to end"),
            Self::Flood => f.write_str("flood"),
            Self::FloodFor { time, most } => write!(f, "flood for {time:?} or {most}"),
            Self::Duplex => f.write_str("flood and read"),
            Self::Close => f.write_str("close"),
            Self::Abort => f.write_str("abort"),
            Self::Vanish => f.write_str("vanish"),
        }
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.ending)?;
        for (name, (steps, buffer)) in
            ["client", "service"].iter().zip(self.steps.iter().zip(self.receive_buffers))
        {
            let buffer = buffer.map(|bytes| format!(" ({bytes} B receive buffer)")).unwrap_or_default();
            let steps: Vec<String> = steps.iter().map(Step::to_string).collect();
            writeln!(f, "    {name}{buffer}: {}", steps.join(", "))?;
        }
        if !self.has_service {
            writeln!(f, "    nobody listens")?;
        }
        Ok(())
    }
}

//! Scripts from seeds: a conversation, then one of many ends, begun by either program.
//!
//! In a conversation all that is written is read, so that each program knows at its end what lies unread. `x` is the program
//! that ends the connection, or begins to, and `y` the other one.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{Script, Step};

/// The most that is written where its reader does not read, and where it shall arrive all the same: it fits into the least
/// receive buffer.
const SMALL: u64 = 4096;

/// How soon an end is seen.
pub const SOON: Duration = Duration::from_secs(1);

/// The same where a program has stopped reading what should come before the end: two seconds are given to it.
pub const STOPPED: Duration = Duration::from_secs(3);

/// How soon a host that has vanished is missed, with a keepalive of [`KEEPALIVE`].
const MISSED: Duration = Duration::from_secs(15);

/// The keepalive of forwards in scripts in which a host vanishes.
pub const KEEPALIVE: Duration = Duration::from_secs(2);

/// An end of a connection.
type Ending = fn(&mut Draft, Ends);

/// Every end, the number of times that it comes in a hundred or so, and its name.
const ENDINGS: &[(Ending, u32, &str)] = &[
    (whole, 8, ORDERLY[0]),
    (both_at_once, 3, "both half-close or close at once"),
    (close, 8, ORDERLY[1]),
    (unnoticed_close, 4, "close, and the other one writes, then reads"),
    (close_unread, 14, "close with unread bytes"),
    (answer_during_upload, 8, "an answer and a close during an upload"),
    (abort, 14, "abort"),
    (abort_while_written_to, 8, "end while the other one is blocked in write"),
    (abort_both_full, 6, "end while both are blocked in write"),
    (die_with_a_queue, 5, ORDERLY[2]),
    (abort_after_half_close, 6, "half-close, and later an abort"),
    (abort_at_half_close, 6, "half-close, and at once a reset"),
    (abort_after_others_half_close, 5, "an abort by the one that may still write"),
    (abort_both, 2, "both abort at once"),
];

/// The ends by which nothing gets lost, wherever it is.
const ORDERLY: [&str; 3] = [
    "half-close, an answer, close",
    "close, and the other one reads, then writes",
    "end with much that is not read yet",
];

/// The ends that a host makes that vanishes.
const VANISHING: &[(Ending, u32, &str)] = &[
    (vanish_idle, 4, "vanish while the other one reads"),
    (vanish_written_to, 3, "vanish while the other one writes"),
    (vanish_with_bytes, 3, "vanish just after writing"),
];

/// Who ends the connection, and the other one.
#[derive(Clone, Copy)]
struct Ends {
    x: usize,
    y: usize,
}

/// A script that is being drawn.
struct Draft {
    random: StdRng,
    steps: [Vec<Step>; 2],
    /// The most that one step writes.
    largest: u64,
    stops_reading: [bool; 2],
    patience: Duration,
}

impl Script {
    /// The script of a seed, in which a step writes `largest` bytes at most.
    #[must_use]
    pub fn of_seed(seed: u64, largest: u64) -> Self {
        let mut draft = Draft::new(seed, largest);
        if draft.one_in(50) {
            return Self { has_service: false, ..draft.refused(seed) };
        }
        draft.conversation();
        draft.end(seed, ENDINGS)
    }

    /// The script of a seed in which one of the hosts vanishes.
    #[must_use]
    pub fn vanishing(seed: u64) -> Self {
        let mut draft = Draft::new(seed, 100_000);
        draft.conversation();
        draft.patience = MISSED;
        draft.end(seed, VANISHING)
    }

    /// Whether the programs' own kernels are to miss a host that vanishes.
    #[must_use]
    pub fn vanishes(&self) -> bool {
        self.steps.iter().flatten().any(|step| *step == Step::Vanish)
    }
}

impl Draft {
    fn new(seed: u64, largest: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            steps: [Vec::new(), Vec::new()],
            largest,
            stops_reading: [false; 2],
            patience: SOON,
        }
    }

    fn one_in(&mut self, count: u32) -> bool {
        self.random.random_ratio(1, count)
    }

    fn small(&mut self) -> u64 {
        self.random.random_range(1..=SMALL)
    }

    /// How much a step writes that is read at the same time.
    fn size(&mut self) -> u64 {
        const EDGES: [u64; 9] = [1, 1448, 16_384, 65_535, 65_536, 65_537, 131_072, 262_144, 262_145];
        let size = match self.random.random_range(0..100) {
            0..50 => self.small(),
            50..78 => self.random.random_range(1..=100_000),
            78..88 => EDGES[self.random.random_range(0..EDGES.len())],
            88..99 => self.random.random_range(1..=1 << 20),
            _ => self.random.random_range(1..=self.largest),
        };
        size.min(self.largest)
    }

    /// The same where the other one may not read at the same time.
    fn modest(&mut self) -> u64 {
        self.size().min(1 << 20)
    }

    fn milliseconds(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.random.random_range(0..=most))
    }

    fn say(&mut self, who: usize, steps: &[Step]) {
        self.steps[who].extend_from_slice(steps);
    }

    fn meet(&mut self) {
        self.steps.iter_mut().for_each(|steps| steps.push(Step::Meet));
    }

    /// Bytes back and forth, all of which are read.
    fn conversation(&mut self) {
        let phases = [0, 0, 1, 1, 2, 3, 5][self.random.random_range(0..7)];
        for _ in 0..phases {
            let x = self.random.random_range(0..2);
            let y = 1 - x;
            match self.random.random_range(0..12) {
                0..4 => {
                    let bytes = self.size();
                    self.say(x, &[Step::Write(bytes)]);
                    self.say(y, &[Step::Read(bytes)]);
                }
                4..6 => {
                    let (write, read) = (self.size(), self.size());
                    self.say(x, &[Step::Exchange { write, read }]);
                    self.say(y, &[Step::Exchange { write: read, read: write }]);
                }
                6..8 => self.pieces(x, y),
                8 => {
                    let pause = Step::Pause(self.milliseconds(100));
                    self.say(x, &[pause]);
                }
                9..11 => {
                    let (bytes, pause) = (self.modest(), self.milliseconds(300));
                    self.say(x, &[Step::Write(bytes)]);
                    self.say(y, &[Step::Pause(pause), Step::Read(bytes)]);
                }
                _ => self.urgent(x, y),
            }
        }
    }

    /// Many small writes, and reads of other sizes.
    fn pieces(&mut self, x: usize, y: usize) {
        let mut sum = 0;
        for _ in 0..self.random.random_range(2..10) {
            let bytes = self.random.random_range(1..=1500);
            sum += bytes;
            self.say(x, &[Step::Write(bytes)]);
            if self.one_in(3) {
                let pause = Step::Pause(self.milliseconds(15));
                self.say(x, &[pause]);
            }
        }
        while sum > 0 {
            let bytes = self.random.random_range(1..=5000).min(sum);
            sum -= bytes;
            self.say(y, &[Step::Read(bytes)]);
        }
    }

    /// An urgent byte between others. It is the only one under way: of two, the kernel makes the first an ordinary one.
    fn urgent(&mut self, x: usize, y: usize) {
        let (before, after) = (self.small(), self.small());
        self.meet();
        self.say(x, &[Step::Write(before), Step::Urgent, Step::Write(after)]);
        if self.one_in(2) {
            self.meet();
            self.say(y, &[Step::TakeUrgent]);
        }
        self.say(y, &[Step::Read(before + after)]);
        self.meet();
    }

    fn end(mut self, seed: u64, endings: &[(Ending, u32, &'static str)]) -> Script {
        let x = self.random.random_range(0..2);
        let mut place = self.random.random_range(0..endings.iter().map(|(_, weight, _)| weight).sum());
        let chosen = endings.iter().find(|(_, weight, _)| {
            let is_it = place < *weight;
            place = place.saturating_sub(*weight);
            is_it
        });
        let (ending, _, name) = *chosen.expect("the place is below the sum of the weights");
        // Else an abort could cut off what the conversation has on its way.
        if !ORDERLY.contains(&name) || self.one_in(2) {
            self.meet();
        }
        ending(&mut self, Ends { x, y: 1 - x });
        self.script(seed, name)
    }

    fn refused(mut self, seed: u64) -> Script {
        self.say(super::CLIENT, &[Step::ReadToEnd]);
        self.script(seed, "nobody listens")
    }

    fn script(mut self, seed: u64, ending: &'static str) -> Script {
        let mut buffer = || self.random.random_ratio(1, 8).then_some(16 << 10);
        let receive_buffers = [buffer(), buffer()];
        Script {
            seed,
            ending,
            steps: self.steps,
            has_service: true,
            receive_buffers,
            stops_reading: self.stops_reading,
            patience: self.patience,
        }
    }

    /// What one does whom a reset reaches, after at most [`SMALL`] bytes.
    fn meet_a_reset(&mut self, y: usize) {
        match self.random.random_range(0..4) {
            0 => {
                let pause = Step::Pause(self.milliseconds(700));
                self.say(y, &[pause, Step::ReadToEnd, Step::WriteToEnd]);
            }
            1 => self.say(y, &[Step::AwaitEnd, Step::ReadToEnd, Step::ReadToEnd]),
            2 => self.say(y, &[Step::AwaitEnd, Step::WriteToEnd, Step::ReadToEnd]),
            _ => self.say(y, &[Step::WriteToEnd, Step::ReadToEnd, Step::WriteToEnd]),
        }
    }
}

/// The orderly end: a request and its end, an answer and its end.
fn whole(draft: &mut Draft, Ends { x, y }: Ends) {
    let (request, answer, pause) = (draft.size(), draft.size(), draft.milliseconds(200));
    draft.say(x, &[Step::Write(request), Step::HalfClose]);
    draft.say(y, &[Step::ReadToEnd, Step::Pause(pause), Step::Write(answer)]);
    let last = if draft.one_in(2) { Step::Close } else { Step::HalfClose };
    draft.say(y, &[last]);
    draft.say(x, &[Step::ReadToEnd, Step::Close]);
}

fn both_at_once(draft: &mut Draft, Ends { x, y }: Ends) {
    draft.meet();
    if draft.one_in(2) {
        draft.say(x, &[Step::HalfClose, Step::ReadToEnd]);
        draft.say(y, &[Step::HalfClose, Step::ReadToEnd]);
    } else {
        draft.say(x, &[Step::Close]);
        draft.say(y, &[Step::Close]);
    }
}

fn close(draft: &mut Draft, Ends { x, y }: Ends) {
    let (bytes, pause) = (draft.modest(), draft.milliseconds(300));
    draft.say(x, &[Step::Write(bytes), Step::Close]);
    draft.say(y, &[Step::Pause(pause), Step::ReadToEnd, Step::WriteToEnd, Step::ReadToEnd]);
}

fn unnoticed_close(draft: &mut Draft, Ends { x, y }: Ends) {
    if draft.one_in(2) {
        let bytes = draft.small();
        draft.say(x, &[Step::Write(bytes)]);
    }
    draft.say(x, &[Step::Close]);
    draft.say(y, &[Step::AwaitEnd, Step::WriteToEnd, Step::ReadToEnd]);
}

/// The answer that overtakes the request, as of a server that refuses an upload.
fn close_unread(draft: &mut Draft, Ends { x, y }: Ends) {
    let unread = draft.small();
    draft.say(y, &[Step::Write(unread)]);
    draft.say(x, &[Step::Await(unread)]);
    if unread > 1 && draft.one_in(2) {
        let bytes = draft.random.random_range(1..unread);
        draft.say(x, &[Step::Read(bytes)]);
    }
    // Twice as often as all else: what is sent before a reset is what gets lost.
    if draft.one_in(2) {
        let bytes = draft.modest();
        draft.say(x, &[Step::Write(bytes), Step::Close]);
        draft.say(y, &[Step::ReadToEnd, Step::WriteToEnd, Step::ReadToEnd]);
    } else {
        let bytes = draft.small();
        draft.say(x, &[Step::Write(bytes), Step::Close]);
        draft.meet_a_reset(y);
    }
}

fn answer_during_upload(draft: &mut Draft, Ends { x, y }: Ends) {
    let (bytes, pause) = (draft.modest(), draft.milliseconds(50));
    draft.say(x, &[Step::Await(1)]);
    if draft.one_in(2) {
        let request = draft.modest();
        draft.say(x, &[Step::Read(request), Step::Await(1)]);
    }
    draft.say(x, &[Step::Write(bytes), Step::Pause(pause), Step::Await(1), Step::Close]);
    draft.say(y, &[Step::Duplex, Step::ReadToEnd, Step::WriteToEnd]);
}

fn abort(draft: &mut Draft, Ends { x, y }: Ends) {
    if draft.one_in(2) {
        let (bytes, pause) = (draft.modest(), draft.milliseconds(50));
        draft.say(x, &[Step::Write(bytes), Step::Pause(pause), Step::Abort]);
        draft.say(y, &[Step::ReadToEnd, Step::WriteToEnd, Step::ReadToEnd]);
    } else {
        if draft.one_in(2) {
            let bytes = draft.small();
            draft.say(x, &[Step::Write(bytes)]);
        }
        if draft.one_in(2) {
            let pause = Step::Pause(draft.milliseconds(50));
            draft.say(x, &[pause]);
        }
        draft.say(x, &[Step::Abort]);
        draft.meet_a_reset(y);
    }
}

fn abort_while_written_to(draft: &mut Draft, Ends { x, y }: Ends) {
    if draft.one_in(2) {
        let bytes = draft.modest();
        draft.say(x, &[Step::Read(bytes)]);
    }
    if draft.one_in(2) {
        let bytes = draft.small();
        draft.say(x, &[Step::Write(bytes)]);
    }
    let pause = draft.milliseconds(300);
    let last = if draft.one_in(2) { Step::Close } else { Step::Abort };
    draft.say(x, &[Step::Await(1), Step::Pause(pause), last]);
    draft.say(y, &[Step::Flood, Step::ReadToEnd, Step::WriteToEnd]);
}

fn abort_both_full(draft: &mut Draft, Ends { x, y }: Ends) {
    let last = if draft.one_in(2) { Step::Close } else { Step::Abort };
    let time = Duration::from_millis(draft.random.random_range(50..400));
    draft.say(x, &[Step::FloodFor { time, most: 16 << 20 }, Step::Await(1), last]);
    draft.say(y, &[Step::Flood, Step::ReadToEnd]);
    draft.stops_reading[y] = true;
    draft.patience = STOPPED;
}

fn die_with_a_queue(draft: &mut Draft, Ends { x, y }: Ends) {
    let (time, pause) = (Duration::from_millis(draft.random.random_range(50..300)), draft.milliseconds(500));
    draft.say(x, &[Step::FloodFor { time, most: 8 << 20 }, Step::Close]);
    draft.say(y, &[Step::Pause(pause), Step::ReadToEnd, Step::WriteToEnd]);
}

fn abort_after_half_close(draft: &mut Draft, Ends { x, y }: Ends) {
    let bytes = draft.modest();
    draft.say(x, &[Step::Write(bytes), Step::HalfClose]);
    draft.say(y, &[Step::ReadToEnd]);
    draft.meet();
    match draft.random.random_range(0..3) {
        0 => {
            let pause = draft.milliseconds(300);
            draft.say(x, &[Step::Await(1), Step::Pause(pause), Step::Abort]);
            draft.say(y, &[Step::Flood, Step::ReadToEnd]);
        }
        1 => {
            let bytes = draft.small();
            draft.say(y, &[Step::Write(bytes)]);
            draft.say(x, &[Step::Await(bytes), Step::Close]);
            draft.say(y, &[Step::WriteToEnd, Step::ReadToEnd]);
        }
        _ => {
            draft.say(x, &[Step::Abort]);
            draft.say(y, &[Step::WriteToEnd, Step::ReadToEnd]);
        }
    }
}

/// As Python's server ends a connection of which it has not read the whole request, or all at once.
fn abort_at_half_close(draft: &mut Draft, Ends { x, y }: Ends) {
    let is_unread = draft.one_in(2);
    if is_unread {
        let unread = draft.small();
        draft.say(y, &[Step::Write(unread)]);
        draft.say(x, &[Step::Await(unread)]);
    }
    if draft.one_in(2) {
        let bytes = draft.small();
        draft.say(x, &[Step::Write(bytes)]);
    }
    draft.say(x, &[Step::HalfClose, if is_unread { Step::Close } else { Step::Abort }]);
    if draft.one_in(2) {
        draft.say(y, &[Step::ReadToEnd, Step::WriteToEnd, Step::ReadToEnd]);
    } else {
        draft.say(y, &[Step::AwaitEnd, Step::ReadToEnd, Step::WriteToEnd]);
    }
}

fn abort_after_others_half_close(draft: &mut Draft, Ends { x, y }: Ends) {
    let bytes = draft.modest();
    draft.say(y, &[Step::Write(bytes), Step::HalfClose]);
    draft.say(x, &[Step::ReadToEnd]);
    let answer = draft.modest();
    draft.say(x, &[Step::Write(answer), Step::Abort]);
    draft.say(y, &[Step::ReadToEnd, Step::ReadToEnd]);
}

fn abort_both(draft: &mut Draft, Ends { x, y }: Ends) {
    let bytes = draft.small();
    draft.say(x, &[Step::Write(bytes)]);
    draft.meet();
    draft.say(x, &[Step::Abort]);
    draft.say(y, &[Step::Abort]);
}

fn vanish_idle(draft: &mut Draft, Ends { x, y }: Ends) {
    draft.meet();
    draft.say(x, &[Step::Vanish]);
    draft.say(y, &[Step::ReadToEnd]);
}

fn vanish_written_to(draft: &mut Draft, Ends { x, y }: Ends) {
    let pause = draft.milliseconds(300);
    draft.say(x, &[Step::Await(1), Step::Pause(pause), Step::Vanish]);
    draft.say(y, &[Step::Flood, Step::ReadToEnd]);
}

fn vanish_with_bytes(draft: &mut Draft, Ends { x, y }: Ends) {
    let bytes = draft.modest();
    draft.say(x, &[Step::Write(bytes), Step::Vanish]);
    draft.say(y, &[Step::ReadToEnd]);
}

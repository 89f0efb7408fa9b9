//! Recovers payloads from repair symbols: the receiver's half of RFC 8681, by elimination as symbols come (pure).

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    arena::{Arena, Entry},
    coefficients,
    field::{self, MOST_TERMS, Sum, add_times},
    memory::{RepairMemory, Reserved},
    symbol::{END_OF_NUMBERS, LENGTH_BYTES, MOST_PAYLOAD, MOST_WINDOW, Repair},
};

/// How many numbers the decoder looks back: two windows, so that a repair that comes late still finds its sources.
const SPAN: usize = 2 * MOST_WINDOW;

/// Places of a window that cost as much to fill as a symbol to multiply and add: each takes some 8 ns.
const PLACES_PER_SYMBOL: u64 = 4;

/// The place of a number in a table of [`SPAN`].
const fn place(number: u64) -> usize {
    number as usize % SPAN
}

/// Limits on what the decoder remembers, and how long.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLimits {
    /// How long a missing payload may still be handed out: the time from the first later payload.
    pub deadline: Duration,
    /// How long a payload stays of use to others: at least the deadline, and the age that repairs cover.
    pub age: Duration,
    /// Memory of payloads, in blocks of 16 KiB and at least one of them.
    pub bytes: usize,
    /// Repairs whose payloads are not known yet; each has up to the bytes of a symbol, and a table of [`SPAN`].
    pub equations: usize,
    pub payload_bytes: usize,
}

/// What became of a payload that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceOutcome {
    Taken,
    /// It was received or recovered before.
    Known,
    /// It lies before the last [`SPAN`] numbers, is older than the limit, or one that no peer reaches.
    Outside,
    /// It is longer than the limit, or there is no memory for it.
    NoRoom,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepairOutcome {
    /// It tells something of missing payloads, and may have recovered some.
    Taken,
    /// All that it tells was known.
    Redundant,
    /// Its window lies outside of the numbers that are remembered.
    Outside,
    /// It is longer or shorter than any repair, or than a payload that it covers, or contradicts other symbols.
    Malformed,
    /// There are as many equations as there may be.
    NoRoom,
}

/// Counts of payloads, repairs and work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoderCounts {
    pub recovered: u64,
    /// Payloads that were recovered after their deadline.
    pub late: u64,
    pub redundant: u64,
    pub malformed: u64,
    /// Symbols that were multiplied and added: what a peer's repairs cost.
    pub work: u64,
}

/// Payloads by number, known and missing, and equations for the missing ones.
///
/// ```text
///            base          window of a repair           next
/// forgotten … | known | missing | known | missing | known | →
/// ```
///
/// An equation says which sum a combination of missing payloads has. The equations are in reduced echelon form: the oldest payload of
/// each has the coefficient 1 there and 0 in all others. So an equation with one payload has its value, and when the oldest
/// payload is forgotten, at most the one equation that begins with it goes too.
///
/// A repair multiplies and adds at most `MOST_WINDOW + 2 × equations + 1` symbols, a payload at most `3 × equations + 1`; what goes
/// through tables beside that counts as well.
#[derive(Debug)]
pub struct Decoder {
    pub(super) limits: DecoderLimits,
    base: u64,
    next: u64,
    /// The numbers from `base` to `next`, by [`place`].
    payloads: Box<[Option<Payload>; SPAN]>,
    arena: Arena,
    missing: usize,
    equations: Vec<Equation>,
    spare: Vec<Equation>,
    pub counts: DecoderCounts,
    /// The memory of the tables and of the equations.
    _reserved: Reserved,
}

#[derive(Debug)]
struct Payload {
    /// When it came, or was seen to be missing.
    seen: Instant,
    /// Its symbol; `None` while it is missing.
    symbol: Option<Entry>,
}

#[derive(Debug)]
struct Equation {
    /// The number of its oldest payload.
    oldest: u64,
    /// The coefficient of each payload, indexed by its [`place`].
    coefficients: Box<[u8; SPAN]>,
    sum: Vec<u8>,
}

impl Decoder {
    /// A decoder within `memory`; `None` if it has no room for the tables and as many equations as there may be.
    #[must_use]
    pub fn new(limits: DecoderLimits, memory: &Arc<RepairMemory>) -> Option<Self> {
        let payload_bytes = limits.payload_bytes.min(MOST_PAYLOAD);
        let limits = DecoderLimits { payload_bytes, equations: limits.equations.min(MOST_TERMS), ..limits };
        let equation = SPAN + LENGTH_BYTES + payload_bytes;
        let mut reserved = Reserved::of(memory);
        if !reserved.grow(size_of::<[Option<Payload>; SPAN]>() + limits.equations * equation) {
            return None;
        }
        let payloads = Box::new([const { None }; SPAN]);
        Some(Self {
            limits,
            base: 0,
            next: 0,
            payloads,
            arena: Arena::new(limits.bytes, memory),
            missing: 0,
            equations: Vec::new(),
            spare: Vec::new(),
            counts: DecoderCounts::default(),
            _reserved: reserved,
        })
    }

    /// Changes how long payloads may be missing, and how long they stay of use.
    pub fn set_times(&mut self, deadline: Duration, age: Duration) {
        self.limits.deadline = deadline;
        self.limits.age = age;
    }

    /// Takes a payload that was received, and hands out those that are known with it.
    pub fn source(
        &mut self,
        number: u64,
        payload: &[u8],
        now: Instant,
        recovered: &mut impl FnMut(u64, &[u8]),
    ) -> SourceOutcome {
        if number < self.base || number >= END_OF_NUMBERS {
            return SourceOutcome::Outside;
        }
        if payload.len() > self.limits.payload_bytes {
            return SourceOutcome::NoRoom;
        }
        self.forget(now);
        if number >= self.next {
            self.advance(number + 1, now);
        }
        let known = |payload: &Option<Payload>| payload.as_ref().map(|payload| payload.symbol.is_some());
        match known(&self.payloads[place(number)]) {
            _ if number < self.base => return SourceOutcome::Outside,
            Some(true) | None => return SourceOutcome::Known,
            Some(false) => {}
        }
        let length = (payload.len() as u16).to_be_bytes();
        if !self.know(number, &length, payload) {
            return SourceOutcome::NoRoom;
        }
        if !self.equations.is_empty() {
            self.substitute(number);
            self.hand_out(now, recovered);
        }
        SourceOutcome::Taken
    }

    /// Takes a repair with its symbol, and hands out the payloads that are known with it.
    pub fn repair(
        &mut self,
        repair: &Repair,
        symbol: &[u8],
        now: Instant,
        recovered: &mut impl FnMut(u64, &[u8]),
    ) -> RepairOutcome {
        let outcome = self.take_repair(repair, symbol, now);
        match outcome {
            RepairOutcome::Taken => self.hand_out(now, recovered),
            RepairOutcome::Redundant => self.counts.redundant += 1,
            RepairOutcome::Malformed => self.counts.malformed += 1,
            RepairOutcome::Outside | RepairOutcome::NoRoom => {}
        }
        outcome
    }

    #[must_use]
    pub fn equations(&self) -> usize {
        self.equations.len()
    }

    #[must_use]
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
    }

    fn take_repair(&mut self, repair: &Repair, symbol: &[u8], now: Instant) -> RepairOutcome {
        let lengths = LENGTH_BYTES..=self.limits.payload_bytes + LENGTH_BYTES;
        let window = usize::from(repair.window);
        if !lengths.contains(&symbol.len()) || window == 0 || window > MOST_WINDOW {
            return RepairOutcome::Malformed;
        }
        self.forget(now);
        if repair.first < self.base || repair.first >= END_OF_NUMBERS {
            return RepairOutcome::Outside;
        }
        if repair.end() > self.next {
            self.advance(repair.end(), now);
        }
        if repair.first < self.base {
            return RepairOutcome::Outside;
        }
        // A look at each payload of the window, and a coefficient for each.
        self.counts.work += u64::from(repair.window) / PLACES_PER_SYMBOL;
        if (repair.first..repair.end())
            .any(|number| self.symbol(number).is_some_and(|source| source.len() > symbol.len()))
        {
            return RepairOutcome::Malformed;
        }
        if self.missing == 0 || (repair.first..repair.end()).all(|number| self.symbol(number).is_some()) {
            return RepairOutcome::Redundant;
        }
        if self.equations.len() >= self.limits.equations {
            return RepairOutcome::NoRoom;
        }
        let mut coefficients = [0; MOST_WINDOW];
        let coefficients = &mut coefficients[..window];
        coefficients::generate(repair.key, repair.density, coefficients);
        let mut equation = self.blank(symbol);
        let mut known = Sum::new();
        for (number, coefficient) in (repair.first..).zip(coefficients) {
            match self.symbol(number) {
                Some(source) => known.add(*coefficient, source),
                None => equation.coefficients[place(number)] = *coefficient,
            }
        }
        known.add_to(&mut equation.sum);
        let work = known.terms as u64;
        self.counts.work += work;
        self.insert(equation)
    }

    /// The symbol of a payload that is known and remembered.
    fn symbol(&self, number: u64) -> Option<&[u8]> {
        if !(self.base..self.next).contains(&number) {
            return None;
        }
        Some(self.arena.get(self.payloads[place(number)].as_ref()?.symbol.as_ref()?))
    }

    /// Numbers up to `end` are missing from now on, until they come.
    fn advance(&mut self, end: u64, now: Instant) {
        let span = SPAN as u64;
        self.forget_before(end.saturating_sub(span));
        self.next = self.next.max(self.base);
        for number in self.next..end {
            self.payloads[place(number)] = Some(Payload { seen: now, symbol: None });
            self.missing += 1;
        }
        self.next = end;
    }

    /// Forgets what is older than the limit.
    fn forget(&mut self, now: Instant) {
        while self.base < self.next
            && let Some(payload) = &self.payloads[place(self.base)]
            && payload.seen + self.limits.age < now
        {
            self.forget_before(self.base + 1);
        }
    }

    fn forget_before(&mut self, base: u64) {
        for number in self.base..base.min(self.next) {
            match self.payloads[place(number)].take() {
                Some(Payload { symbol: Some(symbol), .. }) => self.arena.remove(symbol),
                Some(Payload { symbol: None, .. }) => {
                    self.missing -= 1;
                    self.drop_equation(number);
                }
                None => {}
            }
        }
        self.base = self.base.max(base);
    }

    /// Keeps the symbol of a missing payload. Older payloads make room for it, but not the missing ones behind them.
    fn know(&mut self, number: u64, head: &[u8], tail: &[u8]) -> bool {
        loop {
            if let Some(symbol) = self.arena.add(head, tail) {
                if let Some(payload) = &mut self.payloads[place(number)] {
                    payload.symbol = Some(symbol);
                    self.missing -= 1;
                }
                return true;
            }
            if self.base >= number {
                return false;
            }
            self.forget_before(self.base + 1);
        }
    }

    /// A payload is known now: takes it out of the equations.
    fn substitute(&mut self, number: u64) {
        let mut equations = mem::take(&mut self.equations);
        let (mut without_oldest, mut work) = (None, 0);
        if let Some(symbol) = self.symbol(number) {
            for (index, equation) in equations.iter_mut().enumerate() {
                let coefficient = mem::take(&mut equation.coefficients[place(number)]);
                if coefficient != 0 {
                    add_times(coefficient, symbol, &mut equation.sum);
                    work += 1;
                }
                if equation.oldest == number {
                    without_oldest = Some(index);
                }
            }
        }
        let again = without_oldest.map(|index| equations.swap_remove(index));
        self.equations = equations;
        self.counts.work += work;
        if let Some(equation) = again {
            // A contradiction counts as one here, too: the peer's symbols do not fit together.
            match self.insert(equation) {
                RepairOutcome::Malformed => self.counts.malformed += 1,
                RepairOutcome::Taken
                | RepairOutcome::Redundant
                | RepairOutcome::Outside
                | RepairOutcome::NoRoom => {}
            }
        }
    }

    /// Reduces an equation by the others and these by it.
    fn insert(&mut self, mut equation: Equation) -> RepairOutcome {
        let mut others = Sum::new();
        for other in &self.equations {
            let coefficient = equation.coefficients[place(other.oldest)];
            if coefficient != 0 {
                add_times(coefficient, &other.coefficients[..], &mut equation.coefficients[..]);
                others.add(coefficient, &other.sum);
                let len = equation.sum.len().max(other.sum.len());
                equation.sum.resize(len, 0);
            }
        }
        others.add_to(&mut equation.sum);
        let work = others.terms as u64;
        self.counts.work += work;
        let oldest = (self.base..self.next).find(|number| equation.coefficients[place(*number)] != 0);
        let Some(oldest) = oldest else {
            let outcome = match equation.sum.iter().any(|byte| *byte != 0) {
                true => RepairOutcome::Malformed,
                false => RepairOutcome::Redundant,
            };
            self.spare.push(equation);
            return outcome;
        };
        equation.oldest = oldest;
        let scale = field::inverse(equation.coefficients[place(oldest)]);
        if scale != 1 {
            let (coefficients, sum) = (*equation.coefficients, mem::take(&mut equation.sum));
            *equation.coefficients = [0; SPAN];
            add_times(scale, &coefficients, &mut equation.coefficients[..]);
            equation.sum.resize(sum.len(), 0);
            add_times(scale, &sum, &mut equation.sum);
            self.counts.work += 1;
        }
        for other in &mut self.equations {
            let coefficient = other.coefficients[place(oldest)];
            if coefficient != 0 {
                add_times(coefficient, &equation.coefficients[..], &mut other.coefficients[..]);
                let len = equation.sum.len().max(other.sum.len());
                other.sum.resize(len, 0);
                add_times(coefficient, &equation.sum, &mut other.sum);
                self.counts.work += 1;
            }
        }
        self.equations.push(equation);
        RepairOutcome::Taken
    }

    /// Hands out each payload that has an equation for itself, oldest first.
    fn hand_out(&mut self, now: Instant, recovered: &mut impl FnMut(u64, &[u8])) {
        loop {
            self.counts.work += self.equations.len() as u64 / 2;
            let alone = |equation: &&Equation| {
                equation.coefficients.iter().filter(|coefficient| **coefficient != 0).count() == 1
            };
            let Some(number) = self.equations.iter().filter(alone).map(|equation| equation.oldest).min()
            else {
                return;
            };
            let Some(equation) = self.take_equation(number) else { return };
            self.hand_out_one(number, &equation.sum, now, recovered);
            self.spare.push(equation);
        }
    }

    fn hand_out_one(
        &mut self,
        number: u64,
        symbol: &[u8],
        now: Instant,
        recovered: &mut impl FnMut(u64, &[u8]),
    ) {
        let Some(payload) = payload_of(symbol).filter(|payload| payload.len() <= self.limits.payload_bytes)
        else {
            self.counts.malformed += 1;
            return;
        };
        let in_time = self.payloads[place(number)]
            .as_ref()
            .is_some_and(|payload| now < payload.seen + self.limits.deadline);
        // Without memory for it a later repair could give it again.
        if !self.know(number, &symbol[..LENGTH_BYTES], payload) {
            return;
        }
        if in_time {
            self.counts.recovered += 1;
            recovered(number, payload);
        } else {
            self.counts.late += 1;
        }
    }

    /// An equation without coefficients, with this sum.
    fn blank(&mut self, symbol: &[u8]) -> Equation {
        let spare = self.spare.pop();
        let mut equation = spare.unwrap_or_else(|| Equation {
            oldest: 0,
            coefficients: Box::new([0; SPAN]),
            sum: Vec::new(),
        });
        equation.coefficients.fill(0);
        equation.sum.clear();
        equation.sum.extend_from_slice(symbol);
        equation
    }

    fn take_equation(&mut self, oldest: u64) -> Option<Equation> {
        let index = self.equations.iter().position(|equation| equation.oldest == oldest)?;
        Some(self.equations.swap_remove(index))
    }

    fn drop_equation(&mut self, oldest: u64) {
        if let Some(equation) = self.take_equation(oldest) {
            self.spare.push(equation);
        }
    }
}

/// The payload in a symbol; `None` if its length lies, or bytes behind it are not zero.
fn payload_of(symbol: &[u8]) -> Option<&[u8]> {
    let (length, rest) = symbol.split_first_chunk()?;
    let (payload, padding) = rest.split_at_checked(u16::from_be_bytes(*length).into())?;
    padding.iter().all(|byte| *byte == 0).then_some(payload)
}

#[cfg(test)]
#[path = "decoder_tests.rs"]
mod tests;

//! A line of a dialler that has several: what the listener is told of it when a lane is opened.

use crate::{
    messages::{MAX_LANES, MessageError, narrow},
    protobuf,
};

/// The most lines of a session: with eight lanes each they fill [`MAX_LANES`].
pub const MOST_LINES: u8 = 8;

/// The largest weight of a line.
pub const MOST_WEIGHT: u16 = 256;

/// What is known of a line before anything was measured, and what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTerms {
    /// Bits a second of IP packets that it carries; `None`: not said.
    pub rate: Option<u64>,
    /// Its part beside other lines where no rate is known: 1 to [`MOST_WEIGHT`].
    pub weight: u16,
    /// Whether its bytes cost money: it carries payloads only if no other line can that is no backup.
    pub metered: bool,
    /// Whether it carries payloads only if no other line can.
    pub backup: bool,
}

/// The line of a lane, as its opening says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLine {
    /// The number of lanes of each line of the session; lane `i` is on line `i / lanes`.
    pub lanes: u8,
    /// What the line carries, and what it costs.
    pub terms: LineTerms,
}

/// What an end says of a line between openings of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineState {
    /// The number of the line, below [`MOST_LINES`].
    pub line: u8,
    /// Whether the sender has nothing from the line, though it waits for answers there, or has lost it: the receiver is to send on others.
    pub unheard: bool,
    /// What the line carries and costs from now on; `None`: as before. From the dialler only.
    pub terms: Option<LineTerms>,
}

impl LineState {
    /// The state of a line, as it is on the wire.
    pub(crate) fn of_wire(state: protobuf::LineState) -> Result<Self, MessageError> {
        let protobuf::LineState { line, unheard, terms } = state;
        Ok(Self {
            line: narrow("line", line, 0..=MOST_LINES - 1)?,
            unheard,
            terms: terms.map(terms_of_wire).transpose()?,
        })
    }
}

impl From<&LineState> for protobuf::LineState {
    fn from(state: &LineState) -> Self {
        let LineState { line, unheard, terms } = *state;
        // The number of lanes is that of the openings, and not said again.
        Self { line: line.into(), unheard, terms: terms.map(|terms| line_of(0, terms)) }
    }
}

impl LaneLine {
    /// The number of the line that lane `index` is on.
    #[must_use]
    pub fn number(&self, index: u8) -> u8 {
        index / self.lanes.max(1)
    }

    /// The line of lane `index`, as it is on the wire.
    pub(crate) fn of_wire(line: protobuf::Line, index: u8) -> Result<Self, MessageError> {
        let line = Self { lanes: narrow("lanes", line.lanes, 1..=MAX_LANES)?, terms: terms_of_wire(line)? };
        let number = line.number(index);
        if number >= MOST_LINES {
            return Err(MessageError::Range { field: "line", value: number.into() });
        }
        Ok(line)
    }
}

impl From<&LaneLine> for protobuf::Line {
    fn from(line: &LaneLine) -> Self {
        line_of(line.lanes, line.terms)
    }
}

fn terms_of_wire(line: protobuf::Line) -> Result<LineTerms, MessageError> {
    let protobuf::Line { lanes: _, rate, weight, metered, backup } = line;
    let weight = narrow("weight", weight.max(1), 1..=MOST_WEIGHT)?;
    Ok(LineTerms { rate: Some(rate).filter(|rate| *rate > 0), weight, metered, backup })
}

fn line_of(lanes: u8, terms: LineTerms) -> protobuf::Line {
    let LineTerms { rate, weight, metered, backup } = terms;
    // The default is not written.
    let weight = if weight == 1 { 0 } else { weight.into() };
    protobuf::Line { lanes: lanes.into(), rate: rate.unwrap_or(0), weight, metered, backup }
}

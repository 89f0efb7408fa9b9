//! Several lines to one peer: which of them carries a bucket. Everything here is pure, and time is an argument.
//!
//! | question | file |
//! |---|---|
//! | the line of a bucket, and when a bucket leaves it | `table.rs`, at each worker |
//! | which lines are well, suspect, or held after they came back | `watch.rs`, at the session owner |
//! | the lanes of a session over its lines | `spread.rs`, at each worker |
//! | how much each line carried within the last second | `loads.rs`, shared by the workers |
//! | numbers of payloads that travel on two lines, and which of two that come is the first | `copies.rs`, shared by the workers |
//!
//! ```text
//!   hash ── lowest 8 bits ──► bucket ── table ──► line ┐
//!                               └── mod lanes of a line ─► lane = line × lanes + bucket mod lanes
//! ```

mod copies;
mod loads;
mod spread;
mod table;
mod watch;

pub use copies::{Arrival, CopyCounts, CopyWindow, CopyWindows, MOST_SERIES, SharedCopies, WINDOW};
pub use loads::LineLoads;
pub use spread::{LinePool, LineTraffic, Lines, Place, count_on_line, on_line};
pub use table::{LineTable, LineView, Rank};
pub use watch::{Cause, LineWatch, Standing};
pub use wire::line::{LineTerms, MOST_LINES};

const _: () = assert!(rate::MOST_LINES == MOST_LINES as usize, "each line has an account");

#[cfg(test)]
mod tests;

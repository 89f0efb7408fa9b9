//! Captures as qlog files, for `culvert qlog`.
//!
//! | question | file |
//! |---|---|
//! | which captures run, who asks for what they have, when they end | `captures.rs` |
//! | how records become qlog events | `events.rs` |
//! | the file: header and framing | `text.rs` |

mod captures;
mod events;
mod text;

pub use captures::{Captures, Order, Refusal, Taken};

#[cfg(test)]
mod tests;

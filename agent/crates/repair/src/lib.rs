//! Repair of lost datagrams: retransmission, a sliding-window code, and the order of delivery. Pure state; nothing here sends or waits:
//! `dataplane/src/datapath/repair.rs` does.
//!
//! | question | file |
//! |---|---|
//! | what a number, a symbol and a repair's header are | `symbol.rs` |
//! | which payloads the sender can still repair, and what a retransmission may cost | `sent.rs`, `credit.rs` |
//! | when a repair symbol is due, and what is in it | `encoder.rs` |
//! | which payloads repair symbols give back | `decoder.rs` |
//! | which coefficients, and how symbols are multiplied | `coefficients.rs`, `field.rs` |
//! | which numbers are missing, and when to ask for them | `gaps.rs` |
//! | how late what was overtaken comes | `lateness.rs` |
//! | when a payload is delivered | `sequencer.rs` |
//! | which means, and how much of it | `plan.rs` |
//! | whether repair itself makes the path lose more | `strain.rs` |
//! | what flows hear of congestion while their losses are repaired | `signals.rs` |
//! | where the bytes are, and how many there may be | `arena.rs`, `memory.rs` |
//! | one stream of numbers at either end | `sender.rs`, `receiver.rs` |
//! | all streams of a lane | `lane.rs` |
//! | what is counted | `counts.rs` |
//! | what holds for any peer (tests and fuzzing) | `properties.rs` |
//!
//! ```text
//! sender:    payload → Sent::push → number    Encoder::sent, Encoder::repair → repair symbols
//!                      Sent::answer ← Ask     Planner::update ← losses, round trip, queue
//! receiver:  payload → Decoder::source → recovered payloads ┐
//!            repair  → Decoder::repair → recovered payloads ┴→ Sequencer::receive → delivered payloads; Sequencer::ask → Ask
//! ```
//!
//! A payload has a number for each opening of a lane. It is delivered once, byte for byte, never after its deadline, which runs from
//! the first later payload. What a peer sends can only spoil its own payloads: memory, requests and work of a call are bounded, and
//! counted.

mod arena;
mod coefficients;
mod counts;
mod credit;
mod decoder;
mod encoder;
mod field;
mod gaps;
mod lane;
mod lateness;
mod memory;
mod plan;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
mod receiver;
mod sender;
mod sent;
mod sequencer;
mod signals;
mod strain;
mod symbol;

#[cfg(test)]
mod flow_tests;
#[cfg(test)]
mod path_tests;
#[cfg(test)]
mod tcp_tests;

pub use counts::{ReceiverCounts, SenderCounts};
pub use decoder::{Decoder, DecoderCounts, DecoderLimits, RepairOutcome, SourceOutcome};
pub use encoder::{Coding, Encoder};
pub use gaps::{Ask, Asking};
pub use lane::LaneRepair;
pub use memory::{RepairMemory, Reserved};
pub use plan::{Path, Plan, Planner};
pub use receiver::{DISTANCE_BYTES, Delivered, Receiver};
pub use sender::{PathCounts, RepairClass, Repaired, Sender};
pub use sent::{Answer, Sent, SentLimits};
pub use sequencer::{Arrival, Outcome, Sequencer, SequencerLimits, Waiting};
pub use symbol::{Density, MOST_PAYLOAD, MOST_WINDOW, REPAIR_HEADER_BYTES, Repair};

//! A peer that harms on purpose: the handshake of `docs/wire-format.md` with a knock, then one [`Attack`] as fast as its share of a
//! processor allows. Connections are stock quinn; messages, payloads and lanes are written here from the document, with nothing of the
//! agent's code but its knock, without which the agent would say nothing.
//!
//! | question | file |
//! |---|---|
//! | which attacks there are, and what each sends | `attack.rs` |
//! | what fills the packets of a lane, or the DATAGRAM frames of standard mode | `contents.rs` |
//! | the attacks on the control connection and its streams | `rounds.rs` |
//! | ClientHellos that come to nothing, connections that join a session | `handshakes.rs` |
//! | preshared keys | `rotations.rs` |
//! | IP packets | `packets.rs` |
//! | how much of a processor and how many packets it may take | `duty.rs` |
//! | dialling, the hellos, the control stream | `session.rs` |
//! | the control messages, by hand | `messages.rs` |
//! | a lane: its keys, its packets, its socket | `lane.rs`, `keys.rs` |
//! | a socket that counts what it sends, and loses a packet when asked to | `socket.rs` |

mod attack;
mod contents;
mod duty;
mod handshakes;
mod keys;
mod lane;
mod messages;
mod packets;
pub(crate) mod rotations;
mod rounds;
mod session;
mod socket;

#[expect(dead_code, reason = "the attacker reads only what it needs")]
#[path = "../../../interop/payload.rs"]
mod payload;
#[cfg_attr(not(test), expect(dead_code, reason = "the attacker reads only what it needs"))]
#[path = "../../../interop/protobuf.rs"]
mod protobuf;
#[expect(dead_code, reason = "the attacker has one key, and dials or listens by it")]
#[path = "../../../interop/tls.rs"]
mod tls;

pub(crate) use self::{
    attack::{Attack, Mode, Options, run},
    duty::Pace,
};

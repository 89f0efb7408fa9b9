//! A worker: one thread's share of the agent, driven in turns.
//!
//! [`Worker::turn`] runs the steps in order. Each part has a folder and owns its state. A part calls those below it; what it asks
//! of parts above is an effect in `context/`, carried out when the step is over.
//!
//! ```text
//!                       turn      the order of steps, and what several parts do together
//!                         │
//!                      streams    TCP forwards
//!                         │
//!                      session    control connections, the sessions of peers
//!                ┌────────┼────────┐
//!              decoy    device     │
//!                └────────┤        │
//!                       local   outside    datagrams on their way; datagrams that belong to no lane
//!                         │        │
//!                       lanes      │       the lanes that this worker hosts
//!                         └────────┤
//!                               context    what all parts use: peers, sockets, timers, sources
//!                                  │
//!                               report     what other threads read and ask
//! ```
//!
//! Each folder's `mod.rs` says which file answers which question. `shell.rs` is the thread and the runtime around a worker.
//! `docs/architecture.md` lists the parts and follows five paths through them.
//!
//! A worker has no thread and no clock: `turn` takes the time. [`net::Net`] provides the sockets: the kernel's in the daemon, a
//! network in memory in tests.

/// Writes a line to the log if a throttle lets it through: the level, the throttle's answer, the fields, the text. Field
/// `suppressed` says how many like it were held back before, if any were. Fields and text are evaluated only for a line that is written.
macro_rules! throttled {
    ($level:ident, $allowed:expr, { $($field:tt)+ }, $($text:tt)+) => {
        if let Some(suppressed) = $allowed {
            tracing::$level!($($field)+, suppressed = base::throttle::counted(suppressed), $($text)+);
        }
    };
    ($level:ident, $allowed:expr, $($text:tt)+) => {
        if let Some(suppressed) = $allowed {
            tracing::$level!(suppressed = base::throttle::counted(suppressed), $($text)+);
        }
    };
}

mod context;
mod decoy;
mod device;
mod lanes;
mod local;
mod outside;
mod report;
mod session;
pub mod shell;
mod streams;
mod turn;

pub use context::{setup::Setup, work::TurnWork};
pub use device::tun::{first_mtu, most_mtu};
pub use lanes::LaneLimits;
pub use local::unauthenticated::Unauthenticated;
pub use outside::{
    endpoint::{StartError, remedy},
    knocks::used_knocks,
};
pub use report::{
    Publisher,
    families::Moment,
    forwards_request::{Ended, ForwardEnd, ForwardList, ForwardRows, ForwardsPortion, MOST_FORWARDS},
    inbox::{Command, Inbox},
    inspection_request::{AskedRoutes, Asks, Inspection, MOST_FLOWS, WorkerView},
    publication::Publication,
    stats::{Ceiling, DeviceSnapshot, InUse, Snapshot, Snapshots, Summary, TcpEnd, TcpRefusal},
};
#[cfg(feature = "inspection")]
pub use turn::inspection::HeldMemory;
pub use turn::{Turn, Worker, start::Addresses};

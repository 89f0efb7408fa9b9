//! Defaults by name, for who needs one without a configuration. `section.rs` says where they are declared.

pub use crate::sections::{CONTROL_SOCKET, STATE_DIR};
use crate::{Access, Limits, Queue, Transport, sections::socket_buffer_bytes};

/// The defaults of the keys of `[transport]`.
pub const TRANSPORT: Transport = Transport::DEFAULT;

/// The defaults of the keys of `[access]`.
pub const ACCESS: Access = Access::DEFAULT;

/// The defaults of the keys of `peer.queue`.
pub const QUEUE: Queue = Queue::DEFAULT;

/// The defaults of the keys of `[limits]`.
pub const LIMITS: Limits = Limits::DEFAULT;

/// What `limits.receive_buffer = "auto"` comes to with the other defaults: 4 MiB, with which docs/performance.md was measured.
pub const SOCKET_BUFFER_BYTES: usize = socket_buffer_bytes(LIMITS.receive_rate, QUEUE.time);

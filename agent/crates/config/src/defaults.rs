//! Defaults by name, for who needs one without a configuration. `section.rs` says where they are declared.

use crate::{Access, Limits, Queue, Transport, sections::socket_buffer_bytes};

/// The defaults of the keys of `[transport]`.
pub const TRANSPORT: Transport = Transport::DEFAULT;

/// `identity.state_dir`: where systemd's `StateDirectory=` puts it.
pub const STATE_DIR: &str = "/var/lib/culvert";

/// `control.socket`: where systemd's `RuntimeDirectory=` makes a folder for it.
pub const CONTROL_SOCKET: &str = "/run/culvert/culvert.sock";

/// The defaults of the keys of `[access]`.
pub const ACCESS: Access = Access::DEFAULT;

/// The defaults of the keys of `peer.queue`.
pub const QUEUE: Queue = Queue::DEFAULT;

/// The defaults of the keys of `[limits]`.
pub const LIMITS: Limits = Limits::DEFAULT;

/// What `limits.receive_buffer = "auto"` comes to with the other defaults: 4 MiB, with which docs/performance.md was measured.
pub const SOCKET_BUFFER_BYTES: usize = socket_buffer_bytes(LIMITS.receive_rate, QUEUE.time);

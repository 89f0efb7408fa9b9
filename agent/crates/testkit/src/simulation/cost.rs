//! What a turn would take on a real machine: virtual time stands still in it, however much it does.

use std::time::Duration;

use engine::worker::TurnWork;
use net::memory::Calls;

/// The longest that a turn may take by this model, beside a batch that is taken as a whole: what others on the worker wait for.
pub const MOST_TURN: Duration = Duration::from_millis(5);

/// What was counted while a turn ran.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) calls: Calls,
    /// Packets that were written to the TUN device.
    pub(super) written: usize,
}

/// The time that a turn takes by the costs of its parts on one 2.5 GHz core: a system call that sends or receives; what each datagram
/// adds, to GSO or GRO and to be opened or sealed; each of its bytes; a frame that is read; a packet that quinn-proto reads or makes; a
/// unit of control messages; an event of a connection; a socket that is opened; a flow that is looked at. `tests/perf/turn_cost` compares
/// it with the release program: that took 0.6 to 1.8 times as long.
pub(super) fn of(work: &TurnWork, counted: Counted) -> Duration {
    const CALL: u64 = 1_500;
    const DATAGRAM: u64 = 150;
    const BYTES_PER_NANO: u64 = 2;
    const FRAME: u64 = 100;
    const QUIC_PACKET: u64 = 3_000;
    const UNIT: u64 = 1_000;
    const EVENT: u64 = 300;
    const OPENED: u64 = 10_000;
    const WALKED: u64 = 50;
    let nanos = (counted.calls.calls + counted.written as u64) * CALL
        + counted.calls.datagrams * DATAGRAM
        + counted.calls.bytes / BYTES_PER_NANO
        + work.frames * FRAME
        + work.quic_packets * QUIC_PACKET
        + work.message_units * UNIT
        + work.events * EVENT
        + work.opened * OPENED
        + work.walked * WALKED;
    Duration::from_nanos(nanos)
}

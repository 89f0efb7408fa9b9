//! Datagrams of the underlay that are no lane's of this worker: another worker's, a control connection's, or a stranger's.

use std::time::Instant;

use dataplane::datapath::downlink::{Downlink, Outcome, Outside, Received};
use gate::{Arrival, Gate, Verdict};
use net::{batch::Meta, steering};
use wire::ids::WorkerId;

use crate::{control::driver::Control, peer::Peers, worker::strangers::Strangers};

/// The way of datagrams from the underlay to local sockets, at a worker.
pub(super) type WorkerDownlink<'a> = Downlink<'a, Peers, Gateway<'a>>;

/// The gate, and what lies behind it.
pub(super) struct Gateway<'a> {
    pub(super) gate: &'a mut Gate,
    /// The control connections, which take the datagrams that pass the gate.
    pub(super) control: &'a mut Control,
    /// The datagrams that strangers sent in this turn.
    pub(super) strangers: &'a mut Strangers,
    /// Which worker this is, and of how many.
    pub(super) worker: WorkerId,
}

impl Outside for Gateway<'_> {
    fn datagram(&mut self, received: Received, meta: &Meta, datagram: &[u8], now: Instant) -> Outcome<'_> {
        let Received { underlay, port } = received;
        if let Some(port) = port
            && let owner = steering::owner(datagram, self.worker.count)
            && owner != self.worker.index
        {
            // Strangers must not fill the way to another worker, so they are told apart here already.
            if self.gate.screen(datagram, now) {
                return Outcome::HandOff { worker: owner, port };
            }
            self.strangers.push(port, *meta, datagram);
            return Outcome::Taken;
        }
        let arrival = Arrival { source: meta.source, listening: port.is_some(), room: self.control.room() };
        let admission = match self.gate.check(datagram, arrival, now) {
            Verdict::Pass => None,
            Verdict::Admit(admission) => Some(admission),
            Verdict::Retry => return Outcome::Reply(self.gate.retry_packet()),
            Verdict::Unauthenticated => {
                if let Some(port) = port {
                    self.strangers.push(port, *meta, datagram);
                }
                return Outcome::Taken;
            }
        };
        let begun = self.control.datagram(underlay, meta, datagram, admission, now);
        if let Some(admission) = admission.filter(|_| !begun) {
            self.gate.handshake_ended(&admission);
        }
        Outcome::Taken
    }
}

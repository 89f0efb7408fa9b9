//! Datagrams of the underlay that belong to no lane of this worker: they are for another worker, for a control connection, or from
//! an unauthenticated sender.

use std::time::Instant;

use base::ids::WorkerId;
use dataplane::{
    datapath::{
        downlink::{Downlink, Outcome, Outside, Received},
        shares::Shares,
    },
    lanes::UnderlayId,
};
use gate::{Arrival, Gate, Verdict, admission::Admission};
use net::{batch::Meta, steering};

use crate::{
    control::driver::{Begins, Control, Given},
    peer::Peers,
    worker::local::unauthenticated::Unauthenticated,
};

pub(crate) mod endpoint;
pub(crate) mod knocks;

/// The downlink of a worker: the path of datagrams from the underlay to local sockets.
pub(crate) type WorkerDownlink<'a> = Downlink<'a, Peers, Gateway<'a>>;

/// The gate, the control connections behind it, and the queue of datagrams that it rejects.
pub(crate) struct Gateway<'a> {
    pub(crate) gate: &'a mut Gate,
    /// The control connections, which take the datagrams that pass the gate.
    pub(crate) control: &'a mut Control,
    /// Datagrams of unauthenticated senders in this turn.
    pub(crate) unauthenticated: &'a mut Unauthenticated,
    pub(crate) worker: WorkerId,
}

impl Outside for Gateway<'_> {
    fn datagram(
        &mut self,
        received: Received,
        meta: &Meta,
        datagram: &[u8],
        shares: &mut Shares,
        now: Instant,
    ) -> Outcome<'_> {
        let Received { underlay, port } = received;
        if self.gate.is_for_other_exit(datagram) {
            return Outcome::Taken;
        }
        if let Some(port) = port
            && let owner = steering::owner(datagram, self.worker.count)
            && owner != self.worker.index
        {
            // Unauthenticated senders must not fill the ring of another worker, so the gate screens their datagrams here.
            if self.gate.screen(datagram, now) {
                return Outcome::HandOff { worker: owner, port };
            }
            self.unauthenticated.push(port, *meta, datagram);
            return Outcome::Taken;
        }
        let arrival = Arrival {
            source: meta.source,
            validated: net::carrier::is_stream(&meta.source),
            listening: port.is_some(),
            room: self.control.acceptor.pending().room(),
        };
        self.gate.names_prove = self.control.guests.many_begin();
        let begins = match self.gate.check(datagram, arrival, now) {
            Verdict::Pass => Begins::Anyone,
            Verdict::Admit(admission) => Begins::Peer(admission),
            Verdict::Named => Begins::Guest,
            // A drained agent is silent to who dials it.
            Verdict::Retry if self.control.acceptor.is_closed() => return Outcome::Taken,
            Verdict::Retry => return Outcome::Reply(self.gate.retry_packet()),
            Verdict::Taken => return Outcome::Taken,
            Verdict::Unauthenticated => {
                if let Some(port) = port {
                    for earlier in self.gate.take_earlier() {
                        self.unauthenticated.push(port, *meta, &earlier);
                    }
                    self.unauthenticated.push(port, *meta, datagram);
                }
                return Outcome::Taken;
            }
        };
        if let Begins::Peer(admission) = begins {
            self.begin(underlay, meta, datagram, admission, shares, now);
            return Outcome::Taken;
        }
        for earlier in self.gate.take_earlier() {
            self.control.datagram(underlay, meta, &earlier, begins, shares, now);
        }
        match self.control.datagram(underlay, meta, datagram, begins, shares, now) {
            Given::Read => Outcome::Read,
            Given::Begun | Given::Nothing => Outcome::Taken,
        }
    }
}

impl Gateway<'_> {
    /// Begins a handshake with all datagrams of its ClientHello, in the order in which they came: `datagram` is the last.
    fn begin(
        &mut self,
        underlay: UnderlayId,
        meta: &Meta,
        datagram: &[u8],
        admission: Admission,
        shares: &mut Shares,
        now: Instant,
    ) {
        let earlier = self.gate.take_earlier();
        let mut all = earlier.iter().map(|earlier| &**earlier).chain([datagram]);
        let first = all.next().unwrap_or(datagram);
        if self.control.datagram(underlay, meta, first, Begins::Peer(admission), shares, now) != Given::Begun
        {
            return self.gate.handshake_ended(&admission);
        }
        for rest in all {
            self.control.datagram(underlay, meta, rest, Begins::Anyone, shares, now);
        }
    }
}

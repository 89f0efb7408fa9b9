//! Limits that are reached: their counts and log lines.
//!
//! Refusals are counted where they happen, in plain integers. With each publication the counts are compared with their previous
//! values, so nothing is formatted for a single refusal.

use std::{io, time::Instant};

use base::{
    counts::{Counts, PerKind},
    ids::PeerId,
    throttle::Throttle,
};
use net::process::is_out_of_descriptors;

use crate::worker::{
    context::{Context, timer::LOG_INTERVAL},
    report::stats::Ceiling,
};

/// Throttles of the log lines about limits, and counts of refusals that no other part has.
#[derive(Debug)]
pub(crate) struct Ceilings {
    logs: PerKind<Ceiling, Throttle>,
    /// Refusals; of a limit that another part counts, its count when it was last reported.
    pub(crate) counts: Counts<Ceiling>,
}

impl Ceilings {
    pub(crate) fn new() -> Self {
        Self { logs: PerKind::from_fn(|_| Throttle::new(LOG_INTERVAL)), counts: Counts::default() }
    }

    pub(crate) fn allow(&mut self, ceiling: Ceiling, now: Instant) -> Option<u64> {
        self.logs[ceiling].allow(now)
    }

    /// Counts a refusal, and says whether to log it.
    pub(crate) fn count(&mut self, ceiling: Ceiling, now: Instant) -> Option<u64> {
        self.counts[ceiling] += 1;
        self.allow(ceiling, now)
    }

    /// Takes over the count of another part, and says whether to log that it grew.
    pub(crate) fn follow(&mut self, ceiling: Ceiling, count: u64, now: Instant) -> Option<u64> {
        let before = std::mem::replace(&mut self.counts[ceiling], count);
        if count > before { self.allow(ceiling, now) } else { None }
    }
}

impl Context {
    /// Counts and logs that a TCP forward was refused because all peers together, or this one, have too many.
    pub(crate) fn tcp_ceiling_reached(&mut self, peer: PeerId, now: Instant) {
        let open = self.hub.streams.forwards();
        if open >= self.config.limits.tcp_streams {
            throttled!(
                warn,
                self.stats.ceilings.count(Ceiling::TcpStreams, now),
                { open },
                "limits.tcp_streams is reached: a TCP connection was refused (remedy: a higher one, and descriptors for it, \
                or a lower limits.tcp_streams_per_peer)"
            );
            return;
        }
        let Some(state) = self.peers.get(peer) else { return };
        throttled!(
            warn, self.stats.ceilings.count(Ceiling::TcpStreamsPerPeer, now),
            { peer = &**state.name(), open = state.forwards.here },
            "limits.tcp_streams_per_peer is reached: a TCP connection was refused (remedy: a higher one, or see what \
            opens so many)"
        );
    }

    /// Logs that windows of TCP forwards could not grow for lack of memory, if that is new. Worker 0 does so for all.
    pub(crate) fn report_stream_memory(&mut self, now: Instant) {
        let refused = self.hub.streams.refused();
        if self.id.index == 0 {
            throttled!(
                warn, self.stats.ceilings.follow(Ceiling::StreamBytes, refused, now),
                { limit = self.config.limits.stream_bytes, taken = self.hub.streams.taken() },
                "limits.stream_bytes is reached: TCP connections are slower than they could be (remedy: culvert status PEER lists \
                the forwards whose readers have stopped, and culvert forward end ID ends one; where none has, a higher limit if \
                there is memory)"
            );
        }
    }

    /// Logs the limits that a peer has reached since the last report.
    pub(crate) fn report_ceilings(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let [before, refused] = peer.reported.follow(&peer.data.relay);
        let more = |ceiling: Ceiling| refused[ceiling] > before[ceiling];
        let (name, limits, ceilings) =
            (&*peer.data.config.name, &self.config.limits, &mut self.stats.ceilings);
        let mut allow = |ceiling| if more(ceiling) { ceilings.allow(ceiling, now) } else { None };
        throttled!(
            warn, allow(Ceiling::Flows), { peer = name, limit = limits.flows },
            "limits.flows is reached: new flows are refused (remedy: a higher one, a shorter service.idle, or a lower \
            limits.flows_per_peer)"
        );
        throttled!(
            warn, allow(Ceiling::FlowsPerPeer), { peer = name, limit = limits.flows_per_peer },
            "limits.flows_per_peer is reached: new flows of the peer are refused (remedy: a higher one, or a shorter \
            service.idle)"
        );
        throttled!(
            warn, allow(Ceiling::QueueBytes), { peer = name, limit = limits.queue_bytes },
            "limits.queue_bytes is reached: what cannot be sent at once is dropped (remedy: a higher one if there is \
            memory, or smaller peer.queue.bytes and peer.queue.time)"
        );
        throttled!(
            warn, allow(Ceiling::RepairBytes), { peer = name, limit = limits.repair_bytes },
            "limits.repair_bytes, or the quarter of it that one peer may have, is reached: payloads travel without repair \
            (remedy: a higher one if there is memory, or a shorter deadline in repair)"
        );
        throttled!(
            warn, allow(Ceiling::ReassemblyBytes), { peer = name, limit = limits.reassembly_bytes },
            "the peer has as many incomplete datagrams as may wait at a worker (limits.reassembly_bytes, 256 of them), or all \
            peers together have (64 times that): its oldest are dropped (remedy: see whether the path loses pieces; a higher \
            limit if there is memory)"
        );
        throttled!(
            warn,
            allow(Ceiling::FlowRate),
            { peer = name },
            "the peer opens flows faster than it may: its openings are dropped (remedy: see what opens so many; a higher \
            limits.flows_per_peer raises the rate, a fifth of it a second)"
        );
        if more(Ceiling::Sockets) {
            let error = peer.data.relay.socket_error.take();
            throttled!(
                warn, allow(Ceiling::Sockets),
                { peer = name, error = error.as_ref().map(tracing::field::display) },
                "no socket to a service could be opened: new flows of the peer are refused (remedy: {})",
                error.as_ref().map_or("see the error", socket_remedy)
            );
        }
    }

    /// Logs that sockets lost their send buffers to others, if that is new.
    pub(crate) fn report_send_buffers(&mut self, now: Instant) {
        let taken_away = self.sockets.underlays.send_buffers_taken_away;
        throttled!(
            warn,
            self.stats.ceilings.follow(Ceiling::SendBuffers, taken_away, now),
            "as many QUIC sockets as may have a send buffer have no room in the kernel: what waited longest was dropped \
            (remedy: see which links are full or down; a larger net.core.wmem_max)"
        );
    }

    /// Logs that flows to the decoy were evicted, if there are more than at the last report.
    pub(crate) fn report_decoy_flows(&mut self, evicted: u64, now: Instant) {
        throttled!(
            warn,
            self.stats.ceilings.follow(Ceiling::DecoyFlows, evicted, now),
            { limit = self.config.limits.decoy_flows },
            "limits.decoy_flows is reached: flows of unauthenticated senders to the decoy end early (remedy: a higher one, and \
            descriptors for it; or none, if this is a flood)"
        );
    }
}

/// Returns the remedy to log for a socket that could not be opened.
pub(crate) fn socket_remedy(error: &io::Error) -> &'static str {
    // EAGAIN of bind(2), and EADDRNOTAVAIL of connect(2).
    let ports = [io::ErrorKind::WouldBlock, io::ErrorKind::AddrNotAvailable];
    let routes = [io::ErrorKind::NetworkUnreachable, io::ErrorKind::HostUnreachable];
    if is_out_of_descriptors(error) {
        "a higher `ulimit -n`, LimitNOFILE= in the unit, or a lower limits.flows"
    } else if ports.contains(&error.kind()) {
        "one source address has 28,232 ports: a shorter service.idle, or a wider net.ipv4.ip_local_port_range"
    } else if routes.contains(&error.kind()) {
        "a route to the service's upstream, and an address if that is a name"
    } else {
        "see the error; ENOBUFS and ENOMEM: more memory"
    }
}

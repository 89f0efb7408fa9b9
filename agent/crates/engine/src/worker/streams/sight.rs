//! What an operator sees of TCP forwards: of each its client, its age and how long it has been stalled; the counts by service.

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use dataplane::{
    forward::tcp::TcpForward,
    records::{Carried, Ended, RecordKind},
};
use wire::messages::StreamAnswer;

use crate::{
    status::ServicePlace,
    worker::{
        context::Context,
        report::stats::{TcpEnd, TcpRefusal},
        streams::{OpenForward, TcpForwards},
    },
};

/// How long bytes of a forward wait before it is called stalled. In a transfer bytes wait all the time, each for a round trip or less.
pub(crate) const STALLED_AFTER: Duration = Duration::from_secs(1);

/// What is noted of a forward for operators.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// Its number among all forwards that the agent has had.
    pub(crate) number: u64,
    /// The address of its client, if that is here.
    pub(crate) client: Option<SocketAddr>,
    /// When it was opened.
    pub(crate) since: Instant,
    /// Where its service's counts are among those of its peer, once the service is known.
    pub(crate) service: Option<ServicePlace>,
    /// Since when bytes have waited of which none has moved: those that go to the stream, and those that go to TCP.
    pub(crate) waiting: [Option<Instant>; 2],
    /// Why it ends, where that does not follow from its state.
    pub(crate) end: Option<TcpEnd>,
}

impl Sight {
    pub(crate) fn new(cx: &Context, client: Option<SocketAddr>, now: Instant) -> Self {
        let number = cx.hub.next_forward();
        Self { number, client, since: now, service: None, waiting: [None; 2], end: None }
    }

    /// Since when the forward has been stalled, and in which directions, if it is called so by now.
    pub(crate) fn stalled(&self, now: Instant) -> Option<(Instant, [bool; 2])> {
        let long = |since: &Instant| now.saturating_duration_since(*since) >= STALLED_AFTER;
        let waiting = self.waiting.map(|since| since.filter(long));
        let since = waiting.iter().flatten().min()?;
        Some((*since, waiting.map(|since| since.is_some())))
    }

    /// Notes that `moved` bytes have moved in each direction, and where bytes wait.
    fn moved(&mut self, moved: [u64; 2], waits: [bool; 2], now: Instant) {
        for (since, (moved, waits)) in self.waiting.iter_mut().zip(moved.into_iter().zip(waits)) {
            *since = match *since {
                _ if !waits => None,
                Some(since) if moved == 0 => Some(since),
                Some(_) | None => Some(now),
            };
        }
    }
}

impl Context {
    /// Counts a forward for `service`.
    pub(crate) fn forward_serves(&mut self, peer: PeerId, sight: &mut Sight, service: &Arc<str>) {
        if let Some(state) = self.peers.get_mut(peer) {
            let place = state.forwards.carried.place_of(service);
            if let Some(counts) = state.forwards.carried.at_mut(place) {
                counts.open += 1;
            }
            sight.service = Some(place);
        }
    }

    /// Counts the bytes that a forward has moved to the stream and to TCP, and notes where bytes wait.
    pub(crate) fn forward_moved(
        &mut self,
        peer: PeerId,
        sight: &mut Sight,
        moved: [u64; 2],
        waits: [bool; 2],
        now: Instant,
    ) {
        sight.moved(moved, waits, now);
        let [out, back] = moved;
        self.stats.totals.tcp.bytes_outward += out;
        self.stats.totals.tcp.bytes_inward += back;
        let Some(state) = self.peers.get_mut(peer).filter(|_| out + back > 0) else { return };
        let tcp = &mut state.forwards.carried;
        tcp.uplink_bytes += out;
        tcp.downlink_bytes += back;
        if let Some(counts) = sight.service.and_then(|place| tcp.at_mut(place)) {
            counts.uplink_bytes += out;
            counts.downlink_bytes += back;
        }
    }

    /// Counts that a forward has ended, and why.
    pub(super) fn forward_ended(&mut self, OpenForward { peer, forward, sight, .. }: &OpenForward) {
        let by_itself = if forward.ended_in_order() { TcpEnd::Finished } else { TcpEnd::Reset };
        // One that was never open was refused, and is counted as such.
        if forward.was_open() || sight.end.is_some() {
            let end = sight.end.unwrap_or(by_itself);
            self.stats.totals.tcp.ended[end] += 1;
            self.record_forward(*peer, forward, sight, end);
        }
        if let Some(state) = self.peers.get_mut(*peer)
            && let Some(counts) = sight.service.and_then(|place| state.forwards.carried.at_mut(place))
        {
            counts.open = counts.open.saturating_sub(1);
        }
    }

    /// Has the end of a forward recorded, if that is wanted.
    fn record_forward(&self, peer: PeerId, forward: &TcpForward, sight: &Sight, end: TcpEnd) {
        let Some(recorder) = self.hub.totals.recorder.get() else { return };
        let Some(state) = self.peers.get(peer) else { return };
        let service = sight.service.and_then(|place| state.forwards.carried.at(place));
        let literal = || self.config.services.get(forward.service()? as usize)?.upstream.address();
        let far_end = || forward.tcp().and_then(|tcp| tcp.far_end()).or_else(literal);
        let near_end = || forward.tcp().and_then(|tcp| tcp.near_end());
        let carried = |bytes| Carried { packets: 0, bytes };
        let (uplink, downlink) = forward.bytes();
        recorder.note(Ended {
            kind: RecordKind::Tcp,
            protocol: 6,
            peer: Arc::clone(state.name()),
            service: service.map(|counts| Arc::clone(&counts.service)).unwrap_or_default(),
            opened_here: sight.client.is_some(),
            source: sight.client,
            destination: if sight.client.is_some() { near_end() } else { far_end() },
            span: recorder.span(sight.since),
            uplink: carried(uplink),
            downlink: carried(downlink),
            reason: end.label(),
        });
    }

    /// Logs that a peer's TCP forward was not connected to the service with this index, and why. Only this end's operator learns of the
    /// upstream and the kernel's error.
    pub(crate) fn report_service(
        &mut self,
        peer: PeerId,
        service: u32,
        answer: StreamAnswer,
        error: Option<&io::Error>,
        now: Instant,
    ) {
        let Some(state) = self.peers.get(peer) else { return };
        let known = self.config.services.get(service as usize);
        throttled!(
            warn, self.logs.service.allow(now),
            {
                peer = &**state.name(), service = known.map(|known| &*known.name), number = service,
                upstream = known.map(|known| tracing::field::display(&known.upstream)),
                reason = TcpRefusal::from(answer).label(), error = error.map(tracing::field::display)
            },
            "a TCP forward of the peer was refused (remedy: {})", remedy(answer)
        );
    }

    /// Logs that a forward was ended because its reader had stopped.
    pub(crate) fn report_stalled(
        &mut self,
        peer: PeerId,
        sight: &Sight,
        stopped_for: Duration,
        now: Instant,
    ) {
        let Some(state) = self.peers.get(peer) else { return };
        let service = sight.service.and_then(|place| state.forwards.carried.at(place));
        throttled!(
            warn, self.logs.stalled.allow(now),
            {
                peer = &**state.name(), service = service.map(|counts| &*counts.service), forward = sight.number,
                client = sight.client.map(tracing::field::display), ?stopped_for
            },
            "a TCP forward whose reader has stopped was ended so that others go on (remedy: `culvert status PEER` shows who does not read)"
        );
    }

    /// Logs that the peer did not open a forward to its service.
    pub(crate) fn report_refused(&mut self, peer: PeerId, sight: &Sight, answer: StreamAnswer, now: Instant) {
        let Some(state) = self.peers.get(peer) else { return };
        let service = sight.service.and_then(|place| state.forwards.carried.at(place));
        let known = TcpRefusal::from(answer);
        let reason = if known == TcpRefusal::Other { "unknown to this version" } else { known.label() };
        throttled!(
            debug,
            self.debug_lines.allow(now),
            { peer = &**state.name(), service = service.map(|counts| &*counts.service), reason },
            "the peer refused a TCP forward"
        );
    }
}

impl TcpForwards {
    /// Once a second: counts the stalled forwards of each peer.
    pub(crate) fn count_stalled(&self, cx: &mut Context, now: Instant) {
        for peer in cx.peers.iter_mut() {
            peer.forwards.carried.stalled = 0;
        }
        for (_, OpenForward { peer, sight, .. }) in self.open.iter() {
            if sight.stalled(now).is_some()
                && let Some(state) = cx.peers.get_mut(*peer)
            {
                state.forwards.carried.stalled += 1;
            }
        }
    }
}

/// What the operator of the end that refuses a forward can do.
fn remedy(answer: StreamAnswer) -> &'static str {
    match answer {
        StreamAnswer::UnknownService => {
            "see why the peer asks for a service that is not here, or not for TCP"
        }
        StreamAnswer::NotAllowed => "name the service in `services` of the peer, if it may use it",
        StreamAnswer::UpstreamRefused => "is the service running, and does it listen at its upstream?",
        StreamAnswer::UpstreamTimeout => {
            "is the service's host up, and does a firewall drop what is sent to the upstream?"
        }
        StreamAnswer::LimitReached => "a higher limits.tcp_streams_per_peer or limits.tcp_streams",
        StreamAnswer::TooManyFiles => {
            "a higher `ulimit -n`, LimitNOFILE= in the unit, or a lower limits.tcp_streams; the service is not asked"
        }
        StreamAnswer::NoRoute => {
            "a route from this host to the upstream, a firewall that permits it, and a name that has an address"
        }
        StreamAnswer::NoResources => {
            "a wider net.ipv4.ip_local_port_range, 28,232 ports by default towards one upstream; ENOBUFS and ENOMEM: more memory"
        }
        StreamAnswer::Unspecified | StreamAnswer::Ok => "see the error",
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn a_forward_is_stalled_from_the_last_byte_that_moved() {
        let start = ManualClock::default().now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut sight =
            Sight { number: 1, client: None, since: start, service: None, waiting: [None; 2], end: None };
        sight.moved([5, 0], [true, false], at(0));
        assert_eq!(sight.stalled(at(999)), None, "a transfer that fills the window");
        assert_eq!(sight.stalled(at(1_000)), Some((at(0), [true, false])));
        sight.moved([0, 0], [true, false], at(1_500));
        assert_eq!(sight.stalled(at(1_500)), Some((at(0), [true, false])), "being looked at moves nothing");
        sight.moved([0, 7], [true, true], at(2_000));
        assert_eq!(sight.stalled(at(3_000)), Some((at(0), [true, true])), "the other direction, too");
        sight.moved([1, 0], [true, true], at(3_500));
        assert_eq!(sight.stalled(at(3_600)), Some((at(2_000), [false, true])));
        sight.moved([1, 1], [false, false], at(4_000));
        assert_eq!(sight.stalled(at(9_000)), None);
    }
}

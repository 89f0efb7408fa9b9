//! What is published of sessions, and rows of stream connections for an operator.

use std::{sync::Arc, time::Instant};

use base::{counts::Counts, ids::PeerId};
use dataplane::relay::{Direction, Queue};
use gate::{OwnKey, refusals::AtCeilings, suite::Group};
use net::{
    carrier::{client_of, is_stream},
    way::{Because, Over, Taken},
};
use wire::messages::Features;

use crate::{
    control::connections::StreamConnection,
    peer::Peer,
    status::{
        Accounting, CarrierError, ContestedStatus, LastError, PeerRates, PeerState, PeerStatus, QueueStatus,
        QuotaStatus, SendError, StreamConnectionStatus, StreamsStatus, WayStatus, add_some,
    },
    worker::{
        context::{
            Context,
            causes::{refused_in_words, remedy},
        },
        device::Tunnel,
        lanes::{
            inspect::MOST_LANES,
            line_status::copies_of,
            publish::{OfPeer, rate_of, rtt},
        },
        report::stats::{Ceiling, RelaySums},
        session::Sessions,
    },
};

impl Context {
    /// The number of sessions that this worker owns.
    pub(crate) fn sessions_by_key_exchange(&self) -> Counts<Group> {
        let mut sessions = Counts::default();
        for group in self.peers.iter().filter_map(|peer| peer.session.as_ref()?.key_exchange) {
            sessions[group] += 1;
        }
        sessions
    }

    pub(crate) fn stream_connection_rows(
        &self,
        chosen: Option<Option<PeerId>>,
    ) -> Vec<(PeerId, StreamConnectionStatus)> {
        let wanted = |peer: &&Peer| chosen.is_none_or(|chosen| chosen == Some(peer.data.id));
        let of_peer = |peer: &Peer| {
            let (id, worker) = (peer.data.id, self.id.index);
            let row = move |stream: &StreamConnection| StreamConnectionStatus {
                number: stream.number,
                worker,
                state: stream.stage.label().into(),
                dialled_by: if stream.dialled { "here" } else { "peer" }.into(),
                forwards: stream.forwards,
            };
            peer.streams.all.iter().map(move |stream| (id, row(stream))).collect::<Vec<_>>()
        };
        self.peers.iter().filter(wanted).flat_map(of_peer).take(MOST_LANES).collect()
    }
}

impl Sessions {
    /// The number of sessions that this worker owns whose peer knows us by our previous key.
    pub(crate) fn by_previous_key(&self, cx: &Context) -> u64 {
        let sessions = cx.peers.iter().filter_map(|peer| peer.session.as_ref());
        let controls = sessions.filter_map(|session| self.control.get(session.handle));
        controls.filter(|control| control.identity.own() == OwnKey::Previous).count() as u64
    }

    /// The congestion control of this worker's connections, by peer.
    pub(crate) fn stream_snapshots(&self, cx: &Context) -> Vec<OfPeer> {
        let mut of_peers = vec![OfPeer::default(); cx.peers.len()];
        for connection in self.control.iter().filter(|connection| !connection.is_over()) {
            let Some(id) = connection.identity.peer().filter(|_| connection.identity.key().is_some()) else {
                continue;
            };
            let (congestion, quinn) = (connection.congestion(), connection.quinn());
            if let Some(sum) = of_peers.get_mut(id.0 as usize) {
                let one = StreamsStatus {
                    congestion: congestion.control().label().into(),
                    connections: 1,
                    window_bytes: quinn.congestion_state().window(),
                    pacing_bytes_per_second: congestion.pacing_rate().unwrap_or(0),
                    delivery_bytes_per_second: congestion.delivery_rate().unwrap_or(0),
                };
                add_some(&mut sum.streams, Some(&one), StreamsStatus::add);
            }
        }
        of_peers
    }

    /// What carries the packets of a peer's control connection.
    fn way_of(&self, cx: &Context, peer: &Peer, now: Instant) -> Option<WayStatus> {
        let session = peer.session.as_ref().filter(|_| peer.data.is_reachable())?;
        let control = self.control.get(session.handle)?;
        let began = session.agreed.since;
        if !peer.data.link.as_ref().is_some_and(|link| link.dialled) {
            let changed = peer.reach.last_way().filter(|at| *at > began);
            let is_stream = is_stream(&control.path().destination);
            return Some(WayStatus::of_dialler(is_stream, changed.unwrap_or(began), now));
        }
        let underlay = cx.sockets.underlays.get(control.underlay)?;
        let plain = Taken { over: Over::Udp, because: Because::Dialled, since: None };
        Some(WayStatus::of(&underlay.socket.taken().unwrap_or(plain), began, now))
    }

    /// Since when the oldest 4-tuple is in use of those that connections with a peer and its lanes have at this worker.
    fn ports_since(&self, cx: &Context, peer: &Peer) -> Option<Instant> {
        let session = peer.session.iter().map(|session| session.handle);
        let handles = session.chain(peer.streams.all.iter().map(|stream| stream.handle));
        let connections = handles.filter_map(|handle| Some(self.control.open(handle)?.ports_since));
        let lanes = peer.data.link.iter().flat_map(|link| link.pool.lanes());
        let lanes = lanes.filter_map(|lane| Some(cx.sockets.lanes.get(lane)?.meter.opened()));
        connections.chain(lanes).min()
    }

    /// Why no carrier could be opened to a peer last.
    fn carrier_error(cx: &Context, peer: &Peer, now: Instant) -> Option<CarrierError> {
        let (at, reason) = cx.sockets.factory.carrier_failure(peer.name())?;
        let age_seconds = now.saturating_duration_since(at).as_secs_f64();
        Some(CarrierError { age_seconds, reason: reason.as_ref().to_owned() })
    }

    /// The number of refusals at each limit. Those of flows to the decoy and of send buffers were reported just before.
    pub(crate) fn limit_reached(&self, cx: &Context, sums: &RelaySums) -> Counts<Ceiling> {
        let mut reached = cx.stats.ceilings.counts;
        reached += &sums.refused;
        // All workers share these values, so only worker 0 publishes them.
        if cx.id.index == 0 {
            let AtCeilings { handshakes, open_peers, used_tokens } = self.refusals.at_ceilings();
            reached[Ceiling::StreamBytes] = cx.hub.streams.refused();
            reached[Ceiling::Handshakes] = handshakes;
            reached[Ceiling::OpenPeers] = open_peers;
            reached[Ceiling::UsedTokens] = used_tokens;
        }
        reached
    }

    pub(crate) fn peer_status(
        &self,
        cx: &Context,
        tunnel: &Tunnel,
        peer: &Peer,
        of_peer: &OfPeer,
        now: Instant,
    ) -> PeerStatus {
        let relay = &peer.data.relay;
        let link = peer.data.link.as_ref();
        let session = peer.session.as_ref().filter(|_| peer.data.is_reachable());
        let control = peer.session.as_ref().and_then(|session| self.control.get(session.handle));
        let standard = link.is_some_and(|link| link.is_standard());
        let plain_rtt = || control.filter(|_| standard).map(|control| control.quinn().rtt());
        let of_lane = rtt(peer, &cx.sockets.lanes);
        let rtt = of_lane.map(|(smoothed, _)| smoothed).or_else(plain_rtt);
        let most_mtu = tunnel.side().map(|side| side.most_mtu);
        let most_mtu = most_mtu.filter(|_| link.is_some_and(|link| link.has(Features::PACKETS)));
        let since = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
        let remote = session.and(control).map(|control| control.path().destination);
        PeerStatus {
            name: Arc::clone(peer.name()),
            origin: peer.origin,
            state: match session {
                Some(_) => PeerState::Connected,
                None if peer.data.config.endpoints.is_empty() => PeerState::Waiting,
                None => PeerState::Dialling,
            },
            address: remote.map(client_of).or_else(|| peer.reach.dialled()),
            way: self.way_of(cx, peer, now),
            ports_age_seconds: self.ports_since(cx, peer).map(since),
            carrier_error: Self::carrier_error(cx, peer, now),
            since_seconds: session
                .map(|session| session.agreed.since)
                .or_else(|| peer.reach.last_session())
                .map(since),
            software: session.map(|session| Arc::clone(&session.agreed.software)),
            preshared_keys: peer.data.config.preshared_keys.len(),
            preshared_key_in_use: session
                .and(control)
                .and_then(|control| control.preshared.agreed())
                .map(|agreed| agreed.place + 1),
            uses_previous_key: session
                .and(control)
                .is_some_and(|control| control.identity.own() == OwnKey::Previous),
            mode: session.map(|_| if standard { "standard" } else { "lanes" }.into()),
            key_exchange: session.and_then(|session| session.key_exchange).map(|group| group.label().into()),
            rtt_seconds: rtt.map(|rtt| rtt.as_secs_f64()),
            rtt_min_seconds: of_lane.map(|(_, least)| least.as_secs_f64()),
            lanes_up: of_peer.lanes_up,
            lines: cx.lines_of(peer, &of_peer.lines, now),
            flows: relay.flows.len(),
            tcp_streams: peer.forwards.here,
            tcp: peer.forwards.carried.clone(),
            streams: of_peer.streams.clone(),
            inner_mtu: most_mtu.and_then(|most| peer.data.inner_mtu(most, now)),
            largest_datagram: peer.data.largest_datagram(now),
            rates: PeerRates::of(&peer.rates),
            queue: QueueStatus {
                datagrams: relay.queues().map(Queue::datagrams).sum::<usize>() + relay.awaiting.datagrams(),
                bytes: relay.queues().map(Queue::bytes).sum::<usize>() + relay.awaiting.bytes(),
                age_seconds: relay.oldest().map_or(0.0, since),
            },
            rate: rate_of(relay, peer.session.is_some(), now),
            quota: peer.data.config.quota.map(|quota| {
                let view = cx.hub.quotas.view(peer.name(), &quota, self.unix_seconds());
                QuotaStatus {
                    bytes: quota.bytes,
                    used_bytes: view.used,
                    until_unix: view.until,
                    state: view.held.label().into(),
                }
            }),
            repair: cx.repair_of(peer, now),
            copies: copies_of(relay),
            uplink: Accounting {
                account: relay.uplink,
                queued: relay.queued(Direction::Uplink),
                delivered_bytes: relay.stats.uplink_bytes,
                packets: relay.stats.tun_uplink,
                pieces: relay.stats.fragmented,
                ..Accounting::default()
            },
            downlink: Accounting {
                account: relay.downlink,
                queued: relay.queued(Direction::Downlink),
                delivered_bytes: relay.stats.downlink_bytes,
                packets: relay.stats.tun_downlink,
                pieces: relay.stats.reassembled,
                ..Accounting::default()
            },
            last_error: peer
                .reach
                .failure()
                .map(|(at, failure)| LastError { age_seconds: since(*at), failure: Arc::clone(failure) }),
            contested: of_peer.contested.map(|found| ContestedStatus {
                addresses: found.addresses.map(|address| client_of(address).to_string()).into(),
                age_seconds: since(found.at),
            }),
            send_error: peer.reach.kernel_refusal().map(|refused| SendError {
                age_seconds: since(refused.at),
                reason: refused_in_words(refused.last),
                remedy: remedy(refused.last).into(),
                count: refused.count,
            }),
            more: cx.peer_figures(peer, of_peer),
            ..PeerStatus::default()
        }
    }
}

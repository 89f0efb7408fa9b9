//! What an operator may look at inside a worker, made when somebody asks: lanes, flows, sockets, the device.
//!
//! ```text
//!   control thread:  Inspection::ask ──► inboxes ──► Worker::inspect, in its next turn ──► Inspection::wait
//! ```
//!
//! What is cheap and of every peer is published all the time (`books.rs`). What is of each lane or flow is too much for that
//! with a thousand peers, and is bounded here in what one request may cost.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    net::SocketAddr,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use dataplane::{
    forward::tun::{Answer, TunDrop},
    lanes::{LaneSlot, LaneState, Waiting},
    relay::{Flow, NO_LANE, Origin, flow},
};
use ip::packets::TunOffload;
use net::{Gso, TunStats, UdpOffload, UdpRole, stats::Booked};
use quic_core::{LaneStats, LaneView, Rtt, Volume};
use wire::{ids::PeerId, panics::lock, sampler::Delta};

use crate::{
    control::connections::{Stage, StreamConnection},
    peer::Peer,
    worker::{
        Command, Worker,
        books::{self, Backlog, SocketBooks, add_lane},
        shell,
    },
};

/// Lanes that one worker tells of in one inspection: a row takes about a microsecond.
const MOST_LANES: usize = 4_096;

/// Flows that one worker tells of in one inspection.
pub const MOST_FLOWS: usize = 50;

/// What an inspection is to show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// The lanes of this peer only, and its most recent flows; else the lanes of all peers, and no flows.
    pub peer: Option<Arc<str>>,
    /// Of those, the lane of this index only, with its details.
    pub lane: Option<u8>,
}

/// A question to all workers, and their answers.
#[derive(Debug)]
pub struct Inspection {
    asks: Asks,
    views: Mutex<Vec<Option<WorkerView>>>,
    answered: Condvar,
}

/// A stream connection of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamConnectionRow {
    /// Its number, from 1 on.
    pub number: u8,
    /// The worker that has it.
    pub worker: u8,
    /// How far it has come.
    pub stage: Stage,
    /// Whether this end dialled it.
    pub dialled: bool,
    /// TCP forwards on it.
    pub forwards: u32,
}

/// What one worker has.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// Its lanes, in no order.
    pub lanes: Vec<LaneRow>,
    /// Lanes that there was no room for.
    pub lanes_left_out: usize,
    /// Its flows by peer and the index of the lane that they belong on.
    pub lane_flows: Vec<(PeerId, Vec<u64>)>,
    /// Its stream connections, by peer, at most [`MOST_LANES`].
    pub stream_connections: Vec<(PeerId, StreamConnectionRow)>,
    /// The most recent flows of the peer that was asked for, the latest first, at most [`MOST_FLOWS`].
    pub flows: Vec<FlowRow>,
    /// Its sockets, by role.
    pub sockets: [SocketRow; SocketBooks::ROLES.len()],
    /// Its queue of the TUN device.
    pub tun: Option<TunRow>,
    /// Handshakes that others have begun and that are no session yet.
    pub handshakes: usize,
    /// Knocks that were used and are remembered.
    pub used_tokens: usize,
    /// Strangers whose datagrams go to the decoy.
    pub decoy_flows: usize,
    /// Bytes that the windows of TCP forwards of all workers have taken.
    pub stream_bytes: usize,
}

/// One lane.
#[derive(Clone, Debug)]
pub struct LaneRow {
    /// Whose.
    pub peer: PeerId,
    /// Its index within the peer's.
    pub index: u8,
    /// Which opening of that index it is.
    pub epoch: u64,
    /// The worker that keeps it.
    pub worker: u8,
    /// Whether it carries payloads.
    pub state: LaneState,
    /// The address that its socket is bound to.
    pub local: Option<SocketAddr>,
    /// Where its packets go.
    pub remote: Option<SocketAddr>,
    /// How long ago it was opened.
    pub age: Duration,
    /// How long ago a packet of it was last opened.
    pub heard: Option<Duration>,
    /// Packets and bytes sent, packets and bytes received, packets lost, when last looked at.
    pub growth: Option<Delta<5>>,
    /// What it counted.
    pub stats: LaneStats,
    /// What it is at.
    pub view: LaneView,
    /// The round-trip time.
    pub rtt: Rtt,
    /// Packets that are neither acknowledged nor lost.
    pub in_flight: Volume,
    /// The largest packet that it sends now, in bytes of UDP payload.
    pub packet_bytes: usize,
    /// The largest packet that its path carries as far as is known.
    pub path_packet_bytes: usize,
    /// How the kernel moves its packets.
    pub offload: UdpOffload,
    /// What else there is to know, if this lane was asked for.
    pub details: Option<LaneDetails>,
}

/// What is shown of one lane only.
#[derive(Clone, Copy, Debug)]
pub struct LaneDetails {
    /// The connection ID of the packets that it receives.
    pub local_cid: [u8; 8],
    /// Probes sent since an ACK last acknowledged something new.
    pub probes: u32,
    /// For how long something has been outstanding and nothing was heard.
    pub silent: Option<Duration>,
    /// Bytes per second that got through in the last round trip.
    pub delivery_rate: Option<u64>,
    /// The datagrams that wait in the outbox of its socket.
    pub waiting: Backlog,
    /// The kernel has no room for them.
    pub blocked: bool,
}

/// One flow.
#[derive(Clone, Debug)]
pub struct FlowRow {
    /// Its number on the wire.
    pub number: u64,
    /// The service that it is for.
    pub service: Arc<str>,
    /// Its local side, which also says who opened it.
    pub side: FlowSide,
    /// What the far end knows of it.
    pub standing: flow::Standing,
    /// The lane that it belongs on, and the one that it takes.
    pub lanes: [Option<u8>; 2],
    /// The worker that keeps it.
    pub worker: u8,
    /// How long it has been silent, and after how long of that it ends.
    pub silent: (Duration, Duration),
}

/// The local side of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowSide {
    /// A client of ours opened it.
    Client(SocketAddr),
    /// The peer opened it, to this upstream.
    Upstream(Option<SocketAddr>),
}

/// The sockets of one role.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketRow {
    /// How many are open.
    pub open: usize,
    /// What they counted, those that are closed included.
    pub booked: Booked,
    /// ICMP errors about datagrams that they had sent.
    pub refusals: u64,
}

/// A queue of the TUN device.
#[derive(Clone, Copy, Debug)]
pub struct TunRow {
    /// What the device may be handed, and hands us.
    pub offload: TunOffload,
    /// What the queue did.
    pub stats: TunStats,
    /// Packets read and written, super-packets cut.
    pub packets: [u64; 2],
    /// Packets read that went to no peer, by reason.
    pub dropped: [u64; TunDrop::LABELS.len()],
    /// ICMP messages written in answer, by kind.
    pub answers: [u64; Answer::LABELS.len()],
    /// Packets and bytes read, packets and bytes written, when last looked at.
    pub growth: Option<Delta<4>>,
}

impl Inspection {
    /// Asks the workers behind `inboxes`; one that takes no commands will not answer.
    #[must_use]
    pub fn ask(asks: Asks, inboxes: &[Arc<shell::Inbox>]) -> Arc<Self> {
        let views = Mutex::new(vec![None; inboxes.len()]);
        let inspection = Arc::new(Self { asks, views, answered: Condvar::new() });
        for inbox in inboxes {
            // Who does not answer in time is told to the operator, for whatever reason.
            let _asked = inbox.put(Command::Inspect(Arc::clone(&inspection)));
        }
        inspection
    }

    /// Waits until all have answered, at most `within`; `None` for each worker that has not.
    #[must_use]
    pub fn wait(&self, within: Duration) -> Vec<Option<WorkerView>> {
        let missing = |views: &mut Vec<Option<WorkerView>>| views.iter().any(Option::is_none);
        let views = lock(&self.views);
        let mut views = views.wait_while(&self.answered, within, missing);
        views.iter_mut().map(Option::take).collect()
    }

    fn answer(&self, worker: u8, view: WorkerView) {
        let mut views = lock(&self.views);
        if let Some(place) = views.get_mut(usize::from(worker)) {
            *place = Some(view);
            self.answered.notify_one();
        }
    }
}

impl Worker {
    /// Once a second: what passed since the last time. Here, and not where somebody asks, because whoever asks once would have to
    /// wait for a second look, and two who ask would disturb each other.
    pub(super) fn look_at_meters(&mut self, now: Instant) {
        let mut sums: Vec<LaneStats> =
            self.peers.iter().map(|peer| self.totals.retired.of(peer.id)).collect();
        for slot in self.lanes.iter_mut() {
            let stats = slot.core.stats();
            if let Some(sum) = sums.get_mut(slot.peer.0 as usize) {
                add_lane(sum, stats);
            }
            let LaneStats { sealed_packets, sealed_bytes, opened_packets, opened_bytes, .. } = *stats;
            let counts = [sealed_packets, sealed_bytes, opened_packets, opened_bytes, stats.lost_packets];
            slot.meter.sample(counts, now);
        }
        for (peer, lanes) in self.peers.iter_mut().zip(&sums) {
            let (relay, stats) = (&peer.relay, &peer.relay.stats);
            let uplink = [relay.uplink.delivered, stats.uplink_bytes];
            let downlink = [relay.downlink.delivered, stats.downlink_bytes];
            let [[up, up_bytes], [down, down_bytes]] = [uplink, downlink];
            let counts = [up, up_bytes, down, down_bytes, lanes.sealed_packets, lanes.lost_packets];
            peer.meter.sample(counts, now);
        }
        if let Some((tun, _)) = &mut self.tun {
            let stats = tun.queue.stats();
            let (read, written) = (tun.totals.received, tun.totals.delivered);
            tun.meter.sample([read, stats.read_bytes, written, stats.write_bytes], now);
        }
    }

    /// Answers an operator, and publishes, so that what is published is not older.
    pub(super) fn inspect(&mut self, inspection: &Inspection, now: Instant) {
        self.publish(now);
        let asks = &inspection.asks;
        let chosen = asks.peer.as_ref().map(|name| {
            let named = |peer: &&Peer| peer.is_live() && peer.name == *name;
            self.peers.iter().find(named).map(|peer| peer.id)
        });
        let (lanes, lanes_left_out) = self.lane_rows(chosen, asks.lane, now);
        let flows = match (chosen.flatten(), asks.lane) {
            (Some(peer), None) => self.flow_rows(peer, now),
            (Some(_) | None, _) => Vec::new(),
        };
        let view = WorkerView {
            lanes,
            lanes_left_out,
            lane_flows: self.flows_by_lane(chosen),
            stream_connections: self.stream_connection_rows(chosen),
            flows,
            sockets: self.socket_rows(),
            tun: self.tun_row(),
            handshakes: self.control.handshakes_pending(),
            used_tokens: self.gate.remembered(),
            stream_bytes: usize::try_from(self.exchange.streams().taken()).unwrap_or(usize::MAX),
            decoy_flows: self.decoys.as_ref().map_or(0, crate::worker::decoy::Decoys::count),
        };
        inspection.answer(self.id.index, view);
    }

    /// The lanes of one peer or of all, and how many of them there was no room for.
    fn lane_rows(
        &self,
        chosen: Option<Option<PeerId>>,
        index: Option<u8>,
        now: Instant,
    ) -> (Vec<LaneRow>, usize) {
        let wanted = |slot: &LaneSlot| {
            chosen.is_none_or(|peer| peer == Some(slot.peer)) && index.is_none_or(|index| index == slot.index)
        };
        let mut wanted = self.lanes.iter().map(|(_, slot)| slot).filter(|slot| wanted(slot));
        let rows = wanted.by_ref().take(MOST_LANES).map(|slot| self.lane_row(slot, index.is_some(), now));
        let rows = rows.collect();
        (rows, wanted.count())
    }

    fn lane_row(&self, slot: &LaneSlot, detailed: bool, now: Instant) -> LaneRow {
        let since = |at: Instant| now.saturating_duration_since(at);
        let socket = self.underlays.get(slot.underlay).map(|underlay| &underlay.socket);
        let remote = slot.path().map(|path| path.destination);
        let offload = socket.zip(remote).map(|(socket, remote)| socket.offload(remote));
        let Waiting { datagrams, bytes } = self.underlays.waiting(slot.underlay);
        LaneRow {
            peer: slot.peer,
            index: slot.index,
            epoch: slot.epoch,
            worker: self.id.index,
            state: slot.state,
            local: socket.map(|socket| socket.local_addr()),
            remote,
            age: since(slot.opened),
            heard: slot.core.last_heard().map(since),
            growth: slot.meter.last(),
            stats: *slot.core.stats(),
            view: slot.core.view(),
            rtt: *slot.core.rtt(),
            in_flight: slot.core.in_flight(),
            packet_bytes: slot.packet_budget,
            path_packet_bytes: slot.core.max_packet(),
            offload: offload.unwrap_or(UdpOffload { gso: Gso::Off, gro: false }),
            details: detailed.then(|| LaneDetails {
                local_cid: slot.local_cid.0,
                probes: slot.core.probe_count(),
                silent: slot.core.silent_since().map(since),
                delivery_rate: slot.core.delivery_rate(),
                waiting: Backlog { datagrams, bytes },
                blocked: self.underlays.is_blocked(slot.underlay),
            }),
        }
    }

    fn flows_by_lane(&self, chosen: Option<Option<PeerId>>) -> Vec<(PeerId, Vec<u64>)> {
        let wanted = |peer: &&Peer| chosen.is_none_or(|chosen| chosen == Some(peer.id));
        let peers = self.peers.iter().filter(wanted).filter(|peer| !peer.relay.flows.is_empty());
        let counted = |peer: &Peer| {
            let mut sums = Vec::new();
            peer.relay.flows.count_lanes(&mut sums);
            (peer.id, sums)
        };
        peers.map(counted).collect()
    }

    fn stream_connection_rows(&self, chosen: Option<Option<PeerId>>) -> Vec<(PeerId, StreamConnectionRow)> {
        let wanted = |peer: &&Peer| chosen.is_none_or(|chosen| chosen == Some(peer.id));
        let of_peer = |peer: &Peer| {
            let (id, worker) = (peer.id, self.id.index);
            let row = move |stream: &StreamConnection| StreamConnectionRow {
                number: stream.number,
                worker,
                stage: stream.stage,
                dialled: stream.dialled,
                forwards: stream.forwards,
            };
            peer.streams.all.iter().map(move |stream| (id, row(stream))).collect::<Vec<_>>()
        };
        self.peers.iter().filter(wanted).flat_map(of_peer).take(MOST_LANES).collect()
    }

    /// The flows of a peer with the latest datagrams.
    fn flow_rows(&self, peer: PeerId, now: Instant) -> Vec<FlowRow> {
        let Some(state) = self.peers.get(peer.0 as usize) else { return Vec::new() };
        // The oldest of those that are kept is on top.
        let mut latest = BinaryHeap::with_capacity(MOST_FLOWS + 1);
        for (id, _, flow) in state.relay.flows.iter() {
            latest.push(Reverse((flow.last_active, id)));
            if latest.len() > MOST_FLOWS {
                latest.pop();
            }
        }
        let latest = latest.into_sorted_vec();
        let flows = latest.iter().filter_map(|Reverse((_, id))| state.relay.flows.get(*id));
        flows.map(|flow| self.flow_row(flow, now)).collect()
    }

    fn flow_row(&self, flow: &Flow, now: Instant) -> FlowRow {
        let (side, service) = match flow.origin {
            Origin::Ingress { client, ingress } => {
                let forward = self.config.udp.get(ingress.0 as usize);
                (FlowSide::Client(client.address), forward.map(|forward| &forward.service))
            }
            Origin::Upstream { service, .. } => {
                let service = self.config.services.get(service);
                let upstream = service.map(|service| service.upstream);
                (FlowSide::Upstream(upstream), service.map(|service| &service.name))
            }
        };
        FlowRow {
            number: flow.number.0,
            service: service.cloned().unwrap_or_default(),
            side,
            standing: flow.standing,
            lanes: [flow.lane, flow.on].map(|lane| (lane != NO_LANE).then_some(lane)),
            worker: self.id.index,
            silent: (now.saturating_duration_since(flow.last_active), flow.idle),
        }
    }

    fn socket_rows(&mut self) -> [SocketRow; SocketBooks::ROLES.len()] {
        let mut rows = [SocketRow::default(); SocketBooks::ROLES.len()];
        let books = *self.doors.books();
        for ((row, booked), refusals) in rows.iter_mut().zip(books.0).zip(self.totals.refusals) {
            *row = SocketRow { open: 0, booked, refusals };
        }
        let locals = self.locals.iter().map(|socket| books::role(&socket.local));
        for role in self.underlays.iter().map(|underlay| underlay.role).chain(locals) {
            rows[books::role_place(role)].open += 1;
        }
        rows[books::role_place(UdpRole::Decoy)].open =
            self.decoys.as_ref().map_or(0, crate::worker::decoy::Decoys::count);
        rows
    }

    fn tun_row(&self) -> Option<TunRow> {
        let (tun, _) = self.tun.as_ref()?;
        Some(TunRow {
            offload: tun.queue.offload(),
            stats: tun.queue.stats(),
            packets: [tun.totals.received, tun.totals.delivered],
            dropped: tun.totals.dropped,
            answers: tun.totals.answers,
            growth: tun.meter.last(),
        })
    }
}

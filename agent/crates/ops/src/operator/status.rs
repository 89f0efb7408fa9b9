//! What an operator is shown: what the workers published, and what they say when they are asked.

use std::{
    collections::BTreeMap,
    fs,
    net::Ipv6Addr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use config::{Config, Tun};
use dataplane::upstreams::TargetState;
use engine::{
    brief::PeerBrief,
    health::NotReady,
    metrics::Value,
    origin::PeerOrigin,
    registry::{Listed, PeerRegistry},
    status::Counts,
    worker::{AskedRoutes, Asks, ForwardList, InUse, Inspection, Publication, Snapshots, WorkerView},
};
use gate::{identity::PublicKey, refusals, table::MOST_ENTRIES, web::WebCertificate};
use net::{
    UdpRole,
    netlink::{Link, Netlink, Which},
    process,
};

use crate::{
    control_socket::status::{
        Drain, FlowStatus, ForwardStatus, LaneStatus, LimitsStatus, PeerState, PeerStatus, Refusal, Scope,
        ServiceStatus, SocketStatus, Status, StreamConnectionStatus, TalkerStatus, Totals, TunStatus,
        UplinkStatus, UpstreamStatus, Used, UserStatus, WebServerStatus,
    },
    operator::Running,
    web::Figures,
};

/// How long the workers have to say what they have: far longer than a turn takes, far shorter than a client waits.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Lanes in one answer: what a client can read, and a terminal show.
const MOST_LANES: usize = 4_096;

/// How recent the figures of peers are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AsOf {
    /// The workers publish before they answer.
    Now,
    /// As the workers last published them, a second ago at most: for a page that asks all day.
    LastPublication,
}

/// The status that `scope` asks for.
pub(super) fn of(running: &Running, scope: &Scope, as_of: AsOf) -> Status {
    let routes = scope.routes.map(|routes| routes.address.map_or(AskedRoutes::All, AskedRoutes::To));
    let as_published = as_of == AsOf::LastPublication;
    let (peer, talkers) = (scope.peer.as_deref().map(Into::into), scope.talkers);
    let asks = Asks { peer, lane: scope.lane, routes, talkers, as_published };
    let views = Inspection::ask(asks, &running.inboxes).wait(ANSWER_WITHIN);
    let unanswered = (0..).zip(&views).filter(|(_, view)| view.is_none()).map(|(worker, _)| worker);
    let unanswered_workers = unanswered.collect();
    let mut views: Vec<WorkerView> = views.into_iter().flatten().collect();
    let (now, unix_seconds) = (running.clock.now(), running.clock.unix_seconds());
    // Only now: the workers published when they were asked.
    let published = running.snapshots.latest();
    let (config, listed) = (running.config.load(), running.registry.list());
    let (totals, limits) = (totals(&published), limits(&config, &listed, &published));
    let chosen = |listed: &&Listed| scope.peer.as_ref().is_none_or(|name| *listed.peer.name == **name);
    let mut room = Room { left: MOST_LANES, left_out: views.iter().map(|view| view.lanes_left_out).sum() };
    let peers = listed.iter().filter(chosen).map(|listed| PeerStatus {
        lanes: lanes_of(listed.id, &views, &mut room),
        stream_connections: stream_connections_of(listed.id, &views),
        link_local: link_local(listed, &config),
        public_keys: listed.peer.public_keys.iter().map(ToString::to_string).collect(),
        allowed_ips: listed.peer.allowed_ips.iter().map(ToString::to_string).collect(),
        ..status_of(listed, &published)
    });
    let mut peers: Vec<PeerStatus> = peers.collect();
    if let (Some(peer), Some(_)) = (peers.first_mut(), &scope.peer) {
        peer.recent_flows = recent_flows(&mut views);
        if scope.lane.is_none() {
            peer.forwards = forwards(running, &peer.name, scope.all_forwards);
        }
    }
    let latest = running.refusals.latest();
    let refusals = latest.iter().rev().map(|(refusal, count)| shown_refusal(refusal, *count, unix_seconds));
    let mut status = Status {
        software: env!("CARGO_PKG_VERSION").to_owned(),
        commit: running.commit.map(str::to_owned),
        host: host_name(),
        public_key: running.own_key.to_string(),
        uptime_seconds: now.saturating_duration_since(running.since).as_secs_f64(),
        workers: config.worker_count(),
        cpus: process::available_cpus(),
        unanswered_workers,
        peer_file_problems: peer_file_problems(&config),
        drain: drain(running),
        web_server: web_server(running, &config, unix_seconds),
        lanes_left_out: room.left_out,
        uplinks: running.hub.uplinks.counts().iter().map(UplinkStatus::new).collect(),
        totals,
        users: users(running, scope, unix_seconds),
        tun: config.tun.as_ref().map(|tun| tun_status(tun, &running.registry, &views)),
        routes: views.iter_mut().flat_map(|view| std::mem::take(&mut view.routes)).collect(),
        talkers: TalkerStatus::merge(views.iter_mut().flat_map(|view| std::mem::take(&mut view.talkers))),
        services: services(running, &config, now),
        sockets: sockets(&views),
        limits,
        peers,
        handshakes: by_label(&running.snapshots, "culvert_handshakes_total"),
        gate: by_label(&running.snapshots, "culvert_gate_datagrams_total"),
        refusals: refusals.collect(),
        meanings: BTreeMap::new(),
    };
    status.explain();
    status
}

/// The users, unless one peer is asked for.
fn users(running: &Running, scope: &Scope, now: u64) -> Vec<UserStatus> {
    if scope.peer.is_some() {
        return Vec::new();
    }
    running.hub.users.figures().iter().map(|figures| UserStatus::new(figures, now)).collect()
}

/// The name of this host; empty if the kernel does not say it.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    // The kernel's word for a host without a name.
    name.trim().trim_start_matches("(none)").to_owned()
}

/// What is wrong with files of the directory of peers, as many as a terminal shows.
fn peer_file_problems(config: &Config) -> Vec<String> {
    const MOST: usize = 100;
    let problems = config.directory.rejected.iter().take(MOST);
    problems.map(|problem| format!("{}: {problem}", problem.place(Path::new("")))).collect()
}

/// Our services, with what the workers have found out about where they are.
fn services(running: &Running, config: &Config, now: Instant) -> Vec<ServiceStatus> {
    let upstreams = &running.hub.upstreams;
    let served = config.services.iter().filter(|service| service.udp || service.tcp);
    let service = |service: &config::Service| ServiceStatus {
        name: service.name.to_string(),
        upstream: upstreams
            .states(&service.upstream)
            .into_iter()
            .map(|state| of_upstream(state, now))
            .collect(),
    };
    served.map(service).collect()
}

fn of_upstream(TargetState { target, addresses, failure }: TargetState, now: Instant) -> UpstreamStatus {
    let (failure, at) = failure.unzip();
    let failed_seconds = at.flatten().map(|at| now.saturating_duration_since(at).as_secs_f64());
    UpstreamStatus { target, addresses, failure, failed_seconds }
}

/// The link-local addresses by which the kernel's routes may name a peer.
fn link_local(listed: &Listed, config: &Config) -> Vec<Ipv6Addr> {
    let keys =
        listed.peer.public_keys.iter().filter(|_| config.tun.as_ref().is_some_and(Tun::follows_routes));
    keys.map(PublicKey::link_local).collect()
}

fn web_server(running: &Running, config: &Config, unix_seconds: u64) -> Option<WebServerStatus> {
    let addresses = running.web_server.addresses();
    let ends = config.certificate.as_ref().filter(|_| config.http.tls).map(WebCertificate::expires);
    (!addresses.is_empty()).then(|| WebServerStatus {
        addresses: addresses.iter().map(ToString::to_string).collect(),
        connections: Used {
            used: running.metrics.visitors.open() as u64,
            limit: config::MOST_WEB_CONNECTIONS as u64,
        },
        certificate_seconds_left: ends.map(|end| end.saturating_sub(unix_seconds)),
    })
}

/// How far the agent has come with draining, as the workers last published it.
fn drain(running: &Running) -> Option<Drain> {
    if running.health.readiness() != Err(NotReady::Draining) {
        return None;
    }
    let counts = by_label(&running.snapshots, "culvert_drain_sessions");
    let of = |state| counts.get(state).copied().unwrap_or(0);
    Some(Drain { waiting: of("waiting"), closed: of("closed") })
}

impl Figures for Running {
    fn published(&self) -> Vec<PeerBrief> {
        let published = self.snapshots.latest();
        self.registry.list().iter().map(|listed| brief_of(listed, &published)).collect()
    }

    fn asked(&self, scope: &Scope) -> Status {
        of(self, scope, AsOf::LastPublication)
    }
}

/// What was published of a peer, if its slot is not that of another one yet.
fn status_of(listed: &Listed, published: &Publication) -> PeerStatus {
    let own = published.has(listed.id, &listed.peer.name);
    own.then(|| published.status(listed.id)).flatten().unwrap_or_else(|| unseen(listed))
}

/// The brief status of a peer: what its worker published, or that nothing was seen of it.
fn brief_of(listed: &Listed, published: &Publication) -> PeerBrief {
    let own = published.has(listed.id, &listed.peer.name);
    own.then(|| published.brief(listed.id)).flatten().unwrap_or_else(|| PeerBrief::from(&unseen(listed)))
}

/// A peer that the workers have not told of yet.
fn unseen(listed: &Listed) -> PeerStatus {
    let waits = listed.peer.endpoints.is_empty();
    let state = if waits { PeerState::Waiting } else { PeerState::Dialling };
    PeerStatus { name: Arc::clone(&listed.peer.name), origin: listed.origin, state, ..PeerStatus::default() }
}

/// The accounts of all peers, those included that were removed and still have their place.
fn totals(published: &Publication) -> Totals {
    let mut totals = Totals::default();
    for [uplink, downlink] in published.slots().map(|slot| published.accounts(slot)) {
        totals.uplink.add(&uplink);
        totals.downlink.add(&downlink);
    }
    totals.uplink.complete();
    totals.downlink.complete();
    totals
}

/// How many lanes are still shown, and how many were not.
struct Room {
    left: usize,
    left_out: usize,
}

/// The lanes of a peer at all workers, by index, as many as there is `room` for.
fn lanes_of(peer: PeerId, views: &[WorkerView], room: &mut Room) -> Vec<LaneStatus> {
    let mut of_peer = views.iter().flat_map(|view| &view.lanes).filter(|(id, _)| *id == peer);
    let mut lanes: Vec<LaneStatus> = of_peer.by_ref().take(room.left).map(|(_, lane)| lane.clone()).collect();
    room.left -= lanes.len();
    room.left_out += of_peer.count();
    // A lane that drains stands behind the one that replaced it.
    lanes.sort_by_key(|lane| (lane.index, std::cmp::Reverse(lane.epoch)));
    for lane in &mut lanes {
        let of_peer = views.iter().flat_map(|view| &view.lane_flows).filter(|(id, _)| *id == peer);
        lane.flows = of_peer.filter_map(|(_, flows)| flows.get(usize::from(lane.index))).sum();
    }
    lanes
}

/// The stream connections of a peer at all workers, by number.
fn stream_connections_of(peer: PeerId, views: &[WorkerView]) -> Vec<StreamConnectionStatus> {
    let rows = views.iter().flat_map(|view| &view.stream_connections).filter(|(id, _)| *id == peer);
    let mut all: Vec<StreamConnectionStatus> = rows.map(|(_, row)| row.clone()).collect();
    all.sort_by_key(|connection| (connection.number, connection.worker));
    all
}

/// The latest flows of all workers, the latest first, as many as one of them may tell of.
fn recent_flows(views: &mut [WorkerView]) -> Vec<FlowStatus> {
    let mut flows: Vec<FlowStatus> = views.iter_mut().flat_map(|view| view.flows.drain(..)).collect();
    flows.sort_by(|one, other| {
        one.silent_seconds.total_cmp(&other.silent_seconds).then(one.number.cmp(&other.number))
    });
    flows.truncate(engine::worker::MOST_FLOWS);
    flows
}

/// The open TCP forwards of a peer, those first that have been stalled for longest: all of them, or as many as a terminal shows.
fn forwards(running: &Running, peer: &str, all: bool) -> Vec<ForwardStatus> {
    let mut list = ForwardList::begin(peer, all, running.inboxes.len());
    let by = running.clock.now() + ANSWER_WITHIN;
    while let Some(portion) = list.ask(&running.inboxes) {
        list.take(&portion, by.saturating_duration_since(running.clock.now()));
    }
    list.finish()
}

fn sockets(views: &[WorkerView]) -> Vec<SocketStatus> {
    let sum = |role: UdpRole| {
        let mut sum = SocketStatus { role: role.label().into(), ..SocketStatus::default() };
        views.iter().for_each(|view| sum.add(&view.sockets[role]));
        sum
    };
    UdpRole::ALL.map(sum).into()
}

fn tun_status(tun: &Tun, registry: &PeerRegistry, views: &[WorkerView]) -> TunStatus {
    let link = Netlink::open().and_then(|mut netlink| netlink.link(Which::Name(&tun.name)));
    // What cannot be asked is not known, and a device that is gone is said to be.
    let link = link.unwrap_or_default();
    let mut status = TunStatus {
        name: (*tun.name).into(),
        up: link.as_ref().map(|link| link.up),
        mtu: link.as_ref().map(|link| link.mtu),
        addresses: registry.device_addresses(tun).iter().map(ToString::to_string).collect(),
        ..TunStatus::default()
    };
    let kernel = |drops: fn(&Link) -> u64| link.as_ref().map(drops);
    // The kernel sends what we read.
    status.uplink.kernel_drops = kernel(|link| link.tx_dropped + link.tx_errors);
    status.downlink.kernel_drops = kernel(|link| link.rx_dropped + link.rx_errors);
    views.iter().filter_map(|view| view.tun.as_ref()).for_each(|queue| status.add(queue));
    status
}

fn limits(config: &Config, listed: &[Listed], published: &Publication) -> LimitsStatus {
    let used = |used: usize, limit: usize| Used { used: used as u64, limit: limit as u64 };
    let guests = listed.iter().filter(|listed| listed.origin == PeerOrigin::Open).count();
    let (limits, in_use): (_, InUse) = (&config.limits, published.in_use());
    let (mut flows, mut queue_bytes, mut tcp_streams) = (0, 0, 0);
    let (mut most_flows, mut most_streams) = (0, 0);
    for peer in published.slots().filter_map(|slot| published.brief(slot)) {
        let streams = peer.tcp_streams as usize;
        flows += peer.flows;
        queue_bytes += peer.queue_bytes;
        tcp_streams += streams;
        (most_flows, most_streams) = (peer.flows.max(most_flows), streams.max(most_streams));
    }
    let process::Descriptors { open, limit: most_open } = process::descriptors().unwrap_or_default();
    LimitsStatus {
        peers: used(listed.len() - guests, limits.peers),
        open_peers: used(guests, limits.open_peers),
        flows: used(flows, limits.flows),
        flows_per_peer: used(most_flows, limits.flows_per_peer),
        queue_bytes: used(queue_bytes, limits.queue_bytes),
        tcp_streams_per_peer: used(most_streams, limits.tcp_streams_per_peer as usize),
        tcp_streams: used(tcp_streams, limits.tcp_streams),
        stream_bytes: Used { used: in_use.stream_bytes, limit: limits.stream_bytes as u64 },
        repair_bytes: Used { used: in_use.repair_bytes, limit: limits.repair_bytes as u64 },
        handshakes: used(in_use.handshakes, limits.handshakes),
        used_tokens: used(in_use.used_tokens, MOST_ENTRIES),
        decoy_flows: used(in_use.decoy_flows, limits.decoy_flows),
        descriptors: Used { used: open, limit: most_open },
    }
}

fn shown_refusal(refusal: &refusals::Refusal, count: u64, unix_seconds: u64) -> Refusal {
    Refusal {
        // Both are whole seconds of the wall clock, which may have been set back since.
        age_seconds: Duration::from_secs(unix_seconds.saturating_sub(refusal.at)).as_secs_f64(),
        source: refusal.source.to_string(),
        count,
        reason: format!("{} (remedy: {})", refusal.why, refusal.why.remedy()),
        public_key: refusal.why.key().map(|key| key.to_string()),
    }
}

/// The counts of a family with one label, by its value.
fn by_label(snapshots: &Snapshots, family: &str) -> Counts {
    let mut counts = Counts::new();
    for (_, samples) in snapshots.series(family) {
        counts.extend(samples.iter().filter_map(|(labels, value)| match value {
            Value::Count(count) => Some((labels.first()?.clone().into(), *count)),
            Value::Number(_) | Value::Buckets(_) => None,
        }));
    }
    counts
}

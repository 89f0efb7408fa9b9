//! An admin server over peers that nobody connects: as many as a test wants, in every state, with traffic that changes.

use std::{
    f64::consts::TAU,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use base::panics::lock;
use config::Admin as AdminConfig;
use culvert::admin::{self, Admin};
use culvert_tests::clock;
use engine::{
    brief::PeerBrief,
    health::Health,
    reach::Failure,
    status::{
        Accounting, FlowStatus, ForwardStatus, LanePackets, LaneRates, LaneStatus, LastError, LineState,
        LineStatus, PeerRates, PeerState, PeerStatus, TcpServiceStatus, TcpStatus,
    },
};
use ops::{
    control_socket::status::{LimitsStatus, Refusal, Scope, Status, Totals, Used},
    metrics::Metrics,
    web::{Figures, SAMPLE_INTERVAL, SAMPLES, StatusPage},
};
use tokio::{runtime, sync::watch};

/// The peers, of which the first is in the middle of everything.
#[derive(Default)]
pub(crate) struct Peers {
    pub(crate) list: Mutex<Vec<PeerStatus>>,
    /// The number of times that they were published; their rates go up and down with it.
    pub(crate) published: AtomicU64,
    /// What the agent says of its refusals.
    pub(crate) refusals: Mutex<Vec<Refusal>>,
}

impl Figures for Peers {
    fn published(&self) -> Vec<PeerBrief> {
        let tick = self.published.fetch_add(1, Ordering::Relaxed);
        let mut peers = lock(&self.list);
        for (number, peer) in peers.iter_mut().enumerate() {
            if peer.state == PeerState::Connected {
                pass(peer, number, tick);
            }
        }
        peers.iter().map(PeerBrief::from).collect()
    }

    fn asked(&self, scope: &Scope) -> Status {
        let mut peers = lock(&self.list).clone();
        let mut totals = Totals::default();
        for peer in &peers {
            totals.uplink.add(&peer.uplink);
            totals.downlink.add(&peer.downlink);
        }
        [&mut totals.uplink, &mut totals.downlink].into_iter().for_each(Accounting::complete);
        peers.retain(|peer| scope.peer.as_ref().is_none_or(|name| *peer.name == **name));
        if scope.peer.is_some() {
            peers.iter_mut().for_each(detail);
        }
        let used = |used, limit| Used { used, limit };
        Status {
            software: "0.1.0".to_owned(),
            public_key: "4wsfZjQYFaonubvWqMG7K2Nm0iutRAdy9XEdw7pJbgA".to_owned(),
            uptime_seconds: 200_000.0,
            workers: 2,
            peers,
            totals,
            limits: LimitsStatus {
                flows: used(47_000, 50_000),
                peers: used(1_000, 1_000),
                ..LimitsStatus::default()
            },
            handshakes: [("dialled".into(), 12), ("established".into(), 9)].into(),
            gate: [("passed".into(), 812)].into(),
            refusals: lock(&self.refusals).clone(),
            ..Status::default()
        }
    }
}

/// A second of traffic.
fn pass(peer: &mut PeerStatus, number: usize, tick: u64) {
    let wave = 1.0 + 0.6 * (TAU * (tick as f64 / 37.0 + number as f64 / 1_500.0)).sin();
    let (up, down) = (wave * 90_000.0 * (1 + number % 17) as f64, wave * 35_000.0 * (1 + number % 23) as f64);
    let losses = 1.0 + (TAU * (tick as f64 / 23.0 + number as f64 / 900.0)).sin();
    let (sent, lost) = (1_000, (losses * (1 + number % 4) as f64) as u64);
    let rates = PeerRates {
        uplink_bytes_per_second: up,
        uplink_datagrams_per_second: up / 1_000.0,
        downlink_bytes_per_second: down,
        downlink_datagrams_per_second: down / 1_000.0,
        lane_packets_per_second: sent as f64,
        lost_packets_per_second: lost as f64,
        ..PeerRates::default()
    };
    peer.rates = Some(rates);
    peer.rtt_seconds = Some(0.004 + (number * 13 % 100) as f64 / 1e3);
    peer.since_seconds = Some(3_600.0 * (1 + number % 50) as f64 + tick as f64);
    for (side, bytes) in [(&mut peer.uplink, up), (&mut peer.downlink, down)] {
        side.account.received += (bytes / 1_000.0) as u64;
        side.account.delivered += (bytes / 1_000.0) as u64;
        // Samples of the history are five seconds apart, whatever a tick is.
        side.delivered_bytes += bytes as u64 * SAMPLE_INTERVAL.as_secs();
        side.complete();
    }
    peer.more.lanes.sealed_packets += sent;
    peer.more.lanes.lost_packets += lost;
    let packets = &mut peer.lane_packets;
    *packets = LanePackets {
        sent: packets.sent + sent,
        lost: packets.lost + lost,
        lost_share: Some(0.002),
        lost_share_last_second: Some(lost as f64 / sent as f64),
        ..*packets
    };
}

/// What only a question about one peer shows.
fn detail(peer: &mut PeerStatus) {
    if peer.state != PeerState::Connected {
        return;
    }
    let rates = Some(LaneRates {
        sent_bytes_per_second: 2e6,
        received_bytes_per_second: 1e6,
        ..LaneRates::default()
    });
    let lane = |index| LaneStatus {
        index,
        state: "up".into(),
        rates,
        remote_address: peer.address,
        ..LaneStatus::default()
    };
    peer.lanes = vec![lane(0), lane(1)];
    let line = |number: u8, name: &str, state, cause: Option<&'static str>| LineStatus {
        number,
        // A line is named in our own configuration, which is no reason to trust it.
        name: if peer.name.starts_with('<') { Arc::clone(&peer.name) } else { name.into() },
        state,
        cause: cause.map(Into::into),
        lanes_up: 1,
        sent_bytes: 64_000_000,
        ..LineStatus::default()
    };
    peer.lines = vec![
        line(0, "dsl", LineState::InUse, None),
        line(1, "lte", LineState::Standby, Some("metered")),
        line(2, "sat", LineState::Suspect, Some("silent")),
    ];
    let service = if peer.name.starts_with('<') { Arc::clone(&peer.name) } else { "dns".into() };
    let flow = |number| FlowStatus {
        number,
        service: Arc::clone(&service),
        standing: "confirmed".into(),
        ..FlowStatus::default()
    };
    peer.recent_flows = (0..3).map(flow).collect();
    let forward = |number: u32| ForwardStatus {
        id: format!("5f3a9c-{number}"),
        service: Arc::clone(&service),
        opened_by: "here".into(),
        state: "open".into(),
        age_seconds: f64::from(600 - number),
        stalled_seconds: (number == 1).then_some(130.0),
        stopped: (number == 1).then(|| "here".into()),
        ..ForwardStatus::default()
    };
    peer.forwards = (1..4).map(forward).collect();
    let counts = TcpServiceStatus { service, open: 3, ..TcpServiceStatus::default() };
    peer.tcp = TcpStatus { stalled: 1, services: vec![counts], ..TcpStatus::default() };
    peer.tcp_streams = 3;
}

/// A connected peer.
#[must_use]
pub(crate) fn connected(name: &str, address: &str) -> PeerStatus {
    PeerStatus {
        name: name.into(),
        state: PeerState::Connected,
        address: Some(address.parse().expect("an address")),
        software: Some("culvert/0.1.0".into()),
        mode: Some("lanes".into()),
        preshared_keys: 2,
        preshared_key_in_use: Some(1),
        lanes_up: 2,
        flows: name.len(),
        inner_mtu: Some(1_412),
        largest_datagram: Some(1_417),
        ..PeerStatus::default()
    }
}

/// A peer that was dialled in vain.
#[must_use]
pub(crate) fn failed(name: &str, reason: &str) -> PeerStatus {
    let causes = vec![
        "it is not running, or a firewall on the way drops UDP (path)".into(),
        "our key is not among its peers (allowlist)".into(),
    ];
    let failure = Arc::new(Failure { reason: reason.to_owned(), causes });
    let last_error = Some(LastError { age_seconds: 4.0, failure });
    let address = Some("198.51.100.7:4433".parse().expect("an address"));
    PeerStatus { name: name.into(), state: PeerState::Dialling, address, last_error, ..PeerStatus::default() }
}

/// A thousand peers: three failed, two wait, the others are connected.
#[must_use]
pub(crate) fn thousand() -> Vec<PeerStatus> {
    let site = |number: usize| {
        connected(&format!("site-{number:04}"), &format!("203.0.113.{}:4433", number % 250 + 1))
    };
    let waiting = |name: &str| PeerStatus { name: name.into(), ..PeerStatus::default() };
    let mut peers: Vec<PeerStatus> = (0..995).map(site).collect();
    peers.extend(["depot", "harbour", "kiosk"].map(|name| failed(name, "no answer")));
    peers.extend(["laptop", "spare"].map(waiting));
    peers
}

/// The server; dropping it stops it, as an agent that ends does.
pub(crate) struct Server {
    pub(crate) health: Arc<Health>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts it at `address`, with ten minutes of history; `health` is that of its workers.
    ///
    /// # Panics
    /// When the address is taken.
    #[must_use]
    pub(crate) fn start(address: SocketAddr, peers: &Arc<Peers>, token_file: &str, health: Health) -> Self {
        let health = Arc::new(health);
        let metrics = Arc::new(Metrics::new("0.1.0", None, 2, Arc::default(), Arc::clone(&health)));
        let config = AdminConfig { page: true, token_file: token_file.into(), ..AdminConfig::default() };
        let admin = Admin::new(config, metrics, Arc::clone(&health), clock::now);
        let page = StatusPage::new(Arc::clone(peers) as _, Arc::clone(&health));
        let newest = clock::now();
        for sample in (0..SAMPLES as u32).rev() {
            page.sample(newest.checked_sub(sample * SAMPLE_INTERVAL).unwrap_or(newest));
        }
        let slot = admin.page.clone().expect("the page is on");
        assert!(slot.set(Arc::new(page)).is_ok(), "the page is new");
        health.set_ready(true);
        let listener = std::net::TcpListener::bind(address).expect("the port is free");
        listener.set_nonblocking(true).expect("it is a socket");
        let (stop, stopped) = watch::channel(false);
        let thread = std::thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).expect("it is a socket");
                admin::serve(listener, admin, stopped).await;
            });
            runtime.shutdown_timeout(Duration::from_secs(2));
        });
        Self { health, stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking(), "the server panicked");
        }
    }
}

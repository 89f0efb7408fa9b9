//! What a worker is made of, and how it begins: every port opened, every peer about to be dialled.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::SocketAddr,
    sync::Arc,
    time::Instant,
};

use config::{self, Config};
use dataplane::{
    forward::{Local, Locals, tcp, tun::TunSide},
    lanes::{Lanes, Underlays},
};
use gate::{
    Gate, GateSetup, Own,
    budget::Budget,
    refusals::Refusals,
    table::SingleUse,
    tls::{self, TlsIdentity},
};
use net::{Net, Ready};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use slab::Slab;
use wire::{
    cid::ConnectionIds,
    clock::Clock,
    hash::PeerMap,
    ids::{IngressId, PeerId},
    messages::Features,
    rate::Lines,
    throttle::Throttle,
    timers::Timers,
};

use crate::{
    datapath::downlink::Notes,
    peer::Peer,
    roster::Roster,
    tunnel::Board,
    worker::{
        Doors, Exchange, HOUSEKEEPING_INTERVAL, LOG_INTERVAL, Outgoing, Publisher, Source, Strangers, Timer,
        Worker, books, decoy, endpoint, number,
        peers::PeerMaker,
        shell,
        sources::Sources,
        tun,
        work::{Rests, TurnWork},
    },
};

/// What a worker is made of.
pub struct Setup {
    /// The configuration.
    pub config: Arc<Config>,
    /// Our key and certificate.
    pub identity: Arc<TlsIdentity>,
    /// The other keys that follow from the identity.
    pub own: Arc<Own>,
    /// Where refused handshakes are noted.
    pub refusals: Arc<Refusals>,
    /// The knocks that were used, those of earlier processes included.
    pub knocks: SingleUse,
    /// Wall-clock time.
    pub clock: Arc<dyn Clock + Send + Sync>,
    /// The outside world.
    pub net: Box<dyn Net>,
    /// Where sources report that they are ready.
    pub ready: Ready,
    /// Random, made at process start; flow numbers are unique within it.
    pub instance: [u8; 16],
    /// Seed of the worker's randomness: connection IDs, jitter, path challenges.
    pub seed: [u8; 32],
    /// Which worker this is.
    pub worker: u8,
    /// What it shares with the others.
    pub exchange: Arc<Exchange>,
    /// Who the peers are; those of the configuration have its first places.
    pub roster: Arc<Roster>,
    /// Where its counts go.
    pub metrics: Publisher,
    /// What it shares with the tunnel's thread; none without a `[tun]`.
    pub tun: Option<TunSetup>,
}

/// The TUN side of [`Setup`]; the worker's queue comes from [`Net::tun`].
pub struct TunSetup {
    /// Where it says what fits into a packet to each peer.
    pub board: Arc<Board>,
}

/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A port could not be opened.
    #[error("cannot listen on {address} ({what}): {error}{}", remedy(.error))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The configuration key it comes from.
        what: &'static str,
        /// The kernel's reason.
        error: io::Error,
    },
    /// This worker's queue of the TUN device cannot be used.
    #[error("cannot read and write the TUN device (tun): {0}")]
    Tun(io::Error),
    /// Packets cannot be marked.
    #[error("cannot set transport.mark: {0} (remedy: CAP_NET_ADMIN, or mark = 0)")]
    Mark(io::Error),
    /// The TLS configuration cannot be built.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] tls::TlsError),
}

/// The end of an error message about a socket: what the operator can do, where that is known.
pub fn remedy(error: &io::Error) -> &'static str {
    const REMEDIES: [(io::ErrorKind, &str); 3] = [
        (
            io::ErrorKind::AddrInUse,
            " (remedy: stop the other process, see `ss -lpn`, or choose another port)",
        ),
        (io::ErrorKind::PermissionDenied, " (remedy: a port from 1024 on, or CAP_NET_BIND_SERVICE)"),
        (io::ErrorKind::AddrNotAvailable, " (remedy: an address of this host, see `ip address`)"),
    ];
    REMEDIES.iter().find(|(kind, _)| *kind == error.kind()).map_or("", |(_, remedy)| remedy)
}

/// The bound addresses of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Of `transport.listen`.
    pub transport: Vec<SocketAddr>,
    /// Of `[[udp]]`.
    pub udp: Vec<SocketAddr>,
    /// Of `[[tcp]]`.
    pub tcp: Vec<SocketAddr>,
}

/// The device as the worker has it, if there is one.
fn tun_side(
    setup: Option<TunSetup>,
    doors: &mut Doors,
    config: &Config,
    peers: &[Peer],
    now: Instant,
) -> Result<Option<(TunSide, Arc<Board>)>, StartError> {
    let Some((setup, (queue, token))) = setup.zip(doors.tun().map_err(StartError::Tun)?) else {
        return Ok(None);
    };
    let mut side = TunSide::new(queue, token, tun::most_mtu(config), now);
    for peer in peers {
        side.add_peer(peer.id, &peer.config.allowed_ips);
    }
    Ok(Some((side, setup.board)))
}

impl Worker {
    /// Opens every port of the configuration and starts to dial.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn new(setup: Setup, now: Instant) -> Result<Self, StartError> {
        let Setup { config, identity, own, roster, refusals, knocks, clock, net, ready, instance, .. } =
            setup;
        let Setup { seed, worker, exchange, metrics, tun, .. } = setup;
        let place = (worker, exchange.workers());
        exchange.streams().set_most(config.limits.stream_bytes);
        let mut rng = StdRng::from_seed(seed);
        let ids = ConnectionIds::new(own.issued().clone(), rng.random(), place.0, place.1);
        let control = endpoint::control(
            &config,
            (&identity, &own),
            (&ids, &roster, &refusals, &exchange),
            &metrics,
            (&clock, rng.random()),
        )?;
        let gate = Gate::new(GateSetup {
            own: Arc::clone(&own),
            ids: ids.clone(),
            allowlist: Arc::<Roster>::clone(&roster),
            refusals: Arc::clone(&refusals),
            required: config.access.knock == config::Knock::Required,
            window: config.access.clock_window,
            table: knocks,
            budget: Budget::new(place.1, now),
            clock: Arc::clone(&clock),
            crypto: tls::initial_crypto(&identity)?,
            rng: StdRng::from_seed(rng.random()),
        });
        let most_segments = net.most_segments();
        let mut doors = Doors::new(net, &config, rng);
        let inbox_token = doors.token(Source::Inbox);
        let inbox = shell::Inbox::new(ready.clone(), inbox_token);
        exchange.join(worker, ready.clone(), inbox_token);
        let own_key = *identity.public_key();
        let maker = PeerMaker { config: &config, exchange: &exchange, own_key: &own_key, place };
        let peers = (0..).map(PeerId).zip(&config.peers).map(|(id, peer)| {
            let named = (Arc::new(peer.clone()), peer.origin.into());
            maker.make(id, named, now)
        });
        let peers: Vec<Peer> = peers.collect();
        let tun = tun_side(tun, &mut doors, &config, &peers, now)?;
        let mut made = Self {
            identity,
            instance,
            place,
            exchange,
            roster,
            outgoing: Outgoing::default(),
            parcels: VecDeque::new(),
            stopped: false,
            ports: Vec::new(),
            ready,
            doors,
            ids,
            own,
            clock,
            gate,
            refusals,
            control,
            forward_peers: (0..).map(PeerId).take(config.peers.len()).collect(),
            peers,
            lanes: Lanes::default(),
            captures: Vec::new(),
            underlays: Underlays::default(),
            locals: Locals::new(most_segments),
            tun,
            strangers: Strangers::new(config.access.decoy),
            decoys: decoy::Decoys::of_worker(worker, &config, now),
            listeners: Vec::new(),
            tcp: Slab::new(),
            tcp_by_stream: PeerMap::default(),
            timers: Timers::default(),
            due: Vec::new(),
            sources: Sources::new(),
            fresh: Vec::new(),
            batch: Box::default(),
            notes: Notes::default(),
            rests: Rests::default(),
            work: TurnWork::default(),
            plain_waiting: Vec::new(),
            events: Vec::new(),
            inbox: Arc::new(inbox),
            stopping: false,
            ended: false,
            unpublished: true,
            metrics,
            totals: books::Totals::default(),
            ceilings: crate::worker::ceilings::Ceilings::new(),
            too_large_log: Throttle::new(LOG_INTERVAL),
            refusal_log: Throttle::new(LOG_INTERVAL),
            accept_log: Throttle::new(LOG_INTERVAL),
            lane_logs: crate::worker::lanes::LaneLogs::new(),
            lane_limits: crate::worker::LaneLimits::default(),
            withheld: Features::default(),
            drops_log: Throttle::new(LOG_INTERVAL),
            resolve_log: Throttle::new(LOG_INTERVAL),
            service_log: Throttle::new(LOG_INTERVAL),
            journal_log: Throttle::new(LOG_INTERVAL),
            tun_log: Throttle::new(LOG_INTERVAL),
            source_log: Throttle::new(LOG_INTERVAL),
            loop_log: Throttle::new(LOG_INTERVAL),
            served: Vec::new(),
            first_to_drain: 0,
            violation_log: Throttle::new(LOG_INTERVAL),
            details_log: Lines::new(now),
            crowds: HashMap::new(),
            stirred: Vec::new(),
            passes: 0,
            tcp_scratch: tcp::Scratch::default(),
            config,
        };
        made.open_ports()?;
        made.arm_timers(now);
        Ok(made)
    }

    fn arm_timers(&mut self, now: Instant) {
        for peer in &self.peers {
            if let Some(at) = peer.dialler.deadline() {
                self.timers.arm(Timer::Dial(peer.id), at);
            }
        }
        self.timers.arm(Timer::Housekeeping, now + HOUSEKEEPING_INTERVAL);
        self.timers.arm(Timer::Publish, now);
    }

    fn open_ports(&mut self) -> Result<(), StartError> {
        let config = Arc::clone(&self.config);
        let failed = |address: SocketAddr, what| move |error| StartError::Listen { address, what, error };
        for address in &config.transport.listen {
            let port = self
                .doors
                .listen(&mut self.underlays, *address)
                .map_err(failed(*address, "transport.listen"))?;
            self.ports.push(port);
        }
        for (place, forward) in config.udp.iter().enumerate() {
            let local =
                Local::Ingress { ingress: IngressId(number(place)), peer: PeerId(number(forward.peer)) };
            self.doors
                .ingress(&mut self.locals, forward.listen, local)
                .map_err(failed(forward.listen, "udp.listen"))?;
        }
        for (place, forward) in config.tcp.iter().enumerate() {
            let listener =
                self.doors.tcp_listen(forward.listen, place).map_err(failed(forward.listen, "tcp.listen"))?;
            self.listeners.push(Some(listener));
        }
        Ok(())
    }

    /// The bound addresses: underlay, `[[udp]]`, `[[tcp]]`, each in the configuration's order.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        let ingress = self.locals.iter().filter(|socket| match socket.local {
            Local::Ingress { .. } => true,
            Local::Upstream { .. } => false,
        });
        Addresses {
            transport: self.underlays.iter().map(|underlay| underlay.socket.local_addr()).collect(),
            udp: ingress.map(|socket| socket.socket.local_addr()).collect(),
            tcp: self.listeners.iter().flatten().map(|(listener, _)| listener.local_addr()).collect(),
        }
    }
}

/// Whether worker `place.0` of `place.1` dials this peer.
pub(super) fn dials(peer: PeerId, place: (u8, u8)) -> bool {
    peer.0 % u32::from(place.1) == u32::from(place.0)
}

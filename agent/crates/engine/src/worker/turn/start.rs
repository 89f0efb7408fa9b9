//! The start of a worker: opens every port and prepares to dial every peer.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Instant};

use base::{
    ids::{IngressId, PeerId, WorkerId},
    throttle::Throttle,
    timers::Timers,
    token_bucket::Lines,
};
use config::{self};
use dataplane::{
    forward::{Local, Locals},
    lanes::{Lanes, Underlays},
    socket_stats::BytesOfLines,
    sockets::{SocketFactory, Source},
};
use gate::{Gate, GateParts, budget::Budget, tls};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use wire::cid::ConnectionIds;

use crate::{
    control::web::Answers,
    peer::{Peer, Peers},
    registry::PeerRegistry,
    worker::{
        context::{
            Context, Logs, Sockets, Stats,
            ceilings::Ceilings,
            names::{MOVED_LOG_INTERVAL, Names},
            peer_maker::PeerMaker,
            setup::Setup,
            sources::Sources,
            timer::{HOUSEKEEPING_INTERVAL, LOG_INTERVAL, Timer, index_u32},
            work::TurnWork,
        },
        decoy::Decoy,
        device::Tunnel,
        lanes::LaneHost,
        local::{DataPlane, unauthenticated::Unauthenticated},
        outside::endpoint::{self, StartError},
        report::{inbox::Inbox, stats},
        session::Sessions,
        streams::TcpForwards,
        turn::Worker,
    },
};

/// The bound addresses of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// The addresses of the sockets that carry QUIC, those of `transport.listen` among them.
    pub transport: Vec<SocketAddr>,
    /// The addresses of the `[[udp]]` ports.
    pub udp: Vec<SocketAddr>,
    /// The addresses of the `[[tcp]]` ports.
    pub tcp: Vec<SocketAddr>,
}

impl Worker {
    /// Opens every port of the configuration and prepares to dial the peers.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn new(setup: Setup, now: Instant) -> Result<Self, StartError> {
        let id = WorkerId { index: setup.worker, count: setup.hub.workers() };
        let mut rng = StdRng::from_seed(setup.seed);
        let ids = ConnectionIds::new(setup.own.issued.clone(), rng.random(), id.index, id.count)
            .with_server_id(setup.config.transport.server_id);
        let control = endpoint::control(&setup, &ids, rng.random())?;
        let Setup { config, identity, own, registry, refusals, knocks, clock, net, ready, instance, .. } =
            setup;
        let Setup { hub, metrics, tun, site, tunnels, software, .. } = setup;
        hub.users.follow(&config);
        let wall_clock = Arc::clone(&clock);
        hub.streams.set_most(config.limits.stream_bytes);
        let gate = Gate::new(GateParts {
            own: Arc::clone(&own),
            ids: ids.clone(),
            allowlist: Arc::<PeerRegistry>::clone(&registry),
            refusals: Arc::clone(&refusals),
            required: config.access.knock == config::Knock::Required,
            key_exchange: config.transport.key_exchange,
            window: config.access.clock_window,
            table: knocks,
            budget: Budget::new(id.count, now),
            clock: Arc::clone(&clock),
            crypto: tls::initial_crypto(&identity)?,
            rng: StdRng::from_seed(rng.random()),
        });
        let most_segments = net.most_segments();
        let mut factory = SocketFactory::new(net, &config).with_upstreams(&hub.upstreams);
        let inbox_token = factory.token(Source::Inbox);
        let inbox = Inbox::new(ready.clone(), inbox_token);
        hub.join(id.index, ready.clone(), inbox_token);
        let mut sessions = Sessions::new(control, gate, own, ids, instance, refusals, clock);
        sessions.control.guests.connect(site, Answers::new(ready.clone(), inbox_token));
        sessions.control.guests.connect_users(Arc::clone(&hub.users), tunnels, wall_clock);
        sessions.follow_web(&config, id.count, now);
        let own_key = *identity.public_key();
        let maker = PeerMaker { config: &config, hub: &hub, own_key: &own_key, worker: id };
        let make = |(id, peer): (_, &config::Peer)| {
            maker.make(PeerId(id), Arc::new(peer.clone()), peer.origin.into(), now)
        };
        let peers: Vec<Peer> = (0..).zip(&config.peers).map(make).collect();
        let mut tunnel =
            Tunnel::open(tun, &mut factory, &config, &registry, &peers, now).map_err(StartError::Tun)?;
        sessions.control.guests.device =
            tunnel.serve_users(hub.users.links(), id.index, (ready.clone(), inbox_token));
        let mut made = Self {
            cx: Context {
                id,
                software,
                identity,
                hub,
                registry,
                peers: Peers::new(peers),
                rng,
                timers: Timers::default(),
                sources: Sources::new(),
                names: Names::default(),
                logs: Logs { name_moved: Throttle::new(MOVED_LOG_INTERVAL), ..Logs::new(LOG_INTERVAL) },
                debug_lines: Lines::new(now),
                stats: Stats {
                    totals: stats::Totals::default(),
                    retired: stats::RetiredLanes::default(),
                    charged_lines: BytesOfLines::default(),
                    ceilings: Ceilings::new(),
                    work: TurnWork::default(),
                    unpublished: true,
                },
                stopping: false,
                sockets: Sockets {
                    factory,
                    underlays: Underlays::default(),
                    lanes: Lanes::default(),
                    locals: Locals::new(most_segments),
                    ports: Vec::new(),
                },
                effects: VecDeque::new(),
                config: Arc::clone(&config),
            },
            data: DataPlane {
                unauthenticated: Unauthenticated::new(config.access.decoy),
                ..DataPlane::default()
            },
            sessions,
            host: LaneHost::default(),
            tcp: TcpForwards::new(ready.clone()),
            tunnel,
            decoy: Decoy::new(id.index, &config, now),
            metrics,
            ready,
            fresh: Vec::new(),
            due: Vec::new(),
            inbox: Arc::new(inbox),
            stopped: false,
            ended: false,
        };
        made.cx.open_ports(&mut made.tcp)?;
        made.tunnel.shared_prefixes_changed(&mut made.cx, now);
        made.cx.arm_timers(now);
        made.cx.look_up_names(now);
        Ok(made)
    }

    /// The bound addresses of the underlay, `[[udp]]` and `[[tcp]]` sockets, each in the configuration's order.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        let ingress =
            self.cx.sockets.locals.iter().filter(|socket| matches!(socket.local, Local::Ingress { .. }));
        Addresses {
            transport: self
                .cx
                .sockets
                .underlays
                .iter()
                .map(|underlay| underlay.socket.local_addr())
                .collect(),
            udp: ingress.map(|socket| socket.socket.local_addr()).collect(),
            tcp: self.tcp.addresses().collect(),
        }
    }
}

impl Context {
    fn arm_timers(&mut self, now: Instant) {
        for peer in self.peers.iter() {
            if let Some(at) = peer.dialler.deadline() {
                self.timers.arm(Timer::Dial(peer.data.id), at);
            }
        }
        self.timers.arm(Timer::Housekeeping, now + HOUSEKEEPING_INTERVAL);
        self.timers.arm(Timer::Publish, now);
    }

    fn open_ports(&mut self, tcp: &mut TcpForwards) -> Result<(), StartError> {
        let config = Arc::clone(&self.config);
        let failed = |address: SocketAddr, what| move |error| StartError::Listen { address, what, error };
        for address in &config.transport.listen {
            let port = self
                .sockets
                .factory
                .listen(&mut self.sockets.underlays, *address)
                .map_err(failed(*address, "transport.listen"))?;
            self.sockets.ports.push(port);
        }
        for (index, forward) in config.udp.iter().enumerate() {
            let local = Local::Ingress {
                ingress: IngressId(index_u32(index)),
                peer: PeerId(index_u32(forward.peer)),
            };
            self.sockets
                .factory
                .ingress(&mut self.sockets.locals, forward.listen, local)
                .map_err(failed(forward.listen, "udp.listen"))?;
        }
        for (index, forward) in config.tcp.iter().enumerate() {
            let listener = self
                .sockets
                .factory
                .tcp_listen(forward.listen, index)
                .map_err(failed(forward.listen, "tcp.listen"))?;
            tcp.listen(listener);
        }
        Ok(())
    }
}

//! The daemon: the ports, a thread per worker, one for the admin server.

use std::{
    net::SocketAddr,
    path::Path,
    rc::Rc,
    sync::{Arc, Mutex, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use arc_swap::ArcSwap;
use base::{
    clock::{Clock, SystemClock},
    panics::lock,
    throttle,
};
use config::{Config, defaults};
use dataplane::sockets::port_plan;
use engine::{
    health::Health,
    hub::Hub,
    registry::PeerRegistry,
    tunnel::Tunnel,
    worker::{
        Addresses, Command, Inbox, Publisher, Setup, Snapshot, Snapshots, StartError, Summary, Worker, shell,
        used_knocks,
    },
};
use gate::{Own, identity::Identity, refusals::Refusals, tls::TlsIdentity};
use net::{
    Ready,
    alarm::Alarm,
    kernel::KernelNet,
    netlink::interfaces::Interfaces,
    ports::{self, PortKind, Ports},
    process,
    tun::TunPort,
};
use ops::{
    control_socket::{ControlSocket, ListenError, RequestHandler},
    descriptors::{raise_descriptor_limit, sockets_for_flows},
    metrics::Metrics,
    operator::Running,
    qlog::Captures,
    web_server::WebServer,
};
use tokio::{runtime, sync::oneshot};

use crate::{
    admin::AdminServers,
    carrier::{AllCarriers, OfWorker},
    program,
    quotas::QuotaKeeper,
    records::RecordsKeeper,
    site, tunnels, web_server,
};

/// How long a worker stays to tell its peers of a stop again, if they go on sending: what waits is sent at once, and so is the first
/// word of the end. QUIC asks for three probe timeouts, which a far peer would make a second.
pub const STOP_DEADLINE: Duration = Duration::from_millis(300);

/// How long threads that were told to end are waited for beyond that, before the process ends without them.
const THREADS_WITHIN: Duration = Duration::from_millis(500);

/// How long files are waited for after that: a busy disk takes a second to write one.
const FILES_WITHIN: Duration = Duration::from_secs(2);

/// An agent that runs, with its threads and sockets.
pub struct Daemon {
    workers: Vec<WorkerThread>,
    /// Says that a worker has ended by itself, whichever; there is one to be taken.
    pub worker_ended: Option<oneshot::Receiver<()>>,
    admin: Arc<AdminServers>,
    /// The control socket, which is removed when the daemon ends.
    control: Option<ControlSocket>,
    /// The daemon, as an operator sees and changes it.
    pub running: Arc<Running>,
    pub addresses: Addresses,
    /// What it changed in the kernel is undone when the daemon ends.
    tunnel: Option<Tunnel>,
    quotas: QuotaKeeper,
    records: Option<RecordsKeeper>,
}

struct WorkerThread {
    inbox: Arc<Inbox>,
    thread: JoinHandle<()>,
}

impl Daemon {
    /// Opens every port and starts the threads; returns when the agent is ready.
    ///
    /// # Errors
    /// A port or a socket that cannot be opened, with the address and a remedy; a thread that cannot be made.
    pub fn start(config: Config, identity: &Identity) -> anyhow::Result<Self> {
        let descriptors = raise_descriptor_limit(&config);
        let now = SystemClock.now();
        let workers = config.worker_count();
        let health = Arc::new(Health::new(usize::from(workers), now));
        let snapshots = Arc::<Snapshots>::default();
        let metrics = Arc::new(metrics_of(workers, &snapshots, &health));
        let admin = Arc::new(AdminServers::start(&config.admin, &metrics, &health)?);
        let config = Arc::new(config);
        let hub = Hub::new(workers, config.peers.len(), now);
        hub.set_sockets(descriptors.map_or(0, |granted| sockets_for_flows(&config, granted)));
        metrics.show_users(&hub.users);
        let quotas = QuotaKeeper::start(&hub, config.state_dir.clone())?;
        hub.uplinks.begin(&config.transport.uplinks, SystemClock.unix_seconds());
        metrics.show_lines(&hub.uplinks);
        let records = RecordsKeeper::start(&config.records, &hub, &metrics)?;
        let registry = registry_of(&config, identity, &hub);
        let certificate = Arc::new(TlsIdentity::new(identity).context("cannot make a certificate")?);
        let (instance, own) = (rand::random(), Own::new(identity));
        let (refusals, knocks) = (Arc::<Refusals>::default(), used_knocks(&config, workers, &SystemClock));
        let (ended, worker_ended) = oneshot::channel();
        let ended = Arc::new(Mutex::new(Some(ended)));
        let (tunnel, mut queues) = open_tunnel(&config, &registry, &snapshots, &health, workers)?;
        let interfaces = open_interfaces(&config);
        let carriers = AllCarriers::new(&config, &registry, identity, &own, &metrics.visitors);
        let web_server = WebServer::new(web_server::start(&metrics, &hub.users, &carriers.exit));
        let web_sockets = web_server.open(&config)?;
        let mut threads = Vec::new();
        let mut addresses = None;
        for ((worker, ports), knocks) in (0..workers).zip(open_ports(&config, workers)?).zip(knocks) {
            let (config, identity, own) = (Arc::clone(&config), Arc::clone(&certificate), Arc::clone(&own));
            let (registry, refusals, hub) = (Arc::clone(&registry), Arc::clone(&refusals), Arc::clone(&hub));
            let metrics = Publisher::new(usize::from(worker), Arc::clone(&health), Arc::clone(&snapshots));
            let tun = tunnel.as_ref().map(|tunnel| Arc::clone(&tunnel.board));
            let (queue, interfaces) = (queues.next(), interfaces.clone());
            let (pin, carriers) = (config.transport.pin_cpus, carriers.of(worker));
            let start = WorkerStart { worker, pin, ports, queue, interfaces, carriers };
            let setup = move |net, ready| Setup {
                config,
                identity,
                own,
                registry,
                refusals,
                knocks,
                clock: Arc::new(SystemClock),
                net: Box::new(net),
                ready,
                instance,
                seed: rand::random(),
                software: program::software().into(),
                worker,
                hub,
                metrics,
                site: Some(site::client()),
                tunnels: Some(tunnels::server()),
                tun,
            };
            let (thread, bound) = start.spawn(setup, Arc::clone(&ended))?;
            threads.push(thread);
            addresses.get_or_insert(bound);
        }
        let addresses = addresses.ok_or_else(|| anyhow!("an agent has at least one worker"))?;
        let inboxes: Vec<_> = threads.iter().map(|worker| Arc::clone(&worker.inbox)).collect();
        snapshots.ask_at(inboxes.clone());
        let running = Arc::new(Running {
            config: ArcSwap::new(Arc::clone(&config)),
            own_key: identity.public_key(),
            commit: program::COMMIT,
            snapshots,
            inboxes,
            metrics: Arc::clone(&metrics),
            web_server,
            admin: Arc::clone(&admin) as _,
            reloading: Mutex::default(),
            refusals,
            captures: Captures::new(Arc::clone(&registry), Arc::clone(&hub), Arc::new(SystemClock)),
            registry,
            hub,
            health: Arc::clone(&health),
            since: now,
            clock: Arc::new(SystemClock),
        });
        admin.show(&running);
        running.web_server.follow(Arc::clone(&config), web_sockets);
        running.show_certificate();
        let control = open_control(&config, &running)?;
        health.set_ready(true);
        metrics.configured(&config.limits, SystemClock.unix_time());
        metrics.peer_files(&config.directory);
        log_ready(&running, &addresses, admin.address(), control.as_ref());
        Ok(Self {
            workers: threads,
            worker_ended: Some(worker_ended),
            admin,
            control,
            running,
            addresses,
            tunnel,
            quotas,
            records,
        })
    }

    /// Returns the address at which `/metrics` is served, if it is served.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.address()
    }

    /// What the workers last published, all together.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.running.snapshots.get()
    }

    /// What the workers last published, in a line.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary { peers: self.running.registry.list().len(), ..self.running.snapshots.summary() }
    }

    /// Stops: sends what waits, tells the peers, and returns what was published last. Nobody is waited for beyond [`STOP_DEADLINE`],
    /// [`THREADS_WITHIN`] and [`FILES_WITHIN`]: what still hangs then ends with the process.
    ///
    /// # Errors
    /// A thread that panicked.
    pub fn stop(self) -> anyhow::Result<Snapshot> {
        self.running.health.drain();
        if let Some(control) = &self.control {
            control.close();
        }
        self.running.web_server.close();
        self.running.hub.users.stops();
        for worker in &self.workers {
            if !worker.inbox.put(Command::Shutdown { within: STOP_DEADLINE }) {
                tracing::error!(
                    "a worker takes no commands (remedy: none is needed, it ends with the process)"
                );
            }
        }
        let admin = self.admin.stop();
        let workers = self.workers.into_iter().map(|worker| worker.thread);
        let ended = join_all(workers, STOP_DEADLINE + THREADS_WITHIN);
        // The device and its routes first, which take the host's packets as long as they are there.
        if let Some(tunnel) = self.tunnel {
            if let Ok(1..) = ended {
                tunnel.remove_device();
            }
            drop(tunnel);
        }
        drop(self.control);
        let admin = join_all(admin.into_iter(), THREADS_WITHIN);
        self.running.hub.users.record_open();
        let records = self.records.into_iter().map(RecordsKeeper::stop);
        let files = join_all(records.chain([self.quotas.stop()]), FILES_WITHIN);
        // Whoever has panicked, what can be written is written before it is said.
        let left = ended.context("a worker panicked")?
            + admin.context("the admin server panicked")?
            + files.context("a writer of files panicked")?;
        if left > 0 {
            tracing::warn!(
                threads = left,
                "threads that do not end are left to the end of the process (remedy: none is needed)"
            );
        }
        Ok(self.running.snapshots.get())
    }
}

/// Says where the agent can be reached.
fn log_ready(
    running: &Running,
    addresses: &Addresses,
    metrics: Option<SocketAddr>,
    control: Option<&ControlSocket>,
) {
    tracing::info!(
        transport = throttle::list(&addresses.transport),
        udp = throttle::list(&addresses.udp),
        tcp = throttle::list(&addresses.tcp),
        http = throttle::list(running.web_server.addresses()),
        metrics = metrics.map(tracing::field::display),
        control = control.map(|control| tracing::field::display(control.path().display())),
        workers = running.inboxes.len(),
        key = %running.own_key,
        "ready"
    );
}

/// Waits for threads to end; returns how many have not ended `within` the time.
///
/// # Errors
/// One of them has panicked; the others have ended, or their time is over.
fn join_all(threads: impl Iterator<Item = JoinHandle<()>>, within: Duration) -> anyhow::Result<usize> {
    const LOOK: Duration = Duration::from_millis(1);

    let until = SystemClock.now() + within;
    let mut threads: Vec<_> = threads.collect();
    let mut panicked = false;
    loop {
        for ended in threads.extract_if(.., |thread| thread.is_finished()) {
            panicked |= ended.join().is_err();
        }
        if threads.is_empty() || SystemClock.now() >= until {
            return if panicked { Err(anyhow!("see the log")) } else { Ok(threads.len()) };
        }
        thread::sleep(LOOK);
    }
}

/// The peers of the configuration, which know `hub` and our keys.
fn registry_of(config: &Config, identity: &Identity, hub: &Arc<Hub>) -> Arc<PeerRegistry> {
    let registry = PeerRegistry::new(config, identity.public_key());
    registry.attach(hub);
    if let Some(previous) = identity.previous() {
        registry.set_previous_key(previous.public_key());
    }
    registry
}

/// Makes the TUN device, if there is to be one, and a share of it for each worker.
fn open_tunnel(
    config: &Config,
    registry: &Arc<PeerRegistry>,
    snapshots: &Arc<Snapshots>,
    health: &Arc<Health>,
    workers: u8,
) -> anyhow::Result<(Option<Tunnel>, std::vec::IntoIter<TunPort>)> {
    let Some(tun) = &config.tun else { return Ok((None, Vec::new().into_iter())) };
    let (tunnel, queues) = Tunnel::open(config, tun, registry, snapshots, health, workers)?;
    Ok((Some(tunnel), queues.into_iter()))
}

/// Opens the ports of all workers: a share for each.
fn open_ports(config: &Config, workers: u8) -> anyhow::Result<Vec<Ports>> {
    if config.transport.mark != 0 {
        // An agent that only dials would else learn of it with its first attempt.
        ports::probe_mark(config.transport.mark).map_err(StartError::Mark)?;
    }
    let listens = config.transport.listen.len();
    ports::open(&port_plan(config), workers).map_err(|failed| {
        let what = match failed.what {
            PortKind::Udp(place) if place < listens => "transport.listen",
            PortKind::Udp(_) => "udp.listen",
            PortKind::Tcp(_) => "tcp.listen",
        };
        StartError::Listen { address: failed.address, what, error: failed.error }.into()
    })
}

/// The thread of a worker, and what the kernel gives to it.
struct WorkerStart {
    worker: u8,
    /// Whether the thread stays on one CPU.
    pin: bool,
    ports: Ports,
    queue: Option<TunPort>,
    interfaces: Option<Arc<Interfaces>>,
    carriers: OfWorker,
}

type Started = anyhow::Result<(Arc<Inbox>, Addresses)>;

impl WorkerStart {
    /// Starts the thread and waits until it is ready; `ended` is told when it ends.
    fn spawn(
        self,
        setup: impl FnOnce(KernelNet, Ready) -> Setup + Send + 'static,
        ended: Arc<Mutex<Option<oneshot::Sender<()>>>>,
    ) -> anyhow::Result<(WorkerThread, Addresses)> {
        let worker = usize::from(self.worker);
        let (started, ready) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name(format!("culvert-{worker}"))
            .spawn(move || {
                if self.pin
                    && let Err(error) = process::pin_to_cpu(worker)
                {
                    tracing::warn!(
                        worker, %error,
                        "cannot keep a worker on one CPU (remedy: allow sched_setaffinity, or transport.pin_cpus = false)"
                    );
                }
                if let Err(error) = process::wake_soon() {
                    tracing::debug!(worker, %error, "a worker's time slices stay as they are");
                }
                // Whoever starts the thread waits for it; later the log tells.
                if let Err(error) = self.run(setup, &started)
                    && let Err(mpsc::SendError(Err(error))) = started.send(Err(error))
                {
                    tracing::error!(worker, error = format!("{error:#}"), "a worker has ended (remedy: restart the daemon, and report it)");
                }
                let ended = lock(&ended).take();
                if let Some(ended) = ended {
                    // Nobody listens any more when the daemon is being stopped.
                    let _told = ended.send(()).is_ok();
                }
            })
            .context("cannot start a worker's thread")?;
        let (inbox, addresses) =
            ready.recv().map_err(|_| anyhow!("a worker ended before it was ready"))??;
        Ok((WorkerThread { inbox, thread }, addresses))
    }

    /// Makes a runtime and a worker on this thread, reports to `started`, and runs it to its end.
    fn run(
        self,
        setup: impl FnOnce(KernelNet, Ready) -> Setup,
        started: &mpsc::SyncSender<Started>,
    ) -> anyhow::Result<()> {
        let runtime =
            runtime::Builder::new_current_thread().enable_all().build().context("cannot make a runtime")?;
        let ended = runtime.block_on(async {
            let ready = Ready::default();
            let net = KernelNet::new(ready.clone(), Rc::new(SystemClock), self.ports).with_tun(self.queue);
            let net = match self.interfaces {
                Some(interfaces) => net.with_ways(interfaces.ways()),
                None => net,
            };
            let net = net.with_carriers(Rc::new(self.carriers));
            let alarm = Alarm::new().context("cannot make a timer")?;
            let worker = Worker::new(setup(net, ready), SystemClock.now())?;
            let _told = started.send(Ok((worker.inbox(), worker.addresses()))).is_ok();
            shell::run(worker, alarm, &SystemClock).await.context("a worker cannot wait any more")
        });
        // A name may be looked up for half a minute, where no name server answers.
        runtime.shutdown_background();
        ended
    }
}

/// Starts to look at the interfaces on the ways to peers. Without that, packets are as large as Ethernet carries.
fn open_interfaces(config: &Config) -> Option<Arc<Interfaces>> {
    match Interfaces::start(config.transport.mark) {
        Ok(interfaces) => Some(Arc::new(interfaces)),
        Err(error) => {
            tracing::info!(%error, "the kernel does not tell its routes: packets are searched up to 1472 bytes");
            None
        }
    }
}

fn metrics_of(workers: u8, snapshots: &Arc<Snapshots>, health: &Arc<Health>) -> Metrics {
    let (version, commit) = (program::VERSION, program::COMMIT);
    Metrics::new(version, commit, workers, Arc::clone(snapshots), Arc::clone(health))
}

/// Makes the control socket. At the default path a folder that is missing or closed to us is only worth a warning:
/// an agent that was started by hand has none.
fn open_control(config: &Config, running: &Arc<Running>) -> anyhow::Result<Option<ControlSocket>> {
    let Some(path) = &config.control else { return Ok(None) };
    let handler = RequestHandler::new(running.own_key, env!("CULVERT_VERSION"), Arc::clone(running) as _);
    match ControlSocket::open(path, handler) {
        Ok(socket) => Ok(Some(socket)),
        Err(ListenError::Refused { path, cause }) if path == Path::new(defaults::CONTROL_SOCKET) => {
            tracing::warn!(
                path = %path.display(),
                %cause,
                "there is no control socket: culvert peer and culvert status cannot reach this daemon (remedy: make that \
                 folder, writable by this user, or set control.socket; \"\" for none)"
            );
            Ok(None)
        }
        Err(error) => Err(anyhow!(error).context("cannot make the control socket")),
    }
}

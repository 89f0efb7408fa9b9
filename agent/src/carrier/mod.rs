//! Carriers: packets of QUIC over WebSockets on TCP, where UDP does not pass (`docs/carrier.md`).
//!
//! ```text
//!   worker ── net::carrier ── task ══ TLS, WebSocket ══ web server of the exit ── task ── net::carrier ── worker
//! ```
//!
//! | question | file |
//! |---|---|
//! | which label stands for which URL, and on which thread streams are dialled | this one |
//! | from a URL to a WebSocket: addresses, proxy, TLS, token | `dial.rs` |
//! | which proxy the environment names | `environment.rs` |
//! | whose certificates count | `roots.rs` |
//! | who may open one at an exit, and how many | `exit.rs` |
//! | how packets move | `pump.rs` |

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Mutex, OnceLock, atomic::AtomicU64},
    thread,
    time::Duration,
};

use base::{
    clock::{Clock, SystemClock},
    panics::{self, Part, lock},
    throttle::Throttle,
};
use config::Config;
use engine::registry::PeerRegistry;
use gate::{
    Own,
    identity::{AgreementKey, Endpoint, Identity},
};
use h3::websocket::Role;
use net::{
    carrier::{self, Beside, Carriers, Experience, Port, Wanted},
    task,
};
use ops::metrics::Visitors;
use tokio::{
    net::lookup_host,
    runtime,
    sync::mpsc,
    time::{Instant, sleep},
};

mod dial;
mod environment;
pub(crate) mod exit;
pub(crate) mod pump;
mod roots;

use dial::{DialError, Opened, Target};
use exit::Exit;

/// Streams that wait for the thread: as many as a worker opens lanes at once, a few times over.
const MOST_WAITING: usize = 1_024;

/// Failures of removed peers are forgotten when there are so many of all.
const MOST_FAILURES: usize = 256;

/// The shortest time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// How long a stream waits to be dialled again, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// When a stream to a peer could not be opened, and why.
type Failures = HashMap<Arc<str>, (std::time::Instant, Arc<str>)>;

/// What all streams that this agent dials share.
struct Dialler {
    registry: Arc<PeerRegistry>,
    own: AgreementKey,
    /// SO_MARK of their sockets.
    mark: u32,
    /// The URLs that were ever asked for; the place of each is its label's number, less one.
    urls: Mutex<Vec<String>>,
    /// What UDP leads to where a label does, by the label.
    over_udp: Mutex<HashMap<SocketAddr, OverUdp>>,
    failed_log: Mutex<Throttle>,
    /// Why no stream could be opened last, by the peer; none since one was.
    failures: Mutex<Failures>,
    /// Packets that streams have left behind.
    discarded: Arc<AtomicU64>,
    thread: OnceLock<Option<mpsc::Sender<Task>>>,
}

/// What the thread is asked to do: for a stream, or for a name.
enum Task {
    Carry(Wanted),
    /// Looks up an endpoint over UDP once more.
    LookUp(Endpoint),
}

/// The shortest time between two look-ups of the same endpoint for streams that last: that between two questions whether UDP passes.
const LOOK_UP_INTERVAL: Duration = PAUSES[1];

/// The endpoints over UDP of a peer that has a URL.
#[derive(Default)]
struct OverUdp {
    /// Each endpoint's addresses, as they were last looked up.
    addresses: Vec<(Endpoint, Vec<SocketAddr>)>,
    /// When streams last had them looked up.
    asked: Option<std::time::Instant>,
    experience: Arc<Experience>,
}

impl OverUdp {
    /// Whether an address is that of an endpoint, at any port of its range.
    fn has(&self, address: SocketAddr) -> bool {
        self.addresses.iter().any(|(endpoint, addresses)| {
            (endpoint.port..=endpoint.last_port).contains(&address.port())
                && addresses.iter().any(|known| known.ip() == address.ip())
        })
    }
}

impl Dialler {
    /// The dialler of the agent whose key is `own`, which counts in `discarded` what streams leave behind.
    fn new(
        registry: &Arc<PeerRegistry>,
        own: AgreementKey,
        mark: u32,
        discarded: &Arc<AtomicU64>,
    ) -> Arc<Self> {
        Arc::new(Self {
            registry: Arc::clone(registry),
            own,
            mark,
            urls: Mutex::default(),
            over_udp: Mutex::default(),
            failed_log: Mutex::new(Throttle::new(LOG_INTERVAL)),
            failures: Mutex::default(),
            discarded: Arc::clone(discarded),
            thread: OnceLock::new(),
        })
    }

    fn label(&self, url: &str) -> Option<SocketAddr> {
        let mut urls = lock(&self.urls);
        let place = urls.iter().position(|known| known == url).unwrap_or_else(|| {
            urls.push(url.to_owned());
            urls.len() - 1
        });
        u32::try_from(place + 1).ok().map(carrier::label)
    }

    /// Where the label leads, as the peers are configured now.
    fn target(&self, label: SocketAddr) -> Option<Target> {
        let place = usize::try_from(carrier::number_of(label)?.checked_sub(1)?).ok()?;
        let url = lock(&self.urls).get(place)?.clone();
        let mut listed = self.registry.list().into_iter();
        listed.find_map(|listed| {
            let endpoint = listed.peer.dialled().into_iter().find(|endpoint| endpoint.host == url)?;
            Some(Target { endpoint, peer: listed.peer, mark: self.mark })
        })
    }

    /// Notes where an endpoint over UDP is, if its peer has a URL as well.
    fn resolved(&self, host: &str, port: u16, addresses: &[SocketAddr]) {
        for listed in self.registry.list() {
            let dialled = listed.peer.dialled();
            let Some(url) = dialled.iter().find(|endpoint| endpoint.is_over_tcp()) else { continue };
            let is_it = |endpoint: &&Endpoint| endpoint.host == host && endpoint.port == port;
            let Some(endpoint) = dialled.iter().find(is_it).filter(|endpoint| !endpoint.is_over_tcp()) else {
                continue;
            };
            let Some(label) = self.label(&url.host) else { continue };
            let mut all = lock(&self.over_udp);
            let known = &mut all.entry(label).or_default().addresses;
            known.retain(|(other, _)| dialled.contains(other) && other != endpoint);
            known.push((endpoint.clone(), addresses.to_vec()));
        }
    }

    /// The other way to a label or to an address of UDP, as the peers are configured now.
    fn beside(&self, address: SocketAddr) -> Option<Beside> {
        let (label, beside) = {
            let all = lock(&self.over_udp);
            if carrier::number_of(address).is_some() {
                let known = all.get(&address)?;
                let other = *known.addresses.last()?.1.first()?;
                (address, Beside { other, experience: Arc::clone(&known.experience) })
            } else {
                let (label, known) = all.iter().find(|(_, known)| known.has(address))?;
                (*label, Beside { other: *label, experience: Arc::clone(&known.experience) })
            }
        };
        let dialled = self.target(label)?.peer.dialled();
        dialled.iter().any(|endpoint| !endpoint.is_over_tcp()).then_some(beside)
    }

    /// Where UDP beside a label leads instead of to `from`, where none of its endpoints is any more. Has them looked up again.
    fn moved(self: &Arc<Self>, label: SocketAddr, from: SocketAddr) -> Option<SocketAddr> {
        let (due, to) = {
            let mut all = lock(&self.over_udp);
            let known = all.get_mut(&label)?;
            let now = SystemClock.now();
            let is_due = known.asked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK_UP_INTERVAL);
            let due: Vec<Endpoint> = if is_due {
                known.asked = Some(now);
                known.addresses.iter().map(|(endpoint, _)| endpoint.clone()).collect()
            } else {
                Vec::new()
            };
            let mut addresses = known.addresses.iter().rev().flat_map(|(_, addresses)| addresses);
            let to = addresses.find(|address| address.is_ipv6() == from.is_ipv6()).copied();
            (due, to.filter(|_| !known.has(from)))
        };
        for endpoint in due {
            self.hand_over(Task::LookUp(endpoint));
        }
        to
    }

    fn hand_over(self: &Arc<Self>, task: Task) {
        let sender = self.thread.get_or_init(|| start(self));
        let taken = sender.as_ref().is_some_and(|sender| sender.try_send(task).is_ok());
        if !taken {
            tracing::debug!("a stream is not dialled: there is no thread, or too many wait for it");
        }
    }

    /// Looks up an endpoint over UDP; if that fails, its addresses stay.
    async fn look_up(&self, endpoint: &Endpoint) {
        match lookup_host((&*endpoint.host, endpoint.port)).await {
            Ok(addresses) => {
                let addresses: Vec<SocketAddr> = addresses.collect();
                if !addresses.is_empty() {
                    self.resolved(&endpoint.host, endpoint.port, &addresses);
                }
            }
            Err(error) => tracing::debug!(%endpoint, %error, "UDP beside a stream is not looked up"),
        }
    }

    /// Notes why a stream could not be opened, for operators.
    fn failed(&self, peer: &Arc<str>, error: &DialError) {
        let mut failures = lock(&self.failures);
        if failures.len() >= MOST_FAILURES {
            let listed: HashSet<_> =
                self.registry.list().into_iter().map(|listed| Arc::clone(&listed.peer.name)).collect();
            failures.retain(|peer, _| listed.contains(peer));
        }
        failures.insert(Arc::clone(peer), (SystemClock.now(), error.to_string().into()));
    }

    /// Carries packets until the worker is done with them, over one stream after the other.
    async fn carry(&self, wanted: Wanted) {
        let Wanted { label, port, queue } = wanted;
        let mut pause = PAUSES[0];
        while !queue.is_closed() {
            let Some(target) = self.target(label) else { return };
            let peer = Arc::clone(&target.peer.name);
            let since = Instant::now();
            match dial::open(target, &self.own).await {
                Ok(Opened { stream, first, probe }) => {
                    tracing::debug!(peer = &*peer, "a carrier is open");
                    lock(&self.failures).remove(&peer);
                    queue.opens(Some(probe));
                    let put = |packet: &[u8]| port.put(label, packet);
                    let ended = pump::run(stream, Role::Client, &first, &queue, put).await;
                    queue.opens(None);
                    tracing::debug!(peer = &*peer, %ended, "a carrier has ended");
                    // The stream has been of use: the next one is dialled soon.
                    if since.elapsed() > PAUSES[1] {
                        pause = PAUSES[0];
                    }
                }
                Err(error) => {
                    self.failed(&peer, &error);
                    let suppressed = lock(&self.failed_log).allow(SystemClock.now());
                    if let Some(suppressed) = suppressed {
                        tracing::warn!(
                            peer = &*peer, %error, suppressed = base::throttle::counted(suppressed),
                            "cannot open a carrier over TCP (remedy: {})", error.remedy()
                        );
                    }
                }
            }
            // What has waited so long is no longer worth it.
            queue.discard();
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES[1]);
        }
    }
}

/// Starts the thread that dials; `None` if it cannot be.
fn start(dialler: &Arc<Dialler>) -> Option<mpsc::Sender<Task>> {
    let (sender, mut tasks) = mpsc::channel::<Task>(MOST_WAITING);
    let dialler = Arc::clone(dialler);
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let started = runtime.and_then(|runtime| {
        let serve = async move {
            while let Some(task) = tasks.recv().await {
                let dialler = Arc::clone(&dialler);
                let work = async move {
                    match task {
                        Task::Carry(wanted) => dialler.carry(wanted).await,
                        Task::LookUp(endpoint) => dialler.look_up(&endpoint).await,
                    }
                };
                drop(task::spawn(Part::Carrier, work));
            }
        };
        let run = move || {
            if panics::isolate(Part::Carrier, || runtime.block_on(serve)).is_err() {
                tracing::error!("no peer is dialled over TCP any more (remedy: restart the daemon)");
            }
            runtime.shutdown_background();
        };
        thread::Builder::new().name("culvert-carrier".to_owned()).spawn(run)
    });
    started.map(|_| sender).inspect_err(|error| tracing::error!(%error, "no peer can be dialled over TCP (remedy: restart the daemon, once the cause is gone)")).ok()
}

/// The carriers of this agent, those that it dials and those that it takes.
pub(crate) struct AllCarriers {
    pub(crate) exit: Arc<Exit>,
    dialler: Arc<Dialler>,
}

impl AllCarriers {
    pub(crate) fn new(
        config: &Config,
        registry: &Arc<PeerRegistry>,
        identity: &Identity,
        own: &Arc<Own>,
        visitors: &Visitors,
    ) -> Self {
        let discarded = visitors.carrier_discarded();
        let (clock, workers) = (Arc::new(SystemClock), config.worker_count());
        let exit = Exit::new(own, Arc::clone(registry) as _, workers, clock, discarded);
        let dialler = Dialler::new(registry, identity.agreement_key(), config.transport.mark, discarded);
        Self { exit, dialler }
    }

    /// The carriers of the worker with this index.
    pub(crate) fn of(&self, worker: u8) -> OfWorker {
        OfWorker { dialler: Arc::clone(&self.dialler), exit: Arc::clone(&self.exit), worker }
    }
}

/// The carriers of one worker.
pub(crate) struct OfWorker {
    dialler: Arc<Dialler>,
    exit: Arc<Exit>,
    worker: u8,
}

impl Carriers for OfWorker {
    fn label(&self, endpoint: &str) -> Option<SocketAddr> {
        endpoint.starts_with("https://").then(|| self.dialler.label(endpoint)).flatten()
    }

    fn dial(&self, wanted: Wanted) {
        self.dialler.hand_over(Task::Carry(wanted));
    }

    fn discarded(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.dialler.discarded)
    }

    fn failure(&self, peer: &str) -> Option<(std::time::Instant, Arc<str>)> {
        lock(&self.dialler.failures).get(peer).cloned()
    }

    fn resolved(&self, host: &str, port: u16, addresses: &[SocketAddr]) {
        self.dialler.resolved(host, port, addresses);
    }

    fn beside(&self, address: SocketAddr) -> Option<Beside> {
        self.dialler.beside(address)
    }

    fn moved(&self, label: SocketAddr, from: SocketAddr) -> Option<SocketAddr> {
        self.dialler.moved(label, from)
    }

    fn listens(&self) -> Option<Arc<Port>> {
        self.exit.port(self.worker)
    }
}

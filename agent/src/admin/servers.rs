//! The threads of the admin server: one serves, and after a reload that changes `[metrics]` another one does.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, OnceLock, Weak},
    thread::{self, JoinHandle},
};

use anyhow::Context as _;
use base::{
    clock::{Clock, SystemClock},
    panics::{self, Part, lock},
};
use engine::health::Health;
use net::ports;
use ops::{
    admin_server::{AdminListenFailed, AdminServer},
    metrics::Metrics,
    operator::Running,
    web::StatusPage,
};
use tokio::{runtime, sync::watch};

use super::{Admin, PageSlot, serve};

/// The admin server, while `[metrics]` comes, changes and goes.
pub struct AdminServers {
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    /// The daemon that the status page shows, once it runs.
    running: OnceLock<Weak<Running>>,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    serving: Option<Serving>,
    /// Those that were told to end.
    ending: Vec<JoinHandle<()>>,
}

/// A thread that serves, and how to stop it.
struct Serving {
    config: config::Admin,
    /// Where it listens. The next thread serves the same socket if the address stays.
    socket: TcpListener,
    /// Where the status page finds the daemon, once it has started; `None` without the page.
    page: Option<PageSlot>,
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

impl AdminServers {
    /// Serves what `config` says; the status page waits for [`Self::show`].
    ///
    /// # Errors
    /// The address cannot be listened at, or no thread can be made.
    pub fn start(
        config: &config::Admin,
        metrics: &Arc<Metrics>,
        health: &Arc<Health>,
    ) -> anyhow::Result<Self> {
        let servers = Self {
            metrics: Arc::clone(metrics),
            health: Arc::clone(health),
            running: OnceLock::new(),
            threads: Mutex::default(),
        };
        let socket = servers.open(config)?;
        let serving = socket.map(|socket| servers.serve(config, socket)).transpose()?;
        lock(&servers.threads).serving = serving;
        Ok(servers)
    }

    /// Gives the status page, if it is served, what it shows.
    pub fn show(&self, running: &Arc<Running>) {
        // One daemon has one of these.
        let _first = self.running.set(Arc::downgrade(running)).is_ok();
        if let Some(page) = lock(&self.threads).serving.as_ref().and_then(|serving| serving.page.as_ref()) {
            self.fill(page);
        }
    }

    /// The address at which it listens, as the kernel has it.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        lock(&self.threads).serving.as_ref().and_then(|serving| serving.socket.local_addr().ok())
    }

    /// Tells all threads to end, and returns them.
    #[must_use]
    pub fn stop(&self) -> Vec<JoinHandle<()>> {
        let mut threads = lock(&self.threads);
        threads.end();
        std::mem::take(&mut threads.ending)
    }

    fn fill(&self, page: &PageSlot) {
        if let Some(running) = self.running.get().and_then(Weak::upgrade) {
            let figures = StatusPage::new(running as _, Arc::clone(&self.health));
            // A page that was handed over has its figures.
            let _first = page.set(Arc::new(figures)).is_ok();
        }
    }

    /// Starts a thread of its own, so that a scrape never waits for the packet path nor the other way round.
    fn serve(&self, config: &config::Admin, socket: TcpListener) -> anyhow::Result<Serving> {
        let listener = socket.try_clone().context("cannot serve metrics.listen")?;
        let (stop, stopped) = watch::channel(false);
        let (metrics, health) = (Arc::clone(&self.metrics), Arc::clone(&self.health));
        let admin = Admin::new(config.clone(), metrics, health, || SystemClock.now());
        let page = admin.page.clone();
        let runtime =
            runtime::Builder::new_current_thread().enable_all().build().context("cannot make a runtime")?;
        let thread = thread::Builder::new()
            .name("culvert-admin".to_owned())
            .spawn(move || {
                let serving = panics::isolate_future(Part::Admin, async {
                    match tokio::net::TcpListener::from_std(listener) {
                        Ok(listener) => serve(listener, admin, stopped).await,
                        Err(error) => {
                            tracing::error!(%error, "cannot serve metrics (remedy: culvert reload)")
                        }
                    }
                });
                if runtime.block_on(serving).is_err() {
                    tracing::error!(
                        "the admin server has ended (remedy: culvert reload starts it again; report it)"
                    );
                }
                // A question may wait for workers that do not answer.
                runtime.shutdown_background();
            })
            .context("cannot start the admin thread")?;
        Ok(Serving { config: config.clone(), socket, page, stop, thread })
    }
}

impl AdminServer for AdminServers {
    fn open(&self, config: &config::Admin) -> Result<Option<TcpListener>, AdminListenFailed> {
        let Some(address) = config.listen else { return Ok(None) };
        let threads = lock(&self.threads);
        let old = threads.serving.as_ref();
        let same = old.filter(|serving| serving.config.listen == Some(address));
        let socket = same.map_or_else(|| ports::listen_tcp(address), |serving| serving.socket.try_clone());
        socket.map(Some).map_err(|error| {
            let old = old.and_then(|serving| serving.config.listen);
            match old.filter(|old| error.kind() == io::ErrorKind::AddrInUse && old.port() == address.port()) {
                Some(old) => AdminListenFailed::Own { address, old },
                None => AdminListenFailed::Kernel { address, error },
            }
        })
    }

    fn follow(&self, config: &config::Admin, socket: Option<TcpListener>) {
        let mut threads = lock(&self.threads);
        // A thread that has ended by itself is no server.
        let serving = threads.serving.as_ref().filter(|serving| !serving.thread.is_finished());
        if serving.map(|serving| &serving.config) == socket.as_ref().map(|_| config) {
            return;
        }
        let figures = threads.serving.as_ref().and_then(|serving| serving.page.as_ref()?.get().cloned());
        threads.end();
        let serving = match socket.map(|socket| self.serve(config, socket)) {
            Some(Ok(serving)) => serving,
            Some(Err(error)) => {
                let error = format!("{error:#}");
                tracing::error!(
                    error,
                    "metrics.listen is not served (remedy: culvert reload, once the cause is gone)"
                );
                return;
            }
            None => return,
        };
        if let Some(page) = &serving.page {
            // The page keeps its last ten minutes.
            if let Some(figures) = figures {
                let _first = page.set(figures).is_ok();
            }
            self.fill(page);
        }
        threads.serving = Some(serving);
    }
}

impl Threads {
    /// Tells the one that serves to end.
    fn end(&mut self) {
        self.ending.retain(|thread| !thread.is_finished());
        if let Some(serving) = self.serving.take() {
            serving.stop.send_replace(true);
            self.ending.push(serving.thread);
        }
    }
}

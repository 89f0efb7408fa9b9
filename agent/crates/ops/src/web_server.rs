//! The web server on TCP, as the operator's side has it: its sockets, which reloads open and close, and what it is told.
//!
//! ```text
//!   start, reload ── sockets, configuration ──► watch ──► the thread that serves (in the binary)
//! ```

use std::{
    fmt, io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
};

use config::Config;
use engine::worker::remedy;
use net::ports;
use tokio::sync::watch;

/// What the thread serves from now on.
#[derive(Clone, Debug, Default)]
pub struct Serving {
    /// The configuration for connections that begin now; `None`: nothing is served yet.
    pub config: Option<Arc<Config>>,
    pub sockets: Vec<Listening>,
}

/// A socket that listens.
#[derive(Clone, Debug)]
pub struct Listening {
    /// The address that the configuration names.
    pub address: SocketAddr,
    pub socket: Arc<TcpListener>,
}

/// A socket that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} (http.listen): {error}{}", remedy(.error))]
pub struct ListenFailed {
    pub address: SocketAddr,
    error: io::Error,
}

/// Starts the thread, which serves what it is told.
pub type Start = Box<dyn FnOnce(watch::Receiver<Serving>) -> io::Result<()> + Send>;

/// The sockets of `http.listen`, and the thread behind them, which starts with the first of them.
pub struct WebServer {
    told: watch::Sender<Serving>,
    start: Mutex<Option<Start>>,
}

impl fmt::Debug for WebServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebServer").field("told", &*self.told.borrow()).finish_non_exhaustive()
    }
}

impl WebServer {
    /// Nothing listens yet; `start` is called with the first socket.
    #[must_use]
    pub fn new(start: Start) -> Self {
        Self { told: watch::channel(Serving::default()).0, start: Mutex::new(Some(start)) }
    }

    /// The sockets that `config` names: those that are open already, and new ones.
    ///
    /// # Errors
    /// The first that cannot be opened.
    pub fn open(&self, config: &Config) -> Result<Vec<Listening>, ListenFailed> {
        let open = self.told.borrow().sockets.clone();
        let addresses = config.http.listen.iter().copied();
        let sockets = addresses.map(|address| {
            if let Some(known) = open.iter().find(|known| known.address == address) {
                return Ok(known.clone());
            }
            let socket = ports::listen_tcp(address).map_err(|error| ListenFailed { address, error })?;
            Ok(Listening { address, socket: Arc::new(socket) })
        });
        sockets.collect()
    }

    /// Serves `config` on these sockets from now on; others are closed, and their connections go on.
    pub fn follow(&self, config: Arc<Config>, sockets: Vec<Listening>) {
        let any = !sockets.is_empty();
        self.told.send_replace(Serving { config: Some(config), sockets });
        if !any {
            return;
        }
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(error)) = start.map(|start| start(self.told.subscribe())) {
            tracing::error!(%error, "http.listen cannot be served (remedy: restart the daemon, once the cause is gone)");
        }
    }

    /// Accepts no connection any more.
    pub fn close(&self) {
        self.told.send_modify(|told| told.sockets.clear());
    }

    /// The addresses at which it listens, as the kernel has them.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let told = self.told.borrow();
        let bound = |listening: &Listening| listening.socket.local_addr().unwrap_or(listening.address);
        told.sockets.iter().map(bound).collect()
    }
}

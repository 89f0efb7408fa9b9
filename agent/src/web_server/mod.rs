//! The web server on TCP (`http.listen`): HTTP/2 and HTTP/1.1, over TLS or behind a server that ends it, for whoever connects.
//!
//! | question | file |
//! |---|---|
//! | which sockets are accepted from, and on which thread | this one |
//! | how many may come, in all and from one prefix; how many requests are asked at a time | `places.rs` |
//! | when a connection ends: handshake, first request, idle, resets | `activity.rs` |
//! | from the first byte to hyper: PROXY header, TLS, the version of HTTP | `connection.rs` |
//! | whose request it is, if a trusted server says so | `proxied.rs` |
//! | what becomes of a request | `request.rs` |
//! | how content gets to the site, and its answer to the client | `content.rs` |
//! | a peer's token, and the carrier that it opens | `carrier.rs` |
//! | WebSockets; where other upgrades branch off | `upgrade.rs` |
//! | requests of users: CONNECT, CONNECT-UDP and CONNECT-IP | `user.rs` |
//! | how their bytes go both ways; their datagrams, as capsules; IP packets | `stream.rs`; `capsules.rs`, over a socket of `datagrams.rs`; `packets.rs` |
//! | how one of their streams of HTTP/2 is broken off, and when the client did | `sending.rs`, `way.rs` |
//! | what is known of a connection and a request | `visit.rs` |
//! | the socket, which notices a reader that stands still | `socket.rs` |
//!
//! Everything is on one thread beside the packet path, and nothing here is shared with a worker.

use std::{collections::BTreeMap, io, net::SocketAddr, sync::Arc, thread, time::Duration};

use arc_swap::ArcSwap;
use base::{
    clock::{Clock, SystemClock},
    panics::{self, Part},
    throttle::Throttle,
};
use config::Config;
use net::task;
use ops::{
    metrics::Metrics,
    web_server::{Listening, Serving, Start},
};
use tokio::{net::TcpListener, runtime, sync::watch, task::JoinHandle, time::sleep};
use users::Users;

mod activity;
mod capsules;
mod carrier;
mod connection;
mod content;
mod datagrams;
mod packets;
mod places;
mod proxied;
mod request;
mod sending;
mod socket;
mod stream;
mod upgrade;
mod user;
mod visit;
mod way;

use places::Places;
use visit::Server;

pub(crate) use datagrams::relay;

use crate::carrier::exit::Exit;

/// The shortest time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Starts the thread of the web server with its first socket.
pub(crate) fn start(metrics: &Arc<Metrics>, users: &Arc<Users>, exit: &Arc<Exit>) -> Start {
    let (metrics, users, exit) = (Arc::clone(metrics), Arc::clone(users), Arc::clone(exit));
    Box::new(move |told| {
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let run = move || {
            if panics::isolate(Part::Site, || runtime.block_on(serve(told, metrics, users, exit))).is_err() {
                tracing::error!("http.listen is not served any more (remedy: restart the daemon)");
            }
            // A name of a site may be looked up for half a minute.
            runtime.shutdown_background();
        };
        thread::Builder::new().name("culvert-http".to_owned()).spawn(run).map(drop)
    })
}

/// Accepts from the sockets that it is told of, until nobody can tell any more.
async fn serve(
    mut told: watch::Receiver<Serving>,
    metrics: Arc<Metrics>,
    users: Arc<Users>,
    exit: Arc<Exit>,
) {
    let mut server: Option<Arc<Server>> = None;
    let mut accepting: BTreeMap<SocketAddr, JoinHandle<()>> = BTreeMap::new();
    loop {
        let Serving { config, sockets } = told.borrow_and_update().clone();
        if let Some(config) = config {
            let server = server
                .get_or_insert_with(|| Arc::new(Server::new(Arc::clone(&config), &metrics, &users, &exit)));
            server.config.store(config);
            accepting.retain(|address, task| {
                let stays = sockets.iter().any(|socket| socket.address == *address);
                if !stays {
                    task.abort();
                }
                stays
            });
            for Listening { address, socket } in sockets {
                if accepting.contains_key(&address) {
                    continue;
                }
                match socket.try_clone().and_then(TcpListener::from_std) {
                    Ok(listener) => {
                        let accept = accept(listener, Arc::clone(server));
                        accepting.insert(address, task::spawn(Part::Site, accept));
                    }
                    Err(error) => {
                        tracing::error!(%address, %error, "cannot accept connections at http.listen (remedy: restart the daemon, once the cause is gone)")
                    }
                }
            }
        }
        if told.changed().await.is_err() {
            return;
        }
    }
}

async fn accept(listener: TcpListener, server: Arc<Server>) {
    // After errors that last, such as EMFILE: long enough not to spin, short enough not to be missed.
    const PAUSE: Duration = Duration::from_millis(100);

    let mut failed_log = Throttle::new(LOG_INTERVAL);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => server.admit(stream, from),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                if let Some(suppressed) = failed_log.allow(SystemClock.now()) {
                    let suppressed = base::throttle::counted(suppressed);
                    tracing::warn!(%error, suppressed, "http.listen cannot accept connections (remedy: look at culvert_process_open_fds and LimitNOFILE=)");
                }
                sleep(PAUSE).await;
            }
        }
    }
}

impl Server {
    fn new(config: Arc<Config>, metrics: &Arc<Metrics>, users: &Arc<Users>, exit: &Arc<Exit>) -> Self {
        let (config, metrics) = (ArcSwap::new(config), Arc::clone(metrics));
        let (users, exit) = (Arc::clone(users), Arc::clone(exit));
        Self { config, places: Places::new(Arc::clone(&metrics)), metrics, users, exit }
    }

    /// Serves a connection if there is a place for it.
    fn admit(self: &Arc<Self>, stream: tokio::net::TcpStream, from: SocketAddr) {
        let config = self.config.load_full();
        let is_trusted = proxied::is_trusted(&config.http.trusted, from.ip());
        // A server in front speaks for many.
        let source = (!is_trusted).then(|| from.ip());
        let place = match self.places.enter(source) {
            Ok(place) => place,
            Err(reason) => return self.refuse(reason),
        };
        let connection = connection::serve(Arc::clone(self), config, stream, from, is_trusted, place);
        drop(task::spawn(Part::Site, connection));
    }
}

/// The connection died before we took it (accept(2)); the next one may be well.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    [ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind())
}

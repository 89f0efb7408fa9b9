//! The admin HTTP server: `/metrics` for Prometheus, `/healthz` and `/readyz` for supervisors, the status page for people.
//!
//! | question | file |
//! |---|---|
//! | how connections are taken, and how their number and their time are bounded | this one |
//! | which paths there are, and what each answers | `answers.rs` |
//! | who may ask | `access.rs` |
//! | its thread, and what a reload does with it | `servers.rs` |
//! | what a browser gets | `page/`, which `assets.rs` serves |
//!
//! It answers one request per connection and holds few connections for a short time, so that nobody who reaches the
//! port can exhaust the agent.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use base::{
    panics::Part,
    throttle::{Throttle, counted},
};
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use net::task;
use ops::{metrics::AdminRefusal, web::SAMPLE_INTERVAL};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

mod access;
mod answers;
mod assets;
mod servers;
#[cfg(test)]
mod tests;

pub use answers::{Admin, PageSlot};
pub use servers::AdminServers;

/// How many connections may be open at once; beyond it the one that has the weakest claim makes room for a new one.
pub const MAX_CONNECTIONS: usize = 64;

/// How long a client may take to send its request.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// The shortest time between two log lines of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// How long the answers that are under way at a stop may take.
const LAST_ANSWERS: Duration = Duration::from_millis(200);

/// Serves until `stop` becomes true or its sender is gone, then until the open requests are answered, for [`LAST_ANSWERS`].
pub async fn serve(listener: TcpListener, admin: Admin, mut stop: watch::Receiver<bool>) {
    // After errors that last, such as EMFILE: long enough not to spin, short enough not to be missed.
    const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

    let admin = Arc::new(admin);
    let sampling = admin.page.clone().map(|page| task::spawn(Part::Admin, sample(page, Arc::clone(&admin))));
    let mut connections = Connections::default();
    let mut failed_log = Throttle::new(LOG_INTERVAL);
    let mut source_log = Throttle::new(LOG_INTERVAL);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(&mut stop) => break,
        };
        match accepted {
            Ok((_, from)) if !admin.access.admits(from.ip()) => {
                admin.metrics.admin.refuse(AdminRefusal::Source);
                if let Some(suppressed) = source_log.allow((admin.clock)()) {
                    let suppressed = counted(suppressed);
                    tracing::info!(%from, suppressed, "the admin server refused a client that is not in metrics.allow");
                }
            }
            Ok((stream, from)) => {
                if connections.make_room() {
                    admin.metrics.admin.refuse(AdminRefusal::Crowded);
                }
                let place = Arc::new(OpenConnection::new(from.ip()));
                let connection = connection(stream, Arc::clone(&admin), stop.clone(), Arc::clone(&place));
                connections.0.push_back((place, task::spawn(Part::Admin, connection)));
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                if let Some(suppressed) = failed_log.allow((admin.clock)()) {
                    let suppressed = counted(suppressed);
                    tracing::warn!(
                        %error, suppressed,
                        "the admin server cannot accept connections (remedy: look at culvert_process_open_fds and LimitNOFILE=)"
                    );
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    if let Some(sampling) = sampling {
        sampling.abort();
        sampling.await.ok();
    }
    let answered = async {
        for (_, task) in &mut connections.0 {
            task.await.ok();
        }
    };
    // A client that reads slowly keeps nobody from stopping.
    if timeout(LAST_ANSWERS, answered).await.is_err() {
        connections.0.iter().for_each(|(_, task)| task.abort());
    }
}

/// The connections that are open, the oldest first.
#[derive(Default)]
struct Connections(VecDeque<(Arc<OpenConnection>, JoinHandle<()>)>);

struct OpenConnection {
    /// Its client, an IPv6 one by its /64: a host has all of that.
    source: IpAddr,
    /// Whether the request on it has come to its end.
    asked: AtomicBool,
    /// The permission to hold a large answer.
    large: Mutex<Option<OwnedSemaphorePermit>>,
}

impl OpenConnection {
    fn new(source: IpAddr) -> Self {
        let source = match source.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            v4 @ IpAddr::V4(_) => v4,
        };
        Self { source, asked: AtomicBool::new(false), large: Mutex::default() }
    }
}

impl Connections {
    /// Ends a connection if there are too many: one of the client that has the most, and of these the oldest whose request is
    /// still incomplete, else the oldest. So half a request never keeps a whole one out, and a client with many connections
    /// only its own. Returns whether one was ended.
    fn make_room(&mut self) -> bool {
        self.0.retain(|(_, task)| !task.is_finished());
        if self.0.len() < MAX_CONNECTIONS {
            return false;
        }
        let count = |source: IpAddr| self.0.iter().filter(|(place, _)| place.source == source).count();
        let claim = |index: &usize| {
            let (place, _) = &self.0[*index];
            (std::cmp::Reverse(count(place.source)), place.asked.load(Ordering::Relaxed))
        };
        // The first of equal ones, which is the oldest.
        let weakest = (0..self.0.len()).min_by_key(claim);
        let ended = weakest.and_then(|index| self.0.remove(index));
        ended.inspect(|(_, task)| task.abort()).is_some()
    }
}

/// Adds a sample to the history of the status page every [`SAMPLE_INTERVAL`], once there is a daemon to sample.
async fn sample(page: PageSlot, admin: Arc<Admin>) {
    loop {
        sleep(SAMPLE_INTERVAL).await;
        if let Some(page) = page.get() {
            admin.metrics.snapshots.renew((admin.clock)()).await;
            page.sample((admin.clock)());
            admin.metrics.admin.set_history_bytes(page.history_bytes());
        }
    }
}

/// The connection died before we took it (accept(2)); the next one may be well.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted};
    [ConnectionAborted, ConnectionReset, Interrupted].contains(&error.kind())
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // A sender that is gone cannot ask for anything else any more.
    drop(stop.wait_for(|stop| *stop).await);
}

async fn connection(
    stream: TcpStream,
    admin: Arc<Admin>,
    mut stop: watch::Receiver<bool>,
    place: Arc<OpenConnection>,
) {
    // A client that reads its answer slower than this has lost interest.
    const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15);

    let (header_timeout, metrics) = (admin.header_timeout, Arc::clone(&admin.metrics));
    let service = service_fn(move |request: Request<Incoming>| {
        let (admin, place) = (Arc::clone(&admin), Arc::clone(&place));
        async move {
            place.asked.store(true, Ordering::Relaxed);
            Ok::<_, Infallible>(admin.answer(&request, &place).await)
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let until_answered = async move {
        let mut serving = std::pin::pin!(serving);
        tokio::select! {
            ended = serving.as_mut() => ended,
            () = stopped(&mut stop) => {
                serving.as_mut().graceful_shutdown();
                serving.await
            }
        }
    };
    match timeout(CONNECTION_TIMEOUT, until_answered).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            if error.is_timeout() {
                metrics.admin.refuse(AdminRefusal::Slow);
            }
            tracing::debug!(%error, "an admin connection failed");
        }
        Err(_) => {
            metrics.admin.refuse(AdminRefusal::Slow);
            tracing::debug!("an admin connection took too long");
        }
    }
}

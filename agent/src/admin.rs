//! The admin HTTP server: `/metrics` for Prometheus, `/healthz` and `/readyz` for supervisors.
//!
//! It answers one request per connection and holds few connections for a short time, so that nobody who reaches the
//! port can exhaust the agent. It has no authentication: bind it to loopback or to a management network.

use std::{
    convert::Infallible,
    fmt::Write as _,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use engine::health::{Health, Stuck};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use net::task;
use ops::metrics::{Metrics, TEXT_FORMAT};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};
use wire::{
    fault::{self, Fault},
    panics::Part,
    throttle::Throttle,
};

/// How many connections may be open at once; more are closed unanswered.
pub const MAX_CONNECTIONS: u32 = 64;

/// How long a client may take to send its request.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves until `stop` becomes true or its sender is gone, then until the open requests are answered.
///
/// `clock` tells the time against which the workers' heartbeats in `health` are held.
pub async fn serve(
    listener: TcpListener,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    clock: fn() -> Instant,
    stop: watch::Receiver<bool>,
) {
    accept(listener, Arc::new(Admin { metrics, health, clock, header_timeout: HEADER_TIMEOUT }), stop).await;
}

async fn accept(listener: TcpListener, admin: Arc<Admin>, mut stop: watch::Receiver<bool>) {
    // After errors that last, such as EMFILE: long enough not to spin, short enough not to be missed.
    const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
    const LOG_INTERVAL: Duration = Duration::from_secs(10);

    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS as usize));
    let mut failed_log = Throttle::new(LOG_INTERVAL);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stopped(&mut stop) => break,
        };
        match accepted {
            Ok((stream, _)) => {
                if let Ok(slot) = Arc::clone(&slots).try_acquire_owned() {
                    task::spawn(Part::Admin, connection(stream, Arc::clone(&admin), stop.clone(), slot));
                }
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                if let Some(suppressed) = failed_log.allow((admin.clock)()) {
                    tracing::warn!(%error, suppressed, "the admin server cannot accept connections");
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    // Every slot is back: every connection has ended, which each does within its own time limit.
    drop(slots.acquire_many(MAX_CONNECTIONS).await);
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
    _slot: OwnedSemaphorePermit,
) {
    // A client that reads its answer slower than this has lost interest.
    const CONNECTION_TIMEOUT: Duration = Duration::from_secs(15);

    let header_timeout = admin.header_timeout;
    let service = service_fn(move |request: Request<Incoming>| {
        let response = admin.answer(request.method(), request.uri().path());
        async move { Ok::<_, Infallible>(response) }
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
        Ok(Err(error)) => tracing::debug!(%error, "an admin connection failed"),
        Err(_) => tracing::debug!("an admin connection took too long"),
    }
}

struct Admin {
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    clock: fn() -> Instant,
    header_timeout: Duration,
}

type Answer = Response<Full<Bytes>>;

impl Admin {
    fn answer(&self, method: &Method, path: &str) -> Answer {
        #[cfg(feature = "fault-injection")]
        if let Some(armed) = path.strip_prefix("/fault/").map(fault::arm) {
            let status = if armed { StatusCode::OK } else { StatusCode::NOT_FOUND };
            return text(status, "");
        }
        fault::point(Fault::Admin);
        let page = match path {
            "/metrics" => Self::metrics,
            "/healthz" => Self::healthz,
            "/readyz" => Self::readyz,
            _ => return text(StatusCode::NOT_FOUND, "not found\n"),
        };
        // hyper leaves the body of an answer to HEAD away and keeps its length.
        if *method == Method::GET || *method == Method::HEAD {
            return page(self);
        }
        let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD only\n");
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        refusal
    }

    fn metrics(&self) -> Answer {
        let mut answer = text(StatusCode::OK, self.metrics.render());
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(TEXT_FORMAT));
        answer
    }

    fn healthz(&self) -> Answer {
        let stuck = self.health.stuck((self.clock)());
        if stuck.is_empty() {
            return text(StatusCode::OK, "ok\n");
        }
        let mut body = String::new();
        for Stuck { worker, silent } in stuck {
            // Writing to a String cannot fail.
            writeln!(body, "worker {worker} made no progress for {} s", silent.as_secs()).ok();
        }
        text(StatusCode::SERVICE_UNAVAILABLE, body)
    }

    fn readyz(&self) -> Answer {
        match self.health.readiness() {
            Ok(()) => text(StatusCode::OK, "ready\n"),
            Err(not_ready) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", not_ready.label())),
        }
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    answer
}

#[cfg(test)]
#[path = "admin_tests.rs"]
mod tests;

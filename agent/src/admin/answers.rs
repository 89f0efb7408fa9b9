//! The paths of the admin server, and the answer of each.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use base::{
    fault::{self, Fault},
    panics::{self, Part},
};
use bytes::Bytes;
use engine::health::{Health, Stuck};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{
        ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
    },
};
use net::task;
use ops::{
    control_socket::{protocol::VERSION, status::Scope},
    metrics::{AdminRefusal, Metrics, TEXT_FORMAT},
    web::{PeersQuery, Query, QueryError, StatusPage},
};
use serde_json::json;
use tokio::{
    sync::{Semaphore, oneshot},
    time::sleep,
};

use super::{
    HEADER_TIMEOUT, OpenConnection,
    access::{Access, Denied, Guard},
    assets::Asset,
};

/// How many large answers may be held for clients that read them, of megabytes each with a thousand peers.
const MAX_LARGE: usize = 8;

/// The shortest time between two questions to the workers, whoever asks: answering takes their time.
const ASK_INTERVAL: Duration = Duration::from_millis(250);

pub(super) type Answer = Response<Full<Bytes>>;

/// Where the figures of the status page are, once the daemon has started.
pub type PageSlot = Arc<OnceLock<Arc<StatusPage>>>;

/// What the admin server serves, and to whom.
pub struct Admin {
    pub(super) metrics: Arc<Metrics>,
    pub(super) health: Arc<Health>,
    pub(super) clock: fn() -> Instant,
    pub(super) access: Access,
    /// Where to put the figures of the status page; `None` without `metrics.page`.
    pub page: Option<PageSlot>,
    pub(super) large: Arc<Semaphore>,
    pub(super) asking: Arc<Semaphore>,
    pub(super) header_timeout: Duration,
}

#[derive(Clone, Copy)]
enum Route<'a> {
    Metrics,
    Healthz,
    Readyz,
    Asset(Asset),
    Status(&'a Arc<StatusPage>),
    Peers(&'a Arc<StatusPage>),
    History(&'a Arc<StatusPage>),
    /// A figure of the page, while the daemon starts.
    NotYet,
}

impl Route<'_> {
    fn guard(self) -> Guard {
        match self {
            Self::Healthz | Self::Readyz => Guard::Nothing,
            Self::Asset(_) => Guard::Name,
            Self::Metrics | Self::Status(_) | Self::Peers(_) | Self::History(_) | Self::NotYet => {
                Guard::SecretOrName
            }
        }
    }
}

impl Admin {
    /// Serves as `config` says. `clock` tells the time against which the workers' heartbeats in `health` are held.
    #[must_use]
    pub fn new(
        config: config::Admin,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
        clock: fn() -> Instant,
    ) -> Self {
        let page = config.page.then(PageSlot::default);
        Self {
            metrics,
            health,
            clock,
            access: Access::new(config),
            page,
            large: Arc::new(Semaphore::new(MAX_LARGE)),
            asking: Arc::new(Semaphore::new(1)),
            header_timeout: HEADER_TIMEOUT,
        }
    }

    pub(super) async fn answer(&self, request: &Request<Incoming>, place: &OpenConnection) -> Answer {
        let answer = self.try_answer(request, place).await;
        answer.unwrap_or_else(|error| text(StatusCode::BAD_REQUEST, format!("{error}\n")))
    }

    async fn try_answer(
        &self,
        request: &Request<Incoming>,
        place: &OpenConnection,
    ) -> Result<Answer, QueryError> {
        let path = request.uri().path();
        #[cfg(feature = "fault-injection")]
        if let Some(armed) = path.strip_prefix("/fault/").map(fault::arm) {
            let status = if armed { StatusCode::OK } else { StatusCode::NOT_FOUND };
            return Ok(text(status, ""));
        }
        fault::point(Fault::Admin);
        let Some(route) = self.route(path) else { return Ok(text(StatusCode::NOT_FOUND, "not found\n")) };
        // hyper leaves the body of an answer to HEAD away and keeps its length.
        if *request.method() != Method::GET && *request.method() != Method::HEAD {
            let refusal = text(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD only\n");
            return Ok(with(refusal, ALLOW, "GET, HEAD"));
        }
        let now = (self.clock)();
        if let Err(denied) = self.access.check(route.guard(), request.headers(), now).await {
            return Ok(self.deny(denied));
        }
        let query = || Query::parse(request.uri().query().unwrap_or_default());
        Ok(match route {
            Route::Metrics => {
                self.hold_large(place).await;
                self.metrics.snapshots.renew(now).await;
                ok(TEXT_FORMAT, self.metrics.render())
            }
            Route::Healthz => self.healthz(),
            Route::Readyz => self.readyz(),
            Route::Asset(asset) => asset.answer(),
            Route::NotYet => text(StatusCode::SERVICE_UNAVAILABLE, "the agent is starting\n"),
            Route::Status(page) => self.status(page, scope(query()?)?, place).await,
            Route::Peers(page) => {
                let query = PeersQuery::new(query()?)?;
                self.metrics.snapshots.renew(now).await;
                json_text(&page.screen(&query, now))
            }
            Route::History(page) => {
                let (peer, after) = history(query()?)?;
                page.history(peer.as_deref(), after).map_or_else(
                    || text(StatusCode::NOT_FOUND, "there is no history of that peer\n"),
                    |history| json_text(&history),
                )
            }
        })
    }

    fn route<'a>(&'a self, path: &str) -> Option<Route<'a>> {
        match path {
            "/metrics" => return Some(Route::Metrics),
            "/healthz" => return Some(Route::Healthz),
            "/readyz" => return Some(Route::Readyz),
            _ => {}
        }
        let slot = self.page.as_ref()?;
        let figures: fn(&'a Arc<StatusPage>) -> Route<'a> = match path {
            "/api/status" => Route::Status,
            "/api/peers" => Route::Peers,
            "/api/history" => Route::History,
            _ => return Asset::of(path).map(Route::Asset),
        };
        Some(slot.get().map_or(Route::NotYet, figures))
    }

    fn deny(&self, denied: Denied) -> Answer {
        match denied {
            Denied::Token => {
                self.metrics.admin.refuse(AdminRefusal::Token);
                let refusal =
                    text(StatusCode::UNAUTHORIZED, "show the secret: Authorization: Bearer SECRET\n");
                with(refusal, WWW_AUTHENTICATE, "Bearer realm=\"culvert\"")
            }
            Denied::NoToken => {
                self.metrics.admin.refuse(AdminRefusal::Token);
                text(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "the agent cannot read metrics.token_file: its log says why\n",
                )
            }
            Denied::Host => {
                self.metrics.admin.refuse(AdminRefusal::Host);
                let why = "This name is not one of this host's that the agent knows: without metrics.token_file it answers under \
                           an address, localhost, the host's own name and the names of metrics.names (remedy: add the name to \
                           metrics.names, ask by address, or set metrics.token_file).\n";
                text(StatusCode::MISDIRECTED_REQUEST, why)
            }
        }
    }

    /// Waits until a large answer may be made; the connection holds the permission until it ends.
    async fn hold_large(&self, place: &OpenConnection) {
        let permit = Arc::clone(&self.large).acquire_owned().await;
        // The semaphore is never closed.
        *panics::lock(&place.large) = permit.ok();
    }

    /// The JSON of `culvert status --json`.
    async fn status(&self, page: &Arc<StatusPage>, scope: Scope, place: &OpenConnection) -> Answer {
        self.hold_large(place).await;
        let page = Arc::clone(page);
        let turn = Arc::clone(&self.asking).acquire_owned().await;
        self.metrics.snapshots.renew((self.clock)()).await;
        let ask = move || {
            let status = page.status(&scope);
            // A scope without any peer is what was asked for.
            match status.lacks(&scope).filter(|_| scope != Scope::agent()) {
                Some(why) => text(StatusCode::NOT_FOUND, format!("{why}\n")),
                None => json_text(&json!({ "version": VERSION, "status": status })),
            }
        };
        let (answered, answer) = oneshot::channel();
        // A task of its own, so that a client that goes away does not let the next one ask sooner.
        task::spawn(Part::Admin, async move {
            // It waits for the workers, for a second at most.
            let answer = tokio::task::spawn_blocking(move || panics::isolate(Part::Admin, ask)).await;
            // Nobody waits any more if the client has gone away.
            let _sent = answered.send(answer).is_ok();
            sleep(ASK_INTERVAL).await;
            drop(turn);
        });
        match answer.await {
            Ok(Ok(Ok(answer))) => answer,
            Ok(Ok(Err(_)) | Err(_)) | Err(_) => {
                text(StatusCode::INTERNAL_SERVER_ERROR, "the agent could not answer: its log says why\n")
            }
        }
    }

    fn healthz(&self) -> Answer {
        let stuck = self.health.stuck((self.clock)());
        if stuck.is_empty() {
            return text(StatusCode::OK, "ok\n");
        }
        let line = |Stuck { worker, silent }: &Stuck| {
            format!("worker {worker} made no progress for {} s\n", silent.as_secs())
        };
        text(StatusCode::SERVICE_UNAVAILABLE, stuck.iter().map(line).collect::<String>())
    }

    fn readyz(&self) -> Answer {
        match self.health.readiness() {
            Ok(()) => text(StatusCode::OK, "ready\n"),
            Err(not_ready) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", not_ready.label())),
        }
    }
}

/// What `/api/status` is to show: `peer` and `lane` as on the command line, `peers=none` for the agent alone.
fn scope(mut query: Query) -> Result<Scope, QueryError> {
    if let Some(value) = query.take("peers") {
        query.end()?;
        let expected = "none".to_owned();
        return if value == expected {
            Ok(Scope::agent())
        } else {
            Err(QueryError::Value { name: "peers", value, expected })
        };
    }
    let peer = query.take("peer");
    let lane = query.number("lane", u64::from(u8::MAX))?.map(|lane| lane as u8);
    query.end()?;
    if lane.is_some() && peer.is_none() {
        return Err(QueryError::Unknown("lane".to_owned()));
    }
    Ok(Scope { peer, lane, ..Scope::default() })
}

/// Whose history is asked for, and from which sample on.
fn history(mut query: Query) -> Result<(Option<String>, u64), QueryError> {
    let (peer, after) = (query.take("peer"), query.number("after", u64::MAX)?);
    query.end().map(|()| (peer, after.unwrap_or(0)))
}

fn json_text(value: &impl serde::Serialize) -> Answer {
    // Texts, numbers and lists of them: nothing here can fail to be JSON.
    ok("application/json", serde_json::to_vec(value).unwrap_or_default())
}

pub(super) fn ok(content_type: &'static str, body: impl Into<Bytes>) -> Answer {
    let answer = with(Response::new(Full::new(body.into())), CONTENT_TYPE, content_type);
    let answer = with(answer, CACHE_CONTROL, "no-store");
    let answer = with(answer, X_CONTENT_TYPE_OPTIONS, "nosniff");
    with(answer, HeaderName::from_static("cross-origin-resource-policy"), "same-origin")
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut answer = ok("text/plain; charset=utf-8", body);
    *answer.status_mut() = status;
    answer
}

fn with(mut answer: Answer, name: HeaderName, value: &'static str) -> Answer {
    answer.headers_mut().insert(name, HeaderValue::from_static(value));
    answer
}

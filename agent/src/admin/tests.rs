//! Requests over loopback with a raw socket, and the rules of readiness and health.

use std::time::Instant;

use engine::health::{Health, NotReady, Stuck};
use ops::metrics::Metrics;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    task::JoinHandle,
};

use super::*;

#[expect(clippy::disallowed_methods, reason = "the clock of the server under test")]
fn clock() -> Instant {
    Instant::now()
}

struct Server {
    address: std::net::SocketAddr,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    page: Option<PageSlot>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

async fn server() -> Server {
    server_with(clock(), HEADER_TIMEOUT).await
}

/// A server of two workers that started at `start`.
async fn server_with(start: Instant, header_timeout: Duration) -> Server {
    started(config::Admin::default(), start, header_timeout).await
}

async fn started(config: config::Admin, start: Instant, header_timeout: Duration) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let health = Arc::new(Health::new(2, start));
    let metrics = Arc::new(Metrics::new("1.2.3", 2, Arc::default(), Arc::clone(&health)));
    let (stop, stopping) = watch::channel(false);
    let admin = Admin::new(config, Arc::clone(&metrics), Arc::clone(&health), clock);
    let page = admin.page();
    let serving = task::spawn(Part::Admin, serve(listener, Admin { header_timeout, ..admin }, stopping));
    Server { address, health, metrics, page, stop, serving }
}

impl Server {
    /// Sends `request` and reads to the end.
    async fn raw(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Sends a request, and returns the status, the head in lower case and the body of the answer.
    async fn ask(&self, method: &str, path: &str) -> (u16, String, String) {
        let answer = self.raw(&format!("{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.to_ascii_lowercase(), body.to_owned())
    }

    async fn stop(self) {
        self.stop.send(true).unwrap();
        self.serving.await.unwrap();
    }
}

#[tokio::test]
async fn metrics_are_served_in_the_text_format() {
    let server = server().await;
    let (status, head, body) = server.ask("GET", "/metrics?ignored=1").await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    assert!(body.contains("culvert_build_info{version=\"1.2.3\"} 1\n"), "{body}");
    assert!(body.contains("culvert_ready 0\n"));
    server.health.set_ready(true);
    assert!(server.ask("GET", "/metrics").await.2.contains("culvert_ready 1\n"));
    server.stop().await;
}

#[tokio::test]
async fn readiness_follows_the_daemon() {
    let server = server().await;
    let (status, _, body) = server.ask("GET", "/readyz").await;
    assert_eq!((status, body.as_str()), (503, "not ready\n"));
    server.health.set_ready(true);
    assert_eq!(server.ask("GET", "/readyz").await.0, 200);
    server.health.drain();
    let (status, _, body) = server.ask("GET", "/readyz").await;
    assert_eq!((status, body.as_str()), (503, "draining\n"));
    server.stop().await;
}

#[tokio::test]
async fn a_stuck_worker_is_named() {
    let long_ago = clock() - Duration::from_secs(3600);
    let server = server_with(long_ago, HEADER_TIMEOUT).await;
    server.health.beat(0, clock());
    let (status, _, body) = server.ask("GET", "/healthz").await;
    assert_eq!(status, 503);
    assert!(body.starts_with("worker 1 made no progress for 36"), "{body}");
    server.health.beat(1, clock());
    let (status, _, body) = server.ask("GET", "/healthz").await;
    assert_eq!((status, body.as_str()), (200, "ok\n"));
    server.stop().await;
}

#[tokio::test]
async fn head_has_the_length_and_no_body() {
    let server = server().await;
    let (status, head, body) = server.ask("HEAD", "/healthz").await;
    assert_eq!((status, body.as_str()), (200, ""));
    assert!(head.contains("content-length: 3"), "{head}");
    server.stop().await;
}

/// Faults are for a build with the feature `fault-injection`; `tests/faults` makes one.
#[cfg(not(feature = "fault-injection"))]
#[tokio::test]
async fn no_fault_can_be_asked_for() {
    let server = server().await;
    for fault in ["", "admin", "render", "worker"] {
        assert_eq!(server.ask("GET", &format!("/fault/{fault}")).await.0, 404, "{fault}");
    }
    assert_eq!(server.ask("GET", "/metrics").await.0, 200, "nothing is armed");
    server.stop().await;
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let server = server().await;
    for path in ["/", "/metrics/", "/healthz/x"] {
        assert_eq!(server.ask("GET", path).await.0, 404, "{path}");
    }
    let (status, head, _) = server.ask("POST", "/metrics").await;
    assert_eq!(status, 405);
    assert!(head.contains("allow: get, head"), "{head}");
    assert_eq!(server.ask("POST", "/nowhere").await.0, 404);
    assert!(server.raw("nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400"));
    server.stop().await;
}

#[tokio::test]
async fn one_request_per_connection() {
    let server = server().await;
    let request = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
    let answers = server.raw(&request.repeat(2)).await;
    assert_eq!(answers.matches("HTTP/1.1").count(), 1, "{answers}");
    server.stop().await;
}

#[tokio::test]
async fn a_slow_request_is_cut_off() {
    let server = server_with(clock(), Duration::from_millis(50)).await;
    for begun in ["", "GET /healthz HTTP/1.1\r\nHost:"] {
        let answer = timeout(Duration::from_secs(3), server.raw(begun)).await.expect("it is cut off");
        assert!(!answer.contains("200"), "{answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn stopping_closes_idle_connections_and_the_listener() {
    let server = server().await;
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(server.ask("GET", "/healthz").await.0, 200, "the idle connection was accepted before");
    let (address, metrics) = (server.address, Arc::clone(&server.metrics));
    timeout(Duration::from_secs(3), server.stop())
        .await
        .expect("an idle connection must not hold up the stop");
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.ok();
    assert!(rest.is_empty());
    assert!(TcpStream::connect(address).await.is_err());
    assert_eq!(Arc::strong_count(&metrics), 1, "something of the server is still alive");
}

#[tokio::test]
async fn a_lost_sender_stops_the_server() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let health = Arc::new(Health::new(0, clock()));
    let metrics = Arc::new(Metrics::new("1.2.3", 0, Arc::default(), Arc::clone(&health)));
    let (sender, stopping) = watch::channel(false);
    drop(sender);
    let serving = serve(listener, Admin::new(config::Admin::default(), metrics, health, clock), stopping);
    timeout(Duration::from_secs(3), serving).await.expect("it stops");
}

#[test]
fn draining_is_final() {
    let health = Health::new(0, clock());
    assert_eq!(health.readiness(), Err(NotReady::NotYet));
    health.set_ready(true);
    assert_eq!(health.readiness(), Ok(()));
    health.set_ready(false);
    assert_eq!(health.readiness(), Err(NotReady::NotYet));
    health.drain();
    health.set_ready(true);
    assert_eq!(health.readiness(), Err(NotReady::Draining));
}

#[test]
fn a_worker_is_stuck_after_the_limit_and_not_before() {
    let start = clock();
    let health = Health::new(2, start);
    assert_eq!(health.stuck(start + Health::STUCK_AFTER), []);
    let later = start + Health::STUCK_AFTER + Duration::from_millis(1);
    health.beat(1, start + Duration::from_secs(1));
    // A late report of an earlier time does not turn the clock back.
    health.beat(1, start);
    let silent = Duration::from_millis(5001);
    assert_eq!(health.stuck(later), [Stuck { worker: 0, silent }]);
    // Before the origin: other clocks may disagree by a little.
    assert_eq!(health.stuck(start - Duration::from_secs(1)), []);
}

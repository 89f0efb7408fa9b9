//! Requests over loopback with a raw socket, and the rules of readiness and health.

use std::time::Instant;

use engine::{
    brief::PeerBrief,
    health::{Health, NotReady, Stuck},
    status::PeerStatus,
};
use ops::{
    control_socket::status::{Scope, Status},
    metrics::Metrics,
    web::{Figures, StatusPage},
};
use serde_json::{Value, json};
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

/// A daemon of one peer whose name and reason are markup.
struct Daemon;

const MARKUP: &str = "<img src=x onerror=alert(1)>";

fn the_peer() -> PeerStatus {
    PeerStatus { name: "exit".into(), software: Some(MARKUP.into()), ..PeerStatus::default() }
}

impl Figures for Daemon {
    fn published(&self) -> Vec<PeerBrief> {
        vec![PeerBrief::from(&the_peer())]
    }

    fn asked(&self, scope: &Scope) -> Status {
        let peers = match scope.peer.as_deref() {
            None | Some("exit") => vec![the_peer()],
            Some(_) => Vec::new(),
        };
        Status { software: "1.2.3".to_owned(), peers, ..Status::default() }
    }
}

/// A server with a status page, which may be told more in `config`.
async fn page_server(config: config::Admin) -> Server {
    let server = started(config::Admin { page: true, ..config }, clock(), HEADER_TIMEOUT).await;
    let page = StatusPage::new(Arc::new(Daemon), Arc::clone(&server.health));
    assert!(server.page.as_ref().unwrap().set(Arc::new(page)).is_ok());
    server
}

/// A server of two workers that started at `start`.
async fn server_with(start: Instant, header_timeout: Duration) -> Server {
    started(config::Admin::default(), start, header_timeout).await
}

async fn started(config: config::Admin, start: Instant, header_timeout: Duration) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let health = Arc::new(Health::new(2, start));
    let metrics = Arc::new(Metrics::new("1.2.3", None, 2, Arc::default(), Arc::clone(&health)));
    let (stop, stopping) = watch::channel(false);
    let admin = Admin::new(config, Arc::clone(&metrics), Arc::clone(&health), clock);
    let page = admin.page.clone();
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

    /// Sends a request with more lines of its head, and returns the status of the answer.
    async fn status_with(&self, path: &str, head: &str) -> u16 {
        let answer = self.raw(&format!("GET {path} HTTP/1.1\r\n{head}\r\n\r\n")).await;
        answer.split(' ').nth(1).unwrap().parse().unwrap()
    }

    /// How often the server refused for this reason, as the metrics say.
    fn refused(&self, reason: &str) -> u64 {
        let line = format!("culvert_admin_refused_total{{reason=\"{reason}\"}} ");
        let text = self.metrics.render();
        let count =
            text.lines().find_map(|shown| shown.strip_prefix(&line)).unwrap_or_else(|| panic!("{text}"));
        count.parse().unwrap()
    }

    /// Sends a request, and returns the status, the head in lower case and the body of the answer.
    async fn ask(&self, method: &str, path: &str) -> (u16, String, String) {
        let answer = self.raw(&format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await;
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
    assert!(body.contains("culvert_build_info{commit=\"\",version=\"1.2.3\"} 1\n"), "{body}");
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

/// Faults are for a build with the feature `fault-injection`; `tests/process/faults` makes one.
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
    let request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answers = server.raw(&request.repeat(2)).await;
    assert_eq!(answers.matches("HTTP/1.1").count(), 1, "{answers}");
    server.stop().await;
}

/// Connects and sends the beginning of a request.
async fn begin(server: &Server, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn half_requests_make_room_for_whole_ones() {
    let server = server().await;
    let mut halves = Vec::new();
    for _ in 0..3 * MAX_CONNECTIONS {
        halves.push(begin(&server, "GET /healthz HTTP/1.1\r\n").await);
        assert!(
            halves.len() % 16 > 0 || server.ask("GET", "/healthz").await.0 == 200,
            "it is answered at once"
        );
    }
    assert_eq!(server.ask("GET", "/healthz").await.0, 200);
    assert!(server.refused("crowded") >= 2 * MAX_CONNECTIONS as u64);
    let mut rest = Vec::new();
    timeout(Duration::from_secs(3), halves[0].read_to_end(&mut rest))
        .await
        .expect("the oldest was ended")
        .ok();
    server.stop().await;
}

#[tokio::test]
async fn a_client_with_many_connections_ends_its_own_first() {
    let mut connections = Connections::default();
    let mut open = |source: &str, asked: bool| {
        let place = Arc::new(OpenConnection::new(source.parse().unwrap()));
        place.asked.store(asked, Ordering::Relaxed);
        let made_room = connections.make_room();
        connections.0.push_back((place, task::spawn(Part::Admin, std::future::pending())));
        made_room
    };
    assert!(!open("192.0.2.1", false));
    for number in 1..MAX_CONNECTIONS {
        // All of one /64, and the answers of half of them under way.
        assert!(!open(&format!("2001:db8::{number:x}"), number % 2 == 0));
    }
    for _ in 0..10 {
        assert!(open("2001:db8::ffff", true));
    }
    let left = |asked: bool| {
        connections.0.iter().filter(|(place, _)| place.asked.load(Ordering::Relaxed) == asked).count()
    };
    assert_eq!(connections.0.len(), MAX_CONNECTIONS);
    assert_eq!(connections.0[0].0.source.to_string(), "192.0.2.1", "the other client keeps its own");
    assert_eq!((left(false), left(true)), (1 + 32 - 10, 31 + 10), "half requests went first");
    connections.0.iter().for_each(|(_, task)| task.abort());
}

#[tokio::test]
async fn a_slow_request_is_cut_off() {
    let server = server_with(clock(), Duration::from_millis(50)).await;
    for begun in ["", "GET /healthz HTTP/1.1\r\nHost:"] {
        let answer = timeout(Duration::from_secs(3), server.raw(begun)).await.expect("it is cut off");
        assert!(!answer.contains("200"), "{answer}");
    }
    assert_eq!(server.refused("slow"), 2);
    server.stop().await;
}

#[tokio::test]
async fn without_the_key_there_is_no_page() {
    let server = server().await;
    for path in ["/", "/page.js", "/page.css", "/api/status", "/api/peers", "/api/history"] {
        assert_eq!(server.ask("GET", path).await.0, 404, "{path}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_page_is_complete_and_loads_nothing_from_elsewhere() {
    let server = page_server(config::Admin::default()).await;
    let (status, head, html) = server.ask("GET", "/").await;
    assert_eq!(status, 200);
    assert!(
        head.contains("content-type: text/html; charset=utf-8") && !head.contains("set-cookie"),
        "{head}"
    );
    for rule in [
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "form-action 'none'",
        "trusted-types 'none'",
    ] {
        assert!(head.contains(rule), "{rule} in {head}");
    }
    assert!(
        head.contains("x-content-type-options: nosniff") && head.contains("referrer-policy: no-referrer")
    );
    let mut texts = vec![html];
    for (path, kind) in [
        ("/page.css", "text/css"),
        ("/page.js", "text/javascript"),
        ("/details.js", "text/javascript"),
        ("/view.js", "text/javascript"),
    ] {
        let (status, head, text) = server.ask("GET", path).await;
        assert!(status == 200 && head.contains(kind), "{path}: {head}");
        assert!(texts.iter().any(|other| other.contains(&path[1..])), "nothing asks for {path}");
        texts.push(text);
    }
    for text in &texts {
        for forbidden in [
            "://",
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "eval(",
            "document.write",
            " style=",
            " onclick",
        ] {
            let found = text.replace("http://www.w3.org/2000/svg", "").contains(forbidden);
            assert!(!found, "{forbidden}");
        }
    }
    let post = server.raw("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    server.stop().await;
}

#[tokio::test]
async fn the_figures_are_json() {
    let server = page_server(config::Admin::default()).await;
    let (status, head, body) = server.ask("GET", "/api/status").await;
    assert!(status == 200 && head.contains("content-type: application/json"), "{head}");
    let shown: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(shown, json!({ "version": 1, "status": Daemon.asked(&Scope::default()) }));
    let member =
        |body: &str, pointer: &str| serde_json::from_str::<Value>(body).unwrap().pointer(pointer).cloned();
    assert_eq!(member(&body, "/status/peers/0/software"), Some(json!(MARKUP)));
    assert_eq!(
        member(&server.ask("GET", "/api/status?peers=none").await.2, "/status/peers"),
        Some(json!([]))
    );
    assert_eq!(
        member(&server.ask("GET", "/api/status?peer=exit").await.2, "/status/peers/0/name"),
        Some(json!("exit"))
    );
    let peers = server.ask("GET", "/api/peers?trends=1").await.2;
    assert_eq!(member(&peers, "/columns/name"), Some(json!(["exit"])));
    assert_eq!(
        (member(&peers, "/readiness"), member(&peers, "/stuck_workers")),
        (Some(json!("not ready")), Some(json!([])))
    );
    assert!(member(&server.ask("GET", "/api/history").await.2, "/taken").is_some());
    for (path, expected, words) in [
        ("/api/status?peer=nobody", 404, "no peer is named"),
        ("/api/status?lane=0", 400, "\"lane\""),
        ("/api/status?peer=exit&lane=256", 400, "0 to 255"),
        ("/api/status?peers=all", 400, "write none"),
        ("/api/peers?sort=x", 400, "write state or"),
        ("/api/history?peer=nobody", 404, "no history"),
        ("/api/history?after=x", 400, "a number"),
        ("/api/other", 404, "not found"),
    ] {
        let (status, _, body) = server.ask("GET", path).await;
        assert!(status == expected && body.contains(words), "{path}: {status} {body}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_figures_wait_for_the_daemon() {
    let config = config::Admin { page: true, ..config::Admin::default() };
    let server = started(config, clock(), HEADER_TIMEOUT).await;
    assert_eq!(server.ask("GET", "/").await.0, 200);
    let (status, _, body) = server.ask("GET", "/api/peers").await;
    assert_eq!((status, &*body), (503, "the agent is starting\n"));
    server.stop().await;
}

/// A web site whose name leads here (DNS rebinding) reads nothing.
#[tokio::test]
async fn a_browser_that_came_under_another_name_gets_nothing() {
    let server = page_server(config::Admin::default()).await;
    for path in ["/", "/page.js", "/api/status", "/api/peers", "/metrics"] {
        assert_eq!(server.status_with(path, "Host: evil.example").await, 421, "{path}");
        assert_eq!(server.status_with(path, "Host: 127.0.0.1:9464").await, 200, "{path}");
    }
    assert_eq!(server.refused("host"), 5);
    server.stop().await;
    let names = vec!["gw.example.net".to_owned()];
    let server = page_server(config::Admin { names, ..config::Admin::default() }).await;
    for path in ["/", "/metrics"] {
        assert_eq!(server.status_with(path, "Host: GW.example.net:9464").await, 200, "{path}");
        assert_eq!(server.status_with(path, "Host: other.example.net").await, 421, "{path}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_secret_guards_the_figures_and_the_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let token_file = folder.path().join("token");
    let write = |text: &str| {
        std::fs::write(&token_file, text).unwrap();
        std::fs::set_permissions(&token_file, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    };
    write("0123456789abcdef\n");
    let server =
        page_server(config::Admin { token_file: token_file.clone(), ..config::Admin::default() }).await;
    let guarded = ["/metrics", "/api/status", "/api/peers", "/api/history"];
    for path in guarded {
        for head in
            ["Host: x", "Authorization: Bearer 0123456789abcdee", "Authorization: Basic 0123456789abcdef"]
        {
            assert_eq!(server.status_with(path, head).await, 401, "{path} {head}");
        }
        assert_eq!(server.status_with(path, "authorization: bearer 0123456789abcdef").await, 200, "{path}");
    }
    assert_eq!(server.refused("token"), 12);
    let (_, head, _) = server.ask("GET", "/api/peers").await;
    assert!(head.contains("www-authenticate: bearer"), "{head}");
    for open in ["/", "/page.js", "/healthz"] {
        assert_eq!(
            server.status_with(open, "Host: gw.example.net").await,
            200,
            "{open} says nothing of this agent"
        );
    }
    // Another secret needs no restart, and a file that cannot be read lets nobody in.
    write("fedcba9876543210");
    assert_eq!(server.status_with("/metrics", "Authorization: Bearer 0123456789abcdef").await, 401);
    assert_eq!(server.status_with("/metrics", "Authorization: Bearer fedcba9876543210").await, 200);
    std::fs::remove_file(&token_file).unwrap();
    assert_eq!(server.status_with("/metrics", "Authorization: Bearer fedcba9876543210").await, 503);
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
    let metrics = Arc::new(Metrics::new("1.2.3", None, 0, Arc::default(), Arc::clone(&health)));
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

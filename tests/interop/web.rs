//! A client that names us meets a web server, on the port on which a peer works meanwhile; one that names somebody else, or nobody,
//! meets silence.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    client::Client,
    needs,
    pair::{Pair, Plan},
    ports,
    process::{run, text},
    upstream::Echo,
    venv,
};

pub(crate) const NAME: &str = "gw.example.net";

/// The client's own limit is shorter.
const CLIENT_LIMIT: Duration = Duration::from_secs(120);

/// Runs the client, which must succeed; what it says.
#[track_caller]
fn client(python: &Path, verb: &str, port: u16, more: &[&str]) -> String {
    let mut command = Command::new(python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/interop/web_client.py"));
    let output = run(command.args([verb, &port.to_string()]).args(more), CLIENT_LIMIT);
    assert!(output.status.success(), "{verb} {more:?}: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

/// A certificate for [`NAME`] and its key, as files; a client trusts it as it is.
fn certificate(folder: &Path) -> [PathBuf; 2] {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec![NAME.to_owned(), "localhost".to_owned()]).unwrap();
    let paths = ["chain.pem", "key.pem"].map(|file| folder.join(file));
    fs::write(&paths[0], pem("CERTIFICATE", params.self_signed(&key).unwrap().der())).unwrap();
    fs::write(&paths[1], pem("PRIVATE KEY", &key.serialize_der())).unwrap();
    paths
}

/// A web server that answers each request with what it was asked, and remembers the heads.
pub(crate) struct WebSite {
    pub(crate) address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
    stopping: Arc<AtomicBool>,
}

impl WebSite {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let site =
            Self { address: listener.local_addr().unwrap(), heads: Arc::default(), stopping: Arc::default() };
        let (heads, stopping) = (Arc::clone(&site.heads), Arc::clone(&site.stopping));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stopping.load(Ordering::Relaxed) {
                    return;
                }
                let heads = Arc::clone(&heads);
                // A client that has no interest any more is no failure.
                thread::spawn(move || stream.and_then(|stream| answer(&stream, &heads)).ok());
            }
        });
        site
    }
}

impl Drop for WebSite {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        TcpStream::connect(self.address).ok();
    }
}

fn answer(stream: &TcpStream, heads: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let mut content = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut content)?;
    let first = head.lines().next().unwrap_or_default().to_owned();
    heads.lock().unwrap_or_else(PoisonError::into_inner).push(head);
    let page = format!("{first} with {} bytes", content.len());
    let length = page.len();
    let fields = "connection: close\r\nset-cookie: x=1\r\nset-cookie: y=2\r\ntransfer-encodings: none";
    write!(&mut &*stream, "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n{fields}\r\n\r\n{page}")
}

/// A section `[http]` with a certificate of its own, and the path of that.
pub(crate) fn http_section(folder: &Path, site: Option<SocketAddr>) -> (String, String) {
    let [chain, key] = certificate(folder);
    let site = site.map_or_else(String::new, |address| format!("site = \"http://{address}\"\n"));
    let http = format!(
        "[http]\ncertificate_file = \"{}\"\nkey_file = \"{}\"\nnames = [\"{NAME}\", \"localhost\"]\n{site}",
        chain.display(),
        key.display()
    );
    (http, chain.to_str().unwrap().to_owned())
}

/// A pair whose exit is a web server, too, and a client of its echo.
fn pair(folder: &Path, site: Option<SocketAddr>) -> (Pair, Client, Echo, String) {
    let (http, chain) = http_section(folder, site);
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let plan = Plan::default().service("echo", echo.address, "").forward("echo", ingress).exit(&http);
    let mut client = Client::new(0, ingress);
    let pair = plan.start();
    client.reach();
    (pair, client, echo, chain)
}

fn requests(agent: &Agent, outcome: &str, count: u64) {
    agent.wait_for_count("culvert_http_requests_total", &[("outcome", outcome)], count);
}

#[test]
fn who_names_us_meets_the_site_and_everybody_else_silence() {
    let test = "web";
    if !needs::met(test, needs::AGENTS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let (folder, site) = (tempfile::tempdir().unwrap(), WebSite::new());
    let (pair, mut local, _echo, ca) = pair(folder.path(), Some(site.address));
    let port = pair.underlay.port();

    let page = client(python, "get", port, &[&ca, NAME, "/page?x=1"]);
    assert_eq!(page, "200 GET /page?x=1 HTTP/1.1 with 0 bytes");
    let head = site.heads.lock().unwrap()[0].clone();
    for line in
        ["host: gw.example.net", "cookie: a=1; b=2", "x-forwarded-for: 127.0.0.1", "x-forwarded-proto: https"]
    {
        assert!(head.lines().any(|own| own.eq_ignore_ascii_case(line)), "{line}: {head}");
    }
    let page = client(python, "post", port, &[&ca, NAME, "300000"]);
    assert_eq!(page, "200 POST / HTTP/1.1 with 300000 bytes");
    let page = client(python, "curl", port, &[&ca, NAME, "GET"]);
    assert_eq!(page, "200 GET /curl HTTP/1.1 with 0 bytes");
    // aioquic misses the content that an answer to HEAD has the length of.
    assert_eq!(client(python, "curl", port, &[&ca, NAME, "HEAD"]), "200");
    assert_eq!(client(python, "method", port, &[&ca, NAME, "CONNECT"]), "405");
    assert_eq!(client(python, "method", port, &[&ca, NAME, "TRACE"]), "405");
    for method in ["DELETE", "PUT", "PROPFIND"] {
        let page = client(python, "method", port, &[&ca, NAME, method]);
        assert_eq!(page, format!("200 {method} / HTTP/1.1 with 0 bytes"));
    }
    requests(&pair.exit, "method", 2);
    pair.exit.wait_for("all requests are counted", |samples| {
        let count = |labels: &[_]| samples.count("culvert_http_requests_total", labels);
        // A client may give a HEAD up when the head has come, before the answer's end has been acknowledged.
        let (site, all) = (count(&[("outcome", "site")]), count(&[]));
        if site >= 6 && all == 9 { Ok(()) } else { Err(format!("{site} of {all} were the site's")) }
    });
    local.converse(20);

    for name in ["-", "www.example.net", "example.net", "127.0.0.1"] {
        assert_eq!(client(python, "silent", port, &[name]), "0", "{name}");
    }
    assert_ne!(client(python, "silent", port, &[NAME]), "0", "the client would have heard an answer");
    local.converse(20);

    // The site goes away.
    drop(site);
    assert_eq!(client(python, "get", port, &[&ca, NAME, "/"]), "502");
    requests(&pair.exit, "site_down", 1);
}

/// A web server that takes requests and answers none.
struct Stalling(TcpListener);

#[test]
fn one_prefix_leaves_turns_at_the_site_to_others() {
    let test = "web crowd";
    if !needs::met(test, needs::AGENTS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let site = Stalling(TcpListener::bind("127.0.0.1:0").unwrap());
    let (pair, _local, _echo, ca) = pair(folder.path(), Some(site.0.local_addr().unwrap()));
    // Three connections with 16 requests each; the site never says a word.
    let refused = client(python, "crowd", pair.underlay.port(), &[&ca, NAME, "3"]);
    assert_eq!(refused, "16", "of 48, 32 are at the site");
    requests(&pair.exit, "busy", 16);
}

#[test]
fn without_a_site_there_is_nothing_to_find() {
    let test = "web without a site";
    if !needs::met(test, needs::AGENTS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (pair, _local, _echo, ca) = pair(folder.path(), None);
    assert_eq!(client(python, "get", pair.underlay.port(), &[&ca, NAME, "/"]), "404");
    requests(&pair.exit, "no_site", 1);
}

#[test]
fn a_hostile_client_costs_itself_only() {
    const COUNT: u64 = 10_000;
    let test = "hostile web client";
    if !needs::met(test, needs::AGENTS) {
        return;
    }
    let Some(python) = venv::python(test) else { return };
    let (folder, site) = (tempfile::tempdir().unwrap(), WebSite::new());
    let (pair, mut local, _echo, ca) = pair(folder.path(), Some(site.address));
    let answered = client(python, "hostile", pair.underlay.port(), &[&ca, NAME, &COUNT.to_string()]);
    // Two of five requests are whole.
    assert_eq!(answered, (COUNT * 2 / 5).to_string());
    pair.exit.wait_for_count("culvert_http_refused_total", &[("reason", "violation")], 3);
    local.converse(20);
    // Packets to its connection, as fast as it can: a worker opens some, and the client is answered once it has stopped.
    assert_eq!(client(python, "flood", pair.underlay.port(), &[&ca, NAME, "100000"]), "200");
    pair.exit.wait_for("packets that are not opened", |samples| {
        match samples.count("culvert_http_dropped_packets_total", &[]) {
            0 => Err("none".to_owned()),
            _ => Ok(()),
        }
    });
    local.converse(20);
    let log = pair.exit.log();
    assert!(!log.contains("panic"), "{log}");
}

/// `der` in PEM form (RFC 7468).
fn pem(label: &str, der: &[u8]) -> String {
    let text = data_encoding::BASE64.encode(der);
    format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
}

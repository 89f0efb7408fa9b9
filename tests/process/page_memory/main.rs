//! A status page that is open all day leaves no memory behind, at a daemon with peers of which one is connected. This program
//! holds one test: it measures the memory of its process.
#![cfg(test)]

use std::{
    fmt::Write as _,
    fs,
    io::{Read, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use config::Config;
use culvert::daemon::Daemon;
use culvert_tests::clock;
use gate::identity::{Identity, PublicKey};
use ops::{
    control_socket::status::Scope,
    web::{PeersQuery, Query, SAMPLE_INTERVAL, SAMPLES, StatusPage},
};

/// Updates, and requests over HTTP: of a page that is open for an hour.
const TIMES: usize = 3_000;

/// What may be there afterwards that was not there before: 170 bytes for each time.
const SLACK: u64 = 512 << 10;

/// Peers that are only known.
const KNOWN: usize = 50;

/// The paths that a page asks for, again and again.
const PATHS: [&str; 5] = [
    "/api/peers?sort=state&order=asc&show=all&find=&skip=0&rows=25&trends=1",
    "/api/peers?sort=up&order=desc&show=all&find=site&skip=25&rows=25&trends=0",
    "/api/history?after=0",
    "/api/history?peer=entry&after=0",
    "/page.js",
];

fn agent(identity: &Identity, text: &str) -> Daemon {
    let own = "identity = { key_file = \"none\", state_dir = \"\" }\ncontrol.socket = \"\"\n";
    Daemon::start(Config::parse(&format!("{own}{text}"), Path::new(".")).unwrap(), identity).unwrap()
}

/// A hub with a page, and the entry that is connected to it.
fn pair() -> [Daemon; 2] {
    let [hub, entry] = [(); 2].map(|()| Identity::generate().unwrap());
    let mut known = "metrics = { listen = \"127.0.0.1:0\", page = true }\ntransport = { listen = [\"127.0.0.1:0\"], workers = 2 }\n".to_owned();
    let mut peer = |name: &str, key: PublicKey| {
        writeln!(known, "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"").unwrap();
    };
    peer("entry", entry.public_key());
    for number in 0..KNOWN {
        peer(&format!("site-{number:02}"), Identity::generate().unwrap().public_key());
    }
    let at_hub = agent(&hub, &known);
    let endpoint = at_hub.addresses.transport[0];
    let dials = format!(
        "transport.workers = 1\n[[peer]]\nname = \"hub\"\npublic_key = \"{}\"\nendpoints = [\"{endpoint}\"]\nlanes = 2\n",
        hub.public_key()
    );
    [at_hub, agent(&entry, &dials)]
}

/// The body of an answer.
fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(clock::PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", Ipv4Addr::LOCALHOST).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}");
    body.to_owned()
}

/// One update after the other, each a second later than the one before, as if nobody had asked in between.
fn update(page: &StatusPage, times: usize, now: &mut std::time::Instant) {
    let query = |text: &str| Query::parse(text).and_then(PeersQuery::new).unwrap();
    let queries = [query(""), query("sort=up&order=desc&trends=1"), query("find=site&skip=25&rows=10")];
    for time in 0..times {
        *now += Duration::from_secs(1);
        if (time as u64).is_multiple_of(SAMPLE_INTERVAL.as_secs()) {
            page.sample(*now);
        }
        let screen = page.screen(&queries[time % queries.len()], *now);
        assert_eq!((screen.peers.sums.peers, screen.peers.sums.connected), (KNOWN + 1, 1));
        assert!(page.history(Some("entry"), 0).is_some());
        if time.is_multiple_of(10) {
            let scope = Scope { peer: time.is_multiple_of(20).then(|| "entry".to_owned()), ..Scope::agent() };
            // On a loaded machine one may not answer in time at first.
            clock::until("all workers answer", clock::PATIENCE, || {
                let unanswered = page.status(&scope).unanswered_workers;
                if unanswered.is_empty() { Ok(()) } else { Err(format!("{unanswered:?} do not")) }
            });
        }
    }
}

fn ask(address: SocketAddr, times: usize) {
    for path in PATHS.iter().cycle().take(times) {
        assert!(!get(address, path).is_empty());
    }
    // The workers are asked four times a second at most, whoever asks.
    for path in ["/api/status?peers=none", "/api/status?peer=entry"] {
        assert!(get(address, path).contains("\"software\""));
    }
}

/// The anonymous resident memory of this process, in bytes: the least of two seconds, as what a moment holds goes again.
fn settled_bytes() -> u64 {
    let looks = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(100));
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        field.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    });
    looks.min().unwrap()
}

#[test]
fn thousands_of_updates_leave_nothing_behind() {
    let [hub, entry] = pair();
    let address = hub.admin_address().unwrap();
    let connected = || match hub.summary().connected {
        1 => Ok(()),
        count => Err(format!("{count} peers are connected")),
    };
    clock::until("the entry is connected", clock::PATIENCE, connected);
    // Everything that is made once: the series of each peer, threads for what blocks, buffers.
    let sampled = || match get(address, "/api/history?after=0") {
        history if history.contains("\"taken\":0") => Err("there is no sample yet"),
        _ => Ok(()),
    };
    clock::until("the server has sampled its peers", clock::PATIENCE, sampled);
    let page = StatusPage::new(Arc::clone(&hub.running) as _, Arc::clone(&hub.running.health));
    let mut now = clock::now();
    // Longer than the history.
    update(&page, SAMPLES * 6, &mut now);
    ask(address, 300);

    let before = settled_bytes();
    update(&page, TIMES, &mut now);
    let updated = settled_bytes();
    ask(address, TIMES);
    let asked = settled_bytes();

    let shown = format!("{before} bytes before, {updated} after updates, {asked} after requests");
    assert!(updated <= before + SLACK, "updates left memory behind: {shown}");
    assert!(asked <= updated + SLACK, "requests left memory behind: {shown}");
    drop(page);
    entry.stop().unwrap();
    hub.stop().unwrap();
}

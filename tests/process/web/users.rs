//! Users on TCP: CONNECT and CONNECT-UDP over HTTP/1.1 and HTTP/2, by curl, libcurl and a client on h2.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    clock,
    place::Place,
    process::{Running, run, text},
    tcp_echo::TcpEcho,
    upstream::Echo,
};

use crate::{
    NEEDS,
    bed::{Bed, FOLDER, LIMIT, NAME},
};

/// A bed with services, and a user's credentials.
pub(crate) struct Users {
    pub(crate) bed: Bed,
    pub(crate) tcp: TcpEcho,
    pub(crate) udp: Echo,
    pub(crate) credentials: String,
}

impl Users {
    #[track_caller]
    pub(crate) fn new(test: &str, more: &str) -> Option<Self> {
        let bed = Bed::new(test, NEEDS, "ec:P-256", more)?;
        let (tcp, udp) = (TcpEcho::new(), Echo::new());
        let services = format!(
            "[[service]]\nname = \"web\"\nupstream = \"{}\"\nprotocol = \"tcp\"\n\
             [[service]]\nname = \"echo\"\nupstream = \"{}\"\n\
             [[service]]\nname = \"site\"\nupstream = \"{}\"\n\
             [[service]]\nname = \"here\"\nupstream = \"any\"\nallow = [\"127.0.0.1/32\"]\n",
            tcp.address, udp.address, bed.site_address
        );
        bed.reconfigure(|text| text + &services);
        let credentials = add_anna(&bed);
        Some(Self { bed, tcp, udp, credentials })
    }

    /// Runs the client, which must succeed; what it says.
    #[track_caller]
    fn ask(&self, verb: &str, version: &str, credentials: &str, more: &[&str]) -> String {
        let mut command = Command::new(&self.bed.python);
        command.arg(Path::new(FOLDER).join("user_client.py"));
        command.args([verb, &self.bed.tcp.port().to_string(), version, credentials]).args(more);
        let output = run(command.env("PYTHONDONTWRITEBYTECODE", "1"), LIMIT);
        assert!(output.status.success(), "{verb} {version} {more:?}: {}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    }

    #[track_caller]
    pub(crate) fn good(&self, verb: &str, version: &str, more: &[&str]) -> String {
        self.ask(verb, version, &self.credentials, more)
    }

    /// A client that goes on until it is dropped: its verb, its version, and the rest.
    pub(crate) fn running(&self, words: &[&str]) -> Running {
        let mut command = Place::Host.command(&self.bed.python);
        command.arg(Path::new(FOLDER).join("user_client.py"));
        let port = self.bed.tcp.port().to_string();
        command.args([words[0], &port, words[1], &self.credentials]).args(&words[2..]);
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::piped()).stdout(Stdio::null());
        Running::start(words[0], &mut command)
    }

    pub(crate) fn figures(&self) -> serde_json::Value {
        let status: serde_json::Value =
            serde_json::from_str(&self.bed.agent.ask(&["status", "--json"])).unwrap();
        status["status"]["users"][0].clone()
    }
}

/// Adds a user who may reach all services; its credentials.
#[track_caller]
fn add_anna(bed: &Bed) -> String {
    let services = ["web", "echo", "site"].map(|name| ["--service", name]).concat();
    let add = [&["user", "add", "anna", "--json", "--network", "127.0.0.0/8"], &services[..]].concat();
    let said: serde_json::Value = serde_json::from_str(&bed.agent.ask(&add)).unwrap();
    format!("anna:{}", said["password"].as_str().unwrap())
}

pub(crate) const VERSIONS: [&str; 2] = ["1", "2"];

#[test]
fn a_users_connect_reaches_what_it_may_over_both_versions() {
    let Some(users) = Users::new("users' CONNECT", "") else { return };
    let address = users.tcp.address.to_string();
    for version in VERSIONS {
        assert_eq!(users.good("connect", version, &["web:80", "1000000"]), "200 1000000");
        assert_eq!(users.tcp.end(), "end");
        assert_eq!(users.good("connect", version, &[&address, "5"]), "200 5");
        assert_eq!(users.tcp.end(), "end");
        assert_eq!(users.good("reset", version, &["web:80"]), "reset");
        assert_eq!(users.tcp.end(), "reset", "HTTP/{version}");
        // The client sees that it was no end: on HTTP/2 its stream alone is reset, with CANCEL.
        let broken = if version == "1" { "reset" } else { "reset 8" };
        assert_eq!(users.good("broken", version, &["web:80"]), broken);
        assert_eq!(users.tcp.end(), "reset it");
        for (target, status) in [
            ("nothing:1", "502 0"),
            ("127.0.0.2:80", "403 0"),
            ("192.0.2.1:80", "403 0"),
            ("127.0.0.1:1", "502 0"),
            ("nothing", "400 0"),
        ] {
            assert_eq!(users.good("connect", version, &[target, "1"]), status, "{target}");
        }
        assert_eq!(users.good("many", version, &["web:80", "50"]), "50");
        for _ in 0..50 {
            assert_eq!(users.tcp.end(), "end");
        }
    }
    // Bytes that did not wait for the answer go with their connection.
    assert_eq!(users.good("early", "1", &["web:80"]), "200 0");
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    let user = users.figures();
    let refused = serde_json::json!({ "address": 2, "network": 2, "refused": 2, "resolve": 2, "target": 2 });
    assert_eq!(user["refused"], refused, "{user}");
    let bytes = &user["bytes"];
    assert_eq!(bytes["from_user"], 2 * (1_000_000 + 5 + 1 + 1 + 50), "{user}");
    assert_eq!(bytes["to_user"], 2 * (1_000_000 + 5 + 1 + 50), "{user}");
    for (version, count) in [("http1", 60), ("http2", 59)] {
        let labels = [("version", version), ("outcome", "user")];
        users.bed.agent.wait_for_count("culvert_http_tcp_requests_total", &labels, count);
    }
}

#[test]
fn curl_goes_through_a_users_connect() {
    let Some(users) = Users::new("users' curl", "") else { return };
    let site = users.bed.site_address;
    let curl = |credentials: &[&str], url: &str| {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", "60", "--noproxy", "", "--proxytunnel"]);
        command.arg("--proxy-cacert").arg(users.bed.folder.path().join("cert.pem"));
        command.arg("--cacert").arg(users.bed.folder.path().join("cert.pem"));
        command.args(["--proxy", &format!("https://{NAME}:{}", users.bed.tcp.port())]);
        command.args(["--resolve", &format!("{NAME}:{}:127.0.0.1", users.bed.tcp.port())]);
        command.args([
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_connect} %{http_code} %{size_download}",
        ]);
        text(&run(command.args(credentials).arg(url), LIMIT).stdout)
    };
    let user = ["--proxy-user", &users.credentials];
    assert_eq!(curl(&user, "http://site/zeros/30000000"), "200 200 30000000");
    assert_eq!(curl(&user, &format!("http://{site}/zeros/12345")), "200 200 12345");
    // TLS inside TLS, to this very agent by its service's address.
    assert_eq!(curl(&[], "http://site/zeros/1"), "405 000 0", "without credentials");
    assert_eq!(curl(&["--proxy-user", "anna:wrong"], "http://site/zeros/1"), "405 000 0");
    assert_eq!(curl(&user, "http://127.0.0.2/"), "403 000 0");
    // libcurl of another version, over both versions of HTTP.
    for version in VERSIONS {
        let said = users.good("curl", version, &[&format!("http://{site}/zeros/3000000")]);
        assert_eq!(said, "200 3000000", "HTTP/{version}");
    }
}

#[test]
fn without_good_credentials_all_is_as_if_there_were_no_users() {
    let Some(users) = Users::new("users' credentials", "") else { return };
    let none = VERSIONS.map(|version| users.ask("answers", version, "-", &[]));
    // The upgrade is asked of the site as a plain request, and all CONNECT is 405.
    assert_eq!(none, ["405 405 405 200 200", "405 405 405 405 405 405 405 405"]);
    for wrong in ["anna:wrong", "ben:wrong", "anna:", ":", &format!("{}x", users.credentials)] {
        assert_eq!(VERSIONS.map(|version| users.ask("answers", version, wrong, &[])), none, "{wrong}");
    }
    let good = VERSIONS.map(|version| users.good("answers", version, &[]));
    assert_eq!(good, ["200 502 400 101 501", "200 502 400 200 400 400 501 501"]);
    // A password is not shown to the site.
    let page = users.bed.curl(&["--user", &users.credentials], "/echo");
    assert!(page.contains("\"GET\"") && !page.contains("authorization"), "{page}");
    let page = users.bed.curl(&["--user", "site:own"], "/echo");
    assert!(page.contains("authorization"), "the site's own passwords are: {page}");
    // Changes are in effect at once, for what is open, too.
    let held = users.running(&["hold", "1", "web:80", "1"]);
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 1);
    assert!(users.bed.agent.ask(&["user", "set", "anna", "--disable"]).contains("anna"));
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    drop(held);
    assert_eq!(VERSIONS.map(|version| users.good("answers", version, &[])), none);
}

#[test]
fn a_user_may_stop_reading_for_as_long_as_it_likes() {
    let Some(users) = Users::new("users who pause", "") else { return };
    std::thread::scope(|scope| {
        let users = &users;
        let paused = VERSIONS.map(|version| {
            scope.spawn(move || users.good("paused", version, &[&users.bed.site_address.to_string()]))
        });
        for (paused, version) in paused.into_iter().zip(VERSIONS) {
            assert_eq!(paused.join().unwrap(), "True", "HTTP/{version}");
        }
    });
}

#[test]
fn a_visitor_that_reads_nothing_has_16_answers_where_there_are_users() {
    let Some(users) = Users::new("a visitor who reads nothing", "") else { return };
    assert_eq!(users.bed.visit("shy"), "16 84 16 200");
}

#[test]
fn datagrams_go_as_capsules_over_both_versions() {
    let Some(users) = Users::new("users' CONNECT-UDP", "") else { return };
    let port = users.udp.address.port().to_string();
    for (version, status) in [("1", "101"), ("2", "200")] {
        assert_eq!(users.good("udp", version, &["echo", "7", "100"]), format!("{status} 100"));
        assert_eq!(users.good("udp", version, &["127.0.0.1", &port, "3"]), format!("{status} 3"));
        assert_eq!(users.good("udp", version, &["web", "80", "3"]), "403 0");
        assert_eq!(users.good("udp", version, &["no%00name", "80", "3"]), "400 0");
        // Whatever else comes in capsules costs nothing, and is counted.
        assert_eq!(users.good("capsules", version, &["echo", "7"]), "first second");
    }
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    let user = users.figures();
    let count = |counts: &str, label: &str| user[counts][label].as_u64().unwrap_or(0);
    assert_eq!(count("datagrams", "to_target"), 2 * (100 + 3 + 2), "{user}");
    assert_eq!(count("datagrams", "to_user"), 2 * (100 + 3 + 2), "{user}");
    // Unknown kinds and those without a context; of another context; longer than UDP's.
    let dropped = serde_json::json!({ "unknown_capsule": 6, "unknown_context": 2, "too_large": 4 });
    assert_eq!(user["dropped_from_user"], dropped, "{user}");
    assert_eq!(count("datagrams", "from_user"), 2 * (100 + 3 + 2) + 12, "{user}");
    assert_eq!(user["refused"], serde_json::json!({ "service": 2, "target": 2 }));
}

#[test]
fn a_users_rate_is_that_of_all_its_sessions() {
    let Some(users) = Users::new("users' rate", "") else { return };
    let set = |rate: &str| users.bed.agent.ask(&["user", "set", "anna", "--rate", rate]);
    assert!(set("16Mbit").contains("anna"));
    let began = clock::now();
    std::thread::scope(|scope| {
        for version in VERSIONS {
            let url = format!("http://{}/zeros/2000000", users.bed.site_address);
            let users = &users;
            scope.spawn(move || assert_eq!(users.good("curl", version, &[&url]), "200 2000000"));
        }
    });
    let took = began.elapsed();
    // 4 MB at 2 MB/s, less what may be ahead.
    assert!(took >= Duration::from_millis(1_900), "{took:?}");
    // Datagrams beyond it are dropped in both directions, and counted.
    assert!(set("64kbit").contains("anna"));
    for version in VERSIONS {
        assert_eq!(users.good("burst", version, &["echo", "7", "200"]), "sent 200");
    }
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    let user = users.figures();
    let count = |counts: &str, label: &str| user[counts][label].as_u64().unwrap_or(0);
    assert_eq!(count("datagrams", "from_user"), 400, "{user}");
    assert!(count("dropped_from_user", "over_rate") >= 300, "{user}");
    let dropped: u64 =
        user["dropped_from_user"].as_object().unwrap().values().filter_map(|it| it.as_u64()).sum();
    assert_eq!(count("datagrams", "to_target") + dropped, 400, "{user}");
    assert!(set("none").contains("anna"));
    assert_eq!(users.good("udp", "2", &["echo", "7", "50"]), "200 50");
}

#[test]
fn users_have_places_of_their_own() {
    let Some(users) = Users::new("users' places", "") else { return };
    // More than one address may have as a visitor, and as many as a user may have.
    let held = users.running(&["hold", "1", "web:80", "256"]);
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 256);
    users.bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 256);
    assert_eq!(users.good("connect", "2", &["web:80", "1"]), "503 0");
    assert!(users.bed.curl(&[], "/echo").contains("\"GET\""), "a visitor from the same address");
    drop(held);
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    // Over HTTP/2 a user has as many streams as a browser opens.
    let held = users.running(&["hold", "2", "web:80", "100"]);
    users.bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 100);
    users.bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 1);
    drop(held);
    users.bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 0);
    assert_eq!(users.figures()["refused"], serde_json::json!({ "sessions": 1 }));
}

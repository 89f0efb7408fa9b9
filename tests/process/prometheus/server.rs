//! A real Prometheus with the example configuration and the rules scrapes two agents that carry traffic.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use culvert_tests::{
    client::Client,
    clock::{self, PATIENCE},
    http::Fetcher,
    needs::{self, Need},
    pair::{Pair, Plan},
    place::Place,
    ports,
    process::{Running, run, text},
    upstream::Echo,
};
use serde_json::Value;
use tempfile::TempDir;

use super::{
    expressions::{Selector, named},
    files::{ADDED_LABELS, PROMTOOL, expressions, prometheus_file, rules},
};

const SERVER: &[Need] = &[
    Need::Tool("setpriv", "util-linux"),
    Need::PrometheusParser,
    Need::Tool("prometheus", "prometheus"),
    PROMTOOL,
];

/// What two agents on loopback do not have: a TUN device, and several lines.
const NOT_HERE: [&str; 2] = ["culvert_tun_device", "culvert_line_suspect"];

/// A server, its configuration and its data.
struct Prometheus {
    address: SocketAddr,
    fetcher: Mutex<Fetcher>,
    _process: Running,
    _folder: TempDir,
}

impl Prometheus {
    /// Starts it with the example configuration, so changed that these agents are scraped every second.
    fn start(targets: &[SocketAddr]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = fs::read_to_string(prometheus_file("prometheus.example.yml")).unwrap();
        let rules = prometheus_file("culvert.rules.yml").display().to_string();
        let target = |target: &SocketAddr| format!("- {target}");
        let targets: Vec<String> = targets.iter().map(target).collect();
        for (from, to) in [
            ("scrape_interval: 15s", "scrape_interval: 1s"),
            ("evaluation_interval: 15s", "evaluation_interval: 1s"),
            ("scrape_timeout: 5s", "scrape_timeout: 1s"),
            ("- culvert.rules.yml", &format!("- {rules}")),
            ("- 127.0.0.1:9464", &targets.join("\n          ")),
        ] {
            assert!(config.contains(from), "the example has no {from:?}");
            config = config.replace(from, to);
        }
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, config).unwrap();
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Place::Host.command(needs::tool("prometheus").unwrap());
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let process = Running::start("prometheus", &mut command);
        let this = Self {
            address,
            fetcher: Mutex::new(Fetcher::new(&Place::Host)),
            _process: process,
            _folder: folder,
        };
        clock::until("Prometheus is ready", PATIENCE, || match this.page("/-/ready") {
            Ok(200) => Ok(()),
            answer => Err(format!("{answer:?}")),
        });
        this
    }

    fn page(&self, path: &str) -> Result<u64, String> {
        let mut fetcher = self.fetcher.lock().unwrap_or_else(PoisonError::into_inner);
        fetcher.get(self.address, path).map(|page| page.status)
    }

    /// What the API says at `path`.
    fn ask(&self, path: &str) -> Value {
        let page = self.fetcher.lock().unwrap().get(self.address, &format!("/api/v1/{path}")).unwrap();
        let answer: Value = serde_json::from_str(&page.body).unwrap();
        assert_eq!(answer["status"], "success", "{path}: {answer}");
        answer["data"].clone()
    }

    /// The series that an expression gives now.
    fn query(&self, expression: &str) -> Vec<Value> {
        let data = self.ask(&format!("query?query={}", encoded(expression)));
        data["result"].as_array().unwrap().clone()
    }

    /// Alerts by name, instance and state.
    fn alerts(&self) -> BTreeSet<(String, String, String)> {
        let data = self.ask("alerts");
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let alert = |alert: &Value| {
            let labels = &alert["labels"];
            (word(&labels["alertname"]), word(&labels["instance"]), word(&alert["state"]))
        };
        data["alerts"].as_array().unwrap().iter().map(alert).collect()
    }
}

/// Percent-encoded, as a URL's query wants it.
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |out, byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => out + char::from(byte).encode_utf8(&mut [0; 4]),
        _ => out + &format!("%{byte:02X}"),
    })
}

/// All that the rules and the dashboard ask for, each name with each value of a label that it is compared with.
fn asked_for() -> BTreeMap<String, BTreeSet<(String, String)>> {
    let mut asked: BTreeMap<String, BTreeSet<(String, String)>> = BTreeMap::new();
    for expression in expressions() {
        for Selector { name, matchers } in named(&expression).selectors {
            let values = asked.entry(name).or_default();
            for matcher in matchers.into_iter().filter(|matcher| {
                matcher.operator.starts_with('=')
                    && !matcher.value.contains(".*")
                    && !ADDED_LABELS.contains(&matcher.label.as_str())
            }) {
                values
                    .extend(matcher.value.split('|').map(|value| (matcher.label.clone(), value.to_owned())));
            }
        }
    }
    asked
}

#[test]
fn prometheus_finds_what_the_dashboard_and_the_alerts_ask_for() {
    if !needs::met("Prometheus", SERVER) {
        return;
    }
    let echo = Echo::new();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let mut pair =
        Plan::default().service("echo", echo.address, "repair = \"auto\"").forward("echo", ingress).start();
    let targets = [pair.entry.metrics(), pair.exit.metrics()];
    let prometheus = Prometheus::start(&targets);
    let mut client = Client::new(0, ingress);
    // A TCP forward beside the flow: its service has series of its own.
    client.converse(1);
    let _forward = TcpStream::connect(ingress).unwrap();

    clock::until("all that is asked for is there", PATIENCE, || {
        client.converse(20);
        let mut missing = Vec::new();
        for (name, values) in asked_for() {
            let all = prometheus.query(&name);
            if all.is_empty() && !NOT_HERE.contains(&name.as_str()) {
                missing.push(name.clone());
            }
            let has = |(label, value): &(String, String)| {
                all.iter().any(|series| series["metric"][label.as_str()] == value.as_str())
            };
            missing.extend(values.iter().filter(|pair| !has(pair)).map(|pair| format!("{name}{pair:?}")));
        }
        if missing.is_empty() { Ok(()) } else { Err(format!("{missing:?}")) }
    });
    assert_exposition(&pair);
    assert_rules_work(&prometheus);
    // A scrape that came too late has no samples; the next one has.
    clock::until("each agent has hundreds of samples", PATIENCE, || {
        let scraped = prometheus.query("scrape_samples_scraped");
        let samples = |series: &Value| series["value"][1].as_str().unwrap().parse::<f64>().unwrap();
        let fits = scraped.iter().all(|series| (300.0..1000.0).contains(&samples(series)));
        if fits && scraped.len() == targets.len() { Ok(()) } else { Err(format!("{scraped:?}")) }
    });
    // Nothing is wrong, so nothing is said, once rates are of more than two samples: a worker may seem to stand still in these.
    clock::until("no alert fires or is pending", PATIENCE, || {
        let alerts = prometheus.alerts();
        assert!(alerts.iter().all(|(_, _, state)| state == "pending"), "{alerts:?}");
        if alerts.is_empty() { Ok(()) } else { Err(format!("{alerts:?}")) }
    });

    // The exit goes away: it cannot be scraped, and the entry has no connection.
    assert_eq!(pair.exit.terminate().code(), Some(0));
    let [entry, exit] = targets.map(|target| target.to_string());
    let expected: BTreeSet<_> = [("CulvertDown", &exit), ("CulvertPeerNotConnected", &entry)]
        .map(|(name, instance)| (name.to_owned(), instance.clone(), "pending".to_owned()))
        .into();
    clock::until("both alerts are pending", PATIENCE, || {
        let alerts = prometheus.alerts();
        assert!(alerts.iter().all(|(_, _, state)| state == "pending"), "{alerts:?}");
        if alerts.is_superset(&expected) { Ok(()) } else { Err(format!("{alerts:?}")) }
    });
}

/// promtool finds nothing to say of what either agent shows.
fn assert_exposition(pair: &Pair) {
    for (_, agent) in pair.ends() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("metrics");
        fs::write(&file, agent.get("/metrics").unwrap().body).unwrap();
        let promtool = needs::tool("promtool").unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "\"$1\" check metrics <\"$2\"", "sh"]).arg(promtool).arg(&file);
        let output = run(&mut command, Duration::from_secs(20));
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.success() && said.trim().is_empty(), "promtool check metrics: {said}");
    }
}

/// Every rule of the file is evaluated without an error.
fn assert_rules_work(prometheus: &Prometheus) {
    clock::until("every rule has been evaluated", PATIENCE, || {
        let data = prometheus.ask("rules");
        let groups = data["groups"].as_array().unwrap();
        let found: Vec<&Value> = groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).collect();
        assert_eq!(found.len(), rules().len());
        let not_ok: Vec<_> = found.into_iter().filter(|rule| rule["health"] != "ok").collect();
        assert!(not_ok.iter().all(|rule| rule["health"] == "unknown"), "{not_ok:?}");
        if not_ok.is_empty() { Ok(()) } else { Err(format!("{} are to come", not_ok.len())) }
    });
}

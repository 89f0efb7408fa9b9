//! Users of CONNECT-IP, by a client of HTTP/3 that is not ours: their packets pass a's tunnel device to the host behind it and back.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{ChildStdout, Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    place::Place,
    probe,
    process::{Running, run, text},
    sites::{Family, PORT, Plan, Sites},
    venv,
};
use serde_json::Value;

use super::possible;

const NAME: &str = "gw.example.net";

/// The client's own limits are shorter.
const CLIENT_LIMIT: Duration = Duration::from_secs(120);

/// Sites of which a has users with inner addresses.
struct Users {
    sites: Sites,
    python: &'static Path,
    folder: tempfile::TempDir,
}

impl Users {
    fn new(python: &'static Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [chain, key] = certificate(folder.path());
        let mut sites = Plan::two().prepare();
        let outer = sites.a().outer_address(Family::V4);
        sites.a().append(&format!(
            "\n[http]\ncertificate_file = \"{}\"\nkey_file = \"{}\"\nnames = [\"{NAME}\"]\n\
             pool = [\"10.8.1.0/24\", \"fd08:1::/64\"]\nlisten = [\"{outer}:{PORT}\"]\n\
             [[service]]\nname = \"lan\"\nupstream = \"any\"\nallow = [\"10.9.0.0/16\", \"fd09::/32\"]\n\
             [records]\nfile = \"records.json\"\n",
            chain.display(),
            key.display()
        ));
        sites.start();
        Self { sites, python, folder }
    }

    fn command(&self, verb: &str, credentials: &str, path: &str) -> Command {
        let gateway = self.sites.a().outer_address(Family::V4).to_string();
        let ca = self.folder.path().join("chain.pem");
        let mut command = self.place().command(self.python);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/namespace/tunnel/packets_client.py"));
        command.args([verb, &gateway, &PORT.to_string(), ca.to_str().unwrap(), NAME, credentials]);
        command.arg(format!("/.well-known/masque/ip/{path}"));
        command
    }

    /// The client over TCP, with this version of HTTP.
    fn over_tcp(&self, version: &str, verb: &str, credentials: &str, path: &str) -> Command {
        let gateway = self.sites.a().outer_address(Family::V4).to_string();
        let mut command = self.place().command(self.python);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/namespace/tunnel/packets_tcp_client.py"));
        command.args([version, verb, &gateway, &PORT.to_string(), credentials]);
        command.arg(format!("/.well-known/masque/ip/{path}")).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// Runs it to its end; what it says.
    #[track_caller]
    fn tcp(&self, version: &str, verb: &str, credentials: &str, path: &str, more: &[String]) -> String {
        let output = run(self.over_tcp(version, verb, credentials, path).args(more), CLIENT_LIMIT);
        assert!(output.status.success(), "{verb} {path} over HTTP/{version}: {}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    }

    /// Where the client is: at the router before a.
    fn place(&self) -> Place {
        self.sites.west()
    }

    /// Runs the client, which must succeed; what it says.
    #[track_caller]
    fn client(&self, verb: &str, credentials: &str, path: &str, more: &[String]) -> String {
        let output = run(self.command(verb, credentials, path).args(more), CLIENT_LIMIT);
        assert!(output.status.success(), "{verb} {path}: {}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    }

    /// Starts a client that holds a session.
    fn device(&self, credentials: &str) -> Device {
        Device::start(self.command("hold", credentials, "*/*/"))
    }

    fn add(&self, name: &str, more: &[&str]) -> String {
        let said = self.sites.a().agent.ask(&[&["user", "add", name, "--json"], more].concat());
        let said: Value = serde_json::from_str(&said).unwrap();
        format!("{name}:{}", said["password"].as_str().unwrap())
    }

    /// The user's part of the status.
    fn figures(&self) -> Value {
        let status = self.sites.a().agent.ask(&["status", "--json"]);
        serde_json::from_str::<Value>(&status).unwrap()["status"]["users"][0].clone()
    }

    /// Checks that each packet of the only user has its count.
    #[track_caller]
    fn check_accounts(&self) {
        self.sites.a().agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
        let user = self.figures();
        let datagrams = |place: &str| user["datagrams"][place].as_u64().unwrap_or(0);
        let dropped = |counts: &str| -> u64 {
            user[counts].as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum()
        };
        assert_eq!(datagrams("from_user"), datagrams("to_target") + dropped("dropped_from_user"), "{user}");
        assert_eq!(datagrams("from_target"), datagrams("to_user") + dropped("dropped_to_user"), "{user}");
        // What QUIC has given up was counted before.
        let unsent = user["dropped_to_user"]["unsent"].as_u64().unwrap_or(0);
        let counted = [datagrams("to_target"), datagrams("to_user") + unsent];
        clock::until("the records of the user's sessions", PATIENCE, || {
            let file = self.sites.a().agent.folder().join("records.json");
            let text = fs::read_to_string(file).unwrap();
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let of_user: Vec<_> = lines.filter(|line| line["kind"] == "connect_ip").collect();
            let sum = |member: &str| of_user.iter().filter_map(|line| line[member].as_u64()).sum::<u64>();
            let found = [sum("downlink_packets"), sum("uplink_packets")];
            // A request that was refused took a place, and has opened nothing.
            assert!(user["sessions_total"].as_u64() >= u64::try_from(of_user.len()).ok(), "{of_user:?}");
            if found == counted { Ok(()) } else { Err(format!("{found:?} of {counted:?}: {of_user:?}")) }
        });
    }
}

struct Device {
    process: Running,
    said: BufReader<ChildStdout>,
}

impl Device {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Running::start("a device", &mut command);
        let said = BufReader::new(process.child().stdout.take().unwrap());
        Self { process, said }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

/// A certificate for [`NAME`] and its key, as files; a client trusts it as it is.
fn certificate(folder: &Path) -> [PathBuf; 2] {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec![NAME.to_owned()]).unwrap();
    let pem = |label: &str, der: &[u8]| {
        format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", data_encoding::BASE64.encode(der))
    };
    let paths = ["chain.pem", "key.pem"].map(|file| folder.join(file));
    fs::write(&paths[0], pem("CERTIFICATE", params.self_signed(&key).unwrap().der())).unwrap();
    fs::write(&paths[1], pem("PRIVATE KEY", &key.serialize_der())).unwrap();
    paths
}

const NETWORKS: [&str; 4] = ["--network", "10.9.1.0/24", "--network", "fd09:0:0:1::/64"];

#[test]
fn packets_of_a_user_pass_as_far_as_the_user_may() {
    if !possible("packets of users") {
        return;
    }
    let Some(python) = venv::python("packets of users") else { return };
    let users = Users::new(python);
    let a = users.sites.a();
    let hosts = Family::BOTH.map(|family| a.host_address(family).to_string());
    let anna = users.add("anna", &NETWORKS);

    // Both families; the gateway's own addresses are not among the routes, and neither is what anna may not reach.
    let said = users.client("ping", &anna, "*/*/", &hosts);
    let [status, addresses, routes, answers] = said.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{said}")
    };
    assert_eq!((status, addresses, answers), ("200", "10.8.1.1/32,fd08:1::1/128", "6"));
    assert!(routes.contains("10.9.1.2-10.9.1.254/0,") && !routes.contains("10.9.2."), "{routes}");
    users.check_accounts();
    assert_eq!(users.figures()["datagrams"]["to_user"], 6);

    // What a session is for.
    let pinged = users.client("ping", &anna, "10.9.1.2/6/", &hosts[..1]);
    assert_eq!(pinged, "200 10.8.1.2/32 10.9.1.2-10.9.1.2/6 3", "ICMP passes whatever the protocol");
    for (path, answer) in [
        ("10.9.2.2/*/", "403  culvert; error=http_request_denied 0"),
        ("10.9.1.1/*/", "403  culvert; error=destination_ip_prohibited 0"),
        ("nobody.invalid/*/", "502  culvert; error=dns_error 0"),
        ("10.9.1.2/256/", "400  culvert; error=http_request_error 0"),
    ] {
        assert_eq!(users.client("ping", &anna, path, &[]), answer, "{path}");
    }

    // Hostile sessions end one by one; what is dropped is counted, and a good one goes on.
    let said = users.client("hostile", &anna, "*/*/", &hosts[..1]);
    assert_eq!(said, "None None None None None None 3");
    users.check_accounts();
    let user = users.figures();
    let dropped = &user["dropped_from_user"];
    assert!(dropped["source"].as_u64() >= Some(2), "{user}");
    assert_eq!((&dropped["malformed"], &dropped["destination"]), (&3.into(), &5.into()), "{user}");
    assert_eq!(dropped["unknown_context"], 1, "{user}");
    assert_eq!(user["refused"]["capsules"], 6, "{user}");
    users.sites.wait_for_connection();
}

#[test]
fn a_device_has_its_address_and_what_is_too_large_for_it_is_answered() {
    if !possible("a device") {
        return;
    }
    let Some(python) = venv::python("a device") else { return };
    let users = Users::new(python);
    let a = users.sites.a();
    let fixed = ["--address", "10.8.1.7", "--address", "fd08:1::7"];
    let anna = users.add("anna", &[&NETWORKS[..], &fixed].concat());
    let mut first = users.device(&anna);
    assert_eq!(first.line(), "200 10.8.1.7/32 fd08:1::7/128");
    // Packets of 1,432 bytes, which the device takes.
    for (address, large) in [("10.8.1.7", "1404"), ("fd08:1::7", "1384")] {
        let address = address.parse().unwrap();
        probe::reaches(&a.host, address, &["-i", "0.7"]);
        // The session carries 1,280 bytes at least, and less than the network before it.
        let said = probe::ping(&a.host, address, &["-c", "2", "-W", "1", "-M", "do", "-s", large]).text;
        let told = said.split_once("mtu").map(|(_, rest)| rest.trim_start_matches([' ', '=']));
        let digits = told.map(|told| told.chars().take_while(char::is_ascii_digit).collect::<String>());
        let mtu: u16 = digits.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("{said}"));
        assert!((1_280..1_432).contains(&mtu), "{mtu}: {said}");
        probe::reaches(&a.host, address, &["-s", "1200"]);
    }
    // A newer device takes the address, and the older one goes on with others.
    let mut second = users.device(&anna);
    assert_eq!(second.line(), "200 10.8.1.7/32 fd08:1::7/128");
    assert_eq!(first.line(), "now 10.8.1.1/32 fd08:1::1/128");
    probe::reaches(&a.host, "10.8.1.1".parse().unwrap(), &[]);
    probe::reaches(&a.host, "10.8.1.7".parse().unwrap(), &[]);
    // Who may not reach the host is not reached by it.
    assert!(a.agent.ask(&["user", "set", "anna", "--network", "-10.9.1.0/24"]).contains("anna"));
    let ping = probe::ping(&a.host, "10.8.1.7".parse().unwrap(), &["-c", "2", "-W", "1"]);
    assert_eq!(ping.received, 0, "{}", ping.text);
    assert!(users.figures()["dropped_to_user"]["source"].as_u64() >= Some(2));
    drop(second);
    // What may not go on ends at once, and nobody has its addresses then.
    assert!(a.agent.ask(&["user", "set", "anna", "--disable"]).contains("anna"));
    assert_eq!(first.line(), "end 0x10f", "H3_CONNECT_ERROR: it did not end by itself");
    assert!(first.process.wait(PATIENCE).success());
    users.check_accounts();
}

#[test]
fn a_path_below_1280_bytes_ends_the_session() {
    if !possible("a small path") {
        return;
    }
    let Some(python) = venv::python("a small path") else { return };
    let users = Users::new(python);
    let a = users.sites.a();
    a.gateway.tell(&["ip", "link", "set", "wan", "mtu", "1300"]);
    let anna = users.add("anna", &NETWORKS);
    let mut device = users.device(&anna);
    assert_eq!(device.line(), "200 10.8.1.1/32 fd08:1::1/128");
    assert_eq!(device.line(), "end None");
    assert_eq!(users.figures()["refused"]["path_too_small"], 1);
    users.check_accounts();
}

#[test]
fn packets_of_users_come_over_tcp_too() {
    if !possible("packets over TCP") {
        return;
    }
    let Some(python) = venv::python("packets over TCP") else { return };
    let users = Users::new(python);
    let a = users.sites.a();
    let hosts = Family::BOTH.map(|family| a.host_address(family).to_string());
    let anna = users.add("anna", &NETWORKS);
    for (version, status) in [("1", "101"), ("2", "200")] {
        // Packets of 1,328 and 1,348 bytes.
        let said = users.tcp(version, "ping", &anna, "*/*/", &hosts);
        let [said, addresses, routes, answers] = said.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{said}")
        };
        assert_eq!((said, answers), (status, "6"));
        assert!(addresses.starts_with("10.8.1.") && addresses.contains(",fd08:1::"), "{addresses}");
        assert!(routes.contains("10.9.1.2-10.9.1.254/0,") && !routes.contains("10.9.2."), "{routes}");
        for (path, refused) in
            [("10.9.2.2/*/", "403"), ("nobody.invalid/*/", "502"), ("10.9.1.2/256/", "400")]
        {
            let said = users.tcp(version, "ping", &anna, path, &[]);
            assert_eq!(said.split(' ').next(), Some(refused), "{path}: {said}");
        }
        // Over HTTP/1.1 the end of a session may overtake what its client still sends.
        let said = users.tcp(version, "hostile", &anna, "*/*/", &hosts[..1]);
        let said: Vec<_> = said.split(' ').collect();
        assert!(said[..4].iter().all(|end| *end == "ended" || version == "1" && *end == "reset"), "{said:?}");
        assert_eq!((said.len(), said[4]), (5, "3"));
        users.check_accounts();
    }
    let user = users.figures();
    assert_eq!(user["refused"]["capsules"], 8, "{user}");
    let dropped = serde_json::json!({ "source": 2, "destination": 8, "malformed": 2, "unknown_capsule": 2 });
    assert_eq!(user["dropped_from_user"], dropped, "{user}");
    assert_eq!(user["datagrams"]["to_user"], 2 * (6 + 3 + 3), "{user}");

    // What comes from the network for a device, and the end of what may not go on.
    let [mut first, mut second] =
        ["1", "2"].map(|version| Device::start(users.over_tcp(version, "hold", &anna, "*/*/")));
    for device in [&mut first, &mut second] {
        let line = device.line();
        for address in line.split(' ').skip(1) {
            let address = address.split('/').next().unwrap().parse().unwrap();
            probe::reaches(&a.host, address, &["-s", "1300"]);
        }
    }
    // Neither do those hold anything up who take no answers.
    let mut deaf = ["1", "2"].map(|version| {
        let mut command = users.over_tcp(version, "deaf", &anna, "*/*/");
        command.arg(&hosts[0]);
        Device::start(command)
    });
    for device in &mut deaf {
        assert_eq!(device.line(), "sent");
    }
    assert!(users.figures()["dropped_to_user"]["queue_full"].as_u64() >= Some(1_000));
    assert!(a.agent.ask(&["user", "set", "anna", "--disable"]).contains("anna"));
    for mut device in [first, second] {
        // The connection of HTTP/1.1, and a stream of HTTP/2 with CANCEL.
        let line = device.line();
        assert!(["reset", "reset 8"].contains(&&*line), "{line}");
        assert!(device.process.wait(PATIENCE).success());
    }
    users.check_accounts();
    assert_eq!(users.figures()["addresses"], serde_json::json!([]));
}

//! A stop, and a restart, while somebody does not answer.

use std::{fs, net::UdpSocket, path::PathBuf, thread, time::Duration};

use culvert_tests::{
    clock,
    place::Place,
    probe,
    sites::{Family, Plan, Sites},
};

use super::possible;

/// The promise is 0.5 s; what the machine does beside it may take the rest.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// A gateway's resolver asks three name servers, none of which answers; dropping it gives the host's back.
struct SilentNameServers {
    folder: PathBuf,
    _socket: UdpSocket,
}

impl SilentNameServers {
    fn new(gateway: &Place) -> Self {
        let Place::Namespace(name) = gateway else { panic!("a gateway has a namespace") };
        // `ip netns exec` puts the files of this folder over those in /etc.
        let folder = PathBuf::from(format!("/etc/netns/{name}"));
        fs::create_dir_all(&folder).unwrap();
        let servers = ["127.0.0.1", "127.0.0.2", "127.0.0.3"].map(|server| format!("nameserver {server}\n"));
        fs::write(folder.join("resolv.conf"), servers.concat()).unwrap();
        let socket = gateway.enter(|| UdpSocket::bind("0.0.0.0:53").unwrap());
        Self { folder, _socket: socket }
    }
}

impl Drop for SilentNameServers {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.folder));
    }
}

/// Two sites; gateway b also dials peers whose names nobody resolves.
fn sites() -> (Sites, SilentNameServers) {
    let sites = Plan::two().prepare();
    let servers = SilentNameServers::new(&sites.b().gateway);
    for (index, key) in
        ["AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE", "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0"]
            .iter()
            .enumerate()
    {
        sites.b().append(&format!(
            "\n[[peer]]\nname = \"gone{index}\"\npublic_key = \"{key}\"\nendpoints = [\"gone{index}.test:4433\"]\n"
        ));
    }
    (sites, servers)
}

#[test]
fn a_stop_does_not_wait_for_name_servers() {
    if !possible("a stop beside look-ups that hang") {
        return;
    }
    let (mut sites, _servers) = sites();
    let before = sites.b().routing();
    sites.all_mut()[0].agent.start();
    for after in [0, 1_000, 3_000, 9_000].map(Duration::from_millis) {
        let b = &mut sites.all_mut()[1];
        b.agent.start();
        thread::sleep(after);
        let log = b.agent.log();
        assert!(!log.contains("cannot resolve"), "the look-ups hang: {log}");
        let begun = clock::now();
        assert_eq!(b.agent.terminate().code(), Some(0));
        let took = clock::now() - begun;
        println!("SIGTERM {after:?} after the start: {took:?}");
        assert!(took < STOP_WITHIN, "{took:?}");
        assert!(!b.has_device());
        assert_eq!(b.routing(), before);
    }
}

#[test]
fn a_restart_beside_look_ups_that_hang_is_a_short_gap() {
    if !possible("a restart beside look-ups that hang") {
        return;
    }
    let (mut sites, _servers) = sites();
    sites.start();
    let (from, to) = (sites.a().host.clone(), sites.b().host_address(Family::V4));
    probe::reaches(&from, to, &[]);
    let pings = thread::spawn(move || probe::ping(&from, to, &["-c", "100", "-D"]));
    thread::sleep(Duration::from_secs(1));
    let b = &mut sites.all_mut()[1];
    assert_eq!(b.agent.terminate().code(), Some(0));
    b.agent.start();
    let text = pings.join().unwrap().text;
    let stamps = text.lines().filter(|line| line.contains("icmp_seq"));
    let times: Vec<f64> =
        stamps.filter_map(|line| line.strip_prefix('[')?.split_once(']')?.0.parse().ok()).collect();
    let gap = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    println!("the longest time without an answer: {gap:.2} s");
    assert!(times.len() > 50 && gap < 3.0, "{gap} s: {text}");
}

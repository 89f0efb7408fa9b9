//! A peer that is changed, and moved from one file to the other, under traffic: nothing is lost, and its session goes on.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr},
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    client::Client,
    ports, probe,
    sites::{Family, Plan},
    upstream::Echo,
};

use super::possible;

/// Pings in one run, every 10 ms: longer than all the changes take.
const PINGS: &str = "600";

/// Datagrams of a flow beside it, as often.
const DATAGRAMS: usize = 600;

/// Sends datagrams every 10 ms; returns the numbers of those that did not come back.
fn unanswered(client: &mut Client) -> Vec<u32> {
    client.reach();
    let first = client.newest().map_or(0, |newest| newest + 1);
    let mut back = BTreeSet::new();
    for _ in 0..DATAGRAMS {
        client.send();
        back.extend(client.receive_numbers(Duration::from_millis(10)));
        thread::sleep(Duration::from_millis(2));
    }
    back.extend(client.receive_numbers(Duration::from_secs(2)));
    let newest = client.newest().unwrap();
    (first..=newest).filter(|number| !back.contains(number)).collect()
}

fn handshakes(agent: &Agent) -> u64 {
    agent.samples().count("culvert_handshakes_total", &[("outcome", "established")])
}

#[test]
fn a_prefix_a_service_a_rate_and_a_move_between_files_lose_nothing_and_no_session() {
    if !possible("changes of a peer under traffic") {
        return;
    }
    let mut sites = Plan::two().prepare();
    let echo = sites.a().gateway.enter(|| Echo::on(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    let service = |name| format!("[[service]]\nname = \"{name}\"\nupstream = \"{}\"\n", echo.address);
    let services = [service("echo"), service("other")].concat();
    sites.a().edit("[[peer]]\n", &format!("{services}[[peer]]\nservices = [\"echo\"]\n"));
    let ingress = (Ipv4Addr::LOCALHOST, ports::free()).into();
    sites.b().append(&format!("[[udp]]\nlisten = \"{ingress}\"\npeer = \"a\"\nservice = \"echo\"\n"));
    sites.start();
    let (a, b) = (sites.a(), sites.b());
    let far = b.host.enter(|| Echo::on(b.host_address(Family::V4)));
    let mut through = a.host.enter(|| Client::new(1, far.address));
    let mut of_service = b.gateway.enter(|| Client::new(2, ingress));
    probe::reaches(&a.host, b.host_address(Family::V4), &[]);
    let before = handshakes(&a.agent);
    let table = a.agent.ask(&["peer", "export", "b"]);
    let config = fs::read_to_string(a.agent.config()).unwrap();
    let (head, _) = config.split_once("[[peer]]").unwrap();
    let state = a.agent.folder().join("state/peers.toml");
    let (ping, lost) = thread::scope(|scope| {
        let flows = [&mut through, &mut of_service].map(|client| scope.spawn(|| unanswered(client)));
        let pings =
            scope.spawn(|| probe::ping(&a.host, b.host_address(Family::V4), &["-c", PINGS, "-i", "0.01"]));
        // Both flows are under way.
        thread::sleep(Duration::from_secs(1));
        fs::write(&state, format!("{table}\n")).unwrap();
        fs::write(a.agent.config(), head).unwrap();
        let moved = a.agent.ask(&["reload"]);
        assert!(moved.contains("file: the configuration -> the state file"), "{moved}");
        for change in [
            &["--allowed-ip", "+10.77.0.0/16"][..],
            &["--rate", "50Mbit"],
            &["--service", "+other"],
            &["--service", "-other"],
            &["--allowed-ip", "-10.77.0.0/16", "--rate", "80Mbit"],
            &["--unset", "rate"],
        ] {
            let said = a.agent.ask(&[&["peer", "set", "b"], change].concat());
            assert!(
                said.starts_with("In effect now:") && said.ends_with("note: the session goes on"),
                "{said}"
            );
        }
        let said = a.agent.ask(&["peer", "set", "b", "--allowed-ip", "+10.78.0.0/16"]);
        assert!(said.contains("10.78.0.0/16"), "{said}");
        fs::write(a.agent.config(), &config).unwrap();
        let moved = a.agent.ask(&["reload"]);
        assert!(moved.contains("file: the state file -> the configuration"), "{moved}");
        (pings.join().unwrap(), flows.map(|flow| flow.join().unwrap()))
    });
    assert_eq!(lost, [[0_u32; 0]; 2], "datagrams through the tunnel, and those of a service");
    assert_eq!(ping.received, ping.sent, "{}", ping.text);
    assert!(!ping.text.contains("DUP!"), "{}", ping.text);
    assert_eq!(handshakes(&a.agent), before, "one session through all of it");
    assert!(!fs::read_to_string(&state).unwrap().contains("[[peer]]"));
}

//! Ports that change between real kernels: the entry's by fresh sockets, the exit's by one line of nft that redirects a range.
//!
//! The agents say how often they changed ports; `ss` says which ports the kernel has, and the exit's table of connections which it saw.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    needs::{self, Need},
    place::{Cable, Place},
    process::{run, text},
};

/// What is redirected to [`LISTEN`], in the words of an endpoint and of nft.
const RANGE: &str = "20000-20100";

const LISTEN: u16 = 4433;

const PINGS: u64 = 300;

/// A ping each tenth of a second, and what a loaded machine takes.
const MOST: Duration = Duration::from_secs(120);

/// The ports of the entry's sockets to the exit, and the exit's ports that they are connected to.
fn in_use(entry: &Place, exit: &str) -> Vec<(u16, u16)> {
    let port = |address: &str| address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let table = entry.tell(&["ss", "-uanH"]);
    let pairs = table.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(3);
        let (local, remote) = (words.next()?, words.next()?);
        remote.contains(exit).then(|| Some((port(local)?, port(remote)?)))?
    });
    pairs.collect()
}

/// Pings through the tunnel while both ends' ports change, over one family.
fn ports_change(outer: &str, is_ipv6: bool) {
    let cable = Cable::new();
    let [exit_place, entry_place] = cable.places();
    let bracketed = if is_ipv6 { format!("[{outer}]") } else { outer.to_owned() };
    for rule in [
        "add table inet culvert_ports".to_owned(),
        "add chain inet culvert_ports arriving { type nat hook prerouting priority dstnat; }".to_owned(),
        format!("add rule inet culvert_ports arriving udp dport {RANGE} redirect to :{LISTEN}"),
    ] {
        exit_place.tell(&["nft", &rule]);
    }
    exit_place.tell(&["ip", "addr", "add", "10.9.1.1/32", "dev", "lo"]);
    let (mut entry, mut exit) = (Agent::new("entry", &entry_place), Agent::new("exit", &exit_place));
    exit.configure(&format!(
        "transport.listen = [\"{bracketed}:{LISTEN}\"]\n[[peer]]\nname = \"entry\"\npublic_key = \"{}\"\n\
         allowed_ips = [\"10.9.0.2/32\"]\n[tun]\naddress = [\"10.9.0.1/24\"]\n",
        entry.key()
    ));
    entry.configure(&format!(
        "transport.hop = \"5s\"\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{bracketed}:{RANGE}\"]\n\
         lanes = 2\nallowed_ips = [\"10.9.0.1/32\", \"10.9.1.0/24\"]\n[tun]\naddress = [\"10.9.0.2/24\"]\n",
        exit.key()
    ));
    exit.start();
    entry.unprivileged();
    entry.start();
    for agent in [&entry, &exit] {
        agent.wait_for_count("culvert_peer_lanes", &[], 2);
    }
    let ended = Arc::new(AtomicBool::new(false));
    let looks = {
        let (ended, place, outer) = (Arc::clone(&ended), entry_place.clone(), outer.to_owned());
        thread::spawn(move || {
            let mut seen = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                seen.extend(in_use(&place, &outer));
                thread::sleep(Duration::from_millis(250));
            }
            seen
        })
    };
    let mut ping = entry_place.command("ping");
    ping.args(["-q", "-i", "0.1", "-c", &PINGS.to_string(), "-W", "2", "10.9.1.1"]);
    let said = text(&run(&mut ping, MOST).stdout);
    ended.store(true, Ordering::Relaxed);
    let seen = looks.join().unwrap();
    let [local, remote]: [BTreeSet<u16>; 2] =
        [seen.iter().map(|it| it.0).collect(), seen.iter().map(|it| it.1).collect()];
    assert!(said.contains(&format!("{PINGS} received")), "{said}");
    // Two lanes and the control connection, six times in thirty seconds.
    assert!(local.len() >= 12, "{local:?}");
    assert!(remote.len() >= 8, "{remote:?}");
    assert!(remote.iter().all(|port| (20_000..=20_100).contains(port)), "{remote:?}");
    entry.wait_for("changes of ports", |samples| {
        let [lanes, connections] =
            ["lane", "connection"].map(|what| samples.count("culvert_port_hops_total", &[("what", what)]));
        (lanes >= 8 && connections >= 4)
            .then_some(())
            .ok_or_else(|| format!("{lanes} lanes, {connections} connections"))
    });
    // At the far end: no 4-tuple is older than the period, and what a validation takes.
    let status = oldest_port(&exit);
    assert!(status <= 8.0, "the exit knows a 4-tuple of {status} s");
    for agent in [&mut entry, &mut exit] {
        assert!(agent.terminate().success());
    }
}

/// The age of the oldest 4-tuple of the only peer of an agent, in seconds.
fn oldest_port(agent: &Agent) -> f64 {
    let status: serde_json::Value = serde_json::from_str(&agent.ask(&["status", "--json"])).unwrap();
    status["status"]["peers"][0]["ports_age_seconds"].as_f64().unwrap()
}

#[test]
fn pings_go_on_while_the_ports_of_both_ends_change() {
    let test = "ports that change";
    let tools = [
        Need::Tun,
        Need::Tool("ping", "iputils-ping"),
        Need::Tool("nft", "nftables"),
        Need::Tool("ss", "iproute2"),
    ];
    if !needs::met(test, needs::NETNS) || !needs::met(test, &tools) {
        return;
    }
    ports_change("192.0.2.1", false);
    ports_change("2001:db8::1", true);
}

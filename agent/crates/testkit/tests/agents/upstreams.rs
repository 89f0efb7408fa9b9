//! Where services are: names that are followed, names that lead back, lists, names with thousands of addresses.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use net::{TcpListener, TcpStream};

use crate::{EXIT, INGRESS, Pair, SERVICE, UPSTREAM, flood::Log, numbered};

const SECOND: Duration = Duration::from_secs(1);

/// A further address of the host of services.
const SERVICE_2: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(198, 51, 100, 10));

/// A pair whose service is at `upstream`, as TOML has it, and named `db.example`, which has these addresses.
fn pair_with(seed: u64, upstream: &str, addresses: &[IpAddr]) -> Pair {
    let mut pair = Pair::new(seed, "", "");
    pair.world.fabric.add_name("db.example", addresses);
    pair.world.fabric.set_addresses(SERVICE, &[SERVICE, SERVICE_2]);
    let toml = pair.exit_toml.replace(&format!("\"{UPSTREAM}\""), upstream);
    assert_ne!(toml, pair.exit_toml);
    pair.world.reload(pair.exit, &toml).unwrap();
    pair.exit_toml = toml;
    pair.wait_for_lanes(1);
    pair
}

fn count(pair: &mut Pair, series: &str) -> u64 {
    pair.world.metric(pair.exit, series)
}

/// A connection through the pair, and whether a listener of a service gets it within a second.
fn reaches(pair: &mut Pair, listener: &mut dyn TcpListener) -> bool {
    let mut client = pair.clients.tcp(INGRESS);
    pair.world.run(SECOND);
    let token = pair.services.token();
    let Ok((mut server, _)) = listener.accept(token) else { return false };
    server.write(b"here").unwrap();
    pair.world.run(SECOND);
    let mut buffer = [0; 8];
    client.read(&mut buffer).is_ok_and(|len| &buffer[..len] == b"here")
}

fn is_reset(client: &mut dyn TcpStream) -> bool {
    client.read(&mut [0; 8]).is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn a_name_is_followed_by_flows_and_forwards_and_keeps_its_address_while_it_is_not_found() {
    let mut pair = pair_with(9100, "\"db.example:7\"", &[SERVICE]);
    let second = SocketAddr::new(SERVICE_2, 7);
    let mut listeners = [UPSTREAM, second].map(|address| pair.services.tcp_listen(address));
    let mut moved = pair.services.udp(second, None);
    let mut client = pair.client(1000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1);
    assert!(reaches(&mut pair, &mut *listeners[0]));
    let info = |address: SocketAddr| {
        format!("culvert_upstream_info{{address=\"{address}\",service=\"echo\",upstream=\"db.example:7\"}}")
    };
    assert_eq!(count(&mut pair, &info(UPSTREAM)), 1);
    // The same addresses in another order, and one more: nothing moves.
    pair.world.fabric.add_name("db.example", &[SERVICE_2, SERVICE]);
    pair.run_served(Duration::from_secs(35));
    client.send(INGRESS, &numbered(1));
    pair.run_served(Duration::from_millis(50));
    assert_eq!((client.receive().len(), moved.receive().len()), (1, 0));
    // It moves, while the client goes on: its flow would never be idle.
    pair.world.fabric.add_name("db.example", &[SERVICE_2]);
    let mut arrived = 0;
    for number in 0..700 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(50));
        arrived += moved.receive().len();
    }
    assert!(arrived > 20, "{arrived} datagrams came to the new address");
    assert!(reaches(&mut pair, &mut *listeners[1]));
    assert_eq!(count(&mut pair, &info(second)), 1);
    // While nobody knows the name, its last address stays, and the log says so.
    pair.world.fabric.add_name("db.example", &[]);
    let log = Log::default();
    log.record(|| pair.world.run(Duration::from_secs(40)));
    let text = log.text();
    let lines = text.lines().filter(|line| line.contains("the name of a service was not found"));
    let lines: Vec<_> = lines.collect();
    assert!(!lines.is_empty() && lines[0].contains("upstream=db.example:7"), "{text}");
    assert!(lines[0].contains("keeps_addresses=true") && lines[0].contains("remedy"), "{}", lines[0]);
    let failed = count(&mut pair, "culvert_upstream_lookups_total{result=\"failed\"}");
    assert!((1..=8).contains(&failed), "{failed} look-ups in 40 s");
    assert!(reaches(&mut pair, &mut *listeners[1]));
    pair.assert_balanced();
}

#[test]
fn a_name_that_leads_back_is_refused_as_a_loop() {
    let own_port = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 1));
    for (seed, addresses, words) in
        [(9110, [own_port], "127.0.0.1 is this host itself"), (9111, [EXIT], "is our own UDP port")]
    {
        let upstream = if addresses[0] == EXIT { "\"db.example:4433\"" } else { "\"db.example:7\"" };
        let log = Log::default();
        let mut made = None;
        log.record(|| made = Some(pair_with(seed, upstream, &addresses)));
        let mut pair = made.unwrap();
        let text = log.text();
        let line = text.lines().find(|line| line.contains("an address of a service's name is not used"));
        assert!(line.is_some_and(|line| line.contains(words) && line.contains("remedy")), "{text}");
        let mut client = pair.client(1000);
        client.send(INGRESS, &numbered(0));
        pair.world.run(SECOND);
        assert!(client.receive().is_empty());
        assert!(count(&mut pair, "culvert_upstream_lookups_total{result=\"refused\"}") > 0);
        assert_eq!(pair.world.peer(pair.exit).flows, 0, "no socket goes there");
        pair.assert_balanced();
    }
}

#[test]
fn a_forward_is_refused_with_words_while_a_name_is_unknown() {
    let mut pair = pair_with(9120, "\"db.example:7\"", &[]);
    let mut client = pair.clients.tcp(INGRESS);
    let log = Log::default();
    log.record(|| pair.world.run(SECOND));
    assert!(is_reset(&mut *client));
    let text = log.text();
    let line = text.lines().find(|line| line.contains("a TCP forward of the peer was refused"));
    assert!(line.is_some_and(|line| line.contains("db.example: ") && line.contains("no_route")), "{text}");
    // Once it has an address, everything goes on by itself.
    pair.world.fabric.add_name("db.example", &[SERVICE]);
    pair.world.run(Duration::from_secs(7));
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    assert!(reaches(&mut pair, &mut *listener));
}

#[test]
fn of_a_list_tcp_takes_the_first_that_answers_and_udp_the_first_with_an_address() {
    let nowhere = SocketAddr::from(([203, 0, 113, 9], 7));
    let second = SocketAddr::new(SERVICE_2, 7);
    let upstream = format!("[\"unknown.example:7\", \"{nowhere}\", \"{UPSTREAM}\", \"{second}\"]");
    let mut pair = pair_with(9130, &upstream, &[]);
    // No route to the one, nobody at the other.
    let mut listener = pair.services.tcp_listen(second);
    let log = Log::default();
    log.record(|| assert!(reaches(&mut pair, &mut *listener)));
    let text = log.text();
    let line = text.lines().find(|line| line.contains("was not reached at one of its places"));
    assert!(line.is_some_and(|line| line.contains(&format!("place={UPSTREAM}"))), "{text}");
    for reason in ["no_route", "upstream_refused"] {
        let series = format!("culvert_upstream_unreached_total{{reason=\"{reason}\"}}");
        assert_eq!(count(&mut pair, &series), 1, "{reason}");
        let refused = format!("culvert_tcp_refused_total{{reason=\"{reason}\"}}");
        assert_eq!(count(&mut pair, &refused), 0, "{reason}");
    }
    // Where it is, the first that answers has it.
    let mut first = pair.services.tcp_listen(UPSTREAM);
    assert!(reaches(&mut pair, &mut *first));
    drop((first, listener));
    let mut client = pair.clients.tcp(INGRESS);
    pair.world.run(SECOND);
    assert!(is_reset(&mut *client), "nobody is left");
}

#[test]
fn a_name_with_thousands_of_addresses_costs_no_more_than_one_with_a_few() {
    let many: Vec<IpAddr> = (0..5_000_u32)
        .map(|number| IpAddr::V4((0xcb00_7100 + number % 256 + ((number / 256) << 8)).into()))
        .collect();
    let mut pair = pair_with(9140, "\"db.example:7\"", &many);
    let mut client = pair.clients.tcp(INGRESS);
    pair.world.run(Duration::from_secs(12));
    assert!(is_reset(&mut *client));
    let tried = count(&mut pair, "culvert_upstream_unreached_total{reason=\"no_route\"}");
    assert_eq!(tried, 16, "the places that are tried for one forward");
    assert_eq!(count(&mut pair, "culvert_tcp_refused_total{reason=\"no_route\"}"), 1);
    assert_eq!(count(&mut pair, "culvert_tcp_streams"), 0);
}

#[test]
fn an_answer_of_refused_addresses_alone_leaves_the_known_ones_and_flows_follow_the_next() {
    let mut pair = pair_with(9150, "\"db.example:7\"", &[SERVICE]);
    let second = SocketAddr::new(SERVICE_2, 7);
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut moved = pair.services.udp(second, None);
    let mut client = pair.client(1000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1);
    // Nothing of this can be used; the log says so, and what was known stays.
    pair.world.fabric.add_name("db.example", &[IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)]);
    let log = Log::default();
    log.record(|| pair.run_served(Duration::from_secs(35)));
    let text = log.text();
    assert!(text.contains("an address of a service's name is not used"), "{text}");
    assert!(count(&mut pair, "culvert_upstream_lookups_total{result=\"refused\"}") > 0);
    assert!(reaches(&mut pair, &mut *listener));
    // A flow that goes on all the time follows the next good answer.
    pair.world.fabric.add_name("db.example", &[SERVICE_2]);
    let mut arrived = 0;
    for number in 0..700 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(50));
        arrived += moved.receive().len();
    }
    assert!(arrived > 20, "{arrived} datagrams came to the new address");
    pair.assert_balanced();
}

#[test]
fn flows_follow_a_name_that_had_no_address_for_datagrams_in_between() {
    // At the exit's own port of QUIC, an address of its host is good for TCP alone.
    let mut pair = pair_with(9160, "\"db.example:4433\"", &[SERVICE]);
    let [first, second] = [SERVICE, SERVICE_2].map(|ip| SocketAddr::new(ip, 4433));
    let [mut stayed, mut moved] = [first, second].map(|address| pair.services.udp(address, None));
    let mut client = pair.client(1000);
    let mut run = |pair: &mut Pair, times: u32| {
        for number in 0..times {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(50));
        }
        [stayed.receive().len(), moved.receive().len()]
    };
    assert_eq!(run(&mut pair, 10), [10, 0]);
    pair.world.fabric.add_name("db.example", &[EXIT]);
    run(&mut pair, 700);
    pair.world.fabric.add_name("db.example", &[SERVICE_2]);
    run(&mut pair, 700);
    assert_eq!(run(&mut pair, 10), [0, 10]);
    pair.assert_balanced();
}

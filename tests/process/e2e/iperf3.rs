//! iperf3 through an entry that gives it one port for its TCP control connection and its UDP stream.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Mutex,
};

use culvert_tests::{
    iperf::{self, Books, Server},
    needs::{self, Need},
    pair::{Pair, Plan},
    place::Place,
    ports,
};

/// One load at a time: two at once would overrun a small machine, which is not what these tests are about.
static ALONE: Mutex<()> = Mutex::new(());

struct Bench {
    pair: Pair,
    ingress: SocketAddr,
    _server: Server,
}

/// A pair whose underlay and ingress are at `address`, and iperf3's server behind it.
fn bench(address: IpAddr) -> Bench {
    let upstream = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), ports::free());
    let ingress = SocketAddr::new(address, ports::free());
    let server = Server::start(&Place::Host, upstream);
    let pair =
        Plan::default().underlay(address).service("iperf", upstream, "").forward("iperf", ingress).start();
    Bench { pair, ingress, _server: server }
}

fn udp(address: IpAddr, reverse: bool) {
    let _alone = ALONE.lock();
    let bench = bench(address);
    let books = Books::open(&bench.pair);
    let result = iperf::udp(&Place::Host, bench.ingress, 1, reverse);
    books.close(&bench.pair, result, reverse);
    // 200 Mbit/s for 3 s, of which iperf3 sends what the machine has time for.
    assert!(result.sent > 1000, "{result:?}");
}

fn tcp(reverse: bool) {
    let _alone = ALONE.lock();
    let bench = bench(Ipv4Addr::LOCALHOST.into());
    let result = iperf::tcp(&Place::Host, bench.ingress, reverse);
    assert!(result.received > 0 && result.received <= result.sent, "{result:?}");
    for (_, agent) in bench.pair.ends() {
        agent.wait_for("the bytes are counted", |samples| {
            let carried = samples.count("culvert_tcp_bytes_total", &[]);
            if carried >= result.received { Ok(()) } else { Err(format!("{carried} of {result:?}")) }
        });
    }
}

#[test]
fn udp_forward_over_ipv4_loses_nothing_unexplained() {
    if needs::met("iperf3 UDP over IPv4", needs::IPERF) {
        udp(Ipv4Addr::LOCALHOST.into(), false);
    }
}

#[test]
fn udp_reverse_over_ipv4_loses_nothing_unexplained() {
    if needs::met("iperf3 UDP -R over IPv4", needs::IPERF) {
        udp(Ipv4Addr::LOCALHOST.into(), true);
    }
}

#[test]
fn udp_forward_over_ipv6_loses_nothing_unexplained() {
    if needs::met("iperf3 UDP over IPv6", needs::IPERF) && needs::met("iperf3 UDP over IPv6", &[Need::Ipv6]) {
        udp(Ipv6Addr::LOCALHOST.into(), false);
    }
}

#[test]
fn udp_reverse_over_ipv6_loses_nothing_unexplained() {
    if needs::met("iperf3 UDP -R over IPv6", needs::IPERF)
        && needs::met("iperf3 UDP -R over IPv6", &[Need::Ipv6])
    {
        udp(Ipv6Addr::LOCALHOST.into(), true);
    }
}

#[test]
fn tcp_forward_carries_a_stream() {
    if needs::met("iperf3 TCP", needs::IPERF) {
        tcp(false);
    }
}

#[test]
fn tcp_reverse_carries_a_stream() {
    if needs::met("iperf3 TCP -R", needs::IPERF) {
        tcp(true);
    }
}

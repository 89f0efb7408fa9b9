//! iperf3 runs beside what happens.

use std::{ops::RangeInclusive, time::Duration};

use culvert_tests::{
    agent::Agent,
    clock::{self, PATIENCE},
    impairment::{Path, Way},
    iperf::{Client, Server, Udp},
    ledger::{Ledger, Others},
    stage::{End, Ending, Entrance, Stage},
};
use serde_json::Value;

use super::possible;

/// Bytes in each direction of the last four intervals, of which the very last is not complete. A sender whose buffer was full writes
/// nothing before what is in it has arrived.
fn last_bytes(report: &Value) -> [u64; 2] {
    let intervals = report["intervals"].as_array().unwrap();
    let last = &intervals[intervals.len().saturating_sub(4)..];
    ["sum", "sum_bidir_reverse"]
        .map(|direction| last.iter().map(|interval| interval[direction]["bytes"].as_u64().unwrap_or(0)).sum())
}

/// iperf3's TCP streams through the tunnel: they begin and end at the hosts, and so outlive the agents.
#[test]
fn tcp_through_the_tunnel_goes_on_whatever_happens() {
    if !possible("TCP beside what happens") {
        return;
    }
    let mut stage = Stage::start(Entrance::Address, Path::default());
    let [_, server] = stage.iperf;
    let _server = Server::start(&stage.site(End::Listener).host, server);
    let both = |stage: &Stage, range: RangeInclusive<u64>| {
        for end in [End::Listener, End::Dialler] {
            stage.wait_for_packets(end, range.clone());
        }
    };
    let b = stage.site(End::Dialler).host.clone();
    let client = Client::start(&b, server, &["-t", "300", "-b", "5M", "--bidir"]);
    both(&stage, 1400..=1472);
    let after = |stage: &Stage, what: &str| {
        stage.streams().wait_for_answers(what);
        stage.sites.check_accounts_in_motion();
    };
    // TCP's segments are larger than what passes from now on; nobody says so.
    stage.relay().change(Path { largest: 1300, ..Path::default() });
    both(&stage, 1200..=1300);
    after(&stage, "large packets vanished");
    stage.relay().change(Path::default());
    stage.restart(End::Listener, Ending::Killed, Duration::ZERO);
    after(&stage, "the listener was killed");
    // New lanes ask for the path's MTU anew.
    both(&stage, 1400..=1472);
    // TCP keeps for minutes what it may have learned of the path: with segments of that size, nothing is too large below.
    for site in stage.sites.all() {
        site.host.tell(&["ip", "route", "flush", "cache"]);
    }
    stage.sites.set_middle_mtu(1400);
    // What goes back is not limited by it: the impairment's own kernel cuts that into fragments.
    stage.wait_for_packets(End::Dialler, 1200..=1372);
    after(&stage, "a router with a smaller MTU said so");
    stage.sites.set_middle_mtu(1500);
    stage.relay().forget(|_| true);
    after(&stage, "the NAT forgot");
    stage.restart(End::Dialler, Ending::Killed, Duration::ZERO);
    after(&stage, "the dialler was killed");
    both(&stage, 1400..=1472);
    stage.cut_link(Duration::from_secs(1));
    after(&stage, "the link was down");
    // TCP waits longer after each segment that it has sent in vain.
    let moved = |stage: &Stage| {
        let sites = stage.sites.all().iter();
        let taken = sites.map(|site| {
            site.agent.samples().count("culvert_peer_tun_bytes_total", &[("direction", "downlink")])
        });
        taken.collect::<Vec<_>>()
    };
    // The lines would move as much without it.
    stage.streams().pause();
    let before = moved(&stage);
    clock::until("two megabytes more through each device", PATIENCE, || {
        let now = moved(&stage);
        let enough = now.iter().zip(&before).all(|(now, before)| now - before > 2 << 20);
        if enough { Ok(()) } else { Err(format!("{before:?}, {now:?}")) }
    });
    let last = last_bytes(&client.interrupt());
    assert!(last.iter().all(|bytes| *bytes > 0), "{last:?}");
    stage.sites.accounts();
    stage.end();
}

/// iperf3's UDP streams through a service: every datagram of theirs is accounted for, too.
#[test]
fn udp_through_a_service_is_accounted_for_while_things_happen() {
    if !possible("UDP beside what happens") {
        return;
    }
    let mut stage = Stage::start(Entrance::Address, Path::default());
    let [service, server] = stage.iperf;
    let _server = Server::start(&stage.site(End::Listener).host, server);
    let b = stage.site(End::Dialler).host.clone();
    let bad = Path {
        delay: Duration::from_millis(5),
        loss: 0.05,
        doubled: 0.05,
        detoured: 0.1,
        detour: Duration::from_millis(10),
        damaged: 0.02,
        ..Path::default()
    };
    let mut books = Ledger::new();
    for reverse in [false, true] {
        let mut args = vec!["-u", "-l", "1150", "-b", "20M", "-w", "4M", "-t", "7"];
        args.extend(reverse.then_some("-R"));
        let client = Client::start(&b, service, &args);
        let direction = if reverse { "downlink" } else { "uplink" };
        let passed = |agent: &Agent| agent.samples().account("a", direction).received;
        let before = passed(&stage.site(End::Dialler).agent);
        // Its stream is open by then: the lines alone take seconds for as many.
        clock::until("iperf3 sends", PATIENCE, || {
            let more = passed(&stage.site(End::Dialler).agent) - before;
            if more > 4000 { Ok(()) } else { Err(more) }
        });
        stage.relay().forget(|_| true);
        stage.streams().wait_for_answers("the NAT forgot");
        let over = stage.spoil(&Way::BOTH, bad, Duration::from_secs(1));
        stage.streams().wait_for_answers_since(over, "the path was bad");
        // The same session goes on, or iperf3's TCP connection, which is a stream of it, would end.
        stage.move_dialler();
        stage.streams().wait_for_answers("the address changed");
        let up = stage.cut_link(Duration::from_secs(1));
        stage.streams().wait_for_answers_since(up, "the link was down");
        let udp = Udp::of(&client.finish()["end"]);
        assert!(udp.received > 0, "{udp:?}");
        // A datagram each way opens a stream, which iperf3 does not count.
        let opening = Others { sent: udp.streams, received: udp.streams, unheard: 0 };
        let stream = Others {
            sent: udp.sent + udp.streams,
            received: udp.received + udp.streams,
            unheard: udp.sent - udp.received - udp.lost,
        };
        let others = if reverse { [stream, opening] } else { [opening, stream] };
        let closed = books.close_with(&stage, &format!("{udp:?}, reverse: {reverse}"), others);
        books.has_lost(&closed);
        books = closed;
    }
    stage.end();
}

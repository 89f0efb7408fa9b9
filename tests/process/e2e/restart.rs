//! Agents that end, are killed, and come back.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use culvert_tests::{client::Client, clock, needs, pair::Plan, ports, process::StopOnDrop, upstream::Echo};

fn plan(echo: &Echo, ingress: SocketAddr) -> Plan {
    Plan::default().service("echo", echo.address, "").forward("echo", ingress)
}

#[test]
fn the_entry_notices_at_once_that_the_exit_ends_and_finds_it_again() {
    if !needs::met("restart of the exit", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = plan(&echo, ingress).start();
    let mut client = Client::new(0, ingress);
    client.converse(3);
    assert_eq!(pair.exit.terminate().code(), Some(0));
    // It said goodbye: QUIC's idle timeout, which takes 30 s, does not have to pass.
    clock::until("the entry notices", Duration::from_secs(10), || {
        match pair.entry.samples().count("culvert_peer_connected", &[("peer", "exit")]) {
            0 => Ok(()),
            connections => Err(format!("{connections} connections")),
        }
    });
    pair.exit.start();
    client.reach();
    client.converse(20);
    Client::new(1, ingress).converse(3);
}

#[test]
fn traffic_goes_on_after_the_exit_was_killed() {
    if !needs::met("killed exit", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = plan(&echo, ingress).start();
    let mut client = Client::new(0, ingress);
    client.converse(3);
    pair.exit.kill();
    pair.exit.start();
    client.reach();
    client.converse(20);
}

#[test]
fn traffic_goes_on_after_the_entry_was_killed() {
    if !needs::met("killed entry", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = plan(&echo, ingress).start();
    let mut client = Client::new(0, ingress);
    client.converse(3);
    pair.entry.kill();
    pair.entry.start();
    client.reach();
    client.converse(20);
}

#[test]
fn an_entry_that_is_there_first_connects_once_the_exit_comes() {
    if !needs::met("entry first", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = plan(&echo, ingress).prepare();
    pair.entry.start();
    pair.exit.start();
    let mut client = Client::new(0, ingress);
    client.reach();
    client.converse(3);
}

#[test]
fn agents_with_traffic_end_when_they_are_asked_to() {
    if !needs::met("end with traffic", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = plan(&echo, ingress).start();
    Client::new(0, ingress).converse(1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            let client = Client::new(1, ingress);
            while !stop.load(Ordering::Relaxed) {
                // Once the entry is gone, the kernel says so.
                drop(client.socket().send(&[0; 1000]));
                thread::sleep(Duration::from_micros(200));
            }
        });
        let flow = || pair.exit.samples().account("entry", "uplink").received;
        let before = flow();
        clock::until("traffic flows", clock::PATIENCE, || {
            if flow() > before + 100 { Ok(()) } else { Err("no") }
        });
        let codes = [pair.exit.terminate().code(), pair.entry.terminate().code()];
        assert_eq!(codes, [Some(0), Some(0)]);
    });
}

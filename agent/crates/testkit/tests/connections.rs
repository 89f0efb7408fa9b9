//! Scripts of two programs over the kernel's TCP, and over the TCP in memory: both must behave alike.
//!
//! `CULVERT_FORWARD_SCRIPTS=10000` runs so many, and `CULVERT_TEST_SEED=17` that one.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use base::clock::{Clock, ManualClock};
use net::{Net, Ready, Token, memory::MemoryFabric};
use testkit::scripts::{self, End, Run, Script, Seen, judge, kernel, virtual_time};

/// The largest write: the connection in memory is no place for many megabytes.
const LARGEST: u64 = 4 << 20;

/// A run over the kernel's loopback.
fn over_the_kernel(script: &Script, listener: &TcpListener) -> Run {
    let address = match script.has_service {
        true => listener.local_addr().unwrap(),
        false => SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
    };
    kernel::run(script, address, listener, &|_, _| {}).unwrap_or_else(|error| panic!("{script}{error}"))
}

/// A run over the network in memory.
fn in_memory(script: &Script) -> Run {
    let (clock, ready) = (ManualClock::new(Duration::ZERO), Ready::default());
    let mut net = MemoryFabric::default().host(&[], ready);
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 7));
    let mut listener = script.has_service.then(|| net.tcp_listen(address, Token(1)).unwrap());
    let mut client = net.tcp_connect(address, Token(2)).unwrap();
    if let Err(error) = client.connected() {
        return [Seen { unconnected: Some(End::from(error)), ..Seen::default() }, Seen::default()];
    }
    let service = listener.as_mut().map(|listener| listener.accept(Token(3)).unwrap().0);
    virtual_time::run(script, [Some(client), service], |time| {
        clock.advance(time);
        clock.now()
    })
}

/// Runs `judge` on every seed, on several threads; it says what is wrong.
fn every_seed(count: u64, judge: impl Fn(u64, &TcpListener) -> Vec<String> + Sync) {
    let seeds = scripts::seeds(count);
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let said = judge(*seed, &listener);
                    wrong.lock().unwrap().extend(said);
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} scripts:\n{}", wrong.len(), seeds.len(), wrong.join("\n"));
}

fn told(script: &Script, wrong: Vec<String>) -> Option<String> {
    (!wrong.is_empty()).then(|| format!("{script}    {}", wrong.join("\n    ")))
}

#[test]
fn the_kernel_gives_each_script_the_same_outcomes_every_time() {
    every_seed(100, |seed, listener| {
        let script = Script::of_seed(seed, LARGEST);
        let runs = [(); 2].map(|()| over_the_kernel(&script, listener));
        let mut wrong = judge::differences(&script, &runs[0], &runs[1]);
        runs.iter().for_each(|run| wrong.extend(judge::faults(&script, run)));
        told(&script, wrong).into_iter().collect()
    });
}

#[test]
fn connections_in_memory_are_as_the_kernels() {
    every_seed(200, |seed, listener| {
        let script = Script::of_seed(seed, LARGEST);
        let (direct, memory) = (over_the_kernel(&script, listener), in_memory(&script));
        let mut wrong = judge::differences(&script, &direct, &memory);
        wrong.extend(judge::faults(&script, &memory));
        told(&script, wrong).into_iter().collect()
    });
}

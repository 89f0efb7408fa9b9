//! Either end is killed and comes back: how soon its TCP forwards are reset, so that clients and services can begin anew.

use std::{io::ErrorKind, ops::Range, time::Duration};

use base::clock::Clock;
use gate::identity::Identity;
use net::{TcpListener, TcpStream};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{ENTRY, EXIT, INGRESS, Pair, UPSTREAM, restarts::report};

/// Between two looks at clients and services.
const STEP: Duration = Duration::from_millis(5);

/// The promise of docs/reliability.md for forwards in use.
const PROMISED: Duration = Duration::from_secs(2);

const SEEDS: u64 = 20;

/// A connection through the agents, its two ends; an end that was reset is gone.
struct Forward {
    client: Option<Box<dyn TcpStream>>,
    server: Option<Box<dyn TcpStream>>,
}

/// A pair with forwards, to a service that answers each byte.
struct Forwards {
    pair: Pair,
    rng: StdRng,
    service: Box<dyn TcpListener>,
    open: Vec<Forward>,
    instance: u8,
}

/// Whether an end is reset; `answer` is done with each part that it reads.
fn is_reset(stream: &mut dyn TcpStream, mut answer: impl FnMut(&mut dyn TcpStream, &[u8])) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return false,
            Ok(len) => answer(stream, &buffer[..len]),
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

impl Forwards {
    fn new(seed: u64, extra: &str, count: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let workers = (rng.random_range(1..=3), rng.random_range(1..=3));
        let mut pair = Pair::with_workers(seed, workers, extra, "");
        pair.world.weather.borrow_mut().delay = Duration::from_millis(rng.random_range(1..50));
        pair.wait_for_lanes(1);
        let service = pair.services.tcp_listen(UPSTREAM);
        let mut forwards = Self { pair, rng, service, open: Vec::new(), instance: 20 };
        for _ in 0..count {
            let client = forwards.pair.clients.tcp(INGRESS);
            forwards.pair.world.run(Duration::from_millis(400));
            let token = forwards.pair.services.token();
            let (server, _) = forwards.service.accept(token).expect("the service is connected");
            forwards.open.push(Forward { client: Some(client), server: Some(server) });
        }
        forwards
    }

    /// One step of time: the service answers, and clients that have an answer ask again if they are to.
    fn step(&mut self, asking: bool) {
        self.pair.world.run(STEP);
        for Forward { client, server } in &mut self.open {
            let echo = |stream: &mut dyn TcpStream, bytes: &[u8]| drop(stream.write(bytes));
            server.take_if(|stream| is_reset(&mut **stream, echo));
            client.take_if(|stream| {
                is_reset(&mut **stream, |stream, _| {
                    if asking {
                        drop(stream.write(b"?"))
                    }
                })
            });
        }
    }

    fn run(&mut self, time: Duration, asking: bool) {
        for _ in 0..time.as_millis() / STEP.as_millis() {
            self.step(asking);
        }
    }

    fn ask(&mut self) {
        for forward in &mut self.open {
            let client = forward.client.as_mut().unwrap();
            assert_eq!(client.write(b"?").unwrap(), 1);
        }
    }

    /// How long it takes until no end is left of those that `end` names.
    fn until_reset(&mut self, most: Duration, end: fn(&Forward) -> &Option<Box<dyn TcpStream>>) -> Duration {
        let begin = self.pair.world.clock.now();
        while self.open.iter().any(|forward| end(forward).is_some()) {
            let so_far = self.pair.world.clock.now() - begin;
            assert!(so_far <= most, "not reset within {most:?}");
            self.step(true);
        }
        self.pair.world.clock.now() - begin
    }

    /// Kills the exit; returns its place.
    fn kill_exit(&mut self) -> usize {
        let exit = self.pair.exit;
        self.pair.world.kill(exit);
        exit
    }

    /// Starts the agent that was killed at `place` again, after a time of so many milliseconds.
    fn return_after(&mut self, place: usize, millis: Range<u64>, asking: bool) {
        let away = Duration::from_millis(self.rng.random_range(millis));
        self.run(away, asking);
        self.restart(place);
    }

    fn restart(&mut self, place: usize) {
        self.instance += 1;
        let Pair { entry, entry_key, entry_toml, exit_key, exit_toml, .. } = &self.pair;
        let (toml, key, at) =
            if place == *entry { (entry_toml, entry_key, ENTRY) } else { (exit_toml, exit_key, EXIT) };
        let key = Identity::from_pem(key.to_pem().as_bytes()).unwrap();
        let toml = toml.clone();
        self.pair.world.restart(place, &toml, &key, &[at], self.instance);
    }
}

fn client(forward: &Forward) -> &Option<Box<dyn TcpStream>> {
    &forward.client
}

fn server(forward: &Forward) -> &Option<Box<dyn TcpStream>> {
    &forward.server
}

/// Kills the exit while clients ask and wait for answers; the time from its return until all of them are reset.
fn time_after_the_exits_return(seed: u64, extra: &str) -> Duration {
    let mut forwards = Forwards::new(seed, extra, 4);
    forwards.ask();
    let used = Duration::from_millis(forwards.rng.random_range(500..6000));
    forwards.run(used, true);
    let exit = forwards.kill_exit();
    forwards.return_after(exit, 0..4000, true);
    forwards.until_reset(2 * PROMISED, client)
}

#[test]
fn forwards_in_use_are_reset_within_two_seconds_of_the_exits_return() {
    let extra = |seed| if seed % 2 == 0 { "keepalive = \"0s\"" } else { "" };
    let times = (0..SEEDS).map(|seed| time_after_the_exits_return(8600 + seed, extra(seed)));
    assert!(report("the exit, forwards in use", times.collect()) <= PROMISED);
}

#[test]
fn forwards_in_use_have_the_peer_dialled_as_often_as_datagrams_however_long_it_is_away() {
    let times = (0..SEEDS).map(|seed| {
        let mut forwards = Forwards::new(8620 + seed, "keepalive = \"20s\"", 4);
        let exit = forwards.kill_exit();
        forwards.ask();
        // Beyond the rounds that every dialler makes at the shortest interval, and below QUIC's idle time.
        forwards.return_after(exit, 10_000..25_000, true);
        forwards.until_reset(2 * PROMISED, client)
    });
    assert!(report("the exit, forwards in use, away for long", times.collect()) <= PROMISED);
}

#[test]
fn forwards_that_only_wait_are_reset_within_one_keepalive_of_the_exits_return() {
    let keepalive = Duration::from_secs(5);
    let times = (0..SEEDS).map(|seed| {
        let mut forwards = Forwards::new(8640 + seed, "keepalive = \"5s\"", 4);
        let exit = forwards.kill_exit();
        forwards.return_after(exit, 0..4000, false);
        forwards.until_reset(2 * keepalive, client)
    });
    assert!(report("the exit, idle forwards, keepalive = \"5s\"", times.collect()) <= keepalive);
}

#[test]
fn what_a_client_sends_after_a_long_silence_has_its_forward_reset_within_two_seconds() {
    let mut times = Vec::new();
    for seed in 0..SEEDS {
        let mut forwards = Forwards::new(8660 + seed, "keepalive = \"20s\"", 2);
        let exit = forwards.kill_exit();
        forwards.restart(exit);
        let silent = Duration::from_millis(forwards.rng.random_range(0..3000));
        forwards.run(silent, false);
        if forwards.open.iter().all(|forward| forward.client.is_some()) {
            forwards.ask();
            times.push(forwards.until_reset(2 * PROMISED, client));
        }
    }
    assert!(times.len() > SEEDS as usize / 2);
    assert!(report("the exit, bytes of the client after its return", times) <= PROMISED);
}

#[test]
fn a_connection_is_served_within_two_seconds_of_the_exits_return() {
    let mut times = Vec::new();
    for seed in 0..SEEDS {
        let mut forwards = Forwards::new(8680 + seed, "", 0);
        let exit = forwards.kill_exit();
        let away = Duration::from_millis(forwards.rng.random_range(0..4000));
        // Clients that come and give up meanwhile.
        for _ in 0..away.as_millis() / 200 {
            let mut client = forwards.pair.clients.tcp(INGRESS);
            let _refused = client.write(b"?");
            forwards.run(Duration::from_millis(200), true);
        }
        forwards.restart(exit);
        let begin = forwards.pair.world.clock.now();
        let mut answered = false;
        while !answered {
            assert!(forwards.pair.world.clock.now() - begin <= 2 * PROMISED, "not served");
            forwards.open.clear();
            let mut client = forwards.pair.clients.tcp(INGRESS);
            let _refused = client.write(b"?");
            forwards.open.push(Forward { client: None, server: None });
            for _ in 0..40 {
                forwards.pair.world.run(STEP);
                let token = forwards.pair.services.token();
                if let Ok((server, _)) = forwards.service.accept(token) {
                    forwards.open.push(Forward { client: None, server: Some(server) });
                }
                forwards.step(true);
                let mut buffer = [0; 1];
                answered |= client.read(&mut buffer).is_ok_and(|len| len == 1);
                if answered {
                    break;
                }
            }
        }
        times.push(forwards.pair.world.clock.now() - begin);
    }
    assert!(report("the exit, new connections", times) <= PROMISED);
}

#[test]
fn services_are_free_as_soon_as_the_entrys_new_process_says_hello() {
    let times = (0..SEEDS).map(|seed| {
        let extra = if seed % 2 == 0 { "keepalive = \"0s\"" } else { "" };
        let mut forwards = Forwards::new(8700 + seed, extra, 4);
        if seed % 3 > 0 {
            forwards.ask();
            forwards.run(Duration::from_secs(1), true);
        }
        let entry = forwards.pair.entry;
        forwards.pair.world.kill(entry);
        forwards.return_after(entry, 0..4000, true);
        forwards.until_reset(2 * PROMISED, server)
    });
    assert!(report("the entry, services' connections", times.collect()) <= PROMISED);
}

#[test]
fn services_are_free_after_quics_idle_time_if_the_entry_stays_away() {
    let mut forwards = Forwards::new(8720, "", 4);
    forwards.ask();
    forwards.run(Duration::from_secs(1), true);
    let entry = forwards.pair.entry;
    forwards.pair.world.kill(entry);
    let time = forwards.until_reset(Duration::from_secs(60), server);
    assert!(time <= Duration::from_secs(40), "{time:?}");
    assert_eq!(forwards.pair.world.metric(forwards.pair.exit, "culvert_tcp_streams"), 0);
}

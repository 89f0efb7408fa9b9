use base::clock::{Clock, ManualClock};
use rand::{SeedableRng, rngs::StdRng};

use super::*;

fn endpoint(host: &str) -> Endpoint {
    Endpoint::new(host.to_owned(), 1)
}

fn v4(last: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, last], 1))
}

fn v6(last: u16) -> SocketAddr {
    SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, last], 1))
}

/// A dialler, its clock, and who resolves its names.
struct Bench {
    dialler: Dialler,
    clock: ManualClock,
    rng: StdRng,
    names: Vec<(&'static str, Vec<SocketAddr>)>,
    /// Names whose lookups are never answered.
    hanging: Vec<&'static str>,
    tokens: u32,
    /// True if sockets cannot be opened.
    no_way: bool,
    may_fall_back: bool,
    /// What was dialled by X25519 alone, likewise.
    fallbacks: Vec<(u128, SocketAddr)>,
}

impl Bench {
    fn new(hosts: &[&str], names: &[(&'static str, &[SocketAddr])]) -> Self {
        let clock = ManualClock::default();
        let dialler = Dialler::new(hosts.iter().map(|host| endpoint(host)).collect(), clock.now());
        let names = names.iter().map(|(name, addresses)| (*name, addresses.to_vec())).collect();
        Self {
            dialler,
            clock,
            rng: StdRng::seed_from_u64(1),
            names,
            hanging: Vec::new(),
            tokens: 0,
            no_way: false,
            may_fall_back: false,
            fallbacks: Vec::new(),
        }
    }

    /// What is dialled within `time`, and how many milliseconds from now.
    fn dialled(&mut self, waiting: bool, time: Duration) -> Vec<(u128, SocketAddr)> {
        let begin = self.clock.now();
        let mut dialled = Vec::new();
        loop {
            let now = self.clock.now();
            while let Some(step) =
                self.dialler.step(waiting, IDLE_INTERVAL, self.may_fall_back, now, &mut self.rng)
            {
                let address = match step {
                    Step::Dial(address) => Some(address),
                    Step::FallBack(address) => {
                        self.fallbacks.push(((now - begin).as_millis(), address));
                        self.dialler.started(ConnectionHandle(100 + self.fallbacks.len()), true);
                        continue;
                    }
                    Step::LookUp(endpoint) => self.look_up(&endpoint.host),
                };
                let Some(address) = address else { continue };
                dialled.push(((now - begin).as_millis(), address));
                if self.no_way {
                    self.dialler.failed(now);
                } else {
                    self.dialler.started(ConnectionHandle(dialled.len()), false);
                }
            }
            match self.dialler.deadline() {
                Some(next) if next < begin + time => self.clock.advance(next - now),
                Some(_) | None => break,
            }
        }
        self.clock.advance(begin + time - self.clock.now());
        dialled
    }

    fn look_up(&mut self, host: &str) -> Option<SocketAddr> {
        let token = Token(self.tokens);
        self.tokens += 1;
        self.dialler.looks_up(token, self.clock.now());
        if self.hanging.contains(&host) {
            return None;
        }
        let found = self.names.iter().find(|(name, _)| *name == host);
        let addresses = found.map(|(_, addresses)| addresses.clone()).unwrap_or_default();
        self.dialler.answered(token, &addresses, self.clock.now())
    }
}

fn addresses(dialled: &[(u128, SocketAddr)]) -> Vec<SocketAddr> {
    dialled.iter().map(|(_, address)| *address).collect()
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn rounds_take_the_endpoints_in_order_and_then_their_next_addresses() {
    let mut bench = Bench::new(&["a", "b"], &[("a", &[v4(1), v4(2)]), ("b", &[v4(3)])]);
    let dialled = bench.dialled(true, 5 * SECOND);
    assert_eq!(addresses(&dialled)[..5], [v4(1), v4(3), v4(2), v4(3), v4(1)]);
    for (one, next) in dialled.iter().zip(&dialled[1..]) {
        assert!((500..=1000).contains(&(next.0 - one.0)), "{dialled:?}");
    }
    // After a success it begins with the first again.
    bench.dialler.stop();
    let now = bench.clock.now();
    bench.dialler.restart(Some(Duration::ZERO), now, &mut bench.rng);
    assert_eq!(bench.dialled(true, SECOND / 4), [(0, v4(1))]);
}

#[test]
fn the_other_family_is_dialled_a_quarter_of_a_second_later() {
    let mut bench = Bench::new(&["a"], &[("a", &[v6(1), v6(2), v4(1)])]);
    assert_eq!(bench.dialled(true, SECOND / 2), [(0, v6(1)), (250, v4(1))]);
    // The next round begins with the address that has not had its turn.
    assert_eq!(addresses(&bench.dialled(true, SECOND / 2))[0], v6(2));
    // A connection within the delay: no second one.
    let mut bench = Bench::new(&["a"], &[("a", &[v6(1), v4(1)])]);
    assert_eq!(bench.dialled(true, SECOND / 5), [(0, v6(1))]);
    bench.dialler.stop();
    assert_eq!(bench.dialled(true, 10 * SECOND), []);
}

#[test]
fn an_address_that_cannot_be_dialled_costs_no_time() {
    let mut bench = Bench::new(&["a", "b"], &[("a", &[v6(1), v4(1)]), ("b", &[v4(2)])]);
    bench.no_way = true;
    // All have their turn at once, each once in a round.
    assert_eq!(bench.dialled(true, SECOND / 4), [(0, v6(1)), (0, v4(1)), (0, v4(2))]);
    let dialled = bench.dialled(true, 10 * SECOND);
    assert!((30..=61).contains(&dialled.len()), "{dialled:?}");
    // Where a family is missing the other one is dialled.
    let mut bench = Bench::new(&["a"], &[("a", &[v6(1), v4(1)])]);
    let now = bench.clock.now();
    assert_eq!(
        bench.dialler.step(true, IDLE_INTERVAL, false, now, &mut bench.rng),
        Some(Step::LookUp(endpoint("a")))
    );
    assert_eq!(bench.look_up("a"), Some(v6(1)));
    bench.dialler.failed(now);
    assert_eq!(bench.dialler.step(true, IDLE_INTERVAL, false, now, &mut bench.rng), Some(Step::Dial(v4(1))));
}

#[test]
fn intervals_grow_without_traffic_and_shrink_at_once_with_it() {
    let mut bench = Bench::new(&["a"], &[("a", &[v4(1)])]);
    let dialled = bench.dialled(false, 200 * SECOND);
    let gaps: Vec<u128> = dialled.iter().zip(&dialled[1..]).map(|(one, next)| next.0 - one.0).collect();
    let longest = gaps.iter().max().unwrap();
    assert!((7_500..=15_000).contains(longest), "{gaps:?}");
    assert!(gaps[..STEADY_ROUNDS].iter().all(|gap| *gap <= 1000) && gaps.len() < 30, "{gaps:?}");
    // The last round was long ago: the next is now.
    bench.dialled(false, SECOND);
    bench.dialler.last = Some(bench.clock.now() - 2 * SECOND);
    bench.dialler.next = Some(bench.clock.now() + 14 * SECOND);
    bench.dialler.dial_soon(bench.clock.now());
    assert_eq!(addresses(&bench.dialled(true, SECOND / 4)), [v4(1)]);
    // And when it was a moment ago, within a second of it.
    bench.dialler.next = Some(bench.clock.now() + 14 * SECOND);
    bench.dialler.dial_soon(bench.clock.now());
    assert_eq!(bench.dialler.deadline().unwrap() - bench.clock.now(), SECOND - SECOND / 4);
}

#[test]
fn a_keepalive_bounds_the_interval_too() {
    let mut bench = Bench::new(&["a"], &[("a", &[v4(1)])]);
    let (mut rounds, begin) = (Vec::new(), bench.clock.now());
    while bench.clock.now() < begin + 60 * SECOND {
        let now = bench.clock.now();
        match bench.dialler.step(false, 4 * SECOND, false, now, &mut bench.rng) {
            Some(Step::LookUp(endpoint)) => {
                bench.look_up(&endpoint.host);
                rounds.push(now);
            }
            Some(Step::Dial(_) | Step::FallBack(_)) => {}
            None => bench.clock.advance(bench.dialler.deadline().unwrap() - now),
        }
    }
    assert!(rounds.len() >= 15, "{}", rounds.len());
    assert!(rounds.iter().zip(&rounds[1..]).all(|(one, next)| *next - *one <= 4 * SECOND));
}

#[test]
fn at_most_four_attempts_are_alive() {
    let mut dialler = Dialler::new(vec![endpoint("a")], ManualClock::default().now());
    let surplus: Vec<_> =
        (0..6).filter_map(|attempt| dialler.started(ConnectionHandle(attempt), false)).collect();
    assert_eq!(surplus, [ConnectionHandle(0), ConnectionHandle(1)], "the oldest give way");
    assert!(dialler.ended(ConnectionHandle(2)) && !dialler.ended(ConnectionHandle(0)));
    assert_eq!(dialler.stop(), [3, 4, 5].map(ConnectionHandle));
}

#[test]
fn a_lookup_that_hangs_holds_up_neither_the_next_endpoint_nor_itself_for_ever() {
    let mut bench = Bench::new(&["a", "b"], &[("a", &[v4(1)]), ("b", &[v4(2)])]);
    bench.hanging.push("a");
    let dialled = bench.dialled(true, 10 * SECOND);
    assert!(dialled.len() >= 10 && dialled.iter().all(|(_, address)| *address == v4(2)), "{dialled:?}");
    assert_eq!(dialled[0].0, LOOKUP_PATIENCE.as_millis());
    assert_eq!(bench.dialler.take_abandoned(), []);
    bench.dialled(true, LOOKUP_LIMIT);
    assert_eq!(bench.dialler.take_abandoned(), [Token(0)]);
    bench.hanging.clear();
    bench.dialled(true, LOOKUP_LIMIT);
    assert!(addresses(&bench.dialled(true, 3 * SECOND)).contains(&v4(1)));
}

#[test]
fn a_late_answer_is_dialled_when_it_comes() {
    let mut bench = Bench::new(&["a"], &[]);
    bench.hanging.push("a");
    assert_eq!(bench.dialled(true, 3 * SECOND), []);
    let (token, now) = (Token(0), bench.clock.now());
    assert_eq!(bench.dialler.looked_up(token), Some(&endpoint("a")));
    assert_eq!(bench.dialler.answered(token, &[v4(1)], now), Some(v4(1)));
    assert_eq!(bench.dialler.answered(token, &[v4(2)], now), None, "once");
}

#[test]
fn while_the_resolver_is_away_the_addresses_of_before_are_dialled() {
    let mut bench = Bench::new(&["a"], &[("a", &[v4(1)])]);
    assert_eq!(addresses(&bench.dialled(true, SECOND / 4)), [v4(1)]);
    bench.dialler.stop();
    for hangs in [true, false] {
        bench.names.clear();
        bench.hanging = if hangs { vec!["a"] } else { Vec::new() };
        let now = bench.clock.now();
        bench.dialler.restart(Some(Duration::ZERO), now, &mut bench.rng);
        let dialled = bench.dialled(true, 2 * SECOND);
        assert!(dialled.len() >= 2 && dialled.iter().all(|(_, address)| *address == v4(1)), "{dialled:?}");
        bench.dialler.stop();
        bench.dialler.forget_lookups();
        assert_eq!(bench.dialler.take_abandoned().len(), usize::from(hangs));
    }
}

#[test]
fn a_name_that_does_not_resolve_costs_no_time() {
    let mut bench = Bench::new(&["a", "b"], &[("b", &[v4(2)])]);
    assert_eq!(bench.dialled(true, SECOND / 4), [(0, v4(2))]);
    // If none does, they are asked once in a round.
    let mut bench = Bench::new(&["a", "b"], &[]);
    assert_eq!(bench.dialled(true, 10 * SECOND), []);
    assert!((20..=40).contains(&bench.tokens), "{}", bench.tokens);
}

#[test]
fn fallbacks_begin_after_two_silent_rounds() {
    let mut bench = Bench::new(&["a"], &[("a", &[v4(1), v6(1)])]);
    let without = bench.dialled(true, Duration::from_secs(6));
    assert_eq!(bench.fallbacks, [], "not where they are forbidden");

    let mut bench = Bench::new(&["a"], &[("a", &[v4(1), v6(1)])]);
    bench.may_fall_back = true;
    let dialled = bench.dialled(true, Duration::from_secs(6));
    assert_eq!(dialled, without, "the other attempts are what they would be");
    // Each round has two addresses; the third and the seventh have fallbacks.
    let expected: Vec<_> = [4, 5, 12, 13]
        .into_iter()
        .filter_map(|place| dialled.get(place))
        .map(|(at, address)| (at + 250, *address))
        .filter(|(at, _)| *at < 6_000)
        .collect();
    assert!(expected.len() >= 2, "{dialled:?}");
    assert_eq!(bench.fallbacks, expected);
}

#[test]
fn what_succeeded_last_is_tried_first() {
    let mut bench = Bench::new(&["a"], &[("a", &[v4(1)])]);
    bench.may_fall_back = true;
    bench.dialled(true, Duration::from_secs(4));
    let fallback = ConnectionHandle(100 + bench.fallbacks.len());
    bench.dialler.succeeded(fallback);
    bench.dialler.stop();
    assert!(bench.dialler.fell_back());
    bench.fallbacks.clear();
    let now = bench.clock.now();
    bench.dialler.restart(Some(Duration::ZERO), now, &mut bench.rng);
    let dialled = bench.dialled(true, Duration::from_millis(400));
    assert_eq!(bench.fallbacks, [(dialled[0].0 + 250, v4(1))], "from the first round on");
    bench.dialler.succeeded(ConnectionHandle(1));
    assert!(!bench.dialler.fell_back(), "the peer has learnt it");
}

#[test]
fn attempts_and_fallbacks_do_not_displace_each_other() {
    let mut dialler = Dialler::new(vec![endpoint("a")], ManualClock::default().now());
    let mut surplus = Vec::new();
    for attempt in 0..5 {
        surplus.extend(dialler.started(ConnectionHandle(attempt), false));
        surplus.extend(dialler.started(ConnectionHandle(100 + attempt), true));
    }
    assert_eq!(surplus, [100, 101, 0, 102].map(ConnectionHandle));
}

#[test]
fn who_is_asked_to_leave_dials_the_next_endpoint_first_and_not_before_its_time() {
    let mut bench = Bench::new(&["one", "other"], &[("one", &[v4(1)]), ("other", &[v4(2)])]);
    assert_eq!(bench.dialled(true, Duration::from_millis(10)), [(0, v4(1))]);
    bench.dialler.stop();
    let at = bench.clock.now() + Duration::from_secs(5);
    bench.dialler.restart_elsewhere(Some(v4(1)), at);
    assert!(bench.dialled(true, Duration::from_secs(4)).is_empty());
    assert_eq!(bench.dialled(true, Duration::from_millis(1_500))[0].1, v4(2));
}

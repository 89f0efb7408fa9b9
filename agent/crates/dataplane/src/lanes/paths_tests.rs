use base::clock::{Clock, ManualClock};

use super::*;

const PTO: Duration = Duration::from_millis(80);

fn path(port: u16) -> Path {
    Path { destination: SocketAddr::from(([192, 0, 2, 1], port)), source: None, tos: 0 }
}

/// One end's paths; the far end answers challenges to the ports that are alive.
struct Bench {
    paths: Paths,
    clock: ManualClock,
    number: u64,
    next: u8,
    /// Bytes sent to each port in challenges.
    sent: Vec<(u16, usize)>,
    alive: Vec<u16>,
    /// The answers to challenges that are under way.
    answers: Vec<(Instant, [u8; 8])>,
}

impl Bench {
    /// A lane whose path is port 1.
    fn new() -> Self {
        let clock = ManualClock::default();
        let mut paths = Paths::default();
        paths.validate(path(1), [255; 8], clock.now());
        assert_eq!(paths.on_response([255; 8], clock.now()), Turn::Moved);
        Self { paths, clock, number: 0, next: 0, sent: Vec::new(), alive: vec![1], answers: Vec::new() }
    }

    fn port(&self) -> Option<u16> {
        self.paths.present.map(|path| path.destination.port())
    }

    fn packet(&mut self, port: u16, number: u64) {
        let next = &mut self.next;
        let data = || {
            *next += 1;
            [*next; 8]
        };
        self.paths.came_by(&path(port), number, 100, data, || PTO, self.clock.now());
    }

    /// A packet that is newer than all before.
    fn newest(&mut self, port: u16) {
        self.number += 1;
        self.packet(port, self.number);
    }

    /// Lets time pass; what is challenged and alive answers 40 ms later.
    fn run(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        loop {
            let now = self.clock.now();
            while let Some((data, path, most)) = self.paths.due_challenge(now) {
                let port = path.destination.port();
                self.sent.push((port, most));
                if self.alive.contains(&port) {
                    self.answers.push((now + PTO / 2, data));
                }
            }
            let paths = &mut self.paths;
            self.answers.retain(|(at, data)| {
                if *at <= now {
                    paths.on_response(*data, now);
                }
                *at > now
            });
            let next = self.answers.iter().map(|(at, _)| *at).chain(self.paths.poll_timeout()).min();
            let next = next.unwrap_or(end).max(now + Duration::from_micros(1));
            if next >= end {
                break;
            }
            self.clock.advance(next - now);
            self.paths.on_timeout(self.clock.now());
        }
        let now = self.clock.now();
        self.clock.advance(end.saturating_duration_since(now));
    }

    fn asked(&self, port: u16) -> usize {
        self.sent.iter().filter(|(to, _)| *to == port).count()
    }
}

#[test]
fn it_moves_when_the_new_address_answers_and_the_present_one_does_not() {
    let mut bench = Bench::new();
    bench.alive = vec![2];
    bench.newest(2);
    bench.run(PTO);
    assert_eq!(bench.port(), Some(1), "the present one may still answer");
    bench.run(PTO);
    assert_eq!(bench.port(), Some(2));
    assert_eq!([bench.asked(1), bench.asked(2)], [3, 1]);
    assert_eq!(bench.paths.poll_timeout(), None);
}

#[test]
fn it_stays_while_the_present_address_answers_whoever_else_does() {
    let mut bench = Bench::new();
    bench.alive = vec![1, 2];
    bench.newest(2);
    bench.run(PTO);
    assert_eq!(bench.port(), Some(1));
    // And is not asked about it with every packet.
    for _ in 0..8 {
        bench.newest(2);
        bench.run(QUIET / 10);
    }
    assert_eq!(bench.asked(2), 1);
    bench.run(QUIET);
    bench.newest(2);
    bench.run(10 * PTO);
    assert_eq!((bench.port(), bench.asked(2)), (Some(1), 2));
}

#[test]
fn an_old_packet_from_elsewhere_and_a_new_one_from_here_say_that_nothing_moved() {
    let mut bench = Bench::new();
    bench.alive = vec![2];
    for _ in 0..5 {
        bench.newest(1);
    }
    bench.packet(2, 3);
    bench.run(10 * PTO);
    assert!(bench.sent.is_empty());
    bench.newest(2);
    bench.run(PTO / 2);
    bench.newest(1);
    bench.run(10 * PTO);
    assert_eq!(bench.port(), Some(1));
}

#[test]
fn an_address_that_does_not_answer_gets_no_more_than_three_times_what_came_from_it() {
    let mut bench = Bench::new();
    bench.alive = Vec::new();
    for _ in 0..4 {
        bench.newest(2);
        bench.run(Duration::from_millis(100));
    }
    bench.run(2 * VALIDATION_TIMEOUT);
    assert_eq!(bench.port(), Some(1));
    let bytes: usize = bench.sent.iter().filter(|(to, _)| *to == 2).map(|(_, bytes)| bytes).sum();
    assert!(bytes > 0 && bytes <= 400 * AMPLIFICATION_LIMIT, "{bytes}");
    assert_eq!(bench.paths.poll_timeout(), None, "given up");
}

#[test]
fn a_genuine_move_goes_through_beside_copies_from_elsewhere() {
    let mut bench = Bench::new();
    bench.alive = vec![2];
    for copy in [0, 3, 4, 5, 6] {
        if copy > 0 {
            bench.newest(copy);
        }
        bench.newest(2);
        bench.run(PTO / 4);
    }
    bench.run(2 * PTO);
    assert_eq!(bench.port(), Some(2));
}

#[test]
fn it_returns_to_an_address_that_was_left_by_mistake() {
    let mut bench = Bench::new();
    // Copies came first, and all challenges to the genuine address were lost.
    bench.alive = vec![2];
    bench.newest(2);
    bench.run(3 * PTO);
    assert_eq!(bench.port(), Some(2));
    bench.alive = vec![1, 2];
    bench.newest(1);
    bench.newest(2);
    bench.run(PTO);
    assert_eq!(bench.port(), Some(1), "whatever comes from the copier");
    bench.newest(1);
    bench.newest(2);
    bench.run(10 * PTO);
    assert_eq!(bench.port(), Some(1));
}

#[test]
fn a_forged_return_to_a_dead_address_moves_nothing() {
    let mut bench = Bench::new();
    bench.alive = vec![2];
    bench.newest(2);
    bench.run(3 * PTO);
    for _ in 0..20 {
        bench.newest(1);
        bench.newest(2);
        bench.run(PTO);
        assert_eq!(bench.port(), Some(2));
    }
    // Nor does it keep the far end from moving on.
    bench.alive = vec![3];
    for _ in 0..20 {
        bench.newest(1);
        bench.newest(3);
        bench.run(PTO);
    }
    assert_eq!(bench.port(), Some(3));
}

#[test]
fn without_a_path_the_first_address_that_answers_is_it() {
    let mut bench = Bench { paths: Paths::default(), ..Bench::new() };
    bench.alive = vec![2];
    bench.newest(3);
    bench.newest(2);
    bench.run(PTO);
    assert_eq!(bench.port(), Some(2));
    let mut bench = Bench { paths: Paths::default(), ..Bench::new() };
    bench.newest(3);
    let mut turns = Vec::new();
    for _ in 0..40 {
        while bench.paths.due_challenge(bench.clock.now()).is_some() {}
        bench.clock.advance(Duration::from_millis(100));
        turns.push(bench.paths.on_timeout(bench.clock.now()));
    }
    assert_eq!(turns.iter().filter(|turn| **turn == Turn::Failed).count(), 1);
}

impl Bench {
    /// The challenges that are due now: the port of each, and the most bytes that its packet may have.
    fn due(&mut self) -> Vec<(u16, usize)> {
        let now = self.clock.now();
        let due = std::iter::from_fn(|| self.paths.due_challenge(now));
        due.map(|(_, path, most)| (path.destination.port(), most)).collect()
    }
}

#[test]
fn an_old_packet_from_here_does_not_stop_a_genuine_move() {
    let mut bench = Bench::new();
    bench.alive = vec![2];
    for port in [1, 1, 1, 2] {
        bench.newest(port);
    }
    bench.packet(1, 2);
    bench.run(2 * PTO);
    assert_eq!(bench.port(), Some(2));
}

#[test]
fn a_new_address_may_be_sent_exactly_three_times_its_bytes() {
    let mut bench = Bench::new();
    bench.newest(2);
    assert_eq!(bench.due(), [(1, TRANSMIT_CAPACITY), (2, 300)]);
    // The first challenge took all of it; what came meanwhile is for the next.
    bench.newest(2);
    bench.newest(2);
    bench.clock.advance(CHALLENGE_INTERVAL);
    bench.paths.on_timeout(bench.clock.now());
    assert_eq!(bench.due().last(), Some(&(2, 600)));
    // No packet is smaller than a challenge needs.
    bench.clock.advance(CHALLENGE_INTERVAL);
    bench.paths.on_timeout(bench.clock.now());
    assert!(bench.due().iter().all(|(port, _)| *port == 1));
}

#[test]
fn an_answer_to_a_challenge_is_as_large_as_the_challenge_and_counts_against_what_may_be_sent() {
    let mut bench = Bench::new();
    assert_eq!(bench.paths.answer_bytes(&path(1), 100), 300);
    assert_eq!(bench.paths.answer_bytes(&path(1), 1_000), TRANSMIT_CAPACITY);
    bench.newest(2);
    bench.newest(3);
    assert_eq!(bench.paths.answer_bytes(&path(2), 100), 100);
    assert_eq!(bench.paths.answer_bytes(&path(4), 2_000), TRANSMIT_CAPACITY);
    assert_eq!(bench.due(), [(1, TRANSMIT_CAPACITY), (2, 200), (3, 300)]);
}

#[test]
fn other_addresses_are_tried_again_when_the_quiet_time_is_over() {
    for (wait, asked) in [(QUIET - Duration::from_nanos(1), 0), (QUIET, 2)] {
        let mut bench = Bench::new();
        bench.alive = vec![1];
        bench.newest(2);
        assert_eq!(bench.due().len(), 2);
        bench.newest(1);
        bench.clock.advance(wait);
        bench.newest(3);
        assert_eq!(bench.due().len(), asked, "after {wait:?}");
    }
}

#[test]
fn without_a_path_an_older_packet_shows_an_address_as_well() {
    let mut bench = Bench { paths: Paths::default(), ..Bench::new() };
    bench.packet(3, 9);
    bench.packet(2, 8);
    bench.alive = vec![2];
    bench.run(PTO);
    assert_eq!(bench.port(), Some(2));
}

#[test]
fn while_a_return_is_tried_no_other_address_is() {
    let mut bench = Bench::new();
    bench.alive = vec![2];
    bench.newest(2);
    bench.run(3 * PTO);
    assert_eq!(bench.port(), Some(2));
    bench.newest(1);
    bench.newest(3);
    bench.run(PTO);
    assert_eq!([bench.asked(1) > 3, bench.asked(3) > 0], [true, false]);
}

#[test]
fn three_addresses_are_tried_at_once_and_a_fourth_takes_the_place_of_the_oldest() {
    let mut bench = Bench::new();
    for port in [2, 3, 4] {
        bench.newest(port);
    }
    // What came last is the newest, wherever it stood.
    bench.newest(2);
    bench.newest(5);
    let ports: Vec<u16> = bench.due().into_iter().map(|(port, _)| port).collect();
    assert_eq!(ports, [1, 4, 2, 5]);
}

#[test]
fn of_two_addresses_that_answer_the_newest_is_it() {
    for (last, old) in [(2, false), (3, true)] {
        let mut bench = Bench::new();
        bench.alive = vec![2, 3];
        bench.newest(2);
        bench.newest(3);
        // An old packet does not make an address the newest.
        bench.packet(2, if old { 0 } else { 9 });
        bench.run(2 * PTO);
        assert_eq!(bench.port(), Some(last));
    }
}

#[test]
fn a_move_is_reported_once_with_the_address_before() {
    let mut bench = Bench::new();
    assert_eq!(bench.paths.take_moved(), None, "the first path replaces none");
    bench.alive = vec![2];
    bench.newest(2);
    bench.run(2 * PTO);
    assert_eq!(bench.paths.take_moved(), Some(path(1).destination));
    assert_eq!(bench.paths.take_moved(), None);
}

#[test]
fn an_address_that_does_not_answer_is_asked_each_quarter_of_a_second_for_three_seconds() {
    let mut bench = Bench { paths: Paths::default(), ..Bench::new() };
    let begun = bench.clock.now();
    bench.paths.validate(path(2), [9; 8], begun);
    let mut asked = Vec::new();
    let mut failed = None;
    while let Some(at) = bench.paths.poll_timeout() {
        asked.extend(bench.due().iter().map(|_| bench.clock.now() - begun));
        bench.clock.advance(at.saturating_duration_since(bench.clock.now()));
        // What is due stays due until it is sent.
        let turns = [(); 2].map(|()| bench.paths.on_timeout(bench.clock.now()));
        if turns.contains(&Turn::Failed) {
            failed = Some((bench.clock.now() - begun, turns));
        }
    }
    assert_eq!(asked, Vec::from_iter((0..12).map(|count| CHALLENGE_INTERVAL * count)));
    assert_eq!(failed, Some((VALIDATION_TIMEOUT, [Turn::Failed, Turn::Stays])));
}

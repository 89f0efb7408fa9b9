use wire::clock::{Clock, ManualClock};

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
        self.paths.present().map(|path| path.destination.port())
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

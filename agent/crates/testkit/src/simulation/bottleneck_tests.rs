//! What the model of a path promises, by counts and by times of arrival.
#![expect(clippy::disallowed_methods, reason = "a time to count from")]

use std::time::{Duration, Instant};

use crate::simulation::bottleneck::{
    Bottleneck, Counts, Disturbance, Gilbert, Jitter, Loss, Packet, Parameters, bytes_at, flip,
};

const ECT: u8 = 0b10;
const DSCP_EF: u8 = 0b1011_1000;

/// A bottleneck, its clock, and what has arrived of it.
struct Bed {
    begin: Instant,
    bottleneck: Bottleneck<u64>,
    sent: u64,
    /// When, since the beginning; which number; with which TOS byte.
    arrived: Vec<(Duration, u64, u8)>,
}

impl Bed {
    fn new(parameters: Parameters, seed: u64) -> Self {
        let (begin, bottleneck) = (Instant::now(), Bottleneck::new(parameters, seed));
        Self { begin, bottleneck, sent: 0, arrived: Vec::new() }
    }

    fn send(&mut self, at: Duration, bytes: usize, tos: u8) -> bool {
        self.run(at);
        self.sent += 1;
        self.bottleneck.enqueue(self.begin + at, Packet::new(bytes, tos, self.sent))
    }

    /// Takes what arrives until then, each packet at its time.
    fn run(&mut self, until: Duration) {
        while let Some(next) = self.bottleneck.next().filter(|next| *next <= self.begin + until) {
            while let Some(packet) = self.bottleneck.pop(next) {
                self.arrived.push((next - self.begin, packet.content, packet.tos));
            }
        }
    }

    fn finish(&mut self) -> Counts {
        self.run(Duration::from_secs(3600));
        let counts = self.bottleneck.counts;
        assert_eq!(self.bottleneck.held(), 0);
        assert_eq!(counts.came, self.sent);
        assert_eq!(counts.came + counts.duplicated, counts.passed + counts.lost() + counts.tail_dropped);
        assert_eq!(counts.passed, self.arrived.len() as u64);
        assert!(self.arrived.is_sorted_by_key(|(at, ..)| at));
        if counts.overtaken == 0 {
            assert!(self.arrived.is_sorted(), "order is kept");
        }
        counts
    }
}

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

#[test]
fn the_rate_is_exact_over_a_second_and_the_delay_is_added() {
    // 7 Mbit/s: 1000 bytes take a fraction of a nanosecond more than 1,142,857 ns.
    for (rate_bits, bytes) in [(200_000_000, 1500), (7_000_000, 1000), (1_000_000_000, 1452)] {
        let delay = Duration::from_millis(40);
        let mut bed = Bed::new(Parameters { rate_bits: Some(rate_bits), delay, ..Parameters::OPEN }, 1);
        let in_a_second = rate_bits / (8 * bytes as u64);
        for _ in 0..in_a_second + 10 {
            assert!(bed.send(Duration::ZERO, bytes, 0));
        }
        bed.run(delay + Duration::from_secs(1));
        assert_eq!(bed.arrived.len() as u64, in_a_second);
        let exact = u128::from(in_a_second) * bytes as u128 * 8_000_000_000 / u128::from(rate_bits);
        assert_eq!((bed.arrived.last().unwrap().0 - delay).as_nanos(), exact, "no rounding adds up");
        bed.finish();
    }
}

#[test]
fn a_full_queue_drops_what_comes_and_keeps_what_waits() {
    let (rate, time) = (8_000_000, Duration::from_millis(5));
    let queue_bytes = bytes_at(rate, time);
    assert_eq!(queue_bytes, 5000);
    let mut bed = Bed::new(Parameters { rate_bits: Some(rate), queue_bytes, ..Parameters::OPEN }, 1);
    // One in transmission, five wait; each takes a millisecond.
    let taken: Vec<bool> = (0..8).map(|_| bed.send(Duration::ZERO, 1000, 0)).collect();
    assert_eq!(taken, [true, true, true, true, true, true, false, false]);
    assert!(!bed.send(micros(999), 1000, 0));
    assert!(bed.send(micros(1000), 1000, 0), "one has left");
    assert!(!bed.send(micros(1000), 1, 0));
    let counts = bed.finish();
    assert_eq!((counts.passed, counts.tail_dropped, counts.most_queued_bytes), (7, 4, 5000));
    let times: Vec<u128> = bed.arrived.iter().map(|(at, ..)| at.as_millis()).collect();
    assert_eq!(times, [1, 2, 3, 4, 5, 6, 7], "work-conserving");
    // A gap in the load is not made up for.
    bed.send(Duration::from_secs(9000), 1000, 0);
    assert_eq!(bed.bottleneck.next(), Some(bed.begin + Duration::from_secs(9000) + micros(1000)));
}

#[test]
fn random_loss_takes_its_share_before_and_after_the_queue() {
    for seed in 1..=5 {
        let loss = Loss { random_ppm: 30_000, bursts: None };
        let rate_bits = Some(12_000_000);
        for parameters in [
            Parameters { before: loss, rate_bits, ..Parameters::OPEN },
            Parameters { after: loss, rate_bits, ..Parameters::OPEN },
        ] {
            let mut bed = Bed::new(parameters, seed);
            for _ in 0..100_000 {
                assert!(bed.send(Duration::ZERO, 1500, 0) || parameters.before == loss);
            }
            let counts = bed.finish();
            assert!((2_800..3_200).contains(&counts.lost_random), "seed {seed}: {counts:?}");
            assert_eq!((counts.lost_burst, counts.tail_dropped), (0, 0));
            // What is lost before the queue takes no part of the rate.
            let sent = if parameters.before == loss { counts.passed } else { 100_000 };
            let last = bed.arrived.last().unwrap().0.as_millis() as u64;
            assert!(last <= sent && last + 10 > sent, "seed {seed}: {last} ms for {sent} packets");
        }
    }
}

#[test]
fn bursts_have_their_mean_length_and_share() {
    for seed in 1..=5 {
        let bursts = Some(Gilbert::bursts(8, 20_000));
        let parameters = Parameters { before: Loss { random_ppm: 0, bursts }, ..Parameters::OPEN };
        let mut bed = Bed::new(parameters, seed);
        let kept: Vec<bool> = (0..400_000).map(|_| bed.send(Duration::ZERO, 1000, 0)).collect();
        let bursts = kept.windows(2).filter(|pair| pair[0] && !pair[1]).count() as f64;
        let lost = bed.finish().lost_burst as f64;
        let (share, length) = (lost / kept.len() as f64, lost / bursts);
        assert!((0.018..0.022).contains(&share), "seed {seed}: {share}");
        assert!((7.4..8.6).contains(&length), "seed {seed}: {length}");
    }
}

#[test]
fn elliotts_states_lose_their_own_shares() {
    let gilbert =
        Gilbert { to_bad_ppm: 10_000, to_good_ppm: 10_000, good_loss_ppm: 10_000, bad_loss_ppm: 500_000 };
    let loss = Loss { random_ppm: 100_000, bursts: Some(gilbert) };
    let mut bed = Bed::new(Parameters { after: loss, ..Parameters::OPEN }, 3);
    (0..200_000).for_each(|_| assert!(bed.send(Duration::ZERO, 1000, 0)));
    let counts = bed.finish();
    // Half of the time in either state: 25.5 %; of the rest a tenth.
    assert!((48_000..54_000).contains(&counts.lost_burst), "{counts:?}");
    assert!((14_000..16_000).contains(&counts.lost_random), "{counts:?}");
}

#[test]
fn a_seed_repeats_itself_and_another_does_not() {
    let loss = Loss { random_ppm: 50_000, bursts: Some(Gilbert::bursts(3, 50_000)) };
    let arrived = |seed| {
        let rate_bits = Some(50_000_000);
        let mut bed = Bed::new(Parameters { rate_bits, before: loss, after: loss, ..Parameters::OPEN }, seed);
        for number in 0..1000 {
            bed.send(micros(100 * number), 600, 0);
        }
        bed.finish();
        bed.arrived
    };
    assert_eq!(arrived(1), arrived(1));
    assert_ne!(arrived(1), arrived(2));
}

#[test]
fn above_the_threshold_ect_packets_are_marked_and_others_are_not() {
    let parameters = Parameters { rate_bits: Some(8_000_000), ecn_bytes: Some(2000), ..Parameters::OPEN };
    let mut bed = Bed::new(parameters, 1);
    // In transmission, then 0, 1000 and 2000 bytes wait: not above the threshold.
    for _ in 0..4 {
        bed.send(Duration::ZERO, 1000, DSCP_EF | ECT);
    }
    for tos in [DSCP_EF | ECT, 0b01, DSCP_EF, 0b11] {
        bed.send(Duration::ZERO, 1000, tos);
    }
    let counts = bed.finish();
    let tos: Vec<u8> = bed.arrived.iter().map(|(.., tos)| *tos).collect();
    let unmarked = DSCP_EF | ECT;
    assert_eq!(tos, [unmarked, unmarked, unmarked, unmarked, DSCP_EF | 0b11, 0b11, DSCP_EF, 0b11]);
    assert_eq!((counts.marked, counts.passed), (3, 8));
}

#[test]
fn a_step_changes_the_path_and_loses_nothing_that_waits() {
    let slow =
        Parameters { rate_bits: Some(8_000_000), delay: Duration::from_millis(50), ..Parameters::OPEN };
    let mut bed = Bed::new(slow, 1);
    for _ in 0..10 {
        bed.send(Duration::ZERO, 1000, 0);
    }
    // Two are sent and the third is half sent; then it is ten times as fast, the queue holds nothing, and the way is shorter.
    let now = micros(2500);
    let fast = Parameters { rate_bits: Some(80_000_000), queue_bytes: 0, delay: micros(10_000), ..slow };
    bed.bottleneck.set(bed.begin + now, fast);
    assert_eq!(bed.bottleneck.parameters, fast);
    assert!(!bed.send(now, 1000, 0), "the new limit holds");
    assert_eq!(bed.finish().tail_dropped, 1);
    let times: Vec<u128> = bed.arrived.iter().map(|(at, ..)| at.as_micros()).collect();
    // The first two are under way for 50 ms; the others would overtake them, and wait.
    assert_eq!(times, [51_000, 52_000, 52_000, 52_000, 52_000, 52_000, 52_000, 52_000, 52_000, 52_000]);
    bed.send(micros(60_000), 1000, 0);
    bed.finish();
    assert_eq!(bed.arrived.last().unwrap().0, micros(60_000 + 100 + 10_000));
}

/// The delays of 20,000 packets, one each 58 µs: 200 Mbit/s in packets of 1,452 bytes.
fn delays(jitter: Jitter, disturbance: Disturbance, seed: u64) -> (Vec<f64>, Counts) {
    let delay = Duration::from_millis(40);
    let mut bed = Bed::new(Parameters { delay, jitter, disturbance, ..Parameters::OPEN }, seed);
    (0..20_000).for_each(|number| assert!(bed.send(micros(58 * number), 1452, 0)));
    let counts = bed.finish();
    let delay = |(at, number, _): &(Duration, u64, u8)| (*at - micros(58 * (number - 1))).as_secs_f64() * 1e3;
    (bed.arrived.iter().map(delay).collect(), counts)
}

#[test]
fn uniform_jitter_gives_each_packet_a_delay_of_its_own() {
    let (delays, counts) = delays(Jitter::Uniform(Duration::from_millis(10)), Disturbance::default(), 5);
    assert!(delays.iter().all(|delay| (30.0..=50.0).contains(delay)));
    for tenth in 0..10 {
        let from = 30.0 + 2.0 * f64::from(tenth);
        let within = delays.iter().filter(|delay| (from..from + 2.0).contains(*delay)).count();
        assert!((1_850..2_150).contains(&within), "{within} of 20,000 from {from} ms");
    }
    assert!(counts.overtaken > 15_000, "{counts:?}");
    assert_eq!(counts.passed, 20_000);
}

#[test]
fn normal_jitter_has_the_deviation_that_it_names() {
    let (delays, counts) = delays(Jitter::Normal(Duration::from_millis(5)), Disturbance::default(), 6);
    let mean = delays.iter().sum::<f64>() / 20_000.0;
    let deviation = (delays.iter().map(|delay| (delay - mean).powi(2)).sum::<f64>() / 20_000.0).sqrt();
    assert!((mean - 40.0).abs() < 0.15 && (deviation - 5.0).abs() < 0.1, "{mean} ± {deviation}");
    let within = delays.iter().filter(|delay| (*delay - 40.0).abs() < 5.0).count();
    assert!((13_400..13_900).contains(&within), "{within} of 20,000 within one deviation: 68.3 %");
    assert!(counts.overtaken > 10_000);
}

#[test]
fn a_link_duplicates_and_damages_the_share_that_it_is_told() {
    let disturbance = Disturbance { duplicated_ppm: 20_000, corrupted_ppm: 10_000 };
    let (_, counts) = delays(Jitter::None, disturbance, 7);
    assert!((340..460).contains(&counts.duplicated) && (150..260).contains(&counts.corrupted), "{counts:?}");
    assert_eq!((counts.passed, counts.overtaken), (20_000 + counts.duplicated, 0));
    let mut bytes = [0; 3];
    flip(&mut bytes, 24 + 9);
    assert_eq!(bytes, [0, 2, 0]);
    flip(&mut [], 9);
}

//! Peers that are dialled again and again, in virtual time: deadlines wake the caller, a token bucket spreads a start at which all
//! are due at once, and a throttle keeps the log short. An hour of it takes milliseconds.
//!
//! `cargo run --example deadlines -p culvert-base`

use std::time::Duration;

use culvert_base::{
    clock::{Clock as _, ManualClock},
    ids::PeerId,
    throttle::Throttle,
    timers::Timers,
    token_bucket::{Allowance, Pace},
};

const PEERS: u32 = 100;
/// The time after which each peer is to be dialled again.
const AGAIN: Duration = Duration::from_secs(20);
/// All peers together may be dialled this often.
const DIALS: Pace = Pace { per_second: 10, at_once: 50 };
const HOUR: Duration = Duration::from_secs(3600);

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() {
    let clock = ManualClock::default();
    let end = clock.now() + HOUR;
    let mut timers = Timers::default();
    let mut allowance = Allowance::new(DIALS, clock.now());
    let mut throttle = Throttle::new(HOUR / 6);
    (0..PEERS).for_each(|peer| timers.arm(PeerId(peer), clock.now()));

    let (mut wakes, mut dials, mut lines) = (0, 0, 0);
    while let Some(next) = timers.next().filter(|next| *next < end) {
        clock.advance(next.saturating_duration_since(clock.now()));
        let now = clock.now();
        wakes += 1;
        while let Some(peer) = timers.pop(now) {
            if !allowance.take(1, now) {
                // All who wait are woken for the next token, and all but one of them wait again.
                timers.arm(peer, allowance.next(now));
                continue;
            }
            dials += 1;
            timers.arm(peer, now + AGAIN);
            if let Some(held_back) = throttle.allow(now) {
                lines += 1;
                println!(
                    "{:>4} s: {peer:?} is dialled; {held_back} lines held back",
                    clock.elapsed().as_secs()
                );
            }
        }
        if wakes == 1 {
            println!("of {PEERS} peers that are due at once, {dials} are dialled at once");
            assert_eq!(dials, DIALS.at_once);
        }
    }
    println!("an hour: {wakes} wake-ups, {dials} dials, {lines} lines of the log");
    assert_eq!(u64::from(dials), u64::from(PEERS) * (HOUR.as_secs() / AGAIN.as_secs()));
    assert_eq!(lines, 6);
}

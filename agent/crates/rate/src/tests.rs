use std::sync::Arc;

use base::clock::{Clock, ManualClock};

use super::{auto::Sample, *};

const US: Duration = Duration::from_micros(1);

/// Lets a sender with always something to send run for a second; the bytes of each millisecond.
fn departures(
    mut release: impl FnMut(Instant) -> Release,
    mut spend: impl FnMut(u64, Instant),
    late: Duration,
) -> Vec<u64> {
    let start = ManualClock::default().now();
    let (mut now, mut bins) = (start, vec![0; 1100]);
    while now < start + Duration::from_secs(1) {
        match release(now) {
            Release::Bytes(most) => {
                let burst = most / 1480 * 1480;
                let burst = burst.max(1480);
                spend(burst, now);
                bins[(now - start).as_millis() as usize] += burst;
                now += 10 * US;
            }
            Release::At(at) => {
                assert!(at > now);
                now = at + late;
            }
        }
    }
    bins
}

#[test]
fn a_pacer_keeps_its_rate_in_bursts_of_a_millisecond() {
    for (rate, late) in [(25_000_000, Duration::ZERO), (25_000_000, 3000 * US), (125_000, Duration::ZERO)] {
        let pacer = std::cell::RefCell::new(Pacer::new(ManualClock::default().now()));
        let bins = departures(
            |now| pacer.borrow_mut().release(rate, 1452, now),
            |bytes, _| pacer.borrow_mut().spend(bytes),
            late,
        );
        let sum: u64 = bins.iter().sum();
        let burst = (rate / 1000).max(2 * 1452);
        assert!(sum.abs_diff(rate) <= rate / 100 + 6 * burst, "{rate} late by {late:?}: {sum}");
        let most = bins.iter().copied().max().unwrap_or_default();
        let lateness = bytes_in(rate, late);
        assert!(most <= 2 * burst + lateness + 2 * 1480, "{rate} late by {late:?}: {most} in a millisecond");
    }
}

#[test]
fn an_account_is_a_ceiling_for_all_of_its_senders_together() {
    let account = RateAccount::default();
    account.set_limit(Limit::Fixed(25_000_000), 0, ManualClock::default().now());
    let mut sum = 0;
    let bins = departures(
        |now| account.release(now),
        |bytes, now| {
            account.charge(bytes, 1, now);
            account.charge(1480, 1, now);
        },
        Duration::ZERO,
    );
    sum += bins.iter().sum::<u64>();
    assert!(sum < 25_000_000, "the other sender has its part: {sum}");
    assert!(sum > 20_000_000, "{sum}");
}

#[test]
fn an_account_without_a_rate_never_waits() {
    let now = ManualClock::default().now();
    let account = RateAccount::default();
    account.charge(1 << 40, 1, now);
    assert_eq!(account.release(now), Release::Bytes(u64::MAX));
    account.set_limit(Limit::Fixed(1000), 0, now);
    account.charge(1000, 1, now);
    assert!(matches!(account.release(now), Release::At(at) if at > now + Duration::from_millis(900)));
}

/// Lets senders with `waiting` flows each send for two seconds, as timers wake them; the bytes of each in the second one.
fn shares(account: &Arc<RateAccount>, waiting: &[usize]) -> Vec<u64> {
    let start = ManualClock::default().now();
    let mut senders: Vec<(Share, Instant, u64)> =
        waiting.iter().map(|_| (Share::new(Arc::clone(account), start), start, 0)).collect();
    for ((share, ..), flows) in senders.iter_mut().zip(waiting) {
        share.set_waiting(*flows);
    }
    let (mut now, middle) = (start, start + Duration::from_secs(1));
    while now < start + Duration::from_secs(2) {
        for (share, at, sent) in senders.iter_mut().filter(|(_, at, _)| *at <= now) {
            match share.release(now) {
                Release::At(next) => *at = next,
                Release::Bytes(most) => {
                    let packets = (most / 1_480).max(1);
                    share.spend(packets * 1_480);
                    account.charge(packets * 1_480, packets, now);
                    *sent += if now >= middle { packets * 1_480 } else { 0 };
                }
            }
        }
        now += 20 * US;
    }
    senders.into_iter().map(|(_, _, sent)| sent).collect()
}

#[test]
fn workers_share_the_rate_by_the_flows_that_wait_there() {
    let account = Arc::new(RateAccount::default());
    account.set_limit(Limit::Fixed(6_250_000), 0, ManualClock::default().now());
    let sent = shares(&account, &[7, 1]);
    let sum: u64 = sent.iter().sum();
    assert!(sum.abs_diff(6_250_000) < 125_000, "{sent:?}");
    assert!(sent[0] * 8 > sum * 6 && sent[1] * 9 > sum, "an eighth each: {sent:?}");
    assert_eq!(account.waiting(), 0, "senders that are gone wait for nothing");
}

/// A report about packets of one lane that all arrived `delay` after they left, `bytes` until `sent_at`.
fn arrived(bytes: u64, sent_at: Instant, start: Instant, delay: Duration) -> Sample {
    let packets = bytes / 1_500;
    Sample {
        lane: 0,
        epoch: 1,
        sent_at,
        arrived_micros: 1_000_000 + (sent_at + delay - start).as_micros() as u64,
        packets_sent: packets,
        packets,
        bytes,
        marked: 0,
        smoothed_rtt: 2 * delay,
        min_rtt: 2 * delay,
    }
}

#[test]
fn an_automatic_rate_follows_reports_within_its_bounds_and_the_far_ends_wish() {
    let (account, start) = (RateAccount::default(), ManualClock::default().now());
    let limits = AutoLimits { min: 10_000, max: Some(4_000_000) };
    account.set_limit(Limit::Auto(limits), 0, start);
    assert_eq!((account.rate(), account.is_measured()), (Some(auto::law::START), true));
    let (mut now, mut sent) = (start, 0);
    let mut run = |account: &RateAccount, milliseconds: u64| {
        for millisecond in 0..milliseconds {
            now += 1000 * US;
            while let Release::Bytes(_) = account.release(now) {
                account.charge(1_500, 1, now);
                sent += 1_500;
            }
            if millisecond % 25 == 0 {
                account.report(&arrived(sent, now, start, Duration::from_millis(10)), now);
            }
        }
        now
    };
    let now = run(&account, 3_000);
    assert_eq!(account.rate(), Some(4_000_000), "nothing ever filled the path");
    let measured = account.auto_view(now).unwrap().measured.unwrap();
    assert!(measured.is_at_ceiling && !account.congested(), "{measured:?}");
    assert!((3_500_000..4_500_000).contains(&measured.figures.delivered), "{measured:?}");
    assert!(measured.figures.reports >= 119);
    // The far end wants less: nor is more tried.
    account.set_granted(Some(1_000_000), now);
    let now = run(&account, 3_000);
    assert_eq!((account.rate(), account.is_granted()), (Some(1_000_000), true));
    account.set_granted(None, now);
    assert_eq!(account.rate(), Some(1_000_000), "it begins from there");
    // Setting the same again changes nothing; without reports the ceiling is the rate; a number ends the law.
    account.set_limit(Limit::Auto(limits), 0, now);
    assert_eq!(account.rate(), Some(1_000_000));
    account.set_measurable(false, now);
    assert_eq!((account.rate(), account.is_measured()), (Some(4_000_000), false));
    account.report(&arrived(1, now, start, Duration::ZERO), now);
    account.set_limit(Limit::Auto(AutoLimits { max: None, ..limits }), 0, now);
    assert_eq!(account.rate(), None);
    account.set_measurable(true, now);
    assert_eq!(account.rate(), Some(auto::law::START));
    account.set_limit(Limit::Fixed(50_000), 0, now);
    assert_eq!((account.rate(), account.auto_view(now), account.is_measured()), (Some(50_000), None, false));
    account.set_limit(Limit::Auto(limits), 0, now);
    assert_eq!(account.rate(), Some(50_000), "it begins with the number");
}

#[test]
fn the_lower_of_both_ends_limits_counts_and_overhead_is_charged() {
    let (account, now) = (RateAccount::default(), ManualClock::default().now());
    account.set_granted(Some(1_000), now);
    assert_eq!((account.rate(), account.is_granted()), (Some(1_000), true));
    account.set_limit(Limit::Fixed(500), 40, now);
    assert_eq!((account.rate(), account.is_granted()), (Some(500), false));
    account.charge(460, 1, now);
    assert!(matches!(account.release(now), Release::At(at) if at > now + Duration::from_millis(950)));
    account.set_limit(Limit::None, 0, now);
    assert_eq!(account.rate(), Some(1_000));
    account.set_granted(None, now);
    assert_eq!(account.rate(), None);
}

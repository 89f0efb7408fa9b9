//! The accounts of one peer: of all that is sent to it, and of each of its lines.
//!
//! ```text
//!   peer.rate        one way        several lines: each line                   all lines together
//!   none             no limit       uplink.rate at the dialler, or no limit    no limit
//!   a number         the number     the same                                   the number
//!   "auto"           a law          a law of its own                           peer.rate_max, or no limit
//! ```

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Instant,
};

use base::panics::lock;

use super::{Limit, RateAccount};

/// The most lines of a peer.
pub const MOST_LINES: usize = 8;

/// The limits of the lines of a peer, in bytes a second, by their numbers; `None` for a line without one.
pub type LineLimits = [Option<u64>; MOST_LINES];

/// The accounts of one peer.
#[derive(Debug, Default)]
pub struct RateAccounts {
    whole: Arc<RateAccount>,
    /// Made when the peer first has several lines.
    lines: OnceLock<[Arc<RateAccount>; MOST_LINES]>,
    settings: Mutex<Settings>,
}

/// What the limits of the accounts follow from.
#[derive(Debug)]
struct Settings {
    limit: Limit,
    overhead: u32,
    is_measurable: bool,
    granted: Option<u64>,
    /// `None` while there is one way to the peer.
    lines: Option<LineLimits>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { limit: Limit::None, overhead: 0, is_measurable: true, granted: None, lines: None }
    }
}

impl RateAccounts {
    /// The account of all that is sent to the peer.
    #[must_use]
    pub fn whole(&self) -> &Arc<RateAccount> {
        &self.whole
    }

    /// The account of a line; that of all lines if there is no such line.
    #[must_use]
    pub fn line(&self, line: u8) -> &Arc<RateAccount> {
        self.lines.get().and_then(|lines| lines.get(usize::from(line))).unwrap_or(&self.whole)
    }

    /// Changes our own limit, and what the path adds to each IP packet; what was sent stays charged.
    pub fn set_limit(&self, limit: Limit, overhead: u32, now: Instant) {
        let mut settings = lock(&self.settings);
        (settings.limit, settings.overhead) = (limit, overhead);
        self.apply(&settings, now);
    }

    /// Notes the lines over which the peer is reached, or that there is one way. Laws of lines go on where they were.
    pub fn set_lines(&self, lines: Option<LineLimits>, now: Instant) {
        let mut settings = lock(&self.settings);
        if settings.lines == lines {
            return;
        }
        settings.lines = lines;
        if lines.is_some() && self.lines.get().is_none() {
            let lines = self.lines.get_or_init(Default::default);
            for line in lines {
                line.set_measurable(settings.is_measurable, now);
                line.set_granted(settings.granted, now);
            }
        }
        self.apply(&settings, now);
    }

    /// Notes whether the far end reports what arrives: without reports an automatic rate is unlimited, or `peer.rate_max`.
    pub fn set_measurable(&self, is_measurable: bool, now: Instant) {
        lock(&self.settings).is_measurable = is_measurable;
        self.all().for_each(|account| account.set_measurable(is_measurable, now));
    }

    /// Changes the most that the far end wants to receive on all lines together, in bytes a second.
    pub fn set_granted(&self, rate: Option<u64>, now: Instant) {
        lock(&self.settings).granted = rate;
        self.all().for_each(|account| account.set_granted(rate, now));
    }

    fn all(&self) -> impl Iterator<Item = &Arc<RateAccount>> {
        [&self.whole].into_iter().chain(self.lines.get().into_iter().flatten())
    }

    fn apply(&self, settings: &Settings, now: Instant) {
        let Settings { limit, overhead, lines, .. } = *settings;
        let (whole, of_lines) = match (limit, lines) {
            (limit, None) => (limit, [Limit::None; MOST_LINES]),
            (Limit::Auto(limits), Some(_)) => {
                (limits.max.map_or(Limit::None, Limit::Fixed), [limit; MOST_LINES])
            }
            (limit, Some(lines)) => (limit, lines.map(|rate| rate.map_or(Limit::None, Limit::Fixed))),
        };
        self.whole.set_limit(whole, overhead, now);
        for (account, limit) in self.lines.get().into_iter().flatten().zip(of_lines) {
            account.set_limit(limit, overhead, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::clock::{Clock, ManualClock};

    use super::*;
    use crate::{AutoLimits, Release, Share};

    const LINES: LineLimits = [Some(1_000), None, None, None, None, None, None, None];

    #[test]
    fn the_limits_of_lines_follow_from_the_rate_and_from_the_lines_in_any_order() {
        let now = ManualClock::default().now();
        let auto = Limit::Auto(AutoLimits { min: 8_000, max: Some(1_000_000) });
        let is_measured = |rates: &RateAccounts| [0, 1].map(|line| rates.line(line).is_measured());
        for lines_first in [true, false] {
            let rates = RateAccounts::default();
            if lines_first {
                rates.set_lines(Some(LINES), now);
            }
            rates.set_limit(Limit::Fixed(5_000), 0, now);
            rates.set_lines(Some(LINES), now);
            let all =
                |rates: &RateAccounts| (rates.whole().rate(), [0, 1].map(|line| rates.line(line).rate()));
            assert_eq!(all(&rates), (Some(5_000), [Some(1_000), None]));
            rates.set_limit(auto, 0, now);
            assert_eq!(rates.whole().rate(), Some(1_000_000), "what all lines may have");
            assert_eq!((is_measured(&rates), rates.whole().is_measured()), ([true; 2], false));
            rates.set_granted(Some(9_000), now);
            assert_eq!(rates.whole().rate(), Some(9_000), "the far end limits the sum");
            rates.set_granted(None, now);
            rates.set_lines(None, now);
            assert_eq!((is_measured(&rates), rates.whole().is_measured()), ([false; 2], true));
            rates.set_limit(Limit::None, 0, now);
            assert_eq!(all(&rates), (None, [None; 2]));
        }
    }

    #[test]
    fn lines_share_a_limit_on_the_whole_and_none_takes_more_than_its_own() {
        let start = ManualClock::default().now();
        let rates = RateAccounts::default();
        rates.set_limit(Limit::Fixed(3_000_000), 0, start);
        rates.set_lines(Some([Some(500_000), None, None, None, None, None, None, None]), start);
        let share = |line| {
            let mut share = Share::of_line(Arc::clone(rates.line(line)), Arc::clone(rates.whole()), start);
            share.set_waiting(2);
            share
        };
        // The first one is always asked first.
        let mut shares = [share(0), share(1), share(2)];
        let (mut sent, mut now) = ([0_u64; 3], start);
        while now < start + Duration::from_secs(4) {
            for (share, sent) in shares.iter_mut().zip(&mut sent) {
                if let Release::Bytes(most) = share.release(now) {
                    let packets = (most / 1_480).max(1);
                    share.spend(packets * 1_480);
                    share.charge(packets * 1_480, packets, now);
                    *sent += packets * 1_480;
                }
            }
            now += Duration::from_micros(50);
        }
        let [first, second, third] = sent.map(|sent| sent / 4);
        assert!(first.abs_diff(500_000) < 30_000, "its own rate: {sent:?}");
        // What the first one leaves of its part is not shared out (decision 0037).
        assert!(second.abs_diff(1_000_000) < 60_000 && third.abs_diff(1_000_000) < 60_000, "{sent:?}");
        drop(shares);
        assert_eq!([0, 1].map(|line| rates.line(line).waiting()), [0, 0]);
        assert_eq!(rates.whole().waiting(), 0);
    }
}

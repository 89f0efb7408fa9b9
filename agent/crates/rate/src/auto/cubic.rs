//! The window of CUBIC (RFC 9438), as a rate: how a sender competes that others' queues would otherwise starve.

/// Bytes of a packet, as growth is counted in packets.
const PACKET: f64 = 1500.0;
/// RFC 9438 §5: window growth in packets per cubed second, and what a loss leaves.
const GROWTH: f64 = 0.4;
const AFTER_LOSS: f64 = 0.7;

/// A CUBIC window in bytes. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct CubicWindow {
    window: f64,
    before_loss: f64,
    epoch: f64,
    /// The window of Reno since the last loss (RFC 9438 §4.3).
    reno: f64,
    updated: f64,
}

impl CubicWindow {
    /// A window that carries `rate` at a round trip of `rtt`, as if it had just reached its former maximum.
    pub(super) fn new(rate: f64, rtt: f64, now: f64) -> Self {
        let window = rate * rtt;
        let plateau = Self { window, before_loss: window, epoch: now, reno: window, updated: now };
        Self { epoch: now - plateau.climb(), ..plateau }
    }

    /// Bytes a second at a round trip of `rtt`.
    pub(super) fn rate(&self, rtt: f64) -> f64 {
        self.window / rtt.max(0.001)
    }

    /// Lets the window not have grown since it was last asked.
    pub(super) fn pause(&mut self, now: f64) {
        self.epoch += (now - self.updated).max(0.0);
        self.updated = now;
    }

    /// Lets the window grow until `now`; `used`: the rate was needed.
    pub(super) fn grow(&mut self, rtt: f64, used: bool, now: f64) {
        if !used {
            self.pause(now);
            return;
        }
        let elapsed = (now - self.updated).max(0.0);
        self.updated = now;
        let rounds = elapsed / rtt.max(0.001);
        let target = self.before_loss + GROWTH * (now - self.epoch - self.climb()).powi(3) * PACKET;
        self.reno += 0.53 * PACKET * rounds;
        let most = self.window * (1.0 + 0.5 * rounds);
        self.window = target.max(self.reno).clamp(self.window, most.max(self.window));
    }

    /// Something was lost, or marked, that the path does not lose by itself.
    pub(super) fn reduce(&mut self, now: f64) {
        self.before_loss = if self.window < self.before_loss { self.window * 0.85 } else { self.window };
        self.window = (self.window * AFTER_LOSS).max(2.0 * PACKET);
        self.reno = self.window;
        self.epoch = now;
    }

    /// Seconds from a loss until the window is what it was before (K of RFC 9438 §4.2).
    fn climb(&self) -> f64 {
        (self.before_loss * (1.0 - AFTER_LOSS) / PACKET / GROWTH).cbrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_returns_to_its_maximum_and_then_grows_beyond() {
        let rtt = 0.1;
        let mut window = CubicWindow::new(1.5e6, rtt, 0.0);
        window.reduce(1.0);
        assert!((window.rate(rtt) - 1.05e6).abs() < 1.0);
        let mut reached = None;
        for step in 0..4000 {
            let now = 1.0 + f64::from(step) * 0.01;
            window.grow(rtt, true, now);
            if window.rate(rtt) > 1.49e6 && reached.is_none() {
                reached = Some(now);
            }
        }
        // 100 packets: K is the cube root of 30/0.4, 4.2 s; one packet short of it, 1.3 s earlier.
        assert!((3.5..5.5).contains(&reached.unwrap_or(0.0)), "{reached:?}");
        assert!(window.rate(rtt) > 2e6);
    }

    #[test]
    fn a_rate_that_is_not_used_does_not_grow() {
        let mut window = CubicWindow::new(1.5e6, 0.1, 0.0);
        for step in 0..1000 {
            window.grow(0.1, false, f64::from(step) * 0.1);
        }
        window.grow(0.1, true, 100.0);
        assert!((window.rate(0.1) - 1.5e6).abs() < 3e4, "{}", window.rate(0.1));
    }
}

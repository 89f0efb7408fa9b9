//! Bytes that may be sent for repair: a share of the bytes that were sent anyway (pure).

/// A whole in millionths, the unit of shares.
pub(super) const WHOLE_PPM: u32 = 1_000_000;

/// An account that gains a share of each payload, and pays for repairs. It may owe the rest of one repair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Credit {
    share_ppm: u32,
    /// The credit in millionths of a byte; negative while something is owed.
    balance: i64,
    most: i64,
}

impl Credit {
    /// An empty account that saves up to `most_bytes`.
    pub(super) fn new(most_bytes: u32) -> Self {
        Self { share_ppm: 0, balance: 0, most: i64::from(most_bytes) * i64::from(WHOLE_PPM) }
    }

    pub(super) fn set_share(&mut self, ppm: u32) {
        self.share_ppm = ppm;
    }

    pub(super) fn earn(&mut self, bytes: usize) {
        let earned = i64::from(self.share_ppm) * bytes as i64;
        self.balance = self.balance.saturating_add(earned).min(self.most);
    }

    /// Adds bytes that nothing has earned.
    pub(super) fn grant(&mut self, bytes: usize) {
        self.balance = self.balance.saturating_add(bytes as i64 * i64::from(WHOLE_PPM)).min(self.most);
    }

    /// Whether all of `bytes` are there.
    pub(super) fn covers(&self, bytes: usize) -> bool {
        self.balance >= bytes as i64 * i64::from(WHOLE_PPM)
    }

    pub(super) fn is_positive(&self) -> bool {
        self.balance > 0
    }

    pub(super) fn spend(&mut self, bytes: usize) {
        self.balance -= bytes as i64 * i64::from(WHOLE_PPM);
    }
}

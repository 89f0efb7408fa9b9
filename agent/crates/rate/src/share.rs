//! One sender's share of a peer's rate.

use std::{sync::Arc, time::Instant};

use super::{Pacer, RateAccount, Release};

/// The packet size by which bursts are measured, in bytes: Ethernet's.
const PACKET: u64 = 1_500;

/// The share of a peer's rate that one worker's queue has, or one connection: as many parts as it has flows that wait.
#[derive(Debug)]
pub struct Share {
    /// The account that it is a part of.
    pub account: Arc<RateAccount>,
    pacer: Pacer,
    /// The number of its flows that wait, as the account knows it.
    waiting: u32,
}

impl Share {
    /// A share of `account` in which nothing waits.
    #[must_use]
    pub fn new(account: Arc<RateAccount>, now: Instant) -> Self {
        Self { account, pacer: Pacer::new(now), waiting: 0 }
    }

    /// Whether the rate to the peer is limited.
    #[inline]
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.account.rate().is_some()
    }

    /// Notes how many flows wait here.
    pub fn set_waiting(&mut self, flows: usize) {
        let flows = u32::try_from(flows).unwrap_or(u32::MAX);
        if flows != self.waiting {
            self.account.add_waiting(self.waiting, flows);
            self.waiting = flows;
        }
    }

    /// The bytes that may leave now, of the share and of the whole; everything if there is no limit.
    pub fn release(&mut self, now: Instant) -> Release {
        let Some(rate) = self.account.rate() else { return Release::Bytes(u64::MAX) };
        let own = u64::from(self.waiting.max(1));
        let all = u64::from(self.account.waiting()).max(own);
        let of_share = self.pacer.release((rate * own / all).max(1), PACKET, now);
        match (of_share, self.account.release(now)) {
            (Release::Bytes(share), Release::Bytes(whole)) => Release::Bytes(share.min(whole)),
            (Release::At(share), Release::At(whole)) => Release::At(share.max(whole)),
            (at @ Release::At(_), _) | (_, at) => at,
        }
    }

    /// Takes `bytes` that have left from the share; the account is charged with the packets in which they leave.
    pub fn spend(&mut self, bytes: u64) {
        self.pacer.spend(bytes);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set_waiting(0);
    }
}

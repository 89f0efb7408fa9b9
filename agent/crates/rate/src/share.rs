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
    /// The share of the whole rate to the peer, if `account` is that of one of several lines.
    whole: Option<Box<Self>>,
}

impl Share {
    /// A share of `account` in which nothing waits.
    #[must_use]
    pub fn new(account: Arc<RateAccount>, now: Instant) -> Self {
        Self { account, pacer: Pacer::new(now), waiting: 0, whole: None }
    }

    /// A share of the rate of one line, and of the `whole` rate to the peer.
    #[must_use]
    pub fn of_line(line: Arc<RateAccount>, whole: Arc<RateAccount>, now: Instant) -> Self {
        let mut share = Self::new(line, now);
        share.whole = Some(Box::new(Self::new(whole, now)));
        share
    }

    /// The limit, in bytes a second: the lower one, if there are two.
    #[inline]
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        let whole = self.whole.as_ref().and_then(|whole| whole.account.rate());
        self.account.rate().into_iter().chain(whole).min()
    }

    /// Whether the rate to the peer is limited.
    #[inline]
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.account.rate().is_some() || self.whole.as_ref().is_some_and(|whole| whole.is_limited())
    }

    /// Notes how many flows wait here.
    pub fn set_waiting(&mut self, flows: usize) {
        let flows = u32::try_from(flows).unwrap_or(u32::MAX);
        if flows != self.waiting {
            self.account.add_waiting(self.waiting, flows);
            self.waiting = flows;
            if let Some(whole) = &mut self.whole {
                whole.set_waiting(flows as usize);
            }
        }
    }

    /// The bytes that may leave now, of the share and of the whole; everything if there is no limit.
    pub fn release(&mut self, now: Instant) -> Release {
        let own = self.release_own(now);
        match &mut self.whole {
            Some(whole) => later(own, whole.release_own(now)),
            None => own,
        }
    }

    fn release_own(&mut self, now: Instant) -> Release {
        let Some(rate) = self.account.rate() else { return Release::Bytes(u64::MAX) };
        let own = u64::from(self.waiting.max(1));
        let all = u64::from(self.account.waiting()).max(own);
        let of_share = self.pacer.release((rate * own / all).max(1), PACKET, now);
        later(of_share, self.account.release(now))
    }

    /// Whether a flow that sends less than its share may leave although the rate is used up.
    #[must_use]
    pub fn may_overdraw(&self, now: Instant) -> bool {
        self.account.may_overdraw(now)
            && self.whole.as_ref().is_none_or(|whole| whole.account.may_overdraw(now))
    }

    /// Takes `bytes` that have left from the share; the account is charged with the packets in which they leave.
    pub fn spend(&mut self, bytes: u64) {
        self.pacer.spend(bytes);
        if let Some(whole) = &mut self.whole {
            whole.spend(bytes);
        }
    }

    /// Charges the account with `packets` IP packets of `bytes` bytes together that have left, and that of the whole rate.
    pub fn charge(&self, bytes: u64, packets: u64, now: Instant) {
        self.account.charge(bytes, packets, now);
        if let Some(whole) = &self.whole {
            whole.account.charge(bytes, packets, now);
        }
    }
}

/// What both let go: the fewer bytes, or the later time.
fn later(one: Release, other: Release) -> Release {
    match (one, other) {
        (Release::Bytes(one), Release::Bytes(other)) => Release::Bytes(one.min(other)),
        (Release::At(one), Release::At(other)) => Release::At(one.max(other)),
        (at @ Release::At(_), _) | (_, at) => at,
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set_waiting(0);
    }
}

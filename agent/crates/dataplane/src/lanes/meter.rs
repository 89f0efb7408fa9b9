//! What a lane has carried: for its rates, and for the account of the peer's rate.

use std::time::Instant;

use base::sampler::{Growth, Sampler};
use quic_core::LaneStats;
use rate::Share;

/// What a lane has carried, sampled for its rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneTraffic {
    pub sent_packets: u64,
    pub sent_bytes: u64,
    pub received_packets: u64,
    pub received_bytes: u64,
    /// Packets that were declared lost, without spuriously lost ones.
    pub lost_packets: u64,
}

#[derive(Debug)]
pub struct Meter {
    opened: Instant,
    sampler: Sampler<LaneTraffic>,
    /// The packets and bytes that the account was last charged with, while there is a rate.
    charged: Option<(u64, u64)>,
}

impl Meter {
    pub(super) fn new(opened: Instant) -> Self {
        Self { opened, sampler: Sampler::new(opened), charged: None }
    }

    #[must_use]
    pub fn opened(&self) -> Instant {
        self.opened
    }

    /// Takes a sample for the rates.
    pub fn sample(&mut self, stats: &LaneStats, now: Instant) {
        let traffic = LaneTraffic {
            sent_packets: stats.sealed_packets,
            sent_bytes: stats.sealed_bytes,
            received_packets: stats.opened_packets,
            received_bytes: stats.opened_bytes,
            lost_packets: stats.missing_packets(),
        };
        self.sampler.sample(traffic, now);
    }

    /// The growth between the last two samples; `None` before the first.
    #[must_use]
    pub fn growth(&self) -> Option<Growth<LaneTraffic>> {
        self.sampler.last()
    }

    /// Charges the accounts of `share` with the packets that were sealed since the last call, if they limit the rate; `headers` are the
    /// bytes around each.
    pub(super) fn charge(
        &mut self,
        stats: &LaneStats,
        headers: impl FnOnce() -> u64,
        share: &Share,
        now: Instant,
    ) {
        if !share.is_limited() {
            self.charged = None;
            return;
        }
        let sealed = (stats.sealed_packets, stats.sealed_bytes);
        let charged = self.charged.replace(sealed);
        let (packets, bytes) =
            charged.map_or((0, 0), |(packets, bytes)| (sealed.0 - packets, sealed.1 - bytes));
        if packets > 0 {
            share.charge(bytes + packets * headers(), packets, now);
        }
    }
}

//! What a peer sends on streams although it was told to send less (`peer.rate_receive`): it waits, and QUIC's windows hold the sender.

use std::{sync::Arc, time::Instant};

use base::ids::PeerId;
use dataplane::relay::Held;
use rate::RateAccount;

use crate::worker::context::Context;

/// The rate that a forward's peer was told, while the forward is served.
pub(super) struct Toll {
    account: Option<Arc<RateAccount>>,
    /// When streams of the peer are read again, if they have to wait.
    rests_until: Option<Instant>,
}

impl Toll {
    /// Of forwards of `peer`.
    pub(super) fn of(cx: &Context, peer: PeerId, now: Instant) -> Self {
        let data = cx.peers.get(peer).map(|peer| &peer.data);
        let told = data.filter(|data| data.config.rate_receive.is_some() || data.relay.held != Held::Free);
        let account = told.map(|data| Arc::clone(&data.relay.share.account));
        let rests_until = account.as_ref().and_then(|account| account.received().rests_until(now));
        Self { account, rests_until }
    }

    /// The number of bytes that the forward may take from its stream now.
    pub(super) fn takes(&self) -> usize {
        match (&self.account, self.rests_until) {
            (None, _) => usize::MAX,
            (Some(_), Some(_)) => 0,
            (Some(account), None) => account.received().at_once(),
        }
    }

    /// When a forward is served again that has bytes of its stream left because it may not take them.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.rests_until
    }

    /// Charges the peer for the bytes that came.
    pub(super) fn charge(&self, bytes: u64, now: Instant) {
        if let Some(account) = &self.account {
            account.received().charge(bytes, now);
        }
    }
}

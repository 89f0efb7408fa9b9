//! What a peer sends on streams although it was told to send less (`peer.rate_receive`): it waits, and QUIC's windows hold the sender.

use std::{sync::Arc, time::Instant};

use base::ids::PeerId;
use dataplane::forward::tcp::TcpId;
use rate::RateAccount;

use crate::worker::context::{Context, timer::Timer};

/// The rate that a forward's peer was told, while the forward is served.
pub(super) struct Toll {
    account: Option<Arc<RateAccount>>,
    /// When its stream is read again, if it has to wait.
    rests_until: Option<Instant>,
}

impl Toll {
    /// Of forwards of `peer`.
    pub(super) fn of(cx: &Context, peer: PeerId, now: Instant) -> Self {
        let data = cx.peers.get(peer).map(|peer| &peer.data);
        let told = data.filter(|data| data.config.rate_receive.is_some());
        let account = told.map(|data| Arc::clone(&data.relay.share.account));
        let rests_until = account.as_ref().and_then(|account| account.received().rests_until(now));
        Self { account, rests_until }
    }

    /// Whether streams are read now.
    pub(super) fn takes_streams(&self) -> bool {
        self.rests_until.is_none()
    }

    /// Charges the peer for the bytes that came, and has the forward looked at when it may go on.
    pub(super) fn settle(&self, cx: &mut Context, forward: TcpId, bytes: u64, now: Instant) {
        if let Some(account) = &self.account {
            account.received().charge(bytes, now);
        }
        if let Some(at) = self.rests_until {
            cx.timers.arm(Timer::Tcp(forward), at);
        }
    }
}

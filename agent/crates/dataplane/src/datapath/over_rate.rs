//! What a peer sends although it was told to send less (`peer.rate_receive`), or has used up its quota:
//! [`Downlink::packet`](crate::datapath::downlink) asks for each packet, before its frames are looked at.

use base::ids::PeerId;
use wire::context::Context;

use crate::{
    datapath::downlink::{Downlink, Outside},
    peer::PeerTable,
    relay::{DropReason, Held},
};

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Whether a packet or frame of so many bytes is beyond what the peer was told to send; within it, it is charged.
    #[inline]
    pub(super) fn exceeds_rate(&self, bytes: usize, peer: PeerId) -> bool {
        self.peers.data(peer).is_some_and(|state| {
            let received = state.relay.share.account.received();
            match state.relay.held {
                Held::Stopped => true,
                Held::Free if state.config.rate_receive.is_none() => false,
                Held::Free | Held::Slowed(_) => !received.takes(bytes as u64, self.now),
            }
        })
    }

    /// Drops a payload, or what one is recovered from, that is beyond that rate; false for other frames, which are small.
    pub(super) fn over_rate(&mut self, data: &[u8], peer: PeerId) -> bool {
        let stopped = self.peers.data(peer).is_some_and(|state| state.relay.held == Held::Stopped);
        let bytes = match Context::decode(data) {
            // It is refused, so that the far end knows.
            Some(Context::Open { .. }) if stopped => return false,
            Some(
                Context::Packet { payload_at, .. }
                | Context::Flow { payload_at, .. }
                | Context::Open { payload_at, .. }
                | Context::Piece { payload_at, .. },
            ) => data.len() - payload_at,
            Some(Context::Numbered { .. } | Context::Repair { .. } | Context::Copied { .. }) => data.len(),
            Some(
                Context::OpenEmpty { .. }
                | Context::Confirmed(_)
                | Context::Refused(..)
                | Context::Unknown(_)
                | Context::Closed(_)
                | Context::Report { .. }
                | Context::Ask { .. }
                | Context::Unsupported(_),
            )
            | None => return false,
        };
        let reason = if stopped { DropReason::Quota } else { DropReason::OverRate };
        self.refuse(peer, Some(bytes), reason);
        true
    }
}

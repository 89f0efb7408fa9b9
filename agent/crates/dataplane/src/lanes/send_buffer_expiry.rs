//! Send buffers that the kernel does not take: their packets are dropped when their time is over, not sent late.

use std::time::{Duration, Instant};

use base::ids::PeerId;
use net::batch::Message;

use crate::{
    lanes::send_buffer::{NO_OWNER, UnderlayId, Underlays},
    relay::Settlements,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expiry {
    /// When to look again; `None` if nothing is left.
    pub next: Option<Instant>,
    /// The send buffer was full, and is empty now.
    pub emptied: bool,
}

/// How much later than its deadline a packet is dropped: timers fire at their time or just before.
const SLACK: Duration = Duration::from_millis(1);

impl Underlays {
    /// Drops packets that have waited in the send buffer of socket `id`, since the kernel ran out of room, for longer than the
    /// `limit` of their peer. Packets without a peer have [`crate::lanes::send_buffer::UNAUTHENTICATED`] or an unused number.
    pub fn expire(&mut self, id: UnderlayId, now: Instant, limit: impl Fn(PeerId) -> Duration) -> Expiry {
        let Some(underlay) = self.sockets.get_mut(id.0 as usize) else { return Expiry::default() };
        let (Some(since), Some(batch)) = (underlay.blocked, underlay.send_buffer.as_mut()) else {
            return Expiry::default();
        };
        let settlements = &mut self.settlements;
        let mut next: Option<Instant> = None;
        batch.retain(|message| {
            let at = since + limit(PeerId(message.owner)) + SLACK;
            let stays = now < at;
            if stays {
                next = Some(next.map_or(at, |next| next.min(at)));
            } else {
                expired(settlements, message);
            }
            stays
        });
        if !batch.is_empty() {
            return Expiry { next, emptied: false };
        }
        // The socket says when there is room; until then what is younger waits here.
        underlay.blocked = None;
        if let Some(batch) = underlay.send_buffer.take() {
            self.give_back(batch);
        }
        Expiry { next: None, emptied: true }
    }
}

/// Notes that what is left of a message was dropped.
fn expired(settlements: &mut Settlements, message: &Message) {
    if message.owner != NO_OWNER {
        let (taken, segments) = (u64::from(message.taken()), u64::from(message.segments.max(1)));
        settlements.expired(PeerId(message.owner), message.payloads.into(), segments, taken);
    }
}

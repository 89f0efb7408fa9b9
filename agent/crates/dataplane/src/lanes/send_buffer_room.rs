//! Which sockets hold a send buffer, and which of them have room.

use std::time::Instant;

use base::ids::PeerId;
use net::SendBatch;

use super::{MOST_SEND_BUFFERS, MOST_SPARE, NO_OWNER, RESERVE_BYTES, Share, UnderlayId, Underlays, Waiting};
use crate::{lanes::Lanes, relay::DropReason};

impl Underlays {
    /// Gives socket `id` a send buffer.
    pub(super) fn give_send_buffer(&mut self, id: UnderlayId, now: Instant) {
        if self.held >= MOST_SEND_BUFFERS {
            self.reclaim(now);
        }
        let batch = self.spare.pop();
        self.unneeded = self.unneeded.min(self.spare.len());
        let batch = batch.unwrap_or_else(|| SendBatch::new(SendBatch::DEFAULT_BYTES + RESERVE_BYTES));
        if let Some(underlay) = self.sockets.get_mut(id.0 as usize) {
            underlay.send_buffer = Some(batch);
            self.held += 1;
        }
    }

    /// Takes back the send buffers of sockets that can send what is in them. If that frees none, the socket which has been without
    /// room for longest loses its buffer, and what waits there is dropped.
    fn reclaim(&mut self, now: Instant) {
        for index in 0..self.dirty.len() {
            let id = self.dirty[index];
            let Some(underlay) = self.sockets.get_mut(id.0 as usize) else { continue };
            if underlay.blocked.is_some() || underlay.open.is_some() {
                continue;
            }
            if underlay.send(&mut self.settlements, now) {
                self.newly_blocked.push(id);
            } else if let Some(batch) = underlay.send_buffer.take() {
                self.give_back(batch);
            }
        }
        if self.held < MOST_SEND_BUFFERS {
            return;
        }
        let blocked = self.sockets.iter().filter(|(_, underlay)| underlay.send_buffer.is_some());
        let blocked = blocked.filter_map(|(index, underlay)| Some((underlay.blocked?, index)));
        let Some((_, index)) = blocked.min() else { return };
        let Some(underlay) = self.sockets.get_mut(index) else { return };
        underlay.blocked = None;
        if let Some(batch) = underlay.send_buffer.take() {
            for message in batch.messages().iter().filter(|message| message.owner != NO_OWNER) {
                let payloads = u64::from(message.payloads);
                self.settlements.note(PeerId(message.owner), payloads, Some(DropReason::SendEvicted));
            }
            self.give_back(batch);
        }
        self.evicted.extend(u32::try_from(index).map(UnderlayId));
        self.send_buffers_taken_away += 1;
    }

    /// Takes back a send buffer that no socket needs any more.
    pub(super) fn give_back(&mut self, mut batch: SendBatch) {
        self.held = self.held.saturating_sub(1);
        if self.spare.len() < MOST_SPARE {
            batch.clear();
            self.spare.push(batch);
        }
    }

    /// Frees the spare send buffers that no socket needed since the last call.
    pub fn free_spare(&mut self) {
        self.spare.truncate(self.spare.len() - self.unneeded.min(self.spare.len()));
        self.unneeded = self.spare.len();
    }

    /// What all send buffers take, in bytes, those included that no socket is using.
    #[must_use]
    pub fn send_buffer_bytes(&self) -> usize {
        (self.held + self.spare.len()) * (SendBatch::DEFAULT_BYTES + RESERVE_BYTES)
    }

    /// Lets no other packet join the last one in a message that the kernel cuts: on its way through virtual devices such a message may
    /// be larger than a packet.
    pub fn end_message(&mut self, id: UnderlayId) {
        let underlay = self.sockets.get_mut(id.0 as usize);
        if let Some(batch) = underlay.and_then(|underlay| underlay.send_buffer.as_mut()) {
            batch.end_message();
        }
    }

    /// What waits in a socket's send buffer for the kernel.
    #[must_use]
    pub fn waiting(&self, id: UnderlayId) -> Waiting {
        let send_buffer = self.get(id).and_then(|underlay| underlay.send_buffer.as_ref());
        send_buffer.map_or_else(Waiting::default, |batch| Waiting {
            datagrams: batch.datagrams(),
            bytes: batch.bytes(),
        })
    }

    /// Whether the kernel has no room for what the socket is to send.
    #[must_use]
    pub fn is_blocked(&self, id: UnderlayId) -> bool {
        self.get(id).is_some_and(|underlay| underlay.blocked.is_some())
    }

    /// Whether the socket, or the reserve of its send buffer, has room for a packet of the agent itself.
    #[must_use]
    pub fn takes_own(&self, id: UnderlayId, bytes: usize) -> bool {
        self.get(id).is_some_and(|underlay| {
            let fits = |batch: &SendBatch| Share::Whole.fits(batch, bytes);
            underlay.blocked.is_none() || underlay.send_buffer.as_ref().is_none_or(fits)
        })
    }

    /// The socket reported that it is ready: if it had no room, try again. Returns whether it was blocked and now is not.
    pub fn unblock(&mut self, id: UnderlayId, lanes: &mut Lanes, now: Instant) -> bool {
        let Some(underlay) =
            self.sockets.get_mut(id.0 as usize).filter(|underlay| underlay.blocked.is_some())
        else {
            return false;
        };
        underlay.finish(lanes, now, &mut self.settlements);
        underlay.send(&mut self.settlements, now);
        if underlay.blocked.is_some() {
            return false;
        }
        if let Some(batch) = underlay.send_buffer.take() {
            self.give_back(batch);
        }
        true
    }
}

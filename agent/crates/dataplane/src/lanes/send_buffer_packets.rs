//! Frames in the packet under construction, and packets that are sealed and handed to the kernel.

use std::time::Instant;

use net::Path;
use quic_core::{HEADER_LEN, TAG_LEN, frame::datagram};

use super::{MAX_PREFIX, MOST_FRAME_PREFIX, OpenPacket, PushError, Share, Underlay, is_unreachable, settle};
use crate::{
    lanes::{Frame, LaneSlot, Lanes, Payloads, numbers::Number},
    relay::Settlements,
};

impl Underlay {
    /// Writes one DATAGRAM frame into the packet under construction.
    pub(super) fn append(
        &mut self,
        mut open: OpenPacket,
        budget: usize,
        frame: Frame<'_>,
        frame_header_len: usize,
        number: &mut Number<'_>,
    ) -> Result<(), PushError> {
        let Frame { header, payload, counted, .. } = frame;
        let tail =
            self.send_buffer.as_mut().and_then(|batch| batch.tail(budget)).ok_or(PushError::Blocked)?;
        let room = &mut tail[open.len..];
        let before = number.header().len();
        let data_len = before + header.len() + payload.len();
        let written = if frame_header_len == 1 {
            datagram::write_header_to_end(room)
        } else {
            datagram::write_header_with_len(room, data_len)
        };
        let at = written.ok_or(PushError::Blocked)?;
        room[at..at + before].copy_from_slice(number.header());
        room[at + before..at + before + header.len()].copy_from_slice(header);
        room[at + before + header.len()..at + data_len].copy_from_slice(payload);
        number.give(&mut room[at..at + data_len]);
        open.len += at + data_len;
        open.frames += 1;
        open.payloads += u16::from(counted);
        self.open = Some(open);
        Ok(())
    }

    /// Writes DATAGRAM frames of one length into the packet under construction, as many as fit; returns how many.
    pub(super) fn append_same_size(
        &mut self,
        mut open: OpenPacket,
        budget: usize,
        payloads: &Payloads<'_>,
        number: &mut Number<'_>,
    ) -> usize {
        let Payloads { header, segment, .. } = *payloads;
        // Packets that are cut fill a packet each, but for the smallest.
        if payloads.cut.is_some() {
            return 0;
        }
        let numbered = number.header();
        let data_len = numbered.len() + header.len() + segment;
        let mut prefix = [0; MAX_PREFIX];
        let Some(at) = datagram::write_header_with_len(&mut prefix, data_len) else { return 0 };
        let context_at = at + numbered.len();
        let Some(place) = prefix.get_mut(at..context_at + header.len()) else { return 0 };
        place[..numbered.len()].copy_from_slice(numbered);
        place[numbered.len()..].copy_from_slice(header);
        let prefix = &prefix[..context_at + header.len()];
        let room = self
            .send_buffer
            .as_mut()
            .and_then(|batch| batch.tail(budget))
            .and_then(|tail| tail.get_mut(open.len..budget.saturating_sub(TAG_LEN)));
        let Some(room) = room else { return 0 };

        let mut count = 0;
        for (frame, payload) in room.chunks_exact_mut(prefix.len() + segment).zip(payloads.full()) {
            let (start, rest) = frame.split_at_mut(prefix.len());
            start.copy_from_slice(prefix);
            rest.copy_from_slice(payload);
            number.give(&mut frame[at..]);
            count += 1;
            if number.owes() {
                break;
            }
        }
        open.len += usize::from(count) * (prefix.len() + segment);
        open.frames += count;
        open.payloads += count;
        self.open = Some(open);
        usize::from(count)
    }

    /// Seals a packet for each of the datagrams that have the full length, while there is room; returns how many.
    pub(super) fn seal_same_size(
        &mut self,
        slot: &mut LaneSlot,
        payloads: &Payloads<'_>,
        number: &mut Number<'_>,
        now: Instant,
    ) -> usize {
        let (Some(batch), Some(path)) = (self.send_buffer.as_mut(), slot.path()) else { return 0 };
        let path = Path { tos: payloads.tos, ..path };
        let mut prefix = [0; MOST_FRAME_PREFIX];
        let before = number.header().len();
        let prefix = &mut prefix[..before + payloads.prefix_len()];
        prefix[..before].copy_from_slice(number.header());
        payloads.write_prefix(&mut prefix[before..]);
        let len = HEADER_LEN + datagram::encoded_len_to_end(prefix.len() + payloads.segment) + TAG_LEN;
        let mut count = 0;
        for payload in payloads.full() {
            if !Share::Payloads.fits(batch, len) {
                break;
            }
            let Some(packet) = batch.tail(len) else { break };
            let (start, rest) = packet[HEADER_LEN + 1..len - TAG_LEN].split_at_mut(prefix.len());
            start.copy_from_slice(prefix);
            rest.copy_from_slice(payload);
            payloads.complete(&mut start[before..], count, payload);
            number.give(&mut packet[HEADER_LEN + 1..len - TAG_LEN]);
            // Whoever pushes the next one finds out why and says so.
            if datagram::write_header_to_end(&mut packet[HEADER_LEN..]).is_none()
                || slot.core.seal(packet, true, now).is_err()
            {
                break;
            }
            batch.commit(&path, slot.peer.0, len, 1);
            count += 1;
            if number.owes() {
                break;
            }
        }
        slot.core.count_datagrams_sent(count as u64);
        count
    }

    /// Seals the packet under construction and commits it to the batch, or drops its payloads for a reason.
    pub(super) fn finish(&mut self, lanes: &mut Lanes, now: Instant, settlements: &mut Settlements) {
        let Some(open) = self.open.take() else { return };
        let len = open.len + TAG_LEN;
        let lane = lanes.get_mut(open.lane).and_then(|slot| Some((slot.path()?, slot)));
        let (Some(batch), Some((path, slot))) = (self.send_buffer.as_mut(), lane) else {
            open.drop(settlements);
            return;
        };
        let path = Path { tos: open.tos, ..path };
        let sealed = batch.tail(len).is_some_and(|tail| slot.core.seal(&mut tail[..len], true, now).is_ok());
        if sealed {
            slot.core.count_datagrams_sent(u64::from(open.frames));
            batch.commit(&path, open.peer.0, len, open.payloads);
        } else {
            slot.exhaust();
            open.drop(settlements);
        }
        lanes.touch(open.lane);
    }

    /// Hands the batch to the kernel; true if that has no room any more, and had before.
    pub(super) fn send(&mut self, settlements: &mut Settlements, now: Instant) -> bool {
        let Some(batch) = self.send_buffer.as_mut() else { return false };
        let unreachable = &mut self.unreachable;
        self.socket.send(batch, &mut |message, outcome| {
            *unreachable |= is_unreachable(outcome);
            settle(settlements, message, outcome);
        });
        let before = self.blocked;
        // What waits has done so since the first time: nothing was added but what the agent itself says.
        self.blocked = (!batch.is_empty()).then(|| before.unwrap_or(now));
        before.is_none() && self.blocked.is_some()
    }
}

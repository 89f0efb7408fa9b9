//! The path's MTU, as a lane probes it: what its caller says and asks, and what comes of its packets.

use std::time::Instant;

use super::{Lane, TRANSMIT_CAPACITY};
use crate::{
    SealError,
    ack::Volume,
    frame::{PADDING, PING},
    mtu::Fate,
    packet::{HEADER_LEN, TAG_LEN},
    record::{Event, Purpose},
    seal::MAX_PACKET_LEN,
};

impl Lane {
    /// Whether the next search may begin with up to 8 probes at once, as it does unless this is said; one at a time, it takes some
    /// seconds where the path carries less than the most. Up to `usual` bytes, 1472 unless this is said, it searches first; only if the
    /// path carries that, it goes on beyond.
    pub fn plan_mtu_search(&mut self, allows_bursts: bool, usual: usize) {
        self.mtu.bursts = allows_bursts;
        self.mtu.usual_most = usual.min(MAX_PACKET_LEN) as u16;
    }

    /// Starts to search for the largest packet that the path carries, up to `max` bytes of UDP payload; until it is found,
    /// `start` is the largest. Neither counts below 1200. To be called once the path is validated, and again when it has moved: then
    /// `start` is not relied on, and if it is more than usual it is only tried.
    pub fn start_mtu_search(&mut self, max: usize, start: usize) {
        let size = |bytes: usize| bytes.min(MAX_PACKET_LEN) as u16;
        self.sent.forget_mtu_probes();
        self.mtu.start(size(max), size(start));
    }

    /// Another end of the search, in bytes of UDP payload, from which it goes on: no packet is larger from now on.
    pub fn bound_mtu_search(&mut self, max: usize, now: Instant) {
        let mtu = self.mtu.current;
        self.mtu.bound(max.min(MAX_PACKET_LEN) as u16, now);
        self.note_mtu(mtu, false, now);
    }

    /// The local socket has refused a packet of `size` bytes, so none as large gets through. Only what it says at once counts: an
    /// ICMP message may be forged.
    pub fn packet_refused(&mut self, size: usize, now: Instant) {
        let mtu = self.mtu.current;
        let is_black_hole = self.mtu.on_refused(size.min(MAX_PACKET_LEN) as u16, now);
        self.note_mtu(mtu, is_black_hole, now);
    }

    /// The most that [`max_packet`](Self::max_packet) may become before the path changes, as far as is known.
    pub fn most_packet(&self) -> usize {
        self.mtu.most().into()
    }

    /// Makes the next [`poll_transmit`](Self::poll_transmit) send a probe of 1200 bytes, to see whether the local socket takes that.
    pub fn check_base(&mut self) {
        self.mtu.check_base();
    }

    /// The largest packet that the path carries, in bytes of UDP payload, as far as is known: 1200 before
    /// [`start_mtu_search`](Self::start_mtu_search). The caller keeps to it; [`open`](Self::open) and
    /// [`handle_timeout`](Self::handle_timeout) change it.
    #[inline]
    pub fn max_packet(&self) -> usize {
        self.mtu.current.into()
    }

    /// Whether [`max_packet`](Self::max_packet) is what the path was found to carry. If not, what it carries is known about a
    /// round trip later: after the start, and after the path has turned out to carry less than before.
    #[inline]
    pub fn is_mtu_measured(&self) -> bool {
        self.mtu.measured
    }

    /// Whether larger packets are being tried.
    pub fn is_mtu_searched(&self) -> bool {
        self.mtu.is_searching()
    }

    /// Capacity that the next [`poll_transmit`](Self::poll_transmit) can use: [`TRANSMIT_CAPACITY`], or more for an MTU probe.
    #[inline]
    pub fn transmit_capacity(&self, now: Instant) -> usize {
        self.mtu.due(now).map_or(TRANSMIT_CAPACITY, |size| TRANSMIT_CAPACITY.max(size.into()))
    }

    /// Takes the outcome of MTU probes and losses into account.
    #[inline]
    pub(super) fn judge_mtu(&mut self, acked: Volume, now: Instant) {
        self.mtu.on_packets_lost(self.sent.take_largest_lost());
        self.mtu.on_packets_acked(acked);
        while let Some((size, fate)) = self.sent.take_mtu_fate() {
            let mtu = self.mtu.current;
            self.stats.mtu_probes_lost += u64::from(fate == Fate::Lost);
            let is_black_hole = self.mtu.on_settled(size, fate, now);
            self.note_mtu(mtu, is_black_hole, now);
        }
    }

    /// The largest packet was `old` bytes until now.
    pub(super) fn note_mtu(&mut self, old: u16, is_black_hole: bool, now: Instant) {
        self.stats.black_holes += u64::from(is_black_hole);
        let new = self.mtu.current;
        if let Some(recorder) = self.recorder.as_deref_mut().filter(|_recorder| old != new) {
            recorder.note(Event::Mtu { old, new }, now);
        }
    }

    /// Seals an MTU probe of `size` bytes, if `packet` has them.
    #[cold]
    pub(super) fn seal_mtu_probe(
        &mut self,
        packet: &mut [u8],
        size: usize,
        now: Instant,
    ) -> Result<Option<usize>, SealError> {
        let Some(packet) = packet.get_mut(..size) else { return Ok(None) };
        let frames = &mut packet[HEADER_LEN..size - TAG_LEN];
        frames.fill(PADDING);
        frames[0] = PING;
        self.seal(packet, true, now)?;
        self.sent.mtu_probe_sent();
        self.mtu.on_sent(now);
        self.stats.mtu_probes_sent += 1;
        self.sealed_for(Purpose::MtuProbe);
        Ok(Some(size))
    }
}

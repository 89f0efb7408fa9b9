//! What came from a peer, as the super-packets that are written to the TUN device.

use std::ops::Range;

use super::{checksum, view::IpView, vnet::VnetHeader};
use crate::io::{PacketDelivery, ReceiveBatch, TunOffload};

/// Joins consecutive packets of a flow within one received batch.
#[derive(Debug, Default)]
pub struct Merger {}

impl Merger {
    /// Forgets all flows: with each new batch.
    pub fn clear(&mut self) {}

    /// Lists the packet at `place`, a buffer of `batch` and a range of it, for writing.
    #[expect(clippy::too_many_arguments, reason = "a packet, where it goes and what is known of it")]
    pub fn push(
        &mut self,
        list: &mut PacketDelivery,
        batch: &mut ReceiveBatch,
        place: (usize, Range<usize>),
        view: &IpView,
        partial: bool,
        owner: u32,
        offload: TunOffload,
    ) {
        let (slot, range) = place;
        let mut vnet = VnetHeader::default();
        if let Some((start, offset)) = view.checksum_place().filter(|_| partial) {
            if offload.tcp {
                vnet.needs_checksum = true;
                (vnet.checksum_start, vnet.checksum_offset) = (start as u16, offset as u16);
            } else {
                checksum::complete(&mut batch.buffer_mut(slot).1[range.clone()], start, offset);
            }
        }
        let message = list.begin(vnet, owner, &[]);
        list.add(message, slot, range);
    }

    /// Tries to join without a view: true if it joined.
    pub fn push_alike(
        &mut self,
        _list: &mut PacketDelivery,
        _batch: &ReceiveBatch,
        _place: (usize, Range<usize>),
        _partial: bool,
        _owner: u32,
    ) -> bool {
        false
    }
}

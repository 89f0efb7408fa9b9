//! The cryptography of a packet and nothing else: what no implementation can do without.

use std::{hint::black_box, time::Instant};

use anyhow::anyhow;
use quic_core::{HEADER_LEN, OVERHEAD, TAG_LEN, frame::datagram};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey, quic};

use crate::bench::memory::carrier::{BATCH, Carrier};

/// Packets that are sealed and opened in place, with a header mask for each.
pub(super) struct Bare {
    key: LessSafeKey,
    mask: quic::HeaderProtectionKey,
    packets: Vec<Vec<u8>>,
    number: u64,
}

impl Bare {
    /// Packets that carry payloads of `size` bytes.
    pub(super) fn new(size: usize) -> anyhow::Result<Self> {
        let refused = |_| anyhow!("the cryptographic library refused a key");
        let key = UnboundKey::new(&AES_128_GCM, &[3; 16]).map_err(refused)?;
        let mask = quic::HeaderProtectionKey::new(&quic::AES_128, &[4; 16]).map_err(refused)?;
        let len = OVERHEAD + datagram::encoded_len_to_end(size);
        Ok(Self { key: LessSafeKey::new(key), mask, packets: vec![vec![0; len]; BATCH], number: 0 })
    }
}

impl Carrier for Bare {
    fn carry(&mut self, _now: Instant) -> anyhow::Result<usize> {
        let failed = |_| anyhow!("the cryptographic library refused a packet");
        let first = self.number;
        for packet in &mut self.packets {
            let (header, rest) = packet.split_at_mut(HEADER_LEN);
            let (payload, room) = rest.split_at_mut(rest.len() - TAG_LEN);
            let nonce = nonce(self.number);
            let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(&*header), payload);
            room.copy_from_slice(tag.map_err(failed)?.as_ref());
            black_box(self.mask.new_mask(&payload[..16]).map_err(failed)?);
            self.number += 1;
        }
        for (number, packet) in (first..).zip(&mut self.packets) {
            let (header, payload) = packet.split_at_mut(HEADER_LEN);
            black_box(self.mask.new_mask(&payload[..16]).map_err(failed)?);
            let opened = self.key.open_in_place(nonce(number), Aad::from(&*header), payload);
            black_box(opened.map_err(failed)?);
        }
        Ok(self.packets.len())
    }
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

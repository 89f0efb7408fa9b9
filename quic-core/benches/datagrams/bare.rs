//! The cryptography alone: what no implementation can do without.

use std::hint::black_box;

use quic_core::{HEADER_LEN, OVERHEAD, TAG_LEN, frame::datagram};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey, quic};

use crate::{BATCH, PAYLOAD_LEN};

const PACKET_LEN: usize = OVERHEAD + datagram::encoded_len_to_end(PAYLOAD_LEN);

/// A batch of packets, its key and its mask.
pub(crate) struct Bare {
    key: LessSafeKey,
    mask: quic::HeaderProtectionKey,
    packets: Vec<[u8; PACKET_LEN]>,
}

impl Bare {
    pub(crate) fn new() -> Self {
        let key = UnboundKey::new(&AES_128_GCM, &[7; 16]).expect("16 bytes are a key");
        let mask = quic::HeaderProtectionKey::new(&quic::AES_128, &[8; 16]).expect("16 bytes are a key");
        Self { key: LessSafeKey::new(key), mask, packets: vec![[0; PACKET_LEN]; BATCH] }
    }

    /// Both ends of a batch.
    pub(crate) fn turn(&mut self) {
        self.seal();
        self.open();
    }

    /// The AEAD and a header mask for each packet.
    pub(crate) fn seal(&mut self) {
        for (number, packet) in self.packets.iter_mut().enumerate() {
            let (header, rest) = packet.split_at_mut(HEADER_LEN);
            let (payload, room) = rest.split_at_mut(PACKET_LEN - HEADER_LEN - TAG_LEN);
            let tag = self.key.seal_in_place_separate_tag(nonce(number), Aad::from(&*header), payload);
            room.copy_from_slice(tag.expect("the payload is short").as_ref());
            black_box(self.mask.new_mask(&payload[..16]).expect("a sample has 16 bytes"));
        }
    }

    /// The same for the other end.
    pub(crate) fn open(&mut self) {
        for (number, packet) in self.packets.iter_mut().enumerate() {
            let (header, payload) = packet.split_at_mut(HEADER_LEN);
            black_box(self.mask.new_mask(&payload[..16]).expect("a sample has 16 bytes"));
            let opened = self.key.open_in_place(nonce(number), Aad::from(&*header), payload);
            black_box(opened.expect("it was sealed just now"));
        }
    }
}

fn nonce(number: usize) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&(number as u64).to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

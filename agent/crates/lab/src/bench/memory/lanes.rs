//! Two lanes, of which one sends and the other acknowledges, as they do between two agents.

use std::{hint::black_box, time::Instant};

use anyhow::anyhow;
use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TAG_LEN, TRANSMIT_CAPACITY,
    frame::datagram,
};

use crate::bench::memory::carrier::{BATCH, Carrier};

/// The sender, the receiver, and what is between them.
pub(super) struct Pair {
    sender: Lane,
    receiver: Lane,
    payload: Vec<u8>,
    packets: Vec<Vec<u8>>,
    ack: Vec<u8>,
}

impl Pair {
    /// Lanes that carry payloads of `size` bytes.
    pub(super) fn new(size: usize) -> anyhow::Result<Self> {
        let (there, back) = ([11; 32], [12; 32]);
        let (sender_cid, receiver_cid) = (ConnectionId([21; 8]), ConnectionId([22; 8]));
        let config = LaneConfig {
            suite: Suite::Aes128Gcm,
            send_secret: &there,
            receive_secret: &back,
            remote_cid: receiver_cid,
            local_cid: sender_cid,
            ack: AckProfile::Throughput,
            key_limit: None,
            initial_rtt: None,
        };
        let mirrored = LaneConfig {
            send_secret: &back,
            receive_secret: &there,
            remote_cid: sender_cid,
            local_cid: receiver_cid,
            ..config
        };
        let packet = vec![0; OVERHEAD + datagram::encoded_len_to_end(size)];
        Ok(Self {
            sender: Lane::new(&config)?,
            receiver: Lane::new(&mirrored)?,
            payload: vec![7; size],
            packets: vec![packet; BATCH],
            ack: vec![0; TRANSMIT_CAPACITY],
        })
    }
}

impl Carrier for Pair {
    fn carry(&mut self, now: Instant) -> anyhow::Result<usize> {
        for packet in &mut self.packets {
            let end = packet.len() - TAG_LEN;
            let frame = &mut packet[HEADER_LEN..end];
            let header =
                datagram::write_header_to_end(frame).ok_or_else(|| anyhow!("no room for a frame"))?;
            // As the agent does: the payload is copied once, to where it is encrypted.
            frame[header..].copy_from_slice(&self.payload);
            self.sender.seal(packet, true, now)?;
        }
        let mut arrived = 0;
        for packet in &mut self.packets {
            let opened = self.receiver.open(packet, now)?;
            for datagram in opened.datagrams() {
                arrived += usize::from(black_box(datagram.payload).len() == self.payload.len());
            }
        }
        while let Some(len) = self.receiver.poll_transmit(&mut self.ack, now)? {
            self.sender.open(&mut self.ack[..len], now)?;
        }
        Ok(arrived)
    }
}

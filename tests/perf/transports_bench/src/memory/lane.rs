//! Two lanes: what carries Culvert's UDP flows and IP packets. Several messages share a packet where they fit.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use anyhow::Context;
use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TAG_LEN, TRANSMIT_CAPACITY,
    frame::datagram,
};

use super::{Pair, TOO_LARGE};
use crate::{clock, transport::MAX_UDP_PAYLOAD};

/// Between two packets: a million a second.
const INTERVAL: Duration = Duration::from_micros(1);

pub(super) struct Lanes {
    near: Lane,
    far: Lane,
    packet: Vec<u8>,
    ack: [u8; TRANSMIT_CAPACITY],
    now: Instant,
}

impl Lanes {
    pub(super) fn pair() -> anyhow::Result<Box<dyn Pair>> {
        let (near, far) = (lane(1, 2)?, lane(2, 1)?);
        let packet = Vec::with_capacity(MAX_UDP_PAYLOAD);
        Ok(Box::new(Self { near, far, packet, ack: [0; TRANSMIT_CAPACITY], now: clock::instant() }))
    }

    /// Seals the packet, opens it at the other end, and carries what that answers: how many messages were in it.
    fn send(&mut self) -> anyhow::Result<usize> {
        self.now += INTERVAL;
        self.packet.extend_from_slice(&[0; TAG_LEN]);
        self.near.seal(&mut self.packet, true, self.now)?;
        let opened = self.far.open(&mut self.packet, self.now)?;
        let received = opened.datagrams().inspect(|datagram| _ = black_box(datagram.payload)).count();
        while let Some(len) = self.far.poll_transmit(&mut self.ack, self.now)? {
            self.near.open(&mut self.ack[..len], self.now)?;
        }
        Ok(received)
    }
}

impl Pair for Lanes {
    fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()> {
        let frame = datagram::encoded_len(message.len());
        let largest = MAX_UDP_PAYLOAD - OVERHEAD - datagram::header_len(MAX_UDP_PAYLOAD);
        anyhow::ensure!(message.len() <= largest, "{TOO_LARGE}");
        let (mut left, mut received) = (count, 0);
        while left > 0 {
            self.packet.clear();
            self.packet.extend_from_slice(&[0; HEADER_LEN]);
            while left > 0 && self.packet.len() + frame + TAG_LEN <= MAX_UDP_PAYLOAD {
                let at = self.packet.len();
                self.packet.resize(at + frame - message.len(), 0);
                datagram::write_header_with_len(&mut self.packet[at..], message.len())
                    .context("the header fits")?;
                self.packet.extend_from_slice(message);
                left -= 1;
            }
            received += self.send()?;
        }
        anyhow::ensure!(received == count, "{received} messages arrived");
        Ok(())
    }
}

fn lane(from: u8, to: u8) -> anyhow::Result<Lane> {
    Ok(Lane::new(&LaneConfig {
        suite: Suite::Aes128Gcm,
        send_secret: &[from; 32],
        receive_secret: &[to; 32],
        remote_cid: ConnectionId([to; 8]),
        local_cid: ConnectionId([from; 8]),
        ack: AckProfile::Throughput,
        key_limit: None,
        initial_rtt: None,
    })?)
}

//! A pair of lanes of which one sends.

use std::hint::black_box;
use std::time::{Duration, Instant};

use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TRANSMIT_CAPACITY,
    frame::datagram,
};

use crate::{BATCH, clock};

/// The lanes, the batch between them, and the ACK on its way back.
pub(crate) struct Pair {
    profile: AckProfile,
    lanes: [Lane; 2],
    packets: Vec<Vec<u8>>,
    ack: [u8; TRANSMIT_CAPACITY],
    ack_len: usize,
    now: Instant,
}

impl Pair {
    pub(crate) fn new(profile: AckProfile, payload_len: usize) -> Self {
        Self::protected_by(Suite::Aes128Gcm, profile, payload_len)
    }

    pub(crate) fn protected_by(suite: Suite, profile: AckProfile, payload_len: usize) -> Self {
        let packet = vec![0; OVERHEAD + datagram::encoded_len_to_end(payload_len)];
        Self {
            profile,
            lanes: pair(suite, profile),
            packets: vec![packet; BATCH],
            ack: [0; TRANSMIT_CAPACITY],
            ack_len: 0,
            now: clock(),
        }
    }

    /// One batch is sealed, opened, delivered and acknowledged. Keys are updated on the way, as they are in the field.
    pub(crate) fn turn(&mut self) {
        self.seal();
        self.open();
        self.acknowledge();
        assert_eq!(self.lanes[0].in_flight().packets, 0);
    }

    /// The sender's part, at a million packets per second.
    pub(crate) fn seal(&mut self) {
        self.now += Duration::from_micros(BATCH as u64);
        for packet in &mut self.packets {
            datagram::write_header_to_end(&mut packet[HEADER_LEN..]).expect("the packet has room");
            self.lanes[0].seal(packet, true, self.now).expect("the lane lives");
        }
    }

    /// The receiver's part, ACKs included where the profile wants them inside a batch.
    pub(crate) fn open(&mut self) {
        self.open_all_but_each(None);
    }

    /// The same with each `lost`-th packet lost.
    pub(crate) fn open_all_but_each(&mut self, lost: Option<usize>) {
        for at in 0..BATCH {
            if lost.is_some_and(|lost| at % lost == 0) {
                continue;
            }
            let opened = self.lanes[1].open(&mut self.packets[at], self.now).expect("it was sealed just now");
            for datagram in opened.datagrams() {
                black_box(datagram.payload);
            }
            if self.profile == AckProfile::Latency {
                self.acknowledge();
            }
        }
    }

    /// Carries all ACKs that are due back to the sender.
    pub(crate) fn acknowledge(&mut self) {
        loop {
            self.ack_len = self.poll_ack();
            if self.ack_len == 0 {
                break;
            }
            self.take_ack();
        }
    }

    /// Makes the receiver write the ACK of the batch, due or not.
    pub(crate) fn write_ack(&mut self) {
        self.lanes[1].handle_timeout(self.now + Duration::from_secs(1));
        self.ack_len = self.poll_ack();
    }

    /// Gives the sender the ACK that was written.
    pub(crate) fn take_ack(&mut self) {
        let ack = &mut self.ack[..self.ack_len];
        self.lanes[0].open(ack, self.now).expect("it was sealed just now");
    }

    fn poll_ack(&mut self) -> usize {
        self.lanes[1].poll_transmit(&mut self.ack, self.now).expect("the lane lives").unwrap_or(0)
    }
}

/// Two lanes that talk to each other.
pub(crate) fn pair(suite: Suite, ack: AckProfile) -> [Lane; 2] {
    let secrets = [[1; 32], [2; 32]];
    let cids = [ConnectionId([1; 8]), ConnectionId([2; 8])];
    [0, 1].map(|end| {
        Lane::new(&LaneConfig {
            suite,
            send_secret: &secrets[end],
            receive_secret: &secrets[1 - end],
            remote_cid: cids[1 - end],
            local_cid: cids[end],
            ack,
            key_limit: None,
            initial_rtt: None,
        })
        .expect("the secrets have the right length")
    })
}

//! What a lane costs above the cryptography that it cannot do without: one datagram of 1150 bytes, both ends.
//!
//! `bare` seals and opens with the AEAD and computes a header mask at each end; `lanes` does all that a lane pair does,
//! ACKs included. The ratio of the two is the figure to watch.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use quic_core::frame::datagram;
use quic_core::{AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TRANSMIT_CAPACITY};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey, quic};

const PAYLOAD_LEN: usize = 1150;
const PACKET_LEN: usize = OVERHEAD + datagram::encoded_len_to_end(PAYLOAD_LEN);
/// Packets that an end handles in one turn.
const BATCH: u64 = 64;

fn lane_pair(c: &mut Criterion) {
    let mut group = c.benchmark_group("datagram of 1150 bytes, both ends");
    group.throughput(Throughput::Elements(BATCH));
    group.bench_function("bare", |bencher| {
        let mut bare = Bare::new();
        bencher.iter(|| (0..BATCH).for_each(|_| bare.packet()));
    });
    for (name, profile) in
        [("lanes", AckProfile::Throughput), ("lanes, latency profile", AckProfile::Latency)]
    {
        group.bench_function(name, |bencher| {
            let mut pair = Pair::new(profile);
            bencher.iter(|| pair.turn());
        });
    }
    group.finish();
}

/// The cryptography alone.
struct Bare {
    key: LessSafeKey,
    mask: quic::HeaderProtectionKey,
    packet: Vec<u8>,
    number: u64,
}

impl Bare {
    fn new() -> Self {
        let key = UnboundKey::new(&AES_128_GCM, &[7; 16]).expect("16 bytes are a key");
        let mask = quic::HeaderProtectionKey::new(&quic::AES_128, &[8; 16]).expect("16 bytes are a key");
        Self { key: LessSafeKey::new(key), mask, packet: vec![0; PACKET_LEN], number: 0 }
    }

    fn packet(&mut self) {
        self.number += 1;
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.number.to_be_bytes());
        let (header, payload) = self.packet.split_at_mut(HEADER_LEN);
        let (payload, room) = payload.split_at_mut(PACKET_LEN - OVERHEAD);
        let nonce = || Nonce::assume_unique_for_key(nonce);
        let tag = self.key.seal_in_place_separate_tag(nonce(), Aad::from(&*header), payload);
        room.copy_from_slice(tag.expect("the payload is short").as_ref());
        black_box(self.mask.new_mask(&payload[..16]).expect("a sample has 16 bytes"));
        black_box(self.mask.new_mask(&payload[..16]).expect("a sample has 16 bytes"));
        let (header, payload) = self.packet.split_at_mut(HEADER_LEN);
        self.key.open_in_place(nonce(), Aad::from(&*header), payload).expect("it was sealed just now");
    }
}

/// Two lanes, one sending.
struct Pair {
    profile: AckProfile,
    lanes: [Lane; 2],
    packets: Vec<[u8; PACKET_LEN]>,
    now: Instant,
    turns: u64,
}

impl Pair {
    #[expect(
        clippy::disallowed_methods,
        reason = "a bench needs some instant to start from; it then counts by itself"
    )]
    fn new(profile: AckProfile) -> Self {
        let packets = vec![[0; PACKET_LEN]; BATCH as usize];
        Self { profile, lanes: lanes(profile), packets, now: Instant::now(), turns: 0 }
    }

    /// One batch is sealed, opened, delivered and acknowledged.
    fn turn(&mut self) {
        self.turns += 1;
        if self.turns * BATCH > 1 << 22 {
            // Well before the keys reach their limit.
            self.lanes = lanes(self.profile);
            self.turns = 0;
        }
        let [sender, receiver] = &mut self.lanes;
        self.now += Duration::from_micros(BATCH);
        for packet in &mut self.packets {
            datagram::write_header_to_end(&mut packet[HEADER_LEN..]).expect("the packet has room");
            sender.seal(packet, true, self.now).expect("the lane is fresh");
        }
        let mut ack = [0; TRANSMIT_CAPACITY];
        for packet in &mut self.packets {
            let opened = receiver.open(packet, self.now).expect("it was sealed just now");
            for datagram in opened.datagrams() {
                black_box(datagram.payload);
            }
            if self.profile == AckProfile::Latency {
                acknowledge(receiver, sender, &mut ack, self.now);
            }
        }
        acknowledge(receiver, sender, &mut ack, self.now);
        assert_eq!(sender.in_flight().packets, 0);
    }
}

fn acknowledge(receiver: &mut Lane, sender: &mut Lane, ack: &mut [u8], now: Instant) {
    while let Some(len) = receiver.poll_transmit(ack, now).expect("the lane is fresh") {
        sender.open(&mut ack[..len], now).expect("it was sealed just now");
    }
}

fn lanes(ack: AckProfile) -> [Lane; 2] {
    let secrets = [[1; 32], [2; 32]];
    let cids = [ConnectionId([1; 8]), ConnectionId([2; 8])];
    [0, 1].map(|end| {
        Lane::new(&LaneConfig {
            suite: Suite::Aes128Gcm,
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

criterion_group!(benches, lane_pair);
criterion_main!(benches);

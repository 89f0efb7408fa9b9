//! What an IP tunnel costs at least on this machine: a TUN device, a cipher or none, and UDP, with the kernel's offloads on both
//! sides and a thread for each direction. No handshake, no congestion control, no acknowledgements, no accounts, one fixed key.
//!
//! ```text
//! bare_relay --device bare0 --listen 192.0.2.1:9000 --peer 192.0.2.2:9000 [--cipher none]
//! ```
//!
//! `tests/perf/l3 --kind bare --kind plain` runs it at both ends, beside Culvert. A packet on the wire is a number (8 bytes), whether
//! the checksum inside is partial (1 byte), the IP packet, and the cipher's tag (16 bytes).

#![expect(clippy::print_stderr, reason = "a command")]

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{SocketAddr, UdpSocket},
    process::ExitCode,
    sync::Arc,
    thread,
};

use clap::{Parser, ValueEnum};
use ip::{
    cut::Cut,
    merge::Merger,
    packets::{Packet, PacketDelivery, TunOffload},
    view::IpView,
    vnet::{VNET_HEADER_BYTES, VnetHeader},
};
use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use tun_rs::{DeviceBuilder, SyncDevice};

/// Before each packet: its number, and whether its checksum is partial.
const HEADER_BYTES: usize = 9;
const TAG_BYTES: usize = 16;
/// Of one read or one message.
const LARGEST_BYTES: usize = 65_535;
/// The kernel takes so many in one message.
const MOST_SEGMENTS: usize = 64;

/// Carries the packets of a TUN device to another host, with nothing but a cipher.
#[derive(Debug, Parser)]
struct Options {
    /// The TUN device, which it makes.
    #[arg(long)]
    device: String,
    /// Its own address.
    #[arg(long)]
    listen: SocketAddr,
    /// The other end's.
    #[arg(long)]
    peer: SocketAddr,
    /// What protects the packets.
    #[arg(long, value_enum, default_value_t = Cipher::Aes128Gcm)]
    cipher: Cipher,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Cipher {
    /// As QUIC has it, without the mask of its header.
    Aes128Gcm,
    None,
}

impl Cipher {
    fn key(self) -> Option<LessSafeKey> {
        let key = || UnboundKey::new(&AES_128_GCM, &[7; 16]).expect("16 bytes are a key");
        (self == Self::Aes128Gcm).then(|| LessSafeKey::new(key()))
    }

    fn overhead(self) -> usize {
        HEADER_BYTES + if self == Self::None { 0 } else { TAG_BYTES }
    }
}

fn nonce(number: [u8; 8]) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number);
    Nonce::assume_unique_for_key(nonce)
}

/// Both ends of the way to the other host.
struct Path {
    socket: UdpSocket,
    state: UdpSocketState,
    peer: SocketAddr,
}

impl Path {
    fn new(options: &Options) -> io::Result<Self> {
        let socket = UdpSocket::bind(options.listen)?;
        let state = UdpSocketState::new((&socket).into())?;
        for size in [UdpSocketState::set_recv_buffer_size, UdpSocketState::set_send_buffer_size] {
            size(&state, (&socket).into(), 4 << 20)?;
        }
        socket.set_nonblocking(false)?;
        Ok(Self { socket, state, peer: options.peer })
    }

    /// Sends packets of `segment` bytes each, of which the last may be shorter; empties `packets`.
    fn send(&self, packets: &mut Vec<u8>, segment: usize) -> io::Result<()> {
        for contents in packets.chunks((LARGEST_BYTES / segment).min(MOST_SEGMENTS) * segment) {
            let segment_size = (contents.len() > segment).then_some(segment);
            let transmit =
                Transmit { destination: self.peer, ecn: None, contents, segment_size, src_ip: None };
            self.state.try_send((&self.socket).into(), &transmit)?;
        }
        packets.clear();
        Ok(())
    }
}

/// From the device to the network.
fn outward(device: &SyncDevice, path: &Path, cipher: Cipher) -> io::Result<()> {
    let key = cipher.key();
    let (mut header, mut buffer) = ([0; VNET_HEADER_BYTES], vec![0; LARGEST_BYTES]);
    let (mut packets, mut number) = (Vec::with_capacity(2 * LARGEST_BYTES), 0_u64);
    loop {
        let read = device.recv_vectored(&mut [IoSliceMut::new(&mut header), IoSliceMut::new(&mut buffer)])?;
        let packet = &mut buffer[..read.saturating_sub(VNET_HEADER_BYTES)];
        let (Some(vnet), Ok(view)) = (VnetHeader::decode(&header), IpView::super_packet(packet)) else {
            continue;
        };
        let Ok(cut) = Cut::new(&vnet, packet, &view, true) else { continue };
        for index in 0..cut.count() {
            let start = packets.len();
            packets.extend(number.to_be_bytes());
            packets.push(u8::from(cut.is_partial()));
            cut.append(index, &mut packets);
            if let Some(key) = &key {
                let (header, payload) = packets[start..].split_at_mut(HEADER_BYTES);
                let tag =
                    key.seal_in_place_separate_tag(nonce(number.to_be_bytes()), Aad::from(&*header), payload);
                packets.extend(tag.map_err(io::Error::other)?.as_ref());
            }
            number += 1;
        }
        path.send(&mut packets, cut.largest() + cipher.overhead())?;
    }
}

/// From the network to the device.
fn inward(device: &SyncDevice, path: &Path, cipher: Cipher) -> io::Result<()> {
    let key = cipher.key();
    let offload = TunOffload { tcp: true, udp: device.udp_gso(), ..TunOffload::default() };
    let (mut buffers, mut merger, mut list) =
        (vec![vec![0; LARGEST_BYTES]], Merger::default(), PacketDelivery::default());
    loop {
        let mut meta = [RecvMeta::default()];
        path.state.recv((&path.socket).into(), &mut [IoSliceMut::new(&mut buffers[0])], &mut meta)?;
        let [RecvMeta { len, stride, .. }] = meta;
        merger.clear();
        for start in (0..len).step_by(stride.max(1)) {
            let packet = &mut buffers[0][start..len.min(start + stride)];
            let Some((header, payload)) = packet.split_at_mut_checked(HEADER_BYTES) else { continue };
            let partial = header[8] == 1;
            let opened = match &key {
                Some(key) => {
                    let number = *header.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
                    key.open_in_place(nonce(number), Aad::from(&*header), payload)
                        .map_or(0, |packet| packet.len())
                }
                None => payload.len(),
            };
            let start = start + HEADER_BYTES;
            let packet = Packet { slot: 0, range: start..start + opened, partial, owner: 0 };
            if merger.try_join(&mut list, &buffers, &packet) {
                continue;
            }
            if let Ok(view) = IpView::parse(&buffers[0][packet.range.clone()]) {
                merger.push(&mut list, &mut buffers, packet, &view, offload);
            }
        }
        for message in list.messages() {
            let header = message.vnet.encode();
            let mut pieces =
                vec![IoSlice::new(&header[..VNET_HEADER_BYTES]), IoSlice::new(list.header(message))];
            pieces.extend(list.pieces(message, &buffers).map(IoSlice::new));
            // A packet that the device does not take, since it is down, is lost.
            drop(device.send_vectored(&pieces));
        }
        list.clear();
    }
}

fn run(options: &Options) -> io::Result<()> {
    let path = Path::new(options)?;
    let device = Arc::new(
        DeviceBuilder::new().name(&options.device).offload(true).inherit_enable_state().build_sync()?,
    );
    let cipher = options.cipher;
    thread::scope(|scope| {
        let back = scope.spawn(|| inward(&device, &path, cipher));
        outward(&device, &path, cipher)?;
        back.join().expect("it does not panic")
    })
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bare_relay: {error}");
            ExitCode::FAILURE
        }
    }
}

//! A lane on a socket of its own: what it seals leaves in batches, what comes is answered as far as the agent needs to go on.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::Arc,
};

use anyhow::{Result, anyhow};
use quinn::Connection;
use quinn_udp::{Transmit, UdpSockRef, UdpSocketState};

use super::{
    keys::Keys,
    payload::{put_varint, take_varint},
    socket::Sent,
};

const PATH_CHALLENGE: u8 = 0x1a;
const PATH_RESPONSE: u8 = 0x1b;
const ACK: u8 = 0x02;

/// Frames of a packet that has to have 1200 bytes.
const PADDED_BYTES: usize = 1200 - 29;

/// An opening of a lane that was accepted.
pub(crate) struct Lane {
    agent: SocketAddr,
    socket: UdpSocket,
    state: UdpSocketState,
    sent: Arc<Sent>,
    /// Where the agent receives.
    theirs: [u8; 8],
    seal: Keys,
    open: Keys,
    next_number: u32,
    /// The newest number of a packet that came.
    heard: u32,
    batch: Vec<u8>,
    /// The length of the packets in `batch`.
    segment: usize,
}

impl Lane {
    /// The lane `index` of `connection` in its opening `epoch`.
    pub(crate) fn new(
        connection: &Connection,
        sent: &Arc<Sent>,
        index: u64,
        epoch: u64,
        theirs: [u8; 8],
    ) -> Result<Self> {
        let secret = |direction: u8| {
            let mut context = [0; 11];
            context[..2].copy_from_slice(&u16::try_from(index).unwrap_or_default().to_be_bytes());
            context[2] = direction;
            context[3..].copy_from_slice(&epoch.to_be_bytes());
            let mut secret = [0; 32];
            let exported = connection.export_keying_material(&mut secret, b"EXPORTER culvert lane", &context);
            exported.map(|()| secret).map_err(|_| anyhow!("no TLS secret"))
        };
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        let mut lane = Self {
            agent: connection.remote_address(),
            state,
            socket,
            sent: Arc::clone(sent),
            theirs,
            seal: Keys::new(secret(0)?),
            open: Keys::new(secret(1)?),
            next_number: 0,
            heard: 0,
            batch: Vec::new(),
            segment: 0,
        };
        lane.challenge();
        Ok(lane)
    }

    /// Puts a packet with `frames` into the batch.
    pub(crate) fn push(&mut self, frames: &[u8]) {
        let length = frames.len() + 29;
        if length != self.segment || self.batch.len() + length > 60_000 {
            self.flush();
            self.segment = length;
        }
        self.seal.seal(&self.theirs, self.next_number, frames, &mut self.batch);
        self.next_number += 1;
        if self.batch.len() / length >= self.state.max_gso_segments() {
            self.flush();
        }
    }

    /// Sends the batch; what the kernel does not take is lost.
    pub(crate) fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let transmit = Transmit {
            destination: self.agent,
            ecn: None,
            contents: &self.batch,
            segment_size: Some(self.segment),
            src_ip: None,
        };
        if self.state.try_send(UdpSockRef::from(&self.socket), &transmit).is_ok() {
            self.sent.add(self.batch.len() / self.segment, self.batch.len());
        }
        self.batch.clear();
    }

    /// Sends a packet with `frames` from another socket.
    pub(crate) fn send_from(&mut self, socket: &UdpSocket, frames: &[u8]) {
        let mut packet = Vec::with_capacity(frames.len() + 29);
        self.seal.seal(&self.theirs, self.next_number, frames, &mut packet);
        self.next_number += 1;
        if socket.send_to(&packet, self.agent).is_ok() {
            self.sent.add(1, packet.len());
        }
    }

    /// Begins the next key phase, whether or not it may.
    pub(crate) fn update_keys(&mut self) {
        self.seal.update();
    }

    /// The newest number of a packet of the agent's that came.
    pub(crate) fn heard(&self) -> u64 {
        self.heard.into()
    }

    /// Takes the packets that came, acknowledges them and answers challenges.
    pub(crate) fn receive(&mut self) {
        let mut buffer = [0; 65_536];
        let mut newest = None;
        while let Ok(length) = self.socket.recv(&mut buffer) {
            let Some((number, frames)) = self.open.open(&mut buffer[..length]) else { continue };
            newest = newest.max(Some(number));
            for data in challenges(frames) {
                let mut answer = vec![PATH_RESPONSE];
                answer.extend(data);
                answer.resize(PADDED_BYTES, 0);
                self.push(&answer);
            }
        }
        if let Some(newest) = newest {
            self.heard = self.heard.max(newest);
            // Everything up to the newest: no packet is lost here, and the agent counts what it is told.
            let mut frame = vec![ACK];
            put_varint(&mut frame, newest.into());
            frame.extend([0, 0]);
            put_varint(&mut frame, newest.into());
            frame.resize(frame.len().max(8), 0);
            self.push(&frame);
            self.flush();
        }
    }

    fn challenge(&mut self) {
        let mut frame = vec![PATH_CHALLENGE];
        frame.extend(rand::random::<[u8; 8]>());
        frame.resize(PADDED_BYTES, 0);
        self.push(&frame);
        self.flush();
    }
}

/// PATH_CHALLENGE with new data.
pub(crate) fn path_challenge() -> Vec<u8> {
    let mut frame = vec![PATH_CHALLENGE];
    frame.extend(rand::random::<[u8; 8]>());
    frame
}

/// Sockets of other ports.
pub(crate) fn other_ports(count: usize) -> io::Result<Vec<UdpSocket>> {
    (0..count)
        .map(|_| {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        })
        .collect()
}

/// The data of the challenges among the frames of a packet.
fn challenges(mut frames: &[u8]) -> Vec<[u8; 8]> {
    let mut found = Vec::new();
    let rest = &mut frames;
    while let Some(kind) = take_varint(rest) {
        match kind {
            0 | 1 => (),
            2 | 3 => skip_ack(rest, kind == 3),
            0x1a | 0x1b => {
                let Some((data, after)) = rest.split_first_chunk() else { break };
                *rest = after;
                if kind == 0x1a {
                    found.push(*data);
                }
            }
            0x31 => {
                let length = take_varint(rest).and_then(|length| usize::try_from(length).ok());
                *rest = length.and_then(|length| rest.get(length..)).unwrap_or_default();
            }
            _ => break,
        }
    }
    found
}

fn skip_ack(rest: &mut &[u8], with_ecn: bool) {
    let mut next = || take_varint(rest).unwrap_or_default();
    let (_largest, _delay, ranges, _first) = (next(), next(), next(), next());
    for _ in 0..(2 * ranges + if with_ecn { 3 } else { 0 }) {
        next();
    }
}

//! The IP packets of hosts behind the agents' devices: UDP over IPv4, with complete checksums.

use super::{
    agents::{inner, of_inner},
    model::{Failure, Model, Way, fail, payload},
};

const IP_BYTES: usize = 20;
const UDP_BYTES: usize = 8;

/// UDP, as IPv4 names it.
const PROTOCOL: u8 = 17;

/// The number under which payloads of a way are known.
fn name(way: (u8, u8, u8)) -> u16 {
    let (from, to, flow) = way;
    u16::from(from) << 12 | u16::from(to) << 8 | u16::from(flow)
}

/// Packet `number` from a host behind one agent to one behind another.
pub(crate) fn packet(way: (u8, u8, u8), number: u32, bytes: u16) -> Vec<u8> {
    let (from, to, flow) = way;
    let payload = payload(Way::Packet, name(way), number, bytes);
    let length = u16::try_from(IP_BYTES + UDP_BYTES + payload.len()).expect("far below 64 KiB");
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([(number >> 8) as u8, number as u8, 0x40, 0, 64, PROTOCOL, 0, 0]);
    packet.extend(inner(from, flow).octets());
    packet.extend(inner(to, flow).octets());
    let sum = !sum(0, &packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend([0x30, flow, 0x40, flow]);
    packet.extend((length - IP_BYTES as u16).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend(payload);
    let sum = !checksum(&packet);
    packet[26..28].copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
    packet
}

/// The sum over the UDP datagram of a packet and its pseudo-header (RFC 768).
fn checksum(packet: &[u8]) -> u16 {
    let pseudo = sum(u32::from(PROTOCOL) + (packet.len() - IP_BYTES) as u32, &packet[12..IP_BYTES]);
    sum(u32::from(pseudo), &packet[IP_BYTES..])
}

fn sum(start: u32, bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let mut sum: u32 = start + words.sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("folded")
}

/// The device of an agent was given a packet; messages about packets that are too large may come, too.
pub(crate) fn written(model: &mut Model, agent: u8, got: &[u8]) -> Result<(), Failure> {
    let is_ours = got.len() > IP_BYTES + UDP_BYTES && got[0] == 0x45 && got[9] == PROTOCOL;
    if !is_ours {
        if got.get(9) == Some(&1) {
            return Ok(());
        }
        fail!("unchanged", "a packet at agent {agent} that nobody sent: {} bytes", got.len());
    }
    let octets = |at: usize| [got[at], got[at + 1], got[at + 2], got[at + 3]];
    let ((from, _), (to, flow)) = (of_inner(octets(12)), of_inner(octets(16)));
    let way = (from, to, flow);
    if to != agent {
        fail!("right place", "a packet of {way:?} at agent {agent}");
    }
    let number = model.at_device(way, name(way), &got[IP_BYTES + UDP_BYTES..])?;
    if got != packet(way, number, model.packet_bytes(way, number)) {
        fail!("unchanged", "packet {number} of {way:?} is another");
    }
    Ok(())
}

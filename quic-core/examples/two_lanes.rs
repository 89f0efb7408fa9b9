//! Two lanes, and between them a network that loses one packet and delivers another late.
//!
//! `cargo run --example two_lanes -p quic-core`
//!
//! The network is a vector and time is an argument: a lane neither opens sockets nor reads a clock.

use std::{
    error::Error,
    str,
    time::{Duration, Instant},
};

use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, OpenError, SealError, Suite, TAG_LEN,
    TRANSMIT_CAPACITY, Timer, frame::datagram,
};

/// How long a packet is on its way.
const ONE_WAY: Duration = Duration::from_millis(20);

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() -> Result<(), Box<dyn Error>> {
    let [mut sender, mut receiver] = lanes();
    #[expect(clippy::disallowed_methods, reason = "any instant will do: only differences count")]
    let mut now = Instant::now();

    let mut packets = Vec::new();
    for number in 0..8 {
        packets.push(sealed(&mut sender, &format!("datagram {number}"), now)?);
    }
    println!("sent: packets 0 to 7, {} bytes, all in flight", sender.in_flight().bytes);
    assert_eq!(sender.in_flight().packets, 8);

    // Packet 2 is lost, and packet 5 arrives behind packet 6.
    now += ONE_WAY;
    for number in [0, 1, 3, 4, 6, 5, 7] {
        let mut arrived = packets[number].clone();
        let opened = receiver.open(&mut arrived, now)?;
        for datagram in opened.datagrams() {
            println!("arrived: packet {}, {:?}", opened.packet_number.0, str::from_utf8(datagram.payload)?);
        }
    }

    // What somebody recorded and sends again is refused: each packet number opens once.
    let repeated = receiver.open(&mut packets[7].clone(), now).err();
    println!("arrived again: packet 7, refused: {}", OpenError::Duplicate);
    assert_eq!(repeated, Some(OpenError::Duplicate));

    // The receiver waits for more packets before it acknowledges, for as long as its timer says.
    let (due, timer) = receiver.poll_timeout().ok_or("an acknowledgement is to be sent")?;
    assert_eq!(timer, Timer::AckDelay);
    println!("acknowledged: after {} ms, in one packet", (due - now).as_millis());
    now = due;
    receiver.handle_timeout(now);
    let mut ack = [0; TRANSMIT_CAPACITY];
    let len = receiver.poll_transmit(&mut ack, now)?.ok_or("the acknowledgement is due")?;

    // A packet is lost once one that was sent three later is acknowledged (RFC 9002 §6.1.1). The late one is not.
    now += ONE_WAY;
    sender.open(&mut ack[..len], now)?;
    let stats = sender.stats();
    println!("the sender knows: {} packets arrived, {} is lost", stats.acked_packets, stats.lost_packets);
    assert_eq!((stats.acked_packets, stats.lost_packets), (7, 1));

    // A lost datagram stays lost, so there is nothing left to do: no timer runs.
    assert_eq!(sender.in_flight().packets, 0);
    assert_eq!((sender.poll_timeout(), receiver.poll_timeout()), (None, None));
    Ok(())
}

/// A packet with `payload` in one DATAGRAM frame, sealed in place.
fn sealed(lane: &mut Lane, payload: &str, now: Instant) -> Result<Vec<u8>, SealError> {
    let mut packet = vec![0; OVERHEAD + 1 + payload.len()];
    let frames_end = packet.len() - TAG_LEN;
    let frame = &mut packet[HEADER_LEN..frames_end];
    let header_len = datagram::write_header_to_end(frame).expect("the packet was made for it");
    frame[header_len..].copy_from_slice(payload.as_bytes());
    lane.seal(&mut packet, true, now)?;
    Ok(packet)
}

/// Both ends. Secrets and connection IDs come from a QUIC connection between them; here they are made up.
fn lanes() -> [Lane; 2] {
    let (secrets, ids) = ([[0xaa; 32], [0xbb; 32]], [ConnectionId([1; 8]), ConnectionId([2; 8])]);
    [(0, 1), (1, 0)].map(|(own, other)| {
        let config = LaneConfig {
            suite: Suite::Aes128Gcm,
            send_secret: &secrets[own],
            receive_secret: &secrets[other],
            remote_cid: ids[other],
            local_cid: ids[own],
            ack: AckProfile::Throughput,
            key_limit: None,
            initial_rtt: None,
        };
        Lane::new(&config).expect("the secrets are as long as the suite needs them")
    })
}

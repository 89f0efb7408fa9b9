//! The first datagrams of clients of other protocols over UDP. Scanners try these on every port.

use rand::{RngExt, rngs::SmallRng};

use crate::probe::random;

/// The openings, each as the protocol's name and the datagram.
pub(super) fn openings(rng: &mut SmallRng) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("DNS query", dns(rng)),
        ("STUN binding request", stun(rng)),
        ("DTLS 1.2 ClientHello", dtls(rng)),
        ("OpenVPN hard reset", openvpn(rng)),
        ("WireGuard initiation", wireguard(rng)),
        ("IKEv2 SA_INIT", ike(rng)),
        ("NTP client", ntp(rng)),
        ("NTP monlist", vec![0x17, 0, 3, 0x2a, 0, 0, 0, 0]),
        ("SIP OPTIONS", sip()),
        (
            "SSDP search",
            b"M-SEARCH * HTTP/1.1\r\nMAN: \"ssdp:discover\"\r\nST: ssdp:all\r\nMX: 1\r\n\r\n".to_vec(),
        ),
        ("SNMP get", snmp()),
        ("TFTP read", b"\0\x01a\0octet\0".to_vec()),
        ("RADIUS status", [&[12, 1, 0, 20], random(rng, 16).as_slice()].concat()),
        ("HTTP", b"GET / HTTP/1.0\r\n\r\n".to_vec()),
        ("four zeros", vec![0; 4]),
        ("a line", b"\r\n\r\n".to_vec()),
    ]
}

/// RFC 1035 §4: `example.com A`, recursion desired.
fn dns(rng: &mut SmallRng) -> Vec<u8> {
    let header = [random(rng, 2), vec![1, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    [header.as_slice(), b"\x07example\x03com\0", &[0, 1, 0, 1]].concat()
}

/// RFC 8489 §5: a request without attributes.
fn stun(rng: &mut SmallRng) -> Vec<u8> {
    [&[0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42], random(rng, 12).as_slice()].concat()
}

/// RFC 6347 §4.2: a record with a ClientHello of one suite.
fn dtls(rng: &mut SmallRng) -> Vec<u8> {
    let mut hello = vec![0xfe, 0xfd];
    hello.extend(random(rng, 32));
    // No session, no cookie, ECDHE-ECDSA with AES-128-GCM, no compression.
    hello.extend([0, 0, 0, 2, 0xc0, 0x2b, 1, 0]);
    let length = hello.len() as u8;
    let handshake = [&[1, 0, 0, length, 0, 0, 0, 0, 0, 0, 0, length], hello.as_slice()].concat();
    let record = [22, 0xfe, 0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, handshake.len() as u8];
    [record.as_slice(), &handshake].concat()
}

/// P_CONTROL_HARD_RESET_CLIENT_V2 with a session id, no acknowledgement, packet 0.
fn openvpn(rng: &mut SmallRng) -> Vec<u8> {
    [&[7 << 3], random(rng, 8).as_slice(), &[0; 5]].concat()
}

/// The first message of WireGuard's handshake: type 1, 148 bytes, with MACs that do not fit.
fn wireguard(rng: &mut SmallRng) -> Vec<u8> {
    [&[1, 0, 0, 0], random(rng, 144).as_slice()].concat()
}

/// RFC 7296 §3.1: a header that announces a security association, and random payload bytes.
fn ike(rng: &mut SmallRng) -> Vec<u8> {
    let body = random(rng, 200);
    let length = u32::try_from(28 + body.len()).unwrap_or(u32::MAX);
    let initiator = random(rng, 8);
    [&initiator, [0; 8].as_slice(), &[33, 0x20, 34, 8, 0, 0, 0, 0], &length.to_be_bytes(), &body].concat()
}

/// RFC 5905 §7.3: version 4, mode 3.
fn ntp(rng: &mut SmallRng) -> Vec<u8> {
    let mut packet = vec![0x23; 1];
    packet.extend([0; 39]);
    packet.extend(rng.random::<[u8; 8]>());
    packet
}

fn sip() -> Vec<u8> {
    b"OPTIONS sip:a@b SIP/2.0\r\nVia: SIP/2.0/UDP c;branch=z9hG4bK1\r\nFrom: <sip:a@c>;tag=1\r\nTo: <sip:a@b>\r\n\
      Call-ID: 1\r\nCSeq: 1 OPTIONS\r\nMax-Forwards: 70\r\nContent-Length: 0\r\n\r\n"
        .to_vec()
}

/// SNMPv1 get of sysDescr with the community "public".
fn snmp() -> Vec<u8> {
    [
        b"\x30\x26\x02\x01\x00\x04\x06public\xa0\x19\x02\x01\x01\x02\x01\x00\x02\x01\x00".as_slice(),
        b"\x30\x0e\x30\x0c\x06\x08\x2b\x06\x01\x02\x01\x01\x01\x00\x05\x00",
    ]
    .concat()
}

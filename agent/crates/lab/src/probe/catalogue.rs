//! The packets that each class of probes consists of.

use gate::{knock::KNOCK_BYTES, retry::RETRY_TOKEN_BYTES};
use rand::{RngExt, rngs::SmallRng};

use crate::probe::{
    Class, Probe,
    forge::{
        DRAFT_29, FIXED_BIT, HANDSHAKE, INITIAL, INITIAL_V2, Initial, MIN_DATAGRAM, RETRY, V1, V2, ZERO_RTT,
        crypto, long, put_varint,
    },
    hello::client_hello,
    protocols, random,
};

/// The application protocols of the complete Initials: what browsers want, and what Culvert's own clients say.
const PROTOCOLS: [&[u8]; 2] = [b"h3", b"culvert/1"];

/// Bytes of tokens: those of knocks, of Retry tokens, and others.
const TOKEN_BYTES: [usize; 7] =
    [1, 16, KNOCK_BYTES - 1, KNOCK_BYTES, 209, RETRY_TOKEN_BYTES - 1, RETRY_TOKEN_BYTES];

/// The longest UDP payload here; more than fits one Ethernet frame, so that fragments are among them.
const MAX_BYTES: usize = 1_500;

/// Lengths of connection IDs that clients commonly choose.
const CID_BYTES: usize = 8;

/// Makes all packets, class by class.
pub(super) fn all(rng: &mut SmallRng) -> Vec<Probe> {
    let mut list = List { probes: Vec::new() };
    unknown_versions(&mut list, rng);
    initials(&mut list, rng);
    malformed_initials(&mut list, rng);
    illegal_frames(&mut list, rng);
    broken_lengths(&mut list, rng);
    coalesced(&mut list, rng);
    other_long_headers(&mut list, rng);
    for bytes in 1..=MAX_BYTES {
        let mut datagram = random(rng, bytes);
        datagram[0] = datagram[0] & 0x3f | FIXED_BIT;
        list.once(Class::ShortHeader, format!("{bytes} bytes"), datagram);
    }
    for (name, bytes) in protocols::openings(rng) {
        list.twice(Class::OtherProtocol, name, bytes);
    }
    for bytes in 0..=MAX_BYTES {
        list.once(Class::Random, format!("{bytes} bytes"), random(rng, bytes));
    }
    mixture(&mut list);
    list.probes
}

/// The packets that were made so far.
struct List {
    probes: Vec<Probe>,
}

impl List {
    fn once(&mut self, class: Class, detail: impl Into<String>, bytes: Vec<u8>) {
        self.probes.push(Probe { class, detail: detail.into(), bytes, rounds: 1 });
    }

    fn twice(&mut self, class: Class, detail: impl Into<String>, bytes: Vec<u8>) {
        self.probes.push(Probe { class, detail: detail.into(), bytes, rounds: 2 });
    }
}

/// Version Negotiation is asked for by a datagram of at least 1200 bytes whose version nobody speaks.
fn unknown_versions(list: &mut List, rng: &mut SmallRng) {
    const CLASS: Class = Class::UnknownVersion;
    // Of the form that RFC 9000 §6.3 reserves for this.
    const RESERVED: u32 = 0x1a2a_3a4a;
    let ask = |rng: &mut SmallRng, first: u8, version, dcid_bytes, bytes: usize| {
        let (dcid, scid) = (random(rng, dcid_bytes), random(rng, CID_BYTES));
        let header = long(first, version, &dcid, &scid);
        let rest = random(rng, bytes - header.len());
        [header, rest].concat()
    };
    for bytes in [MIN_DATAGRAM - 1, MIN_DATAGRAM, MAX_BYTES - 28, MAX_BYTES] {
        list.twice(CLASS, format!("{bytes} bytes"), ask(rng, INITIAL, RESERVED, CID_BYTES, bytes));
    }
    let without_bit = ask(rng, INITIAL & !FIXED_BIT, RESERVED, CID_BYTES, MIN_DATAGRAM);
    list.twice(CLASS, "fixed bit cleared", without_bit);
    // Versions other than ours may have longer connection IDs (RFC 8999 §5.1).
    for dcid_bytes in [0, 7, 20, 21, 255] {
        let datagram = ask(rng, INITIAL, RESERVED, dcid_bytes, MIN_DATAGRAM);
        list.twice(CLASS, format!("destination ID of {dcid_bytes} bytes"), datagram);
    }
    for first in [ZERO_RTT, HANDSHAKE, RETRY] {
        let datagram = ask(rng, first, RESERVED, CID_BYTES, MIN_DATAGRAM);
        list.twice(CLASS, format!("first byte {first:#x}"), datagram);
    }
    let versions = [
        ("draft 29", DRAFT_29),
        ("draft 34", 0xff00_0022),
        ("version 2", V2),
        ("Google's Q050", 0x5130_3530),
        ("all ones", u32::MAX),
    ];
    for (name, version) in versions {
        list.twice(CLASS, name, ask(rng, INITIAL, version, CID_BYTES, MIN_DATAGRAM));
    }
    for (name, first, version) in [("draft 29", INITIAL, DRAFT_29), ("version 2", INITIAL_V2, V2)] {
        let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
        let frames = crypto(0, &client_hello(rng, b"h3", &scid));
        let initial = Initial { first, version, ..complete(&dcid, &scid, &frames) };
        list.twice(CLASS, format!("a whole Initial of {name}"), initial.seal());
    }
}

/// An Initial of version 1 as a client sends it first, in a datagram of 1200 bytes.
fn complete<'a>(dcid: &'a [u8], scid: &'a [u8], frames: &'a [u8]) -> Initial<'a> {
    Initial { first: INITIAL, version: V1, dcid, scid, token: &[], number: 0, frames, bytes: MIN_DATAGRAM }
}

/// The fields of an Initial's header.
struct Parts {
    dcid: Vec<u8>,
    scid: Vec<u8>,
    frames: Vec<u8>,
}

impl Parts {
    fn new(rng: &mut SmallRng, dcid_bytes: usize, protocol: &[u8]) -> Self {
        let (dcid, scid) = (random(rng, dcid_bytes), random(rng, CID_BYTES));
        let frames = crypto(0, &client_hello(rng, protocol, &scid));
        Self { dcid, scid, frames }
    }

    fn initial(&self) -> Initial<'_> {
        complete(&self.dcid, &self.scid, &self.frames)
    }
}

fn initials(list: &mut List, rng: &mut SmallRng) {
    for protocol in PROTOCOLS {
        let name = String::from_utf8_lossy(protocol);
        let parts = Parts::new(rng, CID_BYTES, protocol);
        list.twice(Class::Initial, format!("ALPN {name}"), parts.initial().seal());
        let parts = Parts::new(rng, 20, protocol);
        let large = Initial { bytes: 1_472, ..parts.initial() };
        list.twice(Class::Initial, format!("ALPN {name}, 1472 bytes"), large.seal());
        for token_bytes in TOKEN_BYTES {
            let (parts, token) = (Parts::new(rng, CID_BYTES, protocol), random(rng, token_bytes));
            let initial = Initial { token: &token, ..parts.initial() };
            let detail = format!("ALPN {name}, token of {token_bytes} bytes");
            list.twice(Class::InitialWithToken, detail, initial.seal());
        }
        for token_bytes in [0, KNOCK_BYTES] {
            let (parts, token) = (Parts::new(rng, CID_BYTES, protocol), random(rng, token_bytes));
            let hello = client_hello(rng, protocol, &parts.scid);
            let (start, end) = hello.split_at(hello.len() / 2);
            let frames = [crypto(0, start), crypto(start.len() as u64, end)];
            for (number, frames) in (0..).zip(&frames) {
                let initial = Initial { token: &token, number, frames, ..parts.initial() };
                let detail = format!("ALPN {name}, token of {token_bytes} bytes, part {number}");
                list.twice(Class::SplitInitial, detail, initial.seal());
            }
        }
    }
}

fn malformed_initials(list: &mut List, rng: &mut SmallRng) {
    let knock = random(rng, KNOCK_BYTES);
    for token in [&[], knock.as_slice()] {
        let parts = Parts::new(rng, CID_BYTES, b"h3");
        let initial = Initial { first: INITIAL & !FIXED_BIT, token, ..parts.initial() };
        list.twice(Class::FixedBit, format!("token of {} bytes", token.len()), initial.seal());

        let initial = Initial { first: INITIAL & !FIXED_BIT, bytes: 600, token, ..parts.initial() };
        list.twice(Class::FixedBit, format!("600 bytes, token of {} bytes", token.len()), initial.seal());

        let mut datagram = Initial { token, ..parts.initial() }.seal();
        if let Some(last) = datagram.last_mut() {
            *last ^= 1;
        }
        list.twice(Class::BrokenTag, format!("token of {} bytes", token.len()), datagram);
    }
    // The tag covers the header: any of its bytes breaks it.
    for at in [6, 16, 30] {
        let mut datagram = Parts::new(rng, CID_BYTES, b"h3").initial().seal();
        datagram[at] ^= 0x80;
        list.twice(Class::BrokenTag, format!("byte {at} flipped"), datagram);
    }
    // With what fits of the ClientHello.
    for bytes in [60, 300, 600, MIN_DATAGRAM - 1] {
        let parts = Parts::new(rng, CID_BYTES, b"h3");
        let frames = if bytes < 400 { &[1] } else { parts.frames.as_slice() };
        let initial = Initial { bytes, frames, ..parts.initial() };
        list.twice(Class::SmallInitial, format!("{bytes} bytes"), initial.seal());
    }
    // The last three are longer than version 1 has them (RFC 9000 §17.2).
    for cid_bytes in (0..=20).chain([21, 64, 255]) {
        let parts = Parts::new(rng, cid_bytes, b"h3");
        let detail = format!("destination of {cid_bytes} bytes");
        list.twice(Class::ConnectionId, detail, parts.initial().seal());
    }
    for scid_bytes in [0, 20, 21] {
        let (parts, scid) = (Parts::new(rng, CID_BYTES, b"h3"), random(rng, scid_bytes));
        let initial = Initial { scid: &scid, ..parts.initial() };
        list.twice(Class::ConnectionId, format!("source of {scid_bytes} bytes"), initial.seal());
    }
}

/// The frames for which a QUIC server closes the connection.
fn illegal_frames(list: &mut List, rng: &mut SmallRng) {
    let hello = client_hello(rng, b"h3", &[0; CID_BYTES]);
    let (random_hello, half) = (random(rng, 300), hello.len() / 2);
    let cases: [(&str, Vec<u8>); 14] = [
        ("padding only", Vec::new()),
        ("PING only", vec![1]),
        ("an unknown frame", vec![0x3f, 0, 0]),
        ("STREAM", vec![0x08, 0, b'a']),
        ("HANDSHAKE_DONE", vec![0x1e]),
        ("DATAGRAM", vec![0x31, 1, 0]),
        ("NEW_TOKEN", vec![0x07, 1, 0]),
        ("ACK of what was not sent", vec![0x02, 0x20, 0, 0, 0]),
        ("CONNECTION_CLOSE", vec![0x1c, 0, 0, 0]),
        ("CRYPTO that is no TLS", crypto(0, &random_hello)),
        ("CRYPTO far ahead", crypto(1 << 40, &hello)),
        ("CRYPTO cut short", crypto(0, &hello)[..40].to_vec()),
        ("the first half of a ClientHello", crypto(0, &hello[..half])),
        ("a ClientHello and its end again, otherwise", {
            [crypto(0, &hello), crypto(half as u64, &random_hello[..100])].concat()
        }),
    ];
    for (name, mut frames) in cases {
        if name == "CRYPTO cut short" {
            // Nothing may follow that would complete it: padding stands before.
            frames.splice(0..0, vec![0; 1_050]);
        }
        let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
        list.twice(Class::IllegalFrames, name, complete(&dcid, &scid, &frames).seal());
    }
    let parts = Parts::new(rng, CID_BYTES, b"h3");
    // Bits that must be zero once unmasked (RFC 9000 §17.2).
    let reserved = Initial { first: INITIAL | 0x0c, ..parts.initial() };
    list.twice(Class::IllegalFrames, "reserved bits set", reserved.seal());
    let ahead = Initial { number: u32::MAX, ..parts.initial() };
    list.twice(Class::IllegalFrames, "packet number 2^32 - 1", ahead.seal());
    let nothing = parts.initial().seal();
    list.twice(Class::IllegalFrames, "the protocol of nobody", {
        let scid = &parts.scid;
        let frames = crypto(0, &client_hello(rng, b"no-such-protocol", scid));
        Initial { frames: &frames, ..parts.initial() }.seal()
    });
    list.twice(Class::Initial, "the same connection ID as another", nothing);
}

/// Lengths that say more than there is, or so little that no packet fits.
fn broken_lengths(list: &mut List, rng: &mut SmallRng) {
    const CLASS: Class = Class::BrokenLength;
    let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
    let header = long(INITIAL, V1, &dcid, &scid);
    let filled = |rng: &mut SmallRng, start: Vec<u8>| {
        let rest = random(rng, MIN_DATAGRAM - start.len());
        [start, rest].concat()
    };
    for (name, token_bytes) in [("its end", 1_180), ("a whole datagram", 16_000), ("2^62 - 1", (1 << 62) - 1)]
    {
        let mut start = header.clone();
        put_varint(&mut start, token_bytes);
        list.twice(CLASS, format!("a token beyond {name}"), filled(rng, start));
    }
    for length in [0, 1, 4, 19, 20, 1_190, 16_000, (1 << 62) - 1] {
        let mut start = header.clone();
        start.push(0);
        put_varint(&mut start, length);
        list.twice(CLASS, format!("a packet of {length} bytes"), filled(rng, start));
    }
    let mut beyond = vec![INITIAL];
    beyond.extend(V1.to_be_bytes());
    // Every length of a connection ID that a long header can name, in a header that ends there.
    for cid_bytes in [0, 8, 20, 21, 255] {
        let mut datagram = beyond.clone();
        datagram.push(cid_bytes);
        list.twice(CLASS, format!("a header cut before an ID of {cid_bytes} bytes"), datagram);
    }
    let complete = Parts::new(rng, CID_BYTES, b"h3").initial().seal();
    for bytes in (1..header.len() + 24).step_by(3) {
        list.twice(CLASS, format!("an Initial cut to {bytes} bytes"), complete[..bytes].to_vec());
    }
}

fn coalesced(list: &mut List, rng: &mut SmallRng) {
    const CLASS: Class = Class::Coalesced;
    let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
    let hello = client_hello(rng, b"h3", &scid);
    let (start, end) = hello.split_at(hello.len() / 2);
    let first = Initial { bytes: 600, ..complete(&dcid, &scid, &crypto(0, start)) }.seal();
    let second =
        Initial { number: 1, bytes: 600, ..complete(&dcid, &scid, &crypto(start.len() as u64, end)) }.seal();
    list.twice(CLASS, "two Initials with half a ClientHello each", [first, second].concat());

    let hello = crypto(0, &hello);
    let initial = Initial { bytes: 700, ..complete(&dcid, &scid, &hello) }.seal();
    for (name, kind) in [("0-RTT", ZERO_RTT), ("Handshake", HANDSHAKE), ("Retry", RETRY)] {
        let other = filled_long(rng, kind, &dcid, &scid, 500);
        list.twice(CLASS, format!("Initial, {name}"), [initial.clone(), other.clone()].concat());
        list.twice(CLASS, format!("{name}, Initial"), [other, initial.clone()].concat());
    }
    let (unknown, other) = (random(rng, CID_BYTES), crypto(0, &client_hello(rng, b"h3", &scid)));
    let other = Initial { bytes: 600, ..complete(&unknown, &scid, &other) }.seal();
    list.twice(CLASS, "Initials of two connections", [initial.clone(), other].concat());
    list.twice(CLASS, "Initial, random bytes", [initial.clone(), random(rng, 500)].concat());
    list.twice(CLASS, "Initial, zeros", [initial, vec![0; 500]].concat());
}

/// A long header of version 1 with its length, and random bytes up to `bytes`.
fn filled_long(rng: &mut SmallRng, first: u8, dcid: &[u8], scid: &[u8], bytes: usize) -> Vec<u8> {
    let mut packet = long(first, V1, dcid, scid);
    // A Retry has no length; what stands there is its token.
    let rest = bytes.saturating_sub(packet.len() + 2);
    packet.extend((0x4000 | u16::try_from(rest).unwrap_or(0x3fff)).to_be_bytes());
    packet.extend(random(rng, rest));
    packet
}

fn other_long_headers(list: &mut List, rng: &mut SmallRng) {
    let kinds = [
        (Class::ZeroRtt, ZERO_RTT, [60, 300, MIN_DATAGRAM, 1_472]),
        (Class::Handshake, HANDSHAKE, [60, 300, MIN_DATAGRAM, 1_472]),
        (Class::Retry, RETRY, [40, 100, MIN_DATAGRAM, 1_472]),
    ];
    for (class, first, sizes) in kinds {
        for bytes in sizes {
            let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
            list.twice(class, format!("{bytes} bytes"), filled_long(rng, first, &dcid, &scid, bytes));
        }
        for dcid_bytes in [0, 4, 20] {
            let (dcid, scid) = (random(rng, dcid_bytes), random(rng, CID_BYTES));
            let detail = format!("destination ID of {dcid_bytes} bytes");
            list.twice(class, detail, filled_long(rng, first, &dcid, &scid, MIN_DATAGRAM));
        }
        let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
        let datagram = filled_long(rng, first & !FIXED_BIT, &dcid, &scid, MIN_DATAGRAM);
        list.twice(class, "fixed bit cleared", datagram);
    }
    for bytes in [27, 100, MIN_DATAGRAM, 1_472] {
        let (dcid, scid) = (random(rng, CID_BYTES), random(rng, CID_BYTES));
        let mut datagram = long(0x80 | rng.random::<u8>(), 0, &dcid, &scid);
        // The versions that a server names.
        while datagram.len() < bytes {
            datagram.extend(V1.to_be_bytes());
        }
        list.twice(Class::VersionZero, format!("{} bytes", datagram.len()), datagram);
    }
}

/// Repeats the probes of 1200 bytes from one port: a sender's burst, which the kernel may hand over as one buffer.
fn mixture(list: &mut List) {
    let equal = list.probes.iter().filter(|probe| probe.bytes.len() == MIN_DATAGRAM);
    let mixed: Vec<Probe> = equal
        .map(|probe| Probe {
            class: Class::Mixture,
            detail: format!("{}: {}", probe.class.label(), probe.detail),
            bytes: probe.bytes.clone(),
            rounds: 1,
        })
        .collect();
    list.probes.extend(mixed);
}

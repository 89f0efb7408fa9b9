//! What the targets in `fuzz/` run, and what the tests replay their corpora through: properties of any input.
//!
//! | which input | file |
//! |---|---|
//! | the configuration, links, control messages, payloads, datagrams and Initials before the gate | this one |
//! | lines of the control socket, key files, files of the host | `operator.rs` |
//! | tokens, certificates and handshakes of strangers, the decoy's flows | `strangers.rs` |
//! | IP packets | `l3/properties.rs` |
//! | datagrams in pieces | `relay/properties.rs` |
//! | the state file, reloads, used knocks, datagrams of bench | `config/state_properties.rs`, `config/reload_rules.rs`, `io/journal/properties.rs`, `bench/wire.rs` |

use std::{
    io::Cursor,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{Arc, LazyLock},
};

use bytes::BytesMut;
use quinn_proto::{ConnectionId, FixedLengthConnectionIdParser, LongType, ProtectedHeader, crypto};
use wire::{
    context::Context,
    messages::{Framer, MAX_MESSAGE_BYTES, Message, MessageError, StreamAnswer, StreamOpen},
};
use zeroize::Zeroizing;

use crate::{
    config::{Config, ConfigProblems, MAX_CLOCK_WINDOW},
    control::tls::{ClientKeys, Refusal, TlsIdentity, server_crypto},
    gate::{
        classify::{Class, Initial, MAX_CID_BYTES},
        initial::client_hello_hash,
        knock::{KnockError, MAC_BYTES, ServerKey, epoch, epochs, hello_hash, open, seal},
        retry::{RetryError, RetryKey},
    },
    identity::{Endpoint, Identity, PublicKey, ShareLink},
};

mod operator;
mod strangers;

pub use self::{
    operator::{host_text, key_file, socket_answer, socket_request},
    strangers::{certificate, decoy_flows, retry_token, server_hello},
};
pub use crate::relay::properties::reassembly;
pub use ip::properties::{ip_cut, ip_fragments, ip_merge, ip_view};

/// Takes `input` as a state file, see `config/state_properties.rs`.
pub fn state_text(input: &[u8]) {
    crate::config::state::properties::state_text(input);
}

/// Takes `input` as two configurations, see `config/reload_rules.rs`.
pub fn reload_files(input: &[u8]) {
    crate::config::reload_rules::reload_files(input);
}

/// Takes `input` as a file of used knocks, see `io/journal/properties.rs`.
pub fn knock_journal(input: &[u8]) {
    crate::gate::journal::knock_journal(input);
}

/// Takes `input` as a datagram of a run of bench, see `bench/wire.rs`.
pub fn bench_datagram(input: &[u8]) {
    crate::bench::bench_datagram(input);
}

/// Takes `input` as what a peer writes on the control stream. Its first byte says how many bytes follow that are the
/// lengths of the chunks in which the rest arrives, over and over.
///
/// The chunks make no difference, and what is decoded is encoded to something that is decoded to the same.
pub fn control_messages(input: &[u8]) {
    let Some((&count, rest)) = input.split_first() else { return };
    let (lengths, stream) = rest.split_at(rest.len().min(count.into()));
    let whole = frames(stream, &mut std::iter::repeat(stream.len().max(1)));
    let mut chunks = lengths.iter().cycle().map(|length| usize::from(*length).max(1));
    let mut one_by_one = std::iter::repeat(1);
    let chunked: &mut dyn Iterator<Item = usize> =
        if lengths.is_empty() { &mut one_by_one } else { &mut chunks };
    assert_eq!(frames(stream, chunked), whole);
    for frame in &whole.complete {
        message(frame);
        stream_header(frame);
    }
}

/// What a framer made of a stream.
#[derive(Debug, PartialEq)]
struct Cut {
    complete: Vec<Vec<u8>>,
    ended_inside: bool,
    broken: bool,
}

fn frames(mut stream: &[u8], chunks: &mut dyn Iterator<Item = usize>) -> Cut {
    let mut framer = Framer::new(MAX_MESSAGE_BYTES);
    let mut cut = Cut { complete: Vec::new(), ended_inside: false, broken: false };
    while !stream.is_empty() && !cut.broken {
        let (mut chunk, rest) = stream.split_at(chunks.next().map_or(1, |length| length.min(stream.len())));
        stream = rest;
        loop {
            match framer.pull(&mut chunk) {
                Ok(Some(frame)) => cut.complete.push(frame),
                Ok(None) => break,
                Err(too_long) => {
                    assert!(too_long.bytes > MAX_MESSAGE_BYTES as u64);
                    cut.broken = true;
                    break;
                }
            }
        }
        assert!(cut.broken || chunk.is_empty(), "what is not taken is lost");
    }
    cut.ended_inside = !cut.broken && framer.is_inside_message();
    cut
}

fn message(bytes: &[u8]) {
    match Message::decode(bytes) {
        Ok(message) => {
            let mut encoded = Vec::new();
            message.encode(&mut encoded);
            let again = Message::decode(&only(&encoded));
            assert_eq!(again.as_ref(), Ok(&message));
        }
        Err(error) => {
            assert!(MessageError::LABELS.contains(&error.label()));
            assert!(!error.to_string().is_empty());
        }
    }
}

fn stream_header(bytes: &[u8]) {
    if let Ok(open) = StreamOpen::decode(bytes) {
        let mut encoded = Vec::new();
        open.encode(&mut encoded);
        assert_eq!(StreamOpen::decode(&only(&encoded)), Ok(open));
    }
    if let Ok(answer) = StreamAnswer::decode(bytes) {
        let mut encoded = Vec::new();
        answer.encode(&mut encoded);
        assert_eq!(StreamAnswer::decode(&only(&encoded)), Ok(answer));
    }
}

/// The one message that was encoded.
fn only(encoded: &[u8]) -> Vec<u8> {
    let mut cut = frames(encoded, &mut std::iter::repeat(encoded.len()));
    assert!(!cut.broken && !cut.ended_inside && cut.complete.len() == 1, "{cut:?}");
    cut.complete.remove(0)
}

/// Takes `input` as the data of a DATAGRAM frame.
///
/// The payload lies inside, and writing what was read, before the same payload, is read alike and written alike.
pub fn payload_context(input: &[u8]) {
    let Some(context) = Context::decode(input) else { return };
    let header = context.encode();
    match (context, payload_at(&context)) {
        (Context::Unsupported(_), _) => assert_eq!(Context::decode(header.as_slice()), Some(context)),
        (_, at) => {
            let payload = &input[at.unwrap_or(input.len())..];
            let again = [header.as_slice(), payload].concat();
            let decoded = Context::decode(&again).expect("it was encoded by us");
            assert_eq!(decoded.encode(), header);
            assert_eq!(payload_at(&decoded), at.map(|_| header.as_slice().len()));
            assert!(header.as_slice().len() <= input.len() - payload.len(), "the shortest form");
        }
    }
}

fn payload_at(context: &Context) -> Option<usize> {
    match *context {
        Context::Packet { payload_at, .. }
        | Context::Flow { payload_at, .. }
        | Context::Piece { payload_at, .. }
        | Context::Open { payload_at, .. } => Some(payload_at),
        Context::OpenEmpty { .. }
        | Context::Confirmed(_)
        | Context::Refused(..)
        | Context::Unknown(_)
        | Context::Closed(_)
        | Context::Unsupported(_) => None,
    }
}

/// Takes `input` as a configuration file.
///
/// It is accepted, or every problem has words and a remedy, and a line within the file.
pub fn config_text(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    match Config::parse(&text, Path::new("/etc/culvert")) {
        Ok(config) => {
            assert!(config.udp.iter().chain(&config.tcp).all(|forward| forward.peer < config.peers.len()));
            let services = config.peers.iter().flat_map(|peer| &peer.services);
            assert!(services.into_iter().all(|place| *place < config.services.len()));
        }
        Err(problems) => well_said(&problems, &text),
    }
}

/// There are problems, and each has words, a remedy, and a line within the text, if it is about a line.
pub(crate) fn well_said(problems: &ConfigProblems, text: &str) {
    assert!(!problems.problems.is_empty() && !problems.to_string().is_empty());
    let lines = 1 + text.bytes().filter(|byte| *byte == b'\n').count();
    for problem in &problems.problems {
        assert!(!problem.problem.is_empty() && !problem.remedy.is_empty(), "{problem:?}");
        assert!(problem.line.is_none_or(|line| (1..=lines).contains(&line)), "{problem:?}");
    }
}

/// Takes `input` as a share link, and its parts as an endpoint and a public key.
///
/// What is accepted is written so that it is read alike.
pub fn share_link(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    if let Ok(link) = text.parse::<ShareLink>() {
        assert_eq!(link.to_string().parse(), Ok(link));
    }
    if let Ok(endpoint) = text.parse::<Endpoint>() {
        assert_ne!(endpoint.port, 0);
        assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
    }
    if let Ok(key) = text.parse::<PublicKey>() {
        assert_eq!(key.to_string(), text, "a key is written in one way only");
    }
}

/// Takes `input` as a datagram before the gate.
///
/// It is read as quinn-proto reads it, the fixed bit ignored, or refused where quinn-proto would look past its end.
pub fn classify(input: &[u8]) {
    let class = crate::gate::classify::classify(input);
    let mut cursor = Cursor::new(BytesMut::from(input));
    let parser = FixedLengthConnectionIdParser::new(8);
    let header = ProtectedHeader::decode(&mut cursor, &parser, &[1], true);
    let position = usize::try_from(cursor.position()).expect("within the input");
    match header {
        Err(_) | Ok(ProtectedHeader::VersionNegotiate { .. }) => assert_eq!(class, Class::Other),
        Ok(ProtectedHeader::Short { dst_cid, .. }) => {
            assert!(matches!(class, Class::Short { cid } if cid[..] == dst_cid[..]));
        }
        Ok(ProtectedHeader::Retry { dst_cid, .. }) => assert_eq!(class, Class::Retry { dcid: &dst_cid }),
        Ok(ProtectedHeader::Long { ty: LongType::Handshake, dst_cid, .. }) => {
            assert_eq!(class, Class::Handshake { dcid: &dst_cid });
        }
        Ok(ProtectedHeader::Long { ty: LongType::ZeroRtt, dst_cid, .. }) => {
            assert_eq!(class, Class::ZeroRtt { dcid: &dst_cid });
        }
        Ok(ProtectedHeader::Initial(header)) => {
            let length = usize::try_from(header.len).unwrap_or(usize::MAX);
            if !(20..=input.len() - position).contains(&length) {
                assert_eq!(class, Class::Other);
                return;
            }
            assert_eq!(
                class,
                Class::Initial(Initial {
                    dcid: &header.dst_cid,
                    scid: &header.src_cid,
                    token: &input[header.token_pos],
                    packet_number_at: position,
                    end: position + length,
                })
            );
        }
    }
}

/// Takes `input` as a connection ID, with its length before it, and the token of a packet to it.
///
/// The token opens nothing, also if its sender knows the server's public key; a knock made for the same opens.
pub fn knock_open(input: &[u8]) {
    let Some((&bytes, rest)) = input.split_first() else { return };
    let (dcid, token) = rest.split_at(rest.len().min(usize::from(bytes) % (MAX_CID_BYTES + 2)));
    // Not the server of the examples, whose knocks are in the corpus.
    let server = identity(4);
    let own = server.agreement_key();
    let key = ServerKey::new(&server.public_key()).expect("a key that was generated");
    let seconds = u64::from_be_bytes(*token.first_chunk().unwrap_or(&[0; 8])) >> 24;
    // The longest window: six epochs at most.
    let now = epochs(seconds, MAX_CLOCK_WINDOW);
    assert!(now.clone().count() <= 6 && now.contains(&epoch(seconds)));
    assert!(!key.is_proof(dcid, token, now.clone()));
    let refused =
        |opened| matches!(opened, Err(KnockError::Length | KnockError::Noise | KnockError::SmallOrder));
    assert!(refused(open(&own, &key, dcid, token)));
    if dcid.len() > MAX_CID_BYTES {
        return;
    }
    let mut proof = token.to_vec();
    if let Some((body, mac1)) = proof.split_last_chunk_mut::<MAC_BYTES>() {
        *mac1 = key.mac1(dcid, body, epoch(seconds));
        assert!(key.is_proof(dcid, &proof, now.clone()));
        let later = now.end() + 1..=now.end() + 6;
        assert!(!key.is_proof(dcid, &proof, later));
    }
    let opened = open(&own, &key, dcid, &proof);
    assert!(refused(opened));
    let (client, retry) = (SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), RetryKey::new(&[7; 32]));
    let returned = retry.open(client, dcid, &proof, 0);
    assert!(matches!(returned, Err(RetryError::Length | RetryError::Sealed)));

    let ephemeral = *token.last_chunk().unwrap_or(&[bytes; 32]);
    let client = identity(1).agreement_key();
    let knock = seal(&client, &key, dcid, token, seconds, &ephemeral).expect("two good keys");
    assert!(key.is_proof(dcid, &knock, now));
    let opened = open(&own, &key, dcid, &knock).expect("it was sealed for us");
    assert_eq!((opened.client, opened.unix_seconds), (*client.public(), seconds));
    assert_eq!(opened.hello_hash, hello_hash(token));
}

fn identity(seed: u8) -> Identity {
    Identity::from_seed(Zeroizing::new([seed; 32])).expect("any 32 bytes are a seed")
}

/// Takes `input` as a datagram, and as the frames of an Initial packet.
///
/// What opens is a ClientHello, and stays the same one behind PADDING and PING.
pub fn gate_initial(input: &[u8]) {
    static CRYPTO: LazyLock<Arc<dyn crypto::ServerConfig>> = LazyLock::new(|| {
        let identity = TlsIdentity::from_pkcs8(&identity(2).pkcs8_der()).expect("an Ed25519 key");
        server_crypto(&identity, Arc::new(Nobody)).expect("the TLS of every agent")
    });
    let hash_of = |datagram: &[u8]| match crate::gate::classify::classify(datagram) {
        Class::Initial(initial) => Some(client_hello_hash(&**CRYPTO, datagram, &initial)),
        Class::Short { .. }
        | Class::ZeroRtt { .. }
        | Class::Handshake { .. }
        | Class::Retry { .. }
        | Class::Other => None,
    };
    let _harmless = hash_of(input);
    let frames = &input[..input.len().min(16_000)];
    let plain = hash_of(&initial_packet(&**CRYPTO, &[5; 8], 0, frames)).expect("an Initial packet");
    let behind = [&[0, 1, 0][..], frames].concat();
    let behind = hash_of(&initial_packet(&**CRYPTO, &[5; 8], 7, &behind)).expect("an Initial packet");
    assert_eq!(plain.ok(), behind.ok());
}

struct Nobody;

impl ClientKeys for Nobody {
    fn is_allowed(&self, _key: &[u8; 32]) -> bool {
        false
    }

    fn refused(&self, _refusal: &Refusal) {}
}

/// An Initial packet to `dcid` with `frames` (at most 16,000 bytes), padded to a datagram of 1200 bytes or more, sealed as
/// its client would.
pub(crate) fn initial_packet(
    crypto: &dyn crypto::ServerConfig,
    dcid: &[u8; 8],
    number: u32,
    frames: &[u8],
) -> Vec<u8> {
    let mut payload = frames.to_vec();
    payload.resize(frames.len().max(1160), 0);
    let mut packet = [&[0xc3, 0, 0, 0, 1, 8][..], dcid, &[0, 0]].concat();
    let protected = u16::try_from(4 + payload.len() + 16).expect("at most 16,000 bytes of frames");
    packet.extend((protected | 0x4000).to_be_bytes());
    let packet_number_at = packet.len();
    packet.extend(number.to_be_bytes());
    let header_bytes = packet.len();
    packet.extend(payload);
    packet.extend([0; 16]);
    let keys = crypto.initial_keys(1, &ConnectionId::new(dcid)).expect("version 1");
    // Keys of the server's end; sealing and opening are the same with the client's.
    keys.packet.remote.encrypt(number.into(), &mut packet, header_bytes);
    keys.header.remote.encrypt(packet_number_at, &mut packet);
    packet
}

#[cfg(test)]
mod tests;

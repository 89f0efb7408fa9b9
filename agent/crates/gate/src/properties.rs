//! Properties of whatever comes before a peer is known: datagrams before the gate, knocks, tokens, certificates, handshakes, datagrams
//! for the decoy, links. The fuzz targets check them.

use std::{
    io::Cursor,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use base::{
    clock::{Clock, ManualClock},
    ids::PeerId,
};
use bytes::BytesMut;
use quinn_proto::{
    ConnectionId, FixedLengthConnectionIdParser, LongType, ProtectedHeader,
    crypto::{self, AeadKey, HandshakeTokenKey},
};
use rand::{SeedableRng as _, rngs::StdRng};
use rustls_pki_types::CertificateDer;
use wire::cid::ConnectionIds;
use zeroize::Zeroizing;

use crate::{
    Arrival, Gate, GateParts, Own, Verdict,
    admission::{Admits, Allowlist, Room},
    budget::Budget,
    certificate::spki_key,
    classify::{Class, Initial, MAX_CID_BYTES},
    decoy::{DecoyDrop, DecoyFlows, DecoyId, Sender},
    identity::{Endpoint, Identity, PublicKey, ShareLink},
    initial::client_hello,
    knock::{
        About, KNOCK_BYTES, KnockError, MAC_BYTES, MAX_CLOCK_WINDOW, ServerKey, epoch, epochs, hello_hash,
        open, seal,
    },
    partial::PATIENCE,
    replay_log::MemoryReplayLog,
    retry::{Carried, RETRY_SECONDS, RETRY_TOKEN_BYTES, RetryError, RetryKey},
    suite::suite_in,
    table::SingleUse,
    tls::{KeyExchange, TlsIdentity, initial_crypto},
};

/// Takes `input` as a share link, and its parts as an endpoint and a public key.
///
/// An accepted input is written as text that is read as the same value.
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
    let class = crate::classify::classify(input);
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
    let about = About { client_hello: token, unix_seconds: seconds, fallback: bytes & 0x80 != 0 };
    let knock = seal(&client, &key, dcid, about, &ephemeral).expect("two good keys");
    assert!(key.is_proof(dcid, &knock, now));
    let opened = open(&own, &key, dcid, &knock).expect("it was sealed for us");
    assert_eq!((opened.client, opened.unix_seconds), (*client.public(), seconds));
    assert_eq!((opened.hello_hash, opened.fallback), (hello_hash(token), about.fallback));
}

pub fn identity(seed: u8) -> Identity {
    Identity::from_seed(Zeroizing::new([seed; 32])).expect("any 32 bytes are a seed")
}

/// Takes `input` as a datagram, and as the frames of an Initial packet.
///
/// An input that opens is a ClientHello, and stays the same one behind PADDING and PING, and in two packets in either order.
pub fn gate_initial(input: &[u8]) {
    static CRYPTO: LazyLock<Arc<dyn crypto::ServerConfig>> = LazyLock::new(|| {
        let identity = TlsIdentity::from_pkcs8(&identity(2).pkcs8_der()).expect("an Ed25519 key");
        initial_crypto(&identity).expect("the TLS of every agent")
    });
    let _harmless = client_hello(&**CRYPTO, &[input]);
    let frames = &input[..input.len().min(16_000)];
    let sealed = |number, frames: &[u8]| initial_packet(&**CRYPTO, &[5; 8], number, frames);
    let plain = client_hello(&**CRYPTO, &[&sealed(0, frames)]).ok();
    let behind = sealed(7, &[&[0, 1, 0][..], frames].concat());
    assert_eq!(plain, client_hello(&**CRYPTO, &[&behind]).ok());
    let Some(Some(hello)) = plain else { return };
    let (first, second) = hello.split_at(hello.len() / 2);
    if first.is_empty() {
        return;
    }
    let halves = [sealed(1, &crypto_frame(0, first)), sealed(2, &crypto_frame(first.len(), second))];
    for [one, other] in [[&halves[0], &halves[1]], [&halves[1], &halves[0]]] {
        assert_eq!(client_hello(&**CRYPTO, &[one]), Ok(None));
        assert_eq!(client_hello(&**CRYPTO, &[one, other]).as_ref().ok(), Some(&Some(hello.clone())));
    }
}

/// Takes `input` as a script of when the datagrams of three ClientHellos come to the gate, and from where; some are damaged.
///
/// Each ClientHello is admitted at most once, and only when both of its datagrams have come from where the first of them did,
/// within three seconds. No more is kept than what has begun.
pub fn gate_parts(input: &[u8]) {
    let clock = Arc::new(ManualClock::new(Duration::from_secs(1_700_000_000)));
    let mut gate = gate_of_anyone(&clock);
    let attempts = [1, 2, 3].map(|number| two_datagrams(&clock, number));
    // By attempt: when and from where the first datagram came, which have come since, and whether it was admitted.
    let mut began: [Option<(Instant, u8, [bool; 2])>; 3] = [None; 3];
    let (mut admitted, mut damaged) = ([false; 3], [false; 3]);
    let mut script = Bytes(input);
    while !script.0.is_empty() {
        let [what, wait, damage] = script.take();
        let (attempt, half, host) = (usize::from(what % 3), usize::from(what >> 2 & 1), what >> 3 & 1);
        clock.advance(Duration::from_millis(u64::from(wait) * 5));
        gate.expire(clock.now());
        let mut datagram = attempts[attempt][half].clone();
        if damage & 0xc0 == 0xc0 {
            // Behind the header: it still carries the knock.
            let at = datagram.len() - 1 - usize::from(damage & 0x3f);
            datagram[at] ^= 1;
        }
        let source = SocketAddr::from(([192, 0, 2, host], 4433));
        let verdict = gate.check(
            &datagram,
            Arrival { source, validated: false, listening: true, room: Room::Free },
            clock.now(),
        );
        assert!(gate.partials() <= 3);
        let is_whole = datagram == attempts[attempt][half];
        damaged[attempt] |= !is_whole;
        let Some((since, from, halves)) = &mut began[attempt] else {
            if is_whole {
                let mut halves = [false; 2];
                halves[half] = true;
                began[attempt] = Some((clock.now(), host, halves));
                // Unless a damaged one was refused a moment ago, and this one for the same proof.
                if verdict != Verdict::Taken {
                    assert!(damaged[attempt] && verdict == Verdict::Unauthenticated);
                    began[attempt] = None;
                }
            } else {
                assert_eq!(verdict, Verdict::Unauthenticated);
            }
            continue;
        };
        let in_time = clock.now() - *since < PATIENCE;
        halves[half] |= in_time && is_whole && *from == host;
        if let Verdict::Admit(_) = verdict {
            assert!(!admitted[attempt] && *halves == [true; 2] && *from == host && is_whole);
            admitted[attempt] = true;
            assert_eq!(gate.take_earlier().len(), 1);
        } else if *from != host || (!in_time && !admitted[attempt]) {
            assert_eq!(verdict, Verdict::Unauthenticated);
        }
    }
}

/// A gate that admits everyone as one peer.
fn gate_of_anyone(clock: &Arc<ManualClock>) -> Gate {
    struct OnePeer;
    impl Allowlist for OnePeer {
        fn admits(&self, _agreement: &[u8; 32], _now: Instant) -> Admits {
            Admits::Peer(PeerId(0))
        }
    }
    let (own, now) = (Own::new(&identity(2)), clock.now());
    let tls = TlsIdentity::from_pkcs8(&identity(2).pkcs8_der()).expect("an Ed25519 key");
    Gate::new(GateParts {
        ids: ConnectionIds::new(own.issued.clone(), [1; 32], 0, 1),
        own,
        allowlist: Arc::new(OnePeer),
        refusals: Arc::default(),
        required: true,
        key_exchange: KeyExchange::Hybrid,
        window: Duration::from_secs(90),
        table: SingleUse::restore(Box::<MemoryReplayLog>::default(), 1, Vec::new(), 0, now, 0),
        budget: Budget::new(1, now),
        clock: Arc::clone(clock) as _,
        crypto: initial_crypto(&tls).expect("the TLS of every agent"),
        rng: StdRng::from_seed([2; 32]),
    })
}

/// A ClientHello of 1,500 bytes in two datagrams with one knock, as a client sends them.
pub(crate) fn two_datagrams(clock: &ManualClock, number: u8) -> [Vec<u8>; 2] {
    let hello: Vec<u8> =
        [1, 0, 0x05, 0xd8].into_iter().chain((0..1496).map(|at| at as u8 ^ number)).collect();
    let key = ServerKey::new(&identity(2).public_key()).expect("a key that was generated");
    let dcid = [0xd0, 0, 0, 0, 0, 0, 0, number];
    let about = About { client_hello: &hello, unix_seconds: clock.unix_seconds(), fallback: false };
    let own = identity(1).agreement_key();
    let knock = seal(&own, &key, &dcid, about, &[number; 32]).expect("two good keys");
    let tls = TlsIdentity::from_pkcs8(&identity(2).pkcs8_der()).expect("an Ed25519 key");
    let crypto = initial_crypto(&tls).expect("the TLS of every agent");
    let (first, second) = hello.split_at(980);
    [
        initial_with_token(&*crypto, &dcid, 0, &knock, &crypto_frame(0, first)),
        initial_with_token(&*crypto, &dcid, 1, &knock, &crypto_frame(980, second)),
    ]
}

/// A CRYPTO frame (RFC 9000 §19.6); both numbers are below 16,384.
fn crypto_frame(offset: usize, data: &[u8]) -> Vec<u8> {
    let two_bytes = |value: usize| (value as u16 | 0x4000).to_be_bytes();
    [&[6][..], &two_bytes(offset), &two_bytes(data.len()), data].concat()
}

/// An Initial packet to `dcid` with `frames` (at most 16,000 bytes), padded to a datagram of 1200 bytes or more, sealed as
/// its client would.
pub(crate) fn initial_packet(
    crypto: &dyn crypto::ServerConfig,
    dcid: &[u8; 8],
    number: u32,
    frames: &[u8],
) -> Vec<u8> {
    initial_with_token(crypto, dcid, number, &[], frames)
}

/// The same with a token, of less than 16,384 bytes.
pub(crate) fn initial_with_token(
    crypto: &dyn crypto::ServerConfig,
    dcid: &[u8; 8],
    number: u32,
    token: &[u8],
    frames: &[u8],
) -> Vec<u8> {
    let mut payload = frames.to_vec();
    payload.resize(frames.len().max(1160_usize.saturating_sub(token.len().saturating_sub(10))), 0);
    let token_bytes = (token.len() as u16 | 0x4000).to_be_bytes();
    let mut packet = [&[0xc3, 0, 0, 0, 1, 8][..], dcid, &[0], &token_bytes, token].concat();
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

/// Takes `input` as what a Retry's token carries, who sends it back from where, and what is changed in it on its way.
///
/// It opens for whom it was made, in time and unchanged, and for nobody else; quinn-proto is shown the same connection ID.
pub fn retry_token(input: &[u8]) {
    let mut script = Bytes(input);
    let [family, port, age, at, change] = script.take();
    let address: [u8; 16] = script.take();
    let ip = if family & 1 == 0 {
        IpAddr::from(Ipv4Addr::new(address[0], address[1], address[2], address[3]))
    } else {
        IpAddr::from(Ipv6Addr::from(address))
    };
    let client = SocketAddr::new(ip, port.into());
    let (original, nonce): ([u8; MAX_CID_BYTES], _) = (script.take(), script.take());
    let original = &original[..usize::from(family >> 1) % (MAX_CID_BYTES + 1)];
    let (new_dcid, knock): ([u8; 8], [u8; KNOCK_BYTES]) = (script.take(), script.take());
    let carried = Carried::new(original, &knock);
    let (issued, key) = (u64::from_be_bytes(script.take()) >> 20, RetryKey::new(&[7; 32]));
    let server = ServerKey::new(&identity(2).public_key()).expect("a key that was generated");
    let token = key.token(&server, client, carried, issued, &new_dcid, nonce);
    assert!(server.is_proof(&new_dcid, &token, epochs(issued, Duration::from_secs(20))));

    let now = issued + u64::from(age % 32);
    let aged = if u64::from(age % 32) > RETRY_SECONDS { Err(RetryError::Age) } else { Ok(carried) };
    assert_eq!(key.open(client, &new_dcid, &token, now), aged);
    let elsewhere = SocketAddr::new(ip, u16::from(port) + 1);
    assert_eq!(key.open(elsewhere, &new_dcid, &token, now), Err(RetryError::Address));
    assert_eq!(key.open(client, &new_dcid[1..], &token, now), Err(RetryError::Destination));
    assert_eq!(RetryKey::new(&[8; 32]).open(client, &new_dcid, &token, now), Err(RetryError::Sealed));

    let mut for_quinn = token[..RETRY_TOKEN_BYTES - MAC_BYTES].to_vec();
    let shown = key.aead_from_hkdf(&[]).open(&mut for_quinn, &[]).expect("it is ours").to_vec();
    let cid_at = if ip.is_ipv4() { 8 } else { 20 };
    assert_eq!(usize::from(shown[cid_at]), original.len());
    assert_eq!(&shown[cid_at + 1..][..original.len()], original);

    let mut changed = token;
    let index = usize::from(at) % (RETRY_TOKEN_BYTES - MAC_BYTES);
    changed[index] ^= change;
    if change != 0 {
        assert_eq!(key.open(client, &new_dcid, &changed, now), Err(RetryError::Sealed));
        assert!(AeadKey::open(&key, &mut changed[..RETRY_TOKEN_BYTES - MAC_BYTES], &[]).is_err());
    }
    let rest = script.0;
    let opened = key.open(client, &new_dcid, rest, now);
    assert!(matches!(opened, Err(RetryError::Length | RetryError::Sealed)));
}

/// Takes `input` as a script of what unauthenticated senders and the decoy send, and of time.
///
/// There are never more flows than may be; a sender has one at most; no more than three times what came goes back to whoever
/// has not shown that it receives; and in the end every flow is silent and goes.
pub fn decoy_flows(input: &[u8]) {
    let Some((&limit, script)) = input.split_first() else { return };
    let limit = 1 + usize::from(limit % 32);
    let mut now = ManualClock::default().now();
    let mut flows = DecoyFlows::new(limit, now);
    let mut script = Bytes(script);
    // By index in the table: the sender of the flow, bytes that came, and bytes that went back.
    let mut known: Vec<Option<(Sender, u64, u64)>> = vec![None; limit];
    while let Some((step, who, datagram)) = script.step() {
        let sender = Sender {
            source: SocketAddr::new(Ipv4Addr::new(192, 0, 2 + (who >> 6), 1 + (who >> 3 & 7)).into(), 1000),
            port: usize::from(who & 1),
            local: (who & 2 != 0).then_some(Ipv4Addr::LOCALHOST.into()),
        };
        match step % 4 {
            0 | 1 => match flows.admit(sender, datagram, now) {
                Ok(admitted) => {
                    if let Some(DecoyId(id)) = admitted.evicted {
                        assert!(known[id as usize].take().is_some());
                    }
                    let slot = &mut known[admitted.id.0 as usize];
                    assert_eq!(slot.is_none(), admitted.new);
                    let (of, came, _) = slot.get_or_insert((sender, 0, 0));
                    *came += datagram.len() as u64;
                    assert_eq!(*of, sender);
                }
                Err(drop) => {
                    assert!(matches!(
                        drop,
                        DecoyDrop::SourceFlows | DecoyDrop::SourceRate | DecoyDrop::TotalRate
                    ));
                    assert!(known.iter().flatten().all(|(of, ..)| *of != sender));
                }
            },
            2 => {
                let id = usize::from(who) % limit;
                match flows.answer(DecoyId(u32::from(who) % limit as u32), datagram) {
                    Ok(to) => {
                        let (of, _, back) = known[id].as_mut().expect("it has a flow");
                        *back += datagram.len() as u64;
                        assert_eq!(to, *of);
                    }
                    Err(DecoyDrop::ToSender) => assert!(known[id].is_none()),
                    Err(drop) => {
                        assert_eq!(drop, DecoyDrop::Amplification);
                        let (_, came, back) = known[id].expect("it has a flow");
                        assert!(back + datagram.len() as u64 > 3 * came);
                    }
                }
            }
            _ => {
                now += Duration::from_secs(u64::from(who));
                while let Some(DecoyId(id)) = flows.expire(now) {
                    assert!(known[id as usize].take().is_some());
                }
                assert!(flows.deadline().is_none_or(|deadline| deadline > now));
            }
        }
        assert_eq!(flows.len(), known.iter().flatten().count());
    }
    now += Duration::from_secs(60);
    while flows.expire(now).is_some() {}
    assert!(flows.is_empty() && flows.deadline().is_none());
}

/// Takes `input` as what a listener writes in the TLS handshake, after one byte that says how long its pieces are.
///
/// The pieces make no difference, and no more of it is held than a ServerHello has.
pub fn server_hello(input: &[u8]) {
    let Some((&length, stream)) = input.split_first() else { return };
    // The watch gives up at the first piece that goes beyond 2,048 bytes: it is the same for streams within that.
    let stream = &stream[..stream.len().min(2048)];
    let at_once = suite_in(std::iter::once(stream));
    assert_eq!(suite_in(stream.chunks(usize::from(length).max(1))), at_once);
    assert_eq!(suite_in(stream.chunks(1)), at_once);
}

/// Takes `input` as the certificate of whoever connects.
///
/// The key that is found in it stands in it, behind the algorithm's name, and the certificate that we make of a key has that key.
pub fn certificate(input: &[u8]) {
    let Some(key) = spki_key(&CertificateDer::from(input)) else { return };
    let spki = [&[0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00][..], &key].concat();
    assert!(input.windows(spki.len()).any(|window| window == spki));
}

/// Bytes that are taken off the front; past the end they are 0.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let (bytes, rest) = self.0.split_at(self.0.len().min(N));
        taken[..bytes.len()].copy_from_slice(bytes);
        self.0 = rest;
        taken
    }

    /// What to do, who does it, and the bytes of a datagram, whose length stands before them.
    fn step(&mut self) -> Option<(u8, u8, &'a [u8])> {
        let (&[step, who, length], rest) = self.0.split_first_chunk()?;
        let (datagram, rest) = rest.split_at(rest.len().min(length.into()));
        self.0 = rest;
        Some((step, who, datagram))
    }
}

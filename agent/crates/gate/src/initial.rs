//! Finds the ClientHello in the Initial packets of a client. They are decrypted on a copy, because quinn-proto and the decoy need
//! the original.
//!
//! Initial packets are sealed under keys that anyone can derive from their destination (RFC 9001 §5.2), so this opens
//! nothing that an observer could not. It costs 3 µs, so only packets whose token was made with our public key get here, and within a
//! budget of their own those of unauthenticated senders who may name us (`named.rs`).

use bytes::BytesMut;
use quic_core::varint::Reader;
use quinn_proto::{ConnectionId, crypto};

use crate::{
    classify::{Class, Initial, MAX_CID_BYTES, PROTECTED_BYTES, classify},
    hybrid::CODE_POINT,
};

/// Why an Initial packet shows no ClientHello.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The packet does not open under the keys of its destination.
    #[error("the packet does not open")]
    Sealed,
    /// Nothing of a ClientHello is in the packet.
    #[error("nothing of a ClientHello is in the packet")]
    Nothing,
    /// The ClientHello is longer than [`MOST_HELLO_BYTES`].
    #[error("the ClientHello is too long")]
    Long,
    /// Not the first packet of a handshake: other frames, CRYPTO frames that contradict each other, another message, or
    /// lengths that lead outside.
    #[error("the packet is malformed")]
    Malformed,
    /// The client closes an attempt of which nothing has come here: another one of its was faster.
    #[error("the client has given this attempt up")]
    Abandoned,
}

/// The longest ClientHello that is put together, in bytes. One that offers the hybrid key exchange has 1,600.
pub const MOST_HELLO_BYTES: usize = 4096;

/// The ClientHello in the Initial packets at the front of `datagrams`, whatever their order; `None` if more of it is to come.
///
/// # Errors
/// Every variant of [`HelloError`]. Time and memory are bounded by the length of the datagrams.
pub fn client_hello(
    crypto: &dyn crypto::ServerConfig,
    datagrams: &[&[u8]],
) -> Result<Option<Vec<u8>>, HelloError> {
    let mut payloads = Vec::with_capacity(datagrams.len());
    for datagram in datagrams {
        let Class::Initial(initial) = classify(datagram) else { return Err(HelloError::Malformed) };
        payloads.push(decrypt(crypto, datagram, &initial)?);
    }
    let mut frames = Vec::new();
    for payload in &payloads {
        let before = frames.len();
        crypto_frames(payload, &mut frames)?;
        if frames[before..].iter().all(|frame| frame.data.is_empty()) {
            return Err(HelloError::Nothing);
        }
    }
    assemble(frames)
}

/// Removes the packet's protection and returns its frames.
fn decrypt(
    crypto: &dyn crypto::ServerConfig,
    datagram: &[u8],
    initial: &Initial<'_>,
) -> Result<BytesMut, HelloError> {
    let Initial { dcid, packet_number_at, end, .. } = *initial;
    // quinn-proto's keys panic on less.
    let protected = end.checked_sub(packet_number_at).ok_or(HelloError::Malformed)?;
    if protected < PROTECTED_BYTES || dcid.len() > MAX_CID_BYTES {
        return Err(HelloError::Malformed);
    }
    let mut packet = BytesMut::from(datagram.get(..end).ok_or(HelloError::Malformed)?);
    let keys = crypto.initial_keys(1, &ConnectionId::new(dcid)).map_err(|_| HelloError::Sealed)?;
    keys.header.remote.decrypt(packet_number_at, &mut packet);
    let payload_at = packet_number_at + usize::from(packet[0] & 3) + 1;
    let header = packet.split_to(payload_at);
    // The first packet number is its own expansion (RFC 9000 §A.3), because none came before it.
    let number = header[packet_number_at..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    keys.packet.remote.decrypt(number, &header, &mut packet).map_err(|_| HelloError::Sealed)?;
    Ok(packet)
}

/// A CRYPTO frame (RFC 9000 §19.6) of an Initial packet.
struct Frame<'a> {
    offset: usize,
    data: &'a [u8],
}

/// Appends the CRYPTO frames of `payload`; beside them a client's first packets have PADDING and PING only, or
/// CONNECTION_CLOSE.
fn crypto_frames<'a>(payload: &'a [u8], frames: &mut Vec<Frame<'a>>) -> Result<(), HelloError> {
    const PADDING: u8 = 0;
    const PING: u8 = 1;
    const CRYPTO: u8 = 6;
    const CONNECTION_CLOSE: u8 = 0x1c;
    let mut reader = Reader::new(payload);
    while let Some([kind]) = reader.array() {
        match kind {
            PADDING | PING => {}
            CRYPTO => {
                let offset = reader.varint().ok_or(HelloError::Malformed)?;
                let length = reader.varint().and_then(|length| usize::try_from(length).ok());
                let data = length.and_then(|length| reader.take(length)).ok_or(HelloError::Malformed)?;
                let offset = usize::try_from(offset).unwrap_or(usize::MAX);
                if offset.saturating_add(data.len()) > MOST_HELLO_BYTES {
                    return Err(HelloError::Long);
                }
                frames.push(Frame { offset, data });
            }
            CONNECTION_CLOSE => return Err(HelloError::Abandoned),
            _ => return Err(HelloError::Malformed),
        }
    }
    Ok(())
}

/// Puts CRYPTO frames together, in whatever order they came; what they repeat must be the same. `None` before all are there.
fn assemble(mut frames: Vec<Frame<'_>>) -> Result<Option<Vec<u8>>, HelloError> {
    frames.sort_unstable_by_key(|frame| frame.offset);
    let mut stream = Vec::new();
    let mut gap = false;
    for Frame { offset, data } in frames {
        let Some(known) = stream.get(offset..) else {
            gap = true;
            break;
        };
        let (repeated, new) = data.split_at(known.len().min(data.len()));
        if known[..repeated.len()] != *repeated {
            return Err(HelloError::Malformed);
        }
        stream.extend_from_slice(new);
    }
    match message_bytes(&stream)? {
        Some(length) if length > MOST_HELLO_BYTES => Err(HelloError::Long),
        // What lies past its end is no part of a client's first message.
        Some(length) if stream.len() > length || (gap && stream.len() == length) => {
            Err(HelloError::Malformed)
        }
        Some(length) if stream.len() == length => Ok(Some(stream)),
        Some(_) | None => Ok(None),
    }
}

/// Whether `stream` is one complete ClientHello.
pub(crate) fn is_complete(stream: &[u8]) -> bool {
    message_bytes(stream) == Ok(Some(stream.len()))
}

/// The length of the handshake message of type 1 (RFC 8446 §4) that `stream` begins with: `01 │ length 24 │ …`; `None` if that
/// is to come.
fn message_bytes(stream: &[u8]) -> Result<Option<usize>, HelloError> {
    const CLIENT_HELLO: u8 = 1;
    if stream.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(HelloError::Malformed);
    }
    let Some([_, a, b, c]) = stream.first_chunk() else { return Ok(None) };
    Ok(Some(4 + (usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c))))
}

/// Whether the complete ClientHello `hello` names the group X25519MLKEM768 among those that its client supports.
pub(crate) fn offers_hybrid(hello: &[u8]) -> bool {
    supported_groups(hello).is_some_and(|groups| groups.contains(&CODE_POINT.to_be_bytes()))
}

/// The extension `supported_groups` of a ClientHello (RFC 8446 §4.2.7).
fn supported_groups(hello: &[u8]) -> Option<&[[u8; 2]]> {
    const SUPPORTED_GROUPS: [u8; 2] = [0, 10];
    let (_length, groups) = extension(hello, SUPPORTED_GROUPS)?.split_first_chunk::<2>()?;
    Some(groups.as_chunks().0)
}

/// The host name in the extension `server_name` of the complete ClientHello `hello` (RFC 6066 §3).
pub(crate) fn server_name(hello: &[u8]) -> Option<&str> {
    const SERVER_NAME: [u8; 2] = [0, 0];
    const HOST_NAME: u8 = 0;
    let mut reader = Reader::new(extension(hello, SERVER_NAME)?);
    reader.array::<2>()?;
    let [kind, length @ ..] = reader.array::<3>()?;
    let name = reader.take(u16::from_be_bytes(length).into())?;
    std::str::from_utf8(name).ok().filter(|name| kind == HOST_NAME && !name.is_empty())
}

/// The content of an extension of a ClientHello (RFC 8446 §4.1.2).
fn extension(hello: &[u8], wanted: [u8; 2]) -> Option<&[u8]> {
    let mut reader = Reader::new(hello);
    // The header, the version and the random.
    reader.array::<{ 4 + 2 + 32 }>()?;
    let session_id = reader.array::<1>()?[0];
    reader.take(session_id.into())?;
    let suites = u16::from_be_bytes(reader.array()?);
    reader.take(suites.into())?;
    let compressions = reader.array::<1>()?[0];
    reader.take(compressions.into())?;
    reader.array::<2>()?;
    loop {
        let kind: [u8; 2] = reader.array()?;
        let length = u16::from_be_bytes(reader.array()?);
        let content = reader.take(length.into())?;
        if kind == wanted {
            return Some(content);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::properties::initial_packet;
    use crate::{
        testing::{DCID, Fate, Link, knocking, knocking_with, no_tokens, server_tls},
        tls::KeyExchange,
    };

    fn sealed(payload: &[u8]) -> Vec<u8> {
        initial_packet(&*server_tls(), &DCID, 0, payload)
    }

    fn hello_in(datagram: &[u8]) -> Result<Option<Vec<u8>>, HelloError> {
        client_hello(&*server_tls(), &[datagram])
    }

    fn frame(offset: u16, data: &[u8]) -> Vec<u8> {
        let two_bytes = |value: u16| (value | 0x4000).to_be_bytes();
        let length = u16::try_from(data.len()).unwrap();
        [&[6][..], &two_bytes(offset), &two_bytes(length), data].concat()
    }

    /// A message of type 1 whose body has `length` bytes.
    fn hello(length: u8) -> Vec<u8> {
        let body: Vec<u8> = (0..length).collect();
        [&[1, 0, 0, length][..], &body].concat()
    }

    #[test]
    fn the_hello_of_a_real_client_is_found_and_its_datagram_is_left_alone() {
        let mut link = Link::new(knocking(), no_tokens(), false);
        let mut found = false;
        assert!(link.run(Duration::from_secs(10), |number, datagram| {
            if number == 0 {
                found = hello_in(datagram).is_ok_and(|hello| hello.is_some());
            }
            Fate::Pass
        }));
        assert!(found);
    }

    #[test]
    fn a_cleared_fixed_bit_changes_nothing() {
        let expected = Ok(Some(hello(100)));
        let good = sealed(&frame(0, &hello(100)));
        assert_eq!(hello_in(&good), expected);
        let Class::Initial(initial) = classify(&good) else { panic!("no Initial") };
        // The bit is part of what is sealed, so the packet is opened and sealed again with the bit cleared.
        let keys = server_tls().initial_keys(1, &ConnectionId::new(&DCID)).unwrap();
        let (packet_number_at, mut packet) = (initial.packet_number_at, good.clone());
        keys.header.remote.decrypt(packet_number_at, &mut packet);
        let header_bytes = packet_number_at + 4;
        let mut payload = BytesMut::from(&packet[header_bytes..]);
        keys.packet.remote.decrypt(0, &packet[..header_bytes], &mut payload).unwrap();
        packet[0] &= !0x40;
        packet[header_bytes..header_bytes + payload.len()].copy_from_slice(&payload);
        keys.packet.remote.encrypt(0, &mut packet, header_bytes);
        keys.header.remote.encrypt(packet_number_at, &mut packet);
        assert_eq!(packet[0] & 0x40, 0);
        assert_eq!(hello_in(&packet), expected);
    }

    #[test]
    fn any_packet_number_will_do() {
        let packet = initial_packet(&*server_tls(), &DCID, 0x0102_0304, &frame(0, &hello(100)));
        assert_eq!(hello_in(&packet), Ok(Some(hello(100))));
    }

    #[test]
    fn a_packet_of_someone_else_stays_sealed() {
        let good = sealed(&frame(0, &hello(100)));
        for at in [1100, good.len() - 1] {
            let mut datagram = good.clone();
            datagram[at] ^= 1;
            assert_eq!(hello_in(&datagram), Err(HelloError::Sealed));
        }
        let mut other = good;
        other[6] ^= 1;
        assert_eq!(hello_in(&other), Err(HelloError::Sealed), "another destination has other keys");
    }

    #[test]
    fn positions_that_lead_outside_are_malformed() {
        let good = sealed(&frame(0, &hello(100)));
        let Class::Initial(initial) = classify(&good) else { panic!("no Initial") };
        for bad in [
            Initial { end: good.len() + 1, ..initial },
            Initial { end: initial.packet_number_at + 19, ..initial },
            Initial { packet_number_at: initial.end, ..initial },
            Initial { packet_number_at: usize::MAX, ..initial },
            Initial { dcid: &[0; 21], ..initial },
        ] {
            assert!(matches!(decrypt(&*server_tls(), &good, &bad), Err(HelloError::Malformed)), "{bad:?}");
        }
        let least = Initial { end: initial.packet_number_at + PROTECTED_BYTES, ..initial };
        assert!(matches!(decrypt(&*server_tls(), &good, &least), Err(HelloError::Sealed)));
    }

    #[test]
    fn frames_are_put_together() {
        let hello = hello(100);
        let expected = Ok(Some(hello.clone()));
        let of = |frames: &[Vec<u8>]| hello_in(&sealed(&frames.concat()));
        let (first, second, third) =
            (frame(0, &hello[..40]), frame(40, &hello[40..50]), frame(50, &hello[50..]));
        assert_eq!(of(&[first.clone(), second.clone(), third.clone()]), expected);
        assert_eq!(of(&[third.clone(), vec![1, 0, 0], first.clone(), vec![1], second.clone()]), expected);
        let repeated = frame(30, &hello[30..45]);
        assert_eq!(of(&[first.clone(), repeated.clone(), second.clone(), third.clone(), repeated]), expected);
        assert_eq!(of(&[frame(0, &hello), frame(10, &[]), frame(10, &hello[10..20])]), expected);

        let contradiction = frame(30, &[0xff; 15]);
        assert_eq!(
            of(&[first.clone(), contradiction, second.clone(), third.clone()]),
            Err(HelloError::Malformed)
        );
        assert_eq!(of(&[first.clone(), third.clone()]), Ok(None), "a gap");
        assert_eq!(of(std::slice::from_ref(&second)), Ok(None), "no beginning");
        assert_eq!(of(std::slice::from_ref(&first)), Ok(None), "no end");
        assert_eq!(of(&[]), Err(HelloError::Nothing));
        assert_eq!(of(&[frame(7, &[])]), Err(HelloError::Nothing));
        assert_eq!(of(&[frame(0, &hello), frame(0x3fff, &[])]), Err(HelloError::Long), "far away");
        assert_eq!(of(&[frame(0, &[1, 0, 0x10, 0])]), Err(HelloError::Long));
        assert_eq!(of(&[frame(0, &[1, 1, 0, 0])]), Err(HelloError::Long));
        assert_eq!(of(&[frame(0, &[1, 0, 0x0f, 0xfc])]), Ok(None), "as long as may be");
        assert_eq!(of(&[frame(4092, &[7; 4])]), Ok(None), "its end");
        assert_eq!(of(&[frame(4093, &[7; 4])]), Err(HelloError::Long), "past it");
        assert_eq!(of(&[frame(0, &hello), frame(200, &[1])]), Err(HelloError::Malformed), "past the end");

        let datagrams = [&first, &second, &third].map(|frame| sealed(frame));
        let of = |order: &[usize]| {
            let datagrams: Vec<&[u8]> = order.iter().map(|index| &datagrams[*index][..]).collect();
            client_hello(&*server_tls(), &datagrams)
        };
        assert_eq!(of(&[0, 1, 2]), expected);
        assert_eq!(of(&[2, 0, 1]), expected);
        assert_eq!(of(&[2, 1]), Ok(None));
        assert_eq!(of(&[0, 0]), Ok(None));
    }

    #[test]
    fn the_hello_of_a_hybrid_client_takes_two_datagrams_and_says_what_it_offers() {
        for key_exchange in KeyExchange::ALL {
            let mut link = Link::new(knocking_with(key_exchange), no_tokens(), false);
            let _connected = link.run(Duration::from_millis(1), |_, _| Fate::Lose);
            let sent: Vec<&[u8]> = link.up.iter().map(|(_, datagram)| &datagram[..]).collect();
            assert_eq!(sent.len(), if key_exchange == KeyExchange::X25519 { 1 } else { 2 });
            assert!(sent.iter().all(|datagram| datagram.len() == 1200));
            let hello = client_hello(&*server_tls(), &sent).unwrap().unwrap();
            assert!(is_complete(&hello) && hello.len() < 1700, "{}", hello.len());
            assert_eq!(offers_hybrid(&hello), key_exchange != KeyExchange::X25519);
        }
        assert!(!offers_hybrid(&[]) && !offers_hybrid(&[0; 100]));
    }

    #[test]
    fn what_is_no_client_hello_is_malformed() {
        let of = |payload: &[u8]| hello_in(&sealed(payload));
        assert_eq!(of(&[0, 0, 0x1c, 0, 0, 0]), Err(HelloError::Abandoned), "CONNECTION_CLOSE");
        assert_eq!(of(&frame(0, &[2, 0, 0, 1, 7])), Err(HelloError::Malformed), "another message");
        assert_eq!(of(&frame(0, &[1, 0, 0, 1, 7, 7])), Err(HelloError::Malformed), "more than the message");
        assert_eq!(
            of(&frame(0, &[1, 0, 0, 0])),
            Ok(Some(vec![1, 0, 0, 0])),
            "whether it is a good one, TLS says"
        );
        for kind in [2, 3, 4, 5, 7, 8, 0x1d, 0x30, 0x40, 0xff] {
            let payload = [frame(0, &hello(9)), vec![kind]].concat();
            assert_eq!(of(&payload), Err(HelloError::Malformed), "frame type {kind:#x}");
        }
        // Padded to 1160 bytes: the length of the frame leads past the end.
        assert_eq!(of(&[6, 0, 0x7f, 0xff, 1]), Err(HelloError::Malformed));
        assert_eq!(of(&[6, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]), Err(HelloError::Malformed));
        let cut = [vec![0; 1158], vec![6, 0x40]].concat();
        assert_eq!(of(&cut), Err(HelloError::Malformed));
    }

    proptest! {
        #[test]
        fn any_payload_is_harmless(payload in prop::collection::vec(prop_oneof![any::<u8>(), Just(6), 0_u8..8], 0..300)) {
            let _outcome = hello_in(&sealed(&payload));
        }

        #[test]
        fn pieces_in_any_order_make_the_same_hello(
            length in 0_u8..255,
            cuts in prop::collection::vec((0_usize..260, 0_usize..260), 0..12),
            seed in any::<u64>(),
        ) {
            let hello = hello(length);
            let half = hello.len() / 2;
            let mut frames = vec![frame(0, &hello[..half]), frame(u16::try_from(half).unwrap(), &hello[half..])];
            for (from, to) in cuts {
                let (from, to) = (from.min(to).min(hello.len()), from.max(to).min(hello.len()));
                let at = usize::try_from(seed).unwrap() % (frames.len() + 1);
                frames.insert(at, frame(u16::try_from(from).unwrap(), &hello[from..to]));
            }
            prop_assert_eq!(hello_in(&sealed(&frames.concat())), Ok(Some(hello)));
        }
    }
}

//! Keys of one direction of a lane (`docs/wire-format.md` §3): those of RFC 9001 §5 for TLS_AES_128_GCM_SHA256, the one suite that the
//! attacker offers.

use ring::{
    aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey, quic},
    hkdf::{HKDF_SHA256, KeyType, Prk},
};

/// Bytes in front of the frames: flags, connection ID, packet number.
pub(crate) const HEADER_BYTES: usize = 13;

/// Bytes of the AEAD's tag.
pub(crate) const TAG_BYTES: usize = 16;

const KEY_PHASE: u8 = 0x04;

/// What seals or opens the packets of one direction, in one key phase.
pub(crate) struct Keys {
    secret: [u8; 32],
    packet: LessSafeKey,
    iv: [u8; 12],
    header: quic::HeaderProtectionKey,
    phase: bool,
}

impl Keys {
    /// The first keys of an opening.
    pub(crate) fn new(secret: [u8; 32]) -> Self {
        let header = expand::<16>(&secret, b"quic hp");
        let header = quic::HeaderProtectionKey::new(&quic::AES_128, &header).expect("16 bytes");
        Self { packet: packet_key(&secret), iv: expand(&secret, b"quic iv"), header, secret, phase: false }
    }

    /// Updates the keys (RFC 9001 §6); the header's key stays.
    pub(crate) fn update(&mut self) {
        self.secret = expand(&self.secret, b"quic ku");
        (self.packet, self.iv) = (packet_key(&self.secret), expand(&self.secret, b"quic iv"));
        self.phase = !self.phase;
    }

    /// Appends the packet `number` with `frames`, which are at least 4 bytes.
    pub(crate) fn seal(&self, to: &[u8; 8], number: u32, frames: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        out.push(0x43 | if self.phase { KEY_PHASE } else { 0 });
        out.extend(to);
        out.extend(number.to_be_bytes());
        out.extend(frames);
        let (header, body) = out[start..].split_at_mut(HEADER_BYTES);
        let nonce = self.nonce(number);
        let tag = self.packet.seal_in_place_separate_tag(nonce, Aad::from(&*header), body);
        out.extend(tag.expect("shorter than AES-GCM allows").as_ref());
        self.mask(&mut out[start..]);
    }

    /// Opens `packet` in place; the frames, or nothing if it does not authenticate. An agent writes all 4 bytes of a number.
    pub(crate) fn open<'a>(&mut self, packet: &'a mut [u8]) -> Option<(u32, &'a [u8])> {
        if packet.len() < HEADER_BYTES + TAG_BYTES + 1 {
            return None;
        }
        self.mask(packet);
        if (packet[0] & KEY_PHASE != 0) != self.phase {
            self.update();
        }
        let (header, body) = packet.split_at_mut(HEADER_BYTES);
        let number = u32::from_be_bytes(header[9..].try_into().expect("4 bytes"));
        let frames = self.packet.open_in_place(self.nonce(number), Aad::from(&*header), body).ok()?;
        Some((number, frames))
    }

    fn nonce(&self, number: u32) -> Nonce {
        let mut nonce = self.iv;
        nonce[8..].iter_mut().zip(number.to_be_bytes()).for_each(|(byte, of_number)| *byte ^= of_number);
        Nonce::assume_unique_for_key(nonce)
    }

    /// Applies header protection, or takes it off.
    fn mask(&self, packet: &mut [u8]) {
        let (header, body) = packet.split_at_mut(HEADER_BYTES);
        let mask = self.header.new_mask(&body[..16]).expect("16 bytes");
        header[0] ^= mask[0] & 0x1f;
        header[9..].iter_mut().zip(&mask[1..]).for_each(|(byte, mask)| *byte ^= mask);
    }
}

fn packet_key(secret: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &expand::<16>(secret, b"quic key")).expect("16 bytes"))
}

/// HKDF-Expand-Label of TLS 1.3 with an empty context (RFC 8446 §7.1).
fn expand<const N: usize>(secret: &[u8; 32], label: &[u8]) -> [u8; N] {
    let length = u16::try_from(N).expect("a key").to_be_bytes();
    let label_bytes = [u8::try_from(6 + label.len()).expect("a short label")];
    let info: [&[u8]; 5] = [&length, &label_bytes, b"tls13 ", label, &[0]];
    let mut out = [0; N];
    let key = Prk::new_less_safe(HKDF_SHA256, secret);
    key.expand(&info, Length(N)).and_then(|key| key.fill(&mut out)).expect("shorter than HKDF allows");
    out
}

struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

#[test]
fn the_example_of_the_document() {
    let secret: [u8; 32] = std::array::from_fn(|place| u8::try_from(place).unwrap());
    let frames = b"\x31\x08\x03\x02\x01hello\x30\x02\x02world!";
    let mut packet = Vec::new();
    Keys::new(secret).seal(&[1, 2, 3, 4, 5, 6, 7, 8], 0, frames, &mut packet);
    let expected =
        "400102030405060708b3e0902cbb81b07735d49b0758face46742193cbe5c59b4c1fc6bc4ba57241ff23f83f314b8af3";
    let shown: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(shown, expected);
    assert_eq!(Keys::new(secret).open(&mut packet), Some((0, &frames[..])));
}

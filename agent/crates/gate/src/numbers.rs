//! The numbers of a connection's 1-RTT packets, which quinn-proto does not tell.
//!
//! A number is under header protection, so that whoever has the far end's header key can read it before the packet is authenticated;
//! that key never changes (RFC 9001 §6). Which numbers were authentic is known once quinn-proto has opened a packet: its key is
//! wrapped, too.
//!
//! ```text
//!   datagram ──► PacketNumbers::read ──► in order? ──► quinn-proto ──► HeaderKey, PacketKey::decrypt
//!                                                                            │ Ok
//!                                        PacketNumbers::take_opened ◄────────┘
//! ```

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use bytes::BytesMut;
use quinn_proto::crypto::{CryptoError, HeaderKey, KeyPair, Keys, PacketKey};

/// The longest packet number, and the length that the sample of header protection assumes (RFC 9001 §5.4.2), in bytes.
const MOST_NUMBER_BYTES: usize = 4;

/// The sample of the suites that we offer, in bytes.
const SAMPLE_BYTES: usize = 16;

/// The longest connection ID, in bytes (RFC 9000 §17.2).
const MOST_CID_BYTES: usize = 20;

/// The part of a packet with a short header that its number is read from, at most.
const MOST_HEAD_BYTES: usize = 1 + MOST_CID_BYTES + MOST_NUMBER_BYTES + SAMPLE_BYTES;

/// The bit of the first byte that a long header has (RFC 9000 §17.2).
const LONG_HEADER: u8 = 0x80;

/// The numbers of the far end's 1-RTT packets on one connection.
#[derive(Default)]
pub struct PacketNumbers {
    /// From the end of the handshake on.
    header: OnceLock<Arc<dyn HeaderKey>>,
    /// One more than the number of the packet that was opened last; 0 for none since it was last taken.
    opened: AtomicU64,
}

impl PacketNumbers {
    /// The number of the packet in `datagram`, which is not authenticated: `expected` is the one that would be next (RFC 9000 §A.3).
    /// `None` for a long header, and before the keys are known.
    #[must_use]
    pub fn read(&self, datagram: &[u8], cid_bytes: usize, expected: u64) -> Option<u64> {
        let key = self.header.get()?;
        let at = 1 + cid_bytes;
        let needed = at + MOST_NUMBER_BYTES + key.sample_size();
        let mut head = [0; MOST_HEAD_BYTES];
        let head = head.get_mut(..needed)?;
        head.copy_from_slice(datagram.get(..needed)?);
        if head[0] & LONG_HEADER != 0 {
            return None;
        }
        key.decrypt(at, head);
        let bytes = 1 + usize::from(head[0] & 0b11);
        let number = head[at..at + bytes].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        Some(expand(number, 8 * bytes, expected))
    }

    /// The number of the 1-RTT packet that was opened since the last call; the last one, if there were several.
    #[must_use]
    pub fn take_opened(&self) -> Option<u64> {
        // Only the thread that drives the connection opens its packets.
        let opened = self.opened.load(Ordering::Relaxed);
        if opened != 0 {
            self.opened.store(0, Ordering::Relaxed);
        }
        opened.checked_sub(1)
    }

    /// The 1-RTT keys, which tell their numbers from now on.
    pub(crate) fn watch(self: &Arc<Self>, keys: Keys) -> Keys {
        let Keys { header: KeyPair { local, remote }, packet } = keys;
        let remote: Arc<dyn HeaderKey> = Arc::from(remote);
        // A connection has one handshake.
        let _known = self.header.set(Arc::clone(&remote));
        let header = KeyPair { local, remote: Box::new(SharedHeaderKey(remote)) as Box<dyn HeaderKey> };
        Keys { header, packet: self.watch_packets(packet) }
    }

    /// The packet keys of the next key phase, likewise.
    pub(crate) fn watch_packets(
        self: &Arc<Self>,
        keys: KeyPair<Box<dyn PacketKey>>,
    ) -> KeyPair<Box<dyn PacketKey>> {
        let KeyPair { local, remote } = keys;
        KeyPair { local, remote: Box::new(WatchedKey { inner: remote, numbers: Arc::clone(self) }) }
    }
}

/// The whole number of which `bits` bits are known: that closest to `expected` (RFC 9000 §A.3).
fn expand(truncated: u64, bits: usize, expected: u64) -> u64 {
    let window = 1_u64 << bits;
    let candidate = expected & !(window - 1) | truncated;
    if candidate + window / 2 <= expected {
        candidate + window
    } else if candidate > expected + window / 2 && candidate >= window {
        candidate - window
    } else {
        candidate
    }
}

struct SharedHeaderKey(Arc<dyn HeaderKey>);

impl HeaderKey for SharedHeaderKey {
    fn decrypt(&self, pn_offset: usize, packet: &mut [u8]) {
        self.0.decrypt(pn_offset, packet);
    }

    fn encrypt(&self, pn_offset: usize, packet: &mut [u8]) {
        self.0.encrypt(pn_offset, packet);
    }

    fn sample_size(&self) -> usize {
        self.0.sample_size()
    }
}

/// A key of the far end that notes the numbers of the packets that it opens.
struct WatchedKey {
    inner: Box<dyn PacketKey>,
    numbers: Arc<PacketNumbers>,
}

impl PacketKey for WatchedKey {
    fn encrypt(&self, packet: u64, buf: &mut [u8], header_len: usize) {
        self.inner.encrypt(packet, buf, header_len);
    }

    fn decrypt(&self, packet: u64, header: &[u8], payload: &mut BytesMut) -> Result<(), CryptoError> {
        self.inner.decrypt(packet, header, payload)?;
        self.numbers.opened.store(packet + 1, Ordering::Relaxed);
        Ok(())
    }

    fn tag_len(&self) -> usize {
        self.inner.tag_len()
    }

    fn confidentiality_limit(&self) -> u64 {
        self.inner.confidentiality_limit()
    }

    fn integrity_limit(&self) -> u64 {
        self.inner.integrity_limit()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header key with the mask 0.
    struct Plain;

    impl HeaderKey for Plain {
        fn decrypt(&self, _pn_offset: usize, _packet: &mut [u8]) {}
        fn encrypt(&self, _pn_offset: usize, _packet: &mut [u8]) {}
        fn sample_size(&self) -> usize {
            SAMPLE_BYTES
        }
    }

    fn known() -> PacketNumbers {
        let numbers = PacketNumbers::default();
        assert!(numbers.header.set(Arc::new(Plain)).is_ok());
        numbers
    }

    #[test]
    fn the_example_of_the_rfc() {
        // RFC 9000 §A.3.
        assert_eq!(expand(0x9b32, 16, 0xa82f_30eb), 0xa82f_9b32);
    }

    #[test]
    fn numbers_are_read_from_short_headers_only() {
        let numbers = known();
        let mut packet = [0; 40];
        packet[0] = 0x41;
        packet[9..11].copy_from_slice(&[0x9b, 0x32]);
        assert_eq!(numbers.read(&packet, 8, 0xa82f_30eb), Some(0xa82f_9b32));
        assert_eq!(numbers.read(&packet[..28], 8, 0), None, "too short for a sample");
        packet[0] = 0xc1;
        assert_eq!(numbers.read(&packet, 8, 0), None, "a long header");
        packet[0] = 0x41;
        assert_eq!(PacketNumbers::default().read(&packet, 8, 0), None, "no keys");
    }

    proptest! {
        #[test]
        fn a_number_within_half_a_window_is_found_again(
            expected in 0..1_u64 << 61,
            bytes in 1..=4_usize,
            distance in -0.49..0.49_f64,
        ) {
            let window = 1_u64 << (8 * bytes);
            let number = expected.saturating_add_signed((distance * window as f64) as i64);
            prop_assert_eq!(expand(number & (window - 1), 8 * bytes, expected), number);
        }

        #[test]
        fn nothing_that_comes_panics(datagram in prop::collection::vec(any::<u8>(), 0..60), cid in 0..24_usize, expected in 0..1_u64 << 62) {
            let _number = known().read(&datagram, cid, expected);
        }
    }
}

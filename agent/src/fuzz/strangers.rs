//! What strangers, and peers before they are known, send: tokens, certificates, handshakes, datagrams for the decoy.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use quinn_proto::crypto::{AeadKey, HandshakeTokenKey};
use rustls_pki_types::CertificateDer;
use wire::clock::{Clock, ManualClock};

use super::identity;
use crate::{
    control::{suite::suite_in, tls::spki_key},
    gate::{
        classify::MAX_CID_BYTES,
        decoy::{DecoyDrop, DecoyFlows, DecoyId, Stranger},
        knock::{KNOCK_BYTES, MAC_BYTES, ServerKey, epochs},
        retry::{Carried, RETRY_SECONDS, RETRY_TOKEN_BYTES, RetryError, RetryKey},
    },
};

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
    let place = usize::from(at) % (RETRY_TOKEN_BYTES - MAC_BYTES);
    changed[place] ^= change;
    if change != 0 {
        assert_eq!(key.open(client, &new_dcid, &changed, now), Err(RetryError::Sealed));
        assert!(AeadKey::open(&key, &mut changed[..RETRY_TOKEN_BYTES - MAC_BYTES], &[]).is_err());
    }
    let rest = script.0;
    let opened = key.open(client, &new_dcid, rest, now);
    assert!(matches!(opened, Err(RetryError::Length | RetryError::Sealed)));
}

/// Takes `input` as a script of what strangers and the decoy send, and of time.
///
/// There are never more flows than may be; a stranger has one at most; no more than three times what came goes back to whoever
/// has not shown that it receives; and in the end every flow is silent and goes.
pub fn decoy_flows(input: &[u8]) {
    let Some((&limit, script)) = input.split_first() else { return };
    let limit = 1 + usize::from(limit % 32);
    let mut now = ManualClock::default().now();
    let mut flows = DecoyFlows::new(limit, now);
    let mut script = Bytes(script);
    // By place in the table: who has the flow, bytes that came, and bytes that went back.
    let mut known: Vec<Option<(Stranger, u64, u64)>> = vec![None; limit];
    while let Some((step, who, datagram)) = script.step() {
        let stranger = Stranger {
            source: SocketAddr::new(Ipv4Addr::new(192, 0, 2 + (who >> 6), 1 + (who >> 3 & 7)).into(), 1000),
            port: usize::from(who & 1),
            local: (who & 2 != 0).then_some(Ipv4Addr::LOCALHOST.into()),
        };
        match step % 4 {
            0 | 1 => match flows.admit(stranger, datagram, now) {
                Ok(admitted) => {
                    if let Some(DecoyId(id)) = admitted.evicted {
                        assert!(known[id as usize].take().is_some());
                    }
                    let place = &mut known[admitted.id.0 as usize];
                    assert_eq!(place.is_none(), admitted.new);
                    let (of, came, _) = place.get_or_insert((stranger, 0, 0));
                    *came += datagram.len() as u64;
                    assert_eq!(*of, stranger);
                }
                Err(drop) => {
                    assert!(matches!(
                        drop,
                        DecoyDrop::SourceFlows | DecoyDrop::SourceRate | DecoyDrop::TotalRate
                    ));
                    assert!(known.iter().flatten().all(|(of, ..)| *of != stranger));
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
                    Err(DecoyDrop::ToStranger) => assert!(known[id].is_none()),
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
    // The watch gives up at the first piece that goes beyond 1,024 bytes: it is the same for streams within that.
    let stream = &stream[..stream.len().min(1024)];
    let whole = suite_in(std::iter::once(stream));
    assert_eq!(suite_in(stream.chunks(usize::from(length).max(1))), whole);
    assert_eq!(suite_in(stream.chunks(1)), whole);
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

//! The group against vectors of NIST and of other implementations, and against itself.

use std::sync::atomic::{AtomicU8, Ordering};

use libcrux_sha3::portable::incremental::{Shake128Xof, Xof as _};
use rustls::crypto::{GetRandomFailed, ring as provider};

use super::*;

fn hex<const BYTES: usize>(text: &str) -> [u8; BYTES] {
    data_encoding::HEXUPPER.decode(text.as_bytes()).unwrap().try_into().unwrap()
}

/// Bytes that count up, so that no two seeds are the same.
#[derive(Debug)]
struct Counting(AtomicU8);

impl SecureRandom for Counting {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
        bytes.fill_with(|| self.0.fetch_add(1, Ordering::Relaxed));
        Ok(())
    }
}

static COUNTING: Counting = Counting(AtomicU8::new(0));
static GROUP: Hybrid = Hybrid { classical: provider::kx_group::X25519, random: &COUNTING };

/// Test 50 of ACVP's `ML-KEM-keyGen-FIPS203`, ML-KEM-768. An expanded key ends with the SHA3-256 of the encapsulation key, and z.
#[test]
fn a_key_pair_is_that_of_nist() {
    let d: [u8; 32] = hex("FE0CD537C14A427CB0C722C23983F4E6CD3A3FB34A86D528D781F1BAAF47509C");
    let z: [u8; 32] = hex("432F42E5F1286A667CCC0E2D5DF1FD2EA7E7F5E9FE363541F2C75F2BB0BF48BE");
    let (decapsulation, encapsulation) = key_pair(&[d, z].concat().try_into().unwrap());
    let hash: [u8; 32] = hex("45319E006BE8695E06124F020851E4B36C6793349A7C151F253079898EEB86C8");
    assert_eq!(libcrux_sha3::sha256(&encapsulation), hash);
    assert_eq!(decapsulation.0.as_slice()[2336..], [hash, z].concat());
}

/// One hash over what comes of 100 seeds from SHAKE128: keys, ciphertexts, their secrets, and those of ciphertexts that nobody
/// made. The value is that of C2SP's CCTV, which several implementations share.
#[test]
fn a_hundred_vectors_are_those_of_other_implementations() {
    let (mut source, mut sink) = (Shake128Xof::new(), Shake128Xof::new());
    source.absorb_final(&[]);
    let mut draw = |bytes: &mut [u8]| source.squeeze(bytes);
    for _ in 0..100 {
        let (mut seed, mut message, mut nobodys) = ([0; 64], [0; 32], [0; CIPHERTEXT_BYTES]);
        draw(&mut seed);
        let (decapsulation, encapsulation) = key_pair(&seed);
        sink.absorb(&encapsulation);
        draw(&mut message);
        let (ciphertext, shared) = encapsulate(&encapsulation, &message).unwrap();
        sink.absorb(&ciphertext);
        sink.absorb(shared.as_slice());
        assert_eq!(decapsulation.decapsulate(&ciphertext), shared);
        draw(&mut nobodys);
        sink.absorb(decapsulation.decapsulate(&nobodys).as_slice());
    }
    sink.absorb_final(&[]);
    let mut digest = [0; 32];
    sink.squeeze(&mut digest);
    assert_eq!(digest, hex("1114B1B6699ED191734FA339376AFA7E285C9E6ACF6FF0177D346696CE564415"));
}

#[test]
fn both_ends_agree_and_shares_have_their_order() {
    let client = GROUP.start().unwrap();
    let (group, classical) = client.hybrid_component().unwrap();
    assert_eq!((client.group(), group), (NamedGroup::X25519MLKEM768, NamedGroup::X25519));
    assert_eq!(client.pub_key().len(), 1216);
    assert_eq!(&client.pub_key()[ENCAPSULATION_KEY_BYTES..], classical);
    let server = GROUP.start_and_complete(client.pub_key()).unwrap();
    assert_eq!((server.group, server.pub_key.len()), (NamedGroup::X25519MLKEM768, 1120));
    let secret = client.complete(&server.pub_key).unwrap();
    assert_eq!(secret.secret_bytes().len(), 64);
    assert_eq!(secret.secret_bytes(), server.secret.secret_bytes());
}

#[test]
fn each_exchange_draws_its_own_keys() {
    let [one, other] = [(); 2].map(|()| GROUP.start().unwrap().pub_key().to_vec());
    assert_ne!(one[..ENCAPSULATION_KEY_BYTES], other[..ENCAPSULATION_KEY_BYTES]);
    let [first, second] = [(); 2].map(|()| GROUP.start_and_complete(&one).unwrap().pub_key);
    assert_ne!(first[..CIPHERTEXT_BYTES], second[..CIPHERTEXT_BYTES]);
}

#[test]
fn the_group_is_of_tls_1_3_alone() {
    assert!(GROUP.usable_for_version(ProtocolVersion::TLSv1_3));
    assert!(!GROUP.usable_for_version(ProtocolVersion::TLSv1_2));
}

#[test]
fn the_component_is_x25519() {
    let client = GROUP.start().unwrap();
    let server = provider::kx_group::X25519.start_and_complete(client.hybrid_component().unwrap().1).unwrap();
    let secret = client.complete_hybrid_component(&server.pub_key).unwrap();
    assert_eq!(secret.secret_bytes(), server.secret.secret_bytes());
}

#[test]
fn each_half_of_the_secret_comes_from_its_half_of_the_share() {
    let client = || {
        let start = GROUP.start().unwrap();
        let share = start.pub_key().to_vec();
        (start, share)
    };
    let (start, share) = client();
    let mut server = GROUP.start_and_complete(&share).unwrap();
    server.pub_key[0] ^= 1;
    let secret = start.complete(&server.pub_key).unwrap();
    let (ours, theirs) = (secret.secret_bytes(), server.secret.secret_bytes());
    assert_ne!(ours[..32], theirs[..32], "FIPS 203: a wrong ciphertext has a secret that nobody knows");
    assert_eq!(ours[32..], theirs[32..]);
}

#[test]
fn bad_shares_are_refused() {
    let share = GROUP.start().unwrap().pub_key().to_vec();
    let of_server = GROUP.start_and_complete(&share).unwrap().pub_key;
    for length in [0, 31, 32, 1184, 1215, 1217] {
        let mut share = share.clone();
        share.resize(length, 7);
        assert!(GROUP.start_and_complete(&share).is_err(), "{length}");
    }
    for length in [0, 32, 1088, 1119, 1121] {
        let mut share = of_server.clone();
        share.resize(length, 7);
        assert!(GROUP.start().unwrap().complete(&share).is_err(), "{length}");
    }
    // A coefficient of 4095, which is no residue of 3329 (FIPS 203 §7.2).
    let mut unreduced = share.clone();
    unreduced[..2].fill(0xff);
    assert!(GROUP.start_and_complete(&unreduced).is_err());
    // X25519 of small order: all the classical half would be known.
    let mut small = share;
    small[ENCAPSULATION_KEY_BYTES..].fill(0);
    assert!(GROUP.start_and_complete(&small).is_err());
}

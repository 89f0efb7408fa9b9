use std::{fs, os::unix::fs::PermissionsExt as _};

use data_encoding::HEXLOWER;
use proptest::prelude::*;

use super::*;

fn key(bytes: [u8; KEY_BYTES]) -> PresharedKey {
    PresharedKey::new(&bytes).unwrap()
}

fn keys(names: &[u8]) -> Vec<PresharedKey> {
    names.iter().map(|name| key([*name; 32])).collect()
}

/// What comes of a file with this text and mode.
fn with_file<T>(text: &str, mode: u32, then: impl FnOnce(Result<PresharedKey, PresharedKeyError>) -> T) -> T {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("psk");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    then(PresharedKey::load(&path))
}

#[test]
fn a_key_that_was_written_is_read_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("site.psk");
    let key = PresharedKey::generate().unwrap();
    key.write_new(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(fs::read_to_string(&path).unwrap().len(), TEXT_LEN + 1);
    assert_eq!(PresharedKey::load(&path).unwrap(), key);
    assert!(matches!(key.write_new(&path), Err(PresharedKeyError::Secret(SecretError::Exists { .. }))));
    assert_ne!(PresharedKey::generate().unwrap(), key);
    let missing = PresharedKey::load(&folder.path().join("none")).unwrap_err();
    assert!(missing.remedy().contains("culvert genpsk --out"), "{}", missing.remedy());
    assert_eq!(format!("{key:?}"), "PresharedKey", "it is never shown");
}

#[test]
fn other_programs_spell_a_key_with_padding() {
    let mut bytes = [0xfb; 32];
    bytes[31] = 0xff;
    let text = BASE64URL_NOPAD.encode(&bytes);
    let standard = data_encoding::BASE64.encode(&bytes);
    assert!(standard.contains('+') && standard.ends_with('='), "{standard}");
    for text in
        [text.clone(), format!("{text}\n"), format!("{text}\r\n"), standard.clone(), format!("{standard}\n")]
    {
        with_file(&text, 0o640, |read| assert_eq!(read.unwrap(), key(bytes), "{text:?}"));
    }
    let not_canonical = format!("{}1", &text[..42]);
    let zeros = "A".repeat(TEXT_LEN);
    let more = format!("{standard}\r\nmore");
    for text in
        ["", "\n", &text[1..], &format!("{text}A"), &format!("{text}=="), &not_canonical, &zeros, &more]
    {
        let is_no_key = |read| matches!(read, Err(PresharedKeyError::NotAKey(_)));
        assert!(with_file(text, 0o600, is_no_key), "{text:?}");
    }
    for mode in [0o604, 0o602, 0o601, 0o644] {
        let refused = with_file(&text, mode, Result::unwrap_err);
        assert!(matches!(refused, PresharedKeyError::Secret(SecretError::Exposed { .. })), "{mode:o}");
        assert!(refused.remedy().starts_with("chmod o= "));
    }
}

#[test]
fn the_documented_example_holds() {
    let bytes = std::array::from_fn(|place| place as u8);
    let exported = [0xa5; 32];
    let hex = |bytes: &[u8]| HEXLOWER.encode(bytes);
    assert_eq!(hex(&key(bytes).proof(&exported, Prover::Dialler).0), "ada86af9344f2b709480a614ff652158");
    assert_eq!(hex(&key(bytes).proof(&exported, Prover::Listener).0), "39f4f55d085d1f6f18960cb1083422a5");
    for (suite, length, expected) in [
        (Suite::Aes128Gcm, 32, "d0ed1f3ff1bd03d2945ee0aaad2a4bad4608f0ec4472f758b1bf507e13dac9c9"),
        (Suite::ChaCha20Poly1305, 32, "d0ed1f3ff1bd03d2945ee0aaad2a4bad4608f0ec4472f758b1bf507e13dac9c9"),
        (
            Suite::Aes256Gcm,
            48,
            "a41f4ed3e642949bfa6b863d6becda215b535aec32baa1372f9e1271a131edd13299d9190746675b5e1a85bf8bcbbe97",
        ),
    ] {
        let mut secret = vec![0x5a; length];
        key(bytes).mix_into_lane(suite, &mut secret);
        assert_eq!(hex(&secret), expected, "{suite:?}");
    }
}

#[test]
fn both_ends_find_the_first_key_of_the_dialler_that_the_listener_has() {
    let exported = [7; 32];
    for (dialler, listener, expected) in [
        (&[][..], &[][..], Ok(None)),
        (&[1], &[1], Ok(Some([0, 0]))),
        (&[2, 1], &[1], Ok(Some([1, 0]))),
        (&[1], &[2, 1], Ok(Some([0, 1]))),
        (&[2, 1], &[2, 1], Ok(Some([0, 0]))),
        (&[2, 1], &[1, 2], Ok(Some([0, 1]))),
        (&[2, 1], &[1, 3], Ok(Some([1, 0]))),
        (&[1], &[], Err([Disagreement::Missing, Disagreement::Unexpected])),
        (&[], &[1, 2], Err([Disagreement::Unexpected, Disagreement::Missing])),
        (&[1, 2], &[3, 4], Err([Disagreement::Different; 2])),
    ] {
        let (own, other) = (keys(dialler), keys(listener));
        let dialler = Holder { keys: &own, exported: &exported, end: Prover::Dialler };
        let listener = Holder { keys: &other, exported: &exported, end: Prover::Listener };
        let found = [dialler.agree(&listener.shows()), listener.agree(&dialler.shows())];
        match expected {
            Ok(places) => {
                assert_eq!(found, [0, 1].map(|end| Ok(places.map(|places| places[end]))));
            }
            Err(reasons) => assert_eq!(found, reasons.map(Err)),
        }
        if let Some(place) = found[0].ok().flatten() {
            assert_eq!(listener.find(&dialler.shows()[place]), found[1].ok().flatten());
            assert_eq!(listener.find(&listener.shows()[0]), None, "a proof is of no use to who it was shown");
        }
        // What is shown on one connection says nothing on another.
        let elsewhere = Holder { exported: &[8; 32], ..dialler };
        assert!(listener.shows().iter().all(|proof| elsewhere.find(proof).is_none()));
    }
}

proptest! {
    /// Whatever keys the ends have, both choose the same one, or neither does.
    #[test]
    fn two_ends_never_disagree_about_the_key(
        dialler in prop::collection::vec(1..5_u8, 0..=MAX_PRESHARED_KEYS),
        listener in prop::collection::vec(1..5_u8, 0..=MAX_PRESHARED_KEYS),
        exported: [u8; 32],
    ) {
        let (own, other) = (keys(&dialler), keys(&listener));
        let dialler = Holder { keys: &own, exported: &exported, end: Prover::Dialler };
        let listener = Holder { keys: &other, exported: &exported, end: Prover::Listener };
        match (dialler.agree(&listener.shows()), listener.agree(&dialler.shows())) {
            (Ok(Some(place)), Ok(Some(there))) => prop_assert_eq!(&own[place], &other[there]),
            (Ok(None), Ok(None)) => prop_assert!(own.is_empty() && other.is_empty()),
            (Err(_), Err(_)) => prop_assert!(own.iter().all(|key| !other.contains(key))),
            found => prop_assert!(false, "{:?}", found),
        }
    }

    /// A key makes every secret another one, and no two keys the same.
    #[test]
    fn a_lane_needs_both_the_key_and_the_exporter(one: [u8; 32], two: [u8; 32], secret: [u8; 32], bit in 0..256_usize) {
        prop_assume!(one != two && one != [0; 32] && two != [0; 32]);
        let mixed = |bytes, mut secret: [u8; 32]| {
            key(bytes).mix_into_lane(Suite::Aes128Gcm, &mut secret);
            secret
        };
        let mut other = secret;
        other[bit / 8] ^= 1 << (bit % 8);
        prop_assert_ne!(mixed(one, secret), secret);
        prop_assert_ne!(mixed(one, secret), mixed(two, secret));
        prop_assert_ne!(mixed(one, secret), mixed(one, other));
    }
}

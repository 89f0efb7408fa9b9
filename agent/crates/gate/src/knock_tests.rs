//! Knocks that open, and everything that must not.

use data_encoding::HEXLOWER;
use proptest::prelude::*;

use super::*;
use crate::identity::Identity;

const DCID: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const HELLO: &[u8] = b"not a ClientHello";
const SECONDS: u64 = 1_700_000_000;
const EPOCH: u64 = SECONDS / EPOCH_SECONDS;

/// What a knock about [`HELLO`] says.
fn about(unix_seconds: u64) -> About<'static> {
    About { client_hello: HELLO, unix_seconds, fallback: false }
}

fn identity(seed: u8) -> Identity {
    Identity::from_seed(Zeroizing::new([seed; 32])).unwrap()
}

fn server_key(seed: u8) -> ServerKey {
    ServerKey::new(&identity(seed).public_key()).unwrap()
}

fn knock() -> [u8; KNOCK_BYTES] {
    seal(&identity(1).agreement_key(), &server_key(2), &DCID, about(SECONDS), &[3; 32]).unwrap()
}

fn open_as(seed: u8, dcid: &[u8], token: &[u8]) -> Result<Opened, KnockError> {
    open(&identity(seed).agreement_key(), &server_key(seed), dcid, token)
}

fn is_proof_to(seed: u8, dcid: &[u8], token: &[u8]) -> bool {
    server_key(seed).is_proof(dcid, token, EPOCH..=EPOCH)
}

#[test]
fn a_knock_says_who_and_when_and_which_hello() {
    let opened = open_as(2, &DCID, &knock()).unwrap();
    assert_eq!(opened.client, identity(1).public_key().agreement().unwrap());
    assert_eq!(opened.unix_seconds, SECONDS);
    assert_eq!(opened.hello_hash, hello_hash(HELLO));
    assert!(is_proof_to(2, &DCID, &knock()));
}

#[test]
fn a_knock_names_its_client_whatever_the_sign_of_its_key() {
    let mut signs = [0; 2];
    for seed in 1..=16 {
        let client = identity(seed);
        let token = seal(&client.agreement_key(), &server_key(20), &DCID, about(SECONDS), &[3; 32]).unwrap();
        let opened = open_as(20, &DCID, &token).unwrap();
        assert_eq!((opened.sign, opened.key()), (client.agreement_key().sign(), Some(client.public_key())));
        signs[usize::from(opened.sign)] += 1;
    }
    assert!(signs[0] > 0 && signs[1] > 0, "{signs:?}");
}

/// The example of `docs/wire-format.md`, step by step.
#[test]
fn the_example_of_the_wire_format() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/wire-format.md"))
        .unwrap();
    let digits: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let (client, server) = (identity(1), server_key(2));
    let key =
        |label: &[u8]| Blake2s256::new().chain_update(label).chain_update(server.public_key.0).finalize();
    let mut mask = [0; 32];
    server.mask(&DCID, &mut mask);
    let mut ephemeral = *knock().first_chunk().unwrap();
    server.mask(&DCID, &mut ephemeral);
    for (name, bytes) in [
        ("client, Ed25519", &client.public_key().0[..]),
        ("client, X25519", client.agreement_key().public()),
        ("server, Ed25519", &server.public_key.0),
        ("server, X25519", &server.agreement),
        ("key of mac1", &key(b"culvert knock mac1")),
        ("key of the mask", &key(b"culvert knock mask")),
        ("mask", &mask),
        ("ephemeral", &ephemeral),
        ("prologue", &server.prologue(&DCID)),
        ("ClientHello hash", &hello_hash(HELLO)),
        ("knock", &knock()),
    ] {
        let hex = HEXLOWER.encode(bytes);
        println!("{name:16} {hex}");
        assert!(digits.contains(&hex), "{name}");
    }
}

#[test]
fn a_server_key_is_shown_as_its_public_half_alone() {
    assert_eq!(format!("{:?}", server_key(2)), format!("ServerKey({})", identity(2).public_key()));
}

#[test]
fn every_byte_counts() {
    let good = knock();
    for at in 0..KNOCK_BYTES {
        let mut token = good;
        token[at] ^= 1;
        assert!(!is_proof_to(2, &DCID, &token), "byte {at}");
        // Someone who knows the server's key can make mac1 right again.
        if at < NOISE_BYTES {
            assert_eq!(open_as(2, &DCID, &token), Err(KnockError::Noise), "byte {at}");
        }
    }
}

#[test]
fn it_opens_nothing_elsewhere() {
    let mut other_dcid = DCID;
    other_dcid[7] ^= 1;
    for dcid in [&other_dcid[..], &DCID[..7], &[], &[0; 20]] {
        assert!(!is_proof_to(2, dcid, &knock()));
        assert_eq!(open_as(2, dcid, &knock()), Err(KnockError::Noise));
    }
    assert_eq!(open_as(2, &[0; 21], &knock()), Err(KnockError::Length));
    assert!(!is_proof_to(4, &DCID, &knock()));
    assert_eq!(open_as(4, &DCID, &knock()), Err(KnockError::Noise));
    // To another connection ID, with the mask made right: the prologue differs.
    let mut moved = knock();
    let ephemeral = moved.first_chunk_mut().unwrap();
    server_key(2).mask(&DCID, ephemeral);
    server_key(2).mask(&other_dcid, ephemeral);
    assert_eq!(open_as(2, &other_dcid, &moved), Err(KnockError::Noise));
    // The same twin key, -A: it has the same X25519 key, but another name.
    let mut twin = identity(2).public_key();
    twin.0[31] ^= 0x80;
    let twin = ServerKey::new(&twin).unwrap();
    assert_eq!(twin.agreement, server_key(2).agreement);
    assert!(!twin.is_proof(&DCID, &knock(), EPOCH..=EPOCH));
    assert_eq!(open(&identity(2).agreement_key(), &twin, &DCID, &knock()), Err(KnockError::Noise));
}

#[test]
fn other_lengths_are_no_knocks() {
    let long = [&knock()[..], &[0]].concat();
    for token in [&[][..], &knock()[..KNOCK_BYTES - 1], &long] {
        assert_eq!(open_as(2, &DCID, token), Err(KnockError::Length));
        assert!(!is_proof_to(2, &DCID, token));
    }
    let long_dcid = [0; 21];
    let own = identity(1).agreement_key();
    assert_eq!(seal(&own, &server_key(2), &long_dcid, about(SECONDS), &[3; 32]), Err(KnockError::Length));
    let token = [&b"body"[..], &server_key(2).mac1(&long_dcid, b"body", EPOCH)].concat();
    assert!(!is_proof_to(2, &long_dcid, &token));
}

#[test]
fn a_retry_token_of_any_length_can_carry_mac1() {
    for length in [0, 1, 100, 300] {
        let body = vec![7; length];
        let token = [&body[..], &server_key(2).mac1(&DCID, &body, EPOCH)].concat();
        assert!(is_proof_to(2, &DCID, &token));
        assert!(!is_proof_to(2, &DCID[..7], &token));
    }
}

#[test]
fn mac1_holds_in_its_epoch_only() {
    let (server, token) = (server_key(2), knock());
    for (epochs, holds) in [
        (EPOCH - 5..=EPOCH - 1, false),
        (EPOCH + 1..=EPOCH + 5, false),
        (EPOCH - 5..=EPOCH, true),
        (EPOCH..=EPOCH + 5, true),
        (EPOCH - 1..=EPOCH + 1, true),
    ] {
        assert_eq!(server.is_proof(&DCID, &token, epochs.clone()), holds, "{epochs:?}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "no epoch at all")]
    let none = EPOCH + 1..=EPOCH;
    assert!(!server.is_proof(&DCID, &token, none));
    // To the last second of its epoch and no further.
    let own = identity(1).agreement_key();
    let at = |seconds| seal(&own, &server, &DCID, about(seconds), &[3; 32]).unwrap();
    assert!(is_proof_to(2, &DCID, &at(SECONDS + EPOCH_SECONDS - 1)));
    assert!(!is_proof_to(2, &DCID, &at(SECONDS + EPOCH_SECONDS)));
    assert!(!is_proof_to(2, &DCID, &at(SECONDS - 1)));
}

#[test]
fn keys_of_small_order_are_refused() {
    // Its ephemeral and its static key are 0, and so is every secret shared with them: it has no private key at all.
    struct Zero;
    impl Dh for Zero {
        fn name(&self) -> &'static str {
            "25519"
        }
        fn pub_len(&self) -> usize {
            32
        }
        fn priv_len(&self) -> usize {
            32
        }
        fn set(&mut self, _privkey: &[u8]) {}
        fn generate(&mut self, _rng: &mut dyn Random) -> Result<(), snow::Error> {
            Ok(())
        }
        fn pubkey(&self) -> &[u8] {
            &[0; 32]
        }
        fn privkey(&self) -> &[u8] {
            &[0; 32]
        }
        fn dh(&self, _pubkey: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
            out[..32].fill(0);
            Ok(())
        }
    }
    struct Forger;
    impl CryptoResolver for Forger {
        fn resolve_rng(&self) -> Option<Box<dyn Random>> {
            Some(Box::new(Given(None)))
        }
        fn resolve_dh(&self, _choice: &DHChoice) -> Option<Box<dyn Dh>> {
            Some(Box::new(Zero))
        }
        fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
            DefaultResolver.resolve_hash(choice)
        }
        fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
            DefaultResolver.resolve_cipher(choice)
        }
    }

    struct Naive;
    impl CryptoResolver for Naive {
        fn resolve_rng(&self) -> Option<Box<dyn Random>> {
            Some(Box::new(Given(None)))
        }
        fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
            DefaultResolver.resolve_dh(choice)
        }
        fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
            DefaultResolver.resolve_hash(choice)
        }
        fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
            DefaultResolver.resolve_cipher(choice)
        }
    }

    let server = server_key(2);
    let mut forged = [0; KNOCK_BYTES];
    let mut payload = [0; PAYLOAD_BYTES];
    payload[0] = VERSION;
    let prologue = server.prologue(&DCID);
    let mut noise = snow::Builder::with_resolver(server.noise.clone(), Box::new(Forger))
        .prologue(&prologue)
        .and_then(|builder| builder.local_private_key(&[0; 32])?.remote_public_key(&server.agreement))
        .and_then(snow::Builder::build_initiator)
        .unwrap();
    noise.write_message(&payload, &mut forged[..NOISE_BYTES]).unwrap();
    assert_eq!(forged[..32], [0; 32]);
    // snow by itself opens it, which is why X25519 is ours.
    let own = identity(2).agreement_key();
    let mut naive = snow::Builder::with_resolver(server.noise.clone(), Box::new(Naive))
        .prologue(&prologue)
        .and_then(|builder| builder.local_private_key(own.secret())?.build_responder())
        .unwrap();
    assert_eq!(naive.read_message(&forged[..NOISE_BYTES], &mut payload), Ok(PAYLOAD_BYTES));
    assert_eq!(naive.get_remote_static(), Some(&[0; 32][..]));
    server.mask(&DCID, forged.first_chunk_mut().unwrap());
    assert_eq!(open_as(2, &DCID, &forged), Err(KnockError::SmallOrder));
}

#[test]
fn the_clock_has_forty_bits() {
    let own = identity(1).agreement_key();
    for seconds in [0, 1, (1 << 40) - 1] {
        let knock = seal(&own, &server_key(2), &DCID, about(seconds), &[3; 32]).unwrap();
        assert_eq!(open_as(2, &DCID, &knock).unwrap().unix_seconds, seconds);
    }
}

#[test]
fn a_payload_of_another_version_is_named() {
    let (own, server) = (identity(1).agreement_key(), server_key(2));
    let mut payload = [0xff; PAYLOAD_BYTES];
    let prologue = server.prologue(&DCID);
    for version in [1, 2] {
        let mut knock = [0; KNOCK_BYTES];
        payload[0] = version;
        let mut noise = noise(&own, &server, &[3; 32])
            .prologue(&prologue)
            .and_then(|builder| builder.local_private_key(own.secret())?.remote_public_key(&server.agreement))
            .and_then(snow::Builder::build_initiator)
            .unwrap();
        noise.write_message(&payload, &mut knock[..NOISE_BYTES]).unwrap();
        server.mask(&DCID, knock.first_chunk_mut().unwrap());
        let opened = open_as(2, &DCID, &knock).map(|opened| opened.unix_seconds);
        // Flags and the reserved byte are not looked at.
        assert_eq!(opened, if version == 1 { Ok((1 << 40) - 1) } else { Err(KnockError::Version(2)) });
    }
}

#[test]
fn the_same_randomness_gives_the_same_knock_and_another_gives_another() {
    assert_eq!(knock(), knock());
    let other = seal(&identity(1).agreement_key(), &server_key(2), &DCID, about(SECONDS), &[4; 32]).unwrap();
    assert_ne!(knock()[..32], other[..32]);
    // The mask hides that the top bit of an X25519 key is 0.
    let tops: Vec<u8> = (0..64)
        .map(|byte| {
            let own = identity(1).agreement_key();
            seal(&own, &server_key(2), &[byte; 8], about(SECONDS), &[3; 32]).unwrap()[31] >> 7
        })
        .collect();
    assert!(tops.contains(&0) && tops.contains(&1));
}

proptest! {
    #[test]
    fn any_token_is_harmless(token in prop::collection::vec(any::<u8>(), 0..200), dcid in prop::collection::vec(any::<u8>(), 0..30)) {
        prop_assert!(open_as(2, &dcid, &token).is_err());
        prop_assert!(!is_proof_to(2, &dcid, &token));
    }

    #[test]
    fn a_knock_of_the_window_is_of_an_epoch_that_holds(now: u64, window in 0_u64..=600, skew in -600_i64..=600) {
        let epochs = epochs(now, Duration::from_secs(window));
        prop_assert!(epochs.contains(&(now / EPOCH_SECONDS)));
        let client = now.saturating_add_signed(skew);
        if client.abs_diff(now) <= window {
            prop_assert!(epochs.contains(&(client / EPOCH_SECONDS)), "{client} in {epochs:?}");
        }
        // What is further off than the window and an epoch does not hold.
        if client.abs_diff(now) >= window + EPOCH_SECONDS {
            prop_assert!(!epochs.contains(&(client / EPOCH_SECONDS)), "{client} in {epochs:?}");
        }
        // As many blocks as docs/configuration.md says.
        prop_assert!(epochs.end() - epochs.start() <= (2 * window).div_ceil(EPOCH_SECONDS));
    }

    #[test]
    fn an_epoch_holds_until_the_window_after_its_end(epoch in 0_u64..1 << 40, window in 20_u64..=600) {
        let end = (epoch + 1) * EPOCH_SECONDS + window;
        let holds = |now| epochs(now, Duration::from_secs(window)).contains(&epoch);
        prop_assert!(holds(end - 1) && !holds(end));
    }

    #[test]
    fn what_is_sealed_opens(
        client: [u8; 32],
        server: [u8; 32],
        dcid in prop::collection::vec(any::<u8>(), 0..=20),
        hello in prop::collection::vec(any::<u8>(), 0..600),
        seconds in 0_u64..1 << 40,
        skew in -90_i64..=90,
        ephemeral: [u8; 32],
    ) {
        let client = Identity::from_seed(Zeroizing::new(client)).unwrap();
        let server = Identity::from_seed(Zeroizing::new(server)).unwrap();
        let key = ServerKey::new(&server.public_key()).unwrap();
        let knock = seal(&client.agreement_key(), &key, &dcid, About { client_hello: &hello, unix_seconds: seconds, fallback: seconds % 2 == 0 }, &ephemeral).unwrap();
        let now = seconds.saturating_add_signed(skew);
        prop_assert!(key.is_proof(&dcid, &knock, epochs(now, Duration::from_secs(90))));
        let opened = open(&server.agreement_key(), &key, &dcid, &knock).unwrap();
        prop_assert_eq!(opened.client, client.public_key().agreement().unwrap());
        prop_assert_eq!((opened.unix_seconds, opened.hello_hash), (seconds, hello_hash(&hello)));
    }
}

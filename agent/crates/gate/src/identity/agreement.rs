//! Further uses of the identity key: X25519 key agreement, signatures, and secrets derived from it.
//!
//! The X25519 key is the Ed25519 key in Montgomery form, so that whoever has the 32 bytes of a public key or a share
//! link can seal a knock to it without another key to hand out. The sign of the Ed25519 key is lost on the way: two
//! keys, A and -A, have one X25519 key. Whoever holds one private key holds the other, and TLS pins the whole key.

use curve25519_dalek::{MontgomeryPoint, edwards::CompressedEdwardsY};
use ring::{
    digest, hkdf,
    signature::{self, Ed25519KeyPair, UnparsedPublicKey},
};
use zeroize::Zeroizing;

use crate::identity::{Identity, PublicKey};

/// An X25519 key (RFC 7748) for key agreement. The private part is wiped when dropped, and is never shown.
pub struct AgreementKey {
    secret: Zeroizing<[u8; 32]>,
    public: [u8; 32],
    /// The sign of the Ed25519 key that it follows from.
    sign: bool,
}

impl AgreementKey {
    /// The key whose private bytes are `secret`; they are clamped in use (RFC 7748 §5).
    #[must_use]
    pub fn from_secret(secret: Zeroizing<[u8; 32]>) -> Self {
        let public = MontgomeryPoint::mul_base_clamped(*secret).0;
        Self { secret, public, sign: false }
    }

    /// The key of these halves, which belong together.
    pub(crate) fn from_halves(secret: Zeroizing<[u8; 32]>, public: [u8; 32]) -> Self {
        Self { secret, public, sign: false }
    }

    /// The bit of the Ed25519 key that X25519 lacks; [`PublicKey::from_agreement`] needs it beside the public half.
    #[must_use]
    pub fn sign(&self) -> bool {
        self.sign
    }

    pub(crate) fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// The public half, with which the other end computes.
    #[must_use]
    pub fn public(&self) -> &[u8; 32] {
        &self.public
    }

    /// The secret shared with the holder of `other`; `None` if it is all zeros, because `other` is of small order and
    /// anyone could compute it (RFC 7748 §6.1).
    #[must_use]
    pub fn shared(&self, other: &[u8; 32]) -> Option<Zeroizing<[u8; 32]>> {
        let shared = Zeroizing::new(MontgomeryPoint(*other).mul_clamped(*self.secret).0);
        (*shared != [0; 32]).then_some(shared)
    }
}

impl std::fmt::Debug for AgreementKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AgreementKey({:02x?})", self.public)
    }
}

impl Identity {
    /// The X25519 key whose public half is [`PublicKey::agreement`] of ours.
    ///
    /// Its private half is the scalar of the Ed25519 key: SHA-512 of the seed, first half (RFC 8032 §5.1.5).
    #[must_use]
    pub fn agreement_key(&self) -> AgreementKey {
        let mut secret = Zeroizing::new([0; 32]);
        let half = secret.len();
        secret.copy_from_slice(&digest::digest(&digest::SHA512, self.seed.as_ref()).as_ref()[..half]);
        AgreementKey { sign: self.public_key.sign(), ..AgreementKey::from_secret(secret) }
    }

    /// A secret that only the holder of this key can compute, another one for each `label`: HKDF-SHA256 (RFC 5869) of
    /// the seed, without salt, with `label` as info.
    #[must_use]
    pub fn derive(&self, label: &str) -> Zeroizing<[u8; 32]> {
        let mut secret = Zeroizing::new([0; 32]);
        let key = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(self.seed.as_ref());
        key.expand(&[label.as_bytes()], hkdf::HKDF_SHA256)
            .and_then(|output| output.fill(secret.as_mut()))
            .expect("one block of SHA-256 is 32 bytes");
        secret
    }

    /// The Ed25519 signature of `message` (RFC 8032 §5.1.6); the same message gives the same signature.
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        let pair = Ed25519KeyPair::from_seed_unchecked(self.seed.as_ref()).expect("any 32 bytes are a seed");
        pair.sign(message).as_ref().try_into().expect("an Ed25519 signature has 64 bytes")
    }
}

impl PublicKey {
    /// The Ed25519 key whose [`PublicKey::agreement`] is `agreement` and whose sign is `sign`; `None` if there is none.
    #[must_use]
    pub fn from_agreement(agreement: &[u8; 32], sign: bool) -> Option<Self> {
        let point = MontgomeryPoint(*agreement).to_edwards(u8::from(sign))?;
        Some(Self(point.compress().to_bytes()))
    }

    /// The sign of its x coordinate (RFC 8032 §5.1.2).
    fn sign(&self) -> bool {
        self.0[31] >> 7 == 1
    }

    /// The X25519 public key of the same holder; `None` if this is no point of the curve, or one of small order, with
    /// which no secret can be shared.
    #[must_use]
    pub fn agreement(&self) -> Option<[u8; 32]> {
        let point = CompressedEdwardsY(self.0).decompress()?;
        (!point.is_small_order()).then(|| point.to_montgomery().0)
    }

    /// Whether `signature` is this key's signature of `message`.
    #[must_use]
    pub fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&signature::ED25519, self.0).verify(message, signature).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use data_encoding::HEXLOWER;
    use proptest::prelude::*;

    use super::*;

    fn hex<const N: usize>(text: &str) -> [u8; N] {
        HEXLOWER.decode(text.as_bytes()).unwrap().try_into().unwrap()
    }

    fn identity(seed: [u8; 32]) -> Identity {
        Identity::from_seed(Zeroizing::new(seed)).unwrap()
    }

    #[test]
    fn x25519_is_that_of_the_rfc() {
        // RFC 7748 §5.2, the first vector.
        let secret = hex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4");
        let other = hex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c");
        let shared = hex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552");
        let key = AgreementKey::from_secret(Zeroizing::new(secret));
        assert_eq!(key.shared(&other).as_deref(), Some(&shared));
    }

    #[test]
    fn signatures_are_those_of_the_rfc() {
        // RFC 8032 §7.1, tests 1 and 2.
        for (seed, public, message, signature) in [
            (
                "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
                "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
                &[][..],
                "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
            ),
            (
                "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
                "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
                &[0x72],
                "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
            ),
        ] {
            let identity = identity(hex(seed));
            assert_eq!(identity.public_key(), PublicKey(hex(public)));
            assert_eq!(identity.sign(message), hex::<64>(signature));
            assert!(identity.public_key().verify(message, &hex::<64>(signature)));
            assert!(!identity.public_key().verify(b"another", &hex::<64>(signature)));
            assert!(!identity.public_key().verify(message, &hex::<64>(signature)[..63]));
        }
    }

    #[test]
    fn the_x25519_key_is_the_one_that_libsodium_converts_to() {
        // libsodium's test ed25519_convert: seed, X25519 public key, X25519 private key (clamped).
        let identity = identity(hex("421151a459faeade3d247115f94aedae42318124095afabe4d1451a559faedee"));
        let key = identity.agreement_key();
        let public = hex("f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50");
        assert_eq!(*key.public(), public);
        assert_eq!(identity.public_key().agreement(), Some(public));
        let mut clamped = *key.secret;
        clamped[0] &= 0xf8;
        clamped[31] = clamped[31] & 0x7f | 0x40;
        assert_eq!(clamped, hex("8052030376d47112be7f73ed7a019293dd12ad910b654455798b4667d73de166"));
    }

    #[test]
    fn small_order_is_refused() {
        // The points of order 1, 2, 4, 4, 8, 8 in Edwards form (y; the signs do not matter).
        for y in [
            "0100000000000000000000000000000000000000000000000000000000000000",
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
            "0000000000000000000000000000000000000000000000000000000000000000",
            "0000000000000000000000000000000000000000000000000000000000000080",
            "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        ] {
            let key = PublicKey(hex(y));
            assert_eq!(key.agreement(), None, "{y}");
            assert!(CompressedEdwardsY(key.0).decompress().is_some(), "{y} is a point");
            let montgomery = CompressedEdwardsY(key.0).decompress().unwrap().to_montgomery().0;
            assert!(identity([1; 32]).agreement_key().shared(&montgomery).is_none(), "{y}");
        }
        // No point at all.
        assert_eq!(PublicKey([2; 32]).agreement(), None);
    }

    #[test]
    fn labels_and_identities_have_secrets_of_their_own() {
        let (one, two) = (identity([1; 32]), identity([2; 32]));
        assert_eq!(*one.derive("a"), *one.derive("a"));
        assert_ne!(*one.derive("a"), *one.derive("b"));
        assert_ne!(*one.derive("a"), *two.derive("a"));
        assert_ne!(*one.derive(""), [0; 32]);
        // Computed by Python's hmac. A process that was restarted, of another version too, has the same.
        for (label, secret) in [
            ("culvert connection ids", "ebf1ddde561fd329dc11633f72c8451e6195e2b9f0f2b656ccb229dc08dbe639"),
            ("culvert retry tokens", "77ad3e12efe934803a1f3c457e65cf6c2801ff34e05df5c66ead461851ba1110"),
        ] {
            assert_eq!(*one.derive(label), hex(secret), "{label}");
        }
    }

    #[test]
    fn nothing_private_is_shown() {
        let key = AgreementKey::from_secret(Zeroizing::new([0x5a; 32]));
        assert!(!format!("{key:?}").contains("5a, 5a"));
    }

    proptest! {
        #[test]
        fn both_ways_to_the_x25519_key_agree(seed: [u8; 32], other: [u8; 32]) {
            let (one, two) = (identity(seed), identity(other));
            prop_assert_eq!(one.public_key().agreement(), Some(*one.agreement_key().public()));
            let there = one.agreement_key().shared(two.agreement_key().public()).unwrap();
            let back = two.agreement_key().shared(one.agreement_key().public()).unwrap();
            prop_assert_eq!(*there, *back);
        }

        #[test]
        fn any_key_that_converts_has_a_secret_with_us(bytes: [u8; 32]) {
            if let Some(other) = PublicKey(bytes).agreement() {
                prop_assert!(identity([1; 32]).agreement_key().shared(&other).is_some());
            }
        }
    }

    #[test]
    fn the_agreement_key_and_a_sign_give_the_identity_back() {
        for seed in 0..32 {
            let identity = Identity::from_seed(Zeroizing::new([seed; 32])).unwrap();
            let key = identity.agreement_key();
            let back = PublicKey::from_agreement(key.public(), key.sign());
            assert_eq!(back, Some(identity.public_key()));
            assert_ne!(PublicKey::from_agreement(key.public(), !key.sign()), back);
        }
    }
}

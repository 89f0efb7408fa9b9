use std::{fs, os::unix::fs::PermissionsExt as _};

use proptest::prelude::*;

use super::*;
use crate::identity::link::SCHEME;

/// Written by OpenSSL 3.0: `openssl genpkey -algorithm ed25519`, then `openssl pkey -pubout`.
const OPENSSL_PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIN8zBeR3DsRJdycNnKUsHMQML2lOcHVA15gFBR8dFWMt
-----END PRIVATE KEY-----
";
const OPENSSL_PUBLIC: &str = "NDt9fOE-vNsSfC917HYN0XS7ZvVAc_5SUIi9nhYwUq8";

/// RFC 8410 §10.3: the version 2 example, with attributes and the public key.
const RFC_8410_V2: &str = "-----BEGIN PRIVATE KEY-----
MHICAQEwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
oB8wHQYKKoZIhvcNAQkJFDEPDA1DdXJkbGUgQ2hhaXJzgSEAGb9ECWmEzf6FQbrB
Z9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PRIVATE KEY-----
";
/// RFC 8410 §10.1.
const RFC_8410_PUBLIC: &str = "Gb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE";

const X25519_PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VuBCIEIFgTE46DoQyrEwPvcuS4uOMEWr2hwmCjgQmHyRBC4nNY
-----END PRIVATE KEY-----
";
const P256_PRIVATE: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgShpCzKhsKDjKxrpp
nPEyLqNr/HHQ4d6lKnbJfXtRlh+hRANCAASZKZs+dFSLfnK3xwehTPiFvY6U/yxb
W0uC9FQxykEX9tUJHbOwY7QEMO2OGtYs5XTEGOEmDuplKce4FwCzX+HR
-----END PRIVATE KEY-----
";
const PUBLIC_PEM: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEANDt9fOE+vNsSfC917HYN0XS7ZvVAc/5SUIi9nhYwUq8=
-----END PUBLIC KEY-----
";

fn pem_of(der: &[u8]) -> String {
    format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", BASE64.encode(der))
}

#[test]
fn keys_of_other_writers_are_read() {
    let openssl = Identity::from_pem(OPENSSL_PRIVATE.as_bytes()).unwrap();
    assert_eq!(openssl.public_key().to_string(), OPENSSL_PUBLIC);
    assert_eq!(*openssl.to_pem(), OPENSSL_PRIVATE, "version 1 is written as OpenSSL writes it");
    let rfc = Identity::from_pem(RFC_8410_V2.as_bytes()).unwrap();
    assert_eq!(rfc.public_key().to_string(), RFC_8410_PUBLIC);
    // ring tags the public key of version 2 explicitly.
    let ring = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).unwrap();
    let public = Ed25519KeyPair::from_pkcs8(ring.as_ref()).unwrap().public_key().as_ref().to_vec();
    let read = Identity::from_pem(pem_of(ring.as_ref()).as_bytes()).unwrap();
    assert_eq!(read.public_key().0[..], public);
}

#[test]
fn our_der_is_read_by_ring() {
    let identity = Identity::generate().unwrap();
    let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&identity.pkcs8_der()).unwrap();
    assert_eq!(pair.public_key().as_ref(), identity.public_key().0);
    assert_ne!(identity.public_key(), Identity::generate().unwrap().public_key());
}

#[test]
fn what_is_no_ed25519_private_key_is_told_apart() {
    let refused = |pem: &str| Identity::from_pem(pem.as_bytes()).unwrap_err();
    assert_eq!(refused(X25519_PRIVATE), KeyError::WrongType);
    assert_eq!(refused(P256_PRIVATE), KeyError::WrongType);
    assert_eq!(refused(&OPENSSL_PRIVATE.replace("PRIVATE", "EC PRIVATE")), KeyError::WrongType);
    assert_eq!(refused(PUBLIC_PEM), KeyError::NotPrivate);
    assert_eq!(refused(""), KeyError::NotPem);
    assert_eq!(refused("3q2+7w=="), KeyError::NotPem);
    assert_eq!(refused(&OPENSSL_PRIVATE.replace("PRIVATE", "ENCRYPTED PRIVATE")), KeyError::NotPem);
    assert_eq!(refused(&OPENSSL_PRIVATE.replace("MC4C", "M*4C")), KeyError::NotPem);
    assert_eq!(refused(&format!("{OPENSSL_PRIVATE}{X25519_PRIVATE}")), KeyError::Several);
    assert_eq!(refused(&"x".repeat(MAX_FILE_BYTES + 1)), KeyError::NotPem);

    let mut der = BASE64.decode(RFC_8410_V2.lines().skip(1).take(3).collect::<String>().as_bytes()).unwrap();
    *der.last_mut().unwrap() ^= 1;
    assert_eq!(refused(&pem_of(&der)), KeyError::Mismatch);
}

#[test]
fn a_cut_key_is_damaged_wherever_it_is_cut() {
    let der = Identity::generate().unwrap().pkcs8_der();
    for length in 0..der.len() {
        assert_eq!(Identity::from_pkcs8(&der[..length]).unwrap_err(), KeyError::Damaged, "cut at {length}");
    }
    let longer = [&der[..], &[0]].concat();
    assert_eq!(Identity::from_pkcs8(&longer).unwrap_err(), KeyError::Damaged);
}

#[test]
fn a_written_key_is_private_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("identity.key");
    let identity = Identity::generate().unwrap();
    identity.write_new(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(Identity::load(&path).unwrap().public_key(), identity.public_key());

    let again = Identity::generate().unwrap().write_new(&path).unwrap_err();
    assert!(matches!(again, IdentityError::Secret(SecretError::Exists { .. })), "{again:?}");
    assert_eq!(Identity::load(&path).unwrap().public_key(), identity.public_key());
    let nowhere = identity.write_new(&folder.path().join("no/such/folder")).unwrap_err();
    assert!(matches!(nowhere, IdentityError::Secret(SecretError::Write { .. })), "{nowhere:?}");
}

#[test]
fn each_bad_file_has_its_error_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("identity.key");
    let missing = Identity::load(&path).unwrap_err();
    assert!(matches!(missing, IdentityError::Secret(SecretError::Missing(_))), "{missing:?}");
    assert_eq!(missing.remedy(), format!("write one with culvert keygen --out {}", path.display()));

    Identity::generate().unwrap().write_new(&path).unwrap();
    for mode in [0o604, 0o602, 0o601, 0o777] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let exposed = Identity::load(&path).unwrap_err();
        assert!(
            matches!(exposed, IdentityError::Secret(SecretError::Exposed { mode: m, .. }) if m == mode),
            "{exposed:?}"
        );
        assert_eq!(exposed.remedy(), format!("chmod o= {}", path.display()));
    }
    for mode in [0o600, 0o440, 0o660] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        Identity::load(&path).unwrap();
    }
    fs::write(&path, X25519_PRIVATE).unwrap();
    let wrong = Identity::load(&path).unwrap_err();
    assert!(matches!(wrong, IdentityError::Key { cause: KeyError::WrongType, .. }), "{wrong:?}");
    let directory = Identity::load(folder.path()).unwrap_err();
    assert!(
        matches!(directory, IdentityError::Secret(SecretError::Read { .. } | SecretError::Exposed { .. })),
        "{directory:?}"
    );
}

#[test]
fn an_identity_does_not_show_its_private_half() {
    let identity = Identity::from_pem(OPENSSL_PRIVATE.as_bytes()).unwrap();
    assert_eq!(format!("{identity:?}"), format!("Identity({OPENSSL_PUBLIC})"));
}

#[test]
fn mistyped_public_keys_say_what_is_wrong() {
    let refused = |text: &str| text.parse::<PublicKey>().unwrap_err();
    assert_eq!(refused(""), PublicKeyError::Length(0));
    assert_eq!(refused(&format!("{OPENSSL_PUBLIC}x")), PublicKeyError::Length(44));
    // The example of wg(8).
    assert_eq!(refused("xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg="), PublicKeyError::WireGuard);
    let space = format!("ab {}", &OPENSSL_PUBLIC[3..]);
    assert_eq!(refused(&space), PublicKeyError::Character { position: 3, character: ' ' });
    let slash = OPENSSL_PUBLIC.replace('_', "/");
    let position = slash.find('/').unwrap() + 1;
    assert_eq!(refused(&slash), PublicKeyError::Character { position, character: '/' });
    let wide = format!("é{}", &OPENSSL_PUBLIC[1..]);
    assert_eq!(refused(&wide), PublicKeyError::Character { position: 1, character: 'é' });
    // 43 characters hold 258 bits: the last two must be zero, so that a key has one text only.
    for last in ['9', '-', '_'] {
        assert_eq!(refused(&format!("{}{last}", &OPENSSL_PUBLIC[..42])), PublicKeyError::NotCanonical);
    }
}

#[test]
fn endpoints_are_read_as_they_are_written() {
    for text in [
        "gw.example.net:4433",
        "192.0.2.1:1",
        "[2001:db8::1]:65535",
        "localhost:53",
        "a_b.example.:7",
        "gw.example.net:20000-20100",
        "[2001:db8::1]:1-65535",
    ] {
        assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
    }
    assert_eq!("[::1]:53".parse(), Ok(Endpoint::new("::1".to_owned(), 53)));
}

#[test]
fn bad_endpoints_name_the_part_that_is_wrong() {
    let refused = |text: &str| text.parse::<Endpoint>().unwrap_err();
    assert_eq!(refused("gw"), EndpointError::NoPort);
    assert_eq!(refused("[::1]"), EndpointError::NoPort);
    assert_eq!(refused(":53"), EndpointError::NoHost);
    for port in ["", "0", "65536", "+1", " 1", "http"] {
        assert_eq!(refused(&format!("gw:{port}")), EndpointError::Port(port.to_owned()));
    }
    for port in ["-1", "1-", "1-x", "1-2-3", "0-5", "5-65536"] {
        assert!(matches!(refused(&format!("gw:{port}")), EndpointError::Port(_)), "{port}");
    }
    for ports in ["5-5", "6-5"] {
        assert_eq!(refused(&format!("gw:{ports}")), EndpointError::Ports(ports.to_owned()));
    }
    assert_eq!(refused("::1"), EndpointError::NoBrackets("::1".to_owned()));
    let address = "2001:db8:0:1:2:3:4:5".to_owned();
    assert_eq!(refused("2001:db8:0:1:2:3:4:5:4433"), EndpointError::NoBrackets(address));
    assert_eq!(refused("[gw]:1"), EndpointError::Brackets("[gw]:1".to_owned()));
    assert_eq!(refused("[::1:1"), EndpointError::Brackets("[::1:1".to_owned()));
    let host = "g w".to_owned();
    assert_eq!(refused("g w:1"), EndpointError::HostCharacter { host, character: ' ' });
    for host in ["a..b", ".", &"x".repeat(64), &"x.".repeat(128)] {
        assert_eq!(refused(&format!("{host}:1")), EndpointError::HostName(host.to_owned()));
    }
}

#[test]
fn bad_links_name_the_part_that_is_wrong() {
    let refused = |text: &str| text.parse::<ShareLink>().unwrap_err();
    let link = format!("culvert://[2001:db8::1]:4433/{OPENSSL_PUBLIC}");
    assert_eq!(link.parse::<ShareLink>().unwrap().to_string(), link);
    assert_eq!(refused("https://gw:1/x"), ShareLinkError::Scheme);
    assert_eq!(refused("culvert://gw:1"), ShareLinkError::NoKey);
    assert_eq!(refused("culvert://gw/x"), ShareLinkError::Endpoint(EndpointError::NoPort));
    assert_eq!(refused("culvert://gw:1/x"), ShareLinkError::Key(PublicKeyError::Length(1)));
    assert_eq!(refused(&format!("{link}/")), ShareLinkError::Key(PublicKeyError::Length(44)));
    assert_eq!(
        refused("culvert://gw:1/x").to_string(),
        "the public key: a public key has 43 characters, this has 1"
    );
}

proptest! {
    #[test]
    fn a_public_key_has_one_text(seed: [u8; 32], bytes: [u8; 32], other in "[A-Za-z0-9_-]{43}") {
        // Half of all byte strings are no points of the curve.
        let mistyped = PublicKey(bytes);
        let exists = mistyped.agreement().map(|_| mistyped).ok_or(PublicKeyError::NotAKey);
        prop_assert_eq!(mistyped.to_string().parse::<PublicKey>(), exists);
        let key = Identity::from_seed(Zeroizing::new(seed)).unwrap().public_key();
        let text = key.to_string();
        prop_assert_eq!(text.len(), PublicKey::TEXT_LEN);
        prop_assert_eq!(text.parse::<PublicKey>(), Ok(key));
        if let Ok(parsed) = other.parse::<PublicKey>() {
            prop_assert_eq!(parsed.to_string(), other);
        }
    }

    #[test]
    fn no_input_panics(text in "\\PC{0,80}", bytes in prop::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(endpoint) = text.parse::<Endpoint>() {
            prop_assert_eq!(endpoint.to_string().parse::<Endpoint>(), Ok(endpoint));
        }
        let link = [SCHEME, &text].concat();
        prop_assert!(link.parse::<ShareLink>().is_err());
        prop_assert!(Identity::from_pkcs8(&bytes).is_err());
        prop_assert!(Identity::from_pem(&bytes).is_err());
    }
}

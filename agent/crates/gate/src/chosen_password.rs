//! Passwords that people choose, as Argon2id hashes (RFC 9106) in the text form of PHC.
//!
//! ```text
//!   $argon2id$v=19$m=19456,t=2,p=1$salt$hash      m in KiB; salt and hash in base64 without padding
//! ```
//!
//! Computing one takes tens of milliseconds and `m` of memory, which is what makes guessing slow: whoever checks passwords has to bound
//! how often.

use std::{fmt, str::FromStr};

use argon2::{Algorithm, Argon2, Block, Params, Version};
use data_encoding::BASE64_NOPAD;
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;

use crate::password::NoRandomness;

/// The most memory that a hash may ask for, in KiB.
pub const MOST_MEMORY_KIB: u32 = 64 << 10;

/// The most memory times passes, in KiB: some 400 ms of one core.
pub const MOST_WORK_KIB: u32 = 4 * MOST_MEMORY_KIB;

/// The most lanes, which are computed one after the other.
const MOST_LANES: u32 = 16;

const SALT_BYTES: std::ops::RangeInclusive<usize> = 8..=64;
const HASH_BYTES: std::ops::RangeInclusive<usize> = 16..=64;

/// What is kept of a password that a person has chosen: enough to recognise it, slowly.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash {
    memory_kib: u32,
    passes: u32,
    lanes: u32,
    salt: Box<[u8]>,
    hash: Box<[u8]>,
}

/// Why a text is no [`PasswordHash`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAPasswordHash {
    /// It has not the parts of one.
    #[error("is not of the form $argon2id$v=19$m=…,t=…,p=…$salt$hash")]
    Form,
    /// It is one of bcrypt, of Argon2i or of another kind.
    #[error("is not of Argon2id, version 19")]
    Kind,
    /// Argon2 does not work with these parameters.
    #[error("has parameters that Argon2 does not have")]
    Parameters,
    /// It asks for more than [`MOST_MEMORY_KIB`].
    #[error("asks for {} KiB of memory (m), and {MOST_MEMORY_KIB} are allowed", .0)]
    Memory(u32),
    /// It asks for more than [`MOST_WORK_KIB`].
    #[error("asks for {} KiB in all passes (m times t), and {MOST_WORK_KIB} are allowed", .0)]
    Work(u64),
}

impl PasswordHash {
    /// Hashes `password` with a salt of its own, and 19 MiB and two passes as OWASP recommends.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn new(password: &[u8]) -> Result<Self, NoRandomness> {
        let mut salt = [0; 16];
        SystemRandom::new().fill(&mut salt).map_err(|_| NoRandomness)?;
        let empty = Box::from([0; 32]);
        let mut made = Self { memory_kib: 19_456, passes: 2, lanes: 1, salt: Box::from(salt), hash: empty };
        made.hash = made.computed(password);
        Ok(made)
    }

    /// Whether `password` is the one that this was made of. It takes tens to hundreds of milliseconds, and the memory of
    /// [`PasswordHash::memory_bytes`].
    #[must_use]
    pub fn is_of(&self, password: &[u8]) -> bool {
        self.computed(password).ct_eq(&self.hash).into()
    }

    /// The memory that a check takes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::from(self.memory_kib) << 10
    }

    fn params(&self) -> Option<Params> {
        Params::new(self.memory_kib, self.passes, self.lanes, Some(self.hash.len())).ok()
    }

    fn computed(&self, password: &[u8]) -> Box<[u8]> {
        let params = self.params().expect("parameters are looked at when a hash is read, and ours are good");
        let mut memory = vec![Block::default(); params.block_count()];
        let mut hash = vec![0; self.hash.len()].into_boxed_slice();
        let argon = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
        argon
            .hash_password_into_with_memory(password, &self.salt, &mut hash, &mut memory)
            .expect("lengths were looked at, and a password is shorter than 4 GiB");
        hash
    }
}

impl fmt::Display for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { memory_kib, passes, lanes, salt, hash } = self;
        let [salt, hash] = [salt, hash].map(|bytes| BASE64_NOPAD.encode(bytes));
        write!(f, "$argon2id$v=19$m={memory_kib},t={passes},p={lanes}${salt}${hash}")
    }
}

impl fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordHash")
    }
}

impl FromStr for PasswordHash {
    type Err = NotAPasswordHash;

    fn from_str(text: &str) -> Result<Self, NotAPasswordHash> {
        use NotAPasswordHash::{Form, Kind, Memory, Parameters, Work};
        let parts: Vec<&str> = text.strip_prefix('$').ok_or(Form)?.split('$').collect();
        match parts.first() {
            Some(&"argon2id") => {}
            Some(_) | None => return Err(Kind),
        }
        let [_, version, parameters, salt, hash] = *parts.as_slice() else { return Err(Form) };
        if version != "v=19" {
            return Err(Kind);
        }
        let parameters: Vec<&str> = parameters.split(',').collect();
        let [memory, passes, lanes] = *parameters.as_slice() else { return Err(Form) };
        let number = |text: &str, name: &str| text.strip_prefix(name)?.parse::<u32>().ok();
        let [memory_kib, passes, lanes] =
            [number(memory, "m="), number(passes, "t="), number(lanes, "p=")].map(|it| it.ok_or(Form));
        let (memory_kib, passes, lanes) = (memory_kib?, passes?, lanes?);
        let bytes = |text: &str, lengths: &std::ops::RangeInclusive<usize>| {
            let read = BASE64_NOPAD.decode(text.as_bytes()).ok();
            read.filter(|bytes| lengths.contains(&bytes.len())).map(Vec::into_boxed_slice).ok_or(Form)
        };
        if memory_kib > MOST_MEMORY_KIB {
            return Err(Memory(memory_kib));
        }
        let work = u64::from(memory_kib) * u64::from(passes);
        if work > u64::from(MOST_WORK_KIB) {
            return Err(Work(work));
        }
        let (salt, hash) = (bytes(salt, &SALT_BYTES)?, bytes(hash, &HASH_BYTES)?);
        let read = Self { memory_kib, passes, lanes, salt, hash };
        if lanes > MOST_LANES || read.params().is_none() {
            return Err(Parameters);
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hashes of another implementation: `argon2-cffi` 25.1 over the reference implementation in C.
    const FOREIGN: [(&str, &str); 3] = [
        (
            "correct horse",
            "$argon2id$v=19$m=256,t=3,p=4$Mo3DMRE9T2kZ3xOLvWIboA$Xdp2bv5kNBA2bqc5eToow6o+CiMAG0xTJj8hqeY/O9I",
        ),
        ("", "$argon2id$v=19$m=8,t=1,p=1$iRNEQzVKpr0ZA+wXPOHg4Q$R0LjWQG2kyQWWiUjNuUMgA"),
        (
            "schl\u{fc}ssel",
            "$argon2id$v=19$m=1024,t=2,p=2$M4yjvn9lsIDIKeAXXHE6mrQiz1ZIdWzwY334MiPKWPY$oVkphO8UoVUIkHGhEz4JIoXzyFy8oIYU/ZHpU917oyx42n9XLFj8Emuv2KOJYXFIWBE+LuzuHZfEwwar6w0jvQ",
        ),
    ];

    #[test]
    fn hashes_of_the_reference_implementation_are_verified() {
        for (password, text) in FOREIGN {
            let hash: PasswordHash = text.parse().unwrap();
            assert!(hash.is_of(password.as_bytes()), "{text}");
            assert!(!hash.is_of(b"Correct horse") && !hash.is_of(&[0]), "{text}");
            assert_eq!(hash.to_string(), text);
        }
    }

    #[test]
    fn a_hash_of_ours_recognises_its_password() {
        let hash = PasswordHash::new(b"tr0ub4dor").unwrap();
        let read: PasswordHash = hash.to_string().parse().unwrap();
        assert!(read == hash && read.is_of(b"tr0ub4dor") && !read.is_of(b"tr0ub4dor "));
        assert_eq!(read.memory_bytes(), 19 << 20);
        assert_ne!(PasswordHash::new(b"tr0ub4dor").unwrap(), hash, "each has a salt of its own");
        assert_eq!(format!("{hash:?}"), "PasswordHash");
    }

    #[test]
    fn what_is_no_hash_or_costs_too_much_is_refused() {
        use NotAPasswordHash::{Form, Kind, Memory, Parameters, Work};
        let with =
            |parameters: &str| format!("$argon2id$v=19${parameters}$c2FsdHNhbHQ$aGFzaGhhc2hoYXNoaGFzaA");
        assert!(with("m=65536,t=4,p=4").parse::<PasswordHash>().is_ok());
        for (text, why) in [
            (String::new(), Form),
            ("hunter2".to_owned(), Form),
            ("$2b$12$abcdefghijklmnopqrstuv".to_owned(), Kind),
            (with("m=8,t=1,p=1").replace("argon2id", "argon2i"), Kind),
            (with("m=8,t=1,p=1").replace("v=19", "v=16"), Kind),
            (with("m=8,t=1"), Form),
            (with("t=1,m=8,p=1"), Form),
            (with("m=8,t=1,p=1,keyid=x"), Form),
            (with("m=8,t=1,p=1").replace("c2FsdHNhbHQ", "c2Fs"), Form),
            (with("m=8,t=1,p=1").replace("aGFzaGhhc2hoYXNoaGFzaA", "aGFzaA"), Form),
            (with("m=8,t=1,p=1") + "=", Form),
            (with("m=65537,t=1,p=1"), Memory(65_537)),
            (with("m=4294967295,t=4294967295,p=1"), Memory(u32::MAX)),
            (with("m=65536,t=5,p=1"), Work(327_680)),
            (with("m=8,t=0,p=1"), Parameters),
            (with("m=7,t=1,p=1"), Parameters),
            (with("m=8,t=1,p=0"), Parameters),
            (with("m=8,t=1,p=2"), Parameters),
            (with("m=1024,t=1,p=17"), Parameters),
        ] {
            assert_eq!(text.parse::<PasswordHash>(), Err(why), "{text}");
        }
    }
}

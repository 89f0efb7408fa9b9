//! The format of a file of used knocks (pure).
//!
//! ```text
//!  0    magic and version, 8 bytes      "culvknk" 1
//!  8    boot ID, 36                     as the kernel writes it, without the newline
//! 44    workers, 1                      how many the agent had
//! 45    zero, 3
//! 48    blind until, 8                  unix seconds, most significant byte first
//! 56    record, 24                      tag, 16 | expiry in unix seconds, 8, most significant byte first
//! 80    record …
//! ```
//!
//! Only complete records count. The last one is torn when the process was killed while it was written, and then no
//! answer to its knock was sent either. A power failure may leave anything behind, but comes with another boot ID.

/// Bytes of a [`Record`] in a file.
pub const RECORD_BYTES: usize = TAG_BYTES + 8;

/// The bytes of a [`Header`] in a file.
pub(super) const HEADER_BYTES: usize = 56;

const TAG_BYTES: usize = 16;
const MAGIC: [u8; 8] = *b"culvknk\x01";
const BOOT_AT: usize = MAGIC.len();
const WORKERS_AT: usize = BOOT_AT + BootId::BYTES;
const BLIND_AT: usize = WORKERS_AT + 4;

/// The record of one used knock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The last 16 bytes of its token.
    pub tag: [u8; TAG_BYTES],
    /// The last second in which the knock may still be inside the window, in unix seconds.
    pub expiry: u64,
}

impl Record {
    /// The record as it stands in a file.
    #[must_use]
    pub fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..TAG_BYTES].copy_from_slice(&self.tag);
        bytes[TAG_BYTES..].copy_from_slice(&self.expiry.to_be_bytes());
        bytes
    }

    /// Reads one record from the front of `bytes`; `None` if less than one is there.
    fn split_from(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (tag, rest) = bytes.split_first_chunk()?;
        let (expiry, rest) = rest.split_first_chunk()?;
        Some((Self { tag: *tag, expiry: u64::from_be_bytes(*expiry) }, rest))
    }
}

/// The boot of the machine. Records of the present boot are complete, because what was written stays in the kernel's cache
/// however the process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootId([u8; Self::BYTES]);

impl BootId {
    const BYTES: usize = 36;

    /// Reads the content of `/proc/sys/kernel/random/boot_id`: 36 characters, a newline may follow.
    #[must_use]
    pub fn parse(content: &[u8]) -> Option<Self> {
        content.trim_ascii_end().try_into().ok().map(Self)
    }
}

/// The header of a file, which stands before the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// The boot of the machine in which the file was created.
    pub(super) boot: BootId,
    /// The number of workers that the agent had, and so the number of files that belong together.
    pub(super) workers: u8,
    /// Knocks with a timestamp up to this unix second may have been used and yet be in no file.
    pub(super) blind_until: u64,
}

impl Header {
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..BOOT_AT].copy_from_slice(&MAGIC);
        bytes[BOOT_AT..WORKERS_AT].copy_from_slice(&self.boot.0);
        bytes[WORKERS_AT] = self.workers;
        bytes[BLIND_AT..].copy_from_slice(&self.blind_until.to_be_bytes());
        bytes
    }
}

/// Reads a complete file; `None` if it does not begin with a header of this version.
pub(super) fn parse(file: &[u8]) -> Option<(Header, Vec<Record>)> {
    let (header, rest) = file.split_first_chunk::<HEADER_BYTES>()?;
    let boot = header[BOOT_AT..WORKERS_AT].try_into().ok().map(BootId)?;
    let blind_until = header[BLIND_AT..].try_into().ok().map(u64::from_be_bytes)?;
    let parsed = Header { boot, workers: header[WORKERS_AT], blind_until };
    // Written again it is the same, so the magic and the zeros are right too.
    (parsed.to_bytes() == *header && parsed.workers > 0).then(|| (parsed, parse_records(rest)))
}

/// Reads the records of bytes that have no header; a torn last one is left out.
pub(super) fn parse_records(mut bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::with_capacity(bytes.len() / RECORD_BYTES);
    while let Some((record, after)) = Record::split_from(bytes) {
        records.push(record);
        bytes = after;
    }
    records
}

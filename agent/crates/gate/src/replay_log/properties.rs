//! Properties of any file of used knocks: what its fuzz target checks.

use crate::replay_log::format::{HEADER_BYTES, RECORD_BYTES, parse};

/// Takes `input` as a file of used knocks.
///
/// The records that are read, written again, are a prefix of the file: only a torn last record is missing.
pub fn knock_journal(input: &[u8]) {
    let Some((header, records)) = parse(input) else { return };
    let mut again = header.to_bytes().to_vec();
    again.extend(records.iter().flat_map(|record| record.to_bytes()));
    assert!(input.starts_with(&again));
    assert!(input.len() - again.len() < RECORD_BYTES && again.len() >= HEADER_BYTES);
    assert_eq!(parse(&again), Some((header, records)));
}

//! Field sections (RFC 9204), with the static table and literals: the dynamic table has capacity 0 in both directions, so no section
//! waits for another stream.
//!
//! | question | file |
//! |---|---|
//! | how is a section read and written | this one |
//! | which fields have an index | `table.rs` |
//! | how are integers and strings written | `integer.rs`, `huffman.rs` |

use std::borrow::Cow;

use thiserror::Error;

use crate::fields::{self, Field};

mod huffman;
mod integer;
mod table;

use self::table::{ENTRIES, Match};

/// Why a field section was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadSection {
    /// It breaks RFC 9204, or refers to the dynamic table, which is empty: `QPACK_DECOMPRESSION_FAILED`.
    #[error("a field section that cannot be decoded")]
    Undecodable,
    /// It has more bytes than the limit, as RFC 9114 §4.2.2 counts them.
    #[error("a field section above the limit")]
    TooLarge,
    /// The name of a field is no ASCII: a malformed message.
    #[error("a name of a field with other characters than ASCII's")]
    BadName,
}

/// Reads `section`, the payload of a HEADERS frame: all of its lines in their order, pseudo-headers among them. They have at most
/// `limit_bytes` as RFC 9114 §4.2.2 counts them.
///
/// # Errors
///
/// Why the section was not read.
pub fn decode(mut section: &[u8], limit_bytes: u64) -> Result<Vec<Field>, BadSection> {
    prefix(&mut section).ok_or(BadSection::Undecodable)?;
    let mut lines = Vec::new();
    let mut size_bytes = 0;
    while !section.is_empty() {
        let line = line(&mut section)?;
        size_bytes += line.size();
        if size_bytes > limit_bytes {
            return Err(BadSection::TooLarge);
        }
        lines.push(line);
    }
    Ok(lines)
}

/// The section prefix (RFC 9204 §4.5.1). Nothing can be required of an empty dynamic table, and no base lies before its beginning.
fn prefix(section: &mut &[u8]) -> Option<()> {
    let required_insert_count = integer::take(section, 8)?;
    let is_negative = section.first()? & 0x80 != 0;
    integer::take(section, 7)?;
    (required_insert_count == 0 && !is_negative).then_some(())
}

/// ```text
///   1 T index(6)            indexed                    T: of the static table
///   0 1 N T index(4)        literal, name by index
///   0 0 1 N H length(3)     literal, literal name      H: Huffman
///   0 0 0 …                 refers to entries behind the base of the dynamic table
/// ```
fn line(section: &mut &[u8]) -> Result<Field, BadSection> {
    let undecodable = BadSection::Undecodable;
    let first = *section.first().ok_or(undecodable)?;
    if first & 0x80 != 0 {
        let (name, value) = entry(section, first & 0x40 != 0, 6).ok_or(undecodable)?;
        return Ok(Field::new(Cow::Borrowed(name), Cow::Borrowed(value.as_bytes())));
    }
    let name = if first & 0x40 != 0 {
        Cow::Borrowed(entry(section, first & 0x10 != 0, 4).ok_or(undecodable)?.0)
    } else if first & 0x20 != 0 {
        let name = string(section, 3).ok_or(undecodable)?;
        Cow::Owned(String::from_utf8(name).ok().filter(|name| name.is_ascii()).ok_or(BadSection::BadName)?)
    } else {
        return Err(undecodable);
    };
    let value = string(section, 7).ok_or(undecodable)?;
    Ok(Field::new(name, Cow::Owned(value)))
}

fn entry(section: &mut &[u8], is_static: bool, bits: u32) -> Option<(&'static str, &'static str)> {
    let index = integer::take(section, bits)?;
    ENTRIES.get(usize::try_from(index).ok()?).filter(|_| is_static).copied()
}

/// A string (RFC 9204 §4.1.2): the bit above its length says whether it is in Huffman code.
fn string(section: &mut &[u8], bits: u32) -> Option<Vec<u8>> {
    let is_huffman = section.first()? & (1 << bits) != 0;
    let length = integer::take(section, bits)?;
    let (text, rest) = section.split_at_checked(usize::try_from(length).ok()?)?;
    *section = rest;
    if is_huffman { huffman::decode(text) } else { Some(text.to_vec()) }
}

/// Appends `lines` as a field section; its size as RFC 9114 §4.2.2 counts it.
pub fn encode<'a>(lines: impl IntoIterator<Item = (&'a str, &'a [u8])>, out: &mut Vec<u8>) -> u64 {
    // No insert is required, and the base is 0.
    out.extend_from_slice(&[0, 0]);
    let mut size_bytes = 0;
    for (name, value) in lines {
        size_bytes += fields::size(name.len(), value.len());
        match table::find(name, value) {
            Match::Both(index) => integer::put(out, 0xc0, 6, index),
            Match::Name(index) => {
                integer::put(out, 0x50, 4, index);
                put_string(out, 0, 7, value);
            }
            Match::Nothing => {
                put_string(out, 0x20, 3, name.as_bytes());
                put_string(out, 0, 7, value);
            }
        }
    }
    size_bytes
}

fn put_string(out: &mut Vec<u8>, flags: u8, bits: u32, text: &[u8]) {
    let mut encoded = Vec::new();
    if huffman::encode_if_shorter(text, &mut encoded) {
        integer::put(out, flags | 1 << bits, bits, encoded.len());
        out.extend_from_slice(&encoded);
    } else {
        integer::put(out, flags, bits, text.len());
        out.extend_from_slice(text);
    }
}

#[cfg(test)]
mod tests;

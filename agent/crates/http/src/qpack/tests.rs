//! Sections of RFC 9204 and of ls-qpack, and what no section may be.

use proptest::prelude::*;

use super::*;

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A section and the names and values of its lines.
type Vector = (Vec<u8>, Vec<(String, Vec<u8>)>);

/// The vectors of a file of `vectors/`, whose `make.py` says how they are made.
fn vectors(text: &str) -> Vec<Vector> {
    let blocks = text.split("section ").skip(1).map(|block| {
        let mut rows = block.lines();
        let section = unhex(rows.next().unwrap());
        let lines =
            rows.map(|row| row.split_once('|').map(|(name, value)| (name.into(), unhex(value))).unwrap());
        (section, lines.collect())
    });
    blocks.collect()
}

fn read(section: &[u8]) -> Result<Vec<(String, Vec<u8>)>, BadSection> {
    let lines = decode(section, 100_000)?;
    Ok(lines.iter().map(|line| (line.name().to_owned(), line.value().to_vec())).collect())
}

fn write(lines: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut section = Vec::new();
    encode(lines.iter().map(|(name, value)| (&**name, &**value)), &mut section);
    section
}

#[test]
fn sections_of_ls_qpack_are_read() {
    let vectors = vectors(include_str!("../../vectors/sections.txt"));
    assert_eq!(vectors.len(), 11 + 99, "lists of fields, and each entry of the static table");
    for (section, lines) in vectors {
        assert_eq!(read(&section), Ok(lines));
    }
}

#[test]
fn sections_that_ls_qpack_reads_are_written() {
    let foreign = vectors(include_str!("../../vectors/sections.txt"));
    let ours: String = foreign
        .iter()
        .map(|(_, lines)| {
            let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let rows: String = lines.iter().map(|(name, value)| format!("{name}|{}\n", hex(value))).collect();
            format!("section {}\n{rows}", hex(&write(lines)))
        })
        .collect();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/ours.txt");
    if std::env::var_os("CULVERT_WRITE_VECTORS").is_some() {
        std::fs::write(file, &ours).unwrap();
    }
    let checked = std::fs::read_to_string(file).unwrap();
    assert!(
        ours == checked,
        "CULVERT_WRITE_VECTORS=1 writes ours.txt anew; vectors/make.py reads it with ls-qpack"
    );
}

#[test]
fn the_example_of_rfc_9204() {
    // Appendix B.1: a literal with a name of the static table, neither part in Huffman code.
    let section = unhex("0000510b2f696e6465782e68746d6c");
    assert_eq!(read(&section), Ok(vec![(":path".into(), b"/index.html".to_vec())]));
    // Appendices B.2 to B.5 refer to the dynamic table: required insert counts, base and post-base indices.
    for dynamic in ["03811011", "050080c181", "0500c1808180"] {
        assert_eq!(read(&unhex(dynamic)), Err(BadSection::Undecodable), "{dynamic}");
    }
}

#[test]
fn what_is_no_section() {
    let cases = [
        ("", "no prefix"),
        ("00", "half a prefix"),
        ("0080", "a base before the beginning"),
        ("000080", "an entry of the dynamic table"),
        ("000010", "an entry behind the base"),
        ("000000", "a name behind the base"),
        ("00004000", "a name of the dynamic table"),
        ("0000ff24", "an entry above 98"),
        ("0000ffffffffffffffffffff7f", "an index without an end"),
        ("00005105", "a value that is cut off"),
        ("000027ffffffffffffffff7f61", "a name of 2^62 bytes"),
        ("0000518100", "padding that is not EOS"),
    ];
    for (hex, what) in cases {
        assert_eq!(read(&unhex(hex)), Err(BadSection::Undecodable), "{what}");
    }
    assert_eq!(read(&unhex("000022c3a400")), Err(BadSection::BadName));
    assert_eq!(read(&unhex("0000ff23")), Ok(vec![("x-frame-options".into(), b"sameorigin".to_vec())]));
}

#[test]
fn a_small_section_of_large_fields_is_refused() {
    // `content-security-policy: script-src 'none'; object-src 'none'; base-uri 'none'` is two bytes: 85.
    let mut section = vec![0, 0];
    section.extend([0xff, 85 - 63].repeat(1_000));
    assert_eq!(decode(&section, 16_384), Err(BadSection::TooLarge));
    let size = u64::try_from(
        "content-security-policy".len() + "script-src 'none'; object-src 'none'; base-uri 'none'".len(),
    )
    .unwrap()
        + 32;
    assert_eq!(decode(&section, size * 1_000).map(|lines| lines.len()), Ok(1_000));
}

proptest! {
    #[test]
    fn decoding_undoes_encoding(lines in proptest::collection::vec(
        (prop_oneof!["[a-z:-]{1,12}", Just("cookie".to_owned()), Just(":path".to_owned())], proptest::collection::vec(any::<u8>(), 0..80)),
        0..12,
    )) {
        let section = write(&lines);
        prop_assert_eq!(read(&section), Ok(lines));
    }

    #[test]
    fn any_bytes(section in proptest::collection::vec(any::<u8>(), 0..200)) {
        crate::connection::properties::http_fields(&section);
    }
}

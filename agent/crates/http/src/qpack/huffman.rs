//! Strings in the Huffman code of HPACK (RFC 7541 §5.2, appendix B), which QPACK shares.

use httlib_huffman::DecoderSpeed;

/// Appends `text` in Huffman code if that is shorter; whether it did.
pub(super) fn encode_if_shorter(text: &[u8], out: &mut Vec<u8>) -> bool {
    let start = out.len();
    let encoded = httlib_huffman::encode(text, out).is_ok();
    if encoded && out.len() - start < text.len() {
        return true;
    }
    out.truncate(start);
    false
}

/// What `encoded` stands for; `None` if it is no Huffman code or wrongly padded. It has at most 8 bytes for each 5 of `encoded`.
pub(super) fn decode(encoded: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(encoded.len() * 8 / 5);
    httlib_huffman::decode(encoded, &mut text, DecoderSpeed::FourBits).ok()?;
    // The library takes some paddings that are not the front of EOS. There is one right encoding of a text.
    let mut again = Vec::with_capacity(encoded.len());
    httlib_huffman::encode(&text, &mut again).ok()?;
    (again == encoded).then_some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    #[test]
    fn vectors_of_rfc_7541() {
        // Appendices C.4 and C.6.
        let vectors = [
            ("www.example.com", "f1e3 c2e5 f23a 6ba0 ab90 f4ff"),
            ("no-cache", "a8eb 1064 9cbf"),
            ("custom-key", "25a8 49e9 5ba9 7d7f"),
            ("custom-value", "25a8 49e9 5bb8 e8b4 bf"),
            ("302", "6402"),
            ("private", "aec3 771a 4b"),
            ("Mon, 21 Oct 2013 20:13:21 GMT", "d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff"),
            ("https://www.example.com", "9d29 ad17 1863 c78f 0b97 c8e9 ae82 ae43 d3"),
            ("307", "640e ff"),
            ("Mon, 21 Oct 2013 20:13:22 GMT", "d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff"),
            ("gzip", "9bd9 ab"),
            (
                "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
                "94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
            ),
        ];
        for (text, hex) in vectors {
            assert_eq!(decode(&bytes(hex)).as_deref(), Some(text.as_bytes()), "{text}");
            let mut out = Vec::new();
            // "307" has three bytes in either form.
            assert_eq!(encode_if_shorter(text.as_bytes(), &mut out), text != "307");
            assert!(out.is_empty() || out == bytes(hex), "{text}");
        }
    }

    #[test]
    fn padding_that_is_not_the_front_of_eos_is_refused() {
        // "a" is 00011, and then three bits of padding.
        assert_eq!(decode(&[0b0001_1111]).as_deref(), Some(&b"a"[..]));
        for wrong in [0b0001_1000, 0b0001_1001, 0b0001_1011, 0b0001_1110] {
            assert_eq!(decode(&[wrong]), None, "{wrong:08b}");
        }
        // A byte of nothing but padding, EOS itself, and padding longer than 7 bits.
        for wrong in [&[0xff][..], &[0xff; 4], &[0b0001_1111, 0xff], &[0x00; 0][..0]] {
            assert_eq!(decode(wrong).is_some(), wrong.is_empty());
        }
    }

    proptest! {
        #[test]
        fn decoding_undoes_encoding(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut out = Vec::new();
            if encode_if_shorter(&text, &mut out) {
                prop_assert!(out.len() < text.len());
                prop_assert_eq!(decode(&out), Some(text));
            } else {
                prop_assert!(out.is_empty());
            }
        }

        #[test]
        fn what_is_decoded_has_that_one_encoding(encoded in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Some(text) = decode(&encoded) {
                prop_assert!(text.len() * 5 <= encoded.len() * 8);
            }
        }
    }
}

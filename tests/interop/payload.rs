//! Payloads of DATAGRAM frames (`docs/wire-format.md` §5) and QUIC's variable-length integers (RFC 9000 §16).

/// A payload, by its context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Known { flow: u64, bytes: Vec<u8> },
    Opening { flow: u64, service: u64, bytes: Vec<u8> },
    Open { flow: u64, service: u64 },
    Confirmed { flow: u64 },
    Refused { flow: u64, reason: u64 },
    Unknown { flow: u64 },
    Closed { flow: u64 },
    Piece { flow: u64, datagram: u64, total: u64, offset: u64, bytes: Vec<u8> },
}

impl Payload {
    pub(crate) fn flow(&self) -> u64 {
        match self {
            Self::Known { flow, .. }
            | Self::Opening { flow, .. }
            | Self::Open { flow, .. }
            | Self::Confirmed { flow }
            | Self::Refused { flow, .. }
            | Self::Unknown { flow }
            | Self::Closed { flow }
            | Self::Piece { flow, .. } => *flow,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let (numbers, bytes): (&[u64], &[u8]) = match self {
            Self::Known { flow, bytes } => (&[2, *flow], bytes),
            Self::Opening { flow, service, bytes } => (&[3, *flow, *service], bytes),
            Self::Open { flow, service } => (&[4, *flow, *service], &[]),
            Self::Confirmed { flow } => (&[5, *flow], &[]),
            Self::Refused { flow, reason } => (&[6, *flow, *reason], &[]),
            Self::Unknown { flow } => (&[7, *flow], &[]),
            Self::Closed { flow } => (&[8, *flow], &[]),
            Self::Piece { flow, datagram, total, offset, bytes } => {
                (&[10, *flow, *datagram, *total, *offset], bytes)
            }
        };
        let mut out = Vec::new();
        for number in numbers {
            put_varint(&mut out, *number);
        }
        out.extend(bytes);
        out
    }

    /// `None` if the agent sent what the document does not know.
    pub(crate) fn decode(mut rest: &[u8]) -> Option<Self> {
        let rest = &mut rest;
        let (context, flow) = (take_varint(rest)?, take_varint(rest)?);
        let second = if matches!(context, 3 | 4 | 6) { take_varint(rest)? } else { 0 };
        if context == 10 {
            let (datagram, total, offset) = (take_varint(rest)?, take_varint(rest)?, take_varint(rest)?);
            return Some(Self::Piece { flow, datagram, total, offset, bytes: rest.to_vec() });
        }
        let bytes = rest.to_vec();
        if !matches!(context, 2 | 3) && !bytes.is_empty() {
            return None;
        }
        Some(match context {
            2 => Self::Known { flow, bytes },
            3 => Self::Opening { flow, service: second, bytes },
            4 => Self::Open { flow, service: second },
            5 => Self::Confirmed { flow },
            6 => Self::Refused { flow, reason: second },
            7 => Self::Unknown { flow },
            8 => Self::Closed { flow },
            _ => return None,
        })
    }
}

/// The pieces of a datagram, of so many bytes each, the last at most.
pub(crate) fn pieces(flow: u64, datagram: u64, whole: &[u8], length: usize) -> Vec<Payload> {
    let total = whole.len() as u64;
    let places = (0u64..).step_by(length).zip(whole.chunks(length));
    places
        .map(|(offset, bytes)| Payload::Piece { flow, datagram, total, offset, bytes: bytes.to_vec() })
        .collect()
}

/// Appends `value` in its shortest form.
pub(crate) fn put_varint(out: &mut Vec<u8>, value: u64) {
    let (log_length, length) = match value {
        0..0x40 => (0, 1),
        0x40..0x4000 => (1, 2),
        0x4000..0x4000_0000 => (2, 4),
        _ => (3, 8),
    };
    assert!(value < 1 << 62, "{value} is no QUIC integer");
    let bytes = (value | log_length << (length * 8 - 2)).to_be_bytes();
    out.extend(&bytes[8 - length..]);
}

/// How many bytes the integer has that starts with `first`.
pub(crate) fn varint_length(first: u8) -> usize {
    1 << (first >> 6)
}

/// Takes an integer from the front of `rest`; `None` if it is cut short.
pub(crate) fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let (head, tail) = rest.split_at_checked(varint_length(*rest.first()?))?;
    let first = u64::from(head[0] & 0x3f);
    *rest = tail;
    Some(head[1..].iter().fold(first, |value, byte| value << 8 | u64::from(*byte)))
}

#[test]
fn the_examples_of_the_document() {
    let bytes = b"hi".to_vec();
    let examples = [
        (Payload::Known { flow: 300, bytes: bytes.clone() }, &[0x02, 0x41, 0x2c, b'h', b'i'][..]),
        (Payload::Opening { flow: 2, service: 1, bytes }, &[3, 2, 1, b'h', b'i']),
        (Payload::Open { flow: 2, service: 1 }, &[4, 2, 1]),
        (Payload::Confirmed { flow: 2 }, &[5, 2]),
        (Payload::Refused { flow: 2, reason: 1 }, &[6, 2, 1]),
        (Payload::Unknown { flow: 2 }, &[7, 2]),
        (Payload::Closed { flow: 2 }, &[8, 2]),
        (
            Payload::Piece { flow: 2, datagram: 7, total: 3000, offset: 1234, bytes: Vec::new() },
            &[0x0a, 0x02, 0x07, 0x4b, 0xb8, 0x44, 0xd2],
        ),
    ];
    for (payload, wire) in examples {
        assert_eq!(payload.encode(), wire);
        assert_eq!(Payload::decode(wire), Some(payload));
    }
}

#[test]
fn the_pieces_of_the_document() {
    let wire: Vec<Vec<u8>> = pieces(2, 7, &[0x61; 2500], 1200).iter().map(Payload::encode).collect();
    let expected = [
        [&[0x0a, 0x02, 0x07, 0x49, 0xc4, 0x00][..], &[0x61; 1200]].concat(),
        [&[0x0a, 0x02, 0x07, 0x49, 0xc4, 0x44, 0xb0][..], &[0x61; 1200]].concat(),
        [&[0x0a, 0x02, 0x07, 0x49, 0xc4, 0x49, 0x60][..], &[0x61; 100]].concat(),
    ];
    assert_eq!(wire, expected);
}

#[test]
fn integers_of_every_length() {
    // The last four are RFC 9000 §A.1's examples.
    let examples: [(u64, &[u8]); 5] = [
        (63, &[0x3f]),
        (37, &[0x25]),
        (15_293, &[0x7b, 0xbd]),
        (494_878_333, &[0x9d, 0x7f, 0x3e, 0x7d]),
        (151_288_809_941_952_652, &[0xc2, 0x19, 0x7c, 0x5e, 0xff, 0x14, 0xe8, 0x8c]),
    ];
    for (value, wire) in examples {
        let mut out = Vec::new();
        put_varint(&mut out, value);
        assert_eq!(out, wire);
        let rest = &mut &*out;
        assert_eq!((take_varint(rest), rest.len()), (Some(value), 0));
        assert_eq!(take_varint(&mut &wire[..wire.len() - 1]), None);
    }
}

//! A report about what arrived on a lane: the far end asks for it with `ReportsWanted`, to measure what the path takes.

use quic_core::varint::{self, Reader};

/// What had arrived on the lane that carries the report. Totals are since the lane was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// The highest packet number that arrived.
    pub highest: u64,
    /// When that packet arrived, in microseconds of a clock that all lanes of the reporting agent share; its zero is arbitrary.
    pub arrived_micros: u64,
    /// Packets that arrived.
    pub packets: u64,
    /// Bytes of those packets, IP and UDP headers included.
    pub bytes: u64,
    /// Packets that arrived marked CE and hold an IP packet that is not.
    pub marked: u64,
}

impl Report {
    /// The bytes of the longest encoding of a report.
    pub const MOST_BYTES: usize = 5 * 8;

    /// Reads what follows the context in a frame; `None` if a field is cut off, or bytes follow the fields.
    #[must_use]
    pub fn decode(data: &[u8]) -> Option<Self> {
        let mut fields = Reader::new(data);
        let mut next = || fields.varint();
        let report = Self {
            highest: next()?,
            arrived_micros: next()?,
            packets: next()?,
            bytes: next()?,
            marked: next()?,
        };
        fields.is_empty().then_some(report)
    }

    /// Writes the fields at the front of `out`; returns their length, or `None` if there is no room, or a field has no encoding.
    #[must_use]
    pub fn encode(&self, out: &mut [u8]) -> Option<usize> {
        let Self { highest, arrived_micros, packets, bytes, marked } = *self;
        let mut len = 0;
        for field in [highest, arrived_micros, packets, bytes, marked] {
            len += varint::write(out.get_mut(len..)?, field)?;
        }
        Some(len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(fields in prop::array::uniform5(0..=varint::MAX)) {
            let [highest, arrived_micros, packets, bytes, marked] = fields;
            let report = Report { highest, arrived_micros, packets, bytes, marked };
            let mut out = [0; Report::MOST_BYTES + 1];
            let len = report.encode(&mut out).unwrap();
            prop_assert_eq!(Report::decode(&out[..len]), Some(report));
            prop_assert_eq!(Report::decode(&out[..len + 1]), None, "bytes that are no field's");
            for cut in 0..len {
                prop_assert_eq!(Report::decode(&out[..cut]), None);
                prop_assert_eq!(report.encode(&mut [0; Report::MOST_BYTES][..cut]), None);
            }
        }
    }
}

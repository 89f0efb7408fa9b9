//! HTTP datagrams (RFC 9297 §2): to which request a QUIC DATAGRAM frame belongs, and the context ID in front of its payload
//! (RFC 9298 §4, RFC 9484 §6).

use crate::{
    error::{Code, Error},
    stream::StreamId,
    varint,
};

/// The largest quarter of a stream ID (RFC 9297 §2.1).
const MOST_QUARTER: u64 = (1 << 60) - 1;

/// Splits the data of a DATAGRAM frame into the request and the rest.
///
/// # Errors
///
/// The connection ends: there is no stream, or one above the largest.
pub fn split(mut frame: &[u8]) -> Result<(StreamId, &[u8]), Error> {
    match varint::take(&mut frame) {
        Some(quarter) if quarter <= MOST_QUARTER => Ok((StreamId::new(quarter * 4), frame)),
        Some(_) => Err(Error::connection(Code::DatagramError, "a datagram for a stream above the largest")),
        None => Err(Error::connection(Code::DatagramError, "a datagram without its stream")),
    }
}

/// Splits an HTTP datagram of connect-udp or connect-ip into the context ID and the payload; `None` if there is no context ID.
#[must_use]
pub fn context(mut datagram: &[u8]) -> Option<(u64, &[u8])> {
    let context = varint::take(&mut datagram)?;
    Some((context, datagram))
}

/// Appends what stands in front of a payload in a DATAGRAM frame: the request `stream` and the context ID.
pub fn put_head(out: &mut Vec<u8>, stream: StreamId, context: u64) {
    varint::put(out, stream.index() / 4);
    varint::put(out, context);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_as_they_were_written() {
        for (stream, context_id) in [(0, 0), (4, 0), (400, 64), ((1 << 62) - 4, varint::MAX)] {
            let mut frame = Vec::new();
            put_head(&mut frame, StreamId::new(stream), context_id);
            frame.extend_from_slice(b"payload");
            let (of, rest) = split(&frame).unwrap();
            assert_eq!(of, StreamId::new(stream));
            assert_eq!(context(rest), Some((context_id, &b"payload"[..])));
        }
    }

    #[test]
    fn what_is_no_datagram() {
        for wrong in [&[][..], &[0x40], &[0xd0, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(split(wrong).map_err(Error::code), Err(Code::DatagramError), "{wrong:02x?}");
        }
        assert_eq!(
            split(&[0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).unwrap().0.index(),
            (1 << 62) - 4
        );
        assert_eq!(context(&[]), None);
        assert_eq!(split(&[5]), Ok((StreamId::new(20), &[][..])));
    }
}

//! Properties of any control message and payload: what the fuzz targets check.

use crate::{
    context::Context,
    messages::{
        Framer, Hello, MAX_MESSAGE_BYTES, MAX_PRESHARED_KEYS, Message, MessageFault, StreamAnswer, StreamOpen,
    },
    proxy::{self, Header, Transport},
    report::Report,
};

/// Takes `input` as what a peer writes on the control stream. Its first byte says how many bytes follow that are the
/// lengths of the chunks in which the rest arrives, over and over.
///
/// The chunks make no difference, and what is decoded is encoded to something that is decoded to the same.
pub fn control_messages(input: &[u8]) {
    let Some((&count, rest)) = input.split_first() else { return };
    let (lengths, stream) = rest.split_at(rest.len().min(count.into()));
    let at_once = frames(stream, &mut std::iter::repeat(stream.len().max(1)));
    let mut chunks = lengths.iter().cycle().map(|length| usize::from(*length).max(1));
    let mut one_by_one = std::iter::repeat(1);
    let chunked: &mut dyn Iterator<Item = usize> =
        if lengths.is_empty() { &mut one_by_one } else { &mut chunks };
    assert_eq!(frames(stream, chunked), at_once);
    for frame in &at_once.complete {
        message(frame);
        stream_header(frame);
    }
}

/// What a framer made of a stream.
#[derive(Debug, PartialEq)]
struct Cut {
    complete: Vec<Vec<u8>>,
    ended_inside: bool,
    broken: bool,
}

fn frames(mut stream: &[u8], chunks: &mut dyn Iterator<Item = usize>) -> Cut {
    let mut framer = Framer::new(MAX_MESSAGE_BYTES);
    let mut cut = Cut { complete: Vec::new(), ended_inside: false, broken: false };
    while !stream.is_empty() && !cut.broken {
        let (mut chunk, rest) = stream.split_at(chunks.next().map_or(1, |length| length.min(stream.len())));
        stream = rest;
        loop {
            match framer.pull(&mut chunk) {
                Ok(Some(frame)) => cut.complete.push(frame),
                Ok(None) => break,
                Err(too_long) => {
                    assert!(too_long.bytes > MAX_MESSAGE_BYTES as u64);
                    cut.broken = true;
                    break;
                }
            }
        }
        assert!(cut.broken || chunk.is_empty(), "what is not taken is lost");
    }
    cut.ended_inside = !cut.broken && framer.is_inside_message();
    cut
}

fn message(bytes: &[u8]) {
    match Message::decode(bytes) {
        Ok(message) => {
            let mut encoded = Vec::new();
            message.encode(&mut encoded);
            let again = Message::decode(&only(&encoded));
            assert_eq!(again.as_ref(), Ok(&message));
            if let Message::Hello(Hello { preshared_keys: proofs, .. }) | Message::PresharedKeys(proofs) =
                &message
            {
                assert!(proofs.len() <= MAX_PRESHARED_KEYS, "each is compared with each of ours");
            }
        }
        Err(error) => {
            assert_ne!(error.fault(), MessageFault::OutOfOrder, "a message alone has no order");
            assert!(!error.to_string().is_empty());
        }
    }
}

fn stream_header(bytes: &[u8]) {
    if let Ok(open) = StreamOpen::decode(bytes) {
        let mut encoded = Vec::new();
        open.encode(&mut encoded);
        assert_eq!(StreamOpen::decode(&only(&encoded)), Ok(open));
    }
    if let Ok(answer) = StreamAnswer::decode(bytes) {
        let mut encoded = Vec::new();
        answer.encode(&mut encoded);
        assert_eq!(StreamAnswer::decode(&only(&encoded)), Ok(answer));
    }
}

/// The one message that was encoded.
fn only(encoded: &[u8]) -> Vec<u8> {
    let mut cut = frames(encoded, &mut std::iter::repeat(encoded.len()));
    assert!(!cut.broken && !cut.ended_inside && cut.complete.len() == 1, "{cut:?}");
    cut.complete.remove(0)
}

/// Takes `input` as the beginning of a byte stream and of a datagram, which may have a header of the PROXY protocol.
///
/// A header lies within the input and its limit, says the same whatever follows it, and is not there before all of it has come. Whom it
/// names is written as a header that names the same.
pub fn proxy_header(input: &[u8]) {
    for transport in [Transport::Stream, Transport::Datagram] {
        let read = proxy::read(input, transport);
        let Ok(Some(header @ Header { client, length })) = read else {
            if read == Ok(None) {
                assert!(input.len() < proxy::MOST_HEADER, "it cannot wait for ever");
            }
            continue;
        };
        assert!((1..=proxy::MOST_HEADER.min(input.len())).contains(&length));
        assert_eq!(proxy::read(&input[..length], transport), Ok(Some(header)));
        for cut in [0, 1, length / 2, length - 1] {
            assert_eq!(proxy::read(&input[..cut], transport), Ok(None));
        }
        let mut written = Vec::new();
        proxy::write(client, transport, &mut written);
        let again = Header { client, length: written.len() };
        assert_eq!(proxy::read(&written, transport), Ok(Some(again)));
    }
}

/// Takes `input` as the data of a DATAGRAM frame.
///
/// The payload lies inside. A context that was read is written, before the same payload, as bytes that are read as the same context.
pub fn payload_context(input: &[u8]) {
    let Some(context) = Context::decode(input) else { return };
    let header = context.encode();
    if let Context::Report { payload_at } = context {
        report(&input[payload_at..]);
    }
    match (context, payload_at(&context)) {
        (Context::Unsupported(_), _) => assert_eq!(Context::decode(header.as_slice()), Some(context)),
        (_, at) => {
            let payload = &input[at.unwrap_or(input.len())..];
            let again = [header.as_slice(), payload].concat();
            let decoded = Context::decode(&again).expect("it was encoded by us");
            assert_eq!(decoded.encode(), header);
            assert_eq!(payload_at(&decoded), at.map(|_| header.as_slice().len()));
            assert!(header.as_slice().len() <= input.len() - payload.len(), "the shortest form");
        }
    }
}

/// A report that was read is written as bytes that are no longer, and read as the same report.
fn report(fields: &[u8]) {
    let Some(report) = Report::decode(fields) else { return };
    let mut encoded = [0; Report::MOST_BYTES];
    let len = report.encode(&mut encoded).expect("each field was a varint");
    assert!(len <= fields.len(), "the shortest form");
    assert_eq!(Report::decode(&encoded[..len]), Some(report));
}

/// Where the payload is, that of any piece and the fields of a report too.
fn payload_at(context: &Context) -> Option<usize> {
    match *context {
        Context::Packet { payload_at, .. }
        | Context::Flow { payload_at, .. }
        | Context::Piece { payload_at, .. }
        | Context::Open { payload_at, .. }
        | Context::Report { payload_at }
        | Context::Numbered { payload_at, .. }
        | Context::Repair { payload_at, .. }
        | Context::Ask { payload_at, .. }
        | Context::Copied { payload_at, .. } => Some(payload_at),
        Context::OpenEmpty { .. }
        | Context::Confirmed(_)
        | Context::Refused(..)
        | Context::Unknown(_)
        | Context::Closed(_)
        | Context::Unsupported(_) => None,
    }
}

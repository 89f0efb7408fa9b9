//! Properties of any bytes that a client may send: what the fuzz targets check.

use bytes::Bytes;

use crate::{
    capsule::{self, Capsule, CapsuleReader},
    connection::{Connection, Delivery, Event, Limits},
    datagram,
    error::Error,
    message::{self, Request, Response},
    qpack::{self, BadSection},
    settings::Settings,
    stream::StreamId,
};

/// Limits that short inputs reach.
pub const LIMITS: Limits = Limits {
    requests: 3,
    unidirectional: 4,
    field_section_bytes: 400,
    capsule_bytes: 100,
    extended_connect: true,
    datagrams: true,
};

/// Takes `input` as what a client does with a connection: steps of two bytes each, the second of which says how many bytes follow for the
/// step.
///
/// Cut into single bytes it is the same to the caller, nothing is held beyond the limits, and what the caller answers has its order.
pub fn http_connection(input: &[u8]) {
    let at_once = run(input, usize::MAX);
    assert_eq!(run(input, 1), at_once);
    assert_eq!(run(input, 3), at_once);
}

/// What a caller saw of a stream, or of the connection.
#[derive(Debug, PartialEq)]
enum Seen {
    Event(StreamId, Event),
    Error(StreamId, Error),
    Datagram(StreamId, Vec<u8>),
}

/// Runs the steps of `input` with pieces of at most `piece_bytes`; contents that follow each other are one.
fn run(input: &[u8], piece_bytes: usize) -> Vec<Seen> {
    let mut connection = Connection::new(LIMITS);
    let mut seen = Vec::new();
    let mut rest = input;
    let mut opened = [0_u64; 2];
    while let [what, length, behind @ ..] = rest {
        let (bytes, behind) = behind.split_at(behind.len().min((*length).into()));
        rest = behind;
        // The lowest bits choose a stream among the last ones, the highest the step.
        let is_request = what & 1 == 0;
        let count = &mut opened[usize::from(is_request)];
        let place = count.saturating_sub(u64::from(what >> 1 & 7));
        let stream = StreamId::new(place * 4 + if is_request { 0 } else { 2 });
        let result = match what >> 4 {
            0 | 1 => {
                let stream = StreamId::new(*count * 4 + if is_request { 0 } else { 2 });
                *count += 1;
                match connection.opened(stream) {
                    Ok(()) => read(&mut connection, stream, bytes, false, piece_bytes, &mut seen),
                    Err(error) => fail(stream, error, &mut seen),
                }
            }
            2 => connection.was_reset(stream).or_else(|error| fail(stream, error, &mut seen)),
            3 => connection.was_stopped(stream).or_else(|error| fail(stream, error, &mut seen)),
            4 => datagram_frame(&mut connection, bytes, &mut seen),
            5 => {
                connection.carry_capsules(stream);
                Ok(())
            }
            6 => {
                answer(&mut connection, stream);
                Ok(())
            }
            7 => read(&mut connection, stream, bytes, true, piece_bytes, &mut seen),
            _ => read(&mut connection, stream, bytes, false, piece_bytes, &mut seen),
        };
        assert!(connection.held_bytes() <= LIMITS.most_held_bytes());
        assert!(connection.open_requests() <= LIMITS.requests);
        if result.is_err() {
            break;
        }
    }
    seen
}

/// Notes `error`; `Err` if the connection is over.
fn fail(stream: StreamId, error: Error, seen: &mut Vec<Seen>) -> Result<(), Error> {
    seen.push(Seen::Error(stream, error));
    match error {
        Error::Connection { .. } => Err(error),
        Error::Stream { .. } => Ok(()),
    }
}

fn read(
    connection: &mut Connection,
    stream: StreamId,
    bytes: &[u8],
    is_last: bool,
    piece_bytes: usize,
    seen: &mut Vec<Seen>,
) -> Result<(), Error> {
    let mut pieces: Vec<_> = bytes.chunks(piece_bytes.min(bytes.len().max(1))).collect();
    if pieces.is_empty() {
        pieces.push(&[]);
    }
    let count = pieces.len();
    for (number, piece) in pieces.into_iter().enumerate() {
        let mut piece = Bytes::copy_from_slice(piece);
        loop {
            match connection.read(stream, &mut piece, is_last && number + 1 == count) {
                Ok(Some(event)) => note(stream, event, seen),
                Ok(None) => break,
                Err(error) => {
                    fail(stream, error, seen)?;
                    break;
                }
            }
        }
    }
    Ok(())
}

fn note(stream: StreamId, event: Event, seen: &mut Vec<Seen>) {
    if let Event::Content(more) = &event {
        assert!(!more.is_empty());
        if let Some(Seen::Event(last, Event::Content(content))) = seen.last_mut()
            && *last == stream
        {
            *content = [&content[..], more].concat().into();
            return;
        }
    }
    seen.push(Seen::Event(stream, event));
}

fn datagram_frame(connection: &mut Connection, frame: &[u8], seen: &mut Vec<Seen>) -> Result<(), Error> {
    match connection.datagram(frame) {
        Ok(Delivery::To(stream, payload)) => seen.push(Seen::Datagram(stream, payload.to_vec())),
        Ok(Delivery::Nobody | Delivery::Ends(_)) => {}
        Err(error) => return fail(StreamId::new(0), error, seen),
    }
    Ok(())
}

/// Sends all that can be sent on `stream`, in an order that is right, and after the end that nothing more can be.
fn answer(connection: &mut Connection, stream: StreamId) {
    let mut out = Vec::new();
    if connection.respond(stream, &Response::new(200), &mut out).is_err() {
        assert!(out.is_empty(), "what fails writes nothing");
        return;
    }
    connection.respond(stream, &Response::new(200), &mut Vec::new()).expect_err("there is one answer");
    connection.content(stream, 5, &mut out).expect("content follows the head");
    connection.finished(stream);
    connection.content(stream, 5, &mut out).expect_err("nothing follows the end");
}

/// Takes `input` as a field section, and as the payload of SETTINGS.
///
/// What is read is within the limit, and reads the same when it is written again.
pub fn http_fields(input: &[u8]) {
    const LIMIT_BYTES: u64 = 2_000;
    if let Ok(settings) = Settings::read(input) {
        let mut frame = Vec::new();
        settings.put(&mut frame);
        // Type and length have a byte each: no frame of ours has 64 bytes.
        assert_eq!(Settings::read(&frame[2..]), Ok(settings));
    }
    let lines = match qpack::decode(input, LIMIT_BYTES) {
        Ok(lines) => lines,
        Err(BadSection::TooLarge) => {
            assert!(
                input.len() as u64 > LIMIT_BYTES / 64,
                "each line has a byte and counts for less than 200"
            );
            return;
        }
        Err(BadSection::Undecodable | BadSection::BadName) => return,
    };
    let mut section = Vec::new();
    let size_bytes = qpack::encode(lines.iter().map(|line| (line.name(), line.value())), &mut section);
    assert!(size_bytes <= LIMIT_BYTES);
    assert_eq!(qpack::decode(&section, size_bytes).as_ref(), Ok(&lines));
    if let Ok(request) = Request::from_lines(lines.clone(), true) {
        section.clear();
        request.encode(&mut section);
        let again = qpack::decode(&section, u64::MAX).expect("our own section");
        assert_eq!(Request::from_lines(again, true), Ok(request));
    }
    if let Ok(response) = Response::from_lines(lines.clone()) {
        section.clear();
        response.encode(&mut section);
        let again = qpack::decode(&section, u64::MAX).expect("our own section");
        assert_eq!(Response::from_lines(again), Ok(response));
    }
    if let Ok(trailers) = message::trailers(lines) {
        assert!(trailers.iter().all(|line| !line.name().starts_with(':')));
    }
}

/// Takes `input` as a limit and a stream of capsules, and as the data of a DATAGRAM frame.
///
/// Cut into single bytes the capsules are the same, and nothing is held beyond the limit.
pub fn http_capsules(input: &[u8]) {
    let Some((&limit, stream)) = input.split_first() else { return };
    let at_once = capsules(stream, limit, usize::MAX);
    assert_eq!(capsules(stream, limit, 1), at_once);
    for capsule in &at_once.0 {
        match capsule {
            Capsule::Whole { kind, value } => {
                assert!(value.len() <= limit.into());
                let mut written = Vec::new();
                capsule::put(&mut written, *kind, value);
                assert_eq!(capsules(&written, limit, usize::MAX), (vec![capsule.clone()], true));
            }
            Capsule::TooLong { length, .. } => assert!(*length > limit.into()),
            Capsule::Unknown { kind } => assert!(*kind > capsule::ROUTE_ADVERTISEMENT),
        }
    }
    if let Ok((id, rest)) = datagram::split(stream)
        && let Some((context, payload)) = datagram::context(rest)
    {
        assert!(id.is_request());
        let mut written = Vec::new();
        datagram::put_head(&mut written, id, context);
        written.extend_from_slice(payload);
        assert_eq!(
            datagram::split(&written).map(|(id, rest)| (id, datagram::context(rest))),
            Ok((id, Some((context, payload))))
        );
    }
}

/// The capsules in `stream`, and whether it ends between two.
fn capsules(stream: &[u8], limit: u8, piece_bytes: usize) -> (Vec<Capsule>, bool) {
    let mut reader = CapsuleReader::new(limit.into());
    let mut found = Vec::new();
    for piece in stream.chunks(piece_bytes.min(stream.len().max(1))) {
        let mut piece = Bytes::copy_from_slice(piece);
        while let Some(capsule) = reader.take(&mut piece) {
            found.push(capsule);
        }
        assert!(piece.is_empty(), "what is not taken is lost");
        assert!(reader.held_bytes() <= limit.into());
    }
    (found, reader.is_between())
}

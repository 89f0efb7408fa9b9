//! Whole exchanges, and clients that break the rules, each with its code.

use proptest::prelude::*;

use super::*;
use crate::{capsule, message::Request, qpack};

const LIMITS: Limits = Limits {
    requests: 4,
    unidirectional: 5,
    field_section_bytes: 2_000,
    capsule_bytes: 1_500,
    extended_connect: true,
    datagrams: true,
};

fn id(index: u64) -> StreamId {
    StreamId::new(index)
}

/// A connection, and all that it tells.
struct Server {
    connection: Connection,
    events: Vec<(u64, Event)>,
}

impl Server {
    fn new() -> Self {
        Self { connection: Connection::new(LIMITS), events: Vec::new() }
    }

    /// Opens `stream` and brings `bytes` on it, and the end.
    fn bring(&mut self, stream: u64, bytes: &[u8], is_last: bool) -> Result<(), Error> {
        self.connection.opened(id(stream))?;
        self.more(stream, bytes, is_last)
    }

    fn more(&mut self, stream: u64, bytes: &[u8], is_last: bool) -> Result<(), Error> {
        let mut bytes = Bytes::copy_from_slice(bytes);
        while let Some(event) = self.connection.read(id(stream), &mut bytes, is_last)? {
            self.events.push((stream, event));
        }
        assert!(bytes.is_empty());
        Ok(())
    }

    /// What came on `stream` since this was asked last.
    fn take(&mut self, stream: u64) -> Vec<Event> {
        self.events.extract_if(.., |(of, _)| *of == stream).map(|(_, event)| event).collect()
    }
}

/// Type and payload.
type Frame<'a> = (u64, &'a [u8]);

/// The bytes of frames, written in turn.
fn frames(frames: &[Frame<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, payload) in frames {
        frame::put(&mut out, *kind, payload);
    }
    out
}

fn section(request: &Request) -> Vec<u8> {
    let mut section = Vec::new();
    request.encode(&mut section);
    section
}

fn get() -> Request {
    Request::new("GET", "gw.example.net", "/")
}

/// The stream with one direction of this type that carries `bytes`.
fn typed(kind: u64, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    varint::put(&mut out, kind);
    out.extend_from_slice(bytes);
    out
}

/// A control stream with empty SETTINGS and then `frames`.
fn control(more: &[Frame<'_>]) -> Vec<u8> {
    typed(stream::CONTROL, &[frames(&[(frame::SETTINGS, &[])]), frames(more)].concat())
}

#[test]
fn a_client_that_is_not_ours() {
    let mut server = Server::new();
    let mut streams = 0;
    for row in include_str!("../../vectors/client.txt").lines() {
        let (stream, hex) = row.split_once(' ').unwrap();
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let stream = stream.parse().unwrap();
        server.bring(stream, &bytes, stream == 0 || stream == 4).unwrap();
        streams += 1;
    }
    assert_eq!(streams, 6);
    assert_eq!(server.take(2), [Event::Settings(Settings { extended_connect: true, ..Settings::default() })]);
    let [Event::Request(head), Event::End] = &server.take(0)[..] else { panic!("a GET") };
    assert_eq!((&*head.method, &*head.authority, head.path.as_deref()), ("GET", "gw.example.net", Some("/")));
    assert_eq!(head.fields.cookie().as_deref(), Some(&b"a=1; b=2"[..]));
    let post = server.take(4);
    let [
        Event::Request(head),
        Event::Content(hello),
        Event::Content(world),
        Event::Trailers(trailers),
        Event::End,
    ] = &post[..]
    else {
        panic!("a POST with trailers: {post:?}")
    };
    assert_eq!(head.content_length(), Some(11));
    assert_eq!([&hello[..], world].concat(), b"hello world");
    assert_eq!(trailers.values("trailing").collect::<Vec<_>>(), [b"x"]);
    let [Event::Request(head)] = &server.take(8)[..] else { panic!("an extended CONNECT") };
    assert_eq!(head.protocol.as_deref(), Some("connect-udp"));
}

#[test]
fn an_answer_has_its_order() {
    let mut server = Server::new();
    server.bring(0, &frames(&[(frame::HEADERS, &section(&get()))]), true).unwrap();
    let Server { connection, .. } = &mut server;
    let (stream, mut out) = (id(0), Vec::new());
    let ok = Response::new(200);
    assert_eq!(connection.content(stream, 1, &mut out), Err(SendError::Order));
    assert_eq!(connection.trailers(stream, &Fields::default(), &mut out), Err(SendError::Order));
    assert_eq!(connection.respond(stream, &Response::new(101), &mut out), Err(SendError::Order));
    assert!(out.is_empty());
    connection.respond(stream, &Response::new(103), &mut out).unwrap();
    connection.respond(stream, &ok, &mut out).unwrap();
    assert_eq!(connection.respond(stream, &ok, &mut out), Err(SendError::Order));
    connection.content(stream, 0x1234, &mut out).unwrap();
    connection.trailers(stream, &Fields::default(), &mut out).unwrap();
    assert_eq!(connection.content(stream, 1, &mut out), Err(SendError::Order));
    // 103 and 200 are entries 24 and 25 of the static table; trailers without lines are a prefix.
    assert_eq!(out, [1, 3, 0, 0, 0xd8, 1, 3, 0, 0, 0xd9, 0, 0x52, 0x34, 1, 2, 0, 0]);
    connection.finished(stream);
    assert_eq!(connection.respond(stream, &ok, &mut out), Err(SendError::Over));
    assert_eq!(connection.open_requests(), 0);
}

#[test]
fn the_clients_limit_of_field_sections_is_kept() {
    let mut server = Server::new();
    let settings = frames(&[(frame::SETTINGS, &[0x06, 0x40, 100])]);
    server.bring(2, &typed(stream::CONTROL, &settings), false).unwrap();
    server.bring(0, &frames(&[(frame::HEADERS, &section(&get()))]), true).unwrap();
    let mut response = Response::new(200);
    response.fields.push("server", vec![b'x'; 100 - (7 + 3 + 32) - (6 + 32)]).unwrap();
    let mut large = response.clone();
    large.fields.push("a", &b""[..]).unwrap();
    let mut out = Vec::new();
    assert_eq!(server.connection.respond(id(0), &large, &mut out), Err(SendError::TooLarge));
    assert_eq!(server.connection.respond(id(0), &response, &mut out), Ok(()));
}

#[test]
fn what_nobody_knows_is_skipped() {
    let mut server = Server::new();
    let grease = [0x21_u64, 0x1f * 1000 + 0x21, varint::MAX - 1];
    let long = vec![0x29; 100_000];
    let mut request = Vec::new();
    for kind in grease {
        frame::put(&mut request, kind, &long);
        frame::put(&mut request, kind, &[]);
    }
    frame::put(&mut request, frame::HEADERS, &section(&get()));
    request.extend(frames(&[
        (0x40, &long),
        (frame::DATA, b"ab"),
        (0xf0_0d00, &long),
        (frame::DATA, b""),
        (frame::DATA, b"c"),
    ]));
    server.bring(0, &request, true).unwrap();
    let events = server.take(0);
    assert_eq!(
        events[1..],
        [Event::Content(Bytes::from_static(b"ab")), Event::Content(Bytes::from_static(b"c")), Event::End]
    );
    // PRIORITY_UPDATE of browsers, MAX_PUSH_ID, and grease on the control stream.
    let bytes = control(&[
        (frame::PRIORITY_UPDATE_REQUEST, b"\x00u=3, i"),
        (frame::PRIORITY_UPDATE_PUSH, &long),
        (frame::MAX_PUSH_ID, &[8]),
        (frame::MAX_PUSH_ID, &[8]),
        (0x21, &long),
        (frame::GOAWAY, &[4]),
        (frame::GOAWAY, &[0]),
    ]);
    server.bring(2, &bytes, false).unwrap();
    assert_eq!(server.take(2), [Event::Settings(Settings::default()), Event::GoAway, Event::GoAway]);
    // A stream of an unknown type ends alone, a push or one that ends before its type is whole does not count.
    let error = server.bring(6, &typed(0x21, b"x"), false).unwrap_err();
    assert_eq!(error, Error::stream(Code::StreamCreationError, "a stream of an unknown type"));
    server.bring(10, &[0x40], true).unwrap();
    server.bring(14, &[], true).unwrap();
    assert_eq!(server.connection.unidirectional.len(), 1);
    assert_eq!(server.connection.held_bytes(), 0);
}

#[test]
fn what_ends_a_request_or_the_connection() {
    let head = section(&get());
    let connect = Request {
        method: "CONNECT".into(),
        scheme: None,
        authority: "b:443".into(),
        path: None,
        protocol: None,
        fields: Fields::default(),
    };
    let mut post = Request::new("POST", "gw.example.net", "/");
    post.fields.push("content-length", &b"3"[..]).unwrap();
    let mut bad = Vec::new();
    qpack::encode([(":method", &b"GET"[..])], &mut bad);
    let (post, connect) = (section(&post), section(&connect));
    let cases: &[(&[Frame<'_>], bool, Code, &str)] = &[
        (&[(frame::DATA, b"x")], true, Code::FrameUnexpected, "DATA first"),
        (
            &[(frame::HEADERS, &head), (frame::HEADERS, &[0, 0]), (frame::DATA, b"")],
            true,
            Code::FrameUnexpected,
            "DATA behind trailers",
        ),
        (
            &[(frame::HEADERS, &head), (frame::HEADERS, &[0, 0]), (frame::HEADERS, &[0, 0])],
            true,
            Code::FrameUnexpected,
            "trailers twice",
        ),
        (
            &[(frame::HEADERS, &connect), (frame::HEADERS, &[0, 0])],
            true,
            Code::FrameUnexpected,
            "trailers in a tunnel",
        ),
        (&[(frame::SETTINGS, b"")], true, Code::FrameUnexpected, "SETTINGS"),
        (&[(frame::GOAWAY, b"\0")], true, Code::FrameUnexpected, "GOAWAY"),
        (&[(frame::MAX_PUSH_ID, b"\0")], true, Code::FrameUnexpected, "MAX_PUSH_ID"),
        (&[(frame::CANCEL_PUSH, b"\0")], true, Code::FrameUnexpected, "CANCEL_PUSH"),
        (&[(frame::PUSH_PROMISE, b"\0")], true, Code::FrameUnexpected, "PUSH_PROMISE"),
        (&[(frame::PRIORITY_UPDATE_REQUEST, b"\0u")], true, Code::FrameUnexpected, "PRIORITY_UPDATE"),
        (&[(0x02, b"")], true, Code::FrameUnexpected, "PRIORITY of HTTP/2"),
        (&[(0x06, b"")], true, Code::FrameUnexpected, "PING of HTTP/2"),
        (&[(0x08, b"")], true, Code::FrameUnexpected, "WINDOW_UPDATE"),
        (&[(0x09, b"")], true, Code::FrameUnexpected, "CONTINUATION"),
        (&[(frame::HEADERS, b"")], true, Code::QpackDecompressionFailed, "no section"),
        (&[(frame::HEADERS, &[5, 0, 0x80])], true, Code::QpackDecompressionFailed, "the dynamic table"),
        (&[(frame::HEADERS, &bad)], false, Code::MessageError, "a request without a path"),
        (
            &[(frame::HEADERS, &head), (frame::HEADERS, &bad)],
            false,
            Code::MessageError,
            "a method in trailers",
        ),
        (&[(frame::HEADERS, &post), (frame::DATA, b"1234")], false, Code::MessageError, "longer"),
        (
            &[(frame::HEADERS, &post), (frame::DATA, b"1"), (frame::DATA, b"2")],
            false,
            Code::MessageError,
            "shorter",
        ),
        (&[], false, Code::RequestIncomplete, "nothing"),
        (&[(0x21, b"grease")], false, Code::RequestIncomplete, "grease only"),
    ];
    for (number, (list, ends_all, code, what)) in cases.iter().enumerate() {
        for piece in [1, 7, 10_000] {
            let mut server = Server::new();
            server.connection.opened(id(0)).unwrap();
            let bytes = frames(list);
            let mut result = bytes.chunks(piece).try_for_each(|piece| server.more(0, piece, false));
            result = result.and_then(|()| server.more(0, &[], true));
            let error = result.unwrap_err();
            assert_eq!(error.code(), *code, "{number}: {what}");
            assert_eq!(matches!(error, Error::Connection { .. }), *ends_all, "{what}");
            assert_eq!(
                server.connection.open_requests(),
                usize::from(*ends_all),
                "{what}: forgotten with its stream"
            );
            if !ends_all {
                server.more(0, b"what still comes", true).unwrap();
            }
        }
    }
    // A stream that ends within a frame.
    let whole = frames(&[(frame::HEADERS, &head), (frame::DATA, b"123")]);
    for cut in 1..whole.len() {
        let mut server = Server::new();
        let result = server.bring(0, &whole[..cut], true);
        let is_whole = cut == head.len() + 2;
        assert_eq!(
            result.map_err(Error::code),
            if is_whole { Ok(()) } else { Err(Code::FrameError) },
            "{cut}"
        );
    }
}

#[test]
fn what_ends_the_connection_elsewhere() {
    let settings = |payload: &[u8]| typed(stream::CONTROL, &frames(&[(frame::SETTINGS, payload)]));
    let cases: &[(&[Vec<u8>], Code, &str)] = &[
        (&[typed(stream::CONTROL, &frames(&[(frame::GOAWAY, &[0])]))], Code::MissingSettings, "GOAWAY first"),
        (&[typed(stream::CONTROL, &frames(&[(frame::DATA, &[0])]))], Code::MissingSettings, "DATA first"),
        (&[typed(stream::CONTROL, &frames(&[(0x21, &[0])]))], Code::MissingSettings, "grease first"),
        (&[control(&[(frame::SETTINGS, &[])])], Code::FrameUnexpected, "SETTINGS twice"),
        (&[control(&[(frame::DATA, &[])])], Code::FrameUnexpected, "DATA"),
        (&[control(&[(frame::HEADERS, &[])])], Code::FrameUnexpected, "HEADERS"),
        (&[control(&[(frame::PUSH_PROMISE, &[])])], Code::FrameUnexpected, "PUSH_PROMISE"),
        (&[control(&[(0x06, &[])])], Code::FrameUnexpected, "PING of HTTP/2"),
        (&[control(&[(frame::GOAWAY, &[])])], Code::FrameError, "GOAWAY of nothing"),
        (&[control(&[(frame::GOAWAY, &[0, 0])])], Code::FrameError, "GOAWAY and more"),
        (&[control(&[(frame::GOAWAY, &[0x40])])], Code::FrameError, "GOAWAY that is cut off"),
        (&[control(&[(frame::GOAWAY, &[0; 9])])], Code::FrameError, "GOAWAY of nine bytes"),
        (&[control(&[(frame::GOAWAY, &[0]), (frame::GOAWAY, &[4])])], Code::IdError, "GOAWAY up"),
        (
            &[control(&[(frame::MAX_PUSH_ID, &[4]), (frame::MAX_PUSH_ID, &[3])])],
            Code::IdError,
            "MAX_PUSH_ID down",
        ),
        (&[control(&[(frame::CANCEL_PUSH, &[0])])], Code::IdError, "CANCEL_PUSH"),
        (&[settings(&[0x21; 1_025])], Code::ExcessiveLoad, "SETTINGS without an end"),
        (&[settings(&[0x08, 0x02])], Code::SettingsError, "a wrong switch"),
        (&[settings(&[0x02, 0x00])], Code::SettingsError, "a setting of HTTP/2"),
        (&[control(&[]), control(&[])], Code::StreamCreationError, "two control streams"),
        (
            &[typed(stream::QPACK_ENCODER, &[]), typed(stream::QPACK_ENCODER, &[])],
            Code::StreamCreationError,
            "two encoders",
        ),
        (
            &[typed(stream::QPACK_DECODER, &[]), typed(stream::QPACK_DECODER, &[])],
            Code::StreamCreationError,
            "two decoders",
        ),
        (&[typed(stream::PUSH, &[0])], Code::StreamCreationError, "a push"),
        (&[typed(stream::QPACK_ENCODER, &[0x21])], Code::QpackEncoderStreamError, "a capacity of 1"),
        (&[typed(stream::QPACK_ENCODER, &[0x20, 0xc0, 0x00])], Code::QpackEncoderStreamError, "an insertion"),
        (&[typed(stream::QPACK_ENCODER, &[0x00])], Code::QpackEncoderStreamError, "a duplicate"),
        (&[typed(stream::QPACK_DECODER, &[0x80])], Code::QpackDecoderStreamError, "an acknowledgement"),
        (&[typed(stream::QPACK_DECODER, &[0x01])], Code::QpackDecoderStreamError, "an increment"),
    ];
    for (streams, code, what) in cases {
        for piece in [1, 10_000] {
            let mut server = Server::new();
            let mut result = Ok(());
            for (number, bytes) in streams.iter().enumerate() {
                let stream = number as u64 * 4 + 2;
                server.connection.opened(id(stream)).unwrap();
                result = bytes.chunks(piece).try_for_each(|piece| server.more(stream, piece, false));
            }
            let Err(Error::Connection { code: told, .. }) = result else { panic!("{what}: {result:?}") };
            assert_eq!(told, *code, "{what}");
        }
    }
}

#[test]
fn streams_that_the_connection_needs() {
    for kind in [stream::CONTROL, stream::QPACK_ENCODER, stream::QPACK_DECODER] {
        let bytes = if kind == stream::CONTROL { control(&[]) } else { typed(kind, &[]) };
        let closed = Err(Code::ClosedCriticalStream);
        let mut server = Server::new();
        assert_eq!(server.bring(2, &bytes, true).map_err(Error::code), closed);
        let mut server = Server::new();
        server.bring(2, &bytes, false).unwrap();
        assert_eq!(server.connection.was_reset(id(2)).map_err(Error::code), closed);
        assert_eq!(server.connection.was_stopped(id(3)).map_err(Error::code), closed);
    }
}

#[test]
fn what_the_qpack_streams_may_say() {
    let mut server = Server::new();
    server.bring(2, &typed(stream::QPACK_ENCODER, &[0x20, 0x20]), false).unwrap();
    // Cancellations of streams 0 and 4, of 63 + 1, and of a large one in pieces.
    server.bring(6, &typed(stream::QPACK_DECODER, &[0x40, 0x44, 0x7f, 0x01, 0x7f, 0x80]), false).unwrap();
    server.more(6, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f], false).unwrap();
    server.more(6, &[0x40], false).unwrap();
    let endless = server.more(6, &[[0x7f].as_slice(), &[0x80; 11]].concat(), false).unwrap_err();
    assert_eq!(endless.code(), Code::QpackDecoderStreamError);
}

#[test]
fn a_head_beyond_the_limit_is_told_and_not_held() {
    let mut large = get();
    large.fields.push("x", vec![b'\t'; 1_900]).unwrap();
    let section = section(&large);
    assert!(section.len() < 2_000, "it is too large only by the overhead of its lines");
    let mut declared = Vec::new();
    frame::put_head(&mut declared, frame::HEADERS, varint::MAX);
    for bytes in [frames(&[(frame::HEADERS, &section)]), declared] {
        let mut server = Server::new();
        server.bring(0, &bytes, false).unwrap();
        assert_eq!(server.take(0), [Event::HeadTooLarge]);
        for _ in 0..1_000 {
            server.more(0, &[0xff; 1_000], false).unwrap();
        }
        assert_eq!((server.take(0), server.connection.held_bytes()), (vec![], 0));
        let mut out = Vec::new();
        server.connection.respond(id(0), &Response::new(431), &mut out).unwrap();
        server.more(0, &[], true).unwrap();
        server.connection.finished(id(0));
        assert_eq!((server.take(0), server.connection.open_requests()), (vec![Event::End], 0));
    }
}

#[test]
fn ten_thousand_requests_one_after_another_leave_nothing() {
    let mut server = Server::new();
    let bytes = frames(&[(frame::HEADERS, &section(&get()))]);
    for number in 0..10_000 {
        let stream = number * 4;
        server.bring(stream, &bytes, number % 3 > 0).unwrap();
        assert!(matches!(server.take(stream)[0], Event::Request(_)));
        match number % 3 {
            // Reset by the client before the end, and then stopped.
            0 => {
                server.connection.was_reset(id(stream)).unwrap();
                server.connection.was_stopped(id(stream)).unwrap();
            }
            1 => {
                server.connection.respond(id(stream), &Response::new(200), &mut Vec::new()).unwrap();
                server.connection.finished(id(stream));
            }
            _ => server.connection.abandoned(id(stream)),
        }
        assert_eq!((server.connection.open_requests(), server.connection.held_bytes()), (0, 0));
    }
}

#[test]
fn requests_beyond_the_limit_and_after_goaway_are_rejected() {
    let mut server = Server::new();
    let rejected = Err(Code::RequestRejected);
    for stream in [0, 4, 8, 12] {
        server.connection.opened(id(stream)).unwrap();
    }
    assert_eq!(server.connection.opened(id(16)).map_err(Error::code), rejected);
    server.connection.abandoned(id(4));
    server.connection.opened(id(20)).unwrap();
    server.connection.abandoned(id(8));
    let mut out = Vec::new();
    server.connection.go_away(&mut out);
    server.connection.go_away(&mut out);
    assert_eq!(out, [7, 1, 24, 7, 1, 24]);
    assert_eq!(server.connection.opened(id(24)).map_err(Error::code), rejected);
    // Those that were opened before are read to their end.
    server.more(0, &frames(&[(frame::HEADERS, &section(&get()))]), true).unwrap();
    assert_eq!(server.take(0).len(), 2);
    for stream in [2, 6, 10, 14, 18] {
        server.connection.opened(id(stream)).unwrap();
    }
    assert_eq!(server.connection.opened(id(22)).map_err(Error::code), Err(Code::ExcessiveLoad));
}

#[test]
fn capsules_and_datagrams_of_a_tunnel() {
    let mut request = Request::new("CONNECT", "gw.example.net", "/.well-known/masque/udp/b/53/");
    request.protocol = Some("connect-udp".into());
    let mut server = Server::new();
    server.bring(0, &frames(&[(frame::HEADERS, &section(&request))]), false).unwrap();
    server.take(0);
    server.connection.carry_capsules(id(0));
    let mut capsules = Vec::new();
    capsule::put(&mut capsules, capsule::DATAGRAM, b"\0one");
    capsule::put(&mut capsules, 0x29, &[7; 5_000]);
    capsule::put(&mut capsules, capsule::DATAGRAM, b"\0two");
    // Frames end where they like.
    let bytes = frames(&[
        (frame::DATA, &capsules[..3]),
        (frame::DATA, &capsules[3..40]),
        (frame::DATA, &capsules[40..]),
    ]);
    let whole =
        |value| Event::Capsule(Capsule::Whole { kind: capsule::DATAGRAM, value: Bytes::from_static(value) });
    for piece in [1, 2, 1_000, 100_000] {
        bytes.chunks(piece).for_each(|piece| server.more(0, piece, false).unwrap());
        let unknown = Event::Capsule(Capsule::Unknown { kind: 0x29 });
        assert_eq!(server.take(0), [whole(b"\0one"), unknown, whole(b"\0two")], "{piece}");
    }
    server.bring(4, &frames(&[(frame::HEADERS, &section(&get()))]), false).unwrap();
    server.connection.opened(id(8)).unwrap();
    let connection = &mut server.connection;
    assert_eq!(connection.datagram(b"\0\0payload"), Ok(Delivery::To(id(0), b"\0payload")));
    assert_eq!(connection.datagram(b"\x02\0payload"), Ok(Delivery::Nobody), "its head is still to come");
    assert_eq!(connection.datagram(b"\x05\0payload"), Ok(Delivery::Nobody), "not opened yet");
    assert_eq!(connection.datagram(b"\x01\0payload"), Ok(Delivery::Ends(id(4))), "a GET has no datagrams");
    assert_eq!(connection.datagram(b"\x01\0payload"), Ok(Delivery::Nobody));
    assert_eq!(connection.datagram(b"").map_err(Error::code), Err(Code::DatagramError));
    // The end within a capsule is the end of the stream only.
    let half = frames(&[(frame::DATA, &[0, 10, 1])]);
    let error = server.more(0, &half, true).unwrap_err();
    assert_eq!(error, Error::stream(Code::MessageError, "a tunnel ends within a capsule"));
}

#[test]
fn the_bytes_of_a_connect_pass_as_they_come() {
    let request = Request { scheme: None, path: None, ..Request::new("CONNECT", "b.example:443", "/") };
    let mut server = Server::new();
    server.bring(0, &frames(&[(frame::HEADERS, &section(&request))]), false).unwrap();
    let mut head = Vec::new();
    frame::put_head(&mut head, frame::DATA, varint::MAX);
    server.more(0, &head, false).unwrap();
    for _ in 0..100 {
        server.more(0, &[1; 65_536], false).unwrap();
        assert_eq!(server.connection.held_bytes(), 0);
    }
    let passed: usize = server.take(0)[1..]
        .iter()
        .map(|event| if let Event::Content(bytes) = event { bytes.len() } else { 0 })
        .sum();
    assert_eq!(passed, 6_553_600);
}

proptest! {
    #[test]
    fn any_steps(input in proptest::collection::vec(any::<u8>(), 0..400)) {
        properties::http_connection(&input);
        properties::http_capsules(&input);
    }

    /// Steps of which most are right: known frames on streams that are open.
    #[test]
    fn steps_of_frames(steps in proptest::collection::vec((any::<u8>(), prop_oneof![Just(0_u64), Just(1), Just(4), Just(7), Just(0x21)], 0..4_usize, any::<u8>()), 0..30)) {
        let mut input = Vec::new();
        for (what, kind, payload, byte) in steps {
            let section = section(&get());
            let number = [byte, 3, 0, 0, 0];
            let payload = [&section[..], b"content", b"", &number][payload];
            let bytes = if what & 1 == 0 { frames(&[(kind, payload)]) } else { typed(u64::from(byte & 3), &frames(&[(kind, payload)])) };
            input.extend([what, bytes.len() as u8]);
            input.extend(bytes);
        }
        properties::http_connection(&input);
    }
}

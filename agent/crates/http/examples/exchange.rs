//! A client posts eleven bytes to a server and gets an answer. What QUIC would carry between them is two lists of bytes.
//!
//! `cargo run --example exchange -p culvert-http`

use bytes::Bytes;
use culvert_http::{
    connection::{Connection, Event, Limits},
    fields::BadField,
    frame,
    message::{Request, Response},
    qpack,
    stream::StreamId,
};

const LIMITS: Limits = Limits {
    requests: 16,
    unidirectional: 8,
    field_section_bytes: 16_384,
    capsule_bytes: 0,
    extended_connect: false,
    datagrams: false,
};

#[expect(clippy::print_stdout, reason = "an example shows what happens")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let stream = StreamId::new(0);
    let request = request()?;
    println!("request: {} bytes: {request:02x?}", request.len());

    let mut server = Connection::new(LIMITS);
    let mut control = Vec::new();
    server.start(&mut control);
    println!("the server's control stream begins with {control:02x?}");

    server.opened(stream)?;
    let mut content = Vec::new();
    let mut events = Vec::new();
    // The stream comes in pieces of 8 bytes; the last one has the end.
    let mut pieces = request.chunks(8).peekable();
    while let Some(piece) = pieces.next() {
        let mut piece = Bytes::copy_from_slice(piece);
        let is_last = pieces.peek().is_none();
        while let Some(event) = server.read(stream, &mut piece, is_last)? {
            if let Event::Content(bytes) = &event {
                content.extend_from_slice(bytes);
            }
            events.push(event);
        }
    }
    let Some(Event::Request(head)) = events.first() else { panic!("it begins with its head") };
    println!(
        "{} {} of {}: {}",
        head.method,
        head.path.as_deref().unwrap_or("-"),
        head.authority,
        content.escape_ascii()
    );
    assert_eq!((&*head.method, &content[..]), ("POST", &b"hello world"[..]));
    assert_eq!(events.last(), Some(&Event::End));

    let mut response = Response::new(200);
    response.fields.push("content-type", "text/plain".as_bytes())?;
    let mut answer = Vec::new();
    server.respond(stream, &response, &mut answer)?;
    server.content(stream, 2, &mut answer)?;
    answer.extend_from_slice(b"hi");
    server.finished(stream);
    println!("answer: {} bytes: {answer:02x?}", answer.len());
    assert_eq!(server.open_requests(), 0);

    // A head of this size has lengths of one byte: `HEADERS`, the length, the section; then `DATA`.
    let (section, data) = answer[2..].split_at(answer[1].into());
    let lines = qpack::decode(section, 1_000)?;
    assert_eq!(Response::from_lines(lines), Ok(response));
    assert_eq!(data, b"\x00\x02hi");
    Ok(())
}

/// The bytes on the stream of a request with content.
fn request() -> Result<Vec<u8>, BadField> {
    let mut request = Request::new("POST", "gw.example.net", "/greetings");
    request.fields.push("content-length", "11".as_bytes())?;
    let mut section = Vec::new();
    request.encode(&mut section);
    let mut stream = Vec::new();
    frame::put(&mut stream, frame::HEADERS, &section);
    frame::put(&mut stream, frame::DATA, b"hello world");
    Ok(stream)
}

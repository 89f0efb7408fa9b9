//! One connection of a client that named us: HTTP/3 on quinn-proto. What becomes of a request is in `guest_request.rs`; if it is a user's, in
//! `guest_user.rs`.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use base::counts::Counts;
use bytes::Bytes;
use dataplane::lanes::UnderlayId;
use gate::{client_key::ClientKey, identity::Endpoint};
use h3::{
    connection::{Connection as Http, Event as HttpEvent},
    error::{Code, Error},
    message::Response,
    stream::StreamId as HttpStream,
};
use quinn_proto::{
    Connection, ConnectionHandle, Dir, Event as QuinnEvent, ReadError, StreamEvent, StreamId, VarInt,
    WriteError,
};

use users::Users;

#[path = "guest_request.rs"]
mod request;
#[path = "guest_user.rs"]
mod user;

pub use self::user::refused;
use self::{
    request::Waiting,
    user::{InTunnel, limits},
};
use super::{
    Outcome, Refused,
    exchange::{Answers, Exchange, Failed, Part, Site},
    packets::ForDevice,
    tunnel::{self, Frames, Tunnels},
};

/// How long a client may take until its first request.
const FIRST_REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// Requests that a client may have open.
pub(super) const MOST_REQUESTS: u32 = 16;

/// Streams with one direction: control, two of QPACK, and some that nobody knows.
pub(super) const MOST_UNIDIRECTIONAL: u32 = 8;

/// The most that is read of a stream at a time.
const CHUNK_BYTES: usize = 16 << 10;

/// What a connection needs beside itself.
pub(in crate::control) struct Around<'a> {
    pub(super) answers: &'a Arc<Answers>,
    pub(super) asks: Option<&'a Site>,
    pub(super) site: Option<&'a Endpoint>,
    pub(super) users: &'a Users,
    pub(super) tunnels: Option<&'a Tunnels>,
    pub(super) device: Option<&'a Arc<ForDevice>>,
    pub(super) unix_seconds: u64,
    pub(super) requests: &'a mut Counts<Outcome>,
    pub(super) refused: &'a mut Counts<Refused>,
    pub(super) now: Instant,
}

/// A connection of a client that named us.
pub(in crate::control) struct Guest {
    pub(in crate::control) quinn: Connection,
    pub(in crate::control) underlay: UnderlayId,
    http: Http,
    handle: ConnectionHandle,
    streams: BTreeMap<StreamId, Stream>,
    /// The server's control stream, and what is still to be written to it.
    control: Option<(StreamId, Vec<u8>)>,
    /// When it is closed if there was no request; `None` once there was one.
    first_request_by: Option<Instant>,
    pub(super) last_active: Instant,
    pub(in crate::control) is_over: bool,
    /// Whether its handshake was completed.
    pub(in crate::control) has_begun: bool,
    /// Whether it waits to be polled.
    pub(in crate::control) is_dirty: bool,
    /// The place of the user of whom a request was let in.
    pub(super) user: Option<users::Connection>,
    /// The key of the client's certificate.
    key: Option<ClientKey>,
    frames: Frames,
    /// Whether it has sessions of IP packets, which want to know what fits.
    carries_packets: bool,
}

/// The stream of a request, as long as one of its directions is open.
struct Stream {
    exchange: Option<Arc<Exchange>>,
    tunnel: Option<InTunnel>,
    /// A request whose sender is not known yet.
    waiting: Option<Waiting>,
    /// Bytes that QUIC did not take yet.
    pending: Bytes,
    /// Nothing follows `pending`.
    ends: bool,
    /// Content is sent, which HEAD has none of.
    has_content: bool,
    /// Whether the site gets content of the request.
    takes_content: bool,
    receives: bool,
    sends: bool,
}

impl Stream {
    fn new() -> Self {
        Self {
            exchange: None,
            tunnel: None,
            waiting: None,
            pending: Bytes::new(),
            ends: false,
            has_content: true,
            takes_content: false,
            receives: true,
            sends: true,
        }
    }

    /// Whether bytes pass in both directions until each has ended.
    fn is_tunnel(&self) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_open)
    }

    /// Whether there is room for more of the request.
    fn takes_more(&self) -> bool {
        self.waiting.is_none() && self.exchange.as_ref().is_none_or(|exchange| exchange.has_room())
    }

    /// Whether each direction ends by itself, as one of TCP does; a session of datagrams is over with either.
    fn carries_bytes(&self) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_open && tunnel.datagrams.is_none())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.frames.end(&self.quinn);
        self.streams
            .values()
            .filter_map(|stream| stream.exchange.as_ref())
            .for_each(|exchange| exchange.abandon());
    }
}

impl Guest {
    pub(in crate::control) fn new(
        quinn: Connection,
        handle: ConnectionHandle,
        underlay: UnderlayId,
        serves_users: bool,
        now: Instant,
    ) -> Self {
        Self {
            quinn,
            underlay,
            http: Http::new(limits(serves_users)),
            handle,
            streams: BTreeMap::new(),
            control: None,
            first_request_by: Some(now + FIRST_REQUEST_WITHIN),
            last_active: now,
            is_over: false,
            has_begun: false,
            is_dirty: false,
            user: None,
            key: None,
            frames: Frames::default(),
            carries_packets: false,
        }
    }

    /// Whether it is the connection of a user.
    pub(super) fn is_user(&self) -> bool {
        self.user.is_some()
    }

    /// Whether no request is open.
    pub(in crate::control) fn is_idle(&self) -> bool {
        self.streams.is_empty()
    }

    pub(in crate::control) fn deadline(&mut self) -> Option<Instant> {
        let first = self.first_request_by.filter(|_| !self.is_over);
        [self.quinn.poll_timeout(), first].into_iter().flatten().min()
    }

    /// Its time has come.
    pub(in crate::control) fn timeout(&mut self, around: &mut Around<'_>) {
        if self.quinn.poll_timeout().is_some_and(|at| at <= around.now) {
            self.quinn.handle_timeout(around.now);
        }
        if self.first_request_by.is_some_and(|by| by <= around.now) {
            self.first_request_by = None;
            if !self.is_over {
                around.refused[Refused::Slow] += 1;
                self.close(Code::NoError, "no request", around.now);
            }
        }
    }

    pub(in crate::control) fn close(&mut self, code: Code, reason: &'static str, now: Instant) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.quinn.close(now, code_of(code), Bytes::from_static(reason.as_bytes()));
        }
    }

    /// Reads what quinn-proto says after it has sent; whether there is room for datagrams now.
    pub(in crate::control) fn read_unblocked(&mut self, around: &mut Around<'_>) -> bool {
        self.is_user() && self.read_events(around)
    }

    /// Reads what quinn-proto has to say; whether there is room for datagrams that had none.
    pub(in crate::control) fn read_events(&mut self, around: &mut Around<'_>) -> bool {
        let (mut unblocked, mut datagrams) = (false, false);
        while let Some(event) = self.quinn.poll() {
            match event {
                QuinnEvent::Connected => self.begin(),
                QuinnEvent::ConnectionLost { .. } => self.is_over = true,
                QuinnEvent::Stream(_) if self.is_over => {}
                QuinnEvent::Stream(event) => self.stream_event(event, around),
                QuinnEvent::DatagramReceived => datagrams = true,
                QuinnEvent::DatagramsUnblocked => {
                    unblocked = true;
                    let tunnels = self.streams.iter().filter(|(_, stream)| stream.is_tunnel());
                    let tunnels: Vec<_> = tunnels.map(|(id, _)| *id).collect();
                    tunnels.into_iter().for_each(|id| self.send_datagrams(id));
                }
                QuinnEvent::HandshakeDataReady => {}
            }
        }
        // After the streams: requests that came in the same packets are known then.
        if datagrams && !self.is_over {
            self.read_datagrams(around);
        }
        if self.carries_packets && !self.is_over {
            self.measure();
        }
        unblocked
    }

    fn begin(&mut self) {
        self.has_begun = true;
        self.key = ClientKey::of_identity(self.quinn.crypto_session().peer_identity());
        let mut start = Vec::new();
        self.http.start(&mut start);
        if let Some(stream) = self.quinn.streams().open(Dir::Uni) {
            self.control = Some((stream, start));
            self.write_control();
        }
    }

    fn write_control(&mut self) {
        if let Some((stream, start)) = &mut self.control
            && let Ok(written) = self.quinn.send_stream(*stream).write(start)
        {
            start.drain(..written);
        }
    }

    fn stream_event(&mut self, event: StreamEvent, around: &mut Around<'_>) {
        match event {
            StreamEvent::Opened { dir } => {
                while let Some(stream) = self.quinn.streams().accept(dir) {
                    match self.http.opened(http(stream)) {
                        Ok(()) if dir == Dir::Bi => drop(self.streams.insert(stream, Stream::new())),
                        Ok(()) => {}
                        Err(error) => {
                            self.end(stream, error, around);
                            continue;
                        }
                    }
                    self.read(stream, around);
                }
            }
            StreamEvent::Readable { id } => self.read(id, around),
            StreamEvent::Writable { id } => {
                self.write(id, around);
                self.send_datagrams(id);
                self.write(id, around);
            }
            StreamEvent::Stopped { id, .. } => {
                if let Err(error) = self.http.was_stopped(http(id)) {
                    return self.end(id, error, around);
                }
                // quinn-proto resets it only if it is asked to.
                let _known = self.quinn.send_stream(id).reset(code_of(Code::RequestCancelled));
                if self.streams.get(&id).is_some_and(|stream| stream.tunnel.is_some()) {
                    // Both directions of a tunnel are one connection to the target (RFC 9114 §4.4).
                    return self.abandon(id, Code::RequestCancelled);
                }
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.sends = false;
                    stream.pending = Bytes::new();
                    if let Some(exchange) = stream.exchange.take() {
                        exchange.abandon();
                        around.requests[Outcome::Cancelled] += 1;
                    }
                }
                self.forget_if_over(id);
            }
            StreamEvent::Finished { .. } | StreamEvent::Available { .. } => {}
        }
    }

    /// There is something new of the exchange on `stream`: an answer, or room for content.
    pub(in crate::control) fn look(&mut self, stream: StreamId, around: &mut Around<'_>) {
        if !self.is_decided(stream, around) {
            return;
        }
        if let Some(exchange) = self.streams.get(&stream).and_then(|stream| stream.exchange.as_ref()) {
            exchange.look();
            let over = |stream: &Stream| stream.is_tunnel() && !stream.sends;
            if exchange.has_failed() && self.streams.get(&stream).is_some_and(over) {
                // The target had ended already, and now takes nothing more.
                return self.abandon(stream, Code::ConnectError);
            }
        }
        self.write(stream, around);
        self.send_datagrams(stream);
        self.write(stream, around);
        if self.streams.get(&stream).is_some_and(|stream| stream.receives) {
            self.read(stream, around);
        }
    }

    /// Reads a stream as far as there is room for what it carries.
    fn read(&mut self, id: StreamId, around: &mut Around<'_>) {
        loop {
            if self.is_over || self.streams.get(&id).is_some_and(|stream| !stream.takes_more()) {
                return;
            }
            let mut stream = self.quinn.recv_stream(id);
            let Ok(mut chunks) = stream.read(true) else { return };
            let chunk = chunks.next(CHUNK_BYTES);
            // Credit goes out with the next packets: the connection is polled after this.
            let _credit = chunks.finalize();
            let (bytes, is_last) = match chunk {
                Ok(Some(chunk)) => (Bytes::copy_from_slice(&chunk.bytes), false),
                Ok(None) => (Bytes::new(), true),
                Err(ReadError::Blocked) => return,
                Err(ReadError::Reset(_)) => return self.was_reset(id, around),
            };
            self.last_active = around.now;
            if !self.take_in(id, bytes, is_last, around) {
                return;
            }
        }
    }

    fn was_reset(&mut self, id: StreamId, around: &mut Around<'_>) {
        if let Err(error) = self.http.was_reset(http(id)) {
            return self.end(id, error, around);
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.receives = false;
        // A request that is not whole is not answered, and a tunnel that is broken off ends in both directions.
        if stream.sends || stream.is_tunnel() {
            around.requests[Outcome::Cancelled] += 1;
            self.abandon(id, Code::RequestCancelled);
        }
        self.forget_if_over(id);
    }

    fn http_event(&mut self, id: StreamId, event: HttpEvent, around: &mut Around<'_>) {
        match event {
            HttpEvent::Request(head) => self.request(id, head, around),
            HttpEvent::HeadTooLarge => self.refuse(id, 431, Outcome::TooLarge, around),
            HttpEvent::Content(bytes) => {
                let stream = self.streams.get(&id).filter(|stream| stream.takes_content);
                if let Some(exchange) = stream.and_then(|stream| stream.exchange.as_ref()) {
                    exchange.put(bytes);
                }
            }
            HttpEvent::End => {
                if let Some(exchange) = self.streams.get(&id).and_then(|stream| stream.exchange.as_ref()) {
                    exchange.end();
                }
            }
            HttpEvent::Capsule(capsule) => {
                let tunnel = self.streams.get(&id).and_then(|stream| stream.tunnel.as_ref());
                if let Some(datagrams) = tunnel.and_then(|tunnel| tunnel.datagrams.as_ref()) {
                    tunnel::take_capsule(datagrams, capsule);
                }
            }
            HttpEvent::Settings(settings) => self.frames.client_takes_them = settings.datagrams,
            HttpEvent::GoAway | HttpEvent::Trailers(_) => {}
        }
    }

    /// Answers a request without asking anybody, and reads no more of it.
    fn refuse(&mut self, id: StreamId, status: u16, outcome: Outcome, around: &mut Around<'_>) {
        around.requests[outcome] += 1;
        self.first_request_by = None;
        let mut response = Response::new(status);
        let fields = [("content-length", &b"0"[..])].into_iter();
        let allow = (status == 405).then_some(("allow", &b"GET, HEAD, POST"[..]));
        for (name, value) in fields.chain(allow) {
            response.fields.push(name, value).expect("a field of ours");
        }
        self.answer_alone(id, &response, around);
    }

    /// Answers a request with a head and nothing else, and reads no more of it.
    fn answer_alone(&mut self, id: StreamId, response: &Response, around: &mut Around<'_>) {
        let mut out = Vec::new();
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if self.http.respond(http(id), response, &mut out).is_err() {
            return self.abandon(id, Code::InternalError);
        }
        (stream.pending, stream.ends) = (out.into(), true);
        self.write(id, around);
    }

    /// Sends what there is of the answer on a stream, as far as QUIC takes it.
    fn write(&mut self, id: StreamId, around: &mut Around<'_>) {
        if self.control.as_ref().is_some_and(|(control, _)| *control == id) {
            return self.write_control();
        }
        while let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.sends) {
            if stream.pending.is_empty() && !stream.ends {
                if let Some(tunnel) = stream.tunnel.as_mut().filter(|tunnel| !tunnel.capsules.is_empty()) {
                    let capsules = std::mem::take(&mut tunnel.capsules);
                    let mut out = Vec::with_capacity(capsules.len() + 8);
                    if self.http.content(http(id), capsules.len() as u64, &mut out).is_err() {
                        return self.abandon(id, Code::InternalError);
                    }
                    out.extend_from_slice(&capsules);
                    stream.pending = out.into();
                    continue;
                }
                let Some(part) = stream.exchange.as_ref().and_then(|exchange| exchange.take()) else {
                    return;
                };
                if !self.part(id, part, around) {
                    return;
                }
                continue;
            }
            if !stream.pending.is_empty() {
                match self.quinn.send_stream(id).write(&stream.pending) {
                    Ok(written) => drop(stream.pending.split_to(written)),
                    Err(WriteError::Blocked) => return,
                    Err(WriteError::Stopped(_) | WriteError::ClosedStream) => {
                        return self.abandon(id, Code::RequestCancelled);
                    }
                }
                self.last_active = around.now;
                continue;
            }
            stream.sends = false;
            let goes_on = stream.carries_bytes() && stream.receives;
            if !goes_on {
                stream.exchange = None;
            }
            self.http.finished(http(id));
            let _known = self.quinn.send_stream(id).finish();
            if stream.receives && !goes_on {
                // The whole answer is there, whatever is still to come of the request (RFC 9114 §4.1).
                stream.receives = false;
                self.http.abandoned(http(id));
                let _known = self.quinn.recv_stream(id).stop(code_of(Code::NoError));
            }
        }
        self.forget_if_over(id);
    }

    /// Frames a part of the site's answer; false if the stream is gone.
    fn part(&mut self, id: StreamId, part: Part, around: &mut Around<'_>) -> bool {
        let mut out = Vec::new();
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        let framed = match part {
            Part::Head(head) => {
                if let Some(tunnel) = &mut stream.tunnel {
                    tunnel.is_open = (200..300).contains(&head.status);
                }
                self.http.respond(http(id), &head, &mut out)
            }
            Part::Content(_) if !stream.has_content => Ok(()),
            Part::Content(bytes) => {
                let framed = self.http.content(http(id), bytes.len() as u64, &mut out);
                out.extend_from_slice(&bytes);
                framed
            }
            Part::End => {
                if stream.tunnel.is_none() {
                    around.requests[Outcome::Site] += 1;
                }
                stream.ends = true;
                Ok(())
            }
            Part::Failed(failed) => {
                stream.exchange = None;
                let before = out.len();
                if stream.is_tunnel() {
                    // The connection to the target broke off (RFC 9114 §4.4).
                    self.abandon(id, Code::ConnectError);
                    return false;
                }
                let (status, outcome) = match failed {
                    Failed::Down => (502, Outcome::SiteDown),
                    Failed::Busy => (503, Outcome::Busy),
                };
                if self.http.respond(http(id), &Response::new(status), &mut out).is_err() {
                    // The head has been sent: the client has to see that the rest is missing.
                    around.requests[Outcome::BrokenOff] += 1;
                    debug_assert_eq!(before, out.len());
                    self.abandon(id, Code::InternalError);
                    return false;
                }
                around.requests[outcome] += 1;
                stream.ends = true;
                Ok(())
            }
        };
        if framed.is_err() {
            around.requests[Outcome::BrokenOff] += 1;
            self.abandon(id, Code::InternalError);
            return false;
        }
        stream.pending = out.into();
        true
    }

    /// Ends both directions of a request with `code`.
    fn abandon(&mut self, id: StreamId, code: Code) {
        self.http.abandoned(http(id));
        let Some(mut stream) = self.streams.remove(&id) else { return };
        if let Some(exchange) = stream.exchange.take() {
            exchange.abandon();
        }
        if let Some(datagrams) = stream.tunnel.and_then(|tunnel| tunnel.datagrams) {
            datagrams.close();
        }
        // A direction that is over already stays so.
        let _known = self.quinn.send_stream(id).reset(code_of(code));
        let _known = self.quinn.recv_stream(id).stop(code_of(code));
    }

    /// The client broke a rule: its stream ends, or its connection.
    fn end(&mut self, id: StreamId, error: Error, around: &mut Around<'_>) {
        match error {
            Error::Stream { code, .. } if id.dir() == Dir::Uni => {
                let _known = self.quinn.recv_stream(id).stop(code_of(code));
            }
            Error::Stream { code, .. } => {
                around.requests[Outcome::Malformed] += 1;
                self.abandon(id, code);
            }
            Error::Connection { code, reason } => {
                around.refused[Refused::Violation] += 1;
                self.close(code, reason, around.now);
            }
        }
    }

    fn forget_if_over(&mut self, id: StreamId) {
        if self.streams.get(&id).is_some_and(|stream| !stream.receives && !stream.sends) {
            self.streams.remove(&id);
        }
    }
}

pub(super) fn http(stream: StreamId) -> HttpStream {
    HttpStream::new(VarInt::from(stream).into_inner())
}

fn code_of(code: Code) -> VarInt {
    VarInt::from_u64(code.value()).expect("codes of HTTP/3 are small")
}

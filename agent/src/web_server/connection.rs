//! A connection on TCP from its first byte to its end.

use std::{error::Error, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use base::panics::Part;
use bytes::BytesMut;
use config::Config;
use gate::client_key::ClientKey;
use hyper::{
    rt::Executor,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use net::task;
use ops::metrics::{HttpVersion, TcpOutcome, TcpRefused};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::AsyncReadExt as _,
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_rustls::TlsAcceptor;

use super::{
    activity::{Ending, IDLE},
    places::{MOST_STREAMS, Place},
    proxied::{self, Beginning},
    request,
    sending::NextSending,
    socket::{Plain, Socket},
    visit::{Server, Visit},
};

/// The longest head of a request, in bytes.
pub(super) const MOST_HEAD_BYTES: usize = 16 << 10;

/// What hyper holds of the bytes of an HTTP/1.1 connection in each direction.
const BUFFER_BYTES: usize = 32 << 10;

/// Requests that an HTTP/2 connection may have open where users may come: those of visitors beyond [`MOST_STREAMS`] are refused at once, also where answers wait for a client that does not read. RFC 9113 §6.5.2 wants no fewer.
const MOST_STREAMS_OF_A_USER: u32 = 100;

/// What an HTTP/2 connection may send before the site takes it, on one stream and in all.
const WINDOWS: [u32; 2] = [64 << 10, 128 << 10];

/// What HTTP/2 holds of one answer that the client's window does not take.
const SEND_BYTES: usize = 16 << 10;

/// Streams that a client may reset before they were looked at, and that this end may have to reset for errors of the client.
const MOST_RESETS: usize = 20;

/// How long the answers that are under way may take when a connection ends.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// When a connection that is silent is probed, and how often without an answer until it ends: after two minutes.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(60))
    .with_interval(Duration::from_secs(15))
    .with_retries(4);

/// What HTTP/2 begins with (RFC 9113 §3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Serves a connection to its end, and counts why this end has closed it.
pub(super) async fn serve(
    server: Arc<Server>,
    config: Arc<Config>,
    stream: TcpStream,
    from: SocketAddr,
    is_trusted: bool,
    place: Place,
) {
    let counts = Arc::clone(&server);
    if let Err(reason) = run(server, config, stream, from, is_trusted, place).await {
        counts.refuse(reason);
    }
}

async fn run(
    server: Arc<Server>,
    config: Arc<Config>,
    stream: TcpStream,
    from: SocketAddr,
    is_trusted: bool,
    mut place: Place,
) -> Result<(), TcpRefused> {
    let port = stream.local_addr().map_or(0, |address| address.port());
    // Without it small answers wait for acknowledgements; it works without, too.
    stream.set_nodelay(true).ok();
    // A user's tunnel may be silent for as long as it likes, but not when its client has vanished.
    SockRef::from(&stream).set_tcp_keepalive(&KEEPALIVE).ok();
    let activity = Arc::clone(&place.activity);
    let begin = begin(&server, &config, stream, from, is_trusted, &mut place);
    let Begun { plain, version, peer, key } = tokio::select! {
        begun = begin => match begun? {
            Some(begun) => begun,
            None => return Ok(()),
        },
        // It takes too long, or gives way to a newer one.
        ending = activity.ended() => return close(ending, async {}).await,
    };
    activity.begins();
    let is_tls = config.http.tls;
    let next_sending = NextSending::default();
    let visit = Arc::new(Visit { server, config, version, peer, port, is_tls, key, place, next_sending });
    match version {
        HttpVersion::Http1 => http1(plain, visit).await,
        HttpVersion::Http2 => http2(plain, visit).await,
    }
}

/// A connection whose TLS, if it has that, is complete.
struct Begun {
    plain: Plain,
    version: HttpVersion,
    peer: SocketAddr,
    /// The key of the client's certificate.
    key: Option<ClientKey>,
}

/// Reads the PROXY header if there may be one, and completes TLS; `None`: the client has left.
async fn begin(
    server: &Server,
    config: &Config,
    mut stream: TcpStream,
    mut from: SocketAddr,
    is_trusted: bool,
    place: &mut Place,
) -> Result<Option<Begun>, TcpRefused> {
    let mut first = BytesMut::new();
    if is_trusted {
        match look_ahead(&mut stream, &mut first, proxied::read).await {
            Ok(Beginning::Header { length, source }) => {
                drop(first.split_to(length));
                if let Some(source) = source {
                    from = source;
                    // A server in front of that one speaks for many, too.
                    if !proxied::is_trusted(&config.http.trusted, source.ip()) {
                        place.comes_from(source.ip())?;
                    }
                }
            }
            Ok(Beginning::Other) => {}
            Ok(Beginning::Wrong | Beginning::Incomplete) => return Err(TcpRefused::Header),
            Err(_) => return Ok(None),
        }
    }
    let activity = &place.activity;
    if !config.http.tls {
        let version = match look_ahead(&mut stream, &mut first, is_http2).await {
            Ok(Version::Http2) => HttpVersion::Http2,
            Ok(Version::Other | Version::Incomplete) => HttpVersion::Http1,
            Err(_) => return Ok(None),
        };
        let socket = Socket::new(stream, first.freeze(), Arc::clone(activity));
        return Ok(Some(Begun { plain: Plain::Socket(socket), version, peer: from, key: None }));
    }
    let Some(certificate) = &config.certificate else { return Ok(None) };
    if !server.places.may_shake_hands(Instant::now()) {
        return Err(TcpRefused::Hurry);
    }
    let socket = Socket::new(stream, first.freeze(), Arc::clone(activity));
    let tls =
        match TlsAcceptor::from(certificate.tls(server.users.asks_for_certificates())).accept(socket).await {
            Ok(tls) => tls,
            // Scans that connect and leave are not worth a count.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(_) => return Err(TcpRefused::Handshake),
        };
    let is_http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
    let version = if is_http2 { HttpVersion::Http2 } else { HttpVersion::Http1 };
    let key = ClientKey::of_chain(tls.get_ref().1.peer_certificates());
    Ok(Some(Begun { plain: Plain::Tls(Box::new(tls)), version, peer: from, key }))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    Incomplete,
    Http2,
    Other,
}

fn is_http2(bytes: &[u8]) -> Version {
    if bytes.starts_with(PREFACE) {
        Version::Http2
    } else if PREFACE.starts_with(bytes) {
        Version::Incomplete
    } else {
        Version::Other
    }
}

/// What may need more bytes until it can be told.
trait MayNeedMore {
    fn needs_more(&self) -> bool;
}

impl MayNeedMore for Version {
    fn needs_more(&self) -> bool {
        *self == Self::Incomplete
    }
}

impl MayNeedMore for Beginning {
    fn needs_more(&self) -> bool {
        *self == Self::Incomplete
    }
}

/// Reads until `tell` can tell; an error at the end of the connection.
async fn look_ahead<T: MayNeedMore>(
    stream: &mut TcpStream,
    first: &mut BytesMut,
    tell: impl Fn(&[u8]) -> T,
) -> io::Result<T> {
    loop {
        let told = tell(first);
        if !told.needs_more() {
            return Ok(told);
        }
        if stream.read_buf(first).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

async fn http1(plain: Plain, visit: Arc<Visit>) -> Result<(), TcpRefused> {
    let activity = Arc::clone(&visit.place.activity);
    let counts = Arc::clone(&visit.server);
    let service = service_fn(move |request| request::answer(Arc::clone(&visit), request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // Of the first request and of idle connections `Activity` keeps the time.
        .header_read_timeout(IDLE * 2)
        .max_header_size(MOST_HEAD_BYTES)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(plain), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let ending = tokio::select! {
        ended = connection.as_mut() => {
            if ended.as_ref().is_err_and(hyper::Error::is_parse_too_large) {
                // hyper has answered it.
                counts.metrics.visitors.request(HttpVersion::Http1, TcpOutcome::TooLarge);
                return Ok(());
            }
            return why(ended);
        }
        ending = activity.ended() => ending,
    };
    close(ending, async {
        connection.as_mut().graceful_shutdown();
        connection.as_mut().await.ok();
    })
    .await
}

async fn http2(plain: Plain, visit: Arc<Visit>) -> Result<(), TcpRefused> {
    let activity = Arc::clone(&visit.place.activity);
    let next_sending = visit.next_sending.clone();
    let most_streams = if visit.server.users.is_empty() { MOST_STREAMS } else { MOST_STREAMS_OF_A_USER };
    let service = service_fn(move |request| request::answer(Arc::clone(&visit), request));
    let connection = http2::Builder::new(Tasks(next_sending))
        .timer(TokioTimer::new())
        .max_concurrent_streams(most_streams)
        .max_header_list_size(2 * MOST_HEAD_BYTES as u32)
        .initial_stream_window_size(WINDOWS[0])
        .initial_connection_window_size(WINDOWS[1])
        .max_send_buf_size(SEND_BYTES)
        .max_pending_accept_reset_streams(MOST_RESETS)
        .max_local_error_reset_streams(MOST_RESETS)
        .enable_connect_protocol()
        .serve_connection(TokioIo::new(plain), service);
    let mut connection = pin!(connection);
    let ending = tokio::select! {
        ended = connection.as_mut() => return why(ended),
        ending = activity.ended() => ending,
    };
    close(ending, async {
        connection.as_mut().graceful_shutdown();
        connection.as_mut().await.ok();
    })
    .await
}

/// Closes a connection, in order unless it is one that only costs.
async fn close(ending: Ending, in_order: impl Future<Output = ()>) -> Result<(), TcpRefused> {
    let within = match ending {
        Ending::Refused(TcpRefused::Flood) => Duration::ZERO,
        // Another one has its place already.
        Ending::Refused(TcpRefused::Replaced) => LAST_ANSWERS / 10,
        Ending::Idle | Ending::Refused(_) => LAST_ANSWERS,
    };
    if !within.is_zero() {
        timeout(within, in_order).await.ok();
    }
    match ending {
        Ending::Idle => Ok(()),
        Ending::Refused(reason) => Err(reason),
    }
}

/// Runs what hyper has to do for one stream.
#[derive(Clone)]
struct Tasks(NextSending);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, future: F) {
        match self.0.take() {
            Some(sending) => drop(task::spawn(Part::Users, sending.run(future))),
            None => drop(task::spawn(Part::Site, future)),
        }
    }
}

/// Why a connection has ended: nothing if its client has left.
fn why(ended: hyper::Result<()>) -> Result<(), TcpRefused> {
    let Err(error) = ended else { return Ok(()) };
    let (mut is_slow_reader, mut reason) = (false, None);
    let mut next = error.source();
    while let Some(cause) = next {
        let io = cause.downcast_ref::<io::Error>();
        let h2 = cause.downcast_ref::<h2::Error>();
        let kind = io.map(io::Error::kind).or_else(|| h2?.get_io().map(io::Error::kind));
        is_slow_reader |= kind == Some(io::ErrorKind::TimedOut);
        reason = reason.or_else(|| h2?.reason());
        next = cause.source();
    }
    if error.is_timeout() {
        Err(TcpRefused::Slow)
    } else if is_slow_reader {
        Err(TcpRefused::SlowReader)
    } else if reason == Some(h2::Reason::ENHANCE_YOUR_CALM) {
        Err(TcpRefused::Flood)
    } else if error.is_parse() || reason.is_some_and(|reason| reason != h2::Reason::NO_ERROR) {
        Err(TcpRefused::Violation)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http2_is_told_by_its_preface() {
        for end in 0..PREFACE.len() {
            assert_eq!(is_http2(&PREFACE[..end]), Version::Incomplete);
        }
        assert_eq!(is_http2(PREFACE), Version::Http2);
        for other in ["GET / HTTP/1.1\r\n", "PRI * HTTP/1.1\r\n", "P U"] {
            assert_eq!(is_http2(other.as_bytes()), Version::Other);
        }
    }
}

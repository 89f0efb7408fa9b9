//! Requests that want more than an answer: CONNECT, upgrades, and WebSockets of the site.
//!
//! ```text
//!   CONNECT, connect-udp, connect-ip                 a user's with good credentials: `user.rs`
//!   CONNECT                                          405, and over HTTP/1.1 the connection is closed
//!   WebSocket: Upgrade (HTTP/1.1), RFC 8441          asked of the site; accepted, bytes go both ways
//!   another upgrade                                  asked of the site as a plain request, then closed
//! ```
//!
//! [`asked`] is the one place that tells them apart: what a client with credentials or a token may ask for branches off there.

use std::time::Duration;

use data_encoding::BASE64;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body as _, Incoming},
    ext::Protocol,
    header::{CONNECTION, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, UPGRADE},
    upgrade::{OnUpgrade, Upgraded},
};
use hyper_util::rt::TokioIo;
use ops::metrics::HttpVersion;
use tokio::{
    io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes},
    time::sleep,
};

use super::{activity::Activity, places::TunnelPlace, socket::Plain, visit::Asking};

/// The fields that say how a connection goes on, for an upgrade.
const UPGRADES: [(HeaderName, &str); 2] = [(CONNECTION, "upgrade"), (UPGRADE, "websocket")];

/// How long a WebSocket may be silent.
const SILENCE: Duration = Duration::from_secs(600);

/// What is held of a WebSocket in each direction, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// What a request wants beside an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Nothing,
    WebSocket,
    /// Another protocol, over HTTP/1.1.
    Other,
    /// A tunnel.
    Connect,
}

/// What `request` wants.
pub(super) fn asked(request: &Request<Incoming>) -> Asked {
    let is_whole = request.body().is_end_stream();
    let protocol = request.extensions().get::<Protocol>().map(Protocol::as_str);
    of_head(request.method(), request.headers(), protocol, is_whole)
}

fn of_head(method: &Method, headers: &HeaderMap, protocol: Option<&str>, is_whole: bool) -> Asked {
    if method == Method::CONNECT {
        let websocket = protocol.is_some_and(|protocol| protocol.eq_ignore_ascii_case("websocket"));
        return if websocket { Asked::WebSocket } else { Asked::Connect };
    }
    if !headers.contains_key(UPGRADE) {
        return Asked::Nothing;
    }
    let websocket = upgrades_to(headers, "websocket");
    if websocket && method == Method::GET && is_whole { Asked::WebSocket } else { Asked::Other }
}

/// Whether these fields ask for the connection to become one of `protocol`.
pub(super) fn upgrades_to(headers: &HeaderMap, protocol: &str) -> bool {
    let connection = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let mut options = connection.flat_map(|value| value.split(','));
    let upgrades = options.any(|option| option.trim().eq_ignore_ascii_case("upgrade"));
    let names = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(protocol.as_bytes());
    upgrades && headers.get(UPGRADE).is_some_and(names)
}

/// Makes a request to the site one for a WebSocket. Over HTTP/2 there is no key, and the site wants one.
pub(super) fn ask_for_websocket(headers: &mut HeaderMap) {
    for (name, value) in UPGRADES {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if !headers.contains_key(SEC_WEBSOCKET_KEY) {
        let key = BASE64.encode(&rand::random::<[u8; 16]>());
        if let Ok(key) = HeaderValue::from_str(&key) {
            headers.insert(SEC_WEBSOCKET_KEY, key);
        }
    }
}

/// Whether the site's answer to a request for a WebSocket, which is not 101, would tell its client that there is one: over HTTP/2 any 2xx
/// does (RFC 8441 §5, RFC 9110 §9.3.6), and over HTTP/1.1 none.
pub(super) fn would_look_accepted(version: HttpVersion, asked: Asked, status: StatusCode) -> bool {
    version == HttpVersion::Http2 && asked == Asked::WebSocket && status.is_success()
}

/// The head by which a client learns that the site has accepted its WebSocket.
pub(super) fn accepted(version: HttpVersion, mut head: Response<()>) -> Response<()> {
    match version {
        HttpVersion::Http1 => {
            for (name, value) in UPGRADES {
                head.headers_mut().insert(name, HeaderValue::from_static(value));
            }
        }
        HttpVersion::Http2 => {
            *head.status_mut() = StatusCode::OK;
            head.headers_mut().remove(SEC_WEBSOCKET_ACCEPT);
        }
    }
    head
}

/// A WebSocket that the site has accepted.
pub(super) struct Tunnel {
    pub(super) client: OnUpgrade,
    pub(super) site: OnUpgrade,
    pub(super) place: TunnelPlace,
}

impl Tunnel {
    /// Carries bytes both ways until both ends are done, or silent for too long.
    pub(super) async fn run(self, asking: Asking) {
        let Self { client, site, place } = self;
        if let Ok((client, site)) = tokio::try_join!(client, site) {
            let (site, activity) = (TokioIo::new(site), &asking.visit().place.activity);
            match client.downcast::<TokioIo<Plain>>() {
                // What came before the answer was not meant for a WebSocket: it goes with the connection.
                Ok(parts) if !parts.read_buf.is_empty() => {}
                Ok(parts) => carry(parts.io.into_inner(), site, activity).await,
                Err(stream) => carry(TokioIo::new(stream), site, activity).await,
            }
        }
        drop(place);
    }
}

async fn carry(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    mut site: TokioIo<Upgraded>,
    activity: &Activity,
) {
    let silent = async {
        loop {
            let before = activity.bytes();
            sleep(SILENCE).await;
            if activity.bytes() == before {
                return;
            }
        }
    };
    tokio::select! {
        ended = copy_bidirectional_with_sizes(&mut client, &mut site, BUFFER_BYTES, BUFFER_BYTES) => {
            if let Err(error) = ended {
                tracing::debug!(%error, "a WebSocket has ended");
            }
        }
        () = silent => tracing::debug!("a WebSocket was silent for too long"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_request_wants() {
        let of = |method: Method, fields: &[(&'static str, &str)], protocol, is_whole| {
            let fields = fields
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()));
            of_head(&method, &fields.collect(), protocol, is_whole)
        };
        let websocket = [("connection", "keep-alive, Upgrade"), ("upgrade", "WebSocket")];
        assert_eq!(of(Method::GET, &websocket, None, true), Asked::WebSocket);
        assert_eq!(of(Method::GET, &websocket, None, false), Asked::Other, "with content");
        assert_eq!(of(Method::POST, &websocket, None, true), Asked::Other);
        assert_eq!(of(Method::GET, &websocket[1..], None, true), Asked::Other, "not of this connection");
        let udp = [("connection", "Upgrade"), ("upgrade", "connect-udp")];
        assert_eq!(of(Method::GET, &udp, None, true), Asked::Other);
        assert_eq!(of(Method::GET, &[("connection", "upgrade")], None, true), Asked::Nothing);
        assert_eq!(of(Method::CONNECT, &[], None, true), Asked::Connect);
        assert_eq!(of(Method::CONNECT, &[], Some("connect-udp"), false), Asked::Connect);
        assert_eq!(of(Method::CONNECT, &[], Some("websocket"), false), Asked::WebSocket);
    }

    #[test]
    fn an_answer_that_is_no_websocket_does_not_look_like_one() {
        let looks = |version, asked, status| {
            would_look_accepted(version, asked, StatusCode::from_u16(status).unwrap())
        };
        for status in [200, 204, 299] {
            assert!(looks(HttpVersion::Http2, Asked::WebSocket, status), "{status}");
            assert!(!looks(HttpVersion::Http1, Asked::WebSocket, status), "{status}");
            assert!(!looks(HttpVersion::Http2, Asked::Nothing, status), "{status}");
        }
        for status in [301, 400, 404, 503] {
            assert!(!looks(HttpVersion::Http2, Asked::WebSocket, status), "{status}");
        }
    }

    #[test]
    fn over_http2_the_site_gets_a_key_and_the_client_no_101() {
        let mut headers = HeaderMap::new();
        ask_for_websocket(&mut headers);
        assert_eq!(BASE64.decode(headers[SEC_WEBSOCKET_KEY].as_bytes()).unwrap().len(), 16);
        headers.insert(SEC_WEBSOCKET_KEY, HeaderValue::from_static("mine"));
        ask_for_websocket(&mut headers);
        assert_eq!((&headers[SEC_WEBSOCKET_KEY], headers.len()), (&HeaderValue::from_static("mine"), 3));
        let mut head = Response::new(());
        *head.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        head.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, HeaderValue::from_static("x"));
        let second = accepted(HttpVersion::Http2, head.clone());
        assert_eq!((second.status(), second.headers().len()), (StatusCode::OK, 0));
        let first = accepted(HttpVersion::Http1, head);
        assert_eq!((first.status().as_u16(), first.headers().len()), (101, 3));
    }
}

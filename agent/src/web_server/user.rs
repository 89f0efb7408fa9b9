//! A request of a user on TCP: CONNECT and CONNECT-UDP (RFC 9298), with good credentials. Who it is, what may be reached and what is
//! counted is in the crate `users`, for every version of HTTP.
//!
//! Bytes go both ways in `stream.rs`, datagrams in `capsules.rs`.

use std::sync::Arc;

use base::{
    clock::{Clock, SystemClock},
    panics::Part,
};
use bytes::Bytes;
use engine::control::web::Datagrams;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body as _, Incoming},
    ext::Protocol,
    header::{AUTHORIZATION, CONNECTION, HeaderValue, PROXY_AUTHORIZATION, UPGRADE},
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use net::task;
use ops::metrics::{HttpVersion, TcpOutcome};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UdpSocket},
};
use users::{Grant, Open, Session, account::Refusal, policy::Transport, target::Target};

use super::{
    content::Answer,
    sending::Sending,
    socket::Plain,
    stream::resets,
    upgrade::{Asked, upgrades_to},
    visit::{Asking, Visit, client},
    way::{Ended, Way},
};

/// The protocol of RFC 9298.
const CONNECT_UDP: &str = "connect-udp";

/// Who sends a request with these fields; `None`: nobody whose credentials are good. It is asked of every request, so that its time does
/// not tell which of them are looked at.
pub(super) fn sender(visit: &Visit, headers: &HeaderMap) -> Option<Grant> {
    let value = |name| headers.get(name).map(HeaderValue::as_bytes);
    let fields = [value(PROXY_AUTHORIZATION), value(AUTHORIZATION)];
    visit.server.users.verify(fields, SystemClock.unix_seconds())
}

/// What a user asks for, or why that is nothing.
pub(super) type Wanted = Result<(Target, Transport), Refusal>;

/// What a user wants to reach with a request; `None`: it is for the site.
pub(super) fn wanted(request: &Request<Incoming>, asked: Asked) -> Option<Wanted> {
    let path = request.uri().path_and_query().map_or("", |path| path.as_str());
    let udp = || Target::of_connect_udp(path).map(|target| (target, Transport::Udp)).ok_or(Refusal::Target);
    match asked {
        Asked::Connect => Some(match request.extensions().get::<Protocol>().map(Protocol::as_str) {
            Some(CONNECT_UDP) => udp(),
            Some(_) => Err(Refusal::Protocol),
            None => {
                let authority = request.uri().authority();
                let target = authority.and_then(|authority| Target::of_connect(authority.as_str()));
                target.map(|target| (target, Transport::Tcp)).ok_or(Refusal::Target)
            }
        }),
        Asked::Other => {
            let may = request.method() == Method::GET && request.body().is_end_stream();
            (may && upgrades_to(request.headers(), CONNECT_UDP)).then(udp)
        }
        Asked::Nothing | Asked::WebSocket => None,
    }
}

/// Answers a user's request; what it opens is carried by a task of its own.
pub(super) async fn answer(
    visit: &Arc<Visit>,
    mut request: Request<Incoming>,
    grant: Grant,
    wanted: Wanted,
    mut asking: Asking,
) -> Response<Answer> {
    asking.count(TcpOutcome::User);
    let account = Arc::clone(grant.account());
    let begun = begin(visit, &mut request, grant, wanted).await;
    let (transport, tunnel) = match begun {
        Ok(begun) => begun,
        Err(refusal) => {
            account.refused(refusal);
            let client = client(visit, request.headers());
            tracing::debug!(
                user = account.name(),
                ?client,
                reason = refusal.label(),
                "a user's request is refused"
            );
            return refused(visit.version, refusal);
        }
    };
    drop(task::spawn(Part::Users, async move {
        tunnel.run().await;
        // The connection has an open request until here.
        drop(asking);
    }));
    accepted(visit.version, transport)
}

async fn begin(
    visit: &Arc<Visit>,
    request: &mut Request<Incoming>,
    grant: Grant,
    wanted: Wanted,
) -> Result<(Transport, Tunnel), Refusal> {
    let (target, transport) = wanted?;
    let session = grant.session().ok_or(Refusal::Sessions)?;
    visit.place.becomes_a_users(&grant, visit.version)?;
    let opened = match transport {
        Transport::Tcp => Opened::Tcp(grant.open_tcp(&target).await?),
        Transport::Udp => Opened::Udp(grant.open_udp(&target).await?),
    };
    let client = hyper::upgrade::on(request);
    // Nothing is awaited between this and the end of the answer, which is where hyper begins to send.
    let sending = (visit.version == HttpVersion::Http2).then(|| visit.next_sending.expect());
    Ok((transport, Tunnel { visit: Arc::clone(visit), grant, session, target, client, sending, opened }))
}

fn accepted(version: HttpVersion, transport: Transport) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Bytes::new()));
    let headers = response.headers_mut();
    if transport == Transport::Udp {
        // RFC 9298 §3.5.
        headers.insert("capsule-protocol", HeaderValue::from_static("?1"));
        if version == HttpVersion::Http1 {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, HeaderValue::from_static(CONNECT_UDP));
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        }
    }
    response
}

fn refused(version: HttpVersion, refusal: Refusal) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Bytes::new()));
    *response.status_mut() =
        StatusCode::from_u16(refusal.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    if let Ok(status) = HeaderValue::from_str(&format!("culvert; error={}", refusal.proxy_error())) {
        headers.insert("proxy-status", status);
    }
    if version == HttpVersion::Http1 {
        // What follows was meant for the target, and is not to be read as a request (RFC 9931).
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

enum Opened {
    Tcp(Open<TcpStream>),
    Udp(Open<UdpSocket>),
}

/// A request of a user that was let in.
struct Tunnel {
    visit: Arc<Visit>,
    grant: Grant,
    session: Session,
    target: Target,
    client: OnUpgrade,
    sending: Option<Arc<Sending>>,
    opened: Opened,
}

impl Tunnel {
    /// Carries what the user sends and receives, to the end.
    async fn run(self) {
        let Self { visit, grant, session, target, client, sending, opened } = self;
        let Ok(client) = client.await else { return };
        match client.downcast::<TokioIo<Plain>>() {
            // What came before the answer was sent without knowing it: it goes with the connection (RFC 9931).
            Ok(parts) if !parts.read_buf.is_empty() => {}
            Ok(parts) => {
                let mut io = parts.io.into_inner();
                // The target may have nothing to say for as long as it likes, and the user stop reading.
                visit.place.activity.is_patient();
                let way = Way { grant: &grant, target: &target, sending: None };
                if way.carry(&mut io, opened).await == Ended::Broken {
                    resets(io.tcp());
                }
            }
            Err(client) => {
                let way = Way { grant: &grant, target: &target, sending: sending.as_deref() };
                let ended = way.carry(&mut TokioIo::new(client), opened).await;
                if let (Ended::Broken, Some(sending)) = (ended, &sending) {
                    sending.cut();
                }
            }
        }
        drop(session);
    }
}

impl Way<'_> {
    async fn carry(
        &self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        opened: Opened,
    ) -> Ended {
        match opened {
            Opened::Tcp(Open { mut socket, address }) => {
                let ended = self.bytes(client, &mut socket, address).await;
                if ended == Ended::Broken {
                    // The target learns of it by a reset.
                    resets(&socket);
                }
                ended
            }
            Opened::Udp(Open { socket, address }) => {
                let datagrams = Datagrams::new(Arc::clone(self.grant.account()));
                self.datagrams(client, &socket, &datagrams, address).await;
                Ended::Whole
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_those_of_their_version() {
        let head = |version, transport| {
            let response = accepted(version, transport);
            let value = |name: &str| response.headers().get(name).map(|it| it.to_str().unwrap().to_owned());
            (response.status().as_u16(), value("upgrade"), value("capsule-protocol"))
        };
        let (udp, yes) = (Some(CONNECT_UDP.to_owned()), Some("?1".to_owned()));
        assert_eq!(head(HttpVersion::Http1, Transport::Udp), (101, udp, yes.clone()));
        assert_eq!(head(HttpVersion::Http2, Transport::Udp), (200, None, yes));
        for version in [HttpVersion::Http1, HttpVersion::Http2] {
            assert_eq!(head(version, Transport::Tcp), (200, None, None));
        }
        let refusal = refused(HttpVersion::Http1, Refusal::Address);
        assert_eq!(refusal.status(), StatusCode::FORBIDDEN);
        assert_eq!(refusal.headers()[CONNECTION], "close");
        assert_eq!(refusal.headers()["proxy-status"], "culvert; error=destination_ip_prohibited");
        assert!(!refused(HttpVersion::Http2, Refusal::Lookups).headers().contains_key(CONNECTION));
    }
}

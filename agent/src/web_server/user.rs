//! A request of a user on TCP: CONNECT, CONNECT-UDP (RFC 9298) and CONNECT-IP (RFC 9484), with good credentials. Who it is, what may be
//! reached and what is counted is in the crate `users`, for every version of HTTP.
//!
//! Bytes go both ways in `stream.rs`, datagrams in `capsules.rs`, IP packets in `packets.rs`.

use std::{net::SocketAddr, sync::Arc};

use base::{
    clock::{Clock, SystemClock},
    panics::Part,
};
use bytes::Bytes;
use engine::control::web::{Asked as Wants, CONNECT_IP, CONNECT_UDP, Datagrams};
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
use users::{
    Grant, Open, Presents, Sender, Session, Verdict, account::Refusal, checks::Check, policy::Transport,
    session::SessionKind, target::Target,
};

use super::{
    content::Answer,
    packets::Packets,
    sending::Sending,
    socket::Plain,
    stream::resets,
    upgrade::{Asked, upgrades_to},
    visit::{Asking, Visit, client},
    way::{Ended, Way},
};

/// Who sends a request with these fields, over a connection whose client may have shown a certificate. It is asked of every request, so that
/// its time does not tell which of them are looked at; a password that a person has chosen is waited for.
pub(super) async fn sender(visit: &Visit, headers: &HeaderMap) -> Sender {
    let value = |name| headers.get(name).map(HeaderValue::as_bytes);
    let presents = Presents {
        fields: [value(PROXY_AUTHORIZATION), value(AUTHORIZATION)],
        key: visit.key,
        // A trusted server that says two things says nothing.
        source: client(visit, headers).unwrap_or_else(|| visit.peer.ip()),
    };
    let verify = |checked: Option<&Check>| {
        visit.server.users.verify(&presents, checked, SystemClock.unix_seconds(), SystemClock.now())
    };
    let mut verdict = verify(None);
    loop {
        match verdict {
            Verdict::Known(sender) => return sender,
            Verdict::Checks(mut check) => {
                (&mut check).await;
                verdict = verify(Some(&check));
            }
        }
    }
}

/// What a user asks for, or why that is nothing.
pub(super) type Wanted = Result<Wants, Refusal>;

/// What a user wants to reach with a request; `None`: it is for the site.
pub(super) fn wanted(request: &Request<Incoming>, asked: Asked) -> Option<Wanted> {
    let path = request.uri().path_and_query().map_or("", |path| path.as_str());
    match asked {
        Asked::Connect => Some(match request.extensions().get::<Protocol>().map(Protocol::as_str) {
            Some(protocol) => Wants::by_protocol(protocol, path),
            None => Wants::by_connect(request.uri().authority().map_or("", |authority| authority.as_str())),
        }),
        Asked::Other => {
            let may = request.method() == Method::GET && request.body().is_end_stream();
            let asked = |protocol: &&str| may && upgrades_to(request.headers(), protocol);
            let protocol = [CONNECT_UDP, CONNECT_IP].into_iter().find(asked)?;
            Some(Wants::by_protocol(protocol, path))
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
    let tunnel = match begun {
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
    let response = accepted(visit.version, tunnel.opened.protocol());
    drop(task::spawn(Part::Users, async move {
        tunnel.run().await;
        // The connection has an open request until here.
        drop(asking);
    }));
    response
}

async fn begin(
    visit: &Arc<Visit>,
    request: &mut Request<Incoming>,
    grant: Grant,
    wanted: Wanted,
) -> Result<Tunnel, Refusal> {
    let wanted = wanted?;
    let session = grant.session().ok_or(Refusal::Sessions)?;
    visit.place.becomes_a_users(&grant, visit.version)?;
    let opened = match wanted {
        Wants::Port(target, Transport::Tcp) => Opened::Tcp(grant.open_tcp(&target).await?, target),
        Wants::Port(target, Transport::Udp) => Opened::Udp(grant.open_udp(&target).await?, target),
        Wants::Packets(scope) => {
            Opened::Packets(Box::new(Packets::open(visit, &grant, &session, scope).await?))
        }
    };
    // A trusted server that says two things says nothing.
    let from = client(visit, request.headers()).filter(|ip| *ip != visit.peer.ip().to_canonical());
    let from = from.map_or(visit.peer, |ip| SocketAddr::new(ip, 0));
    match &opened {
        Opened::Tcp(open, target) => session.opens(SessionKind::Bytes, from, target, Some(open.address)),
        Opened::Udp(open, target) => session.opens(SessionKind::Datagrams, from, target, Some(open.address)),
        Opened::Packets(packets) => session.opens(SessionKind::Packets, from, packets.asked(), None),
    }
    let client = hyper::upgrade::on(request);
    // Nothing is awaited between this and the end of the answer, which is where hyper begins to send.
    let sending = (visit.version == HttpVersion::Http2).then(|| visit.next_sending.expect());
    Ok(Tunnel { visit: Arc::clone(visit), grant, session, client, sending, opened })
}

/// The answer to a request for a tunnel of `protocol`; `None`: it is a CONNECT without one.
fn accepted(version: HttpVersion, protocol: Option<&'static str>) -> Response<Answer> {
    let mut response = Response::new(Answer::Whole(Bytes::new()));
    let headers = response.headers_mut();
    if let Some(protocol) = protocol {
        // RFC 9298 §3.5, RFC 9484 §4.5.
        headers.insert("capsule-protocol", HeaderValue::from_static("?1"));
        if version == HttpVersion::Http1 {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, HeaderValue::from_static(protocol));
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
    Tcp(Open<TcpStream>, Target),
    Udp(Open<UdpSocket>, Target),
    Packets(Box<Packets>),
}

impl Opened {
    /// The protocol that was asked for; `None`: none, as bytes of TCP have no need of one.
    const fn protocol(&self) -> Option<&'static str> {
        match self {
            Self::Tcp(..) => None,
            Self::Udp(..) => Some(CONNECT_UDP),
            Self::Packets(_) => Some(CONNECT_IP),
        }
    }
}

/// A request of a user that was let in.
struct Tunnel {
    visit: Arc<Visit>,
    grant: Grant,
    session: Session,
    client: OnUpgrade,
    sending: Option<Arc<Sending>>,
    opened: Opened,
}

impl Tunnel {
    /// Carries what the user sends and receives, to the end.
    async fn run(self) {
        let Self { visit, grant, session, client, sending, opened } = self;
        let Ok(client) = client.await else { return };
        match client.downcast::<TokioIo<Plain>>() {
            // What came before the answer was sent without knowing it: it goes with the connection (RFC 9931).
            Ok(parts) if !parts.read_buf.is_empty() => {}
            Ok(parts) => {
                let mut io = parts.io.into_inner();
                // The target may have nothing to say for as long as it likes, and the user stop reading.
                visit.place.activity.is_patient();
                let ended = opened.carry(&grant, &session, &mut io, None).await;
                session.ends(ended.into());
                if ended.is_broken() {
                    resets(io.tcp());
                }
            }
            Err(client) => {
                let sending = sending.as_deref();
                let ended = opened.carry(&grant, &session, &mut TokioIo::new(client), sending).await;
                session.ends(ended.into());
                if let (true, Some(sending)) = (ended.is_broken(), sending) {
                    sending.cut();
                }
            }
        }
        drop(session);
    }
}

impl Opened {
    async fn carry(
        self,
        grant: &Grant,
        session: &Session,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        sending: Option<&Sending>,
    ) -> Ended {
        match self {
            Self::Tcp(Open { mut socket, address }, target) => {
                let way = Way { grant, session, target: &target, sending };
                let ended = way.bytes(client, &mut socket, address).await;
                if ended.is_broken() {
                    // The target learns of it by a reset.
                    resets(&socket);
                }
                ended
            }
            Self::Udp(Open { socket, address }, target) => {
                let datagrams = Datagrams::new(Arc::clone(session.account()));
                let way = Way { grant, session, target: &target, sending };
                way.datagrams(client, &socket, &datagrams, address).await
            }
            Self::Packets(packets) => packets.carry(session, client).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_those_of_their_version() {
        let head = |version, protocol| {
            let response = accepted(version, protocol);
            let value = |name: &str| response.headers().get(name).map(|it| it.to_str().unwrap().to_owned());
            (response.status().as_u16(), value("upgrade"), value("capsule-protocol"))
        };
        let yes = Some("?1".to_owned());
        for protocol in [CONNECT_UDP, CONNECT_IP] {
            let first = head(HttpVersion::Http1, Some(protocol));
            assert_eq!(first, (101, Some(protocol.to_owned()), yes.clone()));
            assert_eq!(head(HttpVersion::Http2, Some(protocol)), (200, None, yes.clone()));
        }
        for version in [HttpVersion::Http1, HttpVersion::Http2] {
            assert_eq!(head(version, None), (200, None, None));
        }
        let refusal = refused(HttpVersion::Http1, Refusal::Address);
        assert_eq!(refusal.status(), StatusCode::FORBIDDEN);
        assert_eq!(refusal.headers()[CONNECTION], "close");
        assert_eq!(refusal.headers()["proxy-status"], "culvert; error=destination_ip_prohibited");
        assert!(!refused(HttpVersion::Http2, Refusal::Lookups).headers().contains_key(CONNECTION));
    }
}

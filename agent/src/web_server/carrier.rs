//! A request with a token of a peer: its connection carries packets from now on (`carrier/`).

use std::{net::SocketAddr, sync::Arc};

use base::panics::Part;
use bytes::Bytes;
use h3::websocket::Role;
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    header::{HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY},
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use net::{carrier::client_of, task};
use ops::metrics::{HttpVersion, TcpOutcome};
use socket2::SockRef;

use super::{
    content::Answer,
    socket::Plain,
    upgrade,
    visit::{Asking, Visit, client},
};
use crate::carrier::{
    exit::{Carrier, accept, probe},
    pump,
};

/// A carrier that is about to begin, and what its client is told.
pub(super) struct Begun {
    head: Response<()>,
    client: OnUpgrade,
    carrier: Carrier,
}

/// What a request for a WebSocket opens, if its path is a token; `None`: it is for the site.
pub(super) fn begin(visit: &Arc<Visit>, request: &mut Request<Incoming>) -> Option<Begun> {
    let key = request.headers().get(SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes);
    let probe = key.map(probe);
    // Over HTTP/2 no key is sent (RFC 8441 §5).
    let answer = match visit.version {
        HttpVersion::Http1 => Some(HeaderValue::from_str(&accept(key?)).ok()?),
        HttpVersion::Http2 => None,
    };
    let source = SocketAddr::new(client(visit, request.headers())?, visit.peer.port());
    let path = request.uri().path_and_query()?.as_str();
    let carrier = visit.server.exit.open(path, visit.config.access.clock_window, source, probe)?;
    let mut head = Response::new(());
    *head.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    if let Some(answer) = answer {
        head.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, answer);
    }
    let head = upgrade::accepted(visit.version, head);
    Some(Begun { head, client: hyper::upgrade::on(request), carrier })
}

impl Begun {
    /// Answers the client; a task of its own carries its packets.
    pub(super) fn answer(self, mut asking: Asking) -> Response<Answer> {
        let Self { head, client, carrier } = self;
        asking.count(TcpOutcome::Carrier);
        drop(task::spawn(Part::Carrier, async move {
            run(client, &carrier).await;
            // Its place on the web server is free when the packets have ended.
            drop(asking);
        }));
        head.map(|()| Answer::Whole(Bytes::new()))
    }
}

async fn run(client: OnUpgrade, carrier: &Carrier) {
    let Ok(client) = client.await else { return };
    let (source, queue) = (client_of(carrier.accepted.source()), carrier.accepted.queue());
    let put = |packet: &[u8]| carrier.accepted.put(packet);
    tracing::debug!(%source, "a client has opened a carrier");
    let ended = match client.downcast::<TokioIo<Plain>>() {
        Ok(parts) => {
            let stream = parts.io.into_inner();
            // Packets go over it without these, too.
            pump::prepare(&SockRef::from(stream.tcp())).ok();
            pump::run(stream, Role::Server, &parts.read_buf, queue, put).await
        }
        Err(stream) => pump::run(TokioIo::new(stream), Role::Server, &[], queue, put).await,
    };
    tracing::debug!(%source, %ended, "a client's carrier has ended");
}

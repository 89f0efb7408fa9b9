//! A request on TCP: refused, or asked of the site.

use std::{convert::Infallible, net::IpAddr, sync::Arc};

use base::panics::Part;
use bytes::Bytes;
use gate::identity::Endpoint;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode, Uri, Version,
    body::{Body as _, Incoming},
    header::{ALT_SVC, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderValue},
};
use net::task;
use ops::metrics::{HttpVersion, TcpOutcome};
use tokio::sync::mpsc;

use super::{
    carrier,
    connection::MOST_HEAD_BYTES,
    content::{Answer, Piece, Upload, pass_on},
    proxied,
    upgrade::{self, Asked, Tunnel},
    user,
    visit::{Asking, Visit, client},
};
use crate::site::{Connection, Failure, is_passed_on, turns::Turn};

/// What becomes of a request that the site does not answer.
struct Refusal(StatusCode, TcpOutcome);

/// What the site says.
enum Reply {
    /// An answer, and what is still to come of it.
    Answer(Response<()>, Rest),
    /// It has accepted a WebSocket.
    Upgraded(Response<()>, Tunnel),
}

/// The content of an answer, while it comes.
struct Rest {
    content: Incoming,
    connection: Connection<Upload>,
    turn: Turn,
}

/// Answers a request.
pub(super) async fn answer(
    visit: Arc<Visit>,
    mut request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let mut asking = Asking::new(&visit);
    let alt_svc = alt_svc(&visit, &request);
    let asked = upgrade::asked(&request);
    if asked == Asked::WebSocket
        && let Some(begun) = carrier::begin(&visit, &mut request)
    {
        return Ok(begun.answer(asking));
    }
    let sender = user::sender(&visit, request.headers()).await;
    if let Some(grant) = sender.grant
        && let Some(wanted) = user::wanted(&request, asked)
    {
        return Ok(user::answer(&visit, request, grant, wanted, asking).await);
    }
    if sender.hides_authorization {
        // The password is not the site's.
        request.headers_mut().remove(AUTHORIZATION);
    }
    let closes = asked != Asked::Nothing && visit.version == HttpVersion::Http1;
    let mut response = match ask(&visit, request, asked).await {
        Ok(Reply::Answer(head, rest)) => head.map(|()| content_of(rest, asking)),
        Ok(Reply::Upgraded(head, tunnel)) => {
            asking.count(TcpOutcome::WebSocket);
            drop(task::spawn(Part::Site, tunnel.run(asking)));
            head.map(|()| Answer::Whole(Bytes::new()))
        }
        Err(Refusal(status, outcome)) => {
            asking.count(outcome);
            refusal(status)
        }
    };
    if let Some(alt_svc) = alt_svc {
        response.headers_mut().entry(ALT_SVC).or_insert(alt_svc);
    }
    // What follows was meant for what was asked for, and is not to be read as a request (RFC 9931).
    if closes && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// The content of an answer, which a task of its own takes from the site.
fn content_of(rest: Rest, mut asking: Asking) -> Answer {
    let (pieces, answer) = mpsc::channel(1);
    if rest.content.is_end_stream() {
        asking.count(TcpOutcome::Site);
        // There is room for one.
        pieces.try_send(Piece::End).ok();
        return Answer::Site(answer);
    }
    drop(task::spawn(Part::Site, async move {
        let Rest { content, connection, turn } = rest;
        let outcome = pass_on(content, pieces, asking.held()).await;
        drop((connection, turn));
        asking.count(outcome);
    }));
    Answer::Site(answer)
}

async fn ask(visit: &Arc<Visit>, request: Request<Incoming>, asked: Asked) -> Result<Reply, Refusal> {
    const BAD: Refusal = Refusal(StatusCode::BAD_REQUEST, TcpOutcome::Malformed);
    const BUSY: Refusal = Refusal(StatusCode::SERVICE_UNAVAILABLE, TcpOutcome::Busy);
    const DOWN: Refusal = Refusal(StatusCode::BAD_GATEWAY, TcpOutcome::SiteDown);

    let (parts, incoming) = request.into_parts();
    // Whoever refuses it drops this, which reads on for a moment.
    let content = Upload::new(Some(incoming));
    let mut request = Request::from_parts(parts, ());
    if asked == Asked::Connect || request.method() == Method::TRACE {
        return Err(Refusal(StatusCode::METHOD_NOT_ALLOWED, TcpOutcome::Method));
    }
    if visit.place.has_its_share() {
        return Err(BUSY);
    }
    if head_bytes(&request) > MOST_HEAD_BYTES {
        return Err(Refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, TcpOutcome::TooLarge));
    }
    let Some(site) = &visit.config.http.site else {
        return Err(Refusal(StatusCode::NOT_FOUND, TcpOutcome::NoSite));
    };
    let client = client(visit, request.headers()).ok_or(BAD)?;
    let places = &visit.server.places;
    let turn = places.turns.turn(client).await.ok_or(BUSY)?;
    let tunnel = match asked {
        Asked::WebSocket => Some(places.tunnel(client).ok_or(BUSY)?),
        Asked::Nothing | Asked::Other | Asked::Connect => None,
    };
    let on_client = tunnel.is_some().then(|| hyper::upgrade::on(&mut request));
    let head = for_site(visit, request, site, client, asked).ok_or(BAD)?;
    let (mut response, connection) = from_site(site, head.map(|()| content)).await.map_err(|error| {
        tracing::debug!(error, "the site of [http] did not answer");
        DOWN
    })?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let (Some(client), Some(place)) = (on_client, tunnel) else { return Err(DOWN) };
        let site = hyper::upgrade::on(&mut response);
        let head = upgrade::accepted(visit.version, passed_on(&response));
        return Ok(Reply::Upgraded(head, Tunnel { client, site, place }));
    }
    if upgrade::would_look_accepted(visit.version, asked, response.status()) {
        return Err(DOWN);
    }
    let head = passed_on(&response);
    Ok(Reply::Answer(head, Rest { content: response.into_body(), connection, turn }))
}

async fn from_site(
    site: &Endpoint,
    request: Request<Upload>,
) -> Result<(Response<Incoming>, Connection<Upload>), Failure> {
    let mut connection = Connection::open(site).await?;
    Ok((connection.ask(request).await?, connection))
}

/// The head of the site's answer, as its client gets it.
fn passed_on(response: &Response<Incoming>) -> Response<()> {
    let mut head = Response::new(());
    *head.status_mut() = response.status();
    let fields = response.headers();
    for (name, value) in fields.iter().filter(|(name, _)| is_passed_on(fields, name)) {
        head.headers_mut().append(name, value.clone());
    }
    head
}

/// The request as the site gets it; `None`: it names no host, or several.
fn for_site(
    visit: &Visit,
    request: Request<()>,
    site: &Endpoint,
    client: IpAddr,
    asked: Asked,
) -> Option<Request<()>> {
    let host = host(&request, site)?;
    let (old, ()) = request.into_parts();
    let mut new = Request::new(());
    *new.method_mut() = if asked == Asked::WebSocket { Method::GET } else { old.method };
    *new.uri_mut() = old.uri.path_and_query().cloned().map_or_else(Uri::default, Uri::from);
    let headers = new.headers_mut();
    headers.insert(HOST, host);
    for (name, value) in &old.headers {
        // hyper writes the length, and says 100 itself.
        if is_passed_on(&old.headers, name) && ![HOST, COOKIE, CONTENT_LENGTH, EXPECT].contains(name) {
            headers.append(name, value.clone());
        }
    }
    // HTTP/2 may cut them (RFC 9113 §8.2.3).
    let cookies: Vec<&[u8]> = old.headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Some(cookies) = (!cookies.is_empty()).then(|| cookies.join(&b"; "[..])) {
        headers.insert(COOKIE, HeaderValue::from_bytes(&cookies).ok()?);
    }
    headers.insert("x-forwarded-for", HeaderValue::from_str(&client.to_string()).ok()?);
    headers.insert("x-forwarded-proto", HeaderValue::from_static(scheme(visit, &old.headers)));
    if asked == Asked::WebSocket {
        upgrade::ask_for_websocket(headers);
    }
    Some(new)
}

/// Whom the request is for: the authority of its target, else its Host. HTTP/1.0 may name nobody, and is for the site.
fn host(request: &Request<()>, site: &Endpoint) -> Option<HeaderValue> {
    let mut named = request.headers().get_all(HOST).iter();
    let (first, second) = (named.next(), named.next());
    match (request.uri().authority(), first, second) {
        (_, _, Some(_)) => None,
        (Some(authority), _, None) => HeaderValue::from_str(authority.as_str()).ok(),
        (None, Some(host), None) => Some(host.clone()).filter(|host| !host.is_empty()),
        (None, None, None) if request.version() == Version::HTTP_10 => {
            HeaderValue::from_str(&site.to_string()).ok()
        }
        (None, None, None) => None,
    }
}

/// How the client speaks to us, or to the server in front.
fn scheme(visit: &Visit, headers: &HeaderMap) -> &'static str {
    let in_front = proxied::is_trusted(&visit.config.http.trusted, visit.peer.ip());
    let said = if in_front { proxied::is_https(headers) } else { None };
    if said.unwrap_or(visit.is_tls) { "https" } else { "http" }
}

/// What RFC 9113 §6.5.2 counts of a head, in bytes.
fn head_bytes(request: &Request<()>) -> usize {
    const OVERHEAD: usize = 32;
    let fields = request.headers().iter();
    let fields: usize = fields.map(|(name, value)| name.as_str().len() + value.len() + OVERHEAD).sum();
    fields + request.uri().path_and_query().map_or(0, |path| path.as_str().len())
}

/// Where HTTP/3 is, for a client that has asked for one of its names.
fn alt_svc(visit: &Visit, request: &Request<Incoming>) -> Option<HeaderValue> {
    let of_target = request.uri().host();
    let of_field = || request.headers().get(HOST).and_then(|host| host.to_str().ok()).map(without_port);
    let host = of_target.or_else(of_field)?;
    if !visit.config.web_names().iter().any(|name| name.eq_ignore_ascii_case(host)) {
        return None;
    }
    // One number for both is the rule; otherwise the first.
    let listen = &visit.config.transport.listen;
    let port = listen.iter().map(std::net::SocketAddr::port).find(|port| *port == visit.port);
    let port = port.or_else(|| listen.first().map(std::net::SocketAddr::port))?;
    HeaderValue::from_str(&format!("h3=\":{port}\"; ma=86400")).ok()
}

fn without_port(host: &str) -> &str {
    host.rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|digit| digit.is_ascii_digit()))
        .map_or(host, |(name, _)| name)
}

/// An answer of this server's own.
fn refusal(status: StatusCode) -> Response<Answer> {
    let text = format!("{status}\n");
    let mut response = Response::new(Answer::Whole(Bytes::from(text)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("text/plain"));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert("allow", HeaderValue::from_static("GET, HEAD, POST"));
    }
    response
}

//! A connection of HTTP/3, requests on it, and their answers.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, bail};
use data_encoding::BASE64;
use h3::{
    datagram,
    frame::{self, DATA, HEADERS},
    message::Request,
    qpack,
    settings::Settings,
    stream::StreamId,
    varint,
};
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use tokio::task::spawn_local;

use crate::{
    Server, User,
    quic::{self, Congestion},
};

/// The type of the stream that SETTINGS are on (RFC 9114 §6.2.1).
const CONTROL: u64 = 0;

/// The most that is read of an answer's head.
const HEAD_BYTES: u64 = 16 << 10;

/// An endpoint for connections to `to`.
pub(crate) fn endpoint(to: SocketAddr) -> anyhow::Result<Endpoint> {
    let any = match to {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    quic::client(any, Congestion::Unlimited, &[b"h3"])
}

/// A connection on which requests may be sent.
pub(crate) struct Http {
    pub(crate) connection: Connection,
    /// The control stream: without it, the connection is in error.
    _control: SendStream,
}

impl Http {
    pub(crate) async fn connect(endpoint: &Endpoint, server: &Server) -> anyhow::Result<Self> {
        let connecting = endpoint.connect(server.to, &server.name)?;
        let connection = connecting.await.with_context(|| format!("connecting to {}", server.to))?;
        let mut control = connection.open_uni().await?;
        let mut start = Vec::new();
        varint::put(&mut start, CONTROL);
        Settings { max_field_section_bytes: None, extended_connect: false, datagrams: true }.put(&mut start);
        control.write_all(&start).await?;
        spawn_local(read_all_streams(connection.clone()));
        Ok(Self { connection, _control: control })
    }

    /// Sends a request; with `ends` nothing follows on its stream.
    pub(crate) async fn ask(&self, request: &Request, ends: bool) -> anyhow::Result<(SendStream, Answer)> {
        let (mut sender, receiver) = self.connection.open_bi().await?;
        let mut section = Vec::new();
        request.encode(&mut section);
        let mut bytes = Vec::new();
        frame::put(&mut bytes, HEADERS, &section);
        sender.write_all(&bytes).await?;
        if ends {
            sender.finish()?;
        }
        Ok((sender, Answer { receiver, held: Vec::new() }))
    }
}

/// What the server says on streams of its own is not of interest, but has to be read.
async fn read_all_streams(connection: Connection) {
    while let Ok(mut stream) = connection.accept_uni().await {
        spawn_local(async move { while let Ok(Some(_)) = stream.read_chunk(usize::MAX, true).await {} });
    }
}

/// What comes back on a request's stream.
pub(crate) struct Answer {
    receiver: RecvStream,
    held: Vec<u8>,
}

impl Answer {
    /// The next frame's type and payload; `None` at the end.
    pub(crate) async fn frame(&mut self) -> anyhow::Result<Option<(u64, Vec<u8>)>> {
        loop {
            let mut rest = &self.held[..];
            if let Some((kind, length)) = varint::take(&mut rest).zip(varint::take(&mut rest)) {
                let (head, length) = (self.held.len() - rest.len(), usize::try_from(length)?);
                if rest.len() >= length {
                    let payload = rest[..length].to_vec();
                    self.held.drain(..head + length);
                    return Ok(Some((kind, payload)));
                }
            }
            match self.receiver.read_chunk(usize::MAX, true).await? {
                Some(chunk) => self.held.extend_from_slice(&chunk.bytes),
                None if self.held.is_empty() => return Ok(None),
                None => bail!("a frame is cut off"),
            }
        }
    }

    /// The status and the other fields, as they stood.
    pub(crate) async fn head(&mut self) -> anyhow::Result<Head> {
        let Some((HEADERS, section)) = self.frame().await? else { bail!("no head") };
        let lines = qpack::decode(&section, HEAD_BYTES)?;
        let lines = lines.iter().map(|line| (line.name().to_owned(), line.value().to_vec())).collect();
        Ok(Head { lines })
    }

    /// The content up to the end.
    pub(crate) async fn content(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut content = Vec::new();
        while let Some((kind, payload)) = self.frame().await? {
            if kind == DATA {
                content.extend(payload);
            }
        }
        Ok(content)
    }
}

/// An answer's head, in its order.
#[derive(PartialEq, Eq)]
pub(crate) struct Head {
    lines: Vec<(String, Vec<u8>)>,
}

impl Head {
    pub(crate) fn status(&self) -> anyhow::Result<u16> {
        let status = self.lines.iter().find(|(name, _)| name == ":status").context("no status")?;
        Ok(str::from_utf8(&status.1)?.parse()?)
    }

    /// All but what differs from second to second.
    pub(crate) fn without_date(mut self) -> Self {
        self.lines.retain(|(name, _)| name != "date");
        self
    }
}

/// The request by which a user opens a tunnel: an extended CONNECT with this protocol and path.
pub(crate) fn opening(server: &Server, protocol: &'static str, path: String) -> anyhow::Result<Request> {
    let mut request = Request::new("CONNECT", server.name.clone(), path);
    request.protocol = Some(protocol.into());
    request.fields.push("capsule-protocol", b"?1".as_slice())?;
    Ok(request)
}

/// The path of CONNECT-UDP to `target`, a service or an address with a port (RFC 9298 §3).
pub(crate) fn udp_path(target: &str) -> String {
    let (host, port) = target.rsplit_once(':').unwrap_or((target, "0"));
    format!("/.well-known/masque/udp/{}/{port}/", host.replace(':', "%3A"))
}

/// The field that a user's requests have, and its value.
pub(crate) fn authorization(user: &User) -> (&'static str, Vec<u8>) {
    ("proxy-authorization", format!("Basic {}", BASE64.encode(user.credentials.as_bytes())).into_bytes())
}

/// The bytes before the payload of each datagram of a request.
pub(crate) fn datagram_head(sender: &SendStream) -> Vec<u8> {
    let mut head = Vec::new();
    // A client's bidirectional streams are numbered 0, 4, 8 … .
    datagram::put_head(&mut head, StreamId::new(sender.id().index() * 4), 0);
    head
}

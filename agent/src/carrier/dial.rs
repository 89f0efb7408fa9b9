//! From a URL to a WebSocket: the addresses of a name, a proxy on the way, TLS, and a token in the path of an upgrade.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use base::clock::{Clock, SystemClock};
use config::Proxy;
use data_encoding::BASE64;
use gate::{
    carrier::{self as token, NONCE_BYTES},
    identity::{AgreementKey, Endpoint, PublicKey},
    knock::{KnockError, ServerKey},
};
use net::carrier::Probe;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpSocket, TcpStream, lookup_host},
    task::{JoinSet, spawn_blocking},
    time::{sleep, timeout},
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig,
        crypto::ring::default_provider,
        pki_types::{InvalidDnsNameError, ServerName},
    },
};

use super::{environment, exit, pump, roots};

/// How long it may take until a stream is open, all of its steps together.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

/// How long an address is alone before the next one is tried beside it (RFC 8305 §5).
const FAMILY_DELAY: Duration = Duration::from_millis(250);

/// The longest head of an answer, in bytes.
const MOST_HEAD_BYTES: usize = 16 << 10;

/// What is to be dialled.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) endpoint: Endpoint,
    pub(crate) peer: Arc<config::Peer>,
    /// SO_MARK of the socket.
    pub(crate) mark: u32,
}

/// Why a stream cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("no answer within {} s", OPEN_WITHIN.as_secs())]
    Late,
    #[error("{host} cannot be looked up: {error}")]
    Name { host: String, error: io::Error },
    #[error("no connection to {at}: {error}")]
    Connect { at: String, error: io::Error },
    #[error("the proxy {at} answers {status}{said}")]
    Proxy { at: String, status: u16, said: Said },
    #[error("the certificates of authorities cannot be read: {0}")]
    Roots(io::Error),
    #[error("TLS: {0}")]
    Tls(io::Error),
    #[error("no certificate can be for this name: {0}")]
    Host(#[from] InvalidDnsNameError),
    #[error("the connection has failed: {0}")]
    Io(#[from] io::Error),
    #[error("the answer is not one of HTTP/1.1")]
    Head,
    #[error("the web server answers {status}{said}, and opens no carrier")]
    Refused { status: u16, said: Said },
    #[error("no token can be made: {0}")]
    Token(#[from] KnockError),
    #[error("the peer has no key to which a token can be made")]
    Key,
}

/// What an answer tells of whoever has given it, where something on the way may have: where it sends us, or what it calls itself.
#[derive(Debug, Default)]
pub(crate) struct Said(Option<(&'static str, String)>);

impl fmt::Display for Said {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some((field, value)) => write!(formatter, " ({field}: {value})"),
            None => Ok(()),
        }
    }
}

impl DialError {
    /// What to do about it.
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Self::Late | Self::Connect { .. } | Self::Io(_) => {
                "is the web server running, and does a firewall let TCP pass? Where only a proxy may connect, set peer.proxy"
            }
            Self::Name { .. } => "look at the name in endpoints, and at DNS",
            Self::Proxy { status: 407, .. } => "write the name and the password into peer.proxy",
            Self::Proxy { .. } => "does the proxy allow CONNECT to this host and port?",
            Self::Roots(_) => "install ca-certificates, or name a file in peer.ca_file",
            Self::Tls(_) | Self::Host(_) => {
                "if the name is right and the certificate is not from a known authority, set peer.ca_file; \
                 something on the way may answer in place of the exit"
            }
            Self::Head | Self::Refused { .. } => {
                "is it the exit's web server, is our key among its peers, are the clocks right, and does a server in front \
                 pass WebSockets on?"
            }
            Self::Token(_) | Self::Key => "look at the peer's public_key",
        }
    }
}

/// A WebSocket that packets go over, and what came with the head of the answer.
pub(crate) struct Opened {
    pub(crate) stream: TlsStream<TcpStream>,
    pub(crate) first: Vec<u8>,
    /// How to find out whether UDP passes.
    pub(crate) probe: Probe,
}

/// Opens a stream. A token that is refused is tried again with a new one, once for each of the peer's keys and at least once: a server in
/// front may have asked twice, and only the first request gets the carrier.
pub(crate) async fn open(target: Target, own: &AgreementKey) -> Result<Opened, DialError> {
    let keys = &target.peer.public_keys;
    let tries = keys.len().max(2);
    let opened = async {
        let mut refused = DialError::Key;
        for key in keys.iter().cycle().take(tries) {
            match open_once(&target, own, key).await {
                Err(error @ DialError::Refused { .. }) => refused = error,
                done => return done,
            }
        }
        Err(refused)
    };
    timeout(OPEN_WITHIN, opened).await.unwrap_or(Err(DialError::Late))
}

async fn open_once(target: &Target, own: &AgreementKey, key: &PublicKey) -> Result<Opened, DialError> {
    let (host, port) = (target.endpoint.name(), target.endpoint.port);
    let proxy = target.peer.proxy.clone().or_else(|| environment::proxy_to(host));
    let stream = match &proxy {
        Some(proxy) => through(proxy, host, port, target.mark).await?,
        None => connect(host, port, target.mark).await?,
    };
    let mut stream = encrypted(stream, target).await?;
    let server = ServerKey::new(key).ok_or(DialError::Key)?;
    let nonce: [u8; NONCE_BYTES] = rand::random();
    let path = token::path(own, &server, SystemClock.unix_seconds(), nonce, &rand::random())?;
    let key = BASE64.encode(&rand::random::<[u8; 16]>());
    let first = upgraded(&mut stream, &path, &authority(host, port), &key).await?;
    Ok(Opened { stream, first, probe: exit::probe(key.as_bytes()) })
}

/// A host and a port as URLs have them; without the port if it is that of HTTPS.
fn authority(host: &str, port: u16) -> String {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    if port == 443 { host } else { format!("{host}:{port}") }
}

/// Connects to the first address that answers: families in turn, each a moment after the one before (RFC 8305).
async fn connect(host: &str, port: u16, mark: u32) -> Result<TcpStream, DialError> {
    let looked_up = match host.parse::<IpAddr>() {
        Ok(ip) => Ok(vec![SocketAddr::new(ip, port)]),
        Err(_) => lookup_host((host, port)).await.map(Iterator::collect),
    };
    let addresses = looked_up.map_err(|error| DialError::Name { host: host.to_owned(), error })?;
    let mut tries = JoinSet::new();
    for (place, address) in (0..).zip(in_turn(addresses)) {
        tries.spawn(async move {
            sleep(FAMILY_DELAY * place).await;
            connect_to(address, mark).await
        });
    }
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    while let Some(tried) = tries.join_next().await {
        match tried.map_err(io::Error::other).flatten() {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(DialError::Connect { at: authority(host, port), error: failed })
}

/// The addresses with the families in turn, that of the first one first.
fn in_turn(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (one, other): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first);
    let (mut one, mut other) = (one.into_iter(), other.into_iter());
    std::iter::from_fn(|| match (one.next(), other.next()) {
        (None, None) => None,
        (one, other) => Some([one, other]),
    })
    .flatten()
    .flatten()
    .collect()
}

async fn connect_to(address: SocketAddr, mark: u32) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if mark != 0 {
        socket.set_mark(mark)?;
    }
    pump::prepare(&socket)?;
    TcpSocket::from_std_stream(socket.into()).connect(address).await
}

/// Connects through a proxy by CONNECT (RFC 9110 §9.3.6).
async fn through(proxy: &Proxy, host: &str, port: u16, mark: u32) -> Result<TcpStream, DialError> {
    let mut stream = connect(proxy.at.name(), proxy.at.port, mark).await?;
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let login = proxy.login().map(|login| BASE64.encode(&login));
    let authorization =
        login.map_or_else(String::new, |login| format!("Proxy-Authorization: Basic {login}\r\n"));
    let ask = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{authorization}\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let (head, rest) = answer(&mut stream).await?;
    let status = head.status().ok_or(DialError::Head)?;
    if !(200..300).contains(&status) {
        return Err(DialError::Proxy { at: proxy.at.to_string(), status, said: head.said() });
    }
    // TLS begins with the client.
    if rest.is_empty() { Ok(stream) } else { Err(DialError::Head) }
}

async fn encrypted(stream: TcpStream, target: &Target) -> Result<TlsStream<TcpStream>, DialError> {
    let name = ServerName::try_from(target.endpoint.name().to_owned())?;
    let file = target.peer.ca_file.clone();
    let roots = spawn_blocking(move || roots::load(file.as_deref())).await.map_err(io::Error::other)?;
    let roots = roots.map_err(DialError::Roots)?;
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| DialError::Tls(io::Error::other(error)))?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(DialError::Tls)
}

/// Asks for a WebSocket at `path` (RFC 6455 §4.1); what has come with the answer.
async fn upgraded<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    path: &str,
    host: &str,
    key: &str,
) -> Result<Vec<u8>, DialError> {
    let ask = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    );
    stream.write_all(ask.as_bytes()).await?;
    stream.flush().await?;
    let (head, first) = answer(stream).await?;
    let status = head.status().ok_or(DialError::Head)?;
    if status != 101 {
        return Err(DialError::Refused { status, said: head.said() });
    }
    let is_websocket = head.field("upgrade").is_some_and(|value| value.eq_ignore_ascii_case("websocket"));
    if !is_websocket || head.field("sec-websocket-accept") != Some(&exit::accept(key.as_bytes())) {
        return Err(DialError::Head);
    }
    Ok(first)
}

/// The head of an answer, with its empty line.
#[derive(Debug)]
struct Head(String);

impl Head {
    fn status(&self) -> Option<u16> {
        let line = self.0.lines().next()?;
        let rest = line.strip_prefix("HTTP/1.")?;
        rest.split(' ').nth(1)?.parse().ok().filter(|status| (100..600).contains(status))
    }

    /// What tells most of whoever has answered, cut to a line.
    fn said(&self) -> Said {
        const MOST_CHARS: usize = 120;
        let told = ["location", "server", "via"].into_iter().find_map(|name| Some((name, self.field(name)?)));
        let shown = |value: &str| {
            value.chars().filter(|one| one.is_ascii_graphic() || *one == ' ').take(MOST_CHARS).collect()
        };
        Said(told.map(|(name, value)| (name, shown(value))))
    }

    /// The value of a field whose name is `name` in lower case.
    fn field(&self, name: &str) -> Option<&str> {
        let fields = self.0.lines().skip(1).filter_map(|line| line.split_once(':'));
        let mut named = fields.filter(|(field, _)| field.eq_ignore_ascii_case(name));
        named.next().map(|(_, value)| value.trim())
    }
}

/// Reads the head of an answer, and what has come with it.
async fn answer<S: AsyncRead + Unpin>(stream: &mut S) -> Result<(Head, Vec<u8>), DialError> {
    const END: &[u8] = b"\r\n\r\n";

    let mut bytes = Vec::with_capacity(1_024);
    loop {
        if let Some(at) = bytes.windows(END.len()).position(|window| window == END) {
            let rest = bytes.split_off(at + END.len());
            return Ok((Head(String::from_utf8(bytes).map_err(|_| DialError::Head)?), rest));
        }
        if bytes.len() > MOST_HEAD_BYTES {
            return Err(DialError::Head);
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
    }
}

#[cfg(test)]
#[path = "dial_tests.rs"]
mod tests;

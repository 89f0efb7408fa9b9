//! A browser that knows nothing of Culvert, on quinn, with as much of HTTP/3 (RFC 9114) as one GET needs.

use std::{
    net::SocketAddr,
    sync::{Arc, LazyLock},
    time::Duration,
};

use culvert_tests::{clock::PATIENCE, place::Place};
use gate::hybrid::Hybrid;
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, RecvStream, SendStream,
    TokioRuntime, TransportConfig, crypto::rustls::QuicClientConfig,
};
use rustls::{RootCertStore, crypto::ring, pki_types::CertificateDer};
use tokio::{runtime::Builder, time::timeout};

use crate::site::NAME;

/// Bytes of credit: the rest of an answer cannot come before the client has moved.
const WINDOW: u32 = 65_536;

/// After that long without an answer a client of a silent port gives up.
const GIVE_UP: Duration = Duration::from_secs(2);

/// At which place it is, and the certificate that it trusts.
#[derive(Debug)]
pub(crate) struct Browser {
    place: Place,
    trusted: CertificateDer<'static>,
}

impl Browser {
    pub(crate) fn new(place: &Place, trusted: &CertificateDer<'static>) -> Self {
        Self { place: place.clone(), trusted: trusted.clone() }
    }

    /// Connects, fetches `bytes` bytes and moves to another port in their midst, fetches them again, and closes.
    #[track_caller]
    pub(crate) fn visit(&self, server: SocketAddr, bytes: usize) {
        self.run(async |endpoint| {
            let connection = self.connect(&endpoint, server).await.unwrap();
            send_deferred_hello(&connection).await;
            let mut answer = Answer::to(&connection, bytes).await;
            answer.read_to(WINDOW as usize / 2).await;
            assert!(answer.body.len() < bytes);
            let before = endpoint.local_addr().unwrap();
            endpoint.rebind(self.socket()).unwrap();
            assert_ne!(endpoint.local_addr().unwrap(), before);
            answer.read_to(bytes).await;
            answer.check(bytes);

            let mut again = Answer::to(&connection, bytes).await;
            again.read_to(bytes).await;
            again.check(bytes);
            // H3_NO_ERROR
            connection.close(0x100u32.into(), b"");
            endpoint.wait_idle().await;
        });
    }

    /// Connects until it gives up; returns why it did.
    #[track_caller]
    pub(crate) fn knock(&self, server: SocketAddr) -> ConnectionError {
        let connect = async |endpoint: Endpoint| self.connect(&endpoint, server).await;
        self.run(connect).expect_err("it is connected")
    }

    async fn connect(&self, endpoint: &Endpoint, server: SocketAddr) -> Result<Connection, ConnectionError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.trusted.clone()).unwrap();
        // As browsers do: a ClientHello in two datagrams.
        static HYBRID: LazyLock<Hybrid> = LazyLock::new(|| Hybrid {
            classical: ring::kx_group::X25519,
            random: ring::default_provider().secure_random,
        });
        let mut provider = ring::default_provider();
        provider.kx_groups.insert(0, &*HYBRID);
        let mut tls = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![b"h3".to_vec()];
        let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
        let mut transport = TransportConfig::default();
        transport.receive_window(WINDOW.into()).stream_receive_window(WINDOW.into());
        transport.max_idle_timeout(Some(GIVE_UP.try_into().unwrap()));
        config.transport_config(Arc::new(transport));
        endpoint.connect_with(config, server, NAME).unwrap().await
    }

    fn socket(&self) -> std::net::UdpSocket {
        self.place.enter(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap())
    }

    #[track_caller]
    fn run<T>(&self, visit: impl AsyncFnOnce(Endpoint) -> T) -> T {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let visit = async {
            let (config, socket) = (EndpointConfig::default(), self.socket());
            visit(Endpoint::new(config, None, socket, Arc::new(TokioRuntime)).unwrap()).await
        };
        let outcome = runtime.block_on(async { timeout(PATIENCE, visit).await });
        outcome.unwrap_or_else(|_| panic!("not within {PATIENCE:?}"))
    }
}

/// Opens the client's control stream: its type, and SETTINGS without any.
async fn send_deferred_hello(connection: &Connection) {
    let mut control = connection.open_uni().await.unwrap();
    control.write_all(&[0, 4, 0]).await.unwrap();
    // It must stay open as long as the connection is (RFC 9114 §6.2.1).
    std::mem::forget(control);
}

/// What comes back to a GET.
struct Answer {
    stream: RecvStream,
    body: Vec<u8>,
    /// Frames that are not parsed yet.
    unread: Vec<u8>,
    /// Bytes of the present DATA frame that are still to come.
    data: usize,
    _request: SendStream,
}

impl Answer {
    /// Asks for `/bytes`.
    async fn to(connection: &Connection, bytes: usize) -> Self {
        let (mut request, stream) = connection.open_bi().await.unwrap();
        // QPACK (RFC 9204): no dynamic table; GET and https from the static one, the rest with names from it.
        let mut fields = vec![0, 0, 0xc0 | 17, 0xc0 | 23];
        for (name, value) in [(0, NAME.to_owned()), (1, format!("/{bytes}"))] {
            fields.extend([0x50 | name, u8::try_from(value.len()).unwrap()]);
            fields.extend(value.into_bytes());
        }
        // HEADERS; its length is below 64.
        let frame = [&[1, u8::try_from(fields.len()).unwrap()], fields.as_slice()].concat();
        request.write_all(&frame).await.unwrap();
        request.finish().unwrap();
        Self { stream, body: Vec::new(), unread: Vec::new(), data: 0, _request: request }
    }

    /// Reads until there are `bytes` bytes of body.
    async fn read_to(&mut self, bytes: usize) {
        while self.body.len() < bytes {
            let chunk = self.stream.read_chunk(16_384, true).await.unwrap();
            let chunk = chunk.unwrap_or_else(|| panic!("the answer ends after {} bytes", self.body.len()));
            self.unread.extend(&chunk.bytes);
            self.parse();
        }
    }

    fn parse(&mut self) {
        const DATA: u64 = 0;
        loop {
            let of_body = self.unread.len().min(self.data);
            self.body.extend(self.unread.drain(..of_body));
            self.data -= of_body;
            let Some((kind, at)) = varint(&self.unread) else { return };
            let Some((length, more)) = varint(&self.unread[at..]) else { return };
            let (start, length) = (at + more, usize::try_from(length).unwrap());
            if kind == DATA {
                self.unread.drain(..start);
                self.data = length;
            } else if self.unread.len() >= start + length {
                self.unread.drain(..start + length);
            } else {
                return;
            }
        }
    }

    #[track_caller]
    fn check(&self, bytes: usize) {
        let expected: Vec<u8> = (0..bytes).map(|place| (place % 251) as u8).collect();
        assert!(self.body == expected, "{} bytes, not those of the site", self.body.len());
    }
}

/// The integer at the front of `bytes` and its length (RFC 9000 §16), once it is there.
fn varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let length = 1 << (bytes.first()? >> 6);
    let encoded = bytes.get(..length)?;
    let value =
        encoded[1..].iter().fold(u64::from(encoded[0] & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    Some((value, length))
}

//! Two real quinn-proto endpoints in memory and in virtual time, for the tests of this folder.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use quinn_proto::{
    ClientConfig, Connection, ConnectionError, ConnectionHandle, DatagramEvent, Endpoint, Event,
    RandomConnectionIdGenerator, TransportConfig, crypto,
};
use ring::{
    hkdf, hmac,
    signature::{Ed25519KeyPair, KeyPair},
};
use wire::cid::CONNECTION_ID_BYTES;

use crate::tls::{self, ClientKeys, Refusal, SERVER_NAME, TlsIdentity, endpoint_config, server_config};

/// An identity that is the same in every run: its private key is `seed`, 32 times.
pub(super) fn identity(seed: u8) -> TlsIdentity {
    const PKCS8_PREFIX: [u8; 16] =
        [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
    let pkcs8 = [&PKCS8_PREFIX[..], &[seed; 32]].concat();
    let identity = TlsIdentity::from_pkcs8(&pkcs8).unwrap();
    let expected = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap();
    assert_eq!(identity.public_key(), expected.public_key().as_ref());
    identity
}

/// An allowlist that remembers what it was asked.
#[derive(Default)]
pub(super) struct Clients {
    pub(super) allowed: Mutex<Vec<[u8; 32]>>,
    pub(super) asked: AtomicUsize,
    pub(super) refused: Mutex<Vec<Refusal>>,
}

impl Clients {
    pub(super) fn with(key: &[u8; 32]) -> Arc<Self> {
        Arc::new(Self { allowed: Mutex::new(vec![*key]), ..Self::default() })
    }
}

impl ClientKeys for Clients {
    fn is_allowed(&self, key: &[u8; 32]) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.allowed.lock().unwrap().contains(key)
    }

    fn refused(&self, refusal: &Refusal) {
        self.refused.lock().unwrap().push(*refusal);
    }
}

/// The client or the server of a [`Pair`].
pub(super) struct End {
    endpoint: Endpoint,
    address: SocketAddr,
    handle: Option<ConnectionHandle>,
    connection: Option<Connection>,
    pub(super) connected: bool,
    pub(super) lost: Option<ConnectionError>,
    /// CRYPTO frames received when `Connected` came.
    pub(super) crypto_frames_at_connected: u64,
}

impl End {
    pub(super) fn connection(&self) -> &Connection {
        self.connection.as_ref().unwrap()
    }

    pub(super) fn session(&self) -> &dyn crypto::Session {
        self.connection().crypto_session()
    }

    pub(super) fn export(&self, context: &[u8]) -> [u8; 48] {
        let mut secret = [0; 48];
        self.session().export_keying_material(&mut secret, b"test label", context).unwrap();
        secret
    }

    fn new(address: SocketAddr, server: Option<Arc<dyn crypto::ServerConfig>>) -> Self {
        let ids = || -> Box<dyn quinn_proto::ConnectionIdGenerator> {
            Box::new(RandomConnectionIdGenerator::new(CONNECTION_ID_BYTES))
        };
        let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &[1; 64]));
        let config = Arc::new(endpoint_config(ids, reset_key, Some([2; 32])));
        let server = server.map(|crypto| {
            let token_key = Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&[3; 32]));
            Arc::new(server_config(crypto, Arc::new(TransportConfig::default()), token_key))
        });
        Self {
            endpoint: Endpoint::new(config, server, true, None),
            address,
            handle: None,
            connection: None,
            connected: false,
            lost: None,
            crypto_frames_at_connected: 0,
        }
    }

    /// Gives one datagram to this end.
    fn receive(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        let mut response = Vec::new();
        match self.endpoint.handle(now, from, None, None, BytesMut::from(datagram), &mut response) {
            Some(DatagramEvent::NewConnection(incoming)) => {
                match self.endpoint.accept(incoming, now, &mut response, None) {
                    Ok((handle, connection)) => {
                        self.handle = Some(handle);
                        self.connection = Some(connection);
                    }
                    // A ClientHello that TLS refuses at once.
                    Err(error) => self.lost = Some(error.cause),
                }
            }
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                self.connection.as_mut().unwrap().handle_event(event);
            }
            Some(DatagramEvent::Response(_)) | None => {}
        }
    }

    /// Everything that this end has to send now.
    fn transmit(&mut self, now: Instant) -> Vec<Vec<u8>> {
        let (Some(handle), Some(connection)) = (self.handle, self.connection.as_mut()) else {
            return Vec::new();
        };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(handle, event) {
                connection.handle_event(event);
            }
        }
        while let Some(event) = connection.poll() {
            match event {
                Event::Connected => {
                    self.connected = true;
                    self.crypto_frames_at_connected = connection.stats().frame_rx.crypto;
                }
                Event::ConnectionLost { reason } => self.lost = Some(reason),
                Event::HandshakeDataReady
                | Event::Stream(_)
                | Event::DatagramReceived
                | Event::DatagramsUnblocked => {}
            }
        }
        let mut datagrams = Vec::new();
        let mut buffer = Vec::new();
        while let Some(transmit) = connection.poll_transmit(now, 1, &mut buffer) {
            datagrams.push(buffer[..transmit.size].to_vec());
            buffer.clear();
        }
        datagrams
    }
}

/// A client and a server joined by a link without loss or delay.
pub(super) struct Pair {
    pub(super) client: End,
    pub(super) server: End,
    now: Instant,
}

impl Pair {
    pub(super) fn connect(
        client: Arc<dyn crypto::ClientConfig>,
        server: Arc<dyn crypto::ServerConfig>,
    ) -> Self {
        #[expect(clippy::disallowed_methods, reason = "an origin for virtual time; nothing depends on it")]
        let now = Instant::now();
        let address = |host| SocketAddr::from((Ipv4Addr::new(192, 0, 2, host), 4433));
        let mut pair =
            Self { client: End::new(address(1), None), server: End::new(address(2), Some(server)), now };
        let mut config = ClientConfig::new(client);
        config.transport_config(Arc::new(TransportConfig::default()));
        let dialled = pair.client.endpoint.connect(now, config, pair.server.address, SERVER_NAME);
        let (handle, connection) = dialled.unwrap();
        pair.client.handle = Some(handle);
        pair.client.connection = Some(connection);
        pair.run(Duration::from_secs(1));
        pair
    }

    /// Carries datagrams and fires timers for `period`.
    pub(super) fn run(&mut self, period: Duration) {
        let end = self.now + period;
        loop {
            let up = self.client.transmit(self.now);
            let down = self.server.transmit(self.now);
            for datagram in &up {
                self.server.receive(self.now, self.client.address, datagram);
            }
            for datagram in &down {
                self.client.receive(self.now, self.server.address, datagram);
            }
            if !up.is_empty() || !down.is_empty() {
                continue;
            }
            let ends = [&mut self.client, &mut self.server];
            let timers = ends.into_iter().filter_map(|end| end.connection.as_mut()?.poll_timeout());
            match timers.min() {
                Some(at) if at <= end => self.now = self.now.max(at),
                Some(_) | None => break,
            }
            for end in [&mut self.client, &mut self.server] {
                if let Some(connection) = &mut end.connection {
                    connection.handle_timeout(self.now);
                }
            }
        }
        self.now = end;
    }

    pub(super) fn is_up(&self) -> bool {
        [&self.client, &self.server].iter().all(|end| end.connected && end.lost.is_none())
    }
}

/// A pair of ends whose keys are each other's.
pub(super) fn friends(first: tls::FirstSuite) -> Pair {
    let (dialler, listener) = (identity(1), identity(2));
    let client =
        tls::client_crypto_with(first, tls::KeyExchange::Hybrid, &dialler, &[*listener.public_key()])
            .unwrap();
    let clients = Clients::with(dialler.public_key());
    let server =
        tls::server_crypto_with(tls::FirstSuite::Aes128, tls::KeyExchange::Hybrid, &listener, clients)
            .unwrap();
    Pair::connect(client, server)
}

//! A client that knocks and a quinn-proto server in memory and virtual time, with the test in between: it sees each
//! datagram of the client and decides what becomes of it.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use quinn_proto::{
    ClientConfig, Connection, ConnectionError, ConnectionHandle, ConnectionId, DatagramEvent, Endpoint,
    Event, RandomConnectionIdGenerator, TransportConfig, crypto,
};
use ring::{hkdf, hmac};
use wire::cid::CONNECTION_ID_BYTES;
use zeroize::Zeroizing;

use crate::{
    client::{Knock, arm},
    identity::Identity,
    knock::ServerKey,
    suite::SuiteClientConfig,
    tls::{
        ClientKeys, KeyExchange, Refusal, TlsIdentity, client_crypto, endpoint_config, server_config,
        server_crypto,
    },
};

/// The connection ID to which the client sends its first packet.
pub(crate) const DCID: [u8; 8] = [0xd0, 1, 2, 3, 4, 5, 6, 7];

/// The unix time at which the knock is made.
pub(crate) const SECONDS: u64 = 1_700_000_000;

pub(crate) fn client_identity() -> Identity {
    Identity::from_seed(Zeroizing::new([1; 32])).unwrap()
}

pub(crate) fn server_identity() -> Identity {
    Identity::from_seed(Zeroizing::new([2; 32])).unwrap()
}

pub(crate) fn server_key() -> ServerKey {
    ServerKey::new(&server_identity().public_key()).unwrap()
}

/// The TLS of the server, for any client.
pub(crate) fn server_tls() -> Arc<dyn crypto::ServerConfig> {
    #[derive(Debug)]
    struct Anyone;
    impl ClientKeys for Anyone {
        fn is_allowed(&self, _key: &[u8; 32]) -> bool {
            true
        }
        fn refused(&self, _refusal: &Refusal) {}
    }
    let identity = TlsIdentity::from_pkcs8(&server_identity().pkcs8_der()).unwrap();
    server_crypto(&identity, KeyExchange::Hybrid, Arc::new(Anyone)).unwrap()
}

pub(crate) fn client_tls(key_exchange: KeyExchange) -> Arc<SuiteClientConfig> {
    let identity = TlsIdentity::from_pkcs8(&client_identity().pkcs8_der()).unwrap();
    client_crypto(&identity, key_exchange, &[server_identity().public_key().0]).unwrap()
}

pub(crate) fn knock() -> Knock {
    Knock {
        own: Arc::new(client_identity().agreement_key()),
        server: Arc::new(server_key()),
        unix_seconds: SECONDS,
        ephemeral: Zeroizing::new([3; 32]),
        fallback: false,
    }
}

/// The configuration of a client that knocks.
pub(crate) fn knocking() -> ClientConfig {
    knocking_with(KeyExchange::X25519)
}

/// The same, by the key exchange that its ClientHello offers: it fills two datagrams with the hybrid.
pub(crate) fn knocking_with(key_exchange: KeyExchange) -> ClientConfig {
    arm(client_tls(key_exchange), knock(), Arc::new(|| ConnectionId::new(&DCID)))
}

/// The key that opens no token.
pub(crate) fn no_tokens() -> Arc<dyn crypto::HandshakeTokenKey> {
    Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&[3; 32]))
}

/// The fate of a datagram that the client sent.
pub(crate) enum Fate {
    Pass,
    Lose,
    /// The datagram is lost, and the client gets this one.
    Answer(Vec<u8>),
}

/// A connection that began at the server.
#[derive(Debug, PartialEq)]
pub(crate) struct NewConnection {
    pub(crate) original_dcid: Vec<u8>,
    pub(crate) validated: bool,
    pub(crate) may_retry: bool,
}

pub(crate) struct Side {
    pub(crate) endpoint: Endpoint,
    address: SocketAddr,
    pub(crate) connection: Option<(ConnectionHandle, Connection)>,
    pub(crate) connected: bool,
    pub(crate) lost: Option<ConnectionError>,
}

impl Side {
    fn new(address: SocketAddr, server: Option<Arc<quinn_proto::ServerConfig>>) -> Self {
        let ids = || -> Box<dyn quinn_proto::ConnectionIdGenerator> {
            Box::new(RandomConnectionIdGenerator::new(CONNECTION_ID_BYTES))
        };
        let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &[1; 64]));
        let config = Arc::new(endpoint_config(ids, reset_key, Some([4; 32])));
        let endpoint = Endpoint::new(config, server, true, None);
        Self { endpoint, address, connection: None, connected: false, lost: None }
    }

    fn transmit(&mut self, now: Instant) -> Vec<Vec<u8>> {
        let Some((handle, connection)) = &mut self.connection else { return Vec::new() };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
        while let Some(event) = connection.poll() {
            match event {
                Event::Connected => self.connected = true,
                Event::ConnectionLost { reason } => self.lost = Some(reason),
                Event::HandshakeDataReady
                | Event::Stream(_)
                | Event::DatagramReceived
                | Event::DatagramsUnblocked => {}
            }
        }
        let (mut datagrams, mut buffer) = (Vec::new(), Vec::new());
        while let Some(transmit) = connection.poll_transmit(now, 1, &mut buffer) {
            datagrams.push(buffer[..transmit.size].to_vec());
            buffer.clear();
        }
        datagrams
    }
}

/// The two, and what passed between them.
pub(crate) struct Link {
    pub(crate) client: Side,
    pub(crate) server: Side,
    pub(crate) now: Instant,
    /// Every datagram of the client, and when it was sent.
    pub(crate) up: Vec<(Instant, Vec<u8>)>,
    pub(crate) connections: Vec<NewConnection>,
    /// Answers of the server's endpoint to unauthenticated senders.
    pub(crate) responses: usize,
}

impl Link {
    /// Dials with `config`; `ipv6` chooses the addresses.
    pub(crate) fn new(
        config: ClientConfig,
        token_key: Arc<dyn crypto::HandshakeTokenKey>,
        ipv6: bool,
    ) -> Self {
        #[expect(clippy::disallowed_methods, reason = "an origin for virtual time; nothing depends on it")]
        let now = Instant::now();
        let address = |host: u8, port| match ipv6 {
            true => SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host.into()), port)),
            false => SocketAddr::from((Ipv4Addr::new(192, 0, 2, host), port)),
        };
        let server = server_config(server_tls(), Arc::new(TransportConfig::default()), token_key);
        let mut link = Self {
            client: Side::new(address(1, 1111), None),
            server: Side::new(address(2, 4433), Some(Arc::new(server))),
            now,
            up: Vec::new(),
            connections: Vec::new(),
            responses: 0,
        };
        link.dial(config);
        link
    }

    fn dial(&mut self, mut config: ClientConfig) {
        config.transport_config(Arc::new(TransportConfig::default()));
        let dialled = self.client.endpoint.connect(self.now, config, self.server.address, "culvert");
        self.client.connection = Some(dialled.unwrap());
    }

    pub(crate) fn client_address(&self) -> SocketAddr {
        self.client.address
    }

    pub(crate) fn server_address(&self) -> SocketAddr {
        self.server.address
    }

    /// Carries datagrams and fires timers for `period`, or until both are connected; each datagram of the client has the
    /// `fate` that is decided for it, by its number and its bytes. Whether both are connected.
    pub(crate) fn run(&mut self, period: Duration, mut fate: impl FnMut(usize, &[u8]) -> Fate) -> bool {
        let end = self.now + period;
        loop {
            let up = self.client.transmit(self.now);
            let down = self.server.transmit(self.now);
            if up.is_empty() && down.is_empty() {
                if self.is_connected() || !self.wait(end) {
                    return self.is_connected();
                }
                continue;
            }
            for datagram in up {
                match fate(self.up.len(), &datagram) {
                    Fate::Pass => self.server_receives(&datagram),
                    Fate::Lose => {}
                    Fate::Answer(answer) => self.client_receives(&answer),
                }
                self.up.push((self.now, datagram));
            }
            for datagram in down {
                self.client_receives(&datagram);
            }
            self.now += Duration::from_millis(5);
        }
    }

    fn is_connected(&self) -> bool {
        [&self.client, &self.server].iter().all(|side| side.connected && side.lost.is_none())
    }

    /// Goes to the next timer; `false` if there is none before `end`.
    fn wait(&mut self, end: Instant) -> bool {
        let sides = [&mut self.client, &mut self.server];
        let timers = sides.into_iter().filter_map(|side| side.connection.as_mut()?.1.poll_timeout());
        let Some(at) = timers.min().filter(|at| *at <= end) else { return false };
        self.now = self.now.max(at);
        for side in [&mut self.client, &mut self.server] {
            if let Some((_, connection)) = &mut side.connection {
                connection.handle_timeout(self.now);
            }
        }
        true
    }

    fn client_receives(&mut self, datagram: &[u8]) {
        let (bytes, from) = (BytesMut::from(datagram), self.server.address);
        let event = self.client.endpoint.handle(self.now, from, None, None, bytes, &mut Vec::new());
        if let (Some(DatagramEvent::ConnectionEvent(_, event)), Some((_, connection))) =
            (event, &mut self.client.connection)
        {
            connection.handle_event(event);
        }
    }

    fn server_receives(&mut self, datagram: &[u8]) {
        let (bytes, from, mut response) = (BytesMut::from(datagram), self.client.address, Vec::new());
        match self.server.endpoint.handle(self.now, from, None, None, bytes, &mut response) {
            Some(DatagramEvent::NewConnection(incoming)) => {
                self.connections.push(NewConnection {
                    original_dcid: incoming.orig_dst_cid().to_vec(),
                    validated: incoming.remote_address_validated(),
                    may_retry: incoming.may_retry(),
                });
                let accepted = self.server.endpoint.accept(incoming, self.now, &mut response, None);
                if let Ok(connection) = accepted {
                    self.server.connection = Some(connection);
                }
            }
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                let (_, connection) = self.server.connection.as_mut().unwrap();
                connection.handle_event(event);
            }
            Some(DatagramEvent::Response(_)) => self.responses += 1,
            None => {}
        }
    }
}

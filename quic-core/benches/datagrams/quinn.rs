//! Two quinn-proto endpoints in memory, tuned for datagrams: no congestion control, no pacing, an ACK for 64 packets,
//! GSO batches, the same suite from the same library, payloads that are shared and not copied.

use std::any::Any;
use std::hint::black_box;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use quinn_proto::congestion::{Controller, ControllerFactory};
use quinn_proto::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn_proto::{
    AckFrequencyConfig, ClientConfig, Connection, ConnectionHandle, DatagramEvent, Endpoint, EndpointConfig,
    Event, ServerConfig, TransportConfig,
};
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider};
use rustls::version::TLS13;
use rustls_pki_types::PrivatePkcs8KeyDer;

use crate::{BATCH, PAYLOAD_LEN, clock};

/// A client that sends and a server that receives, connected.
pub(crate) struct Endpoints {
    client: End,
    server: End,
    payload: Bytes,
    now: Instant,
}

/// One endpoint and its connection.
struct End {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    address: SocketAddr,
    transmit: Vec<u8>,
}

impl Endpoints {
    pub(crate) fn new() -> Self {
        let (client_config, server_config) = configs();
        let now = clock();
        let address = |port| SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        let mut client = End::new(None, address(1));
        let server = End::new(Some(server_config), address(2));
        let connection = client.endpoint.connect(now, client_config, server.address, "localhost");
        client.connection = Some(connection.expect("the configuration is complete"));

        let mut endpoints = Self { client, server, payload: Bytes::from(vec![7; PAYLOAD_LEN]), now };
        for _ in 0..100 {
            endpoints.now += Duration::from_millis(1);
            endpoints.exchange();
        }
        assert!(!endpoints.client.connection().is_handshaking(), "the handshake took 100 round trips");
        endpoints
    }

    /// One batch is sent, received, delivered and acknowledged.
    pub(crate) fn turn(&mut self) {
        self.now += Duration::from_micros(BATCH as u64);
        for _ in 0..BATCH {
            let sent = self.client.connection().datagrams().send(self.payload.clone(), false);
            sent.expect("the datagram fits, and so does the batch");
        }
        self.exchange();
        let mut datagrams = self.server.connection().datagrams();
        let received = std::iter::from_fn(|| datagrams.recv()).map(black_box).count();
        assert_eq!(received, BATCH);
    }

    fn exchange(&mut self) {
        self.client.send_to(&mut self.server, self.now);
        self.server.send_to(&mut self.client, self.now);
    }
}

impl End {
    fn new(server: Option<ServerConfig>, address: SocketAddr) -> Self {
        let config = Arc::new(EndpointConfig::default());
        let endpoint = Endpoint::new(config, server.map(Arc::new), false, Some([address.port() as u8; 32]));
        Self { endpoint, connection: None, address, transmit: Vec::with_capacity(1 << 16) }
    }

    fn connection(&mut self) -> &mut Connection {
        &mut self.connection.as_mut().expect("the connection was made in the beginning").1
    }

    /// Sends all that is to be sent, in GSO batches; the other end takes it as a GRO receiver does.
    fn send_to(&mut self, other: &mut Self, now: Instant) {
        let Some((_, connection)) = &mut self.connection else { return };
        while connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        self.transmit.clear();
        while let Some(transmit) = connection.poll_transmit(now, BATCH, &mut self.transmit) {
            let mut received = BytesMut::from(&self.transmit[..transmit.size]);
            let segment_size = transmit.segment_size.unwrap_or(transmit.size);
            while !received.is_empty() {
                let segment = received.split_to(segment_size.min(received.len()));
                other.receive(segment, self.address, now);
            }
            self.transmit.clear();
        }
        self.drain_events();
    }

    fn receive(&mut self, datagram: BytesMut, from: SocketAddr, now: Instant) {
        let event = self.endpoint.handle(now, from, None, None, datagram, &mut self.transmit);
        match event {
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                self.connection().handle_event(event);
                self.drain_events();
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                let accepted = self.endpoint.accept(incoming, now, &mut self.transmit, None);
                self.connection = Some(accepted.map_err(|error| error.cause).expect("the client is welcome"));
            }
            Some(DatagramEvent::Response(_)) | None => {}
        }
    }

    fn drain_events(&mut self) {
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
        while let Some(event) = connection.poll() {
            assert!(!matches!(event, Event::ConnectionLost { .. }), "{event:?}");
        }
    }
}

fn configs() -> (ClientConfig, ServerConfig) {
    let certified = rcgen::generate_simple_self_signed(["localhost".into()]).expect("the name is valid");
    let certificate = certified.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).expect("the certificate was made just now");
    let provider = Arc::new(CryptoProvider {
        cipher_suites: vec![cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..default_provider()
    });

    let client = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .expect("the suite is of TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let server = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("the suite is of TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.into())
        .expect("the key belongs to the certificate");

    let mut ack_frequency = AckFrequencyConfig::default();
    ack_frequency.ack_eliciting_threshold(63_u32.into());
    let mut transport = TransportConfig::default();
    transport
        .ack_frequency_config(Some(ack_frequency))
        .congestion_controller_factory(Arc::new(NoCongestion))
        .datagram_receive_buffer_size(Some(64 << 20))
        .datagram_send_buffer_size(64 << 20)
        .mtu_discovery_config(None)
        .initial_mtu(1200)
        .max_idle_timeout(None);
    let transport = Arc::new(transport);

    let client = QuicClientConfig::try_from(client).expect("the suite serves Initial packets, too");
    let server = QuicServerConfig::try_from(server).expect("the suite serves Initial packets, too");
    let mut client = ClientConfig::new(Arc::new(client));
    client.transport_config(Arc::clone(&transport));
    let mut server = ServerConfig::with_crypto(Arc::new(server));
    server.transport_config(transport);
    (client, server)
}

/// A window without end, which turns pacing off as well.
#[derive(Clone)]
struct NoCongestion;

impl ControllerFactory for NoCongestion {
    fn build(self: Arc<Self>, _now: Instant, _current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Self)
    }
}

impl Controller for NoCongestion {
    fn on_congestion_event(&mut self, _now: Instant, _sent: Instant, _persistent: bool, _lost_bytes: u64) {}

    fn on_mtu_update(&mut self, _new_mtu: u16) {}

    fn window(&self) -> u64 {
        1 << 40
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

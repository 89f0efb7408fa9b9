//! Two quinn-proto endpoints, set up for datagrams as well as they can be: a window that nothing fills, so no pacing, an ACK
//! for 64 packets, GSO batches, the same suite from the same library, payloads that are shared instead of copied.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use quinn_proto::congestion::NewRenoConfig;
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

const SERVER_NAME: &str = "localhost";

/// Bytes of a packet: the payload and what a short header, a frame and a tag add at most.
const MTU: u16 = PAYLOAD_LEN as u16 + 64;

/// A client that sends and a server that receives, connected.
pub(crate) struct Endpoints {
    client: End,
    server: End,
    payload: Bytes,
    now: Instant,
}

struct End {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    address: SocketAddr,
    outgoing: Vec<u8>,
}

impl Endpoints {
    pub(crate) fn new() -> Self {
        let (client_config, server_config) = configs();
        let now = clock();
        let (mut client, server) = (End::new(None, 1), End::new(Some(Arc::new(server_config)), 2));
        let connection = client.endpoint.connect(now, client_config, server.address, SERVER_NAME);
        client.connection = Some(connection.expect("the configuration is complete"));
        let mut endpoints = Self { client, server, payload: Bytes::from(vec![7; PAYLOAD_LEN]), now };
        for _ in 0..50 {
            endpoints.now += Duration::from_millis(1);
            endpoints.exchange();
        }
        assert!(!endpoints.client.connection().is_handshaking(), "the handshake took 50 round trips");
        endpoints
    }

    /// One batch is sent, received, delivered and acknowledged, at a million packets per second.
    pub(crate) fn turn(&mut self) {
        self.now += Duration::from_micros(BATCH as u64);
        for _ in 0..BATCH {
            let sent = self.client.connection().datagrams().send(self.payload.clone(), false);
            sent.expect("the datagram fits, and so does the batch");
        }
        self.exchange();
        let mut datagrams = self.server.connection().datagrams();
        assert_eq!(std::iter::from_fn(|| datagrams.recv()).map(black_box).count(), BATCH);
    }

    fn exchange(&mut self) {
        self.client.hand_to(&mut self.server, self.now);
        self.server.hand_to(&mut self.client, self.now);
    }
}

impl End {
    fn new(server: Option<Arc<ServerConfig>>, port: u16) -> Self {
        let endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), server, false, None);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self { endpoint, connection: None, address, outgoing: Vec::new() }
    }

    fn connection(&mut self) -> &mut Connection {
        &mut self.connection.as_mut().expect("the connection was made in the beginning").1
    }

    /// Hands over all that this end has to send.
    fn hand_to(&mut self, other: &mut Self, now: Instant) {
        let Some((_, connection)) = &mut self.connection else { return };
        while connection.poll_timeout().is_some_and(|due| due <= now) {
            connection.handle_timeout(now);
        }
        self.outgoing.clear();
        while let Some(transmit) = connection.poll_transmit(now, BATCH, &mut self.outgoing) {
            // One allocation for a batch, as a receiver with GRO has it.
            let mut batch = BytesMut::from(&self.outgoing[..transmit.size]);
            let packet = transmit.segment_size.unwrap_or(transmit.size);
            while !batch.is_empty() {
                other.take(batch.split_to(packet.min(batch.len())), self.address, now);
            }
            self.outgoing.clear();
        }
        self.handle_events();
    }

    fn take(&mut self, packet: BytesMut, from: SocketAddr, now: Instant) {
        match self.endpoint.handle(now, from, None, None, packet, &mut self.outgoing) {
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                self.connection().handle_event(event);
                self.handle_events();
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                let accepted = self.endpoint.accept(incoming, now, &mut self.outgoing, None);
                self.connection =
                    Some(accepted.map_err(|refused| refused.cause).expect("the client is welcome"));
            }
            Some(DatagramEvent::Response(_)) | None => {}
        }
    }

    fn handle_events(&mut self) {
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(answer);
            }
        }
        while let Some(event) = connection.poll() {
            assert!(!matches!(event, Event::ConnectionLost { .. }), "{event:?}");
        }
    }
}

fn configs() -> (ClientConfig, ServerConfig) {
    let certified = rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()]).expect("the name is valid");
    let certificate = certified.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).expect("the certificate was made just now");
    let cipher_suites = vec![cipher_suite::TLS13_AES_128_GCM_SHA256];
    let provider = Arc::new(CryptoProvider { cipher_suites, ..default_provider() });
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
    let client = QuicClientConfig::try_from(client).expect("the suite serves Initial packets, too");
    let server = QuicServerConfig::try_from(server).expect("the suite serves Initial packets, too");

    let mut acks = AckFrequencyConfig::default();
    // One more than this many packets wait for an ACK.
    acks.ack_eliciting_threshold(63_u32.into());
    // A window that nothing fills: neither congestion control nor pacing limits the sender.
    let mut window = NewRenoConfig::default();
    window.initial_window(u32::MAX.into());
    let mut transport = TransportConfig::default();
    transport
        .initial_mtu(MTU)
        .mtu_discovery_config(None)
        .max_idle_timeout(None)
        .ack_frequency_config(Some(acks))
        .congestion_controller_factory(Arc::new(window))
        .datagram_send_buffer_size(8 << 20)
        .datagram_receive_buffer_size(Some(8 << 20));
    let transport = Arc::new(transport);
    let mut client = ClientConfig::new(Arc::new(client));
    client.transport_config(Arc::clone(&transport));
    let mut server = ServerConfig::with_crypto(Arc::new(server));
    server.transport_config(transport);
    (client, server)
}

//! Two quinn-proto endpoints, set up for datagrams as well as they can be: a window that nothing fills, so no pacing, an ACK
//! for 64 packets, GSO batches, the same suite from the same library (where the CPU has AES instructions), payloads that are shared instead of copied.

use std::{
    hint::black_box,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use bytes::{Bytes, BytesMut};
use gate::{
    identity::Identity,
    tls::{self, ClientKeys, KeyExchange, Refusal, TlsIdentity},
};
use quinn_proto::{
    AckFrequencyConfig, ClientConfig, Connection, ConnectionHandle, DatagramEvent, Endpoint, EndpointConfig,
    Event, ServerConfig, TransportConfig, congestion::NewRenoConfig,
};

use crate::bench::memory::carrier::{BATCH, Carrier};

/// A handshake takes two round trips; each is a millisecond of the clock that the endpoints are given.
const MOST_ROUND_TRIPS: u32 = 50;

/// The bytes that a short-header packet adds to a payload, and some to spare.
const PACKET_OVERHEAD: u16 = 64;

/// A connected client, which sends, and server, which receives.
pub(super) struct Endpoints {
    client: Side,
    server: Side,
    payload: Bytes,
    /// The handshake's clock runs ahead of the machine's by this.
    ahead: Duration,
}

struct Side {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    address: SocketAddr,
    outgoing: Vec<u8>,
    lost: bool,
}

impl Endpoints {
    /// Endpoints that carry payloads of `size` bytes.
    pub(super) fn new(size: usize) -> anyhow::Result<Self> {
        let mtu = u16::try_from(size).context("the payload is larger than a packet")? + PACKET_OVERHEAD;
        let (client_config, server_config) = configs(mtu.max(1_200))?;
        let start = base::clock::Clock::now(&base::clock::SystemClock);
        let mut client = Side::new(None, 4_001);
        let server = Side::new(Some(Arc::new(server_config)), 4_002);
        client.connection =
            Some(client.endpoint.connect(start, client_config, server.address, tls::SERVER_NAME)?);
        let mut endpoints =
            Self { client, server, payload: Bytes::from(vec![7; size]), ahead: Duration::ZERO };
        for _ in 0..MOST_ROUND_TRIPS {
            endpoints.ahead += Duration::from_millis(1);
            endpoints.hub(start + endpoints.ahead)?;
        }
        match &endpoints.client.connection {
            Some((_, connection)) if !connection.is_handshaking() => Ok(endpoints),
            Some(_) | None => Err(anyhow!("two quinn-proto endpoints did not finish their handshake")),
        }
    }

    fn hub(&mut self, now: Instant) -> anyhow::Result<()> {
        self.client.hand_to(&mut self.server, now)?;
        self.server.hand_to(&mut self.client, now)
    }
}

impl Carrier for Endpoints {
    fn carry(&mut self, now: Instant) -> anyhow::Result<usize> {
        let now = now + self.ahead;
        for _ in 0..BATCH {
            self.client.connection()?.datagrams().send(self.payload.clone(), false)?;
        }
        self.hub(now)?;
        let mut datagrams = self.server.connection()?.datagrams();
        Ok(std::iter::from_fn(|| datagrams.recv()).map(black_box).count())
    }
}

impl Side {
    fn new(server: Option<Arc<ServerConfig>>, port: u16) -> Self {
        let config = Arc::new(EndpointConfig::default());
        Self {
            endpoint: Endpoint::new(config, server, false, None),
            connection: None,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            outgoing: Vec::new(),
            lost: false,
        }
    }

    fn connection(&mut self) -> anyhow::Result<&mut Connection> {
        match &mut self.connection {
            Some((_, connection)) if !self.lost => Ok(connection),
            Some(_) | None => Err(anyhow!("the connection between two quinn-proto endpoints was lost")),
        }
    }

    /// Hands over all that this side has to send.
    fn hand_to(&mut self, other: &mut Self, now: Instant) -> anyhow::Result<()> {
        let Some((_, connection)) = &mut self.connection else { return Ok(()) };
        while connection.poll_timeout().is_some_and(|due| due <= now) {
            connection.handle_timeout(now);
        }
        self.outgoing.clear();
        while let Some(transmit) = connection.poll_transmit(now, BATCH, &mut self.outgoing) {
            // One allocation for a batch, as a receiver with GRO has it.
            let mut batch = BytesMut::from(&self.outgoing[..transmit.size]);
            let packet = transmit.segment_size.unwrap_or(transmit.size);
            while !batch.is_empty() {
                let next = batch.split_to(packet.min(batch.len()));
                other.take(next, self.address, now)?;
            }
            self.outgoing.clear();
        }
        self.handle_events();
        Ok(())
    }

    fn take(&mut self, packet: BytesMut, from: SocketAddr, now: Instant) -> anyhow::Result<()> {
        match self.endpoint.handle(now, from, None, None, packet, &mut self.outgoing) {
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                self.connection()?.handle_event(event);
                self.handle_events();
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                let accepted = self.endpoint.accept(incoming, now, &mut self.outgoing, None);
                self.connection = Some(accepted.map_err(|refused| refused.cause)?);
            }
            Some(DatagramEvent::Response(_)) | None => {}
        }
        Ok(())
    }

    fn handle_events(&mut self) {
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(answer);
            }
        }
        while let Some(event) = connection.poll() {
            self.lost |= matches!(event, Event::ConnectionLost { .. });
        }
    }
}

/// The server's allowlist: the handshake is not what is measured.
struct Everyone;

impl ClientKeys for Everyone {
    fn is_allowed(&self, _key: &[u8; 32]) -> bool {
        true
    }

    fn refused(&self, _refusal: &Refusal) {}
}

fn configs(mtu: u16) -> anyhow::Result<(ClientConfig, ServerConfig)> {
    let identity = TlsIdentity::from_pkcs8(&Identity::generate()?.pkcs8_der())?;
    let client = tls::client_crypto(&identity, KeyExchange::X25519, &[*identity.public_key()])?;
    let server = tls::server_crypto(&identity, KeyExchange::X25519, Arc::new(Everyone))?;

    let mut acks = AckFrequencyConfig::default();
    // One more than this many packets wait for an ACK.
    acks.ack_eliciting_threshold(63_u32.into());
    // A window that nothing fills: neither congestion control nor pacing limits the sender.
    let mut window = NewRenoConfig::default();
    window.initial_window(u32::MAX.into());
    let mut transport = TransportConfig::default();
    transport
        .initial_mtu(mtu)
        .mtu_discovery_config(None)
        .max_idle_timeout(None)
        .ack_frequency_config(Some(acks))
        .congestion_controller_factory(Arc::new(window))
        .datagram_send_buffer_size(8 << 20)
        .datagram_receive_buffer_size(Some(8 << 20));
    let transport = Arc::new(transport);

    let mut client = ClientConfig::new(client);
    client.transport_config(Arc::clone(&transport));
    let mut server = ServerConfig::with_crypto(server);
    server.transport_config(transport);
    Ok((client, server))
}

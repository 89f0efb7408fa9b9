//! quinn-proto: a stream, or datagrams, with a window that never ends and a clock of its own.

use std::{
    any::Any,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use bytes::{Bytes, BytesMut};
use quinn_proto::{
    ClientConfig, Connection, ConnectionHandle, DatagramEvent, Dir, Endpoint, EndpointConfig, ReadError,
    ServerConfig, StreamId, TransportConfig, WriteError,
    congestion::{Controller, ControllerFactory},
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};

use super::{MOST_STEPS, Pair, TOO_LARGE};
use crate::{certificate, clock, transport};

/// Segments of a GSO batch.
const SEGMENTS: usize = 64;

/// How far the clock moves in a step.
const STEP: Duration = Duration::from_micros(50);

/// A client that sends and a server that receives, connected.
struct Ends {
    client: End,
    server: End,
    now: Instant,
}

struct End {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    address: SocketAddr,
    transmit: Vec<u8>,
}

impl Ends {
    fn connected() -> anyhow::Result<Self> {
        let (der, server) = certificate::generate()?;
        let settings = Arc::new(settings());
        let mut server = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(server)?));
        server.transport_config(Arc::clone(&settings));
        let mut client = ClientConfig::new(Arc::new(QuicClientConfig::try_from(certificate::client(der)?)?));
        client.transport_config(settings);
        let now = clock::instant();
        let mut ends = Self { client: End::new(None, 1), server: End::new(Some(server), 2), now };
        ends.client.connection =
            Some(ends.client.endpoint.connect(now, client, ends.server.address, certificate::NAME)?);
        for _ in 0..MOST_STEPS {
            ends.step()?;
            if ends.client.connection().is_some_and(|client| !client.is_handshaking())
                && ends.server.connection.is_some()
            {
                return Ok(ends);
            }
        }
        anyhow::bail!("the handshake does not end")
    }

    /// Carries all packets both ways, once.
    fn step(&mut self) -> anyhow::Result<()> {
        self.now += STEP;
        self.client.send_to(&mut self.server, self.now)?;
        self.server.send_to(&mut self.client, self.now)
    }
}

impl End {
    fn new(server: Option<ServerConfig>, port: u16) -> Self {
        let endpoint = Endpoint::new(Arc::new(EndpointConfig::default()), server.map(Arc::new), true, None);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self { endpoint, connection: None, address, transmit: Vec::with_capacity(1 << 16) }
    }

    fn connection(&mut self) -> Option<&mut Connection> {
        self.connection.as_mut().map(|(_, connection)| connection)
    }

    fn send_to(&mut self, other: &mut Self, now: Instant) -> anyhow::Result<()> {
        let Some((_, connection)) = &mut self.connection else { return Ok(()) };
        while connection.poll_timeout().is_some_and(|at| at <= now) {
            connection.handle_timeout(now);
        }
        self.transmit.clear();
        while let Some(transmit) = connection.poll_transmit(now, SEGMENTS, &mut self.transmit) {
            let mut sent = BytesMut::from(&self.transmit[..transmit.size]);
            let segment = transmit.segment_size.unwrap_or(transmit.size);
            while !sent.is_empty() {
                other.receive(sent.split_to(segment.min(sent.len())), self.address, now)?;
            }
            self.transmit.clear();
        }
        self.drain();
        Ok(())
    }

    fn receive(&mut self, datagram: BytesMut, from: SocketAddr, now: Instant) -> anyhow::Result<()> {
        match self.endpoint.handle(now, from, None, None, datagram, &mut self.transmit) {
            Some(DatagramEvent::ConnectionEvent(_, event)) => {
                self.connection().context("the event is of a connection")?.handle_event(event);
                self.drain();
            }
            Some(DatagramEvent::NewConnection(incoming)) => {
                let accepted = self.endpoint.accept(incoming, now, &mut self.transmit, None);
                self.connection = Some(accepted.map_err(|error| error.cause)?);
            }
            Some(DatagramEvent::Response(_)) | None => {}
        }
        Ok(())
    }

    /// What endpoint and connection have for each other; what the connection has for its user is looked at elsewhere.
    fn drain(&mut self) {
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
        while connection.poll().is_some() {}
    }
}

pub(super) struct Streams {
    ends: Ends,
    sending: StreamId,
    receiving: Option<StreamId>,
}

impl Streams {
    pub(super) fn pair() -> anyhow::Result<Box<dyn Pair>> {
        let mut ends = Ends::connected()?;
        let client = ends.client.connection().context("it is connected")?;
        let sending = client.streams().open(Dir::Uni).context("the server allows a stream")?;
        Ok(Box::new(Self { ends, sending, receiving: None }))
    }

    fn read(&mut self) -> anyhow::Result<usize> {
        let server = self.ends.server.connection().context("it is connected")?;
        if self.receiving.is_none() {
            self.receiving = server.streams().accept(Dir::Uni);
        }
        let Some(receiving) = self.receiving else { return Ok(0) };
        let mut stream = server.recv_stream(receiving);
        let mut chunks = stream.read(true)?;
        let mut received = 0;
        loop {
            match chunks.next(usize::MAX) {
                Ok(Some(chunk)) => received += chunk.bytes.len(),
                Ok(None) | Err(ReadError::Blocked) => break,
                Err(error @ ReadError::Reset(_)) => return Err(error.into()),
            }
        }
        // The next step transmits anyway.
        let _transmit = chunks.finalize();
        Ok(received)
    }
}

impl Pair for Streams {
    fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()> {
        let (mut left, mut part, mut missing) = (count, 0, message.len() * count);
        for _ in 0..MOST_STEPS {
            let client = self.ends.client.connection().context("it is connected")?;
            let mut stream = client.send_stream(self.sending);
            while left > 0 {
                match stream.write(&message[part..]) {
                    Ok(written) => part += written,
                    Err(WriteError::Blocked) => break,
                    Err(error) => return Err(error.into()),
                }
                if part == message.len() {
                    (left, part) = (left - 1, 0);
                }
            }
            self.ends.step()?;
            missing -= self.read()?;
            if missing == 0 {
                return Ok(());
            }
        }
        anyhow::bail!("{missing} bytes did not arrive")
    }
}

pub(super) struct Datagrams {
    ends: Ends,
}

impl Datagrams {
    pub(super) fn pair() -> anyhow::Result<Box<dyn Pair>> {
        let mut ends = Ends::connected()?;
        // Path MTU discovery comes to its end.
        for _ in 0..100 {
            ends.now += Duration::from_millis(10);
            ends.step()?;
        }
        Ok(Box::new(Self { ends }))
    }
}

impl Pair for Datagrams {
    fn turn(&mut self, message: &[u8], count: usize) -> anyhow::Result<()> {
        let client = self.ends.client.connection().context("it is connected")?;
        let largest = client.datagrams().max_size().unwrap_or_default();
        anyhow::ensure!(message.len() <= largest, "{TOO_LARGE}");
        for _ in 0..count {
            client.datagrams().send(Bytes::copy_from_slice(message), false)?;
        }
        let mut missing = count;
        for _ in 0..MOST_STEPS {
            self.ends.step()?;
            let mut datagrams = self.ends.server.connection().context("it is connected")?.datagrams();
            missing -= std::iter::from_fn(|| datagrams.recv()).count();
            if missing == 0 {
                return Ok(());
            }
        }
        anyhow::bail!("{missing} datagrams did not arrive")
    }
}

fn settings() -> TransportConfig {
    let mut settings = transport::quic::transport();
    settings.congestion_controller_factory(Arc::new(NoCongestion)).max_idle_timeout(None);
    settings
}

/// A window without end, which switches pacing off as well.
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

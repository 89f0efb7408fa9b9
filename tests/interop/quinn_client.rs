//! A peer in standard mode on stock quinn: no lanes, payloads in DATAGRAM frames of the connection itself.
//!
//! Its methods block; what they wait for must come within [`PATIENCE`].

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use culvert_tests::clock::PATIENCE;
use quinn::{
    ApplicationClose, ClientConfig, Connection, ConnectionError, Endpoint, RecvStream, SendStream,
    ServerConfig,
};
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    time::timeout,
};

use crate::{
    payload::{Payload, put_varint, take_varint, varint_length},
    protobuf::{Envelope, Field, Hello, Message, Service, fields},
    tls::Identity,
};

/// How long the answer to an opening may take before the opening is repeated.
const REPEAT_AFTER: Duration = Duration::from_millis(250);

/// A foreign implementation of Culvert: an identity, an instance, and the thread that drives its sockets.
#[derive(Debug)]
pub(crate) struct Site {
    identity: Identity,
    pub(crate) instance: [u8; 16],
    runtime: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A connection with the agent, and its control stream.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    site: &'a Site,
    connection: Connection,
    control: (SendStream, RecvStream),
    /// The lowest bit of the numbers of our flows.
    pub(crate) parity: u64,
    /// The agent's services, once it has said hello.
    services: Vec<Service>,
    next_flow: u64,
    _endpoint: Endpoint,
}

impl Site {
    pub(crate) fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        // `Site` is gone when this is an error, which ends the thread as well.
        let thread = thread::spawn(move || drop(runtime.block_on(stopped)));
        Self {
            identity: Identity::new(),
            instance: [7; 16],
            runtime: handle,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// The public key, as the agent's configuration wants it.
    pub(crate) fn key(&self) -> String {
        data_encoding::BASE64URL_NOPAD.encode(&self.identity.public)
    }

    /// What it says first in standard mode.
    pub(crate) fn hello(&self, services: &[Service]) -> Hello {
        Hello {
            protocol_version: 1,
            instance: self.instance.to_vec(),
            max_lanes: 0,
            services: services.to_vec(),
        }
    }

    /// Connects to the agent with the public key `agent`; nothing has been said yet.
    #[track_caller]
    pub(crate) fn dial(&self, address: SocketAddr, agent: &str) -> Session<'_> {
        self.try_dial(address, agent).unwrap()
    }

    #[track_caller]
    pub(crate) fn try_dial(&self, address: SocketAddr, agent: &str) -> Result<Session<'_>, ConnectionError> {
        let agent = public_key(agent);
        let config = ClientConfig::new(Arc::new(self.identity.client(agent)));
        self.wait("the agent to accept the connection", async {
            let endpoint = Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            // The name of an IP address is not sent.
            let connecting = endpoint.connect_with(config, address, "127.0.0.1").unwrap();
            let connection = connecting.await?;
            let control = connection.open_bi().await?;
            Ok(self.session(agent, endpoint, connection, control))
        })
    }

    /// Waits until the agent with the public key `agent` has dialled `address` and opened the control stream.
    #[track_caller]
    pub(crate) fn accept(&self, address: SocketAddr, agent: &str) -> Session<'_> {
        let agent = public_key(agent);
        let config = ServerConfig::with_crypto(Arc::new(self.identity.server(agent)));
        self.wait("the agent to dial", async {
            let endpoint = Endpoint::server(config, address).unwrap();
            let connection = endpoint.accept().await.unwrap().await.unwrap();
            let control = connection.accept_bi().await.unwrap();
            self.session(agent, endpoint, connection, control)
        })
    }

    fn session(
        &self,
        agent: [u8; 32],
        endpoint: Endpoint,
        connection: Connection,
        control: (SendStream, RecvStream),
    ) -> Session<'_> {
        assert_eq!(u64::from(control.0.id()), 0, "the dialler's first stream is the control stream");
        Session {
            site: self,
            connection,
            control,
            parity: (self.identity.public > agent).into(),
            services: Vec::new(),
            next_flow: 0,
            _endpoint: endpoint,
        }
    }

    /// Waits for `future`.
    #[track_caller]
    fn wait<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        let outcome = self.runtime.block_on(async { timeout(PATIENCE, future).await });
        outcome.unwrap_or_else(|_| panic!("waited {PATIENCE:?} for {what}"))
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

fn public_key(text: &str) -> [u8; 32] {
    data_encoding::BASE64URL_NOPAD.decode(text.as_bytes()).unwrap().try_into().unwrap()
}

/// The control stream.
impl Session<'_> {
    /// Says hello with `services`, and takes the agent's.
    #[track_caller]
    pub(crate) fn send_deferred_hello(&mut self, services: &[Service]) {
        let hello = self.site.hello(services).encode();
        self.send_message(&hello);
        self.take_hello();
    }

    /// Takes the agent's hello.
    #[track_caller]
    pub(crate) fn take_hello(&mut self) {
        let message = self.receive_message();
        let Envelope::Hello(hello) = message else { panic!("expected Hello: {message:?}") };
        assert_eq!((hello.protocol_version, hello.instance.len()), (1, 16));
        self.services = hello.services;
    }

    /// Sends `message` with its length before it.
    #[track_caller]
    pub(crate) fn send_message(&mut self, message: &[u8]) {
        let mut bytes = Vec::new();
        put_varint(&mut bytes, message.len() as u64);
        bytes.extend(message);
        self.send_bytes(&bytes);
    }

    /// Sends bytes as they are.
    #[track_caller]
    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) {
        self.site.wait("flow control", self.control.0.write_all(bytes)).unwrap();
    }

    #[track_caller]
    pub(crate) fn receive_message(&mut self) -> Envelope {
        let bytes = self.site.wait("a message", receive_message(&mut self.control.1));
        Envelope::decode(&bytes).unwrap_or_else(|| panic!("no Envelope: {bytes:02x?}"))
    }

    /// Whether the agent sends no message within `limit`.
    #[track_caller]
    pub(crate) fn no_message_within(&mut self, limit: Duration) -> bool {
        let first = self.control.1.read_chunk(1, true);
        self.site.runtime.block_on(async { timeout(limit, first).await }).is_err()
    }

    /// The number of the agent's service `name`.
    #[track_caller]
    pub(crate) fn service(&self, name: &str) -> u64 {
        let service = self.services.iter().find(|service| service.name == name);
        service.unwrap_or_else(|| panic!("no {name} in {:?}", self.services)).number
    }

    /// Whether datagrams to the agent's service `name` may travel in pieces.
    #[track_caller]
    pub(crate) fn fragments(&self, name: &str) -> bool {
        self.services.iter().find(|service| service.name == name).unwrap().fragment
    }

    /// Waits for the end of the connection, which the agent brings about.
    #[track_caller]
    pub(crate) fn closed(&self) -> ConnectionError {
        self.site.wait("the agent to close the connection", self.connection.closed())
    }

    /// The same, and returns the agent's code.
    #[track_caller]
    pub(crate) fn close_code(&self) -> u64 {
        let error = self.closed();
        let ConnectionError::ApplicationClosed(ApplicationClose { error_code, .. }) = error else {
            panic!("the connection ended otherwise: {error}");
        };
        error_code.into()
    }

    /// Whether the connection lives.
    pub(crate) fn lives(&self) -> bool {
        self.connection.close_reason().is_none()
    }
}

/// Payloads.
impl Session<'_> {
    /// A number for a flow of ours.
    pub(crate) fn new_flow(&mut self) -> u64 {
        let flow = self.next_flow * 2 + self.parity;
        self.next_flow += 1;
        flow
    }

    #[track_caller]
    pub(crate) fn send(&self, payload: &Payload) {
        self.send_raw(payload.encode());
    }

    /// Sends the data of a DATAGRAM frame as they are.
    #[track_caller]
    pub(crate) fn send_raw(&self, data: Vec<u8>) {
        self.connection.send_datagram(data.into()).unwrap();
    }

    #[track_caller]
    pub(crate) fn receive(&self) -> Payload {
        self.receive_within(PATIENCE).unwrap_or_else(|| panic!("waited {PATIENCE:?} for a payload"))
    }

    /// The next datagram of a flow that comes in pieces, put together; what else comes is passed over.
    #[track_caller]
    pub(crate) fn receive_pieces(&self, wanted: u64) -> Vec<u8> {
        let whole = self.receive_pieces_within(wanted, PATIENCE);
        whole.unwrap_or_else(|| panic!("waited {PATIENCE:?} for a datagram in pieces"))
    }

    /// The same; `None` when its first piece has not come and nothing comes within `limit`.
    #[track_caller]
    pub(crate) fn receive_pieces_within(&self, wanted: u64, limit: Duration) -> Option<Vec<u8>> {
        let mut whole: Vec<Option<u8>> = Vec::new();
        let mut name = None;
        loop {
            let payload = if name.is_none() { self.receive_within(limit)? } else { self.receive() };
            let Payload::Piece { flow, datagram, total, offset, bytes } = payload else { continue };
            if flow != wanted {
                continue;
            }
            assert_eq!(
                *name.get_or_insert((datagram, total)),
                (datagram, total),
                "one datagram after the other"
            );
            whole.resize(total as usize, None);
            let place = &mut whole[offset as usize..][..bytes.len()];
            assert!(place.iter().all(Option::is_none), "no byte comes twice");
            assert!(bytes.len() >= 1024 || offset + bytes.len() as u64 == total);
            place.iter_mut().zip(bytes).for_each(|(place, byte)| *place = Some(byte));
            if let Some(whole) = whole.iter().copied().collect() {
                return Some(whole);
            }
        }
    }

    /// `None` when nothing comes within `limit`.
    #[track_caller]
    pub(crate) fn receive_within(&self, limit: Duration) -> Option<Payload> {
        let datagram = self
            .site
            .runtime
            .block_on(async { timeout(limit, self.connection.read_datagram()).await })
            .ok()?
            .unwrap();
        let payload = Payload::decode(&datagram);
        Some(payload.unwrap_or_else(|| panic!("no payload: {datagram:02x?}")))
    }

    /// Sends `opening` until something comes for its flow, and returns that.
    #[track_caller]
    pub(crate) fn send_until_answered(&self, opening: &Payload) -> Payload {
        for _ in 0..PATIENCE.as_millis() / REPEAT_AFTER.as_millis() {
            self.send(opening);
            while let Some(answer) = self.receive_within(REPEAT_AFTER) {
                if answer.flow() == opening.flow() {
                    return answer;
                }
            }
        }
        panic!("no answer to {opening:?}");
    }

    /// Opens a flow with a datagram of `bytes`, and waits for both its confirmation and its echo.
    #[track_caller]
    pub(crate) fn open(&mut self, service: u64, bytes: &[u8]) -> u64 {
        let flow = self.new_flow();
        self.open_as(flow, service, bytes);
        flow
    }

    /// The same for a number that is known already.
    #[track_caller]
    pub(crate) fn open_as(&self, flow: u64, service: u64, bytes: &[u8]) {
        let opening = Payload::Opening { flow, service, bytes: bytes.to_vec() };
        let (confirmed, echo) = (Payload::Confirmed { flow }, Payload::Known { flow, bytes: bytes.to_vec() });
        // In either order; a repeated opening is echoed and confirmed again.
        let mut answers = vec![self.send_until_answered(&opening)];
        while !(answers.contains(&confirmed) && answers.contains(&echo)) {
            let answer = self.receive();
            if answer.flow() == flow {
                assert!(answer == confirmed || answer == echo, "{answer:?}");
                answers.push(answer);
            }
        }
    }

    /// Sends a datagram of the flow, and takes the same back; later answers to its openings are passed over.
    #[track_caller]
    pub(crate) fn echo(&self, flow: u64, bytes: &[u8], opening: &[u8]) {
        let known = |bytes: &[u8]| Payload::Known { flow, bytes: bytes.to_vec() };
        self.send(&known(bytes));
        loop {
            let answer = self.receive();
            if answer == known(bytes) {
                return;
            }
            if answer.flow() != flow {
                continue;
            }
            assert!(answer == known(opening) || answer == Payload::Confirmed { flow }, "{answer:?}");
        }
    }
}

/// TCP forwards.
impl Session<'_> {
    /// Opens a stream to the agent's `service`, sends `bytes` behind its header without waiting, and finishes it;
    /// returns the status and all that came after it.
    #[track_caller]
    pub(crate) fn forward(&self, service: u64, bytes: &[u8]) -> (u64, Vec<u8>) {
        self.site.wait("the answer on a stream", async {
            let (mut send, mut receive) = self.connection.open_bi().await.unwrap();
            let header = Message::default().number(1, service).encode();
            send.write_all(&[&[header.len() as u8], header.as_slice()].concat()).await.unwrap();
            // The agent stops a stream that it refuses, and then takes no more.
            let sent = send.write_all(bytes).await;
            let status = number_of(&receive_message(&mut receive).await);
            assert!(sent.is_ok() || status != 1, "{sent:?}");
            if status == 1 {
                send.finish().unwrap();
            }
            (status, receive.read_to_end(usize::MAX).await.unwrap())
        })
    }

    /// Takes the stream that the agent opens, answers with `status`, and sends back what comes when that is OK;
    /// returns the service and what came.
    #[track_caller]
    pub(crate) fn answer_forward(&self, status: u64) -> (u64, Vec<u8>) {
        self.site.wait("the agent's stream", async {
            let (mut send, mut receive) = self.connection.accept_bi().await.unwrap();
            let service = number_of(&receive_message(&mut receive).await);
            send.write_all(&[2, 0x08, u8::try_from(status).unwrap()]).await.unwrap();
            let mut bytes = Vec::new();
            if status == 1 {
                bytes = receive.read_to_end(usize::MAX).await.unwrap();
                send.write_all(&bytes).await.unwrap();
            } else {
                receive.stop(0u32.into()).unwrap();
            }
            send.finish().unwrap();
            // Until the agent has all of it: the test may end the connection next.
            drop(send.stopped().await);
            (service, bytes)
        })
    }
}

/// The one number of a `StreamOpen` or `StreamAnswer`.
fn number_of(message: &[u8]) -> u64 {
    match fields(message).as_deref() {
        Some([(1, Field::Number(number))]) => *number,
        _ => panic!("no number: {message:02x?}"),
    }
}

/// A message and the length before it.
async fn receive_message(stream: &mut RecvStream) -> Vec<u8> {
    let mut prefix = [0; 8];
    stream.read_exact(&mut prefix[..1]).await.unwrap();
    let length = varint_length(prefix[0]);
    stream.read_exact(&mut prefix[1..length]).await.unwrap();
    let length = take_varint(&mut &prefix[..length]).unwrap();
    assert!(length <= 65_536, "{length}");
    let mut message = vec![0; length as usize];
    stream.read_exact(&mut message).await.unwrap();
    message
}

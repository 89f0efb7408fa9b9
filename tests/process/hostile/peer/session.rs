//! A session with the agent: knock, TLS, the hellos, and what comes on the control stream.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use culvert_tests::clock;
use gate::{
    client::{self, Knock},
    identity::PublicKey,
    knock::ServerKey,
    suite::SuiteClientConfig,
};
use quinn::{
    AsyncUdpSocket, ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, RecvStream,
    SendStream, ServerConfig, TokioRuntime, TransportConfig, congestion::NewRenoConfig,
    crypto::rustls::QuicClientConfig,
};
use rcgen::KeyPair;
use rustls::{
    crypto::{CryptoProvider, SupportedKxGroup, ring},
    pki_types::PrivatePkcs8KeyDer,
};
use tokio::{
    runtime::Handle,
    sync::mpsc::{self, Receiver, Sender},
    time::timeout,
};

use super::{
    attack::{Attack, Mode, Options},
    messages::{self, Incoming, Proof},
    packets::Own,
    payload::{take_varint, varint_length},
    protobuf::Service,
    rotations,
    socket::{Leaky, Sent},
    tls::Identity,
};

/// How long the agent may take for a handshake and its hello; one that dials us does so every 15 s at least.
const DIAL_LIMIT: Duration = Duration::from_secs(5);
const ACCEPT_LIMIT: Duration = Duration::from_secs(20);

/// The congestion window of the attacker from its first packet on: nothing slows it but its processor.
const GREEDY_WINDOW: u64 = 64 << 20;

/// The server's name: that of an IP address is not sent.
const NOT_SENT: &str = "127.0.0.1";

/// Who dials, and whom.
pub(crate) struct Dialler {
    options: Options,
    own: Identity,
    provider: CryptoProvider,
    crypto: Arc<QuicClientConfig>,
    server: Arc<ServerKey>,
    pub(crate) instance: [u8; 16],
    pub(crate) sent: Arc<Sent>,
    /// Where the agent dials us, if it is to.
    listener: Option<Listener>,
    /// Whether hellos have proofs of our preshared keys.
    pub(crate) shows_keys: bool,
}

/// A socket at which the agent dials us.
struct Listener {
    endpoint: Endpoint,
    socket: Arc<Leaky>,
}

impl Listener {
    fn new(at: SocketAddr, own: &Identity, agent: &PublicKey, sent: &Arc<Sent>) -> Result<Self> {
        let socket = Leaky::at(at, sent)?;
        let inner: Arc<dyn AsyncUdpSocket> = Arc::clone(&socket) as _;
        let server = ServerConfig::with_crypto(Arc::new(own.server(agent.0)));
        let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
        let endpoint = Endpoint::new_with_abstract_socket(config, Some(server), inner, runtime)?;
        Ok(Self { endpoint, socket })
    }

    async fn accept(&self) -> Result<Link> {
        let incoming = self.endpoint.accept().await.context("the socket is gone")?;
        let (endpoint, socket) = (self.endpoint.clone(), Arc::clone(&self.socket));
        Ok(Link { endpoint, socket, connection: incoming.await? })
    }
}

/// A connection on which nothing was said.
pub(crate) struct Link {
    pub(crate) endpoint: Endpoint,
    pub(crate) socket: Arc<Leaky>,
    pub(crate) connection: Connection,
}

/// A connection whose hellos were said.
pub(crate) struct Session {
    pub(crate) connection: Connection,
    pub(crate) control: SendStream,
    pub(crate) socket: Arc<Leaky>,
    /// The lowest bit of the numbers of flows that this end opens.
    pub(crate) parity: u64,
    pub(crate) services: Vec<Service>,
    /// What came since the hello.
    pub(crate) inbox: Receiver<Incoming>,
    pub(crate) endpoint: Endpoint,
}

impl Dialler {
    pub(crate) fn new(options: Options) -> Result<Self> {
        let der = options.identity.pkcs8_der();
        let pair = KeyPair::try_from(&PrivatePkcs8KeyDer::from(der.to_vec()))?;
        // The only suite that `keys.rs` knows.
        let mut provider: CryptoProvider = ring::default_provider();
        provider.cipher_suites = vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256];
        let own = Identity::of(&pair);
        let crypto = own.client_with(options.agent_key.0, Arc::new(provider.clone()));
        let sent = Arc::<Sent>::default();
        let listening = options.listen.filter(|_| options.attack == Attack::Leaving);
        let listener = listening.map(|at| Listener::new(at, &own, &options.agent_key, &sent)).transpose()?;
        let server = ServerKey::new(&options.agent_key).context("no public key to knock with")?;
        Ok(Self {
            crypto: Arc::new(crypto),
            server: Arc::new(server),
            instance: rand::random(),
            sent,
            listener,
            shows_keys: false,
            own,
            provider,
            options,
        })
    }

    /// Connects and says hello.
    pub(crate) async fn dial(&self) -> Result<Session> {
        let limit = if self.listener.is_some() { ACCEPT_LIMIT } else { DIAL_LIMIT };
        timeout(limit, self.begin()).await.map_err(|_| anyhow!("no session within {limit:?}"))?
    }

    async fn begin(&self) -> Result<Session> {
        let (link, (mut control, mut answers)) = if let Some(listener) = &self.listener {
            let link = listener.accept().await?;
            let streams = link.connection.accept_bi().await?;
            (link, streams)
        } else {
            let link = self.connect().await?;
            let streams = link.connection.open_bi().await?;
            (link, streams)
        };
        let Link { endpoint, socket, connection } = link;
        control.write_all(&self.hello(&connection)?).await?;
        let Incoming::Hello { services } = receive(&mut answers).await? else {
            bail!("the first message is no hello")
        };
        let (deliver, inbox) = mpsc::channel(1_024);
        Handle::current().spawn(read_on(answers, deliver));
        let parity = (self.options.identity.public_key().0 > self.options.agent_key.0).into();
        Ok(Session { connection, control, socket, parity, services, inbox, endpoint })
    }

    /// Connects and says nothing.
    pub(crate) async fn connect(&self) -> Result<Link> {
        let socket = Leaky::new(&self.sent)?;
        let inner: Arc<dyn AsyncUdpSocket> = Arc::clone(&socket) as _;
        let runtime = Arc::new(TokioRuntime);
        let endpoint = Endpoint::new_with_abstract_socket(EndpointConfig::default(), None, inner, runtime)?;
        let config = self.config(&self.crypto);
        let connection = endpoint.connect_with(config, self.options.agent, NOT_SENT)?.await?;
        Ok(Link { endpoint, socket, connection })
    }

    /// TLS with this key exchange only.
    pub(crate) fn crypto_of(&self, group: &'static dyn SupportedKxGroup) -> Arc<QuicClientConfig> {
        let provider = CryptoProvider { kx_groups: vec![group], ..self.provider.clone() };
        Arc::new(self.own.client_with(self.options.agent_key.0, Arc::new(provider)))
    }

    /// Sends a ClientHello with a knock of its own, but no more than so many datagrams of it, and forgets the connection.
    pub(crate) fn send_client_hello(
        &self,
        crypto: &Arc<QuicClientConfig>,
        datagrams: usize,
        socket: &UdpSocket,
    ) -> Result<()> {
        let (now, agent) = (clock::now(), self.options.agent);
        let mut endpoint = quinn_proto::Endpoint::new(Arc::default(), None, true, None);
        let (_, mut connection) = endpoint.connect(now, self.config(crypto), agent, NOT_SENT)?;
        for _ in 0..datagrams {
            let mut packet = Vec::new();
            if connection.poll_transmit(now, 1, &mut packet).is_none() {
                break;
            }
            // What the kernel does not take is lost.
            if socket.send_to(&packet, agent).is_ok() {
                self.sent.add(1, packet.len());
            }
        }
        Ok(())
    }

    /// A hello for `connection`, with the proof that we hold our key.
    pub(crate) fn hello(&self, connection: &Connection) -> Result<Vec<u8>> {
        let proofs = if self.shows_keys { rotations::proofs(connection)?.to_vec() } else { Vec::new() };
        self.hello_with(connection, &proofs)
    }

    /// The same with these proofs of preshared keys.
    pub(crate) fn hello_with(&self, connection: &Connection, proofs: &[Proof]) -> Result<Vec<u8>> {
        let lanes = match self.options.mode {
            Mode::Lanes => 64,
            Mode::Standard => 0,
        };
        Ok(messages::hello(&self.instance, lanes, &self.possession(connection)?, proofs))
    }

    /// The proof for `connection` that we hold our key.
    pub(crate) fn possession(&self, connection: &Connection) -> Result<[u8; 64]> {
        let exported = exported::<32>(connection, b"EXPORTER-culvert-possession")?;
        Ok(self.options.identity.sign(&[&b"culvert possession 1"[..], &exported].concat()))
    }

    /// Our inner addresses.
    pub(crate) fn own_addresses(&self) -> Own {
        let mut link_local = [0; 16];
        link_local[..2].copy_from_slice(&[0xfe, 0x80]);
        link_local[8..].copy_from_slice(&self.options.identity.public_key().0[..8]);
        Own { v4: self.options.inner, link_local: link_local.into() }
    }

    fn config(&self, crypto: &Arc<QuicClientConfig>) -> ClientConfig {
        let knock = Knock {
            own: Arc::new(self.options.identity.agreement_key()),
            server: Arc::clone(&self.server),
            unix_seconds: clock::unix_seconds(),
            ephemeral: zeroize::Zeroizing::new(rand::random()),
            fallback: false,
        };
        let dcid = || quinn_proto::ConnectionId::new(&rand::random::<[u8; 8]>());
        let mut config =
            client::arm(Arc::new(SuiteClientConfig(Arc::clone(crypto) as _)), knock, Arc::new(dcid));
        let mut window = NewRenoConfig::default();
        window.initial_window(GREEDY_WINDOW);
        let mut transport = TransportConfig::default();
        transport.congestion_controller_factory(Arc::new(window));
        transport.datagram_send_buffer_size(1 << 20).max_concurrent_uni_streams(0u8.into());
        config.transport_config(Arc::new(transport));
        config
    }
}

impl Session {
    pub(crate) fn service(&self, name: &str) -> Result<u64> {
        let service = self.services.iter().find(|service| service.name == name);
        service.map(|service| service.number).with_context(|| format!("the agent offers no {name}"))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.connection.close_reason().is_some()
    }

    /// How it ended, in a word for the report: the code of the agent's close, or what quinn says.
    pub(crate) fn end(&self) -> String {
        match self.connection.close_reason() {
            None => "left by us".to_owned(),
            Some(ConnectionError::ApplicationClosed(close)) => format!("code {}", close.error_code),
            Some(error) => error.to_string(),
        }
    }

    /// Ends it without a word, as a peer that crashes.
    pub(crate) fn leave(self) -> String {
        let end = self.end();
        self.connection.close(0u8.into(), b"");
        end
    }
}

/// What TLS exports of `connection` under `label` (RFC 8446 §7.5).
pub(crate) fn exported<const BYTES: usize>(connection: &Connection, label: &[u8]) -> Result<[u8; BYTES]> {
    let mut exported = [0; BYTES];
    connection.export_keying_material(&mut exported, label, &[]).map_err(|_| anyhow!("no TLS secret"))?;
    Ok(exported)
}

/// Hands on what comes until the stream or the session ends; what nobody takes in time is dropped.
async fn read_on(mut answers: RecvStream, deliver: Sender<Incoming>) {
    while let Ok(message) = receive(&mut answers).await {
        if deliver.is_closed() {
            return;
        }
        drop(deliver.try_send(message));
    }
}

async fn receive(stream: &mut RecvStream) -> Result<Incoming> {
    let mut length = [0; 8];
    stream.read_exact(&mut length[..1]).await?;
    let bytes = varint_length(length[0]);
    stream.read_exact(&mut length[1..bytes]).await?;
    let length = take_varint(&mut &length[..bytes]).context("a whole integer")?;
    let mut message = vec![0; usize::try_from(length)?];
    stream.read_exact(&mut message).await?;
    Ok(Incoming::decode(&message))
}

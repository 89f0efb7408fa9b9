//! A session with the agent: knock, TLS, the hellos, and what comes on the control stream.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use culvert_tests::clock;
use gate::{
    client::{self, Knock},
    knock::ServerKey,
    suite::SuiteClientConfig,
};
use quinn::{
    AsyncUdpSocket, ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, RecvStream,
    SendStream, TokioRuntime, TransportConfig, congestion::NewRenoConfig, crypto::rustls::QuicClientConfig,
};
use rcgen::KeyPair;
use rustls::{
    crypto::{CryptoProvider, ring},
    pki_types::PrivatePkcs8KeyDer,
};
use tokio::{
    runtime::Handle,
    sync::mpsc::{self, Receiver, Sender},
    time::timeout,
};

use super::{
    attack::{Mode, Options},
    messages::{self, Incoming},
    payload::{take_varint, varint_length},
    protobuf::Service,
    socket::{Leaky, Sent},
    tls::Identity,
};

/// How long the agent may take for a handshake and its hello.
const DIAL_LIMIT: Duration = Duration::from_secs(5);

/// The congestion window of the attacker from its first packet on: nothing slows it but its processor.
const GREEDY_WINDOW: u64 = 64 << 20;

/// Who dials, and whom.
pub(crate) struct Dialler {
    options: Options,
    crypto: Arc<QuicClientConfig>,
    server: Arc<ServerKey>,
    instance: [u8; 16],
    pub(crate) sent: Arc<Sent>,
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
        let crypto = Identity::of(&pair).client_with(options.agent_key.0, Arc::new(provider));
        let server = ServerKey::new(&options.agent_key).context("no public key to knock with")?;
        Ok(Self {
            crypto: Arc::new(crypto),
            server: Arc::new(server),
            instance: rand::random(),
            sent: Arc::default(),
            options,
        })
    }

    /// Connects and says hello.
    pub(crate) async fn dial(&self) -> Result<Session> {
        timeout(DIAL_LIMIT, self.send_deferred_hello())
            .await
            .map_err(|_| anyhow!("no session within {DIAL_LIMIT:?}"))?
    }

    async fn send_deferred_hello(&self) -> Result<Session> {
        let socket = Leaky::new(&self.sent)?;
        let inner: Arc<dyn AsyncUdpSocket> = Arc::clone(&socket) as _;
        let runtime = Arc::new(TokioRuntime);
        let endpoint = Endpoint::new_with_abstract_socket(EndpointConfig::default(), None, inner, runtime)?;
        // The name of an IP address is not sent.
        let connection = endpoint.connect_with(self.config(), self.options.agent, "127.0.0.1")?.await?;
        let (mut control, mut answers) = connection.open_bi().await?;
        control.write_all(&self.hello(&connection)?).await?;
        let Incoming::Hello { services } = receive(&mut answers).await? else {
            bail!("the first message is no hello")
        };
        let (deliver, inbox) = mpsc::channel(1_024);
        Handle::current().spawn(read_on(answers, deliver));
        let parity = (self.options.identity.public_key().0 > self.options.agent_key.0).into();
        Ok(Session { connection, control, socket, parity, services, inbox, endpoint })
    }

    /// A hello for `connection`, with the proof that we hold our key.
    pub(crate) fn hello(&self, connection: &Connection) -> Result<Vec<u8>> {
        let mut exported = [0; 32];
        let label = b"EXPORTER-culvert-possession";
        connection.export_keying_material(&mut exported, label, &[]).map_err(|_| anyhow!("no TLS secret"))?;
        let proof = self.options.identity.sign(&[&b"culvert possession 1"[..], &exported].concat());
        let lanes = match self.options.mode {
            Mode::Lanes => 64,
            Mode::Standard => 0,
        };
        Ok(messages::hello(&self.instance, lanes, &proof))
    }

    fn config(&self) -> ClientConfig {
        let knock = Knock {
            own: Arc::new(self.options.identity.agreement_key()),
            server: Arc::clone(&self.server),
            unix_seconds: clock::unix_seconds(),
            ephemeral: zeroize::Zeroizing::new(rand::random()),
            fallback: false,
        };
        let dcid = || quinn_proto::ConnectionId::new(&rand::random::<[u8; 8]>());
        let mut config =
            client::arm(Arc::new(SuiteClientConfig(Arc::clone(&self.crypto) as _)), knock, Arc::new(dcid));
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

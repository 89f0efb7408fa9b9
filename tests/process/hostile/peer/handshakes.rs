//! Attacks by handshakes: ClientHellos that come to nothing, and connections that join a session.

use std::{
    net::{Ipv4Addr, UdpSocket},
    sync::LazyLock,
    time::Duration,
};

use anyhow::Result;
use gate::hybrid::{ENCAPSULATION_KEY_BYTES, Hybrid};
use quinn::Connection;
use rustls::{
    Error, NamedGroup,
    crypto::{ActiveKeyExchange, SharedSecret, SupportedKxGroup, ring},
};
use tokio::time::{sleep, timeout};

use super::{
    attack::Attacker,
    messages,
    session::{Link, Session, exported},
};

/// ClientHellos between two looks at the clock.
const HELLOS_AT_ONCE: usize = 8;

/// How long the agent may take to let another connection in.
const LINK_LIMIT: Duration = Duration::from_millis(500);

/// Connections that stay at the same time: more than a peer may have.
const MOST_LINKS: usize = 20;

/// As an agent has it.
static HYBRID: LazyLock<Hybrid> = LazyLock::new(|| Hybrid {
    classical: ring::kx_group::X25519,
    random: ring::default_provider().secure_random,
});

static WRONG: Wrong = Wrong;

/// The first datagrams of ClientHellos whose second ones never come.
pub(super) async fn half_hellos(attacker: &mut Attacker, session: &Session) -> Result<()> {
    client_hellos(attacker, session, &*HYBRID, 1).await
}

/// ClientHellos that are whole, and whose share cannot be used.
pub(super) async fn wrong_shares(attacker: &mut Attacker, session: &Session) -> Result<()> {
    client_hellos(attacker, session, &WRONG, 4).await
}

/// ClientHellos by the thousand, of so many datagrams at most, beside a session.
async fn client_hellos(
    attacker: &mut Attacker,
    session: &Session,
    group: &'static dyn SupportedKxGroup,
    datagrams: usize,
) -> Result<()> {
    let crypto = attacker.dialler.crypto_of(group);
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    while attacker.goes_on(session) {
        for _ in 0..HELLOS_AT_ONCE {
            attacker.dialler.send_client_hello(&crypto, datagrams, &socket)?;
        }
        attacker.rest().await;
    }
    Ok(())
}

/// The hybrid key exchange with an encapsulation key all of whose numbers are above the modulus.
#[derive(Debug)]
struct Wrong;

impl SupportedKxGroup for Wrong {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let inner = HYBRID.start()?;
        let mut share = inner.pub_key().to_vec();
        share[..ENCAPSULATION_KEY_BYTES].fill(0xff);
        Ok(Box::new(Started { inner, share }))
    }

    fn name(&self) -> NamedGroup {
        HYBRID.name()
    }
}

struct Started {
    inner: Box<dyn ActiveKeyExchange>,
    share: Vec<u8>,
}

impl ActiveKeyExchange for Started {
    fn complete(self: Box<Self>, share: &[u8]) -> Result<SharedSecret, Error> {
        self.inner.complete(share)
    }

    fn pub_key(&self) -> &[u8] {
        &self.share
    }

    fn group(&self) -> NamedGroup {
        self.inner.group()
    }
}

/// Connections that join: to leave at once, to be asked for and released, one too many, and where they do not belong.
pub(super) async fn joins(attacker: &mut Attacker, session: &Session) -> Result<()> {
    /// What a join needs to be on its way.
    const MOMENT: Duration = Duration::from_millis(2);
    let (own, mute) = (name(&session.connection)?, session.service("mute")?);
    let (mut links, mut count) = (Vec::<Link>::new(), 0_u64);
    while attacker.goes_on(session) {
        attacker.rest().await;
        let Ok(Ok(link)) = timeout(LINK_LIMIT, attacker.dialler.connect()).await else { continue };
        let Ok((mut control, _answers)) = link.connection.open_bi().await else { continue };
        count += 1;
        let (instance, number) = (attacker.dialler.instance, 1 + count % 7);
        let (instance, session, number) = match count % 8 {
            // Waits for a session that never comes; that of the connection itself is none.
            2 => (instance, rand::random(), number),
            4 => (instance, name(&link.connection)?, number),
            6 => (rand::random(), own, number),
            // A violation, after which we have to wait.
            _ if count.is_multiple_of(101) => (instance, own, 8),
            _ => (instance, own, number),
        };
        let possession = attacker.dialler.possession(&link.connection)?;
        let mut said = messages::join(&instance, &session, number, &possession);
        if count.is_multiple_of(3) {
            said.extend(messages::release().repeat(3));
        }
        if control.write_all(&said).await.is_err() {
            continue;
        }
        if let Ok((mut stream, _)) = link.connection.open_bi().await {
            drop(stream.write_all(&messages::stream_open(mute)).await);
        }
        sleep(MOMENT).await;
        if count.is_multiple_of(2) {
            links.push(link);
        }
        if links.len() > MOST_LINKS {
            links.clear();
        }
    }
    Ok(())
}

/// What stream connections call the session of `connection`.
fn name(connection: &Connection) -> Result<[u8; 16]> {
    exported(connection, b"EXPORTER culvert session")
}

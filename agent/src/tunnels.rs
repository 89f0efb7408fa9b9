//! Serves the requests of users: CONNECT, CONNECT-UDP and CONNECT-IP (beyond its packets: `packets.rs`), on a thread beside the packet path, which starts with the first of them.
//!
//! ```text
//!   worker ══ Exchange (bytes), Datagrams ══ task of this thread ══ socket ══ what the user reaches
//! ```

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};

use base::{
    clock::{Clock, SystemClock},
    panics::{self, Part},
};
use bytes::BytesMut;
use engine::control::web::{Abandoned, Asked, Datagrams, Exchange, Tunnel, Tunnels, refused};
use h3::message::Response;
use net::task;
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    runtime,
    sync::mpsc,
};
use users::{
    Grant, Open,
    account::{Account, Place, Refusal},
    policy::Transport,
    rate::Direction,
    session::SessionEnd,
    target::Target,
};

use crate::{packets, web_server::relay};

/// Requests that wait for the thread; each worker is told at once if there are more.
const MOST_WAITING: usize = 256;

/// The most that is read of a target at a time, in bytes.
const CHUNK_BYTES: usize = 16 << 10;

/// What workers give requests to: one thread of the process.
pub(crate) fn server() -> Tunnels {
    static TUNNELS: OnceLock<Option<mpsc::Sender<Box<Tunnel>>>> = OnceLock::new();
    Arc::new(|tunnel| match TUNNELS.get_or_init(start) {
        Some(tunnels) => tunnels.try_send(tunnel).map_err(mpsc::error::TrySendError::into_inner),
        None => Err(tunnel),
    })
}

/// Starts the thread; `None` if it cannot be.
fn start() -> Option<mpsc::Sender<Box<Tunnel>>> {
    let (tunnels, waiting) = mpsc::channel(MOST_WAITING);
    let started = runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        thread::Builder::new().name("culvert-users".to_owned()).spawn(move || {
            if panics::isolate(Part::Users, || runtime.block_on(serve(waiting))).is_err() {
                tracing::error!("users are not served any more (remedy: restart the daemon)");
            }
        })
    });
    match started {
        Ok(_) => Some(tunnels),
        Err(error) => {
            tracing::error!(%error, "users cannot be served (remedy: restart the daemon, once the cause is gone)");
            None
        }
    }
}

async fn serve(mut waiting: mpsc::Receiver<Box<Tunnel>>) {
    while let Some(tunnel) = waiting.recv().await {
        drop(task::spawn(Part::Users, async move {
            let exchange = Arc::clone(&tunnel.exchange);
            let mut end = End { exchange, datagrams: tunnel.datagrams.clone(), is_told: false };
            end.is_told = one(*tunnel).await;
        }));
    }
}

/// Tells the worker that a session is over, also when its task panics.
struct End {
    exchange: Arc<Exchange>,
    datagrams: Option<Arc<Datagrams>>,
    /// Whether the worker knows all there is to know.
    is_told: bool,
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(datagrams) = &self.datagrams {
            datagrams.close();
        }
        if !self.is_told {
            self.exchange.fail();
        }
    }
}

/// Why bytes do not go on.
enum Broken {
    /// The client, or its connection, is gone.
    Abandoned,
    /// The connection to the target broke off.
    Target,
    /// The user may not go on.
    Revoked,
}

impl From<Abandoned> for Broken {
    fn from(_: Abandoned) -> Self {
        Self::Abandoned
    }
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self::Target
    }
}

/// Serves a request to its end; whether the worker was told of it.
async fn one(tunnel: Tunnel) -> bool {
    let Tunnel { grant, session, client, asked, exchange, datagrams } = tunnel;
    let (target, transport) = match asked {
        Asked::Port(target, transport) => (target, transport),
        Asked::Packets(scope) => {
            packets::serve(&grant, &session, scope, client, &exchange, datagrams.as_deref()).await;
            return true;
        }
    };
    let opened = async {
        match transport {
            Transport::Tcp => grant.open_tcp(&target).await.map(Opened::Tcp),
            Transport::Udp => grant.open_udp(&target).await.map(Opened::Udp),
        }
    };
    let opened = tokio::select! {
        opened = opened => opened,
        _ = std::future::poll_fn(|cx| exchange.poll_abandoned(cx)) => return true,
    };
    let account = session.account();
    let served = Served { grant: &grant, target: &target, exchange: &exchange, account };
    let opens = |address| session.opens(transport.into(), client, &target, Some(address));
    match (opened, datagrams) {
        (Err(refusal), _) => {
            refuse(&exchange, account, client, &target, refusal);
            true
        }
        (Ok(Opened::Tcp(open)), _) => {
            opens(open.address);
            let (end, is_told) = served.tcp(open).await;
            session.ends(end);
            is_told
        }
        (Ok(Opened::Udp(open)), Some(datagrams)) => {
            opens(open.address);
            let end = served.udp(open, &datagrams).await;
            session.ends(end);
            // Who may not go on is told so by a reset.
            end != SessionEnd::Revoked
        }
        (Ok(Opened::Udp(_)), None) => false,
    }
}

enum Opened {
    Tcp(Open<TcpStream>),
    Udp(Open<UdpSocket>),
}

fn refuse(exchange: &Exchange, account: &Account, client: SocketAddr, target: &Target, refusal: Refusal) {
    account.refused(refusal);
    tracing::debug!(user = account.name(), %client, ?target, reason = refusal.label(), "a user's request is refused");
    exchange.answer(refused(refusal));
    exchange.answer_end();
}

struct Served<'s> {
    grant: &'s Grant,
    target: &'s Target,
    exchange: &'s Exchange,
    account: &'s Account,
}

impl Served<'_> {
    /// Carries bytes both ways. Each direction ends by itself; what breaks off resets the other side (RFC 9114 §4.4). False if that was
    /// the target, or the user may not go on, of which the worker is to be told.
    async fn tcp(&self, open: Open<TcpStream>) -> (SessionEnd, bool) {
        let Open { mut socket, address } = open;
        tracing::debug!(user = self.account.name(), %address, "a user's connection is open");
        self.exchange.answer(Response::new(200));
        let ended = {
            let (mut from_target, mut to_target) = socket.split();
            let up = async {
                while let Some(piece) = std::future::poll_fn(|cx| self.exchange.poll_content(cx)).await? {
                    self.account.bytes(Place::FromUser, piece.len());
                    self.grant.paced(Direction::FromUser, piece.len()).await;
                    to_target.write_all(&piece).await?;
                    self.account.bytes(Place::ToTarget, piece.len());
                }
                to_target.shutdown().await?;
                Ok::<_, Broken>(())
            };
            let down = async {
                loop {
                    std::future::poll_fn(|cx| self.exchange.poll_room(cx)).await?;
                    let mut piece = BytesMut::with_capacity(CHUNK_BYTES);
                    if from_target.read_buf(&mut piece).await? == 0 {
                        break;
                    }
                    self.account.bytes(Place::FromTarget, piece.len());
                    self.grant.paced(Direction::ToUser, piece.len()).await;
                    self.account.bytes(Place::ToUser, piece.len());
                    self.exchange.answer_content(piece.freeze());
                }
                self.exchange.answer_end();
                Ok::<_, Broken>(())
            };
            tokio::select! {
                ended = async { tokio::try_join!(up, down) } => ended.map(drop),
                () = self.over(Transport::Tcp, address) => Err(Broken::Revoked),
                abandoned = std::future::poll_fn(|cx| self.exchange.poll_abandoned(cx)) => Err(abandoned.into()),
            }
        };
        if ended.is_err() {
            // The target learns of it by a reset.
            let _best_effort = SockRef::from(&socket).set_linger(Some(Duration::ZERO));
        }
        match ended {
            Ok(()) => (SessionEnd::Finished, true),
            Err(Broken::Abandoned) => (SessionEnd::Reset, true),
            Err(Broken::Target) => (SessionEnd::Reset, false),
            Err(Broken::Revoked) => (SessionEnd::Revoked, false),
        }
    }

    /// Carries datagrams both ways until the client ends the stream or nothing has come for a while.
    async fn udp(&self, open: Open<UdpSocket>, datagrams: &Datagrams) -> SessionEnd {
        let Open { socket, address } = open;
        tracing::debug!(user = self.account.name(), %address, "a user's datagrams have a socket");
        let mut response = Response::new(200);
        // RFC 9298 §3.5.
        response.fields.push("capsule-protocol", "?1".as_bytes()).expect("a field of ours");
        self.exchange.answer(response);
        let ended = async {
            loop {
                match std::future::poll_fn(|cx| self.exchange.poll_content(cx)).await {
                    Ok(Some(_)) => {}
                    Ok(None) => return SessionEnd::Finished,
                    Err(_) => return SessionEnd::Reset,
                }
            }
        };
        let end = tokio::select! {
            () = relay(&socket, datagrams, self.grant, || self.exchange.tell_worker()) => SessionEnd::Idle,
            end = ended => end,
            () = self.over(Transport::Udp, address) => SessionEnd::Revoked,
        };
        datagrams.close();
        if end != SessionEnd::Revoked {
            self.exchange.answer_end();
        }
        end
    }

    async fn over(&self, transport: Transport, address: SocketAddr) {
        self.grant.over(self.target, transport, address, || SystemClock.unix_seconds()).await;
    }
}

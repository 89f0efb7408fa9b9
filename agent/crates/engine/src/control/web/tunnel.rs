//! A request of a user: CONNECT, CONNECT-UDP (RFC 9298) or CONNECT-IP (RFC 9484), over HTTP/3. Who it is, and what is opened, is in the crate `users`.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use bytes::Bytes;
use gate::client_key::ClientKey;
use h3::{
    capsule::{self, Capsule},
    connection::{Connection as Http, Delivery},
    datagram,
    error::Error,
    fields::Fields,
    message::Request,
};
use quinn_proto::{Connection, ConnectionHandle, SendDatagramError, StreamId, VarInt};
use users::{
    Grant, Presents, Session,
    account::{Account, Dropped, Refusal},
    ip::{Device, scope::Scope},
    policy::Transport,
    target::Target,
};

use super::{
    datagrams::Datagrams,
    exchange::{Answers, Exchange},
    guest::http,
};

/// The protocol of RFC 9298.
pub const CONNECT_UDP: &str = "connect-udp";

/// The protocol of RFC 9484.
pub const CONNECT_IP: &str = "connect-ip";

/// The bytes of capsules that wait for a stream's credit; datagrams wait behind them.
const MOST_CAPSULE_BYTES: usize = 64 << 10;

/// What a user asks for.
pub struct Tunnel {
    /// Who it is.
    pub grant: Grant,
    /// The place among the user's sessions.
    pub session: Session,
    /// The client's address.
    pub client: SocketAddr,
    /// What is to be reached, and over what.
    pub asked: Asked,
    /// Bytes in both directions, and the answer.
    pub exchange: Arc<Exchange>,
    /// The datagrams of CONNECT-UDP and CONNECT-IP.
    pub datagrams: Option<Arc<Datagrams>>,
}

/// What a request of a user is for.
pub enum Asked {
    /// A connection, or datagrams, to a port.
    Port(Target, Transport),
    /// IP packets.
    Packets(Scope),
}

/// Where requests of users go: to the thread that serves them. It takes a request, or gives it back if too many wait.
pub type Tunnels = Arc<dyn Fn(Box<Tunnel>) -> Result<(), Box<Tunnel>> + Send + Sync>;

/// What a user asks for with `head`.
///
/// # Errors
///
/// Why that is nothing.
pub(super) fn asked(head: &Request) -> Result<Asked, Refusal> {
    match &head.protocol {
        None => Asked::by_connect(&head.authority),
        Some(protocol) => Asked::by_protocol(protocol, head.path.as_deref().unwrap_or_default()),
    }
}

impl Asked {
    /// What a CONNECT to `authority` is for.
    ///
    /// # Errors
    ///
    /// It is no target.
    pub fn by_connect(authority: &str) -> Result<Self, Refusal> {
        let target = Target::of_connect(authority);
        target.map(|target| Self::Port(target, Transport::Tcp)).ok_or(Refusal::Target)
    }

    /// What an extended CONNECT, or an upgrade, to `protocol` with `path` is for.
    ///
    /// # Errors
    ///
    /// The protocol is not served, or the path not one of it.
    pub fn by_protocol(protocol: &str, path: &str) -> Result<Self, Refusal> {
        let udp = |target| Self::Port(target, Transport::Udp);
        match protocol {
            CONNECT_UDP => Target::of_connect_udp(path).map(udp).ok_or(Refusal::Target),
            CONNECT_IP => Scope::of_path(path).map(Self::Packets).ok_or(Refusal::Target),
            _ => Err(Refusal::Protocol),
        }
    }
}

/// What the client at `source` presents with `fields`.
pub(super) fn presents(fields: &Fields, key: Option<ClientKey>, source: IpAddr) -> Presents<'_> {
    let value = |name| fields.values(name).next();
    Presents { fields: [value("proxy-authorization"), value("authorization")], key, source }
}

impl Tunnel {
    pub(super) fn new(
        grant: Grant,
        session: Session,
        client: SocketAddr,
        (asked, device): (Asked, Option<Arc<dyn Device>>),
        (answers, handle, stream): (Arc<Answers>, ConnectionHandle, StreamId),
    ) -> Box<Self> {
        let exchange = Exchange::new(answers, handle, stream);
        let account = Arc::clone(session.account());
        let datagrams = match &asked {
            Asked::Port(_, Transport::Tcp) => None,
            Asked::Port(_, Transport::Udp) => Some(Datagrams::new(account)),
            Asked::Packets(scope) => device.map(|device| {
                let worker = Arc::clone(&exchange);
                Datagrams::of_packets(account, scope.protocol, move || worker.tell_worker(), device)
            }),
        };
        Box::new(Self { grant, session, client, asked, exchange, datagrams })
    }
}

/// A capsule came on the stream of `datagrams`.
pub fn take_capsule(datagrams: &Datagrams, capsule: Capsule) {
    match capsule {
        Capsule::Whole { kind: capsule::DATAGRAM, value } => {
            let length = value.len();
            match datagram::context(&value) {
                Some((0, payload)) => {
                    let head = length - payload.len();
                    datagrams.put_from_user(value.slice(head..));
                }
                Some(_) => datagrams.not_for_target(Dropped::UnknownContext),
                None => datagrams.not_for_target(Dropped::UnknownCapsule),
            }
        }
        Capsule::TooLong { kind: capsule::DATAGRAM, .. } => datagrams.not_for_target(Dropped::TooLarge),
        Capsule::Whole { .. } | Capsule::TooLong { .. } if datagrams.link().is_some() => {
            if let Some(link) = datagrams.link() {
                link.capsule(capsule);
            }
        }
        Capsule::Whole { .. } | Capsule::TooLong { .. } | Capsule::Unknown { .. } => {
            datagrams.not_for_target(Dropped::UnknownCapsule);
        }
    }
}

/// Counts of a connection's DATAGRAM frames, which find those that QUIC gives up in silence.
#[derive(Default)]
pub(super) struct Frames {
    /// Frames that were handed to QUIC, and those of them that are known to be lost there.
    handed: u64,
    lost: u64,
    /// Frames that were taken from QUIC, those that it gave up included.
    taken: u64,
    /// The user whose connection it is: of the newest request with good credentials.
    account: Option<Arc<Account>>,
    /// Whether the client's SETTINGS allow DATAGRAM frames (RFC 9297 §2.1.1).
    pub(super) client_takes_them: bool,
}

impl Frames {
    pub(super) fn belong_to(&mut self, account: &Arc<Account>) {
        self.account = Some(Arc::clone(account));
    }

    /// Reads the DATAGRAM frames that came, and gives them to `find`'s sessions.
    ///
    /// # Errors
    ///
    /// The connection has to be closed.
    pub(super) fn read(
        &mut self,
        quinn: &mut Connection,
        state: &mut Http,
        mut find: impl FnMut(StreamId) -> Option<Arc<Datagrams>>,
    ) -> Result<Vec<StreamId>, Error> {
        let mut ended = Vec::new();
        while let Some(frame) = quinn.datagrams().recv() {
            self.taken += 1;
            let ours = match state.datagram(&frame)? {
                Delivery::To(stream, payload) => stream_of(stream.index())
                    .and_then(&mut find)
                    .map(|datagrams| (datagrams, frame.len() - payload.len())),
                Delivery::Nobody => None,
                Delivery::Ends(stream) => {
                    ended.extend(stream_of(stream.index()));
                    None
                }
            };
            let Some((datagrams, head)) = ours else {
                self.nobody(Dropped::Ended);
                continue;
            };
            match datagram::context(&frame[head..]) {
                Some((0, payload)) => {
                    let start = frame.len() - payload.len();
                    datagrams.put_from_user(frame.slice(start..));
                }
                Some(_) => datagrams.not_for_target(Dropped::UnknownContext),
                None => datagrams.not_for_target(Dropped::UnknownCapsule),
            }
        }
        let received = quinn.stats().frame_rx.datagram;
        if let Some(account) = &self.account
            && received > self.taken
        {
            account.overflowed(received - self.taken);
        }
        self.taken = received.max(self.taken);
        Ok(ended)
    }

    /// How many bytes of a payload a DATAGRAM frame of `stream` takes; `None` if the client takes none.
    pub(super) fn room(&self, quinn: &mut Connection, stream: StreamId) -> Option<usize> {
        let most = quinn.datagrams().max_size().filter(|_| self.client_takes_them)?;
        let mut head = Vec::with_capacity(9);
        datagram::put_head(&mut head, http(stream), 0);
        Some(most.saturating_sub(head.len()))
    }

    fn nobody(&self, reason: Dropped) {
        if let Some(account) = &self.account {
            account.datagram(users::account::Place::FromUser, 0);
            account.dropped_from_user(reason, 1);
        }
    }

    /// Sends a payload as a DATAGRAM frame, or as a capsule by `capsules` if it fits none.
    pub(super) fn send(
        &mut self,
        quinn: &mut Connection,
        stream: StreamId,
        payload: Bytes,
        capsules: &mut Vec<u8>,
    ) -> Result<(), Bytes> {
        if capsules.len() >= MOST_CAPSULE_BYTES {
            return Err(payload);
        }
        let mut frame = Vec::with_capacity(payload.len() + 16);
        datagram::put_head(&mut frame, http(stream), 0);
        frame.extend_from_slice(&payload);
        if self.client_takes_them && quinn.datagrams().max_size().is_some_and(|most| frame.len() <= most) {
            match quinn.datagrams().send(frame.into(), false) {
                Ok(()) => {
                    self.handed += 1;
                    return Ok(());
                }
                Err(SendDatagramError::Blocked(_)) => return Err(payload),
                Err(_) => {}
            }
        }
        let mut value = Vec::with_capacity(payload.len() + 1);
        value.push(0);
        value.extend_from_slice(&payload);
        capsule::put(capsules, capsule::DATAGRAM, &value);
        Ok(())
    }

    /// The connection is over: frames that QUIC took and never sent were not handed to the user.
    pub(super) fn end(&mut self, quinn: &Connection) {
        let sent = quinn.stats().frame_tx.datagram;
        let lost = self.handed.saturating_sub(sent);
        if let Some(account) = &self.account
            && lost > self.lost
        {
            account.taken_back(lost - self.lost);
        }
        self.lost = self.lost.max(lost);
    }
}

fn stream_of(index: u64) -> Option<StreamId> {
    VarInt::from_u64(index).ok().map(StreamId::from)
}

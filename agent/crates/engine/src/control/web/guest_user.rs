//! Requests of users on a connection, and its datagrams.

use std::sync::Arc;

use h3::{
    connection::Limits,
    error::{Code, Error},
    message::{Request, Response},
};
use quinn_proto::{Dir, StreamId, VarInt};
use users::{
    Grant,
    account::{Account, Refusal},
    ip::Device,
};

use super::{
    super::{
        Outcome, Refused,
        datagrams::Datagrams,
        tunnel::{self, Asked, Tunnel},
    },
    Around, Guest, MOST_REQUESTS, MOST_UNIDIRECTIONAL, http,
};

/// Requests that a user may have open on one connection.
const MOST_OF_A_USER: u32 = 256;

/// What a user's connection may hold of its streams in either direction, in bytes: 100 ms at 320 Mbit/s.
const USER_WINDOW: u32 = 4 << 20;

/// The same of connections beyond [`users::MOST_WIDE_CONNECTIONS`]: 100 ms at 40 Mbit/s.
const NARROW_WINDOW: u32 = 512 << 10;

/// The largest capsule that is read: the largest UDP payload, and its context ID.
const MOST_CAPSULE: u64 = 65_535;

/// A request of a user that is served.
pub(super) struct InTunnel {
    pub(super) datagrams: Option<Arc<Datagrams>>,
    /// Whether it was answered with success.
    pub(super) is_open: bool,
    /// Capsules that wait to be framed.
    pub(super) capsules: Vec<u8>,
}

/// What is said in SETTINGS, before it is known who comes; QUIC bounds the requests of whoever has no credentials.
pub(super) fn limits(serves_users: bool) -> Limits {
    Limits {
        requests: if serves_users { MOST_OF_A_USER as usize } else { MOST_REQUESTS as usize },
        unidirectional: MOST_UNIDIRECTIONAL as usize,
        field_section_bytes: 16 << 10,
        capsule_bytes: if serves_users { MOST_CAPSULE } else { 0 },
        extended_connect: serves_users,
        datagrams: serves_users,
    }
}

impl Guest {
    pub(super) fn read_datagrams(&mut self, around: &mut Around<'_>) {
        self.last_active = around.now;
        let Self { frames, quinn, http: state, streams, .. } = self;
        let find = |id: StreamId| streams.get(&id)?.tunnel.as_ref()?.datagrams.clone();
        match frames.read(quinn, state, find) {
            Ok(ended) => ended.into_iter().for_each(|id| self.abandon(id, Code::DatagramError)),
            Err(Error::Connection { code, reason } | Error::Stream { code, reason }) => {
                around.refused[Refused::Violation] += 1;
                self.close(code, reason, around.now);
            }
        }
    }

    /// Sends datagrams that wait for the user, as far as QUIC takes them.
    pub(super) fn send_datagrams(&mut self, id: StreamId) {
        let Self { frames, quinn, streams, .. } = self;
        let Some(stream) = streams.get_mut(&id).filter(|stream| stream.sends && stream.is_tunnel()) else {
            return;
        };
        if let Some(InTunnel { datagrams: Some(datagrams), capsules, .. }) = &mut stream.tunnel {
            datagrams.to_user(|payload| frames.send(quinn, id, payload, capsules));
        }
    }

    /// Tells sessions of IP packets what a DATAGRAM frame takes.
    pub(super) fn measure(&mut self) {
        let Self { frames, quinn, streams, .. } = self;
        for (id, stream) in streams {
            if let Some(InTunnel { datagrams: Some(datagrams), .. }) = &stream.tunnel {
                datagrams.set_room(|| frames.room(quinn, *id));
            }
        }
    }

    /// A CONNECT with good credentials.
    pub(super) fn tunnel(&mut self, id: StreamId, head: &Request, grant: Grant, around: &mut Around<'_>) {
        around.requests[Outcome::User] += 1;
        let account = Arc::clone(grant.account());
        let asked = tunnel::asked(head).and_then(|asked| match (&asked, around.device) {
            (Asked::Packets(_), None) => Err(Refusal::Protocol),
            (Asked::Packets(_) | Asked::Port(..), device) => {
                Ok((asked, device.map(|device| Arc::clone(device) as Arc<dyn Device>)))
            }
        });
        let (asked, device) = match asked {
            Ok(asked) => asked,
            Err(refusal) => return self.refuse_user(id, &account, refusal, around),
        };
        let Some(session) = grant.session() else {
            return self.refuse_user(id, &account, Refusal::Sessions, around);
        };
        // Only who has a place gets what a user has: credentials alone open no windows.
        if self.user.is_none() {
            let Some(connection) = grant.connection() else {
                return self.refuse_user(id, &account, Refusal::Connections, around);
            };
            let window = if connection.is_wide { USER_WINDOW } else { NARROW_WINDOW };
            self.quinn.set_max_concurrent_streams(Dir::Bi, VarInt::from_u32(MOST_OF_A_USER));
            self.quinn.set_receive_window(VarInt::from_u32(window));
            self.quinn.set_send_window(window.into());
            self.user = Some(connection);
        }
        self.frames.belong_to(&account);
        let answers = (Arc::clone(around.answers), self.handle, id);
        let tunnel = Tunnel::new(grant, session, self.quinn.remote_address(), (asked, device), answers);
        let (exchange, datagrams) = (Arc::clone(&tunnel.exchange), tunnel.datagrams.clone());
        let carries_capsules = datagrams.is_some();
        self.carries_packets |= matches!(tunnel.asked, Asked::Packets(_));
        if around.tunnels.is_none_or(|tunnels| tunnels(tunnel).is_err()) {
            return self.refuse_user(id, &account, Refusal::Sessions, around);
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.exchange = Some(exchange);
            stream.takes_content = !carries_capsules;
            stream.tunnel = Some(InTunnel { datagrams, is_open: false, capsules: Vec::new() });
        }
        if carries_capsules {
            self.http.carry_capsules(http(id));
        }
    }

    fn refuse_user(&mut self, id: StreamId, account: &Account, refusal: Refusal, around: &mut Around<'_>) {
        account.refused(refusal);
        self.answer_alone(id, &refused(refusal), around);
    }
}

/// The answer to a user's request that is not done.
pub fn refused(refusal: Refusal) -> Response {
    let mut response = Response::new(refusal.status());
    let status = format!("culvert; error={}", refusal.proxy_error());
    for (name, value) in [("content-length", b"0".to_vec()), ("proxy-status", status.into_bytes())] {
        response.fields.push(name, value).expect("a field of ours");
    }
    response
}

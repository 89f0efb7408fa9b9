//! The web server on the port of the control connections: HTTP/3 for clients that proved nothing and named us.
//!
//! | question | file |
//! |---|---|
//! | how many are there, and when do they end | this one; the driver accepts and polls them: `driver/guests.rs` |
//! | what becomes of a request | `guest_request.rs`, on a connection: `guest.rs`; of a user: `guest_user.rs` |
//! | which of them gives way to a newer one | `room.rs` |
//! | how does it reach the site, and the answer the client | `exchange.rs` |
//! | who is a user, and what of a user's request | `tunnel.rs`; the crate `users` knows users and what they may reach |
//! | how do datagrams get to and from what a user reaches | `datagrams.rs`; IP packets to the TUN device: `packets.rs` |
//!
//! Their connections are quinn-proto's of the same endpoint, in a table of their own: no peer waits for them, and they count nowhere
//! else.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    clock::Clock,
    counts::Counts,
    token_bucket::{Allowance, Pace},
};
use config::Config;
use dataplane::lanes::UnderlayId;
use gate::{identity::Endpoint, web::WebCertificate};
use h3::error::Code;
use quinn_proto::{ConnectionEvent, ConnectionHandle, MtuDiscoveryConfig, TransportConfig, VarInt, crypto};
use users::Users;

mod datagrams;
mod exchange;
mod guest;
mod packets;
mod room;
mod tunnel;

pub(crate) use self::exchange::Answers;
pub(in crate::control) use self::guest::Guest;
pub(crate) use self::packets::{ForDevice, FromElsewhere};
pub use self::{
    datagrams::Datagrams,
    exchange::{Abandoned, Ask, Exchange, Site},
    guest::refused,
    tunnel::{Asked, CONNECT_IP, CONNECT_UDP, Tunnel, Tunnels, take_capsule},
};
use self::{
    guest::Around,
    room::{Held, prefix},
};

/// Connections of clients without credentials, at all workers together.
const MOST_GUESTS: usize = 256;

/// Handshakes that a worker begins in a second, at some 0.2 ms each with a certificate for RSA: 2 % of a core.
const HANDSHAKES: Pace = Pace { per_second: 100, at_once: 100 };

/// Handshakes that are not complete, at a worker, beyond which a client has to prove its address with a Retry.
const UNPROVEN_HANDSHAKES: usize = 32;

/// Packets of those connections that a worker opens in a second, at some 5 µs each (an estimate): 5 % of a core. Peers' have shares.
const PACKETS: Pace = Pace { per_second: 10_000, at_once: 1_000 };

/// The same of users' connections, whose credentials were good: half of a core at most.
const USER_PACKETS: Pace = Pace { per_second: 100_000, at_once: 10_000 };

/// The most that one stream may have under way to us, in bytes; without credentials the connection's window is less.
const STREAM_WINDOW: u32 = 1 << 20;

/// DATAGRAM frames that QUIC holds until the worker's turn has come to read them, in bytes: all that one turn receives.
const DATAGRAMS_IN: usize = 2 << 20;

/// DATAGRAM frames that QUIC holds until it may send them, in bytes.
const DATAGRAMS_OUT: usize = 64 << 10;

/// What a connection may hold of one stream, and of all, in bytes.
const WINDOW: u32 = 64 << 10;

/// A connection without a packet ends after this time.
const IDLE: Duration = Duration::from_secs(60);

base::labelled! {
    /// What became of a request of a client that named us.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Outcome {
        /// Answered by the site, whatever it said.
        Site => "site",
        /// The site could not be asked: 502.
        SiteDown => "site_down",
        /// The site, or this end, broke off in the middle of the answer.
        BrokenOff => "broken_off",
        /// There is no site: 404.
        NoSite => "no_site",
        /// CONNECT or TRACE: 405.
        Method => "method",
        /// A head above 16 KiB: 431.
        TooLarge => "too_large",
        /// Too many requests wait for the site: 503.
        Busy => "busy",
        /// A CONNECT with good credentials; what became of it is in the user's account.
        User => "user",
        /// Reset or stopped by the client.
        Cancelled => "cancelled",
        /// A stream without a request, or with a wrong one.
        Malformed => "malformed",
    }
}

base::labelled! {
    /// Why a connection of a client that named us was not accepted, or was closed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refused {
        /// There are as many as there may be, and each has an open request.
        Full => "full",
        /// One /24 or /56 has its share of them, and each has an open request.
        Source => "source",
        /// Closed for a newer one, because it had no open request, or none on which anything came or went for a minute.
        Replaced => "replaced",
        /// More handshakes than may begin in a second.
        Hurry => "hurry",
        /// Its first packets are wrong.
        Broken => "broken",
        /// This agent drains or stops.
        Draining => "draining",
        /// No request within 10 s.
        Slow => "slow",
        /// It broke a rule of HTTP/3.
        Violation => "violation",
    }
}

/// Counts of the web server; monotonic, but for those that are open.
#[derive(Clone, Debug, Default)]
pub struct WebStats {
    /// Connections that are open, closing ones included.
    pub open: usize,
    /// Connections that were accepted.
    pub accepted: u64,
    /// Those that were not, and those that were closed.
    pub refused: Counts<Refused>,
    pub requests: Counts<Outcome>,
    /// Packets that were dropped unopened.
    pub unopened: u64,
}

/// The connections of clients that named us, at one worker.
#[derive(Default)]
pub(crate) struct Guests {
    /// `None`: nobody is answered.
    certificate: Option<WebCertificate>,
    site: Option<Endpoint>,
    asks: Option<Site>,
    users: Arc<Users>,
    tunnels: Option<Tunnels>,
    /// Where IP packets of users go; `None` if the worker has no TUN device.
    pub(crate) device: Option<Arc<ForDevice>>,
    clock: Option<Arc<dyn Clock + Send + Sync>>,
    pub(in crate::control) answers: Option<Arc<Answers>>,
    most: usize,
    /// How many of the connections have not completed their handshakes.
    pub(in crate::control) beginning: usize,
    /// Handshakes that may begin; `None` before the first.
    handshakes: Option<Allowance>,
    /// Packets that may be opened; `None` before the first.
    packets: Option<Allowance>,
    user_packets: Option<Allowance>,
    pub(in crate::control) all: HashMap<ConnectionHandle, Box<Guest>>,
    pub(in crate::control) dirty: Vec<ConnectionHandle>,
    pub(crate) stats: WebStats,
}

impl Guests {
    /// Requests go to `asks`, and what is new of them comes by `answers`.
    pub(crate) fn connect(&mut self, asks: Option<Site>, answers: Arc<Answers>) {
        (self.asks, self.answers) = (asks, Some(answers));
    }

    /// Requests of `users` go to `tunnels`; `clock` says which of them have expired.
    pub(crate) fn connect_users(
        &mut self,
        users: Arc<Users>,
        tunnels: Option<Tunnels>,
        clock: Arc<dyn Clock + Send + Sync>,
    ) {
        (self.users, self.tunnels, self.clock) = (users, tunnels, Some(clock));
    }

    /// Whether anybody could have good credentials.
    pub(in crate::control) fn serves_users(&self) -> bool {
        self.tunnels.is_some() && !self.users.is_empty()
    }

    /// Follows a new configuration; connections stay.
    pub(crate) fn follow(&mut self, config: &Config, workers: u8) {
        let certificate = config.certificate.as_ref().filter(|_| !config.http.names.is_empty());
        self.certificate = certificate.cloned();
        self.site.clone_from(&config.http.site);
        self.most = MOST_GUESTS.div_ceil(usize::from(workers.max(1)));
    }

    /// The TLS of a handshake that begins now; `None`: nobody is answered.
    pub(in crate::control) fn crypto(&self) -> Option<Arc<dyn crypto::ServerConfig>> {
        let certificate = self.certificate.as_ref()?;
        Some(certificate.crypto(self.tunnels.is_some() && self.users.asks_for_certificates()))
    }

    pub(in crate::control) fn touch(&mut self, handle: ConnectionHandle) {
        if let Some(guest) = self.all.get_mut(&handle)
            && !std::mem::replace(&mut guest.is_dirty, true)
        {
            self.dirty.push(handle);
        }
    }

    /// Marks the connections that wait for room in a socket.
    pub(crate) fn unblocked(&mut self, underlay: UnderlayId) {
        let on_it = self.all.iter().filter(|(_, guest)| guest.underlay == underlay);
        let mut handles: Vec<_> = on_it.map(|(handle, _)| *handle).collect();
        handles.sort_unstable_by_key(|handle| handle.0);
        handles.into_iter().for_each(|handle| self.touch(handle));
    }

    /// Closes all connections: the agent stops.
    pub(crate) fn close_all(&mut self, now: Instant) {
        let mut handles: Vec<_> = self.all.keys().copied().collect();
        handles.sort_unstable_by_key(|handle| handle.0);
        for handle in handles {
            if let Some(guest) = self.all.get_mut(&handle) {
                guest.close(Code::NoError, "", now);
            }
            self.touch(handle);
        }
    }

    /// A packet of one of the connections, dropped beyond what a worker may spend on them; false if the connection is not among them.
    pub(crate) fn packet(&mut self, handle: ConnectionHandle, event: ConnectionEvent, now: Instant) -> bool {
        let Some(guest) = self.all.get_mut(&handle) else { return false };
        let (allowance, pace) = if guest.is_user() {
            (&mut self.user_packets, USER_PACKETS)
        } else {
            (&mut self.packets, PACKETS)
        };
        if allowance.get_or_insert_with(|| Allowance::new(pace, now)).take(1, now) {
            guest.quinn.handle_event(event);
            self.touch(handle);
        } else {
            self.stats.unopened += 1;
        }
        true
    }

    /// The deadline of a connection has come; returns the present one if nothing is due. `None`, too, if the connection is not among them.
    pub(crate) fn timeout(&mut self, handle: ConnectionHandle, now: Instant) -> Option<Instant> {
        let deadline = self.all.get_mut(&handle)?.deadline();
        if deadline.is_none_or(|at| at > now) {
            return deadline;
        }
        let (guest, mut around) = self.split(handle, now)?;
        guest.timeout(&mut around);
        self.touch(handle);
        None
    }

    pub(in crate::control) fn split(
        &mut self,
        handle: ConnectionHandle,
        now: Instant,
    ) -> Option<(&mut Guest, Around<'_>)> {
        let Self { all, site, asks, answers, stats, users, tunnels, device, clock, .. } = self;
        let around = Around {
            answers: answers.as_ref()?,
            asks: asks.as_ref(),
            site: site.as_ref(),
            users,
            tunnels: tunnels.as_ref(),
            device: device.as_ref(),
            unix_seconds: clock.as_ref().map_or(0, |clock| clock.unix_seconds()),
            requests: &mut stats.requests,
            refused: &mut stats.refused,
            now,
        };
        Some((all.get_mut(&handle)?, around))
    }

    /// Whether so many handshakes are not complete that clients have to prove their addresses.
    pub(crate) fn many_begin(&self) -> bool {
        self.beginning > UNPROVEN_HANDSHAKES
    }

    /// Whether one more handshake may begin: whoever names us can have them begun from any address.
    pub(in crate::control) fn may_begin(&mut self, now: Instant) -> bool {
        self.handshakes.get_or_insert_with(|| Allowance::new(HANDSHAKES, now)).take(1, now)
    }

    /// Makes room for one more from `source`.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub(in crate::control) fn make_room(&mut self, source: IpAddr, now: Instant) -> Result<(), Refused> {
        if self.all.len() >= 3 * self.most {
            // Closing ones are there for some round trips longer.
            return Err(Refused::Full);
        }
        // Users' connections take nobody's place, and nobody theirs, as long as they are no more than all others.
        let users = self.all.values().filter(|guest| guest.is_user()).count() < self.most;
        let open = self.all.iter().filter(|(_, guest)| !(guest.is_over || users && guest.is_user()));
        let held = open.map(|(handle, guest)| Held {
            handle: *handle,
            prefix: prefix(guest.quinn.remote_address().ip()),
            last_active: guest.last_active,
            gives_way: room::gives_way(
                guest.is_idle(),
                guest.is_user(),
                now.saturating_duration_since(guest.last_active),
            ),
        });
        let held: Vec<Held> = held.collect();
        if let Some(oldest) = room::room(&held, prefix(source), self.most)? {
            self.stats.refused[Refused::Replaced] += 1;
            if let Some(guest) = self.all.get_mut(&oldest) {
                guest.close(Code::NoError, "", now);
            }
            self.touch(oldest);
        }
        Ok(())
    }
}

/// The QUIC parameters of a client that named us.
pub(in crate::control) fn transport(serves_users: bool) -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .max_concurrent_bidi_streams(VarInt::from_u32(guest::MOST_REQUESTS))
        .max_concurrent_uni_streams(VarInt::from_u32(guest::MOST_UNIDIRECTIONAL))
        .max_idle_timeout(Some(IDLE.try_into().expect("a minute in milliseconds is a varint")))
        .stream_receive_window(VarInt::from_u32(if serves_users { STREAM_WINDOW } else { WINDOW / 4 }))
        .receive_window(VarInt::from_u32(WINDOW))
        .send_window(WINDOW.into())
        .datagram_receive_buffer_size(serves_users.then_some(DATAGRAMS_IN))
        .datagram_send_buffer_size(DATAGRAMS_OUT)
        .mtu_discovery_config(Some(MtuDiscoveryConfig::default()));
    config
}

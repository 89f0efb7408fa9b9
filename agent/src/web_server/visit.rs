//! What those who serve a request know of it: the server, the connection, whose it is, and that it is open.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use arc_swap::ArcSwap;
use config::Config;
use gate::client_key::ClientKey;
use hyper::HeaderMap;
use ops::metrics::{HttpVersion, Metrics, TcpOutcome, TcpRefused};
use users::Users;

use super::{
    activity::{Held, Open},
    places::{Place, Places},
    proxied,
    sending::NextSending,
};
use crate::carrier::exit::Exit;

/// What all connections share.
pub(super) struct Server {
    /// What connections that begin now follow.
    pub(super) config: ArcSwap<Config>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) places: Arc<Places>,
    pub(super) users: Arc<Users>,
    /// Opens a carrier for whoever has a peer's token.
    pub(super) exit: Arc<Exit>,
}

impl Server {
    pub(super) fn refuse(&self, reason: TcpRefused) {
        self.metrics.visitors.refuse(reason);
    }
}

/// A connection whose first bytes were read.
pub(super) struct Visit {
    pub(super) server: Arc<Server>,
    /// As it was when the connection began.
    pub(super) config: Arc<Config>,
    pub(super) version: HttpVersion,
    /// The client, or the server in front of it.
    pub(super) peer: SocketAddr,
    /// The port that the client has connected to.
    pub(super) port: u16,
    pub(super) is_tls: bool,
    /// The key of the client's certificate.
    pub(super) key: Option<ClientKey>,
    pub(super) place: Place,
    /// Over HTTP/2, from the answer to a user's CONNECT to the task that sends on its stream.
    pub(super) next_sending: NextSending,
}

impl Visit {
    /// Counts a request that has come to its end.
    fn count(&self, outcome: TcpOutcome) {
        self.server.metrics.visitors.request(self.version, outcome);
    }
}

/// A request that is open; one that nobody ends was given up by its client.
pub(super) struct Asking {
    open: Open,
    held: Arc<Held>,
    visit: Arc<Visit>,
    is_counted: bool,
}

impl Asking {
    pub(super) fn new(visit: &Arc<Visit>) -> Self {
        let activity = &visit.place.activity;
        Self { open: activity.request(), held: activity.hold(), visit: Arc::clone(visit), is_counted: false }
    }

    /// Counts what has become of it. It stays open until it is dropped.
    pub(super) fn count(&mut self, outcome: TcpOutcome) {
        if outcome != TcpOutcome::Cancelled {
            self.open.answered();
        }
        self.is_counted = true;
        self.visit.count(outcome);
    }

    pub(super) fn visit(&self) -> &Visit {
        &self.visit
    }

    /// What of the answer keeps it among the requests of which something is held. Over HTTP/1.1 there is one at a time.
    pub(super) fn held(&self) -> Option<Arc<Held>> {
        (self.visit.version == HttpVersion::Http2).then(|| Arc::clone(&self.held))
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if !self.is_counted {
            self.visit.count(TcpOutcome::Cancelled);
        }
    }
}

/// Whose request it is; `None`: a trusted server says two things.
pub(super) fn client(visit: &Visit, headers: &HeaderMap) -> Option<IpAddr> {
    let (trusted, peer) = (&visit.config.http.trusted, visit.peer.ip().to_canonical());
    if proxied::is_trusted(trusted, peer) { proxied::client(headers, trusted, peer) } else { Some(peer) }
}

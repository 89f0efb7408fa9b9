//! The IP packets of a CONNECT-IP (RFC 9484), as capsules in the bytes of a tunnel, both ways.
//!
//! ```text
//!   client ── capsules ──► Link: which pass ──► TUN device, by a worker
//!          ◄── what the session says, packets of Datagrams ◄── whichever worker reads them
//! ```

use std::{
    io,
    sync::{Arc, atomic::AtomicBool},
};

use base::{
    clock::{Clock, SystemClock},
    panics::lock,
};
use engine::control::web::Datagrams;
use tokio::{
    io::{AsyncRead, AsyncWrite, split},
    sync::Notify,
};
use users::{
    Grant, Session,
    account::Refusal,
    ip::{IpSession, Next, scope::Scope},
    session::SessionEnd,
};

use super::{
    capsules::{put_all, take_all},
    visit::Visit,
    way::{Ended, end},
};

/// What a session may have to say to a client that reads nothing, in bytes.
const MOST_SAID: usize = 64 << 10;

/// A session of IP packets.
pub(super) struct Packets {
    session: IpSession,
    /// What the client has asked for.
    asked: String,
    /// What the client is told first.
    first: Vec<u8>,
    datagrams: Arc<Datagrams>,
    /// A packet waits for the client, or something that the session says.
    is_there: Arc<Notify>,
}

impl Packets {
    /// Opens a session of the user of `grant`.
    pub(super) async fn open(
        visit: &Visit,
        grant: &Grant,
        place: &Session,
        scope: Scope,
    ) -> Result<Self, Refusal> {
        let asked = scope.to_string();
        let device = visit.server.users.links().device().ok_or(Refusal::Protocol)?;
        let is_there = Arc::new(Notify::new());
        let told = Arc::clone(&is_there);
        let account = Arc::clone(place.account());
        let datagrams = Datagrams::of_packets(account, scope.protocol, move || told.notify_one(), device);
        let link = datagrams.link().ok_or(Refusal::Protocol)?;
        let (session, first) = grant.open_ip(scope, link).await?;
        Ok(Self { session, asked, first, datagrams, is_there })
    }

    /// What the client has asked for, as text.
    pub(super) fn asked(&self) -> &String {
        &self.asked
    }

    /// Carries packets both ways until the client ends the stream, or the user may not go on.
    pub(super) async fn carry(
        self,
        place: &Session,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
    ) -> Ended {
        let Self { mut session, first, datagrams, is_there, .. } = self;
        let account = place.account();
        tracing::debug!(user = account.name(), "a user has inner addresses");
        let (mut from_client, mut to_client) = split(client);
        let said = std::sync::Mutex::new(first);
        let torn = AtomicBool::new(false);
        // What the session says goes before the packets that depend on it.
        let says = |capsules: &mut Vec<u8>| capsules.append(&mut lock(&said));
        let talks = async {
            loop {
                match session.next(|| SystemClock.unix_seconds()).await {
                    Next::Send(capsules) => {
                        let mut said = lock(&said);
                        if said.len() + capsules.len() > MOST_SAID {
                            // Who asks and does not read.
                            return SessionEnd::Ended(Refusal::Capsules);
                        }
                        said.extend(capsules);
                        is_there.notify_one();
                    }
                    Next::End(reason) => return reason.map_or(SessionEnd::Revoked, SessionEnd::Ended),
                }
            }
        };
        let ended: io::Result<SessionEnd> = tokio::select! {
            ended = take_all(&mut from_client, &datagrams) => ended.map(|()| SessionEnd::Finished),
            ended = put_all(&mut to_client, &datagrams, says, &is_there, &torn) => ended.map(|never| match never {}),
            reason = talks => Ok(reason),
        };
        let ended = match ended {
            Ok(end) => {
                if let SessionEnd::Ended(refusal) = end {
                    account.refused(refusal);
                    let reason = refusal.label();
                    tracing::debug!(user = account.name(), reason, "a user's session of IP packets is ended");
                }
                Ended::Closed(end)
            }
            Err(error) => {
                tracing::debug!(user = account.name(), %error, "a user's session of IP packets has broken off");
                Ended::Broken
            }
        };
        datagrams.close();
        // Its addresses are given back before the client learns that it is over.
        drop(session);
        // Before the client takes its time.
        place.ends(ended.into());
        end(&mut to_client, ended, torn.into_inner()).await
    }
}

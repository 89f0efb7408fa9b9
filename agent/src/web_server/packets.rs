//! The IP packets of a CONNECT-IP (RFC 9484), as capsules in the bytes of a tunnel, both ways.
//!
//! ```text
//!   client ── capsules ──► Link: which pass ──► TUN device, by a worker
//!          ◄── what the session says, packets of Datagrams ◄── whichever worker reads them
//! ```

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use base::{
    clock::{Clock, SystemClock},
    panics::lock,
};
use bytes::BytesMut;
use engine::control::web::{Datagrams, take_capsule};
use h3::capsule::{self, CapsuleReader};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split},
    sync::Notify,
    task::yield_now,
};
use users::{
    Grant, Session,
    account::Refusal,
    ip::{IpSession, Next, scope::Scope},
    session::SessionEnd,
};

use super::{
    capsules::MOST_CAPSULE,
    stream::BUFFER_BYTES,
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
        let up = async {
            let mut reader = CapsuleReader::new(MOST_CAPSULE);
            let mut buffer = BytesMut::with_capacity(BUFFER_BYTES);
            while from_client.read_buf(&mut buffer).await? > 0 {
                let mut bytes = buffer.split().freeze();
                while let Some(capsule) = reader.take(&mut bytes) {
                    take_capsule(&datagrams, capsule);
                }
                buffer.reserve(BUFFER_BYTES);
                // The session reads its capsules, and other connections have their turns.
                yield_now().await;
            }
            io::Result::Ok(SessionEnd::Finished)
        };
        // Part of a capsule is written, perhaps.
        let torn = AtomicBool::new(false);
        let down = async {
            let mut capsules = Vec::with_capacity(BUFFER_BYTES);
            loop {
                // What a session says goes before the packets that depend on it.
                capsules.append(&mut lock(&said));
                datagrams.to_user(|payload| {
                    if !capsules.is_empty() && capsules.len() + payload.len() > BUFFER_BYTES {
                        return Err(payload);
                    }
                    capsule::put_datagram(&mut capsules, &payload);
                    Ok(())
                });
                if capsules.is_empty() {
                    is_there.notified().await;
                    continue;
                }
                torn.store(true, Ordering::Relaxed);
                to_client.write_all(&capsules).await?;
                to_client.flush().await?;
                torn.store(false, Ordering::Relaxed);
                capsules.clear();
            }
        };
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
            ended = up => ended,
            ended = down => ended,
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

//! The datagrams of a CONNECT-UDP, as DATAGRAM capsules (RFC 9297 §3.5) in the bytes of a tunnel.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
};

use bytes::BytesMut;
use engine::control::web::{Datagrams, take_capsule};
use h3::capsule::{self, CapsuleReader};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split},
    net::UdpSocket,
    sync::Notify,
    task::yield_now,
};
use users::policy::Transport;

use super::{
    datagrams::relay,
    stream::BUFFER_BYTES,
    way::{Ended, Way, end},
};

/// The largest capsule that is read: the largest UDP payload, and its context ID.
const MOST_CAPSULE: u64 = 65_535;

/// Takes the capsules of a client until it ends the stream.
pub(super) async fn take_all(
    from_client: &mut (impl AsyncRead + Unpin),
    datagrams: &Datagrams,
) -> io::Result<()> {
    let mut reader = CapsuleReader::new(MOST_CAPSULE);
    let mut buffer = BytesMut::with_capacity(BUFFER_BYTES);
    while from_client.read_buf(&mut buffer).await? > 0 {
        let mut bytes = buffer.split().freeze();
        while let Some(capsule) = reader.take(&mut bytes) {
            take_capsule(datagrams, capsule);
        }
        buffer.reserve(BUFFER_BYTES);
        // What was put is sent before more is read: the rest waits in the connection, not in the queue.
        yield_now().await;
    }
    Ok(())
}

/// Puts into capsules what there is for a client whenever something `is_there`, after what `says` adds. While part of a capsule may be
/// written, it is `torn`.
pub(super) async fn put_all(
    to_client: &mut (impl AsyncWrite + Unpin),
    datagrams: &Datagrams,
    says: impl Fn(&mut Vec<u8>),
    is_there: &Notify,
    torn: &AtomicBool,
) -> io::Result<Infallible> {
    let mut capsules = Vec::with_capacity(BUFFER_BYTES);
    loop {
        says(&mut capsules);
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
}

impl Way<'_> {
    /// Carries datagrams both ways until the client ends the stream or nothing has come for a while.
    pub(super) async fn datagrams(
        &self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        socket: &UdpSocket,
        datagrams: &Datagrams,
        address: SocketAddr,
    ) -> Ended {
        let user = self.account().name();
        tracing::debug!(user, %address, "a user's datagrams have a socket");
        let (mut from_client, mut to_client) = split(client);
        let is_there = Notify::new();
        let torn = AtomicBool::new(false);
        let ended: io::Result<Ended> = tokio::select! {
            ended = take_all(&mut from_client, datagrams) => ended.map(|()| Ended::Whole),
            ended = put_all(&mut to_client, datagrams, |_| {}, &is_there, &torn) => ended.map(|never| match never {}),
            () = relay(socket, datagrams, self.grant, || is_there.notify_one()) => Ok(Ended::Idle),
            () = self.over(Transport::Udp, address) => Ok(Ended::Revoked),
        };
        datagrams.close();
        let ended = ended.unwrap_or_else(|error| {
            tracing::debug!(user, %address, %error, "a user's datagrams have broken off");
            Ended::Broken
        });
        // Before the client takes its time.
        self.session.ends(ended.into());
        end(&mut to_client, ended, torn.into_inner()).await
    }
}

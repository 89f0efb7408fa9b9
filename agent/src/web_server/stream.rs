//! The bytes of a CONNECT, in both directions.

use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::BytesMut;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split},
    net::TcpStream,
    task::yield_now,
};
use users::{account::Place, policy::Transport, rate::Direction};

use super::way::{Ended, Way};

/// What is held of a tunnel in each direction, in bytes.
pub(super) const BUFFER_BYTES: usize = 16 << 10;

impl Way<'_> {
    /// Carries bytes both ways. Each direction ends by itself; what breaks off resets the other side (RFC 9113 §8.5).
    pub(super) async fn bytes(
        &self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin + Send),
        target: &mut TcpStream,
        address: SocketAddr,
    ) -> Ended {
        let account = self.account();
        tracing::debug!(user = account.name(), %address, "a user's connection is open");
        let (mut from_client, mut to_client) = split(client);
        let (mut from_target, mut to_target) = target.split();
        let is_told = AtomicBool::new(false);
        let up = async {
            let mut buffer = BytesMut::with_capacity(BUFFER_BYTES);
            while from_client.read_buf(&mut buffer).await? > 0 {
                account.bytes(Place::FromUser, buffer.len());
                self.grant.paced(Direction::FromUser, buffer.len()).await;
                to_target.write_all(&buffer).await?;
                account.bytes(Place::ToTarget, buffer.len());
                buffer.clear();
            }
            if self.was_reset(&is_told).await {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            to_target.shutdown().await
        };
        let down = async {
            let mut buffer = BytesMut::with_capacity(BUFFER_BYTES);
            while from_target.read_buf(&mut buffer).await? > 0 {
                account.bytes(Place::FromTarget, buffer.len());
                self.grant.paced(Direction::ToUser, buffer.len()).await;
                to_client.write_all(&buffer).await?;
                to_client.flush().await?;
                account.bytes(Place::ToUser, buffer.len());
                buffer.clear();
            }
            is_told.store(true, Ordering::Relaxed);
            to_client.shutdown().await
        };
        let ended: io::Result<Ended> = tokio::select! {
            ended = async { tokio::try_join!(up, down) } => ended.map(|_| Ended::Whole),
            () = self.resets(&is_told) => Err(io::ErrorKind::ConnectionReset.into()),
            () = self.over(Transport::Tcp, address) => Ok(Ended::Revoked),
        };
        ended.unwrap_or_else(|error| {
            tracing::debug!(user = account.name(), %address, %error, "a user's connection has broken off");
            Ended::Broken
        })
    }

    /// Whether what hyper reads as the end of a stream is a reset: its other half is told of both in one turn, by a task of its own.
    async fn was_reset(&self, is_told: &AtomicBool) -> bool {
        let Some(sending) = self.sending else { return false };
        for _ in 0..2 {
            yield_now().await;
        }
        sending.is_over() && !is_told.load(Ordering::Relaxed)
    }

    /// Ready when the client has reset its stream before it was told that the target has ended.
    async fn resets(&self, is_told: &AtomicBool) {
        if let Some(sending) = self.sending {
            sending.over().await;
            if !is_told.load(Ordering::Relaxed) {
                return;
            }
        }
        std::future::pending().await
    }
}

/// Ends a connection by a reset when it is closed.
pub(super) fn resets(socket: &TcpStream) {
    let _best_effort = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

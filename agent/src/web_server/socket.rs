//! The socket of a connection: what was read of it to look ahead is read again, and a reader that stands still is noticed.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};
use tokio_rustls::server::TlsStream;

use super::activity::Activity;

/// How long a client may take nothing of what is sent.
pub(super) const WRITE_WITHIN: Duration = Duration::from_secs(30);

/// The socket, with bytes that were read before and are read first.
pub(super) struct Socket {
    stream: TcpStream,
    first: Bytes,
    /// Runs while the client takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
    activity: Arc<Activity>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream, first: Bytes, activity: Arc<Activity>) -> Self {
        Self { stream, first, stalled: None, activity }
    }

    fn written<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() || self.activity.has_patience() {
            self.stalled = None;
            return outcome;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(WRITE_WITHIN)));
        match stalled.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let length = self.first.len().min(buf.remaining());
            buf.put_slice(&self.first[..length]);
            self.first.advance(length);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.activity.moved(buf.filled().len() - before);
        outcome
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = outcome {
            self.activity.moved(written);
        }
        self.written(cx, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The bytes of HTTP: what is in TLS, or the socket itself behind a server that ends TLS.
pub(super) enum Plain {
    Tls(Box<TlsStream<Socket>>),
    Socket(Socket),
}

impl Plain {
    /// The TCP connection that the bytes of HTTP come over.
    pub(super) fn tcp(&self) -> &TcpStream {
        match self {
            Self::Tls(stream) => &stream.get_ref().0.stream,
            Self::Socket(socket) => &socket.stream,
        }
    }
}

macro_rules! each {
    ($self:ident, $stream:ident => $what:expr) => {
        match $self.get_mut() {
            Plain::Tls($stream) => {
                let $stream = Pin::new(&mut **$stream);
                $what
            }
            Plain::Socket($stream) => {
                let $stream = Pin::new($stream);
                $what
            }
        }
    };
}

impl AsyncRead for Plain {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => stream.poll_read(cx, buf))
    }
}

impl AsyncWrite for Plain {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => stream.poll_shutdown(cx))
    }
}

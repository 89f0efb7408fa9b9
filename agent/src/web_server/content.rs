//! The content of a request on its way to the site, and of its answer on the way back.
//!
//! ```text
//!   client ── Upload ──► site          a piece within 60 s, or the request is given up
//!          ◄── Answer ── one piece ◄── pass_on ◄── site
//! ```
//!
//! Neither direction holds more than hyper's buffers and one piece.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use base::panics::Part;
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use net::task;
use ops::metrics::TcpOutcome;
use tokio::{
    runtime::Handle,
    sync::mpsc,
    time::{Sleep, sleep, timeout},
};

use super::activity::Held;
use crate::site::{Failure, ROOM_WITHIN};

/// How long a client may take for the next piece of its content, and the site for one of its answer.
const PIECE_WITHIN: Duration = Duration::from_secs(60);

/// What is still taken of the content of a request that is answered already, in bytes, and for how long: a client that is in the middle of
/// sending reads no answer, and may take the end of its stream for a failure.
const MOST_LEFT: usize = 1 << 20;
const LEFT_WITHIN: Duration = Duration::from_secs(2);

/// The content of a request. What is left of it when this is dropped is read and thrown away, up to a bound.
pub(super) struct Upload {
    incoming: Option<Incoming>,
    /// Runs while the client sends nothing.
    waits: Option<Pin<Box<Sleep>>>,
}

impl Upload {
    /// `None`: there is no content.
    pub(super) fn new(incoming: Option<Incoming>) -> Self {
        Self { incoming: incoming.filter(|incoming| !incoming.is_end_stream()), waits: None }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let left = self.incoming.take().filter(|incoming| !incoming.is_end_stream());
        if let Some(left) = left.filter(|_| Handle::try_current().is_ok()) {
            drop(task::spawn(Part::Site, throw_away(left)));
        }
    }
}

async fn throw_away(mut content: Incoming) {
    let all = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = content.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > MOST_LEFT {
                return;
            }
        }
    };
    timeout(LEFT_WITHIN, all).await.ok();
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(incoming).poll_frame(cx) {
            self.waits = None;
            // Trailers are not passed on.
            let frame = frame.filter(|frame| frame.as_ref().map_or(true, Frame::is_data));
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(PIECE_WITHIN)));
        ready!(waits.as_mut().poll(cx));
        Poll::Ready(Some(Err(io::Error::from(io::ErrorKind::TimedOut).into())))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

/// A piece of an answer.
pub(super) enum Piece {
    Content(Bytes),
    End,
}

/// The content of an answer.
pub(super) enum Answer {
    /// All of it.
    Whole(Bytes),
    /// As the site sends it; it has broken off if nothing comes before [`Piece::End`].
    Site(mpsc::Receiver<Piece>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Site(pieces) => Poll::Ready(match ready!(pieces.poll_recv(cx)) {
                Some(Piece::Content(bytes)) => Some(Ok(Frame::data(bytes))),
                Some(Piece::End) => None,
                None => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Site(_) => SizeHint::default(),
        }
    }
}

/// Passes the content of the site's answer on, to its end; says how that went. `held` goes with each piece.
pub(super) async fn pass_on(
    mut content: Incoming,
    client: mpsc::Sender<Piece>,
    held: Option<Arc<Held>>,
) -> TcpOutcome {
    loop {
        let frame = tokio::select! {
            // First: over HTTP/1.1 nobody waits for an end that the length has told.
            biased;
            frame = timeout(PIECE_WITHIN, content.frame()) => frame,
            () = client.closed() => return TcpOutcome::Cancelled,
        };
        let piece = match frame {
            Ok(Some(Ok(frame))) => match frame.into_data() {
                Ok(bytes) if bytes.is_empty() => continue,
                Ok(bytes) => Piece::Content(match &held {
                    Some(held) => held.piece(bytes),
                    None => bytes,
                }),
                // Trailers are not passed on.
                Err(_) => continue,
            },
            Ok(None) => {
                let told = timeout(ROOM_WITHIN, client.send(Piece::End)).await;
                return if told.is_ok() { TcpOutcome::Site } else { TcpOutcome::Cancelled };
            }
            Ok(Some(Err(_))) | Err(_) => return TcpOutcome::BrokenOff,
        };
        // A client that does not take it in time has left, or keeps the place of others.
        if !matches!(timeout(ROOM_WITHIN, client.send(piece)).await, Ok(Ok(()))) {
            return TcpOutcome::Cancelled;
        }
    }
}

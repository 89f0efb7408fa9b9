//! A request on its way to the site and its answer on the way back: what a worker and the site's thread share (neither waits for the
//! other).
//!
//! ```text
//!   worker ── head, content ──► Exchange ──► site's thread
//!          ◄── head, content ──          ◄──
//! ```
//!
//! Each direction holds 64 KiB and one piece at most: beyond that the worker leaves bytes to QUIC's flow control, and the site's thread
//! waits.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use base::panics::lock;
use bytes::Bytes;
use gate::identity::Endpoint;
use h3::message::{Request, Response};
use net::{Ready, Token};
use quinn_proto::{ConnectionHandle, StreamId};

/// The bytes of one direction of an exchange from which on no more are put.
const MOST_BYTES: usize = 64 << 10;

/// A request for the site.
pub struct Ask {
    /// The web server to ask.
    pub site: Endpoint,
    /// The client's address.
    pub client: SocketAddr,
    /// The head of the request.
    pub head: Box<Request>,
    /// Its content, and the answer.
    pub exchange: Arc<Exchange>,
}

/// Where requests go: to the thread that asks the site. It takes a request, or gives it back if too many wait.
pub type Site = Arc<dyn Fn(Ask) -> Result<(), Ask> + Send + Sync>;

/// The request and the answer of one stream.
pub struct Exchange {
    state: Mutex<State>,
    answers: Arc<Answers>,
    connection: ConnectionHandle,
    stream: StreamId,
}

#[derive(Default)]
struct State {
    up: Way,
    down: Way,
    head: Option<Response>,
    /// The site's thread waits for content, or for room.
    site: Option<Waker>,
    /// The site's thread wants to know when nobody waits any more.
    gone: Option<Waker>,
    /// The worker has been told of something that it has not taken.
    told: bool,
    failed: Option<Failed>,
    /// Nobody waits for the answer any more.
    abandoned: bool,
}

/// What a piece takes beside its content, in bytes: its place in the queue, and its share of an allocation.
const PIECE_BYTES: usize = 128;

#[derive(Default)]
struct Way {
    pieces: VecDeque<Bytes>,
    /// What they take.
    bytes: usize,
    ended: bool,
}

impl Way {
    fn has_room(&self) -> bool {
        self.bytes < MOST_BYTES
    }

    fn put(&mut self, piece: Bytes) {
        self.bytes += piece.len() + PIECE_BYTES;
        self.pieces.push_back(piece);
    }

    fn take(&mut self) -> Option<Bytes> {
        let piece = self.pieces.pop_front()?;
        self.bytes -= piece.len() + PIECE_BYTES;
        Some(piece)
    }
}

/// What a worker takes of an answer.
#[derive(Debug)]
pub(super) enum Part {
    Head(Response),
    Content(Bytes),
    End,
    Failed(Failed),
}

/// Why there is no answer, or not all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// The site could not be asked, or broke off.
    Down,
    /// Too many others are before it.
    Busy,
}

impl Exchange {
    pub(super) fn new(answers: Arc<Answers>, connection: ConnectionHandle, stream: StreamId) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), answers, connection, stream })
    }

    /// Whether content of the request finds room.
    pub(super) fn has_room(&self) -> bool {
        lock(&self.state).up.has_room()
    }

    /// Puts content of the request.
    pub(super) fn put(&self, piece: Bytes) {
        self.wake_site(|state| state.up.put(piece));
    }

    /// The request has ended.
    pub(super) fn end(&self) {
        self.wake_site(|state| state.up.ended = true);
    }

    /// Nobody waits for the answer any more.
    pub(super) fn abandon(&self) {
        let mut gone = None;
        self.wake_site(|state| {
            state.abandoned = true;
            gone = state.gone.take();
        });
        if let Some(gone) = gone {
            gone.wake();
        }
    }

    /// The worker looks at it now: it is told of what happens from here on.
    pub(super) fn look(&self) {
        lock(&self.state).told = false;
    }

    /// The next part of the answer, if it is there.
    pub(super) fn take(&self) -> Option<Part> {
        let mut state = lock(&self.state);
        state.told = false;
        if let Some(head) = state.head.take() {
            return Some(Part::Head(head));
        }
        let waits = !state.down.has_room();
        if let Some(piece) = state.down.take() {
            let has_room = state.down.has_room();
            let waker = if waits && has_room { state.site.take() } else { None };
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
            return Some(Part::Content(piece));
        }
        if let Some(failed) = state.failed {
            return Some(Part::Failed(failed));
        }
        state.down.ended.then_some(Part::End)
    }

    /// Whether the other side broke off.
    pub(super) fn has_failed(&self) -> bool {
        lock(&self.state).failed.is_some()
    }

    fn wake_site(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        let waker = state.site.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The next content of the request, `None` at its end; an error if nobody waits for the answer.
    pub fn poll_content(&self, cx: &Context<'_>) -> Poll<Result<Option<Bytes>, Abandoned>> {
        let mut state = lock(&self.state);
        if state.abandoned {
            return Poll::Ready(Err(Abandoned));
        }
        let was_full = !state.up.has_room();
        if let Some(piece) = state.up.take() {
            if was_full && state.up.has_room() {
                drop(state);
                self.tell_worker();
            }
            return Poll::Ready(Ok(Some(piece)));
        }
        if state.up.ended {
            return Poll::Ready(Ok(None));
        }
        state.site = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Whether content of the answer finds room; an error if nobody waits for it.
    pub fn poll_room(&self, cx: &Context<'_>) -> Poll<Result<(), Abandoned>> {
        let mut state = lock(&self.state);
        if state.abandoned {
            return Poll::Ready(Err(Abandoned));
        }
        if state.down.has_room() {
            return Poll::Ready(Ok(()));
        }
        state.site = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Ready when nobody waits for the answer any more.
    pub fn poll_abandoned(&self, cx: &Context<'_>) -> Poll<Abandoned> {
        let mut state = lock(&self.state);
        if state.abandoned {
            return Poll::Ready(Abandoned);
        }
        state.gone = Some(cx.waker().clone());
        Poll::Pending
    }

    /// The head of the answer.
    pub fn answer(&self, head: Response) {
        lock(&self.state).head = Some(head);
        self.tell_worker();
    }

    /// Content of the answer, after [`Exchange::poll_room`].
    pub fn answer_content(&self, piece: Bytes) {
        lock(&self.state).down.put(piece);
        self.tell_worker();
    }

    /// The answer has ended.
    pub fn answer_end(&self) {
        lock(&self.state).down.ended = true;
        self.tell_worker();
    }

    /// The site cannot be asked, or broke off.
    pub fn fail(&self) {
        lock(&self.state).failed = Some(Failed::Down);
        self.tell_worker();
    }

    /// The site is not asked: too many requests are before this one.
    pub fn is_busy(&self) {
        lock(&self.state).failed = Some(Failed::Busy);
        self.tell_worker();
    }

    /// There is something new for the worker, which is told once until it looks.
    pub fn tell_worker(&self) {
        if !std::mem::replace(&mut lock(&self.state).told, true) {
            self.answers.put(self.connection, self.stream);
        }
    }
}

/// Nobody waits for the answer of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("nobody waits for the answer")]
pub struct Abandoned;

/// The exchanges of one worker about which there is something new: each is listed once until the worker looks at it.
pub(crate) struct Answers {
    any: AtomicBool,
    list: Mutex<Vec<(ConnectionHandle, StreamId)>>,
    ready: Ready,
    token: Token,
}

impl Answers {
    /// A list that marks `token` when it has something.
    pub(crate) fn new(ready: Ready, token: Token) -> Arc<Self> {
        Arc::new(Self { any: AtomicBool::new(false), list: Mutex::default(), ready, token })
    }

    pub(super) fn put(&self, connection: ConnectionHandle, stream: StreamId) {
        lock(&self.list).push((connection, stream));
        self.any.store(true, Ordering::Release);
        self.ready.mark(self.token);
    }

    /// What was put since this was asked last.
    pub(in crate::control) fn take(&self) -> Vec<(ConnectionHandle, StreamId)> {
        if !self.any.load(Ordering::Relaxed) || !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&self.list))
    }
}

//! Asks the site (`http.site`) for whatever clients of the web server ask over HTTP/3: HTTP/1.1 on a thread beside the packet path, which
//! starts with the first request. Those on TCP (`web_server/`) ask through the same [`Connection`].

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    thread,
    time::Duration,
};

use base::panics::{self, Part};
use bytes::Bytes;
use engine::control::web::{Abandoned, Ask, Exchange, Site};
use gate::identity::Endpoint;
use h3::message::{Request, Response};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap,
    body::{Body, Frame, Incoming},
    client::conn::http1,
    header::{CONNECTION, HeaderName, HeaderValue},
};
use hyper_util::rt::TokioIo;
use net::{lookup, task};
use tokio::{
    net::TcpStream,
    runtime,
    sync::{Semaphore, mpsc},
    task::JoinHandle,
    time::timeout,
};

pub(crate) mod turns;

use self::turns::Turns;

/// Requests that wait for the site's thread; each worker is told at once if there are more.
const MOST_WAITING: usize = 256;

/// How long the site may take to accept a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// How long it may take until its answer begins.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// How long a client may take to make room for the next piece of an answer: others wait for its place.
pub(crate) const ROOM_WITHIN: Duration = Duration::from_secs(60);

/// Fields that are about one connection (RFC 9110 §7.6.1), and those that say who asked, which the agent writes itself.
const NOT_FORWARDED: [&str; 12] = [
    "connection",
    "forwarded",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-real-ip",
];

/// What workers give requests to: one thread of the process.
pub(crate) fn client() -> Site {
    static ASKS: OnceLock<Option<mpsc::Sender<Ask>>> = OnceLock::new();
    Arc::new(|ask| match ASKS.get_or_init(start) {
        Some(asks) => asks.try_send(ask).map_err(mpsc::error::TrySendError::into_inner),
        None => Err(ask),
    })
}

/// Starts the thread; `None` if it cannot be.
fn start() -> Option<mpsc::Sender<Ask>> {
    let (asks, waiting) = mpsc::channel(MOST_WAITING);
    let started = runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        thread::Builder::new().name("culvert-site".to_owned()).spawn(move || {
            if panics::isolate(Part::Site, || runtime.block_on(serve(waiting))).is_err() {
                tracing::error!("the site of [http] is not asked any more (remedy: restart the daemon)");
            }
        })
    });
    match started {
        Ok(_) => Some(asks),
        Err(error) => {
            tracing::error!(%error, "the site of [http] cannot be asked (remedy: restart the daemon, once the cause is gone)");
            None
        }
    }
}

async fn serve(mut waiting: mpsc::Receiver<Ask>) {
    let turns = Turns::new();
    while let Some(ask) = waiting.recv().await {
        let turns = Arc::clone(&turns);
        drop(task::spawn(Part::Site, async move {
            let exchange = Arc::clone(&ask.exchange);
            // A panic would leave the client without an answer.
            let failure = FailOnDrop(&exchange);
            let answered = async {
                let answer = async {
                    match turns.turn(ask.client.ip()).await {
                        Some(turn) => {
                            let answered = answer(ask).await;
                            drop(turn);
                            answered
                        }
                        None => Err(Busy.into()),
                    }
                };
                tokio::select! {
                    answered = answer => answered,
                    abandoned = std::future::poll_fn(|cx| exchange.poll_abandoned(cx)) => Err(abandoned.into()),
                }
            };
            match answered.await {
                Ok(()) => {}
                Err(error) if error.is::<Busy>() => exchange.is_busy(),
                Err(error) => {
                    tracing::debug!(error, "the site of [http] did not answer");
                    exchange.fail();
                }
            }
            std::mem::forget(failure);
        }));
    }
}

/// Too many requests are at the site or wait for it, in all or of one prefix.
#[derive(Debug, thiserror::Error)]
#[error("too many requests wait for the site")]
struct Busy;

struct FailOnDrop<'a>(&'a Exchange);

impl Drop for FailOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fail();
    }
}

/// Asks the site and hands its answer on; an error if it does not answer, or not to the end.
async fn answer(ask: Ask) -> Result<(), Failure> {
    let Ask { site, client, head, exchange } = ask;
    let mut connection = Connection::open(&site).await?;
    let request = request(&head, client.ip().to_canonical().to_string(), &exchange)?;
    pass_on(connection.ask(request).await?, &exchange).await
}

/// The most that is read of an answer before it is passed on, in bytes; heads of answers have to fit.
const READ_BYTES: usize = 32 << 10;

/// A connection to the site, for one request. It ends when this is dropped, but for one that the site has upgraded.
pub(crate) struct Connection<B> {
    sender: http1::SendRequest<B>,
    _task: AbortOnDrop,
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

impl<B: Body<Data = Bytes, Error: Into<Failure>> + Send + 'static> Connection<B> {
    /// Connects to the site.
    pub(crate) async fn open(site: &Endpoint) -> Result<Self, Failure> {
        let stream = timeout(CONNECT_WITHIN, connect(site)).await??;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            http1::Builder::new().max_buf_size(READ_BYTES).handshake(TokioIo::new(stream)).await?;
        let run = async move {
            connection.with_upgrades().await.ok();
        };
        Ok(Self { sender, _task: AbortOnDrop(task::spawn(Part::Site, run)) })
    }

    /// Sends the request; returns when the answer has begun.
    pub(crate) async fn ask(
        &mut self,
        request: hyper::Request<B>,
    ) -> Result<hyper::Response<Incoming>, Failure> {
        Ok(timeout(ANSWER_WITHIN, self.sender.send_request(request)).await??)
    }
}

/// Look-ups of the site's name, of all threads that ask it.
static LOOKUPS: Semaphore = Semaphore::const_new(config::MOST_SITE_LOOKUPS);

/// Connects to the site. A name is looked up once there is a place for it: requests are bounded, and wait no longer than for the connection.
async fn connect(site: &Endpoint) -> io::Result<TcpStream> {
    if let Ok(address) = site.host.parse::<IpAddr>() {
        return TcpStream::connect((address, site.port)).await;
    }
    let addresses = look_up(&LOOKUPS, site, lookup::resolve).await?;
    TcpStream::connect(&*addresses).await
}

async fn look_up(
    places: &'static Semaphore,
    site: &Endpoint,
    resolve: impl FnOnce(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + 'static,
) -> io::Result<Vec<SocketAddr>> {
    let place = places.acquire().await.map_err(io::Error::other)?;
    lookup::look_up(site.host.clone(), site.port, place, resolve).await
}

/// Whether a field goes on to the other side, of a message with these `headers`.
pub(crate) fn is_passed_on(headers: &HeaderMap<HeaderValue>, name: &HeaderName) -> bool {
    !NOT_FORWARDED.contains(&name.as_str()) && !is_named_by_connection(headers, name)
}

fn request(
    head: &Request,
    client: String,
    exchange: &Arc<Exchange>,
) -> Result<hyper::Request<Content>, Failure> {
    let mut request = hyper::Request::builder()
        .method(&*head.method)
        .uri(head.path.as_deref().unwrap_or("/"))
        .header("host", &*head.authority);
    for line in &head.fields {
        if !NOT_FORWARDED.contains(&line.name())
            && !["host", "cookie", "content-length"].contains(&line.name())
        {
            request = request.header(line.name(), line.value());
        }
    }
    if let Some(cookie) = head.fields.cookie() {
        request = request.header("cookie", cookie);
    }
    request = request.header("x-forwarded-for", client).header("x-forwarded-proto", "https");
    let (length, has_content) = (head.content_length(), head.has_content());
    if let Some(length) = length {
        request = request.header("content-length", length);
    }
    Ok(request.body(Content { exchange: has_content.then(|| Arc::clone(exchange)) })?)
}

/// The content of a request, as the client sends it.
struct Content {
    /// `None`: there is none.
    exchange: Option<Arc<Exchange>>,
}

impl Body for Content {
    type Data = Bytes;
    type Error = Abandoned;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Abandoned>>> {
        let Some(exchange) = &self.exchange else { return Poll::Ready(None) };
        Poll::Ready(ready!(exchange.poll_content(cx)).transpose().map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.exchange.is_none()
    }
}

async fn pass_on(response: hyper::Response<Incoming>, exchange: &Exchange) -> Result<(), Failure> {
    let (head, mut body) = response.into_parts();
    let mut answer = Response::new(head.status.as_u16());
    for (name, value) in &head.headers {
        if is_passed_on(&head.headers, name) {
            // What HTTP/3 does not have is left out.
            answer.fields.push(name.as_str().to_owned(), value.as_bytes().to_vec()).ok();
        }
    }
    exchange.answer(answer);
    while let Some(frame) = body.frame().await {
        if let Ok(piece) = frame?.into_data()
            && !piece.is_empty()
        {
            timeout(ROOM_WITHIN, std::future::poll_fn(|cx| exchange.poll_room(cx))).await??;
            exchange.answer_content(piece);
        }
    }
    exchange.answer_end();
    Ok(())
}

/// Whether `connection` names a field as one of that connection's.
fn is_named_by_connection(headers: &HeaderMap<HeaderValue>, name: &HeaderName) -> bool {
    let values = headers.get_all(CONNECTION).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|option| option.trim().eq_ignore_ascii_case(name.as_str()))
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use base::panics::lock;

    use super::*;

    #[tokio::test]
    async fn look_ups_of_the_site_are_bounded_also_when_they_were_given_up() {
        static PLACES: Semaphore = Semaphore::const_new(2);
        let site = Endpoint::new("site.example".to_owned(), 80);
        let (end, ended) = mpsc::sync_channel::<()>(0);
        let ended = Arc::new(Mutex::new(ended));
        let slow = || {
            let ended = Arc::clone(&ended);
            look_up(&PLACES, &site, move |_, _| {
                let _until = lock(&ended).recv();
                Ok(Vec::new())
            })
        };
        for _ in 0..2 {
            assert!(timeout(Duration::from_millis(5), slow()).await.is_err(), "it waits for the resolver");
        }
        assert_eq!(PLACES.available_permits(), 0);
        let third = look_up(&PLACES, &site, |_, _| unreachable!("there is no place for it"));
        assert!(timeout(Duration::from_millis(5), third).await.is_err());
        drop(end);
        assert_eq!(look_up(&PLACES, &site, |_, _| Ok(Vec::new())).await.unwrap(), []);
    }
}

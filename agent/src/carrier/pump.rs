//! Moves packets between a WebSocket and a worker.

use std::{io, pin::pin, sync::Mutex, time::Duration};

use base::panics::lock;
use h3::websocket::{self, Event, Reader, Role, Violation};
use net::carrier::StreamQueue;
use socket2::{Socket, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split},
    sync::Notify,
    time::{MissedTickBehavior, interval, timeout},
};

/// When a far end is asked whether it is there, and given up.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// The time between two questions: below the minute after which servers in front close.
    ping: Duration,
    /// How long nothing may come: three questions of the far end.
    silence: Duration,
}

const PATIENCE: Patience = Patience { ping: Duration::from_secs(25), silence: Duration::from_secs(80) };

/// The most that is written at a time, in bytes: one record of TLS.
const MOST_WRITTEN: usize = 16 << 10;

/// The most that is read at a time, in bytes.
const MOST_READ: usize = 32 << 10;

/// The most that the kernel holds and has not sent, in bytes: what it holds more waits where packets can be dropped. It is enough for
/// 50 Mbit/s if the agent is late by 5 ms.
const MOST_UNSENT: u32 = 32 << 10;

/// How long sent bytes may be without an acknowledgement: then the stream is dead, whatever TCP thinks of it.
const UNANSWERED: Duration = Duration::from_secs(15);

/// Sets what a carrier wants of TCP at either end.
///
/// # Errors
/// The kernel's.
pub(crate) fn prepare(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_notsent_lowat(MOST_UNSENT)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(UNANSWERED).with_interval(UNANSWERED / 3))?;
    socket.set_tcp_user_timeout(Some(UNANSWERED))
}

/// Why a stream has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("the worker is done with it")]
    Done,
    #[error("the far end has closed it")]
    Closed,
    #[error("nothing has come for {} s", PATIENCE.silence.as_secs())]
    Silent,
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Moves packets both ways until one end is done. `first` came with the head of the answer; `put` takes what comes to a worker.
pub(crate) async fn run<S: AsyncRead + AsyncWrite>(
    stream: S,
    role: Role,
    first: &[u8],
    queue: &StreamQueue,
    put: impl FnMut(&[u8]) -> bool,
) -> Ended {
    run_with(PATIENCE, stream, role, first, queue, put).await
}

async fn run_with<S: AsyncRead + AsyncWrite>(
    patience: Patience,
    stream: S,
    role: Role,
    first: &[u8],
    queue: &StreamQueue,
    put: impl FnMut(&[u8]) -> bool,
) -> Ended {
    let (input, output) = split(stream);
    let pongs = Pongs::default();
    let mut reader = Reader::new(role);
    reader.buffer().extend_from_slice(first);
    let reads = pin!(read(input, reader, patience.silence, &pongs, put));
    let writes = pin!(write(output, role, patience.ping, queue, &pongs));
    tokio::select! {
        ended = reads => ended,
        ended = writes => ended,
    }
}

/// The question that is not answered yet (RFC 6455 §5.5.2). Nothing is read beyond a second one: whoever asks without end reads the answers.
#[derive(Debug, Default)]
struct Pongs {
    asked: Mutex<Option<Vec<u8>>>,
    news: Notify,
    answered: Notify,
}

async fn read<S: AsyncRead>(
    mut input: ReadHalf<S>,
    mut reader: Reader,
    silence: Duration,
    pongs: &Pongs,
    mut put: impl FnMut(&[u8]) -> bool,
) -> Ended {
    loop {
        loop {
            match reader.read() {
                // What a worker does not take is dropped there, and counted.
                Ok(Some(Event::Packet(packet))) => drop(put(packet)),
                Ok(Some(Event::Ping(payload))) => {
                    let payload = payload.to_vec();
                    while lock(&pongs.asked).is_some() {
                        pongs.answered.notified().await;
                    }
                    *lock(&pongs.asked) = Some(payload);
                    pongs.news.notify_one();
                }
                Ok(Some(Event::Close)) => return Ended::Closed,
                Ok(None) => break,
                Err(violation) => return violation.into(),
            }
        }
        let buffer = reader.buffer();
        buffer.reserve(MOST_READ);
        match timeout(silence, input.read_buf(buffer)).await {
            Ok(Ok(0)) => return Ended::Closed,
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return error.into(),
            Err(_) => return Ended::Silent,
        }
    }
}

async fn write<S: AsyncWrite>(
    mut output: WriteHalf<S>,
    role: Role,
    ping: Duration,
    queue: &StreamQueue,
    pongs: &Pongs,
) -> Ended {
    let key = || (role == Role::Client).then(rand::random);
    let mut pings = interval(ping);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first one is at once.
    pings.reset();
    let mut out = Vec::with_capacity(MOST_WRITTEN);
    loop {
        let mut is_open = true;
        tokio::select! {
            ready = queue.ready() => {
                is_open = ready;
                while out.len() < MOST_WRITTEN && let Some(packet) = queue.take() {
                    websocket::put_packet(&mut out, &packet, key());
                }
            }
            () = pongs.news.notified() => {
                if let Some(asked) = lock(&pongs.asked).take() {
                    pongs.answered.notify_one();
                    websocket::put_pong(&mut out, &asked, key());
                }
            }
            _ = pings.tick() => websocket::put_ping(&mut out, key()),
        }
        if !is_open {
            websocket::put_close(&mut out, key());
        }
        let written = async {
            output.write_all(&out).await?;
            output.flush().await
        };
        if let Err(error) = written.await {
            return error.into();
        }
        out.clear();
        if !is_open {
            // The far end sees the end of the stream as well.
            output.shutdown().await.ok();
            return Ended::Done;
        }
    }
}

#[cfg(test)]
#[path = "pump_tests.rs"]
mod tests;

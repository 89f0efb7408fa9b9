//! The sending end: connections, and messages on each of them.

use std::{
    collections::BTreeMap,
    io::Read as _,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use clap::Args;
use serde_json::json;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep_until, timeout, timeout_at},
};

use crate::{
    clock::{self, now_ns},
    message::{HEADER_LEN, Header, MAX_LEN},
    transport::{Sender, Transport},
};

/// Handshakes at a time.
const CONNECTING: usize = 50;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);

/// How long after its time a message may still be handed over.
const LATE: Duration = Duration::from_secs(3);

/// How long a transport may take to get rid of what it was given at last.
const FLUSH: Duration = Duration::from_secs(1);

/// What is sent.
#[derive(Args, Clone, Debug)]
pub(crate) struct Load {
    /// Where the receiver, or the proxy before it, listens.
    #[arg(long)]
    to: SocketAddr,
    #[arg(long, default_value_t = 1)]
    connections: u64,
    /// Bytes of a message.
    #[arg(long, default_value_t = 100)]
    size: usize,
    /// Messages a second over all connections, at a fixed cadence; 0: as many as the transport takes.
    #[arg(long, default_value_t = 0)]
    rate: u64,
    /// How long messages count.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How long messages do not count, before that.
    #[arg(long, default_value_t = 0.3)]
    warm_up: f64,
    /// So many bytes on each connection, as fast as the transport takes them, instead of a time; `seconds` is the limit.
    #[arg(long)]
    bytes: Option<u64>,
}

/// When messages count, in nanoseconds of [`now_ns`], and the same end for timers.
#[derive(Clone, Copy, Debug)]
struct Times {
    from_ns: u64,
    until_ns: u64,
    begin: Instant,
    until: Instant,
}

/// What all connections did.
#[derive(Debug, Default)]
struct Totals {
    /// Messages that count: meant to be sent, and taken by the transport.
    planned: AtomicU64,
    sent: AtomicU64,
    failed: AtomicU64,
}

/// Sends, says what was sent, and keeps the connections until standard input ends.
pub(crate) async fn run<T: Transport>(transport: T, load: Load) -> anyhow::Result<()> {
    anyhow::ensure!(
        (HEADER_LEN..=MAX_LEN).contains(&load.size),
        "a message has {HEADER_LEN} to {MAX_LEN} bytes"
    );
    let begun_ns = now_ns();
    // Sockets that connections share end with it.
    let transport = Arc::new(transport);
    let (senders, refusals) = connect_all(Arc::clone(&transport), &load).await;
    let connect_ms = (now_ns() - begun_ns) as f64 / 1e6;
    let connected = senders.len();
    let largest = senders.iter().filter_map(Sender::max_len).min();
    let totals = Arc::new(Totals::default());
    let times = load.times();
    let is_too_large = largest.is_some_and(|largest| load.size > largest);
    let mut tasks = JoinSet::new();
    if !is_too_large {
        for (number, sender) in senders.into_iter().enumerate() {
            tasks.spawn(send_all(sender, load.clone(), number as u64, times, Arc::clone(&totals)));
        }
    }
    let mut errors = refusals;
    let mut kept = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok((sender, None)) => kept.push(sender),
            Ok((sender, Some(error))) => {
                kept.push(sender);
                *errors.entry(error).or_insert(0) += 1;
            }
            Err(error) => *errors.entry(format!("panicked: {error}")).or_insert(0) += 1,
        }
    }
    let per_connection = if load.rate > 0 { load.planned_each() } else { 0 };
    println!(
        "{}",
        json!({
            "connected": connected,
            "connect_ms": connect_ms,
            "largest": largest,
            "too_large": is_too_large,
            "planned": totals.planned.load(Ordering::Relaxed) + per_connection * (load.connections - connected as u64),
            "sent": totals.sent.load(Ordering::Relaxed),
            "seconds": (times.until_ns.saturating_sub(times.from_ns)) as f64 / 1e9,
            "failed": totals.failed.load(Ordering::Relaxed),
            "errors": errors,
        })
    );
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    std::process::exit(0);
}

/// Opens all connections, some at a time: those that are up, and why others are not.
async fn connect_all<T: Transport>(
    transport: Arc<T>,
    load: &Load,
) -> (Vec<T::Sender>, BTreeMap<String, u64>) {
    let places = Arc::new(Semaphore::new(CONNECTING));
    let mut tasks = JoinSet::new();
    for _ in 0..load.connections {
        let (transport, places, to) = (Arc::clone(&transport), Arc::clone(&places), load.to);
        tasks.spawn(async move {
            let _place = places.acquire_owned().await?;
            match timeout(CONNECT, transport.connect(to)).await {
                Ok(connected) => connected,
                Err(_) => anyhow::bail!("no connection within {CONNECT:?}"),
            }
        });
    }
    let (mut senders, mut refusals) = (Vec::new(), BTreeMap::new());
    while let Some(ended) = tasks.join_next().await {
        match ended {
            Ok(Ok(sender)) => senders.push(sender),
            Ok(Err(error)) => *refusals.entry(format!("{error:#}")).or_insert(0) += 1,
            Err(error) => *refusals.entry(format!("panicked: {error}")).or_insert(0) += 1,
        }
    }
    (senders, refusals)
}

/// Sends on one connection. The sender comes back, for dropping it could end the connection.
async fn send_all<S: Sender>(
    mut sender: S,
    load: Load,
    number: u64,
    times: Times,
    totals: Arc<Totals>,
) -> (S, Option<String>) {
    let result = match (load.bytes, load.rate) {
        (Some(bytes), _) => timeout_at(times.until, send_bytes(&mut sender, &load, bytes, &totals)).await,
        (None, 0) => match timeout_at(times.until, flood(&mut sender, &load, times, &totals)).await {
            // That is how it is meant to end.
            Err(_) => Ok(Ok(())),
            ended => ended,
        },
        (None, _) => {
            timeout_at(times.until + LATE, keep_cadence(&mut sender, &load, number, times, &totals)).await
        }
    };
    let error = match result {
        Ok(Ok(())) => {
            timeout(FLUSH, sender.flush()).await.ok().and_then(Result::err).map(|error| error.to_string())
        }
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("the transport took nothing more".to_owned()),
    };
    if error.is_some() {
        totals.failed.fetch_add(1, Ordering::Relaxed);
    }
    (sender, error)
}

/// As many messages as the transport takes.
async fn flood(sender: &mut impl Sender, load: &Load, times: Times, totals: &Totals) -> std::io::Result<()> {
    let mut message = vec![0; load.size];
    loop {
        let now_ns = now_ns();
        if now_ns >= times.until_ns {
            return Ok(());
        }
        times.header(load.size, now_ns).write(&mut message);
        let counts = u64::from(now_ns >= times.from_ns);
        totals.planned.fetch_add(counts, Ordering::Relaxed);
        sender.send(&message).await?;
        totals.sent.fetch_add(counts, Ordering::Relaxed);
        // A transport that always takes more would never let others of this thread run.
        tokio::task::consume_budget().await;
    }
}

/// So many bytes, in messages.
async fn send_bytes(
    sender: &mut impl Sender,
    load: &Load,
    bytes: u64,
    totals: &Totals,
) -> std::io::Result<()> {
    let mut message = vec![0; load.size];
    let mut left = bytes;
    while left > 0 {
        let len = left.min(load.size as u64).max(HEADER_LEN as u64) as usize;
        Header { len: len as u32, sent_ns: now_ns(), from_ns: 0, until_ns: u64::MAX }.write(&mut message);
        sender.send(&message[..len]).await?;
        totals.planned.fetch_add(1, Ordering::Relaxed);
        totals.sent.fetch_add(1, Ordering::Relaxed);
        left = left.saturating_sub(len as u64);
    }
    sender.flush().await
}

/// A message whenever one is due, each flushed. One that had to wait for the one before it was sent when it was due.
async fn keep_cadence(
    sender: &mut impl Sender,
    load: &Load,
    number: u64,
    times: Times,
    totals: &Totals,
) -> std::io::Result<()> {
    let mut message = vec![0; load.size];
    let interval = Duration::from_nanos(1_000_000_000 * load.connections / load.rate);
    // The connections take turns.
    let mut due = times.begin + interval.mul_f64(number as f64 / load.connections as f64);
    let epoch_ns = now_ns().wrapping_sub((Instant::now() - times.begin).as_nanos() as u64);
    let mut free_ns = 0;
    while due < times.until {
        sleep_until(due).await;
        let due_ns = epoch_ns + (due - times.begin).as_nanos() as u64;
        let sent_ns = if free_ns > due_ns { due_ns } else { now_ns() };
        if sent_ns >= times.until_ns {
            break;
        }
        let counts = u64::from(sent_ns >= times.from_ns);
        totals.planned.fetch_add(counts, Ordering::Relaxed);
        times.header(load.size, sent_ns).write(&mut message);
        sender.send(&message).await?;
        sender.flush().await?;
        totals.sent.fetch_add(counts, Ordering::Relaxed);
        free_ns = now_ns();
        due += interval;
    }
    Ok(())
}

impl Load {
    fn times(&self) -> Times {
        let (now_ns, begin) = (now_ns(), Instant::from_std(clock::instant()));
        let warm_up = Duration::from_secs_f64(self.warm_up);
        let whole = warm_up + Duration::from_secs_f64(self.seconds);
        Times {
            from_ns: now_ns + warm_up.as_nanos() as u64,
            until_ns: now_ns + whole.as_nanos() as u64,
            begin,
            until: begin + whole,
        }
    }

    /// Messages that count, of a connection that keeps the cadence.
    fn planned_each(&self) -> u64 {
        (self.rate as f64 * self.seconds / self.connections as f64).round() as u64
    }
}

impl Times {
    fn header(&self, size: usize, sent_ns: u64) -> Header {
        Header { len: size as u32, sent_ns, from_ns: self.from_ns, until_ns: self.until_ns }
    }
}

//! Requests of clients that are no users: many of them, or few and exactly timed.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::ensure;
use clap::ValueEnum;
use culvert_tests::clock;
use h3::message::Request;
use serde_json::{Value, json};
use tokio::{task::spawn_local, time};

use crate::{
    Server, User,
    http::{self, Http},
};

/// Requests of one connection that wait for their answer, at most.
const IN_FLIGHT: usize = 16;

/// How long answers are waited for after the last request, and how long a connection that failed rests.
const GRACE: Duration = Duration::from_millis(500);
const REST: Duration = Duration::from_millis(20);

/// What pairs of requests ask for.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// A tunnel for datagrams.
    Udp,
    /// A tunnel for bytes.
    Tcp,
    /// The site.
    Get,
}

#[derive(Default)]
struct Counts {
    offered: Cell<u64>,
    held: Cell<u64>,
    answered: Cell<u64>,
    failed: Cell<u64>,
    connections: Cell<u64>,
    refused: Cell<u64>,
    packets: Cell<u64>,
    bytes: Cell<u64>,
}

fn add(counter: &Cell<u64>, more: u64) {
    counter.set(counter.get() + more);
}

/// Offers a request per connection each `every`. What a connection cannot take, with 16 under way, is held and not sent.
pub(crate) async fn many(
    server: Server,
    every: Duration,
    length: Duration,
    connections: usize,
) -> anyhow::Result<Value> {
    let (server, counts) = (Rc::new(server), Rc::new(Counts::default()));
    let end = time::Instant::now() + length;
    let clients: Vec<_> = (0..connections)
        .map(|_| spawn_local(client(Rc::clone(&server), every, end, Rc::clone(&counts))))
        .collect();
    for client in clients {
        client.await??;
    }
    time::sleep(GRACE).await;
    Ok(json!({
        "offered": counts.offered.get(),
        "held": counts.held.get(),
        "answered": counts.answered.get(),
        "failed": counts.failed.get(),
        "connections": counts.connections.get(),
        "refused": counts.refused.get(),
        "sent_packets": counts.packets.get(),
        "sent_bytes": counts.bytes.get(),
    }))
}

async fn client(
    server: Rc<Server>,
    every: Duration,
    end: time::Instant,
    counts: Rc<Counts>,
) -> anyhow::Result<()> {
    let endpoint = http::endpoint(server.to)?;
    let mut ticks = time::interval(every);
    while time::Instant::now() < end {
        let connected = time::timeout_at(end, Http::connect(&endpoint, &server)).await;
        let Ok(Ok(http)) = connected else {
            add(&counts.refused, 1);
            time::sleep(REST).await;
            continue;
        };
        add(&counts.connections, 1);
        let (http, in_flight) = (Rc::new(http), Rc::new(Cell::new(0)));
        while time::Instant::now() < end && http.connection.close_reason().is_none() {
            ticks.tick().await;
            add(&counts.offered, 1);
            if in_flight.get() >= IN_FLIGHT {
                add(&counts.held, 1);
                continue;
            }
            in_flight.set(in_flight.get() + 1);
            let (http, counts, in_flight) = (Rc::clone(&http), Rc::clone(&counts), Rc::clone(&in_flight));
            let request = Request::new("GET", server.name.clone(), "/");
            spawn_local(async move {
                let outcome = match exchange(&http, &request).await {
                    Ok(_) => &counts.answered,
                    Err(_) => &counts.failed,
                };
                add(outcome, 1);
                in_flight.set(in_flight.get() - 1);
            });
        }
        let sent = http.connection.stats().udp_tx;
        add(&counts.packets, sent.datagrams);
        add(&counts.bytes, sent.bytes);
    }
    Ok(())
}

/// A request without content, and the head and content of its answer.
async fn exchange(http: &Http, request: &Request) -> anyhow::Result<(http::Head, Vec<u8>)> {
    let (_sender, mut answer) = http.ask(request, true).await?;
    let head = answer.head().await?;
    let content = answer.content().await?;
    Ok((head, content))
}

/// Alternates requests with wrong credentials and with as many bytes that are none, on one connection.
pub(crate) async fn pairs(user: &User, target: &str, count: usize, kind: Kind) -> anyhow::Result<Value> {
    let endpoint = http::endpoint(user.server.to)?;
    let mut http = Http::connect(&endpoint, &user.server).await?;
    let (name, value) = http::authorization(user);
    let mut requests = Vec::new();
    // The same letters: its code of Huffman is as long.
    for field in [name, "proxy-authorizatino"] {
        let mut request = match kind {
            Kind::Udp => http::opening(&user.server, "connect-udp", http::udp_path(target))?,
            Kind::Tcp => {
                let mut request = Request::new("CONNECT", target.to_owned(), "");
                (request.scheme, request.path) = (None, None);
                request
            }
            Kind::Get => Request::new("GET", user.server.name.clone(), "/"),
        };
        request.fields.push(field, value.clone())?;
        requests.push(request);
    }
    let lengths: Vec<_> = requests.iter().map(section_bytes).collect();
    ensure!(lengths[0] == lengths[1], "requests of {lengths:?} bytes");
    let times = RefCell::new([Vec::new(), Vec::new()]);
    let (mut statuses, mut different, mut reconnects) = (Vec::new(), 0, 0);
    for round in 0..count {
        let mut answers = Vec::new();
        // Another one is first each time.
        for which in [round % 2, 1 - round % 2] {
            let begin = clock::now();
            let answer = match exchange(&http, &requests[which]).await {
                Ok(answer) => answer,
                Err(_) if http.connection.close_reason().is_some() => {
                    reconnects += 1;
                    http = Http::connect(&endpoint, &user.server).await?;
                    break;
                }
                Err(error) => return Err(error),
            };
            times.borrow_mut()[which].push((round, micros(begin)));
            statuses.push(answer.0.status()?);
            answers.push((answer.0.without_date(), answer.1));
        }
        different += usize::from(answers.len() == 2 && answers[0] != answers[1]);
    }
    statuses.sort_unstable();
    statuses.dedup();
    let [wrong, missing] = times.into_inner();
    let differences = wrong.iter().filter_map(|(round, wrong)| {
        let (_, missing) = missing.iter().find(|(other, _)| other == round)?;
        Some(wrong - missing)
    });
    let differences: Vec<_> = differences.collect();
    Ok(json!({
        "statuses": statuses,
        "pairs": differences.len(),
        "different_answers": different,
        "reconnects": reconnects,
        "request_bytes": lengths[0],
        "wrong_p50_us": median(wrong.iter().map(|(_, time)| *time).collect()),
        "missing_p50_us": median(missing.iter().map(|(_, time)| *time).collect()),
        "difference_p50_us": median(differences),
    }))
}

fn section_bytes(request: &Request) -> usize {
    let mut section = Vec::new();
    request.encode(&mut section);
    section.len()
}

fn micros(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

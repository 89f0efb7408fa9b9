//! One run: starts its threads, sets the start when every flow is known, and collects what they found.

use std::{
    net::{Ipv4Addr, SocketAddr},
    ops::Range,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use base::clock::{Clock, SystemClock};
use net::{Path, Token, kernel, process};

use crate::bench::{
    Terminal,
    client::{self, Client, Setup},
    datagram::Plan,
    options::{Mode, Options},
    pace::{default_burst, largest_burst},
    party::{Common, Shared, nanoseconds},
    probe::{self, Probe},
    results::{OneWay, Results, rate_text},
    sender::Sent,
    shell,
    sink::{self, Sink},
    tally::Received,
};

/// The time that the flows may take to be welcomed: an agent that dials does so every second.
const WELCOME: Duration = Duration::from_secs(5);

/// The interval at which this thread looks at the progress of the others.
const LOOK: Duration = Duration::from_millis(2);

type Handle<T> = JoinHandle<anyhow::Result<T>>;

/// The threads that take part in a run.
#[derive(Default)]
struct Threads {
    sink: Option<Handle<Option<sink::Outcome>>>,
    clients: Vec<Handle<client::Outcome>>,
    probe: Option<Handle<probe::RoundTrip>>,
}

/// The outcomes of all threads of a run.
struct Collected {
    sink: Option<sink::Outcome>,
    clients: Vec<client::Outcome>,
    probe: Option<probe::RoundTrip>,
}

/// Measures `size` at a rate.
///
/// # Errors
/// Addresses that cannot be used, and flows that nobody welcomes.
pub(super) fn run(
    options: &Options,
    size: u16,
    bits_per_second: Option<u64>,
    terminal: Terminal,
) -> anyhow::Result<Results> {
    let milliseconds = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
    let most = largest_burst(size, kernel::most_segments());
    let burst = options.load.burst.unwrap_or_else(|| default_burst(size, bits_per_second, most));
    let plan = Plan {
        direction: options.load.direction,
        flows: options.load.flows,
        size,
        burst: burst.clamp(1, most),
        bits_per_second,
        warmup_ms: milliseconds(options.warmup),
        measured_ms: milliseconds(options.measured).max(1),
    };
    let shared = Arc::new(Shared::default());
    let epoch = SystemClock.now();
    let mut threads = Threads::default();
    let outcome = start(options, plan, epoch, &shared, &mut threads)
        .and_then(|()| watch(options, plan, epoch, &shared, &threads, terminal));
    shared.stop.store(true, Ordering::Relaxed);
    // A thread's own error says more than that the others had to wait for it.
    let collected = threads.join()?;
    let cpu = outcome?;
    Ok(evaluate(options, plan, collected, cpu))
}

/// Starts the sink, the clients and the probe.
fn start(
    options: &Options,
    plan: Plan,
    epoch: Instant,
    shared: &Arc<Shared>,
    threads: &mut Threads,
) -> anyhow::Result<()> {
    let (one_clock, to) = match options.mode {
        Mode::Through { to, sink } => {
            start_sink(options, sink, epoch, shared, threads)?;
            (true, to)
        }
        Mode::Direct => {
            let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            (true, start_sink(options, anywhere, epoch, shared, threads)?)
        }
        Mode::Send { to } => (false, to),
    };
    let run: u32 = rand::random();
    let gso = options.load.gso;
    let path = Path { destination: to, source: None, tos: 0 };
    let count = options.load.threads.clamp(1, plan.flows);
    for thread in 0..count {
        let flows = share(plan.flows, count, thread);
        let rate = plan.bits_per_second.map(|rate| {
            // The product needs more than 64 bits; the quotient is at most the rate.
            let share = u128::from(rate) * u128::from(flows.end - flows.start) / u128::from(plan.flows);
            u64::try_from(share).unwrap_or(rate).max(1)
        });
        let shared = Arc::clone(shared);
        let make = move |net: &mut kernel::KernelNet, clock| {
            let common = Common { clock, epoch, one_clock, shared };
            let sockets = (0..flows.end - flows.start)
                .map(|token| shell::connected(net, to, shell::BUFFER_BYTES, gso, Token(token)))
                .collect::<anyhow::Result<Vec<_>>>()?;
            let flows: Vec<(u32, Path)> = flows.map(|flow| (flow, path)).collect();
            let plan_here = Plan { bits_per_second: rate, ..plan };
            let setup = Setup { common, run, plan: plan_here, total_plan: plan };
            Ok(Client::new(setup, sockets, &flows))
        };
        threads.clients.push(shell::spawn(format!("bench-client-{thread}"), make, Client::finish)?);
    }
    if options.load.probe() {
        let shared = Arc::clone(shared);
        let warmup = Duration::from_millis(plan.warmup_ms.into());
        let counted = warmup..warmup + Duration::from_millis(plan.measured_ms.into());
        let make = move |net: &mut kernel::KernelNet, clock| {
            let socket = shell::connected(net, to, shell::BUFFER_BYTES, false, Token(0))?;
            Ok(Probe::new(Common { clock, epoch, one_clock, shared }, run, counted, socket, path))
        };
        threads.probe = Some(shell::spawn("bench-probe".to_owned(), make, Probe::finish)?);
    }
    Ok(())
}

/// The flows that thread `thread` of `threads` has.
fn share(flows: u32, threads: u32, thread: u32) -> Range<u32> {
    let bound = |thread: u32| {
        // At most `flows`, which has 32 bits.
        (u64::from(flows) * u64::from(thread) / u64::from(threads)) as u32
    };
    bound(thread)..bound(thread + 1)
}

/// Starts the sink and returns where it listens.
fn start_sink(
    options: &Options,
    listen: SocketAddr,
    epoch: Instant,
    shared: &Arc<Shared>,
    threads: &mut Threads,
) -> anyhow::Result<SocketAddr> {
    let (told, address): (SyncSender<SocketAddr>, _) = sync_channel(1);
    let (shared, gso) = (Arc::clone(shared), options.load.gso);
    let make = move |net: &mut kernel::KernelNet, clock| {
        let socket = shell::sink_socket(net, listen, gso)?;
        // The other end waits for it, or is gone with the whole run.
        let _told = told.send(socket.local_addr()).is_ok();
        Ok(Sink::new(Common { clock, epoch, one_clock: true, shared }, socket))
    };
    threads.sink = Some(shell::spawn("bench-sink".to_owned(), make, Sink::finish)?);
    address.recv().map_err(|_| anyhow!("the sink did not start"))
}

/// Waits for the flows, sets the start, and tells what happens until the clients have ended: the CPU seconds used while
/// datagrams were counted.
fn watch(
    options: &Options,
    plan: Plan,
    epoch: Instant,
    shared: &Shared,
    threads: &Threads,
    terminal: Terminal,
) -> anyhow::Result<f64> {
    let ended = || threads.clients.iter().all(JoinHandle::is_finished);
    let give_up = SystemClock.now() + WELCOME;
    while shared.welcomed.load(Ordering::Acquire) < plan.flows {
        if SystemClock.now() >= give_up || threads.clients.iter().any(JoinHandle::is_finished) {
            return Err(unanswered(options, plan, shared));
        }
        std::thread::sleep(LOOK);
    }
    let start = SystemClock.now();
    shared.start_ns.store(nanoseconds(epoch, start).max(1), Ordering::Release);

    let counted_from = start + Duration::from_millis(plan.warmup_ms.into());
    let counted_until = counted_from + Duration::from_millis(plan.measured_ms.into());
    let sleep_until = |at: Instant| std::thread::sleep(at.saturating_duration_since(SystemClock.now()));
    sleep_until(counted_from);
    let cpu_before = process::cpu_time();
    let mut before = (0, 0);
    let mut tick = counted_from;
    while tick < counted_until {
        tick = (tick + Duration::from_secs(1)).min(counted_until);
        sleep_until(tick);
        let now = (shared.sent.load(Ordering::Relaxed), shared.received.load(Ordering::Relaxed));
        if options.load.progress() {
            (terminal.complain)(&progress(plan, tick - counted_from, now.0 - before.0, now.1 - before.1));
        }
        before = now;
    }
    let cpu = process::cpu_time().saturating_sub(cpu_before);
    while !ended() {
        std::thread::sleep(LOOK);
    }
    Ok(cpu.as_secs_f64())
}

/// The line of a second: datagrams of the load are counted, both directions together.
fn progress(plan: Plan, elapsed: Duration, sent: u64, received: u64) -> String {
    let bits = |datagrams: u64| rate_text(datagrams as f64 * f64::from(plan.size) * 8.0);
    format!("{:>5.1} s   sent {:>14}   received {:>14}", elapsed.as_secs_f64(), bits(sent), bits(received))
}

/// Why the flows were not welcomed, and what to look at.
fn unanswered(options: &Options, plan: Plan, shared: &Shared) -> anyhow::Error {
    let welcomed = shared.welcomed.load(Ordering::Relaxed);
    if welcomed > 0 {
        return anyhow!(
            "only {welcomed} of {} flows were answered within {} s: does the agent allow so many?",
            plan.flows,
            WELCOME.as_secs()
        );
    }
    let refused = shared.refused.load(Ordering::Relaxed);
    match options.mode {
        Mode::Through { to, .. } | Mode::Send { to } if refused => {
            anyhow!(
                "nothing arrived: nobody listens at {to}; is the agent running, and is that its [[udp]] port?"
            )
        }
        Mode::Through { to, sink } => anyhow!(
            "nothing arrived within {} s by way of {to}: is the agent connected, and is its service's upstream \
             the sink's address, {sink}?",
            WELCOME.as_secs()
        ),
        Mode::Send { to } => anyhow!(
            "nothing came back from {to} within {} s: does `culvert bench sink` run where that leads to?",
            WELCOME.as_secs()
        ),
        Mode::Direct => anyhow!("nothing arrived over loopback: does a firewall drop it?"),
    }
}

impl Threads {
    fn join(self) -> anyhow::Result<Collected> {
        // All are waited for before the first error is returned.
        let clients: Vec<_> = self.clients.into_iter().map(join).collect();
        let probe = self.probe.map(join);
        let sink = self.sink.map(join);
        Ok(Collected {
            sink: sink.transpose()?.flatten(),
            clients: clients.into_iter().collect::<anyhow::Result<_>>()?,
            probe: probe.transpose()?,
        })
    }
}

fn join<T>(handle: Handle<T>) -> anyhow::Result<T> {
    let name = handle.thread().name().unwrap_or("a thread").to_owned();
    handle.join().map_err(|_| anyhow!("{name} panicked"))?
}

fn evaluate(options: &Options, plan: Plan, collected: Collected, cpu_seconds: f64) -> Results {
    let Collected { sink, clients, probe } = collected;
    let seconds = f64::from(plan.measured_ms) / 1e3;
    let (mut sent_up, mut received_down) = (Sent::default(), Received::default());
    // What a sink in another process reported.
    let (mut sent_down, mut received_up) = (Sent::default(), Received::default());
    for client in clients {
        sent_up.add(&client.sent);
        received_down.add(client.received);
        for report in client.reports.iter().flatten() {
            sent_down.datagrams += report.sent;
            received_up.counts.add(&report.counts);
            // These are of the whole sink, and grow: the last report has the most.
            sent_down.blocked = sent_down.blocked.max(report.blocked);
            sent_down.errors = sent_down.errors.max(report.errors);
            received_up.corrupt = received_up.corrupt.max(report.corrupt);
            received_up.kernel_drops = received_up.kernel_drops.max(report.kernel_drops);
        }
    }
    let one_clock = sink.is_some();
    if let Some(sink) = sink {
        (sent_down, received_up) = (sink.sent, sink.received);
    }
    let way = |sent, received: Received| {
        let took = received.span.map_or(0.0, |(first, last)| (last - first).as_secs_f64());
        OneWay {
            sent,
            counts: received.counts,
            corrupt: received.corrupt,
            kernel_drops: received.kernel_drops,
            one_way: one_clock.then(|| received.one_way.histogram()),
            seconds: took.max(seconds),
        }
    };
    Results {
        mode: options.mode.name(),
        direction: plan.direction,
        size: plan.size,
        flows: plan.flows,
        burst: plan.burst,
        offered_bps: plan.bits_per_second,
        up: plan.direction.up().then(|| way(sent_up, received_up)),
        down: plan.direction.down().then(|| way(sent_down, received_down)),
        round_trip: probe,
        cpu_seconds,
        seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_all_flows() {
        for (flows, threads) in [(1, 1), (7, 3), (10_000, 6), (28_232, 64), (5, 5)] {
            let mut next = 0;
            for thread in 0..threads {
                let part = share(flows, threads, thread);
                assert_eq!(part.start, next);
                assert!(!part.is_empty(), "{flows} flows, {threads} threads");
                next = part.end;
            }
            assert_eq!(next, flows);
        }
    }
}

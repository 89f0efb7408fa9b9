//! The sink in a process of its own: what it counts, its senders are told.

use std::{
    io::{IsTerminal, stderr},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::anyhow;
use base::clock::{Clock, SystemClock};
use net::kernel::KernelNet;
use serde_json::json;

use crate::bench::{
    Terminal,
    options::{self, SinkOptions},
    party::{Common, Shared},
    shell,
    sink::Sink,
};

/// Runs a sink and prints what the last run brought it.
pub(super) fn run_sink(options: &SinkOptions, terminal: Terminal) -> anyhow::Result<()> {
    let SinkOptions { listen, gso, .. } = *options;
    let duration = options.seconds.map(options::duration).transpose()?;
    let progress = stderr().is_terminal();
    let shared = Arc::new(Shared::default());
    let for_sink = Arc::clone(&shared);
    let start = SystemClock.now();
    let make = move |net: &mut KernelNet, clock| {
        let socket = shell::sink_socket(net, listen, gso)?;
        (terminal.complain)(&format_args!("the sink listens on {}", socket.local_addr()));
        Ok(Sink::new(Common { clock, epoch: start, one_clock: false, shared: for_sink }, socket))
    };
    let sink = shell::spawn("bench-sink".to_owned(), make, Sink::finish)?;
    let mut tick = start;
    let mut before = 0;
    while !sink.is_finished() && duration.is_none_or(|duration| tick < start + duration) {
        let until = tick + Duration::from_secs(1);
        tick = duration.map_or(until, |duration| until.min(start + duration));
        std::thread::sleep(tick.saturating_duration_since(SystemClock.now()));
        let received = shared.received.load(Ordering::Relaxed);
        if progress && received > before {
            (terminal.complain)(&format_args!("{} datagrams received", received - before));
        }
        before = received;
    }
    shared.stop.store(true, Ordering::Relaxed);
    let outcome = sink.join().map_err(|_| anyhow!("the sink panicked"))??;
    let Some(outcome) = outcome else {
        return Err(anyhow!("nothing arrived: nobody opened a flow to {listen}"));
    };
    let (counts, received) = (outcome.received.counts, &outcome.received);
    if options.json {
        return (terminal.say)(&json!({
            "mode": "sink",
            "received_datagrams": counts.distinct,
            "reordered": counts.reordered,
            "duplicates": counts.duplicates,
            "corrupt": received.corrupt,
            "receiver_kernel_drops": received.kernel_drops,
            "sent_datagrams": outcome.sent.datagrams,
        }));
    }
    (terminal.say)(&format_args!(
        "last run: received {}, reordered {}, duplicates {}, corrupt {}, kernel dropped {} buffers; sent {}",
        counts.distinct,
        counts.reordered,
        counts.duplicates,
        received.corrupt,
        received.kernel_drops,
        outcome.sent.datagrams
    ))
}

//! A path with a bottleneck for real packets: the model of the simulator, in the place of a router's link.
//!
//! ```text
//! path_relay --left west --right east --rate 200Mbit --delay 40ms --queue 40ms --loss 0.01
//! ```
//!
//! It runs in a network namespace that has an interface to either side, makes two TUN devices, `there` (from the left to the
//! right) and `back`, and has the namespace route packets from an interface into the device of its direction. Each packet that
//! the kernel gives to a device passes a [`Bottleneck`](testkit::simulation::bottleneck::Bottleneck) in real time, and
//! is written back to the device, from where it is routed on. So the kernel cuts super-packets and completes checksums before
//! the bottleneck, and a packet's TTL falls by two.
//!
//! | question | file |
//! |---|---|
//! | the command line, and steps | [`options`] |
//! | devices, rules and routes; packets that the kernel dropped | [`router`] |
//! | packets through a bottleneck in real time | [`carry`] |
//!
//! An empty line on standard input is answered with a line of JSON, the account so far; any other line is a step, made at once
//! and answered likewise. At the end of standard input it prints its account and ends. `void` lists what the relay itself did
//! to packets that no option asks for: with anything in it, a measurement is worth nothing.

mod carry;
mod options;
mod router;

use std::{io, sync::Arc, thread, time::Duration};

use anyhow::Context;
use clap::Parser;
use culvert_tests::clock;
use serde_json::{Value, json};

use self::{
    carry::Carrier,
    options::{Options, Step},
    router::Router,
};

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let mut router = Router::new(&options.left, &options.right).context("the router")?;
    let begin = clock::now();
    let devices = router.devices().context("the devices are new")?;
    let mut carriers = Vec::new();
    for ((device, settings), number) in devices.into_iter().zip(options.settings()).zip(0..) {
        let carrier = Arc::new(Carrier::new(device, settings, options.seed + number));
        carriers.push(Arc::clone(&carrier));
        thread::Builder::new().name(format!("carry-{number}")).spawn(move || carrier.run())?;
    }
    for step in &options.step {
        let (step, carriers) = (step.clone(), carriers.clone());
        thread::spawn(move || {
            thread::sleep(step.after);
            apply(&step, &carriers);
        });
    }
    let account = || -> anyhow::Result<Value> {
        let (there, back) =
            (carriers[0].account("there", options.late), carriers[1].account("back", options.late));
        let dropped = router.dropped()?;
        let mut void = [&there.void[..], &back.void[..]].concat();
        void.extend(dropped.iter().map(|(what, count)| format!("{count} packets dropped by {what}")));
        let seconds = begin.elapsed().as_secs_f64();
        Ok(json!({ "seconds": seconds, "there": there.json, "back": back.json, "void": void }))
    };
    print(&json!({ "ready": true }));
    for line in io::stdin().lines().map_while(Result::ok) {
        if !line.trim().is_empty() {
            let step = Step::parse(&format!("0s:{line}"));
            apply(&step.map_err(anyhow::Error::msg)?, &carriers);
        }
        print(&account()?);
    }
    // What is under way is not waited for.
    thread::sleep(Duration::from_millis(1));
    print(&account()?);
    Ok(())
}

fn apply(step: &Step, carriers: &[Arc<Carrier>]) {
    for (carrier, changes) in carriers.iter().zip(&step.changes) {
        carrier.change(changes);
    }
}

#[expect(clippy::print_stdout, reason = "the program's answers")]
fn print(answer: &Value) {
    println!("{answer}");
}

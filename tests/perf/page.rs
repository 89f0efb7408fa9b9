//! The status page with a thousand peers: how soon it is useful, how soon it shows what changed, how many bytes it takes a
//! minute, and what it costs the agent.
//!
//! ```text
//! cargo build --release -p culvert && cargo run --release -p culvert-tests --example page -- --seconds 60
//! ```
//!
//! The first three are of a browser at a server with a thousand peers that are busy; the last is of a real agent with a
//! thousand peers in its file, once without and once with a page open.

#[path = "../browser/page/daemon.rs"]
#[expect(dead_code, reason = "the test asks for more than what is measured here")]
mod daemon;

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    thread,
    time::Duration,
};

use base::panics::lock;
use clap::Parser;
use culvert_tests::{agent::Agent, browser::Browser, clock, place::Place, ports};
use daemon::{Peers, Server, thousand};
use engine::health::Health;
use gate::identity::Identity;

#[derive(Parser)]
struct Options {
    /// For how long the page is looked at, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// An idle processor tick in `/proc/PID/stat`.
const TICKS_PER_SECOND: f64 = 100.0;

fn main() {
    let Options { seconds } = Options::parse();
    let time = Duration::from_secs(seconds);
    say("a thousand busy peers, in a browser", "");
    in_a_browser(time);
    say("an agent with a thousand peers in its file", "");
    at_an_agent(time);
}

fn in_a_browser(time: Duration) {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let peers = Arc::<Peers>::default();
    *lock(&peers.list) = thousand();
    let _server = Server::start(address, &peers, "", Health::new(0, clock::now()));
    let browser = Browser::new();
    browser.open(&format!("http://{address}/"));
    browser.wait_for_text("#shown", "of 1,000");
    // The second time, as of a browser that is warm.
    browser.cdp("Page.enable", &serde_json::json!({}));
    let first = r"window.firstView = null; new MutationObserver(() => { if (document.querySelector('#peers tbody tr td')) window.firstView ??= performance.now() }).observe(document, { childList: true, subtree: true })";
    browser.cdp("Page.addScriptToEvaluateOnNewDocument", &serde_json::json!({ "source": first }));
    browser.open(&format!("http://{address}/"));
    browser.wait_for("window.firstView !== null");
    let view = browser.run("return window.firstView").as_f64().unwrap_or(f64::NAN);
    say("  first useful view", &format!("{view:.0} ms"));
    let renamed = clock::now();
    lock(&peers.list)[995].name = "aaa-renamed".into();
    browser.wait_for_text("#peers tbody", "aaa-renamed");
    say("  a change is shown after", &format!("{} ms", (clock::now() - renamed).as_millis()));
    browser.run("performance.setResourceTimingBufferSize(10000); performance.clearResourceTimings()");
    thread::sleep(time);
    let sums = browser.run(
        "const all = performance.getEntriesByType('resource');
         return [all.length, all.reduce((sum, one) => sum + one.transferSize, 0), performance.memory.usedJSHeapSize]",
    );
    let number = |place: usize| sums[place].as_f64().unwrap_or(f64::NAN);
    let minutes = time.as_secs_f64() / 60.0;
    say("  bytes a minute, heads of answers included", &format!("{:.0} KiB", number(1) / 1024.0 / minutes));
    say("  requests a minute", &format!("{:.0}", number(0) / minutes));
    say("  memory of the page's script", &format!("{:.1} MiB", number(2) / f64::from(1 << 20)));
}

fn at_an_agent(time: Duration) {
    let mut agent = Agent::new("hub", &Place::Host);
    let mut known = format!(
        "metrics.page = true\nlimits.peers = 1000\ntransport.listen = [\"127.0.0.1:{}\"]\n",
        ports::free()
    );
    for number in 0..1_000 {
        let key = Identity::generate().expect("the kernel has random bytes").public_key();
        writeln!(known, "[[peer]]\nname = \"site-{number:04}\"\npublic_key = \"{key}\"")
            .expect("a String takes all");
    }
    agent.configure(&known);
    agent.start();
    let pid = agent.process().pid();
    thread::sleep(Duration::from_secs(5));
    let share =
        |ticks: [u64; 2]| (ticks[1] - ticks[0]) as f64 / TICKS_PER_SECOND / time.as_secs_f64() * 100.0;
    let measure = || {
        let before = [ticks(pid, None), ticks(pid, Some("culvert-admin"))];
        thread::sleep(time);
        let after = [ticks(pid, None), ticks(pid, Some("culvert-admin"))];
        [0, 1].map(|which| share([before[which], after[which]]))
    };
    let [all, admin] = measure();
    say("  without a page open: all threads, admin thread", &format!("{all:.2} %, {admin:.2} %"));
    let browser = Browser::new();
    browser.open(&format!("http://{}/", agent.metrics()));
    browser.wait_for_text("#shown", "of 1,000");
    let [all, admin] = measure();
    say("  with a page open: all threads, admin thread", &format!("{all:.2} %, {admin:.2} %"));
}

/// The CPU time of a process, or of its thread of this name, in ticks.
fn ticks(pid: u32, thread: Option<&str>) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let stats =
        threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
    let chosen = stats.filter(|stat| thread.is_none_or(|name| stat.contains(&format!("({name})"))));
    // proc(5): utime and stime are the 14th and the 15th field.
    let of = |stat: String| -> u64 {
        let fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
        fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
    };
    chosen.map(of).sum()
}

fn say(what: &str, value: &str) {
    writeln!(io::stdout(), "{what:<54} {value}").expect("standard output is open");
}

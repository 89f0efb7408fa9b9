//! The TUN device with the real kernel, in a network namespace of its own: what is written arrives, what is sent is read,
//! and what the control plane sets is there, and gone afterwards.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod device;
mod inside;
mod kernel;
mod lost;
mod overrun;
mod packets;
mod refusals;
mod restored;
mod unprivileged;

use std::{
    path::Path,
    process::{self, Command},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use config::{Config, OwnRoutes, Tun};
use culvert_tests::{
    clock,
    needs::{self, Need},
    place::Place,
    process::{run, text},
};
use engine::{
    health::Health,
    registry::PeerRegistry,
    tunnel::{Tunnel, TunnelError},
    worker::Snapshots,
};
use gate::identity::Identity;
use net::tun::TunPort;

/// What these tests need.
const NEEDS: &[Need] = &[Need::Root, Need::Tool("setpriv", "util-linux"), Need::Tool("ip", "iproute2")];

/// A network namespace without any cable; dropping it removes it.
struct Space(String);

impl Space {
    /// Makes it, if this machine can; else the test is listed as skipped.
    fn new(test: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if !needs::met(test, NEEDS) {
            return None;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The guard is there before the namespace is, so that a failure on the way leaves none behind.
        let space = Self(format!("culvert-tun-{}-{number}", process::id()));
        let output = run(Command::new("ip").args(["netns", "add", &space.0]), Duration::from_secs(10));
        assert!(output.status.success(), "{}", text(&output.stderr));
        space.ip("link set lo up");
        Some(space)
    }

    fn place(&self) -> Place {
        Place::Namespace(self.0.clone())
    }

    /// What `ip ARGS` says here.
    #[track_caller]
    fn ip(&self, args: &str) -> String {
        let output = run(self.place().command("ip").args(args.split_whitespace()), Duration::from_secs(10));
        assert!(output.status.success(), "ip {args}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Sets a `sysctl`, in `/proc/sys` notation.
    #[track_caller]
    fn set(&self, key: &str, value: &str) {
        self.place().enter(|| std::fs::write(Path::new("/proc/sys").join(key), value).unwrap());
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        drop(Command::new("ip").args(["netns", "del", &self.0]).output());
    }
}

/// A `[tun]` with these addresses, separated by spaces.
fn tun(name: &str, addresses: &str) -> Tun {
    Tun {
        name: Arc::from(name),
        addresses: addresses.split_whitespace().map(|address| address.parse().unwrap()).collect(),
        mtu: None,
        offload: true,
        routes: OwnRoutes::All,
        ..Tun::default()
    }
}

/// A configuration with nothing but the least and `more`.
fn config(more: &str) -> Config {
    let text = format!("identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:4433\"]\n{more}");
    Config::parse(&text, Path::new("")).unwrap()
}

/// Opens a tunnel with the peers of the configuration, in the namespace of this thread.
fn open(config: &Config, tun: &Tun, workers: u8) -> Result<(Tunnel, Vec<TunPort>), TunnelError> {
    Tunnel::open(config, tun, &registry(config), &snapshots(), &health(), workers)
}

/// That of an agent that has begun to work.
fn health() -> Arc<Health> {
    let health = Arc::new(Health::new(0, clock::now()));
    health.set_ready(true);
    health
}

fn snapshots() -> Arc<Snapshots> {
    Arc::default()
}

fn registry(config: &Config) -> Arc<PeerRegistry> {
    PeerRegistry::new(config, Identity::generate().unwrap().public_key())
}

/// Waits until a device is gone. It goes with the last of its descriptors, and a process that another test starts has them for a
/// moment, until it runs its program.
#[track_caller]
fn gone(space: &Space, name: &str) {
    until(space, "link", |said| !said.contains(name));
}

/// Asks `ip ARGS` until it says what is `wanted`: a thread and the kernel do things in their own time.
#[track_caller]
fn until(space: &Space, args: &str, mut wanted: impl FnMut(&str) -> bool) {
    const ATTEMPTS: usize = 500;
    const PAUSE: Duration = Duration::from_millis(20);
    for _ in 0..ATTEMPTS {
        if wanted(&space.ip(args)) {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    panic!("ip {args}: {}", space.ip(args));
}

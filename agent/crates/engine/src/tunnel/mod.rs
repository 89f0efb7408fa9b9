//! The TUN device as the control plane sees it: the packet sizes that workers find out become MTUs and kernel routes.
//!
//! | question | file |
//! |---|---|
//! | the device is made, and looked after on a thread of its own | this one |
//! | which MTU and which routes there should be | `plan.rs` (pure) |
//! | how a plan is applied to the kernel, and its rules taken back | `kernel.rs` |
//! | which routing table is ours among several agents' | `table.rs` |
//! | which table the kernel's routes make, with `tun.routing = "kernel"` | `learn.rs` (pure) |
//! | when it is made anew | `follow.rs`, on another thread |
//! | which log lines are repeated, and when | `logged.rs` |
//! | checks before the device is made, and all errors | `checks.rs` |
//!
//! ```text
//!   workers ─ set_mtu ─► MtuTable ───┐                       ┌──► device: MTU
//!                                  ├──► Plan ──► Kernel ───┼──► routes, each with its peer's MTU
//!   PeerRegistry ── once a second ───────┘                       └──► rules, with transport.mark
//!
//!   device: what the kernel dropped ── once a second ──► snapshots
//! ```

use std::{
    fs, io,
    path::PathBuf,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use base::{
    clock::{Clock, SystemClock},
    fault::{self, Fault},
};
use config::{self, Config};
use dataplane::relay::Direction;
use net::{
    netlink::{Link, LinkChange, Netlink, Which},
    tun::{TunDevice, TunHold, TunPort},
};

use self::{
    follow::RouteFollower,
    kernel::{Compared, Kernel},
    logged::Logged,
    plan::{Narrow, Plan, Underlay, Width},
};
use crate::{
    health::Health,
    mtu_table::{MtuTable, Paths},
    origin::PeerOrigin,
    registry::PeerRegistry,
    worker::{self, DeviceSnapshot, Snapshots},
};

mod checks;
mod follow;
mod kernel;
mod learn;
mod logged;
mod plan;
mod table;

pub use checks::TunnelError;
pub use checks::{before, routes_are_free};
pub use plan::LEAST_MTU;

/// The length of each queue of the device, in packets; the usual 500 are too few for a burst at our rates.
pub const QUEUE_PACKETS: u32 = 1_000;

/// The interval at which the peers, the device and its counters are looked at.
const TICK: Duration = Duration::from_secs(1);

/// The device's addresses, MTU, routes and rules. Dropping it ends its thread and takes the rules back; the device itself, and
/// its routes, last until the workers have closed their queues, too.
pub struct Tunnel {
    /// Follows the kernel's routes with `tun.routing = "kernel"`; ends with the tunnel.
    _routes: Option<RouteFollower>,
    /// The board on which workers publish the packet sizes that fit.
    pub board: Arc<MtuTable>,
    thread: Option<JoinHandle<()>>,
    index: u32,
    /// While the thread runs, a device that is gone was removed by another program.
    _device: TunHold,
}

impl Tunnel {
    /// Makes the device of the configuration with the routes of `registry`'s peers, and brings it up; returns the queue of each
    /// worker, too. From then on `snapshots` has the kernel's drops; if the device is removed, `health` is no longer ready.
    ///
    /// # Errors
    /// See [`TunnelError`]. Everything done until then is undone.
    pub fn open(
        config: &Config,
        tun: &config::Tun,
        registry: &Arc<PeerRegistry>,
        snapshots: &Arc<Snapshots>,
        health: &Arc<Health>,
        workers: u8,
    ) -> Result<(Self, Vec<TunPort>), TunnelError> {
        let failed = |what| move |error| TunnelError::of_setting(&tun.name, what, error);
        let mut netlink = Netlink::open().map_err(failed("the device"))?;
        before(&mut netlink, tun)?;
        let mut device = TunDevice::open(&tun.name, workers, tun.offload)
            .map_err(|error| TunnelError::of_device(&tun.name, error))?;
        device.join_tunnels(net::tunnels::probe);
        set_quiet(&tun.name);
        let start = worker::first_mtu(config).max(LEAST_MTU);
        let change = LinkChange { up: true, mtu: Some(start), queue_packets: Some(QUEUE_PACKETS) };
        netlink.set_link(device.index, change).map_err(failed("the device"))?;
        let tun = config::Tun { addresses: registry.device_addresses(tun), ..tun.clone() };
        for address in &tun.addresses {
            let added = netlink.add_address(device.index, *address);
            added.map_err(|error| TunnelError::of_address(&tun.name, *address, error))?;
        }
        let mut follower = Follower {
            kernel: Kernel::new(netlink, device.index, start, config.transport.mark)?,
            tun: tun.clone(),
            start,
            underlay: Underlay::new(&config.transport),
            index: device.index,
            hold: device.hold.clone(),
            registry: Arc::clone(registry),
            seen: DeviceSnapshot { present: Some(true), ..DeviceSnapshot::default() },
            snapshots: Arc::clone(snapshots),
            health: Arc::clone(health),
            narrow: Narrow::default(),
            device: Device::Up,
            logged: Logged::default(),
        };
        follower.begin()?;
        let follow = || RouteFollower::start(device.index, registry, tun.clone());
        let routes = tun.follows_routes().then(follow).transpose()?;
        snapshots.set_device(follower.seen);
        let board = Arc::<MtuTable>::default();
        let watched = Arc::clone(&board);
        let thread = std::thread::Builder::new()
            .name("culvert-tunnel".to_owned())
            .spawn(move || follower.run(&watched, &SystemClock))
            .map_err(|error| TunnelError::Kernel { what: "the thread", error })?;
        tracing::info!(
            name = &*tun.name,
            addresses = base::throttle::list(&tun.addresses),
            mtu = start,
            tcp_offload = device.offload.tcp,
            udp_offload = device.offload.udp,
            tunnels_cut = device.offload.tunnels.cut,
            tunnels_joined_ipv4 = device.offload.tunnels.join_ipv4,
            tunnels_joined_ipv6 = device.offload.tunnels.join_ipv6,
            "the TUN device is up"
        );
        let (thread, index) = (Some(thread), device.index);
        Ok((Self { _routes: routes, board, thread, index, _device: device.hold }, device.ports))
    }
}

impl Tunnel {
    /// Removes the device, and with it its routes, from workers that do not close their queues.
    pub fn remove_device(&self) {
        if let Err(error) = Netlink::open().and_then(|mut netlink| netlink.remove_link(self.index)) {
            tracing::warn!(%error, "the TUN device stays until the process has ended (remedy: none is needed, it goes with the process)");
        }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.board.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the tunnel's thread panicked (remedy: restart the daemon, and report it)");
        }
    }
}

/// The state of the tunnel's thread, which makes the device and the kernel's routes follow the peers.
struct Follower {
    kernel: Kernel,
    tun: config::Tun,
    start: u16,
    underlay: Underlay,
    index: u32,
    hold: TunHold,
    registry: Arc<PeerRegistry>,
    seen: DeviceSnapshot,
    snapshots: Arc<Snapshots>,
    health: Arc<Health>,
    narrow: Narrow,
    device: Device,
    logged: Logged,
}

/// The state of the device when it was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Up,
    Down,
    /// The device was moved to another network namespace, where it carries packets on, and where we set nothing.
    Moved,
    /// The device, which we hold open, was removed; another one of its name would not be ours.
    Gone,
}

impl Follower {
    /// Applies the first plan. A route of a peer that was added while an agent ran may be refused, because the host has changed
    /// since; that peer goes without it.
    fn begin(&mut self) -> Result<(), TunnelError> {
        let peers = self.registry.list();
        for error in self.plan(&Paths::default()) {
            if matches!(error, TunnelError::NoIpv6 { .. }) {
                self.logged.is_due(&error.to_string(), SystemClock.now());
                tracing::warn!(%error, "the agent goes on without IPv6 prefixes (remedy: IPv6 for this host, or no such prefixes in allowed_ips)");
                continue;
            }
            let of = |prefix| {
                peers.iter().find(|peer| peer.peer.allowed_ips.iter().any(|net| net.trunc() == prefix))
            };
            match error.prefix().and_then(of) {
                Some(peer) if peer.origin == PeerOrigin::State => {
                    tracing::warn!(%error, peer = &*peer.peer.name, "a peer of the state file does without a route");
                }
                Some(_) | None => return Err(error),
            }
        }
        Ok(())
    }

    fn run(mut self, board: &MtuTable, clock: &dyn Clock) {
        let mut next: Instant = clock.now() + TICK;
        while let Some(paths) = board.wait(next.saturating_duration_since(clock.now())) {
            if clock.now() >= next {
                next = clock.now() + TICK;
                self.look(clock.now());
                self.say_widths(&paths);
            }
            if self.device == Device::Up {
                for error in self.plan(&paths) {
                    if self.logged.is_due(&error.to_string(), clock.now()) {
                        tracing::warn!(%error, "the tunnel is not as the configuration wants it");
                    }
                }
            }
        }
    }

    /// Looks at the device and its counters.
    fn look(&mut self, now: Instant) {
        fault::point(Fault::Tunnel);
        let link = match self.kernel.netlink.link(Which::Index(self.index)) {
            Ok(link) => link,
            Err(error) => return tracing::debug!(%error, "the TUN device cannot be looked at"),
        };
        if let Some(link) = &link {
            self.publish(link);
        }
        let device = match &link {
            Some(link) if link.up => Device::Up,
            Some(_) => Device::Down,
            None if self.hold.is_there() => Device::Moved,
            None => Device::Gone,
        };
        let before = std::mem::replace(&mut self.device, device);
        match (before, device) {
            (Device::Up, Device::Down) => tracing::warn!(
                name = &*self.tun.name,
                "the TUN device is down: nothing passes (remedy: `ip link set {} up`)",
                self.tun.name
            ),
            (Device::Up | Device::Down | Device::Moved, Device::Gone) => self.say_gone(),
            (Device::Up | Device::Down | Device::Gone, Device::Moved) => tracing::warn!(
                name = &*self.tun.name,
                "the TUN device was moved to another network namespace: packets are carried on; its addresses, routes and MTU there \
                 are whoever moved it's to set, and the agent restores none (remedy: `ip netns exec NAMESPACE culvert run`, if that \
                 was not meant)"
            ),
            (Device::Down | Device::Moved | Device::Gone, Device::Up) => {
                tracing::info!(name = &*self.tun.name, "the TUN device is up again");
                set_quiet(&self.tun.name);
            }
            (Device::Up, Device::Up)
            | (Device::Down | Device::Moved | Device::Gone, Device::Down)
            | (Device::Moved, Device::Moved)
            | (Device::Gone, Device::Gone) => {}
        }
        if let Some(link) = link.filter(|link| link.up) {
            self.restore(&link, now);
        }
    }

    /// Reports that the device is gone. The workers may or may not notice it themselves.
    fn say_gone(&mut self) {
        self.health.set_ready(false);
        self.seen.present = Some(false);
        self.snapshots.set_device(self.seen);
        tracing::warn!(
            name = &*self.tun.name,
            "somebody has removed the TUN device: IP packets are no longer carried, and /readyz fails (remedy: restart the daemon)"
        );
    }

    /// Restores settings that another program has removed or changed, and those that the kernel removes when the device goes down, however
    /// shortly: IPv6 addresses and routes.
    fn restore(&mut self, link: &Link, now: Instant) {
        // Another program may undo it each second.
        let mut say = |text: &str, warn: bool| match self.logged.is_due(text, now) {
            true if warn => tracing::warn!("{text}"),
            true => tracing::info!("{text}"),
            false => {}
        };
        // First, as below 1280 there are no IPv6 addresses.
        if self.kernel.restore_mtu(link.mtu) {
            say(&format!("the TUN device's MTU was {}, and is set again", link.mtu), true);
            set_quiet(&self.tun.name);
        }
        // To try to set an IPv6 address that is there has the kernel report its multicast groups (MLD) into the tunnel.
        let there = self.kernel.netlink.addresses_of(self.index);
        let there =
            there.map_err(|error| say(&format!("cannot list the addresses of the tunnel: {error}"), true));
        for address in
            self.tun.addresses.iter().filter(|own| there.as_ref().is_ok_and(|all| !all.contains(own)))
        {
            match self.kernel.netlink.add_address(self.index, *address) {
                Ok(()) => {
                    say(&format!("the address {address} of the tunnel was gone, and is set again"), false)
                }
                // An IPv6 address is there once.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => say(
                    &format!(
                        "somebody has given the address {address} of the tunnel another prefix length (remedy: `ip addr del` it, \
                         the agent then sets its own)"
                    ),
                    true,
                ),
                Err(error) => {
                    say(&TunnelError::of_address(&self.tun.name, *address, error).to_string(), true)
                }
            }
        }
        match self.kernel.restore_rules() {
            Ok(0) => {}
            Ok(rules) => {
                say(&format!("{rules} routing rules of the tunnel were gone, and are set again"), true)
            }
            Err(error) => say(&format!("cannot list the routing rules: {error}"), true),
        }
        match self.kernel.compare_routes() {
            Ok(Compared { lost, changed, foreign }) => {
                if lost > 0 {
                    say(&format!("{lost} routes into the tunnel were gone, and are set again"), false);
                }
                if changed > 0 {
                    say(
                        &format!(
                            "{changed} routes into the tunnel had another MTU or metric, and are set again"
                        ),
                        true,
                    );
                }
                for (prefix, protocol) in foreign {
                    say(
                        &format!(
                            "the route to {prefix} through the tunnel is somebody else's now (protocol {protocol}) and is left: its \
                             MTU does not follow the path (remedy: `ip route del {prefix} dev {}`, the agent then sets its own)",
                            self.tun.name
                        ),
                        true,
                    );
                }
            }
            Err(error) => say(&format!("cannot list the routes of the tunnel: {error}"), true),
        }
    }

    /// Publishes the kernel's drops. Packets that the kernel sends into the device are those that we read: the uplink.
    fn publish(&mut self, link: &Link) {
        self.seen.dropped[Direction::Uplink] = link.tx_dropped + link.tx_errors;
        self.seen.dropped[Direction::Downlink] = link.rx_dropped + link.rx_errors;
        self.snapshots.set_device(self.seen);
    }

    fn say_widths(&mut self, paths: &Paths) {
        let peers = self.registry.list();
        for (index, width) in self.narrow.look(&peers, &paths.mtus) {
            let name = &*peers[index].peer.name;
            match width {
                Width::Narrow(mtu) => tracing::warn!(
                    peer = name,
                    mtu,
                    "the path to this peer carries less than 1280 bytes inside: IPv6 does not pass, IPv4 in packets of up to {mtu} bytes \
                     only (remedy: a larger MTU on the path between the hosts, or a larger transport.max_packet)"
                ),
                Width::Wide => tracing::info!(peer = name, "the path to this peer carries IPv6 again"),
            }
        }
    }

    /// Makes the kernel's state follow the peers and their paths; returns what failed.
    fn plan(&mut self, paths: &Paths) -> Vec<TunnelError> {
        let plan = Plan::new(&self.tun, self.start, &self.underlay, &self.registry.list(), paths);
        self.kernel.apply(&plan)
    }
}

/// Keeps the kernel from sending packets of its own into the device: no redirects, which name a better next hop on a link that has
/// none, and no random link-local address, which looks for routers. No peer may be a router of the host, either: advertisements are not
/// accepted. A setting that fails is only worth a warning.
fn set_quiet(name: &str) {
    let settings =
        [("ipv4", "send_redirects", "0"), ("ipv6", "addr_gen_mode", "1"), ("ipv6", "accept_ra", "0")];
    for (family, key, value) in settings {
        let path = PathBuf::from(format!("/proc/sys/net/{family}/conf/{name}/{key}"));
        match fs::write(&path, value) {
            Ok(()) => {}
            // No IPv6 in this kernel.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(
                path = %path.display(),
                %error,
                "a setting of the TUN device stays as it is (remedy: write {value} to it)"
            ),
        }
    }
}

//! The router's devices, rules and routes, and what the kernel dropped around them.

use std::{collections::BTreeMap, fs, process::Command};

use anyhow::{Context, bail, ensure};
use tun_rs::{DeviceBuilder, SyncDevice};

/// Of the direction from left to right, and of the other.
const DEVICES: [&str; 2] = ["there", "back"];

/// The first of the two routing tables.
const TABLE: usize = 101;

/// Packets that a device holds for us: a fifth of a second of small ones at 1 Gbit/s.
const QUEUE_PACKETS: u32 = 30_000;

/// The largest packet of the path in bytes, and of the devices: that of Ethernet.
pub(crate) const MTU: usize = 1500;

/// Columns of `/proc/net/dev` that count drops: received, sent.
const DROP_COLUMNS: [usize; 2] = [3, 11];

/// The network namespace in which this process runs. The devices go with the process, and the routes with them.
pub(crate) struct Router {
    devices: Option<[SyncDevice; 2]>,
    interfaces: Vec<String>,
    before: BTreeMap<String, u64>,
}

impl Router {
    pub(crate) fn new(left: &str, right: &str) -> anyhow::Result<Self> {
        let interfaces: Vec<String> = [left, right].into_iter().chain(DEVICES).map(str::to_owned).collect();
        ensure!(
            !is_first_namespace(),
            "this is the namespace of process 1: packets of all programs would pass"
        );
        for interface in [left, right] {
            let mtu = mtu(interface)?;
            ensure!(
                mtu <= MTU,
                "{interface} carries packets of {mtu} bytes, and the path those of {MTU} at most: \
                 `ip link set {interface} mtu {MTU}`, at its other end too"
            );
        }
        for (name, value) in
            [("ipv4/ip_forward", 1), ("ipv4/conf/all/send_redirects", 0), ("ipv6/conf/all/forwarding", 1)]
        {
            sysctl(name, value)?;
        }
        let make = |name: &str| -> anyhow::Result<SyncDevice> {
            let device = DeviceBuilder::new().name(name).build_sync()?;
            device.set_nonblocking(true)?;
            device.set_tx_queue_len(QUEUE_PACKETS)?;
            device.set_mtu(MTU as u16)?;
            // Else the kernel speaks there itself.
            sysctl(&format!("ipv6/conf/{name}/addr_gen_mode"), 1)?;
            // Without a queue in front of the device's own, so that whatever is dropped is dropped by the device, and counted.
            tool("tc", &["qdisc", "replace", "dev", name, "root", "noqueue"])?;
            tool("ip", &["link", "set", name, "up"])?;
            Ok(device)
        };
        let devices = [make(DEVICES[0])?, make(DEVICES[1])?];
        for ((device, from), table) in DEVICES.into_iter().zip([left, right]).zip(TABLE..) {
            let table = table.to_string();
            for family in ["-4", "-6"] {
                tool("ip", &[family, "route", "replace", "default", "dev", device, "table", &table])?;
                tool("ip", &[family, "rule", "add", "iif", from, "lookup", &table])?;
            }
        }
        // The way back to where a packet comes from does not lead through the device that it comes from.
        for interface in interfaces.iter().map(String::as_str).chain(["all", "default"]) {
            sysctl(&format!("ipv4/conf/{interface}/rp_filter"), 0)?;
        }
        let before = drops(&interfaces)?;
        Ok(Self { devices: Some(devices), interfaces, before })
    }

    /// The devices, once.
    pub(crate) fn devices(&mut self) -> Option<[SyncDevice; 2]> {
        self.devices.take()
    }

    /// Packets that the kernel dropped in this namespace, or on its way between namespaces, since the beginning.
    pub(crate) fn dropped(&self) -> anyhow::Result<Vec<(String, u64)>> {
        let grown = drops(&self.interfaces)?.into_iter().map(|(what, count)| {
            let before = self.before.get(&what).copied().unwrap_or(0);
            (what, count - before)
        });
        Ok(grown.filter(|(_, count)| *count > 0).collect())
    }
}

/// As far as the kernel tells.
fn is_first_namespace() -> bool {
    let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    of("1").is_some_and(|first| of("self") == Some(first))
}

fn sysctl(name: &str, value: u8) -> anyhow::Result<()> {
    fs::write(format!("/proc/sys/net/{name}"), value.to_string()).with_context(|| name.to_owned())
}

/// Runs a program; what it prints.
fn tool(program: &str, words: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(words).output().with_context(|| program.to_owned())?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The largest packet of an interface in bytes.
fn mtu(interface: &str) -> anyhow::Result<usize> {
    let text = tool("ip", &["-oneline", "link", "show", "dev", interface])?;
    let number = text.split(" mtu ").nth(1).and_then(|rest| rest.split(' ').next());
    number.context("no MTU")?.parse().with_context(|| text.clone())
}

fn drops(interfaces: &[String]) -> anyhow::Result<BTreeMap<String, u64>> {
    let mut drops = BTreeMap::new();
    for line in fs::read_to_string("/proc/self/net/dev")?.lines() {
        let Some((name, counts)) = line.split_once(':') else { continue };
        if interfaces.iter().any(|interface| interface == name.trim()) {
            let counts: Vec<&str> = counts.split_whitespace().collect();
            let columns = DROP_COLUMNS.map(|column| counts[column].parse::<u64>());
            let [received, sent] = columns;
            drops.insert(format!("the interface {}", name.trim()), received? + sent?);
        }
    }
    // A veth hands packets to the CPU's backlog, which is that of the whole host.
    let backlog = fs::read_to_string("/proc/net/softnet_stat")?;
    let dropped = backlog.lines().filter_map(|line| line.split_whitespace().nth(1));
    let dropped = dropped.map(|count| u64::from_str_radix(count, 16)).sum::<Result<u64, _>>()?;
    drops.insert("the backlog of a CPU".to_owned(), dropped);
    Ok(drops)
}

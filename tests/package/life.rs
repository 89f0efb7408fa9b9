//! From installation to purge, as an operator types it, under a real systemd, with a tunnel to another host.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    client::Client,
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::{Cable, Place},
    ports, probe,
    process::text,
    upstream::Echo,
};

use crate::{BUILD, built, debian, machine::Machine};

const NEEDS: &[Need] = &[
    Need::Tun,
    Need::Tool("ping", "iputils-ping"),
    Need::Tool("setpriv", "util-linux"),
    Need::PrometheusParser,
];

const CONFIG: &str = "/etc/culvert/agent.toml";
const KEY: &str = "/etc/culvert/identity.key";

/// The gateway's address inside the tunnel.
const INSIDE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));

/// A system call that the unit does not allow ends the daemon here, instead of failing where it may be overlooked; the
/// watchdog barks sooner, and the restart does not wait.
const STRICT: &str = "[Service]\nSystemCallErrorNumber=\nWatchdogSec=4s\nTimeoutAbortSec=1s\nRestartSec=1s\n";

/// A gateway with the package, and a host that reaches it.
struct Scene {
    gateway: Machine,
    far: Agent,
    /// What the gateway offers.
    echo: Echo,
    /// Where the far host has it.
    ingress: SocketAddr,
    cable: Cable,
}

impl Scene {
    fn new(debian: &Path) -> Self {
        let cable = Cable::new();
        let [here, there] = cable.places();
        let gateway = Machine::with_systemd(debian, &here);
        fs::copy(built::package(), gateway.path("/root/culvert.deb")).unwrap();
        let echo = here.enter(|| Echo::on(Cable::FIRST[0].parse().unwrap()));
        let ingress = (Ipv4Addr::LOCALHOST, ports::free()).into();
        Self { gateway, far: Agent::new("far", &there), echo, ingress, cable }
    }

    fn install(&self) -> String {
        self.gateway.tell(&["dpkg", "--install", "/root/culvert.deb"])
    }

    /// Packets and datagrams cross, there and back.
    #[track_caller]
    fn carries(&self) {
        let there = self.far.place();
        clock::until("the tunnel carries", PATIENCE, || {
            let ping = probe::ping(there, INSIDE, &["-c", "1"]);
            if ping.received == 1 { Ok(()) } else { Err(ping.text) }
        });
        there.enter(|| Client::new(1, self.ingress).reach());
    }

    #[track_caller]
    fn wait_until_active(&self) {
        clock::until("the service is active", PATIENCE, || match self.gateway.property("ActiveState") {
            state if state == "active" => Ok(()),
            state => Err(format!("{state}: {}", self.gateway.journal())),
        });
    }
}

#[test]
fn an_installed_gateway_runs_is_upgraded_and_goes_as_documented() {
    let Some(debian) = debian::clean("a gateway's life") else { return };
    if !needs::met("a gateway's life", &[BUILD, NEEDS].concat()) {
        return;
    }
    let mut scene = Scene::new(debian);
    scene.install();
    is_installed_and_waits(&scene.gateway);
    configure(&scene);
    gives_up_without_a_key_or_with_a_wrong_file(&scene.gateway);
    start(&mut scene);
    scene.carries();
    is_confined(&scene.gateway);
    answers_to_root_alone(&scene.gateway);
    reloads(&scene.gateway);
    scene.carries();
    comes_back_when_it_hangs(&scene);
    scene.carries();
    is_upgraded(&scene);
    scene.carries();
    is_removed_and_purged(&scene);
    drop(scene.cable);
}

/// Installed, enabled, not running: there is no configuration.
fn is_installed_and_waits(gateway: &Machine) {
    assert_eq!(gateway.tell(&["systemctl", "is-enabled", "culvert"]).trim(), "enabled");
    let folder = fs::metadata(gateway.path("/etc/culvert")).unwrap();
    let group = gateway.tell(&["stat", "--format=%a %U %G", "/etc/culvert"]);
    assert_eq!(group.trim(), "750 root culvert", "{folder:?}");
    assert!(gateway.tell(&["getent", "passwd", "culvert"]).contains(":/usr/sbin/nologin"));
    gateway.tell(&["systemctl", "start", "culvert"]);
    assert_eq!([gateway.property("ActiveState"), gateway.property("ConditionResult")], ["inactive", "no"]);
    let analysis = gateway.run(&["systemd-analyze", "verify", "--man=no", "culvert.service"]);
    assert!(analysis.status.success() && analysis.stderr.is_empty(), "{analysis:?}");
}

/// The commands of the first steps, then the unit's settings that make a fault visible.
fn configure(scene: &Scene) {
    let gateway = &scene.gateway;
    let advertise = format!("{}:443", Cable::FIRST[0]);
    let service = format!("echo={}", scene.echo.address);
    gateway.tell(&[
        "culvert",
        "init",
        "--role",
        "exit",
        "--listen",
        "0.0.0.0:443",
        "--advertise",
        &advertise,
        "--tun",
        "10.9.0.1/24",
        "--service",
        &service,
    ]);
    for (file, expected) in [(CONFIG, "640 root culvert"), (KEY, "600 root root")] {
        assert_eq!(gateway.tell(&["stat", "--format=%a %U %G", file]).trim(), expected, "{file}");
    }
    let text = fs::read_to_string(gateway.path(CONFIG)).unwrap();
    // What needs privileges and system calls that a plain gateway does not use.
    let more = text.replacen("[transport]\n", "[transport]\npin_cpus = true\nmark = 7\n", 1);
    assert_ne!(text, more);
    fs::write(gateway.path(CONFIG), more).unwrap();
    gateway.tell(&["culvert", "check", "--config", CONFIG]);
    let key = scene.far.key().to_owned();
    gateway.tell(&[
        "culvert",
        "peer",
        "add",
        "far",
        &key,
        "--allowed-ip",
        "10.9.0.2/32",
        "--service",
        "echo",
    ]);
    fs::create_dir(gateway.path("/etc/systemd/system/culvert.service.d")).unwrap();
    fs::write(gateway.path("/etc/systemd/system/culvert.service.d/strict.conf"), STRICT).unwrap();
    gateway.tell(&["systemctl", "daemon-reload"]);
}

/// What a restart does not mend is no reason for one.
fn gives_up_without_a_key_or_with_a_wrong_file(gateway: &Machine) {
    let fails = |status: &str| {
        assert!(!gateway.run(&["systemctl", "start", "culvert"]).status.success());
        let state = ["SubState", "ExecMainStatus"].map(|name| gateway.property(name));
        assert_eq!(state, ["failed", status], "{}", gateway.journal());
    };
    let away = format!("{KEY}.away");
    fs::rename(gateway.path(KEY), gateway.path(&away)).unwrap();
    fails("243");
    fs::rename(gateway.path(&away), gateway.path(KEY)).unwrap();
    let good = fs::read_to_string(gateway.path(CONFIG)).unwrap();
    fs::write(gateway.path(CONFIG), format!("{good}\n[nonsense]\n")).unwrap();
    fails("2");
    assert!(gateway.journal().contains("nonsense"), "{}", gateway.journal());
    fs::write(gateway.path(CONFIG), good).unwrap();
}

/// Starts both ends.
fn start(scene: &mut Scene) {
    let gateway = &scene.gateway;
    // Returns once the daemon has said that it is ready.
    gateway.tell(&["systemctl", "start", "culvert"]);
    assert_eq!([gateway.property("ActiveState"), gateway.property("Type")], ["active", "notify"]);
    let own = gateway.tell(&["culvert", "pubkey", KEY]);
    scene.far.configure(&format!(
        "[[peer]]\nname = \"gateway\"\npublic_key = \"{}\"\nendpoints = [\"{}:443\"]\n\
         allowed_ips = [\"10.9.0.0/24\"]\n[[udp]]\nlisten = \"{}\"\npeer = \"gateway\"\nservice = \"echo\"\n\
         [tun]\naddress = [\"10.9.0.2/24\"]\n",
        own.trim(),
        Cable::FIRST[0],
        scene.ingress
    ));
    scene.far.start();
}

/// What the unit promises, as the kernel has it.
fn is_confined(gateway: &Machine) {
    let pid = gateway.property("MainPID");
    let status = fs::read_to_string(gateway.path(&format!("/proc/{pid}/status"))).unwrap();
    let field = |name: &str| {
        let value =
            |line: &str| line.strip_prefix(name)?.strip_prefix(':').map(|value| value.trim().to_owned());
        status.lines().find_map(value).unwrap()
    };
    // CAP_NET_BIND_SERVICE is bit 10, CAP_NET_ADMIN 12.
    for set in ["CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&field(set), 16).unwrap(), 1 << 10 | 1 << 12, "{set}");
    }
    assert_eq!([field("NoNewPrivs"), field("Seccomp")], ["1", "2"]);
    assert_ne!(field("Uid").split_whitespace().next(), Some("0"));
    let limits = fs::read_to_string(gateway.path(&format!("/proc/{pid}/limits"))).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    // The device's own settings could be written, in spite of the sandbox.
    let redirects = gateway.tell(&["cat", "/proc/sys/net/ipv4/conf/culvert0/send_redirects"]);
    assert_eq!(redirects.trim(), "0");
    for (folder, modes) in
        [("/run/culvert", "750 culvert culvert"), ("/var/lib/culvert", "700 culvert culvert")]
    {
        assert_eq!(gateway.tell(&["stat", "--format=%a %U %G", folder]).trim(), modes, "{folder}");
    }
    // All that it did was allowed: since it runs, it complains of nothing but of this machine's limit on open files.
    let invocation = format!("_SYSTEMD_INVOCATION_ID={}", gateway.property("InvocationID"));
    let journal = gateway.tell(&["journalctl", "--no-pager", "--output=cat", &invocation]);
    let complaint = |line: &&str| line.contains("remedy") && !line.contains("open files");
    assert!(journal.contains("ready"), "{journal}");
    assert_eq!(journal.lines().find(complaint), None);
}

/// `culvert status` is root's, and its user's.
fn answers_to_root_alone(gateway: &Machine) {
    let status = gateway.tell(&["culvert", "status"]);
    assert!(status.contains("far"), "{status}");
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    for words in [&["culvert", "status"][..], &["cat", CONFIG], &["cat", KEY]] {
        assert!(!gateway.run(&[&nobody, words].concat()).status.success(), "{words:?}");
    }
    let user = ["setpriv", "--reuid=culvert", "--regid=culvert", "--clear-groups", "--"];
    gateway.tell(&[&user[..], &["culvert", "status"]].concat());
    assert!(!gateway.run(&[&user[..], &["cat", KEY]].concat()).status.success(), "systemd hands it over");
}

/// A good file is followed, a bad one is refused in words, and nothing ends.
fn reloads(gateway: &Machine) {
    let (pid, good) = (gateway.property("MainPID"), fs::read_to_string(gateway.path(CONFIG)).unwrap());
    let other = "\n[[service]]\nname = \"other\"\nupstream = \"127.0.0.1:9\"\n";
    fs::write(gateway.path(CONFIG), format!("{good}{other}")).unwrap();
    gateway.tell(&["systemctl", "reload", "culvert"]);
    fs::write(gateway.path(CONFIG), format!("{good}{other}nonsense = 1\n")).unwrap();
    assert!(!gateway.run(&["systemctl", "reload", "culvert"]).status.success());
    assert!(gateway.journal().contains("nonsense"), "{}", gateway.journal());
    fs::write(gateway.path(CONFIG), good).unwrap();
    // Where its socket is not to be found, by signal; that leads to an answer in the log alone.
    let reloads = || gateway.journal().lines().filter(|line| line.contains("waiting_for_restart")).count();
    let (socket, away, before) = ("/run/culvert/culvert.sock", "/run/culvert/away", reloads());
    gateway.tell(&["mv", socket, away]);
    gateway.tell(&["systemctl", "reload", "culvert"]);
    clock::until("the daemon has followed the signal", PATIENCE, || match reloads() {
        now if now == before + 1 => Ok(()),
        now => Err(format!("{before} reloads, then {now}: {}", gateway.journal())),
    });
    gateway.tell(&["mv", away, socket]);
    gateway.tell(&["systemctl", "reload", "culvert"]);
    assert_eq!([gateway.property("ActiveState"), gateway.property("MainPID")], ["active".to_owned(), pid]);
}

/// A daemon that does nothing any more is ended by the watchdog, and started again.
fn comes_back_when_it_hangs(scene: &Scene) {
    let gateway = &scene.gateway;
    let pid = gateway.property("MainPID");
    gateway.tell(&["sh", "-c", &format!("kill -STOP {pid}")]);
    clock::until("another daemon runs", PATIENCE, || match gateway.property("NRestarts") {
        restarts if restarts == "1" => Ok(()),
        restarts => Err(restarts),
    });
    scene.wait_until_active();
    assert_ne!(gateway.property("MainPID"), pid);
}

/// What an upgrade and a removal leave alone: bytes, mode and owner.
fn kept(gateway: &Machine) -> Vec<(Vec<u8>, u32, u32, u32)> {
    let one = |file: &str| {
        let (path, meta) = (gateway.path(file), fs::metadata(gateway.path(file)).unwrap());
        (fs::read(path).unwrap(), meta.permissions().mode(), meta.uid(), meta.gid())
    };
    [CONFIG, KEY, "/var/lib/culvert/peers.toml"].map(one).into()
}

/// A running service is restarted, what an administrator decided stays.
fn is_upgraded(scene: &Scene) {
    let gateway = &scene.gateway;
    let (pid, before) = (gateway.property("MainPID"), kept(gateway));
    scene.install();
    scene.wait_until_active();
    assert_ne!(gateway.property("MainPID"), pid);
    assert_eq!(kept(gateway), before);
    gateway.tell(&["systemctl", "disable", "--now", "culvert"]);
    assert_eq!([gateway.property("Result"), gateway.property("ExecMainStatus")], ["success", "0"]);
    assert!(!gateway.path("/run/culvert/culvert.sock").exists());
    scene.install();
    assert_eq!(text(&gateway.run(&["systemctl", "is-enabled", "culvert"]).stdout).trim(), "disabled");
    assert_eq!(gateway.property("ActiveState"), "inactive");
    gateway.tell(&["systemctl", "enable", "--now", "culvert"]);
}

/// Removal stops the service and keeps what is the operator's; a purge takes that too, but nothing of others.
fn is_removed_and_purged(scene: &Scene) {
    let gateway = &scene.gateway;
    let before = kept(gateway);
    let pid = gateway.property("MainPID");
    gateway.tell(&["dpkg", "--remove", "culvert"]);
    assert!(!gateway.path(&format!("/proc/{pid}")).exists());
    for gone in ["/usr/bin/culvert", "/usr/lib/systemd/system/culvert.service", "/run/culvert"] {
        assert!(!gateway.path(gone).exists(), "{gone}");
    }
    assert_eq!(kept(gateway), before);
    let place: &Place = &scene.cable.places()[0];
    assert!(!place.tell(&["ip", "-brief", "link"]).contains("culvert0"));
    fs::write(gateway.path("/etc/culvert/notes.txt"), "of the operator").unwrap();
    gateway.tell(&["dpkg", "--purge", "culvert"]);
    for gone in
        [CONFIG, KEY, "/var/lib/culvert", "/etc/systemd/system/multi-user.target.wants/culvert.service"]
    {
        assert!(gateway.path(gone).symlink_metadata().is_err(), "{gone}");
    }
    assert!(gateway.path("/etc/culvert/notes.txt").exists());
    // Once more from the start, and nothing of ours is left.
    fs::remove_file(gateway.path("/etc/culvert/notes.txt")).unwrap();
    scene.install();
    gateway.tell(&["dpkg", "--purge", "culvert"]);
    assert!(!gateway.path("/etc/culvert").exists());
    let failed = gateway.tell(&["systemctl", "--failed", "--plain", "--no-legend"]);
    assert_eq!(failed, "");
    clock::until("nothing of the service runs", Duration::from_secs(5), || {
        let left = text(&gateway.run(&["systemctl", "status", "culvert"]).stdout);
        if left.contains("running") { Err(left) } else { Ok(()) }
    });
}

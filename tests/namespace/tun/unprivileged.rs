//! The whole program as a user who is not root.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown},
    process::{Command, Output, Stdio},
    time::Duration,
};

use culvert_tests::{
    agent::{self, SHUTDOWN_LIMIT},
    process::{Running, run, text},
};
use tempfile::TempDir;

use crate::{Space, gone, until};

/// The user and group `nobody`, on most systems.
const NOBODY: u32 = 65_534;

/// The driver's file as distributions have it: everybody may open it, and CAP_NET_ADMIN decides.
const DRIVER: &str = "mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200 &&";

/// What a user other than root may be given.
const NET_ADMIN: &[&str] = &["--inh-caps=+net_admin", "--ambient-caps=+net_admin"];

/// A folder of the unprivileged user: the program, which may lie where only root can go, a key, and a configuration.
struct Home(TempDir);

impl Home {
    fn new(more: &str) -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        // By another process: while this one had the copy open for writing, one that another test starts would have it, too.
        let mut copy = Command::new("cp");
        copy.arg(agent::binary()).arg(home.path("culvert"));
        assert!(run(&mut copy, Duration::from_secs(20)).status.success());
        let mut keygen = Command::new(home.path("culvert"));
        keygen.args(["keygen", "--out", &home.path("identity.key")]);
        assert!(run(&mut keygen, Duration::from_secs(10)).status.success());
        let common = "identity.key_file = \"identity.key\"\nidentity.state_dir = \"state\"\ncontrol.socket = \"\"\n[transport]\nlisten = [\"127.0.0.1:4433\"]\nworkers = 2\n";
        let tun = "[tun]\nname = \"culvert7\"\naddress = [\"10.9.0.1/24\", \"fd09::1/64\"]\n";
        let peer = "[[peer]]\nname = \"a\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\n\
                    allowed_ips = [\"10.9.0.2/32\", \"0.0.0.0/0\"]\n";
        fs::write(home.path("culvert.toml"), format!("{common}{more}\n{tun}{peer}")).unwrap();
        for entry in fs::read_dir(&home.0).unwrap() {
            chown(entry.unwrap().path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        chown(&home.0, Some(NOBODY), Some(NOBODY)).unwrap();
        fs::set_permissions(&home.0, fs::Permissions::from_mode(0o700)).unwrap();
        home
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// `culvert run` as that user with these capabilities; `before` is a shell command that root runs first, in a mount
    /// namespace of its own.
    fn run(&self, space: &Space, capabilities: &[&str], before: &str) -> Command {
        let mut command = space.place().command("unshare");
        let script = format!("{before} exec \"$@\"");
        command.args(["--mount", "sh", "-c", &script, "sh", "setpriv", "--clear-groups"]);
        command.arg(format!("--reuid={NOBODY}")).arg(format!("--regid={NOBODY}")).args(capabilities);
        command.args(["--", &self.path("culvert"), "run", "--config", &self.path("culvert.toml")]);
        command
    }

    /// Runs it to its end, which is to come by itself.
    fn fails(&self, space: &Space, capabilities: &[&str], before: &str) -> String {
        let mut command = self.run(space, capabilities, before);
        let output: Output = run(&mut command, Duration::from_secs(20));
        assert!(!output.status.success());
        text(&output.stderr)
    }
}

#[test]
fn cap_net_admin_is_all_that_it_needs() {
    let Some(space) = Space::new("a tunnel of an unprivileged user") else { return };
    let home = Home::new("mark = 77");
    let rules = space.ip("rule");
    let mut command = home.run(&space, NET_ADMIN, DRIVER);
    let log = fs::File::create(home.path("log")).unwrap();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut daemon = Running::start("an unprivileged agent", &mut command);
    let read_log = || fs::read_to_string(home.path("log")).unwrap();
    until(&space, "rule", |said| {
        assert!(daemon.ended().is_none(), "{}", read_log());
        said.contains("not from all fwmark 0x4d lookup 51900")
    });
    until(&space, "route show table 51900", |said| said.contains("default dev culvert7"));
    let device = space.ip("-details link show culvert7");
    assert!(device.contains("LOWER_UP") && device.contains("numqueues 2"), "{device}");
    let log = read_log();
    assert!(!log.contains("WARN culvert_engine::tunnel"), "{log}");
    // The trial with packets inside of tunnels needs no other right, on a kernel that has them.
    let joined = "tunnels_cut=true tunnels_joined_ipv4=true tunnels_joined_ipv6=true";
    assert!(log.contains(joined) || log.contains("tunnels_cut=false"), "{log}");
    daemon.terminate();
    assert!(daemon.wait(SHUTDOWN_LIMIT).success(), "{}", read_log());
    gone(&space, "culvert7");
    assert_eq!(space.ip("rule"), rules);

    // Killed, it leaves its rules; the next one takes them back.
    let mut command = home.run(&space, NET_ADMIN, DRIVER);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut daemon = Running::start("an unprivileged agent", &mut command);
    until(&space, "rule", |said| said.contains("lookup 51900"));
    daemon.kill();
    gone(&space, "culvert7");
    assert!(space.ip("rule").contains("lookup 51900"));
    let mut command = home.run(&space, NET_ADMIN, DRIVER);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut daemon = Running::start("an unprivileged agent", &mut command);
    until(&space, "route show table 51900", |said| said.contains("default dev culvert7"));
    daemon.terminate();
    assert!(daemon.wait(SHUTDOWN_LIMIT).success());
    assert_eq!(space.ip("rule"), rules);
}

#[test]
fn what_it_may_not_do_is_said_with_a_remedy() {
    let Some(space) = Space::new("a tunnel of a user without rights") else { return };
    let home = Home::new("mark = 77");
    let error = home.fails(&space, &[], DRIVER);
    assert!(error.contains("CAP_NET_ADMIN"), "{error}");
    // Without a mark it is the device that is refused.
    let plain = Home::new("");
    let config = plain.path("culvert.toml");
    let without_default = fs::read_to_string(&config).unwrap().replace(", \"0.0.0.0/0\"", "");
    fs::write(&config, without_default).unwrap();
    let error = plain.fails(&space, &[], DRIVER);
    assert!(
        error.contains("cannot make the TUN device culvert7: not permitted (remedy: CAP_NET_ADMIN"),
        "{error}"
    );
    let error = plain.fails(&space, NET_ADMIN, "mount -t tmpfs none /dev/net &&");
    assert!(error.contains("cannot open /dev/net/tun") && error.contains("modprobe tun"), "{error}");
    // Nor does root make it.
    let hidden = "mount -t tmpfs none /dev/net && \"$@\" ; ls /dev/net; exit 1";
    let mut command = space.place().command("unshare");
    command.args(["--mount", "sh", "-c", hidden, "sh", &plain.path("culvert"), "run", "--config", &config]);
    let output = run(&mut command, Duration::from_secs(20));
    assert!(text(&output.stderr).contains("modprobe tun"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "nothing is left behind");
    gone(&space, "culvert7");
}

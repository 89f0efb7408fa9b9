//! Culvert on OpenWrt: its configuration as TOML, and its init script, run by OpenWrt's shell with stand-ins for the
//! functions of its system.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    needs::{self, Need},
    process::{run, text},
};

use crate::repository;

const BUSYBOX: &[Need] = &[Need::Tool("busybox", "busybox")];

/// What `/lib/functions.sh` does with a configuration: it calls the callbacks for each line. Sections without a name get one.
const FUNCTIONS: &str = r#"
option_cb() { :; }
list_cb() { :; }
config_cb() { :; }
config() { _section=${2:-cfg01a2b3}; config_cb "$1" "$_section"; }
option() { eval "_${_section}_$1=\$2"; option_cb "$@"; }
list() { list_cb "$@"; }
config_load() { . "$UCI_CONFIG_DIR/$1"; config_cb; }
config_get() { eval "$1=\${_$2_$3:-${4:-}}"; }
config_get_bool() { config_get "$@"; }
"#;

/// What `/etc/rc.common` has for an init script of procd, each call a line of `$CALLS`; and the script, then what to run.
const PROCD: &str = r#"
. "$UCI_FUNCTIONS"
said() { echo "$*" >>"$CALLS"; }
for name in procd_open_instance procd_set_param procd_close_instance procd_add_reload_trigger logger start stop; do
    eval "$name() { said $name \"\$@\"; }"
done
logger() { said logger "$@"; [ "$#" -gt 2 ] || said "$(cat)"; }
. "$SCRIPT"
"$@"
"#;

const GATEWAY: &str = "
config culvert 'main'
\toption enabled '1'

config transport
\toption listen '127.0.0.1:4433'
\toption pin_cpus '0'
\toption workers '2'

config tun
\tlist address '10.9.0.2/24'
\tlist address 'fd09::2/64'
\toption routes 'off'

config service
\toption name '53'
\toption upstream '127.0.0.1:53'
\toption repair_mode 'fec'
\toption repair_deadline '60ms'

config peer 'hq'
\toption public_key 'bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA'
\tlist endpoints 'hq.example.net:4433'
\tlist allowed_ips '10.9.0.1/32'
\tlist services '53'
\toption queue_time '20ms'
\toption queue_packets '100'
\toption flow_quota '0.5'
\toption dscp '46'
\toption rate_overhead '8'
\toption quota_bytes '500GB'
\toption quota_from '15'
\toption repair_mode 'auto'
\toption repair_deadline '300ms'
\toption repair_max_overhead '0.3'
\toption repair_order 'hold'
\tlist repair_dscp '0'
\tlist repair_dscp '46'
\toption redundant_metered '1'
\tlist redundant_dscp '46'
\tlist redundant_services '53'

config udp
\toption listen '127.0.0.1:5301'
\toption peer 'hq'
\toption service 'iperf'
";

const TOML: &str = r#"# Written from /etc/config/culvert; changes here are lost.

[transport]
pin_cpus = false
workers = 2
listen = ["127.0.0.1:4433"]

[tun]
routes = false
address = ["10.9.0.2/24", "fd09::2/64"]

[[service]]
name = "53"
upstream = "127.0.0.1:53"
repair.mode = "fec"
repair.deadline = "60ms"

[[peer]]
public_key = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA"
queue.time = "20ms"
queue.packets = 100
flow_quota = 0.5
dscp = 46
rate_overhead = 8
quota.bytes = "500GB"
quota.from = 15
repair.mode = "auto"
repair.deadline = "300ms"
repair.max_overhead = 0.3
repair.order = "hold"
redundant.metered = true
endpoints = ["hq.example.net:4433"]
allowed_ips = ["10.9.0.1/32"]
services = ["53"]
repair.dscp = [0, 46]
redundant.dscp = [46]
redundant.services = ["53"]
name = "hq"

[[udp]]
listen = "127.0.0.1:5301"
peer = "hq"
service = "iperf"

[identity]
key_file = "/etc/culvert/identity.key"
state_dir = "/etc/culvert/state"
"#;

/// A router's files, in a folder.
struct Router {
    folder: tempfile::TempDir,
}

impl Router {
    fn new(uci: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("config")).unwrap();
        fs::write(folder.path().join("functions.sh"), FUNCTIONS).unwrap();
        fs::write(folder.path().join("procd.sh"), PROCD).unwrap();
        let router = Self { folder };
        router.configure(uci);
        // The init script of this router, whose paths are in its folder.
        let script = fs::read_to_string(repository("deploy/openwrt/culvert.init")).unwrap();
        let place = router.folder.path().display();
        let script = script.replace("home=/etc", &format!("home={place}/etc"));
        let script = script.replace("written=/var/etc", &format!("written={place}/var/etc"));
        let script = script.replace("/run/culvert", &format!("{place}/run/culvert"));
        let script = script.replace("prefix=/usr/local", &format!("prefix={place}/usr"));
        fs::write(router.path("culvert.init"), script).unwrap();
        for folder in ["usr/bin", "usr/share/culvert"] {
            fs::create_dir_all(router.path(folder)).unwrap();
        }
        std::os::unix::fs::symlink(binary(), router.path("usr/bin/culvert")).unwrap();
        let shim = router.path("usr/share/culvert/culvert-uci");
        let text = fs::read_to_string(repository("deploy/openwrt/culvert-uci")).unwrap();
        fs::write(&shim, text.replace("#!/bin/sh", "#!/usr/bin/env -S busybox ash")).unwrap();
        fs::set_permissions(&shim, fs::Permissions::from_mode(0o755)).unwrap();
        router
    }

    fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn configure(&self, uci: &str) {
        fs::write(self.path("config/culvert"), uci).unwrap();
    }

    fn shell(&self, script: &Path, arguments: &[&str]) -> Output {
        let mut command = Command::new("busybox");
        command.arg("ash").arg(script).args(arguments);
        command.env("UCI_FUNCTIONS", self.path("functions.sh")).env("UCI_CONFIG_DIR", self.path("config"));
        command.env("CALLS", self.path("calls")).env("SCRIPT", self.path("culvert.init"));
        run(&mut command, Duration::from_secs(30))
    }

    /// The configuration as TOML.
    fn toml(&self) -> Output {
        self.shell(&repository("deploy/openwrt/culvert-uci"), &[])
    }

    /// What the init script tells procd and the log when this function of it is called.
    fn calls(&self, function: &str) -> String {
        fs::write(self.path("calls"), "").unwrap();
        let output = self.shell(&self.path("procd.sh"), &[function]);
        fs::read_to_string(self.path("calls")).unwrap() + &text(&output.stderr)
    }
}

#[test]
fn sections_become_tables_and_options_their_keys() {
    if !needs::met("OpenWrt's configuration", BUSYBOX) {
        return;
    }
    let output = Router::new(GATEWAY).toml();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), TOML);
    // What nobody should write stays a text, which `culvert check` refuses; an unknown section is refused here.
    let hostile = Router::new("config log\n\toption level 'a\"b\\c $(id) `id`'\n").toml();
    assert!(
        text(&hostile.stdout).contains("\nlevel = \"a\\\"b\\\\c $(id) `id`\"\n"),
        "{}",
        text(&hostile.stdout)
    );
    for wrong in ["config pear 'hq'\n", "config peer 'hq'\n\tlist allowed-ips '::/0'\n"] {
        let output = Router::new(wrong).toml();
        assert!(!output.status.success() && text(&output.stderr).contains("remedy: "), "{wrong}");
    }
    let plain = Router::new("config identity\n\toption key_file '/k'\n\toption state_dir ''\n").toml();
    assert!(
        text(&plain.stdout).ends_with("[identity]\nkey_file = \"/k\"\nstate_dir = \"\"\n"),
        "{}",
        text(&plain.stdout)
    );
}

#[test]
fn the_kinds_of_all_keys_are_those_of_the_reference() {
    let shim = fs::read_to_string(repository("deploy/openwrt/culvert-uci")).unwrap();
    let words = |name: &str| -> BTreeSet<String> {
        let line = shim.lines().find_map(|line| line.strip_prefix(&format!("{name}='"))).unwrap();
        line.trim_end_matches('\'').split_whitespace().map(str::to_owned).collect()
    };
    let reference = fs::read_to_string(repository("docs/configuration.md")).unwrap();
    let mut found = [(); 5].map(|()| BTreeSet::new());
    let [sections, switches, texts, lists, inner] = &mut found;
    for line in reference.lines().filter(|line| line.starts_with("| `") && line.contains(" | ")) {
        let mut cells = line.split(" | ");
        let Some(key) = cells.next().and_then(|cell| cell.strip_prefix("| `")?.strip_suffix('`')) else {
            continue;
        };
        let kind = cells.next().unwrap();
        // The lines of `transport` are a list of tables, and a section of their own.
        let key = key.strip_prefix("transport.").filter(|key| key.starts_with("uplink.")).unwrap_or(key);
        let Some((section, key)) = key.split_once('.') else { continue };
        sections.insert(section.to_owned());
        if let Some((table, _)) = key.split_once('.') {
            assert_eq!(section, "peer", "culvert-uci knows tables inside a peer only");
            inner.insert(table.to_owned());
        } else if kind.ends_with("`true`, `false`") {
            switches.insert(key.to_owned());
        } else if kind.starts_with("list of ") {
            lists.insert(key.to_owned());
        }
        if line.contains("able says more") || line.contains("in the table") {
            assert!(words("either").contains(key), "culvert-uci does not know that {key} may be a table");
        }
        if ["name", "path", "key", "list of names", "list of host names", "list of arguments"]
            .iter()
            .any(|text| kind == *text || kind.starts_with("key,"))
            || kind.contains("of `A-Z")
        {
            texts.insert(key.to_owned());
        }
    }
    let known: BTreeSet<String> = words("tables").union(&words("arrays")).cloned().collect();
    assert_eq!(known, *sections);
    assert_eq!((words("switches"), words("inner")), (switches.clone(), inner.clone()));
    assert_eq!((words("texts"), words("lists")), (texts.clone(), lists.clone()));
    // No key begins like a table.
    for table in inner.union(&words("either")) {
        for section in ["peer", "service"] {
            assert!(!reference.contains(&format!("| `{section}.{table}_")), "{table}");
        }
    }
}

#[test]
fn procd_gets_the_program_and_the_log_what_is_wrong() {
    if !needs::met("OpenWrt's init script", BUSYBOX) {
        return;
    }
    let router = Router::new(&GATEWAY.replace("enabled '1'", "enabled '0'"));
    assert_eq!(router.calls("start_service"), "", "it is not enabled");
    assert_eq!(router.calls("reload_service"), "stop\n");
    assert_eq!(router.calls("service_triggers"), "procd_add_reload_trigger culvert\n");

    let place = router.folder.path().display();
    let key = format!(
        "\nconfig identity\n\toption key_file '{place}/etc/culvert/identity.key'\n\toption state_dir ''\n"
    );
    let valid = GATEWAY.split("config udp").next().unwrap().to_owned() + &key;
    router.configure(&valid);
    let calls = router.calls("start_service");
    let file = format!("{place}/var/etc/culvert.toml");
    let command = format!("procd_set_param command {place}/usr/bin/culvert run --config {file}\n");
    assert!(calls.starts_with(&format!("procd_open_instance\n{command}")), "{calls}");
    assert!(calls.ends_with("procd_close_instance\n"), "{calls}");
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(Path::new(&file)), mode(&router.path("etc/culvert"))), (0o600, 0o700));
    let identity = fs::read(router.path("etc/culvert/identity.key")).unwrap();
    assert_eq!(router.calls("start_service"), calls);
    assert_eq!(fs::read(router.path("etc/culvert/identity.key")).unwrap(), identity, "the key is made once");
    // Nothing runs that could reload.
    assert_eq!(router.calls("reload_service"), "start\n");

    router.configure(&valid.replace("'0.5'", "'5'"));
    let calls = router.calls("start_service");
    assert!(calls.starts_with("logger -t culvert -p daemon.err ") && calls.contains("flow_quota"), "{calls}");
    assert!(!calls.contains("procd_open_instance"), "{calls}");
    // A file of one's own.
    let own = router.path("own.toml");
    fs::copy(&file, &own).unwrap();
    fs::write(&own, fs::read_to_string(&own).unwrap().replace("flow_quota = 5", "flow_quota = 0.25"))
        .unwrap();
    router.configure(&format!(
        "config culvert 'main'\n\toption enabled '1'\n\toption config '{}'\n",
        own.display()
    ));
    assert!(router.calls("start_service").contains(&format!("run --config {}\n", own.display())));
}

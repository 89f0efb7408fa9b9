//! What is read of a systemd unit.

use std::{fs, path::Path};

use super::super::unit::{Access, Account, Service, parse, service};

/// The unit file that the package installs.
const PACKAGED: &str = include_str!("../../../../deploy/systemd/culvert.service");

const CONFIG: &str = "/etc/culvert/agent.toml";

#[test]
fn the_packaged_unit_gives_the_daemon_all_that_it_needs() {
    let unit = parse(PACKAGED);
    assert!(unit.runs(Path::new(CONFIG)) && !unit.runs(Path::new("/root/agent.toml")), "{unit:?}");
    assert!(unit.hands_over(Path::new("/etc/culvert/identity.key")), "{unit:?}");
    assert!(!unit.hands_over(Path::new("/etc/culvert/other.key")), "{unit:?}");
    assert!(unit.gives("CAP_NET_ADMIN") && unit.gives("CAP_NET_BIND_SERVICE"), "{unit:?}");
    assert!(!unit.gives("CAP_SYS_ADMIN") && unit.tun && unit.user == "culvert", "{unit:?}");
    assert_eq!(unit.folders, [Path::new("/var/lib/culvert"), Path::new("/run/culvert")]);
}

#[test]
fn what_a_drop_in_takes_back_is_not_given() {
    let less = "\n[Service]\nAmbientCapabilities=\nAmbientCapabilities=CAP_NET_BIND_SERVICE\nDeviceAllow=\n\
                LoadCredential=\nRuntimeDirectory=\nExecStart=\nExecStart=/usr/bin/culvert run \\\n  \
                --config=/srv/a.toml\n[Install]\nUser=root\n#User=root\n";
    let unit = parse(&format!("{PACKAGED}{less}"));
    assert!(!unit.gives("CAP_NET_ADMIN") && unit.gives("CAP_NET_BIND_SERVICE"), "{unit:?}");
    assert!(!unit.tun && unit.credentials.is_empty() && unit.user == "culvert", "{unit:?}");
    assert_eq!(unit.folders, [Path::new("/var/lib/culvert")]);
    assert!(unit.runs(Path::new("/srv/a.toml")) && !unit.runs(Path::new(CONFIG)), "{unit:?}");
    let root = parse("[Service]\nExecStart=/usr/bin/culvert run\n");
    assert!(root.gives("CAP_NET_ADMIN") && root.tun && !root.runs(Path::new(CONFIG)), "{root:?}");
    assert!(!parse("[Service]\nCapabilityBoundingSet=CAP_CHOWN\n").gives("CAP_NET_ADMIN"));
}

#[test]
fn the_driver_is_reached_by_its_own_path_and_by_a_folder_above_it() {
    for (paths, reached) in [
        ("/dev/net/tun", true),
        ("-/dev/net", true),
        ("/dev/net:/dev/net", true),
        ("/dev/shm", false),
        ("-", false),
    ] {
        let text = format!("[Service]\nPrivateDevices=yes\nDeviceAllow=/dev/net/tun rw\nBindPaths={paths}\n");
        assert_eq!(parse(&text).tun, reached, "{paths}");
    }
}

#[test]
fn a_unit_is_found_with_its_drop_ins_where_systemd_runs() {
    let host = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let file = host.path().join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    let service = |config: &str| service(host.path(), Some(Path::new(config)));
    write("usr/lib/systemd/system/culvert.service", PACKAGED);
    write("etc/passwd", "root:x:0:0::/root:/bin/sh\nculvert:x:998:997::/var/lib/culvert:/bin/false\n");
    assert_eq!(service(CONFIG).unit, None, "no systemd runs");
    fs::create_dir_all(host.path().join("run/systemd/system")).unwrap();
    let found = service(CONFIG);
    let culvert = Account { name: "culvert".to_owned(), user: 998, group: 997 };
    assert_eq!((found.unit, &found.account), (Some(parse(PACKAGED)), &Some(culvert)));
    assert_eq!(service("/root/agent.toml").unit, None);
    // The administrator's file of a name overrules the package's.
    write("usr/lib/systemd/system/culvert.service.d/50.conf", "[Service]\nUser=nobody\n");
    write("etc/systemd/system/culvert.service.d/50.conf", "[Service]\nUser=root\n");
    write("etc/systemd/system/culvert.service.d/60.conf~", "[Service]\nUser=other\n");
    let found = service(CONFIG);
    assert_eq!(found.unit.unwrap().user, "root");
    assert_eq!(found.account.unwrap().user, 0);
}

#[test]
fn whether_the_daemons_user_is_let_in_is_a_matter_of_the_mode() {
    let service = |unit: &str| Service {
        unit: Some(parse(unit)),
        account: Some(Account { name: "culvert".to_owned(), user: 998, group: 997 }),
    };
    let packaged = service(PACKAGED);
    for ((mode, user, group), expected) in [
        ((0o600, 0, 0), false),
        ((0o666, 0, 0), true),
        ((0o660, 0, 997), true),
        ((0o640, 0, 997), false),
        ((0o066, 998, 0), false),
    ] {
        let node = Access { mode, user, group };
        assert_eq!(packaged.lets_in(node), expected, "{node:?}");
        assert!(service("[Service]\n").lets_in(node) && Service::default().lets_in(node));
    }
}

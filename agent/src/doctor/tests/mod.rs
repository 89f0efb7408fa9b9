//! Each check on made-up facts: when it fires, when it does not, and that the document lists it.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    facts::{
        Access, Account, Address, Answer, Clock, ConfigFile, Conntrack, Daemon, Endpoint, Files, Found,
        Kernel, Limits, Line, LineEnd, LinePeer, Lookup, NamedPath, Network, Opened, Peer, Port, Service,
        Tun, Unit, Web,
    },
    *,
};

mod cases;
mod parts;
mod unit;
mod web;

use cases::{fires, quiet};

use config::ConfigProblem;
use net::{
    host::{Buffers, ClockState, Route, TunFeatures},
    netlink::{DeviceRoute, Hop, TABLE_MAIN},
};
use ops::control_socket::status::{
    ContestedStatus, LanePackets, LaneStatus, LastError, LineState, LineStatus, PeerRates, PeerState,
    PeerStatus, RateStatus, SendError, Status, Used,
};

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";
const OTHER_KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE";

/// A hub with a mark that dials one peer, and is dialled by another. A scenario replaces parts of the text.
fn text() -> String {
    format!(
        "[identity]\nkey_file = \"/etc/culvert/identity.key\"\nstate_dir = \"/var/lib/culvert\"\n\
         [transport]\nlisten = [\"0.0.0.0:4433\"]\nworkers = 2\nmark = 7\ngso = \"auto\"\n\
         [metrics]\nlisten = \"10.9.0.1:9464\"\npage = true\nallow = [\"10.9.0.0/16\"]\n\
         [control]\nsocket = \"/run/culvert/culvert.sock\"\n\
         [http]\ncertificate_file = \"a\"\nkey_file = \"b\"\nnames = [\"gw.example.net\"]\nsite = \"http://127.0.0.1:8080\"\n\
         [limits]\nflows = 1000\n\
         [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
         [[peer]]\nname = \"exit\"\npublic_key = \"{KEY}\"\nendpoints = [\"exit.example.net:4433\"]\nkeepalive = \"20s\"\n\
         allowed_ips = [\"10.9.1.0/24\", \"fd09:1::/64\"]\naddress = [\"10.9.1.1\"]\n\
         [[peer]]\nname = \"spoke\"\npublic_key = \"{OTHER_KEY}\"\nallowed_ips = [\"10.9.2.0/24\", \"fd09:2::/64\"]\n\
         address = [\"10.9.2.1\"]\n\
         [tun]\naddress = [\"10.9.0.1/32\", \"fd09::1/128\"]\noffload = \"auto\"\n"
    )
}

fn folder(path: &str) -> NamedPath {
    let found = Found::There { folder: true, mode: 0o700, owner: 0, writable: true };
    NamedPath { path: PathBuf::from(path), found }
}

const REMOTE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 4_433);
const OURS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9));

/// A host on which all is well, and no daemon runs.
pub(super) fn facts() -> Facts {
    let key = Found::There { folder: false, mode: 0o440, owner: 0, writable: true };
    let answer = Some(Answer::Connected { rtt: Some(Duration::from_millis(12)), inner_mtu: Some(1_421) });
    let address = Address { remote: REMOTE, way: Ok(Route { source: OURS, mtu: 1_500 }), answer };
    let endpoint =
        Endpoint { text: "exit.example.net:4433".to_owned(), lookup: Lookup::Found(vec![address]) };
    let port = Port {
        key: "transport.listen",
        tcp: false,
        address: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 4_433)),
        opened: Opened::Free,
    };
    let buffers = Buffers { receive: 4 << 20, send: 4 << 20, forced: false };
    Facts {
        file: ConfigFile { path: Some(PathBuf::from("/etc/culvert/agent.toml")), ..ConfigFile::default() },
        files: Files {
            key: NamedPath { path: PathBuf::from("/etc/culvert/identity.key"), found: key },
            key_folder: folder("/etc/culvert"),
            state: folder("/var/lib/culvert"),
            key_denied: false,
            control: folder("/run/culvert"),
        },
        service: Service::default(),
        daemon: Daemon::Absent,
        daemon_replaced: false,
        kernel: Kernel {
            release: "6.12.48+deb13-amd64".to_owned(),
            segmentation: Ok(true),
            receive_offload: Ok(true),
            takes_gro: true,
            steering: Ok(true),
            timestamps: Ok(true),
            aes: true,
            vector_aes: Some(true),
        },
        limits: Limits {
            rate: None,
            buffers: Some(buffers),
            rmem_max: Some(4 << 20),
            wmem_max: Some(4 << 20),
            backlog: Some(1_000),
            backlog_drops: 0,
            udp_drops: 0,
            descriptors: Some(524_288),
            most_descriptors: Some(1 << 20),
            cpus: 2,
            cpu_quota: None,
            user: 0,
            capabilities: 1 << Limits::NET_ADMIN,
        },
        clock: Clock {
            unix_seconds: 1_790_000_000,
            state: Some(ClockState { synchronised: true, most_error: Duration::from_millis(20) }),
        },
        network: Network {
            ports: vec![port],
            unprivileged_ports: Some(1_024),
            forwards_ipv4: Some(true),
            forwards_ipv6: Some(true),
            sends_redirects: Some(false),
            advertised: Vec::new(),
            rp_filter: vec![("culvert0".to_owned(), 1), ("wan".to_owned(), 2)],
            conntrack: Some(Conntrack { count: 799, max: 1_000, udp_timeout: Duration::from_secs(120) }),
            interfaces: vec![("wan".to_owned(), true)],
        },
        web: Web { certificate_days: Some(60), site: Some(Ok(200)) },
        tun: Tun {
            driver: Some(Ok(TunFeatures { vnet_header: true, several_queues: true })),
            denied: false,
            node: Some(Access { mode: 0o666, user: 0, group: 0 }),
            free: Some(Ok(())),
            queue_packets: None,
            no_ipv6: false,
            routes: None,
        },
        peers: vec![
            Peer { name: "exit".to_owned(), endpoints: vec![endpoint], not_dialled: None },
            Peer { name: "spoke".to_owned(), endpoints: Vec::new(), not_dialled: None },
        ],
        lines: Vec::new(),
    }
}

/// The same host while the daemon runs.
fn run(facts: &mut Facts) {
    let peer = |name: &str| PeerStatus {
        name: name.into(),
        state: PeerState::Connected,
        address: Some(REMOTE),
        rtt_seconds: Some(0.012),
        rtt_min_seconds: Some(0.011),
        lane_packets: LanePackets { sent: 100_000, lost: 100, ..LanePackets::default() },
        inner_mtu: Some(1_421),
        software: Some(crate::program::software().into()),
        ..PeerStatus::default()
    };
    let software = env!("CARGO_PKG_VERSION").to_owned();
    let commit = crate::program::COMMIT.map(str::to_owned);
    let peers = vec![peer("exit"), peer("spoke")];
    facts.daemon = Daemon::Running(Box::new(Status { software, commit, peers, ..Status::default() }));
    facts.tun.free =
        Some(Err("there is an interface culvert0 already (remedy: another tun.name)".to_owned()));
    facts.tun.queue_packets = Some(1_000);
    facts.network.ports[0].opened = Opened::Taken;
    for address in addresses(facts) {
        address.answer = None;
    }
}

/// The same host while the daemon follows routes of the kernel, each described as `PREFIX [GATEWAY]`.
fn follow(facts: &mut Facts, routes: &[&str]) {
    run(facts);
    facts.network.rp_filter[0].1 = 2;
    let route = |text: &&str| {
        let (prefix, gateway) = text.split_once(' ').unwrap_or((text, ""));
        let hops = vec![Hop { gateway: gateway.parse().ok(), weight: 1 }];
        DeviceRoute { prefix: prefix.parse().unwrap(), table: TABLE_MAIN, metric: 0, hops }
    };
    facts.tun.routes = Some(routes.iter().map(route).collect());
}

/// The same host with the package, looked at by the service's user.
fn package(facts: &mut Facts) {
    const UNIT: &str = include_str!("../../../../deploy/systemd/culvert.service");
    let account = Account { name: "culvert".to_owned(), user: 998, group: 997 };
    facts.service = Service { unit: Some(super::unit::parse(UNIT)), account: Some(account) };
    facts.limits.user = 998;
    facts.limits.capabilities = 0;
}

fn status(facts: &mut Facts) -> &mut Status {
    let Daemon::Running(status) = &mut facts.daemon else { panic!("no daemon runs") };
    status
}

fn addresses(facts: &mut Facts) -> &mut Vec<Address> {
    let Lookup::Found(addresses) = &mut facts.peers[0].endpoints[0].lookup else { panic!("no addresses") };
    addresses
}

/// Gives the exit a second address, and returns that one.
fn second_address(facts: &mut Facts) -> &mut Address {
    let list = addresses(facts);
    let remote = "[2001:db8::1]:4433".parse().unwrap();
    list.push(Address { remote, ..list[0].clone() });
    &mut list[1]
}

fn problem(key_path: &str) -> ConfigProblem {
    ConfigProblem {
        file: None,
        key_path: key_path.to_owned(),
        table: None,
        line: Some(3),
        problem: "is wrong".to_owned(),
        remedy: "write another".to_owned(),
    }
}

fn there(mode: u32, writable: bool) -> Found {
    Found::There { folder: true, mode, owner: 0, writable }
}

/// Replaces part of the configuration's text, which may be nothing.
type Edit = (&'static str, &'static str);

const AS_IT_IS: Edit = ("", "");

/// The kernel's routes choose the peer.
const KERNEL: Edit = ("offload = \"auto\"", "offload = \"auto\"\nrouting = \"kernel\"");

/// Two lines, of which `two_lines` says what there is.
const LINES: Edit = (
    "[metrics]",
    "[[transport.uplink]]\nname = \"dsl\"\ninterface = \"eth0\"\n[[transport.uplink]]\nname = \"lte\"\n\
     source = \"192.0.2.77\"\n[metrics]",
);

/// What is different from a host on which all is well.
type Change = fn(&mut Facts);

fn findings((from, to): Edit, change: Change) -> Vec<Finding> {
    let text = text();
    assert!(text.contains(from), "{from:?} is not in the configuration");
    let text = if from.is_empty() { text } else { text.replace(from, to) };
    let config = Config::parse(&text, Path::new("")).unwrap_or_else(|problems| panic!("{problems}"));
    let mut facts = facts();
    change(&mut facts);
    let config = Some(&config).filter(|_| facts.file.path.is_some());
    examine(&facts, config)
}

#[test]
fn each_check_fires_when_it_should_and_says_what_to_do() {
    for check in Check::ALL {
        let scenarios = fires(*check);
        assert!(!scenarios.is_empty(), "{check:?} never fires");
        for (place, (severity, edit, change)) in scenarios.into_iter().enumerate() {
            let found = findings(edit, change);
            let of_check = || found.iter().filter(|finding| finding.check == *check);
            let worst = of_check().map(|finding| finding.severity).max();
            assert_eq!(worst, Some(severity), "{check:?}, {place}: {found:#?}");
            for finding in of_check().filter(|finding| finding.severity > Severity::Ok) {
                assert!(!finding.problem.is_empty() && !finding.remedy.is_empty(), "{finding:?}");
            }
        }
    }
}

#[test]
fn each_check_is_quiet_when_it_should_be() {
    for check in Check::ALL {
        let scenarios = quiet(*check);
        assert!(!scenarios.is_empty(), "{check:?} never is quiet");
        for (place, (edit, change)) in scenarios.into_iter().enumerate() {
            let found = findings(edit, change);
            let of_check: Vec<&Finding> = found.iter().filter(|finding| finding.check == *check).collect();
            assert!(!of_check.is_empty(), "{check:?}, {place}: nothing was looked at");
            for finding in of_check {
                assert_eq!(finding.severity, Severity::Ok, "{check:?}, {place}: {finding:?}");
                assert!(finding.problem.is_empty() && finding.remedy.is_empty(), "{finding:?}");
            }
        }
    }
}

#[test]
fn where_all_is_well_every_check_says_so_in_order() {
    let stopped = findings(AS_IT_IS, |_| {});
    let running = findings(AS_IT_IS, run);
    let following = findings(KERNEL, |f| follow(f, &["10.1.0.0/16 10.9.1.1"]));
    let of_lines = findings(LINES, parts::two_lines);
    for found in [&stopped, &running, &following, &of_lines] {
        assert!(found.is_sorted_by_key(|finding| finding.check), "{found:#?}");
        let bad: Vec<_> = found.iter().filter(|finding| finding.severity > Severity::Ok).collect();
        assert!(bad.is_empty(), "{bad:#?}");
    }
    let all = || stopped.iter().chain(&running).chain(&following).chain(&of_lines);
    let looked_at = |check: &Check| all().any(|finding| finding.check == *check);
    let missing: Vec<_> = Check::ALL.iter().filter(|check| !looked_at(check)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn without_a_configuration_only_the_host_is_looked_at() {
    let mut facts = facts();
    facts.file.path = None;
    let found = examine(&facts, None);
    assert!(found.iter().all(|finding| finding.check.group() != Group::Peers));
    assert!(found.iter().any(|finding| finding.check == Check::ReceiveBuffer));
    assert_eq!(Report::new(&facts, found).severity(), Severity::Note);
}

#[test]
fn the_remedy_of_a_small_buffer_names_what_the_rate_needs() {
    let found = findings(AS_IT_IS, |facts| {
        facts.limits.rate = Some(5_000_000_000);
        facts.limits.buffers = Some(Buffers { receive: 212_992, send: 212_992, forced: false });
    });
    let finding = found.iter().find(|finding| finding.check == Check::ReceiveBuffer).unwrap();
    // 5 Gbit/s for 100 ms are 62,500,000 bytes, 61,036 KiB.
    let starts = "limits.receive_buffer = \"61036KiB\"; and sysctl -w net.core.rmem_max=62500000 ";
    assert!(finding.remedy.starts_with(starts), "{finding:?}");
}

/// The remedy of what a check found on a changed host.
fn advice(check: Check, edit: Edit, change: Change) -> String {
    let found = findings(edit, change);
    found.iter().find(|finding| finding.check == check).unwrap().remedy.clone()
}

#[test]
fn the_name_of_an_interface_may_have_dots() {
    let strict = advice(Check::RpFilter, AS_IT_IS, |facts| {
        facts.network.rp_filter = vec![("wan.100".to_owned(), 1), ("wan".to_owned(), 1)];
    });
    assert_eq!(strict, "sysctl -w net/ipv4/conf/wan.100/rp_filter=2 net/ipv4/conf/wan/rp_filter=2");
}

#[test]
fn forwarding_does_not_cost_an_advertised_default_route() {
    let advertised: Change = |facts| {
        facts.network.forwards_ipv6 = Some(false);
        facts.network.advertised = vec!["wan.100".to_owned()];
    };
    let found = findings(AS_IT_IS, advertised);
    let six = found.iter().find(|finding| finding.subject == "net.ipv6.conf.all.forwarding").unwrap();
    let first =
        "sysctl -w net/ipv6/conf/wan.100/accept_ra=2 net.ipv6.conf.all.forwarding=1 (to keep it, lines ";
    assert!(six.remedy.starts_with(first) && six.remedy.contains("loses its IPv6 default route"), "{six:?}");
    // Not for IPv4, nor where nothing was advertised.
    for family in [[false, true], [true, false]] {
        let found = findings(
            AS_IT_IS,
            if family[0] {
                |f| f.network.forwards_ipv6 = Some(false)
            } else {
                |f| {
                    f.network.forwards_ipv4 = Some(false);
                    f.network.advertised = vec!["wan".to_owned()];
                }
            },
        );
        let off =
            found.iter().find(|finding| finding.value == "0" && finding.check == Check::Forwarding).unwrap();
        assert!(off.remedy.starts_with("sysctl -w net.ipv") && !off.remedy.contains("accept_ra"), "{off:?}");
    }
}

#[test]
fn a_folder_is_made_for_the_services_user_where_there_is_one() {
    let missing: Change = |facts| facts.files.state.found = Found::Missing { may_make: false };
    assert_eq!(advice(Check::StateFolder, AS_IT_IS, missing), "install -d -m 0700 /var/lib/culvert");
    let with_user: Change = |facts| {
        package(facts);
        facts.service.unit = None;
        facts.files.state.found = Found::Missing { may_make: false };
    };
    let given = "install -d -m 0700 -o culvert -g culvert /var/lib/culvert";
    assert_eq!(advice(Check::StateFolder, AS_IT_IS, with_user), given);
    let of_another: Change = |facts| {
        package(facts);
        facts.service.unit = None;
        facts.limits.user = 1_000;
        facts.files.control.found = Found::Missing { may_make: false };
    };
    let edit = ("/run/culvert/", "/run/c/");
    assert_eq!(advice(Check::ControlFolder, edit, of_another), "install -d -m 0700 /run/culvert");
}

#[test]
fn no_remedy_opens_the_key_or_the_device_to_all() {
    for change in [
        (|f| {
            package(f);
            f.tun.denied = true;
            f.tun.node = Some(Access { mode: 0o600, user: 0, group: 0 });
            f.tun.driver = Some(Err("permission denied".to_owned()));
        }) as Change,
        |f| {
            f.tun.denied = true;
            f.tun.driver = Some(Err("permission denied".to_owned()));
        },
    ] {
        let remedy = advice(Check::TunDriver, AS_IT_IS, change);
        assert!(remedy.contains("0660") && !remedy.contains("666"), "{remedy}");
    }
    for check in [Check::KeyFile, Check::Capabilities, Check::TunDriver, Check::Ports] {
        let remedy = advice(check, AS_IT_IS, |f| {
            package(f);
            f.files.key_denied = true;
            f.file.problems = vec![problem("identity.key_file")];
            f.tun.denied = true;
            f.tun.driver = Some(Err("permission denied".to_owned()));
            f.network.ports[0].opened = Opened::Forbidden;
        });
        assert_eq!(remedy, "run culvert doctor as root", "{check:?}");
    }
}

#[test]
fn the_document_lists_the_checks_in_their_groups() {
    let document = include_str!("../../../../docs/doctor.md");
    let mut heading = "";
    let mut listed = Vec::new();
    for line in document.lines() {
        if let Some(text) = line.strip_prefix("### ") {
            heading = text;
        } else if line.starts_with("## ") {
            heading = "";
        } else if let Some(id) = line.strip_prefix("| `").and_then(|row| row.split_once('`')) {
            listed.push((heading, id.0));
        }
    }
    listed.retain(|(heading, _)| !heading.is_empty());
    let checks: Vec<_> = Check::ALL.iter().map(|check| (check.group().label(), check.id())).collect();
    assert_eq!(listed, checks);
}

#[test]
fn a_report_tells_the_worst_again_at_the_end_and_json_has_all_of_it() {
    let mut facts = facts();
    facts.limits.udp_drops = 7;
    facts.tun.no_ipv6 = true;
    let config = Config::parse(&text(), Path::new("")).unwrap();
    let report = Report::new(&facts, examine(&facts, Some(&config)));
    let shown = report.to_string();
    let (error, note) = (shown.find("\nerror: tun-ipv6"), shown.find("\nnote: udp-drops"));
    assert!(error.is_some() && error < note, "{shown}");
    assert!(shown.contains("\nkernel\n") && shown.contains("1 error, 0 warnings, 1 note, "), "{shown}");
    let json = report.json();
    assert_eq!((&json["version"], &json["severity"]), (&1.into(), &"error".into()));
    let list = json["findings"].as_array().unwrap();
    assert_eq!(list.len(), report.findings.len());
    let of = |id: &str| list.iter().find(|finding| finding["check"] == id).unwrap();
    assert_eq!(of("tun-ipv6")["remedy"].as_str(), Some(&*remedy(&report, Check::TunIpv6)));
    assert!(of("clock")["remedy"].is_null() && of("clock")["problem"].is_null());
}

fn remedy(report: &Report, check: Check) -> String {
    report.findings.iter().find(|finding| finding.check == check).unwrap().remedy.clone()
}

#[test]
fn a_queue_or_a_loss_on_the_path_names_the_key_that_mends_it() {
    let remedy = |check: Check, change: fn(&mut Facts)| {
        let found = findings(AS_IT_IS, change);
        let of_check =
            found.into_iter().find(|finding| finding.check == check && finding.severity > Severity::Ok);
        of_check.expect("it fires").remedy
    };
    let queue = |change| remedy(Check::PathQueue, change);
    assert!(queue(|f| parts::bloat(f, 0.4, 2e6, 1e6)).contains("peer.rate = \"auto\""));
    assert!(queue(|f| parts::bloat(f, 0.4, 1e6, 2e6)).contains("peer.rate_receive"));
    let loss = |change| remedy(Check::PathLoss, change);
    let on_lossy_path = loss(|f| parts::lose(f, 10_000, 100));
    assert!(
        on_lossy_path.contains("[[service]]") && on_lossy_path.contains("peer.repair"),
        "{on_lossy_path}"
    );
    let while_full = loss(|f| {
        parts::bloat(f, 0.4, 2e6, 1e6);
        status(f).peers[0].lane_packets = LanePackets { sent: 10_000, lost: 100, ..LanePackets::default() };
    });
    assert!(!while_full.contains("repair"), "{while_full}");
}

#[test]
fn a_route_to_nobody_is_named_with_its_next_hop_and_there_are_never_many_findings() {
    let of_check = |change: Change| -> Vec<Finding> {
        let found = findings(KERNEL, change);
        found.into_iter().filter(|finding| finding.check == Check::TunNextHop).collect()
    };
    let found = of_check(|f| {
        follow(
            f,
            &["10.1.0.0/16 10.9.9.9", "10.2.0.0/16 10.9.9.9", "10.3.0.0/16 10.9.9.9", "10.4.0.0/16 10.9.9.9"],
        );
    });
    let [stray] = &found[..] else { panic!("{found:#?}") };
    assert_eq!(stray.subject, "next hop 10.9.9.9");
    assert_eq!(stray.value, "of 10.1.0.0/16, 10.2.0.0/16, 10.3.0.0/16, 1 more");
    assert!(stray.remedy.starts_with("address = [\"10.9.9.9\"] in the [[peer]]"), "{stray:?}");
    let found = of_check(|f| follow(f, &["10.1.0.0/16"]));
    assert!(
        found[0].remedy.starts_with("ip route replace 10.1.0.0/16 via ADDRESS dev culvert0"),
        "{found:?}"
    );
    let found = of_check(|f| {
        let routes: Vec<String> = (0..200).map(|host| format!("10.1.{host}.0/24 10.9.9.{host}")).collect();
        follow(f, &routes.iter().map(String::as_str).collect::<Vec<_>>());
    });
    assert_eq!((found.len(), &*found[16].subject), (17, "184 others"));
}

//! When each check fires, and where it is close to firing and does not.

use std::sync::Arc;

use engine::reach::Failure;

use super::{parts::*, *};

/// When a check fires, and how much that matters. The match has an arm for each check, so that none is forgotten.
#[expect(clippy::too_many_lines, reason = "a table")]
pub(super) fn fires(check: Check) -> Vec<(Severity, Edit, Change)> {
    use Severity::{Error, Note, Warning};
    match check {
        Check::Configuration => vec![
            (Note, AS_IT_IS, |f| f.file.path = None),
            (Error, AS_IT_IS, |f| f.file.unreadable = Some("gone (remedy: name it)".to_owned())),
            (Error, AS_IT_IS, |f| f.file.problems = vec![problem("transport.listen")]),
            (Note, AS_IT_IS, |f| f.file.notes = vec![problem("peer[0].endpoints")]),
        ],
        Check::KeyFile => vec![
            (Error, AS_IT_IS, |f| f.file.problems = vec![problem("identity.key_file")]),
            (Warning, AS_IT_IS, |f| f.files.key_folder.found = there(0o777, true)),
            (Error, AS_IT_IS, deny_key),
            (Note, AS_IT_IS, |f| {
                package(f);
                deny_key(f);
            }),
            (Note, AS_IT_IS, |f| {
                f.daemon = Daemon::Mute("permission denied".to_owned());
                deny_key(f);
            }),
            (Error, AS_IT_IS, |f| {
                package(f);
                unit(f).credentials.clear();
                deny_key(f);
            }),
        ],
        Check::StateFolder => vec![
            (Warning, AS_IT_IS, |f| f.files.state.found = Found::Missing { may_make: false }),
            (Warning, AS_IT_IS, |f| f.files.state.found = Found::Hidden("permission denied".to_owned())),
            (Warning, AS_IT_IS, |f| f.files.state.found = there(0o700, false)),
            (Note, AS_IT_IS, |f| {
                package(f);
                f.files.state.found = there(0o700, false);
            }),
            (Warning, AS_IT_IS, |f| f.files.state.found = there(0o777, true)),
            (Warning, AS_IT_IS, |f| {
                f.files.state.found = Found::There { folder: false, mode: 0o600, owner: 0, writable: true };
            }),
            (Note, ("/var/lib/culvert", ""), |_| {}),
        ],
        Check::ControlFolder => vec![
            (Warning, AS_IT_IS, |f| f.files.control.found = Found::Missing { may_make: false }),
            (Note, AS_IT_IS, |f| {
                package(f);
                f.files.control.found = there(0o755, false);
            }),
            // Another configuration than the unit's, in the folder of the service's user.
            (Note, AS_IT_IS, |f| {
                package(f);
                f.service.unit = None;
                f.files.control.found =
                    Found::There { folder: true, mode: 0o750, owner: 998, writable: false };
            }),
            (Error, ("/run/culvert/", "/run/c/"), |f| {
                f.files.control.found = Found::Missing { may_make: true }
            }),
            (Warning, AS_IT_IS, |f| f.files.control.found = there(0o755, false)),
            (Warning, AS_IT_IS, |f| f.files.control.found = there(0o777, true)),
            (Note, AS_IT_IS, |f| f.files.control.found = Found::Hidden("permission denied".to_owned())),
            (Note, ("/run/culvert/culvert.sock", ""), |_| {}),
        ],
        Check::Daemon => vec![
            (Warning, AS_IT_IS, |f| {
                run(f);
                status(f).software = "0.0.1".to_owned();
            }),
            (Note, AS_IT_IS, |f| {
                run(f);
                status(f).software = "99.0.0".to_owned();
            }),
            (Warning, AS_IT_IS, |f| {
                run(f);
                f.daemon_replaced = true;
            }),
            (Note, AS_IT_IS, |f| f.daemon = Daemon::Mute("permission denied".to_owned())),
        ],
        Check::KernelVersion => vec![
            (Warning, AS_IT_IS, |f| f.kernel.release = "4.19.0-27-amd64".to_owned()),
            (Note, AS_IT_IS, |f| f.kernel.release = "unknown".to_owned()),
        ],
        Check::UdpSegmentation => vec![
            (Warning, AS_IT_IS, |f| f.kernel.segmentation = Ok(false)),
            (Warning, AS_IT_IS, |f| {
                run(f);
                status(f).peers[0].lanes = vec![LaneStatus { gso: "failed".into(), ..LaneStatus::default() }];
            }),
            (Note, AS_IT_IS, |f| f.kernel.segmentation = Err("no loopback".to_owned())),
            (Note, ("gso = \"auto\"", "gso = \"off\""), |_| {}),
        ],
        Check::UdpReceiveOffload => vec![
            (Warning, AS_IT_IS, |f| {
                f.kernel.receive_offload = Ok(false);
                f.kernel.takes_gro = false;
            }),
            (Note, AS_IT_IS, |f| f.kernel.receive_offload = Err("no loopback".to_owned())),
        ],
        Check::Steering => vec![(Warning, AS_IT_IS, |f| f.kernel.steering = Ok(false))],
        Check::Timestamps => vec![(Warning, AS_IT_IS, |f| f.kernel.timestamps = Ok(false))],
        Check::CpuFeatures => vec![(Note, AS_IT_IS, |f| f.kernel.aes = false)],
        Check::ReceiveBuffer => vec![
            (Warning, AS_IT_IS, |f| f.limits.buffers = Some(Buffers { receive: 212_992, ..full(f) })),
            // 1 Gbit/s for 100 ms.
            (Warning, AS_IT_IS, |f| f.limits.rate = Some(1_000_000_000)),
            (Note, AS_IT_IS, |f| f.limits.buffers = None),
        ],
        Check::SendBuffer => vec![
            (Warning, AS_IT_IS, |f| f.limits.buffers = Some(Buffers { send: 212_992, ..full(f) })),
            (Note, AS_IT_IS, |f| f.limits.buffers = None),
        ],
        Check::Backlog => vec![
            (Warning, AS_IT_IS, |f| f.limits.backlog = Some(999)),
            (Note, AS_IT_IS, |f| f.limits.backlog_drops = 1),
        ],
        Check::UdpDrops => vec![(Note, AS_IT_IS, |f| f.limits.udp_drops = 1)],
        Check::OpenFiles => vec![
            // 1000 flows, 32,768 TCP streams, 8 lanes, 256 others.
            (Warning, AS_IT_IS, |f| f.limits.descriptors = Some(34_031)),
            (Warning, AS_IT_IS, |f| {
                f.limits.capabilities |= 1 << Limits::SYS_RESOURCE;
                (f.limits.descriptors, f.limits.most_descriptors) = (Some(1_024), Some(2_048));
            }),
            (Note, AS_IT_IS, |f| f.limits.descriptors = None),
            // Of the daemon, whatever this user may have.
            (Warning, AS_IT_IS, |f| {
                run(f);
                status(f).limits.descriptors = Used { used: 90, limit: 100 };
            }),
        ],
        Check::Workers => vec![
            (Warning, AS_IT_IS, |f| {
                run(f);
                status(f).cpus = 1;
            }),
            (Warning, AS_IT_IS, |f| f.limits.cpus = 1),
            (Warning, AS_IT_IS, |f| f.limits.cpu_quota = Some(1.5)),
            (Warning, AS_IT_IS, |f| f.limits.cpu_quota = Some(0.5)),
        ],
        Check::Capabilities => vec![
            (Error, AS_IT_IS, |f| f.limits.capabilities = 0),
            (Note, AS_IT_IS, package),
            (Error, AS_IT_IS, |f| {
                package(f);
                unit(f).ambient.clear();
            }),
            (Note, AS_IT_IS, |f| {
                run(f);
                f.limits.capabilities = 0;
            }),
        ],
        Check::Clock => vec![
            (Error, AS_IT_IS, |f| f.clock.unix_seconds = 86_400),
            (Warning, AS_IT_IS, |f| f.clock.state = Some(ClockState { synchronised: false, ..exact(f) })),
            (Warning, AS_IT_IS, |f| {
                f.clock.state = Some(ClockState { most_error: Duration::from_secs(46), ..exact(f) });
            }),
            (Note, AS_IT_IS, |f| f.clock.state = None),
        ],
        Check::Ports => vec![
            (Error, AS_IT_IS, |f| f.network.ports[0].opened = Opened::Taken),
            (Error, AS_IT_IS, |f| f.network.ports[0].opened = Opened::Forbidden),
            (Note, AS_IT_IS, |f| {
                package(f);
                f.network.ports[0].opened = Opened::Forbidden;
            }),
            (Error, AS_IT_IS, |f| f.network.ports[0].opened = Opened::NoAddress),
            (Error, AS_IT_IS, |f| f.network.ports[0].opened = Opened::Failed("no IPv6".to_owned())),
            (Note, AS_IT_IS, |f| {
                run(f);
                f.network.ports[0].opened = Opened::Free;
            }),
            (Note, AS_IT_IS, |f| {
                f.network.ports[0].opened = Opened::Taken;
                f.daemon = Daemon::Mute("permission denied".to_owned());
            }),
        ],
        Check::WebServer | Check::WebCertificate | Check::WebSite => web::fires(check),
        Check::StatusPage => vec![
            (Warning, ("10.9.0.0/16", "0.0.0.0/0"), |_| {}),
            (Note, ("10.9.0.1:9464", "127.0.0.1:9464"), |_| {}),
            (Note, ("allow = [\"10.9.0.0/16\"]", "token_file = \"token\""), |_| {}),
        ],
        Check::Forwarding => vec![
            (Warning, AS_IT_IS, |f| f.network.forwards_ipv4 = Some(false)),
            (Warning, AS_IT_IS, |f| f.network.forwards_ipv6 = Some(false)),
            (Note, ("allowed_ips = [\"10.9.2.0/24\", \"fd09:2::/64\"]", ""), |f| {
                f.network.forwards_ipv4 = Some(false);
            }),
        ],
        Check::Redirects => vec![(Warning, AS_IT_IS, |f| f.network.sends_redirects = Some(true))],
        Check::RpFilter => vec![
            (Warning, AS_IT_IS, |f| f.network.rp_filter[1].1 = 1),
            (Warning, KERNEL, |f| f.network.rp_filter[0].1 = 1),
        ],
        Check::Conntrack => vec![
            (Warning, AS_IT_IS, |f| table(f).count = 800),
            (Error, AS_IT_IS, |f| table(f).count = 950),
            (Note, AS_IT_IS, |f| (table(f).count, table(f).max) = (1, 999)),
        ],
        Check::ConntrackTimeout => vec![
            (Warning, AS_IT_IS, |f| table(f).udp_timeout = Duration::from_secs(20)),
            (Warning, ("\"20s\"", "\"0s\""), |_| {}),
        ],
        Check::InterfaceOffload => vec![(Warning, AS_IT_IS, |f| f.network.interfaces[0].1 = false)],
        Check::TunDriver => vec![
            (Error, AS_IT_IS, |f| f.tun.driver = Some(Err("no such file".to_owned()))),
            (Error, AS_IT_IS, deny_tun),
            (Note, AS_IT_IS, |f| {
                package(f);
                deny_tun(f);
            }),
            // Root opens it, the service's user does not.
            (Error, AS_IT_IS, |f| {
                package(f);
                f.tun.node = Some(Access { mode: 0o600, user: 0, group: 0 });
            }),
            (Error, AS_IT_IS, |f| {
                package(f);
                unit(f).tun = false;
            }),
            (Note, AS_IT_IS, |f| {
                run(f);
                f.tun.driver = Some(Err("permission denied".to_owned()));
            }),
        ],
        Check::TunOffload => vec![
            (Warning, AS_IT_IS, |f| features(f).vnet_header = false),
            (Warning, AS_IT_IS, |f| features(f).several_queues = false),
            (Note, AS_IT_IS, |f| f.kernel.release = "6.1.0-40-amd64".to_owned()),
            (Note, ("offload = \"auto\"", "offload = \"off\""), |_| {}),
            (Note, AS_IT_IS, |f| {
                run(f);
                joins(f, [true, false]);
            }),
        ],
        Check::TunDevice => vec![
            (Error, AS_IT_IS, |f| f.tun.free = Some(Err("taken (remedy: another tun.name)".to_owned()))),
            (Note, AS_IT_IS, |f| {
                f.tun.free = Some(Err("taken (remedy: another tun.name)".to_owned()));
                f.daemon = Daemon::Mute("permission denied".to_owned());
            }),
            (Error, AS_IT_IS, |f| {
                run(f);
                f.tun.free = Some(Ok(()));
            }),
        ],
        Check::TunQueue => vec![(Warning, AS_IT_IS, |f| {
            run(f);
            f.tun.queue_packets = Some(500);
        })],
        Check::TunIpv6 => vec![
            (Error, AS_IT_IS, |f| f.tun.no_ipv6 = true),
            (Warning, (", \"fd09::1/128\"", ""), |f| f.tun.no_ipv6 = true),
        ],
        Check::TunNextHop => vec![
            (Warning, KERNEL, |f| follow(f, &["10.1.0.0/16 10.9.1.1", "10.2.0.0/16 10.9.1.2"])),
            (Warning, KERNEL, |f| follow(f, &["fd01::/64 fe80::1"])),
            (Warning, KERNEL, |f| follow(f, &["10.1.0.0/16"])),
        ],
        Check::TunPeerAddress => {
            vec![(Warning, ("address = [\"10.9.2.1\"]\n[tun]\n", "[tun]\nrouting = \"kernel\"\n"), |f| {
                follow(f, &["10.1.0.0/16 10.9.1.1"])
            })]
        }
        Check::EndpointName => vec![
            (Error, AS_IT_IS, |f| f.peers[0].endpoints[0].lookup = Lookup::Failed("no such name".to_owned())),
            (Error, AS_IT_IS, |f| addresses(f).clear()),
            (Note, AS_IT_IS, |f| f.peers[0].endpoints[0].lookup = Lookup::Unasked),
            (Warning, AS_IT_IS, |f| {
                let lookup = Lookup::Failed("no such name".to_owned());
                f.peers[0].endpoints.push(Endpoint { text: "b.example.net:1".to_owned(), lookup });
            }),
        ],
        Check::EndpointRoute => vec![
            (Error, AS_IT_IS, |f| addresses(f)[0].way = Err("unreachable".to_owned())),
            (Note, AS_IT_IS, |f| second_address(f).way = Err("unreachable".to_owned())),
            (Note, AS_IT_IS, |f| addresses(f)[0].way = Ok(Route { source: REMOTE.ip(), mtu: 65_535 })),
            (Error, AS_IT_IS, |f| addresses(f)[0].way = Ok(Route { source: INNER, mtu: 1_421 })),
        ],
        Check::Uplink => vec![
            (Warning, LINES, |f| {
                two_lines(f);
                f.lines[0].end = LineEnd::Missing;
            }),
            (Warning, LINES, |f| {
                two_lines(f);
                f.lines[1].end = LineEnd::Missing;
            }),
            (Warning, LINES, |f| {
                two_lines(f);
                let interface = "eth0".to_owned();
                f.lines[0].end = LineEnd::There { interface, up: false, addresses: vec![OURS] };
            }),
            (Warning, LINES, |f| {
                two_lines(f);
                let interface = "eth0".to_owned();
                f.lines[0].end = LineEnd::There { interface, up: true, addresses: Vec::new() };
            }),
            (Note, LINES, |f| {
                two_lines(f);
                f.lines[0].end = LineEnd::Unknown("permission denied".to_owned());
            }),
        ],
        Check::UplinkRoute => vec![
            (Warning, LINES, |f| {
                two_lines(f);
                way_of_line(f, 0).way = Err("unreachable".to_owned());
            }),
            (Error, LINES, |f| {
                two_lines(f);
                way_of_line(f, 0).way = Err("unreachable".to_owned());
                way_of_line(f, 1).way = Err("unreachable".to_owned());
            }),
            (Note, LINES, |f| {
                two_lines(f);
                f.lines[0].peers[0].addresses.clear();
            }),
        ],
        Check::UplinkReachability => vec![
            (Warning, LINES, |f| {
                two_lines(f);
                way_of_line(f, 1).answer = Some(no_answer());
            }),
            (Error, LINES, |f| {
                two_lines(f);
                way_of_line(f, 0).answer = Some(no_answer());
                way_of_line(f, 1).answer = Some(no_answer());
            }),
            (Warning, LINES, |f| lines_of_daemon(f, [LineState::InUse, LineState::Suspect])),
            (Warning, LINES, |f| lines_of_daemon(f, [LineState::Down, LineState::InUse])),
        ],
        Check::PathMtu => vec![
            (Error, AS_IT_IS, |f| addresses(f)[0].way = Ok(Route { source: OURS, mtu: 1_227 })),
            (Warning, AS_IT_IS, |f| addresses(f)[0].way = Ok(Route { source: OURS, mtu: 1_338 })),
            (Warning, AS_IT_IS, |f| second_address(f).way = Ok(Route { source: OURS, mtu: 1_358 })),
        ],
        Check::Reachability => vec![
            (Error, AS_IT_IS, |f| addresses(f)[0].answer = Some(no_answer())),
            (Warning, AS_IT_IS, |f| second_address(f).answer = Some(no_answer())),
            (Note, AS_IT_IS, |f| {
                addresses(f)[0].answer = None;
                f.peers[0].not_dialled = Some("--offline: nothing is sent");
            }),
            (Error, AS_IT_IS, |f| {
                run(f);
                let failure = Failure { reason: "no answer".to_owned(), ..Failure::default() };
                let last_error = Some(LastError { failure: Arc::new(failure), ..LastError::default() });
                status(f).peers[0].state = PeerState::Dialling;
                status(f).peers[0].last_error = last_error;
            }),
            (Warning, AS_IT_IS, |f| {
                run(f);
                let (reason, remedy) = ("this host refuses to send".to_owned(), "a firewall rule".into());
                let error = SendError { age_seconds: 59.0, reason, remedy, count: 3 };
                status(f).peers[0].send_error = Some(error);
            }),
            (Note, AS_IT_IS, |f| {
                run(f);
                status(f).peers[1].state = PeerState::Waiting;
            }),
        ],
        Check::PeerSoftware => vec![
            (Note, AS_IT_IS, |f| {
                run(f);
                exit(f).software = Some("culvert/0.0.1".into());
            }),
            (Note, AS_IT_IS, |f| {
                run(f);
                exit(f).software = Some("culvert/99.0.0 (0123456789ab 2026-11-27)".into());
            }),
        ],
        Check::OneKey => vec![(Warning, AS_IT_IS, |f| {
            run(f);
            let addresses = vec!["192.0.2.13:5".to_owned(), "192.0.2.14:6".to_owned()];
            status(f).peers[0].contested = Some(ContestedStatus { addresses, age_seconds: 1.0 });
        })],
        Check::Drops => {
            vec![(Warning, AS_IT_IS, |f| spoof(f, 100, 1)), (Note, AS_IT_IS, |f| spoof(f, 1_000, 9))]
        }
        Check::InnerMtu => vec![
            (Warning, AS_IT_IS, |f| {
                addresses(f)[0].answer = Some(Answer::Connected { rtt: None, inner_mtu: Some(1_279) });
            }),
            (Warning, AS_IT_IS, |f| {
                run(f);
                status(f).peers[1].inner_mtu = Some(1_279);
            }),
        ],
        Check::PathQueue => vec![
            (Warning, AS_IT_IS, |f| bloat(f, 0.05, 125_000.0, 0.0)),
            (Warning, AS_IT_IS, |f| bloat(f, 0.4, 1e6, 2e6)),
            (Warning, AS_IT_IS, |f| {
                bloat(f, 0.4, 2e6, 1e6);
                exit(f).rate = Some(RateStatus { bits_per_second: 48_000_000, ..RateStatus::default() });
            }),
        ],
        Check::PathLoss => vec![
            (Warning, AS_IT_IS, |f| lose(f, 2_000, 10)),
            (Warning, AS_IT_IS, |f| {
                bloat(f, 0.4, 2e6, 1e6);
                exit(f).lane_packets = LanePackets { sent: 2_000, lost: 10, ..LanePackets::default() };
            }),
        ],
    }
}

/// Where a check is close to firing, and does not; each is quiet on a host on which all is well, besides.
#[expect(clippy::too_many_lines, reason = "a table")]
pub(super) fn quiet(check: Check) -> Vec<(Edit, Change)> {
    let nothing: Change = |_| {};
    match check {
        Check::KeyFile => vec![(AS_IT_IS, |f| f.files.key_folder.found = there(0o1777, true))],
        Check::StateFolder => {
            vec![
                (AS_IT_IS, |f| f.files.state.found = Found::Missing { may_make: true }),
                (AS_IT_IS, |f| {
                    package(f);
                    f.files.state.found = Found::Missing { may_make: false };
                }),
            ]
        }
        Check::ControlFolder => vec![
            (AS_IT_IS, |f| {
                run(f);
                f.files.control.found = there(0o755, false);
            }),
            (AS_IT_IS, |f| f.files.control.found = Found::Missing { may_make: true }),
            (AS_IT_IS, |f| {
                package(f);
                f.files.control.found = Found::Missing { may_make: false };
            }),
        ],
        Check::KernelVersion => vec![(AS_IT_IS, |f| f.kernel.release = "5.0".to_owned())],
        Check::Steering => vec![(("workers = 2", "workers = 1"), |f| f.kernel.steering = Ok(false))],
        Check::CpuFeatures => vec![(AS_IT_IS, |f| f.kernel.vector_aes = Some(false))],
        Check::ReceiveBuffer => vec![
            // 335 Mbit/s for 100 ms are 4,187,500 bytes, below 4 MiB.
            (AS_IT_IS, |f| f.limits.rate = Some(335_000_000)),
            (AS_IT_IS, |f| {
                f.limits.rmem_max = Some(212_992);
                f.limits.buffers = Some(Buffers { forced: true, ..full(f) });
            }),
        ],
        Check::Backlog => vec![(AS_IT_IS, |f| f.limits.backlog = None)],
        Check::OpenFiles => vec![
            (AS_IT_IS, |f| f.limits.descriptors = Some(34_032)),
            (AS_IT_IS, |f| {
                f.limits.capabilities |= 1 << Limits::SYS_RESOURCE;
                f.limits.descriptors = Some(1_024);
            }),
            (AS_IT_IS, |f| {
                run(f);
                f.limits.descriptors = Some(1_024);
                status(f).limits.descriptors = Used { used: 90, limit: 34_032 };
            }),
        ],
        Check::Workers => vec![
            (AS_IT_IS, |f| f.limits.cpu_quota = Some(2.0)),
            (AS_IT_IS, |f| {
                run(f);
                f.limits.cpus = 1;
                status(f).cpus = 2;
            }),
        ],
        Check::Clock => vec![
            (AS_IT_IS, |f| {
                f.clock.state = Some(ClockState { most_error: Duration::from_secs(45), ..exact(f) })
            }),
            (("gso = \"auto\"", "gso = \"auto\"\n[access]\nclock_window = \"5m\""), |f| {
                f.clock.state = Some(ClockState { most_error: Duration::from_secs(46), ..exact(f) });
            }),
        ],
        Check::Ports => vec![
            (AS_IT_IS, |f| {
                run(f);
                f.network.ports[0].opened = Opened::Forbidden;
            }),
            (AS_IT_IS, run),
        ],
        Check::StatusPage => {
            vec![(
                ("10.9.0.1:9464\"\npage = true", "127.0.0.1:9464\"\npage = true\ntoken_file = \"token\""),
                nothing,
            )]
        }
        Check::RpFilter => vec![
            (("mark = 7", ""), |f| f.network.rp_filter[1].1 = 1),
            (("offload = \"auto\"", "routing = \"kernel\"\nsource_check = \"route\""), nothing),
            (KERNEL, |f| f.network.rp_filter[0].1 = 2),
        ],
        Check::ConntrackTimeout => vec![(AS_IT_IS, |f| table(f).udp_timeout = Duration::from_secs(21))],
        Check::TunDriver => vec![(AS_IT_IS, |f| {
            package(f);
            f.tun.node = Some(Access { mode: 0o660, user: 0, group: 997 });
        })],
        Check::TunOffload => vec![
            (AS_IT_IS, |f| f.kernel.release = "6.2.0".to_owned()),
            (AS_IT_IS, |f| {
                run(f);
                joins(f, [true, true]);
            }),
            (AS_IT_IS, |f| {
                run(f);
                joins(f, [true, false]);
                f.tun.no_ipv6 = true;
            }),
            (("workers = 2", "workers = 1"), |f| features(f).several_queues = false),
        ],
        Check::TunDevice | Check::TunQueue | Check::Reachability | Check::InnerMtu => vec![(AS_IT_IS, run)],
        Check::Redirects => vec![
            // Whoever forwards nothing sends no packet back.
            (AS_IT_IS, |f| (f.network.sends_redirects, f.network.forwards_ipv4) = (Some(true), Some(false))),
            (("allowed_ips = [\"10.9.2.0/24\", \"fd09:2::/64\"]", ""), |f| {
                f.network.sends_redirects = Some(true)
            }),
        ],
        Check::PeerSoftware => vec![(AS_IT_IS, |f| {
            run(f);
            exit(f).software = Some("another/1".into());
        })],
        Check::PathQueue => vec![
            (AS_IT_IS, |f| bloat(f, 0.049, 20e6, 0.0)),
            // The path is slow, and not because of us.
            (AS_IT_IS, |f| bloat(f, 0.5, 124_000.0, 0.0)),
            // A path around the world varies.
            (AS_IT_IS, |f| {
                bloat(f, 0.0, 20e6, 0.0);
                (exit(f).rtt_min_seconds, exit(f).rtt_seconds) = (Some(0.6), Some(0.7));
            }),
        ],
        Check::PathLoss => vec![
            (AS_IT_IS, run),
            (AS_IT_IS, |f| lose(f, 1_999, 500)),
            (AS_IT_IS, |f| {
                lose(f, 100_000, 3_000);
                exit(f).lanes = vec![LaneStatus { spuriously_lost_packets: 2_600, ..LaneStatus::default() }];
            }),
        ],
        Check::TunIpv6 => vec![((", \"fd09::1/128\"]", "]\nroutes = false"), |f| f.tun.no_ipv6 = true)],
        Check::TunNextHop => vec![
            (KERNEL, |f| follow(f, &["10.1.0.0/16 10.9.1.1", "10.9.2.0/24", "fe80::/64"])),
            // The link of our own address.
            (KERNEL, |f| follow(f, &["10.9.0.1/32"])),
            (KERNEL, |f| follow(f, &[&format!("fd01::/64 {}", link_local())])),
        ],
        Check::TunPeerAddress => vec![
            (KERNEL, |f| follow(f, &[])),
            (("address = [\"10.9.2.1\"]\n[tun]\n", "[tun]\nrouting = \"kernel\"\n"), |f| {
                follow(f, &[&format!("fd01::/64 {}", link_local())]);
            }),
        ],
        Check::WebServer | Check::WebCertificate | Check::WebSite => web::quiet(check),
        Check::PathMtu => vec![
            (AS_IT_IS, |f| addresses(f)[0].way = Ok(Route { source: OURS, mtu: 1_339 })),
            (AS_IT_IS, |f| second_address(f).way = Ok(Route { source: OURS, mtu: 1_359 })),
        ],
        Check::Configuration
        | Check::Daemon
        | Check::UdpSegmentation
        | Check::Timestamps
        | Check::SendBuffer
        | Check::UdpDrops
        | Check::Capabilities
        | Check::Forwarding
        | Check::Conntrack
        | Check::InterfaceOffload
        | Check::EndpointName => vec![(AS_IT_IS, nothing)],
        // Loopback of older kernels joins nothing.
        Check::UdpReceiveOffload => vec![(AS_IT_IS, |f| f.kernel.receive_offload = Ok(false))],
        Check::OneKey => vec![(AS_IT_IS, run)],
        Check::Uplink | Check::UplinkRoute => vec![(LINES, two_lines)],
        Check::UplinkReachability => vec![
            (LINES, two_lines),
            (LINES, |f| lines_of_daemon(f, [LineState::InUse, LineState::Standby])),
            (LINES, |f| lines_of_daemon(f, [LineState::InUse, LineState::Held])),
        ],
        Check::Drops => vec![(AS_IT_IS, |f| spoof(f, 1_000, 0))],
        Check::EndpointRoute => vec![
            // Another agent's inner address, and a user whose packets have no mark.
            (AS_IT_IS, |f| {
                addresses(f)[0].way = Ok(Route { source: "10.9.0.2".parse().unwrap(), mtu: 1_421 })
            }),
            (AS_IT_IS, |f| {
                run(f);
                addresses(f)[0].way = Ok(Route { source: INNER, mtu: 1_421 });
            }),
            (AS_IT_IS, |f| {
                package(f);
                addresses(f)[0].way = Ok(Route { source: INNER, mtu: 1_421 });
            }),
        ],
    }
}

//! What `init` writes is a configuration, for every combination of options, and says what the options said.

use std::path::Path;

use clap::Parser;
use ipnet::IpNet;

use super::{options::Pair, plan::PlanError, *};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    init: Init,
}

fn options(line: &str) -> Init {
    let words = line.split_whitespace();
    Line::try_parse_from(["init"].into_iter().chain(words)).unwrap_or_else(|error| panic!("{error}")).init
}

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

fn link() -> String {
    format!("culvert://exit.example.net:4433/{KEY}")
}

fn facts() -> Facts {
    Facts {
        ipv6: true,
        outer: vec!["203.0.113.7".parse().unwrap(), "2001:db8::7".parse().unwrap()],
        name: "branch".to_owned(),
        routes: Vec::new(),
        no_service: Some("systemd does not run this host"),
        group: None,
    }
}

fn plan(line: &str) -> Result<Plan, PlanError> {
    Plan::new(&options(line), &facts())
}

/// The configuration that these options make.
#[track_caller]
fn config(line: &str) -> Config {
    let text = template::render(&plan(line).unwrap());
    Config::parse(&text, Path::new("/etc/culvert")).unwrap_or_else(|problems| panic!("{problems}\n{text}"))
}

/// Returns what the operator is told about the next steps.
#[track_caller]
fn told(line: &str, facts: &Facts) -> String {
    let (options, config) = (options(line), config(line));
    let plan = Plan::new(&options, facts).unwrap();
    let key = KEY.parse().unwrap();
    next::Steps { plan: &plan, config: &config, key, file: &options.config, facts, now: options.now }
        .text()
        .unwrap()
}

impl Init {
    /// What is wrong with the options; `None` if they make a configuration.
    pub(in crate::cli) fn refusal(&self) -> Option<String> {
        let plan = match Plan::new(self, &facts()) {
            Ok(plan) => plan,
            Err(error) => return Some(error.to_string()),
        };
        let text = template::render(&plan);
        Config::parse(&text, Path::new("/etc/culvert")).err().map(|problems| format!("{problems}\n{text}"))
    }
}

#[test]
fn every_combination_of_options_makes_a_configuration() {
    let entry = format!("--role entry --peer {}", link());
    let exits =
        ["", "--advertise gw.example.net:443", "--listen 203.0.113.7:443", "--listen [::]:1 --server-id 7"];
    let entries = ["", "--allowed-ip 10.1.0.0/16 --allowed-ip fd01::/48", "--allowed-ip 0.0.0.0/0"];
    let tunnels = ["", "--tun", "--tun 10.7.0.9/16", "--tun fd09::9/64", "--tun --tun fd09::9/64"];
    let services = ["", "--service dns=127.0.0.1:53", "--service a=[::1]:1 --service b=127.0.0.1:2"];
    let ports = ["", "--udp 127.0.0.1:5300=dns", "--udp 127.0.0.1:1=a --tcp 127.0.0.1:1=a --tcp [::1]:2=b"];
    let files = ["", "--config agent.toml"];
    let mut seen = 0;
    for file in files {
        for tunnel in tunnels {
            for more in exits {
                for service in services.iter().filter(|service| !(tunnel.is_empty() && service.is_empty())) {
                    let config = config(&format!("--role exit {file} {tunnel} {more} {service}"));
                    assert_eq!(config.tun.is_some(), !tunnel.is_empty());
                    assert_eq!(config.services.len(), service.matches("--service").count());
                    assert!(config.transport.advertise.is_some() && config.peers.is_empty());
                    assert_eq!(config.transport.server_id, more.contains("--server-id 7").then_some(7));
                    assert!(config.control.unwrap().is_absolute());
                    seen += 1;
                }
            }
            for more in entries.iter().filter(|more| more.is_empty() || !tunnel.is_empty()) {
                for port in ports.iter().filter(|port| !(tunnel.is_empty() && port.is_empty())) {
                    let config = config(&format!("{entry} {file} {tunnel} {more} {port}"));
                    assert!(config.transport.listen.is_empty());
                    assert_eq!(config.peers[0].endpoints[0].to_string(), "exit.example.net:4433");
                    assert_eq!(config.peers[0].public_keys, [KEY.parse().unwrap()]);
                    assert_eq!(config.udp.len(), port.matches("--udp").count());
                    assert_eq!(config.tcp.len(), port.matches("--tcp").count());
                    let prefixes = tunnel.matches("--tun").count() + more.matches("--allowed-ip").count();
                    assert_eq!(config.peers[0].allowed_ips.len(), prefixes);
                    assert_eq!(config.transport.mark != 0, more.contains("0.0.0.0/0"));
                    seen += 1;
                }
            }
        }
    }
    assert_eq!(seen, 2 * (4 * (5 * 3 - 1) + (4 * 3 * 3 + 2)));
}

#[test]
fn what_is_left_out_is_found_out() {
    let exit = config("--role exit --tun");
    let listen: Vec<String> = exit.transport.listen.iter().map(ToString::to_string).collect();
    assert_eq!(listen, ["0.0.0.0:4433", "[::]:4433"]);
    assert_eq!(exit.tun.unwrap().addresses, ["10.9.0.1/24".parse::<IpNet>().unwrap()]);
    let entry = config(&format!("--role entry --tun --peer {}", link()));
    assert_eq!(entry.tun.unwrap().addresses, ["10.9.0.2/24".parse::<IpNet>().unwrap()]);
    assert_eq!(entry.peers[0].allowed_ips, ["10.9.0.0/24".parse::<IpNet>().unwrap()]);
    // The host's own agent is where the service looks for it; another one has all of its own.
    assert_eq!(entry.control.unwrap(), Path::new("/run/culvert/culvert.sock"));
    assert_eq!(entry.state_dir, Path::new("/var/lib/culvert"));
    let apart = config("--role exit --tun --config /home/me/agent.toml");
    assert_eq!(apart.state_dir, Path::new("/etc/culvert/state"));
    assert_eq!(apart.control.unwrap(), Path::new("/etc/culvert/culvert.sock"));
}

#[test]
fn the_address_to_advertise_is_the_best_that_the_host_shows() {
    let at = |line: &str, outer: &[&str]| {
        let facts = Facts { outer: outer.iter().map(|text| text.parse().unwrap()).collect(), ..facts() };
        let plan = Plan::new(&options(&format!("--role exit --tun {line}")), &facts);
        plan.map(|plan| (plan.advertise.unwrap(), plan.notes.len()))
    };
    let is = |text: &str, notes| Ok((text.to_owned(), notes));
    assert_eq!(at("", &["203.0.113.7", "2001:db8::7"]), is("203.0.113.7:4433", 0));
    assert_eq!(at("", &["2001:db8::7"]), is("[2001:db8::7]:4433", 0));
    assert_eq!(at("", &["192.168.1.2", "2001:db8::7"]), is("[2001:db8::7]:4433", 0));
    for private in ["10.0.0.1", "172.16.0.1", "100.64.0.1", "169.254.0.1"] {
        assert_eq!(at("", &[private]), is(&format!("{private}:4433"), 1));
    }
    assert_eq!(at("", &["fd00::1"]), is("[fd00::1]:4433", 1));
    assert_eq!(at("--listen 0.0.0.0:1", &["192.168.1.2", "2001:db8::7"]), is("192.168.1.2:1", 1));
    assert_eq!(at("--listen 127.0.0.1:5", &[]), is("127.0.0.1:5", 0));
    assert_eq!(at("--advertise gw.example.net:9", &[]), is("gw.example.net:9", 0));
    assert_eq!(at("", &[]), Err(PlanError::NoAddress));
    assert_eq!(at("--listen 0.0.0.0:0", &["203.0.113.7"]), Err(PlanError::AnyPort));
    assert!(matches!(at("--advertise gw", &[]), Err(PlanError::Advertise(_))));
}

#[test]
fn options_that_do_not_go_together_are_refused_with_a_remedy() {
    let link = link();
    for (line, problem) in [
        ("--role exit".to_owned(), "an exit offers something"),
        ("--role exit --tun --udp 127.0.0.1:1=a".to_owned(), "--udp is of an entry"),
        ("--role exit --tun --tcp 127.0.0.1:1=a".to_owned(), "--tcp is of an entry"),
        (format!("--role exit --tun --peer {link}"), "--peer is of an entry"),
        ("--role exit --tun --allowed-ip 10.0.0.0/8".to_owned(), "--allowed-ip is of an entry"),
        ("--role entry --tun".to_owned(), "an entry dials an exit"),
        (format!("--role entry --peer {link}"), "an entry carries something"),
        (format!("--role entry --peer {link} --allowed-ip 10.0.0.0/8"), "add --tun"),
        (format!("--role entry --peer {link} --udp 127.0.0.1:1=a --network 10.2.0.0/16"), "add --tun"),
        ("--role exit --tun --network 10.2".to_owned(), "--network 10.2 is no prefix"),
        ("--role exit --tun --network ::/0".to_owned(), "--network ::/0 is a default route"),
        ("--role exit --tun --network 10.0.0.0/8".to_owned(), "--network 10.0.0.0/8 meets 10.9.0.0/24"),
        (
            format!("--role entry --peer {link} --tun --allowed-ip 10.2.3.0/24 --network 10.2.0.0/16"),
            "--network 10.2.0.0/16 meets 10.2.3.0/24",
        ),
        (format!("--role entry --peer {link} --tun --service a=127.0.0.1:1"), "--service is of an exit"),
        (format!("--role entry --peer {link} --tun --listen 0.0.0.0:1"), "--listen is of an exit"),
        (format!("--role entry --peer {link} --tun --advertise a:1"), "--advertise is of an exit"),
        (format!("--role entry --peer {link}x --tun"), "--peer is no link: the public key"),
        ("--role entry --peer exit.example.net:4433 --tun".to_owned(), "--peer is no link: the scheme"),
    ] {
        let error = plan(&line).unwrap_err().to_string();
        assert!(error.contains(problem) && error.contains("remedy: "), "{line}: {error}");
    }
}

#[test]
fn texts_cannot_break_out_of_the_configuration() {
    let nasty = "a\"]\n[limits]\nflows = 1 # \\";
    let mut options = options("--role exit --tun");
    options.services.push(Pair { left: nasty.to_owned(), right: "127.0.0.1:1".to_owned() });
    options.tun.push(nasty.to_owned());
    let text = template::render(&Plan::new(&options, &facts()).unwrap());
    let table: toml::Table = text.parse().unwrap();
    assert_eq!(table["service"][0]["name"].as_str(), Some(nasty));
    assert_eq!(table["tun"]["address"][1].as_str(), Some(nasty));
    assert!(!table.contains_key("limits"));
    let problems = Config::parse(&text, Path::new("")).unwrap_err();
    assert!(problems.problems.iter().any(|problem| problem.key_path == "service[0].name"), "{problems}");
}

#[test]
fn sections_stand_in_the_order_of_the_example() {
    let line = format!("--role entry --tun --udp 127.0.0.1:1=a --tcp 127.0.0.1:1=a --peer {}", link());
    let example = include_str!("../../../../config/agent.example.toml");
    let place =
        |text: &str, section: &str| text.lines().position(|line| line.trim_start_matches("# ") == section);
    for line in [line.as_str(), "--role exit --tun --service dns=127.0.0.1:53 --config x.toml"] {
        let text = template::render(&plan(line).unwrap());
        let sections: Vec<&str> =
            text.lines().filter(|line| line.starts_with('[') || line.starts_with("# [")).collect();
        assert!(sections.len() >= 6, "{text}");
        let places: Vec<Option<usize>> =
            sections.iter().map(|section| place(example, section.trim_start_matches("# "))).collect();
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{sections:?} {places:?}");
    }
}

#[test]
fn defaults_that_are_shown_as_comments_are_the_defaults() {
    let line = format!("--role entry --tun --udp 127.0.0.1:1=a --peer {}", link());
    for line in [line.as_str(), "--role exit --tun --service dns=127.0.0.1:53"] {
        let text = template::render(&plan(line).unwrap());
        let parse = |text: &str| Config::parse(text, Path::new("/etc/culvert")).unwrap();
        for shown in [
            "workers = 0",
            "profile = \"throughput\"",
            "name = \"culvert0\"",
            "format = \"text\"",
            "state_dir = \"/var/lib/culvert\"",
        ] {
            let active = text.replace(&format!("# {shown}\n"), &format!("{shown}\n"));
            assert_eq!(parse(&active), parse(&text), "{shown}");
        }
    }
}

#[test]
fn the_steps_of_an_exit_lead_to_an_entry_that_fits() {
    let text = told("--role exit --tun --service dns=127.0.0.1:53", &facts());
    let link = format!("culvert://203.0.113.7:4433/{KEY}");
    for line in [
        format!("    {link}"),
        format!(
            "    culvert init --role entry --peer {link} --tun --udp 127.0.0.1:10053=dns --tcp 127.0.0.1:10053=dns"
        ),
        "    culvert peer add NAME KEY --allowed-ip 10.9.0.2 --service dns".to_owned(),
        "    culvert run --config /etc/culvert/agent.toml".to_owned(),
    ] {
        assert!(text.lines().any(|told| told == line), "{line}\n{text}");
    }
    let text = told("--role exit --tun 10.1.0.254/24 --tun fd09::1/64", &facts());
    // What comes after .254 is the broadcast address.
    assert!(text.contains(" --tun 10.1.0.1/24 --tun fd09::2/64\n"), "{text}");
    assert!(text.contains(" --allowed-ip 10.1.0.1 --allowed-ip fd09::2\n"), "{text}");
    let other = told("--role exit --tun --config /tmp/it's/x.toml", &facts());
    assert!(other.contains("--allowed-ip 10.9.0.2 --config '/tmp/it'\\''s/x.toml'\n"), "{other}");
}

#[test]
fn a_prefix_without_an_address_for_the_other_end_is_refused() {
    let entry = format!("--role entry --peer {}", link());
    for (line, remedy) in [
        ("--role exit --tun 10.9.0.1/32".to_owned(), "(remedy: --tun 10.9.0.1/24)"),
        ("--role exit --tun --tun fd09::1/128".to_owned(), "(remedy: --tun fd09::1/64)"),
        (format!("{entry} --tun 10.9.0.2/32"), "(remedy: --tun 10.9.0.2/24, or --allowed-ip with"),
        (format!("{entry} --tun --tun fd09::2/128"), "(remedy: --tun fd09::2/64, or --allowed-ip with"),
    ] {
        let error = plan(&line).unwrap_err();
        assert!(matches!(error, PlanError::NoRoom { .. }), "{line}: {error}");
        assert!(error.to_string().contains(remedy), "{line}: {error}");
    }
    let led = config(&format!("{entry} --tun 10.9.0.2/32 --allowed-ip 10.9.0.1"));
    assert_eq!(led.peers[0].allowed_ips, ["10.9.0.1/32".parse::<IpNet>().unwrap()]);
    for (own, other) in [
        ("10.9.0.7/24", "10.9.0.8/24"),
        ("10.9.0.254/24", "10.9.0.1/24"),
        ("10.9.0.1/30", "10.9.0.2/30"),
        ("10.9.0.2/30", "10.9.0.1/30"),
        ("10.9.0.0/31", "10.9.0.1/31"),
        ("10.9.0.1/31", "10.9.0.0/31"),
        ("fd09::1/127", "fd09::/127"),
        ("fd09::ffff/112", "fd09::1/112"),
    ] {
        let other: IpNet = other.parse().unwrap();
        assert_eq!(plan::neighbour(own.parse().unwrap()), Some(other), "{own}");
        // What an exit prints is what an entry takes.
        let text = told(&format!("--role exit --tun {own}"), &facts());
        assert!(text.contains(&format!(" --tun {other}\n")), "{text}");
        config(&format!("{entry} --tun {other}"));
    }
}

#[test]
fn the_steps_of_an_entry_name_it_and_what_it_uses() {
    let line = format!(
        "--role entry --tun --udp 127.0.0.1:1=dns --tcp 127.0.0.1:1=dns --tcp 127.0.0.1:2=a --peer {}",
        link()
    );
    let text = told(&line, &Facts { no_service: None, ..facts() });
    for line in [
        format!("    culvert peer add branch {KEY} --allowed-ip 10.9.0.2 --service a --service dns"),
        "    systemctl enable --now culvert".to_owned(),
        "    ping 10.9.0.1".to_owned(),
        "1. on the exit, so that it lets this host in; with --config FILE if its culvert init had that option:".to_owned(),
    ] {
        assert!(text.lines().any(|told| told == line), "{line}\n{text}");
    }
}

#[test]
fn networks_behind_this_host_are_in_the_command_for_the_other_one() {
    let networks = "--network 10.2.0.7/16 --network fd02::/48";
    let others = " --allowed-ip 10.2.0.0/16 --allowed-ip fd02::/48";
    let sysctl = "    sysctl -w net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1";
    let entry = told(&format!("--role entry --tun --peer {} {networks}", link()), &facts());
    assert!(
        entry.contains(&format!("culvert peer add branch {KEY} --allowed-ip 10.9.0.2{others}\n")),
        "{entry}"
    );
    assert!(entry.lines().any(|line| line == sysctl), "{entry}");
    assert!(!entry.contains("UDP port"), "nobody dials an entry: {entry}");
    let exit = told(&format!("--role exit --tun {networks}"), &facts());
    assert!(exit.contains(&format!(" --tun{others}\n")), "{exit}");
    assert!(exit.lines().any(|line| line == sysctl), "{exit}");
    assert!(exit.ends_with("Open in the firewall of this host: UDP port 4433."), "{exit}");
    // What the exit prints is what an entry takes, default routes included.
    config(&format!("--role entry --tun --peer {}{others} --allowed-ip 0.0.0.0/0", link()));
    let plain = told("--role exit --tun", &facts());
    assert!(plain.contains("send_redirects=0") && plain.contains("--network PREFIX"), "{plain}");
    assert!(
        told("--role exit --tun --network 10.2.0.0/16", &facts())
            .contains("sysctl -w net.ipv4.ip_forward=1\n")
    );
}

#[test]
fn a_port_is_offered_for_each_protocol_of_a_service() {
    let exit = "--role exit --service web=127.0.0.1:8080/tcp --service ntp=127.0.0.1:123/udp";
    let protocols: Vec<_> = config(exit).services.iter().map(|service| service.protocol).collect();
    assert_eq!(protocols, [config::Protocol::Tcp, config::Protocol::Udp]);
    let text = told(exit, &facts());
    assert!(text.contains(" --tcp 127.0.0.1:8080=web --udp 127.0.0.1:10123=ntp\n"), "{text}");
    assert!(!text.contains("--udp 127.0.0.1:8080") && !text.contains("sysctl"), "{text}");
}

#[test]
fn what_is_started_now_is_no_step() {
    let served = Facts { no_service: None, ..facts() };
    for (line, starts) in [("--role exit --tun", 1), ("--role exit --tun --now", 0)] {
        assert_eq!(told(line, &served).matches("systemctl enable --now culvert").count(), starts, "{line}");
    }
    let exit = |line: &str| told(line, &served).lines().filter(|line| line.ends_with(" --tun --now")).count();
    assert_eq!(
        [exit("--role exit --tun"), exit("--role exit --tun --now")],
        [0, 1],
        "the entry's command, too"
    );
    // Without a service it is still to be done.
    assert!(told("--role exit --tun --now", &facts()).contains("    culvert run --config"));
}

#[test]
fn a_prefix_that_the_host_uses_already_is_told() {
    let clashes = |line: &str, route: &str, device: &str| {
        let facts = Facts { routes: vec![(route.parse().unwrap(), device.to_owned())], ..facts() };
        host::clashes(&config(line), &facts)
    };
    let exit = "--role exit --tun";
    assert!(clashes(exit, "10.8.0.0/16", "eth0").is_empty());
    assert!(clashes(exit, "fd09::/64", "eth0").is_empty());
    for route in ["10.9.0.0/16", "10.9.0.0/24", "10.9.0.128/25"] {
        assert!(clashes(exit, route, "culvert0").is_empty(), "it is the tunnel");
        let told = clashes(exit, route, "eth0");
        assert!(matches!(&told[..], [one] if one.contains("eth0") && one.contains("remedy: ")), "{told:?}");
    }
    let entry = format!("--role entry --tun --allowed-ip 10.1.0.0/16 --peer {}", link());
    assert_eq!(clashes(&entry, "10.1.2.0/24", "eth0").len(), 1);
    let all = format!("--role entry --tun --allowed-ip 0.0.0.0/0 --peer {}", link());
    assert!(clashes(&all, "10.1.2.0/24", "eth0").is_empty(), "what is longer than a default route stays");
}

#[test]
fn the_command_for_an_entry_has_each_local_port_once_and_nothing_that_is_for_users() {
    let exit = "--role exit --service a=127.0.0.1:80 --service b=10.0.0.5:80 --service c=unix:/run/c/tcp --service d=unix:/run/d/tcp \
                --service e=127.0.0.1:65535/udp --service f=10.0.0.5:65535/udp --service g=10.0.0.5:65535/tcp --service lan=any";
    let text = told(exit, &facts());
    let entry = text.lines().find_map(|line| line.strip_prefix("    culvert init ")).unwrap();
    assert_eq!(options(entry).refusal(), None, "{entry}");
    let config = config(entry);
    for (forwards, services) in [(&config.udp, "abef"), (&config.tcp, "abcdg")] {
        let names: String = forwards.iter().map(|forward| &*forward.service).collect();
        let ports: std::collections::BTreeSet<u16> =
            forwards.iter().map(|forward| forward.listen.port()).collect();
        assert_eq!((&*names, ports.len()), (services, services.len()), "{entry}");
    }
    assert!(entry.contains(" --udp 127.0.0.1:10080=a --tcp 127.0.0.1:10080=a "), "{entry}");
    assert!(entry.contains(" --udp 127.0.0.1:10081=b --tcp 127.0.0.1:10081=b "), "{entry}");
    assert!(
        text.lines().any(|line| line.contains("culvert peer add ") && line.ends_with(" --service g")),
        "{text}"
    );
    // An exit for users alone has nothing for an entry.
    let users = told("--role exit --service lan=any", &facts());
    assert!(!users.contains("culvert init") && !users.contains("culvert peer add"), "{users}");
}

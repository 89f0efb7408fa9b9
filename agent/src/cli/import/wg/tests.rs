//! What a file of five peers comes to: a configuration, notes, and commands that are command lines.

use std::path::Path;

use clap::Parser as _;
use config::Config;

use super::{file::WireGuard, hosts::Names, plan::Plan, *};
use crate::cli::{Cli, Command};

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

const HUB: &str = "\
[Interface]
# the hub
Address = 10.9.0.1/24, fd09::1/64
ListenPort = 51820
PrivateKey = yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=
MTU = 1420
FwMark = 0xca6c
DNS = 10.9.0.53
Table = off
SaveConfig = true
PostUp = iptables -A FORWARD -i %i -j ACCEPT
PreDown = iptables -D FORWARD -i %i -j ACCEPT

# berlin
[Peer]
PublicKey = xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=
AllowedIPs = 10.9.0.2/32, fd09::2/128, 10.2.0.0/16
PresharedKey = FpCyhws9cxwWoV4xELtfJvjJN+zQVRPISllRWgeopVE=

[Peer] # Name = paris
publickey = TrMvSoP4jYQlY6RIzBgbssQqY3vxI2Pi+y71lOWWXX0=
AllowedIPs = 10.9.0.3/32
AllowedIPs = 10.3.0.0/16
PersistentKeepalive = 25

[Peer]
# friendly_name=paris
PublicKey = gN65BkIKy1eCE9pP1wdc8ROUtkHLF2PfAqYdyYBz6EA=
AllowedIPs = 10.9.0.4
Endpoint = lyon.example.net:51820

[Peer]
PublicKey = xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dh=
AllowedIPs = 10.9.0.5/32

[Peer]
# A sentence that says what this one is for, and names nobody
PublicKey = xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Di=
AllowedIPs = 10.9.0.6/32, 192.168.7.7/32
Nonsense = 1
";

#[track_caller]
fn plan(text: &str, out: Option<&str>) -> Plan {
    let file = WireGuard::parse(text).unwrap_or_else(|wrong| panic!("{wrong}"));
    let mut plan = Plan::new(&file, out.map(Path::new));
    plan.advertise = (!plan.listen.is_empty()).then(|| "gw.example.net:51820".to_owned());
    plan
}

fn told(plan: &Plan, out: &Path) -> String {
    let names = Names { key: Some(KEY.parse().unwrap()), config: Some(out), host: "hub".to_owned() };
    hosts::commands(plan, &names)
}

/// Checks that each line for a shell is a command line of culvert, and that each `culvert init` makes a configuration.
#[track_caller]
fn are_commands(told: &str) {
    for line in told.lines().filter_map(|line| line.strip_prefix("    culvert ")) {
        let line = line.replace(" KEY", &format!(" {KEY}")).replace("ADDRESS/LENGTH", "10.255.0.1/24");
        let line = line.replace('\'', "");
        let words = ["culvert"].into_iter().chain(line.split(' '));
        match Cli::try_parse_from(words) {
            Ok(Cli { command: Command::Init(init) }) => assert_eq!(init.refusal(), None, "{line}"),
            Ok(_) => {}
            Err(error) => panic!("{line}: {error}"),
        }
    }
}

#[test]
fn five_peers_become_a_configuration_and_two_commands_for_each_host() {
    let plan = plan(HUB, Some("/etc/culvert/agent.toml"));
    let toml = plan.to_toml("wg0.conf");
    let config =
        Config::parse(&toml, Path::new("/etc/culvert")).unwrap_or_else(|error| panic!("{error}\n{toml}"));
    let listen: Vec<String> = config.transport.listen.iter().map(ToString::to_string).collect();
    assert_eq!(listen, ["0.0.0.0:51820", "[::]:51820"]);
    assert_eq!((config.transport.mark, config.peers.len()), (0xca6c, 0));
    let tun = config.tun.unwrap();
    assert_eq!(tun.addresses, ["10.9.0.1/24".parse().unwrap(), "fd09::1/64".parse().unwrap()]);
    assert!(!tun.sets_routes(), "Table = off");
    let names: Vec<&str> = plan.peers.iter().map(|peer| &*peer.name).collect();
    assert_eq!(names, ["berlin", "paris", "paris-2", "peer-10.9.0.5", "peer-10.9.0.6"]);

    let told = told(&plan, Path::new("/etc/culvert/agent.toml"));
    are_commands(&told);
    let link = format!("culvert://gw.example.net:51820/{KEY}");
    for line in [
        format!(
            "culvert init --role entry --peer {link} --tun 10.9.0.2/24 --tun fd09::2/64 --network 10.2.0.0/16 \
             --preshared-key-file /etc/culvert/hub.psk"
        ),
        "culvert peer add berlin KEY --allowed-ip 10.9.0.2/32 --allowed-ip fd09::2/128 --allowed-ip 10.2.0.0/16 \
         --preshared-key-file /etc/culvert/berlin.psk"
            .to_owned(),
        format!("culvert init --role entry --peer {link} --tun 10.9.0.3/24 --network 10.3.0.0/16"),
        format!("culvert init --role entry --peer {link} --tun 10.9.0.6/24 --network 192.168.7.7/32"),
        "culvert peer add peer-10.9.0.5 KEY --allowed-ip 10.9.0.5/32".to_owned(),
    ] {
        assert!(told.lines().any(|told| told.trim_start() == line), "{line}\n{told}");
    }
    assert_eq!(told.matches("culvert init --role entry").count(), 5, "{told}");
    for note in [
        "keys do not carry over",
        "DNS = 10.9.0.53",
        "PostUp: tun.up = [",
        "PreDown: tun.down = [",
        "SaveConfig",
        "listens for paris-2",
        ": Nonsense is not a key",
    ] {
        assert!(told.contains(note), "{note}\n{told}");
    }
    assert_eq!(plan.preshared_files().len(), 1);
    assert!(!told.contains("FpCyhws9") && !toml.contains("yAnz5TF"), "secrets are not printed");
}

#[test]
fn a_host_that_only_dials_tells_what_the_other_one_needs() {
    let text = "[Interface]\nAddress = 10.9.0.7/32\n[Peer]\n# vpn\nAllowedIPs = 0.0.0.0/0, ::/0\nEndpoint = vpn.example.net:51820\n";
    let plan = plan(text, None);
    let toml = plan.to_toml("wg0.conf");
    let config =
        Config::parse(&toml, Path::new("/etc/culvert")).unwrap_or_else(|error| panic!("{error}\n{toml}"));
    let listen: Vec<String> = config.transport.listen.iter().map(ToString::to_string).collect();
    assert!(listen == ["0.0.0.0:0"] && config.transport.mark != 0, "{toml}");
    let told = told(&plan, Path::new("/etc/culvert/agent.toml"));
    assert!(told.contains("culvert init --role exit --tun ADDRESS/LENGTH --listen 0.0.0.0:51820 --advertise vpn.example.net:51820\n"), "{told}");
    assert!(told.contains(&format!("culvert peer add hub {KEY} --allowed-ip 10.9.0.7/32\n")), "{told}");
    assert!(told.contains("culvert peer add vpn LINK --allowed-ip 0.0.0.0/0 --allowed-ip ::/0\n"), "{told}");
    assert!(told.contains("all traffic goes to vpn"), "{told}");
    // With a link that has room, the first address is the server's.
    let plan = self::plan(&text.replace("/32", "/24"), None);
    assert!(
        self::told(&plan, Path::new("/x")).contains("--role exit --tun 10.9.0.8/24 --listen"),
        "{plan:?}"
    );
}

#[test]
fn addresses_without_a_link_lead_to_this_host_by_name() {
    let text = "[Interface]\nAddress = 10.9.0.1/32\nListenPort = 4\n[Peer]\nAllowedIPs = 10.9.0.2/32\n";
    let told = told(&plan(text, None), Path::new("/etc/culvert/agent.toml"));
    are_commands(&told);
    assert!(told.contains(" --tun 10.9.0.2/32 --allowed-ip 10.9.0.1/32\n"), "{told}");
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    for (text, wrong) in [
        ("", "1: [Interface] has no Address"),
        ("x\n", "1: \"x\" is neither"),
        ("Address = 10.9.0.1/24\n", "1: Address stands before any section"),
        ("[Interface]\nAddress = 10.9\n", "2: \"10.9\" is neither an address nor a prefix"),
        ("[Interface]\nListenPort = 70000\n", "2: ListenPort: \"70000\""),
        ("[Interface]\nAddress = 10.9.0.1/24\n\n[Peers]\n", "4: [Peers] is no section"),
        ("[Interface]\nAddress = 10.9.0.1/24\n[Peer]\nPresharedKey = x\n", "4: PresharedKey has not"),
    ] {
        let error = WireGuard::parse(text).unwrap_err().to_string();
        assert!(error.starts_with(wrong) && error.contains("(remedy: "), "{text:?}: {error}");
    }
}

#[test]
fn what_the_commands_say_of_networks_and_addresses_is_taken_by_init() {
    let of = |address: &str, port: &str, peer: &str| {
        let text = format!("[Interface]\nAddress = {address}\n{port}[Peer]\n{peer}\n");
        let told = told(&plan(&text, None), Path::new("/etc/culvert/agent.toml"));
        are_commands(&told);
        told
    };
    let dials = |ips: &str| format!("AllowedIPs = {ips}\nEndpoint = vpn.example.net:51820");
    // The other end, with its one address, has room for this one.
    let told = of("10.0.0.2/32", "", &dials("10.0.0.1/32, 10.0.0.128/25, 10.1.0.0/16"));
    assert!(told.contains("init --role exit --tun 10.0.0.1/24 --listen 0.0.0.0:51820"), "{told}");
    assert!(told.contains("vpn.example.net:51820 --network 10.1.0.0/16\n"), "{told}");
    assert!(told.contains(" LINK --allowed-ip 10.0.0.1/32 --allowed-ip 10.0.0.128/25"), "{told}");
    let told = of("fd09::2/128", "", &dials("fd09::1/128"));
    assert!(told.contains("init --role exit --tun fd09::1/64 "), "{told}");
    // A network around the link is led to the peer, and not behind it alone.
    let told = of("10.8.0.2/24", "", &dials("10.0.0.0/8, 192.168.0.0/16"));
    assert!(told.contains(" --network 192.168.0.0/16\n") && !told.contains("--network 10."), "{told}");
    assert!(told.contains("--allowed-ip 10.0.0.0/8"), "{told}");
    // A second address of the peer in the link.
    for port in ["ListenPort = 51820\n", ""] {
        let told = of("10.9.0.1/24", port, &dials("10.9.0.2/32, 10.9.0.3/32, 10.3.0.0/16"));
        assert!(told.contains(" --network 10.3.0.0/16\n") && !told.contains("--network 10.9."), "{told}");
        assert!(told.contains("--allowed-ip 10.9.0.3/32"), "{told}");
    }
    // What is around the address of this host, which is alone.
    let told = of("10.9.0.1/32", "ListenPort = 4\n", "AllowedIPs = 10.77.0.2/32, 10.9.0.0/16");
    assert!(told.contains(" --allowed-ip 10.9.0.1/32\n"), "{told}");
    // It listens where it is found.
    let told = of("10.9.0.2/24", "", "AllowedIPs = 10.9.0.1/32\nEndpoint = [2001:db8::1]:51820");
    assert!(told.contains(" --listen '[::]:51820' --advertise '[2001:db8::1]:51820'\n"), "{told}");
}

//! A star of WireGuard, of five peers, becomes one of Culvert: the commands that `culvert import wg` prints are pasted at six hosts.

use std::process;

use culvert_tests::{
    clock::{self, PATIENCE},
    place::Place,
    process::run,
};

use super::{possible, shell::Shell};

/// The peers, whose addresses inside and outside end in 2 to 6.
const PEERS: std::ops::RangeInclusive<u8> = 2..=6;

/// A hub with a bridge, and a namespace at it for each peer.
struct Star(Vec<String>);

impl Star {
    #[track_caller]
    fn new() -> Self {
        let name = |number: u8| format!("culvert-{}-star{number}", process::id());
        let star = Self((1..=*PEERS.end()).map(name).collect());
        for name in &star.0 {
            Place::Host.tell(&["ip", "netns", "add", name]);
            Place::Host.tell(&["ip", "-n", name, "link", "set", "lo", "up"]);
        }
        let hub = star.at(1);
        hub.tell(&["ip", "link", "add", "outer", "type", "bridge"]);
        for (name, number) in star.0.iter().zip(1..).skip(1) {
            let port = format!("port{number}");
            let peer = ["type", "veth", "peer", "name", "outer", "netns", name];
            hub.tell(&[&["ip", "link", "add", &*port][..], &peer].concat());
            hub.tell(&["ip", "link", "set", &port, "master", "outer", "up"]);
        }
        for (name, number) in star.0.iter().zip(1..) {
            let address = format!("192.0.2.{number}/24");
            Place::Host.tell(&["ip", "-n", name, "addr", "add", &address, "dev", "outer"]);
            Place::Host.tell(&["ip", "-n", name, "link", "set", "outer", "up"]);
        }
        star
    }

    fn at(&self, number: u8) -> Place {
        Place::Namespace(self.0[usize::from(number) - 1].clone())
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        for name in &self.0 {
            // Fails for those that `new` did not get as far as to make.
            let mut command = Place::Host.command("ip");
            drop(run(command.args(["netns", "del", name]), PATIENCE));
        }
    }
}

fn wireguard() -> String {
    let key = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
    let hub = format!("[Interface]\nAddress = 10.9.0.1/24\nListenPort = 51820\nPrivateKey = {key}\n");
    let peer = |number| format!("[Peer]\nPublicKey = {key}\nAllowedIPs = 10.9.0.{number}/32\n");
    hub + &PEERS.map(peer).collect::<String>()
}

/// The commands among what was printed that begin so, in order.
fn commands(said: &str, begin: &str) -> Vec<String> {
    let commands = said.lines().map(str::trim).filter(|line| line.starts_with(begin));
    commands.map(str::to_owned).collect()
}

#[track_caller]
fn pings(shell: &mut Shell, to: u8) {
    let ping = format!("ping -c 1 -W 1 10.9.0.{to}");
    clock::until(&ping.clone(), PATIENCE, || match shell.tries(&ping) {
        (code, _) if code == "0" => Ok(()),
        (_, said) => Err(said),
    });
}

#[test]
fn a_star_of_wireguard_is_one_of_ours_after_two_commands_at_each_host() {
    if !possible("a star that is imported") {
        return;
    }
    let star = Star::new();
    let mut hub = Shell::at(&star.at(1));
    hub.does(&format!(
        "mkdir /etc/wireguard; printf '{}' > /etc/wireguard/wg0.conf",
        wireguard().replace('\n', "\\n")
    ));
    let told = hub.does(
        "culvert import wg /etc/wireguard/wg0.conf --out /etc/culvert/agent.toml --advertise 192.0.2.1:51820",
    );
    let [inits, adds, runs] =
        ["culvert init ", "culvert peer add ", "culvert run "].map(|begin| commands(&told, begin));
    assert_eq!([inits.len(), adds.len(), runs.len()], [5, 5, 6], "{told}");
    // The hub runs; each peer's host gets its command, and the hub the answer.
    hub.starts(&runs[0]);
    let mut spokes = Vec::new();
    for (((number, init), add), start) in PEERS.zip(&inits).zip(&adds).zip(&runs[1..]) {
        let mut spoke = Shell::at(&star.at(number));
        let said = spoke.does(init);
        let key = said.lines().skip_while(|line| *line != "Its public key:").nth(1).unwrap().trim();
        hub.does(&add.replace(" KEY ", &format!(" {key} ")));
        spoke.starts(start);
        spokes.push((number, spoke));
    }
    for (number, spoke) in &mut spokes {
        pings(spoke, 1);
        pings(&mut hub, *number);
    }
    // What the hub forwarded for WireGuard it forwards now.
    star.at(1).sysctl("net.ipv4.ip_forward", "1");
    let numbers: Vec<u8> = PEERS.collect();
    for (number, spoke) in &mut spokes {
        for other in numbers.iter().filter(|other| **other != *number) {
            pings(spoke, *other);
        }
    }
}

//! Examples of use: those at the end of `culvert COMMAND --help`, which are the EXAMPLES of the manual pages too.

/// A command line, and what it is for.
pub(super) struct Example {
    /// What it is for, as a heading without a full stop.
    pub(super) purpose: &'static str,
    pub(super) line: &'static str,
}

const fn to(purpose: &'static str, line: &'static str) -> Example {
    Example { purpose, line }
}

/// A key for examples; the one of `config/agent.example.toml`.
macro_rules! key {
    () => {
        "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA"
    };
}

/// The examples of the subcommand `name`; none for one that has none.
pub(super) fn of(name: &str) -> Vec<&'static Example> {
    EXAMPLES.iter().filter(|example| example.line.split(' ').nth(1) == Some(name)).collect()
}

/// Those of one of its own subcommands, as in `culvert peer add`.
pub(super) fn of_inner(name: &str, inner: &str) -> Vec<&'static Example> {
    let mut all = of(name);
    all.retain(|example| example.line.split(' ').nth(2) == Some(inner));
    all
}

/// The same as the end of the help.
pub(super) fn help(name: &str) -> String {
    as_help(&of(name))
}

/// Examples as the end of a help.
pub(super) fn as_help(examples: &[&Example]) -> String {
    let example = |example: &&Example| format!("  # {}\n  {}", example.purpose, example.line);
    format!("Examples:\n{}", examples.iter().map(example).collect::<Vec<_>>().join("\n"))
}

/// Where to begin: on the page of `culvert` itself.
pub(super) const FIRST_STEPS: &[Example] = &[
    to("see it work, without root", "culvert demo"),
    to("on the exit", "culvert init --role exit --tun"),
    to(
        "on the entry, with the link that the exit printed",
        concat!("culvert init --role entry --tun --peer culvert://exit.example.net:4433/", key!()),
    ),
    to(
        "on the exit, with what the entry printed",
        concat!("culvert peer add branch ", key!(), " --allowed-ip 10.9.0.2"),
    ),
    to("on both, unless a service manager does it", "culvert run --config /etc/culvert/agent.toml"),
];

/// The examples of all subcommands, which the lines name.
const EXAMPLES: &[Example] = &[
    to("an exit with a tunnel", "culvert init --role exit --tun"),
    to(
        "an entry of it, with the link that the exit printed",
        concat!("culvert init --role entry --tun --peer culvert://exit.example.net:4433/", key!()),
    ),
    to("an exit with a service", "culvert init --role exit --service dns=127.0.0.1:53"),
    to(
        "an entry for it: a local port that stands for the service",
        concat!(
            "culvert init --role entry --udp 127.0.0.1:5300=dns --peer culvert://exit.example.net:4433/",
            key!()
        ),
    ),
    to(
        "IPv4 and IPv6 in the tunnel, behind a router that forwards the port",
        "culvert init --role exit --tun --tun fd09::1/64 --advertise gw.example.net:4433",
    ),
    to("a new identity", "culvert keygen --out /etc/culvert/identity.key"),
    to("a key that this agent and the peer \"branch\" share", "culvert genpsk --out /etc/culvert/branch.psk"),
    to("what others need to know of it", "culvert pubkey /etc/culvert/identity.key"),
    to(
        "what a wg0.conf comes to, and what the other hosts need",
        "culvert import wg /etc/wireguard/wg0.conf",
    ),
    to(
        "the same, written, with a key",
        "culvert import wg /etc/wireguard/wg0.conf --out /etc/culvert/agent.toml --advertise gw.example.net:51820",
    ),
    to("what to give to those who dial us", "culvert link --config /etc/culvert/agent.toml"),
    to("before a start or a reload", "culvert check --config /etc/culvert/agent.toml"),
    to("the daemon, in the foreground", "culvert run --config /etc/culvert/agent.toml"),
    to("see it work", "culvert demo"),
    to("more of it, as JSON", "culvert demo --seconds 30 --rate 2G --flows 16 --json"),
    to("how it goes", "culvert status"),
    to("again every second, until Ctrl-C", "culvert status --watch"),
    to("inside the first lane of one peer", "culvert status --lane exit/0"),
    to("for a program", "culvert status --json"),
    to("of a daemon with another configuration", "culvert status --config /etc/culvert/lab.toml"),
    to("a lane, for ten seconds", "culvert qlog exit --lane 0 --for 10s"),
    to("the next handshake with a peer, now", "culvert qlog exit --control --reconnect"),
    to("what a changed configuration would do", "culvert reload --dry-run"),
    to("do it", "culvert reload"),
    to("who is known", "culvert peer list"),
    to("the same for a program", "culvert peer list --json"),
    to(
        "let in who dials us, with an inner address",
        concat!("culvert peer add branch ", key!(), " --allowed-ip 10.9.0.2/32"),
    ),
    to("let in who may use a service", concat!("culvert peer add phone ", key!(), " --service dns")),
    to(
        "dial whoever gave us a link",
        concat!("culvert peer add exit culvert://exit.example.net:4433/", key!()),
    ),
    to("one more network behind a peer, at once", "culvert peer set branch --allowed-ip +10.3.0.0/16"),
    to("another service, and no more than 20 Mbit/s", "culvert peer set phone --service +web --rate 20Mbit"),
    to("a peer for the configuration file", "culvert peer export branch"),
    to("shut somebody out, at once", "culvert peer remove phone"),
    to(
        "a user who may reach a service and a network",
        "culvert user add anna --service web --network 10.1.0.0/16",
    ),
    to(
        "one more network, until the end of the year",
        "culvert user set anna --network +10.2.0.0/16 --expires 2027-01-01",
    ),
    to("a user with a certificate", "culvert user add carl --service web --client-key carl.pem"),
    to("a new password", "culvert user set anna --new-password"),
    to("shut a user out, at once", "culvert user remove anna"),
    to("reset a TCP connection whose reader has stopped", "culvert forward end 5f3a9c-17"),
    to("before this exit of several is stopped", "culvert drain --within 30"),
    to("this host alone, without agents", "culvert bench --direct"),
    to(
        "through two agents: a UDP port of the entry, the upstream of the exit",
        "culvert bench --to 127.0.0.1:5301 --sink 127.0.0.1:5201 --rate 2G",
    ),
    to("before the agent runs, and whenever something is odd", "culvert doctor"),
    to("each peer over each line of this host", "culvert uplink test"),
    to("one line, for longer", "culvert uplink test lte --for 30s"),
    to("what a port of ours tells anybody", "culvert doctor --probe gw.example.net:4433"),
    to(
        "three exits behind this host's address",
        "culvert fleet --exit 1=192.0.2.11 --exit 2=192.0.2.12 --exit 3=192.0.2.13,2001:db8::13",
    ),
    to(
        "for one user of bash",
        "culvert completions bash > ~/.local/share/bash-completion/completions/culvert",
    ),
];

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::{super::Cli, *};

    #[test]
    fn every_example_is_a_command_line_of_its_command() {
        for Example { line, .. } in EXAMPLES.iter().chain(FIRST_STEPS) {
            // What a shell would take away.
            let typed = line.split(" > ").next().unwrap_or_default();
            let words: Vec<&str> = typed.split_whitespace().collect();
            assert_eq!(words[0], "culvert");
            if let Err(error) = Cli::try_parse_from(&words) {
                panic!("{line}: {error}");
            }
        }
    }

    #[test]
    fn every_command_that_the_help_shows_ends_with_examples() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            assert!(!of(name).is_empty(), "add examples of {name} to cli/examples.rs");
            let end = command.get_after_long_help().map(ToString::to_string);
            assert_eq!(end.as_deref(), Some(help(name).as_str()), "{name}: with_examples in cli/mod.rs");
        }
        for inner in Cli::command().find_subcommand("peer").unwrap().get_subcommands() {
            let name = inner.get_name();
            let end = inner.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            assert!(end.contains(&format!("culvert peer {name}")), "add examples of peer {name}");
        }
        for Example { line, .. } in EXAMPLES {
            let name = line.split(' ').nth(1).unwrap_or_default();
            assert!(Cli::command().find_subcommand(name).is_some(), "{name} is no command");
        }
    }
}

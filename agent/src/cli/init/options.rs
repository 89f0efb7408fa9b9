//! The options of `culvert init`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::cli::reach::DEFAULT_CONFIG;

/// The name of the key's file, in the folder of the configuration.
pub(super) const KEY_FILE: &str = "identity.key";

/// Write a key and a commented configuration, and say what to type next
///
/// An exit listens; an entry dials it. Begin at the exit: it prints the link that the entry needs, and the entry prints what
/// the exit must be told. Nothing that exists is overwritten; a key that exists is used.
#[derive(Debug, Args)]
pub(in crate::cli) struct Init {
    /// What this host is to be
    #[arg(long, value_enum)]
    pub(super) role: Role,
    /// Where to write the configuration; the key goes beside it
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub(super) config: PathBuf,
    /// Of an entry: the link of the exit
    #[arg(long, value_name = "LINK")]
    pub(super) peer: Option<String>,
    /// Of an entry: the file with the preshared key of both ends, as culvert genpsk writes it
    #[arg(long, value_name = "FILE")]
    pub(super) preshared_key_file: Option<String>,
    /// Carry IP packets: our address in the tunnel, with the prefix of its link; may be repeated, once for IPv4 and once for
    /// IPv6. The prefix has room for the other end, and each entry of an exit needs an address of its own [without a value: 10.9.0.1/24 at an exit, 10.9.0.2/24 at an
    /// entry]
    #[arg(long, value_name = "PREFIX", num_args = 0..=1, default_missing_value = "")]
    pub(super) tun: Vec<String>,
    /// Of an entry with --tun: a network behind the exit, besides those of --tun; may be repeated
    #[arg(long = "allowed-ip", value_name = "PREFIX")]
    pub(super) allowed_ips: Vec<String>,
    /// With --tun: a network behind this host, which the other end is to reach; the command that is printed for it says so, and how
    /// this host forwards. May be repeated
    #[arg(long = "network", value_name = "PREFIX")]
    pub(super) networks: Vec<String>,
    /// Of an exit: a service that it offers, UDP and TCP, or one of them with /udp or /tcp behind the address; may be repeated
    #[arg(long = "service", value_name = "NAME=ADDR", value_parser = pair)]
    pub(super) services: Vec<Pair>,
    /// Of an entry: a local UDP port that stands for a service of the exit; may be repeated
    #[arg(long, value_name = "LISTEN=SERVICE", value_parser = pair)]
    pub(super) udp: Vec<Pair>,
    /// The same for TCP
    #[arg(long, value_name = "LISTEN=SERVICE", value_parser = pair)]
    pub(super) tcp: Vec<Pair>,
    /// Of an exit: the UDP address to listen at; may be repeated [default: port 4433 of all addresses]
    #[arg(long, value_name = "ADDR")]
    pub(super) listen: Vec<String>,
    /// Of an exit: where entries find it [default: the address from which this host sends to the Internet]
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) advertise: Option<String>,
    /// Of an exit in a fleet behind one address: its number there, another one for each exit. All of them have the key of the
    /// first one
    #[arg(long, value_name = "0..255")]
    pub(super) server_id: Option<u8>,
    /// Enable and start the service afterwards, where systemd runs it
    #[arg(long)]
    pub(super) now: bool,
}

impl Init {
    /// The role alone, without any option.
    pub(super) fn empty(role: Role, config: &Path) -> Self {
        Self {
            role,
            config: config.to_owned(),
            peer: None,
            preshared_key_file: None,
            tun: Vec::new(),
            allowed_ips: Vec::new(),
            networks: Vec::new(),
            services: Vec::new(),
            udp: Vec::new(),
            tcp: Vec::new(),
            listen: Vec::new(),
            advertise: None,
            server_id: None,
            now: false,
        }
    }
}

/// What a host is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Role {
    /// It dials an exit
    Entry,
    /// It listens, and offers its network or services
    Exit,
}

/// The two sides of a '='.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) left: String,
    pub(super) right: String,
}

/// Why a text is not a pair.
const NOT_A_PAIR: &str = "write both sides of the '=', as in dns=127.0.0.1:53 or 127.0.0.1:5300=dns";

fn pair(text: &str) -> Result<Pair, &'static str> {
    let sides = text.split_once('=').filter(|(left, right)| !left.is_empty() && !right.is_empty());
    sides.map(|(left, right)| Pair { left: left.to_owned(), right: right.to_owned() }).ok_or(NOT_A_PAIR)
}

//! `[[user]]`: who may go through the web server of `[http]`, and what to, wherever it stands: in the configuration or in the state file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    str::FromStr,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use gate::{chosen_password::PasswordHash, client_key::ClientKey, password::PasswordKey};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    Http, Peer, Tun,
    checks::Checks,
    kinds::{Kind, granted, name, text, truth},
    peers::rate,
    prefix::network_prefix,
    problem::{At, PeerOrigin},
    section::{Table, section},
    value::{Bad, bad, parsed},
};

/// The most users of both files: what every one of them has beside its sessions stays small.
pub const MAX_USERS: usize = 4096;

/// What to write for a password.
const PASSWORD_REMEDY: &str = "let culvert user add or culvert user set --new-password make it";

fn password_key() -> Kind<PasswordKey> {
    text("key of a password", |text| parsed(text, PASSWORD_REMEDY), ToString::to_string)
}

fn password_hash() -> Kind<PasswordHash> {
    let remedy = "let culvert user hash make it";
    text("Argon2id hash of a password", move |text| parsed(text, remedy), ToString::to_string)
}

fn client_key() -> Kind<ClientKey> {
    let remedy = "write sha256: and what openssl x509 -in CERTIFICATE -pubkey -noout | openssl pkey -pubin -outform der | sha256sum says";
    text("hash of a public key", move |text| parsed(text, remedy), ToString::to_string)
}

/// A time as seconds since the Unix epoch.
fn moment() -> Kind<u64> {
    text("time, as in \"2027-01-31\" or \"2027-01-31T18:00:00Z\"", read_moment, |seconds| {
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(*seconds)).to_string()
    })
}

fn read_moment(text: &str) -> Result<u64, Bad> {
    let read = humantime::parse_rfc3339_weak(text)
        .or_else(|_| humantime::parse_rfc3339_weak(&format!("{text} 00:00:00")));
    let since = read.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map(|since| since.as_secs()).ok_or_else(|| {
        let remedy = "write a day, as in \"2027-01-31\", which ends it as that day begins (UTC), or a time, as in \"2027-01-31T18:00:00Z\"";
        bad(format!("{text:?} is not a time"), remedy)
    })
}

fn network() -> Kind<Network> {
    text("network", Network::read, ToString::to_string)
}

fn inner() -> Kind<IpAddr> {
    let read = |text: &str| {
        text.parse().map_err(|_| {
            bad(format!("{text:?} is no address"), "write one without a prefix length, as in \"10.9.1.7\"")
        })
    };
    text("address", read, ToString::to_string)
}

section! {
    /// A `[[user]]`: a client with a password, and what it may reach through the web server of `[http]`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct User {
        /// The name that the client gives with its password, in logs and metrics. Unique.
        name: Arc<str> = "".into(), name(), Now, required "give it a name";
        /// What is kept of the password: a keyed hash, which `culvert user add` makes together with the password itself. It works at
        /// any agent that has this line. A user has this, `password_hash` or `client_key`.
        password_key: Option<PasswordKey> = None, password_key().optional(), Now;
        /// In its place what is kept of a password that a person has chosen: its Argon2id hash, as `culvert user hash` makes it, with at
        /// most 64 MiB of memory (`m=65536`), and four passes with that. A guess [can be told by its
        /// time](security.md#passwords-that-people-choose), and few are looked at.
        password_hash: Option<PasswordHash> = None, password_hash().optional(), Now;
        /// The key of a TLS certificate that lets the user in without a password: `sha256:` and the SHA-256 of its public key
        /// (SubjectPublicKeyInfo), in hexadecimal or base64. Nothing else of the certificate is looked at. While a user has one, every
        /// client is asked for a certificate, which browsers show.
        client_key: Option<ClientKey> = None, client_key().optional(), Now;
        /// Which of our services the user may reach, each by its name: `web:80` is the service `web`, whatever the port.
        services: Vec<usize> = Vec::new(), granted(), Now;
        /// The networks that the user may reach, as far as a service with `upstream = "any"` allows it. With a port, as in
        /// `"0.0.0.0/0:443"` or `"[2001:db8::/32]:443"`, only that one.
        networks: Vec<Network> = Vec::new(), network().list(), Now;
        /// The inner addresses that the user has for good over CONNECT-IP, at most one of each family, out of `http.pool`. With several
        /// devices the newest has them, and the others get some of the pool, as all do without this key.
        addresses as address: Vec<IpAddr> = Vec::new(), inner().list(), Now;
        /// What may pass from the user, and as much to it, of all its sessions together: TCP waits, and datagrams beyond it are dropped
        /// (`over_rate`). Left out: as much as the agent has time for.
        rate: Option<u64> = None, rate().optional(), Now;
        /// From when on the user is let in no more; what is open then ends.
        expires: Option<u64> = None, moment().optional(), Now;
        /// Whether the user is shut out for now.
        disabled: bool = false, truth(), Now;
    }
    also {
        /// The kind of file that names the user.
        origin: PeerOrigin = PeerOrigin::Config;
    }
}

impl User {
    /// The keys of the file that say what the user is let in with.
    pub fn credentials(&self) -> impl Iterator<Item = &'static str> {
        let keys = [
            ("password_key", self.password_key.is_some()),
            ("password_hash", self.password_hash.is_some()),
            ("client_key", self.client_key.is_some()),
        ];
        keys.into_iter().filter_map(|(key, is_there)| is_there.then_some(key))
    }
}

/// A prefix of `user.networks`, with the one port that is meant, if only one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    pub net: IpNet,
    pub port: Option<u16>,
}

impl Network {
    fn read(text: &str) -> Result<Self, Bad> {
        let inside = text.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
        let with_port = inside.or_else(|| text.rsplit_once(':').filter(|(net, _)| !net.contains(':')));
        let Some((net, port)) = with_port else {
            return Ok(Self { net: network_prefix(text)?, port: None });
        };
        let port = u16::from_str(port).ok().filter(|port| *port > 0);
        let remedy = "write 1 to 65535 behind the colon, as in \"0.0.0.0/0:443\" or \"[2001:db8::/32]:443\"";
        let port = port.ok_or_else(|| bad(format!("{text:?} has no port behind its colon"), remedy))?;
        Ok(Self { net: network_prefix(net)?, port: Some(port) })
    }

    /// Whether `address` lies in it, and `port` is meant.
    #[must_use]
    pub fn contains(&self, address: IpAddr, port: u16) -> bool {
        self.net.contains(&address) && self.port.is_none_or(|only| only == port)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.net, self.port) {
            (net, None) => net.fmt(f),
            (IpNet::V4(net), Some(port)) => write!(f, "{net}:{port}"),
            (IpNet::V6(net), Some(port)) => write!(f, "[{net}]:{port}"),
        }
    }
}

/// A user as an operator describes it, not checked yet. On the control socket it is the JSON of `user-add`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewUser {
    pub name: String,
    /// What is kept of its password, one of the two; the password itself never leaves the command that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_hash: Option<String>,
    /// The hash of the key of its certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_key: Option<String>,
    /// The names of our services that it may reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<String>,
    /// Its inner addresses.
    #[serde(default, rename = "address", skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disabled: bool,
}

impl Checks {
    /// Appends the users of these tables. One of the state file that is in the configuration, too, is left out.
    pub(super) fn read_users(&mut self, tables: Vec<Table<'_>>, users: &mut Vec<User>) {
        let mut seen: BTreeSet<Arc<str>> = users.iter().map(|user| Arc::clone(&user.name)).collect();
        for mut table in tables {
            let file = table.at.file;
            let name: Arc<str> = table.text("name").into();
            let user = User { name: Arc::clone(&name), origin: file, ..table.fill(self) };
            if !name.is_empty() && !seen.insert(Arc::clone(&name)) {
                let of_config = |user: &User| user.origin == PeerOrigin::Config && user.name == name;
                if file == PeerOrigin::State && users.iter().any(of_config) {
                    let problem =
                        format!("{name:?} is also a [[user]] of the configuration, and that one counts");
                    self.report.note(&table.at, problem, "culvert user remove takes it out of this file");
                } else {
                    self.taken(&table.place("name"), &name, "an earlier one");
                }
                continue;
            }
            self.credentials(&table, &user, users);
            if user.disabled {
                users.push(user);
                continue;
            }
            if user.services.is_empty() && user.networks.is_empty() {
                let problem = format!("{name:?} may reach nothing");
                self.report.note(&table.at, problem, "add services or networks");
            }
            if !user.networks.is_empty() && self.any.is_empty() {
                let problem = "no service has upstream = \"any\", so no network can be reached";
                let remedy = "add a [[service]] with upstream = \"any\", and allow what it may reach";
                self.report.note(&table.place("networks"), problem, remedy);
            }
            users.push(user);
        }
        if users.len() > MAX_USERS {
            let at = At { path: "user".to_owned(), ..At::file(PeerOrigin::Config) };
            let problem = format!("there are {} users, and {MAX_USERS} are allowed", users.len());
            self.report.add(&at, problem, "remove some, or split them over several agents");
        }
    }

    /// Checks what `user` is let in with, also against `others`.
    fn credentials(&mut self, table: &Table<'_>, user: &User, others: &[User]) {
        let (key, hash) = (table.has("password_key"), table.has("password_hash"));
        if key && hash {
            let problem = "a user has one password, and there is a password_key, too";
            self.report.add(&table.place("password_hash"), problem, "leave one of the two");
        } else if !key && !hash && !table.has("client_key") {
            let problem = format!("{:?} has neither password_key, password_hash nor client_key", user.name);
            self.report.add(&table.at, problem, PASSWORD_REMEDY);
        }
        let holder =
            others.iter().find(|other| other.client_key.is_some() && other.client_key == user.client_key);
        if let Some(holder) = holder {
            let problem = format!("is that of {:?}, too", holder.name);
            self.report.add(&table.place("client_key"), problem, "give each user a key of its own");
        }
    }

    /// Checks the inner addresses of users against `http.pool` and each other, and the pool against those of peers and the device.
    pub(super) fn inner_addresses(
        &mut self,
        users: &[User],
        http: &Http,
        tun: Option<&Tun>,
        peers: &[Peer],
        root: &At,
    ) {
        let at = |key: &str, file| At { path: key.to_owned(), ..At::file(file) };
        if !http.pool.is_empty() && tun.is_none() {
            let remedy = "add [tun], or remove the key";
            self.report.note(root, "http.pool has no effect without a TUN device", remedy);
        }
        for pool in &http.pool {
            let inside = |peer: &Peer| {
                let next_hops = peer.addresses.iter().copied().map(IpNet::from);
                peer.allowed_ips.iter().copied().chain(next_hops).find(|net| pool.contains(net))
            };
            if let Some((peer, net)) = peers.iter().find_map(|peer| Some((peer, inside(peer)?))) {
                let problem = format!("{net} of the peer {:?} lies in http.pool, {pool}", peer.name);
                self.report.add(
                    &at("http.pool", PeerOrigin::Config),
                    problem,
                    "take other addresses for one of them",
                );
            }
        }
        let mut holders: BTreeMap<IpAddr, &str> = BTreeMap::new();
        let own = tun
            .iter()
            .flat_map(|tun| &tun.addresses)
            .map(IpNet::addr)
            .map(|address| (address, "the TUN device"));
        holders.extend(own);
        for user in users {
            for address in &user.addresses {
                let problem = if !http.pool.iter().any(|pool| pool.contains(address)) {
                    format!("{address} of the user {:?} is not in http.pool", user.name)
                } else if let Some(holder) = holders.insert(*address, &user.name) {
                    format!("{address} of the user {:?} is that of {holder}, too", user.name)
                } else {
                    continue;
                };
                self.report.add(
                    &at("user.address", user.origin),
                    problem,
                    "give the user another address of http.pool",
                );
            }
            if user.addresses.iter().filter(|address| address.is_ipv4()).count() > 1
                || user.addresses.iter().filter(|address| address.is_ipv6()).count() > 1
            {
                let problem = format!("{:?} has two addresses of one family", user.name);
                self.report.add(&at("user.address", user.origin), problem, "leave one of each family");
            }
        }
    }

    /// Notes hashes whose check takes much of `memory`, which this host has.
    pub(super) fn memory_of_hashes(&mut self, users: &[User], memory: Option<u64>, at: &At) {
        let hashes = users.iter().filter_map(|user| user.password_hash.as_ref());
        let most = hashes.map(PasswordHash::memory_bytes).max().unwrap_or(0);
        if memory.is_some_and(|memory| most > memory / 8) {
            let problem = format!(
                "a check of the largest user.password_hash takes {} MiB, more than an eighth of the memory",
                most >> 20
            );
            self.report.note(at, problem, "make hashes with a smaller m, as culvert user hash does (19 MiB)");
        }
    }

    /// Notes users whom nobody lets in, because there is no web server.
    pub(super) fn reachable_users(&mut self, users: &[User], http: &Http, at: &At) {
        if users.iter().any(|user| !user.disabled) && http.names.is_empty() && http.listen.is_empty() {
            let problem = "there are users, and neither http.names nor http.listen, so none of them can come";
            let remedy = "add [http] with a certificate and names, or remove the users";
            self.report.note(at, problem, remedy);
        }
    }
}

//! The systemd unit `culvert.service`: what it gives the daemon that the user who looks may lack.
//!
//! Of a unit's language this reads what concerns the checks: the settings below, drop-ins, lines that go on, empty
//! assignments that take back what stood before.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use base::files;
use net::tun::DRIVER;

/// The name of the daemon's unit, as its file and the findings have it.
pub(super) const NAME: &str = "culvert.service";

/// The user that a package makes.
const USER: &str = "culvert";

/// A user of this host, with his group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Its name, which its group has too.
    pub name: String,
    pub user: u32,
    /// The number of the user's group.
    pub group: u32,
}

/// The mode, owner and group of a file, which decide who may open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub mode: u32,
    /// The number of the user who owns the file.
    pub user: u32,
    /// The number of the group that owns the file.
    pub group: u32,
}

/// The unit and the user that would run the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// The unit, if it runs the agent with the configuration that is looked at.
    pub unit: Option<Unit>,
    /// The unit's user, or the one that a package makes; `None`: there is no such user.
    pub account: Option<Account>,
}

/// What the unit gives the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unit {
    /// The command line of `ExecStart=`, split into words.
    pub command: Vec<String>,
    /// The user that `User=` names; empty for root.
    pub user: String,
    /// `LoadCredential=`: the files that systemd hands over, with the names that they have for the daemon.
    pub credentials: Vec<(String, PathBuf)>,
    pub ambient: Vec<String>,
    /// The capabilities that `CapabilityBoundingSet=` names; `None` for all.
    pub bounding: Option<Vec<String>>,
    /// The folders of `RuntimeDirectory=` and `StateDirectory=`.
    pub folders: Vec<PathBuf>,
    /// Whether the daemon sees the node of the TUN driver.
    pub tun: bool,
}

impl Service {
    /// Who can look at what the daemon sees.
    pub(super) fn look(&self) -> &'static str {
        if self.unit.is_some() || self.account.is_some() {
            "run culvert doctor as root"
        } else {
            "run culvert doctor as the user that runs culvert, or as root"
        }
    }

    /// Whether the daemon's user may read and write a file with this access; true where nothing is known.
    pub(super) fn lets_in(&self, file: Access) -> bool {
        let (Some(unit), Some(account)) = (&self.unit, &self.account) else { return true };
        let bits = if account.user == file.user {
            file.mode >> 6
        } else if account.group == file.group {
            file.mode >> 3
        } else {
            file.mode
        };
        unit.is_root() || bits & 0o6 == 0o6
    }

    /// Whether the unit makes this folder, and gives it to the daemon.
    pub(super) fn makes(&self, folder: &Path) -> bool {
        self.unit.as_ref().is_some_and(|unit| unit.folders.iter().any(|made| made == folder))
    }

    /// Whether it is the daemon's user that owns something.
    pub(super) fn owns(&self, owner: u32) -> bool {
        self.account.as_ref().is_some_and(|account| account.user == owner)
    }
}

impl Unit {
    fn is_root(&self) -> bool {
        matches!(self.user.as_str(), "" | "root" | "0")
    }

    /// Whether the daemon has a capability.
    pub(super) fn gives(&self, capability: &str) -> bool {
        let has = |list: &Vec<String>| list.iter().any(|one| one == capability);
        (self.is_root() || has(&self.ambient)) && self.bounding.as_ref().is_none_or(has)
    }

    /// Whether systemd reads this key for the daemon.
    pub(super) fn hands_over(&self, key: &Path) -> bool {
        let is_key = |(name, file): &(String, PathBuf)| {
            file == key && key.file_name().is_some_and(|own| own.to_str() == Some(name.as_str()))
        };
        self.credentials.iter().any(is_key)
    }

    /// Whether it is this configuration that the daemon is started with.
    pub(super) fn runs(&self, config: &Path) -> bool {
        let named = self.command.iter().enumerate().find_map(|(place, option)| {
            let next = || self.command.get(place + 1).filter(|_| option == "--config").map(String::as_str);
            option.strip_prefix("--config=").or_else(next)
        });
        let same = |file: &Path| fs::canonicalize(file).ok() == fs::canonicalize(config).ok();
        named.map(Path::new).is_some_and(|file| file == config || (file.exists() && same(file)))
    }
}

/// The most that is read of a file of the host.
const MOST_BYTES: usize = 16 << 20;

/// What the host, whose files are below `root`, has of a service with this configuration.
pub(super) fn service(root: &Path, config: Option<&Path>) -> Service {
    let unit = find(root).filter(|unit| config.is_some_and(|config| unit.runs(config)));
    let name = unit.as_ref().map_or("", |unit| &unit.user);
    let users = files::read_text(&root.join("etc/passwd"), MOST_BYTES).unwrap_or_default();
    let account = account(&users, if name.is_empty() { USER } else { name });
    Service { unit, account }
}

/// The unit as systemd would read it; `None`: there is none, or no systemd runs.
fn find(root: &Path) -> Option<Unit> {
    /// The folders of units and drop-ins; what is in an earlier one holds.
    const FOLDERS: [&str; 5] = [
        "etc/systemd/system",
        "run/systemd/system",
        "usr/local/lib/systemd/system",
        "usr/lib/systemd/system",
        "lib/systemd/system",
    ];
    if !root.join("run/systemd/system").exists() {
        return None;
    }
    let folders = FOLDERS.map(|folder| root.join(folder));
    let mut text = folders.iter().find_map(|folder| files::read_text(&folder.join(NAME), MOST_BYTES).ok())?;
    let mut more = BTreeMap::new();
    for folder in &folders {
        for entry in fs::read_dir(folder.join(format!("{NAME}.d"))).into_iter().flatten().flatten() {
            more.entry(entry.file_name()).or_insert_with(|| entry.path());
        }
    }
    for file in more.values().filter(|file| file.extension().is_some_and(|end| end == "conf")) {
        text.push('\n');
        text += &files::read_text(file, MOST_BYTES).unwrap_or_default();
    }
    Some(parse(&text))
}

/// Reads the text of a unit, with its drop-ins behind it.
pub(super) fn parse(text: &str) -> Unit {
    let mut unit = Unit::default();
    let (mut private, mut policy, mut devices, mut binds) = (false, String::new(), Vec::new(), Vec::new());
    let mut section = "";
    let joined = text.replace("\\\n", " ");
    for line in joined.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        if section != "[Service]" || line.starts_with(['#', ';']) {
            continue;
        }
        let (key, value) = (key.trim(), value.trim());
        let words = || value.split_whitespace().map(|word| word.trim_matches(['"', '\'']).to_owned());
        let below = |root: &str| {
            let folder = |name: String| Path::new(root).join(name.split(':').next().unwrap_or_default());
            words().map(folder).collect::<Vec<_>>()
        };
        match key {
            "ExecStart" => unit.command = words().collect(),
            "User" => value.clone_into(&mut unit.user),
            "LoadCredential" if value.is_empty() => unit.credentials.clear(),
            "LoadCredential" => {
                let named = value.split_once(':').map(|(name, file)| (name.to_owned(), PathBuf::from(file)));
                unit.credentials.extend(named);
            }
            "AmbientCapabilities" => extend(&mut unit.ambient, words()),
            "CapabilityBoundingSet" => extend(unit.bounding.get_or_insert_default(), words()),
            "RuntimeDirectory" if value.is_empty() => unit.folders.retain(|made| !made.starts_with("/run")),
            "RuntimeDirectory" => unit.folders.extend(below("/run")),
            "StateDirectory" if value.is_empty() => unit.folders.retain(|made| made.starts_with("/run")),
            "StateDirectory" => unit.folders.extend(below("/var/lib")),
            "PrivateDevices" => private = matches!(value, "yes" | "true" | "on" | "1"),
            "DevicePolicy" => value.clone_into(&mut policy),
            "DeviceAllow" => extend(&mut devices, words()),
            "BindPaths" => {
                extend(&mut binds, words().map(|word| word.trim_start_matches('-').to_owned()));
            }
            _ => {}
        }
    }
    let lists = |list: &[String]| list.iter().any(|path| path.split(':').next() == Some(DRIVER));
    let closed = private || !devices.is_empty() || matches!(policy.as_str(), "closed" | "strict");
    // The device, or a folder that it is in.
    let bound = |path: &String| {
        path.split(':').next().is_some_and(|of| !of.is_empty() && Path::new(DRIVER).starts_with(of))
    };
    unit.tun = (!private || binds.iter().any(bound)) && (!closed || lists(&devices));
    unit
}

/// Takes any text for a unit, and for `/etc/passwd`.
#[cfg(any(test, feature = "fuzzing"))]
pub fn host_text(text: &str) {
    let unit = parse(text);
    // An assignment adds each of its words once.
    assert!(unit.folders.len() + unit.ambient.len() + unit.command.len() <= text.len());
    let account = account(text, USER);
    assert!(account.is_none_or(|account| text.contains(&account.name)));
}

/// An empty assignment takes back what stood before.
fn extend(list: &mut Vec<String>, words: impl Iterator<Item = String>) {
    let before = list.len();
    list.extend(words);
    if list.len() == before {
        list.clear();
    }
}

/// A user, by the text of `/etc/passwd`.
fn account(users: &str, name: &str) -> Option<Account> {
    let mut fields = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = fields.find(|fields| fields.first() == Some(&name) || fields.get(2) == Some(&name))?;
    let number = |field: usize| found.get(field)?.parse().ok();
    Some(Account { name: found[0].to_owned(), user: number(2)?, group: number(3)? })
}

//! What stands in a file of wg-quick(8).

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;

/// The file, as far as it means something elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WireGuard {
    pub(super) addresses: Vec<IpNet>,
    pub(super) listen_port: Option<u16>,
    pub(super) mtu: Option<u16>,
    pub(super) mark: Option<u32>,
    /// The text of `Table`.
    pub(super) table: Option<String>,
    pub(super) dns: Vec<String>,
    /// PreUp, PostUp, PreDown and PostDown with their commands, in their order.
    pub(super) hooks: Vec<(String, String)>,
    pub(super) saves: bool,
    pub(super) peers: Vec<Peer>,
    /// Keys that are not known, with their lines.
    pub(super) unknown: Vec<(usize, String)>,
}

/// A `[Peer]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Peer {
    /// What a comment at its head calls it, if a peer may be called so.
    pub(super) name: Option<String>,
    pub(super) preshared_key: Option<String>,
    pub(super) allowed_ips: Vec<IpNet>,
    pub(super) endpoint: Option<String>,
    pub(super) keepalive: bool,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    line: usize,
    problem: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} (remedy: correct it, as wg-quick would ask for)", self.line, self.problem)
    }
}

/// The section that a line is in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    Nothing,
    Interface,
    Peer,
}

impl WireGuard {
    /// Reads the text of a file.
    pub(super) fn parse(text: &str) -> Result<Self, Wrong> {
        let mut read = Self::default();
        let mut section = Section::Nothing;
        // The comment before a section is about it, as one at its head is.
        let mut comment: Option<String> = None;
        for (number, line) in (1..).zip(text.lines()) {
            let wrong = |problem: String| Wrong { line: number, problem };
            let (content, said) =
                line.split_once('#').map_or((line, None), |(line, said)| (line, Some(said)));
            let content = content.trim();
            if content.is_empty() {
                comment = said.and_then(peer_name).or_else(|| comment.take().filter(|_| said.is_some()));
                if let (Section::Peer, Some(peer)) = (section, read.peers.last_mut())
                    && *peer == (Peer { name: peer.name.clone(), ..Peer::default() })
                {
                    peer.name = peer.name.take().or_else(|| comment.take());
                }
                continue;
            }
            if let Some(name) = content.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                section = match name.to_ascii_lowercase().as_str() {
                    "interface" => Section::Interface,
                    "peer" => {
                        let name = said.and_then(peer_name).or_else(|| comment.take());
                        read.peers.push(Peer { name, ..Peer::default() });
                        Section::Peer
                    }
                    _ => return Err(wrong(format!("{content} is no section of WireGuard"))),
                };
                comment = None;
                continue;
            }
            comment = None;
            let Some((key, value)) = content.split_once('=') else {
                return Err(wrong(format!("{content:?} is neither a section nor KEY = VALUE")));
            };
            let (key, value) = (key.trim(), value.trim());
            let known = match (section, read.peers.last_mut()) {
                (Section::Nothing, _) => return Err(wrong(format!("{key} stands before any section"))),
                (Section::Peer, Some(peer)) => peer.take(key, value),
                (Section::Interface | Section::Peer, _) => read.take(key, value),
            };
            if !known.map_err(wrong)? {
                read.unknown.push((number, key.to_owned()));
            }
        }
        match read.addresses.is_empty() {
            true => Err(Wrong { line: 1, problem: "[Interface] has no Address".to_owned() }),
            false => Ok(read),
        }
    }

    /// Takes a line of `[Interface]`; false if the key is not known.
    fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key.to_ascii_lowercase().as_str() {
            "address" => self.addresses.extend(list(value, prefix)?),
            "listenport" => self.listen_port = Some(number(key, value)?),
            "mtu" => self.mtu = Some(number(key, value)?),
            "fwmark" => self.mark = mark(key, value)?,
            "table" => self.table = Some(value.to_owned()),
            "dns" => self.dns.extend(value.split(',').map(|one| one.trim().to_owned())),
            "preup" | "postup" | "predown" | "postdown" => {
                self.hooks.push((key.to_owned(), value.to_owned()))
            }
            "saveconfig" => self.saves = value.eq_ignore_ascii_case("true"),
            "privatekey" => {}
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl Peer {
    /// Takes a line of `[Peer]`; false if the key is not known.
    fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key.to_ascii_lowercase().as_str() {
            "allowedips" => self.allowed_ips.extend(list(value, prefix)?.iter().map(IpNet::trunc)),
            "endpoint" => self.endpoint = Some(value.to_owned()),
            "persistentkeepalive" => self.keepalive = !matches!(value, "0" | "off"),
            "presharedkey" => {
                let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=');
                if value.len() != 44 || !value.ends_with('=') || !value.chars().all(fine) {
                    return Err("PresharedKey has not the 44 characters of one".to_owned());
                }
                self.preshared_key = Some(value.to_owned());
            }
            "publickey" => {}
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The values of a list, which commas separate.
fn list<T>(value: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    value.split(',').map(str::trim).filter(|one| !one.is_empty()).map(read).collect()
}

/// A prefix; an address alone is one of full length.
fn prefix(text: &str) -> Result<IpNet, String> {
    let alone = |_| text.parse::<IpAddr>().map(IpNet::from);
    text.parse::<IpNet>().or_else(alone).map_err(|_| format!("{text:?} is neither an address nor a prefix"))
}

fn number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{key}: {value:?} is out of range, or no number"))
}

/// A mark, which may be in base 16; `None` for none.
fn mark(key: &str, value: &str) -> Result<Option<u32>, String> {
    let mark = match value.strip_prefix("0x") {
        Some(digits) => {
            u32::from_str_radix(digits, 16).map_err(|_| format!("{key}: {value:?} is no number"))?
        }
        None if value == "off" => 0,
        None => number(key, value)?,
    };
    Ok(Some(mark).filter(|mark| *mark != 0))
}

/// What a comment calls a peer: "# office", "# Name = office", "# friendly_name=office".
fn peer_name(comment: &str) -> Option<String> {
    let text = comment.trim_start_matches('#').rsplit(['=', ':']).next()?.trim();
    let name = text.replace(' ', "-");
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let good = (1..=40).contains(&name.len()) && name.chars().all(fits) && !name.starts_with('-');
    // A sentence is not a name.
    (good && text.split(' ').count() <= 3).then_some(name)
}

//! One check per kind of value, whatever section it stands in; `resolve.rs` calls them.

use std::{
    fmt,
    net::SocketAddr,
    ops::{Range, RangeInclusive},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use gate::identity::PublicKey;

use crate::{
    PeerOrigin,
    field::{Amount, Field, Leaf},
    problem::Report,
    tun::{Claim, LookedUp},
    value::{self, Bad},
};

/// What a key that must be there is, when it is not.
pub(super) const MISSING: &str = "is missing";

/// What the checks of all sections share.
pub(super) struct Checks {
    pub(super) report: Report,
    pub(super) keys: Vec<PinnedKey>,
    /// Names of removed peers that a forward still names.
    pub(super) closed: Vec<String>,
    /// Prefixes of `[tun]` and `peer.allowed_ips`.
    pub(super) overlay: Vec<Claim>,
    /// Addresses of `transport.listen` and `peer.endpoints`.
    pub(super) underlay: Vec<Claim>,
    /// Those of `peer.endpoints` that have a name instead.
    pub(super) looked_up: Vec<LookedUp>,
    pub(super) udp_listeners: Vec<Listener>,
    pub(super) tcp_listeners: Vec<Listener>,
}

/// A public key that a file names, and where.
pub(super) struct PinnedKey {
    pub(super) key: PublicKey,
    pub(super) origin: PeerOrigin,
    pub(super) at: String,
    pub(super) span: Range<usize>,
}

/// A value with its position.
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
}

/// A local address that something is to be bound to.
pub(super) struct Listener {
    pub(super) address: SocketAddr,
    pub(super) at: String,
    pub(super) span: Range<usize>,
}

impl Checks {
    pub(super) fn new(report: Report) -> Self {
        Self {
            report,
            keys: Vec::new(),
            closed: Vec::new(),
            overlay: Vec::new(),
            underlay: Vec::new(),
            looked_up: Vec::new(),
            udp_listeners: Vec::new(),
            tcp_listeners: Vec::new(),
        }
    }

    /// The value if the key is there and has the right TOML type.
    pub(super) fn take<T: Leaf>(&mut self, at: &str, field: Option<Field<T>>) -> Option<At<T>> {
        let field = field?;
        match field.value {
            Ok(value) => Some(At { value, span: field.span }),
            Err(found) => {
                let remedy = format!("write {}", T::EXPECTED);
                self.report.add(at, Some(field.span), format!("is {found}"), remedy);
                None
            }
        }
    }

    /// The same for a key that must be there; `header` is its table.
    pub(super) fn require<T: Leaf>(
        &mut self,
        at: &str,
        field: Option<Field<T>>,
        header: &Range<usize>,
        remedy: &str,
    ) -> Option<At<T>> {
        if field.is_none() {
            self.report.add(at, Some(header.clone()), MISSING, remedy);
        }
        self.take(at, field)
    }

    pub(super) fn read<T>(
        &mut self,
        at: &str,
        text: &At<String>,
        how: fn(&str) -> Result<T, Bad>,
    ) -> Option<T> {
        let bad = match how(&text.value) {
            Ok(value) => return Some(value),
            Err(bad) => bad,
        };
        self.report.add(at, Some(text.span.clone()), bad.problem, bad.remedy);
        None
    }

    pub(super) fn parse<T: FromStr<Err: fmt::Display>>(
        &mut self,
        at: &str,
        text: &At<String>,
        remedy: &str,
    ) -> Option<T> {
        match text.value.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                self.report.add(at, Some(text.span.clone()), error.to_string(), remedy);
                None
            }
        }
    }

    /// The elements that are texts, each with its own key path.
    pub(super) fn list(
        &mut self,
        at: &str,
        field: Option<Field<Vec<Field<String>>>>,
    ) -> Vec<(String, At<String>)> {
        match self.take(at, field) {
            Some(list) => self.elements(at, list.value),
            None => Vec::new(),
        }
    }

    pub(super) fn elements(&mut self, at: &str, list: Vec<Field<String>>) -> Vec<(String, At<String>)> {
        let mut texts = Vec::with_capacity(list.len());
        for (index, element) in list.into_iter().enumerate() {
            let at = format!("{at}[{index}]");
            if let Some(text) = self.take(&at, Some(element)) {
                texts.push((at, text));
            }
        }
        texts
    }

    pub(super) fn choice<T: Copy>(
        &mut self,
        at: &str,
        field: Option<Field<String>>,
        choices: &[(&str, T)],
    ) -> Option<T> {
        let text = self.take(at, field)?;
        let found = choices.iter().find(|(name, _)| *name == text.value);
        if found.is_none() {
            let names: Vec<String> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
            let remedy = format!("write {}", names.join(" or "));
            self.report.add(at, Some(text.span), format!("{:?} is not a choice here", text.value), remedy);
        }
        found.map(|(_, value)| *value)
    }

    pub(super) fn number<T: TryFrom<i64>>(
        &mut self,
        at: &str,
        field: Option<Field<i64>>,
        range: RangeInclusive<i64>,
        default: T,
    ) -> T {
        let Some(number) = self.take(at, field) else { return default };
        match T::try_from(number.value) {
            Ok(value) if range.contains(&number.value) => value,
            Ok(_) | Err(_) => {
                let remedy = format!("write a number from {} to {}", range.start(), range.end());
                self.report.add(at, Some(number.span), format!("{} is out of range", number.value), remedy);
                default
            }
        }
    }

    pub(super) fn size(
        &mut self,
        at: &str,
        field: Option<Field<Amount>>,
        range: RangeInclusive<u64>,
        default: usize,
    ) -> usize {
        let Some(amount) = self.take(at, field) else { return default };
        let bytes = match amount.value {
            Amount::Number(number) => u64::try_from(number).ok(),
            Amount::Text(value) => {
                let text = At { value, span: amount.span.clone() };
                let Some(bytes) = self.read(at, &text, value::size) else { return default };
                Some(bytes)
            }
        };
        let bytes = bytes.filter(|bytes| range.contains(bytes)).and_then(|bytes| usize::try_from(bytes).ok());
        bytes.unwrap_or_else(|| {
            let remedy = format!("write {} KiB to {} MiB", range.start() >> 10, range.end() >> 20);
            self.report.add(at, Some(amount.span), "is out of range", remedy);
            default
        })
    }

    pub(super) fn duration(
        &mut self,
        at: &str,
        field: Option<Field<String>>,
        range: RangeInclusive<Duration>,
        default: Duration,
    ) -> Duration {
        let Some(text) = self.take(at, field) else { return default };
        let Some(duration) = self.read(at, &text, value::duration) else { return default };
        if !range.contains(&duration) {
            let (least, most) =
                (humantime::format_duration(*range.start()), humantime::format_duration(*range.end()));
            let problem = format!("{:?} is out of range", text.value);
            self.report.add(at, Some(text.span), problem, format!("write \"{least}\" to \"{most}\""));
        }
        duration
    }

    /// A name that is well formed and not taken (`taken` says by whom); what is wrong stays usable for the checks that follow.
    pub(super) fn unique_name(
        &mut self,
        at: &str,
        field: Option<Field<String>>,
        header: &Range<usize>,
        taken: impl Fn(&str) -> Option<&'static str>,
    ) -> Arc<str> {
        let Some(name) = self.require(at, field, header, "give it a name") else { return "".into() };
        self.read(at, &name, value::check_name);
        if let Some(taker) = taken(&name.value) {
            let problem = format!("{:?} is taken by {taker}", name.value);
            self.report.add(at, Some(name.span), problem, "choose another name");
        }
        name.value.into()
    }
}

//! `upstream = "any"`: a service without an address of its own, through which users reach what they ask for.

use ipnet::IpNet;

use crate::{
    Service,
    checks::Checks,
    kinds::{Kind, text},
    prefix::network_prefix,
    section::Table,
    sections::NOWHERE,
};

/// Prefixes of `service.allow` and `service.deny`.
pub(super) fn prefixes(remedy: &'static str) -> Kind<Vec<IpNet>> {
    text("prefix", network_prefix, ToString::to_string).list().not_empty(remedy)
}

impl Service {
    /// Whether it has no address of its own: what is reached through it is chosen by who asks.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.upstream.is_any()
    }

    /// Closes it: it keeps its place and serves nothing.
    pub(super) fn close(&mut self) {
        (self.udp, self.tcp) = (false, false);
        if self.is_any() {
            self.upstream = NOWHERE.into();
        }
    }
}

/// Whether `service` may be what its keys say: `allow` and `deny` are for `upstream = "any"`.
pub(super) fn check_any(checks: &mut Checks, table: &Table<'_>, service: &Service) {
    let key = ["allow", "deny"].into_iter().find(|key| table.has(key));
    if let Some(key) = key.filter(|_| !service.is_any()) {
        let problem = "has an effect on a service with upstream = \"any\" only";
        checks.report.note(&table.place(key), problem, "remove it, or set upstream = \"any\"");
    }
}

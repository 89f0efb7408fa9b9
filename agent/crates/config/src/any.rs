//! `upstream = "any"`: a service without an address of its own, through which users reach what they ask for.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};

use ipnet::IpNet;

use crate::{
    Service,
    checks::Checks,
    kinds::{Given, Kind, Names, Shown, text},
    prefix::network_prefix,
    section::Table,
    sections::{NOWHERE, address},
};

/// The address of a service, or `"any"`.
pub(super) fn upstream() -> Kind<SocketAddr> {
    let fixed = address().then(Checks::sendable);
    let read = move |given: Given<'_>| match given.value.as_str() {
        Some("any") => Ok(Service::ANYWHERE),
        Some(_) | None => (fixed.read)(given),
    };
    let show = |address: &SocketAddr, _: Names<'_>| {
        let is_any = *address == Service::ANYWHERE;
        Shown::text(if is_any { "any".to_owned() } else { address.to_string() })
    };
    Kind::new("address, `\"any\"`", read, show)
}

/// Prefixes of `service.allow` and `service.deny`.
pub(super) fn prefixes(remedy: &'static str) -> Kind<Vec<IpNet>> {
    text("prefix", network_prefix, ToString::to_string).list().not_empty(remedy)
}

impl Service {
    /// What stands for `upstream = "any"`: nothing can be sent there.
    pub const ANYWHERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));

    /// Whether it has no address of its own: what is reached through it is chosen by who asks.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.upstream == Self::ANYWHERE
    }

    /// Where it is, for people.
    pub(super) fn place(&self) -> String {
        if self.is_any() { "any".to_owned() } else { self.upstream.to_string() }
    }

    /// Closes it: it keeps its place and serves nothing.
    pub(super) fn close(&mut self) {
        (self.udp, self.tcp) = (false, false);
        if self.is_any() {
            self.upstream = NOWHERE;
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

//! `peer.redundant`: what travels on two lines at once.

use std::sync::Arc;

use crate::{
    kinds::{Given, Kind, Shown, named, truth},
    ranges::{numbered, services_of},
    repair::{DscpSet, dscp_list},
    section::Table,
    value::{Bad, bad},
};

/// What of a peer's payloads travels on two lines, if the session has several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redundant {
    /// The DSCPs of the IP packets that do.
    pub dscp: DscpSet,
    /// The names of the services whose datagrams do, ours and the peer's.
    pub services: Vec<Arc<str>>,
    /// The indices of our services among them.
    pub own: Vec<usize>,
    /// Whether the second line may be a metered one.
    pub metered: bool,
}

impl Redundant {
    /// Whether nothing travels twice.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.dscp == DscpSet::default() && self.services.is_empty()
    }

    /// Whether datagrams to the peer's service of this name travel twice.
    #[must_use]
    pub fn has(&self, service: &str) -> bool {
        self.services.iter().any(|name| {
            let rest = service.strip_prefix(&**name);
            rest.is_some_and(|rest| rest.is_empty() || is_place(name, service))
        })
    }
}

/// Whether `service` is one of the range that is called `name`.
fn is_place(name: &str, service: &str) -> bool {
    let place = service.rsplit('.').next().and_then(|place| place.parse().ok());
    place.is_some_and(|place| numbered(name, place) == service)
}

const REMEDY: &str = "write a table, as in { dscp = [46], services = [\"voice\"] }, or leave the key out";

/// What travels on two lines, as a table.
pub(super) fn redundant() -> Kind<Redundant> {
    Kind::new("a table", read, |redundant: &Redundant, _| shown(redundant))
}

fn read(given: Given<'_>) -> Result<Redundant, Bad> {
    let Some(entries) = given.value.as_table() else { return Err(bad("is no table", REMEDY)) };
    let Given { at, checks, .. } = given;
    let mut table = Table::new(at.clone(), Some(entries));
    let names = named().list().not_empty("name a service, or leave services out");
    let services = table.value("services", &names, checks).unwrap_or_default();
    let position = |name: &Arc<str>| checks.services.iter().position(|service| service == name);
    let own = services
        .iter()
        .flat_map(|name| position(name).into_iter().chain(services_of(name, &checks.services)));
    let own = own.collect();
    let dscp = table.value("dscp", &dscp_list(), checks).unwrap_or_default();
    let metered = table.value("metered", &truth(), checks).unwrap_or_default();
    if !table.has("dscp") && !table.has("services") {
        checks.report.add(at, "names nothing that is to travel on two lines", REMEDY);
    }
    table.end(&mut checks.report);
    Ok(Redundant { dscp, services, own, metered })
}

fn shown(redundant: &Redundant) -> Option<Shown> {
    let Redundant { dscp, services, own: _, metered } = redundant;
    if redundant.is_off() {
        return None;
    }
    let mut keys = Vec::new();
    if *dscp != DscpSet::default() {
        keys.push(format!("dscp = {dscp}"));
    }
    if !services.is_empty() {
        let names = services.iter().filter_map(|name| Some(Shown::text(name)?.toml()));
        keys.push(format!("services = [{}]", names.collect::<Vec<_>>().join(", ")));
    }
    if *metered {
        keys.push("metered = true".to_owned());
    }
    Shown::bare(format!("{{ {} }}", keys.join(", ")))
}

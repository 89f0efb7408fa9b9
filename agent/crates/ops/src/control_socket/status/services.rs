//! Where our services are, and whether they were reached there.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::page::{Page, age, plain};

/// A service that peers may reach through us.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// The name by which peers ask for it.
    pub name: String,
    /// The places of `service.upstream`, in their order.
    pub upstream: Vec<UpstreamStatus>,
}

/// One place of a service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UpstreamStatus {
    /// The place as the configuration has it.
    pub target: String,
    /// Its addresses; UDP goes to the first, TCP tries them in this order.
    pub addresses: Vec<SocketAddr>,
    /// Why the name was not found, or the last attempt to connect failed; gone once one succeeds.
    pub failure: Option<String>,
    /// How long ago that attempt was, in seconds.
    pub failed_seconds: Option<f64>,
}

/// Lines about the services that were not found or not reached.
pub(super) fn failures(services: &[ServiceStatus], page: &mut Page) {
    for service in services {
        for place in &service.upstream {
            let Some(failure) = &place.failure else { continue };
            let since =
                place.failed_seconds.map(|seconds| format!(" {} ago", age(seconds))).unwrap_or_default();
            let [name, target, failure] = [&service.name, &place.target, failure].map(|text| plain(text));
            page.alarm(format!("service {name} at {target}: failed{since}: {failure}"));
        }
    }
}

//! How the workers come to run another configuration.

use std::sync::Arc;

use base::fault::{self, Fault};
use config::{Config, reload::Plan};
use net::ports::Ports;

use crate::{
    hub::Hub,
    registry::{PeerRegistry, RegistryError},
};

/// Makes the workers follow a plan, whose configuration is `config`; `shares` are the ports that open with it, one share for
/// each worker.
///
/// # Errors
/// A peer that was added while the agent ran is in the way; nothing has changed then.
pub fn follow(
    config: Config,
    plan: &Plan,
    registry: &PeerRegistry,
    hub: &Hub,
    shares: Vec<Ports>,
) -> Result<Arc<Config>, RegistryError> {
    registry.revise(&config, plan)?;
    fault::point(Fault::Follow);
    let config = Arc::new(config);
    hub.users.follow(&config);
    hub.configure(&config, shares);
    Ok(config)
}

//! `culvert link`

use std::path::PathBuf;

use clap::Args;
use config::{Config, Transport};
use gate::identity::{Endpoint, ShareLink};

use super::{Failure, reach::DEFAULT_CONFIG};
use crate::out;

/// Print the link by which others dial this agent
#[derive(Debug, Args)]
pub(super) struct Link {
    /// The configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
}

/// Why there is no link to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum LinkError {
    /// `transport.listen` is empty, so that nobody can dial the agent.
    #[error("this agent does not listen, so nobody can dial it (remedy: set transport.listen)")]
    NotListening,
    /// Which of them others can reach is not ours to guess.
    #[error("it listens on more than one address (remedy: set transport.advertise = \"host:port\")")]
    Several,
    /// The agent listens on the wildcard address 0.0.0.0 or `[::]`.
    #[error("it listens on a wildcard address (remedy: set transport.advertise = \"host:port\")")]
    Wildcard,
    /// The agent listens on port 0, so that the kernel chooses the port at each start.
    #[error("the kernel chooses its port at each start (remedy: write a port into transport.listen)")]
    AnyPort,
}

impl Link {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let (config, identity) = Config::load(&self.config)?;
        let endpoint = endpoint(&config.transport).map_err(anyhow::Error::from)?;
        Ok(out::say(&ShareLink { endpoint, key: identity.public_key() })?)
    }
}

/// Where others dial us: what the operator advertises, else the one address that we listen on.
fn endpoint(transport: &Transport) -> Result<Endpoint, LinkError> {
    if let Some(endpoint) = &transport.advertise {
        return Ok(endpoint.clone());
    }
    let address = match transport.listen.as_slice() {
        [] => return Err(LinkError::NotListening),
        [address] => address,
        [_, _, ..] => return Err(LinkError::Several),
    };
    if address.ip().is_unspecified() {
        return Err(LinkError::Wildcard);
    }
    if address.port() == 0 {
        return Err(LinkError::AnyPort);
    }
    Ok(Endpoint::new(address.ip().to_string(), address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::defaults;

    fn of(listen: &[&str], advertise: Option<&str>) -> Result<String, LinkError> {
        let transport = Transport {
            listen: listen.iter().map(|address| address.parse().unwrap()).collect(),
            advertise: advertise.map(|endpoint| endpoint.parse().unwrap()),
            ..defaults::TRANSPORT
        };
        endpoint(&transport).map(|endpoint| endpoint.to_string())
    }

    #[test]
    fn the_advertised_address_comes_first_and_wildcards_are_not_guessed() {
        assert_eq!(of(&["0.0.0.0:4433"], Some("gw.example:1")), Ok("gw.example:1".to_owned()));
        assert_eq!(of(&["192.0.2.1:4433"], None), Ok("192.0.2.1:4433".to_owned()));
        assert_eq!(of(&["[2001:db8::1]:4433"], None), Ok("[2001:db8::1]:4433".to_owned()));
        assert_eq!(of(&[], None), Err(LinkError::NotListening));
        assert_eq!(of(&["0.0.0.0:4433"], None), Err(LinkError::Wildcard));
        assert_eq!(of(&["[::]:4433"], None), Err(LinkError::Wildcard));
        assert_eq!(of(&["192.0.2.1:0"], None), Err(LinkError::AnyPort));
        assert_eq!(of(&["192.0.2.1:1", "192.0.2.2:1"], None), Err(LinkError::Several));
    }
}

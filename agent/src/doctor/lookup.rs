//! What the endpoints' names stand for, and which way packets take there.

use std::{
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::mpsc,
    thread,
    time::Duration,
};

use super::facts::{Address, Endpoint, Lookup, Peer};
use crate::{
    clock::{Clock, SystemClock},
    config::Config,
    identity,
    io::host,
};

/// How long the resolver may take for one name; it goes on by itself for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Names that are looked up at a time.
const AT_ONCE: usize = 16;

/// The peers of a configuration; `offline` asks nobody for names.
pub(super) fn peers(config: &Config, offline: bool) -> Vec<Peer> {
    let endpoints: Vec<&identity::Endpoint> = config.peers.iter().flat_map(|peer| &peer.endpoints).collect();
    let mut lookups = Vec::with_capacity(endpoints.len());
    for some in endpoints.chunks(AT_ONCE) {
        lookups.extend(look_up(some, offline));
    }
    let mark = config.transport.mark;
    let mut lookups = lookups.into_iter().map(|found| match found {
        None => Lookup::Unasked,
        Some(Err(error)) => Lookup::Failed(error),
        Some(Ok(addresses)) => {
            let address = |remote| Address {
                remote,
                way: host::way(remote, mark).map_err(|error| error.to_string()),
                answer: None,
            };
            Lookup::Found(addresses.into_iter().map(address).collect())
        }
    });
    let peer = |peer: &crate::config::Peer| {
        let texts = peer.endpoints.iter().map(ToString::to_string);
        let endpoints = texts.zip(&mut lookups).map(|(text, lookup)| Endpoint { text, lookup }).collect();
        Peer { name: peer.name.to_string(), endpoints, not_dialled: None }
    };
    config.peers.iter().map(peer).collect()
}

type Found = Option<Result<Vec<SocketAddr>, String>>;

/// All at once; the answers in the endpoints' order, `None` for those that nobody was asked for.
fn look_up(endpoints: &[&identity::Endpoint], offline: bool) -> Vec<Found> {
    let ask = |endpoint: &&identity::Endpoint| {
        let (sender, answer) = mpsc::sync_channel(1);
        let (host, port) = (endpoint.host.clone(), endpoint.port);
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(Some(Ok(vec![SocketAddr::new(ip, port)])));
        }
        if offline {
            return Ok(None);
        }
        let asked = thread::Builder::new().name("resolve".to_owned()).spawn(move || {
            let found = (host.as_str(), port).to_socket_addrs();
            // Nobody listens any more if it took too long.
            sender.send(found.map(distinct).map_err(|error| error.to_string())).ok();
        });
        asked.map(|_detached| answer).map_or_else(|error| Ok(Some(Err(error.to_string()))), Err)
    };
    let asked: Vec<_> = endpoints.iter().map(ask).collect();
    let end = SystemClock.now() + PATIENCE;
    let answers = asked.into_iter().map(|asked| match asked {
        Ok(known) => known,
        Err(answer) => {
            let left = end.saturating_duration_since(SystemClock.now());
            let late = |_| Err(format!("no answer within {} s", PATIENCE.as_secs()));
            Some(answer.recv_timeout(left).unwrap_or_else(late))
        }
    });
    answers.collect()
}

/// In their order, each once.
fn distinct(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for address in addresses {
        if !found.contains(&address) {
            found.push(address);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_known_at_once_and_names_only_if_somebody_may_be_asked() {
        let endpoint = |text: &str| text.parse::<identity::Endpoint>().unwrap();
        let (literal, name) = (endpoint("[2001:db8::1]:4433"), endpoint("localhost:1"));
        let found = look_up(&[&literal, &name], true);
        assert_eq!(found, [Some(Ok(vec!["[2001:db8::1]:4433".parse().unwrap()])), None]);
        let found = look_up(&[&name], false);
        let Some(Some(Ok(addresses))) = found.first() else { panic!("{found:?}") };
        assert!(addresses.iter().any(|address| address.ip().is_loopback()), "{addresses:?}");
    }
}

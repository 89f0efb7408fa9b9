//! What the endpoints' names stand for, and which way packets take there.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::mpsc,
    thread,
    time::Duration,
};

use base::clock::{Clock, SystemClock};
use config::Config;
use gate::identity;
use net::host;

use super::facts::{Address, Endpoint, Lookup, Peer};

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
    let peer = |peer: &config::Peer| {
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
        let (host, port) = (endpoint.name().to_owned(), endpoint.port);
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

/// Returns the addresses in their order, each once.
fn distinct(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut seen = HashSet::new();
    addresses.filter(|address| seen.insert(*address)).collect()
}

/// The interfaces of default routes that routers have advertised, by the text of `/proc/net/ipv6_route`, as far as they
/// are `open` to advertisements.
pub(super) fn advertised(routes: &str, open: impl Fn(&str) -> bool) -> Vec<String> {
    /// The flags `RTF_DEFAULT` and `RTF_ADDRCONF` of linux/ipv6_route.h.
    const ADVERTISED: u32 = 0x0005_0000;
    let interface = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [_to, "00", _from, _length, _next, _metric, _count, _use, flags, name] = columns[..] else {
            return None;
        };
        let flags = u32::from_str_radix(flags, 16).ok()?;
        (flags & ADVERTISED == ADVERTISED && open(name)).then(|| name.to_owned())
    };
    let mut names: Vec<String> = routes.lines().filter_map(interface).collect();
    names.sort();
    names.dedup();
    names
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

    #[test]
    fn interfaces_with_an_advertised_default_route_are_found() {
        let zero = "0".repeat(32);
        let line = |to: &str, length: &str, flags: &str, name: &str| {
            format!(
                "{to} {length} {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 {flags}     {name}\n"
            )
        };
        let table = line(&zero, "00", "00450003", "wan.100")
            + &line(&zero, "00", "00450003", "closed")
            // By hand, of the kernel, and a prefix that was advertised.
            + &line(&zero, "00", "00000003", "lan")
            + &line(&zero, "00", "00200200", "lo")
            + &line("fd090000000000000000000000000000", "40", "00440001", "lan")
            + "nonsense\n";
        assert_eq!(advertised(&table, |name| name != "closed"), ["wan.100"]);
    }
}

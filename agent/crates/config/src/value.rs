//! How the texts of the file are read: sizes, durations, socket addresses and names.

use std::{
    fmt::Display,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    ops::RangeInclusive,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use gate::identity::{Endpoint, EndpointError};
use net::host;

/// What is wrong with a value, and what to write instead.
pub(super) struct Bad {
    pub(super) problem: String,
    pub(super) remedy: String,
}

pub(super) fn bad(problem: impl Into<String>, remedy: impl Into<String>) -> Bad {
    Bad { problem: problem.into(), remedy: remedy.into() }
}

/// What parses itself; `remedy` is what to write.
pub(super) fn parsed<T: FromStr<Err: Display>>(text: &str, remedy: &str) -> Result<T, Bad> {
    text.parse().map_err(|error: T::Err| bad(error.to_string(), remedy))
}

/// Parses a duration, as in "30s", "200ms" or "1m 30s".
pub(super) fn duration(text: &str) -> Result<Duration, Bad> {
    humantime::parse_duration(text).map_err(|_| {
        bad(format!("{text:?} is not a duration"), "write a number and a unit, as in \"30s\" or \"200ms\"")
    })
}

/// Parses the name of a host, without a port; it is kept in lower case and without a final dot.
pub(super) fn host_name(text: &str) -> Result<String, Bad> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > 253 || !name.chars().all(fits) {
        let remedy = "write a name without a port, as in \"gw.example.net\"; addresses need none";
        return Err(bad(format!("{text:?} is not the name of a host"), remedy));
    }
    Ok(name)
}

/// Parses the origin of a web server, as in `http://127.0.0.1:8080`.
pub(super) fn site(text: &str) -> Result<Endpoint, Bad> {
    let remedy = "write http://host:port, as in \"http://127.0.0.1:8080\"";
    let Some(authority) = text.strip_prefix("http://") else {
        return Err(bad(format!("{text:?} is not the address of a web server"), remedy));
    };
    endpoint(authority.strip_suffix('/').unwrap_or(authority))
}

/// A size as the file writes it: "4MiB", or bytes where no unit fits.
#[must_use]
pub fn size_text(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = units.into_iter().find(|(bits, _)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    fits.map_or_else(|| bytes.to_string(), |(bits, unit)| format!("{}{unit}", bytes >> bits))
}

/// Parses a size into bytes, as in "4MiB", "64KiB", "1500B" or "1500".
pub(super) fn size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim_start() {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

/// "48Mbit", "1.5Gbit", "800kbit", in bits a second.
pub(super) fn bit_rate(text: &str) -> Result<u64, Bad> {
    const RANGE: RangeInclusive<u64> = 64_000..=100_000_000_000;
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim_start() {
        "kbit" => Some(1e3),
        "Mbit" => Some(1e6),
        "Gbit" => Some(1e9),
        _ => None,
    };
    let rate = number.parse::<f64>().ok().zip(factor).map(|(number, factor)| number * factor);
    let Some(rate) = rate.filter(|rate| rate.is_finite() && *rate < 1e15).map(|rate| rate.round() as u64)
    else {
        let remedy = "write a number and a unit, as in \"48Mbit\" or \"1Gbit\"";
        return Err(bad(format!("{text:?} is not a rate"), remedy));
    };
    let out_of_range = || bad(format!("{text:?} is out of range"), "write \"64kbit\" to \"100Gbit\"");
    RANGE.contains(&rate).then_some(rate).ok_or_else(out_of_range)
}

/// "48Mbit", or the smallest unit that shows it whole.
pub(super) fn bit_rate_text(bits: &u64) -> String {
    let units = [(1_000_000_000, "Gbit"), (1_000_000, "Mbit")];
    let fits = units.into_iter().find(|(unit, _)| bits.is_multiple_of(*unit));
    fits.map_or_else(
        || format!("{}kbit", *bits as f64 / 1e3),
        |(unit, name)| format!("{}{name}", bits / unit),
    )
}

/// An address and a port; a host name is told apart, because the remedy differs.
pub(super) fn socket_address(text: &str) -> Result<SocketAddr, Bad> {
    if let Some(address) = zoned(text)? {
        return usable(address.ip(), true).map(|()| address);
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        let has_zone = matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0);
        return usable(address.ip(), has_zone).map(|()| address);
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        let example = SocketAddr::new(ip, 4433);
        return Err(bad(format!("{text:?} has no port"), format!("add one, as in \"{example}\"")));
    }
    let example = "write an address and a port, as in \"127.0.0.1:53\" or \"[::1]:53\"";
    Err(match text.parse::<Endpoint>() {
        Ok(Endpoint { port, last_port, .. }) if port != last_port => bad(
            format!("{text:?} is a range of ports, and a socket has one"),
            format!(
                "write one of them, and have the kernel lead the others there: nft add rule inet culvert_ports arriving udp dport \
                 {port}-{last_port} redirect to :{port}"
            ),
        ),
        Ok(Endpoint { host, .. }) => bad(
            format!("{host:?} is a host name, and names are not looked up here"),
            format!("write its address (getent ahosts {host})"),
        ),
        Err(EndpointError::NoHost) => bad(format!("{text:?} has no address"), example),
        Err(error) => bad(format!("{text:?} is not an address and a port: {error}"), example),
    })
}

/// An IPv6 address whose zone is the name of an interface of this host, as in "[fe80::1%eth0]:53"; `None` if the text is no such address.
fn zoned(text: &str) -> Result<Option<SocketAddr>, Bad> {
    let inside = text.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    let Some(((ip, zone), port)) = inside.and_then(|(host, port)| Some((host.split_once('%')?, port))) else {
        return Ok(None);
    };
    let (Ok(ip), Ok(port)) = (ip.parse::<Ipv6Addr>(), port.parse::<u16>()) else { return Ok(None) };
    if zone.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(None);
    }
    let index = host::interface_index(zone).map_err(|_| {
        bad(format!("this host has no interface {zone:?}"), "write one that `ip link` shows behind the %")
    })?;
    Ok(Some(SocketAddrV6::new(ip, port, 0, index).into()))
}

/// Refuses an address that no socket of ours can use, whether to listen or to send.
fn usable(ip: IpAddr, has_zone: bool) -> Result<(), Bad> {
    if let IpAddr::V6(v6) = ip
        && let Some(v4) = v6.to_ipv4_mapped()
    {
        return Err(bad(
            format!("{ip} is IPv4 in the form of IPv6"),
            format!("write {v4}, without brackets"),
        ));
    }
    if ip.is_multicast() {
        return Err(bad(format!("{ip} is a multicast address"), "write the address of one host"));
    }
    if ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
        return Err(bad(format!("{ip} is a broadcast address"), "write the address of one host"));
    }
    if let IpAddr::V6(v6) = ip
        && v6.is_unicast_link_local()
        && !has_zone
    {
        let remedy = format!("name the interface, as in \"[{v6}%eth0]:4433\"");
        return Err(bad(format!("{v6} is link-local, and means another host on each interface"), remedy));
    }
    Ok(())
}

/// A host or an address to dial, and its port.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, Bad> {
    let endpoint = reached(text)?;
    if endpoint.is_range() {
        return Err(bad(format!("{text:?} has a range of ports"), "write one port"));
    }
    Ok(endpoint)
}

/// A host or an address at which an agent is reached, and its port or a range of ports.
pub(super) fn reached(text: &str) -> Result<Endpoint, Bad> {
    let endpoint: Endpoint = parsed(text, "write host:port, as in \"exit.example.net:4433\"")?;
    let (ip, zone) =
        endpoint.host.split_once('%').map_or((&*endpoint.host, None), |(ip, zone)| (ip, Some(zone)));
    if let Ok(ip) = ip.parse::<IpAddr>() {
        usable(ip, zone.is_some())?;
        if ip.is_unspecified() {
            return Err(bad(format!("{ip} stands for no host"), "write the peer's address or name"));
        }
    }
    Ok(endpoint)
}

/// Longest name of a peer or a service; it becomes a metric label and travels in every hello.
const MAX_NAME_LEN: usize = 64;

/// The name of a peer or a service.
pub(super) fn name(text: &str) -> Result<Arc<str>, Bad> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    if (1..=MAX_NAME_LEN).contains(&text.len()) && text.bytes().all(fine) {
        return Ok(text.into());
    }
    Err(bad(format!("{text:?} is not a name"), "use 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'"))
}

/// Whether two listeners of one protocol cannot both be bound.
pub(super) fn clashes(a: SocketAddr, b: SocketAddr) -> bool {
    let same_ip = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && a.is_ipv4() == b.is_ipv4() && same_ip
}

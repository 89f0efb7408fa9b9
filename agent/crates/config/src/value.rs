//! How the texts of the file are read: sizes, durations, socket addresses and names.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use gate::identity::{Endpoint, EndpointError};

/// What is wrong with a value, and what to write instead.
pub(super) struct Bad {
    pub(super) problem: String,
    pub(super) remedy: String,
}

pub(super) fn bad(problem: impl Into<String>, remedy: impl Into<String>) -> Bad {
    Bad { problem: problem.into(), remedy: remedy.into() }
}

/// "30s", "200ms", "1m 30s".
pub(super) fn duration(text: &str) -> Result<Duration, Bad> {
    humantime::parse_duration(text).map_err(|_| {
        bad(format!("{text:?} is not a duration"), "write a number and a unit, as in \"30s\" or \"200ms\"")
    })
}

/// "4MiB", "64KiB", "1500B", "1500".
pub(super) fn size(text: &str) -> Result<u64, Bad> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim_start() {
        "" | "B" => Some(1),
        "kB" | "KB" => Some(1000),
        "MB" => Some(1_000_000),
        "GB" => Some(1_000_000_000),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        _ => None,
    };
    number.parse::<u64>().ok().zip(factor).and_then(|(number, factor)| number.checked_mul(factor)).ok_or_else(
        || bad(format!("{text:?} is not a size"), "write bytes, or a number and a unit as in \"4MiB\""),
    )
}

/// "48Mbit", "1.5Gbit", "800kbit", in bits a second.
pub(super) fn bit_rate(text: &str) -> Result<u64, Bad> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim_start() {
        "kbit" => Some(1e3),
        "Mbit" => Some(1e6),
        "Gbit" => Some(1e9),
        _ => None,
    };
    let rate = number.parse::<f64>().ok().zip(factor).map(|(number, factor)| number * factor);
    rate.filter(|rate| rate.is_finite() && *rate < 1e15).map(|rate| rate.round() as u64).ok_or_else(|| {
        bad(format!("{text:?} is not a rate"), "write a number and a unit, as in \"48Mbit\" or \"1Gbit\"")
    })
}

/// An address and a port; a host name is told apart, because the remedy differs.
pub(super) fn socket_address(text: &str) -> Result<SocketAddr, Bad> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        let example = SocketAddr::new(ip, 4433);
        return Err(bad(format!("{text:?} has no port"), format!("add one, as in \"{example}\"")));
    }
    let example = "write an address and a port, as in \"127.0.0.1:53\" or \"[::1]:53\"";
    Err(match text.parse::<Endpoint>() {
        Ok(Endpoint { host, .. }) => bad(
            format!("{host:?} is a host name, and names are not looked up here"),
            format!("write its address (getent ahosts {host})"),
        ),
        Err(EndpointError::NoHost) => bad(format!("{text:?} has no address"), example),
        Err(error) => bad(format!("{text:?} is not an address and a port: {error}"), example),
    })
}

/// Longest name of a peer or a service; it becomes a metric label and travels in every hello.
const MAX_NAME_LEN: usize = 64;

/// Whether `text` may name a peer or a service.
pub(super) fn check_name(text: &str) -> Result<(), Bad> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    if (1..=MAX_NAME_LEN).contains(&text.len()) && text.bytes().all(fine) {
        return Ok(());
    }
    Err(bad(format!("{text:?} is not a name"), "use 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-'"))
}

/// Whether two listeners of one protocol cannot both be bound.
pub(super) fn clashes(a: SocketAddr, b: SocketAddr) -> bool {
    let same_ip = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && a.is_ipv4() == b.is_ipv4() && same_ip
}

//! `culvert demo`

use std::{net::SocketAddr, time::Duration};

use clap::{Args, value_parser};

use super::Failure;
use crate::demo;

/// Run an entry agent, an exit agent, an echo service and load in one process, without root
#[derive(Debug, Args)]
pub(super) struct Demo {
    /// How long to send
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Payload bits per second of all flows together, with a unit: 500k, 200M, 2G
    #[arg(long, value_name = "RATE", default_value = "200M", value_parser = bits_per_second)]
    rate: u64,
    /// UDP flows
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u16).range(1..=10_000))]
    flows: u16,
    /// Payload of a datagram in bytes; each carries its sequence number and its time
    #[arg(long, value_name = "BYTES", default_value_t = 1150, value_parser = value_parser!(u16).range(32..=9000))]
    size: u16,
    /// Where /metrics is served meanwhile; port 0 lets the kernel choose
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    metrics: SocketAddr,
    /// Print the summary as JSON instead of the table
    #[arg(long)]
    json: bool,
}

impl Demo {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let options = demo::Options {
            duration: Duration::from_secs(self.seconds.into()),
            bits_per_second: self.rate,
            flows: self.flows,
            datagram_bytes: self.size,
            metrics: self.metrics,
            json: self.json,
        };
        Ok(demo::run(&options)?)
    }
}

/// Why a text is not a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write bits per second with a unit, 1k to 1000G, as in 200M")]
pub(super) struct NotARate;

/// "500k", "200M", "1.5G": decimal units, as network rates have.
pub(super) fn bits_per_second(text: &str) -> Result<u64, NotARate> {
    let (number, exponent) = match text.split_at_checked(text.len().saturating_sub(1)) {
        Some((number, "k" | "K")) => (number, 3),
        Some((number, "M")) => (number, 6),
        Some((number, "G")) => (number, 9),
        Some(_) | None => return Err(NotARate),
    };
    // Digits after the point are moved before it, so that no rate is rounded.
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || fraction.len() > exponent || !digits(whole) || !digits(fraction) {
        return Err(NotARate);
    }
    let text = format!("{whole}{fraction:0<exponent$}");
    text.parse().ok().filter(|rate| (1_000..=1_000_000_000_000).contains(rate)).ok_or(NotARate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_decimal_units() {
        assert_eq!(bits_per_second("1k"), Ok(1_000));
        assert_eq!(bits_per_second("200M"), Ok(200_000_000));
        assert_eq!(bits_per_second("1.25G"), Ok(1_250_000_000));
        for bad in [
            "",
            "M",
            "200",
            "200m",
            "-1M",
            "0M",
            "1.M.",
            ".5G",
            "1.0001k",
            "1001G",
            "99999999999999999999G",
            "é",
        ] {
            assert_eq!(bits_per_second(bad), Err(NotARate), "{bad:?}");
        }
    }
}

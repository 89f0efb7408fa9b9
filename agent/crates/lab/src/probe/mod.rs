//! Sends what a scanner could send to a UDP port to learn what listens there, and reports what comes back.
//!
//! | question | file |
//! |---|---|
//! | the classes of packets, one list of all packets | this one: [`Class`], [`packets`] |
//! | which packets each class has | `catalogue.rs` (pure) |
//! | openings of protocols other than QUIC | `protocols.rs` (pure) |
//! | QUIC headers, sealed Initials | `forge.rs` (pure) |
//! | a TLS ClientHello that a server answers | `hello.rs` (pure) |
//! | sends them, and notes what comes back | `runner.rs` |
//! | what is printed | `report.rs` |
//!
//! The packets know nothing of Culvert but its name in ALPN: they are what anyone can send.

use std::{net::SocketAddr, time::Duration};

use net::process;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::bench::shell;

mod catalogue;
mod forge;
mod hello;
mod protocols;
mod report;
mod runner;
#[cfg(test)]
mod tests;

pub use report::{Answer, Report, Row, Verdict};

base::labelled! {
    /// Why a scanner sends a packet.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Class {
        /// A version that asks for Version Negotiation (RFC 9000 §6).
        UnknownVersion => "unknown version",
        /// The complete Initial of a client.
        Initial => "initial",
        /// The complete Initial of a client, with a token.
        InitialWithToken => "initial with token",
        /// A ClientHello in two datagrams, as clients with large key shares send it.
        SplitInitial => "split initial",
        /// An Initial with the fixed bit cleared (RFC 9287).
        FixedBit => "fixed bit cleared",
        /// An Initial in a datagram below 1200 bytes (RFC 9000 §14.1).
        SmallInitial => "small initial",
        /// An Initial with a destination connection ID of each length.
        ConnectionId => "connection id",
        /// An Initial whose tag is broken.
        BrokenTag => "broken tag",
        /// An Initial, well sealed, with frames that break the protocol.
        IllegalFrames => "illegal frames",
        /// An Initial with a length field that is wrong.
        BrokenLength => "broken length",
        /// Several packets coalesced into one datagram.
        Coalesced => "coalesced",
        /// A 0-RTT packet without an Initial before it.
        ZeroRtt => "0-rtt",
        /// A Handshake packet of no connection.
        Handshake => "handshake",
        /// A Retry, which only servers send.
        Retry => "retry",
        /// Version 0: a Version Negotiation packet.
        VersionZero => "version 0",
        /// Short headers of no connection, 1 to 1500 bytes.
        ShortHeader => "short header",
        /// The first datagram of a client of another protocol.
        OtherProtocol => "other protocol",
        /// Random bytes, 0 to 1500 of them.
        Random => "random bytes",
        /// Datagrams of several classes, of one length, in one burst from one port.
        Mixture => "mixture",
    }
}

impl Class {
    /// Whether its packets share a port: they belong together, or there are too many for a port each.
    fn shares_a_port(self) -> bool {
        matches!(self, Self::SplitInitial | Self::ShortHeader | Self::Random | Self::Mixture)
    }
}

/// A datagram that a scanner could send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The class that the packet belongs to.
    pub class: Class,
    /// The variant within the class, in words.
    pub detail: String,
    /// The UDP payload, 0 to 1500 bytes.
    pub bytes: Vec<u8>,
    /// The number of times it is sent, as by a client that gets no answer.
    pub rounds: u8,
}

/// Every packet, [`Class`] by class in the order of [`Class::ALL`]; the same for the same seed.
#[must_use]
pub fn packets(seed: u64) -> Vec<Probe> {
    catalogue::all(&mut SmallRng::seed_from_u64(seed))
}

/// The target of a probe, and how it is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The address and port that are probed.
    pub target: SocketAddr,
    /// The seed that the packets are made from.
    pub seed: u64,
    /// The time that an answer to the last datagram of a round may take.
    pub wait: Duration,
}

/// Sends every packet and collects what comes back, in about two seconds and twice [`Options::wait`].
///
/// # Errors
/// When there are no sockets for it.
pub fn run(options: Options) -> anyhow::Result<Report> {
    let probes = packets(options.seed);
    let ports = runner::ports(&probes);
    // Beside the sockets: the runtime, the alarm, standard streams.
    process::raise_descriptor_limit(64 + ports as u64)?;
    let make =
        move |net: &mut net::kernel::KernelNet, clock| runner::Runner::new(net, clock, options, probes);
    let thread = shell::spawn("probe".to_owned(), make, runner::Runner::finish)?;
    thread.join().map_err(|_panic| anyhow::anyhow!("the probing thread panicked"))?
}

fn random(rng: &mut SmallRng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    rng.fill(bytes.as_mut_slice());
    bytes
}

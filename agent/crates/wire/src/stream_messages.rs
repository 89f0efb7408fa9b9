//! What two agents say of the streams of TCP forwards: at the head of each, and beside them in control messages.

use std::net::{IpAddr, SocketAddr};

use prost::Message as _;

use crate::{framing, messages::MessageError, protobuf, proxy::ClientAddresses};

/// The head of a TCP forward's stream, from the end that opened it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOpen {
    /// The number of the service to reach.
    pub service: u32,
    /// Who connected, if the service is to be told and the opener knows.
    pub client: Option<ClientAddresses>,
}

impl StreamOpen {
    /// Parses a header, without its length.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let protobuf::StreamOpen { service, client } = prost::Message::decode(bytes)?;
        Ok(Self { service, client: client.map(|client| addresses_of(&client)).transpose()? })
    }

    /// Appends the header with its length.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let Self { service, client } = *self;
        let client = client.map(|client| protobuf::ClientAddresses {
            source: bytes_of(client.source().ip()),
            source_port: client.source().port().into(),
            destination: bytes_of(client.destination().ip()),
            destination_port: client.destination().port().into(),
        });
        framing::frame(&protobuf::StreamOpen { service, client }, out);
    }
}

fn bytes_of(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn addresses_of(client: &protobuf::ClientAddresses) -> Result<ClientAddresses, MessageError> {
    let address = |field, bytes: &[u8], port: u32| {
        let length = MessageError::Length { field, bytes: bytes.len() };
        let ip = match bytes.len() {
            4 => <[u8; 4]>::try_from(bytes).map(IpAddr::from).map_err(|_| length)?,
            16 => <[u8; 16]>::try_from(bytes).map(IpAddr::from).map_err(|_| length)?,
            _ => return Err(length),
        };
        let port = u16::try_from(port).map_err(|_| MessageError::Range { field, value: port })?;
        Ok(SocketAddr::new(ip, port))
    };
    let source = address("source", &client.source, client.source_port)?;
    let destination = address("destination", &client.destination, client.destination_port)?;
    let mixed = MessageError::Length { field: "destination", bytes: client.destination.len() };
    ClientAddresses::new(source, destination).ok_or(mixed)
}

/// The answer to a [`StreamOpen`]; the upstream's bytes follow [`Ok`](Self::Ok), nothing follows the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum StreamAnswer {
    /// A refusal that this version does not know.
    Unspecified = 0,
    /// The upstream is connected, and its bytes follow.
    Ok = 1,
    /// No service has this number, or it does not serve TCP.
    UnknownService = 2,
    /// This peer may not use it.
    NotAllowed = 3,
    /// The upstream of the service refused the connection.
    UpstreamRefused = 4,
    /// The upstream did not answer in time.
    UpstreamTimeout = 5,
    /// As many streams are open as the limit allows.
    LimitReached = 6,
    /// The acceptor has no file descriptor left.
    TooManyFiles = 7,
    /// The acceptor has no route to the upstream, or its firewall forbids it.
    NoRoute = 8,
    /// The acceptor has no port, or no memory, left for a connection to the upstream.
    NoResources = 9,
}

impl StreamAnswer {
    /// Parses an answer, without its length.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        Ok(Self::try_from(protobuf::StreamAnswer::decode(bytes)?.status).unwrap_or(Self::Unspecified))
    }

    /// Appends the answer with its length.
    pub fn encode(self, out: &mut Vec<u8>) {
        framing::frame(&protobuf::StreamAnswer { status: self.into() }, out);
    }
}

/// A place in the stream of a TCP forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOffset {
    /// The number of the stream (RFC 9000 §2.1).
    pub stream: u64,
    /// The number of bytes of the stream, header or answer included, that come before the place; the end of the stream counts as one
    /// more.
    pub offset: u64,
}

/// Limit on the streams that one message names.
pub const MOST_STREAMS: usize = 256;

/// The pairs of two lists of the same length, of [`MOST_STREAMS`] at most.
pub(crate) fn of_streams(
    field: &'static str,
    streams: Vec<u64>,
    offsets: Vec<u64>,
) -> Result<Vec<StreamOffset>, MessageError> {
    if streams.len() != offsets.len() || streams.len() > MOST_STREAMS {
        let value = u32::try_from(streams.len().max(offsets.len())).unwrap_or(u32::MAX);
        return Err(MessageError::Range { field, value });
    }
    Ok(streams.into_iter().zip(offsets).map(|(stream, offset)| StreamOffset { stream, offset }).collect())
}

/// The streams and their offsets as two lists.
pub(crate) fn lists_of(streams: &[StreamOffset]) -> (Vec<u64>, Vec<u64>) {
    streams.iter().map(|at| (at.stream, at.offset)).unzip()
}

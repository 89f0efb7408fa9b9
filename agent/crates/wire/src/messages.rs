//! The messages of two agents on the control stream; those about the streams of TCP forwards are in `stream_messages.rs`.
//!
//! `docs/culvert.proto` is the same for other languages. A message is decoded in three steps, each bounded: cut from
//! the stream (`framing.rs`), parsed as protobuf (`protobuf.rs`), checked here. Unknown fields are ignored; so is an
//! unknown kind of message, but counted ([`MessageError::UnknownKind`]).

use std::time::Duration;

use prost::Message as _;
use quinn_proto::{ConnectionError, VarInt};

use crate::{
    cid::CONNECTION_ID_BYTES,
    framing,
    join::MAX_STREAM_CONNECTIONS,
    line::{LaneLine, LineState},
    protobuf,
    repair_terms::{Deadline, Order, Terms},
    stream_messages::{lists_of, of_streams},
};

pub use crate::{
    framing::{FrameTooLong, Framer, MAX_MESSAGE_BYTES, MAX_STREAM_HEADER_BYTES},
    stream_messages::{MOST_STREAMS, StreamAnswer, StreamOffset, StreamOpen},
};

/// The version of these messages that we speak.
pub const PROTOCOL_VERSION: u32 = 1;

/// The most lanes of a session: every lane index is below this.
pub const MAX_LANES: u8 = 64;

/// The most services that one agent names.
pub const MAX_SERVICES: usize = 256;

/// The longest service name and the longest software name, bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// The most workers of one agent: one byte of the connection ID names the worker.
pub const MAX_WORKERS: u16 = 256;

/// The preshared keys of a peer, the newest first: the second is the one before, during a rotation.
pub const MAX_PRESHARED_KEYS: usize = 2;

/// A flow's life without traffic where the hello does not say it (RFC 4787 §4.3 asks NATs for two minutes; half of
/// that keeps tables small).
pub const DEFAULT_IDLE: Duration = Duration::from_secs(60);

/// Why bytes are not a message. Only [`UnknownKind`](Self::UnknownKind) leaves the connection as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The announced length is above the limit.
    #[error(transparent)]
    TooLong(#[from] FrameTooLong),
    /// The bytes are not protobuf, or a field has another type.
    #[error("not a protobuf message")]
    Malformed(#[from] prost::DecodeError),
    /// The message has no field at all; even a kind that a later version added would have one.
    #[error("an empty message")]
    Empty,
    /// A kind of message that a later version added.
    #[error("a message of an unknown kind")]
    UnknownKind,
    /// The other end speaks another version.
    #[error("protocol version {theirs}, this agent speaks {PROTOCOL_VERSION}")]
    VersionMismatch {
        /// The protocol version in the other end's hello.
        theirs: u32,
    },
    /// An identifier or a name has a length that it must not have.
    #[error("{field} has {bytes} bytes")]
    Length {
        /// The name of the field in `docs/culvert.proto`.
        field: &'static str,
        /// The length of the field that was received.
        bytes: usize,
    },
    /// A number is outside the range that makes sense.
    #[error("{field} is {value}")]
    Range {
        /// The name of the field in `docs/culvert.proto`.
        field: &'static str,
        /// The value of the field that was received.
        value: u32,
    },
    /// A name contains control characters, which would end up in logs and terminals.
    #[error("{field} contains control characters")]
    ControlCharacter {
        /// The name of the field in `docs/culvert.proto`.
        field: &'static str,
    },
    /// A hello names more services than [`MAX_SERVICES`].
    #[error("{count} services")]
    TooManyServices {
        /// The number of services that the message names.
        count: usize,
    },
    /// Two services have the same number or the same name.
    #[error("service {number} is named twice")]
    DuplicateService {
        /// The number of the second one.
        number: u32,
    },
}

base::labelled! {
    /// The fault of a control message, without the particulars of a [`MessageError`].
    #[expect(missing_docs, reason = "the other faults have the names of the errors")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum MessageFault {
        TooLong => "too_long",
        Malformed => "malformed",
        UnknownKind => "unknown_kind",
        VersionMismatch => "version_mismatch",
        Length => "length",
        Range => "range",
        ControlCharacter => "control_character",
        TooManyServices => "too_many_services",
        DuplicateService => "duplicate_service",
        Empty => "empty",
        /// A message that is right by itself, and came from the wrong end or at the wrong time.
        OutOfOrder => "out_of_order",
    }
}

impl MessageError {
    /// The fault, for the metric that counts it.
    #[must_use]
    pub const fn fault(&self) -> MessageFault {
        match self {
            Self::TooLong(_) => MessageFault::TooLong,
            Self::Malformed(_) => MessageFault::Malformed,
            Self::UnknownKind => MessageFault::UnknownKind,
            Self::VersionMismatch { .. } => MessageFault::VersionMismatch,
            Self::Length { .. } => MessageFault::Length,
            Self::Range { .. } => MessageFault::Range,
            Self::ControlCharacter { .. } => MessageFault::ControlCharacter,
            Self::TooManyServices { .. } => MessageFault::TooManyServices,
            Self::DuplicateService { .. } => MessageFault::DuplicateService,
            Self::Empty => MessageFault::Empty,
        }
    }

    /// With which code to close the connection; `None` if the message is to be counted and ignored.
    pub fn close_reason(&self) -> Option<CloseReason> {
        match self {
            Self::UnknownKind => None,
            Self::VersionMismatch { .. } => Some(CloseReason::VersionMismatch),
            Self::TooLong(_)
            | Self::Malformed(_)
            | Self::Empty
            | Self::Length { .. }
            | Self::Range { .. }
            | Self::ControlCharacter { .. }
            | Self::TooManyServices { .. }
            | Self::DuplicateService { .. } => Some(CloseReason::ProtocolViolation),
        }
    }
}

/// A message on the control stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message of each end.
    Hello(Hello),
    /// The dialler asks for a lane.
    LaneOpen(LaneOffer),
    /// The other end has the lane's keys and receives on it.
    LaneAccept(LaneOffer),
    /// The other end does not open the lane.
    LaneRefuse(LaneEnd<LaneRefusal>),
    /// One end is done with a lane.
    LaneClose(LaneEnd<LaneCloseCause>),
    /// The services of the sender, all of them, in place of those it named before.
    ServicesChanged(Vec<Service>),
    /// The sender may be at another address. It is long, because what the far end may send there is three times what came from there
    /// (RFC 9000 §8.1), and quinn-proto sends nothing before that is a full packet.
    Here,
    /// The first message on a stream connection, from its dialler.
    Join(Join),
    /// The answer: the stream connection carries TCP forwards.
    Joined,
    /// The listener has TCP forwards for stream connections that are not there.
    StreamsWanted,
    /// The dialler opens nothing more on this stream connection, which has been idle: the listener closes it, unless it has.
    Release,
    /// The most that the sender wants to receive from the far end, all packets together, in place of an earlier limit.
    ReceiveRate {
        /// The limit; 0 means no limit.
        bits_per_second: u64,
    },
    /// Whether the sender wants reports about what arrives on the lanes, in place of what it said before.
    ReportsWanted {
        /// Whether it wants them; before the first such message it does not.
        wanted: bool,
    },
    /// How the sender repairs the IP packets that it sends, in place of what it said before; `None`: it does not.
    PacketRepair(Option<Terms>),
    /// The sender's proofs of its preshared keys, in place of those of its hello.
    PresharedKeys(Vec<KeyProof>),
    /// The sender's TCP connections of these streams, which are on the same connection, were reset, after as many bytes of the stream.
    StreamAbort(Vec<StreamOffset>),
    /// How far the far end may send on streams of the same connection, in place of what was said before: their readers have stopped, or
    /// go on.
    StreamCredit {
        /// How far a stream that begins may be sent until more is said of it, in bytes; 0 is without limit, as it is at first.
        initial: u64,
        /// How far these may be sent.
        limits: Vec<StreamOffset>,
    },
    /// The listener is about to stop: the dialler connects elsewhere, to another endpoint of the peer or to another exit behind the
    /// same one, and ends this session then.
    Leave,
    /// What the sender says of one of the session's lines, to an end with [`Features::LINES`].
    LineState(LineState),
}

/// The bytes of padding in [`Message::Here`].
const HERE_BYTES: usize = 1000;

/// The first message of each end: a description of the agent that sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Random, made at process start; flow numbers are unique within it.
    pub instance: [u8; 16],
    /// Name and version of the program, for people.
    pub software: String,
    /// The number of workers, 1 to [`MAX_WORKERS`].
    pub workers: u16,
    /// The most lanes that the agent opens or accepts, up to [`MAX_LANES`]; 0 is standard mode.
    pub max_lanes: u8,
    /// The largest QUIC packet that it accepts on a lane, bytes.
    pub max_datagram_packet: u16,
    /// The services that the sender offers to this peer.
    pub services: Vec<Service>,
    /// The optional abilities of the sender.
    pub features: Features,
    /// The dialler's Ed25519 signature over what [`possession`] gives: that it holds its identity key now.
    pub possession: Option<[u8; SIGNATURE_BYTES]>,
    /// The proofs of the sender's preshared keys for this peer, the preferred one first; at most [`MAX_PRESHARED_KEYS`].
    pub preshared_keys: Vec<KeyProof>,
}

/// The proof that the sender has a preshared key: it names the key to those who have it, for this connection and this sender only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyProof(pub [u8; KEY_PROOF_BYTES]);

/// Bytes of a [`KeyProof`]: too many to guess.
pub const KEY_PROOF_BYTES: usize = 16;

/// The first message on a stream connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The dialler's process, as in its hello.
    pub instance: [u8; 16],
    /// The session: 16 bytes that TLS exports at both ends of its control connection.
    pub session: [u8; 16],
    /// The number of the stream connection: 1 or more, and below [`MAX_STREAM_CONNECTIONS`].
    pub number: u8,
    /// The dialler's Ed25519 signature over what [`possession`] gives for this connection.
    pub possession: Option<[u8; SIGNATURE_BYTES]>,
}

/// Bytes of an Ed25519 signature (RFC 8032 §5.1.6).
pub const SIGNATURE_BYTES: usize = 64;

/// The label under which TLS exports the bytes that a dialler signs (RFC 8446 §7.5).
pub const POSSESSION_LABEL: &[u8] = b"EXPORTER-culvert-possession";

/// The bytes that a dialler signs to prove that it holds its identity key: a fixed text, so that the signature is of no use
/// elsewhere, and 32 bytes that only the two ends of this connection have.
#[must_use]
pub fn possession(exported: &[u8; 32]) -> [u8; 52] {
    let mut message = *b"culvert possession 1                                ";
    message[20..].copy_from_slice(exported);
    message
}

/// A set of optional abilities; unknown bits are kept and mean nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Completes partial L4 checksums of received IP packets.
    pub const PARTIAL_CHECKSUM: Self = Self(1);
    /// Takes IP packets: it has a TUN device.
    pub const PACKETS: Self = Self(2);
    /// Puts datagrams together that come in pieces.
    pub const PIECES: Self = Self(4);
    /// Understands stream connections, which carry TCP forwards beside the control connection.
    pub const STREAM_CONNECTIONS: Self = Self(8);
    /// Reports what arrives on its lanes, if that is wanted.
    pub const REPORTS: Self = Self(16);
    /// Takes numbered payloads and repairs, and answers requests for them.
    pub const REPAIR: Self = Self(32);
    /// Knows preshared keys: it may be told others while it is connected.
    pub const PRESHARED_KEYS: Self = Self(64);
    /// Connects elsewhere if a listener asks for that.
    pub const LEAVE: Self = Self(128);
    /// Takes copies of link-local multicast of the other host.
    pub const MULTICAST: Self = Self(256);
    /// Understands [`Message::StreamAbort`], and may be sent one.
    pub const STREAM_ABORT: Self = Self(512);
    /// Keeps to the limits of [`Message::StreamCredit`].
    pub const STREAM_CREDIT: Self = Self(1024);
    /// Says in [`StreamOpen`] who connected, to a service that wants to know.
    pub const STREAM_CLIENT: Self = Self(2048);
    /// Sends by the lines that openings of lanes name, and understands [`Message::LineState`].
    pub const LINES: Self = Self(4096);
    /// Says in openings of flows whose they are, to a service that wants to know.
    pub const FLOW_CLIENT: Self = Self(8192);
    /// Takes payloads that travel on two lines, and delivers the first of both.
    pub const COPIES: Self = Self(16384);

    /// The abilities of both sets together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The abilities of this set that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether all of `other` are in the set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A named upstream that the sender offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// The number by which flows and streams refer to the service.
    pub number: u32,
    /// The name by which the configuration refers to the service.
    pub name: String,
    /// Whether the service takes UDP flows.
    pub udp: bool,
    /// Whether the service takes TCP forwards.
    pub tcp: bool,
    /// The time for which a UDP flow to it may be silent; whole milliseconds.
    pub idle: Duration,
    /// Whether a datagram to it that fits into no packet travels in pieces; otherwise it is dropped.
    pub fragment: bool,
    /// How its lost payloads are repaired, in both directions; `None`: they are not.
    pub repair: Option<Terms>,
    /// Whether the opener of a TCP forward or UDP flow to it is to say whose it is.
    pub client: bool,
}

/// The opening of a lane, or its acceptance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneOffer {
    /// The index of the lane, below [`MAX_LANES`].
    pub lane: u8,
    /// The number of this opening of the lane.
    pub epoch: u64,
    /// The connection ID under which the sender of the message receives.
    pub connection_id: [u8; CONNECTION_ID_BYTES],
    /// The dialler's proof of the preshared key that the lane's secrets are mixed with; `None`: with none. Not in the acceptance.
    pub preshared_key: Option<KeyProof>,
    /// The line that the lane is on, if the dialler has several and the listener knows lines. Not in the acceptance.
    pub line: Option<LaneLine>,
}

/// The end of a lane, or of the attempt to open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneEnd<R> {
    /// The index of the lane, below [`MAX_LANES`].
    pub lane: u8,
    /// The number of the opening that ends.
    pub epoch: u64,
    /// The reason for the end of the lane.
    pub reason: R,
}

/// Why a lane is not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum LaneRefusal {
    /// A reason that this version does not know.
    Unspecified = 0,
    /// This lane and epoch were open before: their nonces would repeat.
    EpochReused = 1,
    /// More lanes than the hello allowed, or than the agent can carry now.
    TooMany = 2,
    /// The agent is shutting down and opens nothing more.
    ShuttingDown = 3,
    /// The listener does not have the preshared key of the opening, or has one and the opening names none.
    PresharedKey = 4,
}

/// The reason why an end closes a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum LaneCloseCause {
    /// A reason that this version does not know.
    Unspecified = 0,
    /// Nothing came through in time; its index may be opened again.
    Dead = 1,
    /// A packet on it broke the protocol.
    ProtocolViolation = 2,
    /// The lane was replaced by another epoch.
    Replaced = 3,
    /// The lane is not needed, or its end is going away.
    Done = 4,
    /// The lane still works, but its keys are nearly used up: it is to be replaced.
    WornOut = 5,
}

impl Message {
    /// Parses and checks one message, without its length.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.is_empty() {
            return Err(MessageError::Empty);
        }
        match protobuf::Envelope::decode(bytes)?.kind.ok_or(MessageError::UnknownKind)? {
            protobuf::Kind::Hello(hello) => hello.try_into().map(Self::Hello),
            protobuf::Kind::LaneOpen(offer) => offer.try_into().map(Self::LaneOpen),
            protobuf::Kind::LaneAccept(offer) => {
                let offer = protobuf::LaneOffer { preshared_key: Vec::new(), line: None, ..offer };
                offer.try_into().map(Self::LaneAccept)
            }
            protobuf::Kind::LaneRefuse(end) => {
                let reason = LaneRefusal::try_from(end.reason).unwrap_or(LaneRefusal::Unspecified);
                Ok(Self::LaneRefuse(LaneEnd { lane: lane(end.lane)?, epoch: end.epoch, reason }))
            }
            protobuf::Kind::LaneClose(end) => {
                let reason = LaneCloseCause::try_from(end.reason).unwrap_or(LaneCloseCause::Unspecified);
                Ok(Self::LaneClose(LaneEnd { lane: lane(end.lane)?, epoch: end.epoch, reason }))
            }
            protobuf::Kind::ServicesChanged(changed) => services(changed.services).map(Self::ServicesChanged),
            protobuf::Kind::Here(_) => Ok(Self::Here),
            protobuf::Kind::Join(join) => join.try_into().map(Self::Join),
            protobuf::Kind::Joined(_) => Ok(Self::Joined),
            protobuf::Kind::StreamsWanted(_) => Ok(Self::StreamsWanted),
            protobuf::Kind::Release(_) => Ok(Self::Release),
            protobuf::Kind::ReceiveRate(rate) => {
                Ok(Self::ReceiveRate { bits_per_second: rate.bits_per_second })
            }
            protobuf::Kind::ReportsWanted(reports) => Ok(Self::ReportsWanted { wanted: reports.wanted }),
            protobuf::Kind::Leave(_) => Ok(Self::Leave),
            protobuf::Kind::StreamAbort(aborts) => {
                of_streams("StreamAbort.streams", aborts.streams, aborts.bytes).map(Self::StreamAbort)
            }
            protobuf::Kind::StreamCredit(credit) => {
                let limits = of_streams("StreamCredit.streams", credit.streams, credit.limits)?;
                Ok(Self::StreamCredit { initial: credit.initial, limits })
            }
            protobuf::Kind::PacketRepair(repair) => terms(Some(repair)).map(Self::PacketRepair),
            protobuf::Kind::LineState(state) => LineState::of_wire(state).map(Self::LineState),
            protobuf::Kind::PresharedKeys(keys) => proofs(&keys.proofs).map(Self::PresharedKeys),
        }
    }

    /// Appends the message with its length.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let kind = match self {
            Self::Hello(hello) => protobuf::Kind::Hello(hello.into()),
            Self::LaneOpen(offer) => protobuf::Kind::LaneOpen(offer.into()),
            Self::LaneAccept(offer) => protobuf::Kind::LaneAccept(offer.into()),
            Self::LaneRefuse(end) => protobuf::Kind::LaneRefuse(end.into()),
            Self::LaneClose(end) => protobuf::Kind::LaneClose(end.into()),
            Self::ServicesChanged(services) => protobuf::Kind::ServicesChanged(protobuf::ServicesChanged {
                services: services.iter().map(protobuf::Service::from).collect(),
            }),
            Self::Here => protobuf::Kind::Here(protobuf::Here { padding: vec![0; HERE_BYTES] }),
            Self::Join(join) => protobuf::Kind::Join(join.into()),
            Self::Joined => protobuf::Kind::Joined(protobuf::Nothing {}),
            Self::StreamsWanted => protobuf::Kind::StreamsWanted(protobuf::Nothing {}),
            Self::Release => protobuf::Kind::Release(protobuf::Nothing {}),
            Self::Leave => protobuf::Kind::Leave(protobuf::Nothing {}),
            Self::LineState(state) => protobuf::Kind::LineState(state.into()),
            Self::StreamAbort(aborts) => {
                let (streams, bytes) = lists_of(aborts);
                protobuf::Kind::StreamAbort(protobuf::StreamAbort { streams, bytes })
            }
            Self::StreamCredit { initial, limits } => {
                let (streams, limits) = lists_of(limits);
                protobuf::Kind::StreamCredit(protobuf::StreamCredit { initial: *initial, streams, limits })
            }
            Self::ReceiveRate { bits_per_second } => {
                protobuf::Kind::ReceiveRate(protobuf::ReceiveRate { bits_per_second: *bits_per_second })
            }
            Self::ReportsWanted { wanted } => {
                protobuf::Kind::ReportsWanted(protobuf::ReportsWanted { wanted: *wanted })
            }
            Self::PacketRepair(terms) => {
                protobuf::Kind::PacketRepair(terms.as_ref().map(protobuf::Repair::from).unwrap_or_default())
            }
            Self::PresharedKeys(proofs) => {
                protobuf::Kind::PresharedKeys(protobuf::PresharedKeys { proofs: bytes_of(proofs) })
            }
        };
        framing::frame(&protobuf::Envelope { kind: Some(kind) }, out);
    }
}

impl TryFrom<protobuf::Hello> for Hello {
    type Error = MessageError;

    fn try_from(hello: protobuf::Hello) -> Result<Self, MessageError> {
        // First, because the other checks are those of this version.
        if hello.protocol_version != PROTOCOL_VERSION {
            return Err(MessageError::VersionMismatch { theirs: hello.protocol_version });
        }
        // RFC 9000 §14: the smallest packet every path carries; §18.2: the largest UDP payload.
        let packets = 1200..=65_527;
        Ok(Self {
            instance: id("instance", &hello.instance)?,
            software: name("software", hello.software, 0)?,
            workers: narrow("workers", hello.workers, 1..=MAX_WORKERS)?,
            max_lanes: narrow("max_lanes", hello.max_lanes, 0..=MAX_LANES)?,
            max_datagram_packet: narrow("max_datagram_packet", hello.max_datagram_packet, packets)?,
            services: services(hello.services)?,
            features: Features(hello.features),
            possession: signature(&hello.possession)?,
            preshared_keys: proofs(&hello.preshared_keys)?,
        })
    }
}

impl TryFrom<protobuf::LaneOffer> for LaneOffer {
    type Error = MessageError;

    fn try_from(offer: protobuf::LaneOffer) -> Result<Self, MessageError> {
        let connection_id = id("connection_id", &offer.connection_id)?;
        let preshared_key = match &*offer.preshared_key {
            [] => None,
            bytes => Some(proof(bytes)?),
        };
        let lane = lane(offer.lane)?;
        let line = offer.line.map(|line| LaneLine::of_wire(line, lane)).transpose()?;
        Ok(Self { lane, epoch: offer.epoch, connection_id, preshared_key, line })
    }
}

impl TryFrom<protobuf::Join> for Join {
    type Error = MessageError;

    fn try_from(join: protobuf::Join) -> Result<Self, MessageError> {
        Ok(Self {
            instance: id("instance", &join.instance)?,
            session: id("session", &join.session)?,
            number: narrow("number", join.number, 1..=MAX_STREAM_CONNECTIONS - 1)?,
            possession: signature(&join.possession)?,
        })
    }
}

fn services(services: Vec<protobuf::Service>) -> Result<Vec<Service>, MessageError> {
    if services.len() > MAX_SERVICES {
        return Err(MessageError::TooManyServices { count: services.len() });
    }
    let mut checked: Vec<Service> = Vec::with_capacity(services.len());
    for protobuf::Service { number, name: text, udp, tcp, idle_ms, fragment, repair, client } in services {
        let idle = if idle_ms == 0 { DEFAULT_IDLE } else { Duration::from_millis(idle_ms.into()) };
        let (name, repair) = (name("name", text, 1)?, terms(repair)?);
        let service = Service { number, name, udp, tcp, idle, fragment, repair, client };
        if checked.iter().any(|known| known.number == number || known.name == service.name) {
            return Err(MessageError::DuplicateService { number });
        }
        checked.push(service);
    }
    Ok(checked)
}

/// How payloads are repaired; absent, they are not.
fn terms(repair: Option<protobuf::Repair>) -> Result<Option<Terms>, MessageError> {
    Terms::of_wire(repair.unwrap_or_default())
}

fn lane(lane: u32) -> Result<u8, MessageError> {
    narrow("lane", lane, 0..=MAX_LANES - 1)
}

pub(crate) fn narrow<T: TryFrom<u32> + PartialOrd>(
    field: &'static str,
    value: u32,
    range: std::ops::RangeInclusive<T>,
) -> Result<T, MessageError> {
    let narrowed = T::try_from(value).ok().filter(|narrowed| range.contains(narrowed));
    narrowed.ok_or(MessageError::Range { field, value })
}

fn id<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], MessageError> {
    bytes.try_into().map_err(|_| MessageError::Length { field, bytes: bytes.len() })
}

/// A signature, which a peer may leave out.
fn signature(bytes: &[u8]) -> Result<Option<[u8; SIGNATURE_BYTES]>, MessageError> {
    if bytes.is_empty() { Ok(None) } else { id("possession", bytes).map(Some) }
}

fn proof(bytes: &[u8]) -> Result<KeyProof, MessageError> {
    id("preshared_key", bytes).map(KeyProof)
}

fn proofs(proofs: &[Vec<u8>]) -> Result<Vec<KeyProof>, MessageError> {
    if proofs.len() > MAX_PRESHARED_KEYS {
        let value = u32::try_from(proofs.len()).unwrap_or(u32::MAX);
        return Err(MessageError::Range { field: "preshared_keys", value });
    }
    proofs.iter().map(|bytes| proof(bytes)).collect()
}

fn bytes_of(proofs: &[KeyProof]) -> Vec<Vec<u8>> {
    proofs.iter().map(|proof| proof.0.to_vec()).collect()
}

fn name(field: &'static str, text: String, min_bytes: usize) -> Result<String, MessageError> {
    if !(min_bytes..=MAX_NAME_BYTES).contains(&text.len()) {
        return Err(MessageError::Length { field, bytes: text.len() });
    }
    if text.chars().any(char::is_control) {
        return Err(MessageError::ControlCharacter { field });
    }
    Ok(text)
}

impl From<&Hello> for protobuf::Hello {
    fn from(hello: &Hello) -> Self {
        Self {
            protocol_version: PROTOCOL_VERSION,
            instance: hello.instance.to_vec(),
            software: hello.software.clone(),
            workers: hello.workers.into(),
            max_lanes: hello.max_lanes.into(),
            max_datagram_packet: hello.max_datagram_packet.into(),
            services: hello.services.iter().map(protobuf::Service::from).collect(),
            features: hello.features.0,
            possession: hello.possession.map(|signature| signature.to_vec()).unwrap_or_default(),
            preshared_keys: bytes_of(&hello.preshared_keys),
        }
    }
}

impl From<&Service> for protobuf::Service {
    fn from(service: &Service) -> Self {
        // A flow that lives longer than 49 days without traffic needs no exact figure.
        let idle_ms = u32::try_from(service.idle.as_millis()).unwrap_or(u32::MAX);
        Self {
            number: service.number,
            name: service.name.clone(),
            udp: service.udp,
            tcp: service.tcp,
            idle_ms,
            fragment: service.fragment,
            repair: service.repair.as_ref().map(protobuf::Repair::from),
            client: service.client,
        }
    }
}

impl From<&Terms> for protobuf::Repair {
    fn from(terms: &Terms) -> Self {
        Self {
            mode: terms.mode as i32,
            deadline_ms: terms.deadline.milliseconds(),
            max_overhead_ppm: terms.max_overhead_ppm,
            hold: terms.order == Order::Hold,
            path_deadline: terms.deadline == Deadline::Path,
        }
    }
}

impl From<&LaneOffer> for protobuf::LaneOffer {
    fn from(offer: &LaneOffer) -> Self {
        Self {
            lane: offer.lane.into(),
            epoch: offer.epoch,
            connection_id: offer.connection_id.to_vec(),
            preshared_key: offer.preshared_key.map(|proof| proof.0.to_vec()).unwrap_or_default(),
            line: offer.line.as_ref().map(protobuf::Line::from),
        }
    }
}

impl<R: Copy + Into<i32>> From<&LaneEnd<R>> for protobuf::LaneEnd {
    fn from(end: &LaneEnd<R>) -> Self {
        Self { lane: end.lane.into(), epoch: end.epoch, reason: end.reason.into() }
    }
}

impl From<&Join> for protobuf::Join {
    fn from(join: &Join) -> Self {
        Self {
            instance: join.instance.to_vec(),
            session: join.session.to_vec(),
            number: join.number.into(),
            possession: join.possession.map(|signature| signature.to_vec()).unwrap_or_default(),
        }
    }
}

base::labelled! {
    /// Why an agent closes a control connection: QUIC's application error code (RFC 9000 §20.2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum CloseReason {
        /// The closing agent is shutting down.
        Shutdown = 0 => "shutting down",
        /// The other end broke the protocol.
        ProtocolViolation = 1 => "protocol violation",
        /// The two ends speak different versions of the protocol.
        VersionMismatch = 2 => "version mismatch",
        /// A newer connection of the same peer took over.
        Replaced = 3 => "replaced by a newer connection",
        /// The peer's key is no longer allowed.
        KeyRemoved = 4 => "key removed",
        /// A defect of the closing end.
        Internal = 5 => "internal error",
        /// Neither end used the connection for a while.
        Idle = 6 => "idle",
        /// The closing end carries as much as it may.
        LimitReached = 7 => "limit reached",
        /// An agent dialled an address of its own.
        SelfConnect = 8 => "connected to itself",
        /// A stream connection names a session that the closing end does not have.
        NoSession = 9 => "no such session",
        /// The two ends have no preshared key in common, although one of them has any; or they have one, and there are to be no lanes.
        PresharedKey = 10 => "no preshared key in common",
        /// The host of the closing end does not send packets of 1200 bytes, which QUIC needs, to the other end.
        TooNarrow = 11 => "the path carries too little",
    }
}

impl CloseReason {
    /// The reason with this code; `None` for one that a later version added.
    pub fn from_code(code: VarInt) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.code() == code)
    }

    /// The error code of this reason on the wire.
    pub fn code(self) -> VarInt {
        VarInt::from_u32(self as u32)
    }

    /// Why the far end ended a connection, if it did and this version knows the reason.
    pub fn of(error: &ConnectionError) -> Option<Self> {
        let ConnectionError::ApplicationClosed(close) = error else { return None };
        Self::from_code(close.error_code)
    }

    /// Whether the far end only goes away, or goes on with another connection: nothing is wrong.
    pub fn is_planned(self) -> bool {
        match self {
            Self::Shutdown | Self::Replaced => true,
            Self::ProtocolViolation
            | Self::VersionMismatch
            | Self::KeyRemoved
            | Self::Internal
            | Self::Idle
            | Self::LimitReached
            | Self::SelfConnect
            | Self::NoSession
            | Self::PresharedKey
            | Self::TooNarrow => false,
        }
    }
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;

//! The payload format inside a DATAGRAM frame: a context, and what it says.
//!
//! ```text
//! context (varint) | fields (varints) | payload (the rest of the frame)
//! ```
//!
//! A flow's number is chosen by the end that opened it and never used again by that instance of it. Its lowest bit
//! is 0 when the opener is the end with the smaller public key, so the two ends never choose the same number.

use quic_core::{
    HEADER_LEN, TAG_LEN,
    varint::{self, Reader},
};

use crate::{proxy::ClientAddresses, repair_terms::StreamNumber};

/// Bytes of a QUIC packet around the IP packet that fills it: its header and tag, the type of a DATAGRAM frame without length
/// (RFC 9221 §4), and the context.
pub const INNER_OVERHEAD: usize = HEADER_LEN + 1 + 1 + TAG_LEN;

/// The largest datagram that travels in pieces, in bytes: the largest UDP payload over IPv4.
pub const MOST_DATAGRAM: usize = 65_507;

/// Datagram numbers are below this: four bytes as a varint.
pub const DATAGRAM_NUMBERS: u32 = 1 << 30;

/// The numbers of the contexts. `docs/wire-format.md` is the reference.
mod code {
    pub(super) const IP: u64 = 0;
    pub(super) const IP_PARTIAL: u64 = 1;
    pub(super) const FLOW: u64 = 2;
    pub(super) const OPEN: u64 = 3;
    pub(super) const OPEN_EMPTY: u64 = 4;
    pub(super) const CONFIRMED: u64 = 5;
    pub(super) const REFUSED: u64 = 6;
    pub(super) const UNKNOWN: u64 = 7;
    pub(super) const CLOSED: u64 = 8;
    pub(super) const TARGET: u64 = 9;
    pub(super) const PIECE: u64 = 10;
    pub(super) const REPORT: u64 = 11;
    pub(super) const NUMBERED: u64 = 12;
    pub(super) const REPAIR: u64 = 13;
    pub(super) const ASK: u64 = 14;
    pub(super) const OPEN_CLIENT: u64 = 15;
    pub(super) const OPEN_EMPTY_CLIENT: u64 = 16;
    pub(super) const COPIED: u64 = 17;
}

/// The context of a [`Report`](crate::report::Report), as every agent writes it.
pub const REPORT: u8 = code::REPORT as u8;

/// Bytes of a numbered payload's number and distance, which have a fixed width: payloads of one size stay so.
pub const NUMBER_BYTES: usize = 4 + 2;

/// Bytes of the series and number of a payload that travels on two lines.
pub const SERIES_BYTES: usize = 4 + 4;

/// The most bytes that precede the frame in a numbered payload: context, stream, number and distance.
pub const MOST_NUMBERED: usize = 1 + 2 + NUMBER_BYTES;

/// Bytes of a repair's own header.
pub const REPAIR_HEADER_BYTES: usize = 8;

/// Bytes of one request for missing payloads.
pub const ASK_BYTES: usize = 7;

/// The bytes that a repair symbol and what precedes it have more than the longest frame that it covers: context, stream, header,
/// length, and the distance of a numbered payload. So much is left free in packets whose payloads are repaired.
pub const REPAIR_OVERHEAD: usize = 1 + 2 + REPAIR_HEADER_BYTES + 2 + 2;

/// A flow's number, unique within one instance of its opener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowNumber(pub u64);

/// A service's number, as the hello of the agent that offers it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceNumber(pub u32);

/// The reason why the receiver of an opening refused its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The receiver offers no service with this number.
    UnknownService,
    /// The peer may not use it.
    NotAllowed,
    /// A ceiling is reached; later attempts may succeed.
    Limit,
    /// The service's socket could not be opened.
    Upstream,
    /// A reason that this version does not know.
    Other(u64),
}

impl Refusal {
    /// The number of this reason on the wire.
    #[must_use]
    pub const fn code(self) -> u64 {
        match self {
            Self::UnknownService => 1,
            Self::NotAllowed => 2,
            Self::Limit => 3,
            Self::Upstream => 4,
            Self::Other(code) => code,
        }
    }

    /// The refusal of a number on the wire.
    #[must_use]
    pub fn from_code(code: u64) -> Self {
        let known = [Self::UnknownService, Self::NotAllowed, Self::Limit, Self::Upstream];
        known.into_iter().find(|refusal| refusal.code() == code).unwrap_or(Self::Other(code))
    }

    /// Whether a later attempt can succeed without either end's configuration changing.
    #[must_use]
    pub const fn is_temporary(self) -> bool {
        match self {
            Self::Limit | Self::Upstream => true,
            Self::UnknownService | Self::NotAllowed | Self::Other(_) => false,
        }
    }
}

/// Who takes the content of a DATAGRAM frame, as its first byte says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadKind<'a> {
    /// An IP packet: all that follows the byte.
    Packet {
        /// Whether its checksum is partial, as in [`Context::Packet`].
        partial: bool,
        /// The IP packet, from its header to its end.
        packet: &'a [u8],
    },
    /// The fields of a [`Report`](crate::report::Report) about the lane that carries it.
    Report(&'a [u8]),
    /// A payload that is repaired, or what repairs others.
    Repair,
    /// A payload that travels on two lines.
    Copied,
    /// What [`Context::decode`] has to tell: about a flow, not known, malformed, or a context in more bytes than it needs.
    Other,
}

impl<'a> PayloadKind<'a> {
    /// The kind of the frame with this data.
    #[inline]
    #[must_use]
    pub fn of(frame: &'a [u8]) -> Self {
        let Some((&context, rest)) = frame.split_first() else { return Self::Other };
        match u64::from(context) {
            code::IP => Self::Packet { partial: false, packet: rest },
            code::IP_PARTIAL => Self::Packet { partial: true, packet: rest },
            code::REPORT => Self::Report(rest),
            code::NUMBERED | code::REPAIR | code::ASK => Self::Repair,
            code::COPIED => Self::Copied,
            _ => Self::Other,
        }
    }
}

/// The content of one DATAGRAM frame. A payload starts at `payload_at` within the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// An IP packet, with its headers.
    Packet {
        /// Whether its L4 checksum is partial: the field holds the sum over the pseudo-header, as virtio has it.
        partial: bool,
        /// Offset of the packet, in bytes from the start of the frame's data.
        payload_at: usize,
    },
    /// A datagram of a flow that both ends know.
    Flow {
        /// The flow that the datagram belongs to.
        number: FlowNumber,
        /// Offset of the payload, in bytes from the start of the frame's data.
        payload_at: usize,
    },
    /// A datagram that opens its flow; the opener repeats this form until the flow is confirmed.
    Open {
        /// The flow that the datagram opens.
        number: FlowNumber,
        /// The receiver's service that the flow leads to.
        service: ServiceNumber,
        /// Whose flow it is, if the service wants to know.
        client: Option<ClientAddresses>,
        /// Offset of the payload, in bytes from the start of the frame's data.
        payload_at: usize,
    },
    /// Opens a flow without a datagram, because the datagram that waits fits only the shorter form.
    OpenEmpty {
        /// The number of the flow to open.
        number: FlowNumber,
        /// The receiver's service that the flow leads to.
        service: ServiceNumber,
        /// Whose flow it is, if the service wants to know.
        client: Option<ClientAddresses>,
    },
    /// The receiver of an opening knows the flow now.
    Confirmed(FlowNumber),
    /// The receiver of an opening does not accept it.
    Refused(FlowNumber, Refusal),
    /// The receiver of a datagram does not know its flow: the opener opens it again.
    Unknown(FlowNumber),
    /// The sender has forgotten the flow.
    Closed(FlowNumber),
    /// A piece of a datagram that fits into no packet, of a flow that both ends know.
    Piece {
        /// The flow that the datagram belongs to.
        number: FlowNumber,
        /// The number of the datagram within the flow, below [`DATAGRAM_NUMBERS`].
        datagram: u32,
        /// Bytes of the whole datagram, 1 to [`MOST_DATAGRAM`].
        total: u16,
        /// The offset of the piece within the datagram; below `total`.
        offset: u16,
        /// Offset of the piece's bytes, in bytes from the start of the frame's data.
        payload_at: usize,
    },
    /// A [`Report`](crate::report::Report) about the lane that carries it.
    Report {
        /// Offset of its fields, in bytes from the start of the frame's data.
        payload_at: usize,
    },
    /// A payload that is repaired if it is lost: its number, and the frame that would travel without it.
    Numbered {
        /// The stream in which the payload has its number.
        stream: StreamNumber,
        /// The payload's number on this opening of the lane, modulo 2^32.
        number: u32,
        /// The distance to the number of the previous payload of its flow; 0 if there is none near enough.
        distance: u16,
        /// Offset of the frame inside, in bytes from the start of this frame's data.
        payload_at: usize,
    },
    /// A repair symbol, from which a receiver makes up for lost payloads.
    Repair {
        /// The stream of numbers whose payloads it covers.
        stream: StreamNumber,
        /// Which payloads it covers, and how: the Repair FEC Payload ID of RFC 8681 §4.1.3.
        header: [u8; REPAIR_HEADER_BYTES],
        /// Offset of the symbol, in bytes from the start of the frame's data.
        payload_at: usize,
    },
    /// Requests for payloads that are missing.
    Ask {
        /// The stream of numbers, which the far end of this lane numbers.
        stream: StreamNumber,
        /// Offset of the requests, of [`ASK_BYTES`] each.
        payload_at: usize,
    },
    /// A payload that travels on two lines, and is delivered once.
    Copied {
        /// The numbering that `number` belongs to, which the sender has chosen by chance.
        series: u32,
        /// The number of the payload, the same in both frames that carry it, modulo 2^32.
        number: u32,
        /// Offset of the frame inside, in bytes from the start of this frame's data.
        payload_at: usize,
    },
    /// A context that is reserved or not known; its number.
    Unsupported(u64),
}

base::labelled! {
    /// The kind of a message about a flow.
    #[expect(missing_docs, reason = "the other kinds have the names of the contexts")]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum FlowMessage {
        /// Opens a flow, as [`Context::OpenEmpty`] says.
        Open => "open",
        Confirmed => "confirmed",
        Refused => "refused",
        Unknown => "unknown",
        Closed => "closed",
    }
}

impl Context {
    /// The flow that it is about; `None` of a context that this version does not know.
    #[inline]
    #[must_use]
    pub const fn flow(&self) -> Option<FlowNumber> {
        self.facts().flow
    }

    /// Whether it makes a flow where none is.
    #[must_use]
    pub const fn opens(&self) -> bool {
        self.facts().opens
    }

    /// The offset at which its datagram starts, if the frame holds the start: of a datagram in pieces, that is the piece with
    /// offset 0. A context that this version does not know counts as a complete datagram, and a numbered payload as the frame
    /// inside, which is not looked at here.
    #[must_use]
    pub const fn payload_at(&self) -> Option<usize> {
        self.facts().payload_at
    }

    /// The kind of this message about a flow; `None` for datagrams.
    #[must_use]
    pub const fn flow_message(&self) -> Option<FlowMessage> {
        self.facts().message
    }

    #[inline]
    const fn facts(&self) -> Facts {
        let none = Facts { flow: None, opens: false, payload_at: None, message: None };
        match *self {
            Self::Packet { payload_at, .. } => Facts { payload_at: Some(payload_at), ..none },
            Self::Flow { number, payload_at } | Self::Piece { number, payload_at, offset: 0, .. } => {
                Facts { flow: Some(number), payload_at: Some(payload_at), ..none }
            }
            Self::Piece { number, .. } => Facts { flow: Some(number), ..none },
            Self::Open { number, payload_at, .. } => {
                Facts { flow: Some(number), opens: true, payload_at: Some(payload_at), ..none }
            }
            Self::OpenEmpty { number, .. } => {
                Facts { flow: Some(number), opens: true, message: Some(FlowMessage::Open), ..none }
            }
            Self::Confirmed(number) => {
                Facts { flow: Some(number), message: Some(FlowMessage::Confirmed), ..none }
            }
            Self::Refused(number, _) => {
                Facts { flow: Some(number), message: Some(FlowMessage::Refused), ..none }
            }
            Self::Unknown(number) => {
                Facts { flow: Some(number), message: Some(FlowMessage::Unknown), ..none }
            }
            Self::Closed(number) => Facts { flow: Some(number), message: Some(FlowMessage::Closed), ..none },
            Self::Unsupported(_) => Facts { payload_at: Some(0), ..none },
            Self::Report { .. }
            | Self::Numbered { .. }
            | Self::Repair { .. }
            | Self::Ask { .. }
            | Self::Copied { .. } => none,
        }
    }

    /// Reads a frame's data; `None` if a varint is cut off, a field is out of its range, or the fields are followed by bytes
    /// that belong to no field.
    #[must_use]
    pub fn decode(data: &[u8]) -> Option<Self> {
        let mut fields = Reader::new(data);
        let at = |fields: &Reader<'_>| data.len() - fields.rest().len();
        let fields = &mut fields;
        let context = match fields.varint()? {
            code::IP => return Some(Self::Packet { partial: false, payload_at: at(fields) }),
            code::IP_PARTIAL => return Some(Self::Packet { partial: true, payload_at: at(fields) }),
            code::FLOW => {
                let number = flow(fields)?;
                return Some(Self::Flow { number, payload_at: at(fields) });
            }
            code @ (code::OPEN | code::OPEN_CLIENT) => {
                let (number, service) = (flow(fields)?, service(fields)?);
                let client = if code == code::OPEN { None } else { Some(client(fields)?) };
                return Some(Self::Open { number, service, client, payload_at: at(fields) });
            }
            code::PIECE => {
                let (number, datagram) = (flow(fields)?, below(fields, DATAGRAM_NUMBERS.into())?);
                let total = below(fields, MOST_DATAGRAM as u64 + 1)?;
                let offset = below(fields, u64::from(total))?;
                return Some(Self::Piece { number, datagram, total, offset, payload_at: at(fields) });
            }
            code::REPORT => return Some(Self::Report { payload_at: at(fields) }),
            code::NUMBERED => {
                let stream = stream(fields)?;
                let rest = fields.rest();
                let (&[n0, n1, n2, n3, d0, d1], _) = rest.split_first_chunk()?;
                let (number, distance) = (u32::from_be_bytes([n0, n1, n2, n3]), u16::from_be_bytes([d0, d1]));
                return Some(Self::Numbered {
                    stream,
                    number,
                    distance,
                    payload_at: at(fields) + NUMBER_BYTES,
                });
            }
            code::REPAIR => {
                let stream = stream(fields)?;
                let (&header, _) = fields.rest().split_first_chunk()?;
                return Some(Self::Repair { stream, header, payload_at: at(fields) + REPAIR_HEADER_BYTES });
            }
            code::ASK => {
                let stream = stream(fields)?;
                let whole = fields.rest().len().is_multiple_of(ASK_BYTES) && !fields.rest().is_empty();
                return whole.then(|| Self::Ask { stream, payload_at: at(fields) });
            }
            code::COPIED => {
                let (&[s0, s1, s2, s3, n0, n1, n2, n3], _) = fields.rest().split_first_chunk()?;
                let [series, number] = [[s0, s1, s2, s3], [n0, n1, n2, n3]].map(u32::from_be_bytes);
                return Some(Self::Copied { series, number, payload_at: at(fields) + SERIES_BYTES });
            }
            code::OPEN_EMPTY => {
                Self::OpenEmpty { number: flow(fields)?, service: service(fields)?, client: None }
            }
            code::OPEN_EMPTY_CLIENT => Self::OpenEmpty {
                number: flow(fields)?,
                service: service(fields)?,
                client: Some(client(fields)?),
            },
            code::CONFIRMED => Self::Confirmed(flow(fields)?),
            code::REFUSED => Self::Refused(flow(fields)?, Refusal::from_code(fields.varint()?)),
            code::UNKNOWN => Self::Unknown(flow(fields)?),
            code::CLOSED => Self::Closed(flow(fields)?),
            reserved @ code::TARGET => return Some(Self::Unsupported(reserved)),
            unknown => return Some(Self::Unsupported(unknown)),
        };
        fields.is_empty().then_some(context)
    }

    /// Writes the context and its fields, without a payload.
    #[must_use]
    pub fn encode(&self) -> Header {
        match *self {
            Self::Packet { partial: false, .. } => Header::of([code::IP]),
            Self::Packet { partial: true, .. } => Header::of([code::IP_PARTIAL]),
            Self::Flow { number, .. } => Header::of([code::FLOW, number.0]),
            Self::Piece { number, datagram, total, offset, .. } => {
                Header::of([code::PIECE, number.0, datagram.into(), total.into(), offset.into()])
            }
            Self::Open { number, service, client: None, .. } => {
                Header::of([code::OPEN, number.0, service.0.into()])
            }
            Self::Open { number, service, client: Some(client), .. } => {
                Header::of([code::OPEN_CLIENT, number.0, service.0.into()])
                    .followed_by(client.encode().as_slice())
            }
            Self::OpenEmpty { number, service, client: None } => {
                Header::of([code::OPEN_EMPTY, number.0, service.0.into()])
            }
            Self::OpenEmpty { number, service, client: Some(client) } => {
                Header::of([code::OPEN_EMPTY_CLIENT, number.0, service.0.into()])
                    .followed_by(client.encode().as_slice())
            }
            Self::Confirmed(number) => Header::of([code::CONFIRMED, number.0]),
            Self::Refused(number, refusal) => Header::of([code::REFUSED, number.0, refusal.code()]),
            Self::Unknown(number) => Header::of([code::UNKNOWN, number.0]),
            Self::Closed(number) => Header::of([code::CLOSED, number.0]),
            Self::Report { .. } => Header::of([code::REPORT]),
            Self::Numbered { stream, number, distance, .. } => {
                let [n0, n1, n2, n3] = number.to_be_bytes();
                let [d0, d1] = distance.to_be_bytes();
                Header::of([code::NUMBERED, stream.0.into()]).followed_by(&[n0, n1, n2, n3, d0, d1])
            }
            Self::Repair { stream, header, .. } => {
                Header::of([code::REPAIR, stream.0.into()]).followed_by(&header)
            }
            Self::Ask { stream, .. } => Header::of([code::ASK, stream.0.into()]),
            Self::Copied { series, number, .. } => {
                let [[s0, s1, s2, s3], [n0, n1, n2, n3]] = [series, number].map(u32::to_be_bytes);
                Header::of([code::COPIED]).followed_by(&[s0, s1, s2, s3, n0, n1, n2, n3])
            }
            Self::Unsupported(number) => Header::of([number]),
        }
    }
}

/// What holds for a context; see the methods of [`Context`] with these names.
struct Facts {
    flow: Option<FlowNumber>,
    opens: bool,
    payload_at: Option<usize>,
    message: Option<FlowMessage>,
}

/// An encoded context: at most 54 bytes, on the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    bytes: [u8; Self::CAPACITY],
    len: u8,
}

impl Default for Header {
    fn default() -> Self {
        Self { bytes: [0; Self::CAPACITY], len: 0 }
    }
}

impl Header {
    /// Varints of 1, 8 and 8 bytes and a client's addresses. A piece's are of 1, 8, 4, 4 and 4.
    pub const CAPACITY: usize = 1 + 8 + 8 + ClientAddresses::MOST_ENCODED;

    /// The bytes to put before the payload.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The encoding of these numbers, one after the other.
    fn of<const N: usize>(numbers: [u64; N]) -> Self {
        let mut header = Self::default();
        for number in numbers {
            // Numbers come from counters and from decoded varints, so they are within the varint's range.
            let written = varint::write(&mut header.bytes[usize::from(header.len)..], number);
            debug_assert!(written.is_some(), "{number} has an encoding, for which there is room");
            header.len += written.unwrap_or(0) as u8;
        }
        header
    }

    /// The headers of both, this one before `inner`; `None` if that is too long.
    #[must_use]
    pub fn before(self, inner: &Self) -> Option<Self> {
        let fits = usize::from(self.len + inner.len) <= Self::CAPACITY;
        fits.then(|| self.followed_by(inner.as_slice()))
    }

    /// The same with these bytes behind it, for which the caller knows that there is room.
    fn followed_by(mut self, bytes: &[u8]) -> Self {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len() as u8;
        self
    }
}

/// A varint that is less than `bound`.
fn below<T: TryFrom<u64>>(reader: &mut Reader<'_>, bound: u64) -> Option<T> {
    T::try_from(reader.varint().filter(|value| *value < bound)?).ok()
}

fn flow(reader: &mut Reader<'_>) -> Option<FlowNumber> {
    reader.varint().map(FlowNumber)
}

fn client(reader: &mut Reader<'_>) -> Option<ClientAddresses> {
    let (client, length) = ClientAddresses::decode(reader.rest())?;
    reader.take(length)?;
    Some(client)
}

fn stream(reader: &mut Reader<'_>) -> Option<StreamNumber> {
    below(reader, StreamNumber::END.into()).map(StreamNumber)
}

fn service(reader: &mut Reader<'_>) -> Option<ServiceNumber> {
    u32::try_from(reader.varint()?).ok().map(ServiceNumber)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use crate::{context::*, report::Report};

    fn contexts() -> impl Strategy<Value = Context> {
        let number = (0..=varint::MAX).prop_map(FlowNumber);
        let service = any::<u32>().prop_map(ServiceNumber);
        prop_oneof![
            any::<bool>().prop_map(|partial| Context::Packet { partial, payload_at: 0 }),
            number.clone().prop_map(|number| Context::Flow { number, payload_at: 0 }),
            (number.clone(), service.clone(), clients()).prop_map(|(number, service, client)| {
                Context::Open { number, service, client, payload_at: 0 }
            }),
            (number.clone(), service, clients()).prop_map(|(number, service, client)| Context::OpenEmpty {
                number,
                service,
                client
            }),
            number.clone().prop_map(Context::Confirmed),
            (number.clone(), 0..=varint::MAX)
                .prop_map(|(number, code)| Context::Refused(number, Refusal::from_code(code))),
            number.clone().prop_map(Context::Unknown),
            number.clone().prop_map(Context::Closed),
            Just(Context::Report { payload_at: 0 }),
            (streams(), any::<u32>(), any::<u16>()).prop_map(|(stream, number, distance)| {
                Context::Numbered { stream, number, distance, payload_at: 0 }
            }),
            (streams(), any::<[u8; REPAIR_HEADER_BYTES]>()).prop_map(|(stream, header)| Context::Repair {
                stream,
                header,
                payload_at: 0
            }),
            (any::<u32>(), any::<u32>()).prop_map(|(series, number)| Context::Copied {
                series,
                number,
                payload_at: 0
            }),
            (number, 0..DATAGRAM_NUMBERS, 1..=MOST_DATAGRAM, any::<proptest::sample::Index>()).prop_map(
                |(number, datagram, total, offset)| {
                    let [total, offset] = [total, offset.index(total)].map(|at| u16::try_from(at).unwrap());
                    Context::Piece { number, datagram, total, offset, payload_at: 0 }
                }
            ),
        ]
    }

    fn clients() -> impl Strategy<Value = Option<ClientAddresses>> {
        (any::<[SocketAddr; 2]>()).prop_map(|[source, destination]| ClientAddresses::new(source, destination))
    }

    fn streams() -> impl Strategy<Value = StreamNumber> {
        (0..StreamNumber::END).prop_map(StreamNumber)
    }

    fn at_header_end(context: Context, len: usize) -> Context {
        match context {
            Context::Packet { partial, .. } => Context::Packet { partial, payload_at: len },
            Context::Flow { number, .. } => Context::Flow { number, payload_at: len },
            Context::Piece { number, datagram, total, offset, .. } => {
                Context::Piece { number, datagram, total, offset, payload_at: len }
            }
            Context::Open { number, service, client, .. } => {
                Context::Open { number, service, client, payload_at: len }
            }
            Context::Report { .. } => Context::Report { payload_at: len },
            Context::Numbered { stream, number, distance, .. } => {
                Context::Numbered { stream, number, distance, payload_at: len }
            }
            Context::Repair { stream, header, .. } => Context::Repair { stream, header, payload_at: len },
            Context::Ask { stream, .. } => Context::Ask { stream, payload_at: len },
            Context::Copied { series, number, .. } => Context::Copied { series, number, payload_at: len },
            other @ (Context::OpenEmpty { .. }
            | Context::Confirmed(_)
            | Context::Refused(..)
            | Context::Unknown(_)
            | Context::Closed(_)
            | Context::Unsupported(_)) => other,
        }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(context in contexts()) {
            let header = context.encode();
            let expected = at_header_end(context, header.as_slice().len());
            prop_assert_eq!(Context::decode(header.as_slice()), Some(expected));
        }

        #[test]
        fn a_cut_header_is_malformed(context in contexts()) {
            let header = context.encode();
            for len in 0..header.as_slice().len() {
                prop_assert_eq!(Context::decode(&header.as_slice()[..len]), None);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(data in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(Context::Flow { payload_at, .. } | Context::Open { payload_at, .. }) = Context::decode(&data) {
                prop_assert!(payload_at <= data.len());
            }
        }
    }

    proptest! {
        #[test]
        fn the_kind_of_a_frame_is_that_of_its_context(context in contexts(), payload in any::<[u8; 4]>()) {
            let frame = [context.encode().as_slice(), &payload].concat();
            let (kind, rest) = (PayloadKind::of(&frame), &frame[1..]);
            prop_assert_eq!(kind, match context {
                Context::Packet { partial, .. } => PayloadKind::Packet { partial, packet: rest },
                Context::Report { .. } => PayloadKind::Report(rest),
                Context::Numbered { .. } | Context::Repair { .. } | Context::Ask { .. } => PayloadKind::Repair,
                Context::Copied { .. } => PayloadKind::Copied,
                Context::Flow { .. }
                | Context::Open { .. }
                | Context::OpenEmpty { .. }
                | Context::Confirmed(_)
                | Context::Refused(..)
                | Context::Unknown(_)
                | Context::Closed(_)
                | Context::Piece { .. }
                | Context::Unsupported(_) => PayloadKind::Other,
            });
        }
    }

    #[test]
    fn what_travels_on_two_lines_has_a_number_before_it() {
        let flow = Context::Flow { number: FlowNumber(300), payload_at: 0 };
        let copied = Context::Copied { series: 0x0102_0304, number: 300, payload_at: 9 };
        assert_eq!(copied.encode().as_slice(), [17, 1, 2, 3, 4, 0, 0, 1, 0x2c]);
        assert_eq!(Context::decode(&[17, 1, 2, 3, 4, 0, 0, 1, 0x2c, 2, 2, 0x68, 0x69]), Some(copied));
        assert_eq!(copied.encode().before(&flow.encode()).map(|header| header.as_slice().len()), Some(12));
        let open = |client| Context::Open {
            number: FlowNumber(varint::MAX),
            service: ServiceNumber(1),
            payload_at: 0,
            client,
        };
        assert_eq!(
            copied.encode().before(&open(None).encode()).map(|header| header.as_slice().len()),
            Some(19)
        );
        let v6: SocketAddr = "[2001:db8::9]:4660".parse().unwrap();
        let named = open(ClientAddresses::new(v6, v6));
        assert_eq!(copied.encode().before(&named.encode()), None, "a header has room for 54 bytes");
    }

    #[test]
    fn the_bytes_on_the_wire_are_those_of_the_document() {
        // docs/wire-format.md gives these examples.
        let (number, service) = (FlowNumber(2), ServiceNumber(1));
        let open = Context::Open { number, service, client: None, payload_at: 0 };
        assert_eq!(open.encode().as_slice(), [3, 2, 1]);
        let client = |source: &str, destination: &str| {
            ClientAddresses::new(source.parse().unwrap(), destination.parse().unwrap())
        };
        let v4 = client("192.0.2.9:4660", "198.51.100.2:53");
        let addresses = [192, 0, 2, 9, 198, 51, 100, 2, 0x12, 0x34, 0, 53];
        let bytes = [&[15, 2, 1, 4][..], &addresses].concat();
        let open = Context::Open { number, service, client: v4, payload_at: 16 };
        assert_eq!((open.encode().as_slice(), Context::decode(&bytes)), (&bytes[..], Some(open)));
        let bytes = [&[16, 2, 1, 4][..], &addresses].concat();
        let open = Context::OpenEmpty { number, service, client: v4 };
        assert_eq!((open.encode().as_slice(), Context::decode(&bytes)), (&bytes[..], Some(open)));
        assert_eq!(Context::decode(&[&bytes[..], &[0]].concat()), None, "it has no payload");
        let open =
            Context::Open { number, service, client: client("[2001:db8::9]:1", "[::1]:2"), payload_at: 40 };
        assert_eq!(Context::decode(open.encode().as_slice()), Some(open));
        let flow = Context::Flow { number: FlowNumber(300), payload_at: 0 };
        assert_eq!(flow.encode().as_slice(), [2, 0x41, 0x2c]);
        assert_eq!(Context::decode(&[9, 1, 2, 3]), Some(Context::Unsupported(9)));
        assert_eq!(Context::decode(&[0, 0x45]), Some(Context::Packet { partial: false, payload_at: 1 }));
        assert_eq!(Context::decode(&[1]), Some(Context::Packet { partial: true, payload_at: 1 }));
        assert_eq!(Context::decode(&[5, 2, 0]), None, "a confirmation has no payload");
        let piece = |offset, payload_at| Context::Piece {
            number: FlowNumber(2),
            datagram: 7,
            total: 3000,
            offset,
            payload_at,
        };
        let header = [0x0a, 2, 7, 0x4b, 0xb8, 0x44, 0xd2];
        assert_eq!(piece(1234, 0).encode().as_slice(), header);
        assert_eq!(Context::decode(&[&header[..], b"abc"].concat()), Some(piece(1234, 7)));
        assert_eq!(piece(0, 0).encode().as_slice(), [0x0a, 2, 7, 0x4b, 0xb8, 0]);
        let report = Report {
            highest: 70_000,
            arrived_micros: 5_000_000,
            packets: 69_950,
            bytes: 100_000_000,
            marked: 3,
        };
        let bytes =
            [11, 0x80, 1, 0x11, 0x70, 0x80, 0x4c, 0x4b, 0x40, 0x80, 1, 0x11, 0x3e, 0x85, 0xf5, 0xe1, 0, 3];
        assert_eq!(Context::decode(&bytes), Some(Context::Report { payload_at: 1 }));
        assert_eq!(Report::decode(&bytes[1..]), Some(report));
        let mut encoded = [REPORT; 18];
        assert_eq!((report.encode(&mut encoded[1..]), encoded), (Some(17), bytes));
        let numbered = Context::Numbered { stream: StreamNumber(3), number: 300, distance: 2, payload_at: 8 };
        assert_eq!(numbered.encode().as_slice(), [12, 3, 0, 0, 1, 0x2c, 0, 2]);
        assert_eq!(Context::decode(&[12, 3, 0, 0, 1, 0x2c, 0, 2, 2, 2, 0x61]), Some(numbered));
        let header = [0xab, 0xcd, 0xf0, 64, 0, 0, 1, 0];
        let repair = Context::Repair { stream: StreamNumber(3), header, payload_at: 10 };
        assert_eq!(repair.encode().as_slice(), [13, 3, 0xab, 0xcd, 0xf0, 64, 0, 0, 1, 0]);
        assert_eq!(Context::decode(&[13, 3, 0xab, 0xcd, 0xf0, 64, 0, 0, 1, 0, 9, 9]), Some(repair));
        let ask = Context::Ask { stream: StreamNumber(3), payload_at: 2 };
        assert_eq!(ask.encode().as_slice(), [14, 3]);
        assert_eq!(PayloadKind::of(&[14, 3]), PayloadKind::Repair);
        assert_eq!([&[][..], &[0x40, 0]].map(PayloadKind::of), [PayloadKind::Other; 2]);
        assert_eq!(Context::decode(&[14, 3, 0, 0, 1, 0x2c, 0, 2, 0x81]), Some(ask));
        let number = FlowNumber(2);
        let refused = |reason| Context::Refused(number, reason);
        for (context, bytes) in [
            (Context::OpenEmpty { number, service, client: None }, &[4, 2, 1][..]),
            (Context::Confirmed(number), &[5, 2]),
            (refused(Refusal::UnknownService), &[6, 2, 1]),
            (refused(Refusal::NotAllowed), &[6, 2, 2]),
            (refused(Refusal::Limit), &[6, 2, 3]),
            (refused(Refusal::Upstream), &[6, 2, 4]),
            (Context::Unknown(number), &[7, 2]),
            (Context::Closed(number), &[8, 2]),
        ] {
            assert_eq!((context.encode().as_slice(), Context::decode(bytes)), (bytes, Some(context)));
        }
        // A total of 0, an offset at the end, a total above the largest, a datagram number of 2^30.
        // A number that is cut off, a stream of 2^14, no request, and half of one.
        // A client of no family, one that is cut off, and IPv4 in the form of IPv6.
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
        let mapped = [&[15, 2, 1, 6][..], &mapped, &mapped, &[0, 1, 0, 2]].concat();
        let wrong: [&[u8]; 12] = [
            &mapped,
            &[15, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[16, 2, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[17, 1, 2, 3, 4, 0, 0, 1],
            &[12, 3, 0, 0, 1, 0x2c, 0],
            &[12, 0x80, 0, 0x40, 0, 0, 0, 0, 0, 0, 0],
            &[14, 3],
            &[14, 3, 0, 0, 1],
            &[10, 2, 7, 0, 0],
            &[10, 2, 7, 9, 9],
            &[10, 2, 7, 0x80, 0, 0xff, 0xe4, 0],
            &[10, 2, 0xc0, 0, 0, 0, 0x40, 0, 0, 0, 9, 0],
        ];
        for header in wrong {
            assert_eq!(Context::decode(header), None, "{header:02x?}");
        }
    }
}

//! The control messages that an attacker writes and reads, by the numbers of `docs/culvert.proto`.

use std::sync::LazyLock;

use super::{
    payload::put_varint,
    protobuf::{Field, Message, Service, fields},
};

/// A message from the agent that matters to an attacker.
#[derive(Debug)]
pub(crate) enum Incoming {
    Hello {
        services: Vec<Service>,
    },
    LaneOpen {
        lane: u64,
        epoch: u64,
    },
    LaneAccept {
        lane: u64,
        epoch: u64,
        connection_id: [u8; 8],
    },
    /// A lane was closed, or never opened.
    LaneClose {
        lane: u64,
    },
    Other,
}

impl Incoming {
    /// Reads an Envelope.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let Some((kind, Field::Bytes(body))) = fields(bytes).and_then(|mut fields| fields.pop()) else {
            return Self::Other;
        };
        let fields = fields(&body).unwrap_or_default();
        let number = |wanted| {
            let found = fields.iter().find_map(|field| match field {
                (field, Field::Number(value)) if *field == wanted => Some(*value),
                _ => None,
            });
            found.unwrap_or(0)
        };
        match kind {
            1 => Self::Hello { services: services(&fields) },
            2 => Self::LaneOpen { lane: number(1), epoch: number(2) },
            3 => {
                let connection_id = fields.iter().find_map(|field| match field {
                    (3, Field::Bytes(bytes)) => bytes.as_slice().try_into().ok(),
                    _ => None,
                });
                let accepted =
                    |connection_id| Self::LaneAccept { lane: number(1), epoch: number(2), connection_id };
                connection_id.map_or(Self::Other, accepted)
            }
            4 | 5 => Self::LaneClose { lane: number(1) },
            _ => Self::Other,
        }
    }
}

/// The services of a `Hello`.
fn services(hello: &[(u64, Field)]) -> Vec<Service> {
    let bodies = hello.iter().filter_map(|field| match field {
        (7, Field::Bytes(bytes)) => fields(bytes),
        _ => None,
    });
    let read = |body: Vec<(u64, Field)>| {
        let mut service = Service::default();
        for field in body {
            match field {
                (1, Field::Number(number)) => service.number = number,
                (2, Field::Bytes(name)) => service.name = String::from_utf8_lossy(&name).into_owned(),
                _ => (),
            }
        }
        service
    };
    bodies.map(read).collect()
}

/// An Envelope of `kind` with its length in front.
fn envelope(kind: u64, body: Message) -> Vec<u8> {
    framed(&Message::default().bytes(kind, &body.encode()).encode())
}

/// `message` with its length in front.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(message.len() + 8);
    put_varint(&mut out, message.len() as u64);
    out.extend(message);
    out
}

/// A proof of a preshared key.
pub(crate) type Proof = [u8; 16];

/// All that there are, to most of which the attacker does not keep.
const FEATURES: u64 = (1 << 14) - 1;

/// `Hello` with a service of ours whose payloads wait for missing ones as long as they may: its terms hold for what we send.
pub(crate) fn hello(instance: &[u8; 16], max_lanes: u64, possession: &[u8], proofs: &[Proof]) -> Vec<u8> {
    let hello = Message::default().number(1, 1).bytes(2, instance).bytes(3, b"hostile").number(4, 2);
    let hello = hello.number(5, max_lanes).number(6, 1472);
    let service =
        Message::default().number(1, 0).bytes(2, b"lure").number(3, 1).bytes(7, &waiting().encode());
    let hello = hello.bytes(7, &service.encode()).number(8, FEATURES).bytes(9, possession);
    envelope(1, proofs.iter().fold(hello, |hello, proof| hello.bytes(10, proof)))
}

/// Terms of repair by which payloads wait for missing ones, in order, as long as they may.
fn waiting() -> Message {
    Message::default().number(1, 1).number(2, 2_000).number(3, 1_000_000).number(4, 1)
}

/// `PacketRepair` by which our IP packets wait so.
pub(crate) fn packet_repair() -> Vec<u8> {
    envelope(14, waiting())
}

pub(crate) fn lane_open(
    lane: u64,
    epoch: u64,
    connection_id: &[u8; 8],
    preshared_key: Option<&Proof>,
) -> Vec<u8> {
    let open = Message::default().number(1, lane).number(2, epoch).bytes(3, connection_id);
    envelope(2, preshared_key.into_iter().fold(open, |open, proof| open.bytes(4, proof)))
}

/// `LaneOpen` of a lane that is alone on its line.
pub(crate) fn lane_open_on_line(lane: u64, epoch: u64, connection_id: &[u8; 8]) -> Vec<u8> {
    let open = Message::default().number(1, lane).number(2, epoch).bytes(3, connection_id);
    envelope(2, open.bytes(5, &line(1, epoch).encode()))
}

/// `LineState` that changes its mind with `turn`.
pub(crate) fn line_state(number: u64, turn: u64) -> Vec<u8> {
    let state = Message::default().number(1, number).number(2, turn % 2);
    envelope(20, if turn.is_multiple_of(3) { state.bytes(3, &line(0, turn).encode()) } else { state })
}

/// Terms of a line with so many lanes.
fn line(lanes: u64, turn: u64) -> Message {
    let rate = [0, 1, 1_000_000, u64::MAX][turn as usize % 4];
    let line = Message::default().number(1, lanes).number(2, rate).number(3, 1 + turn % 256);
    line.number(4, turn / 2 % 2).number(5, turn / 4 % 2)
}

/// `LaneAccept` under a connection ID that nobody has.
pub(crate) fn lane_accept(lane: u64, epoch: u64) -> Vec<u8> {
    let accept = Message::default().number(1, lane).number(2, epoch);
    envelope(3, accept.bytes(3, &rand::random::<[u8; 8]>()))
}

pub(crate) fn lane_refuse(lane: u64, epoch: u64, reason: u64) -> Vec<u8> {
    envelope(4, Message::default().number(1, lane).number(2, epoch).number(3, reason))
}

pub(crate) fn lane_close(lane: u64, epoch: u64, cause: u64) -> Vec<u8> {
    envelope(5, Message::default().number(1, lane).number(2, epoch).number(3, cause))
}

/// `Here`, as large as an honest one.
pub(crate) fn here() -> Vec<u8> {
    envelope(7, Message::default().bytes(1, &[0; 1_000]))
}

pub(crate) fn join(instance: &[u8; 16], session: &[u8; 16], number: u64, possession: &[u8]) -> Vec<u8> {
    let join = Message::default().bytes(1, instance).bytes(2, session);
    envelope(8, join.number(3, number).bytes(4, possession))
}

pub(crate) fn streams_wanted() -> Vec<u8> {
    envelope(10, Message::default())
}

pub(crate) fn release() -> Vec<u8> {
    envelope(11, Message::default())
}

pub(crate) fn receive_rate(bits_per_second: u64) -> Vec<u8> {
    envelope(12, Message::default().number(1, bits_per_second))
}

pub(crate) fn reports_wanted(wanted: bool) -> Vec<u8> {
    envelope(13, Message::default().number(1, wanted.into()))
}

pub(crate) fn preshared_keys(proofs: &[Proof]) -> Vec<u8> {
    envelope(15, proofs.iter().fold(Message::default(), |message, proof| message.bytes(1, proof)))
}

pub(crate) fn leave() -> Vec<u8> {
    envelope(17, Message::default())
}

/// Limit on the streams that a message names.
pub(crate) const STREAMS_IN_MESSAGE: usize = 256;

/// `StreamAbort` of streams and their bytes.
pub(crate) fn stream_abort(streams: &[(u64, u64)]) -> Vec<u8> {
    envelope(18, each(Message::default(), 1, streams))
}

/// `StreamCredit` with a limit of streams that begin, and of others.
pub(crate) fn stream_credit(initial: u64, limits: &[(u64, u64)]) -> Vec<u8> {
    envelope(19, each(Message::default().number(1, initial), 2, limits))
}

/// Pairs as two lists of numbers, the first one in `field`; they are not packed, which protobuf allows.
fn each(message: Message, field: u64, pairs: &[(u64, u64)]) -> Message {
    pairs
        .iter()
        .fold(message, |message, (stream, bytes)| message.number(field, *stream).number(field + 1, *bytes))
}

/// `ServicesChanged` with the one service `name`, or none.
pub(crate) fn services_changed(name: &str) -> Vec<u8> {
    let service = Message::default().number(1, 0).bytes(2, name.as_bytes()).number(3, 1);
    let list =
        if name.is_empty() { Message::default() } else { Message::default().bytes(1, &service.encode()) };
    envelope(6, list)
}

/// The kind after the last one that an Envelope may have.
static UNKNOWN: LazyLock<u64> = LazyLock::new(|| {
    let (_, kinds) = include_str!("../../../../docs/culvert.proto").split_once("oneof kind {").unwrap();
    let (kinds, _) = kinds.split_once('}').unwrap();
    let numbers =
        kinds.lines().filter_map(|line| line.split_once('=')?.1.split_once(';')?.0.trim().parse().ok());
    1 + numbers.max().unwrap_or(0_u64)
});

/// A message of a kind that nobody knows, with so many bytes inside.
pub(crate) fn unknown(bytes: usize) -> Vec<u8> {
    framed(&Message::default().bytes(*UNKNOWN, &vec![0; bytes]).encode())
}

/// `StreamOpen` for the service with this number.
pub(crate) fn stream_open(service: u64) -> Vec<u8> {
    framed(&Message::default().number(1, service).encode())
}

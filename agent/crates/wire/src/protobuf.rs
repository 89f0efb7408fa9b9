//! The protobuf mirror of `docs/culvert.proto`; `messages.rs` validates it into what the agent uses.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Envelope {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20")]
    pub kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Kind {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    LaneOpen(LaneOffer),
    #[prost(message, tag = "3")]
    LaneAccept(LaneOffer),
    #[prost(message, tag = "4")]
    LaneRefuse(LaneEnd),
    #[prost(message, tag = "5")]
    LaneClose(LaneEnd),
    #[prost(message, tag = "6")]
    ServicesChanged(ServicesChanged),
    #[prost(message, tag = "7")]
    Here(Here),
    #[prost(message, tag = "8")]
    Join(Join),
    #[prost(message, tag = "9")]
    Joined(Nothing),
    #[prost(message, tag = "10")]
    StreamsWanted(Nothing),
    #[prost(message, tag = "11")]
    Release(Nothing),
    #[prost(message, tag = "12")]
    ReceiveRate(ReceiveRate),
    #[prost(message, tag = "13")]
    ReportsWanted(ReportsWanted),
    #[prost(message, tag = "14")]
    PacketRepair(Repair),
    #[prost(message, tag = "15")]
    PresharedKeys(PresharedKeys),
    #[prost(message, tag = "17")]
    Leave(Nothing),
    #[prost(message, tag = "18")]
    StreamAbort(StreamAbort),
    #[prost(message, tag = "19")]
    StreamCredit(StreamCredit),
    #[prost(message, tag = "20")]
    LineState(LineState),
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct LineState {
    #[prost(uint32, tag = "1")]
    pub line: u32,
    #[prost(bool, tag = "2")]
    pub unheard: bool,
    /// Its `lanes` means nothing.
    #[prost(message, optional, tag = "3")]
    pub terms: Option<Line>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StreamCredit {
    #[prost(uint64, tag = "1")]
    pub initial: u64,
    #[prost(uint64, repeated, tag = "2")]
    pub streams: Vec<u64>,
    #[prost(uint64, repeated, tag = "3")]
    pub limits: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StreamAbort {
    #[prost(uint64, repeated, tag = "1")]
    pub streams: Vec<u64>,
    #[prost(uint64, repeated, tag = "2")]
    pub bytes: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PresharedKeys {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub proofs: Vec<Vec<u8>>,
}

/// `PacketRepair`, and how a service is repaired.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct Repair {
    /// An enum on the wire; kept a plain number, because a later version may know more values.
    #[prost(int32, tag = "1")]
    pub mode: i32,
    #[prost(uint32, tag = "2")]
    pub deadline_ms: u32,
    #[prost(uint32, tag = "3")]
    pub max_overhead_ppm: u32,
    #[prost(bool, tag = "4")]
    pub hold: bool,
    #[prost(bool, tag = "5")]
    pub path_deadline: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ReceiveRate {
    #[prost(uint64, tag = "1")]
    pub bits_per_second: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ReportsWanted {
    #[prost(bool, tag = "1")]
    pub wanted: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Join {
    #[prost(bytes = "vec", tag = "1")]
    pub instance: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub session: Vec<u8>,
    #[prost(uint32, tag = "3")]
    pub number: u32,
    #[prost(bytes = "vec", tag = "4")]
    pub possession: Vec<u8>,
}

/// A message that has no fields.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Here {
    #[prost(bytes = "vec", tag = "1")]
    pub padding: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Hello {
    #[prost(uint32, tag = "1")]
    pub protocol_version: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub instance: Vec<u8>,
    #[prost(string, tag = "3")]
    pub software: String,
    #[prost(uint32, tag = "4")]
    pub workers: u32,
    #[prost(uint32, tag = "5")]
    pub max_lanes: u32,
    #[prost(uint32, tag = "6")]
    pub max_datagram_packet: u32,
    #[prost(message, repeated, tag = "7")]
    pub services: Vec<Service>,
    #[prost(uint64, tag = "8")]
    pub features: u64,
    #[prost(bytes = "vec", tag = "9")]
    pub possession: Vec<u8>,
    #[prost(bytes = "vec", repeated, tag = "10")]
    pub preshared_keys: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Service {
    #[prost(uint32, tag = "1")]
    pub number: u32,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(bool, tag = "3")]
    pub udp: bool,
    #[prost(bool, tag = "4")]
    pub tcp: bool,
    #[prost(uint32, tag = "5")]
    pub idle_ms: u32,
    #[prost(bool, tag = "6")]
    pub fragment: bool,
    #[prost(message, optional, tag = "7")]
    pub repair: Option<Repair>,
    #[prost(bool, tag = "8")]
    pub client: bool,
}

/// `LaneOpen` and `LaneAccept`, which have the same fields.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LaneOffer {
    #[prost(uint32, tag = "1")]
    pub lane: u32,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    #[prost(bytes = "vec", tag = "3")]
    pub connection_id: Vec<u8>,
    /// Empty in a `LaneAccept`, which has no such field.
    #[prost(bytes = "vec", tag = "4")]
    pub preshared_key: Vec<u8>,
    /// Likewise absent.
    #[prost(message, optional, tag = "5")]
    pub line: Option<Line>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct Line {
    #[prost(uint32, tag = "1")]
    pub lanes: u32,
    #[prost(uint64, tag = "2")]
    pub rate: u64,
    #[prost(uint32, tag = "3")]
    pub weight: u32,
    #[prost(bool, tag = "4")]
    pub metered: bool,
    #[prost(bool, tag = "5")]
    pub backup: bool,
}

/// `LaneRefuse` and `LaneClose`, which have the same fields and differ in what `reason` means.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LaneEnd {
    #[prost(uint32, tag = "1")]
    pub lane: u32,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// An enum on the wire; kept a plain number, because a later version may know more values.
    #[prost(int32, tag = "3")]
    pub reason: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServicesChanged {
    #[prost(message, repeated, tag = "1")]
    pub services: Vec<Service>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StreamOpen {
    #[prost(uint32, tag = "1")]
    pub service: u32,
    #[prost(message, optional, tag = "2")]
    pub client: Option<ClientAddresses>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ClientAddresses {
    #[prost(bytes = "vec", tag = "1")]
    pub source: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub source_port: u32,
    #[prost(bytes = "vec", tag = "3")]
    pub destination: Vec<u8>,
    #[prost(uint32, tag = "4")]
    pub destination_port: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StreamAnswer {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

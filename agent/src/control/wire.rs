//! The protobuf mirror of `docs/culvert.proto`; `messages.rs` validates it into what the agent uses.

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Envelope {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11")]
    pub(super) kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Kind {
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
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Join {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) instance: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) session: Vec<u8>,
    #[prost(uint32, tag = "3")]
    pub(super) number: u32,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) possession: Vec<u8>,
}

/// A message without fields.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Here {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) padding: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Hello {
    #[prost(uint32, tag = "1")]
    pub(super) protocol_version: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) instance: Vec<u8>,
    #[prost(string, tag = "3")]
    pub(super) software: String,
    #[prost(uint32, tag = "4")]
    pub(super) workers: u32,
    #[prost(uint32, tag = "5")]
    pub(super) max_lanes: u32,
    #[prost(uint32, tag = "6")]
    pub(super) max_datagram_packet: u32,
    #[prost(message, repeated, tag = "7")]
    pub(super) services: Vec<Service>,
    #[prost(uint64, tag = "8")]
    pub(super) features: u64,
    #[prost(bytes = "vec", tag = "9")]
    pub(super) possession: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Service {
    #[prost(uint32, tag = "1")]
    pub(super) number: u32,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(bool, tag = "3")]
    pub(super) udp: bool,
    #[prost(bool, tag = "4")]
    pub(super) tcp: bool,
    #[prost(uint32, tag = "5")]
    pub(super) idle_ms: u32,
    #[prost(bool, tag = "6")]
    pub(super) fragment: bool,
}

/// `LaneOpen` and `LaneAccept`, which have the same fields.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LaneOffer {
    #[prost(uint32, tag = "1")]
    pub(super) lane: u32,
    #[prost(uint64, tag = "2")]
    pub(super) epoch: u64,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) connection_id: Vec<u8>,
}

/// `LaneRefuse` and `LaneClose`, which have the same fields and differ in what `reason` means.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LaneEnd {
    #[prost(uint32, tag = "1")]
    pub(super) lane: u32,
    #[prost(uint64, tag = "2")]
    pub(super) epoch: u64,
    /// An enum on the wire; kept a plain number, because a later version may know more values.
    #[prost(int32, tag = "3")]
    pub(super) reason: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ServicesChanged {
    #[prost(message, repeated, tag = "1")]
    pub(super) services: Vec<Service>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StreamOpen {
    #[prost(uint32, tag = "1")]
    pub(super) service: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StreamAnswer {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

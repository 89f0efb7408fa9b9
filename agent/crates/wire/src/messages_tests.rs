//! Round trips, bounds, and agreement with `docs/culvert.proto`.

use std::collections::BTreeMap;

use bytes::BufMut;
use proptest::prelude::*;
use quinn_proto::coding::Codec;

use super::*;
use crate::{
    line::{LineState, LineTerms, MOST_LINES, MOST_WEIGHT},
    proxy::ClientAddresses,
    repair_terms::{Deadline, MOST_OVERHEAD_PPM, Mode},
};

const PROTO: &str = include_str!("../../../../docs/culvert.proto");

/// `("Hello.workers" | "LaneRefusal.LANE_REFUSAL_TOO_MANY") → number`, as the document has it.
fn documented() -> BTreeMap<String, u32> {
    let mut numbers = BTreeMap::new();
    let mut block = String::new();
    for line in PROTO.lines() {
        let line = line.split("//").next().unwrap().trim();
        let words: Vec<_> = line.trim_end_matches(';').split_whitespace().collect();
        match words[..] {
            ["message" | "enum", name, "{"] => block = name.to_owned(),
            [.., field, "=", number] if !block.is_empty() => {
                let number = number.parse().unwrap();
                assert_eq!(numbers.insert(format!("{block}.{field}"), number), None, "{field} twice");
            }
            _ => {}
        }
    }
    numbers
}

/// A protobuf writer that knows only the wire format and the document.
struct ByHand {
    numbers: BTreeMap<String, u32>,
    used: Vec<String>,
}

impl ByHand {
    fn new() -> Self {
        Self { numbers: documented(), used: Vec::new() }
    }

    fn tag(&mut self, field: &str, wire_type: u32) -> Vec<u8> {
        let number = *self.numbers.get(field).unwrap_or_else(|| panic!("{field} is not documented"));
        self.used.push(field.to_owned());
        leb128(u64::from(number << 3 | wire_type))
    }

    fn number(&mut self, field: &str, value: u64) -> Vec<u8> {
        [self.tag(field, 0), leb128(value)].concat()
    }

    fn bytes(&mut self, field: &str, value: &[u8]) -> Vec<u8> {
        [self.tag(field, 2), leb128(value.len() as u64), value.to_vec()].concat()
    }

    fn choice(&mut self, name: &str) -> u64 {
        self.used.push(name.to_owned());
        self.numbers[name].into()
    }

    fn services(&mut self, field: &str) -> Vec<u8> {
        let service = [
            self.number("Service.number", 5),
            self.bytes("Service.name", b"dns"),
            self.number("Service.udp", 1),
            self.number("Service.tcp", 1),
            self.number("Service.idle_ms", 5000),
            self.number("Service.fragment", 1),
            self.repair("Service.repair", "RepairMode.REPAIR_MODE_AUTO"),
            self.number("Service.client", 1),
        ];
        self.bytes(field, &service.concat())
    }

    fn repair(&mut self, field: &str, mode: &str) -> Vec<u8> {
        let mode = self.choice(mode);
        let repair = [
            self.number("Repair.mode", mode),
            self.number("Repair.deadline_ms", 200),
            self.number("Repair.max_overhead_ppm", 300_000),
            self.number("Repair.hold", 1),
            self.number("Repair.path_deadline", 1),
        ];
        self.bytes(field, &repair.concat())
    }

    fn lane(&mut self, message: &str) -> Vec<u8> {
        let lane = self.number(&format!("{message}.lane"), 63);
        [lane, self.number(&format!("{message}.epoch"), u64::MAX)].concat()
    }
}

/// A base-128 varint, least significant group first.
fn leb128(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn service(number: u32, name: &str) -> Service {
    let idle = Duration::from_secs(5);
    Service {
        number,
        name: name.to_owned(),
        udp: true,
        tcp: true,
        idle,
        fragment: true,
        repair: Some(REPAIR),
        client: true,
    }
}

const REPAIR: Terms =
    Terms { mode: Mode::Auto, deadline: Deadline::Path, max_overhead_ppm: 300_000, order: Order::Hold };

const LINE: LaneLine = LaneLine {
    lanes: 8,
    terms: LineTerms { rate: Some(48_000_000), weight: MOST_WEIGHT, metered: true, backup: true },
};

fn hello() -> Hello {
    Hello {
        instance: *b"sixteen bytes id",
        software: "culvert 0.1.0".to_owned(),
        workers: 4,
        max_lanes: 8,
        max_datagram_packet: 1452,
        services: vec![service(5, "dns")],
        features: Features(1 << 40 | 1),
        possession: Some([9; 64]),
        preshared_keys: vec![KeyProof([1; 16]), KeyProof([2; 16])],
    }
}

/// The message's bytes without the length, which is checked.
fn body(message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    message.encode(&mut out);
    let mut rest = &out[..];
    let length = VarInt::decode(&mut rest).unwrap().into_inner();
    assert_eq!(length, rest.len() as u64);
    rest.to_vec()
}

fn hello_by_hand(hand: &mut ByHand) -> (Message, Vec<u8>) {
    let fields = [
        hand.number("Hello.protocol_version", 1),
        hand.bytes("Hello.instance", b"sixteen bytes id"),
        hand.bytes("Hello.software", b"culvert 0.1.0"),
        hand.number("Hello.workers", 4),
        hand.number("Hello.max_lanes", 8),
        hand.number("Hello.max_datagram_packet", 1452),
        hand.services("Hello.services"),
        hand.number("Hello.features", 1 << 40 | 1),
        hand.bytes("Hello.possession", &[9; 64]),
        hand.bytes("Hello.preshared_keys", &[1; 16]),
        hand.bytes("Hello.preshared_keys", &[2; 16]),
    ];
    (Message::Hello(hello()), hand.bytes("Envelope.hello", &fields.concat()))
}

fn join_by_hand(hand: &mut ByHand) -> (Message, Vec<u8>) {
    let fields = [
        hand.bytes("Join.instance", b"sixteen bytes id"),
        hand.bytes("Join.session", b"another sixteen."),
        hand.number("Join.number", 7),
        hand.bytes("Join.possession", &[9; 64]),
    ];
    let (instance, session) = (*b"sixteen bytes id", *b"another sixteen.");
    let join = Join { instance, session, number: 7, possession: Some([9; 64]) };
    (Message::Join(join), hand.bytes("Envelope.join", &fields.concat()))
}

fn line_by_hand(hand: &mut ByHand) -> Vec<u8> {
    let fields = [
        hand.number("Line.lanes", 8),
        hand.number("Line.rate", 48_000_000),
        hand.number("Line.weight", 256),
        hand.number("Line.metered", 1),
        hand.number("Line.backup", 1),
    ];
    hand.bytes("LaneOpen.line", &fields.concat())
}

fn state_by_hand(hand: &mut ByHand) -> (Message, Vec<u8>) {
    // The number of lanes is not written.
    let terms = line_by_hand(hand).split_off(4);
    let fields = [
        hand.number("LineState.line", 7),
        hand.number("LineState.unheard", 1),
        hand.bytes("LineState.terms", &terms),
    ];
    let state = LineState { line: 7, unheard: true, terms: Some(LINE.terms) };
    (Message::LineState(state), hand.bytes("Envelope.line_state", &fields.concat()))
}

fn aborts_by_hand(hand: &mut ByHand) -> (Message, Vec<u8>) {
    let fields = [hand.bytes("StreamAbort.streams", &[4, 8]), hand.bytes("StreamAbort.bytes", &[0, 200, 1])];
    let ends = [(4, 0), (8, 200)].map(|(stream, offset)| StreamOffset { stream, offset });
    (Message::StreamAbort(ends.into()), hand.bytes("Envelope.stream_abort", &fields.concat()))
}

fn credit_by_hand(hand: &mut ByHand) -> (Message, Vec<u8>) {
    let fields = [
        hand.number("StreamCredit.initial", 65_536),
        hand.bytes("StreamCredit.streams", &[4]),
        hand.bytes("StreamCredit.limits", &[200, 1]),
    ];
    let limits = vec![StreamOffset { stream: 4, offset: 200 }];
    let credit = Message::StreamCredit { initial: 65_536, limits };
    (credit, hand.bytes("Envelope.stream_credit", &fields.concat()))
}

#[test]
fn every_field_number_is_the_documented_one() {
    let hand = &mut ByHand::new();
    let (connection_id, epoch) = (*b"8 bytes!", u64::MAX);
    let accepted = LaneOffer { lane: 63, epoch, connection_id, preshared_key: None, line: None };
    let offer = LaneOffer { preshared_key: Some(KeyProof([3; 16])), line: Some(LINE), ..accepted };
    let mut cases = vec![
        hello_by_hand(hand),
        {
            let fields = hand.services("ServicesChanged.services");
            let message = Message::ServicesChanged(vec![service(5, "dns")]);
            (message, hand.bytes("Envelope.services_changed", &fields))
        },
        {
            let fields = hand.bytes("Here.padding", &[0; 1000]);
            (Message::Here, hand.bytes("Envelope.here", &fields))
        },
        join_by_hand(hand),
        (Message::Joined, hand.bytes("Envelope.joined", &[])),
        (Message::StreamsWanted, hand.bytes("Envelope.streams_wanted", &[])),
        (Message::Release, hand.bytes("Envelope.release", &[])),
        (Message::Leave, hand.bytes("Envelope.leave", &[])),
        aborts_by_hand(hand),
        credit_by_hand(hand),
        state_by_hand(hand),
        {
            let rate = hand.number("ReceiveRate.bits_per_second", 48_000_000);
            (Message::ReceiveRate { bits_per_second: 48_000_000 }, hand.bytes("Envelope.receive_rate", &rate))
        },
        {
            let wanted = hand.number("ReportsWanted.wanted", 1);
            (Message::ReportsWanted { wanted: true }, hand.bytes("Envelope.reports_wanted", &wanted))
        },
        {
            let proofs =
                [hand.bytes("PresharedKeys.proofs", &[1; 16]), hand.bytes("PresharedKeys.proofs", &[2; 16])];
            let message = Message::PresharedKeys(vec![KeyProof([1; 16]), KeyProof([2; 16])]);
            (message, hand.bytes("Envelope.preshared_keys", &proofs.concat()))
        },
        (Message::PresharedKeys(Vec::new()), hand.bytes("Envelope.preshared_keys", &[])),
        {
            assert_eq!(hand.choice("RepairMode.REPAIR_MODE_OFF"), 0);
            (Message::PacketRepair(None), hand.bytes("Envelope.packet_repair", &[]))
        },
    ];
    for (mode, choice) in [
        (Mode::Retransmit, "RepairMode.REPAIR_MODE_RETRANSMIT"),
        (Mode::Fec, "RepairMode.REPAIR_MODE_FEC"),
        (Mode::Auto, "RepairMode.REPAIR_MODE_AUTO"),
    ] {
        let message = Message::PacketRepair(Some(Terms { mode, ..REPAIR }));
        cases.push((message, hand.repair("Envelope.packet_repair", choice)));
    }
    for (kind, field, message) in [
        ("LaneOpen", "Envelope.lane_open", Message::LaneOpen(offer)),
        ("LaneAccept", "Envelope.lane_accept", Message::LaneAccept(accepted)),
    ] {
        let mut fields =
            [hand.lane(kind), hand.bytes(&format!("{kind}.connection_id"), &offer.connection_id)].concat();
        if kind == "LaneOpen" {
            fields.extend(hand.bytes("LaneOpen.preshared_key", &[3; 16]));
            fields.extend(line_by_hand(hand));
        }
        cases.push((message, hand.bytes(field, &fields)));
    }
    for (name, reason) in [
        ("EPOCH_REUSED", LaneRefusal::EpochReused),
        ("TOO_MANY", LaneRefusal::TooMany),
        ("SHUTTING_DOWN", LaneRefusal::ShuttingDown),
        ("PRESHARED_KEY", LaneRefusal::PresharedKey),
    ] {
        let value = hand.choice(&format!("LaneRefusal.LANE_REFUSAL_{name}"));
        let fields = [hand.lane("LaneRefuse"), hand.number("LaneRefuse.reason", value)].concat();
        let message = Message::LaneRefuse(LaneEnd { lane: 63, epoch: u64::MAX, reason });
        cases.push((message, hand.bytes("Envelope.lane_refuse", &fields)));
    }
    for (name, reason) in [
        ("DEAD", LaneCloseCause::Dead),
        ("PROTOCOL_VIOLATION", LaneCloseCause::ProtocolViolation),
        ("REPLACED", LaneCloseCause::Replaced),
        ("DONE", LaneCloseCause::Done),
        ("WORN_OUT", LaneCloseCause::WornOut),
    ] {
        let value = hand.choice(&format!("LaneCloseCause.LANE_CLOSE_CAUSE_{name}"));
        let fields = [hand.lane("LaneClose"), hand.number("LaneClose.reason", value)].concat();
        let message = Message::LaneClose(LaneEnd { lane: 63, epoch: u64::MAX, reason });
        cases.push((message, hand.bytes("Envelope.lane_close", &fields)));
    }
    for (message, bytes) in cases {
        assert_eq!(Message::decode(&bytes), Ok(message.clone()));
        assert_eq!(body(&message), bytes);
    }
    stream_headers_are_documented(hand);
    let unsent: Vec<_> = hand
        .numbers
        .keys()
        .filter(|field| !hand.used.contains(field) && !field.ends_with("_UNSPECIFIED"))
        .collect();
    assert!(unsent.is_empty(), "documented, but not sent: {unsent:?}");
}

fn stream_headers_are_documented(hand: &mut ByHand) {
    let open = hand.number("StreamOpen.service", 300);
    let client = [
        hand.bytes("ClientAddresses.source", &[192, 0, 2, 1]),
        hand.number("ClientAddresses.source_port", 4660),
        hand.bytes("ClientAddresses.destination", &[198, 51, 100, 2]),
        hand.number("ClientAddresses.destination_port", 443),
    ];
    let with_client = [open.clone(), hand.bytes("StreamOpen.client", &client.concat())].concat();
    assert_eq!(StreamOpen::decode(&open), Ok(StreamOpen { service: 300, client: None }));
    let told = ClientAddresses::new(([192, 0, 2, 1], 4660).into(), ([198, 51, 100, 2], 443).into());
    assert_eq!(StreamOpen::decode(&with_client), Ok(StreamOpen { service: 300, client: told }));
    for (wrong, bytes) in [(0, &[1, 2, 3][..]), (2, &[0; 16])] {
        let mut parts = client.clone();
        parts[wrong] =
            hand.bytes(["ClientAddresses.source", "ClientAddresses.destination"][wrong / 2], bytes);
        let open = hand.bytes("StreamOpen.client", &parts.concat());
        assert!(matches!(StreamOpen::decode(&open), Err(MessageError::Length { .. })), "{wrong}");
    }
    let mut parts = client;
    parts[1] = hand.number("ClientAddresses.source_port", 65_536);
    let open = hand.bytes("StreamOpen.client", &parts.concat());
    assert_eq!(StreamOpen::decode(&open), Err(MessageError::Range { field: "source", value: 65_536 }));
    for (name, answer) in [
        ("OK", StreamAnswer::Ok),
        ("UNKNOWN_SERVICE", StreamAnswer::UnknownService),
        ("NOT_ALLOWED", StreamAnswer::NotAllowed),
        ("UPSTREAM_REFUSED", StreamAnswer::UpstreamRefused),
        ("UPSTREAM_TIMEOUT", StreamAnswer::UpstreamTimeout),
        ("LIMIT_REACHED", StreamAnswer::LimitReached),
        ("TOO_MANY_FILES", StreamAnswer::TooManyFiles),
        ("NO_ROUTE", StreamAnswer::NoRoute),
        ("NO_RESOURCES", StreamAnswer::NoResources),
    ] {
        let value = hand.choice(&format!("StreamStatus.STREAM_STATUS_{name}"));
        let bytes = hand.number("StreamAnswer.status", value);
        assert_eq!(StreamAnswer::decode(&bytes), Ok(answer));
        let mut out = Vec::new();
        answer.encode(&mut out);
        assert_eq!(out[1..], bytes);
    }
}

#[test]
fn a_value_of_a_later_version_is_unspecified() {
    let hand = &mut ByHand::new();
    let fields = [hand.lane("LaneRefuse"), hand.number("LaneRefuse.reason", 99)].concat();
    let refused = Message::decode(&hand.bytes("Envelope.lane_refuse", &fields)).unwrap();
    let reason = LaneRefusal::Unspecified;
    assert_eq!(refused, Message::LaneRefuse(LaneEnd { lane: 63, epoch: u64::MAX, reason }));
    assert_eq!(StreamAnswer::decode(&[8, 99]), Ok(StreamAnswer::Unspecified));
    assert_eq!(StreamAnswer::decode(&[]), Ok(StreamAnswer::Unspecified), "silence is not consent");
}

#[test]
fn unknown_fields_are_ignored_and_unknown_kinds_are_counted() {
    let hand = &mut ByHand::new();
    let mut fields = hand.lane("LaneOpen");
    fields.extend(hand.bytes("LaneOpen.connection_id", b"8 bytes!"));
    // Field 1000, a string.
    fields.extend([leb128(1000 << 3 | 2), vec![3], b"new".to_vec()].concat());
    assert!(Message::decode(&hand.bytes("Envelope.lane_open", &fields)).is_ok());
    let error = Message::decode(&[leb128(1000 << 3 | 2), vec![0]].concat()).unwrap_err();
    assert_eq!(error, MessageError::UnknownKind);
    assert_eq!(error.close_reason(), None);
}

#[test]
fn an_empty_message_is_no_message_of_any_version() {
    let error = Message::decode(&[]).unwrap_err();
    assert_eq!(error, MessageError::Empty);
    assert_eq!(error.close_reason(), Some(CloseReason::ProtocolViolation));
}

/// What becomes of a hello that `change` made wrong.
fn changed(change: impl FnOnce(&mut protobuf::Hello)) -> Result<Message, MessageError> {
    let mut hello = protobuf::Hello::from(&hello());
    change(&mut hello);
    Message::decode(&protobuf::Envelope { kind: Some(protobuf::Kind::Hello(hello)) }.encode_to_vec())
}

#[test]
fn a_hello_is_checked() {
    let range = |field, value| Err(MessageError::Range { field, value });
    let length = |field, bytes| Err(MessageError::Length { field, bytes });
    assert!(changed(|_| {}).is_ok());
    assert_eq!(
        changed(|hello| (hello.protocol_version, hello.workers) = (2, 0)),
        Err(MessageError::VersionMismatch { theirs: 2 }),
        "the version is checked before what it defines"
    );
    assert_eq!(changed(|hello| hello.instance.truncate(15)), length("instance", 15));
    assert_eq!(changed(|hello| hello.software = "x".repeat(65)), length("software", 65));
    assert!(changed(|hello| hello.software.clear()).is_ok());
    let control = Err(MessageError::ControlCharacter { field: "software" });
    assert_eq!(changed(|hello| hello.software = "\u{1b}[2J".to_owned()), control);
    assert_eq!(changed(|hello| hello.workers = 0), range("workers", 0));
    assert_eq!(changed(|hello| hello.workers = 257), range("workers", 257));
    assert!(changed(|hello| hello.workers = 256).is_ok());
    assert_eq!(changed(|hello| hello.max_lanes = 65), range("max_lanes", 65));
    assert_eq!(changed(|hello| hello.max_lanes = 256), range("max_lanes", 256));
    assert!(changed(|hello| hello.max_lanes = 64).is_ok());
    assert_eq!(changed(|hello| hello.max_datagram_packet = 1199), range("max_datagram_packet", 1199));
    assert_eq!(changed(|hello| hello.max_datagram_packet = 65_528), range("max_datagram_packet", 65_528));
}

#[test]
fn services_are_checked() {
    let named = |number, name: &str| protobuf::Service::from(&service(number, name));
    let services = |count: u32| (0..count).map(|number| named(number, &format!("s{number}"))).collect();
    assert!(changed(|hello| hello.services = services(256)).is_ok());
    let too_many = Err(MessageError::TooManyServices { count: 257 });
    assert_eq!(changed(|hello| hello.services = services(257)), too_many);
    let twice = Err(MessageError::DuplicateService { number: 5 });
    assert_eq!(changed(|hello| hello.services.push(named(5, "other"))), twice);
    let twice = Err(MessageError::DuplicateService { number: 6 });
    assert_eq!(changed(|hello| hello.services.push(named(6, "dns"))), twice);
    let length = |bytes| Err(MessageError::Length { field: "name", bytes });
    assert_eq!(changed(|hello| hello.services.push(named(6, ""))), length(0));
    assert_eq!(changed(|hello| hello.services.push(named(6, &"x".repeat(65)))), length(65));
}

#[test]
fn lanes_are_checked() {
    let offer = |lane, id: &[u8]| {
        let connection_id = id.to_vec();
        let offer =
            protobuf::LaneOffer { lane, epoch: 1, connection_id, preshared_key: Vec::new(), line: None };
        Message::decode(&protobuf::Envelope { kind: Some(protobuf::Kind::LaneOpen(offer)) }.encode_to_vec())
    };
    assert!(offer(63, &[0; 8]).is_ok());
    assert_eq!(offer(64, &[0; 8]), Err(MessageError::Range { field: "lane", value: 64 }));
    assert_eq!(offer(256, &[0; 8]), Err(MessageError::Range { field: "lane", value: 256 }));
    assert_eq!(offer(0, &[0; 9]), Err(MessageError::Length { field: "connection_id", bytes: 9 }));
}

#[test]
fn lines_are_checked() {
    let opened = |lane, line| {
        let (connection_id, preshared_key) = (vec![0; 8], Vec::new());
        let offer = protobuf::LaneOffer { lane, epoch: 1, connection_id, preshared_key, line: Some(line) };
        let of = |kind| Message::decode(&protobuf::Envelope { kind: Some(kind) }.encode_to_vec());
        let accepted = of(protobuf::Kind::LaneAccept(offer.clone()));
        assert!(matches!(accepted, Ok(Message::LaneAccept(LaneOffer { line: None, .. }))), "{accepted:?}");
        of(protobuf::Kind::LaneOpen(offer))
    };
    let line = protobuf::Line { lanes: 2, rate: 0, weight: 0, metered: false, backup: false };
    let range = |field, value| Err(MessageError::Range { field, value });
    let Ok(Message::LaneOpen(offer)) = opened(5, line) else { panic!("it is right") };
    let terms = LineTerms { rate: None, weight: 1, metered: false, backup: false };
    assert_eq!(offer.line, Some(LaneLine { lanes: 2, terms }), "what is not said has its default");
    assert_eq!(offer.line.map(|line| line.number(offer.lane)), Some(2));
    assert_eq!(opened(5, protobuf::Line { lanes: 0, ..line }), range("lanes", 0));
    assert_eq!(opened(5, protobuf::Line { lanes: 65, ..line }), range("lanes", 65));
    assert!(opened(63, protobuf::Line { lanes: 64, ..line }).is_ok());
    assert_eq!(opened(5, protobuf::Line { weight: 257, ..line }), range("weight", 257));
    assert!(opened(15, line).is_ok());
    assert_eq!(opened(16, line), range("line", u32::from(MOST_LINES)));
    let stated = |line, terms| {
        let state = protobuf::LineState { line, unheard: false, terms };
        Message::decode(&protobuf::Envelope { kind: Some(protobuf::Kind::LineState(state)) }.encode_to_vec())
    };
    let state = LineState { line: 7, unheard: false, terms: Some(terms) };
    assert_eq!(stated(7, Some(line)), Ok(Message::LineState(state)), "the number of lanes is not looked at");
    assert_eq!(stated(7, None), Ok(Message::LineState(LineState { terms: None, ..state })));
    assert_eq!(stated(8, None), range("line", 8));
    assert_eq!(stated(0, Some(protobuf::Line { weight: 257, ..line })), range("weight", 257));
}

#[test]
fn proofs_of_preshared_keys_are_checked() {
    let length = |bytes| Err(MessageError::Length { field: "preshared_key", bytes });
    for (proofs, expected) in [
        (vec![vec![1; 15]], length(15)),
        (vec![vec![1; 16], vec![2; 17]], length(17)),
        (vec![Vec::new()], length(0)),
        (vec![vec![1; 16]; 3], Err(MessageError::Range { field: "preshared_keys", value: 3 })),
    ] {
        assert_eq!(changed(|hello| hello.preshared_keys = proofs.clone()), expected);
        let keys = protobuf::Kind::PresharedKeys(protobuf::PresharedKeys { proofs });
        assert_eq!(Message::decode(&protobuf::Envelope { kind: Some(keys) }.encode_to_vec()), expected);
    }
    let (connection_id, preshared_key) = (vec![0; 8], vec![1; 15]);
    let offer = protobuf::LaneOffer { lane: 1, epoch: 1, connection_id, preshared_key, line: None };
    let open = protobuf::Envelope { kind: Some(protobuf::Kind::LaneOpen(offer.clone())) };
    assert_eq!(Message::decode(&open.encode_to_vec()), length(15));
    let accept = protobuf::Envelope { kind: Some(protobuf::Kind::LaneAccept(offer)) };
    assert!(Message::decode(&accept.encode_to_vec()).is_ok(), "not a field of the acceptance");
}

#[test]
fn joins_are_checked() {
    let join = |number, instance: usize, session: usize, signature: usize| {
        let join = protobuf::Join {
            instance: vec![1; instance],
            session: vec![2; session],
            number,
            possession: vec![3; signature],
        };
        Message::decode(&protobuf::Envelope { kind: Some(protobuf::Kind::Join(join)) }.encode_to_vec())
    };
    let length = |field, bytes| Err(MessageError::Length { field, bytes });
    for number in [0, 8, 256] {
        assert_eq!(join(number, 16, 16, 64), Err(MessageError::Range { field: "number", value: number }));
    }
    assert!(join(1, 16, 16, 64).is_ok() && join(7, 16, 16, 0).is_ok());
    assert_eq!(join(1, 15, 16, 64), length("instance", 15));
    assert_eq!(join(1, 16, 17, 64), length("session", 17));
    assert_eq!(join(1, 16, 16, 63), length("possession", 63));
}

#[test]
fn the_longest_message_fits_a_frame() {
    let mut hello = hello();
    hello.software = "x".repeat(MAX_NAME_BYTES);
    hello.services =
        (0..256).map(|n| service(u32::MAX - n, &format!("{n:0width$}", width = MAX_NAME_BYTES))).collect();
    let bytes = body(&Message::Hello(hello.clone()));
    assert!(bytes.len() <= MAX_MESSAGE_BYTES, "{}", bytes.len());
    assert_eq!(Message::decode(&bytes), Ok(Message::Hello(hello)));
}

#[test]
fn every_error_has_a_label_of_its_own() {
    let malformed = Message::decode(&[0xff]).unwrap_err();
    assert_eq!(malformed.fault(), MessageFault::Malformed);
    assert_eq!(malformed.close_reason(), Some(CloseReason::ProtocolViolation));
    let too_long = MessageError::from(FrameTooLong { bytes: 1, limit: 0 });
    assert_eq!(too_long.fault(), MessageFault::TooLong);
    let mismatch = MessageError::VersionMismatch { theirs: 2 };
    assert_eq!(
        (mismatch.fault(), mismatch.close_reason()),
        (MessageFault::VersionMismatch, Some(CloseReason::VersionMismatch))
    );
    assert_eq!(MessageError::DuplicateService { number: 1 }.fault(), MessageFault::DuplicateService);
    assert_eq!(MessageError::Empty.fault(), MessageFault::Empty);
    let labels: std::collections::BTreeSet<_> = MessageFault::LABELS.into_iter().collect();
    assert_eq!(labels.len(), MessageFault::COUNT);
}

#[test]
fn close_codes_are_their_positions() {
    for (code, reason) in (0..).zip(CloseReason::ALL) {
        assert_eq!(reason.code(), VarInt::from_u32(code));
        assert_eq!(CloseReason::from_code(VarInt::from_u32(code)), Some(reason));
        assert!(PROTO.contains(&format!("  {code} ")), "close code {code} is not documented");
    }
    let words = CloseReason::LABELS;
    let documented = [
        "shutting down",
        "protocol violation",
        "version mismatch",
        "replaced by a newer connection",
        "key removed",
        "internal error",
        "idle",
        "limit reached",
        "connected to itself",
        "no such session",
        "no preshared key in common",
        "the path carries too little",
    ];
    assert_eq!(words, documented, "as in docs/wire-format.md §2");
    assert_eq!(CloseReason::SelfConnect.code(), VarInt::from_u32(8));
    assert_eq!(CloseReason::from_code(VarInt::from_u32(12)), None);
    assert_eq!(CloseReason::from_code(VarInt::MAX), None);
}

#[test]
fn features_are_a_set() {
    assert!(Features(3).contains(Features::PARTIAL_CHECKSUM));
    assert!(!Features(2).contains(Features::PARTIAL_CHECKSUM));
}

#[test]
fn features_have_the_bits_of_the_document() {
    let bits = [
        Features::PARTIAL_CHECKSUM,
        Features::PACKETS,
        Features::PIECES,
        Features::STREAM_CONNECTIONS,
        Features::REPORTS,
        Features::REPAIR,
        Features::PRESHARED_KEYS,
        Features::LEAVE,
        Features::MULTICAST,
        Features::STREAM_ABORT,
        Features::STREAM_CREDIT,
        Features::STREAM_CLIENT,
        Features::LINES,
        Features::FLOW_CLIENT,
        Features::COPIES,
    ];
    let documented: Vec<u64> = (0..15).map(|bit| 1 << bit).collect();
    assert_eq!(bits.map(|feature| feature.0)[..], documented);
}

#[test]
fn what_a_dialler_signs_is_as_documented() {
    assert_eq!(POSSESSION_LABEL, b"EXPORTER-culvert-possession");
    assert_eq!(possession(&[7; 32])[..], [&b"culvert possession 1"[..], &[7; 32]].concat());
}

fn any_services() -> impl Strategy<Value = Vec<Service>> {
    let service = (any::<u32>(), "[^\\p{C}]{0,8}", any::<bool>(), any::<bool>());
    prop::collection::vec(service, 0..8).prop_map(|services| {
        let unique: BTreeMap<_, _> = services.into_iter().map(|service| (service.0, service)).collect();
        let named = |(number, name, udp, tcp)| {
            let idle = Duration::from_millis(1 + u64::from(number % 1000));
            Service {
                number,
                name: format!("{number}{name}"),
                udp,
                tcp,
                idle,
                fragment: number % 3 == 0,
                repair: any_terms(number),
                client: number % 2 == 0,
            }
        };
        unique.into_values().map(named).collect()
    })
}

/// Terms that follow from a number, which is as good as random.
fn any_terms(number: u32) -> Option<Terms> {
    let mode = Mode::ALL[number as usize % Mode::COUNT];
    let deadline = match number % 5 {
        0 => Deadline::Path,
        _ => Deadline::Fixed(Duration::from_millis(5 + u64::from(number / 7 % 1_996))),
    };
    let order = Order::ALL[number as usize / 3 % 2];
    Terms { mode, deadline, max_overhead_ppm: number % (MOST_OVERHEAD_PPM + 1), order }.in_use()
}

fn any_line() -> impl Strategy<Value = Option<LaneLine>> {
    let terms = (1..u64::MAX, any::<bool>(), 1..=MOST_WEIGHT, any::<bool>(), any::<bool>());
    prop::option::of((1..=MAX_LANES, terms)).prop_map(|line| {
        let (lanes, (rate, is_known, weight, metered, backup)) = line?;
        let rate = Some(rate).filter(|_| is_known);
        Some(LaneLine { lanes, terms: LineTerms { rate, weight, metered, backup } })
    })
}

fn any_message() -> impl Strategy<Value = Message> {
    let offer = |with_key| {
        let keyed = (any::<[u8; 8]>(), any::<Option<[u8; 16]>>());
        (0..MAX_LANES, any::<u64>(), keyed, any_line()).prop_map(
            move |(lane, epoch, (connection_id, proof), line)| {
                let preshared_key = proof.filter(|_| with_key).map(KeyProof);
                let line = line.filter(|line| with_key && line.number(lane) < MOST_LINES);
                LaneOffer { lane, epoch, connection_id, preshared_key, line }
            },
        )
    };
    let proofs = || {
        let proof = any::<[u8; 16]>().prop_map(KeyProof);
        prop::collection::vec(proof, 0..=MAX_PRESHARED_KEYS)
    };
    let hello = (any::<[u8; 16]>(), "[^\\p{C}]{0,16}", 1..=MAX_WORKERS, 0..=MAX_LANES, 1200..=65_527_u16);
    prop_oneof![
        (hello, any_services(), any::<u64>(), any::<Option<[u8; 32]>>(), proofs()).prop_map(
            |(fields, services, features, half, preshared_keys)| {
                let (instance, software, workers, max_lanes, max_datagram_packet) = fields;
                let features = Features(features);
                Message::Hello(Hello {
                    instance,
                    software,
                    workers,
                    max_lanes,
                    max_datagram_packet,
                    services,
                    features,
                    possession: half.map(possession_of),
                    preshared_keys,
                })
            }
        ),
        offer(true).prop_map(Message::LaneOpen),
        offer(false).prop_map(Message::LaneAccept),
        proofs().prop_map(Message::PresharedKeys),
        (0..MAX_LANES, any::<u64>(), 0..=4_i32).prop_map(|(lane, epoch, reason)| {
            Message::LaneRefuse(LaneEnd { lane, epoch, reason: LaneRefusal::try_from(reason).unwrap() })
        }),
        (0..MAX_LANES, any::<u64>(), 0..=4_i32).prop_map(|(lane, epoch, reason)| {
            Message::LaneClose(LaneEnd { lane, epoch, reason: LaneCloseCause::try_from(reason).unwrap() })
        }),
        any_services().prop_map(Message::ServicesChanged),
        Just(Message::Here),
        (any::<[u8; 16]>(), any::<[u8; 16]>(), 1..8_u8, any::<Option<[u8; 32]>>()).prop_map(
            |(instance, session, number, half)| {
                Message::Join(Join { instance, session, number, possession: half.map(possession_of) })
            }
        ),
        Just(Message::Joined),
        Just(Message::StreamsWanted),
        Just(Message::Release),
        Just(Message::Leave),
        (0..MOST_LINES, any::<bool>(), any_line()).prop_map(|(line, unheard, of_lane)| {
            Message::LineState(LineState { line, unheard, terms: of_lane.map(|line| line.terms) })
        }),
        any_offsets().prop_map(Message::StreamAbort),
        (any::<u64>(), any_offsets()).prop_map(|(initial, limits)| Message::StreamCredit { initial, limits }),
        any::<u64>().prop_map(|bits_per_second| Message::ReceiveRate { bits_per_second }),
        any::<bool>().prop_map(|wanted| Message::ReportsWanted { wanted }),
        any::<u32>().prop_map(|number| Message::PacketRepair(any_terms(number))),
    ]
}

fn any_offsets() -> impl Strategy<Value = Vec<StreamOffset>> {
    let any_offset =
        (any::<u64>(), any::<u64>()).prop_map(|(stream, offset)| StreamOffset { stream, offset });
    proptest::collection::vec(any_offset, 0..=MOST_STREAMS)
}

/// A signature for the test; any 64 bytes will do.
fn possession_of(half: [u8; 32]) -> [u8; SIGNATURE_BYTES] {
    let mut signature = [0; SIGNATURE_BYTES];
    signature[..32].copy_from_slice(&half);
    signature
}

proptest! {
    #[test]
    fn messages_survive_the_stream_in_any_chunks(
        messages in prop::collection::vec(any_message(), 0..6),
        chunk in 1_usize..100,
    ) {
        let mut stream = Vec::new();
        for message in &messages {
            message.encode(&mut stream);
        }
        let mut framer = Framer::new(MAX_MESSAGE_BYTES);
        let mut received = Vec::new();
        for mut chunk in stream.chunks(chunk) {
            while let Some(frame) = framer.pull(&mut chunk).unwrap() {
                received.push(Message::decode(&frame).unwrap());
            }
        }
        prop_assert_eq!(received, messages);
    }

    #[test]
    fn any_bytes_are_an_error_or_a_message_that_survives(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(Message::decode(&body(&message)), Ok(message));
        }
        // The same bytes as the content of a message that exists.
        let mut envelope = leb128(((bytes.len() as u64 % 20 + 1) << 3) | 2);
        envelope.put_slice(&leb128(bytes.len() as u64));
        envelope.extend(&bytes);
        if let Ok(message) = Message::decode(&envelope) {
            prop_assert_eq!(Message::decode(&body(&message)), Ok(message));
        }
        prop_assert!(StreamOpen::decode(&bytes).is_ok() || !bytes.is_empty());
        prop_assert!(StreamAnswer::decode(&bytes).is_ok() || !bytes.is_empty());
    }

    #[test]
    fn stream_headers_survive(service: u32, source: (u128, u16), destination: (u128, u16), which in 0..3) {
        let ip = |bits: u128| match which {
            1 => std::net::IpAddr::V4((bits as u32).into()),
            _ => std::net::IpAddr::V6(bits.into()),
        };
        let [source, destination] = [source, destination].map(|(bits, port)| (ip(bits), port).into());
        let open = StreamOpen { service, client: ClientAddresses::new(source, destination).filter(|_| which > 0) };
        let mut out = Vec::new();
        open.encode(&mut out);
        let header = Framer::new(MAX_STREAM_HEADER_BYTES).pull(&mut &out[..]).unwrap().unwrap();
        prop_assert_eq!(StreamOpen::decode(&header), Ok(open));
    }
}

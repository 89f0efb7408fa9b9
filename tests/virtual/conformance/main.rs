//! The cases of the wire format in this folder's JSON files, run by the agent's own parsers. `README.md` says what they
//! contain, and which other implementation runs them too.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{collections::BTreeMap, fs, path::Path, sync::Arc, time::Duration};

use culvert_tests::clock;
use data_encoding::HEXLOWER;
use dataplane::relay::{
    accounting::{Account, DropReason},
    flow::FlowId,
    fragments::{Piece, Reassembler},
};
use gate::{
    classify::{Class, classify},
    identity::{Identity, PublicKey},
    initial::{HelloError, client_hello},
    knock::{self, About, KnockError, ServerKey},
    preshared::{PresharedKey, Prover},
    tls::{TlsIdentity, initial_crypto},
};
use quic_core::{AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OpenError, Suite, TAG_LEN, varint};
use serde_json::Value;
use wire::{
    context::Context,
    framing::{FrameTooLong, Framer},
    messages::{CloseReason, Message, StreamAnswer, StreamOpen, possession},
    report::Report,
};
use zeroize::Zeroizing;

/// The least number of cases, so that a missing file is noticed.
const LEAST_CASES: usize = 350;

/// The fields of a case's output, or of a step's.
type Fields = BTreeMap<&'static str, String>;

/// What the agent makes of some input.
#[derive(Debug)]
struct Outcome {
    verdict: &'static str,
    output: Fields,
}

impl Outcome {
    fn of(verdict: &'static str) -> Self {
        Self { verdict, output: Fields::new() }
    }

    fn accept<const N: usize>(output: [(&'static str, String); N]) -> Self {
        Self { verdict: "accept", output: Fields::from(output) }
    }

    /// Says how it differs from what `expected`, a case or a step, asks for; fields that it does not name may be anything.
    fn compare(&self, expected: &Value) -> Result<(), String> {
        if expected["verdict"] != self.verdict {
            return Err(format!("verdict {:?}, not {}", self.verdict, expected["verdict"]));
        }
        for (field, want) in expected["output"].as_object().into_iter().flatten() {
            let got = self.output.get(field.as_str());
            if got.map(String::as_str) != want.as_str() {
                return Err(format!("{field} is {got:?}, not {want}"));
            }
        }
        Ok(())
    }
}

/// The input of a case.
#[derive(Clone, Copy)]
struct Input<'a>(&'a Value);

impl Input<'_> {
    fn text(&self, field: &str) -> &str {
        self.0[field].as_str().unwrap_or_else(|| panic!("a case without {field}"))
    }

    fn bytes(&self, field: &str) -> Vec<u8> {
        HEXLOWER.decode(self.text(field).as_bytes()).unwrap()
    }

    fn array<const N: usize>(&self, field: &str) -> [u8; N] {
        self.bytes(field).try_into().unwrap()
    }

    fn number(&self, field: &str) -> u64 {
        self.text(field).parse().unwrap()
    }
}

fn hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

#[test]
fn every_case_of_the_wire_format_has_its_verdict() {
    let mut failures = Vec::new();
    let mut count = 0;
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("virtual/conformance")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        for case in &cases {
            count += 1;
            if let Err(why) = run(case) {
                failures.push(format!("{}: {}: {why}", case["kind"], case["name"]));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} cases:\n{}", failures.len(), failures.join("\n"));
    assert!(count >= LEAST_CASES, "{count} cases");
}

fn run(case: &Value) -> Result<(), String> {
    let input = Input(&case["input"]);
    let outcome = match case["kind"].as_str().unwrap() {
        "open" => return steps(case, packets(input)),
        "pieces" => return steps(case, pieces()),
        "varint" => read_varint(input),
        "envelope" => envelope(input),
        "framing" => framing(input),
        "stream_open" => stream_open(input),
        "stream_answer" => stream_answer(input),
        "payload" => payload(input),
        "frames" => frames(input),
        "seal" => seal(input),
        "knock_seal" => knock_seal(input),
        "knock_open" => knock_open(input),
        "initial" => initial(input),
        "public_key" => public_key(input),
        "possession" => proof(input),
        "preshared_proof" => preshared_proof(input),
        "preshared_lane" => preshared_lane(input),
        "x25519" => agreement(input),
        kind => return Err(format!("no such kind: {kind}")),
    };
    outcome.compare(case)
}

/// Compares the outcomes of a case's steps, one after the other.
fn steps(case: &Value, mut step: impl FnMut(Vec<u8>) -> Outcome) -> Result<(), String> {
    for (index, expected) in case["steps"].as_array().unwrap().iter().enumerate() {
        step(Input(expected).bytes("bytes"))
            .compare(expected)
            .map_err(|why| format!("step {index}: {why}"))?;
    }
    Ok(())
}

fn read_varint(input: Input<'_>) -> Outcome {
    let bytes = input.bytes("bytes");
    let Some(value) = varint::Reader::new(&bytes).varint() else { return Outcome::of("truncated") };
    let mut shortest = [0; 8];
    let length = varint::write(&mut shortest, value).unwrap();
    Outcome::accept([("value", value.to_string()), ("shortest", hex(&shortest[..length]))])
}

fn envelope(input: Input<'_>) -> Outcome {
    let message = match Message::decode(&input.bytes("bytes")) {
        Ok(message) => message,
        Err(error) => {
            return Outcome::of(match error.close_reason() {
                None => "ignore",
                Some(CloseReason::ProtocolViolation) => "close 1",
                Some(CloseReason::VersionMismatch) => "close 2",
                Some(_) => "another close code",
            });
        }
    };
    let kind = match &message {
        Message::Hello(_) => "hello",
        Message::LaneOpen(_) => "lane_open",
        Message::LaneAccept(_) => "lane_accept",
        Message::LaneRefuse(_) => "lane_refuse",
        Message::LaneClose(_) => "lane_close",
        Message::ServicesChanged(_) => "services_changed",
        Message::Here => "here",
        Message::Join(_) => "join",
        Message::Joined => "joined",
        Message::StreamsWanted => "streams_wanted",
        Message::Release => "release",
        Message::ReceiveRate { .. } => "receive_rate",
        Message::ReportsWanted { .. } => "reports_wanted",
        Message::PacketRepair(_) => "packet_repair",
        Message::PresharedKeys(_) => "preshared_keys",
        Message::Leave => "leave",
        Message::StreamAbort(_) => "stream_abort",
        Message::StreamCredit { .. } => "stream_credit",
        Message::LineState(_) => "line_state",
    };
    let mut again = Vec::new();
    message.encode(&mut again);
    Outcome::accept([("kind", kind.to_owned()), ("bytes", hex(&again))])
}

fn framing(input: Input<'_>) -> Outcome {
    let mut framer = Framer::new(usize::try_from(input.number("limit")).unwrap());
    let bytes = input.bytes("bytes");
    let mut rest = &bytes[..];
    let mut messages = Vec::new();
    let verdict = loop {
        match framer.pull(&mut rest) {
            Ok(Some(message)) => messages.push(hex(&message)),
            Ok(None) => break if framer.is_inside_message() { "incomplete" } else { "accept" },
            Err(FrameTooLong { .. }) => break "close 1",
        }
    };
    Outcome { verdict, output: Fields::from([("messages", messages.join(" "))]) }
}

fn stream_open(input: Input<'_>) -> Outcome {
    let Ok(open) = StreamOpen::decode(&input.bytes("bytes")) else { return Outcome::of("malformed") };
    let mut again = Vec::new();
    open.encode(&mut again);
    Outcome::accept([("service", open.service.to_string()), ("bytes", hex(&again))])
}

fn stream_answer(input: Input<'_>) -> Outcome {
    let bytes = input.bytes("bytes");
    let Ok(answer) = StreamAnswer::decode(&bytes) else { return Outcome::of("malformed") };
    let mut again = Vec::new();
    answer.encode(&mut again);
    // Any status that the agent does not know is one to it.
    let is_other = answer == StreamAnswer::Unspecified && !bytes.is_empty();
    let status = if is_other { "other".to_owned() } else { i32::from(answer).to_string() };
    Outcome::accept([("status", status), ("bytes", hex(&again))])
}

fn payload(input: Input<'_>) -> Outcome {
    let bytes = input.bytes("bytes");
    let Some(context) = Context::decode(&bytes) else { return Outcome::of("malformed") };
    if let Context::Unsupported(_) = context {
        return Outcome::of("unknown");
    }
    let mut header = context.encode().as_slice().to_vec();
    let code = varint::Reader::new(&header).varint().unwrap();
    if let Context::Report { payload_at } = context {
        let Some(report) = Report::decode(&bytes[payload_at..]) else { return Outcome::of("malformed") };
        let mut fields = [0; Report::MOST_BYTES];
        let length = report.encode(&mut fields).unwrap();
        header.extend_from_slice(&fields[..length]);
    }
    let at = match context {
        Context::Piece { payload_at, .. }
        | Context::Numbered { payload_at, .. }
        | Context::Repair { payload_at, .. }
        | Context::Ask { payload_at, .. }
        | Context::Copied { payload_at, .. } => Some(payload_at),
        Context::Packet { .. }
        | Context::Flow { .. }
        | Context::Open { .. }
        | Context::OpenEmpty { .. }
        | Context::Confirmed(_)
        | Context::Refused(..)
        | Context::Unknown(_)
        | Context::Closed(_)
        | Context::Report { .. }
        | Context::Unsupported(_) => context.payload_at(),
    };
    let body = at.map(|at| hex(&bytes[at..])).unwrap_or_default();
    Outcome::accept([("context", code.to_string()), ("header", hex(&header)), ("body", body)])
}

/// A lane whose both directions have the secret and the connection ID of the case.
fn lane(input: Input<'_>) -> Lane {
    let secret = input.bytes("secret");
    let id = ConnectionId(input.array("id"));
    Lane::new(&LaneConfig {
        suite: Suite::from_code_point(u16::from_str_radix(input.text("suite"), 16).unwrap()).unwrap(),
        send_secret: &secret,
        receive_secret: &secret,
        remote_cid: id,
        local_cid: id,
        ack: AckProfile::Throughput,
        key_limit: None,
        initial_rtt: None,
    })
    .unwrap()
}

/// Seals a packet of `frames`.
fn sealed(lane: &mut Lane, frames: &[u8]) -> Vec<u8> {
    let mut packet = [&[0; HEADER_LEN][..], frames, &[0; TAG_LEN]].concat();
    lane.seal(&mut packet, true, clock::now()).unwrap();
    packet
}

fn seal(input: Input<'_>) -> Outcome {
    let mut lane = lane(input);
    let frames = input.bytes("frames");
    (0..input.number("number")).for_each(|_| drop(sealed(&mut lane, &frames)));
    Outcome::accept([("packet", hex(&sealed(&mut lane, &frames)))])
}

fn opened(lane: &mut Lane, mut packet: Vec<u8>) -> Outcome {
    match lane.open(&mut packet, clock::now()) {
        Ok(opened) => {
            let datagrams: Vec<String> = opened.datagrams().map(|datagram| hex(datagram.payload)).collect();
            let path = |data: Option<[u8; 8]>| data.map(|data| hex(&data)).unwrap_or_default();
            Outcome::accept([
                ("number", opened.packet_number.0.to_string()),
                ("datagrams", datagrams.join(" ")),
                ("challenge", path(opened.path_challenge)),
                ("response", path(opened.path_response)),
            ])
        }
        Err(OpenError::Violation(_)) => Outcome::of("violation"),
        Err(_) => Outcome::of("refused"),
    }
}

fn frames(input: Input<'_>) -> Outcome {
    let mut lane = lane(input);
    (0..input.number("sent")).for_each(|_| drop(sealed(&mut lane, &[1])));
    opened(&mut lane, input.bytes("packet"))
}

fn packets(input: Input<'_>) -> impl FnMut(Vec<u8>) -> Outcome {
    let mut lane = lane(input);
    move |packet| opened(&mut lane, packet)
}

fn pieces() -> impl FnMut(Vec<u8>) -> Outcome {
    let mut reassembler = Reassembler::within(1 << 20, &Arc::default());
    let (mut account, now) = (Account::default(), clock::now());
    move |bytes| {
        let Some(Context::Piece { datagram, total, offset, payload_at, .. }) = Context::decode(&bytes) else {
            return Outcome::of("malformed");
        };
        let piece = Piece { flow: FlowId(0), datagram, total: total.into(), offset: offset.into() };
        let malformed = |account: &Account| account.dropped[DropReason::Malformed];
        let before = malformed(&account);
        let mut joined = Vec::new();
        match reassembler.take(&piece, &bytes[payload_at..], now, &mut account, &mut joined) {
            Some(whole) => {
                Outcome { verdict: "complete", output: Fields::from([("datagram", hex(&joined[whole]))]) }
            }
            None if malformed(&account) > before => Outcome::of("malformed"),
            None => Outcome::of("none"),
        }
    }
}

fn identity(seed: [u8; 32]) -> Identity {
    Identity::from_seed(Zeroizing::new(seed)).unwrap()
}

fn knock_seal(input: Input<'_>) -> Outcome {
    let dialler = identity(input.array("dialler_seed"));
    let listener = ServerKey::new(&PublicKey(input.array("listener_key"))).unwrap();
    let (dcid, hello) = (input.bytes("dcid"), input.bytes("hello"));
    let (seconds, ephemeral) = (input.number("seconds"), input.array("ephemeral"));
    let about = About { client_hello: &hello, unix_seconds: seconds, fallback: false };
    let token = knock::seal(&dialler.agreement_key(), &listener, &dcid, about, &ephemeral).unwrap();
    Outcome::accept([("token", hex(&token))])
}

fn knock_open(input: Input<'_>) -> Outcome {
    let listener = identity(input.array("listener_seed"));
    let server = ServerKey::new(&listener.public_key()).unwrap();
    let (dcid, token, now) = (input.bytes("dcid"), input.bytes("token"), input.number("now"));
    let window = Duration::from_secs(input.number("window"));
    if token.len() != knock::KNOCK_BYTES {
        return Outcome::of("length");
    }
    if !server.is_proof(&dcid, &token, knock::epochs(now, window)) {
        return Outcome::of("mac");
    }
    let opened = match knock::open(&listener.agreement_key(), &server, &dcid, &token) {
        Ok(opened) => opened,
        Err(KnockError::Length) => return Outcome::of("length"),
        Err(_) => return Outcome::of("sealed"),
    };
    if opened.unix_seconds.abs_diff(now) > window.as_secs() {
        return Outcome::of("clock");
    }
    if opened.hello_hash != knock::hello_hash(&input.bytes("hello")) {
        return Outcome::of("hello");
    }
    let key = opened.key().unwrap();
    Outcome::accept([("dialler_key", hex(&key.0)), ("seconds", opened.unix_seconds.to_string())])
}

fn initial(input: Input<'_>) -> Outcome {
    let datagram = input.bytes("datagram");
    let Class::Initial(initial) = classify(&datagram) else { return Outcome::of("not an Initial") };
    let own = TlsIdentity::from_pkcs8(&identity([2; 32]).pkcs8_der()).unwrap();
    let crypto = initial_crypto(&own).unwrap();
    // A ClientHello may have a second datagram, before or behind it.
    let second = input.0.get("second").map(|_| input.bytes("second"));
    let datagrams: Vec<&[u8]> =
        [Some(&datagram), second.as_ref()].into_iter().flatten().map(|one| &one[..]).collect();
    match client_hello(&*crypto, &datagrams) {
        Ok(Some(hello)) => Outcome::accept([
            ("dcid", hex(initial.dcid)),
            ("scid", hex(initial.scid)),
            ("token", hex(initial.token)),
            ("hello_hash", hex(&knock::hello_hash(&hello))),
        ]),
        Err(HelloError::Sealed) => Outcome::of("sealed"),
        Ok(None) | Err(HelloError::Nothing) => Outcome::of("incomplete"),
        Err(HelloError::Long) => Outcome::of("long"),
        Err(HelloError::Malformed) => Outcome::of("malformed"),
        Err(HelloError::Abandoned) => Outcome::of("abandoned"),
    }
}

fn public_key(input: Input<'_>) -> Outcome {
    match input.text("text").parse::<PublicKey>() {
        Ok(key) => Outcome::accept([("key", hex(&key.0))]),
        Err(_) => Outcome::of("malformed"),
    }
}

fn proof(input: Input<'_>) -> Outcome {
    let signature = identity(input.array("seed")).sign(&possession(&input.array("exported")));
    Outcome::accept([("signature", hex(&signature))])
}

fn preshared_proof(input: Input<'_>) -> Outcome {
    let prover = Prover::new(input.text("sender") == "dialler");
    let proof = PresharedKey::new(&input.array("key")).unwrap().proof(&input.array("exported"), prover);
    Outcome::accept([("proof", hex(&proof.0))])
}

fn preshared_lane(input: Input<'_>) -> Outcome {
    let mut secret = input.bytes("exported");
    let suite = Suite::from_code_point(u16::from_str_radix(input.text("suite"), 16).unwrap()).unwrap();
    PresharedKey::new(&input.array("key")).unwrap().mix_into_lane(suite, &mut secret);
    Outcome::accept([("secret", hex(&secret))])
}

fn agreement(input: Input<'_>) -> Outcome {
    let key = PublicKey(input.array("key")).agreement().unwrap();
    Outcome::accept([("x25519", hex(&key))])
}

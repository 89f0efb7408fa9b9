//! What breaks the protocol, and what only seems to.

use culvert_tests::needs;

use crate::{
    case::Case,
    payload::{Payload, put_varint},
    protobuf::Message,
    quinn_client::{Session, Site},
};

/// The close codes of `docs/wire-format.md` §2.
const VIOLATION: u64 = 1;
const VERSION_MISMATCH: u64 = 2;

/// An envelope with field `kind`, and in it a lane, an epoch and `third`.
fn lane_message(kind: u64, third: impl FnOnce(Message) -> Message) -> Vec<u8> {
    let message = third(Message::default().number(1, 0).number(2, 1));
    Message::default().bytes(kind, &message.encode()).encode()
}

fn lane_open() -> Vec<u8> {
    lane_message(2, |message| message.bytes(3, &[1; 8]))
}

/// Does `act` on a new connection, before any hello: the agent closes it with `code`.
#[track_caller]
fn closes(what: &str, code: u64, site: &Site, case: &Case, act: impl FnOnce(&mut Session<'_>)) {
    let mut session = site.dial(case.underlay, case.agent.key());
    act(&mut session);
    assert_eq!(session.close_code(), code, "{what}");
}

/// The same with an agent of its own, since whoever breaks the protocol has to wait.
#[track_caller]
fn violates(what: &str, site: &Site, act: impl FnOnce(&mut Session<'_>)) {
    let case = Case::dialled(&site.key());
    closes(what, VIOLATION, site, &case, act);
}

#[test]
fn a_first_message_that_is_no_good_hello_closes_the_connection() {
    if !needs::met("violations: the first message", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let hello = site.hello(&[]);
    for version in [0, 2, 1000] {
        let mut hello = hello.clone();
        hello.protocol_version = version;
        closes(&format!("version {version}"), VERSION_MISMATCH, &site, &case, |session| {
            session.send_message(&hello.encode());
        });
    }
    // Another version is no violation: nobody has to wait.
    let mut session = case.connect(&site);
    session.open(session.service("echo"), b"first");
    let mut short = hello.clone();
    short.instance.pop();
    let mut lanes = hello.clone();
    lanes.max_lanes = 65;
    let changed = crate::protobuf::services_changed(&[]);
    let bad = [
        ("an instance of 15 bytes", short.encode()),
        ("65 lanes", lanes.encode()),
        ("LaneOpen before Hello", lane_open()),
        ("ServicesChanged before Hello", changed),
        ("no protobuf", vec![0xff; 32]),
        ("a hello that is cut short", hello.encode()[..20].to_vec()),
    ];
    for (what, message) in bad {
        violates(what, &site, |session| session.send_message(&message));
    }
    violates("a message that is too long", &site, |session| {
        let mut length = Vec::new();
        put_varint(&mut length, 65_537);
        session.send_bytes(&length);
    });
}

#[test]
fn a_later_message_that_is_out_of_order_closes_the_connection() {
    if !needs::met("violations: later messages", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let bad = [
        ("a second Hello", site.hello(&[]).encode()),
        ("LaneAccept from the dialler", lane_message(3, |message| message.bytes(3, &[1; 8]))),
        ("LaneRefuse from the dialler", lane_message(4, |message| message.number(3, 2))),
        ("LaneOpen of lane 64", {
            let message = Message::default().number(1, 64).number(2, 1).bytes(3, &[1; 8]);
            Message::default().bytes(2, &message.encode()).encode()
        }),
        ("no protobuf", vec![0xff; 32]),
        ("an empty message", Vec::new()),
    ];
    for (what, message) in bad {
        violates(what, &site, |session| {
            session.send_deferred_hello(&[]);
            session.send_message(&message);
        });
    }
}

#[test]
fn messages_of_a_later_version_are_ignored() {
    if !needs::met("violations: unknown messages", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = site.dial(case.underlay, case.agent.key());
    // A hello with a field that nobody knows yet.
    let hello = [site.hello(&[]).encode(), Message::default().bytes(99, b"x").encode()].concat();
    session.send_message(&hello);
    session.take_hello();
    // What is known may come at any time, too: `Here`, with its padding.
    let padding = Message::default().bytes(1, &[0; 1000]);
    session.send_message(&Message::default().bytes(7, &padding.encode()).encode());
    for kind in [1000, 2000] {
        session.send_message(&Message::default().bytes(kind, b"\x08\x01").encode());
    }
    session.open(session.service("echo"), b"first");
}

#[test]
fn payloads_that_make_no_sense_are_counted_and_do_no_harm() {
    if !needs::met("violations: payloads", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    let echo = session.service("echo");
    let flow = session.open(echo, b"first");
    let of_the_agent = 1 - session.parity;
    let mut late = Vec::new();
    put_varint(&mut late, 1 << 40);
    // IP packets, for which the agent has no device.
    let packets: [&[u8]; 2] = [&[0, 1, 2], &[1, 1, 2]];
    let unknown: [&[u8]; 3] = [&[9, 2, 3], &[63], &late];
    let trailing = [Payload::Confirmed { flow }.encode(), vec![0]].concat();
    let wrong_half = Payload::Opening { flow: of_the_agent, service: echo, bytes: b"x".to_vec() };
    let malformed: [&[u8]; 6] = [&[], &[2], &[3, 2], &[0x40], &trailing, &wrong_half.encode()];
    for data in packets.into_iter().chain(unknown).chain(malformed) {
        session.send_raw(data.to_vec());
    }
    session.echo(flow, b"second", b"first");
    let expected = [packets.len(), unknown.len(), malformed.len()].map(|count| count as f64);
    case.agent.wait_for("every one is counted", |samples| {
        let drops = samples.by_label("culvert_datagrams_dropped_total", "reason");
        let count = |reason| drops.get(reason).copied().unwrap_or_default();
        let account = samples.account("foreign", "downlink");
        let counted = ["no_tun", "unknown_context", "malformed"].map(count);
        if counted == expected && drops.len() == 3 && account.balances() {
            Ok(())
        } else {
            Err(format!("{drops:?} {account:?}"))
        }
    });
    assert!(session.lives());
}

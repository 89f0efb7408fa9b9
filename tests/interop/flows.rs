//! Flows that the peer opens to the agent's services.

use std::time::Duration;

use culvert_tests::{
    clock::{self, PATIENCE},
    needs,
};

use crate::{
    case::Case,
    payload::{Payload, pieces},
    quinn_client::{Session, Site},
};

/// Datagrams of a conversation.
const COUNT: u32 = 100;

fn numbered(flow: u64, number: u32) -> Vec<u8> {
    [&flow.to_be_bytes()[..], &number.to_be_bytes(), &[0xa5; 1100]].concat()
}

#[test]
fn a_flow_is_opened_confirmed_and_echoed() {
    if !needs::met("standard mode: a flow", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    let echo = session.service("echo");
    let flow = session.open(echo, b"first");
    for number in 0..COUNT {
        session.echo(flow, &numbered(flow, number), b"first");
    }
    // UDP may be empty.
    session.echo(flow, b"", b"first");
    let labels = [("peer", "foreign")];
    case.agent.wait_for_count("culvert_peer_connected", &labels, 1);
    case.agent.wait_for_count("culvert_flows", &labels, 1);
    assert_eq!(case.agent.samples().count("culvert_lane_packets_sent_total", &labels), 0);

    session.send(&Payload::Closed { flow });
    case.agent.wait_for_count("culvert_flows", &labels, 0);
    case.agent.wait_for("nothing was dropped, nothing waits", |samples| {
        let accounts = ["uplink", "downlink"].map(|direction| samples.account("foreign", direction));
        let fits = accounts.iter().all(|account| {
            account.balances()
                && account.delivered > u64::from(COUNT)
                && account.dropped + account.queued == 0
        });
        if fits { Ok(()) } else { Err(format!("{accounts:?}")) }
    });
}

#[test]
fn datagrams_travel_in_pieces_both_ways_where_the_service_wants_it() {
    if !needs::met("standard mode: datagrams in pieces", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    assert_eq!((session.fragments("echo"), session.fragments("large")), (false, true));
    let large = session.service("large");
    let flow = session.open(large, b"first");
    for (datagram, length) in [(0, 8000), (9, 2500), (1, 30_000)] {
        let whole: Vec<u8> = (0..length).map(|at| (at / 7) as u8).collect();
        let mut numbers = (datagram..).step_by(16);
        // An agent that stands still between two pieces for as long as it waits for pieces gives a datagram up.
        clock::until(&format!("{length} bytes come back"), PATIENCE, || {
            let mut cut = pieces(flow, numbers.next().unwrap(), &whole, 1100);
            cut.reverse();
            cut.iter().for_each(|piece| session.send(piece));
            match session.receive_pieces_within(flow, Duration::from_secs(5)) {
                Some(answer) if answer == whole => Ok(()),
                other => Err(format!("{:?} came", other.map(|answer| answer.len()))),
            }
        });
    }
    case.agent.wait_for("nothing else was dropped, nothing waits", |samples| {
        let accounts = ["uplink", "downlink"].map(|direction| samples.account("foreign", direction));
        let dropped = accounts.iter().map(|account| account.dropped).sum::<u64>();
        let fits = dropped == samples.dropped("incomplete")
            && accounts
                .iter()
                .all(|account| account.balances() && account.delivered >= 4 && account.queued == 0);
        if fits { Ok(()) } else { Err(format!("{accounts:?}")) }
    });
}

#[test]
fn flows_do_not_mix() {
    if !needs::met("standard mode: several flows", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    let echo = session.service("echo");
    let flows: Vec<u64> = (0..8).map(|_| session.open(echo, b"first")).collect();
    for number in 0..20 {
        for flow in &flows {
            session.send(&Payload::Known { flow: *flow, bytes: numbered(*flow, number) });
        }
        // Each flow keeps its order; between flows there is none.
        let mut answered = Vec::new();
        while answered.len() < flows.len() {
            let answer = session.receive();
            let Payload::Known { flow, bytes } = answer else {
                assert!(matches!(answer, Payload::Confirmed { .. }), "{answer:?}");
                continue;
            };
            if bytes != b"first" {
                assert_eq!(bytes, numbered(flow, number));
                answered.push(flow);
            }
        }
        answered.sort_unstable();
        assert_eq!(answered, flows);
    }
}

#[test]
fn a_flow_can_be_opened_without_a_datagram() {
    if !needs::met("standard mode: context 4", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    let (flow, service) = (session.new_flow(), session.service("echo"));
    let answer = session.send_until_answered(&Payload::Open { flow, service });
    assert_eq!(answer, Payload::Confirmed { flow });
    session.echo(flow, b"second", b"");
    case.wait_for_delivered(1, 1);
}

#[test]
fn a_flow_that_the_agent_does_not_know_is_reopened() {
    if !needs::met("standard mode: unknown", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    let flow = session.new_flow();
    let answer = session.send_until_answered(&Payload::Known { flow, bytes: b"lost".to_vec() });
    assert_eq!(answer, Payload::Unknown { flow });
    session.open_as(flow, session.service("echo"), b"first");
    session.echo(flow, b"second", b"first");
    case.agent.wait_for("the datagram is counted", |samples| {
        if samples.dropped("unknown_flow") > 0 { Ok(()) } else { Err("it is not".to_owned()) }
    });
}

#[test]
fn services_that_cannot_be_had_are_refused() {
    if !needs::met("standard mode: refused", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    // One that does not exist, and one that is not for UDP.
    for service in [1_000_000, session.service("streams")] {
        let flow = session.new_flow();
        let answer =
            session.send_until_answered(&Payload::Opening { flow, service, bytes: b"first".to_vec() });
        assert_eq!(answer, Payload::Refused { flow, reason: 1 });
        // The other form of opening as well.
        let flow = session.new_flow();
        let answer = session.send_until_answered(&Payload::Open { flow, service });
        assert_eq!(answer, Payload::Refused { flow, reason: 1 });
    }
    let flow = session.open(session.service("echo"), b"first");
    session.echo(flow, b"second", b"first");
    case.agent.wait_for_count("culvert_flows", &[("peer", "foreign")], 1);
}

#[test]
fn a_silent_flow_is_closed() {
    if !needs::met("standard mode: closed", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    let flow = (0..ATTEMPTS).find_map(|_| opened_until_closed(&mut session));
    let flow = flow.unwrap_or_else(|| panic!("in each of {ATTEMPTS} attempts it was closed before its echo"));
    // What a repeated opening has opened once more is closed, too.
    while session.receive_within(Duration::from_millis(500)).is_some() {}
    case.agent.wait_for_count("culvert_flows", &[("peer", "foreign")], 0);
    // Its number is spent at the opener, but the agent does not know that: it is a flow like any other.
    let answer = session.send_until_answered(&Payload::Known { flow, bytes: b"late".to_vec() });
    assert_eq!(answer, Payload::Unknown { flow });
}

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

/// Opens a flow to "brief" and waits until the agent closes it; `None` if it was closed before it was confirmed and echoed, as on a
/// machine that stands still for the idle time.
#[track_caller]
fn opened_until_closed(session: &mut Session<'_>) -> Option<u64> {
    let (flow, service) = (session.new_flow(), session.service("brief"));
    let known = Payload::Known { flow, bytes: b"first".to_vec() };
    let (confirmed, closed) = (Payload::Confirmed { flow }, Payload::Closed { flow });
    let opening = Payload::Opening { flow, service, bytes: b"first".to_vec() };
    let mut answers = vec![session.send_until_answered(&opening)];
    while answers.last() != Some(&closed) {
        let answer = session.receive();
        // Not one to an attempt before.
        if answer.flow() == flow {
            answers.push(answer);
        }
    }
    let expected = |answer: &Payload| [&known, &confirmed, &closed].contains(&answer);
    assert!(answers.iter().all(expected), "{answers:?}");
    (answers.contains(&confirmed) && answers.contains(&known)).then_some(flow)
}

#[test]
fn flows_outlive_a_connection_but_not_an_instance() {
    if !needs::met("standard mode: reconnect", needs::AGENTS) {
        return;
    }
    let mut site = Site::new();
    let case = Case::dialled(&site.key());
    let (flow, instance) = {
        let mut first = case.connect(&site);
        let flow = first.open(first.service("echo"), b"first");
        // The newer connection replaces the older one, and the flow needs no opening there.
        let second = case.connect(&site);
        assert_eq!(first.close_code(), 3);
        second.echo(flow, b"second", b"first");
        (flow, site.instance)
    };
    site.instance = [8; 16];
    assert_ne!(site.instance, instance);
    let third = case.connect(&site);
    let answer = third.send_until_answered(&Payload::Known { flow, bytes: b"third".to_vec() });
    assert_eq!(answer, Payload::Unknown { flow });
}

#[test]
fn the_example_of_the_document() {
    const HELLO: &[u8] = b"\x1b\x0a\x19\x08\x01\x12\x10\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\
        \x0d\x0e\x0f\x20\x01\x30\xb0\x09";
    if !needs::met("standard mode: the example", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = site.dial(case.underlay, case.agent.key());
    session.send_bytes(HELLO);
    session.take_hello();
    let service = session.service("echo");
    let flow = session.open(service, b"hello");
    session.echo(flow, b"world", b"hello");
}

/// Ignored until the agent looks for early datagrams once it has the hello: those that came before are still in
/// quinn-proto's buffer, which reports only the first datagram that it takes while empty.
#[test]
fn datagrams_may_overtake_the_hello() {
    if !needs::met("standard mode: datagrams before the hello", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = site.dial(case.underlay, case.agent.key());
    let flow = session.new_flow();
    // As from a peer whose flows outlived its last connection, and whose hello was lost on its way.
    for _ in 0..10 {
        session.send(&Payload::Known { flow, bytes: b"early".to_vec() });
    }
    assert_eq!(session.receive_within(Duration::from_millis(200)), None, "nobody has said hello");
    session.send_deferred_hello(&[]);
    let service = session.service("echo");
    let opening = Payload::Opening { flow, service, bytes: b"first".to_vec() };
    // The early ones may be answered too, or not: they are datagrams.
    while session.send_until_answered(&opening) == (Payload::Unknown { flow }) {}
    let next = session.open(service, b"next");
    session.echo(next, b"second", b"next");
}

#[test]
fn an_agent_that_shuts_down_says_so() {
    if !needs::met("standard mode: shutdown", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let mut case = Case::dialled(&site.key());
    let mut session = case.connect(&site);
    session.open(session.service("echo"), b"first");
    assert_eq!(case.agent.terminate().code(), Some(0));
    assert_eq!(session.close_code(), 0);
}

#[test]
fn only_keys_that_are_known_connect() {
    if !needs::met("standard mode: keys", needs::AGENTS) {
        return;
    }
    let (site, stranger) = (Site::new(), Site::new());
    let case = Case::dialled(&site.key());
    // A client has finished its side of the handshake before the agent has seen its certificate.
    if let Ok(session) = stranger.try_dial(case.underlay, case.agent.key()) {
        let end = session.closed();
        // The TLS alert, as QUIC's own error.
        assert!(matches!(end, quinn::ConnectionError::ConnectionClosed(_)), "{end}");
    }
    let impostor = site.try_dial(case.underlay, &stranger.key());
    assert!(impostor.is_err(), "the client pins the agent's key");
    case.connect(&site);
}

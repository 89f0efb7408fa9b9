//! Flows that the agent opens to the peer's service.

use std::time::Duration;

use culvert_tests::{
    client::{Client, numbers_of},
    clock::{self, PATIENCE},
    needs,
};

use crate::{
    case::{ANSWERS, Case, answers},
    payload::{Payload, pieces},
    protobuf::{Service, services_changed},
    quinn_client::{Session, Site},
};

/// Sends datagrams of `client` until the agent passes one on in the form that `look` wants, and returns what it saw. An agent that
/// stands still passes on the others later.
#[track_caller]
fn send_until<T>(
    client: &mut Client,
    session: &Session<'_>,
    mut look: impl FnMut(Payload) -> Option<T>,
) -> T {
    clock::until("the agent sends what the test waits for", PATIENCE, || {
        client.send();
        let mut seen = Vec::new();
        while let Some(payload) = session.receive_within(Duration::from_millis(100)) {
            seen.push(format!("{payload:?}"));
            if let Some(found) = look(payload) {
                return Ok(found);
            }
        }
        Err(format!("it sent {seen:?}"))
    })
}

/// The number of a flow that opens to the peer's service.
fn opening(payload: Payload) -> Option<u64> {
    let Payload::Opening { flow, service: ANSWERS, .. } = payload else { return None };
    Some(flow)
}

/// The number of a flow that the agent takes for confirmed.
fn known(payload: Payload) -> Option<u64> {
    let Payload::Known { flow, .. } = payload else { return None };
    Some(flow)
}

/// The numbers of a client and of its datagram, in a payload that carries one.
fn carried(payload: &Payload) -> Option<(u32, u32)> {
    let (Payload::Known { bytes, .. } | Payload::Opening { bytes, .. }) = payload else { return None };
    numbers_of(bytes)
}

/// Has the agent open a flow that the peer has not confirmed, with a datagram that the client sends from now on.
#[track_caller]
fn opened(client: &mut Client, session: &Session<'_>) -> u64 {
    let (number, before) = (client.number(), client.newest());
    let is_new = |(from, datagram): (u32, u32)| from == number && Some(datagram) > before;
    let flow = send_until(client, session, |payload| {
        let fits = carried(&payload).is_some_and(is_new);
        opening(payload).filter(|_| fits)
    });
    assert_eq!(flow % 2, 1 - session.parity, "the low bit of the agent's flows");
    flow
}

#[test]
fn an_application_has_its_large_datagrams_in_pieces_where_the_peers_service_wants_it() {
    if !needs::met("standard mode: the agent cuts", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = site.dial(case.underlay, case.agent.key());
    session.send_deferred_hello(&[Service { fragment: true, ..answers() }]);
    let client = case.client();
    let whole: Vec<u8> = (0..8000).map(|at| (at / 11) as u8).collect();
    client.socket().send(&whole).unwrap();
    // Pieces open no flow: the datagram waits.
    let flow = loop {
        if let Payload::Open { flow, service: ANSWERS } = session.receive() {
            break flow;
        }
    };
    session.send(&Payload::Confirmed { flow });
    assert!(session.receive_pieces(flow) == whole);
    let mut numbers = 5..;
    // An agent that stands still between two pieces for as long as it waits for pieces gives a datagram up.
    clock::until("all of it comes to the client", PATIENCE, || {
        let cut = pieces(flow, numbers.next().unwrap(), &whole, 1050);
        cut.iter().for_each(|piece| session.send(piece));
        match client.receive_any(Duration::from_secs(5)) {
            Ok(answer) if answer == whole => Ok(()),
            other => Err(format!("{:?}", other.map(|answer| answer.len()))),
        }
    });
}

#[test]
fn the_agent_repeats_the_opening_until_it_is_confirmed() {
    if !needs::met("standard mode: the agent opens", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut client = case.client();
    let flow = opened(&mut client, &session);
    assert_eq!(opened(&mut client, &session), flow, "one client is one flow");
    session.send(&Payload::Confirmed { flow });
    assert_eq!(send_until(&mut client, &session, known), flow);
    // Now an application that gets its own datagrams back.
    for number in 0..100u32 {
        let bytes = [&number.to_be_bytes()[..], &[0x5a; 1000]].concat();
        client.socket().send(&bytes).unwrap();
        let datagram = Payload::Known { flow, bytes: bytes.clone() };
        let mut passed_on = session.receive();
        // What was sent before, until there was one in the form for confirmed flows.
        while carried(&passed_on).is_some() {
            passed_on = session.receive();
        }
        assert_eq!(passed_on, datagram);
        session.send(&datagram);
        assert_eq!(client.receive_any(PATIENCE).unwrap(), bytes);
    }
}

#[test]
fn a_datagram_confirms_as_well() {
    if !needs::met("standard mode: a datagram confirms", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut client = case.client();
    let flow = opened(&mut client, &session);
    session.send(&Payload::Known { flow, bytes: b"answer".to_vec() });
    assert_eq!(client.receive_any(PATIENCE).unwrap(), b"answer");
    assert_eq!(send_until(&mut client, &session, known), flow);
}

#[test]
fn each_client_has_a_flow_and_gets_its_own_answers() {
    if !needs::met("standard mode: several clients", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut clients: Vec<Client> = (0..5).map(|number| Client::new(number, case.ingress)).collect();
    let flows: Vec<u64> = clients.iter_mut().map(|client| opened(client, &session)).collect();
    for (index, flow) in flows.iter().enumerate() {
        assert!(!flows[..index].contains(flow), "{flows:?}");
        session.send(&Payload::Known { flow: *flow, bytes: flow.to_be_bytes().to_vec() });
    }
    for (client, flow) in clients.iter().zip(&flows) {
        assert_eq!(client.receive_any(PATIENCE).unwrap(), flow.to_be_bytes());
    }
}

#[test]
fn unknown_returns_the_agent_to_the_opening_form() {
    if !needs::met("standard mode: the peer forgets", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut client = case.client();
    let flow = opened(&mut client, &session);
    session.send(&Payload::Confirmed { flow });
    assert_eq!(send_until(&mut client, &session, known), flow);
    session.send(&Payload::Unknown { flow });
    assert_eq!(opened(&mut client, &session), flow);
}

#[test]
fn closed_ends_the_flow_and_the_next_datagram_opens_another() {
    if !needs::met("standard mode: the peer closes", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut client = case.client();
    let flow = opened(&mut client, &session);
    session.send(&Payload::Confirmed { flow });
    session.send(&Payload::Closed { flow });
    case.agent.wait_for_count("culvert_flows", &[("peer", "foreign")], 0);
    let next = send_until(&mut client, &session, |payload| opening(payload).filter(|next| *next != flow));
    assert_eq!(next % 2, flow % 2);
}

#[test]
fn a_temporary_refusal_ends_the_flow() {
    if !needs::met("standard mode: temporary refusal", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut client = case.client();
    let flow = opened(&mut client, &session);
    session.send(&Payload::Refused { flow, reason: 3 });
    send_until(&mut client, &session, |payload| opening(payload).filter(|next| *next != flow));
}

#[test]
fn a_lasting_refusal_silences_the_client() {
    if !needs::met("standard mode: lasting refusal", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut client = case.client();
    let flow = opened(&mut client, &session);
    session.send(&Payload::Refused { flow, reason: 1 });
    clock::until("the client's datagrams are dropped", PATIENCE, || {
        client.send();
        let drops = case.agent.samples().by_label("culvert_datagrams_dropped_total", "reason");
        if drops.values().sum::<f64>() >= 3.0 { Ok(()) } else { Err(format!("{drops:?}")) }
    });
    // What was opened before the refusal arrived may still be on its way; then there is silence.
    while session.receive_within(Duration::from_millis(200)).is_some() {}
    client.send();
    while let Some(payload) = session.receive_within(Duration::from_millis(500)) {
        let is_late = carried(&payload).is_some_and(|(_, number)| Some(number) < client.newest());
        assert!(is_late, "{payload:?}");
    }
    // A client of its own that the peer has not refused.
    assert_ne!(opened(&mut Client::new(1, case.ingress), &session), flow);
}

#[test]
fn a_datagram_that_does_not_fit_into_the_opening_form_waits() {
    if !needs::met("standard mode: the agent opens without a datagram", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    // Without path MTU discovery, so that what fits does not change.
    let case = Case::dialled_with(&site.key(), "max_packet = 1200\n");
    let mut session = site.dial(case.underlay, case.agent.key());
    // The longest number there is: the opening form has 7 bytes more than the other.
    session.send_deferred_hello(&[Service { number: u32::MAX.into(), ..answers() }]);
    let too_large = || case.agent.samples().dropped("too_large");
    // The largest datagram that is not dropped; which size that is depends on the connection.
    let (client, flow, size) = (1100..1200)
        .rev()
        .step_by(4)
        .find_map(|size| {
            let (client, before) = (case.client(), too_large());
            client.socket().send(&vec![0xc3; size]).unwrap();
            let payload =
                clock::until("the datagram opens a flow or is too large", PATIENCE, || {
                    match session.receive_within(Duration::from_millis(20)) {
                        Some(payload) => Ok(Some(payload)),
                        None if too_large() > before => Ok(None),
                        None => Err("neither"),
                    }
                })?;
            let flow = payload.flow();
            let open = Payload::Open { flow, service: u32::MAX.into() };
            assert_eq!(payload, open, "{size} bytes");
            Some((client, flow, size))
        })
        .unwrap();
    session.send(&Payload::Confirmed { flow });
    let datagram = Payload::Known { flow, bytes: vec![0xc3; size] };
    while session.receive() != datagram {}
    // As much goes the other way.
    session.send(&datagram);
    assert_eq!(client.receive_any(PATIENCE).unwrap(), vec![0xc3; size]);
    case.agent.wait_for("the larger ones are counted", |samples| {
        let drops = samples.by_label("culvert_datagrams_dropped_total", "reason");
        if drops.keys().eq(["too_large"]) { Ok(()) } else { Err(format!("{drops:?}")) }
    });
}

#[test]
fn services_may_be_offered_later() {
    if !needs::met("standard mode: ServicesChanged", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let mut session = site.dial(case.underlay, case.agent.key());
    session.send_deferred_hello(&[]);
    let mut client = case.client();
    clock::until("the agent knows no such service", PATIENCE, || {
        client.send();
        if case.agent.samples().dropped("unknown_service") > 0 { Ok(()) } else { Err("no drop") }
    });
    session.send_message(&services_changed(&[answers()]));
    let flow = opened(&mut client, &session);
    session.send(&Payload::Known { flow, bytes: b"answer".to_vec() });
    assert_eq!(client.receive_any(PATIENCE).unwrap(), b"answer");
}

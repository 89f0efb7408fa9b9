//! The agent dials a peer that allows no lanes.

use std::time::Duration;

use culvert_tests::{clock::PATIENCE, needs};

use crate::{
    case::{ANSWERS, Case, answers},
    payload::Payload,
    quinn_client::Site,
};

#[test]
fn an_agent_that_dials_uses_standard_mode_when_the_listener_allows_no_lanes() {
    if !needs::met("standard mode: the agent dials", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialling(&site.key());
    let mut session = site.accept(case.underlay, case.agent.key());
    // The dialler speaks first.
    session.take_hello();
    session.send_message(&site.hello(&[answers()]).encode());

    // To the peer's service: the agent learns of it a moment after the hello has arrived.
    let client = case.client();
    let flow = loop {
        client.socket().send(b"question").unwrap();
        match session.receive_within(Duration::from_millis(250)) {
            Some(Payload::Opening { flow, service: ANSWERS, bytes }) => {
                assert_eq!(bytes, b"question");
                break flow;
            }
            None => (),
            Some(other) => panic!("{other:?}"),
        }
    };
    assert_eq!(flow % 2, 1 - session.parity, "who dialled does not matter to flow numbers");
    session.send(&Payload::Known { flow, bytes: b"answer".to_vec() });
    assert_eq!(client.receive_any(PATIENCE).unwrap(), b"answer");

    // To the agent's service.
    let ours = session.new_flow();
    session.open_as(ours, session.service("echo"), b"first");

    let labels = [("peer", "foreign")];
    case.agent.wait_for_count("culvert_flows", &labels, 2);
    let samples = case.agent.samples();
    assert_eq!(samples.count("culvert_lanes", &[]), 0);
    assert_eq!(samples.count("culvert_lane_packets_sent_total", &labels), 0);
    assert!(session.no_message_within(Duration::from_millis(500)), "no lane was asked for");
}

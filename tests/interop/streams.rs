//! TCP forwards, each on a stream.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    thread,
};

use culvert_tests::{clock::PATIENCE, needs, random::Random};

use crate::{
    case::{ANSWERS, Case},
    quinn_client::Site,
};

#[test]
fn the_peer_forwards_to_a_service_of_the_agent() {
    if !needs::met("standard mode: TCP to the agent", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut random = Random::new(4);
    let bytes = random.bytes(1 << 20);
    for service in ["echo", "streams"] {
        let (status, answer) = session.forward(session.service(service), &bytes);
        assert_eq!(status, 1);
        assert!(answer == bytes, "{} of {} bytes; seed {}", answer.len(), bytes.len(), random.seed);
    }
    // No such service.
    assert_eq!(session.forward(1_000_000, b"early"), (2, Vec::new()));
    assert!(session.lives());
}

#[test]
fn the_agent_forwards_to_a_service_of_the_peer() {
    if !needs::met("standard mode: TCP to the peer", needs::AGENTS) {
        return;
    }
    let site = Site::new();
    let case = Case::dialled(&site.key());
    let session = case.connect(&site);
    let mut random = Random::new(5);
    let bytes = random.bytes(1 << 20);
    let connect = || {
        let stream = TcpStream::connect(case.ingress).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    thread::scope(|scope| {
        let answer = scope.spawn(|| {
            let mut stream = connect();
            stream.write_all(&bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            answer
        });
        let (service, received) = session.answer_forward(1);
        assert_eq!(service, ANSWERS);
        assert!(received == bytes, "{} of {} bytes; seed {}", received.len(), bytes.len(), random.seed);
        let answer = answer.join().unwrap();
        assert!(answer == bytes, "{} of {} bytes; seed {}", answer.len(), bytes.len(), random.seed);
    });
    // A refusal ends the TCP connection, also one whose number the agent does not know.
    for status in [4, 77] {
        let mut stream = connect();
        assert_eq!(session.answer_forward(status), (ANSWERS, Vec::new()));
        // With a reset or with an end.
        assert!(!stream.read(&mut [0; 1]).is_ok_and(|length| length > 0));
    }
    assert!(session.lives());
}

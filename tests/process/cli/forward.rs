//! `culvert forward end`: TCP forwards of real daemons.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpStream},
    process::Output,
};

use culvert_tests::{
    agent::{Agent, culvert},
    clock::{self, PATIENCE},
    needs,
    pair::Plan,
    ports,
    process::text,
    upstream::Echo,
};
use serde_json::Value;

fn end(agent: &Agent, id: &str) -> Output {
    culvert(&["forward", "end", id, "--config", agent.config().to_str().unwrap()])
}

/// The IDs of the forwards with `peer`, once there are `count` of them, the oldest first.
fn ids(agent: &Agent, peer: &str, count: usize) -> Vec<String> {
    let config = agent.config();
    clock::until("the forwards are listed", PATIENCE, || {
        let answer = culvert(&["status", peer, "--json", "--config", config.to_str().unwrap()]);
        let answer: Value = serde_json::from_str(&text(&answer.stdout)).unwrap();
        let rows = answer["status"]["peers"][0]["forwards"].as_array().unwrap().clone();
        let ids = rows.iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
        if ids.len() == count { Ok(ids) } else { Err(format!("{ids:?}")) }
    })
}

#[test]
fn one_forward_is_reset_at_either_end_and_the_others_go_on() {
    if !needs::met("culvert forward", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ([127, 0, 0, 1], ports::free()).into());
    let pair =
        Plan::default().workers([2, 2]).service("echo", echo.address, "").forward("echo", ingress).start();
    let mut clients: Vec<TcpStream> = Vec::new();
    for count in 1..=3 {
        clients.push(TcpStream::connect(ingress).unwrap());
        pair.exit.wait_for_count("culvert_tcp_streams", &[], count);
    }
    for (left, (peer, agent)) in [3, 2].into_iter().zip(pair.ends()) {
        let id = ids(agent, peer, left).remove(0);
        let output = end(agent, &id);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), format!("ended {id}\n"));
        let mut client = clients.remove(0);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(client.read(&mut [0; 9]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        // It names nothing any more.
        let again = end(agent, &id);
        assert_eq!(again.status.code(), Some(2));
        assert!(text(&again.stderr).contains("no TCP forward has the ID"), "{}", text(&again.stderr));
    }
    let (mut answer, mut client) = (Vec::new(), clients.remove(0));
    client.write_all(b"alive").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"alive");
    let wrong = end(&pair.entry, "17");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("not the ID of a TCP forward (remedy: "), "{}", text(&wrong.stderr));
}

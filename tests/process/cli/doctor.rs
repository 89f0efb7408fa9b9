//! `culvert doctor --probe`: exit codes, and what it finds at ports of which the test knows what they do.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use culvert_tests::{agent::culvert, ports, process::text};
use serde_json::Value;
use socket2::SockRef;

/// Probes a port of this host; returns the exit code and the report.
fn probe(port: u16, more: &[&str]) -> (Option<i32>, Value) {
    let target = format!("127.0.0.1:{port}");
    let output = culvert(&[&["doctor", "--probe", &target, "--seed", "11", "--json"], more].concat());
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr))))
}

/// A port where `answer` is sent to each datagram, if it is not empty, while `test` runs.
fn with_listener(answer: &[u8], test: impl FnOnce(u16)) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    // All that is sent, also while nobody reads.
    SockRef::from(&socket).set_recv_buffer_size(4 << 20).unwrap();
    let (port, ended) = (socket.local_addr().unwrap().port(), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 2_000];
            while !ended.load(Ordering::Relaxed) {
                let received: Option<(usize, SocketAddr)> = socket.recv_from(&mut buffer).ok();
                if let (Some((_, from)), false) = (received, answer.is_empty()) {
                    // Fails only for a prober that has gone.
                    drop(socket.send_to(answer, from));
                }
            }
        });
        // Also when the test panics, or the scope would wait for ever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(port)));
        ended.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn a_port_that_hears_and_says_nothing_is_silent() {
    with_listener(&[], |port| {
        let (code, report) = probe(port, &[]);
        assert_eq!((code, &report["verdict"]), (Some(0), &"silence".into()), "{report:#}");
        let (code, report) = probe(port, &["--expect", "answers", "--wait", "10ms"]);
        assert_eq!((code, &report["verdict"]), (Some(1), &"silence".into()), "{report:#}");
    });
}

#[test]
fn answers_are_counted_for_each_class() {
    with_listener(b"hello", |port| {
        let (code, report) = probe(port, &["--expect", "answers", "--wait", "3s"]);
        assert_eq!((code, &report["verdict"]), (Some(0), &"answers".into()), "{report:#}");
        for class in report["classes"].as_array().unwrap() {
            assert!(class["answers"].as_u64() > Some(0), "{class:#}");
            assert_eq!(class["first_answer"]["start"], "68656c6c6f", "{class:#}");
        }
        assert_eq!(probe(port, &["--wait", "3s"]).0, Some(1));
    });
}

#[test]
fn a_closed_port_is_not_silent() {
    let (code, report) = probe(ports::free(), &[]);
    assert_eq!((code, &report["verdict"]), (Some(1), &"refused".into()), "{report:#}");
}

#[test]
fn wrong_usage_is_refused_with_a_reason() {
    for (arguments, reason) in [
        (&["doctor", "--seed", "1"][..], "--probe"),
        (&["doctor", "--probe", "127.0.0.1:1", "--offline"], "--offline"),
        (&["doctor", "--rate", "5"], "write bits per second"),
        (&["doctor", "--probe", "gw.example.net"], "write a host and a port"),
        (&["doctor", "--probe", "127.0.0.1:0"], "write a host and a port"),
        (&["doctor", "--probe", "127.0.0.1:1", "--wait", "1h"], "write 10ms to 10s"),
        (&["doctor", "--probe", "127.0.0.1:1", "--expect", "nothing"], "silence"),
    ] {
        let output = culvert(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(reason), "{arguments:?}: {}", text(&output.stderr));
    }
}

//! What operators read: counts of control connections, ceilings, sockets.

use std::time::Duration;

use dataplane::socket_stats::SocketStats;
use net::{
    Net, Path as UdpPath, Ready, SendBatch, Token, UdpOptions, UdpRole, memory::MemoryFabric, stats::Booked,
};

use crate::{INGRESS, Pair};

#[test]
fn control_connections_are_counted_and_what_ended_is_kept() {
    let mut pair = Pair::connected(70, "", "");
    let (entry, exit) = (pair.entry, pair.exit);
    pair.world.run(Duration::from_secs(2));
    for place in [entry, exit] {
        for what in ["datagrams", "bytes", "ack_frames"] {
            for direction in ["uplink", "downlink"] {
                let series = format!("culvert_control_{what}_total{{direction=\"{direction}\"}}");
                assert!(pair.world.metric(place, &series) > 0, "{series}");
            }
        }
        assert!(pair.world.metric(place, "culvert_control_packets_sent_total") > 0);
        assert_eq!(pair.world.metric(place, "culvert_connections"), 1);
        assert_eq!(pair.world.metric(place, "culvert_handshakes_pending{worker=\"0\"}"), 0);
    }
    let before = pair.world.agent(entry).workers[0].control().traffic();
    pair.world.stop(exit);
    pair.world.run_till(Duration::from_secs(30), |world| world.metric(entry, "culvert_connections") == 0);
    let after = pair.world.agent(entry).workers[0].control().traffic();
    assert!(after.packets_sent >= before.packets_sent, "{before:?} {after:?}");
    assert!(after.received.datagrams > before.received.datagrams, "the close came: {before:?} {after:?}");
    assert!(after.sent.bytes >= before.sent.bytes, "{before:?} {after:?}");
}

#[test]
fn peers_their_ceilings_and_the_workers_lives_are_shown() {
    let mut pair =
        Pair::with_workers(71, (2, 1), "queue = { packets = 100, bytes = \"1MiB\", time = \"250ms\" }", "");
    pair.wait_for_lanes(2);
    let (entry, exit) = (pair.entry, pair.exit);
    pair.world.run(Duration::from_secs(3));
    let mut shown = |place, series: &str| pair.world.metric(place, series);
    assert_eq!(shown(entry, "culvert_peer_endpoints{peer=\"exit\"}"), 1);
    assert_eq!(shown(exit, "culvert_peer_endpoints{peer=\"entry\"}"), 0);
    assert_eq!(shown(entry, "culvert_queue_limit_packets{peer=\"exit\"}"), 200, "100 at each worker");
    assert_eq!(shown(entry, "culvert_queue_limit_bytes{peer=\"exit\"}"), 2 << 20);
    assert_eq!(shown(entry, "culvert_peers{origin=\"config\"}"), 1, "not one for each worker");
    assert_eq!(shown(entry, "culvert_peers{origin=\"open\"}"), 0);
    for what in ["lanes", "lanes_wanted"] {
        assert_eq!(shown(entry, &format!("culvert_peer_{what}{{peer=\"exit\"}}")), 2, "{what}");
        assert_eq!(shown(exit, &format!("culvert_peer_{what}{{peer=\"entry\"}}")), 2, "{what}");
    }
    for worker in 0..2 {
        let beats = shown(entry, &format!("culvert_worker_beats_total{{worker=\"{worker}\"}}"));
        assert!(beats >= 3, "worker {worker} beat {beats} times in 3 s");
        // Each by itself: one that is full turns peers away, whatever the others have.
        assert_eq!(shown(entry, &format!("culvert_handshakes_pending{{worker=\"{worker}\"}}")), 0);
    }
}

#[test]
fn what_waits_in_the_kernel_is_what_waited_when_the_sockets_were_last_looked_at() {
    let at = |port| ([10, 0, 0, 1], port).into();
    let options = |bind| UdpOptions {
        bind,
        connect: None,
        role: UdpRole::Ingress,
        buffer_bytes: 4 << 20,
        interface: None,
        mark: 0,
        gso: true,
    };
    let mut net = MemoryFabric::default().host(&[[10, 0, 0, 1].into()], Ready::default());
    let mut from = net.udp(&options(at(1)), Token(1)).unwrap();
    let sockets = [2, 3].map(|port| net.udp(&options(at(port)), Token(u32::from(port))).unwrap());
    for (port, count) in [(2, 3), (3, 1)] {
        for _ in 0..count {
            let mut batch = SendBatch::default();
            batch.tail(100).unwrap().fill(7);
            batch.commit(&UdpPath { destination: at(port), source: None, tos: 0 }, 0, 100, 1);
            from.send(&mut batch, &mut |_, _| {});
        }
    }
    let (mut books, mut booked) = (SocketStats::default(), [Booked::default(); 2]);
    let ingress = |books: &SocketStats| books.0[UdpRole::Ingress].kernel_queue;
    let mut look = |books: &mut SocketStats, ask: bool, which: &[usize]| {
        for place in which {
            books.look_at(UdpRole::Ingress, &*sockets[*place], &mut booked[*place], ask);
        }
    };
    look(&mut books, false, &[0, 1]);
    assert_eq!(ingress(&books), 0, "the kernel was not asked");
    look(&mut books, true, &[0, 1]);
    let both = ingress(&books);
    assert!(both >= 400, "{both}: four of 100 bytes");
    look(&mut books, false, &[0, 1]);
    assert_eq!(ingress(&books), both, "until they are looked at again");
    books.forget_kernel_queues();
    look(&mut books, true, &[1]);
    assert_eq!(ingress(&books), both / 4, "the other had no traffic since");
    // One that closes takes with it what waits.
    let mut closing = Booked::default();
    assert_eq!(books.book(UdpRole::Ingress, &*sockets[0], &mut closing, true), both / 4 * 3);
    assert_eq!(ingress(&books), both / 4);
}

#[test]
fn what_a_timer_had_sent_is_published_as_soon_as_what_came() {
    const PUBLISHED_WITHIN: Duration = Duration::from_millis(60);
    let mut pair = Pair::connected(9660, "keepalive = \"3s\"", "");
    let mut client = pair.client(3000);
    let count = |pair: &mut Pair, agent: usize, what: &str, socket: &str| {
        let series = format!("culvert_socket_{what}_datagrams_total{{socket=\"{socket}\"}}");
        pair.world.published(agent, &series)
    };
    pair.run_served(Duration::from_secs(5));
    for apart in (0..60).step_by(3) {
        client.send(INGRESS, b"one");
        pair.run_served(Duration::from_millis(apart));
        // The acknowledgement of its answer leaves by itself, after what came before has been published.
        client.send(INGRESS, b"two");
        pair.run_served(Duration::from_millis(100));
        let (entry, exit) = (pair.entry, pair.exit);
        let came = [
            count(&mut pair, exit, "received", "quic_listen"),
            count(&mut pair, entry, "received", "quic_dial"),
        ];
        pair.run_served(PUBLISHED_WITHIN);
        let sent =
            [count(&mut pair, entry, "sent", "quic_dial"), count(&mut pair, exit, "sent", "quic_listen")];
        assert!(came[0] <= sent[0] && came[1] <= sent[1], "{apart} ms apart: {came:?} came of {sent:?}");
        pair.run_served(Duration::from_millis(1_077));
    }
}

use std::{cell::RefCell, io::ErrorKind, net::IpAddr, net::SocketAddr, rc::Rc};

use crate::{
    Delivery, KernelQueue, Net, Path, Ready, ReceiveBatch, Recipient, SendBatch, SendFailure, SendOutcome,
    Token, UdpOptions, UdpRole, UdpSocket,
    batch::Meta,
    memory::{Datagram, MemoryFabric, MemoryNet, Verdict},
    steering::owner,
    tests::{V4, V6, connected, options, path, payload, put, receive, send, wait},
};

const A: Token = Token(1);
const B: Token = Token(2);

fn ip(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

/// Two hosts, 10.0.0.1 and 10.0.0.2, that report to one queue.
fn two_hosts() -> (MemoryFabric, MemoryNet, MemoryNet, Ready) {
    let (fabric, ready) = (MemoryFabric::default(), Ready::default());
    let one = fabric.host(&[ip(1)], ready.clone());
    let two = fabric.host(&[ip(2), ip(3)], ready.clone());
    (fabric, one, two, ready)
}

fn burst(socket: &mut dyn UdpSocket, way: &Path, count: usize, len: usize) -> Vec<SendOutcome> {
    let mut batch = SendBatch::default();
    for number in 0..count {
        put(&mut batch, way, &payload(number, len));
    }
    send(socket, &mut batch)
}

#[tokio::test]
async fn a_burst_arrives_joined_and_splits_right() {
    for (gro, buffers) in [(true, 2), (false, 80)] {
        let (fabric, mut one, mut two, ready) = two_hosts();
        fabric.set_gro(gro);
        let mut from = one.udp(&options([0, 0, 0, 0].into(), UdpRole::QuicDial), A).unwrap();
        let mut to = two.udp(&options([0, 0, 0, 0].into(), UdpRole::QuicListen), B).unwrap();
        assert!(ready.is_empty(), "nothing to report yet");
        let destination = SocketAddr::new(ip(3), to.local_addr().port());
        let way = Path { destination, source: None, tos: 3 };
        assert_eq!(burst(&mut *from, &way, 80, 500), [SendOutcome::Sent; 2]);
        wait(&ready, B).await;
        let got = receive(&mut *to, &ready, B, 80).await;
        for (number, datagram) in got.iter().enumerate() {
            assert_eq!(datagram.bytes, payload(number, 500));
            assert_eq!(datagram.source, SocketAddr::new(ip(1), from.local_addr().port()));
            assert_eq!((datagram.local, datagram.ecn), (Some(ip(3)), 3));
        }
        assert_eq!((got.len(), to.stats().received_buffers), (80, buffers));
        assert_eq!(from.stats().gso_segments, 80);
    }
}

#[tokio::test]
async fn empty_datagrams_arrive_one_by_one() {
    let (_fabric, mut one, _two, ready) = two_hosts();
    let mut from = one.udp(&options(V6, UdpRole::QuicDial), A).unwrap();
    let mut to = one.udp(&options(V6, UdpRole::QuicListen), B).unwrap();
    assert_eq!(burst(&mut *from, &path(to.local_addr()), 3, 0).len(), 3);
    let got = receive(&mut *to, &ready, B, 3).await;
    assert!(got.len() == 3 && got.iter().all(|datagram| datagram.bytes.is_empty()));
}

#[tokio::test]
async fn a_connected_socket_hears_its_remote_only_and_answers_come_from_the_address_asked() {
    let (_fabric, mut one, mut two, ready) = two_hosts();
    let mut server = two.udp(&options([0, 0, 0, 0].into(), UdpRole::Ingress), A).unwrap();
    let remote = SocketAddr::new(ip(3), server.local_addr().port());
    let mut client = one.udp(&connected(remote), B).unwrap();
    let mut received = ReceiveBatch::default();
    assert!(received.push(
        Meta { len: 0, segment: 3, source: remote, local: None, ecn: 0, age: std::time::Duration::ZERO },
        b"one"
    ));
    let mut delivery = Delivery::default();
    delivery.push(Recipient { owner: 9, ..Recipient::default() }, 0, 0..3, 64);
    let mut outcomes = Vec::new();
    client.deliver(&received, &mut delivery, &mut |message, outcome| {
        outcomes.push((message.to.owner, outcome))
    });
    assert_eq!(outcomes, [(9, SendOutcome::Sent)]);

    let question = receive(&mut *server, &ready, A, 1).await.remove(0);
    assert_eq!((question.source, question.local), (client.local_addr(), Some(ip(3))));
    let mut batch = SendBatch::default();
    put(&mut batch, &Path { destination: question.source, source: Some(ip(2)), tos: 0 }, b"other address");
    put(&mut batch, &Path { destination: question.source, source: question.local, tos: 0 }, b"answer");
    assert_eq!(send(&mut *server, &mut batch), [SendOutcome::Sent; 2]);
    let got = receive(&mut *client, &ready, B, 1).await;
    assert_eq!((got.len(), &got[0].bytes[..]), (1, &b"answer"[..]));
}

#[tokio::test]
async fn a_full_queue_drops_and_counts() {
    let (_fabric, mut one, _two, ready) = two_hosts();
    let mut from = one.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let small = UdpOptions { buffer_bytes: 12_560, ..options(V4, UdpRole::QuicListen) };
    let mut to = one.udp(&small, B).unwrap();
    assert_eq!(burst(&mut *from, &path(to.local_addr()), 30, 1_000), [SendOutcome::Sent]);
    assert_eq!(to.kernel_queue(), KernelQueue { drops: 20, bytes: 12_560 });
    assert_eq!(receive(&mut *to, &ready, B, 10).await.len(), 10);
    assert_eq!(to.kernel_queue(), KernelQueue { drops: 20, bytes: 0 });
    assert_eq!(burst(&mut *from, &path(to.local_addr()), 1, 1_000), [SendOutcome::Sent]);
    assert_eq!(receive(&mut *to, &ready, B, 1).await.len(), 1);
}

#[tokio::test]
async fn the_hook_drops_doubles_and_delays() {
    let (fabric, mut one, mut two, ready) = two_hosts();
    let mut from = one.udp(&options(ip(1), UdpRole::QuicDial), A).unwrap();
    let mut to = two.udp(&options(ip(2), UdpRole::QuicListen), B).unwrap();
    let held = Rc::new(RefCell::new(Vec::new()));
    let holder = Rc::clone(&held);
    fabric.set_hook(move |datagram| match datagram.payload[0] {
        0 => Verdict::Drop,
        1 => Verdict::Duplicate,
        2 => {
            holder.borrow_mut().push((datagram.from, datagram.to, datagram.payload.to_vec()));
            Verdict::Drop
        }
        _ => Verdict::Deliver,
    });
    let mut batch = SendBatch::default();
    for number in [0, 1, 2, 3] {
        put(&mut batch, &path(to.local_addr()), &[number; 4]);
    }
    assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
    let first: Vec<_> = receive(&mut *to, &ready, B, 3).await.iter().map(|got| got.bytes[0]).collect();
    assert_eq!(first, [1, 1, 3]);
    let mut received = ReceiveBatch::default();
    assert_eq!(to.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);
    for (from, to, payload) in held.borrow_mut().drain(..) {
        assert!(fabric.inject(&Datagram { from, to, tos: 0, payload: &payload }));
    }
    wait(&ready, B).await;
    assert_eq!(receive(&mut *to, &ready, B, 1).await[0].bytes, [2; 4]);
}

#[tokio::test]
async fn a_refusal_reaches_a_connected_socket_and_no_route_every_one() {
    let (_fabric, mut one, mut two, ready) = two_hosts();
    let nobody = SocketAddr::new(ip(2), 9);
    let mut client = one.udp(&connected(nobody), B).unwrap();
    let mut received = ReceiveBatch::default();
    assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert_eq!(burst(&mut *client, &path(nobody), 1, 10), [SendOutcome::Sent]);
    wait(&ready, B).await;
    assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);

    let mut sender = two.udp(&options([0, 0, 0, 0].into(), UdpRole::QuicDial), A).unwrap();
    let nowhere = path(SocketAddr::new(ip(99), 9));
    assert_eq!(burst(&mut *sender, &nowhere, 2, 10), [SendOutcome::Failed(SendFailure::Unreachable)]);
    let error = one.udp(&connected(nowhere.destination), A).err().map(|error| error.kind());
    assert_eq!(error, Some(ErrorKind::NetworkUnreachable));
}

#[test]
fn binding_follows_the_kernels_rules() {
    let (_fabric, mut one, mut two, _ready) = two_hosts();
    let bind = |net: &mut MemoryNet, address: &str| {
        let options = UdpOptions { bind: address.parse().unwrap(), ..options(V4, UdpRole::QuicListen) };
        net.udp(&options, A).map_err(|error| error.kind())
    };
    let wildcard = bind(&mut one, "0.0.0.0:53").unwrap();
    assert_eq!(bind(&mut one, "10.0.0.1:53").err(), Some(ErrorKind::AddrInUse));
    assert!(bind(&mut one, "[::]:53").is_ok(), "V6ONLY");
    assert!(bind(&mut two, "0.0.0.0:53").is_ok(), "another host");
    assert_eq!(bind(&mut one, "10.0.0.2:54").err(), Some(ErrorKind::AddrNotAvailable));
    drop(wildcard);
    assert!(bind(&mut one, "10.0.0.1:53").is_ok());
    let first = bind(&mut one, "0.0.0.0:0").unwrap().local_addr();
    assert_ne!(first.port(), bind(&mut one, "0.0.0.0:0").unwrap().local_addr().port());
}

/// One host, 10.0.0.9, of three workers, and another, 10.0.0.1, that sends to it.
fn three_workers() -> (Vec<MemoryNet>, Vec<Ready>, MemoryNet) {
    let fabric = MemoryFabric::default();
    let readies = vec![Ready::default(), Ready::default(), Ready::default()];
    let workers = fabric.worker_hosts(&[ip(9)], &readies);
    (workers, readies, fabric.host(&[ip(1)], Ready::default()))
}

/// Receives all datagrams that wait at a socket.
fn drain(socket: &mut dyn UdpSocket) -> Vec<crate::tests::Got> {
    let mut batch = ReceiveBatch::default();
    let mut got = Vec::new();
    while socket.receive(&mut batch).is_ok() {
        got.extend(crate::tests::datagrams(&batch));
    }
    got
}

#[tokio::test]
async fn workers_hear_the_connection_ids_that_are_theirs() {
    let (mut workers, readies, mut far) = three_workers();
    let asked = options(ip(9), UdpRole::QuicListen);
    let mut group: Vec<_> = workers.iter_mut().map(|net| net.udp(&asked, B).unwrap()).collect();
    let address = group[0].local_addr();
    assert!(group.iter().all(|socket| socket.local_addr() == address), "port 0 is one port for all");
    let mut from = far.udp(&options(ip(1), UdpRole::QuicDial), A).unwrap();
    for byte in 0..=u8::MAX {
        for datagram in [[0x40, byte, 1, 1, 1, 1, 1], [0x80, 1, 1, 1, 1, 1, byte]] {
            let mut batch = SendBatch::default();
            put(&mut batch, &path(address), &datagram);
            assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
        }
    }
    for (worker, (socket, ready)) in (0..).zip(group.iter_mut().zip(&readies)) {
        wait(ready, B).await;
        let got = drain(&mut **socket);
        assert_eq!(got.len(), 2 * (0..=u8::MAX).filter(|byte| byte % 3 == worker).count());
        assert!(got.iter().all(|datagram| owner(&datagram.bytes, 3) == worker));
    }

    drop(group.remove(1));
    let mut batch = SendBatch::default();
    put(&mut batch, &path(address), &[0x40, 1]);
    assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
    let got: usize = group.iter_mut().map(|socket| drain(&mut **socket).len()).sum();
    assert_eq!(got, 1, "the others hear what is for a worker without a socket");
}

#[test]
fn an_ingress_group_keeps_a_client_on_one_worker_in_memory() {
    let (mut workers, _readies, mut far) = three_workers();
    let asked = options([0, 0, 0, 0].into(), UdpRole::Ingress);
    let mut group: Vec<_> = workers.iter_mut().map(|net| net.udp(&asked, B).unwrap()).collect();
    let to = SocketAddr::new(ip(9), group[0].local_addr().port());
    let mut clients = [0; 3];
    for _ in 0..300 {
        let mut client = far.udp(&connected(to), A).unwrap();
        assert_eq!(burst(&mut *client, &path(to), 4, 9), [SendOutcome::Sent]);
        let counts: Vec<_> = group.iter_mut().map(|socket| drain(&mut **socket).len()).collect();
        let worker = counts.iter().position(|count| *count == 4).expect("all four go to one worker");
        clients[worker] += 1;
    }
    assert!(clients.iter().all(|count| *count > 50), "{clients:?} of 300");
}

#[test]
fn workers_share_ports_and_no_more() {
    let (mut workers, _readies, _far) = three_workers();
    let at = |role, address: &str| UdpOptions { bind: address.parse().unwrap(), ..options(V4, role) };
    let kind = |result: std::io::Result<Box<dyn UdpSocket>>| result.err().map(|error| error.kind());
    let listen = at(UdpRole::QuicListen, "10.0.0.9:53");
    let _one = workers[0].udp(&listen, A).unwrap();
    let _two = workers[1].udp(&listen, A).unwrap();
    assert_eq!(kind(workers[0].udp(&listen, B)), Some(ErrorKind::AddrInUse), "one socket of each worker");
    let ingress = at(UdpRole::Ingress, "10.0.0.9:53");
    assert_eq!(kind(workers[2].udp(&ingress, B)), Some(ErrorKind::AddrInUse), "one role to a group");
    let wildcard = at(UdpRole::QuicListen, "0.0.0.0:53");
    assert_eq!(kind(workers[2].udp(&wildcard, B)), Some(ErrorKind::AddrInUse), "one address to a group");

    let dynamic = at(UdpRole::Ingress, "10.0.0.9:0");
    let mut ports = Vec::new();
    for net in &mut workers {
        let sockets: Vec<_> = (0..3).map(|_| net.udp(&dynamic, A).unwrap()).collect();
        ports.push(sockets.iter().map(|socket| socket.local_addr().port()).collect::<Vec<_>>());
    }
    assert!(ports.windows(2).all(|pair| pair[0] == pair[1]), "{ports:?}");
    let dial = at(UdpRole::QuicDial, "10.0.0.9:0");
    let lanes: Vec<_> = workers.iter_mut().map(|net| net.udp(&dial, A).unwrap()).collect();
    assert_ne!(lanes[0].local_addr(), lanes[1].local_addr(), "what is dialled from is nobody else's");
}

#[test]
fn workers_share_what_waits_to_be_accepted() {
    let (mut workers, readies, mut far) = three_workers();
    let asked = SocketAddr::new(ip(9), 0);
    let mut listeners: Vec<_> = workers.iter_mut().map(|net| net.tcp_listen(asked, A).unwrap()).collect();
    let address = listeners[0].local_addr();
    let again = workers[1].tcp_listen(address, A).err().map(|error| error.kind());
    assert_eq!(again, Some(ErrorKind::AddrInUse));
    let mut kept = Vec::new();
    for (round, first) in [1, 2, 0].into_iter().enumerate() {
        for listener in &mut listeners {
            assert!(listener.accept(B).is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
        }
        kept.push(far.tcp_connect(address, A).unwrap());
        for ready in &readies {
            let mut tokens = Vec::new();
            ready.drain(&mut tokens);
            assert_eq!(tokens, [A], "every listener is told, round {round}");
        }
        kept.push(listeners[first].accept(B).unwrap().0);
    }
    listeners.pop();
    listeners.remove(0);
    let mut stream = far.tcp_connect(address, A).unwrap();
    assert!(stream.connected().is_ok(), "one listener is enough");
    listeners.clear();
    assert_eq!(stream.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let mut refused = far.tcp_connect(address, A).unwrap();
    assert_eq!(refused.connected().unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

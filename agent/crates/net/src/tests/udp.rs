use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    time::Duration,
};

use crate::{
    Delivery, Gso, KernelQueue, Net, Path, ReceiveBatch, Recipient, SendBatch, SendFailure, SendOutcome,
    Token, UdpOptions, UdpRole, UdpSocket,
    sys::Outgoing,
    tests::{V4, V6, connected, kernel, options, path, payload, put, receive, send, wait},
    transmit::GSO_RETRY,
};

const A: Token = Token(1);
const B: Token = Token(2);

#[tokio::test]
async fn a_full_gso_message_arrives_joined_and_splits_right() {
    for ip in [V4, V6] {
        let (mut net, ready, _) = kernel();
        let mut from = net.udp(&options(ip, UdpRole::QuicDial), A).unwrap();
        let mut to = net.udp(&options(ip, UdpRole::QuicListen), B).unwrap();
        let mut batch = SendBatch::default();
        let way = Path { destination: to.local_addr(), source: None, tos: 2 };
        for number in 0..64 {
            put(&mut batch, &way, &payload(number, 1_000));
        }
        assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
        assert!(batch.is_empty());

        let got = receive(&mut *to, &ready, B, 64).await;
        assert_eq!(got.len(), 64);
        for (number, datagram) in got.iter().enumerate() {
            assert_eq!(datagram.bytes, payload(number, 1_000));
            assert_eq!(datagram.source, from.local_addr());
            assert_eq!((datagram.local, datagram.ecn), (Some(ip), 2));
        }
        let (sent, received) = (from.stats(), to.stats());
        assert_eq!((sent.gso_messages, sent.gso_segments, sent.gso_fallbacks), (1, 64, 0));
        assert_eq!((received.received_datagrams, received.received_bytes), (64, 64_000));
        assert!(received.received_buffers < 64, "GRO joined some of {} buffers", received.received_buffers);
    }
}

#[tokio::test]
async fn a_decoys_socket_keeps_ecn_bits_both_ways() {
    for ip in [V4, V6] {
        let (mut net, ready, _) = kernel();
        let mut decoy = net.udp(&options(ip, UdpRole::QuicListen), A).unwrap();
        let to_decoy = UdpOptions { role: UdpRole::Decoy, ..connected(decoy.local_addr()) };
        let mut sender = net.udp(&to_decoy, B).unwrap();
        let mut batch = SendBatch::default();
        for ecn in 0..4 {
            put(&mut batch, &Path { tos: ecn, ..path(decoy.local_addr()) }, &payload(1, 1_200));
        }
        assert_eq!(send(&mut *sender, &mut batch), [SendOutcome::Sent; 4]);
        let got = receive(&mut *decoy, &ready, A, 4).await;
        assert_eq!(got.iter().map(|datagram| datagram.ecn).collect::<Vec<_>>(), [0, 1, 2, 3]);
        for datagram in &got {
            put(&mut batch, &Path { tos: 3 - datagram.ecn, ..path(datagram.source) }, &datagram.bytes);
        }
        assert_eq!(send(&mut *decoy, &mut batch), [SendOutcome::Sent; 4]);
        let got = receive(&mut *sender, &ready, B, 4).await;
        assert_eq!(got.iter().map(|datagram| datagram.ecn).collect::<Vec<_>>(), [3, 2, 1, 0]);
        assert!(got.iter().all(|datagram| datagram.bytes == payload(1, 1_200)));
    }
}

#[tokio::test]
async fn mixed_messages_of_several_destinations_arrive_whole() {
    for ip in [V4, V6] {
        let (mut net, ready, _) = kernel();
        let mut from = net.udp(&options(ip, UdpRole::QuicDial), A).unwrap();
        let mut one = net.udp(&options(ip, UdpRole::Ingress), B).unwrap();
        let mut two = net.udp(&options(ip, UdpRole::Ingress), Token(3)).unwrap();
        let lens = [0, 5, 5, 3, 0, 0, 1_400, 1_400, 7];
        let mut batch = SendBatch::default();
        for (number, len) in lens.into_iter().enumerate() {
            put(&mut batch, &path(one.local_addr()), &payload(number, len));
            if len == 5 {
                put(&mut batch, &path(two.local_addr()), &payload(number, len));
            }
        }
        assert!(send(&mut *from, &mut batch).iter().all(|outcome| *outcome == SendOutcome::Sent));
        let got = receive(&mut *one, &ready, B, lens.len()).await;
        for (number, (datagram, len)) in got.iter().zip(lens).enumerate() {
            assert_eq!(datagram.bytes, payload(number, len));
        }
        assert_eq!(got.len(), lens.len());
        assert_eq!(receive(&mut *two, &ready, Token(3), 2).await.len(), 2);
    }
}

#[tokio::test]
async fn a_wildcard_socket_answers_from_the_address_it_was_asked_at() {
    let (mut net, ready, _) = kernel();
    let mut server = net.udp(&options([0, 0, 0, 0].into(), UdpRole::Ingress), A).unwrap();
    let asked: IpAddr = [127, 0, 0, 5].into();
    let remote = SocketAddr::new(asked, server.local_addr().port());
    // Connected, so that an answer from another address would not arrive.
    let mut client = net.udp(&connected(remote), B).unwrap();
    let mut batch = SendBatch::default();
    put(&mut batch, &path(remote), b"question");
    assert_eq!(send(&mut *client, &mut batch), [SendOutcome::Sent]);

    let question = receive(&mut *server, &ready, A, 1).await.remove(0);
    assert_eq!(question.local, Some(asked));
    let way = Path { destination: question.source, source: question.local, tos: 0 };
    put(&mut batch, &way, b"answer");
    assert_eq!(send(&mut *server, &mut batch), [SendOutcome::Sent]);
    let answer = receive(&mut *client, &ready, B, 1).await.remove(0);
    assert_eq!((answer.source, &answer.bytes[..]), (remote, &b"answer"[..]));
}

#[tokio::test]
async fn payloads_are_delivered_from_where_they_lie() {
    let (mut net, ready, _) = kernel();
    let mut service = net.udp(&options(V4, UdpRole::Ingress), A).unwrap();
    let mut upstream = net.udp(&connected(service.local_addr()), B).unwrap();
    let mut received = ReceiveBatch::new(4, 2_000);
    let meta = crate::batch::Meta {
        len: 0,
        segment: 1_400,
        source: service.local_addr(),
        local: None,
        ecn: 0,
        age: Duration::ZERO,
    };
    for number in 0..4 {
        assert!(received.push(meta, &payload(number, 1_400)));
    }
    let mut delivery = Delivery::default();
    let to = Recipient { owner: 7, ..Recipient::default() };
    for index in 0..4 {
        delivery.push(to, index, 30..830, 64);
    }
    delivery.push(to, 3, 900..1_000, 64);
    delivery.push(to, 3, 5..5, 64);
    let mut outcomes = Vec::new();
    upstream.deliver(&received, &mut delivery, &mut |message, outcome| {
        outcomes.push((message.to.owner, message.payloads, outcome));
    });
    assert_eq!(outcomes, [(7, 5, SendOutcome::Sent), (7, 1, SendOutcome::Sent)]);
    assert!(delivery.is_empty());
    let got = receive(&mut *service, &ready, A, 6).await;
    for (index, datagram) in got.iter().take(4).enumerate() {
        assert_eq!(datagram.bytes, received.buffer(index)[30..830]);
    }
    assert_eq!(got[4].bytes, received.buffer(3)[900..1_000]);
    assert!(got[5].bytes.is_empty());
    assert_eq!(upstream.stats().gso_segments, 5);
}

#[tokio::test]
async fn a_datagram_that_is_too_large_costs_only_itself() {
    let (mut net, ready, _) = kernel();
    // Never fragmented: the loopback's MTU of 65,536 stops the largest IPv6 datagrams.
    let mut from = net.udp(&options(V6, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V6, UdpRole::QuicListen), B).unwrap();
    let way = path(to.local_addr());
    let mut batch = SendBatch::default();
    put(&mut batch, &way, b"before");
    put(&mut batch, &Path { tos: 1, ..way }, &payload(1, 65_500));
    put(&mut batch, &way, b"after");
    let outcomes = send(&mut *from, &mut batch);
    let large = outcomes[1];
    assert_eq!([outcomes[0], outcomes[2]], [SendOutcome::Sent; 2]);
    assert_eq!(large, SendOutcome::Failed(SendFailure::TooLarge));
    let got = receive(&mut *to, &ready, B, 2).await;
    assert_eq!([&got[0].bytes[..], &got[1].bytes[..]], [&b"before"[..], &b"after"[..]]);
    assert_eq!(from.stats().send_failures, 1);
}

/// A kernel whose GSO fails with `errno`, as sendmmsg reports it: what stands before is sent.
fn failing_gso<'b>(call: &mut Outgoing<'_, 'b>, socket: BorrowedFd<'_>, errno: i32) -> io::Result<usize> {
    match (0..call.len()).find(|index| call.header(*index).0 > 1) {
        Some(0) => Err(io::Error::from_raw_os_error(errno)),
        Some(index) => {
            call.truncate(index);
            call.send(socket)
        }
        None => call.send(socket),
    }
}

#[tokio::test]
async fn after_eio_datagrams_go_singly_until_gso_is_tried_again() {
    let (mut net, ready, clock) = kernel();
    let mut from = net.open_udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    from.transmitter.raw = |call, socket| failing_gso(call, socket, libc::EIO);
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    let way = path(to.local_addr());
    let mut number = 0;
    let mut burst = |batch: &mut SendBatch| {
        for _ in 0..100 {
            put(batch, &way, &payload(number, 700));
            number += 1;
        }
    };
    burst(&mut batch);
    assert_eq!(send(&mut from, &mut batch), [SendOutcome::Sent; 2]);
    let got = receive(&mut *to, &ready, B, 100).await;
    assert!(got.iter().enumerate().all(|(number, datagram)| datagram.bytes == payload(number, 700)));
    let stats = from.stats();
    assert_eq!((stats.gso_messages, stats.gso_fallbacks, stats.sent_datagrams), (0, 2, 100));
    let offload = from.offload(way.destination);
    assert_eq!((offload.gso, offload.gro), (Gso::Failed, true));
    let elsewhere = SocketAddr::from(([192, 0, 2, 1], 1));
    assert_eq!(from.offload(elsewhere).gso, Gso::On, "it is a matter of the destination");

    // GSO would work again, but the destination is not tried before its time.
    from.transmitter.raw = |call, socket| call.send(socket);
    clock.advance(GSO_RETRY - Duration::from_secs(1));
    burst(&mut batch);
    assert_eq!(send(&mut from, &mut batch).len(), 2);
    assert_eq!((from.stats().gso_messages, from.stats().gso_fallbacks), (0, 4));
    clock.advance(Duration::from_secs(2));
    burst(&mut batch);
    assert_eq!(send(&mut from, &mut batch).len(), 2);
    assert_eq!((from.stats().gso_messages, from.stats().gso_fallbacks), (2, 4));
    assert_eq!(from.offload(way.destination).gso, Gso::On);
    assert_eq!(receive(&mut *to, &ready, B, 200).await.len(), 200);
}

#[tokio::test]
async fn a_size_error_does_not_switch_gso_off() {
    for errno in [libc::EMSGSIZE, libc::EINVAL] {
        let (mut net, ready, _) = kernel();
        let mut from = net.open_udp(&options(V4, UdpRole::QuicDial), A).unwrap();
        from.transmitter.raw = match errno {
            libc::EMSGSIZE => |call, socket| failing_gso(call, socket, libc::EMSGSIZE),
            _ => |call, socket| failing_gso(call, socket, libc::EINVAL),
        };
        let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
        let mut batch = SendBatch::default();
        for number in 0..10 {
            put(&mut batch, &path(to.local_addr()), &payload(number, 700));
        }
        assert_eq!(send(&mut from, &mut batch), [SendOutcome::Sent]);
        assert_eq!((from.stats().gso_messages, from.stats().gso_fallbacks), (0, 1));
        from.transmitter.raw = |call, socket| call.send(socket);
        for number in 0..10 {
            put(&mut batch, &path(to.local_addr()), &payload(number, 700));
        }
        assert_eq!(send(&mut from, &mut batch), [SendOutcome::Sent]);
        assert_eq!((from.stats().gso_messages, from.stats().gso_fallbacks), (1, 1));
        assert_eq!(receive(&mut *to, &ready, B, 20).await.len(), 20);
    }
}

#[tokio::test]
async fn without_gso_messages_are_cut_into_datagrams() {
    let (mut net, ready, _) = kernel();
    let mut without = options(V4, UdpRole::QuicDial);
    without.gso = false;
    let mut from = net.udp(&without, A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    for number in 0..64 {
        put(&mut batch, &path(to.local_addr()), &payload(number, 300));
    }
    assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
    assert_eq!((from.stats().gso_messages, from.stats().sent_datagrams), (0, 64));
    let got = receive(&mut *to, &ready, B, 64).await;
    assert!(got.iter().enumerate().all(|(number, datagram)| datagram.bytes == payload(number, 300)));
}

/// A kernel with room for three datagrams.
fn three_at_most<'b>(call: &mut Outgoing<'_, 'b>, socket: BorrowedFd<'_>) -> io::Result<usize> {
    if call.len() <= 3 {
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    call.truncate(3);
    call.send(socket)
}

#[tokio::test]
async fn a_full_send_buffer_keeps_what_is_left_even_amid_a_message() {
    let (mut net, ready, _) = kernel();
    let mut without = options(V4, UdpRole::QuicDial);
    without.gso = false;
    let mut from = net.open_udp(&without, A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    for number in 0..8 {
        put(&mut batch, &path(to.local_addr()), &payload(number, 300));
    }
    put(&mut batch, &path(to.local_addr()), &payload(8, 400));
    from.transmitter.raw = three_at_most;
    assert_eq!(send(&mut from, &mut batch), [], "6 of 8 datagrams of the first message are gone");
    assert_eq!((batch.messages().len(), from.stats().sent_datagrams, from.stats().would_block), (2, 6, 1));

    wait(&ready, A).await;
    from.transmitter.raw = |call, socket| call.send(socket);
    assert_eq!(send(&mut from, &mut batch), [SendOutcome::Sent; 2]);
    assert!(batch.is_empty());
    let got = receive(&mut *to, &ready, B, 9).await;
    let lens = [300, 300, 300, 300, 300, 300, 300, 300, 400];
    assert_eq!(got.len(), 9);
    assert!(got.iter().enumerate().all(|(number, datagram)| datagram.bytes == payload(number, lens[number])));
}

#[tokio::test]
async fn without_a_descriptor_a_full_socket_is_tried_again_later_not_at_once() {
    let (mut net, ready, _) = kernel();
    let without = UdpOptions { gso: false, ..options(V4, UdpRole::QuicDial) };
    let mut from = net.open_udp(&without, A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    for number in 0..8 {
        put(&mut batch, &path(to.local_addr()), &payload(number, 300));
    }
    from.transmitter.raw = |_, _| Err(io::Error::from_raw_os_error(libc::EAGAIN));
    from.watch = |_| Err(io::Error::from_raw_os_error(libc::EMFILE));
    ready.drain(&mut Vec::new());
    for _ in 0..100 {
        assert_eq!(send(&mut from, &mut batch), []);
        assert!(ready.is_empty(), "the worker sleeps");
    }
    wait(&ready, A).await;
    from.transmitter.raw = |call, socket| call.send(socket);
    assert_eq!(send(&mut from, &mut batch), [SendOutcome::Sent]);
    assert_eq!(receive(&mut *to, &ready, B, 8).await.len(), 8);
}

#[tokio::test]
async fn a_wall_clock_that_runs_ahead_makes_no_datagram_older() {
    // The stamps are of the host's clock; the monotonic one moves only as the test says.
    let (mut net, ready, clock) = kernel();
    let mut from = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    for number in 0..40_usize {
        put(&mut batch, &path(to.local_addr()), &payload(number, 100 + number));
    }
    send(&mut *from, &mut batch);
    wait(&ready, B).await;
    let mut received = ReceiveBatch::new(1, 2_000);
    let mut age = || {
        to.receive(&mut received).unwrap();
        received.meta(0).age
    };
    let first = age();
    tokio::time::sleep(Duration::from_millis(20)).await;
    for call in 1..32 {
        assert!(age() <= first, "call {call}: no time has passed");
    }
    clock.advance(Duration::from_secs(1));
    let last = age();
    assert!(last >= Duration::from_millis(20) && last <= Duration::from_secs(1) + first, "{last:?}");
}

#[tokio::test]
async fn a_delivery_that_would_block_is_reported_and_dropped() {
    let (mut net, _ready, _) = kernel();
    let service = net.udp(&options(V4, UdpRole::Ingress), A).unwrap();
    let mut without = connected(service.local_addr());
    without.gso = false;
    let mut upstream = net.open_udp(&without, B).unwrap();
    upstream.transmitter.raw = three_at_most;
    let mut received = ReceiveBatch::new(1, 2_000);
    let meta = crate::batch::Meta {
        len: 0,
        segment: 1,
        source: service.local_addr(),
        local: None,
        ecn: 0,
        age: Duration::ZERO,
    };
    assert!(received.push(meta, &payload(0, 1_000)));
    let mut delivery = Delivery::default();
    for owner in [1, 1, 1, 1, 2, 2] {
        delivery.push(Recipient { owner, ..Recipient::default() }, 0, 0..100, 64);
    }
    let mut outcomes = Vec::new();
    upstream.deliver(&received, &mut delivery, &mut |message, outcome| {
        outcomes.push((message.to.owner, outcome))
    });
    let why = SendFailure::WouldBlock;
    assert_eq!(outcomes, [(1, SendOutcome::Partly { failed: 1, why }), (2, SendOutcome::Failed(why))]);
    assert_eq!((upstream.stats().sent_datagrams, upstream.stats().send_failures), (3, 3));
}

#[tokio::test]
async fn a_refusal_is_reported_and_does_not_disturb() {
    let (mut net, ready, _) = kernel();
    let nobody = net.udp(&options(V4, UdpRole::Ingress), A).unwrap().local_addr();
    let mut client = net.udp(&connected(nobody), B).unwrap();
    let mut received = ReceiveBatch::default();
    let mut batch = SendBatch::default();
    assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);
    for _ in 0..3 {
        put(&mut batch, &path(nobody), b"anybody?");
        put(&mut batch, &Path { tos: 1, ..path(nobody) }, b"anybody?");
        // The second datagram meets the error of the first, and is tried once more.
        assert_eq!(send(&mut *client, &mut batch), [SendOutcome::Sent; 2]);
        wait(&ready, B).await;
        assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        while client.receive(&mut received).unwrap_err().kind() != ErrorKind::WouldBlock {}
    }
    let mut service = net.udp(&UdpOptions { bind: nobody, ..options(V4, UdpRole::Ingress) }, A).unwrap();
    put(&mut batch, &path(nobody), b"now?");
    assert_eq!(send(&mut *client, &mut batch), [SendOutcome::Sent]);
    assert_eq!(receive(&mut *service, &ready, A, 1).await[0].bytes, b"now?");
}

#[tokio::test]
async fn a_refusal_is_reported_while_nothing_more_is_sent() {
    let (mut net, ready, _) = kernel();
    let nobody = net.udp(&options(V4, UdpRole::Ingress), A).unwrap().local_addr();
    let mut client = net.udp(&connected(nobody), B).unwrap();
    let mut received = ReceiveBatch::default();
    let mut batch = SendBatch::default();
    for _ in 0..3 {
        put(&mut batch, &path(nobody), b"anybody?");
        assert_eq!(send(&mut *client, &mut batch), [SendOutcome::Sent]);
        wait(&ready, B).await;
        assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(client.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

#[tokio::test]
async fn a_second_bind_finds_the_address_in_use() {
    let (mut net, _ready, _) = kernel();
    for role in [UdpRole::QuicListen, UdpRole::Ingress] {
        let first = net.udp(&options(V4, role), A).unwrap();
        let mut again = options(V4, role);
        again.bind = first.local_addr();
        assert!(matches!(net.udp(&again, B), Err(error) if error.kind() == ErrorKind::AddrInUse));
    }
}

#[tokio::test]
async fn a_token_is_reported_after_each_would_block() {
    let (mut net, ready, _) = kernel();
    let mut from = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    let mut received = ReceiveBatch::default();
    for round in 0..50 {
        assert_eq!(to.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);
        put(&mut batch, &path(to.local_addr()), &payload(round, 100));
        assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
        wait(&ready, B).await;
        to.receive(&mut received).unwrap();
        assert_eq!((received.len(), received.buffer(0)), (1, &payload(round, 100)[..]));
    }
}

#[tokio::test]
async fn a_batch_that_empties_a_socket_is_the_last_and_has_the_token_reported() {
    let (mut net, ready, _) = kernel();
    let mut from = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    let mut received = ReceiveBatch::new(2, 2_000);
    for round in 0..50 {
        // Each call but the last one fills its batch: there may be more behind it.
        let count = 1 + 2 * (round % 3);
        for index in 0..count {
            put(&mut batch, &path(to.local_addr()), &payload(index, 100 + index));
            assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
        }
        wait(&ready, B).await;
        let mut seen = 0;
        while seen < count {
            to.receive(&mut received).unwrap();
            seen += received.len();
            assert_eq!(received.last, seen == count, "{seen} of {count}");
        }
        // Nothing asks for a WouldBlock before the next round.
    }
    received.clear();
    assert!(!received.last);
}

#[tokio::test]
async fn a_truncated_buffer_is_refused_and_its_neighbours_are_not() {
    let (mut net, ready, _) = kernel();
    let mut from = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    for len in [90, 200, 95] {
        put(&mut batch, &path(to.local_addr()), &payload(len, len));
        assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
    }
    wait(&ready, B).await;
    let mut received = ReceiveBatch::new(4, 100);
    to.receive(&mut received).unwrap();
    let lens: Vec<_> = (0..received.len()).map(|index| received.buffer(index).len()).collect();
    assert_eq!(lens, [90, 95]);
    assert_eq!(received.buffer(1), payload(95, 95));
    assert_eq!(to.stats().truncated, 1);
}

#[tokio::test]
async fn an_outcome_may_send_on_another_socket() {
    let (mut net, ready, _) = kernel();
    let mut one = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut two = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::QuicListen), B).unwrap();
    let mut batch = SendBatch::default();
    let mut inner = SendBatch::default();
    put(&mut batch, &path(to.local_addr()), b"outer");
    put(&mut inner, &path(to.local_addr()), b"inner");
    one.send(&mut batch, &mut |_, _| assert_eq!(send(&mut *two, &mut inner), [SendOutcome::Sent]));
    assert_eq!(receive(&mut *to, &ready, B, 2).await.len(), 2);
}

#[tokio::test]
async fn the_kernels_drops_are_seen() {
    let (mut net, ready, _) = kernel();
    let mut from = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut small = options(V4, UdpRole::QuicListen);
    small.buffer_bytes = 10_000;
    let mut to = net.udp(&small, B).unwrap();
    assert_eq!(to.kernel_queue(), KernelQueue::default());
    let mut batch = SendBatch::default();
    for number in 0..200_usize {
        let ecn = (number % 2) as u8;
        put(&mut batch, &Path { tos: ecn, ..path(to.local_addr()) }, &payload(number, 1_000));
    }
    assert_eq!(send(&mut *from, &mut batch).len(), 200);
    let queue = to.kernel_queue();
    assert!(queue.drops > 100, "{queue:?}");
    assert_eq!(to.kernel_drops(), queue.drops);
    assert!(queue.bytes > 1_000, "what was not dropped waits: {queue:?}");
    let waiting = 200 - queue.drops as usize;
    assert_eq!(receive(&mut *to, &ready, B, waiting).await.len(), waiting);
    assert_eq!(to.kernel_queue(), KernelQueue { bytes: 0, ..queue });
}

#[tokio::test]
async fn the_kernel_tells_how_long_a_buffer_waited() {
    for role in [UdpRole::QuicListen, UdpRole::QuicDial, UdpRole::Ingress] {
        for ip in [V4, V6] {
            let (mut net, ready, _) = kernel();
            let mut from = net.udp(&options(ip, UdpRole::QuicDial), A).unwrap();
            let mut to = net.udp(&options(ip, role), B).unwrap();
            let mut batch = SendBatch::default();
            // Every control message at once, a GRO size among them.
            let way = Path { tos: 1, ..path(to.local_addr()) };
            (0..8).for_each(|number| put(&mut batch, &way, &payload(number, 500)));
            assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
            wait(&ready, B).await;
            let mut received = ReceiveBatch::default();
            to.receive(&mut received).unwrap();
            let stats = to.stats();
            assert_eq!(stats.truncated, 0, "all control messages fit");
            let age = received.meta(0).age;
            assert!(age > Duration::ZERO, "stamped");
            assert_eq!(stats.ages.iter().sum::<u64>(), stats.received_buffers);
            assert!(u128::from(stats.age_max_nanos) >= age.as_nanos());
            assert!(stats.age_sum_nanos >= stats.age_max_nanos);
            assert_eq!(to.stats().age_max_nanos, 0, "the greatest age is told once");
            assert_eq!(stats.receive_sizes.iter().sum::<u64>(), 1);
            assert_eq!(from.stats().send_sizes, [0, 0, 0, 1, 0, 0, 0]);
        }
    }
}

#[tokio::test]
async fn an_age_holds_until_the_queue_was_empty() {
    let (mut net, ready, _) = kernel();
    let mut from = net.udp(&options(V4, UdpRole::QuicDial), A).unwrap();
    let mut to = net.udp(&options(V4, UdpRole::Ingress), B).unwrap();
    let mut batch = SendBatch::default();
    for number in 0..3 {
        put(&mut batch, &path(to.local_addr()), &payload(number, 100 + number));
        assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
    }
    wait(&ready, B).await;
    let mut received = ReceiveBatch::new(1, 2_000);
    let mut next = || {
        to.receive(&mut received).unwrap();
        (received.meta(0).age, to.stats().ages.iter().sum::<u64>())
    };
    let (stamped, counted) = next();
    assert!(stamped > Duration::ZERO && counted == 1);
    assert_eq!([next(), next()], [(stamped, 1); 2], "calls without timestamps keep the last age");
    assert_eq!(to.receive(&mut received).unwrap_err().kind(), ErrorKind::WouldBlock);
    put(&mut batch, &path(to.local_addr()), b"later");
    assert_eq!(send(&mut *from, &mut batch), [SendOutcome::Sent]);
    wait(&ready, B).await;
    to.receive(&mut received).unwrap();
    assert_eq!(received.meta(0).age, Duration::ZERO, "the queue was empty in between");
}

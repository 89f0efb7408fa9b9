use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use crate::{
    Net, ReceiveBatch, Token, UdpOptions, UdpRole,
    ports::{PortKind, PortPlan, open},
    steering::owner,
    tests::{PATIENCE, V4, V6, kernel, kernel_with, options, receive, wait},
};

const A: Token = Token(1);
const B: Token = Token(2);

fn udp(ip: IpAddr, role: UdpRole) -> PortPlan {
    PortPlan { udp: vec![options(ip, role)], tcp: Vec::new() }
}

/// Datagrams with every first byte of the connection ID, long and short headers, and some that end too early.
fn datagrams() -> Vec<Vec<u8>> {
    let mut datagrams = vec![vec![], vec![0x40], vec![0xc0], vec![0xc1; 6]];
    for byte in 0..=u8::MAX {
        datagrams.push(vec![0x40 | (byte & 0x3f), byte, 7, 7, 7, 7, 7, 7]);
        datagrams.push(vec![0xc0 | (byte & 0x3f), 0, 0, 0, 1, 8, byte, 5]);
        datagrams.push(vec![0x40, byte]);
    }
    datagrams
}

#[tokio::test]
async fn the_kernel_steers_by_connection_id() {
    const WORKERS: u8 = 3;
    for ip in [V4, V6] {
        let shares = open(&udp(ip, UdpRole::QuicListen), WORKERS).unwrap();
        let asked = options(ip, UdpRole::QuicListen);
        let mut workers = Vec::new();
        for share in shares {
            let (mut net, ready, _) = kernel_with(share);
            workers.push((net.udp(&asked, A).unwrap(), ready, net));
        }
        let address = workers[0].0.local_addr();
        assert!(workers.iter().all(|(socket, ..)| socket.local_addr() == address), "one port for all");

        let sources: Vec<_> = (0..5).map(|_| UdpSocket::bind(SocketAddr::new(ip, 0)).unwrap()).collect();
        let mut expected = vec![Vec::new(); WORKERS.into()];
        for (number, datagram) in datagrams().into_iter().enumerate() {
            sources[number % sources.len()].send_to(&datagram, address).unwrap();
            expected[usize::from(owner(&datagram, WORKERS))].push(datagram);
        }
        for ((socket, ready, _), mut expected) in workers.iter_mut().zip(expected) {
            let got = receive(&mut **socket, ready, A, expected.len()).await;
            let mut got: Vec<_> = got.into_iter().map(|datagram| datagram.bytes).collect();
            let more = socket.receive(&mut ReceiveBatch::default());
            assert!(more.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
            got.sort();
            expected.sort();
            assert_eq!(got, expected);
        }
    }
}

#[tokio::test]
async fn an_ingress_group_keeps_a_client_on_one_worker() {
    let shares = open(&udp(V4, UdpRole::Ingress), 2).unwrap();
    let mut workers = Vec::new();
    for share in shares {
        let (mut net, ready, _) = kernel_with(share);
        workers.push((net.udp(&options(V4, UdpRole::Ingress), A).unwrap(), ready));
    }
    let address = workers[0].0.local_addr();
    for _client in 0..20 {
        let client = UdpSocket::bind(SocketAddr::new(V4, 0)).unwrap();
        for byte in 0..4 {
            client.send_to(&[byte; 8], address).unwrap();
        }
        let mut counts = [0; 2];
        let arrived = async {
            let mut batch = ReceiveBatch::default();
            while counts[0] + counts[1] < 4 {
                for (count, (socket, _)) in counts.iter_mut().zip(&mut workers) {
                    let before = socket.stats().received_datagrams;
                    while socket.receive(&mut batch).is_ok() {}
                    *count += socket.stats().received_datagrams - before;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, arrived).await.unwrap();
        counts.sort_unstable();
        assert_eq!(counts, [0, 4]);
    }
}

#[test]
fn a_second_daemon_finds_the_port_in_use() {
    for role in [UdpRole::QuicListen, UdpRole::Ingress] {
        for (first, second) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
            let plan = udp(V4, role);
            let held = open(&plan, first).unwrap();
            let address = held[0].udp_address(0);
            let taken = PortPlan {
                udp: vec![options(V6, role), UdpOptions { bind: address, ..options(V4, role) }],
                tcp: Vec::new(),
            };
            let error = open(&taken, second).unwrap_err();
            assert_eq!((error.what, error.address), (PortKind::Udp(1), address));
            assert_eq!(error.error.kind(), ErrorKind::AddrInUse);
            assert_eq!(error.to_string(), format!("cannot listen on {address} (UDP)"));
            drop(held);
            assert_eq!(open(&taken, second).unwrap().len(), usize::from(second));
        }
    }
}

#[tokio::test]
async fn each_bound_socket_is_adopted_once_and_in_order() {
    let asked = options(V4, UdpRole::Ingress);
    let plan = PortPlan { udp: vec![asked.clone(), asked.clone()], tcp: Vec::new() };
    let mut shares = open(&plan, 2).unwrap();
    let (mut two, ..) = kernel_with(shares.pop().unwrap());
    let (mut one, ..) = kernel_with(shares.pop().unwrap());
    let listen = one.udp(&options(V4, UdpRole::QuicListen), A).unwrap();
    let ports = |net: &mut dyn Net| {
        let sockets: Vec<_> = (0..3).map(|_| net.udp(&asked, A).unwrap()).collect();
        sockets.iter().map(|socket| socket.local_addr().port()).collect::<Vec<_>>()
    };
    let (ones, twos) = (ports(&mut one), ports(&mut two));
    assert_eq!(ones[..2], twos[..2]);
    assert!(ones[0] != ones[1] && ones[2] != twos[2], "the third is opened alone: {ones:?} {twos:?}");
    assert!(!ones.contains(&listen.local_addr().port()), "a socket of another role is not adopted");
}

#[tokio::test]
async fn workers_share_a_tcp_listener() {
    let address = SocketAddr::new(V4, 0);
    let plan = PortPlan { udp: Vec::new(), tcp: vec![address] };
    let mut listeners = Vec::new();
    for share in open(&plan, 3).unwrap() {
        let (mut net, ready, _) = kernel_with(share);
        listeners.push((net.tcp_listen(address, A).unwrap(), ready, net));
    }
    let local = listeners[0].0.local_addr();
    assert!(listeners.iter().all(|(listener, ..)| listener.local_addr() == local));
    for (listener, ready, _) in &mut listeners {
        wait(ready, A).await;
        assert!(listener.accept(B).is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
    }
    let (mut dialler, ..) = kernel();
    let _stream = dialler.tcp_connect(local, B).unwrap();
    for (_, ready, _) in &listeners {
        wait(ready, A).await;
    }
    assert!(listeners[1].0.accept(B).is_ok());
    assert!(listeners[2].0.accept(B).is_err_and(|error| error.kind() == ErrorKind::WouldBlock));

    let taken = PortPlan { udp: Vec::new(), tcp: vec![address, local] };
    let error = open(&taken, 2).unwrap_err();
    assert_eq!((error.what, error.error.kind()), (PortKind::Tcp(1), ErrorKind::AddrInUse));
}

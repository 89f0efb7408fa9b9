//! A range of ports: each port of the entry leads to the one at its place of the exit.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    thread,
};

use culvert_tests::{clock::PATIENCE, needs, pair::Plan, ports};

const PORTS: u16 = 3;

/// The first of some free ports that follow each other.
fn first() -> u16 {
    loop {
        let first = ports::free();
        if (1..PORTS).all(|place| ports::free() == first + place) {
            return first;
        }
    }
}

/// Answers over TCP and UDP with the number of the port.
fn serve(port: u16) {
    let (tcp, udp) =
        (TcpListener::bind((Ipv4Addr::LOCALHOST, port)), UdpSocket::bind((Ipv4Addr::LOCALHOST, port)));
    let (tcp, udp) = (tcp.unwrap(), udp.unwrap());
    thread::spawn(move || {
        while let Ok((mut stream, _)) = tcp.accept() {
            write!(stream, "{port}").ok();
        }
    });
    thread::spawn(move || {
        let mut datagram = [0; 16];
        while let Ok((_, from)) = udp.recv_from(&mut datagram) {
            udp.send_to(port.to_string().as_bytes(), from).ok();
        }
    });
}

#[test]
fn each_port_leads_to_the_one_at_its_place() {
    if !needs::met("ranges of ports", needs::AGENTS) {
        return;
    }
    let (here, there) = (first(), first());
    (0..PORTS).for_each(|place| serve(there + place));
    let last = PORTS - 1;
    let section = |protocol| {
        format!(
            "[[{protocol}]]\nlisten = \"127.0.0.1:{here}-{}\"\npeer = \"exit\"\nservice = \"games\"\n",
            here + last
        )
    };
    let service =
        format!("[[service]]\nname = \"games\"\nupstream = \"127.0.0.1:{there}-{}\"\n", there + last);
    let plan = Plan::default().exit(&service).allow("games").entry(&section("udp")).entry(&section("tcp"));
    let pair = plan.start();
    for place in 0..PORTS {
        let expected = (there + place).to_string();
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, here + place)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, expected, "TCP, place {place}");
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.send_to(b"which?", (Ipv4Addr::LOCALHOST, here + place)).unwrap();
        let mut datagram = [0; 16];
        let length = socket.recv(&mut datagram).unwrap();
        assert_eq!(datagram[..length], *expected.as_bytes(), "UDP, place {place}");
    }
    pair.wait_for_accounts([(PORTS.into(), PORTS.into()); 4]);
}

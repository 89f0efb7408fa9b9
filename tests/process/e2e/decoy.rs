//! Strangers at an agent with a decoy, which is a plain UDP server.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use culvert_tests::{
    client::Client,
    clock::PATIENCE,
    needs,
    pair::{Pair, Plan},
    ports,
    random::Random,
    upstream::Echo,
};

struct Site {
    pair: Pair,
    decoy: UdpSocket,
    client: Client,
    _echo: Echo,
}

impl Site {
    fn new(underlay: IpAddr, workers: u8) -> Self {
        let (echo, ingress) = (Echo::new(), SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
        let decoy = socket(Ipv4Addr::LOCALHOST.into());
        let access = format!("[access]\ndecoy = \"{}\"\n", decoy.local_addr().unwrap());
        let plan = Plan::default().underlay(underlay).workers([1, workers]).exit(&access);
        let pair = plan.service("echo", echo.address, "").forward("echo", ingress).start();
        Self { pair, decoy, client: Client::new(0, ingress), _echo: echo }
    }

    /// Sends something to the agent and waits until the decoy has it; the address that the decoy sees.
    #[track_caller]
    fn arrives(&self, stranger: &UdpSocket, datagram: &[u8]) -> SocketAddr {
        stranger.send_to(datagram, self.pair.underlay).unwrap();
        let (got, from) = receive(&self.decoy).unwrap();
        assert!(got == datagram, "{} bytes went in, {} came out", datagram.len(), got.len());
        from
    }

    /// Lets the decoy answer and waits until the stranger has it.
    #[track_caller]
    fn returns(&self, to: SocketAddr, stranger: &UdpSocket, answer: &[u8]) {
        self.decoy.send_to(answer, to).unwrap();
        let (got, from) = receive(stranger).unwrap();
        assert_eq!(from, self.pair.underlay);
        assert!(got == answer, "{} bytes went in, {} came out", answer.len(), got.len());
    }

    fn drops(&self) -> f64 {
        self.pair.exit.samples().sum("culvert_decoy_drops_total", &[])
    }
}

fn socket(ip: IpAddr) -> UdpSocket {
    let socket = UdpSocket::bind((ip, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn receive(socket: &UdpSocket) -> std::io::Result<(Vec<u8>, SocketAddr)> {
    let mut buffer = vec![0; 65_536];
    let (len, from) = socket.recv_from(&mut buffer)?;
    buffer.truncate(len);
    Ok((buffer, from))
}

/// The start of a packet with a long header, which the decoy chose `cid` for.
fn long(cid: &[u8]) -> Vec<u8> {
    let mut packet = vec![0xc0, 0, 0, 0, 1, 0];
    packet.push(u8::try_from(cid.len()).unwrap());
    packet.extend(cid);
    packet
}

#[test]
fn strangers_talk_to_the_decoy_while_a_peer_is_connected() {
    if !needs::met("decoy", needs::AGENTS) {
        return;
    }
    for workers in [1, 2] {
        let mut site = Site::new(Ipv4Addr::LOCALHOST.into(), workers);
        let strangers = [socket(Ipv4Addr::LOCALHOST.into()), socket(Ipv4Addr::LOCALHOST.into())];
        let mut random = Random::new(11);
        let mut addresses = [None; 2];
        for len in (0..1500).step_by(7).chain([9000, 65_000]) {
            for (stranger, known) in strangers.iter().zip(&mut addresses) {
                let datagram = random.bytes(len);
                let from = site.arrives(stranger, &datagram);
                assert_eq!(*known.get_or_insert(from), from, "workers {workers}, seed {}", random.seed);
                site.returns(from, stranger, &datagram);
            }
            site.client.converse(1);
        }
        let [Some(one), Some(two)] = addresses else { panic!("both came") };
        assert_ne!(one, two, "each has a socket of its own");

        // What has answered may get much for little, in bursts that the kernel joins and cuts.
        let cid = b"of the decoy";
        site.returns(one, &strangers[0], &long(cid));
        let mut answer = vec![0x41];
        answer.extend(cid);
        site.arrives(&strangers[0], &answer);
        let mut total = 0;
        while total < 2_000_000 {
            let burst: Vec<Vec<u8>> = (0..20).map(|_| random.bytes(1200)).collect();
            for datagram in &burst {
                site.decoy.send_to(datagram, one).unwrap();
            }
            for datagram in &burst {
                assert!(receive(&strangers[0]).unwrap().0 == *datagram);
                total += datagram.len();
            }
        }
        site.client.converse(20);
        assert!(site.drops().abs() < 0.5, "{}", site.drops());
        site.pair.exit.wait_for_count("culvert_decoy_flows", &[], 2);
        site.pair.accounts();
    }
}

#[test]
fn an_answer_larger_than_the_path_costs_itself_only() {
    if !needs::met("large answers of a decoy", &[needs::AGENTS, &[needs::Need::Ipv6]].concat()) {
        return;
    }
    let mut site = Site::new(Ipv6Addr::LOCALHOST.into(), 2);
    let stranger = socket(Ipv6Addr::LOCALHOST.into());
    let from = site.arrives(&stranger, &[7; 65_000]);
    // The largest over IPv4 is larger than the loopback takes over IPv6.
    for answer in [&[1; 65_507][..], &[2; 1200], &[2; 1200]] {
        site.decoy.send_to(answer, from).unwrap();
    }
    assert_eq!([(); 2].map(|()| receive(&stranger).unwrap().0), [[2; 1200]; 2]);
    site.pair.exit.wait_for_count("culvert_decoy_drops_total", &[("reason", "too_large")], 1);
    site.client.converse(20);
    site.pair.accounts();
}

#[test]
fn a_decoy_that_is_down_is_named_in_the_log() {
    if !needs::met("decoy down", needs::AGENTS) {
        return;
    }
    let mut site = Site::new(Ipv4Addr::LOCALHOST.into(), 2);
    let address = site.decoy.local_addr().unwrap();
    site.decoy = socket(Ipv4Addr::LOCALHOST.into());
    let stranger = socket(Ipv4Addr::LOCALHOST.into());
    for _ in 0..3 {
        stranger.send_to(&[7; 1200], site.pair.underlay).unwrap();
        site.client.converse(1);
    }
    site.pair.exit.wait_for_log(&[
        "the decoy does not take datagrams",
        &address.to_string(),
        "is it running",
    ]);
    stranger.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(receive(&stranger).is_err());
    site.client.converse(20);
    site.pair.accounts();
}

//! With a decoy: every datagram of a stranger reaches it as it was sent, and every answer is its own.

use std::{
    io::IoSliceMut,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
};

use culvert_tests::{
    agent::Agent,
    clock::{self, PATIENCE},
    decoy::{Decoy, answer_to},
    needs,
    place::{Cable, Place},
    ports,
    tap::{Tap, What},
};
use lab::probe::{Class, packets};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};

use super::SEED;

/// Strangers, each a port; fewer than an agent takes on at once from one network.
const STRANGERS: usize = 12;

/// What one GSO message carries here.
const BURST: usize = 16;

/// Sends every packet to `target`, each after the answer to the one before, and bursts at last; everything must reach
/// `decoy` and come back as it answered.
#[track_caller]
fn converse(place: &Place, target: SocketAddr, decoy: &Decoy) {
    let any: IpAddr = Ipv4Addr::UNSPECIFIED.into();
    let strangers: Vec<UdpSocket> = place.enter(|| {
        let open = |_| {
            let socket = UdpSocket::bind((any, 0)).unwrap();
            socket.connect(target).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket
        };
        (0..STRANGERS).map(open).collect()
    });
    drop(decoy.take_heard());
    let probes = packets(SEED);
    let mut buffer = vec![0; 65_535];
    for (number, probe) in probes.iter().enumerate() {
        let stranger = &strangers[number % STRANGERS];
        let what = format!("{:?} {}, seed {SEED}", probe.class, probe.detail);
        stranger.send(&probe.bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
        let length = stranger.recv(&mut buffer).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(buffer[..length] == answer_to(&probe.bytes), "{what}: {:02x?}", &buffer[..length.min(64)]);
        assert!(decoy.take_heard() == [probe.bytes.as_slice()], "{what}: the decoy heard something else");
    }
    let mixture: Vec<Vec<u8>> = probes
        .iter()
        .filter(|probe| probe.class == Class::Mixture)
        .map(|probe| probe.bytes.clone())
        .collect();
    for (stranger, burst) in strangers.iter().zip(mixture.chunks_exact(BURST)) {
        let answers = hub(stranger, target, burst);
        let expected: Vec<Vec<u8>> = burst.iter().map(|datagram| answer_to(datagram)).collect();
        assert!(sorted(answers) == sorted(expected), "the burst was answered otherwise; seed {SEED}");
        assert!(sorted(decoy.take_heard()) == sorted(burst.to_vec()), "the decoy heard another burst");
    }
    for stranger in &strangers {
        stranger.set_nonblocking(true).unwrap();
        assert!(stranger.recv(&mut buffer).is_err(), "one answer too many");
    }
}

fn sorted(mut datagrams: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    datagrams.sort_unstable();
    datagrams
}

/// Sends datagrams of one length as one message, which the kernel cuts, and takes as many answers as they are.
#[track_caller]
fn hub(socket: &UdpSocket, destination: SocketAddr, datagrams: &[Vec<u8>]) -> Vec<Vec<u8>> {
    // From here on the socket does not block, and the kernel may hand several answers over as one buffer.
    let state = UdpSocketState::new(UdpSockRef::from(socket)).unwrap();
    let contents = datagrams.concat();
    let transmit = Transmit {
        destination,
        ecn: None,
        contents: &contents,
        segment_size: Some(datagrams[0].len()),
        src_ip: None,
    };
    state.send(UdpSockRef::from(socket), &transmit).unwrap();
    let mut answers: Vec<Vec<u8>> = Vec::new();
    let mut buffer = vec![0; 65_535];
    clock::until("the burst is answered", PATIENCE, || {
        let (mut slices, mut meta) = ([IoSliceMut::new(&mut buffer)], [RecvMeta::default()]);
        while state.recv(UdpSockRef::from(socket), &mut slices, &mut meta).is_ok_and(|count| count == 1) {
            answers.extend(slices[0][..meta[0].len].chunks(meta[0].stride.max(1)).map(<[u8]>::to_vec));
        }
        let count = answers.len();
        if count >= datagrams.len() { Ok(()) } else { Err(format!("{count} of {}", datagrams.len())) }
    });
    answers
}

/// What the agent in between must not change is what is left when there is none.
#[test]
fn the_decoy_of_these_tests_answers_byte_for_byte_without_an_agent() {
    let decoy = Decoy::new(&Place::Host, Ipv4Addr::LOCALHOST.into());
    converse(&Place::Host, decoy.address, &decoy);
}

#[test]
fn every_datagram_reaches_the_decoy_and_every_answer_is_the_decoys() {
    if !needs::met("probes of a decoy", needs::NETNS) {
        return;
    }
    let cable = Cable::new();
    let [here, there] = cable.places();
    let host: IpAddr = Cable::SECOND[0].parse().unwrap();
    let listen = SocketAddr::new(host, ports::free());
    let decoy = Decoy::new(&there, Ipv4Addr::LOCALHOST.into());
    let mut agent = Agent::new("agent", &there);
    agent.configure(&format!(
        "[transport]\nlisten = [\"{listen}\"]\nworkers = 2\n[access]\ndecoy = \"{}\"\n",
        decoy.address
    ));
    agent.start();
    let tap = Tap::new(&here);
    converse(&here, listen, &decoy);
    // Each answer has been compared with the decoy's; nothing else left the host, such as an ICMP error.
    for packet in tap.take(&[host]) {
        let from_the_port = matches!(packet.what, What::Udp { from, .. } if from == listen.port());
        assert!(from_the_port, "the agent's host sent {packet:02x?}");
    }
}

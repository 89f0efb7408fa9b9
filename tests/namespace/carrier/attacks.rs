//! What a peer, a network or a proxy may do to carriers, while an innocent peer goes over them.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use base::clock::{Clock, SystemClock};
use culvert_tests::{
    client::Client,
    clock::{self, PATIENCE},
    firewall::Blockade,
    needs,
    place::{Cable, Place},
    ports,
};
use data_encoding::BASE64;
use gate::{
    carrier::{NONCE_BYTES, path},
    identity::{Identity, PublicKey},
    knock::ServerKey,
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, pem::PemObject},
};
use socket2::{Domain, Socket, Type};

use super::{Bed, NEEDS, exchange};

/// Networks that attackers come from: enough to fill the web server, of which each has its share.
const NETWORKS: u8 = 12;

/// The carriers that one peer may have open (`docs/reliability.md` §6).
const MOST_OF_ONE: usize = 128;

/// What the exit may grow by under an attack.
const MOST_GROWTH_BYTES: u64 = 64 << 20;

/// An attacker's address in network `number`.
fn attacker(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, number, 7)
}

/// Gives the first end of the cable the attackers' addresses.
#[track_caller]
fn with_attackers(bed: &Bed) -> Place {
    let [here, there] = bed.cable.places();
    for number in 0..NETWORKS {
        here.tell(&["ip", "address", "add", &format!("{}/32", attacker(number)), "dev", "lo"]);
    }
    there.tell(&["ip", "route", "add", "198.18.0.0/16", "via", Cable::FIRST[0]]);
    here
}

/// Connects from an attacker's address; `None`: the exit does not answer in time, or refuses.
fn connect(here: &Place, number: u8, to: SocketAddr) -> Option<TcpStream> {
    here.enter(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((attacker(number), 0)).into()).unwrap();
        socket.connect_timeout(&to.into(), Duration::from_secs(5)).ok().map(|()| socket.into())
    })
}

/// A peer of the exit that knows how a carrier is opened.
struct Hostile {
    identity: Identity,
    exit: ServerKey,
    at: SocketAddr,
    tls: Arc<ClientConfig>,
    here: Place,
}

type Carrier = StreamOwned<ClientConnection, TcpStream>;

impl Hostile {
    /// An innocent pair over TCP, and a hostile peer of the exit.
    #[track_caller]
    fn beside() -> (Bed, Self) {
        let identity = Identity::generate().unwrap();
        let web = format!(
            "listen = [\"AT\"]\n[[peer]]\nname = \"hostile\"\npublic_key = \"{}\"\n",
            identity.public_key()
        );
        let mut bed = Bed::with(&["https://AT/"], "carrier = \"always\"\n", &web);
        let here = with_attackers(&bed);
        bed.start();
        let exit: PublicKey = bed.exit.key().parse().unwrap();
        let tls = trusting(&bed.exit.folder().join("ca.pem"));
        let this = Self { identity, exit: ServerKey::new(&exit).unwrap(), at: bed.at, tls, here };
        (bed, this)
    }

    /// Opens a carrier from network `number`; `None`: the answer is the site's, or the connection is refused.
    fn open(&self, number: u8) -> Option<Carrier> {
        let unix_seconds = SystemClock.unix_seconds();
        let nonce: [u8; NONCE_BYTES] = rand::random();
        let own = self.identity.agreement_key();
        let path = path(&own, &self.exit, unix_seconds, nonce, &rand::random()).unwrap();
        let stream = connect(&self.here, number, self.at)?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let client = ClientConnection::new(Arc::clone(&self.tls), self.at.ip().into()).unwrap();
        let mut stream = StreamOwned::new(client, stream);
        let key = BASE64.encode(&rand::random::<[u8; 16]>());
        let ask = format!(
            "GET {path} HTTP/1.1\r\nHost: gw.example.net\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
        );
        stream.write_all(ask.as_bytes()).ok()?;
        let mut head = [0; 12];
        stream.read_exact(&mut head).ok()?;
        (head == *b"HTTP/1.1 101").then_some(stream)
    }
}

fn trusting(file: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    Arc::new(config.with_root_certificates(roots).with_no_client_auth())
}

impl Bed {
    fn resident_bytes(&self) -> u64 {
        self.exit.samples().count("process_resident_memory_bytes", &[])
    }

    fn connections(&self) -> u64 {
        self.exit.samples().count("culvert_http_tcp_connections", &[])
    }
}

/// What an innocent client has of the pair: each of its datagrams is answered.
#[track_caller]
fn innocent(bed: &Bed) -> Client {
    let [here, _] = bed.cable.places();
    let mut client = here.enter(|| Client::new(1, bed.forwards[0]));
    client.reach();
    client.converse(20);
    client
}

#[test]
fn ten_thousand_connections_to_the_web_server_take_nothing_from_a_peer_over_tcp() {
    if !needs::met("carrier: ten thousand connections", NEEDS) {
        return;
    }
    let mut bed = Bed::new(&["https://AT/"], "carrier = \"always\"\n");
    let here = with_attackers(&bed);
    bed.start();
    let mut client = innocent(&bed);
    let (carriers, sessions, before) = (bed.carriers(), bed.sessions(), bed.resident_bytes());
    let mut kept = Vec::new();
    for number in 0..10_000_u32 {
        // Each says nothing, and most are still open when others follow.
        kept.extend(connect(&here, (number % u32::from(NETWORKS)) as u8, bed.at));
        if kept.len() > 800 {
            kept.remove(0);
        }
        if number % 2_000 == 0 {
            client.converse(5);
        }
    }
    client.converse(20);
    exchange(&bed.forward());
    let grown = bed.resident_bytes().saturating_sub(before);
    assert!(grown < MOST_GROWTH_BYTES, "{grown} bytes more");
    assert!(bed.connections() <= 512, "{}", bed.connections());
    assert_eq!(bed.sessions(), sessions, "the session lives");
    drop(kept);
    assert!(bed.carriers() - carriers <= 2, "what it has open stays open");
}

#[test]
fn a_peer_that_opens_carriers_without_end_and_reads_nothing_has_its_share_alone() {
    if !needs::met("carrier: a hostile peer", NEEDS) {
        return;
    }
    let (bed, hostile) = Hostile::beside();
    let mut client = innocent(&bed);
    let (of_entry, before) = (bed.connections(), bed.resident_bytes());
    let mut open = Vec::new();
    let mut refused = 0;
    while refused < 40 {
        match hostile.open((open.len() % usize::from(NETWORKS)) as u8) {
            Some(carrier) => open.push(carrier),
            None => refused += 1,
        }
        assert!(open.len() <= MOST_OF_ONE, "more than its share");
    }
    assert_eq!(open.len(), MOST_OF_ONE);
    client.converse(20);

    // Each asks for answers without end, and reads none of them.
    for carrier in &mut open {
        carrier.sock.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        let pings = [0x89, 0xfd, 0, 0, 0, 0].into_iter().chain([7; 125]).collect::<Vec<u8>>().repeat(2_000);
        // The exit takes no more once nothing is read.
        while carrier.write_all(&pings).is_ok() {}
    }
    client.converse(20);
    exchange(&bed.forward());
    let grown = bed.resident_bytes().saturating_sub(before);
    assert!(grown < MOST_GROWTH_BYTES, "{grown} bytes more");
    assert_eq!(bed.exit.samples().dropped("carrier_full"), 0, "the entry's carriers are not behind");

    // TCP gives up those that take nothing.
    clock::until("slow readers have gone", PATIENCE, || match bed.connections() {
        left if left <= of_entry + 2 => Ok(()),
        left => Err(format!("{left} are open")),
    });
    drop(open);
    clock::until("its share is free again", PATIENCE, || {
        hostile.open(0).map(drop).ok_or_else(|| "the site answers".to_owned())
    });
    client.converse(20);
}

#[test]
fn connections_that_are_half_open_end_and_the_peer_comes_back() {
    if !needs::met("carrier: half open", NEEDS) {
        return;
    }
    let mut bed = Bed::new(&["https://AT/"], "carrier = \"always\"\n");
    bed.start();
    let mut client = innocent(&bed);
    assert!(bed.connections() > 0);
    let tcp = bed.cable.places().map(|place| Blockade::new(&place, "ip saddr 192.0.2.0/24 meta l4proto tcp"));
    // Neither end hears of the other's end.
    clock::until("the exit has given them up", PATIENCE, || match bed.connections() {
        0 => Ok(()),
        left => Err(format!("{left} are open")),
    });
    drop(tcp);
    client.reach();
    client.converse(20);
    exchange(&bed.forward());
}

/// The bytes that a proxy passes on in a millisecond: 16 Mbit/s.
const PASSED: usize = 2_000;

/// The pieces that it holds for each direction: more than the forward of a test has.
const MOST_BUFFERED: usize = 1 << 16;

/// A proxy that takes what comes at once, however much, and passes it on slowly.
fn buffering(place: &Place, at: SocketAddr, to: SocketAddr) {
    let listener = place.enter(|| TcpListener::bind(at)).unwrap();
    let place = place.clone();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), place.enter(|| TcpStream::connect(to)).unwrap());
            for (from, into) in [(&client, &server), (&server, &client)] {
                let (mut from, mut into) = (from.try_clone().unwrap(), into.try_clone().unwrap());
                let (sender, buffered) = mpsc::sync_channel::<Vec<u8>>(MOST_BUFFERED);
                thread::spawn(move || {
                    let mut bytes = vec![0; 64 << 10];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        sender.send(bytes[..count].to_vec()).ok();
                    }
                });
                thread::spawn(move || {
                    for bytes in buffered {
                        for part in bytes.chunks(PASSED) {
                            if into.write_all(part).is_err() {
                                return;
                            }
                            thread::sleep(Duration::from_millis(1));
                        }
                    }
                    into.shutdown(Shutdown::Write).ok();
                });
            }
        }
    });
}

#[test]
fn a_proxy_that_buffers_everything_delays_a_session_and_ends_none() {
    if !needs::met("carrier: a buffering proxy", NEEDS) {
        return;
    }
    let front = SocketAddr::new(Cable::SECOND[0].parse().unwrap(), ports::free());
    let mut bed = Bed::new(&[&format!("https://{front}/")], "carrier = \"always\"\n");
    let [_, there] = bed.cable.places();
    buffering(&there, front, bed.at);
    bed.start();
    let mut client = innocent(&bed);
    let sessions = bed.sessions();
    // It holds as much of the forward as TCP's windows and ours let it.
    exchange(&bed.forward());
    client.reach();
    client.converse(20);
    assert_eq!(bed.sessions(), sessions, "the session lives");
}

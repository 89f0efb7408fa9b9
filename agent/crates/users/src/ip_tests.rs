use std::{
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use base::{
    clock::{Clock, SystemClock},
    panics::lock,
};
use bytes::Bytes;
use config::Config;
use data_encoding::BASE64;
use gate::password::PasswordKey;
use h3::{
    addresses::{self, Address},
    capsule::{ADDRESS_ASSIGN, ADDRESS_REQUEST, Capsule, CapsuleReader, ROUTE_ADVERTISEMENT},
};
use ip::{view::IpView, vnet::VnetHeader};
use tokio::time::timeout;

use super::{scope::Scope, *};
use crate::{
    Grant, Presents, Users, Verdict,
    account::{Dropped, Place, Refusal},
};

const LAN: &str = "networks = [\"192.0.2.0/24\", \"2001:db8::/32\", \"198.51.100.0/24:443\"]";

struct Anna {
    key: PasswordKey,
    field: String,
    users: Users,
}

impl Anna {
    fn new() -> Self {
        let (key, password) = PasswordKey::generate().unwrap();
        let field = format!("Basic {}", BASE64.encode(format!("anna:{}", *password).as_bytes()));
        let users = Users::default();
        users.together.own.set(&["192.0.2.1/32".parse().unwrap()]);
        Self { key, field, users }
    }

    /// Has these keys from now on, with a pool for `pool`.
    fn may(&self, pool: &str, keys: &str) {
        let text = format!(
            "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\naccess.mode = \"open\"\n\
             tun.address = [\"10.9.1.1/24\", \"fd09:1::1/64\"]\nhttp.pool = {pool}\n\
             [[service]]\nname = \"lan\"\nupstream = \"any\"\n\
             [[user]]\nname = \"anna\"\npassword_key = \"{}\"\n{keys}\n",
            self.key
        );
        let config = Config::parse(&text, Path::new("/")).unwrap_or_else(|error| panic!("{error}"));
        self.users.follow(&config);
    }

    fn grant(&self) -> Grant {
        let source = IpAddr::from([192, 0, 2, 1]);
        let presents = Presents { fields: [Some(self.field.as_bytes()), None], key: None, source };
        let verdict = self.users.verify(&presents, None, 0, SystemClock.now());
        let Verdict::Known(sender) = verdict else { panic!("nobody has chosen a password") };
        sender.grant.unwrap()
    }

    async fn open(&self, path: &str) -> Result<Client, Refusal> {
        let scope = Scope::of_path(&format!("/.well-known/masque/ip/{path}")).unwrap();
        let got = Arc::new(Mutex::new(Vec::new()));
        let (grant, list) = (self.grant(), Arc::clone(&got));
        let link =
            Link::new(Arc::clone(grant.account()), scope.protocol, move |packet| lock(&list).push(packet));
        let (session, capsules) = grant.open_ip(scope, &link).await?;
        Ok(Client { session, link, got, capsules: read(&capsules) })
    }
}

/// A client's end.
struct Client {
    session: IpSession,
    link: Arc<Link>,
    got: Arc<Mutex<Vec<Bytes>>>,
    capsules: Vec<(u64, Bytes)>,
}

impl Client {
    async fn next(&mut self) -> Next {
        timeout(Duration::from_secs(10), self.session.next(|| 0)).await.unwrap()
    }

    fn addresses(&self) -> Vec<String> {
        let (_, value) = self.capsules.iter().find(|(kind, _)| *kind == ADDRESS_ASSIGN).unwrap();
        texts(&addresses::assigned(value, 99).unwrap())
    }

    fn sends(&self, from: &str, to: &str) -> Result<Bytes, Dropped> {
        self.link.from_user(&udp(from, to, 100).into())
    }
}

fn read(mut capsules: &[u8]) -> Vec<(u64, Bytes)> {
    let mut bytes = Bytes::copy_from_slice(std::mem::take(&mut capsules));
    let mut reader = CapsuleReader::new(1 << 20);
    let whole = std::iter::from_fn(|| reader.take(&mut bytes));
    whole
        .map(|capsule| match capsule {
            Capsule::Whole { kind, value } => (kind, value),
            other @ (Capsule::TooLong { .. } | Capsule::Unknown { .. }) => panic!("{other:?}"),
        })
        .collect()
}

fn texts(list: &[Address]) -> Vec<String> {
    list.iter().map(|one| format!("{} {}/{}", one.request, one.address, one.prefix_len)).collect()
}

/// A UDP packet with a payload of so many bytes; IPv4 ones may not be fragmented.
fn udp(from: &str, to: &str, payload: usize) -> Vec<u8> {
    let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
    let length = u16::try_from(8 + payload).unwrap();
    let mut packet = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut head = vec![0x45, 0];
            head.extend((20 + length).to_be_bytes());
            head.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
            head.extend(from.octets().into_iter().chain(to.octets()));
            head
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut head = vec![0x60, 0, 0, 0];
            head.extend(length.to_be_bytes());
            head.extend([17, 64]);
            head.extend(from.octets().into_iter().chain(to.octets()));
            head
        }
        _ => panic!("two families"),
    };
    packet.extend([0, 9, 0, 9]);
    packet.extend(length.to_be_bytes());
    packet.extend(vec![0; 2 + payload]);
    packet
}

/// Gives a packet of the device to the users; what became of it.
fn from_device(links: &Links, mut packet: Vec<u8>) -> Option<Outcome> {
    let view = IpView::parse(&packet).unwrap();
    links.to_user(&mut packet, &view, &VnetHeader::default())
}

#[tokio::test]
async fn a_session_has_addresses_and_routes_and_carries_what_they_allow() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/24\", \"fd09:1::/64\"]", LAN);
    let client = anna.open("*/*/").await.unwrap();
    // The first of each family is the device's.
    assert_eq!(client.addresses(), ["0 10.9.1.2/32", "0 fd09:1::2/128"]);
    let (kind, value) = &client.capsules[1];
    let routes = addresses::routes(value, 9).unwrap();
    assert_eq!((*kind, routes.len()), (ROUTE_ADVERTISEMENT, 3));
    let ranges = routes.iter().map(|route| format!("{}-{}", route.first, route.last));
    // Without the host's own address.
    let expected =
        ["192.0.2.0-192.0.2.0", "192.0.2.2-192.0.2.255", "2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"];
    assert_eq!(ranges.collect::<Vec<_>>(), expected);
    for (from, to, result) in [
        ("10.9.1.2", "192.0.2.9", Ok(128)),
        ("fd09:1::2", "2001:db8::9", Ok(148)),
        ("10.9.1.3", "192.0.2.9", Err(Dropped::Source)),
        ("192.0.2.9", "192.0.2.8", Err(Dropped::Source)),
        ("10.9.1.2", "192.0.2.1", Err(Dropped::Destination)),
        ("10.9.1.2", "192.0.3.9", Err(Dropped::Destination)),
        ("10.9.1.2", "198.51.100.1", Err(Dropped::Destination)),
        ("10.9.1.2", "10.9.1.1", Err(Dropped::Destination)),
        ("10.9.1.2", "127.0.0.1", Err(Dropped::Destination)),
        ("fd09:1::2", "ff02::1", Err(Dropped::Destination)),
    ] {
        assert_eq!(client.sends(from, to).map(|packet| packet.len()), result, "{from} to {to}");
    }
    // The user is told of what it may not reach, as far as that is a host, and of nothing that it did not send.
    let told: Vec<_> = std::mem::take(&mut *lock(&client.got)).iter().map(prohibited).collect();
    let expected = ["192.0.2.1", "192.0.3.9", "198.51.100.1", "10.9.1.1"];
    assert_eq!(told, expected.map(|from| Some((from.parse().unwrap(), "10.9.1.2".parse().unwrap()))));
    let mut longer = udp("10.9.1.2", "192.0.2.9", 100);
    longer.extend([7; 10]);
    assert_eq!(client.link.from_user(&longer.into()).map(|packet| packet.len()), Ok(128));
    assert_eq!(client.link.from_user(&Bytes::from_static(b"E")), Err(Dropped::Malformed));

    let links = anna.users.links();
    assert_eq!(from_device(&links, udp("192.0.2.9", "10.9.1.9", 10)), None);
    let one = Some(Outcome { packets: 1, too_big: None });
    assert_eq!(from_device(&links, udp("192.0.2.9", "10.9.1.2", 10)), one);
    assert_eq!(from_device(&links, udp("203.0.113.1", "10.9.1.2", 10)), one);
    assert_eq!(lock(&client.got).len(), 1);
    let figures = &anna.users.figures()[0];
    assert_eq!(figures.dropped_to[Dropped::Source], 1);
    // The one that passed is counted by who takes it.
    assert_eq!(figures.datagrams[Place::FromTarget], 1);
    drop(client);
    assert!(links.is_empty());
    assert_eq!(from_device(&links, udp("192.0.2.9", "10.9.1.2", 10)), None);
}

/// From where to whom a message goes that a packet is administratively prohibited.
fn prohibited(packet: &Bytes) -> Option<(IpAddr, IpAddr)> {
    let view = IpView::parse(packet).unwrap();
    let expected: (u8, [u8; 2]) = if view.is_ipv6() { (58, [1, 1]) } else { (1, [3, 13]) };
    let message = &packet[view.transport_at..];
    (view.protocol == expected.0 && message[..2] == expected.1).then_some((view.source, view.destination))
}

#[tokio::test]
async fn a_flood_of_refused_packets_is_answered_ten_times_a_second() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/24\"]", LAN);
    let client = anna.open("192.0.2.0%2F24/6/").await.unwrap();
    let began = tokio::time::Instant::now();
    let count = |from: &str, to: &str| {
        assert!((0..500).all(|_| client.sends(from, to).is_err()));
        let told = std::mem::take(&mut *lock(&client.got));
        assert!(told.iter().all(|packet| prohibited(packet).is_some()));
        told.len()
    };
    assert_eq!(count("192.0.2.200", "203.0.113.1"), 0, "the source may be anybody's");
    let mut error = udp("10.9.1.2", "203.0.113.1", 100);
    (error[9], error[20]) = (1, 3);
    assert_eq!(client.link.from_user(&error.into()), Err(Dropped::Destination));
    assert!(lock(&client.got).is_empty(), "an error is not answered");
    let of_protocol = count("10.9.1.2", "192.0.2.9");
    assert!(of_protocol >= 10, "{of_protocol}");
    tokio::time::sleep(Duration::from_millis(250)).await;
    let of_destination = count("10.9.1.2", "203.0.113.1");
    assert!(of_destination >= 2, "{of_destination}");
    let most = 10 + began.elapsed().as_millis() as usize / 100 + 1;
    assert!(of_protocol + of_destination <= most, "{of_protocol} {of_destination} {most}");
}

#[tokio::test]
async fn a_scope_narrows_what_passes() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/24\"]", LAN);
    let client = anna.open("192.0.2.0%2F25/6/").await.unwrap();
    assert_eq!(client.addresses(), ["0 10.9.1.2/32"]);
    assert_eq!(client.sends("10.9.1.2", "192.0.2.9"), Err(Dropped::Protocol));
    assert_eq!(client.sends("10.9.1.2", "192.0.2.129"), Err(Dropped::Destination));
    let mut ping = udp("10.9.1.2", "192.0.2.9", 0);
    (ping[9], ping[20]) = (1, 8);
    assert!(client.link.from_user(&ping.into()).is_ok(), "ICMP always passes");
    for (path, refusal) in [
        ("203.0.113.1/*/", Refusal::Network),
        ("198.51.100.1/*/", Refusal::Network),
        ("2001:db8::1/*/", Refusal::Addresses),
        ("no-such-host.invalid/*/", Refusal::Resolve),
    ] {
        assert_eq!(anna.open(&path.replace(':', "%3A")).await.err(), Some(refusal), "{path}");
    }
    anna.may("[]", LAN);
    assert_eq!(anna.open("*/*/").await.err(), Some(Refusal::Protocol));
    anna.may("[\"10.9.1.0/24\"]", "networks = [\"10.0.0.0/8\"]");
    assert_eq!(anna.open("*/*/").await.err(), Some(Refusal::Address));
}

#[tokio::test]
async fn a_fixed_address_is_the_newest_device_s() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/29\"]", &format!("address = [\"10.9.1.5\"]\n{LAN}"));
    let mut first = anna.open("*/*/").await.unwrap();
    assert_eq!(first.addresses(), ["0 10.9.1.5/32"]);
    let second = anna.open("*/*/").await.unwrap();
    assert_eq!(second.addresses(), ["0 10.9.1.5/32"]);
    let Next::Send(told) = first.next().await else { panic!("it goes on") };
    assert_eq!(texts(&addresses::assigned(&read(&told)[0].1, 9).unwrap()), ["0 10.9.1.2/32"]);
    assert_eq!(first.sends("10.9.1.5", "192.0.2.9"), Err(Dropped::Source));
    assert!(first.sends("10.9.1.2", "192.0.2.9").is_ok() && second.sends("10.9.1.5", "192.0.2.9").is_ok());
    // 10.9.1.0, .1, .5 and .7 are not given: four older devices have the rest, and the fifth has none.
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(anna.open("*/*/").await.unwrap());
    }
    assert_eq!(others[3].addresses(), ["0 10.9.1.5/32"]);
    let ended: Vec<_> = {
        let mut all = vec![first, second];
        all.extend(others);
        let mut ended = Vec::new();
        for client in &mut all {
            if let Ok(Next::End(reason)) =
                timeout(Duration::from_millis(100), client.session.next(|| 0)).await
            {
                ended.push(reason);
            }
        }
        ended
    };
    assert_eq!(ended, [Some(Refusal::Addresses)]);
    assert!(anna.users.links().is_empty());
}

#[tokio::test]
async fn addresses_come_back_later_and_an_empty_pool_refuses() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/30\", \"10.9.1.8/31\"]", LAN);
    let first = anna.open("*/*/").await.unwrap();
    let second = anna.open("*/*/").await.unwrap();
    let third = anna.open("*/*/").await.unwrap();
    let all = [first.addresses(), second.addresses(), third.addresses()].concat();
    assert_eq!(all, ["0 10.9.1.2/32", "0 10.9.1.8/32", "0 10.9.1.9/32"]);
    assert_eq!(anna.open("*/*/").await.err(), Some(Refusal::Addresses));
    drop(second);
    assert_eq!(anna.open("*/*/").await.unwrap().addresses(), ["0 10.9.1.8/32"]);
}

#[tokio::test]
async fn requests_for_addresses_are_answered_and_bounded() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/24\", \"fd09:1::/64\"]", LAN);
    let mut client = anna.open("*/*/").await.unwrap();
    let ask = |client: &Client, count: u64| {
        let wanted = (1..=count).map(|request| {
            let address = if request % 2 == 0 { "10.0.0.7" } else { "fd00::7" };
            Address {
                request,
                address: address.parse().unwrap(),
                prefix_len: if request % 2 == 0 { 32 } else { 128 },
            }
        });
        let mut out = Vec::new();
        addresses::put_requested(&mut out, &wanted.collect::<Vec<_>>());
        let (kind, value) = read(&out).remove(0);
        client.link.capsule(Capsule::Whole { kind, value });
    };
    ask(&client, 4);
    let Next::Send(told) = client.next().await else { panic!("it goes on") };
    let answer = addresses::assigned(&read(&told)[0].1, 9).unwrap();
    assert_eq!(texts(&answer), ["2 10.9.1.2/32", "1 fd09:1::2/128", "3 ::/128", "4 0.0.0.0/32"]);
    ask(&client, 5_000);
    assert_eq!(client.next().await, Next::End(Some(Refusal::Capsules)));

    // A flood of what is right, of what is wrong, and what is longer than any capsule may be.
    let route = Bytes::from_static(&[4, 10, 0, 0, 0, 10, 0, 0, 255, 0]);
    let route = || Capsule::Whole { kind: ROUTE_ADVERTISEMENT, value: route.clone() };
    let wrong = Capsule::Whole { kind: ADDRESS_REQUEST, value: Bytes::new() };
    let endless = Capsule::TooLong { kind: ADDRESS_ASSIGN, length: (1 << 62) - 1 };
    let floods = [(0..17).map(|_| route()).collect(), vec![wrong], vec![endless]];
    for flood in floods {
        let mut client = anna.open("*/*/").await.unwrap();
        flood.into_iter().for_each(|capsule| client.link.capsule(capsule));
        assert_eq!(client.next().await, Next::End(Some(Refusal::Capsules)));
    }
    // One after the other they are bounded by time.
    let mut client = anna.open("*/*/").await.unwrap();
    let mut taken = 0;
    let end = loop {
        client.link.capsule(route());
        match timeout(Duration::from_millis(5), client.session.next(|| 0)).await {
            Ok(next) => break next,
            Err(_) => taken += 1,
        }
        assert!(taken < 200);
    };
    assert_eq!(end, Next::End(Some(Refusal::Capsules)));
    assert!(taken >= 60, "{taken}");
}

#[tokio::test]
async fn a_session_follows_the_configuration() {
    let anna = Anna::new();
    let pool = "[\"10.9.1.0/24\"]";
    anna.may(pool, LAN);
    let mut client = anna.open("*/*/").await.unwrap();
    anna.may(pool, "networks = [\"192.0.2.0/25\"]");
    let Next::Send(told) = client.next().await else { panic!("it goes on") };
    let routes = addresses::routes(&read(&told)[0].1, 9).unwrap();
    assert_eq!(routes[1].last.to_string(), "192.0.2.127");
    assert_eq!(client.sends("10.9.1.2", "192.0.2.200"), Err(Dropped::Destination));
    // This host has another address: within a second that one is taken out, and what it had is not any more.
    anna.users.together.own.set(&["192.0.2.7/32".parse().unwrap()]);
    let Next::Send(told) = client.next().await else { panic!("it goes on") };
    let routes = addresses::routes(&read(&told)[0].1, 9).unwrap();
    let ranges: Vec<_> = routes.iter().map(|route| format!("{}-{}", route.first, route.last)).collect();
    assert_eq!(ranges, ["192.0.2.0-192.0.2.6", "192.0.2.8-192.0.2.127"]);
    assert!(client.sends("10.9.1.2", "192.0.2.1").is_ok());
    anna.users.together.own.set(&["192.0.2.1/32".parse().unwrap()]);
    for keys in ["networks = [\"10.0.0.0/8\"]", "disabled = true", "address = [\"10.9.1.9\"]"] {
        anna.may(pool, LAN);
        let mut client = anna.open("*/*/").await.unwrap();
        let more = if keys.starts_with("networks") { String::new() } else { LAN.to_owned() };
        anna.may(pool, &format!("{keys}\n{more}"));
        assert_eq!(client.next().await, Next::End(None), "{keys}");
    }
}

#[tokio::test]
async fn what_a_frame_does_not_take_is_too_big_once_the_path_is_known() {
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/24\", \"fd09:1::/64\"]", LAN);
    let mut client = anna.open("*/*/").await.unwrap();
    let links = anna.users.links();
    let too_big = |packet| from_device(&links, packet).unwrap().too_big;
    client.link.set_room(Some(1_200));
    let large = || udp("192.0.2.9", "10.9.1.2", 1_400);
    assert_eq!(too_big(large()), None, "it goes by a capsule while the path is measured");
    assert_eq!(too_big(udp("192.0.2.9", "10.9.1.2", 1_480)), Some(1_500));
    client.link.set_room(Some(1_300));
    assert!(client.link.settle());
    assert_eq!((too_big(large()), lock(&client.got).len()), (Some(1_300), 1));
    assert_eq!(too_big(udp("2001:db8::9", "fd09:1::2", 1_260)), Some(1_300));
    // IPv4 that may be fragmented is.
    let mut may = large();
    may[6] = 0;
    assert_eq!((too_big(may), lock(&client.got).len()), (None, 3));
    assert_eq!(anna.users.figures()[0].dropped_to[Dropped::TooLarge], 3);
    client.link.set_room(None);
    assert_eq!(too_big(large()), None);
    client.link.set_room(Some(1_279));
    assert_eq!(client.next().await, Next::End(Some(Refusal::PathTooSmall)));
}

#[tokio::test]
async fn packets_are_within_the_users_rate() {
    const PACKET_BYTES: u64 = 128;
    let anna = Anna::new();
    anna.may("[\"10.9.1.0/24\"]", &format!("{LAN}\nrate = \"64kbit\""));
    let client = anna.open("*/*/").await.unwrap();
    let sent = (0..1_000).filter(|_| client.sends("10.9.1.2", "192.0.2.7").is_ok()).count() as u64;
    // 50 ms of the rate may be ahead, and some time has passed.
    assert!((400 / PACKET_BYTES..100).contains(&sent), "{sent}");
    let refused = client.sends("10.9.1.2", "192.0.2.7").unwrap_err();
    assert_eq!(refused, Dropped::OverRate);
    // From now on, and for sessions that are open, too.
    anna.may("[\"10.9.1.0/24\"]", LAN);
    assert!((0..1_000).all(|_| client.sends("10.9.1.2", "192.0.2.7").is_ok()));
}

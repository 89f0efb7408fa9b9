use std::{path::Path, time::Duration};

use base::clock::{Clock, SystemClock};
use data_encoding::BASE64;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
    time::timeout,
};

use super::{
    account::{Dropped, Place, Refusal},
    policy::Transport,
    target::Target,
    *,
};

/// A configuration with a service at `port`, and these users and services.
fn config(port: u16, more: &str) -> Config {
    Config::parse(&config_text(port, more), Path::new("/")).unwrap_or_else(|error| panic!("{error}"))
}

fn config_text(port: u16, more: &str) -> String {
    format!(
        "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\naccess.mode = \"open\"\n\
         [[service]]\nname = \"web\"\nupstream = \"127.0.0.1:{port}\"\n\
         [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:{port}\"\nprotocol = \"udp\"\n{more}"
    )
}

struct Anna {
    key: PasswordKey,
    field: String,
}

impl Anna {
    fn new() -> Self {
        let (key, password) = PasswordKey::generate().unwrap();
        let field = format!("Basic {}", BASE64.encode(format!("anna:{}", *password).as_bytes()));
        Self { key, field }
    }

    fn table(&self, more: &str) -> String {
        format!("[[user]]\nname = \"anna\"\npassword_key = \"{}\"\n{more}\n", self.key)
    }

    fn verify(&self, users: &Users, now: u64) -> Option<Grant> {
        grant(users, [Some(self.field.as_bytes()), None], now)
    }
}

/// Who is let in with these fields alone.
fn grant(users: &Users, fields: [Option<&[u8]>; 2], unix_seconds: u64) -> Option<Grant> {
    let presents = Presents { fields, key: None, source: IpAddr::from([192, 0, 2, 1]) };
    match users.verify(&presents, None, unix_seconds, SystemClock.now()) {
        Verdict::Known(sender) => sender.grant,
        Verdict::Checks(_) => panic!("nobody has chosen a password"),
    }
}

fn target(text: &str) -> Target {
    Target::of_connect(text).unwrap()
}

#[test]
fn good_credentials_are_those_of_a_user_who_is_let_in() {
    let (anna, users) = (Anna::new(), Users::default());
    assert!(users.is_empty() && anna.verify(&users, 0).is_none());
    users.follow(&config(80, &anna.table("services = [\"web\"]\nexpires = \"2030-01-01\"")));
    let end = 1_893_456_000;
    assert!(anna.verify(&users, end - 1).is_some_and(|grant| grant.account().name() == "anna"));
    assert!(grant(&users, [None, Some(anna.field.as_bytes())], 0).is_some());
    assert!(grant(&users, [Some(b"Basic !"), Some(anna.field.as_bytes())], 0).is_some());
    assert!(anna.verify(&users, end).is_none());
    let wrong = format!("Basic {}", BASE64.encode(b"anna:wrong"));
    let unknown = format!("Basic {}", BASE64.encode(b"ben:wrong"));
    for field in [wrong.as_str(), unknown.as_str(), "Basic", "Bearer x", ""] {
        assert!(grant(&users, [Some(field.as_bytes()), None], 0).is_none(), "{field}");
    }
    assert!(grant(&users, [None, None], 0).is_none());
    assert_eq!((users.wrong(), users.figures()[0].last_seen), (8, end - 1));
    users.follow(&config(80, &anna.table("disabled = true")));
    assert!(anna.verify(&users, 0).is_none());
    users.follow(&config(80, ""));
    assert!(anna.verify(&users, 0).is_none() && users.is_empty());
}

#[test]
fn sessions_are_bounded() {
    let (anna, users) = (Anna::new(), Users::default());
    users.follow(&config(80, &anna.table("services = [\"web\"]")));
    let grant = anna.verify(&users, 0).unwrap();
    let mut sessions: Vec<_> = (0..MOST_SESSIONS).map(|_| grant.session().unwrap()).collect();
    assert!(grant.session().is_none());
    sessions.pop();
    assert!(grant.session().is_some());
    drop(sessions);
    let figures = &users.figures()[0];
    assert_eq!((figures.sessions, figures.opened), (0, MOST_SESSIONS as u64 + 1));
}

#[tokio::test]
async fn a_user_reaches_services_and_networks_and_nothing_else() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (anna, users) = (Anna::new(), Users::default());
    let any = "[[service]]\nname = \"lan\"\nupstream = \"any\"\nallow = [\"127.0.0.1/32\"]\n";
    let access = format!("services = [\"web\"]\nnetworks = [\"127.0.0.0/8:{port}\"]");
    users.follow(&config(port, &format!("{any}{}", anna.table(&access))));
    let grant = anna.verify(&users, 0).unwrap();
    let refusal = async |text: &str| grant.open_tcp(&target(text)).await.err();
    // By a service's name whatever the port, by an address, and by a name that is looked up.
    for reached in ["web:1", "Web:443", &format!("127.0.0.1:{port}"), &format!("localhost:{port}")] {
        let mut open =
            grant.open_tcp(&target(reached)).await.unwrap_or_else(|refusal| panic!("{reached}: {refusal:?}"));
        let (mut accepted, _) = listener.accept().await.unwrap();
        accepted.write_all(b"x").await.unwrap();
        assert_eq!(open.socket.read_u8().await.unwrap(), b'x', "{reached}");
        assert_eq!(open.address.port(), port);
    }
    assert_eq!(refusal("dns:1").await, Some(Refusal::Service));
    assert_eq!(refusal("lan:1").await, Some(Refusal::Service));
    assert_eq!(refusal("127.0.0.1:1").await, Some(Refusal::Network));
    assert_eq!(refusal("192.0.2.1:443").await, Some(Refusal::Network));
    assert_eq!(refusal(&format!("127.0.0.2:{port}")).await, Some(Refusal::Address));
    assert_eq!(refusal("no-such-host.invalid:443").await, Some(Refusal::Resolve));
    assert!(grant.open_udp(&target("web:1")).await.is_ok());
    drop(listener);
    assert_eq!(refusal("web:1").await, Some(Refusal::Refused));
}

#[tokio::test]
async fn datagrams_come_from_the_target_alone() {
    let [echo, other] =
        [UdpSocket::bind("127.0.0.1:0").await.unwrap(), UdpSocket::bind("127.0.0.1:0").await.unwrap()];
    let (anna, users) = (Anna::new(), Users::default());
    users.follow(&config(echo.local_addr().unwrap().port(), &anna.table("services = [\"dns\"]")));
    let open = anna.verify(&users, 0).unwrap().open_udp(&target("dns:53")).await.unwrap();
    open.socket.send(b"ask").await.unwrap();
    let mut buffer = [0; 100];
    let (length, from) = echo.recv_from(&mut buffer).await.unwrap();
    other.send_to(b"forged", from).await.unwrap();
    echo.send_to(&buffer[..length], from).await.unwrap();
    let length = open.socket.recv(&mut buffer).await.unwrap();
    assert_eq!(&buffer[..length], b"ask");
}

#[tokio::test]
async fn what_is_open_ends_when_the_user_may_not_have_it_any_more() {
    let (anna, users) = (Anna::new(), Users::default());
    let good = config(80, &anna.table("services = [\"web\"]"));
    let address = "127.0.0.1:80".parse().unwrap();
    let other = Anna::new();
    for ends in [
        config(80, ""),
        config(80, &anna.table("services = [\"web\"]\ndisabled = true")),
        config(80, &anna.table("services = [\"web\"]\nexpires = \"2020-01-01\"")),
        config(80, &anna.table("services = [\"dns\"]")),
        config(81, &anna.table("services = [\"web\"]")),
        config(80, &other.table("services = [\"web\"]")),
    ] {
        users.follow(&good);
        let grant = anna.verify(&users, 0).unwrap();
        let now = || 1_800_000_000;
        let (web, tcp) = (target("web:80"), Transport::Tcp);
        let over = grant.over(&web, tcp, address, now);
        tokio::pin!(over);
        let while_nothing_matters = async {
            users.follow(&config(80, &anna.table("services = [\"web\", \"dns\"]")));
            timeout(Duration::from_millis(20), &mut over).await
        };
        assert!(while_nothing_matters.await.is_err(), "it goes on");
        users.follow(&ends);
        timeout(Duration::from_secs(5), over).await.expect("it ends at once");
    }
}

#[test]
fn an_account_balances() {
    let account = Account::new(&"anna".into());
    for _ in 0..5 {
        account.datagram(Place::FromTarget, 100);
    }
    for _ in 0..4 {
        account.datagram(Place::ToUser, 100);
    }
    account.dropped_to_user(Dropped::QueueFull, 1);
    account.taken_back(2);
    account.overflowed(3);
    let figures = account.figures();
    assert_eq!(figures.datagrams[Place::FromTarget], figures.datagrams[Place::ToUser] + 1 + 2);
    assert_eq!((figures.dropped_to[Dropped::Unsent], figures.bytes[Place::FromTarget]), (2, 500));
    assert_eq!((figures.datagrams[Place::FromUser], figures.dropped_from[Dropped::ReceiveOverflow]), (3, 3));
}

#[test]
fn an_account_gives_back_no_more_than_it_has() {
    let account = Account::new(&"anna".into());
    account.datagram(Place::FromTarget, 1);
    account.datagram(Place::ToUser, 1);
    account.taken_back(5);
    let figures = account.figures();
    assert_eq!((figures.datagrams[Place::ToUser], figures.dropped_to[Dropped::Unsent]), (0, 1));
}

#[test]
fn connections_are_bounded() {
    let (users, all): (_, Vec<Anna>) =
        (Users::default(), (0..MOST_CONNECTIONS_OF_ALL / MOST_CONNECTIONS).map(|_| Anna::new()).collect());
    let mut held = Vec::new();
    for anna in &all {
        // The account of a user who is removed lives on in what is open.
        users.follow(&config(80, ""));
        users.follow(&config(80, &anna.table("services = [\"web\"]")));
        let grant = anna.verify(&users, 0).unwrap();
        held.extend((0..MOST_CONNECTIONS).map(|_| grant.connection().unwrap()));
        assert!(grant.connection().is_none(), "one user's");
        let last = held.pop().unwrap();
        drop(last);
        held.push(grant.connection().unwrap());
    }
    assert_eq!(held.iter().filter(|connection| connection.is_wide).count(), MOST_WIDE_CONNECTIONS);
    users.follow(&config(80, ""));
    users.follow(&config(80, &all[0].table("services = [\"web\"]")));
    let grant = all[0].verify(&users, 0).unwrap();
    assert!(grant.connection().is_none(), "those of all");
    drop(held);
    assert!(grant.connection().is_some_and(|connection| connection.is_wide));
}

/// Users whose names are looked up by `resolve`.
fn users_by(
    resolve: impl Fn(&str, u16) -> std::io::Result<Vec<std::net::SocketAddr>> + Send + Sync + 'static,
) -> Users {
    let together = Together { lookups: Lookups::by(resolve), ..Together::default() };
    Users { together: Arc::new(together), ..Users::default() }
}

#[tokio::test]
async fn look_ups_of_a_user_are_bounded_also_when_they_were_given_up() {
    let (end, ended) = std::sync::mpsc::sync_channel::<()>(0);
    let ended = Mutex::new(ended);
    let anna = Anna::new();
    let users = users_by(move |_, _| {
        let _until = lock(&ended).recv();
        Ok(Vec::new())
    });
    users.follow(&config(80, &anna.table("networks = [\"192.0.2.0/24\"]")));
    let grant = anna.verify(&users, 0).unwrap();
    for number in 0..lookups::MOST_OF_ONE {
        let asked = target(&format!("name{number}.example:1"));
        assert!(timeout(Duration::from_millis(5), grant.open_tcp(&asked)).await.is_err(), "it waits");
    }
    let more = timeout(Duration::from_secs(5), grant.open_tcp(&target("one.more:1"))).await.unwrap();
    assert_eq!(more.err(), Some(Refusal::Lookups));
    drop(end);
    while grant.account.lookups.available_permits() < lookups::MOST_OF_ONE {
        tokio::task::yield_now().await;
    }
    assert_eq!(grant.open_tcp(&target("one.more:1")).await.err(), Some(Refusal::Resolve));
}

#[tokio::test]
async fn the_name_of_a_service_leads_to_hosts_and_not_back_to_us() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let anna = Anna::new();
    let users = users_by(|_, port| Ok(vec![std::net::SocketAddr::from(([127, 0, 0, 1], port))]));
    let named = |host: &str, port: u16| {
        format!(
            "[[service]]\nname = \"named\"\nupstream = \"{host}:{port}\"\n{}",
            anna.table("services = [\"named\"]")
        )
    };
    for host in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255"] {
        let resolved = users_by(move |_, port| Ok(vec![format!("{host}:{port}").parse().unwrap()]));
        resolved.follow(&config(80, &named("db.example.net", port)));
        let opened = anna.verify(&resolved, 0).unwrap().open_tcp(&target("named:1")).await;
        assert_eq!(opened.err(), Some(Refusal::Unreachable), "{host}");
    }
    for host in ["::", "::1", "ff02::1", "::ffff:127.0.0.1"] {
        let resolved = users_by(move |_, port| Ok(vec![format!("[{host}]:{port}").parse().unwrap()]));
        resolved.follow(&config(80, &named("db.example.net", port)));
        let opened = anna.verify(&resolved, 0).unwrap().open_udp(&target("named:1")).await;
        assert_eq!(opened.err(), Some(Refusal::Unreachable), "{host}");
    }
    // Loopback is what it means; but our own UDP port is not for datagrams.
    users.follow(&config(80, &named("localhost", port)));
    assert!(anna.verify(&users, 0).unwrap().open_tcp(&target("named:1")).await.is_ok());
    users.follow(&config(80, &named("localhost", 4433)));
    let grant = anna.verify(&users, 0).unwrap();
    assert_eq!(grant.open_udp(&target("named:1")).await.err(), Some(Refusal::Unreachable));
    assert_eq!(grant.open_tcp(&target("named:1")).await.err(), Some(Refusal::Refused));
}

#[tokio::test]
async fn a_loopback_prefix_does_not_lead_to_where_the_agent_listens() {
    let (anna, users) = (Anna::new(), Users::default());
    let follow = |allow: &str| {
        let any = format!("[[service]]\nname = \"here\"\nupstream = \"any\"\nallow = [{allow}]\n");
        let more = any + &anna.table("networks = [\"127.0.0.0/8\"]");
        let text = format!(
            "metrics = {{ listen = \"0.0.0.0:9\", allow = [\"10.0.0.0/8\"] }}\n{}",
            config_text(80, &more)
        );
        users.follow(&Config::parse(&text, Path::new("/")).unwrap());
    };
    let grant = || anna.verify(&users, 0).unwrap();
    follow("\"127.0.0.0/8\"");
    for own in ["127.0.0.9:9", "127.0.0.1:9", "127.1.2.3:9"] {
        assert_eq!(grant().open_tcp(&target(own)).await.err(), Some(Refusal::Address), "{own}");
    }
    assert!(grant().open_udp(&target("127.0.0.9:9")).await.is_ok(), "it listens on TCP alone");
    // Port 1 is nobody's.
    assert_eq!(grant().open_tcp(&target("127.0.0.9:1")).await.err(), Some(Refusal::Refused));
    // Who names the one address means it.
    follow("\"127.0.0.9\"");
    assert_eq!(grant().open_tcp(&target("127.0.0.9:9")).await.err(), Some(Refusal::Refused));
}

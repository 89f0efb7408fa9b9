use std::{path::Path, time::Duration};

use base::clock::{Clock, SystemClock};
use config::Config;
use data_encoding::BASE64;
use gate::client_key::ClientKey;
use tokio::time::timeout;

use super::*;
use crate::{Presents, Sender, Users, Verdict};

/// `argon2-cffi` 25.1 made it of "correct horse".
const HASH: &str =
    "$argon2id$v=19$m=512,t=2,p=2$j3WV6jt9idfVVB+XiCNKYg$reqmJts8b+wKr4IdWpb4WKCvudX9UDb5Tgiw9BFHBwo";

/// A hash that takes some hundred milliseconds, of another password.
const SLOW: &str = "$argon2id$v=19$m=65536,t=4,p=1$c2FsdHNhbHQ$aGFzaGhhc2hoYXNoaGFzaA";

const KEY: &str = "sha256:00000000000000000000000000000000000000000000000000000000000000aa";

fn field(name: &str, password: &str) -> String {
    format!("Basic {}", BASE64.encode(format!("{name}:{password}").as_bytes()))
}

fn user(name: &str, keys: &str) -> String {
    format!("[[user]]\nname = \"{name}\"\n{keys}\nservices = [\"web\"]\n")
}

fn chosen(hash: &str) -> String {
    format!("password_hash = \"{hash}\"")
}

fn users(tables: &str) -> Users {
    let users = Users::default();
    follow(&users, tables);
    users
}

fn follow(users: &Users, tables: &str) {
    let text = format!(
        "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\naccess.mode = \"open\"\n\
         [[service]]\nname = \"web\"\nupstream = \"127.0.0.1:80\"\n{tables}"
    );
    users.follow(&Config::parse(&text, Path::new("/")).unwrap_or_else(|error| panic!("{error}")));
}

/// A client, whose requests come when it says.
#[derive(Clone, Copy)]
struct Client {
    source: [u8; 4],
    at: Instant,
    key: Option<ClientKey>,
}

impl Client {
    fn new(source: [u8; 4]) -> Self {
        Self { source, at: SystemClock.now(), key: None }
    }

    fn after(self, seconds: u64) -> Self {
        Self { at: self.at + Duration::from_secs(seconds), ..self }
    }

    fn ask(self, users: &Users, fields: [Option<&str>; 2], checked: Option<&Check>) -> Verdict {
        let fields = fields.map(|field| field.map(str::as_bytes));
        let presents = Presents { fields, key: self.key, source: IpAddr::from(self.source) };
        users.verify(&presents, checked, 0, self.at)
    }

    /// Who it is once that is known.
    async fn known(self, users: &Users, fields: [Option<&str>; 2]) -> Sender {
        match self.ask(users, fields, None) {
            Verdict::Known(sender) => sender,
            Verdict::Checks(mut check) => {
                timeout(Duration::from_secs(60), &mut check).await.expect("a check ends");
                let verdict = self.ask(users, fields, Some(&check));
                let Verdict::Known(sender) = verdict else { panic!("one check is all there is") };
                sender
            }
        }
    }

    async fn is_let_in(self, users: &Users, field: &str) -> bool {
        self.known(users, [Some(field), None]).await.grant.is_some()
    }
}

fn counts(users: &Users) -> [u64; 4] {
    use CheckOutcome::{Refused, Right, Source, Wrong};
    [Right, Wrong, Refused, Source].map(|outcome| users.checks()[outcome])
}

#[tokio::test]
async fn a_chosen_password_is_looked_at_once_and_remembered() {
    let users = users(&user("anna", &chosen(HASH)));
    let (client, good) = (Client::new([192, 0, 2, 1]), field("anna", "correct horse"));
    assert!(client.is_let_in(&users, &good).await);
    for _ in 0..100 {
        let verdict = client.ask(&users, [None, Some(&good)], None);
        assert!(matches!(verdict, Verdict::Known(Sender { grant: Some(_), hides_authorization: true })));
    }
    assert_eq!(counts(&users), [1, 0, 0, 0]);
    // Guesses from elsewhere are checked or not looked at: what is remembered tells them nothing, the right one among them.
    let elsewhere = Client::new([198, 51, 100, 1]).after(1);
    assert!(!elsewhere.is_let_in(&users, &field("anna", "Correct horse")).await);
    assert!(!elsewhere.is_let_in(&users, &good).await, "one of a source in a second");
    assert!(client.is_let_in(&users, &good).await, "they do not displace it");
    assert_eq!((counts(&users), users.wrong()), ([1, 1, 0, 1], 2));
    // One from there does, so that the next one waits for a check.
    assert!(!client.after(2).is_let_in(&users, &field("anna", "Correct horse")).await);
    assert!(!client.after(2).is_let_in(&users, &good).await);
    assert!(client.after(3).is_let_in(&users, &good).await);
    assert_eq!(counts(&users), [2, 2, 0, 2]);
    // Another line of the user, and all is looked at again.
    follow(&users, &user("anna", &format!("{}\nrate = \"1Mbit\"", chosen(HASH))));
    assert!(
        matches!(client.after(4).ask(&users, [Some(&good), None], None), Verdict::Known(_)),
        "rate is not among them"
    );
    follow(&users, &user("anna", &format!("{}\nexpires = \"2090-01-01\"", chosen(HASH))));
    assert!(client.after(5).is_let_in(&users, &good).await);
    assert_eq!(counts(&users), [3, 2, 0, 2]);
    follow(&users, &user("anna", &chosen(SLOW)));
    assert!(!client.after(6).is_let_in(&users, &good).await, "it was another's");
}

#[tokio::test]
async fn checks_are_few_and_one_of_a_source_in_a_second() {
    let users = users(&user("anna", &chosen(HASH)));
    let client = |last: u8, third: u8| Client { source: [198, 51, third, last], ..Client::new([0; 4]) };
    let start = SystemClock.now();
    let at = |client: Client, millis: u64| Client { at: start + Duration::from_millis(millis), ..client };
    let wrong = |number: u32| field("anna", &format!("guess {number}"));
    let is_looked_at = |client: Client, number: u32| {
        matches!(client.ask(&users, [Some(&wrong(number)), None], None), Verdict::Checks(_))
    };
    assert!(is_looked_at(at(client(1, 0), 0), 0));
    assert!(!is_looked_at(at(client(2, 0), 999), 1), "the same /24");
    for third in 1..5 {
        assert!(is_looked_at(at(client(1, third), 10), 10 + u32::from(third)));
    }
    assert!(!is_looked_at(at(client(1, 5), 999), 20), "five in a second are all");
    assert!(is_looked_at(at(client(1, 0), 1_000), 30));
    assert!(!is_looked_at(at(client(1, 5), 1_000), 31), "four are not a second old");
    assert_eq!(counts(&users)[2..], [2, 1]);
    // The right one is not let in either while nothing is looked at, and never shown to the site.
    let good = field("anna", "correct horse");
    let sender = at(client(1, 5), 1_005).known(&users, [None, Some(&good)]).await;
    assert!(sender.grant.is_none() && sender.hides_authorization);
    assert!(at(client(1, 5), 3_000).is_let_in(&users, &good).await);
}

#[tokio::test]
async fn requests_with_one_password_share_a_check() {
    let users = users(&user("anna", &chosen(SLOW)));
    let (client, wrong) = (Client::new([192, 0, 2, 1]), field("anna", "x"));
    let checks: Vec<Check> = (0..MOST_REQUESTS)
        .map(|_| match client.ask(&users, [Some(&wrong), None], None) {
            Verdict::Checks(check) => check,
            Verdict::Known(_) => panic!("it is looked at"),
        })
        .collect();
    let more = client.ask(&users, [Some(&wrong), None], None);
    assert!(matches!(more, Verdict::Known(Sender { grant: None, .. })), "no more than that wait for one");
    for check in checks {
        timeout(Duration::from_secs(60), check).await.unwrap();
    }
    assert_eq!(counts(&users), [0, 1, 1, 0]);
}

#[tokio::test]
async fn a_check_does_not_keep_a_removed_user() {
    let users = users(&user("anna", &chosen(SLOW)));
    let client = Client::new([192, 0, 2, 1]);
    let Verdict::Checks(mut check) = client.ask(&users, [Some(&field("anna", "x")), None], None) else {
        panic!("it is looked at")
    };
    let entry = Arc::downgrade(&users.table.load().by_name["anna"]);
    follow(&users, "");
    assert_eq!(entry.strong_count(), 0);
    timeout(Duration::from_secs(60), &mut check).await.unwrap();
    assert!(matches!(
        client.ask(&users, [None, None], Some(&check)),
        Verdict::Known(Sender { grant: None, .. })
    ));
}

#[tokio::test]
async fn a_key_lets_its_user_in_and_nobody_else() {
    let key = format!("client_key = \"{KEY}\"");
    let users = users(&user("anna", &key));
    assert!(users.asks_for_certificates());
    let none = Client::new([192, 0, 2, 1]);
    let right = Client { key: KEY.parse().ok(), ..none };
    let other = Client { key: KEY.replace("aa", "ab").parse().ok(), ..none };
    let name = |sender: Sender| sender.grant.map(|grant| grant.account().name().to_owned());
    let asked = async |client: Client, field: Option<&str>| client.known(&users, [None, field]).await;
    assert_eq!(name(asked(right, None).await).as_deref(), Some("anna"));
    let sites = asked(right, Some(&field("site", "own"))).await;
    assert!(sites.grant.is_some() && !sites.hides_authorization, "what is the site's stays the site's");
    for client in [none, other] {
        assert_eq!(name(asked(client, None).await), None);
        assert_eq!(name(asked(client, Some(&field("anna", ""))).await), None, "no password is none");
        assert_eq!(name(asked(client, Some("Basic YW5uYTo=")).await), None);
    }
    let grant = asked(right, None).await.grant.unwrap();
    for (changed, asks) in [
        (user("anna", &key.replace("aa", "ab")), true),
        (user("anna", &format!("{key}\ndisabled = true")), false),
        (user("anna", &chosen(HASH)), false),
        (String::new(), false),
    ] {
        follow(&users, &changed);
        assert_eq!(users.asks_for_certificates(), asks, "{changed}");
        assert_eq!(name(asked(right, None).await), None, "{changed}");
    }
    let over = async {
        let target = crate::target::Target::of_connect("web:80").unwrap();
        grant.over(&target, crate::policy::Transport::Tcp, ([127, 0, 0, 1], 80).into(), || 0).await;
    };
    timeout(Duration::from_secs(5), over).await.expect("what it has open ends");
}

#[tokio::test]
async fn a_password_of_a_user_who_is_shut_out_is_not_the_sites() {
    let (made, password) = PasswordKey::generate().unwrap();
    let tables = |more: &str| {
        user("anna", &format!("password_key = \"{made}\"\n{more}"))
            + &user("ben", &format!("{}\n{more}", chosen(HASH)))
    };
    let users = users(&tables("disabled = true"));
    let client = Client::new([192, 0, 2, 1]);
    let hides = async |name: &str, password: &str| {
        let sender = client.known(&users, [None, Some(&field(name, password))]).await;
        assert!(sender.grant.is_none());
        sender.hides_authorization
    };
    for ends in ["disabled = true", "expires = \"1970-01-01\""] {
        follow(&users, &tables(ends));
        assert!(hides("anna", &password).await, "{ends}");
        assert!(!hides("anna", "wrong").await && !hides("carl", "x").await, "the site may know them");
        // It would take a check to know that it is not.
        assert!(hides("ben", "correct horse").await && hides("ben", "wrong").await, "{ends}");
    }
    assert_eq!(counts(&users), [0; 4]);
    follow(&users, &tables(""));
    assert!(!hides("ben", "wrong").await, "it was looked at");
}

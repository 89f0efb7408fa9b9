//! `[[user]]` and `upstream = "any"`: what they may say, in the configuration and in the state file, and what a reload does with them.

use std::path::{Path, PathBuf};

use gate::password::PasswordKey;

use crate::{
    Config, NewUser, PeerOrigin,
    change::{KeyValue, PeerChange},
    export::user_toml,
    reload::{self, Kind},
    reload_tests::parse,
    state::{self, Edit, StateError},
};

const HEAD: &str = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\naccess.mode = \"open\"\n\
                    [http]\ncertificate_file = \"a\"\nkey_file = \"b\"\nnames = [\"gw.example.net\"]\n\
                    [[service]]\nname = \"web\"\nupstream = \"127.0.0.1:80\"\n\
                    [[service]]\nname = \"lan\"\nupstream = \"any\"\nallow = [\"10.1.0.0/16\"]\n";

fn key() -> String {
    PasswordKey::generate().unwrap().0.to_string()
}

fn user(name: &str, more: &str) -> String {
    format!("[[user]]\nname = \"{name}\"\npassword_key = \"{}\"\n{more}\n", key())
}

fn notes(config: &Config) -> Vec<String> {
    config.notes.iter().map(ToString::to_string).collect()
}

fn problem(text: &str) -> String {
    Config::parse(text, Path::new("/")).map(drop).unwrap_err().to_string()
}

/// [`HEAD`] with a pool, and a TUN device.
fn pooled(pool: &str, more: &str) -> String {
    let http =
        HEAD.replace("[http]\n", &format!("tun.address = [\"10.9.1.1/24\"]\n[http]\npool = [{pool}]\n"));
    format!("{http}{more}")
}

#[test]
fn inner_addresses_are_of_the_pool_and_one_user_s() {
    let pool = "\"10.9.1.0/24\", \"fd09:1::/64\"";
    let anna = user("anna", "services = [\"web\"]\naddress = [\"10.9.1.7\", \"fd09:1::7\"]");
    let config = parse(&pooled(pool, &anna));
    assert_eq!(notes(&config), [""; 0]);
    let addresses: Vec<String> = config.users[0].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.9.1.7", "fd09:1::7"]);
    assert_eq!(config.tun.unwrap().pool, config.http.pool);
    let peer = "[[peer]]\nname = \"b\"\npublic_key = \"bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA\"\nallowed_ips = [\"10.9.1.8/29\"]\n";
    let of = |address: &str| user("ben", &format!("services = [\"web\"]\naddress = [{address}]"));
    for (more, wrong) in [
        (of("\"10.9.2.7\""), "is not in http.pool"),
        (of("\"10.9.1.7\""), "is that of anna, too"),
        (of("\"10.9.1.1\""), "is that of the TUN device, too"),
        (of("\"10.9.1.8\", \"10.9.1.9\""), "two addresses of one family"),
        (of("\"10.9.1.8/32\""), "is no address"),
        (peer.to_owned(), "lies in http.pool"),
    ] {
        let said = problem(&pooled(pool, &format!("{anna}{more}")));
        assert!(said.contains(wrong) && said.contains("(remedy: "), "{more}: {said}");
    }
    let without = parse(&HEAD.replace("[http]\n", "[http]\npool = [\"10.9.1.0/24\"]\n"));
    assert!(notes(&without)[0].contains("no effect without a TUN device"), "{:?}", notes(&without));
}

#[test]
fn inner_addresses_of_the_state_file_are_checked_when_they_are_set() {
    let config =
        parse(&pooled("\"10.9.1.0/24\"", &user("anna", "address = [\"10.9.1.7\"]\nservices = [\"web\"]")));
    let ben = |address: &str| user("ben", &format!("services = [\"web\"]\naddress = [\"{address}\"]"));
    assert_eq!(state::users(&config, &ben("10.9.1.8")).unwrap().len(), 2);
    for (address, wrong) in [("10.9.1.7", "is that of anna, too"), ("10.9.3.7", "is not in http.pool")] {
        let said = state::users(&config, &ben(address)).unwrap_err().to_string();
        assert!(said.contains(wrong), "{said}");
    }
    let peer = |prefix: &str| {
        let keys = [
            ("name", "lan".into()),
            ("public_key", "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA".into()),
            ("allowed_ips", vec![prefix].into()),
        ];
        let table =
            keys.into_iter().map(|(key, value): (&str, toml::Value)| (key.to_owned(), value)).collect();
        state::check_table(&config, &[], &[], table)
    };
    peer("10.9.3.0/28").unwrap();
    let said = peer("10.9.1.0/28").unwrap_err().to_string();
    assert!(said.contains("lies in http.pool"), "{said}");
}

#[test]
fn what_a_user_may_say() {
    let all = "services = [\"web\"]\nnetworks = [\"10.1.0.0/16\", \"0.0.0.0/0:443\", \"[2001:db8::/32]:80\", \"2001:db8::1\"]\n\
               expires = \"2030-01-31\"\ndisabled = false";
    let config = parse(&format!("{HEAD}{}", user("anna", all)));
    assert_eq!(notes(&config), [""; 0]);
    let anna = &config.users[0];
    assert_eq!((&*anna.name, &*anna.services, anna.expires), ("anna", &[0][..], Some(1_896_048_000)));
    let networks: Vec<String> = anna.networks.iter().map(ToString::to_string).collect();
    assert_eq!(networks, ["10.1.0.0/16", "0.0.0.0/0:443", "[2001:db8::/32]:80", "2001:db8::1/128"]);
    let lan = &config.services[1];
    assert!(lan.is_any() && !lan.udp && !lan.tcp && lan.upstream.is_any());
    for (more, wrong) in [
        ("services = [\"lan\"]", "has no address of its own"),
        ("services = [\"dns\"]", "no [[service]] is named"),
        ("networks = [\"10.1.2.3/16\"]", "length of a prefix"),
        ("networks = [\"10.1.0.0/16:0\"]", "has no port behind its colon"),
        ("networks = [\"example.net:443\"]", "is not a prefix"),
        ("expires = \"soon\"", "is not a time"),
        ("pasword_key = \"\"", "unknown key"),
    ] {
        let said = problem(&format!("{HEAD}{}", user("anna", more)));
        assert!(said.contains(wrong) && said.contains("(remedy: "), "{more}: {said}");
    }
    let twice = format!("{HEAD}{}{}", user("anna", ""), user("anna", ""));
    assert!(problem(&twice).contains("is taken by an earlier one"));
    let [key, hash, client_key] = [
        format!("password_key = \"{}\"", key()),
        "password_hash = \"$argon2id$v=19$m=65536,t=4,p=1$c2FsdHNhbHQ$aGFzaGhhc2hoYXNoaGFzaA\"".to_owned(),
        format!("client_key = \"sha256:{}\"", "0a".repeat(32)),
    ];
    let with = |keys: &[&str]| {
        format!("{HEAD}[[user]]\nname = \"anna\"\nservices = [\"web\"]\n{}\n", keys.join("\n"))
    };
    for keys in [&[&*key][..], &[&hash], &[&client_key], &[&key, &client_key], &[&hash, &client_key]] {
        let user = &parse(&with(keys)).users[0];
        let text = user_toml(user, &[]);
        assert!(keys.iter().all(|key| text.contains(*key)), "{text}");
    }
    for (keys, wrong) in [
        (&[][..], "neither password_key, password_hash nor client_key"),
        (&[&*key, &hash], "one password"),
        (&[&hash.replace("65536", "65537")], "asks for 65537 KiB"),
        (&[&hash.replace("t=4", "t=5")], "in all passes"),
        (&[&client_key.replace("0a\"", "\"")], "is not sha256:"),
    ] {
        let said = problem(&with(keys));
        assert!(said.contains(wrong) && said.contains("(remedy: "), "{keys:?}: {said}");
    }
    let two = with(&[&client_key]) + &user("ben", &client_key);
    assert!(problem(&two).contains("is that of \"anna\", too"));
    let plain = format!("{HEAD}[[user]]\nname = \"anna\"\npassword_key = \"hunter2\"\n");
    assert!(problem(&plain).contains("let culvert user add"));
}

#[test]
fn an_operator_is_told_of_users_who_reach_nothing() {
    let said = |text: &str| notes(&parse(text)).join("\n");
    assert!(said(&format!("{HEAD}{}", user("anna", ""))).contains("may reach nothing"));
    assert_eq!(said(&format!("{HEAD}{}", user("anna", "disabled = true"))), "");
    let without_any = HEAD.split("[[service]]\nname = \"lan\"").next().unwrap();
    let networks = user("anna", "networks = [\"10.1.0.0/16\"]");
    assert!(said(&format!("{without_any}{networks}")).contains("no service has upstream = \"any\""));
    let without_http = HEAD
        .replace("[http]\ncertificate_file = \"a\"\nkey_file = \"b\"\nnames = [\"gw.example.net\"]\n", "");
    let text = format!("{without_http}{}", user("anna", "services = [\"web\"]"));
    assert!(said(&text).contains("neither http.names nor http.listen"));
    let allow = HEAD.replace("upstream = \"any\"", "upstream = \"127.0.0.1:81\"");
    assert!(said(&allow).contains("upstream = \"any\" only"));
}

#[test]
fn a_reload_shows_what_becomes_of_users() {
    let old = parse(&format!(
        "{HEAD}{}{}",
        user("anna", "services = [\"web\"]"),
        user("ben", "services = [\"web\"]")
    ));
    let mut new = old.clone();
    new.users[0].disabled = true;
    let ben = new.users.remove(1);
    let plan = reload::plan(&old, new.clone());
    let what: Vec<_> = plan.changes.iter().map(|change| &*change.what).collect();
    assert_eq!(what, ["user \"ben\"", "user \"anna\": disabled"]);
    assert_eq!(plan.config.unwrap().users, new.users);
    // A service that stands elsewhere in the file is the same one.
    let text = HEAD.replace(
        "[[service]]\nname = \"web\"",
        "[[service]]\nname = \"a\"\nupstream = \"127.0.0.1:1\"\n[[service]]\nname = \"web\"",
    );
    let mut moved = parse(&text);
    moved.users = vec![crate::User { services: vec![1], ..ben }];
    let plan = reload::plan(&old, moved);
    assert_eq!(plan.config.unwrap().users[0].services, [0]);
    let removed = reload::plan(&old, parse(HEAD.split("[[service]]\nname = \"lan\"").next().unwrap()));
    assert!(
        removed.changes.iter().any(|change| change.kind == Kind::Removed("any".to_owned())),
        "{:?}",
        removed.changes
    );
    assert!(!removed.config.unwrap().services[1].is_any());
}

#[test]
fn the_state_file_keeps_users() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join(state::FILE_NAME);
    let running = parse(&format!("{HEAD}{}", user("anna", "services = [\"web\"]")));
    let new = NewUser {
        name: "ben".to_owned(),
        password_key: Some(key()),
        networks: vec!["10.1.0.0/16".to_owned()],
        ..NewUser::default()
    };
    let mut edit = Edit::begin(&path).unwrap();
    edit.add_user(&new).unwrap();
    assert!(matches!(edit.add_user(&new), Err(StateError::UserExists { .. })));
    let switch = PeerChange {
        name: "ben".to_owned(),
        set: [("disabled".to_owned(), KeyValue::Switch(true))].into(),
        ..PeerChange::default()
    };
    edit.set_user(&switch).unwrap();
    let nobody = PeerChange { name: "carl".to_owned(), ..PeerChange::default() };
    assert!(matches!(edit.set_user(&nobody), Err(StateError::NoUser { .. })));
    assert!(edit.commit().unwrap().is_none());
    let text = state::read(&path).unwrap().unwrap();
    let users = state::users(&running, &text).unwrap();
    assert_eq!(users.iter().map(|user| &*user.name).collect::<Vec<_>>(), ["anna", "ben"]);
    assert!(users[1].disabled && users[1].origin == PeerOrigin::State);
    // The configuration's own users count.
    let anna = NewUser { name: "anna".to_owned(), password_key: Some(key()), ..NewUser::default() };
    let mut edit = Edit::begin(&path).unwrap();
    edit.add_user(&anna).unwrap();
    assert_eq!(state::users(&running, edit.text()).unwrap().len(), 2);
    assert!(edit.remove_user("anna").unwrap() && !edit.remove_user("anna").unwrap());
    let plan = reload::plan_users(&running, users);
    assert_eq!(plan.changes.len(), 1);
    assert!(
        state::users(&running, "[[user]]\nname = \"x\"\n")
            .unwrap_err()
            .to_string()
            .contains("neither password_key")
    );
}

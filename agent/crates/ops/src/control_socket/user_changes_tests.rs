//! `user-add`, `user-set`, `user-remove`: what is asked, answered and written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use config::{
    Config, NewUser,
    reload::{Change, plan_users},
    state::{self, KeyValue, PeerChange},
};
use engine::{registry::Listed, status::ForwardId};
use gate::{identity::PublicKey, password::PasswordKey};
use tempfile::TempDir;

use super::{
    Peers, Refused, Reloaded, RequestHandler,
    protocol::{Answer, Request},
    status::{Scope, Status},
    tests,
};
use crate::qlog::Captures;

/// A stand-in for the agent, whose users are those that it was told of last.
struct Fake {
    config: Mutex<Arc<Config>>,
    captures: Captures,
    changing: Mutex<()>,
}

impl Peers for Fake {
    fn list(&self) -> Vec<Listed> {
        Vec::new()
    }

    fn add(&self, _: config::Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn change(&self, _: config::Peer, _: bool) -> Result<Vec<Change>, Refused> {
        Ok(Vec::new())
    }

    fn set_quota_used(&self, _: &Arc<str>, _: &config::quota::Quota, _: u64) -> Result<(), Refused> {
        Err("nothing is kept here".into())
    }

    fn change_users(&self, users: Vec<config::User>, dry_run: bool) -> Result<Vec<Change>, Refused> {
        let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = plan_users(&config, users);
        if let (Some(new), false) = (plan.config, dry_run) {
            *config = Arc::new(new);
        }
        Ok(plan.changes)
    }

    fn remove(&self, _: &str) -> Result<(), Refused> {
        Ok(())
    }

    fn keep_out(&self, _: &config::Peer) {}

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn reload(&self, _: bool) -> Result<Reloaded, Refused> {
        Ok(Reloaded::default())
    }

    fn drain(&self, _: std::time::Duration) -> Result<(), Refused> {
        Ok(())
    }

    fn end_forward(&self, _: ForwardId) -> Result<bool, Refused> {
        Ok(false)
    }

    fn captures(&self) -> &Captures {
        &self.captures
    }

    fn status(&self, _: &Scope) -> Status {
        Status::default()
    }
}

struct Case {
    folder: TempDir,
    fake: Arc<Fake>,
    handler: RequestHandler,
}

fn key() -> String {
    PasswordKey::generate().unwrap().0.to_string()
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "identity = {{ key_file = \"id.key\", state_dir = \"state\" }}\ntransport.listen = [\"127.0.0.1:4433\"]\n\
             [[service]]\nname = \"web\"\nupstream = \"127.0.0.1:80\"\n\
             [[user]]\nname = \"carl\"\npassword_key = \"{}\"\nservices = [\"web\"]\n",
            key()
        );
        let config = Arc::new(Config::parse(&text, folder.path()).unwrap());
        let captures = tests::no_captures(&config);
        let fake = Arc::new(Fake { config: Mutex::new(config), captures, changing: Mutex::default() });
        let own: PublicKey = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA".parse().unwrap();
        let peers: Arc<dyn Peers> = Arc::<Fake>::clone(&fake);
        Self { folder, fake, handler: RequestHandler::new(own, "0.1.0", peers) }
    }

    fn ask(&self, request: &Request) -> Answer {
        self.handler.answer(request.to_line().as_bytes())
    }

    fn refused(&self, request: &Request) -> String {
        let answer = self.ask(request);
        let Answer::Refused { bad_input: true, error } = answer else { panic!("{answer:?}") };
        error
    }

    fn written(&self) -> String {
        state::read(&self.folder.path().join("state").join(state::FILE_NAME)).unwrap().unwrap_or_default()
    }

    fn names(&self) -> Vec<String> {
        let answer = self.ask(&Request::UserList {});
        let Answer::Users { users } = answer else { panic!("{answer:?}") };
        users.into_iter().map(|user| user.name).collect()
    }
}

fn anna() -> NewUser {
    NewUser {
        name: "anna".to_owned(),
        password_key: Some(key()),
        services: vec!["web".to_owned()],
        ..NewUser::default()
    }
}

#[test]
fn users_are_added_changed_and_removed_in_effect_and_in_the_file() {
    let case = Case::new();
    assert!(
        matches!(case.ask(&Request::UserAdd(anna())), Answer::Reloaded { changes, .. } if changes.len() == 1)
    );
    assert_eq!(case.names(), ["carl", "anna"]);
    assert!(case.written().contains("[[user]]\nname = \"anna\"\n"), "{}", case.written());
    let disable = PeerChange {
        name: "anna".to_owned(),
        set: [("disabled".to_owned(), KeyValue::Switch(true))].into(),
        ..PeerChange::default()
    };
    assert!(matches!(case.ask(&Request::UserSet(disable)), Answer::Reloaded { .. }));
    assert!(case.fake.config().users[1].disabled && case.written().contains("disabled = true"));
    let Answer::Exported { text } = case.ask(&Request::UserExport { name: Some("anna".to_owned()) }) else {
        panic!("it is there")
    };
    assert!(
        text.starts_with("[[user]]\nname = \"anna\"\n") && text.contains("services = [\"web\"]"),
        "{text}"
    );
    let remove = Request::UserRemove { name: "anna".to_owned() };
    assert!(matches!(case.ask(&remove), Answer::Reloaded { .. }));
    assert_eq!((case.names(), case.written().contains("anna")), (vec!["carl".to_owned()], false));
    assert!(case.refused(&remove).contains("no user is named"));
}

#[test]
fn what_is_wrong_changes_nothing() {
    let case = Case::new();
    let service = NewUser { services: vec!["dns".to_owned()], ..anna() };
    assert!(case.refused(&Request::UserAdd(service)).contains("no [[service]] is named \"dns\""));
    let password = NewUser { password_key: Some("hunter2".to_owned()), ..anna() };
    assert!(case.refused(&Request::UserAdd(password)).contains("22 characters"));
    let carl = NewUser { name: "carl".to_owned(), ..anna() };
    assert!(case.refused(&Request::UserAdd(carl)).contains("stands in the configuration"));
    assert!(
        case.refused(&Request::UserRemove { name: "carl".to_owned() })
            .contains("stands in the configuration")
    );
    let nobody = PeerChange { name: "ben".to_owned(), ..PeerChange::default() };
    assert!(case.refused(&Request::UserSet(nobody)).contains("has no user \"ben\""));
    assert!(matches!(case.ask(&Request::UserAdd(anna())), Answer::Reloaded { .. }));
    assert!(case.refused(&Request::UserAdd(anna())).contains("has a user \"anna\" already"));
    assert_eq!(case.names(), ["carl", "anna"]);
}

//! `reload`: what is asked, what is answered, and that what comes after it goes by the new configuration.

use std::sync::{Mutex, PoisonError};

use config::{
    LoadError,
    reload::{Effect, Kind, plan},
};
use serde_json::{Value, json};

use super::*;
use config::state::NewPeer;

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

/// A daemon without workers, whose file is a text.
struct Reloading {
    folder: tempfile::TempDir,
    config: Mutex<Arc<Config>>,
    file: Mutex<String>,
    /// What is refused before the file is looked at.
    broken: bool,
    captures: Captures,
    changing: Mutex<()>,
}

impl Reloading {
    fn new(file: &str, broken: bool) -> Arc<Self> {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::parse(file, folder.path()).unwrap();
        let captures = tests::no_captures(&config);
        let (config, file) = (Mutex::new(Arc::new(config)), Mutex::new(file.to_owned()));
        Arc::new(Self { folder, config, file, broken, captures, changing: Mutex::default() })
    }

    fn write(&self, file: &str) {
        *self.file.lock().unwrap_or_else(PoisonError::into_inner) = file.to_owned();
    }
}

impl Peers for Reloading {
    /// Those of the configuration were all shut out.
    fn list(&self) -> Vec<Listed> {
        Vec::new()
    }

    fn add(&self, _: config::Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn remove(&self, _: &str) -> Result<(), Refused> {
        Ok(())
    }

    fn change(&self, _: config::Peer, _: bool) -> Result<Vec<Change>, Refused> {
        Ok(Vec::new())
    }

    fn set_quota_used(&self, _: &Arc<str>, _: &Quota, _: u64) -> Result<(), Refused> {
        Err("nothing is kept here".into())
    }

    fn change_users(&self, _: Vec<config::User>, _: bool) -> Result<Vec<Change>, Refused> {
        Ok(Vec::new())
    }

    fn keep_out(&self, _: &config::Peer) {}

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn drain(&self, _: Duration) -> Result<(), Refused> {
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

    fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn reload(&self, dry_run: bool) -> Result<Reloaded, Refused> {
        if self.broken {
            return Err(ReloadError::NoFile.into());
        }
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = Config::parse(&file, self.folder.path());
        let fresh = fresh.map_err(|problems| ReloadError::from(LoadError::from(problems)))?;
        let plan = plan(&self.config(), fresh);
        if let Some(config) = plan.config.filter(|_| !dry_run) {
            *self.config.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
        }
        Ok(Reloaded { changes: plan.changes, notes: vec!["a note".to_owned()] })
    }
}

fn handler(daemon: &Arc<Reloading>) -> RequestHandler {
    RequestHandler::new(PublicKey([9; 32]), "1.2.3", Arc::<Reloading>::clone(daemon))
}

fn file(more: &str) -> String {
    format!(
        "identity = {{ key_file = \"id.key\", state_dir = \"state\" }}\ntransport.listen = [\"127.0.0.1:4433\"]\n{more}"
    )
}

fn ask(handler: &RequestHandler, request: &str) -> Value {
    serde_json::from_str(&handler.answer(request.as_bytes()).to_line("1.2.3")).unwrap()
}

const RELOAD: &str = "{\"version\":1,\"request\":\"reload\"}";
const DRY_RUN: &str = "{\"version\":1,\"request\":\"reload\",\"dry_run\":true}";

#[test]
fn the_difference_is_answered_and_a_dry_run_leaves_everything_as_it_is() {
    let daemon = Reloading::new(&file("[[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n"), false);
    let handler = handler(&daemon);
    daemon.write(&file(
        "transport.workers = 2\nlimits.flows = 2\n[[service]]\nname = \"ntp\"\nupstream = \"127.0.0.1:123\"\n",
    ));
    let expected = json!({
        "version": 1,
        "answer": "reloaded",
        "changes": [
            { "what": "transport.workers", "kind": "changed", "from": "0", "to": "2", "effect": "restart" },
            { "what": "service \"dns\"", "kind": "removed", "from": "127.0.0.1:53", "effect": "now" },
            { "what": "service \"ntp\"", "kind": "added", "to": "127.0.0.1:123", "effect": "now" },
            { "what": "limits.flows", "kind": "changed", "from": "50000", "to": "2", "effect": "now" },
        ],
        "notes": ["a note"],
        "program": "1.2.3",
    });
    assert_eq!(ask(&handler, DRY_RUN), expected);
    assert_eq!(daemon.config().limits.flows, 50_000);
    assert_eq!(ask(&handler, RELOAD), expected);
    assert_eq!((daemon.config().limits.flows, daemon.config().transport.workers), (2, 0));
    let again = ask(&handler, RELOAD);
    assert_eq!(again["changes"], json!([expected["changes"][0]]));

    let answer = Answer::from_line(expected.to_string().as_bytes()).unwrap();
    assert_eq!(Answer::from_line(answer.to_line("1.2.3").as_bytes()), Some(answer));
    let change =
        Change { what: "a".to_owned(), kind: Kind::Added("b".to_owned()), effect: Effect::NextConnection };
    assert_eq!(ShownChange::from(&change).effect, "next-connection");
}

#[test]
fn a_wrong_file_is_told_from_what_could_not_be_done() {
    let daemon = Reloading::new(&file(""), false);
    daemon.write(&file("limits.flows = 0\nlimits.peers = \"x\"\n"));
    let answer = ask(&handler(&daemon), RELOAD);
    assert_eq!((&answer["answer"], &answer["bad_input"]), (&json!("refused"), &json!(true)));
    let lines: Vec<&str> = answer["error"].as_str().unwrap().lines().collect();
    assert!(lines.len() == 2 && lines[0].starts_with("line 3: limits.flows: "), "{lines:?}");
    assert!(lines.iter().all(|line| line.contains("(remedy: ")), "{lines:?}");

    let answer = ask(&handler(&Reloading::new(&file(""), true)), RELOAD);
    assert_eq!((&answer["answer"], &answer["bad_input"]), (&json!("refused"), &json!(false)));
}

/// As long as the file names it, it would come back beside the added one.
#[test]
fn a_peer_whose_table_was_taken_out_can_be_added_after_the_reload() {
    let daemon =
        Reloading::new(&file(&format!("[[peer]]\nname = \"exit\"\npublic_key = \"{KEY}\"\n")), false);
    let handler = handler(&daemon);
    let add = NewPeer { name: "exit".to_owned(), public_key: KEY.to_owned(), ..NewPeer::default() };
    let add = || handler.answer(Request::PeerAdd(add.clone()).to_line().as_bytes());
    let Answer::Refused { bad_input: true, error } = add() else { panic!("it was added") };
    assert!(error.contains("take its [[peer]] out of the configuration, reload"), "{error}");
    daemon.write(&file(""));
    let Answer::Refused { .. } = add() else { panic!("it was added before the reload") };
    ask(&handler, RELOAD);
    assert_eq!(add(), Answer::Done { note: None });
    assert!(daemon.folder.path().join("state/peers.toml").exists());
}

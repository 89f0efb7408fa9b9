use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use base::{
    clock::{Clock, ManualClock},
    ids::PeerId,
};
use config::state::NewPeer;
use engine::{capture::Subject, hub::Hub, registry::PeerRegistry, status::ForwardId};
use serde_json::Value;
use tempfile::TempDir;

use super::*;
use crate::{
    control_socket::{
        client::{AskError, Programs},
        protocol::{MAX_REQUEST_BYTES, RequestError},
    },
    qlog::Order,
};

#[path = "listener_tests.rs"]
mod listener;
#[path = "peer_changes_tests.rs"]
mod peer_changes;

/// What this command calls itself.
const OURS: &str = "1.3.0 (ours)";

fn ask(path: &Path, request: &Request) -> Result<Answer, AskError> {
    client::ask(path, request, OURS)
}

const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";
const KEY_2: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE";

/// A stand-in for the agent, whose peers nobody connects.
struct Fake {
    config: Arc<Config>,
    peers: Mutex<Vec<config::Peer>>,
    refuses: bool,
    captures: Captures,
    changing: Mutex<()>,
}

impl Peers for Fake {
    fn list(&self) -> Vec<Listed> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let listed = |peer: &config::Peer| {
            let origin = if peer.name.starts_with("open-") { PeerOrigin::Open } else { peer.origin.into() };
            Listed { id: PeerId(0), peer: Arc::new(peer.clone()), origin }
        };
        peers.iter().map(listed).collect()
    }

    fn add(&self, peer: config::Peer) -> Result<(), Refused> {
        if self.refuses {
            return Err("there is no room".into());
        }
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).push(peer);
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), Refused> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).retain(|peer| *peer.name != *name);
        Ok(())
    }

    fn change(&self, peer: config::Peer, dry_run: bool) -> Result<Vec<Change>, Refused> {
        if self.refuses {
            return Err("there is no room".into());
        }
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let old = peers.iter_mut().find(|old| old.name == peer.name).ok_or("nobody has that name")?;
        let changes = config::reload::plan_peer(&self.config, old, peer.clone()).changes;
        if !dry_run {
            *old = peer;
        }
        Ok(changes)
    }

    fn set_quota_used(&self, _: &Arc<str>, _: &Quota, _: u64) -> Result<(), Refused> {
        Err("nothing is kept here".into())
    }

    fn change_users(&self, users: Vec<config::User>, _: bool) -> Result<Vec<Change>, Refused> {
        if self.refuses {
            return Err("there is no room".into());
        }
        Ok(config::reload::plan_users(&self.config, users).changes)
    }

    fn keep_out(&self, _: &config::Peer) {}

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config)
    }

    fn reload(&self, dry_run: bool) -> Result<Reloaded, Refused> {
        let notes = if dry_run { vec!["a dry run".to_owned()] } else { Vec::new() };
        if self.refuses {
            Err("there is no file".into())
        } else {
            Ok(Reloaded { notes, ..Reloaded::default() })
        }
    }

    fn drain(&self, _: Duration) -> Result<(), Refused> {
        Ok(())
    }

    /// There is one forward.
    fn end_forward(&self, id: ForwardId) -> Result<bool, Refused> {
        if self.refuses { Err("a worker did not answer".into()) } else { Ok(id.to_string() == "5f3a9c-17") }
    }

    fn captures(&self) -> &Captures {
        &self.captures
    }

    fn status(&self, _: &Scope) -> Status {
        Status { software: "1.2.3".to_owned(), workers: 2, ..Status::default() }
    }
}

/// Captures of an agent that has one worker, which does nothing.
pub(super) fn no_captures(config: &Config) -> Captures {
    let clock = ManualClock::default();
    let hub = Hub::new(1, config.peers.len(), clock.now());
    Captures::new(PeerRegistry::new(config, PublicKey([9; 32])), hub, Arc::new(clock))
}

/// A handler over fake peers, with its state in a folder.
struct Case {
    folder: TempDir,
    peers: Arc<Fake>,
}

impl Case {
    fn new(refuses: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "identity = {{ key_file = \"id.key\", state_dir = \"state\" }}\ntransport.listen = [\"127.0.0.1:4433\"]\n\
             tun.address = [\"10.9.0.1/24\"]\n\
             [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
             [[peer]]\nname = \"exit\"\npublic_key = \"{KEY}\"\nallowed_ips = [\"10.9.0.7\"]\n\
             [[udp]]\nlisten = \"127.0.0.1:5300\"\npeer = \"exit\"\nservice = \"x\"\n"
        );
        let config = Arc::new(Config::parse(&text, folder.path()).unwrap());
        let peers = Mutex::new(config.peers.clone());
        let captures = no_captures(&config);
        Self {
            folder,
            peers: Arc::new(Fake { config, peers, refuses, captures, changing: Mutex::default() }),
        }
    }

    fn set_config(&mut self, config: Config) {
        let peers =
            Mutex::new(self.peers.list().iter().map(|listed| config::Peer::clone(&listed.peer)).collect());
        let captures = no_captures(&config);
        self.peers = Arc::new(Fake {
            config: Arc::new(config),
            peers,
            refuses: self.peers.refuses,
            captures,
            changing: Mutex::default(),
        });
    }

    fn handler(&self) -> RequestHandler {
        let peers: Arc<dyn Peers> = Arc::<Fake>::clone(&self.peers);
        RequestHandler::new(PublicKey([9; 32]), "1.2.3", peers)
    }

    fn state(&self) -> String {
        state::read(&self.folder.path().join("state/peers.toml")).unwrap().unwrap_or_default()
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("control")
    }
}

/// The answer to a peer without an inner address.
fn idle() -> Answer {
    let note = "no IP packet passes to it or from it: it has no inner address (remedy: culvert peer set NAME --allowed-ip PREFIX)";
    Answer::Done { note: Some(note.to_owned()) }
}

fn add(name: &str, key: &str) -> Request {
    Request::PeerAdd(NewPeer { name: name.to_owned(), public_key: key.to_owned(), ..NewPeer::default() })
}

fn remove(name: &str) -> Request {
    Request::PeerRemove { name: name.to_owned() }
}

#[track_caller]
fn refusal(answer: &Answer) -> (bool, &str) {
    let Answer::Refused { bad_input, error } = answer else { panic!("{answer:?}") };
    (*bad_input, error)
}

#[test]
fn a_peer_is_added_listed_and_removed() {
    let case = Case::new(false);
    let handler = case.handler();
    let ask = |request: &Request| handler.answer(request.to_line().as_bytes());
    let new = NewPeer {
        endpoints: vec!["b.example:1".to_owned()],
        lanes: Some(2),
        services: vec!["dns".to_owned()],
        allowed_ips: vec!["10.9.0.2".to_owned(), "fd09::/64".to_owned()],
        name: "b".to_owned(),
        public_key: KEY_2.to_owned(),
        ..NewPeer::default()
    };
    assert_eq!(ask(&Request::PeerAdd(new)), Answer::Done { note: None });
    assert!(case.state().contains(KEY_2), "{}", case.state());
    let Answer::Peers { peers } = ask(&Request::PeerList {}) else { panic!("no list") };
    let listed = ListedPeer {
        name: "b".to_owned(),
        origin: "state".to_owned(),
        public_keys: vec![KEY_2.to_owned()],
        endpoints: vec!["b.example:1".to_owned()],
        lanes: 2,
        services: vec!["dns".to_owned()],
        allowed_ips: vec!["10.9.0.2/32".to_owned(), "fd09::/64".to_owned()],
    };
    assert_eq!((peers[0].origin.as_str(), &peers[1..]), ("config", &[listed][..]));

    let twice = ask(&add("b", KEY_2));
    let (bad_input, error) = refusal(&twice);
    assert!(
        bad_input && error.contains("name: \"b\" is taken") && error.contains("is the same key"),
        "{error}"
    );
    assert_eq!(ask(&remove("b")), Answer::Done { note: None });
    assert!(!case.state().contains(KEY_2));
    assert_eq!(case.peers.list().len(), 1);
    let gone = ask(&remove("b"));
    assert_eq!(refusal(&gone), (true, "no peer is named \"b\" (remedy: see culvert peer list)"));
}

#[test]
fn a_peer_of_the_configuration_is_shut_out_until_the_next_start_and_cannot_be_added_beside_it() {
    let case = Case::new(false);
    let handler = case.handler();
    let Answer::Done { note: Some(note) } = handler.answer(remove("exit").to_line().as_bytes()) else {
        panic!("it was refused")
    };
    assert!(note.contains("remove its [[peer]] there too"), "{note}");
    assert_eq!((case.peers.list().len(), case.state().as_str()), (0, ""));
    let again = handler.answer(add("exit", KEY_2).to_line().as_bytes());
    assert!(refusal(&again).1.contains("(remedy: restart the daemon, which lets it in again"), "{again:?}");
    let renamed = handler.answer(add("other", KEY).to_line().as_bytes());
    assert!(refusal(&renamed).1.starts_with("\"exit\" is a peer of the configuration that was removed"));
}

#[test]
fn prefixes_of_other_peers_and_prefixes_without_a_tunnel_are_refused() {
    let mut case = Case::new(false);
    let routed = |case: &Case, name: &str, prefix: &str| {
        let allowed_ips = vec![prefix.to_owned()];
        let (name, public_key) = (name.to_owned(), KEY_2.to_owned());
        let new = NewPeer { name, public_key, allowed_ips, ..NewPeer::default() };
        case.handler().answer(Request::PeerAdd(new).to_line().as_bytes())
    };
    let exit = "allowed_ips[0]: 10.9.0.7/32 belongs to \"exit\" of the configuration already";
    let answer = routed(&case, "b", "10.9.0.7");
    assert!(refusal(&answer).0 && refusal(&answer).1.starts_with(exit), "{answer:?}");
    // The next start would find both.
    let removed = case.handler().answer(remove("exit").to_line().as_bytes());
    assert!(matches!(removed, Answer::Done { .. }), "{removed:?}");
    let answer = routed(&case, "b", "10.9.0.7");
    assert!(refusal(&answer).1.starts_with(exit), "{answer:?}");
    assert_eq!(case.state(), "");

    let mut config = Config::clone(&case.peers.config);
    config.tun = None;
    config.peers[0].allowed_ips.clear();
    case.set_config(config);
    let answer = routed(&case, "b", "10.9.0.2");
    let words =
        "allowed_ips: there is no [tun]: no IP packets are carried (remedy: add [tun] with an address";
    assert!(refusal(&answer).0 && refusal(&answer).1.starts_with(words), "{answer:?}");
}

#[test]
fn in_open_mode_a_removed_peer_may_come_again_and_guests_can_be_removed() {
    let mut case = Case::new(false);
    let mut config = Config::clone(&case.peers.config);
    config.access.mode = AccessMode::Open;
    case.set_config(config);
    let handler = case.handler();
    let ask = |request: &Request| handler.answer(request.to_line().as_bytes());
    let guest = config::Peer {
        name: "open-AQEBAQEB".into(),
        public_keys: vec![KEY_2.parse().unwrap()],
        ..case.peers.config.peers[0].clone()
    };
    case.peers.peers.lock().unwrap().push(guest);
    let Answer::Peers { peers } = ask(&Request::PeerList {}) else { panic!("no list") };
    let origins: Vec<_> = peers.iter().map(|peer| peer.origin.as_str()).collect();
    assert_eq!(origins, ["config", "open"]);
    let note_of = |name: &str| {
        let answer = ask(&remove(name));
        let Answer::Done { note: Some(note) } = answer else { panic!("{answer:?}") };
        note
    };
    // It makes way for a peer with its key.
    assert_eq!(ask(&add("b", KEY_2)), idle());
    assert_eq!(note_of("b"), AS_GUEST);
    assert_eq!(note_of("open-AQEBAQEB"), AS_GUEST);
    let both = note_of("exit");
    assert!(both.contains("until the next start") && both.ends_with(AS_GUEST), "{both}");
    assert!(case.peers.list().is_empty());
}

#[test]
fn the_ports_of_a_peer_that_comes_back_open_with_a_reload() {
    let mut case = Case::new(false);
    let mut config = Config::clone(&case.peers.config);
    config.closed = vec!["b".to_owned()];
    case.set_config(config);
    let Answer::Done { note: Some(note) } = case.handler().answer(add("b", KEY_2).to_line().as_bytes())
    else {
        panic!("it was refused")
    };
    assert!(note.ends_with("open with culvert reload"), "{note}");
}

#[test]
fn a_name_that_a_forward_needs_is_kept_as_removed() {
    let mut case = Case::new(false);
    let mut config = Config::clone(&case.peers.config);
    config.peers[0].origin = config::PeerOrigin::State;
    case.set_config(config);
    *case.peers.peers.lock().unwrap() = case.peers.config.peers.clone();
    fs::create_dir(case.folder.path().join("state")).unwrap();
    let text = format!("[[peer]]\nname = \"exit\"\npublic_key = \"{KEY}\"\n");
    fs::write(case.folder.path().join("state/peers.toml"), text).unwrap();
    let Answer::Done { note: Some(note) } = case.handler().answer(remove("exit").to_line().as_bytes()) else {
        panic!("it was refused")
    };
    assert!(note.contains("still names \"exit\""), "{note}");
    assert!(case.state().contains("removed = [\"exit\"]") && !case.state().contains(KEY), "{}", case.state());
}

#[test]
fn a_refusal_leaves_no_trace() {
    let case = Case::new(true);
    let answer = case.handler().answer(add("b", KEY_2).to_line().as_bytes());
    assert_eq!(refusal(&answer), (false, "there is no room"));
    assert_eq!(case.state(), "");
}

#[test]
fn a_peer_is_shut_out_also_if_that_cannot_be_written() {
    let case = Case::new(false);
    let handler = case.handler();
    let ask = |request: &Request| handler.answer(request.to_line().as_bytes());
    assert_eq!(ask(&add("b", KEY_2)), idle());
    // Not writable, for root neither: a folder is in the way.
    fs::create_dir(case.folder.path().join("state/peers.toml.new")).unwrap();
    let answer = ask(&remove("b"));
    let (bad_input, error) = refusal(&answer);
    assert!(!bad_input && error.starts_with("the peer is shut out, but still in the state file"), "{error}");
    assert_eq!(case.peers.list().len(), 1);
    let unkept = add("c", "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0");
    let answer = ask(&unkept);
    assert!(refusal(&answer).1.starts_with("the peer is let in, but not kept"), "{answer:?}");
}

#[test]
fn what_is_no_request_is_refused() {
    let handler = Case::new(false).handler();
    for line in [
        "",
        "x",
        "[]",
        "{}",
        "{\"version\":2,\"request\":\"status\"}",
        "{\"version\":1,\"request\":\"stop\"}",
        "{\"version\":1,\"request\":\"status\",\"now\":true}",
        "{\"version\":1,\"request\":\"peer-add\",\"name\":\"b\"}",
        "{\"version\":1,\"request\":\"peer-add\",\"name\":\"b\",\"public_key\":\"x\",\"service\":[]}",
        "{\"version\":1,\"request\":\"peer-remove\",\"name\":7}",
    ] {
        let answer = handler.answer(line.as_bytes());
        let (bad_input, error) = refusal(&answer);
        assert!(bad_input && error.starts_with("not a request"), "{line}: {error}");
    }
    let old = Request::from_line(b"{\"version\":0,\"request\":\"status\"}").unwrap_err();
    assert!(matches!(old, RequestError::Version), "{old}");
}

#[test]
fn a_request_that_the_daemon_does_not_know_names_the_programs_of_both_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let refused = |program: &str| {
        let answer = format!(
            "{{\"answer\":\"refused\",\"bad_input\":true,\"error\":\"not a request: unknown variant `drain`\",{program}\"version\":1}}\n"
        );
        std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            let answer = ask(&path, &Request::Drain { within_seconds: 1 }).unwrap();
            server.join().unwrap();
            refusal(&answer).1.to_owned()
        })
    };
    for (program, theirs) in [
        ("", "the daemon is an older one, which does not say its version"),
        ("\"program\":\"1.2.0 (theirs)\",", "the daemon is culvert 1.2.0 (theirs)"),
    ] {
        let error = refused(program);
        assert!(error.contains(&format!("this command is culvert {OURS}, {theirs} (remedy: ")), "{error}");
        assert!(error.contains("unknown variant `drain`"), "{error}");
    }
}

/// The command and the daemon may be of two versions, as between an update and the restart.
#[test]
fn requests_have_the_same_words_in_every_version() {
    let peer = NewPeer {
        name: "b".to_owned(),
        public_key: "x".to_owned(),
        endpoints: vec!["b.example:1".to_owned()],
        lanes: Some(3),
        services: vec!["dns".to_owned()],
        allowed_ips: vec!["10.9.0.2/32".to_owned()],
        ..NewPeer::default()
    };
    let qlog = |subject, reconnect| {
        Request::QlogStart(Order { peer: "b".to_owned(), subject, seconds: 9, reconnect })
    };
    for (request, members) in [
        (Request::PeerList {}, r#""request": "peer-list""#),
        (
            Request::PeerAdd(peer),
            r#""request": "peer-add", "name": "b", "public_key": "x", "endpoints": ["b.example:1"],
               "lanes": 3, "services": ["dns"], "allowed_ips": ["10.9.0.2/32"]"#,
        ),
        (remove("b"), r#""request": "peer-remove", "name": "b""#),
        (Request::Reload { dry_run: true }, r#""request": "reload", "dry_run": true"#),
        (Request::Reload { dry_run: false }, r#""request": "reload""#),
        (
            Request::Status(Scope { peer: Some("b".to_owned()), lane: Some(1), ..Scope::default() }),
            r#""request": "status", "peer": "b", "lane": 1"#,
        ),
        (
            Request::Status(Scope { peer: Some("b".to_owned()), all_forwards: true, ..Scope::default() }),
            r#""request": "status", "peer": "b", "all_forwards": true"#,
        ),
        (
            Request::ForwardEnd { id: "5f3a9c-17".to_owned() },
            r#""request": "forward-end", "id": "5f3a9c-17""#,
        ),
        (qlog(Subject::Lane(1), false), r#""request": "qlog-start", "peer": "b", "lane": 1, "seconds": 9"#),
        (
            qlog(Subject::Control, true),
            r#""request": "qlog-start", "peer": "b", "seconds": 9, "reconnect": true"#,
        ),
        (Request::QlogTake { id: 7 }, r#""request": "qlog-take", "id": 7"#),
        (Request::QlogStop { id: 7 }, r#""request": "qlog-stop", "id": 7"#),
    ] {
        let line = format!("{{\"version\": 1, {members}}}");
        let [written, expected]: [Value; 2] =
            [&request.to_line(), &line].map(|line| serde_json::from_str(line).unwrap());
        assert_eq!(written, expected);
        assert_eq!(Request::from_line(line.as_bytes()).unwrap(), request);
    }
}

#[test]
fn a_forward_is_ended_by_its_id_and_an_id_that_names_none_is_an_error_with_a_remedy() {
    let case = Case::new(false);
    let end =
        |id: &str| case.handler().answer(Request::ForwardEnd { id: id.to_owned() }.to_line().as_bytes());
    assert_eq!(end("5f3a9c-17"), Answer::Done { note: None });
    for (id, what) in [("5f3a9c-18", "no TCP forward has the ID 5f3a9c-18"), ("17", "\"17\" is not the ID")] {
        let Answer::Refused { bad_input: true, error } = end(id) else { panic!("{id}") };
        assert!(error.contains(what) && error.contains("(remedy: "), "{error}");
    }
    let mute = Case::new(true);
    let answer =
        mute.handler().answer(Request::ForwardEnd { id: "5f3a9c-17".to_owned() }.to_line().as_bytes());
    assert!(matches!(answer, Answer::Refused { bad_input: false, .. }), "{answer:?}");
}

#[test]
fn messages_are_lines_that_carry_the_version() {
    assert_eq!(Request::Status(Scope::default()).to_line(), "{\"request\":\"status\",\"version\":1}\n");
    // A daemon that knows no tunnel would refuse the member.
    assert!(!add("a", KEY).to_line().contains("allowed_ips"));
    let listed = b"{\"answer\":\"peers\",\"version\":1,\"peers\":[{\"name\":\"a\",\"origin\":\"state\",\"public_keys\":[],\
                   \"endpoints\":[],\"lanes\":0,\"services\":[]}]}";
    let Some(Answer::Peers { peers }) = Answer::from_line(listed) else { panic!("an older daemon's list") };
    assert_eq!(peers[0].allowed_ips, Vec::<String>::new());
    let reload = |dry_run| Request::Reload { dry_run };
    for request in [
        Request::Status(Scope::default()),
        Request::PeerList {},
        reload(true),
        reload(false),
        add("a", KEY),
        remove("a"),
    ] {
        assert_eq!(Request::from_line(request.to_line().trim_end().as_bytes()).unwrap(), request);
    }
    let status = Answer::Status { status: Box::default() };
    assert_eq!(Answer::from_line(status.to_line("1.2.3").as_bytes()), Some(status));
    let later = b"{\"answer\":\"done\",\"note\":null,\"version\":1,\"more\":1}";
    assert_eq!(Answer::from_line(later), Some(Answer::Done { note: None }));
    assert_eq!(Answer::from_line(b"{\"answer\":\"done\",\"note\":null}"), None);
}

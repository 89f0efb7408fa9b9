//! `culvert peer` and `culvert status`, with a running daemon and without one.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::mpsc,
    thread,
};

use culvert_tests::{
    agent::{Agent, SHUTDOWN_LIMIT, binary, culvert, keygen},
    needs::{self, Need},
    place::Place,
    ports,
    process::{run, text},
};
use serde_json::Value;
use tempfile::TempDir;

/// A folder with a configuration that listens and has no peers; its state and its socket are in the folder.
struct Site {
    folder: TempDir,
    file: PathBuf,
}

impl Site {
    fn new(more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        keygen(&folder.path().join("identity.key"));
        let config = format!(
            "identity = {{ key_file = \"identity.key\", state_dir = \"state\" }}\ncontrol.socket = \"control\"\n\
             transport.listen = [\"127.0.0.1:{}\"]\n\
             [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n{more}",
            ports::free()
        );
        let file = folder.path().join("culvert.toml");
        fs::write(&file, config).unwrap();
        Self { folder, file }
    }

    fn culvert(&self, args: &[&str]) -> Output {
        culvert(&[args, &["--config", self.file.to_str().unwrap()]].concat())
    }

    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> String {
        succeeded(&self.culvert(args))
    }

    /// It fails with `code`, and a line says all of `words`.
    #[track_caller]
    fn fails(&self, args: &[&str], code: i32, words: &[&str]) {
        failed(&self.culvert(args), code, words);
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state/peers.toml")
    }

    /// A key that belongs to somebody.
    fn key(&self, name: &str) -> String {
        keygen(&self.folder.path().join(name))
    }
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn failed(output: &Output, code: i32, words: &[&str]) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert!(stderr.lines().any(|line| words.iter().all(|word| line.contains(word))), "{words:?}: {stderr}");
}

fn names(list: &str) -> Vec<String> {
    let list: Value = serde_json::from_str(list).unwrap();
    assert_eq!(list["version"], 1);
    list["peers"].as_array().unwrap().iter().map(|peer| peer["name"].as_str().unwrap().to_owned()).collect()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn without_a_daemon_the_state_file_is_changed() {
    let site = Site::new("");
    let note = site.succeeds(&["check"]);
    assert!(note.contains("0 peers") && note.contains("note: there is no peer"), "{note}");
    let (a, b) = (site.key("a"), site.key("b"));
    let link = format!("culvert://b.example:4433/{b}");
    let said = site.succeeds(&["peer", "add", "a", &a, "--service", "dns"]);
    assert!(
        said.starts_with(
            "added a: in the state file, effective when the daemon starts (no daemon answers at "
        ),
        "{said}"
    );
    site.succeeds(&["peer", "add", "b", &link, "--endpoint", "[2001:db8::1]:1", "--lanes", "3"]);
    assert_eq!((mode(&site.state()), mode(site.state().parent().unwrap())), (0o600, 0o700));
    let list = site.succeeds(&["peer", "list"]);
    assert!(
        list.lines().any(|line| line.contains(&b) && line.contains("b.example:4433,[2001:db8::1]:1")),
        "{list}"
    );
    let list: Value = serde_json::from_str(&site.succeeds(&["peer", "list", "--json"])).unwrap();
    assert_eq!((&list["running"], &list["peers"][0]["services"][0]), (&false.into(), &"dns".into()));
    assert_eq!((&list["peers"][1]["lanes"], &list["peers"][1]["origin"]), (&3.into(), &"state".into()));
    let valid = site.succeeds(&["check"]);
    assert!(valid.contains("2 peers") && !valid.contains("note"), "{valid}");
    let c = site.key("c");
    site.fails(
        &["peer", "add", "c", &c, "--allowed-ip", "10.9.0.2"],
        2,
        &["allowed_ips: ", "remedy: add [tun]"],
    );

    site.succeeds(&["peer", "remove", "a"]);
    assert_eq!(names(&site.succeeds(&["peer", "list", "--json"])), ["b"]);
    site.fails(&["peer", "remove", "a"], 2, &["no peer of the state file is named \"a\"", "remedy: "]);
    site.fails(&["status"], 1, &["no daemon answers at", "remedy: "]);
}

#[test]
fn whether_a_daemon_runs_is_not_guessed() {
    let site = Site::new("");
    let key = site.key("a");
    site.succeeds(&["peer", "add", "a", &key]);
    // An agent that listens holds its state folder.
    let folder = fs::File::open(site.state().parent().unwrap()).unwrap();
    folder.lock().unwrap();
    site.fails(
        &["peer", "remove", "a"],
        1,
        &["and yet one runs", "until it is reloaded or restarted", "remedy: "],
    );
    assert_eq!(names(&site.succeeds(&["peer", "list", "--json"])), [""; 0], "the state file is changed");
    let output = site.culvert(&["peer", "add", "a", &key]);
    succeeded(&output);
    assert!(text(&output.stderr).contains("and yet one runs"), "{}", text(&output.stderr));
    drop(folder);

    // Nothing says whether one runs that demands no knock.
    let off = fs::read_to_string(&site.file).unwrap() + "[access]\nknock = \"off\"\n";
    fs::write(&site.file, off).unwrap();
    site.fails(
        &["peer", "remove", "a"],
        1,
        &["if one runs, it keeps its peers until it is reloaded or restarted"],
    );
    site.succeeds(&["peer", "add", "a", &key]);
    site.succeeds(&["peer", "remove", "a", "--offline"]);
}

#[test]
fn without_a_state_folder_nothing_is_added() {
    let site = Site::new("");
    let nowhere =
        fs::read_to_string(&site.file).unwrap().replace("state_dir = \"state\"", "state_dir = \"\"");
    fs::write(&site.file, nowhere).unwrap();
    site.fails(&["peer", "add", "a", &site.key("a")], 1, &["identity.state_dir is empty (remedy: set it)"]);
}

#[test]
fn what_is_wrong_with_a_link_or_a_key_is_named() {
    let site = Site::new("");
    let key = site.key("a");
    let own = text(&culvert(&["pubkey", site.folder.path().join("identity.key").to_str().unwrap()]).stdout);
    let add = |link: &str| site.culvert(&["peer", "add", "a", link]);
    failed(&add(&key[1..]), 2, &["a public key has 43 characters, this has 42", "remedy: "]);
    failed(&add(&format!("{}/", &key[1..])), 2, &["character 43 is '/'"]);
    failed(&add(&format!("https://a.example:1/{key}")), 2, &["the scheme", "remedy: "]);
    failed(&add(&format!("culvert://a.example/{key}")), 2, &["the address: the port is missing"]);
    failed(&add("culvert://a.example:1"), 2, &["the public key is missing"]);
    failed(&add("culvert://a.example:1/x"), 2, &["the public key: a public key has 43 characters"]);
    failed(&add(own.trim()), 2, &["public_key: is our own public key", "remedy: "]);
    site.fails(&["peer", "add", "a b", &key], 2, &["name: \"a b\" is not a name"]);
    site.fails(
        &["peer", "add", "a", &key, "--service", "web"],
        2,
        &["services[0]: no [[service]]", "use dns"],
    );
    site.fails(&["peer", "add", "a", &key, "--lanes", "65"], 2, &["lanes: 65 is out of range"]);
    site.fails(&["peer", "add", "a", &key, "--endpoint", "b"], 2, &["endpoints[0]: the port is missing"]);
    assert!(!site.state().exists());
}

#[test]
fn a_broken_state_file_is_named_with_its_line() {
    let site = Site::new("");
    let key = site.key("a");
    site.succeeds(&["peer", "add", "a", &key]);
    let broken = fs::read_to_string(site.state()).unwrap() + "flow_quota = 7\n";
    fs::write(site.state(), &broken).unwrap();
    let place = format!("peers.toml:{}: peer \"a\".flow_quota", broken.lines().count());
    for command in [&["check"][..], &["run"], &["peer", "list"], &["peer", "add", "b", &key]] {
        site.fails(command, 2, &[&place, "remedy: "]);
    }
    fs::write(site.state(), "[[peer]\n").unwrap();
    site.fails(&["peer", "remove", "a"], 2, &["peers.toml:1: not TOML"]);
    assert_eq!(fs::read_to_string(site.state()).unwrap(), "[[peer]\n", "it is left for the operator");
}

#[test]
fn peers_of_the_configuration_and_of_forwards_are_treated_with_care() {
    let forward = "[[udp]]\nlisten = \"127.0.0.1:0\"\npeer = \"late\"\nservice = \"x\"\n";
    let site = Site::new(forward);
    site.fails(&["check"], 2, &["udp[0].peer", "no [[peer]] is named \"late\""]);
    let (late, fixed) = (site.key("late"), site.key("fixed"));
    site.succeeds(&["peer", "add", "late", &late]);
    site.succeeds(&["check"]);
    let output = site.culvert(&["peer", "remove", "late"]);
    succeeded(&output);
    assert!(text(&output.stderr).contains("still names \"late\""), "{}", text(&output.stderr));
    let note = site.succeeds(&["check"]);
    assert!(note.contains("udp[0].peer: \"late\" was removed") && note.contains("0 UDP forwards"), "{note}");
    site.succeeds(&["peer", "add", "late", &late]);
    assert!(site.succeeds(&["check"]).contains("1 UDP forward"));

    let peer = format!("[[peer]]\nname = \"fixed\"\npublic_key = \"{fixed}\"\n");
    fs::write(&site.file, fs::read_to_string(&site.file).unwrap() + &peer).unwrap();
    site.fails(&["peer", "remove", "fixed"], 2, &["remedy: remove its [[peer]] in"]);
    site.fails(
        &["peer", "add", "fixed", &site.key("other")],
        2,
        &["is taken by a [[peer]] of the configuration"],
    );
    site.fails(
        &["peer", "add", "other", &fixed],
        2,
        &["the same key as the key of \"fixed\" of the configuration"],
    );
    // The same in both files, as an editor can make it.
    let added = format!("[[peer]]\nname = \"late\"\npublic_key = \"{late}\"\n");
    fs::write(site.state(), peer.clone() + &added).unwrap();
    let noted = site.succeeds(&["check"]);
    assert!(
        noted.contains("\"fixed\" is also a [[peer]] of the configuration, and that one counts"),
        "{noted}"
    );
    // The same name with another key, and the same key under another name.
    fs::write(site.state(), peer.replace(&fixed, &site.key("another"))).unwrap();
    site.fails(&["check"], 2, &["peers.toml:2: peer \"fixed\".name", "of the configuration"]);
    fs::write(site.state(), peer.replace("\"fixed\"", "\"renamed\"")).unwrap();
    site.fails(
        &["check"],
        2,
        &["peers.toml:3: peer \"renamed\".public_key", "peer \"fixed\".public_key of the configuration"],
    );
}

#[test]
fn peers_come_and_go_while_the_daemon_runs() {
    if !needs::met("peers at run time", needs::AGENTS) {
        return;
    }
    let (mut exit, mut entry) = (Agent::new("exit", &Place::Host), Agent::new("entry", &Place::Host));
    let quic = ports::free();
    exit.configure(&format!("transport.listen = [\"127.0.0.1:{quic}\"]\n"));
    entry.configure(&format!(
        "[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"127.0.0.1:{quic}\"]\n",
        exit.key()
    ));
    exit.start();
    exit.wait_for_log(&["there is no peer: nobody can connect yet"]);
    entry.start();
    let file = exit.config();
    let ask = |args: &[&str]| culvert(&[args, &["--config", file.to_str().unwrap()]].concat());

    let said = succeeded(&ask(&["peer", "add", "entry", entry.key()]));
    assert_eq!(said.trim(), "added entry: effective now");
    let state = exit.folder().join("state/peers.toml");
    assert!(fs::read_to_string(&state).unwrap().contains(entry.key()));
    let connected = |count| entry.wait_for_count("culvert_peer_connected", &[("peer", "exit")], count);
    connected(1);
    failed(&ask(&["peer", "add", "again", entry.key()]), 2, &["is the same key as the key of \"entry\""]);
    let status: Value = serde_json::from_str(&succeeded(&ask(&["status", "--json"]))).unwrap();
    let peer = &status["status"]["peers"][0];
    assert_eq!(
        (&status["version"], &peer["name"], &peer["origin"]),
        (&1.into(), &"entry".into(), &"state".into())
    );
    assert!(succeeded(&ask(&["status"])).lines().any(|line| line.starts_with("entry ")));

    // What was added is there after a restart; what was removed is not.
    assert_eq!(exit.terminate().code(), Some(0));
    exit.start();
    connected(1);
    succeeded(&ask(&["peer", "remove", "entry"]));
    connected(0);
    assert_eq!(names(&succeeded(&ask(&["peer", "list", "--json"]))), [""; 0]);
    assert!(!fs::read_to_string(&state).unwrap().contains(entry.key()));
}

#[test]
fn the_socket_is_private_and_survives_no_daemon() {
    if !needs::met("the control socket", needs::AGENTS) {
        return;
    }
    let mut agent = Agent::new("agent", &Place::Host);
    agent.configure("transport.listen = [\"127.0.0.1:0\"]\n");
    agent.start();
    let socket = agent.folder().join("control");
    let ask = || culvert(&["status", "--socket", socket.to_str().unwrap()]);
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    assert_eq!(mode(&socket), 0o600);
    succeeded(&ask());

    // A second daemon does not take it, and the first goes on.
    failed(&culvert(&["run", "--config", agent.config().to_str().unwrap()]), 1, &["in use", "remedy: "]);
    let other = Site::new("");
    let text = fs::read_to_string(&other.file).unwrap();
    fs::write(&other.file, text.replace("\"control\"", &format!("{socket:?}"))).unwrap();
    other.fails(&["run"], 1, &["another daemon listens there", "remedy: "]);
    succeeded(&ask());

    // One that was killed leaves its socket, and the next replaces it.
    agent.kill();
    assert!(socket.exists());
    failed(&ask(), 1, &["no daemon answers", "remedy: "]);
    agent.start();
    succeeded(&ask());
    assert_eq!(agent.terminate().code(), Some(0));
    assert!(!socket.exists());
}

#[test]
fn an_explicit_socket_that_cannot_be_made_is_an_error() {
    let site = Site::new("");
    let text = fs::read_to_string(&site.file).unwrap();
    fs::write(&site.file, text.replace("\"control\"", "\"no/such/folder\"")).unwrap();
    site.fails(&["run"], 1, &["cannot make the control socket", "no/such/folder", "remedy: "]);
}

#[test]
fn a_daemon_that_is_killed_while_peers_are_added_leaves_the_file_whole() {
    const PEERS: usize = 40;
    if !needs::met("kill -9", needs::AGENTS) {
        return;
    }
    let mut agent = Agent::new("agent", &Place::Host);
    agent.configure("transport.listen = [\"127.0.0.1:0\"]\n");
    let keys: Vec<String> =
        (0..PEERS).map(|place| keygen(&agent.folder().join(format!("{place}.key")))).collect();
    agent.start();
    let socket = agent.folder().join("control");
    let (told, adding) = mpsc::sync_channel(PEERS);
    let adder = thread::spawn(move || {
        let mut kept = 0;
        for (place, key) in keys.iter().enumerate() {
            let name = format!("peer{place}");
            let output = culvert(&["peer", "add", &name, key, "--socket", socket.to_str().unwrap()]);
            if output.status.code() != Some(0) {
                break;
            }
            kept += 1;
            told.send(()).unwrap();
        }
        kept
    });
    // It is killed while one of the next is being added.
    for _ in 0..5 {
        adding.recv().unwrap();
    }
    agent.kill();
    let kept = adder.join().unwrap();
    let list = culvert(&["peer", "list", "--json", "--config", agent.config().to_str().unwrap()]);
    let listed = names(&succeeded(&list));
    // What was confirmed is there; the one on which it was killed may be.
    assert!((kept..=kept + 1).contains(&listed.len()), "{kept} were confirmed: {listed:?}");
    agent.start();
    assert_eq!(agent.terminate().code(), Some(0));
}

/// Offline, the command itself writes the file; the daemon does it by the same code.
#[test]
fn a_full_disk_keeps_the_peers_that_there_are_and_no_half_file() {
    let needed = [Need::RootFor("a disk of its own is mounted"), Need::Tool("unshare", "util-linux")];
    if !needs::met("full disk", &needed) {
        return;
    }
    let site = Site::new("");
    let key = site.key("a.key");
    let state = site.state();
    let folder = state.parent().unwrap().display();
    fs::create_dir_all(state.parent().unwrap()).unwrap();
    let add = |name: &str| {
        format!("{} peer add --config {} -- {name} {key}", binary().display(), site.file.display())
    };
    let script = format!(
        "mount -t tmpfs -o size=16k none {folder} && {first} >&2 || exit 9
         cat /dev/zero > {folder}/fill 2>/dev/null
         {second} && exit 8
         {culvert} keygen --out {folder}/key && exit 7
         ls {folder}; cat {state}",
        first = add("first"),
        culvert = binary().display(),
        second = add("second").replace(&key, &site.key("b.key")),
        state = state.display(),
    );
    let output = run(Command::new("unshare").args(["--mount", "sh", "-c", &script]), SHUTDOWN_LIMIT);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stdout} {stderr}");
    assert!(stderr.contains("No space left on device") && stderr.contains("remedy: make room"), "{stderr}");
    assert!(stdout.starts_with("fill\npeers.lock\npeers.toml\n"), "{stdout}");
    assert!(stdout.contains("\"first\"") && !stdout.contains("second"), "{stdout}");
}

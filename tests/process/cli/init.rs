//! `culvert init`: what it writes passes `check`, and what it refuses leaves nothing behind.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use culvert_tests::{
    agent::{binary, culvert, keygen},
    needs,
    process::{run, text},
};
use tempfile::TempDir;

/// A folder to write into.
struct Case {
    folder: TempDir,
}

impl Case {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `culvert init` with these options, into the file `name`.
    fn init(&self, name: &str, options: &[&str]) -> Output {
        let file = self.path(name);
        culvert(&[&["init", "--config", file.to_str().unwrap()], options].concat())
    }

    #[track_caller]
    fn done(&self, name: &str, options: &[&str]) -> String {
        let output = self.init(name, options);
        assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// It ends with this code, and tells all of `words`.
    #[track_caller]
    fn refused(&self, name: &str, options: &[&str], code: i32, words: &[&str]) {
        let output = self.init(name, options);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{options:?}: {told}");
        assert!(words.iter().all(|word| told.contains(word)) && told.contains("remedy: "), "{told}");
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

const EXIT: &[&str] =
    &["--role", "exit", "--tun", "--service", "dns=127.0.0.1:53", "--advertise", "gw.example.net:4433"];

/// The first line that begins with these words, after its indentation.
#[track_caller]
fn line<'a>(told: &'a str, begin: &str) -> &'a str {
    let found = told.lines().map(str::trim_start).find(|line| line.starts_with(begin));
    found.unwrap_or_else(|| panic!("no line begins with {begin:?}: {told}"))
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn an_exit_and_its_entry_pass_check() {
    let (exit, entry) = (Case::new(), Case::new());
    let told = exit.done("agent.toml", EXIT);
    let link = line(&told, "culvert://");
    let file = exit.path("agent.toml");
    let linked = culvert(&["link", "--config", file.to_str().unwrap()]);
    assert_eq!(text(&linked.stdout).trim(), link);
    assert_eq!([mode(&file), mode(&exit.path("identity.key"))], [0o640, 0o600]);

    // What the exit told, word for word.
    let words: Vec<&str> = line(&told, "culvert init").split(' ').skip(2).collect();
    let told = entry.done("agent.toml", &words);
    for (case, what) in [(&exit, "1 service, tunnel culvert0"), (&entry, "1 peer, 1 UDP forward")] {
        let checked = culvert(&["check", "--config", case.path("agent.toml").to_str().unwrap()]);
        assert_eq!(checked.status.code(), Some(0), "{}", text(&checked.stderr));
        assert!(text(&checked.stdout).contains(what), "{}", text(&checked.stdout));
    }

    // And what the entry told, at an exit whose daemon does not run yet.
    let mut words: Vec<&str> = line(&told, "culvert peer add").split(' ').skip(1).collect();
    words.extend(["--config", file.to_str().unwrap()]);
    let added = culvert(&words);
    assert!(added.status.success(), "{}", text(&added.stderr));
    let listed = text(&culvert(&["peer", "list", "--config", file.to_str().unwrap()]).stdout);
    let key = text(&culvert(&["pubkey", entry.path("identity.key").to_str().unwrap()]).stdout);
    let row = listed.lines().find(|line| line.contains(key.trim())).unwrap_or_else(|| panic!("{listed}"));
    assert!(row.contains("dns") && row.contains("10.9.0.2/32"), "{row}");
}

#[test]
fn a_configuration_is_never_overwritten_and_a_key_is_kept() {
    let case = Case::new();
    let key = keygen(&case.path("identity.key"));
    let written = fs::read(case.path("identity.key")).unwrap();
    let told = case.done("agent.toml", EXIT);
    assert!(told.contains(&key) && told.starts_with("kept"), "{told}");
    let first = fs::read(case.path("agent.toml")).unwrap();
    case.refused("agent.toml", EXIT, 1, &["agent.toml exists", "never overwritten"]);
    assert_eq!(fs::read(case.path("agent.toml")).unwrap(), first);
    assert_eq!(fs::read(case.path("identity.key")).unwrap(), written);
}

#[test]
fn what_is_refused_leaves_nothing_behind() {
    let case = Case::new();
    let key = keygen(&Case::new().path("identity.key"));
    let link = format!("culvert://exit.example.net:4433/{key}");
    let exit = ["--role", "exit", "--advertise", "a:1"];
    case.refused("agent.toml", &exit, 2, &["--tun", "--service"]);
    case.refused("agent.toml", &["--role", "entry", "--tun"], 2, &["--peer LINK"]);
    case.refused(
        "agent.toml",
        &["--role", "entry", "--tun", "--peer", "culvert://a/b"],
        2,
        &["--peer is no link"],
    );
    let bad = [&exit[..], &["--tun", "10.9.0.0/24"]].concat();
    case.refused("agent.toml", &bad, 2, &["nothing was written", "tun.address[0]", "10.9.0.1/24"]);
    let inside = ["--role", "entry", "--tun", "--peer", &format!("culvert://10.9.0.7:1/{key}")];
    case.refused("agent.toml", &inside, 2, &["10.9.0.7"]);
    case.refused("a/b/agent.toml", &[&exit[..], &["--tun"]].concat(), 1, &["make its folder"]);
    let output = case.init("agent.toml", &["--role", "exit", "--service", "dns"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("dns=127.0.0.1:53"), "{}", text(&output.stderr));
    assert_eq!(case.names(), [""; 0]);

    // A key that is none is told, and stays.
    fs::write(case.path("identity.key"), "none").unwrap();
    fs::set_permissions(case.path("identity.key"), fs::Permissions::from_mode(0o600)).unwrap();
    case.refused("agent.toml", &["--role", "entry", "--tun", "--peer", &link], 1, &["PEM"]);
    assert_eq!(case.names(), ["identity.key"]);
}

#[test]
fn an_entry_does_not_dial_itself() {
    let case = Case::new();
    let key = keygen(&case.path("identity.key"));
    let link = format!("culvert://exit.example.net:4433/{key}");
    case.refused("agent.toml", &["--role", "entry", "--tun", "--peer", &link], 2, &["this host itself"]);
    assert_eq!(case.names(), ["identity.key"]);
}

#[test]
fn a_folder_that_is_not_ours_is_refused() {
    if !needs::met("a_folder_that_is_not_ours_is_refused", &[needs::Need::Tool("setpriv", "util-linux")]) {
        return;
    }
    let case = Case::new();
    // Where the program was built may be out of that user's reach.
    let program = case.path("culvert");
    fs::copy(binary(), &program).unwrap();
    fs::set_permissions(case.folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let mut command = if needs::is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&program);
        command
    } else {
        Command::new(&program)
    };
    let output = run(
        command.args(["init", "--config"]).arg(case.path("agent.toml")).args(EXIT),
        Duration::from_secs(60),
    );
    fs::set_permissions(case.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("identity.key") && told.contains("remedy: do it as root"), "{told}");
    assert_eq!(case.names(), ["culvert"]);
}

#[test]
fn a_credential_of_systemd_is_the_key() {
    let case = Case::new();
    case.done("agent.toml", EXIT);
    let credentials = tempfile::tempdir().unwrap();
    let credential = credentials.path().join("identity.key");
    fs::rename(case.path("identity.key"), &credential).unwrap();
    let check = || {
        let mut command = Command::new(binary());
        command.args(["check", "--config"]).arg(case.path("agent.toml"));
        run(command.env("CREDENTIALS_DIRECTORY", credentials.path()), Duration::from_secs(60))
    };
    // As systemd has it.
    fs::set_permissions(&credential, fs::Permissions::from_mode(0o440)).unwrap();
    assert_eq!(check().status.code(), Some(0), "{}", text(&check().stderr));
    fs::set_permissions(&credential, fs::Permissions::from_mode(0o444)).unwrap();
    let told = text(&check().stderr);
    assert!(told.contains(credential.to_str().unwrap()) && told.contains("chmod o="), "{told}");
    fs::remove_file(&credential).unwrap();
    assert_eq!(check().status.code(), Some(2), "neither the credential nor the file is there");
}

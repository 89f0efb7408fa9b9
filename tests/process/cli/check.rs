//! Bad configurations: exit code 2, the key and a remedy. Needs nothing but the program.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use culvert_tests::{
    agent::{culvert, keygen},
    process::text,
};
use tempfile::TempDir;

/// A public key that is not the agent's own.
const KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE";

/// A folder with a key and a valid configuration, of which each test spoils something.
struct Case {
    folder: TempDir,
    text: String,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        keygen(&folder.path().join("identity.key"));
        let text = format!(
            "[identity]\nkey_file = \"identity.key\"\nstate_dir = \"state\"\n\
             [transport]\nlisten = [\"127.0.0.1:4433\"]\n\
             [[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:53\"\n\
             [[udp]]\nlisten = \"127.0.0.1:5300\"\npeer = \"exit\"\nservice = \"dns\"\n\
             [[peer]]\nname = \"exit\"\npublic_key = \"{KEY}\"\n"
        );
        Self { folder, text }
    }

    fn replace(mut self, from: &str, to: &str) -> Self {
        assert!(self.text.contains(from), "{from:?} is not in the configuration");
        self.text = self.text.replace(from, to);
        self
    }

    fn add(mut self, lines: &str) -> Self {
        self.text += lines;
        self
    }

    fn key_file(&self) -> PathBuf {
        self.folder.path().join("identity.key")
    }

    fn file(&self) -> PathBuf {
        let file = self.folder.path().join("culvert.toml");
        fs::write(&file, &self.text).unwrap();
        file
    }

    /// `check` and `run` both end with 2 and a line that has all of `words` and a remedy.
    #[track_caller]
    fn is_refused(&self, words: &[&str]) {
        let file = self.file();
        for command in ["check", "run"] {
            let output = culvert(&[command, "--config", file.to_str().unwrap()]);
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "culvert {command}: {stderr}");
            let told = |line: &str| words.iter().all(|word| line.contains(word)) && line.contains("remedy: ");
            assert!(stderr.lines().any(told), "culvert {command} does not say {words:?}: {stderr}");
            assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
        }
    }

    #[track_caller]
    fn is_accepted(&self) {
        accepted(&self.file());
    }
}

#[track_caller]
fn accepted(file: &Path) {
    let output = culvert(&["check", "--config", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_valid_configuration_passes() {
    Case::new().is_accepted();
}

#[test]
fn an_unknown_key_is_refused() {
    let case = Case::new().add("keep_alive = \"1s\"\n");
    case.is_refused(&[
        "culvert.toml:16:",
        "peer \"exit\".keep_alive",
        "unknown key",
        "did you mean keepalive?",
    ]);
}

#[test]
fn a_section_of_the_wrong_shape_is_refused() {
    Case::new().add("[[tun]]\nname = \"c0\"\n").is_refused(&["tun", "write [tun] and its keys below"]);
}

#[test]
fn a_tunnel_is_accepted_and_its_mistakes_are_refused() {
    let tunnel = "endpoints = [\"192.0.2.7:4433\"]\nallowed_ips = [\"10.9.0.2\"]\n[tun]\naddress = [\"10.9.0.1/24\"]\n";
    let case = || Case::new().add(tunnel);
    case().is_accepted();
    let allowed = |ips: &str| case().replace("[\"10.9.0.2\"]", ips);
    let at = "culvert.toml:17: peer \"exit\".allowed_ips[0]: ";
    allowed("[\"10.9.0.2/24\"]").is_refused(&[at, "remedy: write \"10.9.0.0/24\" for all of it"]);
    allowed("[\"10.9.0.1\"]").is_refused(&[at, "is our own address"]);
    allowed("[\"192.0.2.0/24\"]").is_refused(&[at, "192.0.2.0/24 holds 192.0.2.7", "set transport.mark"]);
    allowed("[\"0.0.0.0/0\"]").is_refused(&[at, "is a default route", "set transport.mark"]);
    let other = "[[peer]]\nname = \"b\"\npublic_key = \"n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0\"\n\
                 allowed_ips = [\"10.9.0.2/32\"]\n";
    case().add(other).is_refused(&["peer \"b\".allowed_ips[0]", "10.9.0.2/32 belongs to \"exit\""]);
    case()
        .replace("10.9.0.1/24", "192.0.2.1/24")
        .is_refused(&["culvert.toml:19: tun.address[0]", "192.0.2.7"]);
    case().replace("10.9.0.1/24", "10.9.0.0/24").is_refused(&["tun.address[0]", "10.9.0.1/24"]);
    case().add("name = \"a/b\"\n").is_refused(&["culvert.toml:20: tun.name", "1 to 15"]);
    case().add("mtu = 1000\n").is_refused(&["culvert.toml:20: tun.mtu", "1280 to 65535"]);
    case()
        .replace("[tun]\naddress = [\"10.9.0.1/24\"]\n", "")
        .is_refused(&["peer \"exit\".allowed_ips", "add [tun]"]);
    case().replace("allowed", "dscp = 64\nallowed").is_refused(&["peer \"exit\".dscp", "0 to 63"]);
}

#[test]
fn a_bad_address_is_refused() {
    Case::new()
        .replace("127.0.0.1:53\"", "dns.example\"")
        .is_refused(&["service \"dns\".upstream", "dns.example"]);
    Case::new().replace("127.0.0.1:4433", "127.0.0.1").is_refused(&["transport.listen[0]"]);
    Case::new().replace("127.0.0.1:5300", "127.0.0.1:70000").is_refused(&["udp[0].listen"]);
    Case::new()
        .add("endpoints = [\"exit.example.net\"]\n")
        .is_refused(&["peer \"exit\".endpoints[0]", "port"]);
}

#[test]
fn a_missing_key_file_is_refused() {
    let case = Case::new();
    fs::remove_file(case.key_file()).unwrap();
    case.is_refused(&["identity.key_file", "identity.key"]);
}

#[test]
fn a_key_file_that_everyone_may_read_is_refused() {
    let case = Case::new();
    for mode in [0o604, 0o644, 0o602] {
        fs::set_permissions(case.key_file(), fs::Permissions::from_mode(mode)).unwrap();
        case.is_refused(&["identity.key_file", "chmod"]);
    }
    fs::set_permissions(case.key_file(), fs::Permissions::from_mode(0o640)).unwrap();
    case.is_accepted();
}

#[test]
fn a_key_file_that_is_none_is_refused() {
    let case = Case::new();
    fs::write(case.key_file(), "-----BEGIN PRIVATE KEY-----\nbm9uZQ==\n-----END PRIVATE KEY-----\n").unwrap();
    case.is_refused(&["identity.key_file"]);
}

#[test]
fn duplicate_names_are_refused() {
    let service = "[[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:54\"\n";
    Case::new().add(service).is_refused(&["service \"dns\".name", "\"dns\"", "choose another name"]);
    let peer = "[[peer]]\nname = \"exit\"\npublic_key = \"AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI\"\n";
    Case::new().add(peer).is_refused(&["peer \"exit\".name", "\"exit\"", "choose another name"]);
}

#[test]
fn a_forward_without_its_peer_is_refused() {
    Case::new().replace("peer = \"exit\"", "peer = \"exti\"").is_refused(&["udp[0].peer", "exti"]);
    Case::new().replace("peer = \"exit\"\n", "").is_refused(&["udp[0].peer", "is missing"]);
}

#[test]
fn our_own_key_as_a_peer_is_refused() {
    let case = Case::new();
    let own = text(&culvert(&["pubkey", case.key_file().to_str().unwrap()]).stdout);
    case.replace(KEY, own.trim()).is_refused(&["peer \"exit\".public_key"]);
}

#[test]
fn all_problems_are_told_at_once() {
    let case =
        Case::new().replace("127.0.0.1:53\"", "nowhere\"").replace("peer = \"exit\"", "peer = \"exti\"");
    case.is_refused(&["service \"dns\".upstream"]);
    case.is_refused(&["udp[0].peer"]);
}

#[test]
fn a_file_that_is_not_there_is_refused() {
    let output = culvert(&["check", "--config", "/nonexistent/culvert.toml"]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("/nonexistent/culvert.toml") && stderr.contains("remedy: "), "{stderr}");
}

#[test]
fn wrong_usage_ends_with_2() {
    for args in [&["run"][..], &["frobnicate"], &["demo", "--seconds", "0"], &["check", "--config"]] {
        assert_eq!(culvert(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn another_spelling_is_answered_with_the_right_one() {
    for (args, right) in [
        (&["status", "routes", "10.1.2.3"][..], "culvert status --routes ADDRESS"),
        (&["init", "--fleet"], "--server-id"),
        (&["init", "--role", "exit", "--fleet", "1"], "--server-id"),
    ] {
        let output = culvert(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(right), "{args:?}: {stderr}");
    }
}

#[test]
fn the_examples_pass_with_a_key_in_place() {
    let folder = tempfile::tempdir().unwrap();
    keygen(&folder.path().join("identity.key"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // The agents' halves of routing daemons' configurations, too.
    let folders =
        ["config", "deploy/bird", "deploy/babel"].map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let mut seen = 0;
    for entry in folders.into_iter().flatten() {
        let source = entry.unwrap().path();
        if source.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let text = fs::read_to_string(&source).unwrap().replace("/etc/culvert/identity.key", "identity.key");
        let file = folder.path().join(source.file_name().unwrap());
        fs::write(&file, text).unwrap();
        accepted(&file);
        seen += 1;
    }
    assert!(seen >= 8, "{seen} examples");
}

#[test]
fn keygen_never_overwrites_and_keeps_the_key_private() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("new.key");
    let public = keygen(&file);
    assert_eq!(public.len(), 43, "{public}");
    let private = fs::read(&file).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let file_name = file.to_str().unwrap();
    let again = culvert(&["keygen", "--out", file_name]);
    assert_eq!(again.status.code(), Some(1), "{}", text(&again.stderr));
    assert_eq!(fs::read(&file).unwrap(), private);
    assert_eq!(text(&culvert(&["pubkey", file_name]).stdout).trim(), public);
}

#[test]
fn genpsk_never_overwrites_and_its_key_is_one_that_a_peer_can_have() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("peer.psk");
    let file_name = file.to_str().unwrap();
    let made = culvert(&["genpsk", "--out", file_name]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    assert!(made.stdout.is_empty(), "a secret is not printed");
    let key = fs::read_to_string(&file).unwrap();
    assert_eq!(key.trim_end().len(), 43);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let again = culvert(&["genpsk", "--out", file_name]);
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("never overwritten") && text(&again.stderr).contains("remedy: "));
    assert_eq!(fs::read_to_string(&file).unwrap(), key);

    keygen(&folder.path().join("identity.key"));
    let public = keygen(&folder.path().join("other.key"));
    let config = folder.path().join("agent.toml");
    fs::write(
        &config,
        format!(
            "identity.key_file = \"identity.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n\
             [[peer]]\nname = \"p\"\npublic_key = \"{public}\"\npreshared_key_file = \"peer.psk\"\n"
        ),
    )
    .unwrap();
    let check = || culvert(&["check", "--config", config.to_str().unwrap()]);
    assert!(check().status.success(), "{}", text(&check().stderr));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o604)).unwrap();
    let exposed = check();
    assert_eq!(exposed.status.code(), Some(2));
    let words = text(&exposed.stderr);
    assert!(words.contains("peer \"p\".preshared_key_file") && words.contains("chmod o= "), "{words}");
}

#[test]
fn a_file_in_another_encoding_says_which_and_how_to_convert_it() {
    let case = Case::new();
    let file = case.file();
    let utf16 = |bytes: fn(u16) -> [u8; 2], mark: &str| {
        format!("{mark}{}", case.text).encode_utf16().flat_map(bytes).collect::<Vec<u8>>()
    };
    for (what, bytes, words) in [
        (
            "UTF-16 as Notepad writes it",
            utf16(u16::to_le_bytes, "\u{feff}"),
            ["text in UTF-16", "iconv -f UTF-16 "],
        ),
        ("without a mark", utf16(u16::to_le_bytes, ""), ["text in UTF-16", "iconv -f UTF-16LE "]),
        ("big-endian", utf16(u16::to_be_bytes, ""), ["text in UTF-16", "iconv -f UTF-16BE "]),
        (
            "Latin-1",
            [b"# Gr\xfc\xdfe\n", case.text.as_bytes()].concat(),
            ["byte 0xfc in line 1", "iconv -f WINDOWS-1252 "],
        ),
        ("cut short by a crash", [b"# cut\n", &[0; 4096][..]].concat(), ["NUL byte in line 2", "restore it"]),
    ] {
        fs::write(&file, bytes).unwrap();
        let output = culvert(&["check", "--config", file.to_str().unwrap()]);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{what}: {stderr}");
        let lines: Vec<&str> = stderr.lines().collect();
        let &[line] = &lines[..] else { panic!("{what}: {stderr}") };
        assert!(words.iter().all(|word| line.contains(word)), "{what}: {stderr}");
    }
    // A mark before UTF-8 is nothing wrong.
    fs::write(&file, format!("\u{feff}{}", case.text)).unwrap();
    let output = culvert(&["check", "--config", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn a_table_is_shown_by_its_name_wherever_it_stands() {
    let case = Case::new()
        .add("lanes = 65\n[[peer]]\nname = \"lyon\"\npublic_key = \"x\"\n[[peer]]\npublic_key = \"y\"\n")
        .add("[[peer]]\nname = \"a b\"\npublic_key = \"z\"\n");
    case.is_refused(&["culvert.toml:16: peer \"exit\".lanes: 65 is out of range"]);
    case.is_refused(&["culvert.toml:19: peer \"lyon\".public_key: "]);
    // Without a name, or one that is none, it is counted.
    case.is_refused(&["culvert.toml:21: peer[2].public_key: "]);
    case.is_refused(&["culvert.toml:23: peer[3].name: \"a b\" is not a name"]);
    let user = "[[user]]\nname = \"anna\"\nservices = [\"nope\"]\n";
    Case::new().add(user).is_refused(&["user \"anna\".services[0]"]);
    let line = "[[transport.uplink]]\nname = \"dsl\"\nweight = 0\n";
    Case::new().add(line).is_refused(&["transport.uplink \"dsl\".weight"]);
    // Of a range, that of the range, once.
    let range = "[[service]]\nname = \"games\"\nupstream = \"127.0.0.1:6000-6009\"\nidle = \"0s\"\n";
    Case::new().add(range).is_refused(&["service \"games\".idle"]);
}

#[test]
fn what_is_not_toml_is_named_with_what_to_write() {
    for (line, words) in [
        ("keepalive = 25s", ["25s is neither a number nor a text in quotes", "keepalive = \"25s\""]),
        ("lanes: 3", ["key with no value", "write lanes = 3"]),
        ("[tun", ["unclosed table", "as in [tun]"]),
        ("[transport]", ["\"transport\" is there twice", "remove one"]),
    ] {
        Case::new().add(&format!("{line}\n")).is_refused(&[
            "culvert.toml:16: not TOML: ",
            words[0],
            words[1],
        ]);
    }
}

//! `culvert import wg`: what it writes passes `check`, and what it prints is typed as it stands.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

use culvert_tests::{agent::culvert, process::text};

/// A hub with five peers, one of them with a preshared key and one with a network behind it.
fn hub() -> String {
    let key = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
    let mut file = format!(
        "[Interface]\nAddress = 10.9.0.1/24\nListenPort = 51820\nPrivateKey = {key}\nSaveConfig = true\n"
    );
    for number in 2..=6 {
        file += &format!(
            "\n# site{number}\n[Peer]\nPublicKey = {key}\nAllowedIPs = 10.9.0.{number}/32, 10.{number}.0.0/16\n"
        );
    }
    file + "PresharedKey = FpCyhws9cxwWoV4xELtfJvjJN+zQVRPISllRWgeopVE=\n"
}

/// Runs a line that was printed, with more options.
#[track_caller]
fn typed(line: &str, more: &[&str]) -> String {
    let words: Vec<&str> = line.split(' ').skip(1).chain(more.iter().copied()).collect();
    let output = culvert(&words);
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn is_private(file: &Path) -> bool {
    fs::metadata(file).unwrap().permissions().mode() & 0o007 == 0
}

#[test]
fn five_peers_are_imported_by_the_commands_that_are_printed() {
    let folder = tempfile::tempdir().unwrap();
    let [source, out] = ["wg0.conf", "agent.toml"].map(|name| folder.path().join(name));
    fs::write(&source, hub()).unwrap();
    let import = ["import", "wg", source.to_str().unwrap()];
    let write =
        [&import[..], &["--out", out.to_str().unwrap(), "--advertise", "gw.example.net:51820"]].concat();
    let output = culvert(&write);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stdout);
    assert!(told.contains("note: keys do not carry over") && told.contains("note: SaveConfig"), "{told}");
    let secret = folder.path().join("site6.psk");
    assert!(is_private(&secret) && is_private(&folder.path().join("identity.key")));
    assert_eq!(fs::read_to_string(&secret).unwrap().trim(), "FpCyhws9cxwWoV4xELtfJvjJN+zQVRPISllRWgeopVE=");

    let lines = |begin: &str| -> Vec<String> {
        let commands = told.lines().filter_map(|line| line.strip_prefix("    "));
        commands.filter(|line| line.starts_with(begin)).map(str::to_owned).collect()
    };
    let (inits, adds) = (lines("culvert init "), lines("culvert peer add "));
    assert_eq!([inits.len(), adds.len()], [5, 5], "{told}");
    for (index, (init, add)) in inits.iter().zip(&adds).enumerate() {
        let file = folder.path().join(format!("host{index}/agent.toml"));
        // Its file is where the host of the peer has it.
        let init = init.replace("/etc/culvert/hub.psk", secret.to_str().unwrap());
        let said = typed(&init, &["--config", file.to_str().unwrap()]);
        let network = format!("--allowed-ip 10.{}.0.0/16", index + 2);
        assert!(said.contains(&network), "the network behind it: {said}");
        let key = said.lines().skip_while(|line| *line != "Its public key:").nth(1).unwrap().trim();
        typed(&add.replace(" KEY ", &format!(" {key} ")), &[]);
        let checked = culvert(&["check", "--config", file.to_str().unwrap()]);
        assert!(checked.status.success(), "{}", text(&checked.stderr));
    }
    let checked = culvert(&["check", "--config", out.to_str().unwrap()]);
    assert!(
        text(&checked.stdout).contains(", 5 peers, "),
        "{} {}",
        text(&checked.stdout),
        text(&checked.stderr)
    );

    // Nothing is overwritten, and without --out nothing is written.
    let again = culvert(&write);
    assert!(!again.status.success() && text(&again.stderr).contains("exists"), "{}", text(&again.stderr));
    let shown = culvert(&[&import[..], &["--advertise", "gw.example.net:51820"]].concat());
    assert!(
        text(&shown.stdout).contains("listen = [\"0.0.0.0:51820\", \"[::]:51820\"]"),
        "{}",
        text(&shown.stdout)
    );
    assert!(
        text(&shown.stderr).contains("culvert init --role entry --peer LINK "),
        "{}",
        text(&shown.stderr)
    );
}

#[test]
fn what_is_no_file_of_wireguard_is_refused_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("wg0.conf");
    fs::write(&source, "[Interface]\nAddress = here\n").unwrap();
    for (file, words) in
        [(source.to_str().unwrap(), "wg0.conf:2: \"here\""), ("/nowhere/wg0.conf", "(remedy: name the file")]
    {
        let output = culvert(&["import", "wg", file]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
}

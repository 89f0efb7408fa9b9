//! Manual pages and completions, as packages and shells read them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    agent::{binary, culvert, keygen},
    needs::{self, Need},
    process::{run, text},
};

/// How long a tool may take.
const LIMIT: Duration = Duration::from_secs(60);

fn pages(folder: &Path) -> Vec<PathBuf> {
    let output = culvert(&["manual", "--out", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let pages: Vec<PathBuf> = text(&output.stdout).lines().map(PathBuf::from).collect();
    assert!(pages.len() > 10 && pages.iter().all(|page| page.is_file()), "{pages:?}");
    pages
}

#[test]
fn the_manual_pages_have_no_mistakes() {
    let needed = [Need::Tool("mandoc", "mandoc"), Need::Tool("man", "man-db")];
    if !needs::met("the_manual_pages_have_no_mistakes", &needed) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for page in pages(&folder.path().join("new/man")) {
        // Without a date, which a package sets, all but its absence is checked.
        let output = run(Command::new("mandoc").args(["-Tlint", "-Wwarning"]).arg(&page), LIMIT);
        let said = text(&output.stdout) + &text(&output.stderr);
        let wrong: Vec<&str> = said.lines().filter(|line| !line.contains("missing date")).collect();
        assert!(wrong.is_empty(), "{}: {wrong:#?}", page.display());
        let output = run(Command::new("man").args(["--warnings", "-l"]).arg(&page), LIMIT);
        assert!(output.status.success(), "{}: {}", page.display(), text(&output.stderr));
        assert_eq!(text(&output.stderr), "", "{}", page.display());
        let name = page.file_stem().and_then(|name| name.to_str()).unwrap();
        assert!(text(&output.stdout).contains(&format!("{name} - ")), "{name}: no NAME that whatis finds");
    }
}

#[test]
fn the_pages_of_a_package_have_its_date_and_are_the_same_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["a", "b"].map(|name| folder.path().join(name));
    for out in [&first, &second] {
        let mut command = Command::new(binary());
        command.args(["manual", "--out"]).arg(out).env("SOURCE_DATE_EPOCH", "1700000000");
        assert!(run(&mut command, LIMIT).status.success());
    }
    let page = fs::read_to_string(first.join("culvert-run.1")).unwrap();
    assert!(page.starts_with(".TH CULVERT-RUN 1 \"2023-11-14\" \"culvert "), "{page}");
    assert_eq!(fs::read_to_string(second.join("culvert-run.1")).unwrap(), page);
}

#[test]
fn bash_completes_commands_and_options() {
    let script = culvert(&["completions", "bash"]);
    assert!(script.status.success(), "{}", text(&script.stderr));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("culvert");
    fs::write(&file, &script.stdout).unwrap();
    let completed = |words: &str, last: usize| {
        let ask = format!(
            "source \"$1\"; COMP_WORDS=({words}); COMP_CWORD={last}; \
             _culvert_peers culvert \"${{COMP_WORDS[{last}]}}\" \"${{COMP_WORDS[{}]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            last - 1
        );
        let mut shell = Command::new("bash");
        let path = [binary().parent().unwrap().to_str().unwrap(), &std::env::var("PATH").unwrap()].join(":");
        shell.args(["-c", &ask, "bash"]).arg(&file).env("PATH", path).stdin(Stdio::null());
        let output = run(&mut shell, LIMIT);
        text(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(completed("culvert statu", 1), ["status"]);
    assert_eq!(completed("culvert peer add --allowed", 3), ["--allowed-ip"]);
    assert_eq!(completed("culvert manua", 1), [""; 1], "a hidden command is not offered");
    // The names of peers, by the file that the line names; no daemon runs.
    let config = folder.path().join("agent.toml");
    let key = keygen(&folder.path().join("other.key"));
    keygen(&folder.path().join("identity.key"));
    let text = format!(
        "identity.key_file = \"identity.key\"\nidentity.state_dir = \"state\"\ntransport.listen = [\"127.0.0.1:0\"]\n\
         control.socket = \"none.sock\"\n[[peer]]\nname = \"branch\"\npublic_key = \"{key}\"\n"
    );
    fs::write(&config, text).unwrap();
    let config = config.display();
    assert_eq!(completed(&format!("culvert status --config {config} bra"), 4), ["branch"]);
    assert_eq!(completed(&format!("culvert peer set --config {config} bra"), 5), ["branch"]);
    assert_eq!(completed(&format!("culvert peer add --config {config} bra"), 5), [""; 1], "a new name");
}

#[test]
fn an_unknown_shell_is_refused() {
    let output = culvert(&["completions", "tcsh"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("bash"), "{}", text(&output.stderr));
}

#[test]
fn the_version_names_what_was_built() {
    let output = culvert(&["--version"]);
    let said = text(&output.stdout);
    let start = concat!("culvert ", env!("CARGO_PKG_VERSION"), " (");
    // A build for development is not compiled anew for each commit, and says so.
    let target = format!(", {}-unknown-linux-gnu)\n", std::env::consts::ARCH);
    assert!(said.starts_with(start) && said.ends_with(&target), "{said}");
    assert!(said.contains("(no commit, debug, "), "{said}");
    let pages = tempfile::tempdir().unwrap();
    let output = culvert(&["manual", "--out", pages.path().to_str().unwrap()]);
    assert!(output.status.success());
    let page = fs::read_to_string(pages.path().join("culvert.1")).unwrap();
    assert!(
        page.contains(concat!("\"culvert ", env!("CARGO_PKG_VERSION"), "\"")),
        "the pages are the same for each build"
    );
}

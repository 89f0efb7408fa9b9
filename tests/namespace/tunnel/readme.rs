//! The commands of the README, as they stand there.

use std::{fs, path::Path};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs,
    sites::Plan,
};

use super::{possible, shell::Shell};

/// The blocks of the README whose lines begin with the names of hosts.
fn blocks() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let text = fs::read_to_string(path).unwrap();
    let blocks = text.split("\n```").map(str::trim_start).filter(|block| block.starts_with("exit$"));
    blocks.map(str::to_owned).collect()
}

/// What the README abbreviates, and the hosts print.
#[derive(Default)]
struct Printed {
    link: String,
    key: String,
}

impl Printed {
    /// The line with what was printed in place of what is abbreviated.
    fn complete(&self, line: &str) -> String {
        let words = line.split_whitespace().map(|word| match word {
            _ if !word.ends_with('…') => word,
            _ if word.starts_with("culvert://192.0.2.2:4433/") => &self.link,
            _ => &self.key,
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn read(&mut self, said: &str) {
        let of = |heading: &str| {
            let after = said.lines().skip_while(|line| !line.starts_with(heading)).nth(1)?;
            Some(after.trim().to_owned())
        };
        self.link = of("Its link, for entries:").unwrap_or_else(|| self.link.clone());
        self.key = of("Its public key:").unwrap_or_else(|| self.key.clone());
    }
}

fn follow(block: &str) {
    let sites = Plan::two().prepare();
    let (mut exit, mut entry) = (Shell::at(&sites.a().gateway), Shell::at(&sites.b().gateway));
    let mut printed = Printed::default();
    for line in block.lines().filter(|line| !line.is_empty()) {
        let (host, typed) = line.split_once("$ ").unwrap_or_else(|| panic!("{line}: no host"));
        let shell = match host {
            "exit" => &mut exit,
            "entry" => &mut entry,
            _ => panic!("{line}: which host?"),
        };
        let typed = printed.complete(typed);
        if let Some(daemon) = typed.strip_suffix(" &") {
            shell.starts(daemon);
        } else if typed.starts_with("ping ") || typed.starts_with("iperf3 -c") {
            // What goes on until Ctrl-C, or for ten seconds; and the session may take a moment.
            let once = if typed.starts_with("ping ") { "-c 1 -W 1" } else { "-t 1" };
            clock::until(&typed, PATIENCE, || match shell.tries(&format!("{typed} {once}")) {
                (code, _) if code == "0" => Ok(()),
                (_, said) => Err(said),
            });
        } else {
            let said = shell.does(&typed);
            printed.read(&said);
            if typed.ends_with(" --now") {
                // No systemd is here, which is said, and what the README has instead.
                assert!(said.contains("note: --now: nothing was started"), "{said}");
                shell.starts("culvert run");
            }
        }
    }
    assert!(!printed.link.is_empty() && !printed.key.is_empty(), "the block says nothing of init: {block}");
}

#[test]
fn two_hosts_reach_each_other_by_the_commands_of_the_readme() {
    if possible("the README's tunnel") {
        let blocks = blocks();
        let [tunnel, _service] = &blocks[..] else { panic!("{} blocks in the README", blocks.len()) };
        follow(tunnel);
    }
}

#[test]
fn a_service_is_reached_by_the_commands_of_the_readme() {
    if possible("the README's service") && needs::met("the README's service", needs::IPERF) {
        follow(&blocks()[1]);
    }
}

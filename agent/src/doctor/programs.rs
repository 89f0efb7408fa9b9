//! Which programs run, here and at the peers, and which of them is older (pure).

use std::cmp::Ordering;

use ops::control_socket::status::{PeerStatus, Status};

use super::{
    Check, Finding,
    facts::{Daemon, Facts},
};
use crate::program;

/// A program, as far as it says what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Program<'a> {
    version: &'a str,
    /// The hash of its commit.
    commit: Option<&'a str>,
    /// The date of that, as in "2026-11-27".
    date: Option<&'a str>,
}

/// How one program stands to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stands {
    Same,
    Older,
    Newer,
    /// Another one, of the same day.
    Other,
    /// One of them does not say its commit.
    Unknown,
}

impl<'a> Program<'a> {
    fn new(version: &'a str, commit: Option<&'a str>) -> Self {
        // "HASH DATE", and ", changed" where files were.
        let mut words = commit.unwrap_or_default().split([' ', ',']).filter(|word| !word.is_empty());
        Self { version, commit: words.next(), date: words.next() }
    }

    /// Reads the name that a peer's program gives itself; `None` if it is not culvert.
    fn of_peer(software: &'a str) -> Option<Self> {
        let named = software.strip_prefix("culvert/")?;
        Some(match named.split_once(' ') {
            Some((version, commit)) => {
                Self::new(version, commit.strip_prefix('(').and_then(|text| text.strip_suffix(')')))
            }
            None => Self::new(named, None),
        })
    }

    fn stands_to(self, other: Self) -> Stands {
        let of = |ordering| match ordering {
            Ordering::Less => Stands::Older,
            Ordering::Equal => Stands::Other,
            Ordering::Greater => Stands::Newer,
        };
        if self.version != other.version {
            return of(numbers(self.version).cmp(&numbers(other.version)));
        }
        match (self.commit.zip(other.commit), self.date.zip(other.date)) {
            (Some((ours, theirs)), _) if ours == theirs => Stands::Same,
            // Dates of this form are in the order of their texts.
            (Some(_), Some((ours, theirs))) => of(ours.cmp(theirs)),
            (Some(_), None) => Stands::Other,
            (None, _) if self.commit == other.commit => Stands::Same,
            (None, _) => Stands::Unknown,
        }
    }

    fn shown(self) -> String {
        match self.commit {
            Some(commit) => {
                format!("{} ({})", self.version, [commit, self.date.unwrap_or_default()].join(" ").trim_end())
            }
            None => self.version.to_owned(),
        }
    }
}

/// The numbers of a version, as far as it has them.
fn numbers(version: &str) -> Vec<u64> {
    version.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect()
}

/// What runs is compared with the program of this command, which a restart would start.
pub(super) fn daemon(facts: &Facts, status: &Status) -> Finding {
    daemon_beside(facts, status, Program::new(program::VERSION, program::COMMIT))
}

fn daemon_beside(facts: &Facts, status: &Status, ours: Program<'_>) -> Finding {
    let running = Program::new(&status.software, status.commit.as_deref());
    let stands = running.stands_to(ours);
    let ours = ours.shown();
    Finding::ok(Check::Daemon, "daemon", format!("runs, version {}", running.shown()))
        .warning_if(
            facts.daemon_replaced,
            "its program was replaced since it was started: the restart after an upgrade is still to come",
            RESTART,
        )
        .warning_if(
            stands == Stands::Older,
            format!("older than this command, {ours}: the restart after an upgrade is still to come"),
            RESTART,
        )
        .note_if(
            stands == Stands::Newer,
            format!("newer than this command, {ours}: two are installed"),
            "the command that was installed with the daemon: command -v culvert",
        )
        .note_if(stands == Stands::Other, format!("another one than this command, {ours}"), RESTART)
        .note_if(
            stands == Stands::Unknown,
            format!("one of the two does not say its commit; this command is {ours}"),
            RESTART,
        )
}

const RESTART: &str = "systemctl restart culvert";

/// The programs of the connected peers beside the one that runs here.
pub(super) fn peers(facts: &Facts) -> Vec<Finding> {
    let Daemon::Running(status) = &facts.daemon else { return Vec::new() };
    let running = Program::new(&status.software, status.commit.as_deref());
    status.peers.iter().filter_map(|peer| of_peer(peer, running)).collect()
}

fn of_peer(peer: &PeerStatus, running: Program<'_>) -> Option<Finding> {
    let software = peer.software.as_deref()?;
    let found = Finding::ok(Check::PeerSoftware, &*peer.name, software);
    let Some(theirs) = Program::of_peer(software) else { return Some(found) };
    let (which, remedy) = match theirs.stands_to(running) {
        Stands::Older => ("an older program than", "upgrade it there, and restart the agent"),
        Stands::Newer => ("a newer program than", "upgrade this host, and restart the agent"),
        Stands::Same | Stands::Other | Stands::Unknown => return Some(found),
    };
    Some(found.note(format!("{which} the agent here, {}", running.shown()), remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Option<&str> = Some("0123456789ab 2026-11-20");
    const NEW: Option<&str> = Some("ba9876543210 2026-11-27");

    #[test]
    fn versions_come_before_dates_and_an_unknown_commit_is_not_guessed() {
        let stands = |ours: (&'static str, Option<&'static str>),
                      theirs: (&'static str, Option<&'static str>)| {
            Program::new(ours.0, ours.1).stands_to(Program::new(theirs.0, theirs.1))
        };
        let expected = [
            (("0.1.0", OLD), ("0.1.0", OLD), Stands::Same),
            (("0.1.0", None), ("0.1.0", None), Stands::Same),
            (("0.1.0", OLD), ("0.1.0", NEW), Stands::Older),
            (("0.1.0", NEW), ("0.1.0", OLD), Stands::Newer),
            (("0.10.0", OLD), ("0.9.1", NEW), Stands::Newer),
            (("0.1.0", NEW), ("0.2.0-rc1", OLD), Stands::Older),
            (("0.1.0", None), ("0.1.0", NEW), Stands::Unknown),
            (("0.1.0", Some("aaaaaaaaaaaa 2026-11-27, changed")), ("0.1.0", NEW), Stands::Other),
            (("0.1.0", Some("aaaaaaaaaaaa")), ("0.1.0", NEW), Stands::Other),
        ];
        for (ours, theirs, expected) in expected {
            assert_eq!(stands(ours, theirs), expected, "{ours:?} {theirs:?}");
        }
    }

    #[test]
    fn a_peers_program_is_read_from_the_name_that_it_gives_itself() {
        let read = |text| Program::of_peer(text).map(Program::shown);
        let dated = "0.1.0 (0123456789ab 2026-11-20)";
        assert_eq!(read("culvert/0.1.0 (0123456789ab 2026-11-20)").as_deref(), Some(dated));
        assert_eq!(read("culvert/0.1.0 (0123456789ab 2026-11-20, changed)").as_deref(), Some(dated));
        assert_eq!(read("culvert/0.1.0").as_deref(), Some("0.1.0"));
        assert_eq!(read("culvert/0.1.0 odd").as_deref(), Some("0.1.0"));
        assert_eq!(read("another/1"), None);
    }

    #[test]
    fn a_restart_that_was_forgotten_is_a_warning() {
        let mut facts = super::super::tests::facts();
        let status = |commit: Option<&str>| Status {
            software: "0.1.0".to_owned(),
            commit: commit.map(str::to_owned),
            ..Status::default()
        };
        let found = |facts: &Facts, commit| daemon_beside(facts, &status(commit), Program::new("0.1.0", NEW));
        let severity = |facts: &Facts, commit| found(facts, commit).severity;
        use super::super::Severity;
        assert_eq!(severity(&facts, NEW), Severity::Ok);
        assert_eq!(severity(&facts, OLD), Severity::Warning);
        assert!(
            found(&facts, OLD)
                .problem
                .starts_with("older than this command, 0.1.0 (ba9876543210 2026-11-27)")
        );
        assert_eq!(severity(&facts, Some("cccccccccccc 2026-11-28")), Severity::Note);
        assert_eq!(severity(&facts, None), Severity::Note);
        facts.daemon_replaced = true;
        assert_eq!(severity(&facts, NEW), Severity::Warning);
    }
}

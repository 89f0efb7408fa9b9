//! The configuration, the files and folders that it names, and the daemon that runs with it (pure).

use std::path::Path;

use config::{Config, Knock, defaults};

use super::{
    Check, Finding, Severity,
    facts::{Daemon, Facts, Found, NamedPath},
    programs,
    unit::NAME,
};

/// Whose problems are those of the key's file.
const KEY_FILE: &str = "identity.key_file";

/// The configuration as a whole, and the private key, which is read together with it.
pub(super) fn configuration(facts: &Facts) -> Vec<Finding> {
    let file = &facts.file;
    let at = |subject: String, value: &str| Finding::ok(Check::Configuration, subject, value);
    let Some(path) = &file.path else {
        let none = at("configuration".to_owned(), "none");
        return vec![none.note("only the host was looked at", "culvert doctor --config FILE")];
    };
    let shown = path.display().to_string();
    if let Some(error) = &file.unreadable {
        let (problem, mut remedy) = split(error);
        if file.denied && facts.service.account.is_some() {
            facts.service.look().clone_into(&mut remedy);
        }
        return vec![at(shown, "unreadable").error(problem, remedy)];
    }
    let mut findings = Vec::new();
    if file.problems.is_empty() {
        findings.push(at(shown, "valid"));
    }
    for (severity, list) in [(Severity::Error, &file.problems), (Severity::Note, &file.notes)] {
        for problem in list.iter().filter(|problem| problem.key_path != KEY_FILE) {
            // The check `status-page` says it with more weight.
            if severity == Severity::Note && problem.key_path == "metrics.allow" {
                continue;
            }
            let found = at(problem.place(path), &problem.key());
            findings.push(found.but(severity, problem.problem.clone(), problem.remedy.clone()));
        }
    }
    findings.extend(key_file(facts));
    findings
}

fn key_file(facts: &Facts) -> Vec<Finding> {
    let NamedPath { path, found } = &facts.files.key;
    let at = |value: String| Finding::ok(Check::KeyFile, path.display().to_string(), value);
    let unit = facts.service.unit.as_ref().filter(|unit| unit.hands_over(path));
    if facts.files.key_denied && (unit.is_some() || facts.daemon.may_run()) {
        let how = match unit {
            Some(_) => format!("{NAME} hands the daemon a copy (LoadCredential=)"),
            None => "the daemon that runs could".to_owned(),
        };
        let problem = format!("this user cannot read it, and need not: {how}");
        return vec![at("not readable".to_owned()).note(problem, facts.service.look())];
    }
    let problems = facts.file.problems.iter().filter(|problem| problem.key_path == KEY_FILE);
    let unusable = problems.map(|problem| {
        let found = Finding::ok(Check::KeyFile, KEY_FILE, "unusable");
        found.error(problem.problem.clone(), problem.remedy.clone())
    });
    let findings: Vec<Finding> = unusable.collect();
    let Found::There { mode, owner, .. } = found else { return findings };
    if !findings.is_empty() {
        return findings;
    }
    let folder = facts.files.key_folder.path.display();
    vec![at(format!("mode {mode:04o}, of user {owner}")).warning_if(
        open_to_all(&facts.files.key_folder.found),
        format!("every user may replace the key: {folder} is writable for all"),
        format!("chmod o-w {folder}"),
    )]
}

/// Whether every user may replace what is in a folder: without the sticky bit, whose files are their owners'.
fn open_to_all(folder: &Found) -> bool {
    match folder {
        Found::There { mode, .. } => mode & 0o1002 == 0o002,
        Found::Unasked | Found::Missing { .. } | Found::Hidden(_) => false,
    }
}

pub(super) fn state_folder(facts: &Facts, config: &Config) -> Finding {
    let NamedPath { path, found } = &facts.files.state;
    if config.state_dir.as_os_str().is_empty() {
        let listens = !config.transport.listen.is_empty() && config.access.knock == Knock::Required;
        let knocks = if listens { "; knocks from before a restart are refused after it" } else { "" };
        return Finding::ok(Check::StateFolder, "identity.state_dir", "none").note(
            format!("peers cannot be added with culvert peer{knocks}"),
            "identity.state_dir = \"/var/lib/culvert\"",
        );
    }
    let shown = path.display();
    let look = facts.service.look();
    let at = |value: &str| Finding::ok(Check::StateFolder, shown.to_string(), value);
    let lost = "peers cannot be added with culvert peer, and used knocks are not kept over a restart";
    match found {
        Found::Unasked | Found::Missing { may_make: true } => at("is made when the agent needs it"),
        Found::Missing { may_make: false } if facts.service.makes(path) => at(&format!("is made by {NAME}")),
        Found::Missing { may_make: false } => {
            at("missing").warning(format!("this user cannot make it: {lost}"), install(facts, path))
        }
        Found::Hidden(error) => at(error)
            .warning(format!("it cannot be looked at; if the daemon's user cannot either, {lost}"), look),
        Found::There { folder: false, .. } => at("no folder").warning(
            format!("something else has its name: {lost}"),
            format!("mv {shown} {shown}.old && {}", install(facts, path)),
        ),
        Found::There { writable: false, owner, .. } => match of_service(facts, path, *owner) {
            Some(whose) => {
                at("not writable").note(format!("this user cannot write there, and need not: {whose}"), look)
            }
            None => at("not writable").warning(lost, give(facts, path)),
        },
        there @ Found::There { mode, .. } if open_to_all(there) => at(&format!("mode {mode:04o}"))
            .warning("every user may add peers of his own", format!("chmod o-w {shown}")),
        Found::There { mode, owner, .. } => at(&format!("mode {mode:04o}, of user {owner}")),
    }
}

pub(super) fn control_folder(facts: &Facts, config: &Config) -> Finding {
    let unreachable = "culvert status, reload and peer cannot reach the daemon";
    let Some(socket) = &config.control else {
        let none = Finding::ok(Check::ControlFolder, "control.socket", "none");
        return none.note(unreachable, format!("control.socket = {:?}", defaults::CONTROL_SOCKET));
    };
    let NamedPath { path, found } = &facts.files.control;
    let shown = path.display();
    let look = facts.service.look();
    let at = |value: &str| Finding::ok(Check::ControlFolder, shown.to_string(), value);
    // At the default path the agent makes the folder, if it may, and else starts without.
    let is_default = socket == Path::new(defaults::CONTROL_SOCKET);
    let (severity, problem) = if is_default {
        (Severity::Warning, unreachable)
    } else {
        (Severity::Error, "the agent does not start")
    };
    match found {
        Found::There { folder: true, mode, owner, writable } => {
            let there = at(&format!("mode {mode:04o}, of user {owner}"));
            if open_to_all(found) {
                let problem = "every user may put a socket of his own in the daemon's place";
                there.warning(problem, format!("chmod o-w {shown}"))
            } else if *writable || facts.daemon.may_run() {
                there
            } else if let Some(whose) = of_service(facts, path, *owner) {
                there.note(format!("this user cannot write there, and need not: {whose}"), look)
            } else {
                there.but(severity, format!("this user cannot write there: {problem}"), give(facts, path))
            }
        }
        Found::Unasked => at("not looked at"),
        Found::Hidden(error) => at(error).note("it cannot be looked at", look),
        Found::Missing { .. } if facts.service.makes(path) => at(&format!("is made by {NAME}")),
        Found::Missing { may_make: true } if is_default => at("is made when the agent starts"),
        Found::Missing { .. } | Found::There { .. } => {
            at("no such folder").but(severity, problem, install(facts, path))
        }
    }
}

/// Why the daemon may write to a folder that is there, although this user may not.
fn of_service(facts: &Facts, folder: &Path, owner: u32) -> Option<String> {
    if facts.service.makes(folder) {
        return Some(format!("{NAME} gives it to the daemon"));
    }
    let account = facts.service.account.as_ref().filter(|_| facts.service.owns(owner))?;
    Some(format!("it belongs to the user {}", account.name))
}

/// The command that makes a folder of the daemon's: its user's, where a service has one and this user is not another.
fn install(facts: &Facts, folder: &Path) -> String {
    let user = facts.limits.user;
    let account = facts.service.account.as_ref().filter(|account| user == 0 || account.user == user);
    let whose = account.map_or(String::new(), |account| format!("-o {0} -g {0} ", account.name));
    format!("install -d -m 0700 {whose}{}", folder.display())
}

/// The command that gives a folder to the daemon's user.
fn give(facts: &Facts, folder: &Path) -> String {
    let user = facts.service.account.as_ref().map_or("USER", |account| &account.name);
    format!("chown {user}: {}, or {}", folder.display(), facts.service.look())
}

/// The daemon that runs with this configuration.
pub(super) fn daemon(facts: &Facts) -> Option<Finding> {
    let at = |value: &str| Finding::ok(Check::Daemon, "daemon", value);
    Some(match &facts.daemon {
        Daemon::Unasked => return None,
        Daemon::Absent => at("does not run"),
        Daemon::Running(status) => programs::daemon(facts, status),
        Daemon::Mute(why) => at("seems to run").note(
            format!("it cannot be asked, so that its peers are neither looked at nor dialled: {why}"),
            facts.service.look(),
        ),
    })
}

/// A message of ours that ends with "(remedy: …)", in its two parts.
pub(super) fn split(message: &str) -> (String, String) {
    match message.strip_suffix(')').and_then(|message| message.split_once(" (remedy: ")) {
        Some((problem, remedy)) => (problem.to_owned(), remedy.to_owned()),
        None => (message.to_owned(), "see docs/operations.md".to_owned()),
    }
}

//! The configuration, the files and folders that it names, and the daemon that runs with it (pure).

use std::path::Path;

use config::{Config, Knock, defaults};

use super::{
    Check, Finding, Severity,
    facts::{Daemon, Facts, Found, Place},
    unit::NAME,
};

/// Whose problems are those of the key's file.
const KEY_FILE: &str = "identity.key_file";

/// The configuration as a whole, and the private key, which is read together with it.
pub(super) fn configuration(facts: &Facts) -> Vec<Finding> {
    let file = &facts.file;
    let check = Check::Configuration;
    let Some(path) = &file.path else {
        let none = Finding::ok(check, "configuration", "none");
        let remedy = "culvert doctor --config FILE";
        return vec![none.but(Severity::Note, "only the host was looked at", remedy)];
    };
    let shown = path.display().to_string();
    if let Some(error) = &file.unreadable {
        let (problem, mut remedy) = split(error);
        if file.denied && facts.service.account.is_some() {
            facts.service.look().clone_into(&mut remedy);
        }
        return vec![Finding::ok(check, shown, "unreadable").but(Severity::Error, problem, remedy)];
    }
    let mut findings = Vec::new();
    for (severity, list) in [(Severity::Error, &file.problems), (Severity::Note, &file.notes)] {
        for problem in list.iter().filter(|problem| problem.key_path != KEY_FILE) {
            let at = Finding::ok(check, problem.place(path), problem.key_path.clone());
            findings.push(at.but(severity, problem.problem.clone(), problem.remedy.clone()));
        }
    }
    if file.problems.is_empty() {
        findings.insert(0, Finding::ok(check, shown, "valid"));
    }
    findings.extend(key_file(facts));
    findings
}

fn key_file(facts: &Facts) -> Vec<Finding> {
    let check = Check::KeyFile;
    let Place { path, found } = &facts.files.key;
    let mut problems = facts.file.problems.iter().filter(|problem| problem.key_path == KEY_FILE).peekable();
    let unit = facts.service.unit.as_ref().filter(|unit| unit.hands_over(path));
    if facts.files.key_denied && (unit.is_some() || facts.daemon.may_run()) {
        let how = match unit {
            Some(_) => format!("{NAME} hands the daemon a copy (LoadCredential=)"),
            None => "the daemon that runs could".to_owned(),
        };
        let unread = Finding::ok(check, path.display().to_string(), "not readable");
        return vec![unread.but(
            Severity::Note,
            format!("this user cannot read it, and need not: {how}"),
            facts.service.look(),
        )];
    }
    if problems.peek().is_some() {
        let failed = |problem: &config::ConfigProblem| {
            let at = Finding::ok(check, KEY_FILE, "unusable");
            at.but(Severity::Error, problem.problem.clone(), problem.remedy.clone())
        };
        return problems.map(failed).collect();
    }
    let Found::There { mode, owner, .. } = found else { return Vec::new() };
    let fine = Finding::ok(check, path.display().to_string(), format!("mode {mode:04o}, of user {owner}"));
    let folder = &facts.files.key_folder;
    vec![if open_to_all(&folder.found) {
        let folder = folder.path.display();
        let problem = format!("every user may replace the key: {folder} is writable for all");
        fine.but(Severity::Warning, problem, format!("chmod o-w {folder}"))
    } else {
        fine
    }]
}

/// Whether every user may replace what is in a folder: without the sticky bit, whose files are their owners'.
fn open_to_all(folder: &Found) -> bool {
    match folder {
        Found::There { mode, .. } => mode & 0o1002 == 0o002,
        Found::Unasked | Found::Missing { .. } | Found::Hidden(_) => false,
    }
}

/// The state folder and that of the control socket.
pub(super) fn folders(facts: &Facts, config: &Config) -> Vec<Finding> {
    vec![state_folder(facts, config), control_folder(facts, config)]
}

fn state_folder(facts: &Facts, config: &Config) -> Finding {
    let check = Check::StateFolder;
    let Place { path, found } = &facts.files.state;
    if config.state_dir.as_os_str().is_empty() {
        let none = Finding::ok(check, "identity.state_dir", "none");
        let listens = !config.transport.listen.is_empty() && config.access.knock == Knock::Required;
        let knocks = if listens { "; knocks from before a restart are refused after it" } else { "" };
        let problem = format!("peers cannot be added with culvert peer{knocks}");
        return none.but(Severity::Note, problem, "identity.state_dir = \"/var/lib/culvert\"");
    }
    let shown = path.display();
    let at = |value: String| Finding::ok(check, shown.to_string(), value);
    let lost = "peers cannot be added with culvert peer, and used knocks are not kept over a restart";
    match found {
        Found::Unasked | Found::Missing { may_make: true } => {
            at("is made when the agent needs it".to_owned())
        }
        Found::Missing { may_make: false } if facts.service.makes(path) => at(format!("is made by {NAME}")),
        Found::Missing { may_make: false } => at("missing".to_owned()).but(
            Severity::Warning,
            format!("this user cannot make it: {lost}"),
            install(facts, path),
        ),
        Found::Hidden(error) => at(error.clone()).but(
            Severity::Warning,
            format!("it cannot be looked at; if the daemon's user cannot either, {lost}"),
            facts.service.look(),
        ),
        Found::There { folder: false, .. } => at("no folder".to_owned()).but(
            Severity::Warning,
            format!("something else has its name: {lost}"),
            format!("mv {shown} {shown}.old && {}", install(facts, path)),
        ),
        Found::There { writable: false, owner, .. } => match of_service(facts, path, *owner) {
            Some(whose) => at("not writable".to_owned()).but(
                Severity::Note,
                format!("this user cannot write there, and need not: {whose}"),
                facts.service.look(),
            ),
            None => at("not writable".to_owned()).but(Severity::Warning, lost, give(facts, path)),
        },
        there @ Found::There { mode, .. } if open_to_all(there) => at(format!("mode {mode:04o}")).but(
            Severity::Warning,
            "every user may add peers of his own",
            format!("chmod o-w {shown}"),
        ),
        Found::There { mode, owner, .. } => at(format!("mode {mode:04o}, of user {owner}")),
    }
}

fn control_folder(facts: &Facts, config: &Config) -> Finding {
    let check = Check::ControlFolder;
    let Some(socket) = &config.control else {
        let none = Finding::ok(check, "control.socket", "none");
        let problem = "culvert status, reload and peer cannot reach the daemon";
        let remedy = format!("control.socket = {:?}", defaults::CONTROL_SOCKET);
        return none.but(Severity::Note, problem, remedy);
    };
    let Place { path, found } = &facts.files.control;
    let shown = path.display();
    let at = |value: String| Finding::ok(check, shown.to_string(), value);
    // At the default path the agent makes the folder, if it may, and else starts without.
    let is_default = socket == Path::new(defaults::CONTROL_SOCKET);
    let (severity, problem) = if is_default {
        (Severity::Warning, "culvert status, reload and peer cannot reach the daemon")
    } else {
        (Severity::Error, "the agent does not start")
    };
    match found {
        Found::There { folder: true, mode, owner, writable } => {
            let there = at(format!("mode {mode:04o}, of user {owner}"));
            if open_to_all(found) {
                let problem = "every user may put a socket of his own in the daemon's place";
                there.but(Severity::Warning, problem, format!("chmod o-w {shown}"))
            } else if *writable || facts.daemon.may_run() {
                there
            } else if let Some(whose) = of_service(facts, path, *owner) {
                let problem = format!("this user cannot write there, and need not: {whose}");
                there.but(Severity::Note, problem, facts.service.look())
            } else {
                there.but(severity, format!("this user cannot write there: {problem}"), give(facts, path))
            }
        }
        Found::Unasked => at("not looked at".to_owned()),
        Found::Hidden(error) => {
            at(error.clone()).but(Severity::Note, "it cannot be looked at", facts.service.look())
        }
        Found::Missing { .. } if facts.service.makes(path) => at(format!("is made by {NAME}")),
        Found::Missing { may_make: true } if is_default => at("is made when the agent starts".to_owned()),
        Found::Missing { .. } | Found::There { .. } => {
            at("no such folder".to_owned()).but(severity, problem, install(facts, path))
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
pub(super) fn daemon(facts: &Facts) -> Vec<Finding> {
    let check = Check::Daemon;
    let ours = env!("CARGO_PKG_VERSION");
    vec![match &facts.daemon {
        Daemon::Unasked => return Vec::new(),
        Daemon::Absent => Finding::ok(check, "daemon", "does not run"),
        Daemon::Running(status) => {
            let running = Finding::ok(check, "daemon", format!("runs, version {}", status.software));
            if status.software == ours {
                running
            } else {
                let problem = format!("another version than that of this command, {ours}");
                running.but(Severity::Note, problem, "systemctl restart culvert")
            }
        }
        Daemon::Mute(why) => Finding::ok(check, "daemon", "seems to run").but(
            Severity::Note,
            format!("it cannot be asked, so that its peers are neither looked at nor dialled: {why}"),
            facts.service.look(),
        ),
    }]
}

/// A message of ours that ends with "(remedy: …)", in its two parts.
pub(super) fn split(message: &str) -> (String, String) {
    match message.strip_suffix(')').and_then(|message| message.split_once(" (remedy: ")) {
        Some((problem, remedy)) => (problem.to_owned(), remedy.to_owned()),
        None => (message.to_owned(), "see docs/operations.md".to_owned()),
    }
}

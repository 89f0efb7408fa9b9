//! `culvert reload`

use std::fmt::Display;

use anyhow::Context as _;
use clap::Args;
use config::{Config, reload::Effect};
use net::process;
use ops::control_socket::protocol::{Answer, Request, ShownChange, VERSION};
use serde_json::json;

use super::{
    Failure,
    reach::{Reach, Reached, not_running, unexpected},
};
use crate::out;

/// Make the running daemon follow its changed configuration, without losing flows
///
/// What the daemon reads is the file that it was started with. If that is wrong, nothing changes. What only a restart can
/// change keeps its old value until then, and is shown.
#[derive(Debug, Args)]
pub(super) struct Reload {
    #[command(flatten)]
    reach: Reach,
    /// Only show what would change
    #[arg(long)]
    dry_run: bool,
    /// One JSON object, as docs/status.md describes it
    #[arg(long, conflicts_with = "main_pid")]
    json: bool,
    /// The daemon's process, to be asked by SIGHUP where none answers at the control socket
    #[arg(long, value_name = "PID", hide = true, value_parser = clap::value_parser!(i32).range(2..))]
    main_pid: Option<i32>,
}

impl Reload {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let (changes, notes) = match self.reach.ask(&Request::Reload { dry_run: self.dry_run }) {
            Ok(Reached::Answer(Answer::Reloaded { changes, notes })) => (changes, notes),
            Ok(Reached::Answer(_)) => return Err(unexpected()),
            // The daemon has been told, and its log says the same as is said here.
            Ok(Reached::Offline(offline)) if self.by_signal(&offline)? => {
                // Its key is left to the daemon: systemd may hand it to nobody else.
                return Config::check_without_key(&offline.file).map_err(Failure::from);
            }
            Err(Failure::Config(error)) if self.by_signal(&error)? => return Err(Failure::Config(error)),
            Ok(Reached::Offline(offline)) => {
                // A file that is wrong may name another socket than the daemon has.
                if let Err(error) = Config::load(&offline.file) {
                    out::complain(&error);
                    return Err(Failure::Input(format!(
                        "{offline}; a file that is wrong does not say where the daemon's socket is (remedy: correct the above, or \
                         name the socket with --socket)"
                    )));
                }
                return Err(not_running(&offline));
            }
            Err(Failure::Input(problems)) => {
                // As `culvert check` prints them: one line each, with the file first.
                out::complain(&problems);
                let rest = "nothing has changed: the daemon goes on with the configuration that it has (remedy: correct \
                            the above, and reload again)";
                return Err(Failure::Input(rest.to_owned()));
            }
            Err(failure) => return Err(failure),
        };
        if self.json {
            let answer =
                json!({ "version": VERSION, "dry_run": self.dry_run, "changes": changes, "notes": notes });
            return Ok(out::say(&answer)?);
        }
        Ok(out::say(&shown(&changes, &notes, self.dry_run).trim_end())?)
    }

    /// The unit's `ExecReload` names the daemon's process: there is a way to it that needs neither its socket nor a file that
    /// can be read. True if it was taken, for the reason `why`.
    fn by_signal(&self, why: &dyn Display) -> Result<bool, Failure> {
        let Some(pid) = self.main_pid.filter(|_| !self.dry_run) else { return Ok(false) };
        process::hang_up(pid).with_context(|| format!("{why}; and process {pid} takes no SIGHUP"))?;
        out::complain(&format_args!(
            "culvert: {why}: asked the service's process {pid} by SIGHUP; its log says what changed, or what is wrong"
        ));
        Ok(true)
    }
}

/// The difference for people: what is in effect, what will be, and what an operator has to do.
pub(super) fn shown(changes: &[ShownChange], notes: &[String], dry_run: bool) -> String {
    let mut text = String::new();
    for effect in [Effect::Now, Effect::NextConnection, Effect::Restart] {
        let lines: Vec<String> =
            changes.iter().filter(|change| change.effect == effect.label()).map(line).collect();
        if !lines.is_empty() {
            text += heading(effect, dry_run);
            text += &format!("\n{}\n", lines.join("\n"));
        }
    }
    if changes.is_empty() {
        text += "nothing has changed\n";
    }
    for note in notes {
        text += &format!("note: {note}\n");
    }
    text
}

fn heading(effect: Effect, dry_run: bool) -> &'static str {
    match (effect, dry_run) {
        (Effect::Now, false) => "In effect now:",
        (Effect::Now, true) => "A reload would put into effect:",
        (Effect::NextConnection, false) => "In effect with the next connection with the peer:",
        (Effect::NextConnection, true) => "It would put into effect with the next connection with the peer:",
        (Effect::Restart, _) => "Not in effect before a restart (systemctl restart culvert):",
    }
}

/// `+` what is new, `-` what is gone, `~` what is different.
fn line(change: &ShownChange) -> String {
    let ShownChange { what, kind: _, from, to, effect: _ } = change;
    match (from, to) {
        (Some(from), Some(to)) => format!("  ~ {what}: {from} -> {to}"),
        (None, Some(to)) => format!("  + {what}: {to}"),
        (Some(from), None) => format!("  - {what}: {from}"),
        (None, None) => format!("  ~ {what}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::reload::{Change, Kind};

    #[test]
    fn the_difference_is_shown_by_when_it_is_in_effect() {
        let change =
            |what: &str, kind, effect| ShownChange::from(&Change { what: what.to_owned(), kind, effect });
        let text = |text: &str| text.to_owned();
        let changes = [
            change("transport.workers", Kind::Changed(text("0"), text("2")), Effect::Restart),
            change("peer \"exit\": lanes", Kind::Changed(text("1"), text("4")), Effect::NextConnection),
            change("service \"dns\"", Kind::Removed(text("127.0.0.1:53")), Effect::Now),
            change("service \"ntp\"", Kind::Added(text("127.0.0.1:123")), Effect::Now),
        ];
        let notes = [text("agent.toml:3: udp[0].peer: a note")];
        assert_eq!(
            shown(&changes, &notes, false),
            "In effect now:\n  - service \"dns\": 127.0.0.1:53\n  + service \"ntp\": 127.0.0.1:123\n\
             In effect with the next connection with the peer:\n  ~ peer \"exit\": lanes: 1 -> 4\n\
             Not in effect before a restart (systemctl restart culvert):\n  ~ transport.workers: 0 -> 2\n\
             note: agent.toml:3: udp[0].peer: a note\n"
        );
        assert!(shown(&changes[2..], &[], true).starts_with("A reload would put into effect:\n  - service"));
        assert_eq!(shown(&[], &[], false), "nothing has changed\n");
    }
}

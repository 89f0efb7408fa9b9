//! `culvert init`: a key, a commented configuration, and what to type next.
//!
//! | question | file |
//! |---|---|
//! | in which order things happen | this one |
//! | which options there are | `options.rs` |
//! | what the options mean together, and what the host adds to them | `plan.rs` |
//! | what the configuration looks like | `template.rs` |
//! | what the host knows | `host.rs` |
//! | how files are written: all of them or none | `files.rs` |
//! | what the operator is told to do next | `next.rs` |
//! | what other commands need of this | `beside.rs` |
//! | how the service is started | `now.rs` |

use std::path::Path;

use config::Config;
use gate::identity::{Identity, IdentityError, SecretError};

use super::{Failure, keygen::with_remedy};
use crate::out;

pub(super) mod beside;
mod files;
mod host;
mod next;
mod now;
mod options;
mod plan;
mod template;
#[cfg(test)]
mod tests;

use files::{New, folder_of};
use host::Facts;
pub(super) use options::Init;
use options::KEY_FILE;
use plan::Plan;

/// The key at `file`, or a new one where none is; true if it is new.
fn identity(file: &Path) -> Result<(Identity, bool), Failure> {
    match Identity::load(file) {
        Ok(identity) => Ok((identity, false)),
        Err(IdentityError::Secret(SecretError::Missing(_))) => {
            Ok((Identity::generate().map_err(with_remedy)?, true))
        }
        Err(error) => Err(with_remedy(error).into()),
    }
}

impl Init {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let facts = Facts::gather(&self.config);
        let plan = Plan::new(&self, &facts).map_err(|problem| Failure::Input(problem.to_string()))?;
        files::is_free(&self.config).map_err(anyhow::Error::from)?;
        let folder = folder_of(&self.config);
        let key_file = folder.join(KEY_FILE);
        let (identity, made) = identity(&key_file)?;
        if plan.peer.as_ref().is_some_and(|link| link.key == identity.public_key()) {
            return Err(Failure::Input(format!(
                "--peer is the link of this host itself, by the key in {} (remedy: give the link of the exit)",
                key_file.display()
            )));
        }
        let text = template::render(&plan);
        let config = Config::parse(&text, folder).map_err(|problems| {
            let lines = problems.problems.iter().map(ToString::to_string).collect::<Vec<_>>();
            Failure::Input(format!("that makes no configuration; nothing was written: {}", lines.join("; ")))
        })?;
        let key = made.then_some((key_file.as_path(), &identity));
        files::write(&New { config: &self.config, text: &text, key, group: facts.group })
            .map_err(anyhow::Error::from)?;
        let key_what = if made { "wrote" } else { "kept " };
        out::say(&format_args!(
            "{key_what} {}: the private key; keep a copy, show it to nobody",
            key_file.display()
        ))?;
        out::say(&format_args!("wrote {}: the configuration", self.config.display()))?;
        for note in plan.notes.iter().cloned().chain(host::clashes(&config, &facts)) {
            out::complain(&format_args!("note: {note}"));
        }
        let steps = next::Steps {
            plan: &plan,
            config: &config,
            key: identity.public_key(),
            file: &self.config,
            facts: &facts,
            now: self.now,
        };
        out::say(&steps.text()?)?;
        match (self.now, facts.no_service) {
            (false, _) => Ok(()),
            (true, None) => Ok(now::start()?),
            (true, Some(why)) => {
                let remedy = now::instead();
                out::complain(&format_args!(
                    "note: --now: nothing was started or enabled: {why} (remedy: {remedy})"
                ));
                Ok(())
            }
        }
    }
}

//! Users: listing them, and changing those of the state file.

use config::{
    NewUser, PeerOrigin, User,
    export::user_toml,
    state::{self, Edit, PeerChange, StateError},
};
use serde::{Deserialize, Serialize};

use super::{RequestHandler, failed, protocol::Answer, wrong};
use crate::{control_socket::protocol::ShownChange, state_file};

/// A user in the answer to a request for the list of users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedUser {
    pub name: String,
    /// "config" or "state": which file it stands in.
    pub origin: String,
    /// The keys of the file that say what it is let in with.
    #[serde(default)]
    pub credentials: Vec<String>,
    /// The names of our services that it may reach.
    pub services: Vec<String>,
    pub networks: Vec<String>,
    /// Its own inner addresses.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// What may pass in each direction; `None`: as much as there is time for.
    #[serde(default)]
    pub rate_bits_per_second: Option<u64>,
    /// Seconds since the Unix epoch; `None`: never.
    pub expires: Option<u64>,
    pub disabled: bool,
}

impl ListedUser {
    /// A user of `config`.
    #[must_use]
    pub fn new(user: &User, config: &config::Config) -> Self {
        let service = |place: &usize| Some(config.services.get(*place)?.name.to_string());
        Self {
            name: user.name.to_string(),
            origin: user.origin.label().to_owned(),
            credentials: user.credentials().map(str::to_owned).collect(),
            services: user.services.iter().filter_map(service).collect(),
            networks: user.networks.iter().map(ToString::to_string).collect(),
            addresses: user.addresses.iter().map(ToString::to_string).collect(),
            rate_bits_per_second: user.rate,
            expires: user.expires,
            disabled: user.disabled,
        }
    }
}

/// Why a user of the configuration is not changed here; `None` if no such user stands there.
#[must_use]
pub fn of_configuration(config: &config::Config, name: &str) -> Option<String> {
    let is_it = |user: &&User| *user.name == *name && user.origin == PeerOrigin::Config;
    config.users.iter().find(is_it)?;
    Some(format!(
        "{name:?} stands in the configuration, which only its author changes (remedy: change it there, then culvert reload)"
    ))
}

impl RequestHandler {
    pub(super) fn users(&self) -> Answer {
        let config = self.peers.config();
        Answer::Users { users: config.users.iter().map(|user| ListedUser::new(user, &config)).collect() }
    }

    pub(super) fn add_user(&self, new: &NewUser) -> Result<Answer, Answer> {
        self.change_users(&new.name, |edit| edit.add_user(new))
    }

    pub(super) fn set_user(&self, change: &PeerChange) -> Result<Answer, Answer> {
        self.change_users(&change.name, |edit| edit.set_user(change))
    }

    /// The user is shut out before the file is written: a full disk must not keep a stolen password alive.
    pub(super) fn remove_user(&self, name: &str) -> Result<Answer, Answer> {
        let _one_at_a_time = self.peers.one_at_a_time();
        let config = self.peers.config();
        if let Some(refusal) = of_configuration(&config, name) {
            return Err(wrong(refusal));
        }
        let mut users = config.users.clone();
        users.retain(|user| *user.name != *name);
        let known = users.len() < config.users.len();
        let changes = self.peers.change_users(users, false).map_err(failed)?;
        let kept = self.edit().and_then(|mut edit| {
            let found = edit.remove_user(name)?;
            if found { state_file::commit(edit).map(|()| true) } else { Ok(false) }
        });
        match kept {
            Ok(found) if found || known => {
                tracing::info!(user = name, "a user was removed through the control socket");
                let changes = changes.iter().map(ShownChange::from).collect();
                Ok(Answer::Reloaded { changes, notes: Vec::new() })
            }
            Ok(_) => Err(wrong(format!("no user is named {name:?} (remedy: see culvert user list)"))),
            Err(error) => Err(failed(format!(
                "the user is shut out, but still in the state file: a reload or a restart lets it in again: {error}"
            ))),
        }
    }

    /// The `[[user]]` of one user, or of all, as a file has it.
    pub(super) fn export_users(&self, name: Option<&str>) -> Result<Answer, Answer> {
        let config = self.peers.config();
        exported(&config, name).map(|text| Answer::Exported { text }).map_err(wrong)
    }

    /// The state file is written before the change is in effect, and only if it can be.
    fn change_users(
        &self,
        name: &str,
        change: impl FnOnce(&mut Edit) -> Result<(), StateError>,
    ) -> Result<Answer, Answer> {
        let _one_at_a_time = self.peers.one_at_a_time();
        let config = self.peers.config();
        if let Some(refusal) = of_configuration(&config, name) {
            return Err(wrong(refusal));
        }
        let mut edit = self.edit().map_err(failed)?;
        change(&mut edit).map_err(refused)?;
        let users = state::users(&config, edit.text()).map_err(wrong)?;
        self.peers.change_users(users.clone(), true).map_err(failed)?;
        state_file::commit(edit).map_err(failed)?;
        let changes = self.peers.change_users(users, false).map_err(|error| {
            failed(format!("the change is in the state file, and not in effect before a reload: {error}"))
        })?;
        tracing::info!(user = name, "a user was changed through the control socket");
        Ok(Answer::Reloaded { changes: changes.iter().map(ShownChange::from).collect(), notes: Vec::new() })
    }
}

/// The text of the user `name`, or of all.
///
/// # Errors
/// No user has that name.
pub fn exported(config: &config::Config, name: Option<&str>) -> Result<String, String> {
    let wanted = |user: &&User| name.is_none_or(|name| *user.name == *name);
    let users: Vec<&User> = config.users.iter().filter(wanted).collect();
    match name {
        Some(name) if users.is_empty() => {
            Err(format!("no user is named {name:?} (remedy: see culvert user list)"))
        }
        Some(_) | None => {
            let texts = users.into_iter().map(|user| user_toml(user, &config.services));
            Ok(texts.collect::<Vec<_>>().join("\n"))
        }
    }
}

fn refused(error: StateError) -> Answer {
    match error {
        StateError::NoUser { .. } | StateError::UserExists { .. } | StateError::NotThere { .. } => {
            wrong(error)
        }
        StateError::NoPeer { .. }
        | StateError::Exists { .. }
        | StateError::Nowhere
        | StateError::Unusable { .. }
        | StateError::Busy { .. }
        | StateError::Broken { .. } => failed(error),
    }
}

//! The users of the state file.

use std::sync::Arc;

use toml::{Table, Value};

use super::{Edit, PeerChange, StateError, is_named, render};
use crate::{
    Config, ConfigProblems, NewUser, User,
    checks::Checks,
    problem::{At, PeerOrigin},
    section,
};

/// The users of `config`, but those of the state file as its text `state` has them.
///
/// # Errors
/// Everything that is wrong with those.
pub fn users(config: &Config, state: &str) -> Result<Vec<User>, ConfigProblems> {
    let services = &config.services;
    let mut checks = Checks {
        services: services.iter().map(|service| Arc::clone(&service.name)).collect(),
        any: (0..services.len()).filter(|index| services[*index].is_any()).collect(),
        ..Checks::default()
    };
    let mut users = config.users.clone();
    users.retain(|user| user.origin == PeerOrigin::Config);
    let entries = section::parse(state, &At::file(PeerOrigin::State), &mut checks.report);
    let mut root = section::Table::new(At::file(PeerOrigin::State), entries.as_ref());
    let tables = root.tables("user", &mut checks.report);
    checks.read_users(tables, &mut users);
    checks.inner_addresses(&users, &config.http, config.tun.as_ref(), &[], &root.at);
    let (problems, _) = checks.report.into_parts();
    if problems.is_empty() { Ok(users) } else { Err(ConfigProblems { file: None, problems }) }
}

impl Edit {
    /// Appends the user `new`; the outcome is to be checked.
    ///
    /// # Errors
    /// The file is no TOML, or has a user of that name.
    pub fn add_user(&mut self, new: &NewUser) -> Result<(), StateError> {
        let mut state = self.parse()?;
        let users = state.entry("user").or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(users) = users {
            if users.iter().any(|user| is_named(user, &new.name)) {
                return Err(StateError::UserExists { path: self.path.clone(), name: new.name.clone() });
            }
            users.push(to_table(new).into());
        }
        self.text = render(&state);
        Ok(())
    }

    /// Changes a user of the file; the outcome is to be checked.
    ///
    /// # Errors
    /// The file is no TOML, has no such user, or a list of the user has not what is to be taken out.
    pub fn set_user(&mut self, change: &PeerChange) -> Result<(), StateError> {
        let mut state = self.parse()?;
        let users = state.get_mut("user").and_then(Value::as_array_mut).into_iter().flatten();
        let user = users.filter(|user| is_named(user, &change.name)).find_map(Value::as_table_mut);
        let no_user = || StateError::NoUser { path: self.path.clone(), name: change.name.clone() };
        change.apply(user.ok_or_else(no_user)?)?;
        self.text = render(&state);
        Ok(())
    }

    /// Takes out the user `name`, and says whether it was there.
    ///
    /// # Errors
    /// The file is no TOML.
    pub fn remove_user(&mut self, name: &str) -> Result<bool, StateError> {
        let mut state = self.parse()?;
        let Some(Value::Array(users)) = state.get_mut("user") else { return Ok(false) };
        let before = users.len();
        users.retain(|user| !is_named(user, name));
        let found = users.len() < before;
        if users.is_empty() {
            state.remove("user");
        }
        self.text = render(&state);
        Ok(found)
    }
}

fn to_table(new: &NewUser) -> Table {
    Table::try_from(new).expect("texts, lists of texts and a truth value are TOML")
}

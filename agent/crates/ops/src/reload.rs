//! A reload of the running daemon: the configuration is read again, and what can change while it runs does.
//!
//! ```text
//!   read and check ─► plan ─► ports opened ─► registry revised ─► workers told ─► shown to everybody who asks
//!   └──────── an error up to here changes nothing ────────┘
//! ```

use std::{
    path::Path,
    sync::{Arc, PoisonError},
};

use base::{
    fault::{self, Fault},
    panics::Critical,
};
use config::{
    self, Config, Http,
    reload::{Change, Effect, Kind, Plan, plan_beside, plan_peer, plan_users},
    state::{self, Edit},
};
use dataplane::sockets::more_ports;
use engine::{follow::follow, registry::RegistryError, tunnel};
use gate::web::WebCertificate;
use net::ports::{self, PortError, Ports};

use crate::{
    control_socket::Reloaded,
    descriptors, log,
    metrics::{self, CertificateRead},
    operator::Running,
    state_file,
};

pub use crate::reload_error::ReloadError;

impl Running {
    /// Reads the configuration again and follows it; with `dry_run`, only says what that would do.
    ///
    /// # Errors
    /// What is wrong; nothing has changed then.
    pub fn reload_now(&self, dry_run: bool) -> Result<Reloaded, ReloadError> {
        let _one_at_a_time = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let reloaded = self.try_reload(dry_run);
        if !dry_run {
            if reloaded.is_ok() {
                let config = self.config.load();
                self.metrics.configured(&config.limits, self.clock.unix_time());
                self.metrics.peer_files(&config.directory);
            }
            self.metrics.reloaded(match &reloaded {
                Ok(_) => metrics::Reload::Done,
                Err(error) if error.is_bad_input() => metrics::Reload::Refused,
                Err(_) => metrics::Reload::Failed,
            });
            log_outcome(&reloaded);
        }
        reloaded
    }

    fn try_reload(&self, dry_run: bool) -> Result<Reloaded, ReloadError> {
        let running = self.config.load_full();
        let path = running.path.as_ref().ok_or(ReloadError::NoFile)?;
        let (fresh, identity) = Config::load_beside(path, Some(&running))?;
        fault::point(Fault::Reload);
        // What is said of twins is what becomes of them here.
        let is_of_twin = |note: &&config::ConfigProblem| {
            fresh.twins.iter().any(|name| note.problem.starts_with(&format!("{name:?} is also a [[peer]]")))
        };
        let said = fresh.notes.iter().filter(|note| !is_of_twin(note));
        let mut notes: Vec<String> = said.map(|note| format!("{}: {note}", note.place(path))).collect();
        let wrong = fresh.directory.rejected.iter();
        notes.extend(
            wrong.map(|problem| format!("{}: {problem}: the file was left out", problem.place(path))),
        );
        if identity.public_key() != self.own_key {
            notes.push(format!(
                "{} holds another key: it is used from the next start of the daemon on",
                fresh.identity_key_file.display()
            ));
        }
        let kept_out = self.registry.kept_out(&fresh.peers);
        let twins = fresh.twins.clone();
        let state_file = fresh.state_dir.join(state::FILE_NAME);
        let live = self.live_peers();
        let of_state = live.iter().filter(|peer| peer.origin == config::PeerOrigin::State).count()
            + running.users.iter().filter(|user| user.origin == config::PeerOrigin::State).count();
        let has_state = of_state == 0 || state_file.exists();
        if !has_state {
            notes.push(format!(
                "{} is not there: its {of_state} peers and users are left as they are (remedy: restore it, or write an empty file to remove \
                 them)",
                state_file.display()
            ));
        }
        let mut plan = plan_beside(&running, &live, fresh, has_state);
        // What is said of a peer that is kept out has no effect.
        plan.changes.retain(|change| {
            let of = |name: &Arc<str>| change.what.starts_with(&format!("peer \"{name}\""));
            !kept_out.iter().any(of)
        });
        notes.extend(kept_out.iter().map(|name| {
            format!(
                "{name:?} stays shut out until the next start: it was removed with culvert peer (remedy: take its [[peer]] out \
                 of its file and reload, or restart the daemon to let it in again)"
            )
        }));
        let mut changes = self.follow_plan(&running, plan, dry_run)?;
        for name in &twins {
            let left = if dry_run { Ok(()) } else { leave_to_configuration(&state_file, name) };
            match left {
                Ok(()) => {
                    let kind = Kind::Removed(format!("peer \"{name}\""));
                    changes.push(Change {
                        what: state_file.display().to_string(),
                        kind,
                        effect: Effect::Now,
                    });
                    notes.push(format!(
                        "{name:?} stands in the configuration and in {}: the [[peer]] of the configuration counts, the other one {} \
                         taken out, and the session goes on",
                        state_file.display(),
                        if dry_run { "would be" } else { "was" }
                    ));
                }
                Err(note) => notes.push(note),
            }
        }
        Ok(Reloaded { changes, notes })
    }

    /// Changes a peer of the state file as a reload would, while everything else goes on as it runs; with `dry_run`, only says what
    /// that would do. The caller holds the lock of changes.
    ///
    /// # Errors
    /// Why it cannot be; nothing has changed then.
    pub(crate) fn change_peer(&self, peer: config::Peer, dry_run: bool) -> Result<Vec<Change>, ReloadError> {
        let running = self.config.load_full();
        let live = self.live_peers();
        let Some(old) = live.iter().find(|old| old.name == peer.name) else {
            return Err(RegistryError::Unknown(peer.name).into());
        };
        self.follow_plan(&running, plan_peer(&running, old, peer), dry_run)
    }

    /// Has these users instead of those that run; with `dry_run`, only says what that would do. The caller holds the lock of changes.
    ///
    /// # Errors
    /// Why it cannot be; nothing has changed then.
    pub(crate) fn follow_users(
        &self,
        users: Vec<config::User>,
        dry_run: bool,
    ) -> Result<Vec<Change>, ReloadError> {
        let running = self.config.load_full();
        self.follow_plan(&running, plan_users(&running, users), dry_run)
    }

    /// The peers of both files that run.
    fn live_peers(&self) -> Vec<config::Peer> {
        let listed = self.registry.list().into_iter();
        let of_files = listed.filter(|listed| listed.origin != engine::origin::PeerOrigin::Open);
        of_files.map(|listed| config::Peer::clone(&listed.peer)).collect()
    }

    /// Follows `plan`; with `dry_run`, only says whether that can be done.
    fn follow_plan(
        &self,
        running: &Config,
        mut plan: Plan,
        dry_run: bool,
    ) -> Result<Vec<Change>, ReloadError> {
        let changes = std::mem::take(&mut plan.changes);
        let Some(config) = plan.config.take() else { return Ok(changes) };
        if let Some(tun) = &config.tun {
            for peer in plan.changed.iter().chain(&plan.added) {
                tunnel::routes_are_free(tun, &peer.allowed_ips)?;
            }
        }
        let shares = self.open(&config, &plan)?;
        let web_sockets = self.web_server.open(&config)?;
        let admin = self.admin.open(&config.admin)?;
        if dry_run {
            self.registry.would_take(&config, &plan)?;
            return Ok(changes);
        }
        let _whole = Critical::begin();
        let config = follow(config, &plan, &self.registry, &self.hub, shares)?;
        if config.descriptors() > running.descriptors() {
            let granted = descriptors::raise_descriptor_limit(&config);
            self.hub
                .set_sockets(granted.map_or(0, |granted| descriptors::sockets_for_flows(&config, granted)));
        }
        log::set_level(config.log.level);
        self.web_server.follow(Arc::clone(&config), web_sockets);
        self.admin.follow(&config.admin, admin);
        self.config.store(config);
        self.show_certificate();
        Ok(changes)
    }

    /// Tells the metrics when the certificate of the web server ends.
    pub fn show_certificate(&self) {
        let end = self.config.load().certificate.as_ref().map_or(0, WebCertificate::expires);
        self.metrics.visitors.set_certificate_end(end);
    }

    /// Reads the certificate of the web server again, whose files have changed, and shows it from the next handshake on. A pair that
    /// cannot be used, or lacks one of the names, changes nothing.
    pub fn renew_certificate(&self) {
        let _one_at_a_time = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let running = self.config.load_full();
        let Some(shown) = &running.certificate else { return };
        let Http { certificate_file, key_file, names, .. } = &running.http;
        let renewed = WebCertificate::load(certificate_file, key_file)
            .map_err(|error| (error.to_string(), error.remedy()))
            .and_then(|renewed| match names.iter().find(|name| !renewed.covers(name)) {
                Some(name) => Err((
                    format!("it is not for {name:?}"),
                    "have the certificate made for all of http.names",
                )),
                None => Ok(renewed),
            });
        let outcome = match renewed {
            Ok(renewed) if renewed == *shown => return,
            Ok(renewed) => {
                let config = Config { certificate: Some(renewed), ..Config::clone(&running) };
                let plan = Plan { config: Some(config), ..Plan::default() };
                self.follow_plan(&running, plan, false).map_err(|error| (error.to_string(), "culvert reload"))
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(_) => {
                self.metrics.visitors.certificate(CertificateRead::Renewed);
                tracing::info!(file = %certificate_file.display(), "the web server shows its renewed certificate");
            }
            Err((error, remedy)) => {
                self.metrics.visitors.certificate(CertificateRead::Kept);
                tracing::warn!(
                    file = %certificate_file.display(), error,
                    "the changed certificate of the web server cannot be used, and the one before it is still shown (remedy: {remedy})"
                );
            }
        }
    }

    /// Opens the ports that are new: a share for each worker.
    fn open(&self, config: &Config, plan: &Plan) -> Result<Vec<Ports>, ReloadError> {
        let wanted = more_ports(config, &plan.udp_opened, &plan.tcp_opened);
        ports::open(&wanted, self.hub.workers()).map_err(|failed: PortError| {
            let what = match failed.what {
                ports::PortKind::Udp(_) => "udp.listen",
                ports::PortKind::Tcp(_) => "tcp.listen",
            };
            ReloadError::Port { address: failed.address, what, error: failed.error }
        })
    }
}

/// Takes a peer out of the state file that the configuration has taken over; the error says why it is still there.
fn leave_to_configuration(state_file: &Path, name: &str) -> Result<(), String> {
    let edited = Edit::begin(state_file).and_then(|mut edit| {
        edit.remove(name, false)?;
        state_file::commit(edit)
    });
    edited.map_err(|error| format!("{name:?} is still in the state file, where it does not count: {error}"))
}

/// Writes into the log what a reload did, in one line per change or per problem.
fn log_outcome(outcome: &Result<Reloaded, ReloadError>) {
    match outcome {
        Ok(Reloaded { changes, notes }) => {
            changes.iter().for_each(log_change);
            for note in notes {
                tracing::warn!("reload: {note}");
            }
            let restart = changes.iter().filter(|change| change.effect == Effect::Restart).count();
            tracing::info!(changes = changes.len(), waiting_for_restart = restart, "reloaded");
        }
        Err(error) => {
            let error = error.to_string();
            for problem in error.lines().filter(|line| !line.trim().is_empty()) {
                tracing::error!("cannot reload: {problem}");
            }
            tracing::error!(
                "the reload failed and nothing was changed (remedy: see the lines above; culvert check)"
            );
        }
    }
}

fn log_change(Change { what, kind, effect }: &Change) {
    let effect = match effect {
        Effect::Now => "now",
        Effect::NextConnection => "with the next connection",
        Effect::Restart => "with the next start",
    };
    match kind {
        Kind::Added(new) => tracing::info!(new, effect, "reload: {what} added"),
        Kind::Removed(old) => tracing::info!(old, effect, "reload: {what} removed"),
        Kind::Changed(old, new) => tracing::info!(old, new, effect, "reload: {what} changed"),
    }
}

//! The running daemon, as the operator sees and changes it through the control socket.
//!
//! | question | file |
//! |---|---|
//! | what the daemon knows of itself, and who changes what | this one |
//! | what an operator is shown | `status.rs` |
//! | reading the configuration again | `reload.rs`, beside this folder |

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use base::clock::Clock;
use config::{self, Config, quota::Quota, reload::Change};
use engine::{
    health::Health,
    hub::Hub,
    origin::PeerOrigin,
    registry::{Listed, PeerRegistry},
    status::ForwardId,
    tunnel,
    worker::{Command, Ended, ForwardEnd, Inbox, Snapshots},
};
use gate::{identity::PublicKey, refusals::Refusals};

use crate::{
    admin_server::AdminServer,
    control_socket::{
        Peers, Refused, Reloaded,
        status::{Scope, Status},
    },
    metrics::Metrics,
    qlog::Captures,
    quotas::{self, Counted},
    web_server::WebServer,
};

mod status;

use status::AsOf;

/// What the daemon knows of itself.
pub struct Running {
    /// What it runs with; a reload puts another one here.
    pub config: ArcSwap<Config>,
    pub own_key: PublicKey,
    /// The commit that the program was built from, with its date; `None` if it does not say.
    pub commit: Option<&'static str>,
    /// The newest snapshots that the workers published.
    pub snapshots: Arc<Snapshots>,
    /// Where its workers take commands, in their order.
    pub inboxes: Vec<Arc<Inbox>>,
    pub registry: Arc<PeerRegistry>,
    pub refusals: Arc<Refusals>,
    /// The metrics of the daemon, as `/metrics` shows them.
    pub metrics: Arc<Metrics>,
    /// The web server on TCP.
    pub web_server: WebServer,
    /// The server of `/metrics` and the status page.
    pub admin: Arc<dyn AdminServer>,
    /// The captures that run, which operators look at.
    pub captures: Captures,
    /// The hub through which the workers are told.
    pub hub: Arc<Hub>,
    /// The lock that reloads and changes of peers hold: each of them reads what the one before has written.
    pub reloading: Mutex<()>,
    /// Whether the daemon is alive and ready; a drain ends that.
    pub health: Arc<Health>,
    /// The instant at which the daemon was started.
    pub since: Instant,
    pub clock: Arc<dyn Clock + Send + Sync>,
}

impl Peers for Running {
    fn list(&self) -> Vec<Listed> {
        self.registry.list()
    }

    fn add(&self, peer: config::Peer) -> Result<(), Refused> {
        if let Some(tun) = &self.config.load().tun {
            tunnel::routes_are_free(tun, &peer.allowed_ips)?;
        }
        self.registry.add(peer, PeerOrigin::State)?;
        Ok(())
    }

    fn change(&self, peer: config::Peer, dry_run: bool) -> Result<Vec<Change>, Refused> {
        Ok(self.change_peer(peer, dry_run)?)
    }

    fn set_quota_used(&self, name: &Arc<str>, quota: &Quota, used: u64) -> Result<(), Refused> {
        self.hub.quotas.set(name, quota, used, self.clock.unix_seconds());
        Ok(quotas::save(&self.hub.quotas, &self.config.load().state_dir, Counted::Peers)?)
    }

    fn change_users(&self, users: Vec<config::User>, dry_run: bool) -> Result<Vec<Change>, Refused> {
        Ok(self.follow_users(users, dry_run)?)
    }

    fn remove(&self, name: &str) -> Result<(), Refused> {
        self.registry.remove(name)?;
        Ok(())
    }

    fn keep_out(&self, peer: &config::Peer) {
        self.registry.keep_out(peer);
        // The file still names it, as a configuration that were read now would: for as long as one does, it is kept out.
        let config = self.config.load_full();
        if !config.peers.iter().any(|known| known.name == peer.name) {
            let mut named = Config::clone(&config);
            named.peers.push(peer.clone());
            self.config.store(Arc::new(named));
        }
    }

    fn one_at_a_time(&self) -> MutexGuard<'_, ()> {
        self.reloading.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&self) -> Arc<Config> {
        self.config.load_full()
    }

    fn reload(&self, dry_run: bool) -> Result<Reloaded, Refused> {
        Ok(self.reload_now(dry_run)?)
    }

    fn drain(&self, within: Duration) -> Result<(), Refused> {
        // Before the peers are told, so that a balancer sends nobody new.
        self.health.drain();
        let told = self.inboxes.iter().filter(|inbox| inbox.put(Command::Drain { within })).count();
        if told < self.inboxes.len() {
            return Err(
                "a worker takes no commands (remedy: try again; if it stays so, see the daemon's log)".into(),
            );
        }
        Ok(())
    }

    fn end_forward(&self, id: ForwardId) -> Result<bool, Refused> {
        match ForwardEnd::ask(id, &self.inboxes).wait(status::ANSWER_WITHIN) {
            Ended::Done => Ok(true),
            Ended::Unknown => Ok(false),
            Ended::Unanswered => {
                Err("a worker did not answer (remedy: try again; if it stays so, see the daemon's log)"
                    .into())
            }
        }
    }

    fn captures(&self) -> &Captures {
        &self.captures
    }

    fn status(&self, scope: &Scope) -> Status {
        status::of(self, scope, AsOf::Now)
    }
}

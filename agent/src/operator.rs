//! The running daemon, as the operator sees and changes it through the control socket.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use prometheus::{IntCounterVec, core::Collector as _};

use crate::{
    capture::Captures,
    clock::Clock,
    config::{self, Config},
    control_socket::{
        Peers, Refused, Reloaded,
        status::{LastError, PeerState, PeerStatus, Refusal, Status},
        wire::label,
    },
    gate::refusals::{self, Refusals},
    identity::PublicKey,
    metrics::Metrics,
    relay::{Direction, DropReason},
    roster::{Listed, Origin, Roster},
    tunnel,
    worker::{PeerSnapshot, Snapshots},
};

/// What the daemon knows of itself.
pub struct Running {
    /// What it runs with; a reload puts another one here.
    pub config: ArcSwap<Config>,
    /// Its public key.
    pub own_key: PublicKey,
    /// What its workers published.
    pub snapshots: Arc<Snapshots>,
    /// Who its peers are.
    pub roster: Arc<Roster>,
    /// Who was refused.
    pub refusals: Arc<Refusals>,
    /// What they counted.
    pub metrics: Arc<Metrics>,
    /// What operators look at.
    pub captures: Captures,
    /// When it was started.
    pub since: Instant,
    /// Tells the time.
    pub clock: Arc<dyn Clock + Send + Sync>,
}

impl Peers for Running {
    fn list(&self) -> Vec<Listed> {
        self.roster.list()
    }

    fn add(&self, peer: config::Peer) -> Result<(), Refused> {
        if let Some(tun) = &self.config.load().tun {
            tunnel::routes_are_free(tun, &peer.allowed_ips)?;
        }
        self.roster.add(peer, Origin::State)?;
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), Refused> {
        self.roster.remove(name)?;
        Ok(())
    }

    fn config(&self) -> Arc<Config> {
        self.config.load_full()
    }

    fn reload(&self) -> Result<Reloaded, Refused> {
        Err("this version does not reload".into())
    }

    fn captures(&self) -> &Captures {
        &self.captures
    }

    fn status(&self) -> Status {
        let (now, unix_seconds) = (self.clock.now(), self.clock.unix_seconds());
        let snapshot = self.snapshots.get();
        let status = |listed: &Listed| {
            let seen = snapshot.peers.iter().find(|seen| !seen.removed && seen.name == listed.peer.name);
            peer_status(listed, seen, now)
        };
        let families = self.metrics.families();
        Status {
            software: env!("CARGO_PKG_VERSION").to_owned(),
            public_key: self.own_key.to_string(),
            uptime_seconds: now.saturating_duration_since(self.since).as_secs_f64(),
            workers: self.config.load().worker_count(),
            peers: self.roster.list().iter().map(status).collect(),
            handshakes: by_label(&families.handshakes),
            gate: by_label(&families.gate_datagrams),
            refusals: self
                .refusals
                .latest()
                .iter()
                .rev()
                .map(|refusal| shown(refusal, unix_seconds))
                .collect(),
        }
    }
}

fn peer_status(listed: &Listed, seen: Option<&PeerSnapshot>, now: Instant) -> PeerStatus {
    let age = |at: Instant| now.saturating_duration_since(at).as_secs_f64();
    let connected = seen.is_some_and(|seen| seen.connected);
    let state = match (connected, listed.peer.endpoints.is_empty()) {
        (true, _) => PeerState::Connected,
        (false, false) => PeerState::Dialling,
        (false, true) => PeerState::Waiting,
    };
    let connection = seen.and_then(|seen| seen.connection.as_ref()).filter(|_| connected);
    let address = connection.map(|(remote, ..)| *remote).or_else(|| seen?.dialled);
    let failure = seen.and_then(|seen| seen.failure.as_ref());
    PeerStatus {
        name: listed.peer.name.to_string(),
        origin: label(listed.origin).to_owned(),
        state,
        rtt_seconds: seen.and_then(|seen| seen.rtt).as_ref().map(Duration::as_secs_f64),
        lanes_up: seen.map_or(0, |seen| seen.lanes_up),
        flows: seen.map_or(0, |seen| seen.flows),
        inner_mtu: seen.and_then(|seen| seen.inner_mtu),
        dropped: seen.map(dropped).unwrap_or_default(),
        address: address.map(|address| address.to_string()),
        since_seconds: connection.map(|(_, since, _)| age(*since)),
        software: connection.map(|(_, _, software)| software.to_string()),
        last_error: failure.map(|failure| LastError {
            age_seconds: age(failure.at),
            reason: failure.reason.clone(),
            likely_causes: failure.causes.iter().map(|cause| (*cause).to_owned()).collect(),
        }),
    }
}

/// The counts that are not 0, by direction and reason.
fn dropped(seen: &PeerSnapshot) -> BTreeMap<String, BTreeMap<String, u64>> {
    let directions = Direction::ALL.map(|direction| {
        let side = match direction {
            Direction::Uplink => &seen.uplink,
            Direction::Downlink => &seen.downlink,
        };
        let counts = DropReason::ALL.into_iter().zip(side.account.dropped).filter(|(_, count)| *count > 0);
        let counts: BTreeMap<_, _> =
            counts.map(|(reason, count)| (reason.label().to_owned(), count)).collect();
        (direction.label().to_owned(), counts)
    });
    directions.into_iter().filter(|(_, counts)| !counts.is_empty()).collect()
}

fn shown((refusal, count): &(refusals::Refusal, u64), unix_seconds: u64) -> Refusal {
    Refusal {
        // Both are whole seconds of the wall clock, which may have been set back since.
        age_seconds: Duration::from_secs(unix_seconds.saturating_sub(refusal.at)).as_secs_f64(),
        source: refusal.source.to_string(),
        count: *count,
        reason: format!("{} (remedy: {})", refusal.why, refusal.why.remedy()),
        public_key: refusal.why.key().map(|key| key.to_string()),
    }
}

/// The counts of a family with one label, by its value.
fn by_label(family: &IntCounterVec) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for metric in family.collect().iter().flat_map(|family| family.get_metric()) {
        let Some(label) = metric.get_label().first() else { continue };
        let value = metric.get_counter().get_value();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an integer counter")]
        counts.insert(label.value().to_owned(), value as u64);
    }
    counts
}

//! Preshared keys: what each end shows of its own, the one that both use, and what happens when an operator changes them.
//!
//! ```text
//!   hello, or a reload: both ends show proofs of their keys ──► both find the same one (gate/src/preshared.rs), or part
//!   the key in common is another one ──► the dialler opens its lanes again with it, one after the other; none is without a lane
//! ```

use std::time::Instant;

use base::ids::PeerId;
use gate::{
    preshared::{Holder, PresharedKey, Prover},
    suite::Group,
};
use quinn_proto::{ConnectionHandle, Side};
use wire::messages::{CloseReason, Features, Hello, KeyProof, LaneRefusal, Message};

use crate::{
    control::{
        driver::{ConnectionRef, ControlConnection},
        preshared::{Agreed, KeyRefusal, REFUSED_BY_PEER, refused_by_peer},
    },
    hub::WorkerMessage,
    origin::PeerOrigin,
    peer::Session,
    worker::{
        context::{Context, timer::Timer},
        report::stats::LaneReopening,
        session::{Conn, Sessions, lanes::LEAST_LANE_AGE},
    },
};

impl Sessions {
    /// Closes a connection because of a preshared key. If it is the session, the stream connections end with it.
    pub(crate) fn refuse_for_key(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        id: PeerId,
        why: KeyRefusal,
        now: Instant,
    ) {
        cx.stats.totals.preshared_refused[why] += 1;
        let reason = CloseReason::PresharedKey;
        if cx.peers.is_session(id, handle) {
            cx.broadcast(|| WorkerMessage::EndStreams { peer: id, reason });
        }
        self.close_connection(cx, handle, reason, now);
        cx.report_key(id, why.words(), &[why.remedy()], now);
    }

    /// Shows a connected peer our keys and settles on the one in common; without one the session ends.
    pub(crate) fn keys_changed(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(mut conn) = self.conn(cx, id) else { return };
        let handle = conn.session.handle;
        if let Err(why) = conn.keys_changed(now) {
            self.refuse_for_key(cx, handle, id, why, now);
        }
    }

    /// Whether payloads on a control connection are dropped, because its peer has a preshared key and TLS alone protects them.
    pub(crate) fn refuses_plain(&self, handle: ConnectionHandle) -> bool {
        let connection = self.control.get(handle);
        connection.is_some_and(|connection| {
            connection.preshared.agreed().is_some_and(|agreed| !agreed.post_quantum)
        })
    }
}

impl Conn<'_> {
    /// Takes the proofs that the peer shows in place of those of its hello.
    pub(super) fn keys_shown(&mut self, proofs: Vec<KeyProof>, now: Instant) -> Result<(), KeyRefusal> {
        self.session.proofs = proofs;
        self.settle_key(now)
    }

    /// Shows the peer our keys, if they are others than it was shown, and settles on the one in common.
    fn keys_changed(&mut self, now: Instant) -> Result<(), KeyRefusal> {
        let knows = self.session.agreed.hello.features.contains(Features::PRESHARED_KEYS);
        let before = self.control.preshared.shown().to_vec();
        let shown = show(&mut self.control, &self.data.config.preshared_keys);
        if knows && before != shown {
            self.control.send(&Message::PresharedKeys(shown));
        }
        self.settle_key(now)
    }

    /// Finds the key that both ends of a session have now. If it is another one, the dialler opens its lanes again; if there is none,
    /// the session is to end.
    fn settle_key(&mut self, now: Instant) -> Result<(), KeyRefusal> {
        let Session { agreed, proofs, openings, .. } = &mut *self.session;
        if settle(&mut self.control, &self.data.config.preshared_keys, &agreed.hello, proofs)? {
            openings.rekey();
            throttled!(
                info,
                self.throttles.preshared.allow(now),
                { peer = self.name() },
                "another preshared key is in use: lanes are opened again with it"
            );
            self.rekey_lanes(now);
        }
        Ok(())
    }

    /// Opens lanes again whose preshared key is not the one in use, at the dialler. Each carries payloads until the lane that replaces
    /// it does.
    pub(super) fn rekey_lanes(&mut self, now: Instant) {
        if !self.session.agreed.dialled {
            return;
        }
        let mut waits = false;
        for index in self.session.openings.outdated() {
            let openings = &self.session.openings;
            let since = openings.since(index);
            let is_young = since.is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE);
            if is_young || openings.is_asked(index) {
                waits = true;
            } else {
                self.cx.totals.lanes_reopened[LaneReopening::Rekeyed] += 1;
                self.ask_for_lane(index, now);
            }
        }
        if waits {
            self.cx.timers.arm(Timer::Pool(self.data.id), now + LEAST_LANE_AGE);
        }
    }

    /// The key of a lane that the dialler asks for with `named`.
    pub(super) fn key_of_lane(&self, named: Option<&KeyProof>) -> Result<Option<PresharedKey>, LaneRefusal> {
        const REFUSED: LaneRefusal = LaneRefusal::PresharedKey;
        let keys = &self.data.config.preshared_keys;
        let Some(named) = named else { return if keys.is_empty() { Ok(None) } else { Err(REFUSED) } };
        if let Some(agreed) = self.control.preshared.agreed().filter(|agreed| agreed.named == *named) {
            return Ok(Some(agreed.key.clone()));
        }
        let exported = self.control.exported_for_keys().ok_or(REFUSED)?;
        let place = Holder { keys, exported: &exported, end: Prover::Listener }.find(named).ok_or(REFUSED)?;
        keys.get(place).cloned().map(Some).ok_or(REFUSED)
    }
}

/// The proofs of our `keys` on a connection, which the far end is shown now.
pub(super) fn show(control: &mut ConnectionRef<'_>, keys: &[PresharedKey]) -> Vec<KeyProof> {
    if keys.is_empty() {
        return Vec::new();
    }
    let shown = control.exported_for_keys().map(|exported| {
        let end = Prover::new(control.side() == Side::Client);
        Holder { keys, exported: &exported, end }.shows()
    });
    let shown = shown.unwrap_or_default();
    control.touched().preshared.show(shown.clone());
    shown
}

/// Finds the key that both ends have, by what the far end's hello says; returns whether it is another one than before.
pub(super) fn settle(
    control: &mut ConnectionRef<'_>,
    keys: &[PresharedKey],
    hello: &Hello,
    proofs: &[KeyProof],
) -> Result<bool, KeyRefusal> {
    let agreed =
        if keys.is_empty() && proofs.is_empty() { None } else { agree(control, keys, hello, proofs)? };
    Ok(control.touched().preshared.agree(agreed))
}

pub(super) fn keys_for(cx: &Context, peer: PeerId) -> &[PresharedKey] {
    cx.peers.get(peer).map_or(&[], |peer| &peer.data.config.preshared_keys)
}

fn agree(
    connection: &ControlConnection,
    keys: &[PresharedKey],
    hello: &Hello,
    proofs: &[KeyProof],
) -> Result<Option<Agreed>, KeyRefusal> {
    // Without an exporter the connection is closing.
    let Some(exported) = connection.exported_for_keys() else { return Err(KeyRefusal::Different) };
    let end = Prover::new(connection.side() == Side::Client);
    let holder = Holder { keys, exported: &exported, end };
    let knows_keys = hello.features.contains(Features::PRESHARED_KEYS);
    let place = holder.agree(proofs).map_err(|why| KeyRefusal::new(why, knows_keys))?;
    let agreed = place.and_then(|place| {
        let key = keys.get(place)?.clone();
        let named = key.proof(&exported, Prover::Dialler);
        Some(Agreed { key, named, place, post_quantum: connection.key_exchange() == Some(Group::Hybrid) })
    });
    if hello.max_lanes == 0 && agreed.as_ref().is_some_and(|agreed| !agreed.post_quantum) {
        return Err(KeyRefusal::NoLanes);
    }
    Ok(agreed)
}

impl Context {
    /// Reports that the peer closed a connection because of a preshared key.
    pub(crate) fn key_refused_by_peer(&mut self, id: PeerId, now: Instant) {
        let causes = refused_by_peer(!keys_for(self, id).is_empty());
        self.report_key(id, REFUSED_BY_PEER, causes, now);
    }

    fn report_key(&mut self, id: PeerId, reason: &str, remedies: &[&'static str], now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.reach.fail(reason, remedies, now);
        let throttle = match peer.origin {
            // They come and go as they like, each with a throttle of its own.
            PeerOrigin::Open => &mut self.logs.violation,
            PeerOrigin::Config | PeerOrigin::State => &mut peer.throttles.preshared,
        };
        let remedy = remedies.join("; ");
        throttled!(warn, throttle.allow(now), { peer = &**peer.name() }, "{reason} (remedy: {remedy})");
    }
}

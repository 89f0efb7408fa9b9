//! Standard mode: the frames of peers without lanes, between the relay and quinn-proto.

use std::time::{Duration, Instant};

use base::ids::PeerId;
use dataplane::{
    peer::PeerData,
    relay::{DropReason, Settlement},
};
use quinn_proto::SendDatagramError;
use repair::{LaneRepair, PathCounts};

use crate::{
    control::transport::DATAGRAM_BUFFER_BYTES,
    worker::{
        context::{Context, timer::Timer},
        local::DataPlane,
        session::{Conn, Sessions},
    },
};

/// Bytes of a peer's datagrams that may wait in quinn-proto for its congestion window: 50 ms at 10 Mbit/s. Datagrams do not expire
/// there, so the others wait in the queue of [`dataplane::lanes::Plain`], where they do.
const AHEAD_BYTES: usize = 64 * 1024;

/// The bytes that always may wait there: two packets.
const LEAST_AHEAD: usize = 3_000;

/// How many bytes may wait behind the queue at `rate` bytes a second, and how many in quinn-proto: with a rate they wait in the queue,
/// where flows take turns, but for 4 ms and 2 ms.
fn room_at(rate: Option<u64>) -> (usize, usize) {
    let within = |parts| rate.and_then(|rate| usize::try_from(rate / parts).ok()).unwrap_or(usize::MAX);
    (within(250).max(LEAST_AHEAD), within(500).clamp(LEAST_AHEAD, AHEAD_BYTES))
}

impl DataPlane {
    /// Gives quinn-proto the frames that wait for peers without lanes; returns whether it took any.
    pub(crate) fn send_plain(&mut self, cx: &mut Context, sessions: &mut Sessions, now: Instant) -> bool {
        let mut taken = false;
        let mut peers = std::mem::take(&mut self.plain_peers);
        peers.retain(|id| {
            let Some(plain) = cx.peers.link(*id).and_then(|link| link.plain.as_ref()) else { return false };
            if !plain.is_empty()
                && let Some((took, blocked)) =
                    sessions.conn(cx, *id).and_then(|mut conn| conn.send_plain(now))
            {
                taken |= took;
                sessions.note_plain_way(cx, *id);
                cx.watch_plain_repair(*id);
                // The frames are gone: the peer's queue behind them comes next.
                if !blocked {
                    self.drain_queue(cx, *id, now);
                }
            }
            true
        });
        self.plain_peers = peers;
        taken
    }
}

impl Sessions {
    /// Notes whether what a peer in standard mode gets goes over TCP: then it is not repaired.
    fn note_plain_way(&self, cx: &mut Context, id: PeerId) {
        let control = cx.peers.session(id).and_then(|session| self.control.get(session.handle));
        let Some(control) = control else { return };
        let underlay = cx.sockets.underlays.get(control.underlay);
        let is_over_tcp = underlay.is_some_and(|it| it.is_over_tcp(&control.path().destination));
        let plain = cx.peers.get_mut(id).and_then(|peer| peer.data.link.as_mut()?.plain.as_mut());
        if let Some(plain) = plain {
            plain.is_over_tcp = is_over_tcp;
        }
    }
}

impl Conn<'_> {
    /// Gives quinn-proto the frames that wait, while it has room. Returns whether it took any, and whether others have to wait; nothing
    /// if the connection is over.
    fn send_plain(&mut self, now: Instant) -> Option<(bool, bool)> {
        let PeerData { id, relay, link, .. } = &mut *self.data;
        let plain = link.as_mut()?.plain.as_mut()?;
        let (mut blocked, mut taken) = (false, false);
        loop {
            let quinn = self.control.open()?;
            plain.set_most(quinn.datagrams().max_size());
            if plain.repair.is_some() {
                let path = quinn.stats().path;
                plain.path = Some(PathCounts {
                    acked: path.sent_packets.saturating_sub(path.lost_packets),
                    lost: path.lost_packets,
                    // quinn-proto does not tell runs of losses apart.
                    runs: path.lost_packets,
                    // Nor does it tell late packets from lost ones.
                    reordered: 0,
                    rtt: path.rtt,
                    // An automatic rate needs lanes.
                    congested: false,
                });
            }
            let (room, ahead) = room_at(relay.share.account.rate());
            plain.set_room(room);
            // Before the check for space: frames expire even if the connection takes none. They have had the same time in the queue
            // before, which is longer than the configured one under a rate.
            let (counted, dropped) = if let Some(late) = plain.pop_late(now, relay.time_limit()) {
                (late.counted, DropReason::Expired)
            } else if quinn.datagrams().send_buffer_space() < DATAGRAM_BUFFER_BYTES - ahead {
                // Expired frames may have left room for the queue behind them, which only this function fills.
                blocked = !plain.is_empty();
                break;
            } else {
                let Some(mut frame) = plain.pop(now) else { break };
                taken = true;
                match self.control.send_frame(frame.data, frame.counted) {
                    // The payload is settled when quinn-proto sends or drops the frame.
                    Ok(()) => continue,
                    Err(SendDatagramError::Blocked(data)) => {
                        frame.data = data;
                        plain.put_back(frame);
                        blocked = true;
                        break;
                    }
                    Err(SendDatagramError::TooLarge) => (frame.counted, DropReason::SendTooLarge),
                    Err(SendDatagramError::UnsupportedByPeer | SendDatagramError::Disabled) => {
                        (frame.counted, DropReason::SendOther)
                    }
                }
            };
            if counted {
                relay.settle_uplink(Settlement { peer: *id, payloads: 1, dropped: Some(dropped) });
            }
        }
        let late = plain.oldest().map(|oldest| oldest + relay.time_limit() + Duration::from_millis(1));
        if let Some(at) = late {
            self.cx.timers.arm(Timer::Queue(*id), at);
        }
        self.data.take_plain_repair_counts();
        Some((taken, blocked))
    }
}

impl Context {
    /// The streams of a peer in standard mode that are repaired, and what is known of the path.
    pub(crate) fn plain_repair(&self, id: PeerId) -> Option<(&LaneRepair, Option<PathCounts>)> {
        let plain = self.peers.get(id)?.data.link.as_ref()?.plain.as_ref()?;
        Some((plain.repair.as_deref()?, plain.path))
    }

    /// Arms the timer of [`Worker::drive_plain_repair`].
    pub(crate) fn watch_plain_repair(&mut self, id: PeerId) {
        let next = self.plain_repair(id).and_then(|(streams, _)| streams.next_deadline());
        if let Some(at) = next {
            self.timers.arm(Timer::Repair(id), at);
        }
    }
}

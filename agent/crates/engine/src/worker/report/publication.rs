//! What the workers last published, read in place: a status of a thousand peers is two megabytes, of which most readers need a few
//! figures.

use std::sync::Arc;

use base::ids::PeerId;

use crate::{
    brief::PeerBrief,
    status::{Accounting, PeerStatus},
    worker::report::stats::{InUse, Snapshot, Snapshots, WorkerSnapshot},
};

/// The newest snapshot of each worker. Sums over workers are made for what is asked for, when it is asked for.
#[derive(Clone, Debug, Default)]
pub struct Publication(pub(crate) Vec<Arc<WorkerSnapshot>>);

impl Publication {
    /// The slots of peers that any worker told of, in ascending order.
    pub fn slots(&self) -> impl Iterator<Item = PeerId> + use<> {
        let slots = self.0.iter().map(|worker| worker.peers.len()).max().unwrap_or(0);
        (0..u32::try_from(slots).unwrap_or(u32::MAX)).map(PeerId)
    }

    /// What the workers say of the peer that has the slot: one that has not read yet that the slot has another peer says nothing.
    fn views(&self, slot: PeerId) -> impl Iterator<Item = &PeerStatus> {
        let all = move || self.0.iter().filter_map(move |worker| worker.peers.get(slot.0 as usize));
        let newest = all().map(|peer| peer.more.generation).max();
        all().filter(move |peer| Some(peer.more.generation) == newest)
    }

    /// Whether the peer in the slot is the one called `name`, and was not removed.
    #[must_use]
    pub fn has(&self, slot: PeerId, name: &str) -> bool {
        let mut views = self.views(slot).peekable();
        views.peek().is_some_and(|peer| *peer.name == *name) && views.all(|peer| !peer.more.removed)
    }

    /// The status of the peer in the slot, at all workers together.
    #[must_use]
    pub fn status(&self, slot: PeerId) -> Option<PeerStatus> {
        let mut views = self.views(slot);
        let mut sum = views.next()?.clone();
        views.for_each(|view| sum.add(view));
        sum.complete();
        Some(sum)
    }

    /// What a list shows of the peer in the slot.
    #[must_use]
    pub fn brief(&self, slot: PeerId) -> Option<PeerBrief> {
        let mut views = self.views(slot);
        let mut sum = PeerBrief::from(views.next()?);
        views.for_each(|view| sum.add(view));
        Some(sum)
    }

    /// The accounts of the peer in the slot, uplink before downlink.
    #[must_use]
    pub fn accounts(&self, slot: PeerId) -> [Accounting; 2] {
        let mut sums = [Accounting::default(); 2];
        for view in self.views(slot) {
            sums[0].add(&view.uplink);
            sums[1].add(&view.downlink);
        }
        sums.iter_mut().for_each(Accounting::complete);
        sums
    }

    /// What is in use, at all workers together.
    #[must_use]
    pub fn in_use(&self) -> InUse {
        let mut sum = InUse::default();
        self.0.iter().for_each(|worker| sum.add(&worker.in_use));
        sum
    }
}

impl Snapshots {
    /// What the workers last published.
    #[must_use]
    pub fn latest(&self) -> Publication {
        Publication(self.workers())
    }

    /// A copy of what the workers last published, summed over them.
    #[must_use]
    pub fn get(&self) -> Snapshot {
        let published = self.latest();
        Snapshot {
            peers: published.slots().map(|slot| published.status(slot).unwrap_or_default()).collect(),
            kernel_drops: published.0.iter().map(|worker| worker.sockets.kernel_drops()).sum(),
            in_use: published.in_use(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dataplane::relay::Account;
    use quic_core::LaneStats;

    use super::*;
    use crate::{
        reach::Failure,
        status::{LastError, PeerFigures, PeerRates, PeerState, QueueStatus},
    };

    /// What a worker may say of a peer; every third thing is missing, by the bits of `salt`.
    fn view(salt: u32) -> PeerStatus {
        let some = |bit: u32| salt >> bit & 1 == 1;
        let number = u64::from(salt) * 7 + 3;
        let side = |delivered_bytes| {
            let account = Account { received: number, delivered: number, ..Account::default() };
            Accounting { delivered_bytes, account, ..Accounting::default() }
        };
        let rates = PeerRates {
            uplink_bytes_per_second: f64::from(salt),
            lane_packets_per_second: 8.0,
            lost_packets_per_second: f64::from(salt % 5),
            ..PeerRates::default()
        };
        let failure = Arc::new(Failure { reason: format!("reason {salt}"), causes: Vec::new() });
        PeerStatus {
            name: "site".into(),
            state: PeerState::ALL[salt as usize % 3],
            address: some(2).then(|| format!("192.0.2.{}:4433", salt % 200).parse().expect("an address")),
            since_seconds: some(3).then_some(f64::from(salt)),
            software: some(4).then(|| format!("culvert/{salt}").into()),
            rtt_seconds: some(5).then_some(0.25),
            inner_mtu: some(1).then_some(1400),
            flows: salt as usize,
            tcp_streams: salt,
            queue: QueueStatus { bytes: salt as usize, ..QueueStatus::default() },
            rates: some(0).then_some(rates),
            uplink: side(number),
            downlink: side(2 * number),
            last_error: some(6).then(|| LastError { age_seconds: f64::from(salt % 7), failure }),
            more: PeerFigures {
                queue_time: Duration::from_millis(5),
                lanes: LaneStats { sealed_packets: number, lost_packets: 2, ..LaneStats::default() },
                ..PeerFigures::default()
            },
            ..PeerStatus::default()
        }
    }

    fn published(views: &[PeerStatus]) -> Snapshots {
        let snapshots = Snapshots::default();
        for (worker, view) in (0..).zip(views) {
            snapshots.set(WorkerSnapshot { worker, peers: vec![view.clone()], ..WorkerSnapshot::default() });
        }
        snapshots
    }

    #[test]
    fn a_brief_and_the_accounts_say_what_the_status_says() {
        for salt in 0..400 {
            let views = [view(salt), view(salt * 31 % 257), view(salt * 17 % 101)];
            let latest = published(&views).latest();
            let status = latest.status(PeerId(0)).expect("three workers told of it");
            let brief = latest.brief(PeerId(0)).expect("three workers told of it");
            assert_eq!(brief, PeerBrief::from(&status), "{salt}");
            assert_eq!(brief.lost_share_last_second(), status.lane_packets.lost_share_last_second, "{salt}");
            assert_eq!(latest.accounts(PeerId(0)), [status.uplink, status.downlink], "{salt}");
        }
    }

    #[test]
    fn the_former_peer_of_a_slot_is_not_added_to_the_present_one() {
        let (mut former, mut present) = (view(5), view(9));
        (present.name, present.more.generation) = ("new".into(), 1);
        former.more.removed = true;
        for views in [[former.clone(), present.clone()], [present.clone(), former.clone()]] {
            let latest = published(&views).latest();
            assert_eq!(latest.brief(PeerId(0)), Some(PeerBrief::from(&present)));
            assert!(latest.has(PeerId(0), "new") && !latest.has(PeerId(0), "site"));
        }
        let latest = published(&[former]).latest();
        assert!(!latest.has(PeerId(0), "site") && !latest.has(PeerId(1), "site"));
        assert_eq!((latest.brief(PeerId(1)), latest.slots().count()), (None, 1));
    }
}

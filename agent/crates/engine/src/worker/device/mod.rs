//! The TUN side of a worker.
//!
//! | question | file |
//! |---|---|
//! | packets from the device, inner addresses, the MTU towards each peer | `tun.rs` |
//! | which peers have routes | `routed.rs` |
//! | routes and traffic for an operator | `inspect.rs` |

use std::{io, sync::Arc, time::Instant};

use base::token_bucket::Allowance;
use config::{Config, OwnRoutes};
use dataplane::{
    forward::{
        multicast::Multicast,
        peer_routes::PeerRoutes,
        tun::{TunSide, TunTotals},
    },
    records::{
        Recorder,
        packets::{MOST_ENTRIES, PacketTable},
    },
    sockets::SocketFactory,
};
use net::{Ready, Token, TunStats};
use users::ip::Links;

use crate::{
    control::web::{ForDevice, FromElsewhere},
    hub::Hub,
    mtu_table::MtuTable,
    peer::Peer,
    registry::PeerRegistry,
    status::{MOST_TALKERS, TalkerStatus},
    worker::device::{
        routed::RoutedPeers,
        tun::{most_mtu, set_prefixes},
    },
};

mod inspect;
mod routed;
pub(crate) mod tun;

/// The TUN side of a worker.
#[derive(Default)]
pub(crate) struct Tunnel {
    /// The worker's queue of the device, if the agent has one.
    device: Option<Tun>,
}

/// The TUN device, and the table from which the tunnel's thread reads the MTU towards each peer and who has routes.
struct Tun {
    side: TunSide,
    mtu_table: Arc<MtuTable>,
    /// With `tun.routes = "connected"`.
    routed: Option<RoutedPeers>,
}

impl Tunnel {
    /// Opens the worker's queue of the TUN device, if the agent has a device.
    ///
    /// # Errors
    /// The queue cannot be used.
    pub(crate) fn open(
        mtu_table: Option<Arc<MtuTable>>,
        factory: &mut SocketFactory,
        config: &Config,
        registry: &PeerRegistry,
        peers: &[Peer],
        now: Instant,
    ) -> io::Result<Self> {
        let Some((mtu_table, (queue, token))) = mtu_table.zip(factory.tun()?) else {
            return Ok(Self::default());
        };
        let mut side = TunSide::new(queue, token, most_mtu(config), now);
        if let Some(tun) = &config.tun {
            side.routes = PeerRoutes::new(tun.spread, tun.hold, tun.follows_routes());
            let own = || registry.device_addresses(tun).into_iter().map(|net| net.addr());
            side.errors = tun.icmp_errors.then(|| Allowance::new(TunSide::ERRORS, now));
            side.multicast = tun.copies_multicast().then(|| Box::new(Multicast::new(own(), now)));
        }
        let entries = MOST_ENTRIES / usize::from(config.worker_count().max(1));
        side.records =
            config.records.is_on().then(|| Box::new(PacketTable::new(entries, config.records.ports)));
        for peer in peers {
            set_prefixes(&mut side.routes, peer.data.id, &peer.data.config);
        }
        let follows =
            config.tun.as_ref().filter(|tun| tun.sets_routes() && tun.routes == OwnRoutes::Connected);
        let routed = follows.map(|tun| RoutedPeers::new(tun.hold));
        Ok(Self { device: Some(Tun { side, mtu_table, routed }) })
    }

    /// Carries packets of users with inner addresses, too: of the device by `links`, to the device from where is returned, if there is
    /// one. Other threads wake `worker` by marking the token.
    pub(crate) fn serve_users(
        &mut self,
        links: Arc<Links>,
        worker: u8,
        (ready, token): (Ready, Token),
    ) -> Option<Arc<ForDevice>> {
        let packets = Arc::<ForDevice>::default();
        let elsewhere = FromElsewhere { packets: Arc::clone(&packets), ready, token };
        let side = self.side_mut()?;
        links.has_device(worker, Arc::new(elsewhere));
        side.users = links;
        Some(packets)
    }

    /// Writes packets of users to the device.
    pub(crate) fn write_for_users(&mut self, packets: Option<&Arc<ForDevice>>) {
        if let (Some(side), Some(packets)) = (self.side_mut(), packets) {
            side.totals.delivered += packets.write(&mut *side.queue);
        }
    }

    #[inline]
    pub(crate) fn side_mut(&mut self) -> Option<&mut TunSide> {
        self.device.as_mut().map(|tun| &mut tun.side)
    }

    pub(crate) fn side(&self) -> Option<&TunSide> {
        self.device.as_ref().map(|tun| &tun.side)
    }

    /// The IP packets to record, and where to.
    fn records<'a>(&'a mut self, hub: &'a Hub) -> Option<(&'a mut PacketTable, &'a Recorder)> {
        let records = self.side_mut()?.records.as_deref_mut()?;
        hub.totals.recorder.get().map(|recorder| (records, recorder))
    }

    /// Who talks to whom inside, as far as it is recorded.
    pub(crate) fn talker_rows(&self, now: Instant) -> Vec<TalkerStatus> {
        let records = self.side().and_then(|side| side.records.as_deref());
        let talks = records.map_or_else(Vec::new, |records| records.talks(MOST_TALKERS));
        talks.iter().map(|talk| TalkerStatus::new(talk, now)).collect()
    }

    /// Records IP packets, once a second.
    pub(crate) fn record_packets(&mut self, hub: &Hub, now: Instant) {
        if let Some((records, recorder)) = self.records(hub) {
            records.expire(now, recorder);
        }
    }

    /// Records IP packets for the last time.
    pub(crate) fn record_last_packets(&mut self, hub: &Hub) {
        if let Some((records, recorder)) = self.records(hub) {
            records.end(recorder);
        }
    }

    /// The counts of the queue, and of the packets in it.
    pub(crate) fn totals(&self) -> (TunStats, TunTotals) {
        self.side().map(|side| (side.queue.stats(), side.totals.clone())).unwrap_or_default()
    }

    /// Has the worker have a device, for tests.
    #[cfg(feature = "inspection")]
    pub(crate) fn set_side(&mut self, side: TunSide) {
        self.device = Some(Tun { side, mtu_table: Arc::default(), routed: None });
    }
}

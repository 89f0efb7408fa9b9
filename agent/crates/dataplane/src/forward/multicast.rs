//! Link-local multicast of the host (`tun.multicast`): who gets copies of a packet, and how many there may be.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Instant,
};

use base::{
    ids::PeerId,
    token_bucket::{Allowance, Pace},
};
use ip::{
    view::IpView,
    vnet::{Gso, VnetHeader},
};
use ipnet::IpNet;

use crate::forward::tun::TunDrop;

/// The groups that no router forwards to another link: RFC 5771 §4 and RFC 4291 §2.7.
pub const GROUPS: [IpNet; 2] = [
    IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0)), 24),
    IpNet::new_assert(IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0)), 16),
];

/// Whether `address` is a link-local group.
#[inline]
#[must_use]
pub fn is_group(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[..3] == [224, 0, 0],
        IpAddr::V6(address) => address.octets()[..2] == [0xff, 2],
    }
}

/// The copies that a worker makes, for all peers together. Hellos of daemons with thousands of neighbours pass. A burst takes a turn of
/// a few milliseconds.
const COPIES: Pace = Pace { per_second: 10_000, at_once: 5_000 };

const UDP_HEADER: usize = 8;

/// The multicast of the host at one worker.
#[derive(Debug)]
pub struct Multicast {
    /// The addresses of the device: packets from any other are not the host's own, and no peer would take them.
    own: BTreeSet<IpAddr>,
    receivers: BTreeSet<PeerId>,
    allowance: Allowance,
    /// The buffer in which a copy is made: sending completes checksums in place.
    pub(crate) copy: Vec<u8>,
}

impl Multicast {
    /// Multicast from these addresses of the device, to no peer yet.
    #[must_use]
    pub fn new(own: impl IntoIterator<Item = IpAddr>, now: Instant) -> Self {
        Self {
            own: own.into_iter().collect(),
            receivers: BTreeSet::new(),
            allowance: Allowance::new(COPIES, now),
            copy: Vec::new(),
        }
    }

    pub fn set_receiver(&mut self, peer: PeerId, receives: bool) {
        if receives {
            self.receivers.insert(peer);
        } else {
            self.receivers.remove(&peer);
        }
    }

    pub fn receivers(&self) -> impl Iterator<Item = PeerId> {
        self.receivers.iter().copied()
    }

    /// Whether a packet may be copied to all receivers.
    ///
    /// # Errors
    /// The reason to drop it, and how many copies that drops.
    pub(crate) fn admit(
        &mut self,
        view: &IpView,
        vnet: &VnetHeader,
        now: Instant,
    ) -> Result<(), (TunDrop, u64)> {
        if !self.own.contains(&view.source) {
            return Err((TunDrop::MulticastSource, 1));
        }
        if self.receivers.is_empty() {
            return Err((TunDrop::NoReceiver, 1));
        }
        let copies = self.receivers.len() * packets(view, vnet);
        // More receivers than the burst are served from a full bucket.
        let charged = u32::try_from(copies).unwrap_or(u32::MAX).min(COPIES.at_once);
        if self.allowance.take(charged, now) { Ok(()) } else { Err((TunDrop::MulticastRate, copies as u64)) }
    }
}

/// The packets that a super-packet of UDP is cut into, and one of any other: TCP has no multicast.
fn packets(view: &IpView, vnet: &VnetHeader) -> usize {
    match vnet.gso {
        Gso::Udp => {
            let payload = view.len.saturating_sub(view.transport_at + UDP_HEADER);
            payload.div_ceil(usize::from(vnet.gso_size.max(1))).max(1)
        }
        Gso::None | Gso::Tcp4 | Gso::Tcp6 => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use base::clock::{Clock, ManualClock};
    use ip::model::Recipe;

    use super::*;

    #[test]
    fn groups_end_where_the_link_does() {
        for (address, expected) in [
            ("224.0.0.1", true),
            ("224.0.0.255", true),
            ("224.0.1.0", false),
            ("239.255.0.1", false),
            ("223.255.255.255", false),
            ("ff02::1:6", true),
            ("ff02:ffff::1", true),
            ("ff01::1", false),
            ("ff05::2", false),
            ("ff12::1", false),
            ("fe80::1", false),
            ("::ffff:224.0.0.5", false),
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(is_group(address), expected, "{address}");
            assert_eq!(GROUPS.iter().any(|group| group.contains(&address)), expected, "{address}");
        }
    }

    #[test]
    fn copies_are_limited_for_all_receivers_together() {
        let clock = ManualClock::default();
        let view = |packet: &[u8]| IpView::super_packet(packet).unwrap();
        let packet = Recipe::UDP.complete();
        let (vnet, many) = Recipe { payload: 4_000, ..Recipe::UDP }.super_packet(1_000);
        let single = VnetHeader::default();
        let own = view(&packet).source;

        let mut multicast = Multicast::new([], clock.now());
        multicast.set_receiver(PeerId(1), true);
        assert_eq!(multicast.admit(&view(&packet), &single, clock.now()), Err((TunDrop::MulticastSource, 1)));

        let mut multicast = Multicast::new([own], clock.now());
        assert_eq!(multicast.admit(&view(&packet), &single, clock.now()), Err((TunDrop::NoReceiver, 1)));
        for peer in 0..200 {
            multicast.set_receiver(PeerId(peer), true);
            multicast.set_receiver(PeerId(peer), peer < 100);
        }
        let mut admitted = |packet: &[u8], vnet: &VnetHeader| {
            (0..1_000).take_while(|_| multicast.admit(&view(packet), vnet, clock.now()).is_ok()).count()
        };
        assert_eq!(admitted(&packet, &single), 50);
        clock.advance(Duration::from_millis(100));
        assert_eq!(admitted(&packet, &single), 10);
        clock.advance(Duration::from_secs(60));
        assert_eq!(admitted(&many, &vnet), 12, "a super-packet is four");
        assert_eq!(
            multicast.admit(&view(&many), &vnet, clock.now()),
            Err((TunDrop::MulticastRate, 400)),
            "every copy counts"
        );

        for peer in 0..30_000 {
            multicast.set_receiver(PeerId(peer), true);
        }
        clock.advance(Duration::from_secs(2));
        assert_eq!(
            multicast.admit(&view(&packet), &single, clock.now()),
            Ok(()),
            "more than fit into a burst"
        );
        assert!(multicast.admit(&view(&packet), &single, clock.now()).is_err());
    }
}

//! The TUN device as a worker sees it: its queue, the inner addresses of the peers, and the packets that are about to be written.

use std::{net::IpAddr, sync::Arc, time::Instant};

use base::{
    counts::{Counts, PerKind},
    ids::PeerId,
    sampler::Sampler,
    token_bucket::{Allowance, Pace},
};
use ip::{
    icmp::{self, MOST_ANSWER},
    merge::Merger,
    packets::{Packet, PacketDelivery},
    view::IpView,
    vnet::VnetHeader,
};
use net::{ReceiveBatch, SendOutcome, Token, TunQueue};
use users::ip::Links;

use crate::{
    forward::{multicast::Multicast, peer_routes::PeerRoutes},
    lanes::pool::MAX_LANES,
    records::packets::PacketTable,
    relay::Settlements,
};

/// The limit on answers of each kind that a worker gives to packets that it cannot carry. Path MTU discovery needs one for each flow,
/// however many packets have no route, and a flood must not be answered by a flood (RFC 1812 §4.3.2.8, RFC 4443 §2.4(f)).
const ANSWERS: Pace = Pace { per_second: 200, at_once: 100 };

base::labelled! {
    /// Why an IP packet of the device went to no peer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum TunDrop {
        /// No peer has its destination among its `allowed_ips`.
        NoRoute => "no_route",
        /// A route of the kernel leads to a next hop that is no peer's `address`.
        NoNextHop => "no_next_hop",
        /// The headers of the packet cannot be read.
        Malformed => "malformed",
        /// No peer that takes it is connected (`tun.multicast`).
        NoReceiver => "no_receiver",
        /// More copies of multicast than there may be.
        MulticastRate => "multicast_rate",
        /// Multicast from an address that is not the device's.
        MulticastSource => "multicast_source",
    }
}

/// The ICMP answer to a packet of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The packet is larger than the largest one for this peer, which has this many bytes.
    TooBig(u16),
    Unreachable,
}

base::labelled! {
    /// The kind of an ICMP answer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum AnswerKind {
        /// [`Answer::TooBig`].
        TooBig => "too_big",
        /// [`Answer::Unreachable`].
        Unreachable => "unreachable",
    }
}

impl Answer {
    const fn kind(self) -> AnswerKind {
        match self {
            Self::TooBig(_) => AnswerKind::TooBig,
            Self::Unreachable => AnswerKind::Unreachable,
        }
    }
}

/// What has passed the device at a worker, sampled for its rates.
#[derive(Clone, Copy, Debug, Default)]
pub struct TunTraffic {
    pub read_packets: u64,
    pub read_bytes: u64,
    pub written_packets: u64,
    pub written_bytes: u64,
}

/// The counts of a worker at the device besides the peers' accounts and the queue's own counts; monotonic.
#[derive(Clone, Debug, Default)]
pub struct TunTotals {
    /// Packets read from the device, each super-packet counted as the packets cut from it.
    pub received: u64,
    /// Of those, packets that went to no peer.
    pub dropped: Counts<TunDrop>,
    /// Packets written to the device, each super-packet counted as the packets cut from it.
    pub delivered: u64,
    /// ICMP messages written in answer.
    pub answers: Counts<AnswerKind>,
    /// ICMP messages that were due and not written: the rate is limited, or the device refused them.
    pub answers_withheld: u64,
    /// TCP SYNs whose maximum segment size was lowered.
    pub mss_clamped: u64,
    /// Copies of link-local multicast for peers.
    pub multicast_copies: u64,
    /// The prefixes that lead to a peer, or to nobody, at the first worker.
    pub prefixes: u64,
    /// Times that other peers took over prefixes that several hold, at the first worker.
    pub handovers: u64,
    /// Packets for peers, by the index of the lane that their hash gave them.
    pub by_lane: Vec<u64>,
}

/// The TUN device at one worker.
pub struct TunSide {
    pub queue: Box<dyn TunQueue>,
    pub token: Token,
    /// The peer of each inner address.
    pub routes: PeerRoutes,
    /// The users that have inner addresses of their own.
    pub users: Arc<Links>,
    /// With `tun.multicast`.
    pub multicast: Option<Box<Multicast>>,
    /// The virtio header of each packet of the batch that was read last.
    pub headers: Vec<VnetHeader>,
    /// The destination of the last packet that was dropped because nobody has the next hop of its route; taken by who logs it.
    pub unreachable: Option<IpAddr>,
    /// The largest inner packet that the operator allows, in bytes.
    pub most_mtu: u16,
    pub totals: TunTotals,
    pub sampler: Sampler<TunTraffic>,
    /// The buffer in which fragments are made.
    pub fragment: Vec<u8>,
    /// The buffer in which packets are made before they are cut into fragments.
    pub whole: Vec<u8>,
    merger: Merger,
    list: PacketDelivery,
    pub settlements: Settlements,
    allowances: PerKind<AnswerKind, Allowance>,
    /// With `tun.icmp_errors`: the allowance for errors of routers that are in no peer's prefix.
    pub errors: Option<Allowance>,
    /// With `[records]`: the packets to record.
    pub records: Option<Box<PacketTable>>,
    answer: Box<[u8; MOST_ANSWER]>,
}

impl TunSide {
    /// Errors of routers that pass each second (our choice): path MTU discovery needs one for each flow.
    pub const ERRORS: Pace = Pace { per_second: 10, at_once: 10 };

    /// The worker's part of the device.
    #[must_use]
    pub fn new(queue: Box<dyn TunQueue>, token: Token, most_mtu: u16, now: Instant) -> Self {
        Self {
            queue,
            token,
            routes: PeerRoutes::default(),
            users: Arc::default(),
            multicast: None,
            headers: Vec::new(),
            unreachable: None,
            most_mtu,
            totals: TunTotals { by_lane: vec![0; usize::from(MAX_LANES)], ..TunTotals::default() },
            sampler: Sampler::new(now),
            fragment: Vec::new(),
            whole: Vec::new(),
            merger: Merger::default(),
            list: PacketDelivery::default(),
            settlements: Settlements::default(),
            allowances: PerKind::from_fn(|_| Allowance::new(ANSWERS, now)),
            errors: None,
            records: None,
            answer: Box::new([0; MOST_ANSWER]),
        }
    }

    /// Whether a packet of `peer` may pass although its source is not the peer's: it is an error about a packet that was sent to the
    /// peer's prefixes from where the error goes.
    pub fn passes_error(&mut self, packet: &[u8], view: &IpView, peer: PeerId, now: Instant) -> bool {
        let Some(allowance) = &mut self.errors else { return false };
        let about = icmp::quoted(packet, view).filter(|quoted| quoted.source == view.destination);
        about.is_some_and(|quoted| self.routes.holders(quoted.destination).contains(&peer))
            && allowance.take(1, now)
    }

    /// Lists `packet`, whose owner is its peer's number, for writing if it continues the flow of the packet before.
    #[inline]
    pub fn push_continued(&mut self, batch: &ReceiveBatch, packet: &Packet) -> bool {
        self.merger.try_join(&mut self.list, batch, packet)
    }

    /// Lists `packet`, whose owner is its peer's number, for writing.
    pub fn push(&mut self, batch: &mut ReceiveBatch, packet: Packet, view: &IpView) {
        let offload = self.queue.offload();
        self.merger.push(&mut self.list, batch, packet, view, offload);
    }

    /// Writes what is listed; its packets lie in `batch`.
    pub fn flush(&mut self, batch: &ReceiveBatch) {
        if self.list.is_empty() {
            return;
        }
        let (settlements, totals) = (&mut self.settlements, &mut self.totals);
        self.queue.deliver(batch, &mut self.list, &mut |message, outcome| {
            let packets = u64::from(message.packets);
            totals.delivered += match outcome {
                SendOutcome::Sent => packets,
                SendOutcome::Partly { failed, .. } => packets.saturating_sub(u64::from(failed)),
                SendOutcome::Failed(_) => 0,
            };
            settlements.message(PeerId(message.owner), packets, packets, outcome);
        });
        self.merger.clear();
    }

    /// Tells the sender of a packet that it cannot be carried, if an answer is allowed.
    pub fn answer(&mut self, packet: &[u8], view: &IpView, answer: Answer, now: Instant) {
        let written = match answer {
            Answer::TooBig(mtu) => icmp::too_big(packet, view, mtu, &mut self.answer),
            Answer::Unreachable => icmp::unreachable(packet, view, &mut self.answer),
        };
        let Some(message) = written.and_then(|len| self.answer.get(..len)) else { return };
        let kind = answer.kind();
        if self.allowances[kind].take(1, now) && self.queue.send(message) == SendOutcome::Sent {
            self.totals.answers[kind] += 1;
        } else {
            self.totals.answers_withheld += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use base::clock::{Clock, ManualClock};
    use ip::packets::TunOffload;
    use net::{
        Net, Ready,
        memory::{MemoryFabric, MemoryTun},
    };

    #[test]
    fn answers_are_limited_and_come_back() {
        let clock = ManualClock::default();
        let mut allowance = Allowance::new(ANSWERS, clock.now());
        let mut granted = |count: u32| (0..count).filter(|_| allowance.take(1, clock.now())).count();
        assert_eq!(granted(1_000), ANSWERS.at_once as usize);
        clock.advance(Duration::from_millis(50));
        assert_eq!(granted(1_000), 10);
        clock.advance(Duration::from_secs(3600));
        assert_eq!(granted(1_000), ANSWERS.at_once as usize);
    }

    #[test]
    fn what_has_no_way_leaves_the_answers_of_path_mtu_discovery() {
        let clock = ManualClock::default();
        let mut host = MemoryFabric::default().host(&[], Ready::default());
        host.set_tun(&MemoryTun::new(1, TunOffload::default()));
        let queue = host.tun(Token(0)).unwrap().unwrap();
        let mut tun = TunSide::new(queue, Token(0), 1421, clock.now());
        let packet =
            [0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2, 0, 7, 0, 7, 0, 8, 0, 0];
        let view = IpView::parse(&packet).unwrap();
        for _ in 0..1_000 {
            tun.answer(&packet, &view, Answer::Unreachable, clock.now());
        }
        tun.answer(&packet, &view, Answer::TooBig(1280), clock.now());
        let answers = [AnswerKind::TooBig, AnswerKind::Unreachable].map(|kind| tun.totals.answers[kind]);
        assert_eq!(answers, [1, u64::from(ANSWERS.at_once)]);
        assert_eq!(tun.totals.answers_withheld, 1_000 - u64::from(ANSWERS.at_once));
    }
}

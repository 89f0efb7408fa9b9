//! The accounting of datagrams: what came in, what went out, and why the rest did not.
//!
//! For each direction of each peer, at every moment: `received = delivered + in queue + Σ dropped(reason)`.

use net::{SendFailure, SendOutcome};
use serde::{Deserialize, Serialize};
use wire::ids::PeerId;

/// Which way a datagram travels, seen from this agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From a local socket to the peer.
    Uplink,
    /// From the peer to a local socket.
    Downlink,
}

impl Direction {
    /// Both, uplink first.
    pub const ALL: [Self; 2] = [Self::Uplink, Self::Downlink];

    /// The value of the metric label `direction`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Uplink => "uplink",
            Self::Downlink => "downlink",
        }
    }
}

/// Why a datagram was dropped. Every drop in the agent has one of these and is counted under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum DropReason {
    /// The relay's queue was full and the policy keeps what came first.
    QueueFull,
    /// The relay's queue was full and the policy keeps what came last.
    QueueEvicted,
    /// The queues of all peers together held as many bytes as they may.
    QueueMemory,
    /// The flow held its whole share of the queue.
    FlowQuota,
    /// It waited longer than the queue's time limit.
    Expired,
    /// It does not fit into one packet to this peer.
    TooLarge,
    /// The ceiling on flows is reached.
    FlowLimit,
    /// The peer opens flows faster than it may.
    FlowRate,
    /// The peer, or this agent, offers no service of that name or number.
    UnknownService,
    /// The peer may not use this service.
    NotAllowed,
    /// The far end refused the flow.
    FlowRefused,
    /// It belongs to a flow that this end does not know.
    UnknownFlow,
    /// Its payload context is not one that this version knows.
    UnknownContext,
    /// Its payload header cannot be read, or its pieces contradict each other.
    Malformed,
    /// No socket to the service could be opened.
    SocketOpen,
    /// The socket's send buffer was full.
    SendBlocked,
    /// Nobody listens at the far end of the socket.
    SendRefused,
    /// The kernel found it too large for the interface or the path.
    SendTooLarge,
    /// No route to the destination.
    SendUnreachable,
    /// The kernel had no memory for it.
    SendNoBuffers,
    /// A firewall on this host refused it.
    SendForbidden,
    /// The kernel refused it for another reason.
    SendOther,
    /// The lane ended, or its keys were used up, before the packet was sealed.
    LaneClosed,
    /// The agent stopped, or the flow was closed, while it waited.
    Shutdown,
    /// It was at another worker than its flow or its lane, and the hand-over between them was full.
    HandOverFull,
    /// The peer was removed.
    PeerRemoved,
    /// An IP packet came from a peer whose `allowed_ips` do not hold its source address.
    Spoofed,
    /// This agent, or the peer, has no TUN device for an IP packet.
    NoTun,
    /// A router marked the outer packet as having met congestion, and the packet inside cannot say so (RFC 6040 §4.2).
    NotEcnCapable,
    /// It travelled in pieces, and not all of them came in time, or before others needed the room, or before its flow ended.
    Incomplete,
    /// A frame of a peer without lanes (standard mode) came while more of them waited than are held for one turn.
    PlainOverflow,
}

impl DropReason {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 31] = [
        Self::QueueFull,
        Self::QueueEvicted,
        Self::QueueMemory,
        Self::FlowQuota,
        Self::Expired,
        Self::TooLarge,
        Self::FlowLimit,
        Self::FlowRate,
        Self::UnknownService,
        Self::NotAllowed,
        Self::FlowRefused,
        Self::UnknownFlow,
        Self::UnknownContext,
        Self::Malformed,
        Self::SocketOpen,
        Self::SendBlocked,
        Self::SendRefused,
        Self::SendTooLarge,
        Self::SendUnreachable,
        Self::SendNoBuffers,
        Self::SendForbidden,
        Self::SendOther,
        Self::LaneClosed,
        Self::Shutdown,
        Self::HandOverFull,
        Self::PeerRemoved,
        Self::Spoofed,
        Self::NoTun,
        Self::NotEcnCapable,
        Self::Incomplete,
        Self::PlainOverflow,
    ];

    /// The value of the metric label `reason`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::QueueEvicted => "queue_evicted",
            Self::QueueMemory => "queue_memory",
            Self::FlowQuota => "flow_quota",
            Self::Expired => "expired",
            Self::TooLarge => "too_large",
            Self::FlowLimit => "flow_limit",
            Self::FlowRate => "flow_rate",
            Self::UnknownService => "unknown_service",
            Self::NotAllowed => "not_allowed",
            Self::FlowRefused => "flow_refused",
            Self::UnknownFlow => "unknown_flow",
            Self::UnknownContext => "unknown_context",
            Self::Malformed => "malformed",
            Self::SocketOpen => "socket_open",
            Self::SendBlocked => "send_blocked",
            Self::SendRefused => "send_refused",
            Self::SendTooLarge => "send_too_large",
            Self::SendUnreachable => "send_unreachable",
            Self::SendNoBuffers => "send_no_buffers",
            Self::SendForbidden => "send_forbidden",
            Self::SendOther => "send_other",
            Self::LaneClosed => "lane_closed",
            Self::Shutdown => "shutdown",
            Self::HandOverFull => "hand_over_full",
            Self::PeerRemoved => "peer_removed",
            Self::Spoofed => "spoofed",
            Self::NoTun => "no_tun",
            Self::NotEcnCapable => "not_ecn_capable",
            Self::Incomplete => "incomplete",
            Self::PlainOverflow => "plain_overflow",
        }
    }
}

impl From<SendFailure> for DropReason {
    fn from(failure: SendFailure) -> Self {
        match failure {
            SendFailure::WouldBlock => Self::SendBlocked,
            SendFailure::TooLarge => Self::SendTooLarge,
            SendFailure::Refused => Self::SendRefused,
            SendFailure::Unreachable => Self::SendUnreachable,
            SendFailure::NoBuffers => Self::SendNoBuffers,
            SendFailure::Forbidden => Self::SendForbidden,
            SendFailure::Other => Self::SendOther,
        }
    }
}

/// The account of one direction of one peer. Counts are datagrams and payload bytes, and only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Datagrams that entered the agent in this direction.
    pub received: u64,
    /// Their payload bytes.
    pub received_bytes: u64,
    /// Datagrams handed on: to the kernel inside a packet (uplink), or to a local socket (downlink).
    pub delivered: u64,
    /// Datagrams dropped, by reason.
    #[serde(skip)]
    pub dropped: [u64; DropReason::COUNT],
    /// Datagrams handed to another worker of this agent, whose account they enter then.
    #[serde(skip)]
    pub handed_over: u64,
    /// Datagrams taken over from another worker.
    #[serde(skip)]
    pub taken_over: u64,
}

impl Account {
    /// Counts datagrams that entered.
    #[inline]
    pub fn receive(&mut self, datagrams: u64, bytes: u64) {
        self.received += datagrams;
        self.received_bytes += bytes;
    }

    /// Counts datagrams dropped for `reason`.
    #[inline]
    pub fn drop(&mut self, reason: DropReason, datagrams: u64) {
        self.dropped[reason as usize] += datagrams;
    }

    /// The sum over all reasons.
    #[must_use]
    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().sum()
    }

    /// What the invariant says must still be in the queue.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        (self.received + self.taken_over)
            .saturating_sub(self.delivered + self.dropped_total() + self.handed_over)
    }

    /// The invariant: everything received was delivered, dropped for a reason, or is one of `queued`. What is between two
    /// workers is queued too, in the sum of their accounts.
    #[must_use]
    pub fn balances(&self, queued: u64) -> bool {
        self.received + self.taken_over == self.delivered + queued + self.dropped_total() + self.handed_over
    }

    /// Adds another worker's account of the same peer and direction.
    pub fn add(&mut self, other: &Self) {
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.delivered += other.delivered;
        self.handed_over += other.handed_over;
        self.taken_over += other.taken_over;
        for (sum, count) in self.dropped.iter_mut().zip(other.dropped) {
            *sum += count;
        }
    }
}

/// What became of payloads of one peer that were handed to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// Whose payloads.
    pub peer: PeerId,
    /// How many.
    pub payloads: u64,
    /// `None`: the kernel took them.
    pub dropped: Option<DropReason>,
}

/// Settlements of one batch, equal neighbours joined.
#[derive(Debug, Default)]
pub struct Settlements(Vec<Settlement>);

impl Settlements {
    /// Notes that `payloads` were taken by the kernel, or dropped.
    pub fn note(&mut self, peer: PeerId, payloads: u64, dropped: Option<DropReason>) {
        if payloads == 0 {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.peer == peer && last.dropped == dropped => last.payloads += payloads,
            Some(_) | None => self.0.push(Settlement { peer, payloads, dropped }),
        }
    }

    /// Notes what became of a message of `segments` datagrams that carried `payloads`.
    pub fn message(&mut self, peer: PeerId, payloads: u64, segments: u64, outcome: SendOutcome) {
        match outcome {
            SendOutcome::Sent => self.note(peer, payloads, None),
            SendOutcome::Failed(why) => self.note(peer, payloads, Some(why.into())),
            SendOutcome::Partly { failed, why } => {
                // The datagrams of one message are equally full but for the last: the share that failed is theirs.
                let lost = (payloads * u64::from(failed)).div_ceil(segments.max(1)).min(payloads);
                self.note(peer, payloads - lost, None);
                self.note(peer, lost, Some(why.into()));
            }
        }
    }

    /// Notes that a message of `segments` datagrams that carried `payloads` waited too long; the kernel had
    /// taken `taken` of the datagrams before.
    pub fn expired(&mut self, peer: PeerId, payloads: u64, segments: u64, taken: u64) {
        let delivered = payloads * taken / segments.max(1);
        self.note(peer, delivered, None);
        self.note(peer, payloads - delivered, Some(DropReason::Expired));
    }

    /// Takes all of them, oldest first.
    pub fn drain(&mut self) -> impl Iterator<Item = Settlement> + '_ {
        self.0.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_index_their_own_place_and_have_distinct_labels() {
        let mut labels = std::collections::BTreeSet::new();
        for (place, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place);
            assert!(labels.insert(reason.label()));
        }
    }

    #[test]
    fn an_account_balances_only_when_everything_is_explained() {
        let mut account = Account::default();
        account.receive(10, 1000);
        account.delivered += 6;
        account.drop(DropReason::Expired, 3);
        assert!(account.balances(1));
        assert!(!account.balances(0));
        assert_eq!(account.outstanding(), 1);
    }

    #[test]
    fn every_payload_of_a_message_is_settled_once() {
        let mut settlements = Settlements::default();
        let peer = PeerId(3);
        settlements.message(peer, 10, 5, SendOutcome::Sent);
        settlements.message(peer, 4, 4, SendOutcome::Sent);
        let why = SendFailure::TooLarge;
        settlements.message(peer, 10, 5, SendOutcome::Partly { failed: 1, why });
        settlements.message(peer, 3, 1, SendOutcome::Failed(why));
        settlements.message(peer, 0, 1, SendOutcome::Failed(why));
        let too_large = Some(DropReason::SendTooLarge);
        let all: Vec<_> = settlements.drain().map(|settled| (settled.payloads, settled.dropped)).collect();
        assert_eq!(all, [(22, None), (5, too_large)]);
    }
}

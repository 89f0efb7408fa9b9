//! The accounting of datagrams: what came in, what went out, and why the rest did not.
//!
//! For each direction of each peer, at every moment: `received = delivered + in queue + Σ dropped(reason)`.

use base::{counts::Counts, ids::PeerId};
use net::{SendFailure, SendOutcome};
use serde::{Deserialize, Serialize};

base::labelled! {
    /// Which way a datagram travels, seen from this agent.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Direction {
        /// From a local socket to the peer.
        Uplink => "uplink",
        /// From the peer to a local socket.
        Downlink => "downlink",
    }
}

base::labelled! {
    /// Why a datagram was dropped. Every drop in the agent has one of these and is counted under it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum DropReason {
        /// The relay's queue was full and the policy keeps what came first.
        QueueFull => "queue_full",
        /// The relay's queue was full and the policy keeps what came last.
        QueueEvicted => "queue_evicted",
        /// The queues of all peers together held as many bytes as they may.
        QueueMemory => "queue_memory",
        /// The flow held its whole share of the queue.
        FlowQuota => "flow_quota",
        /// It waited longer than the queue's time limit.
        Expired => "expired",
        /// Its flow's queue stood for too long at `peer.rate`, and the packet cannot be marked; or the path is full, and the flow would
        /// not learn that because its losses are repaired and held in order.
        Aqm => "aqm",
        /// It does not fit into one packet to this peer.
        TooLarge => "too_large",
        /// The ceiling on flows is reached.
        FlowLimit => "flow_limit",
        /// The peer opens flows faster than it may.
        FlowRate => "flow_rate",
        /// The peer, or this agent, offers no service of that name or number.
        UnknownService => "unknown_service",
        /// The peer may not use this service; or it has a preshared key, and sent this where TLS alone protects it.
        NotAllowed => "not_allowed",
        /// The far end refused the flow.
        FlowRefused => "flow_refused",
        /// It came to a port that expects a PROXY header, without one that can be used, or from where no proxy is.
        NoProxyHeader => "no_proxy_header",
        /// It belongs to a flow that this end does not know.
        UnknownFlow => "unknown_flow",
        /// Its payload context is not one that this version knows.
        UnknownContext => "unknown_context",
        /// Its payload header cannot be read, or its pieces contradict each other.
        Malformed => "malformed",
        /// No socket to the service could be opened.
        SocketOpen => "socket_open",
        /// The socket's send buffer was full.
        SendBlocked => "send_blocked",
        /// The stream that carries packets where UDP does not pass took them more slowly than they came.
        CarrierFull => "carrier_full",
        /// Nobody listens at the far end of the socket.
        SendRefused => "send_refused",
        /// The kernel found it too large for the interface or the path.
        SendTooLarge => "send_too_large",
        /// No route leads to the datagram's destination.
        SendUnreachable => "send_unreachable",
        /// The kernel had no memory for it.
        SendNoBuffers => "send_no_buffers",
        /// A firewall on this host refused it.
        SendForbidden => "send_forbidden",
        /// The kernel refused it for another reason.
        SendOther => "send_other",
        /// Its socket had been without room for longer than any other, and the memory in which it waited was needed by another socket.
        SendEvicted => "send_evicted",
        /// The lane ended, or its keys were used up, before the packet was sealed.
        LaneClosed => "lane_closed",
        /// The agent stopped, or the flow was closed, while it waited.
        Shutdown => "shutdown",
        /// It was at another worker than its flow or its lane, and the hand-over between them was full.
        HandOverFull => "hand_over_full",
        /// The peer of the datagram was removed.
        PeerRemoved => "peer_removed",
        /// An IP packet came from a peer whose `allowed_ips` do not hold its source address.
        Spoofed => "spoofed",
        /// This agent, or the peer, has no TUN device for an IP packet.
        NoTun => "no_tun",
        /// A router marked the outer packet as having met congestion, and the packet inside cannot say so (RFC 6040 §4.2).
        NotEcnCapable => "not_ecn_capable",
        /// It travelled in pieces, and not all of them came in time, or before others needed the room, or before its flow ended.
        Incomplete => "incomplete",
        /// The peer sends a tenth more than it was told to send at most.
        OverRate => "over_rate",
        /// The peer has used up its quota.
        Quota => "quota",
        /// A frame of a peer without lanes (standard mode) came while more of them waited than are held for one turn.
        PlainOverflow => "plain_overflow",
    }
}

impl From<SendFailure> for DropReason {
    fn from(failure: SendFailure) -> Self {
        match failure {
            SendFailure::WouldBlock => Self::SendBlocked,
            SendFailure::CarrierFull => Self::CarrierFull,
            SendFailure::TooLarge => Self::SendTooLarge,
            SendFailure::Refused => Self::SendRefused,
            SendFailure::Unreachable => Self::SendUnreachable,
            SendFailure::NoBuffers => Self::SendNoBuffers,
            SendFailure::Forbidden => Self::SendForbidden,
            SendFailure::Other => Self::SendOther,
        }
    }
}

/// The number of datagrams dropped for each reason.
pub type DropCounts = Counts<DropReason>;

/// The account of one direction of one peer. Counts are datagrams and payload bytes, and only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Datagrams that entered the agent in this direction.
    pub received: u64,
    /// Payload bytes of the datagrams received.
    pub received_bytes: u64,
    /// Datagrams handed on: to the kernel inside a packet (uplink), or to a local socket (downlink).
    pub delivered: u64,
    /// The number of datagrams dropped, by reason.
    #[serde(skip)]
    pub dropped: DropCounts,
    /// Datagrams handed to another worker of this agent, whose account they enter then.
    #[serde(skip)]
    pub handed_over: u64,
    /// Datagrams taken over from another worker.
    #[serde(skip)]
    pub taken_over: u64,
}

impl Account {
    /// Counts datagrams that entered the agent, and their payload bytes.
    #[inline]
    pub fn receive(&mut self, datagrams: u64, bytes: u64) {
        self.received += datagrams;
        self.received_bytes += bytes;
    }

    /// Counts `datagrams` datagrams that were dropped for `reason`.
    #[inline]
    pub fn drop(&mut self, reason: DropReason, datagrams: u64) {
        self.dropped[reason] += datagrams;
    }

    /// Counts payloads that were handed to a socket: the kernel took them, or they were dropped.
    pub fn settle(&mut self, settled: Settlement) {
        match settled.dropped {
            None => self.delivered += settled.payloads,
            Some(reason) => self.drop(reason, settled.payloads),
        }
    }

    /// The number of datagrams dropped for all reasons together.
    #[must_use]
    pub fn dropped_total(&self) -> u64 {
        self.dropped.total()
    }

    /// The invariant: everything received was delivered, dropped for a reason, or is one of `queued`. In the sum of two workers'
    /// accounts, datagrams on their way between them count as queued.
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
        self.dropped += &other.dropped;
    }
}

/// What became of payloads of one peer that were handed to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settlement {
    pub peer: PeerId,
    pub payloads: u64,
    /// The reason of the drop; `None` if the kernel took the payloads.
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
    fn reasons_have_distinct_labels() {
        let labels: std::collections::BTreeSet<_> = DropReason::LABELS.into_iter().collect();
        assert_eq!(labels.len(), DropReason::COUNT);
    }

    #[test]
    fn an_account_balances_only_when_everything_is_explained() {
        let mut account = Account::default();
        account.receive(10, 1000);
        account.delivered += 6;
        account.drop(DropReason::Expired, 3);
        assert!(account.balances(1));
        assert!(!account.balances(0));
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

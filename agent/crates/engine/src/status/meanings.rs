//! What the reasons of drops, also of the TUN device, and the steps of the gate mean: shown beside the counts, and the same as in docs/metrics.md.

use dataplane::{forward::tun::TunDrop, relay::DropReason};
use gate::Step;

use crate::status::Word;

/// What a count means to an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// What is true of what was counted; a phrase without its subject.
    pub what: &'static str,
    /// Where to look, or whom it came from.
    pub aside: &'static str,
}

const fn meaning(what: &'static str, aside: &'static str) -> Meaning {
    Meaning { what, aside }
}

const OVER_RATE: Meaning = meaning(
    "came although the peer had sent a tenth more than it was told to send (`peer.rate_receive` here)",
    "the version and the configuration there",
);

const OVER_QUOTA: Meaning = meaning(
    "is of a peer that has used up its quota (`peer.quota` here)",
    "`culvert status` says until when; `culvert peer set NAME --quota-used 0`",
);

const CARRIER_FULL: Meaning = meaning(
    "met a carrier over TCP that is 5 ms behind, has 128 KiB waiting, or has ended",
    "UDP to the peer",
);

const NO_PROXY_HEADER: Meaning = meaning(
    "came without a PROXY header of version 2 that can be used to a port that expects one, or from none of the prefixes in `udp.accept_proxy`",
    "the log has the sender and why; the proxy, `udp.accept_proxy`",
);

/// What is true of a payload that was dropped, and what to look at.
#[must_use]
pub fn of_drop(reason: DropReason) -> Meaning {
    match reason {
        DropReason::QueueFull => meaning(
            "found the queue full; `peer.drop` is `\"newest\"`, or its flow is not confirmed yet",
            "load, CPU, the path",
        ),
        DropReason::Aqm => meaning(
            "belongs to a flow whose queue stood for too long at the limit (`peer.rate`, `peer.aqm`), and cannot be marked; or the path is full, and the flow's losses are repaired (`peer.repair` with `order = \"hold\"`)",
            "usual: it tells its sender to slow down",
        ),
        DropReason::QueueEvicted => meaning(
            "was evicted from a full queue: the oldest datagram of the flow that held most (`peer.drop = \"oldest\"`, the default)",
            "the same",
        ),
        DropReason::QueueMemory => meaning(
            "found the queues of all peers at their limit of bytes",
            "`limits.queue_bytes`, and which peers are stalled",
        ),
        DropReason::FlowQuota => meaning(
            "belongs to a flow that already held its share of the queue (`peer.flow_quota`), or as much as may wait before the far end confirms it (`limits.pending_open_packets`)",
            "that sender, `peer.flow_quota`",
        ),
        DropReason::Expired => meaning(
            "waited longer than `peer.queue.time`, in the kernel's buffer included; or was lost, and repaired after its deadline (`service.repair`)",
            "CPU, and whether the peer is connected",
        ),
        DropReason::NoProxyHeader => NO_PROXY_HEADER,
        DropReason::OverRate => OVER_RATE,
        DropReason::Quota => OVER_QUOTA,
        DropReason::TooLarge => meaning(
            "does not fit into one packet to the peer",
            "the path's MTU, the application; `service.oversize`",
        ),
        DropReason::FlowLimit => {
            meaning("would open a flow beyond a ceiling", "`limits.flows`, `limits.flows_per_peer`")
        }
        DropReason::FlowRate => meaning(
            "would open a flow, and the peer opens them faster than it may",
            "the source of the flows there; `limits.flows_per_peer`, a fifth of which is the rate",
        ),
        DropReason::UnknownService => meaning(
            "is for a service that the peer, or this agent, does not have",
            "`[[udp]]`, `[[service]]`",
        ),
        DropReason::NotAllowed => meaning(
            "is for a service that the peer may not use; or came on the control connection of a peer with a preshared key",
            "`peer.services`, `access.services`",
        ),
        DropReason::FlowRefused => meaning("is of a flow that the far end refused", "the far end's drops"),
        DropReason::UnknownFlow => meaning("belongs to no known flow, because it is late", "nothing, if few"),
        DropReason::UnknownContext => {
            meaning("has a form that this version does not know", "the versions of both ends")
        }
        DropReason::Malformed => meaning("is unreadable, or its pieces contradict each other", "the far end"),
        DropReason::SocketOpen => meaning(
            "needs a socket to the upstream, and none could be opened",
            "open files, ports, the upstream's address",
        ),
        DropReason::SendBlocked => meaning(
            "found the send buffer of a socket full, or waited in that of a socket that was closed",
            "the link, `net.core.wmem_max`",
        ),
        DropReason::CarrierFull => CARRIER_FULL,
        DropReason::SendRefused => meaning("went where nobody listens", "the upstream"),
        DropReason::SendTooLarge => {
            meaning("is too large for the interface or the path", "the MTU towards the upstream")
        }
        DropReason::SendUnreachable => meaning("has no route", "routes"),
        DropReason::SendNoBuffers => {
            meaning("found the kernel without memory", "the host's memory, the interface's queue")
        }
        DropReason::SendForbidden => meaning("was refused by a firewall of this host", "nftables, `output`"),
        DropReason::SendOther => meaning("was refused by the kernel for another reason", "the log"),
        DropReason::SendEvicted => meaning(
            "waited in the send buffer of the socket that had been without room for longest, and another socket needed one",
            "`culvert_send_buffer_bytes`, and which paths take nothing",
        ),
        DropReason::LaneClosed => meaning("was for a lane that ended", "`culvert_lanes_reopened_total`"),
        DropReason::Shutdown => meaning("waited when the agent stopped or its flow was closed", "nothing"),
        DropReason::HandOverFull => {
            meaning("was for another worker, whose ring was full", "CPU of the threads")
        }
        DropReason::PeerRemoved => meaning("was of a peer that was removed", "nothing"),
        DropReason::Spoofed => {
            meaning("is an IP packet whose source is not the peer's", "the peer's `allowed_ips` here")
        }
        DropReason::NoTun => meaning("is an IP packet, and one of the ends has no `[tun]`", "`[tun]`"),
        DropReason::Incomplete => meaning(
            "travelled in pieces, and not all of them came within a second, or before others needed the room, or before its flow ended",
            "loss on the path; `limits.reassembly_bytes`",
        ),
        DropReason::PlainOverflow => meaning(
            "came from a peer without lanes while a turn's worth of its frames, 1 MiB, waited; may include messages about flows",
            "CPU, and that sender",
        ),
        DropReason::NotEcnCapable => {
            meaning("passed a congested router, and cannot carry the mark (RFC 6040)", "the path")
        }
    }
}

/// What is true of a packet of the TUN device that went to no peer, and what to look at.
#[must_use]
pub fn of_tun_drop(reason: TunDrop) -> Meaning {
    match reason {
        TunDrop::NoRoute => meaning(
            "goes to an address in no peer's `allowed_ips`, or in no route that is followed",
            "`allowed_ips`; `culvert status --routes ADDRESS`",
        ),
        TunDrop::NoNextHop => meaning(
            "follows a route of the kernel whose next hop is nobody's `peer.address`",
            "`culvert status --routes ADDRESS`",
        ),
        TunDrop::Malformed => {
            meaning("has headers that cannot be read", "who sends it: `tcpdump` on the device")
        }
        TunDrop::NoReceiver => meaning(
            "is link-local multicast, and no peer is connected that takes it",
            "whether the peers are connected",
        ),
        TunDrop::MulticastRate => meaning(
            "is link-local multicast, and `tun.multicast` makes no more copies in this second",
            "who sends so much of it: `tcpdump` on the device",
        ),
        TunDrop::MulticastSource => meaning(
            "is link-local multicast from an address that is not the device's",
            "what forwards it into the device",
        ),
    }
}

/// What it means if more datagrams end at a step of the gate, and from whom they come.
#[must_use]
pub fn of_step(step: Step) -> Meaning {
    match step {
        Step::Passed => {
            meaning("packets of handshakes and connections, also of an earlier process of ours", "a peer")
        }
        Step::Admitted => meaning("handshakes that may begin", "a peer"),
        Step::Retry => meaning(
            "more knocks than the budget opens, or half of `limits.handshakes` under way: many peers return at once, or somebody floods",
            "a client with our key",
        ),
        Step::Part => meaning(
            "the first of the two datagrams of a hybrid handshake: as many as handshakes, and more where datagrams are lost",
            "a peer, or a client with our key",
        ),
        Step::Named => meaning("clients of the web server (`http.names`)", "a browser, or any HTTP/3 client"),
        Step::NamePart => meaning(
            "the first of two datagrams of such a client, or of any other QUIC client that fills two",
            "a browser, or an unauthenticated sender",
        ),
        Step::NameRetry => meaning(
            "clients of the web server that had to prove their address, because more than 32 of their handshakes were open at a worker",
            "a browser; or somebody floods",
        ),
        Step::NameBudget => meaning(
            "more first packets without a knock than 5 % of a core open: their names were not read, and clients of the web server go on over TCP",
            "an unauthenticated sender",
        ),
        Step::Class => meaning(
            "scanners; or peers' packets to a connection ID of another identity",
            "an unauthenticated sender",
        ),
        Step::Token => meaning(
            "QUIC clients without a knock: scanners, or a standard-mode client (`access.knock`)",
            "an unauthenticated sender",
        ),
        Step::Used => meaning(
            "late copies of a peer's own packets, a few per handshake on a bad path; or somebody records and repeats",
            "a replay",
        ),
        Step::Mac => meaning(
            "a knock for another public key or of another time: an entry with an old `public_key`, clocks that differ by minutes, somebody who repeats what he recorded, or a flood",
            "an unauthenticated sender",
        ),
        Step::RetryToken => meaning("a Retry answered late or from another address", "a client with our key"),
        Step::Budget => meaning(
            "one address, or all of them, exceed the budget of computations; or `limits.handshakes` are under way and the client is no known peer; or it broke the protocol and has to wait",
            "a client with our key",
        ),
        Step::Knock => {
            meaning("another version, or packets that are altered on the way", "a client with our key")
        }
        Step::Clock => meaning(
            "clocks differ by more than `access.clock_window`: the log says by how much. The further apart, the seldomer it is told from `mac`, and from 256 s more on never",
            "a client with our key",
        ),
        Step::Key => {
            meaning("a client that is not on the allowlist: the log names its key", "a client with our key")
        }
        Step::Hello => {
            meaning("a knock with another ClientHello than it was made for", "a client with our key")
        }
        Step::KeyExchange => meaning(
            "it falls back to X25519 alone where both ends can do better, or offers nothing else where `transport.key_exchange` is `\"hybrid-required\"`: the log says which",
            "an allowed peer",
        ),
        Step::OtherExit => meaning(
            "packets for another exit of the fleet (`transport.server_id`): a balancer that sends them to the wrong one, or an exit that is gone. They get no answer, and no decoy sees them",
            "a peer",
        ),
        Step::Abandoned => meaning(
            "the end of an attempt of which nothing else had arrived: another attempt of the same peer was faster",
            "a peer",
        ),
        Step::Full => meaning(
            "more handshakes within a quarter of an hour than are remembered: 200,000 over all workers; or more than 1,024 ClientHellos whose other datagram is missing",
            "an allowed peer",
        ),
    }
}

/// The same of a packet of the TUN device in one line, by label; `None` for what only a later version knows.
#[must_use]
pub fn of_tun_label(label: &str) -> Option<Word> {
    let reason = TunDrop::ALL.into_iter().find(|reason| reason.label() == label)?;
    Some(in_a_line(of_tun_drop(reason)))
}

/// What was dropped, for a terminal.
fn in_a_line(Meaning { what, aside }: Meaning) -> Word {
    format!("{what}: see {aside}").replace('`', "").into()
}

/// The same of a peer's payloads and of the gate in one line, by label; `None` for what only a later version knows, and for steps at which nothing is wrong.
#[must_use]
pub fn of_label(label: &str) -> Option<Word> {
    let drop = DropReason::ALL.into_iter().find(|reason| reason.label() == label);
    let drop = drop.map(|reason| in_a_line(of_drop(reason)));
    let step = Step::ALL.into_iter().find(|step| step.label() == label).filter(|step| match step {
        Step::Passed | Step::Admitted | Step::Retry | Step::Part | Step::Named | Step::NamePart => false,
        Step::NameRetry => false,
        Step::Class
        | Step::Token
        | Step::Used
        | Step::Mac
        | Step::RetryToken
        | Step::Budget
        | Step::Knock
        | Step::Clock
        | Step::Key
        | Step::Hello
        | Step::KeyExchange
        | Step::Full
        | Step::Abandoned
        | Step::OtherExit
        | Step::NameBudget => true,
    });
    let from = |Meaning { what, aside }| format!("from {aside}: {what}").replace('`', "").into();
    drop.or_else(|| step.map(of_step).map(from))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of a table of docs/metrics.md: those between two headings.
    fn rows(from: &str, to: &str) -> Vec<String> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/metrics.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (_, rest) = text.split_once(from).unwrap();
        let (table, _) = rest.split_once(to).unwrap();
        table.lines().filter(|line| line.starts_with("| `")).map(str::to_owned).collect()
    }

    #[test]
    fn the_document_says_the_same_of_each_reason() {
        let mut documented = rows("## Reasons of drops", "## Drops at the TUN device");
        let mut known = DropReason::ALL.map(|reason| {
            let Meaning { what, aside } = of_drop(reason);
            format!("| `{}` | {what} | {aside} |", reason.label())
        });
        documented.sort();
        known.sort();
        assert_eq!(documented, known);
    }

    #[test]
    fn the_document_says_the_same_of_each_reason_of_the_device() {
        let mut documented = rows("## Drops at the TUN device", "## Other values");
        let mut known = TunDrop::ALL.map(|reason| {
            let Meaning { what, aside } = of_tun_drop(reason);
            format!("| `{}` | {what} | {aside} |", reason.label())
        });
        documented.sort();
        known.sort();
        assert_eq!(documented, known);
    }

    #[test]
    fn the_document_says_the_same_of_each_step() {
        let mut documented = rows("## Steps of the gate", "## Reasons of drops");
        let mut known = Step::ALL.map(|step| {
            let Meaning { what, aside } = of_step(step);
            format!("| `{}` | {aside} | {what} |", step.label())
        });
        documented.sort();
        known.sort();
        assert_eq!(documented, known);
    }

    #[test]
    fn a_label_is_explained_unless_nothing_is_wrong() {
        assert_eq!(of_label("passed"), None);
        assert_eq!(of_label("of a later version"), None);
        let spoofed = of_label("spoofed").unwrap();
        assert_eq!(
            spoofed,
            "is an IP packet whose source is not the peer's: see the peer's allowed_ips here"
        );
        // Both a peer and the device have it, and the far end has nothing to do with the device's.
        assert_ne!(of_tun_label("malformed"), of_label("malformed"));
        assert_eq!(of_tun_label("spoofed"), None);
    }
}

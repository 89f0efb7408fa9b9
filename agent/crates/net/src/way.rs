//! The way that packets to a peer take, as operators see it.

use std::time::Instant;

base::labelled! {
    /// What carries the packets of a socket.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Over {
        /// Datagrams of UDP.
        Udp => "udp",
        /// UDP and a stream at once, until one answers.
        Both => "both",
        /// A stream over TCP.
        Carrier => "carrier",
    }
}

base::labelled! {
    /// Why packets take the way that they do.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Because {
        /// The endpoint that was dialled has it.
        Dialled => "dialled",
        /// UDP has not answered.
        UdpSilent => "udp_silent",
        /// UDP has answered a question.
        UdpAnswers => "udp_answers",
        /// Another socket has heard the peer there a moment before.
        HeardThere => "heard_there",
        /// The peer, which has dialled, comes that way.
        PeerChose => "peer_chose",
    }
}

/// The way that packets take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// What carries them.
    pub over: Over,
    /// Why not another way.
    pub because: Because,
    /// Since when; `None`: since the socket was opened.
    pub since: Option<Instant>,
}

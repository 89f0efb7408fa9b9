//! Counts of datagrams between unauthenticated senders and the decoy, with the reasons for drops (pure).

use base::counts::Counts;

base::labelled! {
    /// Which way a datagram travels between an unauthenticated sender and the decoy.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum DecoyDirection {
        /// From the sender to the decoy.
        ToDecoy => "to_decoy",
        /// From the decoy to the sender.
        ToSender => "to_sender",
    }
}

base::labelled! {
    /// The reason why a datagram to or from the decoy was dropped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum DecoyDrop {
        /// There is no decoy: unauthenticated senders get no answer.
        NoDecoy => "no_decoy",
        /// The source prefix has as many flows as one prefix may have.
        SourceFlows => "source_flows",
        /// The source prefix opened too many flows lately.
        SourceRate => "source_rate",
        /// All sources together opened too many flows lately.
        TotalRate => "total_rate",
        /// No socket could be opened for it.
        NoSocket => "no_socket",
        /// More arrived in one turn than is kept, or than worker 0 takes from the other workers.
        Overload => "overload",
        /// The agent is stopping and drops what waits.
        Stopping => "stopping",
        /// The kernel did not take a datagram for the decoy.
        ToDecoy => "to_decoy",
        /// The decoy's host refused it, or one before it: nobody listens there.
        Refused => "refused",
        /// An answer beyond what may go to an unauthenticated sender that has not answered.
        Amplification => "amplification",
        /// An answer larger than the path takes.
        TooLarge => "too_large",
        /// The kernel did not take an answer for an unauthenticated sender.
        ToSender => "to_sender",
    }
}

impl DecoyDrop {
    /// The direction of the datagrams that are dropped for this reason.
    #[must_use]
    pub const fn direction(self) -> DecoyDirection {
        match self {
            Self::NoDecoy
            | Self::SourceFlows
            | Self::SourceRate
            | Self::TotalRate
            | Self::NoSocket
            | Self::Overload
            | Self::Stopping
            | Self::ToDecoy
            | Self::Refused => DecoyDirection::ToDecoy,
            Self::Amplification | Self::TooLarge | Self::ToSender => DecoyDirection::ToSender,
        }
    }
}

/// Monotonic counts of datagrams between unauthenticated senders and the decoy.
///
/// A datagram that arrived and was not dropped was delivered, to the decoy or to the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoyStats {
    /// Datagrams that came from unauthenticated senders, and bytes.
    pub from_senders: Traffic,
    /// Datagrams that came from the decoy, and bytes.
    pub from_decoy: Traffic,
    /// Flows that were opened to the decoy.
    pub opened: u64,
    /// Flows that were evicted because the ceiling was reached.
    pub evicted: u64,
    /// Datagrams that were dropped, by reason.
    pub dropped: Counts<DecoyDrop>,
}

/// A count of datagrams and of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of datagrams that were counted.
    pub datagrams: u64,
    /// The bytes of their UDP payload.
    pub bytes: u64,
}

impl DecoyStats {
    /// Counts `datagrams` that were dropped for `reason`.
    pub fn drop(&mut self, reason: DecoyDrop, datagrams: u64) {
        self.dropped[reason] += datagrams;
    }
}

impl Traffic {
    /// Counts one datagram of `bytes` bytes.
    pub fn count(&mut self, bytes: usize) {
        self.datagrams += 1;
        self.bytes += bytes as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up() {
        let mut stats = DecoyStats::default();
        for datagrams in [2, 3] {
            stats.drop(DecoyDrop::Overload, datagrams);
        }
        for bytes in [1200, 100] {
            stats.from_decoy.count(bytes);
        }
        let mut dropped = Counts::default();
        dropped[DecoyDrop::Overload] = 5;
        assert_eq!((stats.dropped, stats.from_decoy), (dropped, Traffic { datagrams: 2, bytes: 1300 }));
        assert_eq!(stats.from_senders, Traffic::default());
    }

    #[test]
    fn reasons_have_distinct_labels() {
        let labels: std::collections::BTreeSet<_> = DecoyDrop::LABELS.into_iter().collect();
        assert_eq!(labels.len(), DecoyDrop::COUNT);
    }
}

//! What became of datagrams between strangers and the decoy, and why some were dropped (pure).

/// Why a datagram of a stranger, or one of the decoy's, was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecoyDrop {
    /// There is no decoy: strangers meet silence.
    NoDecoy,
    /// Its source prefix has as many flows as one may have.
    SourceFlows,
    /// Its source prefix opened too many flows of late.
    SourceRate,
    /// All strangers together did.
    TotalRate,
    /// No socket could be opened for it.
    NoSocket,
    /// More came in one turn than is kept, or than worker 0 takes from the others.
    Overload,
    /// The agent is stopping.
    Stopping,
    /// The kernel did not take it for the decoy.
    ToDecoy,
    /// The decoy's host refused it, or one before it: nobody listens there.
    Refused,
    /// An answer beyond what may go to a stranger that has not answered.
    Amplification,
    /// An answer larger than the path takes.
    TooLarge,
    /// The kernel did not take an answer for the stranger.
    ToStranger,
}

impl DecoyDrop {
    /// How many reasons there are.
    pub const COUNT: usize = 12;

    /// How many of them, the first ones, are about strangers' datagrams; the others are about the decoy's.
    pub const TO_DECOY: usize = 9;

    /// All reasons, in the order of their places.
    pub const ALL: [Self; Self::COUNT] = [
        Self::NoDecoy,
        Self::SourceFlows,
        Self::SourceRate,
        Self::TotalRate,
        Self::NoSocket,
        Self::Overload,
        Self::Stopping,
        Self::ToDecoy,
        Self::Refused,
        Self::Amplification,
        Self::TooLarge,
        Self::ToStranger,
    ];

    /// The value of the metric label `reason`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NoDecoy => "no_decoy",
            Self::SourceFlows => "source_flows",
            Self::SourceRate => "source_rate",
            Self::TotalRate => "total_rate",
            Self::NoSocket => "no_socket",
            Self::Overload => "overload",
            Self::Stopping => "stopping",
            Self::ToDecoy => "to_decoy",
            Self::Refused => "refused",
            Self::Amplification => "amplification",
            Self::TooLarge => "too_large",
            Self::ToStranger => "to_stranger",
        }
    }
}

/// What became of datagrams between strangers and the decoy; monotonic.
///
/// What came and was not dropped went on: to the decoy, or to the stranger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoyStats {
    /// Datagrams that came from strangers, and bytes.
    pub from_strangers: Traffic,
    /// Datagrams that came from the decoy, and bytes.
    pub from_decoy: Traffic,
    /// Flows that began.
    pub opened: u64,
    /// Flows that gave way to others, because the ceiling was reached.
    pub gave_way: u64,
    /// Datagrams dropped, by reason.
    pub dropped: [u64; DecoyDrop::COUNT],
}

/// Datagrams and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// How many.
    pub datagrams: u64,
    /// Bytes of UDP payload.
    pub bytes: u64,
}

impl DecoyStats {
    /// Counts `datagrams` that were dropped.
    pub fn drop(&mut self, reason: DecoyDrop, datagrams: u64) {
        self.dropped[reason as usize] += datagrams;
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
    fn reasons_index_their_own_place_and_have_distinct_labels() {
        let mut labels = std::collections::BTreeSet::new();
        for (place, reason) in DecoyDrop::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place);
            assert!(labels.insert(reason.label()));
        }
        assert_eq!(
            DecoyDrop::ALL[DecoyDrop::TO_DECOY],
            DecoyDrop::Amplification,
            "the first about the decoy's"
        );
    }
}

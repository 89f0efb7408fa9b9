//! Counts of what was repaired (pure).

/// Declares counts that can be added up.
macro_rules! counts {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* pub $field:ident: u64,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$doc])* pub $field: u64,)* }

        impl $name {
            pub fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

counts! {
    /// What the sender's ends of streams did.
    pub struct SenderCounts {
        /// Payloads sent for repair, whether they got numbers or not.
        pub payloads: u64,
        /// Bytes of those, with their contexts.
        pub payload_bytes: u64,
        pub numbered: u64,
        /// Payloads that went without, because there was no memory to keep them.
        pub without_memory: u64,
        pub retransmitted: u64,
        pub symbols: u64,
        /// Bytes of numbers, of retransmissions and of repair symbols.
        pub extra_bytes: u64,
        /// Payloads that the receiver asked for in vain: too late, or when retransmissions had used up their share of the bytes.
        pub unanswered: u64,
    }
}

counts! {
    /// What the receiver's ends of streams saw.
    pub struct ReceiverCounts {
        /// Numbered payloads that were received or recovered, each once.
        pub delivered: u64,
        /// Payloads that were missing when a later one came: the path's losses, and what it reordered.
        pub missing: u64,
        /// Runs of consecutive payloads that were missing.
        pub runs: u64,
        /// Missing payloads that came in time, because they were sent again or late.
        pub retransmitted: u64,
        /// Payloads that repair symbols gave in time.
        pub recovered: u64,
        /// Payloads that did not come in time.
        pub given_up: u64,
        /// Payloads that came again, or after they were recovered.
        pub duplicate: u64,
        /// Payloads that came after their deadline.
        pub late: u64,
        /// Requests for missing payloads that were sent.
        pub asked: u64,
        /// Repair symbols that contradict the payloads, or are no symbols.
        pub malformed: u64,
        /// Repair symbols for which there was no memory.
        pub without_memory: u64,
        /// How long the repaired payloads were missing, together, in microseconds.
        pub missed_micros: u64,
    }
}

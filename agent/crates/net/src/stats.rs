//! The counts of a UDP socket (pure).

use crate::ReceiveBatch;

/// Upper bounds of the buckets that calls and messages are counted in, in datagrams; one more bucket is for the rest.
pub const SIZE_BOUNDS: [u64; 6] = [1, 2, 4, 8, 16, 32];

/// Upper bounds of the buckets that ages are counted in, 100 µs to 100 ms; one more bucket is for the rest.
pub const AGE_BOUNDS_NANOS: [u64; 7] =
    [100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000];

const SIZES: usize = SIZE_BOUNDS.len() + 1;
const AGES: usize = AGE_BOUNDS_NANOS.len() + 1;

/// Monotonic counts of one UDP socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpStats {
    /// `recvmmsg` calls that returned at least one buffer.
    pub receive_calls: u64,
    /// Buffers received; with GRO one holds many datagrams.
    pub received_buffers: u64,
    /// Datagrams received, each of a GRO buffer counted.
    pub received_datagrams: u64,
    /// Bytes of payload that were received.
    pub received_bytes: u64,
    /// Calls of `sendmmsg` that the socket made.
    pub send_calls: u64,
    /// Datagrams sent, each of a GSO message counted.
    pub sent_datagrams: u64,
    /// Bytes of payload that were sent.
    pub sent_bytes: u64,
    /// Messages that were sent with `UDP_SEGMENT`.
    pub gso_messages: u64,
    /// Segments in the messages that were sent with `UDP_SEGMENT`.
    pub gso_segments: u64,
    /// Messages cut into single datagrams because GSO failed or was off for the destination.
    pub gso_fallbacks: u64,
    /// Times the kernel had no room to send.
    pub would_block: u64,
    /// Datagrams not sent, whatever the reason.
    pub send_failures: u64,
    /// Received buffers whose tail did not fit (truncated) and were refused whole.
    pub truncated: u64,
    /// `recvmmsg` calls that returned something, by the datagrams that they returned; see [`SIZE_BOUNDS`].
    pub receive_sizes: [u64; SIZES],
    /// Messages sent, by their segments; see [`SIZE_BOUNDS`].
    pub send_sizes: [u64; SIZES],
    /// Received buffers by their age in the kernel, those of a sample of the calls; see [`AGE_BOUNDS_NANOS`].
    pub ages: [u64; AGES],
    /// The ages of those buffers together, in nanoseconds.
    pub age_sum_nanos: u64,
    /// The greatest of them since the socket was last asked for its counts, in nanoseconds.
    pub age_max_nanos: u64,
}

impl UdpStats {
    /// Adds what happened between `before` and `now` of one socket.
    pub fn add_since(&mut self, now: &Self, before: &Self) {
        self.receive_calls += now.receive_calls - before.receive_calls;
        self.received_buffers += now.received_buffers - before.received_buffers;
        self.received_datagrams += now.received_datagrams - before.received_datagrams;
        self.received_bytes += now.received_bytes - before.received_bytes;
        self.send_calls += now.send_calls - before.send_calls;
        self.sent_datagrams += now.sent_datagrams - before.sent_datagrams;
        self.sent_bytes += now.sent_bytes - before.sent_bytes;
        self.gso_messages += now.gso_messages - before.gso_messages;
        self.gso_segments += now.gso_segments - before.gso_segments;
        self.gso_fallbacks += now.gso_fallbacks - before.gso_fallbacks;
        self.would_block += now.would_block - before.would_block;
        self.send_failures += now.send_failures - before.send_failures;
        self.truncated += now.truncated - before.truncated;
        add_each(&mut self.receive_sizes, &now.receive_sizes, &before.receive_sizes);
        add_each(&mut self.send_sizes, &now.send_sizes, &before.send_sizes);
        add_each(&mut self.ages, &now.ages, &before.ages);
        self.age_sum_nanos += now.age_sum_nanos - before.age_sum_nanos;
        self.age_max_nanos = self.age_max_nanos.max(now.age_max_nanos);
    }

    /// Counts a call that returned what is in `batch`, with ages of its own if it is `stamped`.
    pub fn count_received(&mut self, batch: &ReceiveBatch, stamped: bool) {
        self.receive_calls += 1;
        if batch.is_empty() {
            return;
        }
        let before = self.received_datagrams;
        for index in 0..batch.len() {
            let meta = batch.meta(index);
            self.received_datagrams += meta.datagrams() as u64;
            self.received_bytes += meta.len as u64;
            if !stamped {
                continue;
            }
            // An age is at most 10 s.
            let nanos = meta.age.as_nanos() as u64;
            self.ages[bucket(&AGE_BOUNDS_NANOS, nanos)] += 1;
            self.age_sum_nanos += nanos;
            self.age_max_nanos = self.age_max_nanos.max(nanos);
        }
        self.received_buffers += batch.len() as u64;
        self.receive_sizes[bucket(&SIZE_BOUNDS, self.received_datagrams - before)] += 1;
    }

    /// Counts a message that the kernel took.
    pub fn count_sent(&mut self, segments: u16, bytes: u64) {
        self.sent_datagrams += u64::from(segments);
        self.sent_bytes += bytes;
        if segments > 1 {
            self.gso_messages += 1;
            self.gso_segments += u64::from(segments);
        }
        self.send_sizes[bucket(&SIZE_BOUNDS, segments.into())] += 1;
    }
}

fn add_each<const N: usize>(sums: &mut [u64; N], now: &[u64; N], before: &[u64; N]) {
    for (sum, (now, before)) in sums.iter_mut().zip(now.iter().zip(before)) {
        *sum += now - before;
    }
}

/// The first bucket whose bound is not below `value`; behind the last bound one more.
fn bucket(bounds: &[u64], value: u64) -> usize {
    bounds.partition_point(|bound| *bound < value)
}

/// The counts of a socket, or of all sockets of a role, that have been added to the totals.
#[derive(Clone, Copy, Debug, Default)]
pub struct Booked {
    /// The counts of the socket so far.
    pub stats: UdpStats,
    /// Buffers that the kernel dropped at it.
    pub kernel_drops: u64,
    /// For a role: the bytes of the kernel's memory that waited in the receive buffers when they were last sampled.
    pub kernel_queue: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let buckets = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 4_096].map(|size| bucket(&SIZE_BOUNDS, size));
        assert_eq!(buckets, [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]);
        let buckets = [0, 100_000, 100_001, 99_999_999, 100_000_001, 10_000_000_000]
            .map(|nanos| bucket(&AGE_BOUNDS_NANOS, nanos));
        assert_eq!(buckets, [0, 0, 1, 6, 7, 7]);
    }

    #[test]
    fn differences_add_up_and_the_greatest_age_stays() {
        let mut before = UdpStats::default();
        before.count_sent(3, 30);
        let mut now = before;
        now.count_sent(1, 10);
        now.count_sent(64, 640);
        now.age_max_nanos = 7;
        let mut sum = UdpStats { age_max_nanos: 9, ..UdpStats::default() };
        sum.add_since(&now, &before);
        assert_eq!((sum.sent_datagrams, sum.gso_messages, sum.age_max_nanos), (65, 1, 9));
        assert_eq!(sum.send_sizes, [1, 0, 0, 0, 0, 0, 1]);
    }
}

//! The memory of payloads that wait for missing ones: what `limits.repair_bytes` counts is what is allocated. This program holds one test:
//! the allocator counts for all threads.

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use base::{
        clock::{Clock as _, ManualClock},
        memory::SharedMemory,
    };
    use repair::{Outcome, Receiver, RepairMemory};
    use wire::repair_terms::{Deadline, Mode, Order, StreamNumber, Terms};

    /// A frame of a flow with four bytes.
    const SMALL: [u8; 6] = [2, 2, 0, 0, 0, 0];

    /// Streams of a peer, of the 64 lanes and some services that it may have.
    const STREAMS: u16 = 32;

    /// Bytes that are allocated and counted when all streams have received what `number` and `distance` say.
    fn taken(payloads: u64, number: impl Fn(u64) -> (u64, u16)) -> [usize; 2] {
        let (total, clock) = (Arc::new(SharedMemory::default()), ManualClock::default());
        total.set_most(128 << 20);
        let memory = Arc::new(RepairMemory::of(&total));
        let before = dhat::HeapStats::get().curr_bytes;
        let terms = Terms {
            mode: Mode::Retransmit,
            deadline: Deadline::Fixed(Duration::from_secs(2)),
            order: Order::Hold,
            ..Terms::OFF
        };
        let mut streams: Vec<Receiver> =
            (0..STREAMS).map(|stream| Receiver::new(StreamNumber(stream), terms, &memory).unwrap()).collect();
        for stream in &mut streams {
            for index in 0..payloads {
                let (number, distance) = number(index);
                let outcome = stream.receive(number, distance, &SMALL, clock.now(), &mut |_| {});
                assert!(matches!(outcome, Outcome::Held | Outcome::Delivered), "{outcome:?}");
            }
        }
        let taken = [dhat::HeapStats::get().curr_bytes - before, total.used()];
        drop(streams);
        assert_eq!(total.used(), 0, "all of it is given back");
        taken
    }

    #[test]
    fn what_is_counted_is_what_is_allocated() {
        let _profiler = dhat::Profiler::builder().testing().build();
        for (what, payloads, [allocated, counted]) in [
            ("nothing", 1, taken(1, |_| (0, 0))),
            ("payloads behind one gap", 4_000, taken(4_000, |index| (index + 1, 1))),
            ("gaps", 500, taken(500, |index| (index * 300, 0))),
            ("payloads behind gaps of their own", 400, taken(400, |index| (2 * index + 1, 1))),
        ] {
            let ratio = allocated as f64 / counted as f64;
            println!("{what}: {payloads} each, {allocated} bytes allocated, {counted} counted: {ratio:.2}");
            assert!((0.2..=1.3).contains(&ratio), "{what}: {ratio:.2}");
        }
    }
}

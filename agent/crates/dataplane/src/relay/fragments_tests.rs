use base::clock::{Clock, ManualClock};
use proptest::prelude::*;

use super::*;

const LIMIT: usize = 256 << 10;
const FLOW: FlowId = FlowId(3);

/// A reassembler, its account, and the time.
struct Bench {
    reassembler: Reassembler,
    account: Account,
    clock: ManualClock,
}

impl Bench {
    fn new() -> Self {
        Self {
            reassembler: Reassembler::within(LIMIT, &Arc::default()),
            account: Account::default(),
            clock: ManualClock::default(),
        }
    }

    /// Takes a piece of the datagram `datagram` of a flow, whose bytes are those of `whole` at `range`.
    fn take(
        &mut self,
        (flow, datagram): (FlowId, u32),
        whole: &[u8],
        range: Range<usize>,
    ) -> Option<Vec<u8>> {
        self.take_of((flow, datagram, whole.len()), range.start, &whole[range])
    }

    fn take_of(
        &mut self,
        (flow, datagram, total): (FlowId, u32, usize),
        offset: usize,
        bytes: &[u8],
    ) -> Option<Vec<u8>> {
        let piece = Piece { flow, datagram, total, offset };
        let now = self.clock.now();
        let mut joined = vec![0; 7];
        let taken = self.reassembler.take(&piece, bytes, now, &mut self.account, &mut joined);
        if taken.is_some() {
            self.account.delivered += 1;
        }
        let taken = taken.map(|range| joined[range].to_vec());
        assert!(self.reassembler.held_bytes() <= self.reassembler.most);
        assert!(self.reassembler.len() <= MOST_INCOMPLETE);
        assert!(self.account.balances(self.reassembler.len() as u64), "{:?}", self.account);
        taken
    }

    /// The counts of datagrams: received, delivered, incomplete and malformed.
    fn counts(&self) -> [u64; 4] {
        let dropped = |reason: DropReason| self.account.dropped[reason];
        [
            self.account.received,
            self.account.delivered,
            dropped(DropReason::Incomplete),
            dropped(DropReason::Malformed),
        ]
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251) as u8 ^ seed).collect()
}

#[test]
fn the_last_byte_of_a_datagram_writes_one_byte() {
    let mut bench = Bench::new();
    let whole = pattern(MOST_DATAGRAM, 3);
    assert_eq!(bench.take((FLOW, 1), &whole, MOST_DATAGRAM - 1..MOST_DATAGRAM), None);
    assert_eq!(bench.reassembler.incomplete[0].parts.bytes.len(), 1);
    assert_eq!(bench.reassembler.held_bytes(), MOST_DATAGRAM + OVERHEAD_BYTES, "what it reserves counts");
    // The others from the back to the front, and the first in two.
    let mut end = MOST_DATAGRAM - 1;
    while end > 4_000 {
        assert_eq!(bench.take((FLOW, 1), &whole, end - 1_024..end), None);
        end -= 1_024;
    }
    assert_eq!(bench.take((FLOW, 1), &whole, 0..1_024), None);
    assert_eq!(bench.take((FLOW, 1), &whole, 1_024..end), Some(whole));
}

#[test]
fn pieces_in_any_order_make_the_datagram_that_was_cut() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut bench = Bench::new();
        let whole = pattern(3000, 1);
        let ranges = [0..1100, 1100..2500, 2500..3000];
        let mut done = None;
        for place in order {
            assert_eq!(done, None);
            done = bench.take((FLOW, 9), &whole, ranges[place].clone());
        }
        assert_eq!(done, Some(whole), "{order:?}");
        assert_eq!(bench.counts(), [1, 1, 0, 0]);
        assert_eq!((bench.reassembler.held_bytes(), bench.account.received_bytes), (0, 3000));
    }
}

#[test]
fn a_duplicate_is_ignored_before_and_after_its_datagram_is_complete() {
    let mut bench = Bench::new();
    let whole = pattern(2100, 2);
    assert_eq!(bench.take((FLOW, 0), &whole, 0..1050), None);
    assert_eq!(bench.take((FLOW, 0), &whole, 0..1050), None);
    assert_eq!(bench.take((FLOW, 0), &whole, 1050..2100), Some(whole.clone()));
    assert_eq!(bench.take((FLOW, 0), &whole, 1050..2100), None);
    assert_eq!(bench.counts(), [1, 1, 0, 0]);
    assert!(bench.reassembler.is_empty());
    bench.clock.advance(REASSEMBLY_TIME);
    assert_eq!(bench.take((FLOW, 0), &whole, 1050..2100), None);
    assert_eq!(bench.counts(), [2, 1, 0, 0], "what ended long ago is not remembered");
}

#[test]
fn what_contradicts_what_came_ends_the_datagram_and_only_that() {
    let whole = pattern(4000, 3);
    let wrong: [(usize, Range<usize>); 7] = [
        // Over the end of the first piece, over the start of the second, within, around.
        (4000, 1000..2100),
        (4000, 1500..2600),
        (4000, 10..1034),
        (4000, 0..2400),
        // Another length.
        (3999, 1100..2200),
        // Too short, beyond the end.
        (4000, 1100..2123),
        (4000, 3900..4001),
    ];
    for (total, range) in wrong {
        let mut bench = Bench::new();
        assert_eq!(bench.take((FLOW, 1), &whole, 0..1100), None);
        assert_eq!(bench.take((FLOW, 1), &whole, 2400..3500), None);
        assert_eq!(bench.take((FLOW, 2), &whole, 0..2000), None);
        let bytes = vec![0xee; range.len()];
        assert_eq!(bench.take_of((FLOW, 1, total), range.start, &bytes), None, "{total} {range:?}");
        assert_eq!(bench.counts(), [2, 0, 0, 1], "{total} {range:?}");
        // What comes of it later is passed over.
        assert_eq!(bench.take((FLOW, 1), &whole, 1100..2400), None);
        assert_eq!(bench.take((FLOW, 1), &whole, 3500..4000), None);
        assert_eq!(bench.counts(), [2, 0, 0, 1], "{total} {range:?}");
        assert_eq!(bench.take((FLOW, 2), &whole, 2000..4000), Some(whole.clone()));
    }
}

#[test]
fn a_piece_that_cannot_be_one_begins_nothing() {
    let mut bench = Bench::new();
    let bytes = pattern(1024, 4);
    for (number, (total, offset, len)) in
        [(2000, 0, 1023), (1024, 1, 1024), (65_508, 0, 1024), (2000, 1999, 0), (2000, 100, 1)]
            .into_iter()
            .enumerate()
    {
        assert_eq!(bench.take_of((FLOW, number as u32, total), offset, &bytes[..len]), None);
        assert_eq!(bench.counts(), [number as u64 + 1, 0, 0, number as u64 + 1]);
    }
    assert_eq!(bench.reassembler.held_bytes(), 0);
    assert_eq!(bench.take_of((FLOW, 99, 1), 0, b"x"), Some(b"x".to_vec()), "all of it in one piece is well");
}

#[test]
fn what_waits_for_too_long_is_dropped_with_the_oldest_first() {
    let mut bench = Bench::new();
    let whole = pattern(2048, 5);
    for datagram in 0..3 {
        assert_eq!(bench.take((FLOW, datagram), &whole, 0..1024), None);
        bench.clock.advance(Duration::from_millis(100));
    }
    let now = bench.clock.now();
    let partly_sent = now - Duration::from_millis(300);
    assert_eq!(bench.reassembler.deadline(), Some(partly_sent + REASSEMBLY_TIME));
    bench.clock.advance(Duration::from_millis(700));
    bench.reassembler.expire(bench.clock.now(), &mut bench.account);
    assert_eq!((bench.reassembler.len(), bench.counts()), (2, [3, 0, 1, 0]));
    assert_eq!(bench.take((FLOW, 0), &whole, 1024..2048), None, "it is too late");
    assert_eq!(bench.take((FLOW, 2), &whole, 1024..2048), Some(whole.clone()));
    assert_eq!(bench.counts(), [3, 1, 1, 0]);
    bench.clock.advance(Duration::from_secs(9));
    bench.reassembler.expire(bench.clock.now(), &mut bench.account);
    assert_eq!((bench.reassembler.held_bytes(), bench.counts()), (0, [3, 1, 2, 0]));
}

#[test]
fn a_peer_that_only_begins_datagrams_holds_no_more_than_its_limit() {
    let mut bench = Bench::new();
    let whole = pattern(MOST_DATAGRAM, 6);
    for datagram in 0..1000 {
        assert_eq!(bench.take((FLOW, datagram), &whole, 0..1024), None);
    }
    let most = LIMIT / (MOST_DATAGRAM + OVERHEAD_BYTES);
    assert_eq!(bench.reassembler.len(), most, "a reservation counts, and not what has come");
    assert_eq!(bench.counts(), [1000, 0, 1000 - most as u64, 0]);
    let reserved: usize =
        bench.reassembler.incomplete.iter().map(|datagram| datagram.parts.bytes.capacity()).sum();
    assert!(reserved <= LIMIT, "{reserved}");
    assert_eq!(bench.take((FLOW, 999), &whole, 1024..MOST_DATAGRAM), Some(whole.clone()), "the newest stay");
    // Small ones are bounded in number.
    bench.reassembler.set_most(1 << 30);
    for datagram in 1000..2000 {
        assert_eq!(bench.take_of((FLOW, datagram, 1025), 1024, b"x"), None);
    }
    assert_eq!(bench.reassembler.len(), MOST_INCOMPLETE);
    let mut bench = Bench::new();
    bench.reassembler.set_most(10_000);
    assert_eq!(bench.take_of((FLOW, 0, 3000), 0, &whole[..1024]), None);
    assert_eq!(bench.take((FLOW, 1), &whole, 0..1024), None);
    assert_eq!((bench.counts(), bench.reassembler.len()), ([2, 0, 1, 0], 1), "it drives nothing out");
}

#[test]
fn peers_whose_datagrams_fill_the_memory_of_all_leave_each_other_its_own() {
    let memory = Arc::<SharedMemory>::default();
    memory.set_most(4 * LIMIT);
    let begun = |bench: &mut Bench, datagrams: Range<u32>| {
        let whole = pattern(MOST_DATAGRAM, 8);
        datagrams.for_each(|datagram| assert_eq!(bench.take((FLOW, datagram), &whole, 0..1024), None));
        bench.reassembler.held_bytes()
    };
    let bench = || Bench { reassembler: Reassembler::within(LIMIT, &memory), ..Bench::new() };
    let mut greedy: Vec<Bench> = (0..10).map(|_| bench()).collect();
    let held: Vec<usize> = greedy.iter_mut().map(|bench| begun(bench, 0..9)).collect();
    let one = MOST_DATAGRAM + OVERHEAD_BYTES;
    assert!(held[..5].iter().all(|held| *held > LIMIT - one), "{held:?}");
    assert!(held[5..].iter().all(|held| (OWN_BYTES / 2..=OWN_BYTES).contains(held)), "{held:?}");
    assert_eq!(memory.used(), held.iter().sum::<usize>());
    assert!(memory.used() <= 4 * LIMIT + 10 * OWN_BYTES);
    for (bench, held) in greedy.iter().zip(&held) {
        assert_eq!(bench.reassembler.evicted, 9 - (held / one) as u64);
    }
    // One that was there before has no more than its own now.
    assert!((OWN_BYTES / 2..=OWN_BYTES).contains(&begun(&mut greedy[0], 9..10)));
    let mut modest = bench();
    let whole = pattern(MOST_DATAGRAM, 9);
    for datagram in 0..20 {
        assert_eq!(modest.take((FLOW, datagram), &whole, 0..1024), None);
        assert_eq!(modest.take((FLOW, datagram), &whole, 1024..MOST_DATAGRAM), Some(whole.clone()));
    }
    assert_eq!((modest.counts(), modest.reassembler.evicted), ([20, 20, 0, 0], 0));
    let [_, cleared, closed, late, ..] = &mut greedy[..] else { panic!("there are ten") };
    cleared.reassembler.clear(&mut cleared.account);
    closed.reassembler.end_flow(FLOW, &mut closed.account);
    late.clock.advance(REASSEMBLY_TIME);
    late.reassembler.expire(late.clock.now(), &mut late.account);
    let left = greedy.iter().map(|bench| bench.reassembler.held_bytes()).sum::<usize>();
    assert_eq!(memory.used(), left, "however they ended");
    assert_eq!(greedy[1].reassembler.evicted, 9 - (held[1] / one) as u64, "a count stays");
    drop((greedy, modest));
    assert_eq!(memory.used(), 0);
}

#[test]
fn the_end_of_a_flow_ends_its_datagrams_and_frees_its_place() {
    let mut bench = Bench::new();
    let whole = pattern(2048, 7);
    let other = FlowId(4);
    for flow in [FLOW, other] {
        assert_eq!(bench.take((flow, 0), &whole, 0..1024), None);
        assert_eq!(bench.take((flow, 1), &whole, 0..1024), None);
        assert_eq!(bench.take((flow, 1), &whole, 1024..2048), Some(whole.clone()));
    }
    bench.reassembler.end_flow(FLOW, &mut bench.account);
    assert_eq!(bench.counts(), [4, 2, 1, 0]);
    assert_eq!(bench.reassembler.held_bytes(), 2048 + OVERHEAD_BYTES);
    // Another flow has its place now, and the same numbers.
    assert_eq!(bench.take((FLOW, 1), &whole, 0..1024), None);
    assert_eq!(bench.take((FLOW, 1), &whole, 1024..2048), Some(whole.clone()));
    bench.reassembler.clear(&mut bench.account);
    assert_eq!((bench.counts(), bench.reassembler.held_bytes()), ([5, 3, 2, 0], 0));
    assert_eq!(bench.take((other, 0), &whole, 1024..2048), None, "the new process counts anew");
    assert_eq!(bench.take((other, 0), &whole, 0..1024), Some(whole));
}

#[test]
fn a_piece_that_comes_again_after_many_datagrams_begins_none_anew() {
    let mut bench = Bench::new();
    let whole = pattern(2048, 9);
    for datagram in 0..800 {
        assert_eq!(bench.take((FLOW, datagram), &whole, 0..1024), None);
        assert_eq!(bench.take((FLOW, datagram), &whole, 1024..2048), Some(whole.clone()));
        bench.clock.advance(Duration::from_millis(1));
    }
    for datagram in 0..800 {
        assert_eq!(bench.take((FLOW, datagram), &whole, 1024..2048), None);
    }
    assert_eq!((bench.counts(), bench.reassembler.len()), ([800, 800, 0, 0], 0));
    // Another flow has the same numbers, and after a second they may come again.
    assert_eq!(bench.take((FlowId(4), 0), &whole, 0..1024), None);
    bench.clock.advance(REASSEMBLY_TIME);
    assert_eq!(bench.take((FLOW, 799), &whole, 0..1024), None);
    assert_eq!(bench.take((FLOW, 799), &whole, 1024..2048), Some(whole));
    assert_eq!(bench.reassembler.ended.0.len(), MOST_REMEMBERED);
}

#[test]
fn what_is_remembered_of_ended_datagrams_is_bounded() {
    let mut bench = Bench::new();
    let whole = pattern(1024, 9);
    for datagram in 0..10_000 {
        assert_eq!(bench.take((FLOW, datagram), &whole, 0..1024), Some(whole.clone()));
    }
    assert_eq!(bench.reassembler.ended.0.len(), MOST_REMEMBERED);
}

#[test]
fn datagrams_that_follow_each_other_use_the_same_memory_and_no_more_than_they_count_for() {
    let mut bench = Bench::new();
    let whole = pattern(1452, 4);
    let place = |bench: &Bench| bench.reassembler.incomplete[0].parts.bytes.as_ptr();
    assert_eq!(bench.take((FLOW, 0), &whole, 0..1100), None);
    let first = place(&bench);
    assert_eq!(bench.take((FLOW, 0), &whole, 1100..1452), Some(whole.clone()));
    for datagram in 1..100 {
        assert_eq!(bench.take((FLOW, datagram), &whole, 1100..1452), None);
        assert_eq!(place(&bench), first);
        assert_eq!(bench.take((FLOW, datagram), &whole, 0..1100), Some(whole.clone()));
    }
    // Many that have ended leave little behind, and a small one does not get the memory of a large one.
    for datagram in 100..120 {
        assert_eq!(bench.take_of((FLOW, datagram, 4000), 0, &[1; 1024]), None);
    }
    bench.clock.advance(REASSEMBLY_TIME);
    bench.reassembler.expire(bench.clock.now(), &mut bench.account);
    assert_eq!(bench.reassembler.spare.len(), MOST_SPARE);
    assert_eq!(bench.take_of((FLOW, 200, 1025), 1024, b"x"), None);
    assert!(bench.reassembler.incomplete[0].parts.bytes.capacity() <= 1025 + SPARE_SLACK_BYTES);
}

#[test]
fn a_late_piece_ends_its_datagram_once() {
    let mut bench = Bench::new();
    let whole = pattern(3000, 8);
    assert_eq!(bench.take((FLOW, 0), &whole, 0..1500), None);
    for datagram in [0, 0, 1, 1] {
        let now = bench.clock.now();
        bench.reassembler.give_up(FLOW, datagram, 1500, now, &mut bench.account);
        assert!(bench.account.balances(bench.reassembler.len() as u64));
    }
    assert_eq!(bench.take((FLOW, 1), &whole, 0..1500), None);
    assert_eq!((bench.account.received, bench.account.dropped_total()), (2, 2));
    assert_eq!(bench.account.dropped[DropReason::Expired], 2);
}

proptest! {
    /// Datagrams of any sizes, cut anywhere the rules allow, their pieces shuffled, some lost and some twice: each arrives as it
    /// was or not at all, and the account knows which.
    #[test]
    fn what_is_whole_arrives_and_what_is_not_is_counted(
        sizes in proptest::collection::vec(1..=MOST_DATAGRAM, 1..6),
        cuts in proptest::collection::vec(LEAST_PIECE..2000_usize, 1..20),
        fates in proptest::collection::vec((any::<u32>(), 0..20_u8), 400),
    ) {
        let mut bench = Bench::new();
        bench.reassembler.set_most(1 << 20);
        let wholes: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(n, len)| pattern(*len, n as u8)).collect();
        let mut pieces = Vec::new();
        let mut lost = std::collections::BTreeSet::new();
        let mut fates = fates.iter();
        for (number, whole) in wholes.iter().enumerate() {
            let (mut start, mut cut) = (0, cuts.iter().cycle());
            while start < whole.len() {
                let end = (start + cut.next().unwrap()).min(whole.len());
                let (order, fate) = *fates.next().unwrap();
                match fate {
                    0 => drop(lost.insert(number)),
                    1 => pieces.extend([(order, number, start..end), (!order, number, start..end)]),
                    _ => pieces.push((order, number, start..end)),
                }
                start = end;
            }
        }
        pieces.sort_by_key(|(order, number, range)| (*order, *number, range.start));
        let partly_sent: std::collections::BTreeSet<usize> = pieces.iter().map(|piece| piece.1).collect();
        let mut done = Vec::new();
        for (_, number, range) in pieces {
            if let Some(whole) = bench.take((FLOW, number as u32), &wholes[number], range) {
                prop_assert_eq!(&whole, &wholes[number]);
                done.push(number);
            }
        }
        done.sort_unstable();
        let expected: Vec<usize> = (0..wholes.len()).filter(|number| !lost.contains(number)).collect();
        prop_assert_eq!(&done, &expected);
        bench.clock.advance(REASSEMBLY_TIME);
        bench.reassembler.expire(bench.clock.now(), &mut bench.account);
        prop_assert_eq!(bench.counts(), [partly_sent.len() as u64, done.len() as u64, (partly_sent.len() - done.len()) as u64, 0]);
        prop_assert_eq!(bench.reassembler.held_bytes(), 0);
    }
}

use base::clock::{Clock, ManualClock};
use proptest::prelude::*;

use super::*;
use crate::relay::PartlySent;

fn limits(policy: DropPolicy) -> Limits {
    let time = Duration::from_millis(100);
    Limits { datagrams: 10, bytes: 1000, time, policy, per_flow: 8, per_flow_bytes: 700, aqm: Aqm::DEFAULT }
}

/// Pushes `datagrams` of 10 bytes that carry `flow` and count up from `first`.
fn push(
    queue: &mut Queue,
    (flow, first): (u32, u8),
    datagrams: u8,
    now: Instant,
    account: &mut Account,
) -> usize {
    let data: Vec<u8> = (first..first + datagrams).flat_map(|number| [number; 10]).collect();
    account.receive(datagrams.into(), data.len() as u64);
    queue.push(QueueClass::Flow(FlowId(flow)), &data, 10, now, None, account)
}

/// Flow and number of everything that waits, oldest first.
fn drain(queue: &mut Queue, now: Instant) -> Vec<(u32, u8)> {
    let mut account = Account::default();
    let runs = std::iter::from_fn(|| Some(queue.take(false, None, now, &mut account)?.0));
    let numbered = runs.flat_map(|run| {
        let QueueClass::Flow(FlowId(flow)) = run.class else { panic!("flows went in") };
        run.data().chunks(10).map(|datagram| (flow, datagram[0])).collect::<Vec<_>>()
    });
    numbered.collect()
}

#[test]
fn drop_oldest_takes_the_oldest_of_the_flow_that_holds_most() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    push(&mut queue, (2, 0), 2, clock.now(), &mut account);
    push(&mut queue, (1, 0), 7, clock.now(), &mut account);
    push(&mut queue, (3, 0), 3, clock.now(), &mut account);
    assert_eq!(account.dropped[DropReason::QueueEvicted], 2);
    let kept = [(2, 0), (2, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (3, 0), (3, 1), (3, 2)];
    assert_eq!(drain(&mut queue, clock.now()), kept, "flow 2 came first and lost nothing");
}

#[test]
fn a_flow_that_holds_most_makes_room_for_itself_alone() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    push(&mut queue, (2, 0), 4, clock.now(), &mut account);
    for first in 0..50 {
        push(&mut queue, (1, first), 1, clock.now(), &mut account);
    }
    let kept = drain(&mut queue, clock.now());
    assert_eq!(kept, [(2, 0), (2, 1), (2, 2), (2, 3), (1, 44), (1, 45), (1, 46), (1, 47), (1, 48), (1, 49)]);
}

#[test]
fn drop_newest_keeps_the_oldest() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Newest), &Arc::default());
    queue.push(QueueClass::Flow(FlowId(1)), &[1; 600], 100, clock.now(), None, &mut account);
    let taken = queue.push(QueueClass::Flow(FlowId(2)), &[2; 650], 100, clock.now(), None, &mut account);
    assert_eq!(taken, 4);
    assert_eq!(account.dropped[DropReason::QueueFull], 3);
}

#[test]
fn one_flow_holds_no_more_than_its_share_and_the_policy_says_what_it_keeps() {
    let clock = ManualClock::default();
    for (policy, kept) in
        [(DropPolicy::Oldest, [2, 3, 4, 5, 6, 7, 8, 9]), (DropPolicy::Newest, [0, 1, 2, 3, 4, 5, 6, 7])]
    {
        let mut account = Account::default();
        let mut queue = Queue::new(limits(policy), &Arc::default());
        push(&mut queue, (1, 0), 5, clock.now(), &mut account);
        push(&mut queue, (1, 5), 5, clock.now(), &mut account);
        assert_eq!(account.dropped[DropReason::FlowQuota], 2);
        assert_eq!(push(&mut queue, (2, 0), 1, clock.now(), &mut account), 1);
        let all = drain(&mut queue, clock.now());
        assert_eq!(
            all.iter().filter(|(flow, _)| *flow == 1).map(|(_, number)| *number).collect::<Vec<_>>(),
            kept
        );
    }
}

#[test]
fn large_datagrams_are_held_to_the_share_in_bytes() {
    let clock = ManualClock::default();
    for policy in [DropPolicy::Oldest, DropPolicy::Newest] {
        let mut account = Account::default();
        let mut queue = Queue::new(limits(policy), &Arc::default());
        queue.push(QueueClass::Flow(FlowId(1)), &[1; 900], 300, clock.now(), None, &mut account);
        assert_eq!((queue.datagrams(), queue.bytes()), (2, 600));
        assert_eq!(account.dropped[DropReason::FlowQuota], 1);
    }
}

#[test]
fn many_runs_that_gave_way_leave_nothing_behind() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    push(&mut queue, (2, 0), 1, clock.now(), &mut account);
    for first in 0..200 {
        push(&mut queue, (1, first), 1, clock.now(), &mut account);
        assert!(queue.runs <= queue.datagrams() && queue.arrivals.len() <= 2 * queue.runs + 1, "{queue:?}");
    }
    assert_eq!(queue.datagrams(), 9);
}

#[test]
fn what_came_late_from_another_queue_is_dropped_behind_younger_ones() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut awaiting = Queue::new(limits(DropPolicy::Newest), &Arc::default());
    push(&mut awaiting, (1, 0), 2, clock.now(), &mut account);
    clock.advance(Duration::from_millis(90));
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    push(&mut queue, (2, 0), 3, clock.now(), &mut account);
    for run in awaiting.take_flow(FlowId(1)) {
        queue.put_back_last(run, None);
    }
    clock.advance(Duration::from_millis(20));
    assert_eq!(queue.take(false, None, clock.now(), &mut account).map(|(run, _)| run.count()), Some(3));
    assert!(queue.take(false, None, clock.now(), &mut account).is_none());
    assert_eq!(account.dropped[DropReason::Expired], 2);
}

#[test]
fn what_waited_too_long_is_dropped_not_sent() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    queue.push(QueueClass::Flow(FlowId(1)), &[1; 200], 100, clock.now(), None, &mut account);
    clock.advance(Duration::from_millis(60));
    queue.push(QueueClass::Flow(FlowId(1)), &[2; 100], 100, clock.now(), None, &mut account);
    clock.advance(Duration::from_millis(60));
    assert_eq!(queue.expire(None, clock.now(), &mut account), 2);
    assert_eq!(queue.datagrams(), 1);
}

#[test]
fn an_empty_datagram_waits_like_any_other() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    assert_eq!(queue.push(QueueClass::Flow(FlowId(1)), &[], 1, clock.now(), None, &mut account), 1);
    let (run, _) = queue.take(false, None, clock.now(), &mut account).unwrap();
    assert_eq!((run.count(), run.data().len()), (1, 0));
}

#[test]
fn a_flow_is_taken_out_whole_and_in_order() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    for (flow, byte) in [(1, 1), (2, 2), (1, 3)] {
        queue.push(QueueClass::Flow(FlowId(flow)), &[byte; 10], 10, clock.now(), None, &mut account);
    }
    let taken = queue.take_flow(FlowId(1));
    assert_eq!(taken.iter().map(|run| run.data()[0]).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(queue.datagrams(), 1);
    assert_eq!(queue.bytes(), 10);
}

#[test]
fn how_far_a_datagram_was_sent_is_forgotten_with_it() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = Queue::new(limits(DropPolicy::Oldest), &Arc::default());
    push(&mut queue, (1, 0), 8, clock.now(), &mut account);
    let (run, _) = queue.take(false, None, clock.now(), &mut account).unwrap();
    let partly_sent = Some(PartlySent { datagram: 7, offset: 5 });
    queue.put_back(run.rest(1, partly_sent), None);
    assert_eq!(queue.newest_of(FlowId(1)).unwrap().partly_sent, partly_sent);
    push(&mut queue, (1, 8), 2, clock.now(), &mut account);
    let (run, _) = queue.take(false, None, clock.now(), &mut account).unwrap();
    assert_eq!((run.count(), run.partly_sent), (6, None), "it gave way");
}

#[derive(Clone, Debug)]
enum Step {
    Push { flow: u32, datagrams: usize, size: usize },
    Take { keep: bool, sparse: bool },
    Rate(bool),
    Wait(u64),
    TakeFlow(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..4u32, 1..12usize, 0..300usize)
            .prop_map(|(flow, datagrams, size)| Step::Push { flow, datagrams: if size == 0 { 1 } else { datagrams }, size }),
        2 => any::<(bool, bool)>().prop_map(|(keep, sparse)| Step::Take { keep, sparse }),
        1 => any::<bool>().prop_map(Step::Rate),
        1 => (0..80u64).prop_map(Step::Wait),
        1 => (0..4u32).prop_map(Step::TakeFlow),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn bounds_hold_and_every_datagram_is_accounted_for(
        steps in steps(),
        oldest in any::<bool>(),
    ) {
        let clock = ManualClock::default();
        let policy = if oldest { DropPolicy::Oldest } else { DropPolicy::Newest };
        let mut queue = Queue::new(limits(policy), &Arc::default());
        let (mut account, mut rate) = (Account::default(), None);
        for step in steps {
            match step {
                Step::Push { flow, datagrams, size } => {
                    let data = vec![0; datagrams * size];
                    account.receive(datagrams as u64, data.len() as u64);
                    queue.expire(rate, clock.now(), &mut account);
                    queue.push(QueueClass::Flow(FlowId(flow)), &data, size, clock.now(), rate, &mut account);
                }
                Step::Take { keep, sparse } => {
                    let waited = queue.datagrams();
                    let taken = queue.take(sparse, rate, clock.now(), &mut account);
                    prop_assert!(sparse || taken.is_some() || queue.is_empty(), "of {waited} none was given: {queue:?}");
                    if let Some((run, portion)) = taken {
                        prop_assert!((1..=run.count()).contains(&portion));
                        let sent = if keep { portion / 2 } else { portion };
                        account.delivered += sent as u64;
                        queue.put_back(run.rest(sent, None), rate);
                    }
                }
                Step::Rate(limited) => rate = limited.then_some(100_000),
                Step::Wait(ms) => clock.advance(Duration::from_millis(ms)),
                Step::TakeFlow(flow) => {
                    for run in queue.take_flow(FlowId(flow)) {
                        account.delivered += run.count() as u64;
                    }
                }
            }
            prop_assert!(queue.datagrams() <= 10 && queue.bytes() <= 1000);
            let queued = |flow| {
                let runs = queue.flows.get(&FlowKey::Flow(FlowId(flow))).into_iter().flat_map(|queued| &queued.runs);
                runs.fold((0, 0), |(count, bytes), run| (count + run.count(), bytes + run.data().len()))
            };
            prop_assert!((0..4).map(queued).all(|(count, bytes)| count <= 8 && bytes <= 700));
            let all = || queue.flows.values().flat_map(|queued| &queued.runs);
            let memory: usize = all().map(Run::memory).sum();
            prop_assert!(memory <= 2 * queue.bytes(), "{memory} bytes for {}", queue.bytes());
            prop_assert_eq!(queue.by_part.len(), queue.flows.values().filter(|queued| queued.datagrams > 0).count());
            prop_assert_eq!(queue.runs, all().count());
            prop_assert!(queue.oldest().is_none_or(|oldest| all().any(|run| run.arrived == oldest)));
            prop_assert_eq!(queue.oldest().is_none(), queue.is_empty());
            prop_assert!(account.balances(queue.datagrams() as u64), "{account:?} {}", queue.datagrams());
        }
        queue.clear(DropReason::Shutdown, &mut account);
        prop_assert!(account.balances(0) && queue.bytes() == 0);
    }
}

/// What the queue promises, in the plainest way: flow and number of each datagram that waits.
#[derive(Default)]
struct Model(Vec<(u32, u8)>);

impl Model {
    fn count(&self, flow: u32) -> usize {
        self.0.iter().filter(|(owner, _)| *owner == flow).count()
    }

    fn remove_oldest(&mut self, flow: u32) {
        let place = self.0.iter().position(|(owner, _)| *owner == flow).unwrap();
        self.0.remove(place);
    }

    fn push(&mut self, flow: u32, number: u8, datagrams: u8, policy: DropPolicy) {
        let (most, quota) = (10, 8);
        for number in number..number + datagrams {
            match policy {
                DropPolicy::Newest if self.0.len() < most && self.count(flow) < quota => {}
                DropPolicy::Newest => continue,
                DropPolicy::Oldest => {}
            }
            self.0.push((flow, number));
        }
        while self.count(flow) > quota {
            self.remove_oldest(flow);
        }
        while self.0.len() > most {
            // Another flow that holds as much gives way before the one that sends.
            let loser = (0..6).max_by_key(|other| (self.count(*other), *other != flow, *other)).unwrap();
            self.remove_oldest(loser);
        }
    }
}

proptest! {
    #[test]
    fn who_loses_is_who_the_policy_names(
        pushes in proptest::collection::vec((0..6u32, 1..12u8), 1..40),
        oldest in any::<bool>(),
    ) {
        let (clock, mut account) = (ManualClock::default(), Account::default());
        let policy = if oldest { DropPolicy::Oldest } else { DropPolicy::Newest };
        // Bytes bind no one here.
        let mut queue = Queue::new(Limits { bytes: 10_000, per_flow_bytes: 10_000, ..limits(policy) }, &Arc::default());
        let mut model = Model::default();
        let mut number = 0;
        for (flow, datagrams) in pushes {
            let before = (0..6).map(|flow| model.count(flow)).collect::<Vec<_>>();
            push(&mut queue, (flow, number % 200), datagrams, clock.now(), &mut account);
            model.push(flow, number % 200, datagrams, policy);
            number = (number + datagrams) % 200;
            for other in (0..6).filter(|other| *other != flow && model.count(*other) < before[*other as usize]) {
                prop_assert!(before[other as usize] >= model.count(flow), "flow {flow} pushed out who held less");
            }
        }
        // Flows take turns, and within each the order is that of arrival.
        let mut left = drain(&mut queue, clock.now());
        left.sort_by_key(|(flow, _)| *flow);
        model.0.sort_by_key(|(flow, _)| *flow);
        prop_assert_eq!(left, model.0);
    }
}

/// 48 Mbit/s.
const RATE: Option<u64> = Some(6_000_000);

/// A queue with room for everything.
fn at_a_rate(clock: &ManualClock) -> Queue {
    let time = Duration::from_millis(100);
    let (policy, aqm) = (DropPolicy::Oldest, Aqm::DEFAULT);
    let most = 1 << 20;
    let queue = Queue::new(
        Limits {
            datagrams: most,
            bytes: 64 * most,
            time,
            policy,
            per_flow: most,
            per_flow_bytes: 64 * most,
            aqm,
        },
        &Arc::default(),
    );
    clock.advance(Duration::from_secs(1));
    queue
}

/// Takes what goes next, and returns whose it is and its bytes.
fn next(queue: &mut Queue, sparse: bool, now: Instant, account: &mut Account) -> Option<(QueueClass, usize)> {
    let (run, portion) = queue.take(sparse, RATE, now, account)?;
    let bytes = run.data().len().min(portion * run.segment);
    let class = run.class;
    queue.put_back(run.rest(portion, None), RATE);
    Some((class, bytes))
}

#[test]
fn flows_share_a_rate_by_bytes_whatever_their_packets() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = at_a_rate(&clock);
    let now = clock.now();
    for (flow, size) in [(1, 1_400), (2, 300), (3, 1_400)] {
        for _ in 0..40 {
            queue.push(QueueClass::Flow(FlowId(flow)), &vec![0; 30 * size], size, now, RATE, &mut account);
        }
    }
    let mut sent = [0; 4];
    while sent.iter().sum::<usize>() < 600_000 {
        let (QueueClass::Flow(FlowId(flow)), bytes) = next(&mut queue, false, now, &mut account).unwrap()
        else {
            panic!("flows went in")
        };
        sent[flow as usize] += bytes;
    }
    // Small packets cost their headers.
    assert!(sent[1].abs_diff(sent[3]) <= 5_000 && sent[2] * 5 > sent[1] * 4, "{sent:?}");
}

#[test]
fn a_flow_that_sends_less_than_its_share_goes_before_the_others() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = at_a_rate(&clock);
    let now = clock.now();
    queue.push(QueueClass::Flow(FlowId(1)), &[0; 60_000], 1_400, now, RATE, &mut account);
    next(&mut queue, false, now, &mut account);
    next(&mut queue, false, now, &mut account);
    assert!(queue.take(true, RATE, now, &mut account).is_none(), "it had its turn");
    queue.push(QueueClass::Flow(FlowId(2)), &[0; 100], 100, now, RATE, &mut account);
    assert_eq!(next(&mut queue, true, now, &mut account), Some((QueueClass::Flow(FlowId(2)), 100)));
    assert!(queue.take(true, RATE, now, &mut account).is_none());
}

/// An IPv4 packet of `len` bytes with this traffic class.
fn ip_packet(class: u8, len: u16) -> Vec<u8> {
    let mut packet = vec![0; usize::from(len)];
    (packet[0], packet[1]) = (0x45, class);
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    packet
}

/// IP packets of one flow.
fn packets(turn: u16, ahead: bool) -> QueueClass {
    QueueClass::Packets(PacketClass {
        turn,
        partial: false,
        tos: 0,
        lane: None,
        ahead,
        repair: None,
        copied: false,
    })
}

#[test]
fn classes_ahead_of_others_take_a_quarter_at_most() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = at_a_rate(&clock);
    let now = clock.now();
    for (turn, ahead) in [(1, false), (2, true)] {
        for _ in 0..600 {
            queue.push(packets(turn, ahead), &ip_packet(0, 1_000), 1_000, now, RATE, &mut account);
        }
    }
    let taken: Vec<(QueueClass, usize)> =
        (0..400).filter_map(|_| next(&mut queue, false, now, &mut account)).collect();
    let ahead = |(class, _): &&(QueueClass, usize)| *class == packets(2, true);
    assert_eq!(taken[..10].iter().filter(ahead).count(), 10, "they go first");
    let of_all = taken.iter().filter(ahead).count();
    assert!((100..=130).contains(&of_all), "{of_all} of 400 went ahead");
}

#[test]
fn a_queue_that_stands_marks_who_understands_and_drops_of_others() {
    let (clock, mut account) = (ManualClock::default(), Account::default());
    let mut queue = at_a_rate(&clock);
    for _ in 0..400 {
        let now = clock.now();
        for (bucket, class) in [(1, 0), (2, 2)] {
            account.receive(1, 1_000);
            queue.push(packets(bucket, false), &ip_packet(class, 1_000), 1_000, now, RATE, &mut account);
        }
        clock.advance(Duration::from_millis(1));
        // The queue grows until packets wait for long.
        if queue.datagrams() > 50 {
            for _ in 0..2 {
                account.delivered += u64::from(next(&mut queue, false, clock.now(), &mut account).is_some());
            }
        }
    }
    let dropped = account.dropped[DropReason::Aqm];
    assert!(dropped > 0 && queue.marked > 0, "{dropped} dropped, {} marked", queue.marked);
    assert_eq!(account.dropped.total(), dropped, "nothing is lost otherwise");
    assert!(account.balances(queue.datagrams() as u64));
}

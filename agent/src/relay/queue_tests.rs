use proptest::prelude::*;

use super::*;
use crate::clock::{Clock, ManualClock};

fn limits(policy: DropPolicy) -> Limits {
    Limits { datagrams: 10, bytes: 1000, time: Duration::from_millis(100), policy, per_flow: 8 }
}

#[test]
fn drop_oldest_keeps_the_newest_and_counts_the_rest() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest));
    queue.push(Belongs::Flow(FlowId(1)), &[1; 600], 100, (clock.now(), clock.now()), &mut account);
    queue.push(Belongs::Flow(FlowId(2)), &[2; 600], 100, (clock.now(), clock.now()), &mut account);
    assert_eq!(queue.datagrams(), 10);
    assert_eq!(account.dropped[DropReason::QueueEvicted as usize], 2);
    let first = queue.pop().unwrap();
    assert_eq!((first.belongs, first.count(), first.data().len()), (Belongs::Flow(FlowId(1)), 4, 400));
}

#[test]
fn drop_newest_keeps_the_oldest() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Newest));
    queue.push(Belongs::Flow(FlowId(1)), &[1; 600], 100, (clock.now(), clock.now()), &mut account);
    let taken =
        queue.push(Belongs::Flow(FlowId(2)), &[2; 650], 100, (clock.now(), clock.now()), &mut account);
    assert_eq!(taken, 4);
    assert_eq!(account.dropped[DropReason::QueueFull as usize], 3);
}

#[test]
fn one_flow_holds_no_more_than_its_share() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest));
    assert_eq!(
        queue.push(Belongs::Flow(FlowId(1)), &[1; 50], 5, (clock.now(), clock.now()), &mut account),
        8
    );
    assert_eq!(account.dropped[DropReason::FlowQuota as usize], 2);
    assert_eq!(queue.push(Belongs::Flow(FlowId(2)), &[2; 5], 5, (clock.now(), clock.now()), &mut account), 1);
}

#[test]
fn what_waited_too_long_is_dropped_not_sent() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest));
    queue.push(Belongs::Flow(FlowId(1)), &[1; 200], 100, (clock.now(), clock.now()), &mut account);
    clock.advance(Duration::from_millis(60));
    queue.push(Belongs::Flow(FlowId(1)), &[2; 100], 100, (clock.now(), clock.now()), &mut account);
    clock.advance(Duration::from_millis(60));
    assert_eq!(queue.expire(clock.now(), &mut account), 2);
    assert_eq!(queue.datagrams(), 1);
}

#[test]
fn an_empty_datagram_waits_like_any_other() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest));
    assert_eq!(queue.push(Belongs::Flow(FlowId(1)), &[], 1, (clock.now(), clock.now()), &mut account), 1);
    let run = queue.pop().unwrap();
    assert_eq!((run.count(), run.data().len()), (1, 0));
}

#[test]
fn a_flow_is_taken_out_whole_and_in_order() {
    let clock = ManualClock::default();
    let mut account = Account::default();
    let mut queue = Queue::new(limits(DropPolicy::Oldest));
    for (flow, byte) in [(1, 1), (2, 2), (1, 3)] {
        queue.push(Belongs::Flow(FlowId(flow)), &[byte; 10], 10, (clock.now(), clock.now()), &mut account);
    }
    let taken = queue.take_flow(FlowId(1));
    assert_eq!(taken.iter().map(|run| run.data()[0]).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(queue.datagrams(), 1);
    assert_eq!(queue.bytes(), 10);
}

#[derive(Clone, Debug)]
enum Step {
    Push { flow: u32, datagrams: usize, size: usize },
    Pop { keep: bool },
    Wait(u64),
    TakeFlow(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..4u32, 1..12usize, 0..300usize)
            .prop_map(|(flow, datagrams, size)| Step::Push { flow, datagrams: if size == 0 { 1 } else { datagrams }, size }),
        2 => any::<bool>().prop_map(|keep| Step::Pop { keep }),
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
        let mut queue = Queue::new(limits(policy));
        let mut account = Account::default();
        for step in steps {
            match step {
                Step::Push { flow, datagrams, size } => {
                    let data = vec![0; datagrams * size];
                    account.receive(datagrams as u64, data.len() as u64);
                    queue.push(Belongs::Flow(FlowId(flow)), &data, size, (clock.now(), clock.now()), &mut account);
                }
                Step::Pop { keep } => {
                    if let Some(run) = queue.pop() {
                        let sent = if keep { run.count() / 2 } else { run.count() };
                        account.delivered += sent as u64;
                        queue.put_back(run, sent);
                    }
                }
                Step::Wait(ms) => clock.advance(Duration::from_millis(ms)),
                Step::TakeFlow(flow) => {
                    for run in queue.take_flow(FlowId(flow)) {
                        account.delivered += run.count() as u64;
                    }
                }
            }
            prop_assert!(queue.datagrams() <= 10 && queue.bytes() <= 1000);
            prop_assert!(account.balances(queue.datagrams() as u64), "{account:?} {}", queue.datagrams());
        }
        queue.clear(DropReason::Shutdown, &mut account);
        prop_assert!(account.balances(0) && queue.bytes() == 0);
    }
}

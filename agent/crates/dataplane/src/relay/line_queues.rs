//! The queues of a peer with several lines: one for each, with its share of the line's rate and of the whole.
//!
//! ```text
//!   bucket ── table ──► line 0: [flow 7][flow 4] ── share of line 0 ─┐
//!                  └──► line 1: [packets 9]      ── share of line 1 ─┴─ shares of the whole ──► lanes
//! ```
//!
//! A peer with one way has the relay's own queue and share alone. Where there are lines, that queue holds what came while there was no
//! session. The runs of a flow are in one queue at a time: what waits elsewhere goes first.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use rate::{RateAccount, RateAccounts, Share};

use super::{DatagramRelay, DropReason, Queue, QueueClass, Run, run::FlowKey};
use crate::lines::{LineLoads, LineTraffic};

/// What waits for a line, and the line's rate.
#[derive(Debug)]
pub struct LineQueue {
    pub queue: Queue,
    /// This worker's share of the rate of the line, and of the whole rate to the peer.
    pub share: Share,
}

impl DatagramRelay {
    /// Follows the number of lines to the peer, 0 if there is one way. `rates` are its accounts, and `loads`
    /// gives what its lines carry.
    pub fn follow_lines(
        &mut self,
        count: usize,
        rates: &Arc<RateAccounts>,
        loads: impl FnOnce() -> Arc<LineLoads>,
        now: Instant,
    ) {
        if count == 0 {
            self.lines = None;
            let rate = self.share.rate();
            for mut line in std::mem::take(&mut self.line_queues) {
                self.queue.marked += line.queue.marked;
                for run in line.queue.take_all() {
                    self.queue.admit(run, rate, &mut self.uplink);
                }
            }
            return;
        }
        self.lines.get_or_insert_with(|| Box::new(LineTraffic::new(loads(), Arc::clone(rates), now)));
        for line in self.line_queues.len()..count {
            let account = u8::try_from(line).map_or_else(|_| rates.whole(), |line| rates.line(line));
            let share = Share::of_line(Arc::clone(account), Arc::clone(rates.whole()), now);
            self.line_queues.push(LineQueue { queue: self.queue.another(), share });
        }
    }

    /// The account of what is sent on lanes of this line; that of the peer without one.
    #[inline]
    #[must_use]
    pub fn account_of(&self, line: Option<u8>) -> &RateAccount {
        &self.share_of(line).account
    }

    /// This worker's share of what is sent on a line.
    #[inline]
    #[must_use]
    pub fn share_of(&self, line: Option<u8>) -> &Share {
        self.line_queue(line).map_or(&self.share, |line| &line.share)
    }

    /// What waits for a line.
    #[inline]
    #[must_use]
    pub fn queue_of(&self, line: Option<u8>) -> &Queue {
        self.line_queue(line).map_or(&self.queue, |line| &line.queue)
    }

    #[inline]
    fn line_queue(&self, line: Option<u8>) -> Option<&LineQueue> {
        self.line_queues.get(usize::from(line?))
    }

    /// The queue of a line and its share, to be changed, and the account of what is dropped.
    #[inline]
    pub(crate) fn waiting(&mut self, line: Option<u8>) -> (&mut Queue, &mut Share, &mut super::Account) {
        let Self { queue, share, line_queues, uplink, .. } = self;
        match line.and_then(|line| line_queues.get_mut(usize::from(line))) {
            Some(LineQueue { queue, share }) => (queue, share, uplink),
            None => (queue, share, uplink),
        }
    }

    /// All queues of datagrams that wait for a lane, or for their turn.
    pub fn queues(&self) -> impl Iterator<Item = &Queue> {
        [&self.queue].into_iter().chain(self.line_queues.iter().map(|line| &line.queue))
    }

    fn queues_mut(&mut self) -> impl Iterator<Item = &mut Queue> {
        [&mut self.queue].into_iter().chain(self.line_queues.iter_mut().map(|line| &mut line.queue))
    }

    /// Whether datagrams wait for a lane, or for their turn.
    #[inline]
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.queues().any(|queue| !queue.is_empty())
    }

    /// The limit on a line or on the whole, if there is one.
    #[inline]
    #[must_use]
    pub fn any_rate(&self) -> Option<u64> {
        self.share.rate().or_else(|| self.line_queues.iter().find_map(|line| line.share.rate()))
    }

    /// Whether datagrams of `class` need not wait for their turn on this line: nothing waits, and no rate limits it.
    #[inline]
    #[must_use]
    pub fn sends_at_once(&self, line: Option<u8>, class: QueueClass) -> bool {
        match self.line_queue(line) {
            None => !self.share.is_limited() && self.queue.is_empty(),
            Some(LineQueue { queue, share }) => {
                !share.is_limited() && queue.is_empty() && !self.waits_elsewhere(line, class.key())
            }
        }
    }

    fn waits_elsewhere(&self, line: Option<u8>, key: FlowKey) -> bool {
        let place = line.map_or(0, |line| usize::from(line) + 1);
        self.queues().enumerate().any(|(at, queue)| at != place && !queue.is_empty() && queue.holds_key(key))
    }

    /// Has datagrams that came to this host at `arrived` wait for their turn on a line; returns how many were taken in.
    pub fn enqueue(
        &mut self,
        line: Option<u8>,
        class: QueueClass,
        data: &[u8],
        segment: usize,
        arrived: Instant,
        now: Instant,
    ) -> usize {
        if !self.line_queues.is_empty() && self.waits_elsewhere(line, class.key()) {
            self.gather(line, class.key());
        }
        let (queue, share, account) = self.waiting(line);
        let rate = share.rate();
        queue.expire(rate, now, account);
        queue.push(class, data, segment, arrived, rate, account)
    }

    /// Moves what waits of a flow in other queues to that of a line, in order.
    fn gather(&mut self, line: Option<u8>, key: FlowKey) {
        let place = line.map_or(0, |line| usize::from(line) + 1);
        let others = self.queues_mut().enumerate().filter(|(at, _)| *at != place);
        let runs: Vec<Run> = others.flat_map(|(_, queue)| queue.take_key(key)).collect();
        for run in runs {
            self.admit(line, run);
        }
    }

    /// Adds a run that waited in another queue; what the queue of this line has no room for is dropped.
    pub(crate) fn admit(&mut self, line: Option<u8>, run: Run) {
        let (queue, share, account) = self.waiting(line);
        let rate = share.rate();
        queue.admit(run, rate, account);
    }

    /// Takes all that waits of a flow out of all queues.
    pub(crate) fn take_flow(&mut self, flow: super::FlowId) -> Vec<Run> {
        self.queues_mut().flat_map(|queue| queue.take_flow(flow)).collect()
    }

    /// Drops all that waits for a lane, or for its turn.
    pub fn clear_queues(&mut self, reason: DropReason) {
        let Self { queue, line_queues, uplink, .. } = self;
        let lines = line_queues.iter_mut().map(|line| &mut line.queue);
        [queue].into_iter().chain(lines).for_each(|queue| queue.clear(reason, uplink));
    }

    /// How long a datagram may wait for its turn.
    #[inline]
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.queue.time_limit(self.any_rate())
    }

    /// Whether datagrams wait that a rate limits.
    #[inline]
    #[must_use]
    pub fn is_paced(&self) -> bool {
        let lines = || self.line_queues.iter().any(|line| !line.queue.is_empty() && line.share.is_limited());
        (!self.queue.is_empty() && self.share.is_limited()) || lines()
    }

    pub(super) fn expire_queues(&mut self, now: Instant) {
        let Self { queue, share, line_queues, uplink, .. } = self;
        queue.expire(share.rate(), now, uplink);
        for LineQueue { queue, share } in line_queues {
            queue.expire(share.rate(), now, uplink);
        }
    }
}

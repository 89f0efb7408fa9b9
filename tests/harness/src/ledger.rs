//! Where each datagram on a [`Stage`] went: from the hosts through both agents and what is between them.
//!
//! ```text
//!  sent ─1─ received [agent] delivered ─2─ came [impairment] passed ─3─ received [agent] delivered ─4─ arrived
//! ```
//!
//! Inside an agent the account is exact. What is missing at 1 to 4 has to be among what the impairment lost or damaged, what
//! the receiving agent refused, or what the kernel counted there as dropped. The kernel counts buffers, each of which holds at
//! most 64 datagrams: what it says is a bound.

use std::{thread, time::Duration};

use crate::{
    agent::Agent,
    clock::{self, PATIENCE},
    http::{Account, Samples},
    impairment::{Fates, Kind, Way},
    place::Place,
    stage::{End, Stage},
    stream::{Count, Line},
};

/// Datagrams that one buffer of the kernel holds at most.
const PER_BUFFER: u64 = 64;

/// What counters said at one moment.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    directions: [Direction; 2],
}

/// Datagrams of others than the lines in one direction, through a service.
#[derive(Clone, Copy, Debug, Default)]
pub struct Others {
    /// Sent by them. The impairment knows only those of 1150 bytes: of others none was lost.
    pub sent: u64,
    /// Received by them.
    pub received: u64,
    /// Sent last, after the newest that was received: lost, or nobody waited for them.
    pub unheard: u64,
}

/// One direction: from agent a to agent b, or back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Direction {
    /// By the hosts towards the first agent.
    sent: u64,
    /// The first agent's.
    up: Account,
    /// UDP datagrams that the first agent has handed to the kernel for the second.
    out: u64,
    /// Of those that came to the impairment: with payloads, and all.
    payloads: Fates,
    all: Fates,
    /// UDP datagrams that the second agent has received from the first.
    into: u64,
    /// Of those, what it did not accept, repetitions aside.
    refused: u64,
    /// The second agent's.
    down: Account,
    /// At the hosts behind the second agent.
    arrived: u64,
    /// What the kernel has counted as dropped before and after each of the two agents.
    kernel: [u64; 4],
}

impl Ledger {
    /// What they said before anything was sent.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What they say now. While there is traffic they speak of different moments.
    #[track_caller]
    fn read(stage: &Stage) -> Self {
        let [a, b] = [End::Listener, End::Dialler].map(|end| stage.site(end).agent.samples());
        let lines: Vec<(&str, Count)> =
            stage.streams().lines().iter().map(|line| (line.name(), line.count())).collect();
        let routers = [stage.sites.west(), stage.sites.east()].map(|place| place.kernel_drops());
        let site = |end| {
            let site = stage.site(end);
            let [host, gateway] = [&site.host, &site.gateway].map(Place::kernel_drops);
            [host + gateway + kernel(&site.agent), gateway]
        };
        let [[at_a, gateway_a], [at_b, gateway_b]] = [End::Listener, End::Dialler].map(site);
        let middle = routers[0] + routers[1] + stage.discarded();
        let sum = |way, kind| {
            let fates = stage.relays().iter().map(|relay| relay.fates_of(way, kind));
            fates.fold(Fates::default(), Fates::and)
        };
        let direction = |way, (first, peer): (&Samples, &str), (second, of): (&Samples, &str), kernel| {
            let goes = |line: &Line| line.leads_to(peer);
            let lines = || stage.streams().lines().iter().zip(&lines);
            let total = |goes_there: bool, count: fn(&Count) -> u64| {
                lines()
                    .filter(|(line, _)| goes(line) == goes_there)
                    .map(|(_, (_, its))| count(its))
                    .sum::<u64>()
            };
            let payloads = sum(way, Kind::Payload);
            Direction {
                sent: total(true, |count| count.sent) + total(false, |count| count.echoed),
                up: first.account(peer, "uplink"),
                out: quic(first, "culvert_socket_sent_datagrams_total"),
                payloads,
                all: payloads.and(sum(way, Kind::Other)),
                into: quic(second, "culvert_socket_received_datagrams_total"),
                refused: refused(second),
                down: second.account(of, "downlink"),
                arrived: total(true, |count| count.arrived) + total(false, |count| count.returned),
                kernel,
            }
        };
        Self {
            directions: [
                direction(
                    Way::Back,
                    (&a, "b"),
                    (&b, "a"),
                    [at_a, gateway_a + middle, middle + gateway_b, at_b],
                ),
                direction(
                    Way::There,
                    (&b, "a"),
                    (&a, "b"),
                    [at_b, gateway_b + middle, middle + gateway_a, at_a],
                ),
            ],
        }
    }

    /// What they say once the traffic has stopped and nothing is on its way; the traffic goes on then.
    ///
    /// # Panics
    /// When that takes too long.
    #[must_use]
    #[track_caller]
    pub fn open(stage: &Stage) -> Self {
        stage.streams().pause();
        let mut last = Self::default();
        // Twice: on a busy machine one worker may publish later than another, and what it lacks now would be too much for ever.
        let quiet = clock::until("nothing is on its way", PATIENCE, || {
            last.quiet(stage)?;
            last.quiet(stage)
        });
        stage.streams().resume();
        quiet
    }

    /// Stops the traffic, waits until all that has been sent since this was read is accounted for, and lets the traffic go
    /// on. Nothing but the lines may have sent meanwhile. Returns what they say then.
    ///
    /// # Panics
    /// When something is missing and no counter says why.
    #[track_caller]
    #[must_use]
    pub fn close(&self, stage: &Stage, what: &str) -> Self {
        self.settle(stage, what, [Others::default(); 2])
    }

    /// The same where others have sent too: from a to b, and from b to a.
    ///
    /// # Panics
    /// When something is missing and no counter says why.
    #[track_caller]
    #[must_use]
    pub fn close_with(&self, stage: &Stage, what: &str, others: [Others; 2]) -> Self {
        self.settle(stage, what, others)
    }

    #[track_caller]
    fn settle(&self, stage: &Stage, what: &str, others: [Others; 2]) -> Self {
        stage.streams().pause();
        let seed = stage.relay().seed();
        let mut last = Self::default();
        let closed = clock::until(&format!("after {what} (seed {seed}): the books close"), PATIENCE, || {
            let now = last.quiet(stage)?;
            let pairs = now.directions.iter().zip(&self.directions).zip(others);
            let each = pairs.map(|((now, before), others)| now.unexplained(before, others));
            let missing: Vec<_> = ["a to b", "b to a"].into_iter().zip(each).collect();
            let missing: Vec<_> = missing.iter().filter(|(_, missing)| !missing.is_empty()).collect();
            if missing.is_empty() { Ok(now) } else { Err(format!("{missing:?}: {self:#?}, {now:#?}")) }
        });
        stage.streams().lines().iter().for_each(|line| line.check());
        stage.streams().resume();
        closed
    }

    /// What they say, if that is what they said a moment ago: `self`, which becomes what they say.
    #[track_caller]
    fn quiet(&mut self, stage: &Stage) -> Result<Self, String> {
        // Longer than a worker waits with what it publishes. What came late would else be missing now and too much later, where
        // the kernel's bound hides that it is.
        thread::sleep(Duration::from_millis(150));
        let now = Self::read(stage);
        let before = std::mem::replace(self, now.clone());
        let counts =
            |ledger: &Self| ledger.directions.map(|direction| Direction { kernel: [0; 4], ..direction });
        if counts(&before) == counts(&now) { Ok(now) } else { Err(format!("something moves: {now:?}")) }
    }

    /// Checks that something was lost between the agents since this was read, in one direction or the other: else what was
    /// to lose it did not.
    ///
    /// # Panics
    /// When nothing was.
    #[track_caller]
    pub fn has_lost(&self, later: &Self) {
        let lost = |ledger: &Self| -> u64 {
            let each = ledger.directions.iter();
            each.map(|each| {
                each.all.lost + each.all.damaged + each.all.too_large + each.kernel[1] + each.up.dropped
            })
            .sum()
        };
        assert!(lost(later) > lost(self), "nothing was lost: {later:#?}");
    }
}

impl Direction {
    /// The hops at which something is missing.
    fn unexplained(&self, before: &Self, others: Others) -> Vec<String> {
        let mut missing = self.unexplained_between(before);
        let kernel = self.dropped_by_kernel(before);
        let fates = self.payloads.since(before.payloads);
        let delivered = self.up.delivered - before.up.delivered;
        let received = self.down.received - before.down.received;
        let lost = fates.lost + fates.too_large + fates.damaged;
        // A datagram that arrives damaged is refused, and is in both counts.
        let refused = self.refused - before.refused + fates.refused;
        let mut hop = |what: &str, from: u64, to: u64, exact: u64, most: u64| {
            if from < to + exact || from > to + exact + most {
                missing.push(format!("{what}: {from} and {to}, {exact} lost, at most {most} more"));
            }
        };
        let sent = self.sent - before.sent + others.sent;
        hop("1, sent", sent, self.up.received - before.up.received, 0, kernel[0]);
        hop("2 and 3, payloads", delivered, received, lost, refused + kernel[1] + kernel[2]);
        let handed = self.down.delivered - before.down.delivered;
        hop(
            "4, delivered",
            handed,
            self.arrived - before.arrived + others.received,
            0,
            others.unheard + kernel[3],
        );
        missing
    }

    fn unexplained_between(&self, before: &Self) -> Vec<String> {
        let mut missing = Vec::new();
        for (what, account) in [("the first agent", self.up), ("the second agent", self.down)] {
            if !account.balances() || account.queued > 0 {
                missing.push(format!("{what}: {account:?}"));
            }
        }
        let kernel = self.dropped_by_kernel(before);
        let fates = self.all.since(before.all);
        let (out, into) = (self.out - before.out, self.into - before.into);
        let forwarded = fates.passed + fates.doubled - fates.refused;
        for (what, from, to, most) in
            [("2, UDP", out, fates.came(), kernel[1]), ("3, UDP", forwarded, into, kernel[2])]
        {
            if from < to || from > to + most {
                missing.push(format!("{what}: {from} and {to}, at most {most} lost"));
            }
        }
        missing
    }

    fn dropped_by_kernel(&self, before: &Self) -> [u64; 4] {
        std::array::from_fn(|hop| PER_BUFFER * (self.kernel[hop] - before.kernel[hop]))
    }
}

/// Of the sockets of QUIC.
fn quic(samples: &Samples, name: &str) -> u64 {
    ["quic_listen", "quic_dial"].iter().map(|socket| samples.count(name, &[("socket", *socket)])).sum()
}

/// Packets that an agent did not accept and that are no repetition of others.
fn refused(samples: &Samples) -> u64 {
    let reasons = samples.by_label("culvert_lane_refused_packets_total", "reason");
    let refused: f64 =
        reasons.iter().filter(|(reason, _)| *reason != "duplicate").map(|(_, count)| count).sum();
    let unopened = samples.count("culvert_lane_packets_unopened_total", &[]);
    refused as u64 + unopened + samples.count("culvert_refused_datagrams_total", &[])
}

/// What an agent knows of the kernel's drops at its TUN device.
fn kernel(agent: &Agent) -> u64 {
    agent.samples().count("culvert_tun_kernel_dropped_packets_total", &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 datagrams of which the impairment lost 5, damaged 3 and doubled 2, and the second agent dropped 1.
    fn direction() -> Direction {
        let account =
            |received, dropped| Account { received, delivered: received - dropped, queued: 0, dropped };
        let fates = Fates { passed: 95, lost: 5, damaged: 3, doubled: 2, ..Fates::default() };
        Direction {
            sent: 100,
            up: account(100, 0),
            out: 100,
            payloads: fates,
            all: fates,
            into: 97,
            refused: 3,
            down: account(92, 1),
            arrived: 91,
            kernel: [0; 4],
        }
    }

    fn missing(change: impl FnOnce(&mut Direction), others: Others) -> Vec<String> {
        let mut direction = direction();
        change(&mut direction);
        let whole = direction.unexplained(&Direction::default(), others);
        whole.iter().map(|line| line.split(':').next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn what_is_missing_is_named_at_its_hop() {
        let none = Others::default();
        assert_eq!(missing(|_| (), none), [""; 0]);
        assert_eq!(missing(|it| it.sent += 1, none), ["1, sent"]);
        assert_eq!(missing(|it| it.sent -= 1, none), ["1, sent"], "nor may there be more than was sent");
        assert_eq!(missing(|it| it.up.dropped += 1, none), ["the first agent"]);
        assert_eq!(missing(|it| it.down.queued += 1, none), ["the second agent"]);
        assert_eq!(missing(|it| it.out += 1, none), ["2, UDP"]);
        assert_eq!(missing(|it| it.into -= 1, none), ["3, UDP"]);
        // Lost in an agent that has received it, and said nothing: at most what it refused may be missing.
        let less = |it: &mut Direction| (it.down.received, it.down.delivered, it.arrived) = (88, 87, 87);
        assert_eq!(missing(less, none), ["2 and 3, payloads"]);
        assert_eq!(
            missing(|it| it.payloads.lost += 1, none),
            ["2 and 3, payloads"],
            "lost, and there all the same"
        );
        assert_eq!(missing(|it| it.arrived -= 1, none), ["4, delivered"]);
        assert_eq!(missing(|it| it.arrived += 1, none), ["4, delivered"]);
    }

    #[test]
    fn the_kernel_explains_what_is_missing_at_its_own_hop_and_no_more() {
        let none = Others::default();
        let dropped = |it: &mut Direction| (it.sent, it.kernel[0]) = (164, 1);
        assert_eq!(missing(dropped, none), [""; 0]);
        let more = |it: &mut Direction| (it.sent, it.kernel[0]) = (165, 1);
        assert_eq!(missing(more, none), ["1, sent"]);
        let elsewhere = |it: &mut Direction| (it.sent, it.kernel[1]) = (101, 1);
        assert_eq!(missing(elsewhere, none), ["1, sent"]);
    }

    #[test]
    fn what_others_sent_and_received_counts_too() {
        let others = Others { sent: 10, received: 8, unheard: 2 };
        assert_eq!(missing(|_| (), others), ["1, sent", "4, delivered"]);
        let with = |it: &mut Direction| (it.sent, it.arrived) = (90, 83);
        assert_eq!(missing(with, others), [""; 0]);
        let unheard = |it: &mut Direction| (it.sent, it.arrived) = (90, 81);
        assert_eq!(missing(unheard, others), [""; 0]);
        let lost = |it: &mut Direction| (it.sent, it.arrived) = (90, 80);
        assert_eq!(missing(lost, others), ["4, delivered"]);
    }
}

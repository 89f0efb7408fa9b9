//! The sizes that a search for the path's MTU probes at once.

use super::{BASE, LANDMARK, MAX_PROBES};

/// The largest packets of paths that are usual, the most usual first: MTUs of 1500, 1492 (PPPoE), 1480 (an IPv6 header more), 1460, 1420
/// (WireGuard) and 1400 (LTE, VPNs), less 28 bytes over IPv4 or 48 over IPv6.
const USUAL: [u16; 10] = [1472, 1452, 1464, 1432, 1392, 1372, 1444, 1352, 1400, 1412];
/// What the burst of the second stage tries beside the maximum: the largest of these that is smaller …
const JUMBO: [u16; 3] = [8972, 8868, 4078];
/// … and the first of these that is smaller than that: what every path carries that is not of 1500 bytes.
const BEYOND_USUAL: [u16; 2] = [2020, 1572];
/// The burst of the second stage is sent so often if nothing of it arrives, the last time only its smallest size, which is lost as often
/// as [`MAX_PROBES`] then.
const ROUNDS: u8 = MAX_PROBES;
/// The probes of a burst: the maximum, five usual sizes, the landmark, the base.
pub(super) const RUNGS: usize = 8;

/// Several sizes that are probed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Burst {
    /// Nothing above gets through, or is tried in this stage.
    pub(super) limit: u16,
    /// Which time it is sent, from 0; `None` in the first stage.
    pub(super) round: Option<u8>,
    /// The sizes, largest first; 0 for none.
    pub(super) rungs: [u16; RUNGS],
    pub(super) fates: [Rung; RUNGS],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rung {
    Unsent,
    InFlight,
    Acked,
    Lost,
}

impl Burst {
    /// All usual sizes above the base that are at most `limit`, and `before`, which a path before has carried, if that is more than
    /// `most`; `None` if there are none. `limit` is one of them unless it is only what is left of a size that failed.
    pub(super) fn usual(limit: u16, most: u16, before: u16) -> Option<Self> {
        let before = (before > most).then_some(before);
        let top = (limit == most).then_some(most);
        let others = 3 + usize::from(before.is_some());
        let below = USUAL.into_iter().filter(|size| *size <= limit && *size < most).take(RUNGS - others);
        let landmark = (LANDMARK <= limit && LANDMARK < most).then_some(LANDMARK);
        Self::of(limit, before.into_iter().chain(top).chain(below).chain(landmark), None)
    }

    /// At most three sizes above `current`, which is no less than what is usual: `max` if nothing smaller has failed, what networks with
    /// larger packets have, and the least of that. `None` if there are none.
    pub(super) fn large(limit: u16, max: u16, current: u16) -> Option<Self> {
        let top = (limit == max).then_some(max);
        let least = |sizes: &[u16]| {
            sizes.iter().copied().find(|size| *size <= limit && *size < max && *size > current)
        };
        let (jumbo, beyond) = (least(&JUMBO), least(&BEYOND_USUAL));
        let sizes = top.into_iter().chain(jumbo).chain(beyond);
        Self::of(limit, sizes.filter(|size| *size > current), Some(0))
    }

    fn of(limit: u16, sizes: impl Iterator<Item = u16>, round: Option<u8>) -> Option<Self> {
        let mut rungs = [0; RUNGS];
        let sizes = sizes.filter(|size| *size > BASE);
        let count = rungs.iter_mut().zip(sizes).map(|(rung, size)| *rung = size).count();
        if count == 0 {
            return None;
        }
        rungs[count] = BASE;
        rungs.sort_unstable_by(|one, other| other.cmp(one));
        Some(Self { limit, round, rungs, fates: [Rung::Unsent; RUNGS] })
    }

    /// The same once more, the last time only its smallest size, and the base; `None` if it was sent often enough.
    pub(super) fn again(&self) -> Option<Self> {
        let round = self.round? + 1;
        let (least, is_last) = (self.least(), round + 1 == ROUNDS);
        let sizes = self.sizes().map(|(size, _)| size).filter(|size| !is_last || *size == least);
        if round < ROUNDS { Self::of(self.limit, sizes, Some(round)) } else { None }
    }

    /// The smallest size above the base.
    pub(super) fn least(&self) -> u16 {
        self.sizes().map(|(size, _)| size).filter(|size| *size > BASE).min().unwrap_or(self.limit)
    }

    fn sizes(&self) -> impl DoubleEndedIterator<Item = (u16, Rung)> {
        self.rungs.into_iter().zip(self.fates).filter(|(size, _)| *size > 0)
    }

    pub(super) fn next(&self) -> Option<u16> {
        self.sizes().find(|(_, fate)| *fate == Rung::Unsent).map(|(size, _)| size)
    }

    pub(super) fn set(&mut self, size: u16, fate: Rung) {
        if let Some(index) = self.rungs.iter().position(|rung| *rung == size) {
            self.fates[index] = fate;
        }
    }

    /// The largest size that got through; 0 for none.
    pub(super) fn acked(&self) -> u16 {
        self.sizes().find(|(_, fate)| *fate == Rung::Acked).map_or(0, |(size, _)| size)
    }

    /// The sizes above [`Burst::acked`], smallest first.
    pub(super) fn above(&self) -> impl Iterator<Item = (u16, Rung)> {
        let acked = self.acked();
        self.sizes().rev().filter(move |(size, _)| *size > acked)
    }

    /// Whether nothing that comes back can change what it has found, but for what was taken for lost too early.
    pub(super) fn is_over(&self) -> bool {
        self.above().all(|(_, fate)| fate == Rung::Lost)
    }
}

//! Whose turn it is to be asked of the site: how many requests there may be at a time, in all and of one prefix. Clients on TCP have turns,
//! and those over HTTP/3 as many of their own.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, Mutex},
    time::Duration,
};

use base::panics::lock;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// Requests that are asked of the site at a time; each has a connection of its own.
const MOST_ASKED: usize = 128;

/// Requests that are at the site or wait for their turn.
const MOST_WAITING: usize = 2 * MOST_ASKED;

/// Requests of one /24 or /56 among those.
const MOST_ASKED_OF_ONE: usize = MOST_ASKED / 4;

/// How long a request waits for its turn.
const TURN_WITHIN: Duration = Duration::from_secs(10);

/// How many of something each prefix has.
#[derive(Default)]
pub(crate) struct Shares(BTreeMap<IpAddr, usize>);

impl Shares {
    /// Takes one for `prefix`, which may have `most`; false: it has as many.
    pub(crate) fn take(&mut self, prefix: IpAddr, most: usize) -> bool {
        let has = self.0.entry(prefix).or_default();
        let may = *has < most;
        *has += usize::from(may);
        may
    }

    pub(crate) fn give_back(&mut self, prefix: IpAddr) {
        if let Some(has) = self.0.get_mut(&prefix) {
            *has -= 1;
            if *has == 0 {
                self.0.remove(&prefix);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn sum(&self) -> usize {
        self.0.values().sum()
    }
}

/// The turns of requests.
pub(crate) struct Turns {
    waiting: Arc<Semaphore>,
    asked: Arc<Semaphore>,
    shares: Mutex<Shares>,
}

/// The turn of a request to be asked of the site.
pub(crate) struct Turn {
    _asked: OwnedSemaphorePermit,
    _share: Share,
}

struct Share {
    turns: Arc<Turns>,
    prefix: IpAddr,
    _waiting: OwnedSemaphorePermit,
}

impl Drop for Share {
    fn drop(&mut self) {
        lock(&self.turns.shares).give_back(self.prefix);
    }
}

impl Turns {
    pub(crate) fn new() -> Arc<Self> {
        let [waiting, asked] = [MOST_WAITING, MOST_ASKED].map(|most| Arc::new(Semaphore::new(most)));
        Arc::new(Self { waiting, asked, shares: Mutex::default() })
    }

    /// Waits for the turn of a request from `source`; `None`: too many are there, or before it.
    pub(crate) async fn turn(self: &Arc<Self>, source: IpAddr) -> Option<Turn> {
        let waiting = Arc::clone(&self.waiting).try_acquire_owned().ok()?;
        let prefix = prefix_of(source);
        if !lock(&self.shares).take(prefix, MOST_ASKED_OF_ONE) {
            return None;
        }
        let share = Share { turns: Arc::clone(self), prefix, _waiting: waiting };
        let asked = timeout(TURN_WITHIN, Arc::clone(&self.asked).acquire_owned()).await.ok()?.ok()?;
        Some(Turn { _asked: asked, _share: share })
    }
}

/// The /24 or /56 of an address.
pub(crate) fn prefix_of(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & !0xff).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 72 << 72).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn requests_of_one_prefix_leave_room_for_others() {
        let turns = Turns::new();
        let mut held = Vec::new();
        while let Some(turn) = turns.turn(address("192.0.2.1")).await {
            held.push(turn);
        }
        assert_eq!(held.len(), MOST_ASKED_OF_ONE);
        for other in 1..4 {
            for _ in 0..MOST_ASKED_OF_ONE {
                held.push(turns.turn(address(&format!("198.51.{other}.1"))).await.unwrap());
            }
        }
        let waits = timeout(Duration::from_millis(50), turns.turn(address("203.0.113.1"))).await;
        assert!(waits.is_err(), "all are at the site");
        held.clear();
        assert!(turns.turn(address("192.0.2.1")).await.is_some());
    }
}

//! What happens to exits and their peers, for the model and for whole agents alike, and what came of it.

use std::time::Duration;

/// A number of exits with one identity, and peers that each know some of them.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) exits: usize,
    pub(crate) peers: usize,
    /// Number of endpoints that each peer has, in an order of its own.
    pub(crate) endpoints: usize,
    /// The share of peers of which the first endpoint is one of the first tenth of the exits; `None`: all exits are alike.
    pub(crate) skew: Option<f64>,
    /// Number of source addresses that all peers have together.
    pub(crate) sources: usize,
    /// Workers of each exit.
    pub(crate) workers: u8,
    pub(crate) round_trip: Duration,
    /// The interval between packets of each peer.
    pub(crate) interval: Duration,
    pub(crate) costs: Costs,
    /// What happens to exits, in order of time. All peers are connected before.
    pub(crate) changes: Vec<(Duration, usize, Change)>,
    /// When the run ends.
    pub(crate) length: Duration,
}

/// CPU time that a worker of an exit spends.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Costs {
    /// On a first packet that the budget refuses, or that is answered by a Retry.
    pub(crate) refusal: Duration,
    /// On opening a knock.
    pub(crate) knock: Duration,
    /// On a handshake that has been admitted, until its session has a lane; half of it before the client answers.
    pub(crate) session: Duration,
}

/// What happens to an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Change {
    /// Its host loses power, or the network.
    Dies,
    /// It is asked to drain.
    Drains,
    /// It ends after a drain, and closes the sessions that are left.
    Stops,
    /// It starts anew.
    Starts,
}

/// What became of the peers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// How long each peer that lost its exit was without one, in ascending order.
    pub(crate) gaps: Vec<Duration>,
    /// Peers that were still without an exit at the end.
    pub(crate) unserved: usize,
    /// The most sessions that one exit took over within a second.
    pub(crate) peak: usize,
    pub(crate) attempts: u64,
    pub(crate) refused: Refused,
    /// The most CPU time that one worker spent in a second, as a share of it.
    pub(crate) busiest: f64,
}

/// First packets that began no handshake.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Refused {
    /// The client had to prove its address first.
    pub(crate) retry: u64,
    /// The budget for clients with a proven address was used up.
    pub(crate) budget: u64,
    /// Too many handshakes were under way.
    pub(crate) full: u64,
    /// By X25519 alone, from a client that can do better.
    pub(crate) fallback: u64,
    /// The socket's buffer was full.
    pub(crate) overflow: u64,
}

impl Outcome {
    /// The gap that `share` of the affected peers do not exceed.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let index = (self.gaps.len() as f64 * share).ceil() as usize;
        self.gaps.get(index.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// The head of a table in Markdown of which [`Outcome::row`] makes the rows.
    pub(crate) const HEAD: &str = "| event | peers that lost their exit | without one: p50 | p99 | longest | most sessions of an exit in a \
         second | attempts | Retries | refused | busiest worker |\n|---|---|---|---|---|---|---|---|---|---|";

    /// What became of the peers of `scenario`, as a row of a table.
    pub(crate) fn row(&self, scenario: &Scenario) -> String {
        let gap = |share| format!("{:.2} s", self.quantile(share).as_secs_f64());
        let longest = if self.unserved > 0 { format!("{} still without", self.unserved) } else { gap(1.0) };
        let Refused { retry, budget, full, fallback, overflow } = self.refused;
        format!(
            "| {} | {} | {} | {} | {longest} | {} | {} | {retry} | {} | {:.0} % |",
            scenario.name,
            self.gaps.len() + self.unserved,
            gap(0.5),
            gap(0.99),
            self.peak,
            self.attempts,
            budget + full + fallback + overflow,
            self.busiest * 100.0,
        )
    }
}

impl Scenario {
    /// `exits` exits with `peers` peers that send ten packets a second, without events.
    pub(crate) fn new(name: &'static str, exits: usize, peers: usize) -> Self {
        Self {
            name,
            exits,
            peers,
            endpoints: exits.min(3),
            skew: None,
            sources: peers,
            workers: 2,
            round_trip: Duration::from_millis(20),
            interval: Duration::from_millis(100),
            costs: Costs::default(),
            changes: Vec::new(),
            length: Duration::from_secs(30),
        }
    }

    /// Adds an event at `at` for each of `exits`.
    pub(crate) fn at(mut self, at: Duration, exits: std::ops::Range<usize>, change: Change) -> Self {
        self.changes.extend(exits.map(|exit| (at, exit, change)));
        self
    }

    /// The exits that a peer knows, the one that it dials first first.
    pub(crate) fn endpoints_of(&self, peer: usize) -> Vec<usize> {
        let hash = |salt: u64| {
            // The finalizer of SplitMix64: peers with neighbouring numbers get unrelated exits.
            let mut bits = (peer as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ salt.wrapping_mul(0xd1b5_4a32_d192_ed03);
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bits ^ (bits >> 31)
        };
        let favoured = self.exits.div_ceil(10);
        let share = hash(0) as f64 / u64::MAX as f64;
        let first = match self.skew {
            Some(skew) if share < skew => hash(1) as usize % favoured,
            Some(_) | None => hash(1) as usize % self.exits,
        };
        let mut endpoints = vec![first];
        let mut salt = 2;
        while endpoints.len() < self.endpoints.min(self.exits) {
            let next = hash(salt) as usize % self.exits;
            if !endpoints.contains(&next) {
                endpoints.push(next);
            }
            salt += 1;
        }
        endpoints
    }

    /// The time of a peer's first packet; the others follow at the interval.
    pub(crate) fn phase_of(&self, peer: usize) -> Duration {
        self.interval.mul_f64(peer as f64 / self.peers as f64)
    }
}

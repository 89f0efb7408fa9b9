//! The peers of one screen of the page: chosen, sorted and cut on this side, so that a thousand of them cost the browser nothing.

use std::{cmp::Ordering, net::SocketAddr, sync::Arc};

use engine::{brief::PeerBrief, status::PeerState};
use serde::Serialize;

use crate::web::{
    history::{History, rounded},
    query::{Query, QueryError},
};

/// The most rows of one answer.
const MOST_ROWS: u64 = 100;

/// Rows of an answer that was not told how many.
const ROWS: u64 = 25;

base::labelled! {
    /// What the peers are sorted by.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    enum SortBy {
        /// Those that have failed, then those that are not connected, then the others.
        #[default]
        State => "state",
        Name => "name",
        Since => "since",
        Address => "address",
        Rtt => "rtt",
        Loss => "loss",
        Up => "up",
        Down => "down",
        Flows => "flows",
        Mtu => "mtu",
    }
}

base::labelled! {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    enum Show {
        #[default]
        All => "all",
        Connected => "connected",
        Down => "down",
        /// Peers without a connection whose last attempt or connection failed.
        Failed => "failed",
    }
}

/// Which peers the page shows, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersQuery {
    sort: SortBy,
    descending: bool,
    show: Show,
    /// A part of a name, an address or a program's name, in lower case; empty for all.
    find: String,
    skip: usize,
    rows: usize,
    /// Whether the trends are wanted, which change every 15 s.
    trends: bool,
}

impl PeersQuery {
    /// Reads `sort`, `order`, `show`, `find`, `skip`, `rows` and `trends`, each of which may be left out.
    ///
    /// # Errors
    /// A parameter that is unknown, or has a value that it cannot have.
    pub fn new(mut query: Query) -> Result<Self, QueryError> {
        let read = Self {
            sort: word(&mut query, "sort", &SortBy::ALL, SortBy::label)?,
            descending: word(&mut query, "order", &[false, true], |down| if down { "desc" } else { "asc" })?,
            show: word(&mut query, "show", &Show::ALL, Show::label)?,
            find: query.take("find").unwrap_or_default().to_lowercase(),
            skip: query.number("skip", u64::from(u32::MAX))?.unwrap_or(0) as usize,
            rows: query.number("rows", MOST_ROWS)?.unwrap_or(ROWS) as usize,
            trends: query.number("trends", 1)? == Some(1),
        };
        query.end()?;
        Ok(read)
    }
}

/// Takes the parameter `name`, which is the label of one of `all`; the default if it was left out.
fn word<T: Copy + Default>(
    query: &mut Query,
    name: &'static str,
    all: &[T],
    label: impl Fn(T) -> &'static str,
) -> Result<T, QueryError> {
    let Some(value) = query.take(name) else { return Ok(T::default()) };
    all.iter().copied().find(|one| label(*one) == value).ok_or_else(|| {
        let labels: Vec<&str> = all.iter().map(|one| label(*one)).collect();
        QueryError::Value { name, value, expected: labels.join(" or ") }
    })
}

/// One screen of peers, by columns, and the sums over all peers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PeersAnswer {
    /// The number of peers that the query selects, on whatever screen.
    pub matching: usize,
    /// The place of the first row among them.
    pub skipped: usize,
    pub sums: Sums,
    pub columns: Columns,
}

/// Sums over all peers, whatever the query selects.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sums {
    pub peers: usize,
    pub connected: usize,
    pub failed: usize,
    pub flows: usize,
    pub tcp_streams: u64,
    /// Bytes per second of payloads and TCP forwards towards the peers.
    pub up: u64,
    /// Bytes per second of payloads and TCP forwards from the peers.
    pub down: u64,
    /// The share of the lane packets of the last second that was lost.
    pub loss: Option<f64>,
}

/// The rows, the same place of each list belonging to one peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Columns {
    pub name: Vec<Arc<str>>,
    pub state: Vec<PeerState>,
    pub since_seconds: Vec<Option<u64>>,
    pub address: Vec<Option<SocketAddr>>,
    pub rtt_micros: Vec<Option<u64>>,
    /// The share of lane packets of the last second that was lost.
    pub loss: Vec<Option<f64>>,
    /// Bytes per second to the peer, as `down` has those from it.
    pub up: Vec<u64>,
    pub down: Vec<u64>,
    pub flows: Vec<usize>,
    pub mtu: Vec<Option<u16>>,
    /// Why a peer without a connection failed last.
    pub failure: Vec<Option<String>>,
    /// Empty unless they were asked for.
    pub trend: Vec<String>,
}

impl PeersAnswer {
    pub(super) fn new(peers: &[PeerBrief], query: &PeersQuery, history: &History) -> Self {
        let mut chosen: Vec<&PeerBrief> = peers.iter().filter(|peer| query.selects(peer)).collect();
        // A screen behind the end is the last one.
        let last = chosen.len().saturating_sub(1) / query.rows.max(1) * query.rows;
        let skipped = query.skip.min(last);
        let mut columns = Columns::default();
        for peer in query.screen(&mut chosen, skipped) {
            columns.push(peer);
            if query.trends {
                columns.trend.push(history.trend(&peer.name));
            }
        }
        Self { matching: chosen.len(), skipped, sums: Sums::of(peers), columns }
    }
}

fn failed(peer: &PeerBrief) -> bool {
    !peer.connected() && peer.last_error.is_some()
}

fn rates(peer: &PeerBrief) -> (f64, f64) {
    peer.rates.map_or((0.0, 0.0), |rates| (rates.up(), rates.down()))
}

impl PeersQuery {
    fn selects(&self, peer: &PeerBrief) -> bool {
        let shown = match self.show {
            Show::All => true,
            Show::Connected => peer.connected(),
            Show::Down => !peer.connected(),
            Show::Failed => failed(peer),
        };
        let has = |text: &str| text.to_lowercase().contains(&self.find);
        shown
            && (self.find.is_empty()
                || has(&peer.name)
                || peer.software.as_deref().is_some_and(has)
                || peer.address.is_some_and(|address| has(&address.to_string())))
    }

    /// The rows of the screen that begins behind the first `skipped` peers, in their order. Only they are sorted: of a thousand
    /// peers a screen has twenty-five.
    fn screen<'a, 'b>(&self, chosen: &'a mut [&'b PeerBrief], skipped: usize) -> &'a [&'b PeerBrief] {
        let end = chosen.len().min(skipped + self.rows);
        // No two are equal: each has a name of its own.
        if 0 < skipped && skipped < end {
            chosen.select_nth_unstable_by(skipped, |a, b| self.compare(a, b));
        }
        let rest = &mut chosen[skipped..];
        let rows = end - skipped;
        if 0 < rows && rows < rest.len() {
            rest.select_nth_unstable_by(rows - 1, |a, b| self.compare(a, b));
        }
        let screen = &mut rest[..rows];
        screen.sort_unstable_by(|a, b| self.compare(a, b));
        screen
    }

    fn compare(&self, a: &PeerBrief, b: &PeerBrief) -> Ordering {
        let names = || a.name.cmp(&b.name);
        let order = match self.sort {
            SortBy::Name => self.directed(names()),
            SortBy::State => self.directed(rank(a).cmp(&rank(b))),
            SortBy::Since => self.numbers(a.since_seconds, b.since_seconds),
            SortBy::Address => match (a.address, b.address) {
                (Some(a), Some(b)) => self.directed(a.cmp(&b)),
                (a, b) => b.is_some().cmp(&a.is_some()),
            },
            SortBy::Rtt => self.numbers(a.rtt_seconds, b.rtt_seconds),
            SortBy::Loss => self.numbers(a.lost_share_last_second(), b.lost_share_last_second()),
            SortBy::Up => self.numbers(Some(rates(a).0), Some(rates(b).0)),
            SortBy::Down => self.numbers(Some(rates(a).1), Some(rates(b).1)),
            SortBy::Flows => self.directed(a.flows.cmp(&b.flows)),
            SortBy::Mtu => self.numbers(a.inner_mtu.map(f64::from), b.inner_mtu.map(f64::from)),
        };
        order.then_with(names)
    }

    fn directed(&self, order: Ordering) -> Ordering {
        if self.descending { order.reverse() } else { order }
    }

    /// What is not known comes last either way.
    fn numbers(&self, a: Option<f64>, b: Option<f64>) -> Ordering {
        match (a, b) {
            (Some(a), Some(b)) => self.directed(a.total_cmp(&b)),
            (a, b) => b.is_some().cmp(&a.is_some()),
        }
    }
}

/// The place of a peer in the order of [`SortBy::State`].
fn rank(peer: &PeerBrief) -> u8 {
    match peer.state {
        _ if failed(peer) => 0,
        PeerState::Dialling => 1,
        PeerState::Waiting => 2,
        PeerState::Connected => 3,
    }
}

impl Columns {
    fn push(&mut self, peer: &PeerBrief) {
        let (up, down) = rates(peer);
        let error = peer.last_error.as_ref().filter(|_| !peer.connected());
        self.name.push(Arc::clone(&peer.name));
        self.state.push(peer.state);
        self.since_seconds.push(peer.since_seconds.map(|seconds| seconds as u64));
        self.address.push(peer.address);
        self.rtt_micros.push(peer.rtt_seconds.map(|seconds| (seconds * 1e6) as u64));
        self.loss.push(peer.lost_share_last_second().map(rounded));
        self.up.push(up as u64);
        self.down.push(down as u64);
        self.flows.push(peer.flows);
        self.mtu.push(peer.inner_mtu);
        self.failure.push(error.map(|error| error.failure.reason.clone()));
    }
}

impl Sums {
    fn of(peers: &[PeerBrief]) -> Self {
        let mut sums = Self { peers: peers.len(), ..Self::default() };
        let (mut up, mut down, mut sent, mut lost) = (0.0, 0.0, 0.0, 0.0);
        for peer in peers {
            sums.connected += usize::from(peer.connected());
            sums.failed += usize::from(failed(peer));
            sums.flows += peer.flows;
            sums.tcp_streams += u64::from(peer.tcp_streams);
            if let Some(rates) = peer.rates {
                up += rates.up();
                down += rates.down();
                sent += rates.lane_packets_per_second;
                lost += rates.lost_packets_per_second;
            }
        }
        (sums.up, sums.down) = (up as u64, down as u64);
        sums.loss = (sent > 0.0).then(|| rounded((lost / sent).min(1.0)));
        sums
    }
}

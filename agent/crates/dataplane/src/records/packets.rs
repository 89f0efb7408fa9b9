//! The IP packets of peers, by protocol and pair of addresses: what a worker keeps of them until it is recorded.
//!
//! ```text
//!   a packet ──► its entry, or the rest of its peer if the table is full
//!   once a second: a part of the table is looked at
//!       silent for 15 s ──► recorded, forgotten        there for 60 s ──► recorded, begun anew
//!       the table is full ──► the half of that part that has carried least becomes the rest of their peers
//! ```
//!
//! Whoever sends from many addresses so fills the table, and costs others their entries, not their sums.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use base::pages::Pages;
use ip::view::IpView;

use crate::records::{Carried, Ended, RecordKind, Recorder, Way};

/// The most entries at all workers of an agent: some 12 MB.
pub const MOST_ENTRIES: usize = 65_536;

/// An entry without a packet for this long has ended.
const IDLE: Duration = Duration::from_secs(15);

/// An entry that is there for so long is recorded although it goes on.
const ACTIVE: Duration = Duration::from_secs(60);

/// The parts of the table, one of which is looked at each second.
const PARTS: usize = 4;

/// Limit on the entries that are recorded in one look: half a millisecond's work.
const MOST_RECORDED: usize = 4_096;

/// What the packets of an entry have in common. The peer is known by its name's place in memory, which the entry keeps there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    peer: usize,
    protocol: u8,
    /// On this side of the device.
    ours: (IpAddr, u16),
    /// On the peer's side.
    theirs: (IpAddr, u16),
}

fn name_place(peer: &Arc<str>) -> usize {
    Arc::as_ptr(peer).cast::<u8>() as usize
}

/// What was carried for a peer since it was last recorded.
#[derive(Clone, Debug)]
struct Sum {
    peer: Arc<str>,
    since: Instant,
    last: Instant,
    uplink: Carried,
    downlink: Carried,
}

impl Sum {
    fn new(peer: &Arc<str>, now: Instant) -> Self {
        let none = Carried::default();
        Self { peer: Arc::clone(peer), since: now, last: now, uplink: none, downlink: none }
    }

    fn is_empty(&self) -> bool {
        self.uplink.packets + self.downlink.packets == 0
    }

    #[inline]
    fn add(&mut self, way: Way, packets: u64, bytes: u64, now: Instant) {
        self.last = now;
        match way {
            Way::ToPeer => self.uplink.add(packets, bytes),
            Way::FromPeer => self.downlink.add(packets, bytes),
        }
    }

    fn bytes(&self) -> u64 {
        self.uplink.bytes + self.downlink.bytes
    }

    /// Why it is to be recorded now, if it is.
    fn ends(&self, now: Instant) -> Option<&'static str> {
        if now.saturating_duration_since(self.last) >= IDLE {
            Some("idle")
        } else if now.saturating_duration_since(self.since) >= ACTIVE {
            Some("active")
        } else {
            None
        }
    }

    /// The record of it; without a key it is the rest of its peer.
    fn ended(&self, key: Option<(&Key, bool)>, reason: &'static str, recorder: &Recorder) -> Ended {
        let at = |(ip, port): (IpAddr, u16)| SocketAddr::new(ip, port);
        let ends = key.map(|(key, opened_here)| {
            let ends = (at(key.ours), at(key.theirs));
            if opened_here { ends } else { (ends.1, ends.0) }
        });
        Ended {
            kind: RecordKind::Ip,
            protocol: key.map_or(0, |(key, _)| key.protocol),
            peer: Arc::clone(&self.peer),
            service: "".into(),
            opened_here: key.is_some_and(|(_, opened_here)| opened_here),
            source: ends.map(|(source, _)| source),
            destination: ends.map(|(_, destination)| destination),
            span: recorder.span_until(self.since, self.last),
            uplink: self.uplink,
            downlink: self.downlink,
            reason,
        }
    }
}

/// What the packets of an entry have carried since it was last recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Talk {
    pub peer: Arc<str>,
    /// IANA's number of the protocol; 0 for the rest of the peer, which has no ends either.
    pub protocol: u8,
    /// On this side of the device, and on the peer's.
    pub ends: Option<[SocketAddr; 2]>,
    pub since: Instant,
    pub uplink: Carried,
    pub downlink: Carried,
}

impl Talk {
    /// The bytes of both directions together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.uplink.bytes + self.downlink.bytes
    }
}

#[derive(Clone, Debug)]
struct Entry {
    key: Key,
    /// Whether its first packet came from this side.
    opened_here: bool,
    sum: Sum,
}

/// Where packets are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Entry(u32),
    /// The rest of the peer whose name is there.
    Rest(usize),
}

/// The entries of one worker.
#[derive(Debug)]
pub struct PacketTable {
    entries: Pages<Entry>,
    /// Keyed by addresses that others choose, so hashed with a secret.
    places: HashMap<Key, u32>,
    /// What has no entry, by the place of the peer's name.
    rests: BTreeMap<usize, Sum>,
    most: usize,
    /// Whether ports tell entries apart.
    ports: bool,
    /// The entry of the packet before.
    recent: Option<(Key, Place)>,
    /// The entry of the packet before that came from a peer.
    recent_downlink: Option<Place>,
    /// Where the next look begins.
    cursor: usize,
}

impl PacketTable {
    /// A table for at most `most` entries; with `ports` they tell entries apart.
    #[must_use]
    pub fn new(most: usize, ports: bool) -> Self {
        Self {
            entries: Pages::default(),
            places: HashMap::new(),
            rests: BTreeMap::new(),
            most,
            ports,
            recent: None,
            recent_downlink: None,
            cursor: 0,
        }
    }

    /// Counts packets of one flow, which are to the peer or from it.
    #[inline]
    pub fn add(&mut self, peer: &Arc<str>, view: &IpView, way: Way, packets: u64, bytes: u64, now: Instant) {
        let (source, destination) = if self.ports { view.ports.unwrap_or_default() } else { (0, 0) };
        let (from, to) = ((view.source, source), (view.destination, destination));
        let (ours, theirs) = if way == Way::ToPeer { (from, to) } else { (to, from) };
        let key = Key { peer: name_place(peer), protocol: view.protocol, ours, theirs };
        let place = match self.recent {
            Some((recent, place)) if recent == key => place,
            Some(_) | None => self.place(key, peer, way, now),
        };
        self.recent = Some((key, place));
        if way == Way::FromPeer {
            self.recent_downlink = Some(place);
        }
        self.count(place, way, packets, bytes, now);
    }

    /// Counts a packet that continues the flow of the one before that came from a peer.
    #[inline]
    pub fn add_continued(&mut self, bytes: u64, now: Instant) {
        if let Some(place) = self.recent_downlink {
            self.count(place, Way::FromPeer, 1, bytes, now);
        }
    }

    #[inline]
    fn count(&mut self, place: Place, way: Way, packets: u64, bytes: u64, now: Instant) {
        let sum = match place {
            Place::Entry(place) => self.entries.get_mut(place as usize).map(|entry| &mut entry.sum),
            Place::Rest(name) => self.rests.get_mut(&name),
        };
        if let Some(sum) = sum {
            sum.add(way, packets, bytes, now);
        }
    }

    fn place(&mut self, key: Key, peer: &Arc<str>, way: Way, now: Instant) -> Place {
        if let Some(place) = self.places.get(&key) {
            return Place::Entry(*place);
        }
        if self.entries.len() >= self.most {
            self.rests.entry(key.peer).or_insert_with(|| Sum::new(peer, now));
            return Place::Rest(key.peer);
        }
        let entry = Entry { key, opened_here: way == Way::ToPeer, sum: Sum::new(peer, now) };
        // `most` is far below 2^32.
        let place = u32::try_from(self.entries.insert(entry)).unwrap_or(u32::MAX);
        self.places.insert(key, place);
        Place::Entry(place)
    }

    /// Once a second: records what has ended, or goes on for long, in a part of the table.
    pub fn expire(&mut self, now: Instant, recorder: &Recorder) {
        // Entries come, and go: a place that was kept may be another's.
        (self.recent, self.recent_downlink) = (None, None);
        let end = self.entries.end();
        let (mut recorded, mut least) = (0, Vec::new());
        for _ in 0..end.div_ceil(PARTS) {
            if recorded >= MOST_RECORDED {
                break;
            }
            let place = self.cursor;
            self.cursor = if place + 1 < end { place + 1 } else { 0 };
            let Some(entry) = self.entries.get_mut(place) else { continue };
            match entry.sum.ends(now) {
                None => least.push((entry.sum.bytes(), place)),
                Some(reason) => {
                    let Entry { key, opened_here, sum } = &*entry;
                    // Nothing came since its last record.
                    if sum.is_empty() {
                        self.remove(place);
                        continue;
                    }
                    recorder.note(sum.ended(Some((key, *opened_here)), reason, recorder));
                    recorded += 1;
                    if reason == "active" {
                        entry.sum = Sum { last: entry.sum.last, ..Sum::new(&entry.sum.peer, now) };
                    } else {
                        self.remove(place);
                    }
                }
            }
        }
        if self.entries.len() >= self.most {
            self.make_room(least);
        }
        self.rests.retain(|_, sum| {
            let ends = sum.ends(now);
            if ends.is_some() {
                recorder.note(sum.ended(None, "other", recorder));
            }
            ends.is_none()
        });
        if self.places.capacity() > 8 * self.entries.len().max(64) {
            self.places.shrink_to(2 * self.entries.len());
            self.entries.shrink();
        }
    }

    /// The `most` entries that have carried most since they were last recorded, and the rests of peers, in no order. It looks at all.
    #[must_use]
    pub fn talks(&self, most: usize) -> Vec<Talk> {
        let talk = |key: Option<&Key>, sum: &Sum| Talk {
            peer: Arc::clone(&sum.peer),
            protocol: key.map_or(0, |key| key.protocol),
            ends: key.map(|key| [key.ours, key.theirs].map(|(ip, port)| SocketAddr::new(ip, port))),
            since: sum.since,
            uplink: sum.uplink,
            downlink: sum.downlink,
        };
        let mut entries: Vec<&Entry> = self.entries.iter().map(|(_, entry)| entry).collect();
        if entries.len() > most {
            entries.select_nth_unstable_by_key(most, |entry| std::cmp::Reverse(entry.sum.bytes()));
            entries.truncate(most);
        }
        let rests = self.rests.values().map(|sum| talk(None, sum));
        entries.iter().map(|entry| talk(Some(&entry.key), &entry.sum)).chain(rests).collect()
    }

    /// Adds the half of these entries that has carried least to the rests of their peers.
    fn make_room(&mut self, mut entries: Vec<(u64, usize)>) {
        let half = entries.len() / 2;
        if half == 0 {
            return;
        }
        entries.select_nth_unstable(half);
        for (_, place) in &entries[..half] {
            let Some(Entry { key, sum, .. }) = self.remove(*place) else { continue };
            let rest = self.rests.entry(key.peer).or_insert_with(|| Sum::new(&sum.peer, sum.since));
            rest.since = rest.since.min(sum.since);
            rest.last = rest.last.max(sum.last);
            rest.uplink.add(sum.uplink.packets, sum.uplink.bytes);
            rest.downlink.add(sum.downlink.packets, sum.downlink.bytes);
        }
    }

    fn remove(&mut self, place: usize) -> Option<Entry> {
        let entry = self.entries.remove(place)?;
        self.places.remove(&entry.key);
        Some(entry)
    }

    /// Records all there is, because the agent stops.
    pub fn end(&mut self, recorder: &Recorder) {
        // What was recorded as active and has carried nothing since has no end of its own.
        let entries = self.entries.iter().map(|(_, entry)| entry);
        for Entry { key, opened_here, sum } in entries.filter(|entry| !entry.sum.is_empty()) {
            recorder.note(sum.ended(Some((key, *opened_here)), "shutdown", recorder));
        }
        for sum in self.rests.values().filter(|sum| !sum.is_empty()) {
            recorder.note(sum.ended(None, "other", recorder));
        }
        *self = Self::new(self.most, self.ports);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use base::clock::{Clock, ManualClock};
    use ip::view::Fragment;

    use super::*;

    struct Bench {
        clock: ManualClock,
        table: PacketTable,
        recorder: Recorder,
        queue: Receiver<Ended>,
        peers: [Arc<str>; 2],
    }

    fn bench(most: usize, ports: bool) -> Bench {
        let clock = ManualClock::new(Duration::from_secs(1_780_000_000));
        let (recorder, queue, _) = Recorder::new(100_000, Arc::new(clock.clone()));
        let table = PacketTable::new(most, ports);
        Bench { clock, table, recorder, queue, peers: ["b".into(), "c".into()] }
    }

    fn view(source: [u8; 4], destination: [u8; 4], ports: (u16, u16)) -> IpView {
        IpView {
            source: source.into(),
            destination: destination.into(),
            protocol: 17,
            transport_at: 20,
            len: 100,
            fragment: Fragment::No,
            ports: Some(ports),
            traffic_class: 0,
            dont_fragment: false,
        }
    }

    impl Bench {
        fn add(&mut self, peer: usize, view: &IpView, way: Way, bytes: u64) {
            let now = self.clock.now();
            self.table.add(&self.peers[peer], view, way, 1, bytes, now);
        }

        /// Lets seconds pass; the records of that time.
        fn pass(&mut self, seconds: u64) -> Vec<Ended> {
            for _ in 0..seconds {
                self.clock.advance(Duration::from_secs(1));
                self.table.expire(self.clock.now(), &self.recorder);
            }
            self.queue.try_iter().collect()
        }
    }

    const HERE: [u8; 4] = [10, 1, 0, 1];
    const THERE: [u8; 4] = [10, 2, 0, 1];

    #[test]
    fn both_ways_of_a_pair_are_one_entry_until_it_falls_silent() {
        let mut bench = bench(100, false);
        bench.add(0, &view(THERE, HERE, (1, 2)), Way::FromPeer, 100);
        bench.table.add_continued(50, bench.clock.now());
        bench.add(0, &view(HERE, THERE, (2, 1)), Way::ToPeer, 30);
        // Another peer with the same addresses is another.
        bench.add(1, &view(HERE, THERE, (2, 1)), Way::ToPeer, 7);
        assert_eq!(bench.pass(14).len(), 0);
        let records = bench.pass(5);
        assert_eq!(records.len(), 2);
        let of_b = records.iter().find(|ended| &*ended.peer == "b").expect("the first peer's");
        let ends = [of_b.source, of_b.destination].map(|end| end.map(|end| end.to_string()));
        assert_eq!(ends, [Some("10.2.0.1:0".to_owned()), Some("10.1.0.1:0".to_owned())]);
        assert_eq!((of_b.uplink.bytes, of_b.downlink.bytes, of_b.downlink.packets), (30, 150, 2));
        assert_eq!((of_b.reason, of_b.opened_here, of_b.protocol), ("idle", false, 17));
        // Their last packet was their first.
        assert!(records.iter().all(|ended| ended.span.began == ended.span.ended), "{records:?}");
        assert_eq!(bench.pass(100).len(), 0);
        assert_eq!((bench.table.entries.len(), bench.table.places.len()), (0, 0));
    }

    #[test]
    fn ports_tell_entries_apart_where_that_is_wanted() {
        for (ports, count) in [(false, 1), (true, 3)] {
            let mut bench = bench(100, ports);
            for port in 1..=3 {
                bench.add(0, &view(HERE, THERE, (port, 53)), Way::ToPeer, 100);
                bench.add(0, &view(THERE, HERE, (53, port)), Way::FromPeer, 100);
            }
            let records = bench.pass(20);
            assert_eq!(records.len(), count);
            assert!(records.iter().all(|ended| ended.uplink == ended.downlink && ended.opened_here));
        }
    }

    #[test]
    fn what_goes_on_is_recorded_each_minute() {
        let mut bench = bench(100, false);
        let mut bytes = 0;
        for _ in 0..150 {
            bench.add(0, &view(HERE, THERE, (1, 2)), Way::ToPeer, 100);
            bytes += bench.pass(1).iter().map(|ended| ended.uplink.bytes).sum::<u64>();
        }
        // After 60 s, at most PARTS later, each time.
        assert!((12_000..=12_800).contains(&bytes), "{bytes}");
        let last = bench.pass(20);
        assert_eq!(last.iter().map(|ended| ended.reason).collect::<Vec<_>>(), ["idle"]);
        assert_eq!(bytes + last[0].uplink.bytes, 15_000);
    }

    #[test]
    fn those_who_talk_most_are_told_and_what_has_no_entry() {
        let mut bench = bench(20, true);
        for place in 0..30_u16 {
            bench.add(0, &view(HERE, THERE, (place, 53)), Way::ToPeer, 10 + u64::from(place));
            bench.add(0, &view(THERE, HERE, (53, place)), Way::FromPeer, 5);
        }
        let mut talks = bench.table.talks(3);
        talks.sort_by_key(Talk::bytes);
        let told: Vec<_> =
            talks.iter().map(|talk| (talk.protocol, talk.ends.is_some(), talk.bytes())).collect();
        // Of the last ten, which found no place, there is one sum.
        let rest = (20..30).map(|place| 15 + place).sum::<u64>();
        assert_eq!(told, [(17, true, 32), (17, true, 33), (17, true, 34), (0, false, rest)]);
        let ends = talks[2].ends.expect("it has ends").map(|end| end.to_string());
        assert_eq!(ends, ["10.1.0.1:19", "10.2.0.1:53"]);
        assert_eq!(bench.table.talks(100).len(), 21);
    }

    #[test]
    fn a_flood_of_addresses_is_bounded_in_memory_and_work_and_loses_no_byte() {
        println!("seed 11");
        let mut bench = bench(MOST_ENTRIES, false);
        let (mut sent, mut told, mut random) = (0, 0, 11_u64);
        for second in 0..60 {
            for _ in 0..4_000 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let address = ((random >> 33) as u32).to_be_bytes();
                bench.add(0, &view(address, HERE, (1, 2)), Way::FromPeer, 40);
                sent += 40;
            }
            let records = bench.pass(1);
            assert!(records.len() <= MOST_RECORDED + 2, "{second}: {} records at once", records.len());
            assert!(bench.table.entries.len() <= MOST_ENTRIES && bench.table.rests.len() <= 2);
            told += records.iter().map(|ended| ended.downlink.bytes).sum::<u64>();
        }
        assert!(bench.table.entries.len() > 30_000, "{}", bench.table.entries.len());
        bench.table.end(&bench.recorder);
        told += bench.queue.try_iter().map(|ended| ended.downlink.bytes).sum::<u64>();
        assert_eq!(told, sent);
    }

    #[test]
    fn a_full_table_keeps_those_that_carry_most_and_all_sums() {
        for seed in 0..20_u64 {
            let mut bench = bench(64, false);
            let mut random = seed;
            let mut next = || {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                random >> 33
            };
            let (mut sent, mut records) = (0, Vec::new());
            for _ in 0..30 {
                bench.add(0, &view(HERE, THERE, (1, 2)), Way::ToPeer, 100_000);
                sent += 100_000;
                for _ in 0..200 {
                    let address = (next() as u32).to_be_bytes();
                    bench.add(1, &view(address, HERE, (1, 2)), Way::FromPeer, 40);
                    sent += 40;
                }
                records.extend(bench.pass(1));
                assert!(bench.table.entries.len() <= 64, "seed {seed}");
                assert_eq!(bench.table.entries.len(), bench.table.places.len());
                assert!(bench.table.rests.len() <= 2);
            }
            bench.table.end(&bench.recorder);
            records.extend(bench.queue.try_iter());
            let sum = |records: &[&Ended]| -> u64 {
                records.iter().map(|ended| ended.uplink.bytes + ended.downlink.bytes).sum()
            };
            assert_eq!(sum(&records.iter().collect::<Vec<_>>()), sent, "seed {seed}");
            let named: Vec<_> = records.iter().filter(|ended| ended.source.is_some()).collect();
            let of_first: Vec<_> = named.iter().copied().filter(|ended| &*ended.peer == "b").collect();
            assert_eq!(
                sum(&of_first),
                30 * 100_000,
                "seed {seed}: the flood takes nobody's entry who carries more"
            );
            assert!(records.iter().any(|ended| ended.reason == "other" && &*ended.peer == "c"));
        }
    }
}

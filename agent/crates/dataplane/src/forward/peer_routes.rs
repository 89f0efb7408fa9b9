//! The peer that a packet of the device goes to: the longest prefix decides, and among peers that hold it the best that is
//! connected.
//!
//! ```text
//!   10.1.0.0/16 ─► site                                      one holder: as fast as without any choice
//!   0.0.0.0/0   ─► group ─► exit-a (priority 1, ready)       carries
//!                           exit-b (priority 1, late)        its flows are exit-a's for now
//!                           exit-c (priority 2, ready)       waits
//! ```
//!
//! Each worker elects by itself, from what every worker is told of links: on each change of a link, and once a second for peers
//! whose hold is over. A flow's hash gives it a slot of its group, and a slot changes its peer only if that is no longer elected or
//! comes back: other flows stay where they are.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use config::Spread;
use ip::{routes::Routes, view::IpView};
use ipnet::IpNet;

use crate::forward::{learned::LearnedRoutes, tun::TunDrop};

/// The slots of a group. Weights are kept to about a twentieth: the share of one slot in 1,024, drawn at random.
const SLOTS: usize = 1_024;

/// A peer that holds a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The lowest of those that are ready carries the prefix.
    pub priority: u16,
    pub peer: PeerId,
    /// The share of flows among peers of the same priority.
    pub weight: u16,
}

/// How well a peer can carry packets now, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    /// It is connected, has lanes, and answers.
    Ready,
    /// It is connected, and has no lane yet, or an answer is late.
    Late,
    /// It is not connected, does not answer, or takes no IP packets.
    Away,
}

base::labelled! {
    /// What a peer does for a prefix that it holds.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum HolderState {
        /// Packets go to it.
        Carries => "carries",
        /// It is ready, and another one is better, or its hold is not over.
        Waits => "waits",
        /// It is connected, and has no lane yet, or an answer is late.
        Late => "late",
        /// It is not connected, does not answer, or takes no IP packets.
        Away => "away",
    }
}

/// A prefix, and what each peer that holds it does for it; no peer: the next hop of its route is nobody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixState {
    pub prefix: IpNet,
    pub holders: Vec<(Holder, HolderState)>,
}

/// A change of the peers that carry the prefixes of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    pub from: Vec<PeerId>,
    pub to: Vec<PeerId>,
    pub prefixes: u32,
}

/// The answer of the table for an address, in 32 bits: a peer or a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target(u32);

impl Target {
    /// The bit that tells a group from a peer, of which there are never so many.
    const GROUP: u32 = 1 << 31;

    /// No peer is the next hop.
    pub(super) const NOBODY: Self = Self(u32::MAX);

    pub(super) fn group(index: usize) -> Self {
        Self(u32::try_from(index).unwrap_or(u32::MAX) | Self::GROUP)
    }

    #[inline]
    fn get(self) -> Result<PeerId, usize> {
        if self.0 & Self::GROUP == 0 { Ok(PeerId(self.0)) } else { Err((self.0 & !Self::GROUP) as usize) }
    }
}

impl From<PeerId> for Target {
    fn from(peer: PeerId) -> Self {
        Self(peer.0)
    }
}

/// The inner prefixes of all peers, at one worker.
#[derive(Debug, Default)]
pub struct PeerRoutes {
    routes: Arc<Routes<Target>>,
    groups: Vec<Group>,
    holders: BTreeMap<IpNet, Vec<Holder>>,
    prefixes: BTreeMap<PeerId, Vec<IpNet>>,
    /// The peers that share a prefix with another.
    sharing: BTreeMap<PeerId, Health>,
    spread: Spread,
    /// How long a peer must have been ready before it takes a prefix from one that carries it.
    hold: Duration,
    /// The table that the kernel's routes make, if they are followed: it has the routes, and nobody's prefixes count.
    learned: Option<Arc<LearnedRoutes>>,
}

/// What is known of a peer that shares a prefix.
#[derive(Clone, Copy, Debug)]
struct Health {
    readiness: Readiness,
    /// Since when it has been ready without a break.
    ready_since: Option<Instant>,
    /// Whether it was looked at before. A peer that begins to share a prefix may have been ready for long.
    seen: bool,
}

impl PeerRoutes {
    /// A table without prefixes, which are the peers', or with `learns` those of the kernel's routes.
    #[must_use]
    pub fn new(spread: Spread, hold: Duration, learns: bool) -> Self {
        Self { spread, hold, learned: learns.then(Arc::default), ..Self::default() }
    }

    /// The peer that a packet goes to.
    ///
    /// # Errors
    /// The reason to drop it.
    #[inline]
    pub fn elected(&self, view: &IpView) -> Result<PeerId, TunDrop> {
        let target = self.routes.lookup(view.destination).ok_or(TunDrop::NoRoute)?;
        target.get().or_else(|group| self.of_group(group, view).ok_or(TunDrop::NoNextHop))
    }

    fn of_group(&self, group: usize, view: &IpView) -> Option<PeerId> {
        let hash = match self.spread {
            Spread::Addresses => view.address_hash(),
            Spread::Ports => view.flow_hash(),
        };
        Some(self.groups.get(group)?.of_hash(hash))
    }

    /// Whether a packet may come from `peer`: it holds the longest prefix that has the source, or as the learned table says.
    #[inline]
    #[must_use]
    pub fn may_send(&self, view: &IpView, peer: PeerId) -> bool {
        if let Some(learned) = &self.learned {
            return learned.may_send(view, peer);
        }
        match self.routes.lookup(view.source).map(Target::get) {
            Some(Ok(holder)) => holder == peer,
            Some(Err(group)) => self.groups.get(group).is_some_and(|group| group.has(peer)),
            None => false,
        }
    }

    /// The peers that hold the longest prefix with this address, the best first.
    #[must_use]
    pub fn holders(&self, address: IpAddr) -> Vec<PeerId> {
        let Some((_, target)) = self.routes.holder(address) else { return Vec::new() };
        match target.get() {
            Ok(peer) => vec![peer],
            Err(group) => self.groups.get(group).into_iter().flat_map(Group::peers).collect(),
        }
    }

    /// The next hop of a packet to `destination` whose route leads to nobody: the destination itself, if the route names no router.
    #[must_use]
    pub fn next_hop(&self, destination: IpAddr) -> IpAddr {
        let prefix = self.routes.holder(destination).map(|(prefix, _)| prefix);
        let known =
            self.learned.as_ref().zip(prefix).and_then(|(learned, prefix)| learned.unknown_hop(prefix));
        known.unwrap_or(destination)
    }

    /// Whether `peer` shares a prefix with another, so that it matters how soon its silence is noticed.
    #[must_use]
    pub fn shares(&self, peer: PeerId) -> bool {
        self.sharing.contains_key(&peer)
    }

    /// Gives a peer these prefixes, and takes away those that it had. [`PeerRoutes::elect`] is due then.
    pub fn set_peer(&mut self, peer: PeerId, prefixes: &[IpNet], priority: u16, weight: u16) {
        if self.learned.is_some() {
            return;
        }
        let mut changed = self.prefixes.remove(&peer).unwrap_or_default();
        for prefix in &changed {
            if let Some(holders) = self.holders.get_mut(prefix) {
                holders.retain(|holder| holder.peer != peer);
            }
        }
        let prefixes: Vec<IpNet> = prefixes.iter().map(IpNet::trunc).collect();
        for prefix in &prefixes {
            let holders = self.holders.entry(*prefix).or_default();
            holders.push(Holder { priority, peer, weight });
            holders.sort_unstable();
        }
        changed.extend(&prefixes);
        if !prefixes.is_empty() {
            self.prefixes.insert(peer, prefixes);
        }
        changed.sort_unstable();
        changed.dedup();
        let mut gone = Vec::new();
        for prefix in changed {
            let target = match self.holders.get(&prefix).map(Vec::as_slice) {
                None | Some([]) => {
                    gone.push(prefix);
                    continue;
                }
                Some([only]) => only.peer.into(),
                Some([..]) => self.group_of(prefix),
            };
            let before = Arc::make_mut(&mut self.routes).insert(prefix, target);
            self.release(before);
        }
        if !gone.is_empty() {
            for prefix in &gone {
                self.holders.remove(prefix);
                let before = self.routes.get(*prefix);
                self.release(before);
            }
            Arc::make_mut(&mut self.routes).remove(&gone);
        }
        self.note_sharing();
    }

    /// Takes over a table in place of the one before. [`PeerRoutes::elect`] is due then.
    pub fn learn(&mut self, learned: &Arc<LearnedRoutes>) {
        self.routes = Arc::clone(&learned.routes);
        let mut before: BTreeMap<Box<[Holder]>, Group> =
            self.groups.drain(..).map(|group| (group.holders.clone(), group)).collect();
        self.groups.extend(learned.groups.iter().map(|(holders, users)| {
            // Those that were elected go on.
            let group = before.remove(&**holders).unwrap_or_else(|| Group::new(holders));
            Group { users: *users, ..group }
        }));
        self.learned = Some(Arc::clone(learned));
        self.note_sharing();
    }

    /// The group of the holders of a shared prefix.
    fn group_of(&mut self, prefix: IpNet) -> Target {
        let holders = self.holders.get(&prefix).map(Vec::as_slice).unwrap_or_default();
        let same = |group: &Group| group.users > 0 && *group.holders == *holders;
        let index = self.groups.iter().position(same).unwrap_or_else(|| {
            let group = Group::new(holders);
            match self.groups.iter().position(|group| group.users == 0) {
                Some(vacant) => {
                    self.groups[vacant] = group;
                    vacant
                }
                None => {
                    self.groups.push(group);
                    self.groups.len() - 1
                }
            }
        });
        self.groups[index].users += 1;
        Target::group(index)
    }

    /// Notes that a prefix does not lead to `target` any more.
    fn release(&mut self, target: Option<Target>) {
        if let Some(Err(group)) = target.map(Target::get)
            && let Some(group) = self.groups.get_mut(group)
        {
            group.users -= 1;
        }
    }

    fn note_sharing(&mut self) {
        let before = std::mem::take(&mut self.sharing);
        let unknown = Health { readiness: Readiness::Away, ready_since: None, seen: false };
        for peer in self.groups.iter().filter(|group| group.users > 0).flat_map(Group::peers) {
            self.sharing.insert(peer, before.get(&peer).copied().unwrap_or(unknown));
        }
    }

    /// Elects the peers that carry shared prefixes anew; returns what has changed. Costs nothing if no prefix is shared.
    pub fn elect(&mut self, readiness: impl Fn(PeerId) -> Readiness, now: Instant) -> Vec<Handover> {
        if self.sharing.is_empty() {
            return Vec::new();
        }
        for (peer, health) in &mut self.sharing {
            health.readiness = readiness(*peer);
            let ready = health.readiness == Readiness::Ready;
            let begun = if health.seen { now } else { now.checked_sub(self.hold).unwrap_or(now) };
            health.ready_since = ready.then(|| health.ready_since.unwrap_or(begun));
            health.seen = true;
        }
        let (sharing, hold) = (&self.sharing, self.hold);
        let used = self.groups.iter_mut().filter(|group| group.users > 0);
        used.filter_map(|group| group.elect(sharing, hold, now)).collect()
    }

    #[must_use]
    pub fn prefixes(&self) -> usize {
        self.routes.iter().count()
    }

    /// Who does what for each prefix, or for the longest that holds `only`; at most `most` of them.
    #[must_use]
    pub fn states(
        &self,
        only: Option<IpAddr>,
        most: usize,
        readiness: impl Fn(PeerId) -> Readiness,
    ) -> Vec<PrefixState> {
        let state = |(prefix, target): (IpNet, Target)| PrefixState {
            prefix,
            holders: match target.get() {
                Ok(peer) => vec![(self.sole(prefix, peer), doing(readiness(peer), true))],
                Err(group) => {
                    let group = self.groups.get(group);
                    group.into_iter().flat_map(|group| group.states(&readiness)).collect()
                }
            },
        };
        match only {
            Some(address) => self.routes.holder(address).map(state).into_iter().collect(),
            None => self.routes.iter().take(most).map(state).collect(),
        }
    }

    /// The only holder of a prefix.
    fn sole(&self, prefix: IpNet, peer: PeerId) -> Holder {
        let known = self.holders.get(&prefix).and_then(|holders| holders.first());
        known.copied().unwrap_or(Holder { priority: 0, peer, weight: 1 })
    }

    /// The peers that are ready and wait for their hold. Nothing is sent to them yet, so they must be asked whether they answer.
    pub fn waiting(&self, now: Instant) -> impl Iterator<Item = PeerId> {
        let recent = move |since: Instant| now.saturating_duration_since(since) < self.hold;
        let ready = self.sharing.iter().filter(move |(_, health)| health.ready_since.is_some_and(recent));
        ready.map(|(peer, _)| *peer)
    }
}

/// Peers that hold the same prefixes.
#[derive(Debug)]
struct Group {
    /// The best first.
    holders: Box<[Holder]>,
    /// Of the holders, by index, those that carry the prefixes.
    elected: u64,
    /// The holder of each slot, by index.
    slots: Box<[u8; SLOTS]>,
    /// The number of prefixes that lead here; 0: vacant.
    users: u32,
}

impl Group {
    fn new(holders: &[Holder]) -> Self {
        let known = &holders[..holders.len().min(config::MOST_HOLDERS)];
        Self { holders: known.into(), elected: 0, slots: Box::new([0; SLOTS]), users: 0 }
    }

    #[inline]
    fn of_hash(&self, hash: u32) -> PeerId {
        // The lowest bits choose the lane: slots take the highest of a product that depends on all of them.
        let slot = hash.wrapping_mul(0x9e37_79b1) as usize >> (u32::BITS - SLOTS.ilog2());
        self.holders[usize::from(self.slots[slot])].peer
    }

    fn has(&self, peer: PeerId) -> bool {
        self.holders.iter().any(|holder| holder.peer == peer)
    }

    fn peers(&self) -> impl Iterator<Item = PeerId> {
        self.holders.iter().map(|holder| holder.peer)
    }

    fn elect(
        &mut self,
        sharing: &BTreeMap<PeerId, Health>,
        hold: Duration,
        now: Instant,
    ) -> Option<Handover> {
        let health = |index: usize| sharing.get(&self.holders[index].peer).copied();
        let readiness = |index: usize| health(index).map_or(Readiness::Away, |health| health.readiness);
        let all = 0..self.holders.len();
        let best = all.clone().map(readiness).min()?;
        // A peer that has come back waits, unless nobody else is ready.
        let settled = |index: &usize| {
            let since = health(*index).and_then(|health| health.ready_since);
            self.elected & bit(*index) != 0
                || since.is_some_and(|since| now.saturating_duration_since(since) >= hold)
        };
        let of_best = all.filter(|index| readiness(*index) == best);
        let waits = of_best.clone().any(|index| settled(&index)) && best == Readiness::Ready;
        let eligible = of_best.filter(|index| !waits || settled(index));
        let priority = eligible.clone().map(|index| self.holders[index].priority).min()?;
        let elected = eligible.filter(|index| self.holders[*index].priority == priority).map(bit).sum();
        if elected == self.elected {
            return None;
        }
        let before = std::mem::replace(&mut self.elected, elected);
        self.fill();
        (before != 0).then(|| Handover {
            from: self.of_mask(before),
            to: self.of_mask(elected),
            prefixes: self.users,
        })
    }

    fn states(&self, readiness: &impl Fn(PeerId) -> Readiness) -> Vec<(Holder, HolderState)> {
        let state = |(index, holder): (usize, &Holder)| {
            (*holder, doing(readiness(holder.peer), self.elected & bit(index) != 0))
        };
        self.holders.iter().enumerate().map(state).collect()
    }

    fn of_mask(&self, mask: u64) -> Vec<PeerId> {
        let indexed = self.peers().enumerate().filter(|(index, _)| mask & bit(*index) != 0);
        indexed.map(|(_, peer)| peer).collect()
    }

    /// Gives each slot to one of the elected (weighted rendezvous hashing): whoever wins it among more, wins it among fewer.
    fn fill(&mut self) {
        let elected: Vec<(u8, Holder)> = (0_u8..)
            .zip(self.holders.iter().copied())
            .filter(|(index, _)| self.elected & bit(usize::from(*index)) != 0)
            .collect();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            let best = elected.iter().min_by(|(_, a), (_, b)| score(number, a).total_cmp(&score(number, b)));
            *slot = best.map_or(0, |(index, _)| *index);
        }
    }
}

/// The time of the first event of a random process with the holder's weight as its rate: the lowest wins in proportion to weights.
fn score(slot: usize, holder: &Holder) -> f64 {
    // The finalizer of SplitMix64.
    let mut bits = ((slot as u64) << 32 | u64::from(holder.peer.0)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    #[expect(clippy::cast_precision_loss, reason = "a number between 0 and 1 needs no more")]
    let uniform = ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    -uniform.ln() / f64::from(holder.weight.max(1))
}

fn doing(readiness: Readiness, elected: bool) -> HolderState {
    match readiness {
        Readiness::Ready if elected => HolderState::Carries,
        Readiness::Ready => HolderState::Waits,
        Readiness::Late => HolderState::Late,
        Readiness::Away => HolderState::Away,
    }
}

const fn bit(index: usize) -> u64 {
    1 << (index % 64)
}

#[cfg(test)]
#[path = "peer_routes_tests.rs"]
mod tests;

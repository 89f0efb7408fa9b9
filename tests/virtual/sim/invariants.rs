//! What holds of agents after every step, and when they have come to rest.

use std::time::{Duration, Instant};

use dataplane::relay::{Account, DropReason};
use testkit::simulation::{DirectionBooks, PeerBooks, RepairBooks, WorkerBooks, World};

use super::{
    model::{Failure, fail},
    schedule::{EXIT, Setup},
};

/// What a queue may hold beyond its time: the timer's precision.
const LATE: Duration = Duration::from_millis(2);

/// The lanes that a schedule's agents may have beyond those wanted, because they drain or are being opened.
const SPARE_LANES: usize = 80;

/// The agents of a world, by their numbers in the schedule.
pub(crate) fn books_of(world: &World, setup: &Setup) -> Vec<(u8, Vec<WorkerBooks>)> {
    setup.agents().map(|agent| (agent, world.books(usize::from(agent)))).collect()
}

/// What holds after every step.
pub(crate) fn check(books: &[(u8, Vec<WorkerBooks>)], setup: &Setup, now: Instant) -> Result<(), Failure> {
    for (agent, workers) in books {
        for (place, worker) in workers.iter().enumerate() {
            let name = format_args!("agent {agent}, worker {place}").to_string();
            for peer in &worker.peers {
                check_peer(&name, peer, setup, now)?;
            }
            if worker.lanes > SPARE_LANES || worker.underlays > SPARE_LANES {
                fail!("ceilings", "{name}: {} lanes, {} sockets", worker.lanes, worker.underlays);
            }
            if let Some(excess) = &worker.excess {
                fail!("work", "{name}: {excess}");
            }
            let flows: usize = worker.peers.iter().map(|peer| peer.flows).sum();
            if worker.upstreams > flows {
                fail!("sockets", "{name}: {} sockets for {flows} flows", worker.upstreams);
            }
        }
        for (peer, flows, most) in flows_of(workers) {
            if flows > most {
                fail!("ceilings", "agent {agent}, peer {peer}: {flows} flows, not {most}");
            }
        }
        // What is between two workers is taken before the step ends.
        for peer in 0..workers.first().map_or(0, |worker| worker.peers.len()) {
            for direction in [0, 1] {
                let account = sum(workers, peer)[direction];
                if account.handed_over != account.taken_over {
                    fail!(
                        "balance",
                        "agent {agent}, peer {peer}: not all that was handed over was taken: {account:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// What holds of repair: its memory has a bound, and nothing waits for what has missed its deadline.
fn check_repair(name: &str, peer: &PeerBooks, setup: &Setup, now: Instant) -> Result<(), Failure> {
    /// A block of memory for each of two streams may be taken whatever is in use.
    const BLOCKS: usize = 2 * (16 << 10);
    let RepairBooks { bytes, deadline, held, .. } = peer.repair;
    if bytes > setup.repair_bytes() / 4 + BLOCKS {
        fail!("bounds", "{name}, {}: {bytes} bytes for repair", peer.name);
    }
    if let Some(deadline) = deadline
        && now.saturating_duration_since(deadline) > LATE
    {
        fail!("deadline", "{name}, {}: {held} payloads wait {:?} too long", peer.name, now - deadline);
    }
    Ok(())
}

fn check_peer(name: &str, peer: &PeerBooks, setup: &Setup, now: Instant) -> Result<(), Failure> {
    for (way, DirectionBooks { account, queued }) in [("uplink", peer.uplink), ("downlink", peer.downlink)] {
        if !account.balances(queued) {
            fail!("balance", "{name}, {}, {way}: {queued} wait, {account:?}", peer.name);
        }
    }
    check_repair(name, peer, setup, now)?;
    let (packets, bytes, time) = peer.bounds;
    // A reload leaves what waits.
    let packets = packets.max(setup.packets as usize);
    for (datagrams, held) in peer.waiting {
        if datagrams > packets || held > bytes {
            fail!("bounds", "{name}, {}: {datagrams} datagrams, {held} bytes wait", peer.name);
        }
    }
    if let Some(oldest) = peer.oldest
        && now.saturating_duration_since(oldest) > time + LATE
    {
        fail!("bounds", "{name}, {}: something waits for {:?}", peer.name, now - oldest);
    }
    Ok(())
}

/// The accounts of a peer, uplink and downlink, summed over workers.
pub(crate) fn sum(workers: &[WorkerBooks], peer: usize) -> [Account; 2] {
    let mut sums = [Account::default(); 2];
    for peer in workers.iter().filter_map(|worker| worker.peers.get(peer)) {
        sums[0].add(&peer.uplink.account);
        sums[1].add(&peer.downlink.account);
    }
    sums
}

/// The peers of an agent, by number: their flows at all workers, and the ceiling on them.
fn flows_of(workers: &[WorkerBooks]) -> impl Iterator<Item = (usize, usize, usize)> {
    let peers = workers.first().map_or(&[][..], |worker| &worker.peers);
    peers.iter().enumerate().map(|(number, peer)| {
        let flows = workers.iter().filter_map(|worker| worker.peers.get(number)).map(|peer| peer.flows);
        (number, flows.sum(), peer.max_flows)
    })
}

/// Whether a peer has as many flows as it may.
pub(crate) fn is_full(books: &[(u8, Vec<WorkerBooks>)]) -> bool {
    books.iter().flat_map(|(_, workers)| flows_of(workers)).any(|(_, flows, most)| flows == most)
}

/// Times that a flow, or a bucket of IP packets, went to another lane, and datagrams dropped for the ceiling on flows.
pub(crate) fn moved_and_refused(books: &[(u8, Vec<WorkerBooks>)]) -> (u64, u64) {
    let peers = books.iter().flat_map(|(_, workers)| workers).flat_map(|worker| &worker.peers);
    peers.fold((0, 0), |(moved, refused), peer| {
        let dropped = |books: &DirectionBooks| books.account.dropped[DropReason::FlowLimit];
        (moved + peer.moved, refused + dropped(&peer.uplink) + dropped(&peer.downlink))
    })
}

/// Payloads that came again after they were lost, or were recovered.
pub(crate) fn repaired(books: &[(u8, Vec<WorkerBooks>)]) -> u64 {
    let workers = books.iter().flat_map(|(_, workers)| workers);
    workers.flat_map(|worker| &worker.peers).map(|peer| peer.repair.repaired).sum()
}

/// Something that changes whenever a flow may have gone to another lane: who owns which connection, and what has moved.
pub(crate) fn order_of(books: &[(u8, Vec<WorkerBooks>)]) -> u64 {
    let workers = books.iter().flat_map(|(_, workers)| workers);
    let peers = workers.flat_map(|worker| &worker.peers);
    peers.fold(0, |sum, peer| {
        let (wanted, up) = peer.lanes.unwrap_or_default();
        let lanes = u64::from(wanted) << 8 | u64::from(up) << 1 | u64::from(peer.is_owner);
        sum.wrapping_mul(31).wrapping_add(peer.moved << 16 | lanes)
    })
}

/// Why not everybody is connected with all their lanes, if so.
pub(crate) fn disconnected(books: &[(u8, Vec<WorkerBooks>)], setup: &Setup) -> Option<String> {
    let wanted = |entry: u8| {
        let most = setup.workers[usize::from(entry)].max(setup.workers[usize::from(EXIT)]);
        let lanes = u32::from(if setup.lanes == 0 { most } else { setup.lanes });
        if setup.is_standard { 0 } else { lanes }
    };
    for (agent, workers) in books {
        if workers.is_empty() {
            return Some(format!("agent {agent} is not running"));
        }
        for (place, worker) in workers.iter().enumerate() {
            for (number, peer) in worker.peers.iter().enumerate() {
                let entry = if *agent == EXIT { u8::try_from(number).unwrap_or(0) } else { *agent };
                let wanted = wanted(entry);
                if peer.lanes != Some((wanted, wanted)) {
                    let lanes = peer.lanes;
                    return Some(format!(
                        "agent {agent}, worker {place}, {}: {lanes:?} of {wanted} lanes",
                        peer.name
                    ));
                }
            }
        }
    }
    None
}

/// What is left over, when no client has sent anything for longer than flows live.
pub(crate) fn left_over(books: &[(u8, Vec<WorkerBooks>)], setup: &Setup) -> Result<(), Failure> {
    for (agent, workers) in books {
        let peers = if *agent == EXIT { usize::from(setup.entries) } else { 1 };
        let total = |count: fn(&WorkerBooks) -> usize| workers.iter().map(count).sum::<usize>();
        let flows = total(|worker| worker.peers.iter().map(|peer| peer.flows).sum());
        let waiting =
            total(|worker| worker.peers.iter().map(|peer| peer.waiting[0].0 + peer.waiting[1].0).sum());
        let connections = total(|worker| worker.connections);
        let lanes = total(|worker| worker.lanes);
        let wanted: u32 = workers
            .iter()
            .flat_map(|worker| &worker.peers)
            .filter(|peer| peer.is_owner)
            .filter_map(|peer| peer.lanes)
            .map(|(wanted, _)| wanted)
            .sum();
        let rest = [
            ("flows", flows, 0),
            ("waiting datagrams", waiting, 0),
            ("sockets to services", total(|worker| worker.upstreams), 0),
            ("TCP forwards", total(|worker| worker.forwards), 0),
            ("control connections", connections, peers),
            ("lanes", lanes, wanted as usize),
        ];
        for (what, count, expected) in rest {
            if count != expected {
                fail!("nothing is left", "agent {agent}: {count} {what}, not {expected}");
            }
        }
        let listening = usize::from(*agent == EXIT || setup.is_mutual) * workers.len();
        let sockets = total(|worker| worker.underlays);
        if sockets > listening + lanes + connections {
            fail!("nothing is left", "agent {agent}: {sockets} QUIC sockets, {lanes} lanes");
        }
    }
    Ok(())
}

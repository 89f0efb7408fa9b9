//! Flows whose confirmation comes while the socket has no room: what waited for it goes first.

use std::time::Duration;

use crate::{ENTRY, EXIT, INGRESS, Pair, fragments::pattern, harness::NetworkPath, numbered};

const MS: Duration = Duration::from_millis(1);

#[test]
fn what_waited_for_a_confirmation_goes_first_when_it_finds_no_room() {
    // Two flows are opened; the other one's datagram is what the socket refuses.
    assert_order(1400, &[5000, 100, 5000], 1, &[]);
}

#[test]
fn what_comes_to_the_queue_before_the_confirmation_does_not_overtake_what_waits_for_it() {
    // The second datagram of the other flow is in the queue, and all that comes is behind it.
    assert_order(1401, &[5000, 100, 5000], 2, &[200, 4000, 300]);
}

#[test]
fn what_waited_for_a_confirmation_goes_first_when_there_is_room_for_some_of_it() {
    // A send buffer holds 256 KiB: the 9th is begun when there is no room any more, and is the first of two that came together.
    assert_order(1402, &[30_000; 16], 0, &[200]);
}

/// A flow of the entry waits for its confirmation with datagrams of the lengths `before` when the socket begins to refuse
/// everything; `others` of another flow come next, and `meanwhile` of its own. It is confirmed and goes on, then there is room
/// again: its datagrams leave in the order in which they came.
fn assert_order(seed: u64, before: &[usize], others: u32, meanwhile: &[usize]) {
    let mut pair = Pair::fragmenting(seed, (1, 1), "queue.time = \"5s\"\nflow_quota = 1.0");
    // The confirmation is under way for so long that all of this comes before it.
    pair.world.set_path(ENTRY, EXIT, NetworkPath { delay: 50 * MS, ..NetworkPath::default() });
    let (mut client, mut other) = (pair.client(8600), pair.client(8601));
    let mut sent = Vec::new();
    let mut send = |pair: &mut Pair, lengths: &[usize]| {
        for len in lengths {
            sent.push(pattern(*len, sent.len()));
            client.send(INGRESS, &sent[sent.len() - 1]);
        }
        // From the client it is 5 ms.
        pair.world.run(6 * MS);
    };
    send(&mut pair, before);
    let credit = pair.narrow_down(pair.entry);
    for number in 0..others {
        other.send(INGRESS, &numbered(number));
        pair.world.run(6 * MS);
    }
    send(&mut pair, meanwhile);
    let [queued, awaiting] = pair.waiting();
    assert!(awaiting >= before.len(), "{awaiting} wait for the confirmation, {queued} for room");
    pair.world.run(60 * MS);
    let [queued, awaiting] = pair.waiting();
    assert!(queued > 0 && awaiting == 0, "{queued} found no room, {awaiting} wait for the confirmation");
    send(&mut pair, &[700, 4000, 20]);

    let mut came = Vec::new();
    for _ in 0..100 {
        // Pieces of equal size leave as one GSO message, of some 45 packets.
        pair.widen(pair.entry, &credit, 48);
        pair.world.run(2 * MS);
        let of_flow = pair.echo.receive().into_iter().map(|(_, payload)| payload);
        came.extend(of_flow.filter(|payload| payload.len() != numbered(0).len()));
    }
    let lengths = |all: &[Vec<u8>]| all.iter().map(Vec::len).collect::<Vec<_>>();
    assert!(came == sent, "{:?}, sent {:?}", lengths(&came), lengths(&sent));
    let [entry, exit] = pair.assert_balanced();
    assert_eq!((entry.uplink.queued, entry.uplink.account.dropped_total()), (0, 0));
    assert_eq!(exit.downlink.queued, 0, "what was begun was gone on with");
}

impl Pair {
    /// Datagrams that wait at the entry for room, and for their flow's confirmation.
    fn waiting(&self) -> [usize; 2] {
        self.world.books(self.entry)[0].peers[0].waiting.map(|(datagrams, _)| datagrams)
    }
}

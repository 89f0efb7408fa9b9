//! Datagrams that are pushed together make the same packets as datagrams that are pushed one by one.

use std::{
    cell::{Cell, RefCell},
    io,
    net::SocketAddr,
    rc::Rc,
    time::Duration,
};

use base::{
    clock::{Clock, ManualClock},
    ids::{SessionId, SessionRef},
};
use net::{Delivery, DeliveryMessage, KernelQueue, ReceiveBatch, UdpStats};
use proptest::prelude::*;
use quic_core::{AckProfile, ConnectionId, Lane, LaneConfig, Suite};
use wire::context::{Context, FlowNumber};

use super::*;
use crate::lanes::{LaneSlot, OpeningId, PacketSize};

/// Segment size, segments and payloads of each message, and the bytes of its packets.
type Sent = Rc<RefCell<Vec<(usize, u16, u32, Vec<Vec<u8>>)>>>;

/// Remembers what it takes, which is everything but while it is told that it has no room.
struct Sink(Sent, Rc<Cell<bool>>);

impl UdpSocket for Sink {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], 1))
    }

    fn receive(&mut self, _batch: &mut ReceiveBatch) -> io::Result<()> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        if self.1.get() {
            return;
        }
        for message in batch.messages() {
            let packets = batch.segments(message).map(<[u8]>::to_vec).collect();
            self.0.borrow_mut().push((message.segment, message.segments, message.payloads, packets));
            outcome(message, SendOutcome::Sent);
        }
        batch.clear();
    }

    fn deliver(
        &mut self,
        _received: &ReceiveBatch,
        _delivery: &mut Delivery,
        _outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
    }

    fn stats(&self) -> UdpStats {
        UdpStats::default()
    }

    fn kernel_queue(&self) -> KernelQueue {
        KernelQueue::default()
    }
}

/// A lane that is up, on a socket that takes everything.
fn fixture(now: Instant) -> (Underlays, Lanes, LaneId, Sent) {
    fixture_with(now, &Rc::default())
}

/// The same on a socket that has no room while `full` is true.
fn fixture_with(now: Instant, full: &Rc<Cell<bool>>) -> (Underlays, Lanes, LaneId, Sent) {
    let sent = Sent::default();
    let mut underlays = Underlays::default();
    let underlay =
        underlays.insert(Box::new(Sink(Rc::clone(&sent), Rc::clone(full))), UdpRole::QuicDial, Token(0));
    let core = Lane::new(&LaneConfig {
        suite: Suite::Aes128Gcm,
        send_secret: &[7; 32],
        receive_secret: &[8; 32],
        remote_cid: ConnectionId([1; 8]),
        local_cid: ConnectionId([2; 8]),
        ack: AckProfile::Throughput,
        key_limit: None,
        initial_rtt: None,
    })
    .unwrap();
    let owner = SessionRef { peer: PeerId(3), session: SessionId(1) };
    let opening = OpeningId { index: 0, epoch: 1 };
    let mut slot = LaneSlot::new(
        core,
        owner,
        opening,
        ConnectionId([2; 8]),
        underlay,
        PacketSize::new(1_452, 1_452),
        now,
    );
    let path = Path { destination: SocketAddr::from(([192, 0, 2, 2], 2)), source: None, tos: 0 };
    slot.paths.validate(path, [1; 8], now);
    assert!(slot.on_path_response([1; 8], now) && slot.is_up());
    let mut lanes = Lanes::default();
    let lane = lanes.insert(slot);
    (underlays, lanes, lane, sent)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn together_they_make_the_same_packets_as_one_by_one(
        runs in prop::collection::vec((1_usize..1_600, 0_usize..90_000, 0_u8..2), 1..6),
    ) {
        let now = ManualClock::default().now();
        let (mut underlays, mut lanes, lane, together) = fixture(now);
        let (mut single_underlays, mut single_lanes, single_lane, single) = fixture(now);
        for (segment, len, header) in runs {
            let data: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8).collect();
            let context = [2, header];
            let payloads = Payloads::new(&context, &data, segment, 0);
            let (count, result) = underlays.push_all(&mut lanes, lane, &payloads, now);

            let mut expected = Ok(());
            let (mut done, mut prefix) = (0, [0; MOST_FRAME_PREFIX]);
            while done < payloads.count() && expected.is_ok() {
                let rest = payloads.skip(done);
                let frame = rest.first(&mut prefix);
                expected = single_underlays.push(&mut single_lanes, single_lane, frame, None, now);
                done += usize::from(expected.is_ok());
            }
            prop_assert_eq!((count, result), (done, expected));
        }
        underlays.flush(&mut lanes, now);
        single_underlays.flush(&mut single_lanes, now);
        let packets = |sent: &Sent| -> Vec<Vec<u8>> {
            sent.borrow().iter().flat_map(|(.., packets)| packets.clone()).collect()
        };
        prop_assert!(packets(&together) == packets(&single));
        let payloads = |sent: &Sent| sent.borrow().iter().map(|(_, _, payloads, _)| payloads).sum::<u32>();
        prop_assert_eq!(payloads(&together), payloads(&single));
        let count = |lanes: &Lanes, lane| lanes.get(lane).map(|slot| slot.core.stats().datagrams_sent);
        prop_assert_eq!(count(&lanes, lane), count(&single_lanes, single_lane));
    }
}

#[test]
fn equal_payloads_make_full_messages() {
    let now = ManualClock::default().now();
    let (mut underlays, mut lanes, lane, sent) = fixture(now);
    let data = vec![5; 44 * 1_400];
    let payloads = Payloads::new(&[2, 0], &data, 1_400, 0);
    assert_eq!(underlays.push_all(&mut lanes, lane, &payloads, now), (44, Ok(())));
    underlays.flush(&mut lanes, now);
    let shapes: Vec<_> = sent.borrow().iter().map(|(segment, count, ..)| (*segment, *count)).collect();
    assert_eq!(shapes, [(1_432, 44)]);
}

/// Puts a datagram of `total` bytes into packets as the uplink does; returns the lengths of its pieces, of which a whole one is the
/// only one.
fn push_in_pieces(
    underlays: &mut Underlays,
    lanes: &mut Lanes,
    lane: LaneId,
    total: u16,
    now: Instant,
) -> Vec<usize> {
    let data = vec![6; usize::from(total)];
    let (mut offset, mut pieces) = (0, Vec::new());
    let whole = Frame { header: &[2, 0], payload: &data, counted: true, tos: 0 };
    if underlays.push(lanes, lane, whole, None, now).is_ok() {
        return vec![data.len()];
    }
    while offset < data.len() {
        let header = Context::Piece {
            number: FlowNumber(9),
            datagram: 70_000,
            total,
            offset: offset as u16,
            payload_at: 0,
        }
        .encode();
        let room = underlays.room(lanes, lane, header.as_slice().len(), 0).unwrap();
        let piece = room.piece(data.len() - offset);
        let payload = &data[offset..offset + piece];
        let frame =
            Frame { header: header.as_slice(), payload, counted: offset + piece == data.len(), tos: 0 };
        underlays.push(lanes, lane, frame, None, now).expect("the room said that it fits");
        pieces.push(piece);
        offset += piece;
    }
    pieces
}

#[test]
fn pieces_of_equal_datagrams_make_full_messages() {
    let now = ManualClock::default().now();
    let (mut underlays, mut lanes, lane, sent) = fixture(now);
    for _ in 0..48 {
        assert_eq!(push_in_pieces(&mut underlays, &mut lanes, lane, 1_452, now).len(), 2);
    }
    underlays.flush(&mut lanes, now);
    let shapes: Vec<_> = sent.borrow().iter().map(|(segment, count, ..)| (*segment, *count)).collect();
    // A packet takes 1,416 bytes of a datagram; the piece that is left grows by the frame around it, until the first piece of
    // the next datagram would have fewer than 1,024.
    assert_eq!(shapes, [(1_452, 9); 6]);
}

#[test]
fn a_datagram_takes_no_more_packets_than_by_itself() {
    for empty in [1_024, 1_200, 1_416] {
        for (begun, total) in
            (0..1_416).flat_map(|begun| [1_452, 2_000, 2_800, 9_000].map(|total| (begun, total)))
        {
            let first = Room { begun: begun.min(empty), empty }.piece(total);
            assert!(first >= LEAST_PIECE && (first == empty || first == begun));
            let more = (total - first).div_ceil(empty);
            assert!(more < total.div_ceil(empty), "{first} of {total} where {begun} and {empty} fit");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn pieces_are_as_long_as_they_must_be_and_fit(totals in prop::collection::vec(1..9_000_u16, 1..60)) {
        let now = ManualClock::default().now();
        let (mut underlays, mut lanes, lane, sent) = fixture(now);
        for total in &totals {
            let pieces = push_in_pieces(&mut underlays, &mut lanes, lane, *total, now);
            prop_assert_eq!(pieces.iter().sum::<usize>(), usize::from(*total));
            prop_assert!(pieces[..pieces.len() - 1].iter().all(|piece| *piece >= LEAST_PIECE), "{:?}", pieces);
            // The offset takes a byte more from 64 on, which the first piece does not foresee.
            prop_assert!(pieces.len() <= usize::from(*total).div_ceil(1_412) + 1, "{:?}", pieces);
        }
        underlays.flush(&mut lanes, now);
        let sent = sent.borrow();
        prop_assert!(sent.iter().all(|(segment, ..)| *segment <= 1_452));
        prop_assert_eq!(sent.iter().map(|(_, _, payloads, _)| *payloads as usize).sum::<usize>(), totals.len());
    }
}

/// Adds a packet of the agent itself.
fn say(underlays: &mut Underlays, lanes: &mut Lanes, now: Instant) -> bool {
    let path = Path { destination: SocketAddr::from(([192, 0, 2, 2], 2)), source: None, tos: 0 };
    underlays.packet(lanes, UnderlayId(0), &path, 1_200, now, |_, tail| {
        tail.fill(9);
        Some(1_200)
    })
}

#[test]
fn a_full_outbox_has_room_for_what_the_agent_says_itself() {
    let (now, full) = (ManualClock::default().now(), Rc::new(Cell::new(true)));
    let (mut underlays, mut lanes, lane, sent) = fixture_with(now, &full);
    let data = vec![5; 1_000 * 1_400];
    let payloads = Payloads::new(&[2, 0], &data, 1_400, 0);
    let (count, result) = underlays.push_all(&mut lanes, lane, &payloads, now);
    assert_eq!(result, Err(PushError::Blocked));
    assert!(count >= SendBatch::DEFAULT_BYTES / 1_500, "{count} payloads");
    let said = (0..100).filter(|_| say(&mut underlays, &mut lanes, now)).count();
    assert!((20..=RESERVE_BYTES / 1_200 + 1).contains(&said), "{said} packets");

    full.set(false);
    assert!(underlays.unblock(UnderlayId(0), &mut lanes, now));
    let sizes: Vec<usize> =
        sent.borrow().iter().flat_map(|(.., packets)| packets.iter().map(Vec::len)).collect();
    assert_eq!(sizes.len(), count + said);
    assert!(sizes[count..].iter().all(|size| *size == 1_200), "nothing overtakes");
}

#[test]
fn what_the_kernel_does_not_take_in_time_is_dropped_and_the_room_is_for_younger_payloads() {
    let (clock, full) = (ManualClock::default(), Rc::new(Cell::new(true)));
    let (mut underlays, mut lanes, lane, sent) = fixture_with(clock.now(), &full);
    let data = vec![5; 10 * 1_400];
    let payloads = Payloads::new(&[2, 0], &data, 1_400, 0);
    let limit = |_| Duration::from_millis(100);
    let push = |underlays: &mut Underlays, lanes: &mut Lanes| {
        let pushed = underlays.push_all(lanes, lane, &payloads, clock.now());
        underlays.flush(lanes, clock.now());
        pushed
    };
    assert_eq!(push(&mut underlays, &mut lanes), (10, Ok(())));
    assert_eq!(underlays.newly_blocked.pop(), Some(UnderlayId(0)));
    let since = clock.now();
    clock.advance(Duration::from_millis(60));
    assert!(say(&mut underlays, &mut lanes, clock.now()));
    assert_eq!(push(&mut underlays, &mut lanes).1, Err(PushError::Blocked));
    let expiry = underlays.expire(UnderlayId(0), clock.now(), limit);
    let at = since + Duration::from_millis(101);
    assert_eq!(expiry, Expiry { next: Some(at), emptied: false });

    clock.advance(Duration::from_millis(41));
    assert_eq!(underlays.expire(UnderlayId(0), clock.now(), limit), Expiry { next: None, emptied: true });
    let settled: Vec<_> =
        underlays.settlements.drain().map(|settled| (settled.payloads, settled.dropped)).collect();
    assert_eq!(settled, [(10, Some(DropReason::Expired))]);
    assert_eq!(push(&mut underlays, &mut lanes), (10, Ok(())));
    assert!(underlays.is_blocked(UnderlayId(0)) && underlays.newly_blocked.pop().is_some());
    full.set(false);
    assert!(underlays.unblock(UnderlayId(0), &mut lanes, clock.now()));
    assert_eq!(
        underlays.settlements.drain().map(|settled| (settled.payloads, settled.dropped)).collect::<Vec<_>>(),
        [(10, None)]
    );
    assert_eq!(sent.borrow().iter().map(|(_, segments, ..)| *segments).sum::<u16>(), 10);
}

#[test]
fn only_the_payloads_expire_whose_peer_cannot_wait() {
    let (clock, full) = (ManualClock::default(), Rc::new(Cell::new(true)));
    let (mut underlays, mut lanes, lane, _) = fixture_with(clock.now(), &full);
    let data = vec![5; 3 * 1_400];
    let payloads = Payloads::new(&[2, 0], &data, 1_400, 0);
    assert_eq!(underlays.push_all(&mut lanes, lane, &payloads, clock.now()).0, 3);
    underlays.flush(&mut lanes, clock.now());
    assert!(say(&mut underlays, &mut lanes, clock.now()));
    clock.advance(Duration::from_millis(30));
    let limit = |peer| Duration::from_millis(if peer == PeerId(3) { 20 } else { 100 });
    let expiry = underlays.expire(UnderlayId(0), clock.now(), limit);
    assert!(!expiry.emptied && expiry.next.is_some());
    assert_eq!(underlays.waiting(UnderlayId(0)), Waiting { datagrams: 1, bytes: 1_200 });
}

#[test]
fn outboxes_are_bounded_and_given_back() {
    const SOCKETS: usize = 300;
    let now = ManualClock::default().now();
    let (mut underlays, mut lanes, full) =
        (Underlays::default(), Lanes::default(), Rc::<Cell<bool>>::default());
    let ids: Vec<UnderlayId> = (0..SOCKETS)
        .map(|_| {
            let sink = Sink(Sent::default(), Rc::clone(&full));
            underlays.insert(Box::new(sink), UdpRole::QuicDial, Token(0))
        })
        .collect();
    let path = Path { destination: SocketAddr::from(([192, 0, 2, 2], 2)), source: None, tos: 0 };
    let all = |underlays: &mut Underlays, lanes: &mut Lanes| {
        for id in &ids {
            assert!(underlays.answer(lanes, *id, &path, &[7; 100], now), "each gets one");
            assert!(underlays.held <= MOST_SEND_BUFFERS);
        }
        underlays.flush(lanes, now);
    };
    all(&mut underlays, &mut lanes);
    assert_eq!((underlays.held, underlays.spare.len()), (0, MOST_SPARE), "no more than were of use before");
    let sent: u64 = underlays.settlements.drain().map(|settled| settled.payloads).sum();
    assert_eq!((sent, std::mem::take(&mut underlays.evicted).len()), (SOCKETS as u64, 0));

    full.set(true);
    all(&mut underlays, &mut lanes);
    assert_eq!(underlays.held, MOST_SEND_BUFFERS);
    let most = (MOST_SEND_BUFFERS + MOST_SPARE) * (SendBatch::DEFAULT_BYTES + RESERVE_BYTES);
    assert!(underlays.send_buffer_bytes() <= most);
    let dropped: Vec<crate::relay::Settlement> = underlays.settlements.drain().collect();
    let evicted = SOCKETS - MOST_SEND_BUFFERS;
    assert!(dropped.iter().all(|settled| settled.dropped == Some(DropReason::SendEvicted)), "{dropped:?}");
    assert_eq!(dropped.iter().map(|settled| settled.payloads).sum::<u64>(), evicted as u64);
    assert_eq!(std::mem::take(&mut underlays.evicted).len(), evicted);
    assert_eq!(underlays.send_buffers_taken_away, evicted as u64);

    full.set(false);
    for id in &ids {
        underlays.unblock(*id, &mut lanes, now);
    }
    assert_eq!((underlays.held, underlays.spare.len()), (0, MOST_SPARE));
    let sent: u64 = underlays.settlements.drain().map(|settled| settled.payloads).sum();
    assert_eq!(sent, MOST_SEND_BUFFERS as u64);

    // What was of use lately is kept, and freed when it is so no more.
    underlays.free_spare();
    assert!(underlays.answer(&mut lanes, ids[0], &path, &[7; 100], now));
    underlays.flush(&mut lanes, now);
    assert_eq!(underlays.spare.len(), MOST_SPARE);
    underlays.free_spare();
    assert_eq!(underlays.spare.len(), 1, "one was needed");
}

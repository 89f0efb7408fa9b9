use std::{net::SocketAddr, ops::Range};

use proptest::{collection::vec, prelude::*};

use crate::{
    Delivery, ReceiveBatch, Recipient, SendBatch,
    batch::{MAX_MESSAGE_BYTES, MAX_SEGMENTS, MOST_SEGMENTS, Meta},
    sys,
    tests::{V4, path, payload, put},
};

fn destination(number: u8) -> SocketAddr {
    SocketAddr::new(V4, 1_000 + u16::from(number))
}

fn meta() -> Meta {
    Meta { len: 0, segment: 1, source: destination(0), local: None, ecn: 0, age: std::time::Duration::ZERO }
}

/// Sizes in runs, as real traffic has them, with odd ones between.
fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![6 => Just(1_200_usize), 2 => Just(0_usize), 2 => 1_usize..1_500, 1 => 9_000_usize..30_000];
    vec((size, 1_usize..70), 0..12)
        .prop_map(|runs| runs.into_iter().flat_map(|(size, count)| vec![size; count]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_committed_comes_out_whole_and_in_order(sizes in sizes(), ways in vec((0_u8..3, 0_u32..2), 1..20)) {
        let mut batch = SendBatch::default();
        let mut committed = Vec::new();
        for (number, len) in sizes.into_iter().enumerate() {
            let (way, owner) = ways[number / 7 % ways.len()];
            let path = path(destination(way));
            let bytes = payload(number, len);
            let Some(room) = batch.tail(len + 16) else { break };
            prop_assert_eq!(room.len(), len + 16);
            room[..len].copy_from_slice(&bytes);
            // A second reservation without a commit is the same room.
            prop_assert_eq!(&batch.tail(len).unwrap()[..], &bytes[..]);
            batch.commit(&path, owner, len, 2);
            committed.push((path, owner, bytes));
        }
        prop_assert_eq!(batch.datagrams(), committed.len());
        prop_assert_eq!(batch.bytes(), committed.iter().map(|(_, _, bytes)| bytes.len()).sum::<usize>());

        let mut out = Vec::new();
        for message in batch.messages() {
            prop_assert!(message.segments <= MAX_SEGMENTS && message.range.len() <= MAX_MESSAGE_BYTES);
            prop_assert_eq!(message.payloads, u32::from(message.segments) * 2);
            let lens: Vec<_> = batch.segments(message).map(<[u8]>::len).collect();
            let (last, full) = lens.split_last().unwrap();
            prop_assert!(full.iter().all(|len| *len == message.segment));
            prop_assert!(*last <= message.segment && (*last > 0 || full.is_empty()));
            out.extend(batch.segments(message).map(|bytes| (message.path, message.owner, bytes.to_vec())));
        }
        prop_assert_eq!(&out, &committed);

        let half = batch.messages().len() / 2;
        let left: usize = batch.messages()[half..].iter().map(|message| usize::from(message.segments)).sum();
        batch.release(half);
        let rest: Vec<_> = batch
            .messages()
            .iter()
            .flat_map(|message| batch.segments(message).map(|bytes| (message.path, message.owner, bytes.to_vec())))
            .collect();
        prop_assert_eq!(&rest[..], &committed[committed.len() - left..]);
    }

    #[test]
    fn what_is_pushed_is_delivered_whole_and_in_order(sizes in sizes(), ways in vec((0_u8..3, 0_u32..2), 1..20), burst in 1_u16..80) {
        let mut received = ReceiveBatch::new(64, 65_536);
        let mut pushed = Vec::new();
        let mut delivery = Delivery::default();
        let mut slot = Vec::new();
        let mut pending: Vec<(Range<usize>, u8, u32)> = Vec::new();
        let mut flush = |slot: &mut Vec<u8>, pending: &mut Vec<(Range<usize>, u8, u32)>| {
            if pending.is_empty() || !received.push(meta(), slot) {
                return;
            }
            let index = received.len() - 1;
            for (range, way, owner) in pending.drain(..) {
                let to = Recipient { destination: Some(destination(way)), source: None, owner };
                delivery.push(to, index, range.clone(), burst);
                pushed.push((Some(destination(way)), owner, received.buffer(index)[range].to_vec()));
            }
            slot.clear();
        };
        for (number, len) in sizes.into_iter().enumerate() {
            if slot.len() + len > 60_000 {
                flush(&mut slot, &mut pending);
            }
            let (way, owner) = ways[number / 7 % ways.len()];
            pending.push((slot.len()..slot.len() + len, way, owner));
            slot.extend(payload(number, len));
        }
        flush(&mut slot, &mut pending);

        let mut out = Vec::new();
        for message in delivery.messages() {
            let lens: Vec<_> = delivery.payloads(message, &received).map(<[u8]>::len).collect();
            prop_assert!(lens.len() <= usize::from(burst.min(MOST_SEGMENTS)));
            prop_assert_eq!(lens.len(), usize::from(message.payloads));
            prop_assert_eq!(lens.iter().sum::<usize>(), message.bytes);
            prop_assert!(message.bytes <= MAX_MESSAGE_BYTES);
            let (last, full) = lens.split_last().unwrap();
            prop_assert!(full.iter().all(|len| *len == message.segment));
            prop_assert!(*last <= message.segment && (*last > 0 || full.is_empty()));
            out.extend(
                delivery.payloads(message, &received).map(|bytes| (message.to.destination, message.to.owner, bytes.to_vec())),
            );
        }
        prop_assert_eq!(out, pushed);
    }

    #[test]
    fn segments_cover_a_buffer(len in 0_usize..70_000, segment in 0_usize..2_000) {
        let meta = Meta { len, segment: segment.max(1), ..meta() };
        let mut end = 0;
        let mut count = 0;
        for range in meta.segments() {
            prop_assert_eq!(range.start, end);
            prop_assert!(range.len() <= meta.segment && (len == 0 || !range.is_empty()));
            end = range.end;
            count += 1;
        }
        prop_assert_eq!((end, count), (len, meta.datagrams()));
    }
}

#[test]
fn equal_datagrams_of_one_path_become_one_message() {
    let mut batch = SendBatch::default();
    for number in 0..100 {
        put(&mut batch, &path(destination(0)), &payload(number, 1_000));
    }
    let shapes: Vec<_> = batch.messages().iter().map(|message| (message.segments, message.segment)).collect();
    assert_eq!(shapes, [(64, 1_000), (36, 1_000)]);
}

#[test]
fn a_shorter_datagram_ends_its_message_and_a_longer_one_begins_the_next() {
    let mut batch = SendBatch::default();
    for len in [500, 500, 300, 300, 400] {
        put(&mut batch, &path(destination(0)), &payload(0, len));
    }
    let shapes: Vec<_> = batch.messages().iter().map(|message| (message.segments, message.segment)).collect();
    assert_eq!(shapes, [(3, 500), (1, 300), (1, 400)]);
}

#[test]
fn a_datagram_that_joins_a_message_follows_it_without_what_was_forgotten_behind_it() {
    let (mut batch, path) = (SendBatch::default(), path(destination(0)));
    let say = |batch: &mut SendBatch, owner: u32, bytes: &[u8]| {
        batch.tail(bytes.len()).unwrap().copy_from_slice(bytes);
        batch.commit(&path, owner, bytes.len(), 0);
    };
    say(&mut batch, 7, &payload(0, 300));
    say(&mut batch, 9, &payload(1, 1_200));
    for number in 2..5 {
        say(&mut batch, 7, &payload(number, 1_000));
    }
    batch.retain(|message| message.owner == 9 || message.segment == 300);
    batch.retain(|message| message.owner == 9);
    say(&mut batch, 9, &payload(5, 1_200));
    say(&mut batch, 9, &payload(6, 700));
    let [message] = batch.messages() else { panic!("one message: {:?}", batch.messages()) };
    assert_eq!((message.segments, message.range.len(), batch.bytes()), (3, 3_100, 3_100));
    let out: Vec<Vec<u8>> = batch.segments(message).map(<[u8]>::to_vec).collect();
    assert_eq!(out, [payload(1, 1_200), payload(5, 1_200), payload(6, 700)]);
}

#[test]
fn a_full_batch_gives_no_room_until_it_is_released() {
    let mut batch = SendBatch::new(4_000);
    let path = path(destination(0));
    for number in 0..3 {
        put(&mut batch, &path, &payload(number, 1_200));
    }
    assert!(batch.tail(1_200).is_none());
    assert!(batch.tail(400).is_some());
    batch.release(1);
    assert!(batch.is_empty());
    assert_eq!(batch.tail(4_000).unwrap().len(), 4_000);
    assert!(batch.tail(MAX_MESSAGE_BYTES + 1).is_none());
}

#[test]
fn empty_datagrams_are_bounded_in_number() {
    let mut batch = SendBatch::default();
    let mut count = 0;
    while batch.tail(0).is_some() {
        batch.commit(&path(destination(0)), 0, 0, 1);
        count += 1;
    }
    assert_eq!(count, 1_024);
    assert!(batch.messages().iter().all(|message| message.segments == 1));
}

#[test]
fn a_delivery_respects_the_burst_and_ends_at_a_shorter_payload() {
    let mut delivery = Delivery::default();
    for len in [100, 100, 100, 100, 50, 50, 0, 0, 100] {
        delivery.push(Recipient::default(), 0, 0..len, 3);
    }
    let shapes: Vec<_> =
        delivery.messages().iter().map(|message| (message.payloads, message.bytes)).collect();
    assert_eq!(shapes, [(3, 300), (2, 150), (1, 50), (1, 0), (1, 0), (1, 100)]);
}

#[test]
fn payloads_moved_together_are_delivered_whole() {
    let mut received = ReceiveBatch::new(2, 4_000);
    let mut expected = Vec::new();
    let mut delivery = Delivery::default();
    for slot in 0..2 {
        let bytes = payload(slot, 3_000);
        assert!(received.push(meta(), &bytes));
        let mut end = 33;
        for number in 0..9 {
            let start = 33 + number * 110;
            expected.push(bytes[start..start + 100].to_vec());
            let moved = received.move_down(slot, start..start + 100, end);
            end = moved.end;
            delivery.push(Recipient::default(), slot, moved, 16);
        }
    }
    let shapes: Vec<_> = delivery.messages().iter().map(|message| message.payloads).collect();
    assert_eq!(shapes, [16, 2]);
    let delivered: Vec<_> = delivery
        .messages()
        .iter()
        .flat_map(|message| delivery.payloads(message, &received).map(<[u8]>::to_vec))
        .collect();
    assert!(delivered == expected);
}

#[test]
fn datagrams_that_were_put_together_are_delivered_between_those_of_buffers() {
    let mut received = ReceiveBatch::new(1, 4_000);
    assert!(received.push(meta(), &payload(0, 1_000)));
    let mut delivery = Delivery::default();
    delivery.push(Recipient::default(), 0, 0..500, 16);
    for half in [0..250, 250..500] {
        let (buffer, joined) = received.buffer_and_joined(0);
        let start = joined.len();
        joined.extend_from_slice(&buffer[half.clone()]);
        joined.extend_from_slice(&buffer[half.start + 500..half.end + 500]);
        let whole = start..joined.len();
        delivery.push(Recipient::default(), ReceiveBatch::JOINED, whole, 16);
    }
    delivery.push(Recipient::default(), 0, 500..1_000, 16);
    let [message] = delivery.messages() else { panic!("one message: {:?}", delivery.messages()) };
    let delivered: Vec<u8> = delivery.payloads(message, &received).flatten().copied().collect();
    let bytes = payload(0, 1_000);
    let parts = [0..500, 0..250, 500..750, 250..500, 750..1_000, 500..1_000].map(|part| &bytes[part]);
    assert!(delivered == parts.concat() && message.payloads == 4);
    assert_eq!(received.joined_bytes(), 1_000);
    received.forget_joined();
    assert_eq!(received.joined_bytes(), 0);
}

#[test]
fn a_receive_batch_takes_what_fits() {
    let mut batch = ReceiveBatch::new(2, 10);
    assert!(!batch.push(meta(), &[0; 11]));
    assert!(batch.push(meta(), &[1; 10]));
    assert!(batch.push(meta(), &[]));
    assert!(!batch.push(meta(), &[2]));
    let (first, bytes) = batch.buffer_mut(0);
    assert_eq!((first.len, &*bytes), (10, &[1; 10][..]));
    bytes[0] = 9;
    assert_eq!(batch.buffer(0)[0], 9);
    assert_eq!(batch.meta(1).datagrams(), 1);
}

#[test]
fn the_memory_of_slots_that_are_not_used_is_given_back() {
    let mut batch = ReceiveBatch::default();
    let fill = |batch: &mut ReceiveBatch, slots: usize| {
        batch.clear();
        (0..slots).for_each(|_| assert!(batch.push(Meta::EMPTY, &[7; ReceiveBatch::DEFAULT_SLOT_BYTES])));
    };
    let kept = |batch: &mut ReceiveBatch| {
        batch.rooms().map(|room| room.iter().filter(|byte| **byte != 0).count()).sum::<usize>()
    };
    // Slots need not begin with a page, so the first and the last page of a range stay.
    let (slot, edges) = (ReceiveBatch::DEFAULT_SLOT_BYTES, 3 * sys::page_bytes());
    fill(&mut batch, ReceiveBatch::DEFAULT_SLOTS);
    batch.give_back();
    assert!(batch.is_empty());
    assert_eq!(kept(&mut batch), ReceiveBatch::DEFAULT_SLOTS * slot, "all were in use a moment ago");
    fill(&mut batch, 3);
    batch.give_back();
    assert!((3 * slot..=3 * slot + edges).contains(&kept(&mut batch)), "{} bytes", kept(&mut batch));
    batch.give_back();
    assert!((slot..=slot + edges).contains(&kept(&mut batch)), "{} bytes", kept(&mut batch));
    fill(&mut batch, ReceiveBatch::DEFAULT_SLOTS);
    assert!((0..batch.len()).all(|slot| batch.buffer(slot) == [7; ReceiveBatch::DEFAULT_SLOT_BYTES]));
}

use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn frames(payload: &[u8]) -> Result<Vec<Frame<'_>>, Violation> {
    Frames::new(payload).collect()
}

#[test]
fn what_is_written_is_what_is_parsed() {
    let (mut buf, mut len) = ([0xff; 2000], 0);
    for (payload_len, byte) in [(0, 0), (63, 1), (64, 2)] {
        len += datagram::write_header_with_len(&mut buf[len..], payload_len).unwrap();
        buf[len..len + payload_len].fill(byte);
        len += payload_len;
    }
    len += datagram::write_header_to_end(&mut buf[len..]).unwrap();
    buf[len..len + 500].fill(3);
    len += 500;
    assert_eq!(len, 2 + (2 + 63) + (3 + 64) + (1 + 500));

    let expected: Vec<_> =
        [(0, 0), (63, 1), (64, 2), (500, 3)].into_iter().map(|(len, byte)| vec![byte; len]).collect();
    let parsed = frames(&buf[..len]).unwrap();
    assert_eq!(parsed, expected.iter().map(|payload| Frame::Datagram(payload)).collect::<Vec<_>>());
}

#[test]
fn what_is_left_after_each_frame_is_known() {
    let mut frames = Frames::new(&[PING, 0x31, 1, 7, PADDING, PADDING, PING]);
    let mut left = vec![frames.remaining()];
    while let Some(Ok(_)) = frames.next() {
        left.push(frames.remaining());
    }
    assert_eq!(left, [7, 6, 3, 1, 0]);
}

#[test]
fn a_header_that_does_not_fit_is_not_written() {
    assert_eq!(datagram::write_header_with_len(&mut [], 0), None);
    assert_eq!(datagram::write_header_with_len(&mut [0; 2], 64), None);
    assert_eq!(datagram::write_header_with_len(&mut [0; 2], 63), Some(2));
    assert_eq!(datagram::write_header_to_end(&mut []), None);
}

#[test]
fn encoded_lengths_are_those_written() {
    let mut buf = [0; 20_000];
    for len in [0, 1, 63, 64, 1150, 16_383, 16_384] {
        let header_len = datagram::write_header_with_len(&mut buf, len).unwrap();
        assert_eq!(header_len, datagram::header_len(len));
        assert_eq!(header_len + len, datagram::encoded_len(len));
        assert_eq!(datagram::encoded_len_to_end(len), 1 + len);
    }
    assert_eq!(datagram::write_header_to_end(&mut buf), Some(datagram::encoded_len_to_end(0)));
}

#[test]
fn every_other_frame_type_is_a_violation() {
    let allowed = [0x00, 0x01, 0x02, 0x03, 0x1a, 0x1b, 0x30, 0x31];
    for kind in 0..0x4000_u64 {
        let mut payload = [0; 64];
        varint::write(&mut payload, kind).unwrap();
        let result = frames(&payload);
        if allowed.contains(&kind) {
            assert!(result.is_ok(), "type {kind:#x}: {result:?}");
        } else {
            assert_eq!(result, Err(Violation::FrameType(kind)));
        }
    }
}

#[test]
fn a_frame_type_must_be_minimal() {
    assert_eq!(frames(&[0x40, 0x30, 1, 2]), Err(Violation::FrameTypeNotMinimal(0x30)));
    assert_eq!(frames(&[0x80, 0, 0, 1]), Err(Violation::FrameTypeNotMinimal(1)));
    assert_eq!(frames(&[0x80, 0]), Err(Violation::Truncated(0x80)));
}

#[test]
fn a_frame_cut_short_is_a_violation() {
    let complete: [&[u8]; 5] = [
        &[0x02, 9, 0, 1, 2, 1, 2],
        &[0x03, 9, 0, 0, 2, 1, 1, 1],
        &[0x1a, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0x1b, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0x31, 4, 1, 2, 3, 4],
    ];
    for frame in complete {
        assert_eq!(frames(frame).unwrap().len(), 1);
        for len in 1..frame.len() {
            assert_eq!(
                frames(&frame[..len]),
                Err(Violation::Truncated(frame[0].into())),
                "{:?}",
                &frame[..len]
            );
        }
    }
}

#[test]
fn contents_sum_up_the_frames() {
    let payload = [
        &[0x00, 0x00, 0x01][..],
        &[0x1a, 1, 1, 1, 1, 1, 1, 1, 1],
        &[0x1b, 2, 2, 2, 2, 2, 2, 2, 2],
        &[0x02, 9, 0, 0, 2],
        &[0x31, 1, 7],
        &[0x30],
    ]
    .concat();
    let contents = Contents::validate(&payload, 10).unwrap();
    let expected = Contents {
        datagrams: 2,
        acks: 1,
        ping: true,
        path_challenge: Some([1; 8]),
        path_response: Some([2; 8]),
    };
    assert_eq!(contents, expected);
    assert_eq!(Contents::validate(&payload, 9), Err(Violation::AckOfUnsent(9)));
    assert_eq!(Contents::validate(&[], 0), Err(Violation::EmptyPayload));
}

#[test]
fn only_ack_and_padding_do_not_ask_for_an_ack() {
    let elicits = |payload: &[u8]| Contents::validate(payload, 100).unwrap().ack_eliciting();
    assert!(!elicits(&[0x00, 0x00]));
    assert!(!elicits(&[0x02, 9, 0, 0, 2]));
    assert!(elicits(&[0x01]));
    assert!(elicits(&[0x30]));
    assert!(elicits(&[0x1a, 1, 2, 3, 4, 5, 6, 7, 8]));
    assert!(elicits(&[0x1b, 1, 2, 3, 4, 5, 6, 7, 8]));
}

#[test]
fn ack_ranges_below_zero_are_a_violation() {
    for payload in [&[0x02, 3, 0, 0, 4][..], &[0x02, 5, 0, 1, 1, 3, 0], &[0x02, 5, 0, 1, 1, 0, 3]] {
        assert_eq!(frames(payload), Err(Violation::AckRange), "{payload:?}");
    }
}

proptest! {
    #[test]
    fn an_ack_survives_the_wire(
        lowest in 0_u64..1 << 40,
        steps in prop::collection::vec((0_u64..1 << 20, 0_u64..1 << 20), 0..31),
        first in 0_u64..1000,
        delay_us in 0_u64..1 << 30,
        ecn in any::<bool>(),
    ) {
        let mut ranges = vec![lowest..=lowest + first];
        for (gap, range) in steps {
            let start = ranges.last().unwrap().end() + 2 + gap;
            ranges.push(start..=start + range);
        }
        ranges.reverse();
        let mut buf = [0; 1024];
        let mut len = ack::write(&mut buf, ranges.iter().cloned(), Duration::from_micros(delay_us)).unwrap();
        if ecn {
            buf[0] = ack::ACK_ECN;
            buf[len..len + 3].fill(5);
            len += 3;
        }
        let parsed = frames(&buf[..len]).unwrap();
        let [Frame::Ack(frame)] = &parsed[..] else { panic!("one ACK expected: {parsed:?}") };
        prop_assert_eq!(frame.largest, *ranges[0].end());
        prop_assert_eq!(frame.delay, Duration::from_micros(delay_us & !7));
        prop_assert_eq!(frame.ranges().collect::<Vec<_>>(), ranges);
    }

    #[test]
    fn arbitrary_payloads_do_not_panic(payload in prop::collection::vec(any::<u8>(), 0..200), next in any::<u64>()) {
        if let Ok(contents) = Contents::validate(&payload, next) {
            let datagrams = Frames::new(&payload).filter(|frame| matches!(frame, Ok(Frame::Datagram(_)))).count();
            prop_assert_eq!(contents.datagrams as usize, datagrams);
            for frame in Frames::new(&payload).flatten() {
                if let Frame::Ack(ack) = frame {
                    prop_assert!(ack.largest < next);
                    prop_assert!(ack.ranges().all(|range| range.start() <= range.end()));
                }
            }
        }
    }
}

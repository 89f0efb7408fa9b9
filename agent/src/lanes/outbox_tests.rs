//! Datagrams that are pushed together make the same packets as datagrams that are pushed one by one.

use std::{cell::RefCell, io, net::SocketAddr, rc::Rc};

use proptest::prelude::*;
use quic_core::{AckProfile, ConnectionId, Lane, LaneConfig, Suite};

use super::*;
use crate::{
    clock::{Clock, ManualClock},
    io::{Delivery, ReceiveBatch, UdpStats, batch::DeliveryMessage},
    peer::SessionId,
};

/// Segment size, segments and payloads of each message, and the bytes of its packets.
type Sent = Rc<RefCell<Vec<(usize, u16, u32, Vec<Vec<u8>>)>>>;

/// Takes everything and remembers it.
struct Sink(Sent);

impl UdpSocket for Sink {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], 1))
    }

    fn receive(&mut self, _batch: &mut ReceiveBatch) -> io::Result<()> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
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

    fn kernel_drops(&self) -> u64 {
        0
    }
}

/// A lane that is up, on a socket that takes everything.
fn fixture(now: Instant) -> (Underlays, Lanes, LaneId, Sent) {
    let sent = Sent::default();
    let mut underlays = Underlays::default();
    let underlay = underlays.insert(Box::new(Sink(Rc::clone(&sent))), UdpRole::QuicDial, Token(0));
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
    let owner = (PeerId(3), SessionId(1));
    let mut slot = LaneSlot::new(core, owner, (0, 1), ConnectionId([2; 8]), (underlay, 1_452), now);
    let path = Path { destination: SocketAddr::from(([192, 0, 2, 2], 2)), source: None, tos: 0 };
    slot.validate(path, [1; 8], now);
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
                expected = single_underlays.push(&mut single_lanes, single_lane, frame, now);
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

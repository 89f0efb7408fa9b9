//! Payloads that share packets, and flows that take turns within them.

use std::time::Duration;

use super::*;

#[test]
fn small_payloads_of_flows_that_take_turns_arrive_whole_and_in_order() {
    let mut pair = Pair::connected(70, "", "");
    let mut clients: Vec<Udp> = (0..3).map(|port| pair.client(7000 + port)).collect();
    let content = |place: usize, number: usize| {
        let len = 4 + (number / 6 * 13 + place) % 90;
        (0..len).map(|at| (place * 97 + number * 31 + at) as u8).collect::<Vec<u8>>()
    };
    for round in 0..20 {
        // Runs of one flow of one length, then of the next flow, all within one turn.
        for half in 0..2 {
            for (place, client) in clients.iter_mut().enumerate() {
                for number in 0..3 {
                    client.send(INGRESS, &content(place, round * 6 + half * 3 + number));
                }
            }
        }
        pair.run_served(Duration::from_millis(2));
    }
    pair.run_served(Duration::from_millis(100));
    for (place, client) in clients.iter_mut().enumerate() {
        let answers: Vec<_> = client.receive().into_iter().map(|(_, payload)| payload).collect();
        let expected: Vec<_> = (0..120).map(|number| content(place, number)).collect();
        assert_eq!(answers, expected, "client {place}");
    }
    let [entry, exit] = pair.assert_balanced();
    assert_eq!([entry.uplink.account.delivered, exit.downlink.account.delivered], [360, 360]);
    let (sent, packets) = (
        pair.world.metric(pair.entry, "culvert_lane_datagram_frames_total{direction=\"uplink\"}"),
        pair.world.metric(pair.entry, "culvert_lane_packets_sent_total{peer=\"exit\"}"),
    );
    assert!(packets < sent, "{sent} frames share {packets} packets");
}

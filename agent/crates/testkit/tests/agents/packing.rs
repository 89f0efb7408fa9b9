//! Payloads that share packets, and flows that take turns within them; datagrams in pieces that fill packets.

use std::time::Duration;

use super::*;
use crate::fragments::pattern;

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

/// The system calls in which the exit has sent datagrams to its services.
fn deliveries(pair: &mut Pair) -> u64 {
    pair.world.metric(pair.exit, "culvert_socket_send_calls_total{socket=\"upstream\"}")
}

#[test]
fn datagrams_in_pieces_fill_packets_and_are_delivered_together() {
    let mut pair = Pair::fragmenting(71, (1, 1), "");
    let mut client = pair.client(4000);
    // The lane has found the size of its packets.
    pair.run_served(Duration::from_secs(2));
    assert_eq!(pair.echoed(&mut client, b"opens").len(), 1);
    let packets =
        |pair: &mut Pair| pair.world.metric(pair.entry, "culvert_lane_packets_sent_total{peer=\"exit\"}");
    let before = (packets(&mut pair), deliveries(&mut pair));
    let sent: Vec<Vec<u8>> = (0..48).map(|number| pattern(1472, number)).collect();
    for payload in &sent {
        client.send(INGRESS, payload);
    }
    pair.world.run(Duration::from_millis(20));
    let (packets, calls) = (packets(&mut pair) - before.0, deliveries(&mut pair) - before.1);
    pair.run_served(Duration::from_millis(20));
    let answers: Vec<Vec<u8>> = client.receive().into_iter().map(|answer| answer.1).collect();
    assert!(answers == sent, "{} answers, whole and in order", answers.len());
    // Nine packets carry eight datagrams; each of the others is an acknowledgement.
    assert!((54..60).contains(&packets), "{packets} packets");
    assert!(calls <= 4, "48 datagrams in {calls} calls");
    pair.assert_balanced();
}

#[test]
fn more_datagrams_in_pieces_than_are_put_together_at_a_time_stay_in_order() {
    let mut pair = Pair::fragmenting(72, (1, 1), "");
    let mut clients: Vec<Udp> = (0..2).map(|port| pair.client(4000 + port)).collect();
    for client in &mut clients {
        client.send(INGRESS, b"opens");
    }
    pair.run_served(Duration::from_secs(2));
    let before = deliveries(&mut pair);
    let sizes = [60_000, 100, 50_000, 3_000, 1_400, 1_500];
    let content = |place: usize| -> Vec<Vec<u8>> {
        (0..18).map(|number| pattern(sizes[number % 6], 20 * place + number)).collect()
    };
    for number in 0..18 {
        for (place, client) in clients.iter_mut().enumerate() {
            client.send(INGRESS, &content(place)[number]);
        }
    }
    pair.run_served(Duration::from_millis(100));
    assert!(deliveries(&mut pair) > before);
    for (place, client) in clients.iter_mut().enumerate() {
        let answers: Vec<Vec<u8>> = client.receive().into_iter().map(|answer| answer.1).skip(1).collect();
        let sizes: Vec<usize> = answers.iter().map(Vec::len).collect();
        assert!(answers == content(place), "{sizes:?}");
    }
    pair.assert_balanced();
}

//! What an operator sees of a lane, or of a control connection, is what happened on it.

use std::{io::Cursor, sync::Arc};

use engine::{capture::Subject, worker::Worker};
use ops::qlog::{Captures, Order, Refusal};
use qlog::{
    events::{EventData, connectivity::ConnectionState, quic::PacketType},
    reader::{Event, QlogSeqReader},
};

use super::*;

const SENT: &str = "culvert_lane_packets_sent_total{peer=\"exit\"}";
const RECEIVED: &str = "culvert_lane_packets_received_total{peer=\"exit\"}";
const LOST: &str = "culvert_lane_packets_lost_total{peer=\"exit\"}";

impl Pair {
    /// The captures of an agent.
    fn captures(&mut self, place: usize) -> Captures {
        let clock = Arc::new(self.world.clock.clone());
        let agent = self.world.agent(place);
        let hub = Arc::clone(agent.workers[0].hub());
        Captures::new(Arc::clone(&agent.registry), hub, clock)
    }

    fn start(&mut self, captures: &Captures, place: usize, order: &Order) -> Result<u64, Refusal> {
        let config = Arc::clone(self.world.agent(place).workers[0].config());
        captures.start(order, &config)
    }

    /// How many captures the workers of an agent know, and how many lanes are recorded.
    fn armed(&mut self, place: usize) -> (usize, usize) {
        let workers = &mut self.world.agent(place).workers;
        let known = workers.iter().map(|worker| worker.captures()).sum();
        let ids = |worker: &Worker| worker.lanes().iter().map(|(id, _)| id).collect::<Vec<_>>();
        let recorded = |worker: &mut Worker| {
            let lanes = ids(worker).into_iter();
            lanes.filter(|id| worker.lanes_mut().get_mut(*id).unwrap().core.recorder_mut().is_some()).count()
        };
        (known, workers.iter_mut().map(recorded).sum())
    }
}

fn order(peer: &str, subject: Subject, seconds: u64) -> Order {
    Order { peer: peer.to_owned(), subject, seconds, reconnect: false }
}

/// The events of a file, each of which the crate understands.
fn events(file: String) -> Vec<qlog::events::Event> {
    let records = file.matches('\u{1e}').count();
    let reader = QlogSeqReader::new(Box::new(Cursor::new(file.into_bytes()))).unwrap();
    let events = reader.map(|event| match event {
        Event::Qlog(event) => event,
        Event::Json(event) => panic!("{event:?}"),
    });
    let events: Vec<_> = events.collect();
    assert_eq!(events.len() + 1, records);
    events
}

fn sent(events: &[qlog::events::Event]) -> Vec<u64> {
    let number = |event: &qlog::events::Event| {
        let EventData::PacketSent(sent) = &event.data else { return None };
        sent.header.packet_number
    };
    events.iter().filter_map(number).collect()
}

fn lost(events: &[qlog::events::Event]) -> Vec<u64> {
    let number = |event: &qlog::events::Event| {
        let EventData::PacketLost(lost) = &event.data else { return None };
        lost.header.as_ref()?.packet_number
    };
    events.iter().filter_map(number).collect()
}

fn count(events: &[qlog::events::Event], is: fn(&EventData) -> bool) -> u64 {
    events.iter().filter(|event| is(&event.data)).count() as u64
}

#[test]
fn a_lane_under_traffic_is_captured_as_it_was() {
    for (seed, workers) in [(81, 1), (82, 2)] {
        let mut pair = Pair::with_workers(seed, (workers, workers), "lanes = 1", "");
        pair.wait_for_lanes(1);
        let (entry, exit) = (pair.entry, pair.exit);
        let mut client = pair.client(1000);
        // Until the search for the path's MTU is over, and nothing is on its way.
        pair.world.run(Duration::from_secs(4));
        let before = [SENT, RECEIVED, LOST].map(|series| pair.world.metric(entry, series));
        let captures = pair.captures(entry);
        let id = pair.start(&captures, entry, &order("exit", Subject::Lane(0), 5)).unwrap();
        pair.world.run(Duration::from_millis(1));
        assert_eq!(pair.armed(entry), (usize::from(workers), 1));
        let mut file = captures.take(id).unwrap().text;
        drop(pair.world.tapped());
        let mut dropped = 0;
        for number in 0..500 {
            let lose = number % 25 == 3;
            pair.world.weather.borrow_mut().block =
                Box::new(move |from, to| lose && from.ip() == ENTRY && to.ip() == EXIT);
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(2));
            let tapped = pair.world.tapped();
            let large = |datagram: &&harness::Tapped| {
                datagram.from.ip() == ENTRY && datagram.to.ip() == EXIT && datagram.payload.len() > 600
            };
            dropped += if lose { tapped.iter().filter(large).count() } else { 0 };
            if number % 100 == 0 {
                file.push_str(&captures.take(id).unwrap().text);
            }
        }
        pair.world.run(Duration::from_secs(2));
        file.push_str(&captures.take(id).unwrap().text);
        pair.world.run(Duration::from_secs(3));
        let last = captures.take(id).unwrap();
        file.push_str(&last.text);
        assert_eq!((last.done, last.lost, last.begun), (true, 0, 1));
        assert_eq!(captures.take(id), Err(Refusal::Unknown(id)));
        let after = [SENT, RECEIVED, LOST].map(|series| pair.world.metric(entry, series));

        let events = events(file);
        let numbers = sent(&events);
        assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "contiguous");
        let received = count(&events, |data| matches!(data, EventData::PacketReceived(_)));
        let seen = [numbers.len() as u64, received, lost(&events).len() as u64];
        assert_eq!(seen, [0, 1, 2].map(|place| after[place] - before[place]));
        assert_eq!((dropped, seen[2]), (20, 20), "what the network dropped");
        assert!(count(&events, |data| matches!(data, EventData::MetricsUpdated(_))) > 20);
        assert!(events.is_sorted_by(|one, next| one.time <= next.time));
        // Off again.
        assert_eq!((pair.armed(entry), pair.armed(exit)), ((0, 0), (0, 0)));
        pair.assert_balanced();
    }
}

#[test]
fn a_capture_follows_its_lane_over_a_reconnect_and_ends_when_nobody_asks() {
    let mut pair = Pair::with_workers(83, (2, 2), "lanes = 2", "");
    pair.wait_for_lanes(2);
    let entry = pair.entry;
    let captures = pair.captures(entry);
    let id = pair.start(&captures, entry, &order("exit", Subject::Lane(1), 60)).unwrap();
    pair.world.run(Duration::from_millis(10));
    let reconnect = Order { reconnect: true, ..order("exit", Subject::Control, 60) };
    let control = pair.start(&captures, entry, &reconnect).unwrap();
    let mut file = captures.take(id).unwrap().text;
    pair.world.run(Duration::from_secs(5));
    let taken = captures.take(id).unwrap();
    assert_eq!((taken.begun, taken.lost), (2, 0));
    file.push_str(&taken.text);
    captures.stop(control).unwrap();
    let states: Vec<ConnectionState> = events(file)
        .iter()
        .filter_map(|event| {
            let EventData::ConnectionStateUpdated(state) = &event.data else { return None };
            Some(state.new.clone())
        })
        .collect();
    assert_eq!(states[..2], [ConnectionState::PeerValidated, ConnectionState::Draining]);
    let [.., second, last] = &states[..] else { panic!("{states:?}") };
    assert_eq!((second, last), (&ConnectionState::Attempted, &ConnectionState::PeerValidated));

    assert_eq!(pair.armed(entry), (2, 1));
    pair.world.run(Duration::from_secs(11));
    assert_eq!(pair.armed(entry), (0, 0), "its client is gone");
    assert!(pair.start(&captures, entry, &order("exit", Subject::Lane(1), 60)).is_ok());
}

#[test]
fn a_control_connection_is_captured_from_its_first_packet_at_both_ends() {
    let mut pair = Pair::connected(84, "", "");
    let (entry, exit) = (pair.entry, pair.exit);
    let mut client = pair.client(1000);
    client.send(INGRESS, &numbered(1));
    pair.run_served(Duration::from_millis(40));
    let (at_entry, at_exit) = (pair.captures(entry), pair.captures(exit));
    let waiting = pair.start(&at_exit, exit, &order("entry", Subject::Control, 10)).unwrap();
    pair.world.run(Duration::from_secs(2));
    let header = at_exit.take(waiting).unwrap();
    assert_eq!(header.begun, 0, "the one that there is was not recorded from its start");
    let reconnect = Order { reconnect: true, ..order("exit", Subject::Control, 5) };
    let dialled = pair.start(&at_entry, entry, &reconnect).unwrap();
    pair.world.run(Duration::from_secs(6));
    client.send(INGRESS, &numbered(2));
    pair.run_served(Duration::from_millis(40));
    assert_eq!(client.receive().len(), 2, "the flow lives on");
    assert_eq!(pair.world.peer(entry).flows, 1);

    for (captures, id, before) in [(at_entry, dialled, ""), (at_exit, waiting, &*header.text)] {
        let taken = captures.take(id).unwrap();
        assert_eq!((taken.begun, taken.lost), (1, 0));
        let events = events(format!("{before}{}", taken.text));
        let types = |event: &qlog::events::Event| {
            if let EventData::PacketSent(sent) = &event.data {
                return Some((true, sent.header.packet_type.clone()));
            }
            let EventData::PacketReceived(received) = &event.data else { return None };
            Some((false, received.header.packet_type.clone()))
        };
        let seen: Vec<_> = events.iter().filter_map(types).collect();
        for what in [PacketType::Initial, PacketType::Handshake, PacketType::OneRtt] {
            assert!(
                seen.contains(&(true, what.clone())) && seen.contains(&(false, what.clone())),
                "{what:?}: {seen:?}"
            );
        }
        let first = sent(&events)[0];
        assert_eq!(first, 0);
        assert!(events.iter().all(|event| event.group_id.is_some()));
        assert!(!captures.take(id).is_ok_and(|more| more.text.contains("packet_sent")), "all was taken");
    }
}

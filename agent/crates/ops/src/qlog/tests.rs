use std::{
    io::Cursor,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use ::qlog::{
    VantagePointType,
    events::EventData,
    reader::{Event, QlogSeqReader},
};
use base::clock::{Clock, ManualClock};
use config::Config;
use engine::{capture::Entry, hub::Hub, registry::PeerRegistry};
use gate::identity::{Identity, PublicKey};
use quic_core::{
    AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, OVERHEAD, Suite, TAG_LEN, TRANSMIT_CAPACITY,
    frame::datagram, record::Recorder,
};

use engine::capture::{Began, Feed, Note, Phase, Subject};

use super::*;

/// What a file has, every record of which must be what it should.
fn parsed(file: &str) -> (qlog::QlogSeq, Vec<Event>) {
    let records = file.matches('\u{1e}').count();
    let reader = QlogSeqReader::new(Box::new(Cursor::new(file.to_owned().into_bytes()))).unwrap();
    let header = reader.qlog.clone();
    let events: Vec<Event> = reader.collect();
    assert_eq!(events.len() + 1, records, "the crate understands each");
    assert!(file.lines().all(|line| line.starts_with('\u{1e}')), "RFC 7464");
    (header, events)
}

fn header(subject: Subject) -> String {
    text::header("exit", subject, Some(true), Duration::from_secs(1_780_000_000))
}

/// Two lanes; the first is recorded.
fn lanes(now: Instant, capacity: usize) -> [Lane; 2] {
    let mut lanes = [0, 1].map(|end| {
        let cids = [ConnectionId([1; 8]), ConnectionId([2; 8])];
        let secrets = [[1; 32], [2; 32]];
        let config = LaneConfig {
            suite: Suite::Aes128Gcm,
            send_secret: &secrets[end],
            receive_secret: &secrets[1 - end],
            remote_cid: cids[1 - end],
            local_cid: cids[end],
            ack: AckProfile::Latency,
            key_limit: None,
            initial_rtt: None,
        };
        Lane::new(&config).unwrap()
    });
    lanes[0].record(Some(Box::new(Recorder::new(capacity, now))));
    lanes
}

/// One packet with a datagram of 100 bytes, sealed by `lane`.
fn seal(lane: &mut Lane, now: Instant) -> Vec<u8> {
    let mut packet = vec![0; OVERHEAD + 1 + 100];
    let end = packet.len() - TAG_LEN;
    let frame = &mut packet[HEADER_LEN..end];
    let header_len = datagram::write_header_to_end(frame).unwrap();
    frame[header_len..].fill(7);
    lane.seal(&mut packet, true, now).unwrap();
    packet
}

/// All of a feed as a file.
fn file(feed: &Feed) -> String {
    let mut text = header(Subject::Lane(0));
    let mut entries = Vec::new();
    feed.take(&mut entries);
    let mut place = 0;
    while place < entries.len() {
        place += events::write(&mut text, &entries[place..], Some(true));
    }
    text
}

#[test]
fn records_become_events_that_the_crate_reads() {
    let now = ManualClock::default().now();
    let [mut ours, mut theirs] = lanes(now, 1000);
    let feed = Feed::with_room();
    let began = Began {
        local: ([192, 0, 2, 1], 40_000).into(),
        remote: Some(([198, 51, 100, 1], 4433).into()),
        local_cid: ConnectionId([1; 8]),
        epoch: 7,
    };
    feed.note(5, Note::Began(Box::new(began)));
    feed.note(5, Note::Phase(Phase::Up));
    ours.start_mtu_search(1452, 1200);
    let mut room = [0; 1452];
    // Number 0 and, later, the four after it, of which one is late; the MTU probe is lost.
    let mut packets: Vec<_> = (0..2).map(|_| seal(&mut ours, now)).collect();
    assert!(ours.poll_transmit(&mut room, now).unwrap().is_some(), "an MTU probe");
    packets.extend((0..6).map(|_| seal(&mut ours, now + Duration::from_millis(1))));
    let later = now + Duration::from_millis(40);
    packets.remove(1);
    for packet in &mut packets {
        theirs.open(packet, later).unwrap();
        while let Some(len) = theirs.poll_transmit(&mut room[..TRANSMIT_CAPACITY], later).unwrap() {
            ours.open(&mut room[..len], later).unwrap();
            ours.recorder_mut().unwrap().note_ecn(2);
        }
    }
    feed.append(ours.recorder_mut().unwrap());

    let text = file(&feed);
    let (header, events) = parsed(&text);
    assert_eq!(header.qlog_format, "JSON-SEQ");
    assert_eq!(header.trace.vantage_point.ty, VantagePointType::Client);
    assert_eq!(header.title.as_deref(), Some("lane 0 of exit"));
    let qlog: Vec<_> = events
        .iter()
        .map(|event| match event {
            Event::Qlog(event) => event,
            Event::Json(event) => panic!("{event:?}"),
        })
        .collect();
    let EventData::ConnectionStarted(started) = &qlog[0].data else { panic!("{:?}", qlog[0]) };
    assert_eq!((started.src_port, started.dst_ip.as_str()), (Some(40_000), "198.51.100.1"));
    assert_eq!(
        (started.src_cid.as_deref(), &qlog[0].ex_data["epoch"]),
        (Some("0101010101010101"), &7.into())
    );
    let sent: Vec<_> = qlog
        .iter()
        .filter_map(|event| {
            let EventData::PacketSent(sent) = &event.data else { return None };
            Some((sent.header.packet_number.unwrap(), sent.raw.as_ref().unwrap().length.unwrap()))
        })
        .collect();
    let whole = (OVERHEAD + 1 + 100) as u64;
    assert_eq!(sent[..4], [(0, whole), (1, whole), (2, 1452), (3, whole)]);
    assert!(text.contains(r#""frames":[{"frame_type":"datagram","length":100}]"#), "{text}");
    assert!(text.contains(r#""mtu_probe":true"#) && text.contains(r#""ecn":"ECT(0)""#), "{text}");
    assert!(text.contains(r#""acked_ranges":[[3,5],[0,0]]"#), "{text}");
    let lost: Vec<u64> = qlog
        .iter()
        .filter_map(|event| {
            let EventData::PacketLost(lost) = &event.data else { return None };
            lost.header.as_ref()?.packet_number
        })
        .collect();
    assert_eq!(lost, [1, 2]);
    let metrics = qlog.iter().rev().find_map(|event| {
        let EventData::MetricsUpdated(metrics) = &event.data else { return None };
        Some((metrics, &event.ex_data["pto"], event.time))
    });
    let (metrics, pto, time) = metrics.unwrap();
    assert_eq!((metrics.min_rtt, metrics.packets_in_flight, time), (Some(39.0), Some(1), 40.0));
    assert!(pto.as_f64().unwrap() > 39.0 + 25.0);
}

#[test]
fn a_packet_that_came_late_has_an_event_of_ours() {
    let record = quic_core::record::Record {
        micros: 1500,
        event: quic_core::record::Event::SpuriouslyLost { number: 9 },
    };
    let mut text = header(Subject::Lane(0));
    assert_eq!(events::write(&mut text, &[Entry::Lane(record)], None), 1);
    let (_, events) = parsed(&text);
    let [Event::Json(late)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((late.name.as_str(), late.time), ("culvert:packet_spuriously_lost", 1.5));
    assert_eq!(late.data["header"]["packet_number"], 9);
}

#[test]
fn a_full_feed_loses_whole_packets_and_says_where() {
    let now = ManualClock::default().now();
    // A recorder that is small, too.
    let [mut ours, _] = lanes(now, 101);
    let feed = Feed::with_room();
    let mut sent = 0;
    for _ in 0..600 {
        for _ in 0..51 {
            drop(seal(&mut ours, now));
            sent += 1;
        }
        feed.append(ours.recorder_mut().unwrap());
    }
    // 50 of 51 fit into the recorder, and 20,000 less the notes of that into the feed.
    let first = file(&feed);
    drop(seal(&mut ours, now));
    feed.append(ours.recorder_mut().unwrap());
    let second = file(&feed);
    let numbers = |text: &str| {
        let (_, events) = parsed(text);
        let mut found = Vec::new();
        let mut missing = 0;
        for event in events {
            let Event::Qlog(event) = event else { panic!("{event:?}") };
            if let EventData::PacketSent(sent) = event.data {
                assert_eq!(sent.frames.unwrap().len(), 1, "none without its frame");
                found.push(sent.header.packet_number.unwrap() - missing);
            } else if let EventData::InternalWarning { description, .. } = event.data {
                let count: u64 = description.unwrap().split(' ').next().unwrap().parse().unwrap();
                missing += count;
            } else {
                panic!("{event:?}");
            }
        }
        (found, missing)
    };
    let (found, missing) = numbers(&first);
    assert!(found.iter().copied().eq(0..found.len() as u64), "what is missing is missing where it is said");
    assert_eq!((found.len() as u64 + missing, missing), (sent, feed.lost()));
    assert!(found.len() > 19_000, "{}", found.len());
    assert_eq!(numbers(&second).1, 0);
}

/// The captures of an agent without workers, and its configuration.
fn captures(clock: &ManualClock, access: &str) -> (Captures, Config) {
    let key = |_: u8| Identity::generate().unwrap().public_key().to_string();
    let peers: String =
        (1..=6).map(|n| format!("[[peer]]\nname = \"p{n}\"\npublic_key = \"{}\"\n", key(n))).collect();
    let toml = format!(
        "identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:4433\"]\n[access]\nknock = \"{access}\"\n{peers}\
         [[peer]]\nname = \"dialled\"\npublic_key = \"{}\"\nendpoints = [\"a:1\"]\n",
        key(7)
    );
    let config = Config::parse(&toml, Path::new("")).unwrap();
    let hub = Hub::new(1, config.peers.len(), clock.now());
    let registry = PeerRegistry::new(&config, PublicKey([9; 32]));
    (Captures::new(registry, hub, Arc::new(clock.clone())), config)
}

fn control(peer: &str) -> Order {
    Order { peer: peer.to_owned(), subject: Subject::Control, seconds: 20, reconnect: false }
}

#[test]
fn what_cannot_be_captured_is_refused_with_a_remedy() {
    let clock = ManualClock::default();
    let (captures, config) = captures(&clock, "off");
    let order = control("dialled");
    let lane = |index| Order { subject: Subject::Lane(index), ..order.clone() };
    let refused = [
        (control("nobody"), Refusal::UnknownPeer("nobody".to_owned())),
        (control("p1"), Refusal::Untold("p1".to_owned())),
        (lane(0), Refusal::NotConnected("dialled".to_owned())),
        (lane(64), Refusal::NoSuchLane(64)),
        (Order { reconnect: true, ..order.clone() }, Refusal::NothingToEnd("dialled".to_owned())),
        (Order { seconds: 0, ..order.clone() }, Refusal::Time),
        (Order { seconds: 601, ..order.clone() }, Refusal::Time),
    ];
    for (order, refusal) in refused {
        assert!(refusal.to_string().contains("(remedy: "), "{refusal}");
        assert_eq!(captures.start(&order, &config), Err(refusal));
    }
    assert_eq!(captures.start(&order, &config), Ok(1));
    assert_eq!(captures.take(7), Err(Refusal::Unknown(7)));
}

#[test]
fn captures_are_few_and_end_when_nobody_asks_or_their_time_is_over() {
    let clock = ManualClock::default();
    let (captures, config) = captures(&clock, "required");
    for n in 1..=4 {
        assert_eq!(captures.start(&control(&format!("p{n}")), &config), Ok(n));
    }
    assert_eq!(captures.start(&control("p1"), &config), Err(Refusal::Taken));
    assert_eq!(captures.start(&control("p5"), &config), Err(Refusal::TooMany));
    let first = captures.take(1).unwrap();
    assert_eq!((first.done, first.begun, parsed(&first.text).1.len()), (false, 0, 0));
    assert_eq!(captures.take(1).unwrap().text, "", "the header comes once");

    // The second's client is there, those of the others are gone.
    clock.advance(Duration::from_secs(9));
    captures.take(2).unwrap();
    clock.advance(Duration::from_secs(2));
    assert_eq!(captures.start(&control("p5"), &config), Ok(5));
    assert_eq!(captures.take(1), Err(Refusal::Unknown(1)));
    captures.take(2).unwrap();
    clock.advance(Duration::from_secs(8));
    assert!(!captures.take(2).unwrap().done);
    clock.advance(Duration::from_secs(1));
    assert!(captures.take(2).unwrap().done, "20 s are over");
    assert_eq!(captures.take(2), Err(Refusal::Unknown(2)));
    assert_eq!((captures.stop(5), captures.stop(5)), (Ok(()), Err(Refusal::Unknown(5))));
}

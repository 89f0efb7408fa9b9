//! Records become qlog events.

use ::qlog::events::{
    Event, EventData, EventImportance, ExData, JsonEvent, RawInfo,
    connectivity::{ConnectionStarted, ConnectionState, ConnectionStateUpdated, MtuUpdated},
    quic::{
        AckedRanges, MetricsUpdated, PacketHeader, PacketLost, PacketLostTrigger, PacketReceived, PacketSent,
        PacketSentTrigger, PacketType, QuicFrame,
    },
    security::{KeyType, KeyUpdateOrRetiredTrigger, KeyUpdated},
};
use engine::capture::{Began, Entry, Note, Phase};
use quic_core::{
    HEADER_LEN, TAG_LEN,
    record::{self, LossRule, Purpose, SeenFrame},
};
use serde_json::json;

use crate::qlog::text;

/// Appends the event that the first of `entries` begins; returns how many of them it took.
pub(super) fn write(out: &mut String, entries: &[Entry], dialled: Option<bool>) -> usize {
    let Some(first) = entries.first() else { return 0 };
    let (micros, data, more) = match first {
        Entry::Lost(micros, count) => {
            let description =
                format!("{count} events are missing here: they came faster than they were taken");
            let data = EventData::InternalWarning { code: None, description: Some(description) };
            (*micros, data, ExData::new())
        }
        Entry::Note(micros, note) => {
            let (data, more) = of_note(note);
            (*micros, data, more)
        }
        Entry::Lane(record) => {
            let seen = entries[1..].iter().map_while(|entry| match entry {
                Entry::Lane(record) => frame(record),
                Entry::Note(..) | Entry::Lost(..) => None,
            });
            let seen: Vec<SeenFrame> = seen.collect();
            match of_record(record, &seen, dialled) {
                Some((data, more)) => emit(out, record.micros, data, more),
                None => write_spuriously_lost(out, record),
            }
            return 1 + seen.len();
        }
    };
    emit(out, micros, data, more);
    1
}

fn emit(out: &mut String, micros: u32, data: EventData, more: ExData) {
    text::write(out, &Event::with_time_ex(millis(micros), data, more));
}

/// Packets that were declared lost and acknowledged later: qlog has no name for them.
fn write_spuriously_lost(out: &mut String, record: &record::Record) {
    if let record::Event::SpuriouslyLost { number } = record.event {
        let event = JsonEvent {
            time: millis(record.micros),
            importance: EventImportance::Base,
            name: "culvert:packet_spuriously_lost".to_owned(),
            data: json!({ "header": { "packet_type": "1RTT", "packet_number": number } }),
        };
        text::write(out, &event);
    }
}

fn frame(record: &record::Record) -> Option<SeenFrame> {
    if let record::Event::Frame(frame) = record.event { Some(frame) } else { None }
}

/// The event of a record and what else is to be said of it; `None` for a packet that came late.
fn of_record(
    record: &record::Record,
    seen: &[SeenFrame],
    dialled: Option<bool>,
) -> Option<(EventData, ExData)> {
    let mut more = ExData::new();
    let data = match record.event {
        record::Event::Sent { number, bytes, purpose } => {
            let trigger = match purpose {
                Purpose::Frames => None,
                Purpose::Probe => Some(PacketSentTrigger::PtoProbe),
                Purpose::MtuProbe => {
                    more.insert("mtu_probe".to_owned(), true.into());
                    None
                }
            };
            let frames = Some(frames(seen).into_iter().collect());
            let (header, raw) = (header(number), Some(raw(bytes)));
            EventData::PacketSent(PacketSent { header, raw, trigger, frames, ..PacketSent::default() })
        }
        record::Event::Received { number, bytes, ecn } => {
            if let Some(mark) =
                ["", "ECT(1)", "ECT(0)", "CE"].get(usize::from(ecn)).filter(|mark| !mark.is_empty())
            {
                more.insert("ecn".to_owned(), (*mark).into());
            }
            let (header, raw, frames) = (header(number), Some(raw(bytes)), Some(frames(seen)));
            EventData::PacketReceived(PacketReceived { header, raw, frames, ..PacketReceived::default() })
        }
        // A frame without its packet is never put into a feed.
        record::Event::Frame(_) | record::Event::SpuriouslyLost { .. } => return None,
        record::Event::Lost { number, bytes, rule, mtu_probe } => {
            if mtu_probe {
                more.insert("mtu_probe".to_owned(), true.into());
            }
            let trigger = Some(match rule {
                LossRule::Count => PacketLostTrigger::ReorderingThreshold,
                LossRule::Time => PacketLostTrigger::TimeThreshold,
            });
            let header = PacketHeader { length: Some(bytes), ..header(number) };
            EventData::PacketLost(PacketLost { header: Some(header), frames: None, trigger })
        }
        record::Event::Metrics(metrics) => {
            let pto = metrics.pto().as_secs_f64() * 1000.0;
            more.insert("pto".to_owned(), pto.into());
            EventData::MetricsUpdated(of_metrics(&metrics))
        }
        record::Event::KeyUpdate { generation, followed } => {
            let trigger = if followed {
                KeyUpdateOrRetiredTrigger::RemoteUpdate
            } else {
                KeyUpdateOrRetiredTrigger::LocalUpdate
            };
            let key_type = match dialled {
                Some(true) => KeyType::Client1RttSecret,
                Some(false) => KeyType::Server1RttSecret,
                None => KeyType::Unknown,
            };
            // The key itself is nobody's business.
            let (new, old) = (String::new(), None);
            let (generation, trigger) = (Some(generation), Some(trigger));
            EventData::KeyUpdated(KeyUpdated { key_type, old, new, generation, trigger })
        }
        record::Event::Mtu { old, new } => {
            EventData::MtuUpdated(MtuUpdated { old: Some(old), new, done: None })
        }
    };
    Some((data, more))
}

fn of_metrics(metrics: &record::Metrics) -> MetricsUpdated {
    MetricsUpdated {
        min_rtt: metrics.min_rtt.map(millis),
        smoothed_rtt: Some(millis(metrics.smoothed_rtt)),
        latest_rtt: metrics.min_rtt.map(|_| millis(metrics.latest_rtt)),
        rtt_variance: Some(millis(metrics.rtt_variation)),
        pto_count: Some(metrics.probes.into()),
        bytes_in_flight: Some(metrics.bytes_in_flight.into()),
        packets_in_flight: Some(metrics.packets_in_flight.into()),
        ..MetricsUpdated::default()
    }
}

fn of_note(note: &Note) -> (EventData, ExData) {
    let mut more = ExData::new();
    let data = match note {
        Note::Began(began) => {
            let Began { local, remote, local_cid, epoch } = **began;
            more.insert("epoch".to_owned(), epoch.into());
            EventData::ConnectionStarted(ConnectionStarted {
                ip_version: Some(if local.is_ipv4() { "v4" } else { "v6" }.to_owned()),
                src_ip: local.ip().to_string(),
                dst_ip: remote.map(|remote| remote.ip().to_string()).unwrap_or_default(),
                protocol: Some("QUIC".to_owned()),
                src_port: Some(local.port()),
                dst_port: remote.map(|remote| remote.port()),
                src_cid: Some(data_encoding::HEXLOWER.encode(&local_cid.0)),
                dst_cid: None,
            })
        }
        Note::Phase(phase) => {
            let new = match phase {
                Phase::Validating => ConnectionState::Attempted,
                Phase::Up => ConnectionState::PeerValidated,
                Phase::Draining => ConnectionState::Draining,
                Phase::Ended => ConnectionState::Closed,
            };
            EventData::ConnectionStateUpdated(ConnectionStateUpdated { old: None, new })
        }
    };
    (data, more)
}

fn header(number: u64) -> PacketHeader {
    PacketHeader { packet_type: PacketType::OneRtt, packet_number: Some(number), ..PacketHeader::default() }
}

fn raw(bytes: u16) -> RawInfo {
    let payload = usize::from(bytes).saturating_sub(HEADER_LEN + TAG_LEN);
    RawInfo { length: Some(bytes.into()), payload_length: Some(payload as u64), data: None }
}

fn frames(seen: &[SeenFrame]) -> Vec<QuicFrame> {
    let mut frames: Vec<QuicFrame> = Vec::with_capacity(seen.len());
    for frame in seen {
        frames.push(match *frame {
            SeenFrame::AckRange { first, last } => {
                if let Some(QuicFrame::Ack { acked_ranges: Some(AckedRanges::Double(ranges)), .. }) =
                    frames.last_mut()
                {
                    ranges.push((first, last));
                }
                continue;
            }
            SeenFrame::Ack { delay_micros } => QuicFrame::Ack {
                ack_delay: Some(millis(delay_micros)),
                acked_ranges: Some(AckedRanges::Double(Vec::new())),
                ect1: None,
                ect0: None,
                ce: None,
                length: None,
                payload_length: None,
            },
            SeenFrame::Padding { bytes } => {
                QuicFrame::Padding { length: Some(bytes.into()), payload_length: bytes.into() }
            }
            SeenFrame::Ping => QuicFrame::Ping { length: Some(1), payload_length: None },
            SeenFrame::PathChallenge => QuicFrame::PathChallenge { data: None },
            SeenFrame::PathResponse => QuicFrame::PathResponse { data: None },
            SeenFrame::Datagram { bytes } => QuicFrame::Datagram { length: bytes.into(), raw: None },
        });
    }
    frames
}

/// The crate's times are milliseconds in 32 bits of floating point.
fn millis(micros: u32) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the format that the crate has")]
    let millis = (f64::from(micros) / 1000.0) as f32;
    millis
}

//! A record as a line of JSON. `docs/operations.md` lists its members.

use std::{
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use dataplane::records::{Ended, RecordKind};
use serde::Serialize;

#[derive(Serialize)]
struct Line<'a> {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<u8>,
    start: String,
    end: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    peer: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    user: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    service: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    target: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    opened_by: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<String>,
    uplink_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    uplink_packets: Option<u64>,
    downlink_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    downlink_packets: Option<u64>,
    reason: &'static str,
}

/// Appends the line of a record, with its end.
pub(super) fn write(ended: &Ended, line: &mut Vec<u8>) {
    let time = |since: Duration| humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + since).to_string();
    let shown = |address: SocketAddr| match (address.ip().to_canonical(), address.port()) {
        (ip, 0) => ip.to_string(),
        (ip, port) => SocketAddr::new(ip, port).to_string(),
    };
    let packets = |packets| (!matches!(ended.kind, RecordKind::Tcp | RecordKind::Connect)).then_some(packets);
    let is_of_a_user = ended.kind.is_of_a_user();
    let line_of = Line {
        kind: ended.kind.label(),
        protocol: (ended.kind == RecordKind::Ip).then_some(ended.protocol),
        start: time(ended.span.began),
        end: time(ended.span.ended),
        peer: if is_of_a_user { "" } else { &ended.peer },
        user: if is_of_a_user { &ended.peer } else { "" },
        service: if is_of_a_user { "" } else { &ended.service },
        target: if is_of_a_user { &ended.service } else { "" },
        opened_by: (!is_of_a_user).then_some(if ended.opened_here { "here" } else { "peer" }),
        source: ended.source.map(shown),
        destination: ended.destination.map(shown),
        uplink_bytes: ended.uplink.bytes,
        uplink_packets: packets(ended.uplink.packets),
        downlink_bytes: ended.downlink.bytes,
        downlink_packets: packets(ended.downlink.packets),
        reason: ended.reason,
    };
    // Texts and numbers become JSON whatever they are, and a buffer in memory takes them.
    let _written = serde_json::to_writer(&mut *line, &line_of).is_ok();
    line.push(b'\n');
}

#[cfg(test)]
mod tests {
    use dataplane::records::{Carried, Span};

    use super::*;

    #[test]
    fn a_line_says_who_when_how_much_and_why() {
        let mut ended = Ended {
            kind: RecordKind::Udp,
            protocol: 17,
            peer: "exit \"b\"".into(),
            service: "dns".into(),
            opened_here: true,
            source: Some("[::ffff:192.0.2.9]:1000".parse().expect("an address")),
            destination: Some("192.0.2.1:53".parse().expect("an address")),
            span: Span {
                began: Duration::from_millis(1_780_000_000_250),
                ended: Duration::from_millis(1_780_000_005_000),
            },
            uplink: Carried { packets: 2, bytes: 1_200 },
            downlink: Carried { packets: 1, bytes: 80 },
            reason: "idle",
        };
        let mut line = Vec::new();
        write(&ended, &mut line);
        let expected = "{\"kind\":\"udp\",\"start\":\"2026-05-28T20:26:40.250Z\",\"end\":\"2026-05-28T20:26:45.000Z\",\
                        \"peer\":\"exit \\\"b\\\"\",\"service\":\"dns\",\"opened_by\":\"here\",\
                        \"source\":\"192.0.2.9:1000\",\"destination\":\"192.0.2.1:53\",\
                        \"uplink_bytes\":1200,\"uplink_packets\":2,\"downlink_bytes\":80,\"downlink_packets\":1,\
                        \"reason\":\"idle\"}\n";
        assert_eq!(str::from_utf8(&line), Ok(expected));
        ended = Ended {
            kind: RecordKind::Tcp,
            service: "".into(),
            opened_here: false,
            source: None,
            destination: None,
            ..ended
        };
        line.clear();
        write(&ended, &mut line);
        let read: serde_json::Value = serde_json::from_slice(&line).expect("JSON");
        let members: Vec<_> = read.as_object().expect("an object").keys().map(String::as_str).collect();
        let mut expected =
            ["kind", "start", "end", "peer", "opened_by", "uplink_bytes", "downlink_bytes", "reason"];
        expected.sort_unstable();
        let mut members = members;
        members.sort_unstable();
        assert_eq!(members, expected);
    }

    #[test]
    fn whatever_a_user_asks_for_is_one_line_under_the_users_name() {
        for target in ["example.com:443", "\"}\n{\"kind\":\"udp\"", "\u{7f}\u{1b}[31m\u{2028}"] {
            let at = Duration::from_secs(1_780_000_000);
            let ended = Ended {
                kind: RecordKind::ConnectUdp,
                protocol: 17,
                peer: "anna".into(),
                service: target.into(),
                opened_here: false,
                source: Some("192.0.2.9:1000".parse().expect("an address")),
                destination: Some("192.0.2.1:443".parse().expect("an address")),
                span: Span { began: at, ended: at },
                uplink: Carried { packets: 2, bytes: 1_200 },
                downlink: Carried { packets: 1, bytes: 80 },
                reason: "revoked",
            };
            let mut line = Vec::new();
            write(&ended, &mut line);
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            let read: serde_json::Value = serde_json::from_slice(&line).expect("JSON");
            assert_eq!([&read["kind"], &read["user"], &read["target"]], ["connect_udp", "anna", target]);
            assert!([&read["peer"], &read["service"], &read["opened_by"]].iter().all(|it| it.is_null()));
            assert_eq!(read["uplink_packets"], 2);
        }
    }
}

//! The file: JSON text sequences (RFC 7464), each record a line after a record separator.

use std::time::Duration;

use ::qlog::{CommonFields, Configuration, QLOG_VERSION, QlogSeq, TraceSeq, VantagePoint, VantagePointType};
use engine::capture::Subject;
use serde::Serialize;

/// What precedes each record (RFC 7464 §2.2).
const SEPARATOR: char = '\u{1e}';

/// The first record of a capture's file: whether this end `dialled` may be unknown, and `unix_time` is when it began.
pub(super) fn header(peer: &str, subject: Subject, dialled: Option<bool>, unix_time: Duration) -> String {
    let (title, group) = match subject {
        Subject::Lane(index) => (format!("lane {index} of {peer}"), Some(format!("{peer}-lane{index}"))),
        // Each of its events names its connection.
        Subject::Control => (format!("control connections of {peer}"), None),
    };
    let ty = match dialled {
        Some(true) => VantagePointType::Client,
        Some(false) => VantagePointType::Server,
        None => VantagePointType::Unknown,
    };
    let description = concat!("culvert ", env!("CARGO_PKG_VERSION")).to_owned();
    let vantage = VantagePoint { name: Some(format!("this end of {peer}")), ty, flow: None };
    let fields = CommonFields {
        group_id: group,
        protocol_type: Some(vec!["QUIC".to_owned()]),
        reference_time: Some(unix_time.as_secs_f64() * 1000.0),
        time_format: Some("relative".to_owned()),
    };
    let trace = TraceSeq::new(
        vantage,
        Some(title.clone()),
        Some(description.clone()),
        Some(Configuration::default()),
        Some(fields),
    );
    let header = QlogSeq {
        qlog_version: QLOG_VERSION.to_owned(),
        qlog_format: "JSON-SEQ".to_owned(),
        title: Some(title),
        description: Some(description),
        summary: None,
        trace,
    };
    let mut text = String::new();
    write(&mut text, &header);
    text
}

pub(super) fn write(text: &mut String, record: &impl Serialize) {
    // Texts, numbers and lists of them: nothing here can fail to be JSON.
    let json = serde_json::to_string(record).unwrap_or_default();
    text.push(SEPARATOR);
    text.push_str(&json);
    text.push('\n');
}

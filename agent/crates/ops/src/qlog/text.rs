//! The file: JSON text sequences (RFC 7464), each record a line after a record separator.

use std::time::Duration;

use ::qlog::{CommonFields, Configuration, QLOG_VERSION, QlogSeq, TraceSeq, VantagePoint, VantagePointType};
use engine::capture::Subject;
use serde::Serialize;

/// What precedes each record (RFC 7464 §2.2).
const SEPARATOR: char = '\u{1e}';

/// The description of what a capture's file is about.
pub(super) struct About<'a> {
    pub(super) peer: &'a str,
    pub(super) subject: Subject,
    /// Whether this end dialled; `None` if that is not known.
    pub(super) dialled: Option<bool>,
    /// When the capture began, since 1970.
    pub(super) unix_time: Duration,
}

/// The first record of a capture's file.
pub(super) fn header(about: &About<'_>) -> String {
    let (title, group) = match about.subject {
        Subject::Lane(index) => {
            (format!("lane {index} of {}", about.peer), Some(format!("{}-lane{index}", about.peer)))
        }
        // Each of its events names its connection.
        Subject::Control => (format!("control connections of {}", about.peer), None),
    };
    let ty = match about.dialled {
        Some(true) => VantagePointType::Client,
        Some(false) => VantagePointType::Server,
        None => VantagePointType::Unknown,
    };
    let description = concat!("culvert ", env!("CARGO_PKG_VERSION")).to_owned();
    let vantage = VantagePoint { name: Some(format!("this end of {}", about.peer)), ty, flow: None };
    let fields = CommonFields {
        group_id: group,
        protocol_type: Some(vec!["QUIC".to_owned()]),
        reference_time: Some(about.unix_time.as_secs_f64() * 1000.0),
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

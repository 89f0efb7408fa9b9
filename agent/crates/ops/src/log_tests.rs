//! What is written for an event, at each stderr and level; the brake.

use std::{
    panic,
    sync::{Arc, Mutex, PoisonError},
};

use base::panics;
use serde_json::Value;

use super::*;

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns what is logged while `work` runs.
fn logged(log: Log, stderr: Stderr, work: impl FnOnce(&Handle<Targets, Registry>)) -> String {
    let written = Written::default();
    let writer = written.clone();
    let (subscriber, filter) = subscriber(log, stderr, move || writer.clone());
    tracing::subscriber::with_default(subscriber, || work(&filter));
    let written = written.0.lock().unwrap().clone();
    String::from_utf8(written).unwrap()
}

fn log(format: LogFormat) -> Log {
    Log { level: LogLevel::Info, format }
}

/// What a sender might have us write: a forged line, and a sequence that clears the terminal.
const FORGED: &str = "gone\n<0>ERROR all is lost\r\u{1b}[2J\u{9b}2J\tx";

#[test]
fn an_event_is_one_line_whatever_its_values_are() {
    for stderr in [Stderr::Terminal, Stderr::File, Stderr::Journal] {
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = logged(log(format), stderr, |_| {
                tracing::warn!(reason = %FORGED, quoted = FORGED, "connection lost: {FORGED}");
                tracing::info!("next");
            });
            let context = format!("{stderr:?} {format:?}: {text:?}");
            assert_eq!(text.matches('\n').count(), 2, "{context}");
            assert!(text.ends_with('\n'), "{context}");
            let colours = stderr == Stderr::Terminal && format == LogFormat::Text;
            let text = if colours {
                let (warning, next) =
                    text.strip_prefix("\u{1b}[33m").unwrap().split_once("\u{1b}[0m\n").unwrap();
                format!("{warning}\n{next}")
            } else {
                text
            };
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{context}");
            assert!(text.contains("\\n<0>ERROR all is lost"), "{context}");
        }
    }
}

#[test]
fn the_journal_is_told_the_priority_and_not_the_time() {
    let log = Log { level: LogLevel::Trace, format: LogFormat::Text };
    let text = logged(log, Stderr::Journal, |_| {
        tracing::error!("a");
        tracing::warn!("b");
        tracing::info!(peer = "exit", "c");
        tracing::debug!("d");
        tracing::trace!("e");
    });
    let target = module_path!();
    let expected = [
        format!("<3>ERROR {target}: a"),
        format!("<4> WARN {target}: b"),
        format!("<6> INFO {target}: c peer=\"exit\""),
        format!("<7>DEBUG {target}: d"),
        format!("<7>TRACE {target}: e"),
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn json_has_time_level_target_message_and_fields_and_in_the_journal_the_priority_too() {
    for stderr in [Stderr::File, Stderr::Journal] {
        let text = logged(log(LogFormat::Json), stderr, |_| {
            tracing::warn!(peer = "exit", suppressed = 7_u64, reason = %FORGED, "connection lost");
        });
        let prefix = if stderr == Stderr::Journal { "<4>" } else { "" };
        let event: Value = serde_json::from_str(text.trim_end().strip_prefix(prefix).unwrap()).unwrap();
        assert_eq!(event["level"], "WARN");
        assert_eq!(event["target"], module_path!());
        assert_eq!(event["message"], "connection lost");
        assert_eq!(event["peer"], "exit");
        assert_eq!(event["suppressed"], 7);
        assert_eq!(event["reason"], FORGED);
        let time = event["timestamp"].as_str().unwrap();
        humantime::parse_rfc3339(time).unwrap();
        assert_eq!(event.as_object().unwrap().len(), 7, "{event}");
    }
}

#[test]
fn a_file_is_told_the_time() {
    let text = logged(log(LogFormat::Text), Stderr::File, |_| tracing::info!("x"));
    let (time, rest) = text.split_once("  INFO ").unwrap();
    humantime::parse_rfc3339(time).unwrap();
    assert_eq!(rest, format!("{}: x\n", module_path!()));
}

#[test]
fn the_level_changes_at_run_time_and_what_is_off_stays_cheap() {
    let text = logged(log(LogFormat::Text), Stderr::Journal, |filter| {
        let set = |level| filter.reload(targets(level)).unwrap();
        let say = |what: &str| {
            tracing::warn!("warn {what}");
            tracing::debug!("debug {what}");
        };
        say("1");
        set(LogLevel::Debug);
        say("2");
        set(LogLevel::Error);
        say("3");
    });
    let said: Vec<&str> = text.lines().map(|line| line.rsplit(": ").next().unwrap()).collect();
    assert_eq!(said, ["warn 1", "warn 2", "debug 2"]);
    // What makes a disabled event one comparison: the subscriber says what the most is that it takes.
    for (level, most) in [
        (LogLevel::Error, LevelFilter::ERROR),
        (LogLevel::Warn, LevelFilter::WARN),
        (LogLevel::Info, LevelFilter::INFO),
        (LogLevel::Debug, LevelFilter::DEBUG),
        (LogLevel::Trace, LevelFilter::TRACE),
    ] {
        let (subscriber, filter) = subscriber(log(LogFormat::Text), Stderr::File, io::sink);
        assert_eq!(subscriber.max_level_hint(), Some(LevelFilter::INFO));
        filter.reload(targets(level)).unwrap();
        assert_eq!(subscriber.max_level_hint(), Some(most));
    }
}

#[test]
fn a_panic_is_one_event() {
    let text = logged(log(LogFormat::Text), Stderr::Journal, |_| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(|info| panics::log(info, Some("admin"), "it goes on")));
        let caught = panic::catch_unwind(|| panic!("on\npurpose"));
        panic::set_hook(before);
        assert!(caught.is_err());
    });
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("<3>ERROR culvert_base::panics: panic: on\\npurpose "), "{text}");
    assert!(text.contains("location=agent/crates/ops/src/log_tests.rs:"), "{text}");
}

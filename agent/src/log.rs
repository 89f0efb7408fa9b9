//! Logging: one subscriber for the process, to standard error, and a brake for warnings that repeat.
//!
//! | where standard error goes | `format = "text"` | `format = "json"` |
//! |---|---|---|
//! | a terminal | time, level, target, message, fields, in colours | one JSON object per line |
//! | a file, a pipe | the same without colours | the same |
//! | systemd's journal | without the time, which the journal has; `<3>` … `<7>` before it, the priority | the same, `<3>` … `<7>` before it |
//!
//! An event is one line in each of them: what a peer or a file had to say cannot begin another.

use std::{
    env, fmt,
    io::{self, IsTerminal},
    sync::OnceLock,
    time::{Duration, Instant},
};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    fmt::{
        FmtContext, FormatEvent, FormatFields, MakeWriter,
        format::{self, Writer},
    },
    layer::SubscriberExt,
    registry::LookupSpan,
    reload::{self, Handle},
    util::SubscriberInitExt,
};

use crate::{
    config::{Log, LogFormat, LogLevel},
    io::process,
};

/// The process has a subscriber already.
#[derive(Debug, thiserror::Error)]
#[error("logging was set up before")]
pub struct AlreadySet;

/// The filter of the process's subscriber.
static FILTER: OnceLock<Handle<EnvFilter, Registry>> = OnceLock::new();

/// Sends the process's logs to standard error as `log` says.
///
/// # Errors
/// [`AlreadySet`] the second time.
pub fn init(log: Log) -> Result<(), AlreadySet> {
    let to_journal = env::var("JOURNAL_STREAM").is_ok_and(|announced| process::logs_to_journal(&announced));
    let place = match to_journal {
        true => Place::Journal,
        false if io::stderr().is_terminal() => Place::Terminal,
        false => Place::File,
    };
    let (subscriber, filter) = subscriber(log, place, io::stderr);
    subscriber.try_init().map_err(|_| AlreadySet)?;
    FILTER.set(filter).map_err(|_| AlreadySet)
}

/// Has the process log at `level` from now on. Without effect before [`init`].
///
/// What is not logged costs as little as before: callsites cache the answer of the filter, and are asked again here.
pub fn set_level(level: LogLevel) {
    if let Some(Err(error)) = FILTER.get().map(|filter| filter.reload(EnvFilter::new(directives(level)))) {
        tracing::error!(%error, "the log level stays as it was");
    }
}

/// What standard error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Terminal,
    File,
    Journal,
}

fn subscriber<W>(
    log: Log,
    place: Place,
    writer: W,
) -> (impl Subscriber + Send + Sync + 'static, Handle<EnvFilter, Registry>)
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(EnvFilter::new(directives(log.level)));
    let (journal, ansi) = (place == Place::Journal, place == Place::Terminal);
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(ansi)
        // It would be told on standard error, which just failed, and ends the process.
        .log_internal_errors(false);
    let text = format::Format::default().with_ansi(ansi);
    let layer = match (log.format, journal) {
        (LogFormat::Text, false) => layer.event_format(Line { inner: text, journal, ansi }).boxed(),
        (LogFormat::Text, true) => {
            layer.event_format(Line { inner: text.without_time(), journal, ansi }).boxed()
        }
        (LogFormat::Json, _) => {
            let inner = text.json().flatten_event(true);
            let layer = layer.fmt_fields(format::JsonFields::new());
            layer.event_format(Line { inner, journal, ansi: false }).boxed()
        }
    };
    (tracing_subscriber::registry().with(filter).with(layer), handle)
}

/// Makes one line of each event that `inner` formats.
struct Line<F> {
    inner: F,
    /// With the priority in front, as `sd-daemon(3)` describes it.
    journal: bool,
    ansi: bool,
}

impl<S, N, F> FormatEvent<S, N> for Line<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if self.journal {
            write!(writer, "<{}>", priority(*event.metadata().level()))?;
        }
        let mut line = OneLine { writer: &mut writer, ended: false, ansi: self.ansi };
        self.inner.format_event(context, Writer::new(&mut line), event)?;
        writer.write_char('\n')
    }
}

/// The priority of `syslog(3)`; 5, a notice, is none of our levels.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Writes control characters as `\n`, `\t` or `\u{1}`, and leaves the last line feed away.
struct OneLine<'w, 'l> {
    writer: &'w mut Writer<'l>,
    /// A line feed came that is not the last one if anything follows.
    ended: bool,
    /// Escape sequences are the formatter's: it has replaced those of values.
    ansi: bool,
}

impl fmt::Write for OneLine<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for piece in text.split_inclusive(|c: char| c.is_control()) {
            if std::mem::take(&mut self.ended) {
                self.writer.write_str("\\n")?;
            }
            let control = piece.chars().next_back().filter(|c| c.is_control());
            let plain = &piece[..piece.len() - control.map_or(0, char::len_utf8)];
            self.writer.write_str(plain)?;
            match control {
                Some('\n') => self.ended = true,
                Some('\x1b') if self.ansi => self.writer.write_char('\x1b')?,
                Some(other) => write!(self.writer, "{}", other.escape_default())?,
                None => {}
            }
        }
        Ok(())
    }
}

/// Libraries below us log per packet already at debug: they get no more than their warnings unless all is wanted.
fn directives(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Error => "error",
        // quinn-proto warns for each packet that is not what it should be, whoever sent it.
        LogLevel::Warn => "warn,quinn_proto=error",
        LogLevel::Info => "warn,quinn_proto=error,culvert=info,quic_core=info",
        LogLevel::Debug => "warn,quinn_proto=error,culvert=debug,quic_core=debug",
        LogLevel::Trace => "trace",
    }
}

/// Lets one message through per interval and counts the others.
#[derive(Debug)]
pub struct RateLimit {
    interval: Duration,
    last: Option<Instant>,
    suppressed: u64,
}

impl RateLimit {
    /// At most one message per `interval`; the first one passes.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: None, suppressed: 0 }
    }

    /// Whether to log now: how many messages were held back since the last one, or `None` to hold this one back.
    pub fn allow(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < self.interval) {
            self.suppressed += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_per_interval_and_the_rest_is_counted() {
        #[expect(clippy::disallowed_methods, reason = "any instant will do: only differences count")]
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut limit = RateLimit::new(Duration::from_secs(1));
        assert_eq!(limit.allow(at(0)), Some(0));
        assert_eq!(limit.allow(at(1)), None);
        assert_eq!(limit.allow(at(999)), None);
        assert_eq!(limit.allow(at(1000)), Some(2));
        assert_eq!(limit.allow(at(500)), None, "a clock that seems to go back holds back");
        assert_eq!(limit.allow(at(5000)), Some(1));
    }

    #[test]
    fn every_level_is_a_filter_that_lets_our_own_level_through() {
        let levels = [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace];
        for (level, name) in levels.into_iter().zip(["error", "warn", "info", "debug", "trace"]) {
            let filter = EnvFilter::builder().parse(directives(level)).unwrap();
            assert_eq!(filter.max_level_hint().unwrap().to_string(), name);
        }
    }
}

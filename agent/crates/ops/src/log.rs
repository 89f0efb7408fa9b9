//! Logging: one subscriber for the process, to standard error, and a brake for warnings that repeat.
//!
//! | where standard error goes | `format = "text"` | `format = "json"` |
//! |---|---|---|
//! | a terminal | time, level, target, message, fields; the colour is the level's | one JSON object per line |
//! | a file, a pipe | the same without a colour | the same |
//! | systemd's journal | without the time, which the journal has; `<3>` … `<7>` before it, the priority | the same, `<3>` … `<7>` before it |
//!
//! An event is one line in each of them: what a peer or a file had to say cannot begin another, nor steer the terminal.

use std::{
    env, fmt,
    io::{self, IsTerminal},
    sync::OnceLock,
};

use config::{Log, LogFormat, LogLevel};
use net::process;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    Layer, Registry,
    filter::{LevelFilter, Targets},
    fmt::{
        FmtContext, FormatEvent, FormatFields, MakeWriter,
        format::{self, Writer},
    },
    layer::SubscriberExt,
    registry::LookupSpan,
    reload::{self, Handle},
    util::SubscriberInitExt,
};

/// The process has a subscriber already.
#[derive(Debug, thiserror::Error)]
#[error("logging was set up before")]
pub struct AlreadySet;

/// The filter of the process's subscriber.
static FILTER: OnceLock<Handle<Targets, Registry>> = OnceLock::new();

/// Sends the process's logs to standard error as `log` says.
///
/// # Errors
/// [`AlreadySet`] the second time.
pub fn init(log: Log) -> Result<(), AlreadySet> {
    let to_journal = env::var("JOURNAL_STREAM").is_ok_and(|announced| process::logs_to_journal(&announced));
    let stderr = match to_journal {
        true => Stderr::Journal,
        false if io::stderr().is_terminal() => Stderr::Terminal,
        false => Stderr::File,
    };
    let (subscriber, filter) = subscriber(log, stderr, io::stderr);
    subscriber.try_init().map_err(|_| AlreadySet)?;
    FILTER.set(filter).map_err(|_| AlreadySet)
}

/// Has the process log at `level` from now on. Without effect before [`init`].
///
/// What is not logged costs as little as before: callsites cache the answer of the filter, and are asked again here.
pub fn set_level(level: LogLevel) {
    if let Some(Err(error)) = FILTER.get().map(|filter| filter.reload(targets(level))) {
        tracing::error!(%error, "the log level stays as it was (remedy: restart the daemon)");
    }
}

/// What standard error is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stderr {
    Terminal,
    File,
    Journal,
}

fn subscriber<W>(
    log: Log,
    stderr: Stderr,
    writer: W,
) -> (impl Subscriber + Send + Sync + 'static, Handle<Targets, Registry>)
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(targets(log.level));
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        // The formatter's colours would let escape sequences of values through.
        .with_ansi(false)
        // It would be told on standard error, which just failed, and ends the process.
        .log_internal_errors(false);
    let text = format::Format::default().with_ansi(false);
    let layer = match (log.format, stderr) {
        (LogFormat::Text, Stderr::Terminal | Stderr::File) => {
            layer.event_format(Line { inner: text, stderr, json: false }).boxed()
        }
        (LogFormat::Text, Stderr::Journal) => {
            layer.event_format(Line { inner: text.without_time(), stderr, json: false }).boxed()
        }
        (LogFormat::Json, _) => {
            let inner = text.json().flatten_event(true);
            layer
                .fmt_fields(format::JsonFields::new())
                .event_format(Line { inner, stderr, json: true })
                .boxed()
        }
    };
    (tracing_subscriber::registry().with(filter).with(layer), handle)
}

/// Makes one line of each event that `inner` formats.
struct Line<F> {
    inner: F,
    stderr: Stderr,
    json: bool,
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
        const RESET: &str = "\x1b[0m";
        let level = *event.metadata().level();
        let colour = colour(level).filter(|_| self.stderr == Stderr::Terminal && !self.json);
        if self.stderr == Stderr::Journal {
            // As `sd-daemon(3)` describes it.
            write!(writer, "<{}>", priority(level))?;
        }
        writer.write_str(colour.unwrap_or_default())?;
        let mut line = OneLine { writer: &mut writer, ended: false, json: self.json };
        self.inner.format_event(context, Writer::new(&mut line), event)?;
        writer.write_str(colour.map_or("", |_| RESET))?;
        writer.write_char('\n')
    }
}

/// Returns the escape sequence of a level's colour: red for errors, yellow for warnings, dim below `INFO`.
fn colour(level: Level) -> Option<&'static str> {
    match level {
        Level::ERROR => Some("\x1b[31m"),
        Level::WARN => Some("\x1b[33m"),
        Level::INFO => None,
        Level::DEBUG | Level::TRACE => Some("\x1b[2m"),
    }
}

/// The priority of `syslog(3)`; we have no level for 5, a notice.
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
    /// The formatter has escaped control characters, except for U+007F to U+009F, which JSON lets stand.
    json: bool,
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
                None => {}
                Some('\n') => self.ended = true,
                Some(other) if self.json => write!(self.writer, "\\u{:04x}", u32::from(other))?,
                Some(other) => write!(self.writer, "{}", other.escape_default())?,
            }
        }
        Ok(())
    }
}

/// Libraries below us log per packet already at debug: they get no more than their warnings unless all is wanted.
fn targets(level: LogLevel) -> Targets {
    let (others, ours) = match level {
        LogLevel::Error => return Targets::new().with_default(LevelFilter::ERROR),
        LogLevel::Trace => return Targets::new().with_default(LevelFilter::TRACE),
        LogLevel::Warn => (LevelFilter::WARN, LevelFilter::WARN),
        LogLevel::Info => (LevelFilter::WARN, LevelFilter::INFO),
        LogLevel::Debug => (LevelFilter::WARN, LevelFilter::DEBUG),
    };
    Targets::new()
        .with_default(others)
        // It warns for each packet that is not what it should be, whoever sent it.
        .with_target("quinn_proto", LevelFilter::ERROR)
        // A visitor of the web server decides how often it warns.
        .with_target("h2", LevelFilter::ERROR)
        .with_targets(["culvert", "quic_core"].map(|name| (name, ours)))
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;

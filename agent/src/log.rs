//! Logging: one subscriber for the process, to standard error, and a brake for warnings that repeat.

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use tracing_subscriber::{EnvFilter, util::SubscriberInitExt};

use crate::config::{Log, LogFormat, LogLevel};

/// The process has a subscriber already.
#[derive(Debug, thiserror::Error)]
#[error("logging was set up before")]
pub struct AlreadySet;

/// Sends the process's logs to standard error as `log` says.
///
/// # Errors
/// [`AlreadySet`] the second time.
pub fn init(log: Log) -> Result<(), AlreadySet> {
    let builder = tracing_subscriber::fmt().with_env_filter(EnvFilter::new(directives(log.level)));
    let builder = builder.with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    match log.format {
        LogFormat::Text => builder.finish().try_init(),
        LogFormat::Json => builder.json().flatten_event(true).finish().try_init(),
    }
    .map_err(|_| AlreadySet)
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

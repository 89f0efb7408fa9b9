//! `culvert qlog`

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::anyhow;
use clap::{Args, value_parser};
use engine::capture::{MOST_TIME, Subject};
use ops::{
    control_socket::protocol::{Answer, Request},
    qlog::{Order, Taken},
};
use wire::messages::MAX_LANES;

use super::{
    Failure,
    reach::{Reach, unexpected},
};
use crate::out::{self, Reader};

/// How often the daemon is asked for what it has: a lane of 400,000 packets per second makes as many in that time as may wait.
const INTERVAL: Duration = Duration::from_millis(50);

/// So many times it is asked for a lane that is not there.
const LANE_ATTEMPTS: u32 = 20;

/// Write what happens on a lane, or on the control connection, of a peer to a qlog file, while the daemon runs
#[derive(Debug, Args)]
pub(super) struct Qlog {
    /// The peer's name
    peer: String,
    /// Which lane
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "control",
        value_parser = value_parser!(u8).range(..i64::from(MAX_LANES)))]
    lane: u8,
    /// Not a lane, but control connections, from the first packet of each that begins within the time
    #[arg(long)]
    control: bool,
    /// End the control connection that there is, so that another begins at once; flows survive that, TCP forwards do not
    #[arg(long, requires = "control")]
    reconnect: bool,
    /// For how long, 1s to 10m
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = time)]
    time: Duration,
    /// The new file, - for standard output; without it: PEER-laneN.sqlog or PEER-control.sqlog
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    reach: Reach,
}

impl Qlog {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let mut sink = Sink::new(self.out.clone().unwrap_or_else(|| self.default_out()))?;
        let seconds = self.time.as_secs() + u64::from(self.time.subsec_nanos() > 0);
        let start = Order {
            peer: self.peer.clone(),
            subject: if self.control { Subject::Control } else { Subject::Lane(self.lane) },
            seconds,
            reconnect: self.reconnect,
        };
        let Answer::QlogStarted { id } = self.reach.ask_running(&Request::QlogStart(start))? else {
            return Err(unexpected());
        };
        let taken = self.take(id, &mut sink);
        if !matches!(taken, Ok(Some(_))) {
            // It would end by itself some seconds later; whether this reaches the daemon changes nothing for us.
            let _stopped = self.reach.ask_running(&Request::QlogStop { id }).is_ok();
        }
        taken?.map_or(Ok(()), |last| self.report(&sink, &last))
    }

    fn default_out(&self) -> PathBuf {
        let what = if self.control { "control".to_owned() } else { format!("lane{}", self.lane) };
        // Whatever is given for a name, the file is in this folder.
        PathBuf::from(format!("{}-{what}.sqlog", self.peer.replace('/', "_")))
    }

    /// Takes all that a capture has, until it ends; the last answer, or `None` if nobody reads it any more.
    fn take(&self, id: u64, sink: &mut Sink) -> Result<Option<Taken>, Failure> {
        let mut attempts = 0;
        loop {
            let Answer::Qlog(taken) = self.reach.ask_running(&Request::QlogTake { id })? else {
                return Err(unexpected());
            };
            if sink.put(&taken.text, taken.begun > 0)? == Reader::Gone {
                return Ok(None);
            }
            if taken.done {
                return Ok(Some(taken));
            }
            attempts += 1;
            if !self.control && taken.begun == 0 && attempts >= LANE_ATTEMPTS {
                return Err(self.no_lane());
            }
            if !taken.more {
                thread::sleep(INTERVAL);
            }
        }
    }

    fn no_lane(&self) -> Failure {
        let (peer, lane) = (&self.peer, self.lane);
        Failure::Runtime(anyhow!(
            "{peer:?} has no lane {lane} now (remedy: culvert status says how many are up, counted from 0; a peer in standard mode \
             has none: --control)"
        ))
    }

    fn report(&self, sink: &Sink, last: &Taken) -> Result<(), Failure> {
        if last.begun == 0 {
            let remedy = if self.control {
                "a longer --for, or --reconnect, which ends the connection that there is"
            } else {
                "culvert status says how many lanes are up, counted from 0"
            };
            return Err(Failure::Runtime(anyhow!(
                "nothing began within {} s (remedy: {remedy})",
                self.time.as_secs()
            )));
        }
        if last.lost > 0 {
            out::complain(&format_args!(
                "culvert: {} events are missing: they came faster than they were taken; the file says where",
                last.lost
            ));
        }
        if self.control && last.begun > 1 {
            out::complain(&format_args!(
                "culvert: {} connections are in it, which group_id tells apart",
                last.begun
            ));
        }
        if let Some(path) = &sink.path {
            out::say(&format_args!("{}: {} events", path.display(), sink.events))?;
        }
        Ok(())
    }
}

/// The place to which the text of the capture goes.
struct Sink {
    /// The path of the file; `None` for standard output.
    path: Option<PathBuf>,
    file: Option<File>,
    /// What came before there was anything to look at: the header.
    waiting: String,
    events: usize,
}

impl Sink {
    fn new(path: PathBuf) -> Result<Self, Failure> {
        let path = (path != Path::new("-")).then_some(path);
        if let Some(path) = path.as_ref().filter(|path| fs::symlink_metadata(path).is_ok()) {
            return Err(Failure::Input(is_there(path)));
        }
        Ok(Self { path, file: None, waiting: String::new(), events: 0 })
    }

    /// Writes; nothing, and no file is made, before something has `begun`.
    fn put(&mut self, text: &str, begun: bool) -> Result<Reader, Failure> {
        // The first record is the header.
        let records = text.matches('\u{1e}').count();
        self.events += records;
        self.waiting.push_str(text);
        if !begun || self.waiting.is_empty() {
            return Ok(Reader::There);
        }
        let text = std::mem::take(&mut self.waiting);
        let Some(path) = &self.path else {
            return Ok(out::print(&text)?);
        };
        let failed = |error: io::Error| {
            if error.kind() == io::ErrorKind::AlreadyExists {
                return Failure::Input(is_there(path));
            }
            Failure::Runtime(anyhow!("{}: {error} (remedy: another --out)", path.display()))
        };
        let file = match &mut self.file {
            Some(file) => file,
            None => {
                // Who talks to whom, when and how much is nobody else's business.
                let made =
                    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
                self.events = self.events.saturating_sub(1);
                self.file.insert(made)
            }
        };
        file.write_all(text.as_bytes()).map_err(failed)?;
        Ok(Reader::There)
    }
}

fn is_there(path: &Path) -> String {
    format!("{} is there already, and is not overwritten (remedy: another --out)", path.display())
}

fn time(text: &str) -> Result<Duration, &'static str> {
    let range = Duration::from_secs(1)..=MOST_TIME;
    humantime::parse_duration(text).ok().filter(|time| range.contains(time)).ok_or("write 1s to 10m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit_and_bounds() {
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(time("10m"), Ok(MOST_TIME));
        for bad in ["10", "0s", "999ms", "601s", ""] {
            assert_eq!(time(bad), Err("write 1s to 10m"), "{bad}");
        }
    }

    #[test]
    fn no_file_is_made_before_there_is_something_to_see_and_none_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sqlog");
        let mut sink = Sink::new(path.clone()).unwrap();
        sink.put("\u{1e}header\n", false).unwrap();
        assert!(!path.exists());
        sink.put("\u{1e}one\n\u{1e}two\n", true).unwrap();
        sink.put("", true).unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap().lines().count(), sink.events), (3, 2));
        assert!(matches!(Sink::new(path), Err(Failure::Input(error)) if error.contains("remedy")));

        // Another program made it meanwhile.
        let other = folder.path().join("b.sqlog");
        let mut sink = Sink::new(other.clone()).unwrap();
        fs::write(&other, "theirs").unwrap();
        assert!(matches!(sink.put("\u{1e}header\n", true), Err(Failure::Input(_))));
        assert_eq!(fs::read_to_string(&other).unwrap(), "theirs");
    }
}

//! The operator's commands: `tun.up` when the device is up, `tun.down` before it goes.
//!
//! A command runs on a thread that does nothing else, in a process group of its own, and for a bounded time. How it ended is logged,
//! with the end of what it wrote; a command that fails ends nothing.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use base::{
    clock::{Clock, SystemClock},
    panics::lock,
};
use config::{Config, Tun};
use net::process::kill_group;

/// How long `tun.up` may take. The service manager waits for longer: `DefaultTimeoutStartSec=` is 90 s.
const UP_WITHIN: Duration = Duration::from_secs(10);

/// How long `tun.down` may take: with [`crate::daemon::STOP_DEADLINE`] and twice the end of a killed command less than the unit's
/// `TimeoutStopSec=` of 10 s.
const DOWN_WITHIN: Duration = Duration::from_secs(5);

/// The time between two looks at a command that runs.
const LOOK: Duration = Duration::from_millis(10);

/// How long what was killed, and what was written before, is waited for.
const LEFT_OVER: Duration = Duration::from_millis(200);

/// The most that is kept of a command's output, its end, in bytes.
const OUTPUT_BYTES: usize = 1_000;

/// Variables that are between this process and its service manager.
const OURS: [&str; 9] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "MAINPID",
    "FDSTORE",
    "CREDENTIALS_DIRECTORY",
];

/// Both commands of an agent, and whether it is stopping.
#[derive(Debug, Default)]
pub struct Hooks {
    tun: Option<Tun>,
    config: PathBuf,
    stopping: AtomicBool,
    /// Held while a command runs, so that there is one at a time.
    runs: Mutex<()>,
}

impl Hooks {
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self { tun: config.tun.clone(), config: config.path.clone().unwrap_or_default(), ..Self::default() }
    }

    /// Whether there is something to do when the device is up.
    #[must_use]
    pub fn has_up(&self) -> bool {
        self.tun.as_ref().is_some_and(|tun| !tun.up.is_empty())
    }

    /// Runs `tun.up` to its end, unless [`Hooks::down`] was called.
    pub fn up(&self) {
        let _alone = lock(&self.runs);
        let Some(tun) = &self.tun else { return };
        if !self.stopping.load(Ordering::Acquire) {
            self.run("up", tun, &tun.up, UP_WITHIN, &self.stopping);
        }
    }

    /// Ends `tun.up` if it still runs, and runs `tun.down`.
    pub fn down(&self) {
        self.stopping.store(true, Ordering::Release);
        let _alone = lock(&self.runs);
        if let Some(tun) = &self.tun {
            self.run("down", tun, &tun.down, DOWN_WITHIN, &AtomicBool::new(false));
        }
    }

    fn run(&self, hook: &'static str, tun: &Tun, words: &[String], within: Duration, cancelled: &AtomicBool) {
        let Some((program, arguments)) = words.split_first() else { return };
        let addresses = tun.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let mut command = Command::new(program);
        OURS.iter().for_each(|name| {
            command.env_remove(name);
        });
        command
            .args(arguments)
            .current_dir("/")
            .env("CULVERT_HOOK", hook)
            .env("CULVERT_DEVICE", &*tun.name)
            .env("CULVERT_ADDRESSES", addresses)
            .env("CULVERT_CONFIG", self.config.as_os_str());
        let Ended { how, output } = run(command, within, LEFT_OVER, cancelled);
        let output = output.as_str();
        match how {
            How::Exited(status) if status.success() => tracing::info!(hook, program, output, "the hook ran"),
            How::Exited(status) => tracing::warn!(
                hook,
                program,
                %status,
                output,
                "a hook of the TUN device failed, and the agent goes on without it (remedy: run tun.{hook} by hand as the daemon's \
                 user; the unit's sandbox may forbid what it does)"
            ),
            How::TimedOut => tracing::warn!(
                hook,
                program,
                output,
                "a hook of the TUN device was killed after {} s, and the agent goes on without it (remedy: a command that ends by \
                 itself; one that stays belongs into a service of its own)",
                within.as_secs()
            ),
            How::Cancelled => tracing::info!(hook, program, output, "a stop ended the hook"),
            How::NotRun(error) => tracing::warn!(
                hook,
                program,
                %error,
                "a hook of the TUN device cannot be run, and the agent goes on without it (remedy: the program's absolute path in \
                 tun.{hook}, executable for the daemon's user)"
            ),
        }
    }
}

#[derive(Debug)]
enum How {
    Exited(ExitStatus),
    /// It did not end in time and was killed.
    TimedOut,
    /// It was killed because the agent stops.
    Cancelled,
    NotRun(io::Error),
}

/// A command that has ended, with the end of its output.
#[derive(Debug)]
struct Ended {
    how: How,
    output: String,
}

/// Runs a command, which is killed with all that it has started after `within`, or when it is `cancelled`. Its end, and that of its
/// output, are waited for until `left_over` is over.
fn run(command: Command, within: Duration, left_over: Duration, cancelled: &AtomicBool) -> Ended {
    match start(command) {
        Ok((mut child, output)) => {
            let how = wait(&mut child, within, left_over, cancelled);
            // What it left running may hold the pipe open for ever.
            let output = output.recv_timeout(left_over).unwrap_or_default();
            Ended { how, output }
        }
        Err(error) => Ended { how: How::NotRun(error), output: String::new() },
    }
}

/// Starts a command, and a thread that reads what it writes: the end of it can be received.
fn start(mut command: Command) -> io::Result<(Child, mpsc::Receiver<String>)> {
    let (mut reader, writer) = io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    let (told, output) = mpsc::sync_channel(1);
    let read = move || {
        let mut tail = Tail::default();
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            tail.add(&buffer[..count]);
        }
        // Nobody waits any more if what the command left running has written until now.
        let _told = told.send(tail.text()).is_ok();
    };
    // Before the child, which would have nobody to end it.
    thread::Builder::new().name("culvert-hook-output".to_owned()).spawn(read)?;
    let child = command.spawn()?;
    // It holds our ends of the pipe.
    drop(command);
    Ok((child, output))
}

fn wait(child: &mut Child, within: Duration, left_over: Duration, cancelled: &AtomicBool) -> How {
    let clock = SystemClock;
    let until = clock.now() + within;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return How::Exited(status),
            Ok(None) => {}
            Err(error) => return How::NotRun(error),
        }
        let how = if cancelled.load(Ordering::Acquire) {
            How::Cancelled
        } else if clock.now() >= until {
            How::TimedOut
        } else {
            thread::sleep(LOOK);
            continue;
        };
        if let Err(error) = kill_group(child.id()) {
            tracing::debug!(%error, "cannot kill a hook");
        }
        let until = clock.now() + left_over;
        while matches!(child.try_wait(), Ok(None)) && clock.now() < until {
            thread::sleep(LOOK);
        }
        return how;
    }
}

/// The last bytes of what a command has written.
#[derive(Debug, Default)]
struct Tail {
    bytes: Vec<u8>,
    cut: bool,
}

impl Tail {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        let excess = self.bytes.len().saturating_sub(OUTPUT_BYTES);
        self.cut |= excess > 0;
        self.bytes.drain(..excess);
    }

    /// The last lines as one, the first of which may be cut.
    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect::<Vec<_>>();
        let clean = |c: char| if c.is_control() { ' ' } else { c };
        let text: String = lines.join(" | ").chars().map(clean).collect();
        if self.cut { format!("…{text}") } else { text }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    fn ended(script: &str, within: Duration, left_over: Duration) -> Ended {
        run(shell(script), within, left_over, &AtomicBool::new(false))
    }

    /// Longer than a loaded machine needs for anything here, and shorter than what sleeps for a minute.
    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_command_ends_with_its_status_and_the_end_of_its_output() {
        let Ended { how, output } = ended("echo one; echo two >&2; exit 3", LONG, LONG);
        assert!(matches!(how, How::Exited(status) if status.code() == Some(3)), "{how:?}");
        assert_eq!(output, "one | two");
        let Ended { output, .. } = ended("seq 1 10000; printf '\\033[31mred'", LONG, LONG);
        assert!(output.starts_with('…') && output.ends_with("9999 | 10000 |  [31mred"), "{output}");
        assert!(output.len() < 2 * OUTPUT_BYTES + 10, "{}", output.len());
    }

    #[test]
    fn a_command_that_goes_on_is_killed_with_what_it_has_started() {
        let folder = tempfile::tempdir().unwrap();
        let begun = folder.path().join("begun");
        let script = format!("sleep 60 & echo said; touch {}; wait", begun.display());
        // A loaded machine may need longer to start a shell.
        for within in [500, 1_000, 2_000, 4_000, 8_000].map(Duration::from_millis) {
            let Ended { how, output } = ended(&script, within, LONG);
            assert!(matches!(how, How::TimedOut), "{how:?}");
            if begun.exists() {
                assert_eq!(output, "said", "what it has started went on and holds the pipe open");
                return;
            }
        }
        panic!("it never began");
    }

    #[test]
    fn what_a_command_leaves_running_keeps_nobody_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join("left");
        let clock = SystemClock;
        let begun = clock.now();
        let Ended { how, .. } = ended(&format!("sleep 60 & echo $! > {}", left.display()), LONG, LEFT_OVER);
        assert!(matches!(how, How::Exited(status) if status.success()), "{how:?}");
        assert!(clock.now() - begun < LONG);
        let left = fs::read_to_string(left).unwrap();
        let killed = shell(&format!("kill {left}")).status().unwrap();
        assert!(killed.success(), "it was still there");
    }

    #[test]
    fn a_stop_ends_up_and_runs_down() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let write = "printf '%s %s %s %s' \"$CULVERT_HOOK\" \"$CULVERT_DEVICE\" \"$CULVERT_ADDRESSES\" \"$NOTIFY_SOCKET\"";
        let tun = Tun {
            up: ["/bin/sh".to_owned(), "-c".to_owned(), format!("touch {}; sleep 60", at("up").display())]
                .into(),
            down: ["/bin/sh".to_owned(), "-c".to_owned(), format!("{write} > {}", at("down").display())]
                .into(),
            addresses: vec!["10.9.0.1/24".parse().unwrap(), "fd09::1/64".parse().unwrap()],
            ..Tun::default()
        };
        let hooks = Hooks { tun: Some(tun), ..Hooks::default() };
        thread::scope(|scope| {
            scope.spawn(|| hooks.up());
            while !at("up").exists() {
                thread::sleep(LOOK);
            }
            hooks.down();
        });
        let said = fs::read_to_string(at("down")).unwrap();
        assert_eq!(said, "down culvert0 10.9.0.1/24 fd09::1/64 ");
        // It would sleep for a minute.
        hooks.up();
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let Ended { how, .. } = run(Command::new("/nowhere"), LONG, LONG, &AtomicBool::new(false));
        assert!(matches!(&how, How::NotRun(error) if error.kind() == io::ErrorKind::NotFound), "{how:?}");
    }
}

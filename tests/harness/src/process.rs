//! Child processes that never outlive their test.

use std::{
    fs::File,
    io::{Read, Seek},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use crate::clock;

/// A child process; dropping it kills it.
#[derive(Debug)]
pub struct Running {
    what: String,
    child: Child,
}

impl Running {
    /// Starts `command`, called `what` in messages.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(what: &str, command: &mut Command) -> Self {
        let child =
            command.spawn().unwrap_or_else(|error| panic!("cannot start {what}: {command:?}: {error}"));
        Self { what: what.to_owned(), child }
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its pipes, as the command asked for them.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How it ended, if it has.
    ///
    /// # Panics
    /// When the kernel does not say.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap_or_else(|error| panic!("cannot wait for {}: {error}", self.what))
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it still runs after `limit`.
    #[track_caller]
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.what);
        clock::until(&what, limit, || self.ended().ok_or("it runs"))
    }

    /// Asks it to end.
    ///
    /// # Panics
    /// When the signal cannot be sent.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends it a signal, named without `SIG`.
    ///
    /// # Panics
    /// When the signal cannot be sent.
    pub fn signal(&self, name: &str) {
        // The shell's own `kill`, because std sends no signal but SIGKILL.
        let mut shell = Command::new("sh");
        let status =
            shell.args(["-c", "kill -s \"$1\" \"$2\"", "sh", name, &self.pid().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "cannot send SIG{name} to {}", self.what);
    }

    /// Kills it.
    ///
    /// # Panics
    /// When that fails.
    pub fn kill(&mut self) {
        let killed = self.child.kill().and_then(|()| self.child.wait());
        killed.unwrap_or_else(|error| panic!("cannot kill {}: {error}", self.what));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Runs `command` to its end and takes what it printed.
///
/// # Panics
/// When it still runs after `limit`.
#[track_caller]
pub fn run(command: &mut Command, limit: Duration) -> Output {
    // Files, not pipes: a full pipe would hold the process up.
    let file = || tempfile::tempfile().expect("the folder for temporary files is writable");
    let (stdout, stderr) = (file(), file());
    let share = |file: &File| Stdio::from(file.try_clone().expect("a descriptor is free"));
    command.stdin(Stdio::null()).stdout(share(&stdout)).stderr(share(&stderr));
    let what = format!("{command:?}");
    let status = Running::start(&what, command).wait(limit);
    let read = |mut file: File| {
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("our own file is readable");
        bytes
    };
    Output { status, stdout: read(stdout), stderr: read(stderr) }
}

/// What a process printed, as text.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Ends a thread that looks at this flag, also when the test fails.
#[derive(Debug)]
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

//! `tcpdump` at a place, and what it and `tshark` read from the recording.

use std::{
    fs::File,
    process::{Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    clock::{self, PATIENCE},
    needs,
    place::Place,
    process::{Running, run, text},
    sites::DEVICE,
};

/// A running `tcpdump`; dropping it kills it.
#[derive(Debug)]
pub struct Capture {
    process: Running,
    recording: Recording,
}

/// What was recorded.
#[derive(Debug)]
pub struct Recording {
    folder: TempDir,
    /// Only UDP is in it: of datagrams the length is shown, whatever protocol the port may mean to `tcpdump`.
    only_udp: bool,
}

impl Capture {
    /// Records what passes an interface of `place` and fits `filter`, in the words of `tcpdump`, from now on.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    #[track_caller]
    pub fn start(place: &Place, interface: &str, filter: &str) -> Self {
        let folder = tempfile::tempdir().expect("the folder for temporary files is writable");
        let log = folder.path().join("log");
        let mut command = place.command(needs::tool("tcpdump").expect("asked for"));
        // The kernel's ring has room for as many packets of this size as fit; the device has super-packets.
        let size = if interface == DEVICE { "66000" } else { "2000" };
        // Each packet is in the file at once.
        command.args(["-n", "-U", "--immediate-mode", "-B", "65536", "-s", size, "-Z", "root"]);
        command.args(["-i", interface, "-w"]);
        command.arg(folder.path().join("packets")).arg(filter);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(&log).expect("the folder is ours"));
        let mut process = Running::start("tcpdump", &mut command);
        clock::until("tcpdump listens", PATIENCE, || {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            assert!(process.ended().is_none(), "tcpdump ended: {log}");
            if log.contains("listening on") { Ok(()) } else { Err(log) }
        });
        Self { process, recording: Recording { folder, only_udp: filter.starts_with("udp") } }
    }

    /// Waits until `look` is content with the lines of `tcpdump -v` of what was recorded, and ends the recording.
    ///
    /// # Panics
    /// When that takes too long, or the kernel has dropped packets that were to be recorded.
    #[track_caller]
    pub fn stop_when(mut self, what: &str, look: impl Fn(&str) -> bool) -> Recording {
        clock::until(what, PATIENCE, || {
            // A packet that is being written is no error here, the rest is shown.
            let text = text(&self.recording.read().output().expect("tcpdump is there").stdout);
            if look(&text) { Ok(()) } else { Err(text) }
        });
        self.process.terminate();
        self.process.wait(Duration::from_secs(10));
        let log = std::fs::read_to_string(self.recording.folder.path().join("log")).unwrap_or_default();
        let lost = log.lines().find(|line| line.contains("dropped by kernel"));
        assert!(lost.is_some_and(|line| line.starts_with("0 packets")), "tcpdump: {log}");
        self.recording
    }
}

impl Recording {
    /// What `tcpdump -vv` makes of it.
    ///
    /// # Panics
    /// When it cannot read it.
    #[must_use]
    #[track_caller]
    pub fn text(&self) -> String {
        let output = run(&mut self.read(), Duration::from_secs(60));
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    }

    /// What `tshark` makes of it when it takes UDP port `port` for QUIC: the values of `fields`, a list for each packet.
    ///
    /// # Panics
    /// When it cannot read it.
    #[must_use]
    #[track_caller]
    pub fn as_quic(&self, port: u16, fields: &[&str]) -> Vec<Vec<String>> {
        let mut command = Place::Host.command(needs::tool("tshark").expect("asked for"));
        command.args(["-n", "-d", &format!("udp.port=={port},quic"), "-T", "fields", "-r"]);
        command.arg(self.folder.path().join("packets"));
        command.args(fields.iter().flat_map(|field| ["-e", field]));
        let output = run(&mut command, Duration::from_secs(60));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let split = |line: &str| line.split('\t').map(str::to_owned).collect();
        text(&output.stdout).lines().map(split).collect()
    }

    fn read(&self) -> Command {
        let mut command = Place::Host.command(needs::tool("tcpdump").expect("asked for"));
        command.args(["-n", "-vv"]).args(self.only_udp.then_some("-q"));
        command.arg("-r").arg(self.folder.path().join("packets"));
        command
    }
}

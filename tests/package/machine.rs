//! A machine: a clean Debian with a process 1 of its own, in namespaces. Dropping it ends all that runs in it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    place::Place,
    process::{Running, run, text},
};
use tempfile::TempDir;

/// How long a command in it may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// Where the script that mounts it is.
const BOOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/package/boot.sh");

pub(crate) struct Machine {
    /// `unshare`, which takes the process 1 along when it is killed.
    process: Option<Running>,
    /// Process 1, as this host numbers it.
    init: u32,
    folder: TempDir,
    cgroup: String,
}

impl Machine {
    /// One that runs systemd on the network of `place`; waits until it has started.
    #[track_caller]
    pub(crate) fn with_systemd(debian: &Path, place: &Place) -> Self {
        // Nobody is at the console.
        let units = "etc/systemd/system";
        let mask = |upper: &Path| {
            fs::create_dir_all(upper.join(units)).unwrap();
            let unit = upper.join(units).join("console-getty.service");
            std::os::unix::fs::symlink("/dev/null", unit).unwrap();
        };
        let machine = Self::start(debian, place, mask, &["/lib/systemd/systemd", "--unit=multi-user.target"]);
        clock::until("systemd has started", PATIENCE, || {
            let state = text(&machine.run(&["systemctl", "is-system-running"]).stdout);
            // Services of this host that cannot run in a machine are no fault of the package.
            let is_over = state.trim() == "running" || debian == Path::new("/") && state.trim() == "degraded";
            if is_over { Ok(()) } else { Err(state) }
        });
        machine.tell(&["systemctl", "reset-failed"]);
        machine
    }

    /// One in which nothing runs but what the test starts.
    #[track_caller]
    pub(crate) fn idle(debian: &Path, place: &Place) -> Self {
        Self::start(debian, place, |_| {}, &["sleep", "infinity"])
    }

    #[track_caller]
    fn start(debian: &Path, place: &Place, prepare: impl FnOnce(&Path), init: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let folder = tempfile::tempdir().unwrap();
        for name in ["upper", "layer", "root"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        prepare(&folder.path().join("upper"));
        let cgroup = format!("culvert-machine-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let mut command = place.command("unshare");
        command.args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--uts",
            "--ipc",
            "--propagation",
            "private",
        ]);
        command.args(["--", "sh", BOOT]).arg(folder.path()).arg(debian).arg(&cgroup).args(init);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let log = fs::File::create(folder.path().join("log")).unwrap();
        command.stderr(log);
        let process = Some(Running::start("a machine", &mut command));
        let mut machine = Self { process, init: 0, folder, cgroup };
        machine.init = clock::until("the machine's process 1 is there", PATIENCE, || machine.find_init());
        machine
    }

    /// The child of `unshare`, once it has become what the machine runs.
    fn find_init(&mut self) -> Result<u32, String> {
        let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        let process = self.process.as_mut().unwrap();
        assert!(process.ended().is_none(), "the machine did not start: {}", log());
        let parent = format!("PPid:\t{}", process.pid());
        for entry in fs::read_dir("/proc").map_err(|error| error.to_string())? {
            let Ok(entry) = entry else { continue };
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            if read("status").lines().any(|line| line == parent) && read("environ").starts_with("container=")
            {
                return Ok(pid);
            }
        }
        Err(log())
    }

    /// A file of the machine, as this host reaches it.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// The processes of this name, as the machine numbers them.
    pub(crate) fn processes(&self, name: &str) -> Vec<String> {
        let files = fs::read_dir(self.path("/proc")).unwrap().map(|entry| entry.unwrap());
        let is_one = |pid: &String| {
            let comm = fs::read_to_string(self.path(&format!("/proc/{pid}/comm"))).unwrap_or_default();
            pid.parse::<u32>().is_ok() && comm.trim() == name
        };
        files.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(is_one).collect()
    }

    /// Runs a command in it, as root.
    #[track_caller]
    pub(crate) fn run(&self, words: &[&str]) -> Output {
        run(self.command().args(words), COMMAND_LIMIT)
    }

    /// A command in it, of which the words are still missing.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string()]);
        command.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd"]);
        command.args([
            "--",
            "env",
            "-i",
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND=noninteractive",
        ]);
        command
    }

    /// Runs a command in it that must succeed, and returns what it printed.
    #[track_caller]
    pub(crate) fn tell(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| text(bytes));
        assert!(output.status.success(), "{words:?}: {stdout}{stderr}{}", self.journal());
        stdout
    }

    /// A property of the service.
    #[track_caller]
    pub(crate) fn property(&self, name: &str) -> String {
        self.tell(&["systemctl", "show", "--value", "--property", name, "culvert.service"]).trim().to_owned()
    }

    /// What the service has logged.
    pub(crate) fn journal(&self) -> String {
        text(&self.run(&["journalctl", "--no-pager", "--output=cat", "--unit=culvert.service"]).stdout)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if thread::panicking() {
            complain(&self.journal());
        }
        drop(self.process.take());
        // Its control groups are left, all of them empty; they are seen through a mount that nobody else sees.
        let script = "mount -t cgroup2 cgroup2 \"$1\" && find \"$1/$2\" -depth -type d -exec rmdir {} +";
        let clean = || {
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "private", "--", "sh", "-c", script, "sh"]);
            command.arg(self.folder.path().join("root")).arg(&self.cgroup);
            run(&mut command, COMMAND_LIMIT).status.success()
        };
        // The last processes of a dead machine may still be on their way out.
        let end = clock::now() + PATIENCE;
        while !clean() && clock::now() < end {
            thread::sleep(Duration::from_millis(50));
        }
    }
}

#[expect(clippy::print_stderr, reason = "captured and shown with the failure that it belongs to")]
fn complain(journal: &str) {
    eprintln!("--- journal of the service ---\n{journal}");
}

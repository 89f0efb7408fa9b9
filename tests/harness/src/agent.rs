//! One agent: the real program, with a key and a configuration in a folder of its own.

use std::{
    env, fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    clock::{self, PATIENCE},
    http::{Fetcher, Page, Samples},
    place::Place,
    ports,
    process::{Running, run, text},
};

/// How long an agent may take to end when it is asked to: the promise to the operator.
pub const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// An agent. Dropping it asks it to end, then kills it; if the test is failing, its log is shown.
#[derive(Debug)]
pub struct Agent {
    name: &'static str,
    place: Place,
    folder: TempDir,
    key: String,
    metrics: SocketAddr,
    fetcher: Mutex<Fetcher>,
    process: Option<Running>,
    /// Options of `setpriv` for the process.
    privileges: &'static [&'static str],
    binary: PathBuf,
}

impl Agent {
    /// An agent with a new key; it has no configuration yet.
    #[must_use]
    pub fn new(name: &'static str, place: &Place) -> Self {
        Self::of(binary(), name, place)
    }

    /// The same of another program, which makes the key, too.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    #[track_caller]
    pub fn of(program: &Path, name: &'static str, place: &Place) -> Self {
        let folder = tempfile::tempdir().expect("the folder for temporary files is writable");
        let key = keygen_of(program, &folder.path().join("identity.key"));
        let metrics = (Ipv4Addr::LOCALHOST, ports::free()).into();
        let fetcher = Mutex::new(Fetcher::new(place));
        Self {
            name,
            place: place.clone(),
            folder,
            key,
            metrics,
            fetcher,
            process: None,
            privileges: &[],
            binary: program.to_owned(),
        }
    }

    /// From its next start on it is of another program; its files stay.
    pub fn upgrade(&mut self, program: &Path) {
        program.clone_into(&mut self.binary);
    }

    /// From its next start on it runs as the user `nobody` with CAP_NET_ADMIN and no other privilege.
    ///
    /// # Panics
    /// When the test is not root.
    pub fn unprivileged(&mut self) {
        self.hand_over(&[
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all,+net_admin",
            "--ambient-caps=-all,+net_admin",
            "--bounding-set=-all,+net_admin",
        ]);
    }

    /// The same without any privilege.
    ///
    /// # Panics
    /// When the test is not root.
    pub fn powerless(&mut self) {
        self.hand_over(&[
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]);
    }

    /// Gives its files to `nobody`, and to its process these options of `setpriv`.
    fn hand_over(&mut self, privileges: &'static [&'static str]) {
        assert_ne!(self.place, Place::Host, "its mounts are not the test's business");
        const NOBODY: Option<u32> = Some(65_534);
        // Where the program was built may be out of that user's reach.
        let copy = self.folder().join("culvert");
        fs::copy(&self.binary, &copy).expect("the disk has room");
        self.binary = copy;
        let files = fs::read_dir(self.folder()).expect("the folder is ours");
        let files = files.map(|file| file.expect("the folder is ours").path());
        for file in files.chain([self.folder().to_owned()]) {
            chown(&file, NOBODY, NOBODY).expect("the test runs as root");
        }
        self.privileges = privileges;
    }

    /// Its public key.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Where it serves its metrics.
    #[must_use]
    pub fn metrics(&self) -> SocketAddr {
        self.metrics
    }

    /// Where it runs.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Its folder: the key, the configuration, the log.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes its configuration: `body` and what every agent of the tests has.
    ///
    /// # Panics
    /// When the disk is full.
    pub fn configure(&self, body: &str) {
        let common = format!(
            "identity.key_file = \"identity.key\"\nidentity.state_dir = \"state\"\n\
             control.socket = \"control\"\nmetrics.listen = \"{}\"\nlog.level = \"debug\"\n{body}",
            self.metrics
        );
        fs::write(self.config(), common).expect("the folder is ours");
    }

    /// The configuration file.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.folder().join("culvert.toml")
    }

    /// Starts it and waits until it says that it is ready.
    ///
    /// # Panics
    /// When it ends or is not ready soon.
    #[track_caller]
    pub fn start(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_file());
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("the folder is ours"));
        self.process = Some(Running::start(self.name, &mut command));
        let what = format!("{} is ready", self.name);
        clock::until(&what, PATIENCE, || {
            let ended = self.process.as_mut().and_then(Running::ended);
            assert!(ended.is_none(), "{} ended: {ended:?}: {}", self.name, self.log());
            match self.get("/readyz") {
                Ok(page) if page.status == 200 => Ok(()),
                Ok(page) => Err(format!("{} {}", page.status, page.body)),
                Err(error) => Err(error),
            }
        });
    }

    /// Runs it to its end, which must be soon: how it ended, and what it said.
    ///
    /// # Panics
    /// When it still runs after a minute.
    #[must_use]
    #[track_caller]
    pub fn run_to_end(&self) -> (ExitStatus, String) {
        let output = run(&mut self.command(), Duration::from_secs(60));
        (output.status, text(&output.stderr))
    }

    /// Another agent at the same place with the same configuration, except for its key and the ports of its own.
    ///
    /// # Panics
    /// When the disk is full.
    #[must_use]
    pub fn twin(&self) -> Self {
        let twin = Self::new("twin", &self.place);
        let ours = fs::read_to_string(self.config()).expect("the test has configured it");
        let ours = ours.replace(&self.metrics.to_string(), &twin.metrics.to_string());
        fs::write(twin.config(), ours).expect("the folder is ours");
        twin
    }

    /// Runs a command of its own program about its daemon; what it printed.
    ///
    /// # Panics
    /// When the command fails.
    #[track_caller]
    pub fn ask(&self, args: &[&str]) -> String {
        self.ask_by(&self.binary, args)
    }

    /// Runs a command of `program` about its daemon; what it printed.
    ///
    /// # Panics
    /// When the command fails.
    #[must_use]
    #[track_caller]
    pub fn ask_by(&self, program: &Path, args: &[&str]) -> String {
        match self.try_to_ask_by(program, args) {
            Ok(output) => output,
            Err(refusal) => panic!("{} {args:?}: {refusal}", self.name),
        }
    }

    /// Runs a command of its own program about its daemon; what it printed.
    ///
    /// # Errors
    /// What the command says when it fails, e.g. because the kernel lets nobody at its network devices for seconds.
    pub fn try_to_ask(&self, args: &[&str]) -> Result<String, String> {
        self.try_to_ask_by(&self.binary, args)
    }

    fn try_to_ask_by(&self, program: &Path, args: &[&str]) -> Result<String, String> {
        let mut command = Command::new(program);
        let output = run(command.args(args).arg("--config").arg(self.config()), Duration::from_secs(60));
        let [said, refusal] = [&output.stdout, &output.stderr].map(|bytes| text(bytes).trim().to_owned());
        if output.status.success() { Ok(said) } else { Err(refusal) }
    }

    /// The running process.
    ///
    /// # Panics
    /// When it does not run.
    #[must_use]
    #[track_caller]
    pub fn process(&mut self) -> &mut Running {
        self.process.as_mut().expect("the test has started it")
    }

    /// Asks it to end, and says how it did.
    ///
    /// # Panics
    /// When it still runs after [`PATIENCE`]: while the kernel takes namespaces of other tests down, it lets nobody at network devices,
    /// for seconds on a busy machine. The tests of the command line hold [`SHUTDOWN_LIMIT`].
    #[track_caller]
    pub fn terminate(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("the test has started it");
        process.terminate();
        process.wait(PATIENCE)
    }

    /// Kills it.
    ///
    /// # Panics
    /// When it does not run.
    #[track_caller]
    pub fn kill(&mut self) {
        self.process.take().expect("the test has started it").kill();
    }

    /// What it has logged since the test began.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Waits for a line of its log that has all of `words`.
    ///
    /// # Panics
    /// When there is none soon.
    #[track_caller]
    pub fn wait_for_log(&self, words: &[&str]) -> String {
        let fits = |line: &&str| words.iter().all(|word| line.contains(word));
        let what = format!("{} logs {words:?}", self.name);
        clock::until(&what, PATIENCE, || {
            self.log().lines().find(fits).map(str::to_owned).ok_or("no such line")
        })
    }

    /// Fetches one of its pages.
    ///
    /// # Errors
    /// When it does not answer.
    ///
    /// # Panics
    /// When the page is no valid HTTP or metrics.
    #[track_caller]
    pub fn get(&self, path: &str) -> Result<Page, String> {
        self.fetcher.lock().unwrap_or_else(PoisonError::into_inner).get(self.metrics, path)
    }

    /// Its metrics now.
    ///
    /// # Panics
    /// When it does not answer.
    #[must_use]
    #[track_caller]
    pub fn samples(&self) -> Samples {
        self.get("/metrics").unwrap_or_else(|error| panic!("{} has no metrics: {error}", self.name)).samples()
    }

    /// Waits for metrics that `look` is content with.
    ///
    /// # Panics
    /// When there are none soon.
    #[track_caller]
    pub fn wait_for<T>(&self, what: &str, look: impl Fn(&Samples) -> Result<T, String>) -> T {
        clock::until(&format!("{}: {what}", self.name), PATIENCE, || look(&self.samples()))
    }

    /// Waits until a metric is exactly `expected`; agents publish their counts some moments after the fact.
    ///
    /// # Panics
    /// When it is not soon.
    #[track_caller]
    pub fn wait_for_count(&self, name: &str, labels: &[(&str, &str)], expected: u64) {
        self.wait_for(&format!("{name}{labels:?} is {expected}"), |samples| {
            match samples.count(name, labels) {
                count if count == expected => Ok(()),
                count => Err(format!("it is {count}")),
            }
        });
    }

    fn command(&self) -> Command {
        let mut command = if self.privileges.is_empty() {
            self.place.command(&self.binary)
        } else {
            // A namespace has mounts of its own: there every user may open the device, as udev has it on most machines.
            let mut command = self.place.command("sh");
            command.args(["-ec", OPEN_TO_ALL, "sh"]).args(self.privileges);
            command.args(["--pdeathsig", "KILL", "--"]).arg(&self.binary);
            command
        };
        command.args(["run", "--config"]).arg(self.config());
        command
    }

    fn log_file(&self) -> PathBuf {
        self.folder().join("log")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // One that has ended by itself cannot be asked to; a panic here would end all tests, and leave namespaces behind.
        if let Some(mut process) = self.process.take()
            && process.ended().is_none()
        {
            process.terminate();
            let end = clock::now() + PATIENCE;
            while process.ended().is_none() && clock::now() < end {
                thread::sleep(Duration::from_millis(10));
            }
        }
        if thread::panicking() {
            let log = self.log();
            // The first lines say what it is, the last ones what happened.
            let lines: Vec<&str> = log.lines().collect();
            let skip = lines.len().saturating_sub(LOG_LINES);
            complain(&format!(
                "--- log of {}, last {LOG_LINES} lines ---\n{}",
                self.name,
                lines[skip..].join("\n")
            ));
        }
    }
}

/// Makes `/dev/net/tun` what every user may open, for this mount namespace, and goes on as `setpriv`.
const OPEN_TO_ALL: &str =
    "mount -t tmpfs tun /dev/net; mknod -m 666 /dev/net/tun c 10 200; exec setpriv \"$@\"";

/// How much of a log is shown when a test fails.
const LOG_LINES: usize = 60;

#[expect(clippy::print_stderr, reason = "captured and shown with the failure that it belongs to")]
fn complain(text: &str) {
    eprintln!("{text}");
}

/// Makes a key file with the real program, and returns the public key.
///
/// # Panics
/// When that fails.
#[track_caller]
pub fn keygen(file: &Path) -> String {
    keygen_of(binary(), file)
}

#[track_caller]
fn keygen_of(program: &Path, file: &Path) -> String {
    let output = run(Command::new(program).args(["keygen", "--out"]).arg(file), Duration::from_secs(60));
    assert!(output.status.success(), "keygen: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

/// Runs the program to its end, which must be soon.
///
/// # Panics
/// When it still runs after a minute.
#[track_caller]
pub fn culvert(args: &[&str]) -> Output {
    run(Command::new(binary()).args(args), Duration::from_secs(60))
}

/// All agents of this process are of this program.
///
/// # Panics
/// When there has been one of another.
pub fn use_binary(path: PathBuf) {
    assert!(BINARY.set(path).is_ok(), "there has been an agent of another program");
}

static BINARY: OnceLock<PathBuf> = OnceLock::new();

/// The program: `CULVERT_BIN`, else the one that cargo built beside the tests.
///
/// # Panics
/// When it is missing or older than its sources.
#[must_use]
pub fn binary() -> &'static Path {
    BINARY.get_or_init(|| {
        if let Some(path) = env::var_os("CULVERT_BIN") {
            return path.into();
        }
        built("culvert", "cargo build -p culvert")
    })
}

/// What cargo built beside the tests, at `place` of its folder for this profile; `remedy` builds it.
///
/// # Panics
/// When it is missing or older than its sources.
pub(crate) fn built(place: &str, remedy: &str) -> PathBuf {
    let test = env::current_exe().expect("the kernel knows our path");
    // target/<profile>/deps/<test> → target/<profile>/<place>
    let path = test.ancestors().nth(2).expect("cargo's layout").join(place);
    let modified = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified());
    let time =
        modified(&path).unwrap_or_else(|error| panic!("{}: {error}: run {remedy} first", path.display()));
    // `path: source source …`, as cargo writes it.
    let sources = fs::read_to_string(path.with_extension("d")).unwrap_or_default();
    let newer = |source: &&str| modified(Path::new(source)).is_ok_and(|changed| changed > time);
    let newer = sources.split_whitespace().skip(1).find(newer);
    assert!(newer.is_none(), "the program is older than {newer:?}: run {remedy} first");
    path
}

//! An agent with a web server on TCP, a certificate, and a site.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::Place,
    ports,
    process::{Running, run, text},
    venv,
};
use tempfile::TempDir;

/// What the certificate is for.
pub(crate) const NAME: &str = "gw.example.net";

/// The clients' own limits are shorter.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/process/web");

/// An agent that serves, and a site behind it.
#[derive(Debug)]
pub(crate) struct Bed {
    pub(crate) agent: Agent,
    pub(crate) folder: TempDir,
    pub(crate) site: Running,
    /// Where it listens, on TCP and on UDP.
    pub(crate) tcp: SocketAddr,
    pub(crate) python: PathBuf,
    pub(crate) site_address: SocketAddr,
}

impl Bed {
    /// With a certificate for a key of this kind, and further lines of `[http]`; `None`: the test is skipped.
    #[track_caller]
    pub(crate) fn new(test: &str, needs: &[Need], key: &str, more: &str) -> Option<Self> {
        if !needs::met(test, needs) {
            return None;
        }
        let python = venv::python(test)?.to_owned();
        let folder = tempfile::tempdir().unwrap();
        certificate(folder.path(), key, "first");
        let (tcp, site) = (ports::loopback(), ports::loopback());
        let mut command = Place::Host.command(&python);
        command.arg(Path::new(FOLDER).join("site.py")).arg(site.port().to_string());
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).stdout(Stdio::null());
        let process = Running::start("site", &mut command);
        clock::until("the site listens", PATIENCE, || {
            std::net::TcpStream::connect(site).map(drop).map_err(|error| error.to_string())
        });
        let mut agent = Agent::new("agent", &Place::Host);
        let here = folder.path().display();
        agent.configure(&format!(
            "transport.listen = [\"{tcp}\"]\n[http]\ncertificate_file = \"{here}/cert.pem\"\nkey_file = \
             \"{here}/key.pem\"\nnames = [\"{NAME}\"]\n{more}listen = [\"{tcp}\"]\nsite = \"http://{site}\"\n"
        ));
        agent.start();
        Some(Self { agent, folder, site: process, tcp, python, site_address: site })
    }

    /// What curl says of a page.
    #[track_caller]
    pub(crate) fn curl(&self, options: &[&str], path: &str) -> String {
        self.curl_at(self.tcp, options, path)
    }

    /// The same, of another address.
    #[track_caller]
    pub(crate) fn curl_at(&self, at: SocketAddr, options: &[&str], path: &str) -> String {
        let output = self.curl_output(at, options, path);
        assert!(output.status.success(), "{options:?} {path}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// How curl ends.
    pub(crate) fn try_curl(&self, options: &[&str], path: &str) -> Output {
        self.curl_output(self.tcp, options, path)
    }

    fn curl_output(&self, at: SocketAddr, options: &[&str], path: &str) -> Output {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", "60", "--cacert"]);
        command.arg(self.folder.path().join("cert.pem"));
        command.args(["--resolve", &format!("{NAME}:{}:{}", at.port(), at.ip())]).args(options);
        run(command.arg(format!("https://{NAME}:{}{path}", at.port())), LIMIT)
    }

    /// What openssl says of a handshake and of a page over it.
    pub(crate) fn openssl(&self, options: &[&str]) -> String {
        let ask = format!("GET /echo HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n");
        let file = self.folder.path().join("ask");
        fs::write(&file, ask).unwrap();
        // The harness gives a command no input.
        let mut command = Command::new("sh");
        command.args(["-c", "exec openssl \"$@\" < \"$0\""]).arg(file);
        command.args(["s_client", "-ign_eof", "-connect", &self.tcp.to_string(), "-CAfile"]);
        command.arg(self.folder.path().join("cert.pem")).args(options);
        if !options.iter().any(|option| option.ends_with("servername")) {
            command.args(["-servername", NAME]);
        }
        let output = run(&mut command, LIMIT);
        text(&output.stdout) + &text(&output.stderr)
    }

    /// Runs a visitor to its end; what it met.
    #[track_caller]
    pub(crate) fn visit(&self, verb: &str) -> String {
        let mut command = Command::new(&self.python);
        command.arg(Path::new(FOLDER).join("visitor.py")).args([verb, &self.tcp.port().to_string()]);
        let output = run(command.env("PYTHONDONTWRITEBYTECODE", "1"), LIMIT);
        assert!(output.status.success(), "{verb}: {}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    }

    /// Starts a visitor of an address.
    pub(crate) fn visitor(&self, verb: &str, at: SocketAddr) -> Running {
        let mut command = Place::Host.command(&self.python);
        command.arg(Path::new(FOLDER).join("visitor.py")).args([verb, &at.port().to_string()]);
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        Running::start(verb, &mut command)
    }

    /// Changes the configuration, and reloads.
    #[track_caller]
    pub(crate) fn reconfigure(&self, change: impl FnOnce(String) -> String) {
        let before = fs::read_to_string(self.agent.config()).unwrap();
        let after = change(before.clone());
        assert_ne!(after, before);
        fs::write(self.agent.config(), after).unwrap();
        let _said = self.agent.ask(&["reload"]);
    }
}

/// Writes `cert.pem` and `key.pem`, which is of this kind; `by` is in the name of its issuer.
#[track_caller]
pub(crate) fn certificate(folder: &Path, key: &str, by: &str) {
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-nodes", "-days", "60", "-subj", &format!("/CN={by}")]);
    command.args(["-addext", &format!("subjectAltName=DNS:{NAME}"), "-newkey"]);
    match key.strip_prefix("ec:") {
        Some(curve) => command.args(["ec", "-pkeyopt", &format!("ec_paramgen_curve:{curve}")]),
        None => command.arg(key),
    };
    command.arg("-keyout").arg(folder.join("key.pem")).arg("-out").arg(folder.join("cert.pem"));
    let output = run(&mut command, LIMIT);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

//! A real server, reached directly and over a forward.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::Plan,
    process::Running,
};
use tempfile::TempDir;

use culvert_tests::ports::loopback;

/// A server of these tests, with its files.
pub(crate) struct Server {
    address: SocketAddr,
    pub(crate) folder: TempDir,
    _process: Running,
}

impl Server {
    /// The server that `command` makes of its address and its folder.
    pub(crate) fn start(what: &str, command: impl FnOnce(SocketAddr, &Path) -> Command) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // sshd and nginx change their user, or look at who may write there.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let address = loopback();
        let mut command = command(address, folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Running::start(what, &mut command);
        clock::until(&format!("{what} listens"), PATIENCE, || TcpStream::connect(address).map(drop));
        Self { address, folder, _process: process }
    }

    /// What `attempt` gives over a forward must be what it gives directly, and is returned.
    #[track_caller]
    pub(crate) fn compared(&self, attempt: impl Fn(SocketAddr) -> String) -> String {
        let ingress = loopback();
        let _pair = Plan::default().service("server", self.address, "").forward("server", ingress).start();
        let [direct, forward] = [self.address, ingress].map(attempt);
        assert_eq!(forward, direct, "the forward's, and directly");
        forward
    }
}

/// Whether the agents' needs and `tools` are met.
#[track_caller]
pub(crate) fn met(test: &str, tools: &[Need]) -> bool {
    needs::met(test, &[needs::AGENTS, tools].concat())
}

//! Two hosts with a bottleneck between them: network namespaces, and a router that runs `path_relay`.
//!
//! ```text
//!  left 192.0.2.1 ── west  router  east ── 198.51.100.1 right
//!                       path_relay
//! ```

use std::{
    io::{BufRead, BufReader, Lines, Write},
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

use serde_json::Value;

use crate::{agent::built, links, place::Place, process::Running};

/// Where cargo puts the relay.
const PROGRAM: &str = "examples/path_relay";

/// What builds it, unless all tests are built.
const REMEDY: &str = "cargo build -p culvert-tests --example path_relay";

/// A path; dropping it ends the relay and removes the namespaces.
#[derive(Debug)]
pub struct Path {
    relay: Running,
    input: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    namespaces: links::Row,
}

impl Path {
    /// The addresses of the left host.
    pub const LEFT: [&str; 2] = ["192.0.2.1", "2001:db8:0:1::1"];
    /// The addresses of the right host.
    pub const RIGHT: [&str; 2] = ["198.51.100.1", "2001:db8:0:2::1"];

    /// A path of which `path_relay` is told this: `["--rate", "50Mbit", "--delay", "10ms"]`.
    ///
    /// # Panics
    /// When the relay is not built or does not start.
    #[must_use]
    #[track_caller]
    pub fn new(options: &[&str]) -> Self {
        let namespaces = links::Row::new([Self::LEFT, Self::RIGHT]);
        let mut command = Self::relay(&namespaces.place("router"));
        command.args(options);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut relay = Running::start("path_relay", &mut command);
        let input = relay.child().stdin.take().expect("asked for above");
        let output = relay.child().stdout.take().expect("asked for above");
        let mut path = Self { relay, input, answers: BufReader::new(output).lines(), namespaces };
        assert_eq!(path.answer()["ready"], true);
        path
    }

    /// The left host, then the right one.
    #[must_use]
    pub fn places(&self) -> [Place; 2] {
        ["left", "right"].map(|role| self.namespaces.place(role))
    }

    /// The command that runs the relay in a router.
    ///
    /// # Panics
    /// When it is not built.
    #[must_use]
    #[track_caller]
    pub fn relay(router: &Place) -> Command {
        let mut command = router.command(built(PROGRAM, REMEDY));
        command.args(["--left", "west", "--right", "east"]);
        command
    }

    /// The router; its interfaces are `west` and `east`, and the relay's devices.
    #[must_use]
    pub fn router(&self) -> Place {
        self.namespaces.place("router")
    }

    /// Changes the path: `rate=50Mbit,delay=20ms`, or in one direction `there:loss=0.1`.
    ///
    /// # Panics
    /// When the relay has ended, as it does over a change that it does not understand.
    #[track_caller]
    pub fn set(&mut self, changes: &str) {
        self.ask(changes);
    }

    /// What became of the packets so far: `["there"]["passed"]` and so on; `["void"]` is empty unless the relay itself failed.
    ///
    /// # Panics
    /// When the relay has ended.
    #[must_use]
    #[track_caller]
    pub fn account(&mut self) -> Value {
        self.ask("")
    }

    #[track_caller]
    fn ask(&mut self, line: &str) -> Value {
        let asked = writeln!(self.input, "{line}");
        assert!(asked.is_ok(), "the relay has ended: {:?}", self.relay.ended());
        self.answer()
    }

    #[track_caller]
    fn answer(&mut self) -> Value {
        let line = self.answers.next().and_then(Result::ok);
        let line = line.unwrap_or_else(|| panic!("the relay has ended: {:?}", self.relay.ended()));
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }
}

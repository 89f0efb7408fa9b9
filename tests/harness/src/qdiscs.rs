//! A cable with the kernel's own qdiscs in it, netem among them, whatever the host's kernel has: `tests/namespace/qdiscs/cable`.

use std::{
    io::{BufRead, BufReader, Lines, Write},
    path::Path,
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

use serde_json::Value;

use crate::{
    needs::{self, Need},
    place::Place,
    process::Running,
};

/// What such a cable needs, besides what [`needs::NETNS`] says.
const NEEDS: &[Need] =
    &[Need::Tool("linux.uml", "user-mode-linux"), Need::Tool("ethtool", "ethtool"), Need::Tun];

/// Whether the test can have one: not on a machine for which Debian does not build User Mode Linux.
#[must_use]
#[track_caller]
pub fn possible(test: &str) -> bool {
    if cfg!(target_arch = "x86_64") {
        return needs::met(test, NEEDS);
    }
    needs::skipped(test, "User Mode Linux, which Debian has for x86-64 alone");
    false
}

/// The cable. Dropping it ends the router, and takes both interfaces away.
#[derive(Debug)]
pub struct Qdiscs {
    cable: Running,
    input: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Qdiscs {
    /// A cable between an interface of this name at either place. Packets of the left leave the router by [`vec1`](Self::set), those
    /// of the right by `vec0`.
    ///
    /// # Panics
    /// When the router does not start.
    #[must_use]
    #[track_caller]
    pub fn between(left: &Place, right: &Place, interface: &str) -> Self {
        let end = |place: &Place| match place {
            Place::Namespace(name) => format!("{name}:{interface}"),
            Place::Host => panic!("the host has its own cables"),
        };
        let mut command = Command::new(needs::python().expect("a need of all agents"));
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("namespace/qdiscs/cable"));
        command.args(["--left", &end(left), "--right", &end(right)]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut cable = Running::start("tests/namespace/qdiscs/cable", &mut command);
        let input = cable.child().stdin.take().expect("asked for above");
        let output = cable.child().stdout.take().expect("asked for above");
        let mut qdiscs = Self { cable, input, answers: BufReader::new(output).lines() };
        assert_eq!(qdiscs.answer()["ready"], true);
        qdiscs
    }

    /// Gives an interface of the router, `vec0` or `vec1`, these qdiscs, each below the one before.
    ///
    /// # Panics
    /// When the router's kernel refuses.
    #[track_caller]
    pub fn set(&mut self, interface: &str, qdiscs: &[&str]) {
        for (number, qdisc) in (1..).zip(qdiscs) {
            let place = match number {
                1 => "root".to_owned(),
                _ => format!("parent {}:1", number - 1),
            };
            self.tell(&format!("tc qdisc replace dev {interface} {place} handle {number}: {qdisc}"));
        }
    }

    /// Packets that the outermost qdisc of an interface, and those below it, have dropped.
    ///
    /// # Panics
    /// When `tc` says something else.
    #[must_use]
    #[track_caller]
    pub fn dropped(&mut self, interface: &str) -> u64 {
        let text = self.tell(&format!("tc -statistics -json qdisc show dev {interface} root"));
        let qdiscs: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        qdiscs[0]["drops"].as_u64().unwrap_or_else(|| panic!("no drops: {text}"))
    }

    /// Runs a command in the router, and returns what it printed.
    #[track_caller]
    fn tell(&mut self, command: &str) -> String {
        let asked = writeln!(self.input, "{command}");
        assert!(asked.is_ok(), "the router has ended: {:?}", self.cable.ended());
        let answer = self.answer();
        let output = answer["output"].as_str().expect("a text");
        assert_eq!(answer["status"], 0, "{command}: {output}");
        output.to_owned()
    }

    #[track_caller]
    fn answer(&mut self) -> Value {
        let line = self.answers.next().and_then(Result::ok);
        let line = line.unwrap_or_else(|| panic!("the router has ended: {:?}", self.cable.ended()));
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }
}

//! A host as an operator sees it: a shell with folders of its own.

use std::{
    io::{BufRead, BufReader, Write},
    process::{ChildStdin, Stdio},
    sync::mpsc::{Receiver, sync_channel},
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    clock::{self, PATIENCE},
    place::Place,
    process::Running,
};

/// A shell at a host whose `/etc`, `/run` and `/var/lib` are empty and vanish with it.
pub(crate) struct Shell {
    _process: Running,
    input: ChildStdin,
    output: Receiver<String>,
}

/// What the shell prints after each command, with its exit code.
const END: &str = "-- ended with ";

impl Shell {
    pub(crate) fn at(place: &Place) -> Self {
        let mut command = place.command("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-s"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Running::start("a shell", &mut command);
        let input = process.child().stdin.take().unwrap();
        let lines = BufReader::new(process.child().stdout.take().unwrap()).lines();
        let (sender, output) = sync_channel(10_000);
        // Ends with the shell, whose output it reads.
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let mut shell = Self { _process: process, input, output };
        for folder in ["/etc", "/run", "/var/lib"] {
            shell.does(&format!("mount -t tmpfs tmpfs {folder}"));
        }
        let folder = binary().parent().unwrap();
        shell.does(&format!("export PATH={}:$PATH:/usr/sbin:/sbin", folder.display()));
        shell
    }

    /// Runs a command line to its end: its exit code and what it printed.
    #[track_caller]
    pub(crate) fn tries(&mut self, line: &str) -> (String, String) {
        writeln!(self.input, "{{ {line}\n}} 2>&1 </dev/null; echo \"{END}$?\"").unwrap();
        let mut said = String::new();
        loop {
            let next = self.output.recv_timeout(Duration::from_secs(60));
            let next = next.unwrap_or_else(|error| panic!("{line}: {error}: {said}"));
            if let Some(code) = next.strip_prefix(END) {
                return (code.to_owned(), said);
            }
            said += &next;
            said.push('\n');
        }
    }

    #[track_caller]
    pub(crate) fn does(&mut self, line: &str) -> String {
        let (code, said) = self.tries(line);
        assert_eq!(code, "0", "{line}: {said}");
        said
    }

    /// Starts the daemon with the line that was printed for it, and waits until it answers.
    #[track_caller]
    pub(crate) fn starts(&mut self, line: &str) {
        self.does(&format!("{line} 2>/run/log &"));
        clock::until("the daemon answers", PATIENCE, || match self.tries("culvert status") {
            (code, _) if code == "0" => Ok(()),
            (_, said) => Err(said + &self.tries("cat /run/log").1),
        });
    }
}

//! From nothing to the first ping, with the commands that `culvert init` prints, and none but those.

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
    probe,
    process::Running,
    sites::{Family, Plan},
};

use super::possible;

/// A shell at a host whose `/etc`, `/run` and `/var/lib` are empty and vanish with it.
struct Shell {
    _process: Running,
    input: ChildStdin,
    output: Receiver<String>,
}

/// What the shell prints after each command, with its exit code.
const END: &str = "-- ended with ";

impl Shell {
    fn at(place: &Place) -> Self {
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
    fn tries(&mut self, line: &str) -> (String, String) {
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
    fn does(&mut self, line: &str) -> String {
        let (code, said) = self.tries(line);
        assert_eq!(code, "0", "{line}: {said}");
        said
    }

    /// Starts the daemon with the line that was printed for it, and waits until it answers.
    #[track_caller]
    fn starts(&mut self, line: &str) {
        self.does(&format!("{line} 2>/run/log &"));
        clock::until("the daemon answers", PATIENCE, || match self.tries("culvert status") {
            (code, _) if code == "0" => Ok(()),
            (_, said) => Err(said + &self.tries("cat /run/log").1),
        });
    }
}

/// The command of a step that was printed.
#[track_caller]
fn command<'a>(said: &'a str, begin: &str) -> &'a str {
    let found =
        said.lines().filter_map(|line| line.strip_prefix("    ")).find(|line| line.starts_with(begin));
    found.unwrap_or_else(|| panic!("no command begins with {begin:?}: {said}"))
}

/// Two fresh hosts. The peer is added before the exit's daemon runs; or while it does, with the networks behind both hosts.
fn first_ping(first: &str, running: bool) {
    let [behind_exit, behind_entry] =
        if running { [" --allowed-ip 10.9.1.0/24", " --allowed-ip 10.9.2.0/24"] } else { [""; 2] };
    let sites = Plan::two().prepare();
    let mut exit = Shell::at(&sites.a().gateway);
    let mut entry = Shell::at(&sites.b().gateway);
    // The exit: one command. Its host finds out the address.
    let told = exit.does(first);
    assert!(told.contains("culvert://192.0.2.2:4433/"), "{told}");
    let start = command(&told, "culvert run").to_owned();
    if running {
        exit.starts(&start);
    }
    // The entry: the command that the exit printed.
    let at_entry = entry.does(&(command(&told, "culvert init").to_owned() + behind_exit));
    // The exit again, with what the entry printed.
    exit.does(&(command(&at_entry, "culvert peer add").to_owned() + behind_entry));
    if !running {
        exit.starts(&start);
    }
    entry.starts(command(&at_entry, "culvert run"));
    let ping = command(&at_entry, "ping").replacen("ping", "ping -c 1 -W 1", 1);
    clock::until("the first ping", PATIENCE, || match entry.tries(&ping) {
        (code, _) if code == "0" => Ok(()),
        (_, said) => Err(said),
    });
    if running {
        let (from, to) = (&sites.b().host, sites.a().host_address(Family::V4));
        // What waits for longer than the queue's time, which is short by default, is dropped on a busy machine.
        clock::until("pings between the networks", PATIENCE, || probe::try_to_reach(from, to, &[]));
    }
    // Who reads on finds no mistake in what was written.
    for shell in [&mut exit, &mut entry] {
        shell.does("culvert check --config /etc/culvert/agent.toml");
        assert_eq!(shell.does("stat -c %a /etc/culvert /etc/culvert/identity.key"), "750\n600\n");
    }
}

#[test]
fn what_init_prints_leads_to_a_ping() {
    if possible("the first steps") {
        first_ping("culvert init --role exit --tun", false);
    }
}

#[test]
fn what_init_prints_leads_to_a_ping_through_a_daemon_that_runs() {
    if possible("the first steps at a running exit") {
        first_ping("culvert init --role exit --tun --tun fd09::1/64", true);
    }
}

//! A daemon in a container of 64 MiB, about which nothing is configured.

use std::{
    fs::{self, OpenOptions},
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process, thread,
    time::Duration,
};

use culvert_tests::{
    agent::binary,
    client::Client,
    clock,
    needs::{self, Need},
    pair::Plan,
    ports,
    process::Running,
    upstream::Echo,
};

const LIMIT: u64 = 64 << 20;

/// A control group whose processes may have [`LIMIT`] bytes; dropping it removes it.
struct Container(PathBuf);

impl Container {
    /// Of either version of control groups, whichever has the memory of this host.
    fn new() -> Result<Self, String> {
        let top = Path::new("/sys/fs/cgroup");
        // A host that has version 1 has a file system of another kind there, which takes whatever is written.
        let controllers = fs::read_to_string(top.join("cgroup.controllers")).unwrap_or_default();
        let (root, limit) = if controllers.split_whitespace().any(|name| name == "memory") {
            set(&top.join("cgroup.subtree_control"), "+memory")?;
            (top.to_owned(), "memory.max")
        } else {
            (top.join("memory"), "memory.limit_in_bytes")
        };
        if !root.join("cgroup.procs").exists() {
            return Err("control groups that limit memory".to_owned());
        }
        let container = Self(root.join(format!("culvert-test-{}", process::id())));
        fs::create_dir(&container.0).map_err(|error| format!("{}: {error}", container.0.display()))?;
        set(&container.0.join(limit), &LIMIT.to_string())?;
        Ok(container)
    }

    /// Writes a program to `folder` that is culvert in this container.
    fn program(&self, folder: &Path) -> PathBuf {
        let path = folder.join("contained");
        let (group, culvert) = (self.0.display(), binary().display());
        fs::write(&path, format!("#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {culvert} \"$@\"\n"))
            .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Empty once its process is reaped; one that stays is in nobody's way.
        drop(fs::remove_dir(&self.0));
    }
}

/// Writes to a file of the kernel's, which is there.
fn set(path: &Path, value: &str) -> Result<(), String> {
    let written =
        OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(value.as_bytes()));
    written.map_err(|error| format!("{}: {error}", path.display()))
}

/// Sends back what it gets, on one port.
fn echo_streams(listener: &TcpListener) {
    for stream in listener.incoming() {
        let Ok(mut stream) = stream else { return };
        thread::spawn(move || {
            let mut bytes = [0; 16_384];
            while let Ok(count @ 1..) = stream.read(&mut bytes) {
                if stream.write_all(&bytes[..count]).is_err() {
                    return;
                }
            }
        });
    }
}

/// The most memory that a process has had, in bytes.
fn peak(process: &Running) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn a_container_of_64_mib_holds_sixty_forwards_whose_clients_do_not_read() {
    if !needs::met("container", &[needs::AGENTS, &[Need::RootFor("control groups")]].concat()) {
        return;
    }
    let container = match Container::new() {
        Ok(container) => container,
        Err(why) => return needs::skipped("container", &why),
    };
    let listener = TcpListener::bind(ports::loopback()).unwrap();
    let (echo, streams) = (Echo::new(), listener.local_addr().unwrap());
    thread::spawn(move || echo_streams(&listener));
    let (ingress, port) = (ports::loopback(), ports::loopback());
    let plan = Plan::default().service("echo", echo.address, "").forward("echo", ingress);
    let mut pair = plan.service("streams", streams, "").forward("streams", port).prepare();
    let program = container.program(pair.entry.folder());
    pair.entry.upgrade(&program);
    pair.exit.start();
    pair.entry.start();
    pair.wait_for_connection();
    let own = fs::read_to_string(format!("/proc/{}/cgroup", pair.entry.process().pid())).unwrap();
    let name = container.0.file_name().unwrap().to_str().unwrap();
    assert!(own.contains(name), "{own}");

    let end = clock::now() + Duration::from_secs(6);
    let mut client = Client::new(0, ingress);
    let mut echoed = 0;
    let sent: usize = thread::scope(|scope| {
        let clients: Vec<_> = (0..60)
            .map(|_| {
                scope.spawn(|| {
                    let mut stream = TcpStream::connect(port).unwrap();
                    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
                    let mut sent = 0;
                    while clock::now() < end {
                        match stream.write(&[7; 65_536]) {
                            Ok(count) => sent += count,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                            // Memory for forwards is used up, and this one has been stalled for longest.
                            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                            Err(error) => panic!("after {sent} bytes: {error}"),
                        }
                    }
                    // It stays open until all have sent.
                    (stream, sent)
                })
            })
            .collect();
        while clock::now() < end {
            client.converse(10);
            echoed += 10;
            thread::sleep(Duration::from_millis(20));
        }
        let open: Vec<(TcpStream, usize)> =
            clients.into_iter().map(|client| client.join().unwrap()).collect();
        client.converse(10);
        open.iter().map(|(_, sent)| sent).sum()
    });
    let process = pair.entry.process();
    assert!(process.ended().is_none(), "the daemon was killed");
    let peak = peak(process);
    println!("{sent} bytes taken, {echoed} echoes, at most {peak} bytes of memory");
    assert!(sent > 4 << 20, "{sent} bytes: the forwards did not fill");
    assert!(peak < LIMIT / 4 * 3, "{peak} bytes");
    assert!(echoed > 100, "{echoed}");
}

//! PostgreSQL, whose client vanishes with a lock: the lock is free as soon over a forward as it is directly.

use std::{
    fs,
    io::Write as _,
    net::SocketAddr,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    time::{Duration, Instant},
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::Plan,
    place::{Cable, Place},
    ports,
    process::{Running, run, text},
};
use tempfile::TempDir;

use culvert_tests::ports::loopback;

/// The least that the daemon's keepalive can be, and the same of PostgreSQL's own.
const KEEPALIVE: &str = "keepalive = \"1s\"\n";
const OWN_KEEPALIVE: [&str; 3] =
    ["tcp_keepalives_idle=1", "tcp_keepalives_interval=1", "tcp_keepalives_count=3"];

/// A server of its own, at one port of all addresses of its host.
struct Database {
    port: u16,
    place: Place,
    folder: TempDir,
    _process: Running,
}

/// Where Debian has the programs of the server: not in `PATH`.
fn programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").unwrap();
    let mut folders: Vec<PathBuf> = versions.map(|version| version.unwrap().path().join("bin")).collect();
    folders.sort();
    folders.pop().unwrap()
}

/// A command as the user `postgres`: the server runs as nobody else.
fn as_postgres(place: &Place, program: &Path) -> Command {
    let mut command = place.command(needs::tool("setpriv").unwrap());
    command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--"]).arg(program);
    command.stdin(Stdio::null());
    command
}

impl Database {
    fn start(place: &Place) -> Self {
        let (folder, port) = (tempfile::tempdir().unwrap(), place.enter(ports::free));
        let ids = fs::read_to_string("/etc/passwd").unwrap();
        let entry: Vec<&str> =
            ids.lines().find(|line| line.starts_with("postgres:")).unwrap().split(':').collect();
        let [user, group] = [2, 3].map(|field: usize| entry[field].parse().ok());
        chown(folder.path(), user, group).unwrap();
        let data = folder.path().join("data");
        let mut made = as_postgres(place, &programs().join("initdb"));
        made.args(["--auth=trust", "--no-sync", "--username=postgres", "--pgdata"]).arg(&data);
        let made = run(&mut made, Duration::from_secs(60));
        assert!(made.status.success(), "{}", text(&made.stderr));
        let mut server = as_postgres(place, &programs().join("postgres"));
        server.arg("-D").arg(&data).args(["-h", "*", "-p", &port.to_string(), "-c", "fsync=off"]);
        server.args(["-c", "max_connections=20", "-c", "shared_buffers=16MB"]);
        server.arg("-c").arg(format!("unix_socket_directories={}", folder.path().display()));
        server.args(OWN_KEEPALIVE.iter().flat_map(|option| ["-c", option]));
        fs::write(data.join("pg_hba.conf"), "host all all 0.0.0.0/0 trust\nlocal all all trust\n").unwrap();
        server.stdout(Stdio::null()).stderr(Stdio::null());
        let process = Running::start("postgres", &mut server);
        let database = Self { port, place: place.clone(), folder, _process: process };
        clock::until("the database answers", PATIENCE, || database.ask("SELECT 1").map(drop));
        database
    }

    /// What the server says, asked on its own host.
    fn ask(&self, query: &str) -> Result<String, String> {
        let mut asked = self.place.command(needs::tool("psql").unwrap());
        asked.args(["-X", "-A", "-t", "-U", "postgres", "-p", &self.port.to_string(), "-c", query, "-h"]);
        asked.arg(self.folder.path()).stdin(Stdio::null());
        let output = run(&mut asked, Duration::from_secs(20));
        match output.status.success() {
            true => Ok(text(&output.stdout).trim().to_owned()),
            false => Err(text(&output.stderr)),
        }
    }

    /// How many hold the lock.
    fn holders(&self) -> usize {
        let query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
        self.ask(query).unwrap().parse().unwrap()
    }

    /// How many connections of the server have sent what is not acknowledged. The kernel repeats that for minutes, and sends no keepalive
    /// meanwhile.
    fn unanswered(&self) -> usize {
        let table = self.place.enter(|| fs::read_to_string("/proc/thread-self/net/tcp")).unwrap();
        let port = format!(":{:04X}", self.port);
        table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|fields| fields[1].ends_with(&port) && !fields[4].starts_with("00000000"))
            .count()
    }
}

/// A client in the middle of its session, with a lock.
struct Holder {
    client: Child,
    _words: ChildStdin,
}

impl Holder {
    fn begin(place: &Place, address: SocketAddr, lock: u32) -> Self {
        let mut client = place.command(needs::tool("psql").unwrap());
        client.args(["-X", "-q", "-U", "postgres", "-h", &address.ip().to_string()]);
        client.args(["-p", &address.port().to_string()]);
        client.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut client = client.spawn().unwrap();
        let mut words = client.stdin.take().unwrap();
        writeln!(words, "SELECT pg_advisory_lock({lock});").unwrap();
        Self { client, _words: words }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop((self.client.kill(), self.client.wait()));
    }
}

#[test]
fn the_lock_of_a_client_that_vanishes_is_free_as_soon_over_a_forward_as_directly() {
    let tools = [
        Need::Tool("psql", "postgresql-client"),
        // Which package has the server's programs depends on their version; this one comes with each.
        Need::Tool("pg_lsclusters", "postgresql"),
    ];
    if !needs::met("PostgreSQL", &[needs::NETNS, &tools].concat()) {
        return;
    }
    let cable = Cable::new();
    let [there, here] = cable.places();
    let database = Database::start(&here);
    let host = Cable::SECOND[0].parse().unwrap();
    let direct = SocketAddr::new(host, database.port);
    let ingress = SocketAddr::new(host, here.enter(ports::free));
    let upstream = SocketAddr::new(loopback().ip(), database.port);
    let plan = Plan::default().at([here.clone(), here]);
    let pair = plan.service("database", upstream, "").forward("database", ingress).entry(KEEPALIVE).start();

    let mut holders = [Holder::begin(&there, direct, 1), Holder::begin(&there, ingress, 2)];
    clock::until("both have their locks", PATIENCE, || match database.holders() {
        2 => Ok(()),
        other => Err(format!("{other}")),
    });
    clock::until("the clients have read their answers", PATIENCE, || match database.unanswered() {
        0 => Ok(()),
        other => Err(format!("{other} have not")),
    });
    there.tell(&["ip", "link", "set", "veth0", "down"]);
    let begin: Instant = clock::now();
    clock::until("both locks are free", PATIENCE, || match database.holders() {
        0 => Ok(()),
        other => Err(format!("{other} are held")),
    });
    println!("both locks are free after {:?}", begin.elapsed());
    pair.exit.wait_for_count("culvert_tcp_streams", &[], 0);
    for holder in &mut holders {
        assert!(holder.client.try_wait().unwrap().is_none(), "it vanished, and did not end");
    }
}

//! The PROXY protocol before datagrams, beside dnsdist: one before the entry writes the headers, one behind the exit believes them.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::Plan,
    place::Cable,
    ports::loopback,
    process::Running,
};
use tempfile::TempDir;

use crate::server::met;

/// Of the clients that the dnsdist behind the exit answers, and of one that it does not. No service is told of one with a loopback address,
/// which is another host's.
const CLIENTS: [&str; 2] = ["192.0.2.9", "2001:db8::9"];
const FORBIDDEN: &str = "192.0.2.66";

/// A dnsdist with its folder.
struct Dnsdist {
    folder: TempDir,
    _process: Running,
}

impl Dnsdist {
    /// Starts one with these lines of its configuration, in which `FOLDER` is its folder, that listens at `at`, for TCP too.
    fn start(lines: &str, at: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        let lines = lines.replace("FOLDER", &folder.path().display().to_string());
        fs::write(&file, format!("setSecurityPollSuffix(\"\")\n{lines}")).unwrap();
        let output = fs::File::create(folder.path().join("out")).unwrap();
        let mut command = Command::new(needs::tool("dnsdist").unwrap());
        command.args(["--supervised", "--disable-syslog", "-C"]).arg(&file);
        command.stdin(Stdio::null()).stderr(output.try_clone().unwrap()).stdout(output);
        let process = Running::start("dnsdist", &mut command);
        clock::until("dnsdist listens", PATIENCE, || {
            std::net::TcpStream::connect(at).map(drop).map_err(|error| {
                format!("{error} {}", fs::read_to_string(folder.path().join("out")).unwrap_or_default())
            })
        });
        Self { folder, _process: process }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("queries")).unwrap_or_default()
    }
}

/// A name server that answers each question with no record.
fn name_server() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 1_500];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // A response, recursion available.
            buffer[2] |= 0x80;
            buffer[3] = 0x80;
            let _sent = socket.send_to(&buffer[..length], from).is_ok();
        }
    });
    address
}

/// Asks the dnsdist at `server` from `client`; from which address, and whether there was an answer.
fn ask(client: IpAddr, server: SocketAddr, id: u16) -> (SocketAddr, bool) {
    let socket = UdpSocket::bind((client, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    // The flags: recursion desired; one question, example.net A IN.
    let mut query = id.to_be_bytes().to_vec();
    query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    query.extend(b"\x07example\x03net\0\0\x01\0\x01");
    socket.send_to(&query, server).unwrap();
    let mut answer = [0; 1_500];
    // The rcode is NOERROR.
    let answered = socket.recv(&mut answer).is_ok_and(|length| {
        length >= query.len() && answer[..2] == query[..2] && answer[2] & 0x80 != 0 && answer[3] & 15 == 0
    });
    (socket.local_addr().unwrap(), answered)
}

#[test]
fn dnsdist_before_and_behind_sees_the_clients_of_both_families() {
    if met("PROXY, dnsdist", &[Need::Tool("dnsdist", "dnsdist")])
        && needs::met("PROXY, dnsdist", needs::NETNS)
    {
        let cable = Cable::new();
        let [place, _] = cable.places();
        for address in CLIENTS.into_iter().chain([FORBIDDEN]) {
            place.tell(&["ip", "address", "add", address, "dev", "lo"]);
        }
        place.enter(dnsdist);
    }
}

fn dnsdist() {
    let (behind_at, names) = (loopback(), name_server());
    // Its list of clients is about those that the headers name. Health checks of the dnsdist before the entry have a header LOCAL: to it
    // they come from the exit.
    let behind = Dnsdist::start(
        &format!(
            "setLocal(\"{behind_at}\")\nsetProxyProtocolACL({{\"127.0.0.0/8\"}})\nsetProxyProtocolApplyACLToProxiedClients(true)\n\
             setACL({{\"127.0.0.0/8\", \"{}/32\", \"{}/128\"}})\nnewServer({{address=\"{names}\"}})\n\
             addAction(AllRule(), LogAction(\"FOLDER/queries\", false, false, false, false))\n",
            CLIENTS[0], CLIENTS[1]
        ),
        behind_at,
    );
    // The proxy talks to the entry over either family.
    let entries = [loopback(), SocketAddr::new("::1".parse().unwrap(), loopback().port())];
    let mut plan = Plan::default().service("dns", behind_at, "protocol = \"udp\"\nproxy_protocol = \"v2\"\n");
    for listen in entries {
        plan = plan.entry(&format!(
            "[[udp]]\nlisten = \"{listen}\"\npeer = \"exit\"\nservice = \"dns\"\naccept_proxy = [\"127.0.0.0/8\", \"::1/128\"]\n"
        ));
    }
    let pair = plan.start();
    let mut ids = 1..;
    for entry in entries {
        let port = loopback().port();
        let at = |client: &str| SocketAddr::new(client.parse().unwrap(), port);
        let listen = CLIENTS.map(|client| format!("addLocal(\"{}\")\n", at(client))).concat();
        let _before = Dnsdist::start(
            &format!(
                "{}setACL({{\"0.0.0.0/0\", \"::/0\"}})\nnewServer({{address=\"{entry}\", useProxyProtocol=true, checkInterval=1}})\n\
                 addAction(AllRule(), SetProxyProtocolValuesAction({{[\"224\"]=\"a TLV\"}}))\n",
                listen.replacen("addLocal", "setLocal", 1)
            ),
            at(CLIENTS[0]),
        );
        for client in CLIENTS {
            let from = clock::until("the question is answered", PATIENCE, || {
                let (from, answered) = ask(client.parse().unwrap(), at(client), ids.next().unwrap());
                if answered { Ok(from) } else { Err(behind.log()) }
            });
            // Addresses of IPv6 are written with and without brackets.
            clock::until("the log names the client", PATIENCE, || {
                let log = behind.log();
                if log.contains(&format!("{from} for example.net")) { Ok(()) } else { Err(log) }
            });
        }
        // The list of the dnsdist behind the exit is about the client, and nothing before it minds.
        let (_, answered) = ask(FORBIDDEN.parse().unwrap(), at(CLIENTS[0]), ids.next().unwrap());
        assert!(!answered, "{}", behind.log());
        assert!(!behind.log().contains(FORBIDDEN), "{}", behind.log());
    }
    assert_eq!(pair.dropped("no_proxy_header"), 0);
    pair.accounts();
}

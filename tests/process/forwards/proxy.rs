//! The PROXY protocol beside others who speak it: balancers before the entry, and servers behind the exit that log the client's address.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::{Pair, Plan},
    place::Cable,
    ports::loopback,
    process::Running,
};
use socket2::{Domain, SockAddr, Socket, Type};
use tempfile::TempDir;

use crate::server::met;

/// A process that listens, with its files.
struct Program {
    folder: TempDir,
    _process: Running,
}

impl Program {
    /// Starts `tool` with the configuration `text` of its folder; what it writes to standard output goes to the file `log`.
    fn start(tool: &str, first: &[&str], text: impl FnOnce(&Path) -> String, at: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        fs::write(&file, text(folder.path())).unwrap();
        let log = fs::File::create(folder.path().join("out")).unwrap();
        let mut command = Command::new(needs::tool(tool).unwrap());
        command.args(first).arg(&file).stdin(Stdio::null()).stdout(log).stderr(Stdio::null());
        let process = Running::start(tool, &mut command);
        clock::until(&format!("{tool} listens"), PATIENCE, || TcpStream::connect(at).map(drop));
        Self { folder, _process: process }
    }

    fn nginx(text: impl FnOnce(&Path) -> String, at: SocketAddr) -> Self {
        let whole = |folder: &Path| {
            let here = folder.display();
            format!(
                "daemon off; pid {here}/pid; error_log {here}/errors; worker_processes 1;\n\
                 load_module /usr/lib/nginx/modules/ngx_stream_module.so;\nevents {{}}\n{}",
                text(folder)
            )
        };
        Self::start("nginx", &["-c"], whole, at)
    }

    fn haproxy(text: &str, at: SocketAddr) -> Self {
        let whole = format!(
            "global\n  log stdout format raw local0\ndefaults\n  log global\n  timeout connect 10s\n  timeout client 20s\n  \
             timeout server 20s\n{text}"
        );
        Self::start("haproxy", &["-db", "-f"], |_| whole, at)
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }
}

/// An HTTP request from `client` to `balancer`: the address and port from which it was sent, and the body of the answer.
fn ask(client: IpAddr, balancer: SocketAddr) -> (SocketAddr, String) {
    let socket = Socket::new(Domain::for_address(balancer), Type::STREAM, None).unwrap();
    socket.bind(&SockAddr::from(SocketAddr::new(client, 0))).unwrap();
    socket.connect(&balancer.into()).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let from = stream.local_addr().unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.trim().to_owned());
    (from, body.unwrap_or(answer))
}

/// The agents between a balancer and a server, and where the balancer is to connect.
fn agents(server: SocketAddr) -> (Pair, SocketAddr) {
    let ingress = loopback();
    let plan = Plan::default().service("web", server, "protocol = \"tcp\"\nproxy_protocol = \"v2\"");
    let pair = plan.forward("web", ingress).entry("accept_proxy = [\"127.0.0.0/8\"]\n").start();
    (pair, ingress)
}

/// Of the clients. No service is told of one with a loopback address, which is another host's.
const CLIENTS: [&str; 2] = ["192.0.2.9", "2001:db8::9"];

/// Runs `test` where those are the host's own addresses.
fn with_addresses(test: impl FnOnce() + Send) {
    let cable = Cable::new();
    let [place, _] = cable.places();
    for address in CLIENTS {
        place.tell(&["ip", "address", "add", address, "dev", "lo"]);
    }
    place.enter(test);
}

/// The clients, and the addresses of a balancer for each.
fn clients() -> [(IpAddr, SocketAddr); 2] {
    CLIENTS.map(|client| {
        let client = client.parse().unwrap();
        (client, SocketAddr::new(client, loopback().port()))
    })
}

/// Asks as each client, and holds the answer and the log of the server against the address from which was asked.
fn compare(clients: [(IpAddr, SocketAddr); 2], log: impl Fn() -> String) {
    for (client, balancer) in clients {
        let (from, body) = ask(client, balancer);
        let wanted = format!("{} {}", from.ip(), from.port());
        assert_eq!(body, wanted, "what the server answers");
        clock::until("the server's log names the client", PATIENCE, || {
            log().contains(&wanted).then_some(()).ok_or_else(&log)
        });
    }
}

#[test]
fn nginx_before_and_behind_sees_the_clients_of_both_families() {
    let module = Need::File("/usr/lib/nginx/modules/ngx_stream_module.so", "libnginx-mod-stream");
    if met("PROXY, nginx", &[Need::Tool("nginx", "nginx-light"), module])
        && needs::met("PROXY, nginx", needs::NETNS)
    {
        with_addresses(nginx);
    }
}

fn nginx() {
    let server = loopback();
    let behind = Program::nginx(
        |folder| {
            let here = folder.display();
            format!(
                "http {{ log_format who '$proxy_protocol_addr $proxy_protocol_port'; access_log {here}/access who;\n\
                 client_body_temp_path {here}/body; proxy_temp_path {here}/proxy; fastcgi_temp_path {here}/fastcgi; \
                 uwsgi_temp_path {here}/uwsgi; scgi_temp_path {here}/scgi;\n\
                 server {{ listen {server} proxy_protocol; \
                 location / {{ return 200 \"$proxy_protocol_addr $proxy_protocol_port\\n\"; }} }} }}\n"
            )
        },
        server,
    );
    let (pair, ingress) = agents(server);
    // It writes version 1.
    let clients = clients();
    let servers: String = clients
        .iter()
        .map(|(_, at)| format!("server {{ listen {at}; proxy_pass {ingress}; proxy_protocol on; }}\n"))
        .collect();
    let _before = Program::nginx(|_| format!("stream {{ {servers} }}\n"), clients[0].1);
    compare(clients, || behind.log("access"));
    assert_eq!(pair.sum("culvert_tcp_refused_total", &[("reason", "proxy_source")]), 0);
}

#[test]
fn haproxy_before_and_behind_sees_the_clients_of_both_families() {
    if met("PROXY, HAProxy", &[Need::Tool("haproxy", "haproxy")])
        && needs::met("PROXY, HAProxy", needs::NETNS)
    {
        with_addresses(haproxy);
    }
}

fn haproxy() {
    let server = loopback();
    let behind = Program::haproxy(
        &format!(
            "frontend web\n  mode http\n  bind {server} accept-proxy\n  log-format \"%ci %cp\"\n  http-request return status 200 \
             content-type text/plain lf-string \"%[src] %[src_port]\"\n"
        ),
        server,
    );
    let (_pair, ingress) = agents(server);
    let clients = clients();
    let binds: String = clients.iter().map(|(_, at)| format!("  bind {at}\n")).collect();
    let text = format!("listen before\n  mode tcp\n{binds}  server entry {ingress} send-proxy-v2\n");
    let _before = Program::haproxy(&text, clients[0].1);
    compare(clients, || behind.log("out"));
}

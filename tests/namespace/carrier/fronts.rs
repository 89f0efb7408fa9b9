//! What stands between a peer and its exit's web server: nginx and HAProxy, which end TLS there, and a proxy that wants a password.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::Stdio,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    firewall::Blockade,
    needs::{self, Need},
    place::{Cable, Place},
    ports,
    process::Running,
};

use super::{Bed, NEEDS, UDP};

/// Starts `tool` with `config` in its folder, and waits until it listens.
#[track_caller]
fn start(place: &Place, tool: &str, args: &[&str], config: (PathBuf, String), at: SocketAddr) -> Running {
    let (path, config) = config;
    fs::write(&path, config).unwrap();
    let mut command = place.command(needs::tool(tool).unwrap());
    command.args(args).arg(&path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Running::start(tool, &mut command);
    clock::until(&format!("{tool} listens"), PATIENCE, || place.enter(|| TcpStream::connect(at).map(drop)));
    process
}

/// An exit whose web server is behind another one at the first address; that is reached at the second.
fn behind(lines: &str) -> (Bed, [SocketAddr; 2]) {
    let web = ports::loopback();
    let front = SocketAddr::new(Cable::SECOND[0].parse().unwrap(), ports::free());
    let exit = format!("listen = [\"{web}\"]\ntls = false\ntrusted = [\"127.0.0.1/32\"]");
    let bed = Bed::with(&[&format!("https://{front}/"), "AT"], lines, &exit);
    (bed, [web, front])
}

/// The session goes through the front, and the exit knows whose it is.
#[track_caller]
fn crosses(bed: &mut Bed) {
    let [_here, _there] = bed.block();
    bed.start();
    bed.crosses();
    bed.exit.wait_for_log(&["a client has opened a carrier", &format!("source={}:", Cable::FIRST[0])]);
    assert!(bed.carriers() >= 2);
}

#[test]
fn nginx_passes_carriers_on() {
    if !needs::met("carrier: nginx", &[NEEDS, &[Need::Tool("nginx", "nginx-light")]].concat()) {
        return;
    }
    let (mut bed, [web, front]) = behind("");
    let folder = bed.exit.folder().display().to_string();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {folder}/nginx-{name}; "))
        .concat();
    let config = format!(
        "daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; worker_processes 1; user root;\nevents {{}}\n\
         http {{ access_log off; {temporary}\n\
         map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}\n\
         server {{ listen {front} ssl; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;\n\
         location / {{ proxy_pass http://{web}; proxy_http_version 1.1; proxy_set_header Host $host; \
         proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade; \
         proxy_set_header X-Forwarded-For $remote_addr; proxy_set_header Forwarded \"\"; }} }} }}\n"
    );
    let [_, there] = bed.cable.places();
    let path = bed.exit.folder().join("nginx.conf");
    let _nginx = start(&there, "nginx", &["-e", "stderr", "-c"], (path, config), front);
    crosses(&mut bed);
}

#[test]
fn haproxy_passes_carriers_on() {
    if !needs::met("carrier: HAProxy", &[NEEDS, &[Need::Tool("haproxy", "haproxy")]].concat()) {
        return;
    }
    let (mut bed, [web, front]) = behind("");
    let folder = bed.exit.folder();
    let pair = ["cert.pem", "key.pem"].map(|file| fs::read_to_string(folder.join(file)).unwrap());
    fs::write(folder.join("both.pem"), pair.concat()).unwrap();
    let config = format!(
        "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n timeout tunnel 1h\n\
         frontend front\n bind {front} ssl crt {}/both.pem alpn http/1.1\n default_backend culvert\n\
         backend culvert\n option forwardfor\n server culvert {web}\n",
        folder.display()
    );
    let [_, there] = bed.cable.places();
    let path = folder.join("haproxy.cfg");
    let _haproxy = start(&there, "haproxy", &["-db", "-f"], (path, config), front);
    crosses(&mut bed);
}

#[test]
fn a_proxy_with_a_password_is_gone_through() {
    if !needs::met("carrier: a proxy", &[NEEDS, &[Need::Tool("tinyproxy", "tinyproxy-bin")]].concat()) {
        return;
    }
    let proxy = SocketAddr::new(Cable::SECOND[0].parse().unwrap(), ports::free());
    let key = format!("proxy = \"http://user:pass%2Dword@{proxy}\"\n");
    let mut bed = Bed::new(&["https://AT/"], &key);
    let [here, there] = bed.cable.places();
    let config = format!(
        "Port {}\nListen {}\nTimeout 600\nLogFile \"{}\"\nMaxClients 100\nBasicAuth user pass-word\n",
        proxy.port(),
        proxy.ip(),
        bed.exit.folder().join("tinyproxy.log").display()
    );
    let path = bed.exit.folder().join("tinyproxy.conf");
    let _proxy = start(&there, "tinyproxy", &["-d", "-c"], (path, config), proxy);
    let other = format!("ip saddr {} tcp dport != {}", Cable::FIRST[0], proxy.port());
    let direct = Blockade::new(&there, &other);
    let udp = [&here, &there].map(|place| Blockade::new(place, UDP));
    bed.start();
    bed.crosses();
    assert!(bed.carriers() >= 2);
    assert_eq!(direct.discarded(), 0, "nothing goes past the proxy");
    drop(udp);
    let log = bed.entry.log();
    assert!(!log.contains("pass%2Dword") && !log.contains("pass-word"), "the password is in the log");
}

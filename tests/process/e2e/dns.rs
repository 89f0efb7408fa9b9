//! A real DNS server behind the exit, asked by dig over UDP and TCP on one port.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::Stdio,
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::Plan,
    place::Place,
    ports,
    process::{Running, run, text},
};

/// Above the 1232 bytes that are usual over UDP, so that dig has to ask again over TCP.
const LONG_ANSWER: usize = 2000;

fn server(address: SocketAddr) -> Running {
    // A string of a TXT record has at most 255 bytes.
    let long: Vec<String> = (0..LONG_ANSWER / 200).map(|number| format!("{number:0200}")).collect();
    let mut command = Place::Host.command(needs::tool("dnsmasq").expect("asked for"));
    command.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--log-facility=-",
    ]);
    command.args(["--bind-interfaces", "--pid-file="]);
    command.arg(format!("--listen-address={}", address.ip())).arg(format!("--port={}", address.port()));
    command.arg("--host-record=short.culvert.test,192.0.2.7");
    command.arg(format!("--txt-record=long.culvert.test,{}", long.join(",")));
    if needs::is_root() {
        // It would become `nobody`, and that is not its business here.
        command.arg("--user=root");
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Running::start("dnsmasq", &mut command);
    clock::until("dnsmasq listens", PATIENCE, || TcpStream::connect(address).map(drop));
    process
}

fn dig(server: SocketAddr, args: &[&str]) -> String {
    let mut command = Place::Host.command(needs::tool("dig").expect("asked for"));
    command.arg(format!("@{}", server.ip())).args(["-p", &server.port().to_string()]);
    command.args(["+short", "+tries=3", "+time=5"]).args(args);
    let output = run(&mut command, Duration::from_secs(30));
    assert!(output.status.success(), "dig {args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

#[test]
fn dig_gets_answers_over_udp_and_tcp() {
    let tools = [Need::Tool("dnsmasq", "dnsmasq-base"), Need::Tool("dig", "bind9-dnsutils")];
    if !needs::met("DNS", needs::AGENTS) || !needs::met("DNS", &tools) {
        return;
    }
    let upstream: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let _server = server(upstream);
    let pair = Plan::default().service("dns", upstream, "").forward("dns", ingress).start();
    assert_eq!(dig(ingress, &["short.culvert.test", "A"]), "192.0.2.7");
    pair.wait_for_accounts([(1, 1); 4]);
    assert_eq!(dig(ingress, &["+tcp", "short.culvert.test", "A"]), "192.0.2.7");
    pair.entry.wait_for_count("culvert_tcp_streams_opened_total", &[], 1);
    // Truncated over UDP, then whole over TCP at the same port.
    let long = dig(ingress, &["long.culvert.test", "TXT"]);
    assert!(long.len() >= LONG_ANSWER, "{} characters: {long}", long.len());
    pair.entry.wait_for_count("culvert_tcp_streams_opened_total", &[], 2);
    pair.wait_for_accounts([(2, 2); 4]);
}

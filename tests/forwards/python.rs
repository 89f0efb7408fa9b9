//! An HTTP server in Python that refuses uploads: its answer arrives, although the server does not read the request.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::Plan,
    ports,
    process::{Running, run, text},
};

const TRIALS: usize = 20;

/// What `TRIALS` uploads to `address` are answered.
fn uploads(address: SocketAddr) -> Vec<String> {
    let mut client = Command::new("python3");
    client.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/forwards/uploads.py"));
    client.args([address.port().to_string(), TRIALS.to_string()]);
    text(&run(&mut client, Duration::from_secs(120)).stdout).lines().map(str::to_owned).collect()
}

#[test]
fn the_answer_of_a_server_that_refuses_an_upload_arrives_whole() {
    let all: Vec<Need> = needs::AGENTS.iter().copied().chain([Need::Tool("python3", "python3")]).collect();
    if !needs::met("a refused upload", &all) {
        return;
    }
    // More than a client's first window is cut off by the server's own kernel now and then, forward or not.
    for bytes in [1000, 20_000, 60_000] {
        let [service, ingress]: [SocketAddr; 2] =
            [(); 2].map(|()| (Ipv4Addr::LOCALHOST, ports::free()).into());
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/forwards/refuses.py"));
        command.args([service.port().to_string(), bytes.to_string()]).stderr(Stdio::null());
        let _server = Running::start("the server", &mut command);
        clock::until("the server listens", PATIENCE, || TcpStream::connect(service).map(drop));
        let _pair = Plan::default().service("web", service, "").forward("web", ingress).start();
        let expected = vec![format!("413 {bytes}"); TRIALS];
        assert_eq!(uploads(service), expected, "directly");
        assert_eq!(uploads(ingress), expected, "over the forward");
    }
}

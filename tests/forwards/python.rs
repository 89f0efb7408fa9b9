//! An HTTP server in Python that refuses uploads: its answer arrives, although the server does not read the request.

use std::{
    fs,
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

const TOOLS: &[Need] = &[Need::Tool("python3", "python3"), Need::Tool("curl", "curl")];

const TRIALS: usize = 20;

/// What is uploaded: more than any window takes before the answer is there.
const UPLOAD: usize = 3_000_000;

/// What curl says of an upload to `address`: the status and the bytes of the answer.
fn upload(address: SocketAddr, file: &std::path::Path) -> String {
    let mut curl = Command::new("curl");
    curl.args([
        "--silent",
        "--show-error",
        "--max-time",
        "20",
        "--header",
        "Expect:",
        "--output",
        "/dev/null",
    ]);
    curl.args(["--write-out", "%{http_code} %{size_download}", "--data-binary"]);
    curl.arg(format!("@{}", file.display())).arg(format!("http://{address}/"));
    let output = run(&mut curl, Duration::from_secs(30));
    text(&output.stdout)
}

#[test]
fn the_answer_of_a_server_that_refuses_an_upload_arrives_whole() {
    let all: Vec<Need> = needs::AGENTS.iter().chain(TOOLS).copied().collect();
    if !needs::met("a refused upload", &all) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("upload");
    fs::write(&file, vec![b'x'; UPLOAD]).unwrap();
    for bytes in [1000, 20_000, 100_000] {
        let [service, ingress]: [SocketAddr; 2] =
            [(); 2].map(|()| (Ipv4Addr::LOCALHOST, ports::free()).into());
        let mut command = Command::new("python3");
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/forwards/refuses.py"));
        command.args([service.port().to_string(), bytes.to_string()]).stderr(Stdio::null());
        let _server = Running::start("the server", &mut command);
        clock::until("the server listens", PATIENCE, || TcpStream::connect(service).map(drop));
        let _pair = Plan::default().service("web", service, "").forward("web", ingress).start();
        let expected = vec![format!("413 {bytes}"); TRIALS];
        let [direct, forward] = [service, ingress]
            .map(|address| (0..TRIALS).map(|_| upload(address, &file)).collect::<Vec<String>>());
        println!("{bytes} bytes; directly {direct:?}, forwarded {forward:?}");
        assert_eq!(forward, expected, "directly {direct:?}");
    }
}

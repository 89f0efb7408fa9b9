//! An HTTP server in Python that refuses uploads: its answer arrives, although the server does not read the request.

use std::{net::SocketAddr, process::Command, time::Duration};

use culvert_tests::{
    needs::Need,
    process::{run, text},
};

use crate::server::{Server, met};

const TRIALS: usize = 20;

/// What `TRIALS` uploads to `address` are answered, a line each.
fn uploads(address: SocketAddr) -> String {
    let mut client = Command::new("python3");
    client.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/process/forwards/uploads.py"));
    client.args([address.port().to_string(), TRIALS.to_string()]);
    text(&run(&mut client, Duration::from_secs(120)).stdout).trim().to_owned()
}

#[test]
fn the_answer_of_a_server_that_refuses_an_upload_arrives_whole() {
    if !met("a refused upload", &[Need::Tool("python3", "python3")]) {
        return;
    }
    // More than a client's first window is cut off by the server's own kernel now and then, forward or not.
    for bytes in [1000, 20_000, 60_000] {
        let server = Server::start("the server", |address, _| {
            let mut command = Command::new("python3");
            command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/process/forwards/refuses.py"));
            command.args([address.port().to_string(), bytes.to_string()]);
            command
        });
        assert_eq!(server.compared(uploads), vec![format!("413 {bytes}"); TRIALS].join("\n"));
    }
}

//! A service at a Unix socket, and in a list behind places that do not answer.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::unix::net::UnixListener,
    thread,
    time::Duration,
};

use culvert_tests::{
    needs,
    pair::Plan,
    ports::{self, loopback},
};

/// What comes back over a forward at `at` for what `sent` is, once the client has ended its direction.
fn echoed(at: SocketAddr, sent: &[u8]) -> Vec<u8> {
    let mut client = TcpStream::connect(at).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    client.write_all(sent).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut back = Vec::new();
    client.read_to_end(&mut back).unwrap();
    back
}

#[test]
fn a_unix_socket_serves_behind_places_that_do_not_and_half_closes_pass() {
    if !needs::met("Unix socket", needs::AGENTS) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Whatever user the agents run as.
    fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = folder.path().join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut all = Vec::new();
            // Only the client's end lets it answer.
            stream.read_to_end(&mut all).unwrap();
            stream.write_all(&all).unwrap();
        }
    });
    let nobody = SocketAddr::from(([127, 0, 0, 1], ports::free()));
    let section = format!(
        "[[service]]\nname = \"app\"\nprotocol = \"tcp\"\nupstream = [\"{nobody}\", \"unix:{}\"]\n\
         [[service]]\nname = \"gone\"\nprotocol = \"tcp\"\nupstream = \"unix:/nowhere/app.sock\"\n",
        path.display()
    );
    let [app, gone] = [loopback(), loopback()];
    let plan = Plan::default().exit(&section).allow("app").allow("gone");
    let pair = plan.forward("app", app).forward("gone", gone).start();
    let sent: Vec<u8> = (0..2_000_000_u32).map(|number| (number % 251) as u8).collect();
    assert_eq!(echoed(app, &sent).len(), sent.len());
    assert_eq!(echoed(app, &sent), sent);
    // Nobody listens at the first place.
    pair.exit.wait_for_count("culvert_upstream_unreached_total", &[("reason", "upstream_refused")], 2);
    let mut client = TcpStream::connect(gone).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert!(client.read(&mut [0; 8]).is_err(), "it is reset");
    let status = pair.exit.ask(&["status"]);
    assert!(status.contains("service gone at unix:/nowhere/app.sock: failed"), "{status}");
    assert!(status.contains("there is no such socket"), "{status}");
}

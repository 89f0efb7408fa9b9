//! `[metrics]` that comes, changes and goes while the daemon runs.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Stdio,
};

use culvert_tests::{
    agent::{SHUTDOWN_LIMIT, binary, culvert},
    clock::{self, PATIENCE},
    needs,
    place::Place,
    ports,
    process::{Running, text},
};

use crate::run::configuration;

/// The answer of the admin server to a request for `path`; empty if the connection ends unanswered.
fn asked(port: u16, path: &str) -> Result<String, String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let asked = || {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    asked().map_err(|error: std::io::Error| error.to_string())
}

#[track_caller]
fn answers(port: u16, path: &str, status: &str) {
    let answer = asked(port, path);
    assert!(
        answer.as_ref().is_ok_and(|answer| answer.starts_with(&format!("HTTP/1.1 {status}"))),
        "{answer:?}"
    );
}

/// A daemon without `[metrics]`, and its file.
struct Daemon {
    process: Running,
    file: std::path::PathBuf,
    bare: String,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let (folder, file) = configuration("");
        let bare = fs::read_to_string(&file)
            .unwrap()
            .replace("control.socket = \"\"", "control.socket = \"control\"");
        fs::write(&file, &bare).unwrap();
        let mut command = Place::Host.command(binary());
        command.args(["run", "--config"]).arg(&file);
        let log = File::create(folder.path().join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let daemon = Self { process: Running::start("the daemon", &mut command), file, bare, folder };
        clock::until("the daemon is ready", PATIENCE, || {
            let log = daemon.log();
            if log.contains(": ready ") { Ok(()) } else { Err(log) }
        });
        daemon
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    /// Reloads with these lines in the file: the exit code and all that was said.
    fn reload(&self, lines: &str, more: &[&str]) -> (Option<i32>, String) {
        // Keys without a section stand first.
        fs::write(&self.file, format!("{lines}\n{}", self.bare)).unwrap();
        let output = culvert(&[&["reload", "--config", Path::to_str(&self.file).unwrap()], more].concat());
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    }
}

#[test]
fn metrics_are_turned_on_moved_and_off_without_a_restart() {
    if !needs::met("metrics at a reload", needs::AGENTS) {
        return;
    }
    let mut daemon = Daemon::start();
    let (first, second) = (ports::free(), ports::free());
    let listen = |port: u16| format!("metrics.listen = \"127.0.0.1:{port}\"");

    let (code, said) = daemon.reload(&listen(first), &["--dry-run"]);
    assert!(code == Some(0) && said.contains("metrics.listen") && !said.contains("restart"), "{said}");
    asked(first, "/metrics").unwrap_err();
    let (code, said) = daemon.reload(&listen(first), &[]);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.trim(), format!("In effect now:\n  + metrics.listen: 127.0.0.1:{first}"));
    let page = asked(first, "/metrics").unwrap();
    assert!(page.contains("\nculvert_build_info{") && page.contains("\nculvert_reloads_total{"), "{page}");
    answers(first, "/readyz", "200");
    answers(first, "/", "404");

    // The page, at the same address.
    let with_page = format!("{}\nmetrics.page = true", listen(first));
    let (code, said) = daemon.reload(&with_page, &[]);
    assert_eq!(code, Some(0), "{said}");
    answers(first, "/", "200");
    let status = asked(first, "/api/status").unwrap();
    assert!(status.contains("\"name\":\"exit\""), "{status}");

    // An address that cannot be had changes nothing, and says what to do.
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (code, said) = daemon.reload(&listen(taken.local_addr().unwrap().port()), &[]);
    assert!(code == Some(1) && said.contains("metrics.listen") && said.contains("(remedy: "), "{said}");
    let wider = format!("metrics = {{ listen = \"0.0.0.0:{first}\", allow = [\"127.0.0.0/8\"] }}");
    let (code, said) = daemon.reload(&wider, &[]);
    let words = ["while 127.0.0.1:", "is served", "take metrics.listen out"];
    assert!(code == Some(1) && words.iter().all(|word| said.contains(word)), "{said}");
    answers(first, "/", "200");

    // Elsewhere, and with a secret.
    let secret = daemon.folder.path().join("token");
    fs::write(&secret, "0123456789abcdef\n").unwrap();
    fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let (code, said) = daemon.reload(&format!("{}\nmetrics.token_file = \"token\"", listen(second)), &[]);
    assert_eq!(code, Some(0), "{said}");
    answers(second, "/metrics", "401");
    answers(second, "/healthz", "200");
    clock::until("the first address is closed", PATIENCE, || match asked(first, "/metrics") {
        Err(_) => Ok(()),
        Ok(answer) => Err(answer),
    });

    let (code, said) = daemon.reload("", &[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&format!("- metrics.listen: 127.0.0.1:{second}")), "{said}");
    clock::until("nothing is served", PATIENCE, || match asked(second, "/healthz") {
        Err(_) => Ok(()),
        Ok(answer) => Err(answer),
    });
    daemon.reload(&listen(first), &[]);
    answers(first, "/metrics", "200");
    daemon.process.terminate();
    assert_eq!(daemon.process.wait(SHUTDOWN_LIMIT).code(), Some(0), "{}", daemon.log());
}

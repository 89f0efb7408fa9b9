//! Programs that everybody uses, over a forward and directly: the outcome is the same.

use std::{fs, net::SocketAddr, path::Path, process::Command, time::Duration};

use culvert_tests::{
    needs::{self, Need},
    process::{run, text},
    random::Random,
};

use crate::server::{Server, met};

fn command(program: &str) -> Command {
    Command::new(needs::tool(program).unwrap())
}

/// How a command ended, and what it printed.
fn outcome(command: &mut Command) -> String {
    let output = run(command, Duration::from_secs(60));
    format!("{} {} {}", output.status, text(&output.stdout).trim(), text(&output.stderr).trim())
}

#[test]
fn git_clones_the_same_commit() {
    if !met("git", &[Need::Tool("git", "git")]) {
        return;
    }
    let git = |folder: &Path, words: &[&str]| {
        let mut git = command("git");
        git.args(["-c", "user.name=test", "-c", "user.email=test@example.net", "-C"]).arg(folder).args(words);
        outcome(&mut git)
    };
    let server = Server::start("git daemon", |address, folder| {
        let repository = folder.join("repository");
        fs::create_dir(&repository).unwrap();
        fs::write(repository.join("file"), Random::new(40).bytes(3 << 20)).unwrap();
        for words in [&["init", "-q"][..], &["add", "file"], &["commit", "-q", "-m", "file"]] {
            let said = git(&repository, words);
            assert!(said.starts_with("exit status: 0"), "{said}");
        }
        let mut daemon = command("git");
        daemon.args(["daemon", "--reuseaddr", "--export-all", "--listen=127.0.0.1"]);
        daemon.arg(format!("--port={}", address.port()));
        daemon.arg(format!("--base-path={}", folder.display()));
        daemon
    });
    let head = git(&server.folder.path().join("repository"), &["rev-parse", "HEAD"]);
    let cloned = server.compared(|address| {
        let copy = tempfile::tempdir().unwrap();
        let cloned = git(copy.path(), &["clone", "-q", &format!("git://{address}/repository"), "copy"]);
        let copy = copy.path().join("copy");
        format!("{cloned}{}{}", git(&copy, &["rev-parse", "HEAD"]), git(&copy, &["fsck"]))
    });
    assert!(cloned.contains(&head), "{cloned}");
}

#[test]
fn rsync_copies_a_folder() {
    if !met("rsync", &[Need::Tool("rsync", "rsync")]) {
        return;
    }
    let bytes = Random::new(41).bytes(8 << 20);
    let server = Server::start("rsync", |address, folder| {
        fs::create_dir(folder.join("files")).unwrap();
        fs::write(folder.join("files/large"), &bytes).unwrap();
        fs::write(folder.join("files/empty"), b"").unwrap();
        let file = folder.join("rsyncd.conf");
        let files = folder.join("files");
        let text =
            format!("use chroot = no\n[files]\npath = {}\nread only = yes\nuid = root\n", files.display());
        fs::write(&file, text).unwrap();
        let mut daemon = command("rsync");
        daemon.args(["--daemon", "--no-detach", "--address=127.0.0.1"]);
        daemon.arg(format!("--port={}", address.port())).arg(format!("--config={}", file.display()));
        daemon
    });
    server.compared(|address| {
        let copy = tempfile::tempdir().unwrap();
        let mut rsync = command("rsync");
        rsync.arg("-a").arg(format!("rsync://{address}/files/")).arg(copy.path());
        let said = outcome(&mut rsync);
        let copied = fs::read(copy.path().join("large")).unwrap_or_default();
        assert!(copied == bytes, "{said}: {} bytes", copied.len());
        format!("{said} {}", copy.path().join("empty").exists())
    });
}

#[test]
fn redis_answers_a_pipeline_and_its_end_reaches_the_client() {
    if !met("redis", &[Need::Tool("redis-server", "redis-server"), Need::Tool("redis-cli", "redis-tools")]) {
        return;
    }
    let server = Server::start("redis", |address, folder| {
        let mut redis = command("redis-server");
        redis.args(["--bind", "127.0.0.1", "--save", "", "--dir"]).arg(folder);
        redis.args(["--port", &address.port().to_string()]);
        redis
    });
    let cli = |address: SocketAddr, words: &[&str]| {
        let mut cli = command("redis-cli");
        cli.args(["-h", "127.0.0.1", "-p", &address.port().to_string()]).args(words);
        cli
    };
    let commands = server.folder.path().join("commands");
    let lines: String =
        (0..20_000).map(|number| format!("SET key{number} {number}{number}{number}\r\n")).collect();
    fs::write(&commands, lines).unwrap();
    let said = server.compared(|address| {
        // `run` gives standard input to nobody.
        let mut piped = Command::new("sh");
        piped.args(["-c", "exec redis-cli -h 127.0.0.1 -p \"$1\" --pipe <\"$2\"", "sh"]);
        piped.arg(address.port().to_string()).arg(&commands);
        let piped = outcome(&mut piped);
        // The server closes the connection of the client that asks for it.
        let killed = outcome(&mut cli(address, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"]));
        let quit = outcome(&mut cli(address, &["QUIT"]));
        format!("{piped} {killed} {quit} {}", outcome(&mut cli(address, &["GET", "key19999"])))
    });
    assert!(said.contains("errors: 0, replies: 20000") && said.contains("199991999919999"), "{said}");
}

#[test]
fn nginx_serves_a_file_over_http_2() {
    if !met("nginx", &[Need::Tool("nginx", "nginx-light"), Need::Tool("curl", "curl")]) {
        return;
    }
    let bytes = Random::new(42).bytes(8 << 20);
    let server = Server::start("nginx", |address, folder| {
        fs::write(folder.join("file"), &bytes).unwrap();
        let here = folder.display();
        let text = format!(
            "daemon off; pid {here}/pid; error_log {here}/log; worker_processes 1;\nevents {{}}\nhttp {{ access_log off; \
             client_body_temp_path {here}/body; proxy_temp_path {here}/proxy; fastcgi_temp_path {here}/fastcgi; \
             uwsgi_temp_path {here}/uwsgi; scgi_temp_path {here}/scgi;\n\
             server {{ listen {address} http2; root {here}; }} }}\n"
        );
        let file = folder.join("nginx.conf");
        fs::write(&file, text).unwrap();
        let mut nginx = command("nginx");
        nginx.arg("-c").arg(file).arg("-p").arg(folder);
        nginx
    });
    let said = server.compared(|address| {
        let copy = tempfile::tempdir().unwrap();
        let copy = copy.path().join("copy");
        let mut curl = command("curl");
        curl.args(["--silent", "--show-error", "--max-time", "20", "--http2-prior-knowledge", "--write-out"]);
        curl.args(["%{http_code} %{http_version} %{size_download}", "--output"]).arg(&copy);
        let fetched = outcome(curl.arg(format!("http://{address}/file")));
        assert!(fs::read(&copy).unwrap_or_default() == bytes, "{fetched}");
        fetched
    });
    assert_eq!(said.trim(), format!("exit status: 0 200 2 {}", bytes.len()));
}

#[test]
fn ssh_carries_a_session_its_end_and_its_exit_status() {
    let tools = [
        Need::Root,
        Need::Tool("sshd", "openssh-server"),
        Need::Tool("ssh", "openssh-client"),
        Need::Tool("ssh-keygen", "openssh-client"),
    ];
    if !met("ssh", &tools) {
        return;
    }
    fs::create_dir_all("/run/sshd").unwrap();
    let server = Server::start("sshd", |address, folder| {
        for key in ["host", "user"] {
            let mut keygen = command("ssh-keygen");
            let made = outcome(keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(key)));
            assert!(made.starts_with("exit status: 0"), "{made}");
        }
        let here = folder.display();
        let text = format!(
            "HostKey {here}/host\nAuthorizedKeysFile {here}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
             PermitRootLogin yes\nPasswordAuthentication no\nListenAddress {address}\n"
        );
        fs::write(folder.join("config"), text).unwrap();
        let mut sshd = command("sshd");
        sshd.arg("-D").arg("-f").arg(folder.join("config"));
        sshd
    });
    let said = server.compared(|address| {
        let ssh = |script: &str| {
            let mut ssh = command("ssh");
            ssh.args([
                "-F",
                "none",
                "-q",
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                "UserKnownHostsFile=/dev/null",
            ]);
            ssh.args(["-o", "BatchMode=yes", "-p", &address.port().to_string(), "-i"]);
            outcome(ssh.arg(server.folder.path().join("user")).args(["root@127.0.0.1", script]))
        };
        let bytes = ssh("head -c 20000000 /dev/zero | tr '\\0' y; exit 3");
        let all = bytes.chars().filter(|byte| *byte == 'y').count();
        // A session whose server dies under it.
        let killed = ssh("kill -9 $PPID; sleep 5");
        format!("{} {all} {killed}", &bytes[..14])
    });
    assert!(said.starts_with("exit status: 3 20000000 "), "{said}");
}

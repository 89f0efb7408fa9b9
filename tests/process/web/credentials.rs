//! Users with chosen passwords and with certificates, over HTTP/1.1, HTTP/2 and HTTP/3: by ssl, h2, aioquic and openssl, with hashes of
//! argon2-cffi.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    agent,
    clock::{self, PATIENCE},
    place::Place,
    process::{Running, run, text},
};

use crate::{
    bed::{Bed, FOLDER, LIMIT},
    users::Users,
};

const ALL: [&str; 3] = ["1", "2", "3"];

fn python(bed: &Bed) -> Command {
    let mut command = Command::new(&bed.python);
    command.arg(Path::new(FOLDER).join("certificate_client.py")).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Runs the client, which must succeed; what it says.
#[track_caller]
fn says(bed: &Bed, words: &[&str]) -> String {
    let output = run(python(bed).args(words), LIMIT);
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

#[track_caller]
fn at(bed: &Bed, verb: &str, words: &[&str]) -> String {
    says(bed, &[&[verb, &bed.tcp.port().to_string()], words].concat())
}

#[track_caller]
fn connect(bed: &Bed, version: &str, certificate: &str, credentials: &str) -> String {
    at(bed, "connect", &[version, certificate, credentials, "web:80"])
}

fn checks(bed: &Bed, outcome: &str) -> u64 {
    bed.agent.samples().count("culvert_users_password_checks_total", &[("outcome", outcome)])
}

/// Runs `culvert`, with a password on its standard input.
#[track_caller]
fn culvert(words: &[&str], password: &str) -> String {
    let mut command = Command::new(agent::binary());
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(password.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    text(&output.stdout) + &text(&output.stderr)
}

/// The line of a user who may reach the echo.
fn user(name: &str, keys: &str) -> String {
    format!("[[user]]\nname = \"{name}\"\n{keys}\nservices = [\"web\"]\n")
}

/// One source has one check in a second.
fn pause() {
    std::thread::sleep(Duration::from_millis(1_100));
}

#[test]
fn a_chosen_password_lets_its_user_in_and_is_looked_at_once() {
    let Some(users) = Users::new("chosen passwords", "") else { return };
    let bed = &users.bed;
    // Each of the two programs knows the other's hashes.
    let ours = culvert(&["user", "hash"], "correct horse\n");
    let ours = ours.trim();
    assert!(ours.starts_with("$argon2id$v=19$m=19456,t=2,p=1$"), "{ours}");
    assert_eq!(says(bed, &["verify", ours, "correct horse"]), "True");
    assert_eq!(says(bed, &["verify", ours, "Correct horse"]), "False");
    let theirs = says(bed, &["hash", "battery staple"]);
    let lines = user("ben", &format!("password_hash = \"{ours}\""))
        + &user("carl", &format!("password_hash = \"{theirs}\""));
    bed.reconfigure(|before| before + &lines);
    for name in ["ben:correct horse", "carl:battery staple"] {
        pause();
        for version in ALL {
            assert_eq!(connect(bed, version, "-", name), "200", "{name}, HTTP/{version}");
        }
    }
    assert_eq!((checks(bed, "right"), checks(bed, "wrong")), (2, 0));
    for version in ALL {
        pause();
        assert_eq!(connect(bed, version, "-", "ben:battery staple"), "405", "HTTP/{version}");
        assert_eq!(connect(bed, version, "-", "carl:battery staple"), "200", "it is remembered");
    }
    assert_eq!((checks(bed, "right"), checks(bed, "wrong")), (2, 3));
    // What is not looked at is nobody, and the right one no better than a wrong one.
    bed.reconfigure(|before| before.replace(ours, &theirs));
    pause();
    assert_eq!(connect(bed, "3", "-", "ben:correct horse"), "405", "it is no more");
    assert_eq!(connect(bed, "1", "-", "ben:battery staple"), "405");
    assert_eq!(checks(bed, "source"), 1);
    pause();
    assert_eq!(connect(bed, "3", "-", "ben:battery staple"), "200");
    // In the state file, by standard input.
    let config = bed.agent.config();
    let words = |verb| {
        let name = ["user", verb, "dora", "--password-from-stdin", "--service"];
        let service = if verb == "add" { "web" } else { "+echo" };
        [&name[..], &[service, "--config", config.to_str().unwrap()]].concat()
    };
    let said = culvert(&words("add"), "a third one\n");
    assert!(said.contains("added dora") && !said.contains("password"), "{said}");
    pause();
    assert_eq!(connect(bed, "2", "-", "dora:a third one"), "200");
    assert!(culvert(&words("set"), "short\n").contains("less than 8 characters"));
    assert!(culvert(&words("set"), "a fourth one\r\n").contains("dora"));
    pause();
    assert_eq!(connect(bed, "2", "-", "dora:a fourth one"), "200");
    pause();
    assert_eq!(connect(bed, "2", "-", "dora:a third one"), "405");
    let exported = bed.agent.ask(&["user", "export", "dora"]);
    assert!(
        exported.contains("password_hash = \"$argon2id$") && !exported.contains("password_key"),
        "{exported}"
    );
}

#[test]
fn guesses_are_looked_at_five_times_a_second_and_hurt_nobody() {
    let Some(users) = Users::new("guesses", "") else { return };
    let bed = &users.bed;
    let hash = culvert(&["user", "hash"], "correct horse\n");
    bed.reconfigure(|before| before + &user("ben", &format!("password_hash = \"{}\"", hash.trim())));
    let began = clock::now();
    let mut guesses = python(bed);
    guesses
        .args(["guess", &bed.tcp.port().to_string(), "ben", "5"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut guesses = Running::start("guesses", &mut guesses);
    let mut worst = Duration::ZERO;
    while guesses.ended().is_none() {
        let began = clock::now();
        assert_eq!(users.good("connect", "2", &["web:80", "10000"]), "200 10000");
        worst = worst.max(began.elapsed());
    }
    assert!(guesses.wait(LIMIT).success());
    assert!(worst <= Duration::from_secs(10), "a user waits for {worst:?}");
    let (wrong, seconds) = (checks(bed, "wrong"), began.elapsed().as_secs());
    assert!(wrong <= 5 * (seconds + 1), "{wrong} in {seconds} s");
}

/// A certificate with a key of this kind as NAME.pem and NAME.key; what they are called without that.
#[track_caller]
fn client_certificate(folder: &Path, name: &str, kind: &[&str]) -> String {
    let path = folder.join(name).to_str().unwrap().to_owned();
    let mut command = Command::new("openssl");
    command
        .args(["req", "-x509", "-nodes", "-days", "2", "-subj", &format!("/CN={name}"), "-newkey"])
        .args(kind);
    command.args(["-keyout", &format!("{path}.key"), "-out", &format!("{path}.pem")]);
    let output = run(&mut command, LIMIT);
    assert!(output.status.success(), "{}", text(&output.stderr));
    path
}

#[test]
fn a_certificate_lets_its_user_in_and_another_one_is_a_visitors() {
    const EC: &[&str] = &["ec", "-pkeyopt", "ec_paramgen_curve:P-256"];
    let Some(users) = Users::new("certificates of users", "") else { return };
    let bed = &users.bed;
    let folder = bed.folder.path();
    let asks = || {
        let said = ["-tls1_3", "-tls1_2"].map(|version| bed.openssl(&[version, "-msg", "-alpn", "http/1.1"]));
        assert!(said.iter().all(|said| said.contains("ServerHello")), "{said:?}");
        said.map(|said| said.contains("CertificateRequest"))
    };
    assert_eq!(asks(), [false; 2], "nobody has a key");
    let ben = client_certificate(folder, "ben", EC);
    let carl = client_certificate(folder, "carl", &["rsa:2048"]);
    let other = client_certificate(folder, "other", EC);
    // One that claims the key of ben and has another: openssl has no means to sign with it, so what is shown is its own.
    bed.agent.ask(&["user", "add", "ben", "--service", "web", "--client-key", &format!("{ben}.pem")]);
    let hash = {
        let line = format!(
            "openssl x509 -in {carl}.pem -pubkey -noout | openssl pkey -pubin -outform der | sha256sum"
        );
        let output = run(Command::new("sh").args(["-c", &line]), LIMIT);
        format!("sha256:{}", &text(&output.stdout)[..64])
    };
    bed.agent.ask(&["user", "add", "carl", "--service", "web", "--client-key", &hash]);
    assert!(bed.agent.ask(&["user", "list"]).contains("client_key"));
    assert_eq!(asks(), [true; 2]);
    for version in ["1", "1-1.2", "2", "3"] {
        for (certificate, credentials, status) in [
            (&*ben, "-", "200"),
            (&carl, "-", "200"),
            (&other, "-", "405"),
            ("-", "-", "405"),
            ("-", &users.credentials, "200"),
            (&other, &users.credentials, "200"),
            (&other, "ben:", "405"),
        ] {
            let said = connect(bed, version, certificate, credentials);
            assert_eq!(said, status, "{certificate} {credentials}, HTTP/{version}");
        }
        for certificate in [&*ben, &other, "-"] {
            let page = at(bed, "get", &[version, certificate, "-", "/echo"]);
            assert!(
                page.starts_with("200 ") && page.contains("GET"),
                "{certificate}, HTTP/{version}: {page}"
            );
        }
        // A key of a kind that is not asked for: the client shows nothing.
    }
    // What was let in ends with its key, and no session of TLS is taken up again.
    let mut held = python(bed);
    held.args(["connect", &bed.tcp.port().to_string(), "3", &ben, "-", "web:80"]);
    drop(held);
    bed.agent.ask(&["user", "set", "ben", "--client-key", &format!("{other}.pem")]);
    bed.agent.ask(&["user", "set", "carl", "--disable"]);
    for version in ["1", "2", "3"] {
        let said = [&*ben, &carl, &other].map(|certificate| connect(bed, version, certificate, "-"));
        assert_eq!(said, ["405", "405", "200"], "HTTP/{version}");
    }
    bed.agent.ask(&["user", "remove", "ben"]);
    assert_eq!(asks(), [false; 2], "who has one is disabled");
    assert_eq!(connect(bed, "3", &other, "-"), "405");
    for version in ["-tls1_3", "-tls1_2"] {
        let said = bed.openssl(&[version, "-alpn", "http/1.1", "-reconnect"]);
        assert!(!said.contains("Reused,"), "{said}");
    }
}

/// A session over HTTP/3 that is open; how it ends is the next line.
fn open(bed: &Bed, path: &str, credentials: &str) -> (Running, BufReader<std::process::ChildStdout>) {
    let mut command = Place::Host.command(&bed.python);
    command.arg(Path::new(FOLDER).join("certificate_client.py"));
    command.args(["revoked", &bed.tcp.port().to_string(), path, credentials]);
    command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut running = Running::start("a session that is revoked", &mut command);
    let mut lines = BufReader::new(running.child().stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    (running, lines)
}

#[test]
fn who_is_shut_out_is_told_by_a_reset_and_the_site_gets_no_password() {
    let Some(users) = Users::new("users who are shut out", "") else { return };
    let bed = &users.bed;
    let (_running, mut lines) = open(bed, "/.well-known/masque/udp/echo/7/", &users.credentials);
    for version in ALL {
        let page = at(bed, "get", &[version, "-", &users.credentials, "/echo"]);
        assert!(page.starts_with("200 ") && !page.contains("authorization"), "HTTP/{version}: {page}");
    }
    bed.agent.ask(&["user", "set", "anna", "--disable"]);
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    // H3_CONNECT_ERROR.
    assert_eq!(line, format!("reset {}\n", 0x10f));
    for version in ALL {
        let page = at(bed, "get", &[version, "-", &users.credentials, "/echo"]);
        assert!(page.starts_with("200 ") && !page.contains("authorization"), "HTTP/{version}: {page}");
        let page = at(bed, "get", &[version, "-", "anna:of the site", "/echo"]);
        assert!(page.contains("authorization"), "HTTP/{version}: {page}");
    }
}

#[test]
fn who_names_us_proves_its_address_while_many_handshakes_are_open() {
    let Some(users) = Users::new("Retry of names", "") else { return };
    let bed = &users.bed;
    assert_eq!(at(bed, "crowd", &["0"]), "0 200");
    let retries = || bed.agent.samples().count("culvert_gate_datagrams_total", &[("step", "name_retry")]);
    assert_eq!(retries(), 0);
    assert_eq!(at(bed, "crowd", &["80"]), "1 200");
    assert!(retries() >= 1);
    clock::until("the others are forgotten", PATIENCE * 4, || {
        let open = bed.agent.samples().count("culvert_http_connections", &[]);
        if open == 0 { Ok(()) } else { Err(format!("{open} are open")) }
    });
    let log = bed.agent.log();
    assert!(!log.contains("panic"), "{log}");
    fs::metadata(bed.agent.config()).unwrap();
}

//! The web server on TCP (`http.listen`), with clients, servers in front and a site that no one here wrote.
//!
//! | question | file |
//! |---|---|
//! | what is asked, and what must be answered | this one: curl, openssl, nginx, HAProxy |
//! | the agent, its certificate, the site behind it | `bed.rs` |
//! | users: CONNECT and CONNECT-UDP | `users.rs`, and `user_client.py` on h2 and libcurl |
//! | chosen passwords, certificates of clients, Retry | `credentials.rs`, and `certificate_client.py` on aioquic, h2 and ssl |
//! | visitors on h2, hpack and wsproto, hostile ones among them | `visitor.py` |
//! | the site, on h11 and wsproto | `site.py` |
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bed;
mod credentials;
mod hostile;
mod user_records;
mod users;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::Place,
    ports,
    process::{Running, run, text},
};

use bed::{Bed, LIMIT, NAME, certificate};

const NEEDS: &[Need] = &[
    Need::Tool("setpriv", "util-linux"),
    Need::Tool("curl", "curl"),
    Need::Tool("openssl", "openssl"),
    Need::PrometheusParser,
];

#[test]
fn curl_meets_the_site_over_both_versions() {
    let Some(bed) = Bed::new("curl", NEEDS, "rsa:2048", "") else { return };
    for (version, said) in [("--http1.1", "HTTP/1.1 200"), ("--http2", "HTTP/2 200")] {
        let page = bed.curl(&[version, "--include", "--header", "x-forwarded-for: 203.0.113.1"], "/echo?a=b");
        assert!(page.starts_with(said), "{page}");
        let lower = page.to_lowercase();
        // End to end, and in both of their lines; what was about the connection to the site is gone.
        assert!(
            lower.contains("x-site: yes") && lower.contains("set-cookie: a=1\r\nset-cookie: b=2"),
            "{page}"
        );
        assert!(!lower.contains("x-private") && !lower.contains("keep-alive:"), "{page}");
        assert!(lower.contains(&format!("alt-svc: h3=\":{}\"; ma=86400", bed.tcp.port())), "{page}");
        for pair in [
            "[\"x-forwarded-for\", \"127.0.0.1\"]",
            "[\"x-forwarded-proto\", \"https\"]",
            &format!("[\"host\", \"{NAME}:{}\"]", bed.tcp.port()),
            "\"path\": \"/echo?a=b\"",
        ] {
            assert!(page.contains(pair), "{pair} in {page}");
        }
        // Methods with content, which is streamed.
        let file = bed.folder.path().join("upload");
        fs::write(&file, vec![7; 3 << 20]).unwrap();
        let upload = format!("@{}", file.display());
        for method in ["POST", "PUT", "PATCH"] {
            let page = bed.curl(&[version, "--request", method, "--data-binary", &upload], "/echo");
            assert!(page.contains(&format!("\"method\": \"{method}\"")), "{page}");
            assert!(page.contains(&format!("\"bytes\": {}, \"sum\": {}", 3 << 20, 21 << 20)), "{page}");
        }
        let size = bed
            .curl(&[version, "--output", "/dev/null", "--write-out", "%{size_download}"], "/zeros/30000000");
        assert_eq!(size, "30000000");
        let head = bed.curl(&[version, "--head"], "/zeros/12345");
        assert!(head.to_lowercase().contains("content-length: 12345"), "{head}");
        // The site closes in the middle.
        let broken = bed.try_curl(&[version], "/half");
        assert!(!broken.status.success(), "{broken:?}");
        let trace = bed.curl(&[version, "--request", "TRACE", "--write-out", " %{http_code}"], "/echo");
        assert!(trace.ends_with(" 405"), "{trace}");
    }
    let samples = bed.agent.samples();
    for version in ["http1", "http2"] {
        let count = |outcome| {
            samples.count("culvert_http_tcp_requests_total", &[("version", version), ("outcome", outcome)])
        };
        assert_eq!((count("site"), count("broken_off"), count("method")), (6, 1, 1), "{version}");
    }
}

#[test]
fn a_site_that_is_down_is_502_and_none_is_404() {
    let Some(mut bed) = Bed::new("curl and no site", NEEDS, "rsa:2048", "") else { return };
    bed.site.kill();
    let status = ["--output", "/dev/null", "--write-out", "%{http_code}"];
    for version in ["--http1.1", "--http2"] {
        assert_eq!(bed.curl(&[&[version], &status[..]].concat(), "/"), "502");
    }
    bed.reconfigure(|text| text.replace("site = ", "# site = "));
    clock::until("404", PATIENCE, || match bed.curl(&status, "/") {
        code if code == "404" => Ok(()),
        code => Err(code),
    });
    // Under every name, and none.
    let url = format!("https://{}/", bed.tcp);
    let output = run(Command::new("curl").args(["--silent", "--insecure", "--include", &url]), LIMIT);
    let page = text(&output.stdout);
    assert!(page.contains(" 404") && !page.to_lowercase().contains("alt-svc"), "{page}");
}

#[test]
fn an_upload_to_a_site_that_is_down_gets_its_502() {
    let Some(mut bed) = Bed::new("upload and no site", NEEDS, "ec:P-256", "") else { return };
    bed.site.kill();
    let file = bed.folder.path().join("upload");
    let upload = format!("@{}", file.display());
    for size in [1_000, 200_000, 900_000, 5_000_000] {
        fs::write(&file, vec![7; size]).unwrap();
        for version in ["--http1.1", "--http2"] {
            let options = [version, "--header", "expect:", "--data-binary", &upload];
            let options = [&options[..], &["--output", "/dev/null", "--write-out", "%{http_code}"]].concat();
            assert_eq!(bed.curl(&options, "/"), "502", "{version} {size}");
        }
    }
}

#[test]
fn openssl_shakes_hands_in_every_way_that_visitors_have() {
    for key in ["rsa:2048", "ec:P-256", "ec:P-384", "ed25519"] {
        let Some(bed) = Bed::new("openssl", NEEDS, key, "") else { return };
        let of_suites: &[&[&str]] = &[
            &["-tls1_3", "-groups", "X25519"],
            &["-tls1_3", "-groups", "P-256"],
            &["-tls1_3", "-groups", "P-384"],
            // In TLS 1.2 the groups are those of the certificate, too.
            &["-tls1_2", "-groups", "P-256:P-384"],
            &["-tls1_2", "-groups", "X25519:P-256:P-384", "-noservername"],
            &["-noservername"],
            &["-servername", "other.example"],
            &["-alpn", "http/1.1"],
        ];
        for options in of_suites {
            let said = bed.openssl(options);
            let handshake = if options.contains(&"-tls1_2") { "TLSv1.2" } else { "TLSv1.3" };
            assert!(
                said.contains(handshake) && said.contains("Verify return code: 0 (ok)"),
                "{key} {options:?}: {said}"
            );
            assert!(said.contains("HTTP/1.1 200"), "{key} {options:?}: {said}");
        }
        let refused = bed.openssl(&["-tls1_2", "-cipher", "AES128-SHA"]);
        assert!(!refused.contains("HTTP/1.1"), "without forward secrecy: {refused}");
        bed.agent.wait_for_count("culvert_http_tcp_refused_total", &[("reason", "handshake")], 1);
    }
}

#[test]
fn websockets_reach_the_site_over_both_versions() {
    let Some(bed) = Bed::new("websocket", NEEDS, "ec:P-256", "") else { return };
    assert_eq!(bed.visit("websocket"), "AcceptConnection CloseConnection 1000");
    assert_eq!(bed.visit("websocket2"), "200 3000 1000");
    for version in ["http1", "http2"] {
        let labels = [("version", version), ("outcome", "websocket")];
        bed.agent.wait_for_count("culvert_http_tcp_requests_total", &labels, 1);
    }
    assert_eq!(bed.visit("early"), "101 0", "what came before the answer is dropped with the connection");
    bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 0);
}

#[test]
fn nothing_behind_a_refused_tunnel_is_read_as_a_request() {
    let Some(bed) = Bed::new("tunnels", NEEDS, "ec:P-256", "") else { return };
    // Status, answers, whether the second request was answered, whether the connection was said to close.
    assert_eq!(bed.visit("connect_tunnel"), "405 1 False True");
    assert_eq!(bed.visit("connect_udp"), "200 1 False True", "asked of the site as a plain request");
}

#[test]
fn hostile_frames_end_their_connection_and_are_counted() {
    const CALM: &str = "goaway 11";
    let Some(bed) = Bed::new("hostile frames", NEEDS, "ec:P-256", "") else { return };
    let refused = |reason| bed.agent.samples().count("culvert_http_tcp_refused_total", &[("reason", reason)]);
    for (number, verb) in [(1, "rapid_reset"), (2, "continuation")] {
        let met = bed.visit(verb);
        assert!(met == CALM || met == "closed", "{verb}: {met}");
        clock::until(verb, PATIENCE, || match refused("flood") {
            count if count == number => Ok(()),
            count => Err(count),
        });
    }
    assert_eq!(bed.visit("slow_reset"), "closed");
    clock::until(
        "slow_reset",
        PATIENCE,
        || if refused("flood") == 3 { Ok(()) } else { Err(refused("flood")) },
    );
    assert_eq!(bed.visit("headers"), "431 200");
    let many = "y".repeat(20 << 10);
    let page = bed.curl(&["--http1.1", "--include", "--header", &format!("x-many: {many}")], "/echo");
    assert!(page.starts_with("HTTP/1.1 431"), "{page}");
    for version in ["http1", "http2"] {
        let labels = [("version", version), ("outcome", "too_large")];
        bed.agent.wait_for_count("culvert_http_tcp_requests_total", &labels, 1);
    }
    assert_eq!(bed.visit("streams"), "16 300");
    // Others are served as before, and nothing stays behind.
    assert!(bed.curl(&["--http2"], "/echo").contains("\"GET\""));
    bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 0);
}

#[test]
fn who_is_slow_loses_the_connection() {
    let Some(bed) = Bed::new("slow visitors", NEEDS, "ec:P-256", "") else { return };
    let mut half = std::net::TcpStream::connect(bed.tcp).unwrap();
    half.write_all(b"\x16\x03\x01").unwrap();
    std::thread::scope(|scope| {
        let stalled = scope.spawn(|| bed.visit("stalled_reader"));
        assert_eq!(bed.visit("silent"), "closed 10");
        let labels = [("reason", "slow")];
        // The silent one, and the half handshake.
        bed.agent.wait_for_count("culvert_http_tcp_refused_total", &labels, 2);
        half.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(half.read(&mut [0; 9]).unwrap_or(0), 0);
        assert_eq!(stalled.join().unwrap(), "closed 3", "tens of seconds");
    });
    bed.agent.wait_for_count("culvert_http_tcp_refused_total", &[("reason", "slow_reader")], 1);
}

#[test]
fn one_source_leaves_room_for_others() {
    let Some(bed) = Bed::new("crowds", NEEDS, "ec:P-256", "trusted = [\"127.0.0.0/24\"]\n") else { return };
    // Not a trusted address.
    let crowd: Vec<_> =
        (0..80).filter_map(|n| connect_from(&format!("127.9.0.{}", n + 1), bed.tcp)).collect();
    bed.agent.wait_for_count("culvert_http_tcp_refused_total", &[("reason", "source")], 80 - 64);
    bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 64);
    assert!(bed.curl(&["--interface", "127.8.0.1"], "/echo").contains("\"GET\""));
    drop(crowd);
    bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 0);
}

fn connect_from(source: &str, to: SocketAddr) -> Option<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let source: SocketAddr = format!("{source}:0").parse().unwrap();
    socket.bind(&source.into()).unwrap();
    socket.connect(&to.into()).ok().map(|()| socket)
}

#[test]
fn a_renewed_certificate_is_shown_without_a_reload_and_a_wrong_pair_is_not() {
    let Some(bed) = Bed::new("renewal", NEEDS, "ec:P-256", "") else { return };
    let serial = || bed.openssl(&[]).lines().find(|line| line.contains("issuer=")).unwrap().to_owned();
    assert!(serial().contains("first"), "{}", serial());
    let other = tempfile::tempdir().unwrap();
    certificate(other.path(), "rsa:2048", "second");
    let take = |file: &str| {
        // At once, as a deploy hook does.
        let (new, old) = (bed.folder.path().join("new"), bed.folder.path().join(file));
        fs::copy(other.path().join(file), &new).unwrap();
        fs::rename(new, old).unwrap();
    };
    take("cert.pem");
    let kept =
        |outcome| bed.agent.samples().count("culvert_http_certificate_reads_total", &[("outcome", outcome)]);
    clock::until("the wrong pair is noticed", Duration::from_secs(60), || {
        if kept("kept") == 1 { Ok(()) } else { Err("not yet") }
    });
    bed.agent.wait_for_log(&["cannot be used", "still shown"]);
    assert!(serial().contains("first"), "{}", serial());
    take("key.pem");
    clock::until("the new pair is shown", Duration::from_secs(60), || {
        if kept("renewed") == 1 { Ok(()) } else { Err("not yet") }
    });
    assert!(serial().contains("second"), "{}", serial());
    assert_eq!(kept("kept"), 1, "once for a change");
    let left = bed.agent.ask(&["status"]);
    assert!(left.contains("web server at") && left.contains("its certificate ends in"), "{left}");
}

#[test]
fn a_reload_opens_and_closes_addresses_beside_connections_that_go_on() {
    let Some(bed) = Bed::new("reload", NEEDS, "ec:P-256", "") else { return };
    let mut kept = bed.visitor("kept", bed.tcp);
    let mut lines = BufReader::new(kept.child().stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "first 200");
    let more = ports::loopback();
    let here = format!("\"{}\"", bed.tcp);
    bed.reconfigure(|text| {
        text.replace(&format!("listen = [{here}]\nsite"), &format!("listen = [{here}, \"{more}\"]\nsite"))
    });
    let status = |at| bed.curl_at(at, &["--output", "/dev/null", "--write-out", "%{http_code}"], "/echo");
    assert_eq!((status(bed.tcp), status(more)), ("200".to_owned(), "200".to_owned()));
    bed.reconfigure(|text| text.replace(&format!("[{here}, \"{more}\"]"), &format!("[\"{more}\"]")));
    assert_eq!(status(more), "200");
    clock::until("the old address is closed", PATIENCE, || match std::net::TcpStream::connect(bed.tcp) {
        Err(_) => Ok(()),
        Ok(_) => Err("open"),
    });
    kept.child().stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "second 200", "its connection goes on");
    // An address that is taken changes nothing.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let text = fs::read_to_string(bed.agent.config()).unwrap();
    let also = format!("[\"{more}\", \"{}\"]\nsite", taken.local_addr().unwrap());
    fs::write(bed.agent.config(), text.replace(&format!("[\"{more}\"]\nsite"), &also)).unwrap();
    let refusal = bed.agent.try_to_ask(&["reload"]).unwrap_err();
    assert!(refusal.contains("http.listen"), "{refusal}");
    assert_eq!(status(more), "200");
}

/// A server in front, which ends TLS or passes it on.
fn in_front(bed: &Bed, program: &str, file: &str, config: &str) -> Running {
    let path = bed.folder.path().join(file);
    fs::write(&path, config).unwrap();
    let mut command = Place::Host.command(needs::tool(program).unwrap());
    match program {
        "nginx" => command.arg("-p").arg(bed.folder.path()).arg("-c").arg(&path),
        _ => command.args(["-db", "-f"]).arg(&path),
    };
    Running::start(program, command.stdout(Stdio::null()).stderr(Stdio::null()))
}

fn wait_for(address: SocketAddr) {
    clock::until("it listens", PATIENCE, || {
        std::net::TcpStream::connect(address).map(drop).map_err(|error| error.to_string())
    });
}

#[test]
fn behind_nginx_the_client_is_the_one_that_it_names() {
    let needs = [NEEDS, &[Need::Tool("nginx", "nginx-light")]].concat();
    let Some(bed) = Bed::new("nginx", &needs, "ec:P-256", "tls = false\ntrusted = [\"127.0.0.1/32\"]\n")
    else {
        return;
    };
    let (front, here) = (ports::loopback(), bed.folder.path().display().to_string());
    let config = format!(
        "daemon off; pid {here}/pid; error_log {here}/nginx.log; worker_processes 1;\nevents {{}}\nhttp {{ access_log off; \
         client_body_temp_path {here}/body; proxy_temp_path {here}/proxy; fastcgi_temp_path {here}/fastcgi; uwsgi_temp_path \
         {here}/uwsgi; scgi_temp_path {here}/scgi;\n map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}\n\
         server {{ listen {front} ssl http2; ssl_certificate {here}/cert.pem; ssl_certificate_key {here}/key.pem;\n\
         location / {{ proxy_pass http://{}; proxy_http_version 1.1; proxy_set_header Host $host; proxy_set_header Upgrade \
         $http_upgrade; proxy_set_header Connection $connection_upgrade; proxy_set_header Forwarded \"\"; proxy_set_header \
         X-Forwarded-For $proxy_add_x_forwarded_for; proxy_set_header X-Forwarded-Proto $scheme; }} }} }}\n",
        bed.tcp
    );
    let _nginx = in_front(&bed, "nginx", "nginx.conf", &config);
    wait_for(front);
    let spoof = [
        "--header",
        "x-forwarded-for: 203.0.113.1",
        "--header",
        "forwarded: for=203.0.113.2",
        "--interface",
        "127.7.0.1",
    ];
    let page = bed.curl_at(front, &[&["--http2"], &spoof[..]].concat(), "/echo");
    assert!(
        page.contains("[\"x-forwarded-for\", \"127.7.0.1\"]")
            && page.contains("[\"x-forwarded-proto\", \"https\"]"),
        "{page}"
    );
    assert!(page.contains(&format!("[\"host\", \"{NAME}\"]")), "{page}");
    let mut visitor = bed.visitor("websocket", front);
    assert_eq!(finished(&mut visitor), "AcceptConnection CloseConnection 1000");
    // What a server in front says is taken from either of its two headers, and refused where they differ.
    let front_says = |lines: &[&str]| {
        let headers = lines.iter().flat_map(|line| ["--header", line]);
        let mut command = Command::new("curl");
        command.args(["--silent", "--write-out", " %{http_code}"]).args(headers);
        text(&run(command.arg(format!("http://{}/echo", bed.tcp)), LIMIT).stdout)
    };
    for (lines, client, scheme) in [
        (&["x-forwarded-for: 192.0.2.1"][..], "192.0.2.1", "http"),
        (&["x-forwarded-for: 203.0.113.9, 192.0.2.1", "x-forwarded-proto: https"], "192.0.2.1", "https"),
        (&["forwarded: for=\"[2001:db8::7]:99\";proto=https"], "2001:db8::7", "http"),
        (&["forwarded: for=192.0.2.1", "x-forwarded-for: 192.0.2.1"], "192.0.2.1", "http"),
        (&["x-real-ip: 192.0.2.1"], "127.0.0.1", "http"),
    ] {
        let page = front_says(lines);
        let pairs = [("x-forwarded-for", client), ("x-forwarded-proto", scheme)];
        for (name, value) in pairs {
            assert!(page.contains(&format!("[\"{name}\", \"{value}\"]")), "{lines:?}: {page}");
        }
        assert!(!page.contains("\"forwarded\"") && !page.contains("x-real-ip"), "{page}");
    }
    let both = front_says(&["forwarded: for=192.0.2.1", "x-forwarded-for: 192.0.2.2"]);
    assert!(both.ends_with(" 400"), "{both}");
    // Who is not trusted cannot say who it is.
    let url = format!("http://{}/echo", bed.tcp);
    let direct = |more: &[&str]| {
        text(&run(Command::new("curl").arg("--silent").args(more).args(spoof).arg(&url), LIMIT).stdout)
    };
    assert!(direct(&[]).contains("[\"x-forwarded-for\", \"127.7.0.1\"]"));
    assert!(direct(&["--http2-prior-knowledge"]).contains("[\"x-forwarded-proto\", \"http\"]"));
}

#[test]
fn behind_haproxy_the_client_is_that_of_the_proxy_header() {
    let needs = [NEEDS, &[Need::Tool("haproxy", "haproxy")]].concat();
    let Some(bed) = Bed::new("haproxy", &needs, "ec:P-256", "trusted = [\"127.0.0.1/32\"]\n") else { return };
    let [first, second] = [(); 2].map(|()| ports::loopback());
    let proxy = |name: &str, front: SocketAddr, send: &str| {
        format!(
            "listen {name}\n bind {front}\n mode tcp\n source 127.0.0.1\n server culvert {} {send}\n",
            bed.tcp
        )
    };
    let config = format!(
        "defaults\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n{}{}",
        proxy("v1", first, "send-proxy"),
        proxy("v2", second, "send-proxy-v2")
    );
    let _haproxy = in_front(&bed, "haproxy", "haproxy.cfg", &config);
    for (number, front) in [first, second].into_iter().enumerate() {
        wait_for(front);
        for version in ["--http1.1", "--http2"] {
            let source = format!("127.7.0.{}", number + 1);
            let page = bed.curl_at(front, &[version, "--interface", &source], "/echo");
            assert!(page.contains(&format!("[\"x-forwarded-for\", \"{source}\"]")), "{page}");
        }
    }
    // A header that cannot be read.
    let mut wrong = std::net::TcpStream::connect(bed.tcp).unwrap();
    wrong.write_all(b"PROXY UDP4 whoever\r\n").unwrap();
    assert_eq!(wrong.read(&mut [0; 9]).unwrap_or(0), 0);
    bed.agent.wait_for_count("culvert_http_tcp_refused_total", &[("reason", "header")], 1);
}

#[test]
fn certbots_hook_gives_the_pair_to_the_agents_user() {
    let needs = [NEEDS, &[Need::Root]].concat();
    if !needs::met("certbot's hook", &needs) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [live, etc] = ["live", "etc"].map(|name| folder.path().join(name));
    fs::create_dir(&live).unwrap();
    fs::create_dir(&etc).unwrap();
    let nogroup = "65534";
    for path in [folder.path(), &etc] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    let as_user = |id: &str, words: &[&str]| {
        let mut command = Command::new("setpriv");
        run(command.args(["--reuid", id, "--regid", id, "--clear-groups", "--"]).args(words), LIMIT)
    };
    let hook = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/certbot/culvert-deploy-hook");
    let [chain, key] =
        ["fullchain.pem", "privkey.pem"].map(|file| etc.join("tls").join(file).display().to_string());
    let mut before = Vec::new();
    for renewal in ["first", "second"] {
        certificate(&live, "ec:P-256", renewal);
        for (from, to) in [("cert.pem", "fullchain.pem"), ("key.pem", "privkey.pem")] {
            fs::rename(live.join(from), live.join(to)).unwrap();
        }
        let mut command = Command::new("sh");
        command
            .arg(hook)
            .env("RENEWED_LINEAGE", &live)
            .env("CULVERT_TLS", etc.join("tls"))
            .env("CULVERT_GROUP", nogroup);
        let output = run(&mut command, LIMIT);
        assert!(output.status.success(), "{}", text(&output.stderr));
        for (copy, original) in [(&chain, "fullchain.pem"), (&key, "privkey.pem")] {
            let read = as_user(nogroup, &["cat", copy]);
            assert_eq!(read.stdout, fs::read(live.join(original)).unwrap(), "{}", text(&read.stderr));
            assert_ne!(read.stdout, before, "{copy} is renewed");
            before = read.stdout;
        }
        assert!(!as_user("65533", &["cat", &key]).status.success(), "nobody else reads it");
        assert!(!as_user(nogroup, &["sh", "-c", &format!("echo >> {key}")]).status.success());
        let entries = fs::read_dir(&etc).unwrap().count();
        assert_eq!(entries, 2, "the link, and the one folder that it leads to");
    }
    // Without certbot's variable it changes nothing, and says so.
    let output = run(
        Command::new("sh").arg(hook).env_remove("RENEWED_LINEAGE").env("CULVERT_TLS", etc.join("tls")),
        LIMIT,
    );
    assert!(!output.status.success() && text(&output.stderr).contains("remedy"), "{output:?}");
    assert!(Path::new(&key).exists());
}

#[track_caller]
fn finished(visitor: &mut Running) -> String {
    let status = visitor.wait(LIMIT);
    let mut said = String::new();
    visitor.child().stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success(), "{said}");
    said.trim().to_owned()
}

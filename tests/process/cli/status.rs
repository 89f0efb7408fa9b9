//! `culvert status` of two real agents: figures, documents, and the screen of `--watch`.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write},
    net::{Shutdown, TcpStream},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, SHUTDOWN_LIMIT, binary, culvert},
    client::Client,
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::{Pair, Plan},
    ports,
    process::{Running, text},
    upstream::Echo,
};
use serde_json::Value;
use tempfile::TempDir;

const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

fn ask(agent: &Agent, args: &[&str]) -> Output {
    culvert(&[&["status"], args, &["--config", agent.config().to_str().unwrap()]].concat())
}

#[track_caller]
fn says(agent: &Agent, args: &[&str]) -> String {
    let output = ask(agent, args);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// What it says once every worker has answered in time, which one on a loaded machine may not at first.
#[track_caller]
fn json(agent: &Agent, args: &[&str]) -> Value {
    clock::until("all workers answer", PATIENCE, || {
        let answer: Value = serde_json::from_str(&says(agent, &[args, &["--json"]].concat())).unwrap();
        assert_eq!(answer["version"], 1);
        let status = answer["status"].clone();
        let answered = status["unanswered_workers"] == Value::Array(Vec::new());
        if answered { Ok(status) } else { Err(status.to_string()) }
    })
}

/// A pair that has carried `count` datagrams to an echo and back, and the client of an open TCP forward.
fn pair(count: u32) -> (Pair, Echo, TcpStream) {
    let (echo, ingress) = (Echo::new(), ([127, 0, 0, 1], ports::free()).into());
    let quota = "quota = { bytes = \"1TB\" }\n";
    let plan = Plan::default()
        .workers([2, 2])
        .peer("lanes = 3\nrate = \"auto\"\nrate_min = \"1Gbit\"\n")
        .peer(quota);
    let pair = plan.service("echo", echo.address, "repair = \"auto\"\n").forward("echo", ingress).start();
    pair.wait_for_lanes(3);
    Client::new(0, ingress).converse(count);
    // A TCP connection, so that there is a stream connection for a minute.
    let mut stream = TcpStream::connect(ingress).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    stream.read_to_end(&mut Vec::new()).unwrap();
    pair.entry.wait_for_count("culvert_stream_connections", &[], 1);
    let stays = TcpStream::connect(ingress).unwrap();
    pair.exit.wait_for_count("culvert_tcp_streams", &[], 1);
    (pair, echo, stays)
}

#[test]
fn a_real_daemons_figures_are_true_and_documented() {
    const COUNT: u32 = 300;
    if !needs::met("culvert status", needs::AGENTS) {
        return;
    }
    let (pair, _echo, client) = pair(COUNT);
    let status = clock::until("the workers have looked at their meters", PATIENCE, || {
        let status = json(&pair.entry, &[]);
        let peer = &status["peers"][0];
        let lanes = peer["lanes"].as_array().unwrap().iter();
        let measured = lanes.chain([peer]).all(|part| part["rates"].is_object());
        if measured { Ok(status) } else { Err(status.to_string()) }
    });
    let peer = &status["peers"][0];
    for direction in ["uplink", "downlink"] {
        // It may have sent again what a loaded machine was late with.
        let account = &peer[direction];
        let [received, delivered, queued, dropped] =
            ["received", "delivered", "queued", "dropped"].map(|name| account[name].as_u64().unwrap());
        assert!(received >= u64::from(COUNT), "{account}");
        assert_eq!(
            (received, &account["balances"]),
            (delivered + queued + dropped, &true.into()),
            "{account}"
        );
        assert_eq!(&status["totals"][direction], account);
    }
    let lanes = peer["lanes"].as_array().unwrap();
    let indices: Vec<_> =
        lanes.iter().map(|lane| (lane["index"].as_u64().unwrap(), &lane["state"])).collect();
    let up = Value::from("up");
    assert_eq!(indices, [(0, &up), (1, &up), (2, &up)]);
    let sum = |name: &str| lanes.iter().map(|lane| lane[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum("flows"), peer["flows"].as_u64()), (1, Some(1)));
    assert_eq!(Some(sum("sent_packets")), peer["lane_packets"]["sent"].as_u64(), "asked in one moment");
    let descriptors = &status["limits"]["descriptors"];
    assert!((10..1_000).contains(&descriptors["used"].as_u64().unwrap()), "{descriptors}");
    let ingress =
        status["sockets"].as_array().unwrap().iter().find(|socket| socket["role"] == "ingress").unwrap();
    assert_eq!(ingress["received_datagrams"], peer["uplink"]["received"]);

    let named = json(&pair.entry, &["exit"]);
    let flow = &named["peers"][0]["recent_flows"][0];
    assert_eq!((&flow["service"], &flow["opened_by"]), (&"echo".into(), &"here".into()));
    let peer = &named["peers"][0];
    let forwards = peer["forwards"].as_array().unwrap();
    let address = client.local_addr().unwrap().to_string();
    assert_eq!((forwards.len(), &forwards[0]["local_address"]), (1, &address.into()), "{forwards:?}");
    assert_eq!(
        (&peer["tcp"]["services"][0]["service"], &peer["tcp"]["services"][0]["open"]),
        (&"echo".into(), &1.into())
    );
    let lane = json(&pair.entry, &["--lane", "exit/1"]);
    let shown = lane["peers"][0]["lanes"].as_array().unwrap();
    assert_eq!((shown.len(), &shown[0]["index"]), (1, &1.into()));
    assert!(shown[0]["details"]["next_packet"].as_u64() >= Some(1), "{lane}");
    documented(&[status, named, lane]);

    let text = says(&pair.entry, &[]);
    assert!(text.contains("\nexit/2  up ") && !text.contains("BALANCE") && !text.contains('\x1b'), "{text}");
    assert!(says(&pair.exit, &["entry"]).contains("entry: connected\n"));
    assert!(says(&pair.exit, &["--lane", "entry/0"]).contains("lane entry/0: up\n"));
    for (args, words) in [
        (&["nobody"][..], "no peer is named \"nobody\" (remedy: "),
        (&["--lane", "nobody/0"], "no peer is named \"nobody\" (remedy: "),
        (&["routes"], "the routes are shown by culvert status --routes"),
        (&["--lane", "exit/60"], "\"exit\" has no lane 60 (remedy: "),
        (&["--lane", "exit"], "write the peer's name, a slash and the lane's index"),
    ] {
        let output = ask(&pair.entry, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text_of(&output).contains(words), "{args:?}: {}", text_of(&output));
    }
}

fn text_of(output: &Output) -> String {
    text(&output.stderr)
}

/// Every member that a daemon printed is in the document; and every documented one that needs nothing special was printed.
#[track_caller]
fn documented(printed: &[Value]) {
    // These names are data.
    const MAPS: [&str; 3] = ["peers[].dropped", "handshakes", "gate"];
    fn collect(value: &Value, at: &str, found: &mut Vec<String>) {
        match value {
            Value::Object(members) if !MAPS.contains(&at) => {
                for (name, value) in members {
                    collect(value, &if at.is_empty() { name.clone() } else { format!("{at}.{name}") }, found);
                }
            }
            Value::Array(values) if values.iter().any(Value::is_object) => {
                values.iter().for_each(|value| collect(value, &format!("{at}[]"), found));
            }
            // A list that is empty, or something that is not there, is not named by its members.
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_)
            | Value::Object(_) => found.push(at.to_owned()),
        }
    }
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/status.md");
    let document = fs::read_to_string(document).unwrap();
    let table = document.split("| member of `status` |").nth(1).unwrap().split("\n\n").next().unwrap();
    let rows: Vec<&str> =
        table.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut found = Vec::new();
    printed.iter().for_each(|status| collect(status, "", &mut found));
    for path in &found {
        let begins = |row: &&str| {
            row.strip_prefix(path.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        assert!(rows.iter().any(begins), "{path} is not in docs/status.md");
    }
    let special = [
        "tun.",
        "drain.",
        "web_server.",
        "users[]",
        "services[]",
        "routes[]",
        "refusals[]",
        "peers[].last_error.",
        "peers[].send_error.",
        "peers[].contested.",
        "peers[].carrier_error.",
        "peers[].copies.",
        "peers[].lines[]",
        "uplinks[]",
        "talkers[]",
        "meanings",
    ];
    for row in rows.iter().filter(|row| !special.iter().any(|special| row.starts_with(special))) {
        assert!(found.iter().any(|path| path == row), "{row} is in docs/status.md, and was not printed");
    }
}

/// `culvert status --watch` on a terminal of its own.
struct Watched {
    process: Running,
    folder: TempDir,
}

impl Watched {
    fn new(agent: &Agent) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("screen")).unwrap();
        let command = format!(
            "stty rows 20 cols 70; exec {} status --watch --config {}",
            binary().display(),
            agent.config().display()
        );
        let mut script = Command::new("script");
        // -e: ends as the command does; -f: at once. Where there is no $SHELL it takes /bin/sh, and without `exec` that
        // one would have the interrupt too, and end with 130.
        script
            .env_remove("SHELL")
            .args(["-qefc", &command, "/dev/null"])
            .stdin(Stdio::piped())
            .stdout(file)
            .stderr(Stdio::null());
        Self { process: Running::start("script", &mut script), folder }
    }

    fn screen(&self) -> String {
        text(&fs::read(self.folder.path().join("screen")).unwrap())
    }

    fn wait_for_frames(&self, count: usize) {
        clock::until("the status is drawn again", PATIENCE, || {
            let screen = self.screen();
            if screen.matches("\x1b[H").count() >= count { Ok(()) } else { Err(screen) }
        });
    }

    /// What was on the terminal when the command had ended, and its exit code.
    fn end(mut self) -> (String, Option<i32>) {
        let status = self.process.wait(SHUTDOWN_LIMIT);
        (self.screen(), status.code())
    }
}

#[test]
fn the_screen_of_watch_fits_and_the_terminal_is_given_back() {
    let needed =
        [needs::AGENTS, &[Need::Tool("script", "bsdutils"), Need::Tool("stty", "coreutils")]].concat();
    if !needs::met("culvert status --watch", &needed) {
        return;
    }
    let (mut pair, _echo, _client) = pair(1);
    let mut watched = Watched::new(&pair.entry);
    watched.wait_for_frames(2);
    watched.process.child().stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    let (screen, code) = watched.end();
    assert_eq!(code, Some(0), "{screen}");
    let (_, drawn) = screen.split_once(ENTER).unwrap();
    let (drawn, after) = drawn.split_once(LEAVE).unwrap();
    assert!(!after.contains("culvert"), "{after}");
    assert!(!drawn.contains("\x1b[2J"), "nothing is cleared, so that nothing flickers");
    for frame in drawn.split("\x1b[H").skip(1) {
        // The terminal adds a return to each line.
        let lines: Vec<&str> = frame.split("\r\r\n").collect();
        assert!(lines.len() <= 20, "{frame}");
        let widest = lines.iter().map(|line| shown_width(line)).max().unwrap();
        assert!(widest <= 70, "{frame}");
        assert!(frame.contains("culvert ") && frame.contains("exit"), "{frame}");
        assert!(frame.contains("more lines"), "it is taller than the screen: {frame}");
    }

    // A daemon that goes away is said, and the terminal given back all the same.
    let watched = Watched::new(&pair.entry);
    watched.wait_for_frames(1);
    pair.entry.kill();
    let (screen, code) = watched.end();
    let (_, after) = screen.split_once(LEAVE).unwrap();
    assert!(after.contains("no daemon answers") && after.contains("remedy: "), "{after}");
    assert_eq!(code, Some(1));
}

/// Characters of a line without its escape sequences, which all end in a letter here.
fn shown_width(line: &str) -> usize {
    let mut pieces = line.split("\x1b[");
    let first = pieces.next().unwrap().chars().count();
    first
        + pieces.map(|piece| piece.split_once(char::is_alphabetic).unwrap().1.chars().count()).sum::<usize>()
}

#[test]
fn watch_into_a_file_prints_one_status_after_the_other() {
    if !needs::met("culvert status --watch", needs::AGENTS) {
        return;
    }
    let (pair, _echo, _client) = pair(1);
    let folder = tempfile::tempdir().unwrap();
    let watch = |name: &str, more: &[&str]| -> (Running, PathBuf) {
        let path = folder.path().join(name);
        let mut command = Command::new(binary());
        command.args(["status", "--watch", "1", "--config"]).arg(pair.entry.config()).args(more);
        command.stdin(Stdio::null()).stdout(File::create(&path).unwrap());
        (Running::start("culvert status --watch", &mut command), path)
    };
    let (mut lines, json_file) = watch("json", &["--json"]);
    let (mut blocks, text_file) = watch("text", &[]);
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    clock::until("two objects and two blocks", PATIENCE, || {
        let (objects, text) = (read(&json_file), read(&text_file));
        let many = objects.lines().count() >= 2 && text.matches("culvert 0").count() >= 2;
        if many { Ok(()) } else { Err(format!("{objects}\n{text}")) }
    });
    for process in [&mut lines, &mut blocks] {
        process.terminate();
        assert_eq!(process.wait(Duration::from_secs(5)).code(), Some(0));
    }
    for line in read(&json_file).lines() {
        let status: Value = serde_json::from_str(line).unwrap();
        assert_eq!((&status["version"], &status["status"]["workers"]), (&1.into(), &2.into()));
    }
    assert!(!read(&text_file).contains('\x1b'));
}

#[test]
fn a_daemon_of_another_version_is_named_beside_the_command() {
    let version = text(&culvert(&["--version"]).stdout);
    let ours = format!("this command is {}", version.trim());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control");
    let listener = UnixListener::bind(&socket).unwrap();
    let refused = r#""answer":"refused","bad_input":true,"error":"not a request: unknown variant `status`""#;
    for (members, theirs) in [
        (r#""answer":"status","status":{}"#, "the daemon is an older one, which does not say its version"),
        (r#""answer":"status","status":{},"program":"9.0.0 (f00)""#, "the daemon is culvert 9.0.0 (f00)"),
        (refused, "the daemon is an older one, which does not say its version"),
    ] {
        let output = thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
                writeln!(stream, "{{{members},\"version\":1}}").unwrap();
            });
            culvert(&["status", "--socket", socket.to_str().unwrap()])
        });
        let stderr = text(&output.stderr);
        assert_ne!(output.status.code(), Some(0), "{stderr}");
        let remedy = "(remedy: the culvert command of the same version as the daemon";
        assert!([ours.as_str(), theirs, remedy].iter().all(|words| stderr.contains(words)), "{stderr}");
    }
}

//! Every key: that the documents say what is declared, and that a reload has the effect that is declared.

use std::{env, fs, path::PathBuf, process::Command, sync::mpsc, thread, time::Duration};

use gate::identity::Identity;

use crate::{
    Access, Config, Limits, Log, Peer, Service, Transport, Tun, Uplink, User, kinds,
    kinds::Names,
    reload::{self, Effect, Kind, Plan},
    reload_tests::parse,
    section::{Key, Section, Walker},
    sections,
    tests::{KEY_2, root},
};

/// The only list of tables in a section, which the example has commented out.
const LINES: &str = "transport.uplink";

/// A row of a table in the reference of the configuration.
struct Row {
    key: String,
    words: String,
    /// As the file writes it; "required"; or a dash.
    default: String,
    effect: Effect,
    text: String,
}

/// The rows of a section, of which this is the name.
struct Rows<'r> {
    section: String,
    rows: &'r mut Vec<Row>,
}

impl Walker for Rows<'_> {
    fn key<T: Clone + 'static>(&mut self, key: &Key, kind: &kinds::Kind<T>, default: &mut T, _: &T) {
        let default = match kind.show(default, Names::default()) {
            _ if key.required.is_some() => "required".to_owned(),
            Some(shown) => format!("`{}`", shown.toml()),
            None => "—".to_owned(),
        };
        let text = key.doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
        let (key, effect) = (format!("{}.{}", self.section, key.name), key.effect);
        self.rows.push(Row { key, words: kind.words.clone(), default, effect, text });
    }

    fn table<S: Section>(&mut self, name: &'static str, default: &mut S, other: &S) {
        default.walk(other, &mut Rows { section: format!("{}.{name}", self.section), rows: self.rows });
    }
}

/// Returns all rows of the reference of the configuration.
fn rows() -> Vec<Row> {
    fn of<S: Section>(section: &str, rows: &mut Vec<Row>) {
        S::default().walk(&S::default(), &mut Rows { section: section.to_owned(), rows });
    }
    let mut rows = Vec::new();
    of::<sections::Identity>("identity", &mut rows);
    of::<Transport>("transport", &mut rows);
    of::<Uplink>(LINES, &mut rows);
    of::<Access>("access", &mut rows);
    of::<Peer>("peer", &mut rows);
    of::<sections::UdpForward>("udp", &mut rows);
    of::<sections::TcpForward>("tcp", &mut rows);
    of::<Service>("service", &mut rows);
    of::<User>("user", &mut rows);
    of::<Tun>("tun", &mut rows);
    of::<sections::Admin>("metrics", &mut rows);
    of::<sections::Http>("http", &mut rows);
    of::<crate::Records>("records", &mut rows);
    of::<sections::Control>("control", &mut rows);
    of::<Log>("log", &mut rows);
    of::<Limits>("limits", &mut rows);
    rows
}

/// When a change of the key is in effect, as the reference says it.
fn effect_words(effect: Effect) -> &'static str {
    match effect {
        Effect::Now => "reload",
        Effect::NextConnection => "next connection",
        Effect::Restart => "next start",
    }
}

/// The workers and the daemon ask the compiler for each key of the other sections where they follow a reload. These are read at the
/// start, but for the keys named here, each with who follows it.
#[test]
fn sections_that_no_reload_follows_have_keys_of_a_restart_only() {
    const FOLLOWED: [&str; 2] = [
        // `log::set_level`.
        "log.level",
        // `Config::load_beside`, which reads the folder.
        "identity.peers_dir",
    ];
    let read_once = ["identity.", "tun.", "records.", "control.", "log."];
    for Row { key, effect, .. } in rows() {
        if read_once.iter().any(|section| key.starts_with(section)) && effect != Effect::Restart {
            assert!(FOLLOWED.contains(&&*key), "who follows {key}?");
        }
    }
}

/// The tables of keys in `docs/configuration.md` are made of the declarations. `CULVERT_WRITE_REFERENCE=1` writes them.
#[test]
fn the_reference_is_what_is_declared() {
    let path = root().join("docs/configuration.md");
    let written = fs::read_to_string(&path).unwrap();
    let section_of =
        |line: &str| Some(line.strip_prefix("| `")?.split_once('`')?.0.split_once('.')?.0.to_owned());
    let line = |row: &Row| {
        let Row { key, words, default, effect, text } = row;
        format!("| `{key}` | {words} | {default} | {} | {text} |\n", effect_words(*effect))
    };
    let rows = rows();
    let mut made = String::new();
    let mut lines = written.lines().peekable();
    let mut shown = 0;
    while let Some(next) = lines.next() {
        let Some(section) = section_of(next) else {
            made += &format!("{next}\n");
            continue;
        };
        let mut sections = vec![section];
        while let Some(line) = lines.next_if(|line| line.starts_with('|')) {
            sections.extend(section_of(line).filter(|section| !sections.contains(section)));
        }
        for section in sections {
            for row in rows.iter().filter(|row| row.key.starts_with(&format!("{section}."))) {
                made += &line(row);
                shown += 1;
            }
        }
    }
    assert_eq!(shown, rows.len(), "a section of the file has no table");
    if env::var_os("CULVERT_WRITE_REFERENCE").is_some() {
        fs::write(&path, &made).unwrap();
        return;
    }
    let differs = made.lines().zip(written.lines()).find(|(made, written)| made != written);
    assert_eq!(differs, None, "made and written: write them with CULVERT_WRITE_REFERENCE=1");
    assert_eq!(made, written);
}

#[test]
fn every_key_is_in_the_example() {
    let example = fs::read_to_string(root().join("config/agent.example.toml")).unwrap();
    let rows = rows();
    assert!(rows.len() > 60 && rows.iter().any(|row| row.key == "peer.queue.packets"));
    for Row { key, .. } in &rows {
        let name = key.rsplit('.').next().unwrap();
        // The line of a key, commented out or not, or its place in an inline table.
        let shown = example.lines().any(|line| {
            let line = line.trim_start_matches("# ");
            line.starts_with(&format!("{name} = "))
                || line.contains(&format!("{{ {name} = "))
                || line.contains(&format!(", {name} = "))
        });
        assert!(shown, "config/agent.example.toml does not show {key}");
    }
}

/// What the reference says of a default is what a file gets that leaves the key out, and may be written.
#[test]
fn the_documented_defaults_may_be_written() {
    let example = example();
    for Row { key, default, .. } in rows() {
        let Some(value) = default.strip_prefix('`').map(|value| value.trim_end_matches('`')) else {
            continue;
        };
        let [text, without] = [with(&example, &key, Some(value)), with(&example, &key, None)];
        let plan = reload::plan(&parse(&text), parse(&without));
        assert_eq!(plan.changes, [], "{key} = {value}");
    }
}

/// The example with another peer, to which ports may lead, and with two lines.
fn example() -> String {
    let example = fs::read_to_string(root().join("config/agent.example.toml")).unwrap();
    let mut inside = false;
    let lines = example.lines().map(|line| {
        inside = (inside && !line.is_empty()) || line == "# [[transport.uplink]]";
        let line = if inside { line.strip_prefix("# ").unwrap_or(line) } else { line };
        format!("{line}\n")
    });
    let example: String = lines.collect();
    format!(
        "{example}\n[[peer]]\nname = \"other\"\npublic_key = \"{KEY_2}\"\nendpoints = [\"a:1\"]\n\
             [[transport.uplink]]\nname = \"lte\"\ninterface = \"wwan0\"\n"
    )
}

/// `text` with `value` for `key`, or without it, in the first table of its section. A name is changed wherever it is named.
#[track_caller]
fn with(text: &str, key: &str, value: Option<&str>) -> String {
    let (section, key) = section_of(key);
    let headers = [format!("[{section}]"), format!("[[{section}]]")];
    let at = text.lines().position(|line| headers.contains(&line.to_owned())).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let (key, inline) = key.split_once('.').map_or((key, None), |(table, key)| (table, Some(key)));
    let line = lines[at..]
        .iter_mut()
        .find(|line| line.trim_start_matches("# ").starts_with(&format!("{key} = ")))
        .unwrap_or_else(|| panic!("no {key} in [{section}]"));
    let old = line.split_once(" = ").unwrap().1.to_owned();
    *line = match (inline, value) {
        (Some(inline), value) => {
            let (before, rest) = line.split_once(&format!("{inline} = ")).unwrap();
            let end = rest.find([',', ' ']).unwrap();
            match value {
                Some(value) => format!("{before}{inline} = {value}{}", &rest[end..]),
                None => format!("{before}{}", rest[end..].trim_start_matches(", ")).replace(",  }", " }"),
            }
        }
        (None, Some(value)) => format!("{key} = {value}"),
        (None, None) => String::new(),
    };
    let text = lines.join("\n");
    match value {
        Some(value) if key == "name" && section != "tun" => text.replace(&old, value),
        _ => text,
    }
}

/// The section of a key, and the key within it.
fn section_of(key: &str) -> (&str, &str) {
    let of_line = key.strip_prefix(LINES).and_then(|key| key.strip_prefix('.'));
    of_line.map_or_else(|| key.split_once('.').unwrap(), |key| (LINES, key))
}

/// A value of the key that the example does not have, made of what the reference says may be written.
fn another(Row { key, words, default, .. }: &Row) -> String {
    let default = default.trim_matches('`');
    let special = match &**key {
        "identity.key_file" => "\"other.key\"",
        "transport.listen" => "[\"0.0.0.0:4434\"]",
        "transport.uplink.interface" => "\"eth7\"",
        "transport.uplink.source" => "\"192.0.2.7\"",
        "transport.uplink.rate" => "\"48Mbit\"",
        "access.services" => "[\"dns\"]",
        "peer.services" | "user.services" => "[]",
        "service.allow" | "service.deny" => "[\"10.7.0.0/16\"]",
        "user.password_key" => "\"AAAAAAAAAAAAAAAAAAAAAA.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\"",
        "user.password_hash" => "\"$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$aGFzaGhhc2hoYXNoaGFzaA\"",
        "user.client_key" => "\"sha256:0000000000000000000000000000000000000000000000000000000000000000\"",
        "user.networks" => "[\"[fd01::/64]:443\"]",
        "user.expires" => "\"2031-01-31\"",
        "user.disabled" => "false",
        "udp.peer" | "tcp.peer" => "\"other\"",
        // Together with the knock of the example, and beside two peers.
        "tun.name" => "\"culvert1\"",
        "tun.address" => "[\"10.9.0.1/24\"]",
        "peer.allowed_ips" => "[\"10.9.0.2/32\"]",
        "metrics.allow" | "tcp.accept_proxy" | "udp.accept_proxy" => "[\"10.7.0.0/16\"]",
        "service.upstream" => "[\"db.example.org:53\", \"127.0.0.1:54\"]",
        "peer.address" => "[\"10.9.0.7\"]",
        "http.names" => "[\"www.example.org\"]",
        "http.listen" => "[\"127.0.0.1:9443\"]",
        "http.trusted" => "[\"10.7.0.0/16\"]",
        "http.pool" => "[\"10.9.2.0/24\"]",
        "user.address" => "[\"10.9.1.7\"]",
        "http.site" => "\"http://127.0.0.1:8081\"",
        "metrics.names" => "[\"prometheus.example.org\"]",
        "tun.up" | "tun.down" => "[\"/bin/true\"]",
        "peer.congestion" => "\"cubic\"",
        "peer.thin" => "\"off\"",
        "peer.carrier" => "\"off\"",
        "peer.proxy" => "\"http://proxy.example.org:3128\"",
        "peer.map" => "[\"10.9.0.2/32 = 192.168.0.2/32\"]",
        "peer.flow_quota" => "0.25",
        "peer.quota" => "{ bytes = \"2GB\" }",
        "peer.redundant" => "{ dscp = [46] }",
        "peer.public_key" => "\"n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0\"",
        "peer.endpoints" => "[\"exit.example.org:4433\"]",
        _ => "",
    };
    if !special.is_empty() {
        return special.to_owned();
    }
    match &**words {
        "`\"0s\"`, duration, 100ms to 25s" | "`\"0s\"`, duration, 1s to 2h" => "\"0s\"".to_owned(),
        "path" => "\"/var/lib/other\"".to_owned(),
        "address" => "\"127.0.0.1:5999\"".to_owned(),
        "endpoint" => "\"gw.example.org:4433\"".to_owned(),
        "name" => "\"another\"".to_owned(),
        words => {
            let alternatives = words.split(", ").flat_map(|words| words.split(" to "));
            let written = alternatives
                .map(|word| word.trim_matches('`'))
                .filter(|word| *word != "duration" && *word != "size");
            let quoted = written.map(|word| match word.parse::<f64>() {
                Err(_) if !word.starts_with('"') && !["true", "false"].contains(&word) => {
                    format!("\"{word}\"")
                }
                Ok(_) | Err(_) => word.to_owned(),
            });
            quoted.filter(|value| value != default).last().unwrap_or_else(|| panic!("another value of {key}"))
        }
    }
}

#[test]
fn every_key_has_its_effect() {
    for row in rows() {
        let Row { key, effect, .. } = &row;
        let example = match &**key {
            "peer.rate_min" | "peer.rate_max" => with(&example(), "peer.rate", Some("\"auto\"")),
            // In place of the other.
            "transport.uplink.source" => {
                let without = with(&example(), "transport.uplink.interface", None);
                with(&without, key, Some("\"192.0.2.9\""))
            }
            "transport.uplink.rate" => with(&example(), "transport.uplink.weight", None),
            // With TLS it needs files.
            "http.listen" => with(&example(), "http.tls", Some("false")),
            // In place of the other.
            "user.password_hash" => {
                let key = format!("\"sha256:{}\"", "ab".repeat(32));
                with(&with(&example(), "user.client_key", Some(&key)), "user.password_key", None)
            }
            "user.address" => with(&example(), "http.pool", Some("[\"10.9.1.0/24\"]")),
            _ => example(),
        };
        let running = parse(&example);
        let fresh = parse(&with(&example, key, Some(&another(&row))));
        let plan = reload::plan(&running, fresh);
        assert!(!plan.changes.is_empty(), "{key} changes nothing");
        for change in &plan.changes {
            assert_eq!(change.effect, *effect, "{key}: {change:?}");
        }
        let (section, rest) = section_of(key);
        let names =
            |what: &str| what == key || what.starts_with(&format!("{section} \"")) && what.ends_with(rest);
        let table = ["name", "listen"].contains(&rest);
        assert!(table || plan.changes.iter().any(|change| names(&change.what)), "{key}: {:?}", plan.changes);
        match effect {
            Effect::Now | Effect::NextConnection => assert!(plan.config.is_some(), "{key}"),
            Effect::Restart => assert_eq!(plan.config, None, "{key}"),
        }
    }
}

/// Whatever key names a file: a FIFO there, which keeps whoever opens it, is refused at once. A key that is new is among them.
#[test]
fn a_fifo_is_refused_by_every_key_that_names_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    Identity::generate().unwrap().write_new(&at("id.key")).unwrap();
    fs::create_dir(at("peers.d")).unwrap();
    let fifo = |name: &str| assert!(Command::new("mkfifo").arg(at(name)).status().unwrap().success());
    fifo("fifo");
    fifo("peers.d/fifo.toml");
    let mut keys: Vec<String> =
        rows().into_iter().filter(|row| row.words.contains("path")).map(|row| row.key).collect();
    assert!(
        ["identity.key_file", "metrics.token_file"].iter().all(|key| keys.contains(&key.to_string())),
        "{keys:?}"
    );
    // Its own file, and one of the folder that a key names.
    keys.extend(["the file".to_owned(), "a file of a peer".to_owned()]);
    for key in keys {
        let base = with(&example(), "identity.key_file", Some("\"id.key\""));
        let base = with(&base, "identity.state_dir", Some("\"\""));
        let text = match &*key {
            "the file" => base,
            "tun.up" | "tun.down" => with(&base, &key, Some("[\"/bin/true\"]")),
            // The one is read with the other.
            "http.certificate_file" => {
                with(&with(&base, &key, Some("\"fifo\"")), "http.key_file", Some("\"id.key\""))
            }
            "http.key_file" => {
                with(&with(&base, &key, Some("\"fifo\"")), "http.certificate_file", Some("\"id.key\""))
            }
            "a file of a peer" => with(&base, "identity.peers_dir", Some("\"peers.d\"")),
            key => with(&base, key, Some("\"fifo\"")),
        };
        fs::write(at("agent.toml"), text).unwrap();
        let path = if key == "the file" { at("fifo") } else { at("agent.toml") };
        let (done, outcome) = mpsc::sync_channel(1);
        thread::spawn(move || done.send(Config::load(&path)).unwrap());
        let outcome = outcome.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| panic!("{key} hangs"));
        let said = match outcome {
            Err(error) => error.to_string(),
            Ok((config, _)) => format!("{:?}", config.directory.rejected),
        };
        match &*key {
            // A socket, made beside what is there, which must be one; and a folder of the agent's own, which is locked as one.
            "control.socket" | "identity.state_dir" => {}
            // Written to, and opened by the daemon alone: `a_fifo_is_no_file_of_records` there.
            "records.file" => {}
            // A folder.
            "identity.peers_dir" => assert!(said.contains("Not a directory"), "{said}"),
            // Programs, which only the kernel opens.
            "tun.up" | "tun.down" => {}
            _ => assert!(said.contains("FIFO") && said.contains("/dev/fd/N"), "{key}: {said}"),
        }
    }
}

#[test]
fn a_key_that_appears_is_added_and_one_that_vanishes_is_removed() {
    let base = "identity.key_file = \"id.key\"\ntransport.listen = [\"127.0.0.1:4433\"]\n";
    for (key, without, with) in [
        ("transport.advertise", "", "transport.advertise = \"gw.example.net:4433\"\n"),
        ("access.decoy", "", "access.decoy = \"127.0.0.1:8443\"\n"),
        ("metrics.listen", "", "metrics.listen = \"127.0.0.1:9464\"\n"),
        ("control.socket", "control.socket = \"\"\n", "control.socket = \"/run/x.sock\"\n"),
    ] {
        let [without, with] = [without, with].map(|text| parse(&format!("{base}{text}")));
        let value = |config: &Config| {
            let Config { transport, access, admin, control, .. } = config;
            match key {
                "transport.advertise" => transport.advertise.as_ref().map(ToString::to_string),
                "access.decoy" => access.decoy.as_ref().map(ToString::to_string),
                "metrics.listen" => admin.listen.as_ref().map(ToString::to_string),
                _ => control.as_ref().map(|path| path.display().to_string()),
            }
        };
        let kind = |old: &Config, new: &Config| {
            let mut changes = reload::plan(old, new.clone()).changes;
            assert_eq!((changes.len(), &*changes[0].what), (1, key), "{changes:?}");
            changes.remove(0).kind
        };
        let shown = value(&with).unwrap();
        assert_eq!(value(&without), None, "{key}");
        assert_eq!(kind(&without, &with), Kind::Added(shown.clone()));
        assert_eq!(kind(&with, &without), Kind::Removed(shown));
    }
}

/// A daemon that was started with a relative path reads the file by its absolute one.
#[test]
fn paths_are_the_same_wherever_the_file_is_read_from() {
    let folder = tempfile::tempdir().unwrap();
    Identity::generate().unwrap().write_new(&folder.path().join("id.key")).unwrap();
    let text = "identity = { key_file = \"id.key\", state_dir = \"state\" }\ncontrol.socket = \"control\"\n\
                transport.listen = [\"127.0.0.1:4433\"]\n";
    fs::write(folder.path().join("agent.toml"), text).unwrap();
    let up: PathBuf = env::current_dir().unwrap().components().skip(1).map(|_| "..").collect();
    let relative = up.join(folder.path().strip_prefix("/").unwrap()).join("agent.toml");
    let (started, _) = Config::load(&relative).unwrap();
    assert!(relative.is_relative() && started.identity_key_file.is_absolute());
    let (again, _) = Config::load(started.path.as_ref().unwrap()).unwrap();
    assert_eq!(reload::plan(&started, again), Plan::default());
}

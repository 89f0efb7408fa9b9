//! From the text of the file to the typed configuration, with every problem that it has.
//!
//! A value that is wrong is reported and replaced by its default, so that the checks go on; a draft with a problem
//! never becomes a [`Config`].

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use base::clock::{Clock, SystemClock};
use gate::{identity::Identity, web::WebCertificate};

use crate::{
    Access, AccessMode, Admin, Config, Directory, Forward, Http, Knock, Limits, Peer, Protocol, Service,
    Transport, Tun, User, any,
    checks::Checks,
    credential,
    directory::Texts,
    peers::Around,
    problem::{At, ConfigProblem, ConfigProblems, PeerOrigin, Report, why_unreadable},
    ranges::{self, MAX_SERVICES},
    section::{self, Section, Table},
    sections::{self, Control, TcpForward, UdpForward},
    state,
    token::Token,
};

/// How many days before its end an operator is told of a certificate: clients renew them a month before.
const FEW_DAYS: u64 = 14;

/// What is read besides the configuration and the state file.
#[derive(Default)]
pub(super) struct Sources<'s> {
    /// Whether this host is looked at: the directory of peers is read, and pools of memory fit what there is.
    pub(super) host: bool,
    /// The configuration that runs; `None` at the start.
    pub(super) running: Option<&'s Config>,
    /// Files of the directory that are known to be wrong.
    pub(super) rejected: Vec<ConfigProblem>,
}

/// A configuration whose problems are still being collected.
pub(super) struct Draft {
    checks: Checks,
    pub(super) config: Config,
    /// Where the file of our key is named, if it is.
    key_file: Option<At>,
    /// Where the file of our previous key is named, if there is one.
    previous_key_file: Option<At>,
    /// Where the file of the admin server's secret is named, if it is.
    token_file: Option<At>,
    /// Where the files of the web server's certificate and its key are named, and its names, if it has a certificate.
    web: Option<[At; 3]>,
}

impl Draft {
    /// The same as [`Draft::read_all`], without a look at this host: text alone decides what comes out.
    pub(super) fn read(
        text: &str,
        base: &Path,
        read_state: impl FnOnce(&Path) -> Result<Option<String>, io::Error>,
    ) -> Self {
        Self::read_all(text, base, read_state, Sources::default())
    }

    /// Reads and checks all of `text`, and the state file, which `read_state` reads: its text, or `None` if there is none. If
    /// `text` is no configuration at all, the state file is not read.
    pub(super) fn read_all(
        text: &str,
        base: &Path,
        read_state: impl FnOnce(&Path) -> Result<Option<String>, io::Error>,
        sources: Sources<'_>,
    ) -> Self {
        let mut checks = Checks { report: Report::new(text), ..Checks::default() };
        let whole = At::file(PeerOrigin::Config);
        let mut entries = section::parse(text, &whole, &mut checks.report);
        if let Some(entries) = &mut entries {
            ranges::expand(entries, &whole, &mut checks.report);
        }
        // What is no TOML looks empty, and would be called incomplete.
        let unreadable = entries.is_none().then(|| checks.report.clone());
        let mut root = Table::new(whole, entries.as_ref());

        let mut table = root.table("identity", &mut checks.report);
        let identity: sections::Identity = table.fill(&mut checks);
        let key_file = table.texts("key_file").next().map(|_| table.place("key_file"));
        let previous_key_file = Some(&identity.previous_key_file).filter(|path| !path.as_os_str().is_empty());
        let previous_key_file = previous_key_file.map(|_| table.place("previous_key_file"));
        let state_at = table.place("state_dir");
        let no_state = identity.state_dir.as_os_str().is_empty();
        let state_dir = if no_state { PathBuf::new() } else { base.join(&identity.state_dir) };
        let mut table = root.table("transport", &mut checks.report);
        let uplinks = table.tables("uplink", &mut checks.report);
        let uplinks = checks.read_uplinks(uplinks);
        let transport_at = table.at.clone();
        let transport = Transport { uplinks, ..table.fill(&mut checks) };
        let listens = table.has("listen") && table.length("listen") != Some(0);
        if transport.server_id.is_some() && !listens {
            let problem = "this agent does not listen, so no balancer sends it anything";
            checks.report.add(
                &table.place("server_id"),
                problem,
                "add transport.listen, or remove server_id",
            );
        }
        let services = checks.read_services(&mut root);
        let mut tun_table = root.table("tun", &mut checks.report);
        let tun = tun_table.is_there().then(|| tun_table.fill::<Tun>(&mut checks));
        let tables = root.tables("peer", &mut checks.report);
        let mut dials = !tables.is_empty();
        let (mut peers, around) = (Vec::new(), Around::new(listens, tun.as_ref()));
        checks.read_peers(tables, around, &mut peers);
        let mut users = Vec::new();
        let tables = root.tables("user", &mut checks.report);
        checks.read_users(tables, &mut users);
        let state_file = state_dir.join(state::FILE_NAME);
        // Beside a configuration of which nothing could be read, every peer of the state file would be called wrong.
        match if no_state || unreadable.is_some() { Ok(None) } else { read_state(&state_file) } {
            Ok(None) => {}
            Ok(Some(text)) => {
                dials = true;
                checks.read_state(&text, state_file, around, &mut peers, &mut users);
            }
            Err(cause) => {
                let (why, remedy) = why_unreadable(&cause);
                let problem = format!("{} cannot be read: {why}", state_file.display());
                checks.report.add(&state_at, problem, remedy);
            }
        }
        let peers_dir = Some(&identity.peers_dir).filter(|path| !path.as_os_str().is_empty());
        let mut texts = match peers_dir.map(|path| base.join(path)) {
            Some(path) if sources.host && unreadable.is_none() => Texts::read(&path),
            path => Texts::unread(path),
        };
        texts.reject(sources.rejected);
        let head = Head {
            base,
            identity,
            state_dir,
            transport,
            transport_at,
            listens,
            services,
            users,
            tun,
            tun_table,
            unreadable,
            dials,
            memory: sources.host.then(net::ceiling::memory).flatten(),
        };
        // Each time round at least one file is left out.
        loop {
            let mut all = peers.clone();
            let mut attempt = checks.clone();
            let directory = attempt.read_directory(&texts, sources.running, around, &mut all);
            let mut draft = head.complete(attempt, root.clone(), all, directory);
            let problems = draft.checks.report.take_problems(|problem| texts.is_about(problem));
            if !texts.reject(problems) {
                draft.config.directory.rejected = texts.rejected;
                draft.key_file = key_file;
                draft.previous_key_file = previous_key_file;
                return draft;
            }
        }
    }

    /// The files of the directory of peers whose peers are in the configuration.
    pub(super) fn peer_files(&self) -> Vec<Option<PathBuf>> {
        self.config.directory.files.iter().map(|file| Some(file.path.clone())).collect()
    }

    /// The configuration, or every problem that it has.
    pub(super) fn finish(self, file: Option<&Path>) -> Result<Config, ConfigProblems> {
        let (config, problems) = self.into_parts();
        if problems.is_empty() {
            return Ok(config);
        }
        Err(ConfigProblems { file: file.map(Path::to_owned), problems })
    }

    /// The same with the identity and the preshared keys, whose problems, like those of the admin server's secret, are among those
    /// of the file.
    pub(super) fn finish_with_identity(mut self, file: &Path) -> Result<(Config, Identity), ConfigProblems> {
        let key_file = credential::of(&self.config.identity_key_file);
        let loaded = self.key_file.take().map(|at| (at, Identity::load(&key_file)));
        let previous = self.load_previous_key();
        let identity = match (loaded, previous) {
            (None, _) => None,
            (Some((_, Ok(identity))), Some((at, previous))) => {
                self.checks.own_key(previous.public_key());
                if previous.public_key() == identity.public_key() {
                    let problem = "is the key of identity.key_file: there is no previous one";
                    let remedy = "remove it, or let identity.key_file name the new key";
                    self.checks.report.note(&at, problem, remedy);
                    Some(identity)
                } else {
                    Some(identity.with_previous(previous))
                }
            }
            (Some((_, Ok(identity))), None) => Some(identity),
            (Some((at, Err(error))), _) => {
                self.checks.report.add(&at, error.to_string(), error.remedy());
                None
            }
        };
        if let Some(identity) = &identity {
            self.checks.own_key(identity.public_key());
        }
        self.checks.load_preshared_keys(&mut self.config.peers);
        if let Some(at) = self.token_file.take()
            && let Err(error) = Token::read(&self.config.admin.token_file)
        {
            self.checks.report.add(&at, error.to_string(), error.remedy());
        }
        self.load_certificate();
        match (self.into_parts(), identity) {
            ((config, problems), Some(identity)) if problems.is_empty() => Ok((config, identity)),
            ((_, problems), _) => Err(ConfigProblems { file: Some(file.to_owned()), problems }),
        }
    }

    /// Reads the certificate of the web server, if the file names one.
    fn load_certificate(&mut self) {
        let Some([certificate_at, key_at, names_at]) = self.web.take() else { return };
        let Http { certificate_file, key_file, names, .. } = &self.config.http;
        let certificate = match WebCertificate::load(certificate_file, key_file) {
            Ok(certificate) => certificate,
            Err(error) => {
                let at = if error.is_about_key(key_file) { &key_at } else { &certificate_at };
                return self.checks.report.add(at, error.to_string(), error.remedy());
            }
        };
        for name in names.iter().filter(|name| !certificate.covers(name)) {
            let problem = format!("{name:?} is not among the names of the certificate");
            self.checks.report.add(&names_at, problem, "have the certificate made for it, or remove it");
        }
        let left = certificate.expires().saturating_sub(SystemClock.unix_seconds()) / (24 * 60 * 60);
        if left < FEW_DAYS {
            let problem = match left {
                0 => "the certificate has ended, or ends today".to_owned(),
                days => format!("the certificate ends in {days} days"),
            };
            let remedy = "renew it, let a deploy hook copy it here, and reload";
            self.checks.report.note(&certificate_at, problem, remedy);
        }
        self.config.certificate = Some(certificate);
    }

    /// Reads our previous key, if the file names one.
    fn load_previous_key(&mut self) -> Option<(At, Identity)> {
        let at = self.previous_key_file.take()?;
        if self.config.access.knock == Knock::Off && !self.config.transport.listen.is_empty() {
            let problem = "has no effect on peers that dial us: with access.knock = \"off\" nothing tells which key they expect";
            self.checks.report.note(
                &at,
                problem,
                "set access.knock = \"required\", or change the key at all peers at once",
            );
        }
        match Identity::load(&credential::of(&self.config.identity_previous_key_file)) {
            Ok(previous) => Some((at, previous)),
            Err(error) => {
                self.checks.report.add(&at, error.to_string(), error.remedy());
                None
            }
        }
    }

    /// The configuration with its notes, and the problems of both files.
    fn into_parts(self) -> (Config, Vec<ConfigProblem>) {
        let (problems, notes) = self.checks.report.into_parts();
        (Config { notes, ..self.config }, problems)
    }
}

/// What is read before the peers of the directory are known.
struct Head<'h> {
    base: &'h Path,
    identity: sections::Identity,
    state_dir: PathBuf,
    transport: Transport,
    transport_at: At,
    listens: bool,
    services: Vec<Service>,
    users: Vec<User>,
    tun: Option<Tun>,
    tun_table: Table<'h>,
    /// What was found wrong if the text is no configuration at all.
    unreadable: Option<Report>,
    /// Whether there are peers, in the configuration or in the state file.
    dials: bool,
    /// The memory of this host, in bytes, if it is looked at.
    memory: Option<u64>,
}

impl Head<'_> {
    /// Reads what may name a peer, and checks everything together.
    fn complete(
        &self,
        mut checks: Checks,
        mut root: Table<'_>,
        mut peers: Vec<Peer>,
        directory: Directory,
    ) -> Draft {
        let Self { base, listens, .. } = *self;
        peers.iter_mut().for_each(|peer| peer.resolve_paths(base));
        let (transport, mut tun) = (self.transport.clone(), self.tun.clone());
        let dials = self.dials || !directory.files.is_empty();
        let udp = checks.read_forwards::<UdpForward>(&mut root, "udp", |UdpForward(forward)| forward);
        let tcp = checks.read_forwards::<TcpForward>(&mut root, "tcp", |TcpForward(forward)| forward);
        let access = checks.read_access(&mut root, listens);
        let (admin, token_file) = checks.read_admin(&mut root, base);
        let (http, web) = checks.read_http(&mut root, base, &transport.listen);
        checks.reachable_users(&self.users, &http, &root.at);
        checks.memory_of_hashes(&self.users, self.memory, &root.at);
        if let Some(tun) = &mut tun {
            tun.pool.clone_from(&http.pool);
        }
        checks.inner_addresses(&self.users, &http, tun.as_ref(), &peers, &root.at);
        let records = checks.read_records(&mut root, base);
        let control = checks.read_control(&mut root, base);
        let log = root.table("log", &mut checks.report).fill(&mut checks);
        let limits = checks.read_limits(&mut root, peers.len(), self.memory);
        root.end(&mut checks.report);
        checks.clashes();
        checks.only_ipv6();
        let dialled = peers.iter().any(|peer| !peer.endpoints.is_empty());
        let tun_name = tun.as_ref().map(|tun| &*tun.name);
        checks.uplinks_beside(&transport.uplinks, tun_name, dialled, &self.transport_at);
        if let Some(tun) = &tun {
            checks.kernel_routing(tun, &self.tun_table);
            checks.collisions(tun, transport.mark);
            checks.lookups(tun, transport.mark, &peers);
            checks.unused(tun, &peers, &self.tun_table.at);
        }
        if !listens && !dials {
            let remedy = "add transport.listen, or a [[peer]] with endpoints";
            checks.report.add(&root.at, "nothing to do: this agent neither listens nor dials", remedy);
        } else if peers.is_empty() && access.mode == AccessMode::Allowlist {
            let remedy = "add one with culvert peer add, or a [[peer]]";
            checks.report.note(&root.at, "there is no peer: nobody can connect yet", remedy);
        }
        if let Some(report) = &self.unreadable {
            checks.report = report.clone();
        }
        let config = Config {
            path: None,
            identity_key_file: base.join(&self.identity.key_file),
            identity_previous_key_file: match self.identity.previous_key_file.as_os_str() {
                none if none.is_empty() => PathBuf::new(),
                path => base.join(path),
            },
            state_dir: self.state_dir.clone(),
            transport,
            access,
            peers,
            udp,
            tcp,
            services: self.services.clone(),
            users: self.users.clone(),
            tun,
            admin,
            http,
            certificate: None,
            records,
            control,
            log,
            limits,
            directory,
            closed: std::mem::take(&mut checks.closed),
            twins: std::mem::take(&mut checks.twins),
            notes: Vec::new(),
        };
        Draft { checks, config, key_file: None, previous_key_file: None, token_file, web }
    }
}

// What holds between the keys of a section, or between sections.
impl Checks {
    fn read_services(&mut self, root: &mut Table<'_>) -> Vec<Service> {
        let tables = root.tables("service", &mut self.report);
        if let Some(first) = tables.get(MAX_SERVICES) {
            let at = At { path: "service".to_owned(), ..first.at.clone() };
            self.report.add(
                &at,
                format!("more than {MAX_SERVICES} services"),
                "split them over several agents",
            );
        }
        let mut services = Vec::with_capacity(tables.len());
        for mut table in tables {
            let name: Arc<str> = table.text("name").into();
            if !name.is_empty() && self.services.contains(&name) {
                self.taken(&table.place("name"), &name, "an earlier one");
            }
            self.services.push(Arc::clone(&name));
            let service: Service = table.fill(self);
            any::check_any(self, &table, &service);
            if service.is_any() {
                self.any.insert(services.len());
            }
            if service.upstream.has_unix() && service.protocol != Protocol::Tcp {
                let problem = "a Unix socket takes TCP forwards only";
                self.report.add(&table.place("upstream"), problem, "set protocol = \"tcp\" for the service");
            }
            // Peers, who ask by name alone, cannot use one without an address.
            let (udp, tcp) = (service.protocol != Protocol::Tcp, service.protocol != Protocol::Udp);
            let (udp, tcp) = (udp && !service.is_any(), tcp && !service.is_any());
            services.push(Service { name, udp, tcp, ..service });
        }
        services
    }

    /// Reads the forwards of `section`, without those whose peer is missing.
    fn read_forwards<S: Section>(
        &mut self,
        root: &mut Table<'_>,
        section: &'static str,
        forward: fn(S) -> Forward,
    ) -> Vec<Forward> {
        let tables = root.tables(section, &mut self.report);
        let forwards = tables.into_iter().map(|mut table| forward(table.fill(self)));
        forwards.filter(|forward| forward.peer != Forward::NOBODY).collect()
    }

    /// The listeners of the whole file are known by now.
    fn read_access(&mut self, root: &mut Table<'_>, listens: bool) -> Access {
        let mut table = root.table("access", &mut self.report);
        let access: Access = table.fill(self);
        let no_knock = access.knock == Knock::Off;
        if access.mode == AccessMode::Open && no_knock {
            let problem = "in open mode every QUIC client that finds the port would be let in";
            let remedy = "set access.knock = \"required\", or access.mode = \"allowlist\"";
            self.report.add(&table.place("knock"), problem, remedy);
        }
        let Some(decoy) = access.decoy else { return access };
        let (problem, remedy) = if no_knock {
            let problem =
                "without a knock every sender may start a handshake, and no datagram would reach the decoy";
            (problem.to_owned(), "set access.knock = \"required\", or remove the decoy")
        } else if !listens {
            let problem = "this agent does not listen, so nothing reaches the decoy";
            (problem.to_owned(), "add transport.listen, or remove the decoy")
        } else if let Some(own) = self.own_listener(decoy) {
            (format!("is our own {own}"), "write the address of another QUIC server")
        } else {
            return access;
        };
        self.report.add(&table.place("decoy"), problem, remedy);
        access
    }

    fn read_admin(&mut self, root: &mut Table<'_>, base: &Path) -> (Admin, Option<At>) {
        let mut table = root.table("metrics", &mut self.report);
        let mut admin: Admin = table.fill(self);
        let token_file = admin.has_token().then(|| table.place("token_file"));
        if token_file.is_some() {
            admin.token_file = base.join(&admin.token_file);
        }
        if admin.listen.is_none() && !table.has("listen") {
            let unused = ["page", "names", "allow", "token_file"].into_iter().find(|key| table.has(key));
            if let Some(key) = unused {
                let remedy = "add metrics.listen, or remove it";
                self.report.add(
                    &table.place(key),
                    "there is no metrics.listen, so nothing is served",
                    remedy,
                );
            }
        } else if admin.is_remote() && !table.has("allow") && !table.has("token_file") {
            let problem = "every host that reaches this address could read it";
            let remedy =
                "write who may connect with metrics.allow, set metrics.token_file, or listen on 127.0.0.1";
            self.report.add(&table.place("listen"), problem, remedy);
        } else if admin.is_public() {
            let problem = "every host that reaches metrics.listen can read the status page";
            let remedy = "write the prefixes of those who may, or set metrics.token_file";
            self.report.note(&table.place("allow"), problem, remedy);
        }
        (admin, token_file)
    }

    /// The web server, and the places of its files and its names, if it has a certificate and a key.
    fn read_http(
        &mut self,
        root: &mut Table<'_>,
        base: &Path,
        quic: &[SocketAddr],
    ) -> (Http, Option<[At; 3]>) {
        let mut table = root.table("http", &mut self.report);
        let mut http: Http = table.fill(self);
        let is_named = |path: &Path| !path.as_os_str().is_empty();
        let has = [is_named(&http.certificate_file), is_named(&http.key_file), !http.names.is_empty()];
        for path in [&mut http.certificate_file, &mut http.key_file] {
            if is_named(path) {
                *path = base.join(&*path);
            }
        }
        let keys = ["certificate_file", "key_file", "names"];
        let on_tcp = !http.listen.is_empty();
        let missing = keys.iter().zip(has).find(|(_, has)| !has).map(|(key, _)| *key);
        let used = keys.into_iter().chain(["site", "pool"]).find(|key| table.has(key));
        if on_tcp {
            self.check_http_listen(&table, &http, missing, quic);
        } else if let Some((missing, used)) = missing.zip(used) {
            let problem = format!("there is no http.{missing}, so nobody meets a web server");
            self.report.note(&table.place(used), problem, format!("add {missing}, or remove the section"));
        } else if let Some(used) = used.filter(|_| quic.is_empty()) {
            let problem = "this agent does not listen, so nobody meets its web server";
            let remedy = "add transport.listen or http.listen, or remove the section";
            self.report.note(&table.place(used), problem, remedy);
        }
        for key in ["tls", "trusted"].into_iter().filter(|key| !on_tcp && table.has(key)) {
            self.report.note(&table.place(key), "has no effect without http.listen", "remove the key");
        }
        (http, (has[0] && has[1]).then(|| keys.map(|key| table.place(key))))
    }

    /// What `http.listen` needs, and what an operator should know of it; of the keys of HTTP/3 one may be `missing`.
    fn check_http_listen(
        &mut self,
        table: &Table<'_>,
        http: &Http,
        missing: Option<&str>,
        quic: &[SocketAddr],
    ) {
        let is_public = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        if http.tls {
            if let Some(missing) = missing.filter(|missing| *missing != "names") {
                let problem = format!("there is no http.{missing}, which TLS needs");
                let remedy = format!("add {missing}, or http.tls = false behind a server that ends TLS");
                self.report.add(&table.place("listen"), problem, remedy);
            }
        } else if http.trusted.is_empty() && http.listen.iter().any(is_public) {
            let problem = "everybody who reaches http.listen is answered without encryption";
            let remedy =
                "remove the key, or listen on 127.0.0.1 and name the server in front in http.trusted";
            self.report.note(&table.place("tls"), problem, remedy);
        }
        let ports: Vec<u16> = http.listen.iter().map(SocketAddr::port).collect();
        if let Some(udp) = quic.first().filter(|_| http.tls && missing.is_none())
            && !quic.iter().any(|address| ports.contains(&address.port()))
        {
            let problem = format!("HTTP/3 is at UDP port {}, and no address here has that port", udp.port());
            let remedy = "use one number for both: several clients take one port";
            self.report.note(&table.place("listen"), problem, remedy);
        }
        if http.trusted.iter().any(|net| net.prefix_len() == 0) {
            let problem = "everybody may say whose request it is";
            let remedy = "write the addresses of the servers in front only";
            self.report.note(&table.place("trusted"), problem, remedy);
        }
    }

    /// The path of the socket, or `None` for no socket.
    fn read_control(&mut self, root: &mut Table<'_>, base: &Path) -> Option<PathBuf> {
        let mut table = root.table("control", &mut self.report);
        let socket = table.fill::<Control>(self).socket;
        if socket.as_os_str().is_empty() {
            return None;
        }
        let path = base.join(socket);
        // `sun_path` of unix(7) has 108 bytes, the last one zero; the socket is made under a name with ".new" appended.
        if path.as_os_str().len() > 103 || path.as_os_str().as_encoded_bytes().contains(&0) {
            let problem = format!("{} is too long for a socket", path.display());
            self.report.add(&table.place("socket"), problem, "write at most 103 bytes");
        }
        Some(path)
    }

    fn read_limits(&mut self, root: &mut Table<'_>, peers: usize, memory: Option<u64>) -> Limits {
        let mut table = root.table("limits", &mut self.report);
        let mut limits: Limits = table.fill(self);
        if let Some(memory) = memory {
            limits.fit(memory, |key| table.has(key));
            if limits.pool_bytes() > memory / 2 {
                let key =
                    ["stream_bytes", "queue_bytes", "repair_bytes"].into_iter().find(|key| table.has(key));
                let [pools, memory] = [limits.pool_bytes(), memory].map(|bytes| bytes >> 20);
                let problem = format!(
                    "stream_bytes, queue_bytes and repair_bytes may take {pools} MiB together, and the machine or its control group \
                     has {memory} MiB: under load the kernel may end the agent"
                );
                let at = key.map_or_else(|| table.at.clone(), |key| table.place(key));
                self.report.note(
                    &at,
                    problem,
                    "at most half of the memory for the three; left out, they fit themselves",
                );
            }
        }
        if peers > limits.peers {
            let problem = format!("there are {peers} peers, and {} are allowed", limits.peers);
            self.report.add(&table.place("peers"), problem, "raise it, or remove peers");
        }
        limits
    }
}

//! `/metrics`: what the workers published, and what the daemon knows of itself, as Prometheus' text.
//!
//! | question | file |
//! |---|---|
//! | which metrics of the workers exist, with which labels? | `engine/src/worker/report/families.rs`: one line each |
//! | and of the daemon? | [`FAMILIES`] here |
//! | what about the process itself? | `process.rs` |
//! | and the configuration: its limits, its reloads? | `configured.rs` |
//! | the admin server? | `admin.rs` |
//! | the web server on TCP? | `visitors.rs` |
//! | how does the text come about? | `text.rs` |
//!
//! ```text
//! worker: u64 += 1 per packet ──▶ snapshot per tick ──▶ sum over workers and text at each scrape
//! ```
//!
//! `docs/metrics.md` lists every family, and a test compares it with the tables.

mod admin;
mod configured;
mod process;
mod text;
mod visitors;

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use base::{
    fault::{self, Fault},
    panics,
};
use config::{Directory, Limits};
use dataplane::records::RecordCounts;
use engine::{
    health::Health,
    metrics::{
        FamilyInfo,
        Kind::{self, Counter, Gauge},
        Samples,
    },
    uplinks::{UplinkBook, UplinkCount},
    worker::Snapshots,
};
use users::{Users, account::UserFigures};

use self::{
    configured::{Configured, Now, PeerFiles},
    process::Process,
};

pub use admin::{AdminRefusal, AdminServer};
pub use configured::Reload;
#[cfg(any(test, feature = "fuzzing"))]
pub use process::host_text;
/// The type of what [`Metrics::render`] returns, as HTTP names it.
pub use prometheus::TEXT_FORMAT;
pub use visitors::{CertificateRead, HttpVersion, TcpOutcome, TcpRefused, Visitors};

/// The metrics of the daemon, as `/metrics` shows them.
pub struct Metrics {
    version: String,
    commit: &'static str,
    workers: u8,
    pub snapshots: Arc<Snapshots>,
    health: Arc<Health>,
    configured: Mutex<Configured>,
    pub admin: AdminServer,
    users: Mutex<Arc<Users>>,
    uplinks: Mutex<Arc<UplinkBook>>,
    pub visitors: Visitors,
    records: Mutex<Arc<RecordCounts>>,
}

/// What is read at one scrape.
struct Scrape<'a> {
    metrics: &'a Metrics,
    configured: Configured,
    users: Arc<Users>,
    records: Arc<RecordCounts>,
    /// What each user has had.
    of_users: Vec<UserFigures>,
    /// What each line of this host has carried.
    uplinks: Vec<UplinkCount>,
    /// The values of the process itself; `None` without `/proc`.
    process: Option<Process>,
}

struct Family {
    info: FamilyInfo,
    read: fn(&Scrape<'_>, &mut Samples),
}

const fn family(
    kind: Kind,
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
    read: fn(&Scrape<'_>, &mut Samples),
) -> Family {
    Family { info: FamilyInfo { name, kind, labels, help }, read }
}

#[rustfmt::skip]
static FAMILIES: &[Family] = &[
    family(Gauge, "culvert_build_info", &["version", "commit"], "Always 1; the labels are the program's version, and the commit that it was built from, empty if it does not say.", |it, out| out.add(&[&it.metrics.version, it.metrics.commit], 1_u64)),
    family(Gauge, "culvert_ready", &[], "1 if the agent carries traffic, 0 while it starts or drains, or once its TUN device is gone.", |it, out| out.add(&[], u64::from(it.metrics.health.readiness().is_ok()))),
    family(Gauge, "culvert_workers", &[], "Threads that move packets.", |it, out| out.add(&[], u32::from(it.metrics.workers))),
    family(Counter, "culvert_reloads_total", &["outcome"], "Reloads by outcome: done, even if nothing had changed; refused, because the configuration was wrong; failed.", |it, out| out.each(it.configured.reloads.by_label())),
    family(Gauge, "culvert_config_last_reload_successful", &[], "1 if the last reload put its configuration into effect, 0 if the old one still runs.", |it, out| it.configured.each(|now| out.add(&[], u64::from(now.successful)))),
    family(Gauge, "culvert_config_last_reload_success_timestamp_seconds", &[], "When the configuration that runs was read, since the Unix epoch.", |it, out| it.configured.each(|now| out.add(&[], now.since))),
    family(Counter, "culvert_uplink_bytes_total", &["line", "direction"], "Bytes of IP packets that a line of this host has carried, headers included, of all peers: sent (uplink) and received (downlink).", |it, out| {
        for count in &it.uplinks {
            out.add(&[&count.name, "uplink"], count.bytes.sent);
            out.add(&[&count.name, "downlink"], count.bytes.received);
        }
    }),
    family(Gauge, "culvert_uplink_month_bytes", &["line"], "The same of this calendar month (UTC), both directions together, as far as this agent has counted it.", |it, out| it.uplinks.iter().for_each(|count| out.add(&[&count.name], count.month_bytes))),
    family(Gauge, "culvert_peer_files", &["state"], "Files of the directory of peers (identity.peers_dir): used, also in an earlier version, or rejected.", |it, out| out.each([("used", it.configured.peer_files.used), ("rejected", it.configured.peer_files.rejected)])),
    family(Gauge, "culvert_limit", &["limit"], "Configured limits on what can grow, by their key in the section limits.", |it, out| it.configured.each(|now| now.show_limits(out))),
    family(Counter, "culvert_panics_total", &["part"], "Panics that ended one request, lookup or reload, and not the agent. Each is a defect of culvert.", |_, out| out.each(panics::counts().by_label())),
    family(Counter, "culvert_admin_refused_total", &["reason"], "Connections and requests that the admin server refused or cut off.", |it, out| out.each(it.metrics.admin.refused().by_label())),
    family(Gauge, "culvert_history_bytes", &[], "Memory of the last ten minutes that the status page shows; 0 without metrics.page.", |it, out| out.add(&[], it.metrics.admin.history_bytes())),
    family(Gauge, "culvert_user_sessions", &["user"], "Sessions of a user that are open: CONNECT, CONNECT-UDP and CONNECT-IP.", |it, out| it.of_users.iter().for_each(|user| out.add(&[&user.name], user.sessions))),
    family(Counter, "culvert_user_sessions_total", &["user"], "Sessions of a user that were opened.", |it, out| it.of_users.iter().for_each(|user| out.add(&[&user.name], user.opened))),
    family(Gauge, "culvert_user_last_seen_timestamp_seconds", &["user"], "When credentials of a user were good, since the Unix epoch; 0 for never.", |it, out| it.of_users.iter().for_each(|user| out.add(&[&user.name], user.last_seen))),
    family(Counter, "culvert_user_bytes_total", &["user", "place"], "Bytes of a user, of TCP and of the payloads of datagrams, by where they were counted.", |it, out| it.of_users.iter().for_each(|user| out.each_of(&user.name, user.bytes.by_label()))),
    family(Counter, "culvert_user_datagrams_total", &["user", "place"], "Datagrams of a user, by where they were counted.", |it, out| it.of_users.iter().for_each(|user| out.each_of(&user.name, user.datagrams.by_label()))),
    family(Counter, "culvert_user_dropped_from_total", &["user", "reason"], "Datagrams from a user that were dropped, by reason.", |it, out| it.of_users.iter().for_each(|user| out.each_of(&user.name, user.dropped_from.by_label()))),
    family(Counter, "culvert_user_dropped_to_total", &["user", "reason"], "Datagrams to a user that were dropped, by reason.", |it, out| it.of_users.iter().for_each(|user| out.each_of(&user.name, user.dropped_to.by_label()))),
    family(Counter, "culvert_user_refused_total", &["user", "reason"], "Requests of a user that were refused, by reason.", |it, out| it.of_users.iter().for_each(|user| out.each_of(&user.name, user.refused.by_label()))),
    family(Counter, "culvert_users_wrong_credentials_total", &[], "Credentials that are not those of a user who is let in.", |it, out| out.add(&[], it.users.wrong())),
    family(Counter, "culvert_users_password_checks_total", &["outcome"], "Checks of passwords that people have chosen, which are few, by outcome.", |it, out| it.users.checks().by_label().for_each(|(outcome, count)| out.add(&[outcome], count))),
    family(Counter, "culvert_records_total", &[], "Records of UDP flows, TCP forwards, users' requests and IP packets, as the section records has them written.", |it, out| out.add(&[], it.records.noted())),
    family(Counter, "culvert_records_lost_total", &["reason"], "Records that are missing: queue, because they came faster than they were written, write, because the file took none, or send, because the kernel took none for the collector.", |it, out| out.each([("queue", it.records.lost()), ("write", it.records.unwritten()), ("send", it.records.unsent())])),
    family(Gauge, "culvert_http_tcp_connections", &[], "Connections to http.listen that are open.", |it, out| out.add(&[], it.metrics.visitors.all() as u64)),
    family(Counter, "culvert_http_tcp_connections_total", &[], "Connections to http.listen that were accepted.", |it, out| out.add(&[], it.metrics.visitors.accepted())),
    family(Counter, "culvert_http_tcp_requests_total", &["version", "outcome"], "Requests over HTTP/1.1 and HTTP/2, by outcome.", |it, out| it.metrics.visitors.show_requests(out)),
    family(Counter, "culvert_http_tcp_refused_total", &["reason"], "Connections to http.listen which were not accepted, or closed, by reason.", |it, out| it.metrics.visitors.show_refused(out)),
    family(Counter, "culvert_carrier_discarded_packets_total", &[], "Packets that waited for a stream over TCP, or came over one, and were given up when it ended.", |it, out| out.add(&[], it.metrics.visitors.carrier_discarded().load(Ordering::Relaxed))),
    family(Counter, "culvert_http_certificate_reads_total", &["outcome"], "Changes of the certificate's files that were noticed between reloads: renewed, or kept, because the new pair cannot be used.", |it, out| it.metrics.visitors.show_certificates(out)),
    family(Gauge, "culvert_http_certificate_end_timestamp_seconds", &[], "When the certificate of the web server ends, since the Unix epoch; no value without one.", |it, out| it.metrics.visitors.certificate_end().into_iter().for_each(|end| out.add(&[], end))),
    family(Counter, "culvert_process_cpu_seconds_total", &[], "User and system CPU time of all threads.", |it, out| it.process(out, |it| it.cpu_seconds)),
    family(Gauge, "culvert_process_resident_memory_bytes", &[], "Resident memory.", |it, out| it.process(out, |it| it.resident_bytes)),
    family(Gauge, "culvert_process_open_fds", &[], "Open file descriptors.", |it, out| it.process(out, |it| it.open_fds)),
    family(Gauge, "culvert_process_max_fds", &[], "File descriptors that the process may have open: its limit RLIMIT_NOFILE.", |it, out| it.process(out, |it| it.max_fds)),
    family(Gauge, "culvert_process_start_time_seconds", &[], "Start of the process, since the Unix epoch.", |it, out| it.process(out, |it| it.start_time_seconds)),
    family(Counter, "culvert_kernel_listen_overflows_total", &[], "Connections that the kernel dropped because a listen backlog was full, of all programs in the network namespace.", |it, out| it.process(out, |it| it.listen_overflows)),
    family(Gauge, "culvert_process_threads", &[], "Threads of the process.", |it, out| it.process(out, |it| it.threads)),
    family(Counter, "culvert_process_thread_cpu_seconds_total", &["thread"], "User and system CPU time of the agent's own threads; culvert-0 is the first worker.", |it, out| {
        let threads = it.process.as_ref().and_then(|_| process::threads().ok()).unwrap_or_default();
        threads.iter().for_each(|(name, seconds)| out.add(&[name], *seconds));
    }),
];

/// What reads the series of a family.
type Read<'a> = Box<dyn Fn() -> Samples + 'a>;

impl Scrape<'_> {
    fn samples(&self, family: &Family) -> Samples {
        let mut samples = Samples::default();
        (family.read)(self, &mut samples);
        samples
    }

    fn process(&self, out: &mut Samples, read: fn(&Process) -> f64) {
        self.process.iter().for_each(|process| out.add(&[], read(process)));
    }
}

impl Metrics {
    /// Shows what the workers put into `snapshots`; `version` and `commit` become the labels of `culvert_build_info`.
    #[must_use]
    pub fn new(
        version: &str,
        commit: Option<&'static str>,
        workers: u8,
        snapshots: Arc<Snapshots>,
        health: Arc<Health>,
    ) -> Self {
        Self {
            version: version.to_owned(),
            commit: commit.unwrap_or_default(),
            workers,
            snapshots,
            health,
            configured: Mutex::default(),
            admin: AdminServer::default(),
            users: Mutex::default(),
            uplinks: Mutex::default(),
            visitors: Visitors::default(),
            records: Mutex::default(),
        }
    }

    /// Shows how many records there were.
    pub fn show_records(&self, records: &Arc<RecordCounts>) {
        *panics::lock(&self.records) = Arc::clone(records);
    }

    /// Shows what these users have had.
    pub fn show_users(&self, users: &Arc<Users>) {
        *panics::lock(&self.users) = Arc::clone(users);
    }

    /// Shows what these lines have carried.
    pub fn show_lines(&self, uplinks: &Arc<UplinkBook>) {
        *panics::lock(&self.uplinks) = Arc::clone(uplinks);
    }

    /// Every family that exists, also those without a value yet, in no particular order.
    pub fn info() -> impl Iterator<Item = &'static FamilyInfo> {
        Snapshots::families().chain(FAMILIES.iter().map(|family| &family.info))
    }

    /// A configuration with these limits runs from now on. To be called at the start, and after each reload that is
    /// [`Reload::Done`]; `unix_time` is the wall clock's.
    pub fn configured(&self, limits: &Limits, unix_time: Duration) {
        panics::lock(&self.configured).now =
            Some(Now { limits: *limits, since: unix_time, successful: true });
    }

    /// The directory of peers was read so. To be called when [`Metrics::configured`] is.
    pub fn peer_files(&self, directory: &Directory) {
        let (used, rejected) = (directory.files.len() as u64, directory.rejected_files().len() as u64);
        panics::lock(&self.configured).peer_files = PeerFiles { used, rejected };
    }

    /// Counts a reload by its outcome, and remembers whether it succeeded.
    pub fn reloaded(&self, outcome: Reload) {
        let Configured { reloads, now, .. } = &mut *panics::lock(&self.configured);
        reloads[outcome] += 1;
        if let Some(now) = now {
            now.successful = outcome == Reload::Done;
        }
    }

    /// All values in Prometheus' text format, version 0.0.4.
    #[must_use]
    pub fn render(&self) -> String {
        fault::point(Fault::Render);
        let configured = panics::lock(&self.configured).clone();
        let users = Arc::clone(&panics::lock(&self.users));
        let of_users = users.figures();
        let records = Arc::clone(&panics::lock(&self.records));
        let uplinks = panics::lock(&self.uplinks).counts();
        let process = Process::read().ok();
        let scrape = Scrape { metrics: self, configured, users, records, of_users, uplinks, process };
        let moment = self.snapshots.moment();
        let of_workers = moment.families().map(|(info, read)| (info, Box::new(read) as Read<'_>));
        let of_daemon =
            FAMILIES.iter().map(|family| (&family.info, Box::new(|| scrape.samples(family)) as Read<'_>));
        let mut families: Vec<_> = of_workers.chain(of_daemon).collect();
        families.sort_unstable_by_key(|(info, _)| info.name);
        let mut text = String::new();
        families.iter().for_each(|(info, read)| text::append(&mut text, info, read()));
        text
    }
}

#[cfg(test)]
mod tests;

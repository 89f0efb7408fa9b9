//! How much of the host the agent gets: buffers, files, CPUs, privileges, time (pure).

use config::{Config, Knock, defaults};

use ops::control_socket::status::Used;

use super::{
    Check, Finding, Severity,
    facts::{Clock, Facts, Limits},
    unit::NAME,
};

pub(super) fn checks(facts: &Facts, config: Option<&Config>) -> Vec<Finding> {
    let limits = &facts.limits;
    let mut findings = vec![
        buffer(limits, config, &RECEIVE),
        buffer(limits, config, &SEND),
        backlog(limits),
        udp_drops(limits),
        clock(&facts.clock, config),
    ];
    if let Some(config) = config {
        findings.push(open_files(facts, config));
        findings.push(workers(facts, config));
        findings.push(capabilities(facts, config));
    }
    findings
}

/// Bytes of the socket buffers that are asked for, before the kernel doubles them: with a rate, what comes within the longest
/// `peer.queue.time`, else `limits.receive_buffer`.
pub(super) fn wanted_buffer(config: Option<&Config>, rate: Option<u64>) -> u64 {
    let Some(rate) = rate else { return configured_buffer(config) };
    let times = config.into_iter().flat_map(|config| &config.peers).map(|peer| peer.queue.time);
    let time = times.max().unwrap_or(defaults::QUEUE.time);
    let bytes = u128::from(rate / 8) * time.as_millis() / 1_000;
    u64::try_from(bytes).unwrap_or(u64::MAX).min(MOST_BUFFER)
}

/// The kernel counts a buffer's bytes, doubled, in an int.
const MOST_BUFFER: u64 = (i32::MAX / 2) as u64;

fn configured_buffer(config: Option<&Config>) -> u64 {
    config.map_or(defaults::SOCKET_BUFFER_BYTES, Config::socket_buffer_bytes) as u64
}

/// One of the two buffers of a socket.
struct Buffer {
    check: Check,
    parameter: &'static str,
    max: fn(&Limits) -> Option<u64>,
    granted: fn(&Limits) -> Option<u64>,
    problem: &'static str,
}

const RECEIVE: Buffer = Buffer {
    check: Check::ReceiveBuffer,
    parameter: "net.core.rmem_max",
    max: |limits| limits.rmem_max,
    granted: |limits| Some(limits.buffers?.receive),
    problem: "bursts are lost before the agent sees them",
};

const SEND: Buffer = Buffer {
    check: Check::SendBuffer,
    parameter: "net.core.wmem_max",
    max: |limits| limits.wmem_max,
    granted: |limits| Some(limits.buffers?.send),
    problem: "bursts are lost before they leave",
};

fn buffer(limits: &Limits, config: Option<&Config>, buffer: &Buffer) -> Finding {
    let wanted = wanted_buffer(config, limits.rate);
    let parameter = buffer.parameter;
    let max = (buffer.max)(limits).map_or_else(|| "not shown".to_owned(), |max| max.to_string());
    let at = |value: String| Finding::ok(buffer.check, parameter, value);
    let Some(granted) = (buffer.granted)(limits) else {
        let remedy = format!("sysctl {parameter}: {wanted} or more");
        return at(max).note("the kernel does not say what it gives", remedy);
    };
    let forced = limits.buffers.is_some_and(|buffers| buffers.forced);
    let how = if forced { ", which does not bind this user (CAP_NET_ADMIN)" } else { "" };
    let mut remedies = Vec::new();
    if wanted > configured_buffer(config) {
        let size = config::size_text(wanted.next_multiple_of(1 << 10));
        remedies.push(format!("limits.receive_buffer = \"{size}\""));
    }
    if granted < wanted {
        remedies.push(format!(
            "sysctl -w {parameter}={wanted} (to keep it, a line \"{parameter} = {wanted}\" in /etc/sysctl.d/60-culvert.conf), \
             or CAP_NET_ADMIN for the daemon"
        ));
    }
    let problem = format!("{}{}", buffer.problem, if limits.rate.is_some() { " at this rate" } else { "" });
    let found = at(format!("{max}{how}; {granted} bytes of {wanted} are given"));
    found.warning_if(!remedies.is_empty(), problem, remedies.join("; and "))
}

fn backlog(limits: &Limits) -> Finding {
    /// The kernel's default of `net.core.netdev_max_backlog`, in packets.
    const USUAL: u64 = 1_000;
    let (check, parameter) = (Check::Backlog, "net.core.netdev_max_backlog");
    // A network namespace may not show it.
    let Some(backlog) = limits.backlog else { return Finding::ok(check, parameter, "not shown here") };
    let drops = limits.backlog_drops;
    Finding::ok(check, parameter, format!("{backlog}; {drops} packets lost there since the start"))
        .warning_if(
            backlog < USUAL,
            "bursts are lost between the network card and the sockets",
            format!("sysctl -w {parameter}={USUAL}"),
        )
        .note_if(
            drops > 0,
            "packets were lost between the network card and the sockets, whenever that was",
            format!("sysctl -w {parameter}={}", backlog.saturating_mul(2)),
        )
}

fn udp_drops(limits: &Limits) -> Finding {
    let drops = limits.udp_drops;
    Finding::ok(Check::UdpDrops, "RcvbufErrors", format!("{drops} since the network came up")).note_if(
        drops > 0,
        "sockets of this host lost datagrams because their buffers were full, whenever that was",
        "ss -uanm shows the sockets (d is what each has lost); the agent's are culvert_socket_kernel_drops_total",
    )
}

/// What there is above the limit on open files.
const REFUSED: &str = "flows and connections above it are refused";

fn open_files(facts: &Facts, config: &Config) -> Finding {
    let (limits, wanted) = (&facts.limits, config.descriptors());
    let at = |value: String| Finding::ok(Check::OpenFiles, "RLIMIT_NOFILE", value);
    // The limit of this process says nothing of a daemon that was started elsewhere. An older daemon does not say its own.
    let running = facts.daemon.status().map(|status| status.limits.descriptors);
    if let Some(Used { used, limit }) = running.filter(|descriptors| descriptors.limit > 0) {
        let remedy = format!(
            "LimitNOFILE={wanted} in the unit, or ulimit -Hn {wanted} as root, and a restart of the daemon; or a lower limits.flows"
        );
        let value =
            format!("{limit} of the running daemon, {used} in use; [limits] and peers may need {wanted}");
        return at(value).warning_if(limit < wanted, REFUSED, remedy);
    }
    let Some(hard) = limits.descriptors else {
        let problem = "the kernel does not say how many files may be open";
        return at("not shown".to_owned()).note(problem, format!("ulimit -Hn: {wanted} or more"));
    };
    let may_raise = limits.has(Limits::SYS_RESOURCE);
    let granted = match limits.most_descriptors {
        Some(most) if may_raise => hard.max(wanted.min(most)),
        Some(_) | None => hard,
    };
    let raised = if granted > hard { format!(", raised to {granted} at the start") } else { String::new() };
    let remedy = if may_raise {
        format!("sysctl -w fs.nr_open={wanted}, or a lower limits.flows")
    } else {
        format!("LimitNOFILE={wanted} in the unit, ulimit -Hn {wanted} as root, or a lower limits.flows")
    };
    let whose = if facts.daemon.may_run() { " of this user, the daemon does not say its own" } else { "" };
    let found = at(format!("{hard}{raised}{whose}; [limits] and peers may need {wanted}"));
    found.warning_if(granted < wanted, REFUSED, remedy)
}

fn workers(facts: &Facts, config: &Config) -> Finding {
    let workers = config.worker_count();
    let running = facts.daemon.status().map(|status| status.cpus).filter(|cpus| *cpus > 0);
    // What the daemon may use is within its quota.
    let (cpus, quota) = running.map_or((facts.limits.cpus, facts.limits.cpu_quota), |cpus| (cpus, None));
    let runs = if running.is_some() { "for the daemon that runs" } else { "to run on" };
    let shown = quota.map_or_else(String::new, |quota| format!(", a quota of {quota:.1} CPUs"));
    let least = quota.map_or(cpus as f64, |quota| quota.min(cpus as f64));
    let too_few = f64::from(workers) > least;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shown between 1 and 64")]
    let whole = least as u8;
    Finding::ok(Check::Workers, "transport.workers", format!("{workers}; {cpus} CPUs {runs}{shown}"))
        .warning_if(
            too_few && least < 1.0,
            "the kernel stops the agent for the rest of a period when its quota is used up",
            "CPUQuota=100% or more in the unit, or no quota",
        )
        .warning_if(
            too_few,
            "workers wait for each other's CPU while packets wait for them",
            format!("transport.workers = {whole}, or 0 to follow the CPUs"),
        )
}

fn capabilities(facts: &Facts, config: &Config) -> Finding {
    let needs =
        [config.tun.is_some().then_some("[tun]"), (config.transport.mark != 0).then_some("transport.mark")];
    let needs: Vec<&str> = needs.into_iter().flatten().collect();
    let has = facts.limits.has(Limits::NET_ADMIN);
    let value = match (has, needs.is_empty()) {
        (true, _) => "this user has it",
        (false, true) => "this user has it not, and nothing needs it",
        (false, false) => "this user has it not",
    };
    let found = Finding::ok(Check::Capabilities, "CAP_NET_ADMIN", value);
    if has || needs.is_empty() {
        return found;
    }
    let needs = needs.join(" and ");
    let given = facts.service.unit.as_ref().is_some_and(|unit| unit.gives("CAP_NET_ADMIN"));
    let remedy = "AmbientCapabilities=CAP_NET_ADMIN in the unit, setcap cap_net_admin+ep on the program, or --cap-add \
                  NET_ADMIN for a container";
    found
        .note_if(
            given,
            format!("{needs} needs it; {NAME} gives it to the daemon (AmbientCapabilities=)"),
            facts.service.look(),
        )
        .note_if(
            facts.daemon.may_run(),
            format!("{needs} needs it; the daemon that runs may have it"),
            remedy,
        )
        .error_if(true, format!("{needs} needs it: the agent does not start"), remedy)
}

fn clock(clock: &Clock, config: Option<&Config>) -> Finding {
    /// The year 2025, before which this program did not exist, in seconds since the Unix epoch.
    const LEAST: u64 = 1_735_689_600;
    /// A clock without anybody to keep it right drifts by some 50 ppm: 90 s in three weeks.
    const DRIFTS: &str =
        "nobody keeps it right: once it is off by the other end's access.clock_window, no connection is made";
    let at = |value: String| Finding::ok(Check::Clock, "system clock", value);
    if clock.unix_seconds < LEAST {
        return at(format!("{} s since 1970", clock.unix_seconds)).error(
            "it shows a year before this program was made: no peer believes our knocks, nor we theirs",
            "timedatectl set-ntp true, or date -s",
        );
    }
    let Some(state) = clock.state else {
        let problem = "the kernel does not say whether it is right";
        return at("not shown".to_owned()).note(problem, "timedatectl");
    };
    let knocks = config.is_none_or(|config| {
        let listens = !config.transport.listen.is_empty() && config.access.knock == Knock::Required;
        listens || config.peers.iter().any(|peer| !peer.endpoints.is_empty())
    });
    let severity = if knocks { Severity::Warning } else { Severity::Note };
    if !state.synchronised {
        let remedy = "timedatectl set-ntp true, or an NTP client such as chrony";
        return at("not synchronised".to_owned()).but(severity, DRIFTS, remedy);
    }
    let window = config.map_or(defaults::ACCESS.clock_window, |config| config.access.clock_window);
    let found = at(format!("synchronised, off by {:.1?} at most", state.most_error));
    if state.most_error <= window / 2 {
        return found;
    }
    let problem = format!("it may be off by more than half of access.clock_window, {window:?}");
    found.but(severity, problem, "timedatectl timesync-status, or chronyc tracking")
}

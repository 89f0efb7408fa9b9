//! The process as the kernel sees it, read from `/proc/self` at each scrape.

use std::{collections::BTreeMap, fs, io};

/// The values of the process at one reading of `/proc`.
#[derive(Debug, PartialEq)]
pub(super) struct Process {
    pub(super) cpu_seconds: f64,
    pub(super) resident_bytes: f64,
    pub(super) open_fds: f64,
    pub(super) max_fds: f64,
    pub(super) start_time_seconds: f64,
    pub(super) threads: f64,
    pub(super) listen_overflows: f64,
}

impl Process {
    pub(super) fn read() -> io::Result<Self> {
        let stat = fs::read_to_string("/proc/self/stat")?;
        let status = fs::read_to_string("/proc/self/status")?;
        let kernel = fs::read_to_string("/proc/stat")?;
        let limits = fs::read_to_string("/proc/self/limits")?;
        // The listing holds a descriptor of its own while it counts.
        let open_fds = fs::read_dir("/proc/self/fd")?.count().saturating_sub(1);
        let process = Self::parse([&stat, &status, &kernel, &limits], open_fds);
        let network = fs::read_to_string("/proc/self/net/netstat").unwrap_or_default();
        let listen_overflows = listen_overflows(&network).unwrap_or(0.0);
        process
            .map(|process| Self { listen_overflows, ..process })
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses four files of `/proc`: see proc_pid_stat(5), proc_pid_status(5), proc_stat(5) and proc_pid_limits(5).
    fn parse([stat, status, kernel, limits]: [&str; 4], open_fds: usize) -> Option<Self> {
        let after_name = name_and_rest(stat)?.1;
        let line = |text: &str, key: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(key))?;
            value.split_whitespace().next()?.parse::<f64>().ok()
        };
        Some(Self {
            cpu_seconds: cpu_seconds(after_name)?,
            resident_bytes: line(status, "VmRSS:")? * 1024.0,
            open_fds: open_fds as f64,
            // "unlimited" is above every ceiling of the kernel.
            max_fds: line(limits, "Max open files").unwrap_or(f64::INFINITY),
            start_time_seconds: line(kernel, "btime ")? + field(after_name, 22)? / TICKS_PER_SECOND,
            threads: line(status, "Threads:")?,
            listen_overflows: 0.0,
        })
    }
}

/// `ListenOverflows` of `/proc/net/netstat`: a line of names, then a line of their values, for each group.
fn listen_overflows(netstat: &str) -> Option<f64> {
    let mut lines = netstat.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut pairs = names.split_whitespace().zip(values.split_whitespace());
    pairs.find(|(name, _)| *name == "ListenOverflows")?.1.parse().ok()
}

/// Takes any four texts for the files of [`Process::parse`].
#[cfg(any(test, feature = "fuzzing"))]
pub fn host_text(files: [&str; 4]) {
    if let Some(process) = Process::parse(files, 7) {
        assert!(name_and_rest(files[0]).is_some() && process.open_fds == 7.0);
    }
}

/// USER_HZ: part of the kernel's user-space ABI on every architecture we build for.
const TICKS_PER_SECOND: f64 = 100.0;

/// The name of a `stat` file, and what follows it. The name is in parentheses, and may hold spaces and parentheses.
fn name_and_rest(stat: &str) -> Option<(&str, &str)> {
    let (start, rest) = stat.rsplit_once(')')?;
    Some((start.split_once('(')?.1, rest))
}

/// A field by its number in proc_pid_stat(5); the third is the first after the name.
fn field(after_name: &str, number: usize) -> Option<f64> {
    after_name.split_whitespace().nth(number - 3)?.parse().ok()
}

fn cpu_seconds(after_name: &str) -> Option<f64> {
    Some((field(after_name, 14)? + field(after_name, 15)?) / TICKS_PER_SECOND)
}

/// CPU seconds by the names of threads: a worker's is `culvert-` and its number. Those that look up names come and go, and have
/// other names.
pub(super) fn threads() -> io::Result<BTreeMap<String, f64>> {
    let mut threads = BTreeMap::new();
    for thread in fs::read_dir("/proc/self/task")? {
        // A thread may end while it is looked at.
        let Ok(stat) = fs::read_to_string(thread?.path().join("stat")) else { continue };
        let read = name_and_rest(&stat).and_then(|(name, rest)| Some((name, cpu_seconds(rest)?)));
        if let Some((name, seconds)) = read.filter(|(name, _)| name.starts_with("culvert")) {
            *threads.entry(name.to_owned()).or_default() += seconds;
        }
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "4242 (a (b) c) S 1 4242 4242 0 -1 4194560 900 0 0 0 \
        1234 66 0 0 20 0 3 0 5050 123456789 2048 18446744073709551615";
    const STATUS: &str = "Name:\ta\nVmHWM:\t  9999 kB\nVmRSS:\t    2048 kB\nThreads:\t3\n";
    const LIMITS: &str = "Limit   Soft Limit  Hard Limit  Units\nMax open files            1024                 524288               files\n";
    const KERNEL: &str = "cpu  1 2 3\nbtime 1700000000\nprocesses 5\n";

    #[test]
    fn the_kernel_s_files_are_understood() {
        let expected = Process {
            cpu_seconds: 13.0,
            resident_bytes: 2_097_152.0,
            open_fds: 7.0,
            max_fds: 1024.0,
            start_time_seconds: 1_700_000_050.5,
            threads: 3.0,
            listen_overflows: 0.0,
        };
        assert_eq!(Process::parse([STAT, STATUS, KERNEL, LIMITS], 7), Some(expected));
    }

    #[test]
    fn broken_files_give_nothing() {
        for stat in ["", "1 (a", "1 (a) S 1", "1 (a) x x x x x x x x x x x x x x x x x x x x x x"] {
            assert_eq!(Process::parse([stat, STATUS, KERNEL, LIMITS], 0), None);
        }
        assert_eq!(Process::parse([STAT, "", KERNEL, LIMITS], 0), None);
        assert_eq!(Process::parse([STAT, STATUS, "", LIMITS], 0), None);
    }

    #[test]
    fn this_process_has_plausible_values() {
        let process = Process::read().unwrap();
        assert!(process.resident_bytes > 100_000.0 && process.open_fds >= 3.0 && process.threads >= 1.0);
        assert!(process.start_time_seconds > 1_600_000_000.0 && process.max_fds >= process.open_fds);
        let worker = std::thread::Builder::new().name("culvert-77".to_owned());
        let names =
            worker.spawn(|| threads().unwrap().into_keys().collect::<Vec<_>>()).unwrap().join().unwrap();
        assert!(names.contains(&"culvert-77".to_owned()), "{names:?}");
    }

    #[test]
    fn overflows_of_listen_backlogs_are_read_by_their_name() {
        let text = "TcpExt: SyncookiesSent ListenOverflows ListenDrops\nTcpExt: 1 2 3\nIpExt: InNoRoutes\nIpExt: 4\n";
        assert_eq!(listen_overflows(text), Some(2.0));
        assert_eq!(listen_overflows("TcpExt: SyncookiesSent\nTcpExt: 1\n"), None);
        assert_eq!(listen_overflows(""), None);
    }
}

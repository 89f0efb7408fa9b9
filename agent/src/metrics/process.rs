//! The process as the kernel sees it, read from `/proc/self` at each scrape.

use std::{fs, io};

use prometheus::{
    core::{Collector, Desc},
    proto,
};

/// One family of [`ProcessCollector`].
pub(super) struct Family {
    pub(super) name: &'static str,
    help: &'static str,
    kind: proto::MetricType,
    value: fn(&Process) -> f64,
}

impl Family {
    pub(super) fn kind_name(&self) -> &'static str {
        if self.kind == proto::MetricType::COUNTER { "counter" } else { "gauge" }
    }
}

pub(super) const PROCESS_FAMILIES: &[Family] = &[
    Family {
        name: "culvert_process_cpu_seconds_total",
        help: "User and system CPU time of all threads.",
        kind: proto::MetricType::COUNTER,
        value: |process| process.cpu_seconds,
    },
    Family {
        name: "culvert_process_resident_memory_bytes",
        help: "Resident memory.",
        kind: proto::MetricType::GAUGE,
        value: |process| process.resident_bytes,
    },
    Family {
        name: "culvert_process_open_fds",
        help: "Open file descriptors.",
        kind: proto::MetricType::GAUGE,
        value: |process| process.open_fds,
    },
    Family {
        name: "culvert_process_start_time_seconds",
        help: "Start of the process, since the Unix epoch.",
        kind: proto::MetricType::GAUGE,
        value: |process| process.start_time_seconds,
    },
    Family {
        name: "culvert_process_threads",
        help: "Threads of the process.",
        kind: proto::MetricType::GAUGE,
        value: |process| process.threads,
    },
];

/// Reads `/proc/self` when it is asked. Without `/proc` its families have no values.
pub(super) struct ProcessCollector {
    descs: Vec<Desc>,
}

impl ProcessCollector {
    pub(super) fn new() -> Result<Self, prometheus::Error> {
        let desc = |family: &Family| {
            Desc::new(family.name.to_owned(), family.help.to_owned(), Vec::new(), Default::default())
        };
        Ok(Self { descs: PROCESS_FAMILIES.iter().map(desc).collect::<Result<_, _>>()? })
    }
}

impl Collector for ProcessCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let Ok(process) = Process::read() else { return Vec::new() };
        PROCESS_FAMILIES.iter().map(|family| family_of(family, (family.value)(&process))).collect()
    }
}

fn family_of(family: &Family, value: f64) -> proto::MetricFamily {
    let mut metric = proto::Metric::default();
    if family.kind == proto::MetricType::COUNTER {
        let mut counter = proto::Counter::default();
        counter.set_value(value);
        metric.set_counter(counter);
    } else {
        let mut gauge = proto::Gauge::default();
        gauge.set_value(value);
        metric.set_gauge(gauge);
    }
    let mut out = proto::MetricFamily::default();
    out.set_name(family.name.to_owned());
    out.set_help(family.help.to_owned());
    out.set_field_type(family.kind);
    out.set_metric(vec![metric]);
    out
}

/// The values of one reading.
#[derive(Debug, PartialEq)]
struct Process {
    cpu_seconds: f64,
    resident_bytes: f64,
    open_fds: f64,
    start_time_seconds: f64,
    threads: f64,
}

impl Process {
    fn read() -> io::Result<Self> {
        let stat = fs::read_to_string("/proc/self/stat")?;
        let status = fs::read_to_string("/proc/self/status")?;
        let kernel = fs::read_to_string("/proc/stat")?;
        // The listing holds a descriptor of its own while it counts.
        let open_fds = fs::read_dir("/proc/self/fd")?.count().saturating_sub(1);
        Self::parse(&stat, &status, &kernel, open_fds).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// proc_pid_stat(5), proc_pid_status(5), proc_stat(5).
    fn parse(stat: &str, status: &str, kernel: &str, open_fds: usize) -> Option<Self> {
        // USER_HZ: part of the kernel's user-space ABI on every architecture we build for.
        const TICKS_PER_SECOND: f64 = 100.0;
        // The second field is the program's name in parentheses, which may hold spaces and parentheses.
        let after_name = stat.rsplit_once(')')?.1;
        let field = |number: usize| after_name.split_whitespace().nth(number - 3)?.parse::<f64>().ok();
        let line = |text: &str, key: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(key))?;
            value.split_whitespace().next()?.parse::<f64>().ok()
        };
        Some(Self {
            cpu_seconds: (field(14)? + field(15)?) / TICKS_PER_SECOND,
            resident_bytes: line(status, "VmRSS:")? * 1024.0,
            open_fds: open_fds as f64,
            start_time_seconds: line(kernel, "btime ")? + field(22)? / TICKS_PER_SECOND,
            threads: line(status, "Threads:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "4242 (a (b) c) S 1 4242 4242 0 -1 4194560 900 0 0 0 \
        1234 66 0 0 20 0 3 0 5050 123456789 2048 18446744073709551615";
    const STATUS: &str = "Name:\ta\nVmHWM:\t  9999 kB\nVmRSS:\t    2048 kB\nThreads:\t3\n";
    const KERNEL: &str = "cpu  1 2 3\nbtime 1700000000\nprocesses 5\n";

    #[test]
    fn the_kernel_s_files_are_understood() {
        let expected = Process {
            cpu_seconds: 13.0,
            resident_bytes: 2_097_152.0,
            open_fds: 7.0,
            start_time_seconds: 1_700_000_050.5,
            threads: 3.0,
        };
        assert_eq!(Process::parse(STAT, STATUS, KERNEL, 7), Some(expected));
    }

    #[test]
    fn broken_files_give_nothing() {
        for stat in ["", "1 (a", "1 (a) S 1", "1 (a) x x x x x x x x x x x x x x x x x x x x x x"] {
            assert_eq!(Process::parse(stat, STATUS, KERNEL, 0), None);
        }
        assert_eq!(Process::parse(STAT, "", KERNEL, 0), None);
        assert_eq!(Process::parse(STAT, STATUS, "", 0), None);
    }

    #[test]
    fn this_process_has_plausible_values() {
        let process = Process::read().unwrap();
        assert!(process.resident_bytes > 100_000.0 && process.open_fds >= 3.0 && process.threads >= 1.0);
        assert!(process.start_time_seconds > 1_600_000_000.0);
    }
}

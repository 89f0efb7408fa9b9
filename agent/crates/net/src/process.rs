//! This process, its threads and its sockets, as the kernel knows them.

use std::{
    fs::File,
    io,
    num::NonZeroUsize,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    thread,
    time::Duration,
};

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::{
        prctl::set_dumpable,
        resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit},
        signal::{Signal, kill, killpg},
    },
    unistd::Pid,
};

use crate::sys;

/// Raises the limit on open files to the hard limit, and that one to `wanted` where it is lower and may be raised; returns
/// the limit that holds.
///
/// # Errors
/// The kernel's, e.g. `PermissionDenied` where a sandbox forbids it.
pub fn raise_descriptor_limit(wanted: u64) -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    // Root may raise the hard limit too; others may not, and get what there is.
    if hard < wanted && setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_ok() {
        return Ok(wanted);
    }
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// Descriptors that are left to lanes, lookups, files and the operator's requests when all others are in use.
const KEPT_DESCRIPTORS: u64 = 64;

/// Whether so new a descriptor may be a flow's, a TCP forward's, a user's or an unauthenticated sender's: the kernel gives the
/// lowest free number, so a high one says that nearly all are in use.
///
/// # Errors
/// `EMFILE` if it may not; the kernel's.
pub fn leaves_descriptors(new: BorrowedFd<'_>) -> io::Result<()> {
    let (most, _hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let kept = KEPT_DESCRIPTORS.min(most / 8);
    let number = u64::try_from(new.as_raw_fd()).unwrap_or(0);
    if number < most - kept { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EMFILE)) }
}

/// The error of a process that has no descriptor left.
#[must_use]
pub fn out_of_descriptors() -> io::Error {
    io::Error::from_raw_os_error(libc::EMFILE)
}

/// The number of ports that the kernel has for sockets that ask for none, all programs of the host together.
#[must_use]
pub fn ephemeral_ports() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut bounds = text.split_whitespace().map(str::parse::<usize>);
    let (Some(Ok(first)), Some(Ok(last))) = (bounds.next(), bounds.next()) else { return None };
    last.checked_sub(first).map(|between| between + 1)
}

/// Whether the process, or the whole host, had no descriptor left.
#[must_use]
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Whether the kernel had no port, or no memory, left for a socket.
#[must_use]
pub fn is_out_of_resources(error: &io::Error) -> bool {
    // EAGAIN is bind(2)'s answer, and EADDRNOTAVAIL connect(2)'s, when all ports are in use.
    let used_up = [libc::EADDRNOTAVAIL, libc::EADDRINUSE, libc::EAGAIN, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| used_up.contains(&code))
}

/// Keeps this process's memory, keys included, from everybody but root: no core file, and no debugger of the same user.
///
/// For users other than root its files in `/proc` belong to root from then on; what we read of our own there, descriptors
/// included, the kernel lets a process read all the same.
///
/// # Errors
/// The kernel's, e.g. `PermissionDenied` where a sandbox forbids it; the other half is in effect if only one is refused.
pub fn hide_memory() -> io::Result<()> {
    let core = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    // Also where cores go to a program: that gets them whatever the limit says.
    set_dumpable(false)?;
    Ok(core?)
}

/// Sends SIGHUP to a process.
///
/// # Errors
/// ESRCH if there is no such process, `PermissionDenied` if it is not ours.
pub fn hang_up(pid: i32) -> io::Result<()> {
    Ok(kill(Pid::from_raw(pid), Signal::SIGHUP)?)
}

/// Kills a process group, which the process `leader` leads.
///
/// # Errors
/// ESRCH if there is no such group, `PermissionDenied` if none of its processes is ours.
pub fn kill_group(leader: u32) -> io::Result<()> {
    let leader = i32::try_from(leader).map_err(|_| io::Error::from_raw_os_error(libc::ESRCH))?;
    Ok(killpg(Pid::from_raw(leader), Signal::SIGKILL)?)
}

/// Whether standard error is the stream of systemd's journal that `announced`, $JOURNAL_STREAM, names: `device:inode`.
#[must_use]
pub fn logs_to_journal(announced: &str) -> bool {
    let Ok(stderr) = io::stderr().as_fd().try_clone_to_owned() else { return false };
    let Ok(metadata) = File::from(stderr).metadata() else { return false };
    announced == format!("{}:{}", metadata.dev(), metadata.ino())
}

/// The open files of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// The number of files that are open.
    pub open: u64,
    /// The number of files that may be open.
    pub limit: u64,
}

/// Counts the open files of this process.
///
/// # Errors
/// `NotFound` where `/proc` is not mounted.
pub fn descriptors() -> io::Result<Descriptors> {
    // The listing holds a descriptor of its own while it counts.
    let open = std::fs::read_dir("/proc/self/fd")?.count().saturating_sub(1);
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(Descriptors { open: open as u64, limit })
}

/// The kernel's identifier of this boot of the machine: 36 characters and a line feed.
///
/// # Errors
/// `NotFound` where `/proc` is not mounted.
pub fn boot_id() -> io::Result<Vec<u8>> {
    std::fs::read("/proc/sys/kernel/random/boot_id")
}

/// CPUs that this process may use, by its affinity and its CPU quota; 1 when the kernel does not say.
#[must_use]
pub fn available_cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// Keeps the calling thread on one of the CPUs that it may use now: the one with this index, modulo their number.
///
/// # Errors
/// `Unsupported` if the kernel names no CPU that it may use; else the kernel's, e.g. `PermissionDenied` where a
/// sandbox forbids it.
pub fn pin_to_cpu(index: usize) -> io::Result<()> {
    let current = Pid::from_raw(0);
    let allowed = sched_getaffinity(current)?;
    let cpus: Vec<usize> =
        (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).is_ok_and(|set| set)).collect();
    let cpu = index.checked_rem(cpus.len()).and_then(|index| cpus.get(index));
    let mut only = CpuSet::new();
    only.set(*cpu.ok_or(io::ErrorKind::Unsupported)?)?;
    sched_setaffinity(current, &only)?;
    Ok(())
}

/// Asks the scheduler to let the calling thread run soon after it is woken, in slices of 100 µs: the kernel's usual 3 ms of
/// whoever runs are what a packet waits for on a busy CPU (Linux 6.12; older kernels take no notice). Its share of the CPU stays
/// what it was. Says whether the thread's policy is one that has slices.
///
/// # Errors
/// The kernel's, e.g. `PermissionDenied` where a sandbox forbids it.
pub fn wake_soon() -> io::Result<bool> {
    const SLICE_NANOS: u64 = 100_000;
    sys::set_time_slice(SLICE_NANOS)
}

/// Buffers that the kernel dropped at `socket` because its receive queue was full; 0 before Linux 4.12, which does not say.
#[must_use]
pub fn kernel_drops(socket: BorrowedFd<'_>) -> u64 {
    sys::receive_queue(socket).map_or(0, |(_, drops)| u64::from(drops))
}

/// Free bytes at the end of an arena.
const MOST_AT_END: i32 = 128 << 10;

/// Memory that was freed and that the C library keeps for later; glibc gives back by itself little but the end of its first arena.
#[derive(Debug, Default)]
pub struct FreedMemory {
    /// The bytes that were free and stayed after the last time that pages were given back, or the least since.
    kept: u32,
}

impl FreedMemory {
    /// The bytes that come together before they are given back.
    pub const LEAST: u32 = 1 << 20;

    /// Has the C library keep no more than [`MOST_AT_END`] bytes that are free at the end of an arena, to which
    /// [`FreedMemory::give_back`] does not reach. By default glibc keeps there twice the largest block that was ever freed, up to 64 MiB. Blocks
    /// of 128 KiB or more are then always mapped on their own; the packet path of IP packets allocates none (strace beside a TCP stream of 4.6 Gbit/s).
    pub fn keep_little() {
        sys::keep_at_end(MOST_AT_END);
    }

    /// Gives pages back to the kernel if [`FreedMemory::LEAST`] bytes more than before are free; says whether it did. With musl there is
    /// nothing to do.
    pub fn give_back(&mut self) -> bool {
        let Some(free) = sys::freed_bytes() else { return false };
        if !self.is_due(free) {
            return false;
        }
        sys::give_back_freed();
        // Of pages that were given back the library says that they are free, too.
        self.kept = sys::freed_bytes().unwrap_or(0);
        true
    }

    fn is_due(&mut self, free: u32) -> bool {
        // What was free was used again since.
        self.kept = self.kept.min(free);
        free - self.kept > Self::LEAST
    }
}

/// CPU time that this process has used, in user space and in the kernel; zero if the kernel does not say.
#[must_use]
pub fn cpu_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    [usage.user_time(), usage.system_time()]
        .map(|time| {
            let microseconds = time.tv_sec().saturating_mul(1_000_000).saturating_add(time.tv_usec());
            Duration::from_micros(u64::try_from(microseconds).unwrap_or(0))
        })
        .iter()
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_is_given_back_once_for_each_time_that_much_is_freed() {
        let mut freed = FreedMemory::default();
        let much = FreedMemory::LEAST + 1;
        assert!(!freed.is_due(much - 1) && freed.is_due(much));
        freed.kept = 100 * much;
        assert!(!freed.is_due(100 * much));
        // It was taken, and is free again.
        assert!(!freed.is_due(98 * much) && freed.is_due(100 * much));
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn memory_that_was_freed_between_what_is_in_use_goes_back_to_the_kernel() {
        const BLOCKS: usize = 8_192;
        let resident = || -> usize {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4_096
        };
        let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| vec![1; 16 << 10]).collect();
        // Every 64th stays, so that no arena ends with what is free.
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 64 == 0
        });
        let before = resident();
        assert!(FreedMemory::default().give_back());
        let given_back = before.saturating_sub(resident());
        // Other tests of the process allocate meanwhile.
        assert!(
            given_back > BLOCKS * (16 << 10) / 2,
            "{given_back} of {before} bytes; {} stay",
            blocks.len()
        );
    }

    #[test]
    fn a_thread_is_pinned_to_the_cpus_in_turn() {
        let cpus = |set: &CpuSet| -> Vec<_> {
            (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap()).collect()
        };
        let allowed = cpus(&sched_getaffinity(Pid::from_raw(0)).unwrap());
        assert!(available_cpus() <= allowed.len());
        for index in 0..=allowed.len() {
            let pinned = thread::spawn(move || {
                pin_to_cpu(index).unwrap();
                sched_getaffinity(Pid::from_raw(0)).unwrap()
            });
            assert_eq!(cpus(&pinned.join().unwrap()), [allowed[index % allowed.len()]]);
        }
    }

    #[test]
    fn a_thread_keeps_its_priority_when_it_asks_to_be_woken_soon() {
        let nice = |thread: &str| -> i32 {
            let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).unwrap();
            let after_name = stat.rsplit_once(") ").unwrap().1;
            after_name.split(' ').nth(16).unwrap().parse().unwrap()
        };
        let before = nice("self");
        assert!(thread::spawn(move || wake_soon().unwrap() && nice("thread-self") == before).join().unwrap());
    }

    #[test]
    fn the_limit_is_raised_and_never_lowered() {
        let (before, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert!(raise_descriptor_limit(1).unwrap() >= before);
        assert!(raise_descriptor_limit(before + 1).unwrap() >= before);
    }
}

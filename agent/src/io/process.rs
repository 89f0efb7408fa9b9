//! This process and its sockets, as the kernel knows them.

use std::{io, os::fd::BorrowedFd, time::Duration};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};

/// Raises the limit on open files to `wanted`, or as far as the hard limit allows; returns the limit that holds.
///
/// # Errors
/// The kernel's.
pub fn raise_descriptor_limit(wanted: u64) -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft >= wanted {
        return Ok(soft);
    }
    // Root may raise the hard limit too; others may not, and get what there is.
    if hard < wanted && setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_ok() {
        return Ok(wanted);
    }
    let raised = wanted.min(hard);
    setrlimit(Resource::RLIMIT_NOFILE, raised, hard)?;
    Ok(raised)
}

/// Buffers that the kernel dropped at `socket` because its receive queue was full; 0 before Linux 4.12, which does not say.
#[must_use]
pub fn kernel_drops(socket: BorrowedFd<'_>) -> u64 {
    super::sys::drops(socket).map_or(0, u64::from)
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
    fn the_limit_is_raised_and_never_lowered() {
        let (before, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(raise_descriptor_limit(1).unwrap(), before);
        assert!(raise_descriptor_limit(before + 1).unwrap() >= before);
    }
}

//! This process and its sockets, as the kernel knows them.

use std::{io, os::fd::BorrowedFd};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

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

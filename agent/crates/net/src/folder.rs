//! Files in a folder that another user may own: made private, and given to that user.

use std::{
    fs::{DirBuilder, File, Metadata, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, fchown},
    path::Path,
};

use base::files;

/// Makes a folder with mode 0700 below one that exists, whose owner gets it, and says whether it was missing: a mistyped
/// path makes no tree.
///
/// # Errors
/// The kernel's, e.g. `NotFound` without the folder above it, or `PermissionDenied`; an existing folder is no error.
pub fn make(path: &Path) -> io::Result<bool> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => return Err(error),
    }
    let parent =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let mut options = OpenOptions::new();
    let made = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY).open(path)?;
    give(&made, &std::fs::metadata(parent)?)?;
    Ok(true)
}

/// Makes a file with mode 0600, for writing, and gives it to the owner of its `folder`. What bears the name stays, a
/// symbolic link too.
///
/// # Errors
/// `AlreadyExists` if anything bears the name; else the kernel's, e.g. `PermissionDenied` or `StorageFull`.
pub fn create_file(path: &Path, folder: &Metadata) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    give(&file, folder)?;
    Ok(file)
}

/// Opens a file to lock it, and makes it if it is missing; never follows a symbolic link, nor waits for a pipe.
///
/// # Errors
/// The kernel's, e.g. `PermissionDenied`, or ELOOP for a symbolic link.
pub fn lock_file(path: &Path, folder: &Metadata) -> io::Result<File> {
    match create_file(path, folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made,
    }
    // One that was there is not given away: it may be a link to what the folder's owner must not have.
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Whether a running agent has taken the folder for its used knocks.
///
/// # Errors
/// The kernel's, e.g. `NotFound` or `PermissionDenied`: then nobody knows.
pub fn is_taken(path: &Path) -> io::Result<bool> {
    match files::open_folder(path)?.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Root may make what another user must use.
fn give(file: &File, to: &Metadata) -> io::Result<()> {
    let ours = file.metadata()?;
    if (to.uid(), to.gid()) != (ours.uid(), ours.gid()) {
        fchown(file, Some(to.uid()), Some(to.gid()))?;
    }
    Ok(())
}

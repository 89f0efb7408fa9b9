//! The files of a new agent: all of them are written, or none is.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use gate::identity::{Identity, IdentityError, SecretError};

/// The files to write, with their contents.
pub(super) struct New<'a> {
    /// The path of the configuration file.
    pub(super) config: &'a Path,
    pub(super) text: &'a str,
    /// The key and its file, unless it is there.
    pub(super) key: Option<(&'a Path, &'a Identity)>,
    /// Who may read the configuration, if root writes it.
    pub(super) group: Option<u32>,
}

/// The reason why nothing was written.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    #[error("{} exists, and a configuration is never overwritten (remedy: edit it, move it away, or name another file with --config)", .0.display())]
    Exists(PathBuf),
    #[error("{} cannot be written: {cause} (remedy: {remedy})", path.display())]
    Refused { path: PathBuf, cause: io::Error, remedy: &'static str },
    #[error("{cause} (remedy: {})", cause.remedy())]
    Key { cause: IdentityError },
}

/// Checks that nothing bears the name `config`, a symbolic link included.
pub(super) fn is_free(config: &Path) -> Result<(), WriteError> {
    match fs::symlink_metadata(config) {
        Ok(_) => Err(WriteError::Exists(config.to_owned())),
        Err(_) => Ok(()),
    }
}

/// Writes them; the folder is made where only it is missing, so that a mistyped path makes no tree.
pub(super) fn write(new: &New<'_>) -> Result<(), WriteError> {
    // Dropped on the way, it takes back what was made.
    let mut made = Made::default();
    let folder = folder_of(new.config);
    let refused = |path: &Path, cause: io::Error| {
        let is = |kinds: &[io::ErrorKind]| kinds.contains(&cause.kind());
        let remedy = if is(&[io::ErrorKind::NotFound]) {
            "make its folder, or name another file with --config"
        } else if is(&[io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded]) {
            "make room on its file system, or name a file elsewhere with --config"
        } else if is(&[io::ErrorKind::ReadOnlyFilesystem]) {
            "have its file system writable, or name a file elsewhere with --config"
        } else {
            "do it as root, or name a file in a folder of yours with --config"
        };
        WriteError::Refused { path: path.to_owned(), cause, remedy }
    };
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => {
            made.0.push(folder.to_owned());
            let opened = File::open(folder).and_then(|opened| share(&opened, new.group, 0o750));
            opened.map_err(|cause| refused(folder, cause))?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(refused(folder, error)),
    }
    if let Some((path, identity)) = new.key {
        match identity.write_new(path) {
            Ok(()) => made.0.push(path.to_owned()),
            Err(IdentityError::Secret(SecretError::Write { path, cause })) => {
                // The file may be there, without what belongs into it.
                made.0.push(path.clone());
                return Err(refused(&path, cause));
            }
            Err(error) => return Err(WriteError::Key { cause: error }),
        }
    }
    let mut options = OpenOptions::new();
    let mut file = match options.write(true).create_new(true).mode(0o600).open(new.config) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(WriteError::Exists(new.config.to_owned()));
        }
        Err(error) => return Err(refused(new.config, error)),
    };
    made.0.push(new.config.to_owned());
    let written = file.write_all(new.text.as_bytes()).and_then(|()| share(&file, new.group, 0o640));
    written.and_then(|()| file.sync_all()).map_err(|cause| refused(new.config, cause))?;
    made.0.clear();
    Ok(())
}

/// Lets the group read what was just made; only root can give it to a group that it is not in.
pub(super) fn share(made: &File, group: Option<u32>, mode: u32) -> io::Result<()> {
    if made.metadata()?.uid() == 0 && group.is_some() {
        fchown(made, None, group)?;
    }
    made.set_permissions(Permissions::from_mode(mode))
}

/// What was made so far, in order; it is removed when this is dropped.
#[derive(Default)]
struct Made(Vec<PathBuf>);

impl Drop for Made {
    fn drop(&mut self) {
        for path in self.0.drain(..).rev() {
            // A file or a folder. Whatever cannot be removed could not be told either: the first failure is what is reported.
            fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).ok();
        }
    }
}

/// The folder of a file; the parent of a bare name is the current folder.
pub(in crate::cli) fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn all_is_written_with_the_right_modes() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("culvert");
        let (config, key) = (inner.join("agent.toml"), inner.join("identity.key"));
        let identity = Identity::generate().unwrap();
        let new = New { config: &config, text: "x = 1\n", key: Some((&key, &identity)), group: None };
        write(&new).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!([mode(&inner), mode(&config), mode(&key)], [0o750, 0o640, 0o600]);
        assert_eq!(fs::read_to_string(&config).unwrap(), "x = 1\n");
        assert_eq!(Identity::load(&key).unwrap().public_key(), identity.public_key());
        assert!(matches!(is_free(&config), Err(WriteError::Exists(_))));
    }

    #[test]
    fn what_root_writes_is_for_the_group_of_the_service_but_the_key() {
        const GROUP: u32 = 65_534;
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("culvert");
        let (config, key) = (inner.join("agent.toml"), inner.join("identity.key"));
        let identity = Identity::generate().unwrap();
        let group = Some(GROUP);
        write(&New { config: &config, text: "", key: Some((&key, &identity)), group }).unwrap();
        let gid = |path: &Path| fs::metadata(path).unwrap().gid();
        let ours = fs::metadata(folder.path()).unwrap();
        // Who is not root keeps the group that he has.
        let expected = if ours.uid() == 0 { GROUP } else { ours.gid() };
        assert_eq!([gid(&inner), gid(&config), gid(&key)], [expected, expected, ours.gid()]);
    }

    #[test]
    fn what_was_made_is_taken_back_when_the_rest_fails() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("culvert");
        let key = inner.join("identity.key");
        // A name that no file can have: the key is written before.
        let config = inner.join("x".repeat(300));
        let identity = Identity::generate().unwrap();
        let new = New { config: &config, text: "", key: Some((&key, &identity)), group: None };
        assert!(matches!(write(&new), Err(WriteError::Refused { .. })));
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn what_was_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (config, key) = (folder.path().join("agent.toml"), folder.path().join("identity.key"));
        let identity = Identity::generate().unwrap();
        fs::write(&config, "mine").unwrap();
        let new = New { config: &config, text: "", key: Some((&key, &identity)), group: None };
        assert!(matches!(write(&new), Err(WriteError::Exists(_))));
        assert_eq!(names(folder.path()), ["agent.toml"]);
        assert_eq!(fs::read_to_string(&config).unwrap(), "mine");
        // A key that appeared meanwhile is nobody's to overwrite, or to remove.
        fs::rename(&config, &key).unwrap();
        assert!(matches!(
            write(&new),
            Err(WriteError::Key { cause: IdentityError::Secret(SecretError::Exists { .. }) })
        ));
        assert_eq!(fs::read_to_string(&key).unwrap(), "mine");
        assert_eq!(names(folder.path()), ["identity.key"]);
    }

    #[test]
    fn a_mistyped_path_makes_no_tree() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("a/b/agent.toml");
        let new = New { config: &config, text: "", key: None, group: None };
        let error = write(&new).unwrap_err().to_string();
        assert!(error.contains("remedy: make its folder"), "{error}");
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

//! Where the private key is when systemd hands it over.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The variable that names the folder of a service's credentials (systemd.exec(5), `LoadCredential=`).
const VARIABLE: &str = "CREDENTIALS_DIRECTORY";

/// The file to read the key from: the credential that is named like `key_file`, if this process was given one; else
/// `key_file` itself, which a service's user may not be able to read.
pub(super) fn of(key_file: &Path) -> PathBuf {
    among(env::var_os(VARIABLE), key_file)
}

fn among(folder: Option<OsString>, key_file: &Path) -> PathBuf {
    let folder = folder.filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let credential = folder.zip(key_file.file_name()).map(|(folder, name)| folder.join(name));
    credential.filter(|credential| credential.exists()).unwrap_or_else(|| key_file.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_credential_of_that_name_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        let at = |key_file: &str| among(Some(folder.path().into()), Path::new(key_file));
        assert_eq!(
            at("/etc/culvert/identity.key"),
            Path::new("/etc/culvert/identity.key"),
            "there is none yet"
        );
        let credential = folder.path().join("identity.key");
        fs::write(&credential, "").unwrap();
        assert_eq!(at("/etc/culvert/identity.key"), credential);
        assert_eq!(at("/etc/culvert/other.key"), Path::new("/etc/culvert/other.key"));
        assert_eq!(at("/etc/culvert/.."), Path::new("/etc/culvert/.."));
        for none in [None, Some(OsString::new())] {
            assert_eq!(among(none, Path::new("identity.key")), Path::new("identity.key"));
        }
    }
}

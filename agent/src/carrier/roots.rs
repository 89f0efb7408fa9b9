//! Whose certificates count for the web server at a URL: those of a file, or the system's.

use std::{
    env, io,
    path::{Path, PathBuf},
};

use base::files;
use config::MOST_CA_BYTES;
use tokio_rustls::rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

/// Where systems have the certificates that they trust: Debian, Alpine, Arch, NixOS and OpenWrt; Fedora; openSUSE; and others.
const SYSTEM_FILES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The certificates of `file`, or those that the system trusts; `SSL_CERT_FILE` names another file for these.
///
/// # Errors
/// The file cannot be read or has no certificate, or the system has no such file.
pub(super) fn load(file: Option<&Path>) -> io::Result<RootCertStore> {
    let file = file.map(Path::to_path_buf).or_else(|| env::var_os("SSL_CERT_FILE").map(PathBuf::from));
    let file = file.or_else(|| SYSTEM_FILES.map(PathBuf::from).into_iter().find(|file| file.exists()));
    let file = file.ok_or_else(|| io::Error::other("this system has no file of certificates"))?;
    let named = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", file.display()));
    let text = files::read(&file, MOST_CA_BYTES).map_err(|error| named(&error))?;
    let mut store = RootCertStore::empty();
    // The system's may have some that nobody can use.
    let (taken, _ignored) =
        store.add_parsable_certificates(CertificateDer::pem_slice_iter(&text).filter_map(Result::ok));
    if taken == 0 { Err(named(&"has no certificate")) } else { Ok(store) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_without_certificates_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.pem");
        let missing = load(Some(&file)).unwrap_err().to_string();
        assert!(missing.contains("ca.pem"), "{missing}");
        fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        let empty = load(Some(&file)).unwrap_err().to_string();
        assert!(empty.contains("ca.pem: has no certificate"), "{empty}");
    }
}

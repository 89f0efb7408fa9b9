//! A real HTTP/3 site that no one here wrote: hypercorn, which runs on aioquic.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::Stdio,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    place::Place,
    ports,
    process::Running,
};
use rustls::pki_types::CertificateDer;
use tempfile::TempDir;

/// What its certificate says.
pub(crate) const NAME: &str = "site.example";

pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/namespace/strangers");

/// A certificate that signs itself, and a folder with it and its key.
#[derive(Debug)]
pub(crate) struct Certificate {
    folder: TempDir,
    pub(crate) der: CertificateDer<'static>,
}

impl Certificate {
    pub(crate) fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(vec![NAME.to_owned()]).unwrap();
        let (der, folder) = (made.cert.der().clone(), tempfile::tempdir().unwrap());
        fs::write(folder.path().join("cert.pem"), pem("CERTIFICATE", &der)).unwrap();
        let key = made.signing_key.serialize_der();
        fs::write(folder.path().join("key.pem"), pem("PRIVATE KEY", &key)).unwrap();
        Self { folder, der }
    }

    /// The certificate's file.
    pub(crate) fn file(&self) -> String {
        self.folder.path().join("cert.pem").to_str().unwrap().to_owned()
    }
}

fn pem(what: &str, der: &[u8]) -> String {
    let text = data_encoding::BASE64.encode(der);
    let lines: Vec<&str> = text.as_bytes().chunks(64).map(|line| str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {what}-----\n{}\n-----END {what}-----\n", lines.join("\n"))
}

/// A running site; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) address: SocketAddr,
    _process: Running,
}

impl Site {
    /// Starts it on a loopback address at `place`, and waits until it listens.
    #[track_caller]
    pub(crate) fn start(python: &Path, place: &Place, certificate: &Certificate) -> Self {
        let [quic, tcp] = [(); 2].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
        let log = certificate.folder.path().join("log");
        let mut command = place.command(python);
        // In this process, not in a child, which would outlive it.
        command.args(["-m", "hypercorn", "--workers", "0", "--quic-bind", &quic.to_string()]);
        command.args([
            "--bind",
            &tcp.to_string(),
            "--certfile",
            "cert.pem",
            "--keyfile",
            "key.pem",
            "decoy_site:app",
        ]);
        command.current_dir(certificate.folder.path()).env("PYTHONPATH", FOLDER);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).unwrap());
        let mut process = Running::start("hypercorn", &mut command);
        clock::until("hypercorn listens", PATIENCE, || {
            let said = || fs::read_to_string(&log).unwrap_or_default();
            assert!(process.ended().is_none(), "hypercorn ended: {}", said());
            let listens = ports::udp_ports_of(process.pid()).contains(&quic.port());
            if listens { Ok(()) } else { Err(said()) }
        });
        Self { address: quic, _process: process }
    }
}
